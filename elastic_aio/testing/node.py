"""A simulated node: the shipped agent, rendezvous and store in one simulated process.

Only the workers are simulated: `SimRuntime` and `SimGroup` take the places of the
directory, the processes and the logs of a job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from elastic_aio.agent.event_log import EventLog
from elastic_aio.agent.messages import Effect, SendReport, StartGroup, WorkerEnded
from elastic_aio.agent.multi_node_driver import MultiNodeDriver
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.agent.worker_store import MasterPorts, ReservedPort
from elastic_aio.aio import create_task
from elastic_aio.events import Event
from elastic_aio.node_events import NodeStandby, RoundFormed
from elastic_aio.outcome import AttemptResult, ExitStatus, Failure, JobOutcome
from elastic_aio.process.base import Child, ChildSpec
from elastic_aio.process.tree import Survivor
from elastic_aio.rendezvous.base import (
    AgentPort,
    EndJob,
    Instruction,
    NodeInfo,
    Placement,
    Rendezvous,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.dynamic import DynamicRendezvous
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.testing.process import ProcessNetwork, SimProcess
from elastic_aio.testing.settings import WorkerBehavior

RUN_ID = "simulated"

_SPAWN_S = 5.0
"""Seconds for which a stop waits for workers that are being spawned."""


class Observer(Protocol):
    """What is informed of everything that a node does."""

    def note(self, name: str, text: str) -> None:
        """Add a line to the trace."""

    def on_fault(self, name: str, text: str) -> None:
        """Add a line to the trace, about something that may change the round."""

    def on_round_ordered(self, node: SimNode, order: StartRound) -> None:
        """Take that a node's rendezvous has ordered a round."""

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Take that a node's rendezvous has ordered the end of the job."""

    def on_workers_started(self, node: SimNode, placement: Placement) -> None:
        """Take that the workers of a round start."""

    def on_succeeded(self, node: SimNode) -> None:
        """Take that all workers of a node have succeeded."""

    def on_event(self, node: SimNode, event: Event) -> None:
        """Take an event of a node."""

    def on_finished(self, node: SimNode, outcome: JobOutcome | None) -> None:
        """Take the end of the job on a node; None after a defect."""


