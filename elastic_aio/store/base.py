"""What every store can do, whether it is ours, torch's, or only in memory.

Keys are text and values are bytes, as in torch's `Store`; the names of operations
are torch's too.  A text value is stored as UTF-8.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from elastic_aio.checks import checked_items, checked_text
from elastic_aio.errors import SpecError

__all__ = ["Change", "ChangeKind", "Lease", "PrefixedStore", "Store", "Watch"]

Value = bytes | str


class ChangeKind(StrEnum):
    """What happened to a watched key."""

    SET = "set"
    DELETED = "deleted"
    EXPIRED = "expired"
    """Its lease ended: the holder died, fell silent, or lost its connection."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a watched key.

    `value` is None unless `kind` is SET.  `is_resync` tells that changes between
    could not be had any more (the store was replaced, or too much happened during a
    broken connection) and that this one brings the picture up to date.
    """

    kind: ChangeKind
    key: str
    value: bytes | None = None
    is_resync: bool = False


class Lease(abc.ABC):
    """Keys that live as long as this client does; made by `Store.lease`."""

    @property
    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the lease holds, as far as this client has been told."""

    @abc.abstractmethod
    async def set(self, key: str, value: Value) -> None:
        """Set `key`; it vanishes when the lease ends.

        Raises:
            StoreRefused: the lease has ended.
            StoreError: as for `Store.set`.
        """

    @abc.abstractmethod
    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Do `Store.compare_set`; a key that is stored vanishes when the lease ends.

        Raises:
            StoreRefused: the lease has ended.
            StoreError: as for `Store.compare_set`.
        """

    @abc.abstractmethod
    async def wait_ended(self) -> None:
        """Wait until the lease has ended against our will.  Cancelling changes nothing."""


class Watch(abc.ABC):
    """The changes of a key or a prefix, in order; made by `Store.watch`.

    An async iterator.  Cancelling a wait for the next change loses none.
    """

    @property
    @abc.abstractmethod
    def present(self) -> dict[str, bytes]:
        """The watched keys that were there when the watch began."""

    @abc.abstractmethod
    async def __anext__(self) -> Change:
        """Return the next change.

        Raises:
            StoreLost: the store is gone for good, or more changes came than are kept
                for a reader that does not read.
            StoreClosed: this program closed the store.
        """

    def __aiter__(self) -> Self:
        return self


class Store(abc.ABC):
    """A key-value store on which programs meet.

    An async context manager that closes itself.  Any number of tasks may use it at
    once.  Cancelling an operation leaves the store usable; whether a change that was
    under way has happened is then unknown.

    Every operation raises `SpecError` for keys or values that no store accepts, and
    one of `StoreError`: StoreClosed, StoreLost, StoreTimeout, StoreRefused.
    A `timeout` is in seconds; None means the store's own.
    """

    @abc.abstractmethod
    async def set(self, key: str, value: Value) -> None:
        """Store `value` under `key`."""

    @abc.abstractmethod
    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of `key`; wait until there is one."""

    @abc.abstractmethod
    async def peek(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if there is none now."""

    @abc.abstractmethod
    async def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which begins at 0, and return the sum (64 bits, wrapping).

        Raises:
            StoreRefused: the value is not a number (a torch server closes the
                connection instead: StoreLost).
        """

    @abc.abstractmethod
    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Store `desired` if the value is `expected`; return the value that is there then.

        An empty `expected` also matches an absent key.  If the key is absent and
        `expected` is not empty, nothing is stored and `expected` is returned.
        """

    @abc.abstractmethod
    async def check(self, keys: Iterable[str]) -> bool:
        """Tell whether each of `keys` has a value or is a non-empty queue."""

    @abc.abstractmethod
    async def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        """Wait until each of `keys` has been set (or is a non-empty queue)."""

    @abc.abstractmethod
    async def delete(self, key: str) -> bool:
        """Delete `key`; tell whether it was there."""

    @abc.abstractmethod
    async def append(self, key: str, value: Value) -> None:
        """Append to the value of `key`, which begins empty."""

    @abc.abstractmethod
    async def multi_get(self, keys: Iterable[str], *, timeout: float | None = None) -> list[bytes]:
        """Return the values of `keys`; wait until all are there."""

    @abc.abstractmethod
    async def multi_set(self, items: Mapping[str, Value]) -> None:
        """Store all `items` at once."""

    @abc.abstractmethod
    async def queue_push(self, key: str, item: Value) -> None:
        """Append `item` to the queue `key`."""

    @abc.abstractmethod
    async def queue_pop(self, key: str, *, timeout: float | None = None) -> bytes:
        """Take the oldest item of the queue `key`; wait until there is one.

        An item whose taker is cancelled goes back to the front (on a torch server:
        to the end).  One whose taker dies is lost.
        """

    @abc.abstractmethod
    async def queue_pop_nowait(self, key: str) -> bytes | None:
        """Take the oldest item of the queue `key`, or None if it is empty."""

    @abc.abstractmethod
    async def queue_len(self, key: str) -> int:
        """Return how many items the queue `key` holds."""

    @abc.abstractmethod
    async def num_keys(self) -> int:
        """Return the number of keys in the whole store, queues not counted."""

    @abc.abstractmethod
    async def list_keys(self) -> list[str]:
        """Return all keys, in no particular order, queues not included."""

    @abc.abstractmethod
    def lease(self, ttl: float, *, linger: float = 0.0) -> AbstractAsyncContextManager[Lease]:
        """Hold keys that vanish, with notice to watchers, when this client does.

        Leaving the block deletes them.

        Args:
            ttl: seconds of silence (a stopped process) after which they vanish, 2 or
                more; a client with a lease sends one small frame twice in that time.
            linger: seconds for which they survive the end of the connection, so
                that a client that reconnects in time keeps them.

        Raises:
            StoreRefused: on entering; the peer is a plain torch server.
        """

    @abc.abstractmethod
    def watch(self, name: str, *, is_prefix: bool = False) -> AbstractAsyncContextManager[Watch]:
        """Watch a key, or all keys that begin with `name`.

        Raises:
            StoreRefused: on entering; the peer is a plain torch server.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close this client; operations under way raise StoreClosed."""

    def prefixed(self, name: str) -> Store:
        """Return this store seen under `name`: key `k` there is `name/k` here.

        The same keys as torch's `PrefixStore`.  `num_keys` still counts all keys.
        Closing the view closes nothing.
        """
        return PrefixedStore(self, name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class _PrefixedLease(Lease):
    def __init__(self, lease: Lease, prefix: str) -> None:
        self._lease = lease
        self._prefix = prefix

    @property
    def is_alive(self) -> bool:
        return self._lease.is_alive

    async def set(self, key: str, value: Value) -> None:
        await self._lease.set(self._prefix + key, value)

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return await self._lease.compare_set(self._prefix + key, expected, desired)

    async def wait_ended(self) -> None:
        await self._lease.wait_ended()


class _PrefixedWatch(Watch):
    def __init__(self, watch: Watch, prefix: str) -> None:
        self._watch = watch
        self._skip = len(prefix)

    @property
    def present(self) -> dict[str, bytes]:
        return {key[self._skip :]: value for key, value in self._watch.present.items()}

    async def __anext__(self) -> Change:
        change = await self._watch.__anext__()
        return Change(change.kind, change.key[self._skip :], change.value, change.is_resync)


class _Mapped(AbstractAsyncContextManager[Any]):
    """Enter another context manager and wrap what it gives."""

    def __init__(
        self,
        inner: AbstractAsyncContextManager[Any],
        wrapper: type[_PrefixedLease | _PrefixedWatch],
        prefix: str,
    ) -> None:
        self._inner = inner
        self._wrapper = wrapper
        self._prefix = prefix

    async def __aenter__(self) -> Any:
        return self._wrapper(await self._inner.__aenter__(), self._prefix)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)


class PrefixedStore(Store):
    """A store seen under a prefix; made by `Store.prefixed`."""

    def __init__(self, store: Store, name: str) -> None:
        """See `store` under `name`."""
        self._store = store
        self._prefix = checked_text("prefix", name) + "/"

    def __repr__(self) -> str:
        return f"<{self._prefix!r} in {self._store!r}>"

    def _all(self, keys: Iterable[str]) -> list[str]:
        return [self._one(key) for key in checked_items("keys", keys)]

    def _one(self, key: str) -> str:
        if not isinstance(key, str):
            raise SpecError("key", key, "must be text")
        return self._prefix + key

    async def set(self, key: str, value: Value) -> None:
        await self._store.set(self._one(key), value)

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        return await self._store.get(self._one(key), timeout=timeout)

    async def peek(self, key: str) -> bytes | None:
        return await self._store.peek(self._one(key))

    async def add(self, key: str, amount: int = 1) -> int:
        return await self._store.add(self._one(key), amount)

    async def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        return await self._store.compare_set(self._one(key), expected, desired)

    async def check(self, keys: Iterable[str]) -> bool:
        return await self._store.check(self._all(keys))

    async def wait(self, keys: Iterable[str], *, timeout: float | None = None) -> None:
        await self._store.wait(self._all(keys), timeout=timeout)

    async def delete(self, key: str) -> bool:
        return await self._store.delete(self._one(key))

    async def append(self, key: str, value: Value) -> None:
        await self._store.append(self._one(key), value)

    async def multi_get(self, keys: Iterable[str], *, timeout: float | None = None) -> list[bytes]:
        return await self._store.multi_get(self._all(keys), timeout=timeout)

    async def multi_set(self, items: Mapping[str, Value]) -> None:
        await self._store.multi_set({self._one(key): value for key, value in items.items()})

    async def queue_push(self, key: str, item: Value) -> None:
        await self._store.queue_push(self._one(key), item)

    async def queue_pop(self, key: str, *, timeout: float | None = None) -> bytes:
        return await self._store.queue_pop(self._one(key), timeout=timeout)

    async def queue_pop_nowait(self, key: str) -> bytes | None:
        return await self._store.queue_pop_nowait(self._one(key))

    async def queue_len(self, key: str) -> int:
        return await self._store.queue_len(self._one(key))

    async def num_keys(self) -> int:
        return await self._store.num_keys()

    async def list_keys(self) -> list[str]:
        skip = len(self._prefix)
        return [key[skip:] for key in await self._store.list_keys() if key.startswith(self._prefix)]

    def lease(self, ttl: float, *, linger: float = 0.0) -> AbstractAsyncContextManager[Lease]:
        return _Mapped(self._store.lease(ttl, linger=linger), _PrefixedLease, self._prefix)

    def watch(self, name: str, *, is_prefix: bool = False) -> AbstractAsyncContextManager[Watch]:
        inner = self._store.watch(self._one(name), is_prefix=is_prefix)
        return _Mapped(inner, _PrefixedWatch, self._prefix)

    async def aclose(self) -> None:
        """Close nothing: the store belongs to whoever opened it."""
