"""Whether, when and why a failed attempt is followed by another one."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Backoff,
    Event,
    Failure,
    JobFailed,
    JobStopped,
    LaunchResult,
    LaunchSpec,
    LogSpec,
    RestartAction,
    Restarting,
    RestartPolicy,
    SpecError,
    WorkerStarted,
    launch,
)
from elastic_aio.events import AttemptFailed
from elastic_aio.spec.restart import Decide
from tests.support.children import python, restart_count_exits, shell, until
from tests.support.leaks import alive
from tests.support.restarts import at_once

GUARD = 30.0


async def failed(spec: LaunchSpec, events: list[Event] | None = None) -> LaunchResult:
    """Run a job that must fail; return its result."""
    with pytest.raises(JobFailed) as caught:
        await launch(spec, listeners=[] if events is None else [events.append])
    return caught.value.result


def job(code: int = 1, *, restarts: int = 3, **policy: Any) -> LaunchSpec:
    """Return a job whose only worker always exits with `code`."""
    return LaunchSpec(shell(f"exit {code}"), max_restarts=restarts, restart=at_once(**policy))


def delays(events: list[Event]) -> list[float]:
    """Return the delays of the restarts."""
    return [event.delay for event in events if isinstance(event, Restarting)]


@pytest.mark.parametrize("restarts", [0, 1, 3])
async def test_max_restarts(restarts: int) -> None:
    """A job that always fails has one attempt more than it has restarts."""
    events: list[Event] = []
    result = await failed(job(restarts=restarts), events)
    assert (result.restarts, len(result.attempts)) == (restarts, restarts + 1)
    assert "max restarts" in result.reason
    assert delays(events) == [0.0] * restarts
    whys = [event.why for event in events if isinstance(event, Restarting)]
    assert whys == [f"restart {n + 1} of {restarts} (max restarts)" for n in range(restarts)]


async def test_the_latest_attempts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that restarts for months does not fill the memory."""
    monkeypatch.setattr("elastic_aio.agent.driver._ATTEMPTS_MAX", 2)
    result = await failed(job(7, restarts=4))
    assert result.restarts == 4
    assert [attempt.number for attempt in result.attempts] == [3, 4]
    assert result.failures[0].status.code == 7


async def test_back_off_grows_to_its_cap() -> None:
    """Delays grow by the factor up to the cap, and are really waited."""
    events: list[Event] = []
    backoff = Backoff(initial=0.02, factor=2, cap=0.05, jitter=False)
    await failed(job(backoff=backoff), events)
    assert delays(events) == pytest.approx([0.02, 0.04, 0.05])
    for restarting, started in itertools.pairwise(events):
        if isinstance(restarting, Restarting):
            assert isinstance(started, WorkerStarted)
            assert started.time - restarting.time >= restarting.delay - 0.005


async def test_jitter_shortens_delays() -> None:
    """With full jitter a delay is anything up to its ceiling."""
    events: list[Event] = []
    await failed(job(restarts=6, backoff=Backoff(initial=0.01, factor=1, cap=0.01)), events)
    assert all(0 <= delay <= 0.01 for delay in delays(events))
    assert len(set(delays(events))) > 1


async def test_a_healthy_attempt_resets_the_back_off_and_the_budget() -> None:
    """An attempt that ran long enough is followed by the first delay and the first restart."""
    events: list[Event] = []
    spec = LaunchSpec(
        shell("[ $TORCHELASTIC_RESTART_COUNT = 2 ] && sleep 0.3; exit 1"),
        max_restarts=2,
        restart=RestartPolicy(
            backoff=Backoff(initial=0.01, factor=2, cap=1, jitter=False), healthy_after=0.25
        ),
    )
    result = await failed(spec, events)
    assert delays(events) == pytest.approx([0.01, 0.02, 0.01, 0.02])
    whys = [event.why for event in events if isinstance(event, Restarting)]
    assert whys == [f"restart {number} of 2 (max restarts)" for number in (1, 2, 1, 2)]
    returned = [event.returned for event in events if isinstance(event, Restarting)]
    assert (returned, result.restarts) == ([0, 0, 2, 2], 4)


