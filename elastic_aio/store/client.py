"""The store's client: any number of tasks share one connection, which is reopened.

A broken connection is opened again with growing, jittered delays.  Pending reads and waits are sent
again.  Pending changes raise `StoreLost`, since it is unknown whether the server has made them.
Watches continue after the last change received.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, Self

from elastic_aio import aio
from elastic_aio.errors import StoreClosed, StoreError, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.spec.checks import check_number, checked_token, parse_host_port
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import wire
from elastic_aio.store.base import MIN_TTL, FedWatch, HeldLease, Store, check_timeout
from elastic_aio.store.link import (
    PLAIN_PEER,
    Link,
    LinkLost,
    LinkOptions,
    TaggedLink,
    client_context,
    open_link,
)

_READS: Final = frozenset(
    {wire.CHECK, wire.GET, wire.GET_WHEN_SET, wire.LIST_KEYS, wire.MULTI_GET}
    | {wire.NUM_KEYS, wire.PEEK, wire.PING, wire.QUEUE_LEN, wire.WAIT}
)
"""Requests that change nothing, so that they can be sent again."""

_ATTEMPT_TIMEOUT: Final = 5.0
_CLOSE_TIMEOUT: Final = 1.0
_HEARTBEAT_SHARE: Final = 0.43
"""Interval of heartbeats per timeout: two fit, and the reply to the second one."""

_RETRY: Final = Backoff(initial=0.05, factor=2.0, cap=2.0)


class RemoteStore(Store):
    """A client of the store at an endpoint; use it with `async with`."""

    def __init__(
        self,
        endpoint: str,
        *,
        timeout: float = 30.0,
        wait_timeout: float = 300.0,
        reply_timeout: float = 30.0,
        reconnect_for: float = 60.0,
        peer_timeout: float = 10.0,
        min_ttl: float = MIN_TTL,
        token: str | None = None,
        tls: TlsSpec | None = None,
        ping_interval: float = 0.0,
        survive_server_restart: bool = True,
    ) -> None:
        """Configure a client; nothing is connected yet.

        Args:
            endpoint: `host:port` or `[ipv6]:port`.
            timeout: seconds to wait, on entering, for a server that does not listen yet.
            wait_timeout: the default `timeout` of `get`, `wait`, `multi_get` and `queue_pop`.
            reply_timeout: seconds to wait for a reply before the connection is broken off.
            reconnect_for: seconds to try to reconnect after the connection broke; then the store is
                lost for good.  0: do not try; `math.inf`: without limit.
            peer_timeout: seconds without a packet from the server's host before the same.
            min_ttl: seconds; the shortest `ttl` that `lease` accepts.  Heartbeats are at least half
                of it apart.
            token: the server's token, if it has one.
            tls: connect over TLS; `ca` verifies the server, `cert` and `key` are this client's, if
                the server requires a certificate.
            ping_interval: seconds between two pings of an idle server of this package, so that its
                suspension, in which its kernel keeps the connection, is detected within
                `reply_timeout`.  0: no pings.
            survive_server_restart: reconnect to a new server at the endpoint, which has none of the
                keys; False: the store is then lost for good.

        Raises:
            SpecError: an argument is invalid.
            StoreTimeout: on entering; no server answered in time.
            StoreRefused: on entering; the peer is not a store, has another token, or does not
                accept this client over TLS, or this client the peer.
        """
        super().__init__(wait_timeout, min_ttl)
        host, port = parse_host_port("endpoint", endpoint)
        check_timeout(timeout)
        check_timeout(reconnect_for)
        check_number("reply_timeout", reply_timeout, above=0)
        check_number("peer_timeout", peer_timeout, above=0)
        check_number("ping_interval", ping_interval, at_least=0)
        self._options = LinkOptions(
            host,
            port,
            checked_token(token),
            reply_timeout,
            peer_timeout,
            ping_interval,
            client_context(tls),
        )
        self._connect_timeout = timeout
        self._reconnect_for = reconnect_for
        self._survive_server_restart = survive_server_restart
        self._link: Link | None = None
        self._last_received_at = self._last_reply_at = 0.0
        # Why the store cannot be used any more.
        self._error: StoreError | None = None
        self._link_changed = aio.Notifier()
        self._lost: asyncio.Future[None] | None = None
        """Done when the store is lost for good or closed; None before there is a connection."""
        self._keeper: asyncio.Task[None] | None = None
        """Reopens the connection."""
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._leases: dict[HeldLease, None] = {}
        self._watches: dict[FedWatch, None] = {}

    def __repr__(self) -> str:
        state = "connected" if self._link else "not connected"
        return f"<store at {self._address}, {self._error or state}>"

    @property
    def _address(self) -> str:
        return f"{self._options.host}:{self._options.port}"

    async def __aenter__(self) -> Self:
        aio.running_loop()
        self._check_unused()
        self._begin(await self._open(self._connect_timeout))
        return self

    async def connect_over(self, sock: socket.socket) -> None:
        """Connect over `sock`, a TCP connection to the server, instead of entering.

        The only attempt, which the caller bounds in time.  The store owns the socket, also if this
        fails.

        Cancellation: closes the socket.

        Raises:
            StoreLost: the peer closed the connection, or has not answered.
            StoreRefused: the peer is not a store, or has another token.
        """
        if self._lost is not None:
            sock.close()
        self._check_unused()
        try:
            link = await open_link(self._options, sock)
        except (OSError, LinkLost) as error:
            raise StoreLost(str(error)) from None
        self._begin(link)

    def _check_unused(self) -> None:
        if self._lost is not None:
            raise StoreClosed("a store is connected once; call connect() again")

    def _begin(self, link: Link) -> None:
        self._lost = asyncio.get_running_loop().create_future()
        self._use(link)
        self._schedule_heartbeat()

    @property
    def has_extensions(self) -> bool:
        """Whether the peer is a server of this package, with leases and watches."""
        return isinstance(self._link, TaggedLink)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None

    @property
    def instance(self) -> bytes:
        """The id of the running server; empty if not connected to one of this package."""
        return self._link.instance if self._link else b""

    @property
    def last_received_at(self) -> float:
        """When the server last sent something, in the loop's seconds; 0: never."""
        return self._last_received_at if self._link is None else self._link.last_received_at

    @property
    def last_reply_at(self) -> float:
        """When the server last answered, in the loop's seconds; 0: never.

        Unlike `last_received_at`, neither the end of a connection counts nor a reply after a long
        silence, which may be read late.
        """
        return self._last_reply_at if self._link is None else self._link.last_reply_at

    async def wait_lost(self) -> str:
        """Wait until this store is lost for good or closed; return the reason.

        Cancellation: has no effect on the store.
        """
        if self._lost is not None:
            await asyncio.wait([self._lost])
        return str(self._error or "the store is not connected")

    async def ping(self) -> float:
        """Return the round-trip time of a request, in seconds."""
        begin = time.perf_counter()
        await self.call(wire.PING, b"", 1)
        return time.perf_counter() - begin

    async def aclose(self) -> None:
        """Close the connection; leases end, pending operations raise StoreClosed.

        Cancellation: raised when the connection is closed, within a second.
        """
        if self._lost is not None and not isinstance(self._error, StoreClosed):
            await aio.run_shielded(self._close)

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        instance: bytes | None = None
        for attempt in itertools.count():
            link = self._link
            if link is None:
                link = await self._wait_connected()
            if instance is not None and link.instance != instance:
                raise StoreLost("the store was replaced by another; its keys are gone")
            try:
                return await link.call(op, key, argument)
            except LinkLost as error:
                lost = self._lost_with(link, error)
                if op not in _READS or lost is self._error:
                    raise lost from None
                instance = link.instance
                if self._link is link:
                    # A plain server refused the additional connection that a wait uses.
                    await asyncio.sleep(_RETRY.delay(attempt, random.random))

    async def change_all(self, op: int, requests: Sequence[tuple[bytes, Any]]) -> None:
        link = await self._tagged_link()
        try:
            await link.change_all(op, requests)
        except LinkLost as error:
            raise self._lost_with(link, error) from None

    def _lost_with(self, link: Link, error: LinkLost) -> StoreError:
        """Return the error of a change that has got no reply before the end of `link`."""
        if self._error is not None:
            return self._error
        if link.is_over:
            self._drop_link(link)
        return StoreLost(f"{error}; the change may have been made or not")

    # Leases and watches.

    async def _grant(self, lease: HeldLease) -> None:
        link = await self._tagged_link()
        try:
            lease.lease_id = await link.lease(wire.GRANT_LEASE, lease)
        except LinkLost as error:
            raise self._error or StoreLost(str(error)) from None
        self._leases[lease] = None
        self._schedule_heartbeat()

    async def _release(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        self._schedule_heartbeat()
        link = self._link
        if isinstance(link, TaggedLink) and lease.is_alive:
            link.unlease(lease)
            await self.call(wire.RELEASE_LEASE, lease.lease_id, None)

    async def _open_watch(self, watch: FedWatch) -> None:
        while True:
            link = await self._tagged_link()
            try:
                await link.watch(watch)
            except LinkLost as error:
                if self._error is not None:
                    raise self._error from error
                self._drop_link(link)
            except BaseException:  # a cancellation too: the watch has no reader
                link.unwatch(watch)
                raise
            else:
                # Not earlier: `_resume` takes the watches that are listed here.
                self._watches[watch] = None
                return

    def _close_watch(self, watch: FedWatch) -> None:
        self._watches.pop(watch, None)
        if isinstance(self._link, TaggedLink):
            self._link.unwatch(watch)

    async def _tagged_link(self) -> TaggedLink:
        link = self._link or await self._wait_connected()
        if not isinstance(link, TaggedLink):
            raise StoreRefused(PLAIN_PEER)
        return link

    def _schedule_heartbeat(self) -> None:
        """Set the timer of the next heartbeat, if there is a lease or the peer is pinged."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
            self._heartbeat_timer = None
        intervals = [max(self._min_ttl / 2, lease.ttl * _HEARTBEAT_SHARE) for lease in self._leases]
        if self._options.ping_interval:
            intervals.append(self._options.ping_interval)
        if intervals and self._error is None:
            interval, loop = min(intervals), asyncio.get_running_loop()
            self._heartbeat_timer = loop.call_later(interval, self._send_heartbeat)

    def _send_heartbeat(self) -> None:
        if isinstance(self._link, TaggedLink):
            if self._options.ping_interval:
                self._link.ping()
            else:
                self._link.heartbeat()
        self._schedule_heartbeat()

    # The connection.

    def _drop_link(self, link: Link) -> None:
        # The connection has just ended; `_reconnect` runs in a later loop iteration.
        if self._link is link:
            self._link = None

    async def _wait_connected(self) -> Link:
        while self._link is None:
            if self._error is not None:
                raise self._error
            if self._lost is None:
                raise StoreClosed("the store is not connected: use `async with connect(...)`")
            await self._link_changed.wait()
        return self._link

    def _use(self, link: Link) -> None:
        self._link = link
        self._link_changed.notify_all()
        link.ended.add_done_callback(lambda _: self._on_ended(link))

    def _on_ended(self, link: Link) -> None:
        if not isinstance(self._error, StoreClosed):
            # Its pending operations see first that this connection has ended.
            self._keeper = aio.create_task(self._reconnect(link), f"store {self._address}")

    async def _reconnect(self, former: Link) -> None:
        """Reopen the connection, unless that fails for too long."""
        reason = former.ended.result()
        self._link = None
        self._note_times(former)
        if self._reconnect_for == 0:
            self._finish(StoreLost(reason))
            return
        try:
            link = await self._reopen(former.instance)
        except StoreError as error:
            self._finish(StoreLost(f"{reason}; then: {error}"))
        except Exception as error:  # a defect of this package
            self._finish(StoreLost(f"internal error: {error!r}"))
            raise
        else:
            self._use(link)

    def _note_times(self, link: Link) -> None:
        self._last_received_at, self._last_reply_at = link.last_received_at, link.last_reply_at

    async def _reopen(self, former_instance: bytes) -> Link:
        """Open a connection and resume the leases and watches on it."""
        end = asyncio.get_running_loop().time() + self._reconnect_for
        for lease in [lease for lease in self._leases if not lease.linger]:
            # The server has ended it together with the connection.
            lease.end()
            del self._leases[lease]
        while True:
            link = await self._open(max(0.0, end - asyncio.get_running_loop().time()))
            is_same_server = link.instance == former_instance
            try:
                if not is_same_server and not self._survive_server_restart:
                    raise StoreLost("another server has taken its place")
                await self._resume(link, is_same_server=is_same_server)
            except LinkLost:
                continue
            except BaseException:  # a cancellation too: the connection has no other owner
                link.fail("reconnecting was given up")
                raise
            return link

    async def _resume(self, link: Link, *, is_same_server: bool) -> None:
        for lease in list(self._leases):
            is_alive = (
                is_same_server
                and isinstance(link, TaggedLink)
                and await link.lease(wire.RESUME_LEASE, lease)
            )
            if not is_alive:
                lease.end()
                self._leases.pop(lease, None)
        for watch in list(self._watches):
            if not isinstance(link, TaggedLink):
                watch.fail(StoreLost(PLAIN_PEER))
                continue
            if not is_same_server:
                watch.revision = -1
            try:
                await link.watch(watch)
            except StoreRefused as error:
                watch.fail(error)

    async def _open(self, timeout: float) -> Link:
        """Try to connect until an attempt succeeds; StoreRefused: none will."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        attempt = 0
        reason = "no time to try"
        while True:
            left = end - loop.time()
            try:
                async with asyncio.timeout(max(0.0, min(left, _ATTEMPT_TIMEOUT))):
                    return await open_link(self._options)
            except TimeoutError as error:
                # The socket's ETIMEDOUT is a TimeoutError too, and has a text.  An attempt that
                # the end cuts short says less than the one before it.
                if attempt == 0 or left >= _ATTEMPT_TIMEOUT or str(error):
                    reason = str(error) or "no answer"
            except ConnectionRefusedError:
                reason = "connection refused"
            except (OSError, LinkLost) as error:
                reason = str(error)
            delay = _RETRY.delay(attempt, random.random)
            attempt += 1
            if loop.time() + delay >= end:
                seconds = f"{round(timeout, 2):g} s"
                raise StoreTimeout(f"no store at {self._address} within {seconds}: {reason}")
            # A poll: there is no notification of a program that begins to listen.
            await asyncio.sleep(delay)

    def _finish(self, error: StoreError) -> None:
        """Make the store unusable: every operation raises `error` from now on."""
        if self._error is None:
            self._error = error
        if self._link is not None:
            self._note_times(self._link)
        self._link = None
        if self._lost is not None:
            aio.set_result_if_pending(self._lost, None)
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        for lease in self._leases:
            lease.end()
        self._leases.clear()
        for watch in self._watches:
            watch.fail(self._error)
        self._link_changed.notify_all()

    async def _close(self) -> None:
        link, keeper = self._link, self._keeper
        self._error = None
        self._finish(StoreClosed("the store was closed"))
        if keeper is not None:
            await aio.cancel_and_wait([keeper])
        if link is not None and not link.ended.done():
            link.close()
            await asyncio.wait([link.ended], timeout=_CLOSE_TIMEOUT)
            link.fail("the store was closed")


connect = RemoteStore  # a verb reads better after `async with`
