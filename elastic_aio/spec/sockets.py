"""Listening sockets that a job opens and its workers inherit: `SocketSpec`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from elastic_aio.errors import SpecError
from elastic_aio.spec import checks
from elastic_aio.spec.fields import Converted, SpecValue, field, spec_fields
from elastic_aio.text import os_bytes

_NAME: Final = re.compile(r"[!-9;-~]{1,255}")
"""The name of a descriptor in `LISTEN_FDNAMES`, which colons separate."""
_NAMED: Final = re.compile(r"([\w.-]+)=((?:tcp|unix):.*)", re.DOTALL)
_FORMS: Final = "must be tcp://HOST:PORT, tcp://*:PORT or unix:///PATH"
_PATH_MAX: Final = 107
"""Bytes of the path of a socket: unix(7)."""
_SOCKETS_MAX: Final = 64


def _name(name: str, value: object) -> str:
    text = checks.checked_text(name, value)
    if text and not _NAME.fullmatch(text):
        raise SpecError(name, value, "must have 1 to 255 ASCII characters without ':' and space")
    return text


class SocketSpec(SpecValue, prefix="sockets."):
    """A socket that listens before the first worker starts, and until the last one has ended."""

    address: str = field(check=checks.checked_text, kw_only=False)
    """`tcp://HOST:PORT`, with a name or number of this host, or `*` for all of its addresses; or
    `unix:///PATH`."""
    name: str = field(default="", check=_name)
    """The name in `LISTEN_FDNAMES`; empty is "unknown", as sd_listen_fds(3) says it."""
    reuse_port: bool = field(default=False)
    """Whether each worker has a socket of its own at the same port (SO_REUSEPORT), so that the
    kernel divides the connections; otherwise all workers accept from one socket."""
    mode: Converted[int, int | str] = field(default=0o666, check=checks.checked_mode)
    """The permissions of the path of a Unix socket, whatever the umask; a text is octal.  The
    default is 0666: any user may connect.  The owner is `limits.user`."""

    def _check(self) -> None:
        if self.path is None:
            _ = self.host_port
            if self.mode != 0o666:
                raise SpecError("sockets.mode", self.mode, f"needs a path (address {self.address})")
        elif self.reuse_port:
            raise SpecError("sockets.reuse_port", True, f"needs a port (address {self.address})")

    @property
    def path(self) -> str | None:
        """The path of a Unix socket; None for a port."""
        if (path := self.address.removeprefix("unix://")) == self.address:
            return None
        if not path.startswith("/") or path.endswith("/"):
            raise SpecError("sockets", self.address, _FORMS)
        if len(os_bytes(path)) > _PATH_MAX:
            problem = f"must have a path of at most {_PATH_MAX} bytes"
            raise SpecError("sockets", self.address, problem)
        return path

    @property
    def host_port(self) -> tuple[str | None, int]:
        """The host, None for all addresses, and the port of a TCP socket."""
        if (where := self.address.removeprefix("tcp://")) == self.address:
            raise SpecError("sockets", self.address, _FORMS)
        is_any = where.startswith(("*:", ":"))
        if is_any:
            where = f"any{where.removeprefix('*')}"
        try:
            host, port = checks.parse_host_port("sockets", where)
        except SpecError as error:
            raise SpecError("sockets", self.address, error.problem) from None
        return (None if is_any else host), port


def checked_sockets(name: str, value: object) -> tuple[SocketSpec, ...]:
    """Return sockets, each given as a value, a table of its fields, an address or NAME=ADDRESS.

    Raises:
        SpecError: one has none of these forms, or two have the same address.
    """
    sockets = tuple(_socket(name, item) for item in checks.checked_items(name, value))
    addresses = [each.address for each in sockets]
    for address in addresses:
        if addresses.count(address) > 1:
            raise SpecError(name, address, "must not hold an address twice")
    if len(sockets) > _SOCKETS_MAX:
        raise SpecError(name, len(sockets), f"must be at most {_SOCKETS_MAX} sockets")
    return sockets


def _socket(name: str, value: object) -> SocketSpec:
    if isinstance(value, SocketSpec):
        return value
    if isinstance(value, str):
        named = _NAMED.fullmatch(value)
        return SocketSpec(named[2], name=named[1]) if named else SocketSpec(value)
    if isinstance(value, Mapping):
        checks.check_keys(name, value, spec_fields(SocketSpec))
        if "address" in value:
            return SocketSpec(**value)
    raise SpecError(name, value, _FORMS)
