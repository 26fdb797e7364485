"""`spawn` and `start_processes` for scripts that have no event loop.

::

    from elastic_aio.sync import spawn, start_processes

A call that waits for all processes runs an event loop in this thread; processes that run beside the
script have an event loop in a thread, which ends with them.

On the main thread SIGTERM, SIGINT, SIGHUP and SIGQUIT stop the processes by their plan; a signal
that is repeated kills them (see `signals`).  Then the signal takes the effect that it has without
this module: it ends the program, raises KeyboardInterrupt, or calls the program's handler.
`signals=False` leaves all signals alone.
"""

from __future__ import annotations

import asyncio
import signal as signals
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from elastic_aio import group as native
from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.group import BareGroup, RunProcsResult
from elastic_aio.launcher import run_coroutine
from elastic_aio.logs.console import ConsoleTarget
from elastic_aio.signals import ReceivedSignals
from elastic_aio.spec.job import NumaMode, StartMethod
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import DEFAULT_GRACE, STOP_SIGNALS

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
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def is_closed(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the loop and its thread.  Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def _stop_signals(is_wanted: bool) -> ReceivedSignals:
    """Return the signals that stop processes; none off the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = STOP_SIGNALS if is_wanted and is_main else ()
    return ReceivedSignals(numbers, numbers)


class GroupThread:
    """The processes of a group, with an event loop in a thread; must be closed."""

    def __init__(self, group: BareGroup, *, signals: bool) -> None:
        """Start the processes; with `signals`, stop signals to this process stop them."""
        self.group = group
        self._received = _stop_signals(signals)
        self._handler: asyncio.Task[None] | None = None
        self._loop = LoopThread()
        try:
            if self._received.numbers:
                self._received.__enter__()
            self.call(self._start())
        except BaseException:  # KeyboardInterrupt too: the loop's thread must end
            self._release()
            raise

    async def _start(self) -> None:
        await self.group.start()
        received, done = self._received, self.group.done
        if received.numbers:
            # The signal goes on its way when the processes have ended.
            handling = self.group.handle_signals(
                received, lambda number: done.add_done_callback(lambda _: received.leave(number))
            )
            self._handler = create_task(handling, name="handle signals")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.call(work)

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    def close(self) -> None:
        """Stop the processes that still run, and release everything.  Idempotent."""
        try:
            if not self._loop.is_closed:
                self.call(self._stop())
        finally:
            self._release()

    async def _stop(self) -> None:
        await self.group.stop()
        if self._handler is not None:
            await cancel_and_wait([self._handler])

    def _release(self) -> None:
        self._loop.close()
        if self._received.numbers:
            self._received.__exit__()


class SyncGroupContext:
    """The processes of `start_processes`: a context manager (`multiprocessing.GroupContext`)."""

    def __init__(self, context: native.GroupContext, signals: bool = True) -> None:
        """Use `start_processes` to get one."""
        self._context = context
        self._takes_signals = signals
        self._running: GroupThread | None = None

    @property
    def _thread(self) -> GroupThread:
        if self._running is None:
            raise RuntimeError("the processes are not started: use `with`")
        return self._running

    def __enter__(self) -> SyncGroupContext:
        self._running = GroupThread(self._context.group, signals=self._takes_signals)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    def wait(self, timeout: float | None = None) -> RunProcsResult | None:
        """Wait until all have succeeded or one has failed; None if the timeout passes first."""
        return self._thread.call(self._context.wait(timeout))

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        return self._context.pids()

    def close(self, signal: int = signals.SIGTERM, timeout: float = DEFAULT_GRACE) -> None:
        """Stop the processes that still run: `signal`, and after `timeout` seconds SIGKILL."""
        self._thread.call(self._context.close(signal, timeout))


class SyncProcessContext:
    """The processes of `spawn(..., join=False)` (see `multiprocessing.ProcessContext`)."""

    def __init__(
        self, thread: GroupThread, on_terminate: Callable[[int], None] | None = None
    ) -> None:
        """Use `spawn` to get one."""
        self._thread = thread
        self._context = native.ProcessContext(thread.group, on_terminate)

    def __enter__(self) -> SyncProcessContext:
        """Return the context; its processes run already."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Whether all processes have exited and all resources are released."""
        return self._context.is_over

    @property
    def joined(self) -> frozenset[int]:
        """Indexes of the processes that `join` has seen to exit."""
        return self._context.joined

    def pids(self) -> list[int]:
        """Return the process ids in order."""
        return self._context.pids()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until processes have exited (see `multiprocessing.ProcessContext.join`)."""
        try:
            return self._thread.is_closed or self._thread.call(
                self._context.join(timeout, grace_period)
            )
        finally:
            if self.is_over:  # a failure ends all processes too
                self.close()

    def close(self) -> None:
        """Stop the processes that still run and release everything.  Idempotent."""
        self._thread.close()


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
    """Prepare a group as `multiprocessing.start_processes` does; for `signals` see the module."""
    context = native.start_processes(
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
    return SyncGroupContext(context, signals)


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
    """Run new processes as `multiprocessing.spawn` does; for `signals` see the module."""
    native.warn_of_start_method(start_method)
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
) -> SyncProcessContext | None:
    """Run processes as `multiprocessing.start_context` does; for `signals` see the module."""
    group = native.make_processes(fn, args, nprocs, daemon, start_method)
    if group is None:
        return None
    if join:
        join_processes(group, signals=signals)
        return None
    return SyncProcessContext(GroupThread(group, signals=signals))


def join_processes(
    group: BareGroup, *, signals: bool = True, on_terminate: Callable[[int], None] | None = None
) -> None:
    """Run the processes of a group to their end, with an event loop in this thread."""
    received = _stop_signals(signals)
    context = native.ProcessContext(group, on_terminate)

    async def join() -> None:
        await group.start()
        async with context:
            handlers: list[asyncio.Task[None]] = []
            if received.numbers:
                handling = group.handle_signals(received, received.resend)
                handlers.append(create_task(handling, name="handle signals"))
            try:
                while not await context.join():
                    pass
            finally:
                await cancel_and_wait(handlers)

    with received if received.numbers else nullcontext():
        run_coroutine(join)
