"""The program's side of the guardian process: started before the workers, kept running.

No worker may outlive its supervisor, not even a supervisor that SIGKILL ends.  The kernel's own
means do not suffice: PR_SET_PDEATHSIG reaches the direct child only and fires when the spawning
thread ends; a writable cgroup needs privileges.  So each program with jobs has a further process, a
bare interpreter of about 4 MB that waits until the program is gone and then ends what is left
(`guard`).

The guardian notices the end of the program by a lock that the kernel releases.  An event loop may
be closed, and the program go on, while jobs are still running: then `_LoopAnchor` lets the guardian
end these.

The event loops of several threads may have jobs, and each may be closed first.  So each has a
`_Keeper`, which waits for the end of the guardian; the first to notice it starts another one.

An interpreter may fail to start, and `sys.executable` may be a frozen application, which would run
itself.  So the guardian reports that it works, and no worker starts before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elastic_aio.aio import ForkGuard, create_task, run_shielded, set_result_if_pending
from elastic_aio.errors import HostError
from elastic_aio.process.adopted import subreaper
from elastic_aio.process.children import PidfdWatch
from elastic_aio.process.guardian_process import (
    FAILED,
    GuardedJob,
    GuardedProgram,
    GuardianProcess,
)
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import error_reason

# Seconds in which a guardian has to report that it works: far more than a busy host needs.
_START_S = 30.0
# Seconds until a killed process is left behind: an uninterruptible system call holds it.
_KILL_S = 10.0
# Seconds that a guardian needs to see that nothing is left.
_MARGIN_S = 1.0
# Seconds until a start that has failed is repeated: then doubled up to the maximum.
_DELAY_S = 1.0
_DELAY_MAX_S = 60.0
# Restarts within _WINDOW_S: a guardian that is always killed must not take a processor.
_RESTARTS_MAX = 5
_WINDOW_S = 1.0


class Guardian:
    """The guardian as one job needs it: it runs while the job lasts; must be closed."""

    def __init__(
        self,
        job: GuardedJob,
        plan: StopPlan,
        *,
        on_restarted: Callable[[int], None],
        on_lost: Callable[[str], None],
        python: str | None = None,
    ) -> None:
        """Configure; nothing is started yet.

        Args:
            job: the caller closes it.
            plan: of the stop of the job.
            on_restarted: called with the pid of a guardian that took the place of another.
            on_lost: called with the reason when a guardian has ended and another one does
                not start; further attempts follow, up to a minute apart.
            python: an interpreter, in case this program is not run by one.
        """
        self.job = job
        self.python = python
        self._end_s = plan.guardian_grace + plan.reap_timeout + _MARGIN_S
        self.on_restarted = on_restarted
        self.on_lost = on_lost
        self._keeper: _Keeper | None = None
        self.is_released = False
        self._request = 0
        self._answer: asyncio.Future[bool] | None = None

    def __repr__(self) -> str:
        return f"<Guardian {self._keeper and self._keeper.process}>"

    @property
    def pid(self) -> int | None:
        """Process id of the present guardian; None before `start`."""
        return self._keeper.process.process.pid if self._keeper else None

    def start(self) -> None:
        """Spawn the process unless it runs; it goes on starting, and `wait_ready` must follow.

        Raises:
            HostError: there is no interpreter for it, or it cannot be spawned.
        """
        self._keeper = _Keeper.of_loop(self)

    def release(self) -> None:
        """Let the guardian end the job as if this process had ended; needs no event loop."""
        self.is_released = True
        self.job.release()

    async def wait_ready(self) -> None:
        """Wait until the process has reported that it works, for 30 seconds at most.

        Cancellation: leaves the process to `aclose`.

        Raises:
            HostError: the process has ended, or has not reported.
        """
        assert self._keeper is not None, "start() comes first"
        await self._keeper.wait_ready()

    async def end_job(self) -> bool:
        """Let the guardian, which has descriptors of its own, stop what this process cannot.

        Ends after the grace period and the `reap_timeout` of the stop plan; returns whether the
        guardian has found no process any more.  Other jobs go on.  Idempotent.
        """
        if self._keeper is None or self.is_released:
            return False
        return await run_shielded(self._end_job)

    async def _end_job(self) -> bool:
        assert self._keeper is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._request = self.job.request_end()
        self._keeper.process.process.send_signal(signal.SIGCONT)
        await asyncio.wait([self._answer], timeout=self._end_s)
        self.job.resume()
        return self._answer.done() and self._answer.result()

    def look(self) -> None:
        """Take the answer to `end_job`, if it is there."""
        number, is_success = self.job.program.ended.get(self.job.owner, (0, False))
        if self._answer is not None and number == self._request:
            set_result_if_pending(self._answer, is_success)

    async def aclose(self) -> None:
        """Guard the job no more.  Idempotent.

        The last job kills the process and waits until it is reaped, for 10 seconds at most.
        """
        is_last = self.job.unlist()
        if self._keeper is not None:
            self._keeper.guardians.pop(self, None)
            if not self._keeper.guardians:
                await self._keeper.aclose(is_last)


class _Keeper:
    """Keeps the guardian running for the jobs of one event loop; closed after the last."""

    def __init__(self, program: GuardedProgram, python: str | None) -> None:
        """Spawn it unless it runs, or raise HostError."""
        self.guardians: dict[Guardian, None] = {}
        self.loop = asyncio.get_running_loop()
        self._program = program
        self._keeping: asyncio.Task[None] | None = None
        self._watch = self._watch_running(python)
        try:
            self._anchor = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            self._watch.close()
            raise HostError(f"{FAILED}: {error_reason(error)}") from error
        _LoopAnchor(self._anchor, self._on_loop_closed)
        self.loop.add_reader(program.pipes.reports, self._on_report)
        program.watchers.add(self)

    @classmethod
    def of_loop(cls, guardian: Guardian) -> _Keeper:
        """Return the one of the running loop, which keeps this guardian too, or raise HostError."""
        program, loop = guardian.job.program, asyncio.get_running_loop()
        with program.lock:
            keepers = (one for one in program.watchers if isinstance(one, _Keeper))
            keeper = next((one for one in keepers if one.loop is loop), None)
            if keeper is None:
                keeper = cls(program, guardian.python)
            elif keeper._watch.ended.done():
                keeper._watch = keeper._watch_running(guardian.python)
            keeper.guardians[guardian] = None
            return keeper

    @property
    def process(self) -> GuardianProcess:
        return self._watch.process

    async def wait_ready(self) -> None:
        await self._watch.wait_ready()
        if self._keeping is None or self._keeping.done():
            self._keeping = create_task(self._keep(), name="keep the guardian running")

    async def aclose(self, is_last: bool) -> None:
        """Watch no more; end the process after the last job of the program.  Idempotent."""
        with self._program.lock:
            self._program.watchers.discard(self)
        if self._anchor >= 0:  # before it waits: the loop may have another one then
            anchor, self._anchor = self._anchor, -1
            self.loop.remove_reader(anchor)
            self.loop.remove_reader(self._program.pipes.reports)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if is_last:
            self.process.process.kill()
            await asyncio.wait([self._watch.ended], timeout=_KILL_S)
            self._program.process = None
        self._watch.close()

    def look_soon(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._look)

    def _on_report(self) -> None:
        self._program.receive(self)
        self._look()

    def _look(self) -> None:
        self._watch.look()
        for guardian in self.guardians:
            guardian.look()

    def _on_loop_closed(self) -> None:
        running = [one for one in self.guardians if not one.is_released]
        for guardian in running:
            guardian.release()
        for _ in running:
            warning = "a job was running when its event loop was closed; use `async with`"
            warnings.warn(warning, ResourceWarning, stacklevel=2)

    def _watch_running(self, python: str | None) -> _Watch:
        with self._program.lock, subreaper.spawning():
            process = self._program.running_process(python)
            process.on_reaped = partial(subreaper.own.discard, process.process.pid)
            subreaper.own.add(process.process.pid)
            return _Watch(process, self._program)

    async def _keep(self) -> None:
        """Restart each guardian that ends, at once: until then the jobs have none."""
        restarts: deque[float] = deque(maxlen=_RESTARTS_MAX)
        while True:
            await asyncio.wait([self._watch.ended])
            if len(restarts) == _RESTARTS_MAX:
                # No event reports that the guardian is not killed any more.
                await asyncio.sleep(max(0.0, restarts[0] + _WINDOW_S - time.monotonic()))
            restarts.append(time.monotonic())
            await self._restart()
            for guardian in [*self.guardians]:
                guardian.on_restarted(self.process.process.pid)

    async def _restart(self) -> None:
        """Return when a guardian works; try again with growing delays."""
        delay = 0.0
        while True:
            guardians = [*self.guardians]
            try:
                if self._watch.ended.done():  # else a job that has just begun was faster
                    self._watch = self._watch_running(guardians[-1].python)
                await self._watch.wait_ready()
            except (HostError, OSError) as error:
                for guardian in guardians if delay == 0.0 else ():
                    guardian.on_lost(str(error))
            else:
                return
            delay = min(max(delay * 2, _DELAY_S), _DELAY_MAX_S)
            await asyncio.sleep(delay)  # no event reports that the cause has gone


class _LoopAnchor:
    """An object that only an event loop refers to: a closed loop frees it.

    The loop keeps it as the reader of a descriptor that never becomes readable.
    """

    def __init__(self, descriptor: int, on_collected: Callable[[], None]) -> None:
        self._fork = ForkGuard()
        self._descriptor = descriptor
        self._on_collected = on_collected
        asyncio.get_running_loop().add_reader(descriptor, self._on_readable)

    def _on_readable(self) -> None:
        raise AssertionError("nothing is written to it")

    def __del__(self) -> None:
        os.close(self._descriptor)
        if not self._fork.is_copy:  # else a fork has closed its copy of the loop
            self._on_collected()


class _Watch:
    """One guardian process in an event loop: `ended` is done when it has ended."""

    def __init__(self, process: GuardianProcess, program: GuardedProgram) -> None:
        self.process = process
        self._program = program
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        try:
            self._pidfd = PidfdWatch(os.pidfd_open(process.process.pid), self._on_end)
        except OSError as error:  # no descriptor left for the pidfd
            raise HostError(f"{FAILED}: {error_reason(error)}") from error
        self.look()

    def look(self) -> None:
        if self.process.is_ready:
            set_result_if_pending(self._ready, None)

    async def wait_ready(self) -> None:
        """Wait for the report; kill a process that does not report in time.

        Raises:
            HostError: it has ended, or has not reported.
        """
        events = (self._ready, self.ended)
        await asyncio.wait(events, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self.process.is_ready:
            self.process.process.kill()
            problem = f"does not report that it works within {_START_S:g} s"
            raise HostError(f"{FAILED}: {self.process.python} {self.process.problem or problem}")

    def close(self) -> None:
        self._pidfd.close()

    def _on_end(self) -> None:
        self._program.receive()  # what it has reported before
        self.process.has_ended()
        set_result_if_pending(self.ended, None)
