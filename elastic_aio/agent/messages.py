"""What a machine hears (past tense) and what it says (imperative)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure, JobState
from elastic_aio.policy import Action, StopPlan

if TYPE_CHECKING:  # a job of one node pays for no rendezvous
    from elastic_aio.rendezvous.base import Instruction, Placement, Report

# ---------------------------------------------------------------- what it hears


class Begun(Struct, frozen=True):
    """The job may start."""


class GroupStarted(Struct, frozen=True):
    """All workers of an attempt have been spawned; `at` is in clock seconds."""

    attempt: int
    at: float


class StartFailed(Struct, frozen=True):
    """A worker of an attempt could not be spawned."""

    attempt: int
    message: str
    permanent: bool
    exit_code: int
    local_rank: int


class WorkerEnded(Struct, frozen=True):
    """A worker's leader has ended; a victim was asked to before."""

    attempt: int
    local_rank: int
    status: ExitStatus
    is_victim: bool


class GroupGone(Struct, frozen=True):
    """Nothing of an attempt is left; its failures are known, the root cause first.

    With `has_survivors` something is left after all, which could not be killed.
    """

    attempt: int
    at: float
    failures: tuple[Failure, ...]
    has_survivors: bool = False


class Decided(Struct, frozen=True):
    """The user's callback has answered."""

    attempt: int
    action: Action


class DecideRaised(Struct, frozen=True):
    """The user's callback has failed."""

    attempt: int
    error: BaseException


class DelayElapsed(Struct, frozen=True):
    """The wait before an attempt is over."""

    attempt: int


class StopAsked(Struct, frozen=True):
    """Somebody wants the job to end; `signal` is the one received, if one was."""

    reason: str
    signal: int | None = None


class JoinFailed(Struct, frozen=True):
    """This node cannot take part in the rendezvous."""

    error: Exception


class Instructed(Struct, frozen=True):
    """The rendezvous wants something of this node."""

    instruction: Instruction


class BarrierElapsed(Struct, frozen=True):
    """The wait for the other nodes, after the success of an attempt, is over."""

    attempt: int


class Left(Struct, frozen=True):
    """The other nodes know that this one takes no part any more."""


Answer = (
    GroupStarted
    | StartFailed
    | WorkerEnded
    | GroupGone
    | Decided
    | DecideRaised
    | DelayElapsed
    | BarrierElapsed
)
"""What carries its attempt: it may come when nobody wants it any more."""

News = Begun | StopAsked | JoinFailed | Instructed | Left

Happening = Answer | News

# ----------------------------------------------------------------- what it says


class StartGroup(Struct, frozen=True):
    """Spawn all workers; answer with `GroupStarted` or `StartFailed`.

    `placement` is the node's place among others; None when there are no others.
    """

    attempt: int
    restarts: int
    placement: Placement | None = None


class StopGroup(Struct, frozen=True):
    """Stop every process of the attempt by `plan`; answer with `GroupGone`.

    A spawning that is under way ends first.  With `leftovers_only` the workers
    are all done, and what they left behind is stopped.
    """

    attempt: int
    plan: StopPlan
    reason: str
    signal: int | None = None
    leftovers_only: bool = False


class AskDecision(Struct, frozen=True):
    """Ask the user's callback; answer with `Decided` or `DecideRaised`."""

    attempt: int
    failure: Failure


class Wait(Struct, frozen=True):
    """Wait `delay` seconds; answer with `DelayElapsed`."""

    attempt: int
    delay: float


class StopWaiting(Struct, frozen=True):
    """Give up the wait or the question that is under way; no answer is wanted."""


class Publish(Struct, frozen=True):
    """Tell the readers of events."""

    event: Event


class Finish(Struct, frozen=True):
    """The job is over: clean up, publish the end, let the callers go.

    `why` is the rule that ended it.  `error` is what the callers get in place of a
    result: what the user's callback raised, or why the rendezvous could not be joined.
    `failures` are the job's, wherever they were seen, the root cause first;
    `is_rendezvous` says that the nodes did not come together.
    """

    state: JobState
    why: str
    exit_code: int
    restarts: int
    error: BaseException | None = None
    failures: tuple[Failure, ...] = ()
    is_rendezvous: bool = False


class Join(Struct, frozen=True):
    """Take part in the rendezvous; answer with `JoinFailed` if that cannot be."""


class Tell(Struct, frozen=True):
    """Tell the other nodes what has become of this one's workers."""

    report: Report


class StartBarrier(Struct, frozen=True):
    """Wait `timeout` seconds for the other nodes; answer with `BarrierElapsed`."""

    attempt: int
    timeout: float


class Leave(Struct, frozen=True):
    """Leave the rendezvous, one that is being joined too; answer with `Left`."""

    why: str


Effect = (
    StartGroup
    | StopGroup
    | AskDecision
    | Wait
    | StopWaiting
    | Publish
    | Finish
    | Join
    | Tell
    | StartBarrier
    | Leave
)
