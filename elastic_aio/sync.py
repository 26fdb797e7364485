"""`spawn` and `start_processes` for scripts that have no event loop.

::

    from elastic_aio.sync import spawn, start_processes

A call that waits for all processes runs an event loop in this thread; processes that
run beside the script have an event loop in a thread, which ends with them.
"""

from __future__ import annotations

import asyncio
import signal as signals
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from elastic_aio import multiprocessing
from elastic_aio.launcher import run_coroutine
from elastic_aio.multiprocessing import RunProcsResult
from elastic_aio.multiprocessing.context import warn_of_start_method
from elastic_aio.spec.job import StartMethod
from elastic_aio.spec.logs import LogSpec

__all__ = ["SyncGroupContext", "SyncProcessContext", "spawn", "start_context", "start_processes"]

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread of its own; must be closed."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        # Made here, so that a lack of descriptors is an error of the caller.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="elastic_aio", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._runner.close()
            raise

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stop.wait())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the loop and its thread.  Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class SyncGroupContext:
    """The processes of `start_processes`: a context manager (`multiprocessing.GroupContext`)."""

    def __init__(self, group: multiprocessing.GroupContext) -> None:
        """Use `start_processes` to get one."""
        self._group = group
        self._thread: _LoopThread | None = None

    @property
    def _loop(self) -> _LoopThread:
        if self._thread is None:
            raise RuntimeError("the processes are not started: use `with`")
        return self._thread

    def __enter__(self) -> SyncGroupContext:
        """Start all processes."""
        self._thread = _LoopThread()
        try:
            self._loop.call(self._group.__aenter__())
        except BaseException:  # KeyboardInterrupt too: the loop's thread must end
            self._loop.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes that still run, and release everything."""
        try:
            self._loop.call(self._group.__aexit__(None, None, None))
        finally:
            self._loop.close()

    def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed; None if the timeout passes first."""
        return self._loop.call(self._group.wait(timeout))

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._group.pids()

    def close(self, signal: int = signals.SIGTERM, timeout: float = 30.0) -> None:
        """Stop the processes that still run: `signal`, and after `timeout` seconds SIGKILL."""
        self._loop.call(self._group.close(signal, timeout))


class SyncProcessContext:
    """The processes of `spawn(..., join=False)` (see `multiprocessing.ProcessContext`)."""

    def __init__(self, loop: _LoopThread, context: multiprocessing.ProcessContext) -> None:
        """Use `spawn` to get one."""
        self._loop = loop
        self._context = context

    def __enter__(self) -> SyncProcessContext:
        """Return the context; its processes run already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes that still run."""
        self.close()

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return self._context.pids()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until processes have exited (see `multiprocessing.ProcessContext.join`)."""
        try:
            return self._context.is_over or self._loop.call(
                self._context.join(timeout, grace_period)
            )
        finally:
            if self._context.is_over:  # a failure ends all processes too
                self._loop.close()

    def close(self) -> None:
        """Stop the processes that still run and release everything.  Idempotent."""
        if not self._context.is_over:
            self._loop.call(self._context.aclose())
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
    console: tuple[int, int] | None = None,
) -> SyncGroupContext:
    """Prepare a group of processes; `with` starts it (see `multiprocessing.start_processes`)."""
    group = multiprocessing.start_processes(
        name,
        entrypoint,
        args,
        envs,
        logs,
        start_method=start_method,
        preload=preload,
        console=console,
    )
    return SyncGroupContext(group)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> SyncProcessContext | None:
    """Run `fn(index, *args)` in new processes (see `multiprocessing.spawn`)."""
    warn_of_start_method(start_method)
    return start_context(fn, args, nprocs, join, daemon, "spawn")


def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
) -> SyncProcessContext | None:
    """Run `fn(index, *args)` by any start method (see `multiprocessing.start_context`)."""
    call = (fn, args, nprocs, join, daemon, start_method)
    if join:
        run_coroutine(lambda: multiprocessing.start_context(*call))
        return None
    loop = _LoopThread()
    context = None
    try:
        context = loop.call(multiprocessing.start_context(*call))
    finally:
        if context is None:  # nothing runs; KeyboardInterrupt too: the loop's thread must end
            loop.close()
    return None if context is None else SyncProcessContext(loop, context)
