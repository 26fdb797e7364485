"""Adopted orphans: processes of a job that have lost their parents and become children of this one.

A daemon leaves its session and loses its parent; only the marker in its environment still tells its
job.  `ssh-agent` and `gpg-agent` forbid unprivileged processes to read it (PR_SET_DUMPABLE of
prctl(2)).  A *child subreaper* (PR_SET_CHILD_SUBREAPER) becomes the parent of all orphans among its
descendants: it finds such a daemon among its children, and has to reap them in return.

This changes the process, so a job of a library asks for it; the command line, which owns its
process, always does.  It may also be process 1 of a container, which adopts all orphans.

A child was adopted if this package has not started it and it has another session than this
process.  Children of the embedding program have the same session, unless the program has started
them as leaders; such a leader looks like a daemon.  So a library stops only adopted children whose
environment it is not allowed to read.  It reaps only those that it has found as processes of the
job, and leaves the zombie of a daemon that ends early.

Children that exist before the first worker are strangers, and so are their orphans: in `service &
exec aio-elastic`, a shell has left the service to the program that replaced it.  Only the marker
tells their orphans from the workers' orphans, so then it decides.

A library cannot stop a daemon that has replaced its environment.  The kernel records no former
parent, so such a daemon looks like an orphan of another child of the program or, if it leads its
session, like such a child.  The command line has no other children, as a rule.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.errors import HostError
from elastic_aio.process import proc
from elastic_aio.process.descendants import may_adopt
from elastic_aio.signals import ReceivedSignals

# Seconds for which an orphan may remain a zombie, where a look at the children is short.
_REAP_S = 0.005
# How many times as long as a look at the children it rests after that: they may be thousands.
_REAP_RATIO = 20
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class _Subreaper:
    """What all jobs of this process share."""

    owns_process = False
    """Whether this process is the command line's; it then adopts for every job."""
    jobs = 0
    _users = 0
    _spawning = 0
    _was_subreaper = False

    def __init__(self) -> None:
        self.own: set[int] = set()
        """The children that this package has started, until their exit is known."""

    def acquire(self) -> None:
        """Become a child subreaper until `release`, or raise an OSError if that is not allowed."""
        if not self._users:
            self._was_subreaper = _is_subreaper()
            _set_subreaper(True)
        self._users += 1

    def release(self) -> None:
        """Undo a use; the last call restores the process."""
        self._users -= 1
        if not self._users:
            _set_subreaper(self._was_subreaper)

    def forget(self) -> None:
        """Forget everything in a forked process: it has no jobs and no children."""
        self.owns_process = self._was_subreaper = False
        self.jobs = self._users = self._spawning = 0
        self.own.clear()

    @contextmanager
    def spawning(self) -> Iterator[None]:
        """Regard no child as adopted while one is started that is not in `own` yet."""
        self._spawning += 1
        try:
            yield
        finally:
            self._spawning -= 1

    def has_strangers(self) -> bool:
        """Return whether this process has children that this package has not started."""
        try:
            return bool(set(proc.list_children(os.getpid())) - self.own)
        except OSError:
            return True  # no descriptor is left to look

    def adopted(self) -> Iterator[proc.ProcEntry]:
        """Yield the adopted children, zombies included; raise an OSError without descriptors."""
        session = os.getsid(0)
        pids = set(proc.list_children(os.getpid())) - self.own
        for pid in () if self._spawning else pids:
            entry = proc.read_process(pid)
            if entry is not None and entry.session != session:
                yield entry


subreaper = _Subreaper()
os.register_at_fork(after_in_child=subreaper.forget)


def _is_subreaper() -> bool:
    import ctypes  # takes milliseconds, and most programs do not need it

    value = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return bool(value.value)


def _set_subreaper(value: bool) -> None:
    import ctypes

    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value))


