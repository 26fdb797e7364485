"""The timers that workers have acquired, read from the bytes of their pipe; pure.

Any process of the user may write into the pipe.  What is no request is left out, and so is
what exceeds the limits; `rejected` says why, for one report.
"""

from __future__ import annotations

import heapq
import json
import math

from msgspec import Struct

from elastic_aio.text import format_value, one_line

_LINE_MAX = 4096
"""PIPE_BUF: longer lines are not written whole."""
_LINE_MIN = 50
"""The four keys of a request with their punctuation; shorter lines are not decoded."""
_TIMERS_MAX = 16_384
_SCOPE_MAX = 1000
_HIGHEST_PID = 1 << 22
_HIGHEST_SIGNAL = 64
_LAG_MAX_S = 60.0


class ExpiredTimer(Struct, frozen=True):
    """A timer that was not released in time.

    Attributes:
        pid: the process that acquired it.
        scope: its name.
        age: seconds since it was acquired.
        limit: seconds for which it was acquired.
        signal: what ends the process; 0 or less leaves it alone.
    """

    pid: int
    scope: str
    age: float
    limit: float
    signal: int


class _Entry(Struct):
    serial: int
    acquired: float
    deadline: float
    signal: int


class TimerTable:
    """The timers of the workers of one attempt; times are in seconds of one clock."""

    def __init__(self) -> None:
        """Begin without timers."""
        self.rejected = ""
        """Why something in the pipe was left out, the first time; empty if nothing was."""
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._scopes: dict[int, set[str]] = {}
        self._heap: list[tuple[float, int, tuple[int, str]]] = []
        self._serial = 0
        self._rest = b""
        self._is_skipping = False

    def __repr__(self) -> str:
        return f"<TimerTable with {len(self._entries)} timers>"

    def feed(self, data: bytes, now: float, wall: float) -> None:
        """Read bytes of the pipe.

        Args:
            data: any part of the stream.
            now: the present time of the clock.
            wall: the present Unix time, in which requests state theirs.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._is_skipping:
                self._read(line, now, wall)
            self._is_skipping = False
        self._rest = rest
        if len(rest) > _LINE_MAX:
            self._reject(f"a line of more than {_LINE_MAX} bytes")
            self._rest, self._is_skipping = b"", True

    def _reject(self, why: str, line: bytes | None = None) -> None:
        """Note why something was left out; a flood of lines costs one text."""
        if not self.rejected:
            self.rejected = why if line is None else f"{why}: {format_value(line)}"

    def _read(self, line: bytes, now: float, wall: float) -> None:
        if len(line) < _LINE_MIN:
            self._reject("no timer request", line)
            return
        try:
            request = json.loads(line)
            pid, scope = request["pid"], request["scope_id"]
            expiration, number = request["expiration_time"], request["signal"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self._reject("no timer request", line)
            return
        is_valid = (
            type(pid) is int
            and 0 < pid <= _HIGHEST_PID
            and isinstance(scope, str)
            and type(expiration) in (int, float)
            and abs(expiration) < 1e12
            and not math.isnan(expiration)
            and type(number) is int
            and number <= _HIGHEST_SIGNAL
        )
        if not is_valid:
            self._reject("no timer request", line)
            return
        key = pid, scope[:_SCOPE_MAX]
        if expiration < 0:
            self._remove(key)
        elif len(self._entries) >= _TIMERS_MAX and key not in self._entries:
            self._reject(f"more than {_TIMERS_MAX} timers")
        else:
            acquired = now - _lag(request.get("acquired"), wall)
            self._acquire(key, acquired, now + expiration - wall, number)

    def _acquire(self, key: tuple[int, str], acquired: float, deadline: float, number: int) -> None:
        self._serial += 1
        self._entries[key] = _Entry(self._serial, acquired, deadline, number)
        self._scopes.setdefault(key[0], set()).add(key[1])
        heapq.heappush(self._heap, (deadline, self._serial, key))
        if len(self._heap) > 2 * len(self._entries) + 64:  # mostly released timers
            self._heap = [
                (entry.deadline, entry.serial, key) for key, entry in self._entries.items()
            ]
            heapq.heapify(self._heap)

    def _remove(self, key: tuple[int, str]) -> _Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            scopes = self._scopes[key[0]]
            scopes.remove(key[1])
            if not scopes:
                del self._scopes[key[0]]
        return entry

    @property
    def next_deadline(self) -> float | None:
        """When the next timer expires; None without timers."""
        while self._heap:
            deadline, serial, key = self._heap[0]
            if (entry := self._entries.get(key)) is not None and entry.serial == serial:
                return deadline
            heapq.heappop(self._heap)
        return None

    def expire(self, now: float, limit: int = _TIMERS_MAX) -> list[ExpiredTimer]:
        """Remove and return the timers that have expired by `now`, `limit` at most.

        Of each process it is one, the earliest that has a signal; its other timers are
        removed too.
        """
        due: dict[int, list[tuple[str, _Entry]]] = {}
        for _ in range(limit):
            if (deadline := self.next_deadline) is None or deadline > now:
                break
            _, _, key = heapq.heappop(self._heap)
            if (entry := self._remove(key)) is not None:
                due.setdefault(key[0], []).append((key[1], entry))
        expired = []
        for pid, timers in due.items():
            scope, entry = next((timer for timer in timers if timer[1].signal > 0), timers[0])
            age, allowed = now - entry.acquired, entry.deadline - entry.acquired
            expired.append(ExpiredTimer(pid, one_line(scope), age, allowed, max(entry.signal, 0)))
            if entry.signal > 0:
                self.forget(pid)
        return expired

    def forget(self, pid: int) -> None:
        """Remove the timers of a process."""
        for scope in self._scopes.pop(pid, ()):
            del self._entries[pid, scope]

    def clear(self) -> None:
        """Remove all timers, and the begin of a line: another attempt begins."""
        self._entries.clear()
        self._scopes.clear()
        self._heap.clear()
        self._rest, self._is_skipping = b"", False


def _lag(acquired: object, wall: float) -> float:
    """Return how many seconds ago a request was written; 0 if that is not known."""
    if type(acquired) is float and wall - _LAG_MAX_S < acquired < wall:
        return wall - acquired
    return 0.0
