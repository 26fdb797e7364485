"""The recorder of a program: what it writes, and that no job waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Backoff,
    Event,
    HostError,
    JobFailed,
    JobFinished,
    LaunchSpec,
    LogSpec,
    Restarting,
    RestartPolicy,
    RunRecorder,
    SpecError,
    format_failure,
    launch,
    recorded_runs,
    recorder,
)
from elastic_aio.record import RUN_FILE, JobRecord, RecordFiles, run_in
from tests.support.children import SLEEPER, shell, until
from tests.support.restarts import AT_ONCE


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of the test, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


class HeldFiles:
    """Files of records that are written when `release` is set; `threads` wrote them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.begun = threading.Event()
        self.threads: list[threading.Thread] = []
        write = RecordFiles.write

        def held(files: RecordFiles, record: JobRecord, added: Sequence[Event], *rest: Any) -> None:
            self.threads.append(threading.current_thread())
            self.begun.set()
            self.release.wait()
            write(files, record, added, *rest)

        monkeypatch.setattr(RecordFiles, "write", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldFiles]:
    files = HeldFiles(monkeypatch)
    yield files
    files.release.set()
    for thread in files.threads:
        thread.join()


@pytest.mark.both_loops
async def test_the_record_of_a_success() -> None:
    seen: list[Event] = []
    async with RunRecorder() as recorder:
        await launch(LaunchSpec(shell("true"), run_id="a"), listeners=[recorder, seen.append])
    (run,) = recorded_runs()
    assert recorder.problem == ""
    assert (run.run_id, run.phase, run.exit_code, run.log_dir) == ("a", "succeeded", 0, None)
    assert run.events() == seen
    assert run.report() == ""


@pytest.mark.both_loops
async def test_one_recorder_of_several_jobs() -> None:
    """One after the other, and at the same time: each has its own record."""
    ends = {"a": 3, "b": 0, "c": 4, "d": 5}
    async with RunRecorder() as recorder:

        async def run(run_id: str) -> None:
            with suppress(JobFailed):
                spec = LaunchSpec(shell(f"exit {ends[run_id]}"), run_id=run_id)
                await launch(spec, listeners=[recorder])

        await run("a")
        await run("b")
        await asyncio.gather(run("c"), run("d"))
    runs = recorded_runs()
    assert {one.run_id: one.exit_code for one in runs} == ends
    for one in runs:
        assert {event.run_id for event in one.events()} == {one.run_id}
        failed = f": exit code {one.exit_code}"
        assert [each.endswith(failed) for each in one.failures] == [True] * bool(one.exit_code)


@pytest.mark.both_loops
async def test_the_record_of_a_failure(tmp_path: Path) -> None:
    """The report is that of the result."""
    logs = LogSpec(log_dir=str(tmp_path / "logs"), redirects=3)
    spec = LaunchSpec(shell("echo no such data >&2; exit 3"), logs=logs)
    async with RunRecorder() as recorder:
        with pytest.raises(JobFailed) as caught:
            await launch(spec, listeners=[recorder])
    result = caught.value.result
    run = run_in(str(result.log_dir))
    assert (run.phase, run.exit_code, run.log_dir) == ("failed", 3, result.log_dir)
    assert run.report() == f"{format_failure(result, spec.name)}\n"
    assert run.failures == (f"attempt 0 failed: {result.failures[0].summary}",)


async def test_a_job_that_was_stopped_before_its_restart_has_no_report() -> None:
    """As on the console: its workers have failed, not the job."""
    policy = RestartPolicy(backoff=Backoff(initial=3600, cap=3600, jitter=False))
    spec = LaunchSpec(shell("exit 3"), max_restarts=1, restart=policy)
    async with RunRecorder() as recorder, Agent(spec, listeners=[recorder]) as agent:
        async for event in agent.events():
            if isinstance(event, Restarting):
                break
        await agent.stop()
    (run,) = recorded_runs()
    assert (run.phase, len(run.failures), run.report()) == ("stopped", 1, "")


async def test_a_temporary_directory_of_logs_has_no_record() -> None:
    """It is removed if it is empty."""
    async with RunRecorder() as recorder:
        spec = LaunchSpec(shell("true"), logs=LogSpec(redirects=3))
        result = await launch(spec, listeners=[recorder])
    assert result.log_dir is None
    assert recorder.problem == ""
    assert recorded_runs()[0].events()


