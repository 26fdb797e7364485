"""Copying the workers' log files to the console while they grow.

One task for each of our two output streams: a reader that stops reading our
standard output does not hold back standard error, and neither ever holds back a
worker, which writes to its file.  What is not shown yet stays in the file, so a
blocked console costs no memory.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from elastic_aio.aio import all_done, owned_task
from elastic_aio.logs.follower import Follower
from elastic_aio.logs.inotify import GrowthWatch
from elastic_aio.logs.sink import Sink, SinkLost

__all__ = ["Tee"]


class Tee:
    """Follows files and shows what is new in them; must be closed."""

    def __init__(self, on_lost: Callable[[Sink, str], None]) -> None:
        """Begin with no file; `on_lost` is told why a sink takes no more."""
        self._on_lost = on_lost
        self._watch = GrowthWatch(self._on_grown)
        self._followers: dict[int, Follower] = {}
        self._pumps: dict[Sink, _Pump] = {}
        self._count = 0

    def __repr__(self) -> str:
        return f"<Tee of {len(self._followers)} files>"

    def follow(self, path: str, sink: Sink, prefix: Callable[[], bytes]) -> int:
        """Show `path` in `sink` as it grows; return a token for `finish`.

        Raises:
            OSError: the file cannot be opened.
        """
        token = self._count
        self._count += 1
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        follower = Follower(descriptor, sink, prefix)
        self._followers[token] = follower
        self._watch.add(path, token)
        if sink not in self._pumps:
            self._pumps[sink] = _Pump(sink, self._on_lost)
        self._pumps[sink].wake(follower)
        return token

    def finish(self, tokens: Iterable[int]) -> None:
        """Say that files grow no more: the rest is shown, then they are let go."""
        for token in tokens:
            follower = self._followers[token]
            follower.is_ending = True
            self._watch.remove(token)
            self._pumps[follower.sink].wake(follower)
            follower.finished.add_done_callback(partial(self._forget, token))

    async def drain(self, patience: float) -> list[Sink]:
        """Wait until all that was finished is shown; return the sinks given up on.

        That is after `patience` seconds in which none of them has taken anything.
        """
        done = all_done(one.finished for one in self._ending())
        while not done.done():
            before = [sink.written for sink in self._pumps]
            await asyncio.wait([done], timeout=patience)
            if not done.done() and [sink.written for sink in self._pumps] == before:
                break
        return list({one.sink: None for one in self._ending()})

    async def aclose(self) -> None:
        """Stop following, shown or not."""
        self._watch.close()
        for pump in self._pumps.values():
            await pump.aclose()
        for follower in list(self._followers.values()):
            follower.close()

    def _ending(self) -> list[Follower]:
        return [
            one for one in self._followers.values() if one.is_ending and not one.finished.done()
        ]

    def _forget(self, token: int, _: asyncio.Future[None]) -> None:
        self._followers.pop(token, None)

    def _on_grown(self, tokens: list[int]) -> None:
        for token in tokens:
            if token in self._followers:
                follower = self._followers[token]
                self._pumps[follower.sink].wake(follower)


class _Pump:
    """Copies to one sink, a chunk of each waiting file in turn."""

    def __init__(self, sink: Sink, on_lost: Callable[[Sink, str], None]) -> None:
        self._sink = sink
        self._on_lost = on_lost
        self._queue: deque[Follower] = deque()
        self._queued: set[Follower] = set()
        self._frames: dict[Follower, asyncio.TimerHandle] = {}
        self._woken = asyncio.Event()
        self._closed = False
        self._is_lost = False
        self._start()

    def wake(self, follower: Follower) -> None:
        if follower not in self._queued:
            self._queued.add(follower)
            self._queue.append(follower)
            self._woken.set()

    async def aclose(self) -> None:
        for timer in self._frames.values():
            timer.cancel()
        self._closed = True
        self._task.cancel()
        await asyncio.wait([self._task])

    def _start(self) -> None:
        self._task = owned_task(self._run(), name=f"copy to {self._sink.name}")
        self._task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # A loop that shuts down cancels us too; the last lines of the workers are
        # still to be shown while they are being stopped.
        if task.cancelled() and not self._closed:
            self._start()

    async def _run(self) -> None:
        while True:
            while not self._queue:
                self._woken.clear()
                await self._woken.wait()
            follower = self._queue.popleft()
            # Out of the set before the copy: growth during it must wake us again.
            self._queued.discard(follower)
            if not follower.finished.done() and await self._copy(follower):
                self.wake(follower)
            await asyncio.sleep(0)  # others' turn: reading a file never waits

    async def _copy(self, follower: Follower) -> bool:
        try:
            async with self._sink.lock:
                if follower in self._frames:
                    await self._show_due_frame(follower)
                more = await follower.copy()
        except SinkLost:
            if not self._is_lost:
                self._is_lost = True
                self._on_lost(self._sink, self._sink.lost or "")
            follower.close()
            return False
        except OSError:
            follower.close()  # the file cannot be read any more; it stays as it is
            return False
        self._time_frame(follower)
        return more

    async def _show_due_frame(self, follower: Follower) -> None:
        due = follower.frame_due_at
        if due is not None and asyncio.get_running_loop().time() >= due:
            await follower.show_pending_frame()

    def _time_frame(self, follower: Follower) -> None:
        due = follower.frame_due_at
        timer = self._frames.pop(follower, None)
        if timer is not None:
            timer.cancel()
        if due is not None:
            loop = asyncio.get_running_loop()
            self._frames[follower] = loop.call_at(due, self.wake, follower)
