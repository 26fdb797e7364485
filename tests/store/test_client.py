"""The client across broken connections, and the frames it sends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from elastic_aio.errors import SpecError, StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.store import (
    ChangeKind,
    Dropped,
    RemoteStore,
    ServerLimits,
    StoreServer,
    connect,
    wire,
)
from elastic_aio.store.limits import KeyspaceLimits
from elastic_aio.store.wire import OPENING, Request, RequestReader, WireLimits
from tests.store.conftest import hide_extensions
from tests.support.chaos import ChaosProxy
from tests.support.children import until

pytestmark = pytest.mark.both_loops


@pytest.fixture
async def proxy(server: StoreServer) -> AsyncIterator[ChaosProxy]:
    """A proxy in front of `server`."""
    async with ChaosProxy(server.port) as running:
        yield running


def requests_of(proxy: ChaosProxy) -> list[Request]:
    """Return the requests the client has sent through the proxy on its first connection."""
    reader = RequestReader(WireLimits())
    requests = []
    for data in proxy.sent:
        requests += reader.read(data)
    return requests


@contextlib.asynccontextmanager
async def fake_server(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Run a server whose connections are handled by `talk`; yield its endpoint."""
    ended: list[asyncio.Event] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await talk(reader, writer)
        finally:
            writer.close()
            ended[-1].set()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for event in ended:
            await event.wait()


async def until_connected(store: RemoteStore) -> None:
    async with asyncio.timeout(10):
        await store.num_keys()


async def test_reads_span_a_broken_connection(
    server: StoreServer, store: RemoteStore, proxy: ChaosProxy
) -> None:
    """Pending waits and gets are sent again on the next connection."""
    async with connect(proxy.endpoint) as remote:
        tasks = [asyncio.ensure_future(remote.get("k")), asyncio.ensure_future(remote.wait(["l"]))]
        await remote.num_keys()
        for _ in range(3):
            proxy.cut()
            await until_connected(remote)
        assert proxy.connections == 4
        await store.multi_set({"k": "v", "l": ""})
        assert await tasks[0] == b"v"
        await tasks[1]
    await until(lambda: server.connection_count <= 1)
    assert server.keyspace.waits.count == 0


async def test_a_change_whose_reply_is_lost(store: RemoteStore, proxy: ChaosProxy) -> None:
    """It raises, although the change was made; the store stays usable."""
    async with connect(proxy.endpoint) as remote:
        proxy.is_dropping_replies = True
        task = asyncio.ensure_future(remote.add("n", 1))
        await store.wait(["n"])
        proxy.cut()
        proxy.is_dropping_replies = False
        with pytest.raises(StoreLost, match="the change may have been made or not"):
            await task
        assert await remote.add("n", 1) == 2


async def test_reconnecting_is_bounded(server: StoreServer, proxy: ChaosProxy) -> None:
    """Then pending and later operations raise StoreLost."""
    async with connect(proxy.endpoint, reconnect_for=0.3) as remote, remote.watch("w") as watch:
        waiting = asyncio.ensure_future(remote.get("k"))
        await remote.num_keys()
        proxy.is_refusing = True
        proxy.cut()
        with pytest.raises(StoreLost, match=r"closed the connection; then: no store at"):
            await waiting
        with pytest.raises(StoreLost):
            await remote.set("k", b"")
        with pytest.raises(StoreLost):
            await anext(watch)
        assert "no store at" in repr(remote)
    async with connect(server.endpoint, reconnect_for=0) as once:
        await server.aclose()
        with pytest.raises(StoreLost):
            await once.get("k")


async def test_connecting_waits_for_the_server() -> None:
    """For at most `timeout`."""
    async with StoreServer("127.0.0.1") as first:
        port = first.port
    late = StoreServer("127.0.0.1", port)
    task = asyncio.ensure_future(connect(f"127.0.0.1:{port}").__aenter__())
    await asyncio.sleep(0.05)  # let it fail a few times
    async with late:
        store = await task
        await store.set("k", b"v")
        await store.aclose()
    with pytest.raises(StoreTimeout, match=r"no store at 127.0.0.1:\d+ within 0.2 s: "):
        await connect(f"127.0.0.1:{port}", timeout=0.2).__aenter__()


