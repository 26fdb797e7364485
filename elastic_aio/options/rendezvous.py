"""The options that say how many nodes there are and how they meet, as torchrun has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from elastic_aio.errors import SurroundingsError
from elastic_aio.options.conf import parse_conf
from elastic_aio.options.grammar import Option, UsageError, whole
from elastic_aio.options.tokenfile import read_token
from elastic_aio.rendezvousspec import DEFAULT_PORT, STATIC_PORT, RendezvousSpec, checked_host
from elastic_aio.spec import NodeRange

__all__ = ["RENDEZVOUS_OPTIONS", "Meeting", "read_meeting"]

Values = Mapping[str, str | None]

RENDEZVOUS_OPTIONS: Final = (
    Option("nnodes", "nodes of the job: N or MIN:MAX (default 1)", metavar="N"),
    Option("standalone", "one node that meets nobody (the default); not with a minimum of more"),
    Option(
        "rdzv-backend",
        "how several nodes meet: 'c10d', 'static' (the default, as in torchrun) or a plug-in",
        metavar="NAME",
    ),
    Option(
        "rdzv-endpoint",
        f"where they meet, HOST:PORT (default localhost:{DEFAULT_PORT}); several, with commas"
        " between them, are tried in their order",
        metavar="HOST:PORT",
    ),
    Option(
        "rdzv-id",
        "name of the run, the same on all nodes (default: a random one for one node,"
        " 'none' for several)",
        metavar="ID",
    ),
    Option("rdzv-conf", "settings of the rendezvous: see below", metavar="KEY=VALUE,..."),
    Option(
        "node-rank",
        "group rank of this node: its own with 'static' (default: Slurm's, else 0), a wish with"
        " 'c10d' (default: Slurm's, else none)",
        metavar="N",
    ),
    Option(
        "master-addr",
        "host of the node of rank 0, with 'static' (default 127.0.0.1)",
        metavar="ADDR",
    ),
    Option(
        "master-port",
        "TCP port at which the workers meet (default: a free one for each attempt); with"
        f" 'static' that at which the nodes meet (default {STATIC_PORT})",
        metavar="PORT",
    ),
    Option(
        "local-addr",
        "address of this node for the others (default: that of its connection to the store)",
        metavar="ADDR",
    ),
    Option(
        "exit-barrier-timeout",
        "seconds that a node which is done waits for the others (default 300)",
        metavar="S",
    ),
)

_NOT_YET: Final = ("etcd", "etcd-v2")
_SLURM_RANKS: Final = ("SLURM_PROCID", "SLURM_NODEID")


class Meeting(Struct, frozen=True):
    """How many nodes there are and how they meet; `master_port` is the workers' own."""

    nodes: NodeRange
    spec: RendezvousSpec
    master_port: int | None
    notices: tuple[str, ...]


def read_meeting(values: Values, env: Mapping[str, str]) -> Meeting:
    """Read what the options of `RENDEZVOUS_OPTIONS` say, by their `dest`.

    Raises:
        UsageError: one line that names the option, the value and what is accepted.
        SpecError: likewise, by the name of the field.
    """
    notices: list[str] = []
    nodes = _nodes(values, notices)
    is_many = nodes.maximum > 1
    backend = values["rdzv_backend"] or ("static" if is_many else "c10d")
    if values["rdzv_backend"]:
        _check_backend(backend, is_many)
    conf = parse_conf(values["rdzv_conf"] or "", backend)
    port = _master_port(values["master_port"])
    rank = _node_rank(values, env if is_many else {})
    endpoint = _endpoint(values, port, is_static=is_many and backend == "static")
    settings = dict(conf.settings)
    if is_many:
        notices += [*conf.notices, *_misunderstandings(values, backend, endpoint)]
        settings["token"] = None if conf.token_file is None else _token(conf.token_file)
        if backend == "static":
            nodes = _all_of(nodes, notices)
            rank = _static_rank(rank, nodes.maximum)
            settings["is_host"] = rank[1] == 0
    elif rank is not None and rank[1]:
        notices.append(f"--node-rank {rank[1]} is unused: a job of one node meets nobody")
    spec = RendezvousSpec(
        backend=backend,
        endpoint=endpoint,
        node_rank=None if rank is None else rank[1],
        local_addr=values["local_addr"] or None,
        exit_barrier_timeout=_exit_barrier(values["exit_barrier_timeout"]),
        conf=conf.given,
        **settings,
    )
    is_taken = any(one.endswith(f":{port}") for one in spec.endpoints)
    return Meeting(nodes, spec, None if is_many and is_taken else port, tuple(notices))


