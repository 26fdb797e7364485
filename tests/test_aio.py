"""Work that is seen through, waits that outlast, and a clock that can stand still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest

from elastic_aio.aio import Pausable, all_done, end_all, outlast, owned_task, see_through

GUARD = 10.0


class Work:
    """Something that takes until it is released, and tells what became of it."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.started = 0
        self.finished = 0
        self.began = asyncio.Event()

    async def __call__(self) -> str:
        self.started += 1
        self.began.set()
        await self.release.wait()
        self.finished += 1
        return f"done {self.started}"


async def steps(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_undisturbed_work_gives_its_result() -> None:
    """Without a cancellation it is a plain await."""
    work = Work()
    work.release.set()
    assert await see_through(work) == "done 1"


async def test_an_error_of_the_work_is_raised() -> None:
    """What the work raises comes out unchanged."""

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await see_through(fails)


@pytest.mark.parametrize("times", [1, 2, 50])
async def test_native_cancellations_wait_for_the_work(times: int) -> None:
    """However often the caller is cancelled, the work ends first, once, and then it is told."""
    work = Work()
    task = asyncio.create_task(see_through(work))
    await work.began.wait()
    for _ in range(times):
        task.cancel()
        await steps()
        assert not task.done()
    assert (work.started, work.finished) == (1, 0)
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.started, work.finished) == (1, 1)


async def test_the_cancellation_outlives_an_error_of_the_work() -> None:
    """A cancelled caller gets its cancellation, and the error is not reported as lost."""
    release = asyncio.Event()

    async def fails() -> None:
        await release.wait()
        raise KeyError("x")

    task = asyncio.create_task(see_through(fails))
    await steps()
    task.cancel()
    await steps()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_takes_effect_after_the_work() -> None:
    """`asyncio.timeout` still turns into TimeoutError: the cancellation count stays right."""
    finished = False

    async def slow() -> None:
        nonlocal finished
        await asyncio.sleep(0.05)
        finished = True

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await see_through(slow)
    assert finished
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_anyio_scope_waits_for_the_work_without_spinning() -> None:
    """anyio delivers its cancellation at every await; the wait makes no busy loop of it."""
    work = Work()
    async with asyncio.timeout(GUARD):
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, scope.cancel)
            loop.call_later(0.16, work.release.set)
            began = time.process_time()
            assert await see_through(work) == "done 1"
            used = time.process_time() - began
            await asyncio.sleep(GUARD)  # here the scope's cancellation arrives
    assert scope.cancelled_caught
    assert (work.started, work.finished) == (1, 1)
    # A spinning wait would use nearly all of the 0.15 s.
    assert used < 0.05


async def iterations_while(waiting: Awaitable[Any], seconds: float) -> int:
    """Return how many times the loop polled for events while something waited."""
    loop = asyncio.get_running_loop()
    selector = getattr(loop, "_selector", None)
    if selector is None:
        pytest.fail("needs the stock loop")
    count = 0
    select = selector.select

    def counted(timeout: float | None = None) -> Any:
        nonlocal count
        count += 1
        return select(timeout)

    selector.select = counted
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait([task], timeout=seconds)
        return count
    finally:
        selector.select = select
        task.cancel()


def test_a_wait_inside_cancelled_scopes_costs_a_few_iterations() -> None:
    """Counted on the stock loop: cancelled natively and by anyio, the loop still sleeps."""

    async def main() -> int:
        work = Work()

        async def scoped() -> None:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await see_through(work)

        task = asyncio.create_task(scoped())
        await work.began.wait()
        task.cancel()
        await steps()
        count = await iterations_while(asyncio.shield(task), 0.2)
        assert not task.done()
        work.release.set()
        await asyncio.wait([task])
        assert work.finished == 1
        return count

    assert asyncio.run(main()) < 20


@pytest.mark.parametrize("times", [1, 3])
async def test_a_work_cancelled_by_a_closing_loop_is_started_again(times: int) -> None:
    """`asyncio.run` cancels every task when it ends, the one that does the work included."""
    work = Work()
    task = asyncio.create_task(see_through(work))
    await work.began.wait()
    for round_number in range(1, times + 1):
        work.began.clear()
        for one in asyncio.all_tasks() - {asyncio.current_task()}:
            one.cancel()
        await work.began.wait()
        assert work.started == round_number + 1
        assert not task.done()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.started, work.finished) == (times + 1, 1)


def test_an_interrupted_program_sees_its_work_through() -> None:
    """When the main coroutine fails, asyncio.run waits for work that others are in."""
    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.append("done")

    async def main() -> None:
        task = asyncio.create_task(see_through(work))
        await steps()
        assert not task.done()
        raise KeyError("main is over")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert done == ["done"]


