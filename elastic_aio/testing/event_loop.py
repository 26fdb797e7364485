"""Event loops in virtual time: one for each process of a simulated host.

Nothing polls a kernel: a loop has no selector, and `VirtualTime` jumps to its next call.  When a
timer fires or a message arrives, the loop of its process runs the callback, and then every callback
that became ready by it.

A suspended host (SIGSTOP, a paused virtual machine) runs nothing.  Arrivals wait in its kernel, and
are delivered when the host resumes: messages before timers, as by asyncio's loops, or timers before
messages, as by libuv.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Final, Protocol, TypeVar, TypeVarTuple

from elastic_aio.testing.virtual_time import SimHost, VirtualTime

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_BUSY: Final = 100_000
"""Callbacks that one event may cause; a process that makes more of them spins."""

_TICK: Final = 1e-6
"""Seconds by which a timer is late at least: a rounding error must not make it early."""

_DISPOSAL_ROUNDS: Final = 1_000


class OpenFile(Protocol):
    """What the kernel closes at the end of a process: a connection or a listener."""

    def close(self) -> None:
        """Close it.  Idempotent."""


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one process."""

    def __init__(self, time: VirtualTime, host: SimHost, on_error: Callable[[str], object]) -> None:
        """Begin; `on_error` is called with each error that no code of the process handles."""
        self.host = host
        self.is_dead = False
        self.is_disposed = False
        self.files: dict[OpenFile, None] = {}
        self.unsent: list[Callable[[], None]] = []
        """Called when the present callbacks have run, to send their messages."""
        self._time = time
        self._on_error = on_error
        self._ready: deque[asyncio.Handle] = deque()
        self._backlog: list[asyncio.Handle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._tasks_max = 64
        self._latest = 0.0
        self._disposal: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0

    def __repr__(self) -> str:
        return f"<SimLoop of {self.host.name}>"

    # ---------------------------------------------------------------- running

    def run(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call in this process now, and all that becomes ready by it."""
        self._run(events.Handle(call, args, self))

    def receive(self, call: Callable[..., object], *args: Any) -> None:
        """Make a call for an arrival; when the host resumes, if it is suspended."""
        self._enter(events.Handle(call, args, self))

    def inject(self, call: Callable[..., object], *args: Any) -> None:
        """Let a call arrive from outside of the simulation.

        Not now: only the steps of the simulation have its seed in the module `random`.  A host that
        is suspended keeps the order of the arrivals.
        """
        if self.host.is_suspended:
            self.receive(call, *args)
        else:
            self._time.at(self._time.now, self.receive, call, *args)

    def catch_up(self, *, timers_first: bool) -> None:
        """Make the calls that arrived while the host was suspended."""
        backlog, self._backlog = self._backlog, []
        for handle in sorted(backlog, key=_is_timer, reverse=timers_first):
            self._time.at(self._time.now, self._enter, handle)

    def _enter(self, handle: asyncio.Handle) -> None:
        if self.is_dead or handle.cancelled():
            return
        if self.host.is_suspended:
            self._backlog.append(handle)
            return
        if isinstance(handle, asyncio.TimerHandle):
            # As a real clock would: a deadline that has come has passed.
            self._latest = max(handle.when() + _TICK, self._latest)
        self._run(handle)

    def _run(self, handle: asyncio.Handle) -> None:
        ready, left = self._ready, _BUSY
        ready.append(handle)
        former = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while ready:
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                left -= 1
                if not left:
                    ready.clear()
                    self._on_error(f"{self!r} spins: {handle!r}")
        finally:
            events._set_running_loop(former)
        if self.unsent:
            unsent, self.unsent = self.unsent, []
            for flush in unsent:
                flush()

    # --------------------------------------------------------------- the end

    def kill(self) -> None:
        """End the process: its kernel closes what is open, and nothing of it runs any more."""
        self.is_dead = True
        for file in list(self.files):
            file.close()
        self._backlog.clear()
        # Not now: a callback of this very process may be the caller.
        self._time.at(self._time.now, self.dispose)

    def dispose(self) -> None:
        """Cancel the tasks of a dead process, and run them to their ends, now and without effect.

        A task that is dropped instead would run its clean-up whenever the interpreter collects it.
        """
        self.is_disposed = True
        for task in list(self._tasks):
            task.cancel()
        for _ in range(_DISPOSAL_ROUNDS):
            self.run(lambda: None)
            if not self._disposal or all(task.done() for task in self._tasks):
                break
            when, _, timer = heapq.heappop(self._disposal)
            self._latest = max(when, self._latest)
            self._ready.append(timer)
        self._tasks.clear()
        self._disposal.clear()

    # ------------------------------------------------------ the loop's own API

    def time(self) -> float:
        now, latest = self.host.monotonic, self._latest
        return now if now > latest else latest  # called so often that `max` costs

    def wall_clock(self) -> float:
        """Return Unix seconds by the clock of the host."""
        return self.host.wall_clock

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = events.TimerHandle(when, callback, args, self, context)
        if self.is_dead:
            self._count += 1
            heapq.heappush(self._disposal, (when, self._count, timer))
        else:
            self._time.at(self.host.virtual_time(when), self._enter, timer)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        if len(self._tasks) >= self._tasks_max:
            self._tasks = {one: None for one in self._tasks if not one.done()}
            self._tasks_max = 2 * len(self._tasks) + 64
        self._tasks[task] = None
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_dead:
            error = f"{context.get('message')}: {context.get('exception')!r}"
            self._on_error(f"{self.host.name}: an error was not handled: {error}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""


def _is_timer(handle: asyncio.Handle) -> bool:
    return isinstance(handle, asyncio.TimerHandle)
