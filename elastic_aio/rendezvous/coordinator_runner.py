"""Drives the coordinator: statuses in from the store, orders and events out to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Never

from msgspec.structs import replace

from elastic_aio.aio import Notifier, cancel_and_wait, create_task, monotonic_clock, wall_clock
from elastic_aio.discovery.runs import end_of, read_move, record_end
from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.events import Event, JobFinished
from elastic_aio.node_events import (
    NodeExcluded,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    RoundWaiting,
)
from elastic_aio.outcome import Failure, JobOutcome
from elastic_aio.rendezvous import messages
from elastic_aio.rendezvous.base import AgentPort, EndJob, NodeInfo, StartRound
from elastic_aio.rendezvous.coordinator import decide
from elastic_aio.rendezvous.event_stream import EventStreamWriter, delete_events
from elastic_aio.rendezvous.state import (
    CoordinatorEffect,
    CoordinatorState,
    RequestDecision,
    RoundSettings,
    SendOrder,
)
from elastic_aio.spec.restart import RestartAction, RestartBudget
from elastic_aio.store import ChangeKind, Lease, Store, Watch

_ROUND = "round"

_PACE_S = 20e-6
"""Seconds for each member from one decision to the next: ten times the cost."""

_PAUSE_MIN_S = 0.001
"""Seconds below which a timer is not exact."""

_LOCAL_EVENTS = (NodeJoined, NodeLeft, NodeLost, NodeRefused, NodeExcluded, RoundWaiting)
"""Events of the coordinator that its own node publishes too; other events, each node publishes."""


class CoordinatorRunner:
    """Coordinates a job at one store while this member is its leader."""

    def __init__(
        self,
        settings: RoundSettings,
        budget: RestartBudget,
        agent: AgentPort,
        *,
        node: NodeInfo,
        run_id: str,
        root: Store | None,
        on_end: Callable[[JobOutcome], None],
    ) -> None:
        """Prepare.

        `on_end` is called with the recorded end, before it is ordered: so this node knows of it
        even if it loses the store in between.  `root` is the whole store, if the workers use it
        too: the keys that the workers of one round leave in it are deleted before the next.
        """
        self._root = root
        self._on_end = on_end
        self._settings = settings
        self.budget = budget
        self._agent = agent
        self._node = node
        self._run_id = run_id
        self.lost_at = -math.inf
        """When this node, as the coordinator, last lost a member that had not succeeded."""
        self._wakeup = asyncio.Event()
        self._departed: list[str] = []
        self._unwritten: list[Event] = []
        self._progress = Notifier()
        """Of the unwritten events, and of the departure."""
        self._deciding: asyncio.Task[None] | None = None
        self._coordinator: CoordinatorState
        self._member = ""
        self._has_departed = False
        """Whether the coordinator has acted on the end of this member's own status."""
        self._cleared = (-1, "")
        """The last round before which the workers' keys were deleted."""
        self._recorded = b""

    async def run(
        self, store: Store, lease: Lease, *, name: str, term: int, instance: bytes
    ) -> Never:
        """Coordinate until the store is lost; may be called again for another term.

        Orders are written under the `lease` of this member.  `store` has the prefix of the run, and
        `instance` identifies its server.

        Cancellation: stops coordinating; the members keep their last orders.

        Raises:
            StoreError: the store is lost, or the lease has ended.
        """
        self._departed.clear()
        self._member = name
        self._recorded = await store.peek(_ROUND) or b""
        former, now = messages.RoundRecord.decode(self._recorded), asyncio.get_running_loop().time()
        if former is not None and former.history is not None:
            # Not the time that it takes to notice a loss: a crash loop has it in each turn.
            age = wall_clock() - former.written_at - self._settings.notice_time
            self.budget.follow(former.history, now - max(0.0, age))
        coordinator = self._coordinator = CoordinatorState(
            self._settings,
            self.budget,
            name=f"{name}@{instance.hex()[:8]}",
            term=term,
            now=now,
            former=former,
        )
        if self._settings.may_move and await read_move(store) is not None:
            # Nodes that have gone to the other store keep their workers on their way.
            coordinator.fence(now + self._settings.heartbeat_timeout)
        async with store.watch("t/", is_prefix=True) as statuses:
            for key, text in statuses.present.items():
                await self._on_status(lease, key, text)
            collecting = create_task(self._collect(lease, statuses), name="member statuses")
            collecting.add_done_callback(lambda _: self._wakeup.set())
            writing = create_task(self._write_events(EventStreamWriter(store)), name="job events")
            try:
                while not collecting.done():
                    decided_at = asyncio.get_running_loop().time()
                    if name in await self._decide(store, lease):
                        self._has_departed = True
                        self._progress.notify_all()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout_at(coordinator.deadline):
                            await self._wakeup.wait()
                    # A decision reads all statuses, so a decision for each would be too many.
                    pause = decided_at + _PACE_S * len(coordinator.members)
                    if (pause := pause - asyncio.get_running_loop().time()) > _PAUSE_MIN_S:
                        await asyncio.wait([collecting], timeout=pause)
                    self._wakeup.clear()
            finally:
                if self._deciding is not None:
                    self._deciding.cancel()  # not waited for: the callback is the user's
                await cancel_and_wait([collecting, writing])
            collecting.result()

    # -------------------------------------------------------------- statuses in

    async def _collect(self, lease: Lease, statuses: Watch) -> Never:
        while True:
            change = await anext(statuses)
            if change.value is not None:
                await self._on_status(lease, change.key, change.value)
            else:
                # After a gap in the watch the reason is unknown: assume the worse.
                is_lost = change.kind is ChangeKind.EXPIRED or change.is_resync
                member, now = change.key.removeprefix("t/"), monotonic_clock()
                record = self._coordinator.members.get(member)
                if is_lost and record is not None and not self._coordinator.has_succeeded(record):
                    self.lost_at = now
                self._coordinator.on_gone(member, now, is_lost=is_lost, is_dead=change.has_closed)
                self._departed.append(member)
            self._wakeup.set()

    async def _on_status(self, lease: Lease, key: str, text: bytes) -> None:
        member = key.removeprefix("t/")
        try:
            status = messages.decode_status(text)
        except messages.MessageError as error:
            why = f"its status cannot be read by this version ({messages.PROTOCOL}): {error}"
            order = messages.Order(self._coordinator.outbox.term, 1, messages.Reject(why))
            await lease.set(f"o/{member}", messages.encode(order))
            return
        self._coordinator.on_status(member, status, monotonic_clock())

    # -------------------------------------------------------------- effects out

    async def _decide(self, store: Store, lease: Lease) -> list[str]:
        """Perform the coordinator's decisions; return the departed members that it knew of."""
        orders: dict[str, messages.Order] = {}
        records = []
        departed, self._departed = self._departed, []
        effects = decide(self._coordinator, asyncio.get_running_loop().time())
        outcome = self._coordinator.outcome
        is_ending = any(isinstance(effect, JobFinished) for effect in effects)
        if is_ending and outcome is not None:
            effects = await self._record_end(store, lease, outcome, effects)
        for effect in effects:
            match effect:
                case SendOrder(member, order):
                    orders[member] = order
                case RequestDecision(failure):
                    deciding = self._call_decide(self._coordinator, failure)
                    self._deciding = create_task(deciding, name="restart.decide")
                case messages.RoundRecord():
                    records.append(self.record_round(store, effect))
                case Event():
                    self._publish(effect)
        starts = [one.body.placement for one in orders.values() if isinstance(one.body, StartRound)]
        begun = max((placement.round_id for placement in starts), default=self._cleared)
        if begun != self._cleared:
            # Once a round: an order may be sent again.
            await self._delete_worker_keys()
            self._cleared = begun
        # All at once, in this order: a round is recorded before it is ordered, and a member that
        # has left may be back, so its last order is deleted first.
        deletes = [store.delete(f"o/{name}") for name in departed]
        writes = [*records, *deletes]
        if orders:  # else it would wait for a connection
            texts = {f"o/{name}": messages.encode(order) for name, order in orders.items()}
            writes.append(lease.set_all(texts))
        await asyncio.gather(*writes)
        return departed

    async def _record_end(
        self, store: Store, lease: Lease, outcome: JobOutcome, effects: list[CoordinatorEffect]
    ) -> list[CoordinatorEffect]:
        """Record the end before it is ordered; return the effects that agree with the record."""
        end = end_of(outcome, wall_clock())
        standing = await record_end(store, lease, end)
        if standing is None:
            raise StoreLost("the others meet at another store")
        self._on_end(standing.outcome)
        if standing == end:
            return effects
        values = {name: getattr(standing, name) for name in ("state", "why", "exit_code")}
        return [
            replace(one, **values) if isinstance(one, JobFinished) else one
            for one in effects
            if not (isinstance(one, SendOrder) and isinstance(one.order.body, EndJob))
        ]

    async def record_round(self, store: Store, record: messages.RoundRecord) -> None:
        """Record the last round, for a coordinator that meets no member of it.

        The write of a deposed coordinator may arrive when its successor has read the record; it
        never replaces a record of a later term.
        """
        text = messages.encode(replace(record, written_at=wall_clock()))
        present = await store.compare_set(_ROUND, self._recorded, text)
        other = messages.RoundRecord.decode(present)
        if present != text and other is not None and other.term < record.term:
            present = await store.compare_set(_ROUND, present, text)
        self._recorded = present

    async def wait_departed(self) -> None:
        """Wait until the coordinator has acted on the end of this member's own status."""
        while not self._has_departed or self._unwritten:
            await self._progress.wait()

    async def delete_keys(self, store: Store) -> None:
        """Delete the keys of the ended generation, all but its end."""
        while self._unwritten:
            await self._progress.wait()
        await asyncio.gather(delete_events(store), store.delete(_ROUND))
        await self._delete_worker_keys()

    async def _delete_worker_keys(self) -> None:
        """Delete all keys but the rendezvous's, if the workers use the same store."""
        if self._root is not None:
            keys = [
                key for key in await self._root.list_keys() if not key.startswith("elastic_aio/")
            ]
            await asyncio.gather(*(self._root.delete(key) for key in keys))

    async def _call_decide(self, coordinator: CoordinatorState, failure: Failure) -> None:
        decision: RestartAction | str
        try:
            decision = await self._agent.decide(failure)
        except Exception as error:  # noqa: BLE001  # the user's code; the job ends by it
            decision = f"restart.decide raised {error!r}"
        coordinator.on_decision(decision)
        self._wakeup.set()

    # ------------------------------------------------------------------- events

    def _publish(self, event: Event) -> None:
        has_own = isinstance(event, NodeExcluded) and event.member == self._member
        if isinstance(event, _LOCAL_EVENTS) and not has_own:
            self._agent.on_event(event)
        stamped = replace(event, time=wall_clock(), run_id=self._run_id, node=self._node.name)
        self._unwritten.append(stamped)
        self._progress.notify_all()

    async def _write_events(self, writer: EventStreamWriter) -> None:
        """Append events to the job's stream, without delaying any order."""
        while True:
            while not self._unwritten:
                await self._progress.wait()
            events = list(self._unwritten)
            try:
                for _ in range(2):  # a broken connection may be back at once
                    with contextlib.suppress(StoreError):  # readers see a gap
                        await writer.write(events)
                        break
            finally:
                del self._unwritten[: len(events)]
                self._progress.notify_all()
