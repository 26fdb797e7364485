"""The state machines of one host's group of workers, and of a job of one node; pure.

`multi_node` has the state machine of one node of several.  Inputs have names in the past tense,
effects are imperative.  LIVE is STARTING or RUNNING.

The group
=========

* One group at a time.  The first worker that fails by itself ends it, and so does the last worker
  that succeeds.  In both cases the group is stopped, because workers leave processes behind; it has
  ended when no process is left.
* A worker that has failed because it has lost a peer is no cause.  The group is stopped when a
  worker fails for another reason, when all have ended, or after `CAUSE_S`.  The workers of other
  nodes count as running: their failures stop this group too.
* Results carry their attempt.  A late result is dropped here, and only here.

::

    phase      input                          next       effects
    ---------  -----------------------------  ---------  ---------------------------
    STARTING   GroupStarted                   RUNNING
    LIVE       StartFailed, WorkerHung        STOPPING   StopGroup
    LIVE       WorkerEnded, a failure         STOPPING   StopGroup
    LIVE       ..., a lost peer, the first    the same   BackOff
    LIVE       BackoffElapsed                 STOPPING   StopGroup
    RUNNING    WorkerEnded, the last success  STOPPING   StopGroup (leftovers)
    STOPPING   GroupStopped                   (decided by the subclass)

A job of one node
=================

* A failed attempt is followed by another attempt if the restart policy grants it, after its delay.
  A permanent failure, which no attempt can repair, ends the job.
* A process that could not be killed is left behind, and no attempt follows.
* No failed attempt is followed by another once this node is excluded: the job has no other node.
* A requested restart stops the group.  Another attempt follows, which costs no restart, unless a
  worker fails by itself before the group has ended: that counts as a failure.  A request ends a
  back-off; where an attempt is ending already, it changes nothing.
* A stop ends the job in any phase.  The first fact counts: a job has failed if a worker has failed
  by itself before the stop, unless another attempt was granted, and has succeeded if all workers
  have.  What workers do after the stop is its effect, except an error that was recorded before.
* The same holds for a notice, but a failed attempt that another one could follow is preempted.
* The signal of a stop, or of a notice, may reach all processes of the job, the workers first.  So a
  failure by this very signal is no fact of its own.
* A notice of a preemption ends the job likewise, but live workers run on until all have ended, in
  any way, or have agreed, or its deadline has passed.  An earlier deadline replaces it, a later one
  does not.  There is none after a stop; a stop after it shortens it.

::

    phase        input                           next         effects
    -----------  ------------------------------  -----------  ----------------------------------
    NEW          Start                           STARTING     StartGroup
    STARTING     GroupStarted                    RUNNING
    LIVE         the end of the group            STOPPING     StopGroup, see above
    LIVE         StopReceived, RestartReceived   STOPPING     StopGroup
    LIVE         PreemptionReceived              the same     Publish, ShowChange, BackOff
    ..., then    PreemptionReceived, earlier     the same     CancelBackOff, and as before
    ..., then    WorkerEnded, the last           STOPPING     StopGroup (leftovers)
    ..., then    WorkersAgreed, BackoffElapsed   STOPPING     StopGroup
    STOPPING     GroupStopped, after a notice    DONE         Finish
    STOPPING     GroupStopped, all succeeded     DONE         Finish
    STOPPING     GroupStopped, a stop received   DONE         Finish
    STOPPING     GroupStopped, to be restarted   STARTING     StartGroup
    STOPPING     GroupStopped, failed            DECIDING     CallDecide; without it, as if DEFAULT
    DECIDING     DecisionMade, restart           BACKING_OFF  BackOff
    DECIDING     DecisionMade, without a delay   STARTING     StartGroup
    DECIDING     DecisionMade, give up           DONE         Finish
    DECIDING     DecisionFailed                  DONE         Finish
    BACKING_OFF  BackoffElapsed                  STARTING     StartGroup
    BACKING_OFF  RestartReceived                 STARTING     CancelBackOff, StartGroup
    DECIDING,
    BACKING_OFF  StopReceived,
                 PreemptionReceived              DONE         CancelBackOff, Finish
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.errors import InternalError
from elastic_aio.events import AttemptFailed, Event, PreemptionNotice, Restarting
from elastic_aio.outcome import (
    PREEMPTION_CHANGE,
    PREEMPTION_SLACK,
    SIGTERM,
    ExitStatus,
    Failure,
    JobOutcome,
    JobState,
    preempted,
    signal_name,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import CAUSE_S, RestartAction, RestartBudget
from elastic_aio.spec.stop import StopPlan

if TYPE_CHECKING:  # a job of one node pays for no rendezvous
    from elastic_aio.rendezvous.base import (
        Instruction,
        PeersFinished,
        Placement,
        Report,
    )

CANNOT_KILL = "a process could not be killed"
EXCLUDED = "the only node of the job is excluded"

# ---------------------------------------------------------------------- inputs


class Start(Struct, frozen=True):
    """The runtime is open: the job may start."""


class EffectResult(Struct, frozen=True):
    """The result of an effect.  A late result, of another attempt, is dropped."""

    attempt: int


class GroupStarted(EffectResult, frozen=True):
    """All workers of an attempt have been spawned; `at` is in clock seconds."""

    at: float


class StartFailed(EffectResult, frozen=True):
    """A worker of an attempt could not be spawned, or hangs in the kernel.

    `why_permanent` is the reason why no attempt follows a `permanent` failure.
    """

    message: str
    permanent: bool
    exit_code: int
    local_rank: int
    why_permanent: str = "another attempt could not start it either"


class WorkerHung(EffectResult, frozen=True):
    """A worker of an attempt has missed a deadline, as `why` says."""

    local_rank: int
    why: str


class WorkersAgreed(EffectResult, frozen=True):
    """All workers of an attempt that run agree to the pending change of this number."""

    change: int


class ProgressMade(EffectResult, frozen=True):
    """A worker of an attempt has reported a step, the first of the attempt."""


class ExclusionReceived(EffectResult, frozen=True):
    """This node is to take part in no further round, because of `why`.

    `seconds`: until it may again; None: the time that the spec says.
    """

    why: str
    seconds: float | None = None


class WorkerEnded(EffectResult, frozen=True):
    """A worker has exited; a victim was signalled by a stop before.

    `is_lost_peer`: it has failed because another worker has ended.
    """

    local_rank: int
    status: ExitStatus
    is_victim: bool
    is_lost_peer: bool = False


class GroupStopped(EffectResult, frozen=True):
    """No process of an attempt is left; its failures are known, the root cause first.

    `has_survivors`: a process is left that could not be killed.  `first_success` is the rank of the
    first worker that exited with 0 by itself, and when, in Unix seconds.  `ran_until`: the first
    failure, or the beginning of the stop; `ready_at`: when all workers with a `ready` were; in
    clock seconds as `at`, the end.
    """

    at: float
    failures: tuple[Failure, ...]
    has_survivors: bool = False
    first_success: tuple[int, float] | None = None
    ran_until: float | None = None
    ready_at: float | None = None


class DecisionMade(EffectResult, frozen=True):
    """The user's `restart.decide` has returned."""

    action: RestartAction


