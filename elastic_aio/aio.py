"""The few asyncio helpers that the rest of the library stands on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["Pausable", "all_done", "end_all", "off_loop", "outlast", "owned_task", "see_through"]

T = TypeVar("T")


async def see_through(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a piece of work to its end, however often anybody is cancelled meanwhile.

    The caller's cancellation is raised afterwards.  When an event loop shuts down
    it cancels every task, the one that does the work included; then the work is
    started again, so it must bear that, and it must be bounded in time.

    Args:
        start: makes the coroutine that does the work.

    Returns:
        What the work returns.

    Raises:
        asyncio.CancelledError: the caller was cancelled; the work is done.
        Exception: what the work raised.
    """
    task = owned_task(start())
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await outlast(task)
        except asyncio.CancelledError as error:
            cancelled = error
        if not task.cancelled():
            break
        task = owned_task(start())
    if cancelled is not None:
        task.exception()  # marks it as seen: the cancellation takes its place
        raise cancelled
    return task.result()


async def outlast(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, however often the caller is cancelled meanwhile.

    Two protections are needed at once.  A native `Task.cancel()` is withstood by
    waiting again and again; inside a cancelled anyio scope that loop would spin,
    since anyio delivers its cancellation anew at every await, so the wait happens
    under an anyio shield too.  A scope can only exist where anyio has been
    imported, hence the look into `sys.modules`: its asyncio backend costs 20 ms to
    import, at the very moment when a job should end.

    Raises:
        asyncio.CancelledError: the caller was cancelled; `future` is done.
    """
    cancelled: asyncio.CancelledError | None = None
    with _anyio_shield():
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


async def off_loop(work: Callable[[], T]) -> T:
    """Do a piece of blocking work in a thread of its own; return what it returns.

    Not in the loop's default executor, whose threads would outlive the job.  A
    machine that has no thread left does it here.  When the caller is cancelled, the
    thread ends in its own time.
    """
    # Imported here: most jobs need no thread.
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(max_workers=1)
    is_idle = False
    try:
        working = asyncio.get_running_loop().run_in_executor(executor, work)
    except RuntimeError:  # can't start new thread
        return work()
    try:
        result = await working
        is_idle = True
        return result
    finally:
        # An idle thread ends at once; a busy one is not waited for.
        executor.shutdown(wait=is_idle)


def _anyio_shield() -> contextlib.AbstractContextManager[object]:
    if "anyio" not in sys.modules:
        return contextlib.nullcontext()
    import anyio

    return anyio.CancelScope(shield=True)


def owned_task(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """Start a task that its caller keeps, awaits and ends.

    Each call names one owner; a task without an owner is a bug (RUF006).
    """
    return asyncio.get_running_loop().create_task(work, name=name)


async def end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended; what they raised counts as seen."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


class Pausable:
    """A monotonic clock, in seconds, that stands still while the job is paused.

    A job stopped by Ctrl-Z must not find all its deadlines passed when it comes
    back.  `loop.time()` runs on meanwhile; whoever resumes the job tells how long
    it was away.
    """

    def __init__(self) -> None:
        """Start at the running loop's time."""
        self._loop = asyncio.get_running_loop()
        self._paused_s = 0.0

    def now(self) -> float:
        """Return the seconds that count."""
        return self._loop.time() - self._paused_s

    def skip(self, seconds: float) -> None:
        """Leave `seconds` that have just passed out of account."""
        self._paused_s += seconds

    async def sleep(self, seconds: float) -> None:
        """Wait until `seconds` that count have passed."""
        never = asyncio.get_running_loop().create_future()
        await self.wait_for(never, seconds=seconds)

    async def wait_for(self, *futures: asyncio.Future[Any], seconds: float) -> bool:
        """Wait until one of `futures` is done, `seconds` at most; tell whether one is.

        The futures are neither cancelled nor read.
        """
        end = self.now() + seconds
        while not any(future.done() for future in futures) and (left := end - self.now()) > 0:
            await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return any(future.done() for future in futures)


def all_done(futures: Iterable[asyncio.Future[Any]]) -> asyncio.Future[None]:
    """Return a future that is done when all of `futures` are; it never fails.

    Unlike `asyncio.gather` it leaves them alone when it is cancelled, and it costs
    one callback each, however often it is waited for.
    """
    result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = set(futures)

    def one_done(future: asyncio.Future[Any]) -> None:
        waiting.discard(future)
        if not waiting and not result.done():
            result.set_result(None)

    for future in tuple(waiting):
        future.add_done_callback(one_done)
    if not waiting:
        result.set_result(None)
    return result
