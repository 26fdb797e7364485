"""The operations of `Store` as requests of the wire protocol, however those travel.

The client over TCP and the store in memory differ in how a request reaches a
keyspace, not in what it says.
"""

from __future__ import annotations

import abc
import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final

from elastic_aio.aio import see_through
from elastic_aio.checks import check_number, checked_items
from elastic_aio.errors import SpecError, StoreError, StoreLost, StoreTimeout
from elastic_aio.store import replies, wire
from elastic_aio.store.base import Change, ChangeKind, Lease, Store, Value, Watch
from elastic_aio.store.replies import RawChange, RawView

__all__ = ["HeldLease", "RequestStore", "WatchView"]

MAX_KEY: Final = wire.WireLimits().key
MAX_VALUE: Final = wire.WireLimits().value
MAX_COUNT: Final = wire.WireLimits().count
MIN_TTL: Final = 2.0
"""Seconds; below, its frames would have to come more than once a second."""

_UNREAD: Final = 65_536
"""Changes that a watch holds for a reader that does not read."""

_RELEASE_TIMEOUT: Final = 5.0

_KIND_OF: Final = {
    replies.CHANGE_SET: ChangeKind.SET,
    replies.CHANGE_DELETED: ChangeKind.DELETED,
    replies.CHANGE_EXPIRED: ChangeKind.EXPIRED,
}


def wire_key(key: str) -> bytes:
    """Return a key as it travels: torch's clients put a `/` before it, so do we."""
    if not isinstance(key, str):
        raise SpecError("key", key, "must be text")
    # surrogateescape: a foreign key that is not UTF-8 can be listed and then used.
    data = b"/" + key.encode("utf-8", "surrogateescape")
    if len(data) > MAX_KEY:
        raise SpecError("key", key, f"must be at most {MAX_KEY - 1} bytes")
    return data


def user_key(key: bytes) -> str:
    """Return a key as users know it."""
    return key[1:].decode("utf-8", "surrogateescape")


def wire_value(value: Value) -> bytes:
    """Return a value as it travels."""
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        raise SpecError("value", value, "must be bytes or text")
    if len(value) > MAX_VALUE:
        raise SpecError("value", f"{len(value)} bytes", f"must be at most {MAX_VALUE} bytes")
    return value


def wire_keys(keys: Iterable[str]) -> tuple[bytes, ...]:
    """Return keys as they travel."""
    names = tuple(wire_key(key) for key in checked_items("keys", keys))
    if len(names) > MAX_COUNT:
        raise SpecError("keys", f"{len(names)} keys", f"must be at most {MAX_COUNT}")
    return names


class WatchView(Watch):
    """A watch as its reader sees it, and the present state by which gaps are bridged."""

    def __init__(self, op: int, key: bytes) -> None:
        """Make the reader of the watch that request `op` on `key` opens."""
        self.op = op
        self.key = key
        self.revision = -1
        """The last revision seen; negative: none, begin with all present keys."""
        self._state: dict[bytes, bytes] = {}
        self._present: dict[str, bytes] | None = None
        self._unread: deque[Change] = deque()
        self._error: StoreError | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<watch of {user_key(self.key)!r} at {self.revision}, {len(self._unread)} unread>"

    @property
    def present(self) -> dict[str, bytes]:
        return dict(self._present or {})

    def feed(self, news: RawChange | RawView) -> None:
        """Take what the store sent."""
        if isinstance(news, RawChange):
            self.revision = news.revision
            self._apply(news.kind, news.key, news.value, is_resync=False)
        elif news.is_whole:
            self.revision = news.revision
            self._catch_up(dict(news.pairs))
        self._wake()

    def fail(self, error: StoreError) -> None:
        """End the watch: the reader gets `error` after what came before it."""
        self._error = self._error or error
        self._wake()

    async def __anext__(self) -> Change:
        while not self._unread:
            if self._error is not None:
                raise self._error
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self._unread.popleft()

    def _catch_up(self, whole: dict[bytes, bytes]) -> None:
        if self._present is None:
            self._state = whole
            self._present = {user_key(key): value for key, value in whole.items()}
            return
        for key in [key for key in self._state if key not in whole]:
            self._apply(replies.CHANGE_DELETED, key, b"", is_resync=True)
        for key, value in whole.items():
            if self._state.get(key) != value:
                self._apply(replies.CHANGE_SET, key, value, is_resync=True)

    def _apply(self, kind: int, key: bytes, value: bytes, *, is_resync: bool) -> None:
        is_set = kind == replies.CHANGE_SET
        if is_set:
            self._state[key] = value
        else:
            self._state.pop(key, None)
        if len(self._unread) >= _UNREAD:
            self.fail(StoreLost(f"more than {_UNREAD} changes came while nobody read them"))
        if self._error is None:
            new = value if is_set else None
            self._unread.append(Change(_KIND_OF[kind], user_key(key), new, is_resync))

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


