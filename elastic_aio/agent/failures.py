"""Why workers failed, and which of them first: error files, stderr, OOM kills, full disks.

The order of evidence among the workers of an attempt, the culprit first::

    evidence                                                          the worker
    ----------------------------------------------------------------  ------------------------
    it exited, or hung, before the stop                               has failed
    it had recorded an error before the stop, as the interpreter of   has failed
    a script does when nothing catches an exception
    it was dumping its core when the first exit, which may be an      has failed
    effect of another's end (see `reasons`), was noticed
    of another program: its stderr ended with an exception, in the    has failed, if the first
    last seconds before such a first exit                             exit was not earlier
    torch says that it has lost a peer                                follows all these
    the stop has ended it, whatever it did then                       is a victim

Those that have failed are ordered by the clock of this host: the exit, or the recorded error.  Of
two, one goes before the other that has written its last words earlier, by the times at which they
were read, or those of the files; within `_SAME_S`, one whose exception is no effect.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio import reasons
from elastic_aio.aio import run_in_thread
from elastic_aio.logs.log_file import read_end
from elastic_aio.logs.paths import StreamPlan, WorkerLogs
from elastic_aio.outcome import ExitStatus, Failure, WorkerError, WorkerResult, root_cause_first
from elastic_aio.process import proc
from elastic_aio.process.children import ChildExit
from elastic_aio.ranks import WorkerRanks
from elastic_aio.text import counted, format_duration, one_line
from elastic_aio.worker.errorfile import ERROR_FILE_MAX, NEAR_S, is_of_program, parse_error_file

if TYPE_CHECKING:
    from elastic_aio.process.calls import CallResult
    from elastic_aio.watch.deadlines import WorkerReport  # most jobs have no reports

_TAIL_BYTES = 64 * 1024
# Bytes of a file in which the beginnings of long lines are looked for.
_LONG_BYTES = 4 << 20
# Lines of a failure in events and messages to other nodes, and their characters.
_TAIL_LINES = 20
_LINES_MAX = 16 * 1024
# Workers of an attempt whose last lines are kept in full.
_TAILS_MAX = 16
# Characters by which the exception of an error file is found in that of a stderr.
_SAME = 200
# Seconds in which two workers have failed at the same time: a connection that the first one closes
# may end the other before its own words are read, or its exit is noticed.
_SAME_S = 0.1
_EARLIER_S = 1e-6
_BUS, _KILLED = 128 + 7, 128 + 9
_DUMPING = {3, 4, 5, 6, 7, 8, 11, 24, 25, 31}  # signals that may leave a core file (signal(7))
# The exit of an interpreter with an exception; a `SystemExit` is recorded as no error.
_RECORDED = ExitStatus(code=1)


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerRecord(Struct):
    """One worker of an attempt; the fields after `started_at` are set later."""

    ranks: WorkerRanks
    pid: int
    logs: WorkerLogs
    started_at: float = 0.0  # monotonic seconds; the other times are Unix seconds
    exit: ChildExit | None = None
    exited_at: float = 0.0
    order: int = 0  # position of its exit among all exits of the job
    stop_signals: frozenset[int] = frozenset()  # that a stop sent to it before it exited
    expired_timer: str = ""  # which timer it did not release in time, before it exited
    stderr_tail: str = ""
    unkept: bytes = b""  # the end of what the file of its stderr has not taken, of a full disk
    report: WorkerReport | None = None  # what it has reported about itself
    hang: str = ""  # which deadline it has missed, so that the attempt fails
    hung_at: float = 0.0
    is_lost_peer: bool = False  # as far as it is known at its exit
    may_be_effect: bool = False  # likewise: another's end may have ended it
    notes_failure: bool = False  # its interpreter notes an exception in the error file at once
    had_error: bool = False  # an error file, when the stop began
    is_dumping: bool = False  # its core, when the stop began
    written: tuple[int, float] = (0, 0.0)  # then, or at its exit: bytes of its stderr, and when
    notes: tuple[str, ...] = ()  # of its failure

    @property
    def is_running(self) -> bool:
        return self.exit is None

    @property
    def is_victim(self) -> bool:
        """Whether a stop signalled it before it exited."""
        return bool(self.stop_signals)

    @property
    def status(self) -> ExitStatus:
        return ExitStatus() if self.exit is None else self.exit.status

    @property
    def duration(self) -> float:
        """Seconds from start to exit; 0 while it runs."""
        return 0.0 if self.exit is None else self.exit.at - self.started_at

    @property
    def was_ended_by_stop(self) -> bool:
        """Whether a signal of the stop ended it, or made it exit with 128 + the signal."""
        code = self.status.shell_code - 128
        return code in self.stop_signals

    def end_began(self, stopped_at: float) -> float:
        """Return when it began to end: it hung, was stopped, or exited by itself."""
        if self.hang:
            return self.hung_at
        return min(self.exited_at, stopped_at) if self.is_victim else self.exited_at

    def result(self, status: ExitStatus, call: CallResult | None) -> WorkerResult:
        """Return the public result; `status` is how it failed, or its own."""
        return WorkerResult(
            rank=self.ranks.rank,
            local_rank=self.ranks.local_rank,
            pid=self.pid,
            status=status,
            duration=self.duration,
            usage=None if self.exit is None else self.exit.usage,
            stdout_path=self.logs.stdout.path,
            stderr_path=self.logs.stderr.path,
            stderr_tail=self.stderr_tail,
            return_value=None if call is None else call.value,
        )


async def collect_failures(
    workers: Collection[WorkerRecord],
    results: Mapping[int, CallResult],
    *,
    host: str,
    stopped_at: float,
    oom_before: OomCounts,
    store_refusals: Sequence[str] = (),
    cwd: str = "",
) -> tuple[Failure, ...]:
    """Return the failures among workers that have exited, the root cause first (see the table).

    An error that a worker recorded before the stop is its own, and its status is that of the error:
    the signal of the stop says nothing about why it failed.  A worker whose function's value did
    not arrive has failed, whatever its exit code.  A file that cannot be read is left out; an error
    that is no reason for the end (see `_is_reason`) is a note.

    `results` has, by local rank, how functions ended.  The stop of the group began at `stopped_at`,
    in Unix seconds; `oom_before` was read when the attempt began.  The workers ran in `cwd`.
    """
    found: list[tuple[WorkerRecord, Failure, float]] = []
    first = min(filter(has_failed, workers), key=lambda one: one.order, default=None)
    # The counters explain nothing else.
    may_be_oom = any(worker.status.shell_code == _KILLED for worker in workers)
    oom_kills = oom_before.kills_until(OomCounts.read(oom_before.cgroup)) if may_be_oom else ""
    notes = tuple(f"the store of the workers dropped a client: it {why}" for why in store_refusals)
    for worker in workers:
        of_call, problem = _end_of(results.get(worker.ranks.local_rank))
        is_failure = worker.exit is not None and not worker.exit.status.is_success
        if not (is_failure or worker.hang or (worker.exit is not None and problem)):
            continue
        error, noted = await _error_of(worker, of_call, stopped_at)
        is_own = error is not None and _is_own(worker, error, stopped_at)
        if worker.hang and not is_own:
            error = None  # of its stop
        is_first = error is None and first is not None and _has_failed_before(worker, first)
        is_victim = worker.is_victim and not (is_own or worker.hang or is_first)
        lines = [] if is_victim else await _read_end(worker, cwd)
        failure = Failure(
            rank=worker.ranks.rank,
            local_rank=worker.ranks.local_rank,
            pid=worker.pid,
            host=host,
            status=_status_of(worker, has_error=is_own or is_first or bool(worker.hang)),
            time=_time_of(worker, error, stopped_at, first),
            order=worker.order,
            is_victim=is_victim,
            error=error if error and (error.message or error.traceback) else None,
            message=worker.hang or worker.expired_timer or problem,
            stderr_path=_existing(worker.logs.stderr.path),
            stderr_tail=_last_lines(lines),
            notes=noted if is_victim else (*noted, *_notes(worker, error, workers), *notes),
        )
        if not is_victim:
            is_uncaught = error is not None and failure.error is None
            failure = _with_reason(failure, lines, oom_kills, is_uncaught=is_uncaught)
        is_read = worker.written[0] and (error is None or not _is_exact(error))
        found.append((worker, failure, worker.written[1] if is_read else failure.time))
    return _in_order(found)


def _in_order(found: Sequence[tuple[WorkerRecord, Failure, float]]) -> tuple[Failure, ...]:
    """Return failures with their first signs, the root cause first.

    Only the first ones keep the end of their stderr.
    """
    own = [each for each in found if not each[1].is_victim]
    times = {failure.order: sign for _, failure, sign in own}
    ordered = _first_sign_first(root_cause_first(each[1] for each in found), times)
    late = {failure.order for failure in ordered[_TAILS_MAX:]}
    for worker, failure, _ in own:
        if failure.order in late:
            worker.stderr_tail = ""
    return ordered


def _is_own(worker: WorkerRecord, error: WorkerError, stopped_at: float) -> bool:
    """Whether a worker has recorded an error by itself, and not because of the stop."""
    # Without a message, what was printed by the stop says why.
    is_before = bool(error.message) and _is_exact(error) and error.timestamp <= stopped_at
    return not worker.is_victim or worker.had_error or is_before


def _is_exact(error: WorkerError) -> bool:
    """Whether the time of an error is exact: torch's has whole seconds."""
    return error.pid is not None or not error.path


