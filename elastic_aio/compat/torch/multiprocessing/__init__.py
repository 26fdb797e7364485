"""torch.distributed.elastic.multiprocessing, and `spawn` of torch.multiprocessing.

Synchronous as there: `start_processes` returns a context whose processes run.  An async
program uses `elastic_aio.multiprocessing`.  `start_context` is what torch.multiprocessing
calls `start_processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.compat.torch.errors import ProcessFailure as ProcessFailure
    from elastic_aio.compat.torch.multiprocessing.context import (
        MultiprocessContext as MultiprocessContext,
    )
    from elastic_aio.compat.torch.multiprocessing.context import PContext as PContext
    from elastic_aio.compat.torch.multiprocessing.context import RunProcsResult as RunProcsResult
    from elastic_aio.compat.torch.multiprocessing.context import SignalException as SignalException
    from elastic_aio.compat.torch.multiprocessing.context import (
        SubprocessContext as SubprocessContext,
    )
    from elastic_aio.compat.torch.multiprocessing.context import start_processes as start_processes
    from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs as DefaultLogsSpecs
    from elastic_aio.compat.torch.multiprocessing.logs import LogsDest as LogsDest
    from elastic_aio.compat.torch.multiprocessing.logs import LogsSpecs as LogsSpecs
    from elastic_aio.compat.torch.multiprocessing.logs import Std as Std
    from elastic_aio.compat.torch.multiprocessing.logs import to_map as to_map
    from elastic_aio.compat.torch.multiprocessing.processes import ProcessContext as ProcessContext
    from elastic_aio.compat.torch.multiprocessing.processes import (
        ProcessException as ProcessException,
    )
    from elastic_aio.compat.torch.multiprocessing.processes import (
        ProcessExitedException as ProcessExitedException,
    )
    from elastic_aio.compat.torch.multiprocessing.processes import (
        ProcessRaisedException as ProcessRaisedException,
    )
    from elastic_aio.compat.torch.multiprocessing.processes import SpawnContext as SpawnContext
    from elastic_aio.compat.torch.multiprocessing.processes import WorkerProcess as WorkerProcess
    from elastic_aio.compat.torch.multiprocessing.processes import spawn as spawn
    from elastic_aio.compat.torch.multiprocessing.processes import start_context as start_context
    from elastic_aio.compat.torch.multiprocessing.redirects import redirect as redirect
    from elastic_aio.compat.torch.multiprocessing.redirects import (
        redirect_stderr as redirect_stderr,
    )
    from elastic_aio.compat.torch.multiprocessing.redirects import (
        redirect_stdout as redirect_stdout,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.compat.torch.errors": "ProcessFailure",
            "elastic_aio.compat.torch.multiprocessing.context": """
                MultiprocessContext PContext RunProcsResult SignalException SubprocessContext
                start_processes
            """,
            "elastic_aio.compat.torch.multiprocessing.logs": """
                DefaultLogsSpecs LogsDest LogsSpecs Std to_map
            """,
            "elastic_aio.compat.torch.multiprocessing.processes": """
                ProcessContext ProcessException ProcessExitedException ProcessRaisedException
                SpawnContext WorkerProcess spawn start_context
            """,
            "elastic_aio.compat.torch.multiprocessing.redirects": """
                redirect redirect_stderr redirect_stdout
            """,
        },
    )
