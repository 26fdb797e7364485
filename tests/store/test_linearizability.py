"""Concurrent clients under faults: what they saw of each key has one order.

Workloads and faults are made by hypothesis.  Faults happen after a number of operations, and
last until the clients have carried out some more, or a time has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_aio.engines.base import EngineClient
from elastic_aio.engines.etcd import EtcdStore
from elastic_aio.engines.redis import RedisStore
from elastic_aio.errors import StoreLost, StoreRefused
from elastic_aio.store import Change, Lease, MemoryStore, Store, StoreServer, connect
from tests.support import etcd, redis
from tests.support.chaos import ChaosProxy
from tests.support.linearizability import Call, History, is_linearizable

EXAMPLES = int(os.environ.get("ELASTIC_AIO_HISTORIES", "4"))
CLIENTS = 4
LOST_AFTER_S = 30.0
FAULT_S = 1.0
"""The longest time of a fault: clients may all be waiting for its end."""
SUSPENSION_S = 6.0
"""The same where servers are suspended until each client has repeated what it had sent there."""

Fault = tuple[Callable[[], Any], Callable[[], Any]]
"""What begins it, and what ends it: functions, which may return an awaitable."""

OPS = st.sampled_from(["set", "peek", "cas", "cas", "add"])
WORK = st.lists(
    st.lists(st.tuples(OPS, st.sampled_from("ab")), min_size=8, max_size=20),
    min_size=CLIENTS,
    max_size=CLIENTS,
)
WRITES = st.lists(
    st.lists(
        # To one key mostly: what is carried out late is seen in place of a later change.
        st.tuples(st.sampled_from(["set"] * 5 + ["peek", "cas", "add"]), st.just("a")),
        min_size=16,
        max_size=20,
    ),
    min_size=CLIENTS,
    max_size=CLIENTS,
)
SUSPENSIONS = st.tuples(
    st.lists(st.tuples(st.integers(3, 20), st.integers(0, CLIENTS - 1)), max_size=1),
    # Until the end of the work: nothing replaces then what is done late.
    st.tuples(st.integers(10, 40), st.integers(CLIENTS, 2 * CLIENTS - 1)),
).map(lambda pair: [*pair[0], pair[1]])
TIMES = st.lists(st.tuples(st.integers(3, 40), st.integers(0, 9)), max_size=3)


Open = Callable[[str, int], AbstractAsyncContextManager[Store]]
"""Opens a client of the store with a key prefix; odd ones connect through a proxy."""


class Service(NamedTuple):
    """A store under test."""

    open: Open
    faults: Sequence[Fault] = ()
    suspension: float = 0.0
    """If given, the longest time of a fault, which lasts until each client has gone on."""
    is_excused: Callable[[], bool] = lambda: False
    """Whether the loss of changes has been reported to a client: nothing is promised then."""


MakeService = Callable[[], AbstractAsyncContextManager[Service]]

# ------------------------------------------------------------------- the sequential model


def call(client: int, op: str, argument: Any, began: int, ended: int, result: Any) -> Call:
    return Call(client, op, "k", argument, began, ended, result)


def test_the_checker_accepts_an_order_within_overlaps() -> None:
    """The read that returns first may be the later one."""
    history = [
        call(0, "set", b"1", 0, 5, None),
        call(1, "peek", None, 1, 3, b"1"),
        call(2, "peek", None, 2, 6, None),
        call(1, "cas", (b"1", b"2"), 7, 8, b"2"),
        call(1, "add", 3, 9, 10, 5),
    ]
    assert is_linearizable(history)


@pytest.mark.parametrize(
    "history",
    [
        [call(0, "set", b"1", 0, 1, None), call(1, "peek", None, 2, 3, None)],
        [call(0, "add", 1, 0, 3, 1), call(1, "add", 1, 1, 2, 1)],
        [call(0, "cas", (b"", b"1"), 0, 3, b"1"), call(1, "cas", (b"", b"2"), 1, 2, b"2")],
        [
            call(0, "set", b"1", 0, 9, None),
            call(0, "set", b"2", 1, 2, None),
            *(call(1, "peek", None, 2 * n + 3, 2 * n + 4, b"%d" % (n + 1)) for n in range(2)),
            call(1, "peek", None, 7, 8, b"1"),
        ],
    ],
    ids=["stale read", "lost addition", "two winners", "a value comes back"],
)
def test_the_checker_rejects_what_no_order_explains(history: list[Call]) -> None:
    assert not is_linearizable(history)


def test_an_unknown_outcome_may_take_effect_at_any_time_or_never() -> None:
    lost = Call(0, "set", "k", b"1", 0)
    none, some = (call(1, "peek", None, 1, 2, None), call(1, "peek", None, 3, 4, b"1"))
    assert is_linearizable([lost, none])
    assert is_linearizable([lost, none, some])
    assert not is_linearizable(
        [lost, call(1, "peek", None, 1, 2, b"1"), call(1, "peek", None, 3, 4, None)]
    )


# ---------------------------------------------------------------------- a recorded history


async def carry_out(step: Callable[[], Any]) -> None:
    if (work := step()) is not None:
        await work


class Injector:
    """Injects faults into a service while clients work."""

    def __init__(self, service: Service, history: History) -> None:
        self._service = service
        self._history = history
        self._count = 0
        self._waited_for: dict[int, int] = {}
        self._changed = asyncio.Event()
        self._is_over = False

    def progress(self, client: int, *, is_last: bool = False) -> None:
        """Count an operation of a client that has returned."""
        self._count += 1
        left = self._waited_for.pop(client, 0) - 1
        if left > 0 and not is_last:
            self._waited_for[client] = left
        self._changed.set()

    async def run(
        self, times: list[tuple[int, int]], work: list[Coroutine[Any, Any, None]]
    ) -> None:
        """Carry out the work; a fault begins at each time, a number of operations."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._inject(times))
            await asyncio.wait([group.create_task(one) for one in work])
            self._is_over = True
            self._changed.set()

    async def _inject(self, times: list[tuple[int, int]]) -> None:
        for after, which in times if self._service.faults else ():
            await self._wait_count(after)
            if self._is_over:
                return
            begin, end = self._service.faults[which % len(self._service.faults)]
            self._history.faults += 1
            self._history.is_faulty = True
            await carry_out(begin)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._service.suspension or FAULT_S):
                    if self._service.suspension:
                        is_last = which >= len(self._service.faults)
                        await self._wait_each(1000 if is_last else 3)
                    else:
                        await self._wait_count(self._count + 8)
            await carry_out(end)
            self._history.is_faulty = False
            self._history.faults += 1

    async def _wait_each(self, count: int) -> None:
        """Wait until each client has returned from a number of operations, or from its last."""
        self._waited_for = dict.fromkeys(range(CLIENTS), count)
        while self._waited_for and not self._is_over:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_count(self, count: int) -> None:
        while self._count < count and not self._is_over:
            self._changed.clear()
            await self._changed.wait()