def note_state(worker: WorkerRecord, taken_at: float = 0.0, *, is_brief: bool = False) -> None:
    """Note what a worker has written by now.

    A captured stderr was last read at `taken_at`; another has the time of its file.  With
    `is_brief`, note of a worker that has recorded no error nothing else.
    """
    worker.had_error = os.access(worker.logs.error_file, os.F_OK)
    if is_brief and not worker.had_error:
        return
    dumping = proc.read_status(worker.pid, b"CoreDumping") if worker.is_running else {}
    worker.is_dumping = dumping.get(b"CoreDumping") == b"1"
    if worker.logs.stderr.path is None:
        return
    with suppress(OSError):
        status = os.stat(worker.logs.stderr.path)
        worker.written = status.st_size, taken_at or status.st_mtime


def has_failed(worker: WorkerRecord) -> bool:
    """Return whether a worker has failed by its exit, which no stop has caused."""
    return worker.exit is not None and not (worker.is_victim or worker.status.is_success)


def _has_failed_before(worker: WorkerRecord, first: WorkerRecord) -> bool:
    """Whether a victim had failed before the first exit, but was slow to end.  Blocks."""
    size, at = worker.written
    if worker.is_dumping:
        return first.may_be_effect and worker.is_victim
    if worker.notes_failure or not (first.may_be_effect and worker.is_victim):
        return False
    if not (size and first.written[0] and first.written[1] - at <= NEAR_S):
        return False  # long ago: it goes on
    found = reasons.last_words(_read_tail(worker.logs.stderr.path, b"", size)[1], code=None)
    other = _explain_now(first)[0]
    return bool(found) and _precedes(found, other, at - first.written[1])


