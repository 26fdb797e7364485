"""`spawn` and `start_processes` for scripts that have no event loop.

::

    from elastic_aio.sync import spawn, start_processes

A call that waits for all processes runs an event loop in this thread; processes that
run beside the script have an event loop in a thread, which ends with them.

On the main thread SIGTERM, SIGINT, SIGHUP and SIGQUIT stop the processes by their plan,
which starts with the received signal; a second one kills them.  Then the signal takes the
effect that it has without this module: it ends the program, raises KeyboardInterrupt, or
calls the program's handler.  `signals=False` leaves all signals alone.
"""

from __future__ import annotations

import asyncio
import signal as signals
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from elastic_aio import multiprocessing
from elastic_aio.agent.agent import Agent
from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.multiprocessing import RunProcsResult
from elastic_aio.multiprocessing.context import warn_of_start_method
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.job import NumaMode, StartMethod
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import DEFAULT_GRACE, SignalSpec

__all__ = ["SyncGroupContext", "SyncProcessContext", "spawn", "start_context", "start_processes"]

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own; must be closed."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        # Made here, so that a lack of descriptors is an error of the caller.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="elastic_aio", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # KeyboardInterrupt too: no loop stays open
            self._runner.close()
            raise

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._stop.wait())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def is_closed(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the loop and its thread.  Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _stop_signals(is_wanted: bool) -> ReceivedSignals:
    """Return the signals that stop processes; none off the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return ReceivedSignals(SignalSpec().stop if is_wanted and is_main else ())


class _SignalHandler:
    """Stops the processes of an agent at the signals of its block."""

    def __init__(self, is_wanted: bool) -> None:
        self._received = _stop_signals(is_wanted)
        self._task: asyncio.Task[None] | None = None
        self._is_entered = is_wanted and threading.current_thread() is threading.main_thread()
        if self._is_entered:
            self._received.__enter__()

    def start(self, agent: Agent) -> None:
        """Begin on the running event loop, which is another thread's."""
        if self._is_entered:
            done = agent._started_driver.done
            handling = agent._handle_signals(
                self._received,
                SignalSpec(forward=()),
                lambda number: done.add_done_callback(lambda _: self._received.leave(number)),
            )
            self._task = create_task(handling, name="handle signals")

    async def aclose(self) -> None:
        """End on the event loop; `close` follows on the main thread."""
        if self._task is not None:
            await cancel_and_wait([self._task])

    def close(self) -> None:
        """Restore the handlers.  Idempotent."""
        if self._is_entered:
            self._received.__exit__()


class SyncGroupContext:
    """The processes of `start_processes`: a context manager (`multiprocessing.GroupContext`)."""

    def __init__(self, group: multiprocessing.GroupContext, signals: bool = True) -> None:
        """Use `start_processes` to get one."""
        self._group = group
        self._takes_signals = signals
        self._handler: _SignalHandler | None = None
        self._thread: LoopThread | None = None

    @property
    def _loop(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the processes are not started: use `with`")
        return self._thread

    def __enter__(self) -> SyncGroupContext:
        """Start all processes."""
        thread = self._thread = LoopThread()
        handler: _SignalHandler | None = None
        try:
            handler = self._handler = _SignalHandler(self._takes_signals)
            thread.call(self._start(handler))
        except BaseException:  # KeyboardInterrupt too: the loop's thread must end
            thread.close()
            if handler is not None:
                handler.close()
            raise
        return self

    async def _start(self, handler: _SignalHandler) -> None:
        await self._group.__aenter__()
        handler.start(self._group._group.agent)

    def __exit__(self, *_: object) -> None:
        """Stop the processes that still run, and release everything."""
        handler = self._handler
        assert handler is not None, "the block has been entered"
        try:
            self._loop.call(self._group.__aexit__(None, None, None))
            self._loop.call(handler.aclose())
        finally:
            self._loop.close()
            handler.close()

    def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed; None if the timeout passes first."""
        return self._loop.call(self._group.wait(timeout))

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._group.pids()

    def close(self, signal: int = signals.SIGTERM, timeout: float = DEFAULT_GRACE) -> None:
        """Stop the processes that still run: `signal`, and after `timeout` seconds SIGKILL."""
        self._loop.call(self._group.close(signal, timeout))


class SyncProcessContext:
    """The processes of `spawn(..., join=False)` (see `multiprocessing.ProcessContext`)."""

    def __init__(
        self, loop: LoopThread, context: multiprocessing.ProcessContext, handler: _SignalHandler
    ) -> None:
        """Use `spawn` to get one."""
        self._loop = loop
        self._context = context
        self._handler = handler

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
            return self._loop.is_closed or self._loop.call(
                self._context.join(timeout, grace_period)
            )
        finally:
            if self._context.is_over:  # a failure ends all processes too
                self._release()

    def close(self) -> None:
        """Stop the processes that still run and release everything.  Idempotent."""
        if not self._loop.is_closed:
            self._loop.call(self._context.aclose())
            self._release()

    def _release(self) -> None:
        if not self._loop.is_closed:
            self._loop.call(self._handler.aclose())
            self._loop.close()
        self._handler.close()


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str | Sequence[str],
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs: LogSpec | None = None,
    *,
    start_method: StartMethod = "spawn",
    preload: Sequence[str] = (),
    numa_binding: NumaMode | None = None,
    console: ConsoleTarget | None = None,
    signals: bool = True,
) -> SyncGroupContext:
    """Prepare a group of processes; `with` starts it (see `multiprocessing.start_processes`).

    Args:
        signals: whether stop signals stop the processes first (see the module).
    """
    group = multiprocessing.start_processes(
        name,
        entrypoint,
        args,
        envs,
        logs,
        start_method=start_method,
        preload=preload,
        numa_binding=numa_binding,
        console=console,
    )
    return SyncGroupContext(group, signals)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
    *,
    signals: bool = True,
) -> SyncProcessContext | None:
    """Run `fn(index, *args)` in new processes (see `multiprocessing.spawn`).

    Args:
        signals: whether stop signals stop the processes first (see the module).
    """
    warn_of_start_method(start_method)
    return start_context(fn, args, nprocs, join, daemon, "spawn", signals=signals)


def start_context(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: StartMethod = "spawn",
    *,
    signals: bool = True,
    _on_terminate: Callable[[int], None] | None = None,
) -> SyncProcessContext | None:
    """Run `fn(index, *args)` by any start method (see `multiprocessing.start_context`).

    Args:
        signals: whether stop signals stop the processes first (see the module).
    """
    start = partial(
        multiprocessing.start_context,
        fn,
        args,
        nprocs,
        False,
        daemon,
        start_method,
        _on_terminate=_on_terminate,
    )
    if join:
        received = _stop_signals(signals)
        with received if received.numbers else nullcontext():
            run_coroutine(lambda: _join(start, received))
        return None
    loop = LoopThread()
    handler: _SignalHandler | None = None
    context = None
    try:
        handler = _SignalHandler(signals)
        context = loop.call(_start_context(start, handler))
    finally:
        if context is None:  # nothing runs; KeyboardInterrupt too: the loop's thread must end
            loop.close()
            if handler is not None:
                handler.close()
    return None if context is None else SyncProcessContext(loop, context, handler)


Start = Callable[[], Coroutine[Any, Any, multiprocessing.ProcessContext | None]]


async def _start_context(
    start: Start, handler: _SignalHandler
) -> multiprocessing.ProcessContext | None:
    context = await start()
    if context is not None:
        handler.start(context._group.agent)
    return context


async def _join(start: Start, received: ReceivedSignals) -> None:
    """Run processes to their end on the main thread, or where no signals are handled."""
    context = await start()
    if context is None:
        return
    async with context:
        handling = context._group.agent._handle_signals(
            received, SignalSpec(forward=()), received.resend
        )
        handler = create_task(handling, name="handle signals") if received.numbers else None
        try:
            while not await context.join():
                pass
        finally:
            if handler is not None:
                await cancel_and_wait([handler])
            else:
                handling.close()
