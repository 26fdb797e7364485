"""The record of a run: what remains of a job when its launcher is gone.

::

    run.json      how the job was started, what it did last, and how it ended: a `JobRecord`
    events.jsonl  its events, the latest megabyte
    report.txt    the failure report, if its workers have failed

The user's state directory has a directory with `run.json` for each of the last runs.  The other two
are there too, or with another `run.json` in the run's own directory below `--log-dir`.

All functions block, but no reader waits for a writer.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from elastic_aio.errors import SpecError
from elastic_aio.event_json import TIME_MAX, event_from_json, event_to_json, read_events
from elastic_aio.events import Event, EventsMissed
from elastic_aio.logs.files import RunDirectory
from elastic_aio.logs.log_file import open_log
from elastic_aio.spec.logs import LogSpec
from elastic_aio.status import JobStatus
from elastic_aio.text import error_reason, redacted, shown_bytes
from elastic_aio.value import from_json, to_json
from elastic_aio.worker.errorfile import replace_file

RUN_FILE: Final = "run.json"
EVENTS_FILE: Final = "events.jsonl"
REPORT_FILE: Final = "report.txt"

SCHEMA: Final = 1
"""Version of `run.json`; incremented when a field changes its meaning."""
RUNS_KEPT: Final = 50
"""Runs in the state directory that have ended."""
EVENTS_MAX: Final = 1 << 20
"""Bytes of `events.jsonl`; a longer file loses its oldest events."""

_READ_MAX: Final = 64 << 20
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class JobRecord(JobStatus, frozen=True, kw_only=True):
    """The last status of a job on one node, and how it was started and ended: `run.json`."""

    schema: int = SCHEMA
    version: str = ""
    """Version of this package."""
    command: tuple[str, ...] = ()
    """The launcher's `PET_*` variables and its command line, without what looks like a secret."""
    cwd: str = ""
    """The launcher's working directory."""
    written_at: float = 0.0
    """Unix seconds at which this was written."""
    ended_at: float | None = None
    """Unix seconds; None if the job had not ended."""
    exit_code: int | None = None
    """The launcher's exit code; None if the job had not ended."""
    failures: tuple[str, ...] = ()
    """Root causes of the latest attempts that failed, 20 at most."""
    state_dir: str | None = None
    """The directory of this run in the user's state directory, if it has one."""
    directory: str = ""
    """The directory of this file."""
    is_lost: bool = False
    """Whether nothing will end the run, since its launcher was killed; the reader knows."""

    @property
    def until(self) -> float:
        """Unix seconds up to which the run is recorded."""
        return self.written_at if self.ended_at is None else self.ended_at

    def encode(self) -> bytes:
        return to_json(self) + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> JobRecord:
        """Read what `encode` has returned, or raise a ValueError; unknown fields are left out."""
        try:
            record = from_json(content, cls)
        except ValueError as error:
            raise ValueError(f"is no record of a run: {error}") from None
        if record.schema > SCHEMA:
            raise ValueError(f"is of schema {record.schema}, newer than this reader ({SCHEMA})")
        if not all(abs(time) < TIME_MAX for time in (record.until, record.started_at or 0.0)):
            raise ValueError("is no record of a run: a time is too large")
        logs = (
            path for worker in record.workers for path in (worker.stdout_path, worker.stderr_path)
        )
        if any("\0" in path for path in (record.log_dir, record.state_dir, *logs) if path):
            raise ValueError("is no record of a run: a path has a null byte")
        return record

    def events(self) -> list[Event]:
        """Return the events, none if they are gone; raise a ValueError if they are not valid."""
        return read_events(self._read(EVENTS_FILE).splitlines(keepends=True))

    def report(self) -> str:
        """Return the failure report; empty without one."""
        return self._read(REPORT_FILE).decode("utf-8", "replace")

    def _read(self, name: str) -> bytes:
        for directory in filter(None, (self.directory, self.log_dir)):
            with suppress(OSError):
                return _read_regular(f"{directory}/{name}")
        return b""


