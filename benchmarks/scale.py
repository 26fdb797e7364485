"""Very many members in one process: how time and traffic grow with their number."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.launchers import Job, Launcher
from benchmarks.table import Goal, Line
from tests.support.sockets import can_count_traffic

__all__ = ["members"]

_FEW, _MANY = 100, 1000
_BOUND_S = 3
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
    for count in (_FEW, _MANY):
        results, bare = _measure(count, times)
        formed, reformed = (_median(results, name) for name in ("formed", "reformed"))
        # torch needs a thread for each member, so that a thousand take minutes.
        torch = _run(python, "other_members", "torch", count) if python and count == _FEW else None
        lines += [
            Line(
                f"{count} members in one process: first opens → last starts",
                "s",
                formed,
                torch,
                Goal(0.1),
                "bare connections",
                bare,
                bound=_BOUND_S,
            ),
            Line(
                f"{count} members in one process: one is lost → last starts again",
                "s",
                reformed,
                bound=_BOUND_S,
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
    for phase in ("forming", "reforming"):
        few, many = carried[_FEW][phase], carried[_MANY][phase]
        for what, unit, first in (("messages", "", 0), ("bytes", "B", 2)):
            lines.append(
                Line(
                    f"{phase} a group of {_MANY}: {what} of each member, both ways",
                    unit,
                    many[first] + many[first + 1],
                    limit_name=f"at {_FEW}",
                    limit=few[first] + few[first + 1],
                    limit_goal=Goal(1.2),
                )
            )
    return lines


def _measure(count: int, times: int) -> tuple[list[dict[str, Any]], float]:
    results = [_run(sys.executable, "members", "ours", count) for _ in range(times)]
    bare = [_run(sys.executable, "other_members", "bare", count) for _ in range(times)]
    return results, statistics.median(bare)


def _median(results: list[dict[str, Any]], name: str) -> float:
    return statistics.median(float(result[name]) for result in results)


def _run(python: str, module: str, way: str, count: int) -> Any:
    """Run one of the programs in `workers`; return the JSON that it prints."""
    command = [python, "-m", f"{_PACKAGE}.{module}", way, str(count)]
    with Job(command, out=subprocess.PIPE) as job:
        output = os.read(job.stdout, 10_000)
        job.succeed()
    return json.loads(output)
