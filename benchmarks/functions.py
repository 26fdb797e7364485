"""Functions as workers: their start, their values, and restarts without imports."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.launchers import Job, Launcher, new_notes
from benchmarks.table import Goal, Line
from benchmarks.turns import compare, median_of_all

__all__ = ["preload", "spawn", "value"]

_CALLS = "benchmarks.workers.calls"
_IMPORTING = str(Path(__file__).parent / "workers" / "importing.py")
_FUNCTIONS = 8
_SIZE = 100_000_000
_RANKS = 4
_FAILURES = 3


def spawn(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Call 8 trivial functions in new interpreters: wall and CPU time."""
    python = theirs.command()[0] if theirs else sys.executable
    us, them, limit = compare(
        max(rounds // 3, 1),
        lambda launcher: _calls("ours" if launcher is ours else "torch", python=python),
        ours,
        theirs,
        lambda: _calls("bare", python=python),
    )
    return [
        Line(
            f"`spawn` of {_FUNCTIONS} trivial functions (torch.multiprocessing.spawn): {name}",
            "ms",
            statistics.median(one[at] for one in us),
            statistics.median(one[at] for one in them) if them else None,
            Goal(0.25),
            f"{_FUNCTIONS} bare interpreters",
            statistics.median(one[at] for one in limit),
            Goal(1.5) if name == "wall" else None,
        )
        for at, name in enumerate(["wall", "CPU"])
    ]


def value(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Return 100 MB: from the function's return to the caller, the job's end included."""
    us, _, limit = compare(
        max(rounds // 2, 1),
        lambda launcher: _calls("value", number=_SIZE),
        ours,
        None,
        lambda: _calls("pipe", number=_SIZE),
    )
    return [
        Line(
            "a return value of 100 MB",
            "ms",
            statistics.median(one[0] for one in us),
            limit_name="through a pipe",
            limit=statistics.median(one[0] for one in limit),
            limit_goal=Goal(2),
        )
    ]


def preload(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Restart 4 workers that import torch: from the failure until the last has done so."""
    if theirs is None:
        return []
    python = theirs.command()[0]
    preloading = Launcher(
        ours.name,
        lambda: [python, "-m", "elastic_aio", "run", "--torchrun-defaults", "--preload=torch"],
    )
    us, them = compare(max(rounds // 5, 1), _restarts, preloading, theirs)
    return [
        Line(
            f"a rank exits 1 → {_RANKS} restarted ranks have imported torch (preloaded by ours)",
            "ms",
            median_of_all(us),
            median_of_all(them),
            Goal(0.15),
        )
    ]


def _restarts(launcher: Launcher) -> list[float]:
    with new_notes() as notes:
        options = [f"--nproc-per-node={_RANKS}", f"--max-restarts={_FAILURES}"]
        with Job([*launcher.command(), *options, _IMPORTING, str(notes.path)]) as job:
            job.succeed()
        ready = notes.read("ready")
        return [
            (max(one.at for one in ready if one.attempt == failed.attempt + 1) - failed.at) / 1e6
            for failed in notes.read("fails")
        ]


def _calls(way: str, *, number: int = _FUNCTIONS, python: str = sys.executable) -> list[float]:
    with Job([python, "-m", _CALLS, way, str(number)], out=subprocess.PIPE) as job:
        output = os.read(job.stdout, 1000)
        job.succeed()
    return [one / 1e6 for one in json.loads(output)]
