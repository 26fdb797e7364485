"""Watches of a store: changes of a key or a prefix, in order and without gaps.

Every change of a watched key gets the next revision and is kept in a bounded history.
When a connection breaks, the changes of its watches are recorded for `LINGER` seconds
more, so that a watch can continue after the last revision its reader has received.  If
the history no longer reaches back that far, the watch restarts with a whole snapshot.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from elastic_aio.store.limits import (
    TARGET,
    WORK_AT_ONCE,
    KeyspaceLimits,
    OperationRefused,
    Usage,
    Work,
)
from elastic_aio.store.replies import CHANGE_SET, RawChange, WatchSnapshot

LINGER: Final = 60.0
"""Seconds for which changes are recorded for a watch whose connection has ended."""


class Watcher:
    """The watch half of a client: the watches it has open."""

    def __init__(self) -> None:
        super().__init__()
        self.watches: dict[Any, _Target] = {}

    def on_change(self, tag: Any, change: RawChange) -> None:
        """A key of the watch `tag` has changed."""
        raise NotImplementedError


class PresentPairs(Watcher):
    """The pairs of a watched prefix while they are read in parts.

    It has the present value of each key that has been read, or has changed since the watch began.
    """

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
    watchers: dict[tuple[Watcher, Any], int] = field(default_factory=dict)
    # The changes that some watchers have not received yet.
    pending: deque[RawChange] = field(default_factory=deque)

    def covers(self, key: bytes) -> bool:
        return key.startswith(self.key) if self.is_prefix else key == self.key


class WatchTable:
    """All watches of one store, and the recent changes of the watched keys."""

    def __init__(self, limits: KeyspaceLimits, usage: Usage, work: Work) -> None:
        """Begin without watches.

        `usage` accounts for the watched keys, and `work` takes the notifications.
        """
        self._limit = limits.watches
        self._limit_each = limits.watches_each
        self._usage = usage
        self._work = work
        self._history_limit = limits.history
        self._size_limit = limits.history_size
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
        self, watcher: Watcher, tag: Any, key: bytes, is_prefix: bool, last_revision: int
    ) -> WatchSnapshot:
        """Begin a watch, or continue one after `last_revision` if that is not negative.

        It replaces a watch of the client with the same tag.

        Returns:
            The snapshot, whose `pairs` the caller must fill in if it `is_whole`; after
            any other the caller must send the changes `since`.

        Raises:
            OperationRefused: there are too many watches.
        """
        self.cancel(watcher, tag)
        if self._count >= self._limit:
            raise OperationRefused("there are too many watches")
        if len(watcher.watches) >= self._limit_each:
            limit = self._limit_each
            raise OperationRefused(f"too many watches of one client: the limit is {limit}")
        target = self.targets.get((key, is_prefix)) or self._add(key, is_prefix)
        target.watchers[watcher, tag] = self._revision
        watcher.watches[tag] = target
        self._count += 1
        if not max(target.since, self._dropped_revision) <= last_revision <= self._revision:
            return WatchSnapshot(True, self._revision, ())
        return WatchSnapshot(False, last_revision, ())

    def since(self, watcher: Watcher, tag: Any, last_revision: int) -> list[RawChange]:
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

    def catch_up(self, watcher: Watcher, tag: Any) -> None:
        """Notify a watcher now of all changes that it has not received, others perhaps again."""
        for change in watcher.watches[tag].pending:
            watcher.on_change(tag, change)

    def cancel(self, watcher: Watcher, tag: Any) -> bool:
        """End the watch `tag`; return whether there was one."""
        target = watcher.watches.pop(tag, None)
        if target is None:
            return False
        self._remove(target, watcher, tag)
        if not target.watchers and target not in self._kept_until:
            self._drop(target)
        return True

    def forget(self, watcher: Watcher, now: float) -> None:
        """End the watches of a broken connection; record their changes `LINGER` seconds more."""
        for tag, target in watcher.watches.items():
            self._remove(target, watcher, tag)
            self._kept_until.pop(target, None)
            self._kept_until[target] = now + LINGER
        watcher.watches.clear()

    def record(self, kind: int, key: bytes, value: bytes) -> None:
        """Record a change and notify the watchers, if `key` is watched.

        Each watch receives its changes in order; if there are many watches, later.
        """
        self._work.spend(self.units(len(key)))
        targets = list(self._covering(key))
        if not targets:
            return
        self._revision += 1
        change = RawChange(kind, self._revision, key, value)
        self._history.append(change)
        self._size += len(key) + len(value)
        while len(self._history) > self._history_limit or self._size > self._size_limit:
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
        while len(self.targets) >= self._limit:
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

    def _remove(self, target: _Target, watcher: Watcher, tag: Any) -> None:
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
