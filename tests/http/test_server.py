"""The HTTP server with real sockets: every client is served or closed, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_aio import JobFailed, LaunchSpec, SpecError, StatusServer, launch
from elastic_aio.events import Event, JobFinished, JobStarted, StopRequested, WorkerStarted
from elastic_aio.http import server as server_module
from elastic_aio.http.app import LOG_MAX
from elastic_aio.http.server import CONNECTIONS_MAX
from elastic_aio.logs.trimmer import free_range
from elastic_aio.outcome import JobState
from tests.support.restarts import AT_ONCE

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
    assert b"# EOF" in await ask(server, b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n")


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


def get(path: str, *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", *fields, "", ""]).encode()


def publish(server: StatusServer, *events: Event) -> None:
    """Give events to a server as the agent of a job does, with their numbers."""
    for event in events:
        server(replace(event, seq=server._events.count))


def stop_requested(number: int, size: int = 0) -> StopRequested:
    return StopRequested(reason=f"number {number}" + "x" * size, plan="")


STARTED = JobStarted(entrypoint="x", nproc_per_node=1, nnodes="1", max_restarts=0, agent_pid=1)
FINISHED = JobFinished(state=JobState.SUCCEEDED, why="", exit_code=0, duration=1.0, restarts=0)


def messages(stream: bytes) -> list[tuple[int, str]]:
    """Return the ids and the kinds of the events in a stream."""
    found = []
    for text in stream.partition(b"\r\n\r\n")[2].split(b"\n\n"):
        if text.startswith(b"id: "):
            first, data = text.decode().split("\ndata: ")
            found.append((int(first[4:]), json.loads(data)["event"]))
    return found


async def test_a_stream_has_all_events_until_the_end(server: StatusServer) -> None:
    publish(server, STARTED)
    reader, writer = await connect(server)
    writer.write(get("/events"))
    head = await reader.readuntil(b"id: 0\n")
    assert b"Content-Type: text/event-stream\r\n" in head
    publish(server, stop_requested(1), FINISHED)
    rest = await reader.read()
    assert messages(head + rest) == [(0, "JobStarted"), (1, "StopRequested"), (2, "JobFinished")]
    writer.close()


async def test_a_stream_goes_on_where_it_was(server: StatusServer) -> None:
    """A browser that comes back after the end is sent away for good (204)."""
    publish(server, STARTED, stop_requested(1), FINISHED)
    assert messages(await ask(server, get("/events", "last-event-id: 1"))) == [(2, "JobFinished")]
    answer = await ask(server, get("/events", "Last-Event-ID: 2"))
    assert answer.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert b"Content-Length" not in answer
    assert len(messages(await ask(server, get("/events", "Last-Event-ID: x")))) == 3


async def test_a_stream_that_comes_too_late_has_a_gap(server: StatusServer) -> None:
    publish(server, *map(stop_requested, range(1005)), FINISHED)
    found = messages(await ask(server, get("/events")))
    assert found[0] == (5, "EventsMissed")
    assert (found[1], found[-1], len(found)) == ((6, "StopRequested"), (1005, "JobFinished"), 1001)


async def test_an_idle_stream_has_comments(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE", 0.05)
    reader, writer = await connect(server)
    writer.write(get("/events"))
    assert await reader.readuntil(b":\n\n:\n\n")
    writer.close()


async def test_the_end_of_a_client_ends_its_stream(server: StatusServer) -> None:
    reader, writer = await connect(server)
    writer.write(get("/events"))
    await reader.readuntil(b"retry: 2000\n\n")
    (task,) = server._connections
    writer.close()
    await asyncio.wait([task])
    assert not server._connections


async def test_a_stream_that_is_not_read_is_closed(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on meanwhile: the events are kept once, for all clients."""
    monkeypatch.setattr(server_module, "PATIENCE", 0.2)
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        host, _, port = server.address.rpartition(":")
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, get("/events"))
        while not server._connections:
            await asyncio.sleep(0)
        (task,) = server._connections
        publish(server, *(stop_requested(number, 2**16) for number in range(1000)))
        await asyncio.wait([task])
        assert len(await receive_all(sock)) < 1000 * 2**16
    assert (await ask(server)).startswith(b"HTTP/1.1 200 ")


