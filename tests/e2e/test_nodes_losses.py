"""Nodes that are lost or suspended, of the coordinator or not, and leave beside their workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from elastic_aio import CoordinatorChanged, JobFinished, NodeLost, RoundFormed
from tests.support.cluster import AT_ONCE_S, AgentProcess, Cluster, within
from tests.support.leaks import alive

pytestmark = pytest.mark.black_box

# Takes its agent down, as the kernel does when memory is short.
POISON = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(99)"


async def test_a_workload_that_kills_its_agent_does_not_loop(tmp_path: Path) -> None:
    """A service manager restarts the agent at once; the budget of losses ends the job."""
    async with Cluster(tmp_path, 2, max_restarts=0) as cluster:
        host = await cluster.start_first("host", conf={"is_host": True, "any_program": True})
        program = [sys.executable, "-c", POISON]
        while host.is_running:
            poisoned = cluster.start("poisoned", "--no-python", *program, conf={"is_host": False})
            await asyncio.wait(
                [asyncio.ensure_future(host.ended(60)), asyncio.ensure_future(poisoned.ended(60))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        assert (await host.ended()).code == 1
        finished = await host.event(JobFinished)
        assert "restart.node_losses" in finished.why
        assert finished.restarts == 0
        assert len(host.events_of(NodeLost)) == 11


async def test_a_job_of_one_node_that_kills_its_agent_does_not_loop(tmp_path: Path) -> None:
    """No node is left that counts the losses; the store, which outlives them, has the round."""
    async with Cluster(tmp_path, "1:2", max_restarts=0) as cluster:
        await cluster.start_store()
        program = [sys.executable, "-c", POISON]
        for turn in range(12):
            conf = {"last_call_timeout": 0}
            node = cluster.start(f"n{turn}", "--no-python", *program, conf=conf)
            code = (await node.ended(60)).code
        assert code == 1
        assert (await node.event(JobFinished)).why == (
            "all nodes of round 10 were lost:"
            " 11 node losses, at most 10 within 60 s are allowed (restart.node_losses)"
        )


@pytest.mark.parametrize("order", ["agent", "both", "worker_first"])
async def test_sigterm_to_one_agent_never_fails_the_job(order: str, tmp_path: Path) -> None:
    """Also not with its worker; a failure that is judged before the signal costs a restart."""
    max_restarts = int(order == "worker_first")
    async with Cluster(tmp_path, "1:2", max_restarts=max_restarts) as cluster:
        host, other = await cluster.start_all(2)
        pair = [(node, (await node.workers())[0]) for node in (host, other)]
        for node, worker in sorted(pair, key=lambda one: one[1].rank):
            await node.ask(worker, f"collective {tmp_path / 'peer'}")
        worker = pair[1][1]
        if order != "agent":
            os.kill(worker.pid, signal.SIGTERM)
        if order == "worker_first":
            # The failure is known and all workers have stopped before the agent hears of it.
            await other.note("signal")
            await asyncio.sleep(0.02)
        await other.stops()
        formed = await host.event(RoundFormed, world_size=1, seconds=5)
        assert formed.changes == 1
        assert 1 <= formed.attempt <= 1 + max_restarts
        await cluster.succeed(host, attempt=formed.attempt)


# ------------------------------------------------------------------ the coordinator


async def at_a_store(cluster: Cluster, count: int) -> tuple[AgentProcess, list[AgentProcess]]:
    """Start a store and nodes that only use it; return the coordinator and the other nodes."""
    await cluster.start_store()
    agents = [cluster.start() for _ in range(count)]
    await cluster.workers(*agents)
    return cluster.split(agents)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_coordinator_ends(number: signal.Signals, tmp_path: Path) -> None:
    """Another node takes over at once, and the others re-form without it."""
    async with Cluster(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=1) as cluster:
        first, others = await at_a_store(cluster, 3)
        first.send(number)
        with within():
            assert (await first.ended()).code == 128 + number
            workers = await cluster.workers(*others, attempt=1)
        assert {(worker.world_size, worker.restart_count) for worker in workers} == {(2, 0)}
        for agent in others:
            assert (await agent.event(CoordinatorChanged, term=lambda term: term > 1)).name
        # The successor decides about failures as the first coordinator would have.
        others[0].order((await others[0].workers(attempt=1))[0], "exit 3")
        await cluster.workers(*others, attempt=2, restart_count=1)
        await cluster.succeed(*others, attempt=2)


async def test_the_restart_budget_outlives_the_coordinator(tmp_path: Path) -> None:
    """The successor continues the count of restarts."""
    async with Cluster(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=2) as cluster:
        first, others = await at_a_store(cluster, 3)
        for attempt in range(2):
            others[0].order((await others[0].workers(attempt=attempt))[0], "exit 3")
            await cluster.workers(first, *others, attempt=attempt + 1)
        await first.kill()
        workers = await cluster.workers(*others, attempt=3)
        assert {worker.restart_count for worker in workers} == {2}
        others[1].order((await others[1].workers(attempt=3))[0], "exit 6")
        assert {(await agent.ended(AT_ONCE_S)).code for agent in others} == {6}


async def test_the_coordinator_is_suspended(tmp_path: Path) -> None:
    """Its orders have no effect after it was replaced; it takes part again."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Cluster(tmp_path, "1:3", conf=conf) as cluster:
        first, others = await at_a_store(cluster, 3)
        for turn in range(3):
            since = cluster.note_counts()
            first.send(signal.SIGSTOP)
            await cluster.workers(*others, since=since, world_size=2)
            since = cluster.note_counts()
            first.send(signal.SIGCONT)
            workers = await cluster.workers(first, *others, since=since, world_size=3)
            assert {worker.restart_count for worker in workers} == {0}
            assert len(others[0].events_of(RoundFormed)) == 3 + 2 * turn


async def test_the_coordinator_is_suspended_while_a_worker_fails(tmp_path: Path) -> None:
    """The successor decides about a failure that was reported to the suspended coordinator."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Cluster(tmp_path, "1:3", conf=conf, max_restarts=1) as cluster:
        first, others = await at_a_store(cluster, 3)
        first.send(signal.SIGSTOP)
        others[0].order((await others[0].workers())[0], "exit 3")
        workers = await cluster.workers(*others, world_size=2)
        assert all(alive(worker.pid) for worker in workers)
        since = cluster.note_counts()
        first.send(signal.SIGCONT)
        await cluster.workers(first, *others, since=since, world_size=3)
