"""Shielded work, threads, notification, and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.aio import (
    Alarm,
    EventHistory,
    EventReader,
    ForkGuard,
    Notifier,
    PausableClock,
    cancel_and_wait,
    create_task,
    read_cached,
    read_file,
    run_in_thread,
    run_shielded,
    set_result_if_pending,
    wait_shielded,
    when_all_done,
)

pytestmark = pytest.mark.both_loops

GUARD = 10.0


class Work:
    """A coroutine function that waits until it is released, and counts its runs."""

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


async def test_run_shielded_returns_the_result() -> None:
    work = Work()
    work.release.set()
    assert await run_shielded(work) == "done 1"


async def test_run_shielded_raises_the_error() -> None:

    async def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await run_shielded(fails)


@pytest.mark.parametrize("times", [1, 2, 50])
async def test_native_cancellations_are_raised_after_the_work(times: int) -> None:
    """The work runs once."""
    work = Work()
    task = asyncio.create_task(run_shielded(work))
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


async def test_a_cancellation_replaces_an_error_of_the_work() -> None:
    """And the error is not reported as never retrieved."""
    release = asyncio.Event()

    async def fails() -> None:
        await release.wait()
        raise KeyError("x")

    task = asyncio.create_task(run_shielded(fails))
    await steps()
    task.cancel()
    await steps()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_takes_effect_after_the_work() -> None:
    """And raises TimeoutError: `Task.cancelling()` is balanced."""
    finished = False

    async def slow() -> None:
        nonlocal finished
        await asyncio.sleep(0.05)
        finished = True

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_shielded(slow)
    assert finished
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_anyio_scope_waits_without_spinning() -> None:
    """anyio raises its cancellation at every await."""
    work = Work()
    async with asyncio.timeout(GUARD):
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            loop.call_later(0.01, scope.cancel)
            loop.call_later(0.16, work.release.set)
            began = time.process_time()
            assert await run_shielded(work) == "done 1"
            used = time.process_time() - began
            await asyncio.sleep(GUARD)  # here the scope's cancellation arrives
    assert scope.cancelled_caught
    assert (work.started, work.finished) == (1, 1)
    # A spinning wait would use nearly all of the 0.15 s.
    assert used < 0.05


async def iterations_while(waiting: Awaitable[Any], seconds: float) -> int:
    """Return how often the loop polled for events during a wait."""
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


def test_a_wait_in_a_cancelled_scope_takes_few_iterations() -> None:
    """On the stock loop, cancelled natively and by anyio."""

    async def main() -> int:
        work = Work()

        async def scoped() -> None:
            with anyio.CancelScope() as scope:
                scope.cancel()
                await run_shielded(work)

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
async def test_work_cancelled_by_a_closing_loop_is_started_again(times: int) -> None:
    """`asyncio.run` cancels all tasks at its end, the shielded one included."""
    work = Work()
    task = asyncio.create_task(run_shielded(work))
    await work.began.wait()
    for round_number in range(1, times + 1):
        work.began.clear()
        for other in asyncio.all_tasks() - {asyncio.current_task()}:
            other.cancel()
        await work.began.wait()
        assert work.started == round_number + 1
        assert not task.done()
    work.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (work.started, work.finished) == (times + 1, 1)


def test_a_failed_main_coroutine_waits_for_shielded_work() -> None:
    """`asyncio.run` cancels the task that waits for it."""
    done: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.02)
        done.append("done")

    async def main() -> None:
        task = asyncio.create_task(run_shielded(work))
        await steps()
        assert not task.done()
        raise KeyError("main is over")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert done == ["done"]


async def test_wait_shielded_neither_cancels_nor_reads_the_future() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(wait_shielded(future))
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


async def test_wait_shielded_returns_for_a_done_future() -> None:
    """Also if it has failed."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_exception(KeyError("x"))
    await wait_shielded(future)
    assert isinstance(future.exception(), KeyError)


async def test_create_task_sets_the_name() -> None:
    task = create_task(asyncio.sleep(0, "x"), name="the name")
    assert task.get_name() == "the name"
    assert await task == "x"