async def record(
    service: Service,
    work: list[list[tuple[str, str]]],
    times: list[tuple[int, int]],
    wrap: Callable[[Store], Any] = lambda store: store,
) -> History:
    """Carry out the work of all clients at once, with faults at some times."""
    history = History()
    prefix = f"/{uuid.uuid4().hex}"
    numbers = itertools.count(1)
    injector = Injector(service, history)

    async def client(number: int, ops: list[tuple[str, str]]) -> None:
        async with service.open(prefix, number) as store:
            last: dict[str, bytes] = {}
            for op, name in ops:
                # Counters apart: their values are no unique ones.
                key = f"counter {name}" if op == "add" else name
                value = b"%d.%d" % (number, next(numbers))
                argument: Any = {"set": value, "peek": None, "add": 1}.get(op)
                if op == "cas":
                    argument = (last.get(key, b""), value)
                one = await history.record(number, wrap(store), op, key, argument)
                if one.is_known and op in ("peek", "cas"):
                    last[key] = one.result or b""
                injector.progress(number)
        injector.progress(number, is_last=True)

    await injector.run(times, [client(*one) for one in enumerate(work)])
    if service.suspension:
        async with service.open(prefix, 0) as store:
            for _ in range(10):
                for key in {one.key for one in history.calls}:
                    await history.record(CLIENTS, store, "peek", key, None)
    return history


# ----------------------------------------------------------------------------- the stores


@contextlib.asynccontextmanager
async def memory() -> AsyncIterator[Service]:
    async with MemoryStore() as first:
        yield Service(lambda prefix, number: first.another())


@contextlib.asynccontextmanager
async def tcp() -> AsyncIterator[Service]:
    async with StoreServer("127.0.0.1") as server, ChaosProxy(server.port) as proxy:
        endpoints = server.endpoint, proxy.endpoint
        faults = (cut(proxy), lose_replies(proxy))
        yield Service(lambda prefix, number: connect(endpoints[number % 2]), faults)


def cut(*proxies: ChaosProxy) -> Fault:
    """Break all connections."""

    def begin() -> None:
        for proxy in proxies:
            proxy.cut()

    return begin, lambda: None


