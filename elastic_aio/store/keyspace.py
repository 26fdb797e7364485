"""Contents of a store: values and queues, and the waits, leases and watches of its clients.

Pure: the server passes in times and lease ids, and receives notifications through the hooks of
`Client`.  The operations of torch's TCPStore behave as there:

* A wait ends when each key that was missing has been written once, even if a key has been
  deleted since.
* A non-empty queue counts as a present key for CHECK and WAIT, but has no value.
* A counter is decimal text under its key.
* COMPARE_SET of an absent key with a non-empty expectation stores nothing and returns it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Final

from elastic_aio.store import wire
from elastic_aio.store.limits import (
    BYTES_AT_ONCE,
    ENTRY,
    KEYS_AT_ONCE,
    TARGET,
    WAIT,
    WORK_AT_ONCE,
    KeyspaceLimits,
    Usage,
    Work,
    in_parts,
)
from elastic_aio.store.limits import OperationRefused as OperationRefused
from elastic_aio.store.replies import (
    CHANGE_CLOSED,
    CHANGE_DELETED,
    CHANGE_EXPIRED,
    CHANGE_SET,
    RawChange,
    WatchSnapshot,
)

_NUMBER: Final = re.compile(rb"[ \t\n\v\f\r]*([+-]?[0-9]+)")
_LONGEST: Final = 64
_TOP: Final = 1 << 63

_LISTED: Final = 1 << 20
"""Keys in the copies that watches which begin read, together."""

PENDING: Final = object()
"""In place of a result: the client receives it later, through one of its hooks."""


# Modes of a waiter: what it is sent when it is done.
WOKEN, VALUES, ITEM = range(3)


class Client:
    """A client of a keyspace: its waits, leases and watches, and its notifications.

    Subclasses implement the hooks that they need.  A hook is called in the middle of an operation
    and must not change the keyspace.  `tag` is the client's identifier of the request.
    """

    is_gone = False
    """Whether it receives nothing any more."""

    def __init__(self) -> None:
        self.waits: dict[Any, Waiter] = {}
        self.awaited = 0
        """The number of pairs of a pending wait and a missing key."""
        self.leases: set[LeaseRecord] = set()
        self.last_received_at = 0.0
        """When the server last received bytes from the client, by the server's clock."""
        self.has_closed = False
        """Whether the connection has come to an orderly end, which is not a reset."""
        self.watches: dict[Any, _Target] = {}

    def is_unread(self) -> bool:
        """Return whether the server itself does not read what the client sends."""
        return False

    def on_woken(self, tag: Any) -> None:
        """A WAIT or BARRIER is done: all its keys are present."""
        raise NotImplementedError

    def on_values(self, tag: Any, values: list[bytes]) -> None:
        """A GET_WHEN_SET is done: all its keys are present, with these values."""
        raise NotImplementedError

    def on_present(self, tag: Any, keys: Sequence[bytes]) -> bool:
        """A GET_WHEN_SET is done; return whether the client reads its values itself, in parts."""
        return False

    def on_item(self, tag: Any, item: bytes) -> None:
        """A POP_WHEN_PUSHED is done and takes `item`."""
        raise NotImplementedError

    def on_refused(self, tag: Any, why: str) -> None:
        """A GET_WHEN_SET is done: all its keys are present, but cannot be sent."""
        raise NotImplementedError

    def on_lease_ended(self, tag: Any) -> None:
        """The lease granted or resumed by the request has expired; its keys are gone."""
        raise NotImplementedError

    def on_released(self, tag: Any) -> None:
        """The keys of the lease that the request has released are gone."""

    def on_change(self, tag: Any, change: RawChange) -> None:
        """A watched key has changed."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Waiter:
    """One pending wait; `requested` are the keys of a GET_WHEN_SET."""

    client: Client
    tag: Any
    mode: int
    requested: Sequence[bytes] = ()
    keys: Sequence[bytes] = ()
    missing: int = 0
    size: int = 0


class WaitTable:
    """All pending waits of one store, oldest first; a wait records its missing keys at first."""

    def __init__(
        self,
        limits: KeyspaceLimits,
        usage: Usage,
        work: Work,
        values: Mapping[bytes, bytes],
        queues: Mapping[bytes, object],
        collect: Callable[[Sequence[bytes]], list[bytes]],
    ) -> None:
        """Begin without waits; `collect` returns the values of keys as one reply, or refuses."""
        self._limits = limits
        self._usage = usage
        self._work = work
        self._values = values
        self._queues = queues
        self._collect = collect
        # An ordered set for each key.
        self.by_key: dict[bytes, dict[Waiter, None]] = {}
        """By missing key: the waiters that end when it is written."""
        # Of a dict that has been emptied from the front, the first key takes long to find.
        self.by_queue: dict[bytes, OrderedDict[Waiter, None]] = {}
        """By empty queue: the waiters that end when an item is pushed; WAIT is in both."""
        self.count = 0
        """The number of pairs of a pending wait and a missing key."""

    def begin(self, waiter: Waiter, missing: Sequence[bytes]) -> object:
        """Wait for the `missing` keys, instead of a wait with the same tag; return PENDING."""
        if waiter.tag in waiter.client.waits:
            self.cancel(waiter.client, waiter.tag)
        keys = tuple(dict.fromkeys(missing)) if len(missing) > 1 else missing
        if self.count + len(keys) > self._limits.waits:
            raise OperationRefused(f"too many waits: {self.count} keys are being waited for")
        limit = self._limits.waits_each
        if waiter.client.awaited + len(keys) > limit:
            raise OperationRefused(f"too many waits of one client: the limit is {limit} keys")
        size = WAIT * (len(keys) + 1) + sum(map(len, keys))
        if len(waiter.requested) > 1:
            size += sum(map(len, waiter.requested)) + 48 * len(waiter.requested)
        self._usage.take(size)
        waiter.size = size
        self._work.spend(len(keys) // 4)
        self._add(waiter, keys)
        return PENDING

    def cancel(self, client: Client, tag: Any) -> bool:
        """End the wait `tag`; return whether there was one."""
        waiter = client.waits.get(tag)
        if waiter is None:
            return False
        waiter.missing = 0
        self._end(waiter)
        self._work.run(self._remove_keys(waiter))
        return True

    def forget(self, client: Client) -> bool:
        """End some waits of a client that is gone; return whether it has more."""
        left = KEYS_AT_ONCE
        while client.waits and left > 0:
            tag, waiter = client.waits.popitem()
            waiter.missing = 0
            kept = max(0, len(waiter.keys) - left)
            left -= len(waiter.keys) - kept + 1
            for key in waiter.keys[kept:]:
                self._remove(key, waiter)
            waiter.keys = waiter.keys[:kept]
            if kept:
                client.waits[tag] = waiter
            else:
                self._usage.left += waiter.size
        return bool(client.waits)

    def on_written(self, key: bytes) -> None:
        """Notify the waiters for `key`, which has been written, oldest first."""
        self._work.run(self._notify(key, list(self.by_key[key])))

    def on_pushed(self, key: bytes, take: Callable[[bytes], bytes]) -> None:
        """Notify the waiters for the queue `key`, which has got an item that `take` takes."""
        if key in self.by_queue:
            self._work.run(self._notify_queue(key, take))

    def _add(self, waiter: Waiter, keys: Sequence[bytes]) -> None:
        waiter.keys = keys
        waiter.missing = len(keys)
        waiter.client.waits[waiter.tag] = waiter
        for key in keys[:KEYS_AT_ONCE]:
            self._await(key, waiter)
        if len(keys) > KEYS_AT_ONCE:
            self._work.run(self._await_others(waiter, keys))

    def _await(self, key: bytes, waiter: Waiter) -> None:
        self.count += 1
        waiter.client.awaited += 1
        if waiter.mode != ITEM:
            self.by_key.setdefault(key, {})[waiter] = None
        if waiter.mode != VALUES:
            self.by_queue.setdefault(key, OrderedDict())[waiter] = None

    def _await_others(self, waiter: Waiter, keys: Sequence[bytes]) -> Iterator[int]:
        for key in islice(keys, KEYS_AT_ONCE, None):
            if waiter.missing <= 0:
                return  # it has ended
            if key in self._values or (waiter.mode == WOKEN and key in self._queues):
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
                    return
            else:
                self._await(key, waiter)
            yield 1

    def _remove(self, key: bytes, waiter: Waiter) -> bool:
        """Remove `waiter` from the waiters for `key`; return whether it was one."""
        was_one = False
        tables: tuple[dict[bytes, Any], ...] = self.by_key, self.by_queue
        for table in tables:
            waiters = table.get(key)
            if waiters is not None and waiters.pop(waiter, self) is None:
                was_one = True
                if not waiters:
                    del table[key]
        if was_one:
            self.count -= 1
            waiter.client.awaited -= 1
        return was_one

    def _remove_keys(self, waiter: Waiter) -> Iterator[int]:
        for key in waiter.keys:
            self._remove(key, waiter)
            yield 1

    def _notify(self, key: bytes, waiters: list[Waiter]) -> Iterator[int]:
        for waiter in waiters:
            # Its wait may have ended since the key was written.
            if self._remove(key, waiter):
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
            yield 1 + len(waiter.requested) // 4

    def _notify_queue(self, key: bytes, take: Callable[[bytes], bytes]) -> Iterator[int]:
        while key in self.by_queue and key in self._queues:
            waiter = next(iter(self.by_queue[key]))
            self._remove(key, waiter)
            if waiter.mode == ITEM and not waiter.client.is_gone:
                self._end(waiter)
                waiter.client.on_item(waiter.tag, take(key))
            elif not waiter.client.is_gone:
                # The item stays: a torch client pops it with another request once woken.
                waiter.missing -= 1
                if not waiter.missing:
                    self._complete(waiter)
                    return
            yield 1

    def _complete(self, waiter: Waiter) -> None:
        if waiter.mode == WOKEN:
            self._end(waiter)
            waiter.client.on_woken(waiter.tag)
            return
        if waiter.client.on_present(waiter.tag, waiter.requested):
            self._end(waiter)
            return
        # A key may have been set and deleted while others were missing: wait for it again.
        missing = [key for key in waiter.requested if key not in self._values]
        if missing:
            self._add(waiter, tuple(dict.fromkeys(missing)))
            return
        self._end(waiter)
        try:
            values = self._collect(waiter.requested)
        except OperationRefused as error:
            waiter.client.on_refused(waiter.tag, str(error))
        else:
            waiter.client.on_values(waiter.tag, values)

    def _end(self, waiter: Waiter) -> None:
        del waiter.client.waits[waiter.tag]
        self._usage.left += waiter.size


@dataclass(slots=True, eq=False, repr=False)
class LeaseRecord:
    """A lease as the server keeps it; times in seconds."""

    lease_id: bytes
    ttl: float
    linger: float
    keys: dict[bytes, None] = field(default_factory=dict)  # ordered
    holder: Client | None = None
    tag: Any = None
    ends_at: float = 0.0
    entry: int = 0
    """The number of its valid heap entry; older entries are stale.  0: it has ended."""
    has_closed: bool = False
    """Whether its last holder has, as in `Client`."""

    def deadline(self) -> float:
        return self.ends_at if self.holder is None else self.holder.last_received_at + self.ttl

    def kind_of_end(self) -> int:
        return CHANGE_CLOSED if self.has_closed else CHANGE_EXPIRED


class LeaseTable:
    """All leases of one store: keys that exist as long as their holder keeps sending.

    A lease is bound to its holder's connection.  It ends when the holder releases it, when the
    server has received nothing from the holder for `ttl` seconds (a suspended process keeps its
    connection), or `linger` seconds after the connection has ended.  Until then the holder can
    resume it on another connection.

    A client that lives resets a connection that it gives up, tcp(7).  So an orderly end (FIN) shows
    that the process has ended and its kernel has closed the connection; the change says so.
    """

    def __init__(
        self, remove: Callable[[bytes, int], object], limits: KeyspaceLimits, work: Work
    ) -> None:
        """Begin without leases; `remove` is called with each key that ends, and how it ends."""
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
        return bool(self._leases)

    def find(self, lease_id: bytes) -> LeaseRecord | None:
        return self._leases.get(lease_id)

    def grant(
        self, holder: Client, tag: Any, lease_id: bytes, ttl: float, linger: float, now: float
    ) -> bool:
        """Create a lease; return False if there are too many."""
        limits = self._limits
        if len(self._leases) >= limits.leases or len(holder.leases) >= limits.leases_each:
            return False
        lease = self._leases[lease_id] = LeaseRecord(lease_id, ttl, linger)
        self._attach(lease, holder, tag, now)
        return True

    def resume(self, holder: Client, tag: Any, lease_id: bytes, now: float) -> bool:
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

    def forget(self, holder: Client, now: float) -> bool:
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

    def _attach(self, lease: LeaseRecord, holder: Client, tag: Any, now: float) -> None:
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


LINGER: Final = 60.0
"""Seconds for which changes are recorded for a watch whose connection has ended."""


class _PresentPairs(Client):
    """The present pairs of a watched prefix that have been read in parts, or have changed since."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: dict[bytes, bytes] = {}

    def on_change(self, tag: Any, change: RawChange) -> None:
        if change.kind == CHANGE_SET:
            self.pairs[change.key] = change.value
        else:
            self.pairs.pop(change.key, None)


