"""The harness of the tests with many nodes, proved with one."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_aio import JobFinished, JobStarted, Restarting, RoundFormed, WorkerExited
from tests.support.nodes import Nodes
from tests.support.traces import alive
from tests.support.worlds import check_rounds, check_world

pytestmark = pytest.mark.black_box


def alone(folder: Path, **options: Any) -> Nodes:
    """Return a job of one node, which meets nobody."""
    return Nodes(folder, 1, rdzv_conf=None, rdzv_endpoint="localhost:0", **options)


async def test_workers_tell_who_they_are_and_obey(tmp_path: Path) -> None:
    """A trainee notes its place, its signals and its answers, and ends as it is told."""
    async with alone(tmp_path, max_restarts=1) as nodes:
        node = nodes.start(nproc=2)
        first, second = await nodes.up(node)
        assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
        assert await node.ask(first, "connect") == "connected"
        node.tell(second, "exit 3")
        assert (await node.note("signal", pid=first.pid)).text == "SIGTERM"
        assert (await node.event(Restarting)).restarts == 1
        again = await nodes.up(node, attempt=1)
        assert {one.restart_count for one in again} == {1}
        node.tell(again[0], "raise no data")
        ended = await node.ended()
    assert ended.code == 1
    assert "ValueError: no data" in ended.err
    assert node.told(JobFinished)[-1].exit_code == 1


async def test_success_is_an_end_too(tmp_path: Path) -> None:
    """All workers are told to succeed."""
    async with alone(tmp_path) as nodes:
        node = nodes.start(nproc=2)
        (ended,) = await nodes.finish(node)
    assert ended.code == 0
    assert len(node.told(WorkerExited)) == 2


async def test_nothing_outlives_the_block(tmp_path: Path) -> None:
    """Agents, stopped ones and deaf workers are gone when the block is left by an error."""
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012  # what stands in the block is the point
        async with alone(tmp_path) as nodes:
            node, held = nodes.start("node"), nodes.start("held")
            workers = [*await node.up(), *await held.up()]
            assert await node.ask(workers[0], "deaf") == "deaf"
            held.send(signal.SIGSTOP)
            raise ZeroDivisionError
    assert not any(alive(one.pid) for one in workers)
    assert not node.is_running
    (story,) = caught.value.__notes__
    assert "node: JobStarted(" in story


async def test_what_does_not_come_is_an_error(tmp_path: Path) -> None:
    """A wait ends when its time is over, and at once when nothing can come any more."""
    async with alone(tmp_path) as nodes:
        node = nodes.start()
        (worker,) = await node.up()
        with pytest.raises(AssertionError, match=r"did not say within 0.1 s: Restarting"):
            await node.event(Restarting, seconds=0.1)
        waiting = asyncio.ensure_future(node.event(Restarting))
        node.tell(worker, "exit 0")
        with pytest.raises(AssertionError, match="is over, and never said"):
            await waiting
        assert (await node.event(JobStarted)).nproc_per_node == 1
        with pytest.raises(AssertionError, match="over"):
            await node.event(JobStarted, nproc_per_node=lambda count: count > 1)


async def test_worlds_that_do_not_fit_are_seen(tmp_path: Path) -> None:
    """Two jobs are not one world; a worker alone is."""
    async with alone(tmp_path) as nodes:
        one, other = nodes.start("one"), nodes.start("other")
        notes = [*await one.up(), *await other.up()]
        with pytest.raises(AssertionError):
            check_world(notes)
        check_world(notes[:1])


def test_rounds_that_do_not_fit_are_seen() -> None:
    """A place given twice is seen, and a round that is not the same for all."""
    first = RoundFormed(round=1, group_rank=0, group_world_size=2, world_size=2,
                        master_addr="a", master_port=1)  # fmt: skip
    second = msgspec.structs.replace(first, group_rank=1)
    check_rounds({"a": [first], "b": [second]})
    with pytest.raises(AssertionError, match="group rank 0 of round 1: a and b"):
        check_rounds({"a": [first], "b": [first]})
    with pytest.raises(AssertionError, match="round 1"):
        check_rounds({"a": [first], "b": [msgspec.structs.replace(second, master_port=2)]})


async def test_a_store_of_its_own(tmp_path: Path) -> None:
    """A store is there when `serve` returns, and can be replaced at the same port."""
    async with alone(tmp_path) as nodes:
        port = int(nodes.endpoint.rpartition(":")[2])
        store = await nodes.serve(port)
        await store.kill()
        again = await nodes.serve(port)
        assert again.is_running
