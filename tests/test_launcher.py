"""`launch` and `run`: every end of a job, and the threads and loops that may call them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop

from elastic_aio import (
    Agent,
    Event,
    HostError,
    JobFailed,
    JobFinished,
    JobState,
    JobStopped,
    LaunchSpec,
    LogSpec,
    SignalSpec,
    SpecError,
    StopPlan,
    launch,
    run,
)
from tests.support.children import (
    POLITE,
    SIGNAL_LOGGER,
    SLEEPER,
    noted,
    noting,
    shell,
    trapping,
    until,
    until_sync,
)
from tests.support.cli import run_program
from tests.support.leaks import alive

pytestmark = pytest.mark.both_loops

LOOPS = [asyncio.SelectorEventLoop, uvloop.new_event_loop]
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
           signal.SIGUSR2, signal.SIGTSTP)  # fmt: skip


def noting_spec(directory: Path, entrypoint: list[str], **settings: Any) -> LaunchSpec:
    """Return a job whose workers write notes into a directory."""
    return LaunchSpec(entrypoint, env={"NOTES": str(directory)}, **settings)


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel a job, and wait for its end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_success(tmp_path: Path) -> None:
    """The result has the status, the duration and the output of each worker."""
    logs = LogSpec(log_dir=str(tmp_path), redirects=3)
    # On asyncio a worker that ends within a millisecond may have no usage.
    program = shell("echo out; sleep 0.05")
    result = await launch(LaunchSpec(program, nproc_per_node=2, logs=logs, run_id="r"))
    assert (result.run_id, result.state, result.exit_code) == ("r", JobState.SUCCEEDED, 0)
    assert dict(result.return_values) == {0: None, 1: None}
    (attempt,) = result.attempts
    assert attempt.number == 0
    assert attempt.failures == ()
    assert result.duration >= attempt.duration > 0
    for rank, worker in enumerate(attempt.workers):
        assert (worker.rank, worker.local_rank, worker.status.code) == (rank, rank, 0)
        assert worker.duration > 0
        assert worker.stdout_path is not None
        assert Path(worker.stdout_path).read_text() == "out\n"
    for worker in attempt.workers:
        assert worker.usage is not None
        assert worker.usage.max_rss_bytes > 0
    spent = result.goodput
    assert spent.restarting == 0
    assert 0 < spent.productive + spent.waiting <= result.duration + 1  # the wall clock may be set


async def test_failure() -> None:
    """JobFailed carries the failures, the root cause first, and the whole result."""
    script = "[ $RANK = 1 ] && exit 3; exec sleep 99"
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(shell(script), nproc_per_node=3))
    error = caught.value
    assert next(failure.rank for failure in error.failures) == 1
    assert [failure.is_victim for failure in error.failures] == [False, True, True]
    assert error.result.state is JobState.FAILED
    assert error.result.exit_code == 3
    assert error.result.failures == error.failures
    assert "\n" not in str(error)
    assert "exit code 3" in str(error)


async def test_cancellation_runs_the_stop_plan_first(tmp_path: Path) -> None:
    """A cancelled launch raises after its workers have handled SIGTERM and exited."""
    task = asyncio.ensure_future(launch(noting_spec(tmp_path, POLITE, nproc_per_node=2)))
    pids = await until(noted(tmp_path, 2))
    await cancelled(task)
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    assert not any(map(alive, pids))


async def test_timeout_stops_the_job(tmp_path: Path) -> None:
    """`asyncio.timeout` around a launch ends it like any cancellation."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await launch(LaunchSpec(SLEEPER))


async def test_cancellation_twice(tmp_path: Path) -> None:
    """A second cancellation does not cut the stop plan short."""
    task = asyncio.ensure_future(launch(noting_spec(tmp_path, POLITE)))
    await until(noted(tmp_path, 1))
    task.cancel()
    await asyncio.sleep(0)
    await cancelled(task)
    assert (tmp_path / "stopped").exists()


