"""Measuring in turns, and medians of what was measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from benchmarks.table import Line

__all__ = ["Turns", "compare", "median_of", "median_of_all", "medians"]

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turns(Generic[T]):
    """The results of all rounds; iterates over those of ours, of theirs and of each limit."""

    ours: list[T] = field(default_factory=list)
    theirs: list[T] = field(default_factory=list)  # empty without them
    old: list[T] = field(default_factory=list)  # empty without it, and where it lacks the feature
    limits: list[list[T]] = field(default_factory=list)

    def __iter__(self) -> Iterator[list[T]]:
        yield from (self.ours, self.theirs, *self.limits)

    def line(
        self,
        measure: str,
        unit: str,
        figure: Callable[[list[T]], float],
        *,
        limit: float | None = None,
        limit_name: str = "",
        **goals: Any,
    ) -> Line:
        """Return a line of the table.

        Args:
            measure: what was measured.
            unit: of the figures.
            figure: makes one figure of the results of all rounds.
            limit: figure in place of that of the first limit.
            limit_name: without one, the line has no limit.
            goals: and bounds, see `Line`.
        """
        if limit is None and limit_name:
            limit = figure(self.limits[0])
        theirs, old = (figure(them) if them else None for them in (self.theirs, self.old))
        return Line(
            measure,
            unit,
            figure(self.ours),
            theirs,
            old=old,
            limit_name=limit_name,
            limit=limit,
            **goals,
        )


def compare(
    rounds: int,
    measure: Callable[[S], T | None],
    ours: S,
    theirs: S | None,
    *limits: Callable[[], T],
    old: S | None = None,
) -> Turns[T]:
    """Measure in turns, so that a host that slows down does so for all.

    The order is another one in each round, so that none always follows the same other one.
    One more round comes first and is not counted: it fills the caches.

    Args:
        rounds: how many are counted.
        measure: measures one subject, such as a launcher.
        ours: our subject.
        theirs: the subject to compare with; None: there is none.
        limits: each measures what cannot be beaten by much.
        old: an earlier version of ours; `measure` returns None for what that cannot do.
    """
    results: Turns[T] = Turns(limits=[[] for _ in limits])
    turns: list[tuple[list[T], Callable[[], T | None]]] = [(results.ours, lambda: measure(ours))]
    if theirs is not None:
        turns.append((results.theirs, lambda: measure(theirs)))
    if old is not None:
        turns.append((results.old, lambda: measure(old)))
    turns += zip(results.limits, limits, strict=True)
    for number in range(rounds + 1):
        for result, turn in random.sample(turns, len(turns)):
            value = turn()
            if number and value is not None:
                result.append(value)
    return results


def medians(results: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each figure of results that have several."""
    return [statistics.median(figures) for figures in zip(*results, strict=True)]


def median_of(figure: Callable[[T], float]) -> Callable[[Iterable[T]], float]:
    """Return what makes the median of one figure of all results."""
    return lambda results: statistics.median(map(figure, results))


def median_of_all(results: Iterable[Sequence[float]]) -> float:
    """Return the median of all figures of all results."""
    return statistics.median(figure for result in results for figure in result)
