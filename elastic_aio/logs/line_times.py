"""LineTimes: when the bytes of a log file were first seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

_KEPT_MAX = 1000


class LineTimes:
    """Times by position, a bounded number; the bytes between two positions have the later one.

    Pure: the caller has the clock.
    """

    def __init__(self) -> None:
        """Begin without times."""
        self._ends: list[int] = []
        self._times: list[float] = []

    def __repr__(self) -> str:
        return f"<LineTimes: {len(self._ends)} up to byte {self.end}>"

    @property
    def end(self) -> int:
        """The position up to which times are known."""
        return self._ends[-1] if self._ends else 0

    def note(self, end: int, time: float) -> None:
        """Note that the file has been seen up to `end` at a time; a smaller `end` starts anew."""
        if end < self.end:
            self._ends, self._times = [], []
        if end > self.end:
            self._ends.append(end)
            self._times.append(time)
        if len(self._ends) > _KEPT_MAX:
            # Every second one, but not the last.
            del self._ends[:-1:2], self._times[:-1:2]

    def spans(self, start: int, end: int, default: float) -> Iterator[tuple[int, float]]:
        """Yield the parts of a range, by their ends, and the time of each.

        `default` is the time of what was not seen.
        """
        index = bisect_right(self._ends, start)
        while start < end:
            if index == len(self._ends):
                yield end, default
                return
            start = min(self._ends[index], end)
            yield start, self._times[index]
            index += 1