@pytest.mark.slow
async def test_cancellation_by_an_anyio_scope(tmp_path: Path) -> None:
    """A cancelled anyio scope waits for the stop plan without using CPU time."""

    async def cancel_when_started(scope: anyio.CancelScope) -> None:
        await until(noted(tmp_path, 1))
        scope.cancel()

    spec = noting_spec(tmp_path, trapping("sleep 0.3; : > $NOTES/stopped; exit"))
    with anyio.CancelScope() as scope:
        canceller = asyncio.ensure_future(cancel_when_started(scope))
        cpu_before = time.process_time()
        await launch(spec)
    await canceller
    assert scope.cancelled_caught
    assert (tmp_path / "stopped").exists()
    assert time.process_time() - cpu_before < 0.25


@pytest.mark.slow
async def test_two_jobs_at_once() -> None:
    """Two launches in one program are independent."""
    good, bad = await asyncio.gather(
        launch(LaunchSpec(shell("sleep 0.2"), nproc_per_node=2)),
        launch(LaunchSpec(shell("exit 4"), nproc_per_node=2)),
        return_exceptions=True,
    )
    assert isinstance(bad, JobFailed)
    assert not isinstance(good, BaseException)
    assert good.exit_code == 0
    assert good.run_id != bad.result.run_id


async def test_a_spec_that_does_not_fit_this_host() -> None:
    """A setting that depends on the host is refused before anything starts."""
    events: list[Event] = []
    spec = LaunchSpec(["true"], nproc_per_node="cpu", logs=LogSpec(tee={9999: 3}))
    with pytest.raises(SpecError, match=r"logs\.tee"):
        await launch(spec, listeners=[events.append])
    assert events == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"signals": "SIGTERM"}, "signals: must be True, False or a SignalSpec (got 'SIGTERM')"),
        ({"listeners": print}, "listeners: must be a list"),
        ({"listeners": [3]}, "listeners: must be callables (got 3)"),
        ({"listeners": [asyncio.sleep]}, "listeners: must not be coroutine functions, which"),
        ({"console": 1}, "console: must be a pair (got 1)"),
        ({"console": ("1", 2)}, "console: must be a whole number of at least 0 (got '1')"),
    ],
)
async def test_a_wrong_argument_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as refusal:
        await launch(LaunchSpec(["true"]), **arguments)
    assert str(refusal.value).startswith(problem)


def test_a_wrong_cursor_is_refused() -> None:
    cursor: Any = "x"
    with pytest.raises(SpecError, match=r"^after: must be a whole number of at least -1"):
        Agent(LaunchSpec(["true"])).events(after=cursor)


async def test_listeners() -> None:
    """A listener is called with every event, including the last."""
    events: list[Event] = []
    await launch(LaunchSpec(["true"]), listeners=[events.append])
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[-1], JobFinished)


async def test_environment_is_not_modified() -> None:
    """os.environ is the same before and after a launch."""
    before = dict(os.environ)
    await launch(LaunchSpec(["true"], nproc_per_node=2, env={"A": "b"}))
    assert dict(os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_a_signal_stops_the_job(number: signal.Signals, tmp_path: Path) -> None:
    """With signals=True a stop signal ends the job; the default plan passes it on."""
    for stop, sent in ((StopPlan(), number), (StopPlan.within(60), signal.SIGTERM)):
        log = tmp_path / "log"
        log.write_text("")
        spec = noting_spec(tmp_path, SIGNAL_LOGGER, stop=stop)
        task = asyncio.ensure_future(launch(spec, signals=True))
        (pid,) = await until(noted(tmp_path, 1))
        os.kill(os.getpid(), number)
        await until(log.read_text)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JobStopped, match=number.name) as caught:
            await task
        assert caught.value.result.exit_code == 128 + number
        assert caught.value.result.state is JobState.STOPPED
        assert log.read_text() == f"{signal.Signals(sent).name}\n"
        (tmp_path / "0").unlink()


