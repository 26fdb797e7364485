"""The store over TLS: who is served, which line says why not, and what a stranger occupies.

`test_conformance` runs every operation over TLS too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_aio.errors import SpecError, StoreRefused, StoreTimeout
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import ChangeKind, Dropped, StoreServer, connect, wire
from elastic_aio.store.tls import TlsContext, TlsTransport, check_tls
from elastic_aio.store.wire import encode
from tests.store.peers import MIB, Peer, connected, serving
from tests.support.certificates import Authority
from tests.support.children import until

pytestmark = pytest.mark.both_loops

TOKEN = "token-of-this-test"
FORGED = b"\x17\x03\x03\x00\x20" + bytes(32)
"""A record that the peer has not encrypted."""


@pytest.fixture(scope="session")
def node(authority: Authority) -> TlsSpec:
    """The certificates of a node on this host."""
    return authority.issue()


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> TlsSpec:
    """The certificates of another authority."""
    return Authority(tmp_path_factory.mktemp("elsewhere"), "elsewhere").issue()


async def refusal(server: StoreServer, tls: TlsSpec | None) -> str:
    """Return why a client is refused, at its first attempt."""
    with pytest.raises(StoreRefused) as raised:
        await connect(server.endpoint, tls=tls, timeout=60).__aenter__()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_both_sides_have_certificates(
    node: TlsSpec, dropped: list[Dropped], token: str | None
) -> None:
    """With the token as well: values of any size, waits, leases and watches."""
    value = os.urandom(5 * MIB)
    async with (
        serving(dropped, tls=node, token=token) as server,
        connect(server.endpoint, tls=node, token=token) as store,
        connect(server.endpoint, tls=node, token=token) as other,
    ):
        waiting = asyncio.create_task(other.get("large"))
        await store.set("large", value)
        assert await waiting == value
        async with other.watch("key") as watch, store.lease(5.0) as lease:
            await lease.set("key", "leased")
            assert (await anext(watch)).value == b"leased"
        assert dropped == []


async def test_a_token_is_checked_over_tls_too(node: TlsSpec, dropped: list[Dropped]) -> None:
    async with serving(dropped, tls=node, token=TOKEN) as server:
        assert await refusal(server, node) == "the store asks for a token"
        with pytest.raises(StoreRefused, match="the token is wrong"):
            await connect(server.endpoint, tls=node, token="guess-of-this-test").__aenter__()


async def test_without_client_auth_a_ca_is_enough(node: TlsSpec, dropped: list[Dropped]) -> None:
    async with (
        serving(dropped, tls=replace(node, client_auth=False)) as server,
        connect(server.endpoint, tls=TlsSpec(ca=node.ca)) as store,
    ):
        assert await store.add("n") == 1


async def test_the_name_of_the_server_is_checked(
    authority: Authority, dropped: list[Dropped]
) -> None:
    """`tls_server_name` stands for an address that the certificate does not have."""
    named = authority.issue("DNS:store.example")
    async with serving(dropped, tls=named) as server:
        why = await refusal(server, named)
        assert why == (
            "the certificate of the store is refused: IP address mismatch, certificate is not"
            " valid for '127.0.0.1' (tls_server_name sets another name)"
        )
        async with connect(
            server.endpoint, tls=replace(named, server_name="store.example")
        ) as store:
            assert await store.add("n") == 1
    await until(lambda: dropped)
    assert dropped[0].reason == "refuses this store's certificate, whose name is another"


SELF_SIGNED = "self-signed certificate in certificate chain"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server_side", "client_side", "why", "reason"),
    [
        (
            "node",
            "ca of elsewhere",
            f"the certificate of the store is refused: tls_ca does not verify it: {SELF_SIGNED}",
            "does not know the CA of this store's certificate",
        ),
        (
            "node",
            "certificate of elsewhere",
            "tls_cert: is not signed by a CA of the store",
            "presented a certificate that is refused: unable to get local issuer certificate",
        ),
        (
            "expired",
            "node",
            "the certificate of the store is refused: certificate has expired",
            "refuses this store's certificate, which has expired",
        ),
        (
            "node",
            "expired",
            "tls_cert: has expired, says the store",
            "presented a certificate that is refused: certificate has expired",
        ),
        (
            "node",
            "for servers",
            "tls_cert: is not for clients, says the store",
            "presented a certificate that is refused: unsuitable certificate purpose",
        ),
        (
            "node",
            "ca only",
            "the store requires a client certificate (give tls_cert and tls_key)",
            "presented no certificate",
        ),
        (
            "node",
            "plain",
            "the store speaks TLS: give tls_ca, and tls_cert and tls_key if it requires a"
            " certificate",
            "does not speak TLS, which this store requires",
        ),
        (
            "plain",
            "node",
            "the store does not speak TLS (remove tls_ca)",
            "speaks TLS, which this store does not",
        ),
    ],
)
async def test_each_side_says_in_one_line_why_it_refuses_the_other(
    authority: Authority,
    node: TlsSpec,
    elsewhere: TlsSpec,
    dropped: list[Dropped],
    server_side: str,
    client_side: str,
    why: str,
    reason: str,
) -> None:
    """At the first attempt: trying again would not help."""
    sides = {
        "node": node,
        "plain": None,
        "ca only": TlsSpec(ca=node.ca),
        "ca of elsewhere": replace(node, ca=elsewhere.ca),
        "certificate of elsewhere": replace(elsewhere, ca=node.ca),
        "expired": authority.issue(is_expired=True),
        "for servers": authority.issue(usage="serverAuth"),
    }
    async with serving(dropped, tls=sides[server_side]) as server:
        assert await refusal(server, sides[client_side]) == why
        await until(lambda: dropped)
        assert [drop.reason for drop in dropped] == [reason]
        await until(lambda: server.connection_count == 0)


def over_tls(server: StoreServer, tls: TlsSpec) -> AbstractAsyncContextManager[Peer]:
    """Connect by asyncio's own TLS, which shows each byte."""
    return connected(server, context=TlsContext(tls, is_server=False).current())


