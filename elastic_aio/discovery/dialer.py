"""Connects to the store at an endpoint, and says why that cannot be used."""

from __future__ import annotations

import asyncio
import copy
import errno
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.aio import create_task, run_shielded
from elastic_aio.discovery.choice import FENCE, RECONNECT_FOR
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.discovery.runs import claim_store, job_to_join
from elastic_aio.errors import StoreError, StoreRefused
from elastic_aio.sockets import Address, format_endpoint
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import RemoteStore, connect
from elastic_aio.text import one_line

_CONNECT_TIMEOUT: Final = 2.0
"""Seconds for a connection: the kernel repeats a lost SYN after one second (tcp(7))."""

_REPLY_TIMEOUT: Final = 8.0
"""Seconds for the answers of a store that has accepted the connection: one at which thousands
of nodes arrive at once must not have to begin anew with each of them."""

_PING_SHARES: Final = (0.1, 0.2)
_PING_INTERVAL_MIN: Final = 2.0

SILENT: Final = "it accepts connections, but does not answer"

_ADDRESSES_MAX: Final = 16
_REASON_MAX: Final = 200
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
        """Parse `HOST:PORT` or `[IPV6]:PORT`; a server may use port 0, a client not."""
        return cls(index, text, *parse_host_port("endpoint", text, at_least=0))


class StoreHandshake(Struct, frozen=True):
    """A connected store.

    `local_address` is the address of this host on that connection; `job` is that which this
    node should go to there, if there is a choice of endpoints, and empty if there is none.
    """

    store: RemoteStore
    local_address: str
    job: str


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
        self._job, self._with_round, self._any_end = "", False, True
        self._spec = spec
        self._has_choice = len(spec.endpoints) > 1

    def seeking(self, job: str, *, with_round: bool = False, any_end: bool = True) -> Dialer:
        """Return a dialer for a node of `job`; see `job_to_join`."""
        dialer = copy.copy(self)
        dialer._job, dialer._with_round, dialer._any_end = job, with_round, any_end
        return dialer

    @property
    def reply_timeout(self) -> float:
        """Seconds without an answer after which a connection is given up."""
        return self._spec.heartbeat_timeout - RECONNECT_FOR - FENCE

    @property
    def _ping_interval(self) -> float:
        """Seconds between two pings of an idle store.

        A node that hears nothing for half of `heartbeat_timeout` stops its workers.  The store
        may pause for what these seconds leave of that: 1.5 s of 5, and 12 s of 30.
        """
        least, most = (share * self._spec.heartbeat_timeout for share in _PING_SHARES)
        return min(most, max(least, _PING_INTERVAL_MIN))

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
        if len(addresses) == 1:
            return await self._handshake(addresses[0], tls)
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
            ping_interval=self._ping_interval,
            survive_server_restart=False,
        )
        try:
            async with asyncio.timeout(min(_REPLY_TIMEOUT, self.reply_timeout)):
                await store.connect_over(sock)
                if not store.has_extensions:
                    why = "it is a plain TCPStore, which has no leases"
                    raise StoreNotFound(why, was_accepted=True)
                job = ""
                if self._has_choice:
                    job = await job_to_join(
                        store,
                        self.run_id,
                        self._job,
                        with_round=self._with_round,
                        any_end=self._any_end,
                    )
                if self._is_exclusive:
                    is_first_node = bool(self._spec.is_host)
                    why = await claim_store(store, self.run_id, is_first_node=is_first_node)
                    if why:
                        raise StoreNotFound(why, was_accepted=True)
        except BaseException as error:  # a cancellation too: no connection stays open
            await store.aclose()
            if isinstance(error, TimeoutError):
                raise StoreNotFound(SILENT, was_accepted=True) from None
            if isinstance(error, StoreError):
                is_refusal = isinstance(error, StoreRefused)
                raise StoreNotFound(str(error), was_accepted=True, is_refusal=is_refusal) from None
            raise
        return StoreHandshake(store, local_address, job)


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