async def test_user_signals_are_forwarded(tmp_path: Path) -> None:
    """SIGUSR1 and SIGUSR2 reach each worker once, and the job goes on."""
    spec = noting_spec(tmp_path, SIGNAL_LOGGER, nproc_per_node=2, stop=StopPlan.within(0.1))
    task = asyncio.ensure_future(launch(spec, signals=True))
    pids = await until(noted(tmp_path, 2))
    log = tmp_path / "log"
    for name in ("USR1", "USR2"):
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        await until(lambda name=name: log.exists() and log.read_text().count(name) == 2)  # type: ignore[misc]  # bound now
    assert log.read_text().split() == ["SIGUSR1", "SIGUSR1", "SIGUSR2", "SIGUSR2"]
    assert all(map(alive, pids))
    await cancelled(task)


async def test_chosen_signals(tmp_path: Path) -> None:
    """A SignalSpec chooses the signals that stop; others keep their handlers."""
    received: list[int] = []
    former = signal.signal(signal.SIGHUP, lambda number, _: received.append(number))
    try:
        chosen = SignalSpec(stop=frozenset({signal.SIGUSR1}), forward=frozenset())
        spec = noting_spec(tmp_path, POLITE)
        task = asyncio.ensure_future(launch(spec, signals=chosen))
        await until(noted(tmp_path, 1))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: received)
        assert not task.done()
        await cancelled(task)
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
async def test_two_jobs_share_the_signals(first: int, tmp_path: Path) -> None:
    """In either order of their ends: both receive a signal, and the handlers are restored."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    jobs, logs = [], []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        spec = noting_spec(tmp_path / name, SIGNAL_LOGGER, stop=StopPlan.within(0.1))
        jobs.append(asyncio.ensure_future(launch(spec, signals=True)))
        await until(noted(tmp_path / name, 1))
        logs.append(tmp_path / name / "log")
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: [log.exists() and log.read_text() for log in logs] == ["SIGUSR1\n"] * 2)
    await cancelled(jobs[first])
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(JobStopped, match="SIGTERM"):
        await jobs[1 - first]
    assert {number: signal.getsignal(number) for number in HANDLED} == before


@pytest.mark.parametrize("ending", ["success", "failure", "cancel", "refusal"])
async def test_handlers_are_restored(ending: str, tmp_path: Path) -> None:
    """The former handlers are restored however a launch with signals ends."""

    def handler(number: int, frame: object) -> None:
        raise AssertionError("never called")

    former = {number: signal.signal(number, handler) for number in HANDLED}
    try:
        if ending == "success":
            await launch(LaunchSpec(["true"]), signals=True)
        elif ending == "failure":
            with pytest.raises(JobFailed):
                await launch(LaunchSpec(["false"]), signals=True)
        elif ending == "refusal":
            with pytest.raises(SpecError):
                await launch(
                    LaunchSpec(["true"], nproc_per_node="cpu", logs=LogSpec(tee={9999: 3})),
                    signals=True,
                )
        else:
            task = asyncio.ensure_future(launch(noting_spec(tmp_path, noting()), signals=True))
            await until(noted(tmp_path, 1))
            await cancelled(task)
        assert {number: signal.getsignal(number) for number in HANDLED} == dict.fromkeys(
            HANDLED, handler
        )
    finally:
        for number, former_handler in former.items():
            signal.signal(number, former_handler)


async def test_without_signals_no_handler_is_touched(tmp_path: Path) -> None:
    """A launch without signals does not change the signal handlers of the process."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    task = asyncio.ensure_future(launch(noting_spec(tmp_path, noting())))
    await until(noted(tmp_path, 1))
    assert {number: signal.getsignal(number) for number in HANDLED} == before
    await cancelled(task)


async def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """A signal that was ignored at the start of the launch does not stop the job."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        spec = noting_spec(tmp_path, noting("until [ -e $NOTES/go ]; do sleep 0.01; done"))
        task = asyncio.ensure_future(launch(spec, signals=True))
        await until(noted(tmp_path, 1))
        os.kill(os.getpid(), signal.SIGHUP)
        (tmp_path / "go").touch()
        assert (await task).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, former)


def off_main_thread(work: Callable[[], Any]) -> Any:
    """Call `work` in a thread; return its result or its exception."""
    outcomes: list[Any] = []

    def call() -> None:
        try:
            outcomes.append(work())
        except Exception as error:  # noqa: BLE001  # handed to the test
            outcomes.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return outcomes[0]


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_off_the_main_thread(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A launch works on the loop of any thread."""

    def work() -> Any:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            spec = LaunchSpec(shell("exit $RANK"), nproc_per_node=2)
            return runner.run(launch(spec))

    error = off_main_thread(work)
    assert isinstance(error, JobFailed)
    assert error.result.exit_code == 1


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    """Handling signals off the main thread is refused, and nothing is started."""
    spec = LaunchSpec(["touch", str(tmp_path / "started")])
    error = off_main_thread(lambda: asyncio.run(launch(spec, signals=True)))
    assert isinstance(error, HostError)
    assert "main thread" in str(error)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("signals", [False, True])
