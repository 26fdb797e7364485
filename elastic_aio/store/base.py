"""The interface of all stores, `Store`, with its keys, leases, watches and prefixes.

The operations have the names of torch's `Store`, and are requests of the wire protocol, which
subclasses carry out.  Keys are text and values are bytes; a text value is stored as UTF-8.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Final, Self

from msgspec import Struct

from elastic_aio.aio import Notifier, run_shielded
from elastic_aio.errors import SpecError, StoreError, StoreLost, StoreTimeout
from elastic_aio.spec.checks import check_number, checked_items, checked_text
from elastic_aio.store import replies, wire
from elastic_aio.store.replies import RawChange, WatchSnapshot
from elastic_aio.text import os_bytes, os_text

Value = bytes | str
"""A value as it is given; it is kept as bytes, a text in UTF-8."""

LIMITS: Final = wire.WireLimits()

_MAX_UNREAD: Final = 65_536
"""Changes that a watch keeps for its reader."""


def wire_key(key: str, prefix: str) -> bytes:
    """Encode a key under a prefix as torch's clients do: with a leading `/`."""
    if not isinstance(key, str):
        raise SpecError("key", key, "must be text")
    key = prefix + key
    # A torch client's key that is not UTF-8 can be listed and then used.
    data = b"/" + os_bytes(key)
    if len(data) > LIMITS.key:
        raise SpecError("key", key, f"must be at most {LIMITS.key - 1} bytes")
    return data


def user_key(key: bytes, prefix: str = "") -> str:
    """Decode a key; the reverse of `wire_key`."""
    return os_text(key[1:])[len(prefix) :]


def wire_value(value: Value) -> bytes:
    """Encode a value; text as UTF-8."""
    if isinstance(value, str):
        value = os_bytes(value)
    elif not isinstance(value, bytes):
        raise SpecError("value", value, "must be bytes or text")
    if len(value) > LIMITS.value:
        raise SpecError("value", f"{len(value)} bytes", f"must be at most {LIMITS.value} bytes")
    return value


def wire_keys(keys: Iterable[str], prefix: str) -> tuple[bytes, ...]:
    names = tuple(wire_key(key, prefix) for key in checked_items("keys", keys))
    if len(names) > LIMITS.count:
        raise SpecError("keys", f"{len(names)} keys", f"must be at most {LIMITS.count}")
    return names


class ChangeKind(StrEnum):
    """The kind of a change of a watched key."""

    SET = "set"
    DELETED = "deleted"
    EXPIRED = "expired"
    """Its lease expired: the holder ended, stopped sending, or lost its connection."""


class Change(Struct, frozen=True, gc=False):
    """A change, of some `kind`, of the watched key `key`.

    `value` is None unless `kind` is SET.  `is_resync`: changes before this one may be missing,
    since the store was restarted, or its history did not reach back to the moment when the
    connection broke; the value is the present one.  `has_closed`: the key has expired because the
    process of its holder has ended, and its kernel has closed the connection.
    """

    kind: ChangeKind
    key: str
    value: bytes | None = None
    is_resync: bool = False
    has_closed: bool = False


_KIND_OF: Final = {
    replies.CHANGE_SET: ChangeKind.SET,
    replies.CHANGE_DELETED: ChangeKind.DELETED,
    replies.CHANGE_EXPIRED: ChangeKind.EXPIRED,
    replies.CHANGE_CLOSED: ChangeKind.EXPIRED,
}


