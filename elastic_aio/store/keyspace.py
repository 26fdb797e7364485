"""Contents of a store: values, queues and pending waits, with its leases and watches.

Pure: the server passes in times and lease ids, and receives notifications through
the hooks of `Client`.  Operations that torch's TCPStore has behave as there:

* A wait records the keys that are missing when it begins, and ends when each of them
  has been written once, even if a key has been deleted since.
* A non-empty queue counts as a present key for CHECK and WAIT, but has no value.
* A counter is decimal text under its key.
* COMPARE_SET of an absent key with a non-empty expectation stores nothing and
  returns the expectation.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elastic_aio.store import wire
from elastic_aio.store.lease_table import LeaseHolder, LeaseRecord, LeaseTable
from elastic_aio.store.replies import CHANGE_DELETED, CHANGE_EXPIRED, CHANGE_SET, WatchSnapshot
from elastic_aio.store.watch_table import Watcher, WatchTable

# Modes of a waiter: what it is sent when it is done.
_WOKEN, _VALUES, _ITEM = range(3)

_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_TOP: Final = 1 << 63

PENDING: Final = object()
"""In place of a result: the client receives it later, through one of its hooks."""


class OperationRefused(Exception):
    """The keyspace refuses an operation and is unchanged; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class KeyspaceLimits:
    """Limits on what all clients together may occupy.

    Args:
        waits: pairs of a pending wait and a missing key.
        watches: open watches.
        leases: leases that have not ended.
        grown: bytes to which APPEND may extend a value.
        history: recent changes of watched keys, kept for clients that reconnect.
        history_size: bytes of keys and values in those changes.
    """

    waits: int = 1_000_000
    watches: int = 100_000
    leases: int = 100_000
    grown: int = 64 << 20
    history: int = 65_536
    history_size: int = 16 << 20


class Client(LeaseHolder, Watcher):
    """One client of a keyspace: its waits, leases and watches, and its notifications.

    Subclasses implement the hooks.  A hook is called in the middle of an operation
    and must not call the keyspace.  `tag` is the client's identifier of the request.
    """

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


@dataclass(slots=True, eq=False)
class Waiter:
    """One pending wait."""

    client: Client
    tag: Any
    mode: int
    requested: Sequence[bytes]
    keys: Sequence[bytes] = ()
    missing: int = 0


