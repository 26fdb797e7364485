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
from typing import TYPE_CHECKING, Never

from msgspec.structs import replace

from elastic_aio.aio import cancel_and_wait, create_task, monotonic_clock, wall_clock
from elastic_aio.discovery.keys import enter_run, read_end, release_claim, run_prefix, run_store
from elastic_aio.discovery.locator import LocatedStore, StoreLocator
from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.node_events import RoundWaiting
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election, first_result
from elastic_aio.rendezvous.failure_detector import FailureDetector
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    LEASE_LINGER,
    MemberPhase,
    MessageError,
    decode_order,
    decode_status,
    encode,
)
from elastic_aio.store import ChangeKind, Lease, Store, Watch

if TYPE_CHECKING:
    from elastic_aio.discovery.engine import EngineLocator


class StoreSession:
    """Takes part at one store until it is lost."""

    def __init__(
        self,
        located: LocatedStore,
        locator: StoreLocator | EngineLocator,
        runner: CoordinatorRunner,
        detector: FailureDetector,
        *,
        name: str,
        run_id: str,
        reuse: bool,
        member: Member,
        ttl: float,
        perform: Callable[[Iterable[MemberEffect]], None],
        on_joined: Callable[[], None],
    ) -> None:
        """Prepare.

        `locator` finds the active run at other endpoints, `runner` coordinates while this
        member is the leader, and `detector` notices losses at an engine.  `reuse` begins the
        run again after its end.  The member counts as lost after `ttl` seconds without a
        message.  `on_joined` is called when its first status has been written.
        """
        self._located = located
        self._locator = locator
        self._runner = runner
        self._detector = detector
        self._name = name
        self._run_id = run_id
        self._reuse = reuse
        self._store: Store = located.store
        self._member = member
        self._ttl = ttl
        self._perform = perform
        self._on_joined = on_joined
        self._changed = asyncio.Event()
        self._written_serial = -1
        self._is_written = asyncio.Event()
        self._is_over = False
        self._is_draining = False
        self._election: Election | None = None

    def __repr__(self) -> str:
        return f"<StoreSession at {self._located.endpoint}>"

    def status_changed(self) -> None:
        """Write the member's present status."""
        self._changed.set()
        if self._election is not None:
            self._election.status_changed()

    async def run(self) -> str:
        """Take part until the store is lost; return the reason in one line.

        Cancellation: ends the session, and with it the member's lease.
        """
        try:
            return await self._run()
        finally:
            self._is_over = True
            self._is_written.set()

    async def _run(self) -> str:
        async with AsyncExitStack() as stack:
            try:
                if not await self._enter_run():
                    return "the run has ended"
                lease, orders, records, ends = await self._begin(stack)
                self._election = Election(
                    self._store,
                    self._located.store.prefixed(run_prefix(self._run_id)),
                    self._located,
                    self._runner,
                    self._member,
                    self._detector,
                    name=self._name,
                    perform=self._perform,
                    migrate=self._migrate,
                )
                work = [
                    self._write_statuses(lease),
                    self._follow_orders(orders),
                    self._election.run(records, lease),
                    self._watch_lease(lease),
                    self._follow_end(ends),
                ]
                if self._located.is_host:
                    work.append(self._wait_superseded())
                return await first_result(work)
            except StoreError as error:
                # The part after the semicolon is for callers of store operations.
                return str(error).partition("; ")[0]

    async def _begin(self, stack: AsyncExitStack) -> tuple[Lease, Watch, Watch, Watch]:
        """Begin the lease and the watches, at once: their requests are sent together."""
        enter, store = stack.enter_async_context, self._store
        lease = create_task(enter(store.lease(self._ttl, linger=LEASE_LINGER)))
        orders = create_task(enter(store.watch(f"o/{self._name}")))
        records = create_task(enter(store.watch("coordinator")))
        ends = create_task(enter(store.watch("end")))
        try:
            return await asyncio.gather(lease, orders, records, ends)
        finally:
            await cancel_and_wait([lease, orders, records, ends])

    async def _enter_run(self) -> bool:
        """Find the generation to take part in; return False if the job is over."""
        store, member = self._located.store, self._member
        record, end = await enter_run(store, self._run_id, job=member.job, reuse=self._reuse)
        if end is not None:
            self._perform(member.on_end(end.outcome))
            return False
        self._store = run_store(store, self._run_id, record)
        member.attend(self._located.instance + b"%d" % record.generation, record.job)
        return True

    async def _follow_end(self, ends: Watch) -> Never:
        """Take the recorded end, which reaches members without an order too."""
        while True:
            if ends.present or (await anext(ends)).value is not None:
                end = await read_end(self._store)
                if end is not None:
                    self._perform(self._member.on_end(end.outcome))
                await asyncio.get_running_loop().create_future()

    async def wait_status_written(self) -> None:
        """Wait until the present status has been written, or the session is over."""
        while self._written_serial < self._member.status.serial and not self._is_over:
            self._is_written.clear()
            await self._is_written.wait()

    async def resign(self) -> None:
        """Let the coordinator record this member's success before its lease ends.

        Raises:
            StoreError: the store is lost.
        """
        if self._election is not None and self._election.is_leader:
            await self._delete_status()
            await self._election.resign()

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator of the run is on this node."""
        return self._election is not None and self._election.is_leader

    @property
    def serves_others(self) -> bool:
        """Whether other nodes' workers use a store of this node: the job's, or a round's."""
        return self._located.is_host or self._member.is_lead

    def waiting_event(self, waited: float) -> RoundWaiting:
        """Return the event that says for what `wait_alone` waits."""
        what = "other nodes' workers, which use the store of this node"
        return RoundWaiting(phase="barrier", what=what, waited=waited)

    async def wait_alone(self) -> None:
        """Wait until no other member has workers in a round.

        Those that have succeeded do not count: two nodes may wait at their barriers, after
        rounds of two partitions.

        Raises:
            StoreError: the store is lost.
        """
        own = f"t/{self._name}"
        async with self._store.watch("t/", is_prefix=True) as statuses:
            users = {key for key, text in statuses.present.items() if _has_workers(text)} - {own}
            while users:
                change = await anext(statuses)
                if change.value is None or not _has_workers(change.value):
                    users.discard(change.key)
                elif change.key != own:
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

    # ------------------------------------------------------------------ its tasks

    async def _delete_status(self) -> None:
        self._is_draining = True
        await self._store.delete(f"t/{self._name}")

    async def _write_statuses(self, lease: Lease) -> str:
        while True:
            now = wall_clock()
            clock = now - monotonic_clock()
            status = replace(self._member.status, sent_at=now, clock=clock)
            try:
                await lease.set(f"t/{self._name}", encode(status))
            except StoreLost:
                if not lease.is_alive:
                    raise
                continue  # the connection comes back, or the lease ends
            if self._written_serial < 0:
                self._on_joined()
            self._written_serial = status.serial
            self._is_written.set()
            while self._member.status.serial == status.serial or self._is_draining:
                await self._changed.wait()
                self._changed.clear()

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

    async def _wait_superseded(self) -> str:
        endpoint = await self._locator.wait_superseded(self._located)
        if self._member.has_ended:
            # Other members may not have read the outcome yet; `drain` waits for them.
            await asyncio.get_running_loop().create_future()
        return f"the others meet at {endpoint}"

    async def _migrate(self) -> Never:
        """Abandon this store once an earlier endpoint has the active run.

        The next leader elected here does the same, so all members migrate one by one.

        Raises:
            StoreLost: always, then.
        """
        raise StoreLost(await self._wait_superseded())


def _has_workers(text: bytes) -> bool:
    """Whether a status is that of a member whose workers have not all succeeded."""
    try:
        status = decode_status(text)
    except MessageError:
        return False
    return status.placement is not None and status.phase is not MemberPhase.SUCCEEDED