def lose_replies(*proxies: ChaosProxy) -> Fault:
    """Carry out requests without a reply, and break the connections later."""

    def drop_replies(*, is_dropping: bool) -> None:
        for proxy in proxies:
            proxy.is_dropping_replies = is_dropping
            if not is_dropping:
                proxy.cut()

    return partial(drop_replies, is_dropping=True), partial(drop_replies, is_dropping=False)


def pause(process: etcd.EtcdProcess | redis.RedisProcess) -> Fault:
    return partial(process.send, signal.SIGSTOP), partial(process.send, signal.SIGCONT)


def kill_member(member: etcd.EtcdProcess, members: list[etcd.EtcdProcess]) -> Fault:
    async def end() -> None:
        member.start([one.peer for one in members])
        await asyncio.to_thread(member.wait_ready)

    return member.kill, end


def restart(server: redis.RedisProcess) -> Fault:
    return server.kill, lambda: asyncio.to_thread(server.start)


def suspend(members: list[etcd.EtcdProcess], used_by: Callable[[], str]) -> Fault:
    """Suspend the member at an endpoint; what it was sent has been carried out at the end."""
    suspended: list[etcd.EtcdProcess] = []

    def begin() -> None:
        suspended.append(next(one for one in members if one.endpoint == used_by()))
        suspended[-1].send(signal.SIGSTOP)

    async def end() -> None:
        member = suspended.pop()
        member.send(signal.SIGCONT)
        async with EtcdStore(member.endpoint, key_prefix=f"/{uuid.uuid4().hex}") as store:
            for _ in range(20):
                await store.set("k", b"")

    return begin, end


def of_suspended_etcd(members: list[etcd.EtcdProcess]) -> MakeService:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        endpoints = ",".join(one.endpoint for one in members)
        stores: dict[int, EtcdStore] = {}

        def open_store(prefix: str, number: int) -> EtcdStore:
            stores[number] = EtcdStore(endpoints, key_prefix=prefix, lost_after=SUSPENSION_S)
            return stores[number]

        def endpoint_of(number: int) -> str:
            return stores[number].endpoint

        faults = [suspend(members, partial(endpoint_of, number)) for number in range(CLIENTS)]
        yield Service(open_store, faults, SUSPENSION_S)

    return make


def fail_over(servers: list[redis.RedisProcess]) -> Fault:
    """Suspend the master, and promote the other server, which it follows when it goes on."""
    waiting: list[socket.socket] = []

    async def begin() -> None:
        master, replica = servers
        await asyncio.to_thread(wait_synced, replica, master)
        master.send(signal.SIGSTOP)
        assert redis.ask(replica.endpoint, "REPLICAOF", "NO", "ONE") == "+OK\r\n"
        # As Sentinel does: before it serves clients again, as far as that is possible.
        waiting.append(socket.create_connection(("127.0.0.1", master.port), 30))
        waiting[-1].sendall(f"REPLICAOF 127.0.0.1 {replica.port}\r\n".encode())
        servers.reverse()

    async def end() -> None:
        servers[1].send(signal.SIGCONT)
        with waiting.pop() as connection:
            assert await asyncio.to_thread(connection.recv, 100) == b"+OK\r\n"

    return begin, end


def wait_synced(replica: redis.RedisProcess, master: redis.RedisProcess) -> None:
    """Make a server a replica, and wait until it has the changes of its master."""
    redis.ask(replica.endpoint, "REPLICAOF", "127.0.0.1", str(master.port))
    while "master_link_status:up" not in redis.ask(replica.endpoint, "INFO", "replication"):
        time.sleep(0.02)
    assert redis.ask(master.endpoint, "WAIT", "1", "0") == ":1\r\n"


def of_suspended_redis(servers: list[redis.RedisProcess]) -> MakeService:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        endpoints = ",".join(one.endpoint for one in servers)
        stores: list[RedisStore] = []

        def open_store(prefix: str, number: int) -> RedisStore:
            stores.append(RedisStore(endpoints, key_prefix=prefix, lost_after=SUSPENSION_S))
            return stores[-1]

        def is_excused() -> bool:
            return any("has lost changes" in repr(store) for store in stores)

        await asyncio.to_thread(wait_synced, servers[1], servers[0])
        faults = [fail_over(servers)]
        yield Service(open_store, faults, SUSPENSION_S, is_excused)

    return make


