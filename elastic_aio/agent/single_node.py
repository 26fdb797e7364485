"""The state machine of a job of one node.

Rules
=====

* One attempt at a time; `machine` has the rules for its workers.
* A failed attempt is followed by another one if the restart policy grants it, after its
  delay.  A permanent failure, which no attempt can repair, ends the job.
* A failure that a SIGTERM to all processes may have caused is judged `LEAVING_S` later, if
  it could be repeated: a stop that is received by then has ended the attempt.
* A process that could not be killed is left behind, and no attempt follows.
* A requested restart stops the group, and another attempt follows, which costs no restart.
  A worker that fails by itself meanwhile counts as a failure.  It also ends a back-off;
  where an attempt is ending already, it changes nothing.
* A stop ends the job in any phase.  Received while a failed attempt is being stopped,
  it replaces the restart; if none was granted, the job has failed.  If all workers have
  succeeded, so has the job.

::

    phase      input                         next       effects
    ---------  ----------------------------  ---------  ---------------------------
    NEW        Start                         STARTING   StartGroup
    STARTING   GroupStarted                  RUNNING
    STARTING,
    RUNNING    the end of the group          STOPPING   StopGroup, see `machine`
    STARTING,
    RUNNING    StopReceived, RestartReceived STOPPING   StopGroup
    STOPPING   GroupStopped, all succeeded   DONE       Finish
    STOPPING   GroupStopped, a stop received DONE       Finish
    STOPPING   GroupStopped, to be restarted STARTING   StartGroup
    STOPPING   GroupStopped, perhaps a stop  DECIDING   BackOff, then as if it had failed
    STOPPING   GroupStopped, failed          DECIDING   CallDecide (as if the result
                                                        were DEFAULT if there is none)
    DECIDING   DecisionMade, restart         BACKING_   BackOff (STARTING, StartGroup
                                             OFF        if the delay is 0)
    DECIDING   DecisionMade, give up         DONE       Finish
    DECIDING   DecisionFailed                DONE       Finish
    BACKING_
    OFF        BackoffElapsed                STARTING   StartGroup
    BACKING_
    OFF        RestartReceived               STARTING   CancelBackOff, StartGroup
    DECIDING,
    BACKING_
    OFF        StopReceived                  DONE       CancelBackOff, Finish
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_aio.agent.machine import LIVE, AgentMachine, AgentPhase, why_stopped
from elastic_aio.agent.messages import (
    BackOff,
    BackoffElapsed,
    CallDecide,
    CancelBackOff,
    DecisionFailed,
    DecisionMade,
    Effect,
    EffectResult,
    Finish,
    GroupStopped,
    Publish,
    Request,
    RestartReceived,
    Start,
    StartGroup,
    StopReceived,
)
from elastic_aio.events import AttemptFailed, Restarting
from elastic_aio.outcome import Failure, JobOutcome, JobState
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import DECIDE_TIMEOUT, LEAVING_S, RestartAction, RestartBudget

_CANNOT_KILL = "a process could not be killed"


class SingleNodeMachine(AgentMachine):
    """Decides for a job of one node (see `AgentMachine`)."""

    def __init__(
        self,
        spec: LaunchSpec,
        nproc: int,
        random: Callable[[], float],
        *,
        waits_for_stop: bool = False,
    ) -> None:
        """Begin with `nproc` workers on this host.

        Args:
            spec: the job.
            nproc: number of workers.
            random: gives numbers from 0 to 1, for the jitter of delays.
            waits_for_stop: a worker that fails does not end the group; a stop does.
        """
        super().__init__(spec, nproc)
        self._waits_for_stop = waits_for_stop
        self._budget = RestartBudget(spec.max_restarts, spec.restart, random)
        self._restart: RestartReceived | None = None

    def __repr__(self) -> str:
        return f"<SingleNodeMachine {self.phase.value}, attempt {self.attempt}, {self._budget!r}>"

    @property
    def restarts(self) -> int:
        """Restarts after failures so far."""
        return self._budget.restarts

    def _on_request(self, request: Request) -> list[Effect]:
        if isinstance(request, StopReceived):
            return self._on_stop_received(request)
        if isinstance(request, RestartReceived):
            return self._on_restart_received(request)
        if not isinstance(request, Start):
            raise self._impossible("a rendezvous")
        if self.phase is not AgentPhase.NEW:
            raise self._impossible("a second start")
        return self._start()

    def _on_other_result(self, result: EffectResult) -> list[Effect]:
        match result:
            case DecisionMade() if self.phase is AgentPhase.DECIDING:
                return self._apply(result.action)
            case DecisionFailed() if self.phase is AgentPhase.DECIDING:
                return self._on_decision_failed(result)
            case BackoffElapsed() if self.phase is AgentPhase.BACKING_OFF:
                return self._start()
            case BackoffElapsed() if self.phase is AgentPhase.DECIDING:
                return self._judge()
        return []

    def _start(self) -> list[Effect]:
        self._restart = None
        return self._start_group(StartGroup(self.attempt, self._budget.restarts))

    def _on_stop_received(self, stop: StopReceived) -> list[Effect]:
        if self._stop is not None:
            return []
        self._stop = stop
        if self.phase in LIVE:
            return self._stop_group(stop.reason, stop.signal, plan=stop.plan)
        if self.phase in (AgentPhase.DECIDING, AgentPhase.BACKING_OFF):
            return [CancelBackOff(), *self._finish_stopped()]
        return [] if self.phase is AgentPhase.STOPPING else self._finish_stopped()

    def _on_restart_received(self, restart: RestartReceived) -> list[Effect]:
        if self.phase in LIVE:
            self._restart = restart
            return self._stop_group(restart.reason)
        if self.phase is AgentPhase.BACKING_OFF:
            return [CancelBackOff(), *self._start()]
        return []

    def _on_loss(self, why: str) -> list[Effect]:
        return [] if self._waits_for_stop else super()._on_loss(why)

    def _on_failing(self, why: str) -> list[Effect]:
        if self._waits_for_stop and self._start_failure is None:
            return []
        return super()._on_failing(why)

    def _on_group_stopped(self, stopped: GroupStopped) -> list[Effect]:
        if not stopped.failures:
            return self._finish_without_failure(has_survivors=stopped.has_survivors)
        can_follow = not (stopped.has_survivors or self._budget.is_exhausted(self._uptime))
        if not self._may_be_leaving or not can_follow:
            return self._judge(has_survivors=stopped.has_survivors)
        if self._stop is not None:
            return self._finish_stopped()
        self.phase = AgentPhase.DECIDING
        return [BackOff(self.attempt, LEAVING_S)]

    def _judge(self, *, has_survivors: bool = False) -> list[Effect]:
        root = self._failures[0]
        failed = AttemptFailed(attempt=self.attempt, root=root, failures=self._failures)
        if has_survivors:
            # It holds what the next attempt would need: memory, devices, ports.
            return [Publish(failed), *self._give_up(_CANNOT_KILL)]
        return [Publish(failed), *self._after_failure(root)]

    def _finish_without_failure(self, *, has_survivors: bool) -> list[Effect]:
        if self._all_succeeded:
            return self._finish(JobState.SUCCEEDED, "all workers have finished", 0)
        if self._stop is not None or self._restart is None:
            return self._finish_stopped()
        if has_survivors:
            return self._give_up(_CANNOT_KILL)
        self.attempt += 1
        restarting = Restarting(
            attempt=self.attempt, why=self._restart.reason, delay=0.0, restarts=self.restarts
        )
        return [Publish(restarting), *self._start()]

    def _after_failure(self, root: Failure) -> list[Effect]:
        if self._start_failure is not None and self._start_failure.permanent:
            return self._give_up(self._start_failure.why_permanent)
        if self._spec.restart.decide is None or self._budget.is_exhausted(self._uptime):
            return self._apply(RestartAction.DEFAULT)
        if self._stop is not None:
            return self._finish_stopped()
        self.phase = AgentPhase.DECIDING
        return [CallDecide(self.attempt, root)]

    def _apply(self, action: RestartAction) -> list[Effect]:
        root, now = self._failures[0], self._stopped_at
        decision = self._budget.decide(root, action, self._uptime, now)
        if not decision.restart:
            return self._give_up(decision.why)
        if self._stop is not None:
            return self._finish_stopped()
        self._budget.record(now)
        self.attempt += 1
        self.phase = AgentPhase.BACKING_OFF
        restarting = Restarting(
            attempt=self.attempt,
            why=decision.why,
            delay=decision.delay,
            restarts=self._budget.restarts,
            returned=self._budget.returned,
        )
        if decision.delay:
            return [Publish(restarting), BackOff(self.attempt, decision.delay)]
        return [Publish(restarting), *self._start()]

    def _on_decision_failed(self, failed: DecisionFailed) -> list[Effect]:
        if failed.error is None:
            return self._give_up(f"restart.decide has not returned within {DECIDE_TIMEOUT:g} s")
        why = f"restart.decide raised {type(failed.error).__name__}"
        self.phase = AgentPhase.DONE
        code = self._exit_code_of_failure()
        outcome = JobOutcome(JobState.FAILED, why, code, self._budget.restarts)
        return [Finish(outcome, failed.error)]

    def _give_up(self, why: str) -> list[Effect]:
        return self._finish(JobState.FAILED, why, self._exit_code_of_failure())

    def _finish_stopped(self) -> list[Effect]:
        if self._stop is None:
            raise self._impossible("a stop that was not requested")
        return self._finish(JobState.STOPPED, *why_stopped(self._stop))

    def _finish(self, state: JobState, why: str, exit_code: int) -> list[Effect]:
        self.phase = AgentPhase.DONE
        return [Finish(JobOutcome(state, why, exit_code, self._budget.restarts))]
