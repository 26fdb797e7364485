"""A store in memory, without a network: for tests and for jobs of one process."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from typing import Any

from elastic_aio.aio import set_result_if_pending
from elastic_aio.errors import StoreClosed, StoreRefused
from elastic_aio.store import wire
from elastic_aio.store.base import FedWatch, HeldLease, Store
from elastic_aio.store.keyspace import PENDING, Client, Keyspace
from elastic_aio.store.limits import OperationRefused, Work
from elastic_aio.store.link import fail_if_pending
from elastic_aio.store.replies import RawChange


class _MemoryClient(Client):
    """Its tags are the objects to notify: a future, a watch or a lease."""

    def on_woken(self, tag: Any) -> None:
        set_result_if_pending(tag, 0)

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        set_result_if_pending(tag, values)

    def on_item(self, tag: Any, item: bytes) -> None:
        set_result_if_pending(tag, item)

    def on_refused(self, tag: Any, why: str) -> None:
        fail_if_pending(tag, StoreRefused(why))

    def on_change(self, tag: Any, change: RawChange) -> None:
        tag.feed(change)

    def on_lease_ended(self, tag: Any) -> None:
        tag.end()


class MemoryStore(Store):
    """A store in memory, bound to the event loop that uses it.

    A lease does not expire by itself: it ends when its block is left, when its client is closed, or
    by `expire_leases`.
    """

    def __init__(self, *, timeout: float = 300.0) -> None:
        """Create an empty store; `timeout` is the `wait_timeout` of `connect`, in seconds."""
        super().__init__(timeout)
        self._keyspace = Keyspace(work=Work(sys.maxsize))
        self._client = _MemoryClient()
        self._lease_numbers = itertools.count(1)
        self._leases: dict[HeldLease, None] = {}
        self._watches: dict[FedWatch, None] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MemoryStore {'closed' if self._is_closed else self._keyspace!r}>"

    def another(self) -> MemoryStore:
        """Return another client of the same contents; closing it ends only its own leases."""
        other = MemoryStore(timeout=self._timeout)
        other._keyspace = self._keyspace
        return other

    def expire_leases(self) -> None:
        """End the leases of this client, as if it had stopped sending heartbeats."""
        for lease in self._leases:
            lease.end()
        self._leases.clear()
        self._keyspace.leases.forget(self._client, 0.0)

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        self._check_open()
        handler = self._keyspace.handlers[op]
        try:
            if handler is not None:
                result = handler(key, argument)
            else:
                client_handler = self._keyspace.client_handlers[op]
                assert client_handler is not None, op
                future = asyncio.get_running_loop().create_future()
                result = client_handler(self._client, future, key, argument)
        except OperationRefused as error:
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

    async def _grant(self, lease: HeldLease) -> None:
        self._check_open()
        lease_id = b"%d-%d" % (id(self), next(self._lease_numbers))
        terms = (int(lease.ttl * 1000), 0)
        # Granted at an infinite time, so that its deadline never passes.
        self._keyspace.grant_lease(self._client, lease, lease_id, terms, math.inf)
        lease.lease_id = lease_id
        self._leases[lease] = None

    async def _release(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        self._keyspace.release_lease(self._client, None, lease.lease_id, None)

    async def _open_watch(self, watch: FedWatch) -> None:
        self._check_open()
        is_prefix = watch.op == wire.WATCH_PREFIX
        watch.feed(self._keyspace.watch(self._client, watch, watch.key, -1, is_prefix=is_prefix))
        self._watches[watch] = None

    def _close_watch(self, watch: FedWatch) -> None:
        self._watches.pop(watch, None)
        self._keyspace.cancel(self._client, watch)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        error = StoreClosed("the store was closed")
        for future in list(self._client.waits):
            fail_if_pending(future, error)
        for watch in self._watches:
            watch.fail(error)
        self.expire_leases()
        while self._keyspace.forget(self._client, 0.0):
            pass
        # Its watches cannot be continued.
        self._keyspace.watches.expire(math.inf)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the store was closed")
