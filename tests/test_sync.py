"""The forms for scripts without a loop."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import SpecError
from elastic_aio.multiprocessing import ProcessExitedException, ProcessRaisedException
from elastic_aio.sync import SyncProcessContext, spawn, start_context, start_processes
from tests.support import functions
from tests.support.children import noted, until_sync
from tests.support.cli import run_program, running
from tests.support.leaks import alive
from tests.support.start_methods import METHODS


@pytest.mark.parametrize("method", METHODS)
def test_a_group(method: Any) -> None:
    """Started, waited for, and left."""
    args = {0: (1,), 1: (2,)}
    group = start_processes("g", functions.report, args, {0: {}, 1: {}}, start_method=method)
    with group:
        assert sorted(group.pids()) == [0, 1]
        result = group.wait()
    assert result is not None
    assert dict(result.return_values) == {0: ((1,), None, None), 1: ((2,), None, None)}


def test_a_group_that_is_closed() -> None:
    """Waits may be short here too."""
    with start_processes("g", ["sleep", "99"], {0: ()}, {0: {}}) as group:
        assert group.wait(0.05) is None
        group.close()
        result = group.wait()
    assert result is not None
    assert result.failures[0].signal_name() == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_are_joined(method: Any, tmp_path: Path) -> None:
    """At once, or step by step."""
    start_context(functions.indexed, (str(tmp_path),), 2, start_method=method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    context = start_context(functions.indexed_sleep, (0.1,), 2, join=False, start_method=method)
    assert context is not None
    joined(context)
    assert context.join()
    context.close()


def joined(context: SyncProcessContext) -> None:
    while not context.join():
        pass


def test_failures_are_raised() -> None:
    """From both forms."""
    with pytest.raises(ProcessRaisedException, match="boom"):
        spawn(functions.indexed_end, ("raise",), 2)
    context = spawn(functions.indexed_end, ("exit",), 2, join=False)
    assert context is not None
    with pytest.raises(ProcessExitedException, match="exit code 3"):
        joined(context)


def test_a_context_that_is_left() -> None:
    """What runs is stopped."""
    context = spawn(functions.indexed_end, ("raise",), 1, join=False)
    assert context is not None
    with context:
        (pid,) = context.pids()
        assert context.join(0.05) is False
        assert alive(pid)
    assert not alive(pid)
    assert spawn(functions.indexed_end, nprocs=0, join=False) is None


def test_refusals_leave_no_thread() -> None:
    """What cannot be started is said here, and nothing is left."""
    lock: Any = (one for one in "")
    with pytest.raises(SpecError, match="cannot be pickled"):
        spawn(functions.indexed, (lock,), 1, join=False)
    with pytest.raises(SpecError, match="cannot be pickled"):
        start_processes("g", functions.give, {0: (lock,)}, {0: {}}).__enter__()


def test_without_descriptors_the_error_is_raised() -> None:
    """The loop of the thread cannot be made; in a process of its own, which lacks them."""
    program = """
import resource, threading
from elastic_aio.sync import spawn, start_processes
group = start_processes("g", "true", {0: ()}, {0: {}})
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
for start in group.__enter__, lambda: spawn(print, nprocs=1, join=False):
    try:
        start()
    except OSError as error:
        print(error.strerror, threading.active_count())
"""
    ended = run_program([sys.executable, "-c", program])
    assert (ended.code, ended.out) == (0, "Too many open files 1\n" * 2)


async def test_in_a_loop_the_other_forms_are_right() -> None:
    """A joined spawn would block the loop."""
    with pytest.raises(RuntimeError, match="event loop is running"):
        spawn(functions.indexed, ("x",), 1)


def test_a_group_that_is_not_started() -> None:
    """The error says what is missing."""
    group = start_processes("g", "true", {0: ()}, {0: {}})
    for use in (group.wait, group.close):
        with pytest.raises(RuntimeError, match="use `with`"):
            use()


PROGRAM = """
import os, signal, sys, time
from elastic_aio.sync import spawn, start_processes
from tests.support import functions
form, notes = sys.argv[1], os.environ["NOTES"]
if __name__ == "__main__":
    if form == "own handler":
        signal.signal(signal.SIGTERM, lambda number, frame: print("own", number, flush=True))
    try:
        if form == "joined":
            spawn(functions.indexed_polite, (notes,), 2)
        elif form == "context":
            context = spawn(functions.indexed_polite, (notes,), 2, join=False)
            while not context.join():
                pass
        else:
            args = {0: (0, notes), 1: (1, notes)}
            with start_processes("g", functions.indexed_polite, args, {0: {}, 1: {}}) as group:
                while form == "elsewhere":
                    time.sleep(99)
                print(group.wait().is_failed(), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "number", "expected"),
    [
        ("group", signal.SIGTERM, (143, "")),
        ("elsewhere", signal.SIGTERM, (143, "")),
        ("group", signal.SIGINT, (0, "interrupted\n")),
        ("own handler", signal.SIGTERM, (0, "own 15\nFalse\n")),
        ("joined", signal.SIGTERM, (143, "")),
        ("joined", signal.SIGINT, (0, "interrupted\n")),
        ("context", signal.SIGTERM, (143, "")),
    ],
)
def test_a_signal_stops_the_processes_first(
    form: str, number: signal.Signals, expected: tuple[int, str], tmp_path: Path
) -> None:
    """By their plan; then it has its usual effect on the program."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with running([sys.executable, str(script), form], env={"NOTES": str(tmp_path)}) as program:
        pids = until_sync(noted(tmp_path, 2))
        program.send(number)
        assert (program.wait(), program.out) == expected, program.err
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    assert not any(map(alive, pids))
