"""Virtual time: scheduled calls, and hosts whose clocks differ."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any, Final

RATE_MIN: Final = 0.99
"""Speed of the slowest clock of a random scenario; the fastest is as much too fast."""


class VirtualTime:
    """One schedule for all hosts; executing a call takes no time."""

    def __init__(self) -> None:
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
    """A host: its address and its clocks, and whether it runs, is suspended, or is down.

    `rate` is the speed of its clocks (1.0 is exact), and `offset` the error of its wall
    clock in seconds, which may change.  `boot_time` is what its monotonic clock shows at
    the beginning: two hosts have different ones, so that a comparison of them fails.
    """

    def __init__(self, time: VirtualTime, name: str, address: str, boot_time: float) -> None:
        self.name = name
        self.address = address
        self.rate = 1.0
        self.offset = 0.0
        self.delay = 0.0
        """Seconds that it adds to each of its messages: that of a slow host."""
        self.disturbed_at = -math.inf
        """When it was last resumed, its delay changed, or a connection was reset."""
        self.is_up = True
        self.is_suspended = False
        self._time = time
        self._boot_time = boot_time

    def __repr__(self) -> str:
        state = "suspended" if self.is_suspended else "up" if self.is_up else "down"
        return f"<SimHost {self.name}: {state}>"

    @property
    def monotonic(self) -> float:
        """Seconds by its monotonic clock."""
        return self._boot_time + self._time.now * self.rate

    @property
    def wall_clock(self) -> float:
        """Unix seconds by its own clock."""
        return 1.8e9 + self.offset + self._time.now * self.rate

    def virtual_time(self, monotonic: float) -> float:
        """Return the virtual time at which its monotonic clock shows so many seconds."""
        return (monotonic - self._boot_time) / self.rate
