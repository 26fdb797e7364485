"""Functions as workers, launched with every start method: all ways in which a call can end."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_aio import (
    Agent,
    Failure,
    HostError,
    JobFailed,
    JobState,
    JobStopped,
    LaunchResult,
    LaunchSpec,
    LogSpec,
    PreemptionSpec,
    SpecError,
    WorkerStarted,
    launch,
)
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import descriptors
from tests.support import functions
from tests.support.children import noted, until, until_sync
from tests.support.cli import run_program
from tests.support.leaks import alive, leaked_processes
from tests.support.start_methods import METHODS, MOSTLY_SPAWN

OFF = LogSpec(log_dir="/dev/null")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    """Each start method."""
    return request.param


def spec_of(function: Callable[..., Any], method: Any, *args: Any, **changes: Any) -> LaunchSpec:
    return LaunchSpec(function, args=args, start_method=method, **changes)


async def failed(spec: LaunchSpec) -> JobFailed:
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    return caught.value


@pytest.mark.slow
async def test_a_function_has_the_old_descriptor_limit(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that needs more raises it for itself only."""
    monkeypatch.setattr(descriptors, "_BASE", 300)
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, former[1]))
    try:
        result = await launch(spec_of(resource.getrlimit, method, resource.RLIMIT_NOFILE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
    assert result.return_values == {0: (200, former[1])}


# Function, arguments, value on success.
ENDS_WELL: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    (
        functions.give,
        (1, "two", [3.0, None], {"four": b"4"}),
        (1, "two", [3.0, None], {"four": b"4"}),
    ),
    (functions.give_rank, (), 0),
    (functions.give_nothing, (), None),
    (functions.give_bytes, (3_000_000,), bytes(3_000_000)),
    (functions.leave, (), None),
    (functions.leave, (None,), None),
    (functions.leave, (0,), None),
    (functions.leave, (False,), None),
    (functions.leave_hard, (0,), None),
    (functions.give_cut_short, (), None),
    (functions.run_a_loop, (), "looped"),
    (functions.give_later, ("later",), "later"),
    (functools.partial(functions.give_later, "later"), (), "later"),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", MOSTLY_SPAWN, indirect=True)
@pytest.mark.parametrize(("function", "args", "value"), ENDS_WELL)
async def test_ends_that_are_a_success(
    function: Callable[..., Any], args: tuple[Any, ...], value: Any, method: Any
) -> None:
    """Values come back as they are; a peaceful exit has the value None; nothing hangs."""
    result = await launch(spec_of(function, method, *args))
    assert dict(result.return_values) == {0: value}
    assert [worker.return_value for worker in result.attempts[0].workers] == [value]


@pytest.mark.slow
async def test_a_function_that_has_raised_and_is_stopped(method: Any) -> None:
    """The exit code is that of its error, and not that of the signal that cut its exit short."""
    error = await failed(spec_of(functions.raise_and_leave_slowly, method, nproc_per_node=2))
    root, other = error.failures
    assert (root.rank, root.status, said(root)) == (0, ExitStatus(1), "ValueError: boom")
    assert (other.rank, other.status) == (1, ExitStatus(7))
    assert not other.is_victim
    assert error.result.exit_code == 1
    assert [one.status for one in error.result.attempts[0].workers] == [root.status, other.status]


INTERRUPTED = ExitStatus(signal=signal.SIGINT)

# Function, arguments, status, the failure's message, whether an error file is written.
ENDS_BADLY: list[tuple[Callable[..., Any], tuple[Any, ...], ExitStatus, str, bool]] = [
    (functions.raise_error, (), ExitStatus(1), "ValueError: boom", True),
    (functions.raise_odd, (), ExitStatus(1), "OddError: <str() failed>", True),
    (functions.raise_bad_notes, (), ExitStatus(1), "BadNotesError: text", True),
    (functions.raise_base, (), ExitStatus(1), "OwnBase: deep", False),
    (functions.leave, (3,), ExitStatus(3), "", False),
    (functions.leave, (True,), ExitStatus(1), "", False),
    (functions.leave, ("no reason",), ExitStatus(1), "no reason", False),
    (functions.leave_hard, (7,), ExitStatus(7), "", False),
    (functions.kill_self, (signal.SIGKILL,), ExitStatus(signal=9), "", False),
    (functions.kill_self, (signal.SIGTERM,), ExitStatus(signal=15), "", False),
    (functions.crash, (), ExitStatus(signal=11), "", False),
    (
        functions.give_generator,
        (),
        ExitStatus(1),
        "the function of rank 0 returned a generator, which cannot be pickled:"
        " cannot pickle 'generator' object",
        False,
    ),
    (
        functions.give_only_there,
        (),
        ExitStatus(0),
        "its value cannot be unpickled here: LookupError: not in a worker",
        False,
    ),
    (
        functions.give_exiting,
        (),
        ExitStatus(1),
        "the function of rank 0 returned a tests.support.functions.Exits, which cannot be pickled:"
        " SystemExit: 0",
        False,
    ),
    (functions.leave_with_exiting, (), ExitStatus(1), "<str() failed>", False),
    (functions.raise_exiting, (), ExitStatus(1), "ExitsError: <str() failed>", True),
    (functions.raise_later, (), ExitStatus(1), "ValueError: boom", True),
    (functions.leave_later, (3,), ExitStatus(3), "", False),
    (functions.interrupt, (), INTERRUPTED, "", False),
    (functions.kill_self, (signal.SIGINT,), INTERRUPTED, "", False),
    (functions.interrupt_from_thread, (), INTERRUPTED, "", False),
    (functions.interrupt_later, (), INTERRUPTED, "", False),
    (functions.give_interrupting, (), INTERRUPTED, "", False),
]


def said(failure: Failure) -> str:
    return failure.error.message if failure.error else failure.message


@pytest.mark.slow
@pytest.mark.parametrize("method", MOSTLY_SPAWN, indirect=True)
@pytest.mark.parametrize(("function", "args", "status", "message", "has_file"), ENDS_BADLY)
async def test_ends_that_are_a_failure(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    status: ExitStatus,
    message: str,
    has_file: bool,
    method: Any,
    tmp_path: Path,
) -> None:
    """Each has its status and says why; an Exception leaves torch's error file."""
    logs = LogSpec(log_dir=tmp_path, redirects=3)
    error = await failed(spec_of(function, method, *args, logs=logs))
    (failure,) = error.failures
    assert (failure.status, said(failure)) == (status, message)
    assert error.result.exit_code == (status.shell_code or 1)
    files = list(tmp_path.rglob("error.json"))
    assert len(files) == has_file
    if has_file:
        assert json.loads(files[0].read_text())["message"]["message"] == message


@pytest.mark.slow
async def test_a_coroutine_function_is_run_by_asyncio(method: Any) -> None:
    """Of its traceback, the frames of asyncio that led to it are left out."""
    result = await launch(spec_of(functions.give_later, method, "x", nproc_per_node=2))
    assert dict(result.return_values) == {0: "x", 1: "x"}
    error = await failed(spec_of(functions.raise_later, method))
    recorded = error.failures[0].error
    assert recorded is not None
    first, frame, *_ = str(recorded.traceback).splitlines()
    assert first == "Traceback (most recent call last):"
    assert frame.endswith("in raise_later")


@pytest.mark.slow
@pytest.mark.parametrize("logs", [LogSpec(), OFF], ids=["kept", "off"])
async def test_tracebacks_travel_with_the_failure(method: Any, logs: LogSpec) -> None:
    """With or without a directory for error files; our own frames are left out."""
    error = await failed(spec_of(functions.raise_error, method, "deep inside", logs=logs))
    recorded = error.failures[0].error
    assert recorded is not None
    assert recorded.message == "ValueError: deep inside"
    assert recorded.traceback is not None
    assert recorded.traceback.startswith("Traceback (most recent call last):\n  File ")
    assert "raise_error" in recorded.traceback.splitlines()[1]
    assert "bootstrap" not in recorded.traceback
    assert bool(recorded.path) == (logs is not OFF)


@pytest.mark.slow
async def test_values_come_by_global_rank(method: Any) -> None:
    """Every rank's own."""
    result = await launch(spec_of(functions.give_rank, method, nproc_per_node=4))
    assert dict(result.return_values) == {0: 0, 1: 1, 2: 2, 3: 3}


@pytest.mark.slow
async def test_the_first_failure_stops_the_others(method: Any, tmp_path: Path) -> None:
    """The culprit is the root; the others are victims, and have no value."""
    spec = spec_of(functions.fail_after_peers, method, str(tmp_path), nproc_per_node=3)
    error = await failed(spec)
    assert error.failures[0].rank == 1
    assert [failure.is_victim for failure in error.failures] == [False, True, True]
    assert dict(error.result.return_values) == {}


@pytest.mark.slow
async def test_a_restart_calls_again(method: Any) -> None:
    """A failed attempt is repeated, with values from the last one."""
    spec = spec_of(functions.fail_once, method, nproc_per_node=2, max_restarts=1)
    result = await launch(spec)
    assert result.restarts == 1
    assert dict(result.return_values) == {0: 0, 1: 1}
    assert result.attempts[0].failures[0].error is not None


@pytest.mark.slow
async def test_output_is_caught_at_the_descriptors(method: Any, tmp_path: Path) -> None:
    """Python's, C's and children's output goes to the files."""
    logs = LogSpec(log_dir=tmp_path, redirects=3)
    result = await launch(spec_of(functions.write_everywhere, method, logs=logs))
    (worker,) = result.attempts[0].workers
    assert worker.stdout_path is not None
    assert worker.stderr_path is not None
    assert Path(worker.stdout_path).read_text() == "python out\nC out\nchild out\n"
    assert Path(worker.stderr_path).read_text() == "python err\ndescriptor err\nchild err\n"


@pytest.mark.slow
async def test_the_environment_of_a_function(method: Any, tmp_path: Path) -> None:
    """Session, environment, directory, streams and signals are as a command has them."""
    env = {"OWN": "1"}
    result = await launch(spec_of(functions.surroundings, method, env=env, cwd=tmp_path))
    found = result.return_values[0]
    assert found["session"]
    assert found["signals"]
    assert found["stdin"] == ""
    assert found["cwd"] == str(tmp_path)
    assert found["env"]["OWN"] == "1"
    assert found["env"]["RANK"] == "0"
    assert any(name.startswith("ELASTIC_AIO_JOB_") for name in found["env"])


@pytest.mark.slow
async def test_a_grandchild_that_holds_everything_delays_nothing(method: Any) -> None:
    """The end of the process is what counts; what it left behind is stopped."""
    result = await launch(spec_of(functions.leave_grandchild_holding, method))
    assert not alive(result.return_values[0])
    assert result.duration < 20


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
async def test_a_restarted_worker_gets_the_same_connection(way: Any, tmp_path: Path) -> None:
    """Although the program has closed its own, and has another file under the number."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    number = theirs.fileno()
    spec = spec_of(functions.say_when_restarted, way, theirs, max_restarts=1)
    with ours, (tmp_path / "other").open("w+") as other:
        async with Agent(spec) as agent:
            async for event in agent.events():
                if isinstance(event, WorkerStarted):
                    theirs.close()
                    os.dup2(other.fileno(), number)
                    ours.send("go on")
                    break
            await agent.wait()
        assert ours.poll(30)
        assert ours.recv() == "restarted"
        assert other.read() == ""
        os.close(number)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
async def test_a_connection_ends_with_the_workers_that_have_it(way: Any) -> None:
    """Without restarts, this process keeps no copy."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with ours, theirs:
        async with Agent(spec_of(functions.close_and_sleep, way, theirs)) as agent:
            async for event in agent.events():
                if isinstance(event, WorkerStarted):
                    break
            theirs.close()
            assert await asyncio.to_thread(ours.poll, 30)
            with pytest.raises(EOFError):
                ours.recv()
            with pytest.raises(HostError, match="descriptors"):
                await agent.restart()
            assert agent.status().phase == "running"


async def test_a_requested_restart_calls_a_function_again(method: Any) -> None:
    """Also in a job without restarts, which this costs none of."""
    async with Agent(spec_of(functions.sleep, method, nproc_per_node=2)) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerStarted):
                break
        assert await agent.restart() is True
        assert agent.status().attempt == 1


async def test_a_value_is_unpickled_in_a_thread() -> None:
    """It may import modules for seconds."""
    result = await launch(spec_of(functions.give_outside, "spawn", "name_thread"))
    assert result.return_values == {0: "run_in_thread"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("leave", "SystemExit: "),
        ("interrupt", "KeyboardInterrupt: "),
        ("raise_base", "OwnBase: deep"),
        ("raise_odd", "OddError: <str() failed>"),
    ],
)
async def test_a_value_that_exits_is_a_failure(name: str, reason: str) -> None:
    """It does not end the supervisor."""
    error = await failed(spec_of(functions.give_outside, "spawn", name))
    (failure,) = error.failures
    assert failure.message == f"its value cannot be unpickled here: {reason}".strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raise_error", "leave"])
