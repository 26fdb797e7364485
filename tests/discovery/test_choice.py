"""The choice of an endpoint, for all combinations of states."""

from __future__ import annotations

import itertools
import math

import pytest

from elastic_aio.discovery.choice import (
    Choice,
    EndpointState,
    ServeStore,
    UseStore,
    WaitUntil,
    choose_endpoint,
)

N, A, S, R = (
    EndpointState.UNKNOWN,
    EndpointState.NO_STORE,
    EndpointState.STORE,
    EndpointState.ACTIVE_RUN,
)
NEVER = math.inf


@pytest.mark.parametrize(
    ("states", "host_at", "elapsed", "expected"),
    [
        # A store is taken, the first of several.
        ([S], [0.0], 0.0, UseStore(0)),
        ([S, S], [0.0, 4.0], 0.0, UseStore(0)),
        ([A, S], [0.0, 4.0], 0.0, UseStore(1)),
        # One with the run takes precedence, the first of several.
        ([S, R], [0.0, 4.0], 0.0, UseStore(1)),
        ([R, R], [0.0, 4.0], 0.0, UseStore(0)),
        # What is not known yet is waited for while it could take precedence.
        ([N, S], [0.0, 4.0], 0.0, WaitUntil(1.0)),
        ([S, N], [0.0, 4.0], 0.0, WaitUntil(1.0)),
        ([N, R], [0.0, 4.0], 0.0, WaitUntil(1.0)),
        ([R, N], [0.0, 4.0], 0.0, UseStore(0)),
        ([N, S], [0.0, 4.0], 1.0, UseStore(1)),
        ([N, N], [0.0, 4.0], 0.0, WaitUntil(1.0)),
        # No endpoint answers: the first that can be served, at its turn.
        ([A], [0.0], 0.0, ServeStore(0)),
        ([A, A], [0.0, 4.0], 0.0, ServeStore(0)),
        ([A, N], [0.0, 4.0], 0.5, WaitUntil(1.0)),
        ([A, N], [0.0, 4.0], 1.0, ServeStore(0)),
        ([A, A], [NEVER, 4.0], 1.0, WaitUntil(4.0)),
        ([A, A], [NEVER, 4.0], 4.0, ServeStore(1)),
        ([A, A], [5.0, 4.0], 4.5, ServeStore(1)),
        ([N, A], [NEVER, 4.0], 4.0, ServeStore(1)),
        ([A, A], [NEVER, NEVER], 9.0, WaitUntil(NEVER)),
    ],
)
def test_choices(
    states: list[EndpointState], host_at: list[float], elapsed: float, expected: Choice
) -> None:
    assert choose_endpoint(states, host_at, elapsed, 1.0) == expected


@pytest.mark.parametrize("states", list(itertools.product(EndpointState, repeat=3)))
@pytest.mark.parametrize("elapsed", [0.0, 1.0, 9.0])
def test_every_choice_is_possible(states: tuple[EndpointState, ...], elapsed: float) -> None:
    choice = choose_endpoint(states, [0.0, 4.0, 5.0], elapsed, 1.0)
    match choice:
        case UseStore(index):
            assert states[index] in (S, R)
            assert R not in states or states[index] is R
        case ServeStore():
            assert not {S, R} & set(states)
        case WaitUntil(until):
            assert until > elapsed
