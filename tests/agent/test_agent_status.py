"""What a running job says about itself: its status, its pids, and a requested restart."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    Backoff,
    JobFailed,
    JobStopped,
    LaunchSpec,
    LogSpec,
    RendezvousSpec,
    Restarting,
    RestartPolicy,
)
from elastic_aio.agent.event_log import EventLog
from elastic_aio.events import JobStarted, WorkerStarted
from tests.support.children import POLITE, SLEEPER, noted, noting, python, shell, until
from tests.support.sockets import free_port


async def running(agent: Agent) -> None:
    """Wait until all workers of this node run."""
    async for _ in agent.events():
        if agent.status(usage=False).is_ready:
            return


async def test_the_status_of_a_running_job(tmp_path: Path) -> None:
    logs = LogSpec(log_dir=str(tmp_path), redirects=3)
    spec = LaunchSpec(noting(), nproc_per_node=2, max_restarts=3, run_id="r", logs=logs)
    async with Agent(spec.replace(env={"NOTES": str(tmp_path)})) as agent:
        await running(agent)
        await until(noted(tmp_path, 2))
        # A program that has just begun has few pages.
        await until(lambda: all((one.rss_bytes or 0) > 1 << 18 for one in agent.status().workers))
        status = agent.status()
        assert (status.run_id, status.phase, status.attempt) == ("r", "running", 0)
        assert (status.restarts_left, status.round, status.is_ready) == (3, 0, True)
        assert {worker.rank: worker.pid for worker in status.workers} == agent.pids()
        assert sorted(agent.pids().values()) == sorted(noted(tmp_path, 2)())
        for worker in status.workers:
            assert worker.state == "running"
            assert worker.since >= (status.started_at or 0)
            assert worker.heartbeat is None
            assert worker.stdout_path is not None
            assert Path(worker.stdout_path).exists()
            assert worker.usage is not None
            assert worker.usage.max_rss_bytes > 1 << 18
            assert worker.usage.minor_faults > 0
            assert worker.rss_bytes is not None
            assert 1 << 18 < worker.rss_bytes <= worker.usage.max_rss_bytes
        assert agent.status(usage=False).workers[0].usage is None
        await agent.stop()
        ended = agent.status()
        assert (ended.phase, ended.has_ended, agent.pids()) == ("stopped", True, {})
        assert all(worker.usage is not None for worker in ended.workers)
        assert all(worker.rss_bytes is None for worker in ended.workers)
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert caught.value.result.goodput.productive == pytest.approx(ended.goodput.productive)


async def test_the_status_has_what_workers_report() -> None:
    """Step, phase and status, and when the last message came."""
    code = "from elastic_aio.worker import progress; progress(7); import time; time.sleep(99)"
    spec = LaunchSpec(python(f"import sys; sys.path[:] = {sys.path!r}; {code}"))
    async with Agent(spec) as agent:
        await running(agent)
        await until(lambda: agent.status(usage=False).workers[0].heartbeat)
        worker = agent.status().workers[0]
        assert worker.heartbeat is not None
        assert worker.since - 1 < worker.heartbeat < time.time() + 1  # the clock may be adjusted
        assert worker.reported == "step 7"


async def test_an_agent_without_a_job_has_no_status() -> None:
    agent = Agent(LaunchSpec(["true"]))
    with pytest.raises(RuntimeError, match="has not been started"):
        agent.status()
    with pytest.raises(RuntimeError, match="has not been started"):
        agent.pids()


def test_the_status_of_many_workers_is_cheap() -> None:
    """No worker costs more than its part of a tuple: the status is not computed anew."""
    log = EventLog("r", "h", keep=10)
    log.append(
        JobStarted(entrypoint="x", nproc_per_node=512, nnodes="1", max_restarts=0, agent_pid=1)
    )
    for rank in range(512):
        log.append(WorkerStarted(rank=rank, local_rank=rank, pid=rank + 1))
    first, second = log.tracker.status(1.0), log.tracker.status(2.0)
    assert len(first.workers) == 512
    assert all(one is other for one, other in zip(first.workers, second.workers, strict=True))


async def test_a_requested_restart_replaces_the_workers(tmp_path: Path) -> None:
    """It costs no restart, and the new workers find the same restart count."""
    spec = LaunchSpec(
        noting(first='echo "$TORCHELASTIC_RESTART_COUNT" >> "$NOTES/counts"'),
        nproc_per_node=2,
        env={"NOTES": str(tmp_path)},
    )
    async with Agent(spec) as agent:
        await running(agent)
        await until(noted(tmp_path, 2))
        before = agent.pids()
        for rank in range(2):
            (tmp_path / str(rank)).unlink()
        assert await agent.restart("new data") is True
        await until(noted(tmp_path, 2))
        assert not set(before.values()) & set(agent.pids().values())
        status = agent.status()
        assert (status.attempt, status.restarts, status.phase) == (1, 0, "running")
        assert status.goodput.restarting > 0
        await agent.stop()
        events = [event async for event in agent.events()]
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert [event.why for event in events if isinstance(event, Restarting)] == ["new data"]
    assert (tmp_path / "counts").read_text().split() == ["0"] * 4
    assert [attempt.failures for attempt in caught.value.result.attempts] == [(), ()]


async def test_a_restart_while_workers_start() -> None:
    """The attempt that is being started is replaced; one later attempt runs."""
    async with Agent(LaunchSpec(SLEEPER, nproc_per_node=3)) as agent:
        assert await agent.restart() is True
        assert agent.status().attempt == 1
        assert len(agent.pids()) == 3


async def test_a_restart_ends_a_back_off() -> None:
    backoff = Backoff(initial=3600, cap=3600, jitter=False)
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1; exec sleep 99"
    spec = LaunchSpec(shell(script), max_restarts=1, restart=RestartPolicy(backoff=backoff))
    async with Agent(spec) as agent:
        async for event in agent.events():
            if isinstance(event, Restarting):
                break
        assert await agent.restart() is True
        assert agent.status().restarts == 1


async def test_a_restart_of_a_job_that_ends() -> None:
    """A worker that fails by itself in the stop is a failure; no restart is left for it."""
    script = "trap 'kill -9 $$' TERM; echo; while :; do sleep 0.01; done"
    async with Agent(LaunchSpec(shell(script))) as agent:
        await running(agent)
        stopping = asyncio.ensure_future(agent.stop())
        assert await agent.restart() is False
        await stopping
        assert await agent.restart() is False


async def test_a_worker_that_fails_before_its_restart_has_failed() -> None:
    async with Agent(LaunchSpec(shell("exit 3"))) as agent:
        with pytest.raises(JobFailed):
            await agent.wait()
        assert await agent.restart() is False


async def test_a_restart_of_all_nodes(tmp_path: Path) -> None:
    """One node requests it, and the workers of both are replaced."""
    rendezvous = RendezvousSpec(endpoint=f"127.0.0.1:{free_port()}", last_call_timeout=1)
    spec = LaunchSpec([*POLITE], nnodes=2, run_id="r", rendezvous=rendezvous)
    async with Agent(spec) as first, Agent(spec) as second:
        await asyncio.gather(running(first), running(second))
        before = [first.pids(), second.pids()]
        assert await second.restart("new data") is True
        async for _ in first.events():
            if first.status(usage=False).attempt == 1 and first.status(usage=False).is_ready:
                break
        assert first.pids() != before[0]
        assert second.pids() != before[1]
        for agent in first, second:
            status = agent.status()
            assert (status.restarts, status.membership_changes, status.round) == (0, 0, 1)
        async for event in first.events():
            if isinstance(event, Restarting):
                assert event.why.startswith("new data (on ")
                break
