"""The cluster harness, tested with single nodes."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_aio import JobStarted, Restarting, RoundFormed
from tests.support.cluster import Cluster
from tests.support.leaks import alive
from tests.support.worker_notes import check_rounds, check_world

pytestmark = pytest.mark.black_box


def single_nodes(directory: Path, **options: Any) -> Cluster:
    """Return a cluster whose nodes are jobs of their own, without a rendezvous."""
    return Cluster(directory, 1, rdzv_conf=None, rdzv_endpoint="localhost:0", **options)


async def test_nothing_outlives_the_block(tmp_path: Path) -> None:
    """Agents, suspended agents and workers that ignore SIGTERM end if the block raises."""
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012  # the block raises after the starts
        async with single_nodes(tmp_path) as cluster:
            node, held = cluster.start("node"), cluster.start("held")
            workers = [*await node.workers(), *await held.workers()]
            assert await node.ask(workers[0], "ignore_sigterm") == "ignore_sigterm"
            held.send(signal.SIGSTOP)
            raise ZeroDivisionError
    assert not any(alive(worker.pid) for worker in workers)
    assert not node.is_running
    (timeline,) = caught.value.__notes__
    assert "node: JobStarted(" in timeline


async def test_waits_end_with_an_error(tmp_path: Path) -> None:
    """A wait ends after its time, and at once when the writers are gone."""
    async with single_nodes(tmp_path) as cluster:
        node = cluster.start()
        (worker,) = await node.workers()
        with pytest.raises(AssertionError, match=r"not within 0.1 s: Restarting"):
            await node.event(Restarting, seconds=0.1)
        waiting = asyncio.ensure_future(node.event(Restarting))
        node.order(worker, "exit 0")
        with pytest.raises(AssertionError, match="ended without Restarting"):
            await waiting
        assert (await node.event(JobStarted)).nproc_per_node == 1
        with pytest.raises(AssertionError, match="ended without"):
            await node.event(JobStarted, nproc_per_node=lambda count: count > 1)


async def test_check_world_sees_two_worlds(tmp_path: Path) -> None:
    """Workers of two jobs are not one world; a single worker is."""
    async with single_nodes(tmp_path) as cluster:
        first, other = cluster.start("first"), cluster.start("other")
        notes = [*await first.workers(), *await other.workers()]
        with pytest.raises(AssertionError):
            check_world(notes)
        check_world(notes[:1])


def test_check_rounds_sees_contradictions() -> None:
    """A group rank given twice, and a round that differs between nodes."""
    first = RoundFormed(round=1, group_rank=0, group_world_size=2, world_size=2,
                        master_addr="a", master_port=1)  # fmt: skip
    second = msgspec.structs.replace(first, group_rank=1)
    check_rounds({"a": [first], "b": [second]})
    with pytest.raises(AssertionError, match="group rank 0 of round 1: a and b"):
        check_rounds({"a": [first], "b": [first]})
    with pytest.raises(AssertionError, match="round 1"):
        check_rounds({"a": [first], "b": [msgspec.structs.replace(second, master_port=2)]})