class Lease:
    """Keys that exist as long as this client sends heartbeats; made by `Store.lease`."""

    def __init__(
        self,
        call: Callable[[int, bytes, Any], Awaitable[Any]],
        change_all: Callable[[int, Sequence[tuple[bytes, Any]]], Awaitable[None]],
        prefix: str,
        ttl: float,
        linger: float,
    ) -> None:
        """Create a lease that the store of `call` has not granted yet; times in seconds."""
        self._call, self._change_all = call, change_all
        self._prefix = prefix
        self.ttl = ttl
        self.linger = linger
        self.lease_id = b""
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<lease {self.lease_id.hex()} {'alive' if self.is_alive else 'ended'}>"

    @property
    def is_alive(self) -> bool:
        """Whether the lease has not ended, as far as this client knows."""
        return bool(self.lease_id) and not self._ended.is_set()

    async def set(self, key: str, value: Value) -> None:
        """Set `key`; it is deleted when the lease ends.

        Raises:
            StoreRefused: the lease has ended.
        """
        argument = [wire_value(value), self.lease_id]
        await self._call(wire.LEASED_SET, wire_key(key, self._prefix), argument)

    async def set_all(self, items: Mapping[str, Value]) -> None:
        """Set all `items`, one after another, by requests that are sent together.

        An error, as of `set`, may leave some of them set.
        """
        prefix, lease_id = self._prefix, self.lease_id
        requests = [
            (wire_key(key, prefix), [wire_value(value), lease_id]) for key, value in items.items()
        ]
        await self._change_all(wire.LEASED_SET, requests)

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Do `Store.compare_set`; if it stores the key, that is deleted when the lease ends.

        Raises:
            StoreRefused: the lease has ended.
        """
        argument = [wire_value(expected), wire_value(desired), self.lease_id]
        name = wire_key(key, self._prefix)
        return bytes(await self._call(wire.LEASED_COMPARE_SET, name, argument))

    async def wait_ended(self) -> None:
        """Wait until the lease has ended.

        Cancellation: has no effect on the lease.
        """
        await self._ended.wait()


class HeldLease(Lease):
    """A lease as its store has it."""

    def end(self) -> None:
        self._ended.set()


class Watch:
    """The changes of a key or a prefix, in order; made by `Store.watch`.

    An async iterator.  Cancellation of a wait for the next change loses no change.  It
    keeps the present values, to derive the changes when the store sends a whole snapshot again.
    """

    def __init__(self, op: int, key: bytes, prefix: str) -> None:
        """Create a watch that the request `op` on `key` opens; its keys omit `prefix`."""
        self.op = op
        self.key = key
        self._prefix = prefix
        self.revision = -1
        """The revision of the last change; negative: none, so a whole snapshot is needed."""
        self._values: dict[bytes, bytes] = {}
        self._present: dict[str, bytes] | None = None
        self._unread: deque[Change] = deque()
        self._error: StoreError | None = None
        self._changed = Notifier()

    def __repr__(self) -> str:
        return f"<watch of {user_key(self.key)!r} at {self.revision}, {len(self._unread)} unread>"

    @property
    def present(self) -> dict[str, bytes]:
        """The watched keys and their values when the watch began."""
        return dict(self._present or {})

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        """Return the next change.

        Raises:
            StoreLost: the store is lost for good, or there are too many unread changes.
            StoreClosed: this process closed the store.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._unread.popleft()


class FedWatch(Watch):
    """A watch as its store has it."""

    def feed(self, message: RawChange | WatchSnapshot) -> None:
        """Take a message from the store."""
        if isinstance(message, RawChange):
            self.revision = message.revision
            self._apply(message.kind, message.key, message.value, is_resync=False)
        elif message.is_whole:
            self.revision = message.revision
            self._resync(dict(message.pairs))
        self._changed.notify_all()

    def fail(self, error: StoreError) -> None:
        """End the watch: the reader gets the unread changes, then `error`."""
        self._error = self._error or error
        self._changed.notify_all()

    def _resync(self, values: dict[bytes, bytes]) -> None:
        if self._present is None:
            self._values = values
            self._present = {user_key(key, self._prefix): value for key, value in values.items()}
            return
        for key in [key for key in self._values if key not in values]:
            self._apply(replies.CHANGE_DELETED, key, b"", is_resync=True)
        for key, value in values.items():
            if self._values.get(key) != value:
                self._apply(replies.CHANGE_SET, key, value, is_resync=True)

    def _apply(self, kind: int, key: bytes, value: bytes, *, is_resync: bool) -> None:
        is_set = kind == replies.CHANGE_SET
        if is_set:
            self._values[key] = value
        else:
            self._values.pop(key, None)
        if len(self._unread) >= _MAX_UNREAD:
            self.fail(StoreLost(f"the watch has more than {_MAX_UNREAD} unread changes"))
        if self._error is None:
            new_value = value if is_set else None
            name = user_key(key, self._prefix)
            has_closed = kind == replies.CHANGE_CLOSED
            self._unread.append(Change(_KIND_OF[kind], name, new_value, is_resync, has_closed))


MIN_TTL: Final = 2.0
"""Seconds; a shorter lease would need more than one heartbeat a second."""

_RELEASE_TIMEOUT: Final = 5.0