async def test_a_long_text_is_abridged_by_its_worker(name: str, tmp_path: Path) -> None:
    """The supervisor would be blocked for seconds; stderr has all of it."""
    logs = LogSpec(log_dir=tmp_path, redirects=3)
    text = f"begin{' x' * 1_000_000} end"
    error = await failed(spec_of(getattr(functions, name), "spawn", text, logs=logs))
    (failure,) = error.failures
    message = said(failure)
    assert len(message) == 16 * 1024
    assert message.startswith("ValueError: begin x" if failure.error else "begin x")
    assert message.endswith(" x end")
    assert failure.stderr_path is not None
    assert Path(failure.stderr_path).stat().st_size > 2_000_000


async def test_an_exit_before_the_call_is_a_failure() -> None:
    """The function has not run; a main script without a guard may exit, too."""
    error = await failed(spec_of(functions.give, "spawn", functions.ExitsThere()))
    (failure,) = error.failures
    assert (failure.status, said(failure)) == (ExitStatus(1), "SystemExit: 0")


async def test_an_interrupt_before_the_call_is_a_failure() -> None:
    """SIGINT during the imports, which may take long."""
    error = await failed(spec_of(functions.give, "spawn", functions.Interrupting(is_value=False)))
    assert error.failures[0].status == INTERRUPTED


