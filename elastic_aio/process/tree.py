"""All processes of a job on this host, and how they are stopped.

The workers themselves (the *leaders*, each of a session) are our children, and known by their
futures; their descendants are found by scans of /proc (`descendants`).  `ProcessTree.stop` takes
the steps of the stop plan (a signal, a grace period), and last SIGKILL with `reap_timeout`:

1. Record the descendants of each leader before its signal.  A child with a session of its own and
   an empty environment is known by its parent only, and the signal may end the parent.  Its turn is
   known by the parent too: it gets its signal when its own leader has ended.
2. Signal the leaders at once, without a scan: they should learn of a peer's failure within a
   millisecond, and a scan takes several.  `begin_stop` does it in the iteration of the loop that
   has seen the failure.
3. Wait for the leaders that end at once, for milliseconds.
4. Scan, and signal each descendant whose turn it is (`stop_order`) and that has not had this step's
   signal yet, also those that were started after it, perhaps in response to it.  A step with the
   target "all", and the last step, SIGKILL, signal every descendant.
5. Wait until all signalled processes have ended, or one that others wait for, and scan again.  The
   step is over when two scans in a row find nothing.

A single clean scan would not do, because it is no snapshot: readdir(3) of /proc passes pids in
ascending order while processes fork and exit.  A process that is about to be read may fork a child
with a lower pid (the numbers wrap around) and exit: the scan sees neither.  The next scan sees the
child.

Waiting needs no polling: a pidfd becomes readable at the exit of any process, child or not.  At
most 64 are open for this at a time; other processes are signalled, but not watched, and the next
scan finds them again.

At the end of a grace period the next step begins with what is left, and is reported as an
escalation.  Graces are measured by a clock that excludes suspensions of the job. `escalate_to_kill`
skips to the last step.  What is left after that (in uninterruptible sleep) is returned, not waited
for.  Another user's process refuses signals: it passes its turn to its children, may end by itself
in each grace, and has a moment once SIGKILL has ended the others.

A stop also ends where processes cannot be found or watched: a program that embeds us can run out of
descriptors (two are kept, to scan and to signal), and /proc may show the pids of another namespace.
Descendants are not watched then; scans, a few milliseconds apart, find what is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from elastic_aio.aio import PausableClock, set_result_if_pending, when_all_done
from elastic_aio.process import proc, stop_order
from elastic_aio.process.adopted import Orphans
from elastic_aio.process.children import Child, ChildExit, PidfdChild, PidfdWatch
from elastic_aio.process.descendants import Scanner, SessionList, WorkerSession
from elastic_aio.spec.stop import StopPlan, StopStep

# Seconds for which a long list may be worked through before other tasks run.
_SLICE_S = 0.002
# Descriptors that are kept for scans and signals when no other is left.
_RESERVE = 2
# How many descendants are watched at a time, by a descriptor each.
_WATCHES_MAX = 64
# Seconds between two scans when there is nothing to wait for, and for which scans may fail.
_RETRY_S = 0.005
# Seconds for which descendants wait for a scan, which looks for them while leaders end.
_END_AT_ONCE_S = 0.005
# Seconds for which a stop waits, at most, until what has ended is reaped.
_REAPED_S = 1.0
_BLIND_S = 0.25
# While leaders end one after the other: seconds of scans at once, then their part of the time.
_SCANS_AT_ONCE_S = 0.05
_SCAN_SHARE = 0.1
_PAUSE_MAX_S = 0.5

T = TypeVar("T")
OnEscalation = Callable[[int, tuple[int, ...]], None]


class Survivor(Struct, frozen=True):
    """A process that SIGKILL did not end in time; `state` says why, and whose it is.

    The pid is 0 if /proc could not be read, so that nothing is known about descendants.
    `is_denied`: neither this process nor the guardian may signal it.
    """

    pid: int
    state: str
    program: str = ""
    is_denied: bool = False


class ProcessTree:
    """The leaders of one job on this host and all their descendants."""

    def __init__(
        self,
        marker: str,
        clock: PausableClock,
        listed: SessionList,
        *,
        since: int | None = None,
        scanner: Scanner | None = None,
    ) -> None:
        """Start empty.

        Args:
            marker: name of a variable in the environment of every worker.
            clock: measures the grace periods.
            listed: the workers' sessions.
            since: clock ticks since boot at which the job began; None: now.
            scanner: finds the processes; None: by `marker` and `since`.
        """
        self._marker = marker.encode("ascii")
        # One tick earlier: processes of the present tick may be older or newer.
        self._since = proc.ticks_now() - 1 if since is None else since
        self._clock = clock
        self._listed = listed
        self._starting_at = 0  # ticks since boot
        self._leaders: dict[int, Child] = {}
        self._signals: dict[int, set[int]] = {}  # sent by stops, by pid of the leader
        self._descendants: dict[int, int] = {}  # pid -> start, see _record_descendants
        self._owners: dict[tuple[int, int], int] = {}  # leaders of processes, by identity
        self._ignored = stop_order.Ignored()  # before the stop
        self._denied: set[int] = set()  # pids of processes that refuse signals of this one
        self._server: Child | None = None
        self._excluded: WorkerSession | None = None
        self._is_foreign = proc.is_foreign()
        self._is_starting = False
        self._reserve: list[int] = []
        self._keep_descriptors()
        self.orphans = Orphans()
        self.on_kill: Callable[[], object] = bool
        """Called in the last step of a stop, when the leaders have had SIGKILL: a cgroup can kill
        what no scan would find."""
        sessions = self._listed.sessions
        adopters = self.orphans.adopters
        self._scanner = scanner or Scanner(
            self._marker, self._since, sessions, adopters, program=self._listed.program
        )
        self._begun: tuple[StopStep, _Watches] | None = None  # see `begin_stop`
        self._must_kill: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        live = len(self._running())
        return f"<ProcessTree with {live} of {len(self._leaders)} leaders alive>"

    @property
    def marker(self) -> str:
        return self._marker.decode("ascii")

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Tell the guardian that children are being started, which it may not recognize yet.

        They have executed their programs when the block ends, and `add` may follow later.  A
        block within another one, for one child, tells the guardian nothing.
        """
        self._starting_at = proc.ticks_now()
        if self._is_starting:
            yield
            return
        self._is_starting = True
        self._listed.set_starting(self._starting_at - 1)
        try:
            yield
        finally:
            self._is_starting = False
            self._listed.set_starting(None)

    def add(self, leader: Child) -> None:
        """Add a child that has just been started, and let it run its program."""
        self._leaders[self._list(leader).number] = leader

    def _list(self, leader: Child) -> WorkerSession:
        pid = _shown_pid(leader) if self._is_foreign else leader.pid
        opened = proc.ticks_now()
        # Else it has started in this tick.  The read waits for its exec, for milliseconds.
        if opened != self._starting_at and (entry := _read_process(pid)) is not None:
            opened = entry.start  # not readable: it has started now, give or take a tick
        session = WorkerSession(pid, opened)
        self._listed.add(session)
        leader.release()
        if leader.exited.done():
            self._close(session)
        else:
            leader.exited.add_done_callback(lambda _: self._close(session))
        return session

    def exclude(self, server: Child) -> None:
        """Do not stop a child nor the session that it leads: it serves all attempts.

        It is on the session list, so that the guardian ends it with the job.
        """
        self._excluded = self._list(server)
        self._server = server

    async def include(self) -> None:
        """Stop all processes from now on, also those that were excluded.  Idempotent."""
        if self._excluded is not None and self._server is not None:
            self._leaders[self._excluded.number] = self._server
            self._excluded = self._server = None
            await self._record_descendants()

    def escalate_to_kill(self, reason: str) -> None:
        """Skip to SIGKILL in the present stop and in all later ones."""
        set_result_if_pending(self._must_kill, reason)

    def kill_reason(self) -> str:
        """Return why stops skip to SIGKILL; empty if they do not."""
        return str(self._must_kill.result()) if self._must_kill.done() else ""

    async def descendants(self, seconds: float = _BLIND_S) -> list[proc.ProcEntry] | None:
        """Scan for all live processes of the job, leaders included.

        Returns None if no scan succeeded for so many seconds: this process has no descriptors left,
        or there is no /proc.
        """
        end = self._clock.now() + seconds
        while True:
            try:
                return await self._scan()
            except OSError:
                if self._reserve:
                    self._free_descriptors()
                elif (left := end - self._clock.now()) > 0:
                    # No event reports that a descriptor is free again.
                    await self._clock.sleep(min(left, _RETRY_S))
                else:
                    return None

    def _keep_descriptors(self) -> None:
        try:
            while len(self._reserve) < _RESERVE:
                self._reserve.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return  # none is left; the next stop tries again

    def _free_descriptors(self) -> None:
        while self._reserve:
            os.close(self._reserve.pop())

    async def _scan(self) -> list[proc.ProcEntry]:
        self._descendants.update(self.orphans.find(self._since))
        known = dict(self._descendants)
        scan = self._scanner.find(known)
        yielder = Yielder()
        while True:
            try:
                pause = next(scan)
            except StopIteration as end:
                entries: list[proc.ProcEntry] = end.value
                self.orphans.note(entries)
                ours = [entry for entry in entries if not self._is_excluded(entry)]
                # What has been found remains a process of the job without its parents too.
                newer = dict(self._descendants.items() - known.items())
                self._descendants = newer | {entry.pid: entry.start for entry in ours}
                return ours
            if pause:
                await asyncio.sleep(pause)  # no event reports the end of an exec
            await yielder.maybe_yield()

    def _is_excluded(self, process: proc.ProcEntry) -> bool:
        # A member of its session is no worker: those lead sessions of their own.
        session = self._excluded
        return (
            session is not None
            and process.session == session.number
            and session.is_certain(process.pid, process.start)
        )

    async def forget_if_empty(self) -> bool:
        """Forget the leaders if two scans find no process; return whether that is so."""
        if await self.descendants() != [] or await self.descendants() != []:
            return False
        await self._wait_reaped()
        self._forget_ended()
        return True

    def stop_signals(self, pid: int) -> frozenset[int]:
        """Return the signals that stops have sent to a leader while it was running."""
        return frozenset(self._signals.get(pid, ()))

    def signal_leaders(self, number: int, pid: int | None = None) -> tuple[int, ...]:
        """Send a signal to the leaders only, or to one; return the pids that received it."""
        wanted = [leader for leader in self._leaders.values() if pid in (None, leader.pid)]
        return tuple(leader.pid for leader in wanted if leader.send_signal(number))

    def forward(self, number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Send a signal to the workers that do not end by its default action.

        If a leader is a shell without a handler, the processes that it waits for get it.  Returns
        the leaders of these workers, and the leaders of the workers that are left out.
        """
        is_ended = partial(proc.is_ended_by, number=number)
        sent, unhandled = [], []
        for pid, leader in self._running():
            receivers = stop_order.receivers_of(pid, is_ended, _foreground_of)
            if receivers is None:
                unhandled.append(leader.pid)
            elif receivers or leader.send_signal(number):
                sent.append(leader.pid)
            for process in receivers or ():
                proc.signal_process(process, number)
        return tuple(sent), tuple(unhandled)

    async def signal_all(self, number: int) -> None:
        """Send a signal to all live processes of the job, once."""
        for process in await self.descendants() or ():
            proc.signal_process(process, number)

    def begin_stop(self, plan: StopPlan) -> None:
        """Send the first signal of a plan to the leaders now; `stop` has to follow.

        `stop` sends it instead if it is SIGKILL, or to the leaders whose descendants take long to
        record.
        """
        self._begun = None
        if self._must_kill.done() or not plan.steps:
            return
        step, watches, leaders = plan.steps[0], _Watches(self._denied), self._running()
        end = time.perf_counter() + _SLICE_S
        for pid, leader in leaders:
            # One after the other: of many leaders, the first ones do not wait for the last.
            if not all(time.perf_counter() < end for _ in self._recorded(pid)):
                break
            self._signal_leader(pid, leader, step.signal, watches, not plan.reaches_all(step))
        for pid, leader in leaders:
            if pid in watches.leaders:
                _continue_leader(pid, leader, step.signal)
        os.sched_yield()  # see `_signal_leaders`
        self._begun = step, watches

    async def stop(self, plan: StopPlan, on_escalation: OnEscalation) -> list[Survivor]:
        """Stop all processes of the job by a plan; return the processes that could not be killed.

        `on_escalation` gets the signal and the pids of what is left before every step but the
        first.

        Cancellation: leaves processes running.  Idempotent.
        """
        steps = (*plan.steps, StopStep(signal.SIGKILL, plan.reap_timeout))
        begun, self._begun = self._begun, None
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)  # a stopped one reaps no worker
        is_empty = False
        for position, step in enumerate(steps):
            is_last = step is steps[-1]
            if self._must_kill.done() and not is_last:
                continue
            if position and (left := await self._remaining()):
                self._denied.clear()  # a process may change its user
                on_escalation(step.signal, tuple(one.pid for one in left if one.pid))
            is_empty = await self._signal_until_gone(
                step.signal,
                step.grace,
                is_last=is_last,
                is_ordered=not (is_last or plan.reaches_all(step)),
                # A plan may have one step several times.
                watches=begun[1] if begun and begun[0] is step and not position else None,
            )
            if is_empty:
                break
        survivors = [] if is_empty else await self._remaining()
        self._ignored = stop_order.Ignored()
        if not survivors:  # else the guardian needs the sessions
            self._forget_ended()
        self._keep_descriptors()
        return survivors

    async def linger(self, seconds: float, until: asyncio.Future[Any]) -> bool:
        """Wait for all processes to end, and signal none; return whether they have ended.

        `until` ends the wait, as a kill does.
        """
        if self._must_kill.done() or until.done():
            return False
        is_empty = await self._signal_until_gone(0, seconds, until=until)
        if is_empty:
            self._forget_ended()
        return is_empty

    async def wait_reaped(self, seconds: float) -> list[Survivor]:
        """Wait until the leaders that others have killed are reaped; return what still runs."""
        await self._clock.wait_for(when_all_done(self._exits()), seconds=seconds)
        await self._wait_reaped()
        survivors = [survivor for survivor in await self._remaining() if survivor.pid]
        if not survivors:
            self._forget_ended()
        return survivors

    async def _remaining(self) -> list[Survivor]:
        descendants, yielder = await self.descendants(), Yielder()
        survivors = [Survivor(0, "/proc could not be read")] if descendants is None else []
        for entry in descendants or ():
            survivors.append(_survivor(entry, is_denied=entry.pid in self._denied))
            await yielder.maybe_yield()
        left = {pid for pid, _ in self._running()} - {survivor.pid for survivor in survivors}
        return [*survivors, *(Survivor(pid, "not reaped yet") for pid in left)]

    async def _signal_until_gone(
        self,
        number: int,
        grace: float,
        *,
        is_last: bool = False,
        is_ordered: bool = False,
        watches: _Watches | None = None,
        until: asyncio.Future[Any] | None = None,
    ) -> bool:
        """Take a step of a stop; return whether all processes ended within its grace.

        Args:
            number: the signal; 0 for none.
            grace: seconds.
            is_last: the step is not cut short by a kill, and lasts only as long as something
                can be killed.
            is_ordered: leaders are signalled first.
            watches: of `begin_stop`.
            until: ends the step.
        """
        end = self._clock.now() + grace
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        early = (never if is_last else self._must_kill, until or never)
        with watches or _Watches(self._denied) as watches:
            await self._signal_leaders(number, watches, is_ordered)
            if is_last:
                self.on_kill()
            if is_ordered and watches.leaders:
                # Most end at once: a scan would only take a processor from them.
                ended = when_all_done(self._exits())
                await self._clock.wait_for(ended, *early, seconds=min(grace, _END_AT_ONCE_S))
            clean_scans, pace = 0, _ScanPace(self._clock)
            while clean_scans < 2:
                watches.is_blind = False
                alive = await pace.timed(self.descendants())
                watches.has_room = bool(self._reserve) and not self._is_foreign
                holders = await self._signal_due(alive or [], number, watches, is_ordered)
                end = self._end_of_kill(end, alive or ()) if is_last else end
                pending = self._awaited(watches, is_last=is_last) or holders
                if not alive and not pending:
                    if alive is not None:
                        clean_scans += 1
                        continue
                    if is_last:
                        return False  # what could be killed is dead, and the rest is unknown
                clean_scans = 0
                left = end - self._clock.now()
                if pending:
                    ended = when_all_done(pending)
                    # No event reports the end of a process that is not watched.
                    seconds = min(left, _PAUSE_MAX_S) if watches.is_blind else left
                    await self._clock.wait_for(ended, *early, *holders, seconds=seconds)
                    pause = min(pace.pause(), end - self._clock.now())
                    await self._clock.wait_for(ended, *early, seconds=pause)
                else:  # they ended after the scan, or no event reports their end
                    await self._clock.wait_for(*early, seconds=min(left, _RETRY_S))
                if self._clock.now() >= end or any(event.done() for event in early):
                    return False
        await self._wait_reaped()
        return True

    def _awaited(self, watches: _Watches, *, is_last: bool) -> list[asyncio.Future[Any]]:
        """Return the exits that a step waits for: of the last one, what SIGKILL can end first."""
        able: list[asyncio.Future[Any]] = watches.exits(but=self._denied)
        able += self._exits(but=self._denied)
        return able if is_last and able else [*watches.exits(), *self._exits()]

    def _end_of_kill(self, end: float, alive: Iterable[proc.ProcEntry]) -> float:
        """Return when the last step ends: soon if all that is left refuses signals."""
        left = {process.pid for process in alive}.union(pid for pid, _ in self._running())
        may_end = left and left <= self._denied
        return min(end, self._clock.now() + stop_order.DRAIN_S) if may_end else end

    async def _signal_leaders(self, number: int, watches: _Watches, is_ordered: bool) -> None:
        yielder = Yielder()
        left = [(pid, one) for pid, one in self._running() if pid not in watches.leaders]
        if not left:
            return
        await self._record_descendants()
        for pid, leader in left:
            self._signal_leader(pid, leader, number, watches, is_ordered)
            _continue_leader(pid, leader, number)
            await yielder.maybe_yield()
        # The signalled processes are queued on this CPU: let them run before the
        # scan (several ms).
        os.sched_yield()

    async def _signal_due(
        self,
        processes: list[proc.ProcEntry],
        number: int,
        watches: _Watches,
        is_ordered: bool,
    ) -> list[asyncio.Future[Any]]:
        """Signal and watch the processes whose turn it is; return what others wait for."""
        holders: set[int] = set()
        due, known = processes, len(watches.foreground) + len(self._denied)
        if is_ordered:
            running = {pid for pid, _ in self._running()}
            for process in processes:
                self._ignored.note(process, self._owner_of(process))
            ignoring = self._ignored.pids(processes, number) | self._denied
            try:
                due, holders = stop_order.next_due(
                    processes, running, self._owner_of, ignoring, watches.foreground
                )
            except OSError:
                pass  # no descriptor left: all that the scan has found are due
            for process in set(processes).difference(due):
                if proc.needs_continue(process, number):
                    proc.signal_process(process, signal.SIGCONT)  # others may need it
        yielder = Yielder()
        rests: list[float] = []
        now = self._clock.now()
        for process in due:
            leader = self._leaders.get(process.pid)
            if leader is None or leader.exited.done():
                rest = watches.rest(process, number, now) if is_ordered else 0.0
                rests += [rest] if rest else []
                self._signal_descendant(process, 0 if rest else number, watches, is_ordered)
            elif process.pid not in watches.leaders:
                self._signal_leader(process.pid, leader, number, watches, is_ordered)
                _continue_leader(process.pid, leader, number)
            await yielder.maybe_yield()
        if watches.is_short:
            self._free_descriptors()  # a signal takes two at a time, and a scan one
        if len(watches.foreground) + len(self._denied) > known:  # the turn is passed on
            return await self._signal_due(processes, number, watches, is_ordered)
        awaited = [leader.exited for pid, leader in self._running() if pid in holders]
        timer = [_timer(min(rests))] if rests else []
        return [*awaited, *watches.exits(holders), *timer]

    async def staying(self) -> list[proc.ProcEntry]:
        """Return the processes that do not end by themselves soon."""
        found = await self.descendants() or []
        try:
            return [process for process in found if not stop_order.may_leave(process.pid)]
        except OSError:
            return found  # no descriptor left to look

    def _owner_of(self, process: proc.ProcEntry) -> int | None:
        """Return the leader of a process without parents in the job; None: it is unknown."""
        if process.session in self._listed.sessions:
            return process.session
        return self._owners.get(process.identity)

    def _signal_descendant(
        self, process: proc.ProcEntry, number: int, watches: _Watches, is_ordered: bool
    ) -> None:
        if number:
            self._ignored.note_signal(self._owner_of(process))
            # Later on, a trap of the shell may wait for what it has started.
            if is_ordered and process.identity not in watches.signalled:
                watches.foreground.update(one.identity for one in _foreground_of(process.pid))
        watches.send(process, number)

    def _signal_leader(
        self, pid: int, leader: Child, number: int, watches: _Watches, is_ordered: bool
    ) -> None:
        watches.leaders.add(pid)
        foreground = _foreground_of(pid) if is_ordered else []
        self._ignored.note_signal(pid)
        if leader.send_signal(number):  # else it has ended, and is no victim of this stop
            watches.foreground.update(one.identity for one in foreground)
            self._signals.setdefault(leader.pid, set()).add(number)
        elif not leader.has_ended() and proc.is_denied(pid):
            self._denied.add(pid)

    async def _record_descendants(self) -> None:
        yielder = Yielder()
        for pid, _ in self._running():
            for _ in self._recorded(pid):
                await yielder.maybe_yield()

    def _recorded(self, leader: int) -> Iterator[proc.ProcEntry]:
        """Record the descendants of a leader while their parents live, and yield each."""
        try:
            if process := proc.read_process(leader):
                self._ignored.note(process, leader)
            for entry in proc.iter_descendants(leader):
                self._descendants[entry.pid] = entry.start
                self._owners[entry.identity] = leader
                self._ignored.note(entry, leader)
                yield entry
        except OSError:
            return  # no descriptor left; the scan waits for one

    def _exits(self, but: Container[int] = ()) -> list[asyncio.Future[ChildExit]]:
        return [leader.exited for pid, leader in self._running() if pid not in but]

    def _running(self) -> list[tuple[int, Child]]:
        leaders = self._leaders.items()
        return [(pid, leader) for pid, leader in leaders if not leader.exited.done()]

    async def _wait_reaped(self) -> None:
        """Wait until asyncio has reaped what has ended, in the next iterations.

        The callbacks of the exits run in these: they call `stop_signals`, whose answer is about to
        be forgotten.
        """
        await asyncio.sleep(0)
        ended = [
            leader.reaped
            for leader in self._leaders.values()
            if isinstance(leader, PidfdChild) and leader.exited.done()
        ]
        await self._clock.wait_for(when_all_done(ended), seconds=_REAPED_S)

    def _forget_ended(self) -> None:
        ended = {pid: leader for pid, leader in self._leaders.items() if leader.exited.done()}
        for pid, leader in ended.items():
            del self._leaders[pid]
            self._signals.pop(leader.pid, None)
        if not self._leaders:
            self._descendants.clear()
            self._owners.clear()
            self._denied.clear()
        self._listed.remove(ended)

    def _close(self, session: WorkerSession) -> None:
        self._listed.close(session, proc.ticks_now())

    async def aclose(self) -> None:
        """Write the session list no more, and adopt no more orphans.  Idempotent."""
        self._listed.detach()
        self._free_descriptors()
        await self.orphans.aclose()


class _Watches:
    """The processes that a step has signalled; descendants are watched until they end."""

    def __init__(self, denied: set[int]) -> None:
        self.denied = denied
        self.leaders: set[int] = set()  # signalled; a pid is not used again until reaped
        self.has_room = True  # descendants can be watched now
        self.foreground: set[tuple[int, int]] = set()  # what the signalled shells wait for
        self.is_blind = False  # a process runs that was signalled and is not watched
        self.is_short = False  # a process was not signalled, for want of descriptors
        self._leaving = stop_order.Leaving()
        self.signalled: set[tuple[int, int]] = set()
        self._watched: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._watches: list[PidfdWatch] = []

    def __enter__(self) -> _Watches:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.close()

    def exits(
        self, pids: Container[int] | None = None, but: Container[int] = ()
    ) -> list[asyncio.Future[None]]:
        """Return a future for each awaited exit; with `pids`, for these only."""
        return [
            future
            for (pid, _), future in self._watched.items()
            if not future.done() and (pids is None or pid in pids) and pid not in but
        ]

    def rest(self, process: proc.ProcEntry, number: int, now: float) -> float:
        """Return for how many seconds a process that may end by itself gets no signal."""
        if process.identity in self.signalled:
            return 0.0
        try:
            return self._leaving.rest(process, number, now)
        except OSError:
            return 0.0  # no descriptor left to look

    def send(self, process: proc.ProcEntry, number: int) -> None:
        """Signal a process once, and watch it unless too many are watched already.

        The embedding program needs descriptors too.  The scan that follows the end of the watched
        processes finds the others again.
        """
        identity = process.identity
        is_watched, is_sent = identity in self._watched, not number or identity in self.signalled
        has_room = not is_watched and self.has_room and len(self.exits()) < _WATCHES_MAX
        self.is_blind |= not (has_room or is_watched)
        if is_sent and not has_room:
            return
        try:
            descriptor = proc.open_pidfd(process)
        except OSError:
            self.is_short = True  # the next scan tries again
            return
        if descriptor is None:
            return
        if not is_sent:
            self.signalled.add(identity)
            if not proc.send(descriptor, number) and proc.is_denied(process.pid):
                self.denied.add(process.pid)
            elif proc.needs_continue(process, number):
                proc.send(descriptor, signal.SIGCONT)
        if has_room:
            ended = asyncio.get_running_loop().create_future()
            self._watched[identity] = ended
            self._watches.append(
                PidfdWatch(descriptor, partial(set_result_if_pending, ended, None))
            )
        else:
            os.close(descriptor)


class _ScanPace:
    """Spaces the scans of a step: a scan for each leader that ends would take a processor."""

    def __init__(self, clock: PausableClock) -> None:
        self._clock = clock
        self._began = clock.now()
        self._scans_s = 0.0

    async def timed(self, scan: Awaitable[T]) -> T:
        began = self._clock.now()
        result = await scan
        self._scans_s += self._clock.now() - began
        return result

    def pause(self) -> float:
        """Return the seconds until another scan may begin; it may be negative."""
        next_at = self._began + (self._scans_s - _SCANS_AT_ONCE_S) / _SCAN_SHARE
        return min(next_at - self._clock.now(), _PAUSE_MAX_S)


class Yielder:
    def __init__(self) -> None:
        self._end = time.perf_counter() + _SLICE_S

    async def maybe_yield(self) -> None:
        """Yield to the loop if the time slice is over."""
        if time.perf_counter() > self._end:
            await asyncio.sleep(0)
            self._end = time.perf_counter() + _SLICE_S


def _continue_leader(pid: int, leader: Child, number: int) -> None:
    entry = None if number == signal.SIGKILL else _read_process(pid)
    if entry is not None and proc.needs_continue(entry, number):
        leader.send_signal(signal.SIGCONT)


def _shown_pid(leader: Child) -> int:
    try:
        return proc.shown_pid(leader.pid)
    except OSError:
        return leader.pid  # no descriptor left, or reaped already


def _read_process(pid: int) -> proc.ProcEntry | None:
    try:
        return proc.read_process(pid)
    except OSError:
        return None  # no descriptor left


def _timer(seconds: float) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, set_result_if_pending, future, None)
    return future


def _foreground_of(pid: int) -> list[proc.ProcEntry]:
    try:
        return stop_order.foreground_of(pid)
    except OSError:
        return []  # no descriptor left


def _survivor(process: proc.ProcEntry, *, is_denied: bool) -> Survivor:
    pid, function = process.pid, proc.wait_channel(process.pid)
    place = f" in {function}" if function else ""
    why = ", no permission to signal it" if is_denied else ""
    state = f"{process.state}{place}, of {proc.user_of(pid)}{why}"
    return Survivor(pid, state, proc.name_of(pid), is_denied)
