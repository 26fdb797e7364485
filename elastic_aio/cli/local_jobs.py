"""Jobs of this user on this host: which job a command means, and most commands about a job.

`ps`, `status`, `dump`, `stop`, `restart`, `preempt`, `signal` and `wait` ask the control sockets of
agents, and need no store and no option.  `logs`, `top`, `why` and `events` choose their job here.
"""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from elastic_aio.cli import status_text
from elastic_aio.cli.options import print_error, print_output_error
from elastic_aio.cli.parser import OptionParser
from elastic_aio.control.client import (
    NO_JOB,
    CommandClient,
    RunningJob,
    choose,
    find_jobs,
    matches,
    run_blocking,
)
from elastic_aio.control.protocol import EndReply
from elastic_aio.errors import ControlError, JobNotFound, SpecError
from elastic_aio.outcome import JobState, signal_name
from elastic_aio.process.rusage import with_usage
from elastic_aio.ranks import format_ranks
from elastic_aio.spec.checks import (
    UsageError,
    invalid_value,
    parse_int,
    parse_seconds,
    signal_number,
)
from elastic_aio.status import JobStatus, is_below
from elastic_aio.text import counted, one_line
from elastic_aio.value import to_json

if TYPE_CHECKING:
    from elastic_aio.events import Event
    from elastic_aio.record import JobRecord

EXIT_CODES: Final = "Exit codes: 0 success, 1 the job does not answer, 2 no such job."
_MUST_NAME: Final = "a script must name the job"

Command = Callable[[Sequence[str]], int]
"""A sub-command: a function of its arguments that returns the exit code."""


class JobError(Exception):
    """A job has not done what it was asked; the message is one line."""


def command(name: str) -> Callable[[Command], Command]:
    """Make a sub-command of a function: its errors are printed, and have an exit code.

    1: the job does not answer, or has refused.  2: the arguments are invalid, or there is no such
    job.  130: Ctrl-C.
    """

    def decorate(run: Command) -> Command:
        @functools.wraps(run)
        def main(argv: Sequence[str]) -> int:
            try:
                code = run(argv)
                print(end="", flush=True)  # at the exit, an error has another code
                return code
            except (UsageError, SpecError) as error:
                return print_error(name, str(error), 2)
            except (JobError, ControlError) as error:
                return print_error(name, str(error), 1)
            except KeyboardInterrupt:
                return 128 + signal.SIGINT
            except OSError as error:  # a pipe or disk takes no output, or no descriptor is left
                return print_output_error(name, error)

        return main

    return decorate


def job_parser(
    name: str,
    description: str,
    *,
    epilog: str = EXIT_CODES,
    takes_runs: bool = False,
    changes: bool = False,
) -> OptionParser:
    """Return the parser of a sub-command that is about one job.

    `takes_runs`: the job may also be a run that has ended, and the beginning of an id.  `changes`:
    see `choose_job_to_change`.
    """
    id_, ended, named = "id", "", f"; {_MUST_NAME}" if changes else ""
    if takes_runs:
        id_, ended = "id or beginning of the id", "; also of a run that has ended, or its directory"
    parser = OptionParser(prog=f"aio-elastic {name}", description=description, epilog=epilog)
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help=f"{id_} of the run, pid of the launcher, or what the workers run{ended} (default: the"
        f" only job that runs{named})",
    )
    return parser


# ------------------------------------------------------------- which job is meant


def choose_job(
    name: str | None, jobs: Sequence[RunningJob] | None = None, *, begins: bool = False
) -> RunningJob:
    """Return the job of this name, or the only job, among `jobs` or all of this user.

    With `begins` the name may be the beginning of a run id.  UsageError: there is none, or several.
    """
    jobs = find_jobs() if jobs is None else jobs
    try:
        return choose(jobs, name, begins=begins)
    except JobNotFound as error:
        if name and not matches(jobs, name, begins=begins):
            # For few commands.
            from elastic_aio.cli.finished_jobs import end_of_last, runs_named, silent_launcher

            runs = runs_named(name, begins=begins)[0]
            if (launcher := silent_launcher(runs, jobs)) is not None:
                return launcher
            if ended := end_of_last(runs, name):
                raise invalid_value("JOB", ended, name) from None
            having = [job for job in jobs if job.status is not None and job.status.find(name)]
            if having:
                problem = f"must be a job, and this is a child of {having[0]}; see `status`"
                raise invalid_value("JOB", problem, name) from None
        raise UsageError(f"JOB: {error}") from None


