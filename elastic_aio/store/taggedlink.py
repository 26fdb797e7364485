"""A connection in our own dialect: requests, waits, watches and leases share it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.link import WITH_COUNT, Link, LinkLost, refuse
from elastic_aio.store.replies import RawView, TaggedReader
from elastic_aio.store.requesting import HeldLease, WatchView
from elastic_aio.store.wire import WireError, encode

__all__ = ["TaggedLink"]

_WAITS: Final = frozenset({wire.WAIT, wire.GET_WHEN_SET, wire.POP_WHEN_PUSHED})


class _Asked:
    """A request of a tagged link that is under way."""

    __slots__ = ("argument", "future", "key", "op")

    def __init__(self, op: int, key: bytes, argument: Any, future: asyncio.Future[Any]) -> None:
        self.op = op
        self.key = key
        self.argument = argument
        self.future = future


_TAG_MAX: Final = (1 << 32) - 1


class TaggedLink(Link):
    """A connection in our own dialect."""

    def __init__(self, reply_timeout: float, instance: bytes) -> None:
        """Prepare a link to the server that calls itself `instance`."""
        super().__init__(reply_timeout)
        self.instance = instance
        self._reader = TaggedReader()
        self._last_tag = 0
        self._asked: dict[int, _Asked] = {}
        self._listening: dict[int, WatchView | HeldLease] = {}
        self._tag_of: dict[WatchView, int] = {}

    def data_received(self, data: bytes) -> None:
        self._hear()
        try:
            found = self._reader.read(data)
            self._is_crowded = len(found) > 1
            for tag, status, payload in found:
                if status == replies.NEWS:
                    self._on_news(tag, payload)
                else:
                    self._on_reply(tag, status, payload)
        except WireError as error:
            self.fail(f"the peer {error}")

    def _on_reply(self, tag: int, status: int, payload: bytes) -> None:
        asked = self._asked.pop(tag, None)
        if asked is None:
            return
        op, future = asked.op, asked.future
        if op not in _WAITS:
            self._owed -= 1
        if status == replies.REFUSED:
            self._listening.pop(tag, None)
            refuse(future, StoreRefused(payload.decode(errors="replace")))
            return
        count = len(asked.argument) if op in WITH_COUNT else 0
        result = replies.decode(op, count, payload)
        if op == wire.CANCEL:
            self._asked.pop(asked.argument, None)
        if not future.done():
            future.set_result(result)
        else:
            self._put_back(op, asked.key, result)

    def _on_news(self, tag: int, payload: bytes) -> None:
        listener = self._listening.get(tag)
        if isinstance(listener, HeldLease):
            del self._listening[tag]
            listener.end()
        elif listener is not None:
            news = replies.decode_news(payload)
            listener.feed(news)
            asked = self._asked.pop(tag, None) if isinstance(news, RawView) else None
            if asked is not None:
                self._owed -= 1
                if not asked.future.done():
                    asked.future.set_result(None)

    def _fail_all(self, error: LinkLost) -> None:
        asked, self._asked = self._asked, {}
        self._listening.clear()
        for entry in asked.values():
            refuse(entry.future, LinkLost(str(error)))

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request.

        Cancelling withdraws a wait; an item that was popped meanwhile is put back.

        Raises:
            LinkLost: the connection ended; what changes something may have done so.
            StoreRefused: the server says no.
        """
        if self._can_write is not None:
            await self._writable()
        tag, future = self._ask(op, key, argument)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():
                if future.exception() is None:
                    self._put_back(op, key, future.result())
            elif op in _WAITS:
                self._tell(wire.CANCEL, b"", tag)
            raise

    async def watch(self, view: WatchView) -> None:
        """Feed `view`; return when it has got its beginning.  Raises like `call`."""
        tag, future = self._ask(view.op, view.key, view.revision)
        self._listening[tag] = view
        self._tag_of[view] = tag
        await future

    def unwatch(self, view: WatchView) -> None:
        """Stop feeding `view`."""
        tag = self._tag_of.pop(view, None)
        if tag is not None and self._listening.pop(tag, None) is not None:
            self._tell(wire.CANCEL, b"", tag)

    async def lease(self, op: int, lease: HeldLease) -> Any:
        """Have `lease` granted or resumed, whichever `op` says; raises like `call`."""
        milliseconds = (round(lease.ttl * 1000), round(lease.linger * 1000))
        argument = milliseconds if op == wire.GRANT_LEASE else None
        tag, future = self._ask(op, lease.name, argument)
        self._listening[tag] = lease
        return await future

    def unlease(self, lease: HeldLease) -> None:
        """Listen no more for the end of `lease`."""
        for tag, listener in list(self._listening.items()):
            if listener is lease:
                del self._listening[tag]

    def heartbeat(self) -> None:
        """Show that we are alive."""
        with contextlib.suppress(LinkLost):
            self._send(encode(wire.HEARTBEAT, b"", None, 0))

    def beat(self, every: float) -> None:
        """Show that we are alive, and have the peer show it too; again in `every` seconds.

        The peer's kernel acknowledges what it gets even when its process is stopped;
        only an answer shows life.
        """
        self._beat_every = every
        self._tell(wire.PING, b"", 1)

    def _ask(self, op: int, key: bytes, argument: Any) -> tuple[int, asyncio.Future[Any]]:
        tag = self._next_tag()
        self._send(encode(op, key, argument, tag))
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked[tag] = _Asked(op, key, argument, future)
        if op not in _WAITS:
            self._owe()
        return tag, future

    def _next_tag(self) -> int:
        while True:
            self._last_tag = self._last_tag % _TAG_MAX + 1
            if self._last_tag not in self._asked and self._last_tag not in self._listening:
                return self._last_tag

    def _tell(self, op: int, key: bytes, argument: Any) -> None:
        """Send a request whose answer nobody awaits; without a connection it is moot."""
        with contextlib.suppress(LinkLost):
            self._ask(op, key, argument)

    def _put_back(self, op: int, key: bytes, result: Any) -> None:
        """Return an item that nobody has taken any more to the front of its queue."""
        item = None
        if op == wire.POP_WHEN_PUSHED:
            item = result
        elif op == wire.QUEUE_POP and result[0]:
            item = result[1]
        if item is not None:
            self._tell(wire.QUEUE_UNPOP, key, item)
