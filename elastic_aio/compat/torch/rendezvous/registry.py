"""torch.distributed.elastic.rendezvous.registry: handlers by the name of their backend.

"c10d", "static" and "etcd" (or "etcd-v2") are this library's own.  Plug-ins of torchrun (entry
points `torchrun.handlers`) are loaded when a job names them.
"""

from __future__ import annotations

from elastic_aio.compat.torch.rendezvous.api import (
    RendezvousHandler,
    RendezvousHandlerCreator,
    RendezvousHandlerRegistry,
    RendezvousParameters,
)
from elastic_aio.compat.torch.rendezvous.handlers import (
    create_c10d_handler,
    create_etcd_handler,
    create_static_handler,
)

__all__ = ["get_rendezvous_handler", "rendezvous_handler_registry"]

_ENTRY_POINTS = "torchrun.handlers"


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
