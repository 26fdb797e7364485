"""Limits of restarts and of node losses that survive a change of the coordinator."""

from __future__ import annotations

import pytest

from elastic_aio.events import Restarting
from elastic_aio.node_events import RoundFormed
from elastic_aio.rendezvous.messages import StandBy
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.spec.restart import Backoff, NodeLosses, RestartPolicy
from tests.support.coordinator_harness import CoordinatorHarness
from tests.support.restarts import at_once

WINDOW = at_once(window=(2, 3600.0))


def why_ended(harness: CoordinatorHarness) -> str:
    outcome = harness.coordinator.outcome
    return "" if outcome is None else outcome.why


def test_a_window_survives_a_change_of_coordinator() -> None:
    """After each restart, from one node to the other."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=50, restart=WINDOW)
    for turn in range(2):
        harness.fail("a")
        harness.settle(harness.now + 1)
        harness.elect("ab"[turn])
        harness.settle(harness.now + 1)
        assert not why_ended(harness)
    harness.fail("b")
    assert why_ended(harness) == "2 restarts within 3600 s (restart window)"


def test_ages_are_not_lost() -> None:
    """The first restart is out of the window for every coordinator."""
    policy = RestartPolicy(window=(2, 100.0))
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=50, restart=policy)
    harness.fail("a")
    harness.settle(50)
    harness.fail("a")
    for name in "abab":
        harness.elect(name)
        harness.settle(harness.now + 10)
    harness.settle(101)
    harness.fail("b")
    assert not why_ended(harness)
    harness.settle(149)
    harness.fail("b")
    assert why_ended(harness) == "2 restarts within 100 s (restart window)"


def test_a_node_that_came_later_knows_of_earlier_restarts() -> None:
    """It was on standby, and has had no placement."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=50, restart=WINDOW)
    harness.fail("a")
    harness.settle(10)
    harness.join("d")
    harness.fail("a")
    assert isinstance(next(body for name, body in harness.sent if name == "d"), StandBy)
    harness.elect("d")
    harness.settle(20)
    harness.fail("b")
    assert why_ended(harness) == "2 restarts within 3600 s (restart window)"


def test_the_delay_grows_under_another_coordinator() -> None:
    policy = RestartPolicy(backoff=Backoff(initial=1, jitter=False))
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=9, restart=policy)
    for turn in range(4):
        harness.fail("a")
        harness.settle(harness.now + 100)
        harness.elect("ab"[turn % 2])
        harness.settle(harness.now + 100)
    delays = [one.cause.delay for one in harness.pending_restarts()]
    assert delays == [1, 2, 4, 8] * 2


def test_a_healthy_round_returns_the_budget_under_another_coordinator() -> None:
    """The number of restarts goes on, and so does that of the returned ones."""
    policy = at_once(healthy_after=600.0)
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=1, restart=policy)
    for turn, ran in enumerate((1.0, 600.0, 700.0)):
        harness.fail("a", runtime=ran)
        harness.settle(harness.now + 1)
        assert not why_ended(harness)
        harness.elect("ab"[turn % 2])
        harness.settle(harness.now + 1)
    events = [one for one in harness.published if isinstance(one, Restarting)]
    assert [(one.restarts, one.returned) for one in events] == [(1, 0), (2, 1), (3, 2)]
    harness.fail("b", runtime=599.0)
    assert why_ended(harness) == "the only restart is used up (max restarts)"


def test_the_default_delays_are_those_of_the_coordinator() -> None:
    """The first restart is at once; a round of a minute ends the series."""
    policy = RestartPolicy()
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=9, restart=policy)
    for ran in (1.0, 1.0, 1.0, 60.0):
        harness.fail("a", runtime=ran)
        harness.settle(harness.now + 100)
    events = [one for one in harness.published if isinstance(one, Restarting)]
    assert [one.delay for one in events] == [0, 1, 2, 0]


def test_a_coordinator_that_is_lost_in_every_round_is_counted() -> None:
    """A crash loop takes its own node down, and with it the budget of that node."""
    policy = RestartPolicy(
        node_losses=NodeLosses(count=4, seconds=3600.0, backoff=Backoff(initial=0))
    )
    harness = CoordinatorHarness(
        RoundSettings(2, 3, last_call_timeout=0), "a", "b", "n0", restart=policy
    )
    for turn in range(10):
        harness.elect(f"n{turn}")
        harness.settle(harness.now + 1)
        if why_ended(harness):
            break
        del harness.members[f"n{turn}"]
        harness.elect("ab"[turn % 2])
        harness.settle(harness.now + 1)
        harness.settle(harness.now + 1)
        harness.join(f"n{turn + 1}")
        harness.settle(harness.now + 1)
    assert why_ended(harness).endswith(
        "5 node losses, at most 4 within 3600 s are allowed (restart.node_losses)"
    )
    assert len(harness.events(RoundFormed)) < 12


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, 1000])
def test_a_history_is_bounded(count: int) -> None:
    """So that every order stays small."""
    policy = at_once(window=(1000, 10_000.0))
    harness = CoordinatorHarness(RoundSettings(1, 1), "a", max_restarts=1001, restart=policy)
    for _ in range(count):
        harness.fail("a")
    history = harness.budgets["a"].history(0.0)
    assert history is not None
    assert history.restarts == count
    assert len(history.restart_ages) == min(count, 100)
