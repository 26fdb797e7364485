"""What processes leave behind, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

SESSION_VARIABLE = "ELASTIC_AIO_TEST_SESSION"


def open_descriptors() -> dict[int, str]:
    """Return the descriptors of this process and what they stand for."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists the folder
    return found


def own_children() -> set[int]:
    """Return the pids of our children, zombies included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # a thread that has just ended
    return pids


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] not in b"ZX"


def strays() -> dict[int, str]:
    """Return all live processes that this test session has started, ourselves excepted."""
    sign = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if sign in environment.split(b"\0") and int(name) != os.getpid() and alive(int(name)):
            found[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
