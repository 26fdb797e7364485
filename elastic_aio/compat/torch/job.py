"""A `WorkerSpec` of torch as a job of elastic_aio, run to its end in a blocking call."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from elastic_aio.agent.agent import Agent
from elastic_aio.agent.event_log import EventListener
from elastic_aio.cli.event_handlers import load_event_handler
from elastic_aio.cli.options import UsageError
from elastic_aio.cli.torch_logs import TorchLogLayout
from elastic_aio.cli.torchrun import (
    HEALTH_VARIABLE,
    as_option_error,
    health_address_from,
    timers_from,
)
from elastic_aio.compat.torch.console import console_descriptors
from elastic_aio.compat.torch.events import event_listener
from elastic_aio.compat.torch.metrics import metric_listener
from elastic_aio.compat.torch.multiprocessing import SignalException, numa_mode, start_method_of
from elastic_aio.compat.torch.multiprocessing.logs import DefaultLogsSpecs, LogsSpecs
from elastic_aio.compat.torch.rendezvous.api import RendezvousClosedError
from elastic_aio.compat.torch.rendezvous.bridge import HandlerRendezvous
from elastic_aio.compat.torch.rendezvous.handlers import DynamicRendezvousHandler
from elastic_aio.compat.torch.rendezvous.outcomes import error_of_cause
from elastic_aio.compat.torch.worker_group import WorkerSpec
from elastic_aio.errors import JobFailed, JobStopped, RendezvousFailed, SpecError
from elastic_aio.events import Event
from elastic_aio.http.server import StatusServer
from elastic_aio.launcher import receive_signals, run_coroutine, supervise_agent
from elastic_aio.outcome import EndCause, LaunchResult, signal_name
from elastic_aio.rendezvous.base import AgentPort, NodeInfo, Rendezvous
from elastic_aio.spec.checks import signal_number
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartPolicy
from elastic_aio.spec.stop import SignalSpec, StopPlan
from elastic_aio.spec.torchrun import TORCHRUN_DEFAULTS
from elastic_aio.sync import LoopThread

log = logging.getLogger(__name__)

_NODES_MAX = 65_536
"""For a handler that does not say how many nodes it may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobSettings:
    """The settings of an agent that are not in its `WorkerSpec` (see `LocalElasticAgent`)."""

    logs_specs: LogsSpecs
    start_method: str | None
    exit_barrier_timeout: float
    prefix: str | None
    shutdown_timeout: float
    signals: str | None
    uninterruptible_timeout: float | None


