"""Nodes on hosts of their own, and a network between them that fails.

All hosts have names that cannot be looked up, and a name server that never answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio import (
    NodeJoined,
    NodeRefused,
    RendezvousStoreLost,
    RendezvousStoreRegained,
    RoundFormed,
    RoundForming,
)
from tests.support.netns import Network, needs_network_namespaces
from tests.support.nodes import AT_ONCE_S, Node, Nodes
from tests.support.traces import alive

pytestmark = [pytest.mark.black_box, needs_network_namespaces]

FIRST = "10.77.0.1:29400"
SECOND = "10.77.0.2:29400"
HEARTBEAT_S = 2
CONF = {"heartbeat_timeout": HEARTBEAT_S}
# Silence has to be noticed, and after that everything goes at once.
NOTICED_S = HEARTBEAT_S + 2 * AT_ONCE_S


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Make three hosts."""
    with Network(tmp_path / "network", "a", "b", "c") as network:
        yield network


async def started(nodes: Nodes, network: Network) -> tuple[Node, ...]:
    """Start a node on each host, the one that serves the store first."""
    first, *others = network.hosts
    host = nodes.start(first, host=network[first])
    await host.event(RoundForming)
    agents = host, *(nodes.start(name, host=network[name]) for name in others)
    await nodes.up(*agents)
    return agents


async def test_no_names_are_needed(network: Network, tmp_path: Path) -> None:
    """Nobody asks a name server, and workers are told an address that all of them reach."""
    async with Nodes(tmp_path, 3, endpoint=FIRST) as nodes:
        agents = await started(nodes, network)
        for agent in agents:
            (worker,) = await agent.up()
            assert worker.master_addr == "10.77.0.1"
            assert await agent.ask(worker, "connect") == "connected"
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}
        assert [network.questions(name) for name in network.hosts] == [0, 0, 0]


async def test_who_is_missing_is_named(network: Network, tmp_path: Path) -> None:
    """The names of the hosts that have come, and of the one that was lost, are told."""
    async with Nodes(tmp_path, 3, endpoint=FIRST, conf={"join_timeout": 6}) as nodes:
        a, b, c = await started(nodes, network)
        await c.kill()
        for agent in (a, b):
            ended = await agent.ended(6 + AT_ONCE_S)
            assert ended.code == 75
            last = ended.err.splitlines()[-1]
            assert "2 of 3" in last
            assert "(a, b)" in last
            assert "missing: c" in last


async def test_hosts_that_say_their_own_name_is_a_loopback_address(
    network: Network, tmp_path: Path
) -> None:
    """An endpoint by name works where `/etc/hosts` of its host has 127.0.1.1 for it."""
    others = "127.0.0.1 localhost\n10.77.0.1 a\n"
    for host in network.hosts.values():
        own = "127.0.0.1 localhost\n127.0.1.1 a\n"
        (host.folder / "hosts").write_text(own if host.name == "a" else others)
    async with Nodes(tmp_path, 3, endpoint="a:29400") as nodes:
        agents = await started(nodes, network)
        for agent in agents:
            assert await agent.ask((await agent.up())[0], "connect") == "connected"


async def test_a_member_is_cut_off(network: Network, tmp_path: Path) -> None:
    """The others notice and go on; it stops its workers, and comes back when it can."""
    async with Nodes(tmp_path, "1:3", endpoint=FIRST, conf=CONF) as nodes:
        a, b, c = await started(nodes, network)
        (cut,) = await c.up()
        network.isolate("c")
        began = time.monotonic()
        workers = await nodes.up(a, b, attempt=1)
        assert time.monotonic() - began < NOTICED_S
        assert {one.world_size for one in workers} == {2}
        await c.event(RendezvousStoreLost)
        await c.note("signal", pid=cut.pid)
        network.heal()
        workers = await nodes.up(a, b, c, attempt=2)
        assert {(one.world_size, one.restart_count) for one in workers} == {(3, 0)}
        assert {ended.code for ended in await nodes.finish(a, b, c, attempt=2)} == {0}


async def test_who_is_cut_off_stops_before_it_is_replaced(network: Network, tmp_path: Path) -> None:
    """No worker of the former world runs on for long while the next one is at work."""
    conf = {"heartbeat_timeout": 4}
    async with Nodes(tmp_path, "1:3", endpoint=FIRST, conf=conf) as nodes:
        a, b, c = await started(nodes, network)
        (cut,) = await c.up()
        network.isolate("c")
        workers = await nodes.up(a, b, attempt=1)
        stopped = await c.note("signal", pid=cut.pid)
        # Both count the same silence; a busy machine may be late with one of them.
        assert stopped.time < min(one.time for one in workers) + 2


