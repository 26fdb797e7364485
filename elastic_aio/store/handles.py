"""A client's view of a store: keys and values as it writes them, its leases and watches.

Keys are text and values are bytes; a text value is stored as UTF-8.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Self

from msgspec import Struct

from elastic_aio.aio import Notifier
from elastic_aio.errors import SpecError, StoreError, StoreLost
from elastic_aio.spec.checks import checked_items
from elastic_aio.store import replies, wire
from elastic_aio.store.replies import RawChange, WatchSnapshot

Value = bytes | str

LIMITS: Final = wire.WireLimits()

_MAX_UNREAD: Final = 65_536
"""Changes that a watch keeps for its reader."""


def wire_key(key: str, prefix: str) -> bytes:
    """Encode a key under a prefix as torch's clients do: with a leading `/`."""
    if not isinstance(key, str):
        raise SpecError("key", key, "must be text")
    key = prefix + key
    # surrogateescape: a torch client's key that is not UTF-8 can be listed and then used.
    data = b"/" + key.encode("utf-8", "surrogateescape")
    if len(data) > LIMITS.key:
        raise SpecError("key", key, f"must be at most {LIMITS.key - 1} bytes")
    return data


def user_key(key: bytes, prefix: str = "") -> str:
    """Decode a key; the reverse of `wire_key`."""
    return key[1:].decode("utf-8", "surrogateescape")[len(prefix) :]


def wire_value(value: Value) -> bytes:
    """Encode a value; text as UTF-8."""
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        raise SpecError("value", value, "must be bytes or text")
    if len(value) > LIMITS.value:
        raise SpecError("value", f"{len(value)} bytes", f"must be at most {LIMITS.value} bytes")
    return value


def wire_keys(keys: Iterable[str], prefix: str) -> tuple[bytes, ...]:
    """Encode keys."""
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
    """One change, of some `kind`, of the watched key `key`.

    `value` is None unless `kind` is SET.  `is_resync` is true if changes before this one
    may be missing: the store was restarted, or its history did not reach back to the
    moment when the connection broke.  The value is the present one in any case.
    `has_closed` is true if the key has expired because the process of its holder has ended:
    its kernel has closed the connection.
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
        """Set all `items`, one after another; the requests are sent together.

        After an error, as of `set`, some of them may have been set.
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
        """Mark the lease as ended."""
        self._ended.set()


class Watch:
    """The changes of a key or a prefix, in order; made by `Store.watch`.

    An async iterator.  Cancellation of a wait for the next change loses no change.
    It keeps the present value of each watched key, from which it derives the changes
    when the store sends a whole snapshot again.
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
