"""torch.distributed.elastic.agent.server: a job as a blocking agent.

`LocalElasticAgent(spec, logs_specs).run()` runs an `elastic_aio.Agent` on an event loop of its
own, in this thread, or in another one where this thread's event loop is running (Jupyter).

The agents of torch can be extended by overriding their private methods.  Those do not exist
here: listen to the events of a job, or decide about restarts (`LaunchSpec.restart`).
"""

from __future__ import annotations

import abc
import os
from typing import Any

from elastic_aio.cli.options import UsageError
from elastic_aio.cli.torchrun import uninterruptible_timeout_from
from elastic_aio.compat.torch.errors import ProcessFailure
from elastic_aio.compat.torch.job import AgentJob, JobSettings
from elastic_aio.compat.torch.multiprocessing.logs import LogsSpecs
from elastic_aio.compat.torch.worker_group import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elastic_aio.outcome import JobState, LaunchResult

__all__ = [
    "DEFAULT_ROLE",
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "ElasticAgent",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]

DEFAULT_ROLE = "default"

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"

_PRIVATE_METHODS = (
    "_assign_worker_ranks",
    "_exit_barrier",
    "_initialize_workers",
    "_invoke_run",
    "_monitor_workers",
    "_rendezvous",
    "_restart_workers",
    "_shutdown",
    "_start_workers",
    "_stop_workers",
)
_SEAM = (
    "its private methods are not called here; use elastic_aio.launch with `listeners` for the"
    " events of a job, or LaunchSpec(restart=RestartPolicy(decide=...)) for its restarts"
)


class ElasticAgent(abc.ABC):
    """Supervises the workers of one node."""

    @abc.abstractmethod
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end."""

    @abc.abstractmethod
    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers."""


class SimpleElasticAgent(ElasticAgent):
    """The base class of torch's agents; it cannot be extended here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse subclasses."""
        raise TypeError(f"{cls.__name__}: SimpleElasticAgent cannot be extended: {_SEAM}")


class LocalElasticAgent(ElasticAgent):
    """Supervises the workers of this host: one job, run once."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse subclasses that rely on torch's private methods."""
        super().__init_subclass__(**kwargs)
        if names := [name for name in _PRIVATE_METHODS if name in vars(cls)]:
            raise TypeError(f"{cls.__name__}.{names[0]}: cannot be overridden: {_SEAM}")

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str | None = "spawn",
        exit_barrier_timeout: float = 300,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: int = 30,
        health_check_server: Any = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        signals_to_handle: str | None = None,
    ) -> None:
        """Prepare; nothing is started before `run`.

        Args:
            spec: what the workers run.
            logs_specs: where their output goes.
            start_method: "spawn", "fork" or "forkserver", for functions; None is
                multiprocessing's default.
            exit_barrier_timeout: seconds that a finished node waits for the others.
            log_line_prefix_template: prefix of shown lines, with `${role_name}`,
                `${local_rank}` and `${rank}`.
            shutdown_timeout: seconds from the first signal of a stop to SIGKILL.
            health_check_server: its `start` and `stop` are called around the run.
            uninterruptible_state_timeout: seconds that a worker may be in one uninterruptible
                system call; None takes `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`.
            signals_to_handle: signals that stop the workers, as in "SIGTERM,SIGINT"; None
                takes `TORCHELASTIC_SIGNALS_TO_HANDLE`, else torch's four.
        """
        self._worker_group = WorkerGroup(spec)
        self._health_check_server = health_check_server
        self._settings = JobSettings(
            logs_specs=logs_specs,
            start_method=start_method,
            exit_barrier_timeout=exit_barrier_timeout,
            prefix=log_line_prefix_template,
            shutdown_timeout=shutdown_timeout,
            signals=signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE"),
            uninterruptible_timeout=_uninterruptible_timeout(uninterruptible_state_timeout),
        )

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, with all restarts.

        Args:
            role: no effect: the role is the spec's.

        Raises:
            RendezvousError: the nodes did not come together.
            SignalException: a signal ended the job; no process of it is left.
            ValueError: a setting cannot be accepted.
            elastic_aio.HostError: this host lacks something that the job needs.
        """
        job = AgentJob(self._worker_group.spec, self._settings)
        server = self._health_check_server
        if server is not None:
            server.start()
        try:
            return _run_result(job.run([self._worker_group.on_event]))
        finally:
            if server is not None:
                server.stop()

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers; another thread may change them meanwhile."""
        return self._worker_group


SimpleElasticAgent.register(LocalElasticAgent)


def _uninterruptible_timeout(given: float | None) -> float | None:
    if given is not None:
        return max(0.0, given)
    try:
        return uninterruptible_timeout_from(os.environ)
    except UsageError as error:
        raise ValueError(str(error)) from None


def _run_result(result: LaunchResult) -> RunResult:
    if result.state is JobState.SUCCEEDED:
        return RunResult(WorkerState.SUCCEEDED, return_values=dict(result.return_values))
    failures = {one.rank: ProcessFailure.from_failure(one) for one in reversed(result.failures)}
    # Reversed twice: of two failures with one rank, the earlier counts.
    return RunResult(WorkerState.FAILED, failures=dict(reversed(failures.items())))
