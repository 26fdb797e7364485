"""The coordinator: every rule and every row of its table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from elastic_aio.backoff import Backoff
from elastic_aio.events import (
    AttemptFailed,
    JobFinished,
    MembershipChanged,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    Promoted,
    Restarting,
    RoundFormed,
    RoundForming,
    StandingBy,
)
from elastic_aio.outcome import JobState
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED, Begin, Conclude, Ended, Halt
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.state import Phase, Rules
from elastic_aio.rendezvous.tickets import Gathering, Order, Prepare, Refuse, StandBy, Stay
from tests.support.stage import Stage, failure, ticket

LATE = 1_000_000.0


# ------------------------------------------------------------------ forming


def test_the_first_round_is_formed_when_all_have_come() -> None:
    """A full house is not waited for any longer."""
    stage = Stage(Rules(2, 3), "a", "b")
    assert stage.is_in(Phase.FORMING)
    stage.come("d")
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}
    assert stage.is_in(Phase.RUNNING)
    assert [type(one) for one in stage.events(RoundFormed, NodeJoined)].count(NodeJoined) == 3


def test_the_first_round_waits_for_its_last_call() -> None:
    """Enough nodes wait for more, and a late one does not prolong that."""
    stage = Stage(Rules(2, 4, last_call_timeout=30), "a", "b")
    stage.go(20)
    stage.come("d")
    assert not stage.ranks
    stage.go(29.9)
    assert not stage.ranks
    stage.go(30)
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}


def test_the_last_call_begins_anew_when_there_are_too_few() -> None:
    """One that leaves again has not been enough."""
    stage = Stage(Rules(2, 4, last_call_timeout=30), "a", "b")
    stage.go(10)
    stage.lose("b")
    stage.now = 20
    stage.come("d")
    stage.go(49)
    assert not stage.ranks
    stage.go(50)
    assert stage.ranks == {"a": 0, "d": 1}


def test_deadlines_are_what_has_to_be_waited_for() -> None:
    """Whoever calls at each deadline misses nothing."""
    stage = Stage(Rules(1, 2, last_call_timeout=30), "a")
    seen = []
    while not stage.ranks:
        deadline = stage.coordinator.deadline
        assert deadline is not None
        assert deadline > stage.now
        seen.append(deadline)
        stage.go(deadline)
    assert seen[-1] == 30
    assert len(seen) < 6


def test_the_node_that_serves_the_store_has_group_rank_0() -> None:
    """Unless somebody wishes to."""
    stage = Stage(Rules(2, 2))
    stage.come("a")
    stage.come("b", is_host=True)
    assert stage.ranks == {"a": 1, "b": 0}
    stage = Stage(Rules(2, 2))
    stage.come("a", wish=0)
    stage.come("b", is_host=True)
    assert stage.ranks == {"a": 0, "b": 1}


def test_wishes_are_granted_where_they_can_be() -> None:
    """Two that wish for the same get what is left, in the order of coming."""
    stage = Stage(Rules(4, 4))
    stage.come("a", wish=2)
    stage.come("b", wish=2)
    stage.come("d", wish=9)
    stage.come("e")
    assert stage.ranks == {"a": 2, "b": 0, "d": 1, "e": 3}


def test_placements_say_the_same_to_all() -> None:
    """Address and port are those of group rank 0, and the world is the sum of all workers."""
    stage = Stage(Rules(2, 2))
    stage.come("a")
    stage.members["a"].reserved(77)
    stage.come("b")
    a, b = stage.places["a"], stage.places["b"]
    assert a is not None
    assert b is not None
    assert (a.master_addr, a.master_port) == (b.master_addr, b.master_port) == ("a", 77)
    assert (a.span.first_rank, b.span.first_rank) == (0, 1)
    assert a.span.world_size == b.span.world_size == 2
    assert a.attempt == a.restarts == a.changes == a.round == 0
    assert a.origin == b.origin


def test_too_few_are_told_who_is_missing_and_then_give_up() -> None:
    """The last words name who is here, who was here before, and who was refused."""
    stage = Stage(Rules(3, 3, join_timeout=600), "a", "b", "d")
    stage.lose("b")
    stage.members["x"] = Member(ticket("x", Rules(1, 8)))
    stage.done["x"] = []
    stage.go(1)
    shown = stage.events(RoundForming)[-1]
    assert isinstance(shown, RoundForming)
    assert (shown.joined, shown.missing, shown.present) == (2, ("b",), ("a", "d"))
    assert shown.time_left == 599
    stage.go(599.9)
    assert stage.is_in(Phase.FORMING)
    stage.go(600)
    ending = stage.coordinator.ending
    assert ending is not None
    assert ending.is_rendezvous
    assert ending.exit_code == RENDEZVOUS_FAILED
    assert ending.why == (
        "only 2 of 3 nodes came together (a, d); missing: b; refused: x: it was started with"
        " --nnodes 1:8, the job with 3; waited 600 s (join_timeout)"
    )
    assert {name for name, body in stage.sent if body == Conclude(ending)} == {"a", "d"}


def test_those_who_wait_are_told_once_in_a_while() -> None:
    """A wait of ten minutes is some forty lines, not thousands."""
    stage = Stage(Rules(2, 2, join_timeout=600), "a")
    for second in range(599):
        stage.go(second)
    told = [body for _, body in stage.sent if isinstance(body, Stay)]
    assert 35 <= len(told) <= 45


# -------------------------------------------------------------- the membership


def test_a_loss_is_mended_by_those_who_are_left() -> None:
    """Group ranks stay as they are as far as that is possible; no restart is counted."""
    stage = Stage(Rules(1, 3), "a", "b", "d")
    stage.lose("b")
    assert stage.ranks == {"a": 0, "d": 1}
    held = stage.places["a"]
    assert held is not None
    assert (held.round, held.attempt, held.restarts, held.changes) == (1, 1, 0, 1)
    assert stage.events(NodeLost)
    (change,) = stage.events(MembershipChanged)
    assert isinstance(change, MembershipChanged)
    assert (change.why, change.nodes, change.round) == ("b is lost", 2, 1)


def test_one_that_leaves_is_no_loss() -> None:
    """The story tells leaving from dying."""
    stage = Stage(Rules(1, 2), "a", "b")
    stage.lose("b", is_lost=False)
    assert stage.events(NodeLeft)
    assert not stage.events(NodeLost)
    assert stage.events(MembershipChanged)[0].why == "b has left"  # type: ignore[attr-defined]


def test_a_spare_takes_the_vacated_rank() -> None:
    """The others keep theirs, and the world stays as large."""
    stage = Stage(Rules(3, 3), "a", "b", "d")
    stage.come("e")
    assert stage.done["e"] == [StandingBy(round=0, maximum=3)]
    stage.lose("b")
    assert stage.ranks == {"a": 0, "e": 1, "d": 2}
    assert [type(one) for one in stage.done["e"]] == [StandingBy, Promoted, Begin]


def test_the_first_node_is_replaced_like_any_other() -> None:
    """Group rank 0 goes to the newcomer, with its address."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.come("d")
    stage.lose("a")
    assert stage.ranks == {"d": 0, "b": 1}
    held = stage.places["b"]
    assert held is not None
    assert held.master_addr == "d"


