"""System calls of a start and of each further worker: numbers that no load of a host changes.

A commit that raises one of them says why.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cli import CLI, run_program
from tests.support.injuries import strace_missing

_FEW, _MANY = 4, 36

EACH_MAX = {
    "vfork": 1,
    # asyncio's and ours: signals do not race with its reaping.
    "pidfd_open": 2,
    # What is captured, and whether the exec has failed.
    "pipe2": 2,
    # The socket of the worker's messages, and who sends them.
    "socketpair": 1,
    "setsockopt": 1,
    # The entry in the session list: the start and the end.
    "pwrite64": 2,
    # Where a worker writes nothing and records no error.
    "mkdir": 0,
    "unlink": 0,
    "rmdir": 0,
    "ftruncate": 0,
    "newfstatat": 0,
}
"""Calls of the launcher for each further worker that exits at once."""

EACH_OTHERS_MAX = 38
"""All of them but those of which the number depends on the time at which a worker exits."""

_OF_LOOKS = {"openat", "read", "close", "getsid", "getpid", "epoll_wait", "waitid"}
"""Turns of the loop, and looks at adopted children."""

START_MAX = 255
"""Calls of a start and an end with two workers, but for those of imports and of scans of /proc, and
those that depend on the time at which a thread or a process is scheduled."""

_OF_IMPORTS_AND_SCANS = {
    "openat", "newfstatat", "fstat", "read", "lseek", "close", "ioctl", "getdents64", "readlink",
    "brk", "mmap", "munmap", "mprotect", "mremap", "madvise", "rt_sigaction", "getpid",
}  # fmt: skip
_OF_SCHEDULING = {"epoll_wait", "futex"}


def calls_of(workers: int, trace: Path) -> Counter[str]:
    """Return how often the launcher of some workers makes each system call."""
    if reason := strace_missing():
        pytest.skip(reason)
    strace = ["strace", "-qq", "--signal=none", "-o", str(trace)]
    job = ["run", f"--nproc-per-node={workers}", "--no-python", "/bin/true"]
    ended = run_program([*strace, *CLI, *job])
    assert ended.code == 0, ended.err
    return Counter(re.findall(r"^(\w+)\(", trace.read_text(), re.MULTILINE))


def test_a_worker_costs_few_system_calls(tmp_path: Path) -> None:
    few, many = (calls_of(count, tmp_path / str(count)) for count in (_FEW, _MANY))
    each = {name: (many[name] - few[name]) / (_MANY - _FEW) for name in many}
    assert each["vfork"] == 1
    found = {name: each.get(name, 0.0) for name in EACH_MAX}
    # A call of the whole job may be made a few times more or less often.
    assert all(found[name] <= limit + 0.3 for name, limit in EACH_MAX.items()), found
    others = {name: count for name, count in each.items() if count and name not in _OF_LOOKS}
    assert sum(others.values()) <= EACH_OTHERS_MAX, others


def test_a_start_costs_few_system_calls(tmp_path: Path) -> None:
    calls = calls_of(2, tmp_path / "trace")
    left_out = _OF_IMPORTS_AND_SCANS | _OF_SCHEDULING
    others = {name: count for name, count in calls.items() if name not in left_out}
    total = sum(others.values())
    assert total <= START_MAX, others
