"""A simulated session at one store: lease, status, orders, election, and coordinator.

It models `elastic_aio.rendezvous.session`, `election` and `coordinator_runner`; the
decisions are those of the shipped `Member` and `Coordinator`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from elastic_aio.discovery.choice import RECONNECT_FOR
from elastic_aio.rendezvous.coordinator import Coordinator
from elastic_aio.rendezvous.members import PublishEvent, RequestDecision, SendOrder
from elastic_aio.rendezvous.messages import (
    HOST_HEAD_START,
    LEASE_LINGER,
    LeaderRecord,
    MessageError,
    decode_order,
    decode_status,
    encode,
)
from elastic_aio.spec.restart import RestartAction
from elastic_aio.store import wire
from elastic_aio.store.keyspace import OperationRefused
from elastic_aio.store.replies import CHANGE_EXPIRED, CHANGE_SET, RawChange, WatchSnapshot
from elastic_aio.testing.invariants import NodePort
from elastic_aio.testing.store import SimConnection, SimStore

_PINGS = 3
_names = itertools.count(1)

_ORDER, _LEADER, _STATUSES = "order", "leader", "statuses"

OnReply = Callable[[Any], None]


class SimSession:
    """Takes part at one store until it is lost."""

    def __init__(self, node: NodePort, store: SimStore) -> None:
        """Connect."""
        self.node = node
        self.store = store
        self.is_over = False
        self.coordinator: SimCoordinator | None = None
        self._is_candidate = False
        self._record = b""
        self._lease = b"%d" % next(_names)
        self._last_received_at = node.host.now
        self._is_cut = False
        self._pending: deque[tuple[int, int, bytes, Any, OnReply | None]] = deque()
        self._count = 0
        self._watches = {_ORDER: -1, _LEADER: -1}
        """The last revision seen of each watch."""
        self._keys = {_ORDER: f"o/{node.name}".encode(), _LEADER: b"coordinator", _STATUSES: b"t/"}
        self._written_serial = -1
        self._is_writing = False
        self._is_draining = False
        self._connection = self._connect(is_back=False)
        node.member.attend(store.instance)
        self.status_changed()
        self._ping()

    def __repr__(self) -> str:
        return f"<SimSession of {self.node.name} at {self.store.endpoint}>"

    # ----------------------------------------------------------------- requests

    def request(self, op: int, key: bytes, argument: Any, then: OnReply | None = None) -> None:
        """Send an operation to the store; a refusal ends the session."""
        if self.is_over:
            return
        self._count += 1
        self._pending.append((self._count, op, key, argument, then))
        if not self._is_cut:
            self._connection.request(self._count, op, key, argument)

    def leased_set(self, key: bytes, value: bytes, then: OnReply | None = None) -> None:
        """Set a key under the lease."""
        self.request(wire.LEASED_SET, key, (value, self._lease), then)

    def on_reply(self, connection: SimConnection, number: int, reply: Any) -> None:
        """Take a reply; replies arrive in the order of the requests."""
        if self._is_stale(connection):
            return
        self._last_received_at = self.node.host.now
        if not number:
            return
        expected, _, _, _, then = self._pending.popleft()
        assert expected == number
        if isinstance(reply, OperationRefused):
            self.end(f"refused: {reply}")
        elif then is not None:
            then(reply)

    # --------------------------------------------------------------- connection

    def _connect(self, *, is_back: bool) -> SimConnection:
        connection = self._connection = SimConnection(self.store, self.node.host, self)
        ttl = self.node.settings.spec.rendezvous.heartbeat_timeout
        times = (int(ttl * 1000), int(LEASE_LINGER * 1000))
        connection.enter(self._lease, times, is_back=is_back)
        for tag, seen in self._watches.items():
            connection.watch(tag, self._keys[tag], seen, is_prefix=tag == _STATUSES)
        for number, op, key, argument, _ in self._pending:
            connection.request(number, op, key, argument)
        return connection

    def on_cut(self, connection: SimConnection) -> None:
        """Reconnect at once."""
        if self._is_stale(connection) or self._is_cut:
            return
        self._is_cut = True
        self.node.host.after(0.02, self._reconnect, self.node.host.now + RECONNECT_FOR)

    def _reconnect(self, until: float) -> None:
        node, store = self.node, self.store
        if self.is_over:
            return
        if store.is_open and node.network.is_open_both_ways(node.host.name, store.host.name):
            self._is_cut = False
            self._connect(is_back=True)
        elif node.host.now < until:
            node.host.after(0.05, self._reconnect, until)
        else:
            self.end("the connection was lost")

    def _ping(self) -> None:
        if self.is_over:
            return
        ttl = self.node.settings.spec.rendezvous.heartbeat_timeout
        if self.node.host.now - self._last_received_at > ttl:
            self.end("the store does not answer")
            return
        if not self._is_cut:
            self._connection.ping()
        self.node.host.after(ttl / _PINGS, self._ping)

    def on_lease_ended(self, connection: SimConnection) -> None:
        """Take the end of the lease."""
        if not self._is_stale(connection):
            self.end("the lease has ended")

    def end(self, why: str) -> None:
        """End the session."""
        if self.is_over:
            return
        self.is_over = True
        if not self._is_cut:
            self._connection.request(-1, wire.RELEASE_LEASE, self._lease, None)
            self._connection.link.up(self._hang_up, self._connection)
        self.node.on_session_ended(self, why)

    def on_killed(self) -> None:
        """Break the connection: the node's process has been killed."""
        self.is_over = True
        self._connection.break_off()

    def reset(self) -> None:
        """Break the connection, as a network may do."""
        if not self._is_cut:
            self._connection.reset()

    def _hang_up(self, connection: SimConnection) -> None:
        connection.link.cut()
        self.store.forget(connection)

    def _is_stale(self, connection: SimConnection) -> bool:
        return self.is_over or connection is not self._connection

    # ------------------------------------------------------------------- status

    def status_changed(self) -> None:
        """Write the present status, unless a write is in flight."""
        status = self.node.member.status
        is_written = self._written_serial == status.serial
        if self._is_writing or self._is_draining or is_written or self.is_over:
            return
        self._is_writing = True
        self._written_serial = status.serial
        now = self.node.host.wall_clock
        text = encode(replace(status, sent_at=now, clock=now - self.node.host.now))
        self.leased_set(f"t/{self.node.name}".encode(), text, self._on_status_written)

    def _on_status_written(self, _: Any) -> None:
        self._is_writing = False
        self.node.on_joined()
        self.status_changed()

    def begin_drain(self) -> None:
        """Delete the status, but stay: other nodes still need this one."""
        self._is_draining = True
        self.request(wire.DELETE_KEY, f"t/{self.node.name}".encode(), None)

    # ------------------------------------------------------------------ watches

    def on_snapshot(self, connection: SimConnection, tag: str, view: WatchSnapshot) -> None:
        """Take the state with which a watch begins."""
        if self._is_stale(connection):
            return
        self._watches[tag] = max(view.revision, self._watches[tag])
        if not view.is_whole:
            return
        if tag == _STATUSES:
            if self.coordinator is not None:
                self.coordinator.on_snapshot(view.pairs)
        elif tag == _ORDER:
            for _, text in view.pairs:
                self._on_order(text)
        elif view.pairs:
            self._on_leader(view.pairs[0][1])
        elif self.store.host is self.node.host:
            self._campaign()
        else:
            self.node.host.after(HOST_HEAD_START, self._campaign)

    def on_change(self, connection: SimConnection, tag: str, change: RawChange) -> None:
        """Take a change of a watch."""
        if self._is_stale(connection):
            return
        self._watches[tag] = max(change.revision, self._watches[tag])
        is_set = change.kind == CHANGE_SET
        if tag == _STATUSES:
            if self.coordinator is not None and is_set:
                self.coordinator.on_status(change.key, change.value, is_fresh=True)
            elif self.coordinator is not None:
                self.coordinator.on_gone(change.key, is_lost=change.kind == CHANGE_EXPIRED)
        elif tag == _ORDER:
            if is_set:
                self._on_order(change.value)
        elif is_set:
            self._on_leader(change.value)
        else:
            self._campaign()

    def _on_order(self, text: bytes) -> None:
        self.node._perform(self.node.member.on_order(decode_order(text)))

    # ----------------------------------------------------------------- election

    def _campaign(self) -> None:
        if self.is_over or self._is_candidate or self.coordinator is not None:
            return
        self._is_candidate = True
        self._replace_record(b"", 0, self._on_voted)

    def _on_term(self, term: int) -> None:
        self._replace_record(self._record, term, self._on_elected)

    def _replace_record(self, former: bytes, term: int, then: OnReply) -> None:
        name = self.node.name
        self._record = encode(LeaderRecord(term, name, name))
        arguments = (former, self._record, self._lease)
        self.request(wire.LEASED_COMPARE_SET, b"coordinator", arguments, then)

    def _on_voted(self, present: bytes) -> None:
        if present == self._record:
            self.request(wire.ADD, b"terms", 1, self._on_term)
        else:
            self._is_candidate = False
            self._on_leader(present)

    def _on_elected(self, present: bytes) -> None:
        self._is_candidate = False
        self._on_leader(present)
        if present == self._record and self.coordinator is None and not self.is_over:
            self.coordinator = SimCoordinator(self, _decode(present).term)
            self._watches[_STATUSES] = -1
            self._connection.watch(_STATUSES, self._keys[_STATUSES], -1, is_prefix=True)

    def _on_leader(self, text: bytes) -> None:
        # A record of this node's own previous session may be there; it is removed soon.
        leader = _decode(text)
        if leader.term:
            self.node._perform(self.node.member.on_coordinator(leader.name, leader.term))