def of_etcd(members: list[etcd.EtcdProcess]) -> MakeService:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        async with contextlib.AsyncExitStack() as stack:
            proxies = [await stack.enter_async_context(ChaosProxy(one.port)) for one in members]
            endpoints = [",".join(one.endpoint for one in some) for some in (members, proxies)]
            faults = [cut(*proxies), lose_replies(*proxies)]
            faults += [pause(member) for member in members]
            faults += [kill_member(member, members) for member in members]

            def open_store(prefix: str, number: int) -> EtcdStore:
                at = endpoints[number % 2]
                return EtcdStore(at, key_prefix=prefix, lost_after=LOST_AFTER_S)

            yield Service(open_store, faults)

    return make


def of_redis(server: redis.RedisProcess) -> MakeService:
    @contextlib.asynccontextmanager
    async def make() -> AsyncIterator[Service]:
        async with ChaosProxy(server.port) as proxy:

            def open_store(prefix: str, number: int) -> RedisStore:
                at = proxy.endpoint if number % 2 else server.endpoint
                return RedisStore(at, key_prefix=prefix, lost_after=LOST_AFTER_S)

            faults = (cut(proxy), lose_replies(proxy), pause(server), restart(server))
            yield Service(open_store, faults)

    return make


@contextlib.contextmanager
def served(kind: str, directory: Path, *, is_suspended: bool = False) -> Iterator[MakeService]:
    """Start the servers of a kind of store, which persist what they acknowledge.

    `is_suspended`: the fault of an engine is that its servers are suspended, one at a time.
    """
    if kind == "memory":
        yield memory
    elif kind == "tcp":
        yield tcp
    elif kind == "etcd":
        if etcd.ETCD is None:
            pytest.skip(etcd.WHY_NOT)
        with etcd.etcd_cluster(directory) as members:
            yield of_suspended_etcd(members) if is_suspended else of_etcd(members)
    elif redis.REDIS is None:
        pytest.skip(redis.WHY_NOT)
    elif is_suspended:
        for name in ("a", "b"):
            (directory / name).mkdir()
        with (
            redis.RedisProcess(directory / "a") as first,
            redis.RedisProcess(directory / "b") as second,
        ):
            yield of_suspended_redis([first, second])
    else:
        with redis.RedisProcess(directory) as server:
            yield of_redis(server)


