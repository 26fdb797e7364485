"""torch.distributed.elastic.rendezvous: how the nodes of a job meet.

It goes both ways (`bridge`): a handler of torch, of a plug-in or of the program runs under our
`LocalElasticAgent`, and a handler of ours runs under torch's.
"""

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
from elastic_aio.compat.torch.rendezvous.handlers import (
    DynamicRendezvousHandler,
    StaticTCPRendezvous,
    create_handler,
)
from elastic_aio.compat.torch.rendezvous.registry import (
    get_rendezvous_handler,
    rendezvous_handler_registry,
)

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
