"""Connections to the servers of a Redis: Sentinel, users, and what Redis refuses.

The first server that is no replica is used until it fails: see `EngineLink`.  All requests
share one connection, and each feed has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from elastic_aio.engines.link import EngineAccess, EngineLink, NotAnswered, NotDone
from elastic_aio.engines.redis.connection import (
    NoPermissionError,
    RedisConnection,
    RedisError,
    judge,
    reason_of_redis,
)
from elastic_aio.errors import StoreError

_REQUESTS: Final = 64
"""Requests at once; further ones wait."""


class RedisLink(EngineLink[RedisConnection]):
    """Connections to a Redis; used by any number of tasks."""

    engine = "Redis"

    def __init__(
        self, access: EngineAccess, sentinel: str | None, on_end: Callable[[StoreError], None]
    ) -> None:
        """Do the same as `EngineLink`; `sentinel` is the name of the master."""
        super().__init__(access, on_end)
        self._sentinel = sentinel
        self._has_warned = False
        self._shared: tuple[int, RedisConnection] | None = None
        self._sharing = asyncio.Lock()
        self._places = asyncio.Semaphore(_REQUESTS)

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
        return await self._repeat(
            lambda member: self._attempt(member, use),
            is_repeatable=is_repeatable,
            deadline=deadline,
        )

    async def keep_connected(self, serve: Callable[[RedisConnection], Awaitable[None]]) -> None:
        """Call `serve` with a connection of its own, and with another one when that ends.

        Raises:
            StoreError: as for `request`.
        """
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

    async def _attempt(self, member: int, use: Callable[[RedisConnection], Awaitable[Any]]) -> Any:
        async with self._places:
            connection = await self._connection(member)
            try:
                async with asyncio.timeout(self._access.attempt_timeout):
                    result = await use(connection)
            except (OSError, RedisError) as error:
                raise NotAnswered(reason_of_redis(judge(error))) from None
        self.last_received_at = asyncio.get_running_loop().time()
        return result

    async def _connection(self, member: int) -> RedisConnection:
        async with self._sharing:
            self.check()
            if member != self._current:  # it has failed meanwhile
                raise NotDone(self._reasons.get(member, ""))
            if self._shared is not None:
                owner, connection = self._shared
                if owner == member and connection.is_shared:
                    return connection
                self._shared = None
                self._busy.pop(connection, None)
                await connection.aclose()
            connection = await self._open(member)
            connection.share()
            self._shared = member, connection
            self._busy[connection] = member
            return connection

    async def _open(self, member: int) -> RedisConnection:
        """Return a new connection to a server that is no replica.

        Raises:
            NotDone: there is none.
            StoreRefused: it refuses this client.
        """
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
            await connection.aclose()
            raise
        if has_user and not connection.eviction and not self._has_warned:
            import logging  # here: most clients have no use for it

            self._has_warned = True
            text = "store: %s does not show its maxmemory-policy, which must be noeviction"
            logging.getLogger(__name__).warning(text, self.endpoint)
        return connection

    async def _master(self, sentinel: tuple[str, int]) -> tuple[str, int]:
        connection = await self._connect(*sentinel, has_user=False)
        name = self._sentinel
        try:
            found = await connection.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        finally:
            await connection.aclose()
        if not found:
            raise NotDone(f"the sentinel knows no master {name!r}")
        return found[0].decode(), int(found[1])
