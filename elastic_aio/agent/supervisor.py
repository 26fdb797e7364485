"""The state machine of a supervisor: children in an order, which it starts, restarts, stops; pure.

A child is a gang (a job of one `LaunchSpec`), independent workers, or a group; the latter two have
a supervisor of their own.  The children of independent workers are gangs of one worker each.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from elastic_aio.agent.machine import (
    Effect,
    PreemptionReceived,
    RestartReceived,
    Start,
    StopReceived,
)
from elastic_aio.events import Event
from elastic_aio.outcome import Failure, JobOutcome
from elastic_aio.spec.group import AnySpec
from elastic_aio.spec.stop import StopPlan

# ---------------------------------------------------------------------- inputs


class ChildResult(Struct, frozen=True):
    """What has happened to a start of a child; of another generation than the present, it is late.

    The generations of a child are its starts by the supervisor, from 0.
    """

    name: str
    generation: int


class ChildStarted(ChildResult, frozen=True):
    """All workers of the present attempt of a child run; of a group, all its children."""


class ChildReady(ChildResult, frozen=True):
    """A child that has a `ready`, or children, is ready: all of its workers are; or no more."""

    is_ready: bool = True


class LeafRestarted(ChildResult, frozen=True):
    """A leaf restarts itself, after `failures` or a request; `restarts` is its own count.

    `ChildStarted`, and `ChildReady` if it has a `ready`, follow again.
    """

    restarts: int
    failures: tuple[Failure, ...] = ()


class ChildEnded(ChildResult, frozen=True):
    """A child has ended with all that it started; also one that could not be opened at all.

    The last attempt `ran_for` so many seconds, with its `failures`, the root cause first.
    `has_progress`: a worker has reported a step in it.  `is_permanent`: no start can repair the
    failure, or a process is left that could not be killed.
    """

    outcome: JobOutcome
    failures: tuple[Failure, ...] = ()
    ran_for: float = 0.0
    has_progress: bool = False
    is_permanent: bool = False


class ChildRequest(Struct, frozen=True):
    """A request about a child; of the supervisor itself if its `name` is empty."""

    name: str


class ChildStopReceived(ChildRequest, frozen=True):
    """A child is to be stopped, and to stay so until a restart of it is requested."""

    reason: str
    signal: int | None = None
    plan: StopPlan | None = None


class ChildRestartReceived(ChildRequest, frozen=True):
    """A child is to be started again, or started if it does not run."""

    reason: str


class ReloadReceived(ChildRequest, frozen=True):
    """A child is to run a new spec, None for the same: workers and replicas one after the other."""

    spec: AnySpec | None = None


class ScaleReceived(ChildRequest, frozen=True):
    """A child is to have so many workers; a group of replicas, so many children."""

    number: int


class TimerElapsed(Struct, frozen=True):
    """The time of an `Arm` has passed."""

    name: str
    token: int


SupervisorInput = (
    Start
    | StopReceived
    | PreemptionReceived
    | RestartReceived
    | ChildResult
    | ChildRequest
    | TimerElapsed
)

# --------------------------------------------------------------------- effects

# And of `machine`: `Publish`, an event of the supervisor itself, and `Finish`.


class ChildEffect(Effect, frozen=True):
    """What is done to a generation of a child."""

    name: str
    generation: int


class StartChild(ChildEffect, frozen=True):
    """Start a child; the results are `ChildStarted`, perhaps `ChildReady`, and one `ChildEnded`.

    `restarts` counts the former restarts of the child, its own too.  A worker of independent
    workers has a `rank` among `world_size`; `spec` is then of them all, with a policy for each.
    """

    spec: AnySpec
    restarts: int
    rank: int | None = None
    world_size: int = 0


class StopChild(ChildEffect, frozen=True):
    """Stop a child by `plan`, or its own, which then starts with `signal`; then `ChildEnded`."""

    reason: str
    signal: int | None = None
    plan: StopPlan | None = None


class RestartChild(ChildEffect, frozen=True):
    """Have a live child start again by itself, which costs it no restart."""

    reason: str


class PreemptChild(ChildEffect, frozen=True):
    """Give a live child the notice of a preemption; then `ChildEnded`."""

    notice: PreemptionReceived


class ReloadChild(ChildEffect, frozen=True):
    """Hand a `ReloadReceived` with an empty name to the supervisor that a child is."""

    spec: AnySpec | None


class ScaleChild(ChildEffect, frozen=True):
    """Hand a `ScaleReceived` with an empty name to the supervisor that a child is."""

    number: int


class PublishOf(Effect, frozen=True):
    """Publish an event of a child."""

    name: str
    event: Event


class Arm(Effect, frozen=True):
    """Begin a time of `delay` seconds; then `TimerElapsed`.  It replaces a former one of `name`."""

    name: str
    token: int
    delay: float


class Disarm(Effect, frozen=True):
    """Cancel the `Arm` of a child."""

    name: str


class ReportReady(Effect, frozen=True):
    """The supervisor itself is ready: all of its essential children are; or no more.

    Its parent gets `ChildStarted` and `ChildReady`.
    """

    is_ready: bool


# ------------------------------------------------------------------ the machine


class ChildPhase(Enum):
    """What the supervisor waits for with a child.  The last three are ends."""

    WAITING = "waiting"
    """For the children that it is `after`, or for others of its restart to stop."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    BACKING_OFF = "backing off"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class ChildState(Struct, frozen=True):
    """A child as its supervisor sees it.

    `generation` is the latest, -1 before the first start; `restarts` counts its own too.
    """

    phase: ChildPhase
    spec: AnySpec
    generation: int
    restarts: int
    is_ready: bool
    is_essential: bool


class SupervisorMachine:
    """Decides about the children of a group or of independent workers; pure.

    After each `handle`, perform the effects in their order and hand in their results.  After
    `Finish` there are no more effects.
    """

    def __init__(self, spec: AnySpec, random: Callable[[], float], *, nproc: int = 1) -> None:
        """Begin with a group, or with the independent workers of a spec, `nproc` on this host.

        `random` gives numbers from 0 to 1, for the jitter of delays.
        """
        self.notice: PreemptionReceived | None = None

    def handle(self, received: SupervisorInput, now: float) -> list[Effect]:
        """Return the effects of an input in their order; `now` is in monotonic seconds."""
        raise NotImplementedError

    @property
    def children(self) -> dict[str, ChildState]:
        """The state of each child, in their order."""
        raise NotImplementedError

    def check(self, request: ChildRequest) -> None:
        """Raise SpecError for a request that no child can fulfil: before `handle`."""
        raise NotImplementedError
