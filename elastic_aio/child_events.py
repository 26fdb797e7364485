"""The events of a supervisor about its children, which a job of one group does not load.

`child` is the path of the child, or of the supervisor itself.
"""

from __future__ import annotations

from msgspec.structs import replace

from elastic_aio.outcome import JobState
from elastic_aio.status import Event, Level, StatusTracker, is_below
from elastic_aio.text import counted


class ChildLaunched(Event, frozen=True, kw_only=True):
    """A start of a child begins: of a leaf, no process of it has been started yet."""

    generation: int
    """Number of this start, from 0."""
    entrypoint: str
    """What its workers run; of a group, the names of its children."""
    nproc_per_node: int
    """How many workers it has; 0 for a group."""
    max_restarts: int = 0
    log_dir: str | None = None
    """Directory of its logs; None if nothing is captured."""
    role: str = ""
    children: tuple[str, ...] = ()
    """The names of its children, if it is a group."""
    is_beside: bool = False
    """Whether the former start runs on until this one is ready: a reload."""

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        if self.is_beside:
            status = status.begin_beside(self.attempt)
        former = status.job
        job = replace(
            former,
            run_id=self.run_id,
            node=self.node,
            role=self.role,
            entrypoint=self.entrypoint,
            max_restarts=self.max_restarts,
            log_dir=self.log_dir,
            generation=self.generation,
            ready_since=None,
        )
        if former.started_at is None:
            status.begin(job, self.nproc_per_node, self.time)
        status.job, status.nproc = (
            replace(job, started_at=status.job.started_at),
            self.nproc_per_node,
        )
        status.enter("starting", self.time)
        for child in status.children.keys() - {*self.children}:  # of what it was before a reload
            del status.children[child]
        for child in self.children:
            status.at(child)

    def _text(self) -> str:
        what = counted(self.nproc_per_node, "worker") if self.nproc_per_node else "children"
        return f"start {self.generation}: {what} of {self.entrypoint}"


class ReadinessChanged(Event, frozen=True, kw_only=True):
    """A child is ready, or not any more: all of its workers, or all its essential children, are."""

    is_ready: bool

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        since = self.time if self.is_ready else None
        status.job = replace(status.job, ready_since=since)
        if self.is_ready and status.phase in ("waiting", "starting", "restarting"):
            status.enter("running", self.time)

    def _text(self) -> str:
        return "ready" if self.is_ready else "not ready any more"


class ChildRestarting(Event, frozen=True, kw_only=True):
    """A child is started again by its supervisor, as `why` says."""

    why: str
    delay: float
    """Seconds until its start, at the earliest: the children before it may have to be ready."""
    restarts: int
    """Restarts of the child so far, this restart included unless it was requested."""

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return "restarting, ", self.delay, " left"

    def _change(self, status: StatusTracker) -> None:
        status.restarts = self.restarts
        status.enter("restarting", self.time, self.why)

    def _text(self) -> str:
        after = f" in {self.delay:.3g} s" if self.delay else ""
        return f"restarting{after}: {self.why}"


class ChildFinished(Event, frozen=True, kw_only=True):
    """A child has ended, and is not started again unless that is requested."""

    state: JobState
    why: str
    exit_code: int
    is_essential: bool = True
    """Whether its failure fails the group."""

    @property
    def level(self) -> int:
        return Level.WARNING if self.state is JobState.FAILED else Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.enter(self.state.value, self.time, self.why)

    def _text(self) -> str:
        code = f" (exit code {self.exit_code})" if self.exit_code else ""
        return f"{self.state}{code}: {self.why}"


class ChildRemoved(Event, frozen=True, kw_only=True):
    """Nothing is left of a child that is no child of the group any more."""

    name: str
    """Its name in the group, which is `child`."""

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.children.pop(self.name, None)

    def _text(self) -> str:
        return f"{self.name} is removed"


def is_end_of(event: Event, child: str, *, or_start_above: bool = False) -> bool:
    """Return whether a child, or a group that it is in, has ended for good.

    `or_start_above`: or whether such a group is started again, with what it was made for.
    """
    is_start = or_start_above and isinstance(event, ChildLaunched) and event.child != child
    return (isinstance(event, ChildFinished) or is_start) and is_below(child, event.child)


class ReloadFailed(Event, frozen=True, kw_only=True):
    """A worker could not be replaced because of `why`: it runs on, and no further one is replaced.

    `child` is the worker.
    """

    why: str
    replaced: int = 0
    """How many workers were replaced before."""

    def _text(self) -> str:
        before = f", after {counted(self.replaced, 'worker')}" if self.replaced else ""
        return f"the reload has failed{before}: {self.why}; the old worker is kept"


class ReloadFinished(Event, frozen=True, kw_only=True):
    """All workers of `child` run the new spec."""

    replaced: int
    """How many workers were replaced."""

    _level = Level.INFO

    def _text(self) -> str:
        return f"reloaded, {counted(self.replaced, 'worker')} replaced"


class Scaled(Event, frozen=True, kw_only=True):
    """The number of the workers of `child` was changed."""

    former: int
    number: int

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.children_max = self.number
        for name in [*status.children]:
            if name.isdecimal() and int(name) >= self.number:
                del status.children[name]
        for number in range(self.number) if status.children else ():
            status.at(str(number))

    def _text(self) -> str:
        return f"scaled from {self.former} to {counted(self.number, 'worker')}"