def _nodes(values: Values, notices: list[str]) -> NodeRange:
    nodes = NodeRange.parse(values["nnodes"] or "1")
    if not values["standalone"] or nodes.maximum == 1:
        return nodes
    if nodes.minimum > 1:
        raise UsageError(f"--standalone: is for one node and excludes --nnodes {nodes}")
    notices.append(f"--standalone is for one node: --nnodes {nodes} is taken for 1")
    return NodeRange(1, 1)


def _all_of(nodes: NodeRange, notices: list[str]) -> NodeRange:
    if nodes.minimum < nodes.maximum:
        notices.append(
            f"--nnodes {nodes}: the backend 'static' waits for all {nodes.maximum};"
            " --rdzv-backend c10d can begin with fewer"
        )
    return NodeRange(nodes.maximum, nodes.maximum)


def _check_backend(name: str, is_many: bool) -> None:
    if name in _NOT_YET:
        if is_many:
            raise UsageError(
                f"--rdzv-backend: {name!r} is not supported yet;"
                " use 'c10d', whose store one of the nodes serves"
            )
        return
    # Only here: looking for plug-ins takes a while.
    from elastic_aio.rendezvous.registry import is_known_backend, known_backends

    if not is_known_backend(name):
        known = ", ".join(known_backends())
        raise UsageError(f"--rdzv-backend: must be one of {known}, not {name!r}")


def _node_rank(values: Values, env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where the node's rank comes from, and the rank."""
    if (text := values["node_rank"]) is not None:
        if (rank := whole(text)) is None:
            raise UsageError(f"--node-rank: must be a whole number of at least 0, not {text!r}")
        return "--node-rank", rank
    for name in _SLURM_RANKS:
        if (rank := whole(env.get(name, ""))) is not None:
            return name, rank
    return None


def _static_rank(rank: tuple[str, int] | None, count: int) -> tuple[str, int]:
    source, number = rank or ("--node-rank", 0)
    if number >= count:
        raise UsageError(
            f"{source}: must be from 0 to {count - 1} for {count} nodes"
            f" of the backend 'static', not {number}"
        )
    return source, number


def _endpoint(values: Values, port: int | None, *, is_static: bool) -> str:
    host = values["master_addr"] or "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    checked_host("--master-addr", host)
    if values["rdzv_endpoint"]:
        return values["rdzv_endpoint"]
    if not is_static:
        return RendezvousSpec().endpoint
    return f"[{host}]:{port or STATIC_PORT}" if ":" in host else f"{host}:{port or STATIC_PORT}"


def _misunderstandings(values: Values, backend: str, endpoint: str) -> Iterator[str]:
    """Tell what is probably not meant, of several nodes."""
    is_static = backend == "static"
    has_endpoint, has_address = bool(values["rdzv_endpoint"]), bool(values["master_addr"])
    if not has_endpoint and not (is_static and has_address):
        option = "--master-addr" if is_static else "--rdzv-endpoint"
        yield f"{option} is not given: only nodes on this machine can meet at {endpoint}"
    if has_address and (has_endpoint or not is_static):
        yield "--master-addr is unused: --rdzv-endpoint says where the nodes meet"


def _master_port(value: str | None) -> int | None:
    if value is None:
        return None
    port = whole(value)
    if port is None or not 1 <= port <= 65535:
        raise UsageError(f"--master-port: must be a port from 1 to 65535, not {value!r}")
    return port


def _exit_barrier(value: str | None) -> float:
    if value is None:
        return RendezvousSpec().exit_barrier_timeout
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        option = "--exit-barrier-timeout"
        raise UsageError(f"{option}: must be a number of seconds of at least 0, not {value!r}")
    return seconds


def _token(path: str) -> str:
    try:
        return read_token(path)
    except SurroundingsError as error:
        raise UsageError(f"--rdzv-conf: token_file: {error}") from None
