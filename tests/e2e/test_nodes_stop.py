"""What a stop signal to one of many nodes does, at any moment: there and elsewhere."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from elastic_aio import NodeLeft, RendezvousStoreRegained, RoundFormed, RoundForming, WorkerExited
from tests.support.nodes import AT_ONCE_S, Node, Nodes
from tests.support.traces import alive

pytestmark = pytest.mark.black_box

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


async def started(nodes: Nodes, count: int) -> tuple[Node, ...]:
    """Start a node that serves the store, and others; all workers have started."""
    host = nodes.start("host")
    await host.event(RoundForming)
    agents = host, *(nodes.start() for _ in range(count - 1))
    await nodes.up(*agents)
    return agents


@pytest.mark.parametrize("number", STOPS)
async def test_while_it_waits_for_others(number: signal.Signals, tmp_path: Path) -> None:
    """A node that waits for its first round ends at once; another one can come instead."""
    async with Nodes(tmp_path, 2) as nodes:
        first = nodes.start("first")
        await first.event(RoundForming)
        first.send(number)
        began = time.monotonic()
        ended = await first.ended()
        assert time.monotonic() - began < AT_ONCE_S
        assert ended.code == 128 + number
        assert ended.err.count(f"{number.name} was received") == 1
        pair = [nodes.start() for _ in range(2)]
        await nodes.up(*pair)


async def test_one_of_those_that_wait(tmp_path: Path) -> None:
    """The end of one that waits is no hindrance for the others, host or not."""
    async with Nodes(tmp_path, 3) as nodes:
        host = nodes.start("host")
        await host.event(RoundForming)
        other = nodes.start("other")
        await host.event(RoundForming, joined=2)
        other.send(signal.SIGTERM)
        assert (await other.ended()).code == 143
        second = nodes.start("second")
        await second.event(RoundForming, joined=2)
        host.send(signal.SIGTERM)
        assert (await host.ended()).code == 143
        await nodes.up(second, nodes.start(), nodes.start())


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("number", STOPS)
async def test_while_workers_run(number: signal.Signals, leaver: int, tmp_path: Path) -> None:
    """Its workers get the signal, it ends with its code, and the others go on at once."""
    async with Nodes(tmp_path, "1:3") as nodes:
        agents = list(await started(nodes, 3))
        leaves = agents.pop(leaver)
        (worker,) = await leaves.up()
        leaves.send(number)
        ended = await leaves.ended(AT_ONCE_S)
        assert ended.code == 128 + number
        assert f"{number.name} was received" in ended.err
        assert "FAILED" not in ended.err
        assert not alive(worker.pid)
        workers = await nodes.up(*agents, attempt=1)
        assert {(one.world_size, one.restart_count) for one in workers} == {(2, 0)}
        if leaver:
            assert any(agent.told(NodeLeft) for agent in agents)
        assert {one.code for one in await nodes.finish(*agents, attempt=1)} == {0}


async def test_when_its_workers_have_succeeded(tmp_path: Path) -> None:
    """A node that only waits for the others has succeeded; they are not disturbed."""
    async with Nodes(tmp_path, "1:2") as nodes:
        host, leaves = await started(nodes, 2)
        leaves.tell((await leaves.up())[0], "exit 0")
        await leaves.event(WorkerExited)
        leaves.send(signal.SIGTERM)
        assert (await leaves.ended(AT_ONCE_S)).code == 0
        assert alive((await host.up())[0].pid)
        assert (await nodes.finish(host))[0].code == 0
        assert len(host.told(RoundFormed)) == 1


async def test_when_the_workers_of_the_host_have_succeeded(tmp_path: Path) -> None:
    """The others can go on without the node that served them, though it was done first."""
    async with Nodes(tmp_path, "1:2") as nodes:
        host, other = await started(nodes, 2)
        host.tell((await host.up())[0], "exit 0")
        await host.event(WorkerExited)
        host.send(signal.SIGTERM)
        assert (await host.ended(AT_ONCE_S)).code == 0
        await other.event(RendezvousStoreRegained, is_host=True)
        await asyncio.sleep(2)  # whoever coordinates now has made up its mind
        assert (await nodes.finish(other))[0].code == 0
        assert len(other.told(RoundFormed)) == 1


async def test_all_at_once(tmp_path: Path) -> None:
    """When all are asked to stop, all end, with nothing left."""
    async with Nodes(tmp_path, 3) as nodes:
        agents = await started(nodes, 3)
        workers = [one for agent in agents for one in await agent.up()]
        for agent in agents:
            agent.send(signal.SIGTERM)
        for agent in agents:
            ended = await agent.ended(AT_ONCE_S)
            assert ended.code == 143
            assert "FAILED" not in ended.err
        assert not any(alive(one.pid) for one in workers)


async def test_a_second_signal_kills(tmp_path: Path) -> None:
    """Workers that do not stop are killed at the second signal."""
    async with Nodes(tmp_path, 2) as nodes:
        host, other = await started(nodes, 2)
        (worker,) = await other.up()
        assert await other.ask(worker, "deaf") == "deaf"
        other.send(signal.SIGTERM)
        await asyncio.sleep(0.2)  # two that arrive together are one to the kernel
        other.send(signal.SIGTERM)
        assert (await other.ended(AT_ONCE_S)).code == 143
        assert not alive(worker.pid)
        await host.event(RoundForming, joined=1, since=1)


async def test_at_random_moments(tmp_path: Path) -> None:
    """Whenever it comes, the code is the signal's, and a new node takes the place."""
    dice = random.Random(time.time_ns())
    async with Nodes(tmp_path, 2) as nodes:
        host = nodes.start("host")
        await host.event(RoundForming)
        for _ in range(15):
            other = nodes.start()
            await asyncio.sleep(dice.uniform(0, 0.8))  # the moment is the point
            other.send(signal.SIGTERM)
            ended = await other.ended(AT_ONCE_S)
            assert ended.code == 143
            assert "FAILED" not in ended.err
        other = nodes.start()
        attempt = (await other.up())[0].attempt
        await nodes.up(host, other, attempt=attempt)
        assert {one.code for one in await nodes.finish(host, other, attempt=attempt)} == {0}