async def test_a_client_that_does_not_read_occupies_little(
    node: TlsSpec, dropped: list[Dropped]
) -> None:
    """The server stops reading its requests, and serves it as soon as it reads."""
    async with serving(dropped, tls=node) as server, over_tls(server, node) as peer:
        server.keyspace.set(b"/k", os.urandom(MIB))
        peer.pause()
        peer.send(encode(wire.GET, b"/k", None) * 60)
        await until(lambda: any(one._is_paused for one in server.service.connections))
        assert server.service.buffers.size < 4 * MIB
        peer.resume()
        for _ in range(60):
            assert await peer.receive(8) == struct.pack("<Q", MIB)
            await peer.receive(MIB)
        assert dropped == []


async def test_the_end_of_the_stream_is_sent(node: TlsSpec, dropped: list[Dropped]) -> None:
    """So that a reader can tell it from a broken connection."""
    async with serving(dropped, tls=node) as server, over_tls(server, node) as peer:
        await peer.settled()
        await server.aclose()
        assert await peer.reader.read() == b""


@pytest.mark.both_loops
@pytest.mark.parametrize("is_dead", [True, False])
async def test_the_end_of_a_process_differs_from_a_reset(
    node: TlsSpec, dropped: list[Dropped], *, is_dead: bool
) -> None:
    """The kernel of one that was killed sends the end of the connection, and nothing of TLS."""
    async with (
        serving(dropped, tls=node) as server,
        connect(server.endpoint, tls=node) as store,
        store.watch("k") as watch,
        connect(server.endpoint, tls=node, reconnect_for=0) as holder,
    ):
        lease = await holder.lease(5).__aenter__()
        await lease.set("k", "v")
        assert (await anext(watch)).value == b"v"
        assert holder._link is not None
        if is_dead:
            number = holder._link._transport.get_extra_info("socket").fileno()
            with socket.socket(fileno=os.dup(number)) as same:
                same.shutdown(socket.SHUT_WR)
        else:
            holder._link.fail("no answer for 5 s")
        change = await anext(watch)
        assert (change.kind, change.has_closed) == (ChangeKind.EXPIRED, is_dead)


