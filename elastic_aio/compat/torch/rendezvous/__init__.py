"""torch.distributed.elastic.rendezvous: how the nodes of a job meet, and handlers by backend.

"c10d", "static" and "etcd" (or "etcd-v2") are this library's own.  Under our `LocalElasticAgent`
such a handler is only a description: the agent takes its `nodes` and `rendezvous`.  Elsewhere, such
as under torch's own agent, `next_rendezvous` makes this process a member of an `elastic_aio`
rendezvous.  A handler of torch, of a plug-in or of the program runs under our agent (see `bridge`
for both).  Plug-ins of torchrun (entry points `torchrun.handlers`) are loaded when a job names
them.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elastic_aio.compat.torch.rendezvous.bridge import Participation
from elastic_aio.spec.checks import UsageError, parse_host_port
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.rdzv_conf import parse_conf
from elastic_aio.spec.rendezvous import RendezvousSpec

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousHandler",
    "RendezvousHandlerCreator",
    "RendezvousHandlerRegistry",
    "RendezvousInfo",
    "RendezvousParameters",
    "RendezvousStateError",
    "RendezvousStoreInfo",
    "RendezvousTimeoutError",
    "StaticTCPRendezvous",
    "create_handler",
    "get_rendezvous_handler",
    "rendezvous_handler_registry",
]

_ENTRY_POINTS = "torchrun.handlers"
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class DynamicRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous of a job at a store that one of the nodes serves.

    Attributes:
        nodes: how many nodes the job has.
        rendezvous: how they find each other.
        master_port: port of the workers' store; None takes a free one in each round.
    """

    def __init__(
        self,
        run_id: str,
        nodes: NodeRange,
        rendezvous: RendezvousSpec,
        *,
        master_port: int | None = None,
    ) -> None:
        """Prepare; nothing is connected before `next_rendezvous`."""
        if not run_id:
            raise ValueError("run_id: must be a non-empty string (got '')")
        self.nodes = nodes
        self.rendezvous = rendezvous
        self.master_port = master_port
        self._run_id = run_id
        self._participation: Participation | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @staticmethod
    def from_backend(*args: Any, **kwargs: Any) -> Any:
        """Return torch's own handler at a store of torch; the arguments are torch's."""
        from torch.distributed.elastic.rendezvous import dynamic_rendezvous

        return dynamic_rendezvous.DynamicRendezvousHandler.from_backend(*args, **kwargs)

    def get_backend(self) -> str:
        """Return "c10d", "static" or "etcd"."""
        return self.rendezvous.backend

    @property
    def use_agent_store(self) -> bool:
        """Whether the agents serve the workers' store; an environment variable turns it off."""
        return os.environ.get(_NO_SHARED_STORE) != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round with this node is complete (see `RendezvousHandler`).

        Raises:
            ImportError: torch is not installed.
        """
        with self._lock:
            if self._is_closed:
                raise RendezvousClosedError(f"the rendezvous of run {self._run_id} is closed")
            if self._participation is None:
                self._participation = Participation(
                    self._run_id, self.nodes, self.rendezvous, serves=self.use_agent_store
                )
        return self._participation.next_round()

    def is_closed(self) -> bool:
        """Return whether the job has ended, as far as this node knows."""
        return self._is_closed or (
            self._participation is not None and self._participation.has_ended
        )

    def set_closed(self) -> None:
        """End the job for all nodes, once their present workers have ended."""
        with self._lock:
            self._is_closed = True
        if self._participation is not None:
            self._participation.end_job()

    def num_nodes_waiting(self) -> int:
        """Return 1 if this node has to join another round, else 0."""
        return 0 if self._participation is None else int(self._participation.is_round_over)

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """End the job for all nodes, and leave.  Idempotent."""
        self.set_closed()
        participation, self._participation = self._participation, None
        if participation is not None:
            participation.close()
        return True


class StaticTCPRendezvous(DynamicRendezvousHandler):
    """The same with given ranks, at the store of rank 0."""


def create_c10d_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a handler of the backend "c10d", or raise a ValueError."""
    endpoint = params.endpoint.strip() or RendezvousSpec().endpoint
    return _dynamic_handler(params, "c10d", endpoint)


