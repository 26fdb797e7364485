"""Text for the console: one line per event, and the failure report in torchrun's layout."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elastic_aio import events
from elastic_aio.events import Event
from elastic_aio.outcome import Failure, LaunchResult, signal_name
from elastic_aio.reasons import plain_lines, reason_of
from elastic_aio.spec.restart import restarts_text
from elastic_aio.text import counted, format_duration, one_line, printable

if TYPE_CHECKING:
    from elastic_aio import node_events

_GUIDE = "aio-elastic help failures"
_HINT = f"none was recorded; see {_GUIDE}"
_WIDTH_MAX = 60
_LEFTOVERS_SHOWN = 5


class Level:
    """Severity of an event, with the numbers of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30


def describe(event: Event) -> tuple[int, str]:
    """Return the `Level` of an event and one printable line that describes it."""
    level, text = _describe(event)
    return level, printable(text)


def _describe(event: Event) -> tuple[int, str]:
    match event:
        case events.JobStarted():
            return Level.WARNING, _job_started(event)
        case events.WorkerStarted():
            return Level.INFO, f"rank {event.rank} started (pid {event.pid})"
        case events.WorkerExited():
            return Level.INFO, _worker_exited(event)
        case events.AttemptFailed():
            return Level.WARNING, _attempt_failed(event)
        case events.Restarting():
            return Level.WARNING, _restarting(event)
        case events.StopRequested():
            is_known = event.signal is None and not event.is_ordered
            level = Level.INFO if is_known else Level.WARNING
            return level, f"stopping the workers ({event.plan}): {event.reason}"
        case events.LeftoversFound():
            return Level.WARNING, _leftovers_found(event)
        case events.StopEscalated():
            return Level.WARNING, _stop_escalated(event)
        case events.WorkerAbandoned(pid=0):
            return Level.WARNING, f"processes may be left behind: {event.state}"
        case events.WorkerAbandoned():
            process = f"process {event.pid} did not exit after SIGKILL"
            return Level.WARNING, f"{process} (state {event.state}), left behind"
        case events.SignalForwarded():
            return _signal_forwarded(event)
        case events.TimerExpired():
            return Level.WARNING, _timer_expired(event)
        case events.TimerRejected():
            return Level.WARNING, f"the pipe of the timers got {event.why}"
        case events.GuardianRestarted():
            return Level.WARNING, f"guardian process exited, restarted as pid {event.pid}"
        case events.GuardianLost():
            return Level.WARNING, f"guardian process exited, the job is unguarded: {event.why}"
        case events.ControlUnavailable():
            return Level.WARNING, f"no control socket for this job: {event.why}"
        case events.LogsNotRemoved():
            return Level.WARNING, f"logs of old runs are not removed: {event.why}"
        case events.ConsoleLost() | events.LogDiskFull() | events.OutputLost():
            return Level.WARNING, _missing_output(event)
        case events.WorkerStoreRefused():
            return Level.WARNING, _store_refused(event)
        case events.EventsMissed():
            why = f": {event.why}" if event.why else ""
            return Level.WARNING, f"{event.count or 'some'} events missed{why}"
        case events.JobFinished():
            ended = f"job {event.state.value} after {event.duration:.3g} s"
            return Level.INFO, f"{ended}: {event.why}"
    return _describe_liveness(event)


def _describe_liveness(event: Event) -> tuple[int, str]:
    """Describe what workers report about themselves, and what is done about silent ones."""
    match event:
        case events.WorkerReady():
            ready = f"rank {event.rank} (pid {event.pid}) is ready"
            return Level.INFO, f"{ready} after {event.duration:.3g} s"
        case events.DeadlineMissed():
            return Level.WARNING, f"rank {event.rank} (pid {event.pid}): {event.why}"
        case events.WorkersIdle():
            return Level.WARNING, _workers_idle(event)
        case events.WorkersUnfinished():
            return Level.WARNING, _workers_unfinished(event)
        case events.StacksDumped():
            where = f" ({event.path})" if event.path else ""
            return Level.WARNING, f"stacks ({event.why}): {event.summary}{where}"
    return _describe_rendezvous(event)


def _workers_unfinished(event: events.WorkersUnfinished) -> str:
    total = event.world_size or event.finished + len(event.running)
    here = " here" if event.world_size else ""
    ranks = ", ".join(map(str, event.running[:8])) + (", ..." if event.running[8:] else "")
    have = f"{event.finished} of {total} workers have finished, the first {event.seconds:.0f} s ago"
    return f"{have}; still running{here}: rank{'s' if event.running[1:] else ''} {ranks}"


