"""The API for code that runs inside a worker.

`record` decorates a worker's main function, so that the launcher learns why it failed.
`WorkerContext.from_env()` returns the worker's ranks, the job's id and the master's
address.  `expires` sets a deadline for a block.  `ready`, `heartbeat`, `progress` and `phase`
report to the launcher.  `pending_change` returns what the worker is about to be restarted for,
and `agree_to_change` agrees to that.
Nothing here imports asyncio, or anything outside the standard library.
"""

from elastic_aio.lazy import document_classes
from elastic_aio.worker.context import WorkerContext
from elastic_aio.worker.membership import PendingChange, agree_to_change, pending_change
from elastic_aio.worker.notify import heartbeat, phase, progress, ready
from elastic_aio.worker.recorder import record
from elastic_aio.worker.timers import Timer, expires

__all__ = [
    "PendingChange",
    "Timer",
    "WorkerContext",
    "agree_to_change",
    "expires",
    "heartbeat",
    "pending_change",
    "phase",
    "progress",
    "ready",
    "record",
]

document_classes(globals())
