"""Virtual time: scheduled calls, hosts whose clocks differ, and the trace of what happens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any


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

    `rate` is the speed of its clocks (1.0 is exact), and `offset` the error of its wall clock in
    seconds, which may change.  `boot_time` is its monotonic clock at the beginning: two hosts have
    different values, so that a comparison of them fails.
    """

    def __init__(self, time: VirtualTime, name: str, address: str, boot_time: float) -> None:
        self.name = name
        self.address = address
        self.rate = 1.0
        self.offset = 0.0
        self.delay = 0.0
        """Seconds that a slow host adds to each of its messages."""
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


# ------------------------------------------------------------------- the trace


class InvariantViolated(AssertionError):
    """A condition of a simulation does not hold; the message ends with the trace."""


class Trace:
    """Records what happens, one line each.

    Attributes:
        lines: the record.
        faults: how many faults there were; new nodes and failing workers count.
        fault_at: when the last one began or ended, in virtual time.
        error: the first violation, or the first error of the caller's `behavior`; the simulation
            raises it after the present step.
    """

    def __init__(self, time: VirtualTime, seed: int) -> None:
        self.lines: list[str] = []
        self.faults = 0
        self.fault_at = 0.0
        self.error: BaseException | None = None
        self._time = time
        self._seed = seed

    def note(self, name: str, text: str) -> None:
        """Add a line about a host or a process."""
        self.lines.append(f"{self._time.now:9.3f} {name}: {text}")

    def add_fault(self, name: str, text: str) -> None:
        """Add a line about a fault, or its end."""
        self.note(name, text)
        self.faults += 1
        self.fault_at = self._time.now

    def fail(self, text: str) -> None:
        """Report a violation; the first error counts."""
        if self.error is None:
            lines = "\n".join([f"seed {self._seed}: {text}", *self.lines])
            self.error = InvariantViolated(lines)
