"""The addresses of an endpoint's host, and which of them are this machine's own.

A literal address needs no resolver, and `localhost` needs none that works.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from elastic_aio.store.listen import Address

__all__ = [
    "addresses_of",
    "every_interface",
    "is_local",
    "is_loopback",
    "is_loopback_name",
    "loopback",
    "outward_address",
]

_LOOPBACK_NAMES: Final = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost"}
)
_ELSEWHERE: Final[tuple[Address, ...]] = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9, 0, 0)),
)
"""Addresses that are nobody's (RFC 5737, RFC 3849): the way there is the way out."""

_SIOCGIFADDR: Final = 0x8915


async def addresses_of(host: str, port: int) -> tuple[Address, ...]:
    """Return the addresses of `host` with `port`; it takes as long as the resolver does.

    Cancelling it leaves the resolver to itself.

    Raises:
        OSError: the name has no address, or nobody can tell.
    """
    try:
        return _looked_up(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name
    try:
        return await _in_background(partial(_looked_up, host, port, 0))
    except UnicodeError as error:
        raise OSError(f"no name: {error}") from None
    except OSError:
        if is_loopback_name(host):
            return loopback(port)
        raise


def loopback(port: int) -> tuple[Address, ...]:
    """Return the addresses at which a machine reaches itself."""
    return (socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET6, ("::1", port, 0, 0))


def every_interface(port: int) -> tuple[Address, ...]:
    """Return the addresses that stand for all of this machine's."""
    return (socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port, 0, 0))


def is_loopback_name(host: str) -> bool:
    """Tell whether a name means the machine itself everywhere (RFC 6761)."""
    name = host.lower().rstrip(".")
    return name in _LOOPBACK_NAMES or name.endswith(".localhost")


def is_loopback(address: str) -> bool:
    """Tell whether a literal address is one that no other machine reaches."""
    return address.startswith("127.") or address == "::1"


def is_local(address: Address) -> bool:
    """Tell whether a socket of this machine can have the address, its port aside."""
    family, name = address
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((name[0], 0, *name[2:]))
    except OSError:
        return False
    return True


def outward_address(towards: Iterable[Address] = _ELSEWHERE) -> str | None:
    """Return the address from which this machine sends to others; None if it has none.

    Nothing is sent for it: connecting a datagram socket only looks up the route.  A
    cluster may have no way out; then it is the address of the first interface.
    """
    for family, name in towards:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(name)
                found = str(sock.getsockname()[0])
        except OSError:
            continue  # no such route, or no such family
        if not is_loopback(found):
            return found
    return next((one for one in _interface_addresses() if not is_loopback(one)), None)


def _interface_addresses() -> Iterable[str]:
    """Yield the IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s24x", name.encode())
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, request)
            except OSError:
                continue
            # A sockaddr_in follows the name: family, port, address.
            yield socket.inet_ntoa(answer[20:24])


def _looked_up(host: str, port: int, flags: int) -> tuple[Address, ...]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in found))


async def _in_background(work: Callable[[], tuple[Address, ...]]) -> tuple[Address, ...]:
    """Do a piece of work in a daemon thread.

    Executors wait for their threads when the program ends; a resolver that does not
    answer would hold that up for half a minute.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Address, ...]] = loop.create_future()

    def run() -> None:
        tell: Callable[[], Any]
        try:
            tell = partial(_settle, future, work())
        except Exception as error:  # noqa: BLE001  # it is raised where it was asked for
            tell = partial(_settle, future, error)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(tell)

    try:
        threading.Thread(target=run, name="resolver", daemon=True).start()
    except RuntimeError:  # can't start new thread: better late than never
        return work()
    return await future


def _settle(
    future: asyncio.Future[tuple[Address, ...]], outcome: tuple[Address, ...] | Exception
) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
