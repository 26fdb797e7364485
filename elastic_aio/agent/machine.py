"""The state machine of one host's group of workers: started, watched, stopped.

`single_node` and `multi_node` decide what follows the end of a group.

Rules
=====

* One group at a time.  The first worker that fails by itself ends it, and so does the
  last one that succeeds.  In both cases the group is stopped, because workers leave
  processes behind; it has ended when no process is left.
* A worker that has failed because it has lost a peer is no cause.  The group is stopped when
  one fails for another reason, when all have ended, or after `CAUSE_S`.  The workers of other
  nodes count as running: their failures stop this group too.
* Results carry their attempt.  A late one is dropped here, and only here.

::

    phase      input                         next       effects
    ---------  ----------------------------  ---------  ---------------------------
    STARTING   GroupStarted                  RUNNING
    STARTING   StartFailed                   STOPPING   StopGroup
    RUNNING    StartFailed, a hanging worker STOPPING   StopGroup
    STARTING   WorkerEnded, a failure        STOPPING   StopGroup
    RUNNING    WorkerEnded, a failure        STOPPING   StopGroup
    STARTING,
    RUNNING    ..., a lost peer, the first   the same   BackOff
    STARTING,
    RUNNING    BackoffElapsed                STOPPING   StopGroup
    STARTING   WorkerHung                    STOPPING   StopGroup
    RUNNING    WorkerHung                    STOPPING   StopGroup
    RUNNING    WorkerEnded, the last success STOPPING   StopGroup (leftovers)
    STOPPING   GroupStopped                  (decided by the subclass)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from elastic_aio.agent.messages import (
    BackOff,
    BackoffElapsed,
    CancelBackOff,
    Effect,
    EffectResult,
    GroupStarted,
    GroupStopped,
    Input,
    Request,
    StartFailed,
    StartGroup,
    StopGroup,
    StopReceived,
    WorkerEnded,
    WorkerHung,
)
from elastic_aio.errors import InternalError
from elastic_aio.outcome import SIGTERM, Failure, signal_name
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import CAUSE_S
from elastic_aio.spec.stop import StopPlan


class AgentPhase(Enum):
    """The phase of a job on this node."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DECIDING = "deciding"
    BACKING_OFF = "backing off"
    IDLE = "idle"
    BARRIER = "barrier"
    LEAVING = "leaving"
    DONE = "done"


LIVE = (AgentPhase.STARTING, AgentPhase.RUNNING)
"""Phases in which workers run."""


