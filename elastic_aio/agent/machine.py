"""The policy of a job on one host: happenings in, effects out.

Rules
=====

* One attempt at a time.  The first worker that fails by itself ends its attempt;
  so does the last one that succeeds.  Either way the group is stopped, because
  workers leave processes behind, and the attempt is over when nothing is left.
* A failed attempt is followed by another one if the restart policy grants it,
  after its delay.  A failure that no attempt can mend ends the job.
* What could not be killed is left behind, and then there is no further attempt.
* A stop ends the job wherever it is.  Asked for while a failed attempt is being
  stopped, it takes the place of the restart; when there would have been none, the
  job has failed.  Workers that had all succeeded stay a success.
* Answers carry their attempt.  One that comes late is dropped here, and only here.

::

    phase      happening                     next       effects
    ---------  ----------------------------  ---------  ---------------------------
    NEW        Begun                         STARTING   StartGroup
    STARTING   GroupStarted                  RUNNING
    STARTING   StartFailed                   STOPPING   StopGroup
    STARTING   WorkerEnded, a failure        STOPPING   StopGroup
    RUNNING    WorkerEnded, a failure        STOPPING   StopGroup
    RUNNING    WorkerEnded, the last success STOPPING   StopGroup (leftovers)
    STARTING,
    RUNNING    StopAsked                     STOPPING   StopGroup
    STOPPING   GroupGone, all succeeded      DONE       Finish
    STOPPING   GroupGone, stop asked         DONE       Finish
    STOPPING   GroupGone, failed             DECIDING   AskDecision, or at once:
    DECIDING   Decided                       WAITING    Wait (a delay of 0 at once)
                                             or DONE    Finish
    WAITING    DelayElapsed                  STARTING   StartGroup
    DECIDING,
    WAITING    StopAsked                     DONE       StopWaiting, Finish
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from elastic_aio.agent.restarts import RestartBook
from elastic_aio.agent.vocabulary import (
    AskDecision,
    Begun,
    Decided,
    DecideRaised,
    DelayElapsed,
    Effect,
    Finish,
    GroupGone,
    GroupStarted,
    Happening,
    Publish,
    StartFailed,
    StartGroup,
    StopAsked,
    StopGroup,
    StopWaiting,
    Wait,
    WorkerEnded,
)
from elastic_aio.errors import InternalError
from elastic_aio.events import AttemptFailed, Restarting
from elastic_aio.outcome import Failure, JobState
from elastic_aio.policy import Action
from elastic_aio.signames import SIGTERM, signal_name
from elastic_aio.spec import LaunchSpec

__all__ = ["Machine", "Phase"]


class Phase(Enum):
    """Where a job is."""

    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DECIDING = "deciding"
    WAITING = "waiting"
    DONE = "done"


_LIVE = (Phase.STARTING, Phase.RUNNING)


class Machine:
    """Decides; performs nothing.

    After each `handle`, perform the effects in their order and hand in what
    happens next.  After `Finish` nothing more is said.
    """

    def __init__(self, spec: LaunchSpec, nproc: int, random: Callable[[], float]) -> None:
        """Begin with a job of `nproc` workers on this host.

        `random` gives numbers from 0 to 1, for the jitter of delays.
        """
        self.phase = Phase.NEW
        self.attempt = 0
        self._spec = spec
        self._nproc = nproc
        self._book = RestartBook(spec.max_restarts, spec.restart, random)
        self._started_at: float | None = None
        self._succeeded: set[int] = set()
        self._start_failure: StartFailed | None = None
        self._stop: StopAsked | None = None
        self._failures: tuple[Failure, ...] = ()
        self._gone_at = 0.0
        self._story: list[str] = []

    def __repr__(self) -> str:
        return f"<Machine {self.phase.value}, attempt {self.attempt}, {self._book!r}>"

    @property
    def restarts(self) -> int:
        """Restarts after failures so far."""
        return self._book.restarts

    def handle(self, happening: Happening) -> list[Effect]:
        """Take in what has happened; return what to do about it, in order.

        Raises:
            InternalError: a happening that the present phase cannot have.
        """
        self._story.append(f"{self.phase.value}: {happening}")
        del self._story[:-50]
        if self.phase is Phase.DONE:
            return []
        if isinstance(happening, StopAsked):
            return self._on_stop_asked(happening)
        if isinstance(happening, Begun):
            if self.phase is not Phase.NEW:
                raise self._impossible("a second beginning")
            return self._start()
        if happening.attempt != self.attempt:
            return []
        match happening:
            case WorkerEnded():
                return self._on_worker_ended(happening)
            case GroupStarted():
                self._started_at = happening.at
                if self.phase is Phase.STARTING:
                    self.phase = Phase.RUNNING
                    return self._stop_when_all_succeeded()
                return []
            case StartFailed():
                return self._on_start_failed(happening)
            case GroupGone():
                return self._on_group_gone(happening)
            case Decided():
                return self._judge(happening.action) if self.phase is Phase.DECIDING else []
            case DecideRaised():
                return self._on_decide_raised(happening) if self.phase is Phase.DECIDING else []
            case DelayElapsed():
                return self._start() if self.phase is Phase.WAITING else []

    def _start(self) -> list[Effect]:
        self.phase = Phase.STARTING
        self._started_at = None
        self._succeeded.clear()
        self._start_failure = None
        self._failures = ()
        return [StartGroup(self.attempt, self._book.restarts)]

    def _on_stop_asked(self, asked: StopAsked) -> list[Effect]:
        if self._stop is not None:
            return []
        self._stop = asked
        if self.phase in _LIVE:
            return self._stop_group(asked.reason, asked.signal)
        if self.phase in (Phase.DECIDING, Phase.WAITING):
            return [StopWaiting(), *self._finish_stopped()]
        return [] if self.phase is Phase.STOPPING else self._finish_stopped()

    def _on_worker_ended(self, ended: WorkerEnded) -> list[Effect]:
        if self.phase not in _LIVE:
            return []
        if not ended.status.is_success:
            return self._stop_group(f"local rank {ended.local_rank} failed ({ended.status})")
        self._succeeded.add(ended.local_rank)
        return self._stop_when_all_succeeded()

    def _stop_when_all_succeeded(self) -> list[Effect]:
        if self.phase is not Phase.RUNNING or len(self._succeeded) < self._nproc:
            return []
        return self._stop_group("all workers have finished", leftovers_only=True)

    def _on_start_failed(self, failed: StartFailed) -> list[Effect]:
        self._start_failure = failed
        if self.phase is Phase.STARTING:
            return self._stop_group(failed.message)
        return []

    def _stop_group(
        self, reason: str, signal: int | None = None, *, leftovers_only: bool = False
    ) -> list[Effect]:
        self.phase = Phase.STOPPING
        plan = self._spec.stop if signal is None else self._spec.stop.starting_with(signal)
        return [StopGroup(self.attempt, plan, reason, signal, leftovers_only)]

    def _on_group_gone(self, gone: GroupGone) -> list[Effect]:
        if self.phase is not Phase.STOPPING:
            raise self._impossible("the end of a group")
        self._gone_at = gone.at
        if not gone.failures:
            return self._finish_without_failure()
        self._failures = gone.failures
        root = gone.failures[0]
        failed = AttemptFailed(attempt=self.attempt, root=root, failures=gone.failures)
        if gone.has_survivors:
            # It holds what the next attempt would need: memory, devices, ports.
            return [Publish(failed), *self._give_up("a process could not be killed")]
        return [Publish(failed), *self._after_failure(root)]

    def _finish_without_failure(self) -> list[Effect]:
        if len(self._succeeded) == self._nproc:
            return self._finish(JobState.SUCCEEDED, "all workers have finished", 0)
        return self._finish_stopped()

    def _after_failure(self, root: Failure) -> list[Effect]:
        if self._start_failure is not None and self._start_failure.permanent:
            return self._give_up("another attempt could not start it either")
        if self._spec.restart.decide is None or self._book.is_used_up:
            return self._judge(Action.BY_POLICY)
        if self._stop is not None:
            return self._finish_stopped()
        self.phase = Phase.DECIDING
        return [AskDecision(self.attempt, root)]

    def _judge(self, action: Action) -> list[Effect]:
        ran = 0.0 if self._started_at is None else self._gone_at - self._started_at
        verdict = self._book.judge(self._failures[0], action, ran, self._gone_at)
        if not verdict.restart:
            return self._give_up(verdict.why)
        if self._stop is not None:
            return self._finish_stopped()
        self._book.count(self._gone_at)
        self.attempt += 1
        self.phase = Phase.WAITING
        told = Restarting(
            attempt=self.attempt,
            why=verdict.why,
            delay=verdict.delay,
            restarts=self._book.restarts,
        )
        if verdict.delay:
            return [Publish(told), Wait(self.attempt, verdict.delay)]
        return [Publish(told), *self._start()]

    def _on_decide_raised(self, raised: DecideRaised) -> list[Effect]:
        why = f"restart.decide raised {type(raised.error).__name__}"
        self.phase = Phase.DONE
        code = self._exit_code_of_failure()
        return [Finish(JobState.FAILED, why, code, self._book.restarts, raised.error)]

    def _give_up(self, why: str) -> list[Effect]:
        return self._finish(JobState.FAILED, why, self._exit_code_of_failure())

    def _finish_stopped(self) -> list[Effect]:
        if self._stop is None:
            raise self._impossible("a stop that nobody asked for")
        signal = self._stop.signal
        why = self._stop.reason if signal is None else f"{signal_name(signal)} was received"
        code = 128 + (SIGTERM if signal is None else signal)
        return self._finish(JobState.STOPPED, why, code)

    def _finish(self, state: JobState, why: str, exit_code: int) -> list[Effect]:
        self.phase = Phase.DONE
        return [Finish(state, why, exit_code, self._book.restarts)]

    def _exit_code_of_failure(self) -> int:
        if self._start_failure is not None:
            return self._start_failure.exit_code
        return self._failures[0].status.shell_code or 1

    def _impossible(self, what: str) -> InternalError:
        story = "; ".join(self._story)
        return InternalError(f"{what} cannot happen in {self!r}; please report: {story}")