def _decode(text: bytes) -> LeaderRecord:
    leader = LeaderRecord.decode(text)
    assert leader is not None, text
    return leader


class SimCoordinator:
    """Runs the coordinator of one term: statuses in, effects out."""

    def __init__(self, session: SimSession, term: int) -> None:
        """Begin; statuses come with `on_snapshot`."""
        node = session.node
        self._session = session
        self._node = node
        self.machine = Coordinator(
            node.settings.rounds,
            node.budget,
            name=f"{node.name}@{session.store.instance.decode()}",
            term=term,
            now=node.host.now,
        )
        self._known: set[bytes] = set()
        self._is_ready = False
        self._is_due = False
        self._armed: float | None = None
        node.note(f"coordinates in term {term} at {session.store.endpoint}")

    def knows(self, member: str) -> bool:
        """Return whether the status of a member is present."""
        return f"t/{member}".encode() in self._known

    def on_snapshot(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Take all statuses that are present."""
        present = dict(pairs)
        for key in sorted(self._known - present.keys()):
            self.on_gone(key, is_lost=True)
        is_fresh = self._is_ready
        self._is_ready = True
        for key, text in present.items():
            self.on_status(key, text, is_fresh=is_fresh)
        self._decide_soon()

    def on_status(self, key: bytes, text: bytes, *, is_fresh: bool) -> None:
        """Take a status."""
        self._known.add(key)
        try:
            status = decode_status(text)
        except MessageError:
            return
        self.machine.on_status(_member_of(key), status, self._node.host.now)
        self._decide_soon()

    def on_gone(self, key: bytes, *, is_lost: bool) -> None:
        """Take the end of a status."""
        self._known.discard(key)
        self.machine.on_gone(_member_of(key), is_lost=is_lost)
        self._decide_soon()

    def _decide_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._node.host.after(0.0, self._decide)

    def _on_timer(self, when: float) -> None:
        if self._armed == when:
            self._armed = None
            self._decide()

    def _decide(self) -> None:
        self._is_due = False
        if self._session.is_over or not self._is_ready:
            return
        host, observer = self._node.host, self._node.observer
        effects = self.machine.decide(host.now)
        observer.on_decided(self._node, self.machine, effects)
        for effect in effects:
            match effect:
                case SendOrder(member, order):
                    self._session.leased_set(f"o/{member}".encode(), encode(order))
                case PublishEvent(event):
                    observer.on_event(self._node, event)
                case RequestDecision():
                    duration = self._node.settings.decide_duration
                    host.after(duration, self._call_decide, effect)
        due = self.machine.deadline
        if due is not None and due != self._armed:
            self._armed = due
            host.after(max(0.0, due - host.now), self._on_timer, due)

    def _call_decide(self, request: RequestDecision) -> None:
        if self._session.is_over:
            return
        decide = self._node.settings.spec.restart.decide
        decision: RestartAction | str = RestartAction.DEFAULT
        try:
            action = RestartAction.DEFAULT if decide is None else decide(request.failure)
            if not isinstance(action, RestartAction):
                raise TypeError(f"restart.decide must return a RestartAction (got {action!r})")
            decision = action
        except Exception as error:  # noqa: BLE001  # the user's code
            decision = f"restart.decide raised {error!r}"
        self.machine.on_decision(request.attempt, decision)
        self._decide_soon()


def _member_of(key: bytes) -> str:
    return key.decode().partition("/")[2]
