"""A store on etcd v3, through its JSON gateway (HTTP/1.1): no other package is needed.

Requests are those of `etcd_operations`, and `etcd_link` sends them.  Each watch has a
connection of its own and is continued by etcd's revisions: no change is lost while a
connection or a member of etcd fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from elastic_aio.aio import cancel_and_wait, create_task, random_bytes, run_shielded
from elastic_aio.errors import StoreClosed, StoreError, StoreLost, StoreRefused
from elastic_aio.spec.checks import check_number, checked_text
from elastic_aio.spec.rendezvous import ETCD_PORT, parse_endpoints
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import replies, wire
from elastic_aio.store.base import check_timeout
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.etcd_link import EtcdAccess, EtcdLink
from elastic_aio.store.etcd_operations import ChangeUnknown, EtcdKeys, Operation, Operations
from elastic_aio.store.etcd_wire import (
    GRANT,
    KEEP_ALIVE,
    LEASE_KEYS,
    REVOKE,
    EtcdError,
    Fault,
    LeaseReply,
    Reply,
    Request,
    WatchEvent,
    prefix_end,
)
from elastic_aio.store.handles import Lease, Watch
from elastic_aio.store.limits import OperationRefused
from elastic_aio.store.replies import RawChange, WatchSnapshot

_CLOSE_TIMEOUT: Final = 1.0
_RENEWALS: Final = 3
"""Times that a lease is renewed in its time to live."""

_RESYNC_S: Final = 0.05
"""Seconds before a watch whose history is lost is read anew."""


class EtcdStore(EngineStore):
    """A client of a store on etcd; use it with `async with`.

    Several stores share one etcd by their key prefixes.  `multi_set` of more than 100 keys
    is made in several transactions.  After a failure of etcd `delete` may return False for
    a key that it has deleted.
    """

    def __init__(
        self,
        endpoints: str,
        *,
        key_prefix: str = "/elastic_aio",
        user: str | None = None,
        password: str | None = None,
        tls: TlsSpec | None = None,
        timeout: float = 30.0,
        wait_timeout: float = 300.0,
        lost_after: float = 60.0,
        retention: float | None = None,
        retained: str = "",
    ) -> None:
        """Configure a client; nothing is connected yet.

        Args:
            endpoints: members of the cluster, `host:port` or `host` (port 2379), separated by
                commas.
            key_prefix: precedes every key in etcd.
            user, password: the user of etcd; None for none.
            tls: connect over TLS; `ca` verifies the members, `cert` and `key` are this client's.
            timeout: seconds to wait, on entering, for a member that answers.
            wait_timeout: the default `timeout` of `get`, `wait`, `multi_get` and `queue_pop`.
            lost_after: seconds without an answer after which the store is lost for good.
            retention: seconds after which etcd removes the keys that this client has set, if
                no client with the same `retained` renews them; None keeps them for ever.
            retained: names the keys that are kept together, those of a job for example.

        Raises:
            SpecError: an argument is invalid.
            StoreTimeout: on entering; no member answered in time.
            StoreRefused: on entering; etcd refuses the user, or has no JSON gateway.
        """
        super().__init__(wait_timeout, timeout)
        check_timeout(timeout)
        check_number("lost_after", lost_after, above=0)
        if retention is not None:
            check_number("retention", retention, above=0)
        members = parse_endpoints("endpoints", endpoints, ETCD_PORT)
        self._link = EtcdLink(
            EtcdAccess(members, user, password, tls, lost_after), self._on_link_ended
        )
        self._keys = EtcdKeys(checked_text("key_prefix", key_prefix).encode())
        self._operations = Operations(self._keys)
        self._retention = retention
        self._retained = retained
        self._renew_home_at = 0.0
        self._leases: dict[Lease, None] = {}
        self._watches: dict[Watch, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._has_new_lease = asyncio.Event()
        self._adding = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<EtcdStore at {self.endpoint}, {self._link.error or 'open'}>"

    async def open(self, timeout: float) -> None:
        if self._keeper is not None:
            raise StoreClosed("a store is opened once")
        deadline = asyncio.get_running_loop().time() + timeout
        if self._retention is None:
            await self._link.request(next(self._operations.peek(b"/", None)), deadline)
        else:
            await self._grant_home(deadline)
        self._keeper = create_task(self._keep_alive(), f"leases at {self.endpoint}")

    async def list_runs(self, begin: str) -> list[str]:
        start = self._key(begin)
        names = await self._run(lambda: self._operations.list_branches(start))
        return [name.decode("utf-8", "surrogateescape") for name in names]

    async def remove_run(self, begin: str, *, record_key: str, record: bytes, members: str) -> bool:
        keys = [self._key(begin), self._key(record_key), record, self._key(members)]
        return bool(await self._run(lambda: self._operations.remove_branch(*keys)))

    async def end_lease(self, lease_id: bytes) -> None:
        self._check_open()
        with contextlib.suppress(EtcdError):  # it has ended, or will end by itself
            await self._ask(REVOKE, {"ID": lease_id.decode()})

    @property
    def last_received_at(self) -> float:
        return self._link.last_received_at

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    @property
    def local_address(self) -> str:
        return self._link.local_address

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        match op:
            case wire.GET_WHEN_SET:
                values = await self._wait(argument, with_queues=False)
                return [values[name] for name in argument]
            case wire.WAIT:
                await self._wait(argument, with_queues=True)
                return replies.READY
            case wire.POP_WHEN_PUSHED:
                return await self._pop(key)
            case wire.QUEUE_PUSH:
                item_id = random_bytes(8)
                return await self._run(lambda: self._operations.queue_push(key, argument, item_id))
            case wire.ADD | wire.APPEND:
                # One at a time: concurrent ones would make each other begin anew.
                async with self._adding:
                    return await self._run(lambda: self._operations.of(op, key, argument))
        return await self._run(lambda: self._operations.of(op, key, argument))

    async def _run(self, begin: Callable[[], Operation]) -> Any:
        """Carry out an operation."""
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
        self._check_open()
        try:
            request = next(operation)
            while True:
                request = operation.send(await self._link.request(request))
        except StopIteration as stop:
            return stop.value

    def _check_open(self) -> None:
        self._link.check()
        if self._keeper is None:
            raise StoreClosed("the store is not open: use `async with EtcdStore(...)`")

    # ------------------------------------------------------------------------ waits

    async def _wait(self, keys: Sequence[bytes], *, with_queues: bool) -> dict[bytes, bytes]:
        """Wait until each key has been set once; return the values."""
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
        ranges = [(min(missing), max(missing) + b"\0")]
        if with_queues:
            queues = [self._keys.queue(key) for key in keys]
            ranges.append((min(queues)[0], max(queues)[1]))
        async with contextlib.aclosing(self._link.changes(ranges, revision)) as changes:
            async for event in changes:
                place = event.kv.key
                if event.type != "PUT":
                    continue
                if place not in missing:  # an item, or between two of the keys
                    queued = (key for key in keys if place.startswith(self._keys.queue(key)[0]))
                    place = self._keys.value(next(queued, b"")) if with_queues else b""
                if place in missing:
                    values[missing.pop(place)] = event.kv.value
                if not missing:
                    return

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
                async with contextlib.aclosing(self._link.changes([queue], revision + 1)) as found:
                    async for event in found:
                        if event.type == "PUT":
                            break

    async def _take(self, key: bytes) -> tuple[int, bytes]:
        """Pop an item if there is one; a cancellation returns it."""
        taking = create_task(self._run(lambda: self._operations.queue_pop(key, None)))
        try:
            length, item = await asyncio.shield(taking)
        except asyncio.CancelledError:
            await run_shielded(lambda: self._return_item(key, taking))
            raise
        return length, item

    async def _return_item(self, key: bytes, taking: asyncio.Task[tuple[int, bytes]]) -> None:
        """Return the item of a cancelled pop to the front of its queue."""
        with contextlib.suppress(StoreError):
            length, item = await taking
            if length:
                item_id = random_bytes(8)
                await self._run(lambda: self._operations.queue_push(key, item, item_id, b"f"))

    # ----------------------------------------------------------------------- leases

    async def _grant(self, lease: Lease) -> None:
        self._check_open()
        body = {"TTL": str(math.ceil(lease.ttl))}
        reply: LeaseReply = await self._ask(GRANT, body)
        lease.lease_id = b"%d" % reply.ID
        self._leases[lease] = None
        self._has_new_lease.set()

    async def _release(self, lease: Lease) -> None:
        self._leases.pop(lease, None)
        if not lease.is_alive:
            return
        number = int(lease.lease_id)
        with contextlib.suppress(EtcdError):  # the lease has ended by itself
            reply: LeaseReply = await self._ask(LEASE_KEYS, {"ID": str(number), "keys": True})
            if reply.keys:
                await self._run(lambda: self._operations.delete_leased(number, reply.keys))
            await self._ask(REVOKE, {"ID": str(number)})

    async def _ask(self, path: str, body: dict[str, Any], deadline: float | None = None) -> Any:
        kind = Reply if path == REVOKE else LeaseReply
        return await self._link.request(Request(path, body, kind), deadline)

    async def _keep_alive(self) -> None:
        """Renew the leases; without one, ask etcd nothing."""
        loop = asyncio.get_running_loop()
        renewed_at = loop.time()
        try:
            while True:
                self._has_new_lease.clear()
                times = [renewed_at + math.ceil(lease.ttl) / _RENEWALS for lease in self._leases]
                if self._operations.lease:
                    times.append(self._renew_home_at)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(times, default=None)):
                        await self._has_new_lease.wait()
                        continue
                renewed_at = loop.time()
                await asyncio.gather(*(self._renew(lease) for lease in list(self._leases)))
                if self._operations.lease and loop.time() >= self._renew_home_at:
                    await self._grant_home()
        except (StoreError, EtcdError) as error:
            self._link.fail(error if isinstance(error, StoreError) else StoreRefused(str(error)))

    async def _renew(self, lease: Lease) -> None:
        reply: LeaseReply = await self._ask(KEEP_ALIVE, {"ID": lease.lease_id.decode()})
        if reply.TTL <= 0:
            self._leases.pop(lease, None)
            lease._end()

    async def _is_home_alive(self, deadline: float | None = None) -> bool:
        body = {"ID": str(self._operations.lease)}
        reply: LeaseReply = await self._ask(KEEP_ALIVE, body, deadline)
        return reply.TTL > 0

    async def _grant_home(self, deadline: float | None = None) -> None:
        """Begin or renew the lease of the ordinary keys."""
        assert self._retention is not None
        import hashlib  # OpenSSL is loaded for engines only

        # Every client of these keys knows its number, so that any of them renews it.
        name = self._keys.prefix + b"\0" + self._retained.encode()
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
        self._renew_home_at = now + self._retention / _RENEWALS

    # ---------------------------------------------------------------------- watches

    async def _open_watch(self, watch: Watch) -> None:
        self._check_open()
        await self._resync(watch)
        self._watches[watch] = create_task(self._follow(watch), f"{watch!r}")

    def _close_watch(self, watch: Watch) -> None:
        following = self._watches.pop(watch, None)
        if following is not None:
            following.cancel()

    def _range(self, watch: Watch) -> tuple[bytes, bytes]:
        place = self._keys.value(watch.key)
        return place, prefix_end(place) if watch.op == wire.WATCH_PREFIX else b""

    async def _resync(self, watch: Watch) -> None:
        begin, end = self._range(watch)
        revision, pairs = await self._run(lambda: self._operations.read_all(begin, end))
        watch._feed(WatchSnapshot(True, revision, pairs))

    async def _follow(self, watch: Watch) -> None:
        """Feed a watch until it is closed or the store is lost."""
        try:
            while True:
                source = self._link.changes([self._range(watch)], watch.revision + 1)
                try:
                    async with contextlib.aclosing(source) as changes:
                        async for event in changes:
                            watch._feed(await self._change(event))
                except EtcdError as error:
                    if error.fault is not Fault.COMPACTED:
                        raise StoreRefused(str(error)) from None
                await asyncio.sleep(_RESYNC_S)
                await self._resync(watch)
        except StoreError as error:
            watch._fail(error)

    async def _change(self, event: WatchEvent) -> RawChange:
        revision, key = event.kv.mod_revision, self._keys.key(event.kv.key)
        if event.type == "PUT":
            return RawChange(replies.CHANGE_SET, revision, key, event.kv.value)
        is_leased = event.prev_kv.lease not in (0, self._operations.lease)
        if is_leased and not await self._was_deleted(revision):
            return RawChange(replies.CHANGE_EXPIRED, revision, key, b"")
        return RawChange(replies.CHANGE_DELETED, revision, key, b"")

    async def _was_deleted(self, revision: int) -> bool:
        try:
            return bool(await self._carry_out(self._operations.was_deleted(revision)))
        except EtcdError:
            return False  # compacted: assume the worse

    # ---------------------------------------------------------------------- the end

    def _on_link_ended(self, error: StoreError) -> None:
        for lease in self._leases:
            lease._end()
        self._leases.clear()
        for watch in self._watches:
            watch._fail(error)

    async def aclose(self) -> None:
        """Close this client; its leases end, pending operations raise StoreClosed.

        It takes at most a second or two.  Idempotent.

        Cancellation: raised when the connections are closed.
        """
        await run_shielded(self._close)

    async def _close(self) -> None:
        if self._link.error is None and self._keeper is not None:
            ends = [self._ask(REVOKE, {"ID": one.lease_id.decode()}) for one in self._leases]
            if self._operations.lease:
                ends.append(self._is_home_alive())  # renews it: the retention begins now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await asyncio.gather(*ends, return_exceptions=True)
        self._link.fail(StoreClosed("the store was closed"))
        tasks = [*self._watches.values(), *([self._keeper] if self._keeper else [])]
        self._watches.clear()
        await self._link.aclose()
        if tasks:
            await cancel_and_wait(tasks)
