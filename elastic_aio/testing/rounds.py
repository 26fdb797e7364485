"""Invariants of rounds: ranks, numbers, and workers that must not run at the same time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from elastic_aio.discovery.choice import FENCE
from elastic_aio.rendezvous.base import Placement, StartRound
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.store import SimStore
from elastic_aio.testing.trace import Trace

_NOTICE_S: Final = 2.5
"""Seconds in which a node, and a coordinator, learns what is in the store."""


@dataclass(slots=True, eq=False)
class SimRound:
    """A round: when and where it was ordered, for which members, and which have succeeded."""

    store: SimStore
    generation: str
    job: str
    formed_at: float
    placement: Placement
    members: dict[str, int] = field(default_factory=dict)
    succeeded: set[int] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether the workers of all ranks have succeeded."""
        return len(self.succeeded) == self.placement.span.group_world_size


class RoundChecker:
    """Checks the rounds of a simulation.

    Attributes:
        rounds: all rounds that were ordered.
        was_partitioned: whether messages were blocked, so that two rounds may run.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        stores: Mapping[bytes, SimStore],
        trace: Trace,
        nodes: Mapping[str, SimNode],
    ) -> None:
        """Begin without rounds; `nodes` has the newest process of each host."""
        self.rounds: dict[tuple[int, str], SimRound] = {}
        self.was_partitioned = False
        self._stores = stores
        self._nodes = nodes
        self._spec = spec
        self._fail = trace.fail
        self._newest: dict[tuple[bytes, str], int] = {}
        """The last number of a round in each generation, by the instance of its store."""
        self._ranks: dict[str, dict[str, int]] = {}
        self._attempts: dict[tuple[str, int], int] = {}

    def on_written(self, store: SimStore, member: str, placement: Placement, now: float) -> None:
        """Check an order in a store: ranks are given once and kept, and numbers only grow."""
        name, size = placement.round_id, placement.span.group_world_size
        nnodes = self._spec.nnodes
        if not nnodes.minimum <= size <= nnodes.maximum:
            self._fail(f"a round of {size} nodes, of {nnodes}")
        if name not in self.rounds:
            generation = store.instance, store.generation
            newest = self._newest.get(generation, -1)
            if placement.round <= newest:
                self._fail(f"{brief(placement)} follows round {newest} at its store")
            self._newest[generation] = placement.round
            job = store.jobs.get(store.generation, "")
            self.rounds[name] = SimRound(store, store.generation, job, now, placement)
        round = self.rounds[name]
        if _common(round.placement) != _common(placement):
            self._fail(f"two rounds of one name: {brief(round.placement)} and {brief(placement)}")
        number = self._attempts.setdefault((placement.formed_by, placement.attempt), name[0])
        if number != placement.round:
            rounds = f"{number} and {placement.round}"
            self._fail(f"attempt {placement.attempt} belongs to rounds {rounds}")
        is_returned = self._spec.restart.healthy_after is not None
        if placement.restarts > self._spec.max_restarts and not is_returned:
            self._fail(f"{placement.restarts} restarts")
        round.members[member] = placement.span.group_rank
        if len(round.members) < size:
            return
        ranks = sorted(round.members.values())
        if ranks != list(range(size)):
            self._fail(f"group ranks {ranks} in a round of {size}")
        former = self._ranks.get(placement.formed_by, {})
        for one, rank in round.members.items():
            previous = former.get(one)
            if previous is not None and previous < size and rank != previous:
                self._fail(f"{one} had group rank {previous} and has {rank}")
        self._ranks[placement.formed_by] = round.members

    def on_ordered(self, node: SimNode, order: StartRound) -> None:
        """Check what a node is sent: it is newer than what it was sent before."""
        placement, last = order.placement, node.placement
        if last is None:
            return
        is_newer = placement.round > last.round and placement.attempt > last.attempt
        # The sides of a partition count restarts separately.
        has_split = self.was_partitioned or len(self._stores) > 1
        is_restart = not has_split and order.cause is not None and order.cause.root is not None
        is_counted = placement.restarts >= last.restarts + is_restart
        if not (is_newer and is_counted and placement.changes >= last.changes):
            self._fail(f"{node.name} was in {brief(last)} and is sent {brief(placement)}")

    def on_started(self, node: SimNode, placement: Placement) -> None:
        """Check a start: no other workers have these ranks, or are of an older round."""
        node.note(f"runs {brief(placement)} as group rank {placement.span.group_rank}")
        if placement is not node.placement:
            self._fail(f"{node.name} starts {placement.round}, and was ordered {node.placement}")
        for other in self._nodes.values():
            running = other.running
            if running is None or other is node:
                continue
            if running.round_id != placement.round_id:
                self._check_overlap(placement, other, running)
            elif running.span.group_rank == placement.span.group_rank:
                self._fail(f"{node.name} and {other.name} have the same rank in {brief(placement)}")

    def _check_overlap(self, placement: Placement, other: SimNode, running: Placement) -> None:
        """Check that no workers of an older round run, on whichever node.

        A node stops its workers before the others start without it (see
        `elastic_aio.rendezvous.formation`), but for the cases of `_may_run_on`.
        """
        if running.round < placement.round and not self._spec.rendezvous.overlap:
            round = self.rounds[placement.round_id]
            joined_at = round.store.joined_at.get(other.number, round.formed_at)
            is_known = joined_at < round.formed_at - _NOTICE_S and not any(
                one.joined_at.get(other.number, 0.0) > joined_at
                for one in self._stores.values()
                if one.is_open
            )
            if is_known or not self._may_run_on(other, round, running):
                text = f"{brief(running)} still runs on {other.name}"
                self._fail(f"{text} as {brief(placement)} starts")

    def _may_run_on(self, node: SimNode, round: SimRound, running: Placement) -> bool:
        """Whether a node that the coordinator of `round` did not know may run older workers.

        * A network that resets its connection looks like the end of its process, which
          is a loss at once, while the node looks for a store.
        * A host that is suspended, or was until just now, cannot act; one whose messages
          are slow learns too late.
        * With a longer `store_grace` the user prefers workers that run on.
        * There is no quorum: nodes that meet at another store are another job.  So are
          those of a round of which no member has come to the store of `round`.  A store
          from which members have come may serve others on, and its end is not seen here.
        """
        rendezvous, host = self._spec.rendezvous, node.host
        since = round.formed_at - rendezvous.heartbeat_timeout - _NOTICE_S
        grace = rendezvous.store_grace
        if grace is not None and grace > rendezvous.heartbeat_timeout - FENCE:
            return True
        if host.disturbed_at > since or host.is_suspended or host.delay or round.store.host.delay:
            return True
        former = self.rounds[running.round_id]
        is_successor = former.store is round.store or not former.members.keys().isdisjoint(
            round.members
        )
        last_joined_at = max(round.store.joined_at.values(), default=-math.inf)
        others = [one for one in self._stores.values() if one is not round.store]
        return not is_successor or any(
            one.was_attended(node.number, left_after=since, closed_after=last_joined_at)
            for one in others
        )

    def on_succeeded(self, node: SimNode) -> None:
        assert node.placement is not None
        self.rounds[node.placement.round_id].succeeded.add(node.placement.span.group_rank)


def brief(placement: Placement) -> str:
    return (
        f"round {placement.round} of {placement.formed_by} (attempt {placement.attempt},"
        f" restarts {placement.restarts}, {placement.span.group_world_size} nodes)"
    )


def _common(placement: Placement) -> tuple[object, ...]:
    span, master = placement.span, (placement.master_addr, placement.master_port)
    counts = placement.attempt, placement.restarts, placement.changes
    return (*counts, span.group_world_size, span.world_size, *master)
