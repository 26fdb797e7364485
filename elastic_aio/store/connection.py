"""Connections of the store's server, and the service that they share.

A `Connection` serves requests; `_append` queues their replies, and `flush` sends them, once for
many requests.  The `Service` is the keyspace with its clients: who is admitted, turns of work, the
account of bytes, deadlines.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

from elastic_aio.aio import random_bytes
from elastic_aio.sockets import format_endpoint, limit_read_size
from elastic_aio.store import replies, wire
from elastic_aio.store.keyspace import PENDING, Client, Keyspace
from elastic_aio.store.limits import KEYS_AT_ONCE, Dropped, OperationRefused, ServerLimits, in_parts
from elastic_aio.store.replies import ENCODER_OF, LARGE, HelloReply, Pieces, RawChange, tagged
from elastic_aio.store.wire import Request, RequestReader, WireError, WireLimits

PAUSE_RESOLUTION: Final = 1.0
"""Seconds between timers while there are leases, and so the error of a measured pause."""

_LATE: Final = 0.05
"""A timer this late, in seconds, may run before the data in the sockets has been read."""

_CLOSE_TIMEOUT: Final = 1.0
"""Seconds for the last replies to leave when the server closes."""

_FLUSH_SIZE: Final = 1 << 20
"""Bytes of replies that are written before the next request is served."""

_SLICE: Final = 256 << 10
"""Bytes that a transport may copy at once."""


class Buffers:
    """The account of the unfinished requests and unsent replies of all peers of a server."""

    def __init__(self) -> None:
        self.size = 0
        self._references: Counter[int] = Counter()

    def hold(self, piece: bytes) -> None:
        """Account for a piece; for a large one only once, however many queues have it."""
        if len(piece) >= LARGE:
            self._references[id(piece)] += 1
            if self._references[id(piece)] > 1:
                return
        self.size += len(piece)

    def weight(self, piece: bytes) -> float:
        """Return the share of one queue in a piece that it holds."""
        return len(piece) / max(self._references[id(piece)], 1)

    def release(self, piece: bytes) -> None:
        if len(piece) >= LARGE:
            self._references[id(piece)] -= 1
            if self._references[id(piece)]:
                return
            del self._references[id(piece)]
        self.size -= len(piece)


class ReplyQueue:
    """Replies of one connection that its transport has not taken yet.

    A large value is queued by reference and handed to the transport in slices, so that a value for
    a thousand slow peers occupies memory once.  Small replies are joined to blocks, so that a peer
    with a million of them costs no more to drop than a peer with a few large replies.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._pieces: deque[bytes] = deque()
        self._block = bytearray()  # the bytes after the pieces
        self._sent = 0
        self.size = 0

    def extend(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            self.size += len(piece)
            if len(piece) >= LARGE:
                self._end_block()
                self._append(piece)
            else:
                self._buffers.size += len(piece)
                self._block += piece
                if len(self._block) >= LARGE:
                    self._end_block()

    def write_to(self, transport: asyncio.Transport, is_paused: Callable[[], bool]) -> None:
        """Write until the queue is empty, or the transport has paused the writer or failed."""
        while self.size and not is_paused() and not transport.is_closing():
            if not self._pieces:
                self._end_block()
            # Not a slice of bytes, which would be a copy.
            part = memoryview(self._pieces[0])[self._sent : self._sent + _SLICE]
            transport.write(part)
            self._sent += len(part)
            if self._sent == len(self._pieces[0]):
                self._sent = 0
                self._pop()

    def weight(self) -> float:
        """Return the bytes that the queue occupies, shared ones divided."""
        return sum(map(self._buffers.weight, self._pieces)) + len(self._block)

    def clear(self) -> None:
        self._end_block()
        while self._pieces:
            self._pop()

    def _end_block(self) -> None:
        if self._block:
            self._buffers.size -= len(self._block)
            self._append(bytes(self._block))
            self._block.clear()

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._buffers.hold(piece)

    def _pop(self) -> None:
        piece = self._pieces.popleft()
        self._buffers.release(piece)
        self.size -= len(piece)


_STRANGER: Final = WireLimits(key=64, value=0, count=1, request=64)
"""Limits on the requests of a client that has not sent the token: only the handshake fits."""

_STRANGER_BYTES: Final = 4096
"""Bytes that such a client may send in all."""

_OF_MANY: Final = (wire.CHECK, wire.WAIT, wire.MULTI_GET, wire.MULTI_SET, wire.LIST_KEYS)
"""Requests that `_serve_many` serves."""

_IDENTIFYING: Final = (wire.RESERVED_KEY,)
"""Keys of a CHECK whose reply, READY, identifies this server to its clients."""

# For the many watches of one change, one after another.
_encode_change = lru_cache(maxsize=1)(replies.encode_change)

_SHORT: Final = 4096
"""Bytes of a value that the first message of its watch has at once, as most have."""


class Service:
    """The keyspace of one server as its connections share it.

    Attributes:
        loop: the server's, set when it starts.
        token, known_hosts: as `StoreServer` has got them; hosts from which a client has proved the
            token, or None: no client is served without it.
        handlers: of the plain dialect, by opcode.
        dirty: connections whose queued notifications are written at the end of a turn.
        postponed: called when all that operations have left for later is done.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        limits: ServerLimits,
        token: str | None,
        *,
        admit_hosts: bool,
        on_drop: Callable[[Dropped], None] | None,
        on_pause: Callable[[float], None] | None,
        on_left: Callable[[], None],
    ) -> None:
        """Begin with an empty keyspace; `on_left` is called when a connection has ended."""
        self.limits, self.token = limits, token
        self.known_hosts: set[str] | None = set() if admit_hosts else None
        self.on_drop = on_drop
        self._on_pause = on_pause
        self._on_left = on_left
        self.instance = random_bytes(16)
        self.keyspace = Keyspace(limits.keyspace)
        # Served by the connection, in parts.
        for op in (wire.CHECK, wire.LIST_KEYS, wire.MULTI_GET, wire.MULTI_SET):
            self.keyspace.handlers[op] = None
        self.handlers = list(self.keyspace.handlers)
        self.buffers = Buffers()
        self.connections: dict[Connection, None] = {}  # ordered
        self.dirty: list[Connection] = []
        self._is_flushing = False
        self.postponed: list[Callable[[], None]] = []
        self._has_later = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_late = False
        self._all_gone: asyncio.Event | None = None
        """Set when all connections have ended; None while the server does not close."""

    async def aclose(self) -> None:
        """Send the pending replies and end all connections, within about a second."""
        if self._timer is not None:
            self._timer.cancel()
        self._all_gone = asyncio.Event()
        if not self.connections:
            return
        for connection in list(self.connections):
            connection.close()
        try:
            await asyncio.wait_for(self._all_gone.wait(), _CLOSE_TIMEOUT)
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
            # connection_lost is called in the next iteration of the loop.
            await asyncio.wait_for(self._all_gone.wait(), _CLOSE_TIMEOUT)

    def now(self) -> float:
        return self.loop.time()

    def admit(self, connection: Connection) -> bool:
        """Register a new connection; return whether it may stay."""
        is_room = len(self.connections) < self.limits.connections or self._evict_stranger()
        self.connections[connection] = None
        return is_room and self._all_gone is None

    def _evict_stranger(self) -> bool:
        """Drop the oldest client in its handshake; return whether there was one."""
        for connection in self.connections:
            if connection.is_in_handshake and not connection.is_gone:
                connection.drop("made room for another client before it completed the handshake")
                return True
        return False

    def forget(self, connection: Connection) -> None:
        self.connections.pop(connection, None)
        had_deadlines = bool(connection.leases or connection.watches)
        if self.keyspace.forget(connection, self.now()):
            self.loop.call_soon(self.forget, connection)
        self.flush()
        if had_deadlines:
            self.rearm()
        self._on_left()
        if self._all_gone is not None and not self.connections:
            self._all_gone.set()

    def admit_host(self, host: str) -> None:
        """Serve torch's clients on a host, from which a client has proved the token."""
        if self.known_hosts is not None and host not in self.known_hosts:
            self.known_hosts.add(host)
            for connection in self.connections:
                connection.on_host_admitted()

    def answer_proof(self, message: bytes, nonce: bytes | None) -> bytes | None:
        """Return the proof of this server (`nonce`); None if `message`, the client's, is wrong."""
        if self.token is None or nonce is None:
            return None
        transcript = self.instance + nonce + message[: wire.NONCE_SIZE]
        proof = message[wire.NONCE_SIZE :]
        if not wire.is_proof(proof, self.token, wire.CLIENT, transcript):
            return None
        return wire.token_proof(self.token, wire.SERVER, transcript)

    def check_buffers(self) -> None:
        """Drop the client that holds the most bytes while all hold too many."""
        while self.buffers.size > self.limits.buffered:
            held = {connection: connection.held for connection in self.connections}
            most = max(held, key=held.__getitem__)
            most.drop("does not read its replies, or sends parts of requests, and holds the most")

    def flush(self) -> None:
        """Write the notifications that operations queue on other connections, once a turn.

        Work that operations have left for later follows in the next iterations of the loop.
        """
        if self.dirty and not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush_now)
        if (self.postponed or self.keyspace.work.later) and not self._has_later:
            self._has_later = True
            self.loop.call_soon(self._work_later)

    def _flush_now(self) -> None:
        self._is_flushing = False
        dirty, self.dirty = self.dirty, []
        for connection in dirty:
            connection.flush()

    def _work_later(self) -> None:
        """Carry out some of the work left for later; after the last, serve its causers."""
        self._has_later = False
        if not self.keyspace.work.step():
            postponed, self.postponed = self.postponed, []
            for proceed in postponed:
                proceed()
        self.flush()

    def rearm(self) -> None:
        """Set the timer for the next deadline of a lease or of a lingering watch."""
        deadline = self.keyspace.next_deadline()
        if deadline is not None and self.keyspace.leases.has_any:
            deadline = min(deadline, self.now() + PAUSE_RESOLUTION)
        if self._timer is not None:
            # A timer that is too early does no harm, and one that is late measures a pause.
            is_late = self._timer_at < self.now()
            if deadline is not None and (is_late or self._timer_at <= deadline):
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._all_gone is None:
            # A deadline that has passed has been left for later, and measures no pause.
            self._set_timer(max(deadline, self.now()))

    def _set_timer(self, when: float) -> None:
        self._timer_at = when
        self._timer = self.loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self.now()
        late = now - self._timer_at
        if late > PAUSE_RESOLUTION:
            # This process was suspended, and could not receive heartbeats.
            self.keyspace.leases.extend_all(late, now)
            if self._on_pause is not None:
                self._on_pause(late)
        if late > PAUSE_RESOLUTION or (late > _LATE and not self._is_late):
            # Heartbeats may still be in the sockets: let them be read first.
            self._is_late = True
            self._set_timer(now + _LATE)
            return
        self._is_late = False
        self.keyspace.expire(now)
        self.flush()
        self.rearm()


