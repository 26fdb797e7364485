"""Monitors endpoints: which of them has a store, and if none, what answers there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.aio import create_task, run_shielded
from elastic_aio.discovery.addresses import resolve
from elastic_aio.discovery.choice import FENCE, RECONNECT_FOR, EndpointState
from elastic_aio.discovery.keys import claim_store, read_end, read_run, run_store
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.errors import StoreError, StoreRefused
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import RemoteStore, connect
from elastic_aio.store.sockets import Address, format_endpoint
from elastic_aio.text import one_line

_CONNECT_TIMEOUT: Final = 2.0
"""Seconds for a connection: the kernel repeats a lost SYN after one second (tcp(7))."""

_REPLY_TIMEOUT: Final = 8.0
"""Seconds for the answers of a store that has accepted the connection: one at which thousands
of nodes arrive at once must not have to begin anew with each of them."""

_SILENT_AFTER: Final = 2.0
"""Seconds of an attempt after which an endpoint counts as one without a store."""

_SILENT: Final = "it accepts connections, but does not answer"

_RESOLVE_TIMEOUT: Final = 1.0
"""Seconds for the addresses of a host."""

_ADDRESS_AGE_MAX: Final = 1.0
"""Seconds for which resolved addresses are used again."""

_ADDRESSES_MAX: Final = 16
_REASON_MAX: Final = 200
_RETRY: Final = Backoff(initial=0.05, factor=1.3, cap=1.0)

_RETRY_REFUSED: Final = Backoff(initial=1.0, factor=1.5, cap=5.0)
"""The same for a store that refuses this node: another job's, or one with another token."""

_REASONS: Final = {
    errno.ECONNREFUSED: "connection refused",
    errno.ENETUNREACH: "no route to it",
    errno.EHOSTUNREACH: "no route to it",
    errno.ENETDOWN: "no route to it",
    errno.EADDRNOTAVAIL: "no route to it",
    errno.ETIMEDOUT: "does not answer",
}


class Endpoint(Struct, frozen=True):
    """One endpoint of the list."""

    index: int
    text: str
    host: str
    port: int

    @classmethod
    def parse(cls, index: int, text: str) -> Endpoint:
        """Parse `HOST:PORT` or `[IPV6]:PORT`; a server may use port 0, a client not.

        Raises:
            SpecError: it is neither.
        """
        return cls(index, text, *parse_host_port("endpoint", text, at_least=0))


class StoreHandshake(Struct, frozen=True):
    """A connected store.

    `local_address` is the address of this host on that connection; `has_run` is whether
    the run of the `Dialer` is active there, if there is a choice of endpoints.
    """

    store: RemoteStore
    local_address: str
    has_run: bool


class StoreNotFound(Exception):
    """There is no usable store; the message says why, in one line.

    `was_accepted`: a program accepted the connection.  `is_refusal`: it, or this node, refuses
    the other: by a token or a certificate, or it is no store.
    """

    def __init__(self, why: str, *, was_accepted: bool = False, is_refusal: bool = False) -> None:
        """Sanitize `why`: a part of it may come from the program that answered."""
        super().__init__(one_line(why, _REASON_MAX))
        self.was_accepted = was_accepted
        self.is_refusal = is_refusal


