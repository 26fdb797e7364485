"""Which endpoint to meet at, given what can be seen of each.

The rules, for any number of nodes that apply them each for itself:

* Where a store lives at which the run is under way, there it goes on: at the first
  of these, if there are several.
* Else at the first endpoint where a store lives.
* Else at the first endpoint that this node can serve itself, when its time has come:
  later endpoints have later times, so that the nodes of earlier ones are first.
* An endpoint of which nothing is known yet is waited for, if it would take
  precedence, but only for a grace: one whose packets are lost answers never.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from msgspec import Struct

__all__ = ["Choice", "Host", "Sight", "Take", "Wait", "choose"]


class Sight(Enum):
    """What is seen at an endpoint."""

    NOTHING_YET = 0
    ABSENT = 1
    """No store of ours, for whatever reason."""
    STORE = 2
    RUN = 3
    """A store at which this run is under way."""


class Take(Struct, frozen=True):
    """Meet at the store that is at the endpoint."""

    index: int


class Host(Struct, frozen=True):
    """Serve a store at the endpoint."""

    index: int


class Wait(Struct, frozen=True):
    """Do nothing before something else is seen, or so many seconds are over in all."""

    until: float


Choice = Take | Host | Wait


def choose(
    sights: Sequence[Sight], host_at: Sequence[float], elapsed: float, grace: float
) -> Choice:
    """Return what to do now.

    Args:
        sights: what is seen at each endpoint.
        host_at: for each endpoint, after how many seconds this node may serve it;
            infinity for never.
        elapsed: seconds since the search began.
        grace: seconds within which every endpoint has had its time to answer.
    """
    best = _first(sights, Sight.RUN)
    rivals = sights if best is None else sights[:best]
    if best is None:
        best = _first(sights, Sight.STORE)
    if Sight.NOTHING_YET in rivals and elapsed < grace:
        return Wait(grace)
    if best is not None:
        return Take(best)
    for index, when in enumerate(host_at):
        if when <= elapsed:
            return Host(index)
    return Wait(min(host_at, default=math.inf))


def _first(sights: Sequence[Sight], wanted: Sight) -> int | None:
    return sights.index(wanted) if wanted in sights else None