def _prctl(option: int, argument: object) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class Orphans:
    """The adopted orphans of one job; must be closed."""

    def __init__(self) -> None:
        """Count the job; nothing is adopted before `adopt`."""
        self._is_open = True
        self._is_adopting = False
        self._has_strangers = False
        self._reaping: asyncio.Task[None] | None = None
        self._found: dict[int, int] = {}
        subreaper.jobs += 1

    def __repr__(self) -> str:
        return f"<Orphans: {len(self._found) if self._is_adopting else 'not adopted'}>"

    def adopt(self) -> None:
        """Adopt the orphans of this process from now on, and reap them.

        In the main thread they are reaped milliseconds after they exit, unless the program handles
        SIGCHLD; otherwise only by `find` and `aclose`.

        Raises:
            HostError: the kernel or a sandbox does not allow it.
        """
        try:
            subreaper.acquire()
        except (OSError, ImportError, AttributeError) as error:
            if subreaper.owns_process:
                return  # it did not ask for it, and can do without
            raise HostError(f"cannot adopt orphans (PR_SET_CHILD_SUBREAPER): {error}") from error
        self._is_adopting = True
        self._has_strangers = subreaper.has_strangers()
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL:
            self._reaping = create_task(self._reap_on_exits(), name="reap orphans")

    async def aclose(self) -> None:
        """Reap the orphans that have exited; later ones go to another process.  Idempotent."""
        if self._reaping is not None:
            await cancel_and_wait([self._reaping])
            self._reaping = None
        if self._is_adopting:
            self._is_adopting = False
            self._reap()
            subreaper.release()
        if self._is_open:
            self._is_open = False
            subreaper.jobs -= 1

    def find(self, since: int) -> dict[int, int]:
        """Return the start times, by pid, of live orphans that belong to this job.

        `since` is when the job began, in ticks.  While several jobs run in this process, the owner
        of an orphan is unknown: orphans stay until the last job stops.

        Raises:
            OSError: no descriptor is left.
        """
        if not self._is_adopting:
            return {}
        self._reap()
        if subreaper.jobs == 1:
            for entry in () if self._has_strangers else subreaper.adopted():
                if entry.start >= since and not entry.is_dead and _is_of_job(entry.pid):
                    self._found[entry.pid] = entry.start
        return self._found

    def adopters(self) -> set[int]:
        """Return the pids that the parent of an orphan of the job may have.

        Raises:
            OSError: no descriptor is left.
        """
        me = proc.own_pid()
        if self._is_adopting:
            return {me}  # since before the first worker
        return {me} | may_adopt(me)

    def note(self, processes: Iterable[proc.ProcEntry]) -> None:
        """Note processes of the job: the adopted ones are reaped when they exit."""
        if self._is_adopting:
            me = os.getpid()
            self._found.update((item.pid, item.start) for item in processes if item.parent == me)

    async def _reap_on_exits(self) -> None:
        with ReceivedSignals([signal.SIGCHLD]) as signals:
            signals.discard([signal.SIGCHLD])
            self._reap()  # earlier exits
            took = 0.0
            async for _ in signals:
                # A worker may have exited whose siblings have to be signalled.
                await asyncio.sleep(max(_REAP_S, _REAP_RATIO * took))
                began = time.perf_counter()
                self._reap()
                took = time.perf_counter() - began

    def _reap(self) -> None:
        """Reap the adopted children that have exited, and no other child."""
        try:
            for entry in subreaper.adopted():
                is_found = self._found.get(entry.pid) == entry.start
                is_leader = entry.session == entry.pid and not subreaper.owns_process
                if entry.is_dead and (is_found or not is_leader):
                    self._found.pop(entry.pid, None)
                    with suppress(ChildProcessError):  # the program has reaped it
                        os.waitid(os.P_PID, entry.pid, os.WEXITED | os.WNOHANG)
        except OSError:
            return  # no descriptor is left; the next exit brings another try


def _is_of_job(pid: int) -> bool:
    if subreaper.owns_process and os.getpid() != 1:
        return True  # of another user too: a stop reports it
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return proc.hides_environment(pid)  # otherwise the scan looks for the marker there
