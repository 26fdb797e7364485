"""Effects of a stop signal to one of many nodes, at any moment."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from elastic_aio import (
    NodeLeft,
    RendezvousStoreRecovered,
    RoundFormed,
    RoundForming,
    RoundWaiting,
    StopRequested,
    WorkerExited,
)
from elastic_aio.signals import MOMENT_S
from tests.support.cluster import AT_ONCE_S, Cluster, within
from tests.support.leaks import alive

pytestmark = pytest.mark.black_box

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize("number", STOPS)
async def test_a_node_that_waits_for_its_first_round(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It ends at once, and another node can join instead."""
    async with Cluster(tmp_path, 2) as cluster:
        first = await cluster.start_first("first")
        first.send(number)
        with within():
            ended = await first.ended()
        assert ended.code == 128 + number
        assert ended.err.count(f"{number.name} was received") == 1
        pair = [cluster.start() for _ in range(2)]
        await cluster.workers(*pair)


async def test_one_of_several_that_wait(tmp_path: Path) -> None:
    """The others form a round without it, whether it served the store or not."""
    async with Cluster(tmp_path, 3) as cluster:
        host = await cluster.start_first("host")
        other = cluster.start("other")
        await host.event(RoundForming, joined=2)
        await other.stops()
        second = cluster.start("second")
        await second.event(RoundForming, joined=2)
        await host.stops()
        await cluster.workers(second, cluster.start(), cluster.start())


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("number", STOPS)
async def test_a_node_with_running_workers(
    number: signal.Signals, leaver: int, tmp_path: Path
) -> None:
    """Its workers get the signal, it ends with its code, and the others re-form at once."""
    async with Cluster(tmp_path, "1:3") as cluster:
        agents = list(await cluster.start_all(3))
        leaves = agents.pop(leaver)
        (worker,) = await leaves.workers()
        leaves.send(number)
        ended = await leaves.ended(AT_ONCE_S)
        assert ended.code == 128 + number
        assert f"{number.name} was received" in ended.err
        assert "FAILED" not in ended.err
        assert not alive(worker.pid)
        await cluster.workers(*agents, attempt=1, world_size=2, restart_count=0)
        if leaver:
            assert any(agent.events_of(NodeLeft) for agent in agents)
        await cluster.succeed(*agents, attempt=1)


async def test_a_node_whose_workers_have_succeeded(tmp_path: Path) -> None:
    """It ends with success, and the others keep their workers."""
    async with Cluster(tmp_path, "1:2") as cluster:
        host, leaves = await cluster.start_all(2)
        leaves.order((await leaves.workers())[0], "exit 0")
        await leaves.event(WorkerExited)
        leaves.send(signal.SIGTERM)
        assert (await leaves.ended(AT_ONCE_S)).code == 0
        assert alive((await host.workers())[0].pid)
        await cluster.succeed(host)
        assert len(host.events_of(RoundFormed)) == 1


async def test_the_store_host_when_its_workers_have_succeeded(tmp_path: Path) -> None:
    """The others continue without the node that served the store, after its grace."""
    async with Cluster(tmp_path, "1:2", shutdown_timeout=1) as cluster:
        host, other = await cluster.start_all(2)
        host.order((await host.workers())[0], "exit 0")
        await host.event(WorkerExited)
        host.send(signal.SIGTERM)
        assert (await host.ended(AT_ONCE_S)).code == 0
        await other.event(RendezvousStoreRecovered, is_host=True)
        await asyncio.sleep(2)  # the new coordinator has decided by then
        await cluster.succeed(other)
        assert len(other.events_of(RoundFormed)) == 1


async def test_all_nodes_at_once(tmp_path: Path) -> None:
    """All end, and no worker is left."""
    async with Cluster(tmp_path, 3) as cluster:
        agents = await cluster.start_all(3)
        workers = [worker for agent in agents for worker in await agent.workers()]
        for agent in agents:
            agent.send(signal.SIGTERM)
        for agent in agents:
            ended = await agent.ended(AT_ONCE_S)
            assert ended.code == 143
            assert "FAILED" not in ended.err
        assert not any(alive(worker.pid) for worker in workers)


async def test_the_third_signal_kills(tmp_path: Path) -> None:
    """Workers that do not stop are killed, and the second signal means no more than the first."""
    async with Cluster(tmp_path, 2) as cluster:
        host, other = await cluster.start_all(2)
        (worker,) = await other.workers()
        assert await other.ask(worker, "ignore_sigterm") == "ignore_sigterm"
        other.send(signal.SIGTERM)
        await other.event(StopRequested)
        for _ in range(2):
            assert alive(worker.pid)
            await asyncio.sleep(MOMENT_S + 0.05)  # what is tested: time that passes
            other.send(signal.SIGTERM)
        assert (await other.ended(AT_ONCE_S)).code == 143
        assert not alive(worker.pid)
        await host.event(RoundForming, joined=1, since=1)


async def test_one_node_at_random_moments(tmp_path: Path) -> None:
    """The exit code is the signal's, and a new node can take the rank."""
    dice = random.Random(time.time_ns())
    async with Cluster(tmp_path, 2) as cluster:
        host = await cluster.start_first("host")
        for _ in range(15):
            other = cluster.start()
            await asyncio.sleep(dice.uniform(0, 0.8))  # a random moment
            other.send(signal.SIGTERM)
            ended = await other.ended(AT_ONCE_S)
            assert ended.code == 143
            assert "FAILED" not in ended.err
        other = cluster.start()
        attempt = (await other.workers())[0].attempt
        await cluster.workers(host, other, attempt=attempt)
        await cluster.succeed(host, other, attempt=attempt)