def _workers_idle(event: events.WorkersIdle) -> str:
    idle = f"no worker has used CPU time or written anything for {event.seconds:.3g} s"
    states = [
        f"rank {worker.rank} {worker.syscall or worker.wchan or worker.state or 'unknown'}"
        for worker in event.workers[:8]
    ]
    more = ", ..." if len(event.workers) > 8 else ""
    return f"{idle}: {', '.join(states)}{more}"


def _store_refused(event: events.WorkerStoreRefused) -> str:
    closed = f"the store of the workers closed the connection of {event.peer}"
    return f"{closed}: it {event.why}"


def _describe_rendezvous(event: Event) -> tuple[int, str]:
    """Describe the events of nodes, rounds, the coordinator and the rendezvous store."""
    from elastic_aio import node_events

    match event:
        case node_events.RoundForming():
            return Level.WARNING, _round_forming(event)
        case node_events.RoundWaiting():
            left = "" if event.time_left is None else f", {event.time_left:.0f} s left"
            times = f"waited {event.waited:.0f} s{left}"
            return Level.WARNING, f"{event.phase}: {event.what} ({times})"
        case node_events.RoundFormed():
            return Level.INFO, _round_formed(event)
        case node_events.MembershipChanged():
            change = f"attempt {event.attempt} has {counted(event.nodes, 'node')}"
            return Level.WARNING, f"membership changed, {change}: {event.why}"
        case node_events.MembershipPending(time_left=None):
            return Level.INFO, f"the membership stays as it is: {event.why}"
        case node_events.MembershipPending():
            when = f"in {event.time_left:.0f} s, unless others join"
            return Level.WARNING, f"the membership is about to change {when}: {event.why}"
        case node_events.NodeJoined():
            workers = counted(event.nproc, "worker")
            text = f"node {event.name} joined with {workers} ({event.address})"
            level = Level.WARNING if event.differs else Level.INFO
            return level, "; ".join([text, *event.differs])
        case node_events.NodeLeft():
            return Level.INFO, f"node {event.name} left: {event.why}"
        case node_events.NodeLost():
            return Level.WARNING, f"node {event.name} is lost: {event.why}"
        case node_events.NodeRefused():
            return Level.WARNING, f"node {event.name} was refused: {event.why}"
        case node_events.NodeStandby():
            why = event.why or f"the job has its maximum of {event.maximum} nodes"
            return Level.WARNING, f"on standby: {why}"
        case node_events.StandbyPromoted():
            return Level.INFO, f"promoted from standby to group rank {event.group_rank}"
        case node_events.CoordinatorChanged():
            return Level.INFO, f"node {event.name} is the coordinator (term {event.term})"
        case node_events.RendezvousStoreAwaited():
            left = "" if event.time_left is None else f", {max(event.time_left, 0):.0f} s left"
            return Level.WARNING, f"waiting for the rendezvous store{left}: {event.why}"
        case node_events.RendezvousStoreLost():
            return Level.WARNING, f"rendezvous store at {event.endpoint} lost: {event.why}"
        case node_events.RendezvousStoreRecovered():
            server = ", served by this node" if event.is_host else ""
            return Level.WARNING, f"rendezvous store recovered at {event.endpoint}{server}"
    return Level.DEBUG, repr(event)


def _restarting(event: events.Restarting) -> str:
    after = f" in {event.delay:.3g} s" if event.delay else ""
    returned = f", {counted(event.returned, 'former restart')} returned" if event.returned else ""
    return f"restarting as attempt {event.attempt}{after}: {event.why}{returned}"


def _signal_forwarded(event: events.SignalForwarded) -> tuple[int, str]:
    name = signal_name(event.signal)
    text = f"{name} forwarded to {counted(len(event.pids), 'worker')}"
    if not event.unhandled:
        return Level.INFO, text
    count = "1 has" if len(event.unhandled) == 1 else f"{len(event.unhandled)} have"
    end = "will be ended by it" if event.unhandled[0] in event.pids else "did not get it"
    pids = ", ".join(map(str, event.unhandled[:8])) + (", ..." if event.unhandled[8:] else "")
    return Level.WARNING, f"{text}; {count} no handler for it and {end} (pid {pids})"


