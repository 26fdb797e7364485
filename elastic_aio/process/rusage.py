"""The resource usage of a child that has ended and that another part of the program reaps.

waitid(2) of the kernel has a fifth argument, which neither Python nor the C library passes
on: with WNOWAIT it reports the usage of a zombie and leaves it to be reaped.
"""

from __future__ import annotations

import os
import platform
from typing import Final

from elastic_aio.outcome import ResourceUsage

# The number of waitid(2).  Elsewhere the usage is not known.
_WAITID: Final = {"x86_64": 247, "aarch64": 95, "riscv64": 95, "ppc64le": 272, "s390x": 281}

# getrusage(2): two timevals, then 14 longs.  Each timeval is two longs on these machines.
_LONGS: Final = 18


def peek_usage(descriptor: int) -> ResourceUsage | None:
    """Return what the ended child of a pidfd has used; None if it is reaped, or runs.

    Reaps nothing.
    """
    number = _WAITID.get(platform.machine())
    if number is None:
        return None
    import ctypes  # takes milliseconds, and most loops do not need it

    fields = (ctypes.c_long * _LONGS)(-1)
    result = ctypes.CDLL(None).syscall(
        ctypes.c_long(number),
        ctypes.c_int(os.P_PIDFD),
        ctypes.c_int(descriptor),
        None,
        ctypes.c_int(os.WEXITED | os.WNOHANG | os.WNOWAIT),
        ctypes.byref(fields),
    )
    if result != 0 or fields[0] < 0:  # with WNOHANG a child that runs leaves all as it was
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
