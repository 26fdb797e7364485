"""Open a connection, find out who is there, and speak its dialect.

Only a peer that answers READY to a CHECK of the reserved key is our own server; a
torch server would close the connection on an opcode that it does not know.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Final

from elastic_aio.errors import StoreRefused
from elastic_aio.store import replies, wire
from elastic_aio.store.link import LinkLost
from elastic_aio.store.listen import keep_alive
from elastic_aio.store.plainlink import PlainLink
from elastic_aio.store.taggedlink import TaggedLink

__all__ = ["open_link"]

_PINGED: Final = 0x0E1A5A10
"""Any number would do; a server sends it back."""

_STRANGER: Final = "the peer does not answer like a TCPStore server"


async def open_link(
    host: str,
    port: int,
    *,
    token: str | None,
    reply_timeout: float,
    silence: float,
    sock: socket.socket | None = None,
) -> PlainLink | TaggedLink:
    """Connect, find out who is there, and return the link that speaks its dialect.

    The caller bounds it in time.  Cancelling closes the connection.  With `sock`, that
    is the connection, and the link's from now on.

    Raises:
        OSError: nobody is there.
        LinkLost: the peer closed the connection.
        StoreRefused: it is no store, or wants another token.
    """

    async def another() -> PlainLink:
        try:
            async with asyncio.timeout(reply_timeout):
                link = PlainLink(reply_timeout)
                await _open_plain(link, silence, host, port)
                try:
                    await _greet(link)
                except BaseException:  # a cancellation too: nobody else has the link
                    link.fail("it was not opened to the end")
                    raise
        except (OSError, StoreRefused) as error:
            raise LinkLost(str(error) or "no answer") from None
        return link

    link = PlainLink(reply_timeout, another)
    if sock is None:
        await _open_plain(link, silence, host, port)
    else:
        await _open_plain(link, silence, sock=sock)
    try:
        ping = link.ask(wire.PING, b"", _PINGED)
        known = link.ask(wire.CHECK, b"", (wire.RESERVED_KEY,))
        if await ping != _PINGED:
            raise StoreRefused(_STRANGER)
        if await known != replies.READY:
            if token is not None:
                raise StoreRefused("a plain TCPStore server knows no token; leave it out")
            return link
        greeting = await link.ask(wire.HELLO, b"", wire.VERSION)
        tagged = TaggedLink(reply_timeout, greeting.instance)
        link.hand_over(tagged)
        if greeting.needs_token != (token is not None):
            does = "asks for a token" if greeting.needs_token else "asks for none; leave it out"
            raise StoreRefused(f"the store {does}")
        if token is not None:
            await tagged.call(wire.AUTH, wire.token_code(token, greeting.nonce), None)
    except BaseException as error:
        link.fail("it was not opened to the end")
        if isinstance(error, LinkLost) and link.is_confused:
            raise StoreRefused(_STRANGER) from None
        raise
    return tagged


async def _open_plain(link: PlainLink, silence: float, *where: Any, **how: Any) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(lambda: link, *where, **how)
    keep_alive(transport.get_extra_info("socket"), silence)
    transport.write(wire.OPENING)


async def _greet(link: PlainLink) -> None:
    """Exchange the PING with which every torch client begins."""
    if await link.ask(wire.PING, b"", _PINGED) != _PINGED:
        raise StoreRefused(_STRANGER)
