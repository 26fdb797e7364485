"""Invariants of a job of many nodes, checked at every step of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from elastic_aio.events import Event, RoundFormed
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import (
    EndJob,
    Placement,
    Report,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.coordinator import Coordinator
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.members import CoordinatorEffect, SendOrder
from elastic_aio.rendezvous.messages import OrderBody
from elastic_aio.spec.restart import RestartBudget
from elastic_aio.testing.network import Network
from elastic_aio.testing.settings import SimSettings, WorkerBehavior
from elastic_aio.testing.store import Cluster
from elastic_aio.testing.virtual_time import SimHost, VirtualTime


class InvariantViolated(AssertionError):
    """An invariant of the job does not hold; the message ends with the trace."""


class NodePort(Protocol):
    """A node as its agent, its session and the checks see it."""

    name: str
    host: SimHost
    network: Network
    settings: SimSettings
    member: Member
    budget: RestartBudget
    observer: InvariantChecker
    master_port: int

    @property
    def running(self) -> Placement | None:
        """The placement whose workers run."""

    def note(self, text: str) -> None:
        """Add a line to the trace."""

    def behavior(self, placement: Placement) -> WorkerBehavior:
        """Return what the workers of a round do."""

    def _perform(self, effects: Iterable[MemberEffect]) -> None:
        """Perform the effects of the member."""

    def start_search(self) -> None:
        """Begin to search for a store."""

    def report(self, report: Report) -> None:
        """Take a report of the agent."""

    def on_joined(self) -> None:
        """Take that the first status has been written."""

    def on_session_ended(self, session: object, why: str) -> None:
        """Take the end of a session."""

    def leave(self, why: str) -> None:
        """Leave the job."""

    def on_finished(self, outcome: JobOutcome) -> None:
        """Take the end of the job on this node."""


class InvariantChecker:
    """Records the trace of a simulation, and checks each step."""

    def __init__(
        self, time: VirtualTime, cluster: Cluster, settings: SimSettings, seed: int
    ) -> None:
        """Begin with an empty trace."""
        self.trace: list[str] = []
        self.rounds: dict[tuple[int, str], Placement] = {}
        """One placement of each round, by number and coordinator."""
        self.restarts = 0
        """The highest number of restarts of a round."""
        self.was_partitioned = False
        self.outcomes: dict[str, JobOutcome] = {}
        """How the job has ended, by the name of each node on which it has."""
        self.event_hook: Callable[[NodePort, Event], None] | None = None
        self.order_hook: Callable[[NodePort, str, OrderBody], None] | None = None
        self._time = time
        self._cluster = cluster
        self._settings = settings
        self._seed = seed
        self._running: dict[str, NodePort] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._last: dict[str, Placement] = {}
        self._ranks: dict[Coordinator, dict[str, int]] = {}

    def note(self, name: str, text: str) -> None:
        """Add a line to the trace."""
        self.trace.append(f"{self._time.now:9.3f} {name}: {text}")

    def fail(self, text: str) -> None:
        """Report a violation.

        Raises:
            InvariantViolated: always.
        """
        trace = "\n".join(self.trace)
        raise InvariantViolated(f"seed {self._seed}: {text}\n{trace}")

    # ------------------------------------------------------------------- checks

    def on_decided(
        self, node: NodePort, coordinator: Coordinator, effects: list[CoordinatorEffect]
    ) -> None:
        """Check a decision: the ranks of a round are consecutive, and kept."""
        started: dict[str, Placement] = {}
        for effect in effects:
            if not isinstance(effect, SendOrder):
                continue
            member, body = effect.member, effect.order.body
            if self.order_hook is not None:
                self.order_hook(node, member, body)
            match body:
                case StartRound(placement):
                    started[member] = placement
                    rank = placement.span.group_rank
                    self.note(node.name, f"orders {member}: start {_brief(placement)} as {rank}")
                case StopRound() | EndJob() | RestartPending():
                    self.note(node.name, f"orders {member}: {type(body).__name__}")
        if started and next(iter(started.values())).round == coordinator.round:
            self._check_formed(coordinator, started)

    def _check_formed(self, coordinator: Coordinator, started: dict[str, Placement]) -> None:
        first = next(iter(started.values()))
        size = first.span.group_world_size
        if (first.round, first.formed_by) in self.rounds and len(started) != size:
            return  # sent again, to some members
        settings = self._settings.rounds
        by_member = {member: one.span.group_rank for member, one in started.items()}
        ranks = sorted(by_member.values())
        if ranks != list(range(len(ranks))) or len(ranks) != size:
            self.fail(f"group ranks {ranks} in a round of {size}")
        if not settings.minimum <= len(ranks) <= settings.maximum:
            self.fail(f"a round of {len(ranks)} nodes, of {settings.nnodes}")
        former = self._ranks.get(coordinator, {})
        for member, rank in by_member.items():
            previous = former.get(member)
            if previous is not None and previous < len(ranks) and rank != previous:
                self.fail(f"{member} had group rank {previous} and has {rank}")
        self._ranks[coordinator] = by_member

    def on_round_ordered(self, node: NodePort, order: StartRound) -> None:
        """Check an order: the round is newer, and all its members agree about it."""
        placement = order.placement
        last = self._last.get(node.name)
        self._last[node.name] = placement
        if last is not None:
            is_newer = placement.round > last.round and placement.attempt > last.attempt
            # The sides of a partition count separately, and continue from the maximum.
            has_split = self.was_partitioned or len(self._cluster.stores) > 1
            is_restart = not has_split and order.cause is not None and order.cause.root is not None
            is_counted = placement.restarts >= last.restarts + is_restart
            if not (is_newer and is_counted and placement.changes >= last.changes):
                self.fail(f"{node.name} was in {_brief(last)} and is sent {_brief(placement)}")
        if placement.restarts > self._settings.spec.max_restarts:
            self.fail(f"{placement.restarts} restarts")
        self.restarts = max(placement.restarts, self.restarts)
        key = placement.round, placement.formed_by
        same = self.rounds.setdefault(key, placement)
        if _common(same) != _common(placement):
            self.fail(f"two rounds of one name: {_brief(same)} and {_brief(placement)}")
        attempt = placement.formed_by, placement.attempt
        round = self._attempts.setdefault(attempt, placement.round)
        if round != placement.round:
            rounds = f"{round} and {placement.round}"
            self.fail(f"attempt {placement.attempt} belongs to rounds {rounds}")
        if not placement.span.group_rank:
            expected = node.host.name, node.master_port
            if (placement.master_addr, placement.master_port) != expected:
                self.fail(f"{node.name} has reserved {expected} for {_brief(placement)}")

    def on_workers_started(self, node: NodePort, placement: Placement) -> None:
        """Check a start: no other workers have these ranks, and no newer order came."""
        self.note(node.name, f"runs {_brief(placement)} as group rank {placement.span.group_rank}")
        newest = node.member.status.round
        if placement.round != newest:
            self.fail(f"{node.name} starts {placement.round}, ordered {newest}")
        self._running[node.name] = node
        for name, other in list(self._running.items()):
            running = other.running
            if running is None:
                del self._running[name]
            elif other is not node and _ranks_of(running) == _ranks_of(placement):
                self.fail(f"{node.name} and {name} have the same rank in {_brief(placement)}")

    def on_event(self, node: NodePort, event: Event) -> None:
        """Record an event, and call the hook."""
        if self.event_hook is not None:
            self.event_hook(node, event)
        if not isinstance(event, RoundFormed):
            self.note(node.name, f"event {type(event).__name__} {getattr(event, 'why', '')}")


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
