"""How fast a launcher acts: on a failure, on a restart, on the end."""

from __future__ import annotations

import signal
import statistics
import time
from functools import partial
from typing import Any

from benchmarks.launchers import Launcher, Notes, new_notes, spawn_baseline, wait_until, worker
from benchmarks.table import Goal, Line
from benchmarks.turns import compare, median_of_all

__all__ = ["peer", "restart", "tail"]

# Failures in one job: starting torchrun takes longer than all of them.
_FAILURES = 5
# Seconds after which a launcher has loaded what it may need later.
_SETTLE_S = 0.3
# What follows the measure's name, workers, and megabytes of standard error before the failure.
_FAILING = (
    ("", 2, 0),
    (", 4 MB of standard error", 2, 4),
    (", 64 MB of standard error", 2, 64),
    (", 64 workers", 64, 0),
)


def peer(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """From one rank's exit with 1 to the SIGTERM of its first peer, in several kinds of jobs."""
    what = "a rank exits 1 → its peer receives SIGTERM"
    lines: list[Line] = []
    for name, workers, megabytes in _FAILING:
        measure = partial(_received, workers, megabytes)
        results = compare(max(rounds // 2, 1), measure, ours, theirs, old=old)
        goals: dict[str, Any] = {"goal": Goal(0.02), "bound": 1.5}
        if lines:
            goals |= {"limit_name": "plain", "limit": lines[0].ours, "limit_goal": Goal(1.2)}
        lines.append(results.line(what + name, "ms", median_of_all, **goals))
    return lines


def _received(workers: int, megabytes: int, launcher: Launcher) -> list[float]:
    with new_notes() as notes:
        command = worker(notes, "fail", "receive", str(megabytes), site=False)
        with launcher.job(workers, command, f"--max-restarts={_FAILURES}") as job:
            job.succeed()
        received: dict[int, int] = {}
        for note in notes.read("receives"):
            received[note.attempt] = min(note.at, received.get(note.attempt, note.at))
        return [(received[note.attempt] - note.at) / 1e6 for note in notes.read("fails")]


def restart(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """From one rank's exit with 1 to the first instruction of the last restarted rank.

    Ranks that save have a child each, handle SIGTERM, write a file and exit with 0 or 143.
    """
    lines = []
    for ranks, how, which in ((2, "end", ""), (4, "end", ""), (4, "save", " that save on SIGTERM")):
        measure, loop = partial(_restarts, ranks, how), partial(_restarts_by_hand, ranks, how)
        results = compare(max(rounds // 3, 1), measure, ours, theirs, loop, old=old)
        lines.append(
            results.line(
                f"a rank exits 1 → first instruction of {ranks} restarted ranks{which}",
                "ms",
                median_of_all,
                goal=Goal(0.35),
                limit_name="a loop written by hand",
                limit_goal=Goal(1.3),
            )
        )
    return lines


def _restarts(ranks: int, how: str, launcher: Launcher) -> list[float]:
    with new_notes() as notes:
        command = worker(notes, "fail", how)
        with launcher.job(ranks, command, f"--max-restarts={_FAILURES}") as job:
            job.succeed()
        return _restart_times(notes)


def _restarts_by_hand(ranks: int, how: str) -> list[float]:
    """Do the same without a launcher: wait for the failure, end the others, start all again."""
    with new_notes() as notes:
        command = worker(notes, "fail", how)
        for attempt in range(_FAILURES + 1):
            failing, *others = spawn_baseline(
                command, ranks, attempt=attempt, last_attempt=_FAILURES
            )
            failing.wait()
            for process in others if failing.returncode else ():
                process.terminate()
            for process in others:
                process.wait()
        return _restart_times(notes)


def _restart_times(notes: Notes) -> list[float]:
    started: dict[int, int] = {}
    for note in notes.read("started"):
        started[note.attempt] = max(note.at, started.get(note.attempt, 0))
    return [(started[note.attempt + 1] - note.at) / 1e6 for note in notes.read("fails")]


def tail(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """From the last worker's exit to the launcher's: by itself, and after a save on SIGTERM."""

    def leave(launcher: Launcher) -> float:
        with new_notes() as notes:
            with launcher.job(2, worker(notes, "leave", site=False)) as job:
                ended = job.succeed()
            return (ended.at - max(note.at for note in notes.read("leaves"))) / 1e6

    def stop(launcher: Launcher) -> float:
        with new_notes() as notes:
            with launcher.job(2, worker(notes, "train", site=False)) as job:
                wait_until(lambda: len(notes.read("ready")) == 2, "the workers")
                time.sleep(_SETTLE_S)
                job.send_signal(signal.SIGTERM)
                ended = job.wait()
            return (ended.at - max(note.at for note in notes.read("saved"))) / 1e6

    lines = []
    for name, measure in (("exit", leave), ("save, on SIGTERM to the launcher,", stop)):
        results = compare(max(rounds // 2, 1), measure, ours, theirs, old=old)
        what = f"last worker's {name} → launcher's exit"
        lines.append(results.line(what, "ms", statistics.median, goal=Goal(0.1)))
    return lines
