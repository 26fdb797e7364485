"""What processes leave behind, read from /proc."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Collection
from pathlib import Path

SESSION_VARIABLE = "ELASTIC_AIO_TEST_SESSION"


def begin_session() -> None:
    """Mark all processes that are started from now on, daemons included, as this session's."""
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex


class Resources:
    """The descriptors, children, threads and pids at one moment, to compare with a later one.

    It is taken before every test, so it has to be cheap: of the other processes only the
    pids are listed, and `leaks` reads the environment only of those that have come since.
    """

    def __init__(self) -> None:
        self._descriptors = open_descriptors()
        self._children = own_children()
        self._threads = threading.active_count()
        self._pids = _all_pids()

    def leaks(self) -> dict[str, object]:
        """Return what has been added since and is still there, by its kind."""
        leaks: dict[str, object] = {
            "processes": leaked_processes(since=self._pids),
            "children": own_children() - self._children,
            "descriptors": {
                fd: target
                for fd, target in open_descriptors().items()
                if fd not in self._descriptors
            },
            "threads": max(threading.active_count() - self._threads, 0),
        }
        return {kind: leaked for kind, leaked in leaks.items() if leaked}


def open_descriptors() -> dict[int, str]:
    """Return the descriptors of this process and their targets."""
    targets = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return targets


def own_children() -> set[int]:
    """Return the pids of our children, zombies included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # a thread that has just ended
    return pids


def state_of(pid: int) -> str:
    """Return the state letter of a process (proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False


def leaked_processes(*, since: Collection[int] = ()) -> dict[int, str]:
    """Return the live processes of this test session, except ourselves and those of `since`."""
    return marked_processes(SESSION_VARIABLE, os.environ[SESSION_VARIABLE], since=since)


def marked_processes(name: str, value: str, *, since: Collection[int] = ()) -> dict[int, str]:
    """Return the commands of the live processes with a variable, ourselves left out."""
    mark = f"{name}={value}".encode()
    commands = {}
    for pid in _all_pids() - {os.getpid(), *since}:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it has ended, or is not ours
        if mark in environment.split(b"\0") and alive(pid):
            commands[pid] = command.replace(b"\0", b" ").decode(errors="replace")
    return commands


def _all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}
