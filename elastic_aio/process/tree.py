"""Everything that lives because of a job on this host, and how all of it is stopped.

The workers themselves ("leaders") are our children and known by their futures.
What they started is found by looking at `/proc` (`sweep`), and its end is seen by
pidfd.  Stopping follows one plan on every path: signal, grace, next signal,
SIGKILL.  A process that appears meanwhile gets the signal of the current step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from elastic_aio.aio import Pausable, all_done
from elastic_aio.policy import StopPlan, StopStep
from elastic_aio.process import sweep
from elastic_aio.process.base import Child, Exit
from elastic_aio.process.exits import ExitWatch
from elastic_aio.process.roster import format_roster

__all__ = ["ProcessTree", "Survivor"]

# How long we may hold the loop before others get a turn, in seconds.
_SLICE_S = 0.002
# How many descendants are watched at a time, a descriptor each.
_WATCHES_MAX = 64
# Seconds between two looks when what was found could not be watched, and how many
# looks may fail for a lack of descriptors before that is an error.
_RETRY_S = 0.005
_LOOKS_MAX = 200

Escalated = Callable[[int, tuple[int, ...]], None]


class Survivor(Struct, frozen=True):
    """A process that SIGKILL did not end in time, and what `/proc` says of it."""

    pid: int
    state: str


class ProcessTree:
    """The leaders of one job on this host and all their descendants."""

    def __init__(self, marker: str, clock: Pausable, roster: int) -> None:
        """Begin with nobody.

        Args:
            marker: name of the variable that every worker's environment carries.
            clock: measures the graces.
            roster: descriptor of the file in which the guardian finds the sessions.
        """
        self._marker = marker.encode("ascii")
        # One tick earlier: the tick in which the job begins is not over yet.
        self._since = sweep.ticks_now() - 1
        self._clock = clock
        self._roster = roster
        self._leaders: dict[int, Child] = {}
        self._sessions: dict[int, sweep.Session] = {}
        self._asked: set[int] = set()
        self._offspring: dict[int, int] = {}  # pid -> start, see _note_offspring
        self._spared: tuple[int, int] | None = None
        self._elders = sweep.Elders()
        self._is_roster_due = False
        self._kill_now: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __repr__(self) -> str:
        live = sum(not leader.exited.done() for leader in self._leaders.values())
        return f"<ProcessTree with {live} of {len(self._leaders)} leaders alive>"

    @property
    def since(self) -> int:
        """Clock ticks since boot at which the job began."""
        return self._since

    def add(self, leader: Child) -> None:
        """Take in a child that has just been started."""
        try:
            found = sweep.read_process(leader.pid)
        except OSError:
            found = None  # no descriptor left: within a tick it has started now
        opened = sweep.ticks_now() if found is None else found.start
        session = sweep.Session(leader.pid, opened)
        self._leaders[leader.pid] = leader
        self._sessions[leader.pid] = session
        self._write_roster()
        if leader.exited.done():
            self._close(session)
        else:
            leader.exited.add_done_callback(lambda _: self._close(session))

    def spare(self, pid: int) -> None:
        """Leave a process and the session that it leads alone: it serves all attempts.

        It carries the job's marker, so that the guardian ends it with the job.
        """
        try:
            found = sweep.read_process(pid)
        except OSError:
            found = None
        self._spared = None if found is None else found.identity

    def kill_now(self) -> None:
        """Shorten every stop, the one that runs and those to come, to SIGKILL."""
        if not self._kill_now.done():
            self._kill_now.set_result(None)

    async def descendants(self) -> list[sweep.Process]:
        """Look once for everything alive, leaders included; yields to the loop meanwhile.

        Raises:
            OSError: for a second, this process has lacked the means to look (see
                `sweep.find_descendants`).
        """
        for _ in range(_LOOKS_MAX):
            try:
                return await self._look()
            except OSError:
                # An exec that hides whose process it is, or no descriptor left: no
                # event tells when that is over.
                await self._clock.sleep(_RETRY_S)
        return await self._look()

    async def _look(self) -> list[sweep.Process]:
        looking = sweep.find_descendants(
            self._marker, self._since, self._sessions, self._offspring, self._elders
        )
        turn = _Turn()
        while True:
            try:
                next(looking)
            except StopIteration as done:
                found: list[sweep.Process] = done.value
                return [one for one in found if not self._is_spared(one)]
            await turn.others()

    def _is_spared(self, process: sweep.Process) -> bool:
        if self._spared is None:
            return False
        pid, start = self._spared
        # Its number stays its own while it lives, and who is in its session is then
        # no worker: those lead sessions of their own.
        return process.identity == self._spared or (
            process.session == pid and process.start >= start
        )

    async def settle(self) -> bool:
        """Forget the leaders that have ended if two looks find nobody else; tell whether so."""
        if await self.descendants() or await self.descendants():
            return False
        await _let_exits_be_told()
        self._forget_ended()
        return True

    def was_asked(self, pid: int) -> bool:
        """Tell whether a leader was alive when it was first asked to stop."""
        return pid in self._asked

    def signal_leaders(self, number: int) -> tuple[int, ...]:
        """Send a signal to the leaders only; return the pids that got it."""
        return tuple(pid for pid, leader in self._leaders.items() if leader.send_signal(number))

    async def signal_all(self, number: int) -> None:
        """Send a signal to everything alive, once."""
        for process in await self.descendants():
            try:
                descriptor = sweep.open_pidfd(process)
            except OSError:
                continue  # no descriptor left
            if descriptor is not None:
                sweep.send(descriptor, number)
                os.close(descriptor)

    async def stop(self, plan: StopPlan, on_escalated: Escalated) -> list[Survivor]:
        """Stop everything by `plan`; return what could not be killed, mostly nothing.

        Ends as soon as two looks in a row find nobody.  `on_escalated` is told the
        signal and the pids of every step after the first.  Its time is bounded by the
        plan; whoever cancels it must start it over, since what is left is not stopped.
        """
        steps = (*plan.steps, StopStep(signal.SIGKILL, plan.reap_timeout))
        gone = False
        for position, step in enumerate(steps):
            is_last = step is steps[-1]
            if self._kill_now.done() and not is_last:
                continue
            if position and (left := await self.descendants()):
                on_escalated(step.signal, tuple(process.pid for process in left))
            gone = await self._signal_until_gone(step, is_last)
            if gone:
                break
        survivors = [] if gone else [_survivor(one) for one in await self.descendants()]
        seen = {one.pid for one in survivors}
        survivors += [
            Survivor(pid, "not reaped yet")
            for pid, leader in self._leaders.items()
            if not leader.exited.done() and pid not in seen
        ]
        self._forget_ended()
        return survivors

    async def _signal_until_gone(self, step: StopStep, is_last: bool) -> bool:
        """Send a signal to all, latecomers included; tell whether all ended in time."""
        end = self._clock.now() + step.grace
        await self._note_offspring()
        turn = _Turn()
        with _Watches() as watches:
            for leader in list(self._leaders.values()):
                # At once and without a look at /proc: peers should hear of a
                # failure within a millisecond.
                if not leader.exited.done():
                    self._signal_leader(leader, step.signal)
                    watches.signalled.add(leader.pid)
                    await turn.others()
            # They wake up behind us on our processor, and a look takes a while.
            os.sched_yield()
            clean_looks = 0
            while clean_looks < 2:
                alive = await self.descendants()
                for process in alive:
                    self._signal_and_watch(process, step.signal, watches)
                    await turn.others()
                pending: list[asyncio.Future[Any]] = [*watches.exits(), *self._running()]
                if not alive and not pending:
                    clean_looks += 1
                    continue
                clean_looks = 0
                if not pending:
                    # They ended after the look, or no descriptor is left to watch
                    # them by; then no event tells, and the next look must wait.
                    await self._clock.sleep(_RETRY_S)
                ends = [all_done(pending)] if is_last else [all_done(pending), self._kill_now]
                in_time = await self._clock.wait_for(*ends, seconds=end - self._clock.now())
                if not in_time or (self._kill_now.done() and not is_last):
                    return False
        await _let_exits_be_told()
        return True

    def _signal_and_watch(self, process: sweep.Process, number: int, watches: _Watches) -> None:
        leader = self._leaders.get(process.pid)
        if leader is None or leader.exited.done():
            watches.take_in(process, number)
        elif process.pid not in watches.signalled:
            watches.signalled.add(process.pid)
            self._signal_leader(leader, number)

    def _signal_leader(self, leader: Child, number: int) -> None:
        if leader.has_ended():
            return  # by itself, and not because of us: it is no victim
        self._asked.add(leader.pid)
        leader.send_signal(number)
        if number not in (signal.SIGKILL, signal.SIGSTOP) and _is_held(leader.pid):
            leader.send_signal(signal.SIGCONT)

    async def _note_offspring(self) -> None:
        """Remember who descends from the leaders, while their death has not yet hidden it.

        A child in a session of its own, and with an empty environment, is known by
        its parent only.
        """
        turn = _Turn()
        for leader in list(self._leaders.values()):
            if leader.exited.done():
                continue
            try:
                for one in sweep.offspring(leader.pid):
                    self._offspring[one.pid] = one.start
                    await turn.others()
            except OSError:
                return  # no descriptor left; the look at /proc will wait for one

    def _running(self) -> list[asyncio.Future[Exit]]:
        return [leader.exited for leader in self._leaders.values() if not leader.exited.done()]

    def _forget_ended(self) -> None:
        for pid, leader in list(self._leaders.items()):
            if leader.exited.done():
                del self._leaders[pid]
                del self._sessions[pid]
                self._asked.discard(pid)
        if not self._leaders:
            self._offspring.clear()
        self._write_roster()

    def _close(self, session: sweep.Session) -> None:
        session.closed = sweep.ticks_now()
        if session.number in self._sessions and not self._is_roster_due:
            # Once for all that end in the same turn of the loop.
            self._is_roster_due = True
            asyncio.get_running_loop().call_soon(self._write_roster)

    def close(self) -> None:
        """Write to the roster no more: it is about to be closed."""
        self._roster = -1

    def _write_roster(self) -> None:
        self._is_roster_due = False
        if self._roster < 0:
            return  # a process that could not be killed has ended after all
        content = format_roster(self._sessions.values())
        # In this order: a SIGKILL in between leaves whole lines, at worst old ones.
        os.pwrite(self._roster, content, 0)
        os.ftruncate(self._roster, len(content))


class _Watches:
    """The descendants that one step has signalled, watched until they end."""

    def __init__(self) -> None:
        self.signalled: set[int] = set()  # pids of leaders: ours until reaped
        self._heard: set[tuple[int, int]] = set()
        self._watched: dict[tuple[int, int], asyncio.Future[None]] = {}
        self._watches: list[ExitWatch] = []

    def __enter__(self) -> _Watches:
        return self

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.close()

    def exits(self) -> list[asyncio.Future[None]]:
        return [future for future in self._watched.values() if not future.done()]

    def take_in(self, process: sweep.Process, number: int) -> None:
        """Signal a process once, and watch it if not too many are watched already.

        The program around us needs descriptors too.  Those that are not watched are
        found again by the look that follows when the watched ones have ended.
        """
        identity = process.identity
        has_room = len(self.exits()) < _WATCHES_MAX
        if identity in self._watched or (identity in self._heard and not has_room):
            return
        try:
            descriptor = sweep.open_pidfd(process)
        except OSError:
            return  # no descriptor left; the next look tries again
        if descriptor is None:
            return
        if identity not in self._heard:
            self._heard.add(identity)
            _send_and_wake(descriptor, process.state, number)
        if has_room:
            ended = asyncio.get_running_loop().create_future()
            self._watched[identity] = ended
            self._watches.append(ExitWatch(descriptor, lambda: _set(ended)))
        else:
            os.close(descriptor)


class _Turn:
    """Lets others have their turn of the loop while we work through a long list."""

    def __init__(self) -> None:
        self._end = time.perf_counter() + _SLICE_S

    async def others(self) -> None:
        """Yield to the loop if our slice is over."""
        if time.perf_counter() > self._end:
            await asyncio.sleep(0)  # we go on at once
            self._end = time.perf_counter() + _SLICE_S


async def _let_exits_be_told() -> None:
    """Let the callbacks of exits run that have been seen in this turn of the loop.

    A future is done before those who wait for it are told; they ask us whether the
    leader was asked to stop, which we forget next.
    """
    await asyncio.sleep(0)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _is_held(pid: int) -> bool:
    """Tell whether a process is stopped: it acts on a signal only when it goes on."""
    try:
        found = sweep.read_process(pid)
    except OSError:
        return False
    return found is not None and found.state == "T"


def _send_and_wake(descriptor: int, state: str, number: int) -> None:
    sweep.send(descriptor, number)
    if state == "T" and number not in (signal.SIGKILL, signal.SIGSTOP):
        sweep.send(descriptor, signal.SIGCONT)


def _survivor(process: sweep.Process) -> Survivor:
    try:
        with open(f"/proc/{process.pid}/wchan", encoding="ascii") as file:
            where = file.read().strip()
    except OSError:
        where = ""
    waits = f" in {where}" if where not in ("", "0") else ""
    return Survivor(process.pid, f"{process.state}{waits}")