def create_etcd_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a handler of the backends "etcd" and "etcd-v2", or raise a ValueError."""
    if not (endpoint := params.endpoint.strip()):
        problem = f'{params.backend!r} is torch\'s default and needs an endpoint; set "c10d"'
        raise ValueError(f"rdzv_backend: {problem}")
    return _dynamic_handler(params, params.backend, endpoint)


def _dynamic_handler(
    params: RendezvousParameters, backend: str, endpoint: str
) -> DynamicRendezvousHandler:
    # The launcher adds `timeout` for every backend; only "static" uses it.
    config = {key: value for key, value in params.config.items() if key != "timeout"}
    spec = RendezvousSpec(
        backend=backend,
        endpoint=endpoint,
        local_addr=params.local_addr,
        **_settings(config, backend),
    )
    nodes = NodeRange(params.min_nodes, params.max_nodes)
    return DynamicRendezvousHandler(params.run_id, nodes, spec)


def create_static_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a handler of the backend "static", or raise a ValueError."""
    config = dict(params.config)
    if (rank := config.pop("rank", None)) is None:
        problem = 'needs a rank with the backend "static": {"rank": 0}, or --node-rank'
        raise ValueError(f"rdzv_configs: {problem}")
    endpoint = params.endpoint.strip()
    port = parse_host_port("rdzv_endpoint", endpoint)[1]
    nodes = NodeRange(params.max_nodes, params.max_nodes)
    spec = RendezvousSpec(
        backend="static",
        endpoint=endpoint,
        local_addr=params.local_addr,
        node_rank=int(rank),
        is_host=int(rank) == 0,
        **_settings(config, "static"),
    )
    is_alone = nodes.maximum == 1
    return StaticTCPRendezvous(params.run_id, nodes, spec, master_port=port if is_alone else None)


def create_handler(store: Any, backend: Any, params: RendezvousParameters) -> Any:
    """Return torch's own handler at a torch `Store`, with a torch `RendezvousBackend`."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    return dynamic_rendezvous.create_handler(store, backend, params)


def _settings(config: dict[str, Any], backend: str) -> dict[str, Any]:
    """Return the fields of `RendezvousSpec` for torch's keys."""
    try:
        conf = parse_conf(",".join(f"{key}={value}" for key, value in config.items()), backend)
        settings = {**conf.settings, **conf.read_secrets()}
    except UsageError as error:
        raise ValueError(str(error)) from None
    for warning in conf.warnings:
        logging.getLogger(__name__).warning("%s", warning)
    return settings


rendezvous_handler_registry = RendezvousHandlerRegistry()
"""The handlers that `get_rendezvous_handler` and the launcher use."""

rendezvous_handler_registry.register("c10d", create_c10d_handler)
rendezvous_handler_registry.register("static", create_static_handler)
rendezvous_handler_registry.register("etcd", create_etcd_handler)
rendezvous_handler_registry.register("etcd-v2", create_etcd_handler)


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Return a new handler of the backend that `params` name.

    Raises:
        ValueError: there is no such backend, or a setting cannot be accepted.
        ImportError: the backend needs a module that is not installed.
    """
    if params.backend not in rendezvous_handler_registry.known():
        _load_plug_in(params.backend)
    return rendezvous_handler_registry.create_handler(params)


def _load_plug_in(backend: str) -> None:
    from importlib.metadata import entry_points  # 10 ms: imported for plug-ins only

    for entry in entry_points(group=_ENTRY_POINTS).select(name=backend):
        try:
            creator: RendezvousHandlerCreator = entry.load()()
        except Exception as error:
            problem = f"the plug-in cannot be loaded: {type(error).__name__}: {error}"
            raise ValueError(f"rdzv_backend: {problem} (got {backend!r})") from error
        rendezvous_handler_registry.register(backend, creator)
