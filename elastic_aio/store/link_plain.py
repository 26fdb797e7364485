"""One connection in torch's plain dialect.

Replies have no tag in it, so after a pending WAIT the owner of a reply would be
ambiguous.  Therefore requests are pipelined on one connection, and each pending wait
uses a further connection, which is kept for later waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from elastic_aio.aio import set_result_if_pending
from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.link import WITH_COUNT, Link, LinkLost, fail_if_pending
from elastic_aio.store.replies import KIND_OF, ReplyReader, ReplyTooLarge
from elastic_aio.store.wire import WireError, encode

NO_STORE: Final = "the peer does not answer like a TCPStore server"
PLAIN_PEER: Final = "the peer is a plain TCPStore server: no leases and no watches"

_SPEAKS_TLS: Final = (
    "the store speaks TLS: give tls_ca, and tls_cert and tls_key if it requires a certificate"
)

_MAX_IDLE: Final = 8
"""Idle connections that are kept for later waits."""


class PlainLink(Link):
    """A connection in torch's plain dialect."""

    def __init__(
        self, reply_timeout: float, opener: Callable[[], Awaitable[PlainLink]] | None = None
    ) -> None:
        """Prepare a link; `opener` opens the further connections for waits."""
        super().__init__(reply_timeout)
        self._reader = ReplyReader()
        # Each with whether the reply is due at once; that of a WAIT is not.
        self._pending: deque[tuple[asyncio.Future[Any], bool]] = deque()
        self._opener = opener
        self._idle: list[PlainLink] = []
        self._waiting: set[PlainLink] = set()

    def open(self) -> None:
        """Send the opening, which the peer does not answer."""
        self._send_later(wire.OPENING)

    def data_received(self, data: bytes) -> None:
        self.last_received_at = self.last_reply_at = self._loop.time()
        try:
            results = self._reader.read(data)
        except WireError as error:
            self.refusal = _SPEAKS_TLS if data.startswith(wire.TLS_ALERT[:2]) else NO_STORE
            self.fail(f"the peer {error}")
            return
        self._is_batching = len(results) > 1
        for result in results:
            future, is_due = self._pending.popleft()
            self._replies_due -= is_due
            if isinstance(result, ReplyTooLarge):
                fail_if_pending(future, StoreRefused(f"the store {result}"))
                self.fail(f"the peer {result}")
                return
            set_result_if_pending(future, result)

    def _fail_all(self, error: LinkLost) -> None:
        for future, _ in self._pending:
            fail_if_pending(future, LinkLost(str(error)))
        self._pending.clear()
        for link in [*self._idle, *self._waiting]:
            link.fail(str(error))

    def close(self) -> None:
        for link in [*self._idle, *self._waiting]:
            link.close()
        super().close()

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request, as several plain ones where the dialect lacks it.

        Raises:
            LinkLost: the connection has ended; a change may have been made.
            StoreRefused: a plain server has no such operation.
        """
        while self._is_write_paused:
            await self._write_resumed.wait()
        if op == wire.GET_WHEN_SET:
            return await self._get(argument)
        if op == wire.WAIT:
            return await self._wait(argument)
        if op == wire.PEEK:
            if await self.request(wire.CHECK, b"", (key,)) != replies.READY:
                return None
            return await self.request(wire.GET, key, None)
        if op == wire.QUEUE_POP:
            return await self._pop(key)
        if op == wire.POP_WHEN_PUSHED:
            while True:
                length, item = await self._pop(key)
                if length:
                    return item
                await self._wait((key,))
        if op > wire.HELLO:
            raise StoreRefused(PLAIN_PEER)
        if KIND_OF[op] == replies.NONE:
            self._send(encode(op, key, argument))
            return None
        return await self.request(op, key, argument)

    def request(self, op: int, key: bytes, argument: Any) -> asyncio.Future[Any]:
        """Send one request that has a reply; return the future of the reply."""
        self._send(encode(op, key, argument))
        self._reader.expect(op, len(argument) if op in WITH_COUNT else 0)
        future: asyncio.Future[Any] = self._loop.create_future()
        is_due = op != wire.WAIT
        self._pending.append((future, is_due))
        if is_due:
            self._expect_reply()
        return future

    async def _get(self, keys: tuple[bytes, ...]) -> list[bytes]:
        if not keys:
            return []
        while True:
            # A legacy torch server closes the connection on GET of an absent key.
            await self._wait(keys)
            if len(keys) > 1:
                values: list[bytes] = await self.request(wire.MULTI_GET, b"", keys)
            else:
                values = [await self.request(wire.GET, keys[0], None)]
            # An empty value may be an absent key: another client may have deleted it.
            if all(values) or await self.request(wire.CHECK, b"", keys) == replies.READY:
                return values

    async def _wait(self, keys: tuple[bytes, ...]) -> int:
        if not keys or await self.request(wire.CHECK, b"", keys) == replies.READY:
            return 0
        assert self._opener is not None
        link = self._idle.pop() if self._idle else await self._opener()
        if self.ended.done():
            link.fail(self.ended.result())
        self._waiting.add(link)
        try:
            await link.request(wire.WAIT, b"", keys)
        except asyncio.CancelledError:
            # After a CANCEL_WAIT it would be unknown which reply is which: close it.
            link.fail("the wait was cancelled")
            raise
        except LinkLost as error:
            self.fail(str(error))
            raise
        finally:
            self._waiting.discard(link)
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(link)
        else:
            link.close()
        return 0

    async def _pop(self, key: bytes) -> tuple[int, bytes]:
        future = self.request(wire.QUEUE_POP, key, None)
        try:
            result: tuple[int, bytes] = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._put_back(key, done))
            raise
        return result

    def _put_back(self, key: bytes, popped: asyncio.Future[tuple[int, bytes]]) -> None:
        """Push an item back whose taker was cancelled."""
        if popped.cancelled() or popped.exception() is not None or self.ended.done():
            return
        length, item = popped.result()
        if length:
            # If the connection is closing, the item is lost: so is its taker.
            with contextlib.suppress(LinkLost):
                self._send(encode(wire.QUEUE_PUSH, key, item))
