"""Nodes on hosts of their own, with a network between them that fails.

All hosts have names that cannot be looked up, and a name server that never answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio import (
    NodeJoined,
    NodeRefused,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundFormed,
)
from tests.support.cluster import AT_ONCE_S, WORKER, AgentProcess, Cluster, within
from tests.support.leaks import alive
from tests.support.netns import Network

pytestmark = [pytest.mark.black_box, pytest.mark.netns]

FIRST = "10.77.0.1:29400"
SECOND = "10.77.0.2:29400"
HEARTBEAT_S = 2
CONF = {"heartbeat_timeout": HEARTBEAT_S}
# The missing heartbeat has to be noticed; all that follows happens at once.
NOTICED_S = HEARTBEAT_S + 2 * AT_ONCE_S


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Make three hosts."""
    with Network(tmp_path / "network", "a", "b", "c") as network:
        yield network


async def started(cluster: Cluster, network: Network) -> tuple[AgentProcess, ...]:
    """Start a node on each host, the one that serves the store first."""
    first, *others = network.hosts
    host = await cluster.start_first(first, host=network[first])
    agents = host, *(cluster.start(name, host=network[name]) for name in others)
    await cluster.workers(*agents)
    return agents


async def test_no_names_are_needed(network: Network, tmp_path: Path) -> None:
    """No node sends a name query, and every worker can reach the master address."""
    async with Cluster(tmp_path, 3, endpoint=FIRST) as cluster:
        agents = await started(cluster, network)
        for agent in agents:
            (worker,) = await agent.workers()
            assert worker.master_addr == "10.77.0.1"
            assert await agent.ask(worker, "connect") == "connected"
        await cluster.succeed(*agents)
        assert [network.name_queries(name) for name in network.hosts] == [0, 0, 0]


async def test_a_token_guards_every_port_of_the_job(network: Network, tmp_path: Path) -> None:
    """Workers of both nodes are served by the store of the round; a third host is by none."""
    token = tmp_path / "token"
    token.write_text("token-of-this-test")
    conf = {"token_file": token}
    async with Cluster(tmp_path / "job", 2, endpoint=FIRST, conf=conf) as cluster:
        a = await cluster.start_first("a", host=network["a"])
        b = cluster.start("b", host=network["b"])
        workers = await cluster.workers(a, b)
        sums = [await agent.ask((await agent.workers())[0], "count") for agent in (b, a)]
        assert sums == ["1", "2"]
        ports = [(worker.master_addr, worker.master_port) for worker in workers]
        for name in ("a", "b"):
            listed = network[name].run("ss", "-ltnH")
            local = [line.split()[3].rpartition(":") for line in listed.splitlines()]
            ports += [(network[name].address, int(port)) for _, _, port in local]
        assert len(set(ports)) >= 3, "the nodes' store, the round's, and reserved ones"
        environments = [
            {"MASTER_ADDR": address, "MASTER_PORT": str(port)} for address, port in set(ports)
        ]
        source = Path(WORKER).read_text()
        stranger = f"""
import os, socket, struct
{source[source.index("def count") : source.index("def collective")]}
for environment in {environments!r}:
    os.environ.update(environment)
    try:
        print(count())
    except OSError as error:
        print("closed", error)
"""
        seen = network["c"].run(sys.executable, "-c", stranger).splitlines()
        assert len(seen) == len(environments)
        assert all(line.startswith("closed") for line in seen), seen
        await cluster.succeed(a, b)


async def test_missing_nodes_are_named(network: Network, tmp_path: Path) -> None:
    """The error names the hosts that have joined and the one that was lost."""
    async with Cluster(tmp_path, 3, endpoint=FIRST, conf={"join_timeout": 6}) as cluster:
        a, b, c = await started(cluster, network)
        await c.kill()
        for agent in (a, b):
            ended = await agent.ended(6 + AT_ONCE_S)
            assert ended.code == 69
            last = ended.err.splitlines()[-1]
            assert "2 of 3" in last
            assert "(a, b)" in last
            assert "missing: c" in last


async def test_hosts_that_resolve_their_own_name_to_loopback(
    network: Network, tmp_path: Path
) -> None:
    """An endpoint by name works if `/etc/hosts` of that host maps it to 127.0.1.1."""
    others = "127.0.0.1 localhost\n10.77.0.1 a\n"
    for host in network.hosts.values():
        own = "127.0.0.1 localhost\n127.0.1.1 a\n"
        (host.etc / "hosts").write_text(own if host.name == "a" else others)
    async with Cluster(tmp_path, 3, endpoint="a:29400") as cluster:
        agents = await started(cluster, network)
        await cluster.check_master(*agents)


async def test_a_member_is_cut_off(network: Network, tmp_path: Path) -> None:
    """The others re-form without it; it stops its workers, and rejoins after the partition."""
    async with Cluster(tmp_path, "1:3", endpoint=FIRST, conf=CONF) as cluster:
        a, b, c = await started(cluster, network)
        (cut,) = await c.workers()
        network.isolate("c")
        with within(NOTICED_S):
            workers = await cluster.workers(a, b, attempt=1)
        assert {worker.world_size for worker in workers} == {2}
        await c.event(RendezvousStoreLost)
        await c.note("signal", pid=cut.pid)
        network.heal()
        await cluster.workers(a, b, c, attempt=2, world_size=3, restart_count=0)
        await cluster.succeed(a, b, c, attempt=2)


