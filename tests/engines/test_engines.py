"""The stores on etcd and Redis: what is the same at both."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.discovery.engine import EngineLocator
from elastic_aio.discovery.locator import DiscoveryError
from elastic_aio.errors import StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import ChangeKind
from tests.engines.conftest import Engine
from tests.support.certificates import Authority
from tests.support.servers import ServerProcess
from tests.support.sockets import free_port

pytestmark = pytest.mark.engine


async def test_an_expired_key_differs_from_a_deleted_one(engine: Engine) -> None:
    """A client that is cut off lets its lease expire; another deletes its key, then leaves."""
    async with (
        engine.client() as observer,
        observer.watch("n/", is_prefix=True) as watch,
    ):
        holder = engine.far(lost_after=2)
        async with holder, holder.lease(2) as lease:
            await lease.set("n/lost", "1")
            await lease.set("n/deleted", "1")
            await holder.delete("n/deleted")
            async with observer.lease(5) as released:
                await released.set("n/released", "1")
            engine.proxy.is_refusing = True
            engine.proxy.cut()
            await lease.wait_ended()
            with pytest.raises(StoreLost, match=r"does not answer: .*closed|refused|lost"):
                await holder.get("n/lost")
            changes = [await anext(watch) for _ in range(6)]
        assert [(change.kind, change.key) for change in changes] == [
            (ChangeKind.SET, "n/lost"),
            (ChangeKind.SET, "n/deleted"),
            (ChangeKind.DELETED, "n/deleted"),
            (ChangeKind.SET, "n/released"),
            (ChangeKind.DELETED, "n/released"),
            (ChangeKind.EXPIRED, "n/lost"),
        ]
        assert await observer.peek("n/lost") is None


async def test_another_client_ends_a_lease(engine: Engine) -> None:
    """As if it had expired; its holder notices when it renews it."""
    one, two = engine.client(), engine.client()
    async with one, two, two.watch("", is_prefix=True) as watch, one.lease(3) as lease:
        await lease.set("k", "1")
        for _ in range(2):  # the second has no effect
            await two.end_lease(lease.lease_id)
        kinds = [(change.kind, change.key) for change in [await anext(watch) for _ in range(2)]]
        assert kinds == [(ChangeKind.SET, "k"), (ChangeKind.EXPIRED, "k")]
        await lease.wait_ended()


async def test_watches_go_on_after_broken_connections(engine: Engine) -> None:
    """No change is lost or repeated, of watches that were opened together and are closed apart."""
    async with engine.client() as writer, engine.far() as reader:
        closed = reader.watch("closed")
        opened = [reader.watch("k"), reader.watch("p/", is_prefix=True)]
        _, one, all_of = await asyncio.gather(*(block.__aenter__() for block in (closed, *opened)))
        await closed.__aexit__(None, None, None)
        for number in range(0, 20, 2):
            for key, watch in (("k", one), (f"p/{number}", all_of)):
                await writer.set(key, str(number))
                await writer.set("closed", "1")
                assert (await anext(watch)).value == b"%d" % number
                engine.proxy.cut()
                await writer.set(key, str(number + 1))
                assert (await anext(watch)).value == b"%d" % (number + 1)
        for block in opened:
            await block.__aexit__(None, None, None)
        async with reader.watch("k") as again:
            await writer.set("k", "again")
            assert (await anext(again)).value == b"again"


async def test_requests_of_one_moment_share_connections(engine: Engine) -> None:
    """Of a hundred requests and of several watches; each request has its own reply."""
    async with engine.far() as store, store.lease(5) as lease:
        await asyncio.gather(*(store.set(f"k{number}", str(number)) for number in range(150)))
        reads = (store.peek(f"k{number}") for number in range(150))
        assert await asyncio.gather(*reads) == [b"%d" % number for number in range(150)]
        opened = [store.watch(name) for name in ("a", "b", "c")]
        watches = await asyncio.gather(*(block.__aenter__() for block in opened))
        await asyncio.gather(*(lease.set(name, "1") for name in ("a", "b", "c")))
        assert [(await anext(watch)).key for watch in watches] == ["a", "b", "c"]
        for block in opened:
            await block.__aexit__(None, None, None)
        assert engine.proxy.connections <= 6


async def test_a_refused_request_among_others(engine: Engine) -> None:
    """It alone is refused; a key that is set twice at once has one of the values."""
    async with engine.client() as store:
        async with store.lease(5) as lease:
            pass
        results = await asyncio.gather(
            store.set("a", "1"),
            lease.set("b", "1"),
            store.set("c", "1"),
            store.set("c", "2"),
            return_exceptions=True,
        )
        assert [type(result) for result in results if result] == [StoreRefused]
        assert (await store.peek("a"), await store.peek("b")) == (b"1", None)
        assert await store.peek("c") in (b"1", b"2")


async def test_a_cancelled_request_among_others(engine: Engine) -> None:
    """The others get their replies, whichever of them is cancelled, and at any time."""
    async with engine.client() as store:
        for turns in range(12):
            requests = [asyncio.ensure_future(store.set(f"k{n}", f"{turns}")) for n in range(5)]
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = requests.pop(turns % 5)
            cancelled.cancel()
            await asyncio.gather(*requests)
            await asyncio.wait([cancelled])
            values = [await store.peek(f"k{n}") for n in range(5) if n != turns % 5]
            assert values == [b"%d" % turns] * 4


async def test_a_change_that_the_network_held_back_does_not_replace_a_later_one(
    engine: Engine,
) -> None:
    """It arrives when the client has given its connection up, and has made the change again."""
    proxy = engine.proxy
    async with engine.far(lost_after=3) as store:
        await store.set("k", "0")
        proxy.is_dropping_requests, before = True, len(proxy.sent)
        setting = asyncio.ensure_future(store.set("k", "old"))
        while len(proxy.sent) == before:
            await asyncio.sleep(0.01)
        held = proxy.sent[before]
        proxy.is_dropping_requests = False
        await setting
        await store.set("k", "new")
        host, _, port = engine.endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(held)
        await reader.read(1)  # it has been carried out
        writer.close()
        await writer.wait_closed()
        assert await store.peek("k") == b"new"


async def test_a_closed_port_is_skipped(engine: Engine) -> None:
    """And errors name each endpoint that was tried."""
    closed = f"127.0.0.1:{free_port()}"
    for _ in range(4):  # etcd begins at any of them
        async with engine.client(f"{closed},{engine.endpoint}") as store:
            assert await store.add("n") > 0
    with pytest.raises(StoreTimeout, match=rf"{closed}: connection refused$"):
        async with engine.client(closed, timeout=0.3):
            pass


@pytest.mark.parametrize("reply", [b"220 mail.example ESMTP\r\n\r\n", b":no number\r\n"])
async def test_another_server_at_the_endpoint(engine: Engine, reply: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n")
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreTimeout, match=r"it does not speak (HTTP|the protocol of Redis)$"):
            async with engine.client(f"127.0.0.1:{port}", timeout=0.3):
                pass


async def test_a_closed_store(engine: Engine) -> None:
    store = engine.client()
    with pytest.raises(StoreClosed, match=f"async with {engine.kind.store.__name__}"):
        await store.peek("k")
    async with store:
        with pytest.raises(StoreClosed, match="opened once"):
            await store.open(1)
    await store.aclose()


async def test_a_restart_ends_neither_lease_nor_watch_nor_wait(
    engine: Engine, server: ServerProcess
) -> None:
    """The server is away for longer than a lease lives on Redis, whose leases stand still then."""
    ttl, away = (2, 3) if engine.kind.name == "Redis" else (30, 0)
    async with engine.client(server.endpoint, lost_after=60) as store:
        async with store.lease(ttl) as lease, store.watch("k") as watch:
            await lease.set("mine", "1")
            waiting = asyncio.ensure_future(store.get("later"))
            await asyncio.gather(*(store.peek("later") for _ in range(3)))  # it waits
            server.kill()
            setting = asyncio.ensure_future(store.set("k", "2"))
            await asyncio.sleep(away)
            server.start()
            await setting
            assert (await anext(watch)).value == b"2"
            await store.set("later", "3")
            assert await waiting == b"3"
            assert lease.is_alive
            assert await store.peek("mine") == b"1"
        assert await store.peek("mine") is None


async def test_users(engine: Engine, server: ServerProcess, prefix: str) -> None:
    """A user of the keys of a prefix; what it may not do is refused."""
    engine.kind.admit_one_user(server.endpoint, prefix)
    user = {"user": "job", "password": "s3cret"}
    async with engine.client(server.endpoint, **user) as store, store.watch("k") as watch:
        async with store.lease(2) as lease:
            await lease.set("mine", "1")
        assert await store.peek("mine") is None
        await store.set("k", "1")
        assert (await anext(watch)).value == b"1"
    cases: list[tuple[dict[str, Any], str]] = [
        ({**user, "password": "wrong"}, "{} does not accept the user or the password$"),
        ({}, "{} asks for a user and a password$"),
        ({**user, "key_prefix": "/elsewhere"}, "the {} user has no permission for the keys"),
    ]
    for settings, why in cases:
        with pytest.raises(StoreRefused, match="^" + why.format(engine.kind.name)):
            async with engine.client(server.endpoint, **settings):
                pass


async def test_tls(engine: Engine, tmp_path: Path, authority: Authority) -> None:
    """With a certificate of each side, for the name that is asked for; the errors say why."""
    tls = authority.issue()
    with engine.kind.serve_tls(tmp_path, tls) as server:
        async with engine.client(server.endpoint, tls=tls) as store:
            await store.set("k", "1")
            async with store.watch("k") as watch:
                await store.set("k", "2")
                assert (await anext(watch)).value == b"2"
        with pytest.raises((StoreTimeout, StoreRefused), match=r"perhaps it asks for TLS|HTTPS"):
            async with engine.client(server.endpoint, timeout=0.5):
                pass
        other = Authority(tmp_path, "other").issue()
        # At once, whatever the timeout: another attempt does not help.
        with pytest.raises(StoreRefused, match=r"TLS: (self.signed|unable to get).*\(tls_ca, "):
            async with engine.client(server.endpoint, timeout=300, tls=other):
                pass
        bare = tls.replace(cert=None, key=None)
        with pytest.raises(StoreRefused, match=r"TLS: .*certificate.* \(tls_cert, tls_key\)$"):
            async with engine.client(server.endpoint, timeout=300, tls=bare):
                pass
        named = dataclasses.replace(tls, server_name="elsewhere.example")
        with pytest.raises(StoreRefused, match=r"TLS: Hostname mismatch.*elsewhere.example"):
            async with engine.client(server.endpoint, timeout=300, tls=named):
                pass


async def test_a_job_that_had_a_store_waits_for_new_certificates(
    engine: Engine, tmp_path: Path, authority: Authority
) -> None:
    """Its first search ends at once where a certificate is refused; later ones go on."""
    good, other = authority.issue(), Authority(tmp_path, "other").issue()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Path(str(other.ca)).read_bytes())
    waits: list[str] = []

    def on_wait(why: str, left: float | None) -> None:
        waits.append(why)
        if len(waits) == 2:
            ca.write_bytes(Path(str(good.ca)).read_bytes())

    with engine.kind.serve_tls(tmp_path, good) as server:
        spec = RendezvousSpec(
            backend=engine.kind.name.lower(),
            endpoint=server.endpoint,
            tls=good.replace(ca=str(ca)),
            read_timeout=300,
        )
        locator = EngineLocator(spec, "run", on_wait)
        with pytest.raises(DiscoveryError, match=r"^cannot use .*TLS: .*\(tls_ca, "):
            await locator.locate(is_first=True)
        assert waits == []
        await locator.locate(is_first=False)
        await locator.aclose()
    assert len(waits) == 2