class Keyspace:
    """The contents of one store, and the waits, leases and watches of its clients."""

    def __init__(self, limits: KeyspaceLimits | None = None) -> None:
        """Begin empty."""
        self._limits = limits = limits or KeyspaceLimits()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        # By missing key: the waiters for it, an ordered set.
        self._waiters: dict[bytes, dict[Waiter, None]] = {}
        self.wait_count = 0
        """The number of pairs of a pending wait and a missing key."""
        self.leases = LeaseTable(lambda key: self._remove(key, CHANGE_EXPIRED), limits.leases)
        self._leased = self.leases.lease_of
        self.watches = WatchTable(limits.watches, limits.history, limits.history_size)
        self._watched = self.watches.targets
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
        keys, queues, waits = len(self._values), len(self._queues), self.wait_count
        return f"<Keyspace with {keys} keys, {queues} queues, {waits} waits>"

    # Values.

    def set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if self._leased or self._watched or key in self._waiters:
            self._on_written(key, value)

    def get(self, key: bytes, _: None = None) -> bytes:
        return self._values.get(key, b"")

    def peek(self, key: bytes, _: None = None) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        total = self._number(key) + amount
        if not -_TOP <= total < _TOP:
            total = (total + _TOP) % (2 * _TOP) - _TOP
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

    def multi_get(self, _: bytes, keys: Sequence[bytes]) -> list[bytes]:
        return [self._values.get(key, b"") for key in keys]

    def multi_set(self, _: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in pairs:
            self.set(key, value)

    def num_keys(self, _: bytes = b"", __: None = None) -> int:
        return len(self._values)

    def list_keys(self, _: bytes = b"", __: None = None) -> list[bytes]:
        return list(self._values)

    def check(self, _: bytes, keys: Sequence[bytes]) -> int:
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return 1
        return 0

    # Queues.

    def queue_push(self, key: bytes, item: bytes) -> None:
        self._queues.setdefault(key, deque()).append(item)
        self._serve_item(key)

    def queue_unpop(self, key: bytes, item: bytes) -> None:
        self._queues.setdefault(key, deque()).appendleft(item)
        self._serve_item(key)

    def queue_pop(self, key: bytes, _: None = None) -> tuple[int, bytes]:
        queue = self._queues.get(key)
        if queue is None:
            return 0, b""
        length, item = len(queue), queue.popleft()
        if not queue:
            del self._queues[key]
        return length, item

    def queue_len(self, key: bytes, _: None = None) -> int:
        return len(self._queues.get(key, ()))

    # Waits.

    def wait(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return 0 if all keys are present, else PENDING and call `on_woken` later."""
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                missing = [key for key in keys if key not in values and key not in queues]
                return self._begin_wait(Waiter(client, tag, _WOKEN, keys), missing)
        # A client has one wait per tag: a new wait replaces the pending one.
        if tag in client.waits:
            self.cancel(client, tag)
        return 0

    def get_when_set(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return the values if all are present, else PENDING and call `on_values` later."""
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return [self._values[key] for key in keys]
        return self._begin_wait(Waiter(client, tag, _VALUES, keys), missing)

    def pop_when_pushed(self, client: Client, tag: Any, key: bytes, _: None) -> Any:
        """Return the oldest item if there is one, else PENDING and call `on_item` later."""
        if key in self._queues:
            return self.queue_pop(key)[1]
        return self._begin_wait(Waiter(client, tag, _ITEM, (key,)), (key,))

    def barrier(self, client: Client, tag: Any, key: bytes, size: int) -> Any:
        """Count an arrival; return 0 from the `size`-th on, else PENDING (`on_woken`)."""
        count = self._number(key) + 1
        self._values[key] = b"%d" % count
        if count >= size:
            self._on_written(key, self._values[key])
            return 0
        if self._watched:
            self.watches.record(CHANGE_SET, key, self._values[key])
        return self._begin_wait(Waiter(client, tag, _WOKEN, (key,)), (key,))

    def cancel(self, client: Client, tag: Any) -> bool:
        """End the wait or watch `tag`; return whether there was one."""
        waiter = client.waits.pop(tag, None)
        if waiter is None:
            return self.watches.cancel(client, tag)
        for key in waiter.keys:
            self._remove_waiter(key, waiter)
        return True

    def _begin_wait(self, waiter: Waiter, missing: Sequence[bytes]) -> object:
        if waiter.tag in waiter.client.waits:
            self.cancel(waiter.client, waiter.tag)
        if self.wait_count + len(missing) > self._limits.waits:
            raise OperationRefused(f"too many waits: {self.wait_count} keys are being waited for")
        self._add_waiter(waiter, missing)
        return PENDING

    def _add_waiter(self, waiter: Waiter, missing: Sequence[bytes]) -> None:
        keys = tuple(dict.fromkeys(missing)) if len(missing) > 1 else tuple(missing)
        waiter.keys = keys
        waiter.missing = len(keys)
        waiter.client.waits[waiter.tag] = waiter
        self.wait_count += len(keys)
        for key in keys:
            self._waiters.setdefault(key, {})[waiter] = None

    def _remove_waiter(self, key: bytes, waiter: Waiter) -> None:
        """Remove `waiter` from the waiters for `key`; idempotent."""
        waiters = self._waiters.get(key)
        if waiters is not None and waiters.pop(waiter, self) is None:
            self.wait_count -= 1
            if not waiters:
                del self._waiters[key]

    def _wake_waiters(self, key: bytes) -> None:
        """Notify the waiters for `key`, which has been written, oldest first."""
        for waiter in list(self._waiters[key]):
            if waiter.mode == _ITEM:
                continue
            self._remove_waiter(key, waiter)
            waiter.missing -= 1
            if not waiter.missing:
                self._complete(waiter)

    def _complete(self, waiter: Waiter) -> None:
        client, tag = waiter.client, waiter.tag
        del client.waits[tag]
        if waiter.mode == _WOKEN:
            client.on_woken(tag)
            return
        # A key may have been set and deleted while others were missing: wait for it again.
        missing = [key for key in waiter.requested if key not in self._values]
        if missing:
            self._add_waiter(waiter, missing)
        else:
            client.on_values(tag, [self._values[key] for key in waiter.requested])

    def _serve_item(self, key: bytes) -> None:
        """Notify the waiters for the queue `key`, which has got an item, oldest first."""
        for waiter in list(self._waiters.get(key, ())):
            if waiter.mode == _VALUES:
                continue
            self._remove_waiter(key, waiter)
            if waiter.mode == _ITEM:
                del waiter.client.waits[waiter.tag]
                waiter.client.on_item(waiter.tag, self.queue_pop(key)[1])
                if key not in self._queues:
                    return
                continue
            # The item stays: a torch client pops it with another request once woken.
            waiter.missing -= 1
            if not waiter.missing:
                self._complete(waiter)
                return

    # Leases and watches.

    def leased_set(self, _: Client, __: Any, key: bytes, pair: Sequence[bytes]) -> None:
        lease = self._lease(pair[1])
        self.set(key, pair[0])
        self.leases.bind(lease, key)

    def leased_compare_set(self, _: Client, __: Any, key: bytes, parts: Sequence[bytes]) -> bytes:
        lease = self._lease(parts[2])
        current, is_stored = self._compare_set(key, parts[0], parts[1])
        if is_stored:
            self.leases.bind(lease, key)
        return current

    def _lease(self, lease_id: bytes) -> LeaseRecord:
        lease = self.leases.find(lease_id)
        if lease is None:
            raise OperationRefused("the lease has ended")
        return lease

    def grant_lease(
        self, client: Client, tag: Any, lease_id: bytes, terms: tuple[int, int], now: float
    ) -> bytes:
        """Create a lease; `terms` are its ttl and linger in milliseconds."""
        if not self.leases.grant(client, tag, lease_id, terms[0] / 1000, terms[1] / 1000, now):
            raise OperationRefused("there are too many leases")
        return lease_id

    def release_lease(self, _: Client, __: Any, lease_id: bytes, ___: None) -> int:
        lease = self.leases.find(lease_id)
        if lease is None:
            return 0
        for key in self.leases.release(lease):
            self.delete(key)
        return 1

    def watch(
        self, client: Client, tag: Any, key: bytes, last_revision: int, *, is_prefix: bool
    ) -> WatchSnapshot:
        """Begin a watch, or continue one after `last_revision` if that is not negative."""
        snapshot = self.watches.begin(client, tag, key, is_prefix, last_revision)
        if snapshot is None:
            raise OperationRefused("there are too many watches")
        if not snapshot.is_whole:
            return snapshot
        if is_prefix:
            pairs = tuple(pair for pair in self._values.items() if pair[0].startswith(key))
        else:
            pairs = ((key, self._values[key]),) if key in self._values else ()
        return snapshot._replace(pairs=pairs)

    def forget(self, client: Client, now: float) -> None:
        """Remove a client whose connection has ended; its leases and watches may linger."""
        for tag in list(client.waits):
            self.cancel(client, tag)
        self.watches.forget(client, now)
        self.leases.forget(client, now)

    def next_deadline(self) -> float | None:
        """Return when `expire` is due; None: not before the next operation."""
        times = [self.leases.next_deadline(), self.watches.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """End the leases and lingering watches whose deadline has passed."""
        self.leases.expire(now)
        self.watches.expire(now)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        current = self._values.get(key)
        if (current is None and expected) or (current is not None and current != expected):
            return (expected if current is None else current), False
        self.set(key, desired)
        return desired, True

    def _number(self, key: bytes) -> int:
        """Parse a counter as strtoll(3) does: leading space, sign, digits, then anything."""
        text = self._values.get(key)
        if text is None:
            return 0
        if len(text) < 19 and text.isdigit():
            return int(text)
        match = _NUMBER.match(text)
        # Twenty characters hold every 64-bit number; more leading zeros are refused too.
        number = int(match[1]) if match and len(match[1]) <= 20 else _TOP
        if not -_TOP <= number < _TOP:
            raise OperationRefused("the value is not a 64-bit number")
        return number

    def _on_written(self, key: bytes, value: bytes) -> None:
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(CHANGE_SET, key, value)
        if key in self._waiters:
            self._wake_waiters(key)

    def _remove(self, key: bytes, kind: int) -> int:
        if self._values.pop(key, None) is None:
            return 0
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(kind, key, b"")
        return 1
