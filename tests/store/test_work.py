"""Work that one client causes: how much, in which steps, and who is served between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from typing import Any

import pytest

from elastic_aio.errors import StoreRefused
from elastic_aio.store import Dropped, KeyspaceLimits, StoreServer, connect, replies, wire
from elastic_aio.store.keyspace import Keyspace
from elastic_aio.store.wire import encode
from tests.store.peers import connected, note_sizes, serving
from tests.store.test_keyspace import RecordingClient
from tests.support.children import until

pytestmark = pytest.mark.both_loops


async def test_watches_waits_and_leases_of_a_client_are_limited(dropped: list[Dropped]) -> None:
    """An error reply, after which the client goes on; others have limits of their own."""
    limits = KeyspaceLimits(watches_each=2, waits_each=2, leases_each=2)
    async with serving(dropped, keyspace=limits) as server, contextlib.AsyncExitStack() as stack:
        store, other = [await stack.enter_async_context(connect(server.endpoint)) for _ in "12"]
        for name in "ab":
            await stack.enter_async_context(store.watch(name))
            await stack.enter_async_context(store.lease(60.0))
        with pytest.raises(StoreRefused, match="too many watches of one client: the limit is 2"):
            await stack.enter_async_context(store.watch("c"))
        with pytest.raises(StoreRefused, match="there are too many leases"):
            await stack.enter_async_context(store.lease(60.0))
        with pytest.raises(StoreRefused, match="too many waits of one client: the limit is 2 keys"):
            await store.wait(["a", "b", "c"])
        await stack.enter_async_context(other.watch("c"))
        await stack.enter_async_context(other.lease(60.0))
        await store.set("a", "1")
        assert dropped == []


async def test_a_batch_is_divided_by_the_notifications_it_causes(dropped: list[Dropped]) -> None:
    """Another client is served between 100 SETs with 1,024 watches; replies stay in order."""
    async with serving(dropped) as server, connected(server) as peer, connected(server) as other:
        await peer.enter_tagged()
        watches = [encode(wire.WATCH_KEY, b"/k", -1, tag) for tag in range(1_024)]
        peer.send(b"".join(watches))
        await peer.receive(1_024 * (9 + 17))
        await other.settled()
        sets = [encode(wire.SET, b"/k", b"%d" % n, 2_000 + n) for n in range(100)]
        peer.send(b"".join(sets))
        seen: list[bytes] = []
        while not seen or seen[-1] != b"99":
            other.send(encode(wire.GET, b"/k", None))
            (size,) = struct.unpack("<Q", await other.receive(8))
            seen.append(await other.receive(size))
        assert len(set(seen)) > 10
        revisions: dict[int, list[int]] = {}
        done: list[int] = []
        while len(done) < 100 or len(revisions[1_023]) < 100:
            tag, _, reply = await peer.receive_tagged()
            if tag >= 2_000:
                done.append(tag)
            else:
                change = replies.decode_notification(reply)
                revisions.setdefault(tag, []).append(change.revision)
        assert done == list(range(2_000, 2_100))
        assert all(each == list(range(1, 101)) for each in revisions.values())
        assert len(revisions) == 1_024


async def test_a_batch_ends_with_its_connection(
    dropped: list[Dropped],
) -> None:
    """The client that does not read its notifications is dropped in the middle of a batch."""
    async with serving(dropped, unsent=1 << 20) as server, connected(server) as peer:
        await peer.enter_tagged()
        peer.send(b"".join(encode(wire.WATCH_KEY, b"/k", -1, tag) for tag in range(500)))
        await peer.receive(500 * (9 + 17))
        peer.pause()
        value = bytes(60_000)
        sets = [encode(wire.SET, b"/k", value, 1_000) for _ in range(1_000)]
        peer.send(b"".join(sets) + encode(wire.SET, b"/end", b"", 1_000))
        await until(lambda: server.connection_count == 0)
        assert [drop.reason for drop in dropped] == ["does not read its notifications"]
        assert server.keyspace.peek(b"/end") is None
        assert server.service.buffers.size == 0


async def test_a_push_does_not_look_at_waits_for_a_value(server: StoreServer) -> None:
    """Queue waiters are served oldest first, however many GET_WHEN_SET there are."""

    class Unread(dict[Any, None]):
        def __iter__(self) -> Any:
            raise AssertionError("waits for a value are looked at")

    async with connected(server) as peer, connected(server) as popper:
        await peer.enter_tagged()
        await popper.enter_tagged()
        peer.send(b"".join(encode(wire.GET_WHEN_SET, b"", (b"/k",), n) for n in range(2_000)))
        await until(lambda: server.keyspace.waits.count == 2_000)
        popper.send(b"".join(encode(wire.POP_WHEN_PUSHED, b"/k", None, n) for n in range(3)))
        await until(lambda: server.keyspace.waits.count == 2_003)
        waits = server.keyspace.waits.by_key
        waits[b"/k"] = Unread(waits[b"/k"])
        peer.send(b"".join(encode(wire.QUEUE_PUSH, b"/k", b"%d" % n, 3_000) for n in range(3)))
        for tag in range(3):
            assert await popper.receive(18) == struct.pack("<IBIQ", tag, 0, 9, 1) + b"%d" % tag
    await until(lambda: server.keyspace.waits.count == 0)


async def test_departed_leases_are_bounded(dropped: list[Dropped]) -> None:
    """Clients grant leases that linger for an hour, and leave: the oldest end first."""
    limits = KeyspaceLimits(departed=5)
    async with serving(dropped, keyspace=limits) as server:
        for number in range(4):
            async with connected(server) as peer:
                await peer.enter_tagged()
                grant = encode(wire.GRANT_LEASE, b"", (60_000, 3_600_000), 1)
                peer.send(grant + grant)
                lease_ids = [(await peer.receive(9 + 8 + 16))[17:] for _ in range(2)]
                for turn, lease_id in enumerate(lease_ids):
                    key = b"/%d/%d" % (number, turn)
                    peer.send(encode(wire.LEASED_SET, key, (b"", lease_id), 2))
                    await peer.receive(9)
            await until(lambda: server.connection_count == 0)
            await until(lambda: server.keyspace.num_keys() == min(2 * number + 2, 5))  # noqa: B023
        left = {key.split(b"/")[1] for key in server.keyspace.list_keys()}
        assert left == {b"1", b"2", b"3"}


async def test_the_keys_of_an_ended_lease_are_removed_in_parts(server: StoreServer) -> None:
    """A key that is written anew meanwhile stays."""
    counts = [5_000]
    async with connected(server) as peer:
        await peer.enter_tagged()
        peer.send(encode(wire.GRANT_LEASE, b"", (60_000, 0), 1))
        lease_id = (await peer.receive(9 + 8 + 16))[17:]
        sets = [encode(wire.LEASED_SET, b"/%d" % n, (b"", lease_id), 2) for n in range(5_000)]
        peer.send(b"".join(sets))
        await peer.receive(5_000 * 9)
        peer.send(encode(wire.RELEASE_LEASE, lease_id, None, 3))
        while counts[-1] > 1:
            await asyncio.sleep(0)
            counts.append(server.keyspace.num_keys())
            if counts[-1] == 5_000 - 1_024:
                server.keyspace.set(b"/4999", b"mine")
        assert await peer.receive(10) == struct.pack("<IBI", 3, 0, 1) + b"\1"
    assert max(a - b for a, b in itertools.pairwise(counts)) == 1_024
    assert server.keyspace.list_keys() == [b"/4999"]


async def test_leases_that_expire_together_end_in_parts() -> None:
    """Those that are left for later are no pause of the server."""
    paused: list[float] = []
    async with (
        StoreServer("127.0.0.1", on_pause=paused.append) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(3):
            peer = await stack.enter_async_context(connected(server))
            await peer.enter_tagged()
            grants = [encode(wire.GRANT_LEASE, b"", (300, 0), n) for n in range(1_000)]
            peer.send(b"".join(grants))
            await peer.receive(1_000 * 33)
        leases = server.keyspace.leases._leases
        counts = [len(leases)]
        async with asyncio.timeout(10):
            while counts[-1]:
                await asyncio.sleep(0)
                counts.append(len(leases))
    assert max(a - b for a, b in itertools.pairwise(counts)) <= 1_024
    assert paused == []


async def test_a_wait_for_many_keys_begins_and_ends_in_parts(server: StoreServer) -> None:
    """A key that is written before its part counts."""
    keys = tuple(b"/%d" % number for number in range(10_000))
    waits = server.keyspace.waits
    async with connected(server) as peer, connect(server.endpoint) as store:
        await peer.enter_tagged()
        peer.send(encode(wire.WAIT, b"", keys, 1))
        counts = [0]
        while counts[-1] < 9_999:
            await asyncio.sleep(0)
            counts.append(waits.count)
            if waits.count == 2 * 2_048 - 1_024:
                server.keyspace.set(keys[-1], b"")
        assert max(b - a for a, b in itertools.pairwise(counts)) <= 2_048 + 1_024
        for part in range(4):
            some = keys[part * 2_500 : (part + 1) * 2_500]
            await store.multi_set({key[1:].decode(): "" for key in some})
        assert await peer.receive(10) == struct.pack("<IBI", 1, 0, 1) + b"\0"
        await until(lambda: waits.count == 0)
        absent = tuple(b"/absent" + key for key in keys)
        peer.send(encode(wire.WAIT, b"", absent, 2) + encode(wire.CANCEL, b"", 2, 3))
        assert await peer.receive(10) == struct.pack("<IBI", 3, 0, 1) + b"\1"
        await until(lambda: waits.count == 0)
        assert waits.by_key == {}
        assert waits.by_queue == {}


async def test_a_multi_set_of_many_keys_is_all_or_nothing(dropped: list[Dropped]) -> None:
    limits = KeyspaceLimits(stored=1_000_000)
    async with serving(dropped, keyspace=limits) as server, connect(server.endpoint) as store:
        items = {f"{number}": "v" for number in range(10_000)}
        with pytest.raises(StoreRefused, match="the store is full"):
            await store.multi_set(items)
        assert await store.num_keys() == 0
        assert server.keyspace.usage.left == server.keyspace.usage.limit
        await store.multi_set(dict(list(items.items())[:5_000]))
        assert await store.num_keys() == 5_000


async def test_a_client_whose_reading_is_resumed_was_not_silent(server: StoreServer) -> None:
    """Its lease lives while its requests wait for others, and `ttl` from then on."""
    async with connected(server) as peer:
        await peer.enter_tagged()
        peer.send(encode(wire.GRANT_LEASE, b"", (60_000, 0), 1))
        await peer.receive(33)
        (connection,) = server.service.connections
        for flag in ("_is_postponed", "_is_reading_keys"):
            setattr(connection, flag, True)
            server.keyspace.expire(server.service.now() + 1_000)
            assert server.keyspace.leases.has_any
            setattr(connection, flag, False)
            connection.last_received_at = 0.0
            connection._resume()
            assert connection.last_received_at > 0
        server.keyspace.expire(server.service.now() + 59)
        assert server.keyspace.leases.has_any


async def test_a_multi_set_in_parts_takes_turns_with_other_work(server: StoreServer) -> None:
    """With that of a client which sets a key that it watches 1,024 times."""
    async with connected(server) as peer, connect(server.endpoint) as store:
        await peer.enter_tagged()
        peer.send(b"".join(encode(wire.WATCH_KEY, b"/k", -1, tag) for tag in range(1_024)))
        await peer.receive(1_024 * (9 + 17))
        peer.send(b"".join(encode(wire.SET, b"/k", b"%d" % n, 2_000) for n in range(200)))
        await until(lambda: server.keyspace.peek(b"/k") is not None)
        await store.multi_set({f"{number}": "" for number in range(3_000)})
        assert int(server.keyspace.get(b"/k")) < 100


async def test_many_keys_are_looked_up_in_parts(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CHECK and WAIT, in both dialects."""
    counts = note_sizes(monkeypatch, Keyspace, "missing")
    keys = tuple(b"%d" % number for number in range(5_000))
    server.keyspace.multi_set(b"", [(key, b"") for key in keys])
    async with connected(server) as peer:
        requests = [
            encode(op, b"", each)
            for op in (wire.CHECK, wire.WAIT)
            for each in (keys, (*keys, b"absent"))
        ]
        peer.send(b"".join(requests))
        assert await peer.receive(3) == b"\0\1\0"
        await until(lambda: server.keyspace.waits.count == 1)
        server.keyspace.set(b"absent", b"")
        server.service.flush()
        assert await peer.receive(1) == b"\0"
        await peer.enter_tagged()
        peer.send(encode(wire.CHECK, b"", (*keys, b"x"), 1) + encode(wire.WAIT, b"", keys, 2))
        for tag in (1, 2):
            assert await peer.receive(10) == struct.pack("<IBIB", tag, 0, 1, tag == 1)
    assert max(counts) == 2_048
    assert sum(counts) >= 6 * 5_000