async def test_a_restarted_server_is_detected() -> None:
    """Waits raise, leases end, watches report the difference to the new contents."""
    async with StoreServer("127.0.0.1") as first:
        await _fill(first)
        port = first.port
        remote = connect(f"127.0.0.1:{port}")
        await remote.__aenter__()
        waiting = asyncio.ensure_future(remote.get("never"))
        stack = contextlib.AsyncExitStack()
        watch = await stack.enter_async_context(remote.watch("w/", is_prefix=True))
        lease = await stack.enter_async_context(remote.lease(5, linger=5))
        assert watch.present == {"w/1": b"1", "w/2": b"2"}
    async with StoreServer("127.0.0.1", port) as second, connect(second.endpoint) as other:
        await other.multi_set({"w/2": b"2", "w/3": b"3"})
        with pytest.raises(StoreLost, match="replaced by another"):
            await waiting
        await until_connected(remote)
        changes: dict[str, tuple[str, bytes | None]] = {}
        while len(changes) < 2:
            change = await anext(watch)
            changes[change.key] = (str(change.kind), change.value)
        changes.pop("w/2", None)
        assert changes.get("w/1") == ("deleted", None)
        await lease.wait_ended()
        await stack.aclose()
        await remote.aclose()


async def _fill(server: StoreServer) -> None:
    async with connect(server.endpoint) as store:
        await store.multi_set({"w/1": b"1", "w/2": b"2"})


async def test_a_watch_loses_no_change_across_reconnects(
    store: RemoteStore, proxy: ChaosProxy
) -> None:
    """Changes made while the connection is down arrive in order, once each."""
    async with connect(proxy.endpoint) as remote, remote.watch("w/", is_prefix=True) as watch:
        seen: list[int] = []

        async def read() -> None:
            while len(seen) < 200:
                change = await anext(watch)
                assert not change.is_resync
                seen.append(int(change.value or b"-1"))

        reading = asyncio.ensure_future(read())
        for number in range(200):
            await store.set(f"w/{number % 7}", str(number))
            if number % 20 == 10:
                proxy.cut()
            if number % 50 == 49:
                await until_connected(remote)
        async with asyncio.timeout(20):
            await reading
        assert seen == list(range(200))
        assert proxy.connections > 3


async def test_a_watch_beyond_the_history_resyncs(dropped: list[Dropped]) -> None:
    """It reports the keys that changed, once each, with `is_resync`."""
    limits = ServerLimits(keyspace=KeyspaceLimits(history=3))
    async with (
        StoreServer("127.0.0.1", limits=limits) as server,
        ChaosProxy(server.port) as proxy,
        connect(server.endpoint) as store,
        connect(proxy.endpoint) as remote,
    ):
        await store.multi_set({"w/a": "1", "w/b": "1", "w/c": "1"})
        async with remote.watch("w/", is_prefix=True) as watch:
            proxy.is_refusing = True
            proxy.cut()
            for number in range(10):
                await store.set("w/a", str(number))
            await store.delete("w/b")
            proxy.is_refusing = False
            changes = {}
            for _ in range(2):
                change = await anext(watch)
                assert change.is_resync
                changes[change.key] = change.value
            assert changes == {"w/a": b"9", "w/b": None}


async def test_a_lease_ends_with_its_holder(server: StoreServer, store: RemoteStore) -> None:
    """The keys of a killed process are deleted at once, and watches report it."""
    async with store.watch("node") as watch:
        process = await _holder(server)
        assert (await anext(watch)).value == b"here"
        assert process.stdout is not None
        await process.stdout.readline()  # a kernel that holds a reply would send a reset
        process.kill()
        begin = time.monotonic()
        change = await anext(watch)
        assert (change.kind, change.has_closed) == (ChangeKind.EXPIRED, True)
        assert time.monotonic() - begin < 10
        await process.wait()


