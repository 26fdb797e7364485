"""Every event of a run but those of its nodes: frozen values."""

from __future__ import annotations

import msgspec

from elastic_aio.outcome import ExitStatus, Failure, Goodput, JobState, ResourceUsage


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """What every event has."""

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
    node: str = ""
    """Name of the host that reports the event."""


def is_of_nodes(event: Event) -> bool:
    """Whether an event is one of `node_events`, which a job of one node does not load."""
    return type(event).__module__ != __name__


class JobStarted(Event, frozen=True, kw_only=True):
    """The job begins; no process has been started yet.

    `nproc_per_node`, `max_restarts` and `has_timers` are the spec's; `agent_pid` is this process.
    """

    entrypoint: str
    """What the workers run, as in `LaunchSpec.name`."""
    nproc_per_node: int
    nnodes: str
    """`N` or `MIN:MAX`."""
    max_restarts: int
    agent_pid: int
    node_losses: str = ""
    """The limit of `RestartPolicy.node_losses` for a job of several nodes; empty for none."""
    log_dir: str | None = None
    """Directory of this run's logs; None if nothing is captured."""
    role: str = "default"
    """Name of the workers of this node."""
    rdzv_backend: str = ""
    """Name of the rendezvous backend, which one node does not use."""
    has_timers: bool = False


class WorkerStarted(Event, frozen=True, kw_only=True):
    """The process `pid` of the worker `rank` (on this node `local_rank`) exists."""

    rank: int
    local_rank: int
    pid: int
    role_rank: int = -1
    """Rank among the workers of the same role."""
    role_world_size: int = -1
    """How many workers have the role."""
    stdout_path: str | None = None
    """File with its stdout; None if the stream is in no file."""
    stderr_path: str | None = None
    """File with its stderr, likewise; a captured one is removed unless the job fails."""


class WorkerExited(Event, frozen=True, kw_only=True):
    """The process `pid` of a worker has exited as `status` says; its children may still run.

    `rank` is the worker's global rank, `local_rank` the one on this node.
    """

    rank: int
    local_rank: int
    pid: int
    status: ExitStatus
    duration: float
    """Seconds since the worker was started."""
    is_victim: bool = False
    """Whether the supervisor had signalled the worker to stop."""
    usage: ResourceUsage | None = None
    """None for a process that other code of the program reaped."""
    reason: str = ""
    """Why it failed, as far as that is known when it exits: as `Failure.reason`."""


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt failed and all its processes are gone."""

    root: Failure
    """The root cause."""
    failures: tuple[Failure, ...]
    """All failures of the attempt, the root cause first."""


class Restarting(Event, frozen=True, kw_only=True):
    """Another attempt follows after a failure or a request; `attempt` is its number."""

    why: str
    """The rule of the restart policy that applies, or the reason of the request."""
    delay: float
    """Seconds until the attempt begins."""
    restarts: int
    """Restarts after failures so far, this one included if it follows a failure."""
    returned: int = 0
    """How many of them no longer count: a healthy attempt came later; 0 after a request."""


class StopRequested(Event, frozen=True, kw_only=True):
    """The workers are about to be stopped; `reason` says why."""

    reason: str
    plan: str
    """The signals and graces in order, such as `SIGTERM 25 s, SIGKILL`."""
    signal: int | None = None
    """The signal that the launcher received, or was asked for, if that is the reason."""
    is_ordered: bool = False
    """Whether the rendezvous is: another node leaves, fails or joins, or no store answers."""


class LeftoversFound(Event, frozen=True, kw_only=True):
    """The workers have succeeded, and processes that they have started still run.

    The processes `pids` are stopped after `linger` seconds.
    """

    pids: tuple[int, ...]
    programs: tuple[str, ...]
    """Program and script of each, such as `python3.11 upload.py`."""
    linger: float


class StopEscalated(Event, frozen=True, kw_only=True):
    """The grace period expired, or `reason` cut it short; the plan's next `signal` is sent."""

    signal: int
    pids: tuple[int, ...]
    """The processes that remain; empty if `/proc` could not be read, and no worker remains."""
    reason: str = ""


class WorkerAbandoned(Event, frozen=True, kw_only=True):
    """The process `pid` did not exit after SIGKILL and is left behind."""

    pid: int
    """0 if `/proc` could not be read; then processes may be left that are not known."""
    state: str
    """Its state in `/proc`, such as `D in nfs_wait`: an uninterruptible system call."""


class SignalForwarded(Event, frozen=True, kw_only=True):
    """`signal` was forwarded to workers, given by the pids of their leaders.

    Of a worker whose leader is a shell without a handler, the program gets it that the shell runs.
    """

    signal: int
    pids: tuple[int, ...]
    unhandled: tuple[int, ...] = ()
    """Those that had no handler for it: if also in `pids`, its default action ends them."""


class TimerExpired(Event, frozen=True, kw_only=True):
    """The worker `rank` (on this node `local_rank`) has not released a timer in time.

    The process `pid`, which acquired it, and the worker get `signal`; 0 leaves both alone.
    """

    rank: int
    """-1 if the process belongs to no worker any more."""
    local_rank: int
    pid: int
    scope: str
    """Name of the timer."""
    age: float
    """Seconds since it was acquired."""
    limit: float
    """Seconds for which it was acquired."""
    signal: int