async def test_a_stop_by_sigint_is_no_failure(method: Any, tmp_path: Path) -> None:
    """The interrupt is then the stop's, and not the function's own."""
    spec = spec_of(functions.note_and_sleep, method, str(tmp_path), nproc_per_node=2)
    async with Agent(spec) as agent:
        await until(noted(tmp_path, 2))
        await agent.stop(signal=signal.SIGINT)
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    result = caught.value.result
    assert (result.state, result.exit_code) == (JobState.STOPPED, 130)
    assert [worker.status for worker in result.attempts[0].workers] == [INTERRUPTED] * 2
    assert result.failures == ()


async def test_a_fork_of_a_function_has_no_result(method: Any) -> None:
    """Its error is not the worker's."""
    error = await failed(spec_of(functions.fork_and_end, method, logs=OFF))
    (failure,) = error.failures
    assert (failure.status, failure.error) == (ExitStatus(signal=9), None)


async def test_a_value_that_blocks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_aio.process.calls._PATIENCE_S", 0.1)
    functions.RELEASED.clear()
    try:
        error = await failed(spec_of(functions.give_outside, "spawn", "wait_released"))
    finally:
        functions.RELEASED.set()
    assert error.failures[0].message == "its value is not unpickled within 0.1 s"


async def test_a_value_is_unpickled_here_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process table may be full."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    result = await launch(spec_of(functions.give_outside, "spawn", "name_thread"))
    assert result.return_values == {0: "MainThread"}


