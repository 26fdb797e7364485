"""Virtual time: scheduled calls, and hosts whose clocks differ."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

_MESSAGE = 0
_TIMER = 1


class VirtualTime:
    """A schedule of calls; executing them takes no time."""

    def __init__(self) -> None:
        """Begin at 0 seconds, without calls."""
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call; calls of the same time keep their order."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, args))

    def step(self, until: float) -> bool:
        """Execute the next call due by `until`, or advance to `until` and return False."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(until, self.now)
            return False
        when, _, call, args = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        call(*args)
        return True


class SimHost:
    """A host: running, suspended, or down.

    `rate` is the speed of its clock (1.0 is exact), and `offset` the error of its wall
    clock in seconds.
    """

    def __init__(self, time: VirtualTime, name: str, rate: float, offset: float) -> None:
        """Begin running."""
        self.name = name
        self.is_alive = True
        self.is_suspended = False
        self._time = time
        self._rate = rate
        self._offset = offset
        self._boot = 0
        self._backlog: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def now(self) -> float:
        """Seconds by its monotonic clock."""
        return self._time.now * self._rate

    @property
    def wall_clock(self) -> float:
        """Unix seconds by its own clock."""
        return 1.8e9 + self._offset + self.now

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Call after so many seconds of its own clock, unless it is shut down before."""
        when = self._time.now + seconds / self._rate
        self._time.at(when, self._run, self._boot, _TIMER, call, args)

    def receive(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at `when`: a message arrives then."""
        self._time.at(when, self._run, self._boot, _MESSAGE, call, args)

    def shut_down(self) -> None:
        """Stop, and drop all scheduled calls."""
        self.is_alive = self.is_suspended = False
        self._boot += 1
        self._backlog.clear()

    def restart(self) -> None:
        """Run again, without scheduled calls."""
        self.is_alive = True

    def suspend(self) -> None:
        """Delay all calls until `resume`."""
        self.is_suspended = self.is_alive

    def resume(self) -> None:
        """Make the delayed calls: messages first, as event loops do."""
        self.is_suspended = False
        backlog, self._backlog = self._backlog, []
        for kind, call, args in sorted(backlog, key=lambda item: item[0]):
            self._time.at(self._time.now, self._run, self._boot, kind, call, args)

    def _run(self, boot: int, kind: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if boot != self._boot or not self.is_alive:
            return
        if self.is_suspended:
            self._backlog.append((kind, call, args))
        else:
            call(*args)
