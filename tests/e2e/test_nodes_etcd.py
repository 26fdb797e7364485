"""Jobs of several nodes that meet at etcd, and etcd fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import pytest

from elastic_aio import NodeLost, RendezvousStoreLost
from tests.e2e.test_nodes_engines import assert_undisturbed, job, serve
from tests.support.cluster import AT_ONCE_S
from tests.support.etcd import ETCD, WHY_NOT, etcd_cluster
from tests.support.netns import Network

pytestmark = [
    pytest.mark.black_box,
    pytest.mark.engine,
    pytest.mark.skipif(ETCD is None, reason=WHY_NOT),
]

LEASE_S = 6
OUTAGE_S = LEASE_S + 1.0
"""Longer than a lease, which must be renewed meanwhile."""


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
            ended = await cluster.finish(*nodes, joining, attempt=1)
            assert {one.code for one in ended} == {0}
            assert not [event for node in nodes for event in node.events_of(NodeLost)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_members_fail_one_after_the_other(tmp_path: Path, fault: signal.Signals) -> None:
    """Each for longer than the leases, the leader among them: the job does not notice.

    A leader is not paused where that makes etcd itself revoke the leases of living nodes.
    """
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd") as members:
        endpoints = ",".join(member.endpoint for member in members)
        async with job(
            tmp_path / "job", 2, "etcd", endpoints, heartbeat_timeout=LEASE_S
        ) as cluster:
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
            assert {one.code for one in await cluster.finish(*nodes)} == {0}
            assert_undisturbed(*nodes)
            assert not [event for node in nodes for event in node.events_of(RendezvousStoreLost)]


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
            assert {one.code for one in await cluster.finish(*nodes, attempt=1)} == {0}
            assert not [event for node in nodes for event in node.events_of(NodeLost)]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_agents_stop_while_etcd_is_away(tmp_path: Path, fault: signal.Signals) -> None:
    """Before and after they have noticed, and without waiting for it."""
    with serve("etcd", tmp_path / "etcd") as server:
        async with job(
            tmp_path / "job", 2, "etcd", server.endpoint, heartbeat_timeout=10
        ) as cluster:
            early, late = cluster.start(), cluster.start()
            await cluster.workers(early, late)
            server.send(fault)
            early.send(signal.SIGTERM)
            began = time.monotonic()
            assert (await early.ended()).code == 143
            assert time.monotonic() - began < AT_ONCE_S
            await late.event(RendezvousStoreLost)
            late.send(signal.SIGTERM)
            began = time.monotonic()
            assert (await late.ended()).code == 143
            assert time.monotonic() - began < AT_ONCE_S
