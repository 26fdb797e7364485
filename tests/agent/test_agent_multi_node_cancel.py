"""Cancelling a node of a job of many at any moment leaves nothing, and it has left."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from elastic_aio import JobEnded, StopPlan
from elastic_aio.rendezvous.base import (
    NodeDraining,
    PreemptionNoticed,
    Report,
    RestartCause,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StopRound,
)
from tests.support.children import noted, noting, shell, until
from tests.support.fake_rendezvous import (
    HERE,
    FakeRendezvous,
    Member,
    failure_elsewhere,
    member,
    node_spec,
)
from tests.support.leaks import alive, leaked_processes, open_descriptors, own_children

POINTS = 25  # on each of the two loops


def play(rendezvous: FakeRendezvous) -> None:
    """Let a job go through everything: rounds, a failure, a restart, a success, the barrier."""

    def answer(report: Report) -> None:
        loop = asyncio.get_running_loop()
        match report:
            case RoundStarted(0):
                loop.call_soon(begin, 1, RestartCause(1, "b joined", 0))
            case RoundStopped(1):
                loop.call_soon(
                    begin, 2, RestartCause(2, "restart 1 of 1", 1, 0.0, failure_elsewhere())
                )
            case RoundSucceeded(2):
                rendezvous.instruct(StopRound(2, "a worker on b has failed"))
                loop.call_soon(begin, 3)

    def begin(number: int, cause: RestartCause | None = None) -> None:
        port = rendezvous.agent.reserve_master_port(HERE)
        rendezvous.start_round(number, cause, port=port, restarts=number)

    rendezvous.on_report = answer
    rendezvous.on_open = lambda: begin(0)


async def run(directory: Path) -> Member:
    spec = node_spec(
        directory,
        shell("sleep 99 & sleep 0.01; exit $((TORCHELASTIC_RESTART_COUNT == 1 && RANK == 0))"),
        stop=StopPlan.within(5),
        barrier=0.01,
    )
    async with member(spec, play) as node:
        await node.agent.wait()
    return node


@pytest.mark.slow
async def test_at_random_points(tmp_path: Path) -> None:
    """A node that is cancelled once or twice, whenever that may be, leaves nothing."""
    seed = time.time_ns()
    dice = random.Random(seed)
    loop = asyncio.get_running_loop()
    began = loop.time()
    node = await run(tmp_path)
    length = loop.time() - began
    others = NodeDraining | PreemptionNoticed
    reports = [one for one in node.rendezvous.reports if not isinstance(one, others)]
    kinds = [(type(report).__name__, report.round) for report in reports]
    assert kinds[:2] == [("RoundStarted", 0), ("RoundStopped", 0)]
    # On a busy host the worker fails before the last one is spawned: then the round is
    # failing without having been reported as started.
    assert ("RoundFailing", 1) in kinds
    assert kinds[-1] == ("RoundSucceeded", 3)
    descriptors, children, tasks = open_descriptors(), own_children(), asyncio.all_tasks()
    cancelled = 0
    for point in range(POINTS):
        task = loop.create_task(run(tmp_path))
        first = dice.uniform(0, length)
        timers = [loop.call_later(first, task.cancel)]
        if point % 2:
            timers.append(loop.call_later(first + dice.uniform(0, length / 4), task.cancel))
        await asyncio.wait([task])
        for timer in timers:
            timer.cancel()
        cancelled += task.cancelled()
        try:
            assert task.cancelled() or task.result().rendezvous.leave_reasons
            assert own_children() == children
            assert leaked_processes() == {}
            await asyncio.sleep(0)
            assert not {left for left in asyncio.all_tasks() - tasks if not left.done()}
            assert not open_descriptors().keys() - descriptors.keys()
        except AssertionError as error:
            raise AssertionError(f"point {point} of seed {seed}") from error
    assert cancelled > POINTS / 4


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_in_barrier", [False, True], ids=["running", "barrier"])
def test_a_loop_that_shuts_down(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], is_in_barrier: bool
) -> None:
    """Every task is cancelled at once; the workers are stopped and this node leaves even so."""
    members: list[Member] = []
    ends: list[BaseException | None] = []

    async def work() -> None:
        entrypoint = ["true"] if is_in_barrier else noting()
        async with member(node_spec(tmp_path, entrypoint)) as node:
            members.append(node)
            node.rendezvous.start_round(0)
            try:
                await node.agent.wait()
            finally:
                ends.append(None)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        if is_in_barrier:
            await until(lambda: members)
            await members[0].rendezvous.wait_report(RoundSucceeded)
        else:
            await until(noted(tmp_path, 2))
        assert not task.done()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    (node,) = members
    assert len(node.rendezvous.leave_reasons) >= 1
    assert type(node.events[-1]).__name__ == "JobFinished"
    if not is_in_barrier:
        pids = [int((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
        assert not any(map(alive, pids))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_shuts_down_while_this_node_leaves(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A leaving that was cancelled is started over, and the job ends after it."""
    members: list[Member] = []

    async def work() -> None:
        async with member(node_spec(tmp_path, ["true"])) as node:
            members.append(node)
            node.rendezvous.may_leave.clear()
            await node.agent.stop()

    async def main() -> asyncio.Task[None]:
        task = asyncio.ensure_future(work())
        await until(lambda: members)
        rendezvous = members[0].rendezvous
        await rendezvous.wait_left()
        rendezvous.on_leave = rendezvous.may_leave.set
        return task

    with asyncio.Runner(loop_factory=new_loop) as runner:
        task = runner.run(main())
    assert task.done()
    assert len(members[0].rendezvous.leave_reasons) == 2
    assert type(members[0].events[-1]).__name__ == "JobFinished"


async def test_again_and_again(tmp_path: Path) -> None:
    """A node that is cancelled on every turn of the loop still ends everything first."""
    members: list[Member] = []

    async def work() -> None:
        async with member(node_spec(tmp_path, noting())) as node:
            members.append(node)
            node.rendezvous.start_round(0)
            await node.agent.wait()

    task = asyncio.ensure_future(work())
    pids = await until(noted(tmp_path, 2))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises((asyncio.CancelledError, JobEnded)):
        task.result()
    assert not any(map(alive, pids))
    assert len(members[0].rendezvous.leave_reasons) == 1
