"""The coordinator: every rule and every row of its table."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elastic_aio.events import AttemptFailed, JobFinished, Restarting
from elastic_aio.node_events import (
    MembershipChanged,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeStandby,
    RoundForming,
    StandbyPromoted,
)
from elastic_aio.outcome import EndCause, JobState
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    EndJob,
    NodeDraining,
    NodeInfo,
    RestartRequested,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.messages import (
    Order,
    ProbePeers,
    Reject,
    RoundRecord,
    StandBy,
    WaitForNodes,
    encode,
)
from elastic_aio.rendezvous.state import CoordinatorPhase, MemberRecord, RoundSettings
from elastic_aio.spec.restart import Backoff, RestartAction, RestartPolicy
from tests.support.coordinator_harness import CoordinatorHarness, failure, status

LATE = 1_000_000.0


# ------------------------------------------------------------------ forming


def test_the_first_round_is_formed_when_all_nodes_have_joined() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 3), "a", "b")
    assert harness.is_in(CoordinatorPhase.FORMING)
    harness.join("d")
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert len(harness.events(NodeJoined)) == 3


def test_the_first_round_waits_for_its_last_call() -> None:
    """A node that joins during the last call does not prolong it."""
    harness = CoordinatorHarness(RoundSettings(2, 4, last_call_timeout=30), "a", "b")
    harness.settle(20)
    harness.join("d")
    assert not harness.ranks
    harness.settle(29.9)
    assert not harness.ranks
    harness.settle(30)
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}


def test_the_last_call_starts_again_after_there_were_too_few_nodes() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 4, last_call_timeout=30), "a", "b")
    harness.settle(10)
    harness.lose("b")
    harness.now = 20
    harness.join("d")
    harness.settle(49)
    assert not harness.ranks
    harness.settle(50)
    assert harness.ranks == {"a": 0, "d": 1}


def test_calls_at_the_deadlines_are_sufficient() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=30), "a")
    seen = []
    while not harness.ranks:
        deadline = harness.deadline
        assert deadline > harness.now
        seen.append(deadline)
        harness.settle(deadline)
    assert seen[-1] == 30
    assert len(seen) < 6


def test_the_host_of_the_store_gets_group_rank_0() -> None:
    """Unless another node prefers it."""
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.join("a")
    harness.join("b", is_host=True)
    assert harness.ranks == {"a": 1, "b": 0}
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.join("a", preferred_rank=0)
    harness.join("b", is_host=True)
    assert harness.ranks == {"a": 0, "b": 1}


def test_preferred_ranks_are_given_if_free() -> None:
    """The others get the lowest free ranks, in the order of their arrival."""
    harness = CoordinatorHarness(RoundSettings(4, 4))
    harness.join("a", preferred_rank=2)
    harness.join("b", preferred_rank=2)
    harness.join("d", preferred_rank=9)
    harness.join("e")
    assert harness.ranks == {"a": 2, "b": 0, "d": 1, "e": 3}


def test_placements_of_a_round_agree() -> None:
    """Address and port are those of group rank 0."""
    harness = CoordinatorHarness(RoundSettings(2, 2))
    harness.join("a")
    harness.members["a"].set_port(77)
    harness.join("b")
    a, b = harness.place("a"), harness.place("b")
    assert (a.master_addr, a.master_port) == (b.master_addr, b.master_port) == ("a", 77)
    assert (a.span.first_rank, b.span.first_rank) == (0, 1)
    assert a.span.world_size == b.span.world_size == 2
    assert a.attempt == a.restarts == a.changes == a.round == 0
    assert a.formed_by == b.formed_by


def test_too_few_nodes_fail_after_the_join_timeout() -> None:
    harness = CoordinatorHarness(RoundSettings(3, 3, join_timeout=600), "a", "d")
    harness.settle(599.9)
    assert harness.is_in(CoordinatorPhase.FORMING)
    harness.settle(600)
    outcome = harness.outcome
    assert (outcome.cause, outcome.exit_code) == (EndCause.TOO_FEW_NODES, RENDEZVOUS_FAILED)
    text = "only 2 of 3 nodes came together (a, d); waited 600 s (join_timeout)"
    assert outcome.why == text


def test_too_few_nodes_that_replace_a_whole_round_fail_as_after_a_loss() -> None:
    """The nodes of the job had come together before."""
    harness = CoordinatorHarness(RoundSettings(2, 2, join_timeout=600), "a", "b")
    harness.lose_all("d")
    harness.join("d")
    harness.settle(1)
    harness.settle(harness.now + 600)
    outcome = harness.outcome
    assert (outcome.cause, outcome.exit_code) == (EndCause.NODES_NOT_REPLACED, 69)
    assert outcome.why.startswith("only 1 of 2 nodes are left (d)")


def test_too_few_nodes_after_a_stop_of_all_have_not_come_together() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, join_timeout=600), "a", "b")
    for name in "ab":
        harness.members[name].report(NodeDraining("SIGTERM was received"))
        harness.members[name].report(RoundStopped(0))
    harness.settle()
    harness.lose("a", "b", is_lost=False)
    harness.lose_all("d")
    harness.join("d")
    harness.settle(1)
    harness.settle(harness.now + 600)
    assert harness.outcome.exit_code == RENDEZVOUS_FAILED


def test_too_few_nodes_after_a_loss_fail_with_a_code_of_their_own() -> None:
    """The reason names present, missing and refused nodes."""
    harness = CoordinatorHarness(RoundSettings(3, 3, replace_timeout=30), "a", "b", "d")
    harness.lose("b")
    harness.add("x", RoundSettings(1, 8))
    harness.settle(1)
    shown = harness.events(RoundForming)[-1]
    assert (shown.joined, shown.missing, shown.present) == (2, ("b",), ("a", "d"))
    assert shown.time_left == 29
    harness.settle(29.9)
    assert harness.is_in(CoordinatorPhase.FORMING)
    harness.settle(30)
    outcome = harness.outcome
    assert outcome.is_rendezvous
    assert (outcome.cause, outcome.exit_code) == (EndCause.NODES_NOT_REPLACED, 69)
    assert outcome.why == (
        "only 2 of 3 nodes are left (a, d); missing: b; refused: x: it was started with"
        " --nnodes 1:8, the job with 3; waited 30 s (replace_timeout)"
    )
    assert {name for name, body in harness.sent if body == EndJob(outcome)} == {"a", "d"}


def test_a_node_that_left_after_its_success_is_not_waited_for() -> None:
    """The exit code is that of the failure which could have been restarted."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=3)
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    harness.fail("b", failure(7))
    harness.settle(1)
    outcome = harness.outcome
    assert (outcome.exit_code, outcome.is_rendezvous) == (7, False)
    text = "only 1 of 2 nodes are left (b); missing: a; a had succeeded and left"
    assert outcome.why == f"{text} (exit_barrier_timeout)"