@dataclass(slots=True, eq=False, repr=False)
class _Target:
    """A watched key or prefix; it outlives its last watcher by `LINGER` seconds."""

    key: bytes
    is_prefix: bool
    since: int
    # With the last revision that their snapshots, or the changes sent after them, include.
    watchers: dict[tuple[Client, Any], int] = field(default_factory=dict)
    # The changes that some watchers have not received yet.
    pending: deque[RawChange] = field(default_factory=deque)

    def covers(self, key: bytes) -> bool:
        return key.startswith(self.key) if self.is_prefix else key == self.key


class WatchTable:
    """All watches of one store: changes of a key or a prefix, in order and without gaps.

    Every change of a watched key gets the next revision and is kept in a bounded history.  After
    the end of a connection, the changes of its watches are recorded for `LINGER` seconds more, so
    that a watch can continue after the last revision its reader has received.  If the history no
    longer reaches back that far, the watch restarts with a whole snapshot.
    """

    def __init__(self, limits: KeyspaceLimits, usage: Usage, work: Work) -> None:
        self._limits = limits
        self._usage = usage
        self._work = work
        self.targets: dict[tuple[bytes, bool], _Target] = {}
        """The watched keys and prefixes; while there are none, changes need not be recorded."""
        # The number of watched prefixes of each length: a changed key is looked up
        # once per length instead of being compared with every prefix.
        self._lengths: Counter[int] = Counter()
        # Until when a target is kept for clients that reconnect; in order of time,
        # since every entry is made `LINGER` seconds before it is due.
        self._kept_until: OrderedDict[_Target, float] = OrderedDict()
        self._history: deque[RawChange] = deque()
        self._size = 0
        self._dropped_revision = 0
        self._revision = 0
        self._count = 0

    def begin(
        self, watcher: Client, tag: Any, key: bytes, is_prefix: bool, last_revision: int
    ) -> WatchSnapshot:
        """Begin a watch, or continue one after `last_revision` if that is not negative.

        It replaces a watch of the client with the same tag.  The caller must fill in the `pairs` of
        the snapshot if it `is_whole`, and else send the changes `since`.
        """
        self.cancel(watcher, tag)
        if self._count >= self._limits.watches:
            raise OperationRefused("there are too many watches")
        limit = self._limits.watches_each
        if len(watcher.watches) >= limit:
            raise OperationRefused(f"too many watches of one client: the limit is {limit}")
        target = self.targets.get((key, is_prefix)) or self._add(key, is_prefix)
        target.watchers[watcher, tag] = self._revision
        watcher.watches[tag] = target
        self._count += 1
        if not max(target.since, self._dropped_revision) <= last_revision <= self._revision:
            return WatchSnapshot(True, self._revision, ())
        return WatchSnapshot(False, last_revision, ())

    def since(self, watcher: Client, tag: Any, last_revision: int) -> list[RawChange]:
        """Return the recorded changes of a continued watch after `last_revision`."""
        target = watcher.watches[tag]
        changes = []
        for change in reversed(self._history):
            if change.revision <= last_revision:
                break
            if target.covers(change.key):
                changes.append(change)
        self._work.spend(self._revision - max(last_revision, self._dropped_revision) >> 3)
        return changes[::-1]

    def catch_up(self, watcher: Client, tag: Any) -> None:
        """Notify a watcher now of all changes that it has not received, others perhaps again."""
        for change in watcher.watches[tag].pending:
            watcher.on_change(tag, change)

    def cancel(self, watcher: Client, tag: Any) -> bool:
        """End the watch `tag`; return whether there was one."""
        target = watcher.watches.pop(tag, None)
        if target is None:
            return False
        self._remove(target, watcher, tag)
        if not target.watchers and target not in self._kept_until:
            self._drop(target)
        return True

    def forget(self, watcher: Client, now: float) -> None:
        """End the watches of a broken connection; record their changes `LINGER` seconds more."""
        for tag, target in watcher.watches.items():
            self._remove(target, watcher, tag)
            self._kept_until.pop(target, None)
            self._kept_until[target] = now + LINGER
        watcher.watches.clear()

    def record(self, kind: int, key: bytes, value: bytes) -> None:
        """Record a change of a watched key; notify each watch in order, later if they are many."""
        self._work.spend(self.units(len(key)))
        targets = list(self._covering(key))
        if not targets:
            return
        limits = self._limits
        self._revision += 1
        change = RawChange(kind, self._revision, key, value)
        self._history.append(change)
        self._size += len(key) + len(value)
        while len(self._history) > limits.history or self._size > limits.history_size:
            oldest = self._history.popleft()
            self._size -= len(oldest.key) + len(oldest.value)
            self._dropped_revision = oldest.revision
        for target in targets:
            target.pending.append(change)
            if len(target.pending) == 1:
                self._work.run(self._notify(target))
            else:
                self._work.spend(WORK_AT_ONCE)

    def units(self, size: int) -> int:
        """Return the work to look up the watches of a key of `size` bytes, hashed per length."""
        return len(self._lengths) * (size + 256) >> 12

    def next_deadline(self) -> float | None:
        """Return when `expire` is due, or None."""
        return next(iter(self._kept_until.values()), None)

    def expire(self, now: float) -> None:
        """Drop targets whose watchers have not returned in time, until the work is spent."""
        while (due := self.next_deadline()) is not None and due <= now and self._work.left > 0:
            self._drop_oldest()
            self._work.spend(1)

    def _drop_oldest(self) -> None:
        target, _ = self._kept_until.popitem(last=False)
        if not target.watchers:
            self._drop(target)

    def _add(self, key: bytes, is_prefix: bool) -> _Target:
        while len(self.targets) >= self._limits.watches:
            # One of them has no watcher: its reader gets a whole snapshot if it returns.
            self._drop_oldest()
        self._usage.take(TARGET + len(key))
        target = self.targets[key, is_prefix] = _Target(key, is_prefix, self._revision)
        if is_prefix:
            self._lengths[len(key)] += 1
        return target

    def _notify(self, target: _Target) -> Iterator[int]:
        watchers = target.watchers
        while target.pending:
            change = target.pending[0]
            for watch in list(watchers):
                # It may have ended, or begun again, since the change was made.
                if watchers.get(watch, change.revision) < change.revision:
                    watch[0].on_change(watch[1], change)
                yield 1
            target.pending.popleft()

    def _covering(self, key: bytes) -> Iterator[_Target]:
        if (target := self.targets.get((key, False))) is not None:
            yield target
        for length in self._lengths:
            target = self.targets.get((key[:length], True)) if length <= len(key) else None
            if target is not None:
                yield target

    def _remove(self, target: _Target, watcher: Client, tag: Any) -> None:
        target.watchers.pop((watcher, tag), None)
        self._count -= 1

    def _drop(self, target: _Target) -> None:
        del self.targets[target.key, target.is_prefix]
        self._usage.left += TARGET + len(target.key)
        if target.is_prefix:
            length = len(target.key)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
        if not self.targets:
            self._dropped_revision = self._revision
            self._history.clear()
            self._size = 0


