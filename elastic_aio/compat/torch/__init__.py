"""torch.distributed.elastic's names over elastic_aio: programs change their imports, no more.

The names are torch's, and so are their arguments, results and exceptions; what runs is an
`elastic_aio` job.  torch itself is imported only by a function that has to return one of
its objects, such as a `Store`.

torch.distributed.run, torch.distributed.launcher  elastic_aio.compat.torch.launch
torch.distributed.elastic.agent.server             elastic_aio.compat.torch.agent
torch.distributed.elastic.rendezvous               elastic_aio.compat.torch.rendezvous
torch.distributed.elastic.multiprocessing          elastic_aio.compat.torch.multiprocessing
torch.distributed.elastic.multiprocessing.errors   elastic_aio.compat.torch.errors
torch.multiprocessing.spawn                        elastic_aio.compat.torch.multiprocessing.spawn
torch.distributed.elastic.timer                    elastic_aio.compat.torch.timers
torch.distributed.elastic.events                   elastic_aio.compat.torch.events
torch.distributed.elastic.metrics                  elastic_aio.compat.torch.metrics

`install()` puts these names in the place of torch's, for programs that are not changed at all.
docs/guides/migrate-from-torchrun.md lists what differs on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.compat.torch.agent import *  # noqa: F403
    from elastic_aio.compat.torch.errors import *  # noqa: F403
    from elastic_aio.compat.torch.installation import *  # noqa: F403
    from elastic_aio.compat.torch.launch import *  # noqa: F403
    from elastic_aio.compat.torch.multiprocessing import *  # noqa: F403
    from elastic_aio.compat.torch.rendezvous import *  # noqa: F403
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.compat.torch.agent": """
                ElasticAgent LocalElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup
                WorkerSpec WorkerState
            """,
            "elastic_aio.compat.torch.errors": """
                ChildFailedError ErrorHandler ProcessFailure get_error_handler record
            """,
            "elastic_aio.compat.torch.installation": "install uninstall",
            "elastic_aio.compat.torch.launch": """
                LaunchConfig config_from_args determine_local_world_size
                elastic_launch get_args_parser get_rdzv_endpoint get_use_env
                launch_agent main parse_args parse_min_max_nnodes run
            """,
            "elastic_aio.compat.torch.multiprocessing": """
                DefaultLogsSpecs LogsDest LogsSpecs PContext RunProcsResult
                SignalException Std spawn start_processes
            """,
            "elastic_aio.compat.torch.rendezvous": """
                RendezvousClosedError RendezvousConnectionError RendezvousError
                RendezvousGracefulExitError RendezvousHandler
                RendezvousHandlerRegistry RendezvousInfo RendezvousParameters
                RendezvousStateError RendezvousStoreInfo RendezvousTimeoutError
                get_rendezvous_handler rendezvous_handler_registry
            """,
        },
        {
            "elastic_aio.compat.torch.agent": """
                DEFAULT_ROLE TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_HEALTH_CHECK_PORT
                TORCHELASTIC_TIMER_FILE
            """,
            "elastic_aio.compat.torch.multiprocessing": """
                MultiprocessContext ProcessContext ProcessException ProcessExitedException
                ProcessRaisedException SpawnContext SubprocessContext WorkerProcess redirect
                redirect_stderr redirect_stdout start_context to_map
            """,
            "elastic_aio.compat.torch.rendezvous": """
                DynamicRendezvousHandler RendezvousHandlerCreator StaticTCPRendezvous
                create_handler
            """,
        },
    )
