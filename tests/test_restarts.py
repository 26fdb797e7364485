"""May there be another attempt, when, and by which rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.backoff import Backoff, RestartWindow
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.restarts import RestartBook, Verdict


def failure(code: int = 1) -> Failure:
    status = ExitStatus(code=code) if code < 128 else ExitStatus(signal=code - 128)
    return Failure(rank=0, local_rank=0, pid=1, host="h", status=status, time=0.0, order=0)


def book(max_restarts: int = 3, share: float = 1.0, **policy: Any) -> RestartBook:
    return RestartBook(max_restarts, RestartPolicy(**policy), lambda: share)


@pytest.mark.parametrize(
    ("policy", "code", "action", "restart", "why"),
    [
        ({}, 1, Action.BY_POLICY, True, "restart 1 of 3 (max_restarts)"),
        ({}, 1, Action.GIVE_UP, False, "restart.decide said to give up"),
        ({}, 1, Action.RESTART, True, "restart 1 of 3 (max_restarts), restart.decide said so"),
        (
            {"never_on": {3}},
            3,
            Action.BY_POLICY,
            False,
            "exit code 3 is in restart.never_on",
        ),
        ({"never_on": {3}}, 4, Action.BY_POLICY, True, "restart 1 of 3 (max_restarts)"),
        (
            {"never_on": {3}},
            3,
            Action.RESTART,
            True,
            "restart 1 of 3 (max_restarts), restart.decide said so",
        ),
        (
            {"restart_on": {137}},
            1,
            Action.BY_POLICY,
            False,
            "exit code 1 is not in restart.restart_on",
        ),
        ({"restart_on": {137}}, 137, Action.BY_POLICY, True, "restart 1 of 3 (max_restarts)"),
        (
            {"restart_on": {137}},
            1,
            Action.RESTART,
            True,
            "restart 1 of 3 (max_restarts), restart.decide said so",
        ),
        ({"restart_on": {3}}, 3, Action.GIVE_UP, False, "restart.decide said to give up"),
    ],
)
def test_codes_and_callbacks(
    policy: dict[str, Any], code: int, action: Action, restart: bool, why: str
) -> None:
    """What the callback says passes over the exit codes, and the rule is named."""
    assert book(**policy).judge(failure(code), action, 1.0, 10.0) == Verdict(restart, why, 0.0)


@pytest.mark.parametrize("action", [Action.BY_POLICY, Action.RESTART])
def test_the_budget_counts_for_everybody(action: Action) -> None:
    """No callback gets more restarts than max_restarts allows."""
    used = book(2)
    for number in (1, 2):
        assert not used.is_used_up
        assert used.judge(failure(), action, 1.0, 10.0).restart
        used.count(10.0)
        assert used.restarts == number
    assert used.is_used_up
    verdict = used.judge(failure(), action, 1.0, 10.0)
    assert verdict == Verdict(False, "all 2 restarts are used up (max_restarts)")
    assert repr(used) == "<RestartBook: 2 of 2 restarts used>"


def test_no_restarts_are_no_restarts() -> None:
    """The default says so in words."""
    verdict = book(0).judge(failure(), Action.BY_POLICY, 1.0, 10.0)
    assert verdict == Verdict(False, "no restarts allowed (max_restarts is 0)")


def test_a_window_limits_the_rate() -> None:
    """Two restarts in 60 s; a third within them ends the job, a later one does not."""
    limited = book(9, window=RestartWindow(2, 60.0))
    for now in (0.0, 10.0):
        assert limited.judge(failure(), Action.BY_POLICY, 1.0, now).restart
        limited.count(now)
    verdict = limited.judge(failure(), Action.RESTART, 1.0, 59.0)
    assert verdict == Verdict(False, "2 restarts within 60 s (restart.window)")
    assert limited.judge(failure(), Action.BY_POLICY, 1.0, 60.0).restart


def delays(used: RestartBook, lifetimes: list[float]) -> list[float]:
    found = []
    for ran in lifetimes:
        found.append(used.judge(failure(), Action.BY_POLICY, ran, 0.0).delay)
        used.count(0.0)
    return found


def test_the_delay_grows_with_each_restart() -> None:
    """Exponential up to the cap."""
    growing = book(9, backoff=Backoff(initial=1, factor=2, cap=5, jitter=False))
    assert delays(growing, [1, 1, 1, 1, 1]) == [1, 2, 4, 5, 5]


def test_a_healthy_attempt_resets_the_delay() -> None:
    """An attempt that ran long enough makes the next delay the first one."""
    resetting = book(
        9, backoff=Backoff(initial=1, factor=2, cap=60, jitter=False), healthy_after=10.0
    )
    assert delays(resetting, [1, 9.9, 10.0, 1, 1]) == [1, 2, 1, 2, 4]


def test_jitter_asks_for_chance() -> None:
    """The injected randomness is used as it is."""
    assert delays(book(9, 0.25, backoff=Backoff(initial=4, factor=2)), [1, 1]) == [1, 2]


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(list(Action)), st.floats(0, 100)), max_size=20),
)
def test_no_history_breaks_the_budget(max_restarts: int, moves: list[tuple[Action, float]]) -> None:
    """Whatever the answers and times, granted restarts stay within the budget."""
    used = RestartBook(max_restarts, RestartPolicy(), lambda: 0.5)
    now = 0.0
    for action, seconds in moves:
        now += seconds
        if used.judge(failure(), action, seconds, now).restart:
            used.count(now)
    assert used.restarts <= max_restarts
