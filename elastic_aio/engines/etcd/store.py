"""A store on etcd v3, through its JSON gateway (HTTP/1.1): no other package is needed.

Watches are continued by etcd's revisions: no change is lost while a connection or a member of etcd
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Never

from elastic_aio.aio import first_result, random_bytes
from elastic_aio.engines.base import RENEWALS, EngineClient
from elastic_aio.engines.etcd.link import EtcdLink
from elastic_aio.engines.etcd.operations import ChangeUnknown, EtcdKeys, Operation, Operations
from elastic_aio.engines.etcd.wire import (
    GRANT,
    KEEP_ALIVE,
    LEASE_KEYS,
    REVOKE,
    EtcdError,
    EtcdFence,
    Fault,
    LeaseReply,
    Reply,
    Request,
    WatchEvent,
    get,
)
from elastic_aio.engines.link import EngineAccess
from elastic_aio.errors import StoreError, StoreLost, StoreRefused
from elastic_aio.spec.rendezvous import ENGINES
from elastic_aio.store import replies, wire
from elastic_aio.store.base import FedWatch, HeldLease
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.keyspace import prefix_end
from elastic_aio.store.limits import OperationRefused
from elastic_aio.store.replies import RawChange, WatchSnapshot
from elastic_aio.text import os_bytes, os_text

_RESYNC_S: Final = 0.05
"""Seconds before a watch whose history is lost is read anew."""


class EtcdStore(EngineClient):
    """A client of a store on etcd; use it with `async with`.

    Several stores share one etcd by their key prefixes.  `multi_set` of more than 100 keys
    is made in several transactions.  After a failure of etcd `delete` may return False for
    a key that it has deleted.
    """

    _port = ENGINES["etcd"].port
    _link: EtcdLink  # type: ignore[mutable-override]  # no other one is assigned

    def _prepare(self, access: EngineAccess, key_prefix: str) -> None:
        self._keys = EtcdKeys(os_bytes(key_prefix))
        fence = EtcdFence(self._keys.fence(random_bytes(8).hex().encode()))
        self._link = EtcdLink(access, fence, self._on_link_ended)
        self._operations = Operations(self._keys)
        self._renew_home_at = 0.0
        self._renewed_at = 0.0
        self._adding = asyncio.Lock()

    async def _enter(self, deadline: float) -> None:
        if self._retention is None:
            await self._link.request(get(self._keys.value(b"/")), deadline)
        else:
            await self._grant_home(deadline)
        self._renewed_at = asyncio.get_running_loop().time()

    async def list_runs(self, begin: str) -> list[str]:
        self._check_open()
        start = self._key(begin)
        names = await self._run(lambda: self._operations.list_branches(start))
        return [*map(os_text, names)]

    async def remove_run(self, begin: str, *, record_key: str, record: bytes, members: str) -> bool:
        keys = [self._key(begin), self._key(record_key), record, self._key(members)]
        return bool(await self._run(lambda: self._operations.remove_branch(*keys)))

    async def end_lease(self, lease_id: bytes) -> None:
        self._check_open()
        with contextlib.suppress(EtcdError):  # it has ended, or will end by itself
            await self._ask(REVOKE, {"ID": lease_id.decode()})

    def continue_from(self, former: EngineStore) -> None:
        assert isinstance(former, EtcdStore)
        self._link.fence = former._link.fence
        self._link.fence.is_up = False

    async def _request(self, op: int, key: bytes, argument: Any) -> Any:
        match op:
            case wire.QUEUE_PUSH:
                item_id = random_bytes(8)
                return await self._run(lambda: self._operations.queue_push(key, argument, item_id))
            case wire.ADD | wire.APPEND:
                # One at a time: concurrent ones would make each other begin anew.
                async with self._adding:
                    return await self._run(lambda: self._operations.of(op, key, argument))
        return await self._run(lambda: self._operations.of(op, key, argument))

    async def _run(self, begin: Callable[[], Operation]) -> Any:
        home = self._operations.lease
        while True:
            try:
                return await self._carry_out(begin())
            except EtcdError as error:
                if error.fault is not Fault.LEASE_GONE:
                    raise StoreRefused(str(error)) from None
                if not home or await self._is_home_alive():
                    raise StoreRefused("the lease has ended") from None
                await self._grant_home()
            except OperationRefused as error:
                raise StoreRefused(str(error)) from None
            except ChangeUnknown:
                raise StoreLost("a member of etcd failed; the change may have been made") from None

    async def _carry_out(self, operation: Operation) -> Any:
        try:
            request = next(operation)
            while True:
                request = operation.send(await self._link.request(request))
        except StopIteration as stop:
            return stop.value

    # ------------------------------------------------------------------------ waits

    async def _wait(self, keys: Sequence[bytes], *, with_queues: bool) -> dict[bytes, bytes]:
        values: dict[bytes, bytes] = {}
        keys = list(dict.fromkeys(keys))
        while True:
            missing = [key for key in keys if key not in values]
            read_each = functools.partial(
                self._operations.read_each, missing, with_queues=with_queues
            )
            revision, found = await self._run(read_each)
            values |= found
            missing = [key for key in missing if key not in values]
            if not missing:
                return values
            try:
                await self._wait_changes(missing, revision + 1, values, with_queues=with_queues)
            except EtcdError as error:
                if error.fault is not Fault.COMPACTED:
                    raise StoreRefused(str(error)) from None
            else:
                return values

    async def _wait_changes(
        self, keys: list[bytes], revision: int, values: dict[bytes, bytes], *, with_queues: bool
    ) -> None:
        missing = {self._keys.value(key): key for key in keys}
        queues = [self._keys.queue(key) for key in keys] if with_queues else []

        async def follow(begin: bytes, end: bytes) -> None:
            async with contextlib.aclosing(self._link.changes(begin, end, revision)) as changes:
                async for event in changes:
                    place = event.kv.key
                    if event.type != "PUT":
                        continue
                    for key, (first, last) in zip(keys, queues, strict=False):
                        if first <= place < last:
                            place = self._keys.value(key)
                    # Else an item of another queue, or between two of the keys.
                    if place in missing:
                        values[missing.pop(place)] = event.kv.value
                    if not missing:
                        return

        work = [follow(min(missing), max(missing) + b"\0")]
        if queues:
            work.append(follow(min(queues)[0], max(queues)[1]))
        await first_result(work)

    async def _pop(self, key: bytes) -> bytes:
        queue = self._keys.queue(key)
        while True:
            length, item = await self._take(key)
            if length:
                return item
            read_all = functools.partial(self._operations.read_all, *queue)
            revision, pairs = await self._run(read_all)
            if pairs:
                continue
            with contextlib.suppress(EtcdError):  # it is read again
                async with contextlib.aclosing(self._link.changes(*queue, revision + 1)) as changes:
                    async for event in changes:
                        if event.type == "PUT":
                            break

    async def _push_front(self, key: bytes, item: bytes) -> None:
        item_id = random_bytes(8)
        await self._run(lambda: self._operations.queue_push(key, item, item_id, b"f"))

    # ----------------------------------------------------------------------- leases

    async def _grant(self, lease: HeldLease) -> None:
        self._check_open()
        body = {"TTL": str(math.ceil(lease.ttl))}
        reply: LeaseReply = await self._ask(GRANT, body)
        self._on_granted(lease, b"%d" % reply.ID)

    async def _end(self, lease: HeldLease) -> None:
        number = int(lease.lease_id)
        with contextlib.suppress(EtcdError):  # the lease has ended by itself
            reply: LeaseReply = await self._ask(LEASE_KEYS, {"ID": str(number), "keys": True})
            if reply.keys:
                await self._run(lambda: self._operations.delete_leased(number, reply.keys))
            await self._ask(REVOKE, {"ID": str(number)})

    async def _ask(self, path: str, body: dict[str, Any], deadline: float | None = None) -> Any:
        kind = Reply if path == REVOKE else LeaseReply
        return await self._link.request(Request(path, body, kind), deadline)

    def _renew_at(self) -> float | None:
        """Return when the first lease is due; without one, ask etcd nothing."""
        times = [self._renewed_at + math.ceil(lease.ttl) / RENEWALS for lease in self._leases]
        if self._operations.lease:
            times.append(self._renew_home_at)
        return min(times, default=None)

    async def _renew(self) -> None:
        self._renewed_at = asyncio.get_running_loop().time()
        try:
            await asyncio.gather(*map(self._renew_lease, self._leases))
            if self._operations.lease and self._renewed_at >= self._renew_home_at:
                await self._grant_home()
        except EtcdError as error:
            raise StoreRefused(str(error)) from None

    async def _renew_lease(self, lease: HeldLease) -> None:
        reply: LeaseReply = await self._ask(KEEP_ALIVE, {"ID": lease.lease_id.decode()})
        if reply.TTL <= 0:
            self._on_lease_ended(lease)

    async def _is_home_alive(self, deadline: float | None = None) -> bool:
        body = {"ID": str(self._operations.lease)}
        reply: LeaseReply = await self._ask(KEEP_ALIVE, body, deadline)
        return reply.TTL > 0

    async def _grant_home(self, deadline: float | None = None) -> None:
        """Begin or renew the lease of the ordinary keys."""
        assert self._retention is not None
        import hashlib  # OpenSSL is loaded for engines only

        # Every client of these keys knows its number, so that any of them renews it.
        name = self._keys.prefix + b"\0" + os_bytes(self._retained)
        number = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1 or 1
        self._operations.lease = number
        if not await self._is_home_alive(deadline):
            body = {"ID": str(number), "TTL": str(math.ceil(self._retention))}
            try:
                await self._ask(GRANT, body, deadline)
            except EtcdError as error:
                if error.fault is not Fault.LEASE_EXISTS:
                    raise StoreRefused(str(error)) from None
        now = asyncio.get_running_loop().time()
        self._renew_home_at = now + self._retention / RENEWALS

    # ---------------------------------------------------------------------- watches

    def _range(self, watch: FedWatch) -> tuple[bytes, bytes]:
        place = self._keys.value(watch.key)
        return place, prefix_end(place) if watch.op == wire.WATCH_PREFIX else b""

    async def _resync(self, watch: FedWatch) -> None:
        revision, pairs = await self._run(lambda: self._operations.read_all(*self._range(watch)))
        watch.feed(WatchSnapshot(True, revision, pairs))

    async def _follow(self, watch: FedWatch, on_open: Callable[[], None]) -> Never:
        while True:
            await self._resync(watch)
            on_open()
            with contextlib.suppress(EtcdError):  # its history is lost
                await self._feed(watch)
            await asyncio.sleep(_RESYNC_S)

    async def _feed(self, watch: FedWatch) -> None:
        changes = self._link.changes(*self._range(watch), watch.revision + 1)
        try:
            async with contextlib.aclosing(changes):
                async for event in changes:
                    watch.feed(await self._change(event))
        except EtcdError as error:
            if error.fault is not Fault.COMPACTED:
                raise StoreRefused(str(error)) from None
            raise

    async def _change(self, event: WatchEvent) -> RawChange:
        revision, key = event.kv.mod_revision, self._keys.key(event.kv.key)
        if event.type == "PUT":
            return RawChange(replies.CHANGE_SET, revision, key, event.kv.value)
        is_deleted = await self._was_deleted(revision)
        kind = replies.CHANGE_DELETED if is_deleted else replies.CHANGE_EXPIRED
        return RawChange(kind, revision, key, b"")

    async def _was_deleted(self, revision: int) -> bool:
        try:
            return bool(await self._carry_out(self._operations.was_deleted(revision)))
        except EtcdError:
            return False  # compacted: assume the worse

    def _end_watches(self, error: StoreError) -> None:
        for watch in self._watches:
            watch.fail(error)

    def _last_requests(self) -> list[Coroutine[Any, Any, Any]]:
        leases = [lease.lease_id.decode() for lease in self._leases]
        if self._link.fence.lease:  # requests on their way have no effect any more
            leases.append(str(self._link.fence.lease))
        requests = [self._ask(REVOKE, {"ID": lease_id}) for lease_id in leases]
        if self._operations.lease:
            requests.append(self._is_home_alive())  # renews it: the retention begins now
        return requests
