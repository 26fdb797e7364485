"""Reports workers that are silent or stuck, examines them, and ends those that have to end.

The alarm is set to the first of all deadlines.  A missed deadline is an event at once.  Then the
stacks of all workers are read, before anything ends them.  By the policy of the job the attempt
fails; or, if a timer was not released, the timer's signal goes to its worker and to the process
below it that has acquired the timer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_aio import events
from elastic_aio.aio import Alarm, PausableClock, cancel_and_wait, create_task, run_in_thread
from elastic_aio.process import proc
from elastic_aio.process.tree import ProcessTree
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.stacks import StackDump
from elastic_aio.text import one_line
from elastic_aio.watch.deadlines import (
    TIMERS_MAX,
    DeadlineTable,
    MissedDeadline,
    WatchedWorker,
    WorkerTimer,
)
from elastic_aio.watch.forensics import Target, read_stacks
from elastic_aio.watch.timer_pipe import TimerPipe, TimerRequests

_EXPIRED_MAX = 256  # timers that expire in one turn of the event loop
_LOOKS_AT_IDLE = 4  # at the workers, within the time that they may be idle
_LOOKS_AT_STUCK = 8  # at a worker, within the time that it may hang
_IDLE_SHARE = 0.01  # of a CPU that an idle worker may use: libraries have threads that look around

Activity = Mapping[int, tuple[int, int]]
"""CPU time in ticks and bytes written, by pid."""


class Watchdog:
    """The deadlines of the workers of one job on this host; must be closed."""

    def __init__(
        self,
        spec: LivenessSpec,
        clock: PausableClock,
        publish: Callable[[events.Event], None],
        tree: Callable[[], ProcessTree],
        *,
        directory: Callable[[int], str | None],
        read_messages: Callable[[], None],
        on_agreed: Callable[[int, int], None],
        on_progress: Callable[[int], None],
        on_excluded: Callable[[int, str], None],
        on_hung: Callable[[int, str], None],
        on_stuck: Callable[[int], None],
        on_ready: Callable[[int], None] = lambda local_rank: None,
        **table: Any,
    ) -> None:
        """Prepare; `begin_attempt` follows.

        `read_messages` reads what workers have sent by now.  `on_ready` gets the local rank of each
        worker that becomes ready, after its event.  `table` is as for `DeadlineTable`; other
        arguments as for `Liveness`.
        """
        self.pipe: TimerPipe | None = None
        self._spec = spec
        self._clock = clock
        self._publish = publish
        self._tree = tree
        self._directory = directory
        self._read_messages = read_messages
        self._on_agreed = on_agreed
        self._on_progress = on_progress
        self._on_excluded = on_excluded
        self._on_hung = on_hung
        self._on_stuck = on_stuck
        self._on_ready = on_ready
        self._make_table = partial(DeadlineTable, spec, **table)
        self._table = self._make_table()
        self._requests = TimerRequests()
        self._has_reported_rejected = False
        self._workers: Mapping[int, WatchedWorker] = {}
        self._attempt = 0
        self._agreed_change, self._has_excluded = -1, False
        self._alarm = Alarm(clock, self._on_alarm)
        self._is_reading = False
        self._missed: list[MissedDeadline] = []
        self._expired: list[WorkerTimer] = []
        self._examination: asyncio.Task[None] | None = None
        self._polls: list[asyncio.Task[None]] = []
        self._dumping = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Watchdog of attempt {self._attempt}, {self._table!r}>"

    def open_timers(self, where: bool | str) -> None:
        """Make the pipe of the timers at a path or in a temporary directory, or raise HostError."""
        self.pipe = TimerPipe(where, self._on_requests)

    # ------------------------------------------------------------ an attempt

    def begin_attempt(self, attempt: int, workers: Mapping[int, WatchedWorker]) -> None:
        """Forget the former attempt; `workers` belong to this attempt, now or later."""
        self._attempt, self._workers = attempt, workers
        self._missed.clear()
        self._table = self._make_table()
        self._agreed_change, self._has_excluded = -1, False
        self._requests.forget()
        if self.pipe is not None:
            self.pipe.forget()
            self._is_reading = False

    def start_polls(self, uninterruptible_timeout: float | None) -> None:
        """Begin to look at the workers of the attempt, if they may not be idle or stuck.

        `uninterruptible_timeout`: seconds that a worker may be stuck in the kernel; None: any time.
        """
        self._polls = [poll for poll in self._polls if not poll.done()]
        if (seconds := self._spec.idle_report) is not None:
            polling = watch_idle(seconds, self._clock, self._running, self._report_idle)
            self._polls.append(create_task(polling, name="idle workers"))
        if uninterruptible_timeout is not None:
            finding = self._find_stuck(uninterruptible_timeout)
            self._polls.append(create_task(finding, name="watch for state D"))

    def add(self, local_rank: int) -> None:
        """Begin the deadlines of a worker that is being spawned, or runs already."""
        report = self._table.add(local_rank, self._clock.now())
        if (worker := self._workers.get(local_rank)) is not None:
            worker.report = report
        self._set_alarm(self._table.deadline_of(local_rank))

    def on_started(self, worker: WatchedWorker) -> None:
        worker.report = self._table.workers.get(worker.ranks.local_rank)
        if worker.report is not None and worker.report.ready_at is not None:
            self._report_ready(worker)
        self._note_exclusion()

    def on_message(self, local_rank: int, message: bytes) -> None:
        had_progress = self._table.has_progress
        has_become_ready = self._table.feed(local_rank, message, self._clock.now())
        if self._table.has_progress and not had_progress:
            self._on_progress(self._attempt)
        self._note_exclusion()
        if has_become_ready and (worker := self._workers.get(local_rank)) is not None:
            self._report_ready(worker)
        self._set_alarm(self._table.deadline_of(local_rank))
        self._note_agreement()

    def _note_exclusion(self) -> None:
        """Pass the first exclusion on, once the start of its worker is known."""
        if self._has_excluded or not self._table.exclusion:
            return
        if (worker := self._workers.get(self._table.excluded_by)) is not None:
            self._has_excluded = True
            self._on_excluded(self._attempt, f"rank {worker.ranks.rank}: {self._table.exclusion}")

    def set_ready(self, local_rank: int) -> None:
        """Note that a probe finds a worker ready.  Idempotent."""
        if self._table.set_ready(local_rank, self._clock.now()):
            if (worker := self._workers.get(local_rank)) is not None:
                self._report_ready(worker)
            self._set_alarm(self._table.deadline_of(local_rank))

    def on_answer(self, local_rank: int, text: str) -> None:
        """Keep the last answer to a probe of a worker."""
        if (report := self._table.workers.get(local_rank)) is not None:
            report.probe = text

    def on_not_alive(self, local_rank: int, why: str, age: float) -> None:
        """Take the failures of a probe, of which the last is `why`, for a missed deadline."""
        item, worker = self._table.not_alive(local_rank, why, age), self._workers.get(local_rank)
        if item is not None and worker is not None and worker.is_running:
            self._report(item, worker)
            self._missed.append(item)
            self._examine_missed()

    def on_exited(self, local_rank: int, *, is_success: bool) -> None:
        if self._table.remove(local_rank, self._clock.now(), is_success=is_success):
            self._set_alarm(self._table.next_deadline)
        self._note_agreement()

    def on_success(self, at: float, peers: int = 0) -> None:
        """Note that a worker has finished; `peers` of other nodes have by now."""
        self._table.peers_finished = peers
        self._table.note_success(at)
        self._set_alarm(self._table.next_deadline)

    def end_deadlines(self) -> None:
        """End the deadlines of workers, which are being stopped, but no timer.  Idempotent."""
        self._table.is_stopping = True
        for poll in self._polls:
            poll.cancel()

    async def aclose(self) -> None:
        self.end_deadlines()
        self._alarm.set(None)
        if self.pipe is not None:
            self.pipe.close()
        tasks = [*self._polls] if self._examination is None else [*self._polls, self._examination]
        if tasks:
            await cancel_and_wait(tasks)

    def _running(self) -> list[WatchedWorker]:
        return [worker for worker in self._workers.values() if worker.is_running]

    def _note_agreement(self) -> None:
        if self._agreed_change != self._table.agreed_change:
            self._agreed_change = self._table.agreed_change
            self._on_agreed(self._attempt, self._agreed_change)

    def _on_requests(self, data: bytes) -> None:
        for timer in self._requests.feed(data, self._clock.now(), time.time()):
            if not self._table.take(timer):
                self._requests.reject(f"more than {TIMERS_MAX} timers")
        if self._requests.rejected and not self._has_reported_rejected:
            self._has_reported_rejected = True
            self._publish(events.TimerRejected(attempt=self._attempt, why=self._requests.rejected))
        self._set_alarm(self._table.next_timer)  # the deadlines of workers are the same

    # ------------------------------------------------------------- deadlines

    def _set_alarm(self, deadline: float | None) -> None:
        """Set the alarm, unless it is set to an earlier time already: then it is set again."""
        at = self._alarm.at
        if deadline is not None and not self._is_reading and (at is None or deadline < at):
            self._alarm.set(deadline)

    def _on_alarm(self) -> None:
        """Read what may have been sent before the deadline, then look."""
        self._read_messages()
        if self.pipe is None:
            self._expire()
        else:
            self._is_reading = True
            self.pipe.read_all(self._expire)

    def _expire(self) -> None:
        self._is_reading = False
        now = self._clock.now()
        for item in self._table.expire(now):
            worker = self._workers.get(item.local_rank)
            if worker is None or worker.is_running:
                self._report(item, worker)
                self._missed.append(item)
        if seconds := self._table.take_skew(now):
            self._report_skew(seconds)
        self._expired += self._table.expire_timers(now, _EXPIRED_MAX)
        self._examine_missed()
        self._set_alarm(self._table.next_deadline)

    def _examine_missed(self) -> None:
        is_due = self._expired or self._missed
        if is_due and (self._examination is None or self._examination.done()):
            self._examination = create_task(self._examine(), name="silent workers")

    async def _examine(self) -> None:
        while self._expired or (self._missed and not self._table.is_stopping):
            if self._expired:
                await self._end_expired()
            else:
                await self._end_missed()

    async def _end_missed(self) -> None:
        """Read the stacks of all workers once for each group of missed deadlines."""
        first, attempt = self._missed[0], self._attempt
        worker = self._workers.get(first.local_rank)
        who = f"rank {worker.ranks.rank}" if worker else f"local rank {first.local_rank}"
        await self.dump(f"{who}: {first.reason}")
        self._missed.clear()  # the dump has the stacks of later misses too
        if self._spec.on_timeout == "fail" and attempt == self._attempt:
            self._on_hung(first.local_rank, first.reason)

    async def _end_expired(self) -> None:
        """Report the expired timers, examine the workers, and end the owners of the timers."""
        # One scan is for all timers of processes below the workers that wait for a timer.
        timers, self._expired = self._expired, []
        owners = {worker.pid: worker for worker in self._workers.values()}
        below: dict[int, proc.ProcEntry] = {}
        if any(timer.pid not in owners for timer in timers):
            below = {entry.pid: entry for entry in await self._tree().descendants() or ()}
        fatal: list[tuple[WorkerTimer, WatchedWorker | None, proc.ProcEntry | None]] = []
        for timer in timers:
            worker, process = owners.get(timer.pid), None
            if worker is None:
                if (process := below.get(timer.pid)) is None:
                    continue  # it has ended, or is none of ours
                worker = _owner_of(process, owners, below)
            elif not worker.is_running:
                continue
            self._report_timer(timer, worker)
            if timer.signal > 0:
                fatal.append((timer, worker, process))
        if fatal:
            await self.dump(f"timer {one_line(fatal[0][0].scope)!r} expired")
        for timer, worker, process in fatal:
            if process is not None:
                proc.signal_process(process, timer.signal)
            if worker is not None and worker.is_running:
                self._tree().signal_leaders(timer.signal, worker.pid)

    async def _find_stuck(self, seconds: float) -> None:
        worker = await find_stuck(seconds, self._clock, self._running)
        await self.dump(f"process {worker.pid} is in an uninterruptible system call")
        self._on_stuck(worker.ranks.local_rank)

    # ----------------------------------------------------------------- dumps

    async def dump(self, reason: str) -> StackDump:
        """Read the stacks of all workers of the present attempt, for two seconds at most.

        They go to `stacks.txt` in the directory of the attempt, to an event, and to the failures of
        the workers.

        Cancellation: leaves a thread running, which ends by itself.
        """
        async with self._dumping:
            self._read_messages()
            attempt, workers = self._attempt, self._running()
            targets = [
                Target(one.ranks.rank, one.ranks.local_rank, one.pid, str(one.report or ""))
                for one in workers
            ]
            targets.sort(key=lambda target: target.rank)
            stacks = await run_in_thread(read_stacks, targets, daemon=True)
            dump = StackDump(time.time(), attempt, reason, stacks)
            if (directory := self._directory(attempt)) is not None:
                path = os.path.join(directory, "stacks.txt")
                dump = await run_in_thread(_write, dump, path, daemon=True)
        where = f" ({dump.path})" if dump.path else ""
        for worker in workers:
            worker.notes = (f"stacks: {dump.summary}{where}",)
        self._publish(
            events.StacksDumped(attempt=attempt, why=reason, summary=dump.summary, path=dump.path)
        )
        return dump

    # --------------------------------------------------------------- reports

    def _report_ready(self, worker: WatchedWorker) -> None:
        self._publish(
            events.WorkerReady(
                attempt=self._attempt,
                rank=worker.ranks.rank,
                local_rank=worker.ranks.local_rank,
                pid=worker.pid,
                duration=time.monotonic() - worker.started_at,
            )
        )
        self._on_ready(worker.ranks.local_rank)

    def _report(self, item: MissedDeadline, worker: WatchedWorker | None) -> None:
        if worker is not None and self._spec.on_timeout == "fail" and not worker.hang:
            worker.hang, worker.hung_at = item.reason, time.time()
        self._publish(
            events.DeadlineMissed(
                attempt=self._attempt,
                rank=-1 if worker is None else worker.ranks.rank,
                local_rank=item.local_rank,
                pid=0 if worker is None else worker.pid,
                deadline=item.kind,
                limit=item.limit,
                age=item.age,
                why=item.reason,
                step=item.step,
                phase=item.phase,
                status=item.status,
            )
        )

    def _report_skew(self, seconds: float) -> None:
        workers = self._workers.values()
        finished = sum(not one.is_running and one.status.is_success for one in workers)
        worlds = [one.ranks.world_size for one in workers if one.ranks.group_world_size > 1]
        self._publish(
            events.WorkersUnfinished(
                attempt=self._attempt,
                seconds=seconds,
                finished=finished + self._table.peers_finished,
                running=tuple(sorted(one.ranks.rank for one in self._running())),
                world_size=max(worlds, default=0),
            )
        )

    def _report_timer(self, timer: WorkerTimer, worker: WatchedWorker | None) -> None:
        scope, age = one_line(timer.scope), self._clock.now() - timer.acquired
        limit = (timer.until or 0.0) - timer.acquired
        if worker is not None:
            times = f"{round(age, 2):g} s (limit {round(limit, 2):g} s)"
            worker.expired_timer = f"timer {scope!r} expired after {times}"
        self._publish(
            events.TimerExpired(
                attempt=self._attempt,
                rank=-1 if worker is None else worker.ranks.rank,
                local_rank=-1 if worker is None else worker.ranks.local_rank,
                pid=timer.pid,
                scope=scope,
                age=age,
                limit=limit,
                signal=max(timer.signal, 0),
            )
        )

    async def _report_idle(self) -> None:
        seconds = self._spec.idle_report or 0.0
        dump = await self.dump(f"no worker has been busy for {seconds:g} s")
        self._publish(
            events.WorkersIdle(
                attempt=self._attempt,
                seconds=seconds,
                workers=tuple(
                    events.WorkerActivity(
                        rank=worker.rank,
                        local_rank=worker.local_rank,
                        pid=worker.pid,
                        state=worker.state,
                        syscall=worker.syscall,
                        wchan=worker.wchan,
                        reported=worker.status,
                    )
                    for worker in dump.workers
                ),
            )
        )


def _owner_of(
    process: proc.ProcEntry,
    owners: Mapping[int, WatchedWorker],
    below: Mapping[int, proc.ProcEntry],
) -> WatchedWorker | None:
    """Return the worker that leads a process's session, or is its ancestor."""
    worker = owners.get(process.session)
    ancestor: proc.ProcEntry | None = process
    while worker is None and ancestor is not None:
        worker = owners.get(ancestor.parent)
        ancestor = below.get(ancestor.parent)
    return worker


