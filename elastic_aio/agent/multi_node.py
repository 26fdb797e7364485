"""The state machine of one node of a job of many.

The rendezvous decides for all nodes whether to restart and which failure is the root cause; this
module decides what the node does about it.  LIVE is STARTING or RUNNING.

Rules
=====

* The rendezvous instructs; the node follows and reports.  `machine` has the rules for its workers.
* A round ends in one report: RoundSucceeded, or RoundStopped when no process is left.  A failure is
  reported twice: as RoundFailing at once, since the other nodes' workers hang from now on, and with
  all details in RoundStopped, whatever the rendezvous has instructed since.
* A lost peer is reported after the wait for its cause: the node with the cause stops its workers by
  itself, and reports it first.
* Only the newest instruction counts.  A StartRound is dropped if its round is not newer than the
  round of the last StartRound or StopRound; so is a StopRound that is older or already answered.
* A running group is stopped before a new round starts.  If a process could not be killed, no
  further group is started: the process holds what the workers would need.
* A requested restart is reported: the rendezvous starts another round on all nodes.
* A node that has succeeded waits for the other nodes at a barrier and still follows instructions.
  When the barrier times out or the node is stopped, it ends as a success.
* A stop of this node ends the job for this node only.  The stop is reported at once, so that the
  workers of all nodes stop, and save, together.  The node leaves when its workers have stopped, so
  that none of them runs beside those of the next round; with `overlap` at once.  Within its grace
  it stays for workers of other nodes that use its store.  If all workers had succeeded, that is
  reported first, and the node ends as a success.
* A node that is cut off stops its workers by the first signal of its plan and SIGKILL soon after,
  or by SIGKILL if a stop has begun: the others start the next round without it.
* EndJob ends the job here with the outcome of all nodes.
* Once the end is decided, no instruction changes it.
* A notice of a preemption, to this node or by the rendezvous, is reported, and ends the rounds:
  no further one is started, and no end of a worker is reported before all have ended here.  The
  node then waits for the end of the job, for as long as other nodes may need to stop.  A node that
  has had no place ends for itself, as does a node that finds no store, once its workers have ended.

::

    phase      input                             next      effects
    ---------  --------------------------------  --------  ------------------------------------
    NEW        Start                             IDLE      Join
    NEW        StopReceived                      DONE      Finish
    IDLE       StartRound                        STARTING  Publish, StartGroup
    IDLE       StopRound                         IDLE      SendReport RoundStopped
    STARTING   GroupStarted                      RUNNING   SendReport RoundStarted
    LIVE       a failure                         STOPPING  SendReport RoundFailing, StopGroup
    RUNNING    the last success                  STOPPING  StopGroup (leftovers)
    LIVE       RestartReceived                   the same  SendReport RestartRequested
    LIVE       StartRound                        STOPPING  Publish, StopGroup
    LIVE       StopRound                         STOPPING  StopGroup
    LIVE       StopReceived                      STOPPING  StopGroup, SendReport NodeDraining
                                                           (overlap: Leave)
    LIVE       EndJob                            STOPPING  Leave, StopGroup
    STOPPING   StartRound, StopRound             STOPPING  (decides what follows)
    STOPPING   StopReceived, all succeeded       STOPPING  (decides what follows)
    STOPPING   StopReceived                      STOPPING  SendReport NodeDraining
                                                           (overlap: Leave)
    STOPPING   EndJob                            STOPPING  Leave
    STOPPING   StopRound, cut off                STOPPING  StopGroup
    STOPPING   GroupStopped, a stop is received  LEAVING   SendReport RoundStopped,
                                                           Leave, unless before
    STOPPING   GroupStopped, the end is decided  LEAVING   Leave, unless before
    STOPPING   GroupStopped, all succeeded       BARRIER   SendReport RoundSucceeded,
                                                           StartBarrier
    STOPPING   GroupStopped, anything else       IDLE      SendReport RoundStopped
    BARRIER,
    IDLE       ... and a StartRound is pending   STARTING  StartGroup
    BARRIER,
    IDLE       ... and a stop was received       LEAVING   Leave
    BARRIER    StartRound                        STARTING  CancelBackOff, Publish, StartGroup
    BARRIER    StopRound                         IDLE      CancelBackOff, SendReport RoundStopped
    BARRIER    BarrierTimedOut                   LEAVING   Leave
    BARRIER    StopReceived                      LEAVING   SendReport NodeDraining,
                                                           CancelBackOff, Leave
    BARRIER    EndJob                            LEAVING   CancelBackOff, Leave
    IDLE       StopReceived, EndJob, JoinFailed  LEAVING   Leave
    LEAVING    LeftRendezvous, now or before     DONE      Publish, Finish
    LIVE       PreemptionReceived                the same  SendReport, Publish, ShowChange,
                                                           BackOff
    ..., then  PreemptionReceived, earlier       the same  CancelBackOff, and as before
    STOPPING   ...                               STOPPING  SendReport, Publish
    STOPPING   GroupStopped, after a notice      BARRIER   SendReport, StartBarrier
    BARRIER,
    IDLE       ...                               BARRIER   SendReport, Publish, CancelBackOff,
                                                           StartBarrier
    IDLE       PreemptionReceived, no place      LEAVING   Leave
    any        RestartPending                    the same  Publish
    LIVE       ChangePending                     the same  Publish, ShowChange
    any other  ChangePending                     the same  Publish
    LIVE       PeersFinished                     the same  NotePeers
    LIVE       WorkersAgreed                     the same  SendReport ChangeAgreed
    any        ProgressMade, where it counts     the same  SendReport RoundProgressed
    any        ExclusionReceived                 the same  SendReport ExclusionRequested
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from elastic_aio.agent import machine
from elastic_aio.events import AttemptFailed, Event, Restarting
from elastic_aio.outcome import (
    PREEMPTION_CHANGE,
    SIGKILL,
    EndCause,
    Failure,
    JobOutcome,
    JobState,
)
from elastic_aio.rendezvous import base
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.stop import StopPlan

_SUCCESS = "all workers have finished"

_END_S = 30.0
"""Seconds for which a node waits, beyond its own time, for other nodes that are preempted."""


class MultiNodeMachine(machine.AgentMachine):
    """Decides for one node of a job of many (see `AgentMachine`)."""

    def __init__(self, spec: LaunchSpec, nproc: int) -> None:
        super().__init__(spec, nproc)
        self.round = -1
        self._newest_round = -1  # of the last StartRound or StopRound
        self._stopped_round = -1  # of the last StopRound
        self._reported_round = -1  # of the last RoundStopped
        self._restarts = 0
        self._group_size = 1
        self._next: base.StartRound | None = None
        self._peers: base.PeersFinished | None = None
        self._finish: machine.Finish | None = None
        self._is_member = self._is_leaving = False
        self._has_agreed = False  # to the preemption
        self._has_no_store = False  # any more, since the notice
        self._published_failure = -1
        self._published_restart = -1

    def __repr__(self) -> str:
        return f"<MultiNodeMachine {self.phase.value}, attempt {self.attempt}, round {self.round}>"

    # ---------------------------------------------------------------- inputs

    def _on_request(self, request: machine.Request) -> list[machine.Effect]:
        match request:
            case machine.Start():
                return self._join()
            case machine.StopReceived():
                return self._on_stop_received(request)
            case machine.RestartReceived(reason):
                is_open = (
                    self.phase in machine.LIVE and self._finish is None and self.notice is None
                )
                return (
                    [machine.SendReport(base.RestartRequested(self.round, reason))]
                    if is_open
                    else []
                )
            case machine.PreemptionReceived():
                return self._on_preemption_received(request)
            case machine.InstructionReceived(base.StopRound(why=why, is_cut_off=True)) if (
                self.phase is machine.AgentPhase.STOPPING
            ):
                plan = self._spec.stop.starting_with(SIGKILL)  # the first signal was sent
                return self._stop_group(why, plan=plan, leftovers_only=self._all_succeeded)
            case machine.InstructionReceived(instruction):
                return [] if self._finish is not None else self._on_instruction(instruction)
            case machine.JoinFailed(error):
                failed = machine.Finish(
                    JobOutcome(JobState.FAILED, str(error), 1, self._restarts), error
                )
                return [] if self._finish is not None else self._end(failed)
            case machine.LeftRendezvous():
                self._is_member = False
                return self._done() if self.phase is machine.AgentPhase.LEAVING else []

    def _join(self) -> list[machine.Effect]:
        if self.phase is not machine.AgentPhase.NEW:
            raise self._impossible("a second start")
        self.phase = machine.AgentPhase.IDLE
        self._is_member = True
        return [machine.Join()]

    def _on_instruction(self, instruction: base.Instruction) -> list[machine.Effect]:
        match instruction:
            case base.StartRound():
                return self._on_start_round(instruction)
            case base.StopRound():
                return self._on_stop_round(instruction)
            case base.RestartPending(cause):
                return [
                    *self._publish_root(cause),
                    *self._publish_restart(base.restarting_event(cause)),
                ]
            case base.ChangePending(round, why, left, number):
                event = machine.Publish(base.pending_event(instruction, self.attempt))
                is_current = (
                    self.phase in machine.LIVE and round == self.round and self.notice is None
                )
                return [event, machine.ShowChange(why, left, number)] if is_current else [event]
            case base.PeersFinished(round):
                self._peers = instruction
                is_current = self.phase in machine.LIVE and round == self.round
                return [machine.NotePeers(instruction)] if is_current else []
            case base.EndJob(outcome) if self.notice is not None and outcome.is_rendezvous:
                if outcome.cause is not EndCause.NO_STORE or self.phase not in machine.LIVE:
                    return self._end(self._stopped())
                self._has_no_store = True
                return self._on_notice_agreed() if self._has_agreed else []
            case base.EndJob(outcome):
                return self._end(machine.Finish(outcome))

    def _on_start_round(self, start: base.StartRound) -> list[machine.Effect]:
        if start.placement.round <= self._newest_round or self._is_ending:
            return []
        self._newest_round = start.placement.round
        self._next = start
        why = "the nodes form another round" if start.cause is None else start.cause.why
        return [*self._publish_round(start), *self._stop_and_continue(why)]

    def _on_stop_round(self, stop: base.StopRound) -> list[machine.Effect]:
        if stop.round < self._newest_round or stop.round <= self._stopped_round:
            return []
        self._newest_round = self._stopped_round = stop.round
        self._next = None
        plan = self._spec.stop.shortened(base.CUT_OFF_GRACE) if stop.is_cut_off else None
        return self._stop_and_continue(stop.why, plan)

    def _on_stop_received(self, stop: machine.StopReceived) -> list[machine.Effect]:
        if self._finish is not None or self._stop is not None:
            return []
        if self.phase is machine.AgentPhase.BARRIER:
            return self._leave_after_success(stop)
        self._stop = stop
        if self.phase is machine.AgentPhase.STOPPING and self._all_succeeded:
            return []  # GroupStopped will show whether the round is a success
        has_workers = self.phase is machine.AgentPhase.STOPPING or self.phase in machine.LIVE
        is_draining = has_workers and not self._spec.rendezvous.overlap
        finish = self._stopped()
        draining = (
            [machine.SendReport(base.NodeDraining(finish.outcome.why))] if is_draining else []
        )
        return [*self._end(finish), *draining]

    def accepts(self, notice: machine.PreemptionReceived) -> bool:
        return self._finish is None and super().accepts(notice)

    def _on_preemption_received(self, notice: machine.PreemptionReceived) -> list[machine.Effect]:
        if not self.accepts(notice):
            return []
        if self.round < 0 and self._next is None:
            self.notice = notice
            return self._end(self._stopped())
        change = base.ChangePending(
            self.round, notice.reason, notice.time_left, PREEMPTION_CHANGE, notice.until
        )
        effects = [machine.SendReport(base.PreemptionNoticed(change)), *self._give_notice(notice)]
        if self.phase in (machine.AgentPhase.IDLE, machine.AgentPhase.BARRIER):
            effects += [*self._cancel_barrier(), *self._wait_at_barrier()]
        return effects

    def _wait_at_barrier(self) -> list[machine.Effect]:
        """Wait for other nodes; after a notice, for as long as they may need to stop."""
        if self._has_no_store:
            return self._end(self._stopped())
        self.phase = machine.AgentPhase.BARRIER
        plan, timeout = self._spec.stop, self._spec.rendezvous.exit_barrier_timeout
        if self.notice is not None:
            timeout = self.notice.time_left + plan.grace + plan.reap_timeout + _END_S
        return [machine.StartBarrier(self.attempt, timeout)]

    def _on_notice_agreed(self) -> list[machine.Effect]:
        self._has_agreed = True
        if self._has_no_store:
            return super()._on_notice_agreed()
        return [machine.SendReport(base.ChangeAgreed(self.round, PREEMPTION_CHANGE))]

    def _on_other_result(self, result: machine.EffectResult) -> list[machine.Effect]:
        match result:
            case machine.WorkersAgreed(change=change) if self.phase in machine.LIVE:
                return [machine.SendReport(base.ChangeAgreed(self.round, change))]
            case machine.ProgressMade() if (
                self._spec.restart.max_attempts_without_progress is not None
            ):
                return [
                    machine.SendReport(base.RoundProgressed(self.round))
                ]  # other jobs pay for no message
            case machine.ExclusionReceived(why=why, seconds=seconds):
                return [machine.SendReport(base.ExclusionRequested(self.round, why, seconds))]
            case machine.BarrierTimedOut() if self.phase is machine.AgentPhase.BARRIER:
                return self._on_barrier_timed_out()
        return []

    def _on_barrier_timed_out(self) -> list[machine.Effect]:
        self.phase = machine.AgentPhase.IDLE
        if self.notice is not None:
            return self._end(self._stopped())
        timeout = self._spec.rendezvous.exit_barrier_timeout
        others = "what has become of the others is not known"
        if timeout is not None:
            others = f"others had not after {timeout:g} s (rendezvous.exit_barrier_timeout)"
        return self._end(self._success(f"{_SUCCESS} on this node; {others}"))

    # ---------------------------------------------------------------- the group

    def _on_group_started(self, started: machine.GroupStarted) -> list[machine.Effect]:
        if self.phase is not machine.AgentPhase.STARTING:
            return super()._on_group_started(started)
        return [
            machine.SendReport(base.RoundStarted(self.round)),
            *super()._on_group_started(started),
        ]

    def _on_failing(self, why: str) -> list[machine.Effect]:
        if self._has_notice:
            return super()._on_failing(why)
        # Before the stop: the other nodes' workers wait for a worker that has exited.
        return [machine.SendReport(base.RoundFailing(self.round, why)), *self._stop_group(why)]

    @property
    def _have_all_ended(self) -> bool:
        return (self._group_size == 1 or self._has_notice) and super()._have_all_ended

    def _stop_and_continue(self, why: str, plan: StopPlan | None = None) -> list[machine.Effect]:
        """Stop the group if it runs, then follow the newest instruction."""
        if self.phase in machine.LIVE:
            return self._stop_group(why, plan=plan, is_ordered=True)
        if self.phase is machine.AgentPhase.STOPPING:
            return []
        return [*self._cancel_barrier(), *self._continue()]

    def _on_group_stopped(self, stopped: machine.GroupStopped) -> list[machine.Effect]:
        self.phase = machine.AgentPhase.IDLE
        if self._finish is not None:
            if self._stop is None or not self._is_member or self._is_leaving:
                return self._done()
            if self._is_effect and not self._has_failed:
                self._failures = ()  # none of them ends the round
            self._finish = self._stopped()
            report = base.RoundStopped(self.round, self._failures)
            return [machine.SendReport(report), *self._done(stays=True)]
        if self._all_succeeded and not stopped.failures and self._stopped_round < self.round:
            succeeded = base.RoundSucceeded(self.round, stopped.first_success)
            return [machine.SendReport(succeeded), *self._after_success()]
        reports = self._report_stopped(stopped)
        if self._stop is not None:
            return [*reports, *self._end(self._stopped())]
        return [*reports, *self._continue()]

    def _after_success(self) -> list[machine.Effect]:
        if self._stop is not None:
            return self._leave_after_success(self._stop)
        if self._next is not None:
            return self._continue()
        return self._wait_at_barrier()

    def _leave_after_success(self, stop: machine.StopReceived) -> list[machine.Effect]:
        why = machine.why_stopped(stop)[0]
        success = self._success(f"{_SUCCESS}; the others are not waited for: {why}")
        finish = success if self.notice is None else self._stopped()
        return [machine.SendReport(base.NodeDraining(why)), *self._end(finish, stays=True)]

    def _report_stopped(self, end: machine.GroupStopped) -> list[machine.Effect]:
        reason = machine.CANNOT_KILL if end.has_survivors else ""
        if self._start_failure is not None and self._start_failure.permanent:
            reason = self._start_failure.why_permanent
        code = self._exit_code_of_failure()
        stopped = base.RoundStopped(
            self.round,
            self._failures,
            bool(reason),
            reason,
            code,
            self.uptime,
            end.first_success,
        )
        self._reported_round = self.round
        if not end.has_survivors or self._newest_round == self.round:
            return [machine.SendReport(stopped)]
        # The round that was to follow cannot be started here either.
        self._next, self._reported_round = None, self._newest_round
        return [
            machine.SendReport(stopped),
            machine.SendReport(
                base.RoundStopped(self._newest_round, is_permanent=True, permanent_reason=reason)
            ),
        ]

    def _continue(self) -> list[machine.Effect]:
        """Follow the newest instruction; no group is running."""
        if self._next is not None and self.notice is None:
            return self._start_round(self._next.placement)
        if self._next is not None:
            self._next, self._stopped_round = None, self._newest_round
        self.phase = machine.AgentPhase.IDLE
        waiting = [] if self.notice is None else self._wait_at_barrier()
        if self._stopped_round <= self._reported_round:
            return waiting
        self._reported_round = self._stopped_round
        return [machine.SendReport(base.RoundStopped(self._stopped_round)), *waiting]

    def _start_round(self, placement: base.Placement) -> list[machine.Effect]:
        self._next = None
        self.round, self._restarts = placement.round, placement.restarts
        self._group_size = placement.span.group_world_size
        start = machine.StartGroup(placement.attempt, placement.restarts, placement)
        # With `overlap`, workers of other nodes may have finished before these begin.
        peers = self._peers
        is_late = peers is not None and peers.round == placement.round
        return [
            *self._start_group(start),
            *([machine.NotePeers(peers)] if peers and is_late else []),
        ]

    # ------------------------------------------------------------------ the end

    def _end(self, finish: machine.Finish, *, stays: bool = False) -> list[machine.Effect]:
        """Stop the group and leave; finish when both are done."""
        self._finish, self._next = finish, None
        # The others must not start another round beside these workers, unless they may.
        is_over = self._stop is None and not finish.outcome.is_rendezvous
        is_leaving = is_over or self._spec.rendezvous.overlap
        leaving = self._leave(stays=stays) if is_leaving else []
        if self.phase in machine.LIVE:
            stop = self._stop or machine.StopReceived("")
            plan = stop.plan_of(self._spec.stop)
            return [*leaving, *self._stop_group(finish.outcome.why, stop.signal, plan=plan)]
        if self.phase is machine.AgentPhase.STOPPING:
            return leaving
        return [*self._cancel_barrier(), *leaving, *self._done(stays=stays)]

    def _leave(self, *, stays: bool = False) -> list[machine.Effect]:
        if not self._is_member or self._is_leaving or self._finish is None:
            return []
        self._is_leaving = True
        return [machine.Leave(self._finish.outcome.why, stays)]

    def _done(self, *, stays: bool = False) -> list[machine.Effect]:
        """Finish, unless this node is still leaving; no group is running."""
        finish = self._finish
        if finish is None:
            raise self._impossible("an end that was not decided")
        if self._is_member:
            self.phase = machine.AgentPhase.LEAVING
            return self._leave(stays=stays)
        self.phase = machine.AgentPhase.DONE
        # What workers do after a notice, or by its signal, is no failure of the attempt.
        own = () if self._has_notice or self._is_effect else self._failures
        failures = _merge(finish.outcome.failures, own)
        if finish.outcome.failures:
            finish = machine.Finish(replace(finish.outcome, failures=failures), finish.error)
        return [*self._publish_failed(self.attempt, failures), finish]

    def _cancel_barrier(self) -> list[machine.Effect]:
        return [machine.CancelBackOff()] if self.phase is machine.AgentPhase.BARRIER else []

    def _success(self, why: str) -> machine.Finish:
        return machine.Finish(JobOutcome(JobState.SUCCEEDED, why, 0, self._restarts))

    def _stopped(self) -> machine.Finish:
        """Return the end by a stop or a notice; a failure before it stays, without a restart."""
        outcome = self._stopped_outcome(self._restarts)
        is_granted = self._published_restart > self.attempt
        if self._stop is not None and self._failures and not (self._is_effect or is_granted):
            why, code = f"no restart follows: {self._stop.reason}", self._exit_code_of_failure()
            outcome = JobOutcome(JobState.FAILED, why, code, self._restarts)
        return machine.Finish(outcome)

    # ---------------------------------------------------------------- events

    def _publish_round(self, start: base.StartRound) -> list[machine.Effect]:
        placement, cause = start.placement, start.cause
        effects: list[machine.Effect] = []
        if cause is not None:
            effects += self._publish_root(cause)
            effects += self._publish_restart(base.cause_event(cause, placement))
        return [
            *effects,
            machine.Publish(base.round_formed_event(placement, placement.span.group_rank)),
        ]

    def _publish_restart(self, event: Event) -> list[machine.Effect]:
        if isinstance(event, Restarting):
            if event.attempt <= self._published_restart:
                return []
            self._published_restart = event.attempt
        return [machine.Publish(event)]

    def _publish_root(self, cause: base.RestartCause) -> list[machine.Effect]:
        if cause.root is None:
            return []
        failed = cause.attempt - 1
        own = self._failures if failed == self.attempt else ()
        return self._publish_failed(failed, _merge((cause.root,), own))

    def _publish_failed(self, attempt: int, failures: tuple[Failure, ...]) -> list[machine.Effect]:
        if not failures or attempt <= self._published_failure:
            return []
        self._published_failure = attempt
        return [
            machine.Publish(AttemptFailed(attempt=attempt, root=failures[0], failures=failures))
        ]


def _merge(job: Sequence[Failure], own: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the job's failures in their order, then those that only this node has seen.

    This node's own failures replace the job's copies, which may be truncated, but keep the notes
    that the coordinator has added to the copies.
    """
    seen = {_worker_key(failure): failure for failure in own}
    merged = [_with_notes(seen.pop(_worker_key(one), one), one.notes) for one in job]
    return (*merged, *seen.values())


def _with_notes(failure: Failure, notes: Sequence[str]) -> Failure:
    """Return a failure with those `notes` of its copy that are not the ends of its own notes."""
    added = [note for note in notes if not any(one.endswith(note) for one in failure.notes)]
    return replace(failure, notes=(*added, *failure.notes)) if added else failure


def _worker_key(failure: Failure) -> tuple[str, int, int | None]:
    return failure.host, failure.rank, failure.pid
