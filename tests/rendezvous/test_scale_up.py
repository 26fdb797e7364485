"""Joiners of a running round: how long they wait for others, and what the workers learn of it."""

from __future__ import annotations

import pytest

from elastic_aio.node_events import MembershipChanged, MembershipPending
from elastic_aio.rendezvous.base import ChangeAgreed, ChangePending, StartRound
from elastic_aio.rendezvous.member import MemberEffect
from elastic_aio.rendezvous.messages import StandBy
from elastic_aio.rendezvous.state import RoundSettings
from tests.support.coordinator_harness import CoordinatorHarness

WITHDRAWN = "no node is about to join any more"


def running(maximum: int = 8, delay: float = 30.0, limit: float = 0.0) -> CoordinatorHarness:
    """Return a round of two nodes whose joiners wait; with a limit, until the workers agree."""
    settings = RoundSettings(
        2, maximum, last_call_timeout=0, scale_up_delay=delay, scale_up_limit=limit
    )
    return CoordinatorHarness(settings, "a", "b")


def agree(harness: CoordinatorHarness, *names: str, number: int = 0) -> None:
    """Let all workers of some nodes agree to a change of their round."""
    for name in names:
        member = harness.members[name]
        member.report(ChangeAgreed(member.status.round, number))
    harness.settle()


def pending(harness: CoordinatorHarness, name: str) -> list[MemberEffect]:
    """Return all that a member was sent of changes."""
    return [one for one in harness.done[name] if isinstance(one, ChangePending)]


def test_joiners_share_a_round_after_the_delay_from_the_latest() -> None:
    harness = running()
    for now, name in enumerate("defg"):
        harness.settle(now * 20.0)
        harness.join(name)
        assert harness.coordinator.round.number == 0
        assert harness.deadline == now * 20 + 30
    harness.settle(89.9)
    assert harness.coordinator.round.number == 0
    harness.settle(90)
    assert harness.coordinator.round.number == 1
    assert list(harness.ranks) == list("abdefg")
    (changed,) = harness.events(MembershipChanged)
    assert changed.why == "d, e, f, g joined"


def test_joiners_that_fill_the_job_wait_for_no_others() -> None:
    harness = running(4)
    harness.join("d")
    harness.settle(10)
    harness.join("e")
    assert list(harness.ranks) == list("abde")


def test_one_joiner_after_the_other_does_not_postpone_the_round_for_ever() -> None:
    """Ten delays from the first of them: a host comes and goes while another one waits."""
    harness = running()
    harness.join("d")
    for number in range(12):
        harness.settle(number * 25.0 + 10)
        harness.join(f"e{number}")
        if number:
            harness.lose(f"e{number - 1}", is_lost=False)
    assert harness.coordinator.round.number == 0
    assert harness.deadline == 300
    harness.settle(300)
    assert list(harness.ranks) == ["a", "b", "d", "e11"]


def test_a_loss_ends_the_wait_of_joiners() -> None:
    harness = running()
    harness.join("d")
    harness.settle(1)
    harness.lose("b")
    assert list(harness.ranks) == list("ad")


def test_a_change_is_announced_to_all_nodes() -> None:
    """With the time that is left, anew for each joiner."""
    harness = running()
    harness.join("d")
    harness.settle(10)
    first = ChangePending(0, "d joined", 30)
    assert [pending(harness, name) for name in "abd"] == [[first]] * 3
    harness.settle(20)
    harness.join("e")
    second = ChangePending(0, "d, e joined", 30)
    assert [pending(harness, name) for name in "abde"] == [[first, second]] * 3 + [[second]]
    assert harness.events(MembershipPending) == [
        MembershipPending(round=0, why=one.why, time_left=30) for one in (first, second)
    ]
    harness.settle(50)
    assert [len(pending(harness, name)) for name in "abde"] == [2, 2, 2, 1]
    assert not any(member.status.is_change_pending for member in harness.members.values())


def test_a_change_is_withdrawn_when_the_joiner_has_gone() -> None:
    harness = running()
    harness.join("d")
    harness.lose("d")
    assert pending(harness, "a")[1:] == [ChangePending(0, WITHDRAWN)]
    harness.settle(100)
    assert list(harness.ranks) == list("ab")
    harness.join("e")
    assert pending(harness, "a")[2:] == [ChangePending(0, "e joined", 30, number=1)]


def test_a_change_is_withdrawn_when_a_node_has_succeeded() -> None:
    harness = running()
    harness.join("d")
    harness.succeed("a")
    assert pending(harness, "b")[-1] == ChangePending(0, WITHDRAWN)
    assert ("d", StandBy(0, 8)) in harness.sent
    harness.lose("a", is_lost=False)
    assert harness.members["b"].status.members_done == 1


