"""The policy of a job of one node: happenings in, effects out.

Rules
=====

* One attempt at a time, and what `groupmachine` says about its workers.
* A failed attempt is followed by another one if the restart policy grants it,
  after its delay.  A failure that no attempt can mend ends the job.
* What could not be killed is left behind, and then there is no further attempt.
* A stop ends the job wherever it is.  Asked for while a failed attempt is being
  stopped, it takes the place of the restart; when there would have been none, the
  job has failed.  Workers that had all succeeded stay a success.

::

    phase      happening                     next       effects
    ---------  ----------------------------  ---------  ---------------------------
    NEW        Begun                         STARTING   StartGroup
    STARTING   GroupStarted                  RUNNING
    STARTING,
    RUNNING    the end is near               STOPPING   see `groupmachine`
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

from elastic_aio.agent.groupmachine import LIVE, GroupMachine, Phase, why_stopped
from elastic_aio.agent.vocabulary import (
    Answer,
    AskDecision,
    Begun,
    Decided,
    DecideRaised,
    DelayElapsed,
    Effect,
    Finish,
    GroupGone,
    News,
    Publish,
    StartGroup,
    StopAsked,
    StopWaiting,
    Wait,
)
from elastic_aio.events import AttemptFailed, Restarting
from elastic_aio.outcome import Failure, JobState
from elastic_aio.policy import Action
from elastic_aio.restarts import RestartBook
from elastic_aio.spec import LaunchSpec

__all__ = ["Machine", "Phase"]


class Machine(GroupMachine):
    """Decides for a job of one node (see `GroupMachine`)."""

    def __init__(self, spec: LaunchSpec, nproc: int, random: Callable[[], float]) -> None:
        """Begin with a job of `nproc` workers on this host.

        `random` gives numbers from 0 to 1, for the jitter of delays.
        """
        super().__init__(spec, nproc)
        self._book = RestartBook(spec.max_restarts, spec.restart, random)
        self._stop: StopAsked | None = None

    def __repr__(self) -> str:
        return f"<Machine {self.phase.value}, attempt {self.attempt}, {self._book!r}>"

    @property
    def restarts(self) -> int:
        """Restarts after failures so far."""
        return self._book.restarts

    def _on_news(self, news: News) -> list[Effect]:
        if isinstance(news, StopAsked):
            return self._on_stop_asked(news)
        if not isinstance(news, Begun):
            raise self._impossible("a rendezvous")
        if self.phase is not Phase.NEW:
            raise self._impossible("a second beginning")
        return self._start()

    def _on_other_answer(self, answer: Answer) -> list[Effect]:
        match answer:
            case Decided() if self.phase is Phase.DECIDING:
                return self._judge(answer.action)
            case DecideRaised() if self.phase is Phase.DECIDING:
                return self._on_decide_raised(answer)
            case DelayElapsed() if self.phase is Phase.WAITING:
                return self._start()
        return []

    def _start(self) -> list[Effect]:
        return self._start_group(StartGroup(self.attempt, self._book.restarts))

    def _on_stop_asked(self, asked: StopAsked) -> list[Effect]:
        if self._stop is not None:
            return []
        self._stop = asked
        if self.phase in LIVE:
            return self._stop_group(asked.reason, asked.signal)
        if self.phase in (Phase.DECIDING, Phase.WAITING):
            return [StopWaiting(), *self._finish_stopped()]
        return [] if self.phase is Phase.STOPPING else self._finish_stopped()

    def _on_gone(self, gone: GroupGone) -> list[Effect]:
        if not gone.failures:
            return self._finish_without_failure()
        root = gone.failures[0]
        failed = AttemptFailed(attempt=self.attempt, root=root, failures=gone.failures)
        if gone.has_survivors:
            # It holds what the next attempt would need: memory, devices, ports.
            return [Publish(failed), *self._give_up("a process could not be killed")]
        return [Publish(failed), *self._after_failure(root)]

    def _finish_without_failure(self) -> list[Effect]:
        if self._all_succeeded:
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
        verdict = self._book.judge(self._failures[0], action, self._ran, self._gone_at)
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
        return self._finish(JobState.STOPPED, *why_stopped(self._stop))

    def _finish(self, state: JobState, why: str, exit_code: int) -> list[Effect]:
        self.phase = Phase.DONE
        return [Finish(state, why, exit_code, self._book.restarts)]