async def test_window() -> None:
    """More failures than the window holds end the job before max_restarts does."""
    result = await failed(job(restarts=9, window=(2, 60)))
    assert (result.restarts, len(result.attempts)) == (2, 3)
    assert "restart window" in result.reason


STEP = "echo PROGRESS=$TORCHELASTIC_RESTART_COUNT >&$ELASTIC_AIO_NOTIFY_FD"


@pytest.mark.both_loops
@pytest.mark.parametrize(
    ("script", "attempts"),
    [
        ("true", 3),
        ("echo WATCHDOG=1 >&$ELASTIC_AIO_NOTIFY_FD", 3),
        ("echo PROGRESS= >&$ELASTIC_AIO_NOTIFY_FD", 3),
        (f"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && {STEP}", 5),
        (f"[ $TORCHELASTIC_RESTART_COUNT -lt 5 ] && {STEP}", 8),
    ],
)
async def test_attempts_without_progress_end_the_job(script: str, attempts: int) -> None:
    """Exactly so many in a row, whatever `max_restarts` allows; the last words count too."""
    spec = LaunchSpec(
        shell(f"{script}; exit 9"),
        nproc_per_node=2,
        max_restarts="unlimited",
        restart=at_once(max_attempts_without_progress=3),
    )
    result = await failed(spec)
    assert (result.restarts, result.exit_code) == (attempts - 1, 9)
    why = "the last 3 attempts have made no progress (max attempts without progress)"
    assert result.reason == why


async def test_the_restarts_of_a_job_with_progress_are_those_of_max_restarts() -> None:
    result = await failed(
        LaunchSpec(
            shell(f"{STEP}; exit 9"),
            max_restarts=4,
            restart=at_once(max_attempts_without_progress=1),
        )
    )
    assert (result.restarts, result.reason) == (4, "all 4 restarts are used up (max restarts)")


@pytest.mark.both_loops
async def test_a_job_of_one_node_ends_on_an_excluded_node() -> None:
    """Its failure is not repeated there; without a failure nothing changes."""
    exclude = "echo 'EXCLUDE=ECC error' >&$ELASTIC_AIO_NOTIFY_FD"
    spec = LaunchSpec(
        shell(f"[ $RANK = 1 ] || sleep 99; {exclude}; exit 7"), nproc_per_node=2, max_restarts=5
    )
    result = await failed(spec)
    why = "the only node of the job is excluded: rank 1: ECC error"
    assert (result.reason, result.exit_code, result.restarts) == (why, 7, 0)
    fine = await launch(spec.replace(entrypoint=tuple(shell(f"{exclude}; exit 0"))))
    assert fine.exit_code == 0


@pytest.mark.slow
async def test_a_window_slides() -> None:
    """Restarts older than the window do not count."""
    spec = LaunchSpec(shell("sleep 0.15; exit 1"), max_restarts=3, restart=at_once(window=(1, 0.1)))
    result = await failed(spec)
    assert result.restarts == 3
    assert "max restarts" in result.reason


@pytest.mark.parametrize("code", [4, 5])
async def test_the_policy_judges_the_cause_of_a_lost_peer(tmp_path: Path, code: int) -> None:
    """The peer ends first; the worker that it has lost leaves its connections and cleans up."""
    os.mkfifo(tmp_path / "connection")
    script = """
    if [ $RANK = 0 ]; then
        exec 3> "$NOTES/connection"
        echo "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer" >&2
        exit 1
    fi
    read < "$NOTES/connection"  # until rank 0 has ended
    for step in {1..30}; do /bin/true; done
    exit $CODE
    """
    spec = LaunchSpec(
        shell(script),
        nproc_per_node=2,
        env={"NOTES": str(tmp_path), "CODE": str(code)},
        max_restarts=1,
        restart=RestartPolicy(never_on={4}),
        logs=LogSpec(log_dir=str(tmp_path / "logs"), redirects=3),
    )
    result = await failed(spec)
    assert [(one.rank, one.status.code) for one in result.failures] == [(1, code), (0, 1)]
    assert (result.exit_code, result.restarts) == (code, 0 if code == 4 else 1)


async def test_never_on() -> None:
    """An exit code that cannot be mended ends the job at once."""
    result = await failed(job(4, never_on=frozenset({4})))
    assert (result.restarts, result.reason) == (0, "exit code 4 is in the never-on list")
    assert result.exit_code == 4


