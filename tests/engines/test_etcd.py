"""The store on etcd: what differs from other engines (`test_engines` has the rest)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.engines.etcd import EtcdStore
from elastic_aio.engines.etcd.link import EtcdLink
from elastic_aio.engines.etcd.wire import LEASE_KEYS, TXN, EtcdFence, Request, put, watch_body
from elastic_aio.engines.link import EngineAccess
from elastic_aio.errors import StoreLost, StoreRefused, StoreTimeout
from elastic_aio.store import ChangeKind
from tests.support.chaos import ChaosProxy
from tests.support.children import DEADLINE_S
from tests.support.etcd import (
    ETCD,
    WHY_NOT,
    EtcdProcess,
    admit_one_user,
    ask,
    etcd_cluster,
    leases_of,
    text,
)

pytestmark = [pytest.mark.engine, pytest.mark.skipif(ETCD is None, reason=WHY_NOT)]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """A server of the test's own."""
    with EtcdProcess(tmp_path) as server:
        yield server


def proxy_of(endpoint: str) -> ChaosProxy:
    return ChaosProxy(int(endpoint.rpartition(":")[2]))


async def set_until_refused(store: EtcdStore, value: bytes = b"1") -> None:
    for number in itertools.count():
        await store.set(f"k{number}", value)


