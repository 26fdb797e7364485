"""Listening sockets for one host and one port, IPv4, IPv6 or both, bound before use."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from elastic_aio.errors import SpecError, SurroundingsError

__all__ = [
    "Address",
    "bind_addresses",
    "bind_listeners",
    "keep_alive",
    "parse_endpoint",
    "shown_endpoint",
]

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""A family, and an address as the socket functions of that family take it."""

_ATTEMPTS = 16
"""How often a free port is looked for that is free in both families."""


def parse_endpoint(endpoint: str, *, lowest: int = 1) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`; the port is `lowest` or higher.

    Raises:
        SpecError: it is neither.
    """
    host, colon, port = endpoint.rpartition(":") if isinstance(endpoint, str) else ("", "", "")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    fits = colon and host and port.isascii() and port.isdecimal() and len(port) < 6
    if not fits or not lowest <= int(port) < 65536 or not host.isprintable() or " " in host:
        raise SpecError("endpoint", endpoint, "must be HOST:PORT or [IPV6]:PORT")
    return host, int(port)


def shown_endpoint(address: object) -> str:
    """Return the address of a socket as `host:port`."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def keep_alive(sock: socket.socket, silence: float) -> None:
    """Let the kernel end a connection whose peer's kernel has been silent for `silence` s.

    Keepalive notices it while nothing is sent, TCP_USER_TIMEOUT while something is.
    """
    step = max(1, round(silence / 4))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(silence * 1000)))


def bind_listeners(host: str | None, port: int, silence: float) -> list[socket.socket]:
    """Return bound sockets for each address of `host`; None means every interface.

    With port 0 all get the same free port.  Accepted connections inherit the
    options, so that accepting costs no further system calls.

    Raises:
        SurroundingsError: the name has no address, or the port cannot be had.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
        )
    except (OSError, UnicodeError) as error:
        raise SurroundingsError(f"no address for host {host!r}: {error}") from None
    try:
        return bind_addresses([(family, address) for family, _, _, _, address in found], silence)
    except OSError as error:
        where = f"{host or '*'}:{port}"
        raise SurroundingsError(f"cannot listen on {where}: {error.strerror}") from None


def bind_addresses(
    addresses: Iterable[Address], silence: float, *, is_listening: bool = False
) -> list[socket.socket]:
    """Return sockets bound to all `addresses`; those with port 0 get the same free one.

    While nobody listens, any number can be bound to the same port; with `is_listening`
    they do at once, and only one program gets them.

    Raises:
        OSError: one of them cannot be had.
    """
    # In the same order everywhere: who gets the first of them gets all.
    ordered = sorted(set(addresses), key=repr)
    for attempt in range(_ATTEMPTS):
        try:
            return _bind_all(ordered, silence, is_listening)
        except OSError as error:
            is_race = error.errno == errno.EADDRINUSE and ordered[0][1][1] == 0
            if not is_race or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _bind_all(
    addresses: Sequence[Address], silence: float, is_listening: bool
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    port: object = None
    try:
        for family, address in addresses:
            if port is not None:
                address = (address[0], port, *address[2:])
            try:
                sock = _bound(family, address, silence, is_listening)
            except OSError as error:
                # An address family that the kernel was booted without.
                missing = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
                if error.errno in missing and len(addresses) > 1:
                    continue
                raise
            sockets.append(sock)
            port = sock.getsockname()[1]
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "none of its addresses can be used")
    except BaseException:  # whatever it was, no socket stays open
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound(
    family: socket.AddressFamily, address: tuple[Any, ...], silence: float, is_listening: bool
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            # Each family has a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        keep_alive(sock, silence)
        sock.bind(address)
        if is_listening:
            sock.listen(socket.SOMAXCONN)
    except BaseException:  # whatever it was, the socket does not stay open
        sock.close()
        raise
    return sock
