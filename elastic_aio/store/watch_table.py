"""Watches: changes of a key, or of all keys with a prefix, in order and without a gap.

Every change of a watched key gets the next revision and is kept for a while.  When
a connection breaks, what it watched is recorded for `LINGER` seconds more, so that
the watch can go on after the last revision its holder has seen.  If too much has
happened by then, it begins anew with all present keys, and the holder is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from elastic_aio.store.replies import RawChange, RawView

__all__ = ["LINGER", "WatchTable", "Watcher"]

LINGER: Final = 60.0
"""Seconds for which changes are kept for a watch whose connection has ended."""


class Watcher:
    """A client as watches see it."""

    def __init__(self) -> None:
        """Begin without watches."""
        super().__init__()
        self.watches: dict[Any, _Target] = {}

    def on_change(self, tag: Any, change: RawChange) -> None:
        """A key of the watch `tag` has changed."""
        raise NotImplementedError


class _Target:
    """A key or prefix that is watched, or was until a moment ago."""

    __slots__ = ("is_prefix", "key", "since", "watchers")

    def __init__(self, key: bytes, is_prefix: bool, since: int) -> None:
        self.key = key
        self.is_prefix = is_prefix
        self.since = since
        self.watchers: dict[tuple[Watcher, Any], None] = {}

    def covers(self, key: bytes) -> bool:
        return key.startswith(self.key) if self.is_prefix else key == self.key


class WatchTable:
    """All watches of one store, and the recent changes of what they watch."""

    def __init__(self, limit: int, history: int, history_size: int) -> None:
        """Allow `limit` watches; keep `history` changes, `history_size` bytes of them."""
        self._limit = limit
        self._history_limit = history
        self._size_limit = history_size
        self.targets: dict[tuple[bytes, bool], _Target] = {}
        """What is watched; while it is empty, no change need be noted."""
        # How many watched prefixes there are of each length: a change is looked up
        # once per length instead of being compared with every prefix.
        self._lengths: dict[int, int] = {}
        # Until when targets are kept for watches that may come back; the earliest
        # first, since each is entered `LINGER` after its time.
        self._kept_until: dict[_Target, float] = {}
        self._history: deque[RawChange] = deque()
        self._size = 0
        self._forgotten = 0
        self._revision = 0
        self._count = 0

    def begin(
        self, watcher: Watcher, tag: Any, key: bytes, is_prefix: bool, seen: int
    ) -> RawView | None:
        """Begin a watch, or go on after revision `seen` if that is not negative.

        Returns:
            None when there are too many; else the view, whose `pairs` the caller
            fills in if it `is_whole`.  Changes from before it are passed on after it.
        """
        if self._count >= self._limit:
            return None
        target = self.targets.get((key, is_prefix))
        if target is None:
            target = self.targets[key, is_prefix] = _Target(key, is_prefix, self._revision)
            if is_prefix:
                self._lengths[len(key)] = self._lengths.get(len(key), 0) + 1
        target.watchers[watcher, tag] = None
        watcher.watches[tag] = target
        self._count += 1
        if not max(target.since, self._forgotten) <= seen <= self._revision:
            return RawView(True, self._revision, ())
        return RawView(False, seen, ())

    def since(self, watcher: Watcher, tag: Any, seen: int) -> list[RawChange]:
        """Return the kept changes after revision `seen` of a watch that goes on."""
        target = watcher.watches[tag]
        found = []
        for change in reversed(self._history):
            if change.revision <= seen:
                break
            if target.covers(change.key):
                found.append(change)
        return found[::-1]

    def cancel(self, watcher: Watcher, tag: Any) -> bool:
        """End a watch at its holder's wish; tell whether there was one."""
        target = watcher.watches.pop(tag, None)
        if target is None:
            return False
        self._leave(target, watcher, tag)
        if not target.watchers and target not in self._kept_until:
            self._drop(target)
        return True

    def forget(self, watcher: Watcher, now: float) -> None:
        """The watcher's connection has ended: keep its changes for a while."""
        for tag, target in watcher.watches.items():
            self._leave(target, watcher, tag)
            self._kept_until.pop(target, None)
            self._kept_until[target] = now + LINGER
        watcher.watches.clear()

    def note(self, kind: int, key: bytes, value: bytes) -> None:
        """Record a change and tell the watchers, if there are any of that key."""
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
            self._forgotten = oldest.revision
        for target in targets:
            for watcher, tag in target.watchers:
                watcher.on_change(tag, change)

    def next_deadline(self) -> float | None:
        """When `expire` is to be called next."""
        return next(iter(self._kept_until.values()), None)

    def expire(self, now: float) -> None:
        """Forget what nobody has come back to."""
        while (due := self.next_deadline()) is not None and due <= now:
            target = next(iter(self._kept_until))
            del self._kept_until[target]
            if not target.watchers:
                self._drop(target)

    def _covering(self, key: bytes) -> Iterator[_Target]:
        if (target := self.targets.get((key, False))) is not None:
            yield target
        for length in self._lengths:
            target = self.targets.get((key[:length], True)) if length <= len(key) else None
            if target is not None:
                yield target

    def _leave(self, target: _Target, watcher: Watcher, tag: Any) -> None:
        target.watchers.pop((watcher, tag), None)
        self._count -= 1

    def _drop(self, target: _Target) -> None:
        del self.targets[target.key, target.is_prefix]
        if target.is_prefix:
            length = len(target.key)
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]
        if not self.targets:
            self._forgotten = self._revision
            self._history.clear()
            self._size = 0