class Dialer:
    """Connects a node of a run to stores.

    With `is_exclusive` each store is made the run's own.  One that belongs to another run is
    refused; by the first node, also one that another node serves.
    """

    def __init__(
        self,
        spec: RendezvousSpec,
        run_id: str,
        network: StoreNetwork,
        *,
        is_exclusive: bool = False,
    ) -> None:
        """Prepare; `network` makes the sockets."""
        self.run_id = run_id
        self.network = network
        self._is_exclusive = is_exclusive
        self._spec = spec
        self._has_choice = len(spec.endpoints) > 1

    @property
    def reply_timeout(self) -> float:
        """Seconds without an answer after which a connection is given up."""
        return self._spec.heartbeat_timeout - RECONNECT_FOR - FENCE

    async def dial(self, host: str, addresses: Sequence[Address]) -> StoreHandshake:
        """Return the first store that answers at one of the `addresses` of `host`.

        It has 2 s to accept a connection, and then 8 s, or `reply_timeout` if less.

        All addresses are dialled at once, so that one that drops packets delays no other.
        The caller closes the store.

        Cancellation: leaves nothing open.

        Raises:
            StoreNotFound: no store answers.
        """
        if not addresses:
            raise StoreNotFound("its name has no address")
        # The certificate must have the name of the host.
        tls = None if self._spec.tls is None else self._spec.tls.for_host(host)
        tasks = [create_task(self._handshake(one, tls)) for one in addresses[:_ADDRESSES_MAX]]
        try:
            best = await _first_handshake(tasks)
            await run_shielded(lambda: _discard(tasks, best))
        except BaseException:  # a cancellation too: no connection stays open
            await run_shielded(lambda: _discard(tasks, None))
            raise
        return best

    async def _handshake(self, address: Address, tls: TlsSpec | None) -> StoreHandshake:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                sock = await self.network.dial(address)
        except OSError as error:
            number = errno.ETIMEDOUT if isinstance(error, TimeoutError) else error.errno
            reason = _REASONS.get(number or 0) or error.strerror or str(error)
            raise StoreNotFound(reason) from None
        local_address = str(sock.getsockname()[0])
        store = connect(
            format_endpoint(address[1]),
            reply_timeout=self.reply_timeout,
            reconnect_for=RECONNECT_FOR,
            peer_timeout=self._spec.heartbeat_timeout,
            token=self._spec.token,
            tls=tls,
            ping_when_idle=True,
            survive_server_restart=False,
        )
        try:
            async with asyncio.timeout(min(_REPLY_TIMEOUT, self.reply_timeout)):
                await store.connect_over(sock)
                if not store.has_extensions:
                    why = "it is a plain TCPStore, which has no leases"
                    raise StoreNotFound(why, was_accepted=True)
                has_run = self._has_choice and await _has_active_run(store, self.run_id)
                if self._is_exclusive:
                    await self._claim(store)
        except BaseException as error:  # a cancellation too: no connection stays open
            await store.aclose()
            if isinstance(error, TimeoutError):
                raise StoreNotFound(_SILENT, was_accepted=True) from None
            if isinstance(error, StoreError):
                is_refusal = isinstance(error, StoreRefused)
                raise StoreNotFound(str(error), was_accepted=True, is_refusal=is_refusal) from None
            raise
        return StoreHandshake(store, local_address, has_run)

    async def _claim(self, store: RemoteStore) -> None:
        owner = await claim_store(store, self.run_id)
        if owner.run_id != self.run_id:
            why = f"it belongs to the run {owner.run_id!r}"
            raise StoreNotFound(why, was_accepted=True)
        if self._spec.is_host and owner.is_node:
            why = f"another node of rank 0 serves the run {owner.run_id!r} there"
            raise StoreNotFound(why, was_accepted=True)


async def _first_handshake(tasks: Sequence[asyncio.Task[StoreHandshake]]) -> StoreHandshake:
    errors: list[StoreNotFound] = []
    for finished in asyncio.as_completed(tasks):
        try:
            return await finished
        except StoreNotFound as error:
            errors.append(error)
    # Prefer the error of an address that accepted the connection.
    raise max(errors, key=lambda one: (one.was_accepted, one.is_refusal))


