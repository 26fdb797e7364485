"""`spawn` and `start_processes` for scripts that have no event loop.

::

    from elastic_aio.sync import spawn, start_processes

What waits for its end runs a loop in this thread; what goes on beside the script has
a loop in a thread of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import signal as signals
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from elastic_aio import processes
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.sink import Console
from elastic_aio.processes import RunProcsResult
from elastic_aio.processes.context import warn_of_start_method
from elastic_aio.spec import LogSpec, StartMethod

__all__ = ["ProcessContext", "ProcessGroup", "spawn", "start_context", "start_processes"]

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        is_up: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(is_up)), name="elastic_aio", daemon=True
        )
        self._thread.start()
        is_up.result()

    async def _live(self, is_up: Future[None]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        is_up.set_result(None)
        await self._end.wait()

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run what `make` returns on the loop, and wait for its result."""

        async def work() -> T:
            return await make()

        assert self._loop is not None, "the loop is up"
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    def close(self) -> None:
        """End the loop and its thread; may be repeated."""
        if self._thread.is_alive():
            assert self._loop is not None, "the loop is up"
            assert self._end is not None, "the loop is up"
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


class ProcessGroup:
    """The processes of `start_processes`: a context manager (see `processes.ProcessGroup`)."""

    def __init__(self, group: processes.ProcessGroup) -> None:
        """Use `start_processes` to get one."""
        self._group = group
        self._loop: _LoopThread | None = None

    def __enter__(self) -> ProcessGroup:
        """Start all processes."""
        self._loop = _LoopThread()
        try:
            self._loop.call(self._group.__aenter__)
        except BaseException:  # KeyboardInterrupt too: the loop's thread must end
            self._loop.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop what still runs, and give everything back."""
        assert self._loop is not None, "the block has been entered"
        try:
            self._loop.call(lambda: self._group.__aexit__(kind, error, trace))
        finally:
            self._loop.close()

    def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed; None when the time is over first."""
        assert self._loop is not None, "the block has been entered"
        return self._loop.call(lambda: self._group.wait(timeout))

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._group.pids()

    def close(self, signal: int = signals.SIGTERM, timeout: float = 30.0) -> None:
        """Stop what still runs: `signal`, and after `timeout` seconds SIGKILL."""
        assert self._loop is not None, "the block has been entered"
        self._loop.call(lambda: self._group.close(signal, timeout))


class ProcessContext:
    """The processes of `spawn(..., join=False)` (see `processes.ProcessContext`)."""

    def __init__(self, loop: _LoopThread, context: processes.ProcessContext) -> None:
        """Use `spawn` to get one."""
        self._loop = loop
        self._context = context

    def __enter__(self) -> ProcessContext:
        """Return the context; its processes run already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop what still runs."""
        self.close()

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return self._context.pids()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until processes have ended (see `processes.ProcessContext.join`)."""
        if self._context.is_over:
            return True
        try:
            is_over = self._loop.call(lambda: self._context.join(timeout, grace_period))
        except processes.ProcessException:
            self._loop.close()
            raise
        if is_over:
            self._loop.close()
        return is_over

    def close(self) -> None:
        """Stop what still runs and give everything back; may be repeated."""
        if not self._context.is_over:
            self._loop.call(self._context.aclose)
        self._loop.close()


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str | Sequence[str],
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs: LogSpec | None = None,
    *,
    start_method: StartMethod = "spawn",
    preload: Sequence[str] = (),
    console: Console | None = None,
) -> ProcessGroup:
    """Prepare a group of processes; `with` starts it (see `processes.start_processes`)."""
    group = processes.start_processes(
        name,
        entrypoint,
        args,
        envs,
        logs,
        start_method=start_method,
        preload=preload,
        console=console,
    )
    return ProcessGroup(group)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` in new processes (see `processes.spawn`)."""
    warn_of_start_method(start_method)
    return start_context(fn, args, nprocs, join, daemon, "spawn")


def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> ProcessContext | None:
    """Run `fn(index, *args)` by any start method (see `processes.start_context`)."""
    if join:
        run_coroutine(lambda: processes.start_context(fn, args, nprocs, True, daemon, start_method))
        return None
    loop = _LoopThread()
    try:
        context = loop.call(
            lambda: processes.start_context(fn, args, nprocs, False, daemon, start_method)
        )
    except BaseException:  # KeyboardInterrupt too: the loop's thread must end
        loop.close()
        raise
    if context is None:
        loop.close()
        return None
    return ProcessContext(loop, context)
