"""Requests to a store on Redis: connections, runs of the script, and the store's history.

The first server that is no replica is used until it fails: see `EngineLink`.  All requests share
one connection, and each feed has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from elastic_aio.aio import random_bytes
from elastic_aio.engines.link import EngineAccess, EngineLink, NotAnswered, NotDone
from elastic_aio.engines.redis.connection import (
    NoPermissionError,
    NoScriptError,
    RedisConnection,
    RedisError,
    judge,
    pack,
    pack_words,
    reason_of_redis,
)
from elastic_aio.engines.redis.script import DONE, KEYS, LEASE_ENDED, LOST, SCRIPT
from elastic_aio.errors import StoreError, StoreLost, StoreRefused
from elastic_aio.store.keyspace import OperationRefused, parse_counter, wrap
from elastic_aio.text import os_bytes

_SHA: Final = hashlib.sha1(SCRIPT, usedforsecurity=False).hexdigest()
_BY_HASH: Final = pack_words([b"EVALSHA", _SHA.encode()])
_WHOLE: Final = pack_words([b"EVAL", SCRIPT])

_LOST: Final = "Redis has lost changes, by a fail-over or a restart, or has removed all keys"

_SCANNED: Final = b"1000"
"""Keys that Redis visits in one request."""

_UNREPEATABLE: Final = ("add", "swap", "append", "push", "pop")

_REQUESTS: Final = 64
"""Requests at once; further ones wait."""


Use = Callable[[RedisConnection], Awaitable[Any]]
"""A request: it is called with a connection."""


class RedisLink(EngineLink[RedisConnection]):
    """Connections to a Redis; used by any number of tasks."""

    engine = "Redis"

    def __init__(
        self, access: EngineAccess, sentinel: str | None, on_end: Callable[[StoreError], None]
    ) -> None:
        """Begin without a connection; `sentinel` is the name of the master."""
        super().__init__(access, on_end)
        self._sentinel = sentinel
        self._has_warned = False
        self._shared: tuple[int, RedisConnection] | None = None
        self.opened = 0
        """Connections that have been opened for requests."""
        self._sharing = asyncio.Lock()
        self._places = asyncio.Semaphore(_REQUESTS)

    async def keep_connected(self, serve: Callable[[RedisConnection], Awaitable[None]]) -> None:
        """Call `serve` with a connection of its own, and with another one when that ends."""
        attempts = 0
        while True:
            self.check()
            member, began = self._current, asyncio.get_running_loop().time()
            reason = "the connection was closed"
            try:
                connection = await self._open(member)
                self._busy[connection] = member
                attempts = 0
                try:
                    await serve(connection)
                finally:
                    self._busy.pop(connection, None)
                    await connection.aclose()
            except NotDone as error:
                reason = str(error)
            except (OSError, RedisError, ValueError) as error:
                with contextlib.suppress(NotDone):
                    reason = reason_of_redis(judge(error))
            await self._back_off(member, reason, attempts, began)
            attempts += 1

    def _connections(self) -> list[RedisConnection]:
        return [] if self._shared is None else [self._shared[1]]

    # ------------------------------------------------------------------ one attempt

    async def _attempt(
        self, member: int, request: Callable[[RedisConnection], Awaitable[Any]]
    ) -> Any:
        async with self._places:
            connection = await self._connection(member)
            try:
                async with asyncio.timeout(self._access.attempt_timeout):
                    result = await request(connection)
            except (OSError, RedisError) as error:
                raise NotAnswered(reason_of_redis(judge(error))) from None
        self.last_received_at = asyncio.get_running_loop().time()
        return result

    async def _connection(self, member: int) -> RedisConnection:
        async with self._sharing:
            self.check()
            if member != self._current:  # it has failed since then
                raise NotDone(self._reasons.get(member, ""))
            if self._shared is not None:
                owner, connection = self._shared
                if owner == member and connection.is_open:
                    return connection
                self._shared = None
                self._busy.pop(connection, None)
                await connection.aclose()
            connection = await self._open(member)
            self.opened += 1
            connection.number = self.opened
            self._shared = member, connection
            self._busy[connection] = member
            return connection

    async def _open(self, member: int) -> RedisConnection:
        """Return a new connection to a server, or raise NotDone: it is a replica, for example."""
        address = self._members[member]
        try:
            async with asyncio.timeout(self._access.attempt_timeout):
                if self._sentinel is not None:
                    address = await self._master(address)
                connection = await self._connect(*address, has_user=True)
        except (OSError, RedisError, ValueError) as error:
            raise NotDone(reason_of_redis(judge(error), is_plain=self._tls is None)) from None
        self.local_address = connection.local_address
        if self.error is not None:
            await connection.aclose()
            raise self.error
        return connection

    async def _connect(self, host: str, port: int, *, has_user: bool) -> RedisConnection:
        tls, access = self._access.tls, self._access
        connection = RedisConnection(
            host,
            port,
            tls=self._tls.current() if self._tls else None,
            server_name=tls.server_name if tls else None,
            peer_timeout=access.lost_after,
            user={"username": access.user, "password": access.password} if has_user else {},
        )
        try:
            await connection.open()
            if has_user:
                await connection.read_server()
        except NoPermissionError:
            pass  # a lost change is then detected by the revision alone
        except BaseException:  # a cancellation too: it has no other owner
            await connection.aclose()
            raise
        if has_user and not connection.eviction and not self._has_warned:
            import logging  # here: most clients have no use for it

            self._has_warned = True
            text = "store: %s does not show its maxmemory-policy, which must be noeviction"
            logging.getLogger(__name__).warning(text, self.endpoint)
        return connection

    async def _master(self, sentinel: tuple[str, int]) -> tuple[str, int]:
        name = self._sentinel or ""
        connection = await self._connect(*sentinel, has_user=False)
        try:
            command = pack(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", os_bytes(name))
            found = await connection.ask(command)
        finally:
            await connection.aclose()
        if not found:
            raise NotDone(f"the sentinel knows no master {name!r}")
        return found[0].decode(), int(found[1])


class KnownHistory(Struct):
    """The store's history as a client knows it: see `script`."""

    id: bytes = b""
    epoch: bytes = b""
    revision: int = 0


