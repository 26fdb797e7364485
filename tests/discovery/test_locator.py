"""Locating the store of a job: which node serves it, and the errors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from elastic_aio.aio import wait_forever
from elastic_aio.discovery import locator as locator_module
from elastic_aio.discovery.choice import EndpointState
from elastic_aio.discovery.locator import (
    ActiveElsewhere,
    Dialer,
    DiscoveryError,
    Endpoint,
    EndpointMonitor,
    LocatedStore,
    StoreLocator,
    StoreNotFound,
)
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.discovery.runs import RunRecord, enter_run
from elastic_aio.errors import SpecError, StoreClosed
from elastic_aio.sockets import Address
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import Dropped, RemoteStore, StoreServer, connect
from tests.discovery.conftest import RUN, MakeLocator, StartNode
from tests.support.chaos import ChaosProxy
from tests.support.children import until
from tests.support.leaks import open_descriptors
from tests.support.sockets import free_port

HAS_IPV6 = os.path.exists("/proc/net/if_inet6")


@contextlib.asynccontextmanager
async def listening(
    port: int, host: str = "127.0.0.1", answer: bytes | None = None
) -> AsyncIterator[None]:
    """Listen like another program; with `answer`, send that and hang up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
        else:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, host, port):
        yield


def resolve_by(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], str]) -> None:
    """Let the resolver look up `answer` of each name in place of the name."""
    lookup = socket.getaddrinfo

    def resolve(host: str, *args: object, **options: object) -> object:
        name = host if options.get("flags") else answer(host)
        return lookup(name, *args, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


async def are_together(one: LocatedStore, other: LocatedStore) -> bool:
    """Return whether one reads what the other writes."""
    await one.store.set("together", one.local_address)
    return await other.store.peek("together") == one.local_address.encode()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.2", "127.0.0."),
        ("LocalHost.", "127.0.0.1"),
        pytest.param("[::1]", "::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6")),
    ],
)
async def test_one_serves_and_the_other_joins(
    make_locator: MakeLocator, host: str, address: str
) -> None:
    """By names, aliases and addresses."""
    endpoint = f"{host}:{free_port()}"
    first = await make_locator(endpoint).locate(is_first=True)
    second = await make_locator(endpoint).locate(is_first=True)
    assert (first.is_host, second.is_host) == (True, False)
    assert first.endpoint == second.endpoint == endpoint
    assert first.index == second.index == 0
    assert isinstance(first.store, RemoteStore)
    assert first.store.has_extensions
    assert await are_together(first, second)
    for located in (first, second):
        assert located.local_address.startswith(address) or located.local_address == "::1"


