"""Exits of processes, by pidfd: no thread, no signal handler, no polling."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Container
from functools import partial
from resource import struct_rusage

from elastic_aio.aio import set_result_if_pending
from elastic_aio.outcome import ExitStatus, ResourceUsage
from elastic_aio.process import proc
from elastic_aio.process.adopted import subreaper
from elastic_aio.process.base import ChildExit

# How many descendants are watched at a time, by a descriptor each.
_WATCHES_MAX = 64


class PidfdWatch:
    """Calls back once when the process of a pidfd ends; owns the descriptor.

    The process need not be a child.  The callback runs on the loop in which the watch was
    created.
    """

    def __init__(self, descriptor: int, on_end: Callable[[], None]) -> None:
        """Watch `descriptor`, which this object closes, and call `on_end`."""
        self.descriptor = descriptor
        """The pidfd; -1 after the end of the process or `close`."""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._on_readable)

    def __repr__(self) -> str:
        return f"<PidfdWatch {'done' if self.descriptor < 0 else f'on {self.descriptor}'}>"

    def close(self) -> None:
        """End the watch: the callback does not run any more.  Idempotent."""
        if self.descriptor >= 0:
            self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def _on_readable(self) -> None:
        # Before the close: the callback may reap by the pidfd.
        try:
            self._on_end()
        finally:
            self.close()


def has_ended(descriptor: int) -> bool:
    """Return whether the process of a pidfd has ended, reaped or not; reaps nothing."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


class Watches:
    """The processes that one step has signalled; descendants are watched until they end.

    Attributes:
        leaders: those that were signalled; a pid suffices, it is not used until reaped.
        has_room: whether descendants can be watched now.
        foreground: identities of what the signalled shells wait for.
        is_blind: whether a process runs that was signalled and is not watched.
        is_short: whether a process was not signalled, for want of descriptors.
        readers: when readers of pipes were first seen without writers, by identity.
    """

    def __init__(self) -> None:
        self.leaders: set[int] = set()
        self.has_room = True
        self.foreground: set[tuple[int, int]] = set()
        self.is_blind = False
        self.is_short = False
        self.readers: dict[tuple[int, int], float] = {}
        self._signalled: set[tuple[int, int]] = set()
        self._watched: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._watches: list[PidfdWatch] = []

    def __enter__(self) -> Watches:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.close()

    def exits(self, pids: Container[int] | None = None) -> list[asyncio.Future[None]]:
        """Return a future for each exit that is awaited; with `pids`, for these only."""
        return [
            future
            for (pid, _), future in self._watched.items()
            if not future.done() and (pids is None or pid in pids)
        ]

    def was_signalled(self, process: proc.ProcEntry) -> bool:
        """Return whether `send` has signalled a process."""
        return process.identity in self._signalled

    def send(self, process: proc.ProcEntry, number: int) -> None:
        """Signal a process once, and watch it unless too many are watched already.

        The embedding program needs descriptors too.  Processes that are not watched are
        found again by the scan that follows the end of the watched ones.
        """
        identity = process.identity
        has_room = self.has_room and len(self.exits()) < _WATCHES_MAX
        self.is_blind |= not has_room and identity not in self._watched
        if identity in self._watched or (identity in self._signalled and not has_room):
            return
        try:
            descriptor = proc.open_pidfd(process)
        except OSError:
            self.is_short = True  # the next scan tries again
            return
        if descriptor is None:
            return
        if identity not in self._signalled:
            self._signalled.add(identity)
            proc.send(descriptor, number)
            if proc.needs_continue(process, number):
                proc.send(descriptor, signal.SIGCONT)
        if has_room:
            ended = asyncio.get_running_loop().create_future()
            self._watched[identity] = ended
            self._watches.append(
                PidfdWatch(descriptor, partial(set_result_if_pending, ended, None))
            )
        else:
            os.close(descriptor)