class RedisRequests:
    """Runs the script for one store.

    `client` names this client, and its successors.  `shortest` is the shortest time to live of the
    leases, and `due` the time until the next of them expires, in seconds as of the last reply; 0
    for none.
    """

    def __init__(self, link: RedisLink, tag: bytes, retention: int) -> None:
        """Begin without knowledge; `retention` is in milliseconds, 0 for none."""
        self._link = link
        self._tag = tag
        self._keys = pack_words([b"%d" % len(KEYS), *(tag + name for name in KEYS)])
        self._retention = b"%d" % retention
        self.client = random_bytes(8).hex().encode()
        self._runs = itertools.count()
        self.known = KnownHistory()
        self.shortest = 0.0
        self.due = 0.0

    async def run(self, op: str, *arguments: bytes, deadline: float | None = None) -> Any:
        """Run an operation of the script, until `deadline` (of the loop) if given.

        StoreRefused: Redis refuses it, or the lease has ended.  StoreLost: the store has lost
        changes.  And all as for `RedisLink.repeat`.
        """

        async def use(connection: RedisConnection) -> Any:
            known = self.known
            words = (
                op.encode(), self._tag, known.id, known.epoch, b"%d" % known.revision,
                connection.run_id, self._retention, self.client, b"%d" % connection.number,
                b"%x" % next(self._runs), *arguments,
            )  # fmt: skip
            # `Script` of the package would encode each key anew: longer than all the rest.
            tail = self._keys + pack_words(words)
            count = 3 + len(KEYS) + len(words)
            try:
                return await connection.ask(b"*%d\r\n%b%b" % (count, _BY_HASH, tail))
            except NoScriptError:
                pass
            return await connection.ask(b"*%d\r\n%b%b" % (count, _WHOLE, tail))

        answer, is_repeat = await self._link.repeat(
            use, is_repeatable=op not in _UNREPEATABLE, deadline=deadline
        )
        status, *state = answer[0].split(b" ")
        if status == LOST:
            self.known = KnownHistory()  # another store enters the present state
            self._link.fail(StoreLost(_LOST))
            self._link.check()
        identity, epoch, revision, ttl, due = state
        result = answer[1]
        self._learn(KnownHistory(identity, epoch, int(revision)))
        self.shortest, self.due = int(ttl) / 1000, int(due) / 1000
        if status == LEASE_ENDED:
            raise StoreRefused("the lease has ended")
        assert status == DONE
        if is_repeat and op == "cas" and result != arguments[2]:
            # Made by the first request, and replaced since.
            raise StoreLost("the connection to Redis failed; the change may have been made or not")
        return result

    async def scan(self, pattern: bytes) -> list[bytes]:
        """Return the keys of the server that match a pattern, some of them perhaps twice."""
        found: list[bytes] = []
        cursor = b"0"
        while True:
            position = cursor

            async def use(connection: RedisConnection, position: bytes = position) -> Any:
                return await connection.ask(
                    pack(b"SCAN", position, b"MATCH", pattern, b"COUNT", _SCANNED)
                )

            (cursor, keys), _ = await self._link.repeat(use)
            found += keys
            if cursor == b"0":
                return found

    def continue_from(self, former: RedisRequests) -> None:
        """Take over a former client's knowledge; its requests under way have no effect."""
        self.known, self.client = former.known, former.client
        self._runs = former._runs
        self._link.opened = former._link.opened

    def _learn(self, found: KnownHistory) -> None:
        """Keep the facts of a reply; replies of two connections may overtake each other."""
        known = self.known
        if (known.id, known.epoch) == (found.id, found.epoch):
            known.revision = max(known.revision, found.revision)
        elif known.epoch == b"" or found.revision >= known.revision:
            self.known = found

    async def add(self, key: bytes, amount: int) -> int:
        """Add to a counter; the script does so with small numbers, and this client with others."""
        is_done, value = await self.run("add", key, b"%d" % amount)
        while not is_done:
            try:
                total = wrap(parse_counter(value) + amount)
            except OperationRefused as error:
                raise StoreRefused(str(error)) from None
            if value is None:
                if await self.run("cas", key, b"", b"%d" % total, b"") == b"%d" % total:
                    return total
            elif await self.run("swap", key, value, b"%d" % total):
                return total
            is_done, value = await self.run("add", key, b"%d" % amount)
        return int(value)
