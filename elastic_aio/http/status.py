"""What the events so far say about the job on this node: one value for all pages.

Pure: a `JobStatus` reads the events of one agent in their order; times are those of the
events, and of the caller.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from elastic_aio import events, node_events

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


class WorkerStatus(Struct):
    """A worker of the latest attempt."""

    rank: int
    local_rank: int
    pid: int
    state: str = "running"
    status: str = ""
    """How it has exited, as in `exit code 1`; empty while it runs."""


class JobStatus:
    """The state of one job on this node; called with each event."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.reason = ""
        """Why the job stops, restarts or has ended; else empty."""
        self.restarts = 0
        self.membership_changes = 0
        self.attempt = 0
        self.failure = ""
        """The root cause of the latest failed attempt."""
        self.workers: dict[int, WorkerStatus] = {}
        self._job: events.JobStarted | None = None
        self._round: node_events.RoundFormed | None = None
        self._running_since = 0.0
        self._ran_before = 0.0
        self._ended_at: float | None = None

    def __call__(self, event: events.Event) -> None:
        """Take in the next event."""
        match event:
            case events.JobStarted():
                self._job = event
            # While workers run, other nodes may form the next round.
            case node_events.RoundForming() if not self.is_ready:
                self._enter("forming", event)
            case node_events.NodeStandby() if not self.is_ready:
                self._enter("standby", event, event.why)
            case node_events.RoundFormed():
                self._round = event
                self.membership_changes = event.changes
                self._enter("starting", event)
            case events.WorkerStarted():
                self._worker_started(event)
            case events.WorkerExited():
                self._worker_exited(event)
            case events.StopRequested():
                self._enter("stopping", event, event.reason)
            case events.AttemptFailed():
                self.failure = event.root.summary
                self._enter("stopping", event, self.failure)
            case events.Restarting():
                self.restarts = event.restarts
                self._enter("restarting", event, event.why)
            case node_events.MembershipChanged():
                self._enter("restarting", event, event.why)
            case events.JobFinished():
                self.restarts = event.restarts
                self._enter(event.state.value, event, event.why)
                self._ended_at = event.time

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

    def goodput(self, now: float) -> float:
        """Return the seconds in which all workers of this node have run, up to `now`."""
        current = now - self._running_since if self.phase == "running" else 0.0
        return self._ran_before + max(0.0, current)

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

    def page(self, now: float) -> dict[str, Any]:
        """Return everything, as plain data."""
        formed, job = self._round, self._job
        return {
            **self.identity(),
            "phase": self.phase,
            "reason": self.reason,
            "is_ready": self.is_ready,
            "attempt": self.attempt,
            "restarts": self.restarts,
            "max_restarts": 0 if job is None else job.max_restarts,
            "membership_changes": self.membership_changes,
            "failure": self.failure,
            "round": self.round,
            "group_rank": 0 if formed is None else formed.group_rank,
            "group_world_size": 1 if formed is None else formed.group_world_size,
            "world_size": len(self.workers) if formed is None else formed.world_size,
            "master": "" if formed is None else f"{formed.master_addr}:{formed.master_port}",
            "agent_pid": None if job is None else job.agent_pid,
            "log_dir": None if job is None else job.log_dir,
            "started_at": self.started_at,
            "elapsed": self.elapsed(now),
            "goodput": self.goodput(now),
            "workers": list(self.workers.values()),
        }

    def _worker_started(self, event: events.WorkerStarted) -> None:
        if event.attempt != self.attempt:
            self.attempt = event.attempt
            self.workers = {}
        self.workers[event.rank] = WorkerStatus(event.rank, event.local_rank, event.pid)
        if self._job is not None and len(self.workers) >= self._job.nproc_per_node:
            self._enter("running", event)

    def _worker_exited(self, event: events.WorkerExited) -> None:
        worker = self.workers.get(event.rank)
        if worker is None or worker.pid != event.pid:
            return
        worker.status = str(event.status)
        if event.status.is_success:
            worker.state = "succeeded"
        else:
            worker.state = "stopped" if event.is_victim else "failed"

    def _enter(self, phase: str, event: events.Event, reason: str = "") -> None:
        if self.phase == "running" != phase:
            self._ran_before += max(0.0, event.time - self._running_since)
        elif phase == "running" != self.phase:
            self._running_since = event.time
        self.phase, self.reason = phase, reason