def test_too_few_stop_and_wait_and_go_on_with_the_next() -> None:
    """Below the minimum nothing runs; whoever comes then is enough at once."""
    stage = Stage(Rules(2, 3, last_call_timeout=0), "a", "b")
    stage.lose("b")
    assert stage.is_in(Phase.FORMING)
    assert stage.last("a") == Halt(0, "b is lost: only 1 node of 2:3 left")
    stage.come("d")
    assert stage.ranks == {"a": 0, "d": 1}
    held = stage.places["d"]
    assert held is not None
    assert (held.round, held.changes, held.restarts) == (1, 1, 0)


def test_a_fresh_port_is_waited_for() -> None:
    """A round in the place of one whose beginning is under way has another port."""
    stage = Stage(Rules(1, 3, last_call_timeout=0))
    stage.come("a", "b", "d")
    stage.go_deaf("a")
    stage.lose("b")
    stage.lose("d")
    assert stage.coordinator.round == 1, "a has not yet taken its place in it"
    stage.hear()
    sent = next(body for member, body in reversed(stage.sent) if member == "a")
    stage.act("a", stage.members["a"].order(Order(1, 100, sent)))
    stage.go()
    first, second = (one for one in stage.done["a"][-2:] if isinstance(one, Begin))
    assert (first.placement.round, second.placement.round) == (1, 2)
    assert first.placement.master_port != second.placement.master_port


