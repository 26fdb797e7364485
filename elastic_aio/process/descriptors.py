"""Descriptors of this process: how many it may have, and the standard streams of workers.

The soft limit (RLIMIT_NOFILE) is raised only while a job needs more than it allows.  Each worker is
then started through util-linux's `prlimit`, or `sh`, which restores the old limit and executes the
worker (same pid).  A limit set from outside after the spawn would race with the worker's first
instructions, and a lower one in this process around each spawn would make `open` fail in threads.
"""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from typing import ClassVar

from msgspec.structs import replace

from elastic_aio.errors import HostError
from elastic_aio.process import proc
from elastic_aio.process.children import ChildSpec, check_program

# Descriptors of the agent itself: guardian, session list, inotify, console, and for a
# moment the log files of the worker that is being spawned and the spawn's own.
_BASE = 16
# Of each further job, which has the guardian, its list and the console already.
_FURTHER = 8
# Left to the embedding program, if the hard limit allows it.
_SPARE = 64


class DescriptorLimit:
    """This process's soft limit, raised while a job needs it.

    `limit`, the only instance, adds up what the jobs of the process need.  While it is raised, the
    workers of every job get the original limit.
    """

    original: int | None = None
    """The soft limit for workers; None: the present limit."""
    _reserved = 0  # by all jobs
    _outside = 0  # known open descriptors of no job

    def reserve(self, workers: int, each: int, *, further: int = 0) -> int:
        """Raise the limit for a job, if need be; `release` must follow.

        Each worker takes `each` descriptors, the job `further`.  Returns how many are reserved.
        HostError: the hard limit is too low.  A supervisor without descriptors could not find the
        processes that it has to stop.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        own = _FURTHER if self._reserved else _BASE
        reserved = self._reserved + workers * each + own + further
        # At most: the other jobs may not have opened all that they have reserved.
        self._outside = max(self._outside, _count_open(soft) - self._reserved)
        needed = self._outside + reserved
        if hard != resource.RLIM_INFINITY and needed > hard:
            jobs = "this job takes" if not self._reserved else "the jobs of this program take"
            raise HostError(
                f"too few descriptors: {jobs} about {needed} and the limit is {hard}"
                " (raise it with ulimit -n)"
            )
        required = needed + _SPARE if hard == resource.RLIM_INFINITY else min(needed + _SPARE, hard)
        if soft != resource.RLIM_INFINITY and soft < required:
            resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard))
            if self.original is None:
                self.original = soft
        added = reserved - self._reserved
        self._reserved = reserved
        return added

    def release(self, reserved: int) -> None:
        """End a job's need; after the last job the original limit is restored."""
        self._reserved -= reserved
        if not self._reserved:
            self._outside = 0
            if self.original is not None:
                set_soft_limit(self.original)
                self.original = None


limit = DescriptorLimit()


def set_soft_limit(soft: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _count_open(soft: int) -> int:
    try:
        return len(proc.own_descriptors())
    except OSError:
        return soft  # none is left to list them


def with_descriptor_limit(spec: ChildSpec, soft: int | None) -> ChildSpec:
    """Return `spec` with a program that sets the soft limit and executes the original one.

    A forked worker sets the limit before its call.  None: the limit is not raised.  SpawnError: the
    original program cannot be executed.
    """
    if soft is None:
        return spec
    if (call := spec.call) is not None:

        def limited() -> int:
            set_soft_limit(soft)
            return call()

        return replace(spec, call=limited)
    check_program(spec)
    import shutil  # few programs raise the limit

    # A shell exports PWD even if it was not set.
    unset = "" if "PWD" in os.environ else "unset PWD; "
    wrapper = ["/bin/sh", "-c", f'{unset}ulimit -S -n "$0" && exec "$@"', str(soft)]
    if prlimit := shutil.which("prlimit"):
        wrapper = [prlimit, f"--nofile={soft}:", "--"]
    return replace(spec, argv=(*wrapper, *spec.argv))


class StandardStreams:
    """This process's standard streams, and `/dev/null`; must be closed.

    In a program that was started without standard streams, its next files, such as its event loop,
    get their numbers.  They have FD_CLOEXEC, by Python and libuv: a standard stream does not.
    """

    holder: ClassVar[StandardStreams | None] = None
    """Of which a worker has the terminal."""

    def __init__(self) -> None:
        """Open `/dev/null`, also as each closed standard stream, or raise OSError.

        A file of the job with such a number could not be passed on.
        """
        self._opened: list[int] = []
        while not self._opened or self._opened[-1] <= 2:
            self._opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        self.null = self._opened[-1]

    def __repr__(self) -> str:
        return f"<StandardStreams, /dev/null is {self.null}>"

    def inherited(self, number: int) -> int:
        """Return the standard stream of this number; `/dev/null` if it is closed."""
        try:
            return number if os.get_inheritable(number) else self.null
        except OSError:
            return self.null

    def take_terminal(self) -> int:
        """Return standard input if it is a terminal with this process in the foreground.

        Else, and while another job of this process has the terminal: `/dev/null`.  The taker, in a
        session of its own, can read without SIGTTIN.  `restore_terminal` must follow.
        """
        with suppress(OSError):  # no terminal of this session
            if _in_foreground() and self.holder in (None, self):
                import termios  # for a terminal only

                self._mode = termios.tcgetattr(0)
                StandardStreams.holder = self
                return self.inherited(0)
        return self.null

    def restore_terminal(self) -> None:
        """Give the terminal its mode again: the taker may have been killed in raw mode.

        In the background the mode is the shell's.  Idempotent.
        """
        if self.holder is self:
            import termios

            StandardStreams.holder = None
            with suppress(OSError, termios.error):  # it has hung up
                if _in_foreground():
                    termios.tcsetattr(0, termios.TCSANOW, self._mode)

    def close(self) -> None:
        """Close `/dev/null`, and restore the terminal.  Idempotent."""
        self.restore_terminal()
        while self._opened:
            os.close(self._opened.pop())


def _in_foreground() -> bool:
    return os.tcgetpgrp(0) == os.getpgrp()
