"""What is in the stores of a simulation: statuses, orders and the leader, as written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from elastic_aio.discovery.keys import run_prefix
from elastic_aio.rendezvous.messages import (
    LeaderRecord,
    MemberStatus,
    Order,
    decode_order,
    decode_status,
)
from elastic_aio.store.keyspace import Client
from elastic_aio.store.replies import CHANGE_SET, RawChange
from elastic_aio.store.server import StoreServer
from elastic_aio.store.server_link import ConnectionServer
from elastic_aio.testing.network import Listener
from elastic_aio.testing.node import RUN_ID, SimNode
from elastic_aio.testing.process import SimProcess

PORT = 29400
"""Of all stores at which nodes meet."""

_PREFIX = f"/{run_prefix(RUN_ID)}/".encode()

OnChange = Callable[["SimStore", str, object], None]


class SimStore(Client):
    """One server's keys of the job: a watch that sees each change when it is made.

    Attributes:
        leader: the coordinator's record, if there is one.
        statuses: by member.
        orders: the last one for each member.
    """

    def __init__(self, listener: Listener, server: ConnectionServer, on_change: OnChange) -> None:
        """Watch; `on_change` is called with a key and its new value, None at its end.

        The value is a `LeaderRecord`, `MemberStatus` or `Order`; other keys are left out.
        """
        super().__init__()
        self.listener = listener
        self.server = server
        self.leader: LeaderRecord | None = None
        self.statuses: dict[str, MemberStatus] = {}
        self.orders: dict[str, Order] = {}
        self._joined_at: dict[str, float] = {}
        self._left_at: dict[tuple[str, int], float] = {}
        self._on_change = on_change
        view = server.keyspace.watch(self, None, _PREFIX, -1, is_prefix=True)
        assert not view.pairs, "a store is watched before its first request"

    def __repr__(self) -> str:
        return f"<SimStore at {self.host.name}, {len(self.statuses)} members>"

    @property
    def instance(self) -> bytes:
        """The id of the server."""
        return self.server.instance

    @property
    def host(self) -> Any:
        """The host that serves it."""
        return self.listener.loop.host

    @property
    def is_open(self) -> bool:
        """Whether it is served."""
        return self.listener.is_open

    def node_of(self, member: str) -> tuple[str, int] | None:
        """Return the host and the process of a member that is present."""
        status = self.statuses.get(member)
        return None if status is None else (status.node.name, status.node.pid)

    def has_status(self, node: SimNode) -> bool:
        """Return whether a node is present as a member."""
        return self.joined_at(node) is not None

    def joined_at(self, node: SimNode) -> float | None:
        """Return since when a node is present as a member, in virtual time; None if it is not."""
        name = node.host.name, node.number
        for member, status in self.statuses.items():
            if (status.node.name, status.node.pid) == name:
                return self._joined_at[member]
        return None

    @property
    def last_joined_at(self) -> float:
        """When the last of its present members has joined, in virtual time."""
        return max(self._joined_at.values(), default=-math.inf)

    def was_attended(self, node: SimNode, *, left_after: float, closed_after: float) -> bool:
        """Return whether a node is present as a member, or was.

        It has left, or was lost, after `left_after`, or with the store after `closed_after`.
        """
        if self.has_status(node):
            return self.listener.closed_at > closed_after
        return self._left_at.get((node.host.name, node.number), -1.0) > left_after

    def is_led_by(self, node: SimNode) -> bool:
        """Return whether a node is the coordinator."""
        leader = self.leader
        return leader is not None and self.node_of(leader.member) == (node.host.name, node.number)

    def on_change(self, tag: Any, change: RawChange) -> None:
        """Take a change of a key."""
        # Without its generation; a simulated job has one at each store.
        key = change.key[len(_PREFIX) :].decode().partition("/")[2]
        kind, _, member = key.partition("/")
        is_set = change.kind == CHANGE_SET
        value: object = None
        if kind == "coordinator":
            value = self.leader = LeaderRecord.decode(change.value) if is_set else None
        elif kind == "t" and is_set:
            value = self.statuses[member] = decode_status(change.value)
            self._joined_at.setdefault(member, self.listener.loop.virtual_now)
        elif kind == "o" and is_set:
            value = self.orders[member] = decode_order(change.value)
        elif kind == "t":
            status = self.statuses.pop(member, None)
            if status is not None:
                left = status.node.name, status.node.pid
                self._left_at[left] = self.listener.loop.virtual_now
            self._joined_at.pop(member, None)
        elif kind == "o":
            self.orders.pop(member, None)
        else:
            return
        self._on_change(self, key, value)


async def serve_store(process: SimProcess) -> None:
    """Serve a store on a host without a node."""
    listener: Any = process.network.listen(process, PORT)
    await StoreServer(listening=[listener]).start()
