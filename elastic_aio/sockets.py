"""Listening sockets: bound, accepting, with keepalive, and who owns a port in use."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import Any, Final

from elastic_aio.aio import run_in_thread
from elastic_aio.errors import HostError
from elastic_aio.spec.checks import format_host_port
from elastic_aio.text import one_line, os_text

Address = tuple[socket.AddressFamily, tuple[Any, ...]]
"""A family, and an address as the socket functions of that family take it."""

BACKLOG: Final = 65535
"""Connections that wait to be accepted: as many as the kernel allows, listen(2).  `SOMAXCONN` is
from the kernel headers with which Python was built: maybe 128."""

_BATCH: Final = 64
"""Connections to accept before other work of the loop."""

_RETRY: Final = 1.0
"""Seconds until the next attempt to accept after a lack of descriptors or memory."""

_BIND_ATTEMPTS: Final = 16
"""How many free ports to try until one is free in both families."""

_KEEPALIVE_MAX: Final = 32767
"""Seconds, and `_USER_TIMEOUT_MAX` milliseconds: the most that the kernel accepts."""

_USER_TIMEOUT_MAX: Final = 2**31 - 1

_LINGER_0: Final = struct.pack("ii", 1, 0)

_READ_SIZE: Final = 64 << 10
"""Bytes of one read: half of what malloc(3) maps instead, see mallopt(3)."""

_TCP_TABLES: Final = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_TCP_LISTEN: Final = "0A"
"""The state of a listening socket in /proc/net/tcp, proc_net_tcp(5)."""

_COMMAND_LENGTH: Final = 80


def format_endpoint(address: object) -> str:
    """Return the address of a socket as `host:port`."""
    if not isinstance(address, tuple) or len(address) < 2:
        return "unknown"
    return format_host_port(str(address[0]), address[1])


def discard_unsent(transport: Any) -> None:
    """Let the kernel drop what it has not sent when the socket is closed, socket(7).

    Otherwise the kernel goes on sending, and a write of a connection that was given up would arrive
    after the writes of its successor.  The peer gets a reset, which tells it from the end of this
    process (see `elastic_aio.store.keyspace`).
    """
    sock = transport.get_extra_info("socket")
    # A TLS transport that has ended has none; closed ones raise, and uvloop's a ValueError.
    if sock is not None:
        with contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)


def limit_read_size(transport: Any) -> None:
    """Let asyncio read into buffers that malloc(3) takes from its heap.

    Its own, of 256 KiB, are mapped and unmapped for each read.  uvloop has one for all reads.
    """
    if hasattr(transport, "max_size"):
        transport.max_size = _READ_SIZE


def enable_keepalive(sock: socket.socket, peer_timeout: float) -> None:
    """Make the kernel end the connection after `peer_timeout` seconds without its peer's kernel.

    Keepalive probes detect a lost peer on an idle connection, TCP_USER_TIMEOUT while sent data is
    unacknowledged, tcp(7).  Beyond what the kernel can count, none are sent.
    """
    options = keepalive_options(peer_timeout)
    if socket.TCP_KEEPIDLE in options:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def keepalive_options(peer_timeout: float) -> dict[int, int]:
    """Return the options of TCP that `enable_keepalive` sets."""
    step = max(1, round(peer_timeout / 4))
    timeout = min(max(1, round(peer_timeout * 1000)), _USER_TIMEOUT_MAX)
    options = {socket.TCP_USER_TIMEOUT: timeout}
    if step <= _KEEPALIVE_MAX:
        options |= {socket.TCP_KEEPIDLE: step, socket.TCP_KEEPINTVL: step, socket.TCP_KEEPCNT: 3}
    return options


def without_idna(host: str | None) -> str | bytes | None:
    """Return a host as `getaddrinfo` wants it: for a text, it loads the tables of IDNA."""
    if host is not None and host.isascii() and host.replace(".", "").isdecimal():
        return host.encode()
    return host


async def look_up(host: str, port: int) -> list[Address]:
    """Return the addresses of a host with a TCP port, or raise OSError.

    A name is looked up in a thread: a server may be asked for it.
    """
    is_number = ":" in host or host.replace(".", "").isdecimal()
    flags = socket.AI_NUMERICHOST if is_number else 0

    def ask() -> list[Address]:
        known = without_idna(host)
        try:
            infos = socket.getaddrinfo(known, port, type=socket.SOCK_STREAM, flags=flags)
        except UnicodeError as error:  # IDNA refuses the name
            raise OSError(str(error)) from error
        return [(family, address) for family, _, _, _, address in infos]

    return ask() if is_number else await run_in_thread(ask, daemon=True)


def bind_listeners(host: str | None, port: int, peer_timeout: float) -> list[socket.socket]:
    """Return sockets bound to each address of `host` (None: all interfaces) and one port.

    Accepted connections inherit the socket options, which then cost no system calls.  HostError:
    the name has no address, or the port cannot be bound.
    """
    # For a name, it is asked which addresses this host has.
    is_number = host is not None and host.replace(".", "").isdecimal()
    flags = socket.AI_PASSIVE | (socket.AI_NUMERICHOST if is_number else socket.AI_ADDRCONFIG)
    try:
        infos = socket.getaddrinfo(without_idna(host), port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise HostError(f"no address for host {host!r}: {error}") from None
    try:
        return bind_addresses(((info[0], info[4]) for info in infos), peer_timeout)
    except OSError as error:
        raise HostError(f"cannot listen on {host or '*'}:{port}: {error.strerror}") from None


def bind_addresses(
    addresses: Iterable[Address], peer_timeout: float, *, is_listening: bool = False
) -> list[socket.socket]:
    """Return sockets bound to all `addresses`; those with port 0 get the same free port.

    An address whose family this kernel lacks is left out, if another one can be bound.  Accepted
    connections inherit `peer_timeout` (see `enable_keepalive`).  `is_listening`: listen at once, so
    that only one program gets the port; sockets that do not listen can be bound to one port by
    several programs (SO_REUSEADDR, socket(7)).  OSError: an address cannot be bound.
    """
    # In the same order everywhere: a program that gets the first address gets all.
    ordered = sorted(set(addresses), key=repr)
    for attempt in range(_BIND_ATTEMPTS):
        try:
            return _bind_all(ordered, peer_timeout, is_listening)
        except OSError as error:
            is_race = error.errno == errno.EADDRINUSE and ordered[0][1][1] == 0
            if not is_race or attempt == _BIND_ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def _bind_all(
    addresses: Sequence[Address], peer_timeout: float, is_listening: bool
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    port: object = None
    with contextlib.ExitStack() as stack:
        for family, address in addresses:
            if port is not None:
                address = (address[0], port, *address[2:])
            try:
                sock = _bind(family, address, peer_timeout, is_listening)
            except OSError as error:
                # An address family that the kernel was booted without.
                is_missing = error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
                if is_missing and len(addresses) > 1:
                    continue
                raise
            sockets.append(stack.enter_context(sock))
            port = sock.getsockname()[1]
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "none of its addresses can be used")
        stack.pop_all()  # they stay open
    return sockets


def _bind(
    family: socket.AddressFamily, address: tuple[Any, ...], peer_timeout: float, is_listening: bool
) -> socket.socket:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            # Each family has a socket of its own.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        enable_keepalive(sock, peer_timeout)
        sock.bind(address)
        if is_listening:
            sock.listen(BACKLOG)
        stack.pop_all()  # it stays open
    return sock


class Acceptor:
    """Accepts connections on bound sockets, which it owns, and pauses while it can take no more.

    asyncio's own servers retry at once when no descriptor is left, and libuv accepts and closes:
    either costs a whole processor while clients try again.  A paused acceptor leaves the
    connections in the queue of the kernel.

    Attributes:
        sockets: bound sockets; empty once closed.
        on_connection: called with each connection, whose owner it is from then on.
        has_room: whether another connection is accepted; then the owner calls `resume`.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        on_connection: Callable[[socket.socket], None],
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        self.sockets = list(sockets)
        self.on_connection = on_connection
        self.has_room = has_room
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_accepting = False
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Listen, on the running loop; OSError: another program does; the sockets are closed."""
        self._loop = asyncio.get_running_loop()
        try:
            for sock in self.sockets:
                sock.setblocking(False)  # a client may be gone again before accept(2)
                sock.listen(BACKLOG)
        except OSError:
            self.close()
            raise
        self.resume()

    def resume(self) -> None:
        """Accept again, if accepting was paused and there is room."""
        if self._loop is None or self._is_accepting or not self.sockets or not self.has_room():
            return
        self._is_accepting = True
        self._cancel_retry()
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def release(self) -> list[socket.socket]:
        """Accept no more; return the sockets, which the caller owns from now on."""
        self._pause()
        sockets, self.sockets = self.sockets, []
        return sockets

    def close(self) -> None:
        """Stop listening.  Idempotent; needs no running loop."""
        for sock in self.release():
            sock.close()

    def _pause(self) -> None:
        if self._is_accepting and self._loop is not None and not self._loop.is_closed():
            for sock in self.sockets:
                self._loop.remove_reader(sock)
        self._is_accepting = False
        self._cancel_retry()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _accept(self, sock: socket.socket) -> None:
        assert self._loop is not None, "it accepts since `start`"
        for _ in range(_BATCH):
            if not self.has_room():
                self._pause()
            if not self._is_accepting:  # `on_connection` may have closed it
                return
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the client has closed it already
            except OSError:
                # No descriptor or no memory is left.
                self._pause()
                # A poll: other parts of the program close descriptors without notice.
                self._retry = self._loop.call_later(_RETRY, self.resume)
                return
            connection.setblocking(False)
            self.on_connection(connection)


def port_owner(port: int) -> str | None:
    """Return the command and pid of the process that listens at `port`; None if none does.

    It reads all of /proc, which takes long on a busy host: call it in a thread.
    """
    owners = listening_sockets(port)
    if not owners:
        return None
    pid = _process_with({f"socket:[{inode}]" for inode in owners})
    if pid is not None:
        return f"{_command(pid)} (pid {pid})"
    # Only root can read the descriptors of other users' processes.
    return f"a process of user {next(iter(owners.values()))[7]}"


def listening_sockets(port: int | None = None) -> dict[str, list[str]]:
    """Return the rows of proc_net_tcp(5) of the sockets that listen, at one port, by inode."""
    # The kernel shows them first, however many connections follow.
    tables = (takewhile(lambda row: row[3] == _TCP_LISTEN, _tcp_rows(one)) for one in _TCP_TABLES)
    rows = chain.from_iterable(tables)
    return {row[9]: row for row in rows if port in (None, int(row[1].rpartition(":")[2], 16))}


def _tcp_rows(table: str) -> Iterator[list[str]]:
    # An address family that the kernel was booted without has no table.
    with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
        next(file, "")
        yield from (row for row in map(str.split, file) if len(row) > 9)


def accepted_inode(own: tuple[Any, ...], peer: tuple[Any, ...]) -> str:
    """Return the socket at the other end of a connection of this host.

    Empty: no process has accepted it, or has it open any more.  Reads all TCP sockets.
    """
    local, remote = (f"{_shown(host)}:{port:04X}" for host, port, *_ in (peer, own))
    for row in chain.from_iterable(map(_tcp_rows, _TCP_TABLES)):
        # A socket for both families shows an IPv4 address with a prefix.
        if row[1].endswith(local) and row[2].endswith(remote):
            return "" if row[9] == "0" else row[9]
    return ""


def _shown(host: str) -> str:
    """Return an address as the tables of TCP sockets show it: words in the order of the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0])
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))


def _process_with(links: set[str]) -> int | None:
    """Return the process with the lowest pid that has one of these descriptors open."""
    for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            for name in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{name}") in links:
                    return pid
    return None


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return "a process"
    plain = takewhile(lambda word: word[:1] != b"-", words)  # an option may have a password
    return one_line(os_text(b" ".join(plain)), _COMMAND_LENGTH)