def _precedes(reason: str, other: str, since: float) -> bool:
    """Whether a worker failed before another; `since` is the time of its file less the other's."""
    rank = reasons.is_effect(reason) - reasons.is_effect(other)
    return since < -_SAME_S or (abs(since) <= _SAME_S and (rank, since) < (0, 0.0))


def _time_of(
    worker: WorkerRecord,
    error: WorkerError | None,
    stopped_at: float,
    first: WorkerRecord | None,
) -> float:
    """Return when a worker failed, in Unix seconds of this host; `first` is the first exit."""
    if error is None:
        return stopped_at if worker.is_dumping else worker.hung_at or worker.exited_at
    if _is_exact(error):
        return error.timestamp
    began = worker.end_began(stopped_at)
    # Of an error that was there at the stop, which follows the first exit at once.
    is_before = first is not None and worker.is_victim and worker.had_error
    return min(began, first.exited_at - _EARLIER_S) if first and is_before else began


def _first_sign_first(
    failures: tuple[Failure, ...], signs: Mapping[int, float]
) -> tuple[Failure, ...]:
    """Put the failure in front whose file was written first, or that is no effect of another."""
    root = failures[0] if failures else None
    for one in failures[1:]:
        known = root is not None and one.order in signs and root.order in signs
        if root is None or not known or one.distance != root.distance:
            continue
        if _precedes(one.reason, root.reason, signs[one.order] - signs[root.order]):
            root = one
    if root is None or root is failures[0]:
        return failures
    root = replace(root, time=min(one.time for one in failures) - _EARLIER_S)
    return root, *(one for one in failures if one.order != root.order)


