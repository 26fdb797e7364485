"""The store at which the workers of one attempt meet, and the ports of those stores.

torch's workers find each other through it (MASTER_ADDR, MASTER_PORT, with
TORCHELASTIC_USE_AGENT_STORE=True).  Each attempt gets a new store, which holds no keys of an
attempt that failed.  Its port is bound before it is announced; so no other process can take it
before a worker connects.  The server is imported and started on the first connection: jobs without
torch do not pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.aio import cancel_and_wait, create_task, run_in_thread
from elastic_aio.errors import HostError, StoreError
from elastic_aio.sockets import Acceptor, bind_listeners, port_owner, without_idna
from elastic_aio.spec.checks import format_host_port
from elastic_aio.spec.job import LaunchSpec

if TYPE_CHECKING:
    from elastic_aio.store.limits import Dropped
    from elastic_aio.store.server import StoreServer

MASTER_ADDR = "127.0.0.1"
"""Address at which the workers of a single-node job meet: no other host can reach it."""

_REFUSALS_MAX = 8
_PEER_TIMEOUT_S = 60.0
_INTRODUCTION_S = 60.0  # for another node to bind the port of the workers' store


class WorkerStore:
    """A listening socket that becomes a store on the first connection; must be closed."""

    def __init__(
        self,
        port: int,
        host: str | None = MASTER_ADDR,
        token: str | None = None,
        on_drop: Callable[[Dropped], None] | None = None,
    ) -> None:
        """Bind `port`, 0 for a free one, at an address of this host, or raise HostError.

        Without a `host` these are all addresses, IPv4 and IPv6.  With a `token` the store serves
        only this host, and hosts from which an agent has proved the token: torch's clients cannot
        present one.  `on_drop` is as for `StoreServer`.
        """
        self._on_drop = on_drop
        self._token = token
        sockets = bind_listeners(host, port, _PEER_TIMEOUT_S)
        self.port: int = sockets[0].getsockname()[1]
        self._server: StoreServer | None = None
        self._acceptor = Acceptor(sockets, self._on_first_connection)
        try:
            self._acceptor.start()
        except OSError as error:  # another process bound the port too, and listened first
            raise HostError(f"cannot listen on port {self.port}: {error.strerror}") from None

    def __repr__(self) -> str:
        return f"<WorkerStore on port {self.port}: {self._server or 'no connection yet'}>"

    async def aclose(self) -> None:
        """Close all connections and free the port, within about a second.  Idempotent."""
        if self._server is None:
            self._acceptor.close()
        else:
            await self._server.aclose()

    def _on_first_connection(self, connection: socket.socket) -> None:
        from elastic_aio.store.server import StoreServer

        self._server = StoreServer(
            listening=self._acceptor.release(),
            token=self._token,
            admit_hosts=self._token is not None,
            on_drop=self._on_drop,
        )
        self._server.serve()
        self._server.open(connection)


async def bind_store(
    port: int,
    host: str | None = MASTER_ADDR,
    token: str | None = None,
    on_drop: Callable[[Dropped], None] | None = None,
) -> WorkerStore:
    """Return a store at `port`, or raise HostError with the process that has it, if known."""
    try:
        return WorkerStore(port, host, token, on_drop)
    except HostError as error:
        owner = await run_in_thread(port_owner, port)
        if not owner:
            raise
        raise HostError(f"{error}; it is taken by {owner}") from None


class HeldPort:
    """A free port that is bound here and left to a worker; must be closed."""

    # It does not listen, so a server that sets SO_REUSEADDR can bind the port too, as torch's
    # TCPStore does.  The kernel gives it to no other socket that asks for a free port, socket(7).

    def __init__(self) -> None:
        """Bind a free port, on all addresses, or raise HostError."""
        self._sockets = bind_listeners(None, 0, _PEER_TIMEOUT_S)
        self.port: int = self._sockets[0].getsockname()[1]

    def __repr__(self) -> str:
        return f"<HeldPort {self.port}>"

    async def aclose(self) -> None:
        for held in self._sockets:
            held.close()


class ReservedPort(Struct, frozen=True):
    """A port for the workers of a round; without a `store` it is not bound yet."""

    # If the workers serve their store themselves, the port is only held for them.

    address: str
    port: int
    store: WorkerStore | HeldPort | None


class MasterPorts:
    """The worker stores of this host: for the current attempt, and a reserved one.

    In a job of many nodes each node keeps a port ready for the next round.  Its store is bound
    before the port is announced, and is used if this node gets group rank 0.  A `master_port` that
    the user chose can serve one round at a time, so it is bound when a round starts here.  A port
    that was never reserved here belongs to the node that announced it: the workers of a static
    rendezvous meet at the nodes' own store.
    """

    def __init__(
        self, spec: LaunchSpec, on_refused: Callable[[str, str], None] = lambda peer, why: None
    ) -> None:
        """Begin without any port.

        `on_refused` is called with a client whose request a store of an attempt has refused, and
        why; at most `_REFUSALS_MAX` times in an attempt.
        """
        self._on_refused = on_refused
        self.refusals: list[str] = []  # of the store of this attempt, each once
        self._fixed_port = spec.master_port
        self._fixed_address = spec.master_addr
        self._host_store = spec.host_store
        self._token = spec.rendezvous.token
        self._introduction: asyncio.Task[None] | None = None
        self._ever_reserved: set[int] = set()
        self._reserved: list[ReservedPort] = []  # the last is the current
        self._claimed: list[ReservedPort] = []
        self._unused: list[ReservedPort] = []
        self._serving: WorkerStore | HeldPort | None = None

    def __repr__(self) -> str:
        ports = [reserved.port for reserved in self._reserved]
        return f"<MasterPorts: next port {ports[-1:]}, now {self._serving}>"

    def reserve(self, address: str) -> int:
        """Return the port for the next round, the same until it is claimed, or raise HostError."""
        if not self._reserved or self._reserved[-1].address != address:
            reserved = self._reserve_new(address)
            self._reserved.append(reserved)
            self._ever_reserved.add(reserved.port)
        return self._reserved[-1].port

    def _reserve_new(self, address: str) -> ReservedPort:
        if self._fixed_port is not None:
            return ReservedPort(address, self._fixed_port, None)
        store: WorkerStore | HeldPort
        if self._host_store:
            store = WorkerStore(0, self._bindable(address), self._token, self._on_drop)
        else:
            store = HeldPort()
        return ReservedPort(address, store.port, store)

    def claim(self, port: int) -> None:
        """Note that `port` belongs to a round: the next reservation is another port."""
        if (reserved := self._take(self._reserved, port)) is not None:
            self._claimed.append(reserved)

    async def open_local(self) -> tuple[str, int]:
        """Return address and port for an attempt whose workers are all on this host.

        A store listens there, unless the workers host it themselves (torch's
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1).  Raises HostError if the port cannot be bound.
        """
        address = self.address_of(MASTER_ADDR)
        if self._host_store:
            host = self._bindable(MASTER_ADDR)
            self._serving = await bind_store(self._fixed_port or 0, host, on_drop=self._on_drop)
        elif self._fixed_port is not None:
            return address, self._fixed_port
        else:
            self._serving = HeldPort()
        return address, self._serving.port

    def address_of(self, address: str) -> str:
        """Return the address for MASTER_ADDR: the spec's, else `address`."""
        return self._fixed_address or address

    def _bindable(self, address: str) -> str | None:
        return _bindable(self.address_of(address))

    async def serve(self, address: str, port: int) -> None:
        """Serve the workers of a round in which this node has group rank 0, or raise HostError."""
        claimed = self._take(self._claimed, port)
        if claimed is not None and claimed.store is not None:
            self._serving = claimed.store
        elif self._host_store and port in self._ever_reserved:
            self._serving = await bind_store(
                port, self._bindable(address), self._token, self._on_drop
            )

    def _on_drop(self, dropped: Dropped) -> None:
        """Report a refused request; strangers at the port are none of the job's business."""
        is_new = dropped.reason not in self.refusals and len(self.refusals) < _REFUSALS_MAX
        if dropped.is_refusal and is_new:
            self.refusals.append(dropped.reason)
            self._on_refused(dropped.peer, dropped.reason)

    def introduce(self, address: str, port: int) -> None:
        """Prove the token to the store of another node, so that it serves this node's workers."""
        # The store sees the address that the workers have, also behind a translation of addresses.
        # Their connections wait until then.
        if self._token is not None and self._host_store:
            work = self._introduce(format_host_port(address, port))
            self._introduction = create_task(work, name="introduction to the workers' store")

    async def _introduce(self, endpoint: str) -> None:
        from elastic_aio.store import connect

        # An error shows in the workers, which do not reach the store either.
        with contextlib.suppress(StoreError):
            async with connect(
                endpoint, timeout=_INTRODUCTION_S, reconnect_for=0, token=self._token
            ):
                pass

    def _take(self, pool: list[ReservedPort], port: int) -> ReservedPort | None:
        """Take a port from a pool; ports that were reserved before it are not used any more."""
        for position, reserved in enumerate(pool):
            if reserved.port == port:
                self._unused += pool[:position]
                del pool[: position + 1]
                return reserved
        return None

    async def end_attempt(self) -> None:
        """Close the store of the last attempt, and unused stores.  Idempotent."""
        if self._introduction is not None:
            await cancel_and_wait([self._introduction])
            self._introduction = None
        if self._serving is not None:
            await self._serving.aclose()
            self._serving = None
        self.refusals.clear()
        while self._unused:
            if (store := self._unused[-1].store) is not None:
                await store.aclose()
            self._unused.pop()

    async def aclose(self) -> None:
        self._unused += self._claimed + self._reserved
        self._claimed, self._reserved = [], []
        await self.end_attempt()


def _bindable(address: str) -> str | None:
    """Return `address` if it can be bound here, else None for all interfaces."""
    # It cannot be bound if it is translated (NAT), or is a name, whose resolution could block.
    try:
        family, kind, _, _, sockaddr = socket.getaddrinfo(
            without_idna(address), 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind) as probe:
            probe.bind(sockaddr)
    except (OSError, UnicodeError):
        return None
    return address