# In a process of its own: multiprocessing keeps a helper process and descriptors for long.
QUEUE_SCRIPT = """
import asyncio, multiprocessing, sys
import uvloop
from elastic_aio import Agent, LaunchSpec
from tests.support import functions

async def main(method, context):
    queue, event, lock = context.Queue(), context.Event(), context.Lock()
    spec = LaunchSpec(
        functions.use_queue, args=(queue, event, lock), nproc_per_node=2, start_method=method
    )
    async with Agent(spec) as agent:
        event.set()
        found = [await asyncio.to_thread(queue.get) for _ in range(2)]
        result = await agent.wait()
    print(sorted((rank, len(data)) for rank, data in found), dict(result.return_values))

if __name__ == "__main__":
    make = uvloop.new_event_loop if sys.argv[2] == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(main(sys.argv[1], multiprocessing.get_context(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_queues_events_and_locks_are_arguments(method: str, loop: str, tmp_path: Path) -> None:
    """Those of the matching context, used from both sides."""
    script = tmp_path / "script.py"
    script.write_text(QUEUE_SCRIPT)
    ended = run_program([sys.executable, "-W", "error", str(script), method, loop])
    assert ended.err == ""
    assert ended.out == "[(0, 100000), (1, 100000)] {0: 'put', 1: 'put'}\n"
    # multiprocessing's helper ends a little after the script.
    until_sync(lambda: not leaked_processes())


NESTED_SCRIPT = """
import multiprocessing, sys
from elastic_aio.sync import start_context
from tests.support import functions

