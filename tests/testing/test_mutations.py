"""Each invariant breaks when the defect is put back that it was made for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from elastic_aio.rendezvous import dynamic
from elastic_aio.rendezvous.coordinator import Coordinator
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.outbox import Outbox
from elastic_aio.rendezvous.state import CoordinatorPhase, CoordinatorState
from elastic_aio.store import Lease
from elastic_aio.testing import InvariantViolated, run_random_scenario

pytestmark = pytest.mark.slow


def violation(seeds: int) -> str:
    """Return the first violation among so many scenarios."""
    for seed in range(seeds):
        try:
            run_random_scenario(seed)
        except InvariantViolated as error:
            return str(error).partition("\n")[0]
    raise AssertionError(f"{seeds} scenarios hold all invariants")


def attend(self: Member, instance: bytes, job: str = "") -> None:
    """Keep what was seen at the former store."""
    self.job = job
    self._update()


def test_terms_from_the_memory_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate took its own highest term + 1, and compared orders across stores."""

    async def campaign(self: Election, lease: Lease, former: bytes) -> bytes:
        record = self._new_record(self._member._term + 1)
        return await lease.compare_set("coordinator", former, record)

    monkeypatch.setattr(Election, "campaign", campaign)
    monkeypatch.setattr(Member, "attend", attend)
    assert "of one store was given to" in violation(500)


def test_orders_that_are_compared_across_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member dropped those of another store, and the coordinator did not send them again."""
    monkeypatch.setattr(Member, "attend", attend)
    monkeypatch.setattr(Outbox, "check", lambda self, now: [])
    assert "has not obeyed" in violation(500)


def test_rounds_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of = dynamic._round_settings

    def overlapping(*args: Any, **options: Any) -> Any:
        return replace(settings_of(*args, **options), overlap=True)

    monkeypatch.setattr(dynamic, "_round_settings", overlapping)
    assert "still runs on" in violation(500)


def test_orders_of_departed_members_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    take_changes = CoordinatorRunner._take_changes

    async def forgetful(self: CoordinatorRunner, *args: Any) -> None:
        await take_changes(self, *args)
        self._departed.clear()

    monkeypatch.setattr(CoordinatorRunner, "_take_changes", forgetful)
    assert "the condition does not hold within" in violation(100)


def test_an_end_before_all_have_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorState, "has_succeeded", lambda self, record: True)
    assert "no round has succeeded everywhere" in violation(100)


def test_a_round_for_each_status(monkeypatch: pytest.MonkeyPatch) -> None:
    supervise = Coordinator._STEPS[CoordinatorPhase.RUNNING]

    def restless(state: CoordinatorState) -> None:
        if all(map(state.has_placement, state.active())):
            state.add_change_reason("a status has changed")
        supervise(state)

    monkeypatch.setitem(Coordinator._STEPS, CoordinatorPhase.RUNNING, restless)
    assert "rounds after" in violation(100)
