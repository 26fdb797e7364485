"""Independent workers: one of 64 that is killed, and reloads of 8 servers under load."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.launchers import Job, Launcher
from benchmarks.table import Goal, Line

__all__ = ["kill_one", "reloads"]

_WORKERS = 64
_KILLS = 8
_RATE = 5000
_PAUSE_S = 0.2
"""Seconds between two kills, in which the launcher writes its record."""
_SETTLED_S = 1.0
"""Seconds after which a launcher has loaded what it may need later."""
_SHELL = ["sh", "-c", 'echo "$RANK $$" > "$0"; exec sleep 999']
_TRAINER = """
import os, signal, sys, time
def save(*_):
    open(f"{sys.argv[1]}-checkpoint-{os.environ['RANK']}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
reader, writer = os.pipe()
if not os.fork():
    os.close(writer)
    os.read(reader, 1)  # until its parent has ended
    os._exit(0)
print(os.environ["RANK"], os.getpid(), file=open(sys.argv[1], "w"), flush=True)
time.sleep(999)
"""
_PYTHON = [sys.executable, "-c", _TRAINER]


class _Kept:
    """Workers that something restarts one by one; each start writes to a FIFO."""

    def __init__(self, command: Sequence[str], worker: Sequence[str], directory: Path) -> None:
        directory.mkdir()
        self._path = directory / "starts"
        os.mkfifo(self._path)
        self._fifo = os.open(self._path, os.O_RDWR)
        self.pids: dict[int, int] = {}
        self._job = Job([*command, *worker, str(self._path)])

    def close(self) -> None:
        """End the workers."""
        self._job.__exit__(None, None, None)
        for pid in self.pids.values():  # those of a loop that stops nothing
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.close(self._fifo)

    def read(self, number: int) -> dict[int, int]:
        """Wait for so many starts; return the pids of these by rank."""
        text = b""
        while text.count(b"\n") < number:
            if not select.select([self._fifo], [], [], 60)[0]:
                raise TimeoutError(f"{number} starts: {self._job.error_text()}")
            text += os.read(self._fifo, 1 << 16)
        started = {int(line.split()[0]): int(line.split()[1]) for line in text.splitlines()}
        self.pids.update(started)
        return started

    def kill(self, rank: int) -> float:
        """Kill a worker; return the milliseconds until its successor has started."""
        began = time.monotonic_ns()
        os.kill(self.pids[rank], signal.SIGKILL)
        started = self.read(1)
        ended = time.monotonic_ns()
        if [*started] != [rank]:
            raise RuntimeError(f"rank {rank} was killed, and {started} started")
        return (ended - began) / 1e6


def kill_one(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Kill 1 of 64 independent workers: how many others change, and when it is back.

    The limit is a loop of asyncio for each worker, which looks for nothing that the worker has
    left.  The two take turns, so that the workers of the one are no processes that the other reads.
    """
    lines = []
    for name, worker in (("of a shell", _SHELL), ("of Python, each with a child,", _PYTHON)):
        us, limit, changed = _kills(ours, worker, max(rounds // 5, 1))
        what = f"1 of {_WORKERS} workers {name} is killed"
        lines += [
            Line(f"{what}: others that change", "", changed, bound=0),
            Line(
                f"{what} \N{RIGHTWARDS ARROW} its successor runs",
                "ms",
                us,
                limit_name="a loop of asyncio",
                limit=limit,
                limit_goal=Goal(1.3),
            ),
        ]
    return lines


def _kills(ours: Launcher, worker: Sequence[str], rounds: int) -> tuple[float, float, int]:
    """Return the medians of ours and of the loop, and how many others have changed."""
    run = [*ours.command(), f"--nproc-per-node={_WORKERS}", "--restart-scope=worker"]
    run += ["--max-restarts=9", "--no-python"]
    loop = [sys.executable, "-m", "benchmarks.workers.worker_loop", str(_WORKERS)]
    times: tuple[list[float], list[float]] = ([], [])
    changed = 0
    for turn in range(rounds):
        for at in (0, 1) if turn % 2 else (1, 0):
            with tempfile.TemporaryDirectory() as name:
                kept = _Kept((run, loop)[at], worker, Path(name) / "workers")
                try:
                    kept.read(_WORKERS)
                    time.sleep(_SETTLED_S)
                    before = dict(kept.pids)
                    for rank in range(_KILLS):
                        times[at].append(kept.kill(rank))
                        time.sleep(_PAUSE_S)
                    others = range(_KILLS, _WORKERS)
                    changed += sum(not _is_same(kept.pids[rank], before[rank]) for rank in others)
                finally:
                    kept.close()
    return statistics.median(times[0]), statistics.median(times[1]), changed


def _is_same(pid: int, before: int) -> bool:
    return pid == before and Path(f"/proc/{pid}").exists()


def reloads(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Reload 8 servers three times, and once by a broken version, under 5,000 requests/s."""
    command = [sys.executable, "-m", "benchmarks.workers.reloads", str(_RATE)]
    with Job(command, out=subprocess.PIPE, root=ours.root) as job:
        output = job.read()
        job.succeed()
    found = json.loads(output)
    name = "8 servers, 3 reloads and a broken version"
    is_served = found["reloaded"] == 3 and found["is_kept"] and found["versions"] == ["v3"]
    return [
        Line(f"{name}: requests", "/s", found["rate"], limit_name="sent", limit=_RATE),
        Line(f"{name}: answered", "", found["answered"]),
        Line(f"{name}: refused", "", found["refused"], bound=0),
        Line(f"{name}: reset", "", found["broken"], bound=0),
        Line(f"{name}: longest answer", "ms", found["longest"] * 1000),
        Line(
            f"{name}: versions that serve at last, besides the old one",
            "",
            0 if is_served else math.inf,
            bound=0,
        ),
    ]
