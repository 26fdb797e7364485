"""Jobs of several nodes that meet at an engine: it fails and comes back, and agents are lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from elastic_aio import (
    CoordinatorChanged,
    JobFinished,
    NodeJoined,
    NodeLost,
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundFormed,
    WorkerStarted,
)
from tests.support.children import until
from tests.support.cli import run_cli
from tests.support.cluster import AgentProcess, Cluster, within
from tests.support.etcd import ETCD, WHY_NOT, EtcdProcess, etcd_cluster
from tests.support.netns import Network
from tests.support.redis import REDIS, RedisProcess
from tests.support.sockets import can_count_traffic, listening_ports, traffic_of

pytestmark = [pytest.mark.black_box, pytest.mark.engine]
needs_etcd = pytest.mark.skipif(ETCD is None, reason=WHY_NOT)

# Short, so that an engine which is away for some seconds outlasts the leases.
CONF = {"heartbeat_timeout": 4}
LONG_LEASE_S = 60
"""Much longer than anything else takes."""
LEASE_S = 6
_LINK_REPLIES = 5
"""Messages of a leader to a member until that has a key at the leader's port."""
OUTAGE_S = LEASE_S + 1.0
"""Longer than a lease, which must be renewed in that time."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.skipif(command is None, reason=f"needs {name}"))
        for name, command in (("etcd", ETCD), ("redis", REDIS))
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def serve(backend: str, directory: Path) -> Iterator[EtcdProcess | RedisProcess]:
    """Run an engine of one server."""
    directory.mkdir()
    with (EtcdProcess if backend == "etcd" else RedisProcess)(directory) as server:
        yield server


def job(directory: Path, nnodes: object, backend: str, endpoint: str, **conf: object) -> Cluster:
    """Return a job whose nodes meet at an engine."""
    settings = {**CONF, **conf}
    return Cluster(directory, nnodes, endpoint=endpoint, rdzv_backend=backend, conf=settings)


def assert_undisturbed(*nodes: AgentProcess) -> None:
    """Check that the workers are those of the first round."""
    for node in nodes:
        assert len(node.events_of(RoundFormed)) == 1
        assert {event.attempt for event in node.events_of(WorkerStarted)} == {0}
        assert not node.events_of(NodeLost)


async def test_a_job_meets_at_an_engine(tmp_path: Path, backend: str) -> None:
    """A lost node is replaced, and the keys of the ended job are left to their retention."""
    with serve(backend, tmp_path / "engine") as server:
        conf = {"last_call_timeout": 60}
        async with job(tmp_path / "job", "1:2", backend, server.endpoint, **conf) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes, attempt=0)
            await nodes[1].kill()
            await cluster.workers(nodes[0], attempt=1, world_size=1)
            again = cluster.start()
            await cluster.workers(nodes[0], again, attempt=2, world_size=2)
            await cluster.succeed(nodes[0], again, attempt=2)
            events = cluster.follow_events(rdzv_backend=backend)
            await events.wait_for(lambda event: isinstance(event, JobFinished), "the end")
            assert any(isinstance(event, NodeJoined) for event in events.entries)
        other_name = {"etcd": "etcd-v2", "redis": "valkey"}[backend]
        late = run_cli(
            "--nnodes=2", "--rdzv-backend", other_name, "--rdzv-endpoint", server.endpoint,
            "--rdzv-id=job", __file__,
        )  # fmt: skip
        assert late.code == 0, late.err


async def test_the_engine_is_killed_and_started_again(tmp_path: Path, backend: str) -> None:
    """The agents notice, wait without a limit, and come back; no worker is restarted."""
    with serve(backend, tmp_path / "engine") as server:
        async with job(tmp_path / "job", 2, backend, server.endpoint, read_timeout=1) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes)
            server.kill()
            for node in nodes:
                lost = await node.event(RendezvousStoreLost)
                assert server.endpoint in lost.why
                awaited = await node.event(RendezvousStoreAwaited)
                assert awaited.time_left is None
                assert "connection refused" in awaited.why
            server.start()
            for node in nodes:
                back = await node.event(RendezvousStoreRecovered)
                assert not back.is_host
                await node.event(CoordinatorChanged, term=2)
            await cluster.succeed(*nodes)
            assert_undisturbed(*nodes)
            for node in nodes:
                assert node.events_of(JobFinished)


# ------------------------------------------------------------------ agents that are lost


@contextlib.asynccontextmanager
async def lasting_job(directory: Path, nnodes: object, backend: str) -> AsyncIterator[Cluster]:
    """Run a job at an engine of one server, with long leases."""
    with serve(backend, directory / "engine") as server:
        conf = {"heartbeat_timeout": LONG_LEASE_S}
        async with job(directory / "job", nnodes, backend, server.endpoint, **conf) as cluster:
            yield cluster


async def three(cluster: Cluster) -> tuple[AgentProcess, list[AgentProcess]]:
    """Start three nodes; return that of the coordinator, and the others, which are linked to it."""
    if not can_count_traffic():
        pytest.skip("needs ss of iproute2")
    nodes = [cluster.start() for _ in range(3)]
    await cluster.workers(*nodes, attempt=0, world_size=3)
    leader, others = cluster.split(nodes)
    await until(lambda: have_links(leader, len(others)), "the links")
    return leader, others


def have_links(leader: AgentProcess, number: int) -> bool:
    """Tell whether so many members have a lease at the leader's port, and a key in it.

    Before, the leader does not know whose connection has ended.
    """
    ports = [traffic_of(port) for port in listening_ports(leader.pid)]
    return any(
        port.connections == number and port.messages_out >= number * _LINK_REPLIES for port in ports
    )


async def test_a_killed_member_is_noticed_at_once(backend: str, tmp_path: Path) -> None:
    async with lasting_job(tmp_path, "1:3", backend) as cluster:
        leader, (member, killed) = await three(cluster)
        with within():
            await killed.kill()
            await leader.event(NodeLost)
            await cluster.workers(leader, member, attempt=1, world_size=2)
        await cluster.succeed(leader, member, attempt=1)


async def test_a_killed_coordinator_is_replaced_at_once(backend: str, tmp_path: Path) -> None:
    """Then a node of its successor's is killed, or the successor itself."""
    async with lasting_job(tmp_path, "1:3", backend) as cluster:
        leader, (first, second) = await three(cluster)
        with within():
            await leader.kill()
            for node in (first, second):
                await node.event(CoordinatorChanged, term=2)
            await cluster.workers(first, second, attempt=1, world_size=2)
        with within():
            await first.kill()
            await cluster.workers(second, attempt=2, world_size=1)
        await cluster.succeed(second, attempt=2)