async def test_large_values_are_read_and_set_off_in_parts(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand of 10 kB at once, or when the last is set; also in a snapshot."""
    read = note_sizes(monkeypatch, Keyspace, "multi_get")
    encoded = note_sizes(monkeypatch, replies, "encode_items")
    names, value = [f"n/{number}" for number in range(1_000)], bytes(10_000)
    async with connect(server.endpoint) as store:
        waiting = asyncio.create_task(store.multi_get(names))
        await until(lambda: server.keyspace.waits.count == 1_000)
        await store.multi_set(dict.fromkeys(names, value))
        assert await waiting == [value] * 1_000
        assert await store.multi_get(names) == [value] * 1_000
        async with store.watch("n/", is_prefix=True) as watch:
            assert watch.present == dict.fromkeys(names, value)
        async with connected(server) as peer:
            peer.send(encode(wire.MULTI_GET, b"", tuple(f"/{name}".encode() for name in names)))
            assert await peer.receive(1_000 * 10_008) == wire.sized(value) * 1_000
    assert max(read + encoded) == 105  # just above 1 MiB
    assert sum(read + encoded) == 4 * 1_000


async def test_large_notifications_are_more_work(server: StoreServer) -> None:
    async with connected(server) as peer:
        await peer.enter_tagged()
        peer.send(b"".join(encode(wire.WATCH_KEY, b"/k", -1, tag) for tag in range(200)))
        await peer.receive(200 * (9 + 17))
        server.keyspace.work.begin(lambda: None)
        server.keyspace.set(b"/k", bytes(60_000))
        assert server.keyspace.work.later
        server.service.flush()
        await peer.receive(200 * (9 + 17 + 2 + 60_000))


def test_a_watch_that_begins_while_changes_are_delivered_has_each_once() -> None:
    """In its snapshot or after it; so has a prefix whose snapshot is read meanwhile."""
    keyspace, client, others = Keyspace(), RecordingClient(), RecordingClient()
    other = RecordingClient()
    for tag in range(1_000):
        keyspace.watch(others, tag, b"k", -1, is_prefix=True)
        keyspace.watch(other, tag, b"k", -1, is_prefix=True)
    keyspace.work.begin(lambda: None)
    for number in range(10):
        keyspace.set(b"k%d" % (number % 3), b"%d" % number)
    assert keyspace.work.later
    keyspace.delete(b"k0")
    snapshot = keyspace.watch(client, 1, b"k", -1, is_prefix=True)
    assert dict(snapshot.pairs) == {b"k1": b"7", b"k2": b"8"}
    keyspace.cancel(others, 7)
    keyspace.watch(others, 7, b"k", -1, is_prefix=True)
    keyspace.set(b"k0", b"last")
    while keyspace.work.step():
        pass
    assert [change.value for _, change in client.take()] == [b"last"]
    received = others.take()
    assert [change.value for tag, change in received if tag == 7][-1] == b"last"
    assert len([change for tag, change in received if tag == 7]) < 12
    revisions = [change.revision for tag, change in received if tag == 8]
    assert revisions == list(range(1, 13))
