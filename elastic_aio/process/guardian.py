"""The agent's side of the guardian process: started before the workers, kept running.

No worker may outlive its supervisor, not even one that is killed by SIGKILL.  The
kernel's own means do not suffice: PR_SET_PDEATHSIG reaches the direct child only and
fires when the spawning thread ends; a writable cgroup needs privileges.  So each agent
has one more process, a bare interpreter of about 4 MB that waits until the agent ends
and then kills what is left (`guardian_main`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

from elastic_aio.aio import create_task, wait_shielded
from elastic_aio.errors import HostError, SpawnError
from elastic_aio.process.base import Child, ChildExit, ChildSpec, Spawner
from elastic_aio.process.calls import memory_file

# Seconds between attempts to restart a guardian while spawning fails.
_RETRY_S = 1.0
_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian_main.py")


def open_session_list() -> int:
    """Return the descriptor of a new, empty session list (see `proc_scan`).

    Raises:
        HostError: the kernel has no anonymous files or pidfds, or no descriptor is left.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        raise HostError("elastic_aio needs Linux 5.3 or newer (pidfd_open, memfd_create)")
    return memory_file("sessions")


class Guardian:
    """Keeps one guardian process running while the job lasts; must be closed."""

    def __init__(
        self,
        spawner: Spawner,
        *,
        marker: str,
        since: int,
        session_list: int,
        on_restarted: Callable[[int], None],
    ) -> None:
        """Configure; nothing is started yet.

        Args:
            marker: name of the job's environment variable.
            since: clock ticks since boot at which the job began.
            session_list: descriptor of the session list; the caller closes it.
            on_restarted: called with the pid of a guardian that took the place of one
                that had ended.
        """
        self._spawner = spawner
        self._marker = marker
        self._since = since
        self._session_list = session_list
        self._on_restarted = on_restarted
        self._child: Child | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closed = False
        self._started_at = time.monotonic()
        self._has_restarted = False

    def __repr__(self) -> str:
        return f"<Guardian {self._child}>"

    @property
    def pid(self) -> int | None:
        """Process id of the present guardian; None before `start`."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process; when this returns, the job is guarded.

        Its interpreter may still be starting up: it has inherited the pidfd it waits on.

        Cancellation: raised after the spawn has ended.

        Raises:
            HostError: the process cannot be started.
        """
        # In a task that is never cancelled: asyncio cleans up after one cancellation in
        # the middle of a spawn, but after a second one the child would have no owner.
        spawning = create_task(self._spawn(), name="start the guardian")
        try:
            await wait_shielded(spawning)
        finally:
            if not spawning.cancelled() and spawning.exception() is None:
                self._child = spawning.result()
                self._child.exited.add_done_callback(self._on_exit)
        if self._child is None:
            error = spawning.exception()
            raise HostError(f"cannot start the guardian process: {error}") from error

    async def aclose(self) -> None:
        """Kill the process and wait until it is reaped.

        Idempotent; safe to call again after cancellation.
        """
        self._is_closed = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            await asyncio.wait([self._child.exited])

    async def _spawn(self) -> Child:
        supervisor = os.pidfd_open(os.getpid())
        devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            arguments = (str(supervisor), str(self._session_list), self._marker, str(self._since))
            return await self._spawner(
                ChildSpec(
                    argv=(sys.executable, "-I", "-S", _MAIN, *arguments),
                    env=os.environ,
                    cwd="/",  # it must not keep a file system from being unmounted
                    stdin=devnull,
                    stdout=devnull,
                    stderr=devnull,
                    pass_fds=(supervisor, self._session_list),
                )
            )
        finally:
            os.close(devnull)
            os.close(supervisor)

    def _on_exit(self, exited: asyncio.Future[ChildExit]) -> None:
        if not self._is_closed:
            # One that ends soon after its start may do so again: wait before the next.
            was_short = time.monotonic() - self._started_at < _RETRY_S
            delay = _RETRY_S if was_short and self._has_restarted else 0.0
            self._restarting = create_task(self._restart(delay), name="restart the guardian")

    async def _restart(self, delay: float) -> None:
        await asyncio.sleep(delay)  # no event reports the end of what killed it
        self._has_restarted = True
        self._started_at = time.monotonic()
        while True:
            try:
                self._child = await self._spawn()
                break
            except (OSError, SpawnError):
                # The host is out of processes or descriptors, and no event reports when
                # it has some again.
                await asyncio.sleep(_RETRY_S)
        self._child.exited.add_done_callback(self._on_exit)
        self._on_restarted(self._child.pid)