def test_a_replacement_is_waited_for_where_one_is_enough() -> None:
    """Another node has left after its success, but the minimum can be met without that."""
    harness = CoordinatorHarness(RoundSettings(2, 3, replace_timeout=30), "a", "b", "c")
    harness.succeed("b")
    harness.lose("b", is_lost=False)
    harness.lose("c")
    harness.settle(29)
    assert harness.coordinator.outcome is None
    harness.join("d")
    assert harness.ranks.keys() == {"a", "d"}


@pytest.mark.parametrize("may_move", [False, True])
def test_a_job_does_not_end_while_a_lost_member_may_have_its_lease(may_move: bool) -> None:
    """It may go on in another job at another store, as if its own had not ended."""
    settings = RoundSettings(2, 2, replace_timeout=1, heartbeat_timeout=10, may_move=may_move)
    harness = CoordinatorHarness(settings, "a", "b")
    harness.settle(20)
    harness.lose("b")
    harness.settle(29)
    assert (harness.coordinator.outcome is None) == may_move
    harness.settle(31)
    assert harness.coordinator.outcome is not None


def test_waiting_members_get_few_orders() -> None:
    """About forty in ten minutes."""
    harness = CoordinatorHarness(RoundSettings(2, 2, join_timeout=600), "a")
    for second in range(599):
        harness.settle(second)
    published = [body for _, body in harness.sent if isinstance(body, WaitForNodes)]
    assert 35 <= len(published) <= 45


@pytest.mark.slow
def test_many_waiting_members_get_few_orders() -> None:
    """A node gets one or two while a thousand others join, and not one per second."""
    settings = RoundSettings(2000, 2000)
    harness = CoordinatorHarness(settings, "a")
    for number in range(1000):
        name = f"node{number}"
        harness.add(name, settings)
        if number % 100 == 99:
            harness.settle(number / 100)
    waits = [one for one, body in harness.sent if one == "a" and isinstance(body, WaitForNodes)]
    assert 2 <= len(waits) <= 5


# -------------------------------------------------------------- the membership


def test_remaining_nodes_form_a_round_after_a_loss() -> None:
    """Ranks are kept as far as possible, and no restart is counted."""
    harness = CoordinatorHarness(RoundSettings(1, 3), "a", "b", "d")
    harness.lose("b")
    assert harness.ranks == {"a": 0, "d": 1}
    assert harness.numbers("a") == (1, 1, 0, 1)
    assert harness.events(NodeLost)
    (change,) = harness.events(MembershipChanged)
    assert (change.why, change.nodes, change.round) == ("b is lost", 2, 1)


def test_leaving_is_not_a_loss() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b")
    harness.lose("b", is_lost=False)
    (left,) = harness.events(NodeLeft)
    assert left.why == "it ended its lease, as when stopped"
    assert not harness.events(NodeLost)
    assert harness.events(MembershipChanged)[0].why == "b has left"


def test_a_standby_node_takes_the_free_rank() -> None:
    harness = CoordinatorHarness(RoundSettings(3, 3), "a", "b", "d")
    harness.join("e")
    assert harness.done["e"] == [NodeStandby(round=0, maximum=3)]
    harness.lose("b")
    assert harness.ranks == {"a": 0, "e": 1, "d": 2}
    assert [type(one) for one in harness.done["e"]] == [NodeStandby, StandbyPromoted, StartRound]


def test_group_rank_0_is_replaced() -> None:
    """The placement has the address of the new node."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.join("d")
    harness.lose("a")
    assert harness.ranks == {"d": 0, "b": 1}
    assert harness.place("b").master_addr == "d"


def test_too_few_remaining_nodes_stop_and_wait() -> None:
    """The next node that joins is enough: there is no second last call."""
    harness = CoordinatorHarness(RoundSettings(2, 3, last_call_timeout=0), "a", "b")
    harness.lose("b")
    assert harness.is_in(CoordinatorPhase.FORMING)
    assert harness.last("a") == StopRound(0, "b is lost: only 1 node of 2:3 left")
    harness.join("d")
    assert harness.ranks == {"a": 0, "d": 1}
    placement = harness.place("d")
    assert (placement.round, placement.changes, placement.restarts) == (1, 1, 0)


def test_a_round_waits_for_the_next_port_of_group_rank_0() -> None:
    """The previous `StartRound` is in flight, so the port in the last status is used up."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0, overlap=True))
    harness.join("a", "b", "d")
    harness.drop_orders("a")
    harness.lose("b")
    harness.lose("d")
    assert harness.coordinator.round.number == 1, "a has not yet taken its place in it"
    harness.restore_orders()
    harness.perform("a", harness.members["a"].on_order(harness.dropped["a"]))
    harness.settle()
    first, second = (one for one in harness.done["a"][-2:] if isinstance(one, StartRound))
    assert (first.placement.round, second.placement.round) == (1, 2)
    assert first.placement.master_port != second.placement.master_port