async def test_all_nodes_at_random_moments(tmp_path: Path) -> None:
    """Two nodes that are stopped at different moments both end in time."""
    dice = random.Random(time.time_ns())
    async with Cluster(tmp_path, 2) as cluster:
        for _ in range(8):
            agents = [cluster.start() for _ in range(2)]
            for agent in agents:
                await asyncio.sleep(dice.uniform(0, 0.6))  # a random moment
                agent.send(signal.SIGTERM)
            for agent in agents:
                ended = await agent.ended(AT_ONCE_S)
                assert ended.code == 143
        cluster.can_split = True  # these are many jobs


async def test_nodes_that_end_at_different_times(tmp_path: Path) -> None:
    """The first one waits for the others, and no console shows a failure."""
    async with Cluster(tmp_path, 3) as cluster:
        agents = await cluster.start_all(3)
        for agent in agents:
            agent.order((await agent.workers())[0], "exit 0")
            await agent.event(WorkerExited)
            await asyncio.sleep(0.5)  # the others end much later
        for agent in agents:
            ended = await agent.ended(AT_ONCE_S)
            assert ended.code == 0
            assert "FAILED" not in ended.err


async def test_the_exit_barrier_has_a_timeout(tmp_path: Path) -> None:
    """A node that has succeeded waits for `exit_barrier_timeout`; the others continue."""
    async with Cluster(tmp_path, 2, exit_barrier_timeout=1) as cluster:
        host, other = await cluster.start_all(2)
        other.order((await other.workers())[0], "exit 0")
        await other.event(WorkerExited)
        assert (await other.ended(1 + AT_ONCE_S)).code == 0
        name = (await host.event(NodeLeft)).name
        assert name == f"{socket.gethostname()} (pid {other.pid})"
        assert alive((await host.workers())[0].pid)
        await cluster.succeed(host)
        assert len(host.events_of(RoundFormed)) == 1


@pytest.mark.parametrize("serves", ["nodes", "workers"])
async def test_a_node_stays_past_its_barrier_while_others_use_its_store(
    serves: str, tmp_path: Path
) -> None:
    """The other node could serve neither store itself, and its workers are healthy."""
    async with Cluster(tmp_path, 2, exit_barrier_timeout=1) as cluster:
        host = await cluster.start_first(
            "host", conf={"is_host": True}, node_rank=int(serves == "workers")
        )
        other = cluster.start("other", conf={"is_host": False}, node_rank=int(serves != "workers"))
        await cluster.workers(host, other)
        first, last = (host, other) if serves == "nodes" else (other, host)
        first.order((await first.workers())[0], "exit 0")
        waiting = await first.event(RoundWaiting, phase="barrier")
        assert waiting.what == "other nodes' workers, which use the store of this node"
        worker = (await last.workers())[0]
        assert await last.ask(worker, "connect") == "connected"
        last.order(worker, "exit 0")
        for ended in (await first.ended(AT_ONCE_S), await last.ended(AT_ONCE_S)):
            assert ended.code == 0
        assert len(last.events_of(RoundFormed)) == 1


async def test_a_node_stays_past_its_barrier_while_the_store_is_replaced(tmp_path: Path) -> None:
    """The workers of the other node still use the store of the round."""
    async with Cluster(tmp_path, 2, exit_barrier_timeout=0) as cluster:
        store = await cluster.start_store()
        lead, other = cluster.start("lead", node_rank=0), cluster.start("other", node_rank=1)
        worker, last = await cluster.workers(lead, other)
        lead.order(worker, "exit 0")
        await lead.event(RoundWaiting, phase="barrier")
        store.send(signal.SIGKILL)
        await other.event(RendezvousStoreRecovered)
        assert await other.ask(last, "connect") == "connected"
        other.order(last, "exit 0")
        for ended in (await lead.ended(AT_ONCE_S), await other.ended(AT_ONCE_S)):
            assert ended.code == 0
        assert len(other.events_of(RoundFormed)) == 1


async def test_a_stop_bounds_the_stay_past_the_barrier(tmp_path: Path) -> None:
    """By the grace of the node's own stop plan: the other node may never end."""
    async with Cluster(tmp_path, 2, exit_barrier_timeout=0, shutdown_timeout=1) as cluster:
        host, other = await cluster.start_all(2)
        host.order((await host.workers())[0], "exit 0")
        await host.event(RoundWaiting, phase="barrier")
        host.send(signal.SIGTERM)
        assert (await host.ended(1 + AT_ONCE_S)).code == 0
        await cluster.succeed(other)


async def test_a_stop_at_the_barrier_keeps_the_store_of_the_workers(tmp_path: Path) -> None:
    """Worker 0 has finished; the worker of the other node uses its store until it ends."""
    async with Cluster(tmp_path, 2) as cluster:
        await cluster.start_store()
        lead, other = cluster.start("lead", node_rank=0), cluster.start("other", node_rank=1)
        worker, last = await cluster.workers(lead, other)
        lead.order(worker, "exit 0")
        await lead.event(WorkerExited)
        lead.send(signal.SIGTERM)
        assert await other.ask(last, "connect") == "connected"
        other.order(last, "exit 0")
        for ended in (await lead.ended(AT_ONCE_S), await other.ended(AT_ONCE_S)):
            assert ended.code == 0
