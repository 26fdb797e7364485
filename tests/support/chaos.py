"""A TCP proxy that delays, stalls and cuts connections on demand."""

from __future__ import annotations

import asyncio
from typing import Self, cast

from elastic_aio.sockets import discard_unsent


class _Side(asyncio.Protocol):
    """One half of a proxied connection; what it receives goes to `other`."""

    def __init__(self, proxy: ChaosProxy, *, is_client: bool) -> None:
        self.proxy = proxy
        self.is_client = is_client
        self.other: _Side | None = None
        self.transport: asyncio.Transport | None = None
        self.pending: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self.is_client:
            self.proxy.accept(self)

    def data_received(self, data: bytes) -> None:
        self.proxy.on_data(self, data)

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.sides.discard(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()

    def send(self, data: bytes) -> None:
        if self.transport is None:
            self.pending.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)


class ChaosProxy:
    """A proxy between clients and the server on `port`.

    `sent` and `received` are the segments that clients sent and received, in order.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay = 0.0
        self.is_stalled = False
        self.is_refusing = False
        self.is_dropping_replies = False
        self.is_dropping_requests = False
        self.sides: set[_Side] = set()
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.loop = asyncio.get_running_loop()
        self.server = await self.loop.create_server(
            lambda: _Side(self, is_client=True), "127.0.0.1", 0
        )
        self.port = int(self.server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Abort every connection; an end in order means to a store that a process has ended."""
        for side in list(self.sides):
            if side.transport is not None:
                side.transport.abort()

    def reset(self) -> None:
        """Reset every connection, as the network does: the processes at its ends may live."""
        for side in self.sides:
            if side.transport is not None:
                discard_unsent(side.transport)
        self.cut()

    def accept(self, client: _Side) -> None:
        if self.is_refusing:
            assert client.transport is not None
            client.transport.abort()
            return
        self.connections += 1
        self.sides.add(client)
        task = self.loop.create_task(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: _Side) -> None:
        server = _Side(self, is_client=False)
        client.other, server.other = server, client
        try:
            await self.loop.create_connection(lambda: server, "127.0.0.1", self.target)
        except OSError:
            if client.transport is not None:
                client.transport.abort()
            return
        if client not in self.sides and server.transport is not None:
            server.transport.abort()
            return
        self.sides.add(server)
        for data in server.pending:
            server.send(data)

    def on_data(self, side: _Side, data: bytes) -> None:
        (self.sent if side.is_client else self.received).append(data)
        if self.is_stalled or (
            self.is_dropping_requests if side.is_client else self.is_dropping_replies
        ):
            return
        if side.other is None:
            return
        if self.delay:
            self.loop.call_later(self.delay, side.other.send, data)
        else:
            side.other.send(data)
