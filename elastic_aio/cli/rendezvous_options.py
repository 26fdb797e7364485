"""Parses the options for the number of nodes and their rendezvous, as in torchrun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from elastic_aio.cli.options import Values, fields_from
from elastic_aio.spec import checks
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.rendezvous import ENGINES, STATIC_PORT, RendezvousSpec
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS

if TYPE_CHECKING:
    from elastic_aio.spec.rdzv_conf import Conf

_SLURM_RANKS: Final = ("SLURM_PROCID", "SLURM_NODEID")


def node_fields(values: Values, env: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of the spec for its nodes, and lines to print at the start.

    Raises:
        UsageError, SpecError: one line that names the option or the field.
    """
    warnings: list[str] = []
    nodes = _nodes(values, warnings)
    is_many = nodes.maximum > 1
    backend = values["rdzv_backend"] or ("static" if is_many else "c10d")
    if values["rdzv_backend"]:
        check_backend(backend)
    conf = _conf(values, backend, is_many=is_many)
    port = None
    if (text := values["master_port"]) is not None:
        port = checks.parse_number("--master-port", text, least=1, most=65535, unit="a port")
    rank = _node_rank(values, env if is_many else {})
    endpoint = _endpoint(values, port, backend if is_many else "")
    settings = {**_defaults(values), **({} if conf is None else conf.settings)}
    settings |= fields_from(values, RendezvousSpec)
    settings |= {"backend": backend, "endpoint": endpoint}
    if conf is not None and is_many:
        warnings += [*conf.warnings, *_usage_warnings(values, backend, endpoint)]
        settings |= conf.read_secrets()
        if backend == "static":
            if nodes.minimum < nodes.maximum:
                warnings.append(
                    f"--nnodes {nodes}: the backend 'static' waits for all {nodes.maximum};"
                    " --rdzv-backend c10d can start with fewer"
                )
            nodes = NodeRange(nodes.maximum, nodes.maximum)
            rank = rank or ("--node-rank", 0)
            if rank[1] >= nodes.maximum:
                problem = f"must be from 0 to {nodes.maximum - 1} for {nodes.maximum} nodes"
                raise checks.invalid_value(rank[0], f"{problem} of the backend 'static'", rank[1])
            settings["is_host"] = rank[1] == 0
    elif rank is not None and rank[1]:
        warnings.append(f"--node-rank {rank[1]} has no effect: the job has one node")
    settings["node_rank"] = None if rank is None else rank[1]
    spec = RendezvousSpec(**settings, conf={} if conf is None else conf.pairs)
    is_taken = any(endpoint.endswith(f":{port}") for endpoint in spec.endpoints)
    fields = {
        "nnodes": nodes,
        "rendezvous": spec,
        # As in torchrun, where both together select the static rendezvous of one node.
        "master_addr": None if is_many or port is None else values["master_addr"] or None,
        "master_port": None if is_many and is_taken else port,
    }
    return fields, warnings


def _conf(values: Values, backend: str, *, is_many: bool) -> Conf | None:
    """Return the parsed `--rdzv-conf`; None for one node without any."""
    text = values["rdzv_conf"] or ""
    if not text and not is_many and backend != "static":
        return None
    from elastic_aio.spec.rdzv_conf import parse_conf

    return parse_conf(text, backend)


def _defaults(values: Values) -> Mapping[str, Any]:
    if not values["torchrun_defaults"]:
        return {}
    return TORCHRUN_DEFAULTS["rendezvous"]


def _nodes(values: Values, warnings: list[str]) -> NodeRange:
    nodes = NodeRange.parse(values["nnodes"] or "1")
    if not values["standalone"] or nodes.maximum == 1:
        return nodes
    if nodes.minimum > 1:
        raise checks.UsageError(f"--standalone: is for one node (got --nnodes {nodes})")
    warnings.append(f"--standalone is for one node: --nnodes {nodes} is taken as 1")
    return NodeRange(1, 1)


def check_backend(name: str) -> None:
    """Raise a UsageError if there is no backend of this name."""
    # Imported only for an explicit backend: searching for plug-ins takes a while.
    from elastic_aio.rendezvous.backends import is_known_backend, known_backends

    if not is_known_backend(name):
        known = ", ".join(known_backends())
        raise checks.invalid_value("--rdzv-backend", f"must be one of: {known}", name)


def _node_rank(values: Values, env: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the option or variable that sets this node's rank, and the rank."""
    if (text := values["node_rank"]) is not None:
        return "--node-rank", checks.parse_number("--node-rank", text)
    for name in _SLURM_RANKS:
        if text := env.get(name):
            return name, checks.parse_number(name, text)
    return None


def _endpoint(values: Values, port: int | None, backend: str) -> str:
    host = values["master_addr"] or "127.0.0.1"
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    checks.checked_host("--master-addr", host)
    if values["rdzv_endpoint"]:
        return values["rdzv_endpoint"]
    if (engine := ENGINES.get(backend)) is not None:
        return f"localhost:{engine.port}"
    if backend != "static":
        return RendezvousSpec().endpoint
    return checks.format_host_port(host, port or STATIC_PORT)


def _usage_warnings(values: Values, backend: str, endpoint: str) -> Iterator[str]:
    """Yield a line for each combination of options of several nodes that is likely wrong."""
    is_static = backend == "static"
    has_endpoint, has_address = bool(values["rdzv_endpoint"]), bool(values["master_addr"])
    if not has_endpoint and not (is_static and has_address):
        option = "--master-addr" if is_static else "--rdzv-endpoint"
        yield f"{option} is not given: only nodes on this host can meet at {endpoint}"
    if has_address and (has_endpoint or not is_static):
        yield "--master-addr has no effect: --rdzv-endpoint sets the endpoint"
