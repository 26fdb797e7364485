"""torch.distributed.elastic.timer: deadlines for blocks of a worker's code.

`elastic_aio.worker.expires` needs no client.  What differs on purpose: an expired timer
ends the worker only, as a failure, and not the launcher; the default scope is the caller's
line.
"""

from elastic_aio.compat.torch.timers.api import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    RequestQueue,
    TimerClient,
    TimerRequest,
    TimerServer,
    configure,
    expires,
)
from elastic_aio.compat.torch.timers.file import FileTimerClient, FileTimerRequest, FileTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]
