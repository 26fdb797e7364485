"""torch.distributed.elastic.agent.server: a job as a blocking agent.

`LocalElasticAgent(spec, logs_specs).run()` runs an `elastic_aio.Agent` on an event loop of its
own, in this thread, or in another one where this thread's event loop is running (Jupyter).

The agents of torch can be extended by overriding their private methods.  Those do not exist
here: listen to the events of a job, or decide about restarts (`LaunchSpec.restart`).
"""

from __future__ import annotations

import abc
import asyncio
import codecs
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TextIO

from elastic_aio.agent.agent import Agent, make_agent
from elastic_aio.agent.event_log import EventListener
from elastic_aio.compat.torch.errors import ProcessFailure
from elastic_aio.compat.torch.events import event_listener
from elastic_aio.compat.torch.installation import has_control, note_use
from elastic_aio.compat.torch.metrics import metric_listener
from elastic_aio.compat.torch.multiprocessing import SignalException, numa_mode, start_method_of
from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs
from elastic_aio.compat.torch.rendezvous import DynamicRendezvousHandler
from elastic_aio.compat.torch.rendezvous.api import RendezvousClosedError, error_of_cause
from elastic_aio.compat.torch.rendezvous.bridge import HandlerRendezvous
from elastic_aio.errors import JobFailed, JobStopped, RendezvousFailed, SpecError
from elastic_aio.events import AttemptFailed, Event, JobFinished, StopRequested, WorkerStarted
from elastic_aio.http.server import StatusServer
from elastic_aio.launcher import receive_signals, run_coroutine, supervise_agent
from elastic_aio.node_events import RoundFormed
from elastic_aio.outcome import EndCause, JobState, LaunchResult, signal_name
from elastic_aio.rendezvous.base import AgentPort, NodeInfo, Rendezvous
from elastic_aio.spec.checks import UsageError, signal_number
from elastic_aio.spec.job import Function, LaunchSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartPolicy
from elastic_aio.spec.stop import SignalSpec, StopPlan
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS
from elastic_aio.sync import LoopThread
from elastic_aio.torch_events import load_event_handler
from elastic_aio.torch_logs import TorchLogLayout
from elastic_aio.torch_variables import (
    HEALTH_VARIABLE,
    health_address_from,
    timers_from,
    uninterruptible_timeout_from,
)
from elastic_aio.worker.scripts import run_script

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

log = logging.getLogger(__name__)

DEFAULT_ROLE = "default"
"""The role of a `WorkerSpec` that has none."""

TORCHELASTIC_ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""Name of the variable by which workers may acquire timers."""
TORCHELASTIC_HEALTH_CHECK_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
"""Name of the variable with the port at which the state of the job is served."""
TORCHELASTIC_TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
"""Name of the variable with the path of the pipe of the timers."""

_NODES_MAX = 65_536
"""For a handler that does not say how many nodes it may have."""

_PRIVATE_METHODS = (
    *("_assign_worker_ranks", "_exit_barrier", "_initialize_workers", "_invoke_run"),
    *("_monitor_workers", "_rendezvous", "_restart_workers", "_shutdown", "_start_workers"),
    "_stop_workers",
)
_SEAM = (
    "its private methods are not called here; use elastic_aio.launch with `listeners` for the"
    " events of a job, or LaunchSpec(restart=RestartPolicy(decide=...)) for its restarts"
)


# ------------------------------------------------------------------- values


@dataclass
class WorkerSpec:
    """What the workers of a node run, and how they are supervised.

    The settings of a `LaunchConfig` mean the same here; `fn` is an older name of `entrypoint`.

    Raises:
        ValueError: a setting cannot be accepted.
    """

    role: str
    local_world_size: int
    """Workers of this node."""
    rdzv_handler: Any
    """`RendezvousHandler`, of this library or of torch."""
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    """A function, or a program."""
    args: tuple[Any, ...] = ()
    """Arguments of every worker; `${local_rank}` is replaced in arguments of a program."""
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    """Port of the workers' store, in place of the handler's."""
    master_addr: str | None = None
    """Address of that store, in place of the handler's."""
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
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


@dataclass(eq=False, repr=False, slots=True)
class Worker:
    """One worker: its ranks and the sizes of their worlds, -1 as long as they are not known.

    `id` is its process id once it has started.
    """

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = field(default=None, init=False)

    def __str__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)

    __repr__ = __str__


class WorkerState(str, Enum):  # noqa: UP042  # str() is as in torch
    """The state of a worker group."""

    UNKNOWN = "UNKNOWN"  # not used
    INIT = "INIT"
    """The workers have not been started."""
    HEALTHY = "HEALTHY"
    """They run."""
    UNHEALTHY = "UNHEALTHY"  # not used
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

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT

    def on_event(self, event: Event) -> None:
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


