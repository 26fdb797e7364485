"""The common part of the clients of engines: settings, leases, retention, and the end."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Never, Self

from elastic_aio import aio
from elastic_aio.engines.link import EngineAccess, EngineLink
from elastic_aio.errors import StoreClosed, StoreError
from elastic_aio.spec.checks import check_number, checked_text
from elastic_aio.spec.rendezvous import parse_endpoints
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import replies, wire
from elastic_aio.store.base import FedWatch, HeldLease, check_timeout
from elastic_aio.store.engine import EngineStore

RENEWALS: Final = 3
"""Times that a lease is renewed in its time to live."""

_CLOSE_TIMEOUT: Final = 1.0


class EngineClient(EngineStore):
    """The part of a client that does not depend on the engine."""

    _port: int
    """The port of an endpoint without one."""

    _link: EngineLink[Any]

    def __init__(
        self,
        endpoints: str,
        *,
        key_prefix: str = "/elastic_aio",
        user: str | None = None,
        password: str | None = None,
        tls: TlsSpec | None = None,
        timeout: float = 30.0,
        wait_timeout: float = 300.0,
        lost_after: float = 60.0,
        retention: float | None = None,
        retained: str = "",
    ) -> None:
        """Configure a client; nothing is connected yet.

        Args:
            endpoints: the servers, `host:port` or `host` (etcd: port 2379, Redis: port 6379),
                separated by commas.  Servers of Redis are tried in their order.
            key_prefix: precedes every key at the engine; at Redis `retained` follows it, and
                together they are the hash tag of the keys.
            user, password: the user of the engine; None for none.
            tls: connect over TLS; `ca` verifies the servers, `cert` and `key` are this client's.
            timeout: seconds to wait, on entering, for a server that answers.
            wait_timeout: the default `timeout` of `get`, `wait`, `multi_get` and `queue_pop`.
            lost_after: seconds without an answer after which the store is lost for good.
            retention: seconds after which the engine removes the keys that this client has set, if
                no client with the same `retained` renews them; None keeps them for ever.
            retained: names the keys that are kept together, of a job for example.

        Raises:
            SpecError: an argument is invalid.
            StoreTimeout: on entering; no server answered in time.
            StoreRefused: on entering; the engine refuses the user, or cannot be used.
        """
        super().__init__(wait_timeout)
        check_timeout(timeout)
        check_number("lost_after", lost_after, above=0)
        if retention is not None:
            check_number("retention", retention, above=0)
        self._connect_timeout = timeout
        self._retention = retention
        self._retained = retained
        self._leases: dict[HeldLease, None] = {}
        self._watches: dict[FedWatch, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        members = parse_endpoints("endpoints", endpoints, self._port)
        access = EngineAccess(members, user, password, tls, lost_after)
        self._prepare(access, checked_text("key_prefix", key_prefix))

    @abc.abstractmethod
    def _prepare(self, access: EngineAccess, key_prefix: str) -> None:
        """Create the link, which calls `_on_link_ended`, and all else of the engine."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.endpoint}, {self._link.error or 'open'}>"

    async def __aenter__(self) -> Self:
        aio.running_loop()
        try:
            await self.open(self._connect_timeout)
        except BaseException:  # a cancellation too: no connection stays open
            await self.aclose()
            raise
        return self

    async def open(self, timeout: float) -> None:
        if self._keeper is not None:
            raise StoreClosed("a store is opened once")
        await self._enter(asyncio.get_running_loop().time() + timeout)
        self._keeper = aio.create_task(self._keep_alive(), f"leases at {self.endpoint}")

    @abc.abstractmethod
    async def _enter(self, deadline: float) -> None:
        """Make a first request, until `deadline` (of the loop), and renew the retention."""

    @property
    def endpoint(self) -> str:
        return self._link.endpoint

    @property
    def local_address(self) -> str:
        return self._link.local_address

    @property
    def last_received_at(self) -> float:
        return self._link.last_received_at

    # --------------------------------------------------------------------- requests

    async def call(self, op: int, key: bytes, argument: Any) -> Any:
        self._check_open()
        match op:
            case wire.GET_WHEN_SET:
                values = await self._wait(argument, with_queues=False)
                return [values[name] for name in argument]
            case wire.WAIT:
                await self._wait(argument, with_queues=True)
                return replies.READY
            case wire.POP_WHEN_PUSHED:
                return await self._pop(key)
        return await self._request(op, key, argument)

    def _check_open(self) -> None:
        self._link.check()
        if self._keeper is None:
            name = type(self).__name__
            raise StoreClosed(f"the store is not open: use `async with {name}(...)`")

    @abc.abstractmethod
    async def _request(self, op: int, key: bytes, argument: Any) -> Any:
        """Carry out a request that waits for nothing."""

    @abc.abstractmethod
    async def _wait(self, keys: Sequence[bytes], *, with_queues: bool) -> dict[bytes, bytes]:
        """Wait until each key has been set once; return the values."""

    @abc.abstractmethod
    async def _pop(self, key: bytes) -> bytes:
        """Pop an item, by `_take`, as soon as there is one."""

    @abc.abstractmethod
    async def _push_front(self, key: bytes, item: bytes) -> None:
        """Return an item to the front of its queue."""

    async def _take(self, key: bytes) -> tuple[int, bytes]:
        """Pop an item if there is one; a cancellation returns it."""
        taking = aio.create_task(self._request(wire.QUEUE_POP, key, None))
        try:
            length, item = await asyncio.shield(taking)
        except asyncio.CancelledError:
            await aio.run_shielded(lambda: self._return_item(key, taking))
            raise
        return length, item

    async def _return_item(self, key: bytes, taking: asyncio.Task[tuple[int, bytes]]) -> None:
        with contextlib.suppress(StoreError):
            length, item = await taking
            if length:
                await self._push_front(key, item)

    # ----------------------------------------------------------------------- leases

    def _on_granted(self, lease: HeldLease, lease_id: bytes) -> None:
        lease.lease_id = lease_id
        self._leases[lease] = None
        self._wake.set()

    def _on_lease_ended(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        lease.end()

    async def _keep_alive(self) -> None:
        """Renew the leases and the retention when they are due."""
        try:
            while True:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._renew_at()):
                        await self._wake.wait()
                        continue
                await self._renew()
        except StoreError as error:
            self._link.fail(error)

    @abc.abstractmethod
    def _renew_at(self) -> float | None:
        """Return when `_renew` is due, by the loop's clock; None: not before `_wake` is set."""

    @abc.abstractmethod
    async def _renew(self) -> None:
        """Renew the leases, and the retention if that is due."""

    async def _release(self, lease: HeldLease) -> None:
        self._leases.pop(lease, None)
        if lease.is_alive:
            await self._end(lease)

    @abc.abstractmethod
    async def _end(self, lease: HeldLease) -> None:
        """End a lease of this client, so that its keys count as deleted."""

    # ---------------------------------------------------------------------- watches

    async def _open_watch(self, watch: FedWatch) -> None:
        self._check_open()
        opened = asyncio.get_running_loop().create_future()
        self._watches[watch] = aio.create_task(self._serve_watch(watch, opened), f"{watch!r}")
        try:
            await opened
        except BaseException:  # a cancellation too
            self._close_watch(watch)
            raise

    async def _serve_watch(self, watch: FedWatch, opened: asyncio.Future[None]) -> None:
        try:
            await self._follow(watch, lambda: aio.set_result_if_pending(opened, None))
        except StoreError as error:
            watch.fail(error)
            if not opened.done():
                opened.set_exception(error)

    @abc.abstractmethod
    async def _follow(self, watch: FedWatch, on_open: Callable[[], None]) -> Never:
        """Feed a watch with the present values, call `on_open`, and feed it with the changes."""

    def _close_watch(self, watch: FedWatch) -> None:
        following = self._watches.pop(watch, None)
        if following is not None:
            following.cancel()

    # ---------------------------------------------------------------------- the end

    def _on_link_ended(self, error: StoreError) -> None:
        for lease in list(self._leases):
            self._on_lease_ended(lease)
        self._end_watches(error)

    @abc.abstractmethod
    def _end_watches(self, error: StoreError) -> None:
        """Let the watches fail, after the changes that have been received."""

    async def aclose(self) -> None:
        """Close this client; its leases end, pending operations raise StoreClosed.  Idempotent.

        Cancellation: raised when the connections are closed, after a second or two at most.
        """
        await aio.run_shielded(self._close)

    async def _close(self) -> None:
        if self._link.error is None and self._keeper is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await asyncio.gather(*self._last_requests(), return_exceptions=True)
        self._link.fail(StoreClosed("the store was closed"))
        tasks = [*self._watches.values(), *([self._keeper] if self._keeper else [])]
        self._watches.clear()
        await self._link.aclose()
        if tasks:
            await aio.cancel_and_wait(tasks)

    @abc.abstractmethod
    def _last_requests(self) -> list[Coroutine[Any, Any, Any]]:
        """Return the requests that end the leases, and begin the retention."""
