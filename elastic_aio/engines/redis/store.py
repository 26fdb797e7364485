"""A store on Redis or Valkey, through the package redis.

Each operation is one run of `script`.  Watches and waits read their keys when `feed` has subscribed
to them, and then follow the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Never

from elastic_aio.aio import random_bytes
from elastic_aio.engines.base import RENEWALS, EngineClient
from elastic_aio.engines.link import EngineAccess
from elastic_aio.engines.redis.feed import Channel, RedisFeed, WatchPages, escape
from elastic_aio.engines.redis.link import RedisLink, RedisRequests
from elastic_aio.engines.redis.script import PAGE
from elastic_aio.errors import StoreError
from elastic_aio.spec.rendezvous import ENGINES
from elastic_aio.store import replies, wire
from elastic_aio.store.base import FedWatch, HeldLease
from elastic_aio.store.engine import EngineStore
from elastic_aio.store.keyspace import prefix_end
from elastic_aio.store.replies import RawChange, WatchSnapshot
from elastic_aio.text import os_bytes, os_text

_IDLE: Final = 10.0
"""Seconds between two signs of life of a store without leases."""

_PART: Final = 1000
"""Keys in one request: Redis serves no other client while it carries out a request."""


# Redis takes the hash tag up to the first brace.
_CODES: Final = (("%", "%25"), ("{", "%7B"), ("}", "%7D"))


class RedisStore(EngineClient):
    """A client of a store on Redis; use it with `async with`.

    `multi_set` of more than 1,000 keys is made in several steps.  A key that is set and deleted
    while this client has no connection to Redis may be missed by its waits.
    """

    is_per_run = True

    _port = ENGINES["redis"].port
    _link: RedisLink  # type: ignore[mutable-override]  # no other one is assigned

    def __init__(self, endpoints: str, *, sentinel: str | None = None, **settings: Any) -> None:
        """Configure a client; nothing is connected yet.

        With `sentinel`, the name of a master, the endpoints are sentinels (port 26379).  All else
        is as for `EngineClient`.
        """
        self._sentinel = sentinel
        if sentinel is not None:
            self._port = ENGINES["redis"].ports["sentinel"]
        super().__init__(endpoints, **settings)

    def _prepare(self, access: EngineAccess, key_prefix: str) -> None:
        self._link = RedisLink(access, self._sentinel, self._on_link_ended)
        self._feed = RedisFeed(self._link, _IDLE + 2 * access.attempt_timeout)
        self._tag = b"{%b}" % os_bytes(_quote(f"{key_prefix}:{self._retained}"))
        retention = round((self._retention or 0) * 1000)
        self._requests = RedisRequests(self._link, self._tag, retention)
        self._run = self._requests.run
        self._touched_at = self._pinged_at = self._retain_at = 0.0

    async def _enter(self, deadline: float) -> None:
        await self._run("touch", b"%d" % bool(self._retention), deadline=deadline)
        self._touched_at = self._pinged_at = asyncio.get_running_loop().time()
        self._retain_at = self._touched_at + (self._retention or 0.0) / RENEWALS

    async def list_runs(self, begin: str) -> list[str]:
        """See `EngineStore`; of a Redis Cluster, those at the endpoint's server."""
        self._check_open()
        name = self._tag[1:-1]
        marks = await self._requests.scan(b"{%b*}m" % escape(name))
        found = [_unquote(os_text(mark[len(name) + 1 : -2])) for mark in set(marks)]
        return [run_id for run_id in found if run_id]

    async def remove_run(self, begin: str, *, record_key: str, record: bytes, members: str) -> bool:
        return bool(await self._run("purge", self._key(record_key), record, self._key(members)))

    async def end_lease(self, lease_id: bytes) -> None:
        self._check_open()
        await self._run("revoke", lease_id)

    @property
    def incarnation(self) -> bytes:
        return self._requests.known.id

    def continue_from(self, former: EngineStore) -> None:
        assert isinstance(former, RedisStore)
        self._requests.continue_from(former._requests)

    async def _request(self, op: int, key: bytes, argument: Any) -> Any:
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
            case wire.LIST_KEYS:
                names: list[bytes] = []
                begin = b"-"
                while found := await self._run("names", begin, b"+", b"%d" % _PART):
                    names += found
                    begin = b"(" + found[-1]
                return names
            case _:
                raise AssertionError(op)
        return None

    # ------------------------------------------------------------------------ waits

    def _value(self, key: bytes) -> Channel:
        return False, self._tag + b"c" + key

    def _queue(self, key: bytes) -> Channel:
        return False, self._tag + b"q" + key

    async def _wait(self, keys: Sequence[bytes], *, with_queues: bool) -> dict[bytes, bytes]:
        values: dict[bytes, bytes] = {}
        keys = list(dict.fromkeys(keys))
        await self._read_missing(keys, values, with_queues=with_queues)
        if len(values) == len(keys):
            return values
        places = {self._value(key): key for key in keys if key not in values}
        if with_queues:
            places |= {self._queue(key): key for key in keys if key not in values}
        with self._feed.listen(places) as listener:
            while len(values) < len(keys):
                message = await listener.get()
                if message is None:
                    await self._read_missing(keys, values, with_queues=with_queues)
                elif message.kind == replies.CHANGE_SET:
                    values.setdefault(places[False, message.channel], message.value)
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

    async def _push_front(self, key: bytes, item: bytes) -> None:
        await self._run("push", key, item, b"1")

    # ----------------------------------------------------------------------- leases

    async def _grant(self, lease: HeldLease) -> None:
        self._check_open()
        lease_id = random_bytes(8).hex().encode()
        await self._run("grant", lease_id, b"%d" % round(lease.ttl * 1000))
        self._on_granted(lease, lease_id)

    async def _end(self, lease: HeldLease) -> None:
        await self._run("release", lease.lease_id)

    def _renew_at(self) -> float | None:
        delays = (_IDLE, self._requests.shortest / RENEWALS, self._requests.due)
        return self._touched_at + min(filter(None, delays))

    async def _renew(self) -> None:
        """Renew the leases, and end expired leases of other clients.

        A client without a lease does so too: the time of leases stands still otherwise.
        """
        now = self._touched_at = asyncio.get_running_loop().time()
        is_due = bool(self._retention) and now >= self._retain_at
        leases = {lease.lease_id: lease for lease in self._leases}
        for lease_id in await self._run("touch", b"%d" % is_due, *leases):
            self._on_lease_ended(leases[lease_id])
        if is_due and self._retention:
            self._retain_at = now + self._retention / RENEWALS
        if now >= self._pinged_at + _IDLE / 2:
            self._feed.ping()
            self._pinged_at = now

    # ---------------------------------------------------------------------- watches

    async def _follow(self, watch: FedWatch, on_open: Callable[[], None]) -> Never:
        is_prefix = watch.op == wire.WATCH_PREFIX
        channel = self._value(watch.key)
        if is_prefix:
            channel = True, escape(channel[1]) + b"*"
        start = len(self._tag) + 1
        with self._feed.listen([channel]) as listener:
            pages = WatchPages()
            while True:
                message = await listener.get()
                if message is None:
                    pages = await self._read_pages(watch.key, is_prefix=is_prefix)
                    watch.feed(WatchSnapshot(True, pages.revision, tuple(pages.pairs)))
                    on_open()
                    continue
                key = message.channel[start:]
                if message.revision > pages.revision_of(key):
                    change = RawChange(message.kind, message.revision, key, message.value)
                    watch.feed(change)
                self._on_lease_seen(message.ttl / 1000)

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

    def _end_watches(self, error: StoreError) -> None:
        self._feed.fail(error)

    def _last_requests(self) -> list[Coroutine[Any, Any, Any]]:
        requests = [self._run("revoke", lease.lease_id) for lease in self._leases]
        if self._retention:
            requests.append(self._run("touch", b"1"))  # the retention begins now
        return requests

    async def _close(self) -> None:
        await super()._close()
        await self._feed.aclose()


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
