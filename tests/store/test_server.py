"""The server against faulty clients, its limits, and its start and close."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from elastic_aio.errors import HostError, SpecError, StoreLost, StoreRefused
from elastic_aio.store import (
    Dropped,
    RemoteStore,
    StoreServer,
    connect,
    replies,
    wire,
)
from elastic_aio.store.connection import Connection
from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.limits import KeyspaceLimits
from elastic_aio.store.wire import OPENING, RequestReader, WireLimits, encode
from tests.store.peers import connected, note_sizes, serving
from tests.support.children import until

pytestmark = pytest.mark.both_loops


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not begin like"),
        (OPENING + b"\x7f", "unknown opcode, 0x7f"),
        (OPENING + b"\x81" + bytes(8), "unknown opcode, 0x81"),
        (OPENING + struct.pack("<BQ", wire.SET, 1 << 60), "a key of"),
        (OPENING + struct.pack("<BQ", wire.MULTI_GET, 1 << 40), "items in one request"),
        (OPENING + encode(wire.HELLO, b"", 9), "sent a HELLO of version 9"),
    ],
)
async def test_garbage_ends_only_its_own_connection(
    server: StoreServer, store: RemoteStore, dropped: list[Dropped], data: bytes, reason: str
) -> None:
    """It is closed at once and reported once; other connections are unaffected."""
    async with connected(server, data) as peer:
        assert await peer.ended() == b""
    assert len(dropped) == 1
    assert reason in str(dropped[0])
    assert dropped[0].peer.startswith("127.0.0.1:")
    assert await store.add("n") == 1
    assert server.connection_count == 1


async def test_requests_before_garbage_are_served(
    server: StoreServer, store: RemoteStore, dropped: list[Dropped]
) -> None:
    """Even if they arrive in one segment."""
    async with connected(server) as peer:
        peer.send(encode(wire.ADD, b"/n", 5) + b"\xff")
        await peer.ended()
    assert await store.get("n") == b"5"
    assert len(dropped) == 1


async def test_the_handshake_has_a_timeout(dropped: list[Dropped]) -> None:
    """Connections that send nothing, or half of the opening, are closed after 0.1 s."""
    async with (
        serving(dropped, handshake_timeout=0.1) as server,
        connected(server, b"") as one,
        connected(server, OPENING[:3]) as two,
        connected(server) as three,
    ):
        await one.ended()
        await two.ended()
        await three.settled()
        assert [drop.reason for drop in dropped] == ["did not complete the handshake in time"] * 2


async def test_authentication_has_a_timeout(dropped: list[Dropped]) -> None:
    """Pings without the token do not extend it."""
    server = serving(dropped, token="token-of-this-test", handshake_timeout=0.2)
    async with server, connected(server) as peer:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await peer.settled()
                await asyncio.sleep(0.02)  # the time that the server allows is real
        assert [drop.reason for drop in dropped] == ["did not complete the handshake in time"]


async def test_an_unfinished_request_has_a_timeout(dropped: list[Dropped]) -> None:
    """A client that completes its requests within it, however split, is not closed."""
    async with (
        serving(dropped, stall_timeout=0.15) as server,
        connected(server) as slow,
        connected(server) as steady,
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
    """Each is below its own limit."""
    async with serving(dropped, buffered=3_000_000) as server, contextlib.AsyncExitStack() as stack:
        frame = encode(wire.SET, b"/k", bytes(1_000_000))[:-1]
        peers = []
        for _ in range(4):
            peers.append(await stack.enter_async_context(connected(server)))
            await peers[-1].settled()
            peers[-1].send(frame)
            await until(
                lambda: (
                    not (
                        server.service.buffers.size < len(frame) * min(len(peers), 2)
                        and not dropped
                    )
                )
            )
        await until(lambda: dropped)
        assert all("holds the most" in drop.reason for drop in dropped)
        await stack.aclose()
        await until(lambda: not server.connection_count)
        assert server.service.buffers.size == 0


async def test_a_peer_that_does_not_read_is_not_read_either(dropped: list[Dropped]) -> None:
    """Its replies do not accumulate, and after 0.3 s it is closed."""
    async with serving(dropped, stall_timeout=0.3) as server, connected(server) as peer:
        peer.pause()
        value = bytes(1 << 20)
        peer.send(encode(wire.SET, b"/k", value))
        request = encode(wire.GET, b"/k", None)
        peer.send(request * 100_000)
        while not dropped:
            connections = list(server.service.connections)
            for connection in connections:
                assert connection._transport.get_write_buffer_size() < 12 << 20
            await asyncio.sleep(0.01)
        assert [drop.reason for drop in dropped] == ["does not read its replies"]


async def test_replies_to_a_slow_reader_all_arrive_in_order(
    server: StoreServer, dropped: list[Dropped]
) -> None:
    """300 values of 200 kB, so that writing is paused and resumed."""
    async with connected(server) as peer:
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
    """Another connection is served between the portions."""
    async with connected(server) as busy, connected(server) as other:
        count = 40_000
        busy.send(encode(wire.ADD, b"/n", 1) * count)
        other.send(encode(wire.GET, b"/n", None))
        length = struct.unpack("<Q", await other.receive(8))[0]
        seen = int((await other.receive(length)) or b"0")
        answers = await busy.receive(8 * count)
        assert answers[-8:] == struct.pack("<q", count)
        assert seen < count


async def test_notifications_for_a_peer_that_does_not_read_are_bounded(
    dropped: list[Dropped],
) -> None:
    """It is closed above 1 MiB."""
    async with serving(dropped, unsent=1 << 20) as server, connected(server) as peer:
        await peer.enter_tagged()
        peer.send(encode(wire.WATCH_PREFIX, b"/", -1, 1))
        await peer.receive(9)
        peer.pause()
        async with connect(server.endpoint) as store:
            for _ in range(200):
                await store.set("big", bytes(1 << 18))
                if dropped:
                    break
        assert [drop.reason for drop in dropped] == ["does not read its notifications"]


async def test_connections_are_limited(dropped: list[Dropped]) -> None:
    """The third of two is closed; after one has closed, another is served."""
    async with serving(dropped, connections=2) as server:
        async with connected(server) as one, connected(server) as two:
            await one.settled()
            await two.settled()
            async with connected(server) as three:
                await three.ended()
            assert [drop.reason for drop in dropped] == ["is one connection too many"]
        await until(lambda: not server.connection_count)
        async with connected(server) as four:
            await four.settled()


async def test_waits_and_sizes_are_limited(dropped: list[Dropped]) -> None:
    """A peer that exceeds a limit is disconnected."""
    keyspace, sizes = KeyspaceLimits(waits=1), WireLimits(value=10)
    async with serving(dropped, keyspace=keyspace, wire=sizes) as server:
        async with connected(server) as peer:
            peer.send(encode(wire.WAIT, b"", (b"/a", b"/b")))
            await peer.ended()
        assert "0 keys are being waited for" in dropped[0].reason
        async with connect(server.endpoint, reconnect_for=0) as store:
            with pytest.raises(StoreLost, match="may have been made or not"):
                await store.append("k", b"x" * 11)
        assert "a value of 11 bytes" in dropped[1].reason


async def test_a_wait_ends_with_its_connection(server: StoreServer) -> None:
    """The keyspace keeps no waiter."""
    async with connected(server) as peer:
        peer.send(encode(wire.WAIT, b"", (b"/a", b"/b")))
        await peer.settled()
        assert server.keyspace.waits.count == 2
    await until(lambda: not server.connection_count)
    assert server.keyspace.waits.count == 0


@pytest.mark.slow
async def test_dropped_connections_leak_nothing(
    server: StoreServer, dropped: list[Dropped]
) -> None:
    """Neither connections nor timers nor partial requests."""
    for _ in range(20):
        async with connected(server) as peer:
            peer.send(encode(wire.SET, b"/k", bytes(100_000))[:50_000] + b"")
            await asyncio.sleep(0)
    async with connected(server, b"nonsense") as peer:
        await peer.ended()
    await until(lambda: not server.connection_count)
    assert server.service.buffers.size == 0
    assert len(dropped) == 1
    await asyncio.sleep(0)  # the transport releases its protocol after connection_lost
    gc.collect()
    connections = [thing for thing in gc.get_objects() if type(thing) is Connection]
    assert [one for one in connections if one.service.instance == server.instance] == []


async def test_the_port_is_bound_on_entering_and_closed_on_leaving() -> None:
    async with StoreServer() as server:
        assert server.port
        assert f":{server.port}" in repr(server)
        async with connect(f"localhost:{server.port}", timeout=5) as store:
            await store.set("k", b"v")
        with pytest.raises(HostError, match="Address already in use"):
            await StoreServer("127.0.0.1", server.port).start()
    assert "not listening" in repr(server)
    reader = socket.socket()
    with reader, pytest.raises(ConnectionRefusedError):
        reader.connect(("127.0.0.1", server.port or 1))


async def test_a_given_socket_does_not_block_the_loop() -> None:
    """In whatever mode it is given: accept(2) waits for a second client in blocking mode."""
    given = socket.create_server(("127.0.0.1", 0))
    assert given.getblocking()
    async with StoreServer(listening=[given]) as server:
        assert not given.getblocking(), "the next line would never end"
        async with connect(f"localhost:{server.port}", timeout=5) as store:
            await store.set("k", b"v")


def has_ipv6(host: str | None) -> bool:
    """Return whether a name has an address of IPv6, and this host too."""
    found = socket.getaddrinfo(host, 0, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return any(info[0] == socket.AF_INET6 for info in found)


@pytest.mark.parametrize("host", [None, "::", "::1", "0.0.0.0", "localhost"])
async def test_families(host: str | None) -> None:
    """IPv4, IPv6 or both, on one port."""
    try:
        server = StoreServer(host)
        await server.start()
    except HostError:
        assert host in ("::", "::1")
        pytest.skip("this host has no IPv6")
    try:
        names = ["127.0.0.1"] if host in (None, "0.0.0.0", "localhost") else []
        if host != "0.0.0.0" and has_ipv6(host):
            names.append("[::1]")
        for name in names:
            async with connect(f"{name}:{server.port}", timeout=5) as store:
                assert await store.add("n") > 0
    finally:
        await server.aclose()
        await server.aclose()


@pytest.mark.slow
async def test_closing_ends_connections_and_is_bounded(server: StoreServer) -> None:
    """Even if a peer does not read its replies."""
    async with connected(server) as peer:
        peer.pause()
        peer.send(encode(wire.SET, b"/k", bytes(8 << 20)))
        peer.send(encode(wire.GET, b"/k", None) * 20)
        while not any(connection._is_paused for connection in server.service.connections):
            await asyncio.sleep(0.01)  # until its replies have filled the socket
        async with asyncio.timeout(5):
            await server.aclose()
        assert server.connection_count == 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
async def test_an_address_of_another_host_is_refused(host: str) -> None:
    with pytest.raises(HostError):
        await StoreServer(host).start()


async def test_an_idle_server_sets_no_timer(server: StoreServer) -> None:
    """Waits, watches and connections need none; a lease needs one."""
    async with connect(server.endpoint) as store, store.watch("w", is_prefix=True):
        waits = [asyncio.ensure_future(store.wait([f"k{number}"])) for number in range(50)]
        await store.num_keys()
        scheduled = getattr(asyncio.get_running_loop(), "_scheduled", [])
        timers = [handle for handle in scheduled if not handle.cancelled()]
        assert all("Connection" not in repr(handle) for handle in timers)
        assert [server.service._timer] == [None]
        assert all(connection._timer is None for connection in server.service.connections)
        async with store.lease(2):
            assert [server.service._timer] != [None]
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)


def test_wrong_arguments_are_refused() -> None:
    """Before a socket is bound."""
    wrong: Any = 3
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: StoreServer(wrong), "host"),
        (lambda: StoreServer(port=70_000), "port"),
        (lambda: StoreServer(port=True), "port"),
        (lambda: StoreServer(limits=wrong), "limits"),
        (lambda: StoreServer(token=""), "token"),
        (lambda: StoreServer(token=wrong), "token"),
        (lambda: connect("a:1", token=wrong), "token"),
        (lambda: connect("a:1", token="15 characters.."), "token"),
    ]
    for construct, field in refused:
        with pytest.raises(SpecError, match=rf"^{field}: must (be|have) "):
            construct()


@pytest.fixture
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many values the server has read at once, time by time."""
    return note_sizes(monkeypatch, Keyspace, "multi_get")


