"""Sinks of pipes, sockets, files and terminals never block the loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import pty
import resource
import socket
import struct
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.aio import set_result_if_pending
from elastic_aio.logs.console import ConsoleStreams, Sink, SinkLost, open_sink

pytestmark = pytest.mark.both_loops

GUARD = 20.0
BIG = bytes(range(256)) * 4096  # 1 MiB: more than any pipe or socket takes at once


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is closed afterwards."""
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(descriptor)


@contextlib.contextmanager
def opened(descriptor: int) -> Iterator[Sink]:
    sink = open_sink("stdout", descriptor)
    try:
        yield sink
    finally:
        sink.close()


async def write(sink: Sink, data: bytes) -> None:
    async with asyncio.timeout(GUARD), sink.lock:
        await sink.write(data)


async def read_exactly(descriptor: int, size: int) -> bytes:
    """Read from a descriptor without blocking the loop."""
    loop = asyncio.get_running_loop()
    content = b""
    async with asyncio.timeout(GUARD):
        while len(content) < size:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(descriptor, set_result_if_pending, readable, None)
            try:
                await readable
            finally:
                loop.remove_reader(descriptor)
            content += os.read(descriptor, min(65536, size - len(content)))
    return content


def is_nonblocking(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_NONBLOCK)


async def blocked(task: asyncio.Task[None], sink: Sink) -> None:
    """Wait until a write is blocked by a full pipe or socket."""
    async with asyncio.timeout(GUARD):
        while True:
            before = sink.written
            for _ in range(10):
                await asyncio.sleep(0)
            if sink.written == before and before:
                break
    assert not task.done()


async def test_a_write_waits_for_a_full_pipe(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with opened(writer) as sink:
        task = asyncio.create_task(write(sink, BIG))
        await blocked(task, sink)
        assert 0 < sink.written < len(BIG)
        assert await read_exactly(reader, len(BIG)) == BIG
        await task
        assert sink.written == len(BIG)
        assert repr(sink) == f"<Sink stdout, {len(BIG)} bytes written>"
    assert not is_nonblocking(writer)


async def test_two_descriptors_of_one_file_share_a_sink(pipe: tuple[int, int]) -> None:
    """Two sinks would write into each other's lines when the pipe is full."""
    _, writer = pipe
    duplicate = os.dup(writer)
    with opened(writer) as one, opened(duplicate) as two:
        assert one is two
    os.close(duplicate)


async def test_a_full_pipe_needs_no_further_descriptor(pipe: tuple[int, int]) -> None:
    """None may be left at the moment when the pipe is full."""
    reader, writer = pipe
    with opened(writer) as sink:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            task = asyncio.create_task(write(sink, BIG))
            await blocked(task, sink)
            assert await read_exactly(reader, len(BIG)) == BIG
            await task
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.EINTR])
async def test_an_error_of_our_own_is_no_end(pipe: tuple[int, int], number: int) -> None:
    """The write is repeated after a pause."""
    failures = [OSError(number, os.strerror(number)) for _ in range(2)]
    written = bytearray()

    def fail_first(data: bytes | memoryview) -> int:
        if failures:
            raise failures.pop()
        written.extend(data[:3])
        return len(data[:3])

    sink = Sink("stdout", os.dup(pipe[1]), fail_first)
    await write(sink, b"a line\n")
    assert (bytes(written), sink.lost) == (b"a line\n", None)
    sink.close()


