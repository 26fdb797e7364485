"""A stream with one writer and many readers: the last items are kept for slow readers.

A reader has a position, not a queue.  The writer never waits, an idle reader costs
nothing, and a reader that falls behind the kept items gets the number of items that it
missed.  The last item is always kept, so every reader gets the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from elastic_aio.aio import Notifier

T = TypeVar("T")


class EventHistory(Generic[T]):
    """The recent items of a stream, which `close` ends."""

    def __init__(self, keep: int, on_gap: Callable[[int, int], T]) -> None:
        """Keep the last `keep` items.

        `on_gap` makes the item that stands for dropped ones; it is called with their number
        and the position of the oldest kept item.
        """
        self._items: deque[T] = deque(maxlen=keep)
        self._on_gap = on_gap
        self.count = 0
        """How many items were ever added, which is the position of the next one."""
        self._is_closed = False
        self._changed = Notifier()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"<EventHistory {state} after {self.count} items, {len(self._items)} kept>"

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended."""
        return self._is_closed

    def append(self, item: T) -> None:
        """Add an item and wake the readers."""
        self._items.append(item)
        self.count += 1
        self._changed.notify_all()

    def close(self) -> None:
        """End the stream: readers stop after the last item."""
        self._is_closed = True
        self._changed.notify_all()

    def read(self, start: int = 0) -> EventReader[T]:
        """Return a reader that starts at position `start`."""
        return EventReader(self, start)

    def _at(self, position: int) -> tuple[T, int] | None:
        """Return the item at `position` and the next position; None if not there yet."""
        oldest = self.count - len(self._items)
        if position < oldest:
            return self._on_gap(oldest - position, oldest), oldest
        if position < self.count:
            return self._items[position - oldest], position + 1
        return None


class EventReader(Generic[T]):
    """An async iterator over an `EventHistory`.

    It is a class and not an async generator, so that breaking out of `async for` leaves
    no suspended frame.

    Cancellation: loses no item.
    """

    def __init__(self, history: EventHistory[T], start: int) -> None:
        self._history = history
        self._position = start
        self._is_closed = False

    def __aiter__(self) -> EventReader[T]:
        return self

    async def __anext__(self) -> T:
        history = self._history
        while not self._is_closed:
            if entry := history._at(self._position):
                item, self._position = entry
                return item
            if history._is_closed:
                break
            await history._changed.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration: the next item requested raises `StopAsyncIteration`."""
        self._is_closed = True
