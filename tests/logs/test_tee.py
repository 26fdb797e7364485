"""Tee and InotifyWatcher: growing files on the console, by whole lines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from elastic_aio.aio import set_result_if_pending
from elastic_aio.logs import inotify, log_file, tee
from elastic_aio.logs.console import Sink, open_sink
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.logs.log_file import CHUNK
from elastic_aio.logs.tee import StreamView, Tee
from tests.support.cli import CLI

pytestmark = pytest.mark.both_loops

GUARD = 30.0


class Console:
    """A pipe that is read only when a test asks for it."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.sink = open_sink("stdout", self.writer)
        self.content = b""

    async def until(self, wanted: Callable[[bytes], bool]) -> bytes:
        """Read until the output is as wanted; return it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(GUARD):
            while not wanted(self.content):
                readable: asyncio.Future[None] = loop.create_future()
                loop.add_reader(self.reader, set_result_if_pending, readable, None)
                try:
                    await readable
                finally:
                    loop.remove_reader(self.reader)
                self.content += os.read(self.reader, 1 << 20)
        return self.content

    async def lines(self, count: int) -> list[bytes]:
        return (await self.until(lambda text: text.count(b"\n") >= count)).split(b"\n")[:-1]

    def rest(self) -> bytes:
        """Read the rest without waiting."""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.reader, 1 << 20):
                self.content += more
        return self.content

    def close(self) -> None:
        self.sink.close()
        for descriptor in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Bench:
    """A tee, its console, and files to write to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.console = Console()
        self.lost: asyncio.Queue[tuple[Sink, str]] = asyncio.Queue()
        self.tee = Tee(lambda sink, why: self.lost.put_nowait((sink, why)))
        self.unshown: list[tuple[str, int | None]] = []
        self.files: list[int] = []

    def follow(self, name: str, prefix: bytes = b"P:") -> tuple[int, int]:
        path = self.directory / name
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.files.append(file)
        view = StreamView(
            self.console.sink, lambda: prefix, lambda *loss: self.unshown.append(loss)
        )
        return file, self.tee.follow(str(path), view)

    async def aclose(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.tee.aclose()
        self.console.close()
        for file in self.files:
            os.close(file)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench(tmp_path)
    yield bench
    await bench.aclose()


async def test_a_line_is_shown_when_it_is_written(bench: Bench) -> None:
    file, _ = bench.follow("a")
    for number in range(3):
        os.write(file, b"line %d\n" % number)
        assert (await bench.console.lines(number + 1))[-1] == b"P:line %d" % number
    assert repr(bench.tee) == "<Tee of 1 files>"


async def test_a_fork_copies_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of the task, which may be about to run."""
    file, _ = bench.follow("a")
    os.write(file, b"first\n")
    await bench.console.lines(1)
    (pump,) = bench.tee._pumps.values()
    with monkeypatch.context() as patch:
        patch.setattr(pump._fork, "_pid", -1)
        os.write(file, b"second\n")
        await asyncio.wait([pump._task], timeout=GUARD)
    assert pump._task.done()
    assert bench.console.rest() == b"P:first\n"


async def test_a_file_is_followed_from_its_start(bench: Bench) -> None:
    (bench.directory / "a").write_bytes(b"old\n")
    bench.follow("a")
    assert await bench.console.lines(1) == [b"P:old"]


async def test_lines_of_many_files_stay_whole(bench: Bench) -> None:
    """Eight files, written to in pieces of lines."""
    files = [bench.follow(str(number), b"[%d]:" % number)[0] for number in range(8)]
    for line in range(200):
        for number, file in enumerate(files):
            os.write(file, b"begin %d" % line)
            os.write(file, b" end %d\n" % number)
        if line % 20 == 0:
            await asyncio.sleep(0)
    shown = await bench.console.lines(1600)
    assert len(shown) == 1600
    for number in range(8):
        lines = [text for text in shown if text.startswith(b"[%d]:" % number)]
        assert lines == [b"[%d]:begin %d end %d" % (number, line, number) for line in range(200)]


async def test_a_complete_file_is_shown_to_its_end(bench: Bench) -> None:
    """A last line without a newline too."""
    file, token = bench.follow("a")
    os.write(file, b"one\nlast words")
    bench.tee.finish([token])
    reading = asyncio.create_task(bench.console.lines(2))
    assert await bench.tee.drain(GUARD) == {}
    assert await reading == [b"P:one", b"P:last words"]
    assert repr(bench.tee) == "<Tee of 0 files>"


async def test_drain_does_not_wait_for_growing_files(bench: Bench) -> None:
    bench.follow("a")
    assert await bench.tee.drain(GUARD) == {}


async def test_output_of_several_chunks_is_drained(bench: Bench) -> None:
    """A megabyte that is written right before the end."""
    file, token = bench.follow("a")
    lines = b"".join(b"%07d\n" % number for number in range(130_000))
    os.write(file, lines)
    bench.tee.finish([token])
    reading = asyncio.create_task(bench.console.lines(130_000))
    assert await bench.tee.drain(GUARD) == {}
    assert b"\n".join(await reading) + b"\n" == lines.replace(b"\n", b"\nP:")[:-2].join(
        [b"P:", b""]
    )


async def test_drain_ends_if_the_console_is_blocked(bench: Bench) -> None:
    file, token = bench.follow("a")
    os.write(file, b"x" * 100 + b"\n")
    os.write(file, b"y\n" * 200_000)
    bench.tee.finish([token])
    ((sink, unshown),) = (await bench.tee.drain(0.05)).items()
    assert sink is bench.console.sink
    assert 400_101 - (256 << 10) < unshown < 400_101


async def test_a_line_that_is_long_to_read(bench: Bench) -> None:
    """The console gets nothing until its end is found; it is shown, and so is what follows."""
    file, token = bench.follow("a")
    os.truncate(file, 1 << 26)
    os.write(file, b"\rshown\nnext\n")
    bench.tee.finish([token])
    # Each wait ends after a chunk or a few.
    assert await bench.tee.drain(0.0001) == {}
    assert await bench.console.lines(2) == [b"P:shown", b"P:next"]
    assert bench.unshown == []


async def test_a_line_without_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends, and the reason is not the console."""
    monkeypatch.setattr(tee, "_READ_MAX_S", 0.05)
    file, token = bench.follow("a")
    os.truncate(file, 1 << 42)
    bench.tee.finish([token])
    assert await bench.tee.drain(0.01) == {}
    ((reason, unshown),) = bench.unshown
    assert re.fullmatch(r"a line of more than \d+ bytes is still being read", reason)
    assert unshown == 1 << 42


async def test_a_console_that_was_blocked_gets_all_lines(bench: Bench) -> None:
    file, token = bench.follow("a")
    os.write(file, b"".join(b"%06d\n" % number for number in range(60_000)))
    bench.tee.finish([token])
    assert list(await bench.tee.drain(0.05)) == [bench.console.sink]
    reading = asyncio.create_task(bench.console.lines(60_000))
    assert await bench.tee.drain(GUARD) == {}
    assert await reading == [b"P:%06d" % number for number in range(60_000)]


async def test_a_blocked_stdout_does_not_delay_stderr(bench: Bench) -> None:
    file, _ = bench.follow("a")
    os.write(file, b"x\n" * 200_000)
    other = Console()
    path = bench.directory / "err"
    path.write_bytes(b"error\n")
    bench.tee.follow(str(path), StreamView(other.sink, lambda: b"E:", lambda *loss: None))
    assert await other.lines(1) == [b"E:error"]
    other.close()


async def test_a_lost_console_is_reported_once(bench: Bench) -> None:
    """And `drain` does not wait for it."""
    file, token = bench.follow("a")
    os.write(file, b"one\n")
    await bench.console.lines(1)
    os.close(bench.console.reader)
    os.write(file, b"two\n")
    async with asyncio.timeout(GUARD):
        assert await bench.lost.get() == (bench.console.sink, "broken pipe")
    os.write(file, b"three\n")
    bench.tee.finish([token])
    assert await bench.tee.drain(GUARD) == {}
    assert bench.lost.empty()


@pytest.mark.slow
async def test_a_pending_frame_is_shown_after_a_second(bench: Bench) -> None:
    """A pipe gets at most one frame a second from a file."""
    file, _ = bench.follow("a")
    loop = asyncio.get_running_loop()
    os.write(file, b"10%\r")
    assert await bench.console.lines(1) == [b"P:10%"]
    began = loop.time()
    for percent in range(11, 30):
        os.write(file, b"%d%%\r" % percent)
        await asyncio.sleep(0)
    assert await bench.console.lines(2) == [b"P:10%", b"P:29%"]
    assert 0.8 < loop.time() - began < 5


async def test_a_truncated_file_is_shown_from_its_start(bench: Bench) -> None:
    file, _ = bench.follow("a")
    os.write(file, b"before\n")
    await bench.console.lines(1)
    os.ftruncate(file, 0)
    os.write(file, b"a\n")
    assert await bench.console.lines(2) == [b"P:before", b"P:a"]


@pytest.mark.parametrize(
    "change",
    [lambda file: os.ftruncate(file, 4), lambda file: os.posix_fallocate(file, 0, 4)],
    ids=["ftruncate", "fallocate"],
)
async def test_a_file_that_keeps_its_size_is_not_shown_again(
    bench: Bench, change: Callable[[int], None]
) -> None:
    """The kernel reports a write, and changes the time."""
    file, token = bench.follow("a")
    os.write(file, b"one\n")
    await bench.console.lines(1)
    change(file)
    bench.tee.finish([token])
    assert await bench.tee.drain(GUARD) == {}
    assert bench.console.rest() == b"P:one\n"
    assert bench.unshown == []


@pytest.mark.parametrize("wakes", [log_file.WAKES_MAX, 0])
async def test_a_file_that_is_written_again_is_shown_again(
    wakes: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the same bytes, as by `echo tick > /dev/stdout`, and while its watch is removed."""
    monkeypatch.setattr(log_file, "WAKES_MAX", wakes)
    file, _ = bench.follow("a")
    os.write(file, b"tick\n")
    for count in range(1, 4):
        assert await bench.console.lines(count) == [b"P:tick"] * count
        (bench.directory / "a").write_bytes(b"tick\n")


async def test_a_cancelled_pump_restarts(bench: Bench) -> None:
    """A loop that shuts down cancels all tasks."""
    file, token = bench.follow("a")
    os.write(file, b"one\n")
    await bench.console.lines(1)
    me = asyncio.current_task()
    for task in asyncio.all_tasks():
        if task is not me and task.get_name().startswith("copy to"):
            task.cancel()
    os.write(file, b"two\n")
    assert await bench.console.lines(2) == [b"P:one", b"P:two"]
    bench.tee.finish([token])
    assert await bench.tee.drain(GUARD) == {}


async def test_a_missing_file_is_an_error(bench: Bench) -> None:
    path = str(bench.directory / "missing")
    with pytest.raises(FileNotFoundError):
        bench.tee.follow(path, StreamView(bench.console.sink, lambda: b"", lambda *loss: None))


async def test_a_file_that_cannot_be_read_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it grows, or after a pause; no line is lost or shown twice."""
    monkeypatch.setattr(tee, "_RETRY_S", 0.02)
    file, token = bench.follow("a")
    os.write(file, b"one\n")
    await bench.console.lines(1)
    failed: asyncio.Queue[None] = asyncio.Queue()

    def refuse(*args: object) -> bytes:
        failed.put_nowait(None)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with asyncio.timeout(GUARD):
        for line in (b"two\n", b"three\n"):
            with monkeypatch.context() as patched:
                patched.setattr(os, "pread", refuse)
                os.write(file, line)
                await failed.get()
        os.write(file, b"x" * 100_000)
        with monkeypatch.context() as patched:
            patched.setattr(os, "pread", refuse)
            os.write(file, b"\nlast")
            bench.tee.finish([token])
            for _ in range(3):
                await failed.get()
        reading = asyncio.create_task(bench.console.lines(5))
        assert await bench.tee.drain(GUARD) == {}
        assert await reading == [b"P:one", b"P:two", b"P:three", b"P:" + b"x" * 100_000, b"P:last"]
    assert bench.unshown == []


async def test_a_file_that_stays_unreadable_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number of bytes that are not shown."""
    file, token = bench.follow("a")
    os.write(file, b"one\n")
    await bench.console.lines(1)

    def refuse(*args: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", refuse)
        os.write(file, b"two\n")
        bench.tee.finish([token])
        assert await bench.tee.drain(0.05) == {}
    assert bench.unshown == [("the file cannot be read: input/output error", 4)]


async def test_files_are_polled_where_inotify_refuses_a_watch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch without an event is refused (EINVAL)."""
    monkeypatch.setattr(inotify, "_EVENTS", 0)
    file, token = bench.follow("a")
    assert "1 polled" in repr(bench.tee._watcher)
    for number in range(2):
        os.write(file, b"line %d\n" % number)
        assert (await bench.console.lines(number + 1))[-1] == b"P:line %d" % number
    os.write(file, b"end")
    bench.tee.finish([token])
    assert await bench.tee.drain(GUARD) == {}
    assert bench.console.rest().endswith(b"P:end\n")


async def test_a_watcher_reports_the_files_that_grew(tmp_path: Path) -> None:
    """And none after its removal."""
    calls: asyncio.Queue[list[int]] = asyncio.Queue()
    watch = InotifyWatcher(lambda events: calls.put_nowait([*events]))
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.touch()
    for token, path in enumerate(paths, start=7):
        watch.add(str(path), token)
    assert repr(watch) == "<InotifyWatcher of 2 files, 0 polled>"
    async with asyncio.timeout(GUARD):
        paths[0].write_bytes(b"x")
        assert await calls.get() == [7]
        watch.remove(7)
        paths[0].write_bytes(b"xy")
        paths[1].write_bytes(b"z")
        tokens: list[int] = []
        while not tokens:
            tokens = await calls.get()
        assert tokens == [8]
    watch.close()


async def test_a_missing_path_is_polled(tmp_path: Path) -> None:
    calls: asyncio.Queue[list[int]] = asyncio.Queue()
    watch = InotifyWatcher(lambda events: calls.put_nowait([*events]))
    watch.add(str(tmp_path / "missing"), 3)
    async with asyncio.timeout(GUARD):
        assert await calls.get() == [3]
        assert await calls.get() == [3]
    watch.remove(3)
    watch.close()


MANY_INSTANCES = """
import asyncio, ctypes, os, sys
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.logs.log_file import CHUNK

class Refusing:
    def inotify_init1(self, flags):
        return -1

async def main():
    calls = asyncio.Queue()
    real = ctypes.CDLL
    ctypes.CDLL = lambda *args, **options: Refusing()
    watch = InotifyWatcher(lambda events: calls.put_nowait([*events]))
    ctypes.CDLL = real
    watch.add(sys.argv[1], 5)
    print(await asyncio.wait_for(calls.get(), 10))
    watch.remove(5)
    watch.close()

asyncio.run(main())
"""


def test_files_are_polled_without_an_inotify_instance(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    done = subprocess.run(
        [sys.executable, "-c", MANY_INSTANCES, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert (done.stdout, done.stderr) == ("[5]\n", "")


MUCH = """
import os, sys, time
time.sleep(0.3)
block = b"".join(b"line %07d of a job with much output\\n" % number for number in range(100))
for _ in range(int(sys.argv[1])):
    os.write(1, block)
"""


def test_much_output_takes_no_new_memory_for_each_chunk(tmp_path: Path) -> None:
    """Each page that is faulted in takes as long as it takes to copy ten."""

    def faults(blocks: int) -> int:
        options = ["-t3", "--log-dir", str(tmp_path), "--no-python"]
        command = [*CLI, "run", *options, sys.executable, "-S", "-c", MUCH, str(blocks)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as job:
            assert job.stdout is not None
            assert job.stdout.read().count(b"\n") == 100 * blocks
            _, status, usage = os.wait4(job.pid, 0)
            job.returncode = os.waitstatus_to_exitcode(status)
        assert job.returncode == 0
        return usage.ru_minflt

    chunks = 100 * 1000 * 36 // CHUNK
    assert faults(1000) - faults(1) < 10 * chunks
