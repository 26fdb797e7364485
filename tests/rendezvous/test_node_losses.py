"""Nodes that are lost or leave: their budget, whose failure counts, and joiners that flap."""

from __future__ import annotations

from signal import SIGTERM

import pytest

from elastic_aio.node_events import MembershipChanged, NodeRefused, RoundFormed
from elastic_aio.outcome import ExitStatus, JobState
from elastic_aio.rendezvous.base import NodeDraining, RoundFailing, RoundStopped, StopRound
from elastic_aio.rendezvous.state import CoordinatorPhase, RoundSettings
from elastic_aio.spec.restart import Backoff, NodeLosses, RestartPolicy
from tests.support.coordinator_harness import CoordinatorHarness, failure

ROUND_S = 0.33


def lose_in_turn(harness: CoordinatorHarness, pause: float, until: float) -> int:
    """Lose and replace one node after the other; return how many rounds were formed."""
    for turn in range(100_000):
        harness.settle(harness.now + pause)
        name = f"b{turn}"
        if harness.coordinator.outcome is not None or harness.now > until:
            break
        harness.join(name)
        while name not in harness.ranks and harness.coordinator.outcome is None:
            harness.settle(harness.deadline)
        harness.settle(harness.now + pause)
        harness.lose(name)
    return len(harness.events(RoundFormed))


# ------------------------------------------------------------------- the budget


def start_again(harness: CoordinatorHarness, pause: float = 0.0) -> None:
    """Lose all nodes at once, the coordinator's too, and start one node in their place."""
    name = f"a{harness.coordinator.outbox.term}"
    harness.lose_all(name)
    harness.settle(harness.now + pause)
    harness.join(name)
    while not harness.ranks and harness.coordinator.outcome is None:
        harness.settle(harness.deadline)


def test_the_loss_of_all_nodes_is_a_loss() -> None:
    """The store knows the round; the next one waits for nodes that return, and for the fence."""
    settings = RoundSettings(1, 2, last_call_timeout=0, fence=0.25)
    harness = CoordinatorHarness(settings, "a", max_restarts=0)
    began_at = harness.now = 10.0
    start_again(harness)
    assert harness.coordinator.deadline is None
    assert harness.now == began_at + settings.recovery_timeout
    placement = harness.place("a1")
    assert (placement.round, placement.attempt, placement.changes) == (1, 1, 1)
    (change,) = harness.events(MembershipChanged)
    assert change.why == "all nodes of round 0 were lost"
    while harness.coordinator.outcome is None:
        start_again(harness, pause=1.0)
    assert harness.outcome.why == (
        "all nodes of round 10 were lost:"
        " 11 node losses, at most 10 within 60 s are allowed (restart.node_losses)"
    )


def test_lost_rounds_of_long_ago_are_no_loop() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", max_restarts=0)
    for _ in range(20):
        harness.settle(harness.now + 10)
        start_again(harness)
    assert harness.coordinator.outcome is None
    assert harness.coordinator.round.number == 20


def test_the_loss_of_nodes_without_workers_is_none() -> None:
    """Their workers had stopped; the numbers continue nevertheless."""
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", max_restarts=5)
    for turn in range(1, 20):
        (name,) = harness.members
        harness.lose(name, is_lost=False)
        start_again(harness)
        assert harness.coordinator.round.number == turn
    assert harness.coordinator.outcome is None
    assert not harness.events(MembershipChanged)


def test_a_restart_that_was_granted_to_lost_nodes_is_counted() -> None:
    """It had not begun; otherwise nodes that are lost in each delay would restart for ever."""
    policy = RestartPolicy(backoff=Backoff(initial=5, jitter=False), window=(1, 60.0))
    harness = CoordinatorHarness(
        RoundSettings(1, 2, last_call_timeout=0), "a", max_restarts=2, restart=policy
    )
    harness.fail("a")
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    start_again(harness)
    assert harness.numbers("a1")[::2] == (1, 1)
    harness.fail("a1")
    assert harness.outcome.why == "1 restart within 60 s (restart window)"


def test_restarts_of_lost_nodes_are_counted() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", max_restarts=1)
    harness.fail("a")
    start_again(harness)
    assert harness.numbers("a1")[::2] == (2, 1)
    harness.fail("a1")
    assert harness.outcome.why == "the only restart is used up (max restarts)"


def test_a_loop_of_lost_nodes_ends_by_default() -> None:
    """Three rounds a second end within 20 s, although no restart is allowed or charged."""
    harness = CoordinatorHarness(RoundSettings(2, 2, last_call_timeout=0), "a", max_restarts=0)
    rounds = lose_in_turn(harness, ROUND_S / 2, until=60)
    outcome = harness.outcome
    assert harness.now < 20
    assert (outcome.state, outcome.restarts, rounds) == (JobState.FAILED, 0, 11)
    assert outcome.why == (
        "b10 is lost: 11 node losses, at most 10 within 60 s are allowed (restart.node_losses)"
    )
    assert outcome.exit_code == 1