@pytest.mark.parametrize("change", ["loss", "leave", "joiner"])
def test_a_round_begins_when_all_workers_of_the_last_one_have_stopped(change: str) -> None:
    """One node that stops slowly delays the new round on every node."""
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b", "d")
    harness.stop_slowly("b")
    if change == "joiner":
        harness.join("e")
        harness.settle(1)
    else:
        harness.lose("d", is_lost=change == "loss")
    assert harness.is_in(CoordinatorPhase.FORMING)
    assert isinstance(harness.last("a"), StopRound)
    harness.settle(100)
    assert harness.coordinator.round.number == 0
    harness.members["b"].report(RoundStopped(0))
    harness.settle()
    assert harness.coordinator.round.number == 1
    third = {"joiner": {"d": 2, "e": 3}}.get(change, {})
    assert harness.ranks == {"a": 0, "b": 1, **third}


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_round_waits_for_the_workers_of_a_node_that_is_gone(is_lost: bool) -> None:
    """A lost one stops them soon; one that has gone to another store needs longer to get there."""
    settings = RoundSettings(1, 3, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    harness = CoordinatorHarness(settings, "a", "b", "d")
    harness.lose("b", is_lost=is_lost)
    fence = 0.25 if is_lost else 5.0
    assert harness.deadline == fence
    harness.settle(fence - 0.01)
    assert harness.ranks == {}
    harness.settle(fence)
    assert harness.ranks == {"a": 0, "d": 1}


def test_a_round_does_not_wait_for_a_node_whose_agent_is_dead() -> None:
    """Its guardian stops the workers."""
    settings = RoundSettings(1, 3, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    harness = CoordinatorHarness(settings, "a", "b", "d")
    harness.lose("b", is_dead=True)
    assert harness.ranks == {"a": 0, "d": 1}


def test_a_round_does_not_wait_for_a_node_without_workers() -> None:
    """It has stopped them and says so, or has never had any."""
    settings = RoundSettings(1, 3, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    harness = CoordinatorHarness(settings, "a", "b", "d")
    harness.members["b"].leave()
    harness.settle()
    assert [(name, harness.ranks[name]) for name in "ad"] == [("a", 0), ("d", 1)]
    assert harness.coordinator.round.number == 1
    assert [one.name for one in harness.events(NodeLeft)] == ["b"]
    harness.lose("b", is_lost=False)
    assert len(harness.events(NodeLeft)) == 1, "said once"


@pytest.mark.parametrize(
    ("host", "stores", "waits"),
    [
        (None, (b"2",), 5.25),
        ("b", (b"2",), 0.7),
        ("b", (b"2", b"3"), 5.25),
        (None, (None,), 0.7),
    ],
)
def test_a_recovered_round_waits_for_missing_members(
    host: str | None, stores: tuple[bytes | None, ...], waits: float
) -> None:
    """At another store they may search for one; but not the node that has served the last."""
    settings = RoundSettings(1, 3, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    harness = CoordinatorHarness(settings)
    for name in "abd":
        harness.join(name, is_host=name == host)
    harness.join("e")
    assert len(harness.ranks) == 3
    for store in stores[:-1]:
        harness.elect("w", store=store)
        harness.settle()
    del harness.members["b"]
    harness.elect("x", store=stores[-1])
    harness.settle()
    while not {0, 1} <= set(harness.ranks.values()) or harness.coordinator.round.number < 1:
        harness.settle(harness.deadline)
    assert harness.now == waits


def test_members_of_one_host_have_their_pids_in_messages() -> None:
    harness = CoordinatorHarness(RoundSettings(4, 4, last_call_timeout=0), "a")
    for pid, member in enumerate(("b.1", "b.2"), start=1):
        harness.join(member, node=NodeInfo("b", pid, 1, "default"))
    harness.settle(1.0)
    (*_, forming) = harness.events(RoundForming)
    assert forming.present == ("a", "b (pid 1)", "b (pid 2)")
    harness.lose("b.1")
    (lost,) = harness.events(NodeLost)
    assert lost.name == "b (pid 1)"


def move(harness: CoordinatorHarness, name: str, other: CoordinatorHarness) -> None:
    """Move a member of one harness to the store of another."""
    other.members[name], other.done[name] = harness.members[name], []
    other.members[name].attend(b"another")
    other.settle()


@pytest.mark.parametrize(("missing", "begins"), [((), 3.0), (("e",), 8.25)])
def test_a_round_waits_for_members_of_a_round_from_another_store(
    missing: tuple[str, ...], begins: float
) -> None:
    """Until all of them have arrived, or have stopped their workers on the way."""
    settings = RoundSettings(1, 4, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    former = CoordinatorHarness(settings, "b", "d", *missing, store=b"former")
    present = CoordinatorHarness(settings, "a")
    present.settle(2)
    move(former, "b", present)
    present.settle(2.9)
    assert present.ranks.keys() == set()
    present.now = 3.0
    move(former, "d", present)
    present.settle(max(3.0, begins - 0.05))
    assert bool(present.ranks) == (not missing)
    present.settle(begins)
    assert present.ranks.keys() == {"a", "b", "d"}


@pytest.mark.parametrize("term", [1, 2])
def test_members_of_a_recovered_round_from_another_store_are_waited_for(term: int) -> None:
    """Also by a second coordinator of the store, and from the last arrival on."""
    settings = RoundSettings(1, 3, last_call_timeout=0, fence=0.25, heartbeat_timeout=5.0)
    former = CoordinatorHarness(settings, "b", "d", "e", store=b"former")
    present = CoordinatorHarness(settings)
    for _ in range(1, term):
        present.elect("c")
    present.settle(1)
    move(former, "b", present)
    present.settle(2)
    assert present.ranks == {}
    present.settle(6.2)
    assert present.ranks == {}
    present.settle(6.25)
    assert present.ranks == {"b": 0}


def test_overlap_starts_a_round_beside_the_end_of_the_last_one() -> None:
    settings = RoundSettings(1, 3, last_call_timeout=0, overlap=True)
    harness = CoordinatorHarness(settings, "a", "b", "d")
    harness.stop_slowly("b")
    harness.lose("d")
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.coordinator.round.number == 1


def test_a_joiner_that_still_probes_is_not_taken_while_the_round_stops() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b")
    harness.stop_slowly("b")
    harness.answer_no_probes("e")
    harness.join("d", "e")
    harness.settle(1)
    assert isinstance(harness.last("b"), StopRound)
    harness.members["b"].report(RoundStopped(0))
    harness.settle()
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}


# -------------------------------------------------------------------- joiners


def test_joiners_probe_before_a_round_is_formed() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    port = harness.members["a"].status.port
    harness.join("d")
    assert ("d", ProbePeers(1, "a", port)) in harness.sent
    assert harness.coordinator.round.number == 1
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}
    assert harness.events(MembershipChanged)[0].why == "d joined"


def test_joiners_of_one_burst_share_a_round() -> None:
    """Both are ready within 0.2 s."""
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b")
    harness.join("d")
    assert harness.coordinator.round.number == 0
    harness.now += 0.1
    harness.join("e")
    assert harness.coordinator.round.number == 1
    assert harness.ranks == {"a": 0, "b": 1, "d": 2, "e": 3}


def test_a_ready_joiner_waits_no_longer_than_a_burst() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b")
    harness.join("d")
    assert harness.deadline == pytest.approx(0.2)
    harness.settle(0.2)
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}


@pytest.mark.parametrize("has_tried", [False, True])
def test_losing_a_joiner_changes_nothing(has_tried: bool) -> None:
    """Before its probe, or after it."""
    harness = CoordinatorHarness(RoundSettings(1, 4, last_call_timeout=0), "a", "b")
    if not has_tried:
        harness.drop_orders("d")
    harness.join("d")
    harness.lose("d")
    harness.settle(LATE)
    assert harness.coordinator.round.number == 0
    assert [type(one) for one in harness.done["a"]] == [StartRound]


def test_a_failed_probe_is_repeated_later() -> None:
    """After 5 s; the round runs on."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    harness.drop_orders("d")
    harness.join("d")
    member = harness.members["d"]
    member.probed(1, "no route")
    harness.settle()
    (refused,) = harness.events(NodeRefused)
    assert refused.why == "it does not reach the others: no route"
    harness.sent.clear()
    harness.settle(4.9)
    assert not harness.sent
    assert harness.deadline == 5
    harness.settle(5)
    assert [(name, type(body)) for name, body in harness.sent] == [("d", ProbePeers)]
    assert harness.coordinator.round.number == 0
    member.probed(1, "")
    harness.restore_orders()
    harness.settle()
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}


def test_a_refused_joiner_does_not_replace_a_lost_node() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    harness.drop_orders("d")
    harness.join("d")
    harness.members["d"].probed(1, "no route")
    harness.settle()
    harness.restore_orders()
    harness.lose("b")
    assert harness.ranks == {"a": 0}


def test_joiners_stand_by_once_a_member_has_succeeded() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    harness.succeed("a")
    harness.join("d")
    assert harness.done["d"] == [NodeStandby(round=0, maximum=3)]
    harness.settle(LATE)
    assert harness.coordinator.round.number == 0


def test_a_member_of_an_older_round_is_stopped_first() -> None:
    """It was lost and has returned."""
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", "b")
    former = harness.members["b"]
    harness.lose("b")
    assert harness.ranks == {"a": 0}
    harness.members["b"] = former
    harness.settle(1)
    assert StopRound(0, "the others have formed another round meanwhile") in harness.done["b"]
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.coordinator.round.number == 2


def test_a_success_in_a_round_that_the_others_have_replaced_is_none() -> None:
    """The node was lost, succeeded, and has returned; the job is full without it."""
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", "b")
    former = harness.members["b"]
    harness.lose("b")
    harness.join("d")
    assert harness.ranks == {"a": 0, "d": 1}
    former.report(RoundSucceeded(0))
    harness.members["b"] = former
    harness.settle(1)
    why = "the others have formed another round meanwhile"
    assert harness.done["b"][-2:] == [StopRound(0, why), NodeStandby(round=2, maximum=2)]
    harness.lose("d")
    assert harness.ranks == {"a": 0, "b": 1}


# ------------------------------------------------------------ rejected nodes


def test_a_node_with_other_nnodes_is_rejected() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a")
    harness.add("x", RoundSettings(1, 2))
    harness.settle()
    why = "it was started with --nnodes 1:2, the job with 2"
    assert ("x", Reject(why)) in harness.sent
    conclude = harness.end_of("x")
    assert conclude.why == f"the other nodes refused this one: {why}"
    assert not harness.ranks


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"program": "x.py", "uid": 1}, ""),
        ({"program": "y.py", "uid": 1}, "it runs y.py as user 1, and the job x.py as user 1"),
        ({"program": "x.py", "uid": 2}, "it runs x.py as user 2, and the job x.py as user 1"),
    ],
)
@pytest.mark.parametrize("any_program", [False, True])
def test_a_node_with_another_program_or_user_is_refused(
    fields: dict[str, Any], why: str, any_program: bool
) -> None:
    """Two jobs that have one run id by accident do not become one."""
    settings = RoundSettings(1, 2, program="x.py", uid=1, any_program=any_program)
    harness = CoordinatorHarness(settings)
    harness.join("a", program="x.py", uid=1)
    harness.join("b", **fields)
    harness.settle(40)
    if why and not any_program:
        advice = "give each job its own --rdzv-id, or set any_program"
        assert ("b", Reject(f"{why}: {advice}")) in harness.sent
        assert harness.ranks == {"a": 0}
    else:
        assert harness.ranks == {"a": 0, "b": 1}


def test_a_node_of_another_protocol_version_is_rejected() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a")
    harness.coordinator.on_status("x", replace(status("x", harness.settings), protocol=9), 0.0)
    harness.settle()
    assert ("x", Reject("it speaks version 9 of the protocol, not 2")) in harness.sent


def test_settings_that_differ_are_published_once() -> None:
    """With both values; those of the coordinator's node apply."""
    ours = {"max_restarts": "3", "restart.window": "2 within 60 s"}
    harness = CoordinatorHarness(RoundSettings(5, 5, policy=ours))
    harness.join("a", policy=ours)
    for name in "bd":
        harness.join(name, policy={"max_restarts": "5", "restart.decide": "ask"})
    harness.join("e", policy=ours, node=NodeInfo("e", 1, 4, "default"))
    harness.join("f", policy=ours, node=NodeInfo("f", 1, 4, "reader"))
    assert {one.name: one.differs for one in harness.events(NodeJoined)} == {
        "a": (),
        "b": (
            "max_restarts is 5, but 3 on the node of the coordinator",
            "restart.decide is ask, but the default on the node of the coordinator",
            "restart.window is the default, but 2 within 60 s on the node of the coordinator",
        ),
        "d": (),
        "e": ("nproc_per_node is 4, but 1 on a (role default)",),
        "f": (),
    }
    assert len(harness.ranks) == 5


def test_fixed_ranks_are_in_range() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, fixed_ranks=True))
    harness.join("a", preferred_rank=1)
    harness.join("d", preferred_rank=2)
    reasons = [event.why for event in harness.events(NodeRefused)]
    assert reasons == ["node rank 2 is not below 2"]
    harness.settle(1)
    shown = [body for _, body in harness.sent if isinstance(body, WaitForNodes)][-1].forming
    assert isinstance(shown, RoundForming)
    assert shown.missing == ("rank 0",)
    harness.join("e", preferred_rank=0)
    assert {name: rank for name, rank in harness.ranks.items() if name in "ae"} == {"a": 1, "e": 0}


