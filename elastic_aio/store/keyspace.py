"""What a store knows: values, queues, who waits for what; leases and watches beside it.

Pure: whoever serves it passes in the time and the names of leases, and is told of
what happens to its clients through the hooks of `Client`.  Semantics are those of
torch's TCPStore wherever torch has the operation:

* A wait remembers the keys that are missing when it begins and ends when each has
  been written once; a later deletion does not undo that.
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
from elastic_aio.store.leases import LeaseHolder, LeaseTable
from elastic_aio.store.replies import CHANGE_DELETED, CHANGE_EXPIRED, CHANGE_SET, RawView
from elastic_aio.store.watches import Watcher, WatchTable

__all__ = ["PENDING", "Client", "Keyspace", "KeyspaceLimits", "Refusal"]

# How a waiter is to be answered.
_WOKEN: Final = 0
_VALUES: Final = 1
_ITEM: Final = 2

_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_TOP: Final = 1 << 63

PENDING: Final = object()
"""Instead of a result: the client is told later, through one of its hooks."""


class Refusal(Exception):
    """A request cannot be carried out; nothing has changed.  The message says why."""


@dataclass(frozen=True, slots=True)
class KeyspaceLimits:
    """What all clients together may occupy.

    Args:
        waits: pairs of a wait and a key it waits for.
        watches: open watches.
        leases: living leases.
        grown: bytes to which APPEND may grow a value.
        history: changes of watched keys kept for watches that come back.
        history_size: bytes of those changes.
    """

    waits: int = 1_000_000
    watches: int = 100_000
    leases: int = 100_000
    grown: int = 64 << 20
    history: int = 65_536
    history_size: int = 16 << 20


class Client(LeaseHolder, Watcher):
    """One client of a keyspace: what it waits for and holds, and how it is told.

    Subclasses implement the hooks; they are called in the middle of an operation
    and must not call the keyspace back.  `tag` is what the client gave its request.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.waits: dict[Any, Waiter] = {}

    def on_woken(self, tag: Any) -> None:
        """All keys of a WAIT or BARRIER are there."""
        raise NotImplementedError

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        """All keys of a GET_WHEN_SET are there; these are their values."""
        raise NotImplementedError

    def on_item(self, tag: Any, item: bytes) -> None:
        """A POP_WHEN_PUSHED has got its item."""
        raise NotImplementedError


class Waiter:
    """One pending wait."""

    __slots__ = ("client", "keys", "missing", "mode", "tag", "wanted")

    def __init__(self, client: Client, tag: Any, mode: int, wanted: Sequence[bytes]) -> None:
        self.client = client
        self.tag = tag
        self.mode = mode
        self.wanted = wanted
        self.keys: Sequence[bytes] = ()
        self.missing = 0


