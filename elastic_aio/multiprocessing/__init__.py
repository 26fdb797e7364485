"""Groups of processes without a restart policy: torch's `start_processes` and `spawn`, async.

`start_processes` is torch.distributed.elastic.multiprocessing's: functions or a program, with
arguments and environment variables for each process, as one group with logs.  `spawn` is
torch.multiprocessing's.  Both use the machinery of `launch`: the guardian, the process tree,
descriptors for output, results in memory files.

They differ from torch on purpose: a failure stops the group at once, not at the next poll; the root
cause is the process whose error has the earliest time; the caller's arguments are not changed, and
no file is left in the temporary directory; `sys.exit()` and `os._exit(0)` end a process and do not
hang the group.

`elastic_aio.sync` has the same for scripts without an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.group import GroupContext as GroupContext
    from elastic_aio.group import ProcessContext as ProcessContext
    from elastic_aio.group import ProcessException as ProcessException
    from elastic_aio.group import ProcessExitedException as ProcessExitedException
    from elastic_aio.group import ProcessFailure as ProcessFailure
    from elastic_aio.group import ProcessRaisedException as ProcessRaisedException
    from elastic_aio.group import RunProcsResult as RunProcsResult
    from elastic_aio.group import spawn as spawn
    from elastic_aio.group import start_context as start_context
    from elastic_aio.group import start_processes as start_processes
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.group": """
                GroupContext ProcessContext ProcessException ProcessExitedException ProcessFailure
                ProcessRaisedException RunProcsResult spawn start_context start_processes
            """,
        },
    )