async def test_restart_on() -> None:
    """Only the listed exit codes are worth a restart; signals count as 128 + n."""
    spec = LaunchSpec(
        restart_count_exits(75, 5, 0),
        max_restarts=3,
        restart=RestartPolicy(restart_on=frozenset({75, 137})),
    )
    result = await failed(spec)
    assert (result.restarts, result.reason) == (1, "exit code 5 is not in the restart-on list")
    killed = LaunchSpec(
        shell("kill -KILL $$"),
        max_restarts=1,
        restart=RestartPolicy(restart_on=frozenset({75, 137})),
    )
    assert (await failed(killed)).restarts == 1


async def test_decide_is_asked_with_the_root_cause() -> None:
    """The callback sees each failed attempt's root cause, and its word counts."""
    asked: list[Failure] = []

    def decide(failure: Failure) -> RestartAction:
        asked.append(failure)
        return RestartAction.RESTART if failure.status.code == 3 else RestartAction.GIVE_UP

    spec = LaunchSpec(restart_count_exits(3, 3, 4), max_restarts=9, restart=at_once(decide=decide))
    result = await failed(spec)
    assert [failure.status.code for failure in asked] == [3, 3, 4]
    assert (result.restarts, result.reason) == (2, "restart.decide returned GIVE_UP")


async def test_decide_may_be_a_coroutine() -> None:
    """The callback may await, and the loop goes on meanwhile."""

    async def decide(failure: Failure) -> RestartAction:
        await asyncio.sleep(0.01)
        return RestartAction.DEFAULT

    result = await failed(job(7, decide=decide, never_on=frozenset({7})))
    assert result.reason == "exit code 7 is in the never-on list"


async def test_decide_passes_over_the_exit_code_rules_but_not_the_budget() -> None:
    """RESTART restarts in spite of never_on, as long as restarts are left."""
    result = await failed(
        job(7, restarts=2, decide=lambda failure: RestartAction.RESTART, never_on=frozenset({7}))
    )
    assert result.restarts == 2


def decide_raising(failure: Failure) -> RestartAction:
    raise ZeroDivisionError("in decide")


async def decide_raising_later(failure: Failure) -> RestartAction:
    await asyncio.sleep(0)
    raise ZeroDivisionError("in decide")


@pytest.mark.parametrize("decide", [decide_raising, decide_raising_later])
async def test_decide_that_raises(decide: Decide) -> None:
    """The callback's own exception is raised by `wait`, and the job is over."""
    async with Agent(job(decide=decide)) as agent:
        with pytest.raises(ZeroDivisionError, match="in decide"):
            await agent.wait()
        last = [event async for event in agent.events()][-1]
    assert "ZeroDivisionError" in repr(last)


async def test_decide_that_returns_nonsense() -> None:
    """An answer that is no Action is named."""
    problem = r"restart\.decide must return a RestartAction \(got True\)"
    with pytest.raises(TypeError, match=problem):
        await launch(job(decide=lambda failure: True))


