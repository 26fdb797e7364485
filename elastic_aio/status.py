"""What the events so far say about the job on this node: one value for all views.

Pure: a `StatusTracker` reads the events of one agent in their order; times are those of the
events, and of the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio import events
from elastic_aio.outcome import Goodput, ResourceUsage

if TYPE_CHECKING:
    from elastic_aio import node_events

PHASES: Final = (
    "starting",
    "forming",
    "standby",
    "running",
    "stopping",
    "restarting",
    "succeeded",
    "failed",
    "stopped",
)
"""What the job on this node is doing.  The last three are final: the states of `JobState`."""

WORKER_STATES: Final = ("running", "succeeded", "failed", "stopped")
"""States of a worker; "stopped" by the supervisor."""


_FINAL: Final = PHASES[-3:]


class WorkerStatus(Struct, frozen=True):
    """A worker of the latest attempt: its process `pid`, and in which state it is.

    `rank` is the global rank, `local_rank` the one on this node.  `stdout_path` and
    `stderr_path` are the files of its output; None for a stream that is in no file.
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


class JobStatus(Struct, frozen=True, kw_only=True):
    """What a job is doing on one node: what `Agent.status` returns, `/status` and the CLI show.

    `run_id`, `node`, `role`, `entrypoint`, `max_restarts`, `agent_pid` and `log_dir` are those
    of `JobStarted`; `group_rank`, `group_world_size` and `world_size` those of the latest
    `RoundFormed`; `attempt` is the latest, and `goodput` says what its time went into.
    """

    run_id: str = ""
    node: str = ""
    role: str = ""
    entrypoint: str = ""
    agent_pid: int | None = None
    log_dir: str | None = None
    seq: int = -1
    """Number of the last event that is taken into account: a cursor for `Agent.events`."""
    phase: str = "starting"
    """One of `starting`, `forming` (waiting for nodes), `standby`, `running`, `stopping`,
    `restarting`, and at the end `succeeded`, `failed` and `stopped`."""
    since: float = 0.0
    """Unix seconds since when the job is in this phase."""
    reason: str = ""
    """Why the job stops, restarts or has ended; else empty."""
    attempt: int = 0
    round: int = -1
    """Number of the latest round; 0 without a rendezvous, -1 before the first one."""
    restarts: int = 0
    """Restarts after failures."""
    returned: int = 0
    """How many of them no longer count: a healthy attempt came later."""
    max_restarts: int = 0
    membership_changes: int = 0
    """Rounds that a change of the membership caused."""
    failure: str = ""
    """The root cause of the latest failed attempt."""
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

    @property
    def is_ready(self) -> bool:
        """Whether all workers of the present attempt have been started, and none is stopped."""
        return self.phase == "running"

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.phase in _FINAL

    @property
    def restarts_left(self) -> int:
        """Restarts after failures that `max_restarts` still allows."""
        return max(0, self.max_restarts - self.restarts + self.returned)


