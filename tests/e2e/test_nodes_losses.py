"""Nodes that are lost again and again, and nodes that leave beside their workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from elastic_aio import JobFinished, NodeLost, RoundFormed, RoundForming
from tests.support.cluster import Cluster

pytestmark = pytest.mark.black_box

# Takes its agent down, as the kernel does when memory is short.
POISON = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(99)"


async def test_a_workload_that_kills_its_agent_does_not_loop(tmp_path: Path) -> None:
    """A service manager restarts the agent at once; the budget of losses ends the job."""
    async with Cluster(tmp_path, 2, max_restarts=0) as cluster:
        host = cluster.start("host", conf={"is_host": True, "any_program": True})
        await host.event(RoundForming)
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
        await cluster.start_store(int(cluster.endpoint.rpartition(":")[2]))
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
    """Also not with its worker, which hears the signal before it, or without the worker."""
    async with Cluster(tmp_path, "1:2", max_restarts=0) as cluster:
        host = cluster.start("host")
        await host.event(RoundForming)
        other = cluster.start("other")
        await cluster.workers(host, other)
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
        other.send(signal.SIGTERM)
        assert (await other.ended()).code == 128 + signal.SIGTERM
        formed = await host.event(RoundFormed, world_size=1, seconds=5)
        assert formed.changes == 1
        assert (await cluster.finish(host, attempt=1))[0].code == 0