async def test_many_values_are_read_in_parts(
    dropped: list[Dropped], read_at_once: list[int]
) -> None:
    """Other clients are served between; later requests of the same client wait."""
    items = {f"k{number}": b"%d" % number for number in range(10_000)}
    async with serving(dropped) as server, connect(server.endpoint) as store:
        await store.multi_set(items)
        values, pong = await asyncio.gather(store.multi_get(items), store.ping())
        assert values == list(items.values())
        assert pong > 0
        async with connected(server) as peer:
            keys = tuple(f"/{key}".encode() for key in items)
            peer.send(encode(wire.MULTI_GET, b"", keys) + encode(wire.PING, b"", 7))
            expected = b"".join(map(wire.sized, items.values())) + struct.pack("<I", 7)
            assert await peer.receive(len(expected)) == expected
    assert len(read_at_once) == 10
    assert max(read_at_once) == 2048
    assert dropped == []


async def test_many_values_of_which_one_is_missing(dropped: list[Dropped]) -> None:
    names = [f"k{number}" for number in range(5_000)]
    async with serving(dropped) as server, connect(server.endpoint) as store:
        await store.multi_set({name: name for name in names[:-1]})
        waiting = asyncio.create_task(store.multi_get(names))
        async with asyncio.timeout(30):
            while not server.keyspace.waits.count:
                await store.ping()
        await store.set(names[-1], names[-1])
        assert await waiting == [name.encode() for name in names]


