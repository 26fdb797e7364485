"""Silence and pauses: who is given up, when, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from elastic_aio.errors import StoreClosed, StoreLost, StoreRefused
from elastic_aio.store import ChangeKind, RemoteStore, StoreServer, connect, wire
from elastic_aio.store.leases import LeaseHolder, LeaseTable
from elastic_aio.store.wire import RequestReader, WireLimits
from tests.support.chaos import ChaosProxy
from tests.support.children import until
from tests.support.cli import environment
from tests.support.traces import open_descriptors

_SERVER = """
import asyncio, sys
from elastic_aio.store import StoreServer
async def main():
    async with StoreServer("127.0.0.1", on_pause=lambda s: print(f"away {s:.1f}", flush=True)) as s:
        print(s.endpoint, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def server_process() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run a server in another process; give the process and the endpoint."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _SERVER,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()


def watchful(endpoint: str, patience: float = 1.75) -> RemoteStore:
    """Return a client that gives up after `patience` seconds of silence."""
    return connect(
        endpoint,
        reply_timeout=patience,
        reconnect_for=0.25,
        is_watchful=True,
        outlives_server=False,
    )


async def test_a_stopped_server_is_noticed(server: StoreServer) -> None:
    """Its kernel acknowledges everything; only a missing answer shows it."""
    async with server_process() as (process, endpoint), watchful(endpoint) as store:
        async with store.watch("k") as watch:
            os.kill(process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            with pytest.raises(StoreLost, match=r"no answer for 1.75 s; then: no store at"):
                await anext(watch)
            # From the last sign of life: that may have been a beat ago.
            assert 0.7 < time.monotonic() - begin < 2.6
        assert "no answer for 1.75 s" in await store.wait_lost()


async def test_a_killed_server_is_noticed_at_once() -> None:
    """Then a quarter of a second is spent on trying again, and no more."""
    async with server_process() as (process, endpoint), watchful(endpoint, 30.0) as store:
        process.kill()
        await process.wait()
        begin = time.monotonic()
        await store.wait_lost()
        assert time.monotonic() - begin < 2.5


async def test_a_server_that_answers_is_never_given_up(server: StoreServer) -> None:
    """However long nothing happens."""
    async with watchful(server.endpoint, 1.2) as store, store.watch("k") as watch:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3.0):  # several times its patience
                await anext(watch)
        assert store.is_connected


async def test_watching_costs_one_message_a_second(server: StoreServer) -> None:
    """Of both directions together, with a lease or without."""
    async with (
        ChaosProxy(server.port) as proxy,
        watchful(proxy.endpoint, 4.75) as store,
        store.lease(5.0, linger=0.2),
    ):
        before = len(proxy.sent) + len(proxy.received)
        await asyncio.sleep(4.5)  # the messages to be observed
        after = [*proxy.sent, *proxy.received]
        assert 2 <= len(after) - before <= 4
        reader = RequestReader(WireLimits())
        requests = [request for data in proxy.sent for request in reader.read(data)]
        assert [request[0] for request in requests[-2:]] == [wire.PING, wire.PING]
        assert all(len(data) < 20 for data in after[-2:])


async def test_a_client_that_was_away_does_not_blame_the_server(server: StoreServer) -> None:
    """When its own loop stood still, the server's answers are only unread."""
    async with watchful(server.endpoint, 1.2) as store:
        for _ in range(3):
            await asyncio.sleep(0.4)  # another moment between two beats
            time.sleep(2.0)  # the loop stands still
            assert await store.num_keys() == 0
        assert store._over is None


async def test_a_reset_costs_no_membership(server: StoreServer) -> None:
    """A lease with a little linger survives a connection that is merely cut."""
    async with ChaosProxy(server.port) as proxy, connect(server.endpoint) as other:
        async with watchful(proxy.endpoint) as store, store.lease(2.0, linger=0.2) as lease:
            await lease.set("member", "here")
            async with other.watch("member") as watch:
                for turn in range(3):
                    proxy.cut()
                    await until(lambda: proxy.connections == turn + 2)  # noqa: B023  # at once
                    await lease.set("member", "still here")
                    assert (await anext(watch)).kind is ChangeKind.SET
                assert lease.is_alive
        assert proxy.connections == 4


async def test_a_replaced_server_may_be_a_loss() -> None:
    """A client that keeps to its server is lost when another takes the place."""
    async with StoreServer("127.0.0.1") as first:
        store = watchful(first.endpoint)
        await store.__aenter__()
        port = first.port
    async with StoreServer("127.0.0.1", port):
        assert "another server has taken its place" in await store.wait_lost()
        with pytest.raises(StoreLost):
            await store.num_keys()
    await store.aclose()


async def test_a_server_that_was_stopped_ends_no_lease() -> None:
    """Nobody could be heard meanwhile; it notices, and says for how long."""
    async with server_process() as (process, endpoint), contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(connect(endpoint)) for _ in range(3)]
        leases = [await stack.enter_async_context(store.lease(2.0)) for store in stores]
        for number, lease in enumerate(leases):
            await lease.set(f"m/{number}", "here")
        async with stores[0].watch("m/", is_prefix=True) as watch:
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(4.5)  # longer than the leases live
            os.kill(process.pid, signal.SIGCONT)
            assert process.stdout is not None
            async with asyncio.timeout(20):
                said = (await process.stdout.readline()).split()
            assert said[0] == b"away"
            assert 3.0 < float(said[1]) < 20
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):  # one more life of a lease
                    await anext(watch)
        assert all(lease.is_alive for lease in leases)
        assert len(watch.present) == 3


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_timer_that_is_late_ends_no_lease_at_once(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    """What is in the sockets is read first; who is silent then has fallen silent."""

    def look(late: float) -> None:
        assert server._timer is not None
        server._timer.cancel()
        server._timer_at = server.now() - late
        server._on_timer()

    async with connect(server.endpoint) as store, store.lease(2.0) as lease:
        monkeypatch.setattr(server, "now", lambda: server.loop.time() + 3.0)
        look(late=0.2)
        assert [server.keyspace.leases.has_any] == [True]
        if is_heard:
            assert await store.num_keys() == 0
        look(late=0.2)
        assert server.keyspace.leases.has_any is is_heard
        if not is_heard:
            await lease.wait_ended()


def test_leases_begin_anew() -> None:
    """Those with a holder and those that linger get their whole time again."""
    ended: list[bytes] = []
    table = LeaseTable(ended.append, 10)

    class Holder(LeaseHolder):
        def on_lease_ended(self, tag: object) -> None:
            ended.append(b"told")

    one, two = Holder(), Holder()
    for holder, name in ((one, b"1"), (two, b"2")):
        table.grant(holder, None, name, 5.0, 1.0, 100.0)
        lease = table.find(name)
        assert lease is not None
        table.bind(lease, name)
    table.forget(two, 104.0)
    assert table.has_any
    table.begin_anew(200.0)
    table.expire(200.9)
    assert ended == []
    table.expire(201.1)
    assert ended == [b"2"]
    table.expire(204.9)
    assert ended == [b"2"]
    table.expire(205.1)
    assert ended == [b"2", b"1", b"told"]
    assert [table.has_any] == [False]


async def test_connecting_over_a_socket(server: StoreServer) -> None:
    """It is used as it is; the store works, and comes back like any other."""
    store = connect(server.endpoint)
    await store.connect_over(await _dialled(server.port))
    with pytest.raises(StoreClosed, match="connected once"):
        await store.connect_over(await _dialled(server.port))
    assert await store.add("n") == 1
    assert store.instance == server.instance
    for connection in list(server._connections):
        connection.abort()
    assert await store.num_keys() == 1
    await store.aclose()
    assert await store.wait_lost() == "the store was closed"
    assert store.instance == b""
    refused = connect(server.endpoint, token="secret")
    with pytest.raises(StoreRefused):
        await refused.connect_over(await _dialled(server.port))
    assert await refused.wait_lost() == "the store is not connected"


async def _dialled(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def test_cancelling_a_start_leaves_nothing() -> None:
    """Whichever turn it comes in, the port is free afterwards."""
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
