"""What can be learned about workers that failed: their error file, last words, the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from msgspec import Struct

from elastic_aio.agent.memory import oom_kills
from elastic_aio.logs.paths import WorkerLogs
from elastic_aio.outcome import ExitStatus, Failure, WorkerError, root_cause_first
from elastic_aio.signames import SIGKILL
from elastic_aio.worker.errorfile import parse_error_file

__all__ = ["EndedWorker", "gather_failures"]

_TAIL_LINES = 20
_TAIL_BYTES = 16 * 1024
_ERROR_FILE_MAX = 8 * 1024 * 1024
_MARGIN_S = 0.001


class EndedWorker(Struct, frozen=True):
    """A worker that did not succeed; `ended_at` is Unix seconds.

    `error` and `problem` are what a function said itself; an error file goes first.
    """

    rank: int
    local_rank: int
    pid: int
    host: str
    status: ExitStatus
    ended_at: float
    order: int
    is_victim: bool
    logs: WorkerLogs
    error: WorkerError | None = None
    problem: str = ""


async def gather_failures(
    workers: Iterable[EndedWorker], *, stopped_at: float, oom_kills_before: int | None
) -> tuple[Failure, ...]:
    """Return what is known of each failure, the root cause first.

    A worker that recorded an error before the stop began is a culprit even if the
    stop was faster than its own exit.  Reading fails silently: a broken file must
    not break the agent.

    Args:
        workers: those that did not succeed.
        stopped_at: Unix seconds at which the group began to be stopped.
        oom_kills_before: the kernel's counter when the attempt began.
    """
    failures = []
    for worker in workers:
        error = await _read_error(worker.logs.error_file) or worker.error
        is_victim = worker.is_victim and not (error and error.timestamp <= stopped_at + _MARGIN_S)
        failures.append(
            Failure(
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.pid,
                host=worker.host,
                status=worker.status,
                time=error.timestamp if error else worker.ended_at,
                order=worker.order,
                is_victim=is_victim,
                error=error,
                message=worker.problem,
                stderr_path=worker.logs.stderr.path,
                stderr_tail=() if is_victim else await _tail(worker.logs.stderr.path),
                notes=() if is_victim else _full_disks(worker.logs),
            )
        )
    return root_cause_first(_with_oom(failures, oom_kills_before))


async def _read_error(path: str) -> WorkerError | None:
    try:
        written = os.stat(path)
        if not 0 < written.st_size <= _ERROR_FILE_MAX:
            return None
        content = await read_file(path, 0, _ERROR_FILE_MAX)
    except OSError:
        return None
    return parse_error_file(content, path, written.st_mtime)


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


async def read_file(path: str, offset: int, size: int) -> bytes:
    """Read a part of a file in a thread of its own: log folders may be on slow disks.

    A machine that has no thread left gets a plain read.

    Raises:
        OSError: the file cannot be read.
    """
    # Imported here: most jobs end without a file to read.
    from concurrent.futures import ThreadPoolExecutor

    import aiofiles

    # Not the loop's default executor, whose threads would outlive the job.
    executor = ThreadPoolExecutor(max_workers=1)
    is_idle = False
    try:
        async with aiofiles.open(path, "rb", executor=executor) as file:
            await file.seek(offset)
            content = await file.read(size)
        is_idle = True
        return content
    except RuntimeError:  # can't start new thread
        with open(path, "rb") as file:  # noqa: ASYNC230  # the last resort
            file.seek(offset)
            return file.read(size)
    finally:
        # An idle thread ends at once; one that a dead disk holds is not waited for.
        executor.shutdown(wait=is_idle)


def _full_disks(logs: WorkerLogs) -> tuple[str, ...]:
    """Name the disk of a log file that has no room left."""
    for path in (logs.stdout.path, logs.stderr.path):
        if path is None:
            continue
        try:
            disk = os.statvfs(path)
        except OSError:
            continue
        if disk.f_bavail == 0 or (disk.f_files and disk.f_favail == 0):
            return (f"the disk of its log file is full: {mount_point(path)} ({path})",)
    return ()


def mount_point(path: str) -> str:
    """Return the folder at which the file system of `path` is mounted."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place


def _with_oom(failures: list[Failure], before: int | None) -> list[Failure]:
    """Add the kernel's word to workers that somebody other than us has killed."""
    after = oom_kills() if before is not None else None
    if before is None or after is None or after <= before:
        return failures
    note = (
        "out of memory: the kernel has killed"
        f" {after - before} process(es) of this control group during this attempt"
    )
    return [
        replace(one, notes=(*one.notes, note))
        if one.status.signal == SIGKILL and not one.is_victim
        else one
        for one in failures
    ]
