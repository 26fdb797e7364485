"""One connection of the store's server: its replies, deadlines and end.

The counterpart of the client's `link`.  A reply is queued by `_append` and sent by
`flush`, once for many requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from elastic_aio.sockets import format_endpoint
from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.limits import Dropped, ServerLimits
from elastic_aio.store.replies import Pieces
from elastic_aio.store.reply_queue import Buffers, ReplyQueue
from elastic_aio.store.wire import Request

FLUSH_SIZE: Final = 1 << 20
"""Bytes of replies that are written before the next request is served."""


class ConnectionServer(Protocol):
    """The interface of the server to its connections."""

    loop: asyncio.AbstractEventLoop
    limits: ServerLimits
    keyspace: Keyspace
    instance: bytes
    buffers: Buffers
    _token: str | None
    _known_hosts: set[str] | None
    _handlers: list[Callable[[bytes, Any], Any] | None]
    _dirty: list[ServerLink]
    _postponed: list[Callable[[], None]]
    _on_drop: Callable[[Dropped], None] | None

    def _now(self) -> float: ...
    def _admit(self, connection: Any) -> bool: ...
    def _forget(self, connection: Any) -> None: ...
    def _admit_host(self, host: str) -> None: ...
    def _answer_proof(self, message: bytes, nonce: bytes | None) -> bytes | None: ...
    def _check_buffers(self) -> None: ...
    def _flush(self) -> None: ...
    def _rearm(self) -> None: ...


class ServerLink(asyncio.Protocol):
    """Base of a server's connection, with or without TLS; subclasses read and serve requests."""

    _transport: asyncio.Transport

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__()
        self._server = server
        self._out: list[bytes] = []
        self._out_size = 0
        # Notifications that follow the reply which is built in parts; None: none is built.
        self._later: list[bytes] | None = None
        self._uses_queue = False
        self._queue = ReplyQueue(server.buffers)
        # The rest of the requests that are being served.
        self._requests: Iterator[Request] = iter(())
        # Requests that were received before reading was paused.
        self._backlog: list[Request] = []
        self.is_in_handshake = True
        """Whether it has not sent its opening over TLS if there is TLS, and its token if one."""
        self._is_paused = self._is_held = self._is_reading_keys = False
        self._is_postponed = False
        self.is_gone = False
        self._batches_served = 0
        self._accounted = 0
        self._timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        self._is_paused = self._uses_queue = True
        self._backlog.extend(self._requests)
        if not self.is_gone and not self._transport.is_closing():
            self._transport.pause_reading()
            if not self.is_in_handshake:  # which has a deadline of its own
                self._cancel_deadline()
                self._set_deadline(self._server.limits.stall_timeout, "does not read its replies")

    def resume_writing(self) -> None:
        self._is_paused = False
        if not self.is_gone:
            if not self.is_in_handshake:
                self._cancel_deadline()
            # Not now: the transport may be in the middle of a write.
            self._server.loop.call_soon(self._resume)

    def tls_failed(self, reason: str) -> None:
        self.drop(reason, is_graceful=True)

    def postpone(self) -> None:
        """End the present batch of requests; serve the rest after other connections."""
        self._backlog.extend(self._requests)
        if not self._is_postponed and not self.is_gone:
            self._is_postponed = True
            self._transport.pause_reading()
            self._server._postponed.append(self.proceed)

    def proceed(self) -> None:
        """Serve the rest of a batch that was postponed."""
        self._is_postponed = False
        self._resume()

    def _resume(self) -> None:
        raise NotImplementedError

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
        if units := len(reply) >> 11:  # what is copied; the length of `Pieces` is small
            self._server.keyspace.work.spend(units)
        if self._later is not None:
            self._later += [reply] if isinstance(reply, bytes) else reply
        else:
            if not self._out_size:
                self._server._dirty.append(self)
            self._out_size += self._append(reply)
            if self._out_size >= FLUSH_SIZE:
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
        has_unread = queue.size > self._server.limits.unsent
        queue.extend(self._out)
        self._out.clear()
        if has_unread and self._out_size:
            self.drop("does not read its notifications")
            return
        queue.write_to(self._transport, lambda: self._is_paused)
        self._uses_queue = self._is_paused or queue.size > 0
        if queue.size:
            self._server._check_buffers()

    @property
    def held(self) -> float:
        """The bytes that the server holds for this connection."""
        return self._accounted + self._queue.weight()

    def _account_partial(self, size: int) -> None:
        """Account for the bytes of an unfinished request."""
        self._server.buffers.size += size - self._accounted
        self._accounted = size
        if size:
            self._server._check_buffers()

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
        if self._batches_served != served and not self._is_paused and not self.is_in_handshake:
            # The unfinished request is a later one than when the deadline was set.
            self._set_deadline(seconds, reason)
        else:
            self.drop(reason)

    def drop(self, reason: str, *, is_graceful: bool = False, is_refusal: bool = False) -> None:
        """Close this connection and report it; idempotent.

        Args:
            reason: what the peer did, for `Dropped`.
            is_graceful: send the pending replies first.
            is_refusal: as in `Dropped`.
        """
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
        if self._server._on_drop is not None:
            self._server._on_drop(Dropped(peer, reason, is_refusal))

    def _discard(self) -> None:
        """Serve this connection no more; free what is held for it."""
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
        """Close the connection now."""
        self._transport.abort()