HELD = "node rank 1 is held by b (pid 1)"


def ranked(*names: str, **settings: Any) -> CoordinatorHarness:
    """Return a job with fixed ranks, the first node with rank 0, all others with rank 1."""
    harness = CoordinatorHarness(RoundSettings(2, 2, fixed_ranks=True, **settings))
    for rank, name in enumerate(names):
        harness.join(name, preferred_rank=min(rank, 1))
    return harness


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_replacement_waits_for_its_predecessor_to_be_gone(is_lost: bool) -> None:
    """It is not refused: the lease of the dead node has not ended yet."""
    harness = ranked("a", "b", "b2")
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.done["b2"] == [NodeStandby(round=0, maximum=2, why=HELD)]
    (refused,) = harness.events(NodeRefused)
    assert (refused.name, refused.why) == ("b2", HELD)
    harness.lose("b", is_lost=is_lost)
    assert harness.ranks == {"a": 0, "b2": 1}
    assert harness.events(JobFinished) == []


def test_a_replacement_waits_while_the_round_is_forming() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, fixed_ranks=True))
    harness.join("b", preferred_rank=1)
    harness.join("b2", preferred_rank=1)
    assert harness.done["b2"] == [NodeStandby(round=-1, maximum=2, why=HELD)]
    harness.lose("b")
    harness.join("a", preferred_rank=0)
    assert harness.ranks == {"a": 0, "b2": 1}


