"""LogTailer: copies one growing log file to a sink, by whole lines."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.logs.lines import (
    Frame,
    Lines,
    LineSplitter,
    LongLine,
    Piece,
    RawSplitter,
    fixed_prefix,
    with_prefix,
)
from elastic_aio.logs.log_file import CHUNK, LogFile
from elastic_aio.logs.sink import Sink, styled
from elastic_aio.logs.streams import LineTimes

if TYPE_CHECKING:
    from elastic_aio.logs.line_filter import LineFilter

# Seconds between unfinished lines (progress bars) of one file that a pipe gets.
_FRAME_INTERVAL_S = 1.0


class _LongLineRest(Struct, frozen=True):
    """The rest of a long line whose prefix has been written."""

    start: int
    end: int


class LogTailer:
    """Copies one file to one sink; what is not copied yet stays in the file."""

    def __init__(
        self,
        file: LogFile,
        sink: Sink,
        prefix: Callable[[], bytes],
        on_lost: Callable[[str, int | None], None],
        *,
        offset: int = 0,
        line_filter: LineFilter | None = None,
        style: bytes = b"",
        is_raw: bool = False,
        times: LineTimes | None = None,
    ) -> None:
        """Follow an open file, which this object closes.

        Args:
            file: the log.
            sink: where it is shown.
            prefix: returns the prefix of lines that are read now.
            on_lost: called with the reason why output is not shown, and the number of
                bytes, None if it is unknown.
            offset: where to begin.
            line_filter: gets every line too; of one that is too long for memory its beginning.
            style: escape sequence for the prefix on the sink; the filter gets it plain.
            is_raw: copy the bytes as they are, without the prefix.
            times: notes when the file has grown.
        """
        self.sink = sink
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ending = False
        self.error: OSError | None = None
        """Why the file cannot be read at present."""
        self.on_lost = on_lost
        self._file = file
        self._is_truncated = False
        self._prefix = fixed_prefix("") if is_raw else prefix
        self._style = style
        self._filter = line_filter
        self._times = LineTimes() if times is None else times
        self._make_splitter = RawSplitter if is_raw else LineSplitter
        self._splitter: LineSplitter | RawSplitter = self._make_splitter(offset)
        # Read but not written yet; empty except after a cancellation.
        self._queue: deque[Piece | _LongLineRest] = deque()
        self._pending_frame = b""
        self._shown_frame: bytes | None = None
        self._next_frame_at = 0.0

    def __repr__(self) -> str:
        state = "finished" if self.finished.done() else "ending" if self.is_ending else "following"
        return f"<LogTailer {state}, {self._splitter!r}>"

    def note_open(self) -> None:
        """Note that the kernel has reported that a process has opened the file."""
        self._file.is_opened = True

    def note_write(self) -> None:
        """Note that the kernel has reported a write to the file."""
        self._file.is_written = True

    async def copy(self) -> bool:
        """Copy one chunk; return whether to call again at once.

        Call it with the sink's lock held.

        Cancellation: loses nothing; the next call goes on.

        Raises:
            SinkLost: the console accepts no more output.
            OSError: the file cannot be read.
        """
        await self._show([])
        now = math.inf if self.is_ending else asyncio.get_running_loop().time()
        data = self._file.read(self._splitter.offset, now)
        if data is None:
            await self._start_again()
            return True
        if data:
            self._times.note(self._splitter.offset + len(data), time.time())
            await self._show(self._splitter.feed(data))
            self._file.release(self._splitter.needed)
            # A file that has stopped growing causes no event: read until its end.
            return len(data) == CHUNK or self.is_ending
        if self.is_ending:
            await self._show(self._splitter.finish())
            self.close()
        return False

    async def _start_again(self) -> None:
        """Show what is known of a file that was truncated; go on at its beginning."""
        # A long line is not in memory, so it is gone.
        rest = [piece for piece in self._splitter.finish() if not isinstance(piece, LongLine)]
        self._splitter = self._make_splitter()
        self._file.restart()
        if not self._is_truncated:
            self._is_truncated = True
            self.on_lost("the file was truncated, and what was not shown by then is gone", None)
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
    def held(self) -> int:
        """The number of bytes that are read of an unfinished line."""
        return self._splitter.offset - self._splitter.needed

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

    async def show_pending_frame(self) -> None:
        """Show the pending frame if it is due; call it with the sink's lock held."""
        if frame := self._pending_frame:
            await self._show_frame(frame)

    def close(self) -> None:
        """Stop following the file.  Idempotent."""
        if not self.finished.done():
            self._file.close()
            self.finished.set_result(None)

    async def _show(self, pieces: Sequence[Piece]) -> None:
        """Show what a cancelled call has left, then `pieces`.

        A piece leaves the queue before it is written: the sink completes a cancelled
        write.
        """
        self._queue.extend(pieces)
        while self._queue:
            match self._queue.popleft():
                case Lines(block):
                    await self._show_lines(block)
                case LongLine(start, end):
                    self._pending_frame, self._shown_frame = b"", None
                    self._queue.appendleft(_LongLineRest(start, end))
                    if self._filter is not None:
                        beginning = self._file.read_again(start, end)
                        self._filter.copy(beginning + b"\n", self._prefix())
                    await self.sink.write(styled(self._prefix(), self._style))
                case _LongLineRest(start, end):
                    await self._show_rest(start, end)
                case Frame(text):
                    await self._show_frame(text)

    async def _show_lines(self, block: bytes) -> None:
        if self._filter is not None:
            self._filter.copy(block, self._prefix())
        if self._shown_frame is not None:
            first, _, rest = block.partition(b"\n")
            if first == self._shown_frame:
                block = rest  # the pipe has this line already
            self._shown_frame = None
        self._pending_frame = b""
        if block:
            await self.sink.write(with_prefix(block, styled(self._prefix(), self._style)))

    async def _show_rest(self, start: int, end: int) -> None:
        try:
            data = self._file.read_again(start, end)
        except OSError:
            self._queue.appendleft(_LongLineRest(start, end))
            raise
        if data:  # else the file was truncated meanwhile
            self._queue.appendleft(_LongLineRest(start + len(data), end))
            await self.sink.write(data)
            await asyncio.sleep(0)  # yield to other tasks: a write to a file does not wait
        else:
            await self.sink.write(b"\n")

    async def _show_frame(self, text: bytes) -> None:
        if self.sink.is_terminal:
            await self.sink.show_frame(text, self._prefix(), self._style)
            return
        now = asyncio.get_running_loop().time()
        if now < self._next_frame_at:
            self._pending_frame = text
            return
        self._pending_frame = b""
        self._next_frame_at = now + _FRAME_INTERVAL_S
        if text != self._shown_frame:
            self._shown_frame = text
            await self.sink.write(styled(self._prefix(), self._style) + text + b"\n")