class StatusTracker:
    """Keeps the state of one job on this node; called with each event, in their order."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.reason = ""
        """Why the job stops, restarts or has ended; else empty."""
        self.restarts = self.returned = 0
        self.membership_changes = 0
        self.attempt = 0
        self.failure = ""
        """The root cause of the latest failed attempt."""
        self.workers: dict[int, WorkerStatus] = {}
        """The workers of the latest attempt, by rank."""
        self._job: events.JobStarted | None = None
        self._round: node_events.RoundFormed | None = None
        self._seq = -1
        self._since = 0.0
        self._counted_until = 0.0
        """Until when `_goodput` is complete."""
        self._goodput = Goodput()
        self._has_run = False
        """Whether all workers of an attempt have run."""
        self._ended_at: float | None = None

    def __call__(self, event: events.Event) -> None:
        """Take in the next event."""
        self._seq = event.seq
        match event:
            case events.JobStarted():
                self._job = event
                self._since = self._counted_until = event.time
            case events.WorkerStarted():
                self._worker_started(event)
            case events.WorkerExited():
                self._worker_exited(event)
            case events.StopRequested():
                self._enter("stopping", event, event.reason)
            case events.LeftoversFound():
                self._enter("stopping", event, "the workers have left processes behind")
            case events.AttemptFailed():
                self.failure = event.root.summary
                self._enter("stopping", event, self.failure)
            case events.Restarting():
                self.restarts = event.restarts
                self.returned = max(self.returned, event.returned)
                self._enter("restarting", event, event.why)
            case events.JobFinished():
                self.restarts = event.restarts
                self._enter(event.state.value, event, event.why)
                self._ended_at = event.time
            case _ if events.is_of_nodes(event):
                self._note_rendezvous(event)

    def _note_rendezvous(self, event: events.Event) -> None:
        from elastic_aio import node_events

        match event:
            # While workers run, other nodes may form the next round.
            case node_events.RoundForming() if not self.is_ready:
                self._enter("forming", event)
            case node_events.NodeStandby() if not self.is_ready:
                self._enter("standby", event, event.why)
            case node_events.RoundFormed():
                self._round = event
                self.membership_changes = event.changes
                self._enter("starting", event)
            case node_events.MembershipChanged():
                self._enter("restarting", event, event.why)

    @property
    def is_alive(self) -> bool:
        """Whether the job goes on, or has succeeded."""
        return self.phase not in ("failed", "stopped")

    @property
    def is_ready(self) -> bool:
        """Whether all workers of the present attempt have been started, and none is stopped."""
        return self.phase == "running"

    @property
    def round(self) -> int:
        """Number of the latest round; 0 without a rendezvous, -1 before the first one."""
        if self._round is not None:
            return self._round.round
        return 0 if self._job is None or self._job.nnodes == "1" else -1

    @property
    def started_at(self) -> float | None:
        """Unix seconds of the start of the job; None before it."""
        return None if self._job is None else self._job.time

    def goodput(self, now: float) -> Goodput:
        """Return how the time was spent, up to `now`, in Unix seconds."""
        is_complete = self.phase == "stopping" or self._ended_at is not None
        return self._goodput if is_complete else self._counted(now)

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start of the job, up to its end or to `now`."""
        end = now if self._ended_at is None else self._ended_at
        return 0.0 if self._job is None else max(0.0, end - self._job.time)

    def workers_by_state(self) -> dict[str, int]:
        """Return the number of this node's workers in each state."""
        counts = dict.fromkeys(WORKER_STATES, 0)
        for worker in self.workers.values():
            counts[worker.state] += 1
        return counts

    def identity(self) -> dict[str, str]:
        """Return what tells this job and node from others."""
        job = self._job
        if job is None:
            return {}
        return {
            "run_id": job.run_id,
            "node": job.node,
            "role": job.role,
            "entrypoint": job.entrypoint,
        }

    def status(self, now: float) -> JobStatus:
        """Return everything, at `now` in Unix seconds."""
        job, formed = self._job, self._round
        status = JobStatus(
            seq=self._seq,
            phase=self.phase,
            since=self._since,
            reason=self.reason,
            attempt=self.attempt,
            round=self.round,
            restarts=self.restarts,
            returned=self.returned,
            membership_changes=self.membership_changes,
            failure=self.failure,
            world_size=len(self.workers),
            started_at=self.started_at,
            elapsed=self.elapsed(now),
            goodput=self.goodput(now),
            workers=tuple(self.workers.values()),
        )
        if job is not None:
            status = replace(
                status,
                **self.identity(),
                max_restarts=job.max_restarts,
                agent_pid=job.agent_pid,
                log_dir=job.log_dir,
            )
        if formed is not None:
            status = replace(
                status,
                group_rank=formed.group_rank,
                group_world_size=formed.group_world_size,
                world_size=formed.world_size,
                master=f"{formed.master_addr}:{formed.master_port}",
            )
        return status

    def _worker_started(self, event: events.WorkerStarted) -> None:
        if event.attempt != self.attempt:
            self.attempt = event.attempt
            self.workers = {}
        self.workers[event.rank] = WorkerStatus(
            event.rank,
            event.local_rank,
            event.pid,
            since=event.time,
            stdout_path=event.stdout_path,
            stderr_path=event.stderr_path,
        )
        if self._job is not None and len(self.workers) >= self._job.nproc_per_node:
            self._enter("running", event)
            self._has_run = True

    def _worker_exited(self, event: events.WorkerExited) -> None:
        worker = self.workers.get(event.rank)
        if worker is None or worker.pid != event.pid:
            return
        state = "stopped" if event.is_victim else "failed"
        self.workers[event.rank] = replace(
            worker,
            state="succeeded" if event.status.is_success else state,
            since=event.time,
            status=str(event.status),
            usage=event.usage,
        )

    def _enter(self, phase: str, event: events.Event, reason: str = "") -> None:
        self.reason = reason
        if phase == self.phase:
            return
        # The time of a stop is counted when it is known that something follows it.
        if phase not in _FINAL or self.phase != "stopping":
            self._goodput = self._counted(event.time)
        self._counted_until = self._since = event.time
        self.phase = phase

    def _counted(self, until: float) -> Goodput:
        """Return how the time was spent, if the present phase has lasted until then."""
        seconds = max(0.0, until - self._counted_until)
        if self._job is None:
            return self._goodput
        if self.phase == "running":
            kind = "productive"
        elif self.phase in ("forming", "standby") or not self._has_run:
            kind = "waiting"
        else:
            kind = "restarting"
        return replace(self._goodput, **{kind: getattr(self._goodput, kind) + seconds})