# ------------------------------------------------------------------- agents


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

        The other settings are as in `LaunchConfig`.

        Args:
            spec: what the workers run.
            logs_specs: where their output goes.
            start_method: of functions; None is multiprocessing's default.
            exit_barrier_timeout: seconds that a finished node waits for the others.
            health_check_server: its `start` and `stop` are called around the run.
            uninterruptible_state_timeout: seconds that a worker may be in one uninterruptible
                system call; None takes `TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT`.
            signals_to_handle: signals that stop the workers, as in "SIGTERM,SIGINT"; None
                takes `TORCHELASTIC_SIGNALS_TO_HANDLE`, else torch's four.
        """
        self._worker_group = WorkerGroup(spec)
        self._health_check_server = health_check_server
        self._logs_specs = logs_specs
        self._start_method = start_method
        self._exit_barrier_timeout = exit_barrier_timeout
        self._prefix = log_line_prefix_template
        self._shutdown_timeout = shutdown_timeout
        self._signals = signals_to_handle or os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
        self._uninterruptible_timeout = _uninterruptible_timeout(uninterruptible_state_timeout)
        self._bridge: HandlerRendezvous | None = None  # of the present run

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end, with all restarts; the role is the spec's.

        On the main thread the signals of the settings stop the job.

        Raises:
            RendezvousError: the nodes did not come together, or the job has ended before.
            SignalException: a signal ended the job; no process of it is left.
            ValueError: a setting cannot be accepted.
            elastic_aio.HostError: this host lacks something that the job needs.
            Exception: what the rendezvous handler raised.
        """
        self._bridge = None
        spec, signals = self._launch_spec(), _signal_spec(self._signals)
        handlers = _event_handlers(self._worker_group.spec.event_log_handler)
        listeners = [_log_event, *handlers, self._worker_group.on_event]
        server = self._health_check_server
        if server is not None:
            server.start()
        try:
            return _run_result(self._run_job(spec, signals, listeners))
        finally:
            if server is not None:
                server.stop()

    def get_worker_group(self, role: str = DEFAULT_ROLE) -> WorkerGroup:
        """Return the workers; another thread may change them at any time."""
        return self._worker_group

    def _launch_spec(self) -> LaunchSpec:
        spec = self._worker_group.spec
        handler = spec.rdzv_handler
        entrypoint: Any = spec.entrypoint
        if entrypoint is run_script:
            entrypoint = Function(run_script, str(spec.args[0]))
        if isinstance(handler, DynamicRendezvousHandler):
            nodes = (handler.nodes.minimum, handler.nodes.maximum)
            rendezvous, port = handler.rendezvous, spec.master_port or handler.master_port
        else:
            # More than one: the handler decides, and an agent of one node would not ask it.
            most = getattr(getattr(handler, "settings", None), "max_nodes", _NODES_MAX)
            nodes, rendezvous, port = (1, max(2, most)), RendezvousSpec(), None
        return LaunchSpec(
            [entrypoint] if isinstance(entrypoint, str) else entrypoint,
            args=spec.args,
            nproc_per_node=spec.local_world_size,
            nnodes=nodes,
            max_restarts=spec.max_restarts,
            restart=RestartPolicy(**TORCHRUN_DEFAULTS["restart"]),
            role=spec.role,
            run_id=handler.get_run_id(),
            master_addr=spec.master_addr or None,
            master_port=port,
            host_store=bool(handler.use_agent_store),
            logs=self._log_spec(spec),
            stop=StopPlan.within(self._shutdown_timeout),
            rendezvous=replace(rendezvous, exit_barrier_timeout=self._exit_barrier_timeout),
            numa_binding=numa_mode(spec.numa_options),
            virtual_local_rank=spec.virtual_local_rank,
            timers=timers_from(os.environ),
            uninterruptible_timeout=self._uninterruptible_timeout or None,
            start_method=start_method_of(self._start_method),
        )

    def _log_spec(self, spec: WorkerSpec) -> LogSpec:
        specs = self._logs_specs
        others: dict[str, Any] = {
            "prefix": self._prefix or None,
            "duplicate_stdout_filters": spec.duplicate_stdout_filters or (),
            "duplicate_stderr_filters": spec.duplicate_stderr_filters or (),
        }
        if type(specs) is DefaultLogsSpecs:
            return specs.log_spec(**others)
        of_all_workers = {
            "ROLE_NAME": spec.role,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        }
        return TorchLogLayout(specs, of_all_workers, **others)

    def _run_job(
        self, spec: LaunchSpec, signals: SignalSpec, listeners: list[EventListener]
    ) -> LaunchResult:
        """Return the result also of workers that failed."""
        try:
            with console_descriptors() as console:
                result = self._supervise(spec, signals, listeners, console)
        except JobStopped as error:
            number = error.result.exit_code - 128
            text = f"Process got signal: {number} ({signal_name(number)})"
            raise SignalException(text, signal.Signals(number)) from None
        except RendezvousFailed as error:
            if self._bridge is not None and self._bridge.error is not None:
                raise self._bridge.error from None
            raise error_of_cause(error.result.cause, error.result.reason) from error
        except JobFailed as error:
            result = error.result
        if result.cause is EndCause.RUN_HAD_ENDED:
            raise RendezvousClosedError(result.reason)
        return result

    def _make_bridge(
        self, spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort
    ) -> Rendezvous:
        worker_spec = self._worker_group.spec
        self._bridge = HandlerRendezvous(
            worker_spec.rdzv_handler,
            spec,
            node,
            agent,
            master=(worker_spec.master_addr, worker_spec.master_port),
            interval=worker_spec.monitor_interval,
        )
        return self._bridge

    def _supervise(
        self,
        spec: LaunchSpec,
        signals: SignalSpec,
        listeners: list[EventListener],
        console: tuple[int, int],
    ) -> LaunchResult:
        note_use()
        is_ours = isinstance(self._worker_group.spec.rdzv_handler, DynamicRendezvousHandler)
        factory = None if is_ours else self._make_bridge
        if (server := _status_server()) is not None:
            listeners.append(server)
        agent = make_agent(
            spec,
            console=console,
            listeners=listeners,
            rendezvous=factory,
            control=has_control(),
        )
        if _is_loop_running():
            return _run_in_thread(agent, server)
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals are handled on the main thread only")
            return run_coroutine(lambda: _served(server, _wait(agent)))
        with receive_signals(signals, agent.spec.preemption.signals) as received:
            return run_coroutine(lambda: _served(server, supervise_agent(agent, signals, received)))


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


