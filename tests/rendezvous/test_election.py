"""The election of the coordinator: terms, deposed leaders, and records of former leases."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any, Never, cast

import pytest

from elastic_aio.aio import Notifier, cancel_and_wait, create_task
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.discovery.runs import RunRecord
from elastic_aio.errors import StoreRefused
from elastic_aio.node_events import CoordinatorChanged
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import LeaderRecord, encode
from elastic_aio.rendezvous.state import RoundSettings
from elastic_aio.store import Lease, MemoryStore
from tests.support.coordinator_harness import status


class SlowCounterStore(MemoryStore):
    """A store whose `add` waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = asyncio.Event()
        self.is_released = asyncio.Event()
        self.is_released.set()

    async def add(self, key: str, amount: int = 1) -> int:
        self.is_asked.set()
        await self.is_released.wait()
        return await super().add(key, amount)


class Candidate:
    """A member that stands for election while its block is open; records who leads."""

    def __init__(
        self,
        name: str,
        store: MemoryStore,
        led: list[tuple[str, int]],
        *,
        is_host: bool = True,
        is_engine: bool = False,
    ) -> None:
        self.name = name
        self.store = store
        self.led = led
        self.seen: list[int] = []
        self.member = Member(name, status(name, RoundSettings(1, 4)))
        located = LocatedStore(cast("Any", store), b"one", "x:1", 0, is_host, "x", is_engine)
        runner = cast("CoordinatorRunner", self)
        self.election = Election(
            located, "run", self.member, runner, CoordinatorLink(), self._perform, Notifier()
        )
        self.leads = asyncio.Event()
        self._stack = AsyncExitStack()

    async def run(self, store: object, lease: Lease, *, term: int, **_: object) -> Never:
        """Lead, as a `CoordinatorRunner` does."""
        self.led.append((self.name, term))
        self.leads.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.leads.clear()
        raise AssertionError

    def _perform(self, effects: Any) -> None:
        one: MemberEffect
        for one in effects:
            assert isinstance(one, CoordinatorChanged)
            self.seen.append(one.term)

    async def __aenter__(self) -> Candidate:
        enter = self._stack.enter_async_context
        self.lease = await enter(self.store.lease(5))
        records = await enter(self.store.watch("coordinator"))
        self.task = create_task(
            self.election.run(self.store, RunRecord(0, "job"), self.lease, records)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait([self.task])
        await self._stack.aclose()


@pytest.fixture
def led() -> list[tuple[str, int]]:
    """Who has led in which term."""
    return []


async def test_terms_grow_and_are_given_once(led: list[tuple[str, int]]) -> None:
    store = MemoryStore()
    for name in "aba":
        async with Candidate(name, store.another(), led) as candidate:
            await candidate.leads.wait()
    assert led == [("a", 1), ("b", 2), ("a", 3)]


async def test_a_reelected_leader_has_a_new_term(led: list[tuple[str, int]]) -> None:
    """With the same lease: its record was removed."""
    store = MemoryStore()
    async with Candidate("a", store.another(), led) as a:
        for _ in range(3):
            await a.leads.wait()
            await store.delete("coordinator")
            while await store.peek("coordinator") is None or not a.leads.is_set():
                await asyncio.sleep(0)
    assert [term for _, term in led] == list(range(1, len(led) + 1))
    assert a.seen == [term for _, term in led]


async def test_of_many_candidates_one_leads(led: list[tuple[str, int]]) -> None:
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        candidates = [Candidate(f"n{one}", store.another(), led) for one in range(20)]
        for one in candidates:
            await stack.enter_async_context(one)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(led) == 1
        first = next(one for one in candidates if one.leads.is_set())
        first.store.expire_leases()
        for _ in range(20):
            await asyncio.sleep(0)
        assert [term for _, term in led] == [1, 2]
        assert led[1][0] != first.name
        assert all(one.seen[-1] == 2 for one in candidates if one is not first)


async def test_on_an_engine_no_node_has_a_head_start(
    led: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_aio.rendezvous.election.HOST_HEAD_START", 3600.0)
    store = MemoryStore()
    async with Candidate("a", store.another(), led, is_host=False, is_engine=True) as candidate:
        async with asyncio.timeout(30):
            await candidate.leads.wait()


async def test_a_suspended_candidate_never_leads_in_an_old_term(
    led: list[tuple[str, int]],
) -> None:
    """It has won, and another has led before it could take its term."""
    slow = SlowCounterStore()
    slow.is_released.clear()
    other = slow.another()  # its counter is not slow
    async with Candidate("slow", slow, led) as candidate:
        await slow.is_asked.wait()
        assert not led
        slow.expire_leases()
        async with Candidate("b", other, led) as b:
            await b.leads.wait()
            slow.is_released.set()
            with suppress(StoreRefused):
                await candidate.task
    async with Candidate("c", slow.another(), led) as c:
        await c.leads.wait()
    assert [name for name, _ in led] == ["b", "c"]
    terms = [term for _, term in led]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("term", [0, 9])
async def test_a_record_of_a_former_lease_is_replaced(
    led: list[tuple[str, int]], term: int
) -> None:
    """At once, by exactly these bytes; its end does not depose the new leader."""
    former = MemoryStore()
    async with former.lease(5) as lease:
        await lease.set("coordinator", encode(LeaderRecord(term, "a", "a")))
        async with Candidate("a", former.another(), led) as a:
            await a.leads.wait()
            former.expire_leases()
            for _ in range(5):
                await asyncio.sleep(0)
            assert a.leads.is_set()
    assert led == [("a", 1)]


async def test_a_record_without_a_term_is_not_led_by(led: list[tuple[str, int]]) -> None:
    """The winner of an election has not taken its term yet: it is waited for."""
    former = MemoryStore()
    async with former.lease(5) as lease:
        await lease.set("coordinator", encode(LeaderRecord(0, "a", "a")))
        async with Candidate("b", former.another(), led) as b:
            for _ in range(5):
                await asyncio.sleep(0)
            assert not led
            assert not b.seen
            former.expire_leases()
            await b.leads.wait()
    assert led == [("b", 1)]


async def test_the_node_that_hosts_the_store_goes_first(led: list[tuple[str, int]]) -> None:
    store = MemoryStore()
    async with (
        Candidate("b", store.another(), led, is_host=False) as b,
        Candidate("a", store.another(), led) as a,
    ):
        await a.leads.wait()
        while not b.seen:
            await asyncio.sleep(0)
        assert led == [("a", 1)]
