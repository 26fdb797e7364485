"""A member's session at one store: its lease, its status, its orders, and the election.

Keys, under the prefix of the run's generation (see `elastic_aio.discovery.runs`):

* `t/<member>`: the member's status, under its lease;
* `o/<member>`: the coordinator's order for it, under the coordinator's lease (see `election`);
* `coordinator`: the `LeaderRecord` of the coordinator, under the same lease;
* `d/<lease>`: of an engine only: a member has checked whether its lease has ended.

All coroutines but `run` raise `StoreError` when the store is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import Never

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.aio import (
    Notifier,
    cancel_and_wait,
    create_task,
    first_result,
    monotonic_clock,
    wall_clock,
)
from elastic_aio.discovery.choice import FENCE
from elastic_aio.discovery.locator import LocatedStore
from elastic_aio.discovery.runs import (
    RunEnd,
    RunRecord,
    decode_end,
    decode_move,
    enter_run,
    former_jobs_key,
    read_run,
    release_claim,
    restore_end,
    run_key,
    run_store,
)
from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.outcome import EndCause
from elastic_aio.rendezvous.coordinator_runner import CoordinatorRunner
from elastic_aio.rendezvous.election import Election, next_value
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.messages import (
    LEASE_LINGER,
    MemberPhase,
    MemberStatus,
    MessageError,
    RoundRecord,
    decode_order,
    decode_status,
    encode,
)
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import ChangeKind, Lease, Store, Watch


class FormerStay(Struct, frozen=True):
    """What a member knows of the last store at which it took part.

    Attributes:
        leased_until: until when its lease there cannot have ended, by the clock of the loop.
        goes_on_in: the job in which its job goes on, by a final `RunMove` in that store; or empty.
        knows_failure: whether that store may have a failure of its workers.
    """

    leased_until: float = -math.inf
    goes_on_in: str | None = None
    knows_failure: bool = False

    @property
    def is_leased(self) -> bool:
        """Whether the lease cannot have ended until now."""
        return asyncio.get_running_loop().time() < self.leased_until


_FIRST_ORDER_S = 30.0
"""Seconds after which a member looks for its status if no coordinator has written an order."""


class StoreSession:
    """Takes part at one store until it is lost.

    Attributes:
        written_serial: of the last status that is in the store; -1 before the first.
        stay: what this member knows of the store once it is lost.
    """

    def __init__(
        self,
        located: LocatedStore,
        spec: RendezvousSpec,
        run_id: str,
        program: str,
        member: Member,
        runner: CoordinatorRunner,
        election: Election,
        perform: Callable[[Iterable[MemberEffect]], None],
        changed: Notifier,
        former: FormerStay,
    ) -> None:
        """Prepare; `changed` notifies of each change of the member's status.

        `program` names what the workers run; `former` is where the member has taken part last.
        """
        self._located = located
        self._spec = spec
        self._run_id = run_id
        self._program = program
        self._member = member
        self._runner = runner
        self._election = election
        self._perform = perform
        self._changed = changed
        self._former = former
        self._store: Store = located.store
        self._own_key = f"t/{member.name}"
        self._is_draining = False
        self._lease: Lease | None = None
        self._has_seen_end = False
        self._moved_to: str | None = None
        """The job in which this job goes on at another store; None: it goes on here."""
        self._knows_failure = False
        self.written_serial = -1
        self.stay = FormerStay()

    def __repr__(self) -> str:
        return f"<StoreSession at {self._located.endpoint}>"

    @property
    def is_leader(self) -> bool:
        """Whether the coordinator of the run is on this node."""
        return self._election.is_leader

    @property
    def last_received_at(self) -> float:
        """When the store has sent its last reply, in loop seconds."""
        return self._located.store.last_received_at

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
                run = await self._enter_run()
                if run is None:
                    return "the run has ended"
                lease, orders, records, ends = await self._begin(stack)
                self._lease = lease
                work = [
                    self._write_statuses(lease),
                    self._follow_orders(orders),
                    self._election.run(self._store, run, lease, records),
                    self._watch_lease(lease),
                    self._follow_end(ends),
                ]
                others = self._located.others
                if others is not None and self._located.is_host:
                    work.append(self._election.migrate(run, others))
                return await first_result(work)
            except StoreError as error:
                # The part after the semicolon is for callers of store operations.
                return str(error).partition("; ")[0]
            finally:
                # The lease began at the last request that was answered.  The store may end it as
                # soon as a connection ends, but stays so long after the end of the job (`drain`).
                seconds = min(self._spec.heartbeat_timeout, self._spec.close_timeout) - FENCE
                until = self._located.store.last_reply_at + seconds
                self.stay = FormerStay(until, self._moved_to, self._knows_failure)

    async def _enter_run(self) -> RunRecord | None:
        """Find the generation to take part in; return None if the job is over."""
        member = self._member
        entry = await self._find_run()
        if entry is None:
            why = f"another job with the id {self._run_id!r} runs there, and the end of the one in"
            why += " which this node took part is not known"
            self._perform(member.fail(why, EndCause.OTHER_JOB))
            return None
        record, end = entry
        if end is not None:
            self._has_seen_end = True
            self._perform(member.on_end(end.outcome, is_late=True))
            return None
        self._store = run_store(self._located.store, self._run_id, record)
        instance = self._located.instance + b"%d" % record.generation
        if member.attend(instance, record.job, was_leased=self._former.is_leased):
            self._runner.budget.clear()
        return record

    async def _find_run(self) -> tuple[RunRecord, RunEnd | None] | None:
        """Return the generation, and its end if it is over.

        None: another job runs there, and the end of this member's own is not known.
        """
        may_begin = self._located.is_host and not (
            self._may_have_ended or self._member.has_seen_success
        )
        return await self._look_for_run(may_begin=may_begin) or await self._wait_for_run()

    @property
    def _may_have_ended(self) -> bool:
        """Whether the job may have ended with success at a store that is no longer known."""
        is_open = self._former.is_leased and not self._member.status.moves
        return self._member.has_succeeded and not is_open

    def _goes_on(self, job: str) -> bool:
        """Whether the member's job cannot have ended at the former store, and may join `job`."""
        if self._former.goes_on_in is not None:
            return self._former.goes_on_in == job
        status = self._member.status
        self._runner.budget.has_progress = status.has_progress
        is_spent = self._runner.budget.is_exhausted(status.runtime)
        is_open = status.is_busy or status.pending_restart is not None
        # A failure ends no job that may be restarted, nor a job whose coordinator has not seen it.
        is_final = self._former.knows_failure and is_spent
        has_succeeded = self._member.has_succeeded or self._member.has_seen_success
        # A coordinator may end a job while such nodes have their leases.
        is_waiting = self._member.is_standing_by or self._member.is_excluded
        may_go_on = not (has_succeeded or is_final or is_waiting)
        return self._former.is_leased and (is_open or may_go_on)

    async def _look_for_run(self, *, may_begin: bool) -> tuple[RunRecord, RunEnd | None] | None:
        return await enter_run(
            self._located.store,
            self._run_id,
            program=self._program,
            job=self._member.job,
            reuse=self._spec.reuse,
            is_committed=self._member.is_committed,
            goes_on=self._goes_on,
            may_begin=may_begin,
        )

    async def _wait_for_run(self) -> tuple[RunRecord, RunEnd | None] | None:
        """Wait until a node that runs workers of this job shows where it goes on.

        Such a node has lost the same store, and comes within the time of a lease.  If the job may
        have ended, and no other has begun, this node waits for it until the end of its exit
        barrier.
        """
        run_id, store = self._run_id, self._located.store
        async with (
            store.watch(run_key(run_id)) as runs,
            store.watch(former_jobs_key(run_id)) as jobs,
        ):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._spec.heartbeat_timeout):
                        while (entry := await self._look_for_run(may_begin=False)) is None:
                            await first_result([next_value(runs), next_value(jobs)])
                        return entry
                is_empty, others = await read_run(store, run_id) is None, self._located.others
                if is_empty and others is not None and await others.have(self._member.job):
                    raise StoreLost("its job is known at another endpoint")
                if self._member.has_seen_success:
                    return None
                if not (is_empty and self._may_have_ended):
                    return await self._look_for_run(may_begin=True)
                # No event reports a store that begins elsewhere: look there again.

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
            serial = self._member.status.serial
            try:
                await self._write_status(lease)
            except StoreLost:
                if not lease.is_alive:
                    raise
                continue  # the connection comes back, or the lease ends
            while self._member.status.serial == serial or self._is_draining:
                await self._changed.wait()

    async def _write_status(self, lease: Lease) -> None:
        now = wall_clock()
        clock = now - monotonic_clock()
        status = replace(self._member.status, sent_at=now, clock=clock)
        self._knows_failure = bool(status.failures)
        await lease.set(self._own_key, encode(status))
        self.written_serial = status.serial
        self._member.has_published_notice |= status.preemption is not None
        self._changed.notify_all()

    async def write_last(self) -> None:
        """Write the last status, also while the store has not answered the status before.

        A store that was suspended reads both, and then the end of the connection.
        """
        self._is_draining = True
        if self._lease is not None:
            await self._write_status(self._lease)

    async def _follow_orders(self, orders: Watch) -> str:
        """Follow the orders; return once the coordinator takes this member for gone.

        Its order is deleted then.  A member without an order looks for its status itself.
        """
        for text in orders.present.values():
            self._on_order(text)
        timeout = None if orders.present else _FIRST_ORDER_S
        while True:
            try:
                async with asyncio.timeout(timeout):
                    change = await anext(orders)
            except TimeoutError:
                pass
            else:
                timeout = None
                if change.value is not None:
                    self._on_order(change.value)
                    continue
            is_written = self.has_joined and not self._is_draining
            if is_written and await self._store.peek(self._own_key) is None:
                return "the status of this node was removed"

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
        value, is_late = next(iter(ends.present.values()), None), True
        while True:
            move = decode_move(value)
            self._moved_to = None if move is None else move.goes_on_in
            end = decode_end(value)
            self._has_seen_end = end is not None
            if end is not None:
                self._perform(self._member.on_end(end.outcome, is_late=is_late))
            value, is_late = (await anext(ends)).value, False

    async def confirm_end(self) -> None:
        """Record the end that this member was ordered, if the store does not have it."""
        outcome = self._member.status.outcome
        if outcome is not None and not self._has_seen_end:
            await restore_end(self._store, outcome, wall_clock())

    # ----------------------------------------------------------------- its end

    async def resign(self) -> None:
        """Let the coordinator, if it is here, act on this member's departure.

        The next coordinator cannot read the status of a member that has left; it learns from the
        others that the member was done (`MembersDone`), or, if none is left, from the `RoundRecord`
        that no workers run.
        """
        if self.is_leader:
            await self._delete_status()
        if self.is_leader:
            await self._runner.wait_departed()

    async def _delete_status(self) -> None:
        self._is_draining = True
        await self._store.delete(self._own_key)

    async def has_own_round(self) -> bool:
        """Return whether the last round of a coordinator at this store is this member's."""
        record = RoundRecord.decode(await self._store.peek("round"))
        own = self._member.status.placement
        if record is None or own is None:
            return False
        return (record.round, record.formed_by) == own.round_id

    async def wait_alone(self) -> None:
        """Wait until no other member has workers that need this node.

        Members that have succeeded do not count: two nodes may wait at their barriers, after rounds
        of two partitions.  The workers of another round use another node's store; all of them need
        the node that hosts the store of the rendezvous.  A node that is stopped waits only for the
        workers of its round, until they have stopped: the others go on without it.
        """
        own = self._member.status
        is_draining = bool(own.drain_reason)
        placement = own.placement if is_draining or not self._located.is_host else None
        round_id = None if placement is None else placement.round_id

        def is_user(text: bytes) -> bool:
            status = _status_with_workers(text, round_id)
            return status is not None and (status.is_busy or not is_draining)

        async with self._store.watch("t/", is_prefix=True) as statuses:
            present = statuses.present.items()
            users = {key for key, text in present if is_user(text)}
            while users - {self._own_key}:
                change = await anext(statuses)
                if change.value is None or not is_user(change.value):
                    users.discard(change.key)
                else:
                    users.add(change.key)

    async def drain(self) -> None:
        """Wait until all other members that need this member have left.

        They need the coordinator and the node that hosts the store.  A member that was lost before
        it had succeeded may come back within the time of its lease: it must then find the end of
        its job, and not the next job at this endpoint.  So may a member that has not come from the
        former store yet, for as long as this node could itself.  A preempted job waits for neither
        after the deadline of its notice.
        """
        is_leader, is_host = self.is_leader, self._located.is_host
        if not (is_leader or is_host):
            return
        # Another leader knows of the members that were lost until now.
        lost_at = self._runner.lost_at if is_leader else monotonic_clock()
        await self._delete_status()
        async with self._store.watch("t/", is_prefix=True) as statuses:
            members = frozenset(statuses.present)  # later ones belong to another job
            left = statuses.present
            while left:
                change = await anext(statuses)
                if change.value is None:
                    text = left.pop(change.key, b"")
                    if change.kind is ChangeKind.EXPIRED and not _has_succeeded(text):
                        lost_at = monotonic_clock()
                elif change.key in members:
                    left[change.key] = change.value
        if is_host:
            coming = self._former.leased_until + FENCE - asyncio.get_running_loop().time()
            returning = lost_at + self._spec.heartbeat_timeout - monotonic_clock()
            notice = self._member.status.preemption  # the host is there until then
            limit = math.inf if notice is None else notice.until - wall_clock()
            await asyncio.sleep(min(max(coming, returning), limit))
        elif is_leader and not self._located.is_engine:
            await self._runner.delete_keys(self._store)
            await release_claim(self._located.store, self._run_id)


def _status_with_workers(text: bytes, round_id: tuple[int, str] | None) -> MemberStatus | None:
    """Return the status of a member with unfinished workers, of any round for None; else None."""
    try:
        status = decode_status(text)
    except MessageError:
        return None
    if status.placement is None or round_id not in (None, status.placement.round_id):
        return None
    return None if status.phase is MemberPhase.SUCCEEDED else status


def _has_succeeded(text: bytes) -> bool:
    """Whether a status says that all workers have succeeded, or is not a member's."""
    try:
        return decode_status(text).phase is MemberPhase.SUCCEEDED
    except MessageError:
        return True
