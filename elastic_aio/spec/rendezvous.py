"""How the nodes of a job find each other: `RendezvousSpec`, frozen and checked when made."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, cast

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import (
    OneOf,
    Seconds,
    Whole,
    checked_bool,
    checked_host,
    checked_text,
    checked_texts,
    checked_token,
    format_host_port,
    parse_host_port,
)
from elastic_aio.spec.fields import ConfKey, SpecValue, field
from elastic_aio.spec.tls import TlsSpec, checked_tls
from elastic_aio.text import shown_bytes
from elastic_aio.value import Value

DEFAULT_PORT: Final = 29400
"""Port of an endpoint that names none; torchrun's for c10d."""

STATIC_PORT: Final = 29500
"""The same for the backend "static"."""


class EngineEntry(Value, frozen=True, kw_only=True):
    """An engine, which serves the store of jobs in place of a node."""

    names: tuple[str, ...]
    """Its names as a backend; the documentation uses the first."""
    port: int
    """Port of an endpoint that names none."""
    ports: Mapping[str, int] = {}
    """The same while one of its settings is in use, by the name of the setting."""
    settings: tuple[str, ...] = ()
    """Fields of `EngineSpec` that other engines do not have; arguments of its store."""
    conf_keys: Mapping[str, str] = {}
    """Further keys of `--rdzv-conf`, torchrun's, and the keys of this package that they mean."""
    store: str
    """Its `EngineStore`, as `module:Class`: loaded by a job that uses it, and by no other."""


ENGINE_ENTRIES: Final = (
    EngineEntry(
        names=("etcd", "etcd-v2"),  # torch has both
        port=2379,
        conf_keys={
            "ca_cert": "tls_ca",
            "cacert": "tls_ca",
            "cert": "tls_cert",
            "etcd_prefix": "key_prefix",
            "key": "tls_key",
            "protocol": "protocol",
            "ssl_cert": "tls_cert",
            "ssl_cert_key": "tls_key",
        },
        store="elastic_aio.engines.etcd:EtcdStore",
    ),
    EngineEntry(
        names=("redis", "valkey"),
        port=6379,
        ports={"sentinel": 26379},
        settings=("sentinel",),
        store="elastic_aio.engines.redis:RedisStore",
    ),
)
"""All engines.  Nothing else in the core names an engine, except the settings in `EngineSpec` and
the help of the command."""

ENGINES: Final = {name: entry for entry in ENGINE_ENTRIES for name in entry.names}
"""The engine of each backend whose store is served by an engine and not by a node."""

_AT_ENGINES: Final = ", ".join(f"with {e.names[0]!r} localhost:{e.port}" for e in ENGINE_ENTRIES)

_HEARTBEAT_MIN: Final = 2.0
"""Seconds; the shortest lease that a store grants."""

_WILDCARDS: Final = ("0.0.0.0", "::", "::0", "0")

RETENTION_MIN: Final = 60
"""Seconds; a job must outlive a short failure of the engine."""


def _unicode(name: str, value: object) -> str:
    if (text := checked_text(name, value)) != shown_bytes(text).decode():
        raise SpecError(name, f"{len(text)} characters", "must be text in UTF-8")
    return text


class EngineSpec(SpecValue, prefix="engine."):
    """The user and the keys of a job on an engine."""

    user: str | None = field(default=None, check=_unicode, key=ConfKey())
    """User of the engine; None for none."""
    password: str | None = field(default=None, check=_unicode, hidden=True)
    """The user's password."""
    sentinel: str | None = field(default=None, check=checked_text, key=ConfKey())
    """Name of the master that the endpoints, Redis Sentinels, know; None: they are servers."""
    key_prefix: str = field(default="/rendezvous", check=checked_text, key=ConfKey())
    """Precedes the keys of all jobs: two clusters that share an engine need different ones."""
    retention: float = field(
        default=86400.0, check=Seconds(at_least=RETENTION_MIN), key=ConfKey(least=RETENTION_MIN)
    )
    """Seconds after which the keys of a job are removed that has ended, or lost all nodes."""

    def _check(self) -> None:
        if self.password is not None and not self.user:
            raise SpecError("engine.user", self.user, "is needed with engine.password")


