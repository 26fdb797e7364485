"""Excluded nodes: they are in no further round for a time, and a standby takes their place."""

from __future__ import annotations

import pytest

from elastic_aio.events import Restarting
from elastic_aio.node_events import (
    MembershipChanged,
    NodeExcluded,
    NodeStandby,
    RoundFormed,
    RoundForming,
)
from elastic_aio.rendezvous.base import (
    UNCHECKED,
    ExclusionRequested,
    RestartPending,
    RoundStopped,
    StartRound,
)
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.messages import StandBy
from elastic_aio.rendezvous.state import CoordinatorPhase, RoundSettings
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartAction
from tests.support.coordinator_harness import CoordinatorHarness, failure, status
from tests.support.restarts import at_once
from tests.support.simulated_nodes import together
from tests.testing.checked import CheckedSimulation

ASKED = at_once(decide=lambda failure: RestartAction.EXCLUDE)


def job(*names: str, minimum: int = 2, maximum: int = 2, **settings: object) -> CoordinatorHarness:
    given = RoundSettings(minimum, maximum, last_call_timeout=0, **settings)  # type: ignore[arg-type]
    return CoordinatorHarness(given, *(names or ("a", "b", "s")), max_restarts=9, restart=ASKED)


def own_events(harness: CoordinatorHarness, name: str) -> list[NodeExcluded]:
    return [one for one in harness.done[name] if isinstance(one, NodeExcluded)]


def test_a_standby_takes_the_place_in_the_same_round_change() -> None:
    """One restart, one round, and the other rank stays."""
    harness = job()
    assert harness.ranks == {"a": 0, "b": 1}
    harness.exclude("a")
    harness.fail("a")
    assert harness.ranks == {"s": 0, "b": 1}
    assert harness.numbers("s") == harness.numbers("b") == (1, 1, 1, 0)
    assert len(harness.events(Restarting)) == 1
    assert not harness.events(MembershipChanged)
    (event,) = harness.events(NodeExcluded)
    assert (event.name, event.member, event.why) == ("a", "a", "rank 1: bad")
    (own,) = own_events(harness, "a")
    assert (own.is_own, own.seconds, own.why) == (True, 60.0, "rank 1: bad")


def test_the_round_goes_on_until_it_ends_for_another_reason() -> None:
    """The exclusion counts from the next round, whatever ends this one."""
    harness = job("a", "b", "s", "t")
    harness.exclude("b")
    assert harness.numbers("b")[0] == 0
    assert harness.ranks == {"a": 0, "b": 1}
    assert not own_events(harness, "b")
    harness.lose("a")
    harness.settle(100.0)
    assert harness.ranks == {"s": 0, "t": 1}
    (own,) = own_events(harness, "b")
    assert own.is_own


def test_decide_excludes_the_node_of_the_root_cause() -> None:
    harness = job(has_decide=True)
    harness.fail("b", failure(7, rank=1, host="b"))
    harness.answer(RestartAction.EXCLUDE)
    assert harness.ranks == {"a": 0, "s": 1}
    assert harness.numbers("s") == (1, 1, 1, 0)
    (own,) = own_events(harness, "b")
    assert own.why == "restart.decide has excluded it: rank 1 (pid 1): exit code 7"
    (restarting,) = harness.events(Restarting)
    assert restarting.why == "restart 1 of 9 (max restarts), restart.decide returned EXCLUDE"


def test_a_node_that_has_not_seen_its_exclusion_is_in_no_round() -> None:
    """Its order stands until it is acknowledged."""
    harness = job(has_decide=True)
    harness.fail("a")
    harness.drop_orders("a")
    harness.answer(RestartAction.EXCLUDE)
    assert harness.ranks == {"s": 0, "b": 1}
    harness.fail("b", failure(rank=1))
    harness.answer(RestartAction.RESTART)
    assert harness.ranks == {"s": 0, "b": 1}
    dropped = harness.dropped["a"]
    assert isinstance(dropped.body, RestartPending)
    harness.restore_orders()
    harness.perform("a", harness.members["a"].on_order(dropped))
    harness.settle()
    assert harness.members["a"].status.exclusion
    assert harness.ranks == {"s": 0, "b": 1}