async def test_a_suspended_agent_costs_nothing(backend: str, tmp_path: Path) -> None:
    """Whether it is the coordinator's or not, while its lease lasts."""
    async with lasting_job(tmp_path, "1:2", backend) as cluster:
        nodes = [cluster.start(), cluster.start()]
        await cluster.workers(*nodes)
        for node in nodes:
            node.send(signal.SIGSTOP)
            await asyncio.sleep(2.0)
            node.send(signal.SIGCONT)
        await cluster.succeed(*nodes)
        for node in nodes:
            assert len(node.events_of(RoundFormed)) == 1
            assert not node.events_of(NodeLost)


@pytest.mark.netns
@needs_etcd
async def test_a_partition_between_nodes_that_reach_the_engine_costs_nothing(
    tmp_path: Path,
) -> None:
    """It lasts longer than a lease; afterwards a killed agent is noticed."""
    lease = 2
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(tmp_path / "network", "e", "a", "b"))
        (tmp_path / "etcd").mkdir()
        (server,) = stack.enter_context(etcd_cluster(tmp_path / "etcd", hosts=[network["e"]]))
        conf = {"heartbeat_timeout": lease}
        async with job(tmp_path / "job", "1:2", "etcd", server.endpoint, **conf) as cluster:
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
            await cluster.succeed(a, attempt=1)


# ------------------------------------------------------------------ etcd of three members


