"""A notice of a preemption to a job of one node: what its workers see, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    Event,
    JobFinished,
    JobPreempted,
    JobState,
    JobStopped,
    LaunchSpec,
    LivenessSpec,
    LogSpec,
    PreemptionNotice,
    PreemptionSpec,
    Restarting,
    SignalForwarded,
    SpecError,
    StopPlan,
    StopRequested,
    WorkerExited,
)
from elastic_aio.agent.agent import driver_of
from tests.support.children import python, until, until_ready

pytestmark = pytest.mark.both_loops

WORKER = python("""
import os, signal, sys, time
from elastic_aio.worker import agree_to_change, pending_change
notes, rank, words = os.environ["NOTES"], os.environ["RANK"], os.environ["DOES"].split(",")
def say(text):
    with open(f"{notes}/{rank}", "a") as file:
        print(text, file=file)
def on_signal(number, frame):
    say(f"signal {number}")
for number in (10, 12):
    signal.signal(number, on_signal)
say("ready")
does, seen = words[int(rank) % len(words)], None
while True:
    change = pending_change()
    if change is not None and change != seen:
        seen = change
        assert change.is_preemption and 0 < change.time_left <= 60, change
        assert abs(change.deadline - time.time() - change.time_left) < 0.1
        say(f"{change.reason} {change.number}")
        if does == "agrees":
            assert agree_to_change()
        elif does == "raises":
            raise OSError(28, "No space left on device", "checkpoint")
        elif does != "waits":
            sys.exit(int(does))
    if os.path.exists(f"{notes}/exit"):
        sys.exit(5)
    time.sleep(0.003)
