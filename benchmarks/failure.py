"""How fast a launcher acts: on a failure, on a restart, on the end."""

from __future__ import annotations

import statistics
import time
from functools import partial

from benchmarks.measure import Contender, Notes, compare, new_notes, spawn_by_hand, worker
from benchmarks.table import Goal, Line

__all__ = ["peer", "restart", "tail"]

# Failures in one job: starting torchrun takes longer than all of them.
_FAILURES = 5


def peer(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """From one rank's exit with 1 to the SIGTERM of its peer."""

    def measure(contender: Contender) -> list[float]:
        with new_notes() as notes:
            command = worker(notes, "fail", "hear", site=False)
            with contender.job(2, command, f"--max-restarts={_FAILURES}") as job:
                job.succeed()
            fails = {note.attempt: note.at for note in notes.read("fails")}
            return [(note.at - fails[note.attempt]) / 1e6 for note in notes.read("hears")]

    us, them = compare(max(rounds // 2, 1), measure, ours, theirs)
    return [
        Line(
            "a rank exits 1 → its peer receives SIGTERM",
            "ms",
            _median_of_all(us),
            _median_of_all(them) if them else None,
            Goal(0.05),
            bound=3,
        )
    ]


def restart(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """From one rank's exit with 1 to the first instruction of the last restarted rank."""
    lines = []
    for ranks in (2, 4):
        us, them, limit = compare(
            max(rounds // 2, 1),
            partial(_restarts, ranks),
            ours,
            theirs,
            partial(_by_hand, ranks),
        )
        lines.append(
            Line(
                f"a rank exits 1 → first instruction of {ranks} restarted ranks",
                "ms",
                _median_of_all(us),
                _median_of_all(them) if them else None,
                Goal(0.35),
                "spawned by hand",
                _median_of_all(limit),
                Goal(1.5),
            )
        )
    return lines


def _restarts(ranks: int, contender: Contender) -> list[float]:
    with new_notes() as notes:
        command = worker(notes, "fail", "die")
        with contender.job(ranks, command, f"--max-restarts={_FAILURES}") as job:
            job.succeed()
        return [
            (_last_born(notes, note.attempt + 1) - note.at) / 1e6 for note in notes.read("fails")
        ]


def _by_hand(ranks: int) -> list[float]:
    return [_born_by_hand(ranks) for _ in range(_FAILURES)]


def _born_by_hand(ranks: int) -> float:
    with new_notes() as notes:
        began = time.monotonic_ns()
        for process in spawn_by_hand(worker(notes, "fail", "die"), ranks):
            process.wait()
        return (_last_born(notes, 0) - began) / 1e6


def _last_born(notes: Notes, attempt: int) -> int:
    return max(note.at for note in notes.read("born") if note.attempt == attempt)


def tail(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """From the last worker's exit to the launcher's."""

    def measure(contender: Contender) -> float:
        with new_notes() as notes:
            with contender.job(2, worker(notes, "leave", site=False)) as job:
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


def _median_of_all(results: list[list[float]]) -> float:
    return statistics.median(one for result in results for one in result)
