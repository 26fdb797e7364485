"""What becomes of a job when the store is lost at which its nodes meet."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from elastic_aio import (
    CoordinatorChanged,
    Promoted,
    RendezvousStoreLost,
    RendezvousStoreRegained,
    RoundFormed,
    RoundForming,
    StandingBy,
)
from tests.support.nodes import AT_ONCE_S, Node, Nodes, free_port
from tests.support.traces import alive

pytestmark = pytest.mark.black_box


def two_endpoints() -> str:
    """Return two meeting points."""
    return f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"


def port_of(nodes: Nodes) -> int:
    """Return the port of the only endpoint."""
    return int(nodes.endpoint.rpartition(":")[2])


async def hosted(nodes: Nodes, count: int) -> tuple[Node, ...]:
    """Start a node that serves the store, and others; all workers have started."""
    host = nodes.start("host")
    await host.event(RoundForming)
    agents = host, *(nodes.start() for _ in range(count - 1))
    await nodes.up(*agents)
    return agents


async def test_the_host_is_killed(tmp_path: Path) -> None:
    """The others meet at another place and go on in a smaller world, without a timeout."""
    async with Nodes(tmp_path, "1:3", endpoint=two_endpoints()) as nodes:
        host, *others = await hosted(nodes, 3)
        await host.kill()
        killed = time.monotonic()
        workers = await nodes.up(*others, attempt=1)
        assert time.monotonic() - killed < AT_ONCE_S
        assert {one.world_size for one in workers} == {2}
        assert {one.restart_count for one in workers} == {0}
        for node in others:
            await node.event(RendezvousStoreLost)
            await node.event(RendezvousStoreRegained)
        assert [node.told(RendezvousStoreRegained)[-1].is_host for node in others].count(True) == 1
        again = nodes.start("again")
        await nodes.up(*others, again, attempt=2)
        assert {ended.code for ended in await nodes.finish(*others, again, attempt=2)} == {0}


async def test_one_host_after_another(tmp_path: Path) -> None:
    """Each time the serving node is killed and replaced, the job has its size again."""
    async with Nodes(tmp_path, 3, endpoint=two_endpoints()) as nodes:
        host, *others = await hosted(nodes, 3)
        for _ in range(5):
            since = nodes.marks()
            positions = {node: len(node.events) for node in others}
            await host.kill()
            others.append(nodes.start())
            workers = await nodes.up(*others, since=since, world_size=3)
            assert {one.world_size for one in workers} == {3}
            hosts = [
                node
                for node in others
                if any(
                    isinstance(one, RendezvousStoreRegained) and one.is_host
                    for one in node.events.entries[positions.get(node, 0) :]
                )
            ]
            # A newcomer that serves the others from the start has regained nothing.
            host = hosts[0] if hosts else others[-1]
            others.remove(host)


@pytest.mark.parametrize("keeps_workers", [1, 0])
async def test_a_store_of_its_own_is_replaced(keeps_workers: int, tmp_path: Path) -> None:
    """Workers run on when the store is back in time, or are restarted once if that is wanted."""
    conf = {"is_host": 0, "store_grace": 30, "keeps_workers": keeps_workers}
    async with Nodes(tmp_path, 3, conf=conf) as nodes:
        store = await nodes.serve(port_of(nodes))
        agents = [nodes.start() for _ in range(3)]
        before = await nodes.up(*agents)
        for turn in range(1, 4):
            since = {agent: len(agent.events) for agent in agents}
            await store.kill()
            for agent in agents:
                await agent.event(RendezvousStoreLost, since=since[agent])
            store = await nodes.serve(port_of(nodes))
            for agent in agents:
                await agent.event(RendezvousStoreRegained, since=since[agent])
            if not keeps_workers:
                workers = await nodes.up(*agents, attempt=turn)
                assert {one.restart_count for one in workers} == {0}
        if keeps_workers:
            assert all(alive(one.pid) for one in before)
        attempt = 0 if keeps_workers else 3
        assert {ended.code for ended in await nodes.finish(*agents, attempt=attempt)} == {0}
        for agent in agents:
            assert len(agent.told(RoundFormed)) == 1 + attempt


async def test_workers_fail_while_there_is_no_store(tmp_path: Path) -> None:
    """A failure that could not be told is judged when the nodes meet again."""
    conf = {"is_host": 0, "store_grace": 30}
    async with Nodes(tmp_path, 2, conf=conf, max_restarts=1) as nodes:
        store = await nodes.serve(port_of(nodes))
        agents = [nodes.start() for _ in range(2)]
        await nodes.up(*agents)
        await store.kill()
        for agent in agents:
            await agent.event(RendezvousStoreLost)
        agents[0].tell((await agents[0].up())[0], "exit 3")
        await nodes.serve(port_of(nodes))
        workers = await nodes.up(*agents, attempt=1)
        assert {one.restart_count for one in workers} == {1}


async def test_the_only_store_is_gone(tmp_path: Path) -> None:
    """When no store can be found for long, the job ends with code 75 and one line."""
    conf = {"is_host": 0, "store_grace": 1, "read_timeout": 3}
    async with Nodes(tmp_path, 2, conf=conf) as nodes:
        store = await nodes.serve(port_of(nodes))
        agents = [nodes.start() for _ in range(2)]
        workers = await nodes.up(*agents)
        await store.kill()
        killed = time.monotonic()
        for agent in agents:
            ended = await agent.ended()
            assert ended.code == 75
            said = [line for line in ended.err.splitlines() if line.strip()][-1]
            assert nodes.endpoint in said
        assert 1.5 < time.monotonic() - killed < 2 + AT_ONCE_S
        assert not any(alive(one.pid) for one in workers)


async def test_no_store_from_the_start(tmp_path: Path) -> None:
    """A node that may not serve and finds nobody who does says where it looked."""
    async with Nodes(tmp_path, 2, conf={"is_host": 0, "read_timeout": 2}) as nodes:
        node = nodes.start()
        ended = await node.ended()
        assert ended.code == 75
        assert nodes.endpoint in ended.err.splitlines()[-1]


async def test_a_host_that_sleeps(tmp_path: Path) -> None:
    """The others go on without it; when it wakes up it takes part again, in no place twice."""
    conf = {"heartbeat_timeout": 2}
    async with Nodes(tmp_path, "1:3", endpoint=two_endpoints(), conf=conf) as nodes:
        host, *others = await hosted(nodes, 3)
        host.send(signal.SIGSTOP)
        asleep = time.monotonic()
        workers = await nodes.up(*others, attempt=1)
        assert time.monotonic() - asleep < 2 + 3 * AT_ONCE_S
        assert {one.world_size for one in workers} == {2}
        host.send(signal.SIGCONT)
        workers = await nodes.up(host, *others, world_size=3, since=nodes.marks())
        assert {one.restart_count for one in workers} == {0}


async def test_a_host_that_sleeps_while_it_has_been_replaced(tmp_path: Path) -> None:
    """When its place is taken, the one that wakes up stands by."""
    conf = {"heartbeat_timeout": 2}
    async with Nodes(tmp_path, 3, endpoint=two_endpoints(), conf=conf) as nodes:
        host, *others = await hosted(nodes, 3)
        spare = nodes.start("spare")
        await spare.event(StandingBy)
        host.send(signal.SIGSTOP)
        await nodes.up(*others, spare, attempt=1)
        since = len(host.events)
        host.send(signal.SIGCONT)
        await host.event(StandingBy, since=since)
        await others[0].kill()
        promoted = await host.event(Promoted)
        assert promoted.group_rank == (await others[0].formed(attempt=1)).group_rank


async def test_a_member_that_sleeps(tmp_path: Path) -> None:
    """A node that stands still longer than the heartbeat timeout is replaced, and comes back."""
    async with Nodes(tmp_path, "1:2", conf={"heartbeat_timeout": 2}) as nodes:
        host, other = await hosted(nodes, 2)
        for turn in range(3):
            since = nodes.marks()
            other.send(signal.SIGSTOP)
            await nodes.up(host, since=since, world_size=1)
            since = nodes.marks()
            other.send(signal.SIGCONT)
            await nodes.up(host, other, since=since, world_size=2)
            assert len(host.told(RoundFormed)) == 3 + 2 * turn


async def test_a_pause_that_is_short_changes_nothing(tmp_path: Path) -> None:
    """A node that stands still for less than the heartbeat timeout keeps its workers."""
    async with Nodes(tmp_path, "1:2") as nodes:
        agents = await hosted(nodes, 2)
        before = [one for agent in agents for one in await agent.up()]
        for agent in agents:
            agent.send(signal.SIGSTOP)
            await asyncio.sleep(1.0)  # the length is the point
            agent.send(signal.SIGCONT)
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}
        assert not any(agent.told(CoordinatorChanged, epoch=2) for agent in agents)
        for agent in agents:
            assert len(agent.told(RoundFormed)) == 1
        assert len(before) == 2
