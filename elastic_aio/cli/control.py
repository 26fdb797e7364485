"""`aio-elastic ps`, `status`, `stop`, `restart`, `signal` and `wait`: jobs of this host.

They ask the control sockets of this user's agents, and need no store and no option.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

import msgspec

from elastic_aio.cli.local_jobs import (
    EXIT_CODES,
    JobError,
    ask_job,
    choose_from,
    choose_job,
    choose_job_to_change,
    describe_job,
    job_parser,
    run_command,
)
from elastic_aio.cli.options import UsageError, invalid_value, parse_int, parse_seconds, print_error
from elastic_aio.cli.parser import OptionParser
from elastic_aio.cli.status_text import (
    JOB_COLUMNS,
    MEASURED_S,
    WORKER_COLUMNS,
    CpuMeter,
    head_lines,
    job_row,
    table,
    worker_row,
)
from elastic_aio.control.client import RunningJob, find_jobs
from elastic_aio.control.protocol import (
    AwaitEnd,
    DoneReply,
    DumpReply,
    DumpStacks,
    EndReply,
    GetStatus,
    RestartJob,
    SendSignal,
    StatusReply,
    StopJob,
)
from elastic_aio.errors import SpecError
from elastic_aio.outcome import JobState, signal_name
from elastic_aio.process.rusage import with_usage
from elastic_aio.ranks import format_ranks
from elastic_aio.spec.checks import signal_number
from elastic_aio.status import JobStatus
from elastic_aio.text import counted, jsonable, one_line

_ANSWER_S = 10.0
_DUMP_S = 60.0


def main_ps(argv: Sequence[str]) -> int:
    """Run `aio-elastic ps` with these arguments; return the exit code."""
    return run_command("ps", _ps, argv)


def main_status(argv: Sequence[str]) -> int:
    """Run `aio-elastic status` with these arguments; return the exit code."""
    return run_command("status", _status, argv)


def main_stop(argv: Sequence[str]) -> int:
    """Run `aio-elastic stop` with these arguments; return the exit code."""
    return run_command("stop", _stop, argv)


def main_restart(argv: Sequence[str]) -> int:
    """Run `aio-elastic restart` with these arguments; return the exit code."""
    return run_command("restart", _restart, argv)


def main_dump(argv: Sequence[str]) -> int:
    """Run `aio-elastic dump` with these arguments; return the exit code."""
    return run_command("dump", _dump, argv)


def main_signal(argv: Sequence[str]) -> int:
    """Run `aio-elastic signal` with these arguments; return the exit code."""
    return run_command("signal", _signal, argv)


def main_wait(argv: Sequence[str]) -> int:
    """Run `aio-elastic wait` with these arguments; return the exit code."""
    return run_command("wait", _wait, argv)


def fresh_status(job: RunningJob, *, makes_files: bool = False) -> JobStatus:
    """Return the present status of a job, with the usage of its workers.

    With `makes_files` the log files that it names exist.

    Raises:
        JobError, OSError, ControlError: the job does not answer as it should.
    """
    reply = ask_job(job, GetStatus(makes_files=makes_files), _ANSWER_S)
    if not isinstance(reply, StatusReply):
        raise JobError("the agent has sent no status")
    return with_usage(reply.status) if job.is_local else reply.status


def _ps(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic ps",
        description="List the jobs of this user on this host.",
        epilog="Exit codes: 0 success, 2 invalid arguments.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per job")
    arguments = parser.parse_args(argv)
    jobs, now = find_jobs(), time.time()
    if arguments.json:
        for job in jobs:
            print(_json({"pid": job.pid, "status": msgspec.to_builtins(job.status)}))
    elif jobs:
        print("\n".join(table(JOB_COLUMNS, [job_row(job, now) for job in jobs])))
    else:
        print("no job of this user runs on this host")
    return 0


def _status(argv: Sequence[str]) -> int:
    parser = job_parser("status", "Print what a job is doing, and each worker of this node.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments = parser.parse_args(argv)
    job = choose_job(arguments.job)
    status, now = fresh_status(job), time.time()
    if arguments.json:
        print(_json(msgspec.to_builtins(status)))
        return 0
    shares = _cpu_shares(status) if job.is_local else {}
    rows = [worker_row(worker, now, shares.get(worker.pid)) for worker in status.workers]
    print("\n".join([*head_lines(status, now), "", *table(WORKER_COLUMNS, rows)]))
    return 0


def _cpu_shares(status: JobStatus) -> dict[int, float]:
    """Return the part of a CPU that each worker uses now, by pid: measured for a moment."""
    meter = CpuMeter()
    for worker in status.workers:
        meter.share(worker)
    if any(worker.state == "running" for worker in status.workers):
        time.sleep(MEASURED_S)
    shares = {worker.pid: meter.share(worker) for worker in with_usage(status).workers}
    return {pid: share for pid, share in shares.items() if share is not None}


def _stop(argv: Sequence[str]) -> int:
    parser = job_parser(
        "stop",
        "End a job by its stop plan, and wait for its end. A job of several nodes goes on"
        " without this node.",
        epilog="Exit codes: 0 the job is over, 1 it does not answer, 2 no such job.",
    )
    parser.add_argument("--signal", metavar="NAME", help="in place of the plan's first signal")
    parser.add_argument("--kill", action="store_true", help="kill all processes at once")
    parser.add_argument("--no-wait", action="store_true", help="return after the request")
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="for the events and the result"
    )
    arguments = parser.parse_args(argv)
    number = None if arguments.signal is None else _signal_number("--signal", arguments.signal)
    job = choose_job_to_change(arguments.job)
    is_awaited, reason = not arguments.no_wait, arguments.reason
    request = StopJob(signal=number, kill=arguments.kill, reason=reason, wait=is_awaited)
    reply = ask_job(job, request)
    if isinstance(reply, EndReply):
        print(_ended(job, reply))
    else:
        print(f"job {describe_job(job)}: the stop was requested")
    return 0


def _restart(argv: Sequence[str]) -> int:
    parser = job_parser(
        "restart",
        "Stop the workers of a job by its stop plan and start them again, on all its nodes. It"
        " costs no restart of --max-restarts.",
        epilog="Exit codes: 0 the next attempt runs, 1 the job has ended, or does not answer,"
        " 2 no such job.",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the events")
    arguments = parser.parse_args(argv)
    job = choose_job_to_change(arguments.job)
    reply = ask_job(job, RestartJob(reason=arguments.reason))
    if isinstance(reply, DoneReply) and reply.is_done:
        print(f"job {describe_job(job)} restarted: attempt {fresh_status(job).attempt} runs")
        return 0
    raise JobError("the job has ended without another attempt")


def _dump(argv: Sequence[str]) -> int:
    parser = job_parser("dump", "Print what the workers of this node are doing: their stacks.")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the text and the events")
    arguments = parser.parse_args(argv)
    job = choose_job(arguments.job)
    reply = ask_job(job, DumpStacks(reason=arguments.reason), _DUMP_S)
    if isinstance(reply, DumpReply):
        print(reply.text.rstrip())
        if reply.path is not None:
            print(f"also in {reply.path}")
    return 0


def _signal(argv: Sequence[str]) -> int:
    parser = OptionParser(
        prog="aio-elastic signal",
        usage="aio-elastic signal [-h] [--rank N] [JOB] SIGNAL",
        description="Send a signal to the first process of each worker of this node.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("words", nargs="*", metavar="[JOB] SIGNAL", help="such as USR1 or 10")
    parser.add_argument("--rank", metavar="N", help="global rank of the only worker to get it")
    arguments = parser.parse_args(argv)
    if not 1 <= len(arguments.words) <= 2:
        raise UsageError("SIGNAL: must be given, after JOB if that is given too")
    *name, text = arguments.words
    number = _signal_number("SIGNAL", text)
    rank = None
    if arguments.rank is not None and (rank := parse_int(arguments.rank)) is None:
        raise invalid_value("--rank", "must be a whole number", arguments.rank)
    job = choose_job_to_change(name[0] if name else None)
    if rank is not None and job.status is not None:
        running = [one.rank for one in job.status.workers if one.state == "running"]
        if rank not in running:
            known = format_ranks(running) or "none"
            problem = f"must be the rank of a running worker of this node: {known}"
            raise invalid_value("--rank", problem, arguments.rank)
    reply = ask_job(job, SendSignal(signal=number, rank=rank), _ANSWER_S)
    if isinstance(reply, DoneReply):
        sent, workers = signal_name(number), counted(len(reply.pids), "worker")
        print(f"job {describe_job(job)}: {sent} sent to {workers}", flush=True)
        if reply.unhandled and number != signal.SIGKILL:
            ranks = format_ranks(reply.unhandled)
            have = f"rank {ranks} has" if len(reply.unhandled) == 1 else f"ranks {ranks} have"
            print_error(
                "signal", f"warning: {have} no handler for {sent} and will be ended by it", 0
            )
    return 0


def _wait(argv: Sequence[str]) -> int:
    parser = job_parser(
        "wait",
        "Wait for the end of a job.",
        epilog="Exit codes: that of the job, 124 after --timeout, 2 no such job.",
    )
    parser.add_argument(
        "--timeout",
        type=lambda text: parse_seconds("--timeout", text, is_positive=True, limit=1e9),
        metavar="SECONDS",
        help="give up after this time (default: none)",
    )
    arguments = parser.parse_args(argv)
    job = choose_from(find_jobs(), arguments.job)
    try:
        reply = ask_job(job, AwaitEnd(), arguments.timeout)
    except TimeoutError:
        return 124  # as timeout(1)
    if not isinstance(reply, EndReply):
        raise JobError("the job has ended by an internal error")
    print(_ended(job, reply))
    return reply.exit_code


def _ended(job: RunningJob, reply: EndReply) -> str:
    # With the name: a job that was the only one need not be the one that is meant.
    name, status = describe_job(job), job.status
    if reply.state is JobState.STOPPED and status is not None and status.group_world_size > 1:
        ended = f"node {status.node} has left job {name}"  # which may go on
    else:
        ended = f"job {name} {reply.state.value}"
    return f"{ended}, exit code {reply.exit_code}: {one_line(reply.why)}"


def _signal_number(option: str, text: str) -> int:
    number = parse_int(text)
    try:
        name = text.upper()
        full = name if name.startswith("SIG") else f"SIG{name}"
        return signal_number(option, full if number is None else number)
    except SpecError as error:
        raise invalid_value(option, error.problem, text) from None


def _json(value: object) -> str:
    return msgspec.json.encode(jsonable(value)).decode()
