"""System calls of a launcher's main thread from the exits of workers to the restarts, by strace."""

from __future__ import annotations

import re
from collections.abc import Iterable

_CALL = re.compile(r"(\w+)\((.*?)(?:\) += (-?\d+).*)?$")
_OF_PROCESS = re.compile(r'AT_FDCWD, "/proc/\d+/')
# How often they are made depends on how many iterations of the loop the events take.
_OF_LOOP = {"getpid", "epoll_wait", "recvfrom", "sendto"}
_WAITS = re.compile(r", [1-9]\d*$")
TIMED_OUT = "epoll_wait that timed out"
"""A wait that no event has ended, but the clock."""
_FAILED = "--- SIGCHLD {si_signo=SIGCHLD, si_code=CLD_EXITED,"


def calls_of_restarts(trace: Iterable[str], workers: int) -> list[list[str]]:
    """Return the calls from the failure of a worker to the start of the last one, by restart.

    Those that read files of processes are left out, and those of the event loop: how many
    processes a scan finds, and how many iterations it takes, depends on the host.  Waits that time
    out are `TIMED_OUT`.
    """
    restarts: list[list[str]] = []
    calls: list[str] | None = None
    started, process_files = 0, set[str]()
    for line in trace:
        if line.startswith(_FAILED) and "si_status=1," in line and calls is None:
            calls, started = [], 0
        match = _CALL.match(line)
        if match is None or calls is None:
            continue
        name, arguments, result = match.groups()
        descriptor = arguments.partition(",")[0]
        if name == "openat" and _OF_PROCESS.match(arguments):
            process_files.add(result)
        elif descriptor in process_files and name in ("read", "close"):
            process_files -= {descriptor} if name == "close" else set()
        elif name == "epoll_wait" and result == "0" and _WAITS.search(arguments):
            calls.append(TIMED_OUT)
        elif name not in _OF_LOOP:
            calls.append(name)
        started += name == "vfork"
        if started == workers:
            restarts.append(calls)
            calls = None
    return restarts
