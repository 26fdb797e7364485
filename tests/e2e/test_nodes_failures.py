"""Workers that fail on one of many nodes: all restart, with one budget, to one outcome."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from elastic_aio import AttemptFailed, DeadlineMissed, JobFinished, Restarting, WorkerExited
from tests.support.cluster import AT_ONCE_S, WORKER, AgentProcess, Cluster, launcher_with, within

pytestmark = pytest.mark.black_box

WITH_BACKOFF = launcher_with("backoff=Backoff(initial=1.0, factor=2.0, jitter=False)")


async def fail(node: AgentProcess, attempt: int, how: str) -> None:
    """Let the first worker of a node fail."""
    node.order((await node.workers(attempt=attempt))[0], how)


async def test_all_restart_when_one_fails(tmp_path: Path) -> None:
    """Workers of the other nodes are stopped, and all start again with the same count."""
    async with Cluster(tmp_path, 2, max_restarts=1) as cluster:
        host, other = await cluster.start_all(2, nproc=2)
        with within():
            await fail(other, 0, "exit 3")
            for worker in await host.workers():
                assert (await host.note("signal", pid=worker.pid)).text == "SIGTERM"
            await cluster.workers(host, other, attempt=1, restart_count=1, max_restarts=1)
        for node in (host, other):
            assert (await node.event(Restarting)).restarts == 1
            await cluster.check_master(node, attempt=1)
        await cluster.succeed(host, other, attempt=1)


async def test_one_budget_for_all(tmp_path: Path) -> None:
    """Failures of different nodes are counted together; one more than the budget ends the job."""
    async with Cluster(tmp_path, 2, max_restarts=3) as cluster:
        host, other = await cluster.start_all(2)
        for attempt in range(3):
            await fail((host, other)[attempt % 2], attempt, "exit 3")
            await cluster.workers(host, other, attempt=attempt + 1, restart_count=attempt + 1)
        await fail(other, 3, "exit 9")
        for node in (host, other):
            ended = await node.ended(AT_ONCE_S)
            assert ended.code == 9
            report = ended.err[ended.err.index("=====") :]
            assert "rank      : 1 (local_rank: 0)" in report
            assert "exitcode  : 9" in report
            assert (await node.event(JobFinished)).exit_code == 9


@pytest.mark.parametrize("culprit", ["host", "other"])
async def test_every_report_shows_the_root_cause(culprit: str, tmp_path: Path) -> None:
    """The exception of one worker is in the report of every node, with its traceback."""
    async with Cluster(tmp_path, 2) as cluster:
        host, other = await cluster.start_all(2, nproc=2)
        fails = {"host": host, "other": other}[culprit]
        worker = (await fails.workers())[1]
        fails.order(worker, "raise no data")
        for node in (host, other):
            ended = await node.ended(AT_ONCE_S)
            assert ended.code == 1
            root = ended.err.split("Root Cause (first observed failure):")[1]
            assert f"rank      : {worker.rank} (local_rank: 1)" in root
            assert f"(pid: {worker.pid})" in root
            assert "host      : " in root
            assert "Traceback (most recent call last):" in root
            assert "ValueError: no data" in root
            failed = await node.event(AttemptFailed)
            assert failed.root.rank == worker.rank


async def test_the_first_of_several_failures_is_the_root(tmp_path: Path) -> None:
    """Workers that were stopped after the failure of another one are not the root cause."""
    async with Cluster(tmp_path, 3) as cluster:
        agents = [cluster.start(nproc=2) for _ in range(3)]
        workers = await cluster.workers(*agents)
        culprit = (await agents[1].workers())[1]
        assert len(workers) == 6
        agents[1].order(culprit, "exit 42")
        for agent in agents:
            assert (await agent.ended(AT_ONCE_S)).code == 42
            assert (await agent.event(AttemptFailed)).root.rank == culprit.rank


async def test_a_success_that_came_too_early_is_noted_on_every_node(tmp_path: Path) -> None:
    """Of one worker of another node, whose other one runs on."""
    async with Cluster(tmp_path, 2) as cluster:
        host, other = await cluster.start_all(2, nproc=2)
        early = (await host.workers())[1]
        host.order(early, "exit 0")
        await host.event(WorkerExited, pid=early.pid)
        await fail(other, 0, "exit 3")
        for node in (host, other):
            ended = await node.ended(AT_ONCE_S)
            (failed,) = node.events_of(AttemptFailed)
            (note,) = failed.root.notes
            assert note.startswith(f"rank {early.rank} (on {failed.node}) exited with 0, ")
            assert ended.err.count(note) == 1


async def test_workers_that_run_long_after_those_of_another_node_fail(tmp_path: Path) -> None:
    """The limit counts from the success of the node; its workers are noted."""
    async with Cluster(tmp_path, 2, exit_skew_timeout=3) as cluster:
        host, other = await cluster.start_all(2, nproc=2)
        for worker in await host.workers():
            host.order(worker, "exit 0")
        missed = await other.event(DeadlineMissed)
        assert (missed.deadline, missed.rank) == ("exit skew", (await other.workers())[0].rank)
        ended_at = max(event.time for event in host.events_of(WorkerExited))
        assert abs(missed.time - ended_at - 3) < 1
        for node in (host, other):
            assert (await node.ended(AT_ONCE_S)).code == 1
            (failed,) = node.events_of(AttemptFailed)
            assert "(exit skew timeout)" in failed.root.message
            assert any(re.match(r"rank [0-3] \(on .*\) exited", one) for one in failed.root.notes)


async def test_a_missing_program(tmp_path: Path) -> None:
    """A program that cannot start ends the job on all nodes, without a restart."""
    async with Cluster(tmp_path, 2, max_restarts=5) as cluster:
        host = await cluster.start_first("host")
        missing = tmp_path / "nothing" / Path(WORKER).name  # as another program it is refused
        other = cluster.start("other", missing, no_python=True)
        for node in (host, other):
            ended = await node.ended()
            assert ended.code == 127
            assert "nothing" in ended.err


async def test_the_back_off_belongs_to_the_job(tmp_path: Path) -> None:
    """Delays before restarts grow, whichever node has failed, and pass once for all nodes."""
    async with Cluster(tmp_path, 2, max_restarts=3, launcher=WITH_BACKOFF) as cluster:
        host, other = await cluster.start_all(2)
        for attempt, fails in enumerate((host, other)):
            failed_at = time.monotonic()
            await fail(fails, attempt, "exit 3")
            workers = await cluster.workers(host, other, attempt=attempt + 1)
            delay = 2.0**attempt
            for worker in workers:
                assert delay <= worker.time - failed_at < delay + AT_ONCE_S
            for node in (host, other):
                restarting = await node.event(Restarting, restarts=attempt + 1)
                assert restarting.delay == delay