async def test_a_job_that_is_restarted_again_and_again_is_recorded(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second passes without an event, nor are there many."""
    monkeypatch.setattr(recorder, "_BATCH_MAX", 1_000_000)
    spec = LaunchSpec(shell("exit 1"), max_restarts=100_000, restart=AT_ONCE)
    async with (
        RunRecorder(delay=0.3) as records,
        Agent(spec, listeners=[records]) as agent,
    ):
        await until(lambda: [*state.rglob(RUN_FILE)], "a record")
        await agent.stop()


async def test_the_first_version_is_written_while_the_job_runs(tmp_path: Path) -> None:
    logs = LogSpec(log_dir=str(tmp_path / "logs"))
    async with (
        RunRecorder(delay=0.01) as recorder,
        Agent(LaunchSpec(SLEEPER, logs=logs), listeners=[recorder]) as agent,
    ):
        own = Path(str(agent.status().log_dir), RUN_FILE)
        while not own.exists():
            await asyncio.sleep(0.01)
        run = run_in(str(own.parent))
        assert (run.phase, run.ended_at, run.is_lost) == ("running", None, False)
    # The block of the agent was left early, which stopped the job.
    assert run_in(str(own.parent)).phase == "stopped"


async def test_the_first_version_does_not_wait_for_the_next_events(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that is killed early has a record; the events that follow wait for others."""
    monkeypatch.setattr(recorder, "_FIRST_DELAY", 1e-4)
    async with (
        RunRecorder(delay=1000) as records,
        Agent(LaunchSpec(SLEEPER), listeners=[records]) as agent,
    ):
        await until(lambda: recorded_runs(), "the first version")
        (first,) = recorded_runs()
        assert first.events()
        agent.forward_signal("SIGCONT")
        await agent.restart()
        assert recorded_runs() == [first]
    assert recorded_runs()[0].attempt == 1


async def test_a_job_that_never_began_has_no_record(state: Path) -> None:
    async with RunRecorder() as recorder:
        with pytest.raises((HostError, SpecError)):
            await launch(LaunchSpec(["x"], logs=LogSpec(log_dir="/proc/x")), listeners=[recorder])
    assert not state.exists()


async def test_more_events_than_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_BATCH_MAX", 2)
    seen: list[Event] = []
    spec = LaunchSpec(shell("exit 3"), nproc_per_node=3)
    async with RunRecorder() as own:
        with pytest.raises(JobFailed):
            await launch(spec, listeners=[own, seen.append])
    (run,) = recorded_runs()
    assert run.events() == seen
    assert run.phase == "failed"


async def test_a_file_system_that_blocks_does_not_hold_the_program(held: HeldFiles) -> None:
    """Nor the event loop: the files are written by a thread."""
    async with RunRecorder(patience=0.05) as recorder:
        result = await launch(LaunchSpec(shell("true")), listeners=[recorder])
    assert result.exit_code == 0
    assert recorder.problem == "it takes more than 0.05 s"
    assert held.threads
    assert threading.main_thread() not in held.threads


async def test_events_of_a_file_system_that_blocks_are_not_lost(held: HeldFiles) -> None:
    """They follow when it goes on."""
    seen: list[Event] = []
    spec = LaunchSpec(shell("sleep 0.2; exit 3"), max_restarts=1)
    async with RunRecorder(delay=0.01, patience=30) as recorder:
        with suppress(JobFailed):  # without a traceback, which would keep the agent
            await launch(spec, listeners=[recorder, seen.append])
        assert held.begun.is_set()
        assert isinstance(seen[-1], JobFinished)
        held.release.set()
    (run,) = recorded_runs()
    assert run.events() == seen


@pytest.mark.both_loops
async def test_the_last_files_survive_cancellation_twice(held: HeldFiles) -> None:
    async def run() -> None:
        async with RunRecorder(patience=30) as recorder:
            await launch(LaunchSpec(shell("true")), listeners=[recorder])
            launched.set()

    launched = asyncio.Event()
    task = asyncio.get_running_loop().create_task(run())
    await launched.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    held.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert recorded_runs()[0].phase == "succeeded"


async def test_two_jobs_at_once_have_their_own_records() -> None:
    async def run(name: str) -> None:
        async with RunRecorder() as recorder:
            await launch(LaunchSpec(shell("true"), run_id=name), listeners=[recorder])

    await asyncio.gather(run("a"), run("b"))
    assert {run.run_id: len(run.events()) for run in recorded_runs()} == {"a": 4, "b": 4}


def test_a_loop_that_ends_does_not_wait(held: HeldFiles) -> None:
    """A program without the block may lose the end of the record, and no more."""

    async def run() -> None:
        await launch(LaunchSpec(shell("true")), listeners=[RunRecorder()])

    asyncio.run(run())