async def test_outlast_neither_cancels_nor_reads_the_future() -> None:
    """A cancelled waiter leaves the future alone until it is done."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(outlast(future))
    await steps()
    task.cancel()
    task.cancel()
    await steps()
    assert not task.done()
    assert not future.cancelled()
    future.set_result(3)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.result() == 3


async def test_outlast_of_a_done_future_returns() -> None:
    """A future that is done, even by an error, is no wait and raises nothing."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_exception(KeyError("x"))
    await outlast(future)
    assert isinstance(future.exception(), KeyError)


async def test_an_owned_task_has_its_name() -> None:
    """Tasks are named for whoever debugs them."""
    task = owned_task(asyncio.sleep(0, "x"), name="the name")
    assert task.get_name() == "the name"
    assert await task == "x"


async def test_all_done_waits_for_the_last() -> None:
    """The future is done with the last of them, whatever became of each."""
    loop = asyncio.get_running_loop()
    first, second, third = loop.create_future(), loop.create_future(), loop.create_future()
    done = all_done([first, second, third])
    first.set_result(1)
    second.set_exception(KeyError("x"))
    await steps()
    assert not done.done()
    third.cancel()
    async with asyncio.timeout(GUARD):
        await done
    assert isinstance(second.exception(), KeyError)


async def test_all_done_of_nothing_and_of_the_past() -> None:
    """No futures are done at once; futures already done are done soon."""
    assert all_done([]).done()
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    async with asyncio.timeout(GUARD):
        await all_done([future, future])


async def test_cancelling_all_done_leaves_the_futures() -> None:
    """It is a view, not an owner."""
    future = asyncio.get_running_loop().create_future()
    done = all_done([future])
    done.cancel()
    future.set_result("x")
    await steps()
    assert future.result() == "x"


@pytest.mark.virtual_clock
async def test_a_sleep_takes_its_time() -> None:
    """Without a pause, seconds are the loop's."""
    clock = Pausable()
    began = clock.now()
    await clock.sleep(3600)
    assert clock.now() - began == pytest.approx(3600, abs=1)


@pytest.mark.virtual_clock
async def test_a_pause_does_not_count() -> None:
    """Time that is skipped while somebody sleeps is slept in addition."""
    clock = Pausable()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(10, clock.skip, 1000)
    await clock.sleep(60)
    assert loop.time() - began == pytest.approx(1060, abs=1)
    assert clock.now() - began == pytest.approx(60, abs=1)


@pytest.mark.virtual_clock
async def test_pauses_add_up() -> None:
    """Two pauses are both left out of account."""
    clock = Pausable()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(1, clock.skip, 100)
    loop.call_later(105, clock.skip, 100)
    await clock.sleep(10)
    assert loop.time() - began == pytest.approx(210, abs=1)


@pytest.mark.virtual_clock
async def test_a_wait_tells_whether_it_was_in_time() -> None:
    """A future done before the end is seen at once, one done later is not waited for."""
    clock = Pausable()
    loop = asyncio.get_running_loop()
    began = loop.time()
    future: asyncio.Future[str] = loop.create_future()
    never: asyncio.Future[str] = loop.create_future()
    loop.call_later(5, future.set_result, "x")
    assert not await clock.wait_for(future, never, seconds=4)
    assert loop.time() - began == pytest.approx(4, abs=0.5)
    assert await clock.wait_for(future, never, seconds=100)
    assert loop.time() - began == pytest.approx(5, abs=0.5)
    assert await clock.wait_for(future, seconds=-1)
    assert not await clock.wait_for(never, seconds=0)
    assert not never.cancelled()


@pytest.mark.virtual_clock
async def test_a_cancelled_sleep_ends_at_once() -> None:
    """A sleep of the clock can be cancelled like any other."""
    clock = Pausable()
    began = clock.now()
    task = asyncio.create_task(clock.sleep(1000))
    await steps()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.now() - began < 1


async def test_tasks_are_ended_whatever_they_do() -> None:
    """One that waits, one that cleans up after itself, and one that has failed already."""
    ended = []

    async def clean_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("clean")

    async def fail() -> None:
        raise ValueError("never looked at by anybody else")

    tasks = [owned_task(asyncio.sleep(60)), owned_task(clean_up()), owned_task(fail())]
    await asyncio.sleep(0)
    await end_all(tasks)
    assert [task.cancelled() for task in tasks] == [True, True, False]
    assert ended == ["clean"]
