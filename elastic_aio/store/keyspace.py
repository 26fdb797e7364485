"""Contents of a store: values, queues and pending waits, with its leases and watches.

Pure: the server passes in times and lease ids, and receives notifications through
the hooks of `Client`.  Operations that torch's TCPStore has behave as there:

* A wait ends when each key that was missing has been written once (`wait_table`).
* A non-empty queue counts as a present key for CHECK and WAIT, but has no value.
* A counter is decimal text under its key.
* COMPARE_SET of an absent key with a non-empty expectation stores nothing and
  returns the expectation.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

from elastic_aio.store import wire
from elastic_aio.store.lease_table import LeaseHolder, LeaseRecord, LeaseTable
from elastic_aio.store.limits import (
    BYTES_AT_ONCE,
    ENTRY,
    KEYS_AT_ONCE,
    TARGET,
    WORK_AT_ONCE,
    KeyspaceLimits,
    Usage,
    Work,
    in_parts,
)
from elastic_aio.store.limits import OperationRefused as OperationRefused
from elastic_aio.store.replies import CHANGE_DELETED, CHANGE_SET, WatchSnapshot
from elastic_aio.store.wait_table import ITEM, VALUES, WOKEN, Waiter, WaitHolder, WaitTable
from elastic_aio.store.watch_table import PresentPairs, Watcher, WatchTable

_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_LONGEST: Final = 64
_TOP: Final = 1 << 63

_LISTED: Final = 1 << 20
"""Keys in the copies that watches which begin read, together."""

PENDING: Final = object()
"""In place of a result: the client receives it later, through one of its hooks."""


class Client(LeaseHolder, Watcher, WaitHolder):
    """One client of a keyspace: its waits, leases and watches, and its notifications.

    Subclasses implement the hooks.  A hook is called in the middle of an operation
    and must not change the keyspace.  `tag` is the client's identifier of the request.
    """


class Keyspace:
    """The contents of one store, and the waits, leases and watches of its clients."""

    def __init__(self, limits: KeyspaceLimits | None = None, work: Work | None = None) -> None:
        """Begin empty; what operations leave for later is in `work`."""
        self.work = work = work or Work()
        self._limits = limits = limits or KeyspaceLimits()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self.usage = Usage(limits.stored)
        account = self.usage, work
        self.waits = WaitTable(limits, *account, self._values, self._queues, self._collect)
        self._waiters = self.waits.by_key
        self.leases = LeaseTable(self._remove, limits, work)
        self._leased = self.leases.lease_of
        self.watches = WatchTable(limits, *account)
        self._watched = self.watches.targets
        self._listed = 0
        # Functions of a key and an argument.
        handlers: dict[int, Callable[[bytes, Any], Any]] = {
            wire.SET: self.set,
            wire.COMPARE_SET: self.compare_set,
            wire.GET: self.get,
            wire.ADD: self.add,
            wire.CHECK: self.check,
            wire.NUM_KEYS: self.num_keys,
            wire.DELETE_KEY: self.delete,
            wire.APPEND: self.append,
            wire.MULTI_GET: self.multi_get,
            wire.MULTI_SET: self.multi_set,
            wire.QUEUE_PUSH: self.queue_push,
            wire.QUEUE_POP: self.queue_pop,
            wire.QUEUE_LEN: self.queue_len,
            wire.QUEUE_UNPOP: self.queue_unpop,
            wire.LIST_KEYS: self.list_keys,
            wire.PEEK: self.peek,
        }
        # Functions of a client, its tag, a key and an argument.
        client_handlers: dict[int, Callable[[Client, Any, bytes, Any], Any]] = {
            wire.WAIT: self.wait,
            wire.GET_WHEN_SET: self.get_when_set,
            wire.POP_WHEN_PUSHED: self.pop_when_pushed,
            wire.BARRIER: self.barrier,
            wire.RELEASE_LEASE: self.release_lease,
            wire.LEASED_SET: self.leased_set,
            wire.LEASED_COMPARE_SET: self.leased_compare_set,
        }
        # Lists by opcode, so that dispatching a request costs an index and a call.
        self.handlers = [handlers.get(op) for op in range(256)]
        self.client_handlers = [client_handlers.get(op) for op in range(256)]

    def __repr__(self) -> str:
        keys, queues, waits = len(self._values), len(self._queues), self.waits.count
        return f"<Keyspace with {keys} keys, {queues} queues, {waits} waits>"

    # Values.

    def set(self, key: bytes, value: bytes) -> None:
        # As in `_growth` and `_write`, without calls: this is the most frequent operation.
        old = self._values.get(key)
        if old is None or len(old) != len(value):
            more = len(value) + (ENTRY + len(key) if old is None else -len(old))
            if more > self.usage.left:
                self.usage.refuse()
            self.usage.left -= more
        self._values[key] = value
        if self._leased or self._watched or key in self._waiters:
            self._on_written(key, value)

    def get(self, key: bytes, _: None = None) -> bytes:
        return self._values.get(key, b"")

    def peek(self, key: bytes, _: None = None) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        text = self._values.get(key)
        # As in `parse_counter` and `wrap`, without calls.
        if text is not None and len(text) < 19 and text.isdigit():
            total = int(text) + amount
        else:
            total = parse_counter(text) + amount
        if not -_TOP <= total < _TOP:
            total = wrap(total)
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, pair: Sequence[bytes]) -> bytes:
        return self._compare_set(key, pair[0], pair[1])[0]

    def delete(self, key: bytes, _: None = None) -> int:
        return self._remove(key, CHANGE_DELETED)

    def append(self, key: bytes, more: bytes) -> None:
        value = self._values.get(key, b"") + more
        if len(value) > self._limits.grown:
            raise OperationRefused(f"a value may grow to {self._limits.grown} bytes")
        self.set(key, value)
        self.work.spend(len(value) >> 13)

    def multi_get(self, _: bytes, keys: Sequence[bytes]) -> list[bytes]:
        return self._checked_reply([self._values.get(key, b"") for key in keys])

    def have_values(self, keys: Sequence[bytes]) -> bool:
        """Return whether all keys have a value."""
        return all(key in self._values for key in keys)

    def size_of(self, key: bytes) -> int:
        """Return the size of a value."""
        return len(self._values.get(key, b""))

    def is_large(self, keys: Sequence[bytes]) -> bool:
        """Return whether the values of `keys` take long to send."""
        if 1 < len(keys) <= KEYS_AT_ONCE:
            return sum(map(len, filter(None, map(self._values.get, keys)))) > BYTES_AT_ONCE
        return len(keys) > 1

    def is_long(self, pairs: Sequence[tuple[bytes, bytes]]) -> bool:
        """Return whether `pairs` take long to set, for their number or for watches of prefixes."""
        if len(pairs) > KEYS_AT_ONCE or not self._watched:
            return len(pairs) > KEYS_AT_ONCE
        longest = max(map(len, dict(pairs)), default=0)
        return len(pairs) * self.watches.units(longest) > WORK_AT_ONCE

    def multi_set(self, _: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        # All or nothing; a key may be there twice.
        self.usage.take(sum(self._growth(key, value) for key, value in dict(pairs).items()))
        for key, value in pairs:
            self._write(key, value)

    def multi_set_in_parts(self, pairs: Sequence[tuple[bytes, bytes]]) -> Generator[int]:
        """Set many keys in parts, each of which yields their number; all or nothing."""
        reserved = 0
        try:
            for part in in_parts(pairs):
                size = sum(ENTRY + len(key) + len(value) for key, value in part)
                self.usage.take(size)
                reserved += size
                yield len(part)
            for key, value in pairs:
                size = ENTRY + len(key) + len(value)
                self.usage.left += size
                reserved -= size
                self.set(key, value)
                yield 1
        finally:
            self.usage.left += reserved

    def num_keys(self, _: bytes = b"", __: None = None) -> int:
        return len(self._values)

    def list_keys(self, _: bytes = b"", __: None = None) -> list[bytes]:
        self._check_items(len(self._values))
        return self._checked_reply(list(self._values))

    def check(self, _: bytes, keys: Sequence[bytes]) -> int:
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return 1
        return 0

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that are not present."""
        values, queues = self._values, self._queues
        return [key for key in keys if key not in values and key not in queues]

    # Queues.

    def queue_push(self, key: bytes, item: bytes) -> None:
        self._enqueue(key, item).append(item)
        self.waits.on_pushed(key, self._dequeue)

    def queue_unpop(self, key: bytes, item: bytes) -> None:
        self._enqueue(key, item).appendleft(item)
        self.waits.on_pushed(key, self._dequeue)

    def queue_pop(self, key: bytes, _: None = None) -> tuple[int, bytes]:
        queue = self._queues.get(key)
        return (0, b"") if queue is None else (len(queue), self._dequeue(key))

    def queue_len(self, key: bytes, _: None = None) -> int:
        return len(self._queues.get(key, ()))

    # Waits.

    def wait(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return 0 if all keys are present, else PENDING and call `on_woken` later."""
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return self._begin_wait(Waiter(client, tag, WOKEN), self.missing(keys))
        # A client has one wait per tag: a new wait replaces the pending one.
        if tag in client.waits:
            self.cancel(client, tag)
        return 0

    def get_when_set(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return the values if all are present, else PENDING and call `on_values` later."""
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return self._collect(keys)
        return self._begin_wait(Waiter(client, tag, VALUES, keys), missing)

    def pop_when_pushed(self, client: Client, tag: Any, key: bytes, _: None) -> Any:
        """Return the oldest item if there is one, else PENDING and call `on_item` later."""
        if key in self._queues:
            return self._dequeue(key)
        return self._begin_wait(Waiter(client, tag, ITEM), (key,))

    def barrier(self, client: Client, tag: Any, key: bytes, size: int) -> Any:
        """Count an arrival; return 0 from the `size`-th on, else PENDING (`on_woken`)."""
        count = self._number(key) + 1
        value = b"%d" % count
        growth = self._growth(key, value)
        self.usage.take(growth)
        if count >= size:
            self._write(key, value)
            return 0
        try:
            self.waits.begin(Waiter(client, tag, WOKEN), (key,))
        except OperationRefused:
            self.usage.left += growth
            raise
        self._values[key] = value
        if self._watched:
            self.watches.record(CHANGE_SET, key, value)
        return PENDING

    def cancel(self, client: Client, tag: Any) -> bool:
        """End the wait or watch `tag`; return whether there was one."""
        return self.waits.cancel(client, tag) or self.watches.cancel(client, tag)

    def _begin_wait(self, waiter: Waiter, missing: Sequence[bytes]) -> object:
        self.waits.begin(waiter, missing)
        return PENDING

    # Leases and watches.

    def leased_set(self, client: Client, _: Any, key: bytes, pair: Sequence[bytes]) -> None:
        lease = self._lease(client, pair[1])
        self.set(key, pair[0])
        self.leases.bind(lease, key)

    def leased_compare_set(
        self, client: Client, _: Any, key: bytes, parts: Sequence[bytes]
    ) -> bytes:
        lease = self._lease(client, parts[2])
        current, is_stored = self._compare_set(key, parts[0], parts[1])
        if is_stored:
            self.leases.bind(lease, key)
        return current

    def _lease(self, client: Client, lease_id: bytes) -> LeaseRecord:
        lease = self.leases.find(lease_id)
        if lease is None:
            raise OperationRefused("the lease has ended")
        if lease.holder is not client:
            # Its holder has given this connection up, and a late value would replace a newer one.
            raise OperationRefused("the lease has moved to another connection")
        return lease

    def grant_lease(
        self, client: Client, tag: Any, lease_id: bytes, terms: tuple[int, int], now: float
    ) -> bytes:
        """Create a lease; `terms` are its ttl and linger in milliseconds."""
        if not self.leases.grant(client, tag, lease_id, terms[0] / 1000, terms[1] / 1000, now):
            raise OperationRefused("there are too many leases")
        return lease_id

    def release_lease(self, client: Client, tag: Any, lease_id: bytes, _: None) -> Any:
        """Return 0 if the lease has ended, else PENDING and call `on_released`, maybe at once."""
        lease = self.leases.find(lease_id)
        if lease is None:
            return 0
        self.leases.release(lease, CHANGE_DELETED, partial(client.on_released, tag))
        return PENDING

    def watch(
        self, client: Client, tag: Any, key: bytes, last_revision: int, *, is_prefix: bool
    ) -> WatchSnapshot:
        """Begin a watch, or continue one after `last_revision` if that is not negative."""
        parts = self.watch_in_parts(client, tag, key, last_revision, is_prefix=is_prefix)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                snapshot: WatchSnapshot = end.value
                return snapshot

    def watch_in_parts(
        self, client: Client, tag: Any, key: bytes, last_revision: int, *, is_prefix: bool
    ) -> Generator[int, None, WatchSnapshot]:
        """Begin a watch as `watch` does, in parts; each yields the number of its keys.

        The snapshot is that of the moment when it is returned, and the watch begins then:
        it has the changes that were made between the parts.
        """
        snapshot = self.watches.begin(client, tag, key, is_prefix, last_revision)
        values = self._values
        if not snapshot.is_whole:
            return snapshot
        if not is_prefix:
            return snapshot._replace(pairs=((key, values[key]),) if key in values else ())
        self.watches.cancel(client, tag)
        present = PresentPairs()
        while self._listed and self._listed + len(values) > _LISTED:
            yield KEYS_AT_ONCE
        self.watches.begin(present, None, key, True, -1)
        names = list(values)
        self._listed += len(names)
        try:
            for keys in in_parts(names):
                found = [name for name in keys if name.startswith(key) and name in values]
                present.pairs.update((name, values[name]) for name in found)
                self._check_items(len(present.pairs))
                yield len(keys)
            self.watches.catch_up(present, None)
        finally:
            self._listed -= len(names)
            self.watches.cancel(present, None)
        snapshot = self.watches.begin(client, tag, key, True, -1)
        return snapshot._replace(pairs=present.pairs.items())

    def forget(self, client: Client, now: float) -> bool:
        """Remove a client whose connection has ended; its leases and watches may linger.

        Returns:
            Whether it has had so many that this must be called again.
        """
        self.work.begin()
        self.watches.forget(client, now)
        has_more = self.leases.forget(client, now)
        return self.waits.forget(client) or has_more

    def next_deadline(self) -> float | None:
        """Return when `expire` is due; None: not before the next operation."""
        times = [self.leases.next_deadline(), self.watches.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """End leases and lingering watches whose deadline has passed, some of them if many."""
        self.work.begin()
        self.leases.expire(now)
        self.watches.expire(now)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        current = self._values.get(key)
        if (current is None and expected) or (current is not None and current != expected):
            return (expected if current is None else current), False
        self.set(key, desired)
        return desired, True

    def _growth(self, key: bytes, value: bytes) -> int:
        """Return the bytes that the store grows by when `key` is set to `value`."""
        old = self._values.get(key)
        return len(value) + (ENTRY + len(key) if old is None else -len(old))

    def _write(self, key: bytes, value: bytes) -> None:
        """Set a value whose growth has been accounted for."""
        self._values[key] = value
        if self._leased or self._watched or key in self._waiters:
            self._on_written(key, value)

    def _collect(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the values of keys that all have one."""
        return self._checked_reply([self._values[key] for key in keys])

    def _check_items(self, count: int) -> None:
        """Refuse a reply with so many keys that it would block the event loop."""
        if count > self._limits.items:
            limit = self._limits.items
            raise OperationRefused(f"the reply has {count} keys: the limit is {limit} keys")

    def _checked_reply(self, items: list[bytes]) -> list[bytes]:
        """Return the items of a reply; refuse what is too large before it is encoded."""
        if len(items) > 1:
            self.check_reply(sum(map(len, items)) + 8 * len(items))
        return items

    def check_reply(self, size: int) -> None:
        """Refuse a reply with so many bytes."""
        limit = self._limits.reply
        if size > limit:
            raise OperationRefused(f"the reply has {size} bytes: the limit is {limit} bytes")

    def _enqueue(self, key: bytes, item: bytes) -> deque[bytes]:
        """Account for an item; return the queue to put it into."""
        queue = self._queues.get(key)
        size = ENTRY + len(item)
        if queue is not None:
            self.usage.take(size)
            return queue
        self.usage.take(size + TARGET + len(key))
        queue = self._queues[key] = deque()
        return queue

    def _dequeue(self, key: bytes) -> bytes:
        """Take the oldest item of a queue that is not empty."""
        queue = self._queues[key]
        item = queue.popleft()
        self.usage.left += ENTRY + len(item)
        if not queue:
            del self._queues[key]
            self.usage.left += TARGET + len(key)
        return item

    def _number(self, key: bytes) -> int:
        return parse_counter(self._values.get(key))

    def _on_written(self, key: bytes, value: bytes) -> None:
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(CHANGE_SET, key, value)
        if key in self._waiters:
            self.waits.on_written(key)

    def _remove(self, key: bytes, kind: int) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self.usage.left += ENTRY + len(key) + len(value)
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(kind, key, b"")
        return 1


def parse_counter(text: bytes | None) -> int:
    """Parse a counter as strtoll(3) does: leading space, sign, digits, then anything.

    Raises:
        OperationRefused: that is no number of 64 bits.
    """
    if text is None:
        return 0
    if len(text) < 19 and text.isdigit():
        return int(text)
    match = _NUMBER.match(text, 0, _LONGEST)
    # Twenty characters hold every 64-bit number; more leading zeros or spaces are refused too.
    is_short = match and len(match[1]) <= 20 and match.end() < _LONGEST
    number = int(match[1]) if match and is_short else _TOP
    if not -_TOP <= number < _TOP:
        raise OperationRefused("the value is not a 64-bit number")
    return number


def wrap(total: int) -> int:
    """Return the signed number of 64 bits that a sum becomes."""
    if not -_TOP <= total < _TOP:
        total = (total + _TOP) % (2 * _TOP) - _TOP
    return total
