"""The control socket of an agent: what another process of the same user can ask of a job.

::

    async with connect("my-run") as job:
        print((await job.status()).phase)
        async for event in job.events(follow=True):
            print(event)

`aio-elastic ps`, `status`, `stop` and the other commands use the same client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.control.client import JobClient as JobClient
    from elastic_aio.control.client import RunningJob as RunningJob
    from elastic_aio.control.client import connect as connect
    from elastic_aio.control.client import list_jobs as list_jobs
    from elastic_aio.control.protocol import DoneReply as DoneReply
    from elastic_aio.control.protocol import DumpReply as DumpReply
    from elastic_aio.control.protocol import EndReply as EndReply
    from elastic_aio.errors import AgentUnreachable as AgentUnreachable
    from elastic_aio.errors import ControlError as ControlError
    from elastic_aio.errors import JobNotFound as JobNotFound
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.control.client": "JobClient RunningJob connect list_jobs",
            "elastic_aio.control.protocol": "DoneReply DumpReply EndReply",
            "elastic_aio.errors": "AgentUnreachable ControlError JobNotFound",
        },
    )
