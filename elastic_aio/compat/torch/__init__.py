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
    from elastic_aio.compat.torch.agent import ElasticAgent as ElasticAgent
    from elastic_aio.compat.torch.agent import LocalElasticAgent as LocalElasticAgent
    from elastic_aio.compat.torch.agent import RunResult as RunResult
    from elastic_aio.compat.torch.agent import SimpleElasticAgent as SimpleElasticAgent
    from elastic_aio.compat.torch.agent import Worker as Worker
    from elastic_aio.compat.torch.agent import WorkerGroup as WorkerGroup
    from elastic_aio.compat.torch.agent import WorkerSpec as WorkerSpec
    from elastic_aio.compat.torch.agent import WorkerState as WorkerState
    from elastic_aio.compat.torch.errors import ChildFailedError as ChildFailedError
    from elastic_aio.compat.torch.errors import ErrorHandler as ErrorHandler
    from elastic_aio.compat.torch.errors import ProcessFailure as ProcessFailure
    from elastic_aio.compat.torch.errors import get_error_handler as get_error_handler
    from elastic_aio.compat.torch.errors import record as record
    from elastic_aio.compat.torch.installation import install as install
    from elastic_aio.compat.torch.installation import uninstall as uninstall
    from elastic_aio.compat.torch.launch import LaunchConfig as LaunchConfig
    from elastic_aio.compat.torch.launch import config_from_args as config_from_args
    from elastic_aio.compat.torch.launch import (
        determine_local_world_size as determine_local_world_size,
    )
    from elastic_aio.compat.torch.launch import elastic_launch as elastic_launch
    from elastic_aio.compat.torch.launch import get_args_parser as get_args_parser
    from elastic_aio.compat.torch.launch import get_rdzv_endpoint as get_rdzv_endpoint
    from elastic_aio.compat.torch.launch import get_use_env as get_use_env
    from elastic_aio.compat.torch.launch import launch_agent as launch_agent
    from elastic_aio.compat.torch.launch import main as main
    from elastic_aio.compat.torch.launch import parse_args as parse_args
    from elastic_aio.compat.torch.launch import parse_min_max_nnodes as parse_min_max_nnodes
    from elastic_aio.compat.torch.launch import run as run
    from elastic_aio.compat.torch.multiprocessing import DefaultLogsSpecs as DefaultLogsSpecs
    from elastic_aio.compat.torch.multiprocessing import LogsDest as LogsDest
    from elastic_aio.compat.torch.multiprocessing import LogsSpecs as LogsSpecs
    from elastic_aio.compat.torch.multiprocessing import PContext as PContext
    from elastic_aio.compat.torch.multiprocessing import RunProcsResult as RunProcsResult
    from elastic_aio.compat.torch.multiprocessing import SignalException as SignalException
    from elastic_aio.compat.torch.multiprocessing import Std as Std
    from elastic_aio.compat.torch.multiprocessing import spawn as spawn
    from elastic_aio.compat.torch.multiprocessing import start_processes as start_processes
    from elastic_aio.compat.torch.rendezvous import RendezvousClosedError as RendezvousClosedError
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousConnectionError as RendezvousConnectionError,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousError as RendezvousError
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousGracefulExitError as RendezvousGracefulExitError,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousHandler as RendezvousHandler
    from elastic_aio.compat.torch.rendezvous import (
        RendezvousHandlerRegistry as RendezvousHandlerRegistry,
    )
    from elastic_aio.compat.torch.rendezvous import RendezvousInfo as RendezvousInfo
    from elastic_aio.compat.torch.rendezvous import RendezvousParameters as RendezvousParameters
    from elastic_aio.compat.torch.rendezvous import RendezvousStateError as RendezvousStateError
    from elastic_aio.compat.torch.rendezvous import RendezvousStoreInfo as RendezvousStoreInfo
    from elastic_aio.compat.torch.rendezvous import RendezvousTimeoutError as RendezvousTimeoutError
    from elastic_aio.compat.torch.rendezvous import get_rendezvous_handler as get_rendezvous_handler
    from elastic_aio.compat.torch.rendezvous import (
        rendezvous_handler_registry as rendezvous_handler_registry,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.compat.torch.agent": """
                ElasticAgent LocalElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup
                WorkerSpec WorkerState
            """,
            "elastic_aio.compat.torch.errors": """
                ChildFailedError ErrorHandler ProcessFailure get_error_handler
                record
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
    )
