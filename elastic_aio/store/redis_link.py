"""Connections to the servers of a Redis: fail-over, Sentinel, users, and what Redis refuses.

The servers are tried in their order, and the first one that is no replica is used until it
fails.  A request that no server answers is sent again with growing, jittered delays, if it may
be made twice.  After `lost_after` seconds without an answer the link is lost for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from msgspec import Struct

from elastic_aio.errors import (
    StoreClosed,
    StoreError,
    StoreLost,
    StoreTimeout,
)
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store.handshake import client_context
from elastic_aio.store.redis_connection import (
    NoPermissionError,
    NotDone,
    RedisConnection,
    RedisError,
    ResponseError,
    close_connection,
    judge,
    reason_of,
)

_CONNECTIONS: Final = 8
"""Requests at once; further ones wait."""

_RETRY: Final = Backoff(initial=0.05, factor=2.0, cap=1.0)


class RedisAccess(Struct, frozen=True):
    """Where the servers are and how to connect; the fields are described at `RedisStore`."""

    endpoints: tuple[str, ...]
    user: str | None
    password: str | None
    tls: TlsSpec | None
    sentinel: str | None
    lost_after: float

    @property
    def attempt_timeout(self) -> float:
        """Seconds for one server to answer."""
        return min(3.0, max(1.0, self.lost_after / 3))


class RedisLink:
    """Connections to a Redis; used by any number of tasks."""

    def __init__(self, access: RedisAccess, on_end: Callable[[StoreError], None]) -> None:
        """Parse the endpoints and load the certificates; nothing is connected yet.

        `on_end` is called once, when the link is lost or closed.

        Raises:
            SpecError: one of them cannot be used.
        """
        self._access = access
        self._members = [parse_host_port("endpoint", text) for text in access.endpoints]
        self._tls = client_context(access.tls)
        self._current = 0
        self._reasons: dict[int, str] = {}
        self._idle: list[tuple[int, RedisConnection]] = []
        self._busy: dict[RedisConnection, int] = {}
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self.error: StoreError | None = None
        self._on_end = on_end
        self.last_received_at = 0.0
        self.local_address = ""

    @property
    def endpoint(self) -> str:
        """The server, or the sentinel, that is used now."""
        return self._access.endpoints[self._current]

    def explain(self) -> str:
        """Return why each server cannot be used."""
        return ", ".join(
            f"{endpoint}: {self._reasons.get(index, 'not tried')}"
            for index, endpoint in enumerate(self._access.endpoints)
        )

    async def request(
        self,
        use: Callable[[RedisConnection], Awaitable[Any]],
        *,
        is_repeatable: bool = True,
        deadline: float | None = None,
    ) -> tuple[Any, bool]:
        """Call `use` with a connection until it succeeds, until `deadline` (of the loop) if given.

        Returns:
            The result, and whether an earlier call may have been carried out too.

        Raises:
            StoreRefused: Redis refuses the request.
            StoreLost: the link is lost, or the request must not be sent again.
            StoreTimeout: no server has answered until `deadline`.
        """
        began, is_repeat = asyncio.get_running_loop().time(), False
        attempt = 0
        while True:
            self.check()
            member = self._current
            try:
                return await self._attempt(member, use), is_repeat
            except NotDone as error:
                reason = str(error)
            except (OSError, RedisError) as error:
                reason, is_repeat = reason_of(error), True
                if not is_repeatable:
                    self.check()
                    self._fail_over(member, reason)
                    text = f"{reason}; the change may have been made or not"
                    raise StoreLost(text) from None
            await self._back_off(member, reason, attempt, began, deadline)
            attempt += 1

    async def keep_connected(self, serve: Callable[[RedisConnection], Awaitable[None]]) -> None:
        """Call `serve` with a connection of its own, and with another one when that ends.

        Raises:
            StoreError: as for `request`.
        """
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            self.check()
            member, began = self._current, loop.time()
            reason = "the connection was closed"
            try:
                connection = await self._open(member)
                self._busy[connection] = member
                attempt = 0
                try:
                    await serve(connection)
                finally:
                    self._busy.pop(connection, None)
                    await close_connection(connection)
            except NotDone as error:
                reason = str(error)
            except (OSError, RedisError) as error:
                with contextlib.suppress(NotDone):
                    reason = reason_of(judge(error))
            await self._back_off(member, reason, attempt, began, None)
            attempt += 1

    def check(self) -> None:
        """Raise the error of a link that is lost or closed."""
        if self.error is not None:
            raise self.error

    def fail(self, error: StoreError) -> None:
        """End the link: every request raises `error` from now on."""
        if self.error is None:
            self.error = error
            for connection in self._busy:
                connection.abort()
            self._on_end(error)

    async def aclose(self) -> None:
        """Close all connections.

        Idempotent.
        """
        self.fail(StoreClosed("the store was closed"))
        connections = [connection for _, connection in self._idle]
        self._idle.clear()
        await asyncio.gather(*map(close_connection, connections))

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, member: int, use: Callable[[RedisConnection], Awaitable[Any]]) -> Any:
        async with self._places:
            self.check()
            connection = await self._connection(member)
            self._busy[connection] = member
            is_usable = False
            try:
                async with asyncio.timeout(self._access.attempt_timeout):
                    result = await use(connection)
                is_usable = True
            except RedisError as error:
                is_usable = isinstance(error, ResponseError)
                raise judge(error) from None
            finally:  # after a cancellation too: the reply is not read
                del self._busy[connection]
                if is_usable and self.error is None and connection.is_connected:
                    self._idle.append((member, connection))
                else:
                    await close_connection(connection)
        self.last_received_at = asyncio.get_running_loop().time()
        return result

    async def _connection(self, member: int) -> RedisConnection:
        while self._idle:
            owner, connection = self._idle.pop()
            if owner == member and connection.is_connected:
                return connection
            await close_connection(connection)
        return await self._open(member)

    async def _open(self, member: int) -> RedisConnection:
        """Return a new connection to a server that is no replica.

        Raises:
            NotDone: there is none.
            StoreRefused: it refuses this client.
        """
        address = self._members[member]
        try:
            async with asyncio.timeout(self._access.attempt_timeout):
                if self._access.sentinel is not None:
                    address = await self._master(address)
                connection = await self._connect(*address, has_user=True)
        except (OSError, RedisError) as error:
            raise NotDone(reason_of(judge(error), is_plain=self._tls is None)) from None
        self.local_address = connection.local_address
        if self.error is not None:
            await close_connection(connection)
            raise self.error
        return connection

    async def _connect(self, host: str, port: int, *, has_user: bool) -> RedisConnection:
        tls, access = self._access.tls, self._access
        user = {"username": access.user, "password": access.password} if has_user else {}
        connection = RedisConnection(
            host,
            port,
            self._tls.current() if self._tls else None,
            tls.server_name if tls else None,
            **(user if access.user is not None else {}),
        )
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            connection.tune(access.lost_after)
            if has_user:
                await connection.read_server()
        except NoPermissionError:
            pass  # a lost change is then detected by the revision alone
        except BaseException:  # a cancellation too: it has no other owner
            await close_connection(connection)
            raise
        return connection

    async def _master(self, sentinel: tuple[str, int]) -> tuple[str, int]:
        connection = await self._connect(*sentinel, has_user=False)
        name = self._access.sentinel
        try:
            found = await connection.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        finally:
            await close_connection(connection)
        if not found:
            raise NotDone(f"the sentinel knows no master {name!r}")
        return found[0].decode(), int(found[1])

    # ------------------------------------------------------------------ after a failure

    def _fail_over(self, member: int, reason: str) -> None:
        """Use the next server, and end all that still waits for this one."""
        self._reasons[member] = reason
        if self._current == member:
            self._current = (member + 1) % len(self._members)
            for connection, other in list(self._busy.items()):
                if other == member:
                    connection.abort()

    async def _back_off(
        self, member: int, reason: str, attempt: int, began: float, deadline: float | None
    ) -> None:
        """Wait before the next attempt.

        Raises:
            StoreLost: no server has answered for too long.
            StoreTimeout: the deadline would pass.
        """
        self.check()
        self._fail_over(member, reason)
        # The other servers are tried at once.
        turn = attempt // len(self._members)
        is_last = (attempt + 1) % len(self._members) == 0
        delay = _RETRY.delay(turn, random.random) if is_last else 0.0
        now = asyncio.get_running_loop().time()
        if deadline is not None:
            if now + delay >= deadline:
                raise StoreTimeout(self.explain())
        elif now >= max(began, self.last_received_at) + self._access.lost_after:
            self.fail(StoreLost(f"Redis does not answer: {self.explain()}"))
            self.check()
        # A poll: there is no notification of a server that begins to listen.
        await asyncio.sleep(delay)
