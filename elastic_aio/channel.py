"""One writer, many readers: the last N items of a stream, each reader at its own pace.

Readers keep a position, not a queue: the writer never waits for them, an idle
reader costs nothing, and one that falls behind the kept items is told how many it
has missed.  The last item is always among those kept, so nobody misses the end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["History", "Reader"]

T = TypeVar("T")


class History(Generic[T]):
    """The recent items of a stream that has an end."""

    def __init__(self, keep: int, missed: Callable[[int, int], T]) -> None:
        """Keep `keep` items; `missed(count, next)` makes the item that replaces lost ones.

        `next` is the position of the first item that is still there.
        """
        self._items: deque[T] = deque(maxlen=keep)
        self._missed = missed
        self._count = 0
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<History {state} after {self._count} items, {len(self._items)} kept>"

    @property
    def count(self) -> int:
        """How many items were ever added; the position of the next one."""
        return self._count

    def append(self, item: T) -> None:
        """Add an item and wake the readers."""
        self._items.append(item)
        self._count += 1
        self._wake()

    def close(self) -> None:
        """End the stream: readers stop after the last item."""
        self._closed = True
        self._wake()

    def read(self, start: int = 0) -> Reader[T]:
        """Return a reader that begins at position `start`."""
        return Reader(self, start)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _at(self, position: int) -> tuple[T, int] | None:
        """Return the item at `position` and the position after it; None if not there yet."""
        oldest = self._count - len(self._items)
        if position < oldest:
            return self._missed(oldest - position, oldest), oldest
        if position < self._count:
            return self._items[position - oldest], position + 1
        return None

    async def _wait(self) -> bool:
        """Wait for the next item or the end; false at the end."""
        if self._closed:
            return False
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
        return True


class Reader(Generic[T]):
    """An async iterator over a `History`.

    It is a class and not an async generator, so that breaking out of `async for`
    leaves nothing suspended.  Cancelling a wait loses no item.
    """

    def __init__(self, history: History[T], start: int) -> None:
        """Begin at position `start` of `history`."""
        self._history = history
        self._position = start
        self._closed = False

    def __aiter__(self) -> Reader[T]:
        return self

    async def __anext__(self) -> T:
        while not self._closed:
            if found := self._history._at(self._position):
                item, self._position = found
                return item
            if not await self._history._wait() and self._position >= self._history.count:
                break
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop iterating; the next item asked for ends the iteration."""
        self._closed = True
