"""The state machine of a supervisor: children in an order, which it starts, restarts, stops; pure.

A child is a gang (a job of one `LaunchSpec`), independent workers, or a group; the latter two have
a supervisor of their own.  The children of independent workers are gangs of one worker each.
Inputs have names in the past tense, effects are imperative.  LIVE is STARTING or RUNNING;
SUCCEEDED, FAILED and STOPPED are ends.

A child
=======

* It is started when all children that it is `after` are ready, or have succeeded; one that is not
  essential may also have failed.  One that has a `ready`, and ends before it is so, has failed if
  others are after it.  With the strategy rest_for_one it is after the one before too.
* A gang that restarts on failure under one_for_one, and is after no other, restarts itself, and
  its failure is final; so does one of several nodes, or with a `decide`.  Others are restarted
  here, by the budget of their policy.
* A child that is restarted takes others along, as the strategy says: those that run are stopped in
  the reverse order, and none is started before all have ended; with one_for_all, neither in a
  back-off.  They pay nothing for that.  Those that have succeeded start again, unless they never
  restart.
* Each restart of an essential child after a failure counts for the window of the group, also
  those that a leaf makes.
* A child that a reload has made or changed, and that cannot be started, fails for itself: the group
  goes on, and the next reload starts it, also by the same spec.

::

    phase        input                             next         effects
    -----------  --------------------------------  -----------  -------------------------------
    WAITING      (its turn has come)               STARTING     StartChild
    STARTING     ChildStarted                      RUNNING
    LIVE         ChildReady                        RUNNING      (those that are after it)
    LIVE         LeafRestarted                     STARTING
    LIVE         ChildEnded, a restart follows     BACKING_OFF  ChildRestarting, Arm; StopChild of
                                                   or WAITING   others, as the strategy says
    LIVE         ChildEnded, none follows          an end       ChildFinished
    LIVE         ChildStopReceived                 STOPPING     StopChild
    LIVE         ChildRestartReceived, alone       the same     AskChild
    LIVE         ..., with others                  STOPPING     StopChild of all
    LIVE         (its turn to be stopped)          STOPPING     StopChild
    STOPPING     ChildEnded, stopped by request    STOPPED      ChildFinished
    STOPPING     ChildEnded, to be restarted       WAITING
    STOPPING     ChildEnded, it was removed        (none)       ChildRemoved
    BACKING_OFF  TimerElapsed                      WAITING
    BACKING_OFF  ChildRestartReceived              WAITING      Disarm
    BACKING_OFF,
    WAITING      ChildStopReceived                 STOPPED      Disarm, ChildFinished
    an end       ChildRestartReceived              WAITING      ChildRestarting

The group
=========

* It ends when a child of `ends_with` has ended for good, when an essential child has failed so,
  when all essential children have ended, or with a restart more than its window allows; and after
  a stop or a notice.  The first of these counts.
* When it ends, all children are stopped, each after those that are after it.  A stop by SIGKILL
  reaches all at once.
* Children with a notice of a preemption end by themselves; none is started any more.  When a child
  of `ends_with` has ended, or all essential children have, the others are stopped.
* After a stop, children that had begun to end by themselves before the stop still count: what ends
  later is stopped, whatever its code says.

A reload of workers or replicas
===============================

* One after the other: the new generation runs beside the old one, which is stopped when the new
  one is ready; without a `ready`, `SETTLED_AFTER_S` after its start.
* If the new one ends, restarts itself, or is not ready in time, it is stopped, the old one is kept,
  and the reload ends.  If the old one ends before, the new one takes its place.
* A worker that does not run has the new spec for its next start, once the reload has succeeded.
* A restart of several children ends a reload.  Another child is stopped, removed or added as usual.

::

    input                                    next       effects
    ---------------------------------------  ---------  -----------------------------------
    ReloadReceived, the last one is done     awaiting   StartChild, Arm
    ChildStarted, without a `ready`          settling   Arm
    ChildReady; TimerElapsed when settling   replacing  Disarm, StopChild of the old one
    ChildEnded of the old one                the next   (at the end) ReloadFinished
    ChildEnded, LeafRestarted, TimerElapsed  none       StopChild of the new one, ReloadFailed
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.agent import machine
from elastic_aio.child_events import (
    ChildFinished,
    ChildRemoved,
    ChildRestarting,
    ReloadFailed,
    ReloadFinished,
    Scaled,
)
from elastic_aio.errors import SpecError
from elastic_aio.events import Event, StopRequested
from elastic_aio.outcome import SIGKILL, Failure, JobOutcome, JobState, preempted
from elastic_aio.spec.group import (
    AnySpec,
    GroupSpec,
    check_reload,
    group_of,
    has_children,
    is_same_kind,
    ready_timeout,
    reports_ready,
    restart_ends_run,
    restart_limit,
    restarted_by_supervisor,
    scaled_to,
    size_of,
    spans_nodes,
    template_of,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import RestartAction, RestartBudget, RestartDecision, RestartPolicy
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import counted, did_you_mean

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

    The last attempt `ran_for` so many seconds until it failed, succeeded or was stopped, which is
    `since` seconds ago, with its `failures`, the root cause first.
    `has_progress`: a worker has reported a step in it.  `is_permanent`: no start can repair the
    failure, or a process is left that could not be killed.  `spec` is what it ran last, if a reload
    or a change of the scale has changed that.
    """

    outcome: JobOutcome
    failures: tuple[Failure, ...] = ()
    ran_for: float = 0.0
    since: float = 0.0
    has_progress: bool = False
    is_permanent: bool = False
    spec: AnySpec | None = None


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
    """A child is to run a new spec, None for the same: workers and replicas one after the other.

    `is_same`: the last reload has had this spec; what it has failed to change is changed.
    """

    spec: AnySpec | None = None
    is_same: bool = False


class ScaleReceived(ChildRequest, frozen=True):
    """A child is to have so many workers; a group of replicas, so many children."""

    number: int


class TimerElapsed(Struct, frozen=True):
    """The time of an `Arm` has passed; `answer` is the last one to a probe of a replacement."""

    name: str
    token: int
    answer: str = ""


