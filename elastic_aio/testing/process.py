"""A simulated process: an event loop whose sockets are those of the simulated network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.sockets import Address
from elastic_aio.testing.event_loop import SimLoop
from elastic_aio.testing.network import Network
from elastic_aio.testing.virtual_time import SimHost

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class SimProcess(SimLoop, StoreNetwork):
    """The loop of one process; asyncio's functions and the store's work on it unchanged."""

    def __init__(self, network: Network, host: SimHost, on_error: Callable[[str], object]) -> None:
        """Begin; `on_error` is called with each error that no code of the process handles."""
        super().__init__(network.time, host, on_error)
        self.network = network

    def random_bytes(self, size: int) -> bytes:
        """Return bytes that repeat with the seed of the simulation."""
        return self.network.random.randbytes(size)

    async def create_connection(  # type: ignore[override]  # fewer arguments
        self,
        protocol_factory: ProtocolFactory,
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        **_: object,
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        if sock is None:
            transport = await self.network.connect(self, host or "", port or 0)
        else:
            transport = sock
        protocol = protocol_factory()
        transport.attach(protocol)
        return transport, protocol

    def add_reader(  # type: ignore[override]  # fewer types
        self, fd: Any, callback: Callable[..., object], *args: Any
    ) -> None:
        """Call `callback` when a connection waits at the listener `fd`."""
        fd.on_ready = lambda: self.call_soon(callback, *args)
        if fd.waiting:
            fd.on_ready()

    def remove_reader(self, fd: Any) -> bool:
        fd.on_ready = None
        return True

    async def connect_accepted_socket(  # type: ignore[override]  # fewer arguments
        self, protocol_factory: ProtocolFactory, sock: Any, **_: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        protocol = protocol_factory()
        self.network.on_accepted(sock.listener, protocol)
        sock.attach(protocol)
        return sock, protocol

    # ------------------------------------------------------ as a `StoreNetwork`

    def is_local(self, address: Address) -> bool:
        return bool(address[1][0] == self.host.address)

    async def dial(self, address: Address) -> socket.socket:
        host, port = address[1][:2]
        return cast("socket.socket", await self.network.connect(self, host, port))

    def listen(self, addresses: Sequence[Address], peer_timeout: float) -> list[socket.socket]:
        ports = dict.fromkeys(address[1][1] for address in addresses)
        files = [self.network.listen(self, port, peer_timeout) for port in ports]
        return cast("list[socket.socket]", files)

    async def port_owner(self, port: int) -> str | None:
        return "a process" if (self.host.address, port) in self.network.listeners else None