def test_a_second_claimant_of_a_rank_is_refused() -> None:
    """The lease of a dead holder would have ended."""
    harness = ranked("a", "b", "b2", heartbeat_timeout=5)
    harness.settle(6.9)
    assert len(harness.done["b2"]) == 1
    assert harness.deadline == 7
    harness.settle(7)
    end = harness.end_of("b2")
    assert end.why == f"the other nodes refused this one: {HELD}"
    assert end.exit_code == 75
    assert harness.ranks == {"a": 0, "b": 1}


def test_the_member_of_the_round_holds_the_rank_under_another_coordinator() -> None:
    """Which may read the status of the claimant first."""
    harness = ranked("a", "b", "b2")
    harness.members = {name: harness.members[name] for name in ("b2", "b", "a")}
    harness.elect("d")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert harness.ranks == {"a": 0, "b": 1}
    harness.lose("b")
    assert harness.ranks == {"a": 0, "b2": 1}


def test_a_predecessor_that_returns_stops_its_workers_and_stands_by() -> None:
    harness = ranked("a", "b", "b2")
    former = harness.members["b"]
    harness.lose("b")
    harness.members["b"] = former
    harness.settle(1)
    assert harness.ranks == {"a": 0, "b2": 1}
    why = "node rank 1 is held by b2 (pid 1)"
    assert harness.done["b"][-2:] == [
        StopRound(0, why),
        NodeStandby(round=1, maximum=2, why=why),
    ]


def test_a_claimant_is_refused_when_the_job_ends() -> None:
    """It has run nothing, so the success is not its own."""
    harness = ranked("a", "b", "b2")
    harness.succeed("a", "b")
    assert harness.end_orders().keys() == {"a", "b", "b2"}
    end = harness.end_of("b2")
    assert end.why == f"the other nodes refused this one: {HELD}"
    assert end.exit_code == 75


def test_a_coordinator_with_other_nnodes_takes_those_of_the_round() -> None:
    """The node of the coordinator is the one that was started with wrong options."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.settings = RoundSettings(1, 8)
    harness.elect("x")
    harness.add("x", RoundSettings(1, 8))
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert [name for name, body in harness.sent if isinstance(body, Reject)] == ["x"]


# ------------------------------------------------------------------- failures


def test_a_failure_stops_the_round_and_is_followed_by_a_restart() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.fail("b", failure(3))
    assert StopRound(0, "a worker on b has failed") in harness.done["a"]
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.numbers("a") == harness.numbers("b") == (1, 1, 1, 0)
    assert len(harness.events(AttemptFailed)) == 1
    (restarting,) = harness.events(Restarting)
    assert (restarting.why, restarting.restarts) == ("restart 1 of 3 (max restarts)", 1)


def test_the_policy_is_consulted_once_all_workers_are_stopped() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.drop_orders("a")
    harness.fail("b")
    assert harness.is_in(CoordinatorPhase.STOPPING)
    harness.members["a"].report(RoundStopped(0))
    harness.settle()
    assert harness.coordinator.round.number == 1


def test_the_earliest_failure_is_the_root_cause() -> None:
    """On any node; a victim is never the root cause."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=0)
    harness.drop_orders("a")
    harness.fail("b", failure(5, time=20.0))
    early, victim = failure(4, time=10.0), failure(9, time=1.0, is_victim=True)
    harness.members["a"].report(RoundStopped(0, (early, victim)))
    harness.restore_orders()
    harness.settle()
    outcome = harness.outcome
    assert outcome.failures == (early, failure(5, time=20.0), victim)
    assert outcome.exit_code == 4
    assert outcome.why == "no restarts allowed (max restarts: 0)"
    assert {one.outcome for one in harness.end_orders().values()} == {outcome}