def test_an_exclusion_is_inherited_with_the_restart() -> None:
    """The coordinator is lost during the delay, before the node has seen its order."""
    policy = at_once(
        backoff=Backoff(initial=5, jitter=False), decide=lambda failure: RestartAction.EXCLUDE
    )
    settings = RoundSettings(2, 2, has_decide=True, last_call_timeout=0)
    harness = CoordinatorHarness(settings, "a", "b", "s", max_restarts=9, restart=policy)
    harness.fail("a")
    harness.drop_orders("a")
    harness.answer(RestartAction.EXCLUDE)
    assert not harness.members["a"].status.exclusion
    harness.restore_orders()
    harness.elect("b")
    harness.settle(1.0)
    assert len(harness.decision_requests) == 1
    assert own_events(harness, "a")
    harness.settle(20.0)
    assert harness.ranks == {"s": 0, "b": 1}


@pytest.mark.parametrize("name", ["b", "s"])
def test_another_coordinator_knows_of_it(name: str) -> None:
    harness = job()
    harness.exclude("a")
    harness.elect(name)
    harness.settle(1.0)
    assert harness.ranks == {"a": 0, "b": 1}
    harness.fail("b", failure(rank=1))
    assert harness.ranks == {"s": 0, "b": 1}
    harness.elect(name)
    harness.settle(2.0)
    harness.fail("b", failure(rank=1))
    harness.settle(3.0)
    assert harness.ranks == {"s": 0, "b": 1}


def test_too_few_nodes_wait_for_the_end_of_the_exclusion() -> None:
    """As they wait for lost nodes; the reason is in their events."""
    harness = job("a", "b")
    harness.exclude("a")
    harness.fail("a")
    assert harness.is_in(CoordinatorPhase.FORMING)
    assert harness.ranks == {}
    harness.settle(20.0)
    assert harness.events(RoundForming)[-1].refused == ("a: excluded (rank 1: bad)",)
    harness.members["a"].readmit()
    harness.settle(30.0)
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.numbers("a") == (1, 1, 1, 0)


def test_a_job_of_which_all_nodes_are_excluded_ends_as_one_that_has_lost_them() -> None:
    harness = job("a", "b", replace_timeout=60.0)
    harness.exclude("a")
    harness.exclude("b", "rank 2: bad too")
    harness.fail("a")
    harness.settle(61.0)
    assert harness.outcome.why.startswith(
        "only 0 of 2 nodes are left; refused: a: excluded (rank 1: bad); b: excluded (rank 2: bad"
    )
    assert harness.end_orders().keys() == {"a", "b"}


def test_a_node_whose_exclusion_is_over_is_a_joiner() -> None:
    """It stands by while the job is full, and takes the next vacant rank."""
    harness = job()
    harness.exclude("a")
    harness.fail("a")
    harness.members["a"].readmit()
    harness.settle(1.0)
    assert isinstance(harness.sent[-1][1], StandBy)
    assert isinstance(harness.last("a"), NodeStandby)
    harness.lose("s")
    harness.settle(100.0)
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_node_below_the_maximum_joins_again() -> None:
    harness = job("a", "b", "c", minimum=1, maximum=3, scale_up_delay=0.0)
    harness.exclude("b")
    harness.fail("b", failure(rank=1))
    assert harness.ranks == {"a": 0, "c": 1}
    harness.settle(10.0)
    assert harness.ranks == {"a": 0, "c": 1}
    harness.members["b"].readmit()
    harness.settle(20.0)
    harness.settle(30.0)
    assert harness.ranks.keys() == {"a", "b", "c"}


@pytest.mark.parametrize("overlap", [False, True])
def test_joiners_form_no_round_with_an_excluded_node(overlap: bool) -> None:
    """Nor where its workers still run when the next round begins."""
    harness = job("a", "b", minimum=1, maximum=3, scale_up_delay=0.0, overlap=overlap)
    harness.exclude("a")
    harness.join("c")
    harness.settle(10.0)
    assert harness.ranks.keys() == {"b", "c"}


def test_with_overlap_the_next_round_begins_without_an_excluded_node() -> None:
    """Before its workers have stopped."""
    harness = job("a", "b", "s", "t", overlap=True)
    harness.exclude("a")
    harness.lose("b")
    assert {name: rank for name, rank in harness.ranks.items() if name != "a"} == {"s": 0, "t": 1}
    assert harness.numbers("a")[0] == 0
    harness.settle(1.0)
    assert not harness.members["a"].status.is_busy
    assert own_events(harness, "a")


