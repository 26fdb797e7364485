"""A connection in torch's own dialect.

Replies come without names there, so a pending WAIT would make every reply after it
ambiguous: questions are pipelined on one connection, and each pending wait gets a
connection of its own, which is kept for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.link import WITH_COUNT, Link, LinkLost, refuse
from elastic_aio.store.replies import KIND_OF, ReplyReader
from elastic_aio.store.wire import WireError, encode

__all__ = ["PlainLink"]

_MOST_IDLE: Final = 8
"""Connections kept for further waits."""


class PlainLink(Link):
    """A connection in torch's own dialect."""

    def __init__(
        self, reply_timeout: float, opener: Callable[[], Awaitable[PlainLink]] | None = None
    ) -> None:
        """Prepare; `opener` makes the further connections on which to wait."""
        super().__init__(reply_timeout)
        self._reader = ReplyReader()
        # Each with whether its reply is due by itself; that of a WAIT is not.
        self._asked: deque[tuple[asyncio.Future[Any], bool]] = deque()
        self.is_confused = False
        """Whether the peer has sent what no store sends."""
        self._opener = opener
        self._idle: list[PlainLink] = []
        self._waiting: set[PlainLink] = set()

    def data_received(self, data: bytes) -> None:
        self._hear()
        try:
            results = self._reader.read(data)
        except WireError as error:
            self.is_confused = True
            self.fail(f"the peer {error}")
            return
        self._is_crowded = len(results) > 1
        for result in results:
            future, is_due = self._asked.popleft()
            self._owed -= is_due
            if not future.done():
                future.set_result(result)

    def _fail_all(self, error: LinkLost) -> None:
        for future, _ in self._asked:
            refuse(future, LinkLost(str(error)))
        self._asked.clear()
        for link in [*self._idle, *self._waiting]:
            link.fail(str(error))

    def close(self) -> None:
        for link in [*self._idle, *self._waiting]:
            link.close()
        super().close()

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request, if need be as several.

        Raises:
            LinkLost: the connection ended; what changes something may have done so.
            StoreRefused: a torch server cannot do this.
        """
        if self._can_write is not None:
            await self._writable()
        if op == wire.GET_WHEN_SET:
            return await self._get(argument)
        if op == wire.WAIT:
            return await self._wait(argument)
        if op == wire.PEEK:
            if await self.ask(wire.CHECK, b"", (key,)) != replies.READY:
                return None
            return await self.ask(wire.GET, key, None)
        if op == wire.QUEUE_POP:
            return await self._pop(key)
        if op == wire.POP_WHEN_PUSHED:
            while True:
                length, item = await self._pop(key)
                if length:
                    return item
                await self._wait((key,))
        if op > wire.HELLO:
            raise StoreRefused("the peer is a plain TCPStore server: no leases and no watches")
        if KIND_OF[op] == replies.NONE:
            self._send(encode(op, key, argument))
            return None
        return await self.ask(op, key, argument)

    def ask(self, op: int, key: bytes, argument: Any) -> asyncio.Future[Any]:
        """Send one request that has a reply; return the future of that."""
        self._send(encode(op, key, argument))
        self._reader.expect(op, len(argument) if op in WITH_COUNT else 0)
        future: asyncio.Future[Any] = self._loop.create_future()
        is_due = op != wire.WAIT
        self._asked.append((future, is_due))
        if is_due:
            self._owe()
        return future

    async def _get(self, keys: tuple[bytes, ...]) -> list[bytes]:
        if not keys:
            return []
        while True:
            # A legacy torch server closes the connection on GET of an absent key.
            await self._wait(keys)
            if len(keys) > 1:
                values: list[bytes] = await self.ask(wire.MULTI_GET, b"", keys)
            else:
                values = [await self.ask(wire.GET, keys[0], None)]
            # An absent key looks like an empty value: somebody may have deleted it.
            if all(values) or await self.ask(wire.CHECK, b"", keys) == replies.READY:
                return values

    async def _wait(self, keys: tuple[bytes, ...]) -> int:
        if not keys or await self.ask(wire.CHECK, b"", keys) == replies.READY:
            return 0
        assert self._opener is not None
        link = self._idle.pop() if self._idle else await self._opener()
        if self.ended.done():
            link.fail(self.ended.result())
        self._waiting.add(link)
        try:
            await link.ask(wire.WAIT, b"", keys)
        except asyncio.CancelledError:
            # Cheaper than to find out which of two bytes the server has sent.
            link.fail("the wait was cancelled")
            raise
        except LinkLost as error:
            self.fail(str(error))
            raise
        finally:
            self._waiting.discard(link)
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(link)
        else:
            link.close()
        return 0

    async def _pop(self, key: bytes) -> tuple[int, bytes]:
        future = self.ask(wire.QUEUE_POP, key, None)
        try:
            result: tuple[int, bytes] = await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._put_back(key, done))
            raise
        return result

    def _put_back(self, key: bytes, popped: asyncio.Future[tuple[int, bytes]]) -> None:
        if popped.cancelled() or popped.exception() is not None or self.ended.done():
            return
        length, item = popped.result()
        if length:
            # Lost with the connection, if that is about to end: its taker is gone too.
            with contextlib.suppress(LinkLost):
                self._send(encode(wire.QUEUE_PUSH, key, item))