def test_failures_of_all_nodes_share_one_budget() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=2)
    harness.fail("a")
    harness.fail("b")
    harness.fail("a", failure(7))
    outcome = harness.outcome
    assert outcome.state is JobState.FAILED
    assert (outcome.why, outcome.restarts, outcome.exit_code) == (
        "all 2 restarts are used up (max restarts)",
        2,
        7,
    )


def test_the_delay_is_announced_and_kept() -> None:
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", restart=policy)
    harness.fail("b")
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    assert [pause.cause.delay for pause in harness.pending_restarts()] == [8, 8]
    assert harness.deadline == 8
    harness.settle(7.9)
    assert not harness.ranks
    harness.settle(8)
    assert harness.ranks == {"a": 0, "b": 1}


@pytest.mark.parametrize("answer", list(RestartAction))
def test_the_callback_decides(answer: RestartAction) -> None:
    policy = RestartPolicy(never_on=[3])
    harness = CoordinatorHarness(RoundSettings(2, 2, has_decide=True), "a", "b", restart=policy)
    harness.fail("b", failure(3))
    assert harness.is_in(CoordinatorPhase.DECIDING)
    assert harness.decision_requests == [failure(3)]
    harness.settle(500)
    assert harness.is_in(CoordinatorPhase.DECIDING)
    harness.answer(answer)
    reasons = {
        RestartAction.RESTART: None,
        RestartAction.GIVE_UP: "restart.decide returned GIVE_UP",
        RestartAction.DEFAULT: "exit code 3 is in the never-on list",
        RestartAction.EXCLUDE: None,
    }
    outcome = harness.coordinator.outcome
    assert (outcome and outcome.why) == reasons[answer]


def test_a_callback_that_fails_ends_the_job() -> None:
    """Its error is the reason; the exit code is the worker's."""
    harness = CoordinatorHarness(RoundSettings(1, 1, has_decide=True), "a")
    harness.fail("a", failure(3))
    harness.coordinator.on_decision("restart.decide raised ValueError()")
    harness.settle()
    outcome = harness.outcome
    assert (outcome.why, outcome.exit_code) == ("restart.decide raised ValueError()", 3)


def test_the_callback_is_not_called_without_restarts_left() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 1, has_decide=True), "a", max_restarts=0)
    harness.fail("a")
    assert not harness.decision_requests
    assert harness.is_in(CoordinatorPhase.ENDING)


def test_a_permanent_failure_ends_the_job() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2, has_decide=True), "a", "b")
    harness.fail("b", is_permanent=True, permanent_reason="no such program", exit_code=127)
    outcome = harness.outcome
    assert (outcome.why, outcome.exit_code) == ("no such program", 127)
    assert not harness.decision_requests


def test_a_failure_of_a_lost_node_costs_no_restart() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b")
    harness.drop_orders("a")
    harness.fail("b")
    harness.lose("b")
    harness.members["a"].report(RoundStopped(0))
    harness.restore_orders()
    harness.settle()
    placement = harness.place("a")
    assert (placement.round, placement.restarts, placement.changes) == (1, 0, 1)


def test_workers_that_a_node_has_stopped_by_itself_are_restarted() -> None:
    """It was without a store for too long."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.perform("b", harness.members["b"].isolate("no store"))
    harness.settle()
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.coordinator.round.number == 1
    assert harness.events(MembershipChanged)[0].why == "the workers of b were stopped"


# --------------------------------------------------------------------- the end


def test_the_job_succeeds_when_all_members_have() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.succeed("a")
    assert harness.is_in(CoordinatorPhase.RUNNING)
    harness.succeed("b")
    assert {one.outcome.state for one in harness.end_orders().values()} == {JobState.SUCCEEDED}
    assert harness.end_orders().keys() == {"a", "b"}
    assert len(harness.events(JobFinished)) == 1
    harness.lose("a", "b", is_lost=False)
    assert isinstance(harness.published[-1], JobFinished), "the last event"


def test_a_member_may_leave_after_its_success() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    assert harness.ranks == {"b": 1}
    assert harness.coordinator.round.number == 0
    harness.succeed("b")
    assert harness.outcome.state is JobState.SUCCEEDED


def test_standby_nodes_get_the_outcome() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.join("d")
    harness.succeed("a", "b")
    assert harness.end_orders().keys() == {"a", "b", "d"}


# -------------------------------------------------------- another coordinator


def test_a_running_round_is_recovered_without_orders() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.fail("a")
    harness.sent.clear()
    harness.elect("d")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert (harness.coordinator.round.number, harness.coordinator.round.attempt) == (1, 1)
    assert not harness.sent
    harness.fail("b")
    assert harness.numbers("b")[::2] == (2, 2), "the restart before is not forgotten"


def test_recovery_waits_for_members_of_the_round() -> None:
    """For 0.7 s."""
    harness = CoordinatorHarness(RoundSettings(1, 3), "a", "b", "d")
    away = {name: harness.members.pop(name) for name in "bd"}
    harness.elect("e")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RECOVERING)
    assert harness.deadline == pytest.approx(0.7)
    harness.members["b"] = away["b"]
    harness.settle(0.6)
    assert harness.is_in(CoordinatorPhase.RECOVERING)
    harness.settle(0.7)
    assert harness.ranks == {"a": 0, "b": 1}
    placement = harness.place("a")
    assert (placement.round, placement.restarts, placement.changes) == (1, 0, 1)
    why = harness.events(MembershipChanged)[0].why
    assert why == "1 node (group rank 2) did not come back"


@pytest.mark.parametrize(
    ("gone", "why"),
    [("b", "node b did not come back"), ("bc", "2 nodes (b, group rank 2) did not come back")],
)
def test_the_host_of_a_lost_store_has_a_name(gone: str, why: str) -> None:
    """It takes the list of the nodes with it; the others have kept its name."""
    harness = CoordinatorHarness(RoundSettings(1, 4))
    harness.join("b", is_host=True)
    harness.join("a", "c", "d")
    harness.settle()
    for name in gone:
        del harness.members[name]
    harness.elect("e", store=b"another store")
    harness.settle()
    harness.settle(5)
    assert harness.events(MembershipChanged)[0].why == why


def test_another_store_restarts_the_workers_without_keep_workers() -> None:
    """Once."""
    harness = CoordinatorHarness(RoundSettings(2, 2, keep_workers=False), "a", "b")
    harness.elect("d")
    harness.settle()
    assert harness.coordinator.round.number == 0
    harness.elect("e", store=b"another")
    harness.settle()
    assert harness.coordinator.round.number == 1
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_success_counts_that_leaves_another_store_before_it_is_recovered() -> None:
    """The node does not wait at its barrier, so it is gone when the round is known there."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.members["a"].report(RoundSucceeded(0))
    harness.members["b"].report(RoundSucceeded(0))
    late = harness.members.pop("a")
    harness.elect("e", store=b"another")
    harness.write_statuses()
    harness.lose("b", is_lost=False)
    harness.members["a"] = late
    late.attend(b"another")
    harness.settle()
    (finished,) = harness.events(JobFinished)
    assert finished.state is JobState.SUCCEEDED


