"""The workers of a job that are silent for too long: reported, examined, and passed on.

The workers report through the sockets of `notify_sockets`, of which `liveness_table` decides, or
acquire `timers`.  A missed deadline is an event at once.  Then the stacks of all workers are read,
before anything ends them, and by the policy of the job the attempt fails.

Without a deadline no timer runs here: an idle job causes no wake-up.  A success begins one, for
the workers that still run; so does the success of all workers of another node.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.notify_sockets import PERIOD_S, NotifySockets
from elastic_aio.aio import PausableClock, cancel_and_wait, create_task, run_in_thread
from elastic_aio.errors import HostError
from elastic_aio.events import (
    DeadlineMissed,
    Event,
    StacksDumped,
    WorkerActivity,
    WorkerReady,
    WorkersIdle,
    WorkersUnfinished,
)
from elastic_aio.process.tree import ProcessTree
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason
from elastic_aio.watch.deadlines import LivenessTable, MissedDeadline

if TYPE_CHECKING:  # its patterns take time, and most jobs need none
    from elastic_aio.agent.timers import JobTimers
    from elastic_aio.stacks import StackDump

_DUMP_S = 2.0
"""Seconds that the stacks may take."""
_SHORT_STOP_S = 1.0
"""Seconds below which a stop has no time for them."""
_SAMPLES = 4
"""How often the workers are looked at within `idle_report`."""
_IDLE_SHARE = 0.01
"""The share of a CPU that an idle worker may use: libraries have threads that look around."""

OnHung = Callable[[int, str], None]
"""Called with the local rank of a worker that has missed a deadline, and with the reason."""


class Liveness:
    """What the workers of one job on this host report; must be closed."""

    def __init__(
        self,
        spec: LivenessSpec,
        clock: PausableClock,
        publish: Callable[[Event], None],
        *,
        directory: Callable[[int], str | None] = lambda attempt: None,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            spec: the limits.
            clock: measures them; they stand still while the job is suspended.
            publish: called with every event.
            directory: returns the log directory of an attempt; None for none.
        """
        self.on_agreed: Callable[[int, int], None] = lambda attempt, change: None
        """Called with the attempt, and the number of a change to which all its workers agree."""
        self._agreed_change = -1
        self._spec = spec
        self._clock = clock
        self._publish = publish
        self._directory = directory
        self._table = LivenessTable(spec)
        # A message may be noticed late by an eighth of a limit.
        period = min([PERIOD_S, *(limit / 8 for limit in spec.deadlines)])
        self._sockets = NotifySockets(self._on_message, period=period)
        self._records: Mapping[int, WorkerRecord] = {}
        self._attempt = 0
        self._on_hung: OnHung = lambda local_rank, why: None
        self._is_stopping = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._missed: list[MissedDeadline] = []
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None
        self._dumping = asyncio.Lock()
        self._timers: JobTimers | None = None

    def __repr__(self) -> str:
        return f"<Liveness of attempt {self._attempt}, {self._table!r}>"

    @property
    def address(self) -> str:
        """The address for `NOTIFY_SOCKET`; empty without deadlines."""
        return self._sockets.address

    @property
    def timer_file(self) -> str:
        """The pipe of the timers; empty without timers."""
        return "" if self._timers is None else self._timers.path

    def open(self, tree: ProcessTree, timers: bool | str) -> None:
        """Open what the workers write to, besides their own sockets.

        Args:
            tree: all processes of the job.
            timers: whether workers may acquire timers, or the path of the pipe for them.

        Raises:
            HostError: no descriptor is left, or the pipe cannot be made.
        """
        if self._spec.deadlines:
            self._sockets.find_worker = self._worker_of_session
            try:
                self._sockets.open_address()
            except OSError as error:
                raise HostError(f"cannot listen to the workers: {error_reason(error)}") from error
        if timers:
            # Imported here: most jobs have none.
            from elastic_aio.agent.timers import JobTimers

            self._timers = JobTimers(self._clock, tree, self._publish, self.dump)
            self._timers.open(timers)

    # ------------------------------------------------------------ an attempt

    def begin_attempt(self, attempt: int, records: Mapping[int, WorkerRecord]) -> None:
        """Forget the former attempt; `records` will be the workers of this one."""
        self._attempt = attempt
        self._records = records
        self._is_stopping = False
        self._missed.clear()
        self._table.clear()
        self._agreed_change = -1
        if self._timers is not None:
            self._timers.begin_attempt(attempt, records)

    def watch(self, on_hung: OnHung) -> None:
        """Call `on_hung` for each worker that misses a deadline, once all have been examined."""
        self._on_hung = on_hung
        if self._spec.idle_report is not None:
            self._idle = create_task(self._watch_idle(self._spec.idle_report), name="idle workers")

    def open_worker(self, local_rank: int) -> AbstractContextManager[int]:
        """Begin the deadlines of a worker that is being spawned; see `NotifySockets`."""
        self._table.add(local_rank, self._clock.now())
        self._set_alarm(self._table.deadline_of(local_rank))
        return self._sockets.open_worker(local_rank)

    def on_started(self, record: WorkerRecord) -> None:
        """Note that a worker has been started, which may have reported already."""
        record.report = self._table.workers.get(record.ranks.local_rank)
        if record.report is not None and record.report.ready_at is not None:
            self._report_ready(record)

    def on_exited(self, local_rank: int, *, is_success: bool) -> None:
        """Read the last messages of a worker that has exited, and end its deadlines."""
        self._sockets.close_worker(local_rank)
        if self._table.remove(local_rank, self._clock.now(), is_success=is_success):
            self._set_alarm(self._table.next_deadline)
        self._note_agreement()

    def on_peers_finished(self, workers: int, ago: float) -> None:
        """Note that so many workers of other nodes have finished, the first `ago` seconds ago."""
        self._table.note_peers(workers, self._clock.now() - ago)
        self._set_alarm(self._table.next_deadline)

    def end_deadlines(self) -> None:
        """End all deadlines: the workers are being stopped.  Idempotent."""
        self._is_stopping = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._idle is not None:
            self._idle.cancel()

    def close_workers(self) -> None:
        """Close the sockets of the workers: no process of the attempt is left.  Idempotent."""
        self._sockets.close_workers()

    async def aclose(self) -> None:
        """Close everything.  Idempotent; safe to call again after cancellation."""
        self.end_deadlines()
        self._sockets.close()
        if self._timers is not None:
            await self._timers.aclose()
        if tasks := [task for task in (self._task, self._idle) if task is not None]:
            await cancel_and_wait(tasks)

    # -------------------------------------------------------------- messages

    def _worker_of_session(self, session: int) -> int | None:
        records = self._records.items()
        return next((rank for rank, record in records if record.pid == session), None)

    def _on_message(self, local_rank: int, message: bytes) -> None:
        has_become_ready = self._table.feed(local_rank, message, self._clock.now())
        if has_become_ready and (record := self._records.get(local_rank)) is not None:
            self._report_ready(record)
        self._set_alarm(self._table.deadline_of(local_rank))
        self._note_agreement()

    def _note_agreement(self) -> None:
        if self._agreed_change != self._table.agreed_change:
            self._agreed_change = self._table.agreed_change
            self.on_agreed(self._attempt, self._agreed_change)

    def _report_ready(self, record: WorkerRecord) -> None:
        self._publish(
            WorkerReady(
                attempt=self._attempt,
                rank=record.ranks.rank,
                local_rank=record.ranks.local_rank,
                pid=record.pid,
                duration=time.monotonic() - record.started_at,
            )
        )

    # ------------------------------------------------------------- deadlines

    def _set_alarm(self, deadline: float | None) -> None:
        """Set the alarm, unless it is set to an earlier time already: then it is set again."""
        if deadline is None or self._is_stopping:
            return
        if self._alarm is not None:
            if self._alarm_at <= deadline:
                return
            self._alarm.cancel()
        self._alarm_at = deadline
        delay = max(0.0, deadline - self._clock.now())
        self._alarm = asyncio.get_running_loop().call_later(delay, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._sockets.read_all()  # a message may be there since before the deadline
        missed = [
            item
            for item in self._table.expire(self._clock.now())
            if (record := self._records.get(item.local_rank)) is None or record.exit is None
        ]
        for item in missed:
            self._report(item)
        if seconds := self._table.take_skew(self._clock.now()):
            self._report_skew(seconds)
        self._missed += missed
        if self._missed and (self._task is None or self._task.done()):
            self._task = create_task(self._examine(), name="silent workers")
        self._set_alarm(self._table.next_deadline)

    def _report(self, item: MissedDeadline) -> None:
        record = self._records.get(item.local_rank)
        if record is not None and self._spec.on_timeout == "fail" and not record.hang:
            record.hang, record.hung_at = item.reason, time.time()
        self._publish(
            DeadlineMissed(
                attempt=self._attempt,
                rank=-1 if record is None else record.ranks.rank,
                local_rank=item.local_rank,
                pid=0 if record is None else record.pid,
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
        exits = {record.ranks.rank: record.exit for record in self._records.values()}
        finished = sum(end is not None and end.status.is_success for end in exits.values())
        ranks = [record.ranks for record in self._records.values()]
        self._publish(
            WorkersUnfinished(
                attempt=self._attempt,
                seconds=seconds,
                finished=finished + self._table.peers_finished,
                running=tuple(sorted(rank for rank, end in exits.items() if end is None)),
                world_size=max(
                    (one.world_size for one in ranks if one.group_world_size > 1), default=0
                ),
            )
        )

    async def _examine(self) -> None:
        """Read the stacks of all workers once for each group of missed deadlines."""
        while self._missed and not self._is_stopping:
            first, attempt = self._missed[0], self._attempt
            record = self._records.get(first.local_rank)
            worker = f"rank {record.ranks.rank}" if record else f"local rank {first.local_rank}"
            await self.dump(f"{worker}: {first.reason}")
            self._missed.clear()  # the dump has the stacks of all that were missed meanwhile
            if self._spec.on_timeout == "fail" and attempt == self._attempt:
                self._on_hung(first.local_rank, first.reason)

    # ----------------------------------------------------------------- dumps

    async def dump(self, reason: str) -> StackDump:
        """Read the stacks of all workers of the present attempt, for two seconds at most.

        They go to `stacks.txt` in the directory of the attempt, to an event, and to the
        failures of the workers.

        Cancellation: leaves a thread running, which ends by itself.

        Args:
            reason: why, for people.
        """
        # Imported here: most jobs need none.
        from elastic_aio.stacks import StackDump
        from elastic_aio.watch.forensics import Target, read_stacks

        async with self._dumping:
            self._sockets.read_all()
            attempt, records = self._attempt, self._running()
            targets = [
                Target(record.ranks.rank, record.ranks.local_rank, record.pid, reported(record))
                for record in records
            ]
            targets.sort(key=lambda target: target.rank)
            workers = await run_in_thread(read_stacks, targets, daemon=True)
            dump = StackDump(time.time(), attempt, reason, workers)
            if (directory := self._directory(attempt)) is not None:
                path = os.path.join(directory, "stacks.txt")
                dump = await run_in_thread(_write, dump, path, daemon=True)
        where = f" ({dump.path})" if dump.path else ""
        for record in records:
            record.notes = (f"stacks: {dump.summary}{where}",)
        self._publish(
            StacksDumped(attempt=attempt, why=reason, summary=dump.summary, path=dump.path)
        )
        return dump

    @asynccontextmanager
    async def stopping(self, plan: StopPlan) -> AsyncIterator[None]:
        """Read the stacks of workers that are about to be killed, while they are being stopped.

        SIGKILL is not delayed: the stacks are read in the last two seconds before it.
        """
        reading = create_task(self._dump_before_kill(plan), name="stacks before SIGKILL")
        try:
            yield
        finally:
            await cancel_and_wait([reading])

    async def _dump_before_kill(self, plan: StopPlan) -> None:
        seconds = sum(step.grace for step in plan.steps)
        if seconds < _SHORT_STOP_S:
            return
        waited = seconds - min(_DUMP_S, seconds / 2)
        await self._clock.sleep(waited)
        if self._running():
            await self.dump(f"still running {waited:g} s after the stop began")

    def _running(self) -> list[WorkerRecord]:
        return [record for record in self._records.values() if record.exit is None]

    # -------------------------------------------------------------- idleness

    async def _watch_idle(self, seconds: float) -> None:
        """Report once that all workers are idle, and again after one of them was busy."""
        from elastic_aio.watch.forensics import read_activity

        since, has_reported = self._clock.now(), False
        former: dict[int, tuple[int, int]] = {}
        while True:
            now = self._clock.now()
            pids = [record.pid for record in self._running()]
            present = await run_in_thread(read_activity, pids, daemon=True)
            if not present or not _is_idle(former, present, seconds / _SAMPLES):
                since, has_reported = now, False
            elif now - since >= seconds and not has_reported:
                has_reported = True
                await self._report_idle(seconds)
                # The workers have written their stacks: that was no work.
                present = await run_in_thread(read_activity, pids, daemon=True)
            former = present
            # The kernel reports no idleness to other processes.
            await self._clock.sleep(seconds / _SAMPLES)

    async def _report_idle(self, seconds: float) -> None:
        dump = await self.dump(f"no worker has been busy for {seconds:g} s")
        self._publish(
            WorkersIdle(
                attempt=self._attempt,
                seconds=seconds,
                workers=tuple(
                    WorkerActivity(
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


def reported(record: WorkerRecord) -> str:
    """Return what a worker has reported last, for people; empty if it has reported nothing."""
    report = record.report
    if report is None:
        return ""
    parts = [
        f"step {report.step}" if report.step else "",
        f"phase {report.phase!r}" if report.phase else "",
        report.status,
    ]
    return ", ".join(filter(None, parts))


def _is_idle(
    former: Mapping[int, tuple[int, int]], present: Mapping[int, tuple[int, int]], seconds: float
) -> bool:
    """Return whether the same processes have used almost no CPU time and written nothing."""
    if former.keys() != present.keys():
        return False
    limit = _IDLE_SHARE * seconds * os.sysconf("SC_CLK_TCK")
    changes: Iterable[tuple[int, int]] = (
        (present[pid][0] - former[pid][0], present[pid][1] - former[pid][1]) for pid in present
    )
    return all(ticks <= limit and written == 0 for ticks, written in changes)


def _write(dump: StackDump, path: str) -> StackDump:
    """Append a dump to a file; return the dump with its path, if that was possible."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(dump.time))
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"==== {when}, {dump}\n")
    except OSError:
        return dump  # the disk is full, or the directory was removed
    return replace(dump, path=path)