@pytest.mark.both_loops
@pytest.mark.parametrize("is_closed", [True, False])
async def test_a_holder_that_lives_resets_its_connection(
    server: StoreServer, store: RemoteStore, *, is_closed: bool
) -> None:
    """It closes its store, or takes that for silent: its process has not ended."""
    async with store.watch("node") as watch, connect(server.endpoint, reconnect_for=0) as holder:
        lease = await holder.lease(5, linger=0.1).__aenter__()
        await lease.set("node", "here")
        assert (await anext(watch)).value == b"here"
        if is_closed:
            await holder.aclose()
        else:
            assert holder._link is not None
            holder._link.fail("no answer for 5 s")
        change = await anext(watch)
        assert (change.kind, change.has_closed) == (ChangeKind.EXPIRED, False)


@pytest.mark.slow
async def test_a_suspended_holder_is_detected(server: StoreServer, store: RemoteStore) -> None:
    """It keeps its connection but loses its lease of 0.8 s."""
    async with store.watch("node") as watch:
        process = await _holder(server)
        assert (await anext(watch)).value == b"here"
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        async with asyncio.timeout(10):
            change = await anext(watch)
        assert change.kind is ChangeKind.EXPIRED
        assert 0.3 < time.monotonic() - begin < 10
        os.kill(process.pid, signal.SIGCONT)
        # Its lease ends, which it reports by its exit code.
        async with asyncio.timeout(10):
            assert await process.wait() == 5


_HOLDER = """
import asyncio, sys
from elastic_aio.store import connect
async def main():
    async with connect(sys.argv[1], min_ttl=0.4) as store, store.lease(0.8) as lease:
        await lease.set("node", "here")
        print(flush=True)
        await lease.wait_ended()
        sys.exit(5)
asyncio.run(main())
"""


async def _holder(server: StoreServer) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _HOLDER, server.endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


async def test_leases_across_a_broken_connection(store: RemoteStore, proxy: ChaosProxy) -> None:
    """The keys survive it with a linger; without, they expire and the lease ends."""
    async with (
        connect(proxy.endpoint) as remote,
        remote.lease(5) as brief,
        remote.lease(5, linger=10) as lasting,
    ):
        await brief.set("brief", b"1")
        await lasting.set("lasting", b"1")
        proxy.cut()
        await until_connected(remote)
        await brief.wait_ended()
        assert not brief.is_alive
        assert await store.peek("brief") is None
        assert lasting.is_alive
        assert await store.peek("lasting") == b"1"
        await lasting.set("more", b"2")
    assert await store.peek("lasting") is None
    assert await store.peek("more") is None


async def test_changes_of_a_lease_are_sent_together(store: RemoteStore, proxy: ChaosProxy) -> None:
    """Together they raise too, if the connection breaks before the replies."""
    async with connect(proxy.endpoint) as remote, remote.lease(5, linger=10) as lease:
        packets = len(proxy.sent)
        await lease.set_all({str(number): b"1" for number in range(50)})
        assert len(proxy.sent) <= packets + 2  # the first goes at once
        proxy.is_dropping_replies = True
        task = asyncio.ensure_future(lease.set_all({"0": b"2", "1": b"2"}))
        async with store.watch("1") as watch:
            if watch.present["1"] != b"2":
                await anext(watch)
        proxy.cut()
        proxy.is_dropping_replies = False
        with pytest.raises(StoreLost, match="the change may have been made or not"):
            await task
        await until_connected(remote)
        await lease.set_all({"0": b"3"})
        assert await store.peek("0") == b"3"


@pytest.mark.slow
async def test_an_idle_watch_or_wait_sends_nothing(store: RemoteStore, proxy: ChaosProxy) -> None:
    """Each is one request and one reply."""
    async with connect(proxy.endpoint) as remote, remote.watch("w"):
        waiting = asyncio.ensure_future(remote.get("k"))
        await remote.num_keys()
        sent, received = len(proxy.sent), len(proxy.received)
        await asyncio.sleep(0.5)  # the idle time to observe
        assert (len(proxy.sent), len(proxy.received)) == (sent, received)
        await store.set("k", b"v")
        assert await waiting == b"v"
        await store.set("w", b"1")
        await remote.num_keys()
        assert sorted(request[0] for request in requests_of(proxy)) == sorted(
            [
                wire.PING,
                wire.CHECK,
                wire.HELLO,
                wire.WATCH_KEY,
                wire.GET_WHEN_SET,
                wire.NUM_KEYS,
                wire.NUM_KEYS,
            ]
        )