def test_launch_outside_of_asyncio(signals: bool) -> None:
    """The error says that only asyncio is supported; here no loop drives the coroutine."""
    job = launch(LaunchSpec(["true"]), signals=signals)
    with pytest.raises(
        RuntimeError, match=r"^elastic_aio runs on asyncio only; a portal .* runs it beside trio$"
    ):
        job.send(None)


def test_run_needs_no_loop() -> None:
    """`run` is launch for programs without an event loop, with the same outcomes."""
    assert run(LaunchSpec(["true"], nproc_per_node=2)).exit_code == 0
    with pytest.raises(JobFailed, match="exit code 1"):
        run(LaunchSpec(["false"]))


def test_run_takes_a_loop_factory() -> None:
    """It makes the loop of the job."""
    modules = []
    run(
        LaunchSpec(["true"]),
        listeners=[lambda _: modules.append(type(asyncio.get_running_loop()).__module__)],
        loop_factory=uvloop.new_event_loop,
    )
    assert set(modules) == {"uvloop"}


def test_run_takes_signals(tmp_path: Path) -> None:
    """`run(signals=True)` is stopped by a signal, and restores the handlers."""
    before = signal.getsignal(signal.SIGTERM)
    spec = noting_spec(tmp_path, POLITE)

    def kill_when_started() -> None:
        until_sync(noted(tmp_path, 1))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill_when_started)
    thread.start()
    with pytest.raises(JobStopped):
        run(spec, signals=True)
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


async def test_run_inside_a_loop_is_refused() -> None:
    """The error says why, and no coroutine is left unawaited."""
    with pytest.raises(RuntimeError, match="running"):
        run(LaunchSpec(["true"]))


@pytest.mark.parametrize("loop_factory", LOOPS, ids=["asyncio", "uvloop"])
def test_the_program_ends_while_a_job_runs_in_the_background(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    """A loop that shuts down with a job as a background task stops it by its plan."""
    spec = noting_spec(tmp_path, POLITE, nproc_per_node=2)

    async def main() -> list[int]:
        background = asyncio.ensure_future(launch(spec))
        background.add_done_callback(lambda task: task.cancelled())
        return await until(noted(tmp_path, 2))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        pids = runner.run(main())
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    assert not any(map(alive, pids))


WITHOUT_EPOLL = """
import select
del select.epoll
import asyncio
from elastic_aio import Agent, HostError, LaunchSpec, launch, open_process, run
from elastic_aio.sync import spawn

async def enter(make):
    async with make():
        pass

for start in (
    lambda: run(LaunchSpec(["true"])),
    lambda: spawn(print, nprocs=1),
    lambda: asyncio.run(launch(LaunchSpec(["true"]))),
    lambda: asyncio.run(enter(lambda: Agent(LaunchSpec(["true"])))),
    lambda: asyncio.run(enter(lambda: open_process(["true"]))),
):
    try:
        start()
    except HostError as error:
        print(error)
"""


def test_a_program_without_epoll() -> None:
    """A patch of the standard library takes it away; each entry refuses in one line."""
    ended = run_program([sys.executable, "-c", WITHOUT_EPOLL])
    assert (ended.code, ended.err) == (0, "")
    assert len(ended.out.splitlines()) == 5
    assert {*ended.out.splitlines()} == {
        "this program has no select.epoll, which gevent's monkey patching removes: start jobs in a"
        " process that is not patched"
    }
