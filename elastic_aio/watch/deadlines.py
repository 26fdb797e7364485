"""The deadlines of an attempt: of workers that report, and of the timers they acquire; pure.

The words of a report are from sd_notify(3), and six more::

    READY=1                  the worker has started up
    WATCHDOG=1               the worker is alive; WATCHDOG=trigger: it asks to be ended
    STATUS=text              what it does, for people
    STOPPING=1               it ends: it has the grace of its stop plan for that, and no other limit
    EXTEND_TIMEOUT_USEC=n    none of its deadlines ends in the next n microseconds
    PROGRESS=step            where its work is; any text that changes
    PHASE=name               a part of its work begins; PHASE_END=name ends it
    PHASE_TIMEOUT_USEC=n     how long the phase that has begun last may take
    EXCLUDE=reason           the node is to take part in no further round, because of this
    CHANGE_AGREED=n          it agrees to be restarted for the pending change of this number

Every message is a heartbeat.  A shell sends each line as a message of its own.  While a phase with
a limit lasts, only that limit counts.  Other words and texts are ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from elastic_aio.outcome import ExitStatus
from elastic_aio.ranks import WorkerRanks
from elastic_aio.spec.liveness import UNFINISHED_S, LivenessSpec
from elastic_aio.text import one_line

MESSAGE_MAX = 4096  # bytes; a longer message is ignored
_LINES_MAX = 32
_STATUS_MAX = 200
_STEP_MAX = 60
_PHASES_MAX = 16
_DIGITS_MAX = 15
TIMERS_MAX = 16_384


class Phase(Struct):
    """A part of a worker's work that has begun; `limit` is in seconds, None for none."""

    name: str
    began: float
    limit: float | None
    is_missed: bool = False


class WorkerReport(Struct):
    """The reports of one worker about itself; times are in seconds of the job's clock.

    `phases` are the phases that have begun, the innermost last; no deadline ends before
    `extended_to`; `missed` are the deadlines that it has missed since; `agreed_change` is the
    number of the last pending change to which it agrees, -1 for none; `probe` is the last answer to
    a probe.
    """

    started: float
    ready_at: float | None = None
    heartbeat_at: float | None = None
    step: str = ""
    step_at: float | None = None
    status: str = ""
    phases: list[Phase] = field(default_factory=list)
    stopping_at: float | None = None
    extended_to: float = 0.0
    is_triggered: bool = False
    missed: set[str] = field(default_factory=set)
    agreed_change: int = -1
    probe: str = ""

    @property
    def phase(self) -> str:
        """The innermost phase; empty without one."""
        return self.phases[-1].name if self.phases else ""

    def __str__(self) -> str:
        """Return what the worker has reported last, for people; empty if that is nothing."""
        step = f"step {self.step}" if self.step else ""
        phase = f"phase {self.phase!r}" if self.phase else ""
        return ", ".join(filter(None, (step, phase, self.status)))


class WatchedWorker(Protocol):
    """A worker, as its watch reads it and notes about it (see `WorkerRecord`)."""

    ranks: WorkerRanks
    pid: int
    started_at: float
    report: WorkerReport | None
    expired_timer: str
    hang: str
    hung_at: float
    notes: tuple[str, ...]

    @property
    def is_running(self) -> bool:
        """Whether it has not exited."""

    @property
    def status(self) -> ExitStatus:
        """How it exited; unknown while it runs."""


class _Deadline(Struct):
    at: float
    kind: str
    limit: float
    since: float
    phase: Phase | None = None


class MissedDeadline(Struct, frozen=True):
    """A worker that was silent for too long, in seconds; `reason` says it for people.

    `kind` is "heartbeat", "ready", "progress", "phase", "watchdog", "stopping",
    "exit skew" or "probe"; `age`
    and `limit` count from the same time.  `status`, `step` and `phase` are the last, or empty.
    """

    local_rank: int
    kind: str
    limit: float
    age: float
    reason: str
    status: str
    step: str
    phase: str


class WorkerTimer(Struct):
    """A timer that process `pid` acquires, or releases (`until` is None), by the name `scope`.

    `acquired` and `until` are the times between which it counts; `signal` ends the process then, 0
    or less leaves it alone.
    """

    pid: int
    scope: str
    acquired: float
    until: float | None
    signal: int