def test_the_first_reason_counts_until_the_time_is_over() -> None:
    """A later one, such as a failed health check, makes it no shorter."""
    harness = job()
    harness.exclude("a", "for ever", None)
    harness.exclude("a", "its health check has failed", 5.0)
    harness.fail("a")
    (own,) = own_events(harness, "a")
    assert (own.why, own.seconds) == ("for ever", None)
    harness.members["a"].readmit()
    assert not harness.members["a"].status.exclusion


def test_an_excluded_node_takes_no_place_that_was_on_its_way() -> None:
    """A report of a worker arrives after the end of the workers, and crosses the order."""
    harness = job()
    harness.drop_orders("a")
    harness.fail("a")
    start = harness.dropped["a"]
    assert isinstance(start.body, StartRound)
    harness.restore_orders()
    member = harness.members["a"]
    harness.perform("a", member.report(ExclusionRequested(0, "bad", 60.0)))
    assert member.on_order(start) == []
    harness.settle()
    assert harness.ranks == {"s": 0, "b": 1}
    assert harness.numbers("s") == (2, 2, 1, 1)


def test_the_longest_time_counts() -> None:
    """Of two reasons before the workers have ended, and of one after that."""
    harness = job(has_decide=True)
    harness.exclude("a", "its health check has failed", 5.0)
    harness.exclude("a", "rank 0: bad", 60.0)
    harness.exclude("a", "rank 0: worse", 60.0)
    harness.fail("a", failure(7))
    assert [(one.why, one.seconds) for one in own_events(harness, "a")] == [("rank 0: bad", 60.0)]
    harness.answer(RestartAction.EXCLUDE)
    first, second = own_events(harness, "a")
    assert second.seconds is None
    assert second.why.startswith("restart.decide has excluded it")
    assert [one.why for one in harness.events(NodeExcluded)] == [first.why, second.why]
    assert harness.ranks == {"s": 0, "b": 1}


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_decide_excludes_a_node_for_longer_than_its_health_check(seconds: float | None) -> None:
    """The node is healthy soon after the failure, and the decision stands."""
    policy = at_once(decide=lambda failure: RestartAction.EXCLUDE, exclude_for=seconds)
    rendezvous = RendezvousSpec(last_call_timeout=0, health_check="check", heartbeat_timeout=2)
    spec = LaunchSpec("x", nnodes=2, max_restarts=3, restart=policy, rendezvous=rendezvous)
    sim = CheckedSimulation(spec, endpoints=("store0",))
    a, b = together(sim, "ab")
    spare = sim.add_node("c")
    sim.run_until(lambda: spare.is_standing_by, 10.0)
    b.is_healthy = False
    sim.fail_worker(b)
    sim.run_until(lambda: sim.is_settled(2, [a, spare]), 10.0)
    b.is_healthy = True
    sim.kill(spare)
    sim.run(50.0)
    assert (a.running, b.running) == (None, None)
    assert not b.is_standing_by
    sim.run(20.0)
    assert sim.is_settled(2, [a, b]) is (seconds is not None)


def test_a_joiner_stands_by_while_the_next_round_would_lack_nodes() -> None:
    """The round goes on with its excluded nodes: they still work."""
    harness = job("a", "b", minimum=2, maximum=3, scale_up_delay=5.0)
    harness.exclude("a")
    harness.exclude("b")
    harness.join("c")
    harness.settle(100.0)
    assert harness.ranks == {"a": 0, "b": 1}
    assert isinstance(harness.last("c"), NodeStandby)
    assert not harness.members["a"].status.is_change_pending
    harness.join("d")
    harness.settle(200.0)
    assert harness.ranks == {"a": 0, "b": 1}
    harness.fail("a")
    assert harness.ranks.keys() == {"c", "d"}


def test_a_node_that_was_not_checked_yet_is_no_news() -> None:
    harness = job("a", "b")
    harness.add("c")
    harness.members["c"].extend_exclusion(UNCHECKED)
    harness.settle(1.0)
    assert not harness.events(NodeExcluded)
    harness.members["c"].extend_exclusion("its health check has failed", 5.0)
    harness.settle(2.0)
    (event,) = harness.events(NodeExcluded)
    assert event.why == "its health check has failed"