def _timer_expired(event: events.TimerExpired) -> str:
    worker = f"process {event.pid}" if event.rank < 0 else f"rank {event.rank} (pid {event.pid})"
    times = f"after {round(event.age, 2):g} s (limit {round(event.limit, 2):g} s)"
    ending = f", sending {signal_name(event.signal)}" if event.signal else ""
    return f"timer {event.scope!r} of {worker} expired {times}{ending}"


def _missing_output(event: events.ConsoleLost | events.LogDiskFull | events.OutputLost) -> str:
    match event:
        case events.ConsoleLost():
            rest = counted(event.unshown, "byte") + " not shown, " if event.unshown else ""
            return f"{event.stream} accepts no more output ({event.why}); {rest}see the logs"
        case events.LogDiskFull():
            effect = "the console shows the rest" if event.is_shown else "they may be incomplete"
            return f"writes to the log files fail ({event.why}), {effect}: {event.mount_point}"
        case events.OutputLost():
            lost = "output" if event.lost is None else counted(event.lost, "byte")
            text = f"{lost} of {event.stream} of rank {event.rank} lost: {event.why}"
            return f"{text} ({event.path})"


def _leftovers_found(event: events.LeftoversFound) -> str:
    count, it = len(event.pids), "it" if len(event.pids) == 1 else "they"
    shown = [f"{name} ({pid})" for pid, name in zip(event.pids, event.programs, strict=True)]
    named = ", ".join(shown[:_LEFTOVERS_SHOWN]) + (", ..." if count > _LEFTOVERS_SHOWN else "")
    what = counted(count, "process", "processes")
    fate = f"{it} {'is' if count == 1 else 'are'} stopped now"
    if event.linger:
        fate = f"{it} may run for another {event.linger:g} s"
    return f"the workers have succeeded and left {what} behind, {fate}: {named}"


def _stop_escalated(event: events.StopEscalated) -> str:
    name = signal_name(event.signal)
    if not event.pids:
        return f"{event.reason or 'processes may not have stopped in time'}, sending {name}"
    processes = counted(len(event.pids), "process", "processes")
    pids = ", ".join(map(str, event.pids[:8])) + (", ..." if len(event.pids) > 8 else "")
    if event.reason:
        return f"{event.reason}, sending {name} to {processes} (pid {pids})"
    return f"{processes} did not stop in time, sending {name} (pid {pids})"


def _job_started(event: events.JobStarted) -> str:
    workers = counted(event.nproc_per_node, "worker")
    nodes = f", one of {event.nnodes} nodes".replace(":", " to ") if event.nnodes != "1" else ""
    losses = f", node losses at most {event.node_losses}" if event.node_losses else ""
    logs = f"logs in {event.log_dir}" if event.log_dir else "no logs unless it fails"
    return (
        f"run {event.run_id}: {workers} of {event.entrypoint} on {event.node}{nodes},"
        f" {restarts_text(event.max_restarts)}{losses}, {logs}"
    )


def _attempt_failed(event: events.AttemptFailed) -> str:
    root = event.root
    is_elsewhere = event.node and root.host not in ("", event.node)
    elsewhere = f" on {root.host}" if is_elsewhere else ""
    return f"attempt {event.attempt} failed{elsewhere}: {root.summary}"


def _round_formed(event: node_events.RoundFormed) -> str:
    nodes = counted(event.group_world_size, "node")
    if event.group_rank >= 0:  # else the event is about all nodes
        nodes = f"group rank {event.group_rank} of {event.group_world_size}"
    master = f"{event.master_addr}:{event.master_port}"
    workers = counted(event.world_size, "worker")
    return f"round {event.round}: {nodes}, {workers} in all, master at {master}"


def forming_ends(event: node_events.RoundForming) -> str:
    """Return how the wait for nodes ends when its time is over, as words before that time."""
    return "starts in" if event.joined >= event.minimum else "fails in"


def _round_forming(event: node_events.RoundForming) -> str:
    stopped = "workers stopped, " if event.round else ""
    text = f"{stopped}waiting for nodes: {counted(event.joined, 'node')} present"
    if event.present:
        ellipsis = ", ..." if len(event.present) < event.joined else ""
        text += f" ({', '.join(event.present)}{ellipsis})"
    text += f", minimum {event.minimum}, maximum {event.maximum}"
    if event.missing:
        text += f", missing {', '.join(event.missing)}"
    if event.time_left is not None:
        text += f", {forming_ends(event)} {event.time_left:.0f} s"
    if event.refused:
        text += f"; refused {', '.join(event.refused)}"
    if event.others:
        runs = ", ".join(one_line(run_id) for run_id in event.others)
        text += f"; other runs that wait at this store: {runs} (is --rdzv-id the same everywhere?)"
    return text


