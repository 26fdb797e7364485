"""Each invariant breaks when the defect is put back that it was made for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous import coordinator, dynamic
from elastic_aio.rendezvous.base import EndJob, StopRound
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import MemberStatus, Order, RoundRecord, StandBy
from elastic_aio.rendezvous.state import (
    CoordinatorPhase,
    CoordinatorState,
    MemberRecord,
    Outbox,
    Visits,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import Lease
from elastic_aio.testing import InvariantViolated, WorkerBehavior
from tests.testing.checked import CheckedSimulation
from tests.testing.scenarios import run_random_scenario

pytestmark = pytest.mark.slow


def violation(count: int) -> str:
    """Return the first violation among so many scenarios."""
    for seed in range(count):
        try:
            run_random_scenario(seed)
        except InvariantViolated as error:
            return str(error).partition("\n")[0]
    raise AssertionError(f"{count} scenarios hold all invariants")


def come_and_go(times: int) -> None:
    """Let nodes come to a full job and leave it, which must cost no memory."""
    spec = LaunchSpec("x", nnodes=1)
    with CheckedSimulation(spec) as sim:
        sim.add_node("a")
        sim.run_until(lambda: sim.is_settled(1), 60)
        for _ in range(times):
            spare = sim.add_node("spare")
            sim.run(0.5)
            sim.kill(spare)
            sim.run(0.5)
        sim.run_until(sim.checker.is_tidy, 10)


def cut_off(*, one_way: bool = False) -> None:
    """Cut a node off whose workers stop slowly; `one_way`: only from what others send."""
    spec = LaunchSpec("x", nnodes="1:3", rendezvous=RendezvousSpec(last_call_timeout=1))
    with CheckedSimulation(spec) as sim:
        sim.behavior = lambda node, placement: WorkerBehavior(
            stop_duration=20.0 if node.host.name == "c" else 0.0
        )
        a, b, _c = (sim.add_node(name) for name in "abc")
        sim.run_until(lambda: sim.is_settled(3), 60)
        sim.partition(["a", "b"], ["c"], one_way=one_way)
        sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)


def succeed_alone() -> None:
    """Let a node succeed that is cut off, and return when another one has taken its place."""
    with CheckedSimulation(LaunchSpec("x", nnodes=1), endpoints=["store"]) as sim:
        sim.behavior = lambda node, placement: WorkerBehavior(
            seconds=4.0 if node.host.name == "a" else None
        )
        a = sim.add_node("a")
        sim.run_until(lambda: sim.is_settled(1), 60)
        b = sim.add_node("b")
        sim.run(1)
        sim.partition(["a"], ["b", "store"], one_way=True)
        sim.run_until(lambda: sim.is_settled(1, [b]), 60)
        sim.heal()
        sim.run_until(lambda: a.is_standing_by and not a.has_place, 60)


def lose_coordinator() -> None:
    """Kill a coordinator whose last order is still on its way to a node that is slow."""
    spec = LaunchSpec("x", nnodes=3)
    with CheckedSimulation(spec, endpoints=["store0"]) as sim:
        a = sim.add_node("a")
        sim.run(1)
        sim.add_node("c")
        sim.run(5)
        sim.slow_down("c", 0.8)
        b = sim.add_node("b")
        sim.run_until(lambda: b.running is not None, 10)
        sim.kill(a)
        sim.add_node("d")
        sim.run(5)
        sim.end_faults()
        sim.run_until(lambda: sim.is_settled(3), 60)


def test_the_stories_hold_without_a_mutation() -> None:
    come_and_go(50)
    succeed_alone()
    cut_off()
    cut_off(one_way=True)
    lose_coordinator()


def attend(self: Member, instance: bytes, job: str = "", *, was_leased: bool = False) -> bool:
    """Keep what was seen at the former store."""
    self.job = job
    self._update()
    return False


def test_terms_from_the_memory_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate took its own highest term + 1, and compared orders across stores."""

    async def campaign(self: Election, lease: Lease, former: bytes) -> bytes:
        record = self._new_record(self._member._term + 1)
        return await lease.compare_set("coordinator", former, record)

    monkeypatch.setattr(Election, "campaign", campaign)
    monkeypatch.setattr(Member, "attend", attend)
    # Which of them comes first depends on what a scenario draws.
    text = violation(500)
    assert any(
        sign in text
        for sign in ("of one store was given to", "has not obeyed", "the condition does not hold")
    )


