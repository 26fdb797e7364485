"""Figures, the goals for them, and the table of both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TIMES", "Goal", "Line", "as_json", "as_table"]

TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Goal:
    """Our figure has to be at most, or at least, a multiple of another one."""

    factor: float
    at_least: bool = False

    def is_met(self, ours: float, other: float) -> bool:
        """Tell whether our figure meets the goal."""
        bound = self.factor * other
        return ours >= bound if self.at_least else ours <= bound

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.factor:g}{TIMES}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table; figures are in `unit`, and infinite for what never happened.

    Either `limit` is the figure of something that cannot be beaten by much, called
    `limit_name`, or `bound` is the most that our figure may be.
    """

    measure: str
    unit: str
    ours: float
    theirs: float | None = None
    goal: Goal | None = None
    limit_name: str = ""
    limit: float | None = None
    limit_goal: Goal | None = None
    bound: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether every goal with a figure to compare with is met; None without such a goal."""
        met = []
        if self.goal is not None and self.theirs is not None:
            met.append(self.goal.is_met(self.ours, self.theirs))
        if self.limit_goal is not None and self.limit is not None:
            met.append(self.limit_goal.is_met(self.ours, self.limit))
        if self.bound is not None:
            met.append(self.ours <= self.bound)
        return all(met) if met else None

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        limit = ""
        if self.limit is not None:
            limit = f"{_figure(self.limit, self.unit)} ({self.limit_name})"
        elif self.bound is not None:
            limit = f"≤ {self.bound:g} {self.unit}"
        return [
            self.measure,
            _figure(self.ours, self.unit),
            "" if self.theirs is None else _figure(self.theirs, self.unit),
            _ratio(self.ours, self.theirs, self.goal),
            limit,
            _ratio(self.ours, self.limit, self.limit_goal),
            {None: "", True: "ok", False: "**missed**"}[self.is_met],
        ]


_HEADINGS = ["measure", "elastic_aio", "torchrun", "ratio (goal)", "limit", "ratio (goal)", "ok?"]


def as_table(lines: Iterable[Line]) -> str:
    """Return a Markdown table."""
    rows = [_HEADINGS, *(line.cells() for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    text = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def as_json(line: Line) -> dict[str, Any]:
    """Return the fields of a line for JSON."""
    fields = {**asdict(line), "is_met": line.is_met}
    return {name: "never" if value == math.inf else value for name, value in fields.items()}


def _figure(value: float, unit: str) -> str:
    if value == math.inf:
        return "never"
    if value >= 1000:
        text = f"{value:,.0f}"
    elif value >= 100 or value == int(value):
        text = f"{value:.0f}"
    else:
        text = f"{value:.3g}"
    return f"{text} {unit}" if unit else text


def _ratio(ours: float, other: float | None, goal: Goal | None) -> str:
    if other is None:
        return ""
    if math.inf in (ours, other):
        return "-"
    text = f"{ours / other:.2g}{TIMES}" if other else "-"
    return f"{text} ({goal})" if goal else text
