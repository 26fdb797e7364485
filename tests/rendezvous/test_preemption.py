"""A preemption of a job of several nodes: one notice for all, no further round, one end."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elastic_aio.events import JobFinished, PreemptionNotice
from elastic_aio.node_events import NodeRefused, NodeStandby, RoundFormed
from elastic_aio.outcome import PREEMPTED_CODE, PREEMPTION_CHANGE, JobState
from elastic_aio.rendezvous.base import (
    ChangeAgreed,
    ChangePending,
    ExclusionRequested,
    PreemptionNoticed,
    RestartRequested,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.messages import (
    LEASE_LINGER,
    MessageError,
    Order,
    decode_status,
    encode,
)
from elastic_aio.rendezvous.state import MARGIN_S, CoordinatorPhase, RoundSettings
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartPolicy
from elastic_aio.testing import SimNode, WorkerBehavior
from tests.support.coordinator_harness import CoordinatorHarness, failure
from tests.support.simulated_nodes import ended, together
from tests.testing.checked import CheckedSimulation

AT_ONCE_S = 1.0
"""Seconds of virtual time in which messages arrive, many times over."""


def running(*names: str, settings: RoundSettings | None = None, **more: Any) -> CoordinatorHarness:
    """Return a round of these nodes."""
    settings = settings or RoundSettings(1, 8, last_call_timeout=0, scale_up_delay=30.0)
    return CoordinatorHarness(settings, *names, **more)


def give_notice(harness: CoordinatorHarness, name: str, seconds: float = 60.0) -> None:
    """Give notice to one node, by its own clock, as its agent does."""
    until = harness.now + harness.clocks.get(name, (0.0, 0.0))[0] + seconds
    member = harness.members[name]
    why = f"USR1 (on {name})"
    change = ChangePending(member.status.round, why, seconds, PREEMPTION_CHANGE, until)
    member.report(PreemptionNoticed(change))
    harness.settle()


def notices(harness: CoordinatorHarness, name: str) -> list[ChangePending]:
    """Return the notices that a node was sent."""
    done = harness.done[name]
    return [one for one in done if isinstance(one, ChangePending) and one.until]


def end_workers(harness: CoordinatorHarness, *names: str, code: int = 0) -> None:
    """Let all workers of some nodes end, which have notice."""
    for name in names:
        member = harness.members[name]
        number = member.status.round
        ends = RoundStopped(number, (failure(code),)) if code else RoundSucceeded(number)
        member.report(ends)
    harness.settle()


# ------------------------------------------------------------------ the coordinator


def test_all_nodes_have_one_notice_with_the_deadline_by_their_own_clocks() -> None:
    harness = running("a", "b", "c")
    harness.clocks = {"a": (3600.0, 5.0), "b": (-7.5, 9.0), "c": (0.0, 1.0)}
    harness.members["a"].set_port(99)  # each status says how its clock goes
    harness.members["b"].set_port(99)
    harness.settle(10.0)
    give_notice(harness, "a", 60.0)
    assert not notices(harness, "a"), "its agent has the notice"
    (to_b,), (to_c,) = notices(harness, "b"), notices(harness, "c")
    assert (to_b.until, to_c.until) == pytest.approx((70.0 - 7.5, 70.0), abs=0.01)
    assert {one.why for one in (to_b, to_c)} == {"USR1 (on a)"}
    assert {one.number for one in (to_b, to_c)} == {PREEMPTION_CHANGE}
    (event,) = harness.events(PreemptionNotice)
    assert (event.why, event.time_left) == ("USR1 (on a)", 60.0)
    for second in range(11, 40):
        harness.settle(second)
    assert len(notices(harness, "b")) == len(notices(harness, "c")) == 1


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("second", ["a", "c"])
def test_an_earlier_deadline_replaces_a_later_one_on_all_nodes(first: str, second: str) -> None:
    """Whichever node is given it; clocks differ."""
    harness = running("a", "b", "c")
    harness.clocks = {"a": (3600.0, 5.0), "c": (-50.0, 9.0)}
    for member in harness.members.values():
        member.set_port(99)  # each status says how its clock goes
    harness.settle(10.0)
    give_notice(harness, first, 600.0)
    harness.settle(20.0)
    give_notice(harness, second, 30.0)
    for now in (21.0, 30.0, 40.0):
        harness.settle(now)
    for name in harness.members:
        own = [one.until - harness.clocks.get(name, (0.0,))[0] for one in notices(harness, name)]
        expected = ([] if name == first else [610.0]) + ([] if name == second else [50.0])
        assert own == pytest.approx(expected, abs=0.1)
    published = [(one.why, one.time_left) for one in harness.events(PreemptionNotice)]
    assert published == [(f"USR1 (on {first})", 600.0), (f"USR1 (on {second})", 30.0)]
    assert harness.deadline <= 50.0 + MARGIN_S
    harness.settle(50.0 + MARGIN_S)
    assert harness.outcome.why == f"USR1 (on {second})"


@pytest.mark.parametrize("seconds", [29.5, 30.0, 600.0])
def test_a_deadline_that_is_not_earlier_is_ignored(seconds: float) -> None:
    harness = running("a", "b", "c")
    give_notice(harness, "a", 30.0)
    give_notice(harness, "b", seconds)
    harness.settle(1.0)
    assert len(notices(harness, "b")) == len(notices(harness, "c")) == 1
    assert len(harness.events(PreemptionNotice)) == 1
    harness.settle(30.0 + MARGIN_S)
    assert harness.outcome.why == "USR1 (on a)"


def test_another_coordinator_takes_the_earliest_of_the_notices() -> None:
    """The former one had not passed it on."""
    harness = running("a", "b", "c")
    give_notice(harness, "a", 600.0)
    harness.drop_orders("a", "b")
    give_notice(harness, "c", 30.0)
    harness.restore_orders()
    assert not notices(harness, "a")
    harness.elect("d")
    harness.settle(1.0)
    for name in "ab":
        assert notices(harness, name)[-1].until == pytest.approx(30.0, abs=0.1)
    assert harness.deadline <= 30.0 + MARGIN_S


def test_another_coordinator_that_meets_no_node_of_the_round_begins_no_other() -> None:
    """Their workers may run until the deadline; nodes on standby end with the job."""
    harness = running("a", "b", settings=RoundSettings(1, 2, last_call_timeout=0))
    give_notice(harness, "a", 60.0)
    assert harness.recorded is not None
    harness.lose_all("d")
    harness.join("c")
    harness.settle(50.0)
    assert len(harness.events(RoundFormed)) == 1
    assert harness.end_of("c").state is JobState.PREEMPTED


def test_another_coordinator_takes_the_deadlines_of_the_nodes_that_come() -> None:
    """Not that of the record, which another clock has measured."""
    harness = running("a", "b")
    harness.drop_orders("b")
    give_notice(harness, "a", 60.0)
    harness.restore_orders()
    harness.now = 20.0
    harness.elect("d", former=harness.recorded)
    harness.settle(21.0)
    assert notices(harness, "b")[-1].until == pytest.approx(60.0, abs=0.1)
    assert harness.deadline <= 60.0 + MARGIN_S


def test_a_clock_that_is_set_forward_is_no_earlier_notice() -> None:
    harness = running("a", "b")
    give_notice(harness, "a", 60.0)
    harness.clocks = {"a": (3600.0, 7.0), "b": (3600.0, 8.0)}
    for member in harness.members.values():
        member.set_port(99)
    harness.settle(10.0)
    assert len(harness.events(PreemptionNotice)) == 1
    assert len(notices(harness, "b")) == 1
    harness.settle(50.0)
    assert harness.is_in(CoordinatorPhase.RUNNING)


def test_an_earlier_notice_to_a_node_without_a_place_preempts_no_other_earlier() -> None:
    harness = running("a", "b", settings=RoundSettings(2, 2, last_call_timeout=0))
    returning = harness.members["b"]
    harness.join("c")
    harness.lose("b")
    give_notice(harness, "a", 60.0)
    returning.report(RoundStopped(0))
    harness.members["b"] = returning
    harness.settle()
    give_notice(harness, "b", 5.0)
    assert len(notices(harness, "c")) == 1
    assert not harness.events(NodeRefused)


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_job_ends_when_no_node_has_workers(code: int) -> None:
    """Whatever they exited with; and no worker is stopped because of another one."""
    harness = running("a", "b", "c", max_restarts=3)
    give_notice(harness, "b")
    sent = len(harness.sent)
    end_workers(harness, "c", code=code)
    end_workers(harness, "a")
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert harness.sent[sent:] == []
    end_workers(harness, "b", code=code)
    assert {harness.end_of(name) for name in "abc"} == {harness.outcome}
    outcome = harness.outcome
    assert (outcome.state, outcome.exit_code) == (JobState.PREEMPTED, PREEMPTED_CODE)
    assert (outcome.why, outcome.failures, outcome.restarts) == ("USR1 (on b)", (), 0)
    (finished,) = harness.events(JobFinished)
    assert finished.state is JobState.PREEMPTED
    assert len(harness.events(RoundFormed)) == 1


def test_the_job_ends_when_all_workers_that_run_agree() -> None:
    harness = running("a", "b", "c")
    give_notice(harness, "a")
    end_workers(harness, "a", code=1)
    for name, number in (("c", PREEMPTION_CHANGE), ("b", 0), ("b", PREEMPTION_CHANGE)):
        assert harness.is_in(CoordinatorPhase.RUNNING)
        harness.members[name].report(ChangeAgreed(0, number))
        harness.settle()
    assert harness.outcome.state is JobState.PREEMPTED


def test_a_node_that_is_lost_or_leaves_forms_no_other_round() -> None:
    """Even below the minimum; nor does a request for a restart."""
    settings = RoundSettings(3, 4, last_call_timeout=0, replace_timeout=5.0)
    harness = running("a", "b", "c", "d", settings=settings)
    give_notice(harness, "a")
    harness.members["a"].report(RestartRequested(0, "new data"))
    harness.lose("a")
    harness.lose("b", is_lost=False)
    harness.settle(50.0)
    assert len(harness.events(RoundFormed)) == 1
    assert not any(isinstance(body, StopRound) for _, body in harness.sent)
    end_workers(harness, "c", "d")
    assert harness.outcome.state is JobState.PREEMPTED


def test_the_job_ends_when_all_nodes_of_the_round_are_lost() -> None:
    harness = running("a", "b")
    give_notice(harness, "a")
    harness.join("standby")
    harness.lose("a", "b")
    assert harness.outcome.state is JobState.PREEMPTED
    assert harness.end_of("standby") == harness.outcome


def test_joiners_and_nodes_on_standby_wait() -> None:
    harness = running("a", "b", settings=RoundSettings(1, 3, last_call_timeout=0))
    harness.answer_no_probes("probing")
    harness.join("probing")
    give_notice(harness, "a")
    harness.join("late")
    harness.lose("b")
    harness.settle(50.0)
    for name in ("probing", "late"):
        assert isinstance(harness.last(name), NodeStandby)
        assert not any(isinstance(one, StartRound) for one in harness.done[name])
    end_workers(harness, "a")
    assert harness.end_of("late").state is JobState.PREEMPTED


def test_another_coordinator_passes_the_notice_on() -> None:
    """To the nodes that the former one had not reached, with the same deadline."""
    harness = running("a", "b", "c")
    harness.drop_orders("b", "c")
    give_notice(harness, "a", 60.0)
    harness.restore_orders()
    assert not notices(harness, "b")
    harness.now = 20.0
    harness.elect("d")
    harness.settle()
    (to_b,) = notices(harness, "b")
    assert to_b.until == 60.0
    harness.lose("a")  # which has given it
    harness.now = 30.0
    harness.elect("e")
    harness.settle(30.0)
    harness.settle(31.0)
    assert len(notices(harness, "b")) == len(notices(harness, "c")) == 1
    assert len(harness.events(RoundFormed)) == 1
    end_workers(harness, "b", "c")
    assert harness.outcome.state is JobState.PREEMPTED
    assert harness.outcome.why == "USR1 (on a)"


def test_another_coordinator_trusts_no_clock_that_was_set() -> None:
    """The time that was left when the node got the notice is a limit."""
    harness = running("a")
    give_notice(harness, "a", 60.0)
    harness.clocks["a"] = (-3600.0, 7.0)
    harness.now = 50.0
    harness.elect("d")
    harness.settle()
    (_, event) = harness.events(PreemptionNotice)
    assert event.time_left == 60.0
    assert harness.deadline <= 50.0 + 60.0 + MARGIN_S
    harness.clocks["a"] = (3600.0, 9.0)
    harness.elect("e")
    harness.settle()
    assert harness.events(PreemptionNotice)[-1].time_left == 0.0
    harness.settle(50.0 + MARGIN_S)
    assert harness.outcome.state is JobState.PREEMPTED


def test_a_node_that_was_about_to_start_does_not() -> None:
    """The notice replaces an order that it has not seen, or comes after its own."""
    harness = running("a", "b", settings=RoundSettings(1, 4, last_call_timeout=0))
    harness.join("c")
    harness.drop_orders("c")
    harness.settle(1.0)
    assert isinstance(harness.dropped["c"].body, StartRound)
    start = harness.dropped["c"]
    give_notice(harness, "a")
    assert isinstance(harness.dropped["c"].body, ChangePending)
    member = harness.members["c"]
    harness.perform("c", member.on_order(harness.dropped["c"]))
    assert member.on_order(start) == []
    assert not member.status.is_busy
    harness.settle()
    end_workers(harness, "a", "b")
    assert harness.outcome.state is JobState.PREEMPTED


def test_a_node_with_its_own_notice_takes_no_placement() -> None:
    harness = running("a", "b")
    give_notice(harness, "b")
    start = StartRound(replace(harness.place("b"), round=1, attempt=1))
    assert harness.members["b"].on_order(Order(9, 1, start)) == []
    assert harness.place("b").round == 0


def test_a_failure_just_before_the_notice_is_followed_by_no_restart() -> None:
    """In whichever phase the coordinator is."""
    delayed = RestartPolicy(backoff=Backoff(initial=9, jitter=False))
    harness = running("a", "b", max_restarts=3, restart=delayed)
    harness.fail("a")
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    give_notice(harness, "b")
    assert harness.outcome.state is JobState.PREEMPTED
    assert not harness.events(RoundFormed)[1:]


def test_a_notice_while_nodes_are_waited_for_ends_the_job() -> None:
    settings = RoundSettings(2, 2, last_call_timeout=0)
    harness = running("a", "b", settings=settings)
    harness.lose("b")
    assert harness.is_in(CoordinatorPhase.FORMING)
    give_notice(harness, "a")
    assert harness.outcome.state is JobState.PREEMPTED


def test_a_node_without_a_place_preempts_no_other() -> None:
    harness = running("a", "b", settings=RoundSettings(1, 2, last_call_timeout=0))
    harness.join("c")
    give_notice(harness, "c")
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert not notices(harness, "a")


def check_rejected(harness: CoordinatorHarness, name: str) -> None:
    """Check that a node was rejected for its notice, and that no other node has it."""
    assert harness.end_of(name).is_rendezvous
    (refused,) = harness.events(NodeRefused)
    assert (refused.member, refused.why.partition(",")[0]) == (
        name,
        "it has notice of a preemption",
    )
    assert not harness.events(PreemptionNotice)
    others = [one for one in harness.members if one != name]
    assert not any(notices(harness, one) for one in others)


def test_a_node_that_has_lost_its_place_preempts_no_other() -> None:
    """It is on standby since another node has its rank; the round goes on."""
    harness = running("a", "b", settings=RoundSettings(2, 2, last_call_timeout=0))
    returning = harness.members["b"]
    harness.join("c")
    harness.lose("b")
    assert harness.ranks == {"a": 0, "c": 1}
    returning.report(RoundStopped(0))
    harness.members["b"] = returning
    harness.settle()
    assert isinstance(harness.last("b"), NodeStandby)
    give_notice(harness, "b")
    check_rejected(harness, "b")
    assert harness.ranks == {"a": 0, "c": 1}
    harness.lose("b", is_lost=False)
    harness.succeed("a", "c")
    assert harness.outcome.state is JobState.SUCCEEDED


def test_an_excluded_node_preempts_no_other_once_its_workers_have_ended() -> None:
    """Also while the others wait for a node in its place."""
    harness = running("a", "b", settings=RoundSettings(2, 3, last_call_timeout=0))
    harness.exclude("b")
    harness.fail("b")
    assert harness.is_in(CoordinatorPhase.FORMING)
    give_notice(harness, "b")
    check_rejected(harness, "b")
    harness.lose("b", is_lost=False)
    harness.join("c")
    assert harness.ranks == {"a": 0, "c": 1}


@pytest.mark.parametrize("names", ["b", "ab"])
def test_an_excluded_node_whose_workers_end_with_its_notice_has_notice_for_all(names: str) -> None:
    """One status may say all that: what its workers did is no failure of the job."""
    harness = running(*names, max_restarts=0)
    harness.settle(10.0)
    member = harness.members["b"]
    member.report(ExclusionRequested(0, "bad memory"))
    member.report(RoundStopped(0, (failure(1),)))
    give_notice(harness, "b", 0.0)
    assert harness.events(PreemptionNotice)
    end_workers(harness, *names.replace("b", ""))
    assert {harness.end_of(name).state for name in names} == {JobState.PREEMPTED}


@pytest.mark.parametrize("may_move", [False, True])
def test_an_excluded_node_that_serves_the_store_has_notice_for_all(may_move: bool) -> None:
    """If there is no other endpoint: the job could not go on without the host."""
    settings = RoundSettings(1, 2, last_call_timeout=0, may_move=may_move)
    harness = running("a", "b", settings=settings)
    harness.members["b"].set_address("b", is_host=True)
    harness.exclude("b")
    harness.fail("b")
    assert harness.ranks == {"a": 0}
    give_notice(harness, "b")
    if may_move:
        check_rejected(harness, "b")
        return
    assert notices(harness, "a")
    end_workers(harness, "a")
    assert {harness.end_of(name).state for name in "ab"} == {JobState.PREEMPTED}


def test_a_node_that_is_excluded_from_the_next_round_has_notice_for_all() -> None:
    harness = running("a", "b")
    harness.exclude("b")
    give_notice(harness, "b")
    assert notices(harness, "a")


def test_a_node_that_does_not_stop_its_workers_holds_the_end_up_for_so_long() -> None:
    harness = running("a", "b")
    give_notice(harness, "a", 60.0)
    end_workers(harness, "a")
    assert harness.deadline <= 60.0 + MARGIN_S
    harness.settle(60.0 + MARGIN_S - 0.1)
    assert harness.is_in(CoordinatorPhase.RUNNING)
    harness.settle(60.0 + MARGIN_S)
    assert harness.outcome.state is JobState.PREEMPTED


@pytest.mark.parametrize("until", [1e300, float("inf"), -1e300])
def test_a_notice_that_no_member_would_write(until: float) -> None:
    harness = running("a")
    give_notice(harness, "a")
    text = encode(harness.members["a"].status).replace(b'"until":60.0', b'"until":%r' % until)
    assert b"60.0" not in text.partition(b'"until"')[2][:20]
    with pytest.raises(MessageError):
        decode_status(text)


# -------------------------------------------------------------------- virtual time


def simulated(
    names: str = "abc", heartbeat_timeout: float = 2.0, **settings: Any
) -> tuple[CheckedSimulation, list[SimNode]]:
    """Return nodes that run a round together."""
    rendezvous = RendezvousSpec(
        last_call_timeout=0.5,
        scale_up_delay=0.0,
        join_timeout=20.0,
        heartbeat_timeout=heartbeat_timeout,
    )
    spec = LaunchSpec("x", nnodes=f"1:{len(names)}", max_restarts=3, rendezvous=rendezvous)
    sim = CheckedSimulation(spec, endpoints=settings.pop("endpoints", ("store0",)), **settings)
    return sim, together(sim, names)


def check_preempted(nodes: list[SimNode]) -> None:
    """Check that each has ended so, with the same code."""
    for node in nodes:
        assert (ended(node).state, ended(node).exit_code) == (JobState.PREEMPTED, PREEMPTED_CODE)


def test_workers_run_until_the_deadline_and_are_stopped_then() -> None:
    sim, nodes = simulated()
    for node in nodes:
        node.behavior = WorkerBehavior(stop_duration=1.5)
    sim.preempt(nodes[1], 20.0)
    sim.run(19.9)
    assert all(node.notice and node.running and not node.is_stopping for node in nodes)
    sim.run(1.0)
    assert all(node.is_stopping and node.is_live for node in nodes)
    sim.run_until(lambda: sim.is_over, 5.0)
    check_preempted(nodes)


def test_a_worker_that_fails_after_the_notice_stops_no_other() -> None:
    sim, nodes = simulated()
    sim.preempt(nodes[0], 20.0)
    sim.run(AT_ONCE_S)
    sim.fail_worker(nodes[2], 7)
    sim.run(10.0)
    assert all(node.running and not node.is_stopping for node in nodes[:2])
    nodes[0].end_workers(0)
    sim.run(AT_ONCE_S)
    assert nodes[1].running
    nodes[1].end_workers(3)
    sim.run_until(lambda: sim.is_over, AT_ONCE_S)
    check_preempted(nodes)


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("after", [0.0, 0.002, 0.02, AT_ONCE_S])
def test_the_loss_of_any_node_does_not_end_the_notice(victim: int, after: float) -> None:
    """The one that leads is one of them; a notice that no other has seen is lost with its node."""
    sim, nodes = simulated(delay=(0.001, 0.002))
    sim.preempt(nodes[0], 20.0)
    sim.run(after)
    was_seen = sum(node.notice is not None for node in nodes if node is not nodes[victim]) > 0
    sim.kill(nodes[victim])
    rounds = len(sim.checker.rounds.rounds)
    others = [node for node in nodes if node is not nodes[victim]]
    if not was_seen and victim == 0:
        return
    sim.run(10.0)
    assert len(sim.checker.rounds.rounds) == rounds
    assert all(node.notice and node.running and not node.is_stopping for node in others)
    sim.run_until(lambda: sim.is_over, 15.0)
    check_preempted(others)


def test_the_coordinator_is_lost_with_the_store_that_it_serves() -> None:
    """The others meet at the next endpoint, with the notice."""
    sim, nodes = simulated(endpoints=("a", "b"))
    assert sim.coordinators == [nodes[0]]
    sim.preempt(nodes[0], 30.0)
    sim.run(AT_ONCE_S)
    sim.kill(nodes[0])
    sim.run(10.0)
    assert len(sim.checker.rounds.rounds) == 1
    assert all(node.running and not node.is_stopping for node in nodes[1:])
    sim.run_until(lambda: sim.is_over, 60.0)
    check_preempted(nodes[1:])


@pytest.mark.parametrize("victim", ["serves the store", "does not"])
def test_the_node_that_serves_the_store_stays_no_longer_than_the_notice(victim: str) -> None:
    """Its host is taken away then, although a node that was lost before may come back."""
    sim, nodes = simulated(endpoints=("a", "b"), heartbeat_timeout=20.0)
    lost = nodes.pop(0 if victim == "serves the store" else 2)
    sim.kill(lost)
    sim.run_until(lambda: len(sim.checker.rounds.rounds) == 2, 60.0)
    sim.preempt(nodes[1], 5.0)
    sim.run(AT_ONCE_S)
    for node in nodes:
        node.end_workers(0)
    sim.run_until(lambda: sim.is_over, 5.0)
    check_preempted(nodes)


def test_a_clock_that_is_set_back_postpones_no_deadline() -> None:
    """Neither that of its own node, nor that of another coordinator."""
    sim, nodes = simulated()
    for node in nodes:
        node.behavior = WorkerBehavior(stop_duration=0.1)
    sim.suspend("a", 1.0)
    sim.preempt(nodes[1], 20.0)
    sim.run(0.5)
    sim.step_clock(nodes[0], -3600.0)
    sim.run(AT_ONCE_S)
    assert nodes[0].notice
    sim.step_clock(nodes[2], -3600.0)
    sim.kill(nodes[1])
    sim.run(10.0)
    assert all(node.running and not node.is_stopping for node in (nodes[0], nodes[2]))
    sim.run_until(lambda: sim.is_over, 12.0)
    check_preempted([nodes[0], nodes[2]])


def test_a_late_node_waits_and_ends_with_the_others() -> None:
    sim, nodes = simulated("ab")
    sim.preempt(nodes[0], 20.0)
    sim.run(AT_ONCE_S)
    sim.kill(nodes[1])
    late = sim.add_node("c")
    sim.run(10.0)
    assert late.placement is None
    assert late.is_live
    sim.run_until(lambda: sim.is_over, 20.0)
    check_preempted([nodes[0], late])


@pytest.mark.parametrize("had_place", [True, False])
def test_a_node_on_standby_ends_for_itself(had_place: bool) -> None:
    """The workers of the others run on, also if it has lost its place to another node."""
    sim, (a, b) = simulated("ab")
    if had_place:
        sim.suspend("b", 5.0)
    standby = sim.add_node("c")
    placed = [a, standby] if had_place else [a, b]
    standby = b if had_place else standby
    sim.run_until(lambda: sim.is_settled(2, placed) and standby.is_standing_by, 20.0)
    rounds = len(sim.checker.rounds.rounds)
    sim.preempt(standby, 20.0)
    sim.run(AT_ONCE_S)
    check_preempted([standby])
    assert len(sim.checker.rounds.rounds) == rounds
    sim.finish_workers()
    sim.run_until(lambda: sim.is_over, 5.0)
    assert {ended(node).state for node in placed} == {JobState.SUCCEEDED}


def test_a_node_that_comes_after_the_end_begins_the_job_anew() -> None:
    """The scheduler runs a preempted job again, with the same run id at the same store."""
    sim, nodes = simulated("ab")
    sim.preempt(nodes[0], 0.5)
    sim.run_until(lambda: sim.is_over, 5.0)
    check_preempted(nodes)
    again = together(sim, "ab")
    sim.finish_workers()
    sim.run_until(lambda: sim.is_over, 5.0)
    assert {ended(node).state for node in again} == {JobState.SUCCEEDED}


def test_two_notices_at_once() -> None:
    """The earliest counts on all nodes, also on that with a later one of its own."""
    sim, nodes = simulated()
    sim.preempt(nodes[0], 5.0)
    sim.preempt(nodes[1], 9.0)
    sim.run(4.5)
    assert all(node.running and not node.is_stopping for node in nodes)
    sim.run(AT_ONCE_S)
    assert all(node.is_stopping or not node.is_live for node in nodes)
    sim.run_until(lambda: sim.is_over, 5.0)
    check_preempted(nodes)


@pytest.mark.parametrize("victim", [0, 2])
def test_an_earlier_notice_as_the_coordinator_or_another_node_is_lost(victim: int) -> None:
    sim, nodes = simulated(endpoints=("a", "b"))
    sim.preempt(nodes[2], 600.0)
    sim.run(AT_ONCE_S)
    sim.kill(nodes[victim])
    sim.preempt(nodes[1], 20.0)
    others = [node for node in nodes if node is not nodes[victim]]
    sim.run(15.0)
    assert all(node.running and not node.is_stopping for node in others)
    sim.run(6.0)
    assert all(node.is_stopping or not node.is_live for node in others)
    sim.run_until(lambda: sim.is_over, 60.0)
    check_preempted(others)


def test_all_nodes_have_notice_within_a_few_messages() -> None:
    """The status of one node to the store and to the coordinator, its order to the others."""
    sim, nodes = simulated(delay=(0.001, 0.001))
    sim.run(5.0)
    sim.preempt(nodes[1])
    sim.run_until(lambda: all(node.notice for node in nodes), 5 * 0.001 + LEASE_LINGER / 20)


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("seconds", [20.0, 300.0])
def test_the_workers_keep_their_time_when_the_only_store_is_lost(
    seconds: float, agree: bool
) -> None:
    """Also after the search for it has ended; unless all workers agree, or have ended."""
    sim, nodes = simulated(endpoints=("a",))
    sim.preempt(nodes[0], seconds)
    sim.run(AT_ONCE_S)
    sim.kill(nodes[0])
    sim.run(seconds - 2 * AT_ONCE_S)
    others = nodes[1:]
    assert all(node.running and not node.is_stopping for node in others)
    if agree:
        for node in others:
            node.agree_to_change()
    if agree and seconds == 300.0:
        sim.run_until(lambda: sim.is_over, AT_ONCE_S)
    sim.run_until(lambda: sim.is_over, 100.0)
    check_preempted(others)


def test_an_agreement_before_the_end_of_the_search_for_a_store() -> None:
    sim, nodes = simulated(endpoints=("a",))
    sim.preempt(nodes[0], 300.0)
    sim.run(AT_ONCE_S)
    sim.kill(nodes[0])
    sim.run(10.0)
    for node in nodes[1:]:
        node.agree_to_change()
    sim.run_until(lambda: sim.is_over, 100.0)
    check_preempted(nodes[1:])


def test_a_notice_that_reaches_no_store_does_not_keep_the_workers() -> None:
    """The other nodes go on without this node: no worker of it may run beside theirs."""
    sim, nodes = simulated()
    sim.partition("c", ["a", "b", "store0"])
    sim.preempt(nodes[2], 300.0)
    sim.run_until(lambda: sim.is_settled(2, nodes[:2]), 20.0)
    assert nodes[2].running is None
    assert not any(node.notice for node in nodes[:2])


def test_a_node_that_is_cut_off_after_its_notice_keeps_its_workers() -> None:
    """The others have the notice too, and form no other round."""
    sim, nodes = simulated()
    sim.preempt(nodes[2], 60.0)
    sim.run(AT_ONCE_S)
    sim.partition("c", ["a", "b", "store0"])
    sim.run(50.0)
    assert all(node.running and not node.is_stopping for node in nodes)
    sim.run_until(lambda: sim.is_over, 200.0)
    check_preempted(nodes)
    assert len(sim.checker.rounds.rounds) == 1


def test_a_node_that_finds_no_store_ends_by_itself() -> None:
    """All others may be gone; what it has stopped is not waited for without an end."""
    sim, nodes = simulated("ab")
    sim.preempt(nodes[0], 5.0)
    sim.run(AT_ONCE_S)
    sim.stop_store("store0")
    sim.kill(nodes[1])
    sim.run_until(lambda: sim.is_over, 200.0)
    check_preempted(nodes[:1])