class Connection(asyncio.Protocol, Client):
    """One connection of the server, with or without TLS, and a client of the keyspace."""

    _transport: asyncio.Transport

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service = service
        self._out: list[bytes] = []
        self._out_size = 0
        # Notifications that follow the reply which is built in parts; None: none is built.
        self._later: list[bytes] | None = None
        self._uses_queue = False
        self._queue = ReplyQueue(service.buffers)
        # The rest of the requests that are being served.
        self._requests: Iterator[Request] = iter(())
        # Requests that were received before reading was paused.
        self._backlog: list[Request] = []
        self.is_in_handshake = True
        """Whether the client has not sent its opening, over TLS if there is TLS, and its token."""
        self._is_paused = self._is_held = self._is_reading_keys = False
        self._is_postponed = False
        self.is_gone = False
        self._batches_served = 0
        self._accounted = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_authenticated = service.token is None
        is_full = self.is_authenticated or service.known_hosts is not None
        self._reader = RequestReader(service.limits.wire if is_full else _STRANGER)
        self._nonce: bytes | None = None
        self._is_tagged = False
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        limit_read_size(transport)
        if not self.service.admit(self):
            self.drop("is one connection too many")
            return
        self._set_deadline(
            self.service.limits.handshake_timeout, "did not complete the handshake in time"
        )
        self.on_host_admitted()

    def eof_received(self) -> None:
        self.has_closed = True

    def connection_lost(self, error: Exception | None) -> None:
        self._discard()
        self.service.forget(self)

    def data_received(self, data: bytes) -> None:
        if self.leases:
            self.last_received_at = self.service.now()
        try:
            if self.is_in_handshake:
                requests = self._read_handshake(data)
            else:
                requests = self._reader.read(data)
            if self._is_paused or self._is_reading_keys or self._is_postponed:
                # Received before reading was paused.
                self._backlog.extend(requests)
            elif requests:
                self._serve(iter(requests))
        except WireError as error:
            self.drop(str(error))
            return
        if self._timer is not None or not self._reader.is_idle:
            if self._reader.has_more and not self._is_blocked():
                # Serve the rest of a long burst later: yield to other connections.
                self._transport.pause_reading()
                self.service.loop.call_soon(self._resume)
            self._time_partial()

    def _read_handshake(self, data: bytes) -> list[Request]:
        if not self.is_authenticated:
            self._received += len(data)
            if self._received > _STRANGER_BYTES and not self._hold():
                self.drop("sent too much without the token")
                return []
        if not self._reader.is_opened and data.startswith(wire.TLS_HANDSHAKE):
            self._append(wire.NOT_TLS)
            self.drop("speaks TLS, which this store does not", is_graceful=True)
            return []
        requests = self._reader.read(data)
        self._end_handshake()
        return requests

    def _end_handshake(self) -> None:
        if self.is_authenticated and self._reader.is_opened:
            self.is_in_handshake = False
            self._cancel_deadline()

    def _time_partial(self) -> None:
        """Set or cancel the deadline of an unfinished request."""
        if self._is_blocked():
            return
        if self._reader.is_partial:
            self._account_partial(self._reader.partial_size)
            if self._timer is None:
                self._set_deadline(self.service.limits.stall_timeout, "left a request unfinished")
        elif self._timer is not None and not self.is_in_handshake:
            self._cancel_deadline()
            self._account_partial(0)

    def _resume(self) -> None:
        """Serve the next portion of the received requests; when none is left, read on."""
        if self._is_blocked() or not self.flush():
            return
        requests, self._backlog = self._backlog, []
        try:
            if not requests and self._reader.has_more:
                requests = self._reader.read(b"")
            if requests:
                self._serve(iter(requests))
        except WireError as error:
            self.drop(str(error))
            return
        if self._is_blocked():
            return
        if self._backlog or self._reader.has_more:
            self.service.loop.call_soon(self._resume)
        else:
            # It may not have been read since its lease's deadline was last postponed.
            self.last_received_at = self.service.now()
            self._transport.resume_reading()
            self._time_partial()

    # Serving.

    def _serve(self, requests: Iterator[Request]) -> None:
        self._batches_served += 1
        self._requests = requests
        service, work = self.service, self.service.keyspace.work
        # As `Work.begin`, without a call.
        work.left, work.on_spent = work.at_once, self.postpone
        if not self.is_authenticated:
            self._serve_unauthenticated(requests)
        elif self._is_tagged:
            self._serve_tagged(requests)
        else:
            self._serve_plain(requests)
        if self._out:
            self._write_out()
        work.on_spent = None
        if service.dirty or service.postponed or work.later:
            service.flush()

    def _serve_plain(self, requests: Iterator[Request]) -> None:
        out, handlers, size, keyspace = self._out, self.service.handlers, 0, self.service.keyspace
        try:
            for op, key, argument, _ in requests:
                call = handlers[op]
                if call is not None:
                    result = call(key, argument)
                    if result is None:
                        continue
                    reply = ENCODER_OF[op](result)
                    if isinstance(reply, bytes):
                        out.append(reply)
                        size += len(reply)
                    else:
                        size += self._append(reply)
                    if size > _FLUSH_SIZE:
                        size = 0
                        if not self.flush():
                            self._backlog.extend(requests)
                            return
                elif op == wire.CHECK and len(argument) <= KEYS_AT_ONCE:
                    is_ready = argument == _IDENTIFYING or not keyspace.check(key, argument)
                    out.append(b"\0" if is_ready else b"\1")
                elif op == wire.WAIT and len(argument) <= KEYS_AT_ONCE:
                    if keyspace.wait(self, None, key, argument) is not PENDING:
                        out.append(b"\0")
                elif op == wire.HELLO:
                    self._reply_hello(argument)
                    self._serve_tagged(requests)
                    return
                else:
                    result = self._handle(op, key, argument, None)
                    if result is not PENDING:
                        self._append(ENCODER_OF[op](result))
                    elif self._is_reading_keys:
                        self._backlog.extend(requests)
                        return
        except OperationRefused as error:
            self._refuse_plain(error)

    def _refuse_plain(self, error: OperationRefused) -> None:
        """Drop the client: the plain dialect has no other way to refuse a request."""
        reason = f"sent a request that is refused: {error}"
        self.drop(reason, is_graceful=True, is_refusal=True)

    def _serve_tagged(self, requests: Iterator[Request]) -> None:
        handlers, size = self.service.keyspace.handlers, 0
        for op, key, argument, tag in requests:
            call = handlers[op]
            try:
                result = call(key, argument) if call else self._handle(op, key, argument, tag)
            except OperationRefused as error:
                size += self._append(tagged(tag, replies.REFUSED, str(error).encode()))
            else:
                if result is not PENDING:
                    size += self._append(tagged(tag, replies.DONE, ENCODER_OF[op](result)))
                elif self._is_reading_keys:
                    self._backlog.extend(requests)
                    return
            if size >= _FLUSH_SIZE:
                size = 0
                if not self.flush():
                    self._backlog.extend(requests)
                    return

    def _serve_unauthenticated(self, requests: Iterator[Request]) -> None:
        """Serve a client that has not sent the token yet: only the handshake."""
        for op, key, argument, tag in requests:
            if op == wire.PING and not self._is_tagged:
                self._append(ENCODER_OF[op](argument))
            elif op == wire.CHECK and argument == _IDENTIFYING and not self._is_tagged:
                self._append(ENCODER_OF[op](replies.READY))
            elif op == wire.HELLO:
                self._reply_hello(argument)
            elif op == wire.AUTH:
                proof = self.service.answer_proof(key, self._nonce)
                if proof is None:
                    self._append(tagged(tag, replies.REFUSED, b"the token is wrong"))
                    self.drop("sent a wrong token", is_graceful=True)
                    return
                self._authenticate()
                self.service.admit_host(self._host())
                self._append(tagged(tag, replies.DONE, ENCODER_OF[op](proof)))
                self._serve_tagged(requests)
                return
            elif not self._is_tagged and self._hold():
                self._backlog = [(op, key, argument, tag), *requests]
                return
            else:
                self.drop("sent a request without the token")
                return

    def _authenticate(self) -> None:
        self.is_authenticated = True
        self._reader.limits = self.service.limits.wire
        self._end_handshake()

    def _host(self) -> str:
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    def _hold(self) -> bool:
        """Read no more until a client on the same host proves the token; False: never serve it."""
        if self.service.known_hosts is None:
            return False
        if not self._is_held:
            self._is_held = True
            self._transport.pause_reading()
        return True

    def on_host_admitted(self) -> None:
        """Serve this connection if its host may be served without the token."""
        known, host = self.service.known_hosts, self._host()
        if known is None or self.is_authenticated or self.is_gone:
            return
        # A connection whose both ends have one address does not leave this host.
        own = self._transport.get_extra_info("sockname")
        if host in known or (own and own[0] == host) or host.startswith("127.") or host == "::1":
            self._authenticate()
            if self._is_held:
                self._is_held = False
                self.service.loop.call_soon(self._resume)

    def _handle(self, op: int, key: bytes, argument: Any, tag: int | None) -> Any:
        """Carry out a request that involves this connection; `tag` is None in the plain dialect."""
        service, keyspace = self.service, self.service.keyspace
        if op == wire.LEASED_SET:
            return keyspace.leased_set(self, tag, key, argument)  # no deadline has changed
        if op in (wire.WATCH_KEY, wire.WATCH_PREFIX):
            return self._watch(op, key, argument, tag)
        if op in _OF_MANY:
            return self._serve_many(op, argument, tag)
        if op == wire.GET_WHEN_SET and keyspace.is_large(argument):
            return self._read_in_parts(op, self._read_values(op, argument, tag), tag)
        client_handler = keyspace.client_handlers[op]
        if client_handler is not None:
            result = client_handler(self, tag, key, argument)
            if op == wire.LEASED_COMPARE_SET:
                return result
        elif op == wire.PING:
            return argument
        elif op == wire.CANCEL_WAIT:
            keyspace.cancel(self, None)
            return replies.WAIT_CANCELED
        elif op == wire.CANCEL:
            result = int(keyspace.cancel(self, argument))
        elif op == wire.HEARTBEAT:
            # `data_received` has renewed the leases; there is no reply.
            return PENDING
        elif op == wire.GRANT_LEASE:
            result = keyspace.grant_lease(self, tag, random_bytes(16), argument, service.now())
        elif op == wire.RESUME_LEASE:
            result = int(keyspace.leases.resume(self, tag, key, service.now()))
        elif op == wire.AUTH:
            # Of a client on a host that is served without the token.
            proof = service.answer_proof(key, self._nonce)
            if proof is None:
                raise OperationRefused("the token is wrong, or this store asks for none")
            service.admit_host(self._host())
            return proof
        else:
            raise OperationRefused("not in the tagged dialect")
        service.rearm()
        return result

    def _watch(self, op: int, key: bytes, last_revision: int, tag: int | None) -> object:
        """Begin a watch: at once if that is short, else in parts."""
        keyspace = self.service.keyspace
        if op == wire.WATCH_KEY and last_revision < 0 and len(keyspace.get(key)) <= _SHORT:
            snapshot = keyspace.watch(self, tag, key, last_revision, is_prefix=False)
            self._append(_reply(tag, replies.NOTIFY, replies.encode_snapshot(snapshot)))
            return PENDING
        return self._read_in_parts(op, self._read_watched(op, key, last_revision, tag), tag)

    def _reply_hello(self, version: int) -> None:
        if self._is_tagged or version != wire.VERSION:
            raise WireError(f"sent a HELLO of version {version}")
        if self.waits:
            # Its reply would have no tag; the request that causes it is of another client.
            raise WireError("sent a HELLO during a wait")
        self._is_tagged = True
        self._nonce = random_bytes(wire.NONCE_SIZE)
        reply = HelloReply(self.service.instance, self._nonce, self.service.token is not None)
        self._append(ENCODER_OF[wire.HELLO](reply))

    # Many keys.

    def _serve_many(self, op: int, keys: Any, tag: int | None) -> Any:
        """Return the result of a request with many keys; PENDING if it is served in parts."""
        if op == wire.LIST_KEYS:
            return self._read_in_parts(op, self._read_names(tag), tag)
        if op in (wire.CHECK, wire.WAIT):
            if len(keys) > KEYS_AT_ONCE:
                return self._read_in_parts(op, self._look_up(op, keys, tag), tag)
            keyspace = self.service.keyspace
            return (
                keyspace.check(b"", keys)
                if op == wire.CHECK
                else keyspace.wait(self, tag, b"", keys)
            )
        if op == wire.MULTI_SET:
            if self.service.keyspace.is_long(keys):
                return self._read_in_parts(op, self._write_pairs(keys, tag), tag)
            return self.service.keyspace.multi_set(b"", keys)
        if self.service.keyspace.is_large(keys):
            return self._read_in_parts(op, self._read_values(op, keys, tag), tag)
        return self.service.keyspace.multi_get(b"", keys)

    def _read_in_parts(self, op: int, parts: Generator[int], tag: int | None) -> object:
        """Carry out a request in parts, which yield the number of their keys; the last one replies.

        Later requests of the connection wait for it.
        """
        self._is_reading_keys = True
        self._later = None if op == wire.MULTI_SET else []
        self._transport.pause_reading()
        self.service.loop.call_soon(self._read_part, parts, tag)
        return PENDING

    def _read_part(self, parts: Generator[int], tag: int | None) -> None:
        """Carry out parts with `KEYS_AT_ONCE` keys in all."""
        if self.is_gone or self._transport.is_closing():
            parts.close()
            return
        count, work = 0, self.service.keyspace.work
        work.begin()
        try:
            for keys in parts:
                count += keys
                if count >= KEYS_AT_ONCE or work.left <= 0:
                    # The work that it has caused comes first.
                    service, is_spent = self.service, work.left <= 0
                    proceed = service.postponed.append if is_spent else service.loop.call_soon
                    proceed(partial(self._read_part, parts, tag))
                    service.flush()
                    return
        except OperationRefused as error:
            if tag is None:
                self._refuse_plain(error)
                return
            self._append(tagged(tag, replies.REFUSED, str(error).encode()))
        self.service.flush()
        self._account_partial(0)
        self._is_reading_keys = False
        if self._later:
            self._append(self._later)
        self._later = None
        self._resume()

    def _read_names(self, tag: int | None) -> Generator[int]:
        """Reply with the names of all keys at this moment."""
        names = self.service.keyspace.list_keys()
        pieces: Pieces = [replies.encode_head(wire.LIST_KEYS, names)]
        for part in in_parts(names, len):
            yield len(part) + self._add(pieces, replies.encode_items(wire.LIST_KEYS, part))
        self._append(_reply(tag, replies.DONE, pieces))

    def _look_up(self, op: int, keys: Sequence[bytes], tag: int | None) -> Generator[int]:
        """Reply to a CHECK or WAIT whether each key is present when it is looked up."""
        keyspace, missing = self.service.keyspace, []
        for part in in_parts(keys):
            missing += keyspace.missing(part)
            yield len(part)
        is_wait = op == wire.WAIT
        result = keyspace.wait(self, tag, b"", missing) if is_wait else int(bool(missing))
        if result is not PENDING:
            self._append(_reply(tag, replies.DONE, ENCODER_OF[op](result)))

    def _write_pairs(self, pairs: Any, tag: int | None) -> Generator[int]:
        yield from self.service.keyspace.multi_set_in_parts(pairs)
        if tag is not None:
            self._append(tagged(tag, replies.DONE, ENCODER_OF[wire.MULTI_SET](None)))

    def _read_values(self, op: int, keys: Sequence[bytes], tag: int | None) -> Generator[int]:
        """Reply with the value that each key has when it is read."""
        keyspace = self.service.keyspace
        pieces: Pieces = []
        for part in in_parts(keys, keyspace.size_of):
            if op == wire.GET_WHEN_SET and not keyspace.have_values(part):
                keyspace.get_when_set(self, tag, b"", keys)  # they are waited for as a whole
                return
            yield len(part) + self._add(pieces, ENCODER_OF[op](keyspace.multi_get(b"", part)))
        self._append(_reply(tag, replies.DONE, pieces))

    def _read_watched(
        self, op: int, key: bytes, last_revision: int, tag: int | None
    ) -> Generator[int]:
        """Begin a watch; reply with its snapshot, or with the changes since `last_revision`."""
        keyspace = self.service.keyspace
        is_prefix = op == wire.WATCH_PREFIX
        snapshot = yield from keyspace.watch_in_parts(
            self, tag, key, last_revision, is_prefix=is_prefix
        )
        changes = () if snapshot.is_whole else keyspace.watches.since(self, tag, last_revision)
        pieces: Pieces = [replies.encode_head(op, snapshot)]
        try:
            for part in in_parts(snapshot.pairs, lambda pair: len(pair[0]) + len(pair[1])):
                yield len(part) + self._add(pieces, replies.encode_items(op, part))
        except OperationRefused:
            keyspace.cancel(self, tag)
            raise
        self._append(_reply(tag, replies.NOTIFY, pieces))
        for change in changes:
            size = self._append(_reply(tag, replies.NOTIFY, replies.encode_change(change)))
            yield 1 + (size >> 9)

    def _add(self, pieces: Pieces, more: bytes | Pieces) -> int:
        """Add to a reply, unless it is too large; return the number of keys that take as long."""
        more = [more] if isinstance(more, bytes) else more
        pieces += more
        size = sum(map(len, pieces))
        self.service.keyspace.check_reply(size)
        self._account_partial(size)
        return sum(map(len, more)) >> 9

    # Replies, deadlines and the end.

    def pause_writing(self) -> None:
        self._is_paused = self._uses_queue = True
        self._backlog.extend(self._requests)
        if not self.is_gone and not self._transport.is_closing():
            self._transport.pause_reading()
            if not self.is_in_handshake:  # which has a deadline of its own
                self._cancel_deadline()
                self._set_deadline(self.service.limits.stall_timeout, "does not read its replies")

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self.is_gone:
            if not self.is_in_handshake:
                self._cancel_deadline()
            # Not now: the transport may be in the middle of a write.
            self.service.loop.call_soon(self._resume)

    def tls_failed(self, reason: str) -> None:
        self.drop(reason, is_graceful=True)

    def postpone(self) -> None:
        """End the present batch of requests; serve the rest after other connections."""
        self._backlog.extend(self._requests)
        if not self._is_postponed and not self.is_gone:
            self._is_postponed = True
            self._transport.pause_reading()
            self.service.postponed.append(self.proceed)

    def proceed(self) -> None:
        """Serve the rest of a batch that was postponed."""
        self._is_postponed = False
        self._resume()

    def _is_blocked(self) -> bool:
        is_waiting = self._is_paused or self._is_held or self._is_reading_keys
        return is_waiting or self._is_postponed or self.is_gone or self._transport.is_closing()

    def _append(self, reply: bytes | Pieces) -> int:
        """Queue a reply, which is sent at the next flush; return its size."""
        if isinstance(reply, bytes):
            self._out.append(reply)
            return len(reply)
        self._out += reply
        self._uses_queue = True
        return sum(map(len, reply))

    def _push(self, reply: bytes | Pieces) -> None:
        """Queue a notification, which is sent at the end of the present operation."""
        if self.is_gone:
            return
        if units := len(reply) >> 11:  # the copied bytes; the length of `Pieces` is small
            self.service.keyspace.work.spend(units)
        if self._later is not None:
            self._later += [reply] if isinstance(reply, bytes) else reply
        else:
            if not self._out_size:
                self.service.dirty.append(self)
            self._out_size += self._append(reply)
            if self._out_size >= _FLUSH_SIZE:
                self.flush()

    def flush(self) -> bool:
        """Write the queued replies; return whether the peer accepts more."""
        self._write_out()
        return not (self._is_paused or self.is_gone or self._transport.is_closing())

    def _write_out(self) -> None:
        out = self._out
        if self._transport.is_closing():
            # uvloop raises RuntimeError where asyncio discards the data.
            out.clear()
        elif self._uses_queue:
            self._flush_queue()
        elif out:
            data = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            self._transport.write(data)
        self._out_size = 0

    def _flush_queue(self) -> None:
        """Write through the queue: the peer does not read, or a large value is sent."""
        queue = self._queue
        has_unread = queue.size > self.service.limits.unsent
        queue.extend(self._out)
        self._out.clear()
        if has_unread and self._out_size:
            self.drop("does not read its notifications")
            return
        queue.write_to(self._transport, lambda: self._is_paused)
        self._uses_queue = self._is_paused or queue.size > 0
        if queue.size:
            self.service.check_buffers()

    @property
    def held(self) -> float:
        """The bytes that the server holds for this connection."""
        return self._accounted + self._queue.weight()

    def _account_partial(self, size: int) -> None:
        self.service.buffers.size += size - self._accounted
        self._accounted = size
        if size:
            self.service.check_buffers()

    def _set_deadline(self, seconds: float, reason: str) -> None:
        served = self._batches_served
        self._timer = self.service.loop.call_later(
            seconds, self._on_deadline, seconds, reason, served
        )

    def _cancel_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self, seconds: float, reason: str, served: int) -> None:
        if self._batches_served != served and not self._is_paused and not self.is_in_handshake:
            # The unfinished request is a later one than when the deadline was set.
            self._set_deadline(seconds, reason)
        else:
            self.drop(reason)

    def drop(self, reason: str, *, is_graceful: bool = False, is_refusal: bool = False) -> None:
        """Close this connection and report it.  Idempotent.  `is_graceful`: send replies first."""
        if self.is_gone:
            return
        if is_graceful and not self.flush() and self._transport.is_closing():
            return  # the flush has dropped it
        self._discard()
        peer = format_endpoint(self._transport.get_extra_info("peername"))
        if is_graceful:
            self._transport.close()
        else:
            self._transport.abort()
        if self.service.on_drop is not None:
            self.service.on_drop(Dropped(peer, reason, is_refusal))

    def _discard(self) -> None:
        """Serve this connection no more; free the bytes held for it."""
        self.is_gone = True
        self._cancel_deadline()
        self._account_partial(0)
        self._out.clear()
        self._later = None
        self._queue.clear()
        self._backlog.extend(self._requests)
        self._backlog.clear()

    def close(self) -> None:
        """Send the pending replies and close the connection."""
        self.is_gone = True
        self._cancel_deadline()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # Hooks of the keyspace.

    def is_unread(self) -> bool:
        return self._is_reading_keys or self._is_postponed

    def on_present(self, tag: Any, keys: Sequence[bytes]) -> bool:
        if not self.service.keyspace.is_large(keys):
            return False
        self._backlog.insert(0, (wire.GET_WHEN_SET, b"", keys, tag))
        self.postpone()
        return True

    def on_released(self, tag: Any) -> None:
        self._push(tagged(tag, replies.DONE, b"\1"))

    def on_woken(self, tag: Any) -> None:
        self._push(_reply(tag, replies.DONE, b"\0"))

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.GET_WHEN_SET](values)))

    def on_item(self, tag: Any, item: bytes) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.POP_WHEN_PUSHED](item)))

    def on_refused(self, tag: Any, why: str) -> None:
        self._push(tagged(tag, replies.REFUSED, why.encode()))

    def on_change(self, tag: Any, change: RawChange) -> None:
        self._push(tagged(tag, replies.NOTIFY, _encode_change(change)))

    def on_lease_ended(self, tag: Any) -> None:
        self._push(tagged(tag, replies.NOTIFY, b""))


def _reply(tag: int | None, status: int, pieces: bytes | Pieces) -> bytes | Pieces:
    """Return a reply in the dialect of its request."""
    return pieces if tag is None else tagged(tag, status, pieces)
