"""Cancelling at any moment leaves no process, descriptor, thread or task."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import anyio
import pytest

from elastic_aio import Agent, JobFailed, LaunchSpec, LogSpec, StopPlan, launch
from tests.support.children import file_console, noted, noting, shell, until
from tests.support.leaks import alive, leaked_processes, open_descriptors, own_children

POINTS = 100  # on each of the two loops


def job(directory: Path) -> LaunchSpec:
    """Return a job that goes through everything: workers, logs, a failure, a restart."""
    return LaunchSpec(
        shell("echo $RANK; sleep 99 & sleep 0.01; exit $((RANK == TORCHELASTIC_RESTART_COUNT))"),
        nproc_per_node=2,
        max_restarts=2,
        logs=LogSpec(log_dir=str(directory / "logs"), tee=3),
        stop=StopPlan.within(5),
    )


async def check_nothing_is_left(
    descriptors: dict[int, str], children: set[int], tasks: set[asyncio.Task[object]]
) -> None:
    """Assert that a job has left nothing behind, right now."""
    assert own_children() == children
    assert leaked_processes() == {}
    # A task that has just ended is still listed until the loop has turned once.
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - tasks if not task.done()}
    assert not left
    opened = {fd: what for fd, what in open_descriptors().items() if fd not in descriptors}
    assert not opened


@pytest.mark.slow
async def test_at_random_points(tmp_path: Path) -> None:
    """A launch that is cancelled once or twice, whenever that may be, leaves nothing."""
    seed = time.time_ns()
    dice = random.Random(seed)
    loop = asyncio.get_running_loop()
    with file_console(tmp_path) as console:
        began = loop.time()
        await launch(job(tmp_path), console=console)
        length = loop.time() - began
        descriptors, children = open_descriptors(), own_children()
        tasks = asyncio.all_tasks()
        cancelled = 0
        for point in range(POINTS):
            task = loop.create_task(launch(job(tmp_path), console=console))
            first = dice.uniform(0, length) if point % 4 else dice.uniform(0, length / 10)
            timers = [loop.call_later(first, task.cancel)]
            if point % 2:
                timers.append(loop.call_later(first + dice.uniform(0, length / 4), task.cancel))
            await asyncio.wait([task])
            for timer in timers:
                timer.cancel()
            cancelled += task.cancelled()
            try:
                assert task.cancelled() or task.result().exit_code == 0
                await check_nothing_is_left(descriptors, children, tasks)
            except (AssertionError, JobFailed) as error:
                raise AssertionError(f"point {point} of seed {seed}") from error
    assert cancelled > POINTS / 4


async def test_at_every_step_of_the_start() -> None:
    """A launch that is cancelled after any number of turns of the loop leaves nothing."""
    descriptors, children, tasks = open_descriptors(), own_children(), asyncio.all_tasks()
    for turns in range(12):
        task = asyncio.ensure_future(launch(LaunchSpec(["sleep", "99"], nproc_per_node=3)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await check_nothing_is_left(descriptors, children, tasks)


async def test_again_and_again(tmp_path: Path) -> None:
    """A launch that is cancelled on every turn of the loop still ends everything first."""
    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)}, nproc_per_node=3)
    task = asyncio.ensure_future(launch(spec))
    pids = await until(noted(tmp_path, 3))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()
    assert not any(map(alive, pids))


async def test_in_a_task_group(tmp_path: Path) -> None:
    """A sibling that raises ends the job of a task group before the group is left."""
    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)}, nproc_per_node=2)
    pids: list[int] = []

    async def fail_later() -> None:
        pids.extend(await until(noted(tmp_path, 2)))
        raise ZeroDivisionError

    async def run_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(launch(spec))
            group.create_task(fail_later())

    with pytest.raises(ExceptionGroup):
        await run_group()
    assert not any(map(alive, pids))


async def test_in_an_anyio_scope_with_native_cancellation(tmp_path: Path) -> None:
    """Both kinds of cancellation together do not get past the stop plan."""
    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)}, nproc_per_node=2)
    scope = anyio.CancelScope()

    async def inside() -> None:
        with scope:
            await launch(spec)

    task = asyncio.ensure_future(inside())
    pids = await until(noted(tmp_path, 2))
    scope.cancel()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert not any(map(alive, pids))


async def test_in_an_anyio_task_group(tmp_path: Path) -> None:
    """A deadline of anyio ends the agent of a block, and its reader."""
    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)}, nproc_per_node=2)
    seen: list[str] = []

    async def follow(agent: Agent) -> None:
        seen.extend([type(event).__name__ async for event in agent.events()])

    async with anyio.create_task_group() as group, Agent(spec) as agent:
        group.start_soon(follow, agent)
        pids = await until(noted(tmp_path, 2))
    assert seen[-1] == "JobFinished"
    assert not any(map(alive, pids))


async def test_a_job_that_is_over_cannot_be_harmed() -> None:
    """Cancelling after the end changes nothing."""
    task = asyncio.ensure_future(launch(LaunchSpec(["true"])))
    result = await task
    task.cancel()
    assert result.exit_code == 0
    assert os.getpid() not in leaked_processes()
