"""The soft limit of open descriptors: enough for us, unchanged for the workers.

The limit is raised only when a job needs more than it allows, and then each worker
is started through util-linux's `prlimit`, or `sh` where there is none: it puts the old
limit back before it becomes the worker (same pid).  Setting it from outside after the
spawn would race with the worker's first instructions, and lowering it in this process
around each spawn would hit whatever other threads open meanwhile.
"""

from __future__ import annotations

import os
import resource
import shutil

from msgspec.structs import replace

from elastic_aio.errors import SurroundingsError
from elastic_aio.process.base import ChildPlan, check_program

__all__ = ["DescriptorLimit", "limit", "with_descriptor_limit"]

# What one worker takes: asyncio's pidfd and ours, and two logs that are followed.
_PER_WORKER = 4
# What the agent itself takes: the guardian, the roster, inotify, the console, and for
# a moment the log files of the worker that is being spawned and the spawn itself.
_BASE = 16
# Left to others in this process where the limit allows it.
_SPARE = 64


class DescriptorLimit:
    """This process's soft limit, raised while a job needs it.

    There is one limit for all jobs of a process, hence one instance: `limit`.  While
    any job has it raised, the workers of every job get the original one.
    """

    def __init__(self) -> None:
        """Leave the limit as it is."""
        self._original: int | None = None
        self._jobs = 0

    @property
    def original(self) -> int | None:
        """The soft limit that the workers shall get; None: the one in force."""
        return self._original

    def acquire(self, workers: int, each: int = _PER_WORKER) -> None:
        """Make room for a job of `workers`; `release` must follow.

        Args:
            workers: how many there will be.
            each: descriptors that one of them takes.

        Raises:
            SurroundingsError: the hard limit is too low.  A supervisor that runs out
                of descriptors half-way could not even see what it has to stop.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _wanted(workers * each, soft, hard)
        self._jobs += 1
        if wanted > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            if self._original is None:
                self._original = soft

    def release(self) -> None:
        """End a job's need; the last one puts the original limit back."""
        self._jobs -= 1
        if not self._jobs and self._original is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._original, hard))
            self._original = None


limit = DescriptorLimit()


def _wanted(descriptors: int, soft: int, hard: int) -> int:
    """Return the soft limit that workers with so many descriptors call for."""
    if soft == resource.RLIM_INFINITY:
        return soft
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = soft  # not even one is left
    needed = used + descriptors + _BASE
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise SurroundingsError(
            f"too few descriptors: this job takes about {needed} and the limit is {hard}"
            " (raise it with ulimit -n)"
        )
    wanted = needed + _SPARE
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def with_descriptor_limit(plan: ChildPlan, soft: int) -> ChildPlan:
    """Return a plan whose program sets the soft limit and then becomes the planned one.

    A forked worker sets it itself, first of all.

    Raises:
        SpawnError: the planned program cannot be executed.
    """
    if (call := plan.call) is not None:

        def limited() -> int:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _hard_limit()))
            return call()

        return replace(plan, call=limited)
    check_program(plan)
    return replace(plan, argv=_limited(plan.argv, soft))


def _hard_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def _limited(argv: tuple[str, ...], soft: int) -> tuple[str, ...]:
    if prlimit := shutil.which("prlimit"):
        return (prlimit, f"--nofile={soft}:", "--", *argv)
    # A shell exports a PWD that nobody has set; then it is taken out again.
    forget = "" if "PWD" in os.environ else "unset PWD; "
    return ("/bin/sh", "-c", f'{forget}ulimit -S -n "$0" && exec "$@"', str(soft), *argv)
