"""Invariants of a job of many nodes, checked at every step of a simulation.

The checks see only the keys in the stores, and how each node treats its workers:

* A rank of a round is given once, and kept from round to round.  Numbers of rounds, attempts and
  restarts only grow.
* No worker of a round starts while one of an older round lives, on any node (`overlap=False`);
  docs/guarantees.md lists the cases in which that is impossible.
* A term is given once in the life of a store, and every order is obeyed or replaced within seconds.
* A success means that the workers of all ranks of one round have succeeded.  A node obeys only an
  end that is recorded, and that of its own job.  A generation has one end, and no round after it.
* A node that has succeeded in a job that has ended gets no place in another round, and a node with
  a place in one job none in another, unless both are halves of one.  The counters of a job are its
  own.
* The number of rounds is bounded by the number of faults.  Keys in the stores, and the memory of
  the coordinator, belong to present nodes.
* A node that ends leaves no connection and no worker.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from elastic_aio.discovery.choice import FENCE
from elastic_aio.discovery.runs import FormerJob, RunEnd
from elastic_aio.events import Event
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous import messages
from elastic_aio.rendezvous.base import (
    ChangePending,
    EndJob,
    Placement,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.dynamic import order_timeout
from elastic_aio.rendezvous.state import Outbox
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.store.connection import Connection
from elastic_aio.testing.network import Listener, Network
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.simulation import brief
from elastic_aio.testing.virtual_time import Trace
from tests.testing.stores import SimStore, Written

RATE_MIN: Final = 0.99
"""Speed of the slowest clock of a random scenario; the fastest is as much too fast."""

_NOTICE_S: Final = 2.5
"""Seconds in which a node, and a coordinator, learns the content of the store."""


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
    """Checks the rounds of a simulation; two may run if it `was_partitioned`."""

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
        """Check that an order to a node is newer than the node's last one."""
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
        if node.notice is not None:
            self._fail(f"{node.name} starts {placement.round} after its notice")
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
        """Check that no workers of an older round run, but for the cases of `_may_run_on`."""
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

        * A network that resets its connection looks like the end of its process, which is a loss at
          once, while the node looks for a store.
        * A host that is suspended, or was until just now, cannot act; a host whose messages are
          slow learns too late.
        * With a longer `store_grace` the user prefers workers that run on.
        * There is no quorum: nodes that meet at another store are another job.  So are the nodes of
          a round of which no member has come to the store of `round`.  A store from which members
          have come may serve others on, and its end is not seen here.
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


def _common(placement: Placement) -> tuple[object, ...]:
    span, master = placement.span, (placement.master_addr, placement.master_port)
    counts = placement.attempt, placement.restarts, placement.changes
    return (*counts, span.group_world_size, span.world_size, *master)


class _RecordedEnd(NamedTuple):
    """How a job has ended, when, and in which round of the store that has the record.

    `round` None: it has had no round there, so that its nodes had come from another store.
    """

    end: RunEnd
    at: float
    round: SimRound | None = None

    def may_cover(self, round: SimRound) -> bool:
        """Return whether this may be the end of `round`, and not of the other half of the job."""
        own = self.round
        return own is None or own is round or not own.members.keys().isdisjoint(round.members)