@pytest.fixture
def encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many keys or pairs the server has encoded at once, time by time."""
    return note_sizes(monkeypatch, replies, "encode_items")


async def test_many_names_are_encoded_in_parts(
    dropped: list[Dropped], encoded_at_once: list[int]
) -> None:
    """They are those of one moment; later requests of the same client wait."""
    names = [f"k{number}" for number in range(5_000)]
    async with serving(dropped) as server, connect(server.endpoint) as store:
        await store.multi_set(dict.fromkeys(names, b""))
        listed = asyncio.create_task(store.list_keys())
        later = asyncio.create_task(store.num_keys())
        while not encoded_at_once:
            await asyncio.sleep(0)
        assert not listed.done()
        server.keyspace.set(b"/later", b"")
        assert sorted(await listed) == sorted(names)
        assert await later == 5_001
        assert encoded_at_once == [2048, 2048, 904]
        async with connected(server) as peer:
            peer.send(encode(wire.LIST_KEYS, b"", None) + encode(wire.PING, b"", 7))
            keys = [f"/{name}".encode() for name in [*names, "later"]]
            expected = struct.pack("<Q", 5_001) + b"".join(map(wire.sized, keys))
            expected += struct.pack("<I", 7)
            assert await peer.receive(len(expected)) == expected
    assert dropped == []


async def test_a_large_snapshot_is_encoded_in_parts(
    dropped: list[Dropped], encoded_at_once: list[int]
) -> None:
    """Changes that are made meanwhile follow it."""
    items = {f"n/{number}": b"%d" % number for number in range(5_000)}
    async with serving(dropped) as server, connect(server.endpoint) as store:
        await store.multi_set(items)
        block = store.watch("n/", is_prefix=True)
        opening = asyncio.create_task(block.__aenter__())
        while not encoded_at_once:
            await asyncio.sleep(0)
        assert not opening.done()
        server.keyspace.set(b"/n/7", b"changed")
        server.keyspace.delete(b"/n/9")
        watch = await opening
        try:
            assert watch.present == items
            assert encoded_at_once == [2048, 2048, 904]
            changes = [await anext(watch), await anext(watch)]
            assert [(one.key, one.value) for one in changes] == [("n/7", b"changed"), ("n/9", None)]
        finally:
            await block.__aexit__(None, None, None)
    assert dropped == []


async def test_changes_while_a_snapshot_is_read_are_in_it(
    dropped: list[Dropped], encoded_at_once: list[int]
) -> None:
    items = {f"n/{number}": b"%d" % number for number in range(5_000)}
    async with serving(dropped) as server, connect(server.endpoint) as store:
        await store.multi_set(items)
        block = store.watch("n/", is_prefix=True)
        opening = asyncio.create_task(block.__aenter__())
        while not server.keyspace.watches.targets:
            await asyncio.sleep(0)
        assert not encoded_at_once
        for number in (7, 4_999):  # one that has been read, one that has not
            server.keyspace.set(b"/n/%d" % number, b"changed")
            server.keyspace.delete(b"/n/%d" % (number - 1))
        server.keyspace.set(b"/n/new", b"")
        watch = await opening
        try:
            changed = {"n/7": b"changed", "n/4999": b"changed", "n/new": b""}
            expected = items | changed
            del expected["n/6"], expected["n/4998"]
            assert watch.present == expected
            await store.set("n/last", "")
            assert (await anext(watch)).key == "n/last"
        finally:
            await block.__aexit__(None, None, None)
    assert dropped == []


async def test_a_snapshot_is_limited(dropped: list[Dropped]) -> None:
    """What is too large is refused, and leaves no watch."""
    limits = KeyspaceLimits(reply=100_000)
    async with serving(dropped, keyspace=limits) as server, connect(server.endpoint) as store:
        await store.multi_set({f"n/{number}": bytes(100) for number in range(3_000)})
        with pytest.raises(StoreRefused, match="the limit is 100000 bytes"):
            async with store.watch("n/", is_prefix=True):
                pass
        assert not server.keyspace.watches.targets
        assert not server.service.buffers.size
    assert dropped == []


async def test_the_changes_of_a_continued_watch_are_sent_in_parts(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes that are made meanwhile follow them."""
    numbers = []
    async with connected(server) as peer, connected(server) as other:
        for one in (peer, other):
            await one.enter_tagged()
        peer.send(encode(wire.WATCH_PREFIX, b"/n/", -1, 1))
        await peer.receive(9 + 17)
        for number in range(5_000):
            server.keyspace.set(b"/n/%04d" % number, b"")
        encoded = note_sizes(monkeypatch, replies, "encode_change", lambda _: 1)
        other.send(encode(wire.WATCH_PREFIX, b"/n/", 0, 1))
        while len(server.keyspace.watches.targets[b"/n/", True].watchers) < 2:
            await asyncio.sleep(0)
        assert len(encoded) <= 2048
        server.keyspace.set(b"/n/later", b"")
        await other.receive(9 + 17)
        for _ in range(5_001):
            change = replies.decode_notification((await other.receive_tagged())[2])
            assert isinstance(change, replies.RawChange)
            numbers.append(change.revision)
    assert numbers == list(range(1, 5_002))


