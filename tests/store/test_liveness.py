"""Unreachable and suspended servers and clients: which connections and leases end, and when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from elastic_aio.errors import StoreClosed, StoreLost, StoreRefused
from elastic_aio.store import ChangeKind, KeyspaceLimits, RemoteStore, StoreServer, connect, wire
from elastic_aio.store.keyspace import Client, LeaseTable
from elastic_aio.store.limits import Work
from elastic_aio.store.replies import CHANGE_CLOSED, CHANGE_DELETED, CHANGE_EXPIRED
from elastic_aio.store.wire import RequestReader, WireLimits
from tests.store.peers import program
from tests.support.chaos import ChaosProxy
from tests.support.children import until
from tests.support.leaks import open_descriptors

_SERVER = """
import asyncio, sys
from elastic_aio.store import StoreServer
async def main():
    def report(seconds):
        print(f"paused {seconds:.1f}", flush=True)
    async with StoreServer("127.0.0.1", on_pause=report) as server:
        print(server.endpoint, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def server_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a server in another process; yield the process and the endpoint."""
    async with program(_SERVER) as (process, printed):
        yield process, (await printed.readline()).decode().strip()


def pinging(endpoint: str, reply_timeout: float = 0.7, reconnect_for: float = 0.25) -> RemoteStore:
    """Return a client that pings the server and does not survive its restart."""
    return connect(
        endpoint,
        reply_timeout=reply_timeout,
        reconnect_for=reconnect_for,
        min_ttl=0.2,
        ping_interval=max(0.1, 0.43 * reply_timeout),
        survive_server_restart=False,
    )


@pytest.mark.slow
async def test_a_suspended_server_is_detected(server: StoreServer) -> None:
    """Its kernel acknowledges all data; only the replies are missing."""
    async with server_process() as (process, endpoint), pinging(endpoint) as store:
        async with store.watch("k") as watch:
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(StoreLost, match=r"no answer for 0.7 s; then: no store at"):
                await anext(watch)
            # The time counts from the last reply, which may be a ping interval old.
            assert 0.3 < time.monotonic() - begin < 10
        assert "no answer for 0.7 s" in await store.wait_lost()


async def test_a_killed_server_is_detected_at_once() -> None:
    """The client tries to reconnect for a quarter of a second."""
    async with server_process() as (process, endpoint), pinging(endpoint, 30.0) as store:
        process.kill()
        await process.wait()
        begin = time.monotonic()
        await store.wait_lost()
        assert time.monotonic() - begin < 10


@pytest.mark.slow
async def test_notifications_are_no_answer(server: StoreServer) -> None:
    """They still arrive when no request reaches the server, which then ends the leases."""
    async with (
        ChaosProxy(server.port) as proxy,
        connect(server.endpoint) as other,
        pinging(proxy.endpoint) as store,
        store.watch("k") as watch,
    ):
        proxy.is_dropping_requests = True

        async def be_notified() -> None:
            async with asyncio.timeout(20):
                for number in itertools.count():
                    await other.set("k", str(number))
                    await anext(watch)

        with pytest.raises(StoreLost, match=r"no answer for 0.7 s"):
            await be_notified()
        assert int(await other.get("k")) > 1


@pytest.mark.slow
async def test_a_first_request_does_not_postpone_the_next_ping(server: StoreServer) -> None:
    """Silence counts from the last reply, also before the first ping."""
    async with ChaosProxy(server.port) as proxy, pinging(proxy.endpoint, 1.0) as store:
        last_reply = store.last_received_at
        proxy.is_stalled = True
        await asyncio.sleep(0.2)  # less than the ping interval
        with pytest.raises(StoreLost):
            await store.num_keys()
        assert store.last_received_at == last_reply


@pytest.mark.slow
async def test_an_idle_connection_is_kept(server: StoreServer) -> None:
    """A watch without changes outlasts the reply timeout."""
    async with pinging(server.endpoint, 0.5) as store, store.watch("k") as watch:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):  # several reply timeouts
                await anext(watch)
        assert store.is_connected


@pytest.mark.slow
async def test_pings_renew_leases(server: StoreServer) -> None:
    """One ping and its reply in 0.43 of the reply timeout, with a lease or without."""
    async with (
        ChaosProxy(server.port) as proxy,
        pinging(proxy.endpoint, 1.2) as store,
        store.lease(1.25, linger=0.2),
    ):
        began, before = time.monotonic(), len(proxy.sent)
        await until(lambda: len(proxy.sent) >= before + 3)
        # No more often, that is; less often on a host that stops.
        assert time.monotonic() - began > 2 * 0.4 * 1.2
        reader = RequestReader(WireLimits())
        requests = [request for data in proxy.sent for request in reader.read(data)]
        assert [request[0] for request in requests[-3:]] == [wire.PING] * 3
        assert all(len(data) < 20 for data in (*proxy.sent[before:], proxy.received[-1]))


@pytest.mark.slow
async def test_a_suspended_client_keeps_its_connection(server: StoreServer) -> None:
    """After its own loop was blocked, the server's replies are still unread."""
    async with pinging(server.endpoint, 0.4) as store:
        for _ in range(3):
            await asyncio.sleep(0.13)  # another moment between two pings
            time.sleep(1.1)  # block the loop
            assert await store.num_keys() == 0
        assert store._error is None


@pytest.mark.slow
async def test_a_reply_that_is_read_late_does_not_say_when_it_was_sent() -> None:
    """The loop was blocked meanwhile; the next reply counts again."""
    async with (
        server_process() as (process, endpoint),
        connect(endpoint, reply_timeout=0.4) as store,
    ):
        await store.num_keys()
        replied_at = store.last_reply_at
        process.send_signal(signal.SIGSTOP)
        late = asyncio.create_task(store.num_keys())
        for _ in range(3):
            await asyncio.sleep(0)  # until the request is sent
        process.send_signal(signal.SIGCONT)
        time.sleep(1.1)  # block the loop
        await late
        assert store.last_reply_at == replied_at
        await store.num_keys()
        assert store.last_reply_at > replied_at


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [0.0, 1.1])
async def test_an_end_that_is_read_late_does_not_say_when_it_was_sent(blocked: float) -> None:
    """A partition may have held it back, while the other nodes replaced this one."""
    async with server_process() as (process, endpoint), pinging(endpoint, 1.0) as store:
        await store.num_keys()
        received_at = store.last_received_at
        process.kill()
        time.sleep(blocked)  # block the loop
        await store.wait_lost()
        assert (store.last_received_at > received_at) == (not blocked)