async def test_when_all_done_waits_for_the_last() -> None:
    """Of a success, a failure and a cancellation."""
    loop = asyncio.get_running_loop()
    first, second, third = loop.create_future(), loop.create_future(), loop.create_future()
    done = when_all_done([first, second, third])
    first.set_result(1)
    second.set_exception(KeyError("x"))
    await steps()
    assert not done.done()
    third.cancel()
    async with asyncio.timeout(GUARD):
        await done
    assert isinstance(second.exception(), KeyError)


async def test_when_all_done_without_futures_and_with_done_ones() -> None:
    assert when_all_done([]).done()
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    async with asyncio.timeout(GUARD):
        await when_all_done([future, future])


async def test_cancelling_when_all_done_leaves_the_futures() -> None:
    future = asyncio.get_running_loop().create_future()
    done = when_all_done([future])
    done.cancel()
    future.set_result("x")
    await steps()
    assert future.result() == "x"


@pytest.mark.virtual_clock
async def test_the_clock_sleeps() -> None:
    clock = PausableClock()
    began = clock.now()
    await clock.sleep(3600)
    assert clock.now() - began == pytest.approx(3600, abs=1)


@pytest.mark.virtual_clock
async def test_skipped_time_does_not_count() -> None:
    """During a sleep."""
    clock = PausableClock()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(10, clock.skip, 1000)
    await clock.sleep(60)
    assert loop.time() - began == pytest.approx(1060, abs=1)
    assert clock.now() - began == pytest.approx(60, abs=1)


@pytest.mark.virtual_clock
async def test_skipped_times_add_up() -> None:
    clock = PausableClock()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(1, clock.skip, 100)
    loop.call_later(105, clock.skip, 100)
    await clock.sleep(10)
    assert loop.time() - began == pytest.approx(210, abs=1)


def freeze(seconds: float) -> None:
    """Let time pass in which no event loop runs."""
    loop: Any = asyncio.get_running_loop()
    loop._jumper.skipped += seconds


@pytest.mark.virtual_clock
@pytest.mark.parametrize("asks", [True, False])
async def test_time_in_which_this_process_did_not_run_does_not_count(asks: bool) -> None:
    """Neither for the waiter nor for a message that is read first."""
    clock, loop = PausableClock(), asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(40, clock.now)

    def thaw() -> None:
        freeze(1000)
        if asks:
            assert clock.now() - began == pytest.approx(40, abs=0.1)
            assert clock.now() - began == pytest.approx(40, abs=0.1)  # once for all waiters

    loop.call_later(50, thaw)
    other = asyncio.ensure_future(clock.sleep(70))
    await clock.sleep(60)
    assert loop.time() - began == pytest.approx(1070, abs=0.1)
    assert not other.done()
    await other
    assert loop.time() - began == pytest.approx(1080, abs=0.1)


@pytest.mark.virtual_clock
async def test_a_freeze_is_noticed_by_what_is_awaited_meanwhile() -> None:
    """A future is done first, and what counts on the same clock goes on from there."""
    clock, loop = PausableClock(), asyncio.get_running_loop()
    began, future = clock.now(), loop.create_future()

    def thaw() -> None:
        freeze(1000)
        future.set_result(None)

    loop.call_later(5, thaw)
    assert await clock.wait_for(future, seconds=60)
    assert clock.now() - began < 10


@pytest.mark.virtual_clock
async def test_time_in_which_the_loop_was_a_little_late_counts() -> None:
    clock, loop = PausableClock(), asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(50, freeze, 10.4)
    await clock.sleep(60)
    assert loop.time() - began == pytest.approx(60.4, abs=0.05)
    assert clock.now() - began == pytest.approx(60.4, abs=0.05)


