"""A simulated node and its workers, as the invariants and the scenarios see it."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from elastic_aio.agent.machine import ExclusionReceived, Input, ProgressMade, WorkersAgreed
from elastic_aio.agent.multi_node_driver import MultiNodeDriver
from elastic_aio.errors import SpecError
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import Placement
from elastic_aio.spec.checks import check_number, is_integer
from elastic_aio.testing.network import SimProcess
from elastic_aio.testing.virtual_time import Trace


class WorkerBehavior(Struct, frozen=True):
    """What the workers of one node do in one round.

    Attributes:
        seconds: for how long they run; None (the default): until they are stopped.
        exit_code: with which one of them exits then; 0: all succeed.
        start_duration: seconds until they run.
        stop_duration: seconds that they need to stop.

    Raises:
        SpecError: a duration is negative, or the exit code is not one from 0 to 255.
    """

    seconds: float | None = None
    exit_code: int = 0
    start_duration: float = 0.05
    stop_duration: float = 0.05

    def __post_init__(self) -> None:
        if self.seconds is not None:
            check_number("seconds", self.seconds, at_least=0)
        checked_exit_code("exit_code", self.exit_code)
        check_number("start_duration", self.start_duration, at_least=0)
        check_number("stop_duration", self.stop_duration, at_least=0)


def checked_exit_code(name: str, value: object, *, at_least: int = 0) -> int:
    if not is_integer(value) or not at_least <= value <= 255:
        raise SpecError(name, value, f"must be an exit code from {at_least} to 255")
    return value


class SimNode:
    """One node of the job: one process of an agent."""

    def __init__(self, process: SimProcess, number: int, trace: Trace) -> None:
        """Begin; `number` is the pid of the process, and no other has it."""
        self.name = f"{process.host.name}.{number}"
        self.host = process.host
        self.process = process
        self.number = number
        self.outcome: JobOutcome | None = None
        """How the job has ended here."""
        self.placement: Placement | None = None
        """Its ranks in the newest round that the rendezvous has ordered."""
        self.running: Placement | None = None
        """The placement whose workers run here."""
        self.behavior = WorkerBehavior()
        """Of its workers in the newest round."""
        self.is_stopping = False
        """Whether the workers of the newest round are being stopped, or have been."""
        self.change = -1
        """Number of the change of its membership that was announced; -1 for none."""
        self.notice: float | None = None
        """Until when its workers have notice of a preemption, in virtual seconds."""
        self.was_stopped = False
        """Whether a user has stopped it."""
        self.has_own_notice = False
        """Whether it was given notice of a preemption itself, while it ran workers or not."""
        self.is_healthy = True
        """Whether its health checks succeed."""
        self.is_checked = False
        """Whether its last health check has succeeded."""
        self.may_be_excluded = False
        """Whether a worker has excluded it since its last exclusion began."""
        self.excluded_until = -math.inf
        """Until when, in virtual seconds, it may be in no round."""
        self.has_succeeded = False
        """Whether all workers of the newest round have succeeded here."""
        self.is_standing_by = False
        self.is_ending = False
        """Whether the rendezvous has ordered the end of the job."""
        self.is_over = False
        """Whether the process has ended, or was killed."""
        self.driver: MultiNodeDriver | None = None
        self.end: Callable[[int], None] = lambda exit_code: None
        """Lets one worker of the newest group fail with an exit code, or all succeed with 0."""
        self._trace = trace

    def __repr__(self) -> str:
        runs = "nothing" if self.running is None else f"round {self.running.round}"
        return f"<SimNode {self.name}: runs {runs}, {self.driver}>"

    @property
    def is_live(self) -> bool:
        """Whether the job has not ended here."""
        return not self.is_over

    @property
    def has_place(self) -> bool:
        """Whether its workers run, or have succeeded in the newest round."""
        return self.running is not None or self.has_succeeded

    def note(self, text: str) -> None:
        self._trace.note(self.name, text)

    def add_fault(self, text: str) -> None:
        """Add a line to the trace, about something that may change the round."""
        self._trace.add_fault(self.name, text)

    def kill(self) -> None:
        """End the process and the workers without notice."""
        self.is_over = True
        self.running = None
        self.process.kill()

    def request_stop(self) -> None:
        """Stop the job on this node, as a user does; called in the process."""
        assert self.driver is not None, "it was started before"
        self.was_stopped = True
        self.driver.request_stop("it was stopped")

    def request_preemption(self, seconds: float) -> None:
        """Give notice of a preemption to this node, as a signal does; called in the process."""
        assert self.driver is not None, "it was started before"
        self.has_own_notice = True
        self.driver.request_preemption("a signal was received", seconds)

    def exclude(self) -> None:
        """Let a worker exclude this node."""
        if self.running is not None:
            self.add_fault("is excluded by a worker")
            self.may_be_excluded = True
            self._receive(ExclusionReceived(self.running.attempt, "a worker has excluded it"))

    def report_progress(self) -> None:
        """Let a worker report a step."""
        if self.running is not None:
            self._receive(ProgressMade(self.running.attempt))

    def agree_to_change(self) -> None:
        """Let all workers agree to the change that is announced to them, if there is a change."""
        if self.change >= 0 and self.running is not None:
            self._receive(WorkersAgreed(self.running.attempt, self.change))

    def _receive(self, received: Input) -> None:
        assert self.driver is not None, "its workers run"
        self.process.inject(self.driver.receive, received)

    def end_workers(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        self.process.inject(self.end, exit_code)