@pytest.mark.slow
def test_a_node_may_be_lost_every_few_minutes_for_days() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, last_call_timeout=0), "a", max_restarts=0)
    rounds = lose_in_turn(harness, 120, until=3 * 86_400)
    assert harness.coordinator.outcome is None
    assert rounds > 1000


def test_nodes_that_are_lost_together_count_once() -> None:
    policy = RestartPolicy(node_losses=NodeLosses(count=1))
    harness = CoordinatorHarness(RoundSettings(1, 4), *"abde", restart=policy)
    harness.stop_slowly("a")
    for name in "bde":
        harness.members.pop(name)
        harness.coordinator.on_gone(name, harness.now, is_lost=True)
    harness.settle()
    harness.members["a"].report(RoundStopped(0))
    harness.settle()
    assert harness.coordinator.outcome is None
    assert harness.ranks == {"a": 0}


def test_no_limit_and_no_losses() -> None:
    for limit in (None, NodeLosses(count=0)):
        policy = RestartPolicy(node_losses=limit)
        harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", restart=policy)
        for turn in range(30 if limit is None else 1):
            harness.lose(*sorted(harness.members.keys() - {"a"}))
            harness.join(f"c{turn}")
            harness.settle(harness.now + 1)
        assert (harness.coordinator.outcome is None) is (limit is None)


def test_a_delay_precedes_the_round_after_several_losses() -> None:
    """The remaining nodes stop at once; the reason says which limit applies."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b")
    for turn in range(2):
        harness.lose(*(harness.members.keys() - {"a"}))
        assert harness.ranks == {"a": 0}, "at once"
        harness.join(f"c{turn}")
        harness.settle(harness.now + 5)
        assert len(harness.ranks) == 2
    harness.lose("c1")
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    assert harness.last("a") == StopRound(
        4, "c1 is lost; node loss 3 of 10 within 60 s (restart.node_losses)"
    )
    assert harness.deadline == harness.now + 0.25
    harness.settle(harness.now + 0.25)
    assert harness.ranks == {"a": 0}


# ------------------------------------------------- whose failure ends the attempt


def test_a_failure_before_the_loss_is_judged() -> None:
    """The lost node had acknowledged the order to stop, so it lived after the failure."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.stop_slowly("b")
    harness.fail("a", failure(7))
    harness.lose("b")
    assert harness.outcome.exit_code == 7


def test_a_failure_that_the_lost_node_may_have_caused_costs_nothing() -> None:
    """It never acknowledged an order after the failure."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.drop_orders("b")
    harness.fail("a", failure(7))
    harness.lose("b")
    assert harness.ranks == {"a": 0}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_code_of_never_on_is_never_excused(is_lost: bool) -> None:
    policy = RestartPolicy(never_on=[3])
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", restart=policy)
    harness.drop_orders("b")
    harness.fail("a", failure(3))
    harness.lose("b", is_lost=is_lost)
    outcome = harness.outcome
    assert (outcome.why, outcome.exit_code) == ("exit code 3 is in the never-on list", 3)


def test_failures_are_no_reason_when_a_node_leaves() -> None:
    """Its workers ended with it; those of the others failed of that, and were seen first."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.stop_slowly("b")
    harness.fail("a", failure(1))
    harness.lose("b", is_lost=False)
    assert harness.coordinator.outcome is None
    assert harness.ranks == {"a": 0}


def test_all_nodes_stop_at_once_where_one_is_drained() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 3), "a", "b", "c", max_restarts=0)
    harness.stop_slowly("a", "b", "c")
    harness.members["b"].report(NodeDraining("SIGTERM was received"))
    harness.settle()
    why = "b is leaving (SIGTERM was received)"
    for name in "ac":
        assert harness.last(name) == StopRound(0, why)
    harness.fail("a", failure(1))  # of the workers that have gone
    for name in "bc":
        harness.members[name].report(RoundStopped(0))
    harness.settle()
    assert harness.coordinator.outcome is None
    assert harness.ranks == {"a": 0, "c": 1}
    harness.lose("b", is_lost=False)
    assert harness.ranks == {"a": 0, "c": 1}


def test_no_round_follows_a_status_that_was_held_back_at_once() -> None:
    """A store that was suspended has not read the ends of the members' connections yet."""
    harness = CoordinatorHarness(RoundSettings(1, 3), "a", "b", "c")
    harness.settle(40)
    assert harness.ranks == {"a": 0, "b": 1, "c": 2}
    harness.now, harness.latencies["b"] = 50.0, 3.0
    harness.members["b"].report(RoundStopped(0))  # of a node that hears nothing from the store
    harness.settle()
    harness.settle(53.3)
    assert harness.coordinator.round.number == 0
    harness.lose("b")
    harness.settle(54)
    assert harness.ranks == {"a": 0, "c": 1}