@pytest.mark.virtual_clock
async def test_an_alarm_calls_at_the_time_that_was_set_last() -> None:
    clock, loop = PausableClock(), asyncio.get_running_loop()
    began, calls = clock.now(), []
    alarm = Alarm(clock, lambda: calls.append(round(clock.now() - began)))
    for at in (5, 10, None, 20, 15):
        alarm.set(None if at is None else began + at)
    await asyncio.sleep(30)
    assert (calls, alarm.at) == ([15], None)
    alarm.set(began + 90)
    loop.call_later(10, freeze, 1000)
    await asyncio.sleep(1000)
    assert calls == [15, 30]  # early: the time since the last look is left out
    alarm.set(began)
    await asyncio.sleep(1)
    assert calls == [15, 30, 30]
    assert clock.awaited == []


@pytest.mark.virtual_clock
async def test_wait_for_returns_whether_a_future_is_done() -> None:
    clock = PausableClock()
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
async def test_a_sleep_can_be_cancelled() -> None:
    clock = PausableClock()
    began = clock.now()
    task = asyncio.create_task(clock.sleep(1000))
    await steps()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.now() - began < 1


async def test_cancel_and_wait_waits_for_cleanup() -> None:
    """A waiting task, one with a finally block, and one that has failed."""
    ended = []

    async def clean_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("clean")

    async def fail() -> None:
        raise ValueError("never retrieved")

    tasks = [create_task(asyncio.sleep(60)), create_task(clean_up()), create_task(fail())]
    await asyncio.sleep(0)
    await cancel_and_wait(tasks)
    assert [task.cancelled() for task in tasks] == [True, True, False]
    assert ended == ["clean"]


@pytest.mark.parametrize("daemon", [False, True])
async def test_a_function_runs_in_a_thread_that_ends(daemon: bool) -> None:
    before = threading.active_count()

    def function(base: int, number: int) -> tuple[int, bool, bool]:
        thread = threading.current_thread()
        return base + number, thread is threading.main_thread(), thread.daemon

    assert await run_in_thread(function, 2, 1, daemon=daemon) == (3, False, daemon)
    assert threading.active_count() == before


async def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await run_in_thread(int, "x")
    with pytest.raises(RuntimeError, match=r"the call raised StopIteration") as caught:
        await run_in_thread(next, iter(()))
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_a_cancelled_call_leaves_its_thread_running() -> None:
    started, release, ended = threading.Event(), threading.Event(), threading.Event()

    def function() -> None:
        started.set()
        release.wait(GUARD)
        ended.set()

    task = asyncio.create_task(run_in_thread(function))
    while not started.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    release.set()
    assert ended.wait(GUARD)


