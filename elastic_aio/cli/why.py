"""`aio-elastic why`: the decisions that led to the present state of a job.

They are read from the events, of a running job or of a file of `--events`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from elastic_aio.cli import local_jobs
from elastic_aio.cli.exit_codes import guide_of_end
from elastic_aio.cli.options import print_error
from elastic_aio.cli.status_text import head_lines, local_time
from elastic_aio.control.client import CommandClient, RunningJob, iterate_blocking
from elastic_aio.event_json import read_events
from elastic_aio.events import Event, JobStarted
from elastic_aio.explanation import Step, explain
from elastic_aio.outcome import JobState
from elastic_aio.record import JobRecord
from elastic_aio.spec.checks import UsageError, invalid_value
from elastic_aio.status import JobStatus, StatusTracker
from elastic_aio.text import error_reason, one_line, printable

STEPS_MAX: Final = 20
"""The latest steps, which are shown without `--all`."""


def format_steps(steps: Sequence[Step]) -> list[str]:
    """Return lines: each step with its time, then its rule and its evidence."""
    lines = []
    for step in steps:
        lines.append(f"{local_time(step.time)}  {one_line(step.text)}")
        if step.rule:
            lines.append(f"    rule:     {one_line(step.rule)}")
        lines += [f"    evidence: {one_line(text)}" for text in step.evidence]
    return lines


@local_jobs.command("why")
def main_why(argv: Sequence[str]) -> int:
    parser = local_jobs.job_parser(
        "why",
        "Print the decisions that led to the present state of a job, each with its rule and its"
        " evidence. Of a run that has ended, also the failure report.",
        epilog=local_jobs.EXIT_CODES,
        takes_runs=True,
    )
    local_jobs.add_child(parser)
    parser.add_argument("--all", action="store_true", help=f"all steps (default: {STEPS_MAX})")
    parser.add_argument(
        "--from",
        dest="file",
        metavar="FILE",
        help="of the last run in a file that `aio-elastic run --events FILE` has written; the job"
        " may be over",
    )
    arguments = parser.parse_args(argv)
    if arguments.file is not None and arguments.job is not None:
        raise UsageError("JOB: has no effect with --from")
    name, child = (
        (None, "") if arguments.file else local_jobs.with_child(arguments.job, arguments.child)
    )
    job = None if arguments.file else local_jobs.choose_run(name)
    if job is not None:
        local_jobs.check_child(job, child)
    report = ""
    if job is not None and not isinstance(job, RunningJob):
        from elastic_aio.cli.finished_jobs import run_lines

        history, head, report = [], run_lines(job), job.report() or _help(job)
        try:
            history = local_jobs.recorded_events(job)
        except local_jobs.JobError as error:
            print_error("why", str(error), 0)
            head += [f"failed    {one_line(text)}" for text in job.failures]
    else:
        history = (
            [*iterate_blocking(CommandClient(job).events())] if job else _recorded(arguments.file)
        )
        now = history[-1].time if job is None else time.time()
        head = _head(history, now, None if job is None else job.status)
    steps = explain([*local_jobs.events_below(history, child)])
    shown = steps if arguments.all else steps[-STEPS_MAX:]
    lines = [*head, ""]
    if len(shown) < len(steps):
        lines.append(f"({len(steps) - len(shown)} earlier steps: --all)")
    print("\n".join([*lines, *format_steps(shown), *map(printable, report.splitlines())]))
    return 0


def _help(run: JobRecord) -> str:
    """Return the line that names the page about a failure without a report; else nothing."""
    if run.phase != JobState.FAILED or run.exit_code is None:
        return ""
    has_worker = run.failures and run.exit_code == 1  # and its report is lost
    guide = "failures" if has_worker else guide_of_end(run.exit_code)
    return f"Help: aio-elastic help {guide}"


def _head(history: Sequence[Event], now: float, status: JobStatus | None) -> list[str]:
    """Return the lines about the job; `status` counts if the events have lost their beginning."""
    first = history[0]
    if isinstance(first, JobStarted):
        tracker = StatusTracker()
        for event in history:
            tracker(event)
        status = tracker.status(now)
    if status is not None:
        return head_lines(status, now)
    missing = f"what precedes its event {first.seq} is not in this file"
    return [f"run {one_line(first.run_id)} on {one_line(first.node)}: {missing}"]


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
