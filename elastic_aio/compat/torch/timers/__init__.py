"""torch.distributed.elastic.timer: deadlines for blocks of a worker's code.

`elastic_aio.worker.expires` needs no client.  What differs on purpose: an expired timer
ends the worker only, as a failure, and not the launcher; the default scope is the caller's
line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.compat.torch.timers.api import RequestQueue as RequestQueue
    from elastic_aio.compat.torch.timers.api import TimerClient as TimerClient
    from elastic_aio.compat.torch.timers.api import TimerRequest as TimerRequest
    from elastic_aio.compat.torch.timers.api import TimerServer as TimerServer
    from elastic_aio.compat.torch.timers.api import configure as configure
    from elastic_aio.compat.torch.timers.api import expires as expires
    from elastic_aio.compat.torch.timers.file import FileTimerClient as FileTimerClient
    from elastic_aio.compat.torch.timers.file import FileTimerRequest as FileTimerRequest
    from elastic_aio.compat.torch.timers.file import FileTimerServer as FileTimerServer
    from elastic_aio.compat.torch.timers.local import LocalTimerClient as LocalTimerClient
    from elastic_aio.compat.torch.timers.local import LocalTimerServer as LocalTimerServer
    from elastic_aio.compat.torch.timers.local import (
        MultiprocessingRequestQueue as MultiprocessingRequestQueue,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.compat.torch.timers.api": """
                RequestQueue TimerClient TimerRequest TimerServer configure expires
            """,
            "elastic_aio.compat.torch.timers.file": """
                FileTimerClient FileTimerRequest FileTimerServer
            """,
            "elastic_aio.compat.torch.timers.local": """
                LocalTimerClient LocalTimerServer MultiprocessingRequestQueue
            """,
        },
    )