# And of `machine`: `Start`, `StopReceived`, `PreemptionReceived` and `RestartReceived`.

# --------------------------------------------------------------------- effects

# And of `machine`: `Publish`, an event of the supervisor itself, and `Finish`.


class ChildEffect(machine.Effect, frozen=True):
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
    """Stop a child; then `ChildEnded`."""

    stop: machine.StopReceived


Asked = machine.RestartReceived | machine.PreemptionReceived | ReloadReceived | ScaleReceived


class AskChild(ChildEffect, frozen=True):
    """Hand a request in at a live child, as a user does; a notice has one `ChildEnded`."""

    request: Asked


class PublishOf(machine.Effect, frozen=True):
    """Publish an event of a child."""

    name: str
    event: Event


class Arm(machine.Effect, frozen=True):
    """Begin a time of `delay` seconds; then `TimerElapsed`.  It replaces a former one of `name`."""

    name: str
    token: int
    delay: float


class Disarm(machine.Effect, frozen=True):
    """Cancel the `Arm` of a child."""

    name: str


class ReportReady(machine.Effect, frozen=True):
    """The supervisor itself is ready: all of its essential children are; or no more.

    Its parent gets `ChildStarted` and `ChildReady`.
    """

    is_ready: bool


# ----------------------------------------------------------------- the children


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


ENDS = (ChildPhase.SUCCEEDED, ChildPhase.FAILED, ChildPhase.STOPPED)
"""Phases of a child that is not started again unless that is requested."""

LIVE_PHASES = (ChildPhase.STARTING, ChildPhase.RUNNING)

RELOADED = "a reload was requested"
FAILED_RELOAD = "its reload has failed"
TOO_EARLY = "it has ended before it was ready"

SETTLED_AFTER_S = 1.0
"""Seconds after its start when a new worker without a `ready` replaces the old one."""

_PHASES: Final = {
    JobState.SUCCEEDED: ChildPhase.SUCCEEDED,
    JobState.FAILED: ChildPhase.FAILED,
    JobState.STOPPED: ChildPhase.STOPPED,
    JobState.PREEMPTED: ChildPhase.STOPPED,
}


_Budget = tuple[str, RestartBudget | None]
"""When a child is restarted, and its budget unless it restarts itself."""


class _Fate(IntEnum):
    """What follows when a child that is to be stopped has ended; the greatest counts."""

    RESTART = 1
    SWEEP = 2
    """A restart together with others: each is started when all have ended."""
    STOP = 3
    REMOVE = 4
    END = 5


class ChildState:
    """A child as its supervisor sees it; only that changes it.

    `generation` is the latest, -1 before the first start; `retiring` ones are being stopped beside
    it.
    """

    def __init__(self, name: str, spec: AnySpec, made: _Budget) -> None:
        self.name = name
        self.phase = ChildPhase.WAITING
        self.generation = -1
        self.starts = 0
        self.is_up = False  # the present generation has not ended
        self.is_ready = False
        self.was_ready = False  # when the present generation has ended
        self.candidate: int | None = None
        self.retiring: set[int] = set()
        self.fate: _Fate | None = None
        self.stop = machine.StopReceived("")
        self.is_kept = False  # stopped, until its restart is requested
        self.is_permanent = False  # no start can repair its failure
        self.is_new = False  # made, or changed, by a reload, and not started since
        self.outcome = JobOutcome(JobState.STOPPED, "it was not started", 0)
        self.former_restarts = 0
        self.own_restarts = 0  # that a leaf has made in the present generation
        self.token = 0
        self.is_armed = False
        self.started_spec: AnySpec | None = None
        self.adopt(spec, made)

    def adopt(self, spec: AnySpec, made: _Budget, version: int = -1) -> None:
        """Take another spec and a new budget for the next start; `version` is that of a reload."""
        self.version = version
        self.when, self.budget = made
        self.take(spec)

    def take(self, spec: AnySpec) -> None:
        """Take another spec for the next start."""
        self.spec, self.start_spec = spec, _start_spec(spec, self.budget)

    @property
    def is_live(self) -> bool:
        return self.is_up or self.candidate is not None or bool(self.retiring)

    @property
    def has_failed_start(self) -> bool:
        """Whether it has ended since it could not be started as a reload wants."""
        return self.is_new and self.phase is ChildPhase.FAILED and not self.is_kept

    @property
    def is_repeatable(self) -> bool:
        """Whether it is started again with others once it has ended."""
        return self.when != "never" and not self.is_kept

    @property
    def is_due(self) -> bool:
        """Whether it is to be started, perhaps later."""
        return self.phase in (ChildPhase.WAITING, ChildPhase.BACKING_OFF)

    @property
    def restarts(self) -> int:
        """Restarts so far, its own too."""
        return self.former_restarts + self.own_restarts


def _start_spec(spec: AnySpec, budget: RestartBudget | None) -> AnySpec:
    """Return what a child is started with: a leaf whose supervisor has the budget restarts not."""
    if budget is None or isinstance(spec, GroupSpec):
        return spec
    return restarted_by_supervisor(spec)


class _Reload(Struct):
    """The replacement of workers or replicas, one after the other."""

    spec: AnySpec
    version: int
    child: AnySpec
    """The new spec of each."""
    number: int
    """How many there are in the end."""
    current: str | None = None
    """Whose worker is being replaced."""
    awaited: int | None = None
    """The generation that has to be ready."""
    is_settling: bool = False
    replaced: int = 0


# ------------------------------------------------------------------ the machine


