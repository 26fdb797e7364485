"""Every event of a run: a frozen value with one sentence, and one effect on the status.

The events of nodes are in `node_events`, which a job of one node does not load, and those of a
supervisor in `child_events`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.outcome import (
    ExitStatus,
    Failure,
    Goodput,
    JobState,
    ResourceUsage,
    signal_name,
)
from elastic_aio.spec.restart import restarts_text
from elastic_aio.status import Event as Event
from elastic_aio.status import JobStatus, Level, StatusTracker, WorkerStatus
from elastic_aio.text import counted, format_duration, one_line

if TYPE_CHECKING:
    from elastic_aio.child_events import *  # noqa: F403
    from elastic_aio.node_events import *  # noqa: F403  # all that it defines
else:

    def __getattr__(name: str) -> object:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from elastic_aio import child_events, node_events  # noqa: F401  # few jobs have them

        kinds = (Event, WorkerActivity, *Event.__subclasses__())
        public = {kind.__name__: kind for kind in kinds if kind.__module__ in _HOMES}
        if name == "__all__":
            return sorted(public)
        if name not in public:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return public[name]

    def __dir__() -> list[str]:
        return __getattr__("__all__")


_HOMES: Final = (
    __name__,
    "elastic_aio.child_events",
    "elastic_aio.node_events",
    "elastic_aio.status",
)
_SHOWN_MAX = 8  # pids or ranks in a sentence
_LEFTOVERS_SHOWN = 5


def _listed(numbers: tuple[object, ...], limit: int = _SHOWN_MAX) -> str:
    return ", ".join(map(str, numbers[:limit])) + (", ..." if numbers[limit:] else "")


class JobStarted(Event, frozen=True, kw_only=True):
    """The job begins; no process has been started yet.

    `nproc_per_node` and `has_timers` are the spec's, and `max_restarts`, which is 999999999 for a
    job that restarts always; `agent_pid` is this process.
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
    """Directory of this run's logs; None if none are kept unless it fails."""
    role: str = "default"
    """Name of the workers of this node."""
    rdzv_backend: str = ""
    """Name of the rendezvous backend, which one node does not use."""
    has_timers: bool = False
    children: tuple[str, ...] = ()
    """The names of the children of a group; of independent workers, their ranks."""
    awaits_ready: bool = False
    """Whether `LaunchSpec.ready` says when a worker is ready."""
    keeps_logs: bool = True
    """Whether the output of a worker is kept at least if the job fails."""

    def _change(self, status: StatusTracker) -> None:
        job = JobStatus(
            run_id=self.run_id,
            node=self.node,
            role=self.role,
            entrypoint=self.entrypoint,
            agent_pid=self.agent_pid,
            log_dir=self.log_dir,
            max_restarts=self.max_restarts,
            awaits_ready=self.awaits_ready,
            round=0 if self.nnodes == "1" else -1,
        )
        status.begin(job, self.nproc_per_node, self.time)
        for child in self.children:
            status.at(child)

    def _text(self) -> str:
        workers = counted(self.nproc_per_node, "worker")
        if self.children:
            kind = "independent worker" if self.nproc_per_node else "child"
            workers = counted(len(self.children), kind, f"{kind}s".replace("childs", "children"))
        is_group = self.children and not self.nproc_per_node
        what = f" ({self.entrypoint})" if is_group else f" of {self.entrypoint}"
        nodes = f", one of {self.nnodes} nodes".replace(":", " to ") if self.nnodes != "1" else ""
        losses = f", node losses at most {self.node_losses}" if self.node_losses else ""
        logs = "logs kept only if it fails" if self.keeps_logs else "no logs"
        logs = f"logs in {self.log_dir}" if self.log_dir else logs
        # The children have restarts of their own.
        has_own = self.max_restarts or not is_group
        restarts = f", {restarts_text(self.max_restarts)}" if has_own else ""
        return f"run {self.run_id}: {workers}{what} on {self.node}{nodes}{restarts}{losses}, {logs}"


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
    """File with its stderr, likewise; a captured one is removed unless the attempt or job fails."""

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        worker = WorkerStatus(
            self.rank,
            self.local_rank,
            self.pid,
            since=self.time,
            stdout_path=self.stdout_path,
            stderr_path=self.stderr_path,
        )
        status.add_worker(self.attempt, worker)

    def _text(self) -> str:
        return f"rank {self.rank} started (pid {self.pid})"


