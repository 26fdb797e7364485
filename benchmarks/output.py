"""How a launcher shows the output of its workers: throughput, latency, CPU time, lost lines."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import statistics
import subprocess
import time
from functools import partial
from typing import IO, NamedTuple

from benchmarks.compare import compare, median_of_all
from benchmarks.launchers import (
    Job,
    Launcher,
    Notes,
    new_notes,
    spawn_baseline,
    wait_until,
    worker,
)
from benchmarks.table import TIMES, Goal, Line
from elastic_aio import Agent, LaunchSpec, LogSpec

__all__ = ["latency", "read", "tee"]

_WORKERS = 4
_LINES = 100_000
_NUMBERED = re.compile(rb"\[default(\d)\]:rank \1 line \d+ of a job with much output")
_TIMED = re.compile(rb"\[default\d\]:at (\d+)")
# A launcher that runs for longer than this after the last line has a defect.
_END_S = 3.0


class _Teed(NamedTuple):
    rate: float  # lines a second
    cpu: float  # milliseconds
    lost: int  # lines that did not arrive, or not whole


def tee(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Show many lines of four workers in a pipe that is read at once.

    The time runs from the first line that a worker prints to the last one that is
    read; the CPU time of the launcher likewise.  The limit is the output of the workers
    without a reader, which slows them down.
    """
    lines = []
    for name, at_once in (("100 a write", 100), ("one a write", 1)):
        us, them, written, copied = compare(
            max(rounds // 2, 1),
            partial(_tee, at_once),
            ours,
            theirs,
            partial(_write_only, at_once),
            _cat,
        )
        title = f"tee {_WORKERS} {TIMES} {_LINES:,} lines, {name}"
        lines += [
            Line(
                f"{title}: lines shown",
                "/s",
                statistics.median(one.rate for one in us),
                statistics.median(one.rate for one in them) if them else None,
                Goal(1.5, at_least=True),
                "written, not shown",
                statistics.median(one.rate for one in written),
            ),
            Line(
                f"{title}: CPU of the launcher",
                "ms",
                statistics.median(one.cpu for one in us),
                statistics.median(one.cpu for one in them) if them else None,
                Goal(0.7),
                "cat",
                statistics.median(one.cpu for one in copied),
            ),
            Line(
                f"{title}: lines lost or torn",
                "",
                max(one.lost for one in us),
                max(one.lost for one in them) if them else None,
                bound=0,
            ),
        ]
    return lines


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


def read(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Read many lines of four workers in a program, one by one and by the batch."""
    lines = []
    for name, at_once in (("100 a write", 100), ("one a write", 1)):
        teed, _, single, batches = compare(
            max(rounds // 2, 1),
            partial(_tee, at_once),
            ours,
            None,
            partial(_read, at_once, False),
            partial(_read, at_once, True),
        )
        limit = statistics.median(one.rate for one in teed)
        lines += [
            Line(
                f"{call}, {_WORKERS} {TIMES} {_LINES:,} lines, {name}: lines read",
                "/s",
                statistics.median(one.rate for one in found),
                limit_name="shown by the tee",
                limit=limit,
                limit_goal=Goal(0.5, at_least=True),
            )
            for call, found in (("agent.logs()", single), ("agent.logs().batch()", batches))
        ]
    return lines


def _read(at_once: int, by_batch: bool) -> _Teed:
    with new_notes() as notes, open(notes.path, "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        command = worker(notes, "print", str(_LINES), str(at_once), site=False)
        logs = LogSpec(log_dir=notes.path.parent, redirects=1)
        spec = LaunchSpec(command, nproc_per_node=_WORKERS, logs=logs)
        count, ended, cpu = asyncio.run(_count_lines(spec, notes, gate, by_batch))
        began = min(note.at for note in notes.read("prints"))
    total = _WORKERS * _LINES
    return _Teed(total / ((ended - began) / 1e9), cpu * 1e3, total - count)


async def _count_lines(
    spec: LaunchSpec, notes: Notes, gate: IO[bytes], by_batch: bool
) -> tuple[int, int, float]:
    """Return the number of lines, the time of the last one, and the CPU time in seconds."""
    count = 0
    async with Agent(spec) as agent:
        await asyncio.to_thread(
            wait_until, lambda: len(notes.read("ready")) == _WORKERS, "the workers"
        )
        cpu = time.process_time()
        fcntl.flock(gate, fcntl.LOCK_UN)
        async with agent.logs() as lines:
            if by_batch:
                while count < _WORKERS * _LINES:
                    count += len(await lines.batch())
            else:
                async for _ in lines:
                    count += 1
                    if count == _WORKERS * _LINES:
                        break
        ended, cpu = time.monotonic_ns(), time.process_time() - cpu
        await agent.wait()
    return count, ended, cpu


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
