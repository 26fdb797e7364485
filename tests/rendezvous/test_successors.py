"""What a successor must take over, and what a deposed coordinator must not change."""

from __future__ import annotations

import asyncio
from typing import Any, Never, cast

import pytest

from elastic_aio.aio import Notifier, cancel_and_wait, create_task, wait_forever
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.discovery.runs import RunRecord
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import RoundStopped, StopRound
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election
from elastic_aio.rendezvous.member import Member
from elastic_aio.rendezvous.messages import DetectorPort, LeaderRecord, RoundRecord, encode
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.spec.restart import RestartBudget, RestartPolicy
from elastic_aio.store import MemoryStore
from tests.support.coordinator_harness import CoordinatorHarness, status


def test_a_successor_does_not_decide_again_about_a_job_that_has_failed() -> None:
    """One member has read that it has; the successor itself would still grant restarts."""
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b", max_restarts=0)
    harness.stop_slowly("b")
    harness.fail("a")
    harness.drop_orders("b")
    harness.members["b"].report(RoundStopped(0))
    harness.settle()
    assert harness.end_orders().keys() == {"a"}
    harness.restore_orders()
    harness.budgets["d"] = RestartBudget(3, RestartPolicy(), lambda: 1.0)
    harness.elect("d")
    harness.settle()
    ends = harness.end_orders()
    assert not harness.pending_restarts()
    assert ends.keys() == {"a", "b"}
    assert ends["b"].outcome.state is JobState.FAILED
    assert ends["b"].outcome.why == ends["a"].outcome.why


def test_the_newest_round_is_recovered() -> None:
    """A member that was cut off has the one before it, and is stopped."""
    harness = CoordinatorHarness(RoundSettings(1, 2), "a", "b")
    cut_off = harness.members["b"]
    harness.lose("b")
    harness.elect("d")
    harness.members["b"] = cut_off
    sent = len(harness.sent)
    harness.drop_orders("a", "b")
    harness.settle()
    orders = {name: body for name, body in harness.sent[sent:] if isinstance(body, StopRound)}
    assert orders.keys() == {"b"}


@pytest.mark.parametrize(("former", "stands"), [(1, 2), (3, 3)])
async def test_a_round_record_never_replaces_that_of_a_later_term(former: int, stands: int) -> None:
    """The write of a deposed coordinator may arrive when its successor has recorded a round."""
    store = MemoryStore()
    settings, budget = RoundSettings(1, 2), RestartBudget(0, RestartPolicy(), lambda: 1.0)
    unused = cast("Any", None)
    for term in (2, former):
        runner = CoordinatorRunner(
            settings, budget, unused, node=unused, run_id="run", root=None, on_end=unused
        )
        await runner.record_round(store, RoundRecord(term, term, 0, 0, is_open=True, history=None))
    record = RoundRecord.decode(await store.peek("round"))
    assert record is not None
    assert record.term == stands


async def test_a_leader_whose_record_is_replaced_leads_no_more() -> None:
    """Its lease may live on: another member has replaced a record that it took for an old one."""
    store, has_ended = MemoryStore(), asyncio.Event()
    leads = asyncio.Event()

    class Runner:
        async def run(self, *_: object, **__: object) -> Never:
            leads.set()
            try:
                await wait_forever()
            finally:
                has_ended.set()

    settings = RoundSettings(1, 2)
    located = LocatedStore(cast("Any", store), b"one", "x:1", 0, True, "x")
    member = Member("a", status("a", settings))
    runner, detector = cast("CoordinatorRunner", Runner()), CoordinatorLink()
    election = Election(located, "run", member, runner, detector, lambda effects: None, Notifier())
    async with store.lease(5) as lease, store.watch("coordinator") as records:
        leading = create_task(election.run(store, RunRecord(0, "job"), lease, records))
        await leads.wait()
        await store.set("coordinator", encode(LeaderRecord(9, "b", "b", None)))
        try:
            async with asyncio.timeout(2):
                await has_ended.wait()
        finally:
            await cancel_and_wait([leading])


async def test_a_leader_that_says_nothing_has_not_gone() -> None:
    """Only a refusal proves that no process has the port."""
    asked = asyncio.Event()

    class Silent(StoreNetwork):
        async def dial(self, address: object) -> Never:
            asked.set()
            await wait_forever()

    detector = CoordinatorLink(Silent(), port_timeout=0.05)
    assert not await detector.is_refused(DetectorPort("127.0.0.1", 1, "", "leader"))
    assert asked.is_set()
