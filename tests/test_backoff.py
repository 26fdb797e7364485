"""Delays and windows are plain arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.backoff import Backoff, RestartWindow


def test_delays_double_up_to_the_cap() -> None:
    """Without jitter the delays are the powers, cut at the cap."""
    backoff = Backoff(initial=1, factor=2, cap=10, jitter=False)
    assert [backoff.delay(n, lambda: 0.5) for n in range(6)] == [1, 2, 4, 8, 10, 10]


def test_jitter_takes_a_random_share() -> None:
    """Full jitter multiplies the ceiling by a number from 0 to 1."""
    backoff = Backoff(initial=4, factor=3, cap=100)
    assert backoff.delay(1, lambda: 0.0) == 0
    assert backoff.delay(1, lambda: 0.25) == 3
    assert backoff.delay(1, lambda: 1.0) == 12


def test_the_defaults_are_as_documented() -> None:
    """One second, doubled, a minute at most, with jitter."""
    assert Backoff() == Backoff(initial=1.0, factor=2.0, cap=60.0, jitter=True)


@pytest.mark.parametrize(
    ("backoff", "consecutive", "ceiling"),
    [
        (Backoff(), 1023, 60.0),
        (Backoff(), 1024, 60.0),
        (Backoff(), 100_000, 60.0),
        (Backoff(factor=10.0), 400, 60.0),
        (Backoff(initial=0.0), 5000, 0.0),
        (Backoff(initial=0.0), 1024, 0.0),
        (Backoff(initial=2.0, factor=1.0), 5000, 2.0),
        (Backoff(initial=1.0, factor=1.0001, cap=60.0), 1025, 1.0001**1025),
    ],
)
def test_the_ceiling_holds_after_any_number_of_restarts(
    backoff: Backoff, consecutive: int, ceiling: float
) -> None:
    """Thousands of restarts neither overflow nor jump to the cap."""
    assert backoff.ceiling(consecutive) == pytest.approx(ceiling)


@given(
    st.floats(0, 1e3),
    st.floats(1, 1e6),
    st.floats(0, 1e6),
    st.integers(0, 10_000),
    st.floats(0, 1),
)
def test_a_delay_is_never_above_the_cap(
    initial: float, factor: float, cap: float, consecutive: int, share: float
) -> None:
    """Every delay is from 0 to the cap, and ceilings never shrink."""
    backoff = Backoff(initial=initial, factor=factor, cap=cap)
    assert 0 <= backoff.delay(consecutive, lambda: share) <= cap
    assert backoff.ceiling(consecutive) <= backoff.ceiling(consecutive + 1)


def test_the_expected_total_halves_jittered_delays() -> None:
    """The mean of full jitter is half of the ceiling."""
    assert Backoff(initial=1, factor=2, cap=60, jitter=False).expected_total(4) == 15
    assert Backoff(initial=1, factor=2, cap=60).expected_total(4) == 7.5
    assert Backoff().expected_total(0) == 0


@pytest.mark.parametrize(
    ("restarts_at", "now", "exhausted"),
    [
        ([], 0.0, False),
        ([0.0], 1.0, False),
        ([0.0, 1.0], 2.0, True),
        ([0.0, 9.0], 9.9, True),
        ([0.0, 9.0], 10.0, False),
        ([0.0, 9.0, 10.0], 11.0, True),
    ],
)
def test_a_window_counts_recent_restarts_only(
    restarts_at: list[float], now: float, exhausted: bool
) -> None:
    """A restart that is T seconds old no longer counts."""
    assert RestartWindow(2, 10.0).is_exhausted(restarts_at, now) is exhausted