@pytest.mark.parametrize("direction", ["from it", "to it"])
async def test_one_direction_is_cut(direction: str, network: Network, tmp_path: Path) -> None:
    """A member that can only hear, or only be heard, is as good as lost."""
    async with Nodes(tmp_path, "1:3", endpoint=FIRST, conf=CONF) as nodes:
        a, b, c = await started(nodes, network)
        if direction == "from it":
            network.cut("c", "a", "b")
        else:
            network.cut("a", "c")
            network.cut("b", "c")
        began = time.monotonic()
        await nodes.up(a, b, attempt=1)
        assert time.monotonic() - began < NOTICED_S
        network.heal()
        await nodes.up(a, b, c, attempt=2)


async def test_members_that_do_not_reach_each_other(network: Network, tmp_path: Path) -> None:
    """A cut between two members that both reach the store is no loss of a node."""
    async with Nodes(tmp_path, 3, endpoint=FIRST, conf=CONF) as nodes:
        agents = await started(nodes, network)
        network.partition("b", "c")
        time.sleep(3 * HEARTBEAT_S)  # whoever thought somebody lost would have said so
        codes = {ended.code for ended in await nodes.finish(*agents)}
        assert codes == {0}
        assert [len(agent.told(RoundFormed)) for agent in agents] == [1, 1, 1]


async def test_a_newcomer_that_does_not_reach_the_workers(network: Network, tmp_path: Path) -> None:
    """Whoever cannot reach group rank 0 is refused without any disturbance, until it can."""
    async with Nodes(tmp_path, "2:3", endpoint=FIRST, conf={"last_call_timeout": 1}) as nodes:
        host = nodes.start("a", host=network["a"], node_rank=1)
        await host.event(RoundForming)
        lead = nodes.start("b", host=network["b"], node_rank=0)
        before = await nodes.up(host, lead)
        assert (await lead.formed()).group_rank == 0
        network.partition("b", "c")
        newcomer = nodes.start("c", host=network["c"])
        await host.event(NodeJoined, name="c")
        refused = await host.event(NodeRefused, name="c", seconds=60)
        assert "reach" in refused.why
        assert all(alive(one.pid) for one in before)
        assert len(host.told(RoundFormed)) == 1
        network.heal()
        workers = await nodes.up(host, lead, newcomer, attempt=1)
        assert {one.world_size for one in workers} == {3}


async def test_the_host_is_cut_off(network: Network, tmp_path: Path) -> None:
    """With two meeting points each side goes on by itself; in the end all are at the first."""
    conf = {**CONF, "read_timeout": 60}
    async with Nodes(
        tmp_path, "1:3", endpoint=f"{FIRST},{SECOND}", conf=conf, can_split=True
    ) as nodes:
        a, b, c = await started(nodes, network)
        network.isolate("a")
        began = time.monotonic()
        workers = await nodes.up(b, c, world_size=2)
        # Who had rank 1 keeps it, and who had rank 2 closes up to rank 0.
        (met_at,) = {one.master_addr for one in workers}
        assert met_at in ("10.77.0.2", "10.77.0.3")
        (alone,) = await a.up(world_size=1)
        assert alone.master_addr == "10.77.0.1"
        assert time.monotonic() - began < NOTICED_S
        regained = await b.event(RendezvousStoreRegained)
        assert (regained.endpoint, regained.is_host) == (SECOND, True)
        since = nodes.marks()
        network.heal()
        workers = await nodes.up(a, b, c, since=since, world_size=3, seconds=60)
        assert {one.restart_count for one in workers} == {0}
        assert (await c.event(RendezvousStoreRegained, endpoint=FIRST)).is_host is False
        attempt = workers[0].attempt
        assert {one.code for one in await nodes.finish(a, b, c, attempt=attempt)} == {0}


async def test_the_host_is_cut_off_from_too_few(network: Network, tmp_path: Path) -> None:
    """The side with too few nodes starts nothing; the others go on."""
    async with Nodes(
        tmp_path, "2:3", endpoint=f"{FIRST},{SECOND}", conf=CONF, can_split=True
    ) as nodes:
        a, b, c = await started(nodes, network)
        (cut,) = await a.up()
        network.isolate("a")
        await nodes.up(b, c, world_size=2)
        await a.note("signal", pid=cut.pid)
        since = nodes.marks()
        network.heal()
        workers = await nodes.up(a, b, c, since=since, world_size=3, seconds=60)
        assert {one.restart_count for one in workers} == {0}


async def test_a_flapping_network(network: Network, tmp_path: Path) -> None:
    """Cuts that are shorter than the heartbeat timeout are no events at all."""
    async with Nodes(tmp_path, 3, endpoint=FIRST, conf={"heartbeat_timeout": 10}) as nodes:
        agents = await started(nodes, network)
        before = [one for agent in agents for one in await agent.up()]
        for name in ("a", "b", "c"):
            network.isolate(name)
            time.sleep(1.0)  # the length is the point
            network.heal()
        assert all(alive(one.pid) for one in before)
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}
        assert [len(agent.told(RoundFormed)) for agent in agents] == [1, 1, 1]
