"""Leases: keys that live as long as somebody is heard of.

A lease is bound to the connection of its holder.  It ends when the holder releases
it, when nothing has been heard from the holder for `ttl` seconds (a stopped
process keeps its connection), or `linger` seconds after the connection has ended;
within those the holder may come back on another connection and resume it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Lease", "LeaseHolder", "LeaseTable"]


class LeaseHolder:
    """A client as leases see it."""

    def __init__(self) -> None:
        """Begin without leases."""
        super().__init__()
        self.leases: set[Lease] = set()
        self.heard_at = 0.0
        """When something last came from the client, by the server's clock."""

    def on_lease_ended(self, tag: Any) -> None:
        """The lease that was granted or resumed under `tag` has ended, not by release."""
        raise NotImplementedError


class Lease:
    """One lease."""

    __slots__ = ("ends_at", "entry", "holder", "keys", "linger", "name", "tag", "ttl")

    def __init__(self, name: bytes, ttl: float, linger: float) -> None:
        self.name = name
        self.ttl = ttl
        self.linger = linger
        self.keys: set[bytes] = set()
        self.holder: LeaseHolder | None = None
        self.tag: Any = None
        self.ends_at = 0.0
        self.entry = 0
        """The lease's place in the heap; others of it are void.  0: the lease is over."""

    def deadline(self) -> float:
        return self.ends_at if self.holder is None else self.holder.heard_at + self.ttl


class LeaseTable:
    """All leases of one store."""

    def __init__(self, expire_key: Callable[[bytes], None], limit: int) -> None:
        """Hold `limit` leases at most; `expire_key` removes a key whose lease has ended."""
        self._expire_key = expire_key
        self._limit = limit
        self._leases: dict[bytes, Lease] = {}
        self.lease_of: dict[bytes, Lease] = {}
        """The lease of each key that is bound to one."""
        # Deadlines move with every frame that is heard; the heap only learns of it
        # when the earliest is due, so a renewal costs nothing here.
        self._heap: list[tuple[float, int, Lease]] = []
        self._count = 0

    @property
    def has_any(self) -> bool:
        """Whether there is a living lease."""
        return bool(self._leases)

    def find(self, name: bytes) -> Lease | None:
        """Return a living lease."""
        return self._leases.get(name)

    def grant(
        self, holder: LeaseHolder, tag: Any, name: bytes, ttl: float, linger: float, now: float
    ) -> bool:
        """Make a lease; tell whether there was room for it."""
        if len(self._leases) >= self._limit:
            return False
        lease = self._leases[name] = Lease(name, ttl, linger)
        self._attach(lease, holder, tag, now)
        self._enter(lease)
        return True

    def resume(self, holder: LeaseHolder, tag: Any, name: bytes, now: float) -> bool:
        """Give a lease to another connection of its holder; tell whether it still lives."""
        lease = self._leases.get(name)
        if lease is None:
            return False
        if lease.holder is not None:
            # The former connection is dead, and we are the last to learn of it.
            lease.holder.leases.discard(lease)
        self._attach(lease, holder, tag, now)
        return True

    def release(self, lease: Lease) -> set[bytes]:
        """End a lease at its holder's wish; return the keys that are to be deleted."""
        keys, lease.keys = lease.keys, set()
        for key in keys:
            del self.lease_of[key]
        self._end(lease)
        return keys

    def bind(self, lease: Lease, key: bytes) -> None:
        """Let a key that has just been written live as long as the lease."""
        lease.keys.add(key)
        self.lease_of[key] = lease

    def unbind(self, key: bytes) -> None:
        """Set a key free: it was deleted, or written without its lease."""
        lease = self.lease_of.pop(key, None)
        if lease is not None:
            lease.keys.discard(key)

    def forget(self, holder: LeaseHolder, now: float) -> None:
        """The holder's connection has ended."""
        for lease in list(holder.leases):
            holder.leases.discard(lease)
            lease.holder = None
            if lease.linger <= 0:
                self._expire(lease)
                continue
            lease.ends_at = now + lease.linger
            # It may be due before the time under which the heap has it.
            self._enter(lease)

    def begin_anew(self, now: float) -> None:
        """Let the time of every lease count from `now`: nobody could be heard before."""
        for lease in self._leases.values():
            if lease.holder is not None:
                lease.holder.heard_at = now
            else:
                lease.ends_at = now + lease.linger

    def next_deadline(self) -> float | None:
        """When `expire` is to be called next."""
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while (due := self.next_deadline()) is not None and due <= now:
            lease = heapq.heappop(self._heap)[2]
            if lease.deadline() > now:
                self._enter(lease)
                continue
            holder = lease.holder
            self._expire(lease)
            if holder is not None:
                holder.on_lease_ended(lease.tag)

    def _enter(self, lease: Lease) -> None:
        self._count += 1
        lease.entry = self._count
        heapq.heappush(self._heap, (lease.deadline(), self._count, lease))

    def _attach(self, lease: Lease, holder: LeaseHolder, tag: Any, now: float) -> None:
        lease.holder = holder
        lease.tag = tag
        holder.leases.add(lease)
        holder.heard_at = now

    def _expire(self, lease: Lease) -> None:
        self._end(lease)
        keys, lease.keys = lease.keys, set()
        for key in sorted(keys):
            self.lease_of.pop(key, None)
            self._expire_key(key)

    def _end(self, lease: Lease) -> None:
        lease.entry = 0
        self._leases.pop(lease.name, None)
        if lease.holder is not None:
            lease.holder.leases.discard(lease)
