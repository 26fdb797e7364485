"""The store on Redis: what differs from other engines (`test_engines` has the rest)."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.engines.redis import RedisStore
from elastic_aio.engines.redis.script import PAGE
from elastic_aio.errors import StoreLost, StoreRefused, StoreTimeout
from tests.support.chaos import ChaosProxy
from tests.support.redis import REDIS, WHY_NOT, RedisProcess, SentinelProcess, ask
from tests.support.sockets import free_port

pytestmark = [pytest.mark.engine, pytest.mark.skipif(REDIS is None, reason=WHY_NOT)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    """A server of the test's own, which keeps its data."""
    with RedisProcess(tmp_path) as running:
        yield running


@pytest.fixture
async def proxy(redis_endpoint: str) -> AsyncIterator[ChaosProxy]:
    """A proxy of the shared server."""
    async with ChaosProxy(int(redis_endpoint.rpartition(":")[2])) as running:
        yield running


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisProcess, RedisProcess]]:
    """Two servers, none of which is a replica yet."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    # A replica is served at once, and not after five seconds.
    one, two = (
        RedisProcess(tmp_path / name, "--repl-diskless-sync-delay", "0") for name in ("a", "b")
    )
    with one, two:
        yield one, two


async def replicate(replica: RedisProcess, master: RedisProcess) -> None:
    assert ask(replica.endpoint, "REPLICAOF", "127.0.0.1", str(master.port)) == "+OK\r\n"
    while "master_link_status:up" not in ask(replica.endpoint, "INFO", "replication"):
        await asyncio.sleep(0.02)


def promote(replica: RedisProcess) -> None:
    assert ask(replica.endpoint, "REPLICAOF", "NO", "ONE") == "+OK\r\n"


async def read_until_lost(store: RedisStore) -> None:
    while True:
        await store.peek("a")
        await asyncio.sleep(0.05)


async def test_a_key_of_an_expired_lease_is_never_seen(redis_endpoint: str, prefix: str) -> None:
    """The client that reads it ends the lease itself; nothing else needs to run."""
    holder = RedisStore(redis_endpoint, key_prefix=prefix)
    async with (
        RedisStore(redis_endpoint, key_prefix=prefix) as reader,
        holder,
        holder.lease(2) as lease,
    ):
        await lease.set("k", "1")
        assert holder._keeper is not None
        holder._keeper.cancel()
        key = f"{{{prefix}:}}d"
        while (value := await reader.peek("k")) is not None:
            assert value == b"1"
            await asyncio.sleep(0.05)  # only time ends a lease
        assert ask(redis_endpoint, "ZCARD", key) == ":0\r\n"
        with pytest.raises(StoreRefused, match="the lease has ended"):
            await lease.set("k", "2")
        with pytest.raises(StoreRefused, match="the lease has ended"):
            await lease.compare_set("k", "", "2")


async def test_a_silent_subscription_is_replaced(
    redis_endpoint: str, prefix: str, proxy: ChaosProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is open and delivers nothing, while the others work."""
    deliver, silent = proxy.on_data, set[Any]()

    def deliver_to_others(side: Any, data: bytes) -> None:
        if side.is_client and b"SUBSCRIBE" in data and not silent:
            silent.add(side.other)
        if side not in silent or b"subscribe" in data:
            deliver(side, data)

    monkeypatch.setattr(proxy, "on_data", deliver_to_others)
    async with (
        RedisStore(redis_endpoint, key_prefix=prefix) as writer,
        RedisStore(proxy.endpoint, key_prefix=prefix, lost_after=60) as reader,
    ):
        reader._feed._silence = 1.0
        async with reader.watch("k") as watch:
            connections = proxy.connections
            await writer.set("k", "1")
            async with asyncio.timeout(30):
                assert (await anext(watch)).value == b"1"
            assert proxy.connections > connections


