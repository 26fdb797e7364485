"""The watch for workers in an uninterruptible system call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio.agent import uninterruptible
from elastic_aio.agent.uninterruptible import StuckWatch
from elastic_aio.outcome import Failure


async def test_many_short_calls_are_no_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that has been switched to between two looks makes progress."""
    looks = 0
    has_stopped = False
    stuck: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
    progressed = asyncio.Event()

    def show(pid: int) -> dict[bytes, bytes]:
        nonlocal looks
        assert pid == 7
        looks += not has_stopped
        if looks >= 50:
            progressed.set()
        counts = {b"voluntary_ctxt_switches": b"%d" % looks, b"nonvoluntary_ctxt_switches": b"3"}
        return {b"State": b"D (disk sleep)", **counts}

    monkeypatch.setattr(uninterruptible, "read_status", show)
    ranks = SimpleNamespace(rank=0, local_rank=0)
    record: Any = SimpleNamespace(pid=7, exit=None, ranks=ranks, notes=())

    async def examine(why: str) -> None:
        record.notes = (why,)

    watch = StuckWatch("host", stuck.set_result, examine)
    watch.start({0: record}, 0.01)
    try:
        waiting = asyncio.ensure_future(progressed.wait())
        futures: list[asyncio.Future[Any]] = [waiting, stuck]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        assert not stuck.done()
        has_stopped = True
        failure = await stuck
        assert failure.pid == 7
        assert failure.notes == ("process 7 is in an uninterruptible system call",)
    finally:
        await watch.aclose()
        waiting.cancel()