@pytest.mark.slow
async def test_a_connection_may_arrive_byte_by_byte(node: TlsSpec) -> None:
    """Records are cut anywhere; so are the replies."""
    pair = Joined(node)
    pair.client.write(b"first")
    await pair.deliver()
    for data in (bytes(40_000), memoryview(bytes(20_000)), b"", b"last"):
        pair.client.write(data)
        pair.server.write(data)
    await pair.deliver()
    expected = bytes(60_000) + b"last"
    assert b"".join(pair.users[1].received) == b"first" + expected
    assert b"".join(pair.users[0].received) == expected
    pair.client.close()
    await pair.deliver()
    assert pair.raw[1].is_closed
    assert pair.users[1].failure == ""


async def test_a_forged_record_ends_the_connection(node: TlsSpec) -> None:
    pair = Joined(node)
    await pair.deliver()
    pair.server.data_received(FORGED)
    assert pair.users[1].failure.startswith("failed in TLS: ")


async def test_what_is_written_after_an_alert_is_dropped(node: TlsSpec) -> None:
    """The handshake of a client is complete before the server asks for its certificate."""
    pair = Joined(TlsSpec(ca=node.ca), server=node)
    await pair.deliver()
    assert pair.users[0].failure.startswith("the store requires a client certificate")
    pair.client.write(b"late")
    assert not pair.raw[0].sent


async def test_an_answer_to_data_before_an_alert_is_dropped(node: TlsSpec) -> None:
    """Data and alert arrive together: the alert is known before the data is delivered."""
    pair = Joined(node)
    await pair.deliver()
    pair.users[1].on_data = lambda: pair.server.write(b"answer")
    pair.client.write(b"request")
    pair.client.data_received(FORGED)
    pair.server.data_received(bytes(pair.raw[0].sent))
    assert pair.users[1].received == [b"request"]
    assert pair.users[1].failure.endswith("alert bad record mac")
    assert not pair.raw[1].sent


async def test_a_failure_to_encrypt_ends_the_connection(node: TlsSpec) -> None:
    """Not within `write`: a protocol must not fail while it sends."""
    pair = Joined(node)
    await pair.deliver()
    with contextlib.suppress(ssl.SSLError):
        pair.client._tls.unwrap()
    pair.client.write(b"late")
    assert pair.users[0].failure == ""
    await until(lambda: pair.users[0].failure)
    assert pair.users[0].failure == "failed in TLS: protocol is shutdown"


class _Raw(asyncio.Transport):
    """A transport in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


class _User(asyncio.Protocol):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.failure = ""
        self.on_data: Callable[[], object] = lambda: None

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        self.on_data()

    def tls_failed(self, reason: str) -> None:
        self.failure = reason


class Joined:
    """A client and a server in memory."""

    def __init__(self, tls: TlsSpec, server: TlsSpec | None = None) -> None:
        self.users = (_User(), _User())
        self.raw = (_Raw(), _Raw())
        client_context = TlsContext(tls, is_server=False).current()
        server_context = TlsContext(server or tls, is_server=True).current()
        self.client = TlsTransport(self.users[0], client_context, "localhost")
        self.server = TlsTransport(self.users[1], server_context)
        self.server.connection_made(self.raw[1])
        self.client.connection_made(self.raw[0])

    async def deliver(self) -> None:
        """Deliver all bytes, each by itself, until none is left."""
        while self.raw[0].sent or self.raw[1].sent:
            for raw, other in ((self.raw[0], self.server), (self.raw[1], self.client)):
                data, raw.sent = bytes(raw.sent), bytearray()
                for byte in data:
                    other.data_received(bytes((byte,)))


# Strangers.


def hello_of_a_client() -> bytes:
    """Return the first bytes of a client with TLS."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100, None])
