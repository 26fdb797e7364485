"""The server against peers that do not behave, and its own promises."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from elastic_aio.errors import SpecError, StoreLost, SurroundingsError
from elastic_aio.store import Dropped, RemoteStore, ServerLimits, StoreServer, connect, wire
from elastic_aio.store.connection import Connection
from elastic_aio.store.keyspace import KeyspaceLimits
from elastic_aio.store.wire import OPENING, WireLimits, encode


class Peer:
    """A client by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self, count: int) -> bytes:
        async with asyncio.timeout(10):
            return await self.reader.readexactly(count)

    async def ended(self) -> bytes:
        """Wait for the end of the connection; return what came before."""
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
            return b""

    async def settled(self) -> None:
        """Wait until the server has served what was sent."""
        self.send(encode(wire.PING, b"", 7))
        assert await self.receive(4) == struct.pack("<I", 7)


@contextlib.asynccontextmanager
async def dialled(server: StoreServer, opening: bytes = OPENING) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(opening)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def limited(dropped: list[Dropped], **limits: object) -> StoreServer:
    return StoreServer(
        "127.0.0.1",
        limits=ServerLimits(**limits),  # type: ignore[arg-type]  # checked by each test
        on_drop=dropped.append,
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin like"),
        (OPENING + b"\x7f", "unknown opcode, 0x7f"),
        (OPENING + b"\x81" + bytes(8), "unknown opcode, 0x81"),
        (OPENING + struct.pack("<BQ", wire.SET, 1 << 60), "a key of"),
        (OPENING + struct.pack("<BQ", wire.MULTI_GET, 1 << 40), "items in one request"),
        (OPENING + encode(wire.HELLO, b"", 9), "greeted with version 9"),
    ],
)
async def test_garbage_ends_only_its_own_connection(
    server: StoreServer, store: RemoteStore, dropped: list[Dropped], data: bytes, reason: str
) -> None:
    """It is closed at once, with one event; everybody else goes on."""
    async with dialled(server, data) as peer:
        assert await peer.ended() == b""
    assert len(dropped) == 1
    assert reason in str(dropped[0])
    assert dropped[0].peer.startswith("127.0.0.1:")
    assert await store.add("n") == 1
    assert server.connection_count == 1


async def test_requests_before_garbage_are_served(
    server: StoreServer, store: RemoteStore, dropped: list[Dropped]
) -> None:
    """How the bytes happened to be cut makes no difference."""
    async with dialled(server) as peer:
        peer.send(encode(wire.ADD, b"/n", 5) + b"\xff")
        await peer.ended()
    assert await store.get("n") == b"5"
    assert len(dropped) == 1


async def test_an_opening_that_does_not_come_is_not_waited_for(dropped: list[Dropped]) -> None:
    """Connections that say nothing, or half of it, are closed after a while."""
    async with (
        limited(dropped, opening=0.1) as server,
        dialled(server, b"") as one,
        dialled(server, OPENING[:3]) as two,
        dialled(server) as three,
    ):
        await one.ended()
        await two.ended()
        await three.settled()
        assert [drop.reason for drop in dropped] == ["did not begin like a client in time"] * 2


async def test_a_stranger_is_not_served_for_long(dropped: list[Dropped]) -> None:
    """Without the token, talking on does not keep the connection."""
    server = StoreServer(
        "127.0.0.1", token="t", limits=ServerLimits(opening=0.2), on_drop=dropped.append
    )
    async with server, dialled(server) as peer:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await peer.settled()
                await asyncio.sleep(0.02)  # the time that the server allows is real
        assert [drop.reason for drop in dropped] == ["did not begin like a client in time"]


async def test_an_unfinished_request_is_not_waited_for(dropped: list[Dropped]) -> None:
    """A slow writer is closed; one that finishes its requests, however split, is not."""
    async with (
        limited(dropped, stall=0.15) as server,
        dialled(server) as slow,
        dialled(server) as steady,
    ):
        frame = encode(wire.ADD, b"/n", 1)
        slow.send(frame[:5])
        for turn in range(6):
            steady.send(frame[4:] + frame[:4] if turn else frame + frame[:4])
            assert await steady.receive(8) == struct.pack("<q", turn + 1)
            await asyncio.sleep(0.05)  # the time that the server allows is real
        assert await slow.ended() == b""
        assert [drop.reason for drop in dropped] == ["left a request unfinished"]
        steady.send(frame[4:])
        await steady.receive(8)


