"""How workers, attempts and jobs end, and which failure is the root cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic_aio.signames import signal_name

__all__ = [
    "AttemptResult",
    "ExitStatus",
    "Failure",
    "JobState",
    "LaunchResult",
    "ResourceUsage",
    "WorkerError",
    "WorkerResult",
    "root_cause_first",
]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: by an exit code, by a signal, or unknown.

    Exactly one of `code` and `signal` is set; neither when the status was lost
    (another part of the embedding program reaped our child).
    """

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_returncode(cls, returncode: int | None) -> ExitStatus:
        """Read `subprocess`'s convention: negative numbers are signals."""
        if returncode is None:
            return cls()
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    @property
    def is_success(self) -> bool:
        """Whether the process exited with code 0."""
        return self.code == 0

    @property
    def returncode(self) -> int | None:
        """The number in `subprocess`'s convention; None when it was lost."""
        return self.code if self.signal is None else -self.signal

    @property
    def shell_code(self) -> int:
        """The number a shell would report: the code, 128 + the signal, or 255."""
        if self.signal is not None:
            return 128 + self.signal
        return 255 if self.code is None else self.code

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by {signal_name(self.signal)}"
        return "exit status lost" if self.code is None else f"exit code {self.code}"


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a reaped process used (`getrusage`): seconds, bytes and counts."""

    user_s: float
    system_s: float
    max_rss_bytes: int
    minor_faults: int
    major_faults: int
    voluntary_switches: int
    involuntary_switches: int


@dataclass(frozen=True, slots=True)
class WorkerError:
    """What a worker wrote about its own end (torch's `error.json`).

    `timestamp` is in Unix seconds; `path` is the file it was read from, empty when a
    function's result told it.
    """

    message: str
    traceback: str | None
    timestamp: float
    path: str


@dataclass(frozen=True, slots=True)
class Failure:
    """One worker that did not succeed.

    `is_victim` tells the culprits from those that the supervisor stopped because
    of them.  `time` is Unix seconds: when the worker recorded its error, or else
    when its exit was seen; `order` is the position of its exit among all exits.
    `stderr_tail` holds the last lines of its stderr, where that was captured;
    `notes` adds what the kernel knows (an OOM kill, a full disk).
    """

    rank: int
    local_rank: int
    pid: int | None
    host: str
    status: ExitStatus
    time: float
    order: int
    is_victim: bool = False
    error: WorkerError | None = None
    message: str = ""
    stderr_tail: tuple[str, ...] = ()
    stderr_path: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: who it was, how it ended, and what it said last."""
        who = f"rank {self.rank}" if self.pid is None else f"rank {self.rank} (pid {self.pid})"
        if self.pid is None and self.message:
            return f"{who}: {self.message}"
        said = self.error.message if self.error else self.message
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        text = f"{who}: {self.status}"
        return f"{text}: {last.strip()}" if last else text


def root_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Order failures: culprits before victims, the earliest error first.

    Victims never become the root while there is a culprit.  Equal times keep the
    order in which the exits were seen.
    """
    return tuple(sorted(failures, key=lambda one: (one.is_victim, one.time, one.order, one.rank)))


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """How one worker of one attempt lived and ended; times in seconds.

    `usage` is None where the event loop reaped the worker instead of us.
    """

    rank: int
    local_rank: int
    pid: int
    status: ExitStatus
    duration: float
    usage: ResourceUsage | None = None
    stdout_path: str | None = None
    stderr_path: str | None = None
    # Not shown: it may have 100 MB, and asyncio looks at what its tasks return.
    return_value: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """One incarnation of the group; `duration` is seconds, `started_at` Unix seconds.

    `failures` is empty on success and after a stop; the root cause comes first.
    """

    number: int
    started_at: float
    duration: float
    workers: tuple[WorkerResult, ...] = ()
    failures: tuple[Failure, ...] = ()
    log_dir: str | None = None


class JobState(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """What became of a job: every attempt, and what it returned.

    `return_values` maps global ranks to what their functions returned (None for
    commands); `restarts` counts restarts after failures; `exit_code` is what a
    command-line launcher should exit with; `log_dir` is the folder of this run.
    """

    run_id: str
    state: JobState
    reason: str
    exit_code: int
    duration: float
    restarts: int = 0
    attempts: tuple[AttemptResult, ...] = ()
    return_values: Mapping[int, Any] = field(default_factory=dict, repr=False)
    log_dir: str | None = None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of the last attempt, the root cause first."""
        return self.attempts[-1].failures if self.attempts else ()
