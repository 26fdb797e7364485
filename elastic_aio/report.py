"""What people read: one line for an event, and the failure report in torch's layout.

All of it is made from events and results alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic_aio.events import (
    AttemptFailed,
    ConsoleLost,
    Event,
    EventsMissed,
    GuardianReplaced,
    JobFinished,
    JobStarted,
    Restarting,
    SignalForwarded,
    StopEscalated,
    StopRequested,
    WorkerAbandoned,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.outcome import Failure, LaunchResult
from elastic_aio.signames import signal_name

__all__ = ["Level", "describe", "format_failure"]

_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_WIDTH_MAX = 60


class Level:
    """How much an event matters, with the numbers of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30


def describe(event: Event) -> tuple[int, str]:
    """Return the level of an event and one line about it."""
    match event:
        case JobStarted():
            return Level.WARNING, _job_started(event)
        case WorkerStarted():
            return Level.INFO, f"rank {event.rank} started (pid {event.pid})"
        case WorkerExited():
            return Level.INFO, _worker_exited(event)
        case AttemptFailed():
            return Level.WARNING, f"attempt {event.attempt} failed: {event.root.summary}"
        case Restarting():
            after = f" after {event.delay:.3g} s" if event.delay else ""
            return Level.WARNING, f"restarting as attempt {event.attempt}{after}: {event.why}"
        case StopRequested():
            level = Level.INFO if event.signal is None else Level.WARNING
            return level, f"stopping the workers ({event.plan}): {event.reason}"
        case StopEscalated():
            who = f"{len(event.pids)} process{'es' if len(event.pids) != 1 else ''}"
            listed = ", ".join(map(str, event.pids[:8])) + (", ..." if len(event.pids) > 8 else "")
            name = signal_name(event.signal)
            return Level.WARNING, f"{who} did not stop in time, sending {name} (pid {listed})"
        case WorkerAbandoned():
            return (
                Level.WARNING,
                f"process {event.pid} could not be killed (state {event.state}) and is left behind",
            )
        case SignalForwarded():
            name = signal_name(event.signal)
            return Level.INFO, f"{name} was passed on to {len(event.pids)} workers"
        case GuardianReplaced():
            return Level.INFO, f"the guardian process had died; pid {event.pid} replaces it"
        case ConsoleLost():
            return Level.WARNING, f"{event.stream} takes no more output ({event.why}); see the logs"
        case EventsMissed():
            return Level.WARNING, f"{event.count} events were missed"
        case JobFinished():
            ended = f"the job has {event.state.value} after {event.duration:.3g} s"
            return Level.INFO, f"{ended}: {event.why}"
    return Level.DEBUG, repr(event)


def _job_started(event: JobStarted) -> str:
    workers = f"{event.nproc_per_node} worker{'s' if event.nproc_per_node != 1 else ''}"
    logs = f"logs in {event.log_dir}" if event.log_dir else "no log files"
    return (
        f"run {event.run_id}: {workers} of {event.entrypoint} on {event.node},"
        f" {event.max_restarts} restarts, {logs}"
    )


def _worker_exited(event: WorkerExited) -> str:
    asked = ", as it was asked to" if event.is_victim else ""
    who = f"rank {event.rank} (pid {event.pid})"
    return f"{who}: {event.status}{asked}, after {event.duration:.3g} s"


def format_failure(result: LaunchResult, name: str) -> str:
    """Return the failure report of a job, several lines without a last newline.

    The layout is torchrun's.  What is new: victims are called so, the last lines of
    the culprit's stderr stand there when it recorded no traceback, and the folder
    of the logs is named.

    Args:
        result: of a job that failed.
        name: what its workers ran.
    """
    if not result.failures:
        return f"{name} FAILED: {result.reason}"
    root, *others = result.failures
    # Numbered by rank, whatever the order of the causes: [i] finds a worker again.
    by_rank = sorted(result.failures, key=lambda one: one.rank)
    blocks = {id(one): _block(position, one) for position, one in enumerate(by_rank)}
    title = f"{name} FAILED"
    shown = "\n".join(blocks[id(one)] for one in others) or "  <NO_OTHER_FAILURES>"
    lines = [title, *(line for block in blocks.values() for line in block.split("\n"))]
    width = min(_WIDTH_MAX, max(len(line) for line in lines))
    parts = [
        "",
        "=" * width,
        title,
        "-" * width,
        "Failures:",
        shown,
        "-" * width,
        "Root Cause (first observed failure):",
        blocks[id(root)],
        "=" * width,
    ]
    if result.log_dir:
        parts.append(f"Logs: {result.log_dir}")
    return "\n".join(parts)


def _block(position: int, failure: Failure) -> str:
    status = failure.status
    code = "?" if status.returncode is None else str(status.returncode)
    signal = f" ({signal_name(status.signal)})" if status.signal is not None else ""
    fields: list[tuple[str, str]] = [
        ("time", _local_time(failure.time)),
        ("host", failure.host),
        ("rank", f"{failure.rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{code} (pid: {failure.pid}){signal}"),
        ("error_file", (failure.error and failure.error.path) or "<N/A>"),
    ]
    if failure.is_victim:
        fields.append(("stopped", "by the supervisor, because of the root cause"))
    fields += [("note", note) for note in failure.notes]
    fields.append(("traceback", _traceback(failure)))
    if failure.stderr_tail and not (failure.error and failure.error.traceback):
        said = _indented(failure.stderr_tail)
        fields.append(("stderr", f"last lines of {failure.stderr_path}:\n{said}"))
    return f"[{position}]:\n" + "\n".join(f"  {key:<10}: {value}" for key, value in fields)


def _traceback(failure: Failure) -> str:
    if failure.error is not None:
        text = failure.error.traceback or failure.error.message
        first, *rest = text.rstrip("\n").split("\n")
        return "\n".join([first, *(f"  {line}" for line in rest)])
    if failure.message:
        return failure.message
    if failure.status.signal is not None:
        number = failure.status.signal
        return f"Signal {number} ({signal_name(number)}) received by PID {failure.pid}"
    return _HINT


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _local_time(unix: float) -> str:
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(unix))
