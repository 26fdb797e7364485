"""One connection of the store's client, in either dialect, from its handshake to its end.

A link does not reconnect; `RemoteStore` opens another one.  A server of this package answers READY
to a CHECK of the reserved key.  Only then the client sends HELLO: a torch server closes the
connection on an unknown opcode.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import Struct

from elastic_aio.aio import Notifier, random_bytes, set_result_if_pending
from elastic_aio.errors import StoreRefused
from elastic_aio.sockets import discard_unsent, enable_keepalive, limit_read_size
from elastic_aio.spec.tls import TlsSpec, checked_tls
from elastic_aio.store import replies, wire
from elastic_aio.store.base import FedWatch, HeldLease
from elastic_aio.store.replies import KIND_OF, ReplyReader, ReplyTooLarge, TaggedReader
from elastic_aio.store.wire import WireError, encode

if TYPE_CHECKING:
    from elastic_aio.store.tls import TlsContext, TlsTransport

WITH_COUNT: Final = frozenset({wire.GET_WHEN_SET, wire.MULTI_GET})
"""Requests whose reply can only be parsed with the number of keys of the request."""

_SUSPENDED_AFTER: Final = 0.5
"""A timer this late, in seconds, shows that this process was suspended (SIGSTOP, a paused virtual
machine): it cannot have received what its peers sent in that time."""

_LATE_S: Final = 0.2
"""Seconds by which the reply to a ping may be late, and is known to be new."""

_AFTER_SUSPENSION: Final = 0.25
"""Seconds that a peer which is pinged then has for its answer, if its time is over."""


class LinkLost(Exception):
    """The connection has ended; the message says why."""


class Link(asyncio.Protocol):
    """Base of both dialects: batched writes, the reply timeout, and the end."""

    def __init__(self, reply_timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._reply_timeout = reply_timeout
        self._unsent: list[bytes] = []
        self._is_batching = False
        """Whether several replies came at once, so that several tasks are about to send."""
        self._is_write_paused = False
        self._write_resumed = Notifier()
        # Replies that the peer owes now; the reply to a pending wait is not counted.
        self._replies_due = 0
        self.last_received_at = self.last_reply_at = 0.0
        """When the peer last sent a reply that was due, in loop seconds; of a peer that is not
        pinged, also when a reply was first due."""
        self._ping_interval = 0.0
        self._ends_after = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.instance = b""
        self.refusal = ""
        """Why another attempt does not help, if the peer cannot be used."""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done when the connection has ended, with the reason."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        limit_read_size(transport)

    def hand_over(self, other: Link) -> None:
        """Make `other` the protocol of this connection."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.set_protocol(other)
        other.connection_made(self._transport)
        other.last_received_at = other.last_reply_at = self.last_received_at

    def connection_lost(self, error: Exception | None) -> None:
        # A FIN or RST of the peer's kernel.
        if not (self.ended.done() or isinstance(error, TimeoutError) or self._is_late()):
            self.last_received_at = self._loop.time()
        self.fail(str(error) if error else "the peer closed the connection")

    def tls_failed(self, reason: str) -> None:
        self.refusal = reason
        self.fail(reason)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._write_resumed.notify_all()

    def fail(self, reason: str) -> None:
        """End the connection now; pending requests raise `LinkLost`.  Idempotent."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        self._unsent.clear()
        discard_unsent(self._transport)
        self._transport.abort()
        self._fail_all(LinkLost(reason))

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended, or is about to."""
        return self.ended.done() or self._transport.is_closing()

    def close(self) -> None:
        """Send the buffered requests and end the connection."""
        self._flush()
        self._transport.close()

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request.

        LinkLost: the connection has ended; a change may have been made.  StoreRefused: the server
        refuses the request, or has no such operation.

        Cancellation: withdraws a wait; an item popped before is put back.
        """
        raise NotImplementedError

    def _fail_all(self, error: LinkLost) -> None:
        raise NotImplementedError

    def _send(self, frame: bytes) -> None:
        """Send a frame: at once if one task uses the link, else with frames of other tasks."""
        if self.ended.done():
            raise LinkLost(self.ended.result())
        if self._transport.is_closing():
            # uvloop raises RuntimeError where asyncio discards the data.
            raise LinkLost("the connection is closing")
        if self._unsent:
            self._unsent.append(frame)
        elif self._is_batching or self._replies_due:
            self._send_later(frame)
        else:
            self._transport.write(frame)

    def _send_later(self, frame: bytes) -> None:
        """Send a frame with later frames of this iteration of the loop."""
        self._unsent.append(frame)
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._unsent and not self.ended.done() and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _expect_reply(self) -> None:
        """Count a reply as due, and start the timer of the reply timeout."""
        if not self._replies_due:
            self._begin_silence()
        self._replies_due += 1
        if self._timer is None:
            self._check_at(self._end)

    def _begin_silence(self) -> None:
        """Give the peer time: it owed no reply until now, or this process was suspended.

        A pinged peer owed a reply at most an interval ago, unless this process was suspended.  It
        gets little time: it ends the leases of this connection by what it has received.
        """
        now = self._loop.time()
        if self._ping_interval:
            self._ends_after = now + min(_AFTER_SUSPENSION, self._reply_timeout)
        else:
            self.last_received_at = now

    def _is_late(self) -> bool:
        """Whether data that arrives now may be old: it is later than the reply to a ping.

        This process was suspended, or the network was cut and has held the data back.
        """
        silence = self._loop.time() - self.last_received_at
        return silence > (self._ping_interval or self._reply_timeout) + _LATE_S

    @property
    def _end(self) -> float:
        """When the connection ends without a reply."""
        return max(self.last_received_at + self._reply_timeout, self._ends_after)

    def _check_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._check_replies, when)

    def _check_replies(self, due: float) -> None:
        self._timer = None
        if not self._replies_due:
            return
        now = self._loop.time()
        if now - due > _SUSPENDED_AFTER:
            self._begin_silence()  # the peer's replies are still in the socket
        # Timers are exact to a millisecond.
        if self._end - now < 0.002:
            self.fail(f"no answer for {self._reply_timeout:g} s")
        else:
            self._check_at(self._end)


def fail_if_pending(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Mark it as retrieved: the waiter may have been cancelled, which is no bug.
        future.exception()


NO_STORE: Final = "the peer does not answer like a TCPStore server"
PLAIN_PEER: Final = "the peer is a plain TCPStore server: no leases and no watches"

_SPEAKS_TLS: Final = (
    "the store speaks TLS: give tls_ca, and tls_cert and tls_key if it requires a certificate"
)

_MAX_IDLE: Final = 8
"""Idle connections that are kept for later waits."""


class PlainLink(Link):
    """A connection in torch's plain dialect.

    Replies have no tag, so after a pending WAIT the owner of a reply would be ambiguous.  Requests
    are pipelined on one connection; each pending wait uses a further one, kept for later waits.
    """

    def __init__(
        self, reply_timeout: float, opener: Callable[[], Awaitable[PlainLink]] | None = None
    ) -> None:
        """Prepare a link; `opener` opens the further connections for waits."""
        super().__init__(reply_timeout)
        self._reader = ReplyReader()
        # Each with whether the reply is due at once; the reply to a WAIT is not.
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
        """Carry out a request, as several plain ones where the dialect lacks it."""
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


_WAITS: Final = frozenset({wire.WAIT, wire.GET_WHEN_SET, wire.POP_WHEN_PUSHED})
_TAG_MAX: Final = (1 << 32) - 1


class _PendingRequest(Struct):
    """A request that was sent and has no reply yet."""

    op: int
    key: bytes
    argument: Any
    future: asyncio.Future[Any]


class TaggedLink(Link):
    """A connection in our tagged dialect, shared by requests, waits, watches and leases."""

    def __init__(self, reply_timeout: float, instance: bytes, ping_interval: float) -> None:
        """Prepare a link to `instance`; 0 seconds: `ping` is not called at intervals."""
        super().__init__(reply_timeout)
        self.instance = instance
        self._ping_interval = ping_interval
        self._is_reading_late = False
        self._reader = TaggedReader()
        self._last_tag = 0
        self._pending: dict[int, _PendingRequest] = {}
        self._listeners: dict[int, FedWatch | HeldLease] = {}
        self._watch_tags: dict[FedWatch, int] = {}

    def data_received(self, data: bytes) -> None:
        self._is_reading_late = self._is_late()
        try:
            frames = self._reader.read(data)
            if not frames:
                self._on_sign_of_life()  # a part of a long frame
            self._is_batching = len(frames) > 1
            for tag, status, payload in frames:
                if status == replies.NOTIFY:
                    self._on_notification(tag, payload)
                    continue
                self._on_reply(tag, status, payload)
                if status == replies.TOO_LARGE:
                    self.fail(f"the peer {payload.decode()}")
        except WireError as error:
            self.fail(f"the peer {error}")

    def _on_sign_of_life(self) -> None:
        """Renew the reply timeout.

        A notification and the end of a wait do not: they can still arrive when no request reaches
        the peer any more, and the peer is about to end the leases of this connection.
        """
        self.last_received_at = self._loop.time()
        if not self._is_reading_late:
            self.last_reply_at = self.last_received_at

    def _on_reply(self, tag: int, status: int, payload: bytes) -> None:
        request = self._pending.pop(tag, None)
        if request is None:
            return
        op, future = request.op, request.future
        if op not in _WAITS:
            self._on_sign_of_life()
            self._replies_due -= 1
        if status != replies.DONE:
            self._listeners.pop(tag, None)
            text = payload.decode(errors="replace")
            text = f"the store {text}" if status == replies.TOO_LARGE else text
            fail_if_pending(future, StoreRefused(text))
            return
        count = len(request.argument) if op in WITH_COUNT else 0
        result = replies.decode(op, count, payload)
        if op == wire.CANCEL:
            self._pending.pop(request.argument, None)
        if not future.done():
            future.set_result(result)
        else:
            self._put_back(op, request.key, result)

    def _on_notification(self, tag: int, payload: bytes) -> None:
        listener = self._listeners.get(tag)
        if isinstance(listener, HeldLease):
            del self._listeners[tag]
            listener.end()
            return
        # The first message is also the reply to the request that opened the watch.
        request = self._pending.pop(tag, None)
        if request is not None:
            self._on_sign_of_life()
            self._replies_due -= 1
        if listener is not None:
            listener.feed(replies.decode_notification(payload))
        if request is not None:
            set_result_if_pending(request.future, None)

    def _fail_all(self, error: LinkLost) -> None:
        pending, self._pending = self._pending, {}
        self._listeners.clear()
        for request in pending.values():
            fail_if_pending(request.future, LinkLost(str(error)))

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        while self._is_write_paused:
            await self._write_resumed.wait()
        tag, future = self._request(op, key, argument)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():
                if future.exception() is None:
                    self._put_back(op, key, future.result())
            elif op in _WAITS:
                self._post(wire.CANCEL, b"", tag)
            raise

    async def change_all(self, op: int, requests: Iterable[tuple[bytes, Any]]) -> None:
        """Carry out the changes `op` with these keys and arguments, as `call` does each."""
        while self._is_write_paused:
            await self._write_resumed.wait()
        await asyncio.gather(*[self._request(op, *request)[1] for request in requests])

    async def watch(self, watch: FedWatch) -> None:
        """Feed `watch` from now on; return when it has got its snapshot.  Errors: as of `call`."""
        tag, future = self._request(watch.op, watch.key, watch.revision)
        self._listeners[tag] = watch
        self._watch_tags[watch] = tag
        await future

    def unwatch(self, watch: FedWatch) -> None:
        tag = self._watch_tags.pop(watch, None)
        if tag is not None and self._listeners.pop(tag, None) is not None:
            self._post(wire.CANCEL, b"", tag)

    async def lease(self, op: int, lease: HeldLease) -> Any:
        """Grant or resume `lease`, by the opcode `op`; return the result, as `call` does."""
        milliseconds = (round(lease.ttl * 1000), round(lease.linger * 1000))
        argument = milliseconds if op == wire.GRANT_LEASE else None
        tag, future = self._request(op, lease.lease_id, argument)
        self._listeners[tag] = lease
        try:
            return await future
        except asyncio.CancelledError:
            self._listeners.pop(tag, None)
            if op == wire.GRANT_LEASE and not future.cancelled() and not future.exception():
                self._post(wire.RELEASE_LEASE, future.result(), None)
            raise

    def unlease(self, lease: HeldLease) -> None:
        """Ignore the end of `lease` from now on."""
        for tag, listener in list(self._listeners.items()):
            if listener is lease:
                del self._listeners[tag]

    def heartbeat(self) -> None:
        """Send a frame that renews the leases and has no reply."""
        with contextlib.suppress(LinkLost):
            self._send(encode(wire.HEARTBEAT, b"", None, 0))

    def ping(self) -> None:
        """Send a frame that renews the leases and has a reply.

        Only a reply proves that the server runs: the kernel of a suspended one acknowledges data.
        """
        self._post(wire.PING, b"", 1)

    def _request(self, op: int, key: bytes, argument: Any) -> tuple[int, asyncio.Future[Any]]:
        tag = self._next_tag()
        self._send(encode(op, key, argument, tag))
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[tag] = _PendingRequest(op, key, argument, future)
        if op not in _WAITS:
            self._expect_reply()
        return tag, future

    def _next_tag(self) -> int:
        while True:
            self._last_tag = self._last_tag % _TAG_MAX + 1
            if self._last_tag not in self._pending and self._last_tag not in self._listeners:
                return self._last_tag

    def _post(self, op: int, key: bytes, argument: Any) -> None:
        """Send a request and ignore its reply; do nothing if the connection has ended."""
        with contextlib.suppress(LinkLost):
            self._request(op, key, argument)

    def _put_back(self, op: int, key: bytes, result: Any) -> None:
        """Return an item whose taker was cancelled to the front of its queue; end its lease."""
        if op == wire.GRANT_LEASE:
            self._post(wire.RELEASE_LEASE, result, None)
        elif op == wire.POP_WHEN_PUSHED:
            self._post(wire.QUEUE_UNPOP, key, result)
        elif op == wire.QUEUE_POP and result[0]:
            self._post(wire.QUEUE_UNPOP, key, result[1])


_PING_NONCE: Final = 0x0E1A5A10
"""An arbitrary number, which the server sends back: every torch client begins with a PING."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where and how a client connects; the fields are described at `RemoteStore`."""

    host: str
    port: int
    token: str | None
    reply_timeout: float
    peer_timeout: float
    ping_interval: float
    tls: TlsContext | None = None