class WorkerExited(Event, frozen=True, kw_only=True):
    """The process `pid` of a worker has exited as `status` says; its children may still run.

    `rank` is the worker's global rank, `local_rank` its rank on this node.
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
    """Why it failed, as far as that is known when it exits: as `Failure.reason`.  Of a worker that
    was stopped: the error with which its output ends, unless the stop has ended it."""

    @property
    def level(self) -> int:
        return Level.WARNING if self.is_victim and self.reason else Level.INFO

    def _change(self, status: StatusTracker) -> None:
        worker = status.workers.get(self.rank)
        if worker is None or worker.pid != self.pid:
            return
        state = "stopped" if self.is_victim else "failed"
        status.workers[self.rank] = replace(
            worker,
            state="succeeded" if self.status.is_success else state,
            since=self.time,
            status=str(self.status),
            usage=self.usage,
        )

    def _text(self) -> str:
        stopped = ", stopped by the supervisor" if self.is_victim else ""
        why = f": {self.reason}" if self.reason else ""
        ended = f"{self.status}{stopped}, after {self.duration:.3g} s{why}"
        return f"rank {self.rank} (pid {self.pid}): {ended}"


class AttemptFailed(Event, frozen=True, kw_only=True):
    """An attempt failed and all its processes are gone."""

    root: Failure
    """The root cause."""
    failures: tuple[Failure, ...]
    """All failures of the attempt, the root cause first."""

    def _change(self, status: StatusTracker) -> None:
        status.failure, status.failed_attempt = self.root.summary, self.attempt
        status.enter("stopping", self.time, status.failure)

    def _text(self) -> str:
        is_elsewhere = self.node and self.root.host not in ("", self.node)
        elsewhere = f" on {self.root.host}" if is_elsewhere else ""
        return f"attempt {self.attempt} failed{elsewhere}: {self.root.summary}"


class Restarting(Event, frozen=True, kw_only=True):
    """Another attempt follows after a failure or a request; `attempt` is its number."""

    why: str
    """The rule of the restart policy that applies, or the reason of the request."""
    delay: float
    """Seconds until the attempt begins."""
    restarts: int
    """Restarts after failures so far, including this restart if it follows a failure."""
    returned: int = 0
    """How many of them no longer count: a healthy attempt came later; 0 after a request."""

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return "restarting, ", self.delay, " left"

    def _change(self, status: StatusTracker) -> None:
        status.restarts = self.restarts
        status.returned = max(status.returned, self.returned)
        status.enter("restarting", self.time, self.why)

    def _text(self) -> str:
        after = f" in {self.delay:.3g} s" if self.delay else ""
        returned = f", {counted(self.returned, 'former restart')} returned" if self.returned else ""
        return f"restarting as attempt {self.attempt}{after}: {self.why}{returned}"


class StopRequested(Event, frozen=True, kw_only=True):
    """The workers are about to be stopped; `reason` says why."""

    reason: str
    plan: str
    """The signals and graces in order, such as `SIGTERM 25 s, SIGKILL`."""
    signal: int | None = None
    """The signal that the launcher received, or was asked for, if that is the reason."""
    is_ordered: bool = False
    """Whether the rendezvous wants it: another node leaves, fails or joins, or no store answers."""

    @property
    def level(self) -> int:
        is_known = self.signal is None and not self.is_ordered
        return Level.INFO if is_known else Level.WARNING

    def _change(self, status: StatusTracker) -> None:
        status.enter("stopping", self.time, self.reason)

    def _text(self) -> str:
        return f"stopping the workers ({self.plan}): {self.reason}"


class PreemptionNotice(Event, frozen=True, kw_only=True):
    """The job is about to be preempted: its workers may save until then, and none is restarted.

    An event that follows another one has the earlier deadline, which replaces the later one.
    """

    why: str
    """The signal or the request, and on which node if there are several."""
    time_left: float
    """Seconds until the workers that still run are stopped by the stop plan."""

    @property
    def countdown(self) -> tuple[str, float | None, str]:
        return "preempted: the workers are stopped in ", self.time_left, ""

    def _change(self, status: StatusTracker) -> None:
        status.enter(status.phase, self.time, f"preemption: {self.why}")

    def _text(self) -> str:
        return f"preemption: the workers are stopped in {self.time_left:.3g} s: {self.why}"


class LeftoversFound(Event, frozen=True, kw_only=True):
    """The workers have succeeded, and processes that they have started (`pids`) still run.

    They are stopped after `linger` seconds.
    """

    pids: tuple[int, ...]
    programs: tuple[str, ...]
    """Program and script of each, such as `python3.11 upload.py`."""
    linger: float

    def _change(self, status: StatusTracker) -> None:
        status.enter("stopping", self.time, "the workers have left processes behind")

    def _text(self) -> str:
        count, it = len(self.pids), "it" if len(self.pids) == 1 else "they"
        named = tuple(f"{name} ({pid})" for pid, name in zip(self.pids, self.programs, strict=True))
        fate = f"{it} {'is' if count == 1 else 'are'} stopped now"
        if self.linger:
            fate = f"{it} may run for another {self.linger:g} s"
        left = (
            f"the workers have succeeded and left {counted(count, 'process', 'processes')} behind"
        )
        return f"{left}, {fate}: {_listed(named, _LEFTOVERS_SHOWN)}"


class StopEscalated(Event, frozen=True, kw_only=True):
    """The grace period expired, or `reason` cut it short; the plan's next `signal` is sent."""

    signal: int
    pids: tuple[int, ...]
    """The processes that remain; empty if `/proc` could not be read, and no worker remains."""
    reason: str = ""

    def _text(self) -> str:
        name = signal_name(self.signal)
        if not self.pids:
            return f"{self.reason or 'processes may not have stopped in time'}, sending {name}"
        processes = counted(len(self.pids), "process", "processes")
        pids = f"(pid {_listed(self.pids)})"
        if self.reason:
            return f"{self.reason}, sending {name} to {processes} {pids}"
        return f"{processes} did not stop in time, sending {name} {pids}"


