"""The events of a job of several nodes, as they stand in its store, and how they are written.

Under the prefix `elastic_aio/<run id>`::

    events#             how many numbers have been given
    events/@            which stream this is: chance, set by the first writer
    events/<number>     one event as JSON, its number in 12 digits

A writer takes numbers first and sets the keys of all of them at once, so a gap closes
within a round trip, unless its writer has died in between.  The last `KEPT` events
stay.  A store that replaces a lost one begins another stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.events import Event, event_from_json, event_to_json
from elastic_aio.store import Store

__all__ = ["COUNT", "EVENTS", "IDENTITY", "KEPT", "EventStream", "event_in", "number_in"]

KEPT: Final = 1_000
"""How many events stay in the store."""

COUNT: Final = "events#"
EVENTS: Final = "events/"
IDENTITY: Final = "events/@"

_SIZE: Final = 16_384
"""Bytes that an event may have; of a longer one, texts and lists are cut short."""

_CUTS: Final = ((4_000, 256), (1_000, 32), (200, 8), (40, 1))
"""Characters of a text and items of a list: what is left of a long event, tried in turn."""

_AT_ONCE: Final = 64
"""Events that are set, or deleted, with one round trip."""


class EventStream:
    """A node's pen for the job's events.  Any number of nodes may write at once."""

    def __init__(self, store: Store) -> None:
        """Write into `store`, as seen under `elastic_aio/<run id>`; it stays the caller's."""
        self._store = store

    async def write(self, events: Sequence[Event]) -> None:
        """Append events; each gets the stream's next number as its `seq`.

        Cancelling it in the middle, and a store lost then, may leave a gap, of which
        readers are told.

        Raises:
            StoreError: the store cannot take them.
        """
        for first in range(0, len(events), _AT_ONCE):
            await self._write(events[first : first + _AT_ONCE])

    async def _write(self, events: Sequence[Event]) -> None:
        # Each time: another server may have taken the place of the one before.
        _, end = await asyncio.gather(
            self._store.compare_set(IDENTITY, b"", os.urandom(16).hex()),
            self._store.add(COUNT, len(events)),
        )
        numbers = range(end - len(events), end)
        items = {
            _key(number): _encoded(event, number)
            for number, event in zip(numbers, events, strict=True)
        }
        try:
            await self._store.multi_set(items)
        except StoreLost:
            # The same keys with the same values: done twice is done once.
            await self._store.multi_set(items)
        with contextlib.suppress(StoreError):  # they are written: nothing to complain of
            old = (number - KEPT for number in numbers if number >= KEPT)
            await asyncio.gather(*(self._store.delete(_key(number)) for number in old))


def _key(number: int) -> str:
    return f"{EVENTS}{number:012d}"


def number_in(text: str) -> int:
    """Return the number that a text is; -1 for one that is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def event_in(value: bytes) -> Event | None:
    """Return the event; None if these bytes are none."""
    try:
        return event_from_json(value)
    except (ValueError, RecursionError):
        return None


def _encoded(event: Event, number: int) -> bytes:
    whole = msgspec.to_builtins(msgspec.structs.replace(event, seq=number))
    body = b""
    # Cut before it is encoded: a whole one may be far too long for that.
    for characters, items in _CUTS:
        short = _cut(whole, characters, items)
        body = event_to_json(msgspec.convert(short, type(event)))
        if len(body) <= _SIZE:
            break
    return body


def _cut(value: Any, characters: int, items: int) -> Any:
    match value:
        case str() if len(value) > characters:
            return f"{value[: characters - 1]}…"
        case dict():
            return {key: _cut(one, characters, items) for key, one in value.items()}
        case list() | tuple():
            return [_cut(one, characters, items) for one in value[:items]]
    return value
