"""Children from an argv, on any loop: two ways to spawn behind one `Child`.

On a **stock loop** children come from `asyncio.create_subprocess_exec`, through
public API only.  There asyncio reaps: its return code is taken, and a pidfd that we
open ourselves serves only to signal without racing the reaper (`send_signal` of
asyncio can hit a recycled pid before Python 3.13).  A worker that exits at once
may be reaped before the pidfd is opened; then there is none, and nothing left to
signal.  Our own descriptors are handed over, never PIPE: `Process.wait()` on pipes
waits for their end of file, which a grandchild can hold back.

On **other loops** (uvloop) children come from `subprocess.Popen`, are watched by
pidfd and reaped by `wait4`, which also tells what they used.  uvloop's own
subprocess is unfit for supervision: it ignores `close_fds`, it forks the whole
address space with the loop blocked (76 ms with a parent of 2 GB, where `Popen`
takes 1 ms by vfork), and it hangs when anybody else reaps.

Neither uses `preexec_fn` (it forbids vfork) or PR_SET_PDEATHSIG (it fires when the
spawning *thread* ends, and grandchildren do not inherit it): see `guardian`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time

from elastic_aio.aio import owned_task
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import exits, sweep
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner, spawn_error
from elastic_aio.process.reaped import ReapedChild, story

__all__ = ["command_spawner", "spawn_with_asyncio", "spawn_with_popen"]


def command_spawner(loop: asyncio.AbstractEventLoop) -> Spawner:
    """Return the way to spawn that fits `loop`."""
    return spawn_with_asyncio if isinstance(loop, asyncio.SelectorEventLoop) else spawn_with_popen


async def spawn_with_asyncio(plan: ChildPlan) -> Child:
    """Start a child through asyncio, which will reap it.

    Raises:
        SpawnError: it could not be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *plan.argv,
            env=dict(plan.env),
            cwd=plan.cwd,
            stdin=plan.stdin,
            stdout=plan.stdout,
            stderr=plan.stderr,
            pass_fds=plan.pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise spawn_error(error, plan) from error
    try:
        return _AsyncioChild(process)
    except OSError as error:  # no descriptor left for the pidfd
        process.kill()
        await process.wait()  # it has been killed: this returns at once
        raise spawn_error(error, plan) from error


class _AsyncioChild:
    """A child that asyncio reaps."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._pidfd = self._open_pidfd()
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._wait()

    def __repr__(self) -> str:
        return story(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._pidfd is None or exits.has_ended(self._pidfd)

    def send_signal(self, number: int) -> bool:
        return self._pidfd is not None and sweep.send(self._pidfd, number)

    def _open_pidfd(self) -> int | None:
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except ProcessLookupError:
            return None  # asyncio has reaped it already
        # The pid may even be somebody else's by now: only our own child can be waited for.
        if exits.is_reaped(descriptor):
            os.close(descriptor)
            return None
        return descriptor

    def _wait(self) -> None:
        name = f"exit of {self._process.pid}"
        self._waiter = owned_task(self._process.wait(), name=name)
        self._waiter.add_done_callback(self._on_waited)

    def _on_waited(self, waiter: asyncio.Task[int]) -> None:
        if waiter.cancelled():
            # The loop is being shut down around us, and the stop plan that runs
            # right now learns only from here that the child is gone.
            self._wait()
            return
        status = ExitStatus.from_returncode(waiter.result())
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self.exited.set_result(Exit(status, time.monotonic()))


async def spawn_with_popen(plan: ChildPlan) -> Child:
    """Start a child that we watch by pidfd and reap ourselves.

    Raises:
        SpawnError: it could not be started.
    """
    try:
        process = subprocess.Popen(  # noqa: ASYNC220  # vfork: blocks 1 ms, see above
            plan.argv,
            env=dict(plan.env),
            cwd=plan.cwd,
            stdin=plan.stdin,
            stdout=plan.stdout,
            stderr=plan.stderr,
            pass_fds=plan.pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise spawn_error(error, plan) from error
    try:
        return ReapedChild(process.pid, told=lambda code: setattr(process, "returncode", code))
    except OSError as error:  # no descriptor left for the pidfd
        process.kill()
        process.wait()  # it has been killed: this returns at once
        raise spawn_error(error, plan) from error