class AgentJob:
    """One run of the workers of a `WorkerSpec`."""

    def __init__(self, worker_spec: WorkerSpec, settings: JobSettings) -> None:
        """Translate the settings; nothing is started before `run`.

        Raises:
            ValueError: a setting cannot be accepted.
        """
        self._worker_spec = worker_spec
        self._settings = settings
        self._handler = worker_spec.rdzv_handler
        self._bridge: HandlerRendezvous | None = None
        self.spec = self._launch_spec()
        self._signals = _signal_spec(settings.signals)
        self._event_handlers = _event_handlers(worker_spec.event_log_handler)
        self._server = _status_server()

    # ------------------------------------------------------------------ the spec

    def _launch_spec(self) -> LaunchSpec:
        spec, settings = self._worker_spec, self._settings
        handler = self._handler
        entrypoint: Any = spec.entrypoint
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
            logs=self._log_spec(),
            stop=StopPlan.within(settings.shutdown_timeout),
            rendezvous=dataclasses.replace(
                rendezvous, exit_barrier_timeout=settings.exit_barrier_timeout
            ),
            numa_binding=numa_mode(spec.numa_options),
            virtual_local_rank=spec.virtual_local_rank,
            timers=timers_from(os.environ),
            uninterruptible_timeout=settings.uninterruptible_timeout or None,
            start_method=start_method_of(settings.start_method),
        )

    def _log_spec(self) -> LogSpec:
        specs = self._settings.logs_specs
        others: dict[str, Any] = {
            "prefix": self._settings.prefix or None,
            "duplicate_stdout_filters": self._worker_spec.duplicate_stdout_filters or (),
            "duplicate_stderr_filters": self._worker_spec.duplicate_stderr_filters or (),
        }
        if type(specs) is not DefaultLogsSpecs:
            return TorchLogLayout(specs, self._log_variables(), **others)
        return LogSpec(
            log_dir=specs._root_log_dir,
            redirects=_streams(specs._redirects),
            tee=_streams(specs._tee),
            local_ranks_filter=specs._local_ranks_filter or (),
            **others,
        )

    def _log_variables(self) -> dict[str, str]:
        """Return what a plug-in for logs learns of all workers."""
        return {
            "ROLE_NAME": self._worker_spec.role,
            "TORCHELASTIC_RUN_ID": self._handler.get_run_id(),
            "TORCHELASTIC_MAX_RESTARTS": str(self._worker_spec.max_restarts),
        }

    # ------------------------------------------------------------------- the run

    def run(self, listeners: Sequence[EventListener]) -> LaunchResult:
        """Run the job to its end; return the result also of workers that failed.

        On the main thread the signals of the settings stop the job.

        Args:
            listeners: called with every event.

        Raises:
            RendezvousError: the nodes did not come together, or the job has ended before.
            SignalException: a signal ended the job; no process of it is left.
            Exception: what the rendezvous handler raised.
        """
        try:
            result = self._run([_log_event, *self._event_handlers, *listeners])
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
        worker_spec = self._worker_spec
        self._bridge = HandlerRendezvous(
            self._handler,
            spec,
            node,
            agent,
            master=(worker_spec.master_addr, worker_spec.master_port),
            interval=worker_spec.monitor_interval,
        )
        return self._bridge

    def _run(self, listeners: Sequence[EventListener]) -> LaunchResult:
        with console_descriptors() as console:
            return self._run_agent(listeners, console)

    def _run_agent(
        self, listeners: Sequence[EventListener], console: tuple[int, int]
    ) -> LaunchResult:
        is_ours = isinstance(self._handler, DynamicRendezvousHandler)
        factory = None if is_ours else self._make_bridge
        server = self._server
        if server is not None:
            listeners = [*listeners, server]
        agent = Agent(self.spec, console=console, listeners=listeners, _rendezvous=factory)
        if _is_loop_running():
            return _run_in_thread(agent, server)
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals are handled on the main thread only")
            return run_coroutine(lambda: _served(server, _wait(agent)))
        with receive_signals(self._signals) as received:
            return run_coroutine(
                lambda: _served(server, supervise_agent(agent, self._signals, received))
            )


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
            log.warning("%s", as_option_error(error, {"--http": HEALTH_VARIABLE}))
        return await work


async def _wait(agent: Agent) -> LaunchResult:
    async with agent:
        return await agent.wait()


def _status_server() -> StatusServer | None:
    """Return the server that TORCHELASTIC_HEALTH_CHECK_PORT asks for."""
    try:
        address = health_address_from(os.environ)
    except UsageError as error:
        log.warning("%s", error)  # as in torch, the job goes on
        return None
    return None if address is None else StatusServer(address)


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
    loop = LoopThread()
    try:
        return loop.call(_served(server, _wait(agent)))
    except KeyboardInterrupt:
        loop.call(_stop(agent))
        raise
    finally:
        loop.close()


async def _stop(agent: Agent) -> None:
    await agent.stop(signal=signal.SIGINT, reason="SIGINT was received")


def _log_event(event: Event) -> None:
    log.log(event.level, "%s", event.sentence)


def _event_handlers(name: str) -> list[EventListener]:
    """Return what writes torch's events and metrics: to a registered handler, or a plug-in."""
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


def _streams(value: Any) -> dict[int, int] | int:
    return {rank: int(mask) for rank, mask in value.items()} if isinstance(value, dict) else value
