"""How a launcher shows the output of its workers: throughput, latency, CPU time, lost lines."""

from __future__ import annotations

import fcntl
import os
import re
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.launchers import Job, Launcher, new_notes, spawn_baseline, wait_until, worker
from benchmarks.table import TIMES, Goal, Line
from benchmarks.turns import compare, median_of, median_of_all

__all__ = ["latency", "lines", "read", "tee"]

_WORKERS = 4
_LINES = 100_000
_WRITES = {"100 a write": 100, "one a write": 1}
_READ_LINES = Path(__file__).parent / "workers" / "read_lines.py"
_NUMBERED = re.compile(rb"\[default(\d)\]:rank \1 line \d+ of a job with much output")
_TIMED = re.compile(rb"\[default\d\]:at (\d+)")
# A launcher that runs for longer than this after the last line has a defect.
_END_S = 3.0


_PRINTED = 5000
_PRINTS = """
import os
for number in range(5000):
    print("rank", os.environ["RANK"], "line", number, {"loss": 0.25})
"""
_WHOLE = re.compile(rb"rank \d line \d+ \{'loss': 0\.25\}")


class _Teed(NamedTuple):
    rate: float  # lines a second
    cpu: float  # milliseconds
    lost: int  # lines that did not arrive, or not whole


def tee(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Show many lines of four workers in a pipe that is read at once.

    The time runs from the first line that a worker prints to the last one that is
    read; the CPU time of the launcher likewise.  The limit is the output of the workers
    without a reader, which slows them down.
    """
    rows = []
    for name, at_once in _WRITES.items():
        written = partial(_write_only, at_once)
        results = compare(
            max(rounds // 2, 1), partial(_tee, at_once), ours, theirs, written, _cat, old=old
        )
        _, copied = results.limits
        title = f"tee {_WORKERS} {TIMES} {_LINES:,} lines, {name}"
        rows += [
            results.line(
                f"{title}: lines shown",
                "/s",
                median_of(lambda one: one.rate),
                goal=Goal(2, at_least=True),
                limit_name="written, not shown",
            ),
            results.line(
                f"{title}: CPU of the launcher",
                "ms",
                median_of(lambda one: one.cpu),
                goal=Goal(0.4),
                limit_name="cat",
                limit=statistics.median(one.cpu for one in copied),
            ),
            results.line(
                f"{title}: lines lost or torn",
                "",
                lambda results: max(one.lost for one in results),
                bound=0,
            ),
        ]
    return rows


def lines(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Count the lines that are not whole of scripts that share a pipe without a tee."""
    results = compare(max(rounds // 5, 1), _torn, ours, theirs, old=old)
    title = f"{_WORKERS} scripts print {_PRINTED:,} lines each, no tee: lines lost or torn"
    return [results.line(title, "", max, bound=0)]


def _torn(launcher: Launcher) -> int:
    with new_notes() as notes:
        notes.path.write_text(_PRINTS)
        command = [*launcher.command(), f"--nproc-per-node={_WORKERS}", str(notes.path)]
        with Job(command, out=subprocess.PIPE, root=launcher.root) as job:
            found = job.read().split(b"\n")
            job.succeed()
    return _WORKERS * _PRINTED - sum(_WHOLE.fullmatch(line) is not None for line in found)


def _tee(at_once: int, launcher: Launcher) -> _Teed:
    with new_notes() as notes, open(notes.path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        command = worker(notes, "print", str(_LINES), str(at_once), site=False)
        options = ["-t", "3", "--log-dir", str(notes.path.parent)]
        with launcher.job(_WORKERS, command, *options, out=subprocess.PIPE) as job:
            wait_until(lambda: len(notes.read("ready")) == _WORKERS, "the workers")
            time.sleep(0.2)
            cpu = job.cpu()
            fcntl.flock(gate, fcntl.LOCK_UN)
            chunks, ended, cpu_then = _read_all(job)
            job.succeed()
        began = min(note.at for note in notes.read("prints"))
    whole = {line for line in b"".join(chunks).split(b"\n") if _NUMBERED.fullmatch(line)}
    total = _WORKERS * _LINES
    return _Teed(total / ((ended - began) / 1e9), (cpu_then - cpu) / 1e6, total - len(whole))


def _write_only(at_once: int) -> _Teed:
    with new_notes() as notes, open(notes.path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        command = worker(notes, "print", str(_LINES), str(at_once), site=False)
        processes = spawn_baseline(command, _WORKERS, notes.path.parent)
        wait_until(lambda: len(notes.read("ready")) == _WORKERS, "the workers")
        fcntl.flock(gate, fcntl.LOCK_UN)
        for process in processes:
            process.wait()
        began = min(note.at for note in notes.read("prints"))
        ended = max(note.at for note in notes.read("printed"))
    return _Teed(_WORKERS * _LINES / ((ended - began) / 1e9), 0, 0)


def _cat() -> _Teed:
    with new_notes() as notes:
        line = b"[default0]:rank 0 line 000000 of a job with much output\n"
        notes.path.write_bytes(line * _LINES)
        with Job(["cat", *[str(notes.path)] * _WORKERS], out=subprocess.PIPE) as job:
            _, ended, _ = _read_all(job)
            finished = job.succeed()
    total = _WORKERS * _LINES
    return _Teed(total / ((ended - job.started_at) / 1e9), finished.cpu / 1e6, 0)


def _read_all(job: Job) -> tuple[list[bytes], int, int]:
    """Read the output of a job; return it, the time of the last chunk, and the CPU time then."""
    chunks = []
    at = cpu = 0
    while chunk := os.read(job.stdout, 1 << 20):
        at, cpu = time.monotonic_ns(), job.cpu()
        chunks.append(chunk)
    if time.monotonic_ns() - at > _END_S * 1e9:
        raise RuntimeError("everything was shown long before the end")
    return chunks, at, cpu


def read(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Read many lines of four workers in a program, one by one and by the batch."""
    rows = []
    for name, at_once in _WRITES.items():
        for how, call, goal in (
            ("single", "agent.logs()", 0.5),
            ("batch", "agent.logs().batch()", 0.8),
        ):
            results = compare(
                max(rounds // 2, 1),
                partial(_read, at_once, how),
                ours,
                None,
                partial(_shown, at_once, ours),
                old=old,
            )
            rows.append(
                results.line(
                    f"{call}, {_WORKERS} {TIMES} {_LINES:,} lines, {name}: lines read",
                    "/s",
                    statistics.median,
                    limit_name="shown by the tee",
                    limit_goal=Goal(goal, at_least=True),
                )
            )
    return rows


def _shown(at_once: int, launcher: Launcher) -> float:
    return _tee(at_once, launcher).rate


def _read(at_once: int, how: str, launcher: Launcher) -> float | None:
    """Return the lines a second; None where the launcher's version cannot read them."""
    with new_notes() as notes, open(notes.path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        command = worker(notes, "print", str(_LINES), str(at_once), site=False)
        total = _WORKERS * _LINES
        words = [_READ_LINES, how, total, _WORKERS, notes.path.parent, *command]
        argv = [sys.executable, "-P", *map(str, words)]
        with Job(argv, out=subprocess.PIPE, root=launcher.root) as job:
            wait_until(
                lambda: not job.is_running or len(notes.read("ready")) == _WORKERS, "the workers"
            )
            fcntl.flock(gate, fcntl.LOCK_UN)
            ended = int(job.read())
            job.succeed()
        began = min((note.at for note in notes.read("prints")), default=0)
    return total / ((ended - began) / 1e9) if ended else None


def latency(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """From a worker's write of a line to its arrival in the launcher's pipe."""
    us, them = compare(max(rounds // 5, 1), _latencies, ours, theirs)
    return [
        Line(
            "a line is written → it is on the console, a pipe",
            "ms",
            median_of_all(us),
            median_of_all(them) if them else None,
            Goal(0.01),
            bound=2,
        )
    ]


def _latencies(launcher: Launcher) -> list[float]:
    latencies = []
    with new_notes() as notes:
        command = worker(notes, "tick", "100", "0.02")
        options = ["-t", "3", "--log-dir", str(notes.path.parent)]
        with launcher.job(2, command, *options, out=subprocess.PIPE) as job:
            while chunk := os.read(job.stdout, 1 << 20):
                now = time.monotonic_ns()
                latencies += [(now - int(at)) / 1e6 for at in _TIMED.findall(chunk)]
            job.succeed()
    return latencies
