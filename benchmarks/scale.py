"""Very many members in few processes: how time and traffic grow with their number."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.engines import median
from benchmarks.launchers import Job, Launcher
from benchmarks.table import Goal, Line
from tests.support.sockets import can_count_traffic

__all__ = ["members"]

_FEW = 100
_PROCESSES = {_FEW: 1, 1000: 1, 4000: 4}
"""Processes for so many members."""
_BOUND_S = 3
_BOUNDED = 1000
"""The most members for which the bound holds."""
_PACKAGE = "benchmarks.workers"


def members(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Form a group of very many members, and again after one was lost."""
    if not can_count_traffic():
        print("members is left out: needs `ss`", file=sys.stderr)
        return []
    times = max(rounds // 5, 1)
    python = theirs.command()[0] if theirs else ""
    lines: list[Line] = []
    carried: dict[int, dict[str, list[float]]] = {}
    for count, processes in _PROCESSES.items():
        results, bare = _measure(count, processes, times)
        bound = _BOUND_S if count <= _BOUNDED else None
        where = "one process" if processes == 1 else f"{processes} processes"
        formed, reformed = (median(results, name) for name in ("formed", "reformed"))
        # torch needs a thread for each member, so that a thousand take minutes.
        torch = _run(python, "other_members", "torch", count) if python and count == _FEW else None
        lines += [
            Line(
                f"{count} members in {where}: first opens → last starts",
                "s",
                formed,
                torch,
                Goal(0.1),
                "bare connections",
                bare,
                bound=bound,
            ),
            Line(
                f"{count} members in {where}: one is lost → last starts again",
                "s",
                reformed,
                bound=bound,
            ),
        ]
        carried[count] = {
            phase: [
                statistics.median(figures)
                for figures in zip(*(result[phase] for result in results), strict=True)
            ]
            for phase in ("forming", "reforming")
        }
    return lines + _growth(carried)


def _growth(carried: Mapping[int, Mapping[str, list[float]]]) -> list[Line]:
    """Compare the traffic of each member in a group of many with that in one of few."""
    lines = []
    others = [count for count in carried if count != _FEW]
    for count, phase in itertools.product(others, ("forming", "reforming")):
        few, many = carried[_FEW][phase], carried[count][phase]
        for what, unit, first in (("messages", "", 0), ("bytes", "B", 2)):
            lines.append(
                Line(
                    f"{phase} a group of {count}: {what} of each member, both ways",
                    unit,
                    many[first] + many[first + 1],
                    limit_name=f"at {_FEW}",
                    limit=few[first] + few[first + 1],
                    limit_goal=Goal(1.2),
                )
            )
    return lines


def _measure(count: int, processes: int, times: int) -> tuple[list[dict[str, Any]], float]:
    results = [_run(sys.executable, "members", "ours", count, processes) for _ in range(times)]
    bare = [_run(sys.executable, "other_members", "bare", count) for _ in range(times)]
    return results, statistics.median(bare)


def _run(python: str, module: str, way: str, *numbers: int) -> Any:
    """Run one of the programs in `workers`; return the JSON that it prints."""
    command = [python, "-m", f"{_PACKAGE}.{module}", way, *map(str, numbers)]
    with Job(command, out=subprocess.PIPE) as job:
        output = job.read()
        job.succeed()
    return json.loads(output)
