"""What the machine hears (past tense) and what it says (imperative)."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_aio.events import Event
from elastic_aio.outcome import ExitStatus, Failure, JobState
from elastic_aio.policy import Action, StopPlan

# ---------------------------------------------------------------- what it hears


@dataclass(frozen=True, slots=True)
class Begun:
    """The job may start."""


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """All workers of an attempt have been spawned; `at` is in clock seconds."""

    attempt: int
    at: float


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker of an attempt could not be spawned."""

    attempt: int
    message: str
    permanent: bool
    exit_code: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker's leader has ended; a victim was asked to before."""

    attempt: int
    local_rank: int
    status: ExitStatus
    is_victim: bool


@dataclass(frozen=True, slots=True)
class GroupGone:
    """Nothing of an attempt is left; its failures are known, the root cause first."""

    attempt: int
    at: float
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Decided:
    """The user's callback has answered."""

    attempt: int
    action: Action


@dataclass(frozen=True, slots=True)
class DecideRaised:
    """The user's callback has failed."""

    attempt: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class DelayElapsed:
    """The wait before an attempt is over."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the job to end; `signal` is the one received, if one was."""

    reason: str
    signal: int | None = None


Happening = (
    Begun
    | GroupStarted
    | StartFailed
    | WorkerEnded
    | GroupGone
    | Decided
    | DecideRaised
    | DelayElapsed
    | StopAsked
)

# ----------------------------------------------------------------- what it says


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Spawn all workers; answer with `GroupStarted` or `StartFailed`."""

    attempt: int
    restarts: int


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Stop every process of the attempt by `plan`; answer with `GroupGone`.

    A spawning that is under way ends first.  With `leftovers_only` the workers
    are all done, and what they left behind is stopped.
    """

    attempt: int
    plan: StopPlan
    reason: str
    signal: int | None = None
    leftovers_only: bool = False


@dataclass(frozen=True, slots=True)
class AskDecision:
    """Ask the user's callback; answer with `Decided` or `DecideRaised`."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait `delay` seconds; answer with `DelayElapsed`."""

    attempt: int
    delay: float


@dataclass(frozen=True, slots=True)
class StopWaiting:
    """Give up the wait or the question that is under way; no answer is wanted."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the readers of events."""

    event: Event


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: clean up, publish the end, let the callers go.

    `why` is the rule that ended it.  `error` is set when the user's callback
    failed: the callers get that.
    """

    state: JobState
    why: str
    exit_code: int
    restarts: int
    error: BaseException | None = None


Effect = StartGroup | StopGroup | AskDecision | Wait | StopWaiting | Publish | Finish