# ------------------------------------------------------------------ newcomers


def test_newcomers_prove_first_that_they_reach_the_others() -> None:
    """Nobody is stopped before; then all get one round more."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    port = stage.members["a"].ticket.port
    stage.come("d")
    assert ("d", Prepare(1, "a", port)) in stage.sent
    assert stage.coordinator.round == 1
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}
    assert stage.events(MembershipChanged)[0].why == "d joined"  # type: ignore[attr-defined]


def test_newcomers_that_come_together_are_taken_in_together() -> None:
    """Of two that are ready at about the same time, none stops the others twice."""
    stage = Stage(Rules(1, 4, last_call_timeout=0), "a", "b")
    stage.come("d")
    assert stage.coordinator.round == 0
    stage.now += 0.1
    stage.come("e")
    assert stage.coordinator.round == 1
    assert stage.ranks == {"a": 0, "b": 1, "d": 2, "e": 3}


def test_one_newcomer_is_waited_for_no_longer_than_a_burst() -> None:
    """A free place that nobody takes holds nobody up."""
    stage = Stage(Rules(1, 4, last_call_timeout=0), "a", "b")
    stage.come("d")
    assert stage.coordinator.deadline == pytest.approx(0.2)
    stage.go(0.2)
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}


@pytest.mark.parametrize("has_tried", [False, True])
def test_a_newcomer_that_dies_meanwhile_changes_nothing(has_tried: bool) -> None:
    """Neither before nor after it has reached the others."""
    stage = Stage(Rules(1, 4, last_call_timeout=0), "a", "b")
    if not has_tried:
        stage.go_deaf("d")
    stage.come("d")
    stage.lose("d")
    stage.go(LATE)
    assert stage.coordinator.round == 0
    assert [type(one) for one in stage.done["a"]] == [Begin]


def test_a_newcomer_that_does_not_reach_the_others_may_try_again_later() -> None:
    """It is refused with the reason, and nobody is stopped for its sake."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    stage.go_deaf("d")
    stage.come("d")
    member = stage.members["d"]
    member.probed(1, "no route")
    stage.go()
    (refused,) = stage.events(NodeRefused)
    assert isinstance(refused, NodeRefused)
    assert refused.why == "it does not reach the others: no route"
    stage.sent.clear()
    stage.go(4.9)
    assert not stage.sent
    assert stage.coordinator.deadline == 5
    stage.go(5)
    assert [(name, type(body)) for name, body in stage.sent] == [("d", Prepare)]
    assert stage.coordinator.round == 0
    member.probed(1, "")
    stage.hear()
    stage.go()
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}


def test_who_does_not_reach_the_others_takes_no_place_of_one_that_is_lost() -> None:
    """It would only fail there."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    stage.go_deaf("d")
    stage.come("d")
    stage.members["d"].probed(1, "no route")
    stage.go()
    stage.hear()
    stage.lose("b")
    assert stage.ranks == {"a": 0}


def test_nobody_is_taken_in_while_members_have_succeeded_already() -> None:
    """What is left of the work would be too little to begin anew."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    stage.succeed("a")
    stage.come("d")
    assert stage.done["d"] == [StandingBy(round=0, maximum=3)]
    stage.go(LATE)
    assert stage.coordinator.round == 0


