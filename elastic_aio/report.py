"""What people read: one line for an event, and the failure report in torch's layout.

All of it is made from events and results alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic_aio.errors import counted
from elastic_aio.events import (
    AttemptFailed,
    ConsoleLost,
    CoordinatorChanged,
    Event,
    EventsMissed,
    GuardianReplaced,
    JobFinished,
    JobStarted,
    MembershipChanged,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    Promoted,
    RendezvousStoreLost,
    RendezvousStoreRegained,
    Restarting,
    RoundFormed,
    RoundForming,
    SignalForwarded,
    StandingBy,
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
            return Level.WARNING, _attempt_failed(event)
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
            return Level.WARNING, f"{event.count or 'some'} events were missed"
        case JobFinished():
            ended = f"the job has {event.state.value} after {event.duration:.3g} s"
            return Level.INFO, f"{ended}: {event.why}"
    return _describe_meeting(event)


def _describe_meeting(event: Event) -> tuple[int, str]:
    """Do what `describe` does for what happens between nodes."""
    match event:
        case RoundForming():
            return Level.WARNING, _round_forming(event)
        case RoundFormed():
            return Level.INFO, _round_formed(event)
        case MembershipChanged():
            nodes = counted(event.nodes, "node")
            return Level.WARNING, f"going on as attempt {event.attempt} with {nodes}: {event.why}"
        case NodeJoined():
            workers = counted(event.nproc, "worker")
            return Level.INFO, f"node {event.name} has joined with {workers} ({event.address})"
        case NodeLeft():
            return Level.INFO, f"node {event.name} has left: {event.why}"
        case NodeLost():
            return Level.WARNING, f"node {event.name} is lost: {event.why}"
        case NodeRefused():
            return Level.WARNING, f"node {event.name} was refused: {event.why}"
        case StandingBy():
            return Level.WARNING, f"standing by: the job has all its {event.maximum} nodes"
        case Promoted():
            return Level.INFO, f"standing by no more: group rank {event.group_rank}"
        case CoordinatorChanged():
            return Level.INFO, f"node {event.name} coordinates from now on (epoch {event.epoch})"
        case RendezvousStoreLost():
            return Level.WARNING, f"the store at {event.endpoint} is lost: {event.why}"
        case RendezvousStoreRegained():
            host = ", which this node serves" if event.is_host else ""
            return Level.WARNING, f"the nodes meet again at {event.endpoint}{host}"
    return Level.DEBUG, repr(event)


def _job_started(event: JobStarted) -> str:
    workers = counted(event.nproc_per_node, "worker")
    nodes = f", one of {event.nnodes} nodes".replace(":", " to ") if event.nnodes != "1" else ""
    logs = f"logs in {event.log_dir}" if event.log_dir else "no log files"
    return (
        f"run {event.run_id}: {workers} of {event.entrypoint} on {event.node}{nodes},"
        f" {counted(event.max_restarts, 'restart')}, {logs}"
    )


def _attempt_failed(event: AttemptFailed) -> str:
    root = event.root
    is_elsewhere = event.node and root.host not in ("", event.node)
    elsewhere = f" on {root.host}" if is_elsewhere else ""
    return f"attempt {event.attempt} failed{elsewhere}: {root.summary}"


def _round_formed(event: RoundFormed) -> str:
    # The story of the whole job has no place of its own in the round.
    nodes = counted(event.group_world_size, "node")
    is_ours = event.group_rank >= 0
    place = f"group rank {event.group_rank} of {event.group_world_size}" if is_ours else nodes
    where = f"{event.master_addr}:{event.master_port}"
    workers = counted(event.world_size, "worker")
    return f"round {event.round}: {place}, {workers} in all, master at {where}"


def _round_forming(event: RoundForming) -> str:
    is_fixed = event.minimum == event.maximum
    wanted = str(event.maximum) if is_fixed else f"{event.minimum} to {event.maximum}"
    here = ", ".join(event.present) + (", ..." if len(event.present) < event.joined else "")
    text = f"waiting for {'nodes' if event.joined < event.minimum else 'more nodes'}:"
    text += f" {event.joined} of {wanted} here"
    if event.present:
        text += f" ({here})"
    if event.missing:
        text += f", missing {', '.join(event.missing)}"
    if event.time_left is not None:
        text += f", {event.time_left:.0f} s left"
    return text + (f"; refused {', '.join(event.refused)}" if event.refused else "")


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