async def test_a_handshake_has_a_deadline(
    node: TlsSpec, dropped: list[Dropped], size: int | None
) -> None:
    """Of a client that sends nothing, a part of its first message, or no answer to ours."""
    async with (
        serving(dropped, tls=node, handshake_timeout=0.3) as server,
        connected(server, hello_of_a_client()[:size]) as peer,
    ):
        await peer.ended()
        await until(lambda: server.connection_count == 0)
        assert [drop.reason for drop in dropped] == ["did not complete the handshake in time"]


async def test_an_unfinished_handshake_makes_room(node: TlsSpec, dropped: list[Dropped]) -> None:
    """Clients that have completed theirs are never closed for others."""
    async with (
        serving(dropped, tls=node, connections=3) as server,
        connect(server.endpoint, tls=node) as store,
        contextlib.AsyncExitStack() as stack,
    ):
        await store.add("n")
        for _ in range(5):
            await stack.enter_async_context(connected(server, hello_of_a_client()))
        await until(lambda: len(dropped) == 3)
        async with connect(server.endpoint, tls=node) as other:
            assert await other.add("n") == 2
            assert await store.add("n") == 3
        assert {drop.reason for drop in dropped} == {
            "made room for another client before it completed the handshake"
        }


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x16\x03\x01\x00\x10" + bytes(16),
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x17\x03\x03\x00\x10" + bytes(16),
    ],
)
async def test_garbage_ends_the_connection(
    node: TlsSpec, dropped: list[Dropped], data: bytes
) -> None:
    async with serving(dropped, tls=node) as server, connected(server, data) as peer:
        await peer.ended()
        await until(lambda: dropped)
        assert len(dropped) == 1
        async with connect(server.endpoint, tls=node) as store:
            assert await store.add("n") == 1


