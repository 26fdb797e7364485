"""The values of torch.distributed.elastic.agent.server: worker specs, groups and results."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from elastic_aio.compat.torch.errors import ProcessFailure
from elastic_aio.events import AttemptFailed, Event, JobFinished, StopRequested, WorkerStarted
from elastic_aio.node_events import RoundFormed
from elastic_aio.outcome import JobState

__all__ = ["RunResult", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState"]


@dataclass
class WorkerSpec:
    """What the workers of a node run, and how they are supervised.

    Raises:
        ValueError: a setting cannot be accepted.
    """

    role: str
    """Role of the workers."""
    local_world_size: int
    """Workers of this node."""
    rdzv_handler: Any
    """`RendezvousHandler`, of this library or of torch."""
    fn: Callable[..., Any] | None = None
    """Older name of `entrypoint`."""
    entrypoint: Callable[..., Any] | str | None = None
    """A function, or a program."""
    args: tuple[Any, ...] = ()
    """Arguments of every worker; `${local_rank}` is replaced in those of a program."""
    max_restarts: int = 3
    """How many failed attempts may be followed by another one."""
    monitor_interval: float = 0.1
    """Seconds between two looks for waiting nodes of a handler that is not ours."""
    master_port: int | None = None
    """Port of the workers' store in place of the handler's."""
    master_addr: str | None = None
    """Its address in place of the handler's."""
    local_addr: str | None = None
    """Address of this node for the others."""
    event_log_handler: str = "null"
    """Where torch's events go: "null" or "console"."""
    numa_options: Any = None
    """torch `NumaOptions`."""
    duplicate_stdout_filters: list[str] | None = None
    """Lines of stdout with one of these texts are copied to a file."""
    duplicate_stderr_filters: list[str] | None = None
    """The same for stderr."""
    virtual_local_rank: bool = False
    """Whether each worker has LOCAL_RANK 0 and sees its own GPU only."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if not isinstance(self.local_world_size, int) or self.local_world_size <= 0:
            problem = "must be a whole number of at least 1"
            raise ValueError(f"local_world_size: {problem} (got {self.local_world_size!r})")
        if self.monitor_interval <= 0:
            raise ValueError(f"monitor_interval: must be above 0 (got {self.monitor_interval})")
        if self.fn:
            text = "WorkerSpec.fn will be deprecated, please use WorkerSpec.entrypoint instead"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise ValueError(f"entrypoint: must be a function or a program (got {self.entrypoint})")

    def get_entrypoint_name(self) -> str:
        """Return the name of the function, or the last part of the program's path."""
        if isinstance(self.entrypoint, str):
            return os.path.basename(self.entrypoint)
        return getattr(self.entrypoint, "__qualname__", type(self.entrypoint).__qualname__)


class Worker:
    """One worker, with its ranks; `id` is its process id once it has started."""

    __slots__ = ("global_rank", "id", "local_rank", "role_rank", "role_world_size", "world_size")

    def __init__(
        self,
        local_rank: int,
        global_rank: int = -1,
        role_rank: int = -1,
        world_size: int = -1,
        role_world_size: int = -1,
    ) -> None:
        """Keep the ranks and the sizes of their worlds; -1 is not known yet."""
        self.id: Any = None
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.role_rank = role_rank
        self.world_size = world_size
        self.role_world_size = role_world_size

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerState(str, Enum):  # noqa: UP042  # str() is as in torch
    """The state of a worker group."""

    UNKNOWN = "UNKNOWN"
    """Not used."""
    INIT = "INIT"
    """The workers have not been started."""
    HEALTHY = "HEALTHY"
    """They run."""
    UNHEALTHY = "UNHEALTHY"
    """Not used."""
    STOPPED = "STOPPED"
    """They are stopped, and another attempt follows."""
    SUCCEEDED = "SUCCEEDED"
    """All have exited with code 0."""
    FAILED = "FAILED"
    """A worker has failed, and no attempt follows."""

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Return whether workers run in this state."""
        return state in (WorkerState.HEALTHY, WorkerState.UNHEALTHY)


class WorkerGroup:
    """The workers of this node; the agent changes it while it runs."""

    __slots__ = (
        "group_rank",
        "group_world_size",
        "master_addr",
        "master_port",
        "spec",
        "state",
        "store",
        "workers",
    )

    def __init__(self, spec: WorkerSpec) -> None:
        """Begin before the first round."""
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT

    def on_event(self, event: Event) -> None:
        """Follow the job."""
        match event:
            case RoundFormed():
                self.group_rank = event.group_rank
                self.group_world_size = event.group_world_size
                self.master_addr = self.spec.master_addr or event.master_addr
                self.master_port = event.master_port
                for worker in self.workers:
                    worker.world_size = event.world_size
            case WorkerStarted():
                worker = self.workers[event.local_rank]
                worker.id, worker.global_rank = event.pid, event.rank
                worker.role_rank = event.role_rank
                worker.role_world_size = event.role_world_size
                if self.group_rank is None:  # a single node forms no round
                    worker.world_size = len(self.workers)
                self.state = WorkerState.HEALTHY
            case StopRequested() | AttemptFailed():
                self.state = WorkerState.STOPPED
            case JobFinished(state=state):
                is_success = state is JobState.SUCCEEDED
                if self.group_rank is None:
                    self.group_rank, self.group_world_size = 0, 1
                self.state = WorkerState.SUCCEEDED if is_success else WorkerState.FAILED


@dataclass
class RunResult:
    """How a run ended; values and failures are by global rank."""

    state: WorkerState
    """SUCCEEDED or FAILED."""
    return_values: dict[int, Any] = field(default_factory=dict)
    """What the functions of this node's workers returned; None for programs."""
    failures: dict[int, ProcessFailure] = field(default_factory=dict)
    """The failures of the last attempt, the root cause first, of all nodes."""

    def is_failed(self) -> bool:
        """Return whether workers have failed."""
        return self.state == WorkerState.FAILED