async def test_many_waiters_for_a_key_are_notified_in_parts(server: StoreServer) -> None:
    """Other clients are served between."""
    async with connect(server.endpoint) as store:
        waiting = [asyncio.create_task(store.wait(["k"])) for _ in range(5_000)]
        async with asyncio.timeout(30):
            while server.keyspace.waits.count < 5_000:
                await store.ping()
        setting = asyncio.create_task(store.set("k", ""))
        left = [5_000]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(server.keyspace.waits.count)
        await asyncio.gather(setting, *waiting)
    assert max(a - b for a, b in itertools.pairwise(left)) <= 2048


async def test_the_waits_of_a_lost_client_end_in_parts(server: StoreServer) -> None:
    counts = []
    async with connect(server.endpoint) as store:
        async with connected(server) as peer:
            peer.send(encode(wire.HELLO, b"", wire.VERSION))
            for tag in range(1, 9):
                keys = tuple(b"/w%d" % number for number in range(4_000))
                peer.send(encode(wire.WAIT, b"", keys, tag))
            while server.keyspace.waits.count < 32_000:
                await store.ping()
        while server.connection_count > 1:
            await asyncio.sleep(0)
        while server.keyspace.waits.count:
            counts.append(server.keyspace.waits.count)
            await asyncio.sleep(0)
        assert server.keyspace.usage.left == server.keyspace.usage.limit
    assert len(counts) > 4
    assert counts == sorted(counts, reverse=True)