class WorkerAbandoned(Event, frozen=True, kw_only=True):
    """The process `pid` did not exit after SIGKILL and is left behind."""

    pid: int
    """0 if `/proc` could not be read; then processes may be left that are not known."""
    state: str
    """Its state in `/proc`, such as `D in nfs_wait` (an uninterruptible system call), the user
    that it runs as, and whether the launcher has no permission to signal it."""
    program: str = ""
    """Program and script, such as `python3.11 upload.py`."""

    def _text(self) -> str:
        if not self.pid:
            return f"processes may be left behind: {self.state}"
        process = f"process {self.pid} ({self.program})" if self.program else f"process {self.pid}"
        return f"{process} did not exit after SIGKILL (state {self.state}), left behind"


class SignalForwarded(Event, frozen=True, kw_only=True):
    """`signal` was forwarded to workers, given by the pids of their leaders.

    If the leader of a worker is a shell without a handler, the program that the shell runs gets it.
    """

    signal: int
    pids: tuple[int, ...]
    unhandled: tuple[int, ...] = ()
    """Leaders that had no handler for it: if also in `pids`, its default action ends them."""

    @property
    def level(self) -> int:
        return Level.WARNING if self.unhandled else Level.INFO

    def _text(self) -> str:
        name = signal_name(self.signal)
        text = f"{name} forwarded to {counted(len(self.pids), 'worker')}"
        if not self.unhandled:
            return text
        count = "1 has" if len(self.unhandled) == 1 else f"{len(self.unhandled)} have"
        end = "will be ended by it" if self.unhandled[0] in self.pids else "did not get it"
        return f"{text}; {count} no handler for it and {end} (pid {_listed(self.unhandled)})"


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

    def _text(self) -> str:
        worker = f"process {self.pid}" if self.rank < 0 else f"rank {self.rank} (pid {self.pid})"
        times = f"after {round(self.age, 2):g} s (limit {round(self.limit, 2):g} s)"
        ending = f", sending {signal_name(self.signal)}" if self.signal else ""
        return f"timer {self.scope!r} of {worker} expired {times}{ending}"


