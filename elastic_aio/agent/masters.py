"""The ports at which the workers of many nodes meet, one for each round.

Every node keeps the next one ready: a store that is bound before its port is
announced, so that nobody else can take it and whoever comes first is served.  It is
used if this node gets group rank 0.  A port that was never reserved here is served by
whoever announced it: the workers of a static rendezvous meet at the nodes' own store.
"""

from __future__ import annotations

import socket

from msgspec import Struct

from elastic_aio.agent.surroundings import free_port
from elastic_aio.agent.workerstore import WorkerStore, bind_store
from elastic_aio.spec import LaunchSpec

__all__ = ["Masters"]


class _Reserved(Struct, frozen=True):
    """A port; without a `store` nobody listens there yet."""

    address: str
    port: int
    store: WorkerStore | None


class Masters:
    """This node's worker stores: a reserved one, and that of the present round.

    A port that the user has chosen can serve one round at a time, so it is bound when
    a round begins here.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        """Begin without any port."""
        self._given = spec.master_port
        self._hosts_store = spec.hosts_store
        self._ever: set[int] = set()
        self._reserved: list[_Reserved] = []  # the last one is the present
        self._claimed: list[_Reserved] = []
        self._spent: list[_Reserved] = []
        self._serving: WorkerStore | None = None

    def __repr__(self) -> str:
        ports = [one.port for one in self._reserved]
        return f"<Masters: next port {ports[-1:]}, now {self._serving}>"

    def reserve(self, address: str) -> int:
        """Return the port for the next round at `address`; the same until it is claimed.

        Raises:
            SurroundingsError: there is none.
        """
        if not self._reserved or self._reserved[-1].address != address:
            made = self._made(address)
            self._reserved.append(made)
            self._ever.add(made.port)
        return self._reserved[-1].port

    def _made(self, address: str) -> _Reserved:
        if self._given is not None:
            return _Reserved(address, self._given, None)
        if not self._hosts_store:
            return _Reserved(address, free_port(), None)
        store = WorkerStore(0, _host_of(address))
        return _Reserved(address, store.port, store)

    def claim(self, port: int) -> None:
        """Take note that a round has got `port`: what is reserved next is another one."""
        if (reserved := self._taken(self._reserved, port)) is not None:
            self._claimed.append(reserved)

    async def serve(self, address: str, port: int) -> None:
        """Serve the workers of a round that begins with this node as group rank 0.

        Raises:
            SurroundingsError: the port cannot be had.
        """
        claimed = self._taken(self._claimed, port)
        if claimed is not None and claimed.store is not None:
            self._serving = claimed.store
        elif self._hosts_store and port in self._ever:
            self._serving = await bind_store(port, _host_of(address))

    def _taken(self, pool: list[_Reserved], port: int) -> _Reserved | None:
        """Take a port from a pool; those before it will not be used any more."""
        for at, one in enumerate(pool):
            if one.port == port:
                self._spent += pool[:at]
                del pool[: at + 1]
                return one
        return None

    async def end_round(self) -> None:
        """Close the store of the present round, and what nobody will use.  May be started over."""
        if self._serving is not None:
            await self._serving.aclose()
            self._serving = None
        while self._spent:
            if (store := self._spent[-1].store) is not None:
                await store.aclose()
            self._spent.pop()

    async def aclose(self) -> None:
        """Close every store.  May be started over."""
        self._spent += self._claimed + self._reserved
        self._claimed, self._reserved = [], []
        await self.end_round()


def _host_of(address: str) -> str | None:
    """Return `address` if it can be bound here; else None, for every interface.

    It cannot when it belongs to a translator of addresses, or is a name: looking
    that up could block.
    """
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except (OSError, UnicodeError):
        return None
    return address