async def test_without_threads_a_call_and_a_read_happen_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's limit of threads is reached (pthread_create(3): EAGAIN)."""
    (tmp_path / "file").write_bytes(b"0123456789")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await run_in_thread(threading.current_thread) is threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        await run_in_thread(lambda: 1 // 0)
    assert await read_file(str(tmp_path / "file")) == b"0123456789"


async def test_a_file_is_read(tmp_path: Path) -> None:
    before = threading.active_count()
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert await read_file(str(path)) == b"0123456789"
    assert threading.active_count() == before
    with pytest.raises(FileNotFoundError):
        await read_file(str(tmp_path / "missing"))


async def test_what_the_page_cache_has_is_read_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk would have to be asked, and on a file system that cannot say, nothing is read."""
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    read = os.preadv
    error: int | None = None

    def preadv(descriptor: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        if error is not None:
            raise OSError(error, "not now")
        return read(descriptor, buffers, offset, 0 if flags == os.RWF_NOWAIT else -1)

    monkeypatch.setattr(os, "preadv", preadv)
    with path.open("rb") as file:
        assert read_cached(file.fileno(), 2, 4) == b"2345"
        assert read_cached(file.fileno(), 8, 100) == b"89"
        assert read_cached(file.fileno(), 10, 100) == b""
        assert read_cached(file.fileno(), 0, 0) == b""
        error = errno.EAGAIN
        assert read_cached(file.fileno(), 2, 4) is None
        error = errno.EOPNOTSUPP
        assert read_cached(file.fileno(), 2, 4) is None
        error = errno.EIO
        with pytest.raises(OSError, match="not now"):
            read_cached(file.fileno(), 2, 4)


async def test_a_notification_wakes_all_waiters() -> None:
    """A notification is not remembered: a later waiter waits for the next one."""
    notifier = Notifier()
    waiters = [asyncio.create_task(notifier.wait()) for _ in range(3)]
    await steps()
    notifier.notify_all()
    notifier.notify_all()
    late = asyncio.create_task(notifier.wait())
    async with asyncio.timeout(GUARD):
        assert await asyncio.gather(*waiters) == [True] * 3
    await steps()
    assert not late.done()
    notifier.notify_all()
    assert await late


async def test_a_cancelled_waiter_is_forgotten() -> None:
    notifier = Notifier()
    first, second = asyncio.create_task(notifier.wait()), asyncio.create_task(notifier.wait())
    await steps()
    first.cancel()
    notifier.notify_all()
    assert await second
    with pytest.raises(asyncio.CancelledError):
        await first


@pytest.mark.virtual_clock
async def test_a_wait_for_a_notification_can_time_out() -> None:
    notifier = Notifier()
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert not await notifier.wait(timeout=5)
    assert loop.time() - began == pytest.approx(5, abs=0.5)
    loop.call_later(5, notifier.notify_all)
    assert await notifier.wait(timeout=10)
    assert loop.time() - began == pytest.approx(10, abs=1)


async def test_a_result_is_set_once() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    set_result_if_pending(future, 1)
    set_result_if_pending(future, 2)
    assert await future == 1
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    set_result_if_pending(future, 3)
    assert future.cancelled()


# -------------------------------------------------------------- one writer, many readers


def gap(count: int, following: int) -> str:
    return f"gap of {count} before {following}"


def history(keep: int = 100) -> EventHistory[str]:
    return EventHistory(keep, gap)


async def all_of(reader: EventReader[str]) -> list[str]:
    async with asyncio.timeout(GUARD):
        return [item async for item in reader]


async def step() -> None:
    """Let every task that is ready run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_every_reader_gets_all_items_in_order() -> None:
    """Readers that start before, during and after the writing."""
    stream = history()
    early = asyncio.create_task(all_of(stream.read()))
    await step()
    stream.append("a")
    await step()
    middle = asyncio.create_task(all_of(stream.read()))
    await step()
    stream.append("b")
    stream.append("c")
    stream.close()
    assert await early == ["a", "b", "c"]
    assert await middle == ["a", "b", "c"]
    assert await all_of(stream.read()) == ["a", "b", "c"]


async def test_a_reader_can_start_at_a_position() -> None:
    """Also beyond the end: it waits for its item."""
    stream = history()
    stream.append("a")
    stream.append("b")
    assert stream.count == 2
    ahead = asyncio.create_task(all_of(stream.read(3)))
    await step()
    stream.append("c")
    await step()
    assert not ahead.done()
    stream.append("d")
    stream.close()
    assert await ahead == ["d"]
    assert await all_of(stream.read(1)) == ["b", "c", "d"]
    assert await all_of(stream.read(4)) == []
    assert await all_of(stream.read(99)) == []


async def test_a_reader_knows_that_nothing_follows() -> None:
    """Only once the stream is closed, and it has the last item; or it was closed itself."""
    stream = history()
    stream.append("a")
    reader, ahead, closed = stream.read(), stream.read(1), stream.read()
    assert [one.is_over for one in (reader, ahead)] == [False, False]
    stream.close()
    assert [one.is_over for one in (reader, ahead)] == [False, True]
    assert await all_of(reader) == ["a"]
    assert reader.is_over
    await closed.aclose()
    assert closed.is_over


async def test_a_slow_reader_gets_one_gap() -> None:
    stream = history(keep=3)
    reader = stream.read()
    stream.append("0")
    assert await anext(reader) == "0"
    for number in range(1, 11):
        stream.append(str(number))
    stream.close()
    assert await all_of(reader) == ["gap of 7 before 8", "8", "9", "10"]


async def test_a_late_reader_gets_a_gap() -> None:
    stream = history(keep=1)
    stream.append("a")
    stream.append("b")
    stream.append("last")
    stream.close()
    assert await all_of(stream.read()) == ["gap of 2 before 2", "last"]
    assert await all_of(stream.read(2)) == ["last"]


async def test_a_reader_keep_items_behind_gets_no_gap() -> None:
    stream = history(keep=2)
    reader = stream.read()
    stream.append("a")
    stream.append("b")
    stream.close()
    assert await all_of(reader) == ["a", "b"]


async def test_cancelling_a_wait_loses_nothing() -> None:
    """Cancelled while it waits, and as an item arrives."""
    stream = history()
    reader = stream.read()
    waiting = asyncio.ensure_future(anext(reader))
    await step()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    stream.append("a")
    assert await anext(reader) == "a"
    raced = asyncio.ensure_future(anext(reader))
    await step()
    stream.append("b")
    raced.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        assert await raced == "never"
    stream.close()
    assert await all_of(reader) == ["b"]


async def test_a_timeout_around_a_read_loses_nothing() -> None:
    stream = history()
    reader = stream.read()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await anext(reader)
    stream.append("a")
    stream.close()
    assert await all_of(reader) == ["a"]


async def test_a_reader_goes_on_after_a_break() -> None:
    stream = history()
    for item in "abc":
        stream.append(item)
    stream.close()
    reader = stream.read()
    async for item in reader:
        if item == "a":
            break
    assert await all_of(reader) == ["b", "c"]


async def test_a_closed_reader_ends() -> None:
    """While the stream goes on."""
    stream = history()
    stream.append("a")
    reader = stream.read()
    await reader.aclose()
    assert await all_of(reader) == []
    assert await first_of(stream) == "a"


async def first_of(stream: EventHistory[str]) -> str:
    return await anext(stream.read())


async def test_closing_an_empty_stream_ends_its_readers() -> None:
    stream = history()
    waiting = asyncio.create_task(all_of(stream.read()))
    await step()
    stream.close()
    assert await waiting == []


async def test_a_finished_reader_stays_finished() -> None:
    stream = history()
    stream.append("a")
    stream.close()
    reader = stream.read()
    assert await all_of(reader) == ["a"]
    assert await all_of(reader) == []


async def test_cancelled_waits_leave_no_waiter() -> None:
    stream = history()
    for _ in range(1000):
        waiting = asyncio.ensure_future(anext(stream.read()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert not stream.changed._waiters


def test_the_repr_has_the_state() -> None:
    stream = history(keep=2)
    assert repr(stream) == "<EventHistory open after 0 items, 0 kept>"
    for item in "abc":
        stream.append(item)
    stream.close()
    assert repr(stream) == "<EventHistory closed after 3 items, 2 kept>"


@given(
    keep=st.integers(1, 5),
    moves=st.lists(st.sampled_from(["write", "read 0", "read 1"]), max_size=40),
)
def test_reads_and_writes_in_any_order(keep: int, moves: list[str]) -> None:
    """Items and gaps of every reader add up to the whole stream, in order."""

    async def play() -> None:
        stream: EventHistory[tuple[int, int]] = EventHistory(keep, lambda count, at: (-count, at))
        readers = [stream.read(), stream.read()]
        got: list[list[tuple[int, int]]] = [[], []]
        for move in moves:
            if move == "write":
                stream.append((1, stream.count))
            else:
                which = int(move[-1])
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0):
                        got[which].append(await anext(readers[which]))
        stream.append((1, stream.count))
        stream.close()
        for reader, items in zip(readers, got, strict=True):
            items += [item async for item in reader]
            position = 0
            for count, at in items:
                if count == 1:
                    assert at == position
                    position += 1
                else:
                    position += -count
                    assert at == position
            assert position == stream.count
            assert items[-1] == (1, stream.count - 1)

    asyncio.run(play())


@pytest.mark.parametrize("fork", [os.fork, ctypes.PyDLL(None).fork], ids=["os", "libc"])
def test_a_guard_knows_a_fork(fork: Callable[[], int]) -> None:
    guard = ForkGuard()
    pid = fork()
    if not pid:
        os._exit(3 if guard.is_copy else 4)
    assert not guard.is_copy
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
