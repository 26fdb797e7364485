"""Nodes that come and go while a job runs."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    MembershipChanged,
    NodeJoined,
    NodeLost,
    Promoted,
    RoundFormed,
    RoundForming,
    StandingBy,
    WorkerExited,
)
from tests.support.nodes import AT_ONCE_S, Node, Nodes
from tests.support.traces import alive
from tests.support.worlds import Note

pytestmark = pytest.mark.black_box

# A job of several nodes that starts with the first.
AT_ONCE = {"last_call_timeout": 0}


async def hosted(nodes: Nodes, count: int, **options: Any) -> tuple[Node, ...]:
    """Start a node that serves the store, and others."""
    host = nodes.start("host", **options)
    await host.event(RoundForming)
    return host, *(nodes.start(**options) for _ in range(count - 1))


async def test_scaling_up(tmp_path: Path) -> None:
    """A newcomer makes the world larger: no restart is counted, places are kept."""
    async with Nodes(tmp_path, "1:2", conf=AT_ONCE) as nodes:
        first = nodes.start("first", nproc=2)
        before = await nodes.up(first)
        second = nodes.start("second")
        began = time.monotonic()
        workers = await nodes.up(first, second, attempt=1)
        assert time.monotonic() - began < AT_ONCE_S
        assert {one.world_size for one in workers} == {3}
        assert {one.restart_count for one in workers} == {0}
        assert [one.rank for one in await first.up(attempt=1)] == [0, 1]
        for one in before:
            assert (await first.note("signal", pid=one.pid)).text == "SIGTERM"
        changed = await first.event(MembershipChanged)
        assert (changed.attempt, changed.nodes) == (1, 2)
        assert (await first.formed(world_size=3)).changes == 1
        assert {one.error_file for one in workers}.isdisjoint(one.error_file for one in before)
        for node in (first, second):
            assert await node.ask((await node.up(attempt=1))[0], "connect") == "connected"
        assert {ended.code for ended in await nodes.finish(first, second, attempt=1)} == {0}


async def test_several_newcomers_at_once(tmp_path: Path) -> None:
    """Four that come together end in one world with the first, in few rounds."""
    async with Nodes(tmp_path, "1:5", conf=AT_ONCE) as nodes:
        first = nodes.start("first")
        await first.up()
        others = [nodes.start() for _ in range(4)]
        for node in others:
            await node.up(world_size=5)
        await nodes.up(first, *others, world_size=5)
        assert (await first.formed(world_size=5)).group_rank == 0


async def test_newcomers_that_die_half_way(tmp_path: Path) -> None:
    """One that dies before it has a place changes nothing; one that had it is a loss like any."""
    dice = random.Random(time.time_ns())
    async with Nodes(tmp_path, "1:2", conf=AT_ONCE) as nodes:
        node = nodes.start("node")
        await node.up()
        for turn in range(20):
            since = len(node.events)
            newcomer = nodes.start("newcomer")
            if turn % 2:
                await node.event(NodeJoined, since=since)
            else:
                await asyncio.sleep(dice.uniform(0, 0.6))  # the moment is the point
            await newcomer.kill()
        last = nodes.start("last")
        # The first round of the last one may be its only one, or the second of two.
        attempt = (await last.up())[0].attempt
        await nodes.up(node, last, attempt=attempt)
        rounds = node.told(RoundFormed)
        # The next newcomer may be there before the loss of the former one is noticed.
        assert {one.world_size for one in rounds} == {1, 2}
        assert len(node.told(MembershipChanged)) == len(rounds) - 1
        started = [one for one in node.notes.entries if one.what == "started"]
        assert len(started) <= len(rounds)
        assert {one.restart_count for one in started} == {0}
        assert {ended.code for ended in await nodes.finish(node, last, attempt=attempt)} == {0}


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_killed_node_is_left_out_at_once(victim: int, tmp_path: Path) -> None:
    """The others go on without it, whichever it was, and no timeout has to pass."""
    async with Nodes(tmp_path, "1:3", conf={"last_call_timeout": 60}) as nodes:
        agents = await hosted(nodes, 3)
        await nodes.up(*agents)
        await agents[victim].kill()
        killed = time.monotonic()
        left = [agent for agent in agents if agent is not agents[victim]]
        workers = await nodes.up(*left, attempt=1)
        assert time.monotonic() - killed < AT_ONCE_S
        assert {one.world_size for one in workers} == {2}
        assert {one.restart_count for one in workers} == {0}
        # Who was lost together with the store is only missed.
        assert victim == 0 or any(agent.told(NodeLost) for agent in left)
        assert {ended.code for ended in await nodes.finish(*left, attempt=1)} == {0}


async def test_too_few_are_left(tmp_path: Path) -> None:
    """Below the minimum nothing runs, it is said, and a replacement has the vacated rank."""
    async with Nodes(tmp_path, 2) as nodes:
        (host,) = await hosted(nodes, 1, node_rank=1)
        first = nodes.start("first", node_rank=0)
        before = await nodes.up(host, first)
        since = len(host.events)
        await first.kill()
        await host.event(RoundForming, since=since, joined=1, minimum=2)
        assert (await host.note("signal")).text == "SIGTERM"
        assert not any(alive(one.pid) for one in before)
        waiting = [line for line in host.err.splitlines() if "1 of 2" in line or "1/2" in line]
        assert waiting
        instead = nodes.start("instead")
        workers = await nodes.up(host, instead, attempt=1)
        assert (await instead.up())[0].group_rank == 0
        assert {one.restart_count for one in workers} == {0}


async def test_one_stands_by(tmp_path: Path) -> None:
    """A surplus node waits, takes the rank of one that was killed, and ends with the job."""
    async with Nodes(tmp_path, 2) as nodes:
        host, other = await hosted(nodes, 2)
        await nodes.up(host, other)
        rank = (await other.formed()).group_rank
        spare, surplus = nodes.start("spare"), nodes.start("surplus")
        assert (await spare.event(StandingBy)).maximum == 2
        await surplus.event(StandingBy)
        assert len(host.told(RoundFormed)) == 1
        await other.kill()
        promoted = asyncio.wait(
            [asyncio.ensure_future(one.event(Promoted)) for one in (spare, surplus)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        (done,), (pending,) = await promoted
        pending.cancel()
        assert done.result().group_rank == rank
        taker, waiter = (spare, surplus) if spare.told(Promoted) else (surplus, spare)
        workers = await nodes.up(host, taker, attempt=1)
        assert {one.restart_count for one in workers} == {0}
        assert {ended.code for ended in await nodes.finish(host, taker, attempt=1)} == {0}
        assert (await waiter.ended()).code == 0
        assert not waiter.told(RoundFormed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_a_standby_disturbs_nobody(number: signal.Signals, tmp_path: Path) -> None:
    """However a node that stands by ends, the workers of the others run on."""
    async with Nodes(tmp_path, 2) as nodes:
        agents = await hosted(nodes, 2)
        before = await nodes.up(*agents)
        for _ in range(3):
            spare = nodes.start("spare")
            await spare.event(StandingBy)
            spare.send(number)
            assert (await spare.ended()).code == 128 + number
        assert all(alive(one.pid) for one in before)
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}
        for agent in agents:
            assert len(agent.told(RoundFormed)) == 1


async def test_killed_and_replaced_again_and_again(tmp_path: Path) -> None:
    """The world has its size after every loss, and nobody is ever one too many."""
    dice = random.Random(time.time_ns())
    async with Nodes(tmp_path, 3) as nodes:
        host, *others = await hosted(nodes, 3)
        workers = await nodes.up(host, *others)
        for _ in range(20):
            since = nodes.marks()
            victim = dice.randrange(2)
            rank = (await others[victim].formed()).group_rank
            await others[victim].kill()
            others[victim] = nodes.start()
            workers = await nodes.up(host, *others, since=since)
            assert {one.world_size for one in workers} == {3}
            assert (await others[victim].formed()).group_rank == rank
        codes = {ended.code for ended in await nodes.finish(host, *others, attempt=20)}
        assert codes == {0}


async def test_killed_while_others_stand_by_again_and_again(tmp_path: Path) -> None:
    """With a spare the job never waits for a replacement."""
    async with Nodes(tmp_path, 2) as nodes:
        host, other = await hosted(nodes, 2)
        await nodes.up(host, other)
        for attempt in range(1, 21):
            spare = nodes.start("spare")
            await spare.event(StandingBy)
            await other.kill()
            workers = await nodes.up(host, spare, attempt=attempt)
            assert {one.world_size for one in workers} == {2}
            other = spare


async def test_a_restart_while_another_node_is_done(tmp_path: Path) -> None:
    """A node whose workers have succeeded takes part again when those of another fail."""
    async with Nodes(tmp_path, 2, max_restarts=1) as nodes:
        host, other = await hosted(nodes, 2)
        await nodes.up(host, other)
        host.tell((await host.up())[0], "exit 0")
        await host.event(WorkerExited)
        other.tell((await other.up())[0], "exit 4")
        workers = await nodes.up(host, other, attempt=1)
        assert {one.restart_count for one in workers} == {1}
        assert {ended.code for ended in await nodes.finish(host, other, attempt=1)} == {0}


async def test_a_loss_while_another_node_is_done(tmp_path: Path) -> None:
    """A node whose workers have succeeded takes part again when another one is lost."""
    async with Nodes(tmp_path, "1:2") as nodes:
        host, other = await hosted(nodes, 2)
        await nodes.up(host, other)
        host.tell((await host.up())[0], "exit 0")
        await host.event(WorkerExited)
        await other.kill()
        (worker,) = await nodes.up(host, attempt=1)
        assert (worker.world_size, worker.restart_count) == (1, 0)
        assert (await nodes.finish(host, attempt=1))[0].code == 0


async def test_ranks_are_kept(tmp_path: Path) -> None:
    """Every node has the same ranks in all of six attempts."""
    async with Nodes(tmp_path, 3, max_restarts=5) as nodes:
        agents = [nodes.start(nproc=2) for _ in range(3)]
        workers = await nodes.up(*agents)

        async def ranks(attempt: int) -> list[list[int]]:
            return [[one.rank for one in await agent.up(attempt=attempt)] for agent in agents]

        first = await ranks(0)
        for attempt in range(1, 6):
            fails = agents[attempt % 3]
            fails.tell((await fails.up(attempt=attempt - 1))[0], "exit 1")
            workers = await nodes.up(*agents, attempt=attempt)
            assert await ranks(attempt) == first
            assert {one.restart_count for one in workers} == {attempt}


async def test_all_places_are_distinct_when_many_come_and_go(tmp_path: Path) -> None:
    """Nodes that come and go at random moments end in one world of those that are left."""
    dice = random.Random(time.time_ns())
    async with Nodes(tmp_path, "1:4", conf=AT_ONCE) as nodes:
        host = nodes.start("host")
        await host.up()
        live: list[Node] = []
        for _ in range(12):
            if len(live) == 3:
                await live.pop(dice.randrange(3)).kill()
            live.append(nodes.start())
            await asyncio.sleep(dice.uniform(0, 0.5))  # the moment is the point
        workers: list[Note] = []
        for node in live:
            workers += await node.up(group_world_size=4)
        await host.up(group_world_size=4)
        last = max(one.attempt for one in workers)
        await nodes.up(host, *live, attempt=last)
        assert {ended.code for ended in await nodes.finish(host, *live, attempt=last)} == {0}