def test_one_that_still_runs_an_older_round_is_halted_first() -> None:
    """It was lost, and the others have gone on without it."""
    stage = Stage(Rules(1, 2, last_call_timeout=0), "a", "b")
    former = stage.members["b"]
    stage.lose("b")
    assert stage.ranks == {"a": 0}
    stage.members["b"] = former
    stage.go(1)
    assert Halt(0, "the others have formed another round meanwhile") in stage.done["b"]
    assert stage.ranks == {"a": 0, "b": 1}
    assert stage.coordinator.round == 2


# -------------------------------------------------------------------- misfits


def test_a_node_with_other_numbers_is_refused() -> None:
    """It is told so, and never counted."""
    stage = Stage(Rules(2, 2), "a")
    stage.members["x"] = Member(ticket("x", Rules(1, 2)))
    stage.done["x"] = []
    stage.go()
    why = "it was started with --nnodes 1:2, the job with 2"
    assert ("x", Refuse(why)) in stage.sent
    conclude = stage.last("x")
    assert isinstance(conclude, Conclude)
    assert conclude.ending.why == f"the other nodes refused this one: {why}"
    assert not stage.ranks


def test_a_node_of_another_version_is_refused() -> None:
    """Whatever else it says."""
    stage = Stage(Rules(2, 2), "a")
    stage.coordinator.ticket("x", replace(ticket("x", stage.rules), protocol=9))
    stage.go()
    assert ("x", Refuse("it speaks version 9 of the protocol, not 1")) in stage.sent


def test_ranks_that_are_orders_are_given_once() -> None:
    """The second node of one rank, and one beyond the last, are refused by name."""
    stage = Stage(Rules(2, 2, is_ranked=True))
    stage.come("a", wish=1)
    stage.come("b", wish=1)
    stage.come("d", wish=2)
    whys = [event.why for event in stage.events(NodeRefused)]  # type: ignore[attr-defined]
    assert whys == ["node rank 1 is taken by a", "node rank 2 is not below 2"]
    stage.go(1)
    shown = [body for _, body in stage.sent if isinstance(body, Stay)][-1].gathering
    assert isinstance(shown, Gathering)
    assert shown.missing == ("rank 0",)
    stage.come("e", wish=0)
    assert {name: rank for name, rank in stage.ranks.items() if name in "ae"} == {"a": 1, "e": 0}


def test_a_coordinator_with_other_numbers_refuses_nobody_who_runs() -> None:
    """The job is as those who run it were told; it is the coordinator who is wrong."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.rules = Rules(1, 8)
    stage.elect("x")
    stage.members["x"] = Member(ticket("x", Rules(1, 8)))
    stage.done["x"] = []
    stage.go()
    assert stage.is_in(Phase.RUNNING)
    assert [name for name, body in stage.sent if isinstance(body, Refuse)] == ["x"]


# ------------------------------------------------------------------- failures


def test_a_failure_halts_all_and_is_followed_by_a_restart() -> None:
    """The next attempt has the same ranks, and all count the restart."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.fail("b", failure(3))
    assert Halt(0, "a worker on b has failed") in stage.done["a"]
    assert stage.ranks == {"a": 0, "b": 1}
    for held in stage.places.values():
        assert held is not None
        assert (held.round, held.attempt, held.restarts, held.changes) == (1, 1, 1, 0)
    assert len(stage.events(AttemptFailed)) == 1
    (restarting,) = stage.events(Restarting)
    assert isinstance(restarting, Restarting)
    assert (restarting.why, restarting.restarts) == ("restart 1 of 3 (max_restarts)", 1)