async def _served(
    server: StatusServer | None, work: Coroutine[Any, Any, LaunchResult]
) -> LaunchResult:
    """Run a job while a server, if there is one and its port is free, shows its state."""
    async with AsyncExitStack() as stack:
        stack.callback(work.close)  # if a cancellation comes first
        try:
            if server is not None:
                await stack.enter_async_context(server)
        except SpecError as error:  # as by another agent of this host
            log.warning("%s", SpecError(HEALTH_VARIABLE, error.value, error.problem))
        return await work


async def _wait(agent: Agent) -> LaunchResult:
    async with agent:
        return await agent.wait()


def _status_server() -> StatusServer | None:
    """Return the server that TORCHELASTIC_HEALTH_CHECK_PORT asks for."""
    try:
        address = health_address_from(os.environ)
        return None if address is None else StatusServer(address)
    except UsageError as error:  # as in torch, the job goes on
        log.warning("%s", error)
    except SpecError as error:
        log.warning("%s", SpecError(HEALTH_VARIABLE, error.value, error.problem))
    return None


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(agent: Agent, server: StatusServer | None) -> LaunchResult:
    """Run a job while the event loop of this thread is blocked, as in a notebook.

    KeyboardInterrupt stops the job first.
    """

    async def stop() -> None:
        await agent.stop(signal=signal.SIGINT, reason="SIGINT was received")

    loop = LoopThread()
    try:
        return loop.call(_served(server, _wait(agent)))
    except KeyboardInterrupt:
        loop.call(stop())
        raise
    finally:
        loop.close()


def _log_event(event: Event) -> None:
    if not log.hasHandlers():  # else the agent logs it
        log.log(event.level, "%s", event.sentence)


def _event_handlers(name: str) -> list[EventListener]:
    """Return the writers of torch's events and metrics, to a registered handler or a plug-in."""
    if name == "null":
        return [metric_listener()]
    try:
        return [metric_listener(), event_listener(name)]
    except KeyError:
        pass  # a plug-in, or a mistake
    try:
        return [metric_listener(), load_event_handler(name)(log.info)]
    except UsageError as error:
        raise ValueError(str(error)) from None


def _signal_spec(names: str | None) -> SignalSpec:
    if names is None:
        return SignalSpec()
    numbers = set()
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            numbers.add(signal_number("signals_to_handle", name))
        except SpecError as error:
            log.warning("%s", error)
    return SignalSpec(stop=frozenset(numbers) - SignalSpec().forward)


# --------------------------------------------- the console of notebooks and tests


@contextmanager
def console_descriptors() -> Iterator[tuple[int, int]]:
    """Return descriptors for shown stdout and stderr; leaving waits for what was written.

    A notebook, a test and `contextlib.redirect_stdout` put another object in the place of
    `sys.stdout`, and torch's agent writes to it.  Ours writes to descriptors, so a thread copies
    from a pipe.
    """
    with ExitStack() as stack:
        streams = ((sys.stdout, 1), (sys.stderr, 2))
        first, second = (stack.enter_context(_descriptor(*stream)) for stream in streams)
        yield first, second


@contextmanager
def _descriptor(stream: TextIO | None, number: int) -> Iterator[int]:
    if stream is None or _is_descriptor(stream, number):
        yield number
        return
    reader, writer = os.pipe()
    copier = threading.Thread(target=_copy, args=(reader, stream), daemon=True)
    try:
        copier.start()
        yield writer
    finally:
        os.close(writer)
        if copier.ident is not None:
            copier.join()
        os.close(reader)


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError, AttributeError):
        return False  # `io.UnsupportedOperation` is both; a notebook's has another or none


def _copy(reader: int, stream: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_writable = True
    while data := os.read(reader, 1 << 16):
        if not is_writable:
            continue  # the writer must not block
        try:
            stream.write(decoder.decode(data))
            stream.flush()
        except (OSError, ValueError):
            is_writable = False
