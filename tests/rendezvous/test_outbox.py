"""Orders that are not obeyed: resent, published, and limited in time in every phase."""

from __future__ import annotations

import pytest

from elastic_aio.node_events import NodeLost, RoundFormed, RoundWaiting
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import EndJob, RoundStopped, StartRound, StopRound
from elastic_aio.rendezvous.messages import MemberPhase, ProbePeers
from elastic_aio.rendezvous.state import MARGIN_S, CoordinatorPhase, RoundSettings
from elastic_aio.spec.restart import DECIDE_TIMEOUT, RestartAction, RestartPolicy
from tests.support.coordinator_harness import CoordinatorHarness, failure


def run_to(harness: CoordinatorHarness, end: float) -> None:
    """Let the time pass up to `end`, with a decision at each of the coordinator's deadlines."""
    while (deadline := harness.coordinator.deadline) is not None and deadline <= end:
        assert deadline > harness.now
        harness.settle(deadline)
    harness.settle(end)


def lost(harness: CoordinatorHarness) -> list[tuple[str, str]]:
    """Return name and reason of each lost node."""
    return [(one.name, one.why) for one in harness.published if isinstance(one, NodeLost)]


def waiting(harness: CoordinatorHarness) -> list[RoundWaiting]:
    """Return what the coordinator has published about its waiting."""
    return [one for one in harness.published if isinstance(one, RoundWaiting)]


def test_an_order_that_was_lost_is_sent_again() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.drop_orders("b")
    harness.join("a", "b")
    first = harness.dropped["b"]
    assert harness.ranks == {"a": 0}
    run_to(harness, 3.9)
    assert harness.dropped["b"] is first
    harness.restore_orders()
    run_to(harness, 4)
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.coordinator.round.number == 0
    assert not lost(harness)


def test_a_member_that_acknowledges_nothing_is_lost() -> None:
    """After 28 s, with an event that says so before; the others form another round."""
    harness = CoordinatorHarness(RoundSettings(1, 2))
    harness.drop_orders("b")
    harness.join("a", "b")
    run_to(harness, 27.9)
    events = waiting(harness)
    assert {(one.phase, one.what) for one in events} == {
        ("running", "b: not acknowledged StartRound")
    }
    assert [(one.waited, one.time_left) for one in events] == [(4, 24), (19, 9)]
    assert [type(body) for name, body in harness.sent if name == "b"] == [StartRound] * 3
    assert harness.ranks == {"a": 0}
    assert harness.coordinator.round.number == 0
    run_to(harness, 28)
    assert lost(harness) == [("b", "it has not acknowledged StartRound within 28 s")]
    assert harness.coordinator.round.number == 1
    assert [one.world_size for one in harness.events(RoundFormed)] == [2, 1]


def test_a_lost_member_that_reports_something_is_a_newcomer() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2))
    harness.drop_orders("b")
    harness.join("a", "b")
    run_to(harness, 30)
    harness.restore_orders()
    assert harness.ranks == {"a": 0}
    harness.members["b"].set_port(5)
    run_to(harness, 31)
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_lost_member_does_not_follow_its_last_order_later() -> None:
    """It reads the present order when it runs again: not to start a round of the past."""
    harness = CoordinatorHarness(RoundSettings(1, 2))
    harness.drop_orders("b")
    harness.join("a", "b")
    run_to(harness, 30)
    harness.restore_orders()
    last = harness.dropped["b"]
    assert isinstance(last.body, StopRound)
    harness.perform("b", harness.members["b"].on_order(last))
    assert harness.done["b"] == []
    run_to(harness, 31)
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_slow_stop_has_the_time_of_its_stop_plan() -> None:
    """It is acknowledged at once, so the order is not sent again."""
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.join("a")
    harness.join("b", stop_time=50.0)
    harness.stop_slowly("b")
    harness.fail("a")
    serial = harness.members["b"].status.serial
    run_to(harness, 50 + MARGIN_S - 1)
    assert harness.is_in(CoordinatorPhase.STOPPING)
    assert harness.members["b"].status.serial == serial
    assert [body for name, body in harness.sent if name == "b"][1:] == [
        StopRound(0, "a worker on a has failed")
    ]
    last = waiting(harness)[-1]
    assert (last.phase, last.what) == ("stopping", "b: not stopped its workers")
    assert last.waited + (last.time_left or 0) == pytest.approx(84)
    assert len(waiting(harness)) == 6
    harness.members["b"].report(RoundStopped(0))
    harness.settle()
    assert harness.ranks == {"a": 0, "b": 1}
    assert not lost(harness)


