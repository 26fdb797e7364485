"""A server under clients that take, send or keep too much: what each of them costs the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from pathlib import Path

import pytest

from elastic_aio.errors import StoreRefused
from elastic_aio.store import (
    Dropped,
    KeyspaceLimits,
    RemoteStore,
    StoreServer,
    connect,
    replies,
    wire,
)
from elastic_aio.store.connection import Connection
from elastic_aio.store.link import TaggedLink
from elastic_aio.store.wire import OPENING, encode
from tests.store.peers import MIB, connected, program, serving
from tests.support.children import until
from tests.support.usage import occupied

pytestmark = pytest.mark.both_loops


async def test_a_reply_is_limited_before_it_is_built(
    server: StoreServer, store: RemoteStore, dropped: list[Dropped]
) -> None:
    """300 times a value of 8 MiB: refused in the tagged dialect, a closed connection in torch's."""
    await store.set("k", bytes(8 * MIB))
    refused = r"the reply has 67108928 bytes: the limit is 67108864 bytes"
    with pytest.raises(StoreRefused, match=refused):
        await store.multi_get(["k"] * 300)
    assert await store.multi_get(["k"] * 2) == [bytes(8 * MIB)] * 2
    async with connected(server) as peer:
        peer.send(encode(wire.PING, b"", 7) + encode(wire.MULTI_GET, b"", (b"/k",) * 300))
        assert await peer.ended() == struct.pack("<I", 7), "the replies before it are sent"
    assert [drop.reason for drop in dropped] == [
        "sent a request that is refused: the reply has 67108928 bytes: the limit is 67108864 bytes"
    ]


async def test_a_full_store_refuses(dropped: list[Dropped]) -> None:
    """With a reason in the tagged dialect, by closing the connection in torch's."""
    full = r"the store is full: its limit is 100000 bytes"
    async with serving(dropped, keyspace=KeyspaceLimits(stored=100_000)) as server:
        async with connect(server.endpoint, reconnect_for=0) as store:
            await store.set("k", bytes(90_000))
            with pytest.raises(StoreRefused, match=full):
                await store.set("l", bytes(20_000))
            async with connected(server) as peer:
                peer.send(encode(wire.SET, b"/l", bytes(20_000)))
                assert await peer.ended() == b""
            assert [drop.reason for drop in dropped] == [f"sent a request that is refused: {full}"]
            assert await store.delete("k")
            await store.set("l", bytes(20_000))
            assert await store.delete("l")
        assert occupied(server.keyspace) == 0


