"""A simulated node: finds a store, takes part, and runs its agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random

from elastic_aio.agent.messages import InstructionReceived, LeftRendezvous
from elastic_aio.discovery.choice import (
    EndpointState,
    WaitUntil,
    choose_endpoint,
    endpoint_turn,
    search_grace,
)
from elastic_aio.events import Event, NodeStandby
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import (
    EndJob,
    NodeInfo,
    Placement,
    Report,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.member import Member, MemberEffect, Probe
from elastic_aio.rendezvous.messages import PROBE_TIMEOUT, MemberStatus
from elastic_aio.spec.restart import RestartBudget
from elastic_aio.testing.agent import SimAgent
from elastic_aio.testing.invariants import InvariantChecker
from elastic_aio.testing.session import SimSession
from elastic_aio.testing.settings import SimSettings, WorkerBehavior
from elastic_aio.testing.store import Cluster, SimStore
from elastic_aio.testing.virtual_time import SimHost

_POLL_S = 0.25
_MIGRATE_POLL_S = 1.0


class SimNode:
    """One node of the job: one process of an agent."""

    def __init__(
        self,
        name: str,
        host: SimHost,
        cluster: Cluster,
        settings: SimSettings,
        observer: InvariantChecker,
        random: Random,
        *,
        nproc: int,
        preferred_rank: int | None,
        behavior: Callable[[SimNode, Placement], WorkerBehavior],
    ) -> None:
        """Prepare; nothing happens before the agent is started."""
        self.name = name
        self.host = host
        self.network = cluster.network
        self.settings = settings
        self.observer = observer
        self.outcome: JobOutcome | None = None
        self.has_left = False
        """Whether it takes part no more; its workers may still be stopping."""
        self.is_standing_by = False
        self.session: SimSession | None = None
        self.master_port = 1
        """The port that is reserved for the next round."""
        self._behavior = behavior
        spec = settings.spec
        self.budget = RestartBudget(spec.max_restarts, spec.restart, random.random)
        self.agent = SimAgent(self, nproc)
        self.member = Member(
            MemberStatus(
                serial=0,
                node=NodeInfo(host.name, 1, nproc, "default"),
                address=host.name,
                port=self.master_port,
                preferred_rank=preferred_rank,
                minimum=settings.rounds.minimum,
                maximum=settings.rounds.maximum,
            )
        )
        self._cluster = cluster
        self._own_store: SimStore | None = None
        self._search = 0
        self._grace: object | None = None
        """Identifies the wait for another store, in which the workers run on."""
        self._was_connected = False
        self._was_killed = False

    def __repr__(self) -> str:
        placement = self.agent.running
        runs = "nothing" if placement is None else f"round {placement.round}"
        return f"<SimNode {self.name}: {self.member.status.phase}, runs {runs}>"

    @property
    def is_live(self) -> bool:
        """Whether the job has not ended here."""
        return not self._was_killed and self.outcome is None

    @property
    def running(self) -> Placement | None:
        """The placement whose workers run here."""
        return None if self._was_killed else self.agent.running

    def behavior(self, placement: Placement) -> WorkerBehavior:
        """Return what the workers of a round do here."""
        return self._behavior(self, placement)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self.observer.note(self.name, text)

    # --------------------------------------------------------- member and agent

    def _perform(self, effects: Iterable[MemberEffect]) -> None:
        """Perform the effects of the member."""
        for effect in effects:
            match effect:
                case StartRound(placement):
                    self.is_standing_by = False
                    self.observer.on_round_ordered(self, effect)
                    if not placement.span.group_rank:
                        self.master_port += 1
                    self.agent.handle(InstructionReceived(effect))
                    self.member.set_port(self.master_port)
                case StopRound() | RestartPending() | EndJob():
                    self.agent.handle(InstructionReceived(effect))
                case Probe():
                    self._probe(effect)
                case Event():
                    self.is_standing_by = self.is_standing_by or isinstance(effect, NodeStandby)
                    self.observer.on_event(self, effect)
        self._status_changed()

    def report(self, report: Report) -> None:
        """Take a report of the agent."""
        self.member.report(report)
        self._status_changed()

    def _status_changed(self) -> None:
        if self.session is not None:
            self.session.status_changed()

    def _probe(self, probe: Probe) -> None:
        host = self._cluster.host(probe.address)
        is_up = host.is_alive and not host.is_suspended
        if is_up and self.network.is_open_both_ways(self.host.name, host.name):
            self.host.after(0.01, self._probed, probe.round, "")
        else:
            self.host.after(PROBE_TIMEOUT, self._probed, probe.round, "no answer")

    def _probed(self, round: int, error: str) -> None:
        self.member.probed(round, error)
        self._status_changed()

    # ---------------------------------------------------------------- discovery

    def start_search(self) -> None:
        """Begin to search for a store."""
        self._search += 1
        states = dict.fromkeys(self.settings.endpoints, EndpointState.UNKNOWN)
        self._poll(self._search, self.host.now, states)

    def _poll(self, search: int, began: float, states: dict[str, EndpointState]) -> None:
        if search != self._search or self.has_left:
            return
        endpoints = self.settings.endpoints
        for endpoint in endpoints:
            state = self._state_of(endpoint)
            if state is not EndpointState.UNKNOWN:
                states[endpoint] = state
        elapsed = self.host.now - began
        index = self._choose([states[one] for one in endpoints], elapsed)
        if index is not None and self._attend(endpoints[index]):
            return
        if elapsed > self.settings.spec.rendezvous.read_timeout:
            self._perform(self.member.fail("no store could be found"))
            return
        self.host.after(_POLL_S, self._poll, search, began, states)

    def _state_of(self, endpoint: str) -> EndpointState:
        host = self._cluster.host(endpoint)
        if host.is_suspended or not self.network.is_open_both_ways(self.host.name, endpoint):
            return EndpointState.UNKNOWN
        store = self._cluster.stores.get(endpoint)
        if store is None or not store.is_open or not host.is_alive:
            return EndpointState.NO_STORE
        return EndpointState.ACTIVE_RUN if store.has_run else EndpointState.STORE

    def _choose(self, states: list[EndpointState], elapsed: float) -> int | None:
        is_first, timeout = not self._was_connected, self.settings.spec.rendezvous.read_timeout
        turns = [
            endpoint_turn(index, is_first=is_first, timeout=timeout)
            if endpoint == self.host.name
            else math.inf
            for index, endpoint in enumerate(self.settings.endpoints)
        ]
        grace = search_grace(is_first=is_first, timeout=timeout)
        choice = choose_endpoint(states, turns, elapsed, grace)
        return None if isinstance(choice, WaitUntil) else choice.index

    def _attend(self, endpoint: str) -> bool:
        store = self._cluster.stores.get(endpoint)
        is_own = endpoint == self.host.name
        if store is None or not store.is_open:
            if not is_own:
                return False
            store = self._own_store = self._cluster.open_store(endpoint)
            self.note(f"serves a store at {endpoint}")
        elif self._state_of(endpoint) in (EndpointState.UNKNOWN, EndpointState.NO_STORE):
            return False
        self.member.set_address(self.host.name, is_host=is_own)
        self.member.set_port(self.master_port)
        self._was_connected = True
        self.session = SimSession(self, store)
        index = self.settings.endpoints.index(endpoint)
        if index and (is_own or endpoint not in self._cluster.node_hosts):
            self.host.after(_MIGRATE_POLL_S, self._migrate, self.session, index)
        return True

    def _migrate(self, session: SimSession, index: int) -> None:
        """Leave a later endpoint once the run is active at an earlier one."""
        if session.is_over or self.member.has_ended:
            return  # other nodes may not have read the outcome yet
        earlier = self.settings.endpoints[:index]
        if any(self._state_of(one) is EndpointState.ACTIVE_RUN for one in earlier):
            session.end("the others meet at an earlier endpoint")
        else:
            self.host.after(_MIGRATE_POLL_S, self._migrate, session, index)

    def _close_own_store(self) -> None:
        if self._own_store is not None:
            self._own_store.close()
        self._own_store = None

    # ---------------------------------------------------------- without a store

    def on_joined(self) -> None:
        """Take that the first status has been written."""
        self._grace = None

    def on_session_ended(self, session: object, why: str) -> None:
        """Search for another store; stop the workers if that takes too long."""
        if self.session is None or session is not self.session:
            return
        endpoint, self.session = self.session.store.endpoint, None
        self._close_own_store()
        self.note(f"loses the store at {endpoint}: {why}")
        if self.has_left or self.member.has_ended:
            return
        if self._grace is None:
            self._grace = object()
            rendezvous = self.settings.spec.rendezvous
            seconds = rendezvous.store_grace
            if seconds is None:
                seconds = rendezvous.heartbeat_timeout
            self.host.after(seconds, self._isolate, self._grace)
        self.start_search()

    def _isolate(self, grace: object) -> None:
        if grace is self._grace:
            self._grace = None
            self._perform(self.member.isolate("no store could be found"))

    # ------------------------------------------------------------------ leaving

    def on_finished(self, outcome: JobOutcome) -> None:
        """End the job on this node: it has left, and its workers are stopped."""
        self.outcome = outcome
        self.note(f"ends: {outcome.state}, {outcome.why}")
        self.observer.outcomes[self.name] = outcome

    def leave(self, why: str) -> None:
        """Leave; after the end of the job, stay while other nodes need this one."""
        self.note(f"leaves: {why}")
        session = self.session
        is_needed = session is not None and (
            session.coordinator is not None or session.store.host is self.host
        )
        if session is None or not is_needed or not self.member.has_ended:
            self._finish()
            return
        session.begin_drain()
        leader = session.store.keyspace.peek(b"coordinator")
        until = self.host.now + self.settings.spec.rendezvous.close_timeout
        self._wait_drained(session, leader, until)

    def _wait_drained(self, session: SimSession, leader: bytes | None, until: float) -> None:
        """Stay until all members have left; the node of the coordinator leaves last."""
        if session.coordinator is not None:
            is_over = session.coordinator.machine.is_over
        else:
            present = session.store.keyspace.peek(b"coordinator")
            is_over = leader is None or present != leader
        if is_over or session.is_over or self.host.now >= until:
            self._finish()
        else:
            self.host.after(0.05, self._wait_drained, session, leader, until)

    def _finish(self) -> None:
        self.has_left = True
        if self.session is not None:
            self.session.end("leaves")
        self.session = None
        self._close_own_store()
        self.agent.handle(LeftRendezvous())

    def on_killed(self) -> None:
        """End the process without notice."""
        self.has_left = self._was_killed = True
        session, self.session = self.session, None
        if session is not None:
            session.on_killed()
        self._close_own_store()