@pytest.mark.slow
async def test_leases_share_heartbeats(proxy: ChaosProxy) -> None:
    """One small frame in half of the shortest ttl, whatever the number of leases."""
    async with (
        connect(proxy.endpoint, min_ttl=0.6) as remote,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(5):
            await stack.enter_async_context(remote.lease(0.6))
        sent = len(proxy.sent)
        await asyncio.sleep(0.7)  # the heartbeats to observe
        heartbeats = proxy.sent[sent:]
        assert [len(heartbeat) for heartbeat in heartbeats] in ([5, 5], [5])


async def test_each_operation_is_one_frame(proxy: ChaosProxy) -> None:
    """No operation on a server of this package needs two requests."""
    async with connect(proxy.endpoint) as remote:
        await remote.set("k", b"v")
        await remote.get("k")
        await remote.multi_get(["k", "k"])
        await remote.wait(["k"])
        await remote.peek("k")
        await remote.queue_push("q", b"1")
        await remote.queue_pop("q")
        assert [request[0] for request in requests_of(proxy)][3:] == [
            wire.SET,
            wire.GET_WHEN_SET,
            wire.GET_WHEN_SET,
            wire.WAIT,
            wire.PEEK,
            wire.QUEUE_PUSH,
            wire.POP_WHEN_PUSHED,
        ]
        assert await remote.ping() < 5


@pytest.mark.slow
async def test_a_missing_reply_breaks_the_connection(
    server: StoreServer, proxy: ChaosProxy
) -> None:
    """After `reply_timeout`."""
    async with connect(proxy.endpoint, reply_timeout=0.2, reconnect_for=0) as remote:
        await remote.set("k", b"v")
        proxy.is_stalled = True
        with pytest.raises(StoreLost, match=r"no answer for 0.2 s"):
            await remote.set("k", b"w")
    proxy.is_stalled = False
    async with connect(proxy.endpoint, reply_timeout=0.2) as remote:
        proxy.is_stalled = True
        task = asyncio.ensure_future(remote.num_keys())
        await asyncio.sleep(0.25)  # longer than the reply timeout
        proxy.is_stalled = False
        assert await task == 1


async def test_delayed_replies_are_matched(proxy: ChaosProxy) -> None:
    """100 concurrent requests, 10 ms each way."""
    proxy.delay = 0.01
    async with connect(proxy.endpoint) as remote:
        results = await asyncio.gather(*(remote.add("n", 1) for _ in range(100)))
        assert sorted(results) == list(range(1, 101))


async def test_a_server_of_another_protocol_is_refused() -> None:
    """The client does not try again."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read()

    async with fake_server(talk) as endpoint:
        with pytest.raises(StoreRefused, match="does not answer like a TCPStore server"):
            await connect(endpoint, timeout=5).__aenter__()


async def test_a_reply_that_is_too_large_ends_the_connection() -> None:
    """A length beyond the limit is refused before memory is allocated for it."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opening = await reader.readexactly(len(OPENING) + 5)
        await reader.readexactly(9 + 8 + len(wire.RESERVED_KEY))
        writer.write(opening[-4:] + b"\1")
        await reader.readexactly(9 + 2)
        writer.write(struct.pack("<Q", 1 << 50))
        await reader.read()

    async with fake_server(talk) as endpoint, connect(endpoint, reconnect_for=0) as store:
        with pytest.raises(StoreRefused, match="has a reply of 1125899906842624 bytes"):
            await store.compare_set("k", b"", b"")
        assert "has a reply of 1125899906842624 bytes" in await store.wait_lost()


@pytest.mark.slow
async def test_waits_on_a_plain_server_outlive_the_reply_timeout(server: StoreServer) -> None:
    """The reply of a wait is not due; of 20 waits' connections 8 are kept."""
    hide_extensions(server)
    async with (
        connect(server.endpoint, reply_timeout=0.8) as plain,
        connect(server.endpoint) as other,
    ):
        waits = [asyncio.ensure_future(plain.get(f"k{number}")) for number in range(20)]
        await until(lambda: server.connection_count >= 22)
        await asyncio.sleep(1.2)  # longer than replies may take
        assert not any(task.done() for task in waits)
        assert server.connection_count == 22
        await other.multi_set({f"k{number}": b"" for number in range(20)})
        assert await asyncio.gather(*waits) == [b""] * 20
        assert await plain.get("k1") == b""
        with pytest.raises(StoreTimeout):
            await plain.get("never", timeout=0.05)
        await until(lambda: server.connection_count <= 10)


async def test_a_plain_server_refuses_the_connection_of_a_wait(dropped: list[Dropped]) -> None:
    """The client's other requests go on, and the wait is tried again."""
    limits = ServerLimits(connections=1)
    async with StoreServer("127.0.0.1", limits=limits, on_drop=dropped.append) as server:
        hide_extensions(server)
        async with connect(server.endpoint) as plain, asyncio.timeout(20):
            waiting = asyncio.ensure_future(plain.get("k"))
            await until(lambda: dropped)
            await plain.set("k", b"v")
            assert await waiting == b"v"


async def test_a_broken_wait_on_a_plain_server_is_sent_again(
    server: StoreServer, proxy: ChaosProxy, store: RemoteStore
) -> None:
    """Whether the wait's own connection breaks or all do."""
    hide_extensions(server)
    async with connect(proxy.endpoint) as plain, asyncio.timeout(20):
        waiting = asyncio.ensure_future(plain.get("k"))
        for _ in range(3):
            await until(lambda: server.keyspace.waits.count)
            seen = proxy.connections
            proxy.cut()
            await until(lambda: proxy.connections >= seen + 2)  # noqa: B023  # awaited here
        await until_connected(plain)
        await store.set("k", b"v")
        assert await waiting == b"v"


async def test_both_ends_enable_keepalive(server: StoreServer, store: RemoteStore) -> None:
    """Only the kernel can detect a lost network on an idle connection."""
    assert store._link is not None
    ends = [
        store._link._transport,
        *(connection._transport for connection in server.service.connections),
    ]
    for transport, seconds in zip(ends, (10, 60), strict=True):
        sock = transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == seconds * 1000
        idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        count = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert idle + interval * count <= seconds * 1.3


async def test_tokens(dropped: list[Dropped]) -> None:
    """A client with the token is served, others are refused with a reason or closed."""
    async with StoreServer(
        "127.0.0.1", token="secret-of-this-test", on_drop=dropped.append
    ) as server:
        async with connect(server.endpoint, token="secret-of-this-test") as store:
            assert await store.add("n") == 1
        with pytest.raises(StoreRefused, match="the token is wrong"):
            await connect(server.endpoint, token="guess-of-this-test", timeout=5).__aenter__()
        with pytest.raises(StoreRefused, match="asks for a token"):
            await connect(server.endpoint, timeout=5).__aenter__()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(OPENING + wire.encode(wire.PING, b"", 3) + wire.encode(wire.GET, b"/n", None))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() in (b"", struct.pack("<I", 3))
        writer.close()
    assert [drop.reason for drop in dropped] == [
        "sent a wrong token",
        "sent a request without the token",
    ]
    async with StoreServer("127.0.0.1") as server:
        with pytest.raises(StoreRefused, match=r"^token: the store has none"):
            await connect(server.endpoint, token="secret-of-this-test").__aenter__()


@pytest.mark.parametrize("is_reflected", [False, True])
async def test_a_server_proves_that_it_knows_the_token(
    monkeypatch: pytest.MonkeyPatch, is_reflected: bool
) -> None:
    """One that does not gets no request, even if it sends the client's proof back."""
    token = "secret-of-this-test"

    def answer(message: bytes, nonce: bytes) -> bytes:
        return message[wire.NONCE_SIZE :] if is_reflected else bytes(32)

    async with StoreServer("127.0.0.1", token=token) as server, ChaosProxy(server.port) as proxy:
        monkeypatch.setattr(server.service, "answer_proof", answer)
        with pytest.raises(StoreRefused, match=r"^token: the server does not know it"):
            await connect(proxy.endpoint, token=token, timeout=5).__aenter__()
        reader = wire.RequestReader(wire.WireLimits())
        requests = [request for data in proxy.sent for request in reader.read(data)]
        assert [op for op, *_ in requests] == [wire.PING, wire.CHECK, wire.HELLO, wire.AUTH]
        assert token.encode() not in b"".join(proxy.sent)


def test_proofs_depend_on_all_that_was_said() -> None:
    """On the token, the side, the server and both nonces; each is tied to one connection."""
    said = [
        (token, role, text)
        for token in "ab"
        for role in (b"client", b"server")
        for text in (b"x" * 48, b"y" * 48)
    ]
    assert len({wire.token_proof(*one) for one in said}) == 8
    for token, role, text in said:
        assert wire.is_proof(wire.token_proof(token, role, text), token, role, text)
        assert not wire.is_proof(b"", token, role, text)


async def test_a_cancelled_connect_leaks_nothing(server: StoreServer, proxy: ChaosProxy) -> None:
    """At whichever await it is cancelled, the connection is closed."""
    proxy.delay = 0.005
    for turn in range(12):
        task = asyncio.ensure_future(connect(proxy.endpoint).__aenter__())
        await asyncio.sleep(0.002 * turn)  # at another point each time
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).aclose()
    async with asyncio.timeout(10):
        await until(lambda: not (server.connection_count or proxy.sides))


