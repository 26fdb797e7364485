"""The HTTP server with real sockets: every client is served or closed, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from elastic_aio import LaunchSpec, SpecError, StatusServer, launch
from elastic_aio.events import JobStarted
from elastic_aio.http import server as server_module
from elastic_aio.http.server import CONNECTIONS_MAX

DEADLINE_S = 30.0
GET = b"GET /healthz HTTP/1.1\r\n\r\n"

pytestmark = pytest.mark.both_loops


@pytest.fixture
async def server() -> AsyncIterator[StatusServer]:
    async with StatusServer("127.0.0.1:0") as running, asyncio.timeout(DEADLINE_S):
        yield running


async def connect(server: StatusServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=2**25)


async def ask(server: StatusServer, request: bytes = GET) -> bytes:
    """Send a request; return all of the answer."""
    reader, writer = await connect(server)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Wait until the server has closed the connection; return the beginning of what it sent."""
    received = b""
    try:
        while data := await reader.read(2**16):
            received = received or data
    except ConnectionError:
        pass  # it was closed with unread data
    return received[:13]


async def receive_all(sock: socket.socket) -> bytes:
    """Return what a socket receives before its peer closes or resets the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(sock, 2**20):
            received += data
    return bytes(received)


async def test_a_probe(server: StatusServer) -> None:
    assert (await ask(server)).startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"# EOF" in await ask(server, b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")


async def test_garbage(server: StatusServer) -> None:
    assert (await ask(server, os.urandom(500).replace(b"\r\n", b"") + b"\r\n\r\n")).startswith(
        b"HTTP/1.1 400 "
    )


async def test_a_client_that_breaks_off(server: StatusServer) -> None:
    reader, writer = await connect(server)
    writer.write(b"GET /hea")
    writer.write_eof()
    assert not await until_closed(reader)
    writer.close()
    assert await ask(server)


async def test_a_head_of_10_mb_is_not_kept(server: StatusServer) -> None:
    """The server closes it with most of it unread."""
    reader, writer = await connect(server)
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000)
    assert await until_closed(reader) in (b"HTTP/1.1 431 ", b"")
    writer.close()
    assert await ask(server)


async def test_a_head_that_is_too_long_has_an_answer(server: StatusServer) -> None:
    """Of a client that sends no more than the server reads."""
    answer = await ask(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 8200 + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_slow_client_is_closed(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE", 0.05)
    reader, writer = await connect(server)
    writer.write(GET[:5])
    assert not await until_closed(reader)
    writer.close()


async def test_a_client_that_never_reads_is_closed(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not take an answer of 16 MiB from the server."""
    monkeypatch.setattr(server_module, "PATIENCE", 0.2)
    server(JobStarted(
        entrypoint="x" * 2**24, nproc_per_node=1, nnodes="1", max_restarts=0, agent_pid=1
    ))  # fmt: skip
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        host, _, port = server.address.rpartition(":")
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, b"GET /status HTTP/1.1\r\n\r\n")
        while not server._connections:
            await asyncio.sleep(0)
        await asyncio.wait(list(server._connections))
        assert len(await receive_all(sock)) < 2**24
    assert (await ask(server)).startswith(b"HTTP/1.1 200 ")


async def test_slow_clients_do_not_keep_others_out(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more connections than the limit the oldest are closed."""
    monkeypatch.setattr(server_module, "PATIENCE", 10 * DEADLINE_S)
    opened = []
    for _ in range(CONNECTIONS_MAX + 5):
        reader, writer = await connect(server)
        writer.write(GET[:5])
        opened.append((reader, writer))
    assert not any([await until_closed(reader) for reader, _ in opened[:5]])
    assert (await ask(server)).startswith(b"HTTP/1.1 200 ")
    assert len(server._connections) <= CONNECTIONS_MAX
    for _, writer in opened:
        writer.close()


async def test_many_requests_at_once(server: StatusServer) -> None:
    answers = await asyncio.gather(*(ask(server) for _ in range(CONNECTIONS_MAX)))
    assert {answer[:15] for answer in answers} == {b"HTTP/1.1 200 OK"}


async def test_the_block_is_left_with_open_connections() -> None:
    async with asyncio.timeout(DEADLINE_S):
        async with StatusServer("localhost:0") as server:
            reader, writer = await connect(server)
            await ask(server)  # so that the server has accepted the one before
        assert not await until_closed(reader)
        writer.close()
        with pytest.raises(OSError, match=r"."):
            await connect(server)


async def test_a_port_in_use(server: StatusServer) -> None:
    match = f"address: cannot listen: address already in use .got '{server.address}'."
    with pytest.raises(SpecError, match=match):
        await StatusServer(server.address).__aenter__()


async def test_a_host_that_does_not_exist() -> None:
    with pytest.raises(SpecError, match="address: cannot listen: "):
        await StatusServer("no-host.invalid:9000").__aenter__()


@pytest.mark.parametrize("address", ["9000", "localhost", "localhost:x", "localhost:70000", ""])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(SpecError, match=r"address: must (be|have)"):
        StatusServer(address)


async def test_a_job_is_shown_until_it_ends(server: StatusServer) -> None:
    spec = LaunchSpec(["sh", "-c", "exit 0"], nproc_per_node=2)
    await launch(spec, listeners=[server])
    assert (await ask(server)).endswith(b"\r\n\r\nsucceeded\n")
    assert b'workers{state="succeeded"} 2\n' in await ask(server, b"GET /metrics HTTP/1.1\r\n\r\n")
