"""The simulated agent of a node: the shipped `MultiNodeMachine` with simulated workers."""

from __future__ import annotations

from elastic_aio.agent.messages import (
    BarrierTimedOut,
    Finish,
    GroupStarted,
    GroupStopped,
    Input,
    Join,
    Leave,
    SendReport,
    StartBarrier,
    StartGroup,
    StopGroup,
    WorkerEnded,
)
from elastic_aio.agent.multi_node import MultiNodeMachine
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.rendezvous.base import Placement
from elastic_aio.testing.invariants import NodePort
from elastic_aio.testing.settings import WorkerBehavior


class SimAgent:
    """Performs the machine's effects; its group of workers is a `WorkerBehavior`."""

    def __init__(self, node: NodePort, nproc: int) -> None:
        """Begin without workers."""
        self.running: Placement | None = None
        """The placement whose workers run here."""
        self._node = node
        self._nproc = nproc
        self._machine = MultiNodeMachine(node.settings.spec, nproc)
        self._behavior = WorkerBehavior()
        self._is_stopping = False
        self._failures: tuple[Failure, ...] = ()

    def handle(self, received: Input) -> None:
        """Hand an input to the machine, and perform its effects.

        The coordinator's events are recorded, so `Publish` is dropped.  A barrier that is
        cancelled still ends: the machine drops the result.
        """
        node = self._node
        for effect in self._machine.handle(received):
            match effect:
                case Join():
                    node.start_search()
                case StartGroup(placement=Placement() as placement):
                    self._start(placement)
                case StopGroup(leftovers_only=leftovers_only):
                    self._is_stopping = True
                    seconds = 0.0 if leftovers_only else self._behavior.stop_duration
                    node.host.after(seconds, self._on_stopped)
                case SendReport(report):
                    node.report(report)
                case StartBarrier(attempt, timeout):
                    node.host.after(timeout, self.handle, BarrierTimedOut(attempt))
                case Leave(why):
                    node.leave(why)
                case Finish(outcome):
                    node.on_finished(outcome)

    def end_workers(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        running, node = self.running, self._node
        if running is None or self._is_stopping:
            return
        status = ExitStatus(code=exit_code)
        if exit_code:
            node.note(f"a worker fails with exit code {exit_code}")
            failure = Failure(
                rank=running.span.first_rank,
                local_rank=0,
                pid=1,
                host=node.name,
                status=status,
                time=node.host.wall_clock,
                order=0,
            )
            self._failures = (failure,)
        else:
            node.note(f"the workers of round {running.round} have succeeded")
        for local_rank in range(1 if exit_code else self._nproc):
            self.handle(WorkerEnded(running.attempt, local_rank, status, is_victim=False))

    def _start(self, placement: Placement) -> None:
        node, host = self._node, self._node.host
        self.running, self._is_stopping, self._failures = placement, False, ()
        self._behavior = behavior = node.behavior(placement)
        node.observer.on_workers_started(node, placement)
        host.after(behavior.start_duration, self._on_started, placement)
        if behavior.seconds is not None:
            seconds = behavior.start_duration + behavior.seconds
            host.after(seconds, self._on_time_up, placement, behavior.exit_code)

    def _on_started(self, placement: Placement) -> None:
        if placement is self.running and not self._is_stopping:
            self.handle(GroupStarted(placement.attempt, self._node.host.now))

    def _on_time_up(self, placement: Placement, exit_code: int) -> None:
        if placement is self.running:
            self.end_workers(exit_code)

    def _on_stopped(self) -> None:
        stopped, self.running = self.running, None
        assert stopped is not None
        self.handle(GroupStopped(stopped.attempt, self._node.host.now, self._failures))
