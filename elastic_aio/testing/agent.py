"""The shipped agent in a simulated process; only its workers are simulated.

`SimRuntime` and `SimGroup` take the places of the directory, the processes and the logs of a
job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from elastic_aio.agent.driver import Group
from elastic_aio.agent.event_log import EventLog
from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.machine import Effect, SendReport, StartGroup, StopReceived, WorkerEnded
from elastic_aio.agent.multi_node_driver import MultiNodeDriver
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_store import MasterPorts, ReservedPort
from elastic_aio.aio import create_task
from elastic_aio.events import Event
from elastic_aio.node_events import NodeStandby, RoundFormed
from elastic_aio.outcome import AttemptResult, ExitStatus, Failure
from elastic_aio.process.children import Child, ChildSpec
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
from elastic_aio.rendezvous.dynamic import SILENT, DynamicRendezvous
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.status import JobStatus
from elastic_aio.testing.invariants import InvariantChecker
from elastic_aio.testing.node import SimNode, WorkerBehavior
from elastic_aio.testing.process import SimProcess
from elastic_aio.testing.store import RUN_ID

_SPAWN_S = 5.0
"""Seconds for which a stop waits for workers that are being spawned."""


class SimDriver(MultiNodeDriver):
    """The shipped driver, with simulated workers; all that it does is checked."""

    def __init__(
        self,
        node: SimNode,
        spec: LaunchSpec,
        checker: InvariantChecker,
        behavior: Callable[[SimNode, Placement], WorkerBehavior],
    ) -> None:
        """Start the agent; called in the node's process."""
        self.node = node
        self.checker = checker
        self.behavior = behavior
        event_log = EventLog(
            RUN_ID, node.host.name, keep=spec.event_history, listeners=[self._on_published]
        )
        runtime = SimRuntime(node, spec, event_log.append)
        super().__init__(runtime, event_log, make_rendezvous=self._make_rendezvous)
        node.driver = self
        self._main = create_task(self._live())

    async def _live(self) -> None:
        await self.open()
        await self.done
        if not self.node.is_over:
            self.node.outcome = self.outcome
            self.node.is_over = True
            self.checker.on_finished(self.node)
            self.node.process.kill()

    def _make_rendezvous(
        self, spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort
    ) -> Rendezvous:
        node = replace(node, pid=self.node.number)
        return DynamicRendezvous(spec, node, run_id, agent, self.node.process)

    def on_instruction(self, instruction: Instruction) -> None:
        node = self.node
        if not node.is_over:
            match instruction:
                case StartRound(placement):
                    node.is_standing_by = node.has_succeeded = False
                    self.checker.on_ordered(node, instruction)
                    node.placement = placement
                case StopRound(round, why) if node.placement is None or (
                    round >= node.placement.round
                ):
                    node.has_succeeded = False
                    if why.startswith(SILENT):
                        self.checker.on_isolated(node, why)
                case EndJob(outcome):
                    node.is_ending = True
                    self.checker.on_end_ordered(node, outcome)
        super().on_instruction(instruction)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendReport(report=RoundSucceeded()) if not self.node.is_over:
                self.node.has_succeeded = True
                self.checker.rounds.on_succeeded(self.node)
        super()._perform(effect)

    def _show_change(self, why: str, time_left: float | None, number: int = 0) -> None:
        self.node.change = -1 if time_left is None else number

    def _on_published(self, event: Event) -> None:
        if not self.node.is_over:
            match event:
                case NodeStandby():
                    self.node.is_standing_by = True
                case RoundFormed():
                    self.node.is_standing_by = False
            self.checker.on_event(self.node, event)

    def _make_group(self, effect: StartGroup) -> Group:
        assert effect.placement is not None
        group = SimGroup(self, self._runtime, effect.attempt, effect.placement)
        self.node.end = group.end
        return group


class SimRuntime(LocalRuntime):
    """What a job has on a simulated host: no directory, no processes, no logs."""

    def __init__(self, node: SimNode, spec: LaunchSpec, publish: Callable[[Event], None]) -> None:
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
        super().__init__(spec)
        self._process = process

    def _reserve_new(self, address: str) -> ReservedPort:
        store: Any = self._process.network.listen(self._process, 0)
        return ReservedPort(address, store.port, store)


class SimGroup:
    """The workers of one attempt, which behave as the simulation says (see `Group`)."""

    def __init__(
        self, driver: SimDriver, runtime: LocalRuntime, attempt: int, placement: Placement
    ) -> None:
        self.attempt = attempt
        self.placement = placement
        self.records: dict[int, WorkerRecord] = {}
        self.first_success: tuple[int, float] | None = None
        self._driver = driver
        self._node = driver.node
        self._runtime = runtime
        self._starting: asyncio.Task[None] | None = None
        self._is_stopping = self._node.is_stopping = False
        self._began_at = self._node.host.wall_clock
        self._failures: tuple[Failure, ...] = ()

    async def start(self) -> None:
        if self._is_stopping:
            return
        node, placement = self._node, self.placement
        node.running = placement
        self._driver.checker.rounds.on_started(node, placement)
        node.behavior = behavior = self._driver.behavior(node, placement)
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
            node.add_fault(f"a worker fails with exit code {exit_code}")
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
            ended = WorkerEnded(self.attempt, local_rank, status, is_victim=False)
            self._driver.receive(ended)

    def begin_stop(self, plan: StopPlan) -> None:
        pass  # simulated workers notice a stop at once

    def announce_stop(
        self, plan: StopPlan, reason: str, signal: int | None = None, *, is_ordered: bool = False
    ) -> None:
        self._is_stopping = self._node.is_stopping = True

    async def stop(self, plan: StopPlan, *, leftovers_only: bool = False) -> list[Survivor]:
        self._is_stopping = True
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=_SPAWN_S)
        duration = 0.0 if leftovers_only else self._node.behavior.stop_duration
        await asyncio.sleep(min(duration, plan.grace))
        if not self._node.is_over:
            self._node.running = None
        await self.close()
        return []

    async def stop_processes(self, plan: StopPlan) -> list[Survivor]:
        return await self.stop(plan)

    def with_reports(self, status: JobStatus) -> JobStatus:
        return status  # simulated workers report nothing

    def end_linger(self, stop: StopReceived | None = None) -> None:
        pass  # simulated workers leave nothing behind

    async def close(self) -> None:
        await self._runtime.master_ports.end_attempt()

    async def result(self) -> AttemptResult:
        return AttemptResult(self.attempt, self._began_at, 0.0, failures=self._failures)