async def test_the_values_of_many_keys_are_limited(dropped: list[Dropped]) -> None:
    keys = tuple(b"/k%d" % number for number in range(3_000))
    limits = KeyspaceLimits(reply=100_000)
    async with serving(dropped, keyspace=limits) as server, connect(server.endpoint) as store:
        await store.multi_set({key[1:].decode(): bytes(100) for key in keys})
        with pytest.raises(StoreRefused, match="the limit is 100000 bytes"):
            await store.multi_get([key[1:].decode() for key in keys])
        await store.ping()
        async with connected(server) as peer:
            peer.send(encode(wire.MULTI_GET, b"", keys))
            assert await peer.ended() == b""
    assert "the limit is 100000 bytes" in dropped[0].reason


def test_a_request_with_many_keys_is_parsed_in_parts() -> None:
    reader = RequestReader(WireLimits())
    keys = tuple(b"/%d" % number for number in range(10_000))
    requests = reader.read(OPENING + encode(wire.CHECK, b"", keys) + encode(wire.PING, b"", 7))
    parts = 1
    while reader.has_more:
        requests += reader.read(b"")
        parts += 1
    assert [request[0] for request in requests] == [wire.CHECK, wire.PING]
    assert requests[0][2] == keys
    assert parts == 3


async def test_a_short_value_is_watched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is not paused for it, which costs two system calls of each node of a job."""
    parts = note_sizes(monkeypatch, Connection, "_read_in_parts", lambda *_: 1)
    async with StoreServer() as server, connect(server.endpoint) as client:
        await client.set("short", b"x" * 4096)
        await client.set("long", b"x" * 4097)
        for key in ("none", "short"):
            async with client.watch(key) as watch:
                assert watch.present == ({} if key == "none" else {key: b"x" * 4096})
                assert not parts
                await client.set(key, b"y")
                assert (await anext(watch)).value == b"y"
        async with client.watch("long") as watch:
            assert len(watch.present["long"]) == 4097
            assert parts


async def test_a_read_is_no_larger_than_the_heap_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger buffers would be mapped and unmapped for each request."""
    sizes = note_sizes(monkeypatch, Connection, "data_received")
    async with StoreServer() as server, connect(server.endpoint) as client:
        await client.set("key", b"x" * (4 << 20))
        assert await client.get("key") == b"x" * (4 << 20)
    if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        assert max(sizes) <= 64 << 10


