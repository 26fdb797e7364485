"""The connections of an ASGI app: Hypercorn serves each of them, within limits.

They share the event loop with the job, so every request costs little: a bounded head, one short
answer, and a time limit.  Of too many connections the oldest is closed, so slow clients do not keep
out a client that sends its request at once.  A burst of connections does: of connections that
arrive together, only the last are served.

Hypercorn limits neither the number of connections nor the time that a client takes to read, and
its `serve` keeps its sockets to itself.  So the connections are accepted here.  It would also speak
HTTP/2, of which a client can send thousands of frames at once, for seconds of the loop: it gets
nothing but the head of a request of HTTP/1 that asks for no other protocol.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Sequence
from typing import Any, Final

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from starlette.types import ASGIApp, Message

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.sockets import Acceptor

CONNECTIONS_MAX: Final = 32
"""Connections at a time."""

HEAD_MAX: Final = 8192
"""Bytes of the head of a request."""

_CLOSE_S: Final = 0.25
"""Seconds for the ends of streams when the job is over."""

_HTTP_1: Final = re.compile(rb"[^\n]* HTTP/1\.\d\r?\n")
_UPGRADE: Final = re.compile(rb"^upgrade[^\n]*\n", re.IGNORECASE | re.MULTILINE)


class AsgiConnections:
    """Serves an ASGI app on sockets that listen: one request for each connection."""

    def __init__(self, app: ASGIApp, patience: float) -> None:
        """Prepare; nothing is accepted before `listen`.

        `patience` is the seconds for a client to send its request and to take the answer; of a
        stream, to take each part.
        """
        self._app = app
        self._patience = patience
        self._acceptor = Acceptor((), self._on_connection)
        self._tasks: set[asyncio.Task[None]] = set()
        self._streams: set[asyncio.Task[None]] = set()  # those that send parts
        self._open: dict[asyncio.Task[None], asyncio.WriteTransport | None] = {}  # not ended
        self._config = config = Config()
        config.errorlog = logging.getLogger(__name__)
        config.h11_max_incomplete_size = HEAD_MAX
        config.h2_max_concurrent_streams = 1
        config.include_server_header = False
        config.keep_alive_max_requests = 1
        config.keep_alive_timeout = patience
        self._context = WorkerContext(None)

    def __len__(self) -> int:
        return len(self._open)

    def listen(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections; the sockets are closed with this object."""
        self._acceptor = Acceptor(sockets, self._on_connection)
        self._acceptor.start()

    async def aclose(self) -> None:
        """Close the sockets and all connections; streams have a moment for their last parts.

        Cancellation: the connections are closed at once.
        """
        self._acceptor.close()
        try:
            if self._streams:
                await asyncio.wait(self._streams, timeout=_CLOSE_S)
        finally:
            for task in list(self._open):
                self._end(task)
            await cancel_and_wait(list(self._tasks))

    def _on_connection(self, connection: socket.socket) -> None:
        if len(self._open) >= CONNECTIONS_MAX:
            self._end(next(iter(self._open)))
        task = create_task(self._serve(connection), name="answer an HTTP request")
        self._open[task] = None
        self._tasks.add(task)
        task.add_done_callback(self._end)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._streams.discard)
        task.add_done_callback(lambda _: connection.close())  # it may not even have begun

    def _end(self, task: asyncio.Task[None]) -> None:
        # Aborted first: Hypercorn waits until a transport that it closes has sent all.
        if transport := self._open.pop(task, None):
            transport.abort()
        task.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_MAX)
        self._open[task] = writer.transport
        # Without a buffer, `drain` waits until the kernel has all of the answer.
        writer.transport.set_write_buffer_limits(0)
        whole = loop.call_later(self._patience, self._end, task)

        # `Any`: Hypercorn and Starlette have types of their own for one protocol.
        async def app(scope: Any, receive: Any, send: Any) -> None:
            async def send_in_time(message: Message) -> None:
                if message.get("more_body"):
                    whole.cancel()  # a stream takes its time, but for each part
                    self._streams.add(task)
                part = loop.call_later(self._patience, self._end, task)
                try:
                    await send(message)
                finally:
                    part.cancel()

            await self._app(scope, receive, send_in_time)

        try:
            if isinstance(request := await _read_head(reader), _HeadFirst):
                served: Any = request
                app_of = ASGIWrapper(app)
                await TCPServer(app_of, loop, self._config, self._context, {}, served, writer)
            else:
                writer.write(request)
                await writer.drain()
                writer.write_eof()
        except (OSError, EOFError):
            pass  # the client has broken off
        finally:
            whole.cancel()
            writer.close()


class _HeadFirst:
    """What Hypercorn reads of a client: the head of a request, and then what follows it."""

    def __init__(self, head: bytes, rest: asyncio.StreamReader) -> None:
        self._head = head
        self._rest = rest

    def at_eof(self) -> bool:
        return not self._head and self._rest.at_eof()

    async def read(self, most: int) -> bytes:
        head, self._head = self._head, b""
        return head or await self._rest.read(most)


async def _read_head(reader: asyncio.StreamReader) -> _HeadFirst | bytes:
    """Read the head of a request; return the answer to one that is refused."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        problem = f"the head of a request has at most {HEAD_MAX} bytes"
        return _refusal("431 Request Header Fields Too Large", problem)
    if _HTTP_1.match(head) is None:
        return _refusal("400 Bad Request", "not a request of HTTP/1.1")
    return _HeadFirst(_UPGRADE.sub(b"", head), reader)


def _refusal(status: str, problem: str) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(problem) + 1}\r\nConnection: close\r\n\r\n{problem}\n"
    ).encode()
