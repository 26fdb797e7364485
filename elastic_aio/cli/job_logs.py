"""`aio-elastic logs`: the output of a job's workers, from their log files.

The paths come from the status of the job, and those of later attempts from its events.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.cli.control import fresh_status
from elastic_aio.cli.local_jobs import JobError, choose_from, job_parser, matches, run_command
from elastic_aio.cli.options import UsageError, parse_int, parse_number
from elastic_aio.control.client import RunningJob, find_jobs
from elastic_aio.control.protocol import EventReply, GetEvents, decode_reply, encode
from elastic_aio.event_json import event_from_json
from elastic_aio.events import WorkerStarted
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.status import JobStatus

_LINES: Final = 100
_TAIL_MAX: Final = 4 << 20
"""Bytes at the end of a file in which the last lines are looked for."""
_CHUNK: Final = 1 << 18
_LINE_MAX: Final = 1 << 20
"""Bytes of a line that is shown whole; a longer one comes in pieces."""
_REPLY_MAX: Final = 1 << 26


def main_logs(argv: Sequence[str]) -> int:
    """Run `aio-elastic logs` with these arguments; return the exit code."""
    return run_command("logs", _logs, argv)


def _logs(argv: Sequence[str]) -> int:
    parser = job_parser("logs", "Print the last lines that the workers of a job have written.")
    parser.add_argument(
        "rank",
        nargs="?",
        metavar="RANK",
        help="global rank of a worker (default: all of this node); it may stand alone",
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
    job, rank = _job_and_rank(arguments)
    status = fresh_status(job)
    ranks = {worker.rank for worker in status.workers}
    if rank is not None and rank not in ranks and ranks:
        raise UsageError(f"RANK: must be one of this node's: {sorted(ranks)} (got {rank})")
    with _Printer(rank, has_prefix=len(ranks) > 1 and rank is None) as printer:
        printer.open_files(_paths(status), arguments.lines)
        if not printer.has_files and not arguments.follow:
            raise JobError("no output of this job is in files (see --tee, --redirects and LogSpec)")
        if printer.has_files and (missing := _streams_without_file(status)):
            note = f"{missing} is in no file and not shown (see --tee and --redirects)"
            print(f"aio-elastic logs: {note}", file=sys.stderr)
        if arguments.follow:
            run_coroutine(lambda: _follow(job, status.seq, printer))
    return 0


def _job_and_rank(arguments: argparse.Namespace) -> tuple[RunningJob, int | None]:
    """Return what is meant; a number alone is a rank, unless it is the pid of a launcher."""
    jobs = find_jobs()
    name, text = arguments.job, arguments.rank
    is_alone = name is not None and text is None and parse_int(name) is not None
    if is_alone and not any(str(job.pid) == name for job in matches(jobs, name)):
        name, text = None, name
    rank = None if text is None else parse_number("RANK", text)
    return choose_from(jobs, name), rank


def _streams_without_file(status: JobStatus) -> str:
    streams = {
        "standard output": [worker.stdout_path for worker in status.workers],
        "standard error": [worker.stderr_path for worker in status.workers],
    }
    return " and ".join(name for name, paths in streams.items() if None in paths)


def _paths(status: JobStatus) -> dict[str, int]:
    """Return the log files of the present workers with their ranks."""
    return {
        path: worker.rank
        for worker in status.workers
        for path in (worker.stdout_path, worker.stderr_path)
        if path is not None
    }


class _LogFile:
    """An open log file, and the line that is not complete yet."""

    def __init__(self, path: str, prefix: bytes) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._prefix = prefix
        self._held = b""

    def skip_to_tail(self, lines: int) -> None:
        """Begin before the last lines."""
        size = os.fstat(self.descriptor).st_size
        start = max(0, size - _TAIL_MAX)
        start = max(start, self._first_data(start, size))
        tail = os.pread(self.descriptor, size - start, start)
        position = len(tail) - tail.endswith(b"\n")
        for _ in range(lines):
            if position < 0:
                break
            position = tail.rfind(b"\n", 0, position)
        else:
            start += position + 1 if lines else len(tail)
        os.lseek(self.descriptor, start, os.SEEK_SET)

    def _first_data(self, start: int, size: int) -> int:
        """Return where a line begins after what `max_bytes` has freed, which reads as zeros."""
        try:
            found = os.lseek(self.descriptor, start, os.SEEK_DATA)
        except OSError:
            return size  # nothing is left
        if found == start:
            return start
        rest = os.pread(self.descriptor, min(size - found, _LINE_MAX), found)
        return found + rest.find(b"\n") + 1

    def read_lines(self) -> bytes | None:
        """Return the next complete lines, each with its prefix; None if there is nothing new."""
        chunk = os.read(self.descriptor, _CHUNK)
        if not chunk:
            return None
        content = self._held + chunk
        cut = content.rfind(b"\n") + 1
        if not cut and len(content) > _LINE_MAX:
            cut = len(content)
        self._held = content[cut:]
        return self._prefixed(content[:cut])

    def rest(self) -> bytes:
        """Return the last line, if it has no end."""
        return self._prefixed(self._held + b"\n") if self._held else b""

    def _prefixed(self, lines: bytes) -> bytes:
        return b"".join(self._prefix + line for line in lines.splitlines(keepends=True))


class _Printer:
    """Prints the lines of log files as they grow."""

    def __init__(self, rank: int | None, *, has_prefix: bool) -> None:
        """Print the files of one rank, or of all; `has_prefix` names the rank of each line."""
        self._rank = rank
        self._has_prefix = has_prefix
        self._files: dict[int, _LogFile] = {}
        self._paths: dict[int, str] = {}
        self._watcher: InotifyWatcher | None = None
        self.broken: asyncio.Future[None] | None = None
        """Fails with the error of standard output."""

    def __enter__(self) -> _Printer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file.descriptor)

    @property
    def has_files(self) -> bool:
        """Whether any file was opened."""
        return bool(self._files)

    def open_files(self, ranks: Mapping[str, int], lines: int | None = None) -> None:
        """Open files by path and rank, and print their last `lines`, or all."""
        for path, rank in ranks.items():
            if path in self._paths.values() or self._rank not in (None, rank):
                continue
            prefix = f"[{rank}]: ".encode() if self._has_prefix else b""
            try:
                file = _LogFile(path, prefix)
            except OSError:
                continue  # removed already
            if lines is not None:
                file.skip_to_tail(lines)
            token = len(self._paths)
            self._files[token], self._paths[token] = file, path
            if self._watcher is not None:
                self._watcher.add(path, token)
            self._print(file)

    def watch(self) -> None:
        """Print the files as they grow, from now on; needs a running loop."""
        self.broken = asyncio.get_running_loop().create_future()
        self._watcher = InotifyWatcher(self._on_events)
        for token, path in self._paths.items():
            self._watcher.add(path, token)
            self._print(self._files[token])  # what was written before

    def finish(self) -> None:
        """Print the rest of all files."""
        if self._watcher is not None:
            self._watcher.close()
        for file in self._files.values():
            self._print(file)
            _write(file.rest())

    def _on_events(self, events: Mapping[int, int]) -> None:
        try:
            for token in events:
                self._print(self._files[token])
        except OSError as error:  # the reader of the pipe has exited
            if self._watcher is not None:
                self._watcher.close()
            if self.broken is not None and not self.broken.done():
                self.broken.set_exception(error)

    def _print(self, file: _LogFile) -> None:
        while (lines := file.read_lines()) is not None:
            _write(lines)


def _write(text: bytes) -> None:
    if text:
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


async def _follow(job: RunningJob, after: int, printer: _Printer) -> None:
    """Print what is written until the end of the job."""
    reader, writer = await asyncio.open_unix_connection(job.path, limit=_REPLY_MAX)
    writer.write(encode(GetEvents(after=after, follow=True)))
    printer.watch()
    assert printer.broken is not None, "it is made by `watch`"
    opening = create_task(_open_new_files(reader, printer), name="follow the attempts")
    try:
        await asyncio.wait([opening, printer.broken], return_when=asyncio.FIRST_COMPLETED)
        if printer.broken.done():
            printer.broken.result()
        opening.result()
        printer.finish()
    finally:
        await cancel_and_wait([opening])
        writer.close()


async def _open_new_files(reader: asyncio.StreamReader, printer: _Printer) -> None:
    async for line in reader:
        reply = decode_reply(line)
        if not isinstance(reply, EventReply):
            return
        event = event_from_json(bytes(reply.event))
        if isinstance(event, WorkerStarted):
            found = event.stdout_path, event.stderr_path
            printer.open_files({path: event.rank for path in found if path is not None})