async def test_a_change_while_a_watch_is_read(
    redis_endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a large snapshot are of several revisions; each change is seen once."""
    writer, reader = (RedisStore(redis_endpoint, key_prefix=prefix) for _ in range(2))
    async with writer, reader:
        await writer.multi_set({f"w/{number:04}": "0" for number in range(3 * PAGE)})
        run, pages = reader._run, itertools.count()

        async def run_and_change(op: str, *arguments: bytes, **options: Any) -> Any:
            result = await run(op, *arguments, **options)
            if op == "scan":
                page = next(pages)
                await writer.set("w/0001", f"first {page}")
                await writer.set("w/0700", f"last {page}")
            return result

        monkeypatch.setattr(reader, "_run", run_and_change)
        async with reader.watch("w/", is_prefix=True) as watch:
            await writer.set("w/end", "1")
            values = watch.present
            assert len(values) == 3 * PAGE
            assert (values["w/0001"], values["w/0700"]) == (b"0", b"last 1")
            changes = []
            while (change := await anext(watch)).key != "w/end":
                changes.append((change.key, change.value))
        assert next(pages) == 4
        assert changes == [
            ("w/0001", b"first 0"),
            ("w/0001", b"first 1"),
            ("w/0001", b"first 2"),
            ("w/0700", b"last 2"),
            ("w/0001", b"first 3"),
            ("w/0700", b"last 3"),
        ]


async def test_a_prefix_is_no_pattern(redis_endpoint: str, prefix: str) -> None:
    async with (
        RedisStore(redis_endpoint, key_prefix=prefix) as store,
        store.watch("a[*]?\\", is_prefix=True) as watch,
    ):
        for key in ("ab", "a*]?", "a[x]y\\", "a*y!", "a[*]?\\!"):
            await store.set(key, "1")
        assert (await anext(watch)).key == "a[*]?\\!"


async def test_a_server_that_hung_ends_no_lease(server: RedisProcess, prefix: str) -> None:
    """SIGSTOP: its connections stay open, so its silence is what shows."""
    async with (
        RedisStore(server.endpoint, key_prefix=prefix, lost_after=60) as store,
        RedisStore(server.endpoint, key_prefix=prefix, lost_after=2) as impatient,
        store.lease(2) as lease,
        store.watch("k") as watch,
    ):
        await lease.set("mine", "1")
        server.send(signal.SIGSTOP)
        try:
            with pytest.raises(StoreLost, match=r"Redis does not answer: .*: does not answer"):
                await impatient.peek("mine")
            await asyncio.sleep(1)
        finally:
            server.send(signal.SIGCONT)
        await store.set("k", "1")
        assert (await anext(watch)).value == b"1"
        assert lease.is_alive
        assert await store.peek("mine") == b"1"


async def test_a_restart_without_the_data_loses_the_store(tmp_path: Path, prefix: str) -> None:
    """Each client has to enter anew, into another incarnation."""
    with RedisProcess(tmp_path, appends=False) as server:
        store = RedisStore(server.endpoint, key_prefix=prefix, lost_after=60)
        async with store, store.lease(2) as lease, store.watch("k") as watch:
            await lease.set("mine", "1")
            former = store.incarnation
            server.kill()
            server.start()
            await lease.wait_ended()
            with pytest.raises(StoreLost, match="has lost changes"):
                await store.peek("k")
            with pytest.raises(StoreLost, match="has lost changes"):
                await anext(watch)
        async with RedisStore(server.endpoint, key_prefix=prefix) as again:
            await again.set("k", "1")
            assert former != again.incarnation != b""


async def test_what_a_former_store_knew_is_not_forgotten(server: RedisProcess, prefix: str) -> None:
    """A client that gave up and enters anew finds the loss as well, once."""
    async with RedisStore(server.endpoint, key_prefix=prefix) as former:
        await former.set("k", "1")
    former._requests.known.revision += 1  # an acknowledged change
    for _ in range(2):
        store = RedisStore(server.endpoint, key_prefix=prefix)
        store.continue_from(former)
        with pytest.raises(StoreLost, match="has lost changes"):
            await store.open(5)
        await store.aclose()
        former._requests.known.revision -= 1  # only the incarnation differs now
    again = RedisStore(server.endpoint, key_prefix=prefix)
    again.continue_from(store)
    async with again:
        assert await again.peek("k") == b"1"


async def test_lost_changes_are_found_even_when_others_were_made(
    tmp_path: Path, prefix: str
) -> None:
    """A server comes back with its data of some time ago; its revision has been passed since."""
    with RedisProcess(tmp_path, "--appendonly", "no", appends=False) as server:
        endpoint = server.endpoint
        async with (
            RedisStore(endpoint, key_prefix=prefix, lost_after=60) as one,
            ChaosProxy(server.port) as proxy,
        ):
            two = RedisStore(proxy.endpoint, key_prefix=prefix, lost_after=60)
            async with two, one.lease(60) as lease:
                await lease.set("leader", "one")
                await one.set("kept", "1")
                assert ask(endpoint, "SAVE") == "+OK\r\n"
                await two.peek("kept")
                proxy.is_refusing = True
                proxy.cut()
                assert two._requests.known.revision == one._requests.known.revision
                before = one._requests.known.revision
                two._requests.known.revision += 1  # an acknowledged change that was not saved
                former = one.incarnation
                server.kill()
                server.start()
                for number in range(5):  # known to be a continuation by this client
                    await one.set("k", str(number))
                assert one._requests.known.revision > before + 1
                assert one.incarnation == former
                proxy.is_refusing = False
                with pytest.raises(StoreLost, match="has lost changes"):
                    await two.peek("k")
                with pytest.raises(StoreLost, match="has lost changes"):
                    await one.peek("k")
                await lease.wait_ended()
        async with RedisStore(endpoint, key_prefix=prefix) as store:
            assert await store.peek("kept") == b"1"
            assert await store.peek("leader") is None
            assert store.incarnation != former


async def test_a_replica_is_skipped_and_a_fail_over_followed(
    pair: tuple[RedisProcess, RedisProcess], prefix: str
) -> None:
    """Endpoints are tried in their order, until one is no replica."""
    master, replica = pair
    await replicate(replica, master)
    with pytest.raises(StoreTimeout, match=r": (a read-only replica|Redis is loading its data)$"):
        async with RedisStore(replica.endpoint, key_prefix=prefix, timeout=0.3):
            pass
    endpoints = f"{replica.endpoint},{master.endpoint}"
    async with (
        RedisStore(endpoints, key_prefix=prefix, lost_after=60) as store,
        store.lease(5) as lease,
        store.watch("k") as watch,
    ):
        assert store.endpoint == master.endpoint
        await lease.set("mine", "1")
        await store.set("k", "1")
        assert ask(master.endpoint, "WAIT", "1", "0") == ":1\r\n"
        master.kill()
        promote(replica)
        await store.set("k", "2")
        assert [(await anext(watch)).value for _ in range(2)] == [b"1", b"2"]
        assert store.endpoint == replica.endpoint
        assert lease.is_alive


async def test_a_master_that_becomes_a_replica_is_left(
    pair: tuple[RedisProcess, RedisProcess], prefix: str
) -> None:
    """It answers a request of an open connection with READONLY."""
    first, second = pair
    endpoints = f"{first.endpoint},{second.endpoint}"
    async with RedisStore(endpoints, key_prefix=prefix, lost_after=60) as store:
        await store.set("k", "1")
        await replicate(second, first)
        promote(second)
        assert ask(first.endpoint, "REPLICAOF", "127.0.0.1", str(second.port)) == "+OK\r\n"
        assert await store.add("n", 1) == 1
        assert store.endpoint == second.endpoint


async def test_a_fail_back_to_the_first_server_loses_the_store(
    pair: tuple[RedisProcess, RedisProcess], prefix: str
) -> None:
    """Its process and the connections are the same, and its data are those of the other server."""
    first, second = pair
    one, two = (RedisStore(first.endpoint, key_prefix=prefix) for _ in range(2))
    async with one, two:
        await one.set("k", "1")
        await two.peek("k")
        await replicate(second, first)
        promote(second)
        assert await one.add("terms") == 1  # acknowledged, and not replicated
        await replicate(first, second)
        promote(first)
        former = two.incarnation
        for number in range(5):
            await two.set("k", str(number))
        assert two.incarnation == former  # it has not seen what is lost
        for store in (one, two):
            with pytest.raises(StoreLost, match="has lost changes"):
                await store.peek("terms")


async def test_sentinel(
    tmp_path: Path, pair: tuple[RedisProcess, RedisProcess], prefix: str
) -> None:
    """The sentinels know the master, and the next one."""
    master, replica = pair
    (tmp_path / "s").mkdir()
    await replicate(replica, master)
    with SentinelProcess(tmp_path / "s", master) as sentinel:
        with pytest.raises(StoreTimeout, match="the sentinel knows no master 'x'"):
            async with RedisStore(sentinel.endpoint, sentinel="x", timeout=0.3):
                pass
        endpoints = f"127.0.0.1:{free_port()},{sentinel.endpoint}"  # the first is closed
        store = RedisStore(endpoints, key_prefix=prefix, sentinel="m", lost_after=60)
        async with store:
            await store.set("k", "1")
            while "num-slaves\r\n$1\r\n1" not in ask(sentinel.endpoint, "SENTINEL", "MASTER", "m"):
                await asyncio.sleep(0.05)
            assert ask(master.endpoint, "WAIT", "1", "0") == ":1\r\n"
            master.kill()
            await store.set("k", "2")
            assert "role:master" in ask(replica.endpoint, "INFO", "replication")
            assert await store.peek("k") == b"2"


async def test_a_lost_reply(redis_endpoint: str, prefix: str, proxy: ChaosProxy) -> None:
    """What can be made twice is; an addition is not, and is reported as unknown."""
    async with RedisStore(proxy.endpoint, key_prefix=prefix, lost_after=60) as store:
        await store.queue_push("q", "0")

        async def lose_reply(change: Coroutine[Any, Any, Any]) -> Any:
            await store.num_keys()
            proxy.is_dropping_replies, before = True, len(proxy.received)
            changing = asyncio.ensure_future(change)
            while len(proxy.received) == before:
                await asyncio.sleep(0.001)
            proxy.cut()
            proxy.is_dropping_replies = False
            return await changing

        once = (store.add("n"), store.append("n", "0"), store.queue_push("q", "1"))
        for change in (*once, store.queue_pop("q")):
            with pytest.raises(StoreLost, match="may have been made"):
                await lose_reply(change)
        await lose_reply(store.set("k", "1"))
        assert await lose_reply(store.compare_set("c", "", "me")) == b"me"
        assert await store.multi_get(["n", "k", "c"]) == [b"10", b"1", b"me"]
        assert await store.queue_len("q") == 1


async def test_a_full_memory(tmp_path: Path, prefix: str) -> None:
    """Changes are refused; leases are renewed, and keys are read and deleted."""
    with RedisProcess(tmp_path, appends=False) as server:
        store = RedisStore(server.endpoint, key_prefix=prefix)
        async with store, store.lease(2) as lease:
            await lease.set("mine", "1")
            await store.set("k", "1")
            assert ask(server.endpoint, "CONFIG", "SET", "maxmemory", "1") == "+OK\r\n"
            with pytest.raises(StoreRefused, match=r"^the memory of Redis is full"):
                await store.set("k", "2")
            await asyncio.sleep(3)  # the lease would have expired
            assert lease.is_alive
            assert await store.multi_get(["mine", "k"]) == [b"1", b"1"]
            assert await store.delete("k")


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-random"])
async def test_a_server_that_evicts_keys_is_refused(
    tmp_path: Path, prefix: str, policy: str
) -> None:
    """If it has a limit; without one, no key is evicted whatever the policy is."""
    with RedisProcess(tmp_path, "--maxmemory-policy", policy, appends=False) as server:
        async with RedisStore(server.endpoint, key_prefix=prefix) as store:
            await store.set("k", "1")
        assert ask(server.endpoint, "CONFIG", "SET", "maxmemory", "100mb") == "+OK\r\n"
        with pytest.raises(
            StoreRefused, match=rf"^store: Redis must not evict .* \(got {policy}\)$"
        ):
            async with RedisStore(server.endpoint, key_prefix=prefix):
                pass


async def test_a_policy_that_cannot_be_read_is_a_warning(
    server: RedisProcess, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a store, however many connections it opens; changes are made all the same."""
    rights = ["~*", "&*", "+@all", "-info"]
    assert ask(server.endpoint, "ACL", "SETUSER", "job", "on", ">s3cret", *rights) == "+OK\r\n"
    store = RedisStore(server.endpoint, key_prefix=prefix, user="job", password="s3cret")
    async with store, store.watch("k") as watch:
        await store.set("k", "1")
        assert (await anext(watch)).value == b"1"
    need = "does not show its maxmemory-policy, which must be noeviction"
    assert caplog.messages == [f"store: {server.endpoint} {need}"]


async def test_keys_are_removed_after_the_retention(redis_endpoint: str, prefix: str) -> None:
    """All of them, those that were made late too; and a reader prolongs nothing."""

    def client(retention: float | None) -> RedisStore:
        return RedisStore(redis_endpoint, key_prefix=prefix, retention=retention, retained="job")

    def keys() -> list[str]:
        reply = ask(redis_endpoint, "KEYS", f"*{prefix}*").split("\r\n")
        return [line for line in reply if line.startswith("{")]

    async with client(2.0) as one:
        await one.set("a", "1")
        await one.queue_push("q", "1")
        async with one.lease(5) as lease:
            await lease.set("c", "1")
            assert len(keys()) == 8
            assert {key[: key.index("}") + 1] for key in keys()} == {f"{{{prefix}:job}}"}
            assert all(0 < int(ask(redis_endpoint, "PTTL", key)[1:]) <= 2000 for key in keys())
    async with client(None) as reader:
        with pytest.raises(StoreLost, match=r"or has removed all keys$"):
            await read_until_lost(reader)
        assert keys() == []


async def test_a_key_prefix_with_braces(redis_endpoint: str) -> None:
    """The keys are in one hash slot whatever the names are."""
    name = f"}}{uuid.uuid4().hex}{{"
    async with RedisStore(redis_endpoint, key_prefix=name, retained="a}b") as store:
        await store.set("k", "1")
        reply = ask(redis_endpoint, "KEYS", f"*{name[1:-1]}*").split("\r\n")
        keys = [line for line in reply if line.startswith("{")]
        assert {key[: key.index("}") + 1] for key in keys} == {f"{{%7D{name[1:-1]}%7B:a%7Db}}"}


def test_without_the_package(tmp_path: Path) -> None:
    """One line names what to install, before anything starts."""
    (tmp_path / "redis.py").write_text("raise ImportError")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from elastic_aio.cli import entry;"
        " sys.argv = ['aio-elastic', 'run', '--nnodes=2', '--rdzv-backend=redis', 'x.py'];"
        " sys.exit(entry())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install 'elastic_aio[redis]'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
