"""Why workers failed: their error files, last lines of stderr, OOM kills, full disks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from elastic_aio.aio import read_file
from elastic_aio.logs.paths import StreamPlan, WorkerLogs
from elastic_aio.outcome import (
    SIGKILL,
    ExitStatus,
    Failure,
    WorkerError,
    WorkerResult,
    root_cause_first,
)
from elastic_aio.process.base import ChildExit
from elastic_aio.process.calls import CallResult
from elastic_aio.ranks import WorkerRanks
from elastic_aio.worker.errorfile import ERROR_FILE_MAX, parse_error_file

_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_MARGIN_S = 0.001
_NO_RESULT = CallResult(0)
# The exit of an interpreter with an exception; a `SystemExit` is recorded as no error.
_RECORDED = ExitStatus(code=1)


class WorkerRecord(Struct):
    """One worker of an attempt; what follows `started_at` is set when it exits.

    Attributes:
        ranks: its ranks.
        pid: its process id.
        logs: where its output and its error file are.
        started_at: monotonic seconds.
        exit: how it exited; None while it runs.
        exited_at: Unix seconds.
        order: position of its exit among all exits of the job.
        stop_signals: the signals that a stop sent to it before it exited.
        expired_timer: which timer it did not release in time, before it exited.
    """

    ranks: WorkerRanks
    pid: int
    logs: WorkerLogs
    started_at: float = 0.0
    exit: ChildExit | None = None
    exited_at: float = 0.0
    order: int = 0
    stop_signals: frozenset[int] = frozenset()
    expired_timer: str = ""

    @property
    def is_victim(self) -> bool:
        """Whether a stop signalled it before it exited."""
        return bool(self.stop_signals)

    @property
    def status(self) -> ExitStatus:
        """How it exited; unknown while it runs."""
        return ExitStatus() if self.exit is None else self.exit.status

    @property
    def duration(self) -> float:
        """Seconds from start to exit; 0 while it runs."""
        return 0.0 if self.exit is None else self.exit.at - self.started_at

    @property
    def was_ended_by_stop(self) -> bool:
        """Whether a signal of the stop ended it, or made it exit with 128 + the signal."""
        code = self.status.shell_code - 128
        return code in self.stop_signals

    def result(self, status: ExitStatus, call: CallResult | None) -> WorkerResult:
        """Return the public result.

        Args:
            status: of its failure, else its own.
            call: how its function ended; None for commands.
        """
        return WorkerResult(
            rank=self.ranks.rank,
            local_rank=self.ranks.local_rank,
            pid=self.pid,
            status=status,
            duration=self.duration,
            usage=None if self.exit is None else self.exit.usage,
            stdout_path=self.logs.stdout.path,
            stderr_path=self.logs.stderr.path,
            return_value=None if call is None else call.value,
        )


async def collect_failures(
    workers: Iterable[WorkerRecord],
    results: Mapping[int, CallResult],
    *,
    host: str,
    stopped_at: float,
    oom_kills_before: int | None,
    store_refusals: Sequence[str] = (),
) -> tuple[Failure, ...]:
    """Return the failures among workers, the root cause first.

    A worker that recorded an error before the stop began is a culprit even if the
    stop was faster than its own exit.  Its status is then that of its error: the signal of
    the stop says nothing about why it failed.  A worker whose function's value did not arrive
    has failed, whatever its exit code.  A file that cannot be read is left out.

    Args:
        workers: the workers of an attempt; those still running are skipped.
        results: how their functions ended, by local rank; empty for commands.
        host: name of this host.
        stopped_at: Unix seconds at which the stop of the group began.
        oom_kills_before: the kernel's counter when the attempt began.
        store_refusals: the requests that the store of the workers has refused.
    """
    failures = []
    notes = tuple(f"the store of the workers dropped a client: it {why}" for why in store_refusals)
    for worker in workers:
        result = results.get(worker.ranks.local_rank, _NO_RESULT)
        if worker.exit is None or (worker.exit.status.is_success and not result.problem):
            continue
        # An error file has precedence: it was written by the worker's own code.
        error = await _read_error(worker.logs.error_file) or result.error
        is_own = error is not None and error.timestamp <= stopped_at + _MARGIN_S
        is_victim = worker.is_victim and not is_own
        failures.append(
            Failure(
                rank=worker.ranks.rank,
                local_rank=worker.ranks.local_rank,
                pid=worker.pid,
                host=host,
                status=_RECORDED if is_own and worker.was_ended_by_stop else worker.exit.status,
                time=error.timestamp if error else worker.exited_at,
                order=worker.order,
                is_victim=is_victim,
                error=error,
                message=worker.expired_timer or result.problem,
                stderr_path=worker.logs.stderr.path,
                stderr_tail=() if is_victim else await _tail(worker.logs.stderr.path),
                notes=() if is_victim else (*_notes(worker, error), *notes),
            )
        )
    return root_cause_first(_note_oom(failures, oom_kills_before))


async def _read_error(path: str) -> WorkerError | None:
    try:
        status = os.stat(path)
        if not status.st_size:
            return None
        if status.st_size > ERROR_FILE_MAX:
            message = f"its error file is too large ({status.st_size} bytes): {path}"
            return WorkerError(message, None, status.st_mtime, path)
        content = await read_file(path, 0, ERROR_FILE_MAX)
    except OSError:
        return None
    return parse_error_file(content, path, status.st_mtime)


async def _tail(path: str | None) -> tuple[str, ...]:
    """Return the last lines of a file, progress bars reduced to their last state."""
    if path is None:
        return ()
    try:
        size = os.stat(path).st_size
        if not size:
            return ()
        content = await read_file(path, max(0, size - _TAIL_BYTES), _TAIL_BYTES)
    except OSError:
        return ()
    lines = content.decode("utf-8", "replace").rstrip("\n").split("\n")
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
    if size > _TAIL_BYTES and len(shown) > 1:
        del shown[0]  # most likely cut
    return tuple(shown[-_TAIL_LINES:])


def _notes(worker: WorkerRecord, error: WorkerError | None) -> tuple[str, ...]:
    # An error that the worker recorded hides the message.
    timer = (worker.expired_timer,) if error is not None and worker.expired_timer else ()
    return (*timer, *_full_disks(worker.logs))


def _full_disks(logs: WorkerLogs) -> tuple[str, ...]:
    """Return a note for each log file on a disk that has no space left."""
    return tuple(
        _full_disk_note(stream, stream.path)
        for stream in (logs.stdout, logs.stderr)
        if stream.path is not None and is_full(stream.path)
    )


def _full_disk_note(stream: StreamPlan, path: str) -> str:
    note = f"the disk of its log file is full: {mount_point(path)} ({path})"
    if stream.is_relayed:
        return note
    return f"{note}; the file ends after {os.stat(path).st_size} bytes, what followed is lost"


def is_full(path: str) -> bool:
    """Return whether the disk of a file or directory has no space left."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail == 0 or bool(disk.f_files and disk.f_favail == 0)