def test_the_record_of_a_newer_round_is_not_replaced() -> None:
    """A node of an older round leads, and no member of the last one is present."""
    settings = RoundSettings(1, 2, last_call_timeout=0, fence=5.0)
    harness = CoordinatorHarness(settings, "a", "b")
    old = harness.members.pop("b")
    harness.coordinator.on_gone("b", 0.0, is_lost=True)
    harness.settle(10)
    assert harness.recorded is not None
    former = RoundRecord.decode(encode(harness.recorded))
    assert former is not None
    assert former.round > old.status.round
    harness.members = {"b": old}
    harness.elect("b", former=former)
    harness.settle()
    harness.settle(11)
    assert harness.coordinator.round.number == 0
    assert harness.recorded.round == former.round
    harness.settle(20)
    assert harness.recorded.round > former.round
    place = harness.place("b")
    assert place.attempt > former.attempt


def test_orders_of_another_store_are_obeyed() -> None:
    """A new coordinator there begins with term 1 and serial 1 again, whatever came before."""
    harness = CoordinatorHarness(RoundSettings(3, 3), "a", "b")
    for second in range(0, 300, 15):
        harness.settle(second)
    assert len([one for one in harness.sent if isinstance(one[1], WaitForNodes)]) > 20
    harness.elect("d", store=b"another")
    harness.join("d")
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}
    assert harness.coordinator.outbox.term == 1


def test_an_announced_restart_is_not_decided_again() -> None:
    """Its delay begins anew."""
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    harness = CoordinatorHarness(
        RoundSettings(2, 2, has_decide=True), "a", "b", max_restarts=1, restart=policy
    )
    harness.fail("b")
    harness.answer(RestartAction.RESTART)
    harness.now = 5
    harness.elect("d")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    assert len(harness.decision_requests) == 1
    harness.settle(13)
    assert harness.numbers("b")[::2] == (1, 1)


def test_an_announced_restart_counts_after_the_failed_node_is_lost() -> None:
    """The other member reports the announcement."""
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b", restart=policy)
    harness.fail("b")
    harness.elect("d")
    del harness.members["b"]
    harness.settle(1)
    harness.settle(2)
    assert harness.is_in(CoordinatorPhase.BACKING_OFF)
    harness.settle(20)
    assert harness.numbers("a")[::2] == (1, 1)
    assert len(harness.events(Restarting)) == 1
    assert not harness.events(MembershipChanged)


def test_a_successor_decides_about_a_pending_failure() -> None:
    """The former coordinator was lost while the round was being stopped."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=1)
    harness.drop_orders("a", "b")
    harness.fail("b")
    harness.restore_orders()
    harness.elect("d")
    harness.settle()
    assert harness.numbers("a")[::2] == (1, 1)


def test_a_successor_recovers_the_outcome() -> None:
    """One member has read it."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.drop_orders("b")
    harness.succeed("a", "b")
    harness.restore_orders()
    harness.elect("d")
    harness.settle()
    assert harness.end_orders().keys() == {"a", "b"}
    assert harness.end_orders()["b"].outcome.state is JobState.SUCCEEDED


def test_a_start_order_of_a_predecessor_is_dropped() -> None:
    """It arrives after the successor has formed another round."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b", "d")
    harness.drop_orders("a", "b")
    harness.lose("d")
    orders = {name: body for name, body in harness.sent if isinstance(body, StartRound)}
    harness.restore_orders()
    harness.elect("e")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RECOVERING)
    harness.settle(1)
    assert harness.coordinator.round.number == 1
    ranks = harness.ranks
    # What the first one gave reaches b only now.
    late = Member("late", harness.members["b"].status)
    assert orders["b"].placement.formed_by == "1.c@store"
    assert late.on_order(Order(1, 50, orders["b"])) == []
    assert ranks == {"a": 0, "b": 1}


def test_a_round_waits_for_members_that_may_obey_a_predecessor() -> None:
    """The order of the predecessor is still on its way, and the status says nothing of it."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a")
    harness.drop_orders("b")
    harness.join("b")
    order = harness.dropped["b"]
    assert isinstance(order.body, StartRound)
    harness.elect("e")
    harness.settle()
    harness.settle(1)
    assert harness.ranks == {}, "a has stopped, and b may start"
    harness.perform("b", harness.members["b"].on_order(order))
    harness.settle(2)
    assert harness.ranks == {"b": 1}
    order = harness.dropped["b"]
    assert isinstance(order.body, StopRound)
    harness.restore_orders()
    harness.perform("b", harness.members["b"].on_order(order))
    harness.settle(3)
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.coordinator.round.number == 1


