"""Members whose workers run, and what they learn of those that have succeeded."""

from __future__ import annotations

import pytest

from elastic_aio.rendezvous.base import ChangePending, NodeInfo, PeersFinished
from elastic_aio.rendezvous.messages import MembersDone
from elastic_aio.rendezvous.state import RoundSettings
from tests.support.coordinator_harness import CoordinatorHarness


def running(count: int = 3) -> CoordinatorHarness:
    """Return a round of nodes a, b, ...; each has two workers."""
    harness = CoordinatorHarness(RoundSettings(2, count))
    for name in "abcdefgh"[:count]:
        harness.join(name, node=NodeInfo(name, 1, 2, "default"))
    return harness


def learned(harness: CoordinatorHarness, name: str) -> list[tuple[int, float]]:
    """Return what a member learned of workers that have finished in round 0, and since when."""
    found = [one for one in harness.done[name] if isinstance(one, PeersFinished)]
    assert {one.round for one in found} <= {0}
    return [(one.workers, one.ago) for one in found]


def orders(harness: CoordinatorHarness) -> list[str]:
    return [name for name, body in harness.sent if isinstance(body, MembersDone)]


def test_members_that_run_learn_of_a_success_a_second_later() -> None:
    """Each once."""
    harness = running()
    harness.settle(50)
    harness.succeed("a")
    assert harness.deadline == 51, "and nothing is due before"
    harness.settle(50.9)
    assert not orders(harness)
    harness.settle(51)
    assert [learned(harness, name) for name in "abc"] == [[], [(2, 1.0)], [(2, 1.0)]]
    harness.settle(500)
    assert sorted(orders(harness)) == ["b", "c"]


def test_members_that_succeed_together_get_no_order() -> None:
    harness = running()
    harness.succeed("a")
    harness.settle(0.9)
    harness.succeed("c", "b")
    assert harness.coordinator.outcome is not None
    assert not orders(harness)


def test_further_successes_are_sent_much_later() -> None:
    """There are few orders, however many members succeed one after the other."""
    harness = running(8)
    for now in range(120):
        harness.settle(now)
        harness.succeed(*"abcdefg"[now : now + 1])
    assert learned(harness, "h") == [(2, 1.0), (14, 50.0)]


def test_a_member_that_has_left_after_its_success_counts() -> None:
    harness = running()
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    harness.settle(1)
    harness.succeed("b")
    harness.settle(50)
    assert learned(harness, "c") == [(2, 1.0), (4, 50.0)]
    assert harness.members["c"].status.members_done == 1


def test_the_next_coordinator_informs_members_that_do_not_know() -> None:
    """It has seen neither the success nor the node that has left."""
    harness = running(4)
    harness.succeed("a")
    harness.lose("a", is_lost=False)
    harness.drop_orders("c")
    harness.settle(1)
    harness.restore_orders()
    harness.now = 10
    harness.elect("x")
    harness.settle()
    harness.settle(11)
    assert [learned(harness, name) for name in "bcd"] == [[(2, 1.0)]] * 3
    harness.succeed("b")
    harness.settle(60)
    assert [learned(harness, name)[1:] for name in "cd"] == [[(4, 50.0)]] * 2


def test_a_success_is_known_whatever_else_is_ordered() -> None:
    """A pending change is withdrawn by the success; the member sees both orders late."""
    harness = CoordinatorHarness(RoundSettings(2, 8, last_call_timeout=0, scale_up_delay=30))
    for name in "ab":
        harness.join(name)
    harness.join("e")
    assert harness.members["b"].status.is_change_pending
    harness.drop_orders("b")
    harness.succeed("a")
    harness.settle(1)
    harness.restore_orders()
    for now in (6, 12, 20):
        harness.settle(now)
    assert learned(harness, "b") == [(1, 1.0)]
    assert isinstance(harness.last("b"), ChangePending)
    assert not harness.members["b"].status.is_change_pending


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_loss_begins_another_round_where_no_success_is_known(is_lost: bool) -> None:
    harness = running()
    harness.succeed("a")
    harness.settle(1)
    harness.lose("c", is_lost=is_lost)
    assert harness.coordinator.round.number == 1
    assert harness.members["b"].status.peers_finished == 0
    harness.settle(100)
    assert learned(harness, "b") == [(2, 1.0)]