class DeadlineTable:
    """The deadlines of one attempt, of workers and timers; times are in seconds of one clock."""

    def __init__(
        self,
        spec: LivenessSpec,
        *,
        stop_grace: float | None = None,
        unfinished_after: float = UNFINISHED_S,
        takes_ready: bool = True,
    ) -> None:
        """Begin; workers that run `unfinished_after` seconds after a success are reported.

        `stop_grace`: the seconds that a worker has to end after its `STOPPING=1`; None: no limit.
        `takes_ready`: a worker is ready by its `READY=1`; otherwise by `set_ready` only.
        """
        self.workers: dict[int, WorkerReport] = {}
        self.agreed_change = -1  # the last pending change to which all running workers agree
        self.has_progress = False  # whether a worker has reported a step in this attempt
        self.exclusion = ""  # the first reason of a worker to exclude the node
        self.excluded_by = -1  # the local rank of that worker
        self.peers_finished = 0  # workers of other nodes that have finished, as far as is known
        self.is_stopping = False  # then only the deadlines of timers count
        self._spec = spec
        self._stop_grace = stop_grace
        self._unfinished_after = unfinished_after
        self._takes_ready = takes_ready
        self._succeeded_at: float | None = None
        self._has_reported = False
        self._timers: dict[int, dict[str, WorkerTimer]] = {}
        self._timer_count = 0
        # By time; has at most as many released timers as others, and a few.
        self._heap: list[tuple[float, int, WorkerTimer]] = []
        self._serial = 0

    def __repr__(self) -> str:
        return f"<DeadlineTable of {len(self.workers)} workers, {self._timer_count} timers>"

    def add(self, local_rank: int, now: float) -> WorkerReport:
        report = self.workers[local_rank] = WorkerReport(now)
        return report

    def remove(self, local_rank: int, now: float, *, is_success: bool) -> bool:
        """Remove a worker that has exited; return whether it is the first success."""
        self.workers.pop(local_rank, None)
        self._count_agreements()
        is_first = is_success and self._succeeded_at is None
        if is_first:
            self._succeeded_at = now
        return is_first

    def note_success(self, at: float) -> None:
        """Note that a worker, perhaps of another node, has finished; the earliest time counts."""
        self._succeeded_at = at if self._succeeded_at is None else min(at, self._succeeded_at)

    # -------------------------------------------------------------- messages

    def feed(self, local_rank: int, message: bytes, now: float) -> bool:
        """Read a message; return whether the worker has become ready by it."""
        report = self.workers.get(local_rank)
        lines = message.split(b"\n", _LINES_MAX)
        if report is None or b"=" not in message or len(message) > MESSAGE_MAX:
            return False
        was_ready = report.ready_at is not None
        report.heartbeat_at = now
        report.missed.discard("heartbeat")
        for line in lines[:_LINES_MAX]:
            key, _, value = line.partition(b"=")
            self._read(report, key, value.decode("utf-8", "replace"), now)
        if self.exclusion and self.excluded_by < 0:
            self.excluded_by = local_rank
        return report.ready_at is not None and not was_ready

    def set_ready(self, local_rank: int, now: float) -> bool:
        """Note that a probe finds a worker ready; return whether it has become so."""
        report = self.workers.get(local_rank)
        if report is None or report.ready_at is not None:
            return False
        report.ready_at = now
        return True

    def not_alive(self, local_rank: int, why: str, age: float) -> MissedDeadline | None:
        """Return what to report of a worker whose probe has failed; None if it is stopped."""
        report = self.workers.get(local_rank)
        if report is None or self.is_stopping or report.stopping_at is not None:
            return None
        item = _Deadline(0.0, "probe", 0.0, 0.0)
        missed = self._missed(local_rank, report, item, age)
        return replace(missed, reason=f"not alive: its probe has failed, last answer: {why}")

    def _read(self, report: WorkerReport, key: bytes, text: str, now: float) -> None:
        match key:
            case b"READY" if text == "1" and report.ready_at is None and self._takes_ready:
                report.ready_at = now
            case b"STATUS":
                report.status = one_line(text[:MESSAGE_MAX], _STATUS_MAX)
            case b"WATCHDOG" if text == "trigger":
                report.is_triggered = True
            case b"STOPPING" if text == "1" and report.stopping_at is None:
                report.stopping_at = now
            case b"EXTEND_TIMEOUT_USEC" if (seconds := _seconds(text)) is not None:
                report.extended_to = max(report.extended_to, now + seconds)
            case b"PROGRESS":
                step = one_line(text, _STEP_MAX)
                if step != report.step:
                    report.step, report.step_at = step, now
                    report.missed.discard("progress")
                self.has_progress |= bool(step)
            case b"EXCLUDE":
                self.exclusion = self.exclusion or one_line(text, _STATUS_MAX)
            case b"PHASE" if len(report.phases) < _PHASES_MAX:
                report.phases.append(Phase(one_line(text, _STEP_MAX), now, None))
            case b"PHASE_TIMEOUT_USEC" if report.phases:
                report.phases[-1].limit = _seconds(text)
            case b"PHASE_END":
                self._end_phase(report, one_line(text, _STEP_MAX), now)
            case b"CHANGE_AGREED" if (number := _number(text)) is not None:
                report.agreed_change = number
                self._count_agreements()

    def _count_agreements(self) -> None:
        agreed = {report.agreed_change for report in self.workers.values()}
        if len(agreed) == 1:
            self.agreed_change = agreed.pop()

    def _end_phase(self, report: WorkerReport, name: str, now: float) -> None:
        for index in range(len(report.phases) - 1, -1, -1):
            if report.phases[index].name == name:
                # With the phases inside of it, whose ends were lost.
                has_limit = any(phase.limit is not None for phase in report.phases[index:])
                del report.phases[index:]
                if has_limit:  # the time of the present step begins again
                    report.step_at = now
                return

    # ---------------------------------------------------------------- timers

    def take(self, timer: WorkerTimer) -> bool:
        """Start, restart or end a timer; return False if there are too many."""
        # The end of a timer that does not run has no effect.
        if timer.until is None:
            self._end(timer)
            return True
        timers = self._timers.get(timer.pid, {})
        if timer.scope not in timers:
            if self._timer_count >= TIMERS_MAX:
                return False
            self._timer_count += 1
        timers[timer.scope] = timer
        self._timers[timer.pid] = timers
        self._push(timer)
        if len(self._heap) > 2 * self._timer_count + 64:  # mostly timers that have ended
            self._heap.clear()
            for timer in [timer for timers in self._timers.values() for timer in timers.values()]:
                self._push(timer)
        return True

    def _push(self, timer: WorkerTimer) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (timer.until or 0.0, self._serial, timer))

    def _end(self, timer: WorkerTimer) -> None:
        timers = self._timers.get(timer.pid, {})
        if timers.pop(timer.scope, None) is not None:
            self._timer_count -= 1
            if not timers:
                del self._timers[timer.pid]

    @property
    def next_timer(self) -> float | None:
        """When the first timer expires, which is the top of the heap then."""
        while self._heap:
            at, _, timer = self._heap[0]
            if self._timers.get(timer.pid, {}).get(timer.scope) is timer:
                return at
            heapq.heappop(self._heap)
        return None

    def expire_timers(self, now: float, limit: int = TIMERS_MAX) -> list[WorkerTimer]:
        """Remove and return the timers that have expired by `now`, `limit` at most."""
        # Each process has one of them, the earliest that has a signal; its other timers are removed
        # too.
        expired: dict[int, WorkerTimer] = {}
        for _ in range(limit):
            if (at := self.next_timer) is None or at > now:
                break
            _, _, timer = self._heap[0]
            self._end(timer)
            first = expired.setdefault(timer.pid, timer)
            if first.signal <= 0 < timer.signal:
                expired[timer.pid] = timer
        for pid, timer in expired.items():
            if timer.signal > 0:
                self._timer_count -= len(self._timers.pop(pid, ()))
        return [*expired.values()]

    # ------------------------------------------------------------- deadlines

    def deadline_of(self, local_rank: int) -> float | None:
        """Return when the next deadline of a worker ends, or a report is due; None without one."""
        report = self.workers.get(local_rank)
        return None if report is None else self._next_of([report])

    @property
    def next_deadline(self) -> float | None:
        """When the next deadline or timer ends, or a report is due; None without one."""
        ends = self._next_of(self.workers.values()), self.next_timer
        return min((end for end in ends if end is not None), default=None)

    def _next_of(self, reports: Iterable[WorkerReport]) -> float | None:
        ends = [item.at for report in reports for item in self._deadlines(report)]
        if self._report_at is not None:
            ends.append(self._report_at)
        return min(ends, default=None)

    @property
    def _report_at(self) -> float | None:
        is_due = self.workers and not self._has_reported and not self.is_stopping
        if self._succeeded_at is None or not is_due:
            return None
        return self._succeeded_at + self._unfinished_after

    def take_skew(self, now: float) -> float:
        """Return how long ago the first worker has succeeded, once a report is due; else 0."""
        if self._report_at is None or self._succeeded_at is None or now < self._report_at:
            return 0.0
        self._has_reported = True
        return now - self._succeeded_at

    def expire(self, now: float) -> list[MissedDeadline]:
        """Return the deadlines of workers that have ended by `now`, by time; each once."""
        found = []
        for local_rank, report in self.workers.items():
            due = [item for item in self._deadlines(report) if item.at <= now]
            for item in due:
                report.missed.add(item.kind)
                if item.phase is not None:
                    item.phase.is_missed = True
            if due:
                first = min(due, key=lambda item: item.at)
                found.append((first.at, self._missed(local_rank, report, first, now)))
        return [missed for _, missed in sorted(found, key=lambda pair: pair[0])]

    def _deadlines(self, report: WorkerReport) -> Iterator[_Deadline]:
        if self.is_stopping:
            return
        if report.is_triggered and "watchdog" not in report.missed:
            yield _Deadline(0.0, "watchdog", 0.0, report.heartbeat_at or report.started)
        for item in self._limits(report):
            is_known = item.phase.is_missed if item.phase else item.kind in report.missed
            if not is_known:
                item.at = max(item.since + item.limit, report.extended_to)
                yield item

    def _limits(self, report: WorkerReport) -> Iterator[_Deadline]:
        spec = self._spec
        if spec.exit_skew_timeout is not None and self._succeeded_at is not None:
            yield _Deadline(0.0, "exit skew", spec.exit_skew_timeout, self._succeeded_at)
        if report.stopping_at is not None:
            if self._stop_grace is not None:
                yield _Deadline(0.0, "stopping", self._stop_grace, report.stopping_at)
            return
        limited = [phase for phase in report.phases if phase.limit is not None]
        if limited:
            for phase in limited:
                yield _Deadline(0.0, "phase", phase.limit or 0.0, phase.began, phase)
            return
        begin = report.started
        if spec.ready_timeout is not None:
            if report.ready_at is None:
                yield _Deadline(0.0, "ready", spec.ready_timeout, begin)
                return
            begin = report.ready_at
        if spec.heartbeat_timeout is not None:
            since = max(begin, report.heartbeat_at or begin)
            yield _Deadline(0.0, "heartbeat", spec.heartbeat_timeout, since)
        if spec.progress_timeout is not None:
            since = max(begin, report.step_at or begin)
            yield _Deadline(0.0, "progress", spec.progress_timeout, since)

    def _missed(
        self, local_rank: int, report: WorkerReport, item: _Deadline, now: float
    ) -> MissedDeadline:
        phase = item.phase.name if item.phase is not None else report.phase
        return MissedDeadline(
            local_rank=local_rank,
            kind=item.kind,
            limit=item.limit,
            age=round(now - item.since, 3),
            reason=_reason(item, report, phase),
            status=report.status,
            step=report.step,
            phase=phase,
        )


def _reason(item: _Deadline, report: WorkerReport, phase: str) -> str:
    seconds = f"{round(item.limit, 3):g} s"
    match item.kind:
        case "heartbeat":
            text = f"no heartbeat for {seconds} (heartbeat timeout)"
        case "ready":
            text = f"not ready {seconds} after its start (ready timeout)"
            text += f", last probe: {report.probe}" if report.probe else ""
        case "progress":
            text = f"no progress for {seconds} (progress timeout)"
        case "stopping":
            text = f"not ended {seconds} after STOPPING=1 (grace period)"
        case "exit skew":
            text = f"not finished {seconds} after the first success (exit skew timeout)"
        case "phase":
            text = f"phase {phase!r} has not ended after {seconds}"
        case _:
            text = "the worker asked to be ended (WATCHDOG=trigger)"
    if report.step:
        text += f", at step {report.step}"
    if phase and item.kind != "phase":
        text += f", in phase {phase!r}"
    return f"{text}, last status {report.status!r}" if report.status else text


def _seconds(text: str) -> float | None:
    """Return microseconds as seconds; None if the text is no such number."""
    number = _number(text)
    return None if number is None else number / 1e6


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return int(text) if is_number else None