class SlowCallbacks:
    """Callbacks that do not answer before they are released: in a thread, and on the loop."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def block(self, failure: Failure) -> RestartAction:
        self._thread = threading.current_thread()
        self._loop.call_soon_threadsafe(self.asked.set)
        assert self._released.wait(GUARD), "the loop did not run meanwhile"
        return RestartAction.GIVE_UP

    async def wait(self, failure: Failure) -> RestartAction:
        self.asked.set()
        while not self._released.is_set():
            await asyncio.sleep(0.01)
        return RestartAction.GIVE_UP

    def release(self) -> None:
        self._released.set()
        if self._thread is not None:
            self._thread.join()


@pytest.fixture
async def slow_callbacks() -> AsyncIterator[SlowCallbacks]:
    callbacks = SlowCallbacks()
    yield callbacks
    callbacks.release()


@pytest.mark.both_loops
@pytest.mark.parametrize("name", ["block", "wait"])
async def test_the_loop_runs_while_the_callback_does(
    slow_callbacks: SlowCallbacks, name: str
) -> None:
    """A plain function may block."""
    async with Agent(job(decide=getattr(slow_callbacks, name))) as agent:
        await slow_callbacks.asked.wait()
        slow_callbacks.release()
        with pytest.raises(JobFailed, match=r"restart\.decide returned GIVE_UP"):
            await agent.wait()


@pytest.mark.both_loops
@pytest.mark.parametrize("name", ["block", "wait"])
async def test_stop_while_the_callback_runs(slow_callbacks: SlowCallbacks, name: str) -> None:
    """A callback that never answers does not hold up a stop, and the failure stays."""
    async with Agent(job(decide=getattr(slow_callbacks, name))) as agent:
        await slow_callbacks.asked.wait()
        agent.stop()
        with pytest.raises(JobFailed, match="no restart follows: a stop was requested"):
            await agent.wait()


@pytest.mark.both_loops
@pytest.mark.parametrize("name", ["block", "wait"])
async def test_a_callback_that_never_answers_ends_the_job(
    slow_callbacks: SlowCallbacks, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_aio.agent.driver.DECIDE_TIMEOUT", 0.25)
    result = await failed(job(7, decide=getattr(slow_callbacks, name)))
    assert result.reason == "restart.decide has not returned within 0.25 s"
    assert slow_callbacks.asked.is_set()


@pytest.mark.slow
def test_the_program_does_not_wait_for_a_callback_that_blocks() -> None:
    program = """
import asyncio, threading
from elastic_aio import Agent, JobFailed, LaunchSpec, RestartPolicy

async def main():
    loop = asyncio.get_running_loop()

    def decide(failure):
        loop.call_soon_threadsafe(agent.stop)
        threading.Event().wait()

    spec = LaunchSpec(["false"], max_restarts=1, restart=RestartPolicy(decide=decide))
    async with Agent(spec) as agent:
        try:
            await agent.wait()
        except JobFailed:
            print("stopped")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=GUARD, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "stopped\n", "")


async def test_stop_during_the_back_off() -> None:
    """A stop does not wait for a delay to pass."""
    restarting = asyncio.Event()

    def listen(event: Event) -> None:
        if isinstance(event, Restarting):
            restarting.set()

    spec = job(backoff=Backoff(initial=50, cap=50, jitter=False))
    async with Agent(spec, listeners=[listen]) as agent:
        await restarting.wait()
        began = time.monotonic()
        agent.stop()
        with pytest.raises(JobStopped):
            await agent.wait()
        assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"healthy_after": 0.0}, "restart.healthy_after"),
        ({"restart_on": {1, 2}, "never_on": {2}}, "restart.never_on"),
        ({"restart_on": set()}, "restart.restart_on"),
        ({"window": (9, 60)}, "restart.window"),
        ({"max_attempts_without_progress": 4}, "restart.max_attempts_without_progress"),
        ({"window": (2, 1), "backoff": Backoff(initial=5, jitter=False)}, "restart.window"),
        ({"backoff": Backoff(initial=5, cap=1)}, "restart.backoff.cap"),
        ({"never_on": {0}}, "restart.never_on"),
        ({"decide": "no"}, "restart.decide"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, Any], field: str) -> None:
    """Settings that contradict each other never start a job; one line names the field."""
    with pytest.raises(SpecError) as caught:
        job(restarts=3, **settings)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"backoff": Backoff()},
        {"healthy_after": 3.0},
        {"restart_on": {1}},
        {"decide": lambda failure: RestartAction.RESTART},
    ],
)
def test_a_policy_without_restarts_is_refused(settings: dict[str, Any]) -> None:
    """A policy for restarts needs some restarts."""
    with pytest.raises(SpecError, match="max_restarts"):
        job(restarts=0, **settings)


async def cannot_start(spec: LaunchSpec) -> tuple[int, str]:
    """Run a job that cannot start; return its exit code and the message."""
    spec = spec.replace(max_restarts=5, nproc_per_node=3)
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    result = caught.value.result
    assert (result.restarts, len(result.attempts)) == (0, 1)
    assert "\n" not in str(caught.value)
    return result.exit_code, str(caught.value)


async def test_a_missing_command() -> None:
    """A program that is not there fails at once with 127."""
    code, message = await cannot_start(LaunchSpec(["no_such_program_here"]))
    assert code == 127
    assert message == "cannot run no_such_program_here: command not found"