async def test_a_sink_without_a_descriptor_is_an_error(pipe: tuple[int, int]) -> None:
    """Nothing of it is left open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    spare = 2  # the sink takes two descriptors: its own, and one to wait
    for free in range(spare):
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (pipe[1] + 20, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for _ in range(free):
                os.close(held.pop())
            with pytest.raises(OSError, match="Too many open files"):
                open_sink("stdout", pipe[1])
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_pipe_stays_blocking_for_other_processes(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    shared = os.dup(writer)
    with opened(writer) as sink:
        await write(sink, b"x\n")
        assert not is_nonblocking(writer)
        assert not is_nonblocking(shared)
    os.close(shared)


async def test_a_cancelled_write_is_completed_by_the_next(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with opened(writer) as sink:
        task = asyncio.create_task(write(sink, BIG))
        await blocked(task, sink)
        task.cancel()
        await asyncio.wait([task])
        assert not sink.lock.locked()
        following = asyncio.create_task(write(sink, b"next\n"))
        assert await read_exactly(reader, len(BIG) + 5) == BIG + b"next\n"
        await following


async def test_a_closed_reader_loses_the_sink(pipe: tuple[int, int]) -> None:
    """The first write fails, and so do all later ones."""
    reader, writer = pipe
    with opened(writer) as sink:
        os.close(reader)
        with pytest.raises(SinkLost, match="broken pipe"):
            await write(sink, b"x\n")
        assert sink.lost == "broken pipe"
        with pytest.raises(SinkLost, match="broken pipe"):
            await write(sink, b"y\n")
        assert repr(sink) == "<Sink stdout, lost: broken pipe>"


async def test_a_reader_that_closes_during_a_write_loses_the_sink(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    with opened(writer) as sink:
        task = asyncio.create_task(write(sink, BIG))
        await blocked(task, sink)
        os.close(reader)
        with pytest.raises(SinkLost, match="broken pipe"):
            await task


async def test_a_pipe_without_reader_is_lost_at_the_first_write(pipe: tuple[int, int]) -> None:
    """The reader was closed before the sink was opened."""
    reader, writer = pipe
    os.close(reader)
    with opened(writer) as sink, pytest.raises(SinkLost, match="broken pipe"):
        await write(sink, b"x\n")


async def test_a_file_is_written_at_its_shared_offset(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb", buffering=0) as file:
        with opened(file.fileno()) as sink:
            await write(sink, b"first\n")
            file.write(b"other\n")
            await write(sink, b"second\n")
        assert not is_nonblocking(file.fileno())
        file.write(b"still open\n")
    assert path.read_bytes() == b"first\nother\nsecond\nstill open\n"


async def test_a_full_disk_loses_the_sink() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with opened(full) as sink, pytest.raises(SinkLost, match="no space left on device"):
        await write(sink, b"x\n")
    os.close(full)


async def test_a_write_waits_for_a_full_socket() -> None:
    """And its open file description stays blocking."""
    own_end, peer = socket.socketpair()
    with own_end, peer, opened(own_end.fileno()) as sink:
        task = asyncio.create_task(write(sink, BIG))
        await blocked(task, sink)
        assert await read_exactly(peer.fileno(), len(BIG)) == BIG
        await task
        assert not is_nonblocking(own_end.fileno())
        peer.close()
        with pytest.raises(SinkLost, match=r"broken pipe|connection reset"):
            await write(sink, b"x\n")


async def test_a_closed_descriptor_is_a_lost_sink() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    sink = open_sink("stdout", writer)
    assert sink.lost == "it is closed"
    assert not sink.is_terminal
    with pytest.raises(SinkLost, match="it is closed"):
        await write(sink, b"x\n")
    sink.close()


async def test_a_closed_sink_is_lost(pipe: tuple[int, int]) -> None:
    """And the original stream is still open."""
    reader, writer = pipe
    sink = open_sink("stdout", writer)
    sink.close()
    sink.close()
    with pytest.raises(SinkLost, match="it is closed"):
        await write(sink, b"x\n")
    os.write(writer, b"still\n")
    assert os.read(reader, 100) == b"still\n"


async def test_the_console_is_descriptors_1_and_2() -> None:
    """They stay open when the console is closed."""
    console = ConsoleStreams((1, 2), (1, 2))
    out, err = console.sink("stdout"), console.sink("stderr")
    assert (out.name, err.name) == ("stdout", "stderr")
    assert (out.lost, err.lost) == (None, None)
    console.close()
    assert (out.lost, err.lost) == ("it is closed", "it is closed")
    os.fstat(1)
    os.fstat(2)


# ----------------------------------------------------------------------- terminals


def resize(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo terminal of 20 columns that passes bytes on unchanged."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] = int(attributes[1]) & ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    resize(slave, 20)
    yield master, slave
    for descriptor in (master, slave):
        with contextlib.suppress(OSError):
            os.close(descriptor)


async def test_a_frame_is_erased_by_the_next_output(terminal: tuple[int, int]) -> None:
    master, slave = terminal
    with opened(slave) as sink:
        assert sink.is_terminal
        async with sink.lock:
            await sink.show_frame(b"10%")
            await sink.show_frame(b"20%")
            await sink.write(b"done\n")
            await sink.write(b"next\n")
        erase = b"\r\x1b[K"
        shown = await read_exactly(master, sink.written)
        assert shown.replace(erase + erase, erase) == (
            erase + b"10%" + erase + b"20%" + erase + b"done\nnext\n"
        )
        assert not is_nonblocking(slave)


async def test_a_frame_never_wraps(terminal: tuple[int, int]) -> None:
    """Longer text is cut between characters."""
    master, slave = terminal
    with opened(slave) as sink:
        async with sink.lock:
            await sink.show_frame(("ä" * 100).encode())
        shown = await read_exactly(master, sink.written)
    assert shown.decode() == "\r\x1b[K" + "ä" * 19


async def test_a_terminal_of_unknown_width_shows_frames(terminal: tuple[int, int]) -> None:
    """A pseudo terminal without a size (0 columns) counts as one of 80."""
    master, slave = terminal
    resize(slave, 0)
    with opened(slave) as sink:
        async with sink.lock:
            await sink.show_frame(b"[default0]:progress 10%")
        shown = await read_exactly(master, sink.written)
    assert shown == b"\r\x1b[K[default0]:progress 10%"


async def test_a_terminal_that_hangs_up_is_a_lost_sink(terminal: tuple[int, int]) -> None:
    master, slave = terminal
    with opened(slave) as sink:
        os.close(master)
        async with sink.lock:
            with pytest.raises(SinkLost, match=r"input/output error"):
                await sink.show_frame(b"10%")
            with pytest.raises(SinkLost, match=r"input/output error"):
                await sink.write(b"x\n")
        assert sink.lost == "input/output error"