async def test_many_changes_of_one_moment_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand members write their statuses at once, and the coordinator watches them all."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(StoreServer())
        clients = [await stack.enter_async_context(connect(server.endpoint)) for _ in range(20)]
        reader = await stack.enter_async_context(connect(server.endpoint))
        watch = await stack.enter_async_context(reader.watch("t/", is_prefix=True))
        (watching,) = (one for one in server.service.connections if one.watches)
        writes: list[bool] = []
        flush = watching.flush
        monkeypatch.setattr(watching, "flush", lambda: writes.append(flush()))
        await asyncio.gather(*(one.set(f"t/{at}", "x") for at, one in enumerate(clients)))
        for _ in clients:
            await anext(watch)
        assert len(writes) <= 10


async def test_a_wait_that_precedes_hello_harms_no_other_client(
    server: StoreServer, dropped: list[Dropped]
) -> None:
    async with connected(server) as faulty, connected(server) as other:
        hello = encode(wire.HELLO, b"", wire.VERSION)
        faulty.send(encode(wire.WAIT, b"", (b"/key",)) + hello)
        assert await faulty.ended() == b""
        other.send(encode(wire.SET, b"/key", b"value"))
        await other.settled()
        assert [drop.reason for drop in dropped] == ["sent a HELLO during a wait"]
