"""The store's server: a TCP shell around a keyspace, for torch's clients and for ours.

One connection can only harm itself.  What breaks the protocol, announces absurd
lengths, leaves a request unfinished or does not read its replies is closed, with
one call of `on_drop`, and what it has sent so far is freed.  While a peer does not
read, its requests are not read either.

An open listener serves everybody.  A listener with a token serves only our own
clients that have it; torch's clients have no way to show one.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

from elastic_aio.aio import see_through
from elastic_aio.errors import SpecError
from elastic_aio.store import replies, wire
from elastic_aio.store.connection import Connection, Dropped, ServerLimits
from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.listen import bind_listeners, shown_endpoint

__all__ = ["StoreServer"]

_TICK: Final = 1.0
"""Seconds: while there are leases, the timer comes this often, to notice a pause of our own."""

_AWAY: Final = 1.0
"""A timer this late (seconds) means that we were stopped ourselves, not the holders."""

_LATE: Final = 0.05
"""A timer this late (seconds) may have come before what is in the sockets was read."""

_CLOSE_TIMEOUT: Final = 1.0
"""Seconds for the last replies to leave when the server closes."""


class StoreServer:
    """A store that others connect to.

    An async context manager: inside it, the port is bound and served.  Closing ends
    all connections; the keys are gone with the server.
    """

    def __init__(
        self,
        host: str | None = "localhost",
        port: int = 0,
        *,
        token: str | None = None,
        limits: ServerLimits | None = None,
        on_drop: Callable[[Dropped], None] | None = None,
        listening: Sequence[socket.socket] = (),
        on_pause: Callable[[float], None] | None = None,
    ) -> None:
        """Choose where to listen; nothing is bound yet.

        Args:
            host: a name or address; each of its addresses is served; None: all
                interfaces, IPv4 and IPv6.
            port: 0 takes a free one, told by `port` once started.
            token: serve only our own clients, and only those that know it.
            limits: what peers may do; None: the defaults.
            on_drop: called with each connection that is closed for what it did.
            listening: sockets that are bound already, in place of `host` and `port`;
                they are the server's from now on.
            on_pause: called, while there are leases, when this process has been away (it
                was stopped, or the machine was), with the seconds that it was away for
                at least; it may have been one more.  No lease has ended meanwhile.
        """
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 65536:
            raise SpecError("port", port, "must be a whole number from 0 to 65535")
        if token is not None and not token:
            raise SpecError("token", token, "must not be empty")
        self._host = host
        self._port = port
        self._token = token
        self._on_drop = on_drop
        self._on_pause = on_pause
        self.limits = limits = limits or ServerLimits()
        self.instance = secrets.token_bytes(16)
        self.keyspace = Keyspace(limits.keyspace)
        self.simple = list(self.keyspace.simple)
        self.simple[wire.CHECK] = self._check
        self.touched: list[Connection] = []
        self._partial = 0
        self._connections: set[Connection] = set()
        self._given = list(listening)
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_late = False
        self._all_gone: asyncio.Event | None = None

    def __repr__(self) -> str:
        state = f"on {self.endpoint}" if self._sockets else "not listening"
        return f"<StoreServer {state}, {len(self._connections)} connections, {self.keyspace!r}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def port(self) -> int:
        """The port that is bound; before `start`, the one asked for."""
        return int(self._sockets[0].getsockname()[1]) if self._sockets else self._port

    @property
    def endpoint(self) -> str:
        """`host:port` of the first address that is served."""
        if not self._sockets:
            return f"{self._host or '*'}:{self._port}"
        return shown_endpoint(self._sockets[0].getsockname())

    @property
    def needs_token(self) -> bool:
        """Whether only clients with the token are served."""
        return self._token is not None

    @property
    def connection_count(self) -> int:
        """How many connections are open."""
        return len(self._connections)

    async def start(self) -> None:
        """Bind the port and serve it; on return clients can connect.

        Raises:
            SurroundingsError: the port or the host cannot be had.
        """
        self.loop = asyncio.get_running_loop()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Some files are left for the rest of the program.
        most = files - 64 if files != resource.RLIM_INFINITY else self.limits.connections
        self._most = min(self.limits.connections, max(1, most))
        self._sockets = self._given or bind_listeners(self._host, self._port, self.limits.silence)
        try:
            for sock in self._sockets:
                server = await self.loop.create_server(
                    lambda: Connection(self),
                    sock=sock,
                    backlog=socket.SOMAXCONN,
                    start_serving=False,
                )
                # Known before the next wait: a cancellation there must find it.
                self._servers.append(server)
                await server.start_serving()
        except BaseException:  # a cancellation too: no listener stays open
            self._stop_listening()
            raise

    async def aclose(self) -> None:
        """Stop listening and end all connections, after the replies under way.

        It takes about a second at most; a cancellation is raised afterwards.
        """
        if self._sockets:
            await see_through(self._close)

    async def _close(self) -> None:
        self._stop_listening()
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
            # The transports tell it in the next turn of the loop.
            await asyncio.wait_for(self._all_gone.wait(), _CLOSE_TIMEOUT)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        for sock in self._sockets:
            sock.close()
        self._servers.clear()
        self._sockets.clear()

    # For the connections.

    def now(self) -> float:
        """Return the time by which leases are measured."""
        return self.loop.time()

    def admit(self, connection: Connection) -> bool:
        """Count a new connection; tell whether it may stay."""
        is_room = len(self._connections) < self._most
        self._connections.add(connection)
        return is_room and self._all_gone is None

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        had_times = bool(connection.leases or connection.watches)
        self.keyspace.forget(connection, self.now())
        self.flush()
        if had_times:
            self.rearm()
        if self._all_gone is not None and not self._connections:
            self._all_gone.set()

    def accepts(self, code: bytes, nonce: bytes | None) -> bool:
        """Tell, in constant time, whether `code` proves knowledge of the token."""
        if self._token is None or nonce is None:
            return False
        import hmac  # tokens are rare, and it takes a millisecond

        return hmac.compare_digest(code, wire.token_code(self._token, nonce))

    def account(self, more: int) -> bool:
        """Count bytes of unfinished requests; tell whether there is room for them."""
        if more > 0 and self._partial + more > self.limits.partial:
            return False
        self._partial += more
        return True

    def report(self, dropped: Dropped) -> None:
        """Tell whoever asked to be told."""
        if self._on_drop is not None:
            self._on_drop(dropped)

    def flush(self) -> None:
        """Write what the last operation had to tell other connections."""
        if self.touched:
            touched, self.touched = self.touched, []
            for connection in touched:
                connection.flush()

    def rearm(self) -> None:
        """Set the timer to what ends next: a lease, or the memory of a watch."""
        deadline = self.keyspace.next_deadline()
        if deadline is not None and self.keyspace.leases.has_any:
            deadline = min(deadline, self.now() + _TICK)
        if self._timer is not None:
            # One that is too early does no harm: it only looks.
            if deadline is not None and self._timer_at <= deadline:
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._all_gone is None:
            self._set_timer(deadline)

    def _set_timer(self, when: float) -> None:
        self._timer_at = when
        self._timer = self.loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self.now()
        late = now - self._timer_at
        if late > _AWAY:
            self._excuse(late, now)
        elif late > _LATE and not self._is_late:
            # What the holders have sent meanwhile is still in the sockets.
            self._is_late = True
            self._set_timer(now + _LATE)
            return
        self._is_late = False
        self.keyspace.expire(now)
        self.flush()
        self.rearm()

    def _excuse(self, late: float, now: float) -> None:
        """Let no lease end for a silence that was our own.

        Not even after what is in the sockets was read: the network of a machine that
        has been paused takes seconds to bring the rest.
        """
        self.keyspace.leases.begin_anew(now)
        if self._on_pause is not None:
            self._on_pause(late)

    def _check(self, key: bytes, keys: Any) -> int:
        """Answer a plain CHECK; the reserved key tells our clients who we are."""
        if keys == (wire.RESERVED_KEY,):
            return replies.READY
        return self.keyspace.check(key, keys)
