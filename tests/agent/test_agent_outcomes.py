"""How a job that is followed through an Agent can end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    JobFailed,
    JobFinished,
    JobState,
    JobStopped,
    LaunchSpec,
    LogSpec,
    SpecError,
    StopPlan,
    StopRequested,
    WorkerExited,
)
from tests.support.children import POLITE, SIGNAL_LOGGER, SLEEPER, noted, noting, until
from tests.support.leaks import alive, own_children


def spec(directory: Path, entrypoint: list[str], nproc: int = 1) -> LaunchSpec:
    """Return a job of workers that leave notes in a directory."""
    return LaunchSpec(entrypoint, env={"NOTES": str(directory)}, nproc_per_node=nproc)


async def test_wait_returns_the_result() -> None:
    """The result of a finished job can be had by many, in the block and after it."""
    async with Agent(LaunchSpec(["true"], nproc_per_node=2)) as agent:
        first, second = await asyncio.gather(agent.wait(), agent.wait())
    assert first is second is await agent.wait()
    assert first.state is JobState.SUCCEEDED
    assert agent.run_id in repr(agent)


async def test_wait_raises_the_failure() -> None:
    """A failed job raises JobFailed from `wait`, and again from the next one."""
    async with Agent(LaunchSpec(["false"])) as agent:
        for _ in range(2):
            with pytest.raises(JobFailed) as caught:
                await agent.wait()
            assert caught.value.failures[0].status.code == 1


async def test_stop_raises_from_wait(tmp_path: Path) -> None:
    """A job ended by `stop` raises JobStopped, after its workers had their say."""
    async with Agent(spec(tmp_path, POLITE, 2)) as agent:
        pids = await until(noted(tmp_path, 2))
        await agent.stop(reason="enough")
        assert not any(map(alive, pids))
        with pytest.raises(JobStopped, match="enough") as caught:
            await agent.wait()
    result = caught.value.result
    assert (result.state, result.exit_code, result.reason) == (JobState.STOPPED, 143, "enough")
    assert [worker.status.code for worker in result.attempts[0].workers] == [0, 0]
    assert result.failures == ()
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]


async def test_stop_need_not_be_awaited(tmp_path: Path) -> None:
    """The request counts from the call on."""
    async with Agent(spec(tmp_path, POLITE)) as agent:
        await until(noted(tmp_path, 1))
        agent.stop()
        with pytest.raises(JobStopped):
            await agent.wait()


async def test_stop_with_a_signal_of_its_own(tmp_path: Path) -> None:
    """The signal of a stop takes the place of the plan's first one."""
    job = spec(tmp_path, SIGNAL_LOGGER).replace(stop=StopPlan.within(0.1))
    async with Agent(job) as agent:
        await until(noted(tmp_path, 1))
        agent.stop(signal=signal.SIGINT)
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert (tmp_path / "log").read_text() == "SIGINT\n"
    assert caught.value.result.exit_code == 130


async def test_a_stop_twice_is_one_stop(tmp_path: Path) -> None:
    """The first request decides; `stop` after the end is no error."""
    async with Agent(spec(tmp_path, POLITE)) as agent:
        await until(noted(tmp_path, 1))
        agent.stop(reason="first")
        agent.stop(signal=signal.SIGINT, reason="second")
        with pytest.raises(JobStopped, match="first"):
            await agent.wait()
        await agent.stop(reason="third")
        events = [event async for event in agent.events()]
    assert sum(isinstance(event, StopRequested) for event in events) == 1


async def test_cancelling_wait_stops_nothing(tmp_path: Path) -> None:
    """Only leaving the block stops the job, not giving up to wait for it."""
    job = spec(tmp_path, noting("until [ -e $NOTES/go ]; do sleep 0.01; done"))
    async with Agent(job) as agent:
        (pid,) = await until(noted(tmp_path, 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await agent.wait()
        assert alive(pid)
        (tmp_path / "go").touch()
        assert (await agent.wait()).exit_code == 0


async def test_leaving_the_block_early_stops_the_job(tmp_path: Path) -> None:
    """Nothing of the job is left behind the block, and its story has an end."""
    async with Agent(spec(tmp_path, POLITE, 2)) as agent:
        pids = await until(noted(tmp_path, 2))
    assert not any(map(alive, pids))
    assert sorted((tmp_path / "stopped").read_text().split()) == ["0", "1"]
    last = [event async for event in agent.events()][-1]
    assert isinstance(last, JobFinished)
    assert last.state is JobState.STOPPED
    with pytest.raises(JobStopped, match="block was left"):
        await agent.wait()


async def test_an_exception_in_the_block_stops_the_job(tmp_path: Path) -> None:
    """The exception goes on when the job has been stopped."""
    pids: list[int] = []

    async def fail() -> None:
        async with Agent(spec(tmp_path, POLITE)):
            pids.extend(await until(noted(tmp_path, 1)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not alive(pids[0])
    assert (tmp_path / "stopped").exists()


async def test_leaving_at_once() -> None:
    """A block without a body starts and stops a job, however early."""
    async with Agent(LaunchSpec(SLEEPER, nproc_per_node=4)) as agent:
        pass
    last = [event async for event in agent.events()][-1]
    assert isinstance(last, JobFinished)


async def test_leaving_the_block_is_not_cut_short_by_cancellation(tmp_path: Path) -> None:
    """Cancelled while it leaves the block, an agent still sees its stop plan through."""

    async def follow() -> None:
        async with Agent(spec(tmp_path, POLITE)):
            await until(noted(tmp_path, 1))

    task = asyncio.ensure_future(follow())
    (pid,) = await until(noted(tmp_path, 1))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert not alive(pid)
    assert (tmp_path / "stopped").exists()


async def test_a_setting_that_does_not_fit_the_host() -> None:
    """Entering refuses what cannot be, and leaves nothing open."""
    children = own_children()
    logs = LogSpec(local_ranks_filter=[60_000])
    with pytest.raises(SpecError, match=r"logs\.local_ranks_filter"):
        async with Agent(LaunchSpec(["true"], nproc_per_node="cpu", logs=logs)):
            raise AssertionError("never entered")
    assert own_children() == children


async def test_a_signal_to_a_worker_is_a_failure_like_any_other(tmp_path: Path) -> None:
    """A worker killed by a stranger is the culprit; the supervisor's kills are not."""
    async with Agent(spec(tmp_path, noting(), 2)) as agent:
        pids = await until(noted(tmp_path, 2))
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(JobFailed) as caught:
            await agent.wait()
        events = [event async for event in agent.events()]
    assert caught.value.result.exit_code == 137
    assert [(one.rank, one.is_victim) for one in caught.value.failures] == [(1, False), (0, True)]
    exits = {event.rank: event for event in events if isinstance(event, WorkerExited)}
    assert (exits[1].is_victim, exits[0].is_victim) == (False, True)
