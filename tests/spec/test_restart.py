"""Restart policies, delays and windows, and what a budget allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.spec.restart import (
    DEFAULT_BACKOFF,
    UNLIMITED,
    Backoff,
    RestartAction,
    RestartBudget,
    RestartDecision,
    RestartHistory,
    RestartPolicy,
    RestartWindow,
)
from tests.support.restarts import at_once


def test_delays_double_up_to_the_cap() -> None:
    backoff = Backoff(initial=1, factor=2, cap=10, jitter=False)
    assert [backoff.delay(n, lambda: 0.5) for n in range(6)] == [1, 2, 4, 8, 10, 10]


def test_jitter_takes_a_random_part() -> None:
    """Full jitter: a number from 0 to 1 times the ceiling."""
    backoff = Backoff(initial=4, factor=3, cap=100)
    assert backoff.delay(1, lambda: 0.0) == 0
    assert backoff.delay(1, lambda: 0.25) == 3
    assert backoff.delay(1, lambda: 1.0) == 12


def test_the_defaults_of_a_backoff() -> None:
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
    st.floats(0, 1e3), st.floats(1, 1e6), st.floats(0, 1e6), st.integers(0, 10_000), st.floats(0, 1)
)
def test_a_delay_is_never_above_the_cap(
    initial: float, factor: float, cap: float, consecutive: int, share: float
) -> None:
    """Nor negative; ceilings never shrink."""
    backoff = Backoff(initial=initial, factor=factor, cap=cap)
    assert 0 <= backoff.delay(consecutive, lambda: share) <= cap
    assert backoff.ceiling(consecutive) <= backoff.ceiling(consecutive + 1)


def test_the_expected_total_halves_jittered_delays() -> None:
    """The mean of full jitter is half of the ceiling."""
    assert Backoff(initial=1, factor=2, cap=60, jitter=False).expected_total(4) == 15
    assert Backoff(initial=1, factor=2, cap=60).expected_total(4) == 7.5
    assert Backoff().expected_total(0) == 0
    assert DEFAULT_BACKOFF.expected_total(9) == 0 + 1 + 2 + 4 + 8 + 16 + 32 + 60 + 60


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
    """A restart of `seconds` ago no longer counts."""
    assert RestartWindow(2, 10.0).is_exhausted(restarts_at, now) is exhausted


def test_there_are_four_actions() -> None:
    names = [action.name for action in RestartAction]
    assert names == ["RESTART", "GIVE_UP", "DEFAULT", "EXCLUDE"]


def test_a_policy_is_made_of_plain_values() -> None:
    """A pair becomes a window, lists become frozen sets."""
    policy = RestartPolicy(window=(2, 60), restart_on=[3, 4], never_on={5})
    assert policy.window == RestartWindow(2, 60)
    assert policy.restart_on == frozenset({3, 4})
    assert policy.never_on == frozenset({5})


def test_unhashable_codes_are_refused() -> None:
    codes: Any = [[1]]
    with pytest.raises(SpecError, match=r"^restart\.never_on: must hold exit codes"):
        RestartPolicy(never_on=codes)


def test_a_window_that_can_be_exhausted_is_accepted() -> None:
    """Three delays take 7 s, less than the window of 8 s."""
    policy = RestartPolicy(window=(3, 8), backoff=Backoff(jitter=False), healthy_after=60)
    policy.check_with(3)
    with pytest.raises(SpecError, match=r"cannot be exhausted with max_restarts=2"):
        policy.check_with(2)


@pytest.mark.parametrize(
    "policy",
    [
        RestartPolicy(backoff=Backoff()),
        RestartPolicy(healthy_after=600.0),
        RestartPolicy(restart_on=frozenset({1})),
        RestartPolicy(decide=lambda _: RestartAction.GIVE_UP),
    ],
)
def test_a_policy_without_restarts_has_no_effect(policy: RestartPolicy) -> None:
    """A back-off, codes or a callback with max_restarts=0."""
    with pytest.raises(SpecError, match=r"has no effect unless max_restarts is at least 1"):
        policy.check_with(0)
    policy.check_with(1)


def test_never_on_needs_no_restarts() -> None:
    RestartPolicy(never_on=frozenset({3})).check_with(0)


def failure(code: int = 1) -> Failure:
    status = ExitStatus(code=code) if code < 128 else ExitStatus(signal=code - 128)
    return Failure(rank=0, local_rank=0, pid=1, host="h", status=status, time=0.0, order=0)


@pytest.mark.parametrize(
    ("policy", "restart", "why"),
    [
        ({"never_on": {255}}, True, "restart 1 of 3 (max restarts)"),
        ({"restart_on": {255}}, False, "exit status lost is not in the restart-on list"),
    ],
)
def test_a_lost_status_is_no_exit_code(policy: dict[str, Any], restart: bool, why: str) -> None:
    """Another part of the program has reaped the worker; a shell would report 255."""
    lost = replace(failure(), status=ExitStatus())
    decision = budget(**policy).decide(lost, RestartAction.DEFAULT, 1.0, 0.0)
    assert (decision.restart, decision.why) == (restart, why)
    assert not budget(**policy).forbids(lost)


def budget(max_restarts: int = 3, share: float = 1.0, **policy: Any) -> RestartBudget:
    return RestartBudget(max_restarts, at_once(**policy), lambda: share)


@pytest.mark.parametrize(
    ("policy", "code", "action", "restart", "why"),
    [
        ({}, 1, RestartAction.DEFAULT, True, "restart 1 of 3 (max restarts)"),
        ({}, 1, RestartAction.GIVE_UP, False, "restart.decide returned GIVE_UP"),
        (
            {},
            1,
            RestartAction.RESTART,
            True,
            "restart 1 of 3 (max restarts), restart.decide returned RESTART",
        ),
        ({"never_on": {3}}, 3, RestartAction.DEFAULT, False, "exit code 3 is in the never-on list"),
        ({"never_on": {3}}, 4, RestartAction.DEFAULT, True, "restart 1 of 3 (max restarts)"),
        (
            {"never_on": {3}},
            3,
            RestartAction.RESTART,
            True,
            "restart 1 of 3 (max restarts), restart.decide returned RESTART",
        ),
        (
            {"restart_on": {137}},
            1,
            RestartAction.DEFAULT,
            False,
            "exit code 1 is not in the restart-on list",
        ),
        ({"restart_on": {137}}, 137, RestartAction.DEFAULT, True, "restart 1 of 3 (max restarts)"),
        (
            {"restart_on": {137}},
            1,
            RestartAction.RESTART,
            True,
            "restart 1 of 3 (max restarts), restart.decide returned RESTART",
        ),
        ({"restart_on": {3}}, 3, RestartAction.GIVE_UP, False, "restart.decide returned GIVE_UP"),
    ],
)
def test_codes_and_callbacks(
    policy: dict[str, Any], code: int, action: RestartAction, restart: bool, why: str
) -> None:
    """The callback overrides the exit codes; the rule that applies is named."""
    assert budget(**policy).decide(failure(code), action, 1.0, 10.0) == RestartDecision(
        restart, why, 0.0
    )


@pytest.mark.parametrize("action", [RestartAction.DEFAULT, RestartAction.RESTART])
def test_a_callback_cannot_exceed_max_restarts(action: RestartAction) -> None:
    spent = budget(2)
    for number in (1, 2):
        assert not spent.is_exhausted(1.0)
        assert spent.decide(failure(), action, 1.0, 10.0).restart
        spent.record(10.0)
        assert spent.restarts == number
    assert spent.is_exhausted(1.0)
    decision = spent.decide(failure(), action, 1.0, 10.0)
    assert decision == RestartDecision(False, "all 2 restarts are used up (max restarts)")
    assert repr(spent) == "<RestartBudget: 2 of 2 restarts used>"


def test_the_reason_without_restarts() -> None:
    decision = budget(0).decide(failure(), RestartAction.DEFAULT, 1.0, 10.0)
    assert decision == RestartDecision(False, "no restarts allowed (max restarts: 0)")


def test_a_window_limits_the_rate() -> None:
    """Two restarts in 60 s; a third within them ends the job, a later one does not."""
    limited = budget(9, window=RestartWindow(2, 60.0))
    for now in (0.0, 10.0):
        assert limited.decide(failure(), RestartAction.DEFAULT, 1.0, now).restart
        limited.record(now)
    decision = limited.decide(failure(), RestartAction.RESTART, 1.0, 59.0)
    assert decision == RestartDecision(False, "2 restarts within 60 s (restart window)")
    assert limited.decide(failure(), RestartAction.DEFAULT, 1.0, 60.0).restart


def delays(spent: RestartBudget, lifetimes: list[float]) -> list[float]:
    result = []
    for ran in lifetimes:
        result.append(spent.decide(failure(), RestartAction.DEFAULT, ran, 0.0).delay)
        spent.record(0.0)
    return result


def test_the_delay_grows_with_each_restart() -> None:
    growing = budget(9, backoff=Backoff(initial=1, factor=2, cap=5, jitter=False))
    assert delays(growing, [1, 1, 1, 1, 1]) == [1, 2, 4, 5, 5]


def test_a_healthy_attempt_resets_the_delay() -> None:
    """An attempt of 10 s or more."""
    resetting = budget(
        9, backoff=Backoff(initial=1, factor=2, cap=60, jitter=False), healthy_after=10.0
    )
    assert delays(resetting, [1, 9.9, 10.0, 1, 1]) == [1, 2, 1, 2, 4]


def test_the_default_delays() -> None:
    """None at first, then 1, 2, 4 and up to 60 s; anew after an attempt of a minute."""
    spent = budget(99, backoff=DEFAULT_BACKOFF)
    assert delays(spent, [5] * 9) == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert delays(spent, [59.9, 60, 1, 60]) == [60, 0, 1, 0]


def test_no_restarts_are_the_default_with_any_delay() -> None:
    RestartPolicy().check_with(0)
    assert RestartPolicy().backoff == DEFAULT_BACKOFF


def test_a_healthy_attempt_returns_the_budget() -> None:
    """Before the callback is asked, too; the number of restarts goes on."""
    spent = budget(2, healthy_after=600.0)
    for number in (1, 2, 1, 2):
        ran = 600.0 if number == 1 else 599.0
        assert not spent.is_exhausted(ran)
        decision = spent.decide(failure(), RestartAction.DEFAULT, ran, 0.0)
        assert decision.why == f"restart {number} of 2 (max restarts)"
        spent.record(0.0)
    assert (spent.restarts, spent.returned) == (4, 2)
    assert spent.is_exhausted(599.0)
    assert not spent.decide(failure(), RestartAction.DEFAULT, 599.0, 0.0).restart


def test_what_was_returned_is_known_to_the_budget_of_another_node() -> None:
    leading, following = (budget(1, healthy_after=600.0) for _ in range(2))
    for ran in (1.0, 600.0):
        assert leading.decide(failure(), RestartAction.DEFAULT, ran, 0.0).restart
        leading.record(0.0)
    history = leading.history(0.0)
    assert history is not None
    following.follow(history, 0.0)
    assert following.returned == 1
    following.clear()
    assert following.returned == 0


def test_a_restart_that_was_granted_is_known_to_the_next_coordinator() -> None:
    """The history that goes with it counts no restart more, but the series has gone on."""
    leading, following = (budget(1, healthy_after=600.0) for _ in range(2))
    assert leading.decide(failure(), RestartAction.DEFAULT, 1.0, 0.0).restart
    leading.record(0.0)
    for returned in (0, 1):
        history = leading.history(0.0)
        assert history is not None
        following.follow(history, 0.0)
        assert (following.restarts, following.returned) == (1, returned)
        assert leading.decide(failure(), RestartAction.DEFAULT, 600.0, 0.0).restart


def test_unlimited_restarts_end_by_the_window_only() -> None:
    endless = budget(UNLIMITED, window=RestartWindow(2, 60.0))
    for number in (1, 2):
        decision = endless.decide(failure(), RestartAction.DEFAULT, 1.0, 0.0)
        assert decision.why == f"restart {number} (max restarts: unlimited)"
        endless.record(0.0)
    decision = endless.decide(failure(), RestartAction.DEFAULT, 1.0, 0.0)
    assert decision == RestartDecision(False, "2 restarts within 60 s (restart window)")


def test_jitter_uses_the_given_randomness() -> None:
    assert delays(budget(9, 0.25, backoff=Backoff(initial=4, factor=2)), [1, 1]) == [1, 2]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(list(RestartAction)), st.floats(0, 100)), max_size=20),
)
def test_restarts_never_exceed_the_budget(
    max_restarts: int, moves: list[tuple[RestartAction, float]]
) -> None:
    """For any actions and times."""
    spent = RestartBudget(max_restarts, RestartPolicy(), lambda: 0.5)
    now = 0.0
    for action, seconds in moves:
        now += seconds
        if spent.decide(failure(), action, seconds, now).restart:
            spent.record(now)
    assert spent.restarts <= max_restarts


def test_a_budget_continues_from_the_history_of_another() -> None:
    """It never counts less than before, and a history that says nothing new changes no time."""
    policy = RestartPolicy(window=(3, 60.0), backoff=Backoff(initial=1, jitter=False))
    leading, following = (RestartBudget(9, policy, lambda: 1.0) for _ in range(2))
    assert leading.history(0.0) is None
    leading.record(10.0)
    leading.lose_node(15.0)
    leading.record(20.0)
    history = leading.history(30.0)
    assert history == RestartHistory(2, 1, 0, (20.0, 10.0), (15.0,))
    following.follow(history, 1030.0)
    assert following.history(1030.0) == history
    following.follow(history, 1040.0)
    assert following.history(1030.0) == history
    following.follow(RestartHistory(1, 0, 0, (5.0,)), 1040.0)
    assert following.restarts == 2
    following.resume(7)
    following.record(1050.0)
    assert following.restarts == 8
    counted = following.history(1050.0)
    assert counted is not None
    assert counted.restart_ages == (40.0, 30.0, 0.0)
