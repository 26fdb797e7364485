"""How workers, attempts and jobs end, and which failure is the root cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Final

from msgspec import field
from msgspec.structs import replace

from elastic_aio.reasons import LOST_PEER, reason_of
from elastic_aio.text import one_line
from elastic_aio.value import Value
from elastic_aio.worker_error import WorkerError as WorkerError

# Pure modules may not import `signal`.  A spec that names a signal means Linux's number on x86 and
# arm, as users of Kubernetes, Slurm and torchrun do.
_IN_ORDER: Final = """
HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT
STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS
"""
_RTMIN, _RTMAX = 34, 64  # glibc keeps 32 and 33 for itself: signal(7)
SIGNAL_NUMBERS: Final = {
    **{f"SIG{name}": number for number, name in enumerate(_IN_ORDER.split(), start=1)},
    **{f"SIGRTMAX-{_RTMAX - number}": number for number in range(_RTMIN, _RTMAX)},
    "SIGRTMAX": _RTMAX,
    "SIGRTMIN": _RTMIN,
    **{f"SIGRTMIN+{number - _RTMIN}": number for number in range(_RTMIN + 1, _RTMAX + 1)},
}
"""The number of each signal that has a name; the last of several names is the one that is shown."""
_REPR_MAX: Final = 1000
_NAMES: Final = {number: name for name, number in SIGNAL_NUMBERS.items()}

SIGKILL: Final = SIGNAL_NUMBERS["SIGKILL"]
SIGTERM: Final = SIGNAL_NUMBERS["SIGTERM"]

PREEMPTED_CODE: Final = 85
"""Exit code of a preempted job: ERESTART of errno(3), HTCondor's code for "run it again"."""
PREEMPTION_CHANGE: Final = 1 << 30
"""Number of the pending change that is a preemption: above those of all others."""
PREEMPTION_SLACK: Final = 1.0
"""Seconds by which a notice must be earlier than the last to replace it: clocks of nodes differ."""


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGTERM` or `SIGRTMIN+2`, else `signal 99`."""
    return _NAMES.get(number, f"signal {number}")


class ExitStatus(Value, frozen=True):
    """How a process ended.

    At most one of `code` and `signal` is set; neither if the status was lost, because another part
    of the embedding program reaped the process.
    """

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_returncode(cls, returncode: int | None) -> ExitStatus:
        """Return the status for a `subprocess` return code: negative numbers are signals."""
        if returncode is None:
            return cls()
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    @property
    def is_success(self) -> bool:
        """Whether the process exited with code 0."""
        return self.code == 0

    @property
    def returncode(self) -> int | None:
        """The number in `subprocess`'s convention; None if it was lost."""
        return self.code if self.signal is None else -self.signal

    @property
    def shell_code(self) -> int:
        """The number a shell would report: the code, 128 + the signal, or 255 if lost."""
        if self.signal is not None:
            return 128 + self.signal
        return 255 if self.code is None else self.code

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return "exit status lost" if self.code is None else f"exit code {self.code}"


class ResourceUsage(Value, frozen=True):
    """What a process used, from its start to its exit (`getrusage(2)`).

    `minor_faults` are page faults without I/O and `major_faults` with I/O; `voluntary_switches` and
    `involuntary_switches` are context switches.
    """

    user_s: float
    """Seconds of CPU time in user mode."""
    system_s: float
    """Seconds of CPU time in the kernel."""
    max_rss_bytes: int
    """The largest resident set."""
    minor_faults: int
    major_faults: int
    voluntary_switches: int
    involuntary_switches: int


class Goodput(Value, frozen=True):
    """How a job has spent its time on a node, in seconds.

    The rest of the duration is the end: the last stop of the workers.
    """

    productive: float = 0.0
    """All workers of the node ran."""
    restarting: float = 0.0
    """Stops of attempts that others followed, back-offs, and starts after the first one."""
    waiting: float = 0.0
    """For other nodes, and for the first start of all workers."""


class Failure(Value, frozen=True):
    """A worker that did not succeed: its ranks, its process and its error."""

    rank: int
    """Global rank."""
    local_rank: int
    """Rank on its host."""
    pid: int | None
    """None if the worker could not be started."""
    host: str
    """Name of its host."""
    status: ExitStatus
    """How it exited; lost if it could not be started.  Exit code 1 if it recorded an error, and
    the supervisor's signal ended it before it exited by itself."""
    time: float
    """Unix seconds: when the worker recorded its error, else when its exit was seen."""
    order: int
    """Position of its exit among the exits of the attempt, from 0."""
    is_victim: bool = False
    """Whether the supervisor stopped it because of another failure."""
    error: WorkerError | None = None
    """What the worker recorded; None if it recorded nothing."""
    message: str = ""
    """What is known without an `error`, such as why the worker could not be started."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines of its stderr, where that is captured."""
    stderr_path: str | None = None
    """File with its stderr; None if that is not captured, or the file was removed."""
    notes: tuple[str, ...] = ()
    """What the supervisor adds: an OOM kill, a full disk, a full store."""
    reason: str = ""
    """One line that says why: the exception, the last line of stderr, or what the status proves;
    empty if only the status is known."""
    cause: str = ""
    """Name of a known cause, such as "out of memory: ..." or "a port is in use"."""

    @property
    def distance(self) -> tuple[bool, bool]:
        """How far it is from the root cause: a victim, a worker that has lost a peer, or none."""
        return self.is_victim, self.cause == LOST_PEER

    @property
    def summary(self) -> str:
        """One line: the worker, how it ended, and why."""
        worker = f"rank {self.rank}" if self.pid is None else f"rank {self.rank} (pid {self.pid})"
        if self.pid is None and self.message:
            return f"{worker}: {self.message}"
        message = self.error.message if self.error else self.message
        code, signal = self.status.code, self.status.signal
        said = self.reason or reason_of(message, self.stderr_tail, code=code, signal=signal)
        reason = said or self.cause
        return f"{worker}: {self.status}" + (f": {reason}" if reason else "")


def root_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sort failures so that the root cause comes first.

    Victims come last, and before them workers that have lost a peer; the others by time, then by
    the order in which exits were seen.
    """
    return tuple(
        sorted(failures, key=lambda item: (*item.distance, item.time, item.order, item.rank))
    )


class WorkerResult(Value, frozen=True):
    """How one worker of one attempt ended.

    `rank` is the global rank, `local_rank` the rank on this host; `status` is how the process `pid`
    exited, or the status of its `Failure`.  `stdout_path` and `stderr_path` are None if the stream
    is not captured, or its file was removed.
    """

    rank: int
    local_rank: int
    pid: int
    status: ExitStatus
    duration: float
    """Seconds."""
    usage: ResourceUsage | None = None
    """None for a process that other code of the program reaped."""
    stdout_path: str | None = None
    stderr_path: str | None = None
    stderr_tail: str = ""
    """The end of its stderr, 64 KiB at most, if it failed and its stderr is captured; of the
    first 16 failures of an attempt."""
    return_value: Any = None
    """What the worker's function returned; None for commands."""

    # A value may have 100 MB, and asyncio formats what its tasks return.
    _hidden: ClassVar[tuple[str, ...]] = ("stderr_tail", "return_value")


class AttemptResult(Value, frozen=True):
    """One attempt: a start of the worker group and what became of it."""

    number: int
    """From 0."""
    started_at: float
    """Unix seconds."""
    duration: float
    """Seconds."""
    workers: tuple[WorkerResult, ...] = ()
    """The workers of this host, by local rank."""
    failures: tuple[Failure, ...] = ()
    """The root cause first; empty after a success or a stop."""
    log_dir: str | None = None
    """Directory of this attempt's logs; None if there is none, or it was removed."""


class JobState(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    """It was given notice of a preemption, and its workers have ended; to be run again."""


class EndCause(StrEnum):
    """What ended a job on a node beside its workers, where a program may act on it."""

    TOO_FEW_NODES = "too few nodes"
    """The nodes did not come together within `join_timeout`."""
    NODES_NOT_REPLACED = "nodes not replaced"
    """Nodes were lost or had left, and too few remained for another round."""
    NO_STORE = "no store"
    """The node could neither reach nor serve a store."""
    RUN_HAD_ENDED = "run had ended"
    """The node came after the end of its run."""
    OTHER_JOB = "other job"
    """Another job with the same run id had begun when the node came back from being cut off."""


class JobOutcome(Value, frozen=True):
    """How the whole job ended, the same for every node.

    `why` is the rule that led to `state`, `exit_code` the launcher's, and `restarts` the number of
    restarts after failures.  `failures` ended the job, on any node, the root cause first.
    `is_rendezvous`: not the workers failed, but the rendezvous of the nodes.  `cause` is what else
    is known about the end.
    """

    state: JobState
    why: str
    exit_code: int
    restarts: int = 0
    failures: tuple[Failure, ...] = ()
    is_rendezvous: bool = False
    cause: EndCause | None = None


def preempted(why: str, restarts: int = 0) -> JobOutcome:
    """Return the outcome of a job that is preempted because of `why`."""
    return JobOutcome(JobState.PREEMPTED, why, PREEMPTED_CODE, restarts)


class LaunchResult(Value, frozen=True):
    """How a job ended, with every attempt and what the functions returned."""

    run_id: str
    """Identifier of the run."""
    state: JobState
    """Succeeded, failed, stopped or preempted."""
    reason: str
    """The rule or request that ended the job, in one line."""
    exit_code: int
    """What a command-line launcher should exit with."""
    duration: float
    """Seconds."""
    restarts: int = 0
    """Restarts after failures; membership changes are not counted."""
    attempts: tuple[AttemptResult, ...] = ()
    """The attempts on this host, in order: the latest 100."""
    return_values: Mapping[int, Any] = field(default_factory=dict)
    """What the function of each worker of this host returned, by global rank."""
    log_dir: str | None = None
    """Directory of this run's logs; None if there is none, or it was removed."""
    cause: EndCause | None = None
    """What ended the job beside its workers, if something did."""
    goodput: Goodput = field(default_factory=Goodput)
    """How the time was spent on this node."""
    children: Mapping[str, LaunchResult] = field(default_factory=dict)
    """How each child of a group has ended, or a worker of independent workers, by its name."""

    _hidden: ClassVar[tuple[str, ...]] = ("attempts", "return_values", "children")

    def __repr__(self) -> str:
        return one_line(super().__repr__(), _REPR_MAX)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of the last attempt, the root cause first."""
        return self.attempts[-1].failures if self.attempts else ()

    @property
    def failed_child(self) -> str:
        """The path of the child of a group whose failures these are; empty for no child."""
        for name, child in self.children.items():
            if self.failures and child.failures[:1] == self.failures[:1]:
                below = child.failed_child
                return f"{name}/{below}" if below else name
        return ""


def make_result(
    run_id: str,
    outcome: JobOutcome,
    attempt: int,
    ended: Iterable[AttemptResult],
    duration: float,
    now: float,
    *,
    log_dir: str | None,
    goodput: Goodput,
) -> LaunchResult:
    """Return what `Agent.wait` returns, or raises within an exception.

    `attempt` is the number of the job's last attempt, `ended` has the attempts of this host.
    `log_dir` is None if there is none, or it was removed; `now` is in Unix seconds.
    """
    attempts = [*ended]
    if outcome.failures:
        # A node that had no failure itself, or no attempt at all, gets the job's.
        last = attempts[-1:] or [AttemptResult(attempt, now, 0.0)]
        attempts = [*attempts[:-1], replace(last[0], failures=outcome.failures)]
    workers = attempts[-1].workers if outcome.state is JobState.SUCCEEDED and attempts else ()
    return LaunchResult(
        run_id=run_id,
        state=outcome.state,
        reason=outcome.why,
        exit_code=outcome.exit_code,
        duration=duration,
        restarts=outcome.restarts,
        attempts=tuple(attempts),
        return_values={worker.rank: worker.return_value for worker in workers},
        log_dir=log_dir,
        cause=outcome.cause,
        goodput=goodput,
    )


def with_paths(
    attempts: Iterable[AttemptResult], host: str, change: Callable[[str | None], str | None]
) -> tuple[AttemptResult, ...]:
    """Return results with the paths of this host changed; those in failures of others stay."""
    return tuple(
        replace(
            attempt,
            log_dir=change(attempt.log_dir),
            workers=tuple(
                replace(
                    each, stdout_path=change(each.stdout_path), stderr_path=change(each.stderr_path)
                )
                for each in attempt.workers
            ),
            failures=tuple(
                replace(each, stderr_path=change(each.stderr_path)) if each.host == host else each
                for each in attempt.failures
            ),
        )
        for attempt in attempts
    )