class SupervisorMachine:
    """Decides about the children of a group or of independent workers; pure.

    After each `handle`, perform the effects in their order and hand in their results.  After
    `Finish` there are no more effects.
    """

    def __init__(self, spec: AnySpec, random: Callable[[], float]) -> None:
        """Begin with a group, or with the independent workers of a spec, which has their number.

        `random` gives numbers from 0 to 1, for the jitter of delays.
        """
        self.notice: machine.PreemptionReceived | None = None
        self.ending_at = 0.0
        """When the first of what ends the group has happened."""
        self._random = random
        self._now = 0.0
        self._effects: list[machine.Effect] = []
        self._children: dict[str, ChildState] = {}
        self._after: dict[str, tuple[str, ...]] = {}
        self._removed: dict[str, int] = {}  # the starts of former children
        self._waiting: dict[str, None] = {}
        self._to_stop: dict[str, None] = {}
        self._live: set[str] = set()
        self._swept: set[str] = set()  # that have to end before a child is started
        self._backing_off: set[str] = set()
        self._restarts_at: deque[float] = deque()
        self._version = 0
        self._reload: _Reload | None = None
        self.has_failed_reload = False
        """Whether not all workers or replicas run what the last reload was for."""
        self._stop: machine.StopReceived | None = None
        self._stopped_at = 0.0
        self._verdict: JobOutcome | None = None
        self._failed: list[ChildState] = []  # essential ones, while the group ends
        self._is_started = self._is_ending = self._is_done = self._was_ready = False
        self._take(spec)

    def __repr__(self) -> str:
        ended = sum(child.phase in ENDS for child in self._children.values())
        return f"<SupervisorMachine: {ended} of {len(self._children)} children have ended>"

    def _take(self, spec: AnySpec) -> None:
        """Take the children, the order and the limits of a spec; the present children stay."""
        self.spec = spec
        self._group = group = group_of(spec)
        self._window = group.restart_window
        limit = self._window.count if self._window else 0
        self._restarts_at = deque(self._restarts_at, maxlen=limit)
        present, self._children = self._children, {}
        for name, child in group.children.items():
            former = present.pop(name, None)
            self._children[name] = former or self._make(name, child)
        self._children |= present  # which are removed when they have ended
        self._places = {name: place for place, name in enumerate(group.order)}
        self._after = {name: self._after.get(name, ()) for name in present}
        previous: tuple[str, ...] = ()
        for name in group.order:
            self._after[name] = group.after.get(name, ())
            if group.strategy == "rest_for_one":
                self._after[name] += previous
                previous = (name,)
        self._dependents: dict[str, list[str]] = {name: [] for name in self._children}
        for name, after in self._after.items():
            for other in after:
                self._dependents.setdefault(other, []).append(name)

    def _make(self, name: str, spec: AnySpec) -> ChildState:
        self._waiting[name] = None
        child = ChildState(name, spec, self._budget_of(name, spec))
        child.starts = self._removed.pop(name, 0)
        child.is_new = self._is_started
        return child

    def _budget_of(self, name: str, spec: AnySpec) -> _Budget:
        """Return when a child is restarted, and its budget unless it restarts itself."""
        if isinstance(spec, GroupSpec):
            when, policy = spec.restart, RestartPolicy()
        else:
            when, policy = spec.restart.when, spec.restart
            is_own = when == "on-failure" and self._group.restarts_itself(name, spec)
            if is_own or policy.scope != "group":  # then the policy is that of its workers
                return when, None
        limit = restart_limit(spec)
        # A group that is not restarted has failed because of its child, and says so.
        if when == "never" or (isinstance(spec, GroupSpec) and not limit):
            return when, None
        return when, RestartBudget(limit, policy, self._random)

    # --------------------------------------------------------------- questions

    @property
    def children(self) -> dict[str, ChildState]:
        """The state of each child, in their order."""
        return {child.name: child for child in self._members}

    @property
    def is_wrapper(self) -> bool:
        """Whether its only child, without a name, is a job that is started again as a whole."""
        return "" in self._children

    @property
    def is_ending(self) -> bool:
        """Whether no child is started any more."""
        return self._is_ending

    @property
    def restarts(self) -> int:
        """Restarts of children after failures so far, their own too."""
        return sum(child.restarts for child in self._children.values())

    @property
    def is_permanent(self) -> bool:
        """Whether no start can repair the failure of a child that the end depends on."""
        return any(one.is_permanent for one in self._deciding)

    def check(self, request: ChildRequest) -> None:
        """Raise SpecError for a request that no child can fulfil: before `handle`."""
        known = [child.name for child in self._members]
        is_own = not request.name and request.name not in known
        if not is_own and request.name not in known:
            problem = f"must name a child{did_you_mean(request.name, known)}"
            raise SpecError("child", request.name, problem)
        spec = self.spec if is_own else self._children[request.name].spec
        changes = isinstance(request, ScaleReceived) or getattr(request, "spec", None) is not None
        if changes and not is_own and isinstance(self.spec, LaunchSpec):
            raise SpecError("child", request.name, "must be all workers, which have one spec")
        if isinstance(request, ScaleReceived):
            scaled_to(spec, request.number)
            if is_own and self._reload is not None:
                scaled_to(self._reload.spec, request.number)
        elif isinstance(request, ReloadReceived) and request.spec is not None:
            check_reload(spec, request.spec, is_whole=is_own)
        elif self._ends_run(None if is_own else self._children[request.name], request):
            problem = "cannot be started again: its run of several nodes ends for all of them"
            raise SpecError("child", request.name, problem)
        elif isinstance(request, ChildRestartReceived):
            self.check_order(None if is_own else [request.name])

    def check_order(self, names: Iterable[str] | None = None) -> None:
        """Raise SpecError if one of these would wait for a child that was stopped by request."""
        for child in self._members if names is None else [self._children[one] for one in names]:
            for name in () if child.is_kept else self._after[child.name]:
                other = self._children.get(name)
                if other is not None and other.is_kept:
                    problem = f"is after {name!r}, which was stopped: restart that first"
                    raise SpecError("child", child.name, problem)

    def _ends_run(self, child: ChildState | None, request: ChildRequest) -> bool:
        """Whether a request starts leaves of several nodes again, whose run is over then."""
        spec = self.spec if child is None else child.spec
        if isinstance(request, ReloadReceived):  # replicas are replaced
            return spans_nodes(spec) and template_of(spec) is not None
        if not isinstance(request, ChildRestartReceived):
            return False
        if child is None or (child.is_up and child.fate is None):
            return restart_ends_run(spec)
        return child.generation >= 0 and spans_nodes(spec)

    @property
    def _members(self) -> list[ChildState]:
        return [self._children[name] for name in self._group.children]

    @property
    def _deciding(self) -> list[ChildState]:
        """The children that the end of the group depends on."""
        members = self._members
        return [one for one in members if self._group.is_essential(one.name)] or members

    # ------------------------------------------------------------------ inputs

    def handle(self, received: Any, now: float) -> list[machine.Effect]:
        """Return the effects of an input in their order; `now` is in monotonic seconds."""
        if self._is_done:
            return []
        self._now, self._effects = now, []
        match received:
            case ChildResult():
                self._on_result(received)
            case TimerElapsed(name, token, answer):
                child = self._children.get(name)
                if child is not None and child.is_armed and child.token == token:
                    self._on_elapsed(child, answer)
            case ChildRequest():
                self._on_request(received)
            case machine.StopReceived():
                self._on_stop_received(received)
            case machine.PreemptionReceived():
                self._on_preemption_received(received)
            case machine.RestartReceived(reason):
                self._on_restart_received(reason)
            case machine.Start():
                self._is_started = True
        self._go_on()
        return self._effects

    def _go_on(self) -> None:
        """Do what has become possible: replace, stop, start and finish."""
        if not self._is_started and not self._is_ending:
            return
        self._replace_next()
        for name in [*self._to_stop]:
            if not self._is_held(name):
                self._stop_child(self._children[name])
        if not self._holds_starts:
            for name in sorted(self._waiting, key=self._places.__getitem__):
                child = self._children[name]
                if not child.is_live and all(map(self._is_released, self._after[name])):
                    self._start(child)
        if self._is_ending and not self._live:
            self._is_done = True
            self._emit(machine.Finish(self._verdict or self._outcome_of_stop()))
        elif (is_ready := self._is_ready) is not self._was_ready:
            self._was_ready = is_ready
            self._emit(ReportReady(is_ready))

    def _is_held(self, name: str) -> bool:
        """Whether a child that is to be stopped waits for those that are after it."""
        left, seen = [*self._dependents[name]], set[str]()
        while left:
            other = left.pop()
            child = self._children.get(other)
            if child is None or other in seen:
                continue
            if child.is_live and child.fate is not None:
                return True
            seen.add(other)
            left += self._dependents[other]
        return False

    @property
    def _holds_starts(self) -> bool:
        """Whether no child is started now: others of a common restart stop, or wait."""
        is_common = self._group.strategy == "one_for_all" and bool(self._backing_off)
        return self._is_ending or bool(self._swept) or is_common

    def _is_released(self, name: str) -> bool:
        """Whether those that are after a child may start."""
        child = self._children.get(name)
        if child is None or child.phase is ChildPhase.SUCCEEDED:
            return True
        if child.is_ready and child.fate is None:
            return True
        return child.phase is ChildPhase.FAILED and not self._group.is_essential(name)

    @property
    def _is_ready(self) -> bool:
        return not self._is_ending and all(
            child.is_ready or (child.phase is ChildPhase.SUCCEEDED and child.was_ready)
            for child in self._deciding
        )

    # ----------------------------------------------------- results of effects

    def _on_result(self, result: ChildResult) -> None:
        child, generation = self._children.get(result.name), result.generation
        if child is None:
            return
        is_present = child.is_up and generation == child.generation
        if not is_present and generation not in (child.candidate, *child.retiring):
            return  # it is late
        reload = self._reload
        expected = None if reload is None else (reload.current, reload.awaited)
        is_awaited = expected == (child.name, generation)
        match result:
            case ChildStarted():
                if is_present and child.phase in LIVE_PHASES:
                    child.phase, child.is_new = ChildPhase.RUNNING, False
                    child.is_ready = child.is_ready or not reports_ready(child.spec)
                if is_awaited and reload is not None and not reports_ready(reload.child):
                    reload.is_settling = True
                    self._arm(child, SETTLED_AFTER_S)
            case ChildReady(is_ready=is_ready):
                if is_present and child.phase in LIVE_PHASES:
                    child.phase, child.is_ready = ChildPhase.RUNNING, is_ready
                if is_awaited and is_ready:
                    self._promote(child)
            case LeafRestarted():
                if is_awaited and result.failures:
                    self._fail_reload(f"the new worker has failed: {result.failures[0].summary}")
                if is_present:
                    self._on_leaf_restarted(child, result)
            case ChildEnded():
                self._on_ended(child, result, is_present=is_present, is_awaited=is_awaited)

    def _on_leaf_restarted(self, child: ChildState, restarted: LeafRestarted) -> None:
        is_counted = restarted.restarts > child.own_restarts
        child.own_restarts = restarted.restarts
        if child.fate is not None:
            return
        child.phase, child.is_ready = ChildPhase.STARTING, False
        if is_counted and (why := self._count_restart(child)):
            failures = restarted.failures
            code = (failures[0].status.shell_code if failures else None) or 1
            self._give_up(JobOutcome(JobState.FAILED, why, code, failures=failures))

    def _on_ended(
        self, child: ChildState, ended: ChildEnded, *, is_present: bool, is_awaited: bool
    ) -> None:
        if child.candidate == ended.generation:
            child.candidate = None
        child.retiring.discard(ended.generation)
        if is_awaited:
            why = ended.failures[0].summary if ended.failures else ended.outcome.why
            self._fail_reload(f"the new worker has {ended.outcome.state}: {why}", has_ended=True)
        if is_present:
            self._on_present_ended(child, ended)
        if not child.is_live:
            self._live.discard(child.name)
            self._swept.discard(child.name)
            if child.fate is not None:
                self._settle(child)
        if self._stop is None:
            self._check_notice()
        self._note_replaced(child)

    def _on_present_ended(self, child: ChildState, ended: ChildEnded) -> None:
        if ended.spec is not None and child.spec is child.started_spec:
            child.take(ended.spec)
        spec = child.started_spec
        child.was_ready = child.is_ready or not (isinstance(spec, LaunchSpec) and spec.ready)
        child.is_up = child.is_ready = False
        child.is_permanent = ended.is_permanent
        child.former_restarts += max(child.own_restarts, ended.outcome.restarts)
        child.own_restarts = 0
        child.outcome = replace(ended.outcome, failures=ended.failures or ended.outcome.failures)
        if child.fate is not None:
            child.phase = _PHASES[ended.outcome.state]
            if self._stop is not None and self._now - ended.since >= self._stopped_at:
                child.phase = ChildPhase.STOPPED
            is_last = child.fate is _Fate.END and self._is_essential(child)
            if is_last and child.phase is ChildPhase.FAILED:
                self._failed.append(child)
        elif child.candidate is not None:  # which takes its place, ready or not
            child.generation, child.candidate = child.candidate, None
            child.is_up, child.phase = True, ChildPhase.STARTING
        else:
            self._judge(child, ended)

    def _judge(self, child: ChildState, ended: ChildEnded) -> None:
        """Decide what follows when a child has ended by itself."""
        is_success = ended.outcome.state is JobState.SUCCEEDED
        is_awaited = any(one in self._group.children for one in self._dependents[child.name])
        if is_early := is_success and is_awaited and not child.was_ready:
            child.outcome = JobOutcome(JobState.FAILED, TOO_EARLY, 1)
            ended = replace(ended, outcome=child.outcome)
        decision = self._may_follow(child, ended)
        if is_early and decision.why:
            decision = replace(decision, why=f"{decision.why}: {TOO_EARLY}")
        if decision.restart and (why := self._count_restart(child)):
            child.phase = ChildPhase.FAILED
            code = child.outcome.exit_code or 1
            self._give_up(replace(child.outcome, state=JobState.FAILED, why=why, exit_code=code))
        elif decision.restart and child.budget is not None:
            child.budget.record(self._now)
            child.budget.begin_attempt()
            child.former_restarts += 1
            self._announce(child, decision.why, decision.delay)
            self._sweep_with(child)
            self._schedule(child, decision.delay)
        else:
            child.phase = _PHASES[ended.outcome.state]
            if decision.why:
                child.outcome = replace(child.outcome, why=decision.why)
            self._end_child(child)

    def _may_follow(self, child: ChildState, ended: ChildEnded) -> RestartDecision:
        """Decide whether another start follows, as far as the child is concerned."""
        budget, state = child.budget, ended.outcome.state
        can_follow = state is JobState.FAILED and not ended.is_permanent
        can_follow = can_follow or (state is JobState.SUCCEEDED and child.when == "always")
        if budget is None or not can_follow:
            return RestartDecision(False, "")
        budget.has_progress = ended.has_progress
        budget.leave_out(ended.since)
        root = ended.failures[0] if ended.failures else None
        decision = budget.decide(root, RestartAction.DEFAULT, ended.ran_for, self._now)
        if not decision.restart or child.when != "always":
            return decision
        why = f"restart {budget.restarts + 1} (always): it has {state}"
        return RestartDecision(True, why, decision.delay)

    def _is_essential(self, child: ChildState) -> bool:
        """Whether the failure of a child fails the group; not its start by a reload."""
        return self._group.is_essential(child.name) and not child.is_new

    def _count_restart(self, child: ChildState) -> str:
        """Count a restart of a child; return why the group has failed if it is one too many."""
        window = self._window
        if window is None or not self._is_essential(child):
            return ""
        if window.is_exhausted(self._restarts_at, self._now):
            last, number = self._label(child) or "it", counted(window.count, "restart")
            return f"{last} has ended after {number} within {window.seconds:g} s (restart window)"
        self._restarts_at.append(self._now)
        return ""

    def _announce(self, child: ChildState, why: str, delay: float = 0.0) -> None:
        event = ChildRestarting(why=why, delay=delay, restarts=child.restarts)
        self._emit(PublishOf(child.name, event))

    def _sweep_with(self, child: ChildState) -> None:
        """Stop the other children that are started again with a child."""
        if self._group.strategy == "one_for_one":
            return
        self._fail_reload(f"{self._label(child)} restarts")
        order = [*self._group.order]
        if self._group.strategy == "rest_for_one" and child.name in order:
            order = order[order.index(child.name) :]
        for name in order:
            if name != child.name:
                self._sweep(self._children[name], f"{self._label(child)} restarts")
            elif child.is_live:  # its former worker, which was replaced
                self._swept.add(name)

    def _is_alone(self, child: ChildState) -> bool:
        """Whether no other child has to do with a restart of a child: it restarts in its place."""
        is_ordered = self._after[child.name] or self._dependents[child.name]
        is_local = isinstance(child.spec, GroupSpec) or child.spec.nnodes.maximum == 1
        return self._group.strategy == "one_for_one" and not (is_ordered and is_local)

    def _stop_and_start(self, child: ChildState, reason: str) -> None:
        """Have a child that runs stopped and started again, and others with it."""
        if self._group.strategy == "one_for_one":
            self._set_fate(child, _Fate.RESTART, machine.StopReceived(reason))
        else:
            self._sweep(child, reason)
            self._sweep_with(child)

    def _sweep(self, child: ChildState, reason: str) -> None:
        if child.is_live:
            self._swept.add(child.name)
        if child.is_up:
            self._set_fate(child, _Fate.SWEEP, machine.StopReceived(reason))
        elif child.phase is ChildPhase.SUCCEEDED and child.is_repeatable:
            self._schedule(child)

    def _schedule(self, child: ChildState, delay: float = 0.0) -> None:
        """Start a child when its turn comes, at the earliest after a delay."""
        if child.phase is ChildPhase.BACKING_OFF:
            self._backing_off.discard(child.name)
            self._disarm(child)
        if delay:
            child.phase = ChildPhase.BACKING_OFF
            self._backing_off.add(child.name)
            self._arm(child, delay)
        else:
            child.phase = ChildPhase.WAITING
            self._waiting[child.name] = None

    def _start(self, child: ChildState, spec: AnySpec | None = None) -> int:
        """Start a child, or its replacement by another spec; return the generation."""
        self._waiting.pop(child.name, None)
        generation, child.starts = child.starts, child.starts + 1
        if spec is None:
            child.generation, child.is_up, child.is_permanent = generation, True, False
            child.phase, child.is_ready = ChildPhase.STARTING, False
            child.started_spec, spec = child.spec, child.start_spec
        self._live.add(child.name)
        rank, size = None, 0
        if isinstance(self.spec, LaunchSpec):
            rank, size = int(child.name), len(self._group.children)
        self._emit(StartChild(child.name, generation, spec, child.restarts, rank, size))
        return generation

    # ------------------------------------------------------------------- stops

    def _set_fate(self, child: ChildState, fate: _Fate, stop: machine.StopReceived) -> None:
        """Have a child stopped when its turn comes, and say what follows."""
        is_stopping = child.phase is ChildPhase.STOPPING  # else a stop of the same kind shortens it
        if child.fate is not None and (child.fate > fate or (child.fate is fate and is_stopping)):
            return
        if child.is_due:
            self._waiting.pop(child.name, None)
            self._backing_off.discard(child.name)
            child.phase = ChildPhase.STOPPED
        child.fate, child.stop = fate, stop
        self._drop_new(child)
        if not child.is_live:
            self._settle(child)
            return
        if not is_stopping:
            self._to_stop[child.name] = None

    def _stop_child(self, child: ChildState) -> None:
        self._to_stop.pop(child.name, None)
        if child.is_up:
            child.phase, child.is_ready = ChildPhase.STOPPING, False
            self._emit(StopChild(child.name, child.generation, child.stop))

    def _settle(self, child: ChildState) -> None:
        """Go on with a child that was to be stopped, and of which nothing is left."""
        fate, child.fate = child.fate, None
        self._to_stop.pop(child.name, None)
        if fate in (_Fate.RESTART, _Fate.SWEEP):
            self._schedule(child)
        elif fate is _Fate.REMOVE:
            del self._children[child.name]
            self._removed[child.name] = child.starts
            self._emit(machine.Publish(ChildRemoved(name=child.name)))
            self._check_ends()
        elif fate is _Fate.STOP:
            if child.phase is not ChildPhase.SUCCEEDED:
                child.phase = ChildPhase.STOPPED
                child.outcome = JobOutcome(JobState.STOPPED, *machine.why_stopped(child.stop))
            self._end_child(child)

    def _end_child(self, child: ChildState) -> None:
        """Report a child that has ended and is not started again; the group may end with it."""
        outcome, is_essential = child.outcome, self._is_essential(child)
        event = ChildFinished(
            state=outcome.state,
            why=outcome.why,
            exit_code=outcome.exit_code,
            is_essential=is_essential,
        )
        self._emit(PublishOf(child.name, event))
        is_failure = outcome.state in (JobState.FAILED, JobState.PREEMPTED)
        is_end = child.name in self._group.ends_with and not child.has_failed_start
        if is_end or (is_essential and is_failure):
            self._give_up(self._labelled(child))
        else:
            self._check_ends()

    def _check_ends(self) -> None:
        """End the group when all children that matter have ended."""
        deciding = self._deciding
        if self._is_ending or any(one.phase not in ENDS or one.fate for one in deciding):
            return
        failed = [one for one in deciding if one.phase is ChildPhase.FAILED]
        is_one = template_of(self.spec) is not None  # a stopped worker has not done its part
        stopped = [one for one in deciding if is_one and one.phase is ChildPhase.STOPPED]
        decisive = [one for one in failed if self._group.is_essential(one.name)] or stopped
        is_success = any(one.phase is ChildPhase.SUCCEEDED for one in deciding)
        if not decisive and is_success and len(deciding) > 1:
            outcome = JobOutcome(JobState.SUCCEEDED, "all children have finished", 0)
        else:
            outcome = self._labelled((decisive or failed or deciding)[-1])
        self._give_up(outcome)

    def _give_up(self, verdict: JobOutcome) -> None:
        """End the group with this outcome: stop all children, in order."""
        self._verdict = replace(verdict, restarts=self.restarts)
        self._end(machine.StopReceived(f"the group has {verdict.state}: {verdict.why}"))

    def _end(self, stop: machine.StopReceived) -> None:
        self._is_ending, self._reload, self.ending_at = True, None, self.ending_at or self._now
        for child in [*self._children.values()]:
            if child.is_live or child.is_due:
                self._set_fate(child, _Fate.END, stop)

    def _on_stop_received(self, stop: machine.StopReceived) -> None:
        if self._stop is None and self._verdict is None:
            self._stop, self._stopped_at = stop, self._now
            if not self.is_wrapper:
                own = self.spec.stop if isinstance(self.spec, LaunchSpec) else None
                plan = str(stop.plan or own or "each child by its own plan")
                event = StopRequested(reason=stop.reason, plan=plan, signal=stop.signal)
                self._emit(machine.Publish(event))
            self._end(stop)
        if stop.signal == SIGKILL:  # also for those that are being stopped
            for child in self._children.values():
                self._kill_child(child, stop)

    def _check_notice(self) -> None:
        """End a notice once nothing is left of what the end of the group depends on."""
        deciding = self._deciding
        is_over = any(one.name in self._group.ends_with for one in deciding if not one.is_live)
        if self.notice is not None and (is_over or not any(one.is_live for one in deciding)):
            self._end(machine.StopReceived(self.notice.reason))

    def _kill_child(self, child: ChildState, stop: machine.StopReceived) -> None:
        child.stop = stop
        for generation in sorted(child.retiring):
            self._emit(StopChild(child.name, generation, stop))
        self._stop_child(child)

    def accepts(self, notice: machine.PreemptionReceived) -> bool:
        """Whether a notice counts: the first one before the end, or an earlier deadline."""
        is_open = not self._is_ending or (self.notice is not None and self._stop is None)
        return is_open and not self._is_done and notice.is_earlier_than(self.notice)

    def _on_preemption_received(self, notice: machine.PreemptionReceived) -> None:
        if not self.accepts(notice):
            return
        self.notice, self._is_ending, self._reload = notice, True, None
        for child in self._children.values():
            self._drop_new(child)
            if child.is_due:
                child.phase = ChildPhase.STOPPED
            elif child.is_up and child.phase in LIVE_PHASES and child.name not in self._to_stop:
                self._ask(child, notice)
            child.fate = _Fate.END if child.is_live else None
        self._waiting.clear()
        self._check_notice()

    def _outcome_of_stop(self) -> JobOutcome:
        """Return the outcome of a group that a notice or a stop has ended."""
        restarts, deciding = self.restarts, self._deciding
        if self.notice is not None:
            return preempted(self.notice.reason, restarts)
        ended = [one for one in deciding if one.name in self._group.ends_with]
        is_end = (ChildPhase.SUCCEEDED, ChildPhase.FAILED)
        ended = [one for one in ended if one.phase in is_end and not one.has_failed_start]
        if found := ended or self._failed:
            return replace(self._labelled(found[0]), restarts=restarts)
        if all(child.phase is ChildPhase.SUCCEEDED for child in deciding):
            return JobOutcome(JobState.SUCCEEDED, "all children have finished", 0, restarts)
        stop = self._stop or machine.StopReceived("")
        return JobOutcome(JobState.STOPPED, *machine.why_stopped(stop), restarts)

    # ---------------------------------------------------------------- requests

    def _on_request(self, request: ChildRequest) -> None:
        if request.name in self._group.children:
            self._on_request_of(self._children[request.name], request)
            return
        match request:
            case _ if request.name or self._is_ending:
                return
            case ChildStopReceived(_, reason, signal, plan):
                self._on_stop_received(machine.StopReceived(reason, signal, plan))
            case ChildRestartReceived(_, reason):
                self._on_restart_received(reason)
            case ReloadReceived(_, spec, is_same):
                self._reload_all(spec, is_same=is_same)
            case ScaleReceived(_, number):
                former = len(self._members)
                self._scale(number)
                self._emit(machine.Publish(Scaled(former=former, number=number)))

    def _on_request_of(self, child: ChildState, request: ChildRequest) -> None:
        if isinstance(request, ChildStopReceived):
            child.is_kept = True
            stop = machine.StopReceived(request.reason, request.signal, request.plan)
            if child.is_live or child.is_due:
                self._set_fate(child, _Fate.STOP, stop)
            if stop.signal == SIGKILL and child.is_live:
                self._kill_child(child, stop)
        elif self._is_ending:
            return
        elif isinstance(request, ChildRestartReceived):
            self._restart_by_request(child, request.reason)
        elif isinstance(request, ReloadReceived):
            self._reload_child(child, request.spec)
        elif isinstance(request, ScaleReceived):
            self._scale_child(child, request)

    def _scale_child(self, child: ChildState, request: ScaleReceived) -> None:
        spec, has_own = scaled_to(child.spec, request.number), has_children(child.spec)
        if has_own and child.is_up and child.fate is None:
            self._ask(child, ScaleReceived("", request.number))
            return
        scaled = Scaled(former=size_of(child.spec), number=request.number)
        if has_own:
            child.take(spec)
        elif spec != child.spec:
            self._reload_child(child, spec)
        self._emit(PublishOf(child.name, scaled))

    def _restart_by_request(self, child: ChildState, reason: str) -> None:
        is_new = self._reload is not None and self._reload.current == child.name
        child.is_kept = False
        if child.fate is _Fate.STOP:
            child.fate = _Fate.RESTART
        elif child.fate is not None or is_new or child.phase is ChildPhase.WAITING:
            return  # it is started anyway
        elif not child.is_up:
            self._begin_anew(child, reason)
        elif self._is_alone(child):
            self._ask(child, machine.RestartReceived(reason))
        else:
            self._announce(child, reason)
            self._stop_and_start(child, reason)

    def _begin_anew(self, child: ChildState, reason: str) -> None:
        """Start a child that does not run, with a new budget if it has ended."""
        if child.budget is not None and child.phase in ENDS:
            child.budget.clear()
        self._announce(child, reason)
        self._schedule(child)

    def _on_restart_received(self, reason: str) -> None:
        if self._is_ending:
            return
        is_in_order = self._group.after or self._group.strategy != "one_for_one"
        if is_in_order or self._reload is not None:
            self._fail_reload(reason)
        for child in self._members:
            is_over = child.phase in (ChildPhase.SUCCEEDED, ChildPhase.FAILED)
            if child.phase is ChildPhase.BACKING_OFF:
                self._schedule(child)
            elif is_over and not child.is_up and child.is_repeatable:
                self._begin_anew(child, reason)
            elif child.is_up and child.fate is None and not is_in_order:
                self._ask(child, machine.RestartReceived(reason))
            if is_in_order:
                self._sweep(child, reason)

    # ------------------------------------------------------- reloads and scale

    def _reload_child(self, child: ChildState, spec: AnySpec | None, is_same: bool = False) -> None:
        """Have a child run another spec, or start again by its own; see `ReloadReceived`."""
        is_live = child.is_up and child.fate is None
        is_own = has_children(child.spec) and (spec is None or is_same_kind(child.spec, spec))
        if is_live and is_own:
            self._ask(child, ReloadReceived("", spec, is_same))
            return
        has_failed = child.has_failed_start
        if is_same and not has_failed:
            return
        child.is_new = True
        if is_live and spec is None and self._is_alone(child):
            self._ask(child, machine.RestartReceived(RELOADED))
        else:
            was_replaceable = has_children(child.spec) and template_of(child.spec) is not None
            if spec is not None:
                child.adopt(spec, self._budget_of(child.name, spec))
            if is_live:
                self._stop_and_start(child, RELOADED)
            elif child.phase is ChildPhase.BACKING_OFF or has_failed:
                self._schedule(child)
            if was_replaceable and not is_live:  # there is nothing to replace
                self._emit(PublishOf(child.name, ReloadFinished(replaced=0)))

    def _reload_all(self, spec: AnySpec | None, *, is_same: bool) -> None:
        target = self.spec if spec is None else spec
        if (child := template_of(target)) is not None and template_of(self.spec) is not None:
            if is_same and not self.has_failed_reload:
                return
            self._fail_reload("another reload was requested")
            self._version += 1
            for one in self._members if spec is not None else ():
                if one.spec == child:  # it runs by this description
                    one.version = self._version
            number = len(group_of(target).children)
            self._reload = _Reload(target, self._version, child, number)
            self.has_failed_reload = False
        elif spec is None:
            for one in self._members:
                self._reload_child(one, None)
        else:
            self._change_children(spec)

    def _change_children(self, spec: AnySpec) -> None:
        """Change the children of a group to those of another: only those that differ restart."""
        former = self._group
        self._take_members(spec, "it was removed")
        for child in self._members:
            new = self._group.children[child.name]
            is_same = new == former.children.get(child.name, new)
            is_same = is_same and former.strategy == self._group.strategy
            self._reload_child(child, new, is_same=is_same)
        self._check_ends()

    def _take_members(self, spec: AnySpec, reason: str) -> None:
        """Take the children of a spec; those that it lacks are stopped."""
        self._take(spec)
        for child in [*self._children.values()]:
            if child.name not in self._group.children:
                self._set_fate(child, _Fate.REMOVE, machine.StopReceived(reason))
            elif child.fate is _Fate.REMOVE:
                child.fate = _Fate.RESTART

    def _scale(self, number: int) -> None:
        spec = scaled_to(self.spec, number)
        if self._reload is not None:
            self._reload.spec = scaled_to(self._reload.spec, number)
            self._reload.child = template_of(self._reload.spec) or self._reload.child
            self._reload.number = number
        self._take_members(spec, f"scaled to {counted(number, 'worker')}")
        for child in self._members if isinstance(spec, LaunchSpec) else ():
            child.take(scaled_to(child.spec, number))

    def _replace_next(self) -> None:
        """Start the replacement of the next worker, if the last is done; or end the reload."""
        reload = self._reload
        if reload is None or reload.current is not None or self._holds_starts:
            return
        for child in self._members[: reload.number]:
            if child.version != reload.version and child.is_up and child.fate is None:
                if child.retiring:
                    return  # of the replacement that a former reload has given up
                reload.current = child.name
                budget = self._budget_of(child.name, reload.child)[1]
                spec = _start_spec(reload.child, budget)
                child.candidate = reload.awaited = self._start(child, spec)
                self._arm(child, ready_timeout(reload.child))
                return
        self._reload = None
        for child in self._members:  # those that do not run
            if child.version != reload.version:
                child.adopt(reload.child, self._budget_of(child.name, reload.child), reload.version)
                if child.phase is ChildPhase.BACKING_OFF:
                    self._schedule(child)
        self._emit(machine.Publish(ReloadFinished(replaced=reload.replaced)))
        self.spec, former = reload.spec, len(self._members)
        self._scale(reload.number)
        if reload.number != former:
            self._emit(machine.Publish(Scaled(former=former, number=reload.number)))

    def _promote(self, child: ChildState) -> None:
        """Put the replacement in the place of the old worker, which is stopped."""
        reload = self._reload
        if reload is None:
            return
        if child.candidate is not None:
            if child.is_up:
                child.retiring.add(child.generation)
                stop = machine.StopReceived("it is replaced")
                self._emit(StopChild(child.name, child.generation, stop))
            child.generation, child.candidate = child.candidate, None
            child.former_restarts += child.own_restarts
            child.own_restarts = 0
        child.is_up, child.is_ready, child.phase = True, True, ChildPhase.RUNNING
        child.adopt(reload.child, self._budget_of(child.name, reload.child), reload.version)
        child.started_spec = child.spec
        reload.awaited, reload.is_settling = None, False
        self._disarm(child)
        self._note_replaced(child)

    def _note_replaced(self, child: ChildState) -> None:
        reload = self._reload
        is_current = reload is not None and reload.current == child.name
        if reload is not None and is_current and reload.awaited is None and not child.retiring:
            reload.current = None
            reload.replaced += 1

    def _fail_reload(self, why: str, *, has_ended: bool = False) -> None:
        """End a reload; the workers that it has replaced stay so."""
        reload, self._reload = self._reload, None
        if reload is None:
            return
        self.has_failed_reload = True
        child = self._children.get(reload.current or "")
        event = ReloadFailed(why=why, replaced=reload.replaced)
        if child is None:
            self._emit(machine.Publish(event))
            return
        self._emit(PublishOf(child.name, event))
        self._retire_new(child, FAILED_RELOAD)
        self._disarm(child)
        if reload.awaited == child.generation and not has_ended:  # the old one has ended before
            self._stop_and_start(child, FAILED_RELOAD)

    def _drop_new(self, child: ChildState) -> None:
        """Stop the replacement of a worker that is itself to be stopped."""
        reload = self._reload
        if reload is not None and reload.current == child.name and reload.awaited is not None:
            reload.current = reload.awaited = None
        self._retire_new(child, child.stop.reason)
        self._disarm(child)

    def _retire_new(self, child: ChildState, reason: str) -> None:
        if child.candidate is not None:
            self._emit(StopChild(child.name, child.candidate, machine.StopReceived(reason)))
            child.retiring.add(child.candidate)
            child.candidate = None

    # ------------------------------------------------------------------- parts

    def _on_elapsed(self, child: ChildState, answer: str) -> None:
        child.is_armed, reload = False, self._reload
        if child.phase is ChildPhase.BACKING_OFF:
            self._schedule(child)
        elif reload is not None and reload.current == child.name and reload.awaited is not None:
            if reload.is_settling:
                self._promote(child)
            else:
                why = f"the new worker is not ready after {ready_timeout(reload.child):g} s"
                self._fail_reload(f"{why}, last probe: {answer}" if answer else why)

    def _arm(self, child: ChildState, delay: float) -> None:
        child.token += 1
        child.is_armed = True
        self._emit(Arm(child.name, child.token, delay))

    def _disarm(self, child: ChildState) -> None:
        if child.is_armed:
            child.is_armed = False
            self._emit(Disarm(child.name))

    def _emit(self, effect: machine.Effect) -> None:
        self._effects.append(effect)

    def _ask(self, child: ChildState, request: Asked) -> None:
        self._emit(AskChild(child.name, child.generation, request))

    def _label(self, child: ChildState) -> str:
        return f"rank {child.name}" if isinstance(self.spec, LaunchSpec) else child.name

    def _labelled(self, child: ChildState) -> JobOutcome:
        """Return the outcome of a child as that of the group."""
        outcome, label = child.outcome, self._label(child)
        return replace(outcome, why=f"{label}: {outcome.why}") if label else outcome
