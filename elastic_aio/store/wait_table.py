"""Pending waits of a store: the clients that wait for keys, oldest first.

A wait records the keys that are missing when it begins, and ends when each of them has
been written once, even if a key has been deleted since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elastic_aio.store.limits import (
    KEYS_AT_ONCE,
    WAIT,
    KeyspaceLimits,
    OperationRefused,
    Usage,
    Work,
)

# Modes of a waiter: what it is sent when it is done.
WOKEN, VALUES, ITEM = range(3)


class WaitHolder:
    """The wait half of a client: its pending waits, by tag."""

    is_gone = False
    """Whether it receives nothing any more."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: dict[Any, Waiter] = {}
        self.awaited = 0
        """The number of pairs of a pending wait and a missing key."""

    def on_woken(self, tag: Any) -> None:
        """A WAIT or BARRIER is done: all its keys are present."""
        raise NotImplementedError

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        """A GET_WHEN_SET is done: all its keys are present, with these values."""
        raise NotImplementedError

    def on_present(self, tag: Any, keys: Sequence[bytes]) -> bool:
        """A GET_WHEN_SET is done; return whether the client reads its values itself, in parts."""
        return False

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
        limits: KeyspaceLimits,
        usage: Usage,
        work: Work,
        values: Mapping[bytes, bytes],
        queues: Mapping[bytes, object],
        collect: Callable[[Sequence[bytes]], list[bytes]],
    ) -> None:
        """Begin without waits.

        Args:
            limits: those of the store.
            usage: the account of the store's bytes.
            work: takes the notifications.
            values: those of the store.
            queues: those of the store that are not empty.
            collect: returns the values of keys as one reply; may refuse.
        """
        self._limits = limits
        self._usage = usage
        self._work = work
        self._values = values
        self._queues = queues
        self._collect = collect
        # An ordered set for each key.
        self.by_key: dict[bytes, dict[Waiter, None]] = {}
        """By missing key: the waiters that end when it is written."""
        # Of a dict that has been emptied from the front, the first key takes long to find.
        self.by_queue: dict[bytes, OrderedDict[Waiter, None]] = {}
        """By empty queue: the waiters that end when an item is pushed; WAIT is in both."""
        self.count = 0
        """The number of pairs of a pending wait and a missing key."""

    def begin(self, waiter: Waiter, missing: Sequence[bytes]) -> None:
        """Wait for the `missing` keys; replaces a wait of the client with the same tag.

        Raises:
            OperationRefused: there are too many waits.
        """
        if waiter.tag in waiter.client.waits:
            self.cancel(waiter.client, waiter.tag)
        keys = tuple(dict.fromkeys(missing)) if len(missing) > 1 else missing
        if self.count + len(keys) > self._limits.waits:
            raise OperationRefused(f"too many waits: {self.count} keys are being waited for")
        limit = self._limits.waits_each
        if waiter.client.awaited + len(keys) > limit:
            raise OperationRefused(f"too many waits of one client: the limit is {limit} keys")
        size = WAIT * (len(keys) + 1) + sum(map(len, keys))
        if len(waiter.requested) > 1:
            size += sum(map(len, waiter.requested)) + 48 * len(waiter.requested)
        self._usage.take(size)
        waiter.size = size
        self._work.spend(len(keys) // 4)
        self._add(waiter, keys)

    def cancel(self, client: WaitHolder, tag: Any) -> bool:
        """End the wait `tag`; return whether there was one."""
        waiter = client.waits.get(tag)
        if waiter is None:
            return False
        waiter.missing = 0
        self._end(waiter)
        self._work.run(self._remove_keys(waiter))
        return True

    def forget(self, client: WaitHolder) -> bool:
        """End some waits of a client that is gone; return whether it has more."""
        left = KEYS_AT_ONCE
        while client.waits and left > 0:
            tag, waiter = client.waits.popitem()
            waiter.missing = 0
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
        """Notify the waiters for `key`, which has been written, oldest first."""
        self._work.run(self._notify(key, list(self.by_key[key])))

    def on_pushed(self, key: bytes, take: Callable[[bytes], bytes]) -> None:
        """Notify the waiters for the queue `key`, which has got an item, oldest first.

        `take` removes the oldest item of a queue and returns it.
        """
        if key in self.by_queue:
            self._work.run(self._notify_queue(key, take))

    def _add(self, waiter: Waiter, keys: Sequence[bytes]) -> None:
        waiter.keys = keys
        waiter.missing = len(keys)
        waiter.client.waits[waiter.tag] = waiter
        for key in keys[:KEYS_AT_ONCE]:
            self._await(key, waiter)
        if len(keys) > KEYS_AT_ONCE:
            self._work.run(self._await_others(waiter, keys))

    def _await(self, key: bytes, waiter: Waiter) -> None:
        self.count += 1
        waiter.client.awaited += 1
        if waiter.mode != ITEM:
            self.by_key.setdefault(key, {})[waiter] = None
        if waiter.mode != VALUES:
            self.by_queue.setdefault(key, OrderedDict())[waiter] = None

    def _await_others(self, waiter: Waiter, keys: Sequence[bytes]) -> Iterator[int]:
        for key in islice(keys, KEYS_AT_ONCE, None):
            if waiter.missing <= 0:
                return  # it has ended
            if key in self._values or (waiter.mode == WOKEN and key in self._queues):
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
                    return
            else:
                self._await(key, waiter)
            yield 1

    def _remove(self, key: bytes, waiter: Waiter) -> bool:
        """Remove `waiter` from the waiters for `key`; return whether it was one."""
        was_one = False
        tables: tuple[dict[bytes, Any], ...] = self.by_key, self.by_queue
        for table in tables:
            waiters = table.get(key)
            if waiters is not None and waiters.pop(waiter, self) is None:
                was_one = True
                if not waiters:
                    del table[key]
        if was_one:
            self.count -= 1
            waiter.client.awaited -= 1
        return was_one

    def _remove_keys(self, waiter: Waiter) -> Iterator[int]:
        for key in waiter.keys:
            self._remove(key, waiter)
            yield 1

    def _notify(self, key: bytes, waiters: list[Waiter]) -> Iterator[int]:
        for waiter in waiters:
            # Its wait may have ended since the key was written.
            if self._remove(key, waiter):
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
            yield 1 + len(waiter.requested) // 4

    def _notify_queue(self, key: bytes, take: Callable[[bytes], bytes]) -> Iterator[int]:
        while key in self.by_queue and key in self._queues:
            waiter = next(iter(self.by_queue[key]))
            self._remove(key, waiter)
            if waiter.mode == ITEM and not waiter.client.is_gone:
                self._end(waiter)
                waiter.client.on_item(waiter.tag, take(key))
            elif not waiter.client.is_gone:
                # The item stays: a torch client pops it with another request once woken.
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
                    return
            yield 1

    def _complete(self, waiter: Waiter) -> None:
        if waiter.mode == WOKEN:
            self._end(waiter)
            waiter.client.on_woken(waiter.tag)
            return
        if waiter.client.on_present(waiter.tag, waiter.requested):
            self._end(waiter)
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