def test_nothing_is_judged_before_all_is_quiet() -> None:
    """A node that still stops its workers is waited for."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.go_deaf("a")
    stage.fail("b")
    assert stage.is_in(Phase.HALTING)
    stage.members["a"].report(Ended(0))
    stage.go()
    assert stage.coordinator.round == 1


def test_the_earliest_failure_is_the_root() -> None:
    """Wherever it was, and victims never."""
    stage = Stage(Rules(2, 2), "a", "b", max_restarts=0)
    stage.go_deaf("a")
    stage.fail("b", failure(5, time=20.0))
    early, victim = failure(4, time=10.0), failure(9, time=1.0, is_victim=True)
    stage.members["a"].report(Ended(0, (early, victim)))
    stage.hear()
    stage.go()
    ending = stage.coordinator.ending
    assert ending is not None
    assert ending.failures == (early, failure(5, time=20.0), victim)
    assert ending.exit_code == 4
    assert ending.why == "no restarts allowed (max_restarts is 0)"
    assert {one.ending for one in stage.concluded().values()} == {ending}


def test_the_budget_is_used_up_once_for_all() -> None:
    """Failures on different nodes count together."""
    stage = Stage(Rules(2, 2), "a", "b", max_restarts=2)
    stage.fail("a")
    stage.fail("b")
    stage.fail("a", failure(7))
    ending = stage.coordinator.ending
    assert ending is not None
    assert ending.state is JobState.FAILED
    assert (ending.why, ending.restarts, ending.exit_code) == (
        "all 2 restarts are used up (max_restarts)",
        2,
        7,
    )


def test_a_delay_is_told_and_kept() -> None:
    """All know for what is waited."""
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    stage = Stage(Rules(2, 2), "a", "b", restart=policy)
    stage.fail("b")
    assert stage.is_in(Phase.PAUSING)
    assert [pause.cause.delay for pause in stage.paused()] == [8, 8]
    assert stage.coordinator.deadline == 8
    stage.go(7.9)
    assert not stage.ranks
    stage.go(8)
    assert stage.ranks == {"a": 0, "b": 1}


@pytest.mark.parametrize("answer", list(Action))
def test_the_callback_decides(answer: Action) -> None:
    """The coordinator asks once, and does what it is told."""
    policy = RestartPolicy(never_on=[3])
    stage = Stage(Rules(2, 2, asks=True), "a", "b", restart=policy)
    stage.fail("b", failure(3))
    assert stage.is_in(Phase.ASKING)
    assert [(one.attempt, one.failure) for one in stage.asked] == [(0, failure(3))]
    stage.coordinator.decided(7, Action.GIVE_UP)  # about something else
    stage.go(LATE)
    assert stage.is_in(Phase.ASKING)
    stage.answer(answer)
    whys = {
        Action.RESTART: None,
        Action.GIVE_UP: "restart.decide said to give up",
        Action.BY_POLICY: "exit code 3 is in restart.never_on",
    }
    ending = stage.coordinator.ending
    assert (ending and ending.why) == whys[answer]


def test_a_callback_that_fails_ends_the_job() -> None:
    """Its failure is the reason, the worker's is the exit code."""
    stage = Stage(Rules(1, 1, asks=True), "a")
    stage.fail("a", failure(3))
    stage.coordinator.decide_failed(0, "restart.decide raised ValueError()")
    stage.go()
    ending = stage.coordinator.ending
    assert ending is not None
    assert (ending.why, ending.exit_code) == ("restart.decide raised ValueError()", 3)


def test_a_callback_is_not_asked_in_vain() -> None:
    """Not when there is no restart left."""
    stage = Stage(Rules(1, 1, asks=True), "a", max_restarts=0)
    stage.fail("a")
    assert not stage.asked
    assert stage.is_in(Phase.ENDING)


def test_a_final_failure_is_not_tried_again() -> None:
    """A program that does not exist will not exist next time."""
    stage = Stage(Rules(2, 2, asks=True), "a", "b")
    stage.fail("b", is_final=True, final_why="no such program", exit_code=127)
    ending = stage.coordinator.ending
    assert ending is not None
    assert (ending.why, ending.exit_code) == ("no such program", 127)
    assert not stage.asked


def test_a_node_that_fails_and_dies_costs_no_restart() -> None:
    """Nothing of the failure is left to be judged."""
    stage = Stage(Rules(1, 2), "a", "b")
    stage.go_deaf("a")
    stage.fail("b")
    stage.lose("b")
    stage.members["a"].report(Ended(0))
    stage.hear()
    stage.go()
    held = stage.places["a"]
    assert held is not None
    assert (held.round, held.restarts, held.changes) == (1, 0, 1)