class DecisionFailed(EffectResult, frozen=True):
    """The user's `restart.decide` has raised `error`, or not returned in time, as `why` says."""

    why: str
    error: BaseException | None = None


class BackoffElapsed(EffectResult, frozen=True):
    """The time of a `BackOff` has passed."""


class StopReceived(Struct, frozen=True):
    """A stop of the job was requested; `plan` replaces the job's plan.

    `signal` replaces the first one of the plan.  If the launcher has `received` it, it begins the
    plan as it is (see `StopPlan.begun_by`).
    """

    reason: str
    signal: int | None = None
    plan: StopPlan | None = None
    received: bool = False

    def plan_of(self, own: StopPlan) -> StopPlan:
        """Return by which plan a job with its `own` plan is stopped."""
        plan = self.plan or own
        if self.signal is None:
            return plan
        return plan.begun_by(self.signal) if self.received else plan.starting_with(self.signal)


class PreemptionReceived(Struct, frozen=True):
    """The job is about to be preempted, because of `reason`: in `time_left` seconds, at `until`.

    `until` is in Unix seconds, `deadline` the same time in clock seconds.
    """

    reason: str
    until: float
    time_left: float
    deadline: float

    def is_earlier_than(self, former: PreemptionReceived | None) -> bool:
        """Whether there was no notice before, or this one leaves less time."""
        return former is None or self.deadline < former.deadline - PREEMPTION_SLACK


class RestartReceived(Struct, frozen=True):
    """Another attempt of the job was requested, because of `reason`."""

    reason: str


