"""Jobs that lose the store of their rendezvous."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from elastic_aio import (
    CoordinatorChanged,
    NodeStandby,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundFormed,
    StandbyPromoted,
)
from tests.support.cluster import AT_ONCE_S, Cluster, within
from tests.support.leaks import alive
from tests.support.sockets import free_port

pytestmark = pytest.mark.black_box


def two_endpoints() -> str:
    """Return two endpoints of this host."""
    return f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"


async def test_the_store_host_is_killed(tmp_path: Path) -> None:
    """The others move to the second endpoint and re-form a smaller world, without a timeout."""
    async with Cluster(tmp_path, "1:3", endpoint=two_endpoints()) as cluster:
        host, *others = await cluster.start_all(3)
        await host.kill()
        with within():
            workers = await cluster.workers(*others, attempt=1)
        assert {worker.world_size for worker in workers} == {2}
        assert {worker.restart_count for worker in workers} == {0}
        for node in others:
            await node.event(RendezvousStoreLost)
            await node.event(RendezvousStoreRecovered)
        assert [node.events_of(RendezvousStoreRecovered)[-1].is_host for node in others].count(
            True
        ) == 1
        again = cluster.start("again")
        await cluster.workers(*others, again, attempt=2)
        await cluster.succeed(*others, again, attempt=2)


async def test_one_store_host_after_another(tmp_path: Path) -> None:
    """Each time the store host is killed and replaced, the world has its size again."""
    async with Cluster(tmp_path, 3, endpoint=two_endpoints()) as cluster:
        host, *others = await cluster.start_all(3)
        for _ in range(5):
            since = cluster.note_counts()
            positions = {node: len(node.events) for node in others}
            await host.kill()
            others.append(cluster.start())
            workers = await cluster.workers(*others, since=since, world_size=3)
            assert {worker.world_size for worker in workers} == {3}
            hosts = [
                node
                for node in others
                if any(
                    isinstance(entry, RendezvousStoreRecovered) and entry.is_host
                    for entry in node.events.entries[positions.get(node, 0) :]
                )
            ]
            # A newcomer that serves from its start has no store to recover.
            host = hosts[0] if hosts else others[-1]
            others.remove(host)


@pytest.mark.parametrize("keep_workers", [1, 0])
async def test_a_separate_store_is_replaced(keep_workers: int, tmp_path: Path) -> None:
    """With `keep_workers` they continue if the store is back in time; else they restart once."""
    conf = {"is_host": 0, "store_grace": 30, "keep_workers": keep_workers}
    async with Cluster(tmp_path, 3, conf=conf) as cluster:
        store = await cluster.start_store()
        agents = [cluster.start() for _ in range(3)]
        before = await cluster.workers(*agents)
        for turn in range(1, 4):
            since = {agent: len(agent.events) for agent in agents}
            await store.kill()
            for agent in agents:
                await agent.event(RendezvousStoreLost, since=since[agent])
            store = await cluster.start_store()
            for agent in agents:
                await agent.event(RendezvousStoreRecovered, since=since[agent])
            if not keep_workers:
                await cluster.workers(*agents, attempt=turn, restart_count=0)
        if keep_workers:
            assert all(alive(worker.pid) for worker in before)
        attempt = 0 if keep_workers else 3
        await cluster.succeed(*agents, attempt=attempt)
        for agent in agents:
            assert len(agent.events_of(RoundFormed)) == 1 + attempt


async def test_workers_fail_while_there_is_no_store(tmp_path: Path) -> None:
    """A failure that could not be reported is decided on when the store is back."""
    conf = {"is_host": 0, "store_grace": 30}
    async with Cluster(tmp_path, 2, conf=conf, max_restarts=1) as cluster:
        store = await cluster.start_store()
        agents = [cluster.start() for _ in range(2)]
        await cluster.workers(*agents)
        await store.kill()
        for agent in agents:
            await agent.event(RendezvousStoreLost)
        agents[0].order((await agents[0].workers())[0], "exit 3")
        await cluster.start_store()
        await cluster.workers(*agents, attempt=1, restart_count=1)


async def test_the_only_store_does_not_come_back(tmp_path: Path) -> None:
    """After `read_timeout` without a store the job ends with code 75 and one line."""
    conf = {"is_host": 0, "store_grace": 1, "read_timeout": 3}
    async with Cluster(tmp_path, 2, conf=conf) as cluster:
        store = await cluster.start_store()
        agents = [cluster.start() for _ in range(2)]
        workers = await cluster.workers(*agents)
        await store.kill()
        killed = time.monotonic()
        for agent in agents:
            await agent.fails(cluster.endpoint)
        assert 1.5 < time.monotonic() - killed < 2 + AT_ONCE_S
        assert not any(alive(worker.pid) for worker in workers)


async def test_no_store_from_the_start(tmp_path: Path) -> None:
    """The error of a node with `is_host=0` names the endpoint that has no store."""
    async with Cluster(tmp_path, 2, conf={"is_host": 0, "read_timeout": 2}) as cluster:
        node = cluster.start()
        await node.fails(cluster.endpoint)


async def test_a_suspended_store_host(tmp_path: Path) -> None:
    """The others re-form without it; it joins after it was resumed, and no rank is given twice."""
    conf = {"heartbeat_timeout": 2}
    async with Cluster(tmp_path, "1:3", endpoint=two_endpoints(), conf=conf) as cluster:
        host, *others = await cluster.start_all(3)
        host.send(signal.SIGSTOP)
        with within(2 + 3 * AT_ONCE_S):
            await cluster.workers(*others, attempt=1, world_size=2)
        host.send(signal.SIGCONT)
        workers = await cluster.workers(host, *others, world_size=3, since=cluster.note_counts())
        assert {worker.restart_count for worker in workers} == {0}


async def test_a_node_leaves_while_the_store_host_is_suspended(tmp_path: Path) -> None:
    """It does not wait for the store: 0.75 s, and the end of its worker."""
    async with Cluster(tmp_path, "1:2", conf={"last_call_timeout": 60}) as cluster:
        host, other = await cluster.start_all(2)
        host.send(signal.SIGSTOP)
        with within():
            await other.stops()
        host.send(signal.SIGCONT)
        await cluster.workers(host, attempt=1)
        await cluster.succeed(host, attempt=1)


async def test_a_suspended_store_host_is_replaced(tmp_path: Path) -> None:
    """It stands by after it was resumed, because its rank is taken."""
    conf = {"heartbeat_timeout": 2}
    async with Cluster(tmp_path, 3, endpoint=two_endpoints(), conf=conf) as cluster:
        host, *others = await cluster.start_all(3)
        spare = cluster.start("spare")
        await spare.event(NodeStandby)
        host.send(signal.SIGSTOP)
        await cluster.workers(*others, spare, attempt=1)
        since = len(host.events)
        host.send(signal.SIGCONT)
        await host.event(NodeStandby, since=since)
        await others[0].kill()
        promoted = await host.event(StandbyPromoted)
        assert promoted.group_rank == (await others[0].round_formed(attempt=1)).group_rank


async def test_a_suspended_member(tmp_path: Path) -> None:
    """A node that is suspended for longer than the heartbeat timeout is lost, and rejoins."""
    async with Cluster(tmp_path, "1:2", conf={"heartbeat_timeout": 2}) as cluster:
        host, other = await cluster.start_all(2)
        for turn in range(3):
            since = cluster.note_counts()
            other.send(signal.SIGSTOP)
            await cluster.workers(host, since=since, world_size=1)
            since = cluster.note_counts()
            other.send(signal.SIGCONT)
            await cluster.workers(host, other, since=since, world_size=2)
            assert len(host.events_of(RoundFormed)) == 3 + 2 * turn


async def test_a_short_suspension_changes_nothing(tmp_path: Path) -> None:
    """A node that is suspended for less than the heartbeat timeout keeps its workers."""
    async with Cluster(tmp_path, "1:2") as cluster:
        agents = await cluster.start_all(2)
        before = [worker for agent in agents for worker in await agent.workers()]
        for agent in agents:
            agent.send(signal.SIGSTOP)
            await asyncio.sleep(1.0)  # shorter than the heartbeat timeout
            agent.send(signal.SIGCONT)
        await cluster.succeed(*agents)
        assert not any(agent.events_of(CoordinatorChanged, term=2) for agent in agents)
        for agent in agents:
            assert len(agent.events_of(RoundFormed)) == 1
        assert len(before) == 2
