"""The agent's side of the guardian process: started before the workers, kept running.

No worker may outlive its supervisor, not even a supervisor that SIGKILL ends.  The kernel's own
means do not suffice: PR_SET_PDEATHSIG reaches the direct child only and fires when the spawning
thread ends; a writable cgroup needs privileges.  So each agent has a further process, a bare
interpreter of about 4 MB that waits until the agent is gone and then ends what is left
(`guardian_main`).

The guardian notices the end of the supervisor by a lock that the kernel releases.  An event loop
may be closed, and the program go on, while a job is still running: then `_LoopAnchor` releases it.

An interpreter may fail to start, and `sys.executable` may be a frozen application, which would run
itself.  So the guardian reports through a pipe that it works, and no worker starts before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial

from elastic_aio.aio import ForkGuard, create_task, run_shielded, set_result_if_pending
from elastic_aio.errors import HostError
from elastic_aio.process.children import Child, ReapedChild
from elastic_aio.process.guardian_process import FAILED, GuardedJob, GuardianProcess
from elastic_aio.spec.stop import StopPlan
from elastic_aio.text import one_line

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
    """Keeps one guardian process running while the job lasts; must be closed."""

    def __init__(
        self,
        job: GuardedJob,
        plan: StopPlan,
        *,
        on_restarted: Callable[[int], None],
        on_lost: Callable[[str], None],
        python: str | None = None,
        early: GuardianProcess | None = None,
    ) -> None:
        """Configure; nothing is started yet.

        Args:
            job: the caller closes it.
            plan: the guardian sends its first signal first.
            on_restarted: called with the pid of a guardian that took the place of another.
            on_lost: called with the reason when a guardian has ended and another one does
                not start; further attempts follow, up to a minute apart.
            python: an interpreter, in case this program is not run by one.
            early: the first process, if it has been spawned before.
        """
        self._job = job
        self._end_s = plan.guardian_grace + plan.reap_timeout + _MARGIN_S
        self._spawn = partial(GuardianProcess, job, plan, python)
        self._on_restarted = on_restarted
        self._on_lost = on_lost
        self._early = early
        self._process: _Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._anchor = -1
        self._is_released = False

    def __repr__(self) -> str:
        return f"<Guardian {self._process and self._process.child}>"

    @property
    def pid(self) -> int | None:
        """Process id of the present guardian; None before `start`."""
        return self._process.child.pid if self._process else None

    def start(self) -> None:
        """Spawn the process, which goes on starting; `wait_ready` must follow.

        Raises:
            HostError: there is no interpreter for it, or it cannot be spawned.
        """
        early, self._early = self._early, None
        self._process = _Process(early or self._spawn())
        try:
            anchor = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            raise HostError(f"{FAILED}: {error}") from error
        _LoopAnchor(anchor, self._on_loop_closed)
        self._anchor = anchor

    def release(self) -> None:
        """Let the guardian end the job as if this process had ended; needs no event loop."""
        self._is_released = True
        self._job.release()

    def _on_loop_closed(self) -> None:
        if self._anchor >= 0 and not self._is_released:  # else it was closed before
            self.release()
            warning = "a job was running when its event loop was closed; use `async with`"
            warnings.warn(warning, ResourceWarning, stacklevel=2)

    async def wait_ready(self) -> None:
        """Wait until the process has reported that it works, for 30 seconds at most.

        Cancellation: leaves the process to `aclose`.

        Raises:
            HostError: the process has ended, or has not reported.
        """
        assert self._process is not None, "start() comes first"
        await self._process.wait_ready()
        self._keeping = create_task(self._keep(self._process), name="keep the guardian running")

    async def end_job(self) -> bool:
        """Let the guardian, which has descriptors of its own, stop what this process cannot.

        Another guardian takes its place.  Ends after the grace period and the `reap_timeout` of the
        stop plan; returns whether the guardian has found no process any more.  Idempotent.
        """
        if self._process is None or self._process.child.exited.done():
            return False  # another one is being started
        return await run_shielded(partial(self._end_job, self._process.child))

    async def _end_job(self, child: Child) -> bool:
        if not child.exited.done():
            self._job.release()
            await asyncio.wait([child.exited], timeout=self._end_s)
        if not child.exited.done():
            child.send_signal(signal.SIGKILL)
            await asyncio.wait([child.exited], timeout=_KILL_S)
        if not child.exited.done():
            self._on_lost("a guardian cannot be killed")
            return False
        return child.exited.result().status.is_success

    async def aclose(self) -> None:
        """Kill the process and wait until it is reaped, for 10 seconds at most.  Idempotent."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._process is not None:
            self._process.close()
            self._process.child.send_signal(signal.SIGKILL)
            await asyncio.wait([self._process.child.exited], timeout=_KILL_S)
        anchor, self._anchor = self._anchor, -1
        if anchor >= 0:
            asyncio.get_running_loop().remove_reader(anchor)

    async def _keep(self, process: _Process) -> None:
        """Restart each guardian that ends, at once: until then the job has none."""
        restarts: deque[float] = deque(maxlen=_RESTARTS_MAX)
        while True:
            await asyncio.wait([process.child.exited])
            if len(restarts) == _RESTARTS_MAX:
                # No event reports that the guardian is not killed any more.
                await asyncio.sleep(max(0.0, restarts[0] + _WINDOW_S - time.monotonic()))
            restarts.append(time.monotonic())
            process = await self._restart()
            self._on_restarted(process.child.pid)

    async def _restart(self) -> _Process:
        """Return a guardian that works; try again with growing delays."""
        delay = 0.0
        while True:
            try:
                if not self._is_released:
                    # `end_job` releases it, and a guardian that finds it free ends at once.
                    self._job.lock()
                self._process = _Process(self._spawn())
                await self._process.wait_ready()
            except (HostError, OSError) as error:
                if delay == 0.0:
                    self._on_lost(str(error))
            else:
                return self._process
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


class _Process:
    """A spawned guardian in an event loop; `wait_ready` must follow, or `close`."""

    def __init__(self, spawned: GuardianProcess) -> None:
        self._spawned = spawned
        process = spawned.process
        try:
            on_reaped = partial(setattr, process, "returncode")
            self.child: Child = ReapedChild(process.pid, on_reaped=on_reaped)
        except OSError as error:  # no descriptor left for the pidfd
            spawned.close()
            raise HostError(f"{FAILED}: {error}") from error
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._reported: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(spawned.report, self._on_report)

    async def wait_ready(self) -> None:
        """Wait for the report; kill a process that does not report in time.

        Raises:
            HostError: it has ended, or has not reported.
        """
        events = (self._reported, self.child.exited)
        try:
            await asyncio.wait(events, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._reported.done():
                self.child.send_signal(signal.SIGKILL)
                raise HostError(f"{FAILED}: {self._spawned.python} {self._problem()}")
        finally:
            self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._spawned.report)
            self._spawned.close()

    def _on_report(self) -> None:
        self._loop.remove_reader(self._spawned.report)
        if os.read(self._spawned.report, 1):  # else it has closed the pipe: its exit follows
            set_result_if_pending(self._reported, None)

    def _problem(self) -> str:
        if not self.child.exited.done():
            return f"does not report that it works within {_START_S:g} s"
        content = os.pread(self._spawned.errors, 65536, 0).decode("utf-8", "replace")
        *_, last = content.splitlines() or [""]
        reason = f", {one_line(last, 200)}" if last else ""
        return f"ended at once ({self.child.exited.result().status}{reason})"
