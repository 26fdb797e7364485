"""The election of the coordinator at one store, and the fencing of a deposed one.

The leader is the member whose `LeaderRecord` stands under the key `coordinator`.  It is
elected by one compare-and-set, which the store executes in order: of several candidates
that saw the key empty, one wins and the others read its record in the reply.

The record is written under the member's lease, and so is every order of a coordinator.
When the lease ends, the store removes the record and refuses further writes under that
lease.  So a leader that was suspended or partitioned cannot send orders beside its
successor, and no clocks are compared; this is the fencing token of other designs.
Terms order the coordinators for the members: an order of an older term than the highest
seen is dropped.  A candidate takes its own highest term + 1.  That can be too low when a
member has seen a higher one at another store; the coordinator learns it from that
member's status and announces a higher term, again by compare-and-set.

Three cases need care:

* A record with this member's own name may be left of its previous lease, which lingers
  for `LEASE_LINGER` after its connection.  It must not be taken for a leadership: it is
  removed when that lease ends.  So the member remembers the exact bytes that it has
  written under the present lease (`_own_records`), and replaces any other record of its
  own by a compare-and-set against these old bytes.  Waiting for the key to become empty
  would leave the job without a coordinator meanwhile.
* `_own_records` is a set, because announcing a term replaces the record: the watch may
  still deliver the previous one, which is this member's as well.
* Changes of the watch can be older than the election that was just won.  The leader
  does not conclude from a change that it is deposed, but reads the key again.

The node that hosts the store has a head start of `HOST_HEAD_START`: orders and statuses
then need no network on one side, and after a loss one node moves both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Never, TypeVar

from elastic_aio.aio import cancel_and_wait, create_task
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import HOST_HEAD_START, LeaderRecord, encode
from elastic_aio.store import Lease, Store, Watch

T = TypeVar("T")

_KEY = "coordinator"


class Election:
    """One member's part in the elections at one store."""

    def __init__(
        self,
        store: Store,
        located: LocatedStore,
        runner: CoordinatorRunner,
        member: Member,
        *,
        name: str,
        perform: Callable[[Iterable[MemberEffect]], None],
        migrate: Callable[[], Coroutine[Any, Any, Never]],
    ) -> None:
        """Prepare.

        `runner` coordinates while this member is the leader, and `migrate` raises
        `StoreError` once the leader must go to another store.  `store` has the prefix of
        the run, and `name` is the unique name of the member.
        """
        self._store = store
        self._located = located
        self._runner = runner
        self._member = member
        self._name = name
        self._perform = perform
        self._migrate = migrate
        self._own_records: set[bytes] = set()
        self.is_leader = False

    async def run(self, records: Watch, lease: Lease) -> Never:
        """Stand for election whenever there is no leader, and lead when elected.

        `records` watches the key `coordinator`; `lease` is this member's.

        Raises:
            StoreError: the store is lost, or the lease has ended.
        """
        present = records.present.get(_KEY)
        if present is None and not self._located.is_host:
            # The node that hosts the store has its head start.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOST_HEAD_START):
                    present = (await anext(records)).value
        while True:
            leader = LeaderRecord.decode(present)
            is_own = leader is not None and leader.member == self._name
            if leader is None or (is_own and present not in self._own_records):
                # No leader, no readable record, or one of this member's previous lease.
                term = self._member.status.term + 1
                present = await self._campaign(lease, present or b"", term)
                leader = LeaderRecord.decode(present)
            if leader is not None:
                self._perform(self._member.on_coordinator(leader.name, leader.term))
            if leader is not None and present in self._own_records:
                present = await self._lead(leader.term, records, lease)
            else:
                present = (await anext(records)).value

    async def _campaign(self, lease: Lease, present: bytes, term: int) -> bytes:
        """Try to replace the record `present`; return the record that stands then."""
        record = self._record(term)
        self._own_records.add(record)
        return await lease.compare_set(_KEY, present, record)

    def _record(self, term: int) -> bytes:
        return encode(LeaderRecord(term, self._name, self._member.status.node.name))

    async def _lead(self, term: int, records: Watch, lease: Lease) -> bytes | None:
        """Coordinate until deposed; return the record that stands then."""
        self.is_leader = True
        try:
            work = [self._coordinate(term, lease), self._wait_deposed(records)]
            if self._located.index and not self._located.is_host:
                work.append(self._migrate())
            return await first_result(work)
        finally:
            self.is_leader = False
            self._own_records.clear()

    async def _coordinate(self, term: int, lease: Lease) -> bytes | None:
        current = self._record(term)

        async def announce(term: int) -> None:
            nonlocal current
            present = await self._campaign(lease, current, term)
            if present not in self._own_records:
                raise _DeposedError(present)
            current = present
            name = self._member.status.node.name
            self._perform(self._member.on_coordinator(name, term))

        try:
            await self._runner.run(
                self._store,
                lease,
                name=self._name,
                term=term,
                is_new_store=await self._store.add("terms", 1) == 1,
                announce=announce,
            )
        except _DeposedError as error:
            return error.present

    async def _wait_deposed(self, records: Watch) -> bytes | None:
        """Return the record of another leader, or None, once this member is deposed."""
        while True:
            await anext(records)
            present = await self._store.peek(_KEY)
            if present not in self._own_records:
                return present


class _DeposedError(Exception):
    """Another member is the leader."""

    def __init__(self, present: bytes) -> None:
        super().__init__(present)
        self.present = present


async def first_result(work: list[Coroutine[Any, Any, T]]) -> T:
    """Run coroutines until one ends; return its result, or raise its error.

    Of several that end at once, one that has failed is preferred: its error says why.
    """
    tasks = [create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)
    failed = {task: not task.cancelled() and task.exception() is not None for task in tasks}
    ended = [task for task in tasks if task in done]
    return max(ended, key=failed.__getitem__).result()
