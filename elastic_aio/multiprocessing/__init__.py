"""Groups of processes without a restart policy: torch's `start_processes` and `spawn`, async.

`start_processes` is torch.distributed.elastic.multiprocessing's: functions or a
program, with arguments and environment variables for each process, as one group with
logs.  `spawn` is torch.multiprocessing's.  Both use what `launch` uses: the guardian,
the process tree, descriptors for output, results in memory files.

What differs from torch on purpose: a failure stops the group at once, not at the next
poll; the root cause is the process whose error has the earliest time; the caller's
arguments are not changed, and no file is left in the temporary directory; `sys.exit()`
and `os._exit(0)` end a process and do not hang the group.

`elastic_aio.sync` has the same for scripts without an event loop.
"""

from elastic_aio.group import (
    GroupContext,
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessFailure,
    ProcessRaisedException,
    RunProcsResult,
    spawn,
    start_context,
    start_processes,
)

__all__ = [
    "GroupContext",
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessFailure",
    "ProcessRaisedException",
    "RunProcsResult",
    "spawn",
    "start_context",
    "start_processes",
]
