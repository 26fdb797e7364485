"""The node that decides about rounds is one like any other: it may end, or fall asleep."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from elastic_aio import CoordinatorChanged, NodeJoined, RoundFormed
from tests.support.nodes import AT_ONCE_S, Node, Nodes
from tests.support.traces import alive

pytestmark = pytest.mark.black_box


async def started(nodes: Nodes, count: int) -> tuple[Node, list[Node]]:
    """Start a store and nodes that only use it; return who coordinates, and the others."""
    await nodes.serve(int(nodes.endpoint.rpartition(":")[2]))
    agents = [nodes.start() for _ in range(count)]
    await nodes.up(*agents)
    # Only the one that coordinates is told who comes.
    (first,) = [agent for agent in agents if agent.told(NodeJoined)]
    agents.remove(first)
    return first, agents


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    """Another one decides at once, and the others re-form without it."""
    async with Nodes(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=1) as nodes:
        first, others = await started(nodes, 3)
        first.send(number)
        ended_at = time.monotonic()
        assert (await first.ended()).code == 128 + number
        workers = await nodes.up(*others, attempt=1)
        assert time.monotonic() - ended_at < AT_ONCE_S
        assert {(one.world_size, one.restart_count) for one in workers} == {(2, 0)}
        for agent in others:
            assert (await agent.event(CoordinatorChanged, epoch=lambda epoch: epoch > 1)).name
        # The successor judges failures as the first one would have.
        others[0].tell((await others[0].up(attempt=1))[0], "exit 3")
        workers = await nodes.up(*others, attempt=2)
        assert {one.restart_count for one in workers} == {1}
        assert {ended.code for ended in await nodes.finish(*others, attempt=2)} == {0}


async def test_the_budget_outlives_it(tmp_path: Path) -> None:
    """Restarts that were counted before are counted by its successor."""
    async with Nodes(tmp_path, "1:3", conf={"is_host": 0}, max_restarts=2) as nodes:
        first, others = await started(nodes, 3)
        for attempt in range(2):
            others[0].tell((await others[0].up(attempt=attempt))[0], "exit 3")
            await nodes.up(first, *others, attempt=attempt + 1)
        await first.kill()
        workers = await nodes.up(*others, attempt=3)
        assert {one.restart_count for one in workers} == {2}
        others[1].tell((await others[1].up(attempt=3))[0], "exit 6")
        assert {(await agent.ended(AT_ONCE_S)).code for agent in others} == {6}


async def test_it_sleeps(tmp_path: Path) -> None:
    """Orders of one that was replaced meanwhile count for nothing; it takes part again."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Nodes(tmp_path, "1:3", conf=conf) as nodes:
        first, others = await started(nodes, 3)
        for turn in range(3):
            since = nodes.marks()
            first.send(signal.SIGSTOP)
            await nodes.up(*others, since=since, world_size=2)
            since = nodes.marks()
            first.send(signal.SIGCONT)
            workers = await nodes.up(first, *others, since=since, world_size=3)
            assert {one.restart_count for one in workers} == {0}
            assert len(others[0].told(RoundFormed)) == 3 + 2 * turn


async def test_it_sleeps_while_a_worker_fails(tmp_path: Path) -> None:
    """A failure that only a sleeping coordinator was told is judged by its successor."""
    conf = {"is_host": 0, "heartbeat_timeout": 2}
    async with Nodes(tmp_path, "1:3", conf=conf, max_restarts=1) as nodes:
        first, others = await started(nodes, 3)
        first.send(signal.SIGSTOP)
        others[0].tell((await others[0].up())[0], "exit 3")
        workers = await nodes.up(*others, world_size=2)
        assert all(alive(one.pid) for one in workers)
        since = nodes.marks()
        first.send(signal.SIGCONT)
        await nodes.up(first, *others, since=since, world_size=3)
