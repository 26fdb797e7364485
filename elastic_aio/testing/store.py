"""Simulated stores: the shipped keyspace on simulated hosts, over lossy connections."""

from __future__ import annotations

from random import Random
from typing import Any, Protocol

from elastic_aio.store import wire
from elastic_aio.store.keyspace import Client, Keyspace, OperationRefused
from elastic_aio.store.replies import CHANGE_SET, RawChange, WatchSnapshot
from elastic_aio.testing.network import Network, SimLink
from elastic_aio.testing.virtual_time import SimHost, VirtualTime

_REPEAT_DELAY_S = 0.3
"""Most seconds after which a notification is repeated."""


class ConnectionHandler(Protocol):
    """The client's end of a connection."""

    def on_reply(self, connection: SimConnection, number: int, reply: Any) -> None:
        """Take the reply to a request; an `OperationRefused` if it failed."""

    def on_snapshot(self, connection: SimConnection, tag: str, view: WatchSnapshot) -> None:
        """Take the state with which a watch begins."""

    def on_change(self, connection: SimConnection, tag: str, change: RawChange) -> None:
        """Take a change of a watched key."""

    def on_lease_ended(self, connection: SimConnection) -> None:
        """Take the end of the lease."""

    def on_cut(self, connection: SimConnection) -> None:
        """Take the end of the connection."""


class SimStore:
    """A store that a host serves."""

    def __init__(
        self, host: SimHost, network: Network, random: Random, endpoint: str, noise: float
    ) -> None:
        """Begin empty; `noise` is the share of notifications that are repeated late."""
        self.host = host
        self.endpoint = endpoint
        self.instance = f"{endpoint} since {host.now}".encode()
        self.is_open = True
        self.keyspace = Keyspace()
        self.network = network
        self.random = random
        self.noise = noise
        self.connections: dict[SimConnection, None] = {}
        self._armed: float | None = None

    def close(self) -> None:
        """Close all connections; clients notice it if the network lets them.  Idempotent."""
        self.is_open = False
        for connection in list(self.connections):
            connection.break_off(by_store=True)
        self.connections.clear()

    @property
    def has_run(self) -> bool:
        """Whether there is a coordinator at this store."""
        return self.keyspace.peek(b"coordinator") is not None

    def forget(self, connection: SimConnection) -> None:
        """Take the end of a connection."""
        if self.connections.pop(connection, self) is None and self.is_open:
            self.keyspace.forget(connection, self.host.now)
            self.arm()

    def arm(self) -> None:
        """Call `expire` when the keyspace next needs it."""
        due = self.keyspace.next_deadline()
        if due is None or (self._armed is not None and self._armed <= due):
            return
        self._armed = due
        self.host.after(max(0.0, due - self.host.now), self._expire, due)

    def _expire(self, due: float) -> None:
        if not self.is_open or due != self._armed:
            return
        self._armed = None
        # The timer may be early by a rounding error.
        self.keyspace.expire(max(due, self.host.now))
        self.arm()


