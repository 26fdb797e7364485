"""How fast a launcher acts: on a failure, on a restart, on the end."""

from __future__ import annotations

import statistics
import time
from functools import partial

from benchmarks.compare import compare, median_of_all
from benchmarks.launchers import Launcher, Notes, new_notes, spawn_baseline, worker
from benchmarks.table import Goal, Line

__all__ = ["peer", "restart", "tail"]

# Failures in one job: starting torchrun takes longer than all of them.
_FAILURES = 5


def peer(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """From one rank's exit with 1 to the SIGTERM of its peer."""

    def measure(launcher: Launcher) -> list[float]:
        with new_notes() as notes:
            command = worker(notes, "fail", "receive", site=False)
            with launcher.job(2, command, f"--max-restarts={_FAILURES}") as job:
                job.succeed()
            fails = {note.attempt: note.at for note in notes.read("fails")}
            return [(note.at - fails[note.attempt]) / 1e6 for note in notes.read("receives")]

    us, them = compare(max(rounds // 2, 1), measure, ours, theirs)
    return [
        Line(
            "a rank exits 1 → its peer receives SIGTERM",
            "ms",
            median_of_all(us),
            median_of_all(them) if them else None,
            Goal(0.05),
            bound=3,
        )
    ]


def restart(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """From one rank's exit with 1 to the first instruction of the last restarted rank."""
    lines = []
    for ranks in (2, 4):
        us, them, limit = compare(
            max(rounds // 2, 1),
            partial(_restarts, ranks),
            ours,
            theirs,
            partial(_baseline, ranks),
        )
        lines.append(
            Line(
                f"a rank exits 1 → first instruction of {ranks} restarted ranks",
                "ms",
                median_of_all(us),
                median_of_all(them) if them else None,
                Goal(0.35),
                "spawned without a supervisor",
                median_of_all(limit),
                Goal(1.5),
            )
        )
    return lines


def _restarts(ranks: int, launcher: Launcher) -> list[float]:
    with new_notes() as notes:
        command = worker(notes, "fail", "end")
        with launcher.job(ranks, command, f"--max-restarts={_FAILURES}") as job:
            job.succeed()
        return [
            (_last_started(notes, note.attempt + 1) - note.at) / 1e6 for note in notes.read("fails")
        ]


def _baseline(ranks: int) -> list[float]:
    return [_started_baseline(ranks) for _ in range(_FAILURES)]


def _started_baseline(ranks: int) -> float:
    with new_notes() as notes:
        started_at = time.monotonic_ns()
        for process in spawn_baseline(worker(notes, "fail", "end"), ranks):
            process.wait()
        return (_last_started(notes, 0) - started_at) / 1e6


def _last_started(notes: Notes, attempt: int) -> int:
    return max(note.at for note in notes.read("started") if note.attempt == attempt)


def tail(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """From the last worker's exit to the launcher's."""

    def measure(launcher: Launcher) -> float:
        with new_notes() as notes:
            with launcher.job(2, worker(notes, "leave", site=False)) as job:
                ended = job.succeed()
            return (ended.at - max(note.at for note in notes.read("leaves"))) / 1e6

    us, them = compare(rounds, measure, ours, theirs)
    return [
        Line(
            "last worker's exit → launcher's exit",
            "ms",
            statistics.median(us),
            statistics.median(them) if them else None,
            Goal(0.1),
        )
    ]
