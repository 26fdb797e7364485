"""One connection of the store's client: what both dialects have in common.

A link does not reconnect; `RemoteStore` opens another one.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from elastic_aio.aio import Notifier
from elastic_aio.sockets import discard_unsent, limit_read_size
from elastic_aio.store import wire

WITH_COUNT: Final = frozenset({wire.GET_WHEN_SET, wire.MULTI_GET})
"""Requests whose reply can only be parsed with the number of keys of the request."""

_SUSPENDED_AFTER: Final = 0.5
"""A timer this late, in seconds, shows that this process was suspended (SIGSTOP, a paused
virtual machine): it cannot have received what its peers have sent meanwhile."""

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
        # Replies that the peer owes now; that of a pending wait is not counted.
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

    def _fail_all(self, error: LinkLost) -> None:
        raise NotImplementedError

    def _send(self, frame: bytes) -> None:
        """Send a frame: at once if one task uses the link, else with those of other tasks."""
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
        """Send a frame with those that follow in this iteration of the loop."""
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

        A peer that is pinged owed a reply at most an interval ago, or this process was
        suspended since.  It gets little time: it counts what it has received, and ends the
        leases of this connection.
        """
        now = self._loop.time()
        if self._ping_interval:
            self._ends_after = now + min(_AFTER_SUSPENSION, self._reply_timeout)
        else:
            self.last_received_at = now

    def _is_late(self) -> bool:
        """Whether what arrives now is later than the reply to a ping.

        This process was suspended, or the network was cut and has held it back.
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
    """Set the exception of `future` unless it is done."""
    if not future.done():
        future.set_exception(error)
        # Mark it as retrieved: the waiter may have been cancelled, which is no bug.
        future.exception()