_SECRET: Final = (
    r"(?:[\w.-]*[-_.])?(?:token|passw(?:or)?d|pwd|secret|credentials?"
    r"|(?:api|access|secret|private)[-_]?key)"
)

# An option or a variable of its own to its end, a password has commas too; else a part of the word.
_SHOWN_BEFORE: Final = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        rf"\A({_SECRET}=).+()",
        rf"(?<![\w.-])({_SECRET}=)[^,;&\s]+()",
        rf"(?<![\w.-])({_SECRET}[\"']?\s*:\s*[\"']?)[^,;&\s\"']+()",
        r"(\bauthorization\s*:\s*(?:\w+\s+)?)[^\s\"']+()",
    )
)


def without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Return words with `***` for values of such names, also in JSON and headers, and in URLs."""
    shown: list[str] = []
    is_secret = False
    for word in words:
        if is_secret and not word.startswith("-"):
            word = "***"
        is_secret = re.fullmatch(f"-{_SECRET}", word, re.IGNORECASE) is not None
        for pattern in _SHOWN_BEFORE:
            word = pattern.sub(r"\1***\2", word)
        shown.append(redacted(word))
    return tuple(shown)


def runs_directory() -> str | None:
    """Return where the runs of this user are recorded; None without a home directory."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # which its specification wants ignored
        home = os.environ.get("HOME", "")
        if not (os.path.isabs(home) and os.path.isdir(home)):  # as /nonexistent of a service
            return None
        base = f"{home}/.local/state"
    return f"{base}/elastic_aio/runs"


def recorded_runs(parent: str | None = None) -> list[JobRecord]:
    """Return the runs below a directory, by default those of this user, the latest first.

    Directories without a valid `run.json` are left out.
    """
    parent = runs_directory() if parent is None else parent
    runs = []
    with suppress(OSError):
        for name in os.listdir(parent) if parent is not None else ():
            with suppress(OSError, ValueError):
                runs.append(run_in(f"{parent}/{name}"))
    return sorted(runs, key=lambda run: run.started_at or 0.0, reverse=True)


def run_in(directory: str) -> JobRecord:
    """Return the run that was recorded in a directory, with the logs that are there now.

    OSError: there is none.  ValueError: it is not valid; the message names no file.
    """
    record = JobRecord.decode(_read_regular(f"{directory}/{RUN_FILE}"))
    lock = record.state_dir or directory
    is_used = RunDirectory(lock).is_in_use()
    if is_used is None and record.node == socket.gethostname():  # a disk without locks
        is_used = os.path.exists(f"/proc/{record.agent_pid}")
    is_lost = record.ended_at is None and is_used is False
    return replace(_moved(record, directory), directory=directory, is_lost=is_lost)


def _moved(record: JobRecord, directory: str) -> JobRecord:
    """Return a record whose logs are those beside it, if its own directory now has another name."""
    old = record.log_dir
    if not old or old != record.directory or old == directory:
        return record  # it is in the state directory, or where it was

    def moved(path: str | None) -> str | None:
        if path is None or not path.startswith(f"{old}/"):
            return path
        beside = directory + path.removeprefix(old)
        return path if os.path.lexists(path) and not os.path.lexists(beside) else beside

    workers = [
        replace(one, stdout_path=moved(one.stdout_path), stderr_path=moved(one.stderr_path))
        for one in record.workers
    ]
    return replace(record, log_dir=directory, workers=tuple(workers))