class JoinFailed(Struct, frozen=True):
    """This node cannot take part in the rendezvous."""

    error: Exception


class InstructionReceived(Struct, frozen=True):
    """The rendezvous has given this node an instruction."""

    instruction: Instruction


class BarrierTimedOut(EffectResult, frozen=True):
    """The other nodes have not finished an attempt in time, which succeeded here."""


class LeftRendezvous(Struct, frozen=True):
    """This node is no member of the rendezvous any more."""


Request = (
    Start
    | StopReceived
    | PreemptionReceived
    | RestartReceived
    | JoinFailed
    | InstructionReceived
    | LeftRendezvous
)

Input = EffectResult | Request

# --------------------------------------------------------------------- effects


class Effect(Struct, frozen=True):
    """What a driver performs."""


class StartGroup(Effect, frozen=True):
    """Spawn all workers; the result is `GroupStarted` or `StartFailed`.

    `placement` is this node's place in the round; None in a job of one node.
    """

    attempt: int
    restarts: int
    placement: Placement | None = None


class StopGroup(Effect, frozen=True):
    """Stop every process of the attempt by `plan`; the result is `GroupStopped`.

    A worker that is being spawned is waited for first.  `leftovers_only`: all workers have exited,
    and the processes that they left behind are stopped.  `is_ordered`: the rendezvous wants it.
    """

    attempt: int
    plan: StopPlan
    reason: str
    signal: int | None = None
    leftovers_only: bool = False
    is_ordered: bool = False


class CallDecide(Effect, frozen=True):
    """Call the user's `restart.decide`; the result is `DecisionMade` or `DecisionFailed`."""

    attempt: int
    failure: Failure


class BackOff(Effect, frozen=True):
    """Wait `delay` seconds for an attempt, or for a cause; then `BackoffElapsed`."""

    attempt: int
    delay: float


class CancelBackOff(Effect, frozen=True):
    """Cancel the `BackOff`, `CallDecide` or `StartBarrier` in progress; it has no result then."""


class Publish(Effect, frozen=True):
    event: Event


class ShowChange(Effect, frozen=True):
    """Show the workers that they will be stopped in `time_left` seconds, because of `why`.

    `time_left` None: no more.  `until` (else 0): by a preemption, in Unix seconds.
    """

    why: str = ""
    time_left: float | None = None
    number: int = 0
    until: float = 0.0


class NotePeers(Effect, frozen=True):
    """Begin the time in which the workers have to finish as the workers of other nodes have."""

    peers: PeersFinished


class Finish(Effect, frozen=True):
    """The job is over: release everything, publish the end, return to the callers.

    `error` is raised to the callers in place of a result: an exception of the user's callback, or
    the reason why the rendezvous could not be joined.
    """

    outcome: JobOutcome
    error: BaseException | None = None


class Join(Effect, frozen=True):
    """Join the rendezvous; the result is `JoinFailed` if that fails, else none."""


class SendReport(Effect, frozen=True):
    """Report to the rendezvous what happened to this node's workers."""

    report: Report


class StartBarrier(Effect, frozen=True):
    """Wait `timeout` seconds (None: no limit) for other nodes; the result is `BarrierTimedOut`."""

    attempt: int
    timeout: float | None


class Leave(Effect, frozen=True):
    """Leave the rendezvous, or stop joining it; the result is `LeftRendezvous`.

    `stays`: first wait, until the grace of the stop is over, for workers of other nodes that need
    this node.
    """

    why: str
    stays: bool = False


# ------------------------------------------------------------------ the group


