"""A client of HTTP/1.1 on asyncio streams: one request at a time on a connection.

Only what a JSON gateway needs: POST, and replies with a length or in chunks, which can be read
while the server still sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Final

from elastic_aio.sockets import enable_keepalive
from elastic_aio.spec.checks import format_host_port

_HEAD_MAX: Final = 64 << 10
_BODY_MAX: Final = 256 << 20
_CLOSE_TIMEOUT: Final = 1.0
_NO_HTTP: Final = "it does not speak HTTP"


class HttpError(OSError):
    """The peer does not speak HTTP, or the connection has ended too early."""


class HttpConnection:
    """A connection; made by `open`, closed by its owner.

    The methods raise `OSError` when it has ended, or the peer does not speak HTTP.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host: str,
        *,
        has_tls: bool,
    ) -> None:
        """Use an open connection to `host`."""
        self._reader = reader
        self._writer = writer
        self._host = host
        self._headers: dict[str, str] = {}
        self._is_idle = True
        self._has_replied = has_tls

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        peer_timeout: float,
    ) -> HttpConnection:
        """Connect, in time that the caller bounds.

        The kernel ends the connection `peer_timeout` seconds after the end of the peer's host.
        """
        name = (server_name or host) if tls else None
        reader, writer = await asyncio.open_connection(
            host, port, limit=_HEAD_MAX, ssl=tls, server_hostname=name
        )
        enable_keepalive(writer.get_extra_info("socket"), peer_timeout)
        return cls(reader, writer, format_host_port(host, port), has_tls=tls is not None)

    @property
    def local_address(self) -> str:
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def is_reusable(self) -> bool:
        """Whether the last reply was read whole, and the peer keeps the connection."""
        return self._is_idle and not self._reader.at_eof() and not self._writer.is_closing()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Send a request; return the status and body of the reply.

        Cancellation: leaves the connection unusable.
        """
        status = await self.begin(path, body, headers)
        # Not a part: without the cost of a generator for most replies.
        if "transfer-encoding" not in self._headers and "content-length" in self._headers:
            return status, await self._whole()
        return status, b"".join([part async for part in self.parts()])

    async def begin(self, path: str, body: bytes, headers: Mapping[str, str]) -> int:
        """Send a request; return the status.  `parts` reads the body."""
        self._is_idle = False
        fields = {"Host": self._host, "Content-Length": len(body), **headers}
        lines = [f"POST {path} HTTP/1.1", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await self._writer.drain()
        try:
            status, self._headers = parse_head(await self._until(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise HttpError(_NO_HTTP) from None
            hint = "" if self._has_replied else " without a reply (perhaps it asks for TLS)"
            raise HttpError(f"the connection was closed{hint}") from None
        self._has_replied = True
        return status

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive."""
        if self._headers.get("transfer-encoding") == "chunked":
            try:
                async for chunk in self._chunks():
                    yield chunk
            except asyncio.IncompleteReadError:
                raise HttpError("the connection was closed") from None
            self._is_idle = self._headers.get("connection") != "close"
        elif "content-length" in self._headers:
            yield await self._whole()
        else:
            yield await self._reader.read(-1)

    async def _whole(self) -> bytes:
        try:
            body = await self._reader.readexactly(_size(self._headers["content-length"], 10))
        except asyncio.IncompleteReadError:
            raise HttpError("the connection was closed") from None
        self._is_idle = self._headers.get("connection") != "close"
        return body

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := _size((await self._line()).partition(b";")[0].decode("latin-1"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        while await self._line():
            pass  # trailers

    async def _line(self) -> bytes:
        return (await self._until(b"\r\n"))[:-2]

    async def _until(self, separator: bytes) -> bytes:
        try:
            return await self._reader.readuntil(separator)
        except asyncio.LimitOverrunError:
            raise HttpError(_NO_HTTP) from None

    def abort(self) -> None:
        self._is_idle = False
        self._writer.transport.abort()

    async def aclose(self) -> None:
        """Close the connection, and wait until its descriptor is closed."""
        self.abort()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._writer.wait_closed()


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers, all in lower case."""
    first, *lines = head.decode("latin-1").lower().split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("http/1.") or not status.isdigit() or len(status) < 3:
        raise HttpError(_NO_HTTP)
    fields = (line.partition(":") for line in lines)
    return int(status), {name: value.strip() for name, _, value in fields}


def _size(text: str, base: int) -> int:
    try:
        size = int(text, base)
    except ValueError:
        raise HttpError(_NO_HTTP) from None
    if not 0 <= size <= _BODY_MAX:
        raise HttpError(f"the reply is too large ({size} bytes)")
    return size
