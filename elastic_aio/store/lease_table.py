"""Leases of a store: keys that exist as long as their holder keeps sending.

A lease is bound to its holder's connection.  It ends when the holder releases it,
when the server has received nothing from the holder for `ttl` seconds (a suspended
process keeps its connection), or `linger` seconds after the connection has ended.
Until then the holder can resume it on another connection.

A client that lives resets a connection that it gives up, tcp(7).  So an orderly end (FIN)
is that of its process, whose kernel has closed the connection, and the change says so.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_aio.store.limits import KeyspaceLimits, Work
from elastic_aio.store.replies import CHANGE_CLOSED, CHANGE_EXPIRED


class LeaseHolder:
    """The lease half of a client: the leases it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: set[LeaseRecord] = set()
        self.last_received_at = 0.0
        """When the server last received bytes from the client, by the server's clock."""
        self.has_closed = False
        """Whether the connection has come to an orderly end, which is not a reset."""

    def is_unread(self) -> bool:
        """Return whether the server itself does not read what the client sends."""
        return False

    def on_lease_ended(self, tag: Any) -> None:
        """The lease granted or resumed by the request `tag` has expired; its keys are gone."""
        raise NotImplementedError

    def on_released(self, tag: Any) -> None:
        """The keys of the lease that the request `tag` has released are gone."""


@dataclass(slots=True, eq=False, repr=False)
class LeaseRecord:
    """A lease as the server keeps it; times in seconds."""

    lease_id: bytes
    ttl: float
    linger: float
    keys: dict[bytes, None] = field(default_factory=dict)  # ordered
    holder: LeaseHolder | None = None
    tag: Any = None
    ends_at: float = 0.0
    entry: int = 0
    """The number of its valid heap entry; older entries are stale.  0: it has ended."""
    has_closed: bool = False
    """Whether its last holder has, as in `LeaseHolder`."""

    def deadline(self) -> float:
        return self.ends_at if self.holder is None else self.holder.last_received_at + self.ttl

    def kind_of_end(self) -> int:
        return CHANGE_CLOSED if self.has_closed else CHANGE_EXPIRED