def _end_of(call: CallResult | None) -> tuple[WorkerError | None, str]:
    return (None, "") if call is None else (call.error, call.problem)


def _status_of(worker: WorkerRecord, *, has_error: bool) -> ExitStatus:
    """Return how a worker failed: the end by a stop does not say why it was stopped."""
    was_stopped = worker.was_ended_by_stop or worker.status.is_success
    return _RECORDED if has_error and was_stopped else worker.status


def _last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    room = _LINES_MAX
    for line in reversed(lines[-_TAIL_LINES:]):
        if kept and len(line) > room:
            break
        kept.append(line[-room:])
        room -= len(line)
    return tuple(reversed(kept))


def _with_reason(
    failure: Failure, stderr: Sequence[str], oom_kills: str, *, is_uncaught: bool
) -> Failure:
    message = failure.error.message if failure.error else failure.message
    stack = (failure.error.traceback or "").splitlines() if failure.error else []
    stderr = reasons.before_dump(stderr)
    reason, cause = _explain(failure.status, message, stderr, oom_kills, stack, is_uncaught)
    return replace(failure, reason=reason, cause=cause)


def _explain(
    status: ExitStatus,
    message: str,
    stderr: Sequence[str],
    oom_kills: str = "",
    stack: Sequence[str] = (),
    is_uncaught: bool = False,
) -> tuple[str, str]:
    """Return why a worker failed in one line, and the name of a known cause."""
    code, signal = status.code, status.signal
    reason, output = reasons.read_reason(
        message, stderr, code=code, signal=signal, is_uncaught=is_uncaught
    )
    cause, is_proven = reasons.known_cause(
        reason,
        [*output, *reasons.chained(stack)],
        code=status.code,
        signal=status.signal,
        oom_kills=oom_kills,
        is_shm_full=status.shell_code == _BUS and is_full("/dev/shm"),  # not written to
    )
    return cause if is_proven else reason or cause, cause


def reason_now(worker: WorkerRecord) -> str:
    """Return why a worker that has just exited has failed, as far as its files say so by now."""
    if worker.exit is None or worker.exit.status.is_success:
        return ""
    if not worker.is_victim:
        return _explain_now(worker)[0]
    # What it wrote before the stop says nothing about the stop.
    if worker.was_ended_by_stop:
        return ""
    content = _end_of_file(worker.logs.stderr.path, _TAIL_BYTES, start=worker.written[0])
    return reasons.error_of(reasons.plain_lines(_end_of_text(content, worker.unkept)))


