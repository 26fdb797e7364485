"""A simulated node's time at one store: lease, ticket, orders, and the election."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from elastic_aio.rendezvous.incumbent import Incumbent, read_incumbent
from elastic_aio.rendezvous.tickets import read_order, written
from elastic_aio.store import wire
from elastic_aio.store.keyspace import Refusal
from elastic_aio.store.replies import CHANGE_EXPIRED, CHANGE_SET, RawChange, RawView
from elastic_aio.testing.bureau import Bureau
from elastic_aio.testing.places import Place, Visit

if TYPE_CHECKING:
    from elastic_aio.testing.nodes import Node

__all__ = ["Attendance"]

_LINGER_S = 0.2
_RECONNECT_FOR_S = 0.25
_DEFERENCE_S = 0.3
_PINGS = 3
_names = itertools.count(1)

Reply = Callable[[Any], None]


class Attendance:
    """Takes part at one store until it is lost, as the rendezvous at a store does."""

    def __init__(self, node: Node, place: Place) -> None:
        """Connect."""
        self.node = node
        self.place = place
        self.is_over = False
        self.bureau: Bureau | None = None
        self._is_new_store = False
        self._is_campaigning = False
        self._office = b""
        self._lease = b"%d" % next(_names)
        self._heard_at = node.machine.now
        self._is_cut = False
        self._waiting: deque[tuple[int, int, bytes, Any, Reply | None]] = deque()
        self._count = 0
        self._seen = {"order": -1, "office": -1}
        self._keys: dict[str, bytes] = {
            "order": f"o/{node.name}".encode(),
            "office": b"coordinator",
            "tickets": b"t/",
        }
        self._written = -1
        self._is_writing = False
        self.is_leaving = False
        self._visit = self._connect(is_back=False)
        node.member.again()
        self.ticket_changed()
        self._ping()

    def __repr__(self) -> str:
        return f"<Attendance of {self.node.name} at {self.place.endpoint}>"

    # ----------------------------------------------------------------- requests

    def request(self, op: int, key: bytes, argument: Any, then: Reply | None = None) -> None:
        """Ask the store for an operation; a lease that has ended ends it all."""
        if self.is_over:
            return
        self._count += 1
        waiting = (self._count, op, key, argument, then)
        self._waiting.append(waiting)
        if not self._is_cut:
            self._visit.request(*waiting[:4])

    def leased_set(self, key: bytes, value: bytes, then: Reply | None = None) -> None:
        """Set a key under the lease."""
        self.request(wire.LEASED_SET, key, (value, self._lease), then)

    def watch(self, tag: str) -> None:
        """Begin a watch."""
        self._seen[tag] = -1
        self._visit.watch(tag, self._keys[tag], -1, is_prefix=tag == "tickets")

    def on_reply(self, visit: Visit, number: int, reply: Any) -> None:
        """Take a reply; they come in the order of the requests."""
        if self._is_stale(visit):
            return
        self._heard_at = self.node.machine.now
        if not number:
            return
        waiting = self._waiting.popleft()
        assert waiting[0] == number
        if isinstance(reply, Refusal):
            self.end(f"refused: {reply}")
        elif waiting[4] is not None:
            waiting[4](reply)

    # --------------------------------------------------------------- connection

    def _connect(self, *, is_back: bool) -> Visit:
        visit = self._visit = Visit(self.place, self.node.machine, self)
        terms = (int(self.node.settings.heartbeat_timeout * 1000), int(_LINGER_S * 1000))
        visit.enter(self._lease, terms, is_back=is_back)
        for tag, seen in self._seen.items():
            visit.watch(tag, self._keys[tag], seen, is_prefix=tag == "tickets")
        for waiting in self._waiting:
            visit.request(*waiting[:4])
        return visit

    def on_cut(self, visit: Visit) -> None:
        """Try to come back at once: a reset is no death."""
        if self._is_stale(visit) or self._is_cut:
            return
        self._is_cut = True
        self.node.machine.after(0.02, self._reconnect, self.node.machine.now + _RECONNECT_FOR_S)

    def _reconnect(self, until: float) -> None:
        node = self.node
        if self.is_over:
            return
        if self.place.is_open and node.network.is_open_both_ways(
            node.machine.name, self.place.machine.name
        ):
            self._is_cut = False
            self._connect(is_back=True)
        elif node.machine.now < until:
            node.machine.after(0.05, self._reconnect, until)
        else:
            self.end("the connection was lost")

    def _ping(self) -> None:
        if self.is_over:
            return
        ttl = self.node.settings.heartbeat_timeout
        if self.node.machine.now - self._heard_at > ttl:
            self.end("the store does not answer")
            return
        if not self._is_cut:
            self._visit.ping()
        self.node.machine.after(ttl / _PINGS, self._ping)

    def on_lease_ended(self, visit: Visit) -> None:
        """The store has not heard of this node for too long."""
        if not self._is_stale(visit):
            self.end("not heard of for too long")

    def end(self, why: str) -> None:
        """Stop taking part here."""
        if self.is_over:
            return
        self.is_over = True
        if not self._is_cut:
            self._visit.request(-1, wire.RELEASE_LEASE, self._lease, None)
            self._visit.link.up(self._hang_up, self._visit)
        if self.bureau is not None:
            self.bureau.is_closed = True
        self.node.store_lost(self, why)

    def died(self) -> None:
        """The node's process is gone: nobody says so, but the connection ends."""
        self.is_over = True
        if self.bureau is not None:
            self.bureau.is_closed = True
        self._visit.break_off()

    def reset(self) -> None:
        """Let the connection break, for the network's reasons."""
        if not self._is_cut:
            self._visit.reset()

    def _hang_up(self, visit: Visit) -> None:
        visit.link.cut()
        self.place.forget(visit)

    def _is_stale(self, visit: Visit) -> bool:
        return self.is_over or visit is not self._visit

    # ------------------------------------------------------------------ ticket

    def ticket_changed(self) -> None:
        """Write the present ticket, one at a time."""
        ticket = self.node.member.ticket
        if self._is_writing or self.is_leaving or self._written == ticket.serial or self.is_over:
            return
        self._is_writing = True
        self._written = ticket.serial
        text = written(replace(ticket, sent_at=self.node.machine.calendar))
        self.leased_set(f"t/{self.node.name}".encode(), text, self._ticket_written)

    def _ticket_written(self, _: Any) -> None:
        self._is_writing = False
        self.node.attended()
        self.ticket_changed()

    def say_goodbye(self) -> None:
        """Take the ticket away, but stay: others still need this node."""
        self.is_leaving = True
        self.request(wire.DELETE_KEY, f"t/{self.node.name}".encode(), None)

    # ------------------------------------------------------------------ watches

    def on_view(self, visit: Visit, tag: str, view: RawView) -> None:
        """Take what a watch begins with."""
        if self._is_stale(visit):
            return
        self._seen[tag] = max(view.revision, self._seen[tag])
        if not view.is_whole:
            return
        if tag == "tickets":
            if self.bureau is not None:
                self.bureau.take_all(view.pairs)
        elif tag == "order":
            for _, text in view.pairs:
                self._obey(text)
        elif view.pairs:
            self._office_is(view.pairs[0][1])
        elif self.place.machine is self.node.machine:
            self._campaign()
        else:
            # The node that serves the store goes first, if it is here.
            self.node.machine.after(_DEFERENCE_S, self._campaign)

    def on_change(self, visit: Visit, tag: str, change: RawChange) -> None:
        """Take a change."""
        if self._is_stale(visit):
            return
        self._seen[tag] = max(change.revision, self._seen[tag])
        is_set = change.kind == CHANGE_SET
        if tag == "tickets":
            if self.bureau is not None and is_set:
                self.bureau.take(change.key, change.value, is_fresh=True)
            elif self.bureau is not None:
                self.bureau.miss(change.key, is_lost=change.kind == CHANGE_EXPIRED)
        elif tag == "order":
            if is_set:
                self._obey(change.value)
        elif is_set:
            self._office_is(change.value)
        else:
            self._campaign()

    def _obey(self, text: bytes) -> None:
        self.node.act(self.node.member.order(read_order(text)))

    # --------------------------------------------------------------- the office

    def _campaign(self) -> None:
        if self.is_over or self._is_campaigning or self.bureau is not None:
            return
        self._is_campaigning = True
        self.request(wire.ADD, b"epochs", 1, self._campaign_as)

    def _campaign_as(self, count: int) -> None:
        self._is_new_store = count == 1
        epoch = max(count, self.node.member.ticket.epoch + 1)
        self._office = Incumbent(epoch, self.node.name, self.node.name).written()
        arguments = (b"", self._office, self._lease)
        self.request(wire.LEASED_COMPARE_SET, b"coordinator", arguments, self._voted)

    def _voted(self, present: bytes) -> None:
        self._is_campaigning = False
        self._office_is(present)
        if present == self._office and self.bureau is None and not self.is_over:
            epoch = _holder_in(present).epoch
            self.bureau = Bureau(self, epoch, is_new_store=self._is_new_store)
            self.watch("tickets")

    def _office_is(self, text: bytes) -> None:
        # One of this member's own may be left of an earlier session: it is vacated soon.
        incumbent = _holder_in(text)
        self.node.act(self.node.member.coordinated(incumbent.name, incumbent.epoch))

    def announce(self, epoch: int) -> None:
        """Make a higher epoch known, unless the office is another's by now."""
        name = self.node.name
        former, self._office = self._office, Incumbent(epoch, name, name).written()
        arguments = (former, self._office, self._lease)
        self.request(wire.LEASED_COMPARE_SET, b"coordinator", arguments, self._announced)
        self.node.act(self.node.member.coordinated(name, epoch))

    def _announced(self, present: bytes) -> None:
        if _holder_in(present).member != self.node.name:
            self.end("another one coordinates by now")


def _holder_in(text: bytes) -> Incumbent:
    holder = read_incumbent(text)
    assert holder is not None, text
    return holder
