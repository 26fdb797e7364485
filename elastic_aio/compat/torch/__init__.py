"""torch.distributed.elastic's names over elastic_aio: programs change their imports, no more.

The names are torch's, and so are their arguments, results and exceptions; what runs is an
`elastic_aio` job.  torch itself is imported only by a function that has to return one of
its objects, such as a `Store`.

torch.distributed.elastic.rendezvous    elastic_aio.compat.torch.rendezvous
torch.distributed.elastic.multiprocessing    elastic_aio.compat.torch.multiprocessing
torch.distributed.elastic.multiprocessing.errors    elastic_aio.compat.torch.errors
torch.multiprocessing.spawn    elastic_aio.compat.torch.multiprocessing.spawn
torch.distributed.elastic.timer    elastic_aio.compat.torch.timers
torch.distributed.elastic.events    elastic_aio.compat.torch.events
torch.distributed.elastic.metrics    elastic_aio.compat.torch.metrics

docs/guides/migrate-from-torchrun.md lists what differs on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.compat.torch.rendezvous import RendezvousClosedError as RendezvousClosedError
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousConnectionError as RendezvousConnectionError,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousError as RendezvousError
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousGracefulExitError as RendezvousGracefulExitError,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousHandler as RendezvousHandler
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousHandlerRegistry as RendezvousHandlerRegistry,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousInfo as RendezvousInfo
    from elastic_aio.compat.torch.rendezvous import RendezvousParameters as RendezvousParameters
    from elastic_aio.compat.torch.rendezvous import RendezvousStateError as RendezvousStateError
    from elastic_aio.compat.torch.rendezvous import RendezvousStoreInfo as RendezvousStoreInfo
    from elastic_aio.compat.torch.rendezvous import RendezvousTimeoutError as RendezvousTimeoutError
    from elastic_aio.compat.torch.rendezvous import get_rendezvous_handler as get_rendezvous_handler
    from elastic_aio.compat.torch.rendezvous import (
        rendezvous_handler_registry as rendezvous_handler_registry,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.compat.torch.rendezvous": """
                RendezvousClosedError RendezvousConnectionError RendezvousError
                RendezvousGracefulExitError RendezvousHandler RendezvousHandlerRegistry
                RendezvousInfo RendezvousParameters RendezvousStateError RendezvousStoreInfo
                RendezvousTimeoutError get_rendezvous_handler rendezvous_handler_registry
            """,
        },
    )
