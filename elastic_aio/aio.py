"""Asyncio primitives of this package: shielded work, threads, notification, streams, a clock.

The public functions can be called from asyncio and from anyio code, so cancellation arrives in two
ways: once per native `Task.cancel()`, or at every await inside a cancelled anyio scope.  anyio is
used here, and only here, to be correct under both: a shielded `CancelScope` keeps the second kind
away from a teardown that must complete.

Files on disks are read through aiofiles (`read_file`), all other blocking calls are made by
`run_in_thread`.  Both packages are imported when first needed: anyio's asyncio backend alone takes
20 ms to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Executor, Future
from typing import Any, Generic, Never, ParamSpec, TypeVar, TypeVarTuple

from elastic_aio.errors import HostError

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


# Seconds by which a process that runs may notice a time late.
_LATE_S = 0.5

# How many jobs each loop runs.
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, int] = weakref.WeakKeyDictionary()


def separate_in_forks(until: asyncio.Future[None]) -> None:
    """Give the copy of the loop in each fork of this process an epoll set of its own."""
    # A fork that closes its copy of the loop, as `sys.exit` in a coroutine does, would remove all
    # that the parent waits for from a shared set (epoll(7)).  An own set reports nothing, so a fork
    # can go on with the loop only after `until`.
    loop = until.get_loop()
    _loops[loop] = _loops.get(loop, 0) + 1
    until.add_done_callback(_share_with_forks)


def _share_with_forks(done: asyncio.Future[None]) -> None:
    loop = done.get_loop()
    _loops[loop] -= 1
    if not _loops[loop]:
        del _loops[loop]


def _separate_loops() -> None:
    for loop in _loops:
        # Neither asyncio nor uvloop has a public way to the set; without these names it stays.
        get_descriptor = getattr(loop, "_get_backend_id", None)  # uvloop
        if get_descriptor is None:
            get_descriptor = getattr(getattr(loop, "_selector", None), "fileno", None)
        try:
            descriptor = get_descriptor() if get_descriptor is not None else -1
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                with select.epoll() as empty:
                    os.dup2(empty.fileno(), descriptor, inheritable=False)
        except (OSError, ValueError):
            continue  # closed, or no descriptor is left


os.register_at_fork(after_in_child=_separate_loops)


class ForkGuard:
    """Says whether this is a copy in a fork of the process in which it was made.

    A copy signals, reaps and closes nothing: all of that is the parent's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_copy(self) -> bool:
        """By the pid: a fork by a library calls no hook of Python."""
        return os.getpid() != self._pid


def check_select() -> None:
    """Raise HostError in a program that has taken `select.epoll` away."""
    if not hasattr(select, "epoll"):
        problem = "this program has no select.epoll, which gevent's monkey patching removes"
        raise HostError(f"{problem}: start jobs in a process that is not patched")


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop, or raise RuntimeError under trio, HostError: see `check_select`."""
    # Public entry points call it before they do anything.
    check_select()
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        portal = 'a portal (anyio.from_thread.start_blocking_portal("asyncio")) runs it beside trio'
        raise RuntimeError(f"elastic_aio runs on asyncio only; {portal}") from None


def wall_clock() -> float:
    """Return Unix seconds by the clock of this host; the loop of a simulated host has its own."""
    clock: Callable[[], float] = getattr(asyncio._get_running_loop(), "wall_clock", time.time)
    return clock()


def monotonic_clock() -> float:
    """Return seconds by the monotonic clock of this host, now."""
    # The time of a uvloop is the start of its last iteration.  A simulated host has no other clock
    # than its loop.
    loop = asyncio.get_running_loop()
    return loop.time() if hasattr(loop, "wall_clock") else time.monotonic()


def random_bytes(size: int) -> bytes:
    """Return bytes for a name or a secret; the bytes of a simulated loop repeat with its seed."""
    source: Callable[[int], bytes]
    source = getattr(asyncio._get_running_loop(), "random_bytes", os.urandom)
    return source(size)


async def run_shielded(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `start` makes to its end, however often the caller is cancelled.

    A closing event loop cancels every task, the task of the coroutine too; then another coroutine
    is started.  So the coroutine must be idempotent, and bounded in time.  Its exception is raised.

    Cancellation: raised after the coroutine has ended; in a fork at once.
    """
    fork = ForkGuard()
    task = create_task(start())
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await wait_shielded(task)
        except asyncio.CancelledError as error:
            cancelled = error
            if fork.is_copy:
                raise  # the work is the parent's
        if not task.cancelled():
            break
        task = create_task(start())
    if cancelled is not None:
        task.exception()  # marks it as retrieved: the cancellation takes its place
        raise cancelled
    return task.result()