def test_a_stop_that_never_ends_ends_the_membership() -> None:
    """The agent hangs, but its lease is extended: the job waits no longer for it."""
    harness = CoordinatorHarness(RoundSettings(2, 3, last_call_timeout=0), "a", "b", "d")
    harness.stop_slowly("b")
    harness.fail("a")
    run_to(harness, 300)
    assert lost(harness) == [("b", "it has not stopped its workers within 36 s")]
    assert harness.ranks == {"a": 0, "b": 1, "d": 2} or harness.coordinator.round.number == 1
    formed = harness.events(RoundFormed)[-1]
    assert (formed.round, formed.group_world_size) == (1, 2)
    assert harness.members["b"].status.phase is MemberPhase.RUNNING
    harness.members["b"].report(RoundStopped(0))
    run_to(harness, 301)
    assert harness.ranks == {"a": 0, "b": 2, "d": 1}


def test_another_reason_does_not_prolong_a_stop() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b")
    harness.stop_slowly("b")
    harness.fail("a")
    for second in range(1, 40):
        record = harness.coordinator.members.get("b")
        if record is not None:
            harness.coordinator.outbox.send(record, StopRound(0, f"reason {second}"))
        run_to(harness, second)
    assert [name for name, _ in lost(harness)] == ["b"]


def test_a_suspension_counts_once() -> None:
    """The coordinator or the store stood still: the replies are on their way."""
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.drop_orders("b")
    harness.join("a", "b")
    harness.restore_orders()
    harness.settle(1000)
    assert harness.ranks == {"a": 0, "b": 1}
    assert not lost(harness)


def test_a_probe_that_never_ends_holds_no_place() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a")
    harness.answer_no_probes("b")
    harness.join("b")
    run_to(harness, 60)
    assert [name for name, _ in lost(harness)] == ["b"]
    assert [type(body) for name, body in harness.sent if name == "b"] == [ProbePeers], (
        "acknowledged"
    )
    harness.join("d")
    run_to(harness, 61)
    assert harness.ranks == {"a": 0, "d": 1}


def test_the_end_is_sent_until_it_is_read() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.drop_orders("b")
    harness.coordinator.fail_job("it has failed")
    harness.settle()
    assert harness.end_orders().keys() == {"a"}
    harness.restore_orders()
    run_to(harness, 4)
    assert harness.end_orders().keys() == {"a", "b"}
    before = len(harness.sent)
    run_to(harness, 100)
    assert len(harness.sent) == before
    assert not waiting(harness)


def test_a_callback_that_does_not_return_ends_the_job() -> None:
    """After ten minutes, with events before."""
    policy = RestartPolicy(decide=lambda _: RestartAction.RESTART)
    harness = CoordinatorHarness(RoundSettings(1, 1, has_decide=True), "a", restart=policy)
    harness.fail("a", failure(3))
    run_to(harness, 5)
    (first,) = waiting(harness)
    assert (first.phase, first.what) == ("deciding", "restart.decide has not returned")
    assert (first.waited, first.time_left) == (5, 595)
    run_to(harness, DECIDE_TIMEOUT - 0.1)
    assert harness.is_in(CoordinatorPhase.DECIDING)
    assert 35 <= len(waiting(harness)) <= 45
    run_to(harness, DECIDE_TIMEOUT)
    outcome = harness.outcome
    assert (outcome.state, outcome.exit_code) == (JobState.FAILED, 3)
    assert outcome.why == "restart.decide has not returned within 600 s"


def test_a_job_without_faults_has_no_order_twice() -> None:
    """However long it runs: acknowledgements are part of other statuses."""
    harness = CoordinatorHarness(RoundSettings(2, 3, last_call_timeout=0), "a", "b")
    run_to(harness, 100)
    harness.fail("b")
    run_to(harness, 200)
    harness.join("d")
    run_to(harness, 300)
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    run_to(harness, 400)
    harness.succeed("b", "d")
    run_to(harness, 500)
    assert len(harness.sent) == len({(name, repr(body)) for name, body in harness.sent})
    kinds = [type(body) for name, body in harness.sent if name == "b"]
    assert kinds.count(StartRound) == 3
    assert kinds.count(EndJob) == 1
    assert not waiting(harness)
