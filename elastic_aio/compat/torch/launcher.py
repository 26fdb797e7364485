"""torch.distributed.launcher: a job as a call, `elastic_launch(config, entrypoint)(*args)`."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_aio.compat.torch.agent import LocalElasticAgent
from elastic_aio.compat.torch.errors import ChildFailedError
from elastic_aio.compat.torch.multiprocessing import SignalException
from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs
from elastic_aio.compat.torch.rendezvous.api import RendezvousHandler, RendezvousParameters
from elastic_aio.compat.torch.rendezvous.registry import get_rendezvous_handler
from elastic_aio.compat.torch.worker_group import WorkerSpec

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

log = logging.getLogger(__name__)

_GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_GRACE_S = "30"  # torch's
_STATIC_TIMEOUT = 900


@dataclass
class LaunchConfig:
    """How a program or function is run on several nodes.

    Raises:
        ValueError: a setting cannot be accepted.
    """

    min_nodes: int
    """Least number of nodes."""
    max_nodes: int
    """Largest number of nodes."""
    nproc_per_node: int
    """Workers of each node."""
    logs_specs: LogsSpecs | None = None
    """Where the output goes; None is `DefaultLogsSpecs()`."""
    run_id: str = ""
    """Id of the run, the same on all nodes; empty takes a random one."""
    role: str = "default_role"
    """Role of the workers."""
    rdzv_endpoint: str = ""
    """`HOST:PORT` of the rendezvous's store."""
    rdzv_backend: str = "etcd"
    """How the nodes meet: "c10d", "static", "etcd", "etcd-v2", or a registered name."""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    """Settings of the rendezvous, as for `--rdzv-conf`."""
    rdzv_timeout: int = -1
    """Older name of `rdzv_configs["timeout"]`; -1 is not set."""
    max_restarts: int = 3
    """How many failed attempts may be followed by another one."""
    monitor_interval: float = 0.1
    """Seconds between two looks for waiting nodes of a handler that is not ours."""
    start_method: str | None = "spawn"
    """How functions are started: "spawn", "fork" or "forkserver"."""
    log_line_prefix_template: str | None = None
    """Prefix of shown lines, with `${role_name}`, `${local_rank}` and `${rank}`."""
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    """No effect."""
    local_addr: str | None = None
    """Address of this node for the others; None finds it."""
    event_log_handler: str = "null"
    """Where torch's events go: "null" or "console"."""
    numa_options: Any = None
    """torch `NumaOptions`."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    """Signals that stop the workers."""
    duplicate_stdout_filters: list[str] | None = None
    """Lines of stdout with one of these texts are copied to a file."""
    duplicate_stderr_filters: list[str] | None = None
    """The same for stderr."""
    virtual_local_rank: bool = False
    """Whether each worker has LOCAL_RANK 0 and sees its own GPU only."""
    shutdown_timeout: int | None = None
    """Seconds from the first signal of a stop to SIGKILL; None takes
    `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, else 30."""

    def __post_init__(self) -> None:
        """Fill in defaults; the caller's dict is not changed."""
        if not isinstance(self.rdzv_configs, Mapping):
            raise ValueError(f"rdzv_configs: must be a dict (got {self.rdzv_configs!r})")
        self.rdzv_configs = {"timeout": _STATIC_TIMEOUT, **self.rdzv_configs}
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if not callable(getattr(self.logs_specs, "reify", None)):  # torch's own will do
            raise ValueError(f"logs_specs: must be a LogsSpecs (got {self.logs_specs!r})")
        if self.shutdown_timeout is None:
            text = os.environ.get(_GRACE_VARIABLE) or _GRACE_S
            self.shutdown_timeout = _whole_number(_GRACE_VARIABLE, text)
        if self.shutdown_timeout < 0:
            problem = "must be at least 0"
            raise ValueError(f"shutdown_timeout: {problem} (got {self.shutdown_timeout})")


class elastic_launch:
    """Runs a function or a program as a job: `elastic_launch(config, entrypoint)(*args)`.

    The call returns what the functions returned, by global rank, of this node's workers; None
    for programs.  It raises what `launch_agent` raises.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
    ) -> None:
        """Prepare a job; the arguments are those of `launch_agent`."""
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job with these arguments of the entrypoint."""
        return launch_agent(
            self._config,
            self._entrypoint,
            list(args),
            health_check_server=self._health_check_server,
        )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any = None,
) -> dict[int, Any]:
    """Run this node's part of a job to its end.

    Args:
        config: the job.
        entrypoint: a function, or a program.
        args: its arguments; `${local_rank}` is replaced in those of a program.
        health_check_server: its `start` and `stop` are called around the job.

    Returns:
        What the functions returned, by global rank, of this node's workers.

    Raises:
        ChildFailedError: workers have failed, and no restart is left.
        RendezvousError: the nodes did not come together.
        SignalException: a signal ended the job; no process of it is left.
        ValueError: a setting cannot be accepted.
        elastic_aio.HostError: this host lacks something that the job needs.
    """
    if not config.run_id:
        config.run_id = uuid.uuid4().hex
        log.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    handler = get_rendezvous_handler(
        RendezvousParameters(
            backend=config.rdzv_backend,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    agent = _agent(config, handler, entrypoint, args, health_check_server)
    is_shut_down = True
    try:
        result = agent.run()
    except SignalException:
        is_shut_down = False  # so that other nodes may go on
        raise
    finally:
        if is_shut_down:
            handler.shutdown()
    if result.is_failed():
        raise ChildFailedError(_get_entrypoint_name(entrypoint, args), result.failures)
    return result.return_values


def _agent(
    config: LaunchConfig,
    handler: RendezvousHandler,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: Any,
) -> LocalElasticAgent:
    assert config.logs_specs is not None, "it has a default"
    assert config.shutdown_timeout is not None, "it has a default"
    return LocalElasticAgent(
        WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            rdzv_handler=handler,
            entrypoint=entrypoint,
            args=tuple(args),
            max_restarts=config.max_restarts,
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=config.numa_options,
            duplicate_stdout_filters=config.duplicate_stdout_filters,
            duplicate_stderr_filters=config.duplicate_stderr_filters,
            virtual_local_rank=config.virtual_local_rank,
        ),
        logs_specs=config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
        health_check_server=health_check_server,
        signals_to_handle=config.signals_to_handle,
    )


def _get_entrypoint_name(entrypoint: Callable[..., Any] | str | None, args: Sequence[Any]) -> str:
    """Return the name of what is run, for the report of a failure."""
    if isinstance(entrypoint, str):
        if entrypoint != sys.executable:
            return entrypoint
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return getattr(entrypoint, "__name__", "")


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: must be a whole number of seconds (got {text!r})") from None