async def test_a_released_lease_deletes_its_keys_only(
    etcd_endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that another client has set meanwhile is not its own any more."""
    one, two = (EtcdStore(etcd_endpoint, key_prefix=prefix) for _ in range(2))
    ask_etcd = one._ask

    async def ask_and_wait(path: str, body: dict[str, Any]) -> Any:
        reply = await ask_etcd(path, body)
        if path == LEASE_KEYS:
            await two.set("taken late", "2")
        return reply

    monkeypatch.setattr(one, "_ask", ask_and_wait)
    async with one, two, two.watch("", is_prefix=True) as watch:
        async with one.lease(5) as lease:
            for key in ("mine", "taken", "taken late"):
                await lease.set(key, "1")
            await two.set("taken", "2")
        kinds = [(change.kind, change.key) for change in [await anext(watch) for _ in range(6)]]
        assert kinds[-1] == (ChangeKind.DELETED, "mine")
        assert sorted(await two.list_keys()) == ["taken", "taken late"]


async def test_a_watch_goes_on_after_a_compaction(etcd_endpoint: str, prefix: str) -> None:
    """It is given the present values, with the mark that changes may be missing."""
    async with (
        EtcdStore(etcd_endpoint, key_prefix=prefix) as writer,
        proxy_of(etcd_endpoint) as proxy,
        EtcdStore(proxy.endpoint, key_prefix=prefix) as reader,
    ):
        await writer.multi_set({"w/gone": "1", "w/kept": "1"})
        async with reader.watch("w/", is_prefix=True) as watch:
            proxy.is_refusing = True
            proxy.cut()
            await writer.delete("w/gone")
            for _ in range(3):
                await writer.set("w/new", "1")
            revision = ask(etcd_endpoint, "kv/range", key=text("x"))["header"]["revision"]
            ask(etcd_endpoint, "kv/compaction", revision=revision, physical=True)
            proxy.is_refusing = False
            changes = [await anext(watch) for _ in range(2)]
            assert {(one.kind, one.key, one.is_resync) for one in changes} == {
                (ChangeKind.DELETED, "w/gone", True),
                (ChangeKind.SET, "w/new", True),
            }


async def test_an_etcd_without_its_data_begins_the_watch_anew(
    tmp_path: Path, etcd: EtcdProcess, prefix: str
) -> None:
    """Its revisions begin anew, and the lease is gone."""
    async with (
        EtcdStore(etcd.endpoint, key_prefix=prefix, lost_after=60) as store,
        store.lease(2) as lease,
        store.watch("w/", is_prefix=True) as watch,
    ):
        for number in range(10):
            await lease.set("w/mine", str(number))
        assert [(await anext(watch)).value for _ in range(10)][-1] == b"9"
        etcd.kill()
        (tmp_path / etcd.name).rename(tmp_path / "lost")
        etcd.start()
        await lease.wait_ended()
        with pytest.raises(StoreRefused, match="the lease has ended"):
            await lease.set("w/mine", "1")
        change = await anext(watch)
        assert (change.kind, change.is_resync) == (ChangeKind.DELETED, True)
        await store.set("w/other", "1")
        assert (await anext(watch)).key == "w/other"


async def test_a_member_that_hangs_is_left(tmp_path: Path, prefix: str) -> None:
    """Its connections stay open, so its silence is what shows."""
    with etcd_cluster(tmp_path) as members:
        endpoints = ",".join(member.endpoint for member in members)
        async with (
            EtcdStore(endpoints, key_prefix=prefix, lost_after=30) as store,
            EtcdStore(members[0].endpoint, key_prefix=prefix) as other,
            store.lease(10) as lease,
            store.watch("k") as watch,
        ):
            await store.set("k", "0")
            assert (await anext(watch)).value == b"0"
            used = next(one for one in members if one.endpoint == store.endpoint)
            writer = other if used is not members[0] else None
            used.send(signal.SIGSTOP)
            try:
                await lease.set("mine", "1")
                await (writer or store).set("k", "1")
                assert (await anext(watch)).value == b"1"
                assert store.endpoint != used.endpoint
                assert lease.is_alive
            finally:
                used.send(signal.SIGCONT)


def client_of(member: EtcdProcess, members: list[EtcdProcess], prefix: str) -> EtcdStore:
    """Return a store that begins at a member."""
    endpoints = ",".join(one.endpoint for one in members)
    while True:
        store = EtcdStore(endpoints, key_prefix=prefix, lost_after=4.5)
        if store.endpoint == member.endpoint:
            return store


async def test_a_change_that_a_member_held_back_does_not_replace_a_later_one(
    tmp_path: Path, prefix: str
) -> None:
    """A suspended member carries out what it was sent when it goes on: the change is repeated."""
    with etcd_cluster(tmp_path) as members:
        used = next(one for one in members if not one.is_leader)
        store = client_of(used, members, prefix)
        async with store, store.lease(60) as lease:
            await store.multi_set({"deleted": "0", "compared": "0", "cancelled": "0"})
            await lease.set("leased", "0")
            used.send(signal.SIGSTOP)
            try:
                cancelled = asyncio.ensure_future(store.append("cancelled", "old"))
                await asyncio.gather(
                    store.set("set", "old"),
                    lease.set("leased", "old"),
                    store.multi_set({"a": "old", "b": "old"}),
                    store.delete("deleted"),
                    store.compare_set("compared", "0", "old"),
                )
                cancelled.cancel()
                assert store.endpoint != used.endpoint
                names = ["set", "leased", "a", "b", "deleted", "cancelled"]
                for name in names:
                    await store.set(name, "new")
                await store.set("compared", "0")
            finally:
                used.send(signal.SIGCONT)
            async with EtcdStore(used.endpoint, key_prefix=prefix) as other:
                for _ in range(50):  # each is carried out by that member
                    await other.set("other", "1")
                    assert await other.multi_get(names) == [b"new"] * len(names)
                    assert await other.peek("compared") == b"0"


async def test_a_cancelled_change_has_its_effect_before_the_next_request_or_never(
    tmp_path: Path, prefix: str
) -> None:
    with etcd_cluster(tmp_path) as members:
        used = next(one for one in members if not one.is_leader)
        async with client_of(used, members, prefix) as store:
            await store.set("k", "0")
            used.send(signal.SIGSTOP)
            try:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await store.set("k", "1")
                seen = await store.peek("k")
            finally:
                used.send(signal.SIGCONT)
            async with EtcdStore(used.endpoint, key_prefix=prefix) as other:
                for _ in range(50):
                    await other.set("other", "1")
                    assert await other.peek("k") == seen


async def test_a_store_goes_on_behind_the_fence_of_the_former_one(
    etcd_endpoint: str, prefix: str
) -> None:
    """No change of the former store has an effect after the next one has been opened."""
    former, later = (EtcdStore(etcd_endpoint, key_prefix=prefix) for _ in range(2))
    async with former:
        await former.set("k", "1")
        fence = former._link.fence
        late = put(f"{prefix}/k".encode(), b"late").fenced(fence.key, fence.revision)
        later.continue_from(former)
        async with later:
            assert await later.peek("k") == b"1"
            reply = await former._link._send(0, late)
            assert reply.is_fenced(fence.revision)
            assert not reply.succeeded


async def test_a_fence_ends_with_its_client(etcd_endpoint: str, prefix: str) -> None:
    """And with its lease, while the client has nothing to change; it is written anew then."""

    def fences() -> dict[str, int]:
        return leases_of(etcd_endpoint, f"{prefix}\0fence/")

    async with EtcdStore(etcd_endpoint, key_prefix=prefix) as store:
        assert await store.peek("k") is None
        assert not fences()
        await store.set("k", "1")
        (lease,) = fences().values()
        ask(etcd_endpoint, "lease/revoke", ID=str(lease))
        assert not fences()
        assert await store.peek("k") == b"1"
        assert await store.compare_set("k", "1", "2") == b"2"
        assert await store.compare_set("k", "1", "3") == b"2"
        assert await store.delete("k")
        assert not await store.delete("k")
        (again,) = fences().values()
        assert again not in (lease, 0)
    assert not fences()


async def test_a_lost_reply(
    etcd_endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be made twice is; an addition is not, and is reported as unknown."""
    async with EtcdStore(etcd_endpoint, key_prefix=prefix) as store:
        send = store._link._send
        lost: list[Any] = []

        async def lose_reply(member: int, request: Request) -> Any:
            reply = await send(member, request)
            # Each change once, and that of the fence.
            if request.path == TXN and request.body["success"] not in lost:
                lost.append(request.body["success"])
                raise OSError("the reply is lost")
            return reply

        monkeypatch.setattr(store._link, "_send", lose_reply)
        for change in (store.add("n"), store.append("n", "0"), store.queue_push("q", "1")):
            with pytest.raises(StoreLost, match="may have been made"):
                await change
        with pytest.raises(StoreLost, match="may have been made"):
            await store.queue_pop("q")
        await store.set("k", "1")
        assert await store.compare_set("c", "", "me") == b"me"
        monkeypatch.undo()
        assert await store.multi_get(["n", "k", "c"]) == [b"10", b"1", b"me"]
        assert await store.queue_len("q") == 0


async def test_a_token_that_etcd_has_forgotten_is_replaced(etcd: EtcdProcess, prefix: str) -> None:
    """More requests at once than connections; the first are all refused."""
    admit_one_user(etcd.endpoint, prefix)
    store = EtcdStore(etcd.endpoint, key_prefix=prefix, user="job", password="s3cret")
    async with store, store.watch("k") as watch:
        etcd.kill()
        etcd.start()  # its tokens are gone
        store._link._token = "forgotten"
        async with asyncio.timeout(DEADLINE_S):
            values = await asyncio.gather(*(store.compare_set(f"c{n}", "", "1") for n in range(20)))
        assert values == [b"1"] * 20
        await store.set("k", "2")
        assert (await anext(watch)).value == b"2"


async def test_a_cancelled_change_is_not_sent_again(etcd: EtcdProcess, prefix: str) -> None:
    """It would replace a later one."""
    async with EtcdStore(etcd.endpoint, key_prefix=prefix, lost_after=600) as store:
        etcd.kill()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.gather(store.set("a", "1"), store.set("b", "1"))
        async with asyncio.timeout(DEADLINE_S):
            while store._link._sending:
                await asyncio.wait(list(store._link._sending))
        etcd.start()
        await asyncio.gather(store.set("a", "2"), store.set("b", "2"))
        assert await store.multi_get(["a", "b"]) == [b"2", b"2"]


async def test_a_user_is_not_needed(etcd_endpoint: str, prefix: str) -> None:
    """An etcd without users accepts every client."""
    async with EtcdStore(etcd_endpoint, key_prefix=prefix, user="a", password="b") as store:
        await store.set("k", "1")


async def test_the_gateway_is_switched_off(tmp_path: Path) -> None:
    with (
        EtcdProcess(tmp_path, "m0", "--enable-grpc-gateway=false") as server,
        pytest.raises(StoreRefused, match=r"JSON gateway is switched off"),
    ):
        async with EtcdStore(server.endpoint):
            pass


async def test_too_few_members_for_a_leader(tmp_path: Path, prefix: str) -> None:
    with etcd_cluster(tmp_path) as members:
        async with EtcdStore(members[0].endpoint, key_prefix=prefix, lost_after=3) as store:
            for member in members[1:]:
                member.kill()
            with pytest.raises(StoreLost, match=r"no leader: too few of its members|not answer"):
                await set_until_refused(store)
        with pytest.raises(StoreTimeout, match="no leader: too few of its members"):
            async with EtcdStore(members[0].endpoint, timeout=8):
                pass


async def test_a_full_database(tmp_path: Path, prefix: str) -> None:
    with EtcdProcess(tmp_path, "m0", f"--quota-backend-bytes={1 << 20}") as server:
        async with EtcdStore(server.endpoint, key_prefix=prefix) as store:
            with pytest.raises(StoreRefused, match="the database of etcd is full"):
                await set_until_refused(store, b"x" * 100_000)
            assert await store.peek("k0") == b"x" * 100_000


async def test_a_value_that_is_too_large(etcd_endpoint: str, prefix: str) -> None:
    async with EtcdStore(etcd_endpoint, key_prefix=prefix) as store:
        with pytest.raises(StoreRefused, match="the value is too large for etcd"):
            await store.set("k", b"x" * (2 << 20))
        await store.multi_set({f"k{number}": "v" for number in range(250)})
        assert await store.num_keys() == 250


async def test_keys_are_retained_together(etcd_endpoint: str, prefix: str) -> None:
    """All clients of a job renew one lease; if it has ended meanwhile, it begins again."""

    def client() -> EtcdStore:
        return EtcdStore(etcd_endpoint, key_prefix=prefix, retention=60, retained="job")

    async with client() as one, client() as two:
        await one.set("a", "1")
        await two.add("b")
        async with two.lease(5) as lease:
            await lease.set("c", "1")
            (of_a, of_b, of_c) = [
                leases_of(etcd_endpoint, prefix)[f"{prefix}/{key}"] for key in "abc"
            ]
            assert of_a == of_b != of_c
        ask(etcd_endpoint, "lease/revoke", ID=str(of_a))
        assert await one.peek("a") is None
        await one.set("a", "2")
        assert leases_of(etcd_endpoint, prefix)[f"{prefix}/a"] == of_a


async def test_a_watch_that_is_not_confirmed_is_opened_again() -> None:
    """A server that keeps the request and says nothing more would be silent for ever."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split()[0])
        requests.append(await reader.readexactly(size))
        text = b'{"result":{"header":{"revision":"5"},"created":true}}\n'
        text += b'{"result":{"events":[{"kv":{"key":"Yg=="}}]}}\n'
        chunk = b"" if len(requests) == 1 else b"%x\r\n%b\r\n" % (len(text), text)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        answered.release()

    answered = asyncio.Semaphore(0)
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        access = EngineAccess((endpoint,), None, None, None, 3.0)
        link = EtcdLink(access, EtcdFence(b""), lambda error: None)
        async with contextlib.aclosing(link.changes(b"b", b"", 5)) as changes:
            event = await anext(changes)
        await link.aclose()
        for _ in range(2):
            await answered.acquire()
        assert event.kv.key == b"b"
        assert requests == [watch_body(b"b", b"", 5)] * 2
