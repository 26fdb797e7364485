"""The addresses of an endpoint's host, and which of them belong to this host.

A literal address needs no resolver, and `localhost` works even if the resolver does not.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from typing import Final

from elastic_aio.aio import run_in_thread
from elastic_aio.store.sockets import Address

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
    """Yield the IPv4 address of each interface that has one, netdevice(7)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode())
            try:
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue
            # A sockaddr_in follows the name: family, port, address.
            yield socket.inet_ntoa(reply[20:24])


def _resolve(host: str, port: int, flags: int) -> tuple[Address, ...]:
    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in results))