def choose_run(
    name: str | None, jobs: Sequence[RunningJob] | None = None
) -> RunningJob | JobRecord:
    """Return the job of this name as `choose_job`, or else the last recorded run of this name.

    The name may be the directory of a run, or of several.  The beginning of an id comes last.  Of a
    job that does not answer, this is the record.  UsageError: there is none.
    """
    jobs = find_jobs() if jobs is None else jobs
    if name is None and not jobs:
        raise UsageError(f"JOB: {NO_JOB}; `aio-elastic ps -a` lists the runs that have ended")
    if name is None or matches(jobs, name):
        return choose_job(name, jobs)
    from elastic_aio.cli.finished_jobs import runs_named, silent_launcher  # for few commands

    is_beginning = bool(matches(jobs, name, begins=True))
    runs, problem = runs_named(name, begins=not is_beginning)
    if not runs and not is_beginning and (problem or not jobs):
        problem = problem or f"{NO_JOB}, and no recorded run has this name"
        raise invalid_value("JOB", problem, name)
    if not runs:
        return choose_job(name, jobs, begins=True)
    if runs[1:]:
        last = f"the last, of {status_text.local_time(runs[0].started_at or 0.0)} on {runs[0].node}"
        print_error("", f"{len(runs)} recorded runs match {name!r}: {last} (see ps -a)", 0)
    if (launcher := silent_launcher(runs, jobs)) is not None:
        print_error(
            "", f"{launcher}: this is its record of {status_text.local_time(runs[0].written_at)}", 0
        )
    return runs[0]


def recorded_events(run: JobRecord) -> list[Event]:
    """Return the events of a recorded run; a JobError says why there are none."""
    try:
        if found := run.events():
            return found
        problem = "are gone"
    except ValueError as error:
        problem = f"cannot be read: {error}"
    raise JobError(f"the events of run {run.run_id!r} {problem} ({run.log_dir or run.directory})")


def add_child(parser: OptionParser) -> None:
    """Add the argument CHILD, which `with_child` reads."""
    parser.add_argument(
        "child",
        nargs="?",
        metavar="CHILD",
        help="path of a child of a group, such as serving/3, or the rank of an independent"
        " worker (default: the whole job)",
    )


def check_not_empty(name: str, child: str | None) -> None:
    """Raise UsageError for the empty name of a child, such as a variable that is not set."""
    if child == "":
        raise invalid_value(name, "must not be empty: leave it out for the whole job", child)


def with_child(
    name: str | None, child: str | None, jobs: Sequence[RunningJob] | None = None
) -> tuple[str | None, str]:
    """Return the names of a job and of its child; a name alone may be that of a child."""
    check_not_empty("CHILD", child)
    if child is not None:
        return name, child
    jobs = find_jobs() if jobs is None else jobs
    if name is None or matches(jobs, name):
        return name, ""
    having = [job for job in jobs if job.status is not None and job.status.find(name)]
    return (str(having[0].pid), name) if len(having) == 1 else (name, "")


def events_below(events: Iterable[Event], child: str) -> Iterator[Event]:
    """Yield the events of a child and of what is below it; without a child, all."""
    return (one for one in events if is_below(one.child, child))


def find_child(status: JobStatus, child: str) -> JobStatus:
    """Return the status of the child at a path, or raise UsageError."""
    if (found := status.find(child)) is None:
        known = ", ".join(one.child for one in status.descendants) or "none"
        raise invalid_value("CHILD", f"must be one of: {known}", child)
    return found


def check_child(job: RunningJob | JobRecord, child: str) -> None:
    """Raise UsageError if a job has no child of this path, as far as that is known."""
    status = job.status if isinstance(job, RunningJob) else job
    if status is not None:
        find_child(status, child)


