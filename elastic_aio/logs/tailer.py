"""One growing log file, followed: what is new in it is written to a sink."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from elastic_aio.logs.lines import Frame, Lines, LineSplitter, Piece, Span, with_prefix
from elastic_aio.logs.sink import Sink

__all__ = ["Follower"]

# Smaller than what malloc maps anew each time: half the processor time of 256 KiB.
_CHUNK = 64 * 1024
# A pipe gets at most one unfinished line (a progress bar) a second from a stream.
_FRAME_INTERVAL_S = 1.0


class _RestOfSpan(Struct, frozen=True):
    """What is left of a long line whose prefix has been shown."""

    start: int
    end: int


class Follower:
    """Copies one file to one sink, line by line; the file is what remembers."""

    def __init__(self, descriptor: int, sink: Sink, prefix: Callable[[], bytes]) -> None:
        """Follow the file open as `descriptor`, which this object closes.

        `prefix` gives the text before the lines that arrive now.
        """
        self.sink = sink
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ending = False
        self._descriptor = descriptor
        self._prefix = prefix
        self._splitter = LineSplitter()
        # Read but not shown yet; not empty only after a cancellation.
        self._todo: deque[Piece | _RestOfSpan] = deque()
        self._pending_frame = b""
        self._shown_frame: bytes | None = None
        self._next_frame_at = 0.0

    def __repr__(self) -> str:
        state = "finished" if self.finished.done() else "ending" if self.is_ending else "following"
        return f"<Follower {state}, {self._splitter!r}>"

    async def copy(self) -> bool:
        """Copy one chunk; tell whether there may be more to copy at once.

        Call it with the sink's lock held.

        Raises:
            SinkLost: the console is gone.
            OSError: the file cannot be read.
        """
        await self._show([])
        data = os.pread(self._descriptor, _CHUNK, self._splitter.offset)
        if data:
            await self._show(self._splitter.feed(data))
            # A file that grows no more wakes nobody: go on until its end is seen.
            return len(data) == _CHUNK or self.is_ending
        if os.fstat(self._descriptor).st_size < self._splitter.offset:
            # Truncated by the worker (it opened /dev/stdout anew, or rotates).
            await self._show(self._splitter.finish())
            self._splitter = LineSplitter()
            return True
        if self.is_ending:
            await self._show(self._splitter.finish())
            self.close()
        return False

    @property
    def frame_due_at(self) -> float | None:
        """Loop time at which a frame that was held back may be shown; None if there is none."""
        return self._next_frame_at if self._pending_frame else None

    async def show_pending_frame(self) -> None:
        """Show the frame that was held back; call it with the sink's lock held."""
        if frame := self._pending_frame:
            await self._show_frame(frame)

    def close(self) -> None:
        """Stop following."""
        if not self.finished.done():
            os.close(self._descriptor)
            self.finished.set_result(None)

    async def _show(self, pieces: list[Piece]) -> None:
        """Show what was left to show, then `pieces`.

        A piece leaves the queue before it is written: the sink finishes a write that
        was cancelled.
        """
        self._todo.extend(pieces)
        while self._todo:
            match self._todo.popleft():
                case Lines(block):
                    await self._show_lines(block)
                case Span(start, end):
                    self._pending_frame, self._shown_frame = b"", None
                    self._todo.appendleft(_RestOfSpan(start, end))
                    await self.sink.write(self._prefix())
                case _RestOfSpan(start, end):
                    await self._show_rest(start, end)
                case Frame(text):
                    await self._show_frame(text)

    async def _show_lines(self, block: bytes) -> None:
        if self._shown_frame is not None:
            first, _, rest = block.partition(b"\n")
            if first == self._shown_frame:
                block = rest  # the pipe has this line already
            self._shown_frame = None
        self._pending_frame = b""
        if block:
            await self.sink.write(with_prefix(block, self._prefix()))

    async def _show_rest(self, start: int, end: int) -> None:
        data = os.pread(self._descriptor, min(_CHUNK, end - start), start)
        if data:  # else truncated meanwhile
            self._todo.appendleft(_RestOfSpan(start + len(data), end))
            await self.sink.write(data)
            await asyncio.sleep(0)  # others' turn: a file takes each write at once
        else:
            await self.sink.write(b"\n")

    async def _show_frame(self, text: bytes) -> None:
        if self.sink.is_terminal:
            await self.sink.show_frame(self._prefix() + text)
            return
        now = asyncio.get_running_loop().time()
        if now < self._next_frame_at:
            self._pending_frame = text
            return
        self._pending_frame = b""
        self._next_frame_at = now + _FRAME_INTERVAL_S
        if text != self._shown_frame:
            self._shown_frame = text
            await self.sink.write(self._prefix() + text + b"\n")
