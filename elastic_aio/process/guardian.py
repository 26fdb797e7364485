"""The agent's side of the guardian process: started before the workers, kept running.

No worker may outlive its supervisor, not even one that is killed by SIGKILL.  The
kernel's own means do not suffice: PR_SET_PDEATHSIG reaches the direct child only and
fires when the spawning thread ends; a writable cgroup needs privileges.  So each agent
has one more process, a bare interpreter of about 4 MB that waits until the agent is gone
and then ends what is left (`guardian_main`).

An interpreter may fail to start, and `sys.executable` may be something else: a frozen
application, for example, which would run itself.  So the guardian reports through a pipe
that it works, and no worker starts before that.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from elastic_aio.aio import create_task, set_result_if_pending
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.process.base import Child, ChildSpec, Spawner
from elastic_aio.process.calls import memory_file
from elastic_aio.process.command import spawn_with_popen
from elastic_aio.spec.stop import StopPlan, StopStep
from elastic_aio.text import one_line

_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian_main.py")
_FAILED = "cannot start the guardian process"
# Set in the guardian's environment, so that an application that runs itself notices.
_VARIABLE = "ELASTIC_AIO_GUARDIAN"
# Seconds in which a guardian has to report that it works: far more than a busy host needs.
_START_S = 30.0
# Seconds until a killed process is left behind: an uninterruptible system call holds it.
_KILL_S = 10.0
# Seconds between two restarts: none before the first, then doubled up to the maximum; a
# guardian that has run for the maximum starts the series anew.
_DELAY_S = 1.0
_DELAY_MAX_S = 60.0


def open_session_list() -> int:
    """Return the descriptor of a new, empty session list (see `proc_scan`), locked.

    The lock says that this process runs and is still this program; closing the descriptor,
    or any other one of the same file, releases it.

    Raises:
        HostError: the kernel has no anonymous files or pidfds, or no descriptor is left.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        raise HostError("elastic_aio needs Linux 5.3 or newer (pidfd_open, memfd_create)")
    descriptor = memory_file("sessions")
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise HostError(f"cannot lock an anonymous file: {error.strerror}") from error
    return descriptor


class Guardian:
    """Keeps one guardian process running while the job lasts; must be closed."""

    def __init__(
        self,
        *,
        marker: str,
        since: int,
        session_list: int,
        null: int,
        plan: StopPlan,
        on_restarted: Callable[[int], None],
        on_lost: Callable[[str], None],
        python: str | None = None,
        _spawner: Spawner = spawn_with_popen,
    ) -> None:
        """Configure; nothing is started yet.

        Args:
            marker: name of the job's environment variable.
            since: clock ticks since boot at which the job began.
            session_list: descriptor of the session list; the caller closes it.
            null: descriptor of `/dev/null`; the caller closes it.
            plan: its first signal is what the guardian sends first.
            on_restarted: called with the pid of a guardian that took the place of one
                that had ended.
            on_lost: called with the reason when a guardian has ended and another one does
                not start; further attempts follow, up to a minute apart.
            python: an interpreter, in case this program is not run by one.
        """
        first = plan.steps[0] if plan.steps else StopStep(signal.SIGKILL, 0)
        grace = min(first.grace, plan.guardian_grace)
        self._arguments = (marker, str(since), str(first.signal), str(grace))
        self._session_list = session_list
        self._null = null
        self._on_restarted = on_restarted
        self._on_lost = on_lost
        self._python = python
        self._spawner = _spawner
        self._process: _Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Guardian {self._process and self._process.child}>"

    @property
    def pid(self) -> int | None:
        """Process id of the present guardian; None before `start`."""
        return self._process.child.pid if self._process else None

    async def start(self) -> None:
        """Spawn the process, which goes on starting; `wait_ready` must follow.

        Raises:
            HostError: there is no interpreter for it, or it cannot be spawned.
        """
        self._process = await self._spawn()

    async def wait_ready(self) -> None:
        """Wait until the process has reported that it works, for 30 seconds at most.

        Cancellation: leaves the process to `aclose`.

        Raises:
            HostError: it does not work.
        """
        assert self._process is not None, "start() comes first"
        await self._process.wait_ready()
        self._keeping = create_task(self._keep(self._process), name="keep the guardian running")

    async def aclose(self) -> None:
        """Kill the process and wait until it is reaped, for 10 seconds at most.

        Idempotent; safe to call again after cancellation.
        """
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._process is not None:
            self._process.close()
            self._process.child.send_signal(signal.SIGKILL)
            await asyncio.wait([self._process.child.exited], timeout=_KILL_S)

    async def _keep(self, process: _Process) -> None:
        """Restart each guardian that ends, with growing delays."""
        delay = 0.0
        while True:
            began = time.monotonic()
            await asyncio.wait([process.child.exited])
            if time.monotonic() - began >= _DELAY_MAX_S:
                delay = 0.0
            process, delay = await self._restart(delay)
            self._on_restarted(process.child.pid)

    async def _restart(self, delay: float) -> tuple[_Process, float]:
        """Return a guardian that works, and the delay before the next restart."""
        is_reported = False
        while True:
            await asyncio.sleep(delay)  # no event reports that the cause has gone
            delay = min(max(delay * 2, _DELAY_S), _DELAY_MAX_S)
            try:
                self._process = await self._spawn()
                await self._process.wait_ready()
            except HostError as error:
                if not is_reported:
                    self._on_lost(str(error))
                is_reported = True
            else:
                return self._process, delay

    async def _spawn(self) -> _Process:
        """Spawn a guardian; the loop does not run meanwhile.

        Raises:
            HostError: there is no interpreter for it, or it cannot be spawned.
        """
        python = _interpreter(self._python)
        with ExitStack() as resources:
            try:
                errors = memory_file("guardian-stderr")
                resources.callback(os.close, errors)
                report, writer = os.pipe()
                resources.callback(os.close, report)
                numbers = (writer, self._session_list)
                spec = ChildSpec(
                    argv=(python, "-I", "-S", _MAIN, *map(str, numbers), *self._arguments),
                    env={**os.environ, _VARIABLE: "1"},
                    cwd="/",  # it must not keep a file system from being unmounted
                    stdin=self._null,
                    stdout=self._null,
                    stderr=errors,
                    pass_fds=numbers,
                )
                try:
                    child = await self._spawner(spec)
                finally:
                    os.close(writer)
            except (OSError, SpawnError) as error:
                raise HostError(f"{_FAILED}: {error}") from error
            return _Process(child, python, report, errors, resources.pop_all())


