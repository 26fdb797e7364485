"""A store without a network: the same keys, waits, leases and watches in one process.

For tests and for jobs on a single host.  `another()` makes a second client of the
same contents, so that both sides of a meeting can be played in one program.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

from elastic_aio.errors import StoreClosed, StoreRefused
from elastic_aio.store import wire
from elastic_aio.store.keyspace import PENDING, Client, Keyspace, Refusal
from elastic_aio.store.replies import RawChange, RawView
from elastic_aio.store.requesting import HeldLease, RequestStore, WatchView

__all__ = ["MemoryStore"]


class _MemoryClient(Client):
    """Tags are the objects that are waiting: a future, a view, a lease."""

    def on_woken(self, tag: Any) -> None:
        _answer(tag, 0)

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        _answer(tag, values)

    def on_item(self, tag: Any, item: bytes) -> None:
        _answer(tag, item)

    def on_change(self, tag: Any, change: RawChange) -> None:
        tag.feed(change)

    def on_lease_ended(self, tag: Any) -> None:
        tag.end()


def _answer(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


class MemoryStore(RequestStore):
    """A store in memory, bound to the event loop that uses it.

    Nothing falls silent here: a lease ends when its block is left, when its client
    is closed, or by `expire_leases()`.
    """

    def __init__(self, *, timeout: float = 300.0, contents: Keyspace | None = None) -> None:
        """Begin empty, or share `contents`; `timeout` as for `connect`, in seconds."""
        super().__init__(timeout)
        self._keyspace = Keyspace() if contents is None else contents
        self._client = _MemoryClient()
        self._names = itertools.count(1)
        self._leases: dict[HeldLease, None] = {}
        self._views: dict[WatchView, None] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore {'closed' if self._is_closed else self._keyspace!r}>"

    def another(self) -> MemoryStore:
        """Return another client of the same contents; closing it ends only its own leases."""
        return MemoryStore(timeout=self._timeout, contents=self._keyspace)

    def expire_leases(self) -> None:
        """End this client's leases as if it had fallen silent."""
        for lease in self._leases:
            lease.end()
        self._leases.clear()
        self._keyspace.leases.forget(self._client, 0.0)

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        self._check_open()
        simple = self._keyspace.simple[op]
        try:
            if simple is not None:
                return simple(key, argument)
            call_for = self._keyspace.for_client[op]
            assert call_for is not None, op
            future = asyncio.get_running_loop().create_future()
            result = call_for(self._client, future, key, argument)
        except Refusal as error:
            raise StoreRefused(str(error)) from None
        if result is not PENDING:
            return result
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._keyspace.cancel(self._client, future)
            elif op == wire.POP_WHEN_PUSHED and future.exception() is None:
                self._keyspace.queue_unpop(key, future.result())
            raise

    async def grant(self, lease: HeldLease) -> None:
        self._check_open()
        name = b"%d-%d" % (id(self), next(self._names))
        terms = (int(lease.ttl * 1000), 0)
        # Time stands still for it: see the class.
        self._keyspace.grant_lease(self._client, lease, name, terms, math.inf)
        lease.name = name
        self._leases[lease] = None

    async def release(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        self._keyspace.release_lease(self._client, None, lease.name, None)

    async def open_watch(self, view: WatchView) -> None:
        self._check_open()
        is_prefix = view.op == wire.WATCH_PREFIX
        begin = self._keyspace.watch_prefix if is_prefix else self._keyspace.watch_key
        found: RawView = begin(self._client, view, view.key, -1)
        view.feed(found)
        self._views[view] = None

    def close_watch(self, view: WatchView) -> None:
        self._views.pop(view, None)
        self._keyspace.cancel(self._client, view)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        error = StoreClosed("the store was closed")
        for future in list(self._client.waits):
            if not future.done():
                future.set_exception(error)
        for view in self._views:
            view.fail(error)
        self.expire_leases()
        self._keyspace.forget(self._client, 0.0)
        # Its watches do not come back.  Leases in memory have no time of their own.
        self._keyspace.watches.expire(math.inf)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the store was closed")