class HeldLease(Lease):
    """A lease as its holder sees it."""

    def __init__(self, store: RequestStore, ttl: float, linger: float) -> None:
        """Make a lease of `store` that has not been granted yet; times in seconds."""
        self._store = store
        self.ttl = ttl
        self.linger = linger
        self.name = b""
        self._ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<lease {self.name.hex()} {'alive' if self.is_alive else 'ended'}>"

    @property
    def is_alive(self) -> bool:
        return bool(self.name) and not self._ended.is_set()

    def end(self) -> None:
        """Note that the store has ended it."""
        self._ended.set()

    async def set(self, key: str, value: Value) -> None:
        argument = [wire_value(value), self.name]
        await self._store.call(wire.LEASED_SET, wire_key(key), argument)

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        argument = [wire_value(expected), wire_value(desired), self.name]
        result = await self._store.call(wire.LEASED_COMPARE_SET, wire_key(key), argument)
        return bytes(result)

    async def wait_ended(self) -> None:
        await self._ended.wait()


class _LeaseBlock(AbstractAsyncContextManager[Lease]):
    def __init__(self, store: RequestStore, lease: HeldLease) -> None:
        self._store = store
        self._lease = lease

    async def __aenter__(self) -> Lease:
        await self._store.grant(self._lease)
        return self._lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await see_through(self._release)

    async def _release(self) -> None:
        lease = self._lease
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await self._store.release(lease)
        except (StoreError, TimeoutError):
            # The keys vanish all the same: that is what a lease is for.
            pass
        finally:
            lease.end()


class _WatchBlock(AbstractAsyncContextManager[Watch]):
    def __init__(self, store: RequestStore, view: WatchView) -> None:
        self._store = store
        self._view = view

    async def __aenter__(self) -> Watch:
        await self._store.open_watch(self._view)
        return self._view

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.close_watch(self._view)


