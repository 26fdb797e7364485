"""The messages that Redis publishes, on one connection for all watches and waits of a store.

Redis does not keep messages.  So each listener is notified when its channels are subscribed, at the
beginning and after every broken connection; it then reads the keys anew.  A message after that is a
change after the subscription, so no change is lost.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.engines.redis.connection import RedisConnection, pack
from elastic_aio.engines.redis.link import RedisLink
from elastic_aio.errors import StoreError

Channel = tuple[bool, bytes]
"""Whether it is a pattern, and the name."""


class Message(NamedTuple):
    """A published change; `ttl` is the time to live of the key's lease in ms, 0 for none."""

    channel: bytes
    kind: int
    revision: int
    ttl: int
    value: bytes


class ChannelListener:
    """The messages of some channels; made by `RedisFeed.listen`."""

    def __init__(self, channels: Iterable[Channel]) -> None:
        """Wait for the subscription of `channels`."""
        self.channels = frozenset(channels)
        self.pending = set(self.channels)
        self.queue: asyncio.Queue[Message | StoreError | None] = asyncio.Queue()

    async def get(self) -> Message | None:
        """Return the next message; None when all channels have been subscribed anew.

        Cancellation: loses no message.  Raises `StoreError` when the store is lost or closed.
        """
        message = await self.queue.get()
        if isinstance(message, StoreError):
            self.queue.put_nowait(message)
            raise message
        return message


class WatchPages:
    """The present pairs of a watch, read in pages, each at a revision of its own."""

    def __init__(self) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []
        self._last_keys: list[bytes] = []
        self._revisions: list[int] = []

    @property
    def revision(self) -> int:
        """The revision of the last page."""
        return self._revisions[-1] if self._revisions else -1

    def add(self, found: Sequence[bytes], revision: int) -> None:
        self.pairs += zip(found[::2], found[1::2], strict=True)
        self._last_keys.append(self.pairs[-1][0] if self.pairs else b"")
        self._revisions.append(revision)

    def revision_of(self, key: bytes) -> int:
        """Return the revision at which the page was read that has, or would have, a key."""
        page = bisect.bisect_left(self._last_keys, key)
        return self._revisions[min(page, len(self._revisions) - 1)] if self._revisions else -1


class RedisFeed:
    """The subscriptions of a store; there is no connection before the first listener."""

    def __init__(self, link: RedisLink, silence: float) -> None:
        """Begin without a listener.

        A connection without a message for `silence` seconds is replaced; call `ping` more often.
        """
        self._link = link
        self._silence = silence
        self._listeners: dict[Channel, set[ChannelListener]] = {}
        self._connection: RedisConnection | None = None
        self._running: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def listen(self, channels: Iterable[Channel]) -> Iterator[ChannelListener]:
        """Listen to channels; the first message is None."""
        listener = ChannelListener(channels)
        for channel in listener.channels:
            self._listeners.setdefault(channel, set()).add(listener)
        if self._link.error is not None:
            listener.queue.put_nowait(self._link.error)
        elif self._running is None:
            self._running = create_task(self._run(), f"messages of {self._link.endpoint}")
        elif self._connection is not None:
            self._send(_commands(listener.channels, b"SUBSCRIBE"))
        try:
            yield listener
        finally:
            unused = []
            for channel in listener.channels:
                others = self._listeners[channel]
                others.discard(listener)
                if not others:
                    del self._listeners[channel]
                    unused.append(channel)
            if self._connection is not None:
                self._send(_commands(unused, b"UNSUBSCRIBE"))

    def ping(self) -> None:
        """Ask for a sign of the server."""
        if self._connection is not None:
            self._send([(b"PING",)])

    def fail(self, error: StoreError) -> None:
        for listener in {one for others in self._listeners.values() for one in others}:
            listener.queue.put_nowait(error)

    async def aclose(self) -> None:
        if self._running is not None:
            await cancel_and_wait([self._running])

    async def _run(self) -> None:
        # An error of the link has been given to the listeners.
        with contextlib.suppress(StoreError):
            try:
                await self._link.keep_connected(self._serve)
            except StoreError as error:
                self._link.fail(error)

    async def _serve(self, connection: RedisConnection) -> None:
        self._connection = connection
        for channel, listeners in self._listeners.items():
            for listener in listeners:
                listener.pending.add(channel)
        self._send(_commands(self._listeners, b"SUBSCRIBE"))
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._silence) as limit:

                def on_message(reply: object) -> None:
                    if self._connection is connection and not limit.expired():
                        limit.reschedule(loop.time() + self._silence)
                        self._on_reply(reply)

                limit.reschedule(loop.time() + self._silence)
                await connection.listen(on_message)
        finally:
            self._connection = None

    def _send(self, commands: Iterable[tuple[bytes, ...]]) -> None:
        assert self._connection is not None
        for command in commands:
            self._connection.send(pack(*command))

    def _on_reply(self, reply: object) -> None:
        if not isinstance(reply, list):
            return
        match reply:
            case [b"subscribe" | b"psubscribe" as verb, bytes(name), *_]:
                channel = (verb == b"psubscribe", name)
                for listener in self._listeners.get(channel, ()):
                    if channel in listener.pending:
                        listener.pending.discard(channel)
                        if not listener.pending:
                            listener.queue.put_nowait(None)
            case [b"message", bytes(name), bytes(text)]:
                self._publish((False, name), name, text)
            case [b"pmessage", bytes(pattern), bytes(name), bytes(text)]:
                self._publish((True, pattern), name, text)

    def _publish(self, channel: Channel, name: bytes, text: bytes) -> None:
        kind, revision, ttl, value = text.split(b" ", 3)
        message = Message(name, int(kind), int(revision), int(ttl), value)
        for listener in self._listeners.get(channel, ()):
            listener.queue.put_nowait(message)


_AT_ONCE: Final = 500
"""Channels in one command."""


def _commands(channels: Iterable[Channel], verb: bytes) -> Iterator[tuple[bytes, ...]]:
    for is_pattern in (False, True):
        names = [name for flag, name in channels if flag == is_pattern]
        for first in range(0, len(names), _AT_ONCE):
            command = b"P" + verb if is_pattern else verb
            yield (command, *names[first : first + _AT_ONCE])


def escape(text: bytes) -> bytes:
    """Return the pattern that matches only `text`."""
    return re.sub(rb"[*?\[\]\\^-]", rb"\\\g<0>", text)