def note_effect(worker: WorkerRecord) -> None:
    """Note of a worker that has just exited whether it may have failed by the end of another."""
    # Its siblings wait for the answer: little is read unless the end of its output has a sign.
    status = worker.status
    if status.is_success or worker.is_victim:
        return
    if not reasons.may_be_lost_peer(status.code, status.signal):
        return
    ends = _end_of_file(worker.logs.stderr.path, _TAIL_BYTES) + worker.unkept
    error = _end_of_file(worker.logs.error_file, ERROR_FILE_MAX)
    worker.may_be_effect = reasons.has_sign_of_effect(ends + error)
    if reasons.has_sign_of_lost_peer(ends) or reasons.has_sign_of_lost_peer(error):
        worker.is_lost_peer = _explain_now(worker)[1] == reasons.LOST_PEER
        worker.may_be_effect |= worker.is_lost_peer


def _explain_now(worker: WorkerRecord) -> tuple[str, str]:
    error = _read_error(worker.logs.error_file)
    _, lines = _read_tail(worker.logs.stderr.path, worker.unkept)
    is_reason = error is not None and _is_reason(worker, error, worker.exited_at)
    message = error.message if error and is_reason else worker.expired_timer
    is_uncaught = error is not None and is_reason and not error.message
    stderr = reasons.before_dump(_own_lines(worker, lines))
    return _explain(worker.status, message, stderr, is_uncaught=is_uncaught)


def _end_of_file(path: str | None, size: int, *, start: int = 0, end: int | None = None) -> bytes:
    """Return the last bytes of a file; b"" without a file, or if it cannot be read."""
    if path is None:
        return b""
    try:
        return read_end(path, size, start=start, end=end)
    except OSError:
        return b""


def _existing(path: str | None) -> str | None:
    """Return a path, unless there is no such file: a captured stream may never get one."""
    return path if path is not None and os.path.exists(path) else None


def _size_of(path: str | None) -> int:
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def _read_tail(path: str | None, unkept: bytes, end: int | None = None) -> tuple[str, list[str]]:
    """Return the end of a stream, and its lines, progress bars reduced to their last state.

    Of a long line, the beginning is returned, which has the name of an exception.  `unkept` is the
    end of what the file has not taken.  What follows the byte `end` is left out.  Blocks.
    """
    text = _end_of_text(_end_of_file(path, _TAIL_BYTES, end=end), unkept)
    if text.count("\n") > _TAIL_LINES:
        return text, reasons.plain_lines(text)
    longer = map(_shorten, _end_of_file(path, _LONG_BYTES, end=end).split(b"\n"))
    return text, reasons.plain_lines(_end_of_text(b"\n".join(longer), unkept))


async def _read_end(worker: WorkerRecord, cwd: str) -> list[str]:
    """Return what a worker has written at its end, and note its core file."""
    worker.stderr_tail, lines = await _run(worker, _read_own_tail, worker)
    if worker.status.signal in _DUMPING:
        from elastic_aio.agent.core_file import core_note  # few workers crash

        if note := await run_in_thread(core_note, worker.pid, cwd, daemon=True):
            worker.notes += (note,)
    return lines


def _read_own_tail(worker: WorkerRecord) -> tuple[str, list[str]]:
    # What a worker has written after the stop began is of the stop.
    end = worker.written[0] if worker.is_victim and not worker.hang else 0
    text, lines = _read_tail(worker.logs.stderr.path, b"" if end else worker.unkept, end or None)
    return text, _own_lines(worker, lines)


def _own_lines(worker: WorkerRecord, lines: list[str]) -> list[str]:
    """Return what a worker has written after an error that says nothing of its signal.  Blocks."""
    # Another process with the same stderr has recorded that error in the error file.
    error = _read_error(worker.logs.error_file)
    if worker.status.signal is None or error is None or error.pid in (None, worker.pid):
        return lines
    said = error.message.rstrip().rpartition("\n")[2]
    ends = [number for number, line in enumerate(lines, 1) if said and line.endswith(said)]
    return lines[ends[-1] :] if ends else lines