def test_with_overlap_joiners_that_leave_too_few_nodes_wait() -> None:
    """No round begins below the minimum."""
    harness = job("a", "b", minimum=2, maximum=3, scale_up_delay=0.0, overlap=True)
    harness.exclude("a")
    harness.exclude("b")
    harness.join("c")
    harness.settle(10.0)
    assert harness.ranks == {"a": 0, "b": 1}
    harness.join("d")
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_replacement_takes_the_fixed_rank_of_an_excluded_node() -> None:
    settings = RoundSettings(2, 2, fixed_ranks=True, last_call_timeout=0)
    harness = CoordinatorHarness(settings, max_restarts=9, restart=ASKED)
    harness.add("a", preferred_rank=0)
    harness.add("b", preferred_rank=1)
    harness.settle()
    harness.exclude("b")
    harness.fail("b", failure(rank=1))
    assert harness.ranks == {}
    harness.join("c", preferred_rank=1)
    assert harness.ranks == {"a": 0, "c": 1}


def test_a_node_that_has_succeeded_is_not_excluded() -> None:
    """Its workers are right, whatever they said before."""
    harness = job("a", "b")
    harness.exclude("a")
    harness.succeed("a")
    assert not harness.members["a"].status.exclusion
    harness.fail("b", failure(rank=1))
    assert harness.ranks == {"a": 0, "b": 1}


def test_an_excluded_node_ends_with_the_job() -> None:
    harness = job()
    harness.exclude("a")
    harness.fail("a")
    harness.succeed("b", "s")
    assert harness.end_of("a") == harness.outcome
    assert harness.outcome.exit_code == 0


def test_an_exclusion_for_an_earlier_round_is_dropped() -> None:
    harness = job("a", "b")
    harness.fail("b", failure(rank=1))
    assert harness.numbers("a")[0] == 1
    member = harness.members["a"]
    member.report(ExclusionRequested(0, "late"))
    assert not member.status.exclusion


def test_an_exclusion_without_a_time_lasts_as_long_as_the_spec_says() -> None:
    member = Member("a", status("a", RoundSettings(1, 1)), exclude_for=60.0)
    (event,) = member.report(ExclusionRequested(member.status.round, "bad"))
    assert isinstance(event, NodeExcluded)
    assert event.seconds == 60.0


def test_the_events_of_a_round_without_an_exclusion_are_as_before() -> None:
    harness = job("a", "b")
    harness.fail("a")
    assert not harness.events(NodeExcluded)
    assert len(harness.events(RoundFormed)) == 2


def test_an_exclusion_after_the_stop_begins_at_once() -> None:
    """A late message of a worker: no report of a stop follows any more."""
    harness = job("a", "b")
    harness.members["a"].report(RoundStopped(0, (failure(),)))
    harness.exclude("a")
    assert [one.why for one in own_events(harness, "a")] == ["rank 1: bad"]


def test_a_round_before_the_last_is_not_waited_for_at_another_store() -> None:
    """An excluded node has its old place, of which the others are not missing."""
    harness = job("a", "b", "s", heartbeat_timeout=30.0, fence=0.25)
    harness.exclude("a")
    harness.fail("a")
    assert harness.ranks == {"s": 0, "b": 1}
    harness.elect("s", store=b"other")
    harness.settle(1.0)
    harness.fail("b", failure(rank=1))
    assert harness.ranks == {"s": 0, "b": 1}
    assert harness.numbers("b")[0] == 2


def came_back(harness: CoordinatorHarness, name: str) -> None:
    """Lose a node, and let it come back with its workers after a while."""
    member = harness.members[name]
    harness.lose(name)
    harness.settle(harness.now + 1.0)
    harness.members[name], harness.done[name] = member, harness.done[name]
    harness.settle(harness.now + 1.0)


@pytest.mark.parametrize("minimum", [1, 2])
def test_an_excluded_node_that_was_cut_off_stops_its_workers(minimum: int) -> None:
    """It had been lost, and the others run another round, or wait for nodes."""
    harness = job("a", "b", minimum=minimum)
    harness.exclude("b")
    came_back(harness, "b")
    assert not harness.members["b"].status.is_busy
    assert own_events(harness, "b")
    assert harness.ranks == ({"a": 0} if minimum == 1 else {})