class AgentPhase(Enum):
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

    After each `handle`, perform the effects in their order and hand in their results.  After
    `Finish` there are no more effects.
    """

    def __init__(self, spec: LaunchSpec, nproc: int) -> None:
        self.phase = AgentPhase.NEW
        self.attempt = 0
        self._spec = spec
        self._nproc = nproc
        self._started_at: float | None = None
        self._succeeded: set[int] = set()
        self._lost_peers = 0
        self._awaiting = ""  # the cause of this failure
        self._stop: StopReceived | None = None
        self.notice: PreemptionReceived | None = None
        self._has_notice = False  # the workers have it
        self._has_failed = False  # by itself: before a stop and a notice
        self._start_failure: StartFailed | None = None
        self._failures: tuple[Failure, ...] = ()
        self.uptime = 0.0
        """Seconds that the last attempt ran: from ready, or its start, to its first failure."""
        self.stop_time = 0.0
        """Seconds that its stop took."""
        self._stopped_at = 0.0
        self._story: list[tuple[AgentPhase, Input]] = []

    def handle(self, received: Input) -> list[Effect]:
        """Return the effects of an input in their order; InternalError for an impossible input."""
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
                if self.phase not in LIVE or self._has_notice:
                    return []
                self._has_failed = True
                return self._on_failing(why)
            case WorkersAgreed() if self._has_notice:
                is_agreed = self.phase in LIVE and result.change == PREEMPTION_CHANGE
                return self._on_notice_agreed() if is_agreed else []
            case BackoffElapsed() if self._awaiting:
                why, self._awaiting = self._awaiting, ""
                return self._on_failing(why)
            case GroupStopped():
                if self.phase is not AgentPhase.STOPPING:
                    raise self._impossible("the end of a group")
                self._failures = result.failures
                self._note_times(result)
                return self._on_group_stopped(result)
        return self._on_other_result(result)

    def _note_times(self, stopped: GroupStopped) -> None:
        self._stopped_at = stopped.at
        ran_until = stopped.at if stopped.ran_until is None else stopped.ran_until
        began = self._started_at if stopped.ready_at is None else stopped.ready_at
        self.uptime = 0.0 if began is None else max(0.0, ran_until - began)
        self.stop_time = stopped.at - ran_until

    def _on_group_started(self, started: GroupStarted) -> list[Effect]:
        self._started_at = started.at
        if self.phase is not AgentPhase.STARTING:
            return []
        self.phase = AgentPhase.RUNNING
        return [*self._show_notice(), *self._stop_when_all_succeeded()]

    def _on_worker_ended(self, ended: WorkerEnded) -> list[Effect]:
        if self.phase not in LIVE:
            return []
        if not ended.status.is_success:
            self._has_failed |= not self._has_notice
            why = f"local rank {ended.local_rank} failed ({ended.status})"
            is_loss = ended.is_lost_peer or self._has_notice
            return self._on_loss(why) if is_loss else self._on_failing(why)
        self._succeeded.add(ended.local_rank)
        if self._awaiting and self._have_all_ended:
            return self._on_failing(self._awaiting)
        return self._stop_when_all_succeeded()

    def _on_start_failed(self, failed: StartFailed) -> list[Effect]:
        self._start_failure = failed
        self._has_failed |= not self._is_ending
        return self._on_failing(failed.message) if self.phase in LIVE else []

    def _on_failing(self, why: str) -> list[Effect]:
        """Handle the first failure of a group, or the end of a notice."""
        return self._stop_group(why, leftovers_only=self._has_notice and self._have_all_ended)

    def _on_loss(self, why: str) -> list[Effect]:
        """Wait for the cause of the loss of a peer, if another worker may have it."""
        self._lost_peers += 1
        if self._have_all_ended:
            return self._on_failing(self._awaiting or why)
        if self._awaiting:
            return []
        self._awaiting = why
        return [BackOff(self.attempt, CAUSE_S)]

    def accepts(self, notice: PreemptionReceived) -> bool:
        """Whether a notice counts: the first one before a stop, or an earlier deadline."""
        is_open = self._stop is None and self.phase is not AgentPhase.DONE
        return is_open and notice.is_earlier_than(self.notice)

    def _give_notice(self, notice: PreemptionReceived) -> list[Effect]:
        """Publish a preemption; live workers have until its deadline to end."""
        self.notice, why, left = notice, notice.reason, notice.time_left
        effects: list[Effect] = [CancelBackOff()] if self._awaiting else []
        effects += [Publish(PreemptionNotice(attempt=self.attempt, why=why, time_left=left))]
        if self.phase not in LIVE:
            return effects
        self._has_notice, self._awaiting = True, "the job is preempted"
        return [*effects, *self._show_notice(), BackOff(self.attempt, left)]

    def _show_notice(self) -> list[Effect]:
        """Show the notice, if there is one, once all workers have been started."""
        if self.notice is None or self.phase is not AgentPhase.RUNNING:
            return []
        notice = self.notice
        return [ShowChange(notice.reason, notice.time_left, PREEMPTION_CHANGE, notice.until)]

    def _on_notice_agreed(self) -> list[Effect]:
        """Handle that all workers which run wait for nothing more."""
        return self._on_failing("all workers agree to the preemption")

    @property
    def _is_ending(self) -> bool:
        """Whether no attempt may follow."""
        return self._stop is not None or self.notice is not None

    @property
    def _is_effect(self) -> bool:
        """Whether the failures are the effect of a stop or a notice, or of its signal to all."""
        own = [one for one in self._failures if not one.is_victim]
        if not self._is_ending or any(one.error is not None for one in own):
            return False
        signals = {None if self._stop is None else self._stop.signal}
        if self.notice is not None:
            signals |= self._spec.preemption.signals
        return not self._has_failed or all(
            (one.status.shell_code or 0) - 128 in signals for one in own
        )

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
        self._has_failed = False
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

    def _stopped_outcome(self, restarts: int) -> JobOutcome:
        """Return the outcome of a job that a notice or a stop has ended."""
        if self.notice is not None:
            return preempted(self.notice.reason, restarts)
        if self._stop is None:
            raise self._impossible("a stop that was not requested")
        return JobOutcome(JobState.STOPPED, *why_stopped(self._stop), restarts)

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


# --------------------------------------------------------------- a job of one node


class SingleNodeMachine(AgentMachine):
    """Decides for a job of one node (see `AgentMachine`)."""

    def __init__(
        self,
        spec: LaunchSpec,
        nproc: int,
        random: Callable[[], float],
        *,
        waits_for_stop: bool = False,
        attempt: int = 0,
        restarts: int = 0,
        next_attempt: Callable[[int], int] = lambda former: former + 1,
    ) -> None:
        """Begin with `nproc` workers on this host.

        `random` gives numbers from 0 to 1, for the jitter of delays.  With `waits_for_stop` a
        worker that fails does not end the group; a stop does.  `attempt` is the number of the
        first attempt, which follows `restarts` restarts by a supervisor; `next_attempt` returns
        the number of the attempt that follows another one.
        """
        super().__init__(spec, nproc)
        self.attempt = attempt
        self._restarts_before = restarts
        self._next_attempt = next_attempt
        self.is_permanent = False
        """Whether no start of the job can repair its failure, or a process is left of it."""
        self.is_candidate = False
        """Whether it is to replace another start, and may not restart itself before that."""
        self._waits_for_stop = waits_for_stop
        self._budget = RestartBudget(spec.max_restarts, spec.restart, random)
        self._restart: RestartReceived | None = None
        self._exclusion = ""

    def __repr__(self) -> str:
        return f"<SingleNodeMachine {self.phase.value}, attempt {self.attempt}, {self._budget!r}>"

    @property
    def restarts(self) -> int:
        return self._budget.restarts

    @property
    def has_progress(self) -> bool:
        """Whether a worker has reported a step in the present attempt."""
        return self._budget.has_progress

    def _on_request(self, request: Request) -> list[Effect]:
        if isinstance(request, StopReceived):
            return self._on_stop_received(request)
        if isinstance(request, RestartReceived):
            return self._on_restart_received(request)
        if isinstance(request, PreemptionReceived):
            return self._on_preemption_received(request)
        if not isinstance(request, Start):
            raise self._impossible("a rendezvous")
        if self.phase is not AgentPhase.NEW:
            raise self._impossible("a second start")
        return self._start()

    def _on_other_result(self, result: EffectResult) -> list[Effect]:
        match result:
            case ProgressMade():
                self._budget.has_progress = True
            case ExclusionReceived(why=why):
                self._exclusion = why
            case DecisionMade() if self.phase is AgentPhase.DECIDING:
                return self._apply(result.action)
            case DecisionFailed() if self.phase is AgentPhase.DECIDING:
                return self._give_up(result.why, result.error)
            case BackoffElapsed() if self.phase is AgentPhase.BACKING_OFF:
                return self._start()
        return []

    def _start(self) -> list[Effect]:
        self._restart = None
        self._budget.begin_attempt()
        restarts = self._restarts_before + self._budget.restarts
        return self._start_group(StartGroup(self.attempt, restarts))

    def _on_stop_received(self, stop: StopReceived) -> list[Effect]:
        if self._stop is not None:
            return []
        self._stop = stop
        if self.phase in LIVE:
            plan = stop.plan_of(self._spec.stop)
            return self._stop_group(stop.reason, stop.signal, plan=plan)
        return [] if self.phase is AgentPhase.STOPPING else self._end_between()

    def _on_preemption_received(self, notice: PreemptionReceived) -> list[Effect]:
        if not self.accepts(notice):
            return []
        effects = self._give_notice(notice)
        is_between = self.phase in (AgentPhase.DECIDING, AgentPhase.BACKING_OFF)
        return [*effects, *self._end_between()] if is_between else effects

    def _end_between(self) -> list[Effect]:
        """End a job of which nothing runs: what has been decided about a failure stays."""
        if self.phase is AgentPhase.NEW:
            return self._finish_stopped()
        is_open = self.phase is AgentPhase.DECIDING
        ended = self._apply(RestartAction.DEFAULT) if is_open else self._finish_stopped()
        return [CancelBackOff(), *ended]

    def _on_restart_received(self, restart: RestartReceived) -> list[Effect]:
        if self.notice is not None:
            return []
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
        if self._has_notice:
            own = tuple(one for one in self._failures if one.reason and not one.is_victim)
            return [*self._report_failures(own), *self._finish_stopped()]
        if not stopped.failures:
            return self._finish_without_failure(has_survivors=stopped.has_survivors)
        if self._is_effect:
            return self._finish_stopped()
        self._budget.leave_out(self.stop_time)
        failed = self._report_failures(self._failures)
        if stopped.has_survivors:
            # It holds what the next attempt would need: memory, devices, ports.
            return [*failed, *self._give_up_for_good(CANNOT_KILL)]
        return [*failed, *self._after_failure(self._failures[0])]

    def _report_failures(self, failures: tuple[Failure, ...]) -> list[Effect]:
        if not failures:
            return []
        return [Publish(AttemptFailed(attempt=self.attempt, root=failures[0], failures=failures))]

    def _finish_without_failure(self, *, has_survivors: bool) -> list[Effect]:
        if self._all_succeeded:
            return self._finish(JobState.SUCCEEDED, "all workers have finished", 0)
        if self._is_ending or self._restart is None:
            return self._finish_stopped()
        if has_survivors:
            return self._give_up_for_good(CANNOT_KILL)
        self.attempt = self._next_attempt(self.attempt)
        restarting = Restarting(
            attempt=self.attempt, why=self._restart.reason, delay=0.0, restarts=self.restarts
        )
        return [Publish(restarting), *self._start()]

    def _after_failure(self, root: Failure) -> list[Effect]:
        if self._start_failure is not None and self._start_failure.permanent:
            return self._give_up_for_good(self._start_failure.why_permanent)
        if self.is_candidate:
            return self._give_up("it was to replace another start")
        if self._exclusion:
            return self._give_up_for_good(f"{EXCLUDED}: {self._exclusion}")
        is_asked = self._spec.restart.decide is not None and not self._is_ending
        if not is_asked or self._budget.is_exhausted(self.uptime):
            return self._apply(RestartAction.DEFAULT)
        self.phase = AgentPhase.DECIDING
        return [CallDecide(self.attempt, root)]

    def _apply(self, action: RestartAction) -> list[Effect]:
        root, now = self._failures[0], self._stopped_at
        decision = self._budget.decide(root, action, self.uptime, now)
        if not decision.restart:
            return self._give_up(decision.why)
        if action is RestartAction.EXCLUDE:
            return self._give_up(f"{EXCLUDED}: restart.decide returned EXCLUDE")
        if self._stop is not None:
            return self._give_up(f"no restart follows: {self._stop.reason}")
        if self.notice is not None:
            return self._finish_stopped()
        self._budget.record(now)
        self.attempt = self._next_attempt(self.attempt)
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

    def _give_up(self, why: str, error: BaseException | None = None) -> list[Effect]:
        return self._finish(JobState.FAILED, why, self._exit_code_of_failure(), error)

    def _give_up_for_good(self, why: str) -> list[Effect]:
        self.is_permanent = True
        return self._give_up(why)

    def _finish_stopped(self) -> list[Effect]:
        self.phase = AgentPhase.DONE
        return [Finish(self._stopped_outcome(self.restarts))]

    def _finish(
        self, state: JobState, why: str, exit_code: int, error: BaseException | None = None
    ) -> list[Effect]:
        self.phase = AgentPhase.DONE
        return [Finish(JobOutcome(state, why, exit_code, self._budget.restarts), error)]