class LeaseTable:
    """All leases of one store, and the keys bound to them."""

    def __init__(
        self, remove: Callable[[bytes, int], object], limits: KeyspaceLimits, work: Work
    ) -> None:
        """Begin without leases.

        `remove` is called with each key of a lease that ends and the kind of the change;
        `work` takes the calls.
        """
        self._remove = remove
        self._limits = limits
        self._work = work
        self._departed: OrderedDict[LeaseRecord, None] = OrderedDict()
        self._leases: dict[bytes, LeaseRecord] = {}
        self.lease_of: dict[bytes, LeaseRecord] = {}
        """The lease of each key that is bound to one."""
        # Every frame received postpones a deadline.  The heap is only updated when
        # its earliest entry is due, so that a renewal costs nothing.
        self._heap: list[tuple[float, int, LeaseRecord]] = []
        self._count = 0

    @property
    def has_any(self) -> bool:
        """Whether there is a lease that has not ended."""
        return bool(self._leases)

    def find(self, lease_id: bytes) -> LeaseRecord | None:
        """Return the lease, or None if it has ended."""
        return self._leases.get(lease_id)

    def grant(
        self, holder: LeaseHolder, tag: Any, lease_id: bytes, ttl: float, linger: float, now: float
    ) -> bool:
        """Create a lease; return False if there are too many."""
        limits = self._limits
        if len(self._leases) >= limits.leases or len(holder.leases) >= limits.leases_each:
            return False
        lease = self._leases[lease_id] = LeaseRecord(lease_id, ttl, linger)
        self._attach(lease, holder, tag, now)
        return True

    def resume(self, holder: LeaseHolder, tag: Any, lease_id: bytes, now: float) -> bool:
        """Bind a lease to another connection of its holder; return False if it has ended."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if lease.holder is not None:
            # The former connection is broken, but the server has not noticed yet.
            lease.holder.leases.discard(lease)
        self._attach(lease, holder, tag, now)
        return True

    def release(
        self, lease: LeaseRecord, kind: int, then: Callable[[], None] | None = None
    ) -> None:
        """End a lease, remove its keys by changes of a `kind`, and call `then`, maybe later."""
        lease.entry = 0
        self._leases.pop(lease.lease_id, None)
        self._departed.pop(lease, None)
        if lease.holder is not None:
            lease.holder.leases.discard(lease)
        self._work.spend(1)
        self._work.run(self._remove_keys(lease, kind, then))

    def bind(self, lease: LeaseRecord, key: bytes) -> None:
        """Bind `key`, which has just been written, to `lease`."""
        lease.keys[key] = None
        self.lease_of[key] = lease

    def unbind(self, key: bytes) -> None:
        """Release `key`, which was deleted or written without its lease."""
        lease = self.lease_of.pop(key, None)
        if lease is not None:
            lease.keys.pop(key, None)

    def forget(self, holder: LeaseHolder, now: float) -> bool:
        """End or detach leases of `holder`, whose connection has ended; return if it has more."""
        while holder.leases:
            lease = holder.leases.pop()
            lease.holder, lease.has_closed = None, holder.has_closed
            if lease.linger <= 0:
                self.release(lease, lease.kind_of_end())
            else:
                lease.ends_at = now + lease.linger
                # The new deadline may be earlier than the heap's entry.
                self._push(lease)
                self._departed[lease] = None
                if len(self._departed) > self._limits.departed:
                    oldest = next(iter(self._departed))
                    self.release(oldest, oldest.kind_of_end())
            if self._work.left <= 0:
                break
        return bool(holder.leases)

    def extend_all(self, seconds: float, now: float) -> None:
        """Postpone every deadline by `seconds`: the server received nothing for so long.

        Only by the pause: a server that pauses again and again must still expire a lease.
        """
        for holder in {lease.holder for lease in self._leases.values() if lease.holder}:
            # Not beyond `now`: the bytes of some holders have been read since the pause.
            holder.last_received_at = min(now, holder.last_received_at + seconds)
        for lease in self._leases.values():
            # The ends of some connections have been read since the pause, too.
            lease.ends_at = min(lease.ends_at + seconds, now + lease.linger)
        # The earlier deadlines have passed, and would be taken for another pause.
        for lease in self._leases.values():
            self._push(lease)

    def next_deadline(self) -> float | None:
        """Return when `expire` is due, or None."""
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> None:
        """End leases whose deadline has passed, until the work is spent."""
        while (due := self.next_deadline()) is not None and due <= now and self._work.left > 0:
            self._work.spend(1)
            lease = heapq.heappop(self._heap)[2]
            holder = lease.holder
            if holder is not None and holder.is_unread():
                holder.last_received_at = now
            if lease.deadline() > now:
                self._push(lease)
                continue
            then = None if holder is None else partial(holder.on_lease_ended, lease.tag)
            self.release(lease, lease.kind_of_end(), then)

    def _push(self, lease: LeaseRecord) -> None:
        self._count += 1
        lease.entry = self._count
        heapq.heappush(self._heap, (lease.deadline(), self._count, lease))
        if len(self._heap) > 2 * len(self._leases) + 64:
            # Stale entries of leases with distant deadlines.
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapq.heapify(self._heap)

    def _attach(self, lease: LeaseRecord, holder: LeaseHolder, tag: Any, now: float) -> None:
        self._departed.pop(lease, None)
        lease.holder, lease.has_closed = holder, False
        lease.tag = tag
        holder.leases.add(lease)
        holder.last_received_at = now
        # The new deadline may be earlier than the heap's entry.
        self._push(lease)

    def _remove_keys(
        self, lease: LeaseRecord, kind: int, then: Callable[[], None] | None
    ) -> Iterator[int]:
        # Another lease may take a key, or a value without one, before it is removed (`unbind`).
        while lease.keys:
            self._remove(lease.keys.popitem()[0], kind)
            yield 1
        if then is not None:
            then()
