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
    `limit_name`, or `bound` is the most that our figure may be; `old` is that of an earlier
    version.
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
    old: float | None = None
    old_goal: Goal | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether every goal with a figure to compare with is met; None without such a goal."""
        pairs = ((self.goal, self.theirs), (self.limit_goal, self.limit), (self.old_goal, self.old))
        met = [
            goal.is_met(self.ours, other)
            for goal, other in pairs
            if goal is not None and other is not None
        ]
        if self.bound is not None:
            met.append(self.ours <= self.bound)
        return all(met) if met else None

    def cells(self, *, with_old: bool) -> list[str]:
        """Return the cells of the table, those of the earlier version if it has them."""
        limit = ""
        if self.limit is not None:
            limit = f"{_figure(self.limit, self.unit)} ({self.limit_name})"
        elif self.bound is not None:
            limit = f"≤ {self.bound:g} {self.unit}"
        old = "" if self.old is None else _figure(self.old, self.unit)
        return [
            self.measure,
            *([old] if with_old else []),
            _figure(self.ours, self.unit),
            *([_ratio(self.ours, self.old, self.old_goal)] if with_old else []),
            "" if self.theirs is None else _figure(self.theirs, self.unit),
            _ratio(self.ours, self.theirs, self.goal),
            limit,
            _ratio(self.ours, self.limit, self.limit_goal),
            {None: "", True: "ok", False: "**missed**"}[self.is_met],
        ]


_HEADINGS = ["measure", "elastic_aio", "torchrun", "ratio (goal)", "limit", "ratio (goal)", "ok?"]
_HEADINGS_WITH_OLD = [
    *("measure", "OLD", "NEW", "NEW/OLD (goal)", "torchrun", "NEW/torchrun (goal)"),
    *("limit", "NEW/limit (goal)", "ok?"),
]


def as_table(lines: Iterable[Line], *, with_old: bool = False) -> str:
    """Return a Markdown table, with an earlier version if asked."""
    headings = _HEADINGS_WITH_OLD if with_old else _HEADINGS
    rows = [headings, *(line.cells(with_old=with_old) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
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
    text = f"{ours / other:.3g}{TIMES}" if other else "-"
    return f"{text} ({goal})" if goal else text