async def test_a_closed_store_says_when_it_was_last_heard(server: StoreServer) -> None:
    """A node that goes to another store has been in touch with the others until then."""
    async with pinging(server.endpoint) as store:
        await store.num_keys()
        replied_at = store.last_reply_at
        assert replied_at > 0
    assert (store.last_received_at, store.last_reply_at) == (replied_at, replied_at)


async def test_a_lease_survives_a_connection_reset(server: StoreServer) -> None:
    """As long as its linger lasts."""
    async with ChaosProxy(server.port) as proxy, connect(server.endpoint) as other:
        async with connect(proxy.endpoint) as store, store.lease(60.0, linger=60.0) as lease:
            await lease.set("member", "here")
            async with other.watch("member") as watch:
                for turn in range(3):
                    proxy.cut()
                    await until(lambda: proxy.connections == turn + 2)  # noqa: B023  # awaited here
                    await lease.set("member", "still here")
                    assert (await anext(watch)).kind is ChangeKind.SET
                assert lease.is_alive
        assert proxy.connections == 4


async def test_a_server_restart_can_end_the_store() -> None:
    """With `survive_server_restart=False`."""
    async with StoreServer("127.0.0.1") as first:
        store = pinging(first.endpoint, reconnect_for=20)
        await store.__aenter__()
        port = first.port
    async with StoreServer("127.0.0.1", port):
        assert "another server has taken its place" in await store.wait_lost()
        with pytest.raises(StoreLost):
            await store.num_keys()
    await store.aclose()


