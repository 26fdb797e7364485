"""Pending waits of a store: the clients that wait for keys, oldest first.

A wait records the keys that are missing when it begins, and ends when each of them has
been written once, even if a key has been deleted since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from elastic_aio.store.limits import KEYS_AT_ONCE, WAIT, OperationRefused, Usage, in_parts

# Modes of a waiter: what it is sent when it is done.
WOKEN, VALUES, ITEM = range(3)


class WaitHolder:
    """The wait half of a client: its pending waits, by tag."""

    is_gone = False
    """Whether it receives nothing any more."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[Any, Waiter] = {}

    def on_woken(self, tag: Any) -> None:
        """A WAIT or BARRIER is done: all its keys are present."""
        raise NotImplementedError

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        """A GET_WHEN_SET is done: all its keys are present, with these values."""
        raise NotImplementedError

    def on_item(self, tag: Any, item: bytes) -> None:
        """A POP_WHEN_PUSHED is done and takes `item`."""
        raise NotImplementedError

    def on_refused(self, tag: Any, why: str) -> None:
        """A GET_WHEN_SET is done: all its keys are present, but cannot be sent."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Waiter:
    """One pending wait; `requested` are the keys of a GET_WHEN_SET."""

    client: WaitHolder
    tag: Any
    mode: int
    requested: Sequence[bytes] = ()
    keys: Sequence[bytes] = ()
    missing: int = 0
    size: int = 0


class WaitTable:
    """All pending waits of one store."""

    def __init__(
        self,
        limit: int,
        usage: Usage,
        values: Mapping[bytes, bytes],
        queues: Mapping[bytes, object],
        collect: Callable[[Sequence[bytes]], list[bytes]],
    ) -> None:
        """Begin without waits.

        Args:
            limit: pairs of a pending wait and a missing key.
            usage: the account of the store's bytes.
            values: those of the store.
            queues: those of the store that are not empty.
            collect: returns the values of keys as one reply; may refuse.
        """
        self._limit = limit
        self._usage = usage
        self._values = values
        self._queues = queues
        self._collect = collect
        # An ordered set for each key.
        self.by_key: dict[bytes, dict[Waiter, None]] = {}
        """By missing key: the waiters for it."""
        self.count = 0
        """The number of pairs of a pending wait and a missing key."""
        self.unnotified: list[tuple[bytes, Iterator[list[Waiter]]]] = []
        """Further waiters for keys that have been written, in parts, for `notify_others`."""

    def begin(self, waiter: Waiter, missing: Sequence[bytes]) -> None:
        """Wait for the `missing` keys; replaces a wait of the client with the same tag.

        Raises:
            OperationRefused: there are too many waits.
        """
        if waiter.tag in waiter.client.waits:
            self.cancel(waiter.client, waiter.tag)
        keys = tuple(dict.fromkeys(missing)) if len(missing) > 1 else missing
        if self.count + len(keys) > self._limit:
            raise OperationRefused(f"too many waits: {self.count} keys are being waited for")
        size = WAIT * (len(keys) + 1) + sum(map(len, keys))
        if len(waiter.requested) > 1:
            size += sum(map(len, waiter.requested)) + 48 * len(waiter.requested)
        self._usage.take(size)
        waiter.size = size
        self._add(waiter, keys)

    def cancel(self, client: WaitHolder, tag: Any) -> bool:
        """End the wait `tag`; return whether there was one."""
        waiter = client.waits.get(tag)
        if waiter is None:
            return False
        for key in waiter.keys:
            self._remove(key, waiter)
        self._end(waiter)
        return True

    def forget(self, client: WaitHolder) -> bool:
        """End some waits of a client that is gone; return whether it has more."""
        left = KEYS_AT_ONCE
        while client.waits and left > 0:
            tag, waiter = client.waits.popitem()
            kept = max(0, len(waiter.keys) - left)
            left -= len(waiter.keys) - kept + 1
            for key in waiter.keys[kept:]:
                self._remove(key, waiter)
            waiter.keys = waiter.keys[:kept]
            if kept:
                client.waits[tag] = waiter
            else:
                self._usage.left += waiter.size
        return bool(client.waits)

    def on_written(self, key: bytes) -> None:
        """Notify the waiters for `key`, which has been written, oldest first.

        If it has many, the others are left to `notify_others`.
        """
        waiters = list(self.by_key[key])
        parts = in_parts(waiters)
        self._notify(key, next(parts))
        if len(waiters) > KEYS_AT_ONCE:
            self.unnotified.append((key, parts))

    def notify_others(self) -> Iterator[None]:
        """Notify the waiters that are `unnotified` now, in parts; iterate to the end."""
        unnotified, self.unnotified = self.unnotified, []
        return chain.from_iterable(
            map(partial(self._notify, key), parts) for key, parts in unnotified
        )

    def on_pushed(self, key: bytes, take: Callable[[bytes], bytes]) -> None:
        """Notify the waiters for the queue `key`, which has got an item, oldest first.

        `take` removes the oldest item of a queue and returns it.
        """
        for waiter in list(self.by_key.get(key, ())):
            if waiter.mode == VALUES or waiter.client.is_gone:
                continue
            self._remove(key, waiter)
            if waiter.mode == ITEM:
                self._end(waiter)
                waiter.client.on_item(waiter.tag, take(key))
                if key not in self._queues:
                    return
                continue
            # The item stays: a torch client pops it with another request once woken.
            waiter.missing -= 1
            if not waiter.missing:
                self._complete(waiter)
                return

    def _add(self, waiter: Waiter, keys: Sequence[bytes]) -> None:
        waiter.keys = keys
        waiter.missing = len(keys)
        waiter.client.waits[waiter.tag] = waiter
        self.count += len(keys)
        for key in keys:
            self.by_key.setdefault(key, {})[waiter] = None

    def _remove(self, key: bytes, waiter: Waiter) -> bool:
        """Remove `waiter` from the waiters for `key`; return whether it was one."""
        waiters = self.by_key.get(key)
        if waiters is None or waiters.pop(waiter, self) is not None:
            return False
        self.count -= 1
        if not waiters:
            del self.by_key[key]
        return True

    def _notify(self, key: bytes, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            # Its wait may have ended since the key was written.
            if waiter.mode != ITEM and self._remove(key, waiter):
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)

    def _complete(self, waiter: Waiter) -> None:
        if waiter.mode == WOKEN:
            self._end(waiter)
            waiter.client.on_woken(waiter.tag)
            return
        # A key may have been set and deleted while others were missing: wait for it again.
        missing = [key for key in waiter.requested if key not in self._values]
        if missing:
            self._add(waiter, tuple(dict.fromkeys(missing)))
            return
        self._end(waiter)
        try:
            values = self._collect(waiter.requested)
        except OperationRefused as error:
            waiter.client.on_refused(waiter.tag, str(error))
        else:
            waiter.client.on_values(waiter.tag, values)

    def _end(self, waiter: Waiter) -> None:
        del waiter.client.waits[waiter.tag]
        self._usage.left += waiter.size
