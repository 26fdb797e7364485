"""The simulated agent of a node: it obeys the rendezvous and reports what its workers do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.rendezvous.base import (
    Begin,
    Conclude,
    Ended,
    Failing,
    Halt,
    Instruction,
    Pause,
    Placement,
    Running,
    Succeeded,
)

if TYPE_CHECKING:
    from elastic_aio.testing.nodes import Node

__all__ = ["Crew", "Work"]


class Work(Struct, frozen=True):
    """What the workers of one node do in one round.

    Attributes:
        seconds: for how long they run by themselves; None is until they are stopped.
        exit_code: with which one of them ends then; 0 is the success of all.
        starting: seconds until they run.
        stopping: seconds that they need to stop.
    """

    seconds: float | None = None
    exit_code: int = 0
    starting: float = 0.05
    stopping: float = 0.05


class Crew:
    """Begins, halts and reports as an agent does; its workers are a `Work` each."""

    def __init__(self, node: Node) -> None:
        """Begin with nothing to run."""
        self.node = node
        self.running: Placement | None = None
        """The round whose workers are alive here."""
        self.port = 1
        self.newest = -1
        """Number of the last round that was begun or halted."""
        self.is_done = False
        """Whether the workers of the last round have all succeeded."""
        self._work = Work()
        self._halted = self._ended = -1
        self._next: Begin | None = None
        self._is_stopping = False
        self._failures: tuple[Failure, ...] = ()
        self._begun_at = 0.0
        self._runs = 0

    def instructed(self, instruction: Instruction) -> None:
        """Take an instruction."""
        match instruction:
            case Begin(placement):
                self._on_begin(instruction, placement)
            case Halt():
                self._on_halt(instruction)
            case Conclude(ending):
                self._next = None
                self._stop()
                self.node.concluded(ending)
            case Pause():
                pass

    def fail(self, exit_code: int) -> None:
        """Let one worker fail."""
        if self.running is None or self._is_stopping:
            return
        node = self.node
        self._failures = (
            Failure(
                rank=self.running.span.first_rank,
                local_rank=0,
                pid=1,
                host=node.name,
                status=ExitStatus(code=exit_code),
                time=node.machine.calendar,
                order=0,
            ),
        )
        node.story(f"a worker fails with exit code {exit_code}")
        node.report(Failing(self.running.round, f"exit code {exit_code}"))
        self._stop()

    def succeed(self) -> None:
        """Let all workers succeed."""
        running = self.running
        if running is None or self._is_stopping:
            return
        self.running = None
        self._runs += 1
        self.is_done = True
        self.node.story(f"the workers of round {running.round} have succeeded")
        self.node.report(Succeeded(running.round))
        barrier = self.node.settings.exit_barrier_timeout
        self.node.machine.after(barrier, self._barrier_elapsed, self._runs)

    def dismiss(self) -> None:
        """Stop what runs; the node leaves."""
        self._next = None
        self._stop()

    # ------------------------------------------------------------ instructions

    def _on_begin(self, begin: Begin, placement: Placement) -> None:
        if placement.round <= self.newest:
            return
        self.newest = placement.round
        self._next = begin
        self.node.witness.begun(self.node, begin)
        if not placement.span.group_rank:
            self.port += 1
        self._make_way()

    def _on_halt(self, halt: Halt) -> None:
        if halt.round < self.newest or halt.round <= max(self._halted, self._ended):
            return
        self.newest = self._halted = halt.round
        self._next = None
        self.node.story(f"halts: {halt.why}")
        self._make_way()

    def _make_way(self) -> None:
        if self.running is None:
            self._go_on()
        else:
            self._stop()

    def _go_on(self) -> None:
        self.is_done = False
        self._runs += 1
        if self._next is not None:
            placement, self._next = self._next.placement, None
            self._start(placement)
        elif self._halted > self._ended:
            self._ended = self._halted
            self.node.report(Ended(self._halted))

    # ----------------------------------------------------------------- workers

    def _start(self, placement: Placement) -> None:
        node = self.node
        self.running = placement
        self._failures = ()
        self._begun_at = node.machine.now
        self._work = work = node.work(placement)
        node.witness.started(node, placement)
        node.machine.after(work.starting, self._started, self._runs)
        if work.seconds is not None:
            node.machine.after(work.starting + work.seconds, self._worked, self._runs)

    def _started(self, run: int) -> None:
        if run == self._runs and self.running is not None and not self._is_stopping:
            self.node.report(Running(self.running.round))

    def _worked(self, run: int) -> None:
        if run != self._runs:
            return
        if self._work.exit_code:
            self.fail(self._work.exit_code)
        else:
            self.succeed()

    def _stop(self) -> None:
        if self.running is None or self._is_stopping:
            return
        self._is_stopping = True
        self.node.machine.after(self._work.stopping, self._stopped)

    def _stopped(self) -> None:
        running = self.running
        assert running is not None
        self.running, self._is_stopping = None, False
        self._runs += 1
        self._ended = max(running.round, self._ended)
        ran = self.node.machine.now - self._begun_at
        self.node.report(Ended(running.round, self._failures, ran=ran))
        self._go_on()

    def _barrier_elapsed(self, run: int) -> None:
        if run == self._runs and self.is_done:
            self.node.leave("the others were not waited for any longer")
