"""The inputs of an agent's state machine (past tense) and its effects (imperative)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure, JobOutcome
from elastic_aio.spec.restart import RestartAction
from elastic_aio.spec.stop import StopPlan

if TYPE_CHECKING:  # a job of one node pays for no rendezvous
    from elastic_aio.rendezvous.base import (
        ChangePending,
        Instruction,
        PeersFinished,
        Placement,
        Report,
    )

# ---------------------------------------------------------------------- inputs


class Start(Struct, frozen=True):
    """The runtime is open: the job may start."""


class GroupStarted(Struct, frozen=True):
    """All workers of an attempt have been spawned; `at` is in clock seconds."""

    attempt: int
    at: float


class StartFailed(Struct, frozen=True):
    """A worker of an attempt could not be spawned, or hangs in the kernel.

    `why_permanent` is the reason why no attempt follows a `permanent` failure.
    """

    attempt: int
    message: str
    permanent: bool
    exit_code: int
    local_rank: int
    why_permanent: str = "another attempt could not start it either"


class WorkerHung(Struct, frozen=True):
    """A worker of an attempt has missed a deadline, as `why` says."""

    attempt: int
    local_rank: int
    why: str


class WorkersAgreed(Struct, frozen=True):
    """All workers of an attempt that run agree to the pending change of this number."""

    attempt: int
    change: int


class WorkerEnded(Struct, frozen=True):
    """A worker has exited; a victim was signalled by a stop before.

    `is_lost_peer`: it has failed because another worker has ended.  `may_be_leaving`: a SIGTERM
    to all processes of the job may have ended it, which reaches the launcher a little later.
    """

    attempt: int
    local_rank: int
    status: ExitStatus
    is_victim: bool
    is_lost_peer: bool = False
    may_be_leaving: bool = False


class GroupStopped(Struct, frozen=True):
    """No process of an attempt is left; its failures are known, the root cause first.

    With `has_survivors` a process is left that could not be killed.  `first_success` is the rank
    of the first worker that exited with 0 by itself, and when, in Unix seconds.
    """

    attempt: int
    at: float
    failures: tuple[Failure, ...]
    has_survivors: bool = False
    first_success: tuple[int, float] | None = None


class DecisionMade(Struct, frozen=True):
    """The user's `restart.decide` has returned."""

    attempt: int
    action: RestartAction


class DecisionFailed(Struct, frozen=True):
    """The user's `restart.decide` has raised, or has not returned in time (None)."""

    attempt: int
    error: BaseException | None


class BackoffElapsed(Struct, frozen=True):
    """The time of a `BackOff` has passed."""

    attempt: int


class StopReceived(Struct, frozen=True):
    """A stop of the job was requested; `signal` is the signal received, if there was one.

    `plan` replaces the stop plan of the job.
    """

    reason: str
    signal: int | None = None
    plan: StopPlan | None = None


class RestartReceived(Struct, frozen=True):
    """Another attempt of the job was requested, because of `reason`."""

    reason: str


class JoinFailed(Struct, frozen=True):
    """This node cannot take part in the rendezvous."""

    error: Exception


class InstructionReceived(Struct, frozen=True):
    """The rendezvous has given this node an instruction."""

    instruction: Instruction


class BarrierTimedOut(Struct, frozen=True):
    """The other nodes have not finished an attempt in time, which succeeded here."""

    attempt: int


class LeftRendezvous(Struct, frozen=True):
    """This node is no member of the rendezvous any more."""


EffectResult = (
    GroupStarted
    | StartFailed
    | WorkerHung
    | WorkersAgreed
    | WorkerEnded
    | GroupStopped
    | DecisionMade
    | DecisionFailed
    | BackoffElapsed
    | BarrierTimedOut
)
"""Results of effects.  Each carries its attempt number, so that a late one can be dropped."""

Request = Start | StopReceived | RestartReceived | JoinFailed | InstructionReceived | LeftRendezvous

Input = EffectResult | Request

# --------------------------------------------------------------------- effects


class StartGroup(Struct, frozen=True):
    """Spawn all workers; the result is `GroupStarted` or `StartFailed`.

    `placement` is this node's place in the round; None in a job of one node.
    """

    attempt: int
    restarts: int
    placement: Placement | None = None


class StopGroup(Struct, frozen=True):
    """Stop every process of the attempt by `plan`; the result is `GroupStopped`.

    A worker that is being spawned is waited for first.  With `leftovers_only` all
    workers have exited, and only processes that they left behind are stopped.  `is_ordered`: the
    rendezvous wants it.
    """

    attempt: int
    plan: StopPlan
    reason: str
    signal: int | None = None
    leftovers_only: bool = False
    is_ordered: bool = False


class CallDecide(Struct, frozen=True):
    """Call the user's `restart.decide`; the result is `DecisionMade` or `DecisionFailed`."""

    attempt: int
    failure: Failure


class BackOff(Struct, frozen=True):
    """Wait `delay` seconds for an attempt, or before one is judged; then `BackoffElapsed`."""

    attempt: int
    delay: float


class CancelBackOff(Struct, frozen=True):
    """Cancel the `BackOff`, `CallDecide` or `StartBarrier` in progress; it has no result then."""


class Publish(Struct, frozen=True):
    """Append an event to the event log."""

    event: Event


class ShowChange(Struct, frozen=True):
    """Show the workers that their round is about to be replaced, or that it is not."""

    change: ChangePending


class NotePeers(Struct, frozen=True):
    """Begin the time in which the workers have to finish as those of other nodes have."""

    peers: PeersFinished


class Finish(Struct, frozen=True):
    """The job is over: release everything, publish the end, return to the callers.

    `error` is raised to the callers in place of a result: what the user's callback
    raised, or why the rendezvous could not be joined.
    """

    outcome: JobOutcome
    error: BaseException | None = None


class Join(Struct, frozen=True):
    """Join the rendezvous; the result is `JoinFailed` if that fails, else none."""


class SendReport(Struct, frozen=True):
    """Report to the rendezvous what happened to this node's workers."""

    report: Report


class StartBarrier(Struct, frozen=True):
    """Wait `timeout` seconds for the other nodes; the result is `BarrierTimedOut`.

    None: without limit.
    """

    attempt: int
    timeout: float | None


class Leave(Struct, frozen=True):
    """Leave the rendezvous, or stop joining it; the result is `LeftRendezvous`.

    `stays`: first wait, until the grace of the stop is over, for workers of other nodes that
    need this one.
    """

    why: str
    stays: bool = False


Effect = (
    StartGroup
    | StopGroup
    | CallDecide
    | BackOff
    | CancelBackOff
    | Publish
    | ShowChange
    | NotePeers
    | Finish
    | Join
    | SendReport
    | StartBarrier
    | Leave
)
