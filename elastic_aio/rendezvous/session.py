"""A member's session at one store: its lease, its status, its orders, and the election.

Keys, under the prefix of the run's generation (see `elastic_aio.discovery.keys`):

* `t/<member>`: the member's status, under its lease;
* `o/<member>`: the coordinator's order for it, under the coordinator's lease, so that
  the store refuses the orders of a deposed coordinator;
* `coordinator`: the `LeaderRecord` of the coordinator, under the same lease;
* `d/<lease>`: of an engine only: a member has checked whether its lease has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Never

from msgspec.structs import replace

from elastic_aio.aio import (
    Notifier,
    cancel_and_wait,
    create_task,
    monotonic_clock,
    wait_forever,
    wall_clock,
)
from elastic_aio.discovery.keys import enter_run, read_end, release_claim, run_store
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election, first_result
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    LEASE_LINGER,
    MemberPhase,
    MessageError,
    decode_order,
    decode_status,
    encode,
)
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import ChangeKind, Lease, Store, Watch


class StoreSession:
    """Takes part at one store until it is lost.

    Attributes:
        written_serial: that of the last status that is in the store; -1 before the first.
    """

    def __init__(
        self,
        located: LocatedStore,
        spec: RendezvousSpec,
        run_id: str,
        member: Member,
        runner: CoordinatorRunner,
        election: Election,
        perform: Callable[[Iterable[MemberEffect]], None],
        changed: Notifier,
    ) -> None:
        """Prepare; `changed` notifies of each change of the member's status."""
        self._located = located
        self._spec = spec
        self._run_id = run_id
        self._member = member
        self._runner = runner
        self._election = election
        self._perform = perform
        self._changed = changed
        self._store: Store = located.store
        self._own_key = f"t/{member.name}"
        self._is_draining = False
        self.written_serial = -1

    def __repr__(self) -> str:
        return f"<StoreSession at {self._located.endpoint}>"

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator of the run is on this node."""
        return self._election.is_leader

    @property
    def has_joined(self) -> bool:
        """Whether its first status is in the store."""
        return self.written_serial >= 0

    async def run(self) -> str:
        """Take part until the store is lost; return the reason in one line.

        Cancellation: ends the session, and with it the member's lease.
        """
        async with AsyncExitStack() as stack:
            try:
                if not await self._enter_run():
                    return "the run has ended"
                lease, orders, records, ends = await self._begin(stack)
                work = [
                    self._write_statuses(lease),
                    self._follow_orders(orders),
                    self._election.run(self._store, lease, records),
                    self._watch_lease(lease),
                    self._follow_end(ends),
                ]
                if self._located.is_host:
                    work.append(self._election.migrate())
                return await first_result(work)
            except StoreError as error:
                # The part after the semicolon is for callers of store operations.
                return str(error).partition("; ")[0]

    async def _enter_run(self) -> bool:
        """Find the generation to take part in; return False if the job is over."""
        store, member = self._located.store, self._member
        record, end = await enter_run(store, self._run_id, job=member.job, reuse=self._spec.reuse)
        if end is not None:
            self._perform(member.on_end(end.outcome))
            return False
        self._store = run_store(store, self._run_id, record)
        member.attend(self._located.instance + b"%d" % record.generation, record.job)
        return True

    async def _begin(self, stack: AsyncExitStack) -> tuple[Lease, Watch, Watch, Watch]:
        """Begin the lease and the watches, at once: their requests are sent together."""
        enter, store = stack.enter_async_context, self._store
        lease = create_task(enter(store.lease(self._spec.heartbeat_timeout, linger=LEASE_LINGER)))
        orders = create_task(enter(store.watch(f"o/{self._member.name}")))
        records = create_task(enter(store.watch("coordinator")))
        ends = create_task(enter(store.watch("end")))
        try:
            return await asyncio.gather(lease, orders, records, ends)
        finally:
            await cancel_and_wait([lease, orders, records, ends])

    # ---------------------------------------------------------------- its tasks

    async def _write_statuses(self, lease: Lease) -> str:
        while True:
            now = wall_clock()
            clock = now - monotonic_clock()
            status = replace(self._member.status, sent_at=now, clock=clock)
            try:
                await lease.set(self._own_key, encode(status))
            except StoreLost:
                if not lease.is_alive:
                    raise
                continue  # the connection comes back, or the lease ends
            self.written_serial = status.serial
            self._changed.notify_all()
            while self._member.status.serial == status.serial or self._is_draining:
                await self._changed.wait()

    async def _follow_orders(self, orders: Watch) -> str:
        for text in orders.present.values():
            self._on_order(text)
        async for change in orders:
            if change.value is not None:
                self._on_order(change.value)
        return "the orders have ended"

    def _on_order(self, text: bytes) -> None:
        try:
            order = decode_order(text)
        except MessageError:
            return  # not written by a coordinator; its own order replaces it
        if order.history is not None:
            self._runner.budget.follow(order.history, asyncio.get_running_loop().time())
        self._perform(self._member.on_order(order))

    async def _watch_lease(self, lease: Lease) -> str:
        await lease.wait_ended()
        return "the lease of this node has ended"

    async def _follow_end(self, ends: Watch) -> Never:
        """Take the recorded end, which reaches members without an order too."""
        if not ends.present:
            while (await anext(ends)).value is None:
                pass
        end = await read_end(self._store)
        if end is not None:
            self._perform(self._member.on_end(end.outcome))
        await wait_forever()

    # ----------------------------------------------------------------- its end

    async def resign(self) -> None:
        """Let the coordinator, if it is here, act on this member's departure.

        The next coordinator cannot read the status of a member that has left; it learns
        from the others that the member was done (`MembersDone`), or, if none is left, from the
        `RoundRecord` that no workers run.

        Raises:
            StoreError: the store is lost.
        """
        if self.is_leader:
            await self._delete_status()
        if self.is_leader:
            await self._runner.wait_departed()

    async def _delete_status(self) -> None:
        self._is_draining = True
        await self._store.delete(self._own_key)

    async def wait_alone(self) -> None:
        """Wait until no other member has workers in a round.

        Those that have succeeded do not count: two nodes may wait at their barriers, after
        rounds of two partitions.

        Raises:
            StoreError: the store is lost.
        """
        async with self._store.watch("t/", is_prefix=True) as statuses:
            users = {key for key, text in statuses.present.items() if _has_workers(text)}
            while users - {self._own_key}:
                change = await anext(statuses)
                if change.value is None or not _has_workers(change.value):
                    users.discard(change.key)
                else:
                    users.add(change.key)

    async def drain(self) -> None:
        """Wait until all other members have left, if they need this one.

        They need the coordinator and the node that hosts the store.

        Raises:
            StoreError: the store is lost.
        """
        is_leader = self.is_leader
        if not (is_leader or self._located.is_host):
            return
        await self._delete_status()
        async with self._store.watch("t/", is_prefix=True) as statuses:
            members = set(statuses.present)  # later ones belong to another job
            left = set(members)
            while left:
                change = await anext(statuses)
                if change.kind is not ChangeKind.SET:
                    left.discard(change.key)
                elif change.key in members:
                    left.add(change.key)
        if is_leader and not (self._located.is_host or self._located.is_engine):
            await self._runner.delete_keys(self._store)
            await release_claim(self._located.store, self._run_id)


def _has_workers(text: bytes) -> bool:
    """Whether a status is that of a member whose workers have not all succeeded."""
    try:
        status = decode_status(text)
    except MessageError:
        return False
    return status.placement is not None and status.phase is not MemberPhase.SUCCEEDED
