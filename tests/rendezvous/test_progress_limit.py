"""A limit of failed attempts without progress, for all nodes of a job."""

from __future__ import annotations

import pytest

from elastic_aio.rendezvous.base import RoundProgressed
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.spec.restart import RestartAction, RestartPolicy
from tests.support.coordinator_harness import CoordinatorHarness, status
from tests.support.restarts import at_once

LIMIT = at_once(max_attempts_without_progress=3)
WHY = "the last 3 attempts have made no progress (max attempts without progress)"


def job(restart: RestartPolicy = LIMIT) -> CoordinatorHarness:
    return CoordinatorHarness(
        RoundSettings(1, 2, last_call_timeout=0), "a", "b", max_restarts=50, restart=restart
    )


def progress(harness: CoordinatorHarness, name: str) -> None:
    member = harness.members[name]
    member.report(RoundProgressed(member.status.round))
    harness.settle()


def fail(harness: CoordinatorHarness, name: str = "a") -> bool:
    """Let a worker fail; return whether another attempt follows."""
    harness.fail(name)
    return harness.coordinator.outcome is None


def test_the_job_ends_after_exactly_so_many_attempts() -> None:
    harness = job()
    assert [fail(harness, name) for name in "aba"] == [True, True, False]
    assert (harness.outcome.why, harness.outcome.restarts) == (WHY, 2)


@pytest.mark.parametrize("name", ["a", "b"])
def test_progress_on_any_node_counts(name: str) -> None:
    """Also on a node that has not failed."""
    harness = job()
    for _ in range(5):
        assert fail(harness)
        assert fail(harness)
        progress(harness, name)
        assert fail(harness)
    assert [fail(harness) for _ in range(3)] == [True, True, False]


def test_progress_of_an_earlier_round_does_not_count() -> None:
    harness = job()
    progress(harness, "a")
    assert [fail(harness) for _ in range(4)] == [True, True, True, False]


def test_the_count_survives_a_change_of_coordinator() -> None:
    harness = job()
    for name in "ab":
        assert fail(harness)
        harness.elect(name)
        harness.settle(harness.now + 1)
    assert not fail(harness)
    assert harness.outcome.why == WHY


def test_progress_is_known_to_another_coordinator() -> None:
    """It is in the status of the node."""
    harness = job()
    assert fail(harness)
    assert fail(harness)
    progress(harness, "b")
    harness.elect("b")
    harness.settle(harness.now + 1)
    assert fail(harness)


def test_a_change_of_the_membership_is_no_attempt_without_progress() -> None:
    """The workers have not failed."""
    harness = job()
    for _ in range(4):
        harness.lose("b")
        harness.join("b")
        harness.settle(harness.now + 100)
    assert harness.coordinator.outcome is None
    assert [fail(harness) for _ in range(3)] == [True, True, False]


def test_progress_of_a_node_that_was_lost_counts() -> None:
    harness = job()
    assert fail(harness)
    assert fail(harness)
    progress(harness, "b")
    harness.lose("b")
    harness.settle(harness.now + 100)
    assert [fail(harness) for _ in range(3)] == [True, True, False]


def test_decide_is_not_asked_without_a_restart_that_is_left() -> None:
    settings = RoundSettings(2, 2, has_decide=True)
    policy = at_once(max_attempts_without_progress=1, decide=lambda failure: RestartAction.RESTART)
    harness = CoordinatorHarness(settings, "a", "b", max_restarts=50, restart=policy)
    harness.fail("a")
    assert not harness.decision_requests
    why = "the last attempt has made no progress (max attempts without progress)"
    assert harness.outcome.why == why


def test_a_status_without_the_field_has_no_progress() -> None:
    """As nodes of an earlier version write it."""
    assert not status("a", RoundSettings(1, 1)).has_progress
