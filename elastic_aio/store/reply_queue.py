"""Replies for a peer that does not read as fast as it asks.

A large value is queued by reference and handed to the transport in slices, so that one
value for a thousand slow peers occupies memory once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final

from elastic_aio.store.replies import LARGE

_SLICE: Final = 256 << 10
"""Bytes that a transport may copy at once."""


class Buffers:
    """The account of the bytes that a server holds for all its peers.

    They are unfinished requests and unsent replies.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.size = 0
        self._references: Counter[int] = Counter()

    def hold(self, piece: bytes) -> None:
        """Account for a piece; for a large one only once, however many queues have it."""
        if len(piece) >= LARGE:
            self._references[id(piece)] += 1
            if self._references[id(piece)] > 1:
                return
        self.size += len(piece)

    def weight(self, piece: bytes) -> float:
        """Return the share of one queue in a piece that it holds."""
        return len(piece) / max(self._references[id(piece)], 1)

    def release(self, piece: bytes) -> None:
        """Undo one `hold`."""
        if len(piece) >= LARGE:
            self._references[id(piece)] -= 1
            if self._references[id(piece)]:
                return
            del self._references[id(piece)]
        self.size -= len(piece)


class ReplyQueue:
    """Replies of one connection that its transport has not taken yet.

    Small replies are joined to blocks, so that a peer with a million of them costs no more to
    drop than one with a few large ones.
    """

    def __init__(self, buffers: Buffers) -> None:
        """Begin empty; `buffers` is the account of the server."""
        self._buffers = buffers
        self._pieces: deque[bytes] = deque()
        self._block = bytearray()  # what follows the pieces
        self._sent = 0
        self.size = 0
        """Bytes in the queue."""

    def extend(self, pieces: Iterable[bytes]) -> None:
        """Append pieces of replies."""
        for piece in pieces:
            self.size += len(piece)
            if len(piece) >= LARGE:
                self._end_block()
                self._append(piece)
            else:
                self._buffers.size += len(piece)
                self._block += piece
                if len(self._block) >= LARGE:
                    self._end_block()

    def write_to(self, transport: asyncio.Transport, is_paused: Callable[[], bool]) -> None:
        """Write until the queue is empty, or the transport has paused the writer or failed."""
        while self.size and not is_paused() and not transport.is_closing():
            if not self._pieces:
                self._end_block()
            # Not a slice of bytes, which would be a copy.
            part = memoryview(self._pieces[0])[self._sent : self._sent + _SLICE]
            transport.write(part)
            self._sent += len(part)
            if self._sent == len(self._pieces[0]):
                self._sent = 0
                self._pop()

    def weight(self) -> float:
        """Return the bytes that the queue occupies, shared ones divided."""
        return sum(map(self._buffers.weight, self._pieces)) + len(self._block)

    def clear(self) -> None:
        """Drop all replies."""
        self._end_block()
        while self._pieces:
            self._pop()

    def _end_block(self) -> None:
        if self._block:
            self._buffers.size -= len(self._block)
            self._append(bytes(self._block))
            self._block.clear()

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._buffers.hold(piece)

    def _pop(self) -> None:
        piece = self._pieces.popleft()
        self._buffers.release(piece)
        self.size -= len(piece)