async def test_logs(server: StatusServer, tmp_path: Path) -> None:
    """The last lines of the file of a rank; no path of a request is one of a file."""
    log = tmp_path / "stdout.log"
    log.write_text("".join(f"line {number}\n" for number in range(20_000)))
    publish(server, STARTED, WorkerStarted(rank=3, local_rank=0, pid=1, stdout_path=str(log)))
    head, _, body = (await ask(server, get("/logs/3/stdout"))).partition(b"\r\n\r\n")
    assert b"Content-Type: text/plain; charset=utf-8\r\n" in head
    assert b"X-Content-Type-Options: nosniff\r\n" in head
    assert body.startswith(b"line ")
    assert body.endswith(b"\nline 19999\n")
    assert LOG_MAX - 20 < len(body) <= LOG_MAX
    for path in ("/logs/3/stderr", "/logs/0/stdout", "/logs/3/../3/stdout", "/logs//etc/passwd"):
        assert (await ask(server, get(path))).startswith(b"HTTP/1.1 404 ")
    assert (await ask(server, get("/logs/7/stdout"))).endswith(
        b"\r\n\r\nno worker of this node has rank 7; it has: 3\n"
    )
    assert (await ask(server, get("/logs/3/stderr"))).endswith(
        b"\r\n\r\nstderr of rank 3 is in no file (see --tee, --redirects)\n"
    )
    log.unlink()
    assert b"the log was removed" in (await ask(server, get("/logs/3/stdout"))).lower()


async def test_the_end_of_a_log_whose_beginning_was_freed(
    server: StatusServer, tmp_path: Path
) -> None:
    """By rotation: what reads as zeros is left out."""
    log = tmp_path / "stdout.log"
    log.write_text("".join(f"line {number:05}\n" for number in range(1000)))
    with log.open("rb+") as file:
        free_range(file.fileno(), 0, 8192)
    publish(server, STARTED, WorkerStarted(rank=3, local_rank=0, pid=1, stdout_path=str(log)))
    body = (await ask(server, get("/logs/3/stdout"))).partition(b"\r\n\r\n")[2]
    assert body.startswith(b"line 00745\nline 00746\n")


async def test_a_disk_that_does_not_answer(
    server: StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few threads wait for it; further requests are refused at once, and others answered."""
    monkeypatch.setattr(server_module, "PATIENCE", 10 * DEADLINE_S)
    answers = threading.Event()

    def read_end(path: str, size: int) -> bytes:
        assert answers.wait(DEADLINE_S)
        return f"the last {size} bytes of {path}".encode()

    monkeypatch.setattr(server_module, "read_end", read_end)
    publish(server, STARTED, WorkerStarted(rank=0, local_rank=0, pid=1, stdout_path="/log"))
    waiting = [await connect(server) for _ in range(4)]
    for _, writer in waiting:
        writer.write(get("/logs/0/stdout"))
    while server._log_readers.acquire(blocking=False):
        server._log_readers.release()
        await asyncio.sleep(0)
    assert (await ask(server, get("/logs/0/stdout"))).startswith(b"HTTP/1.1 503 ")
    assert (await ask(server)).startswith(b"HTTP/1.1 200 ")
    answers.set()
    for reader, writer in waiting:
        assert (await reader.read()).endswith(f"the last {LOG_MAX} bytes of /log".encode())
        writer.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost", 200),
        ("LOCALHOST:80", 200),
        ("a.localhost:80", 200),
        ("127.0.0.1:9000", 200),
        ("[::1]:9000", 200),
        ("evil.example:9000", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_a_web_site_cannot_read_a_local_server(
    server: StatusServer, host: str, code: int
) -> None:
    """Its name may lead to 127.0.0.1 (DNS rebinding)."""
    assert (await ask(server, get("/status", f"Host: {host}"))).startswith(b"HTTP/1.1 %d " % code)


async def test_a_server_for_other_hosts_has_any_name() -> None:
    async with StatusServer("0.0.0.0:0") as server, asyncio.timeout(DEADLINE_S):
        answer = await ask(server, get("/status", "Host: node7.cluster:9000"))
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_the_page(server: StatusServer) -> None:
    """It loads nothing from elsewhere."""
    answer = await ask(server, get("/"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Type: text/html; charset=utf-8\r\n" in answer
    assert b"Content-Security-Policy: default-src 'none'; connect-src 'self';" in answer
    assert answer.rstrip().endswith(b"</script>")
    assert b"http://" not in answer
    assert b"innerHTML" not in answer


async def test_clients_that_do_not_read_do_not_slow_a_job(server: StatusServer) -> None:
    """The job restarts and ends while four streams take nothing; what they miss is not kept."""
    loop = asyncio.get_running_loop()
    host, _, port = server.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.setblocking(False)
            await loop.sock_connect(sock, (host, int(port)))
            await loop.sock_sendall(sock, get("/events"))
        name = "x" * 60_000  # in each event: more than the sockets take in all
        spec = LaunchSpec(["sh", "-c", "exit 1"], max_restarts=20, restart=AT_ONCE, run_id=name)
        with pytest.raises(JobFailed) as caught:
            await launch(spec, listeners=[server])
        assert caught.value.result.restarts == 20
        unsent = [one.transport.get_write_buffer_size() for one in server._connections.values()]
        assert max(unsent, default=0) < 100_000
