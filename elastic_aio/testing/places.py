"""Stores on simulated machines: the real keyspace, with virtual time and a hostile wire."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from elastic_aio.store import wire
from elastic_aio.store.keyspace import Client, Keyspace, Refusal
from elastic_aio.store.replies import CHANGE_SET, RawChange, RawView
from elastic_aio.testing.network import Link, Network
from elastic_aio.testing.timeline import Machine

__all__ = ["Customer", "Place", "Visit"]

_NOISE_S = 0.3
"""By how much a notification may be late when the wire is noisy."""


class Customer(Protocol):
    """Who visits a store, as the store sees it."""

    def on_reply(self, visit: Visit, number: int, reply: Any) -> None:
        """Take the reply to a request; a `Refusal` if it could not be carried out."""

    def on_view(self, visit: Visit, tag: str, view: RawView) -> None:
        """Take what a watch begins with."""

    def on_change(self, visit: Visit, tag: str, change: RawChange) -> None:
        """Take a change of what is watched."""

    def on_lease_ended(self, visit: Visit) -> None:
        """Take in that the lease has ended."""

    def on_cut(self, visit: Visit) -> None:
        """Take in that the connection has ended."""


class Place:
    """A store that a machine serves."""

    def __init__(
        self, machine: Machine, network: Network, random: Random, endpoint: str, noise: float
    ) -> None:
        """Begin empty; `noise` is the share of notifications that are late or doubled."""
        self.machine = machine
        self.endpoint = endpoint
        self.is_open = True
        self.keyspace = Keyspace()
        self.network = network
        self.random = random
        self.noise = noise
        self.visits: dict[Visit, None] = {}
        self._armed: float | None = None

    def close(self, *, is_silent: bool = False) -> None:
        """End; the visitors hear of it if the machine can still tell them."""
        self.is_open = False
        for visit in list(self.visits):
            visit.break_off(by_store=True, is_silent=is_silent)
        self.visits.clear()

    @property
    def has_run(self) -> bool:
        """Whether somebody coordinates here."""
        return self.keyspace.peek(b"coordinator") is not None

    def forget(self, visit: Visit) -> None:
        """The connection of a visitor has ended."""
        if self.visits.pop(visit, self) is None and self.is_open:
            self.keyspace.forget(visit, self.machine.now)
            self.arm()

    def arm(self) -> None:
        """Call `expire` when the keyspace wants it."""
        due = self.keyspace.next_deadline()
        if due is None or (self._armed is not None and self._armed <= due):
            return
        self._armed = due
        self.machine.after(max(0.0, due - self.machine.now), self._expire, due)

    def _expire(self, due: float) -> None:
        if not self.is_open or due != self._armed:
            return
        self._armed = None
        # What is due is due, though adding up may have made it a little early.
        self.keyspace.expire(max(due, self.machine.now))
        self.arm()


class Visit(Client):
    """One connection of a node to a store."""

    def __init__(self, place: Place, near: Machine, customer: Customer) -> None:
        """Connect."""
        super().__init__()
        self.place = place
        self.customer = customer
        self.link = Link(place.network, near, place.machine)
        self._near = near
        place.visits[self] = None

    # ------------------------------------------------------- the node's side

    def request(self, number: int, op: int, key: bytes, argument: Any) -> None:
        """Ask for an operation; `on_reply` follows."""
        self.link.up(self._serve, number, op, key, argument)

    def enter(self, lease: bytes, terms: tuple[int, int], *, is_back: bool) -> None:
        """Begin with a new lease, or come back to one."""
        self.link.up(self._enter, lease, terms, is_back)

    def watch(self, tag: str, key: bytes, seen: int, *, is_prefix: bool = False) -> None:
        """Begin a watch, or go on after revision `seen`."""
        self.link.up(self._watch, tag, key, seen, is_prefix)

    def ping(self) -> None:
        """Say that the node lives; `on_reply` with number 0 follows."""
        self.link.up(self._serve, 0, wire.NUM_KEYS, b"", None)

    def break_off(self, *, by_store: bool = False, is_silent: bool = False) -> None:
        """End the connection; the other end hears of it if it can be reached."""
        if self.link.is_cut:
            return
        self.link.cut()
        network, far = self.place.network, self.place.machine
        if is_silent:
            return
        if by_store:
            if network.is_open(far.name, self._near.name):
                when = network.arrival(far.name, self._near.name)
                self._near.receive(when, self.customer.on_cut, self)
        elif network.is_open(self._near.name, far.name):
            far.receive(network.arrival(self._near.name, far.name), self.place.forget, self)

    def reset(self) -> None:
        """Let the connection break: both ends hear of it."""
        if not self.link.is_cut:
            self.break_off()
            when = self.place.network.arrival(self.place.machine.name, self._near.name)
            self._near.receive(when, self.customer.on_cut, self)

    # ------------------------------------------------------ the store's side

    def _serve(self, number: int, op: int, key: bytes, argument: Any) -> None:
        keyspace = self.place.keyspace
        self.heard_at = self.place.machine.now
        reply: Any
        try:
            if (simple := keyspace.simple[op]) is not None:
                reply = simple(key, argument)
            else:
                call = keyspace.for_client[op]
                assert call is not None, op
                reply = call(self, None, key, argument)
        except Refusal as error:
            reply = error
        self.link.down(self.customer.on_reply, self, number, reply)
        self.place.arm()

    def _enter(self, lease: bytes, terms: tuple[int, int], is_back: bool) -> None:
        place = self.place
        now = place.machine.now
        if not is_back:
            place.keyspace.grant_lease(self, None, lease, terms, now)
        elif not place.keyspace.leases.resume(self, None, lease, now):
            self.on_lease_ended(None)
        place.arm()

    def _watch(self, tag: str, key: bytes, seen: int, is_prefix: bool) -> None:
        keyspace = self.place.keyspace
        begin = keyspace.watch_prefix if is_prefix else keyspace.watch_key
        view = begin(self, tag, key, seen)
        self.link.down(self.customer.on_view, self, tag, view)
        if not view.is_whole:
            for change in keyspace.watches.since(self, tag, seen):
                self.on_change(tag, change)

    def on_change(self, tag: Any, change: RawChange) -> None:
        """Pass a change on; on a noisy wire also once more, much too late."""
        self.link.down(self.customer.on_change, self, tag, change)
        place = self.place
        if place.noise and change.kind == CHANGE_SET and place.random.random() < place.noise:
            place.machine.after(_NOISE_S * place.random.random(), self._repeat, tag, change)

    def _repeat(self, tag: str, change: RawChange) -> None:
        # A key that is there may be told again, with an older value too.
        if not self.link.is_cut and self.place.keyspace.peek(change.key) is not None:
            self.link.down(self.customer.on_change, self, tag, change)

    def on_lease_ended(self, tag: Any) -> None:
        """Tell the holder that its lease has ended."""
        self.link.down(self.customer.on_lease_ended, self)

    def on_woken(self, tag: Any) -> None:
        """Never: nobody waits for keys here."""

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        """Never: nobody waits for values here."""

    def on_item(self, tag: Any, item: bytes) -> None:
        """Never: nobody waits for items here."""
