"""The HTTP server of a job: one request for each connection, all within limits.

It shares the event loop with the job, so every request costs little: a bounded head, one
short answer from memory, and a time limit.  Of too many connections the oldest is closed:
slow clients do not keep out one that sends its request at once.  A burst of connections does:
of those that arrive together, only the last are served.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from types import TracebackType
from typing import Final

from elastic_aio.aio import cancel_and_wait, create_task, running_loop
from elastic_aio.discovery.addresses import resolve
from elastic_aio.errors import SpecError
from elastic_aio.events import Event
from elastic_aio.http.responses import HEAD_MAX, response
from elastic_aio.spec.checks import format_host_port, parse_host_port
from elastic_aio.status import StatusTracker
from elastic_aio.store.sockets import bind_addresses

CONNECTIONS_MAX: Final = 32
"""Connections at a time."""

PATIENCE: Final = 5.0
"""Seconds for a client to send its request and to take the answer."""


class StatusServer:
    """Serves the state of a job over HTTP: an async context manager, and a listener.

    ::

        async with StatusServer("127.0.0.1:9000") as status:
            await launch(spec, listeners=[status])

    The pages are `/healthz` (200 while the job goes on, else 503), `/readyz` (200 while all
    workers of this node run, else 503), `/metrics` (OpenMetrics) and `/status` (JSON).  They
    are read-only and need no password: every client that reaches the port can read them.
    """

    def __init__(self, address: str) -> None:
        """Prepare a server; the port is bound when the block is entered.

        Args:
            address: `HOST:PORT`; port 0 takes a free one.

        Raises:
            SpecError: `address` is something else.
        """
        self._given = address
        self._host, self._port = parse_host_port("address", address, at_least=0)
        self._status = StatusTracker()
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    def __repr__(self) -> str:
        return f"<StatusServer at {self.address}, {len(self._connections)} connections>"

    def __call__(self, event: Event) -> None:
        """Take in an event of the job."""
        self._status(event)

    @property
    def address(self) -> str:
        """`HOST:PORT`, with the port that is bound."""
        return format_host_port(self._host, self._port)

    async def __aenter__(self) -> StatusServer:
        """Listen at the address.

        Raises:
            SpecError: that is not possible; the port is in use, for example.

        Cancellation: nothing listens.
        """
        running_loop()
        try:
            addresses = await resolve(self._host, self._port)
            sockets = bind_addresses(addresses, PATIENCE, is_listening=True)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise SpecError("address", self._given, f"cannot listen: {reason}") from None
        self._port = sockets[0].getsockname()[1]
        try:
            for sock in sockets:
                server = await asyncio.start_server(
                    self._accept, sock=sock, limit=HEAD_MAX, backlog=CONNECTIONS_MAX
                )
                self._servers.append(server)
        except BaseException:  # a cancellation
            for sock in sockets:
                sock.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the port and all connections; this takes no time."""
        for server in self._servers:
            server.close()
        if self._connections:
            await cancel_and_wait(list(self._connections))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            oldest.cancel()
            self._forget(oldest)
        task = create_task(self._serve(reader, writer), name="answer an HTTP request")
        self._connections[task] = writer
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before its first step runs nothing.
        if writer := self._connections.pop(task, None):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A client that breaks off or takes too long gets no answer.
        with suppress(OSError, EOFError):
            async with asyncio.timeout(PATIENCE):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = None
                # Without a buffer, `drain` waits until the kernel has all of the answer.
                writer.transport.set_write_buffer_limits(0)
                writer.write(response(head, self._status, time.time()))
                await writer.drain()
                writer.write_eof()
