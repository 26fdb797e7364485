"""Measuring in turns, and medians of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

__all__ = ["compare", "median_of_all", "medians"]

S = TypeVar("S")
T = TypeVar("T")


def compare(
    rounds: int,
    measure: Callable[[S], T],
    ours: S,
    theirs: S | None,
    *limits: Callable[[], T],
) -> list[list[T]]:
    """Measure in turns, so that a host that slows down does so for all.

    One more round comes first and is not counted: it fills the caches.

    Args:
        rounds: how many are counted.
        measure: measures one subject, such as a launcher.
        ours: our subject.
        theirs: the subject to compare with; None: there is none.
        limits: each measures what cannot be beaten by much.

    Returns:
        The results of all rounds: of ours, of theirs (empty without one), of each limit.
    """
    turns: list[Callable[[], T] | None] = [lambda: measure(ours)]
    turns.append(None if theirs is None else lambda: measure(theirs))
    turns.extend(limits)
    results: list[list[T]] = [[] for _ in turns]
    for number in range(rounds + 1):
        for result, turn in zip(results, turns, strict=True):
            if turn is not None:
                value = turn()
                if number:
                    result.append(value)
    return results


def medians(results: Iterable[Sequence[float]]) -> list[float]:
    """Return the median of each figure of results that have several."""
    return [statistics.median(figures) for figures in zip(*results, strict=True)]


def median_of_all(results: Iterable[Sequence[float]]) -> float:
    """Return the median of all figures of all results."""
    return statistics.median(figure for result in results for figure in result)
