"""The HTTP server with real sockets: every client is served or closed, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic_aio import JobFailed, LaunchSpec, SpecError, StatusServer, launch
from elastic_aio.events import Event, JobFinished, JobStarted, StopRequested
from elastic_aio.http import app as app_module
from elastic_aio.http import server as server_module
from elastic_aio.http.connections import CONNECTIONS_MAX, HEAD_MAX
from elastic_aio.outcome import JobState
from tests.support.children import DEADLINE_S, until
from tests.support.restarts import AT_ONCE

NEVER = 10 * DEADLINE_S
"""Seconds that no test waits."""

pytestmark = pytest.mark.both_loops


@asynccontextmanager
async def serving(
    address: str = "127.0.0.1:0", *, patience: float = 5.0, keep_alive: float = 15.0
) -> AsyncIterator[StatusServer]:
    async with (
        StatusServer(address, patience=patience, keep_alive=keep_alive) as running,
        asyncio.timeout(DEADLINE_S),
    ):
        yield running


@pytest.fixture
async def server() -> AsyncIterator[StatusServer]:
    async with serving() as running:
        yield running


def get(path: str, *fields: str) -> bytes:
    """Return a request; the answer to one of this version has no chunks."""
    return "\r\n".join([f"GET {path} HTTP/1.0", "Host: localhost", *fields, "", ""]).encode()


GET = get("/healthz")


async def connect(server: StatusServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=2**25)


def has_received(sock: socket.socket) -> bool:
    """Whether a socket has bytes, or its connection was reset."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@asynccontextmanager
async def unread(server: StatusServer, request: bytes) -> AsyncIterator[socket.socket]:
    """Send a request, of whose answer only the kernel takes a part."""
    loop = asyncio.get_running_loop()
    host, _, port = server.address.rpartition(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, request)
        await until(lambda: has_received(sock))
        yield sock


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


async def received_by(sock: socket.socket) -> int:
    """Return how many bytes a socket receives before its peer closes or resets the connection."""
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(sock, 2**20):
            received += len(data)
    return received


async def until_no_connection(server: StatusServer) -> None:
    await until(lambda: "0 connections" in repr(server))


def publish(server: StatusServer, *events: Event) -> None:
    """Give events to a server as the agent of a job does, with their numbers."""
    for number, event in enumerate(events):
        server(replace(event, seq=number))


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


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (GET, 200),
        (b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: localhost:1\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),  # without a host: RFC 9112, 3.2
        (b"GET /no HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"POST /status HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET /status\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 \xff\r\n\r\n", 400),
        (b"\r\n\r\n\r\n", 400),
        (os.urandom(500).replace(b"\n", b"") + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 8200, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 8200 + b"\r\n\r\n", 431),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
async def test_codes(server: StatusServer, request_: bytes, code: int) -> None:
    """The connection ends with the answer."""
    assert (await ask(server, request_)).startswith(b"HTTP/1.1 %d " % code)


@given(st.lists(st.binary(max_size=HEAD_MAX), min_size=1, max_size=8))
def test_every_request_has_an_answer(heads: list[bytes]) -> None:
    """Whatever its head has; the connection ends with the answer."""

    async def send_all() -> list[bytes]:
        async with serving() as server:
            return [await ask(server, head + b"\r\n\r\n") for head in heads]

    assert all(answer.startswith(b"HTTP/1.") for answer in asyncio.run(send_all()))


async def test_a_client_of_a_library(server: StatusServer) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{server.address}/healthz")
    assert (answer.status_code, answer.text) == (200, "starting\n")
    assert answer.http_version == "HTTP/1.1"


async def test_a_client_that_upgrades_is_answered(server: StatusServer) -> None:
    for protocol in "h2c", "websocket":
        fields = (
            f"Connection: upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AA\r\n"
        )
        request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % fields.encode()
        assert (await ask(server, request)).startswith(b"HTTP/1.1 200 ")


async def test_frames_of_http_2_do_not_hold_the_loop(server: StatusServer) -> None:
    """A client can send thousands of them at once."""
    opened = [await connect(server) for _ in range(CONNECTIONS_MAX)]
    async with asyncio.timeout(2):
        for _, writer in opened:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, *[0] * 5]) * 7000)
        for reader, writer in opened:
            assert await until_closed(reader) in (b"HTTP/1.1 400 ", b"")
            writer.close()


async def test_head_has_no_body(server: StatusServer) -> None:
    """And the head of the answer to GET."""
    fields = {}
    for method in (b"GET", b"HEAD"):
        answer = await ask(server, GET.replace(b"GET", method))
        head, _, body = answer.partition(b"\r\n\r\n")
        fields[method] = {line for line in head.split(b"\r\n") if b"date" not in line.lower()}
    assert body == b""
    assert fields[b"GET"] == fields[b"HEAD"]