async def test_all_at_random_moments(tmp_path: Path) -> None:
    """Two that are stopped at different moments both end in time."""
    dice = random.Random(time.time_ns())
    async with Nodes(tmp_path, 2) as nodes:
        for _ in range(8):
            agents = [nodes.start() for _ in range(2)]
            for agent in agents:
                await asyncio.sleep(dice.uniform(0, 0.6))  # the moment is the point
                agent.send(signal.SIGTERM)
            for agent in agents:
                ended = await agent.ended(AT_ONCE_S)
                assert ended.code == 143
        nodes.can_split = True  # these are many jobs


async def test_nodes_that_end_at_different_times(tmp_path: Path) -> None:
    """Who is done first waits for the others, and nobody complains."""
    async with Nodes(tmp_path, 3) as nodes:
        agents = await started(nodes, 3)
        for agent in agents:
            agent.tell((await agent.up())[0], "exit 0")
            await agent.event(WorkerExited)
            await asyncio.sleep(0.5)  # others are done much later
        for agent in agents:
            ended = await agent.ended(AT_ONCE_S)
            assert ended.code == 0
            assert "FAILED" not in ended.err


@pytest.mark.parametrize("is_host", [False, True])
async def test_the_wait_for_others_has_a_bound(is_host: bool, tmp_path: Path) -> None:
    """A node that has succeeded waits no longer than it was told, and the others run on."""
    async with Nodes(tmp_path, 2, exit_barrier_timeout=1) as nodes:
        host, other = await started(nodes, 2)
        first, last = (host, other) if is_host else (other, host)
        first.tell((await first.up())[0], "exit 0")
        await first.event(WorkerExited)
        ended = await first.ended(1 + AT_ONCE_S)
        assert ended.code == 0
        await asyncio.sleep(3)  # the others are done much later
        assert alive((await last.up())[0].pid)
        assert (await nodes.finish(last))[0].code == 0
        assert len(last.told(RoundFormed)) == 1
