"""What a launcher costs: its start, its memory, many workers, idle workers."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.launchers import (
    Finished,
    Job,
    Launcher,
    children_of,
    new_notes,
    run,
    wait_until,
    worker,
)
from benchmarks.table import Goal, Line
from benchmarks.turns import compare, median_of

__all__ = ["idle", "many", "memory", "start"]

_SPAWN_LOOP = str(Path(__file__).parent / "workers" / "spawn_loop.py")
_MANY = 256
_START = "CLI start, two workers of `/bin/true`"


def start(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Start two workers that end at once: wall and CPU time, children included."""

    def measure(launcher: Launcher) -> Finished:
        with launcher.job(2, ["/bin/true"]) as job:
            return job.succeed()

    limit = [sys.executable, "-c", "import asyncio"]
    results = compare(rounds, measure, ours, theirs, lambda: run(limit), old=old)
    figures: dict[str, Callable[[Finished], float]] = {
        "wall": lambda one: one.wall / 1e6,
        "CPU": lambda one: one.cpu / 1e6,
    }
    lines = [
        results.line(
            f"{_START}: {name}",
            "ms",
            median_of(figure),
            goal=Goal(0.085),
            old_goal=Goal(1),
            limit_name='python -c "import asyncio"',
            limit_goal=Goal(4),
        )
        for name, figure in figures.items()
    ]
    if shutil.which("valgrind") is None:
        print("start: the instructions are left out: needs `valgrind`", file=sys.stderr)
        return lines
    # Once: the count is the same each time, but for the addresses that objects get.
    count, title = _instructions(ours)
    before = _instructions(old)[0] if old else None
    return [*lines, Line(f"{_START}: {title}", "M", count, old=before, old_goal=Goal(1))]


def _instructions(launcher: Launcher) -> tuple[float, str]:
    """Return the millions of instructions of a launcher as valgrind counts them, and their name."""
    tool = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    with launcher.job(2, ["/bin/true"], before=["env", "PYTHONHASHSEED=0", *tool]) as job:
        finished, text = job.wait(), job.error_text()
    title = "instructions of the launcher"
    if finished.returncode:
        # valgrind 3.19 has no pidfd_open, with which a launcher begins to start processes.
        if "unhandled" not in text:
            raise RuntimeError(f"a launcher ended with {finished.returncode}: {text}")
        title += " until its first pidfd_open"
    match = re.search(r"I +refs: +([\d,]+)", text)
    assert match is not None, text
    return int(match[1].replace(",", "")) / 1e6, title


class _Memory(NamedTuple):
    peak: float  # MB
    guardian_private: float
    guardian_pss: float


def memory(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Read the memory of a launcher with two workers, until its end."""
    results = compare(max(rounds // 3, 1), _memory, ours, theirs, old=old)
    guardian = dataclasses.replace(results, theirs=[])  # torchrun has none
    return [
        results.line(
            "peak memory of the launcher",
            "MB",
            median_of(lambda one: one.peak),
            goal=Goal(0.15),
            bound=25,
        ),
        guardian.line(
            "memory of its guardian: private",
            "MB",
            median_of(lambda one: one.guardian_private),
            bound=5,
        ),
        guardian.line(
            "memory of its guardian: with its share of shared pages (PSS)",
            "MB",
            median_of(lambda one: one.guardian_pss),
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


class _Many(NamedTuple):
    wall: float  # milliseconds
    inside: float  # milliseconds without the start of Python; 0: unknown


def many(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Start many workers that end at once."""
    results = compare(rounds, _many, ours, theirs, _spawn_loop, old=old)
    inside = dataclasses.replace(results, theirs=[])  # torchrun does not report it
    return [
        results.line(
            f"{_MANY} workers of `/bin/true`",
            "ms",
            median_of(lambda one: one.wall),
            goal=Goal(0.18),
            limit_name="posix_spawn loop",
        ),
        inside.line(
            f"{_MANY} workers of `/bin/true`: without the start of Python",
            "ms",
            median_of(lambda one: one.inside),
            limit_name="posix_spawn loop",
            limit_goal=Goal(2),
        ),
    ]


def _many(launcher: Launcher) -> _Many:
    """Start the workers; of ours, also read the time that the last event reports."""
    with launcher.job(_MANY, ["/bin/true"]) as job:
        wall = job.succeed().wall / 1e6
    if not launcher.is_ours:
        return _Many(wall, 0)
    with tempfile.NamedTemporaryFile() as file:
        with launcher.job(_MANY, ["/bin/true"], f"--events={file.name}") as job:
            job.succeed()
        last = json.loads(file.read().splitlines()[-1])
    return _Many(wall, float(last["duration"]) * 1e3)


def _spawn_loop() -> _Many:
    with Job([sys.executable, _SPAWN_LOOP, str(_MANY), "/bin/true"], out=subprocess.PIPE) as job:
        inside = int(os.read(job.stdout, 100)) / 1e6
        return _Many(job.succeed().wall / 1e6, inside)


class _Idle(NamedTuple):
    cpu: float  # milliseconds a second
    wakeups: float  # a second
    threads: int


def idle(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Watch a launcher with workers that have a child each and are idle, its guardian included."""
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
        new_notes() as notes,
        launcher.job(
            workers, worker(notes, "train"), "-t", "3", "--log-dir", str(notes.path.parent)
        ) as job,
    ):
        wait_until(lambda: len(notes.read("ready")) == workers, "the workers")
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