def test_workers_that_were_stopped_unasked_are_started_again() -> None:
    """A node that found no store for too long has stopped them, and comes back."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.act("b", stage.members["b"].cut_off("no store"))
    stage.go()
    assert stage.ranks == {"a": 0, "b": 1}
    assert stage.coordinator.round == 1
    assert stage.events(MembershipChanged)[0].why == "the workers of b were stopped"  # type: ignore[attr-defined]


# --------------------------------------------------------------------- the end


def test_the_job_succeeds_when_all_have() -> None:
    """Not before, and for all in the same way."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.succeed("a")
    assert stage.is_in(Phase.RUNNING)
    stage.succeed("b")
    assert {one.ending.state for one in stage.concluded().values()} == {JobState.SUCCEEDED}
    assert stage.concluded().keys() == {"a", "b"}
    assert len(stage.events(JobFinished)) == 1
    before = stage.coordinator.is_over
    stage.lose("a", "b", is_lost=False)
    assert (before, stage.coordinator.is_over) == (False, True)
    assert isinstance(stage.told[-1], JobFinished), "the last event"


def test_one_that_leaves_after_its_success_has_succeeded() -> None:
    """Nobody has to wait for the others."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.succeed("a")
    stage.lose("a", is_lost=False)
    assert stage.ranks == {"b": 1}
    assert stage.coordinator.round == 0
    stage.succeed("b")
    assert stage.coordinator.ending is not None
    assert stage.coordinator.ending.state is JobState.SUCCEEDED


def test_those_who_stand_by_are_told_the_end_too() -> None:
    """They waited for nothing."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.come("d")
    stage.succeed("a", "b")
    assert stage.concluded().keys() == {"a", "b", "d"}


def test_the_end_is_told_to_whoever_comes_back_and_not_to_newcomers() -> None:
    """One that was away took part; one that is new begins another job."""
    stage = Stage(Rules(2, 3), "a", "b", "d")
    away = stage.members.pop("d")
    stage.succeed("a", "b")
    away.report(Ended(-1))
    stage.coordinator.gone("d", is_lost=True)
    stage.go()
    stage.succeed("a", "b")
    assert stage.is_in(Phase.ENDING)
    stage.members["d"] = away
    stage.go()
    assert "d" in stage.concluded()
    stage.come("e")
    stage.go(LATE)
    assert stage.done["e"] == []


# -------------------------------------------------------- another coordinator


