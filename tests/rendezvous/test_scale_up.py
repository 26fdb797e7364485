"""Joiners of a running round: how long they wait for others, and what the workers learn of it."""

from __future__ import annotations

import pytest

from elastic_aio.node_events import MembershipChanged, MembershipPending
from elastic_aio.rendezvous.base import ChangePending, StartRound
from elastic_aio.rendezvous.member import MemberEffect
from elastic_aio.rendezvous.members import RoundSettings
from elastic_aio.rendezvous.messages import StandBy
from tests.support.coordinator_harness import CoordinatorHarness

WITHDRAWN = "no node is about to join any more"


def running(maximum: int = 8, delay: float = 30.0) -> CoordinatorHarness:
    """Return a round of two nodes whose joiners wait."""
    settings = RoundSettings(2, maximum, last_call_timeout=0, scale_up_delay=delay)
    return CoordinatorHarness(settings, "a", "b")


def pending(harness: CoordinatorHarness, name: str) -> list[MemberEffect]:
    """Return all that a member was sent of changes."""
    return [one for one in harness.done[name] if isinstance(one, ChangePending)]


def test_joiners_share_a_round_after_the_delay_from_the_latest() -> None:
    harness = running()
    for now, name in enumerate("defg"):
        harness.settle(now * 20.0)
        harness.join(name)
        assert harness.coordinator.round.number == 0
        assert harness.coordinator.deadline == now * 20 + 30
    harness.settle(89.9)
    assert harness.coordinator.round.number == 0
    harness.settle(90)
    assert harness.coordinator.round.number == 1
    assert list(harness.ranks) == list("abdefg")
    (changed,) = harness.events(MembershipChanged)
    assert isinstance(changed, MembershipChanged)
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
    assert harness.coordinator.deadline == 300
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
    assert pending(harness, "a")[2:] == [ChangePending(0, "e joined", 30)]


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
        assert [one.time_left for one in harness.events(MembershipPending)] == [  # type: ignore[attr-defined]
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