def _shorten(line: bytes) -> bytes:
    if len(line) <= _LINES_MAX:
        return line
    return line.rstrip(b"\r").rpartition(b"\r")[2][:_LINES_MAX]


async def _error_of(
    worker: WorkerRecord, of_call: WorkerError | None, stopped_at: float
) -> tuple[WorkerError | None, tuple[str, ...]]:
    """Return the error that is the reason for a worker's end, and a note of another error."""
    path = worker.logs.error_file
    if not os.access(path, os.F_OK):
        return of_call, ()
    # The file has precedence: the worker's own code may say more in it.
    error = await _run(worker, _read_error, path)
    ended_at = worker.end_began(stopped_at)
    own = of_call.message if of_call else ""
    if error is None or await _run(worker, _is_reason, worker, error, ended_at, own):
        return error or of_call, ()
    age = ended_at - error.timestamp
    when = f"{abs(age):.3g} s {'before' if age > 0 else 'after'} the end"
    who = "" if error.pid is None else f", by process {error.pid}"
    return of_call, (f"an error was recorded {when}{who}: {reasons.reason_of(error.message)}",)


async def _run(worker: WorkerRecord, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function that reads the files of a worker: in a thread, unless they are small."""
    # The content of small files is in memory: it was read at the exit.
    if sum(map(_size_of, (worker.logs.stderr.path, worker.logs.error_file))) > _TAIL_BYTES:
        return await run_in_thread(function, *args, daemon=True)
    await asyncio.sleep(0)  # yield to other tasks: many workers may have failed
    return function(*args)


def _is_reason(worker: WorkerRecord, error: WorkerError, ended_at: float, own: str = "") -> bool:
    """Return whether an error in the file of a worker says why the worker ended.

    Each process below the worker inherits the name of the file, and may fail although the worker
    handles that.  So it depends on the process that has recorded the error:

    * The worker itself: the error counts.
    * An unknown process (torch's): the error counts if the worker ended, exited or by a signal, at
      that time, or if its stderr ends with that exception.
    * Another process, such as the program of a wrapper: the error counts if the worker exited at
      that time and its stderr says nothing else.  A process in another pid namespace, which does
      not know its number here, is another one too.

    `ended_at` is when the worker began to end, in Unix seconds.  `own` is what the function of the
    worker raised; else its stderr is read, which blocks.
    """
    if error.pid == worker.pid:
        return True
    late = 0 if error.timestamp else math.inf  # the file does not say when it was written
    is_near = -late <= ended_at - error.timestamp <= NEAR_S + late
    if error.pid is None and is_near:
        return True
    _, lines = _read_tail(worker.logs.stderr.path, worker.unkept, worker.written[0] or None)
    said = one_line(own or reasons.last_words(lines, code=worker.status.code))
    is_said = bool(said) and reasons.reason_of(error.message)[:_SAME] in said
    if error.pid is None:
        return is_said
    if not is_near or worker.is_victim or worker.status.signal is not None:
        return False
    return not said or is_of_program(said) or is_said


def _read_error(path: str) -> WorkerError | None:
    try:
        size = os.stat(path).st_size
        if size > ERROR_FILE_MAX:
            return WorkerError(
                f"its error file is too large ({size} bytes): {path}", None, 0.0, path
            )
        content = read_end(path, ERROR_FILE_MAX)
    except OSError:
        return None
    return parse_error_file(content, path)


def _end_of_text(content: bytes, unkept: bytes) -> str:
    """Return the end of what a file has and has not taken, from the beginning of a line."""
    whole = content + unkept
    text = whole[-_TAIL_BYTES:].decode("utf-8", "replace")
    if len(whole) > _TAIL_BYTES:
        text = text.partition("\n")[2] or text  # the first line is most likely cut
    return text


def _notes(
    worker: WorkerRecord, error: WorkerError | None, workers: Iterable[WorkerRecord]
) -> tuple[str, ...]:
    # An error that the worker recorded hides the message.
    timer = (worker.expired_timer,) if error is not None and worker.expired_timer else ()
    early = _early_successes(worker, workers)
    return (*timer, *worker.notes, *_full_disks(worker.logs), *early)


def _early_successes(worker: WorkerRecord, workers: Iterable[WorkerRecord]) -> tuple[str, ...]:
    until = worker.hung_at or worker.exited_at
    early = [one for one in workers if one.status.is_success and one.exited_at < until]
    if not early:
        return ()
    first = min(early, key=lambda one: one.exited_at)
    before = format_duration(until - first.exited_at)
    who = f"rank {first.ranks.rank} exited with 0, {before} before"
    more = f"; so did {counted(len(early) - 1, 'other')} later" if early[1:] else ""
    return (who + more,)


def _full_disks(logs: WorkerLogs) -> tuple[str, ...]:
    return tuple(
        _full_disk_note(stream, stream.path)
        for stream in (logs.stdout, logs.stderr)
        if stream.path is not None and not stream.is_captured and is_full(stream.path)
    )


def _full_disk_note(stream: StreamPlan, path: str) -> str:
    note = f"the disk of its log file is full: {mount_point(path)} ({path})"
    if stream.is_relayed:
        return note
    size = counted(os.stat(path).st_size, "byte")
    return f"{note}; the file ends after {size}, what followed is lost"


def is_full(path: str) -> bool:
    """Return whether the disk of a file or directory has no space left."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail == 0 or bool(disk.f_files and disk.f_favail == 0)


def mount_point(path: str) -> str:
    """Return the directory at which the file system of `path` is mounted."""
    directory = os.path.realpath(path)
    while not os.path.ismount(directory):
        directory = os.path.dirname(directory)
    return directory


# ------------------------------------------------------------------- the OOM killer


class OomCounts(Struct, frozen=True):
    """The kernel's counters at one time; None where the host has none."""

    group: int | None = None  # this control group and those below it
    host: int | None = None
    cgroup: str = ""  # directory of the workers' own one; empty without one
    workers: int | None = None  # in that

    @classmethod
    def read(cls, cgroup: str = "") -> OomCounts:
        workers = _count(os.path.join(cgroup, "memory.events")) if cgroup else None
        return cls(_group_count(), _count("/proc/vmstat"), cgroup, workers)

    def kills_until(self, later: OomCounts) -> str:
        """Return what was killed between this time and a later one; empty if nothing was."""
        if later.workers is not None and later.workers > (self.workers or 0):
            return "killed by the memory limit of its cgroup"
        for what, before, after in (
            ("this control group", self.group, later.group),
            ("this host", self.host, later.host),
        ):
            if before is not None and after is not None and after > before:
                processes = counted(after - before, "process", "processes")
                return f"the kernel has killed {processes} of {what} during this attempt"
        return ""


def _group_count() -> int | None:
    """Read `memory.events` (cgroup v2) or `memory.oom_control` (v1)."""
    groups = [line.split(":", 2) for line in _lines("/proc/self/cgroup")]
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers == "":
            name = "memory.events"
            parents = [f"/sys/fs/cgroup{path}", f"/sys/fs/cgroup/unified{path}", "/sys/fs/cgroup"]
        elif "memory" in controllers.split(","):
            name = "memory.oom_control"
            parents = [f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"]
        else:
            continue
        for parent in parents:
            count = _count(os.path.join(parent, name))
            if count is not None:
                return count
    return None


def _count(path: str) -> int | None:
    values = (line[9:] for line in _lines(path) if line.startswith("oom_kill "))
    value = next(values, "")  # none if this cgroup version is not mounted here
    return int(value) if value.isdecimal() else None


def _lines(path: str) -> list[str]:
    """Return the lines of a file of the kernel; none if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