async def test_a_member_stops_before_it_is_replaced(network: Network, tmp_path: Path) -> None:
    """Workers of the former world end before those of the next one have run for long."""
    conf = {"heartbeat_timeout": 4}
    async with Cluster(tmp_path, "1:3", endpoint=FIRST, conf=conf) as cluster:
        a, b, c = await started(cluster, network)
        (cut,) = await c.workers()
        network.isolate("c")
        workers = await cluster.workers(a, b, attempt=1)
        stopped = await c.note("signal", pid=cut.pid)
        # Both sides measure the same time without packets; a busy host may delay one of them.
        assert stopped.time < min(worker.time for worker in workers) + 2


@pytest.mark.parametrize("direction", ["from it", "to it"])
async def test_one_direction_is_cut(direction: str, network: Network, tmp_path: Path) -> None:
    """A member that can only send, or only receive, is lost."""
    async with Cluster(tmp_path, "1:3", endpoint=FIRST, conf=CONF) as cluster:
        a, b, c = await started(cluster, network)
        if direction == "from it":
            network.cut("c", "a", "b")
        else:
            network.cut("a", "c")
            network.cut("b", "c")
        with within(NOTICED_S):
            await cluster.workers(a, b, attempt=1)
        network.heal()
        await cluster.workers(a, b, c, attempt=2)


async def test_members_that_do_not_reach_each_other(network: Network, tmp_path: Path) -> None:
    """If both reach the store, a cut between two members is no loss of a node."""
    async with Cluster(tmp_path, 3, endpoint=FIRST, conf=CONF) as cluster:
        agents = await started(cluster, network)
        network.partition("b", "c")
        time.sleep(3 * HEARTBEAT_S)  # a loss would have been reported by then
        await cluster.succeed(*agents)
        assert [len(agent.events_of(RoundFormed)) for agent in agents] == [1, 1, 1]


async def test_a_newcomer_that_does_not_reach_the_workers(network: Network, tmp_path: Path) -> None:
    """It is refused while it cannot reach group rank 0, and the others keep their workers."""
    async with Cluster(tmp_path, "2:3", endpoint=FIRST, conf={"last_call_timeout": 1}) as cluster:
        host = await cluster.start_first("a", host=network["a"], node_rank=1)
        lead = cluster.start("b", host=network["b"], node_rank=0)
        before = await cluster.workers(host, lead)
        assert (await lead.round_formed()).group_rank == 0
        network.partition("b", "c")
        newcomer = cluster.start("c", host=network["c"])
        await host.event(NodeJoined, name="c")
        refused = await host.event(NodeRefused, name="c", seconds=60)
        assert "reach" in refused.why
        assert all(alive(worker.pid) for worker in before)
        assert len(host.events_of(RoundFormed)) == 1
        network.heal()
        await cluster.workers(host, lead, newcomer, attempt=1, world_size=3)


async def test_the_store_host_is_cut_off(network: Network, tmp_path: Path) -> None:
    """With two endpoints each side continues; after the partition all are at the first one."""
    conf = {**CONF, "read_timeout": 60}
    async with Cluster(
        tmp_path, "1:3", endpoint=f"{FIRST},{SECOND}", conf=conf, can_split=True
    ) as cluster:
        a, b, c = await started(cluster, network)
        network.isolate("a")
        with within(NOTICED_S):
            workers = await cluster.workers(b, c, world_size=2)
            # The node of rank 1 keeps it, and that of rank 2 moves to rank 0.
            (met_at,) = {worker.master_addr for worker in workers}
            assert met_at in ("10.77.0.2", "10.77.0.3")
            (alone,) = await a.workers(world_size=1)
            assert alone.master_addr == "10.77.0.1"
        regained = await b.event(RendezvousStoreRecovered)
        assert (regained.endpoint, regained.is_host) == (SECOND, True)
        since = cluster.note_counts()
        network.heal()
        workers = await cluster.workers(a, b, c, since=since, world_size=3, seconds=60)
        assert {worker.restart_count for worker in workers} == {0}
        assert (await c.event(RendezvousStoreRecovered, endpoint=FIRST)).is_host is False
        attempt = workers[0].attempt
        await cluster.succeed(a, b, c, attempt=attempt)


async def test_the_store_host_is_cut_off_with_too_few_nodes_left(
    network: Network, tmp_path: Path
) -> None:
    """The side with too few nodes starts no worker; the other one continues."""
    async with Cluster(
        tmp_path, "2:3", endpoint=f"{FIRST},{SECOND}", conf=CONF, can_split=True
    ) as cluster:
        a, b, c = await started(cluster, network)
        (cut,) = await a.workers()
        network.isolate("a")
        await cluster.workers(b, c, world_size=2)
        await a.note("signal", pid=cut.pid)
        since = cluster.note_counts()
        network.heal()
        workers = await cluster.workers(a, b, c, since=since, world_size=3, seconds=60)
        assert {worker.restart_count for worker in workers} == {0}


async def test_a_flapping_network(network: Network, tmp_path: Path) -> None:
    """Cuts that are shorter than the heartbeat timeout cause no event."""
    async with Cluster(tmp_path, 3, endpoint=FIRST, conf={"heartbeat_timeout": 10}) as cluster:
        agents = await started(cluster, network)
        before = [one for agent in agents for one in await agent.workers()]
        for name in ("a", "b", "c"):
            network.isolate(name)
            time.sleep(1.0)  # shorter than the heartbeat timeout
            network.heal()
        assert all(alive(worker.pid) for worker in before)
        await cluster.succeed(*agents)
        assert [len(agent.events_of(RoundFormed)) for agent in agents] == [1, 1, 1]