class AgentMachine(ABC):
    """Decides what to do next; pure.

    After each `handle`, perform the effects in their order and hand in their results.
    After `Finish` there are no more effects.
    """

    def __init__(self, spec: LaunchSpec, nproc: int) -> None:
        """Begin with `nproc` workers on this host."""
        self.phase = AgentPhase.NEW
        self.attempt = 0
        self._spec = spec
        self._nproc = nproc
        self._started_at: float | None = None
        self._succeeded: set[int] = set()
        self._lost_peers = 0
        self._awaiting = ""  # the cause of this failure
        self._stop: StopReceived | None = None
        self._may_be_leaving = False
        self._start_failure: StartFailed | None = None
        self._failures: tuple[Failure, ...] = ()
        self._stopped_at = 0.0
        self._story: list[tuple[AgentPhase, Input]] = []

    def handle(self, received: Input) -> list[Effect]:
        """Return the effects of an input, to be performed in order.

        Raises:
            InternalError: the input is impossible in the current phase.
        """
        self._story.append((self.phase, received))
        del self._story[:-50]
        if self.phase is AgentPhase.DONE:
            return []
        if not isinstance(received, EffectResult):
            return self._on_request(received)
        return self._on_result(received) if received.attempt == self.attempt else []

    @abstractmethod
    def _on_request(self, request: Request) -> list[Effect]:
        """Handle an input that is not the result of an effect."""

    @abstractmethod
    def _on_group_stopped(self, stopped: GroupStopped) -> list[Effect]:
        """Decide what follows the end of the group; its failures are known."""

    @abstractmethod
    def _on_other_result(self, result: EffectResult) -> list[Effect]:
        """Handle the result of an effect that does not concern the group."""

    def _on_result(self, result: EffectResult) -> list[Effect]:
        match result:
            case WorkerEnded():
                return self._on_worker_ended(result)
            case GroupStarted():
                return self._on_group_started(result)
            case StartFailed():
                return self._on_start_failed(result)
            case WorkerHung():
                why = f"local rank {result.local_rank}: {result.why}"
                return self._on_failing(why) if self.phase in LIVE else []
            case BackoffElapsed() if self._awaiting:
                why, self._awaiting = self._awaiting, ""
                return self._on_failing(why)
            case GroupStopped():
                if self.phase is not AgentPhase.STOPPING:
                    raise self._impossible("the end of a group")
                self._stopped_at = result.at
                self._failures = result.failures
                return self._on_group_stopped(result)
        return self._on_other_result(result)

    def _on_group_started(self, started: GroupStarted) -> list[Effect]:
        self._started_at = started.at
        if self.phase is not AgentPhase.STARTING:
            return []
        self.phase = AgentPhase.RUNNING
        return self._stop_when_all_succeeded()

    def _on_worker_ended(self, ended: WorkerEnded) -> list[Effect]:
        if self.phase in LIVE or self._stop is not None:
            self._may_be_leaving |= ended.may_be_leaving
        if self.phase not in LIVE:
            return []
        if not ended.status.is_success:
            why = f"local rank {ended.local_rank} failed ({ended.status})"
            return self._on_loss(why) if ended.is_lost_peer else self._on_failing(why)
        self._succeeded.add(ended.local_rank)
        if self._awaiting and self._have_all_ended:
            return self._on_failing(self._awaiting)
        return self._stop_when_all_succeeded()

    def _on_start_failed(self, failed: StartFailed) -> list[Effect]:
        self._start_failure = failed
        return self._on_failing(failed.message) if self.phase in LIVE else []

    def _on_failing(self, why: str) -> list[Effect]:
        """Handle the first failure of a group."""
        return self._stop_group(why)

    def _on_loss(self, why: str) -> list[Effect]:
        """Wait for the cause of the loss of a peer, if another worker may have it."""
        self._lost_peers += 1
        if self._have_all_ended:
            return self._on_failing(self._awaiting or why)
        if self._awaiting:
            return []
        self._awaiting = why
        return [BackOff(self.attempt, CAUSE_S)]

    def _stop_when_all_succeeded(self) -> list[Effect]:
        if self.phase is not AgentPhase.RUNNING or not self._all_succeeded:
            return []
        return self._stop_group("all workers have finished", leftovers_only=True)

    def _start_group(self, start: StartGroup) -> list[Effect]:
        self.phase = AgentPhase.STARTING
        self.attempt = start.attempt
        self._started_at = None
        self._succeeded.clear()
        self._lost_peers, self._awaiting = 0, ""
        self._may_be_leaving = False
        self._start_failure = None
        self._failures = ()
        return [start]

    def _stop_group(
        self,
        reason: str,
        signal: int | None = None,
        *,
        plan: StopPlan | None = None,
        leftovers_only: bool = False,
        is_ordered: bool = False,
    ) -> list[Effect]:
        self.phase = AgentPhase.STOPPING
        plan = plan or self._spec.stop
        if signal is not None:
            plan = plan.starting_with(signal)
        waiting: list[Effect] = [CancelBackOff()] if self._awaiting else []
        self._awaiting = ""
        stop = StopGroup(self.attempt, plan, reason, signal, leftovers_only, is_ordered)
        return [*waiting, stop]

    @property
    def _have_all_ended(self) -> bool:
        """Whether no worker of the attempt may still be the cause of the loss of a peer."""
        return len(self._succeeded) + self._lost_peers == self._nproc

    @property
    def _all_succeeded(self) -> bool:
        return len(self._succeeded) == self._nproc

    @property
    def _uptime(self) -> float:
        """Seconds that the whole group ran; 0 if it was never complete."""
        return 0.0 if self._started_at is None else self._stopped_at - self._started_at

    def _exit_code_of_failure(self) -> int:
        if self._start_failure is not None:
            return self._start_failure.exit_code
        return (self._failures[0].status.shell_code or 1) if self._failures else 1

    def _impossible(self, what: str) -> InternalError:
        story = "; ".join(f"{phase.value}: {received}" for phase, received in self._story)
        return InternalError(f"{what} cannot happen in {self!r}; please report: {story}")


def why_stopped(stop: StopReceived) -> tuple[str, int]:
    """Return why a stopped job has ended, and its exit code."""
    if stop.signal is None:
        return stop.reason, 128 + SIGTERM
    name = signal_name(stop.signal)
    why = stop.reason if name in stop.reason else f"{stop.reason} ({name})"
    return why, 128 + stop.signal
