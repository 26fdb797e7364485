"""Lines for a sink that are handed over at once and written when it takes them."""

from __future__ import annotations

import asyncio

from elastic_aio.aio import owned_task
from elastic_aio.logs.sink import Sink, SinkLost

__all__ = ["LineWriter"]


class LineWriter:
    """Writes whole lines in order, all of them, without ever making the caller wait."""

    def __init__(self, sink: Sink) -> None:
        """Begin with nothing to write to `sink`, which stays the caller's."""
        self._sink = sink
        self._lines: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None

    @property
    def lost(self) -> str | None:
        """Why the sink takes no more; None while it does."""
        return self._sink.lost

    def put(self, line: bytes) -> None:
        """Hand over a line, with its newline."""
        self._lines.append(line)
        if self._writing is None or self._writing.done():
            self._writing = owned_task(self._write(), name=f"write to {self._sink.name}")

    async def drained(self, patience: float) -> bool:
        """Wait until everything is written; false after `patience` seconds without progress."""
        while self._writing is not None and not self._writing.done():
            before = self._sink.written
            await asyncio.wait([self._writing], timeout=patience)
            if not self._writing.done() and self._sink.written == before:
                self._writing.cancel()
                await asyncio.wait([self._writing])
                return False
        return True

    async def _write(self) -> None:
        while self._lines:
            lines, self._lines = self._lines, []
            async with self._sink.lock:
                try:
                    await self._sink.write(b"".join(lines))
                except SinkLost:
                    return
