"""One connection to a store: what both dialects have in common.

A link does not reconnect; its owner does.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from elastic_aio.store import wire

__all__ = ["WITH_COUNT", "Link", "LinkLost", "refuse"]

WITH_COUNT: Final = frozenset({wire.GET_WHEN_SET, wire.MULTI_GET})
"""Requests whose replies can only be read by who knows how many keys were asked for."""

_AWAY: Final = 0.5
"""A timer this late (seconds) means that we were stopped ourselves, not the peer."""


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
        self._silent_since = 0.0
        self._beat_every = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.instance = b""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Done when the connection has ended, with the reason."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def hand_over(self, other: Link) -> None:
        """Let `other` use the connection from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.set_protocol(other)
        other.connection_made(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done() and not isinstance(error, TimeoutError):
            self._hear()  # its kernel has spoken
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
        if self._transport.is_closing():
            # uvloop raises RuntimeError where asyncio would drop it silently.
            raise LinkLost("the connection is about to end")
        if self._unsent:
            self._unsent.append(frame)
        elif self._is_crowded:
            self._unsent.append(frame)
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(frame)

    def _flush(self) -> None:
        if self._unsent and not self.ended.done() and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    async def _writable(self) -> None:
        """Wait until the peer takes more."""
        while self._can_write is not None:
            await asyncio.shield(self._can_write)

    @property
    def heard_at(self) -> float:
        """When something last came from the peer, or was first awaited, in loop seconds."""
        return self._silent_since

    def _hear(self) -> None:
        """Note that something has come from the peer."""
        self._silent_since = self._loop.time()

    def _owe(self) -> None:
        """Count a reply that is due, and see to it that its absence is noticed."""
        if not self._owed:
            # Nothing was due for a while, so silence meant nothing.  Where beats are
            # answered, it did: the last of them was.
            now = self._loop.time()
            self._silent_since = max(self._silent_since, now - self._beat_every)
        self._owed += 1
        if self._timer is None:
            self._look_at(self._silent_since + self._reply_timeout)

    def _look_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._look, when)

    def _look(self, due: float) -> None:
        self._timer = None
        if not self._owed:
            return
        now = self._loop.time()
        if now - due > _AWAY:
            # What the peer has sent meanwhile is still in the socket.
            self._silent_since = now
        end = self._silent_since + self._reply_timeout
        # Timers are exact to a millisecond.
        if end - now < 0.002:
            self.fail(f"no answer for {self._reply_timeout:g} s")
        else:
            self._look_at(end)


def refuse(future: asyncio.Future[Any], error: Exception) -> None:
    """Answer with an error, if anybody still waits for an answer."""
    if not future.done():
        future.set_exception(error)
        # Seen: whoever asked may have gone, and that is no mistake.
        future.exception()
