"""The network of this host, as discovery and the store use it; the simulator has its own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence

from elastic_aio.aio import run_in_thread
from elastic_aio.store.sockets import Address, bind_addresses, port_owner


class StoreNetwork:
    """Makes the sockets over which nodes find and serve a store."""

    def is_local(self, address: Address) -> bool:
        """Return whether a socket of this host can be bound to the address, on any port."""
        family, name = address
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.bind((name[0], 0, *name[2:]))
        except OSError:
            return False
        return True

    async def dial(self, address: Address) -> socket.socket:
        """Return a socket that is connected to `address`; the caller bounds it in time.

        Cancellation: leaves nothing open.

        Raises:
            OSError: the connection fails.
        """
        family, name = address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, name)
            if sock.getsockname() == sock.getpeername():
                # A self-connect: the kernel chose the dialled port as the source port.
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException:  # a cancellation too: no connection stays open
            sock.close()
            raise
        return sock

    def listen(self, addresses: Sequence[Address], peer_timeout: float) -> list[socket.socket]:
        """Return sockets that listen at all of `addresses` (see `bind_addresses`).

        Raises:
            OSError: an address or its port cannot be used.
        """
        return bind_addresses(addresses, peer_timeout, is_listening=True)

    async def port_owner(self, port: int) -> str | None:
        """Return the command and pid of the process that listens at `port`; None if unknown."""
        # In a thread: it reads much of /proc.
        return await run_in_thread(port_owner, port)