@needs_etcd
async def test_the_leader_of_three_is_killed_while_a_round_runs(tmp_path: Path) -> None:
    """The agents go on at another member; a node that joins then is taken in."""
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd") as members:
        endpoints = ",".join(member.endpoint for member in members)
        async with job(tmp_path / "job", "1:3", "etcd", endpoints, last_call_timeout=1) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes, attempt=0, world_size=2)
            leader = next(member for member in members if member.is_leader)
            leader.kill()
            joining = cluster.start()
            await cluster.workers(*nodes, joining, attempt=1, world_size=3)
            await cluster.succeed(*nodes, joining, attempt=1)
            assert not [event for node in nodes for event in node.events_of(NodeLost)]


@needs_etcd
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_members_fail_one_after_the_other(tmp_path: Path, fault: signal.Signals) -> None:
    """Each for longer than the leases, the leader among them: the job does not notice.

    A leader is not paused where that makes etcd itself revoke the leases of living nodes.
    """
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd") as members:
        endpoints = ",".join(member.endpoint for member in members)
        conf = {"heartbeat_timeout": LEASE_S}
        async with job(tmp_path / "job", 2, "etcd", endpoints, **conf) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes)
            for member in sorted(members, key=lambda one: one.is_leader, reverse=True):
                if fault == signal.SIGSTOP and member.is_leader and not member.is_pause_safe:
                    continue
                if fault == signal.SIGKILL:
                    member.kill()
                else:
                    member.send(signal.SIGSTOP)
                await asyncio.sleep(OUTAGE_S)
                if fault == signal.SIGKILL:
                    member.start([one.peer for one in members])
                else:
                    member.send(signal.SIGCONT)
                await asyncio.to_thread(member.wait_ready)
            await cluster.succeed(*nodes)
            assert_undisturbed(*nodes)
            assert not [event for node in nodes for event in node.events_of(RendezvousStoreLost)]


@needs_etcd
@pytest.mark.netns
async def test_members_are_partitioned_one_after_the_other(tmp_path: Path) -> None:
    """From nodes and members alike; a node that joins while the leader is away is taken in."""
    names = ("e0", "e1", "e2")
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(tmp_path / "network", *names, "a", "b", "c"))
        (tmp_path / "etcd").mkdir()
        hosts = [network[name] for name in names]
        members = stack.enter_context(etcd_cluster(tmp_path / "etcd", hosts=hosts))
        endpoints = ",".join(member.endpoint for member in members)
        conf = {"last_call_timeout": 1, "heartbeat_timeout": LEASE_S}
        async with job(tmp_path / "job", "2:3", "etcd", endpoints, **conf) as cluster:
            nodes = [cluster.start(name, host=network[name]) for name in ("a", "b")]
            await cluster.workers(*nodes)
            for name in names:
                network.isolate(name)
                await asyncio.sleep(OUTAGE_S)
                network.heal()
            assert_undisturbed(*nodes)
            leader = next(member for member in members if member.is_leader)
            assert leader.host is not None
            network.isolate(leader.host.name)
            nodes.append(cluster.start("c", host=network["c"]))
            await cluster.workers(*nodes, attempt=1, world_size=3)
            await cluster.succeed(*nodes, attempt=1)
            assert not [event for node in nodes for event in node.events_of(NodeLost)]


@needs_etcd
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_agents_stop_while_etcd_is_away(tmp_path: Path, fault: signal.Signals) -> None:
    """Before and after they have noticed, and without waiting for it."""
    with serve("etcd", tmp_path / "etcd") as server:
        conf = {"heartbeat_timeout": 10}
        async with job(tmp_path / "job", 2, "etcd", server.endpoint, **conf) as cluster:
            early, late = cluster.start(), cluster.start()
            await cluster.workers(early, late)
            server.send(fault)
            early.send(signal.SIGTERM)
            with within():
                assert (await early.ended()).code == 143
            await late.event(RendezvousStoreLost)
            late.send(signal.SIGTERM)
            with within():
                assert (await late.ended()).code == 143
