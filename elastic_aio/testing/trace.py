"""The trace of a simulation: what has happened, and the error that ends it."""

from __future__ import annotations

from elastic_aio.testing.virtual_time import VirtualTime


class InvariantViolated(AssertionError):
    """An invariant of the job does not hold; the message ends with the trace."""

    recipe: object = None
    """What repeats the scenario, in a search."""


class Trace:
    """Records what happens, one line each.

    Attributes:
        lines: what has happened.
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