@pytest.mark.slow
async def test_a_suspended_server_expires_no_lease() -> None:
    """It could receive no heartbeat; it reports the pause."""
    async with server_process() as (process, endpoint), contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(connect(endpoint, min_ttl=0.4)) for _ in range(3)]
        leases = [await stack.enter_async_context(store.lease(0.6)) for store in stores]
        for number, lease in enumerate(leases):
            await lease.set(f"m/{number}", "here")
        async with stores[0].watch("m/", is_prefix=True) as watch:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(1.8)  # longer than the ttl
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout is not None
            async with asyncio.timeout(20):
                report = (await process.stdout.readline()).split()
            assert report[0] == b"paused"
            assert 0.8 < float(report[1]) < 20
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.9):  # another ttl
                    await anext(watch)
        assert all(lease.is_alive for lease in leases)
        assert len(watch.present) == 3


@pytest.mark.parametrize("has_sent", [True, False])
async def test_a_late_timer_expires_no_lease_before_the_sockets_are_read(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, has_sent: bool
) -> None:
    """The next timer expires the lease, if the holder has sent nothing."""

    def run_timer(late: float) -> None:
        assert server.service._timer is not None
        server.service._timer.cancel()
        server.service._timer_at = server.service.now() - late
        server.service._on_timer()

    async with connect(server.endpoint) as store, store.lease(2.0) as lease:
        monkeypatch.setattr(server.service, "now", lambda: server.service.loop.time() + 3.0)
        run_timer(late=0.2)
        assert [server.keyspace.leases.has_any] == [True]
        if has_sent:
            assert await store.num_keys() == 0
        run_timer(late=0.2)
        assert server.keyspace.leases.has_any is has_sent
        if not has_sent:
            await lease.wait_ended()


