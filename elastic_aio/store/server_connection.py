"""One connection of the store's server: bytes in, requests served, replies out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from elastic_aio.store import replies, wire
from elastic_aio.store.keyspace import PENDING, Client, Keyspace, KeyspaceLimits, Refusal
from elastic_aio.store.listen import shown_endpoint
from elastic_aio.store.replies import ENCODER_OF, Greeting, RawChange, tagged
from elastic_aio.store.wire import Request, RequestReader, WireError, WireLimits

__all__ = ["Connection", "Dropped", "ServerLimits"]

_FLUSH_SIZE: Final = 1 << 20
"""Bytes of replies after which they are written before the next request is served."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the peers of a server may do.

    Args:
        wire: of one request.
        keyspace: of all clients together.
        connections: at a time; never more than the process may open files.
        opening: seconds to begin like a client, and to show the token if there is one.
        stall: seconds to finish a request once begun, and to read replies.
        silence: seconds without a sign of the peer's kernel.
        unsent: bytes of news for a peer that does not read.
        partial: bytes of unfinished requests of all peers together.
    """

    wire: WireLimits = field(default_factory=WireLimits)
    keyspace: KeyspaceLimits = field(default_factory=KeyspaceLimits)
    connections: int = 16_384
    opening: float = 10.0
    stall: float = 60.0
    silence: float = 60.0
    unsent: int = 16 << 20
    partial: int = 256 << 20


@dataclass(frozen=True, slots=True)
class Dropped:
    """The server closed the connection from `peer`, which did what `reason` says."""

    peer: str
    reason: str

    def __str__(self) -> str:
        return f"dropped {self.peer}: it {self.reason}"


class ConnectionServer(Protocol):
    """The server as its connections see it."""

    loop: asyncio.AbstractEventLoop
    limits: ServerLimits
    keyspace: Keyspace
    instance: bytes
    simple: list[Callable[[bytes, Any], Any] | None]
    touched: list[Connection]

    @property
    def needs_token(self) -> bool: ...
    def now(self) -> float: ...
    def admit(self, connection: Connection) -> bool: ...
    def forget(self, connection: Connection) -> None: ...
    def accepts(self, code: bytes, nonce: bytes | None) -> bool: ...
    def account(self, more: int) -> bool: ...
    def report(self, dropped: Dropped) -> None: ...
    def flush(self) -> None: ...
    def rearm(self) -> None: ...


class Connection(Client, asyncio.Protocol):
    """One connection."""

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__()
        self._server = server
        self._reader = RequestReader(server.limits.wire)
        self._out: list[bytes] = []
        self._backlog: list[Request] = []
        self._nonce: bytes | None = None
        self._is_tagged = False
        self._is_trusted = not server.needs_token
        self._is_opening = True
        self._is_paused = False
        self._is_gone = False
        self._served = 0
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        if not self._server.admit(self):
            self.drop("is one connection too many")
            return
        self._arm(self._server.limits.opening, "did not begin like a client in time")

    def connection_lost(self, error: Exception | None) -> None:
        self._is_gone = True
        self._disarm()
        self._hold(0)
        self._out.clear()
        self._backlog.clear()
        self._server.forget(self)

    def eof_received(self) -> bool:
        return False

    def data_received(self, data: bytes) -> None:
        if self.leases:
            self.heard_at = self._server.now()
        try:
            requests = self._reader.read(data)
            if self._is_paused:
                # Came with what had been read already when reading was paused.
                self._backlog.extend(requests)
            elif requests:
                self._served += 1
                self._serve(iter(requests))
        except WireError as error:
            self.drop(str(error))
            return
        if self._reader.has_more and not self._cannot_go_on():
            # More is in hand than is good to serve in one go: let others have a turn.
            self._transport.pause_reading()
            self._server.loop.call_soon(self._resume)
        self._mind_partial()

    def _cannot_go_on(self) -> bool:
        return self._is_paused or self._is_gone or self._transport.is_closing()

    def _mind_partial(self) -> None:
        """Allow an unfinished request only so much time."""
        if self._cannot_go_on():
            return
        if self._is_opening and self._is_trusted and self._reader.is_opened:
            self._is_opening = False
            self._disarm()
        if self._reader.is_partial:
            self._hold(self._reader.partial)
            if self._timer is None:
                self._arm(self._server.limits.stall, "left a request unfinished")
        elif self._timer is not None and not self._is_opening:
            self._disarm()
            self._hold(0)

    def pause_writing(self) -> None:
        self._is_paused = True
        if not self._is_gone and not self._transport.is_closing():
            self._transport.pause_reading()
            self._disarm()
            self._arm(self._server.limits.stall, "does not read its replies")

    def resume_writing(self) -> None:
        self._is_paused = False
        self._disarm()
        if not self._is_gone:
            # Not from here: the transport may be in the middle of a write.
            self._server.loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Serve what is in hand, a portion at a time; then read on."""
        if self._cannot_go_on():
            return
        requests, self._backlog = self._backlog, []
        try:
            if not requests and self._reader.has_more:
                requests = self._reader.read(b"")
            if requests:
                self._served += 1
                self._serve(iter(requests))
        except WireError as error:
            self.drop(str(error))
            return
        if self._cannot_go_on():
            return
        if self._backlog or self._reader.has_more:
            self._server.loop.call_soon(self._resume)
        else:
            self._transport.resume_reading()
            self._mind_partial()

    # Serving.

    def _serve(self, requests: Iterator[Request]) -> None:
        if not self._is_trusted:
            self._serve_stranger(requests)
        elif self._is_tagged:
            self._serve_tagged(requests)
        else:
            self._serve_plain(requests)
        if self._out:
            self._flush()
        self._server.flush()

    def _serve_plain(self, requests: Iterator[Request]) -> None:
        out, simple, size = self._out, self._server.simple, 0
        keyspace_set, wait = self._server.keyspace.set, self._server.keyspace.wait
        try:
            for op, key, argument, _ in requests:
                if op == wire.SET:
                    keyspace_set(key, argument)
                    continue
                call = simple[op]
                if call is not None:
                    result = call(key, argument)
                    if result is None:
                        continue
                    reply = ENCODER_OF[op](result)
                    out.append(reply)
                    size += len(reply)
                    if size > _FLUSH_SIZE:
                        size = 0
                        if not self._flush():
                            self._backlog.extend(requests)
                            return
                elif op == wire.WAIT:
                    if wait(self, None, key, argument) is not PENDING:
                        out.append(b"\0")
                elif op == wire.HELLO:
                    self._greet(argument)
                    self._serve_tagged(requests)
                    return
                elif op == wire.PING:
                    out.append(ENCODER_OF[op](argument))
                elif op == wire.CANCEL_WAIT:
                    self._server.keyspace.cancel(self, None)
                    out.append(b"\1")
                else:
                    call_for = self._server.keyspace.for_client[op]
                    assert call_for is not None, op
                    result = call_for(self, None, key, argument)
                    if result is not PENDING:
                        out.append(ENCODER_OF[op](result))
        except Refusal as error:
            # The plain dialect has no other way to say no.
            self._flush()
            self.drop(f"asked for what cannot be: {error}")

    def _serve_tagged(self, requests: Iterator[Request]) -> None:
        out, simple, size = self._out, self._server.keyspace.simple, 0
        for op, key, argument, tag in requests:
            call = simple[op]
            try:
                result = call(key, argument) if call else self._do(op, key, argument, tag)
            except Refusal as error:
                out.append(tagged(tag, replies.REFUSED, str(error).encode()))
                continue
            if result is PENDING:
                continue
            reply = tagged(tag, replies.DONE, ENCODER_OF[op](result))
            out.append(reply)
            size += len(reply)
            if size > _FLUSH_SIZE:
                size = 0
                if not self._flush():
                    self._backlog.extend(requests)
                    return

    def _serve_stranger(self, requests: Iterator[Request]) -> None:
        """Serve a peer that has not shown the token yet: hardly anything."""
        for op, key, argument, tag in requests:
            if op == wire.PING and not self._is_tagged:
                self._out.append(ENCODER_OF[op](argument))
            elif op == wire.CHECK and argument == (wire.RESERVED_KEY,) and not self._is_tagged:
                self._out.append(ENCODER_OF[op](replies.READY))
            elif op == wire.HELLO:
                self._greet(argument)
            elif op == wire.AUTH:
                if not self._server.accepts(key, self._nonce):
                    self._out.append(tagged(tag, replies.REFUSED, b"the token is wrong"))
                    self._flush()
                    self.drop("showed a wrong token", is_polite=True)
                    return
                self._is_trusted = True
                self._out.append(tagged(tag, replies.DONE, b""))
                self._serve_tagged(requests)
                return
            else:
                self.drop("has no token, and this store asks for one")
                return

    def _do(self, op: int, key: bytes, argument: Any, tag: int) -> Any:
        """Carry out a tagged request that concerns this connection."""
        server, keyspace = self._server, self._server.keyspace
        if op in (wire.WATCH_KEY, wire.WATCH_PREFIX):
            self._watch(op, key, argument, tag)
            return PENDING
        call_for = keyspace.for_client[op]
        if call_for is not None:
            result = call_for(self, tag, key, argument)
        elif op == wire.CANCEL:
            result = int(keyspace.cancel(self, argument))
        elif op == wire.PING:
            result = argument
        elif op == wire.HEARTBEAT:
            # That something came is what counts; there is nothing to answer.
            return PENDING
        elif op == wire.GRANT_LEASE:
            name = secrets.token_bytes(16)
            result = keyspace.grant_lease(self, tag, name, argument, server.now())
        elif op == wire.RESUME_LEASE:
            result = int(keyspace.leases.resume(self, tag, key, server.now()))
        elif op == wire.AUTH:
            raise Refusal("this store asks for no token")
        else:
            raise Refusal("not in the tagged dialect")
        server.rearm()
        return result

    def _watch(self, op: int, key: bytes, seen: int, tag: int) -> None:
        keyspace = self._server.keyspace
        begin = keyspace.watch_prefix if op == wire.WATCH_PREFIX else keyspace.watch_key
        view = begin(self, tag, key, seen)
        self._out.append(tagged(tag, replies.NEWS, replies.encode_view(view)))
        if not view.is_whole:
            for change in keyspace.watches.since(self, tag, seen):
                self._out.append(tagged(tag, replies.NEWS, replies.encode_change(change)))

    def _greet(self, version: int) -> None:
        if self._is_tagged or version != wire.VERSION:
            raise WireError(f"greeted with version {version}")
        self._is_tagged = True
        self._nonce = secrets.token_bytes(16)
        greeting = Greeting(self._server.instance, self._nonce, self._server.needs_token)
        self._out.append(ENCODER_OF[wire.HELLO](greeting))

    # Hooks of the keyspace.

    def on_woken(self, tag: Any) -> None:
        self._push(tagged(tag, replies.DONE, b"\0") if self._is_tagged else b"\0")

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.GET_WHEN_SET](values)))

    def on_item(self, tag: Any, item: bytes) -> None:
        self._push(tagged(tag, replies.DONE, ENCODER_OF[wire.POP_WHEN_PUSHED](item)))

    def on_change(self, tag: Any, change: RawChange) -> None:
        self._push(tagged(tag, replies.NEWS, replies.encode_change(change)))

    def on_lease_ended(self, tag: Any) -> None:
        self._push(tagged(tag, replies.NEWS, b""))

    def _push(self, reply: bytes) -> None:
        if not self._is_gone:
            self._out.append(reply)
            self._server.touched.append(self)

    # The connection.

    def _flush(self) -> bool:
        """Write what is to be said; tell whether the peer can take more."""
        if self._transport.is_closing():
            # uvloop raises RuntimeError where asyncio would drop it silently.
            self._out.clear()
        elif self._out:
            was_paused = self._is_paused
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            self._transport.write(data)
            if was_paused and self._transport.get_write_buffer_size() > self._server.limits.unsent:
                self.drop("does not read its news")
        return not self._cannot_go_on()

    flush = _flush

    def _hold(self, size: int) -> None:
        """Account for the bytes of an unfinished request."""
        if self._server.account(size - self._held):
            self._held = size
        else:
            self.drop("sent part of a request while too much is unfinished")

    def _arm(self, seconds: float, reason: str) -> None:
        served = self._served
        self._timer = self._server.loop.call_later(seconds, self._overdue, seconds, reason, served)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self, seconds: float, reason: str, served: int) -> None:
        if self._served != served and not self._is_paused and not self._is_opening:
            # Another request than the one for which the time was set is unfinished.
            self._arm(seconds, reason)
        else:
            self.drop(reason)

    def drop(self, reason: str, *, is_polite: bool = False) -> None:
        """Close this connection at once and report it once; `is_polite`: after the last reply."""
        if self._is_gone:
            return
        self._is_gone = True
        self._out.clear()
        self._backlog.clear()
        self._disarm()
        peer = shown_endpoint(self._transport.get_extra_info("peername"))
        if is_polite:
            self._transport.close()
        else:
            self._transport.abort()
        self._server.report(Dropped(peer, reason))

    def close(self) -> None:
        """Close the connection after the last replies."""
        self._is_gone = True
        self._disarm()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection now."""
        self._transport.abort()