@pytest.mark.parametrize("code", [143, 1])
def test_a_failure_by_the_signal_that_drains_a_node_costs_no_restart(code: int) -> None:
    """The worker of b fails before b drains; that of a follows.  Any other failure of b counts."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.members["b"].report(RoundFailing(0, "failed"))
    harness.settle()
    harness.members["b"].report(NodeDraining("SIGTERM was received"))
    harness.fail("a", failure(1))
    harness.members["b"].report(RoundStopped(0, (failure(0, status=ExitStatus(code=code)),)))
    harness.settle()
    harness.lose("b", is_lost=False)
    harness.settle(1)
    if code == 143:
        assert harness.ranks == {"a": 0}
    else:
        assert harness.outcome.state is JobState.FAILED


@pytest.mark.parametrize("seconds", [0.1, 0.3])
@pytest.mark.parametrize("drains", [True, False])
def test_a_failure_is_a_consequence_of_a_node_that_leaves_at_that_moment(
    seconds: float, drains: bool
) -> None:
    """The workers of b end before the news that it leaves: the failure of a is reported first."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.stop_slowly("b")
    harness.members["a"].report(RoundFailing(0, "failed"))
    harness.settle()
    if not drains:
        harness.members["b"].report(RoundStopped(0))
    harness.settle(seconds)
    if drains:
        harness.members["b"].report(NodeDraining("SIGTERM was received"))
        harness.settle()
        harness.settle(seconds + 5)
        harness.members["b"].report(RoundStopped(0))
    harness.lose("b", is_lost=False)
    harness.members["a"].report(RoundStopped(0, (failure(0),)))
    harness.settle(seconds + 6)
    if seconds > 0.2:
        assert harness.outcome.state is JobState.FAILED
    else:
        assert harness.ranks == {"a": 0}


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_failure_of_a_node_that_has_left_since_counts(max_restarts: int) -> None:
    """It was stopped after its failure, while a saved."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=max_restarts)
    harness.stop_slowly("a")
    harness.fail("b", failure(1))
    harness.settle(1)
    harness.members["b"].report(NodeDraining("SIGTERM was received"))
    harness.settle()
    harness.lose("b", is_lost=False)
    harness.members["a"].report(RoundStopped(0))
    harness.settle()
    if max_restarts:
        assert harness.ranks == {"a": 0}
        assert harness.numbers("a") == (1, 1, 1, 0)
    else:
        assert harness.outcome.state is JobState.FAILED
        assert harness.outcome.failures == (failure(1),)


def test_a_failure_is_not_excused_by_a_drain_that_is_seen_with_it() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.members["b"].report(RoundFailing(0, "failed"))
    harness.members["b"].report(NodeDraining("SIGTERM was received"))
    harness.settle()
    harness.members["a"].report(RoundStopped(0))
    harness.members["b"].report(RoundStopped(0, (failure(0),)))
    harness.settle()
    harness.lose("b", is_lost=False)
    harness.settle(1)
    assert harness.outcome.state is JobState.FAILED


def test_a_failure_is_judged_at_once_when_all_nodes_have_stopped() -> None:
    """The code of SIGTERM announces nothing."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", max_restarts=0)
    harness.members["a"].report(RoundFailing(0, "failed"))
    harness.fail("b", failure(0, status=ExitStatus(signal=SIGTERM)))
    harness.members["a"].report(RoundStopped(0, (failure(1),)))
    harness.settle()
    assert harness.outcome.state is JobState.FAILED


# ------------------------------------------------------------ joiners that flap


def test_a_joiner_that_flaps_waits_longer_each_time() -> None:
    """32 visits of half a second once cost the two others 64 starts of their workers."""
    settings = RoundSettings(2, 3, last_call_timeout=0)
    harness = CoordinatorHarness(settings, "a", "b")
    for _ in range(32):
        harness.join("d")
        harness.settle(harness.now + 0.5)
        harness.lose("d", is_lost=False)
    assert harness.coordinator.outcome is None
    assert len(harness.events(RoundFormed)) <= 11
    assert any("has left 2 times soon after" in one.why for one in harness.events(NodeRefused))
    # In the end it is taken in.
    harness.join("d")
    while "d" not in harness.ranks:
        harness.settle(harness.deadline)
    assert harness.now < 32 * 0.5 + 61


def test_a_joiner_that_flaps_is_taken_at_once_where_it_is_needed() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, last_call_timeout=0), "a", "b")
    for turn in range(5):
        harness.lose(*(harness.members.keys() - {"a"}), is_lost=False)
        harness.join("b")
        assert harness.ranks == {"a": 0, "b": 1}, turn
        harness.settle(harness.now + 0.1)


def test_a_joiner_that_stays_for_a_minute_is_no_flapping_one() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a")
    for _ in range(5):
        harness.join("b")
        assert harness.ranks == {"a": 0, "b": 1}
        harness.settle(harness.now + 60)
        harness.lose("b", is_lost=False)
        harness.settle(harness.now + 60)
