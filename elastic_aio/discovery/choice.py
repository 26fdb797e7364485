"""Which endpoint to use, given the state of each; the same rules on every node.

* If the run is active at an endpoint, use it: the first, if there are several.
* Otherwise use the first endpoint with a store.
* Otherwise serve the store at the first endpoint that this node can serve and whose turn has come.
  Later endpoints have later turns, so that nodes of earlier endpoints go first.
* An endpoint of unknown state that would take precedence is waited for, but only for a grace
  period: an endpoint whose packets are dropped never answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

RECONNECT_FOR: Final = 0.25
"""Seconds to re-establish a lost connection: leases linger a little less, then it has no use."""

FENCE: Final = 0.25
"""Seconds from a cut-off node's stop to its lease's end, and from then until others start: see
`elastic_aio.rendezvous.formation`."""

_FIRST_GRACE: Final = 1.0
_GRACE: Final = 0.3
_FIRST_TURN: Final = 3.0
_TURN: Final = 0.3
_LATER_TURN: Final = 0.6


class EndpointState(Enum):
    """What is known about an endpoint."""

    UNKNOWN = 0
    NO_STORE = 1
    """No usable store, for whatever reason."""
    REFUSED = 2
    """A program there refuses this node, which trying again soon does not change."""
    STORE = 3
    ACTIVE_RUN = 4
    """A store at which this run has a coordinator, or the job of this node has ended."""


class UseStore(Struct, frozen=True, gc=False):
    """Use the store at the endpoint."""

    index: int


class ServeStore(Struct, frozen=True, gc=False):
    """Serve a store at the endpoint."""

    index: int


class WaitUntil(Struct, frozen=True, gc=False):
    """Wait until a state changes, or the search has taken so many seconds."""

    until: float


Choice = UseStore | ServeStore | WaitUntil


def choose_endpoint(
    states: Sequence[EndpointState], turns: Sequence[float], elapsed: float, grace: float
) -> Choice:
    """Return the present step, `elapsed` seconds after the search began.

    `turns` are the seconds after which this node may serve each endpoint, infinity for never.
    Endpoints of unknown state are waited for until `grace`.
    """
    best = _first(states, EndpointState.ACTIVE_RUN)
    rivals = states if best is None else states[:best]
    if best is None:
        best = _first(states, EndpointState.STORE)
    if EndpointState.UNKNOWN in rivals and elapsed < grace:
        return WaitUntil(grace)
    if best is not None:
        return UseStore(best)
    for index, turn in enumerate(turns):
        if turn <= elapsed:
            return ServeStore(index)
    return WaitUntil(min(turns, default=math.inf))


def search_grace(*, is_first: bool, timeout: float) -> float:
    """Return for how many seconds of a search an endpoint is waited for that does not answer."""
    return min(_FIRST_GRACE if is_first else _GRACE, timeout / 2)


def endpoint_turn(index: int, *, is_first: bool, timeout: float) -> float:
    """Return after how many seconds of a search an endpoint may be served; see `locator`."""
    if index == 0:
        return 0.0
    if is_first:
        return min(_FIRST_TURN + index, timeout / 2)
    return _TURN + _LATER_TURN * (index - 1)


def _first(states: Sequence[EndpointState], wanted: EndpointState) -> int | None:
    return states.index(wanted) if wanted in states else None