def client_context(tls: TlsSpec | None) -> TlsContext | None:
    """Return the TLS context of a client; None without TLS; SpecError: a file cannot be used."""
    if (checked := checked_tls(tls)) is None:
        return None
    from elastic_aio.store.tls import TlsContext

    return TlsContext(checked, is_server=False)


async def open_link(options: LinkOptions, sock: socket.socket | None = None) -> Link:
    """Connect, identify the server, and return a link in its dialect; the caller bounds the time.

    `sock` is a connected socket to use instead, which the link owns from now on.  OSError: the
    connection fails.  LinkLost: the peer closed it.  StoreRefused: the peer is not a store, or has
    another token.

    Cancellation: closes the connection.
    """

    async def open_further() -> PlainLink:
        further = PlainLink(options.reply_timeout)
        try:
            async with asyncio.timeout(options.reply_timeout):
                await _connect(further, options)
                try:
                    _check_pong(await further.request(wire.PING, b"", _PING_NONCE))
                except BaseException:  # a cancellation too: the link has no other owner
                    further.fail("the handshake was not completed")
                    raise
        except (OSError, StoreRefused) as error:
            raise LinkLost(str(error) or "no answer") from None
        return further

    link = PlainLink(options.reply_timeout, open_further)
    await _connect(link, options, sock)
    try:
        return await _choose_dialect(link, options)
    except BaseException as error:
        link.fail("the handshake was not completed")
        if isinstance(error, LinkLost) and link.refusal:
            raise StoreRefused(link.refusal) from None
        raise


