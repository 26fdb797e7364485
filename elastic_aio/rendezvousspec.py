"""How the nodes of a job meet: `RendezvousSpec`, frozen and checked when made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from elastic_aio.checks import (
    check_number,
    checked_integer,
    checked_part,
    checked_text,
    is_port,
    set_fields,
)
from elastic_aio.errors import SpecError

__all__ = ["DEFAULT_PORT", "STATIC_PORT", "RendezvousSpec", "checked_host", "parse_endpoints"]

DEFAULT_PORT: Final = 29400
"""Where a store is, unless an endpoint says otherwise; torchrun's for c10d."""

STATIC_PORT: Final = 29500
"""The same for the backend "static"."""

_HEARTBEAT_MIN: Final = 2.0
"""Seconds; the shortest lease that a store grants."""

_ENDPOINT: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSpec:
    """How the nodes of a job meet; nothing of it matters to a job of one node.

    Args:
        backend: "c10d" (or "tcp"): at a store that one of the nodes serves; "static":
            every node is told its rank; or the name of a plug-in (entry-point group
            `elastic_aio.rendezvous`).
        endpoint: where the store is: `HOST:PORT`, `[IPV6]:PORT` or `HOST` (port 29400,
            29500 for "static").  Several, separated by commas, are tried in their
            order, at the start and when the store is lost.
        is_host: whether this node serves the store: None finds out by trying to
            listen at the endpoint, False never does, True does even where the
            endpoint's address is not this machine's own.
        node_rank: the group rank this node wishes for; "static" insists on it.
        local_addr: address at which the other nodes reach this one; None is the local
            address of the connection to the store.
        join_timeout: seconds to wait for too few nodes.
        last_call_timeout: seconds to wait for more nodes once there are enough for the
            first round, but fewer than the maximum.
        close_timeout: seconds that the node which serves the others stays at the end
            until they have heard of it.
        heartbeat_timeout: seconds of silence after which a node is lost, 2 or more.
        read_timeout: seconds to look for a store, at the start and after a loss.
        exit_barrier_timeout: seconds that a node which has succeeded waits for the others.
        store_grace: seconds that workers run on while no store can be found; None is
            `heartbeat_timeout`.  Counted from the last sign of a store, as the others count
            from the last sign of this node: by then they may have replaced it.
        keeps_workers: whether workers run on when the nodes meet at another store and
            nothing else has changed; otherwise they are restarted once.
        token: secret that the store asks for; None asks for none.
        conf: settings of plug-ins, as given.

    Raises:
        SpecError: one line naming the field, the value and what is accepted.
    """

    backend: str = "c10d"
    endpoint: str = f"localhost:{DEFAULT_PORT}"
    is_host: bool | None = None
    node_rank: int | None = None
    local_addr: str | None = None
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    close_timeout: float = 30.0
    heartbeat_timeout: float = 5.0
    read_timeout: float = 60.0
    exit_barrier_timeout: float = 300.0
    store_grace: float | None = None
    keeps_workers: bool = True
    # Not shown: a spec may stand in a log.
    token: str | None = field(default=None, repr=False)
    conf: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not checked_text("rendezvous.backend", self.backend).strip():
            raise SpecError("rendezvous.backend", self.backend, "must not be empty")
        parse_endpoints("rendezvous.endpoint", self.endpoint, self._default_port)
        if self.is_host is not None:
            checked_part("rendezvous.is_host", self.is_host, bool)
        if self.node_rank is not None:
            checked_integer("rendezvous.node_rank", self.node_rank, at_least=0)
        if self.local_addr is not None:
            checked_host("rendezvous.local_addr", self.local_addr)
        for name in ("join_timeout", "read_timeout"):
            check_number(f"rendezvous.{name}", getattr(self, name), above=0)
        for name in ("last_call_timeout", "close_timeout", "exit_barrier_timeout"):
            check_number(f"rendezvous.{name}", getattr(self, name), at_least=0)
        check_number(
            "rendezvous.heartbeat_timeout", self.heartbeat_timeout, at_least=_HEARTBEAT_MIN
        )
        if self.store_grace is not None:
            check_number("rendezvous.store_grace", self.store_grace, at_least=0)
        if not isinstance(self.keeps_workers, bool):
            raise SpecError("rendezvous.keeps_workers", self.keeps_workers, "must be a bool")
        _check_token(self.token)
        set_fields(self, conf=MappingProxyType(_checked_conf(self.conf)))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The meeting points as `HOST:PORT` or `[IPV6]:PORT`, in the order of trying."""
        return parse_endpoints("rendezvous.endpoint", self.endpoint, self._default_port)

    def check_with(self, maximum: int) -> None:
        """Refuse what nodes of a job of up to `maximum` nodes, 2 or more, cannot do."""
        if any(endpoint.endswith(":0") for endpoint in self.endpoints):
            accepted = "must have a port other than 0, which all nodes know"
            raise SpecError("rendezvous.endpoint", self.endpoint, accepted)
        if self.backend != "static":
            return
        if len(self.endpoints) > 1:
            accepted = "must be a single HOST:PORT with the backend 'static'"
            raise SpecError("rendezvous.endpoint", self.endpoint, accepted)
        if self.node_rank is None or self.node_rank >= maximum:
            accepted = f"must be from 0 to {maximum - 1} with the backend 'static'"
            raise SpecError("rendezvous.node_rank", self.node_rank, accepted)

    @property
    def _default_port(self) -> int:
        return STATIC_PORT if self.backend == "static" else DEFAULT_PORT


def parse_endpoints(name: str, value: object, default_port: int = DEFAULT_PORT) -> tuple[str, ...]:
    """Read `HOST:PORT`, `[IPV6]:PORT` or `HOST`, several of them separated by commas.

    Args:
        name: the field, for the message.
        value: what was given for it.
        default_port: the port where none is given.

    Returns:
        Each with its port, and IPv6 addresses in brackets.

    Raises:
        SpecError: it is something else.
    """
    parts = [part.strip() for part in checked_text(name, value).split(",")]
    return tuple(_endpoint(name, part, default_port) for part in parts)


_EVERYWHERE = ("0.0.0.0", "::", "::0", "0")


def _endpoint(name: str, part: str, default_port: int) -> str:
    accepted = "must be HOST:PORT, [IPV6]:PORT or HOST (several: with commas between them)"
    match = _ENDPOINT.fullmatch(part)
    if match is None:
        raise SpecError(name, part, accepted)
    ipv6, host, port = match.groups()
    if not _is_name(ipv6 or host) or (ipv6 is not None and ":" not in ipv6):
        raise SpecError(name, part, accepted)
    if (ipv6 or host) in _EVERYWHERE:
        raise SpecError(name, part, "must be an address of one machine: all would meet themselves")
    if port is None:
        port = str(default_port)
    elif not is_port(port):
        raise SpecError(name, part, "must have a port from 0 to 65535")
    return f"[{ipv6}]:{int(port)}" if ipv6 else f"{host}:{int(port)}"


def checked_host(name: str, value: object) -> str:
    """Return a host's name or address, without brackets and port.

    Raises:
        SpecError: it is something else; the message names the field `name`.
    """
    host = checked_text(name, value)
    # A single colon would be a port's; an IPv6 address has more.
    if not _is_name(host) or host.count(":") == 1 or "[" in host:
        raise SpecError(name, host, "must be the name or address of a host, without a port")
    return host


def _is_name(host: str) -> bool:
    return bool(host) and host.isprintable() and not set(host) & set(" ,/@")


def _check_token(token: object) -> None:
    """Refuse what is no token, without showing it."""
    if token is None:
        return
    if not isinstance(token, str):
        raise SpecError("rendezvous.token", type(token).__name__, "must be text")
    if not token:
        raise SpecError("rendezvous.token", token, "must not be empty")


def _checked_conf(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise SpecError("rendezvous.conf", value, "must be a mapping of names to texts")
    for key, text in value.items():
        checked_text("rendezvous.conf", key)
        checked_text(f"rendezvous.conf[{key!r}]", text)
    return dict(value)
