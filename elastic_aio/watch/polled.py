"""What the kernel reports to no other process: idle workers, and those that are stuck in it.

Both are looked at now and then, in /proc.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from elastic_aio.aio import PausableClock, run_in_thread
from elastic_aio.process import proc
from elastic_aio.watch.deadlines import WatchedWorker

_LOOKS_AT_IDLE = 4
"""How often the workers are looked at within the time that they may be idle."""
_LOOKS_AT_STUCK = 8
"""How often a worker is looked at within the time that it may hang."""
_IDLE_SHARE = 0.01
"""The share of a CPU that an idle worker may use: libraries have threads that look around."""

Activity = Mapping[int, tuple[int, int]]
"""CPU time in ticks and bytes written, by pid."""


async def watch_idle(
    seconds: float,
    clock: PausableClock,
    running: Callable[[], Sequence[WatchedWorker]],
    report: Callable[[], Awaitable[None]],
) -> None:
    """Report once that all workers have been idle for `seconds`, and again after one was busy."""
    since, has_reported = clock.now(), False
    former: Activity = {}
    while True:
        now = clock.now()
        pids = [worker.pid for worker in running()]
        present = await run_in_thread(_read_activity, pids, daemon=True)
        if not present or not _is_idle(former, present, seconds / _LOOKS_AT_IDLE):
            since, has_reported = now, False
        elif now - since >= seconds and not has_reported:
            has_reported = True
            await report()
            # The workers have written their stacks: that was no work.
            present = await run_in_thread(_read_activity, pids, daemon=True)
        former = present
        await clock.sleep(seconds / _LOOKS_AT_IDLE)


def _read_activity(pids: Sequence[int]) -> Activity:
    """Read the activity of processes and their descendants; one that starts or ends changes it."""
    found: dict[int, tuple[int, int]] = {}
    for pid in pids:
        with suppress(OSError):  # no descriptor is left
            for each in (pid, *(process.pid for process in proc.iter_descendants(pid))):
                fields = proc.read_stat(each)
                if len(fields) > 12:
                    written = (proc.read(each, "io") or b"").partition(b"wchar:")[2].split()
                    bytes_written = int(written[0]) if written else 0
                    found[each] = int(fields[11]) + int(fields[12]), bytes_written
    return found


def _is_idle(former: Activity, present: Activity, seconds: float) -> bool:
    """Return whether the same processes have used almost no CPU time and written nothing."""
    limit = _IDLE_SHARE * seconds * os.sysconf("SC_CLK_TCK")
    return former.keys() == present.keys() and all(
        ticks - former[pid][0] <= limit and written == former[pid][1]
        for pid, (ticks, written) in present.items()
    )


async def find_stuck(
    seconds: float, running: Callable[[], Sequence[WatchedWorker]]
) -> WatchedWorker:
    """Return the first worker that is in one uninterruptible system call for `seconds`.

    That is state D of proc_pid_status(5).  Such a call waits for a device or a file server, and
    no signal ends it.
    """
    former: dict[int, tuple[list[bytes], float]] = {}
    while True:
        now = time.monotonic()
        present: dict[int, tuple[list[bytes], float]] = {}
        for worker in running():
            if (wait := _uninterruptible_wait(worker.pid)) is not None:
                known, since = former.get(worker.pid, (None, now))
                if wait != known:
                    since = now  # many short calls are no long one
                elif now - since >= seconds:
                    return worker
                present[worker.pid] = wait, since
        former = present
        await asyncio.sleep(seconds / _LOOKS_AT_STUCK)


def _uninterruptible_wait(pid: int) -> list[bytes] | None:
    """Return what is the same while the main thread is in one wait; None: in no state D.

    These are its counts of context switches, by which the kernel finds hung tasks too.
    """
    try:
        status = proc.read_status(pid)
    except OSError:
        return None
    if not status.get(b"State", b"").startswith(b"D"):
        return None
    return [value for name, value in status.items() if name.endswith(b"voluntary_ctxt_switches")]
