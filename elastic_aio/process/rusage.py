"""The resource usage of processes that run, or that another part of the program reaps.

The kernel's waitid(2) has a fifth argument, which neither Python nor the C library passes on: with
WNOWAIT it reports the usage of a zombie and leaves it to be reaped.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache
from resource import struct_rusage
from typing import Final

from msgspec.structs import replace

from elastic_aio.outcome import ResourceUsage
from elastic_aio.process import proc
from elastic_aio.status import JobStatus, WorkerStatus

# The number of waitid(2).  Elsewhere the usage is not known.
_WAITID: Final = {"x86_64": 247, "aarch64": 95, "riscv64": 95, "ppc64le": 272, "s390x": 281}

_USED: Final = (b"VmHWM", b"VmRSS", b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches")

# getrusage(2): two timevals, then 14 longs.  Each timeval is two longs on these machines.
_LONGS: Final = 18


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


def peek_usage(descriptor: int) -> ResourceUsage | None:
    """Return the usage of an ended child by its pidfd, unreaped; None if it runs or is reaped.

    The usage is not known either if no descriptor is left to load what reads it.
    """
    try:
        fields = _call_waitid()(descriptor)
    except OSError:
        return None
    if not fields or fields[0] < 0:  # with WNOHANG a child that runs leaves all as it was
        return None
    user, user_us, system, system_us, max_rss, _, _, _, minor, major = fields[:10]
    return ResourceUsage(
        user_s=user + user_us / 1e6,
        system_s=system + system_us / 1e6,
        max_rss_bytes=max_rss * 1024,  # getrusage(2): kilobytes on Linux
        minor_faults=minor,
        major_faults=major,
        voluntary_switches=fields[16],
        involuntary_switches=fields[17],
    )


@cache
def _call_waitid() -> Callable[[int], list[int]]:
    """Return a function that calls waitid(2) for a pidfd and returns the usage; none on failure."""
    import ctypes  # takes milliseconds, and most loops do not need it

    number = _WAITID.get(platform.machine())
    call, usage = ctypes.CDLL(None).syscall, ctypes.c_long * _LONGS
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT

    def waitid(descriptor: int) -> list[int]:
        fields = usage(-1)
        arguments = number, os.P_PIDFD, descriptor, None, options, ctypes.byref(fields)
        return [] if number is None or call(*arguments) else fields[:]

    return waitid


def read_usage(pid: int) -> tuple[ResourceUsage, int] | None:
    """Return the usage of a running process and its reaped children; None if it is gone.

    The number is the bytes of memory that are resident now.
    """
    try:
        stat = proc.read_stat(pid)
        named = proc.read_status(pid, *_USED)
    except OSError:
        return None  # no descriptor is left
    if not stat or not named:
        return None
    minor, child_minor, major, child_major, user, system, child_user, child_system = map(
        int, stat[7:15]
    )
    ticks = os.sysconf("SC_CLK_TCK")
    peak, resident = (int(named.get(key, b"0 kB").split()[0]) * 1024 for key in _USED[:2])
    usage = ResourceUsage(
        user_s=(user + child_user) / ticks,
        system_s=(system + child_system) / ticks,
        max_rss_bytes=peak,
        minor_faults=minor + child_minor,
        major_faults=major + child_major,
        voluntary_switches=int(named.get(b"voluntary_ctxt_switches", 0)),
        involuntary_switches=int(named.get(b"nonvoluntary_ctxt_switches", 0)),
    )
    return usage, resident


def with_usage(status: JobStatus) -> JobStatus:
    """Return a status with the usage of the workers that run on this host, of children too."""
    children = tuple(map(with_usage, status.children))
    workers = tuple(map(_worker_with_usage, status.workers))
    return replace(status, workers=workers, children=children)


def _worker_with_usage(worker: WorkerStatus) -> WorkerStatus:
    if worker.state != "running":
        return worker
    usage, resident = read_usage(worker.pid) or (None, None)
    return replace(worker, usage=usage, rss_bytes=resident)
