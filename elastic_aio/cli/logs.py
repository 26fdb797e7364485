"""`aio-elastic logs`: the output of a job's workers, from their log files.

The paths come from the status of the job and, for later attempts, from its events.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.cli import local_jobs
from elastic_aio.cli.options import print_error
from elastic_aio.control.client import (
    CommandClient,
    JobClient,
    RunningJob,
    find_jobs,
    run_blocking,
)
from elastic_aio.errors import JobNotFound
from elastic_aio.events import WorkerStarted
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.files import NODE_FILE
from elastic_aio.logs.lines import LogLine, worker_name
from elastic_aio.logs.log_file import last_lines
from elastic_aio.logs.reader import LogReader
from elastic_aio.logs.streams import LoggedStream, LoggedStreams
from elastic_aio.spec.checks import UsageError, parse_int, parse_number
from elastic_aio.status import JobStatus, WorkerStatus
from elastic_aio.text import counted

if TYPE_CHECKING:
    from elastic_aio.record import JobRecord

_LINES: Final = 100


@local_jobs.command("logs")
def main_logs(argv: Sequence[str]) -> int:
    parser = local_jobs.job_parser(
        "logs", "Print the last lines that the workers of a job have written.", takes_runs=True
    )
    parser.add_argument(
        "rank",
        nargs="?",
        metavar="RANK|CHILD",
        help="global rank of a worker, or path of a child of a group (default: all of this node);"
        " it may stand alone",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")
    parser.add_argument(
        "-n",
        "--lines",
        type=lambda text: parse_number("--lines", text),
        default=_LINES,
        metavar="N",
        help=f"lines of each file to begin with (default {_LINES})",
    )
    arguments = parser.parse_args(argv)
    job, rank, child = _job_and_rank(arguments)
    status: JobStatus
    if isinstance(job, RunningJob):
        status = run_blocking(CommandClient(job).status(usage=False, makes_files=True))
    else:
        status = job
    after, log_dir, status = status.seq, status.log_dir, local_jobs.find_child(status, child)
    workers = [worker for leaf in status.leaves for worker in leaf.workers]
    ranks = {worker.rank for worker in workers}
    if rank is not None and rank not in ranks and ranks:
        raise UsageError(f"RANK: must be one of this node's: {sorted(ranks)} (got {rank})")
    streams = present_streams(status, rank, arguments.lines)
    if not [*streams] and (workers or not arguments.follow):
        raise local_jobs.JobError(
            "no output of this job is in files (see --tee, --redirects and LogSpec)"
        )
    if [*streams] and (directory := _gone(streams, status.log_dir or log_dir)):
        kept = "captured output is kept only if a job fails, and if there is some"
        raise local_jobs.JobError(f"no log file of this job is left in {directory} ({kept})")
    if [*streams] and (missing := streams_without_file(workers)):
        print_error("logs", f"{missing} is in no file and not shown (see --tee and --redirects)", 0)
    printer = LinePrinter(has_prefix=rank is None and len(workers) != 1)
    if arguments.follow and isinstance(job, RunningJob):
        run_coroutine(partial(_follow, job, after, streams, (rank, child), printer))
    else:
        run_coroutine(lambda: _print(streams, printer, follow=False))
    return 0


def _gone(streams: LoggedStreams, log_dir: str | None) -> str:
    """Return the directory of the streams if it was removed with all of them, else nothing."""
    if any(os.path.lexists(one.path) for one in streams):
        return ""
    # A stream without a byte may have no file.  Its worker has a directory nevertheless, except in
    # a temporary directory, which has no `node.json`.
    of_workers = {os.path.dirname(one.path) for one in streams}
    directory = log_dir or os.path.commonpath(of_workers)
    if not os.path.isdir(directory):
        return directory
    has_all = os.path.lexists(f"{directory}/{NODE_FILE}")
    is_left = not has_all or any(map(os.path.isdir, of_workers))
    return "" if is_left else os.path.commonpath(of_workers)


def _job_and_rank(
    arguments: argparse.Namespace,
) -> tuple[RunningJob | JobRecord, int | None, str]:
    """Return job, rank and child; a number alone is a rank, unless it is the pid of a launcher."""
    jobs = find_jobs()
    name, text = arguments.job, arguments.rank
    is_alone = name is not None and text is None and parse_int(name) is not None
    if is_alone and not any(str(job.pid) == name for job in jobs):
        name, text = None, name
    if text is None:
        name, child = local_jobs.with_child(name, None, jobs)
        return local_jobs.choose_run(name, jobs), None, child
    job = local_jobs.choose_run(name, jobs)
    status = job.status if isinstance(job, RunningJob) else job
    is_child = status is not None and status.find(text) is not None
    if is_child or (parse_int(text) is None and status is not None and status.children):
        return job, None, text
    return job, parse_number("RANK", text), ""


def streams_without_file(workers: Sequence[WorkerStatus]) -> str:
    streams = {
        "standard output": [worker.stdout_path for worker in workers],
        "standard error": [worker.stderr_path for worker in workers],
    }
    return " and ".join(name for name, paths in streams.items() if None in paths)


def present_streams(status: JobStatus, rank: int | None, lines: int) -> LoggedStreams:
    """Return the present streams of one rank or of all, each from its last lines on."""
    streams = LoggedStreams()
    for leaf in status.leaves:
        for worker in leaf.workers:
            if rank in (None, worker.rank):
                _add(streams, worker, leaf.attempt, leaf.child, lines)
    return streams


def _add(
    streams: LoggedStreams,
    worker: WorkerStatus | WorkerStarted,
    attempt: int,
    child: str,
    lines: int | None = None,
) -> None:
    paths = {worker.stdout_path: "stdout"}
    if worker.stderr_path in paths:
        paths[worker.stderr_path] = "output"
    else:
        paths[worker.stderr_path] = "stderr"
    for path, name in paths.items():
        if path is None or streams.get(path) is not None:
            continue
        stream = LoggedStream(worker.rank, worker.local_rank, attempt, name, path, child=child)
        if lines is not None:
            with suppress(OSError):  # it was removed already
                stream.begin = last_lines(path, lines)
        streams.add(stream)


async def _print(streams: LoggedStreams, printer: LinePrinter, *, follow: bool) -> None:
    async with LogReader(streams, lambda _: True, follow=follow) as reader:
        while lines := await reader.batch():
            printer.print(lines)
    printer.finish()


async def _follow(
    job: RunningJob,
    after: int,
    streams: LoggedStreams,
    chosen: tuple[int | None, str],
    printer: LinePrinter,
) -> None:
    following = create_task(_add_attempts(job, after, streams, *chosen), name="follow the attempts")
    try:
        await _print(streams, printer, follow=True)
        await following  # which has closed the streams, or says why it could not follow
    finally:
        await cancel_and_wait([following])


async def _add_attempts(
    job: RunningJob, after: int, streams: LoggedStreams, rank: int | None, child: str
) -> None:
    """Add the files of later attempts; the streams are closed at the end of the job."""
    latest: dict[str, int] = {}
    with closing(streams), suppress(JobNotFound):  # it has just ended
        async for event in JobClient(job).events(after, follow=True):
            if not isinstance(event, WorkerStarted):
                continue
            own = event.child
            if event.attempt > latest.get(own, -1):
                known = {stream.attempt for stream in streams if stream.child == own}
                for attempt in known - {event.attempt}:
                    streams.complete(attempt, own)
                latest[own] = event.attempt
            is_below = not child or f"{own}/".startswith(f"{child}/")
            if is_below and rank in (None, event.rank):
                _add(streams, event, event.attempt, own)


class LinePrinter:
    """Prints lines of several files; a line that comes in pieces stays together."""

    def __init__(self, *, has_prefix: bool) -> None:
        self._has_prefix = has_prefix
        self._unfinished: tuple[object, ...] | None = None

    def print(self, lines: Sequence[LogLine]) -> None:
        """Print lines, with `has_prefix` the rank before each; say what is missing.

        Raises:
            OSError: nothing reads standard output.
        """
        text = b"".join(map(self._format, lines))
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()

    def finish(self) -> None:
        if self._unfinished is not None:
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()

    def _format(self, line: LogLine) -> bytes:
        source = line.child, line.attempt, line.rank, line.stream
        text = line.raw
        if line.missed != 0:
            size = "a part" if line.missed is None else counted(line.missed, "byte")
            print_error("logs", f"rank {line.rank}: {size} of {line.stream} can be read no more", 0)
        if self._unfinished != source or line.missed != 0:
            if self._has_prefix and text:
                # An independent worker of a job without children has its rank as its path.
                child = "" if line.child == str(line.rank) else line.child
                text = f"[{worker_name(child, line.rank)}]: ".encode() + text
            if self._unfinished is not None:
                text = b"\n" + text
        if line.raw:
            self._unfinished = None if line.raw.endswith(b"\n") else source
        return text
