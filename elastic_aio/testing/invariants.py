"""Invariants of a job of many nodes, checked at every step of a simulation.

The checks see what an outsider could see: the keys in the stores, and what each node does
with its workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from elastic_aio.discovery.jobs import FormerJob
from elastic_aio.discovery.keys import RunEnd
from elastic_aio.events import Event
from elastic_aio.node_events import RoundForming
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous.base import EndJob, RestartPending, StartRound, StopRound
from elastic_aio.rendezvous.dynamic import order_timeout
from elastic_aio.rendezvous.members import Outbox
from elastic_aio.rendezvous.messages import (
    MemberStatus,
    Order,
    OrderBody,
    Reject,
    StandBy,
    WaitForNodes,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.store.server_connection import Connection
from elastic_aio.testing.ends import EndChecker
from elastic_aio.testing.network import Listener, Network
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.rounds import RoundChecker, brief
from elastic_aio.testing.store import SimStore, Written
from elastic_aio.testing.trace import Trace
from elastic_aio.testing.virtual_time import RATE_MIN

_OBEY_MARGIN_S: Final = 2.0
"""Seconds for the stop of workers, and for messages; hosts are not slow meanwhile."""

_ROUNDS_PER_FAULT: Final = 4
"""How many rounds a fault may lead to at most, on average."""

_KEYS_PER_MEMBER: Final = 3
_KEYS_OF_RUN: Final = 8
_EVENTS_KEPT: Final = 1_000
_ITEMS_PER_MEMBER: Final = 2
_ITEMS_OF_COORDINATOR: Final = 16


@dataclass(slots=True, eq=False)
class _Obligation:
    """What a member must do: an order, the first time that it was written."""

    body: OrderBody
    position: tuple[int, int]
    since: float

    def is_obeyed(self, status: MemberStatus) -> bool:
        """Return whether a status acknowledges the order; one to stop needs no other answer."""
        if isinstance(self.body, StopRound):
            number = self.body.round
            is_stopped = not status.is_busy and status.stopped_round >= number
            return is_stopped or status.round > number
        return status.acked >= self.position


class InvariantChecker:
    """Checks each step of a simulation.

    Attributes:
        stores: all stores that there were, by instance; ordered.
        rounds: the checks of rounds.
        ends: the checks of ends.
        outcomes: how the job has ended, by the name of each node on which it has.
        obey_s: seconds without a fault within which an order is obeyed.
        event_hook: called with each event of each node.
        order_hook: called with the store, the member and the body of each order.
    """

    def __init__(
        self, network: Network, spec: LaunchSpec, trace: Trace, nodes: Mapping[str, SimNode]
    ) -> None:
        """Begin without stores; `nodes` has the newest process of each host."""
        self.stores: dict[bytes, SimStore] = {}
        self.rounds = RoundChecker(spec, self.stores, trace, nodes)
        self.ends = EndChecker(self.rounds.rounds, trace, lambda: network.time.now)
        self.outcomes: dict[str, JobOutcome] = {}
        self.event_hook: Callable[[SimNode, Event], None] | None = None
        self.order_hook: Callable[[SimStore, str, OrderBody], None] | None = None
        self.obey_s = _obey_s(spec)
        self._lease_s = spec.rendezvous.heartbeat_timeout / RATE_MIN
        self._network = network
        self._time = network.time
        self._trace = trace
        self._nodes = nodes
        self._terms: dict[tuple[bytes, int], str] = {}
        self._obligations: dict[tuple[bytes, str], _Obligation] = {}
        network.on_accepted = self._on_accepted

    # ------------------------------------------------------------- the stores

    @property
    def open_stores(self) -> list[SimStore]:
        """The stores that are served now; several in a partition."""
        return [store for store in self.stores.values() if store.is_open]

    def is_tidy(self) -> bool:
        """Return whether a job occupies in its stores what its present members need.

        So do the coordinators in their memory: no container of theirs grows with the time.
        """
        for store in self.open_stores:
            members = len(store.statuses)
            keys_max = _KEYS_PER_MEMBER * members + _KEYS_OF_RUN + _EVENTS_KEPT
            if len(store.orders) > members or store.keyspace.num_keys() > keys_max:
                return False
            for node in self._nodes.values():
                if node.is_live and node.number == store.leader_number:
                    size = _largest_container(node.coordinator, set())
                    if size > _ITEMS_PER_MEMBER * members + _ITEMS_OF_COORDINATOR:
                        return False
        return True

    def _on_accepted(self, listener: Listener, protocol: object) -> None:
        if isinstance(protocol, Connection):
            server = protocol._server
            if server.instance not in self.stores:
                store = SimStore(self._time, listener, server, self._on_change)
                self.stores[server.instance] = store

    def _on_change(self, store: SimStore, member: str, value: Written) -> None:
        if isinstance(value, Order):
            self._oblige(store, member, value)
            self._on_order(store, member, value.body)
        elif isinstance(value, RunEnd):
            self.ends.on_recorded(store, member, value)
        elif isinstance(value, FormerJob):
            self.ends.on_former(value)
        elif term := value.term:
            self._trace.note(store.host.name, f"{value.name} leads in term {term}")
            former = self._terms.setdefault((store.instance, term), member)
            if former != member:
                self._trace.fail(f"term {term} of one store was given to {former} and {member}")

    def _on_order(self, store: SimStore, member: str, body: OrderBody) -> None:
        name = store.statuses[member].node.name if member in store.statuses else member
        text = type(body).__name__
        match body:
            case StartRound(placement):
                text = f"start {brief(placement)} as {placement.span.group_rank}"
                self.rounds.on_written(store, member, placement, self._time.now)
                self.ends.on_written(self.rounds.rounds[placement.round_id])
                rounds = len(self.rounds.rounds)
                if rounds > _ROUNDS_PER_FAULT * (self._trace.faults + 1):
                    self._trace.fail(f"{rounds} rounds after {self._trace.faults} faults")
        if isinstance(body, StartRound | StopRound | EndJob | RestartPending):
            self._trace.note(store.host.name, f"order for {name}: {text}")
        if self.order_hook is not None:
            self.order_hook(store, member, body)

    def _oblige(self, store: SimStore, member: str, order: Order) -> None:
        """Check later that a member obeys its order."""
        key, now = (store.instance, member), self._time.now
        former = self._obligations.get(key)
        if former is None or former.body != order.body:
            position = order.term, order.serial
            obligation = self._obligations[key] = _Obligation(order.body, position, now)
            if not isinstance(order.body, WaitForNodes | StandBy | Reject):
                self._time.at(now + self.obey_s, self._check_obeyed, store, member, obligation)

    def _check_obeyed(self, store: SimStore, member: str, obligation: _Obligation) -> None:
        is_newest = self._obligations[store.instance, member] is obligation
        status = store.statuses.get(member)
        if not is_newest or not store.is_open or member not in store.orders or status is None:
            return
        if obligation.is_obeyed(status):
            return
        now = self._time.now
        calm_since = max(obligation.since, self._trace.fault_at, self._network.repaired_at)
        due = (calm_since if self._network.is_calm else now) + self.obey_s
        if now < due:
            self._time.at(due, self._check_obeyed, store, member, obligation)
        else:
            self._trace.fail(
                f"{member} has not obeyed {obligation} within {self.obey_s:g} s: {status}"
            )

    # --------------------------------------------------------------- the nodes

    def on_ordered(self, node: SimNode, order: StartRound) -> None:
        """Check a round that a node is sent, after `node.placement`."""
        self.rounds.on_ordered(node, order)
        self.ends.on_ordered(node, self.rounds.rounds[order.placement.round_id])

    def on_isolated(self, node: SimNode, why: str) -> None:
        """Check that a node which stops its workers by itself has a reason: a fault just now."""
        calm_since = max(self._trace.fault_at, self._network.repaired_at)
        if self._network.is_calm and self._time.now > calm_since + self._lease_s:
            self._trace.fail(f"{node.name} stops its workers without a fault: {why}")

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check an end: it is true, and recorded."""
        if outcome.is_rendezvous:
            return
        rounds = self.rounds.rounds.values()
        if outcome.state is JobState.SUCCEEDED and not any(one.is_complete for one in rounds):
            self._trace.fail(
                f"{node.name} is sent a success, and no round has succeeded everywhere"
            )
        self.ends.on_end_ordered(node, outcome)

    def on_event(self, node: SimNode, event: Event) -> None:
        """Record an event, and call the hook."""
        if self.event_hook is not None:
            self.event_hook(node, event)
        if not isinstance(event, RoundForming) and (why := getattr(event, "why", "")):
            node.note(f"event {type(event).__name__}: {why}")

    def on_finished(self, node: SimNode) -> None:
        """Check the end of the job on a node: nothing is left of it."""
        outcome = node.outcome
        if outcome is None or outcome.why.startswith("internal error"):
            self._trace.fail(f"{node.name} ended by a defect: {outcome}")
            return
        node.note(f"ends: {outcome.state}, {outcome.why}")
        self.outcomes[node.name] = outcome
        if node.process.files or node.running is not None:
            self._trace.fail(f"{node.name} has left {list(node.process.files)}, {node.running}")


def _obey_s(spec: LaunchSpec) -> float:
    """Return within how many seconds without a fault an order is obeyed, or its member gone.

    An order that was lost on the way is sent again after the first interval of the outbox.
    A member that was killed counts as present until its lease ends: `heartbeat_timeout`
    after its last byte, or after the resumption of the store's host, by the store's clock.
    """
    resent_after = Outbox(0, order_timeout(spec)).interval
    return max(resent_after, spec.rendezvous.heartbeat_timeout / RATE_MIN) + _OBEY_MARGIN_S


def _largest_container(owner: Any, seen: set[int]) -> int:
    """Return the size of the largest container of an object of the rendezvous, or its parts."""
    if id(owner) in seen:
        return 0
    seen.add(id(owner))
    if isinstance(owner, dict | list | set | deque):
        parts = list(owner.values()) if isinstance(owner, dict) else list(owner)
        return max([len(owner), *(_largest_container(part, seen) for part in parts)])
    if not type(owner).__module__.startswith("elastic_aio.rendezvous"):
        return 0
    names = (*getattr(owner, "__slots__", ()), *getattr(owner, "__dict__", ()))
    return max((_largest_container(getattr(owner, name), seen) for name in names), default=0)