def _read_regular(path: str) -> bytes:
    """Return the content of a file of a bounded size, or raise an OSError."""
    with open(open_log(path), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _READ_MAX:
            raise OSError(errno.EINVAL, "no file of a usual size", path)
        return file.read(_READ_MAX)


class RecordFiles:
    """The files of the record of one run, while the run goes on."""

    def __init__(self, log_dir: str | None) -> None:
        """Prepare; nothing is made before the first `write`.  `log_dir` is the run's own."""
        self.problem = ""
        """Why the record in the run's own directory is not complete, or is not locked."""
        self._log_dir = log_dir
        self._entry: RunDirectory | None = None

    def __repr__(self) -> str:
        return f"<RecordFiles in {self._log_dir} and {self._entry!r}>"

    def write(self, record: JobRecord, added: Sequence[Event], report: str = "") -> None:
        """Add events, and replace the rest; `close` if the run has ended.

        No OSError is raised, see `problem`.
        """
        if self._entry is None:
            self._entry = _make_entry(record)
            if self._entry.unlocked is not None:
                self.problem = f"{error_reason(self._entry.unlocked)}: {self._entry.path}"
        record = replace(record, state_dir=self._entry.path)
        all_of_it = record, b"".join(event_to_json(event) + b"\n" for event in added), report
        try:
            _write_into(self._log_dir, *all_of_it)
        except OSError as error:
            self.problem = f"{error_reason(error)}: {self._log_dir}"
        with suppress(OSError):
            _write_into(self._entry.path, *(all_of_it if self._log_dir is None else (record,)))
        if record.ended_at is not None:
            self.close()

    def close(self) -> None:
        """Note that the run has ended, and remove the records of old runs.  Idempotent."""
        if self._entry is not None:
            with suppress(OSError):
                self._entry.remove_old_runs(RUNS_KEPT)
            self._entry.close()


def _make_entry(record: JobRecord) -> RunDirectory:
    """Make the directory of a run in the state directory, which is for this user alone."""
    found = path = runs_directory()
    # No home, or a full or read-only one: a job needs no record.
    with suppress(OSError, SpecError):
        while found is not None and not os.path.lexists(found):
            found = os.path.dirname(found)
        # sudo may have kept HOME: its owner could not use what root makes there.
        if path is not None and os.stat(str(found)).st_uid in (os.geteuid(), 0):
            parent = os.path.dirname(path)
            for directory in (os.path.dirname(parent), parent, path):
                os.makedirs(directory, 0o700, exist_ok=True)
            spec = LogSpec(log_dir=path, keep_runs=RUNS_KEPT)
            return RunDirectory.make(spec, record.run_id, record.node)
    return RunDirectory(None)


def _write_into(
    directory: str | None, record: JobRecord, lines: bytes = b"", report: str = ""
) -> None:
    """Write what there is, the record last and in any case, or raise an OSError."""
    if directory is None:
        return
    try:
        if lines:
            _append(f"{directory}/{EVENTS_FILE}", lines)
        if report:
            replace_file(f"{directory}/{REPORT_FILE}", shown_bytes(report))
    finally:
        content = replace(record, directory=directory).encode()
        room = 0 if record.ended_at is not None else 2048 + 512 * len(record.workers)
        _replace(f"{directory}/{RUN_FILE}", content.ljust(len(content) + room))


def _replace(path: str, content: bytes) -> None:
    """Write a file in one step; on a full disk in place of the former, which has room for it."""
    try:
        replace_file(path, content)
    except OSError as error:
        if error.errno not in _FULL or os.stat(path).st_size < len(content):
            raise
        with open(path, "r+b") as file:
            file.write(content.ljust(os.fstat(file.fileno()).st_size))


def _append(path: str, lines: bytes) -> None:
    """Append whole lines to a file, or raise an OSError; shorten a file that is too long."""
    with open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        except OSError:
            file.truncate(size)
            raise
    if size + len(lines) > EVENTS_MAX:
        replace_file(path, _shortened(_read_regular(path)) or lines)


def _shortened(content: bytes) -> bytes:
    """Return the first line of events and the latest; nothing if they are not valid."""
    # At least the last line.
    start = min(len(content) - EVENTS_MAX // 2, content.rfind(b"\n", 0, -1))
    start = content.find(b"\n", start) + 1
    lines = content.partition(b"\n")[0], content[start:].partition(b"\n")[0]
    try:
        first, kept = map(event_from_json, lines)
    except ValueError:
        return b""
    count, why = kept.seq - first.seq - 1, "the record keeps the latest"
    missed = EventsMissed(time=kept.time, node=kept.node, count=count, why=why)
    return b"\n".join((lines[0], event_to_json(missed), content[start:]))