async def _connect(
    link: PlainLink, options: LinkOptions, sock: socket.socket | None = None
) -> None:
    """Open the connection of `link`, over TLS if the options say so, and begin to speak."""
    protocol: asyncio.Protocol = link
    layer: TlsTransport | None = None
    if options.tls is not None:
        # The zone of an IPv6 address is a matter of this host.
        name = options.tls.spec.server_name or options.host.partition("%")[0]
        protocol = layer = options.tls.layer(link, name)
    loop = asyncio.get_running_loop()
    if sock is None:
        transport, _ = await loop.create_connection(lambda: protocol, options.host, options.port)
    else:
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    enable_keepalive(transport.get_extra_info("socket"), options.peer_timeout)
    if layer is not None:
        try:
            await layer.wait_open()
        except ConnectionError:
            raise (
                StoreRefused(link.refusal) if link.refusal else LinkLost(link.ended.result())
            ) from None
        except BaseException:  # a cancellation: the connection has no other owner
            layer.abort()
            raise
    link.open()


async def _choose_dialect(link: PlainLink, options: LinkOptions) -> Link:
    ping = link.request(wire.PING, b"", _PING_NONCE)
    reserved = link.request(wire.CHECK, b"", (wire.RESERVED_KEY,))
    _check_pong(await ping)
    if await reserved != replies.READY:
        if options.token is not None:
            raise StoreRefused("token: a plain TCPStore server has none (remove --token-file)")
        return link
    hello: replies.HelloReply = await link.request(wire.HELLO, b"", wire.VERSION)
    tagged = TaggedLink(options.reply_timeout, hello.instance, options.ping_interval)
    link.hand_over(tagged)
    if hello.needs_token and options.token is None:
        raise StoreRefused("the store asks for a token")
    if options.token is not None and not hello.needs_token:
        raise StoreRefused("token: the store has none (remove --token-file)")
    if options.token is not None:
        await _authenticate(tagged, options.token, hello)
    return tagged


async def _authenticate(link: TaggedLink, token: str, hello: replies.HelloReply) -> None:
    """Prove knowledge of the token, and let the server prove its own."""
    nonce = random_bytes(wire.NONCE_SIZE)
    transcript = hello.instance + hello.nonce + nonce
    message = nonce + wire.token_proof(token, wire.CLIENT, transcript)
    proof: bytes = await link.call(wire.AUTH, message, None)
    if not wire.is_proof(proof, token, wire.SERVER, transcript):
        raise StoreRefused("token: the server does not know it")


def _check_pong(nonce: Any) -> None:
    if nonce != _PING_NONCE:
        raise StoreRefused(NO_STORE)