async def test_a_file_that_is_not_executable(tmp_path: Path) -> None:
    """A program without the right to execute it fails at once with 126."""
    path = tmp_path / "data"
    path.write_text("")
    code, message = await cannot_start(LaunchSpec([str(path)]))
    assert code == 126
    assert message == f"cannot run {path}: permission denied"


async def test_a_program_without_its_interpreter(tmp_path: Path) -> None:
    """A script whose first line names nothing that exists is explained."""
    path = tmp_path / "program"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o755)
    code, message = await cannot_start(LaunchSpec([str(path)]))
    assert code == 126
    assert "interpreter" in message


@pytest.mark.parametrize("kind", ["missing", "a file"])
async def test_a_bad_working_directory(kind: str, tmp_path: Path) -> None:
    """A working directory that is none is named, not the program."""
    place = tmp_path / "place"
    if kind == "a file":
        place.write_text("")
    code, message = await cannot_start(LaunchSpec(["true"], cwd=place))
    assert code == 126
    assert str(place) in message
    assert "working directory" in message


@pytest.mark.parametrize("kind", ["missing", "a directory", "not readable"])
async def test_a_script_that_python_could_not_run(kind: str, tmp_path: Path) -> None:
    """A script that is missing or no script is refused before Python complains."""
    script = tmp_path / "train.py"
    if kind == "a directory":
        script.mkdir()
    elif kind == "not readable":
        script.write_text("")
        script.chmod(0)
        if os.access(script, os.R_OK):
            script.unlink()  # root reads everything: missing then
            kind = "missing"
    code, message = await cannot_start(LaunchSpec(str(script)))
    assert code == (127 if kind == "missing" else 126)
    assert str(script) in message


async def test_a_program_that_has_run_may_be_away(tmp_path: Path) -> None:
    """A restart that cannot start it is one more failure; the last one decides the exit code."""
    program = tmp_path / "server"
    program.write_text('#!/bin/sh\nmv "$0" "$0.new"; exit 3\n')
    program.chmod(0o755)
    events: list[Event] = []
    spec = LaunchSpec([str(program)], max_restarts=2, restart=at_once())
    result = await failed(spec, events)
    assert (result.restarts, result.exit_code) == (2, 127)
    causes = [event.root.summary for event in events if isinstance(event, AttemptFailed)]
    assert "exit code 3" in causes[0]
    assert [cause.partition(": ")[2] for cause in causes[1:]] == (
        [f"cannot run {program}: command not found"] * 2
    )


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_log_directory_that_is_removed_is_made_again(
    tmp_path: Path, *, is_named: bool
) -> None:
    """The next attempt has its files, below a directory that others may not enter, as before."""
    logs = LogSpec(log_dir=tmp_path / "logs" if is_named else None, redirects=3)
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 99; echo again"
    spec = LaunchSpec(shell(script), max_restarts=1, restart=at_once(), logs=logs)
    async with Agent(spec) as agent, asyncio.timeout(GUARD):
        await until(agent.pids)
        directory = agent.status().log_dir
        assert directory is not None
        shutil.rmtree(tmp_path / "logs" if is_named else directory)
        os.kill(agent.pids()[0], signal.SIGKILL)
        result = await agent.wait()
    (kept,) = Path(directory).glob("attempt_1/0/stdout.log")
    assert kept.read_text() == "again\n"
    assert result.log_dir == directory
    assert is_named or not os.stat(directory).st_mode & 0o077
    shutil.rmtree(directory)


async def test_a_script_relative_to_the_working_directory(tmp_path: Path) -> None:
    """A script's path is looked up where its worker will run."""
    (tmp_path / "train.py").write_text("")
    result = await launch(LaunchSpec("train.py", cwd=tmp_path))
    assert result.exit_code == 0


async def test_workers_that_die_while_others_start() -> None:
    """A failure during the start of a large group is a failure of that attempt."""
    result = await failed(
        LaunchSpec(python("import os; os._exit(3)"), nproc_per_node=16, max_restarts=1)
    )
    assert result.exit_code == 3
    assert len(result.attempts) == 2
    for attempt in result.attempts:
        assert not attempt.failures[0].is_victim
        await until(lambda attempt=attempt: not any(alive(one.pid) for one in attempt.workers))  # type: ignore[misc]  # bound now
