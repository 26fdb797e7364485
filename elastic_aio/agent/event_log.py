"""The event log of a run: events are stamped, kept for readers, and passed to listeners."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from elastic_aio.aio import EventHistory, EventReader
from elastic_aio.events import Event, EventsMissed
from elastic_aio.status import StatusTracker

EventListener = Callable[[Event], None]
"""A function that is called with each event on the event loop, and must not block."""

_logger = logging.getLogger("elastic_aio")


class EventWriter(Protocol):
    """What a driver needs of an event log, its own or that of a child in a tree."""

    @property
    def tracker(self) -> StatusTracker:
        """The status of the driver's job or child."""

    def append(self, event: Event) -> None:
        """Append an event."""

    def append_later(self, make: Callable[[], Event]) -> None:
        """Append an event of the present time, which `make` returns a little later."""

    def close(self) -> None:
        """Note that no event follows."""


class EventLog:
    """An append-only log of the events of one run on this host; `tracker` has taken in all."""

    def __init__(
        self, run_id: str, node: str, *, keep: int, listeners: Sequence[EventListener] = ()
    ) -> None:
        """Begin an empty log of which late readers can still see the last `keep` events.

        `listeners` are called with every event at once; they must not block.  Their exceptions go
        to the loop's exception handler.
        """
        self.tracker: StatusTracker = StatusTracker()
        self._run_id = run_id
        self._node = node
        self._listeners = [*listeners]
        self._history: EventHistory[Event] = EventHistory(keep, self._missed)
        self._later: deque[tuple[float, Callable[[], Event], EventWriter]] = deque()
        self._time: float | None = None  # of the event that is being made

    def __repr__(self) -> str:
        return f"<EventLog of run {self._run_id}: {self._history!r}>"

    @property
    def count(self) -> int:
        """How many events there were, which is the `seq` of the next event."""
        return self._history.count

    def listen(self, listener: EventListener) -> None:
        """Call a listener with every further event."""
        self._listeners.append(listener)

    def append(self, event: Event, child: str = "") -> None:
        """Stamp an event with number, time, run, child and node, and pass it to all readers."""
        self.make_all()
        stamped = msgspec.structs.replace(
            event,
            seq=self._history.count,
            time=self._time or time.time(),
            run_id=self._run_id,
            child=child,
            node=self._node,
        )
        self.tracker(stamped)
        self._history.append(stamped)
        for listener in self._listeners:
            try:
                listener(stamped)
            except Exception as error:  # noqa: BLE001  # the caller's code; the job must go on
                context = {"message": f"a listener failed at {stamped!r}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def append_later(self, make: Callable[[], Event]) -> None:
        """Append an event of the present time, which `make` returns a little later.

        `make` is called before the next event is appended, or in the next iteration of the loop.
        An event that `make` itself appends comes first.
        """
        self.append_later_to(self, make)

    def append_later_to(self, log: EventWriter, make: Callable[[], Event]) -> None:
        """Append to `log`, whose events come here too, as `append_later` does."""
        if not self._later:
            asyncio.get_running_loop().call_soon(self.make_all)
        self._later.append((time.time(), make, log))

    def make_all(self) -> None:
        """Append the events that were to be made a little later."""
        while self._later and self._time is None:
            self._time, make, log = self._later.popleft()
            try:
                log.append(make())
            finally:
                self._time = None

    def offer_agent(self, source: Callable[[], object]) -> None:
        """Call `use_agent` of listeners that have it: they show more than events say."""
        # `source` returns the agent, or None when it is gone.
        for listener in self._listeners:
            if (use_agent := getattr(listener, "use_agent", None)) is not None:
                use_agent(source)

    def read(self, after: int) -> EventReader[Event]:
        """Return a reader that begins after the event of this number."""
        return self._history.read(after + 1)

    def close(self) -> None:
        """End the log: readers stop after the last event."""
        self.make_all()
        self._history.close()

    def _missed(self, count: int, following: int) -> Event:
        return EventsMissed(
            seq=following - 1, time=time.time(), run_id=self._run_id, node=self._node, count=count
        )


def log_event(event: Event) -> None:
    """Write an event to the logger `elastic_aio`, if the program has a handler for it."""
    # Without one, `logging` would write warnings to standard error.
    if _logger.isEnabledFor(event.level) and _logger.hasHandlers():
        # The sentence of a program with several jobs does not say which.
        names = {"run_id": event.run_id, "node": event.node}
        _logger.log(event.level, "%s", event.sentence, extra=names)