class _Process:
    """One guardian process; `wait_ready` must follow, or `close`."""

    def __init__(
        self, child: Child, python: str, report: int, errors: int, resources: ExitStack
    ) -> None:
        """Watch for the report.

        Args:
            child: the process.
            python: its interpreter.
            report: the pipe through which it reports that it works.
            errors: the file that is its stderr.
            resources: closes both.
        """
        self.child = child
        self._python = python
        self._report = report
        self._errors = errors
        self._resources = resources
        loop = asyncio.get_running_loop()
        self._reported: asyncio.Future[None] = loop.create_future()
        loop.add_reader(report, self._on_report)
        resources.callback(loop.remove_reader, report)

    async def wait_ready(self) -> None:
        """Wait until the process reports that it works, for 30 seconds at most.

        Raises:
            HostError: it has ended, or has not reported; it is killed then.
        """
        events = (self._reported, self.child.exited)
        try:
            await asyncio.wait(events, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if not self._reported.done():
                self.child.send_signal(signal.SIGKILL)
                raise HostError(f"{_FAILED}: {self._python} {self._problem()}")
        finally:
            self.close()

    def close(self) -> None:
        """Stop watching for the report.  Idempotent."""
        self._resources.close()

    def _on_report(self) -> None:
        asyncio.get_running_loop().remove_reader(self._report)
        if os.read(self._report, 1):  # else the process has closed it: its exit follows
            set_result_if_pending(self._reported, None)

    def _problem(self) -> str:
        if not self.child.exited.done():
            return f"does not report that it works within {_START_S:g} s"
        *_, last = os.pread(self._errors, 65536, 0).decode("utf-8", "replace").splitlines() or [""]
        reason = f", {one_line(last, 200)}" if last else ""
        return f"ended at once ({self.child.exited.result().status}{reason})"


def _interpreter(fallback: str | None) -> str:
    """Return the running interpreter, or `fallback` in a program that is not run by one.

    Raises:
        HostError: there is none, or this program was started in place of one.
    """
    if not os.path.isfile(_MAIN):
        raise HostError(f"{_FAILED}: {_MAIN} is not a file; the package must not be in an archive")
    if _VARIABLE in os.environ:
        problem = f"this program was started as one: sys.executable is {sys.executable!r}"
        raise HostError(f"{_FAILED}: {problem}, which is no Python interpreter")
    is_frozen = getattr(sys, "frozen", False)
    python = fallback if is_frozen or not sys.executable else sys.executable
    if not python:
        kind = "a frozen application" if is_frozen else "no Python interpreter"
        problem = f"sys.executable is {kind} ({sys.executable!r})"
        raise HostError(f"{_FAILED}: {problem}; name an interpreter by LaunchSpec(python=...)")
    return python
