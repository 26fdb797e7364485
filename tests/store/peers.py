"""What the suites of the store share: raw clients, servers with limits, and other processes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import Dropped, ServerLimits, StoreServer, wire
from elastic_aio.store.wire import OPENING, encode
from tests.support.cli import environment

MIB = 1 << 20


class Peer:
    """A client that sends and receives bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, count: int) -> bytes:
        async with asyncio.timeout(30):
            return await self.reader.readexactly(count)

    async def receive_tagged(self) -> tuple[int, int, bytes]:
        """Return tag, status and payload of the next reply in the tagged dialect."""
        tag, status, size = struct.unpack("<IBI", await self.receive(9))
        return tag, status, await self.receive(size)

    async def ended(self) -> bytes:
        """Wait for the end of the connection; return what came before."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
            return b""

    async def settled(self) -> None:
        """Wait until the server has served what was sent."""
        self.send(encode(wire.PING, b"", 7))
        assert await self.receive(4) == struct.pack("<I", 7)

    async def enter_tagged(self) -> None:
        """Enter the tagged dialect."""
        self.send(encode(wire.HELLO, b"", wire.VERSION))
        await self.receive(struct.calcsize("<16s16s?"))

    def pause(self) -> None:
        """Read nothing more from the server."""
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport

    def resume(self) -> None:
        """Read again."""
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]  # a read transport


@contextlib.asynccontextmanager
async def connected(
    server: StoreServer, opening: bytes = OPENING, context: ssl.SSLContext | None = None
) -> AsyncIterator[Peer]:
    """Connect, over asyncio's own TLS if there is a `context`, and send the opening."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    writer.write(opening)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def serving(
    dropped: list[Dropped],
    *,
    token: str | None = None,
    admit_hosts: bool = False,
    tls: TlsSpec | None = None,
    **limits: object,
) -> StoreServer:
    """Return a server, which serves when it is entered."""
    return StoreServer(
        "127.0.0.1",
        token=token,
        admit_hosts=admit_hosts,
        tls=tls,
        limits=ServerLimits(**limits),  # type: ignore[arg-type]  # checked by each test
        on_drop=dropped.append,
    )


@contextlib.asynccontextmanager
async def program(
    source: str, *args: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Run a program of Python, which is killed if it does not end with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source, *args),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


def note_sizes(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    size_of: Callable[..., int] = lambda *args: len(args[-1]),
) -> list[int]:
    """Note the size of the last argument at each call of a function."""
    sizes: list[int] = []
    function = getattr(owner, name)

    def note(*args: Any) -> Any:
        sizes.append(size_of(*args))
        return function(*args)

    patch.setattr(owner, name, note)
    return sizes
