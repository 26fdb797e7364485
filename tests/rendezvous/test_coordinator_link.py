"""The detector of lost processes: which ends of a connection end a lease, and which do not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any, cast

import pytest

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.errors import StoreRefused
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.messages import LEASE_LINGER, DetectorPort
from elastic_aio.sockets import Address
from elastic_aio.spec.checks import parse_host_port
from elastic_aio.store import Lease, StoreServer
from elastic_aio.store.engine import EngineStore
from tests.support.chaos import ChaosProxy
from tests.support.fake_agent import free_endpoint
from tests.support.sockets import free_port, probed

HOST = "127.0.0.1"
LINGER_S = 2 * LEASE_LINGER
DEADLINE_S = 60.0


class FakeEngine:
    """An engine that only records which leases were ended."""

    def __init__(self) -> None:
        self.ended: list[bytes] = []
        self.changed = asyncio.Event()

    async def end_lease(self, lease_id: bytes) -> None:
        self.ended.append(lease_id)
        self.changed.set()


class StableNetwork(StoreNetwork):
    """Listens at a port that no other program gets from the kernel, once it is free again.

    Any program of this host may bind port 0 or connect, and a connection from the port to itself
    is possible as well: each would look like a leader that accepts connections.
    """

    def listen(self, addresses: Iterable[Address], peer_timeout: float) -> list[socket.socket]:
        port = free_port()
        stable = [(family, (name[0], port, *name[2:])) for family, name in addresses]
        return super().listen(stable, peer_timeout)


class Leader:
    """A leader, whose lease is "leader", and the members that watch it."""

    def __init__(self) -> None:
        self.detector = CoordinatorLink(StableNetwork())
        self.engine = FakeEngine()
        self.is_leader = True
        self._tasks: list[asyncio.Task[Any]] = []

    async def open(self) -> DetectorPort:
        port = await self.detector.serve(HOST, lease_of("leader"))
        assert port is not None
        engine = cast("EngineStore", self.engine)
        self._tasks.append(create_task(self.detector.end_lost(engine, self._ask)))
        return port

    async def _ask(self) -> bool:
        return self.is_leader

    async def join(self, port: DetectorPort, name: str = "member") -> asyncio.Task[Any]:
        """Let a member watch the leader; return when the leader has its key."""
        engine = cast("EngineStore", self.engine)
        # A busy host may take seconds to refuse a connection.
        link = CoordinatorLink(port_timeout=DEADLINE_S)
        watching = create_task(link.watch_leader(port, engine, lease_of(name)))
        self._tasks.append(watching)
        while not self.has(name):
            assert not watching.done()
            await asyncio.sleep(0.01)
        return watching

    async def wait_ended(self, count: int) -> None:
        """Wait until so many leases were ended; fail if a member or the leader has given up."""
        while len(self.engine.ended) < count:
            self.engine.changed.clear()
            changed = create_task(self.engine.changed.wait())
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await asyncio.wait([changed, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait([changed])
            for task in self._tasks:
                if task.done():
                    raise AssertionError("it watches no more") from task.exception()

    def has(self, name: str) -> bool:
        server = self.detector.server
        return server is not None and b"/" + name.encode() in server.keyspace.list_keys()

    async def aclose(self) -> None:
        await cancel_and_wait(self._tasks)
        await self.detector.aclose()


def lease_of(name: str) -> Lease:
    """Return a lease on the engine; a write under it is refused."""

    async def refuse(*_: object) -> None:
        raise StoreRefused("the lease has ended")

    lease = Lease(refuse, refuse, "", 1.0, 0.0)
    lease.lease_id = name.encode()
    return lease


def through(proxy: ChaosProxy, port: DetectorPort) -> DetectorPort:
    return DetectorPort(HOST, proxy.port, port.token, port.lease_id)


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    """A leader that is not open yet."""
    async with contextlib.AsyncExitStack() as stack:
        one = Leader()
        stack.push_async_callback(one.aclose)
        yield one


@pytest.fixture
async def proxy() -> AsyncIterator[ChaosProxy]:
    """A proxy that has no target yet."""
    async with ChaosProxy(0) as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("is_leader", [True, False], ids=["leads", "is deposed"])
async def test_a_connection_that_ends_without_a_word_is_a_loss(
    leader: Leader, proxy: ChaosProxy, is_leader: bool
) -> None:
    """But not to a leader that has been replaced."""
    port = await leader.open()
    proxy.target = port.port
    leader.is_leader = is_leader
    await leader.join(port, "other")
    watching = await leader.join(through(proxy, port))
    proxy.is_refusing = True
    proxy.cut()
    with pytest.raises(StoreRefused, match="the lease has ended"):  # it lives, and finds out
        await watching
    assert leader.engine.ended == [b"member"] * is_leader


@pytest.mark.slow
async def test_a_connection_that_is_resumed_is_no_loss(leader: Leader, proxy: ChaosProxy) -> None:
    port = await leader.open()
    proxy.target = port.port
    await leader.join(through(proxy, port))
    for _ in range(3):
        before = proxy.connections
        proxy.cut()
        while proxy.connections == before:
            await asyncio.sleep(0.01)
        await asyncio.sleep(LINGER_S)
    assert not leader.engine.ended


async def test_no_packets_are_sent_on_an_idle_connection(leader: Leader) -> None:
    """A firewall that has forgotten the connection would refuse them."""
    port = await leader.open()
    await leader.join(port)
    assert probed(port.port) == [False, False]


async def test_a_member_that_goes_to_another_leader_is_no_loss(leader: Leader) -> None:
    """Or that ends its session: its process lives."""
    port = await leader.open()
    watching = await leader.join(port)
    await cancel_and_wait([watching])
    assert not leader.has("member")
    await asyncio.sleep(LINGER_S)
    assert not leader.engine.ended


async def test_the_leader_has_gone_when_its_port_refuses_connections(leader: Leader) -> None:
    """Each member ends its lease: which is the first does not matter."""
    port = await leader.open()
    await leader.join(port, "one")
    await leader.join(port, "two")
    await leader.detector.aclose()
    await leader.wait_ended(2)
    assert leader.engine.ended == [b"leader"] * 2


@pytest.mark.slow
async def test_a_leader_that_does_not_answer_has_not_gone(
    leader: Leader, proxy: ChaosProxy
) -> None:
    """It may be suspended, or its port be another program's now."""
    port = await leader.open()
    proxy.target = port.port
    await leader.join(through(proxy, port))
    proxy.is_stalled = True
    await asyncio.sleep(LINGER_S)
    assert not leader.engine.ended
    proxy.is_refusing = True  # it accepts, and closes at once
    proxy.cut()
    await leader.engine.changed.wait()
    await asyncio.sleep(LINGER_S)
    assert leader.engine.ended == [b"member"]