def test_numbers_that_begin_anew_when_all_nodes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator knew no round but those of present members."""
    monkeypatch.setattr(RoundRecord, "decode", lambda text: None)
    assert "follows round 0 at its store" in violation(100)


def test_orders_that_are_compared_across_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member dropped those of another store, and the coordinator did not send them again."""
    monkeypatch.setattr(Member, "attend", attend)
    monkeypatch.setattr(Outbox, "check", lambda self, now: [])
    text = violation(500)
    assert "has not obeyed" in text or "the condition does not hold" in text


def test_rounds_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of = dynamic.round_settings

    def overlapping(*args: Any, **options: Any) -> Any:
        return replace(settings_of(*args, **options), overlap=True)

    monkeypatch.setattr(dynamic, "round_settings", overlapping)
    assert "still runs on" in violation(500)


def test_orders_of_departed_members_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = CoordinatorRunner._decide

    async def forgetful(self: CoordinatorRunner, *args: Any) -> list[str]:
        self._departed.clear()
        return await decide(self, *args)

    monkeypatch.setattr(CoordinatorRunner, "_decide", forgetful)
    assert "the condition does not hold within" in violation(100)


def test_an_end_before_all_have_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorState, "has_succeeded", lambda self, record: True)
    assert "no round has succeeded everywhere" in violation(100)


def test_a_round_for_each_status(monkeypatch: pytest.MonkeyPatch) -> None:
    supervise = coordinator._STEPS[CoordinatorPhase.RUNNING]

    def restless(state: CoordinatorState) -> None:
        if all(map(state.has_placement, state.active())):
            state.add_change_reason("a status has changed")
        supervise(state)

    monkeypatch.setitem(coordinator._STEPS, CoordinatorPhase.RUNNING, restless)
    assert "rounds after" in violation(100)


def test_orders_of_a_former_coordinator_that_are_obeyed_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round began without an acknowledgement to its own coordinator."""
    monkeypatch.setattr(MemberRecord, "is_synchronized", True)
    with pytest.raises(InvariantViolated, match="still runs on"):
        lose_coordinator()


def test_a_round_that_waits_for_no_node_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorState, "fence", lambda self, until: None)
    with pytest.raises(InvariantViolated, match="still runs on"):
        cut_off(one_way=True)


def test_a_node_that_is_cut_off_and_stops_by_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def isolate(self: Member, why: str, *, is_cut_off: bool) -> list[MemberEffect]:
        return [StopRound(self.status.round, why)] if self.status.is_busy else []

    monkeypatch.setattr(Member, "isolate", isolate)
    with pytest.raises(InvariantViolated, match="still runs on"):
        cut_off()


def test_a_success_that_waits_for_a_round_that_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its node stayed at the exit barrier."""
    monkeypatch.setattr(MemberStatus, "is_in_round", MemberStatus.is_busy)
    with pytest.raises(InvariantViolated, match="the condition does not hold within"):
        succeed_alone()


def test_an_end_for_a_node_that_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that came too many was given the end of a job in which it had no part."""
    on_order = Member.on_order

    def ending(self: Member, order: Order) -> list[MemberEffect]:
        if isinstance(order.body, StandBy):
            return [EndJob(JobOutcome(JobState.STOPPED, "the job is full", 0))]
        return on_order(self, order)

    monkeypatch.setattr(Member, "on_order", ending)
    assert "an end that is not recorded" in violation(100)


def test_a_coordinator_that_remembers_all_who_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def remember(self: Visits, record: MemberRecord, now: float) -> None:
        self._short[record.member] = (1, now)

    monkeypatch.setattr(Visits, "observe_departure", remember)
    with pytest.raises(InvariantViolated, match="the condition does not hold within"):
        come_and_go(50)