async def test_a_client_that_breaks_off(server: StatusServer) -> None:
    reader, writer = await connect(server)
    writer.write(b"GET /hea")
    writer.write_eof()
    assert await until_closed(reader) in (b"HTTP/1.1 400 ", b"")
    writer.close()
    assert await ask(server)
    await until_no_connection(server)


async def test_a_head_of_10_mb_is_not_kept(server: StatusServer) -> None:
    """The server closes it with most of it unread."""
    reader, writer = await connect(server)
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000)
    assert await until_closed(reader) in (b"HTTP/1.1 431 ", b"")
    writer.close()
    assert await ask(server)


@pytest.mark.parametrize("request_", [GET[:5], b""], ids=["half", "none"])
async def test_a_slow_client_is_closed(request_: bytes) -> None:
    async with serving(patience=0.05) as server:
        reader, writer = await connect(server)
        writer.write(request_)
        assert b"HTTP" not in await until_closed(reader)
        writer.close()
        await until_no_connection(server)


async def test_a_client_that_never_reads_is_closed() -> None:
    """The kernel does not take an answer of 16 MiB from the server."""
    async with serving(patience=0.2) as server:
        publish(server, replace(STARTED, entrypoint="x" * 2**24))
        async with unread(server, get("/status")) as sock:
            await until_no_connection(server)
            assert await received_by(sock) < 2**24
        assert (await ask(server)).startswith(b"HTTP/1.1 200 ")


async def test_slow_clients_do_not_keep_others_out() -> None:
    """Of more connections than the limit the oldest are closed."""
    async with serving(patience=NEVER) as server:
        opened = []
        for _ in range(CONNECTIONS_MAX + 5):
            reader, writer = await connect(server)
            writer.write(GET[:5])
            opened.append((reader, writer))
        assert not any([await until_closed(reader) for reader, _ in opened[:5]])
        assert (await ask(server)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: f"{CONNECTIONS_MAX - 1} connections" in repr(server))
        for _, writer in opened:
            writer.close()


async def test_many_requests_at_once(server: StatusServer) -> None:
    answers = await asyncio.gather(*(ask(server) for _ in range(CONNECTIONS_MAX)))
    assert {answer[:13] for answer in answers} == {b"HTTP/1.1 200 "}


async def test_the_block_is_left_with_open_connections() -> None:
    """One waits for a request, and one is a stream."""
    async with serving("localhost:0", patience=NEVER) as server:
        reader, writer = await connect(server)
        streamed, stream = await connect(server)
        stream.write(get("/events"))
        await streamed.readuntil(b"retry: 2000\n\n")
        await ask(server)  # so that the server has accepted the one before
    assert not await until_closed(reader)
    assert not await until_closed(streamed)
    for one in writer, stream:
        one.close()
    with pytest.raises(OSError, match=r"."):
        await connect(server)


async def test_an_idle_server_does_not_wake_up(server: StatusServer) -> None:
    """A client follows the events."""
    reader, writer = await connect(server)
    writer.write(get("/events"))
    await reader.readuntil(b"retry: 2000\n\n")
    # The loop gives up the processor once for each time it waits.
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    await asyncio.sleep(0.3)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 5
    writer.close()


async def test_an_address_that_cannot_be_used(server: StatusServer) -> None:
    match = f"address: cannot listen: address already in use .got '{server.address}'."
    with pytest.raises(SpecError, match=match):
        await StatusServer(server.address).__aenter__()
    with pytest.raises(SpecError, match="address: cannot listen: "):
        await StatusServer("no-host.invalid:9000").__aenter__()


@pytest.mark.parametrize("address", ["9000", "localhost", "localhost:x", "localhost:70000", ""])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(SpecError, match=r"address: must (be|have)"):
        StatusServer(address)


@pytest.mark.parametrize("missing", ["starlette", "hypercorn"])
def test_the_extra_is_named_where_it_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "find_spec", lambda name: None if name == missing else 1)
    with pytest.raises(SpecError) as caught:
        StatusServer("localhost:0")
    problem = "needs the extra http: pip install 'elastic_aio[http]'"
    assert str(caught.value) == f"address: {problem} (got 'localhost:0')"


async def test_a_job_is_shown_until_it_ends(server: StatusServer) -> None:
    spec = LaunchSpec(["sh", "-c", "exit 0"], nproc_per_node=2)
    await launch(spec, listeners=[server])
    assert (await ask(server)).endswith(b"\r\n\r\nsucceeded\n")
    assert b'workers{state="succeeded"} 2\n' in await ask(server, get("/metrics"))


