"""A child that is ours to reap: watched by pidfd, reaped by `wait4`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from resource import struct_rusage

from elastic_aio.outcome import ExitStatus, ResourceUsage
from elastic_aio.process import exits, sweep
from elastic_aio.process.base import Child, Exit

__all__ = ["ReapedChild", "story", "usage_of"]


class ReapedChild:
    """A child that nobody else reaps."""

    def __init__(self, pid: int, *, told: Callable[[int], None] | None = None) -> None:
        """Watch a child that has just been started.

        Args:
            pid: the child.
            told: called with the return code as `subprocess` writes it.

        Raises:
            OSError: no descriptor is left for the pidfd.
        """
        self._pid = pid
        self._told = told
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        # Not reaped before we do it, so the pid is still this child's.
        self._watch = exits.ExitWatch(os.pidfd_open(pid), self._reap)

    def __repr__(self) -> str:
        return story(self)

    @property
    def pid(self) -> int:
        return self._pid

    def has_ended(self) -> bool:
        return self._watch.descriptor < 0 or exits.has_ended(self._watch.descriptor)

    def send_signal(self, number: int) -> bool:
        return self._watch.descriptor >= 0 and sweep.send(self._watch.descriptor, number)

    def _reap(self) -> None:
        usage = None
        try:
            _, wait_status, used = os.wait4(self._pid, 0)
        except ChildProcessError:
            status = ExitStatus()  # the embedding program reaps all children
            code = 255
        else:
            code = os.waitstatus_to_exitcode(wait_status)
            status = ExitStatus.from_returncode(code)
            usage = usage_of(used)
        if self._told is not None:
            self._told(code)
        self.exited.set_result(Exit(status, time.monotonic(), usage))


def story(child: Child) -> str:
    """Tell a child in one line."""
    ended = str(child.exited.result().status) if child.exited.done() else "running"
    return f"<Child {child.pid}: {ended}>"


def usage_of(used: struct_rusage) -> ResourceUsage:
    """Read what the kernel says of a reaped process."""
    return ResourceUsage(
        user_s=used.ru_utime,
        system_s=used.ru_stime,
        max_rss_bytes=used.ru_maxrss * 1024,  # getrusage(2): kilobytes on Linux
        minor_faults=used.ru_minflt,
        major_faults=used.ru_majflt,
        voluntary_switches=used.ru_nvcsw,
        involuntary_switches=used.ru_nivcsw,
    )
