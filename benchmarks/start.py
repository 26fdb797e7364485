"""What a launcher costs: its start, its memory, many workers, idle workers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare import compare
from benchmarks.launchers import (
    Finished,
    Job,
    Launcher,
    children_of,
    run,
    wait_until,
)
from benchmarks.table import Goal, Line

__all__ = ["idle", "many", "memory", "start"]

_SPAWN_LOOP = str(Path(__file__).parent / "workers" / "spawn_loop.py")
_MANY = 256


def start(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Start two workers that end at once: wall and CPU time, children included."""

    def measure(launcher: Launcher) -> Finished:
        with launcher.job(2, ["/bin/true"]) as job:
            return job.succeed()

    us, them, limit = compare(
        rounds,
        measure,
        ours,
        theirs,
        lambda: run([sys.executable, "-c", "import asyncio"]),
    )
    return [
        Line(
            f"CLI start, two workers of `/bin/true`: {name}",
            "ms",
            _median_ms(us, figure),
            _median_ms(them, figure) if them else None,
            Goal(0.12),
            'python -c "import asyncio"',
            _median_ms(limit, figure),
            Goal(4),
        )
        for name, figure in (
            ("wall", lambda one: one.wall),
            ("CPU", lambda one: one.cpu),
        )
    ]


class _Memory(NamedTuple):
    peak: float  # MB
    guardian_private: float
    guardian_pss: float


def memory(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Read the memory of a launcher with two workers, until its end."""
    us, them = compare(
        max(rounds // 3, 1),
        _memory,
        ours,
        theirs,
    )
    return [
        Line(
            "peak memory of the launcher",
            "MB",
            statistics.median(one.peak for one in us),
            statistics.median(one.peak for one in them) if them else None,
            Goal(0.15),
            bound=35,
        ),
        Line(
            "memory of its guardian: private",
            "MB",
            statistics.median(one.guardian_private for one in us),
            bound=5,
        ),
        Line(
            "memory of its guardian: with its share of shared pages (PSS)",
            "MB",
            statistics.median(one.guardian_pss for one in us),
        ),
    ]


def _memory(launcher: Launcher) -> _Memory:
    peak = 0.0
    guardian: dict[str, float] = {}
    with launcher.job(2, ["/bin/sleep", "0.5"]) as job:
        while job.is_running:
            peak = max(peak, _fields(f"/proc/{job.pid}/status").get("VmHWM", 0))
            for child in children_of(job.pid) if not guardian else ():
                if "guardian" in _command(child):
                    time.sleep(0.2)  # until it has started
                    guardian = _fields(f"/proc/{child}/smaps_rollup")
            time.sleep(0.001)
        job.succeed()
    return _Memory(peak, guardian.get("Private_Dirty", 0), guardian.get("Pss", 0))


def many(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Start many workers that end at once."""

    def measure(launcher: Launcher) -> float:
        with launcher.job(_MANY, ["/bin/true"]) as job:
            return job.succeed().wall / 1e6

    inside: list[float] = []

    def measure_loop() -> float:
        with Job(
            [sys.executable, _SPAWN_LOOP, str(_MANY), "/bin/true"], out=subprocess.PIPE
        ) as job:
            inside.append(int(os.read(job.stdout, 100)) / 1e6)
            return job.succeed().wall / 1e6

    us, them, limit, us_inside = compare(
        rounds,
        measure,
        ours,
        theirs,
        measure_loop,
        lambda: _duration(ours),
    )
    return [
        Line(
            f"{_MANY} workers of `/bin/true`",
            "ms",
            statistics.median(us),
            statistics.median(them) if them else None,
            Goal(0.3),
            "posix_spawn loop",
            statistics.median(limit),
            Goal(3),
        ),
        Line(
            f"{_MANY} workers of `/bin/true`: without the start of Python",
            "ms",
            statistics.median(us_inside),
            limit_name="posix_spawn loop",
            limit=statistics.median(inside[1:]),
        ),
    ]


def _duration(ours: Launcher) -> float:
    """Return the milliseconds of a job of many workers, as its last event reports them."""
    with tempfile.NamedTemporaryFile() as file:
        with ours.job(_MANY, ["/bin/true"], f"--events={file.name}") as job:
            job.succeed()
        last = json.loads(file.read().splitlines()[-1])
    return float(last["duration"]) * 1e3


class _Idle(NamedTuple):
    cpu: float  # milliseconds a second
    wakeups: float  # a second
    threads: int


def idle(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Watch a launcher with idle workers, its guardian included."""
    us, them = compare(max(rounds // 5, 1), _idle, ours, theirs)
    lines = []
    for name, unit, figure, bound in (
        ("CPU", "ms/s", lambda one: one.cpu, None),
        ("wake-ups", "/s", lambda one: one.wakeups, 0),
        ("threads", "", lambda one: one.threads, 2),
    ):
        pick: Callable[[_Idle], float] = figure
        lines.append(
            Line(
                f"idle with 8 tee'd workers: {name}",
                unit,
                statistics.median(pick(one) for one in us),
                statistics.median(pick(one) for one in them) if them else None,
                bound=bound,
            )
        )
    return lines


def _idle(launcher: Launcher) -> _Idle:
    workers = 8
    with (
        tempfile.TemporaryDirectory() as directory,
        launcher.job(workers, ["/bin/sleep", "60"], "-t", "3", "--log-dir", directory) as job,
    ):
        wait_until(
            lambda: (
                sum(_command(pid) == "/bin/sleep 60" for pid in children_of(job.pid)) == workers
            ),
            "the workers",
        )
        time.sleep(1)
        pids = [job.pid, *(pid for pid in children_of(job.pid) if "guardian" in _command(pid))]
        before = [_activity(pid) for pid in pids]
        began = time.monotonic()
        time.sleep(3)
        after = [_activity(pid) for pid in pids]
        seconds = time.monotonic() - began
        threads = len(os.listdir(f"/proc/{job.pid}/task"))
    pairs = list(zip(before, after, strict=True))
    return _Idle(
        sum(new.cpu - old.cpu for old, new in pairs) / 1e6 / seconds,
        sum(new.wakeups - old.wakeups for old, new in pairs) / seconds,
        threads,
    )


class _Activity(NamedTuple):
    cpu: int  # nanoseconds
    wakeups: int


def _activity(pid: int) -> _Activity:
    cpu = wakeups = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        status = Path(f"/proc/{pid}/task/{task}/status").read_text(encoding="utf-8")
        wakeups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        schedule = Path(f"/proc/{pid}/task/{task}/schedstat").read_text(encoding="ascii")
        cpu += int(schedule.split()[0])
    return _Activity(cpu, wakeups)


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""  # it has ended
    return command.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def _fields(path: str) -> dict[str, float]:
    """Return the sizes in a file of `/proc`, in megabytes; empty when the process has ended."""
    fields = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[name] = int(value[:-3]) * 1024 / 1e6
    return fields


def _median_ms(results: list[Finished], figure: Callable[[Finished], int]) -> float:
    return statistics.median(figure(one) for one in results) / 1e6