KINDS = [
    "memory",
    "tcp",
    pytest.param("etcd", marks=pytest.mark.engine),
    pytest.param("redis", marks=pytest.mark.engine),
]
quick = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_key_has_one_order(kind: str, tmp_path: Path) -> None:
    with served(kind, tmp_path) as make:

        @quick
        @given(work=WORK, times=TIMES)
        def run(work: list[list[tuple[str, str]]], times: list[tuple[int, int]]) -> None:
            async def one() -> History:
                async with make() as service:
                    return await record(service, work, times)

            assert not asyncio.run(one()).violation()

        run()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_each_key_has_one_order_where_servers_are_suspended(kind: str, tmp_path: Path) -> None:
    """A member of etcd goes on with what it was sent; a former master of Redis follows another."""
    with served(kind, tmp_path, is_suspended=True) as make:

        @settings(quick, max_examples=2 * EXAMPLES)
        @given(work=WRITES, times=SUSPENSIONS)
        def run(work: list[list[tuple[str, str]]], times: list[tuple[int, int]]) -> None:
            async def one() -> tuple[History, bool]:
                async with make() as service:
                    return await record(service, work, times), service.is_excused()

            history, is_excused = asyncio.run(one())
            assert is_excused or not history.violation()

        run()


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["etcd", "redis"])
async def test_a_repeated_compare_set_does_not_deny_its_change(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Its reply is lost, and another client replaces the value before it is sent again."""
    make: Any = EtcdStore if kind == "etcd" else RedisStore
    endpoint, prefix = request.getfixturevalue(f"{kind}_endpoint"), f"/{uuid.uuid4().hex}"
    async with (
        ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy,
        make(proxy.endpoint, key_prefix=prefix) as one,
        make(endpoint, key_prefix=prefix) as two,
    ):
        await one.set("other", b"")  # has set up what its changes need
        proxy.is_dropping_replies = True
        changing = asyncio.ensure_future(one.compare_set("k", b"", b"1"))
        assert await two.get("k") == b"1"
        assert await two.compare_set("k", b"1", b"2") == b"2"
        proxy.is_dropping_replies = False
        proxy.cut()
        with pytest.raises(StoreLost, match="the change may have been made"):
            await changing
        # Its own value is known to be its own.
        assert await one.peek("k") == b"2"
        proxy.is_dropping_replies = True
        changing = asyncio.ensure_future(one.compare_set("k", b"2", b"3"))
        while await two.peek("k") != b"3":
            pass
        proxy.is_dropping_replies = False
        proxy.cut()
        assert await changing == b"3"


class _Careless:
    """A store that compares and sets in two steps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.set, self.peek, self.add = store.set, store.peek, store.add

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        present = await self._store.peek(key)
        await asyncio.sleep(0)
        if present == expected or (present is None and not expected):
            await self._store.set(key, desired)
            return desired
        return expected if present is None else present


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_careless_store_is_caught(kind: str, tmp_path: Path) -> None:
    """The check finds a compare-and-set in two steps, in few histories without any fault."""
    with served(kind, tmp_path) as make:

        async def violation() -> str:
            async with make() as service:
                work = [[("cas", "a")] * 10 for _ in range(CLIENTS)]
                return (await record(service, work, [], _Careless)).violation()

        assert any(asyncio.run(violation()) for _ in range(10))


# ------------------------------------------------------------------------------ the leases


class Holders:
    """Checks the changes of `lock`, and of `data` that its holder writes under the same lease."""

    def __init__(self) -> None:
        self.holder: bytes | None = None
        self.taken = 0

    def take(self, change: Change) -> None:
        """Take the next change, in the order of the store."""
        if change.key == "h/data":
            is_checked = change.value is not None and not change.is_resync
            assert not is_checked or change.value == self.holder, (change, self.holder)
            return
        if change.value is not None and not change.is_resync:
            assert self.holder in (None, change.value), (change, self.holder)
            self.taken += 1
        self.holder = change.value


async def take_lock(lease: Lease, store: Store, name: bytes) -> bytes:
    """Take the lock if it is free; return its holder."""
    return await lease.compare_set("h/lock", b"", name)


async def take_carelessly(lease: Lease, store: Store, name: bytes) -> bytes:
    """Do so in two steps."""
    present = await store.peek("h/lock")
    await asyncio.sleep(0)
    if present is None:
        await lease.set("h/lock", name)
    return present or name


Take = Callable[[Lease, Store, bytes], Awaitable[bytes]]


async def hold(store: Store, name: bytes, take: Take, *, leaves: bool) -> None:
    """Get the lock, and write beside it under the same lease; perhaps let the lease expire."""
    async with store.lease(2.0) as lease, store.watch("h/lock") as locks:
        while await take(lease, store, name) != name:
            await anext(locks)
        for _ in range(5):
            await lease.set("h/data", name)
        if leaves and isinstance(store, EngineClient):
            store._leases.clear()
            await lease.set("h/data", name)
            while await store.peek("h/lock") == name:
                await anext(locks)
            with pytest.raises(StoreRefused):
                await lease.set("h/data", name)


async def contend(
    service: Service, times: list[tuple[int, int]], turns: int, take: Take = take_lock
) -> int:
    """Let clients contend for a lock under faults; return how often it was taken."""
    prefix = f"/{uuid.uuid4().hex}"
    injector, holders = Injector(service, History()), Holders()

    async def client(number: int) -> None:
        async with service.open(prefix, number) as store:
            for turn in range(turns):
                with contextlib.suppress(StoreLost, StoreRefused):
                    await hold(store, b"%d.%d" % (number, turn), take, leaves=number == turn)
                injector.progress(number)

    async with service.open(prefix, 0) as store, store.watch("h/", is_prefix=True) as watch:

        async def observe() -> None:
            async for change in watch:
                holders.take(change)

        observing = asyncio.ensure_future(observe())
        await injector.run(times, [client(number) for number in range(CLIENTS)])
        holders.holder = None
        await store.set("h/lock", b"")  # what was before has been observed then
        while holders.holder != b"" and not observing.done():
            await asyncio.sleep(0.01)
        observing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await observing
    return holders.taken


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_a_careless_holder_is_caught(kind: str, tmp_path: Path) -> None:
    with served(kind, tmp_path) as make:

        async def several() -> None:
            for _ in range(10):
                async with make() as service:
                    await contend(service, [], 3, take_carelessly)

        with pytest.raises(AssertionError):
            asyncio.run(several())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_has_one_holder_at_a_time(kind: str, tmp_path: Path) -> None:
    """A holder writes under its lease, and never after another one has taken the key."""
    with served(kind, tmp_path) as make:

        @settings(quick, max_examples=max(EXAMPLES // 3, 1))
        @given(times=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9)), max_size=3))
        def run(times: list[tuple[int, int]]) -> None:
            async def one() -> int:
                async with make() as service:
                    return await contend(service, times, 3)

            assert asyncio.run(one())

        run()