def test_a_running_round_is_adopted_as_it_is() -> None:
    """Nobody is told anything."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.fail("a")
    stage.sent.clear()
    stage.elect("d")
    stage.go()
    assert stage.is_in(Phase.RUNNING)
    assert (stage.coordinator.round, stage.coordinator.attempt) == (1, 1)
    assert not stage.sent
    stage.fail("b")
    held = stage.places["b"]
    assert held is not None
    assert (held.round, held.restarts) == (2, 2), "the restart before is not forgotten"


def test_members_of_a_running_round_are_waited_for_a_moment() -> None:
    """They come to the store one after the other."""
    stage = Stage(Rules(1, 3), "a", "b", "d")
    away = {name: stage.members.pop(name) for name in "bd"}
    stage.elect("e")
    stage.go()
    assert stage.is_in(Phase.ADOPTING)
    assert stage.coordinator.deadline == pytest.approx(0.7)
    stage.members["b"] = away["b"]
    stage.go(0.6)
    assert stage.is_in(Phase.ADOPTING)
    stage.go(0.7)
    assert stage.ranks == {"a": 0, "b": 1}
    held = stage.places["a"]
    assert held is not None
    assert (held.round, held.restarts, held.changes) == (1, 0, 1)
    why = stage.events(MembershipChanged)[0].why  # type: ignore[attr-defined]
    assert why == "1 node did not come back"


def test_another_store_restarts_the_workers_only_if_that_is_wanted() -> None:
    """With `keeps_workers` off, once."""
    stage = Stage(Rules(2, 2, keeps_workers=False), "a", "b")
    stage.elect("d", is_new_store=False)
    stage.go()
    assert stage.coordinator.round == 0
    stage.elect("e", is_new_store=True)
    stage.go()
    assert stage.coordinator.round == 1
    assert stage.ranks == {"a": 0, "b": 1}


def test_an_epoch_that_somebody_has_heard_of_is_surpassed() -> None:
    """Else its orders would be dropped."""
    stage = Stage(Rules(2, 2))
    stage.come("a", epoch=7)
    assert stage.raised == [8]
    stage.come("b")
    assert stage.ranks == {"a": 0, "b": 1}
    held = stage.places["a"]
    assert held is not None
    assert held.origin == "8.c"


def test_what_was_said_is_said_again_under_a_higher_epoch() -> None:
    """An order of the lower one may have been dropped."""
    stage = Stage(Rules(3, 3), "a", "b", "d")
    stage.sent.clear()
    stage.come("e", epoch=9)
    assert {name for name, body in stage.sent if isinstance(body, Begin)} == {"a", "b", "d"}
    assert stage.coordinator.epoch == 10
    assert stage.coordinator.round == 0


def test_orders_of_another_coordinator_of_the_same_epoch_are_surpassed() -> None:
    """Two stores have counted to the same number."""
    stage = Stage(Rules(1, 1), "a")
    for _ in range(3):
        stage.fail("a")
    stage.elect("d", epoch=1)
    stage.go()
    stage.fail("a")
    assert stage.concluded().keys() == {"a"}, "an order that was not dropped"


def test_a_granted_restart_is_not_judged_again() -> None:
    """The delay begins anew, with the same words; nobody is asked twice."""
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    stage = Stage(Rules(2, 2, asks=True), "a", "b", max_restarts=1, restart=policy)
    stage.fail("b")
    stage.answer(Action.RESTART)
    stage.now = 5
    stage.elect("d")
    stage.go()
    assert stage.is_in(Phase.PAUSING)
    assert len(stage.asked) == 1
    stage.go(13)
    held = stage.places["b"]
    assert held is not None
    assert (held.round, held.restarts) == (1, 1)


def test_a_granted_restart_counts_though_the_failed_node_is_gone() -> None:
    """Whoever was told of it tells the next coordinator."""
    policy = RestartPolicy(backoff=Backoff(initial=8, jitter=False))
    stage = Stage(Rules(1, 2), "a", "b", restart=policy)
    stage.fail("b")
    stage.elect("d")
    del stage.members["b"]
    stage.go(1)
    stage.go(2)
    assert stage.is_in(Phase.PAUSING)
    stage.go(20)
    held = stage.places["a"]
    assert held is not None
    assert (held.round, held.restarts) == (1, 1)
    assert [type(one) for one in stage.events(Restarting, MembershipChanged)] == [Restarting]


def test_a_failure_that_nobody_has_judged_is_judged() -> None:
    """The former coordinator went while all were being halted."""
    stage = Stage(Rules(2, 2), "a", "b", max_restarts=1)
    stage.go_deaf("a", "b")
    stage.fail("b")
    stage.hear()
    stage.elect("d")
    stage.go()
    held = stage.places["a"]
    assert held is not None
    assert (held.round, held.restarts) == (1, 1)


def test_the_end_is_known_to_a_successor() -> None:
    """One member was told before the coordinator went."""
    stage = Stage(Rules(2, 2), "a", "b")
    stage.go_deaf("b")
    stage.succeed("a", "b")
    stage.hear()
    stage.elect("d")
    stage.go()
    assert stage.concluded().keys() == {"a", "b"}
    assert stage.concluded()["b"].ending.state is JobState.SUCCEEDED


def test_places_that_were_under_way_are_surpassed() -> None:
    """One member took a place of which the successor could not know."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b", "d")
    stage.go_deaf("a", "b")
    stage.lose("d")
    given = {name: body for name, body in stage.sent if isinstance(body, Begin)}
    stage.hear()
    stage.elect("e")
    stage.go()
    assert stage.is_in(Phase.ADOPTING)
    stage.go(1)
    assert stage.coordinator.round == 1
    ranks = stage.ranks
    # What the first one gave reaches b only now.
    late = Member(stage.members["b"].ticket)
    assert given["b"].placement.origin == "1.c"
    assert late.order(Order(1, 50, given["b"])) == []
    assert ranks == {"a": 0, "b": 1}