def _write(dump: StackDump, path: str) -> StackDump:
    """Append a dump to a file; return the dump with its path, if that was possible."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(dump.time))
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"==== {when}, {dump}\n")
    except OSError:
        return dump  # the disk is full, or the directory was removed
    return replace(dump, path=path)


# ------------------------------------------- what the kernel reports to no other process


async def watch_idle(
    seconds: float,
    clock: PausableClock,
    running: Callable[[], Sequence[WatchedWorker]],
    report: Callable[[], Awaitable[None]],
) -> None:
    """Report once that all workers have been idle for `seconds`, and again after one was busy."""
    since, has_reported = clock.now(), False
    former: Activity = {}
    while True:
        now = clock.now()
        pids = [worker.pid for worker in running()]
        present = await run_in_thread(_read_activity, pids, daemon=True)
        if not present or not _is_idle(former, present, seconds / _LOOKS_AT_IDLE):
            since, has_reported = now, False
        elif now - since >= seconds and not has_reported:
            has_reported = True
            await report()
            # The workers have written their stacks: that was no work.
            present = await run_in_thread(_read_activity, pids, daemon=True)
        former = present
        await clock.sleep(seconds / _LOOKS_AT_IDLE)


def _read_activity(pids: Sequence[int]) -> Activity:
    """Read the activity of processes and their descendants; one that starts or ends changes it."""
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with suppress(OSError):  # no descriptor is left
            for each in (pid, *(process.pid for process in proc.iter_descendants(pid))):
                fields = proc.read_stat(each)
                if len(fields) > 12:
                    written = (proc.read(each, "io") or b"").partition(b"wchar:")[2].split()
                    bytes_written = int(written[0]) if written else 0
                    found[each] = int(fields[11]) + int(fields[12]), bytes_written
    return found


def _is_idle(former: Activity, present: Activity, seconds: float) -> bool:
    """Return whether the same processes have used almost no CPU time and written nothing."""
    limit = _IDLE_SHARE * seconds * os.sysconf("SC_CLK_TCK")
    return former.keys() == present.keys() and all(
        ticks - former[pid][0] <= limit and written == former[pid][1]
        for pid, (ticks, written) in present.items()
    )


async def find_stuck(
    seconds: float, clock: PausableClock, running: Callable[[], Sequence[WatchedWorker]]
) -> WatchedWorker:
    """Return the first worker that is in one uninterruptible system call for `seconds`."""
    # That is state D of proc_pid_status(5).  Such a call waits for a device or a file server, and
    # no signal ends it.
    former: dict[int, tuple[list[bytes], float]] = {}
    while True:
        now = clock.now()
        present: dict[int, tuple[list[bytes], float]] = {}
        for worker in running():
            if (wait := _uninterruptible_wait(worker.pid)) is not None:
                known, since = former.get(worker.pid, (None, now))
                if wait != known:
                    since = now  # many short calls are no long one
                elif now - since >= seconds:
                    return worker
                present[worker.pid] = wait, since
        former = present
        await clock.sleep(seconds / _LOOKS_AT_STUCK)


def _uninterruptible_wait(pid: int) -> list[bytes] | None:
    """Return the counts of context switches of a main thread in state D; None in another state."""
    # They are the same while it is in one wait: the kernel finds hung tasks by them too.
    try:
        status = proc.read_status(pid)
    except OSError:
        return None
    if not status.get(b"State", b"").startswith(b"D"):
        return None
    return [value for name, value in status.items() if name.endswith(b"voluntary_ctxt_switches")]