class SimConnection(Client):
    """One connection of a node to a store; nodes do not wait for keys or items."""

    def __init__(self, store: SimStore, near: SimHost, handler: ConnectionHandler) -> None:
        """Connect."""
        super().__init__()
        self.store = store
        self.handler = handler
        self.link = SimLink(store.network, near, store.host)
        self._near = near
        store.connections[self] = None

    # --------------------------------------------------------- the client's end

    def request(self, number: int, op: int, key: bytes, argument: Any) -> None:
        """Request an operation; `on_reply` follows."""
        self.link.up(self._serve, number, op, key, argument)

    def enter(self, lease: bytes, times: tuple[int, int], *, is_back: bool) -> None:
        """Begin a lease of (ttl, linger) milliseconds, or resume it."""
        self.link.up(self._enter, lease, times, is_back)

    def watch(self, tag: str, key: bytes, seen: int, *, is_prefix: bool = False) -> None:
        """Begin a watch, or resume it after revision `seen`."""
        self.link.up(self._watch, tag, key, seen, is_prefix)

    def ping(self) -> None:
        """Keep the lease alive; `on_reply` with number 0 follows."""
        self.link.up(self._serve, 0, wire.NUM_KEYS, b"", None)

    def break_off(self, *, by_store: bool = False) -> None:
        """Cut the connection; the other end is notified if the network is open."""
        if self.link.is_cut:
            return
        self.link.cut()
        network, far = self.store.network, self.store.host
        if by_store:
            if network.is_open(far.name, self._near.name):
                when = network.arrival(far.name, self._near.name)
                self._near.receive(when, self.handler.on_cut, self)
        elif network.is_open(self._near.name, far.name):
            far.receive(network.arrival(self._near.name, far.name), self.store.forget, self)

    def reset(self) -> None:
        """Cut the connection and notify both ends."""
        if not self.link.is_cut:
            self.break_off()
            when = self.store.network.arrival(self.store.host.name, self._near.name)
            self._near.receive(when, self.handler.on_cut, self)

    # ---------------------------------------------------------- the store's end

    def _serve(self, number: int, op: int, key: bytes, argument: Any) -> None:
        keyspace = self.store.keyspace
        self.last_received_at = self.store.host.now
        reply: Any
        try:
            if (handler := keyspace.handlers[op]) is not None:
                reply = handler(key, argument)
            else:
                call = keyspace.client_handlers[op]
                assert call is not None, op
                reply = call(self, None, key, argument)
        except OperationRefused as error:
            reply = error
        self.link.down(self.handler.on_reply, self, number, reply)
        self.store.arm()

    def _enter(self, lease: bytes, times: tuple[int, int], is_back: bool) -> None:
        store = self.store
        now = store.host.now
        if not is_back:
            store.keyspace.grant_lease(self, None, lease, times, now)
        elif not store.keyspace.leases.resume(self, None, lease, now):
            self.on_lease_ended(None)
        store.arm()

    def _watch(self, tag: str, key: bytes, seen: int, is_prefix: bool) -> None:
        keyspace = self.store.keyspace
        view = keyspace.watch(self, tag, key, seen, is_prefix=is_prefix)
        self.link.down(self.handler.on_snapshot, self, tag, view)
        if not view.is_whole:
            for change in keyspace.watches.since(self, tag, seen):
                self.on_change(tag, change)

    def on_change(self, tag: Any, change: RawChange) -> None:
        """Forward a change; with noise, some are repeated later."""
        self.link.down(self.handler.on_change, self, tag, change)
        store = self.store
        if store.noise and change.kind == CHANGE_SET and store.random.random() < store.noise:
            store.host.after(_REPEAT_DELAY_S * store.random.random(), self._repeat, tag, change)

    def _repeat(self, tag: str, change: RawChange) -> None:
        # A watch may repeat an older value of a key, but not one of a deleted key.
        if not self.link.is_cut and self.store.keyspace.peek(change.key) is not None:
            self.link.down(self.handler.on_change, self, tag, change)

    def on_lease_ended(self, tag: Any) -> None:
        """Notify the holder of the end of its lease."""
        self.link.down(self.handler.on_lease_ended, self)


class Cluster:
    """The hosts of a simulation, their network, and the stores that they serve."""

    def __init__(self, time: VirtualTime, network: Network, random: Random, noise: float) -> None:
        """Begin without hosts; see `SimStore` for `noise`."""
        self.network = network
        self.stores: dict[str, SimStore] = {}
        self.node_hosts: set[str] = set()
        """Hosts on which a node has ever been started."""
        self._time = time
        self._random = random
        self._noise = noise
        self._hosts: dict[str, SimHost] = {}

    def host(self, name: str) -> SimHost:
        """Return a host; a new one named "store..." serves a store, others are down."""
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = SimHost(self._time, name, 1.0, 0.0)
            if name not in self.node_hosts and name.startswith("store"):
                self.open_store(name)
            else:
                host.is_alive = False
        return host

    def boot(self, name: str, rate: float, offset: float) -> SimHost:
        """Return a running host, new or restarted."""
        self.node_hosts.add(name)
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = SimHost(self._time, name, rate, offset)
        else:
            host.restart()
        return host

    def open_store(self, endpoint: str) -> SimStore:
        """Serve a new store at a host."""
        host = self.host(endpoint)
        store = SimStore(host, self.network, self._random, endpoint, self._noise)
        self.stores[endpoint] = store
        return store
