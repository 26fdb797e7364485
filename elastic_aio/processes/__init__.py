"""Groups of processes without the policy of a job: what torch's users know, natively async.

`start_processes` is torch.distributed.elastic.multiprocessing's: functions or a
program, with arguments and variables of their own for each, as one group with logs.
`spawn` is torch.multiprocessing's.  Both stand on the same ground as `launch`: the
guardian, the process tree, descriptors for output, results in memory files.

What differs from torch on purpose: a group's failure stops the group at once, not at
the next poll; whoever exited first is blamed, by its own error's time; nothing of the
caller's is changed and nothing is left in the temporary folder; `sys.exit()` and
`os._exit(0)` are an end and not a hang.

Scripts without a loop find the same in `elastic_aio.sync`.
"""

from elastic_aio.processes.context import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_context,
)
from elastic_aio.processes.group import (
    ProcessFailure,
    ProcessGroup,
    RunProcsResult,
    start_processes,
)

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessFailure",
    "ProcessGroup",
    "ProcessRaisedException",
    "RunProcsResult",
    "spawn",
    "start_context",
    "start_processes",
]
