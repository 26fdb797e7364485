"""Agents of a job on an engine are killed: the others notice it long before its lease ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_aio import CoordinatorChanged, NodeJoined, NodeLost, RoundFormed
from tests.support import etcd, redis
from tests.support.cluster import AT_ONCE_S, AgentProcess, Cluster
from tests.support.netns import Network

pytestmark = [pytest.mark.black_box, pytest.mark.engine]

LEASE_S = 60
"""Much longer than anything else here takes."""

MakeCluster = Callable[..., Cluster]


@pytest.fixture(params=["etcd", "redis"])
def cluster_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeCluster]:
    """Return a function that makes a job on an engine, whose leases are long."""
    support = etcd if request.param == "etcd" else redis
    if (etcd.ETCD if request.param == "etcd" else redis.REDIS) is None:
        pytest.skip(support.WHY_NOT)
    directory = tmp_path / request.param
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        server: etcd.EtcdProcess | redis.RedisProcess
        if request.param == "etcd":
            server = stack.enter_context(etcd.EtcdProcess(directory))
        else:
            server = stack.enter_context(redis.RedisProcess(directory))

        def make(nnodes: object, **conf: object) -> Cluster:
            settings = {"heartbeat_timeout": LEASE_S, **conf}
            return Cluster(
                tmp_path / "job",
                nnodes,
                endpoint=server.endpoint,
                rdzv_backend=request.param,
                conf=settings,
            )

        yield make


async def started(cluster: Cluster) -> tuple[AgentProcess, list[AgentProcess]]:
    """Start three nodes; return that of the coordinator, and the others."""
    nodes = [cluster.start() for _ in range(3)]
    await cluster.workers(*nodes, attempt=0, world_size=3)
    # Only the coordinator reports who has joined.
    (leader,) = [node for node in nodes if node.events_of(NodeJoined)]
    nodes.remove(leader)
    return leader, nodes


async def test_a_killed_member_is_noticed_at_once(cluster_of: MakeCluster) -> None:
    async with cluster_of("1:3") as cluster:
        leader, (member, killed) = await started(cluster)
        began = time.monotonic()
        await killed.kill()
        await leader.event(NodeLost)
        await cluster.workers(leader, member, attempt=1, world_size=2)
        assert time.monotonic() - began < AT_ONCE_S
        ended = await cluster.finish(leader, member, attempt=1)
        assert {one.code for one in ended} == {0}


async def test_a_killed_coordinator_is_replaced_at_once(cluster_of: MakeCluster) -> None:
    """Then a node of its successor's is killed, or the successor itself."""
    async with cluster_of("1:3") as cluster:
        leader, (first, second) = await started(cluster)
        began = time.monotonic()
        await leader.kill()
        for node in (first, second):
            await node.event(CoordinatorChanged, term=2)
        await cluster.workers(first, second, attempt=1, world_size=2)
        assert time.monotonic() - began < AT_ONCE_S
        began = time.monotonic()
        await first.kill()
        await cluster.workers(second, attempt=2, world_size=1)
        assert time.monotonic() - began < AT_ONCE_S
        assert {one.code for one in await cluster.finish(second, attempt=2)} == {0}


async def test_a_suspended_agent_costs_nothing(cluster_of: MakeCluster) -> None:
    """Whether it is the coordinator's or not, while its lease lasts."""
    async with cluster_of("1:2") as cluster:
        nodes = [cluster.start(), cluster.start()]
        await cluster.workers(*nodes)
        for node in nodes:
            node.send(signal.SIGSTOP)
            await asyncio.sleep(2.0)
            node.send(signal.SIGCONT)
        assert {one.code for one in await cluster.finish(*nodes)} == {0}
        for node in nodes:
            assert len(node.events_of(RoundFormed)) == 1
            assert not node.events_of(NodeLost)


@pytest.mark.netns
@pytest.mark.skipif(etcd.ETCD is None, reason=etcd.WHY_NOT)
async def test_a_partition_between_nodes_that_reach_the_engine_costs_nothing(
    tmp_path: Path,
) -> None:
    """It lasts longer than a lease; afterwards a killed agent is noticed."""
    lease = 2
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(tmp_path / "network", "e", "a", "b"))
        (tmp_path / "etcd").mkdir()
        (server,) = stack.enter_context(etcd.etcd_cluster(tmp_path / "etcd", hosts=[network["e"]]))
        async with Cluster(
            tmp_path / "job",
            "1:2",
            endpoint=server.endpoint,
            rdzv_backend="etcd",
            conf={"heartbeat_timeout": lease},
        ) as cluster:
            a, b = (cluster.start(name, host=network[name]) for name in ("a", "b"))
            await cluster.workers(a, b, attempt=0, world_size=2)
            network.partition("a", "b")
            await asyncio.sleep(2.0 * lease)
            network.heal()
            for node in (a, b):
                assert len(node.events_of(RoundFormed)) == 1
                assert not node.events_of(NodeLost)
            await b.kill()
            await cluster.workers(a, attempt=1, world_size=1)
            assert {one.code for one in await cluster.finish(a, attempt=1)} == {0}
