"""The client's handshake: open a connection, identify the server, choose the dialect.

A server of this package answers READY to a CHECK of the reserved key.  Only then the
client sends HELLO: a torch server closes the connection on an unknown opcode.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastic_aio.aio import random_bytes
from elastic_aio.errors import StoreRefused
from elastic_aio.sockets import enable_keepalive
from elastic_aio.spec.tls import TlsSpec, checked_tls
from elastic_aio.store import replies, wire
from elastic_aio.store.link import LinkLost
from elastic_aio.store.link_plain import NO_STORE, PlainLink
from elastic_aio.store.link_tagged import TaggedLink

if TYPE_CHECKING:
    from elastic_aio.store.tls import TlsContext

_PING_NONCE: Final = 0x0E1A5A10
"""An arbitrary number, which the server sends back: every torch client begins with a PING."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where and how a client connects; for the other fields see `RemoteStore`.

    Attributes:
        ping_interval: seconds between two pings; 0: an idle server is not pinged.
    """

    host: str
    port: int
    token: str | None
    reply_timeout: float
    peer_timeout: float
    ping_interval: float
    tls: TlsContext | None = None


def client_context(tls: TlsSpec | None) -> TlsContext | None:
    """Return the TLS context of a client; None without TLS.

    Raises:
        SpecError: a file cannot be used.
    """
    if (checked := checked_tls(tls)) is None:
        return None
    from elastic_aio.store.tls import TlsContext

    return TlsContext(checked, is_server=False)


async def open_link(
    options: LinkOptions, sock: socket.socket | None = None
) -> PlainLink | TaggedLink:
    """Connect, identify the server, and return a link in its dialect.

    The caller bounds it in time.

    Cancellation: closes the connection.

    Args:
        options: where and how to connect.
        sock: a connected socket to use instead; the link owns it from now on.

    Raises:
        OSError: the connection fails.
        LinkLost: the peer closed the connection.
        StoreRefused: the peer is not a store, or has another token.
    """

    async def open_further() -> PlainLink:
        further = PlainLink(options.reply_timeout)
        try:
            async with asyncio.timeout(options.reply_timeout):
                await _connect(further, options)
                try:
                    _check_pong(await further.request(wire.PING, b"", _PING_NONCE))
                except BaseException:  # a cancellation too: the link has no other owner
                    further.fail("the handshake was not completed")
                    raise
        except (OSError, StoreRefused) as error:
            raise LinkLost(str(error) or "no answer") from None
        return further

    link = PlainLink(options.reply_timeout, open_further)
    await _connect(link, options, sock)
    try:
        return await _choose_dialect(link, options)
    except BaseException as error:
        link.fail("the handshake was not completed")
        if isinstance(error, LinkLost) and link.refusal:
            raise StoreRefused(link.refusal) from None
        raise


async def _connect(
    link: PlainLink, options: LinkOptions, sock: socket.socket | None = None
) -> None:
    if options.tls is None:
        await _connect_protocol(link, options, sock)
    else:
        await _connect_tls(link, options, options.tls, sock)
    link.open()


async def _connect_protocol(
    protocol: asyncio.Protocol, options: LinkOptions, sock: socket.socket | None
) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    if sock is None:
        transport, _ = await loop.create_connection(lambda: protocol, options.host, options.port)
    else:
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    enable_keepalive(transport.get_extra_info("socket"), options.peer_timeout)
    return transport


async def _connect_tls(
    link: PlainLink, options: LinkOptions, tls: TlsContext, sock: socket.socket | None
) -> None:
    from elastic_aio.store.tls_transport import TlsTransport

    # The zone of an IPv6 address is a matter of this host.
    name = tls.spec.server_name or options.host.partition("%")[0]
    layer = TlsTransport(link, tls.current(), name)
    transport = await _connect_protocol(layer, options, sock)
    try:
        await layer.wait_open()
    except ConnectionError:
        raise (
            StoreRefused(link.refusal) if link.refusal else LinkLost(link.ended.result())
        ) from None
    except BaseException:  # a cancellation: the connection has no other owner
        transport.abort()
        raise


async def _choose_dialect(link: PlainLink, options: LinkOptions) -> PlainLink | TaggedLink:
    ping = link.request(wire.PING, b"", _PING_NONCE)
    reserved = link.request(wire.CHECK, b"", (wire.RESERVED_KEY,))
    _check_pong(await ping)
    if await reserved != replies.READY:
        if options.token is not None:
            raise StoreRefused("token: a plain TCPStore server has none (remove --token-file)")
        return link
    hello: replies.HelloReply = await link.request(wire.HELLO, b"", wire.VERSION)
    tagged = TaggedLink(options.reply_timeout, hello.instance, options.ping_interval)
    link.hand_over(tagged)
    if hello.needs_token and options.token is None:
        raise StoreRefused("the store asks for a token")
    if options.token is not None and not hello.needs_token:
        raise StoreRefused("token: the store has none (remove --token-file)")
    if options.token is not None:
        await _authenticate(tagged, options.token, hello)
    return tagged


async def _authenticate(link: TaggedLink, token: str, hello: replies.HelloReply) -> None:
    """Prove knowledge of the token, and let the server prove its own."""
    nonce = random_bytes(wire.NONCE_SIZE)
    transcript = hello.instance + hello.nonce + nonce
    message = nonce + wire.token_proof(token, wire.CLIENT, transcript)
    proof: bytes = await link.call(wire.AUTH, message, None)
    if not wire.is_proof(proof, token, wire.SERVER, transcript):
        raise StoreRefused("token: the server does not know it")


def _check_pong(nonce: Any) -> None:
    if nonce != _PING_NONCE:
        raise StoreRefused(NO_STORE)
