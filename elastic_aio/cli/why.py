"""`aio-elastic why`: the decisions that led to the present state of a job.

Each has its rule (the setting or the request that decided) and its evidence (what had happened).
They are read from the events, of a running job or of a file of `--events`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio import events, node_events
from elastic_aio.cli.local_jobs import (
    EXIT_CODES,
    choose_run,
    command,
    job_parser,
    recorded_events,
)
from elastic_aio.cli.status_text import head_lines, local_time
from elastic_aio.control.client import CommandClient, RunningJob, iterate_blocking
from elastic_aio.event_json import read_events
from elastic_aio.events import Event
from elastic_aio.outcome import Failure
from elastic_aio.spec.checks import UsageError, invalid_value
from elastic_aio.status import Level, StatusTracker
from elastic_aio.text import counted, error_reason, one_line, printable

STEPS_MAX: Final = 20
"""The latest steps, which are shown without `--all`."""

_TAIL_LINES: Final = 3


class Step(Struct, frozen=True):
    """A decision, or what happened without a decision: `rule` is empty then."""

    time: float
    """Unix seconds."""
    text: str
    rule: str = ""
    evidence: tuple[str, ...] = ()


def explain(history: Iterable[Event]) -> list[Step]:
    """Return the steps that led from the start of a job to its present state."""
    steps: list[Step] = []
    waiting: Step | None = None
    for event in history:
        if isinstance(event, node_events.RoundForming | node_events.RoundWaiting):
            waiting = Step(event.time, event.sentence)  # only the last one still holds
            continue
        if isinstance(event, (node_events.RoundFormed, *_ENDS_WAIT)):
            waiting = None
        if (step := _decision(event)) is not None:
            steps.append(step)
        elif event.level >= Level.WARNING or isinstance(event, _SHOWN):
            steps.append(Step(event.time, event.sentence))
    return steps if waiting is None else [*steps, waiting]


_ENDS_WAIT: Final = (events.WorkerStarted, events.StopRequested, events.JobFinished)
"""Events after which no round is waited for."""

_SHOWN: Final = (
    node_events.NodeJoined,
    node_events.NodeLeft,
    node_events.CoordinatorChanged,
    node_events.StandbyPromoted,
    node_events.RoundFormed,
)
"""Events that are steps although they are no warnings."""


def _decision(event: Event) -> Step | None:
    """Return the step of an event that a rule has decided; None for other events."""
    match event:
        case events.AttemptFailed():
            others = sum(not failure.is_victim for failure in event.failures[1:])
            more = (f"{counted(others, 'other worker')} failed too",) if others else ()
            evidence = (*_evidence(event.root), *more)
            return Step(event.time, f"attempt {event.attempt} failed", evidence=evidence)
        case events.Restarting():
            after = f" after {event.delay:.3g} s" if event.delay else ""
            what = f"attempt {event.attempt} follows{after}"
            so_far = f"{counted(event.restarts, 'restart')} so far"
            return Step(event.time, what, event.why, (so_far,))
        case node_events.MembershipChanged():
            what = f"attempt {event.attempt} follows with {counted(event.nodes, 'node')}"
            return Step(event.time, what, "the membership changed: no restart counts", (event.why,))
        case events.StopRequested():
            return Step(event.time, f"the workers are stopped ({event.plan})", event.reason)
        case events.StopEscalated():
            rule = event.reason or "the grace period of the stop plan"
            return Step(event.time, event.sentence, rule)
        case events.JobFinished():
            what = f"the job ended: {event.state.value}, exit code {event.exit_code}"
            return Step(event.time, what, event.why)
    return None


def _evidence(root: Failure) -> tuple[str, ...]:
    found = [f"{root.summary} (on {root.host})", *root.notes]
    if root.error is None:
        found += [f"stderr: {line}" for line in root.stderr_tail[-_TAIL_LINES:]]
    elif root.error.path:
        found.append(f"error file {root.error.path}")
    if root.stderr_path and root.stderr_tail:  # an empty captured file is removed
        found.append(f"stderr in {root.stderr_path}")
    return tuple(found)


def format_steps(steps: Sequence[Step]) -> list[str]:
    """Return lines: each step with its time, then its rule and its evidence."""
    lines = []
    for step in steps:
        lines.append(f"{local_time(step.time)}  {one_line(step.text)}")
        if step.rule:
            lines.append(f"    rule:     {one_line(step.rule)}")
        lines += [f"    evidence: {one_line(text)}" for text in step.evidence]
    return lines


@command("why")
def main_why(argv: Sequence[str]) -> int:
    parser = job_parser(
        "why",
        "Print the decisions that led to the present state of a job, each with its rule and its"
        " evidence.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--all", action="store_true", help=f"all steps (default: {STEPS_MAX})")
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="of the last run in a file that `aio-elastic run --events FILE` has written",
    )
    arguments = parser.parse_args(argv)
    if arguments.file is not None and arguments.job is not None:
        raise UsageError("JOB: has no effect with --from")
    job = None if arguments.file else choose_run(arguments.job)
    report = ""
    if job is not None and not isinstance(job, RunningJob):
        from elastic_aio.cli.finished_jobs import run_lines

        history, head, report = recorded_events(job), run_lines(job), job.report()
    else:
        history = _recorded(arguments.file) if job is None else _present(job)
        tracker = StatusTracker()
        for event in history:
            tracker(event)
        now = history[-1].time if job is None else time.time()
        head = head_lines(tracker.status(now), now)
    steps = explain(history)
    shown = steps if arguments.all else steps[-STEPS_MAX:]
    lines = [*head, ""]
    if len(shown) < len(steps):
        lines.append(f"({len(steps) - len(shown)} earlier steps: --all)")
    print("\n".join([*lines, *format_steps(shown), *map(printable, report.splitlines())]))
    return 0


def _present(job: RunningJob) -> list[Event]:
    return [*iterate_blocking(CommandClient(job).events())]


def _recorded(path: str) -> list[Event]:
    """Return the events of the last run in a file."""
    try:
        with open(path, "rb") as file:
            history = read_events(file)
    except ValueError as error:
        raise invalid_value("--from", str(error), path) from None
    except OSError as error:
        reason = error_reason(error)
        raise invalid_value("--from", f"cannot be read: {reason}", path) from None
    if not history:
        raise invalid_value("--from", "must have events", path)
    return history
