"""The few asyncio helpers that the rest of the library stands on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Pausable", "owned_task", "see_through"]

T = TypeVar("T")


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, however often the caller is cancelled meanwhile.

    The cancellation is raised afterwards.  `work` must be bounded in time.

    Two protections are needed at once.  A native `Task.cancel()` is withstood by
    waiting for a task of its own again and again; inside a cancelled anyio scope
    that loop would spin, since anyio delivers its cancellation anew at every
    await, so the wait happens under an anyio shield too.  A scope can only exist
    where anyio has been imported, hence the look into `sys.modules`: its asyncio
    backend costs 20 ms to import, at the very moment when a job should end.

    Returns:
        What `work` returns.

    Raises:
        asyncio.CancelledError: the caller was cancelled; `work` is done.
        BaseException: what `work` raised.
    """
    task = owned_task(work)
    cancelled: asyncio.CancelledError | None = None
    with _anyio_shield():
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # marks it as seen: the cancellation takes its place
        raise cancelled
    return task.result()


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
        await self.wait_for(never, seconds)

    async def wait_for(self, future: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for `future`, `seconds` at most; tell whether it is done.

        The future is neither cancelled nor read.
        """
        end = self.now() + seconds
        while not future.done() and (left := end - self.now()) > 0:
            await asyncio.wait([future], timeout=left)
        return future.done()
