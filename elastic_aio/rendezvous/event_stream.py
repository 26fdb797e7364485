"""The event stream of a job of several nodes: its keys in the store, and its writer.

Under the prefix of the run's generation::

    events#             how many numbers have been allocated
    events/<number>     one event as JSON, its number in 12 digits

A writer allocates numbers first and then sets all their keys at once, so a gap closes
within a round trip, unless its writer is killed in between.  The last `KEPT` events
are kept.  A store that replaces a lost one begins another stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.event_json import event_from_json, event_to_json
from elastic_aio.events import Event
from elastic_aio.store import Store
from elastic_aio.text import truncate

KEPT: Final = 1_000
"""How many events are kept in the store."""

COUNT: Final = "events#"
EVENTS: Final = "events/"

_SIZE_MAX: Final = 16_384
"""Most bytes of an event; the texts and lists of a longer one are truncated."""

_LIMITS: Final = ((4_000, 256), (1_000, 32), (200, 8), (40, 1))
"""Most characters of a text and items of a list in a long event, tried in turn."""

_BATCH: Final = 64
"""Events that are set, or deleted, in one round trip."""


class EventStreamWriter:
    """Appends events to the job's stream; any number of nodes may write at once."""

    def __init__(self, store: Store) -> None:
        """Write into `store`, with the prefix of a generation; the caller closes it."""
        self._store = store

    async def write(self, events: Sequence[Event]) -> None:
        """Append events; each gets the stream's next number as its `seq`.

        Cancellation: may leave a gap, as a lost store does; readers get `EventsMissed`.

        Raises:
            StoreError: the store is lost, or refuses the events.
        """
        for first in range(0, len(events), _BATCH):
            await self._write(events[first : first + _BATCH])

    async def _write(self, events: Sequence[Event]) -> None:
        end = await self._store.add(COUNT, len(events))
        numbers = range(end - len(events), end)
        items = {
            _key(number): _encode(event, number)
            for number, event in zip(numbers, events, strict=True)
        }
        try:
            await self._store.multi_set(items)
        except StoreLost:
            # Setting the same keys to the same values again is idempotent.
            await self._store.multi_set(items)
        with contextlib.suppress(StoreError):  # the new events are written
            old = (number - KEPT for number in numbers if number >= KEPT)
            await asyncio.gather(*(self._store.delete(_key(number)) for number in old))


async def delete_events(store: Store) -> None:
    """Delete the stream of an ended job.

    Raises:
        StoreError: the store is lost.
    """
    count = await count_events(store)
    keys = [COUNT, *map(_key, range(max(0, count - KEPT), count))]
    await asyncio.gather(*map(store.delete, keys))


async def count_events(store: Store) -> int:
    """Return how many numbers of events have been allocated.

    Raises:
        StoreError: the store is lost.
    """
    return max(0, parse_seq((await store.peek(COUNT) or b"").decode("ascii", "replace")))


def _key(number: int) -> str:
    return f"{EVENTS}{number:012d}"


def parse_seq(text: str) -> int:
    """Return the number in a text; -1 if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def decode_event(value: bytes) -> Event | None:
    """Return the event; None if the bytes cannot be decoded."""
    try:
        return event_from_json(value)
    except (ValueError, RecursionError):
        return None


def _encode(event: Event, number: int) -> bytes:
    whole = msgspec.to_builtins(msgspec.structs.replace(event, seq=number))
    body = b""
    # Truncated before it is encoded: the whole event may be far too long for that.
    for characters, items in _LIMITS:
        short = _truncate(whole, characters, items)
        body = event_to_json(msgspec.convert(short, type(event)))
        if len(body) <= _SIZE_MAX:
            break
    return body


def _truncate(value: Any, characters: int, items: int) -> Any:
    match value:
        case str():
            return truncate(value, characters)
        case dict():
            return {key: _truncate(item, characters, items) for key, item in value.items()}
        case list() | tuple():
            return [_truncate(item, characters, items) for item in value[:items]]
    return value
