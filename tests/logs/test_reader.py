"""LogReader: lines of growing files, complete and in order, whatever the consumer does."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from elastic_aio import LogLine, LogReader
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.logs.streams import LoggedStream, LoggedStreams
from tests.support.children import DEADLINE_S
from tests.support.leaks import open_descriptors

pytestmark = pytest.mark.both_loops


class Bench:
    """Streams of a job whose files the test writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.streams = LoggedStreams()

    def stream(self, rank: int = 0, attempt: int = 0, name: str = "stdout") -> LoggedStream:
        path = self.directory / f"{attempt}.{rank}.{name}"
        path.touch()
        stream = LoggedStream(rank, rank, attempt, name, str(path))
        self.streams.add(stream)
        return stream

    def write(self, stream: LoggedStream, data: bytes) -> None:
        with open(stream.path, "ab", buffering=0) as file:
            file.write(data)

    def reader(self, *, follow: bool = True, since: float = 0.0) -> LogReader:
        return LogReader(self.streams, lambda stream: True, follow=follow, since=since)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """No streams yet."""
    return Bench(tmp_path)


async def test_a_file_that_cannot_be_made_yet_is_read_later(bench: Bench) -> None:
    """The disk was full, for example: each reader gets all that is written after that."""
    stream = bench.stream()
    os.unlink(stream.path)
    tries = 0

    def make() -> bool:
        nonlocal tries
        tries += 1
        if tries > 3:
            Path(stream.path).touch()
        return tries > 3

    stream.make = make
    async with bench.reader() as first, asyncio.timeout(DEADLINE_S):
        taking = asyncio.create_task(take(first, 1))
        while tries <= 3:
            await asyncio.sleep(0.001)
        bench.write(stream, b"one\n")
        assert await taking == [b"one\n"]
        async with bench.reader() as second:
            assert await take(second, 1) == [b"one\n"]
    assert not stream.is_complete


async def take(reader: LogReader, number: int) -> list[bytes]:
    async with asyncio.timeout(DEADLINE_S):
        return [(await anext(reader)).raw for _ in range(number)]


async def rest(reader: LogReader) -> list[LogLine]:
    async with asyncio.timeout(DEADLINE_S):
        return [line async for line in reader]


async def test_lines_come_while_they_are_written(bench: Bench) -> None:
    """Whole ones; the last one without a newline at the end only."""
    async with bench.reader() as reader:
        one = bench.stream(1)
        bench.write(one, b"a\nb\nc")
        assert await take(reader, 2) == [b"a\n", b"b\n"]
        bench.write(one, b"d\n")
        assert await take(reader, 1) == [b"cd\n"]
        two = bench.stream(2, name="stderr")
        bench.write(two, b"x\r y\r\n")
        (line,) = [await anext(reader)]
        assert (line.rank, line.stream, line.attempt) == (2, "stderr", 0)
        assert (line.raw, line.text, line.missed) == (b"x\r y\r\n", " y", 0)
        bench.write(one, b"end")
        bench.streams.complete(0)
        later = bench.stream(1, attempt=1)
        assert await take(reader, 1) == [b"end"]
        bench.write(later, b"new\n")
        assert await take(reader, 1) == [b"new\n"]
        bench.streams.close()
        assert await rest(reader) == []


@pytest.mark.slow
async def test_nothing_is_lost_in_any_order(bench: Bench) -> None:
    """Random writes, cancelled calls and readers that come later."""
    chance = random.Random(7)
    streams = [bench.stream(rank) for rank in range(3)]
    written: dict[int, bytes] = dict.fromkeys(range(3), b"")
    early = bench.reader()
    got: list[LogLine] = []

    async def consume() -> None:
        while True:
            try:
                async with asyncio.timeout(chance.random() / 500):
                    got.append(await anext(early))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return

    consumer = asyncio.create_task(consume())
    for _ in range(300):
        stream = chance.choice(streams)
        data = bytes(chance.choices(b"ab\r\n", k=chance.choice([1, 9, 3000])))
        bench.write(stream, data)
        written[stream.rank] += data
        await asyncio.sleep(0)
    bench.streams.close()
    async with asyncio.timeout(DEADLINE_S):
        await consumer
    late = await rest(bench.reader(follow=False))
    for lines in (got, late):
        for rank, data in written.items():
            assert b"".join(line.raw for line in lines if line.rank == rank) == data


async def test_without_follow_it_ends_with_what_is_there(bench: Bench) -> None:
    bench.write(bench.stream(0), b"a\nb")
    lines = await rest(bench.reader(follow=False))
    assert [line.raw for line in lines] == [b"a\n", b"b"]


async def test_a_long_line_comes_in_pieces(bench: Bench) -> None:
    """Memory is bounded."""
    stream = bench.stream()
    bench.write(stream, b"x" * 2_000_000 + b"\nshort\n")
    bench.streams.close()
    lines = await rest(bench.reader())
    assert max(len(line.raw) for line in lines) <= 640 * 1024
    assert b"".join(line.raw for line in lines[:-1]) == b"x" * 2_000_000 + b"\n"
    assert lines[-1].raw == b"short\n"


