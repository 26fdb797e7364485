"""Which endpoint is taken, whatever can be seen of all of them."""

from __future__ import annotations

import itertools
import math

import pytest

from elastic_aio.rendezvous.choosing import Choice, Host, Sight, Take, Wait, choose

N, A, S, R = Sight.NOTHING_YET, Sight.ABSENT, Sight.STORE, Sight.RUN
NEVER = math.inf


@pytest.mark.parametrize(
    ("sights", "host_at", "elapsed", "expected"),
    [
        # A store is taken, the first of several.
        ([S], [0.0], 0.0, Take(0)),
        ([S, S], [0.0, 4.0], 0.0, Take(0)),
        ([A, S], [0.0, 4.0], 0.0, Take(1)),
        # One with the run takes precedence, the first of several.
        ([S, R], [0.0, 4.0], 0.0, Take(1)),
        ([R, R], [0.0, 4.0], 0.0, Take(0)),
        # What is not known yet is waited for while it could take precedence.
        ([N, S], [0.0, 4.0], 0.0, Wait(1.0)),
        ([S, N], [0.0, 4.0], 0.0, Wait(1.0)),
        ([N, R], [0.0, 4.0], 0.0, Wait(1.0)),
        ([R, N], [0.0, 4.0], 0.0, Take(0)),
        ([N, S], [0.0, 4.0], 1.0, Take(1)),
        ([N, N], [0.0, 4.0], 0.0, Wait(1.0)),
        # Nobody answers: the first that can be served, when its time has come.
        ([A], [0.0], 0.0, Host(0)),
        ([A, A], [0.0, 4.0], 0.0, Host(0)),
        ([A, N], [0.0, 4.0], 0.5, Wait(1.0)),
        ([A, N], [0.0, 4.0], 1.0, Host(0)),
        ([A, A], [NEVER, 4.0], 1.0, Wait(4.0)),
        ([A, A], [NEVER, 4.0], 4.0, Host(1)),
        ([A, A], [5.0, 4.0], 4.5, Host(1)),
        ([N, A], [NEVER, 4.0], 4.0, Host(1)),
        ([A, A], [NEVER, NEVER], 9.0, Wait(NEVER)),
    ],
)
def test_choices(
    sights: list[Sight], host_at: list[float], elapsed: float, expected: Choice
) -> None:
    """The rules, one by one."""
    assert choose(sights, host_at, elapsed, 1.0) == expected


@pytest.mark.parametrize("sights", list(itertools.product(Sight, repeat=3)))
@pytest.mark.parametrize("elapsed", [0.0, 1.0, 9.0])
def test_a_choice_can_always_be_carried_out(sights: tuple[Sight, ...], elapsed: float) -> None:
    """A store is taken where one is; nothing is served where one is seen; waits look ahead."""
    choice = choose(sights, [0.0, 4.0, 5.0], elapsed, 1.0)
    match choice:
        case Take(index):
            assert sights[index] in (S, R)
            assert R not in sights or sights[index] is R
        case Host():
            assert not {S, R} & set(sights)
        case Wait(until):
            assert until > elapsed
