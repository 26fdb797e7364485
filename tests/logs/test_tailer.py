"""LogTailer copies one growing file by whole lines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic_aio.logs.console import Sink, SinkLost
from elastic_aio.logs.log_file import LogFile
from elastic_aio.logs.tee import LogTailer, StreamView
from tests.support.memory import peak_growth

pytestmark = pytest.mark.both_loops

GUARD = 20.0


class Bench:
    """A log file, its tailer, and the output so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = b""
        self.is_blocked = False
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # The sink polls this descriptor: the write end of a pipe, which may be full.
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK)
        self.sink = Sink("stdout", os.dup(self._writer), self._write)
        self.lost: list[tuple[str, int | None]] = []
        view = StreamView(self.sink, lambda: b"P:", lambda *loss: self.lost.append(loss))
        self.tailer = LogTailer(LogFile(os.open(str(path), os.O_RDONLY)), view)

    def _write(self, data: bytes | memoryview) -> int:
        if self.is_blocked:
            self._fill()
            raise BlockingIOError
        self.shown += bytes(data)
        return len(data)

    def _fill(self) -> None:
        try:
            while True:
                os.write(self._writer, b"x" * 65536)
        except BlockingIOError:
            return

    def unblock(self) -> None:
        self.is_blocked = False
        try:
            while True:
                os.read(self._reader, 65536)
        except BlockingIOError:
            return

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self.file, view) :]

    async def copy_all(self) -> None:
        async with asyncio.timeout(GUARD):
            while await self.tailer.copy():
                pass

    def close(self) -> None:
        self.tailer.close()
        self.sink.close()
        for descriptor in (self.file, self._reader, self._writer):
            os.close(descriptor)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench(tmp_path / "stdout.log")
    yield bench
    bench.close()


async def test_only_whole_lines_are_shown(bench: Bench) -> None:
    bench.append(b"one\ntwo\nthr")
    await bench.copy_all()
    assert bench.shown == b"P:one\nP:two\n"
    bench.append(b"ee\n")
    await bench.copy_all()
    assert bench.shown == b"P:one\nP:two\nP:three\n"
    assert not bench.tailer.finished.done()


async def test_a_last_line_without_newline_is_shown(bench: Bench) -> None:
    """At the end of the file, which is closed then."""
    bench.append(b"one\nlast")
    bench.tailer.is_ending = True
    await bench.copy_all()
    assert bench.shown == b"P:one\nP:last\n"
    assert bench.tailer.finished.done()
    assert repr(bench.tailer).startswith("<LogTailer finished, ")


async def test_bytes_are_copied_as_they_are(bench: Bench) -> None:
    """NUL, invalid UTF-8 and empty lines too."""
    content = b"\0\xff\xc3\n\n\n\xe2\x82\n"
    bench.append(content)
    await bench.copy_all()
    assert bench.shown == b"".join(b"P:" + line + b"\n" for line in content[:-1].split(b"\n"))


async def test_lines_across_chunks_are_whole(bench: Bench) -> None:
    lines = [b"%d %s" % (number, b"x" * (number % 97)) for number in range(30_000)]
    bench.append(b"\n".join(lines) + b"\n")
    await bench.copy_all()
    assert bench.shown == b"".join(b"P:" + line + b"\n" for line in lines)


async def test_a_truncated_file_is_read_from_its_start(bench: Bench) -> None:
    bench.append(b"before\nunfinished")
    await bench.copy_all()
    os.ftruncate(bench.file, 0)
    await bench.copy_all()
    bench.append(b"after\n")
    await bench.copy_all()
    assert bench.shown == b"P:before\nP:unfinished\nP:after\n"
    assert [count for _, count in bench.lost] == [None]


@pytest.mark.parametrize(
    "second",
    [b"line 2\n", b"line 1\n", b"x\n", b"a longer line\n", b"line 1\nline 2\n"],
    ids=["same size", "same bytes", "shorter", "longer", "longer, same beginning"],
)
async def test_a_file_that_is_written_again_is_shown_again(bench: Bench, second: bytes) -> None:
    """As by `echo text > /dev/stdout`, which truncates the file; once per text."""
    bench.append(b"line 1\n")
    await bench.copy_all()
    bench.path.write_bytes(second)
    bench.tailer.note(is_opened=True, is_written=True)
    await bench.copy_all()
    while (due := bench.tailer.due_at) is not None:
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        await bench.copy_all()
    await bench.copy_all()
    if second.startswith(b"line 1\n") and len(second) > 7:
        # Nothing distinguishes it from a file that has grown.
        assert bench.shown == b"P:line 1\nP:line 2\n"
        return
    assert bench.shown == b"P:line 1\nP:" + second
    bench.path.write_bytes(b"and again\n")
    await bench.copy_all()
    assert bench.shown == b"P:line 1\nP:" + second + b"P:and again\n"
    assert len(bench.lost) == 1


async def test_a_long_file_of_the_same_bytes_is_not_shown_again(bench: Bench) -> None:
    """The time of a log changes by `touch` too, which must not repeat megabytes."""
    bench.append(b"line\n" * 1000)
    await bench.copy_all()
    os.utime(bench.path)
    await bench.copy_all()
    assert bench.shown == b"P:line\n" * 1000
    assert not bench.lost


async def test_a_long_file_that_is_written_again(bench: Bench) -> None:
    """The offset is beyond what is compared, and the new file is longer."""
    bench.append(b"%09d\n" * 20_000 % tuple(range(20_000)))
    await bench.copy_all()
    bench.shown = b""
    bench.path.write_bytes(b"again %05d\n" * 20_000 % tuple(range(20_000)))
    await bench.copy_all()
    assert bench.shown == b"P:again %05d\n" * 20_000 % tuple(range(20_000))


