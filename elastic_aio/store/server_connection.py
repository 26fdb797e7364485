"""One connection of the store's server: reads requests, dispatches them, writes replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from elastic_aio.aio import random_bytes
from elastic_aio.store import replies, wire
from elastic_aio.store.keyspace import (
    PENDING,
    Client,
    Keyspace,
    KeyspaceLimits,
    OperationRefused,
)
from elastic_aio.store.replies import ENCODER_OF, HelloReply, RawChange, tagged
from elastic_aio.store.sockets import format_endpoint
from elastic_aio.store.wire import Request, RequestReader, WireError, WireLimits

_FLUSH_SIZE: Final = 1 << 20
"""Bytes of replies that are written before the next request is served."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on the clients of a server; a client that exceeds one is disconnected.

    Args:
        wire: sizes in one request.
        keyspace: what all clients together may occupy.
        connections: open connections; never more than the process may open files.
        handshake_timeout: seconds to send the opening, and the token if there is one.
        stall_timeout: seconds to complete a request once begun, and to read replies.
        peer_timeout: seconds without a packet of the client's kernel.
        unsent: bytes of notifications for a client that does not read.
        partial: bytes of unfinished requests of all clients together.
    """

    wire: WireLimits = field(default_factory=WireLimits)
    keyspace: KeyspaceLimits = field(default_factory=KeyspaceLimits)
    connections: int = 16_384
    handshake_timeout: float = 10.0
    stall_timeout: float = 60.0
    peer_timeout: float = 60.0
    unsent: int = 16 << 20
    partial: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Dropped:
    """The server closed the connection from `peer`; `reason` says what the peer did."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"dropped {self.peer}: it {self.reason}"


class ConnectionServer(Protocol):
    """The interface of the server to its connections."""

    loop: asyncio.AbstractEventLoop
    limits: ServerLimits
    keyspace: Keyspace
    instance: bytes
    _token: str | None
    _handlers: list[Callable[[bytes, Any], Any] | None]
    _dirty: list[Connection]
    _on_drop: Callable[[Dropped], None] | None

    def _now(self) -> float: ...
    def _admit(self, connection: Connection) -> bool: ...
    def _forget(self, connection: Connection) -> None: ...
    def _accepts(self, code: bytes, nonce: bytes | None) -> bool: ...
    def _account(self, more: int) -> bool: ...
    def _flush(self) -> None: ...
    def _rearm(self) -> None: ...