def choose_job_to_change(name: str | None) -> RunningJob:
    """Return the job of this name, or for a person at a terminal the only job."""
    job = choose_job(name)
    if name is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        problem = "must be given where standard input or output is no terminal"
        raise UsageError(f"JOB: {problem}; {job} runs here")
    return job


# ------------------------------------------------------------------ the commands


@command("ps")
def main_ps(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic ps",
        description="List the jobs of this user on this host.",
        epilog="Exit codes: 0 success, 2 invalid arguments.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per job")
    parser.add_argument(
        "-a",
        "--all",
        action="store_true",
        help="also the runs that have ended, 50 at most, latest first",
    )
    arguments = parser.parse_args(argv)
    jobs, now = find_jobs(), time.time()
    columns: tuple[str, ...] = status_text.JOB_COLUMNS
    row = status_text.job_row
    if arguments.all:
        from elastic_aio.cli.finished_jobs import RUN_COLUMNS, run_row, with_recorded

        jobs, columns, row = with_recorded(jobs), RUN_COLUMNS, run_row
    if arguments.json:
        for job in jobs:
            print(to_json({"pid": job.pid, "status": job.status}).decode())
    elif jobs:
        print("\n".join(status_text.table(columns, [row(job, now) for job in jobs])))
    else:
        print(NO_JOB)
    return 0


@command("status")
def main_status(argv: Sequence[str]) -> int:
    parser = job_parser(
        "status", "Print what a job is doing, and each worker of this node.", takes_runs=True
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_child(parser)
    arguments = parser.parse_args(argv)
    name, child = with_child(arguments.job, arguments.child)
    job = choose_run(name)
    status: JobStatus
    if isinstance(job, RunningJob):
        status, now = run_blocking(CommandClient(job).status()), time.time()
        head = status_text.head_lines(status, now)
    else:
        from elastic_aio.cli.finished_jobs import run_lines

        status, now, head = job, job.until, run_lines(job)
    if child:
        status = find_child(status, child)
        head = status_text.head_lines(status, now)
    if arguments.json:
        print(to_json(status).decode())
        return 0
    is_here = isinstance(job, RunningJob) and job.is_local
    shares = _cpu_shares(status) if is_here else {}
    cells = status_text.worker_cells(status, now, lambda worker: shares.get(worker.pid))
    print("\n".join([*head, *status_text.child_table(status, now), "", *status_text.table(*cells)]))
    return 0


def _cpu_shares(status: JobStatus) -> dict[int, float]:
    """Return each worker's present share of a CPU, by pid, measured for a moment."""
    meter = status_text.CpuMeter()
    workers = [worker for leaf in status.leaves for worker in leaf.workers]
    for worker in workers:
        meter.share(worker)
    if any(worker.state == "running" for worker in workers):
        time.sleep(status_text.MEASURED_S)
    later = [worker for leaf in with_usage(status).leaves for worker in leaf.workers]
    shares = {worker.pid: meter.share(worker) for worker in later}
    return {pid: share for pid, share in shares.items() if share is not None}


@command("stop")
def main_stop(argv: Sequence[str]) -> int:
    parser = job_parser(
        "stop",
        "End a job, or a child of it, by its stop plan, and wait for its end. A job of several"
        " nodes goes on without this node; a child stays stopped until it is restarted.",
        epilog="Exit codes: 0 the job is over, 1 it does not answer, 2 no such job.",
        changes=True,
    )
    add_child(parser)
    parser.add_argument("--signal", metavar="NAME", help="first signal (default: the plan's)")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="kill all processes at once; the launcher itself, if its agent refuses or does not"
        " answer within 10 s",
    )
    parser.add_argument("--no-wait", action="store_true", help="return after the request")
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="for the events and the result"
    )
    arguments = parser.parse_args(argv)
    number = None if arguments.signal is None else signal_number("--signal", arguments.signal)
    name, child = with_child(arguments.job, arguments.child)
    job = choose_job_to_change(name)
    check_child(job, child)
    client, kill = CommandClient(job), arguments.kill
    waits = not arguments.no_wait
    stop = client.stop(arguments.reason, signal=number, kill=kill, wait=waits, child=child)
    try:
        end = run_blocking(stop)
    except JobNotFound:
        print(f"job {job}: it has just ended")
        return 0
    except ControlError as error:
        if not kill or child:
            raise
        try:
            is_killed = run_blocking(client.kill_launcher())
        except ControlError as problem:
            raise JobError(f"{error}; {problem}") from None
        if not is_killed:
            raise
        print(f"job {job} killed: {error}, so its launcher got SIGKILL and its guardian ended it")
        return 0
    if child:
        print(f"job {job}: {child} {'is stopped' if waits else 'is being stopped'}")
        return 0
    print(f"job {job}: the stop was requested" if end is None else _ended(job, end))
    return 0