class Keyspace:
    """The contents of one store, and everybody who waits for a change of them."""

    def __init__(self, limits: KeyspaceLimits | None = None) -> None:
        """Begin empty."""
        self._limits = limits = limits or KeyspaceLimits()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        # An ordered set of waiters under each key that somebody waits for.
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._wait_count = 0
        self.leases = LeaseTable(self._expire_key, limits.leases)
        self._leased = self.leases.lease_of
        self.watches = WatchTable(limits.watches, limits.history, limits.history_size)
        self._watched = self.watches.targets
        # The two tables of operations, by opcode; a method call is what one costs.
        self.simple: list[Callable[[bytes, Any], Any] | None] = [None] * 256
        self.for_client: list[Callable[[Client, Any, bytes, Any], Any] | None] = [None] * 256
        simple: dict[int, Callable[[bytes, Any], Any]] = {
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
        for_client: dict[int, Callable[[Client, Any, bytes, Any], Any]] = {
            wire.WAIT: self.wait,
            wire.GET_WHEN_SET: self.get_when_set,
            wire.POP_WHEN_PUSHED: self.pop_when_pushed,
            wire.BARRIER: self.barrier,
            wire.RELEASE_LEASE: self.release_lease,
            wire.LEASED_SET: self.leased_set,
            wire.LEASED_COMPARE_SET: self.leased_compare_set,
            wire.WATCH_KEY: self.watch_key,
            wire.WATCH_PREFIX: self.watch_prefix,
        }
        for op, call in simple.items():
            self.simple[op] = call
        for op, call_for in for_client.items():
            self.for_client[op] = call_for

    def __repr__(self) -> str:
        return (
            f"<Keyspace with {len(self._values)} keys, {len(self._queues)} queues, "
            f"{self._wait_count} waits>"
        )

    @property
    def wait_count(self) -> int:
        """How many pairs of a wait and a key are pending."""
        return self._wait_count

    # Values.

    def set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if self._leased or self._watched or key in self._waiting:
            self._written(key, value)

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
        if self._values.pop(key, None) is None:
            return 0
        self._deleted(key, CHANGE_DELETED)
        return 1

    def append(self, key: bytes, more: bytes) -> None:
        value = self._values.get(key, b"") + more
        if len(value) > self._limits.grown:
            raise Refusal(f"a value may grow to {self._limits.grown} bytes")
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
        self._offer(key)

    def queue_unpop(self, key: bytes, item: bytes) -> None:
        self._queues.setdefault(key, deque()).appendleft(item)
        self._offer(key)

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
        """Return 0 when all keys are there, else PENDING; then `on_woken` follows."""
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                break
        else:
            # A client has one wait under one tag: a new one replaces the old.
            if tag in client.waits:
                self.cancel(client, tag)
            return 0
        missing = [key for key in keys if key not in values and key not in queues]
        return self._begin(Waiter(client, tag, _WOKEN, keys), missing)

    def get_when_set(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return the values when all are there, else PENDING; then `on_values` follows."""
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return [self._values[key] for key in keys]
        return self._begin(Waiter(client, tag, _VALUES, keys), missing)

    def pop_when_pushed(self, client: Client, tag: Any, key: bytes, _: None) -> Any:
        """Return the oldest item, else PENDING; then `on_item` follows."""
        if key in self._queues:
            return self.queue_pop(key)[1]
        return self._begin(Waiter(client, tag, _ITEM, (key,)), (key,))

    def barrier(self, client: Client, tag: Any, key: bytes, size: int) -> Any:
        """Count the caller; return 0 when `size` have come, else PENDING."""
        count = self._number(key) + 1
        self._values[key] = b"%d" % count
        if count >= size:
            self._written(key, self._values[key])
            return 0
        self._noted(key, self._values[key])
        return self._begin(Waiter(client, tag, _WOKEN, (key,)), (key,))

    def cancel(self, client: Client, tag: Any) -> bool:
        """End a wait or a watch early; tell whether there was one."""
        waiter = client.waits.pop(tag, None)
        if waiter is None:
            return self.watches.cancel(client, tag)
        for key in waiter.keys:
            self._leave(key, waiter)
        return True

    def _begin(self, waiter: Waiter, missing: Sequence[bytes]) -> object:
        client, tag = waiter.client, waiter.tag
        if tag in client.waits:
            self.cancel(client, tag)
        if self._wait_count + len(missing) > self._limits.waits:
            raise Refusal(f"{self._wait_count} keys are being waited for, no more is allowed")
        self._enlist(waiter, missing)
        return PENDING

    def _enlist(self, waiter: Waiter, missing: Sequence[bytes]) -> None:
        keys = tuple(dict.fromkeys(missing)) if len(missing) > 1 else tuple(missing)
        waiter.keys = keys
        waiter.missing = len(keys)
        waiter.client.waits[waiter.tag] = waiter
        self._wait_count += len(keys)
        for key in keys:
            self._waiting.setdefault(key, {})[waiter] = None

    def _leave(self, key: bytes, waiter: Waiter) -> None:
        """Take a waiter off a key, if it is still there."""
        waiters = self._waiting.get(key)
        if waiters is not None and waiters.pop(waiter, self) is None:
            self._wait_count -= 1
            if not waiters:
                del self._waiting[key]

    def _wake(self, key: bytes) -> None:
        """Serve those who wait for the value of `key`."""
        for waiter in list(self._waiting[key]):
            if waiter.mode == _ITEM:
                continue
            self._leave(key, waiter)
            waiter.missing -= 1
            if not waiter.missing:
                self._finish(waiter)

    def _finish(self, waiter: Waiter) -> None:
        client, tag = waiter.client, waiter.tag
        del client.waits[tag]
        if waiter.mode == _WOKEN:
            client.on_woken(tag)
            return
        # A key that was set and has been deleted since must be waited for again.
        missing = [key for key in waiter.wanted if key not in self._values]
        if missing:
            self._enlist(waiter, missing)
        else:
            client.on_values(tag, [self._values[key] for key in waiter.wanted])

    def _offer(self, key: bytes) -> None:
        """Serve those who wait for an item of `key`, the oldest first."""
        for waiter in list(self._waiting.get(key, ())):
            if waiter.mode == _VALUES:
                continue
            self._leave(key, waiter)
            if waiter.mode == _ITEM:
                del waiter.client.waits[waiter.tag]
                waiter.client.on_item(waiter.tag, self.queue_pop(key)[1])
                if key not in self._queues:
                    return
                continue
            # The item stays: a torch client that is woken comes back to pop it.
            waiter.missing -= 1
            if not waiter.missing:
                self._finish(waiter)
                return

    # Leases and watches.

    def leased_set(self, _: Client, __: Any, key: bytes, pair: Sequence[bytes]) -> None:
        value, name = pair
        lease = self.leases.find(name)
        if lease is None:
            raise Refusal("the lease has ended")
        self.set(key, value)
        self.leases.bind(lease, key)

    def leased_compare_set(self, _: Client, __: Any, key: bytes, three: Sequence[bytes]) -> bytes:
        expected, desired, name = three
        lease = self.leases.find(name)
        if lease is None:
            raise Refusal("the lease has ended")
        current, is_stored = self._compare_set(key, expected, desired)
        if is_stored:
            self.leases.bind(lease, key)
        return current

    def grant_lease(
        self, client: Client, tag: Any, name: bytes, terms: tuple[int, int], now: float
    ) -> bytes:
        """Make a lease called `name`; `terms` are its ttl and linger in milliseconds."""
        if not self.leases.grant(client, tag, name, terms[0] / 1000, terms[1] / 1000, now):
            raise Refusal("there are too many leases")
        return name

    def release_lease(self, _: Client, __: Any, name: bytes, ___: None) -> int:
        lease = self.leases.find(name)
        if lease is None:
            return 0
        for key in self.leases.release(lease):
            self.delete(key)
        return 1

    def watch_key(self, client: Client, tag: Any, key: bytes, seen: int) -> RawView:
        value = self._values.get(key)
        present = () if value is None else ((key, value),)
        return self._watch(client, tag, key, False, seen, lambda: present)

    def watch_prefix(self, client: Client, tag: Any, prefix: bytes, seen: int) -> RawView:
        def present() -> tuple[tuple[bytes, bytes], ...]:
            return tuple(pair for pair in self._values.items() if pair[0].startswith(prefix))

        return self._watch(client, tag, prefix, True, seen, present)

    def _watch(
        self,
        client: Client,
        tag: Any,
        key: bytes,
        is_prefix: bool,
        seen: int,
        present: Callable[[], tuple[tuple[bytes, bytes], ...]],
    ) -> RawView:
        view = self.watches.begin(client, tag, key, is_prefix, seen)
        if view is None:
            raise Refusal("there are too many watches")
        return view._replace(pairs=present()) if view.is_whole else view

    def forget(self, client: Client, now: float) -> None:
        """The client is gone: drop its waits; its leases and watches may linger."""
        for tag in list(client.waits):
            self.cancel(client, tag)
        self.watches.forget(client, now)
        self.leases.forget(client, now)

    def next_deadline(self) -> float | None:
        """When `expire` is to be called; None: not before something else happens."""
        times = [self.leases.next_deadline(), self.watches.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """End the leases and lingering watches whose time is over."""
        self.leases.expire(now)
        self.watches.expire(now)

    def _expire_key(self, key: bytes) -> None:
        if self._values.pop(key, None) is not None:
            self._deleted(key, CHANGE_EXPIRED)

    # What every change passes through.

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        current = self._values.get(key)
        if (current is None and expected) or (current is not None and current != expected):
            return (expected if current is None else current), False
        self.set(key, desired)
        return desired, True

    def _number(self, key: bytes) -> int:
        """Read a counter as C's strtoll does: leading space, sign, digits, then anything."""
        text = self._values.get(key)
        if text is None:
            return 0
        if len(text) < 19 and text.isdigit():
            return int(text)
        found = _NUMBER.match(text)
        # Twenty characters hold every 64-bit number; leading zeros beyond that are refused too.
        number = int(found[1]) if found and len(found[1]) <= 20 else _TOP
        if not -_TOP <= number < _TOP:
            raise Refusal("the value is not a 64-bit number")
        return number

    def _written(self, key: bytes, value: bytes) -> None:
        if self._leased:
            self.leases.unbind(key)
        self._noted(key, value)
        if key in self._waiting:
            self._wake(key)

    def _noted(self, key: bytes, value: bytes) -> None:
        if self._watched:
            self.watches.note(CHANGE_SET, key, value)

    def _deleted(self, key: bytes, kind: int) -> None:
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.note(kind, key, b"")
