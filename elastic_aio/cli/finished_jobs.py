"""Runs that have ended, for the commands: which run a name means, and its lines."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence

from elastic_aio.cli.status_text import ID_MAX, head_lines, local_time
from elastic_aio.control.client import RunningJob, matches
from elastic_aio.record import RUN_FILE, JobRecord, recorded_runs, run_in
from elastic_aio.text import error_reason, format_duration, one_line, printable

RUN_COLUMNS = ("RUN", "NODE", "PID", "NAME", "PHASE", "EXIT", "ATTEMPTS", "STARTED", "TIME", "WHY")
_WIDTHS = (ID_MAX, 24, 8, 32, 16, 4, 8, 19, 16, 60)

_LOST = "did not end"
_KILLED = "its launcher was killed"


def runs_named(name: str, *, begins: bool) -> tuple[list[JobRecord], str]:
    """Return the recorded runs in a directory, or else those of a name, the latest first.

    With `begins` it may be the beginning of a run id.  The text is the problem of a directory.
    """
    problem = ""
    if os.path.isdir(name):
        path = os.path.abspath(name)
        try:
            return [run_in(path)], ""
        except ValueError as error:
            problem = f"{RUN_FILE} {error}"
        except OSError as error:
            if runs := recorded_runs(path):
                return runs, ""
            problem = f"has no record of a run: {error_reason(error)}: {RUN_FILE}"
    # A run is often named like the directory of its program.
    found = matches([_as_job(run) for run in recorded_runs()], name, begins=begins)
    return [job.status for job in found if isinstance(job.status, JobRecord)], problem


def silent_launcher(runs: Sequence[JobRecord], jobs: Sequence[RunningJob]) -> RunningJob | None:
    """Return the launcher of the latest of these runs if it runs here and does not answer."""
    if not runs or runs[0].ended_at is not None or runs[0].is_lost:
        return None
    if runs[0].node != socket.gethostname():
        return None  # another host or container, whose pids mean others
    silent = (job for job in jobs if job.status is None and job.pid == runs[0].agent_pid)
    return next(silent, None)


def with_recorded(jobs: Sequence[RunningJob]) -> list[RunningJob]:
    """Return running jobs and the recorded runs that are none of them, the latest first."""
    known = {job.status.identity for job in jobs if job.status is not None}
    ended = [_as_job(run) for run in recorded_runs() if run.identity not in known]
    return sorted([*jobs, *ended], key=_started_at, reverse=True)


def _started_at(job: RunningJob) -> float:
    return (job.status and job.status.started_at) or 0.0


def _as_job(run: JobRecord) -> RunningJob:
    return RunningJob(run.directory, run.agent_pid or 0, run)


def run_row(job: RunningJob, now: float) -> tuple[str, ...]:
    """Return the cells of a running job or a recorded run for `RUN_COLUMNS`."""
    run = job.status
    if run is None:
        return ("?", "?", str(job.pid), "?", "does not answer", *"?????")
    phase, code, until, over, why = run.phase, "", now, "", run.reason
    if isinstance(run, JobRecord):
        if run.is_lost:  # some time after its last event
            phase, over, why = _LOST, "over ", _KILLED
        code = "" if run.exit_code is None else str(run.exit_code)
        until = run.until
    started = run.started_at or until
    cells = [
        *(run.run_id, run.node, str(job.pid), run.entrypoint, phase, code, str(run.attempt + 1)),
        *(local_time(started), over + format_duration(until - started), why),
    ]
    return tuple(one_line(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True))


def end_of_last(runs: Sequence[JobRecord], name: str) -> str:
    """Return a sentence about the latest of these runs, if it is over; else nothing."""
    if not runs or not (runs[0].has_ended or runs[0].is_lost):
        return ""
    how = f"{runs[0].phase}, exit code {runs[0].exit_code}"
    how = _KILLED if runs[0].is_lost else f"{how}, at {local_time(runs[0].until)}"
    return f"this run has ended ({how}); `aio-elastic why {one_line(name)}` explains it"


def run_lines(run: JobRecord) -> list[str]:
    """Return the lines about a recorded run itself, without its workers."""
    end, phase = f"recorded  {local_time(run.until)}", None
    if run.ended_at is not None:
        end = f"ended     {local_time(run.until)}, exit code {run.exit_code}"
    elif run.is_lost:
        end += " for the last time"
        phase = f"{_LOST}: {_KILLED} (phase {run.phase})"
    command = f"command   {one_line(shlex.join(run.command))}"
    head = head_lines(run, run.until, phase)
    return [*head, end, command, f"record    {printable(run.directory)}"]