async def test_unfinished_requests_together_are_bounded(dropped: list[Dropped]) -> None:
    """Many that each stay below their limit are closed when there are too many."""
    async with limited(dropped, partial=3_000_000) as server, contextlib.AsyncExitStack() as stack:
        frame = encode(wire.SET, b"/k", bytes(1_000_000))[:-1]
        peers = []
        for _ in range(4):
            peers.append(await stack.enter_async_context(dialled(server)))
            await peers[-1].settled()
            peers[-1].send(frame)
            while server._partial < len(frame) * min(len(peers), 2) and not dropped:
                await asyncio.sleep(0.001)  # nothing tells that bytes have arrived
        while not dropped:
            await asyncio.sleep(0.001)
        assert all("too much is unfinished" in drop.reason for drop in dropped)
        await stack.aclose()
        while server.connection_count:
            await asyncio.sleep(0.001)
        assert server._partial == 0


async def test_a_peer_that_does_not_read_is_not_read_either(dropped: list[Dropped]) -> None:
    """Its replies do not pile up, and after a while it is closed."""
    async with limited(dropped, stall=0.3) as server, dialled(server) as peer:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport
        value = bytes(1 << 20)
        peer.send(encode(wire.SET, b"/k", value))
        request = encode(wire.GET, b"/k", None)
        peer.send(request * 100_000)
        while not dropped:
            connections = list(server._connections)
            for connection in connections:
                assert connection._transport.get_write_buffer_size() < 12 << 20
            await asyncio.sleep(0.01)
        assert [drop.reason for drop in dropped] == ["does not read its replies"]


async def test_replies_to_a_slow_reader_all_arrive_in_order(
    server: StoreServer, dropped: list[Dropped]
) -> None:
    """Pausing and going on loses nothing."""
    async with dialled(server) as peer:
        peer.send(encode(wire.SET, b"/k", bytes(200_000)))
        frames = [encode(wire.GET, b"/k", None) + encode(wire.ADD, b"/n", 1) for _ in range(300)]
        peer.send(b"".join(frames))
        for turn in range(300):
            assert await peer.receive(8) == struct.pack("<Q", 200_000)
            assert await peer.receive(200_000) == bytes(200_000)
            assert await peer.receive(8) == struct.pack("<q", turn + 1)
        await peer.settled()
    assert dropped == []


async def test_a_burst_of_requests_is_served_in_portions(server: StoreServer) -> None:
    """Others are served between the portions of a long burst."""
    async with dialled(server) as busy, dialled(server) as other:
        count = 40_000
        busy.send(encode(wire.ADD, b"/n", 1) * count)
        other.send(encode(wire.GET, b"/n", None))
        length = struct.unpack("<Q", await other.receive(8))[0]
        seen = int((await other.receive(length)) or b"0")
        answers = await busy.receive(8 * count)
        assert answers[-8:] == struct.pack("<q", count)
        assert seen < count


async def test_news_for_a_peer_that_does_not_read_are_bounded(dropped: list[Dropped]) -> None:
    """A watcher that does not read is closed once too much waits for it."""
    async with limited(dropped, unsent=1 << 20) as server, dialled(server) as peer:
        peer.send(encode(wire.HELLO, b"", wire.VERSION))
        await peer.receive(33)
        peer.send(encode(wire.WATCH_PREFIX, b"/", -1, 1))
        await peer.receive(9)
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport
        async with connect(server.endpoint) as store:
            for _ in range(200):
                await store.set("big", bytes(1 << 18))
                if dropped:
                    break
        assert [drop.reason for drop in dropped] == ["does not read its news"]


async def test_connections_are_limited(dropped: list[Dropped]) -> None:
    """One too many is closed; when one leaves, there is room again."""
    async with limited(dropped, connections=2) as server:
        async with dialled(server) as one, dialled(server) as two:
            await one.settled()
            await two.settled()
            async with dialled(server) as three:
                await three.ended()
            assert [drop.reason for drop in dropped] == ["is one connection too many"]
        while server.connection_count:
            await asyncio.sleep(0.001)  # until the server has seen them leave
        async with dialled(server) as four:
            await four.settled()


async def test_waits_and_sizes_are_limited(dropped: list[Dropped]) -> None:
    """A plain peer is closed for it, since nothing can be said to it; ours is told."""
    limits = {"keyspace": KeyspaceLimits(waits=1), "wire": WireLimits(value=10)}
    async with limited(dropped, **limits) as server:
        async with dialled(server) as peer:
            peer.send(encode(wire.WAIT, b"", (b"/a", b"/b")))
            await peer.ended()
        assert "0 keys are being waited for" in dropped[0].reason
        async with connect(server.endpoint, reconnect_for=0) as store:
            with pytest.raises(StoreLost, match="may have been made or not"):
                await store.append("k", b"x" * 11)
        assert "a value of 11 bytes" in dropped[1].reason


