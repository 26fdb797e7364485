"""The API for code that runs inside a worker.

`record` decorates a worker's main function, so that the launcher learns why it failed.
`WorkerContext.from_env()` returns the worker's ranks, the job's id and the master's address.
`expires` sets a deadline for a block.  `ready`, `heartbeat`, `progress` and `phase` report to the
launcher, and `exclude_node` excludes the host.  `pending_change` returns the change that the worker
is about to be restarted for, and `agree_to_change` agrees to it.  Nothing here imports asyncio, or
anything outside the standard library.

The names load on first use: a launcher needs the names of `context` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.worker.context import WorkerContext as WorkerContext
    from elastic_aio.worker.membership import PendingChange as PendingChange
    from elastic_aio.worker.membership import agree_to_change as agree_to_change
    from elastic_aio.worker.membership import pending_change as pending_change
    from elastic_aio.worker.notify import exclude_node as exclude_node
    from elastic_aio.worker.notify import heartbeat as heartbeat
    from elastic_aio.worker.notify import phase as phase
    from elastic_aio.worker.notify import progress as progress
    from elastic_aio.worker.notify import ready as ready
    from elastic_aio.worker.recorder import record as record
    from elastic_aio.worker.timers import Timer as Timer
    from elastic_aio.worker.timers import expires as expires
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.worker.context": "WorkerContext",
            "elastic_aio.worker.membership": "PendingChange agree_to_change pending_change",
            "elastic_aio.worker.notify": "exclude_node heartbeat phase progress ready",
            "elastic_aio.worker.recorder": "record",
            "elastic_aio.worker.timers": "Timer expires",
        },
    )
