"""Nodes that come and go while a job runs."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import time
from pathlib import Path

import pytest

from elastic_aio import (
    MembershipChanged,
    MembershipPending,
    NodeJoined,
    NodeLost,
    NodeStandby,
    RoundFormed,
    RoundForming,
    StandbyPromoted,
    WorkerExited,
)
from tests.support.cluster import UNLIMITED_LOSSES, AgentProcess, Cluster, within
from tests.support.leaks import alive
from tests.support.sockets import LOOPBACK, free_port
from tests.support.worker_notes import Note

pytestmark = pytest.mark.black_box

# A job of several nodes that starts with the first.
AT_ONCE = {"last_call_timeout": 0}


async def test_scaling_up(tmp_path: Path) -> None:
    """A newcomer makes the world larger: no restart is counted, and ranks are kept."""
    async with Cluster(tmp_path, "1:2", conf=AT_ONCE) as cluster:
        first = cluster.start("first", nproc=2)
        before = await cluster.workers(first)
        second = cluster.start("second")
        with within():
            workers = await cluster.workers(first, second, attempt=1)
        assert {worker.world_size for worker in workers} == {3}
        assert {worker.restart_count for worker in workers} == {0}
        assert [one.rank for one in await first.workers(attempt=1)] == [0, 1]
        for worker in before:
            assert (await first.note("signal", pid=worker.pid)).text == "SIGTERM"
        changed = await first.event(MembershipChanged)
        assert (changed.attempt, changed.nodes) == (1, 2)
        assert (await first.round_formed(world_size=3)).changes == 1
        assert {worker.error_file for worker in workers}.isdisjoint(
            worker.error_file for worker in before
        )
        await cluster.check_master(first, second, attempt=1)
        await cluster.succeed(first, second, attempt=1)


async def test_workers_know_of_a_newcomer_before_they_are_restarted(tmp_path: Path) -> None:
    """The newcomer waits for another one, which fills the job."""
    async with Cluster(tmp_path, "1:3", conf={**AT_ONCE, "scale_up_delay": 60}) as cluster:
        first = cluster.start("first")
        (before,) = await cluster.workers(first)
        assert await first.ask(before, "pending") == "none"
        second = cluster.start("second")
        for node in (first, second):
            assert (await node.event(MembershipPending)).time_left == 60
        reason, _, left = (await first.ask(before, "pending")).rpartition(" in ")
        assert reason.endswith("joined")
        assert 0 < float(left) <= 60
        assert len(first.events_of(RoundFormed)) == 1
        third = cluster.start("third")
        workers = await cluster.workers(first, second, third, attempt=1)
        assert {worker.world_size for worker in workers} == {3}
        (after,) = await first.workers(attempt=1)
        assert await first.ask(after, "pending") == "none"
        await cluster.succeed(first, second, third, attempt=1)


async def test_workers_are_restarted_for_a_newcomer_when_all_have_agreed(tmp_path: Path) -> None:
    conf = {**AT_ONCE, "scale_up": "checkpoint", "scale_up_limit": 3600}
    async with Cluster(tmp_path, "2:3", conf=conf) as cluster:
        first = cluster.start("first", nproc=2)
        second = cluster.start("second")
        await cluster.workers(first, second)
        assert await first.ask((await first.workers())[0], "agree") == "False"
        third = cluster.start("third")
        for node in (first, second):
            await node.event(MembershipPending)
        for node in (first, second):
            for worker in await node.workers():
                assert await node.ask(worker, "pending") != "none"
                assert len(node.events_of(RoundFormed)) == 1
                node.order(worker, "agree")
        await cluster.workers(first, second, third, attempt=1, world_size=4)
        await cluster.succeed(first, second, third, attempt=1)


async def test_several_newcomers_at_once(tmp_path: Path) -> None:
    """Four nodes that join together form one world with the first one, in few rounds."""
    async with Cluster(tmp_path, "1:5", conf=AT_ONCE) as cluster:
        first = cluster.start("first")
        await first.workers()
        others = [cluster.start() for _ in range(4)]
        for node in others:
            await node.workers(world_size=5)
        await cluster.workers(first, *others, world_size=5)
        assert (await first.round_formed(world_size=5)).group_rank == 0


async def test_newcomers_that_are_killed_while_they_join(tmp_path: Path) -> None:
    """A kill before it has a rank changes nothing; after that it is a loss like any other."""
    dice = random.Random(time.time_ns())
    async with Cluster(tmp_path, "1:2", conf=AT_ONCE) as cluster:
        node = cluster.start("node")
        await node.workers()
        for turn in range(20):
            since = len(node.events)
            newcomer = cluster.start("newcomer")
            if turn % 2:
                await node.event(NodeJoined, since=since)
            else:
                await asyncio.sleep(dice.uniform(0, 0.6))  # a random moment
            await newcomer.kill()
        last = cluster.start("last")
        # The last newcomer may be in one round or in two.
        attempt = (await last.workers())[0].attempt
        await cluster.workers(node, last, attempt=attempt)
        rounds = node.events_of(RoundFormed)
        # The next newcomer may join before the loss of the former one is noticed.
        assert {one.world_size for one in rounds} == {1, 2}
        assert len(node.events_of(MembershipChanged)) == len(rounds) - 1
        started = [one for one in node.notes.entries if one.what == "started"]
        assert len(started) <= len(rounds)
        assert {one.restart_count for one in started} == {0}
        await cluster.succeed(node, last, attempt=attempt)


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_killed_node_is_removed_at_once(victim: int, tmp_path: Path) -> None:
    """The others re-form without it, whichever it was, and no timeout has to pass."""
    async with Cluster(tmp_path, "1:3", conf={"last_call_timeout": 60}) as cluster:
        agents = await cluster.start_all(3)
        await agents[victim].kill()
        with within():
            left = [agent for agent in agents if agent is not agents[victim]]
            await cluster.workers(*left, attempt=1, world_size=2, restart_count=0)
        # If the store was lost too, the loss of the node is not reported.
        assert victim == 0 or any(agent.events_of(NodeLost) for agent in left)
        await cluster.succeed(*left, attempt=1)


async def test_too_few_are_left(tmp_path: Path) -> None:
    """Below the minimum no worker runs, the console says so; a replacement gets the rank."""
    async with Cluster(tmp_path, 2) as cluster:
        host = await cluster.start_first("host", node_rank=1)
        first = cluster.start("first", node_rank=0)
        before = await cluster.workers(host, first)
        since = len(host.events)
        await first.kill()
        await host.event(RoundForming, since=since, joined=1, minimum=2)
        assert (await host.note("signal")).text == "SIGTERM"
        assert not any(alive(worker.pid) for worker in before)
        name = f"{socket.gethostname()} (pid {host.pid})"
        waiting = f"1 node present ({name}), minimum 2, maximum 2, missing"
        assert waiting in host.err
        instead = cluster.start("instead")
        workers = await cluster.workers(host, instead, attempt=1)
        assert (await instead.workers())[0].group_rank == 0
        assert {worker.restart_count for worker in workers} == {0}


async def test_a_surplus_node_stands_by(tmp_path: Path) -> None:
    """It waits, takes the rank of a node that was killed, and ends with the job."""
    async with Cluster(tmp_path, 2) as cluster:
        host, other = await cluster.start_all(2)
        rank = (await other.round_formed()).group_rank
        spare, surplus = cluster.start("spare"), cluster.start("surplus")
        assert (await spare.event(NodeStandby)).maximum == 2
        await surplus.event(NodeStandby)
        assert len(host.events_of(RoundFormed)) == 1
        await other.kill()
        promoted = asyncio.wait(
            [asyncio.ensure_future(one.event(StandbyPromoted)) for one in (spare, surplus)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        (done,), (pending,) = await promoted
        pending.cancel()
        assert done.result().group_rank == rank
        taker, waiter = (spare, surplus) if spare.events_of(StandbyPromoted) else (surplus, spare)
        await cluster.workers(host, taker, attempt=1, restart_count=0)
        await cluster.succeed(host, taker, attempt=1)
        assert (await waiter.ended()).code == 0
        assert not waiter.events_of(RoundFormed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_end_of_a_standby_changes_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """However it ends, the workers of the others keep running."""
    async with Cluster(tmp_path, 2) as cluster:
        agents = await cluster.start_all(2)
        before = await cluster.workers(*agents)
        for _ in range(3):
            spare = cluster.start("spare")
            await spare.event(NodeStandby)
            await spare.stops(number)
        assert all(alive(worker.pid) for worker in before)
        await cluster.succeed(*agents)
        for agent in agents:
            assert len(agent.events_of(RoundFormed)) == 1


async def test_killed_and_replaced_again_and_again(tmp_path: Path) -> None:
    """The world has its size after every loss, and no node is ever surplus."""
    dice = random.Random(time.time_ns())
    async with Cluster(tmp_path, 3, launcher=UNLIMITED_LOSSES) as cluster:
        host, *others = await cluster.start_all(3)
        for _ in range(20):
            since = cluster.note_counts()
            victim = dice.randrange(2)
            rank = (await others[victim].round_formed()).group_rank
            await others[victim].kill()
            others[victim] = cluster.start()
            workers = await cluster.workers(host, *others, since=since)
            assert {worker.world_size for worker in workers} == {3}
            assert (await others[victim].round_formed()).group_rank == rank
        await cluster.succeed(host, *others, attempt=20)


async def test_killed_while_others_stand_by_again_and_again(tmp_path: Path) -> None:
    """With a spare the job never waits for a replacement."""
    async with Cluster(tmp_path, 2, launcher=UNLIMITED_LOSSES) as cluster:
        host, other = await cluster.start_all(2)
        for attempt in range(1, 21):
            spare = cluster.start("spare")
            await spare.event(NodeStandby)
            await other.kill()
            await cluster.workers(host, spare, attempt=attempt, world_size=2)
            other = spare


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_static_node_is_replaced_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """Before the lease of its predecessor has ended: it waits for that."""
    port = free_port()
    conf = {"heartbeat_timeout": 2 if number == signal.SIGSTOP else 30}
    async with Cluster(
        tmp_path,
        2,
        conf=conf,
        rdzv_backend="static",
        rdzv_endpoint=None,
        master_addr=LOOPBACK,
        master_port=port,
    ) as cluster:
        zero = cluster.start(node_rank=0)
        one = cluster.start(node_rank=1)
        await cluster.workers(zero, one)
        for attempt in (1, 2, 3):
            one.send(number)
            replacement = cluster.start(node_rank=1)
            await cluster.workers(zero, replacement, attempt=attempt, world_size=2)
            one.send(signal.SIGKILL)
            one = replacement
        await cluster.succeed(zero, one, attempt=3)


async def test_a_restart_after_another_node_has_succeeded(tmp_path: Path) -> None:
    """A node whose workers have succeeded takes part again when those of another fail."""
    async with Cluster(tmp_path, 2, max_restarts=1) as cluster:
        host, other = await cluster.start_all(2)
        host.order((await host.workers())[0], "exit 0")
        await host.event(WorkerExited)
        other.order((await other.workers())[0], "exit 4")
        await cluster.workers(host, other, attempt=1, restart_count=1)
        await cluster.succeed(host, other, attempt=1)


async def test_a_loss_after_another_node_has_succeeded(tmp_path: Path) -> None:
    """A node whose workers have succeeded takes part again when another one is lost."""
    async with Cluster(tmp_path, "1:2") as cluster:
        host, other = await cluster.start_all(2)
        host.order((await host.workers())[0], "exit 0")
        await host.event(WorkerExited)
        await other.kill()
        (worker,) = await cluster.workers(host, attempt=1)
        assert (worker.world_size, worker.restart_count) == (1, 0)
        await cluster.succeed(host, attempt=1)


async def test_ranks_are_kept(tmp_path: Path) -> None:
    """Every node has the same ranks in all of six attempts."""
    async with Cluster(tmp_path, 3, max_restarts=5) as cluster:
        agents = [cluster.start(nproc=2) for _ in range(3)]
        workers = await cluster.workers(*agents)

        async def ranks(attempt: int) -> list[list[int]]:
            return [[one.rank for one in await agent.workers(attempt=attempt)] for agent in agents]

        first = await ranks(0)
        for attempt in range(1, 6):
            fails = agents[attempt % 3]
            fails.order((await fails.workers(attempt=attempt - 1))[0], "exit 1")
            workers = await cluster.workers(*agents, attempt=attempt)
            assert await ranks(attempt) == first
            assert {worker.restart_count for worker in workers} == {attempt}


async def test_ranks_are_distinct_when_nodes_join_and_leave(tmp_path: Path) -> None:
    """Nodes that join and end at random moments; those that are left form one world."""
    dice = random.Random(time.time_ns())
    async with Cluster(tmp_path, "1:4", conf=AT_ONCE) as cluster:
        host = cluster.start("host")
        await host.workers()
        live: list[AgentProcess] = []
        for _ in range(12):
            if len(live) == 3:
                await live.pop(dice.randrange(3)).kill()
            live.append(cluster.start())
            await asyncio.sleep(dice.uniform(0, 0.5))  # a random moment
        workers: list[Note] = []
        for node in live:
            # A host whose agents have left again and again waits for up to 30 s.
            workers += await node.workers(group_world_size=4, seconds=90)
        await host.workers(group_world_size=4)
        last = max(worker.attempt for worker in workers)
        await cluster.workers(host, *live, attempt=last)
        await cluster.succeed(host, *live, attempt=last)