async def wait_shielded(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, however often the caller is cancelled before.

    Cancellation: raised after `future` is done; in a fork at once.
    """
    # Two protections are needed at once.  A native `Task.cancel()` is answered by waiting again.
    # Inside a cancelled anyio scope that loop would spin, since anyio raises its cancellation anew
    # at every await; so the wait is also under an anyio shield.  A scope can exist only if its
    # backend has been imported, hence the check of `sys.modules`: an import could fail by now.
    fork = ForkGuard()
    cancelled: asyncio.CancelledError | None = None
    with _anyio_shield():
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                if fork.is_copy:
                    raise  # what it waits for happens in the parent
    if cancelled is not None:
        raise cancelled


def _anyio_shield() -> contextlib.AbstractContextManager[object]:
    if "anyio._backends._asyncio" not in sys.modules:
        return contextlib.nullcontext()
    import anyio

    return anyio.CancelScope(shield=True)


async def run_in_thread(function: Callable[[*Ts], T], *args: *Ts, daemon: bool = False) -> T:
    """Run a blocking function in a new thread; without one to be had, run it here.

    The program does not wait for a `daemon` thread when it exits: for calls that may block for
    long, such as a resolver that does not answer.

    Cancellation: leaves the thread running; its result is dropped.
    """
    # The loop's default executor is not used: its threads would outlive the job.
    executor = _ThreadPerCall(daemon=daemon)
    result = await asyncio.wrap_future(executor.submit(function, *args))
    executor.shutdown()
    return result


async def read_file(path: str) -> bytes:
    """Read a file off the loop, or raise OSError: a disk may be slow or silent.

    Cancellation: a thread that a disk blocks runs on; it ends with the program.
    """
    import aiofiles

    executor = _ThreadPerCall(daemon=True)
    # Not `async with`: its end closes the file in the loop's default executor.
    file = await aiofiles.open(path, "rb", executor=executor)
    try:
        content = await file.read()
    finally:
        await file.close()
    executor.shutdown()
    return content


def read_cached(descriptor: int, offset: int, size: int) -> bytes | None:
    """Read a part of an open file, if the page cache has its beginning, or raise OSError.

    Returns `size` bytes or fewer, none only at the end of the file; None if the disk has to be
    asked, or if the file system cannot say.  Does not block.
    """
    # A thread costs more than the copy of some hundred kilobytes, and on a busy host it may begin
    # to run much later.
    buffer = bytearray(size)
    try:
        count = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT) if size else 0
    except OSError as error:
        # The latter is from file systems without such reads, such as tmpfs.
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return None
        raise
    return bytes(memoryview(buffer)[:count])


class _ThreadPerCall(Executor):
    """Runs each call in a new thread, or in the caller's where none can be started."""

    def __init__(self, *, daemon: bool) -> None:
        self._daemon = daemon
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a thread cannot be cancelled

        def run() -> None:
            try:
                result = function(*args, **kwargs)
            except StopIteration as error:  # which no future of asyncio takes
                raised = RuntimeError(f"the call raised {error!r}")
                raised.__cause__ = error
                future.set_exception(raised)
            except BaseException as error:  # noqa: BLE001  # raised where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        thread = threading.Thread(target=run, name="run_in_thread", daemon=self._daemon)
        try:
            thread.start()
        except RuntimeError:  # can't start new thread
            run()
        else:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the threads, which are about to end: a process that forks should have none."""
        for thread in self._threads:
            thread.join()


def create_task(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Start a task that the caller keeps, awaits and cancels."""
    # Each call names one owner; a task without an owner is a bug (RUF006).
    return asyncio.get_running_loop().create_task(work, name=name)


async def cancel_and_wait(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; their exceptions are dropped."""
    pending = [task for task in tasks if task.cancel()]
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled():
            task.exception()


async def first_result(work: list[Coroutine[Any, Any, T]]) -> T:
    """Run coroutines until one ends; return its result, or raise its error."""
    # If several end at once, a failure is preferred: its error says why.
    if len(work) == 1:
        return await work[0]
    tasks = [create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)
    failed = {task: not task.cancelled() and task.exception() is not None for task in tasks}
    ended = [task for task in tasks if task in done]
    return max(ended, key=failed.__getitem__).result()


async def wait_forever() -> Never:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def wait_readable(descriptors: Iterable[int], timeout: float | None = None) -> None:
    """Wait until a descriptor is readable; raise TimeoutError after `timeout` seconds.

    Other errors say that the loop cannot watch one of them.
    """
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.ExitStack() as stack:
        for descriptor in descriptors:
            loop.add_reader(descriptor, is_readable.set)
            stack.callback(loop.remove_reader, descriptor)
        try:
            async with asyncio.timeout(timeout):
                await is_readable.wait()
        except TimeoutError:
            raise TimeoutError("timed out") from None


class Notifier:
    """Wakes the tasks of one loop that wait for a change of some state.

    A condition variable without a lock: tasks of one loop need none.  A notification is not
    remembered, so a waiter checks the state, waits, and checks again::

        while not self._unread:
            await self._changed.wait()
    """

    def __init__(self) -> None:
        # Ordered: the tasks wake up in the order in which they began to wait.
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait for the next notification; return False if `timeout` seconds pass first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[future] = None
        try:
            if timeout is None:
                await future
            else:
                await asyncio.wait([future], timeout=timeout)
            return future.done()
        finally:
            del self._waiters[future]

    def notify_all(self) -> None:
        for future in self._waiters:
            set_result_if_pending(future, None)


def set_result_if_pending(future: asyncio.Future[T], value: T) -> None:
    """Set the result of `future` unless it is done: its waiter may have been cancelled."""
    if not future.done():
        future.set_result(value)


def when_all_done(futures: Iterable[asyncio.Future[Any]]) -> asyncio.Future[None]:
    """Return a future that is done when all of `futures` are; it never fails."""
    # Unlike `asyncio.gather` it cancels none of them when it is cancelled, and costs one callback
    # each, however often it is awaited.
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pending = set(futures)

    def on_done(future: asyncio.Future[Any]) -> None:
        pending.discard(future)
        if not pending:
            set_result_if_pending(result, None)

    for future in tuple(pending):
        future.add_done_callback(on_done)
    if not pending:
        result.set_result(None)
    return result


class EventHistory(Generic[T]):
    """A stream with one writer and many readers, which `close` ends.

    A reader has a position, not a queue.  The writer never waits, an idle reader costs nothing, and
    a reader that falls behind the kept items gets the number of items that it missed.  The last
    item is always kept, so every reader gets the end.
    """

    def __init__(self, keep: int, on_gap: Callable[[int, int], T]) -> None:
        """Keep the last `keep` items.

        `on_gap` makes the item that stands for dropped items, from their number and the position of
        the oldest kept item.
        """
        self._items: deque[T] = deque(maxlen=keep)
        self._on_gap = on_gap
        self.count = 0  # items that were ever added: the position of the next item
        self.is_closed = False
        self.changed = Notifier()  # notified of each item, and of the end

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "open"
        return f"<EventHistory {state} after {self.count} items, {len(self._items)} kept>"

    def append(self, item: T) -> None:
        self._items.append(item)
        self.count += 1
        self.changed.notify_all()

    def close(self) -> None:
        """End the stream: readers stop after the last item."""
        self.is_closed = True
        self.changed.notify_all()

    def read(self, start: int = 0) -> EventReader[T]:
        return EventReader(self, start)

    def at(self, position: int) -> tuple[T, int] | None:
        """Return the item at `position` and the next position; None if not there yet."""
        oldest = self.count - len(self._items)
        if position < oldest:
            return self._on_gap(oldest - position, oldest), oldest
        if position < self.count:
            return self._items[position - oldest], position + 1
        return None


class EventReader(Generic[T]):
    """An async iterator over an `EventHistory`.

    Cancellation: loses no item.
    """

    # No async generator, so that breaking out of `async for` leaves no suspended frame.

    def __init__(self, history: EventHistory[T], start: int) -> None:
        self._history = history
        self._position = start
        self._is_closed = False

    def __aiter__(self) -> EventReader[T]:
        return self

    async def __anext__(self) -> T:
        history = self._history
        while not self._is_closed:
            if entry := history.at(self._position):
                item, self._position = entry
                return item
            if history.is_closed:
                break
            await history.changed.wait()
        raise StopAsyncIteration

    @property
    def is_over(self) -> bool:
        """Whether no item follows."""
        return self._is_closed or (
            self._history.is_closed and self._history.at(self._position) is None
        )

    async def aclose(self) -> None:
        """End the iteration: the next item requested raises `StopAsyncIteration`."""
        self._is_closed = True


class PausableClock:
    """A monotonic clock, in seconds, that stands still while the job or this process does.

    Deadlines of a job must not all expire when Ctrl-Z or a freezer has suspended it.  Nothing tells
    of a freeze (SIGSTOP, a cgroup, a virtual machine) but an awaited time that is noticed late.
    Then `now` goes on from where it was last.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._paused_s = self._last = 0.0
        self.awaited: list[float] = []  # `now` is called before a time is dropped

    def now(self) -> float:
        now = self._loop.time() - self._paused_s
        if now > min(self.awaited, default=now) + _LATE_S:
            self.skip(now - self._last)
            now = self._last
        self._last = now
        return now

    def skip(self, seconds: float) -> None:
        """Leave out the last `seconds`: the job was suspended."""
        self._paused_s += seconds

    async def sleep(self, seconds: float) -> None:
        never = asyncio.get_running_loop().create_future()
        await self.wait_for(never, seconds=seconds)

    async def wait_for(self, *futures: asyncio.Future[Any], seconds: float) -> bool:
        """Wait until one of `futures` is done, but read none; return False after `seconds`."""
        end = self.now() + seconds
        self.awaited.append(end)
        try:
            while not any(future.done() for future in futures) and (left := end - self.now()) > 0:
                await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.now()
            self.awaited.remove(end)
        return any(future.done() for future in futures)


class Alarm:
    """Calls back once, at the time of a clock that was set last; earlier after a freeze."""

    def __init__(self, clock: PausableClock, callback: Callable[[], object]) -> None:
        """Begin without a time."""
        self.at: float | None = None
        self._clock = clock
        self._callback = callback
        self._timer: asyncio.TimerHandle

    def set(self, at: float | None) -> None:
        """Replace the time; None sets none."""
        now = self._clock.now()
        if self.at is not None:
            self._timer.cancel()
            self._clock.awaited.remove(self.at)
        self.at = at
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at - now), self._on_time)
            self._clock.awaited.append(at)

    def _on_time(self) -> None:
        self.set(None)
        self._callback()
