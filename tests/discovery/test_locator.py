"""Finding the store of a job: who serves it, and what is said when nobody can."""

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

from elastic_aio.errors import SpecError, StoreClosed
from elastic_aio.rendezvous import scouts
from elastic_aio.rendezvous.points import Found, MeetingPoints, PointsError
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.store import StoreServer, connect
from tests.rendezvous.conftest import RUN, MakePoints, StartNode, free_port
from tests.support.children import until
from tests.support.traces import open_descriptors

HAS_IPV6 = os.path.exists("/proc/net/if_inet6")


@contextlib.asynccontextmanager
async def listening(
    port: int, host: str = "127.0.0.1", answer: bytes | None = None
) -> AsyncIterator[None]:
    """Listen like a program that is no store; with `answer`, say that and hang up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer is not None:
            writer.write(answer)
        else:
            with contextlib.suppress(ConnectionError):
                await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, host, port):
        yield


async def are_together(one: Found, other: Found) -> bool:
    """Tell whether what the one writes the other reads."""
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
    make_points: MakePoints, host: str, address: str
) -> None:
    """Whatever the endpoint is called, and both are told under which address they are there."""
    endpoint = f"{host}:{free_port()}"
    first = await make_points(endpoint).find(is_first=True)
    second = await make_points(endpoint).find(is_first=True)
    assert (first.is_host, second.is_host) == (True, False)
    assert first.endpoint == second.endpoint == endpoint
    assert first.index == second.index == 0
    assert first.store.has_extensions
    assert await are_together(first, second)
    for found in (first, second):
        assert found.local_address.startswith(address) or found.local_address == "::1"


async def test_a_name_for_a_loopback_address_is_served_to_everybody(
    make_points: MakePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines often know their own name so; others would look elsewhere for it."""
    lookup = socket.getaddrinfo

    def resolve(host: str, *args: object, **options: object) -> object:
        if host == "nodea" and not options.get("flags"):
            host = "127.0.1.1"
        return lookup(host, *args, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("elastic_aio.rendezvous.points.outward_address", lambda *_: "192.0.2.7")
    port = free_port()
    found = await make_points(f"nodea:{port}").find(is_first=True)
    assert found.is_host
    assert found.local_address == "192.0.2.7"
    # 127.0.0.3 stands for the address under which others know the machine.
    async with connect(f"127.0.0.3:{port}", timeout=5) as store:
        assert store.instance == found.store.instance


async def test_port_0_is_for_who_serves_alone(make_points: MakePoints) -> None:
    """The port that was chosen is told; a mere client cannot know it."""
    found = await make_points("localhost:0").find(is_first=True)
    assert found.is_host
    host, _, port = found.endpoint.rpartition(":")
    assert host == "localhost"
    async with connect(f"127.0.0.1:{port}", timeout=5) as store:
        assert store.instance == found.store.instance
    with pytest.raises(PointsError, match="localhost:0: port 0 is known only to the node"):
        await make_points("localhost:0", is_host=False, read_timeout=0.2).find(is_first=True)


async def test_fifty_races(make_points: MakePoints, start_node: StartNode) -> None:
    """Of two that begin at once, one serves and the other joins, at all times."""
    hosts = set()
    for turn in range(50):
        endpoint = f"localhost:{free_port()}"
        pair = [make_points(endpoint), make_points(endpoint)]
        searches = [points.find(is_first=True) for points in pair[:: -1 if turn % 2 else 1]]
        found = await asyncio.gather(*searches)
        assert sorted(one.is_host for one in found) == [False, True]
        assert await are_together(*found)
        hosts.add(found[0].is_host)
        for points in pair:
            await points.abandon()


async def test_races_of_processes(start_node: StartNode) -> None:
    """The same with processes of their own, in either order."""
    for _ in range(3):
        endpoint = f"localhost:{free_port()}"
        nodes = await asyncio.gather(*(start_node(endpoint=endpoint) for _ in range(3)))
        said = [await node.says("endpoint") for node in nodes]
        assert sorted(one["is_host"] for one in said) == [False, False, True]
        for node in nodes:
            await node.end()


async def test_it_never_serves_when_told_so(make_points: MakePoints) -> None:
    """It waits for another, for as long as was allowed, and says why it gave up."""
    endpoint = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    message = f"no store to meet at within 0.5 s: {endpoint}: refused, nobody listens there$"
    with pytest.raises(PointsError, match=message):
        await make_points(endpoint, is_host=False, read_timeout=0.5).find(is_first=True)
    assert 0.5 <= time.monotonic() - begin < 5
    client = asyncio.ensure_future(make_points(endpoint, is_host=False).find(is_first=True))
    await asyncio.sleep(0.1)  # let it fail a few times
    host = await make_points(endpoint).find(is_first=True)
    assert host.is_host
    assert not (await client).is_host


async def test_a_host_behind_a_translated_address(make_points: MakePoints) -> None:
    """Told to serve, it does so on every interface, though the address is not its own."""
    port = free_port()
    # Nobody's address, and there is no way to it but by dropping packets.
    found = await make_points(f"203.0.113.9:{port}", is_host=True).find(is_first=True)
    assert found.is_host
    assert found.endpoint == f"203.0.113.9:{port}"
    async with connect(f"127.0.0.2:{port}", timeout=5) as store:
        assert store.instance == found.store.instance
    # Another one of the same machine, told the same, finds the port taken by ours.
    neighbour = await make_points(f"203.0.113.9:{port}", is_host=True).find(is_first=True)
    assert not neighbour.is_host
    assert await are_together(found, neighbour)


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad\r\n\r\n\x1b[2J"])
async def test_a_port_that_somebody_else_has(make_points: MakePoints, answer: bytes | None) -> None:
    """Who has to serve fails at once; who need not tries on; both say who has the port."""
    port = free_port()
    begin = time.monotonic()
    async with listening(port, answer=answer):
        with pytest.raises(PointsError) as told:
            await make_points(f"127.0.0.1:{port}", is_host=True).find(is_first=True)
        assert f"port {port} is in use by " in str(told.value)
        assert f"(pid {os.getpid()}), which is no store of this job: " in str(told.value)
        with pytest.raises(PointsError) as tried:
            await make_points(f"127.0.0.1:{port}", read_timeout=2.5).find(is_first=True)
        assert f"(pid {os.getpid()})" in str(tried.value)
        assert "cannot listen there: Address already in use" in str(tried.value)
        for error in (told, tried):
            assert str(error.value).isprintable()
            why = "does not answer" if answer is None else "does not answer like a TCPStore server"
            assert why in str(error.value)
    assert time.monotonic() - begin < 20


async def test_tokens_must_agree(make_points: MakePoints) -> None:
    """A store with another token is none of ours, and the message says so."""
    endpoint = f"127.0.0.1:{free_port()}"
    await make_points(endpoint, token="right").find(is_first=True)
    joined = await make_points(endpoint, token="right").find(is_first=True)
    assert not joined.is_host
    for token, why in (("wrong", "the token is wrong"), (None, "the store asks for a token")):
        with pytest.raises(PointsError, match=why):
            await make_points(endpoint, token=token, read_timeout=0.5).find(is_first=True)
    with pytest.raises(PointsError, match="no store of this job: the token is wrong"):
        await make_points(endpoint, token="wrong", is_host=True).find(is_first=True)


async def test_a_silent_endpoint_holds_up_nobody(make_points: MakePoints) -> None:
    """One that takes connections and says nothing is passed over."""
    silent, port = free_port(), free_port()
    async with listening(silent):
        endpoints = f"127.0.0.1:{silent},127.0.0.1:{port}"
        async with StoreServer("127.0.0.1", port):
            begin = time.monotonic()
            found = await make_points(endpoints).find(is_first=False)
            assert (found.index, found.is_host) == (1, False)
            assert time.monotonic() - begin < 1.5
        begin = time.monotonic()
        found = await make_points(endpoints).find(is_first=False)
        assert (found.index, found.is_host) == (1, True)
        assert time.monotonic() - begin < 1.5


async def test_a_name_that_is_looked_up_for_ever(
    make_points: MakePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that does not answer holds up neither the others nor the end."""
    lookup, answered = socket.getaddrinfo, threading.Event()

    def resolve(host: str, *args: object, **options: object) -> object:
        if host == "slow.example" and not options.get("flags"):
            answered.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return lookup(host, *args, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        port = free_port()
        found = await make_points(f"slow.example:{port},127.0.0.1:{port}").find(is_first=False)
        assert (found.index, found.is_host) == (1, True)
        points = make_points(f"slow.example:{port}", read_timeout=1.2)
        with pytest.raises(PointsError, match=f"slow.example:{port}: its name is still being"):
            await points.find(is_first=True)
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "resolver":
                thread.join()
    with pytest.raises(PointsError, match="its name is unknown: Temporary failure"):
        await make_points(f"slow.example:{port}", read_timeout=0.2).find(is_first=True)


async def test_localhost_needs_no_resolver(
    make_points: MakePoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without /etc/hosts has a loopback address all the same."""
    lookup = socket.getaddrinfo

    def resolve(host: str, *args: object, **options: object) -> object:
        if not options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return lookup(host, *args, **options)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert (await make_points(f"localhost:{free_port()}").find(is_first=True)).is_host


async def test_the_run_goes_on_where_it_is(make_points: MakePoints) -> None:
    """The first store is taken, unless the run is under way at a later one."""
    ports = free_port(), free_port()
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    async with StoreServer("127.0.0.1", ports[0]), StoreServer("127.0.0.1", ports[1]) as later:
        assert (await make_points(endpoints).find(is_first=True)).index == 0
        async with connect(later.endpoint, timeout=5) as store, store.lease(2) as lease:
            await lease.set(f"elastic_aio/{RUN}/coordinator", "somebody")
            assert (await make_points(endpoints).find(is_first=True)).index == 1
            other = await make_points(endpoints, run_id="other").find(is_first=True)
            assert other.index == 0
        assert (await make_points(endpoints).find(is_first=True)).index == 0


async def test_the_first_machine_may_come_up_later(
    make_points: MakePoints, only_local: Callable[[str], None]
) -> None:
    """At the start the node of a later endpoint waits for the earlier one."""
    port = free_port()
    only_local("127.0.0.2")
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    second = asyncio.ensure_future(make_points(endpoints).find(is_first=True))
    await asyncio.sleep(0.5)  # the first machine's delay
    async with StoreServer("127.0.0.1", port):
        found = await second
        assert (found.index, found.is_host) == (0, False)


async def test_the_first_machine_may_never_come(
    make_points: MakePoints, only_local: Callable[[str], None]
) -> None:
    """The node of a later endpoint serves in the end; earlier if there is less time."""
    port = free_port()
    only_local("127.0.0.2")
    points = make_points(f"127.0.0.1:{port},127.0.0.2:{port}", read_timeout=2.0)
    begin = time.monotonic()
    found = await points.find(is_first=True)
    assert (found.index, found.is_host) == (1, True)
    assert 1.0 <= time.monotonic() - begin < 5


async def test_a_later_host_yields_to_an_earlier_one(
    make_points: MakePoints, only_local: Callable[[str], None]
) -> None:
    """It does when the run is under way there, not because of a store alone."""
    port = free_port()
    only_local("127.0.0.2")
    endpoints = f"127.0.0.1:{port},127.0.0.2:{port}"
    points = make_points(endpoints, heartbeat_timeout=2.0)
    found = await points.find(is_first=False)
    assert (found.index, found.is_host) == (1, True)
    waiting = asyncio.ensure_future(points.superseded(found))
    async with StoreServer("127.0.0.1", port) as earlier:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):  # longer than it takes to look there
                await asyncio.shield(waiting)
        async with connect(earlier.endpoint, timeout=5) as store, store.lease(2) as lease:
            await lease.set(f"elastic_aio/{RUN}/coordinator", "somebody")
            async with asyncio.timeout(20):
                assert await waiting == f"127.0.0.1:{port}"
            found = await points.find(is_first=False)
            assert (found.index, found.is_host) == (0, False)


async def test_it_does_not_yield_to_itself(
    make_points: MakePoints, only_local: Callable[[str], None]
) -> None:
    """Two endpoints may lead to one store."""
    only_local("127.0.0.2")
    port = free_port()
    points = make_points(f"127.0.0.1:{port},127.0.0.2:{port}", heartbeat_timeout=2.0)
    found = await points.find(is_first=False)
    assert points._server is not None
    await found.store.set(f"elastic_aio/{RUN}/coordinator", "we")
    alias = MeetingPoints(RendezvousSpec(endpoint=f"127.0.0.2:{port},127.0.0.2:{port}"), RUN)
    alias._server = points._server
    assert not await alias._has_run(alias._points[0])
    alias._server = None
    assert await alias._has_run(alias._points[0])


async def test_an_address_that_is_ours_only_by_name(
    make_points: MakePoints, only_local: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel lets us listen but connections lead elsewhere, we are no host."""
    port = free_port()
    monkeypatch.setattr("elastic_aio.rendezvous.scouts.is_local", lambda _: True)
    bound: list[object] = []

    def bind(addresses: object, *_: object, **__: object) -> list[socket.socket]:
        # What ip_nonlocal_bind does: it succeeds, and nobody ever comes.
        bound.append(addresses)
        sock = socket.socket()
        sock.bind(("127.0.0.9", port))
        sock.listen()
        sock.setblocking(False)
        return [sock]

    monkeypatch.setattr("elastic_aio.rendezvous.points.bind_addresses", bind)
    points = make_points(f"127.0.0.1:{port}", read_timeout=0.5)
    with pytest.raises(PointsError, match="this node does not reach itself"):
        await points.find(is_first=True)
    assert bound
    async with StoreServer("127.0.0.1", port):
        assert not (await make_points(f"127.0.0.1:{port}").find(is_first=True)).is_host


async def test_abandoning_leaves_nothing(make_points: MakePoints) -> None:
    """The connection and the port are free; it may be done again, and found again."""
    endpoint = f"127.0.0.1:{free_port()}"
    points = make_points(endpoint)
    for _ in range(3):
        found = await points.find(is_first=True)
        assert found.is_host
        await points.abandon()
        await points.abandon()
        with pytest.raises(StoreClosed):
            await found.store.num_keys()
    found = await points.find(is_first=True)
    task = asyncio.ensure_future(points.abandon())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with StoreServer("127.0.0.1", int(endpoint.rpartition(":")[2])):
        pass


@pytest.mark.parametrize("role", ["host", "client", "neighbour"])
async def test_cancelling_leaves_nothing(make_points: MakePoints, role: str) -> None:
    """Whichever turn of the loop it comes in."""
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    if role == "host":
        points, server = make_points(endpoint), None
    else:
        server = StoreServer("127.0.0.1", port)
        await server.start()
        is_host = True if role == "neighbour" else None
        points = make_points(endpoint, is_host=is_host)
    # libuv opens a spare file with the first server, and keeps it.
    await points.find(is_first=True)
    await points.abandon()
    before = open_descriptors()
    for turns in itertools.count():
        task = asyncio.ensure_future(points.find(is_first=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
            await points.abandon()  # it was faster
        assert points._store is None
        assert points._server is None
        # Transports close in a later turn.
        await until(lambda: open_descriptors().keys() == before.keys(), f"turn {turns}")
    assert turns > 10
    await points.abandon()
    if server is not None:
        await server.aclose()


@pytest.mark.parametrize("endpoint", ["host:x", "host:65536", ":29400", "a:1,b c"])
def test_bad_endpoints_are_one_line(endpoint: str) -> None:
    """Refused before anything is tried."""
    with pytest.raises(SpecError, match=r"^rendezvous.endpoint: must"):
        MeetingPoints(RendezvousSpec(endpoint=endpoint), RUN)


async def test_a_port_that_dials_itself(make_points: MakePoints) -> None:
    """The kernel may connect a client to its own port, where nobody listens."""
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
        with pytest.raises(scouts.Absent, match="refused"):
            await scouts._dial((socket.AF_INET, ("127.0.0.1", port)))