async def test_use_before_and_after(server: StoreServer) -> None:
    """The errors name the call to make."""
    store = connect(server.endpoint)
    with pytest.raises(StoreClosed, match="async with connect"):
        await store.get("k")
    await store.aclose()
    async with store:
        assert store.is_connected
        with pytest.raises(StoreClosed, match="call connect"):
            await store.__aenter__()
    with pytest.raises(StoreClosed):
        await store.get("k")


async def test_a_cancelled_close_completes(server: StoreServer) -> None:
    """The cancellation is raised afterwards."""
    store = connect(server.endpoint)
    await store.__aenter__()
    task = asyncio.ensure_future(store.aclose())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not server.connection_count)


@pytest.mark.parametrize(
    "endpoint",
    ["", "host", ":1", "host:", "host:0", "host:65536", "host:x", "::1:29400", "a b:1", "[::1]"],
)
def test_bad_arguments(endpoint: str) -> None:
    """Refused before a connection is opened."""
    with pytest.raises(SpecError, match=r"must be HOST:PORT|must have a port from 1 to 65535"):
        connect(endpoint)
    with pytest.raises(SpecError, match="timeout"):
        connect("host:1", timeout=-1)
    with pytest.raises(SpecError, match="reply_timeout"):
        connect("host:1", reply_timeout=0)
    with pytest.raises(SpecError, match="min_ttl"):
        connect("host:1", min_ttl=0)


@pytest.mark.slow
async def test_requests_leak_no_memory(server: StoreServer) -> None:
    """After 4000 requests on one connection less than 10 bytes each remain."""
    count = 4000
    async with connect(server.endpoint) as store:
        await asyncio.gather(*(store.add("n", 1) for _ in range(count)))
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(10):
                await asyncio.gather(*(store.add("n", 1) for _ in range(count // 10)))
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/elastic_aio/*")]
            )
        finally:
            tracemalloc.stop()
    assert sum(entry.size for entry in snapshot.statistics("filename")) < count * 10


@pytest.mark.slow
async def test_a_lease_and_a_watch_outlive_their_managers(store: RemoteStore) -> None:
    """A program may enter both by hand and keep only what it got."""
    lease = await store.lease(2.0).__aenter__()
    watch = await store.watch("k").__aenter__()
    gc.collect()
    await lease.set("k", b"v")
    change = await asyncio.wait_for(anext(watch), 10)
    assert change.key == "k"
    assert lease.is_alive
    assert await store.peek("k") == b"v"