class TimerRejected(Event, frozen=True, kw_only=True):
    """The pipe of the timers got something that is no request (`why`); reported once."""

    why: str


class WorkerReady(Event, frozen=True, kw_only=True):
    """The worker `rank` (`local_rank` on this node, process `pid`) has reported `READY=1`."""

    rank: int
    local_rank: int
    pid: int
    duration: float
    """Seconds since it was started."""


class DeadlineMissed(Event, frozen=True, kw_only=True):
    """The worker `rank` (`local_rank` on this node, process `pid`) was silent for too long.

    `why` says it in one line.  With `LivenessSpec.on_timeout="fail"` the attempt fails now.
    """

    rank: int
    local_rank: int
    pid: int
    deadline: str
    """`heartbeat`, `ready`, `progress`, `phase`, `exit skew`, or `watchdog`: the worker asked."""
    limit: float
    """Seconds that it had."""
    age: float
    """Seconds for which it was silent."""
    why: str
    step: str = ""
    """Its last step."""
    phase: str = ""
    """Its phase."""
    status: str = ""
    """Its last status."""


class WorkerActivity(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker `rank` was doing: what `/proc` shows of its main thread.

    It is `local_rank` on this node, and the process `pid`.
    """

    rank: int
    local_rank: int
    pid: int
    state: str = ""
    """A letter of `proc_pid_stat(5)`: `S` waits, `D` waits uninterruptibly, `R` runs."""
    syscall: str = ""
    """The system call in which it waits."""
    wchan: str = ""
    """The kernel function in which it waits."""
    reported: str = ""
    """Its last step, phase and status."""


class WorkersIdle(Event, frozen=True, kw_only=True):
    """No worker of this node has used CPU time or written anything for `seconds`.

    `workers` are those of the present attempt.
    """

    seconds: float
    workers: tuple[WorkerActivity, ...]


class WorkersUnfinished(Event, frozen=True, kw_only=True):
    """Workers of this node still run although the first has exited with 0 some time ago.

    `finished` is how many have exited with 0: of this node, and of other nodes all of whose
    workers have.  `running` are the ranks of those of this node that run.  Reported once for
    each attempt.
    """

    seconds: float
    """Seconds since the first success."""
    finished: int
    running: tuple[int, ...]
    world_size: int = 0
    """Workers of a job of several nodes; 0 for one node."""


class StacksDumped(Event, frozen=True, kw_only=True):
    """The stacks of the workers were read, since `why`."""

    why: str
    summary: str
    """One line, such as `ranks 0-2 wait in all_reduce, rank 3 is in DataLoader.__next__`."""
    path: str | None = None
    """File with all stacks; None if the job has no log directory."""


class GuardianRestarted(Event, frozen=True, kw_only=True):
    """The guardian process exited and was replaced."""

    pid: int
    """The new guardian."""


class GuardianLost(Event, frozen=True, kw_only=True):
    """The guardian process exited, and `why` another one does not start.

    Attempts go on, up to a minute apart; `GuardianRestarted` reports success.  Until then
    nothing ends the job if the launcher is killed.
    """

    why: str


class ControlUnavailable(Event, frozen=True, kw_only=True):
    """The job has no control socket, because of `why`: `aio-elastic ps` does not show it."""

    why: str


class ConsoleLost(Event, frozen=True, kw_only=True):
    """The console accepts no more output (`why`); the logs still receive all of it."""

    stream: str
    """`stdout` or `stderr`."""
    why: str
    unshown: int | None = None
    """Bytes in the log files that the console did not take; None while workers run."""


class LogDiskFull(Event, frozen=True, kw_only=True):
    """A disk takes no more output into log files, most often for lack of space.

    `is_shown`: the console shows what they lack (`LogSpec.on_full`).
    """

    mount_point: str
    """Where the disk is mounted."""
    is_shown: bool
    why: str = "no space left on device"
    """The error of a write."""


class LogsNotRemoved(Event, frozen=True, kw_only=True):
    """Old runs' logs are left in the log directory, because of `why` (`LogSpec.keep_runs`)."""

    why: str


class OutputLost(Event, frozen=True, kw_only=True):
    """Output of the worker `rank` (on this node `local_rank`) is not shown or kept (`why`)."""

    rank: int
    local_rank: int
    stream: str
    """`stdout` or `stderr`."""
    path: str
    """Its log file."""
    why: str
    lost: int | None = None
    """Bytes; None if their number is not known."""


class WorkerStoreRefused(Event, frozen=True, kw_only=True):
    """The store of the workers closed the connection of a client (`peer`), as `why` says.

    torch's protocol has no other way to refuse a request; the store is full, for example.
    """

    peer: str
    why: str


class EventsMissed(Event, frozen=True, kw_only=True):
    """Stands for events that are no longer kept, or have not arrived, for this reader."""

    count: int
    """How many; 0 if that is unknown."""
    why: str = ""
    """Why, if that is known."""


class JobFinished(Event, frozen=True, kw_only=True):
    """The job is over (`state`) and no process of it is left; always the last event."""

    state: JobState
    why: str
    """The rule or request that ended the job."""
    exit_code: int
    """What a command-line launcher exits with."""
    duration: float
    """Seconds."""
    restarts: int
    """Restarts after failures."""
    goodput: Goodput | None = None
    """How the time was spent on this node; None in the events of `follow_job()`."""