def test_those_who_left_after_their_success_are_not_missed() -> None:
    """A successor hears of them from those who stay."""
    stage = Stage(Rules(3, 3), "a", "b", "d")
    stage.succeed("a")
    stage.lose("a", is_lost=False)
    stage.elect("e")
    stage.go()
    stage.go(10)
    assert stage.is_in(Phase.RUNNING)
    assert stage.coordinator.round == 0
    stage.succeed("b", "d")
    assert {one.ending.state for one in stage.concluded().values()} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("successions", [1, 2])
def test_one_that_only_seemed_to_have_left_is_not_counted_twice(successions: int) -> None:
    """It comes back; a successor still waits for the one that runs."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b", "d")
    stage.succeed("a")
    back = stage.members["a"]
    stage.lose("a")
    if successions == 2:
        stage.elect("e")
        stage.go()
    stage.members["a"] = back
    stage.go()
    stage.succeed("b")
    running = stage.members.pop("d")
    stage.elect("f")
    stage.go()
    assert stage.is_in(Phase.ADOPTING)
    stage.members["d"] = running
    stage.go()
    assert (stage.coordinator.round, stage.is_in(Phase.RUNNING)) == (0, True)
    stage.succeed("d")
    assert stage.concluded().keys() == {"a", "b", "d"}


def test_nobody_is_taken_in_while_some_have_departed() -> None:
    """Under a successor, either."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    stage.succeed("a")
    stage.lose("a", is_lost=False)
    stage.elect("e")
    stage.come("d")
    stage.go(10)
    assert stage.done["d"] == [StandingBy(round=0, maximum=3)]


def test_one_that_took_a_place_elsewhere_is_brought_back() -> None:
    """A later round of another coordinator: all get one that is later still."""
    stage = Stage(Rules(1, 3, last_call_timeout=0), "a", "b")
    held = stage.places["b"]
    assert held is not None
    elsewhere = replace(held, round=5, origin="1.x", attempt=5, restarts=2)
    stage.act("b", stage.members["b"].order(Order(1, 90, Begin(elsewhere))))
    stage.go()
    for one in stage.places.values():
        assert one is not None
        assert (one.round, one.attempt, one.restarts) == (6, 6, 2)
    assert stage.ranks == {"a": 0, "b": 1}


def test_a_round_that_is_claimed_late_is_adopted_before_the_first_is_formed() -> None:
    """The coordinator at a new store came first, and knows of nothing."""
    stage = Stage(Rules(2, 4), "a", "b")
    stage.go(30)
    veterans = dict(stage.members)
    stage.members.clear()
    stage.elect("d")
    stage.come("d")
    assert stage.is_in(Phase.FORMING)
    stage.members.update(veterans)
    stage.go(31)
    assert stage.coordinator.round == 0
    assert [type(one) for one in stage.done["a"]] == [Begin], "they run on"
    stage.go(31.2)
    assert stage.ranks == {"a": 0, "b": 1, "d": 2}
    assert (stage.coordinator.round, stage.coordinator.attempt) == (1, 1)


def test_a_member_is_told_once() -> None:
    """What has not changed is not said again."""
    stage = Stage(Rules(1, 2, last_call_timeout=0), "a", "b")
    stage.come("d")
    sent = len(stage.sent)
    for now in range(1, 100):
        stage.go(now)
    assert len(stage.sent) == sent
    assert ("d", StandBy(0, 2)) in stage.sent