async def _discard(
    tasks: Sequence[asyncio.Task[StoreHandshake]], kept: StoreHandshake | None
) -> None:
    """Cancel unfinished handshakes, and close all stores but `kept`."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if task.cancelled() or task.exception() is not None or task.result() is kept:
            continue
        await task.result().store.aclose()


async def _has_active_run(store: RemoteStore, run_id: str) -> bool:
    """Return whether a coordinator leads the run there."""
    record = await read_run(store, run_id)
    if record is None:
        return False
    generation = run_store(store, run_id, record)
    leader, end = await asyncio.gather(generation.peek("coordinator"), read_end(generation))
    return leader is not None and end is None


class EndpointMonitor:
    """Dials one endpoint repeatedly until there is a store.

    Must be closed.
    """

    def __init__(self, endpoint: Endpoint, dialer: Dialer, on_change: Callable[[], None]) -> None:
        """Begin; `on_change` is called when `state` has changed."""
        self.endpoint = endpoint
        self.addresses: tuple[Address, ...] = ()
        self.own_addresses: tuple[Address, ...] = ()
        """Those of `addresses` that belong to this host."""
        self.state = EndpointState.UNKNOWN
        self.reason = "does not answer"
        """Why there is no store."""
        self.is_refused = False
        """Whether that is a refusal, which trying again soon does not change."""
        self.turn = math.inf
        """Seconds of a search after which this node may serve it."""
        self.bind_error = ""
        """Why this node could not serve it when it tried last."""
        self._handshake: StoreHandshake | None = None
        self._dialer = dialer
        self._on_change = on_change
        self._retry = asyncio.Event()
        self._resolved_at = 0.0
        self._task = create_task(self._run(), f"monitor of {endpoint.text}")
        self._task.add_done_callback(lambda _: on_change())

    def __repr__(self) -> str:
        return f"<EndpointMonitor {self.endpoint.text}: {self.state.name}, {self.reason}>"

    def check(self) -> None:
        """Raise the error of the monitor's task, which only a defect of this package causes."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    def retry_now(self) -> None:
        """Dial now instead of after the back-off."""
        self._retry.set()

    async def take(self) -> StoreHandshake:
        """Stop, and hand over the store; the caller closes it."""
        await self._stop()
        handshake, self._handshake = self._handshake, None
        assert handshake is not None, self
        return handshake

    async def aclose(self) -> None:
        """Stop, and close the store that was not taken.

        Idempotent; safe to call again after cancellation.
        """
        await self._stop()
        if self._handshake is not None:
            await self._handshake.store.aclose()

    async def _stop(self) -> None:
        self._task.cancel()
        if not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        for attempt in itertools.count():
            self._retry.clear()
            await self._resolve()
            if self.endpoint.port == 0:
                self._set_no_store("port 0 is known only to the node that serves it")
                return
            if self.addresses:
                await self._dial()
            # There is no notification of a server that begins to listen.
            with contextlib.suppress(TimeoutError):
                retry = _RETRY_REFUSED if self.is_refused else _RETRY
                async with asyncio.timeout(retry.delay(attempt, random.random)):
                    await self._retry.wait()

    async def _dial(self) -> None:
        # The attempt goes on: its answer may be on the way.
        silent = asyncio.get_running_loop().call_later(_SILENT_AFTER, self._set_no_store, _SILENT)
        try:
            self._handshake = await self._dialer.dial(self.endpoint.host, self.addresses)
        except StoreNotFound as error:
            self._set_no_store(str(error), is_refused=error.is_refusal)
            return
        finally:
            silent.cancel()
        has_run = self._handshake.has_run
        self.state = EndpointState.ACTIVE_RUN if has_run else EndpointState.STORE
        self._on_change()
        why = await self._handshake.store.wait_lost()
        self._handshake = None
        self._set_no_store(why)

    def _set_no_store(self, why: str, *, is_refused: bool = False) -> None:
        self.state, self.reason = EndpointState.NO_STORE, why
        self.is_refused = is_refused
        self._on_change()

    async def _resolve(self) -> None:
        """Resolve the host's name, unless that was done just now."""
        loop = asyncio.get_running_loop()
        if self.addresses and loop.time() - self._resolved_at < _ADDRESS_AGE_MAX:
            return
        why = "its name is still being resolved"
        late = loop.call_later(_RESOLVE_TIMEOUT, self._set_no_store, why)
        try:
            self.addresses = await resolve(self.endpoint.host, self.endpoint.port)
        except OSError as error:
            # The previous addresses may still be valid.
            self._set_no_store(f"its name is unknown: {error.strerror or error}")
        finally:
            late.cancel()
        self.own_addresses = tuple(filter(self._dialer.network.is_local, self.addresses))
        self._resolved_at = loop.time()