def start(put, method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    processes = start_context(put, (queue,), 2, join=False, start_method=method)
    print(sorted(queue.get() for _ in range(2)), flush=True)
    processes.join()

def start_plainly(index, method):
    sys.modules["cloudpickle"] = None  # it cannot be imported
    start(functions.put_index, method)

if __name__ == "__main__":
    method = sys.argv[1]
    start(lambda index, queue: queue.put(index), method)
    start_context(start_plainly, (method,), start_method=method)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_queues_reach_closures_and_workers_of_workers(way: str, tmp_path: Path) -> None:
    """cloudpickle passes their descriptors, and a worker does so without it."""
    script = tmp_path / "script.py"
    script.write_text(NESTED_SCRIPT)
    ended = run_program([sys.executable, str(script), way])
    assert ended.code == 0, ended.err
    assert ended.out == "[0, 1]\n" * 2
    until_sync(lambda: not leaked_processes())


@pytest.mark.skipif(sys.version_info < (3, 11, 5), reason="multiprocessing checks it since 3.11.5")
@pytest.mark.parametrize("way", ["spawn", "forkserver"])
async def test_objects_of_another_context_are_refused(way: Any) -> None:
    """Before anything starts, naming the argument."""
    lock = multiprocessing.get_context("fork").Lock()
    with pytest.raises(SpecError, match=r"^args\[1\]: cannot be pickled: .*fork context"):
        await launch(spec_of(functions.give, way, 1, lock))


def unpicklable() -> Any:
    return (one for one in "")


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
async def test_what_cannot_be_pickled_is_refused(way: Any) -> None:
    """Before anything starts, naming the argument, in one line."""
    with pytest.raises(SpecError, match=r"^args\[2\]: cannot be pickled: .*generator.*") as caught:
        await launch(spec_of(functions.give, way, 1, 2, unpicklable()))
    assert "\n" not in str(caught.value)


async def test_fork_needs_no_pickle() -> None:
    """Closures and anything in memory go along."""
    generator, secret = unpicklable(), object()

    def function(given: Any) -> bool:
        return given is generator and secret is not None

    result = await launch(spec_of(function, "fork", generator))
    assert result.return_values[0] is True


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
async def test_closures_travel_by_cloudpickle(way: Any) -> None:
    """Where it is installed; so do lambdas as values."""
    base = 40

    def function(more: int) -> Any:
        return base + more, lambda: base

    result = await launch(spec_of(function, way, 2))
    number, closure = result.return_values[0]
    assert (number, closure()) == (42, 40)


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("helps", [False, True])
async def test_cloudpickle_is_proposed_where_it_helps(
    helps: bool, is_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pickles a lambda, and no lock."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # it cannot be imported
    given: Any = (lambda: None) if helps else threading.Lock()
    function = functions.give if is_argument else functools.partial(functions.give, given)
    with pytest.raises(SpecError, match="cannot be pickled: ") as caught:
        await launch(spec_of(function, "spawn", *([given] if is_argument else [])))
    assert ("install cloudpickle" in str(caught.value)) == helps


class Point:
    """A value of the user's."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    def __hash__(self) -> int:
        return self.x


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.slow
@settings(
    max_examples=int(os.environ.get("FUNCTION_EXAMPLES", "5")),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(values=st.lists(VALUES, max_size=4))
async def test_any_value_comes_back(values: list[Any], method: Any) -> None:
    """There and back, whatever can be pickled."""
    result = await launch(spec_of(functions.give, method, *values))
    assert result.return_values[0] == tuple(values)


@pytest.mark.slow
async def test_large_values(method: Any) -> None:
    """100 MB come back whole."""
    size = 100_000_000
    result = await launch(spec_of(functions.give_bytes, method, size))
    assert len(result.return_values[0]) == size


@pytest.mark.slow
async def test_a_kill_leaves_no_function_behind(method: Any, tmp_path: Path) -> None:
    """Leaving the block stops functions as it stops commands."""
    spec = spec_of(functions.note_and_sleep, method, str(tmp_path), nproc_per_node=2)
    async with Agent(spec):
        pids = await until(noted(tmp_path, 2))
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.slow
async def test_many_cycles_leave_nothing(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, descriptors, files and threads are counted by the fixture around each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for cycle in range(int(os.environ.get("FUNCTION_CYCLES", "10"))):
        result: LaunchResult = await launch(spec_of(functions.give, method, cycle))
        assert result.return_values[0] == (cycle,)
    assert os.listdir(tmp_path) == []


async def test_a_server_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Its workers' status is lost, which is a failure; the next attempt has a new server."""
    spec = spec_of(functions.note_and_sleep, "forkserver", str(tmp_path), max_restarts=1)
    async with Agent(spec) as agent:
        (worker,) = await until(noted(tmp_path, 1))
        server = int(Path(f"/proc/{worker}/stat").read_text().split()[3])
        os.kill(server, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        (tmp_path / "0").unlink()
        (other,) = await until(noted(tmp_path, 1))
        assert int(Path(f"/proc/{other}/stat").read_text().split()[3]) != server
        started = [e async for e in _until_second_start(agent)]
    assert [event.pid for event in started] == [worker, other]


async def _until_second_start(agent: Agent) -> Any:
    count = 0
    async for event in agent.events():
        if isinstance(event, WorkerStarted):
            yield event
            count += 1
            if count == 2:
                return


async def test_a_module_that_cannot_be_preloaded() -> None:
    """The job fails with one line that names it."""
    spec = spec_of(
        functions.give, "forkserver", preload=["json", "no_such_module_here"], max_restarts=3
    )
    error = await failed(spec)
    assert str(error).startswith("cannot preload 'no_such_module_here': ModuleNotFound")
    assert len(error.result.attempts) == 1


async def test_a_first_module_that_does_not_exist() -> None:
    """This process can tell before anything starts; not if the workers have another path."""
    spec = spec_of(functions.give, "forkserver", preload=["no_such_module_here.sub"])
    agent = Agent(spec)
    with pytest.raises(SpecError) as caught:
        async with agent:
            pass
    assert str(caught.value) == (
        "preload: cannot import 'no_such_module_here.sub': no module named 'no_such_module_here'"
        " (got 'no_such_module_here.sub')"
    )
    assert [event async for event in agent.events()] == []
    error = await failed(spec.replace(env={"PYTHONPATH": ""}))
    assert "cannot preload 'no_such_module_here.sub'" in str(error)


async def test_preloaded_modules_are_there(tmp_path: Path) -> None:
    """A script finds what the server has imported, and is `__main__` all the same."""
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("WORD = 'neighbour'\n")
    script.write_text(
        "import os, sys\n"
        "was_there = 'wave' in sys.modules\n"
        "import beside\n"
        "print(__name__, sys.argv[1:], was_there, beside.WORD, os.environ['RANK'])\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 'not yet')\n"
    )
    logs = LogSpec(log_dir=tmp_path / "logs", redirects=3)
    spec = LaunchSpec(
        str(script), args=["a", "${local_rank}"], start_method="forkserver", preload=["wave"],
        max_restarts=1, logs=logs, nproc_per_node=2,
    )  # fmt: skip
    result = await launch(spec)
    assert result.restarts == 1
    for rank, worker in enumerate(result.attempts[1].workers):
        assert worker.stdout_path is not None
        text = Path(worker.stdout_path).read_text()
        assert text == f"__main__ ['a', '{rank}'] True neighbour {rank}\n"


async def test_another_interpreter(tmp_path: Path) -> None:
    """Its own library goes before our path, which is there all the same."""
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    result = await launch(LaunchSpec(functions.give, args=[{1: 2}], python=link))
    assert result.return_values[0] == ({1: 2},)


@pytest.mark.slow
async def test_a_bare_function_by_name() -> None:
    """Methods, partials and builtins are functions too."""
    for call, args, value in (
        (str.upper, ("a",), "A"),
        (functools.partial(functions.give, 1), (2,), (1, 2)),
        ({"a": 1}.get, ("a",), 1),
        (sorted, ([2, 1],), [1, 2]),
    ):
        result = await launch(LaunchSpec(call, args=args))
        assert result.return_values[0] == value


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
async def test_the_signal_of_a_notice_ends_no_function(method: Any, name: str) -> None:
    """It may go to all processes of the job; without a notice by it, it ends the worker."""
    number = signal.Signals[name]
    spec = spec_of(functions.give_after, method, number, 5)
    result = await launch(spec.replace(preemption=PreemptionSpec(signal=name)))
    assert result.return_values == {0: 5}
    assert (await failed(spec)).result.exit_code == 128 + number
