"""The guardian, seen from the agent: started before the first worker, replaced when it dies.

No worker may outlive its supervisor, not even when that is killed by SIGKILL.  The
kernel's own offers fall short: PR_SET_PDEATHSIG reaches the direct child only and
fires when the spawning thread ends; a writable cgroup is a privilege.  So each
agent has one more process, a bare interpreter of about 4 MB that sleeps until the
agent dies and then sweeps (`guardian_main`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable

from elastic_aio.aio import outlast, owned_task
from elastic_aio.errors import SpawnError, SurroundingsError
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner

__all__ = ["Guardian", "open_roster"]

# Seconds between attempts to replace a guardian while the machine refuses one.
_RETRY_S = 1.0
_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian_main.py")


def open_roster() -> int:
    """Return the descriptor of a new, empty roster (see `roster`).

    Raises:
        SurroundingsError: the kernel offers no anonymous files or pidfds.
    """
    if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
        raise SurroundingsError("elastic_aio needs Linux 5.3 or newer (pidfd_open, memfd_create)")
    try:
        return os.memfd_create("elastic_aio-roster", os.MFD_CLOEXEC)
    except OSError as error:
        raise SurroundingsError(f"cannot make an anonymous file: {error.strerror}") from error


class Guardian:
    """Keeps one guardian process alive while the job lasts."""

    def __init__(
        self,
        spawner: Spawner,
        *,
        marker: str,
        since: int,
        roster: int,
        on_replaced: Callable[[int], None],
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            spawner: starts the process.
            marker: name of the job's environment variable.
            since: clock ticks since boot at which the job began.
            roster: descriptor of the sessions' list; stays the caller's to close.
            on_replaced: told the pid when a dead guardian was replaced.
        """
        self._spawner = spawner
        self._marker = marker
        self._since = since
        self._roster = roster
        self._on_replaced = on_replaced
        self._child: Child | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._closed = False
        self._started_at = time.monotonic()
        self._has_replaced = False

    def __repr__(self) -> str:
        return f"<Guardian {self._child}>"

    @property
    def pid(self) -> int | None:
        """Process id of the present guardian."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Start the process; when this returns, the job is guarded.

        That the interpreter is still starting up does not matter: what it waits
        for, it has inherited.

        Raises:
            SurroundingsError: it cannot be started.
        """
        # In a task that nobody cancels: asyncio cleans up after one cancellation in
        # the middle of a spawn, but a second one would leave the child to nobody.
        spawning = owned_task(self._spawn(), name="start the guardian")
        try:
            await outlast(spawning)
        finally:
            if not spawning.cancelled() and spawning.exception() is None:
                self._child = spawning.result()
                self._child.exited.add_done_callback(self._on_exit)
        if self._child is None:
            error = spawning.exception()
            raise SurroundingsError(f"cannot start the guardian process: {error}") from error

    async def aclose(self) -> None:
        """End the process and wait until it is gone."""
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            await asyncio.wait([self._child.exited])

    async def _spawn(self) -> Child:
        supervisor = os.pidfd_open(os.getpid())
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            arguments = (str(supervisor), str(self._roster), self._marker, str(self._since))
            return await self._spawner(
                ChildPlan(
                    argv=(sys.executable, "-I", "-S", _MAIN, *arguments),
                    env=os.environ,
                    cwd="/",  # it must not keep a file system busy
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    pass_fds=(supervisor, self._roster),
                )
            )
        finally:
            os.close(nothing)
            os.close(supervisor)

    def _on_exit(self, exited: asyncio.Future[Exit]) -> None:
        if not self._closed:
            # One that dies young would die again: then not at once.
            is_young = time.monotonic() - self._started_at < _RETRY_S
            delay = _RETRY_S if is_young and self._has_replaced else 0.0
            self._replacing = owned_task(self._replace(delay), name="replace the guardian")

    async def _replace(self, delay: float) -> None:
        await asyncio.sleep(delay)  # what makes it die, no event tells
        self._has_replaced = True
        self._started_at = time.monotonic()
        while True:
            try:
                self._child = await self._spawn()
                break
            except (OSError, SpawnError):
                # The machine is out of processes or descriptors, and no event
                # tells when it has some again.
                await asyncio.sleep(_RETRY_S)
        self._child.exited.add_done_callback(self._on_exit)
        self._on_replaced(self._child.pid)
