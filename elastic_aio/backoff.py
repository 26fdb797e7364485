"""How long to wait before a restart, and when to stop restarting: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Backoff", "RestartWindow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential delays between restarts, in seconds.

    The n-th consecutive restart (from 0) waits `min(cap, initial * factor**n)`;
    with `jitter`, a uniformly random part of that ("full jitter"), so that many
    jobs that failed together do not come back together.
    """

    initial: float = 1.0
    factor: float = 2.0
    cap: float = 60.0
    jitter: bool = True

    def ceiling(self, consecutive: int) -> float:
        """Return the longest delay of the n-th consecutive restart, from 0."""
        if not self.initial:
            return 0.0
        try:
            return min(self.cap, self.initial * self.factor**consecutive)
        except OverflowError:
            return self.cap

    def delay(self, consecutive: int, random: Callable[[], float]) -> float:
        """Return a delay; `random` gives a number from 0 to 1."""
        ceiling = self.ceiling(consecutive)
        return ceiling * random() if self.jitter else ceiling

    def expected_total(self, restarts: int) -> float:
        """Return the expected sum of the first `restarts` delays."""
        share = 0.5 if self.jitter else 1.0
        total = 0.0
        for count in range(restarts):
            ceiling = self.ceiling(count)
            if ceiling in (self.cap, self.ceiling(count + 1)):
                return share * (total + ceiling * (restarts - count))
            total += ceiling
        return share * total


@dataclass(frozen=True, slots=True)
class RestartWindow:
    """At most `count` restarts within any `seconds`; one more ends the job."""

    count: int
    seconds: float

    def is_exhausted(self, restarts_at: Sequence[float], now: float) -> bool:
        """Tell whether a restart at `now` would be one too many.

        `restarts_at` holds the monotonic times of the restarts so far.
        """
        return sum(1 for when in restarts_at if now - when < self.seconds) >= self.count
