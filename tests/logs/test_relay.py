"""Relay: streams that pass through this process, and full disks."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio.logs import relay as relay_module
from elastic_aio.logs.console import Sink, open_sink
from elastic_aio.logs.log_file import CHUNK
from elastic_aio.logs.relay import Relay
from elastic_aio.logs.tee import StreamView, Tee

pytestmark = pytest.mark.both_loops

GUARD = 30.0


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make every write beyond `size` fail: a full disk for which no right is needed."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Bench:
    """A tee, a console that is a pipe, and one relayed stream."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log"
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.sink = open_sink("stdout", self.writer)
        self.lost_sinks: list[Sink] = []
        self.tee = Tee(lambda sink, why: self.lost_sinks.append(sink))
        self.shown = b""
        self.closed: list[Relay] = []
        self.relay: Relay
        self.token = -1
        self.failures = 0  # of the next attempts to make the file

    def start(
        self,
        *,
        is_shown: bool = True,
        is_muted: bool = False,
        error: OSError | None = None,
        makes_file: bool = True,
        failures: int = 0,
    ) -> int:
        """Relay a stream; return the worker's end of the pipe."""
        self.failures = failures
        self.relay = Relay(self._make_file)
        if makes_file and error is None:
            self.relay.make_file()
        self.relay.error = error
        self.relay.on_closed = lambda: self.closed.append(self.relay)
        self.token = self.tee.follow_relay(
            self.relay,
            None if is_muted else StreamView(self.sink, lambda: b"P:", lambda *loss: None),
            is_shown=is_shown,
        )
        return self.relay.writer

    def _make_file(self) -> int:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "no descriptor")
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes, *, is_last: bool = True) -> threading.Thread:
        """Write as a worker does, by writes that block; close the pipe after the last one."""

        def write() -> None:
            view = memoryview(data)
            while view:
                view = view[os.write(self.relay.writer, view) :]
            if is_last:
                os.close(self.relay.writer)

        thread = threading.Thread(target=write)
        thread.start()
        return thread

    async def written(self, thread: threading.Thread) -> None:
        async with asyncio.timeout(GUARD):
            while thread.is_alive():
                await asyncio.sleep(0.002)
        thread.join()

    def read_console(self) -> None:
        """Read what the console has, as soon as it has some."""

        def read() -> None:
            self.shown += os.read(self.reader, 1 << 20)

        asyncio.get_running_loop().add_reader(self.reader, read)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(GUARD):
            while not condition():
                await asyncio.sleep(0.002)

    async def finish(self) -> None:
        """End the stream and show the rest of it."""
        self.tee.finish([self.token])
        async with asyncio.timeout(GUARD):
            assert await self.tee.drain(GUARD) == {}
        await self.until(lambda: self.closed)
        await self.until(lambda: len(self.shown) >= self.sink.written or self.sink.lost)

    async def aclose(self) -> None:
        await self.tee.aclose()
        self.sink.close()
        os.close(self.writer)
        if self.reader >= 0:
            asyncio.get_running_loop().remove_reader(self.reader)
            os.close(self.reader)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench(tmp_path)
    yield bench
    await bench.aclose()


def numbered(count: int) -> bytes:
    return b"".join(b"%07d\n" % number for number in range(count))


def with_prefix(lines: bytes) -> bytes:
    return b"".join(b"P:" + line for line in lines.splitlines(keepends=True))


async def test_a_stream_is_in_its_file_and_on_the_console(bench: Bench) -> None:
    lines = numbered(40_000)
    bench.start()
    bench.read_console()
    await bench.written(bench.write(lines))
    await bench.finish()
    assert bench.path.read_bytes() == lines
    assert bench.shown == with_prefix(lines)
    assert (bench.relay.unkept, bench.relay.lost) == (0, 0)
    assert repr(bench.relay) == "<Relay to its file, finished>"