async def test_a_name_with_a_loopback_address_is_served_on_all_interfaces(
    make_locator: MakeLocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems list their own name with 127.0.1.1."""
    resolve_by(monkeypatch, lambda host: "127.0.1.1" if host == "nodea" else host)
    monkeypatch.setattr("elastic_aio.discovery.locator.outbound_address", lambda *_: "192.0.2.7")
    port = free_port()
    located = await make_locator(f"nodea:{port}").locate(is_first=True)
    assert located.is_host
    assert located.local_address == "192.0.2.7"
    # 127.0.0.3 stands for the address under which others know the machine.
    async with connect(f"127.0.0.3:{port}", timeout=5) as store:
        assert store.instance == located.instance


async def test_port_0_is_for_the_node_that_serves(make_locator: MakeLocator) -> None:
    located = await make_locator("localhost:0").locate(is_first=True)
    assert located.is_host
    host, _, port = located.endpoint.rpartition(":")
    assert host == "localhost"
    async with connect(f"127.0.0.1:{port}", timeout=5) as store:
        assert store.instance == located.instance
    with pytest.raises(DiscoveryError, match="localhost:0: port 0 is known only to the node"):
        await make_locator("localhost:0", is_host=False, read_timeout=0.2).locate(is_first=True)


@pytest.mark.slow
async def test_fifty_races_in_one_process(make_locator: MakeLocator, start_node: StartNode) -> None:
    hosts = set()
    for turn in range(50):
        endpoint = f"localhost:{free_port()}"
        pair = [make_locator(endpoint), make_locator(endpoint)]
        searches = [locator.locate(is_first=True) for locator in pair[:: -1 if turn % 2 else 1]]
        located = await asyncio.gather(*searches)
        assert sorted(one.is_host for one in located) == [False, True]
        assert await are_together(*located)
        hosts.add(located[0].is_host)
        for locator in pair:
            await locator.aclose()


@pytest.mark.slow
async def test_races_of_processes(start_node: StartNode) -> None:
    for _ in range(3):
        endpoint = f"localhost:{free_port()}"
        nodes = await asyncio.gather(*(start_node(endpoint=endpoint) for _ in range(3)))
        said = [await node.wait_printed("endpoint") for node in nodes]
        assert sorted(one["is_host"] for one in said) == [False, False, True]
        for node in nodes:
            await node.end()


async def test_a_node_that_may_not_serve_waits(make_locator: MakeLocator) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    message = f"no store could be reached within 0.5 s: {endpoint}: connection refused$"
    with pytest.raises(DiscoveryError, match=message):
        await make_locator(endpoint, is_host=False, read_timeout=0.5).locate(is_first=True)
    assert 0.5 <= time.monotonic() - begin < 20
    client = asyncio.ensure_future(make_locator(endpoint, is_host=False).locate(is_first=True))
    await asyncio.sleep(0.1)  # let it fail a few times
    host = await make_locator(endpoint).locate(is_first=True)
    assert host.is_host
    assert not (await client).is_host


async def test_a_host_behind_a_translated_address(make_locator: MakeLocator) -> None:
    """It serves on all interfaces, though the address is not its own."""
    port = free_port()
    # An unassigned address (RFC 5737): packets to it are dropped, or it is unreachable.
    located = await make_locator(f"203.0.113.9:{port}", is_host=True).locate(is_first=True)
    assert located.is_host
    assert located.endpoint == f"203.0.113.9:{port}"
    async with connect(f"127.0.0.2:{port}", timeout=5) as store:
        assert store.instance == located.instance
    # Another process of this host finds the port in use.
    neighbour = await make_locator(f"203.0.113.9:{port}", is_host=True).locate(is_first=True)
    assert not neighbour.is_host
    assert await are_together(located, neighbour)


async def test_a_translated_address_that_drops_packets_is_waited_for_once(
    make_locator: MakeLocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the search, and not again once this node serves."""
    dial, dropped = StoreNetwork.dial, list[str]()

    async def drop(self: StoreNetwork, address: Address) -> socket.socket:
        if address[1][0] == "203.0.113.9":
            dropped.append(address[1][0])
            await wait_forever()
        return await dial(self, address)

    monkeypatch.setattr(StoreNetwork, "dial", drop)
    monkeypatch.setattr("elastic_aio.discovery.choice._FIRST_GRACE", 0.1)
    locator = make_locator(f"203.0.113.9:{free_port()}", is_host=True)
    assert (await locator.locate(is_first=True)).is_host
    assert len(dropped) == 1


@pytest.mark.parametrize(
    "answer", [pytest.param(None, marks=pytest.mark.slow), b"HTTP/1.1 400 Bad\r\n\r\n\x1b[2J"]
)
async def test_a_port_of_another_program(make_locator: MakeLocator, answer: bytes | None) -> None:
    """A node that must serve fails at once; another one keeps trying."""
    port = free_port()
    begin = time.monotonic()
    async with listening(port, answer=answer):
        server = make_locator(f"127.0.0.1:{port}", is_host=True, heartbeat_timeout=2.5)
        with pytest.raises(DiscoveryError) as published:
            await server.locate(is_first=True)
        assert f"port {port} is in use by " in str(published.value)
        assert f"(pid {os.getpid()}), which this job cannot use: " in str(published.value)
        with pytest.raises(DiscoveryError) as tried:
            await make_locator(f"127.0.0.1:{port}", read_timeout=2.5).locate(is_first=True)
        assert f"(pid {os.getpid()})" in str(tried.value)
        assert "cannot listen there: Address already in use" in str(tried.value)
        for error in (published, tried):
            assert str(error.value).isprintable()
            why = "does not answer" if answer is None else "does not answer like a TCPStore server"
            assert why in str(error.value)
    assert time.monotonic() - begin < 20


@pytest.mark.slow
async def test_a_refused_node_says_so_once_and_tries_seldom() -> None:
    """Each attempt costs the store a connection, and a line on its console."""
    dropped: list[Dropped] = []
    waits: list[tuple[str, float]] = []
    async with StoreServer(
        "127.0.0.1", token="right-token-of-a-test", on_drop=dropped.append
    ) as server:
        spec = RendezvousSpec(
            endpoint=server.endpoint, token="wrong-token-of-a-test", read_timeout=6.0
        )
        locator = StoreLocator(spec, RUN, on_wait=lambda *wait: waits.append(wait))
        with pytest.raises(DiscoveryError, match="the token is wrong"):
            await locator.locate(is_first=True)
    ((why, time_left),) = waits
    assert "the token is wrong" in why
    assert 0 < time_left <= 5.0
    # Without a pause of its own, a refused node makes about 30 attempts in this time.
    assert 1 <= len(dropped) <= 15


async def test_a_long_search_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason of each endpoint; a refusal that comes later is reported too."""
    monkeypatch.setattr(locator_module, "_NOTICE", 0.2)
    monkeypatch.setattr(locator_module, "_NOTICE_REFUSED", 0.2)
    waits: asyncio.Queue[str] = asyncio.Queue()
    port = free_port()
    spec = RendezvousSpec(endpoint=f"127.0.0.1:{port}", is_host=False, read_timeout=60)
    locator = StoreLocator(spec, RUN, on_wait=lambda why, _: waits.put_nowait(why))
    locating = asyncio.create_task(locator.locate(is_first=True))
    async with asyncio.timeout(20):
        assert await waits.get() == f"127.0.0.1:{port}: connection refused"
        async with StoreServer("127.0.0.1", port, token="right-token-of-a-test"):
            assert "the store asks for a token" in await waits.get()
    assert waits.empty()
    locating.cancel()
    await asyncio.wait([locating])
    await locator.aclose()


@pytest.mark.slow
async def test_tokens_must_agree(make_locator: MakeLocator) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    await make_locator(endpoint, token="right-token-of-a-test").locate(is_first=True)
    joined = await make_locator(endpoint, token="right-token-of-a-test").locate(is_first=True)
    assert not joined.is_host
    for token, why in (
        ("wrong-token-of-a-test", "the token is wrong"),
        (None, "the store asks for a token"),
    ):
        with pytest.raises(DiscoveryError, match=why):
            await make_locator(endpoint, token=token, read_timeout=0.5).locate(is_first=True)
    with pytest.raises(DiscoveryError, match="which this job cannot use: the token is wrong"):
        await make_locator(endpoint, token="wrong-token-of-a-test", is_host=True).locate(
            is_first=True
        )


async def test_an_endpoint_that_does_not_answer_is_passed_over(make_locator: MakeLocator) -> None:
    silent, port = free_port(), free_port()
    async with listening(silent):
        endpoints = f"127.0.0.1:{silent},127.0.0.1:{port}"
        async with StoreServer("127.0.0.1", port):
            begin = time.monotonic()
            located = await make_locator(endpoints).locate(is_first=False)
            assert (located.index, located.is_host) == (1, False)
            assert time.monotonic() - begin < 10
        begin = time.monotonic()
        located = await make_locator(endpoints).locate(is_first=False)
        assert (located.index, located.is_host) == (1, True)
        assert time.monotonic() - begin < 10


@pytest.mark.slow
async def test_a_resolver_that_does_not_answer(
    make_locator: MakeLocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It delays neither other endpoints nor the exit."""
    answered = threading.Event()

    def answer(host: str) -> str:
        if host == "slow.example":
            answered.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return host

    resolve_by(monkeypatch, answer)
    try:
        port = free_port()
        located = await make_locator(f"slow.example:{port},127.0.0.1:{port}").locate(is_first=False)
        assert (located.index, located.is_host) == (1, True)
        locator = make_locator(f"slow.example:{port}", read_timeout=1.2)
        with pytest.raises(DiscoveryError, match=f"slow.example:{port}: its name is still being"):
            await locator.locate(is_first=True)
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "resolver":
                thread.join()
    with pytest.raises(DiscoveryError, match="its name is unknown: Temporary failure"):
        await make_locator(f"slow.example:{port}", read_timeout=0.2).locate(is_first=True)


async def test_localhost_needs_no_resolver(
    make_locator: MakeLocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolve_by(monkeypatch, refuse)
    assert (await make_locator(f"localhost:{free_port()}").locate(is_first=True)).is_host


async def test_the_active_run_is_preferred(make_locator: MakeLocator) -> None:
    ports = free_port(), free_port()
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with StoreServer("127.0.0.1", ports[0]), StoreServer("127.0.0.1", ports[1]) as later:
        assert (await make_locator(endpoints).locate(is_first=True)).index == 0
        async with connect(later.endpoint, timeout=5) as store, store.lease(2) as lease:
            await enter_run(store, RUN, job="", reuse=False)
            await lease.set(f"elastic_aio/{RUN}/0/coordinator", "x")
            assert (await make_locator(endpoints).locate(is_first=True)).index == 1
            other = await make_locator(endpoints, run_id="other").locate(is_first=True)
            assert other.index == 0
        assert (await make_locator(endpoints).locate(is_first=True)).index == 0


async def test_a_later_endpoint_waits_for_the_first_host(
    make_locator: MakeLocator, only_local: Callable[[str], None]
) -> None:
    """At the start, for 4 s."""
    port = free_port()
    only_local("127.0.0.2")
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    second = asyncio.ensure_future(make_locator(endpoints).locate(is_first=True))
    await asyncio.sleep(0.5)  # the delay of the first node
    async with StoreServer("127.0.0.1", port):
        located = await second
        assert (located.index, located.is_host) == (0, False)


@pytest.fixture
def suspensions(monkeypatch: pytest.MonkeyPatch, only_local: Callable[[str], None]) -> list[float]:
    """Durations for which this process stops when it has looked at its endpoint 127.0.0.2."""
    only_local("127.0.0.2")
    dial = StoreNetwork.dial
    seconds: list[float] = []

    async def dial_and_stop(self: StoreNetwork, address: Address) -> socket.socket:
        if address[1][0] == "127.0.0.2" and seconds:
            # Before another store can answer.
            asyncio.get_running_loop().call_soon(time.sleep, seconds.pop())
        return await dial(self, address)

    monkeypatch.setattr(StoreNetwork, "dial", dial_and_stop)
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("read_timeout", [4.0, 2.0])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_suspended_host_serves_no_later_endpoint(
    is_first: bool, read_timeout: float, make_locator: MakeLocator, suspensions: list[float]
) -> None:
    """It finds the store that it could not find meanwhile, also after the end of the search."""
    port = free_port()
    suspensions.append(2.5)  # longer than the time until any turn
    async with StoreServer("127.0.0.1", port):
        locator = make_locator(f"127.0.0.1:{port},127.0.0.2:{port}", read_timeout=read_timeout)
        located = await locator.locate(is_first=is_first)
    assert (located.index, located.is_host, suspensions) == (0, False, [])


@pytest.mark.slow
async def test_a_suspended_host_serves_a_later_endpoint_in_the_end(
    make_locator: MakeLocator, suspensions: list[float]
) -> None:
    """A suspension delays its turn by no more than the time to look at the others."""
    port = free_port()
    suspensions.append(2.5)
    locator = make_locator(f"127.0.0.1:{port},127.0.0.2:{port}", read_timeout=3.0)
    located = await locator.locate(is_first=True)
    assert (located.index, located.is_host, suspensions) == (1, True, [])


async def wait_superseded(located: LocatedStore) -> ActiveElsewhere:
    """Wait as a node whose job has begun at this store."""
    assert located.others is not None
    return await located.others.wait_superseded(RunRecord(0, "mine"), lambda: True, at_once=True)


async def test_a_later_host_looks_at_the_earlier_endpoints_often_enough(
    make_locator: MakeLocator, only_local: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the heartbeat timeout is."""
    monkeypatch.setattr(locator_module, "_OTHER_INTERVAL_MAX", 0.1)
    port = free_port()
    only_local("127.0.0.2")
    locator = make_locator(f"127.0.0.1:{port},127.0.0.2:{port}", heartbeat_timeout=3600.0)
    located = await locator.locate(is_first=False)
    assert (located.index, located.is_host) == (1, True)
    async with (
        StoreServer("127.0.0.1", port) as earlier,
        connect(earlier.endpoint, timeout=5) as store,
    ):
        await enter_run(store, RUN, job="", reuse=False)
        await store.set(f"elastic_aio/{RUN}/0/coordinator", "x")
        async with asyncio.timeout(20):
            assert (await wait_superseded(located)).endpoint.index == 0


@pytest.mark.slow
async def test_a_later_endpoint_is_served_in_the_end(
    make_locator: MakeLocator, only_local: Callable[[str], None]
) -> None:
    """Earlier if `read_timeout` is short."""
    port = free_port()
    only_local("127.0.0.2")
    locator = make_locator(f"127.0.0.1:{port},127.0.0.2:{port}", read_timeout=2.0)
    begin = time.monotonic()
    located = await locator.locate(is_first=True)
    assert (located.index, located.is_host) == (1, True)
    assert 1.0 <= time.monotonic() - begin < 20


@pytest.mark.slow
async def test_a_later_host_yields_to_an_earlier_one(
    make_locator: MakeLocator, only_local: Callable[[str], None]
) -> None:
    """Only when the run is active there."""
    port = free_port()
    only_local("127.0.0.2")
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    locator = make_locator(endpoints, heartbeat_timeout=2.0)
    located = await locator.locate(is_first=False)
    assert (located.index, located.is_host) == (1, True)
    waiting = asyncio.ensure_future(wait_superseded(located))
    async with StoreServer("127.0.0.1", port) as earlier:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):  # longer than it takes to look there
                await asyncio.shield(waiting)
        async with connect(earlier.endpoint, timeout=5) as store, store.lease(2) as lease:
            await enter_run(store, RUN, job="", reuse=False)
            await lease.set(f"elastic_aio/{RUN}/0/coordinator", "x")
            async with asyncio.timeout(20):
                assert (await waiting).endpoint.index == 0
            located = await locator.locate(is_first=False)
            assert (located.index, located.is_host) == (0, False)


async def test_a_host_does_not_yield_to_itself(
    make_locator: MakeLocator, only_local: Callable[[str], None]
) -> None:
    """Two endpoints may lead to one store."""
    only_local("127.0.0.2")
    port = free_port()
    endpoints = f"127.0.0.2:{port},127.0.0.2:{port}"
    host = await make_locator(endpoints, heartbeat_timeout=2.0).locate(is_first=False)
    entry = await enter_run(host.store, RUN, job="", reuse=False)
    assert entry is not None
    await host.store.set(f"elastic_aio/{RUN}/0/coordinator", "we")
    client = await make_locator(endpoints, heartbeat_timeout=2.0).locate(is_first=False)
    assert (host.is_host, client.is_host) == (True, False)
    assert host.others is not None
    assert client.others is not None
    assert not await host.others.have(entry[0].job)
    assert await client.others.have(entry[0].job)


async def test_an_own_address_that_leads_elsewhere_is_not_served(
    make_locator: MakeLocator, only_local: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setattr(StoreNetwork, "is_local", lambda *_: True)
    bound: list[object] = []

    def bind(addresses: object, *_: object, **__: object) -> list[socket.socket]:
        # As with ip_nonlocal_bind, ip(7): bind succeeds, and no connection arrives.
        bound.append(addresses)
        sock = socket.socket()
        sock.bind(("127.0.0.9", port))
        sock.listen()
        sock.setblocking(False)
        return [sock]

    monkeypatch.setattr("elastic_aio.discovery.network.bind_addresses", bind)
    locator = make_locator(f"127.0.0.1:{port}", read_timeout=0.5)
    with pytest.raises(DiscoveryError, match="this node does not reach itself"):
        await locator.locate(is_first=True)
    assert bound
    async with StoreServer("127.0.0.1", port):
        assert not (await make_locator(f"127.0.0.1:{port}").locate(is_first=True)).is_host


async def test_closing_leaves_nothing_open(make_locator: MakeLocator) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    locator = make_locator(endpoint)
    for _ in range(3):
        located = await locator.locate(is_first=True)
        assert located.is_host
        await locator.aclose()
        await locator.aclose()
        with pytest.raises(StoreClosed):
            await located.store.num_keys()
    located = await locator.locate(is_first=True)
    task = asyncio.ensure_future(locator.aclose())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with StoreServer("127.0.0.1", int(endpoint.rpartition(":")[2])):
        pass


@pytest.mark.parametrize("role", ["host", "client", "neighbour"])
async def test_cancelling_leaves_nothing_open(make_locator: MakeLocator, role: str) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    if role == "host":
        locator, server = make_locator(endpoint), None
    else:
        server = StoreServer("127.0.0.1", port)
        await server.start()
        is_host = True if role == "neighbour" else None
        locator = make_locator(endpoint, is_host=is_host)
    # libuv opens a spare file with the first server, and keeps it.
    await locator.locate(is_first=True)
    await locator.aclose()
    before = open_descriptors()
    for turns in itertools.count():
        task = asyncio.ensure_future(locator.locate(is_first=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            await locator.aclose()  # it was faster
        assert "not connected" in repr(locator)
        # Transports close in a later turn.
        await until(lambda: open_descriptors().keys() == before.keys(), f"turn {turns}")
    assert turns > 10
    await locator.aclose()
    if server is not None:
        await server.aclose()


@pytest.mark.parametrize("endpoint", ["host:x", "host:65536", ":29400", "a:1,b c"])
def test_invalid_endpoints(endpoint: str) -> None:
    with pytest.raises(SpecError, match=r"^rendezvous.endpoint: must"):
        StoreLocator(RendezvousSpec(endpoint=endpoint), RUN)


async def test_a_self_connect_is_refused(make_locator: MakeLocator) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    made = socket.socket

    def bound(*args: int) -> socket.socket:
        sock = made(*args)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        return sock

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", bound)
        connector = Dialer(RendezvousSpec(), RUN, StoreNetwork())
        with pytest.raises(StoreNotFound, match="refused"):
            await connector.dial("127.0.0.1", [(socket.AF_INET, ("127.0.0.1", port))])


@pytest.mark.slow
async def test_a_busy_host_serves_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late its server answers: no packet to an own address is lost."""
    dial = StoreNetwork.dial

    async def dial_late(self: StoreNetwork, address: Address) -> socket.socket:
        await asyncio.sleep(1.2)  # longer than a node waits for a translated address
        return await dial(self, address)

    monkeypatch.setattr(StoreNetwork, "dial", dial_late)
    monkeypatch.setattr(locator_module, "_CONNECT_TIMEOUT", 30.0)
    endpoint = f"127.0.0.1:{free_port()}"
    locator = StoreLocator(RendezvousSpec(endpoint=endpoint, read_timeout=30.0), "run")
    try:
        located = await locator.locate(is_first=True)
        assert located.is_host
    finally:
        await locator.aclose()


@pytest.mark.slow
async def test_a_slow_store_counts_as_none_and_is_still_waited_for() -> None:
    """Another attempt would cost it the same work again."""
    states: list[tuple[EndpointState, str]] = []
    async with StoreServer("127.0.0.1") as server, ChaosProxy(server.port) as proxy:
        proxy.delay = 0.2
        changed = asyncio.Event()
        spec = RendezvousSpec(endpoint=proxy.endpoint, heartbeat_timeout=30.0)
        connector = Dialer(spec, RUN, StoreNetwork())
        endpoint = Endpoint.parse(0, proxy.endpoint)
        watched = EndpointMonitor(endpoint, connector, changed.set, silent_after=0.1)
        try:
            while not states or states[-1][0] is not EndpointState.STORE:
                await changed.wait()
                changed.clear()
                states.append((watched.state, watched.reason))
        finally:
            await watched.aclose()
        assert states[0] == (
            EndpointState.NO_STORE,
            "it accepts connections, but does not answer",
        )
        assert proxy.connections == 1
