"""The jobs of this user on this host: which one a command means, and what can go wrong."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from elastic_aio.cli.options import UsageError, invalid_value, print_error
from elastic_aio.cli.parser import OptionParser
from elastic_aio.control.client import RunningJob, ask, find_jobs
from elastic_aio.control.protocol import ControlError, ControlRequest, ErrorReply, Reply
from elastic_aio.text import counted, error_reason, one_line

EXIT_CODES = "Exit codes: 0 success, 1 the job does not answer, 2 no such job."

_NO_JOB = "no job of this user runs on this host"


class JobError(Exception):
    """A job did not do what it was asked; the message is one line."""


def run_command(command: str, run: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a sub-command; return its exit code, or that of its error.

    1: the job does not answer, or has refused.  2: the arguments are invalid, or there is no
    such job.  130: Ctrl-C.
    """
    try:
        return run(argv)
    except UsageError as error:
        return print_error(command, str(error), 2)
    except (JobError, ControlError) as error:
        return print_error(command, str(error), 1)
    except BrokenPipeError:
        # The reader of the pipe has exited.  The flush at interpreter exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        return print_error(command, f"the agent does not answer: {error_reason(error)}", 1)


def job_parser(command: str, description: str, *, epilog: str = EXIT_CODES) -> OptionParser:
    """Return the parser of a sub-command that is about one job."""
    parser = OptionParser(prog=f"aio-elastic {command}", description=description, epilog=epilog)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="id of the run or its beginning, pid of the launcher, or what the workers run"
        " (default: the only job)",
    )
    return parser


def choose_job(name: str | None) -> RunningJob:
    """Return the job of this name, or the only one.

    Raises:
        UsageError: there is no such job, or there are several.
    """
    return choose_from(find_jobs(), name)


def choose_job_to_change(name: str | None) -> RunningJob:
    """Return the job of this name; a person at a terminal may mean the only one.

    Raises:
        UsageError: there is no such job, there are several, or a script has not named it.
    """
    job = choose_job(name)
    if name is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        problem = "must be given where standard input or output is no terminal"
        raise UsageError(f"JOB: {problem}; {describe_job(job)} runs here")
    return job


def choose_from(jobs: Sequence[RunningJob], name: str | None) -> RunningJob:
    """Return the job of this name among `jobs`, or the only one.

    Raises:
        UsageError: there is no such job, or there are several.
    """
    found = matches(jobs, name)
    if len(found) == 1:
        return found[0]
    if not jobs:
        raise UsageError(f"JOB: {_NO_JOB}" + ("" if name is None else f" (got {name!r})"))
    known = "; ".join(map(describe_job, found or jobs))
    if found and _run_id(found[0]) and len({_run_id(job) for job in found}) == 1:
        # Several nodes of one job on this host, or jobs of one id.
        raise UsageError(f"JOB: {len(found)} launchers match: give the pid of one: {known}")
    if name is None:
        raise UsageError(f"JOB: must be given, {counted(len(jobs), 'job')} run here: {known}")
    problem = "matches several: " if found else "no such job; running here: "
    raise invalid_value("JOB", problem + known, name)


def matches(jobs: Sequence[RunningJob], name: str | None) -> list[RunningJob]:
    """Return the jobs that a name may mean: exact matches, else beginnings of run ids."""
    if name is None:
        return list(jobs)
    if not name:
        return []
    exact = [job for job in jobs if str(job.pid) == name or _run_id(job) == name]
    if exact:
        return exact
    named = [job for job in jobs if name in _names(job)]
    return named or [job for job in jobs if _run_id(job).startswith(name)]


def _run_id(job: RunningJob) -> str:
    return "" if job.status is None else job.status.run_id


def _names(job: RunningJob) -> set[str]:
    entrypoint = "" if job.status is None else job.status.entrypoint
    return {entrypoint, os.path.basename(entrypoint)} - {""}


def describe_job(job: RunningJob) -> str:
    """Return run id and pid of a job."""
    if job.status is None:
        return f"pid {job.pid} (does not answer)"
    return f"{one_line(job.status.run_id, 40)} (pid {job.pid})"


def ask_job(job: RunningJob, request: ControlRequest, timeout: float | None = None) -> Reply:
    """Return the reply of a job.

    Raises:
        JobError: the job has refused the request.
        OSError: it does not answer.
        ControlError: it sends something else.
    """
    reply = ask(job.path, request, timeout)
    if isinstance(reply, ErrorReply):
        raise JobError(reply.problem)
    return reply
