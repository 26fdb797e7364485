"""The store's server: serves a keyspace over TCP to torch's clients and to `RemoteStore`.

A faulty connection harms only itself.  The server closes a connection that violates
the protocol, announces a length beyond the limits, leaves a request unfinished or does
not read its replies; it calls `on_drop` once and frees what the peer has sent.  While
a peer does not read, its requests are not read either.

Without a token, the server serves every client.  With one, it serves only clients of
this package that know it: torch's protocol cannot carry a token.  With certificates it
serves only clients that speak TLS, and torch's do not.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

from elastic_aio.aio import create_task, random_bytes, run_shielded, running_loop
from elastic_aio.errors import HostError
from elastic_aio.sockets import Acceptor, bind_listeners, format_endpoint
from elastic_aio.spec.checks import checked_part, checked_port, checked_text, checked_token
from elastic_aio.spec.tls import TlsSpec, checked_tls
from elastic_aio.store import wire
from elastic_aio.store.connection import Buffers, Connection, ServerLink
from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.limits import Dropped, ServerLimits

if TYPE_CHECKING:
    from elastic_aio.store.tls import TlsContext

PAUSE_RESOLUTION: Final = 1.0
"""Seconds between timers while there are leases, and so the error of a measured pause."""

_LATE: Final = 0.05
"""A timer this late, in seconds, may run before the data in the sockets has been read."""

_SPARE_DESCRIPTORS: Final = 64
"""Descriptors of this process that are left for the rest of the program."""

_CLOSE_TIMEOUT: Final = 1.0
"""Seconds for the last replies to leave when the server closes."""


def server_context(tls: TlsSpec | None) -> TlsContext | None:
    """Return the TLS context of a server; None without TLS.

    Raises:
        SpecError: a file cannot be used.
    """
    if (checked := checked_tls(tls)) is None:
        return None
    from elastic_aio.store.tls import TlsContext

    return TlsContext(checked, is_server=True)


class StoreServer:
    """A store that clients connect to.

    An async context manager: inside it, the port is bound and served.  Closing ends
    all connections and discards the keys.

    Args:
        host: a name or address, all of whose addresses are served; None: all
            interfaces, IPv4 and IPv6.
        port: the port; 0: a free one, known as `port` once started.
        token: serve only clients of this package that have the same token, of at least
            16 characters; each side proves to the other that it knows the token.
        admit_hosts: with a token, also serve torch's clients on this host, and on each host
            from which a client has proved the token.
        tls: serve only clients that speak TLS, with the certificate `cert`; with a `ca`, only
            those that have a certificate of it.  torch's clients do not speak TLS.
        limits: limits on clients; None: the defaults.
        on_drop: called with each connection that the server closes for a fault.
        listening: bound sockets to use instead of `host` and `port`; the server
            owns them from now on.
        on_pause: called, while there are leases, after this process or its host was
            suspended, with a lower bound of the seconds; it may have been up to
            `PAUSE_RESOLUTION` more.  The leases are extended by as much.
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
        self._token = checked_token(token)
        self._known_hosts: set[str] | None = set() if admit_hosts else None
        self._tls = server_context(tls)
        self._on_drop = on_drop
        self._on_pause = on_pause
        self.limits = limits = checked_part("limits", limits, ServerLimits)
        self.instance = random_bytes(16)
        self.keyspace = Keyspace(limits.keyspace)
        # Served by the connection, in parts.
        for op in (wire.CHECK, wire.LIST_KEYS, wire.MULTI_GET, wire.MULTI_SET):
            self.keyspace.handlers[op] = None
        self._handlers = list(self.keyspace.handlers)  # the plain dialect's
        self._dirty: list[ServerLink] = []
        self._is_flushing = False
        self._postponed: list[Callable[[], None]] = []
        self._has_later = False
        self.buffers = Buffers()
        self._connections: dict[Connection, None] = {}  # ordered
        self._acceptor = Acceptor(listening, self.open, self._has_room)
        self._connections_max = sys.maxsize
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_late = False
        self._all_gone: asyncio.Event | None = None

    def __repr__(self) -> str:
        state = f"on {self.endpoint}" if self._acceptor.sockets else "not listening"
        return f"<StoreServer {state}, {len(self._connections)} connections, {self.keyspace!r}>"

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
        if not self._acceptor.sockets:
            return f"{self._address[0] or '*'}:{self._address[1]}"
        return format_endpoint(self._acceptor.sockets[0].getsockname())

    @property
    def connection_count(self) -> int:
        """The number of open connections."""
        return len(self._connections)

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
        self.loop = asyncio.get_running_loop()
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
            await self.loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client has closed it already

    def _has_room(self) -> bool:
        return len(self._connections) + len(self._opening) < self._connections_max

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
        if self._timer is not None:
            self._timer.cancel()
        if not self._connections:
            return
        self._all_gone = asyncio.Event()
        for connection in list(self._connections):
            connection.close()
        try:
            await asyncio.wait_for(self._all_gone.wait(), _CLOSE_TIMEOUT)
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
            # connection_lost is called in the next iteration of the loop.
            await asyncio.wait_for(self._all_gone.wait(), _CLOSE_TIMEOUT)

    def _make_protocol(self) -> asyncio.Protocol:
        connection = Connection(self)
        if self._tls is None:
            return connection
        from elastic_aio.store.tls_transport import TlsTransport

        return TlsTransport(connection, self._tls.current())

    # For the connections: the `ConnectionServer`.

    def _now(self) -> float:
        """Return the clock of the leases, in seconds."""
        return self.loop.time()

    def _admit(self, connection: Connection) -> bool:
        """Register a new connection; return whether it may stay."""
        is_room = len(self._connections) < self.limits.connections or self._evict_stranger()
        self._connections[connection] = None
        return is_room and bool(self._acceptor.sockets)

    def _evict_stranger(self) -> bool:
        """Drop the oldest client in its handshake; return whether there was one."""
        for connection in self._connections:
            if connection.is_in_handshake and not connection.is_gone:
                connection.drop("made room for another client before it completed the handshake")
                return True
        return False

    def _forget(self, connection: Connection) -> None:
        """Unregister a connection that has ended."""
        self._connections.pop(connection, None)
        had_deadlines = bool(connection.leases or connection.watches)
        if self.keyspace.forget(connection, self._now()):
            self.loop.call_soon(self._forget, connection)
        self._flush()
        if had_deadlines:
            self._rearm()
        self._acceptor.resume()
        if self._all_gone is not None and not self._connections:
            self._all_gone.set()

    def _admit_host(self, host: str) -> None:
        """Serve torch's clients on a host, from which a client has proved the token."""
        if self._known_hosts is not None and host not in self._known_hosts:
            self._known_hosts.add(host)
            for connection in self._connections:
                connection.on_host_admitted()

    def _answer_proof(self, message: bytes, nonce: bytes | None) -> bytes | None:
        """Return this server's proof; None if `message` does not prove knowledge of the token.

        `message` is the client's nonce and its proof; `nonce` is this server's.
        """
        if self._token is None or nonce is None:
            return None
        transcript = self.instance + nonce + message[: wire.NONCE_SIZE]
        proof = message[wire.NONCE_SIZE :]
        if not wire.is_proof(proof, self._token, wire.CLIENT, transcript):
            return None
        return wire.token_proof(self._token, wire.SERVER, transcript)

    def _check_buffers(self) -> None:
        """Drop the client that holds the most bytes while all hold too many."""
        while self.buffers.size > self.limits.buffered:
            held = {connection: connection.held for connection in self._connections}
            most = max(held, key=held.__getitem__)
            most.drop("does not read its replies, or sends parts of requests, and holds the most")

    def _flush(self) -> None:
        """Write the notifications that operations queue on other connections, once a turn.

        What operations have left for later is carried out in the next iterations of the loop.
        """
        if self._dirty and not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self._flush_now)
        if (self._postponed or self.keyspace.work.later) and not self._has_later:
            self._has_later = True
            self.loop.call_soon(self._work_later)

    def _flush_now(self) -> None:
        self._is_flushing = False
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.flush()

    def _work_later(self) -> None:
        """Carry out some of what was left for later; when nothing is, serve who caused it."""
        self._has_later = False
        if not self.keyspace.work.step():
            postponed, self._postponed = self._postponed, []
            for proceed in postponed:
                proceed()
        self._flush()

    def _rearm(self) -> None:
        """Set the timer for the next deadline of a lease or of a lingering watch."""
        deadline = self.keyspace.next_deadline()
        if deadline is not None and self.keyspace.leases.has_any:
            deadline = min(deadline, self._now() + PAUSE_RESOLUTION)
        if self._timer is not None:
            # A timer that is too early does no harm, and one that is late measures a pause.
            is_late = self._timer_at < self._now()
            if deadline is not None and (is_late or self._timer_at <= deadline):
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._all_gone is None:
            # A deadline that has passed has been left for later, and measures no pause.
            self._set_timer(max(deadline, self._now()))

    def _set_timer(self, when: float) -> None:
        self._timer_at = when
        self._timer = self.loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._now()
        late = now - self._timer_at
        if late > PAUSE_RESOLUTION:
            # This process was suspended, and could not receive heartbeats.
            self.keyspace.leases.extend_all(late, now)
            if self._on_pause is not None:
                self._on_pause(late)
        if late > PAUSE_RESOLUTION or (late > _LATE and not self._is_late):
            # Heartbeats may still be in the sockets: let them be read first.
            self._is_late = True
            self._set_timer(now + _LATE)
            return
        self._is_late = False
        self.keyspace.expire(now)
        self._flush()
        self._rearm()
