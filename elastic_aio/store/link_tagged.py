"""One connection in our tagged dialect, shared by requests, waits, watches and leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from elastic_aio.aio import set_result_if_pending
from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.handles import Lease, Watch
from elastic_aio.store.link import WITH_COUNT, Link, LinkLost, fail_if_pending
from elastic_aio.store.replies import TaggedReader
from elastic_aio.store.wire import WireError, encode

_WAITS: Final = frozenset({wire.WAIT, wire.GET_WHEN_SET, wire.POP_WHEN_PUSHED})
_TAG_MAX: Final = (1 << 32) - 1


class _PendingRequest(Struct):
    """A request that was sent and has no reply yet."""

    op: int
    key: bytes
    argument: Any
    future: asyncio.Future[Any]


class TaggedLink(Link):
    """A connection in our tagged dialect."""

    def __init__(self, reply_timeout: float, instance: bytes, ping_interval: float) -> None:
        """Prepare a link to `instance`, on which `ping` is called each `ping_interval` seconds.

        0: `ping` is not called.
        """
        super().__init__(reply_timeout)
        self.instance = instance
        self._ping_interval = ping_interval
        self._is_reading_late = False
        self._reader = TaggedReader()
        self._last_tag = 0
        self._pending: dict[int, _PendingRequest] = {}
        self._listeners: dict[int, Watch | Lease] = {}
        self._watch_tags: dict[Watch, int] = {}

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

        A notification and the end of a wait do not: they can still arrive when no request
        reaches the peer any more, and the peer is about to end the leases of this connection.
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
        if isinstance(listener, Lease):
            del self._listeners[tag]
            listener._end()
            return
        # The first message is also the reply to the request that opened the watch.
        request = self._pending.pop(tag, None)
        if request is not None:
            self._on_sign_of_life()
            self._replies_due -= 1
        if listener is not None:
            listener._feed(replies.decode_notification(payload))
        if request is not None:
            set_result_if_pending(request.future, None)

    def _fail_all(self, error: LinkLost) -> None:
        pending, self._pending = self._pending, {}
        self._listeners.clear()
        for request in pending.values():
            fail_if_pending(request.future, LinkLost(str(error)))

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request.

        Cancellation: withdraws a wait; an item popped meanwhile is put back.

        Raises:
            LinkLost: the connection has ended; a change may have been made.
            StoreRefused: the server refuses the request.
        """
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
        """Carry out the changes `op` with these keys and arguments; return after the last.

        Raises:
            LinkLost, StoreRefused: as for `call`.
        """
        while self._is_write_paused:
            await self._write_resumed.wait()
        await asyncio.gather(*[self._request(op, *request)[1] for request in requests])

    async def watch(self, watch: Watch) -> None:
        """Feed `watch` from now on; return when it has got its snapshot.

        Raises:
            LinkLost, StoreRefused: as for `call`.
        """
        tag, future = self._request(watch.op, watch.key, watch.revision)
        self._listeners[tag] = watch
        self._watch_tags[watch] = tag
        await future

    def unwatch(self, watch: Watch) -> None:
        """Stop feeding `watch`."""
        tag = self._watch_tags.pop(watch, None)
        if tag is not None and self._listeners.pop(tag, None) is not None:
            self._post(wire.CANCEL, b"", tag)

    async def lease(self, op: int, lease: Lease) -> Any:
        """Grant or resume `lease`, by the opcode `op`; return the result of the request.

        Raises:
            LinkLost, StoreRefused: as for `call`.
        """
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

    def unlease(self, lease: Lease) -> None:
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

        The kernel of a suspended server still acknowledges data; only a reply proves
        that the server runs.
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
