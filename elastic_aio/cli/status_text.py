"""The status of jobs as text: tables of jobs and workers, and the page of one job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from elastic_aio.control.client import RunningJob
from elastic_aio.spec.restart import UNLIMITED, restarts_text
from elastic_aio.status import JobStatus, WorkerStatus
from elastic_aio.text import counted, format_duration, one_line, printable, truncate

JOB_COLUMNS = (
    "RUN",
    "PID",
    "NAME",
    "PHASE",
    "WORKERS",
    "GROUP RANK",
    "ATTEMPT",
    "RESTARTS LEFT",
    "TIME",
)
WORKER_COLUMNS = ("RANK", "PID", "STATE", "SINCE", "CPU", "CPU TIME", "PEAK MEM", "LAST MESSAGE")

CHILD_COLUMNS = ("CHILD", "PHASE", "SINCE", "READY", "START", "RESTARTS", "WORKERS", "WHY")

MEASURED_S = 0.25
"""Seconds between two looks at the CPU time of a process, whose unit is 10 milliseconds."""

ID_MAX = 36  # a UUID, which torchrun takes: what is shown names the job
_NAME_MAX = 32
_REPORTED_MAX = 60


def local_time(seconds: float) -> str:
    """Return Unix seconds as date and time of this host."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; each column is as wide as its widest cell."""
    cells = [columns, *rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def job_row(job: RunningJob, now: float) -> tuple[str, ...]:
    status = job.status
    if status is None:
        return ("?", str(job.pid), "?", "does not answer", "?", "?", "?", "?", "?")
    is_tree = bool(status.children)
    return (
        one_line(status.run_id, ID_MAX),
        str(job.pid),
        one_line(status.entrypoint, _NAME_MAX),
        status.phase,
        _running_of(status),
        "-" if is_tree or status.round < 0 else str(status.group_rank),
        "-" if is_tree else str(status.attempt),
        "-" if is_tree else _restarts_left(status),
        format_duration(now - (status.started_at or now)),
    )


def _restarts_left(status: JobStatus) -> str:
    return "unlimited" if status.max_restarts == UNLIMITED else str(status.restarts_left)


def _running_of(status: JobStatus) -> str:
    """Return how many workers run, and how many there are, as in `3/4`."""
    states = [worker.state for leaf in status.leaves for worker in leaf.workers]
    return f"{states.count('running')}/{len(states)}"


def child_row(child: JobStatus, now: float) -> tuple[str, ...]:
    """Return the cells of a child for `CHILD_COLUMNS`."""
    ready, why = child.ready_since, child.reason
    if child.phase == "restarting" and child.failed_attempt >= child.attempt:
        why = child.failure
    return (
        one_line(child.child, _NAME_MAX),
        child.phase,
        format_duration(now - child.since) if child.since else "-",
        "no" if ready is None or child.has_ended else "yes",
        str(child.generation),
        str(child.restarts),
        _running_of(child),
        one_line(why or child.failure, _REPORTED_MAX),
    )


def child_table(status: JobStatus, now: float) -> list[str]:
    """Return the lines of the table of all children; none without any."""
    rows = [child_row(child, now) for child in status.descendants]
    return ["", *table(CHILD_COLUMNS, rows)] if rows else []


def worker_cells(
    status: JobStatus, now: float, share_of: Callable[[WorkerStatus], float | None]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the workers, of a tree with the path of their child.

    `share_of` returns the part of a CPU that a worker uses.
    """
    if not status.children:
        return WORKER_COLUMNS, [worker_row(one, now, share_of(one)) for one in status.workers]
    rows = [
        (one_line(leaf.child, _NAME_MAX), *worker_row(one, now, share_of(one)))
        for leaf in status.leaves
        for one in leaf.workers
    ]
    return ("CHILD", *WORKER_COLUMNS), [*rows]


def worker_row(worker: WorkerStatus, now: float, share: float | None = None) -> tuple[str, ...]:
    """Return the cells of a worker for `WORKER_COLUMNS`; `share` is the part of a CPU it uses."""
    usage = worker.usage
    state = worker.state if not worker.status else f"{worker.state} ({worker.status})"
    return (
        str(worker.rank),
        str(worker.pid),
        state,
        format_duration(now - worker.since),
        "" if share is None else f"{share:.0%}",
        "" if usage is None else format_duration(usage.user_s + usage.system_s),
        "" if usage is None else format_size(usage.max_rss_bytes),
        _message(worker, now),
    )


def _message(worker: WorkerStatus, now: float) -> str:
    if worker.heartbeat is None:
        return one_line(worker.probe, _REPORTED_MAX)
    ago = f"{format_duration(now - worker.heartbeat)} ago"
    return f"{ago}: {one_line(worker.reported, _REPORTED_MAX)}" if worker.reported else ago


def head_lines(status: JobStatus, now: float, phase: str | None = None) -> list[str]:
    """Return the lines about a job itself, without its workers.

    `phase` stands in place of the phase and its duration; the end of a job has no duration.
    """
    if phase is None:
        lasts = status.since and not status.has_ended
        phase = status.phase + (f" for {format_duration(now - status.since)}" if lasts else "")
    why = f": {one_line(status.reason)}" if status.reason else ""
    count = len(status.descendants)
    used = f"{status.restarts - status.returned} of {restarts_text(status.max_restarts)} used"
    if status.child and status.started_at is None:  # it waits for another child
        return [f"run {one_line(status.run_id)}: {status.child}", f"phase     {phase}{why}"]
    lines = [
        f"run {one_line(status.run_id)}: {one_line(status.entrypoint)}"
        f" on {one_line(status.node)} (pid {status.agent_pid})",
        f"phase     {phase}{why}",
        f"attempt   {status.attempt} ({used})"
        if not count
        else f"children  {counted(count, 'child', 'children')}, {_running_of(status)} workers run",
    ]
    if status.group_world_size > 1 or status.round > 0:
        place = f"group rank {status.group_rank} of {status.group_world_size}"
        workers, master = counted(status.world_size, "worker"), one_line(status.master)
        lines.append(f"round     {status.round}: {place}, {workers} in all, master {master}")
    lines.append(f"time      {_time(status, now)}")
    if status.failure:
        # Not the end of a job that has succeeded: it was restarted.
        last = f"the last, of attempt {status.failed_attempt}: "
        is_past = status.phase == "succeeded"
        lines.append(f"failure   {last if is_past else ''}{one_line(status.failure)}")
    if status.log_dir:
        lines.append(f"logs      {printable(status.log_dir)}")
    return lines


def _time(status: JobStatus, now: float) -> str:
    started = now if status.started_at is None else status.started_at
    elapsed, spent = max(now - started, 1e-9), status.goodput
    kinds = (
        ("productive", spent.productive),
        ("restarting", spent.restarting),
        ("waiting", spent.waiting),
    )
    shares = ", ".join(
        f"{min(seconds / elapsed, 1):.0%} {name}" for name, seconds in kinds if seconds
    )
    return format_duration(elapsed) + (f": {shares}" if shares else "")


class CpuMeter:
    """Measures each worker's share of a CPU since the previous call."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}

    def share(self, worker: WorkerStatus) -> float | None:
        """Return the share of a CPU of a worker; None at first, and if it does not run."""
        if worker.usage is None or worker.state != "running":
            return None
        now, seconds = time.monotonic(), worker.usage.user_s + worker.usage.system_s
        before = self._before.get(worker.pid)
        self._before[worker.pid] = now, seconds
        if before is None or now <= before[0]:
            return None
        return max(0.0, (seconds - before[1]) / (now - before[0]))


def format_size(number: int) -> str:
    """Return bytes for people: `512 KiB`, `1.4 GiB`."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def fit(lines: Sequence[str], width: int) -> list[str]:
    return [truncate(line, width) for line in lines]