async def test_a_port_that_cannot_be_reached_costs_nothing(leader: Leader) -> None:
    """It refuses connections, but this member has never been connected."""
    await leader.open()
    host, number = parse_host_port("endpoint", free_endpoint())
    port = DetectorPort(host, number, "0" * 32, "leader")
    engine = cast("EngineStore", leader.engine)
    link = CoordinatorLink(connect_timeout=0.1)
    watching = create_task(link.watch_leader(port, engine, lease_of("member")))
    await asyncio.sleep(LINGER_S)
    await cancel_and_wait([watching])
    assert not leader.engine.ended


async def test_a_store_without_the_token_is_not_used() -> None:
    """Another job's leader may have got the port."""
    async with StoreServer(HOST, token="another token of a job") as server:
        port = DetectorPort(HOST, server.port, "0" * 32, "leader")
        assert not await CoordinatorLink().stay_connected(port, "member")


async def test_the_port_outlives_a_term_and_follows_the_address(leader: Leader) -> None:
    first = await leader.open()
    assert await leader.detector.serve(HOST, lease_of("later")) == DetectorPort(
        HOST, first.port, first.token, "later"
    )
    other = await leader.detector.serve("127.0.0.2", lease_of("leader"))
    assert other is not None
    assert other.address == "127.0.0.2"
    assert await leader.detector.serve("name.invalid", lease_of("leader")) is None