def _backend(name: str, value: object) -> str:
    if not checked_text(name, value).strip():
        raise SpecError(name, value, "must not be empty")
    return cast("str", value)


def _token(name: str, value: object) -> str | None:
    return checked_token(value, name)


def _command(name: str, value: object) -> str:
    if not (command := checked_text(name, value)).strip():
        raise SpecError(name, value, "must be a command of the shell")
    return command


def _tls(name: str, value: object) -> TlsSpec | None:
    return checked_tls(value, name)


class RendezvousSpec(SpecValue, prefix="rendezvous."):
    """How the nodes of a job find each other; without effect for a job of one node."""

    backend: str = field(
        default="c10d",
        check=_backend,
        option="--rdzv-backend NAME",
        help="rendezvous of several nodes: 'c10d', 'static', 'etcd', 'redis' or a plug-in (default"
        " 'static' as in torchrun; 'c10d' in Python)",
    )
    """How nodes get their ranks; the default is "c10d" here, "static" on the command line.

    "c10d" (or "tcp"): a coordinator assigns them, at a store that one of the nodes serves.
    "static": each node is configured with its rank.
    "etcd" (or "etcd-v2"): as "c10d", at a store on etcd v3; `endpoint` names its members.
    "redis" (or "valkey"): the same on Redis or Valkey, with the package redis.
    Other names are plug-ins of the entry point group `elastic_aio.rendezvous`.
    """
    endpoint: str = field(
        default=f"localhost:{DEFAULT_PORT}",
        check=checked_text,
        option="--rdzv-endpoint HOST:PORT",
        help=f"endpoint of the rendezvous store (default localhost:{DEFAULT_PORT}; with 'static'"
        f" MASTER_ADDR:MASTER_PORT; {_AT_ENGINES}); several, separated by commas, are tried in"
        " order",
    )
    """Where the store is: `HOST:PORT`, `[IPV6]:PORT` or `HOST`.  The default port is 29400, 29500
    for "static", 2379 for "etcd", 6379 for "redis", 26379 for its sentinels.  Several endpoints,
    separated by commas, are tried in their order, at the start and when the store is lost;
    endpoints of etcd in any order."""
    is_host: bool | None = field(default=None, check=checked_bool, key=ConfKey("detected"))
    """Whether this node serves the store.  None serves it if this node can listen at the endpoint,
    False never does, True does even if the endpoint's address does not belong to this host."""
    node_rank: int | None = field(
        default=None,
        check=Whole(at_least=0),
        option="--node-rank N",
        help="group rank of this node: fixed with 'static' (default: Slurm's, else 0), preferred"
        " with 'c10d' (default: Slurm's, else none)",
    )
    """The group rank this node prefers; "static" requires one."""
    local_addr: str | None = field(
        default=None,
        check=checked_host,
        option="--local-addr ADDR",
        help="address of this node for the other nodes (default: that of its connection to the"
        " store)",
    )
    """Address at which the other nodes reach this one; None is the local address of the connection
    to the store."""
    join_timeout: float = field(
        default=600.0, check=Seconds(above=0), key=ConfKey(least=1), alike=True
    )
    """Seconds to wait for the minimum of nodes."""
    replace_timeout: float | None = field(
        default=None,
        check=Seconds(at_least=0),
        key=ConfKey("join_timeout; 30 in Slurm and its like", least=0),
        alike=True,
    )
    """As `join_timeout`, once there has been a round: after the loss of nodes.  None is
    `join_timeout`."""
    last_call_timeout: float = field(
        default=30.0, check=Seconds(at_least=0), key=ConfKey(least=0), alike=True
    )
    """Seconds to wait for further nodes once the first round has its minimum."""
    scale_up_delay: float | None = field(
        default=None,
        check=Seconds(at_least=0),
        key=ConfKey("last_call_timeout", least=0),
        alike=True,
    )
    """Seconds for which a round waits for further joiners, from the latest of them, and at most ten
    times as long from the first; None is `last_call_timeout`.  No joiner waits when all vacant
    places of the job are filled, or when another round begins for another reason."""
    scale_up: Literal["delay", "checkpoint"] = field(
        default="delay",
        check=OneOf(("delay", "checkpoint")),
        key=ConfKey("delay; or checkpoint"),
        alike=True,
    )
    """Whether joiners also wait until all workers have called `agree_to_change`: "checkpoint"."""
    scale_up_limit: float = field(
        default=600.0, check=Seconds(above=0), key=ConfKey(least=1), alike=True
    )
    """Seconds, after `scale_up_delay`, that joiners wait for that at most."""
    close_timeout: float = field(default=30.0, check=Seconds(at_least=0), key=ConfKey(least=0))
    """Seconds that the node which serves the store waits at the end for the others to finish."""
    heartbeat_timeout: float = field(
        default=30.0, check=Seconds(at_least=_HEARTBEAT_MIN), key=ConfKey(least=2), alike=True
    )
    """Seconds without a sign from a node after which it is lost; 2 or more.  For hosts that are
    unreachable or suspended: a node whose process has ended is lost at once."""
    read_timeout: float = field(
        default=60.0, check=Seconds(above=0), key=ConfKey("60; both 900 with 'static'", least=1)
    )
    """Seconds to search for a store, at the start and after a loss."""
    exit_barrier_timeout: float | None = field(
        default=None,
        check=Seconds(at_least=0),
        own_option="--exit-barrier-timeout SECONDS",
        help="seconds that a finished node waits for the other nodes (default: no limit)",
        has_variable=True,
    )
    """Seconds that a node whose workers succeeded waits for the others; None for no limit.  A node
    that has left is not there for a restart of the others: the job then fails at once if they are
    too few.  A node that serves a store to the workers of other nodes stays until they have
    ended."""
    store_grace: float | None = field(
        default=None,
        check=Seconds(at_least=0),
        key=ConfKey("leaves time for the stop plan; no limit with 'etcd' and 'redis'", least=0),
        alike=True,
    )
    """Seconds that workers keep running while no store is reachable.

    Then the stop plan begins, which ends with SIGKILL 0.25 s before `heartbeat_timeout` is over.
    None is as long as that leaves time for the whole plan, and half of `heartbeat_timeout` at
    least; without a limit on an engine.  The time counts from the last reply of the store, as the
    other nodes count from the last sign of this node: if it is longer than `heartbeat_timeout`, its
    workers may run beside the workers of the round that replaces it.
    """
    keep_workers: bool = field(default=True, key=ConfKey(), alike=True)
    """Whether workers keep running when the nodes move to another store and nothing else changes;
    otherwise they are restarted once."""
    reuse: bool = field(default=False, key=ConfKey())
    """Whether a run id whose job has ended begins again, as a new job.  Otherwise a node that comes
    after the end gets the recorded outcome, while the store lives, and runs nothing."""
    any_program: bool = field(default=False, key=ConfKey())
    """Whether the nodes may run different programs, or belong to different users.  Otherwise a node
    that differs from the job at the endpoint is refused: two jobs that have one run id by accident
    would become one."""
    health_check: str | None = field(
        default=None,
        check=_command,
        own_option="--health-check CMD",
        help="a command of the shell that has to exit with 0 before this node joins the others, and"
        " after each failure of its workers; else the node is excluded until it does (default:"
        " none)",
    )
    """A command of the shell that exits with 0 if this host is fit for workers.

    It runs before the node takes part for the first time, after each failure of its workers, and at
    the end of an exclusion.  A node that is not fit is excluded until the command succeeds, which
    is repeated after 5 s, and then at growing intervals of up to 60 s.  For the backends that are
    built in.
    """
    health_check_timeout: float = field(
        default=60.0,
        check=Seconds(above=0),
        own_option="--health-check-timeout SECONDS",
        help="seconds that the health check may take (default 60)",
    )
    """Seconds after which the health check is killed, and the node is not fit."""
    overlap: bool = field(default=False, key=ConfKey(), alike=True)
    """Whether a new round may begin on one node while another node still stops its workers.

    By default no worker of a round starts before all processes of the round before have ended on
    every node, and a node that is stopped leaves when its workers have ended.  True saves these
    waits where two generations of workers can bear to run at once.
    """
    token: str | None = field(
        default=None, check=_token, label="--rdzv-conf: token_file", hidden=True
    )
    """Secret that the store requires, of at least 16 characters; None for none."""
    tls: TlsSpec | None = field(default=None, check=_tls)
    """Certificates with which the store is served, and reached, over TLS only; None for none.  The
    store of the workers is not affected: torch's clients do not speak TLS."""
    engine: EngineSpec = field(default=EngineSpec())
    """User and keys, with the backends "etcd" and "redis"."""
    conf: Mapping[str, str] = field(
        default=MappingProxyType({}), check=checked_texts, label="--rdzv-conf"
    )
    """Settings of plug-ins, as given."""

    def _check(self) -> None:
        parse_endpoints("rendezvous.endpoint", self.endpoint, self._default_port)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints as `HOST:PORT` or `[IPV6]:PORT`, in the order they are tried."""
        return parse_endpoints("rendezvous.endpoint", self.endpoint, self._default_port)

    def check_with(self, maximum: int) -> None:
        """Raise `SpecError` for settings that a job of 2 to `maximum` nodes cannot use."""
        if any(endpoint.endswith(":0") for endpoint in self.endpoints):
            problem = "needs a port other than 0, the same on all nodes"
            raise SpecError("rendezvous.endpoint", self.endpoint, problem)
        if (engine := ENGINES.get(self.backend)) is not None:
            self._check_engine(engine)
            return
        is_static = self.backend == "static"
        if self.tls is not None:
            self.tls.check_client()
            if self.node_rank == 0 if is_static else self.is_host is not False:
                self.tls.check_server()
        if not is_static:
            return
        if len(self.endpoints) > 1:
            problem = "must be a single HOST:PORT with the backend 'static'"
            raise SpecError("rendezvous.endpoint", self.endpoint, problem)
        if self.node_rank is None or self.node_rank >= maximum:
            problem = f"must be from 0 to {maximum - 1} with the backend 'static'"
            raise SpecError("rendezvous.node_rank", self.node_rank, problem)

    @property
    def is_on_engine(self) -> bool:
        """Whether the store is on an engine, and no node serves it."""
        return self.backend in ENGINES

    def _check_engine(self, own: EngineEntry) -> None:
        if self.is_host is not None:
            problem = f"must be None: no node serves the store of the backend {self.backend!r}"
            raise SpecError("rendezvous.is_host", self.is_host, problem)
        if self.token is not None:
            problem = f"is not for the backend {self.backend!r}: use engine.user and password"
            raise SpecError("rendezvous.token", "...", problem)
        others = {name for entry in ENGINE_ENTRIES for name in entry.settings}
        for name in sorted(others.difference(own.settings)):
            if (value := getattr(self.engine, name)) is not None:
                problem = f"is not for the backend {self.backend!r}"
                raise SpecError(f"rendezvous.engine.{name}", value, problem)
        if self.tls is not None:
            self.tls.check_client()

    @property
    def _default_port(self) -> int:
        if self.backend == "static":
            return STATIC_PORT
        entry = ENGINES.get(self.backend)
        if entry is None:
            return DEFAULT_PORT
        used = (port for name, port in entry.ports.items() if getattr(self.engine, name))
        return next(used, entry.port)


def parse_endpoints(name: str, value: object, default_port: int = DEFAULT_PORT) -> tuple[str, ...]:
    """Read `HOST:PORT`, `[IPV6]:PORT` or `HOST`, several of them separated by commas.

    Return each with its port, IPv6 addresses in brackets.  SpecError: an endpoint has none of these
    forms, or is a wildcard address.
    """
    return _split_endpoints(name, checked_text(name, value), default_port)


@functools.lru_cache(maxsize=16)  # a spec is asked for its endpoints again and again
def _split_endpoints(name: str, text: str, default_port: int) -> tuple[str, ...]:
    endpoints = []
    for part in text.split(","):
        host, port = parse_host_port(name, part.strip(), default_port=default_port, at_least=0)
        if host in _WILDCARDS:
            raise SpecError(name, part.strip(), "must be the address of one host, not a wildcard")
        endpoints.append(format_host_port(host, port))
    return tuple(endpoints)
