"""Stacks: read from their texts, and summarized in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.stacks import (
    StackDump,
    StackFrame,
    ThreadStack,
    WorkerStacks,
    parse_faulthandler,
    parse_py_spy,
    summarize,
)

LIBRARY = "/venv/lib/python3.12/site-packages"
ALL_REDUCE = [
    (f"{LIBRARY}/torch/distributed/distributed_c10d.py", 2810, "all_reduce"),
    (f"{LIBRARY}/torch/distributed/c10d_logger.py", 81, "wrapper"),
    ("/home/user/train.py", 20, "step"),
    ("/home/user/train.py", 40, "<module>"),
]
LOADER = [
    ("/usr/lib/python3.12/selectors.py", 398, "select"),
    ("/usr/lib/python3.12/multiprocessing/connection.py", 1136, "wait"),
    (f"{LIBRARY}/torch/utils/data/dataloader.py", 1131, "_try_get_data"),
    (f"{LIBRARY}/torch/utils/data/dataloader.py", 630, "__next__"),
    ("/home/user/train.py", 12, "main"),
    (f"{LIBRARY}/elastic_aio/worker/scripts.py", 40, "_run"),
]
BACKWARD = [
    (f"{LIBRARY}/torch/autograd/graph.py", 825, "_engine_run_backward"),
    (f"{LIBRARY}/torch/autograd/__init__.py", 347, "backward"),
    (f"{LIBRARY}/torch/_tensor.py", 581, "backward"),
    ("/home/user/train.py", 22, "<module>"),
]
SLEEP = [("/home/user/load.py", 7, "load"), ("/home/user/train.py", 3, "<module>")]
IMPORT = [
    ("<frozen importlib._bootstrap_external>", 1016, "get_code"),
    ("<frozen importlib._bootstrap>", 1331, "_find_and_load"),
    ("/home/user/train.py", 1, "<module>"),
]
ONLY_LIBRARY = [
    ("/usr/lib/python3.12/threading.py", 355, "wait"),
    ("/usr/lib/python3.12/runpy.py", 88, "_run_code"),
]


def worker(
    rank: int, frames: list[tuple[str, int, str]] | None = None, **fields: Any
) -> WorkerStacks:
    threads = () if frames is None else (ThreadStack("1", tuple(StackFrame(*f) for f in frames)),)
    return WorkerStacks(rank, rank, 100 + rank, "faulthandler", threads, **fields)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (ALL_REDUCE, "waits in all_reduce"),
        (LOADER, "is in DataLoader.__next__"),
        (BACKWARD, "is in backward"),
        (SLEEP, "is in load (load.py:7)"),
        (IMPORT, "is in _find_and_load"),
        (ONLY_LIBRARY, "waits in wait"),
    ],
)
def test_what_a_stack_says(frames: list[tuple[str, int, str]], text: str) -> None:
    """The library function that the program has called last, or its own function."""
    assert summarize([worker(3, frames)]) == f"rank 3 {text}"


def test_equal_workers_are_named_together() -> None:
    workers = [*(worker(rank, ALL_REDUCE) for rank in (0, 1, 2)), worker(3, LOADER)]
    assert summarize(workers) == "ranks 0-2 wait in all_reduce, rank 3 is in DataLoader.__next__"
    workers += [worker(5, SLEEP), worker(7, SLEEP), worker(8, SLEEP)]
    assert summarize(workers).endswith(", ranks 5, 7-8 are in load (load.py:7)")
    assert summarize([]) == "no worker was running"
    many = [worker(rank, [(f"/home/{rank}.py", 1, "f")]) for rank in range(100)]
    assert summarize(many).endswith(", rank 7 is in f (7.py:1), and 92 more groups of ranks")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"state": "S", "syscall": "futex", "wchan": "futex_do_wait"}, "in system call futex"),
        ({"state": "D", "wchan": "nfs_wait"}, "in system call nfs_wait"),
        ({"state": "T", "syscall": "read"}, "suspended"),
        ({"state": "R"}, "running"),
        ({}, "in an unknown place"),
    ],
)
def test_without_python_the_kernel_tells(fields: dict[str, Any], text: str) -> None:
    assert summarize([worker(0, **fields)]) == f"rank 0 is {text}"
    assert summarize([worker(0, **fields), worker(1, **fields)]) == f"ranks 0-1 are {text}"


def test_a_text_of_this_interpreter() -> None:
    """The main thread comes last, whichever thread writes."""
    code = (
        "import faulthandler, sys, threading\n"
        "started, done = threading.Event(), threading.Event()\n"
        "def other():\n"
        "    started.set(); done.wait()\n"
        "def outer():\n"
        "    faulthandler.dump_traceback(sys.stdout)\n"
        "threading.Thread(target=other).start(); started.wait()\n"
        "outer(); done.set()\n"
    )
    text = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    other, main = parse_faulthandler(text)
    assert [frame.function for frame in main.frames] == ["outer", "<module>"]
    assert main.frames[0] == StackFrame("<string>", 6, "outer")
    assert "other" in [frame.function for frame in other.frames]


def test_a_text_of_py_spy() -> None:
    def frame(name: str, file: str, line: int) -> dict[str, object]:
        return {"name": name, "filename": file, "module": None, "line": line, "is_entry": True}

    found = [  # as `py-spy dump --json` prints it
        {
            "pid": 12,
            "thread_id": 31,
            "thread_name": "MainThread",
            "active": True,
            "frames": [
                frame("Work.wait", "/usr/lib/python3.12/site-packages/torch/c10d.py", 2810),
                frame("<module>", "/home/user/train.py", 20),
            ],
        },
        {"thread_id": 32, "thread_name": None, "frames": [frame("wait", "threading.py", 355)]},
    ]
    other, main = parse_py_spy(json.dumps(found))
    assert other == ThreadStack("0x20", (StackFrame("threading.py", 355, "wait"),))
    assert [str(frame) for frame in main.frames] == [
        'File "/usr/lib/python3.12/site-packages/torch/c10d.py", line 2810 in Work.wait',
        'File "/home/user/train.py", line 20 in <module>',
    ]
    stacks = WorkerStacks(0, 0, 12, "py-spy", (other, main))
    assert summarize([stacks]) == "rank 0 waits in Work.wait"


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    """A worker's file has what its processes write."""
    parse_faulthandler(text)
    parse_py_spy(text)


def test_the_text_of_a_dump() -> None:
    threads = (ThreadStack("2", ()), ThreadStack("1", (StackFrame("/a.py", 3, "f"),)))
    first = WorkerStacks(
        0, 0, 7, "faulthandler", threads, "S", "do_wait", "wait4", ("x", "y"), "up"
    )
    second = WorkerStacks(1, 1, 8, state="R", note="no reason")
    dump = StackDump(0.0, 0, "because", (first, second))
    assert str(dump).split("\n") == [
        "because",
        "rank 0 is in f (a.py:3), rank 1 is running",
        "",
        "rank 0 (local rank 0, pid 7)",
        "  reported: up",
        "  main thread: state S, system call wait4, waits in do_wait",
        "    x",
        "    y",
        "  thread 2, most recent call first, faulthandler:",
        "    <no Python frame>",
        "  thread 1 (main), most recent call first, faulthandler:",
        '    File "/a.py", line 3 in f',
        "",
        "rank 1 (local rank 1, pid 8)",
        "  main thread: state R",
        "  no Python stacks: no reason",
        "",
    ]