def test_the_next_coordinator_withdraws_a_change_or_announces_it_again() -> None:
    """It learns of it by the statuses, also if the joiner is gone meanwhile."""
    for is_gone in (False, True):
        harness = running()
        harness.join("d")
        harness.now = 20
        harness.elect("e")
        if is_gone:
            del harness.members["d"]
        harness.settle()
        harness.settle(21)
        expected = ChangePending(0, WITHDRAWN) if is_gone else ChangePending(0, "d joined", 30)
        assert pending(harness, "a")[-1] == expected
        assert [one.time_left for one in harness.events(MembershipPending)] == [
            30,
            expected.time_left,
        ]


def test_a_node_that_has_not_begun_its_round_learns_of_a_change_later() -> None:
    """The order to begin would be replaced otherwise."""
    harness = CoordinatorHarness(running().settings)
    harness.drop_orders("b")
    harness.join("a", "b", "d")
    harness.settle(1)
    assert harness.ranks == {"a": 0, "d": 2}
    harness.join("e")
    assert pending(harness, "a")
    assert [type(body) for name, body in harness.sent if name == "b"] == [StartRound]
    harness.restore_orders()
    harness.settle(10)
    assert [type(one) for one in harness.done["b"]] == [StartRound, ChangePending]


@pytest.mark.parametrize("delay", [0.0, 0.2])
def test_a_short_wait_is_not_announced(delay: float) -> None:
    """Workers could not use it."""
    harness = running(delay=delay)
    harness.join("d")
    assert harness.coordinator.round.number == 0
    harness.settle(0.2)
    assert list(harness.ranks) == list("abd")
    assert not pending(harness, "a")
    assert not harness.events(MembershipPending)


# ---------------------------------------------------------------- agreement


def test_a_round_begins_when_the_delay_is_over_and_all_workers_have_agreed() -> None:
    harness = running(limit=600)
    harness.join("d")
    assert [pending(harness, name) for name in "ab"] == [[ChangePending(0, "d joined", 630)]] * 2
    agree(harness, "a")
    harness.settle(40)
    assert harness.coordinator.round.number == 0
    assert harness.deadline == 630
    agree(harness, "b")
    assert list(harness.ranks) == list("abd")
    assert {member.status.agreed_change for member in harness.members.values()} == {-1}


def test_an_agreement_does_not_end_the_delay() -> None:
    """A further joiner, which moves the deadline, is a part of what the workers agreed to."""
    harness = running(limit=600)
    harness.join("d")
    agree(harness, "a", "b")
    harness.settle(20)
    harness.join("e")
    assert pending(harness, "a")[1:] == [ChangePending(0, "d, e joined", 630)]
    harness.settle(49)
    assert harness.coordinator.round.number == 0
    harness.settle(50)
    assert list(harness.ranks) == list("abde")


def test_a_round_begins_after_the_limit_without_an_agreement() -> None:
    harness = running(limit=600)
    harness.join("d")
    agree(harness, "a")
    harness.settle(629)
    assert harness.coordinator.round.number == 0
    harness.settle(630)
    assert list(harness.ranks) == list("abd")


def test_joiners_that_fill_the_job_wait_for_the_agreement_only() -> None:
    harness = running(3, limit=600)
    harness.join("d")
    harness.settle(1)
    assert harness.coordinator.round.number == 0
    agree(harness, "a", "b")
    assert list(harness.ranks) == list("abd")


def test_an_agreement_to_a_change_that_was_withdrawn_does_not_count() -> None:
    harness = running(3, limit=600)
    harness.join("d")
    agree(harness, "a")
    harness.lose("d")
    agree(harness, "b")
    harness.join("e")
    assert harness.coordinator.round.number == 0
    agree(harness, "a", number=1)
    agree(harness, "b")
    assert harness.coordinator.round.number == 0
    agree(harness, "b", number=1)
    assert list(harness.ranks) == list("abe")


def test_a_loss_waits_for_no_agreement() -> None:
    harness = running(limit=600)
    harness.join("d")
    harness.settle(1)
    harness.lose("b")
    assert list(harness.ranks) == list("ad")


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_agreement_outlives_its_coordinator(is_gone: bool) -> None:
    """Unless the next one announces another change."""
    harness = running(3, limit=600)
    harness.join("d")
    agree(harness, "a")
    harness.elect("f")
    if is_gone:
        del harness.members["d"]
        harness.settle(5)
        harness.settle(6)
        harness.join("e")
    agree(harness, "b", number=int(is_gone))
    assert (harness.coordinator.round.number == 1) is not is_gone