async def test_a_pause_extends_leases_once(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive in the first iteration after it, before the timer and after it."""
    paused: list[float] = []
    server.service._on_pause = paused.append
    async with connect(server.endpoint) as store, store.lease(2.0, linger=0.2) as lease:
        await lease.set("here", "1")
        leases = server.keyspace.leases
        (record,) = leases._leases.values()
        assert record.holder is not None
        leases.forget(record.holder, server.service.now())
        server.service.rearm()
        assert server.service._timer is not None
        now = server.service.loop.time() + 5.0
        monkeypatch.setattr(server.service, "now", lambda: now)
        server.service.rearm()  # as by a request
        server.service._timer.cancel()
        server.service._on_timer()
        for _ in range(3):
            server.service.rearm()
            assert server.service._timer_at > now - 1.0
        assert len(paused) == 1
        assert 4.0 < paused[0] <= 5.0
        assert record.ends_at < now + 0.3


class RecordingHolder(Client):
    """A holder that records the end of its leases."""

    def __init__(self, ended: list[bytes]) -> None:
        super().__init__()
        self.ended = ended

    def on_lease_ended(self, tag: object) -> None:
        self.ended.append(b"notified")


def lease_table(remove: Callable[[bytes, int], object]) -> LeaseTable:
    return LeaseTable(remove, KeyspaceLimits(leases=10), Work())


@pytest.mark.parametrize("ended_at", [100.0, 109.9])
def test_a_pause_extends_a_linger_by_what_the_server_missed(ended_at: float) -> None:
    """The connection ended just before the pause of 9 s, or its end was read just after it."""
    leases, holder = lease_table(lambda key, kind: None), RecordingHolder([])
    leases.grant(holder, None, b"lease", 2.0, 0.5, 99.0)
    leases.forget(holder, ended_at)
    leases.extend_all(9.0, 110.0)
    assert leases.next_deadline() == (109.5 if ended_at == 100.0 else 110.5)


def test_a_pause_extends_leases_by_itself_only() -> None:
    """A lease with a holder and a lingering one; a holder that was heard since gets no more."""
    ended: list[bytes] = []
    table = lease_table(lambda key, _: ended.append(key))
    one, two, three = (RecordingHolder(ended) for _ in range(3))
    for holder, name in ((one, b"1"), (two, b"2"), (three, b"3")):
        table.grant(holder, None, name, 5.0, 1.0, 100.0)
        lease = table.find(name)
        assert lease is not None
        table.bind(lease, name)
    table.forget(two, 103.0)
    three.last_received_at = 199.5
    table.extend_all(96.0, 200.0)
    assert three.last_received_at == 200.0
    table.expire(199.9)
    assert ended == []
    table.expire(200.1)
    assert ended == [b"2"]
    table.expire(200.9)
    assert ended == [b"2"]
    table.expire(201.1)
    assert ended == [b"2", b"1", b"notified"]
    table.expire(205.1)
    assert ended[3:] == [b"3", b"notified"]


@pytest.mark.parametrize(
    ("linger", "is_resumed", "kind"),
    [(0.0, False, CHANGE_CLOSED), (1.0, False, CHANGE_CLOSED), (1.0, True, CHANGE_EXPIRED)],
)
def test_a_lease_whose_connection_was_closed(linger: float, kind: int, *, is_resumed: bool) -> None:
    """The change says so, unless its holder has resumed it on another connection."""
    kinds: list[int] = []
    table = lease_table(lambda key, kind: kinds.append(kind))
    one, two = RecordingHolder([]), RecordingHolder([])
    table.grant(one, None, b"1", 5.0, linger, 0.0)
    lease = table.find(b"1")
    assert lease is not None
    table.bind(lease, b"1")
    one.has_closed = True
    table.forget(one, 1.0)
    if is_resumed:
        assert table.resume(two, None, b"1", 1.5)
    table.expire(20.0)
    assert kinds == [kind]


def test_a_store_that_pauses_again_and_again_expires_a_lease() -> None:
    """Paused for 2.2 s in every 4: a lease of 5 s ends in the third period."""
    ended: list[bytes] = []
    table = lease_table(lambda key, _: ended.append(key))
    table.grant(RecordingHolder(ended), None, b"1", 5.0, 0.0, 0.0)
    now = 0.0
    while not ended:
        now += 4.0
        table.extend_all(2.2, now)
        table.expire(now)
    assert now == 12.0


def test_ended_leases_leave_nothing() -> None:
    """Not even in the heap, where a lease of a month would stay for a month."""
    table = lease_table(lambda key, kind: None)
    for number in range(1000):
        table.grant(RecordingHolder([]), None, b"%d" % number, 2e6, 0.0, 0.0)
        lease = table.find(b"%d" % number)
        assert lease is not None
        table.release(lease, CHANGE_DELETED)
    assert len(table._heap) < 100


@pytest.mark.slow
async def test_a_server_that_is_suspended_again_and_again_expires_a_lease() -> None:
    """The holder of a lease of 5 s sends nothing; the server is suspended 2.2 s in every 4."""
    async with (
        server_process() as (process, endpoint),
        connect(endpoint) as other,
        connect(endpoint) as store,
        other.watch("here") as watch,
    ):
        lease = await store.lease(5.0).__aenter__()
        await lease.set("here", "1")
        assert (await anext(watch)).kind is ChangeKind.SET
        assert store._heartbeat_timer is not None
        store._heartbeat_timer.cancel()
        change = asyncio.ensure_future(anext(watch))
        for _ in range(8):
            await asyncio.wait([change], timeout=1.8)
            if change.done():
                break
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(2.2)  # the pause itself
            os.kill(process.pid, signal.SIGCONT)
        assert change.done()
        assert change.result().kind is ChangeKind.EXPIRED


async def test_connecting_over_a_socket(server: StoreServer) -> None:
    """The store reconnects by itself when that connection breaks."""
    store = connect(server.endpoint)
    await store.connect_over(await _connected_socket(server.port))
    with pytest.raises(StoreClosed, match="connected once"):
        await store.connect_over(await _connected_socket(server.port))
    assert await store.add("n") == 1
    assert store.instance == server.instance
    for connection in list(server.service.connections):
        connection.abort()
    assert await store.num_keys() == 1
    await store.aclose()
    assert await store.wait_lost() == "the store was closed"
    assert store.instance == b""
    refused = connect(server.endpoint, token="secret-of-this-test")
    with pytest.raises(StoreRefused):
        await refused.connect_over(await _connected_socket(server.port))
    assert await refused.wait_lost() == "the store is not connected"


async def _connected_socket(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def test_a_cancelled_start_leaks_nothing() -> None:
    """At whichever await it is cancelled, the descriptors are closed."""
    async with StoreServer("127.0.0.1") as server:  # libuv keeps a spare file from now on
        port = server.port
    before = open_descriptors()
    for turns in itertools.count():
        server = StoreServer("127.0.0.1", port)
        task = asyncio.ensure_future(server.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            await server.aclose()
        await until(lambda: open_descriptors().keys() == before.keys(), f"turn {turns}")
    assert turns > 0
    await task
    await server.aclose()