async def test_lines_by_the_batch(bench: Bench) -> None:
    """Those of one read; a cancelled call loses none."""
    stream = bench.stream()
    stream.begin = 2
    bench.write(stream, b"a\nb\nc\n")
    async with bench.reader() as reader:
        assert [line.raw for line in await reader.batch()] == [b"b\n", b"c\n"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await reader.batch()
        bench.write(stream, b"d\ne")
        assert [line.raw for line in await reader.batch()] == [b"d\n"]
        bench.streams.close()
        assert [line.raw for line in await reader.batch()] == [b"e"]
        assert await reader.batch() == []


@pytest.mark.slow
async def test_a_slow_consumer_costs_no_memory(bench: Bench) -> None:
    """What it has not asked for stays in the file."""
    stream = bench.stream()
    async with bench.reader() as reader:
        for number in range(200):
            bench.write(stream, b"%06d\n" % number * 2000)
            if number == 0:
                await take(reader, 1)
        assert len(reader._lines) < 100_000
        bench.streams.close()
        assert len(await rest(reader)) == 399_999


@pytest.mark.slow
async def test_what_was_removed_is_counted(bench: Bench) -> None:
    """A hole in the file, as rotation makes it: the next line says how much is missing."""
    stream = bench.stream()
    lines = b"".join(b"%06d\n" % number for number in range(100_000))
    bench.write(stream, lines)
    os.truncate(stream.path, len(lines))
    with open(stream.path, "r+b") as file:
        file.truncate(0)
        file.seek(8192)
        file.write(lines[8192:])
    bench.streams.close()
    first, *others = await rest(bench.reader())
    assert first.missed == 8192 + 5  # the rest of a line too
    assert first.raw == b"001171\n"
    assert {line.missed for line in others} == {0}
    assert len(others) == 100_000 - 1172


async def test_a_page_that_is_not_cached_is_read_in_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache has parts of a file: what is read ends where the disk has to be asked."""
    stream = bench.stream()
    content = b"".join(b"%06d\n" % number for number in range(30_000))
    bench.write(stream, content)
    reader = bench.reader()
    bench.streams.close()
    read = os.preadv
    calls = 0

    def preadv(descriptor: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise BlockingIOError(errno.EAGAIN, "not cached")
        return read(descriptor, [memoryview(buffers[0])[:4096]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert b"".join(line.raw for line in await rest(reader)) == content
    assert calls >= 3


async def test_a_reader_beside_a_job_starts_no_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may begin to run late on a busy host; the page cache has what was just written."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a thread was started")

    async with bench.reader() as reader:
        stream = bench.stream()
        bench.write(stream, b"x")
        with open(stream.path, "rb") as file:
            try:
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
            except OSError:
                pytest.skip("this file system cannot say what is cached")
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for number in range(3):
            bench.write(stream, b"%d\n" % number)
            await take(reader, 1)


async def test_a_truncated_file_begins_anew(bench: Bench) -> None:
    stream = bench.stream()
    async with bench.reader() as reader:
        bench.write(stream, b"a long line\n")
        await take(reader, 1)
        os.truncate(stream.path, 0)
        bench.write(stream, b"b\n")
        line = await anext(reader)
        assert (line.raw, line.missed) == (b"b\n", None)


async def test_a_file_that_is_gone(bench: Bench) -> None:
    """One that a reader has open is read to its end; of another one its size is known at best."""
    stream = bench.stream()
    bench.write(stream, b"a\nb\n")
    stream.times.note(4, 1.0)
    reader = bench.reader()
    os.unlink(stream.path)
    bench.streams.close()
    assert [line.raw for line in await rest(reader)] == [b"a\n", b"b\n"]
    (line,) = await rest(bench.reader())
    assert (line.raw, line.missed) == (b"", 4)


async def test_times_and_since(bench: Bench) -> None:
    """The time at which a line was seen; else that of the last change of the file."""
    stream = bench.stream()
    bench.write(stream, b"a\nb\nc\n")
    os.utime(stream.path, (50.0, 50.0))
    stream.times.note(2, 10.0)
    stream.times.note(4, 20.0)
    bench.streams.close()
    assert [line.time for line in await rest(bench.reader())] == [10.0, 20.0, 50.0]
    assert [line.raw for line in await rest(bench.reader(since=20.0))] == [b"b\n", b"c\n"]


async def test_a_reader_that_waits_is_not_woken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By inotify; where the kernel refuses that, it polls, and loses nothing."""
    stream = bench.stream()
    for refuses in (False, True):
        if refuses:
            monkeypatch.setattr(InotifyWatcher, "_subscribe", _poll)
        async with bench.reader() as reader:
            await take(reader, int(refuses))
            waiting = asyncio.ensure_future(anext(reader))
            while not reader._waiting:
                await asyncio.sleep(0.001)
            calls = 0
            original = reader._fill

            async def fill(original: Any = original) -> bool:
                nonlocal calls
                calls += 1
                result: bool = await original()
                return result

            monkeypatch.setattr(reader, "_fill", fill)
            bench.write(stream, b"x\n")
            async with asyncio.timeout(DEADLINE_S):
                assert (await waiting).raw == b"x\n"
            assert calls <= 3


def _poll(watcher: InotifyWatcher, token: int) -> None:
    watcher._polled.add(token)
    watcher._poll_later()


async def test_a_reader_that_is_left_closes_its_files(bench: Bench) -> None:
    stream = bench.stream()
    bench.write(stream, b"a\nb\n")
    async with bench.reader() as reader:
        async for line in reader:
            assert line.raw == b"a\n"
            break
    assert not [path for path in open_descriptors().values() if path == stream.path]
    assert await rest(reader) == []
    assert not bench.streams.on_change


def test_the_oldest_attempts_are_forgotten(bench: Bench) -> None:
    for attempt in range(150):
        bench.stream(attempt=attempt)
    assert next(stream.attempt for stream in bench.streams) == 50
