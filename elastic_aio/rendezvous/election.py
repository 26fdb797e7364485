"""The election of the coordinator at one store, and the fencing of a deposed one.

The leader is the member whose `LeaderRecord` stands under the key `coordinator`.  It is elected by
one compare-and-set, which the store executes in order: of several candidates that saw the key
empty, one wins and the others read its record in the reply.

The record is written under the member's lease, and so is every order of a coordinator.  When the
lease ends, the store removes the record and refuses further writes under that lease.  So a leader
that was suspended or partitioned cannot send orders beside its successor, and no clocks are
compared; other designs have a fencing token for this.

Terms order the coordinators of one store.  The winner takes its term from the store's counter
`terms`, and then replaces its record, of term 0, by a record with the term.  The counter is
increased after the election and not before: a candidate that is suspended between the two could
otherwise lead in a term below the term of a leader before it.  A term is given once in the life of
a store; nothing about terms comes from a member's memory.  At another store, terms begin anew (see
`Member.attend`).

Two cases need care:

* A record with this member's own name may be left of its previous lease, which lingers for
  `LEASE_LINGER` after its connection.  It is no leadership: it is removed when that lease ends.  So
  a member leads only by the record that it has written under the present lease (`_record`), and
  replaces any other of its own by a compare-and-set against these old bytes.  If it waited for the
  key to become empty, the job would have no coordinator until then.
* Changes of the watch can be older than the election that was just won.  The leader does not
  conclude from a change that it is deposed, but reads the key again.

The node that hosts the store has a head start of `HOST_HEAD_START`: orders and statuses then need
no network on one side, and after a loss one node moves both.  On an engine no node hosts the store,
and all stand at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Never

from elastic_aio.aio import Notifier, first_result, wait_forever
from elastic_aio.discovery.locator import LocatedStore, OtherEndpoints
from elastic_aio.discovery.runs import RunRecord, claim_move, record_move, run_prefix, undo_move
from elastic_aio.errors import StoreLost
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    HOST_HEAD_START,
    DetectorPort,
    LeaderRecord,
    encode,
)
from elastic_aio.store import Lease, Store, Watch
from elastic_aio.store.engine import EngineStore

_KEY = "coordinator"

_PLACED_WITHIN = 1.0
"""Seconds after which a member without a round connects to the leader of an engine."""


class Election:
    """One member's part in the elections at one store."""

    def __init__(
        self,
        located: LocatedStore,
        run_id: str,
        member: Member,
        runner: CoordinatorRunner,
        detector: CoordinatorLink,
        perform: Callable[[Iterable[MemberEffect]], None],
        changed: Notifier,
    ) -> None:
        """Prepare; `runner` coordinates if this member leads; `changed` notifies of its status."""
        self._located = located
        self._run_id = run_id
        self._member = member
        self._runner = runner
        self._detector = detector
        self._perform = perform
        self._changed = changed
        self._engine = located.store if isinstance(located.store, EngineStore) else None
        self._store: Store = located.store
        self._run = RunRecord(0, "")
        self._record = b""
        self.is_leader = False

    async def run(self, store: Store, run: RunRecord, lease: Lease, records: Watch) -> Never:
        """Campaign whenever there is no leader, and lead when elected.

        `store` has the prefix of the generation `run`, and `records` watches the key `coordinator`.
        Raises `StoreError` when the store is lost, or the lease has ended.
        """
        self._store, self._run = store, run
        present = records.present.get(_KEY)
        if present is None and not (self._located.is_host or self._located.is_engine):
            # The node that hosts the store has its head start.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOST_HEAD_START):
                    present = await next_value(records)
        while True:
            leader = LeaderRecord.decode(present)
            if leader is None or (leader.member == self._member.name and present != self._record):
                # No leader, no readable record, or one of this member's previous lease.
                present = await self.campaign(lease, present or b"")
                leader = LeaderRecord.decode(present)
            if leader is not None and leader.term:
                self._perform(self._member.on_coordinator(leader.name, leader.term))
            if leader is not None and present == self._record:
                present = await self._lead(leader, lease, records)
            else:
                present = await self._follow(leader, lease, records)

    async def campaign(self, lease: Lease, former: bytes) -> bytes:
        """Try to replace the record `former`; return the record that stands then."""
        candidate = self._new_record(0)
        present = await lease.compare_set(_KEY, former, candidate)
        if present != candidate:
            return present
        detector = None
        if self._engine is not None:
            detector = await self._detector.serve(self._member.status.address, lease)
        # Of the run, not of its generation: a node may still campaign in an ended one.
        term = await self._located.store.add(f"{run_prefix(self._run_id)}/terms")
        elected = self._new_record(term, detector)
        return await lease.compare_set(_KEY, candidate, elected)

    async def migrate(self, run: RunRecord, others: OtherEndpoints) -> Never:
        """Abandon this store once another endpoint has the active run; then raise `StoreLost`.

        The job cannot end here from the `RunMove` on, so its members may go on there.  The next
        leader elected here does the same, so all members migrate one by one.
        """
        at_once = True
        while True:
            other = await others.wait_superseded(
                run, lambda: self._member.is_committed, at_once=at_once
            )
            at_once = False
            # A job that may have ended elsewhere does not go on in another.
            goes_on = other.job == run.job or not run.is_continued
            goes_on_in = other.job if goes_on else ""
            if self._member.has_ended:
                # Other members may not have read the outcome yet; `drain` waits for them.
                await wait_forever()
            if not await claim_move(self._store, goes_on_in):
                continue
            is_active = await others.confirm_superseded(run, other)
            if is_active and await record_move(self._store, goes_on_in):
                who = "the others meet" if goes_on else "another job meets"
                raise StoreLost(f"{who} at {other.endpoint.text}")
            await undo_move(self._store, goes_on_in)

    async def _lead(self, record: LeaderRecord, lease: Lease, records: Watch) -> bytes | None:
        """Coordinate until deposed; return the record that stands then."""
        self.is_leader = True
        try:
            name, instance = self._member.name, self._located.instance
            run = self._runner.run(
                self._store, lease, name=name, term=record.term, instance=instance
            )
            work = [run, self._wait_deposed(records)]
            if record.detector is not None and self._engine is not None:
                work.append(self._detector.end_lost(self._engine, self._is_still_leader))
            others = self._located.others
            if others is not None and self._located.index and not self._located.is_host:
                work.append(self.migrate(self._run, others))
            return await first_result(work)
        finally:
            self.is_leader = False

    async def _follow(
        self, leader: LeaderRecord | None, lease: Lease, records: Watch
    ) -> bytes | None:
        """Return the next record; until then, watch the process of another leader."""
        if leader is None or leader.detector is None or self._engine is None:
            return await next_value(records)
        watching = self._watch_leader(leader.detector, self._engine, lease)
        return await first_result([next_value(records), watching])

    async def _watch_leader(self, port: DetectorPort, engine: EngineStore, lease: Lease) -> Never:
        # While the round forms the leader has most to do.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PLACED_WITHIN):
                while self._member.status.placement is None:
                    await self._changed.wait()
        await self._detector.watch_leader(port, engine, lease)

    def _new_record(self, term: int, detector: DetectorPort | None = None) -> bytes:
        name = self._member.status.node.name
        self._record = encode(LeaderRecord(term, self._member.name, name, detector))
        return self._record

    async def _is_still_leader(self) -> bool:
        return await self._store.peek(_KEY) == self._record

    async def _wait_deposed(self, records: Watch) -> bytes | None:
        """Return the record of another leader, or None, once this member is deposed."""
        while True:
            await anext(records)
            present = await self._store.peek(_KEY)
            if present != self._record:
                return present


async def next_value(records: Watch) -> bytes | None:
    """Wait for the next change of a watched key; return its value, None once it is deleted."""
    return (await anext(records)).value
