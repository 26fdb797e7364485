"""The coordinator is a node like any other: it may end or be suspended."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from elastic_aio import CoordinatorChanged, NodeJoined, RoundFormed
from tests.support.cluster import AT_ONCE_S, AgentProcess, Cluster
from tests.support.leaks import alive

pytestmark = pytest.mark.black_box


async def started(cluster: Cluster, count: int) -> tuple[AgentProcess, list[AgentProcess]]:
    """Start a store and nodes that only use it; return the coordinator and the other nodes."""
    await cluster.start_store(int(cluster.endpoint.rpartition(":")[2]))
    agents = [cluster.start() for _ in range(count)]
    await cluster.workers(*agents)
    # Only the coordinator reports who has joined.
    (first,) = [agent for agent in agents if agent.events_of(NodeJoined)]
    agents.remove(first)
    return first, agents


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_coordinator_ends(number: signal.Signals, tmp_path: Path) -> None:
    """Another node takes over at once, and the others re-form without it."""
    async with Cluster(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=1) as cluster:
        first, others = await started(cluster, 3)
        first.send(number)
        ended_at = time.monotonic()
        assert (await first.ended()).code == 128 + number
        workers = await cluster.workers(*others, attempt=1)
        assert time.monotonic() - ended_at < AT_ONCE_S
        assert {(worker.world_size, worker.restart_count) for worker in workers} == {(2, 0)}
        for agent in others:
            assert (await agent.event(CoordinatorChanged, term=lambda term: term > 1)).name
        # The successor decides about failures as the first coordinator would have.
        others[0].order((await others[0].workers(attempt=1))[0], "exit 3")
        workers = await cluster.workers(*others, attempt=2)
        assert {worker.restart_count for worker in workers} == {1}
        assert {ended.code for ended in await cluster.finish(*others, attempt=2)} == {0}


async def test_the_restart_budget_outlives_the_coordinator(tmp_path: Path) -> None:
    """The successor continues the count of restarts."""
    async with Cluster(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=2) as cluster:
        first, others = await started(cluster, 3)
        for attempt in range(2):
            others[0].order((await others[0].workers(attempt=attempt))[0], "exit 3")
            await cluster.workers(first, *others, attempt=attempt + 1)
        await first.kill()
        workers = await cluster.workers(*others, attempt=3)
        assert {worker.restart_count for worker in workers} == {2}
        others[1].order((await others[1].workers(attempt=3))[0], "exit 6")
        assert {(await agent.ended(AT_ONCE_S)).code for agent in others} == {6}


async def test_the_coordinator_is_suspended(tmp_path: Path) -> None:
    """Its orders have no effect after it was replaced; it takes part again."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Cluster(tmp_path, "1:3", conf=conf) as cluster:
        first, others = await started(cluster, 3)
        for turn in range(3):
            since = cluster.note_counts()
            first.send(signal.SIGSTOP)
            await cluster.workers(*others, since=since, world_size=2)
            since = cluster.note_counts()
            first.send(signal.SIGCONT)
            workers = await cluster.workers(first, *others, since=since, world_size=3)
            assert {worker.restart_count for worker in workers} == {0}
            assert len(others[0].events_of(RoundFormed)) == 3 + 2 * turn


async def test_the_coordinator_is_suspended_while_a_worker_fails(tmp_path: Path) -> None:
    """The successor decides about a failure that was reported to the suspended coordinator."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Cluster(tmp_path, "1:3", conf=conf, max_restarts=1) as cluster:
        first, others = await started(cluster, 3)
        first.send(signal.SIGSTOP)
        others[0].order((await others[0].workers())[0], "exit 3")
        workers = await cluster.workers(*others, world_size=2)
        assert all(alive(worker.pid) for worker in workers)
        since = cluster.note_counts()
        first.send(signal.SIGCONT)
        await cluster.workers(first, *others, since=since, world_size=3)