class SimNode:
    """One node of the job: one process of an agent."""

    def __init__(
        self,
        process: SimProcess,
        observer: Observer,
        spec: LaunchSpec,
        number: int,
        behavior: Callable[[SimNode, Placement], WorkerBehavior],
    ) -> None:
        """Start the agent; `number` is that of the process."""
        self.name = f"{process.host.name}.{number}"
        self.host = process.host
        self.process = process
        self.number = number
        self.observer = observer
        self.outcome: JobOutcome | None = None
        """How the job has ended here."""
        self.placement: Placement | None = None
        """That of the newest round that the rendezvous has ordered."""
        self.running: Placement | None = None
        """The placement whose workers run here."""
        self.has_succeeded = False
        """Whether all workers of the newest round have succeeded here."""
        self.is_standing_by = False
        self.is_ending = False
        """Whether the rendezvous has ordered the end of the job."""
        self.is_over = False
        """Whether the process has ended, or was killed."""
        self._behavior = behavior
        self._group: SimGroup | None = None
        self._driver: SimDriver | None = None
        self._main: asyncio.Task[None] | None = None
        self.observer.on_fault(self.name, "is started")
        process.run(self._begin, spec)

    def __repr__(self) -> str:
        runs = "nothing" if self.running is None else f"round {self.running.round}"
        return f"<SimNode {self.name}: runs {runs}, {self._driver}>"

    @property
    def coordinator(self) -> Any:
        """What coordinates the job here, if this node is the coordinator."""
        rendezvous: Any = None if self._driver is None else self._driver._rendezvous
        session = None if rendezvous is None else rendezvous._session
        return None if session is None else session._runner

    @property
    def is_live(self) -> bool:
        """Whether the job has not ended here."""
        return not self.is_over

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.observer.note(self.name, text)

    def _begin(self, spec: LaunchSpec) -> None:
        event_log = EventLog(
            RUN_ID, self.host.name, keep=spec.event_history, listeners=[self._on_event]
        )
        runtime = SimRuntime(self, spec, event_log.append)
        self._driver = SimDriver(self, runtime, event_log)
        self._main = create_task(self._run(self._driver))

    async def _run(self, driver: SimDriver) -> None:
        await driver.open()
        await driver.done
        if not self.is_over:
            self.outcome = driver.outcome
            self.is_over = True
            self.observer.on_finished(self, self.outcome)
            self.process.kill()

    # ------------------------------------------------------------------- steps

    def kill(self) -> None:
        """End the process and the workers without notice."""
        self.is_over = True
        self.running = None
        self.process.kill()

    def leave(self) -> None:
        """Stop the job on this node, as a user does."""
        assert self._driver is not None
        self.observer.on_fault(self.name, "is stopped")
        self.process.receive(self._driver.request_stop, "it was stopped")

    def end_workers(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        if self._group is not None:
            self.process.receive(self._group.end, exit_code)

    # -------------------------------------------------------------- its driver

    def behavior(self, placement: Placement) -> WorkerBehavior:
        """Return what the workers of a round do here."""
        return self._behavior(self, placement)

    def _make_workers(self, runtime: SimRuntime, effect: StartGroup, driver: SimDriver) -> SimGroup:
        """Return the workers of a round."""
        self._group = SimGroup(self, runtime, effect, driver.on_worker_ended)
        return self._group

    def _on_instruction(self, instruction: Instruction) -> None:
        """Take an instruction of the rendezvous."""
        if self.is_over:
            return
        match instruction:
            case StartRound(placement):
                self.is_standing_by = self.has_succeeded = False
                self.placement = placement
                self.observer.on_round_ordered(self, instruction)
            case StopRound(round) if self.placement is None or round >= self.placement.round:
                self.has_succeeded = False
            case EndJob(outcome):
                self.is_ending = True
                self.observer.on_end_ordered(self, outcome)

    def _on_effect(self, effect: Effect) -> None:
        """Take an effect of the agent's state machine."""
        match effect:
            case SendReport(report=RoundSucceeded()) if not self.is_over:
                self.has_succeeded = True
                self.observer.on_succeeded(self)

    def _on_event(self, event: Event) -> None:
        if not self.is_over:
            match event:
                case NodeStandby():
                    self.is_standing_by = True
                case RoundFormed():
                    self.is_standing_by = False
            self.observer.on_event(self, event)


class SimDriver(MultiNodeDriver):
    """The shipped driver, with simulated workers."""

    def __init__(self, node: SimNode, runtime: SimRuntime, event_log: EventLog) -> None:
        """Prepare; nothing is started before `open`."""
        self._sim_node = node
        self._sim_runtime = runtime
        super().__init__(runtime, event_log, make_rendezvous=self._make_rendezvous)

    def _make_rendezvous(
        self, spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort
    ) -> Rendezvous:
        network = ProcessNetwork(self._sim_node.process)
        node = replace(node, pid=self._sim_node.number)
        return DynamicRendezvous(spec, node, run_id, agent, network)

    def on_instruction(self, instruction: Instruction) -> None:
        self._sim_node._on_instruction(instruction)
        super().on_instruction(instruction)

    def on_worker_ended(self, ended: WorkerEnded) -> None:
        """Take the exit of a worker."""
        self._on_input(ended)

    def _perform(self, effect: Effect) -> None:
        self._sim_node._on_effect(effect)
        super()._perform(effect)

    def _make_group(self, effect: StartGroup) -> WorkerGroup:
        return self._sim_node._make_workers(self._sim_runtime, effect, self)


class SimRuntime(LocalRuntime):
    """What a job has on a simulated host: no directory, no processes, no logs."""

    def __init__(self, node: SimNode, spec: LaunchSpec, publish: Callable[[Event], None]) -> None:
        """Prepare."""
        nproc = spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else 1
        super().__init__(
            spec,
            run_id=RUN_ID,
            host=node.host.name,
            nproc=nproc,
            spawner=_spawn_nothing,
            publish=publish,
        )
        self.master_ports = SimMasterPorts(spec, node.process)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> bool:
        """Release the ports; there are no logs."""
        await self.master_ports.aclose()
        return False


async def _spawn_nothing(spec: ChildSpec) -> Child:
    raise AssertionError("a simulated node has no processes")


class SimMasterPorts(MasterPorts):
    """The ports of the rounds' stores, on the simulated network."""

    def __init__(self, spec: LaunchSpec, process: SimProcess) -> None:
        """Begin without any port."""
        super().__init__(spec)
        self._process = process

    def _reserve_new(self, address: str) -> ReservedPort:
        store: Any = self._process.network.listen(self._process, 0)
        return ReservedPort(address, store.port, store)


class SimGroup(WorkerGroup):
    """The workers of one attempt, which behave as the simulation says."""

    def __init__(
        self,
        node: SimNode,
        runtime: SimRuntime,
        effect: StartGroup,
        on_ended: Callable[[WorkerEnded], None],
    ) -> None:
        """Begin an attempt; nothing runs yet."""
        assert effect.placement is not None
        self.attempt = effect.attempt
        self.placement = effect.placement
        self.records = {}
        self._node = node
        self._runtime = runtime
        self._on_ended = on_ended
        self._behavior = WorkerBehavior()
        self._starting: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._began_at = node.host.wall_clock
        self._failures: tuple[Failure, ...] = ()

    async def start(self) -> None:
        if self._is_stopping:
            return
        node, placement = self._node, self.placement
        node.running = placement
        node.observer.on_workers_started(node, placement)
        self._behavior = behavior = node.behavior(placement)
        if not placement.span.group_rank:
            master = placement.master_addr, placement.master_port
            await self._runtime.master_ports.serve(*master)
        # In a task of its own, as processes that are being spawned.
        self._starting = create_task(asyncio.sleep(behavior.start_duration))
        await asyncio.shield(self._starting)
        if behavior.seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(behavior.seconds, self.end, behavior.exit_code)

    def end(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        node, placement = self._node, self.placement
        if node.running is not placement or self._is_stopping:
            return
        status = ExitStatus(code=exit_code)
        if exit_code:
            node.observer.on_fault(node.name, f"a worker fails with exit code {exit_code}")
            failure = Failure(
                rank=placement.span.first_rank,
                local_rank=0,
                pid=node.number,
                host=node.host.name,
                status=status,
                time=node.host.wall_clock,
                order=0,
            )
            self._failures = (failure,)
        else:
            node.note(f"the workers of round {placement.round} have succeeded")
        for local_rank in range(1 if exit_code else self._runtime.nproc):
            self._on_ended(WorkerEnded(self.attempt, local_rank, status, is_victim=False))

    def announce_stop(self, plan: StopPlan, reason: str, signal: int | None = None) -> None:
        self._is_stopping = True

    async def stop(self, plan: StopPlan, *, leftovers_only: bool = False) -> list[Survivor]:
        self._is_stopping = True
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=_SPAWN_S)
        duration = 0.0 if leftovers_only else self._behavior.stop_duration
        await asyncio.sleep(min(duration, plan.grace))
        if not self._node.is_over:
            self._node.running = None
        await self.close()
        return []

    async def close(self) -> None:
        await self._runtime.master_ports.end_attempt()

    async def result(self) -> AttemptResult:
        return AttemptResult(self.attempt, self._began_at, 0.0, failures=self._failures)