async def test_a_read_that_ends_within_a_line_says_so(bench: Bench) -> None:
    """Others write to the console too, so that the rest of the line must not come later."""
    lines = b"a line\n" * 20_000
    writer = bench.start(is_shown=False)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1 << 20)
    seen: list[tuple[bytes, bool]] = []
    done = asyncio.Event()

    def look() -> None:
        content = bench.path.read_bytes()
        seen.append((content[-1:], bench.relay.is_behind))
        if content == lines:
            done.set()

    bench.relay.on_data = look
    assert CHUNK < len(lines) == os.write(writer, lines)
    async with asyncio.timeout(GUARD):
        await done.wait()
    assert [is_behind for _, is_behind in seen] == [True, True, False]
    assert seen[-1][0] == b"\n" != seen[0][0]
    os.close(writer)


async def test_a_line_is_shown_when_it_is_written(bench: Bench) -> None:
    writer = bench.start()
    bench.read_console()
    for number in range(60):  # more than wake it at once
        os.write(writer, b"%d\n" % number)
        await bench.until(lambda: bench.shown.endswith(b"P:%d\n" % number))  # noqa: B023
    os.write(writer, b"last")
    os.close(writer)
    await bench.finish()
    assert bench.shown.endswith(b"P:59\nP:last\n")


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 5003, 70_000, 200_001])
async def test_the_console_shows_what_a_full_disk_does_not_take(bench: Bench, size: int) -> None:
    """No line is lost, split or shown twice where the file ends."""
    lines = numbered(40_000)
    bench.start()
    bench.read_console()
    with files_of_at_most(size):
        await bench.written(bench.write(lines))
        await bench.finish()
    assert bench.path.read_bytes() == lines[:size]
    assert bench.shown == with_prefix(lines)
    assert (bench.relay.unkept, bench.relay.lost) == (len(lines) - size, 0)


async def test_a_long_line_across_the_end_of_the_file(bench: Bench) -> None:
    line = b"x" * 300_000 + b"\n"
    bench.start()
    bench.read_console()
    with files_of_at_most(100_000):
        await bench.written(bench.write(b"a\n" + line + b"b\n"))
        await bench.finish()
    assert bench.shown == b"P:a\nP:" + line + b"P:b\n"


async def test_a_file_that_could_not_be_made(bench: Bench) -> None:
    bench.start(error=OSError(errno.ENOSPC, "no space"))
    bench.read_console()
    await bench.written(bench.write(b"one\ntwo"))
    await bench.finish()
    assert bench.shown == b"P:one\nP:two\n"
    assert bench.relay.unkept == 7


async def test_a_redirected_stream_is_shown_from_the_end_of_its_file(bench: Bench) -> None:
    bench.start(is_shown=False)
    bench.read_console()
    with files_of_at_most(16):
        await bench.written(bench.write(numbered(5)))
        await bench.finish()
    assert bench.shown == b"P:0000002\nP:0000003\nP:0000004\n"


async def test_a_redirected_stream_is_not_shown(bench: Bench) -> None:
    bench.start(is_shown=False)
    await bench.written(bench.write(numbered(5)))
    await bench.finish()
    assert bench.path.read_bytes() == numbered(5)
    assert bench.sink.written == 0


async def test_what_a_muted_stream_loses_is_counted(bench: Bench) -> None:
    bench.start(is_shown=False, is_muted=True)
    with files_of_at_most(16):
        await bench.written(bench.write(numbered(5)))
        await bench.finish()
    assert bench.sink.written == 0
    assert (bench.relay.unkept, bench.relay.lost) == (24, 24)