class Keyspace:
    """The contents of one store, and the waits, leases and watches of its clients."""

    def __init__(self, limits: KeyspaceLimits | None = None, work: Work | None = None) -> None:
        """Begin empty; `work` has all that operations leave for later."""
        self.work = work = work or Work()
        self._limits = limits = limits or KeyspaceLimits()
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self.usage = Usage(limits.stored)
        account = self.usage, work
        self.waits = WaitTable(limits, *account, self._values, self._queues, self._collect)
        self._waiters = self.waits.by_key
        self.leases = LeaseTable(self._remove, limits, work)
        self._leased = self.leases.lease_of
        self.watches = WatchTable(limits, *account)
        self._watched = self.watches.targets
        self._listed = 0
        # Functions of a key and an argument.
        handlers: dict[int, Callable[[bytes, Any], Any]] = {
            wire.SET: self.set,
            wire.COMPARE_SET: self.compare_set,
            wire.GET: self.get,
            wire.ADD: self.add,
            wire.CHECK: self.check,
            wire.NUM_KEYS: self.num_keys,
            wire.DELETE_KEY: self.delete,
            wire.APPEND: self.append,
            wire.MULTI_GET: self.multi_get,
            wire.MULTI_SET: self.multi_set,
            wire.QUEUE_PUSH: self.queue_push,
            wire.QUEUE_POP: self.queue_pop,
            wire.QUEUE_LEN: self.queue_len,
            wire.QUEUE_UNPOP: self.queue_unpop,
            wire.LIST_KEYS: self.list_keys,
            wire.PEEK: self.peek,
        }
        # Functions of a client, its tag, a key and an argument.
        client_handlers: dict[int, Callable[[Client, Any, bytes, Any], Any]] = {
            wire.WAIT: self.wait,
            wire.GET_WHEN_SET: self.get_when_set,
            wire.POP_WHEN_PUSHED: self.pop_when_pushed,
            wire.BARRIER: self.barrier,
            wire.RELEASE_LEASE: self.release_lease,
            wire.LEASED_SET: self.leased_set,
            wire.LEASED_COMPARE_SET: self.leased_compare_set,
        }
        # Lists by opcode, so that dispatching a request costs an index and a call.
        self.handlers = [handlers.get(op) for op in range(256)]
        self.client_handlers = [client_handlers.get(op) for op in range(256)]

    def __repr__(self) -> str:
        keys, queues, waits = len(self._values), len(self._queues), self.waits.count
        return f"<Keyspace with {keys} keys, {queues} queues, {waits} waits>"

    # Values.

    def set(self, key: bytes, value: bytes) -> None:
        # As in `_growth` and `_write`, without calls: this is the most frequent operation.
        old = self._values.get(key)
        if old is None or len(old) != len(value):
            more = len(value) + (ENTRY + len(key) if old is None else -len(old))
            if more > self.usage.left:
                self.usage.refuse()
            self.usage.left -= more
        self._values[key] = value
        if self._leased or self._watched or key in self._waiters:
            self._on_written(key, value)

    def get(self, key: bytes, _: None = None) -> bytes:
        return self._values.get(key, b"")

    def peek(self, key: bytes, _: None = None) -> bytes | None:
        return self._values.get(key)

    def add(self, key: bytes, amount: int) -> int:
        text = self._values.get(key)
        # As in `parse_counter` and `wrap`, without calls.
        if text is not None and len(text) < 19 and text.isdigit():
            total = int(text) + amount
        else:
            total = parse_counter(text) + amount
        if not -_TOP <= total < _TOP:
            total = wrap(total)
        self.set(key, b"%d" % total)
        return total

    def compare_set(self, key: bytes, pair: Sequence[bytes]) -> bytes:
        return self._compare_set(key, pair[0], pair[1])[0]

    def delete(self, key: bytes, _: None = None) -> int:
        return self._remove(key, CHANGE_DELETED)

    def append(self, key: bytes, more: bytes) -> None:
        value = self._values.get(key, b"") + more
        if len(value) > self._limits.grown:
            raise OperationRefused(f"a value may grow to {self._limits.grown} bytes")
        self.set(key, value)
        self.work.spend(len(value) >> 13)

    def multi_get(self, _: bytes, keys: Sequence[bytes]) -> list[bytes]:
        return self._checked_reply([self._values.get(key, b"") for key in keys])

    def have_values(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def size_of(self, key: bytes) -> int:
        return len(self._values.get(key, b""))

    def is_large(self, keys: Sequence[bytes]) -> bool:
        """Return whether the values of `keys` take long to send."""
        if 1 < len(keys) <= KEYS_AT_ONCE:
            return sum(map(len, filter(None, map(self._values.get, keys)))) > BYTES_AT_ONCE
        return len(keys) > 1

    def is_long(self, pairs: Sequence[tuple[bytes, bytes]]) -> bool:
        """Return whether `pairs` take long to set, for their number or for watches of prefixes."""
        if len(pairs) > KEYS_AT_ONCE or not self._watched:
            return len(pairs) > KEYS_AT_ONCE
        longest = max(map(len, dict(pairs)), default=0)
        return len(pairs) * self.watches.units(longest) > WORK_AT_ONCE

    def multi_set(self, _: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        # All or nothing; a key may be there twice.
        self.usage.take(sum(self._growth(key, value) for key, value in dict(pairs).items()))
        for key, value in pairs:
            self._write(key, value)

    def multi_set_in_parts(self, pairs: Sequence[tuple[bytes, bytes]]) -> Generator[int]:
        """Set many keys in parts, each of which yields their number; all or nothing."""
        reserved = 0
        try:
            for part in in_parts(pairs):
                size = sum(ENTRY + len(key) + len(value) for key, value in part)
                self.usage.take(size)
                reserved += size
                yield len(part)
            for key, value in pairs:
                size = ENTRY + len(key) + len(value)
                self.usage.left += size
                reserved -= size
                self.set(key, value)
                yield 1
        finally:
            self.usage.left += reserved

    def num_keys(self, _: bytes = b"", __: None = None) -> int:
        return len(self._values)

    def list_keys(self, _: bytes = b"", __: None = None) -> list[bytes]:
        self._check_items(len(self._values))
        return self._checked_reply(list(self._values))

    def check(self, _: bytes, keys: Sequence[bytes]) -> int:
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return 1
        return 0

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        values, queues = self._values, self._queues
        return [key for key in keys if key not in values and key not in queues]

    # Queues.

    def queue_push(self, key: bytes, item: bytes) -> None:
        self._enqueue(key, item).append(item)
        self.waits.on_pushed(key, self._dequeue)

    def queue_unpop(self, key: bytes, item: bytes) -> None:
        self._enqueue(key, item).appendleft(item)
        self.waits.on_pushed(key, self._dequeue)

    def queue_pop(self, key: bytes, _: None = None) -> tuple[int, bytes]:
        queue = self._queues.get(key)
        return (0, b"") if queue is None else (len(queue), self._dequeue(key))

    def queue_len(self, key: bytes, _: None = None) -> int:
        return len(self._queues.get(key, ()))

    # Waits.

    def wait(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return 0 if all keys are present, else PENDING and call `on_woken` later."""
        values, queues = self._values, self._queues
        for key in keys:
            if key not in values and key not in queues:
                return self.waits.begin(Waiter(client, tag, WOKEN), self.missing(keys))
        # A client has one wait per tag: a new wait replaces the pending one.
        if tag in client.waits:
            self.cancel(client, tag)
        return 0

    def get_when_set(self, client: Client, tag: Any, _: bytes, keys: Sequence[bytes]) -> Any:
        """Return the values if all are present, else PENDING and call `on_values` later."""
        missing = [key for key in keys if key not in self._values]
        if not missing:
            return self._collect(keys)
        return self.waits.begin(Waiter(client, tag, VALUES, keys), missing)

    def pop_when_pushed(self, client: Client, tag: Any, key: bytes, _: None) -> Any:
        """Return the oldest item if there is one, else PENDING and call `on_item` later."""
        if key in self._queues:
            return self._dequeue(key)
        return self.waits.begin(Waiter(client, tag, ITEM), (key,))

    def barrier(self, client: Client, tag: Any, key: bytes, size: int) -> Any:
        """Count an arrival; return 0 from the `size`-th on, else PENDING (`on_woken`)."""
        count = parse_counter(self._values.get(key)) + 1
        value = b"%d" % count
        growth = self._growth(key, value)
        self.usage.take(growth)
        if count >= size:
            self._write(key, value)
            return 0
        try:
            self.waits.begin(Waiter(client, tag, WOKEN), (key,))
        except OperationRefused:
            self.usage.left += growth
            raise
        self._values[key] = value
        if self._watched:
            self.watches.record(CHANGE_SET, key, value)
        return PENDING

    def cancel(self, client: Client, tag: Any) -> bool:
        """End the wait or watch `tag`; return whether there was one."""
        return self.waits.cancel(client, tag) or self.watches.cancel(client, tag)

    # Leases and watches.

    def leased_set(self, client: Client, _: Any, key: bytes, pair: Sequence[bytes]) -> None:
        lease = self._lease(client, pair[1])
        self.set(key, pair[0])
        self.leases.bind(lease, key)

    def leased_compare_set(
        self, client: Client, _: Any, key: bytes, parts: Sequence[bytes]
    ) -> bytes:
        lease = self._lease(client, parts[2])
        current, is_stored = self._compare_set(key, parts[0], parts[1])
        if is_stored:
            self.leases.bind(lease, key)
        return current

    def _lease(self, client: Client, lease_id: bytes) -> LeaseRecord:
        lease = self.leases.find(lease_id)
        if lease is None:
            raise OperationRefused("the lease has ended")
        if lease.holder is not client:
            # Its holder has given this connection up, and a late value would replace a newer one.
            raise OperationRefused("the lease has moved to another connection")
        return lease

    def grant_lease(
        self, client: Client, tag: Any, lease_id: bytes, terms: tuple[int, int], now: float
    ) -> bytes:
        """Create a lease; `terms` are its ttl and linger in milliseconds."""
        if not self.leases.grant(client, tag, lease_id, terms[0] / 1000, terms[1] / 1000, now):
            raise OperationRefused("there are too many leases")
        return lease_id

    def release_lease(self, client: Client, tag: Any, lease_id: bytes, _: None) -> Any:
        """Return 0 if the lease has ended, else PENDING and call `on_released`, maybe at once."""
        lease = self.leases.find(lease_id)
        if lease is None:
            return 0
        self.leases.release(lease, CHANGE_DELETED, partial(client.on_released, tag))
        return PENDING

    def watch(
        self, client: Client, tag: Any, key: bytes, last_revision: int, *, is_prefix: bool
    ) -> WatchSnapshot:
        """Begin a watch, or continue one after `last_revision` if that is not negative."""
        parts = self.watch_in_parts(client, tag, key, last_revision, is_prefix=is_prefix)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                snapshot: WatchSnapshot = end.value
                return snapshot

    def watch_in_parts(
        self, client: Client, tag: Any, key: bytes, last_revision: int, *, is_prefix: bool
    ) -> Generator[int, None, WatchSnapshot]:
        """Begin a watch as `watch` does, in parts; each yields the number of its keys.

        The watch begins with the last part; its snapshot has the changes between the parts.
        """
        snapshot = self.watches.begin(client, tag, key, is_prefix, last_revision)
        values = self._values
        if not snapshot.is_whole:
            return snapshot
        if not is_prefix:
            pairs = ((key, values[key]),) if key in values else ()
            return WatchSnapshot(True, snapshot.revision, pairs)
        self.watches.cancel(client, tag)
        present = _PresentPairs()
        while self._listed and self._listed + len(values) > _LISTED:
            yield KEYS_AT_ONCE
        self.watches.begin(present, None, key, True, -1)
        names = list(values)
        self._listed += len(names)
        try:
            for keys in in_parts(names):
                found = [name for name in keys if name.startswith(key) and name in values]
                present.pairs.update((name, values[name]) for name in found)
                self._check_items(len(present.pairs))
                yield len(keys)
            self.watches.catch_up(present, None)
        finally:
            self._listed -= len(names)
            self.watches.cancel(present, None)
        snapshot = self.watches.begin(client, tag, key, True, -1)
        return WatchSnapshot(True, snapshot.revision, present.pairs.items())

    def forget(self, client: Client, now: float) -> bool:
        """Remove some of a client whose connection has ended; return whether it has more."""
        self.work.begin()
        self.watches.forget(client, now)
        has_more = self.leases.forget(client, now)
        return self.waits.forget(client) or has_more

    def next_deadline(self) -> float | None:
        """Return when `expire` is due; None: not before the next operation."""
        times = [self.leases.next_deadline(), self.watches.next_deadline()]
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """End leases and lingering watches whose deadline has passed, some of them if many."""
        self.work.begin()
        self.leases.expire(now)
        self.watches.expire(now)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[bytes, bool]:
        current = self._values.get(key)
        if (current is None and expected) or (current is not None and current != expected):
            return (expected if current is None else current), False
        self.set(key, desired)
        return desired, True

    def _growth(self, key: bytes, value: bytes) -> int:
        """Return the bytes that the store grows by when `key` is set to `value`."""
        old = self._values.get(key)
        return len(value) + (ENTRY + len(key) if old is None else -len(old))

    def _write(self, key: bytes, value: bytes) -> None:
        """Set a value whose growth has been accounted for."""
        self._values[key] = value
        if self._leased or self._watched or key in self._waiters:
            self._on_written(key, value)

    def _collect(self, keys: Sequence[bytes]) -> list[bytes]:
        return self._checked_reply([self._values[key] for key in keys])

    def _check_items(self, count: int) -> None:
        """Refuse a reply with so many keys that it would block the event loop."""
        if count > self._limits.items:
            limit = self._limits.items
            raise OperationRefused(f"the reply has {count} keys: the limit is {limit} keys")

    def _checked_reply(self, items: list[bytes]) -> list[bytes]:
        """Return the items of a reply; refuse what is too large before it is encoded."""
        if len(items) > 1:
            self.check_reply(sum(map(len, items)) + 8 * len(items))
        return items

    def check_reply(self, size: int) -> None:
        limit = self._limits.reply
        if size > limit:
            raise OperationRefused(f"the reply has {size} bytes: the limit is {limit} bytes")

    def _enqueue(self, key: bytes, item: bytes) -> deque[bytes]:
        """Account for an item; return the queue to put it into."""
        queue = self._queues.get(key)
        size = ENTRY + len(item)
        if queue is not None:
            self.usage.take(size)
            return queue
        self.usage.take(size + TARGET + len(key))
        queue = self._queues[key] = deque()
        return queue

    def _dequeue(self, key: bytes) -> bytes:
        queue = self._queues[key]
        item = queue.popleft()
        self.usage.left += ENTRY + len(item)
        if not queue:
            del self._queues[key]
            self.usage.left += TARGET + len(key)
        return item

    def _on_written(self, key: bytes, value: bytes) -> None:
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(CHANGE_SET, key, value)
        if key in self._waiters:
            self.waits.on_written(key)

    def _remove(self, key: bytes, kind: int) -> int:
        value = self._values.pop(key, None)
        if value is None:
            return 0
        self.usage.left += ENTRY + len(key) + len(value)
        if self._leased:
            self.leases.unbind(key)
        if self._watched:
            self.watches.record(kind, key, b"")
        return 1


def parse_counter(text: bytes | None) -> int:
    """Parse a counter as strtoll(3) does: leading space, sign, digits, then anything."""
    if text is None:
        return 0
    if len(text) < 19 and text.isdigit():
        return int(text)
    match = _NUMBER.match(text, 0, _LONGEST)
    # Twenty characters hold every 64-bit number; more leading zeros or spaces are refused too.
    is_short = match and len(match[1]) <= 20 and match.end() < _LONGEST
    number = int(match[1]) if match and is_short else _TOP
    if not -_TOP <= number < _TOP:
        raise OperationRefused("the value is not a 64-bit number")
    return number


def wrap(total: int) -> int:
    """Return the signed number of 64 bits that a sum becomes."""
    if not -_TOP <= total < _TOP:
        total = (total + _TOP) % (2 * _TOP) - _TOP
    return total


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `prefix`."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes((stem[-1] + 1,)) if stem else b"\0"
