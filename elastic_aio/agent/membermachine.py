"""The policy of a node in a job of many: happenings in, effects out.

Who restarts, and which failure is the root cause, is decided for all nodes by the
rendezvous; here is what one node does about it.

Rules
=====

* The rendezvous instructs, the node obeys and reports.  What `groupmachine` says
  about its workers holds here too.
* A round ends in one report: its workers have succeeded, or nothing of them is left.
  A failure is reported twice: at once, since the other nodes' workers hang from now
  on, and with all that is known of it when the group is gone, whatever was
  instructed meanwhile.
* Only the newest instruction counts.  A Begin whose round is not newer than that of
  the last Begin or Halt is dropped, and so is a Halt that is older or answered.
* A group that is in the way of a new round is stopped first.  Where a process could
  not be killed nothing more is started: it holds what the workers would need.
* A node that has succeeded waits for the others a while and obeys meanwhile.  When
  the wait is over, or somebody stops this node, it ends as a success.
* Whoever asks this node to stop ends the job for it alone.  It leaves at once, while
  its workers are being stopped, so that the others need not wait; only workers that
  had all succeeded are reported first, and stay a success.
* A job that is concluded ends here as everywhere: same state, reason and exit code.
* Once the end is decided, no instruction changes it.

::

    phase      happening                         next      effects
    ---------  --------------------------------  --------  -----------------------------
    NEW        Begun                             IDLE      Join
    NEW        StopAsked                         DONE      Finish
    IDLE       Begin                             STARTING  Publish, StartGroup
    IDLE       Halt                              IDLE      Tell Ended
    STARTING   GroupStarted                      RUNNING   Tell Running
    STARTING,
    RUNNING    a failure                         STOPPING  Tell Failing, StopGroup
    RUNNING    the last success                  STOPPING  StopGroup (leftovers)
    STARTING,
    RUNNING    Begin                             STOPPING  Publish, StopGroup
    STARTING,
    RUNNING    Halt                              STOPPING  StopGroup
    STARTING,
    RUNNING    StopAsked, Conclude               STOPPING  Leave, StopGroup
    STOPPING   Begin, Halt                       STOPPING  (decides what follows)
    STOPPING   StopAsked, all succeeded          STOPPING  (decides what follows)
    STOPPING   StopAsked, Conclude               STOPPING  Leave
    STOPPING   GroupGone, the end is decided     LEAVING
    STOPPING   GroupGone, all succeeded          BARRIER   Tell Succeeded, StartBarrier
    STOPPING   GroupGone, anything else          IDLE      Tell Ended
    BARRIER,
    IDLE       ... and a Begin waits             STARTING  StartGroup
    BARRIER,
    IDLE       ... and a stop was asked          LEAVING   Leave
    BARRIER    Begin                             STARTING  StopWaiting, Publish, StartGroup
    BARRIER    Halt                              IDLE      StopWaiting, Tell Ended
    BARRIER    BarrierElapsed                    LEAVING   Leave
    BARRIER    StopAsked, Conclude               LEAVING   StopWaiting, Leave
    IDLE       StopAsked, Conclude, JoinFailed   LEAVING   Leave
    LEAVING    Left, now or before               DONE      Publish, Finish
    any        Pause                             the same  Publish
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from elastic_aio.agent.groupmachine import LIVE, GroupMachine, Phase, why_stopped
from elastic_aio.agent.vocabulary import (
    Answer,
    BarrierElapsed,
    Begun,
    Effect,
    Finish,
    GroupGone,
    GroupStarted,
    Instructed,
    Join,
    JoinFailed,
    Leave,
    Left,
    News,
    Publish,
    StartBarrier,
    StartGroup,
    StopAsked,
    StopWaiting,
    Tell,
)
from elastic_aio.events import AttemptFailed, Event, Restarting
from elastic_aio.outcome import Failure, JobState
from elastic_aio.rendezvous.base import (
    Begin,
    Cause,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Instruction,
    Pause,
    Placement,
    Running,
    Succeeded,
)
from elastic_aio.rendezvous.bulletin import follows, formed, restarting
from elastic_aio.spec import LaunchSpec

__all__ = ["MemberMachine"]

_SUCCESS = "all workers have finished"
_CANNOT_KILL = "a process could not be killed"


class MemberMachine(GroupMachine):
    """Decides for one node of a job of many (see `GroupMachine`)."""

    def __init__(self, spec: LaunchSpec, nproc: int) -> None:
        """Begin with a node of `nproc` workers."""
        super().__init__(spec, nproc)
        self.round = -1
        self._newest = -1  # round of the last Begin or Halt
        self._halted = -1
        self._ended = -1
        self._restarts = 0
        self._next: Begin | None = None
        self._stop: StopAsked | None = None
        self._finish: Finish | None = None
        self._is_member = False
        self._told_failed = -1
        self._told_restart = -1

    def __repr__(self) -> str:
        return f"<MemberMachine {self.phase.value}, attempt {self.attempt}, round {self.round}>"

    # ------------------------------------------------------------ what it hears

    def _on_news(self, news: News) -> list[Effect]:
        match news:
            case Begun():
                return self._join()
            case StopAsked():
                return self._on_stop_asked(news)
            case Instructed(instruction):
                return [] if self._finish is not None else self._on_instructed(instruction)
            case JoinFailed(error):
                failed = Finish(JobState.FAILED, str(error), 1, self._restarts, error)
                return [] if self._finish is not None else self._end(failed)
            case Left():
                self._is_member = False
                return self._done() if self.phase is Phase.LEAVING else []

    def _join(self) -> list[Effect]:
        if self.phase is not Phase.NEW:
            raise self._impossible("a second beginning")
        self.phase = Phase.IDLE
        self._is_member = True
        return [Join()]

    def _on_instructed(self, instruction: Instruction) -> list[Effect]:
        match instruction:
            case Begin():
                return self._on_begin(instruction)
            case Halt():
                return self._on_halt(instruction)
            case Pause(cause):
                return [*self._publish_root(cause), *self._publish_restart(restarting(cause))]
            case Conclude(ending):
                return self._end(_finish_of(ending))

    def _on_begin(self, begin: Begin) -> list[Effect]:
        if begin.placement.round <= self._newest or self._stop is not None:
            return []
        self._newest = begin.placement.round
        self._next = begin
        why = "the nodes form another round" if begin.cause is None else begin.cause.why
        return [*self._publish_begin(begin), *self._make_way(why)]

    def _on_halt(self, halt: Halt) -> list[Effect]:
        if halt.round < self._newest or halt.round <= self._halted:
            return []
        self._newest = self._halted = halt.round
        self._next = None
        return self._make_way(halt.why)

    def _on_stop_asked(self, asked: StopAsked) -> list[Effect]:
        if self._finish is not None or self._stop is not None:
            return []
        if self.phase is Phase.BARRIER:
            why = why_stopped(asked)[0]
            return self._end(self._success(f"{_SUCCESS}; the others are not waited for: {why}"))
        self._stop = asked
        if self.phase is Phase.STOPPING and self._all_succeeded:
            return []  # it will be seen whether they have
        return self._end(self._stopped(asked))

    def _on_other_answer(self, answer: Answer) -> list[Effect]:
        if not isinstance(answer, BarrierElapsed) or self.phase is not Phase.BARRIER:
            return []
        self.phase = Phase.IDLE
        timeout = self._spec.rendezvous.exit_barrier_timeout
        others = f"others had not after {timeout:g} s (rendezvous.exit_barrier_timeout)"
        return self._end(self._success(f"{_SUCCESS} on this node; {others}"))

    # ---------------------------------------------------------------- the group

    def _on_group_started(self, started: GroupStarted) -> list[Effect]:
        if self.phase is not Phase.STARTING:
            return super()._on_group_started(started)
        return [Tell(Running(self.round)), *super()._on_group_started(started)]

    def _on_failing(self, why: str) -> list[Effect]:
        # First of all: the other nodes' workers wait for ours, in vain.
        return [Tell(Failing(self.round, why)), *self._stop_group(why)]

    def _make_way(self, why: str) -> list[Effect]:
        """Stop what runs; then do what was instructed last."""
        if self.phase in LIVE:
            return self._stop_group(why)
        if self.phase is Phase.STOPPING:
            return []
        return [*self._stop_waiting(), *self._go_on()]

    def _on_gone(self, gone: GroupGone) -> list[Effect]:
        self.phase = Phase.IDLE
        if self._finish is not None:
            return self._done()
        if self._all_succeeded and not gone.failures and self._halted < self.round:
            return [Tell(Succeeded(self.round)), *self._after_success()]
        telling = self._tell_ended(has_survivors=gone.has_survivors)
        if self._stop is not None:
            return [*telling, *self._end(self._stopped(self._stop))]
        return [*telling, *self._go_on()]

    def _after_success(self) -> list[Effect]:
        if self._stop is not None:
            return self._end(self._success(_SUCCESS))
        if self._next is not None:
            return self._go_on()
        self.phase = Phase.BARRIER
        return [StartBarrier(self.attempt, self._spec.rendezvous.exit_barrier_timeout)]

    def _tell_ended(self, *, has_survivors: bool) -> list[Effect]:
        final_why = _CANNOT_KILL if has_survivors else ""
        if self._start_failure is not None and self._start_failure.permanent:
            final_why = "another attempt could not start it either"
        code = self._exit_code_of_failure()
        ended = Ended(self.round, self._failures, bool(final_why), final_why, code, self._ran)
        self._ended = self.round
        if not has_survivors or self._newest == self.round:
            return [Tell(ended)]
        # What is to follow cannot be run here either.
        self._next, self._ended = None, self._newest
        return [Tell(ended), Tell(Ended(self._newest, is_final=True, final_why=final_why))]

    def _go_on(self) -> list[Effect]:
        """Do what was instructed last, now that nothing runs."""
        if self._next is not None:
            return self._begin(self._next.placement)
        self.phase = Phase.IDLE
        if self._halted <= self._ended:
            return []
        self._ended = self._halted
        return [Tell(Ended(self._halted))]

    def _begin(self, placement: Placement) -> list[Effect]:
        self._next = None
        self.round, self._restarts = placement.round, placement.restarts
        return self._start_group(StartGroup(placement.attempt, placement.restarts, placement))

    # ------------------------------------------------------------------ the end

    def _end(self, finish: Finish) -> list[Effect]:
        """Leave at once and stop what runs; finish when both are done."""
        self._finish, self._next = finish, None
        leaving: list[Effect] = [Leave(finish.why)] if self._is_member else []
        if self.phase in LIVE:
            signal = None if self._stop is None else self._stop.signal
            return [*leaving, *self._stop_group(finish.why, signal)]
        if self.phase is Phase.STOPPING:
            return leaving
        return [*self._stop_waiting(), *leaving, *self._done()]

    def _done(self) -> list[Effect]:
        """Finish, unless this node has still to leave; nothing runs."""
        finish = self._finish
        if finish is None:
            raise self._impossible("an end that nobody has decided")
        if self._is_member:
            self.phase = Phase.LEAVING
            return []
        self.phase = Phase.DONE
        failures = _merged(finish.failures, self._failures)
        told = self._publish_failed(self.attempt, failures)
        return [*told, replace(finish, failures=failures) if finish.failures else finish]

    def _stop_waiting(self) -> list[Effect]:
        return [StopWaiting()] if self.phase is Phase.BARRIER else []

    def _success(self, why: str) -> Finish:
        return Finish(JobState.SUCCEEDED, why, 0, self._restarts)

    def _stopped(self, asked: StopAsked) -> Finish:
        return Finish(JobState.STOPPED, *why_stopped(asked), self._restarts)

    # ------------------------------------------------------------------ telling

    def _publish_begin(self, begin: Begin) -> list[Effect]:
        placement, cause = begin.placement, begin.cause
        told: list[Effect] = []
        if cause is not None:
            told += self._publish_root(cause)
            told += self._publish_restart(follows(cause, placement))
        return [*told, Publish(formed(placement, placement.span.group_rank))]

    def _publish_restart(self, event: Event) -> list[Effect]:
        if isinstance(event, Restarting):
            if event.attempt <= self._told_restart:
                return []
            self._told_restart = event.attempt
        return [Publish(event)]

    def _publish_root(self, cause: Cause) -> list[Effect]:
        if cause.root is None:
            return []
        failed = cause.attempt - 1
        own = self._failures if failed == self.attempt else ()
        return self._publish_failed(failed, _merged((cause.root,), own))

    def _publish_failed(self, attempt: int, failures: tuple[Failure, ...]) -> list[Effect]:
        if not failures or attempt <= self._told_failed:
            return []
        self._told_failed = attempt
        return [Publish(AttemptFailed(attempt=attempt, root=failures[0], failures=failures))]


def _finish_of(ending: Ending) -> Finish:
    return Finish(
        ending.state,
        ending.why,
        ending.exit_code,
        ending.restarts,
        failures=ending.failures,
        is_rendezvous=ending.is_rendezvous,
    )


def _merged(job: Sequence[Failure], own: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the job's failures in their order, then what only this node has seen.

    Those of our own are not cut, as what comes from other nodes may be.
    """
    ours = {_who(one): one for one in own}
    return (*(ours.pop(_who(one), one) for one in job), *ours.values())


def _who(failure: Failure) -> tuple[str, int, int | None]:
    return failure.host, failure.rank, failure.pid
