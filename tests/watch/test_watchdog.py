"""Workers that are stuck in the kernel."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio.aio import PausableClock
from elastic_aio.process import proc
from elastic_aio.watch.watchdog import find_stuck


async def test_many_short_calls_are_no_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has been switched to between two looks makes progress."""
    looks = 0
    has_stopped = False
    progressed = asyncio.Event()

    def show(pid: int) -> dict[bytes, bytes]:
        nonlocal looks
        assert pid == 7
        looks += not has_stopped
        if looks >= 50:
            progressed.set()
        counts = {b"voluntary_ctxt_switches": b"%d" % looks, b"nonvoluntary_ctxt_switches": b"3"}
        return {b"State": b"D (disk sleep)", **counts}

    monkeypatch.setattr(proc, "read_status", show)
    worker: Any = SimpleNamespace(pid=7)
    finding = asyncio.ensure_future(find_stuck(0.01, PausableClock(), lambda: [worker]))
    await progressed.wait()
    assert not finding.done()
    has_stopped = True
    assert await finding is worker
