"""The store's client: any number of tasks over one connection that comes back.

A connection that breaks is opened again with growing, jittered delays.  Questions
and waits under way are asked again; what may have changed something raises
`StoreLost`, because nobody knows whether it has.  Watches go on where they were.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from types import TracebackType
from typing import Any, Final, Self

from elastic_aio.aio import owned_task, see_through
from elastic_aio.backoff import Backoff
from elastic_aio.checks import check_number
from elastic_aio.errors import StoreClosed, StoreError, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.store import wire
from elastic_aio.store.link import LinkLost
from elastic_aio.store.listen import parse_endpoint
from elastic_aio.store.opening import open_link
from elastic_aio.store.plainlink import PlainLink
from elastic_aio.store.requesting import HeldLease, RequestStore, WatchView, check_timeout
from elastic_aio.store.taggedlink import TaggedLink

__all__ = ["RemoteStore", "connect"]

_QUESTIONS: Final = frozenset(
    {
        wire.CHECK,
        wire.GET,
        wire.GET_WHEN_SET,
        wire.LIST_KEYS,
        wire.MULTI_GET,
        wire.NUM_KEYS,
        wire.PEEK,
        wire.PING,
        wire.QUEUE_LEN,
        wire.WAIT,
    }
)
"""What can be asked twice without harm."""

_ATTEMPT_TIMEOUT: Final = 5.0
_CLOSE_TIMEOUT: Final = 1.0
_MIN_BEAT: Final = 1.0
_BEAT_SHARE: Final = 0.43
"""Of the time that silence may last: two beats, and room for an answer to the second."""

_RETRY: Final = Backoff(initial=0.05, factor=2.0, cap=2.0)

_PLAIN_PEER: Final = "the peer is a plain TCPStore server: no leases and no watches"


def connect(
    endpoint: str,
    *,
    timeout: float = 30.0,
    wait_timeout: float = 300.0,
    reply_timeout: float = 30.0,
    reconnect_for: float = 60.0,
    silence: float = 10.0,
    token: str | None = None,
    is_watchful: bool = False,
    outlives_server: bool = True,
) -> RemoteStore:
    """Return the client of the store at `endpoint`, to be used with `async with`.

    Args:
        endpoint: `host:port` or `[ipv6]:port`.
        timeout: seconds to wait, on entering, for a server that is not there yet.
        wait_timeout: seconds that `get`, `wait`, `multi_get` and `queue_pop` last at
            most unless they say otherwise; `math.inf` for ever.
        reply_timeout: seconds without a reply, where one is due, after which the
            connection counts as broken.
        reconnect_for: seconds to try to connect again after the connection broke;
            then the store is lost for good.  0: do not try; `math.inf`: for ever.
        silence: seconds without a sign of the peer's kernel after which the
            connection counts as broken.
        token: the server's token, if it has one.
        is_watchful: ask our own server for a sign of life so often, while nothing else
            is asked, that its silence is noticed within `reply_timeout`: a stopped
            process keeps its connections.
        outlives_server: go on when another server, without the keys of the former, has
            taken its place; otherwise the store is lost for good then.

    Raises:
        SpecError: an argument is unusable.
        StoreTimeout: on entering; nobody answered in time.
        StoreRefused: on entering; the peer is no store, or wants another token.
    """
    host, port = parse_endpoint(endpoint)
    check_timeout(timeout)
    check_timeout(reconnect_for)
    check_number("reply_timeout", reply_timeout, above=0)
    check_number("silence", silence, above=0)
    opening = {"token": token, "reply_timeout": reply_timeout, "silence": silence}
    return RemoteStore(
        host,
        port,
        wait_timeout,
        timeout,
        reconnect_for,
        opening,
        is_watchful=is_watchful,
        outlives_server=outlives_server,
    )


class RemoteStore(RequestStore):
    """A client of a store; made by `connect`."""

    def __init__(
        self,
        host: str,
        port: int,
        wait_timeout: float,
        timeout: float,
        reconnect_for: float,
        opening: dict[str, Any],
        *,
        is_watchful: bool = False,
        outlives_server: bool = True,
    ) -> None:
        """See `connect`."""
        super().__init__(wait_timeout)
        self._host = host
        self._port = port
        self._first_timeout = timeout
        self._reconnect_for = reconnect_for
        self._opening = opening
        self._is_watchful = is_watchful
        self._outlives_server = outlives_server
        self._link: PlainLink | TaggedLink | None = None
        self._heard_at = 0.0
        self._over: StoreError | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._leases: dict[HeldLease, None] = {}
        self._views: dict[WatchView, None] = {}

    def __repr__(self) -> str:
        state = "connected" if self._link else "not connected"
        return f"<store at {self._host}:{self._port}, {self._over or state}>"

    async def __aenter__(self) -> Self:
        self._check_fresh()
        self._begin(await self._open(self._first_timeout))
        return self

    async def connect_over(self, sock: socket.socket) -> None:
        """Connect over `sock`, a TCP connection to the server, instead of by entering.

        There is one attempt, which the caller bounds in time.  The socket is the
        store's from now on, whatever becomes of it.  Cancelling closes it.

        Raises:
            StoreLost: the peer closed the connection, or has not answered.
            StoreRefused: the peer is no store, or wants another token.
        """
        try:
            self._check_fresh()
        except StoreClosed:
            sock.close()
            raise
        try:
            link = await open_link(self._host, self._port, sock=sock, **self._opening)
        except LinkLost as error:
            raise StoreLost(str(error)) from None
        self._begin(link)

    def _check_fresh(self) -> None:
        if self._keeper is not None:
            raise StoreClosed("a store is connected once; call connect() again")

    def _begin(self, link: PlainLink | TaggedLink) -> None:
        self._link = link
        self._keeper = owned_task(self._keep_connected(link), f"store {self._host}:{self._port}")
        self._schedule_beat()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def has_extensions(self) -> bool:
        """Whether the peer is our own server, with leases and watches."""
        return isinstance(self._link, TaggedLink)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._link is not None

    @property
    def instance(self) -> bytes:
        """The name of the running server; empty without a connection to one of ours."""
        return self._link.instance if self._link else b""

    @property
    def heard_at(self) -> float:
        """When the server was last heard of, in the loop's seconds; 0: never."""
        return self._heard_at if self._link is None else self._link.heard_at

    async def wait_lost(self) -> str:
        """Wait until this store is of no use any more; return why.

        It was lost for good, or closed.  Cancelling changes nothing.
        """
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
        return str(self._over or "the store is not connected")

    async def ping(self) -> float:
        """Return the seconds that a question and its answer take."""
        begin = time.perf_counter()
        await self.call(wire.PING, b"", 1)
        return time.perf_counter() - begin

    async def aclose(self) -> None:
        """Close the connection; leases end, operations under way raise StoreClosed.

        It takes a second at most; a cancellation is raised afterwards.
        """
        if self._keeper is not None and not isinstance(self._over, StoreClosed):
            await see_through(self._close)

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        instance: bytes | None = None
        while True:
            link = self._link
            if link is None:
                link = await self._connected()
            if instance is not None and link.instance != instance:
                raise StoreLost("the store was replaced by another; its keys are gone")
            try:
                return await link.call(op, key, argument)
            except LinkLost as error:
                if self._over is not None:
                    raise self._over from None
                if op not in _QUESTIONS:
                    raise StoreLost(f"{error}; the change may have been made or not") from None
                instance = link.instance
                if self._link is link:
                    # It has just ended; the keeper will know in the next turn.
                    self._link = None

    # Leases and watches.

    async def grant(self, lease: HeldLease) -> None:
        link = await self._tagged()
        try:
            lease.name = await link.lease(wire.GRANT_LEASE, lease)
        except LinkLost as error:
            raise self._over or StoreLost(str(error)) from None
        self._leases[lease] = None
        self._schedule_beat()

    async def release(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        self._schedule_beat()
        link = self._link
        if isinstance(link, TaggedLink) and lease.is_alive:
            link.unlease(lease)
            await self.call(wire.RELEASE_LEASE, lease.name, None)

    async def open_watch(self, view: WatchView) -> None:
        while True:
            link = await self._tagged()
            try:
                await link.watch(view)
            except LinkLost as error:
                if self._over is not None:
                    raise self._over from error
                if self._link is link:
                    self._link = None
            except BaseException:  # a cancellation too: nobody will read the watch
                link.unwatch(view)
                raise
            else:
                # Only now: the keeper takes over what is listed here.
                self._views[view] = None
                return

    def close_watch(self, view: WatchView) -> None:
        self._views.pop(view, None)
        if isinstance(self._link, TaggedLink):
            self._link.unwatch(view)

    async def _tagged(self) -> TaggedLink:
        link = self._link or await self._connected()
        if not isinstance(link, TaggedLink):
            raise StoreRefused(_PLAIN_PEER)
        return link

    def _schedule_beat(self) -> None:
        """Set the time of the next beat, if there is a lease or the peer is watched."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        times = [lease.ttl for lease in self._leases]
        if self._is_watchful:
            times.append(self._opening["reply_timeout"])
        if times and self._over is None:
            every = max(_MIN_BEAT, min(times) * _BEAT_SHARE)
            loop = asyncio.get_running_loop()
            self._beat = loop.call_later(every, self._on_beat, every)

    def _on_beat(self, every: float) -> None:
        if isinstance(self._link, TaggedLink):
            if self._is_watchful:
                self._link.beat(every)
            else:
                self._link.heartbeat()
        self._schedule_beat()

    # The connection.

    async def _connected(self) -> PlainLink | TaggedLink:
        """Wait for a connection."""
        while self._link is None:
            if self._over is not None:
                raise self._over
            if self._keeper is None:
                raise StoreClosed("the store is not connected: use `async with connect(...)`")
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self._link

    async def _keep_connected(self, link: PlainLink | TaggedLink) -> None:
        """Open the connection again whenever it ends, until that fails for too long."""
        while True:
            reason = await asyncio.shield(link.ended)
            self._link = None
            self._heard_at = link.heard_at
            former = link.instance
            if self._reconnect_for == 0:
                self._finish(StoreLost(reason))
                return
            try:
                link = await self._open_again(former)
            except StoreError as error:
                self._finish(StoreLost(f"{reason}; then: {error}"))
                return
            self._link = link
            self._wake()

    async def _open_again(self, former: bytes) -> PlainLink | TaggedLink:
        """Open a connection and take leases and watches over to it."""
        end = asyncio.get_running_loop().time() + self._reconnect_for
        for lease in [lease for lease in self._leases if not lease.linger]:
            # The server has ended it together with the connection.
            lease.end()
            del self._leases[lease]
        while True:
            left = end - asyncio.get_running_loop().time()
            link = await self._open(max(0.0, left))
            is_same = link.instance == former
            try:
                if not is_same and not self._outlives_server:
                    raise StoreLost("another server has taken its place")
                await self._take_over(link, is_same=is_same)
            except LinkLost:
                continue
            except BaseException:  # a cancellation too: nobody else has the connection
                link.fail("given up")
                raise
            return link

    async def _take_over(self, link: PlainLink | TaggedLink, *, is_same: bool) -> None:
        for lease in list(self._leases):
            is_alive = (
                is_same
                and isinstance(link, TaggedLink)
                and await link.lease(wire.RESUME_LEASE, lease)
            )
            if not is_alive:
                lease.end()
                self._leases.pop(lease, None)
        for view in list(self._views):
            if not isinstance(link, TaggedLink):
                view.fail(StoreLost(_PLAIN_PEER))
                continue
            if not is_same:
                view.revision = -1
            try:
                await link.watch(view)
            except StoreRefused as error:
                view.fail(error)

    async def _open(self, timeout: float) -> PlainLink | TaggedLink:
        """Try to connect until it succeeds.

        Raises:
            StoreTimeout: it has not within `timeout` seconds.
            StoreRefused: it never will.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        attempt = 0
        reason = "no time to try"
        while True:
            left = end - loop.time()
            try:
                async with asyncio.timeout(max(0.0, min(left, _ATTEMPT_TIMEOUT))):
                    return await open_link(self._host, self._port, **self._opening)
            except TimeoutError as error:
                # ETIMEDOUT of the socket is one, too, and has a text.
                reason = str(error) or "no answer"
            except (OSError, LinkLost) as error:
                reason = str(error)
            delay = _RETRY.delay(attempt, random.random)
            attempt += 1
            if loop.time() + delay >= end:
                where = f"{self._host}:{self._port}"
                raise StoreTimeout(f"no store at {where} within {round(timeout, 2):g} s: {reason}")
            # The only pause: nothing tells when somebody begins to listen.
            await asyncio.sleep(delay)

    def _finish(self, error: StoreError) -> None:
        """Nothing works from now on."""
        if self._over is None:
            self._over = error
        self._link = None
        if self._beat is not None:
            self._beat.cancel()
        for lease in self._leases:
            lease.end()
        self._leases.clear()
        for view in self._views:
            view.fail(self._over)
        self._wake()

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def _close(self) -> None:
        link, keeper = self._link, self._keeper
        assert keeper is not None
        self._over = None
        self._finish(StoreClosed("the store was closed"))
        keeper.cancel()
        await asyncio.wait([keeper])
        if link is not None and not link.ended.done():
            link.close()
            await asyncio.wait([link.ended], timeout=_CLOSE_TIMEOUT)
            link.fail("the store was closed")