class TimerRejected(Event, frozen=True, kw_only=True):
    """The pipe of the timers got something that is no request (`why`); reported once."""

    why: str

    def _text(self) -> str:
        return f"the pipe of the timers got {self.why}"


class WorkerReady(Event, frozen=True, kw_only=True):
    """The worker `rank` (`local_rank` on this node, process `pid`) is ready.

    It has reported `READY=1`, or the probe of `LaunchSpec.ready` finds it so.
    """

    rank: int
    local_rank: int
    pid: int
    duration: float
    """Seconds since it was started."""

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.note_ready(self.rank, self.time)

    def _text(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) is ready after {self.duration:.3g} s"


class MessageDropped(Event, frozen=True, kw_only=True):
    """Process `pid`, which runs `program`, is no worker, and has reported as one; reported once.

    With `LivenessSpec(notify_access="all")` it speaks for the worker that has started it.
    """

    pid: int
    program: str

    def _text(self) -> str:
        who = f"{self.program or 'a process'} ({self.pid})"
        return f"a message of {who} is dropped: it is no worker (notify access: main)"


class DeadlineMissed(Event, frozen=True, kw_only=True):
    """The worker `rank` (`local_rank` on this node, process `pid`) was silent for too long.

    `why` says it in one line.  With `LivenessSpec.on_timeout="fail"` the attempt fails now.
    """

    rank: int
    local_rank: int
    pid: int
    deadline: str
    """`heartbeat`, `ready`, `progress`, `phase`, `exit skew`, `probe` (that of `LaunchSpec.alive`),
    or `watchdog`: the worker asked."""
    limit: float
    """Seconds that it had; 0 of a probe."""
    age: float
    """Seconds for which it was silent."""
    why: str
    step: str = ""
    """Its last step."""
    phase: str = ""
    """Its phase."""
    status: str = ""
    """Its last status."""

    def _text(self) -> str:
        return f"rank {self.rank} (pid {self.pid}): {self.why}"


class ForeignAnswer(Event, frozen=True, kw_only=True):
    """Another process answers a probe of the worker `rank` (`local_rank` on this node), or may.

    `why` says which.  Reported at the first answer of a program that has the port, and at the third
    at a shared socket.
    """

    rank: int
    local_rank: int
    pid: int
    why: str

    def _text(self) -> str:
        return f"rank {self.rank} (pid {self.pid}): its probe cannot ask it: {self.why}"


class WorkerActivity(Struct, frozen=True, kw_only=True):
    """The state in `/proc` of the main thread of the worker `rank`.

    The worker is `local_rank` on this node, and the process `pid`.
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

    `workers` belong to the present attempt.
    """

    seconds: float
    workers: tuple[WorkerActivity, ...]

    def _text(self) -> str:
        states = tuple(
            f"rank {worker.rank} {worker.syscall or worker.wchan or worker.state or 'unknown'}"
            for worker in self.workers
        )
        idle = f"no worker has used CPU time or written anything for {self.seconds:.3g} s"
        return f"{idle}: {_listed(states)}"


class WorkersUnfinished(Event, frozen=True, kw_only=True):
    """Workers of this node still run although the first has exited with 0 some time ago.

    `finished` is how many have exited with 0: of this node, and of other nodes all of whose workers
    have.  `running` are the ranks of this node's workers that run.  Reported once for each attempt.
    """

    seconds: float
    """Seconds since the first success."""
    finished: int
    running: tuple[int, ...]
    world_size: int = 0
    """Workers of a job of several nodes; 0 for one node."""

    def _text(self) -> str:
        total = self.world_size or self.finished + len(self.running)
        here = " here" if self.world_size else ""
        since = f"the first {self.seconds:.0f} s ago"
        have = f"{self.finished} of {total} workers have finished, {since}"
        ranks = f"rank{'s' if self.running[1:] else ''} {_listed(self.running)}"
        return f"{have}; still running{here}: {ranks}"


class StacksDumped(Event, frozen=True, kw_only=True):
    """The stacks of the workers were read, since `why`."""

    why: str
    summary: str
    """One line, such as `ranks 0-2 wait in all_reduce, rank 3 is in DataLoader.__next__`."""
    path: str | None = None
    """File with all stacks; None if the job has no log directory."""

    def _text(self) -> str:
        where = f" ({self.path})" if self.path else ""
        return f"stacks ({self.why}): {self.summary}{where}"


