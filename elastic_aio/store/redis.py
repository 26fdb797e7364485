"""A store on Redis or Valkey, through the package redis.

Each operation is one run of the script in `redis_script`, which `redis_link` sends.  Watches
and waits read their keys whenever `redis_feed` has subscribed to them, and then follow the
messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from elastic_aio.aio import cancel_and_wait, create_task, random_bytes, run_shielded
from elastic_aio.errors import StoreClosed, StoreError
from elastic_aio.spec.checks import check_number, checked_text
from elastic_aio.spec.rendezvous import REDIS_PORT, SENTINEL_PORT, parse_endpoints
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import replies, wire
from elastic_aio.store.base import check_timeout
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.etcd_wire import prefix_end
from elastic_aio.store.handles import Lease, Watch
from elastic_aio.store.redis_feed import Channel, RedisFeed, WatchPages, escape
from elastic_aio.store.redis_link import RedisAccess, RedisLink
from elastic_aio.store.redis_requests import RedisRequests
from elastic_aio.store.redis_script import PAGE
from elastic_aio.store.replies import RawChange, WatchSnapshot

_CLOSE_TIMEOUT: Final = 1.0
_RENEWALS: Final = 3
"""Times that a lease is renewed in its time to live."""

_IDLE: Final = 10.0
"""Seconds between two signs of life of a store without leases."""

_PART: Final = 1000
"""Keys in one request: Redis serves no other client while it carries out a request."""


# Redis takes the hash tag up to the first brace.
_CODES: Final = (("%", "%25"), ("{", "%7B"), ("}", "%7D"))


class RedisStore(EngineStore):
    """A client of a store on Redis; use it with `async with`.

    `multi_set` of more than 1,000 keys is made in several steps.  A key that is set and deleted
    while this client has no connection to Redis may be missed by its waits.
    """

    is_per_run = True

    def __init__(
        self,
        endpoints: str,
        *,
        key_prefix: str = "/elastic_aio",
        user: str | None = None,
        password: str | None = None,
        tls: TlsSpec | None = None,
        sentinel: str | None = None,
        timeout: float = 30.0,
        wait_timeout: float = 300.0,
        lost_after: float = 60.0,
        retention: float | None = None,
        retained: str = "",
    ) -> None:
        """Configure a client; nothing is connected yet.

        Args:
            endpoints: servers, tried in their order, `host:port` or `host` (port 6379),
                separated by commas; those of the sentinels (port 26379) with `sentinel`.
            key_prefix, retained: the keys in Redis begin with `{KEY_PREFIX:RETAINED}`.
            user, password: the user of Redis; None for none.
            tls: connect over TLS; `ca` verifies the servers, `cert` and `key` are this client's.
            sentinel: the name of the master that the sentinels know; None without Sentinel.
            timeout: seconds to wait, on entering, for a server that answers.
            wait_timeout: the default `timeout` of `get`, `wait`, `multi_get` and `queue_pop`.
            lost_after: seconds without an answer after which the store is lost for good.
            retention: seconds after the last sign of the last client after which Redis removes
                the keys; None keeps them for ever.

        Raises:
            SpecError: an argument is invalid.
            StoreTimeout: on entering; no server answered in time.
            StoreRefused: on entering; Redis refuses the user.
        """
        super().__init__(wait_timeout, timeout)
        check_timeout(timeout)
        check_number("lost_after", lost_after, above=0)
        if retention is not None:
            check_number("retention", retention, above=0)
        port = REDIS_PORT if sentinel is None else SENTINEL_PORT
        members = parse_endpoints("endpoints", endpoints, port)
        access = RedisAccess(members, user, password, tls, sentinel, lost_after)
        self._link = RedisLink(access, self._on_link_ended)
        self._feed = RedisFeed(self._link, _IDLE + 2 * access.attempt_timeout)
        name = f"{checked_text('key_prefix', key_prefix)}:{retained}"
        self._tag = b"{%b}" % _quote(name).encode()
        self._requests = RedisRequests(self._link, self._tag, round((retention or 0) * 1000))
        self._run = self._requests.run
        self._retention = retention
        self._leases: dict[Lease, None] = {}
        self._watches: dict[Watch, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RedisStore at {self.endpoint}, {self._link.error or 'open'}>"

    async def open(self, timeout: float) -> None:
        if self._keeper is not None:
            raise StoreClosed("a store is opened once")
        deadline = asyncio.get_running_loop().time() + timeout
        await self._run("touch", b"%d" % bool(self._retention), deadline=deadline)
        self._keeper = create_task(self._keep_alive(), f"leases at {self.endpoint}")

    async def list_runs(self, begin: str) -> list[str]:
        """See `EngineStore`; of a Redis Cluster, those at the endpoint's server."""
        self._check_open()
        name = self._tag[1:-1]
        marks = await self._requests.scan(b"{%b*}m" % escape(name))
        found = [_unquote(mark[len(name) + 1 : -2].decode()) for mark in set(marks)]
        return [run_id for run_id in found if run_id]

    async def remove_run(self, begin: str, *, record_key: str, record: bytes, members: str) -> bool:
        return bool(await self._run("purge", self._key(record_key), record, self._key(members)))

    async def end_lease(self, lease_id: bytes) -> None:
        self._check_open()
        await self._run("revoke", lease_id)

    @property
    def last_received_at(self) -> float:
        return self._link.last_received_at

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    @property
    def local_address(self) -> str:
        return self._link.local_address

    @property
    def incarnation(self) -> bytes:
        return self._requests.known.id

    def continue_from(self, former: EngineStore) -> None:
        assert isinstance(former, RedisStore)
        self._requests.known = former._requests.known

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        self._check_open()
        match op:
            case wire.SET:
                await self._run("set", key, argument, b"")
            case wire.LEASED_SET:
                await self._run("set", key, *argument)
            case wire.PEEK:
                return await self._run("peek", key)
            case wire.COMPARE_SET:
                return await self._run("cas", key, *argument, b"")
            case wire.LEASED_COMPARE_SET:
                return await self._run("cas", key, *argument)
            case wire.ADD:
                return await self._requests.add(key, argument)
            case wire.APPEND:
                await self._run("append", key, argument)
            case wire.DELETE_KEY:
                return await self._run("del", key)
            case wire.NUM_KEYS:
                return await self._run("count")
            case wire.CHECK:
                for part in _parts(argument):
                    if await self._run("check", *part):
                        return replies.NOT_READY
                return replies.READY
            case wire.MULTI_SET:
                for part in _parts(argument):
                    await self._run("mset", *(text for pair in part for text in pair))
            case wire.QUEUE_PUSH:
                await self._run("push", key, argument, b"0")
            case wire.QUEUE_LEN:
                return await self._run("qlen", key)
            case wire.QUEUE_POP:
                return await self._run("pop", key)
            case _:
                return await self._call_long(op, key, argument)
        return None

    async def _call_long(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request that waits, or that needs many replies."""
        match op:
            case wire.GET_WHEN_SET:
                values = await self._wait(argument, with_queues=False)
                return [values[name] for name in argument]
            case wire.WAIT:
                await self._wait(argument, with_queues=True)
                return replies.READY
            case wire.POP_WHEN_PUSHED:
                return await self._pop(key)
            case wire.LIST_KEYS:
                names: list[bytes] = []
                begin = b"-"
                while found := await self._run("names", begin, b"+", b"%d" % _PART):
                    names += found
                    begin = b"(" + found[-1]
                return names
        raise AssertionError(op)

    def _check_open(self) -> None:
        self._link.check()
        if self._keeper is None:
            raise StoreClosed("the store is not open: use `async with RedisStore(...)`")

    # ------------------------------------------------------------------------ waits

    def _value(self, key: bytes) -> Channel:
        return False, self._tag + b"c" + key

    def _queue(self, key: bytes) -> Channel:
        return False, self._tag + b"q" + key

    async def _wait(self, keys: Sequence[bytes], *, with_queues: bool) -> dict[bytes, bytes]:
        """Wait until each key has been set once; return the values."""
        values: dict[bytes, bytes] = {}
        keys = list(dict.fromkeys(keys))
        await self._read_missing(keys, values, with_queues=with_queues)
        if len(values) == len(keys):
            return values
        places = {self._value(key): key for key in keys if key not in values}
        if with_queues:
            places |= {self._queue(key): key for key in keys if key not in values}
        with self._feed.listen(places) as listener:
            async with contextlib.aclosing(listener.messages()) as messages:
                async for message in messages:
                    if message is None:
                        await self._read_missing(keys, values, with_queues=with_queues)
                    elif message.kind == replies.CHANGE_SET:
                        values.setdefault(places[False, message.channel], message.value)
                    if len(values) == len(keys):
                        break
        return values

    async def _read_missing(
        self, keys: Sequence[bytes], values: dict[bytes, bytes], *, with_queues: bool
    ) -> None:
        for part in _parts([key for key in keys if key not in values]):
            found = await self._run("read", b"%d" % with_queues, *part)
            for key, value in zip(part, found, strict=True):
                if value is not None:
                    values.setdefault(key, value)

    async def _pop(self, key: bytes) -> bytes:
        length, item = await self._take(key)
        if length:
            return item
        with self._feed.listen([self._queue(key)]) as listener:
            while True:
                await listener.get()
                length, item = await self._take(key)
                if length:
                    return item

    async def _take(self, key: bytes) -> tuple[int, bytes]:
        """Pop an item if there is one; a cancellation returns it."""
        taking = create_task(self._run("pop", key))
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
                await self._run("push", key, item, b"1")

    # ----------------------------------------------------------------------- leases

    async def _grant(self, lease: Lease) -> None:
        self._check_open()
        lease_id = random_bytes(8).hex().encode()
        await self._run("grant", lease_id, b"%d" % round(lease.ttl * 1000))
        lease.lease_id = lease_id
        self._leases[lease] = None
        self._wake.set()

    async def _release(self, lease: Lease) -> None:
        self._leases.pop(lease, None)
        if lease.is_alive:
            await self._run("release", lease.lease_id)

    async def _keep_alive(self) -> None:
        """Renew the leases, and end those of other clients that have expired.

        A client without a lease does so too: the time of leases stands still otherwise.
        """
        loop = asyncio.get_running_loop()
        touched_at = pinged_at = loop.time()
        retain_at = touched_at + (self._retention or 0.0) / _RENEWALS
        try:
            while True:
                self._wake.clear()
                delays = (_IDLE, self._requests.shortest / _RENEWALS, self._requests.due)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(touched_at + min(filter(None, delays))):
                        await self._wake.wait()
                        continue
                touched_at = loop.time()
                is_due = bool(self._retention) and touched_at >= retain_at
                leases = {lease.lease_id: lease for lease in self._leases}
                for lease_id in await self._run("touch", b"%d" % is_due, *leases):
                    lease = leases[lease_id]
                    self._leases.pop(lease, None)
                    lease._end()
                if is_due and self._retention:
                    retain_at = touched_at + self._retention / _RENEWALS
                if touched_at >= pinged_at + _IDLE / 2:
                    self._feed.ping()
                    pinged_at = touched_at
        except StoreError as error:
            self._link.fail(error)

    # ---------------------------------------------------------------------- watches

    async def _open_watch(self, watch: Watch) -> None:
        self._check_open()
        opened = asyncio.get_running_loop().create_future()
        self._watches[watch] = create_task(self._follow(watch, opened), f"{watch!r}")
        try:
            await opened
        except BaseException:  # a cancellation too
            self._close_watch(watch)
            raise

    def _close_watch(self, watch: Watch) -> None:
        following = self._watches.pop(watch, None)
        if following is not None:
            following.cancel()

    async def _follow(self, watch: Watch, opened: asyncio.Future[None]) -> None:
        """Feed a watch until it is closed or the store is lost."""
        is_prefix = watch.op == wire.WATCH_PREFIX
        channel = self._value(watch.key)
        if is_prefix:
            channel = True, escape(channel[1]) + b"*"
        start = len(self._tag) + 1
        try:
            with self._feed.listen([channel]) as listener:
                pages = WatchPages()
                async with contextlib.aclosing(listener.messages()) as messages:
                    async for message in messages:
                        if message is None:
                            pages = await self._read_pages(watch.key, is_prefix=is_prefix)
                            watch._feed(WatchSnapshot(True, pages.revision, tuple(pages.pairs)))
                            if not opened.done():
                                opened.set_result(None)
                            continue
                        key = message.channel[start:]
                        if message.revision > pages.revision_of(key):
                            change = RawChange(message.kind, message.revision, key, message.value)
                            watch._feed(change)
                        self._on_lease_seen(message.ttl / 1000)
        except StoreError as error:
            watch._fail(error)
            if not opened.done():
                opened.set_exception(error)

    def _on_lease_seen(self, ttl: float) -> None:
        if ttl and (not self._requests.shortest or ttl < self._requests.shortest):
            self._requests.shortest = ttl
            self._wake.set()

    async def _read_pages(self, key: bytes, *, is_prefix: bool) -> WatchPages:
        pages = WatchPages()
        begin = b"[" + key
        end = b"(" + (prefix_end(key) if is_prefix else key + b"\0")
        while True:
            has_more, revision, *found = await self._run("scan", begin, end, b"%d" % PAGE)
            pages.add(found, int(revision))
            if not has_more:
                return pages
            begin = b"(" + found[-2]

    # ---------------------------------------------------------------------- the end

    def _on_link_ended(self, error: StoreError) -> None:
        for lease in self._leases:
            lease._end()
        self._leases.clear()
        self._feed.fail(error)

    async def aclose(self) -> None:
        """Close this client; its leases end, pending operations raise StoreClosed.

        It takes at most a second or two.  Idempotent.

        Cancellation: raised when the connections are closed.
        """
        await run_shielded(self._close)

    async def _close(self) -> None:
        if self._link.error is None and self._keeper is not None:
            ends = [self._run("revoke", lease.lease_id) for lease in self._leases]
            if self._retention:
                ends.append(self._run("touch", b"1"))  # the retention begins now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await asyncio.gather(*ends, return_exceptions=True)
        self._link.fail(StoreClosed("the store was closed"))
        tasks = [*self._watches.values(), *([self._keeper] if self._keeper else [])]
        self._watches.clear()
        await self._feed.aclose()
        await self._link.aclose()
        if tasks:
            await cancel_and_wait(tasks)


def _parts(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[first : first + _PART] for first in range(0, len(items), _PART)]


def _quote(name: str) -> str:
    for char, code in _CODES:
        name = name.replace(char, code)
    return name


def _unquote(name: str) -> str:
    for char, code in reversed(_CODES):
        name = name.replace(code, char)
    return name