@pytest.mark.slow
async def test_a_peer_that_closes_in_the_handshake_is_tried_again(node: TlsSpec) -> None:
    """It may be about to end, and another server to follow; the last error names what it did."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        attempts.append(1)
        writer.close()

    attempts: list[int] = []
    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(StoreTimeout, match="in the TLS handshake: it may not speak TLS"):
            await connect(endpoint, tls=node, timeout=2).__aenter__()
    assert len(attempts) > 1


async def test_a_peer_that_does_not_answer_is_given_up(node: TlsSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeout, match="no answer"):
            await connect(endpoint, tls=node, timeout=0.3).__aenter__()


# Files.


async def test_a_client_reconnects_with_renewed_certificates(
    authority: Authority, node: TlsSpec, elsewhere: TlsSpec, tmp_path: Path, dropped: list[Dropped]
) -> None:
    """Both sides read files that were replaced, and keep those that do not belong together."""
    paths = TlsSpec(cert=tmp_path / "cert", key=tmp_path / "key", ca=tmp_path / "ca")

    def install(tls: TlsSpec, *names: str) -> None:
        for name in names or ("key", "cert", "ca"):
            shutil.copyfile(getattr(tls, name), tmp_path / "new")
            (tmp_path / "new").rename(getattr(paths, name))

    install(node)
    async with serving(dropped, tls=paths) as server, connect(server.endpoint, tls=paths) as store:
        await store.set("k", "v")
        install(elsewhere, "key")
        async with connect(server.endpoint, tls=node) as other:
            assert await other.peek("k") == b"v", "the former certificate is still used"
        install(elsewhere)
        for connection in server.service.connections:
            connection.abort()
        assert await store.get("k") == b"v"
        async with connect(server.endpoint, tls=elsewhere) as other:
            assert await other.peek("k") == b"v"
        assert (await refusal(server, node)).endswith(SELF_SIGNED)


def bad_files(authority: Authority, elsewhere: TlsSpec, directory: Path) -> dict[str, TlsSpec]:
    """Return settings that cannot be used, by the begin of the message."""
    good, expired = authority.issue(), authority.issue(is_expired=True)
    broken, unreadable = directory / "broken", directory / "unreadable"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    unreadable.mkdir()
    read = "must be a file that can be read"
    return {
        f"tls.cert: {read}: no such file or directory (got '/nowhere')": replace(
            good, cert="/nowhere"
        ),
        f"tls.key: {read}: no such file": replace(good, key="/nowhere"),
        f"tls.ca: {read}: no such file": replace(good, ca="/nowhere"),
        f"tls.key: {read}: is a directory": replace(good, key=unreadable),
        "tls.cert: must hold a certificate in PEM format (got": replace(good, cert=good.key),
        "tls.key: must hold a private key in PEM format": replace(good, key=good.cert),
        "tls.ca: must hold certificates in PEM format": replace(good, ca=good.key),
        "tls.cert: cannot be used: ": replace(good, cert=broken),
        "tls.ca: cannot be used: ": replace(good, ca=broken),
        f"tls.key: must be the key of the certificate in {good.cert} (got": replace(
            good, key=expired.key
        ),
        "tls.key: must not be encrypted: nothing can enter": authority.issue(passphrase="12345"),
        f"tls.cert: is not accepted by {good.ca}: certificate has expired": expired,
        f"tls.cert: is not accepted by {good.ca}: unsuitable certificate purpose": authority.issue(
            usage="clientAuth"
        ),
        f"tls.cert: is not accepted by {good.ca}: unable to get local issuer": replace(
            elsewhere, ca=good.ca
        ),
    }


def test_mistakes_in_files_are_found_before_a_connection(
    authority: Authority, elsewhere: TlsSpec, tmp_path: Path
) -> None:
    """Each is one line: the field, the problem, the path."""
    for message, tls in bad_files(authority, elsewhere, tmp_path).items():
        with pytest.raises(SpecError) as raised:
            check_tls(tls, may_serve=True, may_connect=True)
        assert str(raised.value).startswith(message)
        assert "\n" not in str(raised.value)


def test_one_side_checks_its_own_certificate_alone(
    authority: Authority, elsewhere: TlsSpec
) -> None:
    """Its CA verifies the other side, whose certificates may come from elsewhere."""
    mixed = replace(elsewhere, ca=authority.ca)
    check_tls(mixed, may_serve=True, may_connect=False)
    check_tls(mixed, may_serve=False, may_connect=True)
    for usage, serves in (("serverAuth", True), ("clientAuth", False)):
        one_sided = authority.issue(usage=usage)
        check_tls(one_sided, may_serve=serves, may_connect=not serves)
        with pytest.raises(SpecError, match="cannot be used: unsuitable certificate purpose"):
            check_tls(one_sided, may_serve=not serves, may_connect=serves)
    expired = authority.issue(is_expired=True)
    for may_serve in (False, True):
        with pytest.raises(SpecError, match=r"^tls\.cert: cannot be used: certificate has expired"):
            check_tls(expired, may_serve=may_serve, may_connect=not may_serve)


def test_the_certificate_of_a_host_has_its_name(authority: Authority, node: TlsSpec) -> None:
    """That of one of the endpoints, or `tls_server_name`."""

    def check(tls: TlsSpec, *names: str) -> None:
        check_tls(tls, may_serve=True, may_connect=True, names=names)

    check(node, "elsewhere", "127.0.0.1")
    check(replace(node, server_name="localhost"), "elsewhere")
    with pytest.raises(SpecError, match=r"^tls\.cert: is not for node1 or node2 \(got "):
        check(node, "node1", "node2")
    with pytest.raises(SpecError, match=r"^tls\.cert: is not for node1 \(got "):
        check(replace(node, server_name="node1"), "127.0.0.1")


def test_servers_and_clients_check_their_files(node: TlsSpec) -> None:
    """When they are made, before anything is bound or connected."""
    with pytest.raises(SpecError, match=r"^tls\.cert: is needed to serve a store"):
        StoreServer(tls=TlsSpec(ca=node.ca))
    with pytest.raises(SpecError, match=r"^tls\.ca: must be a file"):
        StoreServer(tls=replace(node, ca="/nowhere"))
    with pytest.raises(SpecError, match=r"^tls\.ca: is needed to verify the store's certificate"):
        connect("localhost:1", tls=replace(node, ca=None))
    with pytest.raises(SpecError, match=r"^tls: must be a TlsSpec or None"):
        connect("localhost:1", tls="/ca.pem")  # type: ignore[arg-type]  # a mistake
