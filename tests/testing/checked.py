"""A simulation of which each step is checked against the invariants of a job."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_aio.agent import machine
from elastic_aio.events import Event
from elastic_aio.node_events import NodeExcluded
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous import base
from elastic_aio.rendezvous.dynamic import SILENT
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.simulation import Behavior, SimDriver, Simulation
from tests.testing.invariants import InvariantChecker


class CheckedSimulation(Simulation):
    """A simulation that raises `InvariantViolated` at the first violation.

    Attributes:
        checker: has the stores, the rounds and the ends so far.
    """

    def __init__(self, spec: LaunchSpec, **options: Any) -> None:
        """Begin at 0 seconds, without nodes; `options` are those of a `Simulation`."""
        super().__init__(spec, **options)
        self.checker = InvariantChecker(self.network, spec, self._trace, self.nodes)

    @property
    def coordinators(self) -> list[SimNode]:
        """The nodes that are coordinators now; several in a partition."""
        leaders = {store.leader_number for store in self.checker.open_stores}
        return [node for node in self.live_nodes if node.number in leaders]

    def _start_agent(self, node: SimNode, spec: LaunchSpec, behavior: Behavior) -> None:
        node.process.inject(CheckedDriver, node, spec, behavior, self.checker)

    def step_clock(self, node: SimNode, seconds: float) -> None:
        super().step_clock(node, seconds)
        self.checker.was_clock_set = True

    def partition(
        self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False
    ) -> None:
        super().partition(some, others, one_way=one_way)
        self.checker.rounds.was_partitioned = True


class CheckedDriver(SimDriver):
    """A driver that shows all that it does to the checker."""

    def __init__(
        self, node: SimNode, spec: LaunchSpec, behavior: Behavior, checker: InvariantChecker
    ) -> None:
        """Start the agent; called in the node's process."""
        self._checker = checker
        super().__init__(node, spec, behavior)

    def finish(self, outcome: JobOutcome) -> None:
        self._checker.on_finished(self.node, outcome)
        super().finish(outcome)

    def begin_round(self, placement: base.Placement) -> None:
        super().begin_round(placement)
        self._checker.rounds.on_started(self.node, placement)

    def on_instruction(self, instruction: base.Instruction) -> None:
        node = self.node
        if not node.is_over:
            match instruction:
                case base.StartRound():
                    self._checker.on_ordered(node, instruction)
                case base.StopRound(round, why) if why.startswith(SILENT) and (
                    node.placement is None or round >= node.placement.round
                ):
                    self._checker.on_isolated(node, why)
                case base.EndJob(outcome):
                    self._checker.on_end_ordered(node, outcome)
        super().on_instruction(instruction)

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.SendReport(report=base.RoundSucceeded()) if not self.node.is_over:
                self._checker.rounds.on_succeeded(self.node)
        super()._perform(effect)

    def _show_change(self, change: machine.ShowChange) -> None:
        super()._show_change(change)
        if (notice := self._machine.notice) is not None and change.until:
            self._checker.on_notice(self.node, notice.deadline - self._runtime.clock.now())

    def _on_published(self, event: Event) -> None:
        super()._on_published(event)
        if not self.node.is_over:
            match event:
                case NodeExcluded(is_own=True, seconds=seconds):
                    self._checker.on_excluded(self.node, seconds)
            self._checker.on_event(self.node, event)