class RequestStore(Store):
    """A store whose operations are requests; subclasses carry them."""

    def __init__(self, timeout: float) -> None:
        """Let waiting operations last `timeout` seconds unless they say otherwise."""
        check_timeout(timeout)
        self._timeout = timeout

    @abc.abstractmethod
    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out one request, however long it takes, and return its result.

        Cancelling it withdraws a wait; the store stays usable.
        """

    @abc.abstractmethod
    async def grant(self, lease: HeldLease) -> None:
        """Give `lease` its name; it ends with `end` from now on."""

    @abc.abstractmethod
    async def release(self, lease: HeldLease) -> None:
        """End `lease` at its holder's wish."""

    @abc.abstractmethod
    async def open_watch(self, view: WatchView) -> None:
        """Feed `view` from now on; return when it knows the present keys."""

    @abc.abstractmethod
    def close_watch(self, view: WatchView) -> None:
        """Stop feeding `view`."""

    async def _within(
        self, timeout: float | None, op: int, key: bytes, argument: Any, what: Any
    ) -> Any:
        """Carry out a request that waits for `what`."""
        if timeout is None:
            timeout = self._timeout
        else:
            check_timeout(timeout)
        try:
            async with asyncio.timeout(None if timeout == math.inf else timeout):
                return await self.call(op, key, argument)
        except TimeoutError:
            raise StoreTimeout(f"{_shown(what)} not there after {timeout:g} s") from None

    async def set(self, key: str, value: Value) -> None:
        await self.call(wire.SET, wire_key(key), wire_value(value))

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        keys = (wire_key(key),)
        values = await self._within(timeout, wire.GET_WHEN_SET, b"", keys, key)
        return bytes(values[0])

    async def peek(self, key: str) -> bytes | None:
        value: bytes | None = await self.call(wire.PEEK, wire_key(key), None)
        return value

    async def add(self, key: str, amount: int = 1) -> int:
        if isinstance(amount, bool) or not isinstance(amount, int) or abs(amount) >= 1 << 63:
            raise SpecError("amount", amount, "must be a whole number of 64 bits")
        return int(await self.call(wire.ADD, wire_key(key), amount))

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        argument = [wire_value(expected), wire_value(desired)]
        return bytes(await self.call(wire.COMPARE_SET, wire_key(key), argument))

    async def check(self, keys: Iterable[str]) -> bool:
        answer = await self.call(wire.CHECK, b"", wire_keys(keys))
        return bool(answer == replies.READY)

    async def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        keys = tuple(checked_items("keys", keys))
        await self._within(timeout, wire.WAIT, b"", wire_keys(keys), keys)

    async def delete(self, key: str) -> bool:
        return bool(await self.call(wire.DELETE_KEY, wire_key(key), None))

    async def append(self, key: str, value: Value) -> None:
        await self.call(wire.APPEND, wire_key(key), wire_value(value))

    async def multi_get(self, keys: Iterable[str], *, timeout: float | None = None) -> list[bytes]:
        keys = tuple(checked_items("keys", keys))
        names = wire_keys(keys)
        return list(await self._within(timeout, wire.GET_WHEN_SET, b"", names, keys))

    async def multi_set(self, items: Mapping[str, Value]) -> None:
        pairs = tuple((wire_key(key), wire_value(value)) for key, value in items.items())
        if len(pairs) > MAX_COUNT:
            raise SpecError("items", f"{len(pairs)} items", f"must be at most {MAX_COUNT}")
        await self.call(wire.MULTI_SET, b"", pairs)

    async def queue_push(self, key: str, item: Value) -> None:
        await self.call(wire.QUEUE_PUSH, wire_key(key), wire_value(item))

    async def queue_pop(self, key: str, *, timeout: float | None = None) -> bytes:
        name = wire_key(key)
        return bytes(await self._within(timeout, wire.POP_WHEN_PUSHED, name, None, key))

    async def queue_pop_nowait(self, key: str) -> bytes | None:
        length, item = await self.call(wire.QUEUE_POP, wire_key(key), None)
        return bytes(item) if length else None

    async def queue_len(self, key: str) -> int:
        return int(await self.call(wire.QUEUE_LEN, wire_key(key), None))

    async def num_keys(self) -> int:
        return int(await self.call(wire.NUM_KEYS, b"", None))

    async def list_keys(self) -> list[str]:
        names = await self.call(wire.LIST_KEYS, b"", None)
        return [user_key(name) for name in names if name.startswith(b"/")]

    def lease(self, ttl: float, *, linger: float = 0.0) -> AbstractAsyncContextManager[Lease]:
        check_number("ttl", ttl, at_least=MIN_TTL)
        check_number("linger", linger, at_least=0)
        return _LeaseBlock(self, HeldLease(self, min(ttl, 1e6), min(linger, 1e6)))

    def watch(self, name: str, *, is_prefix: bool = False) -> AbstractAsyncContextManager[Watch]:
        op = wire.WATCH_PREFIX if is_prefix else wire.WATCH_KEY
        return _WatchBlock(self, WatchView(op, wire_key(name)))


def check_timeout(timeout: float) -> None:
    """Refuse what is no timeout; infinity is one."""
    if timeout != math.inf:
        check_number("timeout", timeout, at_least=0)


def _shown(what: object) -> str:
    if isinstance(what, str):
        return f"key {what!r}"
    keys = list(what) if isinstance(what, tuple) else []
    listed = ", ".join(map(repr, keys[:3]))
    return f"keys {listed}" + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
