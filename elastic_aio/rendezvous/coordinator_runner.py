"""Drives a `Coordinator`: statuses in from the store, orders and events out to it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Never

from msgspec.structs import replace

from elastic_aio.aio import cancel_and_wait, create_task, monotonic_clock, wall_clock
from elastic_aio.discovery.keys import write_end
from elastic_aio.errors import StoreError
from elastic_aio.events import Event
from elastic_aio.node_events import NodeJoined, NodeLeft, NodeLost, NodeRefused, RoundWaiting
from elastic_aio.outcome import Failure
from elastic_aio.rendezvous.base import AgentPort, NodeInfo, StartRound
from elastic_aio.rendezvous.coordinator import Coordinator
from elastic_aio.rendezvous.event_stream import EventStreamWriter, delete_events
from elastic_aio.rendezvous.members import (
    PublishEvent,
    RequestDecision,
    RoundSettings,
    SendOrder,
)
from elastic_aio.rendezvous.messages import (
    PROTOCOL,
    MessageError,
    Order,
    Reject,
    RoundRecord,
    decode_status,
    encode,
)
from elastic_aio.spec.restart import RestartAction, RestartBudget
from elastic_aio.store import Change, ChangeKind, Lease, Store, Watch

_ROUND = "round"

_LOCAL_EVENTS = (NodeJoined, NodeLeft, NodeLost, NodeRefused, RoundWaiting)
"""Events of the coordinator that its own node publishes too; of the others, each node
publishes its own.
"""


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
    ) -> None:
        """Prepare.

        `root` is the whole store, if the workers use it too: the keys that the workers of
        one round leave in it are deleted before the next.
        """
        self._root = root
        self._settings = settings
        self.budget = budget
        self._agent = agent
        self._node = node
        self._run_id = run_id
        self._wakeup = asyncio.Event()
        self._changes: list[Change] = []
        self._departed: list[str] = []
        self._unwritten: list[Event] = []
        self._has_unwritten = asyncio.Event()
        self._is_written = asyncio.Event()
        self._is_written.set()
        self._is_end_recorded = False
        self._deciding: asyncio.Task[None] | None = None
        self._coordinator: Coordinator | None = None
        self._own_key = ""
        self._is_own_status_gone = False
        self.departure_handled = asyncio.Event()
        """Set once the coordinator has acted on the end of this member's own status."""
        self._cleared: set[tuple[int, str]] = set()

    async def run(
        self, store: Store, lease: Lease, *, name: str, term: int, instance: bytes
    ) -> Never:
        """Coordinate until the store is lost; may be called again for another term.

        Cancellation: stops coordinating; the members keep their last orders.

        `name` and `lease` are those of this member, and orders are written under the
        lease.  `store` has the prefix of the run, and `instance` identifies its server.

        Raises:
            StoreError: the store is lost, or the lease has ended.
        """
        self._changes.clear()
        self._departed.clear()
        recorder = _RoundRecorder(store)
        former = await recorder.read()
        coordinator = Coordinator(
            self._settings,
            self.budget,
            name=f"{name}@{instance.hex()[:8]}",
            term=term,
            now=asyncio.get_running_loop().time(),
            former=former,
            former_age=0.0 if former is None else max(0.0, wall_clock() - former.written_at),
        )
        self._coordinator = coordinator
        self._own_key = f"t/{name}"
        async with store.watch("t/", is_prefix=True) as statuses:
            for key, text in statuses.present.items():
                await self._on_status(coordinator, lease, key, text)
            collecting = create_task(self._collect(statuses), name="member statuses")
            writing = create_task(self._write_events(EventStreamWriter(store)), name="job events")
            try:
                while True:
                    await self._decide(coordinator, recorder, store, lease)
                    if self._is_own_status_gone:
                        self.departure_handled.set()
                    await self._wait_wakeup(coordinator.deadline, collecting)
                    await self._take_changes(coordinator, lease)
            finally:
                if self._deciding is not None:
                    self._deciding.cancel()  # not waited for: the callback is the user's
                await cancel_and_wait([collecting, writing])

    # -------------------------------------------------------------- statuses in

    async def _collect(self, statuses: Watch) -> None:
        async for change in statuses:
            self._changes.append(change)
            self._wakeup.set()

    async def _wait_wakeup(self, deadline: float | None, collecting: asyncio.Task[None]) -> None:
        """Wait for a change or a decision, until the coordinator's deadline."""
        waiting = create_task(self._wakeup.wait())
        left = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            await asyncio.wait(
                [waiting, collecting], timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if collecting.done():
            collecting.result()
        self._wakeup.clear()

    async def _take_changes(self, coordinator: Coordinator, lease: Lease) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            if change.value is not None:
                await self._on_status(coordinator, lease, change.key, change.value)
            else:
                gone = change.key == self._own_key
                self._is_own_status_gone = self._is_own_status_gone or gone
                # After a gap in the watch the reason is unknown: assume the worse.
                is_lost = change.kind is ChangeKind.EXPIRED or change.is_resync
                member = _member_of(change.key)
                coordinator.on_gone(member, is_lost=is_lost)
                self._departed.append(member)

    async def _on_status(
        self, coordinator: Coordinator, lease: Lease, key: str, text: bytes
    ) -> None:
        member = _member_of(key)
        try:
            status = decode_status(text)
        except MessageError as error:
            why = f"its status cannot be read by this version ({PROTOCOL}): {error}"
            order = Order(coordinator.term, 1, Reject(why))
            await lease.set(f"o/{member}", encode(order))
            return
        coordinator.on_status(member, status, monotonic_clock())

    # -------------------------------------------------------------- effects out

    async def _decide(
        self, coordinator: Coordinator, recorder: _RoundRecorder, store: Store, lease: Lease
    ) -> None:
        orders: dict[str, Order] = {}
        for effect in coordinator.decide(asyncio.get_running_loop().time()):
            match effect:
                case SendOrder(member, order):
                    orders[member] = order
                case PublishEvent(event):
                    self._publish(event)
                case RequestDecision(attempt, failure):
                    deciding = self._call_decide(coordinator, attempt, failure)
                    self._deciding = create_task(deciding, name="restart.decide")
        starts = [one.body.placement for one in orders.values() if isinstance(one.body, StartRound)]
        begun = {(placement.round, placement.formed_by) for placement in starts}
        if self._root is not None and not begun <= self._cleared:
            # Once a round: an order may be sent again.
            await _delete_worker_keys(self._root)
            self._cleared = begun
        departed, self._departed = self._departed, []
        records = [] if recorder.is_current(coordinator) else [recorder.write(coordinator)]
        if orders or departed or records:
            # All at once: the connection pipelines them.  A round is recorded before it is
            # ordered.  A member that has left may be back, so its last order is deleted first.
            deletes = [store.delete(f"o/{name}") for name in departed]
            sets = [lease.set(f"o/{name}", encode(order)) for name, order in orders.items()]
            await asyncio.gather(*records, *deletes, *sets)
        if coordinator.outcome is not None and not self._is_end_recorded:
            # The store has accepted the orders, so no other leader has ended the job.
            self._is_end_recorded = True
            await write_end(store, coordinator.outcome, wall_clock())

    async def delete_keys(self, store: Store) -> None:
        """Delete the keys of the ended generation, all but its end.

        Raises:
            StoreError: the store is lost.
        """
        await self._is_written.wait()
        await asyncio.gather(delete_events(store), store.delete(_ROUND))
        if self._root is not None:
            await _delete_worker_keys(self._root)

    async def _call_decide(self, coordinator: Coordinator, attempt: int, failure: Failure) -> None:
        decision: RestartAction | str
        try:
            decision = await self._agent.decide(failure)
        except Exception as error:  # noqa: BLE001  # the user's code; the job ends by it
            decision = f"restart.decide raised {error!r}"
        coordinator.on_decision(attempt, decision)
        self._wakeup.set()

    # ------------------------------------------------------------------- events

    def _publish(self, event: Event) -> None:
        if isinstance(event, _LOCAL_EVENTS):
            self._agent.on_event(event)
        stamped = replace(event, time=wall_clock(), run_id=self._run_id, node=self._node.name)
        self._unwritten.append(stamped)
        self._has_unwritten.set()
        self._is_written.clear()

    async def _write_events(self, writer: EventStreamWriter) -> None:
        """Append events to the job's stream, without delaying any order."""
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            events, self._unwritten = self._unwritten, []
            for _ in range(2):  # a broken connection may be back at once
                with contextlib.suppress(StoreError):  # readers see a gap
                    await writer.write(events)
                    break
            if not self._unwritten:
                self._is_written.set()


class _RoundRecorder:
    """Records the last round, for a coordinator that meets no member of it."""

    def __init__(self, store: Store) -> None:
        """Record in `store`, with the prefix of a generation."""
        self._store = store
        self._present = b""
        self._recorded = (-1, False)
        """Number of the recorded round, and whether it is open."""

    async def read(self) -> RoundRecord | None:
        """Return the last round of former coordinators."""
        self._present = await self._store.peek(_ROUND) or b""
        return RoundRecord.decode(self._present)

    def is_current(self, coordinator: Coordinator) -> bool:
        """Whether the last round has been recorded as it is."""
        return self._recorded == (coordinator.round, coordinator.is_round_open)

    async def write(self, coordinator: Coordinator) -> None:
        """Record the last round.

        The write of a deposed coordinator may arrive when its successor has read the record;
        it never replaces that of a later term.
        """
        self._recorded = coordinator.round, coordinator.is_round_open
        text = encode(coordinator.round_record(wall_clock()))
        present = await self._store.compare_set(_ROUND, self._present, text)
        other = RoundRecord.decode(present)
        if present != text and other is not None and other.term < coordinator.term:
            present = await self._store.compare_set(_ROUND, present, text)
        self._present = present


async def _delete_worker_keys(root: Store) -> None:
    """Delete all keys but those of the rendezvous."""
    keys = [key for key in await root.list_keys() if not key.startswith("elastic_aio/")]
    await asyncio.gather(*(root.delete(key) for key in keys))


def _member_of(key: str) -> str:
    return key.partition("/")[2]
