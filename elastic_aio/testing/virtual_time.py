"""Virtual time: what is to happen when, and machines whose clocks differ."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Machine", "Timeline"]

_MESSAGE = 0
_TIMER = 1


class Timeline:
    """What is going to happen, in order; nothing here takes any time."""

    def __init__(self) -> None:
        """Begin at 0 seconds with nothing."""
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Let something happen at `when`; what is set for the same time keeps its order."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, args))

    def step(self, until: float) -> bool:
        """Let the next thing happen, if it is due by `until`; else pass the time."""
        if not self._heap or self._heap[0][0] > until:
            self.now = max(until, self.now)
            return False
        when, _, call, args = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        call(*args)
        return True


class Machine:
    """A computer: it may run, stand still for a while, or be dead.

    `rate` is how fast its clock goes (1.0 is right), `offset` by how many seconds its
    calendar is wrong.
    """

    def __init__(self, timeline: Timeline, name: str, rate: float, offset: float) -> None:
        """Begin to run."""
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self._timeline = timeline
        self._rate = rate
        self._offset = offset
        self._life = 0
        self._backlog: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def now(self) -> float:
        """Seconds by its steady clock."""
        return self._timeline.now * self._rate

    @property
    def calendar(self) -> float:
        """Unix seconds, as this machine has them."""
        return 1.8e9 + self._offset + self.now

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Call after so many seconds of its own clock, unless it dies before."""
        when = self._timeline.now + seconds / self._rate
        self._timeline.at(when, self._run, self._life, _TIMER, call, args)

    def receive(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at `when`, since a message arrives then."""
        self._timeline.at(when, self._run, self._life, _MESSAGE, call, args)

    def die(self) -> None:
        """Stop for good; nothing that was planned happens."""
        self.is_alive = self.is_paused = False
        self._life += 1
        self._backlog.clear()

    def revive(self) -> None:
        """Run again, with nothing planned."""
        self.is_alive = True

    def stand_still(self) -> None:
        """Stop for a while."""
        self.is_paused = self.is_alive

    def go_on(self) -> None:
        """Do what has come due meanwhile: first what others sent, as event loops do."""
        self.is_paused = False
        backlog, self._backlog = self._backlog, []
        for kind, call, args in sorted(backlog, key=lambda one: one[0]):
            self._timeline.at(self._timeline.now, self._run, self._life, kind, call, args)

    def _run(self, life: int, kind: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life != self._life or not self.is_alive:
            return
        if self.is_paused:
            self._backlog.append((kind, call, args))
        else:
            call(*args)
