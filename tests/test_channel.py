"""EventHistory: one writer, many readers."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.channel import EventHistory, EventReader

pytestmark = pytest.mark.both_loops

GUARD = 10.0


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
    assert not stream._changed._waiters


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