def _worker_exited(event: events.WorkerExited) -> str:
    stopped = ", stopped by the supervisor" if event.is_victim else ""
    worker = f"rank {event.rank} (pid {event.pid})"
    why = f": {event.reason}" if event.reason else ""
    return f"{worker}: {event.status}{stopped}, after {event.duration:.3g} s{why}"


def format_success(
    result: LaunchResult, job: events.JobStarted, formed: node_events.RoundFormed | None
) -> str:
    """Return one line about a job that has succeeded.

    Args:
        result: its result.
        job: its first event.
        formed: its last round; None for a job of one node.
    """
    parts = [counted(job.nproc_per_node, "worker")]
    if formed is not None:
        nodes = counted(formed.group_world_size, "node")
        parts = [f"{counted(formed.world_size, 'worker')} on {nodes}"]
    parts.append(format_duration(result.duration))
    if result.restarts:
        parts.append(counted(result.restarts, "restart"))
    if formed is not None and formed.changes:
        parts.append(counted(formed.changes, "membership change"))
    return f"finished: {', '.join(parts)}"


def format_failure(result: LaunchResult, name: str) -> str:
    """Return the failure report of a job: several printable lines, without a final newline.

    The layout is torchrun's, with additions: workers that the supervisor stopped are marked, a
    known cause is named, the last lines of stderr replace a missing traceback, and the log
    directory and a guide are named.

    Args:
        result: the result of a job that failed.
        name: what its workers ran, as in `LaunchSpec.name`.
    """
    return "\n".join(map(printable, plain_lines(_failure(result, name))))


def _failure(result: LaunchResult, name: str) -> str:
    if not result.failures:
        return f"{name} FAILED: {result.reason}"
    root, *others = result.failures
    # Numbered by rank, independently of the order of the causes.
    by_rank = sorted(result.failures, key=lambda failure: failure.rank)
    blocks = {id(failure): _block(index, failure) for index, failure in enumerate(by_rank)}
    title = f"{name} FAILED"
    other_blocks = "\n".join(blocks[id(failure)] for failure in others)
    lines = [title, *(line for block in blocks.values() for line in block.split("\n"))]
    width = min(_WIDTH_MAX, max(len(line) for line in lines))
    parts = [
        "",
        "=" * width,
        title,
        "-" * width,
        "Failures:",
        other_blocks or "  <NO_OTHER_FAILURES>",
        "-" * width,
        "Root Cause (first observed failure):",
        blocks[id(root)],
        "=" * width,
    ]
    if result.log_dir:
        parts.append(f"Logs: {result.log_dir}")
    parts.append(f"Help: {_GUIDE}")
    return "\n".join(parts)


def _block(index: int, failure: Failure) -> str:
    status = failure.status
    code = "?" if status.returncode is None else str(status.returncode)
    signal = f" ({signal_name(status.signal)})" if status.signal is not None else ""
    fields: list[tuple[str, str]] = [
        ("time", time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failure.time))),
        ("host", failure.host),
        ("rank", f"{failure.rank} (local_rank: {failure.local_rank})"),
        ("exitcode", f"{code} (pid: {failure.pid}){signal}"),
        ("error_file", (failure.error and failure.error.path) or "<N/A>"),
    ]
    if failure.is_victim:
        fields.append(("stopped", "by the supervisor, because of the root cause"))
    if failure.cause:
        fields.append(("cause", failure.cause))
    fields += [("note", note) for note in failure.notes]
    fields.append(("traceback", _traceback(failure)))
    if failure.stderr_tail and not (failure.error and failure.error.traceback):
        tail = "\n".join(f"    {line}" for line in failure.stderr_tail)
        place = failure.stderr_path or "its standard error, which no file has taken"
        fields.append(("stderr", f"last lines of {place}:\n{tail}"))
    return f"[{index}]:\n" + "\n".join(f"  {key:<10}: {value}" for key, value in fields)


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
    if failure.stderr_tail:
        return failure.reason or reason_of("", failure.stderr_tail)
    return _HINT
