"""The store's server: serves a keyspace over TCP to torch's clients and to `RemoteStore`.

A faulty connection harms only itself.  The server closes a connection that violates the protocol,
announces a length beyond the limits, leaves a request unfinished or does not read its replies; it
calls `on_drop` once and frees what the peer has sent.  While a peer does not read, its requests are
not read either.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

from elastic_aio.aio import create_task, run_shielded, running_loop
from elastic_aio.errors import HostError
from elastic_aio.sockets import Acceptor, bind_listeners, format_endpoint
from elastic_aio.spec.checks import checked_part, checked_port, checked_text, checked_token
from elastic_aio.spec.tls import TlsSpec, checked_tls
from elastic_aio.store.connection import Connection, Service
from elastic_aio.store.limits import Dropped, ServerLimits

if TYPE_CHECKING:
    from elastic_aio.store.tls import TlsContext

_SPARE_DESCRIPTORS: Final = 64
"""Descriptors of this process that are left for the rest of the program."""


def server_context(tls: TlsSpec | None) -> TlsContext | None:
    """Return the TLS context of a server; None without TLS; SpecError: a file cannot be used."""
    if (checked := checked_tls(tls)) is None:
        return None
    from elastic_aio.store.tls import TlsContext

    return TlsContext(checked, is_server=True)


class StoreServer:
    """A store that clients connect to.

    An async context manager: inside it, the port is bound and served.  Closing ends all connections
    and discards the keys.

    Args:
        host: a name or address, all of whose addresses are served; None: all interfaces, IPv4 and
            IPv6.
        port: 0: a free one, known as `port` once started.
        token: serve only clients of this package that have the same token, of at least 16
            characters; each side proves to the other that it knows the token.  torch's protocol
            cannot carry one.
        admit_hosts: with a token, also serve torch's clients on this host, and on each host from
            which a client has proved the token.
        tls: serve only clients that speak TLS (torch's do not), with the certificate `cert`; with a
            `ca`, only clients with a certificate of it.
        limits: limits on clients; None: the defaults.
        on_drop: called with each connection that the server closes for a fault.
        listening: bound sockets to use instead of `host` and `port`; the server owns them from now
            on.
        on_pause: called, while there are leases, after this process or its host was suspended, with
            a lower bound of the seconds, at most a second too low.  The leases are extended by as
            much.
    """

    def __init__(
        self,
        host: str | None = "localhost",
        port: int = 0,
        *,
        token: str | None = None,
        admit_hosts: bool = False,
        tls: TlsSpec | None = None,
        limits: ServerLimits | None = None,
        on_drop: Callable[[Dropped], None] | None = None,
        listening: Sequence[socket.socket] = (),
        on_pause: Callable[[float], None] | None = None,
    ) -> None:
        """Configure a server; nothing is bound yet.

        Raises:
            SpecError: the port or the token is invalid, or a file of `tls` cannot be used.
        """
        host = None if host is None else checked_text("host", host)
        self._address = host, checked_port("port", port, at_least=0)
        self._tls = server_context(tls)
        self.service = Service(
            checked_part("limits", limits, ServerLimits),
            checked_token(token),
            admit_hosts=admit_hosts,
            on_drop=on_drop,
            on_pause=on_pause,
            on_left=lambda: self._acceptor.resume(),
        )
        self.limits, self.instance = self.service.limits, self.service.instance
        self.keyspace = self.service.keyspace
        self._acceptor = Acceptor(listening, self.open, self._has_room)
        self._connections_max = sys.maxsize
        self._opening: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        state = f"on {self.endpoint}" if self._acceptor.sockets else "not listening"
        return f"<StoreServer {state}, {self.connection_count} connections, {self.keyspace!r}>"

    async def __aenter__(self) -> Self:
        running_loop()
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def port(self) -> int:
        """The bound port; before `start`, the configured one."""
        sockets = self._acceptor.sockets
        return int(sockets[0].getsockname()[1]) if sockets else self._address[1]

    @property
    def endpoint(self) -> str:
        """`host:port` of the first bound address; before `start`, as configured."""
        if sockets := self._acceptor.sockets:
            return format_endpoint(sockets[0].getsockname())
        return f"{self._address[0] or '*'}:{self._address[1]}"

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self.service.connections)

    async def start(self) -> None:
        """Bind the port and serve it; on return clients can connect.

        Cancellation: closes the listeners.

        Raises:
            HostError: the host has no address, or the port cannot be bound.
        """
        if not self._acceptor.sockets:
            sockets = bind_listeners(*self._address, self.limits.peer_timeout)
            self._acceptor.sockets = sockets
        self.serve()

    def serve(self) -> None:
        """Serve the sockets that were given as `listening`; on return clients can connect.

        Raises:
            HostError: another program listens at the port.
        """
        self.service.loop = asyncio.get_running_loop()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors != resource.RLIM_INFINITY:
            self._connections_max = max(1, descriptors - _SPARE_DESCRIPTORS)
        where = self.endpoint
        try:
            self._acceptor.start()
        except OSError as error:
            raise HostError(f"cannot listen on {where}: {error.strerror}") from None

    def open(self, connection: socket.socket) -> None:
        """Serve a connection that has been accepted."""
        task = create_task(self._open(connection), name="accepted connection")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self.service.loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client has closed it already

    def _make_protocol(self) -> asyncio.Protocol:
        connection = Connection(self.service)
        return connection if self._tls is None else self._tls.layer(connection)

    def _has_room(self) -> bool:
        return self.connection_count + len(self._opening) < self._connections_max

    async def aclose(self) -> None:
        """Stop listening, send the pending replies and end all connections.

        It takes about a second at most.  Idempotent.

        Cancellation: raised when all is closed.
        """
        if self._acceptor.sockets:
            await run_shielded(self._close)

    async def _close(self) -> None:
        self._acceptor.close()
        if self._opening:
            await asyncio.wait(self._opening)  # an iteration of the loop
        await self.service.aclose()