def mount_point(path: str) -> str:
    """Return the directory at which the file system of `path` is mounted."""
    directory = os.path.realpath(path)
    while not os.path.ismount(directory):
        directory = os.path.dirname(directory)
    return directory


def oom_kills() -> int | None:
    """Return how many processes of this cgroup the kernel's OOM killer has killed so far.

    Reads `memory.events` (cgroup v2) or `memory.oom_control` (v1); None where the host
    has neither.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            groups = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers == "":
            name = "memory.events"
            parents = [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup/unified{path}", "/sys/fs/cgroup"]
        elif "memory" in controllers.split(","):
            name = "memory.oom_control"
            parents = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
        else:
            continue
        for parent in parents:
            count = _oom_kill_count(os.path.join(parent, name))
            if count is not None:
                return count
    return None


def _oom_kill_count(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass  # this cgroup version is not mounted here
    return None


def _note_oom(failures: list[Failure], before: int | None) -> list[Failure]:
    """Add a note about OOM kills to workers that died by a SIGKILL other than ours."""
    after = oom_kills() if before is not None else None
    if before is None or after is None or after <= before:
        return failures
    note = (
        "out of memory: the kernel has killed"
        f" {after - before} process(es) of this control group during this attempt"
    )
    return [
        replace(failure, notes=(*failure.notes, note))
        if failure.status.signal == SIGKILL and not failure.is_victim
        else failure
        for failure in failures
    ]