@command("restart")
def main_restart(argv: Sequence[str]) -> int:
    parser = job_parser(
        "restart",
        "Stop the workers of a job, or of a child of it, by its stop plan and start them again, on"
        " all its nodes. It costs no restart of --max-restarts.",
        epilog="Exit codes: 0 the next attempt runs, 1 the job has ended, or does not answer,"
        " 2 no such job.",
        changes=True,
    )
    add_child(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the events")
    arguments = parser.parse_args(argv)
    name, child = with_child(arguments.job, arguments.child)
    job = choose_job_to_change(name)
    check_child(job, child)
    client = CommandClient(job)
    if not run_blocking(client.restart(arguments.reason, child=child)):
        raise JobError(f"{child or 'the job'} has ended without another attempt")
    status = run_blocking(client.status())
    which = f"{child} restarted" if child else "restarted"
    what = "" if status.children else f": attempt {status.attempt} runs"
    print(f"job {job} {which}{what}")
    return 0


@command("reload")
def main_reload(argv: Sequence[str]) -> int:
    parser = job_parser(
        "reload",
        "Start independent workers, or replicas, anew: one after the other, each beside the old"
        " one, which is stopped when the new one is ready. Other children are restarted. All have"
        " the description that the job was started with: only SIGHUP reads a changed file, with"
        " `up --reload-on-hup`.",
        epilog="Exit codes: 0 all are replaced, 1 the reload has failed and the old ones run on,"
        " or the job does not answer, 2 no such job.",
        changes=True,
    )
    add_child(parser)
    arguments = parser.parse_args(argv)
    name, child = with_child(arguments.job, arguments.child)
    job = choose_job_to_change(name)
    check_child(job, child)
    if not run_blocking(CommandClient(job).reload(child)):
        raise JobError("the reload has failed, and what it has not replaced runs on: see why")
    print(f"job {job}: {child or 'all workers'} reloaded, by the same description")
    return 0


@command("scale")
def main_scale(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic scale",
        usage="aio-elastic scale [-h] [JOB] [CHILD] NUMBER",
        description="Change the number of independent workers of a job, or of a child of it, or of"
        " equal replicas. A program of a group whose workers restart together is restarted with so"
        " many; a job of such workers alone keeps its number.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("words", nargs="+", metavar="[JOB] [CHILD] NUMBER", help="such as 8")
    *names, text = parser.parse_args(argv).words
    number = parse_int(text)
    if number is None or number < 1 or names[2:]:
        raise invalid_value("NUMBER", "must be a number of at least 1, after JOB and CHILD", text)
    first, second = (*names, None, None)[:2]
    name, child = with_child(first, second)
    job = choose_job_to_change(name)
    check_child(job, child)
    run_blocking(CommandClient(job).scale(child, number))
    print(f"job {job}: {child or 'it'} has {counted(number, 'worker')}")
    return 0


@command("preempt")
def main_preempt(argv: Sequence[str]) -> int:
    parser = job_parser(
        "preempt",
        "Give the workers of a job, on all its nodes, notice that it is about to be preempted. The"
        " job ends when they have ended, or at the deadline, and none is restarted.",
        changes=True,
    )
    parser.add_argument(
        "--deadline",
        type=lambda text: parse_seconds("--deadline", text, limit=1e9),
        metavar="SECONDS",
        help="seconds until the workers are stopped (default: that of the job)",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the events")
    arguments = parser.parse_args(argv)
    job = choose_job_to_change(arguments.job)
    counts = run_blocking(CommandClient(job).preempt(arguments.deadline, arguments.reason))
    has = "the workers have notice of a preemption"
    print(f"job {job}: {has if counts else 'a notice that it had before leaves no more time'}")
    return 0


@command("dump")
def main_dump(argv: Sequence[str]) -> int:
    parser = job_parser("dump", "Print what the workers of this node are doing: their stacks.")
    add_child(parser)
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the text and the events")
    arguments = parser.parse_args(argv)
    name, child = with_child(arguments.job, arguments.child)
    job = choose_job(name)
    check_child(job, child)
    reply = run_blocking(CommandClient(job).dump(arguments.reason, child=child))
    print(reply.text.rstrip())
    if reply.path is not None:
        print(f"also in {reply.path}")
    return 0


@command("signal")
def main_signal(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic signal",
        usage="aio-elastic signal [-h] [--rank N] [--child CHILD] [JOB] SIGNAL",
        description="Send a signal to the first process of each worker of this node.",
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "words", nargs="*", metavar="[JOB] SIGNAL", help=f"such as USR1 or 10; {_MUST_NAME}"
    )
    parser.add_argument("--rank", metavar="N", help="global rank of the only worker to get it")
    parser.add_argument("--child", help="path of the only child to get it")
    arguments = parser.parse_args(argv)
    if not 1 <= len(arguments.words) <= 2:
        raise UsageError("SIGNAL: must be given, after JOB if that is given too")
    *name, text = arguments.words
    number = signal_number("SIGNAL", text)
    rank = None
    if arguments.rank is not None and (rank := parse_int(arguments.rank)) is None:
        raise invalid_value("--rank", "must be a whole number", arguments.rank)
    check_not_empty("--child", arguments.child)
    child = arguments.child or ""
    job = choose_job_to_change(name[0] if name else None)
    check_child(job, child)
    if rank is not None and job.status is not None:
        leaves = (job.status.find(child) or job.status).leaves
        workers = [worker for leaf in leaves for worker in leaf.workers]
        running = [one.rank for one in workers if one.state == "running"]
        if rank not in running:
            known = format_ranks(running) or "none"
            problem = f"must be the rank of a running worker of this node: {known}"
            raise invalid_value("--rank", problem, arguments.rank)
    reply = run_blocking(CommandClient(job).signal(number, rank, child=child))
    sent = signal_name(number)
    print(f"job {job}: {sent} sent to {counted(len(reply.pids), 'worker')}", flush=True)
    if reply.unhandled and number != signal.SIGKILL:
        ranks = format_ranks(reply.unhandled)
        have = f"rank {ranks} has" if len(reply.unhandled) == 1 else f"ranks {ranks} have"
        print_error("signal", f"warning: {have} no handler for {sent} and will be ended by it", 0)
    return 0


@command("wait")
def main_wait(argv: Sequence[str]) -> int:
    parser = job_parser(
        "wait",
        "Wait for the end of a job.",
        epilog="Exit codes: that of the job, 124 after --timeout, 2 no such job.",
    )
    parser.add_argument(
        "--timeout",
        type=lambda text: parse_seconds("--timeout", text, is_positive=True, limit=1e9),
        metavar="SECONDS",
        help="exit with 124 after this time (default: no limit)",
    )
    arguments = parser.parse_args(argv)
    job = choose_job(arguments.job)
    try:
        reply = run_blocking(CommandClient(job).wait(arguments.timeout))
    except TimeoutError:
        return 124  # as timeout(1)
    print(_ended(job, reply))
    return reply.exit_code


def _ended(job: RunningJob, reply: EndReply) -> str:
    # With the name: the only job need not be the job that is meant.
    status = job.status
    if reply.state is JobState.STOPPED and status is not None and status.group_world_size > 1:
        ended = f"node {one_line(status.node)} has left job {job}"  # which may go on
    else:
        ended = f"job {job} {reply.state.value}"
    return f"{ended}, exit code {reply.exit_code}: {one_line(reply.why)}"
