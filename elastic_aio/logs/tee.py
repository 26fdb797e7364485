"""Tee: copies the workers' log files to the console while they grow.

Each of the two console streams has a task: a blocked standard output does not delay standard error,
and neither delays a worker, which writes to its file.  Bytes that are not shown yet stay in the
file, so a blocked console costs no memory.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct, field

from elastic_aio.aio import ForkGuard, create_task, when_all_done
from elastic_aio.logs.console import Sink, SinkLost, styled
from elastic_aio.logs.lines import (
    Frame,
    Lines,
    LineSplitter,
    LongLine,
    Piece,
    RawSplitter,
    with_prefix,
)
from elastic_aio.logs.log_file import CHUNK, LogFile
from elastic_aio.logs.relay import Relay, RelayedFile
from elastic_aio.logs.streams import LineTimes
from elastic_aio.text import counted, error_reason

if TYPE_CHECKING:
    from elastic_aio.logs.inotify import InotifyWatcher
    from elastic_aio.logs.line_filter import LineFilter

# Seconds until a file that could not be read is read again, if it does not grow earlier.
_RETRY_S = 0.5
# Seconds for which `drain` reads lines to their end while the console gets nothing.
_READ_MAX_S = 30.0
# Bytes of the block that is freed at the start, see `_Pump`.
_FREED = 1 << 20
# Bytes of a captured file that stay after they were passed on.
_CAPTURED_MAX = 4 << 20
# Seconds between unfinished lines (progress bars) of one file that a pipe gets.
_FRAME_INTERVAL_S = 1.0


class StreamView(Struct, frozen=True, eq=False):
    """How a stream is shown."""

    sink: Sink
    prefix: Callable[[], bytes]
    """Returns the prefix of lines that are read now."""
    on_lost: Callable[[str, int | None], None]
    """Called with the reason why output is not shown, and the number of bytes, None if unknown."""
    line_filter: LineFilter | None = None
    """Gets every line too; only the beginning of a line that is too long for memory."""
    style: bytes = b""
    """Escape sequence for the prefix on the sink; the filter gets it plain."""
    is_raw: bool = False
    """Whether the bytes are passed on as they are, without the prefix."""
    times: LineTimes = field(default_factory=LineTimes)
    """Records when the file has grown."""


class Tee:
    """Follows files and shows what is appended to them; must be closed."""

    def __init__(self, on_lost: Callable[[Sink, str], None]) -> None:
        """Start without files; `on_lost` gets a sink that fails, and the reason."""
        self._on_lost = on_lost
        self._watcher: InotifyWatcher | None = None  # relays need none
        self._tailers: dict[int, LogTailer] = {}
        self._relays: dict[int, Relay] = {}
        self._pumps: dict[Sink, _Pump] = {}
        self._tokens = count()

    def __repr__(self) -> str:
        return f"<Tee of {len(self._tailers)} files>"

    def follow(self, path: str, view: StreamView) -> int:
        """Show a file while it grows, or raise an OSError; return a token for `finish`."""
        token = next(self._tokens)
        self._show(token, LogTailer(LogFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC)), view))
        if self._watcher is None:
            from elastic_aio.logs.inotify import InotifyWatcher  # most jobs have relays only

            self._watcher = InotifyWatcher(self._on_events)
        self._watcher.add(path, token)
        return token

    def follow_relay(self, relay: Relay, view: StreamView | None, *, is_shown: bool) -> int:
        """Show a relayed stream, or only what its file does not take; return a token.

        The tee closes the relay.  Without a view, what the file does not take is dropped.
        """
        token = next(self._tokens)
        self._relays[token] = relay
        on_full = relay.on_full

        def show() -> None:
            if relay.file < 0 and relay.error is None:
                return  # no byte has come, or no descriptor is left at the moment
            if view is not None and token in self._relays and token not in self._tailers:
                file = RelayedFile(relay, keep=_CAPTURED_MAX if view.is_raw else 0)
                tailer = LogTailer(file, view, offset=relay.kept)
                self._show(token, tailer)
                relay.on_data = partial(self._pumps[view.sink].wake, tailer)

        def show_rest() -> None:
            on_full()
            show()

        relay.on_full = show_rest
        if is_shown:
            relay.on_data = show  # most workers write nothing to a captured stream
        if is_shown or relay.error is not None:
            show()
        return token

    def _show(self, token: int, tailer: LogTailer) -> None:
        self._tailers[token] = tailer
        if tailer.view.sink not in self._pumps:
            self._pumps[tailer.view.sink] = _Pump(tailer.view.sink, self._on_lost)
        self._pumps[tailer.view.sink].wake(tailer)

    def needed(self, token: int) -> int | None:
        """Return the position from which on a file is still to be shown; None if it is not."""
        tailer = self._tailers.get(token)
        return None if tailer is None else tailer.needed

    def finish(self, tokens: Iterable[int]) -> None:
        """Declare files complete: their rest is shown, then they are closed."""
        if self._watcher is not None:
            self._watcher.read_events()  # `remove` drops them
        for token in tokens:
            if (relay := self._relays.get(token)) is not None:
                relay.finish()
            if (tailer := self._tailers.get(token)) is None:
                self._close_relay(token)
                continue
            tailer.is_ending = True
            if self._watcher is not None:
                self._watcher.remove(token)
            self._pumps[tailer.view.sink].wake(tailer)
            tailer.finished.add_done_callback(partial(self._forget, token))

    async def drain(self, timeout: float) -> dict[Sink, int]:
        """Wait until all complete files are shown; return the sinks that block, with bytes.

        The wait ends after `timeout` seconds in which no sink takes anything and no file is read;
        after 30 seconds if long lines are only read, to find their ends.  Calls the `on_lost` of
        files that cannot be read, or not to the end of a line.
        """
        done = when_all_done(tailer.finished for tailer in self._ending())
        is_read: set[LogTailer] = set()
        left = _READ_MAX_S
        while not done.done() and left > 0:
            written = [sink.written for sink in self._pumps]
            offsets = {tailer: tailer.offset for tailer in self._ending()}
            await asyncio.wait([done], timeout=timeout)
            if [sink.written for sink in self._pumps] != written:
                continue
            is_read = {tailer for tailer, offset in offsets.items() if tailer.offset != offset}
            left = left - timeout if is_read else 0.0
        blocked: dict[Sink, int] = {}
        for tailer in self._ending():
            if tailer.error is not None:
                reason = error_reason(tailer.error)
                tailer.view.on_lost(f"the file cannot be read: {reason}", tailer.unshown)
            elif tailer in is_read:
                held = tailer.offset - tailer.needed
                reason = f"a line of more than {counted(held, 'byte')} is still being read"
                tailer.view.on_lost(reason, held + (tailer.unshown or 0))
            else:
                blocked[tailer.view.sink] = blocked.get(tailer.view.sink, 0) + (tailer.unshown or 0)
        return blocked

    async def aclose(self) -> None:
        """Stop following all files.  Idempotent."""
        if self._watcher is not None:
            self._watcher.close()
        for pump in self._pumps.values():
            await pump.aclose()
        for tailer in list(self._tailers.values()):
            tailer.close()
        for token in list(self._relays):
            self._close_relay(token)

    def _ending(self) -> list[LogTailer]:
        tailers = self._tailers.values()
        return [tailer for tailer in tailers if tailer.is_ending and not tailer.finished.done()]

    def _forget(self, token: int, _: asyncio.Future[None]) -> None:
        self._tailers.pop(token, None)
        self._close_relay(token)

    def pipes(self) -> list[int]:
        return [relay.reader for relay in self._relays.values() if relay.reader >= 0]

    def _close_relay(self, token: int) -> None:
        if (relay := self._relays.pop(token, None)) is not None:
            relay.close()
            relay.on_closed()

    def _on_events(self, events: Mapping[int, int]) -> None:
        from elastic_aio.logs.inotify import IN_MODIFY, IN_OPEN

        for token, event in events.items():
            if (tailer := self._tailers.get(token)) is not None:
                tailer.note(is_opened=bool(event & IN_OPEN), is_written=bool(event & IN_MODIFY))
                self._pumps[tailer.view.sink].wake(tailer)


class _Pump:
    """Copies to one sink, a chunk of each grown file in turn."""

    def __init__(self, sink: Sink, on_lost: Callable[[Sink, str], None]) -> None:
        self._fork = ForkGuard()
        self._sink = sink
        self._on_lost = on_lost
        self._queue: deque[LogTailer] = deque()
        self._queued: set[LogTailer] = set()
        self._timers: dict[LogTailer, asyncio.TimerHandle] = {}
        self._woken = asyncio.Event()
        # By a large block that is freed, the C library learns to keep the memory of the chunks: to
        # fault each one in again takes as long as the copy (mallopt(3), M_TRIM_THRESHOLD).
        bytes(_FREED)
        self._is_closed = False
        self._is_lost = False
        self._start()

    def wake(self, tailer: LogTailer) -> None:
        if tailer not in self._queued:
            self._queued.add(tailer)
            self._queue.append(tailer)
            self._woken.set()

    async def aclose(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._is_closed = True
        self._task.cancel()
        await asyncio.wait([self._task])

    def _start(self) -> None:
        self._task = create_task(self._run(), name=f"copy to {self._sink.name}")
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # A loop that shuts down cancels this task too, while the workers are still being
        # stopped and write their last lines.
        if task.cancelled() and not self._is_closed and not self._fork.is_copy:
            self._start()

    async def _run(self) -> None:
        while not self._fork.is_copy:  # whose parent copies the output
            if not self._queue:
                self._woken.clear()
                await self._woken.wait()
                continue  # it may be a fork that was woken
            tailer = self._queue.popleft()
            # Before the copy: growth during it must queue the file again.
            self._queued.discard(tailer)
            if not tailer.finished.done() and await self._copy(tailer):
                self.wake(tailer)
            await asyncio.sleep(0)  # yield to other tasks: reading a file does not wait

    async def _copy(self, tailer: LogTailer) -> bool:
        try:
            async with self._sink.lock:
                more = await tailer.copy()
        except SinkLost:
            if not self._is_lost:
                self._is_lost = True
                self._on_lost(self._sink, self._sink.lost or "")
            tailer.close()
            return False
        except OSError as error:
            tailer.error = error
            self._wake_at(tailer, asyncio.get_running_loop().time() + _RETRY_S)
            return False
        tailer.error = None
        self._wake_at(tailer, tailer.due_at)
        return more

    def _wake_at(self, tailer: LogTailer, when: float | None) -> None:
        if timer := self._timers.pop(tailer, None):
            timer.cancel()
        if when is not None:
            self._timers[tailer] = asyncio.get_running_loop().call_at(when, self.wake, tailer)


# ------------------------------------------------------------------------------ one file


class LogTailer:
    """Copies one file to one sink; what is not copied yet stays in the file."""

    def __init__(self, file: LogFile, view: StreamView, *, offset: int = 0) -> None:
        """Follow an open file from an offset on; this object closes it."""
        self.view = view
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ending = False
        self.error: OSError | None = None
        """Why the file cannot be read at present."""
        self._file = file
        self._is_truncated = False
        self._make_splitter = RawSplitter if view.is_raw else LineSplitter
        self._splitter: LineSplitter | RawSplitter = self._make_splitter(offset)
        # Read but not written yet; empty except after a cancellation.
        self._queue: deque[Piece] = deque()
        self._pending_frame = b""
        self._shown_frame: bytes | None = None
        self._next_frame_at = 0.0

    def __repr__(self) -> str:
        state = "finished" if self.finished.done() else "ending" if self.is_ending else "following"
        return f"<LogTailer {state}, {self._splitter!r}>"

    def note(self, *, is_opened: bool, is_written: bool) -> None:
        """Note what the kernel has reported of the file."""
        self._file.is_opened |= is_opened
        self._file.is_written |= is_written

    async def copy(self) -> bool:
        """Copy one chunk; return whether to call again at once.  Call it with the sink's lock held.

        Cancellation: loses nothing; the next call goes on.

        Raises:
            SinkLost: the console accepts no more output.
            OSError: the file cannot be read.
        """
        if self._pending_frame:
            await self._show_frame(self._pending_frame)
        await self._show([])
        now = math.inf if self.is_ending else asyncio.get_running_loop().time()
        data = self._file.read(self._splitter.offset, now)
        if data is None:
            await self._start_again()
            return True
        if data:
            self.view.times.note(self._splitter.offset + len(data), time.time())
            await self._show(self._splitter.feed(data, self._file.is_behind))
            self._file.release(self._splitter.needed)
            # A file that has stopped growing causes no event: read until its end.
            return len(data) == CHUNK or self.is_ending
        if self.is_ending:
            await self._show(self._splitter.finish())
            self.close()
        return False

    async def _start_again(self) -> None:
        """Show what is known of a truncated file; go on at its beginning."""
        # A long line is not in memory, so it is gone.
        rest = [piece for piece in self._splitter.finish() if not isinstance(piece, LongLine)]
        self._splitter = self._make_splitter()
        self._file.restart()
        if not self._is_truncated:
            self._is_truncated = True
            why = "the file was truncated, and what was not shown by then is gone"
            self.view.on_lost(why, None)
        await self._show(rest)

    @property
    def offset(self) -> int:
        """The number of bytes of the file that are read."""
        return self._splitter.offset

    @property
    def needed(self) -> int:
        """The position of the first byte that is still to be shown."""
        return self._splitter.needed

    @property
    def unshown(self) -> int | None:
        """The number of bytes in the file that are not read yet; None if it is unknown."""
        return self._file.unread(self._splitter.offset)

    @property
    def due_at(self) -> float | None:
        """Loop time at which to call `copy` if the file has not grown; None for never."""
        times = [self._next_frame_at] if self._pending_frame else []
        if (when := self._file.look_again_at) is not None:
            times.append(when)
        return min(times, default=None)

    def close(self) -> None:
        """Stop following the file.  Idempotent."""
        if not self.finished.done():
            self._file.close()
            self.finished.set_result(None)

    async def _show(self, pieces: Sequence[Piece]) -> None:
        """Show what a cancelled call has left, then `pieces`."""
        # A piece leaves the queue before it is written: the sink completes a cancelled write.
        self._queue.extend(pieces)
        while self._queue:
            match self._queue.popleft():
                case Lines(block):
                    await self._show_lines(block)
                case LongLine(start, end, is_begun=True):
                    await self._show_rest(start, end)
                case LongLine(start, end):
                    self._pending_frame, self._shown_frame = b"", None
                    self._queue.appendleft(LongLine(start, end, is_begun=True))
                    if self.view.line_filter is not None:
                        beginning = self._file.read_again(start, end)
                        self.view.line_filter.copy(beginning + b"\n", self.view.prefix())
                    await self.view.sink.write(self._styled_prefix())
                case Frame(text):
                    await self._show_frame(text)

    def _styled_prefix(self) -> bytes:
        return styled(self.view.prefix(), self.view.style)

    async def _show_lines(self, block: bytes) -> None:
        if self.view.line_filter is not None:
            self.view.line_filter.copy(block, self.view.prefix())
        if self._shown_frame is not None:
            first, _, rest = block.partition(b"\n")
            if first == self._shown_frame:
                block = rest  # the pipe has this line already
            self._shown_frame = None
        self._pending_frame = b""
        if block:
            await self.view.sink.write(with_prefix(block, self._styled_prefix()))

    async def _show_rest(self, start: int, end: int) -> None:
        try:
            data = self._file.read_again(start, end)
        except OSError:
            self._queue.appendleft(LongLine(start, end, is_begun=True))
            raise
        if data:  # else the file was truncated
            self._queue.appendleft(LongLine(start + len(data), end, is_begun=True))
            await self.view.sink.write(data)
            await asyncio.sleep(0)  # yield to other tasks: a write to a file does not wait
        else:
            await self.view.sink.write(b"\n")

    async def _show_frame(self, text: bytes) -> None:
        if self.view.sink.is_terminal:
            await self.view.sink.show_frame(text, self.view.prefix(), self.view.style)
            return
        now = asyncio.get_running_loop().time()
        if now < self._next_frame_at:
            self._pending_frame = text
            return
        self._pending_frame = b""
        self._next_frame_at = now + _FRAME_INTERVAL_S
        if text != self._shown_frame:
            self._shown_frame = text
            await self.view.sink.write(self._styled_prefix() + text + b"\n")