class EndChecker:
    """Checks the records and orders after an end, at any store.

    Jobs are named by their `RunRecord`s.  Two halves of one job are joined by a `FormerJob`, before
    either has ended.  The nodes of one job that come to two stores go on in two.
    """

    def __init__(
        self,
        rounds: Mapping[tuple[int, str], SimRound],
        trace: Trace,
        now: Callable[[], float],
    ) -> None:
        """Begin without ends; `rounds` has all rounds that were ordered."""
        self._rounds = rounds
        self._trace = trace
        self._now = now
        self._ends: dict[str, list[_RecordedEnd]] = {}
        """How each job has ended: several times in a partition."""
        self._goes_on_in: defaultdict[str, set[str]] = defaultdict(set)

    @property
    def has_any(self) -> bool:
        """Whether a job has ended."""
        return bool(self._ends)

    def on_recorded(self, store: SimStore, generation: str, end: RunEnd) -> None:
        """Check an end: a generation has no other."""
        job = store.jobs.get(generation, "")
        former, _ = store.ends.get(generation, (end, 0.0))
        if _values(former) != _values(end):
            self._trace.fail(f"the end of {job} was {_values(former)} and is {_values(end)}")
        self._trace.note(store.host.name, f"the end of {job} is recorded: {end.state}")
        last = [one for one in self._rounds.values() if (one.store, one.job) == (store, job)][-1:]
        self._ends.setdefault(job, []).append(_RecordedEnd(end, self._now(), *last))

    def on_former(self, former: FormerJob) -> None:
        """Check that a job which goes on in another has not ended, unless it was preempted."""
        successors = self._goes_on_in[former.job]
        if former.end is not None or former.goes_on_in in successors:
            return
        ends = self._ends.get(former.job, [])
        if any(one.end.state is not JobState.PREEMPTED for one in ends):
            self._trace.fail(f"{former.job} has ended and goes on in {former.goes_on_in}")
        successors.add(former.goes_on_in)

    def on_written(self, round: SimRound) -> None:
        """Check a new round: its generation has not ended, and its counters are its own."""
        _, ended_at = round.store.ends.get(round.generation, (None, self._now()))
        placement = round.placement
        if ended_at < round.formed_at:
            self._trace.fail(f"{brief(placement)} is ordered after the end of the job")
        halves = {one for one in self._goes_on_in if round.job in self._successors(one)}
        others = [one for one in self._rounds.values() if one is not round]
        if placement.restarts and not any(one.job in {round.job, *halves} for one in others):
            self._trace.fail(f"{brief(placement)} is the first one of {round.job}")

    def on_ordered(self, node: SimNode, round: SimRound) -> None:
        """Check that the job of an order to a node, after `node.placement`, has not ended."""
        if node.placement is None:
            return
        former = self._rounds[node.placement.round_id]
        if round.job not in self._successors(former.job):
            self._trace.fail(
                f"{node.name} was in {former.job}, and is sent {brief(round.placement)}"
            )
        for recorded in self._ends.get(former.job, []):
            # A partition may have left two coordinators, of which one had the success.
            ended_at = recorded.at
            is_new = round.store.first_led_at > ended_at and round.formed_at > ended_at
            is_success = recorded.end.state is JobState.SUCCEEDED
            if is_success and former.is_complete and is_new and recorded.may_cover(former):
                self._trace.fail(f"{node.name} has succeeded, and is sent {brief(round.placement)}")

    def on_end_ordered(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check that the end that a node obeys is recorded, for its own job if it had a place."""
        jobs = set(self._ends)
        if node.placement is not None:
            jobs &= self._successors(self._rounds[node.placement.round_id].job)
        recorded = [one.end for job in jobs for one in self._ends[job]]
        if _values(outcome) not in map(_values, recorded):
            self._trace.fail(f"{node.name} is sent an end that is not recorded: {outcome}")

    def _successors(self, job: str) -> set[str]:
        """Return a job and the jobs in which it goes on."""
        found, left = {job}, [job]
        while left:
            further = self._goes_on_in.get(left.pop(), set()) - found
            found |= further
            left += further
        return found


def _values(end: RunEnd | JobOutcome) -> tuple[JobState, int, int]:
    return end.state, end.exit_code, end.restarts


_OBEY_MARGIN_S: Final = 2.0
"""Seconds for the stop of workers, and for messages; no host is slow in them."""

_ROUNDS_PER_FAULT: Final = 4
"""Rounds that a fault may lead to at most, on average."""

_KEYS_PER_MEMBER: Final = 3
_KEYS_OF_RUN: Final = 8
_EVENTS_KEPT: Final = 1_000
_ITEMS_PER_MEMBER: Final = 2
_ITEMS_OF_COORDINATOR: Final = 16


@dataclass(slots=True, eq=False)
class _Obligation:
    """An order that a member must obey, when it was written first."""

    body: messages.OrderBody
    position: tuple[int, int]
    since: float

    def is_obeyed(self, status: messages.MemberStatus) -> bool:
        """Return whether a status acknowledges the order; a stop needs no other answer."""
        if isinstance(self.body, StopRound):
            number = self.body.round
            is_stopped = not status.is_busy and status.stopped_round >= number
            return is_stopped or status.round > number
        return status.acked >= self.position


class InvariantChecker:
    """Checks each step of a simulation.

    Attributes:
        stores: all stores that there were, by instance; ordered.
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
        self.event_hook: Callable[[SimNode, Event], None] | None = None
        self.order_hook: Callable[[SimStore, str, messages.OrderBody], None] | None = None
        self.obey_s = _obey_s(spec)
        self.was_clock_set = False
        """Whether a host's clock was set: another coordinator reads earlier notices by it."""
        self._has_check = spec.rendezvous.health_check is not None
        self._stop_s = spec.stop.grace + _OBEY_MARGIN_S
        self._preempted: dict[tuple[bytes, str], float] = {}
        """When a coordinator first passed a notice on, by generation."""
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
        """Return whether stores and coordinators hold only what the present members need."""
        for store in self.open_stores:
            members = len(store.statuses)
            keys_max = _KEYS_PER_MEMBER * members + _KEYS_OF_RUN + _EVENTS_KEPT
            if len(store.orders) > members or store.keyspace.num_keys() > keys_max:
                return False
            for node in self._nodes.values():
                if node.driver and node.is_live and node.number == store.leader_number:
                    size = _largest_container(node.driver.rendezvous, set())
                    if size > _ITEMS_PER_MEMBER * members + _ITEMS_OF_COORDINATOR:
                        return False
        return True

    def _on_accepted(self, listener: Listener, protocol: object) -> None:
        if isinstance(protocol, Connection):
            service = protocol.service
            if service.instance not in self.stores:
                store = SimStore(self._time, listener, service, self._on_change)
                self.stores[service.instance] = store

    def _on_change(self, store: SimStore, member: str, value: Written) -> None:
        if isinstance(value, messages.Order):
            self._oblige(store, member, value)
            self._on_order(store, member, value.body)
            if isinstance(value.body, ChangePending) and value.body.until:
                self._preempted.setdefault((store.instance, store.generation), self._time.now)
        elif isinstance(value, RunEnd):
            self.ends.on_recorded(store, member, value)
        elif isinstance(value, FormerJob):
            self.ends.on_former(value)
        elif term := value.term:
            self._trace.note(store.host.name, f"{value.name} leads in term {term}")
            former = self._terms.setdefault((store.instance, term), member)
            if former != member:
                self._trace.fail(f"term {term} of one store was given to {former} and {member}")

    def _on_order(self, store: SimStore, member: str, body: messages.OrderBody) -> None:
        name = store.statuses[member].node.name if member in store.statuses else member
        text = type(body).__name__
        match body:
            case StartRound(placement):
                text = f"start {brief(placement)} as {placement.span.group_rank}"
                self.rounds.on_written(store, member, placement, self._time.now)
                self.ends.on_written(self.rounds.rounds[placement.round_id])
                rounds = len(self.rounds.rounds)
                noticed_at = self._preempted.get((store.instance, store.generation), math.inf)
                if self.rounds.rounds[placement.round_id].formed_at > noticed_at:
                    self._trace.fail(f"{text}, and a coordinator has passed on a notice")
                if rounds > _ROUNDS_PER_FAULT * (self._trace.faults + 1):
                    self._trace.fail(f"{rounds} rounds after {self._trace.faults} faults")
        if isinstance(body, StartRound | StopRound | EndJob | RestartPending):
            self._trace.note(store.host.name, f"order for {name}: {text}")
        if self.order_hook is not None:
            self.order_hook(store, member, body)

    def _oblige(self, store: SimStore, member: str, order: messages.Order) -> None:
        key, now = (store.instance, member), self._time.now
        former = self._obligations.get(key)
        if former is None or former.body != order.body:
            position = order.term, order.serial
            obligation = self._obligations[key] = _Obligation(order.body, position, now)
            if not isinstance(
                order.body, messages.WaitForNodes | messages.StandBy | messages.Reject
            ):
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
        """Check a round that is ordered to a node, after `node.placement`: the node is fit."""
        now = self._time.now
        if now < node.excluded_until:
            self._trace.fail(f"{node.name} is excluded until {node.excluded_until:.3f} s")
        if self._has_check and not node.is_checked:
            self._trace.fail(f"{node.name} is in a round, and its health check has not succeeded")
        self.rounds.on_ordered(node, order)
        self.ends.on_ordered(node, self.rounds.rounds[order.placement.round_id])

    def on_isolated(self, node: SimNode, why: str) -> None:
        """Check that a node which stops its workers by itself has a reason: a recent fault."""
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

    def on_excluded(self, node: SimNode, seconds: float | None) -> None:
        """Note for how long a node may be in no round; None: for ever."""
        if node.running is not None:
            self._trace.fail(f"{node.name} is excluded, and runs {brief(node.running)}")
        node.may_be_excluded = False
        left = math.inf if seconds is None else seconds * RATE_MIN
        node.excluded_until = self._time.now + left

    def on_notice(self, node: SimNode, left: float) -> None:
        """Check a notice that workers get: the first, or earlier, and they end by its deadline."""
        now, former = self._time.now, node.notice
        node.notice = now + max(0.0, left)
        if former is not None and node.notice >= former:
            self._trace.fail(f"the workers of {node.name} are given notice of a later deadline")
        ended_by = now + (max(0.0, left) + self._stop_s) / RATE_MIN
        self._time.at(ended_by, self._check_preempted, node)
        if node.running is not None:
            round_id, since = node.running.round_id, now
            self._time.at(
                now + self.obey_s, self._check_notices, node, round_id, node.notice, since
            )

    def _check_notices(
        self, node: SimNode, round_id: tuple[int, str], deadline: float, since: float
    ) -> None:
        """Check that the workers of a round have no later deadline than those of `node`."""
        now = self._time.now
        if node.is_over or node.was_stopped or self.was_clock_set or len(self.open_stores) != 1:
            return
        calm_since = max(since, self._trace.fault_at, self._network.repaired_at)
        due = (calm_since if self._network.is_calm else now) + self.obey_s
        if now < due:
            if now < deadline:
                self._time.at(due, self._check_notices, node, round_id, deadline, since)
            return
        for other in self._nodes.values():
            running = other.running
            if running is None or running.round_id != round_id or other.is_stopping:
                continue
            if (other.notice or math.inf) > deadline + self.obey_s:
                self._trace.fail(f"{other.name} has no notice as early as that of {node.name}")

    def _check_preempted(self, node: SimNode) -> None:
        host = node.host
        if node.running is None or node.is_over:
            return
        if host.is_suspended or host.disturbed_at > self._time.now - self._stop_s:
            self._time.at(self._time.now + self._stop_s, self._check_preempted, node)
        else:
            self._trace.fail(f"{node.name} runs {node.running} after its preemption")

    def on_event(self, node: SimNode, event: Event) -> None:
        """Call the hook."""
        if self.event_hook is not None:
            self.event_hook(node, event)

    def on_finished(self, node: SimNode, outcome: JobOutcome) -> None:
        """Check the end of the job on a node: nothing is left of it."""
        if outcome.why.startswith("internal error"):
            self._trace.fail(f"{node.name} ended by a defect: {outcome}")
        elif node.process.files or node.running is not None:
            self._trace.fail(f"{node.name} has left {list(node.process.files)}, {node.running}")


def _obey_s(spec: LaunchSpec) -> float:
    """Return within how many seconds without a fault an order is obeyed, or its member gone.

    An order that was lost on the way is sent again after the first interval of the outbox.  A
    member that was killed counts as present until its lease ends: `heartbeat_timeout` after its
    last byte, or after the resumption of the store's host, by the store's clock.
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