@pytest.mark.slow
async def test_a_large_value_for_many_slow_peers_is_held_once(dropped: list[Dropped]) -> None:
    """Eight times 20 MiB with a limit of 24 MiB; each peer gets the value when it reads."""
    value = os.urandom(20 * MIB)
    async with (
        serving(dropped, buffered=24 * MIB) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        server.keyspace.set(b"/k", value)
        peers = [await stack.enter_async_context(connected(server)) for _ in range(8)]
        for peer in peers:
            peer.pause()
            peer.send(encode(wire.GET, b"/k", None))
        await until(lambda: sum(one._is_paused for one in server.service.connections) == 8)
        assert 0 < server.service.buffers.size < 21 * MIB
        for peer in peers:
            peer.resume()
            assert await peer.receive(8 + len(value)) == struct.pack("<Q", len(value)) + value
        assert server.service.buffers.size == 0
        assert dropped == []


@pytest.mark.slow
async def test_what_all_peers_leave_unread_is_limited(dropped: list[Dropped]) -> None:
    """Each its own value; the peers that hold the most are closed, others are served."""
    async with (
        serving(dropped, buffered=24 * MIB) as server,
        connected(server) as small,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(5):
            peer = await stack.enter_async_context(connected(server))
            await peer.settled()
            peer.pause()
            server.keyspace.set(b"/k", os.urandom(20 * MIB))
            peer.send(encode(wire.GET, b"/k", None))
            served = list(server.service.connections)[-1]
            await until(lambda: served._is_paused or served.is_gone)  # noqa: B023
        assert server.service.buffers.size <= 24 * MIB
        assert dropped
        assert {drop.reason for drop in dropped} == {
            "does not read its replies, or sends parts of requests, and holds the most"
        }
        await small.settled()
        await stack.aclose()
        await until(lambda: server.connection_count == 1)
        assert server.service.buffers.size == 0


async def test_notifications_of_one_operation_are_limited(dropped: list[Dropped]) -> None:
    """Ten thousand waits of one peer for a value of 30 kB, of which it reads nothing."""
    async with serving(dropped, unsent=4 * MIB) as server, connected(server) as peer:
        await peer.enter_tagged()
        waits = [encode(wire.GET_WHEN_SET, b"", (b"/k",), tag) for tag in range(10_000)]
        peer.send(b"".join(waits))
        await until(lambda: server.keyspace.waits.count == 10_000)
        peer.pause()
        async with connect(server.endpoint) as store:
            await store.set("k", bytes(30_000))
        assert [drop.reason for drop in dropped] == ["does not read its notifications"]
        assert server.service.buffers.size == 0
        await until(lambda: server.keyspace.waits.count == 0)


async def test_snapshots_of_one_burst_are_limited(dropped: list[Dropped]) -> None:
    """A hundred watches of 1 MiB each are begun one by one, as fast as the peer reads."""
    async with serving(dropped) as server, connected(server) as peer:
        for number in range(32):
            server.keyspace.set(b"/n/%d" % number, bytes(32 << 10))
        await peer.enter_tagged()
        peer.pause()
        peer.send(b"".join(encode(wire.WATCH_PREFIX, b"/n/", -1, tag) for tag in range(100)))
        await until(lambda: any(one._is_paused for one in server.service.connections))
        assert server.service.buffers.size < 4 * MIB
        peer.resume()
        for tag in range(100):
            assert (await peer.receive_tagged())[:2] == (tag, replies.NOTIFY)
        assert dropped == []


async def test_a_reply_above_the_limit_of_the_client_is_an_error(
    server: StoreServer, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and once: it is not requested again."""
    monkeypatch.setattr(replies, "MAX_REPLY", 1000)
    await store.set("k", bytes(2000))
    served: list[int] = []
    handler = server.keyspace.handlers[wire.PEEK]
    assert handler is not None

    def peek(key: bytes, argument: object) -> object:
        served.append(1)
        return handler(key, argument)

    server.keyspace.handlers[wire.PEEK] = peek
    with pytest.raises(StoreRefused, match="has a reply of 2009 bytes: the limit is 1000 bytes"):
        await store.peek("k")
    assert served == [1]
    assert await store.num_keys() == 1, "the store is still usable"


async def test_a_reply_has_a_limited_number_of_keys(dropped: list[Dropped]) -> None:
    """Building a longer one would block the loop; the store serves everything else."""
    async with (
        serving(dropped, keyspace=KeyspaceLimits(items=100)) as server,
        connect(server.endpoint) as store,
        connected(server) as peer,
    ):
        await store.multi_set({f"n/{number}": b"" for number in range(100)})
        assert len(await store.list_keys()) == 100
        async with store.watch("n/", is_prefix=True) as watch:
            assert len(watch.present) == 100
        await store.set("one-more", b"")
        with pytest.raises(StoreRefused, match="the reply has 101 keys: the limit is 100 keys"):
            await store.list_keys()
        with pytest.raises(StoreRefused, match="the reply has 101 keys"):
            async with store.watch("", is_prefix=True):
                pass
        async with store.watch("n/", is_prefix=True) as watch:
            assert len(watch.present) == 100
        peer.send(encode(wire.LIST_KEYS, b"", None))
        await peer.ended()
        await until(lambda: dropped)
        assert [drop.is_refusal for drop in dropped] == [True]
        assert "the reply has 101 keys" in dropped[0].reason


async def test_a_cancelled_grant_leaves_no_lease(server: StoreServer, store: RemoteStore) -> None:
    """The reply to the request finds no holder, so the client releases the lease."""
    for turns in range(6):
        task = asyncio.ensure_future(store.lease(1000.0).__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        await asyncio.wait([task])
        await store.num_keys()  # the reply to the grant is read before this one
        await store.num_keys()  # the release is served before this one
        assert not server.keyspace.leases.has_any
    assert store._link is not None
    assert store._link._replies_due == 0


async def test_a_cancelled_watch_owes_no_reply(server: StoreServer, store: RemoteStore) -> None:
    """Otherwise the client would break off an idle connection after its reply timeout."""
    for turns in range(6):
        task = asyncio.ensure_future(store.watch("w").__aenter__())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    await store.num_keys()
    assert isinstance(store._link, TaggedLink)
    assert store._link._replies_due == 0
    assert store._link._pending == {}


_FEW_DESCRIPTORS = """
import asyncio, os, resource, sys
from elastic_aio.store import StoreServer
async def main():
    async with StoreServer("127.0.0.1") as server:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        free = [fd for fd in range(200) if not os.path.exists(f"/proc/self/fd/{fd}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[6], hard))
        print(server.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = asyncio.SelectorEventLoop
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
async def test_accepting_pauses_without_descriptors() -> None:
    """It costs no processor time, and clients that wait are served when others have left."""
    loop = "uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"
    async with (
        program(_FEW_DESCRIPTORS, loop) as (process, printed),
        contextlib.AsyncExitStack() as stack,
    ):
        pid, port = process.pid, int(await printed.readline())
        served: list[tuple[asyncio.Task[bytes], asyncio.StreamWriter]] = []
        waiting: list[tuple[asyncio.Task[bytes], asyncio.StreamWriter]] = []
        for _ in range(12):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(OPENING + encode(wire.PING, b"", 7))
            answer = asyncio.create_task(reader.readexactly(4))
            await asyncio.wait([answer], timeout=0.1)
            (served if answer.done() else waiting).append((answer, writer))
        assert served
        assert waiting
        began, used = time.monotonic(), processor_seconds(pid)
        await asyncio.wait([answer for answer, _ in waiting], timeout=1.2)  # the time to observe
        assert processor_seconds(pid) - used < 0.3 * (time.monotonic() - began)
        for _, writer in served:
            writer.close()
        async with asyncio.timeout(20):
            await asyncio.wait([answer for answer, _ in waiting[: len(served)]])
        for answer, writer in waiting:
            answer.cancel()
            writer.close()
        await asyncio.wait([answer for answer, _ in waiting])


TOKEN = "token-of-this-test"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(wire.PING, b"", 7) * 20_000, "sent too much without the token"),
        (encode(wire.SET, b"/k", bytes(1 << 20))[:-1], "sent too much without the token"),
        (encode(wire.SET, b"/k", bytes(4000))[:100], "announced a value of 4000 bytes"),
        (encode(wire.GET, b"/" * 100, None)[:20], "announced a key of 100 bytes"),
        (encode(wire.MULTI_GET, b"", (b"/k",) * 9)[:12], "announced 9 items in one request"),
    ],
)
async def test_a_client_without_the_token_occupies_next_to_nothing(
    dropped: list[Dropped], data: bytes, reason: str
) -> None:
    """It is closed as soon as it sends more than a handshake."""
    async with serving(dropped, token=TOKEN) as server, connected(server) as stranger:
        stranger.send(data)
        await stranger.ended()
        await until(lambda: dropped)
        assert [drop.reason for drop in dropped] == [reason]
        assert server.service.buffers.size == 0


async def test_a_client_without_the_token_makes_room(dropped: list[Dropped]) -> None:
    """The oldest of them is closed for one with the token, which is never closed for them."""
    async with (
        serving(dropped, token=TOKEN, connections=3) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        store = await stack.enter_async_context(connect(server.endpoint, token=TOKEN))
        strangers = [await stack.enter_async_context(connected(server)) for _ in range(5)]
        await until(lambda: len(dropped) == 3)
        other = await stack.enter_async_context(connect(server.endpoint, token=TOKEN))
        assert await store.add("n") == 1
        assert await other.add("n") == 2
        assert {drop.reason for drop in dropped} == {
            "made room for another client before it completed the handshake"
        }
        assert store.is_connected
        assert strangers


@pytest.mark.slow
async def test_a_client_that_does_not_read_completes_the_handshake_in_time(
    dropped: list[Dropped],
) -> None:
    """Neither the deadline of its unread replies nor that of a request replaces the handshake's."""
    async with (
        serving(dropped, token=TOKEN, handshake_timeout=1) as server,
        connected(server) as stranger,
    ):
        stranger.pause()
        stranger.send(encode(wire.PING, b"", 7) * 500)
        await until(lambda: dropped)
        assert [drop.reason for drop in dropped] == ["did not complete the handshake in time"]


def from_elsewhere(monkeypatch: pytest.MonkeyPatch, host: str = "192.0.2.7") -> None:
    """Let all clients seem to be on another host."""
    monkeypatch.setattr(Connection, "_host", lambda self: host)


async def test_torch_clients_are_served_once_their_host_has_proved_the_token(
    monkeypatch: pytest.MonkeyPatch, dropped: list[Dropped]
) -> None:
    """What they have sent before waits, and is not lost; later ones are served at once."""
    from_elsewhere(monkeypatch)
    server = serving(dropped, token=TOKEN, admit_hosts=True)
    async with server, connected(server) as early, connected(server) as large:
        await early.settled()
        early.send(encode(wire.ADD, b"/n", 1) * 3)
        large.send(encode(wire.SET, b"/k", bytes(1 << 20)) + encode(wire.ADD, b"/m", 1))
        await until(lambda: all(one._is_held for one in server.service.connections))
        assert server.keyspace.num_keys() == 0
        async with connect(server.endpoint, token=TOKEN):
            pass
        assert await early.receive(24) == struct.pack("<3q", 1, 2, 3)
        assert await large.receive(8) == struct.pack("<q", 1)
        async with connected(server) as late:
            late.send(encode(wire.ADD, b"/n", 1))
            assert await late.receive(8) == struct.pack("<q", 4)
        assert dropped == []


@pytest.mark.slow
async def test_torch_clients_of_other_hosts_are_not_served(
    monkeypatch: pytest.MonkeyPatch, dropped: list[Dropped]
) -> None:
    """Nor what they send read; clients with a wrong token do not change that."""
    from_elsewhere(monkeypatch)
    server = serving(dropped, token=TOKEN, admit_hosts=True, handshake_timeout=0.5)
    async with server, connected(server) as stranger:
        stranger.send(encode(wire.SET, b"/k", bytes(8 << 20)))
        with pytest.raises(StoreRefused, match="the token is wrong"):
            await connect(server.endpoint, token="guess-of-this-test").__aenter__()
        await stranger.ended()
        await until(lambda: len(dropped) == 2)
        assert {drop.reason for drop in dropped} == {
            "sent a wrong token",
            "did not complete the handshake in time",
        }
        assert server.keyspace.num_keys() == 0


async def test_torch_clients_of_this_host_are_served(dropped: list[Dropped]) -> None:
    """Without the token, as are clients with it; one with a wrong token is not."""
    server = serving(dropped, token=TOKEN, admit_hosts=True)
    async with server, connected(server) as peer:
        peer.send(encode(wire.ADD, b"/n", 1))
        assert await peer.receive(8) == struct.pack("<q", 1)
        async with connect(server.endpoint, token=TOKEN) as store:
            assert await store.add("n") == 2
        with pytest.raises(StoreRefused, match="the token is wrong"):
            await connect(server.endpoint, token="guess-of-this-test").__aenter__()