async def test_a_wait_ends_with_its_connection(server: StoreServer) -> None:
    """Nothing is kept of a client that has gone."""
    async with dialled(server) as peer:
        peer.send(encode(wire.WAIT, b"", (b"/a", b"/b")))
        await peer.settled()
        assert server.keyspace.wait_count == 2
    while server.connection_count:
        await asyncio.sleep(0.001)  # until the server has seen it leave
    assert server.keyspace.wait_count == 0


async def test_dropped_connections_leave_nothing(
    server: StoreServer, dropped: list[Dropped]
) -> None:
    """Connections, timers and held bytes are all gone."""
    for _ in range(20):
        async with dialled(server) as peer:
            peer.send(encode(wire.SET, b"/k", bytes(100_000))[:50_000] + b"")
            await asyncio.sleep(0)
    async with dialled(server, b"nonsense") as peer:
        await peer.ended()
    while server.connection_count:
        await asyncio.sleep(0.001)
    assert server._partial == 0
    assert len(dropped) == 1
    await asyncio.sleep(0)  # the transport lets go of its protocol after telling it
    gc.collect()
    connections = [thing for thing in gc.get_objects() if type(thing) is Connection]
    assert [connection for connection in connections if connection._server is server] == []


async def test_it_is_bound_before_it_is_announced() -> None:
    """On entering, the port is known and connections are accepted; on leaving, no more."""
    async with StoreServer() as server:
        assert server.port
        assert f":{server.port}" in repr(server)
        async with connect(f"localhost:{server.port}", timeout=5) as store:
            await store.set("k", b"v")
        with pytest.raises(SurroundingsError, match="Address already in use"):
            await StoreServer("127.0.0.1", server.port).start()
    assert "not listening" in repr(server)
    reader = socket.socket()
    with reader, pytest.raises(ConnectionRefusedError):
        reader.connect(("127.0.0.1", server.port or 1))


@pytest.mark.parametrize("host", [None, "::", "::1", "0.0.0.0", "localhost"])
async def test_families(host: str | None) -> None:
    """IPv4, IPv6 or both, on one port."""
    try:
        server = StoreServer(host)
        await server.start()
    except SurroundingsError:
        assert host in ("::", "::1")
        pytest.skip("this machine has no IPv6")
    try:
        names = ["127.0.0.1"] if host in (None, "0.0.0.0", "localhost") else []
        if any(sock.family == socket.AF_INET6 for sock in server._sockets):
            names.append("[::1]")
        for name in names:
            async with connect(f"{name}:{server.port}", timeout=5) as store:
                assert await store.add("n") > 0
    finally:
        await server.aclose()
        await server.aclose()


async def test_closing_ends_connections_and_is_bounded(server: StoreServer) -> None:
    """Even peers that do not read their replies do not hold it up."""
    async with dialled(server) as peer:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a read transport
        peer.send(encode(wire.SET, b"/k", bytes(8 << 20)))
        peer.send(encode(wire.GET, b"/k", None) * 20)
        while not any(connection._is_paused for connection in server._connections):
            await asyncio.sleep(0.01)  # until its replies have filled the socket
        async with asyncio.timeout(5):
            await server.aclose()
        assert server.connection_count == 0


async def test_bad_arguments() -> None:
    """They are refused in one line, before anything is bound."""
    calls: list[Callable[[], StoreServer]] = [
        lambda: StoreServer(port=70_000),
        lambda: StoreServer(port=True),
        lambda: StoreServer(token=""),
    ]
    for call in calls:
        with pytest.raises(SpecError):
            call()
    starts: list[Awaitable[None]] = [
        StoreServer("no.such.host.invalid").start(),
        StoreServer("192.0.2.1").start(),
    ]
    for start in starts:
        with pytest.raises(SurroundingsError):
            await start


async def test_an_idle_server_does_nothing(server: StoreServer) -> None:
    """Waits, watches and connections set no timers; a lease sets one."""
    async with connect(server.endpoint) as store, store.watch("w", is_prefix=True):
        waits = [asyncio.ensure_future(store.wait([f"k{number}"])) for number in range(50)]
        await store.num_keys()
        timers = [handle for handle in _scheduled(server) if not handle.cancelled()]
        assert all("Connection" not in repr(handle) for handle in timers)
        assert [server._timer] == [None]
        assert all(connection._timer is None for connection in server._connections)
        async with store.lease(2):
            assert [server._timer] != [None]
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)


def _scheduled(server: StoreServer) -> list[asyncio.TimerHandle]:
    return list(getattr(server.loop, "_scheduled", []))