@pytest.mark.slow
async def test_a_blocked_console_and_a_full_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker waits for a while at most; what is dropped is counted, and lines stay whole."""
    monkeypatch.setattr(relay_module, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(relay_module, "_HELD_MAX", 256 << 10)
    lines, odd = numbered(400_000), b"x" * 5 + b"\n"
    bench.start()
    with files_of_at_most(10_000):
        writing = bench.write(odd + lines, is_last=False)
        await bench.written(writing)
        assert bench.relay.lost > 1_000_000
        assert len(bench.relay._held) < 512 << 10
        bench.read_console()
        await bench.until(lambda: len(bench.relay._held) < 100)
        await bench.written(bench.write(b"the end\n" + lines[:80]))
        await bench.finish()
    assert bench.shown.startswith(b"P:xxxxx\n" + with_prefix(lines[:16_000]))
    # What is left of the line at which the dropping began is ended, and so is the gap.
    assert bench.shown.endswith(b"\n" + with_prefix(lines[:80]))
    total = len(odd) + len(lines) + len(b"the end\n") + 80
    shown_lines = bench.shown.splitlines(keepends=True)
    shown_size = sum(len(line) - len(b"P:") for line in shown_lines)
    assert shown_size + bench.relay.lost == total
    assert bench.relay.unkept == total - 10_000


async def test_a_line_that_fills_the_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dropped and counted; the worker does not wait, and later lines are shown."""
    monkeypatch.setattr(relay_module, "_HELD_MAX", 128 << 10)
    bench.start()
    bench.read_console()
    with files_of_at_most(10):
        await bench.written(bench.write(b"x" * 1_000_000 + b"\nlast\n"))
        await bench.finish()
    assert bench.shown.endswith(b"P:last\n")
    assert bench.relay.lost >= 800_000


@pytest.mark.slow
async def test_a_lost_console_and_a_full_disk(bench: Bench) -> None:
    """The worker does not notice it."""
    lines = numbered(100_000)
    bench.start()
    os.close(bench.reader)
    bench.reader = -1
    with files_of_at_most(10_000):
        await bench.written(bench.write(lines))
        bench.tee.finish([bench.token])
        await bench.until(lambda: bench.closed)
    assert bench.lost_sinks == [bench.sink]
    assert bench.relay.unkept == len(lines) - 10_000
    assert bench.relay.lost > len(lines) - 300_000


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_file_that_can_be_made_later(bench: Bench, *, at_the_end: bool) -> None:
    """The program had no descriptor left at the first byte: the file and the console get all."""
    bench.start(makes_file=False, failures=1000 if at_the_end else 3)
    bench.read_console()
    await bench.written(bench.write(b"one\ntwo\n"))
    if at_the_end:
        await bench.until(lambda: bench.failures < 1000)
        bench.failures = 0
        bench.tee.finish([bench.token])
    await bench.until(lambda: bench.shown == b"P:one\nP:two\n")
    await bench.finish()
    assert bench.path.read_bytes() == b"one\ntwo\n"


async def test_an_error_of_our_own_is_no_full_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is repeated after a pause; nothing is lost."""
    real, failures = os.write, [0]

    def fail_often(descriptor: int, data: bytes) -> int:
        if descriptor == bench.relay.file and failures[0] < 3:
            failures[0] += 1
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", fail_often)
    lines = numbered(20_000)
    bench.start()
    bench.read_console()
    await bench.written(bench.write(lines))
    await bench.finish()
    assert bench.path.read_bytes() == lines
    assert bench.shown == with_prefix(lines)
    assert failures == [3]


async def test_a_process_that_writes_on_does_not_delay_the_end(bench: Bench) -> None:
    """It could not be killed, for example: its pipe is closed."""
    writer = bench.start()
    other = os.dup(writer)
    stop = threading.Event()

    def write_on() -> None:
        try:
            while not stop.is_set():
                os.write(other, b"again\n" * 1000)
        except BrokenPipeError:
            pass

    thread = threading.Thread(target=write_on)
    thread.start()
    bench.read_console()
    await bench.until(lambda: bench.shown)
    os.close(writer)
    await bench.finish()
    await bench.written(thread)
    os.close(other)
    assert bench.path.read_bytes().startswith(b"again\n")


async def test_a_log_that_another_process_truncates_after_it_is_full(bench: Bench) -> None:
    """To free the disk: what is held is shown all the same."""
    writer = bench.start(is_shown=False)
    with files_of_at_most(16):
        os.write(writer, numbered(3))
        await bench.until(lambda: bench.relay.error)
        os.truncate(bench.path, 0)
        os.write(writer, b"later\n")
        os.close(writer)
        bench.read_console()
        await bench.finish()
    assert bench.shown == b"P:0000002\nP:later\n"