""")


class Job:
    """A running job, its notes and its events."""

    def __init__(self, agent: Agent, directory: Path, nproc: int, events: list[Event]) -> None:
        self.agent, self.directory, self.nproc, self.events = agent, directory, nproc, events

    def said(self, rank: int) -> list[str]:
        path = self.directory / str(rank)
        return path.read_text().splitlines() if path.exists() else []

    async def all_say(self, text: str, count: int = 1) -> None:
        await until(lambda: all(self.said(rank).count(text) >= count for rank in range(self.nproc)))

    def events_of(self, *kinds: type[Event]) -> list[Any]:
        return [one for one in self.events if isinstance(one, kinds)]

    async def preempted(self, notices: int = 1) -> JobPreempted:
        """Wait for the end; check that it is a preemption and that nothing is left."""
        with pytest.raises(JobPreempted) as caught:
            await self.agent.wait()
        error = caught.value
        assert isinstance(error, JobStopped)
        assert (error.result.state, error.result.exit_code) == (JobState.PREEMPTED, 85)
        (finished,) = self.events_of(JobFinished)
        assert (finished.state, finished.exit_code) == (JobState.PREEMPTED, 85)
        assert self.agent.status().phase == "preempted"
        assert len(self.events_of(PreemptionNotice)) == notices
        assert not self.events_of(Restarting)
        assert not [*self.directory.rglob("pending_change*")]
        return error


@asynccontextmanager
async def running(directory: Path, does: str, nproc: int = 2, **fields: Any) -> AsyncIterator[Job]:
    """Run a job whose workers do that after a notice, until it is ready."""
    (directory / "tmp").mkdir()
    spec = LaunchSpec(
        WORKER,
        nproc_per_node=nproc,
        env={"NOTES": str(directory), "DOES": does},
        **{"max_restarts": 3, "logs": LogSpec(log_dir=directory / "logs"), **fields},
    )
    events: list[Event] = []
    async with Agent(spec, listeners=[events.append]) as agent:
        job = Job(agent, directory, nproc, events)
        await job.all_say("ready")
        await until_ready(agent)
        yield job


@pytest.mark.parametrize("does", ["0", "7", "0,7", "7,0"])
async def test_workers_that_end_are_not_restarted(does: str, tmp_path: Path) -> None:
    """With whichever codes; and no failure is reported."""
    async with running(tmp_path, does) as job:
        assert job.agent.preempt(seconds=60, reason="SIGUSR1 was received")
        error = await job.preempted()
    assert str(error).endswith("was preempted: SIGUSR1 was received")
    for rank in range(2):
        assert job.said(rank) == ["ready", f"preemption {1 << 30}"]
    assert not job.events_of(AttemptFailed, StopRequested)
    codes = [one.status.code for one in job.events_of(WorkerExited)]
    assert sorted(codes) == sorted(map(int, (does.split(",") * 2)[:2]))


async def test_a_save_that_fails_after_a_notice_is_reported(tmp_path: Path) -> None:
    """A code alone says nothing: programs end with one of their own after they have saved."""
    async with running(tmp_path, "7,raises") as job:
        assert job.agent.preempt(seconds=60)
        await job.preempted()
    (failed,) = job.events_of(AttemptFailed)
    assert [one.rank for one in failed.failures] == [1]
    assert failed.root.reason.startswith("OSError: [Errno 28] No space left on device")


async def test_a_worker_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    async with running(tmp_path, "7,waits", 3) as job:
        job.agent.preempt(seconds=60)
        await until(lambda: len(job.events_of(WorkerExited)) == 2)
        await job.all_say(f"preemption {1 << 30}")
        assert list(job.agent.pids()) == [1]
        (tmp_path / "exit").touch()
        await job.preempted()
    assert not any(one.is_victim for one in job.events_of(WorkerExited))


async def test_workers_that_still_run_are_stopped_at_the_deadline(tmp_path: Path) -> None:
    notice = PreemptionSpec(deadline=0.2)
    async with running(tmp_path, "0,waits", preemption=notice) as job:
        job.agent.preempt()
        await job.preempted()
    (stop,) = job.events_of(StopRequested)
    assert stop.reason == "the job is preempted"
    assert [one.is_victim for one in job.events_of(WorkerExited)] == [False, True]


async def test_workers_that_agree_are_stopped_before_the_deadline(tmp_path: Path) -> None:
    async with running(tmp_path, "agrees") as job:
        job.agent.preempt(seconds=60)
        await job.preempted()
    (stop,) = job.events_of(StopRequested)
    assert stop.reason == "all workers agree to the preemption"


async def test_a_second_notice_that_leaves_no_less_time_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, "waits") as job:
        assert job.agent.preempt(seconds=60, reason="first")
        for seconds in (60, 59.9, None):
            assert not job.agent.preempt(seconds=seconds, reason="second")
        await job.all_say(f"preemption {1 << 30}")
        assert len(job.agent.pids()) == 2
        (tmp_path / "exit").touch()
        error = await job.preempted()
    assert error.result.reason == "first"
    assert all(job.said(rank).count(f"preemption {1 << 30}") == 1 for rank in range(2))


async def test_an_earlier_deadline_replaces_the_notice(tmp_path: Path) -> None:
    """The workers see it; the job ends by it; both have their event."""
    async with running(tmp_path, "waits") as job:
        assert job.agent.preempt(seconds=60, reason="Slurm")
        await job.all_say(f"preemption {1 << 30}")
        assert job.agent.preempt(seconds=30, reason="spot")
        await job.all_say(f"preemption {1 << 30}", count=2)
        assert job.agent.preempt(seconds=0.1, reason="spot, again")
        assert not job.agent.preempt(seconds=30)
        error = await job.preempted(notices=3)
    assert error.result.reason == "spot, again"
    notices = job.events_of(PreemptionNotice)
    assert [(one.why, one.time_left) for one in notices] == [
        ("Slurm", 60),
        ("spot", 30),
        ("spot, again", 0.1),
    ]
    (stop,) = job.events_of(StopRequested)
    assert stop.reason == "the job is preempted"


async def test_an_agreement_counts_for_an_earlier_deadline_too(tmp_path: Path) -> None:
    async with running(tmp_path, "agrees,waits") as job:
        job.agent.preempt(seconds=60)
        await job.all_say(f"preemption {1 << 30}")
        assert job.agent.preempt(seconds=30)
        await job.all_say(f"preemption {1 << 30}", count=2)
        assert len(job.agent.pids()) == 2
        (tmp_path / "exit").touch()
        await job.preempted(notices=2)


async def test_the_workers_get_a_signal_with_the_first_notice(tmp_path: Path) -> None:
    notice = PreemptionSpec(forward="USR2")
    async with running(tmp_path, "waits", preemption=notice) as job:
        job.agent.preempt()
        await job.all_say("signal 12")
        await job.all_say(
            f"preemption {1 << 30}"
        )  # a worker that had not looked sees the last only
        assert job.agent.preempt(seconds=30)
        await job.all_say(f"preemption {1 << 30}", count=2)
        (tmp_path / "exit").touch()
        await job.preempted(notices=2)
    (forwarded,) = job.events_of(SignalForwarded)
    assert (forwarded.signal, len(forwarded.pids)) == (12, 2)


@pytest.mark.parametrize("way", ["stop", "kill", "leave"])
async def test_a_stop_shortens_the_notice(way: str, tmp_path: Path) -> None:
    async with running(tmp_path, "waits") as job:
        job.agent.preempt(seconds=60)
        if way == "stop":
            await job.agent.stop(signal="SIGINT")
        elif way == "kill":
            job.agent.kill()
        if way != "leave":
            await job.preempted()
    await job.preempted()


async def test_a_notice_after_a_stop_has_no_effect(tmp_path: Path) -> None:
    async with running(tmp_path, "waits") as job:
        stopping = job.agent.stop()
        assert not job.agent.preempt()
        await stopping
        with pytest.raises(JobStopped) as caught:
            await job.agent.wait()
    assert caught.value.result.exit_code == 143
    assert not job.events_of(PreemptionNotice)


async def test_a_restart_is_not_possible_after_a_notice(tmp_path: Path) -> None:
    async with running(tmp_path, "waits") as job:
        job.agent.preempt(seconds=60)
        restarting = asyncio.ensure_future(job.agent.restart())
        await job.all_say(f"preemption {1 << 30}")
        (tmp_path / "exit").touch()
        await job.preempted()
        assert not await restarting


async def test_no_limit_of_the_workers_ends_them_after_a_notice(tmp_path: Path) -> None:
    """A checkpoint may take long; the deadline is the limit."""
    limits = LivenessSpec(ready_timeout=0.2)
    async with running(tmp_path, "waits", liveness=limits) as job:
        job.agent.preempt(seconds=1.0)
        await job.preempted()
    assert all(one.reason == "the job is preempted" for one in job.events_of(StopRequested))


async def test_a_preempted_job_without_a_directory(tmp_path: Path) -> None:
    """The signal is then the only notice that workers get."""
    notice = PreemptionSpec(forward="SIGUSR1")
    logs = LogSpec(log_dir="/dev/null")
    async with running(tmp_path, "waits", preemption=notice, logs=logs) as job:
        job.agent.preempt(seconds=60)
        await job.all_say("signal 10")
        (tmp_path / "exit").touch()
        await job.preempted()
    assert job.said(0) == ["ready", "signal 10"]


async def test_a_cancellation_during_the_notice(tmp_path: Path) -> None:
    """Once or twice: the stop plan runs, and nothing is left."""

    async def body() -> None:
        async with running(tmp_path, "waits", stop=StopPlan.within(5)) as job:
            job.agent.preempt(seconds=60)
            await job.all_say(f"preemption {1 << 30}")
            jobs.append(job)
            await job.agent.wait()

    jobs: list[Job] = []
    task = asyncio.ensure_future(body())
    await until(lambda: jobs)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert driver_of(jobs[0].agent).done.done()
    await jobs[0].preempted()


@pytest.mark.parametrize("seconds", [-1, float("nan"), "5", True])
async def test_absurd_seconds(seconds: Any, tmp_path: Path) -> None:
    async with running(tmp_path, "waits", 1) as job:
        with pytest.raises(SpecError, match="seconds"):
            job.agent.preempt(seconds=seconds)
        assert len(job.agent.pids()) == 1
