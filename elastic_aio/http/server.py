"""The HTTP server of a job: one request for each connection, all within limits.

It shares the event loop with the job, so every request costs little: a bounded head, one
short answer from memory, and a time limit.  Of too many connections the oldest is closed:
slow clients do not keep out one that sends its request at once.  A burst of connections does:
of those that arrive together, only the last are served.

A stream of events has a position in the kept events and no queue, so that a client which
reads slowly costs no memory; one that reads nothing for `PATIENCE` seconds is closed.  Log files
are read off the loop, a few at a time: a disk may not answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

from elastic_aio.aio import (
    EventHistory,
    EventReader,
    cancel_and_wait,
    create_task,
    read_file,
    run_in_thread,
    running_loop,
)
from elastic_aio.discovery.network import is_loopback, resolve
from elastic_aio.errors import SpecError
from elastic_aio.events import Event, EventsMissed, JobFinished
from elastic_aio.http.app import (
    HEAD_MAX,
    LOG_MAX,
    STREAM_ALIVE,
    STREAM_HEAD,
    HttpRequest,
    answer,
    log_path,
    parse_request,
    response,
    server_sent,
)
from elastic_aio.logs.log_file import read_end
from elastic_aio.sockets import bind_addresses
from elastic_aio.spec.checks import format_host_port, parse_host_port
from elastic_aio.status import StatusTracker
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    from elastic_aio.agent.agent import Agent

CONNECTIONS_MAX: Final = 32
"""Connections at a time."""

PATIENCE: Final = 5.0
"""Seconds for a client to send its request and to take the answer, or a part of a stream."""

KEEP_ALIVE: Final = 15.0
"""Seconds without an event after which a stream has a comment."""

_EVENTS_KEPT: Final = 1_000
_READERS_MAX: Final = 4
"""Log files that are read at a time."""


class StatusServer:
    """Serves the state of a job over HTTP: an async context manager, and a listener.

    ::

        async with StatusServer("127.0.0.1:9000") as status:
            await launch(spec, listeners=[status])

    The pages are `/` (for people), `/healthz` (200 while the job goes on, else 503), `/readyz`
    (200 while all workers of this node run, else 503), `/metrics` (OpenMetrics), `/status`
    (JSON), `/events` (server-sent events) and `/logs/RANK/stdout` or `stderr` (the end of a log).
    They are read-only and need no password: every client that reaches the port can read them.
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
        self._events: EventHistory[Event] = EventHistory(_EVENTS_KEPT, _missed)
        self._page = b""
        self._source: Callable[[], Agent | None] = lambda: None
        self._is_loopback = False
        self._log_readers = threading.BoundedSemaphore(_READERS_MAX)

    def __repr__(self) -> str:
        return f"<StatusServer at {self.address}, {len(self._connections)} connections>"

    def use_agent(self, source: Callable[[], Agent | None]) -> None:
        """Take from the agent what no event says: what workers have used and reported."""
        self._source = source

    def __call__(self, event: Event) -> None:
        """Take in an event of the job."""
        self._status(event)
        self._events.append(event)
        if isinstance(event, JobFinished):
            self._events.close()

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
            reason = error_reason(error)
            raise SpecError("address", self._given, f"cannot listen: {reason}") from None
        self._port = sockets[0].getsockname()[1]
        self._is_loopback = all(is_loopback(sock.getsockname()[0]) for sock in sockets)
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
            # Without a buffer, `drain` waits until the kernel has all of the answer.
            writer.transport.set_write_buffer_limits(0)
            async with asyncio.timeout(PATIENCE):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                except asyncio.LimitOverrunError:
                    head = None
                request = parse_request(head, is_loopback=self._is_loopback)
                if isinstance(request, bytes):
                    whole = request
                elif request.path == "/events" and not request.is_head:
                    whole = None
                else:
                    whole = await self._answer(request)
                if whole is not None:
                    await _send(writer, whole)
            if whole is None and isinstance(request, HttpRequest):
                await self._stream(request, reader, writer)
            writer.write_eof()

    async def _answer(self, request: HttpRequest) -> bytes:
        agent = self._source()
        if (path := log_path(request.path, self._status)) is not None:
            if agent is not None:
                agent.make_log_files()
            return await self._read_log(path, request)
        if request.path == "/" and not self._page:
            self._page = await read_file(os.path.join(os.path.dirname(__file__), "page.html"))
        workers = None if agent is None else agent.status().workers
        return response(request, self._status, time.time(), self._page, workers)

    async def _read_log(self, path: str, request: HttpRequest) -> bytes:
        if not self._log_readers.acquire(blocking=False):
            return answer(503, "too many log files are being read\n")
        try:
            end = await run_in_thread(_read_end, path, self._log_readers, daemon=True)
        except FileNotFoundError:
            return answer(404, "nothing was written, or the log was removed\n")
        except OSError as error:
            return answer(404, f"the log cannot be read: {error.strerror}\n")
        return answer(200, end, has_body=not request.is_head)

    async def _stream(
        self, request: HttpRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send events until the job ends or the client closes the connection."""
        if self._events.is_closed and request.last_event + 1 >= self._events.count:
            await _send(writer, answer(204, b""))  # a browser does not come back
            return
        await _send(writer, STREAM_HEAD)
        events = self._events.read(request.last_event + 1)
        sending = create_task(_send_events(events, writer), name="stream events")
        closed = create_task(reader.read(1), name="wait for the client")
        try:
            await asyncio.wait([sending, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait([sending, closed])


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    async with asyncio.timeout(PATIENCE):
        writer.write(data)
        await writer.drain()


async def _send_events(events: EventReader[Event], writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, StopAsyncIteration):  # a TimeoutError is an OSError
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    event = await anext(events)
            except TimeoutError:
                await _send(writer, STREAM_ALIVE)
            else:
                await _send(writer, server_sent(event))


def _read_end(path: str, readers: threading.BoundedSemaphore) -> bytes:
    """Return the end of a file, from the beginning of a line; called in a thread."""
    try:
        return read_end(path, LOG_MAX)
    finally:
        readers.release()


def _missed(count: int, following: int) -> Event:
    return EventsMissed(seq=following - 1, time=time.time(), count=count)
