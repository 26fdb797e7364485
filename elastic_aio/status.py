"""The status of the job on this node: one value for all views, and how an event may change it.

Pure: a `StatusTracker` takes in the events of one agent in their order; times are from the events
and the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.outcome import Goodput, ResourceUsage
from elastic_aio.text import printable

PHASES: Final = (
    "waiting",
    "starting",
    "forming",
    "standby",
    "excluded",
    "running",
    "stopping",
    "restarting",
    "succeeded",
    "failed",
    "stopped",
    "preempted",
)
"""What the job on this node is doing.  The last four are final: the states of `JobState`."""

WORKER_STATES: Final = ("running", "succeeded", "failed", "stopped")
"""States of a worker; "stopped" by the supervisor."""


_FINAL: Final = PHASES[-4:]


def is_below(path: str, child: str) -> bool:
    """Return whether a path is that of a child or of what is below it."""
    return not child or f"{path}/".startswith(f"{child}/")


class WorkerStatus(Struct, frozen=True):
    """A worker of the latest attempt: its process `pid`, and its `state`.

    `rank` is the global rank, `local_rank` the rank on this node.  `stdout_path` and `stderr_path`
    are the files of its output; None for a stream that is in no file.
    """

    rank: int
    local_rank: int
    pid: int
    state: str = "running"
    """One of `running`, `succeeded`, `failed` and `stopped` (by the supervisor)."""
    since: float = 0.0
    """Unix seconds since when it is in this state."""
    status: str = ""
    """How it has exited, as in `exit code 1`; empty while it runs."""
    usage: ResourceUsage | None = None
    """What it has used; None while it runs, unless `Agent.status` was asked for it."""
    heartbeat: float | None = None
    """Unix seconds of its last message; None for a worker that sends none."""
    reported: str = ""
    """Its last step, phase and status, as its messages say."""
    stdout_path: str | None = None
    stderr_path: str | None = None
    step: str = ""
    """Its last step; empty without one."""
    step_since: float | None = None
    """Unix seconds at which that step began."""
    rss_bytes: int | None = None
    """Bytes of memory that are resident now; None unless it runs and `usage` was asked for."""
    ready_since: float | None = None
    """Unix seconds since when it is ready, by its message or its probe; None before."""
    probe: str = ""
    """The last answer to its probe; empty without one."""


def _are_ready(workers: Iterable[WorkerStatus]) -> bool:
    return all(one.ready_since is not None for one in workers if one.state == "running")


class JobStatus(Struct, frozen=True, kw_only=True):
    """What a job is doing on one node: returned by `Agent.status`, shown by `/status` and the CLI.

    `run_id`, `node`, `role`, `entrypoint`, `max_restarts`, `awaits_ready`, `agent_pid` and
    `log_dir` are from `JobStarted`; `group_rank`, `group_world_size` and `world_size` from the
    latest `RoundFormed`; `attempt` is the latest, and `goodput` says what its time went into.  The
    children of a tree have values of their own.
    """

    run_id: str = ""
    node: str = ""
    """Name of the host."""
    role: str = ""
    entrypoint: str = ""
    agent_pid: int | None = None
    log_dir: str | None = None
    seq: int = -1
    """Number of the last event that is taken into account: a cursor for `Agent.events`."""
    phase: str = "starting"
    """One of `waiting` (a child, for those that it is started after), `starting`, `forming`
    (waiting for nodes), `standby`, `excluded`, `running`, `stopping`, `restarting`, and at the end
    `succeeded`, `failed`, `stopped` and `preempted`."""
    since: float = 0.0
    """Unix seconds since when the job is in this phase."""
    reason: str = ""
    """Why the job stops, restarts or has ended; else empty."""
    attempt: int = 0
    round: int = -1
    """Number of the latest round; 0 without a rendezvous, -1 before the first round."""
    restarts: int = 0
    """Restarts after failures."""
    returned: int = 0
    """How many of them no longer count: a healthy attempt came later."""
    max_restarts: int = 0
    awaits_ready: bool = False
    """Whether `LaunchSpec.ready` says when a worker is ready."""
    membership_changes: int = 0
    """Rounds that a change of the membership caused."""
    failure: str = ""
    """The root cause of the latest failed attempt."""
    failed_attempt: int = -1
    """The number of that attempt; -1 without one."""
    group_rank: int = 0
    group_world_size: int = 1
    world_size: int = 0
    master: str = ""
    """Where the workers of several nodes meet: `HOST:PORT`."""
    started_at: float | None = None
    """Unix seconds."""
    elapsed: float = 0.0
    """Seconds since the start, up to the end of the job."""
    goodput: Goodput = Goodput()
    workers: tuple[WorkerStatus, ...] = ()
    """The workers of this node in the latest attempt, by local rank."""
    child: str = ""
    """The path of this child in its tree, such as `serving/3`; empty for the job itself."""
    generation: int = 0
    """Number of the latest start of this child, from 0."""
    ready_since: float | None = None
    """Unix seconds since when this child is ready; None while it is not."""
    children: tuple[JobStatus, ...] = ()
    """The children of a tree, in their order."""

    @property
    def leaves(self) -> tuple[JobStatus, ...]:
        """The parts that have workers, in their order: the job itself, or what its tree ends in."""
        below = tuple(leaf for child in self.children for leaf in child.leaves)
        return below or (self,)

    @property
    def descendants(self) -> tuple[JobStatus, ...]:
        """All children, each before its own."""
        return tuple(one for child in self.children for one in (child, *child.descendants))

    def find(self, child: str) -> JobStatus | None:
        """Return the child of this path; the job itself for an empty path, None for no child."""
        if child == self.child:
            return self
        found = (one.find(child) for one in self.children)
        return next((one for one in found if one is not None), None)

    @property
    def is_running(self) -> bool:
        """Whether all workers of the present attempt have been started, and none is stopped."""
        return self.phase == "running"

    @property
    def is_ready(self) -> bool:
        """Whether they run and are ready, if `LaunchSpec.ready` says when that is; of a tree,
        whether all essential children are."""
        if self.children:
            return self.is_running and self.ready_since is not None
        return self.is_running and (not self.awaits_ready or _are_ready(self.workers))

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.phase in _FINAL

    @property
    def identity(self) -> tuple[object, ...]:
        """What a job has in common with the record of its run, and with no other one."""
        # In a container the pid is the same each time.
        return self.run_id, self.agent_pid, self.started_at

    @property
    def restarts_left(self) -> int:
        """Restarts after failures that `max_restarts` still allows."""
        return max(0, self.max_restarts - self.restarts + self.returned)


class Level:
    """Severity of an event, with the numbers of `logging`."""

    INFO = 20
    WARNING = 30


class Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """What every event has, and says: its `level` and its `sentence`."""

    seq: int = -1
    """Position in the stream, from 0: the cursor of `Agent.events()` and of `follow_job()`.

    The two streams of one run number their events independently.
    """
    time: float = 0.0
    """Unix seconds."""
    run_id: str = ""
    """Identifier of the run."""
    attempt: int = 0
    """The attempt that the event is about, from 0."""
    child: str = ""
    """The path of the child of a tree that the event is about; empty for the job itself."""
    node: str = ""
    """Name of the host that reports the event."""

    _level: ClassVar[int] = Level.WARNING

    @property
    def level(self) -> int:
        """Severity, with the numbers of `logging`: `INFO` or `WARNING`."""
        return self._level

    @property
    def sentence(self) -> str:
        """What has happened, as one printable line."""
        return printable(f"{self.child}: {self._text()}" if self.child else self._text())

    @property
    def countdown(self) -> tuple[str, float | None, str] | None:
        """What the job waits for from now on, if anything: words, seconds left, more words."""
        return None

    def _change(self, status: StatusTracker) -> None:
        """Change the status of the job; most events leave it as it is."""

    def _text(self) -> str:
        return repr(self)


class StatusTracker:
    """Keeps the state of one job on this node, by the `_change` of each event, in their order.

    A child of a tree has a tracker of its own in `children`, by name.  While a child is replaced,
    the start that is to take its place has a tracker too, until that is ready.
    """

    def __init__(self) -> None:
        self.children: dict[str, StatusTracker] = {}
        self.children_max: int | None = None  # of those whose names are numbers
        self._successor: StatusTracker | None = None
        self._first_attempt = 0  # of the present start
        self._stale: int | None = None  # the last attempt of the start that it has replaced
        self.job = JobStatus(round=0)
        """Fields that change with the start of the job, and with a round."""
        self.phase = "starting"
        self.reason = ""  # why the job stops, restarts or has ended; else empty
        self.restarts = self.returned = 0
        self.attempt = 0
        self.failure = ""  # the root cause of the latest failed attempt
        self.failed_attempt = -1
        self.nproc = 0  # workers of this node
        self.workers: dict[int, WorkerStatus] = {}  # of the latest attempt, by rank
        self._seq = -1
        self._began = -1  # the number of the event of the first worker of the latest attempt
        self._since = 0.0
        self._counted_until = 0.0  # until then, `_goodput` is complete
        self._goodput = Goodput()
        self._has_run = False  # whether all workers of an attempt have run

    def __call__(self, event: Event) -> None:
        self._seq = event.seq
        if event.child:
            self.at(event.child)._take(event)
        else:
            event._change(self)

    def _take(self, event: Event) -> None:
        """Take in an event of this child, of its present start or of what is to replace that."""
        self._seq = event.seq
        successor = self._successor
        if successor is not None and event.attempt == successor._first_attempt:
            successor._seq = event.seq
            event._change(successor)
            if successor.job.ready_since is not None:
                vars(self).update(vars(successor), _successor=None, _stale=self.attempt)
        elif event.attempt >= self._first_attempt and event.attempt != self._stale:
            event._change(self)

    def begin_beside(self, attempt: int) -> StatusTracker:
        """Return the tracker of a start that takes the place of the present one when it is ready.

        `attempt` is its first attempt.
        """
        self._successor = successor = StatusTracker()
        fresh = {"_first_attempt": attempt, "attempt": attempt, "workers": {}, "_successor": None}
        vars(successor).update(vars(self), **fresh)
        return successor

    def at(self, path: str) -> StatusTracker:
        """Return the tracker of the child at a path; it is made if it is new."""
        tracker = self
        for name in path.split("/"):
            if (child := tracker.children.get(name)) is None:
                child = StatusTracker()
                limit = tracker.children_max
                if limit is None or not name.isdecimal() or int(name) < limit:
                    tracker.children[name] = child
                above = tracker.job.child
                under = f"{above}/{name}" if above else name
                job = tracker.job
                child.job = JobStatus(
                    run_id=job.run_id, agent_pid=job.agent_pid, child=under, round=0
                )
                child.phase = "waiting"
            tracker = child
        return tracker

    def find(self, path: str) -> StatusTracker | None:
        """Return the tracker of the child at a path; None for no child."""
        tracker: StatusTracker | None = self
        for name in path.split("/") if path else ():
            tracker = None if tracker is None else tracker.children.get(name)
        return tracker

    def runs(self, path: str, *, is_new: bool) -> bool:
        """Return whether the child at a path, and what it is in, has begun, and has not ended.

        `is_new`: or whether there is no such child yet.
        """
        tracker = self
        for name in path.split("/") if path else ():
            if name not in tracker.children:
                return is_new
            tracker = tracker.children[name]
            if tracker.has_ended or tracker.phase == "waiting":
                return False
        return True

    def descendants(self) -> list[StatusTracker]:
        """Return the trackers of all children, each before its own."""
        below = self.children.values()
        return [one for child in below for one in (child, *child.descendants())]

    def leaves(self) -> list[StatusTracker]:
        """Return the trackers of what has workers: this one, or those that its tree ends in."""
        return [leaf for child in self.children.values() for leaf in child.leaves()] or [self]

    def has_started_after(self, seq: int) -> bool:
        """Return whether all leaves run in an attempt that began after the event of this number.

        Below this one, those that had ended may stay so, but not all of them.
        """
        has_start = False
        for one in self.leaves():
            is_later = one._began > seq
            is_over = one.has_ended and (is_later or one is not self)
            if not is_over and not (one.is_running and is_later):
                return False
            has_start |= is_later
        return has_start

    @property
    def is_running(self) -> bool:
        return self.phase == "running"

    @property
    def has_run(self) -> bool:
        """Whether all workers of an attempt, or of a leaf below, have run."""
        return any(leaf._has_run for leaf in self.leaves())

    @property
    def has_ended(self) -> bool:
        return self.phase in _FINAL

    @property
    def is_ready(self) -> bool:
        if self.children:
            return self.is_running and self.job.ready_since is not None
        is_awaited = self.job.awaits_ready
        return self.is_running and (not is_awaited or _are_ready(self.workers.values()))

    def goodput(self, now: float) -> Goodput:
        """Return how the time was spent, up to `now`, in Unix seconds."""
        is_complete = self.phase == "stopping" or self.phase in _FINAL
        return self._goodput if is_complete else self._counted(now)

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start of the job, up to its end or to `now`."""
        began = self.job.started_at
        end = self._since if self.phase in _FINAL else now
        return 0.0 if began is None else max(0.0, end - began)

    def status(self, now: float) -> JobStatus:
        """Return everything, at `now` in Unix seconds."""
        return replace(
            self.job,
            seq=self._seq,
            phase=self.phase,
            since=self._since,
            reason=self.reason,
            attempt=self.attempt,
            restarts=self.restarts,
            returned=self.returned,
            failure=self.failure,
            failed_attempt=self.failed_attempt,
            world_size=self.job.world_size or len(self.workers),
            elapsed=self.elapsed(now),
            goodput=self.goodput(now),
            workers=tuple(self.workers.values()),
            children=tuple(child.status(now) for child in self.children.values()),
        )

    def begin(self, job: JobStatus, nproc: int, time: float) -> None:
        """Begin a job with so many workers on this node, at a time in Unix seconds."""
        self.job = replace(job, started_at=time)
        self.nproc = nproc
        self._since = self._counted_until = time

    def enter(self, phase: str, time: float, reason: str = "") -> None:
        """Enter a phase, or give another reason for it."""
        if self.phase in ("standby", "excluded") and phase in ("stopping", "restarting"):
            return  # it is what the other nodes do
        self.reason = reason
        if phase == self.phase:
            return
        # The time of a stop is counted when it is known that something follows it.
        if phase not in _FINAL or self.phase != "stopping":
            self._goodput = self._counted(time)
        self._counted_until = self._since = time
        self.phase = phase
        if self.job.ready_since is not None and phase != "running":
            self.job = replace(self.job, ready_since=None)
        for child in self.children.values() if phase in _FINAL else ():
            if not child.has_ended:  # it has ended with its supervisor
                child.enter("stopped", time, reason)

    def add_worker(self, attempt: int, worker: WorkerStatus) -> None:
        if attempt != self.attempt or not self.workers:
            self.attempt, self._began = attempt, self._seq
            self.workers = {}
        self.workers[worker.rank] = worker
        if self.job.started_at is not None and len(self.workers) >= self.nproc:
            self.enter("running", worker.since)
            self._has_run = True

    def note_ready(self, rank: int, time: float) -> None:
        if (worker := self.workers.get(rank)) is not None and worker.ready_since is None:
            self.workers[rank] = replace(worker, ready_since=time)

    def _counted(self, until: float) -> Goodput:
        """Return how the time was spent, if the present phase has lasted until then."""
        seconds = max(0.0, until - self._counted_until)
        if self.job.started_at is None:
            return self._goodput
        if self.phase == "running":
            kind = "productive"
        elif self.phase in ("forming", "standby", "excluded") or not self._has_run:
            kind = "waiting"
        else:
            kind = "restarting"
        return replace(self._goodput, **{kind: getattr(self._goodput, kind) + seconds})