class Store(abc.ABC):
    """A key-value store that processes share.

    An async context manager that closes itself.  Any number of tasks may use it at
    once.  Every operation raises `SpecError` for keys and values that no store accepts,
    and one of `StoreError`: StoreClosed, StoreLost, StoreTimeout, StoreRefused.
    A `timeout` is in seconds; None means the store's default.

    Cancellation: of an operation leaves the store usable; a change may have been made.
    """

    _prefix = ""
    """Precedes every key; empty but for `prefixed`."""

    def __init__(self, timeout: float, min_ttl: float = MIN_TTL) -> None:
        """Set the default timeout of waiting operations and the shortest lease, in seconds."""
        check_timeout(timeout)
        check_number("min_ttl", min_ttl, above=0)
        self._timeout = timeout
        self._min_ttl = min_ttl

    async def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""
        await self.call(wire.SET, self._key(key), wire_value(value))

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of `key`; wait until it has one."""
        values = await self._within(timeout, wire.GET_WHEN_SET, b"", (self._key(key),))
        return bytes(values[0])

    async def peek(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if it has none."""
        value: bytes | None = await self.call(wire.PEEK, self._key(key), None)
        return value

    async def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which starts at 0, and return the sum (64 bits, wrapping).

        Raises:
            StoreRefused: the value is not a number (a torch server closes the
                connection instead: StoreLost).
        """
        if isinstance(amount, bool) or not isinstance(amount, int) or abs(amount) >= 1 << 63:
            raise SpecError("amount", amount, "must be a whole number of 64 bits")
        return int(await self.call(wire.ADD, self._key(key), amount))

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected`; return the value afterwards.

        An empty `expected` also matches an absent key.  If the key is absent and
        `expected` is not empty, nothing is stored and `expected` is returned.
        """
        argument = [wire_value(expected), wire_value(desired)]
        return bytes(await self.call(wire.COMPARE_SET, self._key(key), argument))

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether each of `keys` has a value or is a non-empty queue."""
        status = await self.call(wire.CHECK, b"", wire_keys(keys, self._prefix))
        return bool(status == replies.READY)

    async def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """Wait until each of `keys` has been set (or is a non-empty queue)."""
        await self._within(timeout, wire.WAIT, b"", wire_keys(keys, self._prefix))

    async def delete(self, key: str) -> bool:
        """Delete `key`; return whether it had a value."""
        return bool(await self.call(wire.DELETE_KEY, self._key(key), None))

    async def append(self, key: str, value: Value) -> None:
        """Append to the value of `key`, which starts empty."""
        await self.call(wire.APPEND, self._key(key), wire_value(value))

    async def multi_get(self, keys: Iterable[str], *, timeout: float | None = None) -> list[bytes]:
        """Return the values of `keys`; wait until all have one.

        More than 2,048 keys are read in parts, between which other clients may write.
        """
        names = wire_keys(keys, self._prefix)
        return list(await self._within(timeout, wire.GET_WHEN_SET, b"", names))

    async def multi_set(self, items: Mapping[str, Value]) -> None:
        """Store all `items` at once."""
        pairs = tuple((self._key(key), wire_value(value)) for key, value in items.items())
        if len(pairs) > LIMITS.count:
            raise SpecError("items", f"{len(pairs)} items", f"must be at most {LIMITS.count}")
        await self.call(wire.MULTI_SET, b"", pairs)

    async def queue_push(self, key: str, item: Value) -> None:
        """Append `item` to the queue `key`."""
        await self.call(wire.QUEUE_PUSH, self._key(key), wire_value(item))

    async def queue_pop(self, key: str, *, timeout: float | None = None) -> bytes:
        """Take the oldest item of the queue `key`; wait until the queue has an item.

        Cancellation: returns an item that was just taken to the front of the queue (on a torch
        server: to the end).  If the client is killed instead, the item is lost.
        """
        return bytes(await self._within(timeout, wire.POP_WHEN_PUSHED, self._key(key), None))

    async def queue_pop_nowait(self, key: str) -> bytes | None:
        """Take the oldest item of the queue `key`, or None if it is empty."""
        length, item = await self.call(wire.QUEUE_POP, self._key(key), None)
        return bytes(item) if length else None

    async def queue_len(self, key: str) -> int:
        """Return the number of items of the queue `key`."""
        return int(await self.call(wire.QUEUE_LEN, self._key(key), None))

    async def num_keys(self) -> int:
        """Return the number of keys of the whole store, without queues."""
        return int(await self.call(wire.NUM_KEYS, b"", None))

    async def list_keys(self) -> list[str]:
        """Return all keys, in no particular order, without queues."""
        begin = self._key("")
        names = await self.call(wire.LIST_KEYS, b"", None)
        return [user_key(name, self._prefix) for name in names if name.startswith(begin)]

    def lease(self, ttl: float, *, linger: float = 0.0) -> AbstractAsyncContextManager[Lease]:
        """Hold keys that are deleted, and reported to watches, when this client fails.

        Leaving the block deletes them.

        Args:
            ttl: seconds, at least the store's `min_ttl` (2); the keys expire when the server
                receives nothing from this client for so long.  The client sends a small heartbeat
                about twice in that time.
            linger: seconds for which the keys outlive the connection, so that a client that
                reconnects in time keeps them.

        Raises:
            StoreRefused: on entering; the peer is a plain torch server.
        """
        check_number("ttl", ttl, at_least=self._min_ttl)
        check_number("linger", linger, at_least=0)
        lease = HeldLease(self.call, self.change_all, self._prefix, min(ttl, 1e6), min(linger, 1e6))
        return _LeaseBlock(self, lease)

    def watch(self, name: str, *, is_prefix: bool = False) -> AbstractAsyncContextManager[Watch]:
        """Watch a key, or all keys that begin with `name`.

        Raises:
            StoreRefused: on entering; the peer is a plain torch server.
        """
        op = wire.WATCH_PREFIX if is_prefix else wire.WATCH_KEY
        return _WatchBlock(self, FedWatch(op, self._key(name), self._prefix))

    def prefixed(self, name: str) -> Store:
        """Return a view of this store in which the key `k` is this store's `name/k`.

        The keys are the keys of torch's `PrefixStore`.  The view's `num_keys` counts all keys of
        this store.  Closing it does nothing.
        """
        return PrefixedStore(self, name)

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close this client; pending operations raise StoreClosed.  Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # The requests, which subclasses carry out.

    @abc.abstractmethod
    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out one request, without a timeout, and return its result.

        Cancellation: withdraws a wait; the store stays usable.
        """

    async def change_all(self, op: int, requests: Sequence[tuple[bytes, Any]]) -> None:
        """Carry out the requests `op` with these keys and arguments, in their order; as `call`."""
        await asyncio.gather(*(self.call(op, key, argument) for key, argument in requests))

    @abc.abstractmethod
    async def _grant(self, lease: HeldLease) -> None:
        """Set the id of `lease`, and call its `end` when the store ends it."""

    @abc.abstractmethod
    async def _release(self, lease: HeldLease) -> None:
        """End `lease` for its holder, with its keys."""

    @abc.abstractmethod
    async def _open_watch(self, watch: FedWatch) -> None:
        """Feed `watch` from now on; return when it has got its snapshot."""

    @abc.abstractmethod
    def _close_watch(self, watch: FedWatch) -> None:
        """Stop feeding `watch`."""

    def _key(self, key: str) -> bytes:
        return wire_key(key, self._prefix)

    async def _within(self, timeout: float | None, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request that waits for `key`, or for the keys `argument`."""
        if timeout is None:
            timeout = self._timeout
        else:
            check_timeout(timeout)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                return await self.call(op, key, argument)
        except TimeoutError:
            keys = _describe((key,) if argument is None else argument)
            raise StoreTimeout(f"{keys} not there after {timeout:g} s") from None

    async def _try_release(self, lease: HeldLease) -> None:
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await self._release(lease)
        except (StoreError, TimeoutError):
            # The server deletes the keys when the lease expires.
            pass
        finally:
            lease.end()


# Classes, and not `asynccontextmanager`: the collector finalizes a dropped generator, which
# would release the lease of a program that keeps the lease alone.
class _LeaseBlock(AbstractAsyncContextManager[Lease]):
    def __init__(self, store: Store, lease: HeldLease) -> None:
        self._store = store
        self._lease = lease

    async def __aenter__(self) -> Lease:
        await self._store._grant(self._lease)
        return self._lease

    async def __aexit__(self, *_: object) -> None:
        await run_shielded(functools.partial(self._store._try_release, self._lease))


class _WatchBlock(AbstractAsyncContextManager[Watch]):
    def __init__(self, store: Store, watch: FedWatch) -> None:
        self._store = store
        self._watch = watch

    async def __aenter__(self) -> Watch:
        await self._store._open_watch(self._watch)
        return self._watch

    async def __aexit__(self, *_: object) -> None:
        self._store._close_watch(self._watch)


class PrefixedStore(Store):
    """A view of a store under a prefix; made by `Store.prefixed`."""

    def __init__(self, store: Store, name: str) -> None:
        self._timeout, self._min_ttl = store._timeout, store._min_ttl
        self._store = store
        self._prefix = store._prefix + checked_text("name", name) + "/"

    def __repr__(self) -> str:
        return f"<{self._prefix!r} in {self._store!r}>"

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        return await self._store.call(op, key, argument)

    async def change_all(self, op: int, requests: Sequence[tuple[bytes, Any]]) -> None:
        await self._store.change_all(op, requests)

    async def _grant(self, lease: HeldLease) -> None:
        await self._store._grant(lease)

    async def _release(self, lease: HeldLease) -> None:
        await self._store._release(lease)

    async def _open_watch(self, watch: FedWatch) -> None:
        await self._store._open_watch(watch)

    def _close_watch(self, watch: FedWatch) -> None:
        self._store._close_watch(watch)

    async def aclose(self) -> None:
        pass


def check_timeout(timeout: float) -> None:
    """Raise `SpecError` unless `timeout` is a number of seconds or infinite."""
    if timeout != math.inf:
        check_number("timeout", timeout, at_least=0)


def _describe(keys: tuple[bytes, ...]) -> str:
    listed = ", ".join(repr(user_key(key)) for key in keys[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"key{'' if len(keys) == 1 else 's'} {listed}{more}"