def test_a_successor_learns_how_many_members_are_done() -> None:
    harness = CoordinatorHarness(RoundSettings(3, 3), "a", "b", "d")
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    harness.elect("e")
    harness.settle()
    harness.settle(10)
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert harness.coordinator.round.number == 0
    harness.succeed("b", "d")
    assert {one.outcome.state for one in harness.end_orders().values()} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("successions", [1, 2])
def test_a_returning_member_is_not_counted_as_done(successions: int) -> None:
    """A successor still waits for the running member."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b", "d")
    harness.succeed("a")
    back = harness.members["a"]
    harness.lose("a")
    if successions == 2:
        harness.elect("e")
        harness.settle()
    harness.members["a"] = back
    harness.settle()
    harness.succeed("b")
    running = harness.members.pop("d")
    harness.elect("f")
    harness.settle()
    assert harness.is_in(CoordinatorPhase.RECOVERING)
    harness.members["d"] = running
    harness.settle()
    assert (harness.coordinator.round.number, harness.is_in(CoordinatorPhase.RUNNING)) == (0, True)
    harness.succeed("d")
    assert harness.end_orders().keys() == {"a", "b", "d"}


def test_joiners_stand_by_once_a_member_is_done() -> None:
    """Under a successor too."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    harness.elect("e")
    harness.join("d")
    harness.settle(10)
    assert harness.done["d"] == [NodeStandby(round=0, maximum=3)]


def test_a_diverged_member_is_taken_into_another_round() -> None:
    """Numbers continue from the highest that it has seen."""
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0), "a", "b")
    placement = harness.place("b")
    elsewhere = replace(placement, round=5, formed_by="1.x", attempt=5, restarts=2)
    b = harness.members["b"]
    b.attend(b"another")
    harness.perform("b", b.on_order(Order(1, 90, StartRound(elsewhere))))
    b.attend(b"store")
    harness.settle()
    for name in "ab":
        assert harness.numbers(name)[:3] == (6, 6, 2)
    assert harness.ranks == {"a": 0, "b": 1}


def test_a_placement_that_is_reported_late_is_recovered() -> None:
    """The coordinator at the new store was there first."""
    harness = CoordinatorHarness(RoundSettings(2, 4), "a", "b")
    harness.settle(30)
    veterans = dict(harness.members)
    harness.members.clear()
    harness.elect("d")
    harness.join("d")
    assert harness.is_in(CoordinatorPhase.FORMING)
    harness.members.update(veterans)
    harness.settle(31)
    assert harness.coordinator.round.number == 0
    assert [type(one) for one in harness.done["a"]] == [StartRound], "they run on"
    harness.settle(31.2)
    assert harness.ranks == {"a": 0, "b": 1, "d": 2}
    assert (harness.coordinator.round.number, harness.coordinator.round.attempt) == (1, 1)


def test_an_unchanged_order_is_sent_once() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2, last_call_timeout=0), "a", "b")
    harness.join("d")
    sent = len(harness.sent)
    for now in range(1, 100):
        harness.settle(now)
    assert len(harness.sent) == sent
    assert ("d", StandBy(0, 2)) in harness.sent


# ------------------------------------------------------- requested restarts


def test_a_requested_restart_forms_another_round_of_the_same_members() -> None:
    """It counts neither as a failure nor as a change of the membership."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=0)
    harness.members["b"].report(RestartRequested(0, "new data"))
    harness.settle()
    assert harness.ranks == {"a": 0, "b": 1}
    assert harness.numbers("a") == (1, 1, 0, 0)
    assert harness.members["b"].status.restart_reason == ""
    assert harness.events(Restarting) == [
        Restarting(attempt=1, why="new data (on b)", delay=0.0, restarts=0)
    ]
    assert not harness.events(MembershipChanged)


def test_a_requested_restart_of_a_former_round_is_dropped() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.members["b"].report(RestartRequested(-1, "late"))
    harness.settle()
    assert not harness.events(Restarting)


def test_another_coordinator_grants_a_requested_restart() -> None:
    """The request is in the status of the member until a round follows."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.members["b"].report(RestartRequested(0, "new data"))
    harness.elect("d")
    harness.settle()
    assert harness.events(Restarting) == [
        Restarting(attempt=1, why="new data (on b)", delay=0.0, restarts=0)
    ]
    assert harness.place("b").attempt == 1


def test_a_lost_member_comes_before_a_requested_restart() -> None:
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b")
    harness.stop_slowly("a")
    harness.members.pop("b")
    harness.coordinator.on_gone("b", harness.now, is_lost=True)
    harness.members["a"].report(RestartRequested(0, "new data"))
    harness.settle()
    harness.members["a"].report(RoundStopped(0))
    harness.settle(100)
    assert not harness.events(Restarting)
    assert harness.events(MembershipChanged) == [
        MembershipChanged(attempt=1, why="b is lost", round=1, nodes=1)
    ]


def test_a_placement_may_arrive_later_than_its_member() -> None:
    """A suspended coordinator keeps a member that has had a round at another store meanwhile."""
    settings = RoundSettings(2, 2)
    placed = CoordinatorHarness(settings, "a", "b").members["a"].status
    joined = status("a", settings)
    record = MemberRecord("a", joined, 1.0)
    record.observe(joined, 1.0)
    assert record.arrived_at == 1.0
    record.observe(placed, 9.0)
    record.observe(replace(placed, serial=placed.serial + 1), 10.0)
    assert record.arrived_at == 9.0
    record.observe(replace(placed, moves=placed.moves + 1), 11.0)
    assert (record.joined_at, record.arrived_at) == (1.0, 11.0)