async def test_a_long_line_of_a_truncated_file_is_gone(bench: Bench) -> None:
    """It was never in memory; its bytes are not taken from the new file."""
    bench.append(b"z" * (200 << 10))
    await bench.copy_all()
    bench.path.write_bytes(b"y" * (300 << 10) + b"\n")
    await bench.copy_all()
    assert bench.shown == b"P:" + b"y" * (300 << 10) + b"\n"
    assert len(bench.lost) == 1


COPY = """
import os
from elastic_aio.logs.log_file import LogFile
from elastic_aio.logs.console import Sink
from elastic_aio.logs.tee import LogTailer, StreamView
from tests.support.memory import peak_growth

async def main(path):
    out = os.open("shown", os.O_WRONLY | os.O_CREAT)
    sink = Sink("stdout", out, lambda data: os.write(out, data))
    view = StreamView(sink, lambda: b"P:", lambda *loss: None)
    tailer = LogTailer(LogFile(os.open(path, os.O_RDONLY)), view)
    while await tailer.copy():
        pass
    tailer.close()
    sink.close()
"""


def test_a_line_of_64_mib_costs_no_memory(tmp_path: Path) -> None:
    """It is copied from the file in chunks, with one prefix and one newline."""
    size = 64 << 20
    with (tmp_path / "log").open("wb") as file:
        for _ in range(64):
            file.write(b"y" * (1 << 20))
        file.write(b"\nshort\n")
    assert peak_growth(COPY, tmp_path / "log", cwd=tmp_path) < 4 << 20
    with (tmp_path / "shown").open("rb") as file:
        assert file.read(3) == b"P:y"
        assert file.seek(0, os.SEEK_END) == len(b"P:") + size + len(b"\nP:short\n")
        file.seek(-11, os.SEEK_END)
        assert file.read() == b"yy\nP:short\n"


async def test_frames_into_a_pipe_come_once_a_second(bench: Bench) -> None:
    """And the last state of a progress bar always."""
    bench.append(b"10%\r")
    await bench.copy_all()
    assert bench.shown == b"P:10%\n"
    for percent in range(11, 100):
        bench.append(b"%d%%\r" % percent)
        await bench.copy_all()
    assert bench.shown == b"P:10%\n"
    due = bench.tailer.due_at
    assert due is not None
    assert 0 < due - asyncio.get_running_loop().time() <= 1
    bench.append(b"100%\n")
    await bench.copy_all()
    assert bench.shown == b"P:10%\nP:100%\n"
    assert bench.tailer.due_at is None


async def test_a_frame_that_was_shown_is_not_repeated_as_a_line(bench: Bench) -> None:
    bench.append(b"100%\r")
    await bench.copy_all()
    bench.append(b"\nnext\n")
    await bench.copy_all()
    assert bench.shown == b"P:100%\nP:next\n"


async def test_equal_lines_after_a_frame_are_all_shown(bench: Bench) -> None:
    bench.append(b"x\r")
    await bench.copy_all()
    bench.append(b"\nx\nx\n")
    await bench.copy_all()
    assert bench.shown == b"P:x\nP:x\nP:x\n"


async def test_the_last_frame_is_shown_at_the_end(bench: Bench) -> None:
    """The file ends without a newline."""
    bench.append(b"10%\r")
    await bench.copy_all()
    bench.append(b"20%\r")
    await bench.copy_all()
    bench.tailer.is_ending = True
    await bench.copy_all()
    assert bench.shown == b"P:10%\nP:20%\n"


async def test_a_blocked_console_loses_nothing(bench: Bench) -> None:
    bench.append(b"one\n")
    await bench.copy_all()
    bench.is_blocked = True
    bench.append(b"two\nthree\n")
    task = asyncio.create_task(bench.copy_all())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    bench.unblock()
    await task
    assert bench.shown == b"P:one\nP:two\nP:three\n"


async def test_a_cancelled_copy_loses_nothing(bench: Bench) -> None:
    """Cancelled while the console is blocked; the next copy completes it.

    The line with frames and the lines after it are separate writes, so a cancellation can
    fall between them.
    """
    bench.append(b"frame\r")
    await bench.copy_all()
    bench.is_blocked = True
    bench.append(b"one\ntwo\nthree\n")
    task = asyncio.create_task(bench.copy_all())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    bench.unblock()
    bench.append(b"four\n")
    await bench.copy_all()
    assert bench.shown == b"P:frame\nP:one\nP:two\nP:three\nP:four\n"


async def test_a_cancelled_long_line_is_completed(bench: Bench) -> None:
    long = b"z" * (300 << 10)
    bench.append(long)
    await bench.copy_all()
    bench.append(b"\nnext\n")
    bench.is_blocked = True
    task = asyncio.create_task(bench.copy_all())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    bench.unblock()
    await bench.copy_all()
    assert bench.shown.replace(b"z", b"") == b"P:\nP:next\n"
    assert bench.shown.count(b"z") == len(long)


async def test_a_lost_console_is_an_error(bench: Bench) -> None:
    bench.sink.lost = "broken pipe"
    bench.append(b"one\n")
    with pytest.raises(SinkLost, match="broken pipe"):
        await bench.tailer.copy()


async def test_close_is_idempotent(bench: Bench) -> None:
    bench.tailer.close()
    bench.tailer.close()
    assert bench.tailer.finished.done()
