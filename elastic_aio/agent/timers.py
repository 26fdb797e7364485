"""The named pipe by which workers acquire timers, and the end of those that expire.

A process of the job that does not release a timer in time gets the timer's signal, and so
does the worker that it belongs to.  The stacks of all workers are read before.  The worker then
fails as if it had been killed from outside, and the restart policy applies.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import sys
import tempfile
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from msgspec import Struct

from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.timer_table import ExpiredTimer, TimerTable
from elastic_aio.aio import PausableClock, cancel_and_wait, create_task
from elastic_aio.errors import HostError
from elastic_aio.events import Event, TimerExpired, TimerRejected
from elastic_aio.process import proc
from elastic_aio.process.tree import ProcessTree
from elastic_aio.text import error_reason

_CHUNK = 4096
"""How many bytes of the pipe are read in one turn of the event loop."""
_EXPIRED_MAX = 256
"""How many timers expire in one turn of the event loop."""


class _Owned(Struct, frozen=True):
    """An expired timer, the worker that it belongs to, and the process if that is another."""

    timer: ExpiredTimer
    record: WorkerRecord | None
    process: proc.ProcEntry | None


class JobTimers:
    """The timers of one job on this host; must be closed."""

    def __init__(
        self,
        clock: PausableClock,
        tree: ProcessTree,
        publish: Callable[[Event], None],
        examine: Callable[[str], Awaitable[object]],
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            clock: measures the timers; they stand still while the job is suspended.
            tree: all processes of the job.
            publish: called with every event.
            examine: awaited before a signal is sent, with the reason.
        """
        self.path = ""
        """The pipe; empty if it is not open."""
        self._clock = clock
        self._tree = tree
        self._publish = publish
        self._examine = examine
        self._table = TimerTable()
        self._descriptor = -1
        self._status: os.stat_result | None = None
        self._records: Mapping[int, WorkerRecord] = {}
        self._attempt = 0
        self._has_reported = False
        self._alarm: asyncio.TimerHandle | None = None
        # Of the bytes that were in the pipe at a deadline, how many are not read yet.
        self._ahead = 0
        self._expired: list[ExpiredTimer] = []
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<JobTimers at {self.path or 'no pipe'}, {self._table!r}>"

    def open(self, where: bool | str) -> None:
        """Make the pipe at a path, or in the temporary directory, and read from it.

        Raises:
            HostError: the pipe cannot be made, or another process reads from one there.
        """
        own = f"{tempfile.gettempdir()}/watchdog_timer_{os.urandom(16).hex()}"
        path = where if isinstance(where, str) else own
        try:
            _remove_abandoned(path)
            os.mkfifo(path, 0o600)
            self.path = path
            self._status = os.lstat(path)
            # Open for writing too: without a writer, a pipe is always at its end of file.
            self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.close_pipe()
            reason = error_reason(error)
            raise HostError(f"cannot make the pipe of the timers at {path}: {reason}") from error
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_readable)

    def begin_attempt(self, attempt: int, records: Mapping[int, WorkerRecord]) -> None:
        """Drop the timers of the former attempt; `records` are the workers of this one."""
        self._attempt = attempt
        self._records = records
        if self._descriptor >= 0:
            with contextlib.suppress(BlockingIOError):  # a worker may read from the pipe
                os.read(self._descriptor, self._count_unread())  # of the former workers
        self._ahead = 0
        self._table.clear()

    def close_pipe(self) -> None:
        """Remove the pipe.  Idempotent."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._status is not None:
            # Another launcher may have replaced the pipe; an inode number is free for another
            # file only after the descriptor is closed.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(self.path), self._status):
                    os.unlink(self.path)
            self._status = None
        self.path = ""
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    async def aclose(self) -> None:
        """Remove the pipe and end all timers.

        Idempotent; safe to call again after cancellation.
        """
        self.close_pipe()
        if self._task is not None:
            await cancel_and_wait([self._task])

    def _count_unread(self) -> int:
        count = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder)

    def _on_readable(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, _CHUNK)
        self._table.feed(data, self._clock.now(), time.time())
        if self._table.rejected and not self._has_reported:
            self._has_reported = True
            self._publish(TimerRejected(attempt=self._attempt, why=self._table.rejected))
        if self._ahead == 0:
            self._set_alarm()
            return
        self._ahead = max(0, self._ahead - len(data)) if data else 0
        if self._ahead == 0:
            self._expire()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._descriptor >= 0 and (deadline := self._table.next_deadline) is not None:
            delay = max(0.0, deadline - self._clock.now())
            self._alarm = asyncio.get_running_loop().call_later(delay, self._on_alarm)

    def _on_alarm(self) -> None:
        # A release may be in the pipe since before the deadline.
        self._ahead = self._count_unread()
        if self._ahead == 0:
            self._expire()

    def _expire(self) -> None:
        self._expired += self._table.expire(self._clock.now(), _EXPIRED_MAX)
        if self._expired and (self._task is None or self._task.done()):
            self._task = create_task(self._end_expired(), name="expired timers")
        self._set_alarm()

    async def _end_expired(self) -> None:
        """Report the expired timers, examine the workers, and end those that have the timers.

        One scan is for all timers of processes below the workers that wait for one.
        """
        while self._expired:
            timers, self._expired = self._expired, []
            found = [item async for item in self._with_owners(timers)]
            for item in found:
                self._report(item)
            # A timer without a signal ends nothing.
            if fatal := [item for item in found if item.timer.signal]:
                await self._examine(f"timer {fatal[0].timer.scope!r} expired")
            for item in fatal:
                if item.process is not None:
                    proc.signal_process(item.process, item.timer.signal)
                if item.record is not None and item.record.exit is None:
                    self._tree.signal_leaders(item.timer.signal, item.record.pid)

    async def _with_owners(self, timers: list[ExpiredTimer]) -> AsyncIterator[_Owned]:
        """Yield the timers of workers that run, and of other processes of the job."""
        records = {timer.pid: self._record_of(timer.pid) for timer in timers}
        processes: dict[int, proc.ProcEntry] = {}
        if None in records.values():
            processes = {entry.pid: entry for entry in await self._tree.descendants() or ()}
        for timer in timers:
            process, record = processes.get(timer.pid), records[timer.pid]
            if record is not None:
                if record.exit is None:
                    yield _Owned(timer, record, None)
                continue
            if process is None:
                continue  # it has ended, or is none of ours
            record = self._record_of(process.session)
            ancestor: proc.ProcEntry | None = process
            while record is None and ancestor is not None:
                record = self._record_of(ancestor.parent)
                ancestor = processes.get(ancestor.parent)
            yield _Owned(timer, record, process)

    def _report(self, item: _Owned) -> None:
        timer, record = item.timer, item.record
        if record is not None:
            times = f"{round(timer.age, 2):g} s (limit {round(timer.limit, 2):g} s)"
            record.expired_timer = f"timer {timer.scope!r} expired after {times}"
        self._publish(
            TimerExpired(
                attempt=self._attempt,
                rank=-1 if record is None else record.ranks.rank,
                local_rank=-1 if record is None else record.ranks.local_rank,
                pid=timer.pid,
                scope=timer.scope,
                age=timer.age,
                limit=timer.limit,
                signal=timer.signal,
            )
        )

    def _record_of(self, pid: int) -> WorkerRecord | None:
        return next((record for record in self._records.values() if record.pid == pid), None)


def _remove_abandoned(path: str) -> None:
    """Remove a pipe that a launcher has left that was killed.

    Raises:
        OSError: a process reads from the pipe, or it cannot be removed.
    """
    if not (os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode)):
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no reader
            raise
        os.unlink(path)
    else:
        raise FileExistsError(errno.EEXIST, "another process reads from it")