class PidfdChild:
    """A child with a pidfd (-1 after its end), through which signals are sent."""

    _is_reaped_here = True
    """Whether its pid cannot be another process's before this loop has noticed its end."""

    def __init__(
        self, pid: int, pidfd: int, reaped: asyncio.Future[ChildExit] | None = None
    ) -> None:
        """Begin; `reaped` is done when it is reaped, if that follows its exit."""
        self.pid = pid
        self._parent = os.getpid()
        self.exited: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()
        self.reaped = reaped or self.exited
        self.on_exit: Callable[[ChildExit], object] = bool  # no callback by default
        self._pidfd = pidfd
        subreaper.own.add(pid)
        self.reaped.add_done_callback(lambda _: subreaper.own.discard(pid))

    def __repr__(self) -> str:
        state = str(self.exited.result().status) if self.exited.done() else "running"
        return f"<Child {self.pid}: {state}>"

    @property
    def _is_copy(self) -> bool:
        """Whether this is a copy in a fork of the parent, which has no such child."""
        return os.getpid() != self._parent

    def set_exited(self, ended: ChildExit) -> None:
        """Note how it has ended."""
        on_exit, self.on_exit = self.on_exit, bool  # drops what it refers to
        self.exited.set_result(ended)
        on_exit(ended)

    def has_ended(self) -> bool:
        return self._pidfd < 0 or has_ended(self._pidfd)

    def send_signal(self, number: int) -> bool:
        # A zombie accepts signals too (kill(2)), so the check comes first.
        if self._is_copy or self.has_ended():
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            return self._is_reaped_here and _kill(self.pid, number)
        return True

    def release(self) -> None:
        """Do nothing: it does not wait."""


def _kill(pid: int, number: int) -> bool:
    """Send a signal where a seccomp filter of an older container runtime refuses pidfds."""
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def open_child_pidfd(pid: int) -> int:
    """Return a pidfd of a child; -1 if it is reaped already.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
    try:
        # The pid may even be another process's by now: only our own child can be waited for.
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, ChildProcessError):
            raise
        return -1
    return descriptor


class ReapedChild(PidfdChild):
    """A child that is watched by pidfd and reaped here, by `wait4`.

    The embedding program may reap it first: then its status is lost.
    """

    def __init__(self, pid: int, *, on_reaped: Callable[[int], object] = bool) -> None:
        """Watch a child that has just been started.

        Args:
            pid: the child.
            on_reaped: called with the return code (minus the signal's number if a
                signal ended it).

        Raises:
            OSError: no descriptor is left for the pidfd.
        """
        super().__init__(pid, open_child_pidfd(pid))
        self._on_reaped = on_reaped
        if self._pidfd < 0:
            self._end(255, ExitStatus(), None)
        else:
            PidfdWatch(self._pidfd, self._reap)

    def _reap(self) -> None:
        self._pidfd = -1  # the watch closes it
        usage = None
        try:
            _, wait_status, rusage = os.wait4(self.pid, 0)
        except ChildProcessError:
            status = ExitStatus()  # the embedding program reaps all children
            code = 255
        else:
            code = os.waitstatus_to_exitcode(wait_status)
            status = ExitStatus.from_returncode(code)
            usage = usage_of(rusage)
        self._end(code, status, usage)

    def _end(self, code: int, status: ExitStatus, usage: ResourceUsage | None) -> None:
        self._on_reaped(code)
        self.set_exited(ChildExit(status, time.monotonic(), usage))


def usage_of(rusage: struct_rusage) -> ResourceUsage:
    """Return the resource usage of a reaped process."""
    return ResourceUsage(
        user_s=rusage.ru_utime,
        system_s=rusage.ru_stime,
        max_rss_bytes=rusage.ru_maxrss * 1024,  # getrusage(2): kilobytes on Linux
        minor_faults=rusage.ru_minflt,
        major_faults=rusage.ru_majflt,
        voluntary_switches=rusage.ru_nvcsw,
        involuntary_switches=rusage.ru_nivcsw,
    )
