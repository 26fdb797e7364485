"""Invariants of a job of many nodes, checked at every step of a simulation.

The checks see what an outsider could see: the keys in the stores, and what each node does
with its workers.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_aio.events import Event, RoundForming
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import (
    EndJob,
    Placement,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.messages import LeaderRecord, Order, OrderBody
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.store.server_connection import Connection
from elastic_aio.testing.network import Listener, Network
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.store import SimStore

RoundName = tuple[int, str]


class InvariantViolated(AssertionError):
    """An invariant of the job does not hold; the message ends with the trace."""


class InvariantChecker:
    """Records the trace of a simulation, and checks each step.

    Attributes:
        trace: what has happened, one line each.
        failure: the first violation.
        stores: all stores that there were, by instance; ordered.
        rounds: one placement of each round, by number and coordinator.
        outcomes: how the job has ended, by the name of each node on which it has.
        faults: how many faults were injected.
        disturbed_at: when the last fault began or ended.
        event_hook: called with each event of each node.
        order_hook: called with each order: the host of the store, the member's node.
    """

    def __init__(self, network: Network, spec: LaunchSpec, seed: int) -> None:
        """Begin with an empty trace."""
        self.trace: list[str] = []
        self.failure: InvariantViolated | None = None
        self.stores: dict[bytes, SimStore] = {}
        self.rounds: dict[RoundName, Placement] = {}
        self.outcomes: dict[str, JobOutcome] = {}
        self.faults = 0
        self.was_partitioned = False
        self.event_hook: Callable[[SimNode, Event], None] | None = None
        self.order_hook: Callable[[SimStore, str, OrderBody], None] | None = None
        self._time = network.time
        self._spec = spec
        self._seed = seed
        self._nodes: dict[str, SimNode] = {}
        self._last: dict[str, Placement] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._ordered: dict[RoundName, dict[str, Placement]] = {}
        self._former: dict[str, dict[str, int]] = {}
        network.on_accepted = self._on_accepted

    def note(self, name: str, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self._time.now:9.3f} {name}: {text}")

    def fail(self, text: str) -> None:
        """Report a violation, which the simulation raises; the first one counts."""
        if self.failure is None:
            trace = "\n".join(self.trace)
            self.failure = InvariantViolated(f"seed {self._seed}: {text}\n{trace}")

    def on_error(self, text: str) -> None:
        """Report an error that no code handles."""
        self.fail(f"an error was not handled: {text}")

    # ------------------------------------------------------------- the stores

    @property
    def open_stores(self) -> list[SimStore]:
        """The stores that are served now; several in a partition."""
        return [store for store in self.stores.values() if store.is_open]

    def _on_accepted(self, listener: Listener, protocol: object) -> None:
        if isinstance(protocol, Connection):
            server = protocol._server
            if server.instance not in self.stores:
                self.stores[server.instance] = SimStore(listener, server, self._on_change)

    def _on_change(self, store: SimStore, key: str, value: object) -> None:
        member = key.partition("/")[2]
        match value:
            case LeaderRecord():
                self.note(store.host.name, f"{value.name} leads in term {value.term}")
            case Order():
                self._on_order(store, member, value)

    def _on_order(self, store: SimStore, member: str, order: Order) -> None:
        name = store.statuses[member].node.name if member in store.statuses else member
        body = order.body
        match body:
            case StartRound(placement):
                rank = placement.span.group_rank
                self.note(store.host.name, f"order for {name}: start {_brief(placement)} as {rank}")
                self._check_formed(member, placement)
            case StopRound() | EndJob() | RestartPending():
                self.note(store.host.name, f"order for {name}: {type(body).__name__}")
        if self.order_hook is not None:
            self.order_hook(store, member, body)

    def _check_formed(self, member: str, placement: Placement) -> None:
        """Check that the ranks of a round are given once, and kept from round to round."""
        size = placement.span.group_world_size
        minimum, maximum = self._spec.nnodes.minimum, self._spec.nnodes.maximum
        if not minimum <= size <= maximum:
            self.fail(f"a round of {size} nodes, of {self._spec.nnodes}")
        ordered = self._ordered.setdefault((placement.round, placement.formed_by), {})
        ordered[member] = placement
        if len(ordered) < size:
            return
        by_member = {name: one.span.group_rank for name, one in ordered.items()}
        ranks = sorted(by_member.values())
        if ranks != list(range(size)):
            self.fail(f"group ranks {ranks} in a round of {size}")
        former = self._former.get(placement.formed_by, {})
        for name, rank in by_member.items():
            previous = former.get(name)
            if previous is not None and previous < size and rank != previous:
                self.fail(f"{name} had group rank {previous} and has {rank}")
        self._former[placement.formed_by] = by_member

    # --------------------------------------------------------------- the nodes

    def on_round_ordered(self, node: SimNode, order: StartRound) -> None:
        """Check an order: the round is newer, and all its members agree about it."""
        placement = order.placement
        last = self._last.get(node.name)
        self._last[node.name] = placement
        if last is not None:
            is_newer = placement.round > last.round and placement.attempt > last.attempt
            # The sides of a partition count separately, and continue from the maximum.
            has_split = self.was_partitioned or len(self.stores) > 1
            is_restart = not has_split and order.cause is not None and order.cause.root is not None
            is_counted = placement.restarts >= last.restarts + is_restart
            if not (is_newer and is_counted and placement.changes >= last.changes):
                self.fail(f"{node.name} was in {_brief(last)} and is sent {_brief(placement)}")
        if placement.restarts > self._spec.max_restarts:
            self.fail(f"{placement.restarts} restarts")
        key = placement.round, placement.formed_by
        same = self.rounds.setdefault(key, placement)
        if _common(same) != _common(placement):
            self.fail(f"two rounds of one name: {_brief(same)} and {_brief(placement)}")
        attempt = placement.formed_by, placement.attempt
        round = self._attempts.setdefault(attempt, placement.round)
        if round != placement.round:
            rounds = f"{round} and {placement.round}"
            self.fail(f"attempt {placement.attempt} belongs to rounds {rounds}")

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check the end that a node is sent."""

    def on_workers_started(self, node: SimNode, placement: Placement) -> None:
        """Check a start: no other workers have these ranks, and no newer order came."""
        self.note(node.name, f"runs {_brief(placement)} as group rank {placement.span.group_rank}")
        if placement is not node.placement:
            self.fail(f"{node.name} starts {placement.round}, and was ordered {node.placement}")
        self._nodes[node.name] = node
        for name, other in list(self._nodes.items()):
            running = other.running
            if running is None:
                del self._nodes[name]
            elif other is not node and _ranks_of(running) == _ranks_of(placement):
                self.fail(f"{node.name} and {name} have the same rank in {_brief(placement)}")

    def on_succeeded(self, node: SimNode) -> None:
        """Take that all workers of a node have succeeded."""

    def on_event(self, node: SimNode, event: Event) -> None:
        """Record an event, and call the hook."""
        if self.event_hook is not None:
            self.event_hook(node, event)
        if not isinstance(event, RoundForming) and (why := getattr(event, "why", "")):
            self.note(node.name, f"event {type(event).__name__}: {why}")

    def on_finished(self, node: SimNode, outcome: JobOutcome | None) -> None:
        """Check the end of the job on a node: nothing is left of it."""
        if outcome is None or outcome.why.startswith("internal error"):
            self.fail(f"{node.name} ended by a defect: {outcome}")
            return
        self.note(node.name, f"ends: {outcome.state}, {outcome.why}")
        self.outcomes[node.name] = outcome
        if node.process.files or node.running is not None:
            self.fail(f"{node.name} has left {list(node.process.files)}, {node.running}")


def _ranks_of(placement: Placement) -> tuple[int, str, int]:
    return placement.round, placement.formed_by, placement.span.group_rank


def _common(placement: Placement) -> tuple[object, ...]:
    """Return the values that all members of a round share."""
    span = placement.span
    return (
        placement.attempt,
        placement.restarts,
        placement.changes,
        span.group_world_size,
        span.world_size,
        placement.master_addr,
        placement.master_port,
    )


def _brief(placement: Placement) -> str:
    return (
        f"round {placement.round} of {placement.formed_by} (attempt {placement.attempt},"
        f" restarts {placement.restarts}, {placement.span.group_world_size} nodes)"
    )
