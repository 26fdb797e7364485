"""The network of this host: addresses of endpoints, listening sockets; the simulator has its own.

A literal address needs no resolver, and `localhost` works even if the resolver does not.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from elastic_aio.aio import run_in_thread
from elastic_aio.sockets import Address, bind_addresses, port_owner

_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost"}
)
_REMOTE: Final[tuple[Address, ...]] = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9, 0, 0)),
)
"""Unassigned addresses (RFC 5737, RFC 3849): the route to them is the default route."""

_SIOCGIFADDR: Final = 0x8915


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses of `host` with `port`; takes as long as the resolver does.

    Cancellation: leaves the resolver's thread running.

    Raises:
        OSError: the name has no address, or the resolver fails.
    """
    try:
        return _resolve(host, port, socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass  # not a literal address
    try:
        # A daemon: a resolver that does not answer would delay the exit for half a minute.
        return await run_in_thread(_resolve, host, port, 0, daemon=True)
    except UnicodeError as error:
        raise OSError(f"no name: {error}") from None
    except OSError:
        if is_loopback_name(host):
            return loopback_addresses(port)
        raise


def loopback_addresses(port: int) -> tuple[Address, ...]:
    """Return the loopback addresses of both families."""
    return (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0))


def wildcard_addresses(port: int) -> tuple[Address, ...]:
    """Return the wildcard addresses of both families."""
    return (socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port, 0, 0))


def is_loopback_name(host: str) -> bool:
    """Return whether a name means the loopback address on every host (RFC 6761)."""
    name = host.lower().rstrip(".")
    return name in _LOOPBACK_NAMES or name.endswith(".localhost")


def is_loopback(address: str) -> bool:
    """Return whether a literal address is a loopback address."""
    return address.startswith("127.") or address == "::1"


def outbound_address(towards: Iterable[Address] = _REMOTE) -> str | None:
    """Return the source address of this host for packets to other hosts; None if none.

    No packet is sent: connecting a datagram socket only looks up the route.  Without a
    default route, as in some clusters, it is the address of the first interface.
    """
    for family, name in towards:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(name)
                address = str(sock.getsockname()[0])
        except OSError:
            continue  # no route, or an unsupported family
        if not is_loopback(address):
            return address
    return next((one for one in _interface_addresses() if not is_loopback(one)), None)


def _interface_addresses() -> Iterable[str]:
    """Yield the IPv4 address of each interface with an address, netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", os.fsencode(name))
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue
            # A sockaddr_in follows the name: family, port, address.
            yield socket.inet_ntoa(reply[20:24])


def _resolve(host: str, port: int, flags: int) -> tuple[Address, ...]:
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in results))


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
        """Return sockets that listen at all of `addresses`; raise `OSError` if they cannot."""
        return bind_addresses(addresses, peer_timeout, is_listening=True)

    async def port_owner(self, port: int) -> str | None:
        """Return the command and pid of the process that listens at `port`; None if unknown."""
        # In a thread: it reads much of /proc.
        return await run_in_thread(port_owner, port)