async def test_a_stream_has_all_events_until_the_end(server: StatusServer) -> None:
    server(replace(STARTED, seq=0))
    reader, writer = await connect(server)
    writer.write(get("/events"))
    head = await reader.readuntil(b"id: 0\n")
    assert b"content-type: text/event-stream\r\n" in head
    server(replace(stop_requested(1), seq=1))
    server(replace(FINISHED, seq=2))
    rest = await reader.read()
    assert messages(head + rest) == [(0, "JobStarted"), (1, "StopRequested"), (2, "JobFinished")]
    writer.close()


async def test_the_page_is_read_before_an_upgrade_can_remove_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "JOB_PAGE", app_module.FilePage("page.html"))
    async with serving() as server:
        monkeypatch.setattr(app_module, "read_file", None)
        assert (await ask(server, get("/"))).endswith(b"</script>\n")


async def test_the_end_of_a_job_reaches_a_stream_although_the_server_ends() -> None:
    async with serving() as server:
        reader, writer = await connect(server)
        writer.write(get("/events"))
        await reader.readuntil(b"retry: 2000\n\n")
        publish(server, STARTED, FINISHED)
    rest = await reader.read()
    assert messages(b"\r\n\r\n" + rest) == [(0, "JobStarted"), (1, "JobFinished")]
    writer.close()


async def test_a_stream_that_is_not_read_does_not_hold_the_end() -> None:
    """Also if the end of the job was never reported."""
    async with serving(patience=NEVER) as server:
        publish(server, *(stop_requested(number, 2**16) for number in range(1000)))
        async with unread(server, get("/events")):
            await server.__aexit__(None, None, None)
            assert "0 connections" in repr(server)


async def test_a_stream_goes_on_where_it_was(server: StatusServer) -> None:
    """A browser that comes back after the end is sent away for good (204)."""
    publish(server, STARTED, stop_requested(1), FINISHED)
    assert messages(await ask(server, get("/events", "last-event-id: 1"))) == [(2, "JobFinished")]
    assert messages(await ask(server, get("/events?after=1"))) == [(2, "JobFinished")]
    both = get("/events?after=0", "Last-Event-ID: 1")  # a browser repeats the address
    assert messages(await ask(server, both)) == [(2, "JobFinished")]
    answer = await ask(server, get("/events", "Last-Event-ID: 2"))
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"content-length" not in answer.lower()
    assert len(messages(await ask(server, get("/events", "Last-Event-ID: x")))) == 3


async def test_a_stream_that_comes_too_late_has_a_gap(server: StatusServer) -> None:
    publish(server, *map(stop_requested, range(10_005)), FINISHED)
    found = messages(await ask(server, get("/events")))
    assert found[0] == (5, "EventsMissed")
    assert (found[1], found[-1], len(found)) == (
        (6, "StopRequested"),
        (10_005, "JobFinished"),
        10_001,
    )


async def test_an_idle_stream_has_comments() -> None:
    async with serving(keep_alive=0.05) as server:
        reader, writer = await connect(server)
        writer.write(get("/events"))
        assert await reader.readuntil(b":\n\n:\n\n")
        writer.close()


async def test_a_stream_outlives_the_time_of_a_request_and_ends_with_its_client() -> None:
    async with serving(patience=0.1, keep_alive=0.05) as server:
        reader, writer = await connect(server)
        writer.write(get("/events"))
        await reader.readuntil(b":\n\n" * 5)
        assert "1 connections" in repr(server)
        writer.close()
        await until_no_connection(server)


async def test_a_stream_that_is_not_read_is_closed() -> None:
    """The job goes on: the events are kept once, for all clients."""
    async with serving(patience=0.2) as server:
        async with unread(server, get("/events")) as sock:
            publish(server, *(stop_requested(number, 2**16) for number in range(1000)))
            await until_no_connection(server)
            assert await received_by(sock) < 1000 * 2**16
        assert (await ask(server)).startswith(b"HTTP/1.1 200 ")


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
    request = GET.replace(b"localhost", host.encode())
    assert (await ask(server, request)).startswith(b"HTTP/1.1 %d " % code)


async def test_a_server_for_other_hosts_has_any_name() -> None:
    async with serving("0.0.0.0:0") as server:
        answer = await ask(server, GET.replace(b"localhost", b"node7.cluster:9000"))
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_clients_that_do_not_read_do_not_slow_a_job(server: StatusServer) -> None:
    """The job restarts and ends while four streams take nothing; what they miss is not kept."""
    name = "x" * 60_000  # in each event: more than the sockets take in all
    spec = LaunchSpec(["sh", "-c", "exit 1"], max_restarts=20, restart=AT_ONCE, run_id=name)
    async with contextlib.AsyncExitStack() as stack:
        socks = [await stack.enter_async_context(unread(server, get("/events"))) for _ in range(4)]
        with pytest.raises(JobFailed) as caught:
            await launch(spec, listeners=[server])
        assert caught.value.result.restarts == 20
        for sock in socks:
            sock.close()