class Connection(Client, asyncio.Protocol):
    """One connection: the asyncio protocol, and the client of the keyspace."""

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__()
        self._server = server
        self._reader = RequestReader(server.limits.wire)
        self._out: list[bytes] = []
        self._backlog: list[Request] = []
        self._nonce: bytes | None = None
        self._is_tagged = False
        self._is_authenticated = server._token is None
        self._is_in_handshake = True
        self._is_paused = False
        self._is_gone = False
        self._batches_served = 0
        self._accounted = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        if not self._server._admit(self):
            self.drop("is one connection too many")
            return
        self._set_deadline(
            self._server.limits.handshake_timeout, "did not complete the handshake in time"
        )

    def connection_lost(self, error: Exception | None) -> None:
        self._is_gone = True
        self._cancel_deadline()
        self._account_partial(0)
        self._out.clear()
        self._backlog.clear()
        self._server._forget(self)

    def data_received(self, data: bytes) -> None:
        if self.leases:
            self.last_received_at = self._server._now()
        try:
            requests = self._reader.read(data)
            if self._is_paused:
                # Received before reading was paused.
                self._backlog.extend(requests)
            elif requests:
                self._serve(iter(requests))
        except WireError as error:
            self.drop(str(error))
            return
        if self._reader.has_more and not self._is_blocked():
            # Serve the rest of a long burst later: yield to other connections.
            self._transport.pause_reading()
            self._server.loop.call_soon(self._resume)
        self._time_partial()

    def _is_blocked(self) -> bool:
        return self._is_paused or self._is_gone or self._transport.is_closing()

    def _time_partial(self) -> None:
        """Set or cancel the deadline of an unfinished request."""
        if self._is_blocked():
            return
        if self._is_in_handshake and self._is_authenticated and self._reader.is_opened:
            self._is_in_handshake = False
            self._cancel_deadline()
        if self._reader.is_partial:
            self._account_partial(self._reader.partial_size)
            if self._timer is None:
                self._set_deadline(self._server.limits.stall_timeout, "left a request unfinished")
        elif self._timer is not None and not self._is_in_handshake:
            self._cancel_deadline()
            self._account_partial(0)

    def pause_writing(self) -> None:
        self._is_paused = True
        if not self._is_gone and not self._transport.is_closing():
            self._transport.pause_reading()
            self._cancel_deadline()
            self._set_deadline(self._server.limits.stall_timeout, "does not read its replies")

    def resume_writing(self) -> None:
        self._is_paused = False
        self._cancel_deadline()
        if not self._is_gone:
            # Not now: the transport may be in the middle of a write.
            self._server.loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Serve the next portion of the received requests; when none is left, read on."""
        if self._is_blocked():
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
            self._server.loop.call_soon(self._resume)
        else:
            self._transport.resume_reading()
            self._time_partial()

    # Serving.

    def _serve(self, requests: Iterator[Request]) -> None:
        self._batches_served += 1
        if not self._is_authenticated:
            self._serve_unauthenticated(requests)
        elif self._is_tagged:
            self._serve_tagged(requests)
        else:
            self._serve_plain(requests)
        if self._out:
            self.flush()
        self._server._flush()

    def _serve_plain(self, requests: Iterator[Request]) -> None:
        out, handlers, size = self._out, self._server._handlers, 0
        keyspace_set, wait = self._server.keyspace.set, self._server.keyspace.wait
        try:
            for op, key, argument, _ in requests:
                if op == wire.SET:
                    keyspace_set(key, argument)
                    continue
                call = handlers[op]
                if call is not None:
                    result = call(key, argument)
                    if result is None:
                        continue
                    reply = ENCODER_OF[op](result)
                    out.append(reply)
                    size += len(reply)
                    if size > _FLUSH_SIZE:
                        size = 0
                        if not self.flush():
                            self._backlog.extend(requests)
                            return
                elif op == wire.WAIT:
                    if wait(self, None, key, argument) is not PENDING:
                        out.append(b"\0")
                elif op == wire.HELLO:
                    self._reply_hello(argument)
                    self._serve_tagged(requests)
                    return
                elif op == wire.PING:
                    out.append(ENCODER_OF[op](argument))
                elif op == wire.CANCEL_WAIT:
                    self._server.keyspace.cancel(self, None)
                    out.append(b"\1")
                else:
                    client_handler = self._server.keyspace.client_handlers[op]
                    assert client_handler is not None, op
                    result = client_handler(self, None, key, argument)
                    if result is not PENDING:
                        out.append(ENCODER_OF[op](result))
        except OperationRefused as error:
            # The plain dialect has no other way to refuse a request.
            self.flush()
            self.drop(f"sent a request that is refused: {error}")

    def _serve_tagged(self, requests: Iterator[Request]) -> None:
        out, handlers, size = self._out, self._server.keyspace.handlers, 0
        for op, key, argument, tag in requests:
            call = handlers[op]
            try:
                result = (
                    call(key, argument) if call else self._handle_tagged(op, key, argument, tag)
                )
            except OperationRefused as error:
                out.append(tagged(tag, replies.REFUSED, str(error).encode()))
                continue
            if result is PENDING:
                continue
            reply = tagged(tag, replies.DONE, ENCODER_OF[op](result))
            out.append(reply)
            size += len(reply)
            if size > _FLUSH_SIZE:
                size = 0
                if not self.flush():
                    self._backlog.extend(requests)
                    return

    def _serve_unauthenticated(self, requests: Iterator[Request]) -> None:
        """Serve a client that has not sent the token yet: only the handshake."""
        for op, key, argument, tag in requests:
            if op == wire.PING and not self._is_tagged:
                self._out.append(ENCODER_OF[op](argument))
            elif op == wire.CHECK and argument == (wire.RESERVED_KEY,) and not self._is_tagged:
                self._out.append(ENCODER_OF[op](replies.READY))
            elif op == wire.HELLO:
                self._reply_hello(argument)
            elif op == wire.AUTH:
                if not self._server._accepts(key, self._nonce):
                    self._out.append(tagged(tag, replies.REFUSED, b"the token is wrong"))
                    self.flush()
                    self.drop("sent a wrong token", is_graceful=True)
                    return
                self._is_authenticated = True
                self._out.append(tagged(tag, replies.DONE, b""))
                self._serve_tagged(requests)
                return
            else:
                self.drop("sent a request without the token")
                return

    def _handle_tagged(self, op: int, key: bytes, argument: Any, tag: int) -> Any:
        """Carry out a tagged request that involves this connection."""
        server, keyspace = self._server, self._server.keyspace
        if op in (wire.WATCH_KEY, wire.WATCH_PREFIX):
            self._watch(op, key, argument, tag)
            return PENDING
        client_handler = keyspace.client_handlers[op]
        if client_handler is not None:
            result = client_handler(self, tag, key, argument)
        elif op == wire.CANCEL:
            result = int(keyspace.cancel(self, argument))
        elif op == wire.PING:
            result = argument
        elif op == wire.HEARTBEAT:
            # `data_received` has renewed the leases; there is no reply.
            return PENDING
        elif op == wire.GRANT_LEASE:
            lease_id = random_bytes(16)
            result = keyspace.grant_lease(self, tag, lease_id, argument, server._now())
        elif op == wire.RESUME_LEASE:
            result = int(keyspace.leases.resume(self, tag, key, server._now()))
        elif op == wire.AUTH:
            raise OperationRefused("this store asks for no token")
        else:
            raise OperationRefused("not in the tagged dialect")
        server._rearm()
        return result

    def _watch(self, op: int, key: bytes, last_revision: int, tag: int) -> None:
        keyspace = self._server.keyspace
        is_prefix = op == wire.WATCH_PREFIX
        snapshot = keyspace.watch(self, tag, key, last_revision, is_prefix=is_prefix)
        self._out.append(tagged(tag, replies.NOTIFY, replies.encode_snapshot(snapshot)))
        if not snapshot.is_whole:
            for change in keyspace.watches.since(self, tag, last_revision):
                self._out.append(tagged(tag, replies.NOTIFY, replies.encode_change(change)))

    def _reply_hello(self, version: int) -> None:
        if self._is_tagged or version != wire.VERSION:
            raise WireError(f"sent a HELLO of version {version}")
        self._is_tagged = True
        self._nonce = random_bytes(16)
        reply = HelloReply(self._server.instance, self._nonce, self._server._token is not None)
        self._out.append(ENCODER_OF[wire.HELLO](reply))

    # Hooks of the keyspace.

    def on_woken(self, tag: Any) -> None:
        self._push(tagged(tag, replies.DONE, b"\0") if self._is_tagged else b"\0")

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.GET_WHEN_SET](values)))

    def on_item(self, tag: Any, item: bytes) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.POP_WHEN_PUSHED](item)))

    def on_change(self, tag: Any, change: RawChange) -> None:
        self._push(tagged(tag, replies.NOTIFY, replies.encode_change(change)))

    def on_lease_ended(self, tag: Any) -> None:
        self._push(tagged(tag, replies.NOTIFY, b""))

    def _push(self, reply: bytes) -> None:
        if not self._is_gone:
            self._out.append(reply)
            self._server._dirty.append(self)

    # The connection.

    def flush(self) -> bool:
        """Write the queued replies; return whether the peer accepts more."""
        if self._transport.is_closing():
            # uvloop raises RuntimeError where asyncio discards the data.
            self._out.clear()
        elif self._out:
            was_paused = self._is_paused
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            self._transport.write(data)
            if was_paused and self._transport.get_write_buffer_size() > self._server.limits.unsent:
                self.drop("does not read its notifications")
        return not self._is_blocked()

    def _account_partial(self, size: int) -> None:
        """Account for the bytes of an unfinished request."""
        if self._server._account(size - self._accounted):
            self._accounted = size
        else:
            self.drop("sent part of a request while too much is unfinished")

    def _set_deadline(self, seconds: float, reason: str) -> None:
        served = self._batches_served
        self._timer = self._server.loop.call_later(
            seconds, self._on_deadline, seconds, reason, served
        )

    def _cancel_deadline(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_deadline(self, seconds: float, reason: str, served: int) -> None:
        if self._batches_served != served and not self._is_paused and not self._is_in_handshake:
            # The unfinished request is a later one than when the deadline was set.
            self._set_deadline(seconds, reason)
        else:
            self.drop(reason)

    def drop(self, reason: str, *, is_graceful: bool = False) -> None:
        """Close this connection and report it; idempotent.

        Args:
            reason: what the peer did, for `Dropped`.
            is_graceful: send the pending replies first.
        """
        if self._is_gone:
            return
        self._is_gone = True
        self._out.clear()
        self._backlog.clear()
        self._cancel_deadline()
        peer = format_endpoint(self._transport.get_extra_info("peername"))
        if is_graceful:
            self._transport.close()
        else:
            self._transport.abort()
        if self._server._on_drop is not None:
            self._server._on_drop(Dropped(peer, reason))

    def close(self) -> None:
        """Send the pending replies and close the connection."""
        self._is_gone = True
        self._cancel_deadline()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._transport.abort()
