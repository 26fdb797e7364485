"""One connection to a store: requests in flight, and what ends them.

`open_link` finds out who is there and returns the link that speaks its dialect:

* `TaggedLink`, to our own server: everything shares one connection.
* `PlainLink`, to a torch server.  Replies come without names there, so a pending
  WAIT would make every reply after it ambiguous: questions are pipelined on one
  connection, and each pending wait gets a connection of its own, which is kept for
  the next.

A link does not reconnect; its owner does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.listen import keep_alive
from elastic_aio.store.replies import KIND_OF, RawView, ReplyReader, TaggedReader
from elastic_aio.store.requesting import HeldLease, WatchView
from elastic_aio.store.session import token_code
from elastic_aio.store.wire import WireError, encode

__all__ = ["Link", "LinkLost", "PlainLink", "TaggedLink", "open_link"]

_PINGED: Final = 0x0E1A5A10
"""Any number would do; a server sends it back."""

_STRANGER: Final = "the peer does not answer like a TCPStore server"

_WAITS: Final = frozenset({wire.WAIT, wire.GET_WHEN_SET, wire.POP_WHEN_PUSHED})
_WITH_COUNT: Final = frozenset({wire.GET_WHEN_SET, wire.MULTI_GET})


class LinkLost(Exception):
    """The connection has ended; the message says why."""


class Link(asyncio.Protocol):
    """What both kinds have in common: writing in batches, and the end."""

    def __init__(self, reply_timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply_timeout = reply_timeout
        self._unsent: list[bytes] = []
        self._is_crowded = False
        self._can_write: asyncio.Future[None] | None = None
        # Replies that are due without anything else having to happen first.
        self._owed = 0
        self._heard = 0
        self._timer: asyncio.TimerHandle | None = None
        self.instance = b""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done when the connection has ended, with the reason."""

    def take(self, transport: asyncio.Transport) -> None:
        """Use an open connection from now on."""
        self._transport = transport
        transport.set_protocol(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(str(error) if error else "the peer closed the connection")

    def pause_writing(self) -> None:
        self._can_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._can_write is not None and not self._can_write.done():
            self._can_write.set_result(None)
        self._can_write = None

    def fail(self, reason: str) -> None:
        """End the connection now; everything under way raises `LinkLost`."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._unsent.clear()
        self._transport.abort()
        self._fail_all(LinkLost(reason))

    def close(self) -> None:
        """Send what is still to be sent and end the connection."""
        self._flush()
        self._transport.close()

    def _fail_all(self, error: LinkLost) -> None:
        raise NotImplementedError

    def _send(self, frame: bytes) -> None:
        """Send a frame, at once if this is the only task that talks, else with others'."""
        if self.ended.done():
            raise LinkLost(self.ended.result())
        if self._unsent:
            self._unsent.append(frame)
        elif self._is_crowded:
            self._unsent.append(frame)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(frame)

    def _flush(self) -> None:
        if self._unsent and not self.ended.done():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    async def _writable(self) -> None:
        """Wait until the peer takes more."""
        while self._can_write is not None:
            await asyncio.shield(self._can_write)

    def _owe(self) -> None:
        self._owed += 1
        if self._timer is None:
            self._timer = self._loop.call_later(
                self._reply_timeout, self._look, self._heard, self._reply_timeout
            )

    def _look(self, heard: int, seconds: float) -> None:
        self._timer = None
        if not self._owed:
            return
        if self._heard == heard:
            self.fail(f"no answer for {seconds:g} s")
        else:
            self._timer = self._loop.call_later(seconds, self._look, self._heard, seconds)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Seen: whoever asked may have gone, and that is no mistake.
        future.exception()


class PlainLink(Link):
    """A connection in torch's own dialect."""

    def __init__(
        self, reply_timeout: float, opener: Callable[[], Awaitable[PlainLink]] | None = None
    ) -> None:
        """Prepare; `opener` makes the further connections on which to wait."""
        super().__init__(reply_timeout)
        self._reader = ReplyReader()
        self._asked: deque[asyncio.Future[Any]] = deque()
        self.is_confused = False
        """Whether the peer has sent what no store sends."""
        self._opener = opener
        self._idle: list[PlainLink] = []
        self._waiting: set[PlainLink] = set()

    def data_received(self, data: bytes) -> None:
        self._heard += 1
        try:
            results = self._reader.read(data)
        except WireError as error:
            self.is_confused = True
            self.fail(f"the peer {error}")
            return
        self._is_crowded = len(results) > 1
        for result in results:
            future = self._asked.popleft()
            self._owed -= 1
            if not future.done():
                future.set_result(result)

    def _fail_all(self, error: LinkLost) -> None:
        for future in self._asked:
            _refuse(future, LinkLost(str(error)))
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
        self._reader.expect(op, len(argument) if op in _WITH_COUNT else 0)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked.append(future)
        if op == wire.WAIT:
            self._owed += 1
        else:
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
        self._idle.append(link)
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
            self._send(encode(wire.QUEUE_PUSH, key, item))


class _Asked:
    """A request of a tagged link that is under way."""

    __slots__ = ("argument", "future", "key", "op")

    def __init__(self, op: int, key: bytes, argument: Any, future: asyncio.Future[Any]) -> None:
        self.op = op
        self.key = key
        self.argument = argument
        self.future = future


class TaggedLink(Link):
    """A connection in our own dialect."""

    def __init__(self, reply_timeout: float, instance: bytes) -> None:
        """Prepare a link to the server that calls itself `instance`."""
        super().__init__(reply_timeout)
        self.instance = instance
        self._reader = TaggedReader()
        self._tags = itertools.cycle(range(1, 1 << 32))
        self._asked: dict[int, _Asked] = {}
        self._listening: dict[int, WatchView | HeldLease] = {}
        self._tag_of: dict[WatchView, int] = {}

    def data_received(self, data: bytes) -> None:
        self._heard += 1
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
            _refuse(future, StoreRefused(payload.decode(errors="replace")))
            return
        count = len(asked.argument) if op in _WITH_COUNT else 0
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
            _refuse(entry.future, LinkLost(str(error)))

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
            if self.ended.done():
                pass
            elif not future.cancelled():
                if future.exception() is None:
                    self._put_back(op, key, future.result())
            elif op in _WAITS:
                self._ask(wire.CANCEL, b"", tag)
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
            self._ask(wire.CANCEL, b"", tag)

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
        if not self.ended.done():
            self._send(encode(wire.HEARTBEAT, b"", None, 0))

    def _ask(self, op: int, key: bytes, argument: Any) -> tuple[int, asyncio.Future[Any]]:
        tag = next(self._tags)
        while tag in self._asked or tag in self._listening:
            tag = next(self._tags)
        self._send(encode(op, key, argument, tag))
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked[tag] = _Asked(op, key, argument, future)
        if op not in _WAITS:
            self._owe()
        return tag, future

    def _put_back(self, op: int, key: bytes, result: Any) -> None:
        """Return an item that nobody has taken any more to the front of its queue."""
        item = None
        if op == wire.POP_WHEN_PUSHED:
            item = result
        elif op == wire.QUEUE_POP and result[0]:
            item = result[1]
        if item is not None and not self.ended.done():
            self._ask(wire.QUEUE_UNPOP, key, item)


async def open_link(
    host: str, port: int, *, token: str | None, reply_timeout: float, silence: float
) -> PlainLink | TaggedLink:
    """Connect, find out who is there, and return the link that speaks its dialect.

    The caller bounds it in time.  Cancelling closes the connection.

    Raises:
        OSError: nobody is there.
        LinkLost: the peer closed the connection.
        StoreRefused: it is no store, or wants another token.
    """

    async def another() -> PlainLink:
        try:
            async with asyncio.timeout(reply_timeout):
                link = await _open_plain(host, port, reply_timeout, silence)
                try:
                    await _greet(link)
                except BaseException:
                    link.fail("it was not opened to the end")
                    raise
        except (OSError, StoreRefused) as error:
            raise LinkLost(str(error) or "no answer") from None
        return link

    link = await _open_plain(host, port, reply_timeout, silence, another)
    try:
        ping = link.ask(wire.PING, b"", _PINGED)
        known = link.ask(wire.CHECK, b"", (wire.RESERVED_KEY,))
        if await ping != _PINGED:
            raise StoreRefused(_STRANGER)
        if await known != replies.READY:
            if token is not None:
                raise StoreRefused("a plain TCPStore server knows no token; leave it out")
            return link
        greeting = await link.ask(wire.HELLO, b"", wire.VERSION)
        tagged = TaggedLink(reply_timeout, greeting.instance)
        tagged.take(link._transport)
        if greeting.needs_token != (token is not None):
            does = "asks for a token" if greeting.needs_token else "asks for none; leave it out"
            raise StoreRefused(f"the store {does}")
        if token is not None:
            await tagged.call(wire.AUTH, token_code(token, greeting.nonce), None)
    except BaseException as error:
        link._transport.abort()
        if isinstance(error, LinkLost) and link.is_confused:
            raise StoreRefused(_STRANGER) from None
        raise
    return tagged


async def _open_plain(
    host: str,
    port: int,
    reply_timeout: float,
    silence: float,
    opener: Callable[[], Awaitable[PlainLink]] | None = None,
) -> PlainLink:
    loop = asyncio.get_running_loop()
    link = PlainLink(reply_timeout, opener)
    transport, _ = await loop.create_connection(lambda: link, host, port)
    link.take(transport)
    keep_alive(transport.get_extra_info("socket"), silence)
    transport.write(wire.OPENING)
    return link


async def _greet(link: PlainLink) -> None:
    """Exchange the PING with which every torch client begins."""
    if await link.ask(wire.PING, b"", _PINGED) != _PINGED:
        raise StoreRefused(_STRANGER)
