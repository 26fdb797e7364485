"""All processes of a job on this host, and how they are stopped.

The workers themselves (the *leaders*, each of a session) are our children and known by
their futures.  Their descendants are found by scans of /proc (`proc_scan`).

`ProcessTree.stop` takes the steps of the stop plan (a signal, a grace period), and last
SIGKILL with `reap_timeout`.  One step does the following:

1. Record the descendants of the leaders.  A child with a session of its own and an
   empty environment is known by its parent only, and the signal may end the parent.
2. Signal the leaders at once, without a scan: they should learn of a peer's failure
   within a millisecond, and a scan takes several.
3. Scan, and signal each descendant that has not had this step's signal yet, also those
   that were started meanwhile, perhaps in response to the signal.
4. Wait until all that were signalled have ended, and scan again.  The step is over when
   two scans in a row find nothing.

Two clean scans, because one is not a snapshot: readdir(3) of /proc passes pids in
ascending order while processes fork and exit.  A process that is about to be read may
fork a child with a lower pid (the numbers wrap around) and exit: the scan sees neither.
The child is there for the next scan.

Signals go through pidfds, since a pid may be used again between scan and kill(2): the
pidfd is opened, then the start time is read again, and from there on pidfd_open(2)
guarantees that it stands for that process.  It also becomes readable at the exit of any
process, child or not, so waiting needs no polling.  At most 64 are open for this at a
time; other processes are signalled, but not watched, and found again by the next scan.

At the end of a grace period the next step begins with what is left, and is reported as
an escalation.  Graces are measured by a clock that excludes suspensions of the job.
`escalate_to_kill` skips to the last step.  What is left after that cannot be killed
(uninterruptible sleep): it is returned, not waited for, so a stop ends in bounded time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from elastic_aio.aio import PausableClock, set_result_if_pending, when_all_done
from elastic_aio.process import proc_scan
from elastic_aio.process.base import Child
from elastic_aio.process.exits import PidfdWatch
from elastic_aio.process.orphans import Orphans
from elastic_aio.spec.stop import StopPlan, StopStep

# Seconds for which a long list may be worked through before other tasks run.
_SLICE_S = 0.002
# How many descendants are watched at a time, by a descriptor each.
_WATCHES_MAX = 64
# Seconds between two scans when there is nothing to wait for, and how many scans may
# fail before that is an error.
_RETRY_S = 0.005
_SCANS_MAX = 200

OnEscalation = Callable[[int, tuple[int, ...]], None]


class Survivor(Struct, frozen=True):
    """A process that SIGKILL did not end in time, and its state in /proc."""

    pid: int
    state: str


class ProcessTree:
    """The leaders of one job on this host and all their descendants."""

    def __init__(self, marker: str, clock: PausableClock, session_list: int) -> None:
        """Start empty.

        Args:
            marker: name of a variable in the environment of every worker.
            clock: measures the grace periods.
            session_list: its descriptor; the caller closes it, after `close`.
        """
        self._marker = marker.encode("ascii")
        # One tick earlier: processes of the present tick may be older or newer.
        self._since = proc_scan.ticks_now() - 1
        self._clock = clock
        self._session_list = session_list
        self._leaders: dict[int, Child] = {}
        self._sessions: dict[int, proc_scan.WorkerSession] = {}
        self._signalled: set[int] = set()
        self._descendants: dict[int, int] = {}  # pid -> start, see _record_descendants
        self._excluded: tuple[int, int] | None = None
        self._cache = proc_scan.ScanCache()
        self.orphans = Orphans()
        self._must_kill: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        live = len(self._running())
        return f"<ProcessTree with {live} of {len(self._leaders)} leaders alive>"

    @property
    def marker(self) -> str:
        """Name of a variable in the environment of every worker."""
        return self._marker.decode("ascii")

    @property
    def since(self) -> int:
        """Clock ticks since boot at which the job began."""
        return self._since

    def add(self, leader: Child) -> None:
        """Add a child that has just been started."""
        entry = _read_process(leader.pid)
        # Not readable: it has started now, give or take a tick.
        opened = proc_scan.ticks_now() if entry is None else entry.start
        session = proc_scan.WorkerSession(leader.pid, opened)
        self._leaders[leader.pid] = leader
        self._sessions[leader.pid] = session
        self._write_session(session)
        if leader.exited.done():
            self._close(session)
        else:
            leader.exited.add_done_callback(lambda _: self._close(session))

    def exclude(self, pid: int) -> None:
        """Do not stop a process nor the session that it leads: it serves all attempts.

        It has the job's marker, so that the guardian ends it with the job.
        """
        entry = _read_process(pid)
        self._excluded = None if entry is None else entry.identity

    def escalate_to_kill(self) -> None:
        """Skip to SIGKILL in the present stop and in all later ones."""
        set_result_if_pending(self._must_kill, None)

    async def descendants(self) -> list[proc_scan.ProcEntry]:
        """Scan for all live processes of the job, leaders included.

        Raises:
            OSError: for a second, no scan succeeded (see `proc_scan.find_descendants`).
        """
        for _ in range(_SCANS_MAX):
            try:
                return await self._scan()
            except OSError:
                # No descriptor left, and no event reports the end of that.
                await self._clock.sleep(_RETRY_S)
        return await self._scan()

    async def _scan(self) -> list[proc_scan.ProcEntry]:
        self._descendants.update(self.orphans.find(self._since))
        scan = proc_scan.find_descendants(
            self._marker, self._since, self._sessions, self._descendants, self._cache
        )
        yielder = _Yielder()
        while True:
            try:
                pause = next(scan)
            except StopIteration as end:
                entries: list[proc_scan.ProcEntry] = end.value
                self.orphans.note(entries)
                return [entry for entry in entries if not self._is_excluded(entry)]
            if pause:
                await asyncio.sleep(pause)  # no event reports the end of an exec
            await yielder.maybe_yield()

    def _is_excluded(self, process: proc_scan.ProcEntry) -> bool:
        if self._excluded is None:
            return False
        pid, start = self._excluded
        # Its pid is not used again while it lives, and a member of its session is no
        # worker: those lead sessions of their own.
        return process.identity == self._excluded or (
            process.session == pid and process.start >= start
        )

    async def forget_if_empty(self) -> bool:
        """Forget the leaders if two scans find no process; return whether that is so."""
        if await self.descendants() or await self.descendants():
            return False
        await _run_exit_callbacks()
        self._forget_ended()
        return True

    def was_signalled(self, pid: int) -> bool:
        """Return whether a leader was running when its stop began."""
        return pid in self._signalled

    def signal_leaders(self, number: int) -> tuple[int, ...]:
        """Send a signal to the leaders only; return the pids that received it."""
        return tuple(pid for pid, leader in self._leaders.items() if leader.send_signal(number))

    async def signal_all(self, number: int) -> None:
        """Send a signal to all live processes of the job, once."""
        for process in await self.descendants():
            proc_scan.signal_process(process, number)

    async def stop(self, plan: StopPlan, on_escalation: OnEscalation) -> list[Survivor]:
        """Stop all processes of the job by `plan` (see the module's docstring).

        Cancellation: leaves processes running.  Idempotent; safe to call again after
        cancellation.

        Args:
            plan: the signals and their grace periods.
            on_escalation: called with the signal and the pids of what is left before
                every step but the first.

        Returns:
            The processes that could not be killed.
        """
        steps = (*plan.steps, StopStep(signal.SIGKILL, plan.reap_timeout))
        is_empty = False
        for position, step in enumerate(steps):
            is_last = step is steps[-1]
            if self._must_kill.done() and not is_last:
                continue
            if position and (left := await self.descendants()):
                on_escalation(step.signal, tuple(process.pid for process in left))
            is_empty = await self._signal_until_gone(step, is_last)
            if is_empty:
                break
        survivors = [] if is_empty else [_survivor(entry) for entry in await self.descendants()]
        listed = {survivor.pid for survivor in survivors}
        survivors += [
            Survivor(leader.pid, "not reaped yet")
            for leader in self._running()
            if leader.pid not in listed
        ]
        self._forget_ended()
        return survivors

    async def _signal_until_gone(self, step: StopStep, is_last: bool) -> bool:
        """Take one step of a stop; return whether all processes ended within its grace."""
        end = self._clock.now() + step.grace
        await self._record_descendants()
        yielder = _Yielder()
        with _Watches() as watches:
            for leader in self._running():
                self._signal_leader(leader, step.signal)
                watches.leaders.add(leader.pid)
                await yielder.maybe_yield()
            # The signalled processes are queued on this CPU: let them run before the
            # scan (several ms).
            os.sched_yield()
            clean_scans = 0
            while clean_scans < 2:
                alive = await self.descendants()
                for process in alive:
                    self._signal_and_watch(process, step.signal, watches)
                    await yielder.maybe_yield()
                running = (leader.exited for leader in self._running())
                pending: list[asyncio.Future[Any]] = [*watches.exits(), *running]
                if not alive and not pending:
                    clean_scans += 1
                    continue
                clean_scans = 0
                if not pending:
                    # They ended after the scan, or no descriptor is left to watch them:
                    # no event reports their end.
                    await self._clock.sleep(_RETRY_S)
                ends = [when_all_done(pending), *([] if is_last else [self._must_kill])]
                in_time = await self._clock.wait_for(*ends, seconds=end - self._clock.now())
                if not in_time or (self._must_kill.done() and not is_last):
                    return False
        await _run_exit_callbacks()
        return True

    def _signal_and_watch(
        self, process: proc_scan.ProcEntry, number: int, watches: _Watches
    ) -> None:
        leader = self._leaders.get(process.pid)
        if leader is None or leader.exited.done():
            watches.signal(process, number)
        elif process.pid not in watches.leaders:
            watches.leaders.add(process.pid)
            self._signal_leader(leader, number)

    def _signal_leader(self, leader: Child, number: int) -> None:
        if leader.has_ended():
            return  # not because of this stop: it is no victim
        self._signalled.add(leader.pid)
        leader.send_signal(number)
        entry = None if number == signal.SIGKILL else _read_process(leader.pid)
        if entry is not None and _needs_continue(entry, number):
            leader.send_signal(signal.SIGCONT)

    async def _record_descendants(self) -> None:
        """Record the descendants of the leaders while their parents live."""
        yielder = _Yielder()
        for leader in list(self._leaders.values()):
            if leader.exited.done():
                continue
            try:
                for entry in proc_scan.iter_descendants(leader.pid):
                    self._descendants[entry.pid] = entry.start
                    await yielder.maybe_yield()
            except OSError:
                return  # no descriptor left; the scan waits for one

    def _running(self) -> list[Child]:
        return [leader for leader in self._leaders.values() if not leader.exited.done()]

    def _forget_ended(self) -> None:
        for pid, leader in list(self._leaders.items()):
            if leader.exited.done():
                del self._leaders[pid]
                del self._sessions[pid]
                self._signalled.discard(pid)
        if not self._leaders:
            self._descendants.clear()
        if self._session_list >= 0:
            proc_scan.write_session_list(self._session_list, self._sessions.values())

    def _close(self, session: proc_scan.WorkerSession) -> None:
        session.closed = proc_scan.ticks_now()
        if self._sessions.get(session.number) is session:
            self._write_session(session)

    async def aclose(self) -> None:
        """Stop writing the session list, whose file is about to be closed, and adopting orphans.

        Idempotent; safe to call again after cancellation.
        """
        self._session_list = -1
        await self.orphans.aclose()

    def _write_session(self, session: proc_scan.WorkerSession) -> None:
        if self._session_list >= 0:  # else a process that could not be killed has ended after all
            row = list(self._sessions).index(session.number)
            proc_scan.write_session(self._session_list, row, session)


class _Watches:
    """The processes that one step has signalled; descendants are watched until they end."""

    def __init__(self) -> None:
        self.leaders: set[int] = set()  # a pid suffices: it is not used until reaped
        self._signalled: set[tuple[int, int]] = set()
        self._watched: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._watches: list[PidfdWatch] = []

    def __enter__(self) -> _Watches:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.close()

    def exits(self) -> list[asyncio.Future[None]]:
        return [future for future in self._watched.values() if not future.done()]

    def signal(self, process: proc_scan.ProcEntry, number: int) -> None:
        """Signal a process once, and watch it unless too many are watched already.

        The embedding program needs descriptors too.  Processes that are not watched are
        found again by the scan that follows the end of the watched ones.
        """
        identity = process.identity
        has_room = len(self.exits()) < _WATCHES_MAX
        if identity in self._watched or (identity in self._signalled and not has_room):
            return
        try:
            descriptor = proc_scan.open_pidfd(process)
        except OSError:
            return  # no descriptor left; the next scan tries again
        if descriptor is None:
            return
        if identity not in self._signalled:
            self._signalled.add(identity)
            proc_scan.send(descriptor, number)
            if _needs_continue(process, number):
                proc_scan.send(descriptor, signal.SIGCONT)
        if has_room:
            ended = asyncio.get_running_loop().create_future()
            self._watched[identity] = ended
            self._watches.append(
                PidfdWatch(descriptor, partial(set_result_if_pending, ended, None))
            )
        else:
            os.close(descriptor)


class _Yielder:
    """Yields to other tasks while a long list is worked through."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + _SLICE_S

    async def maybe_yield(self) -> None:
        """Yield to the loop if the time slice is over."""
        if time.perf_counter() > self._end:
            await asyncio.sleep(0)
            self._end = time.perf_counter() + _SLICE_S


async def _run_exit_callbacks() -> None:
    """Let the callbacks of exits run that this iteration of the loop has seen.

    They run one iteration after their future is done, and call `was_signalled`, whose
    answer is about to be forgotten.
    """
    await asyncio.sleep(0)


def _needs_continue(process: proc_scan.ProcEntry, number: int) -> bool:
    """Return whether a process is stopped: it acts on a signal only after SIGCONT."""
    return process.state == "T" and number not in (signal.SIGKILL, signal.SIGSTOP)


def _read_process(pid: int) -> proc_scan.ProcEntry | None:
    try:
        return proc_scan.read_process(pid)
    except OSError:
        return None  # no descriptor left


def _survivor(process: proc_scan.ProcEntry) -> Survivor:
    try:
        with open(f"/proc/{process.pid}/wchan", encoding="ascii") as file:
            function = file.read().strip()
    except OSError:
        function = ""
    suffix = f" in {function}" if function not in ("", "0") else ""
    return Survivor(process.pid, f"{process.state}{suffix}")