class GuardianRestarted(Event, frozen=True, kw_only=True):
    """The guardian process exited and was replaced."""

    pid: int
    """The new guardian."""

    def _text(self) -> str:
        return f"guardian process exited, restarted as pid {self.pid}"


class GuardianLost(Event, frozen=True, kw_only=True):
    """The guardian process exited, and `why` another one does not start.

    Attempts go on, up to a minute apart; `GuardianRestarted` reports success.  Until then nothing
    ends the job if the launcher is killed.
    """

    why: str

    def _text(self) -> str:
        return f"guardian process exited, the job is unguarded: {self.why}"


class ControlUnavailable(Event, frozen=True, kw_only=True):
    """The job has no control socket, because of `why`: `aio-elastic ps` does not show it."""

    why: str

    def _text(self) -> str:
        return f"no control socket for this job: {self.why}"


class ConsoleLost(Event, frozen=True, kw_only=True):
    """The console accepts no more output (`why`); the logs still receive all of it."""

    stream: str
    """`stdout` or `stderr`."""
    why: str
    unshown: int | None = None
    """Bytes in the log files that the console did not take; None while workers run."""

    def _text(self) -> str:
        rest = counted(self.unshown, "byte") + " not shown, " if self.unshown else ""
        return f"{self.stream} accepts no more output ({self.why}); {rest}see the logs"


class LostJobFound(Event, frozen=True, kw_only=True):
    """Processes of another job of this user run on this host without a launcher (`pids`).

    Launcher and guardian of the job were killed; `aio-elastic gc --host` ends the processes.
    """

    lost_run_id: str
    pids: tuple[int, ...]
    since: float
    """Unix seconds: the start of the oldest of them."""

    def _text(self) -> str:
        count = counted(len(self.pids), "process", "processes")
        run_id, ran = one_line(self.lost_run_id, 60), format_duration(self.time - self.since)
        what = f"{count} of run {run_id}, whose launcher was killed, still run on this host"
        return f"{what} (pid {_listed(self.pids)}; for {ran}); aio-elastic gc --host ends them"


class LogDiskFull(Event, frozen=True, kw_only=True):
    """A disk takes no more output into log files, most often for lack of space.

    `is_shown`: the console shows what they lack (`LogSpec.on_full`).
    """

    mount_point: str
    """Where the disk is mounted."""
    is_shown: bool
    why: str = "no space left on device"
    """The error of a write."""

    def _text(self) -> str:
        effect = "the console shows the rest" if self.is_shown else "they may be incomplete"
        return f"writes to the log files fail ({self.why}), {effect}: {self.mount_point}"


class LogsNotRemoved(Event, frozen=True, kw_only=True):
    """Old runs' logs are left in the log directory, because of `why` (`LogSpec.keep_runs`)."""

    why: str

    def _text(self) -> str:
        return f"logs of old runs are not removed: {self.why}"


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

    def _text(self) -> str:
        lost = "output" if self.lost is None else counted(self.lost, "byte")
        stream = f"{self.stream} of rank {self.rank}"
        what = stream if self.lost == 0 else f"{lost} of {stream} lost"
        return f"{what}: {self.why} ({self.path})"


class WorkerStoreRefused(Event, frozen=True, kw_only=True):
    """The store of the workers closed the connection of a client (`peer`), as `why` says.

    torch's protocol has no other way to refuse a request; the store is full, for example.
    """

    peer: str
    why: str

    def _text(self) -> str:
        closed = f"the store of the workers closed the connection of {self.peer}"
        return f"{closed}: it {self.why}"


class EventsMissed(Event, frozen=True, kw_only=True):
    """Stands for events that are no longer kept, or have not arrived, for this reader."""

    count: int
    """How many; 0 if that is unknown."""
    why: str = ""
    """Why, if that is known."""

    def _text(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.count or 'some'} events missed{why}"


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

    _level = Level.INFO

    def _change(self, status: StatusTracker) -> None:
        status.restarts = self.restarts
        status.enter(self.state.value, self.time, self.why)

    def _text(self) -> str:
        return f"job {self.state.value} after {self.duration:.3g} s: {self.why}"
