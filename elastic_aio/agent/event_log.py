"""The story of a run: events are stamped, kept for readers, and told to listeners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from elastic_aio.channel import History, Reader
from elastic_aio.events import Event, EventsMissed

__all__ = ["Chronicle", "Listener"]

Listener = Callable[[Event], None]


class Chronicle:
    """Everything that is reported about one run goes through here."""

    def __init__(
        self, run_id: str, node: str, *, keep: int, listeners: Sequence[Listener] = ()
    ) -> None:
        """Begin an empty story.

        Args:
            run_id: name of the run.
            node: name of this host.
            keep: how many events late readers can still see.
            listeners: called with every event at once; they must not block, and
                what they raise goes to the loop's exception handler.
        """
        self._run_id = run_id
        self._node = node
        self._listeners = listeners
        self._history: History[Event] = History(keep, self._missed)

    def __repr__(self) -> str:
        return f"<Chronicle of run {self._run_id}: {self._history!r}>"

    def tell(self, event: Event) -> None:
        """Give an event its number, time and place, and hand it on."""
        stamped = msgspec.structs.replace(
            event,
            seq=self._history.count,
            time=time.time(),
            run_id=self._run_id,
            node=self._node,
        )
        self._history.append(stamped)
        for listener in self._listeners:
            try:
                listener(stamped)
            except Exception as error:  # noqa: BLE001  # theirs; the job must go on
                told = {"message": f"a listener failed at {stamped!r}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)

    def read(self, after: int) -> Reader[Event]:
        """Return a reader that begins after the event of this number."""
        return self._history.read(after + 1)

    def close(self) -> None:
        """End the story: readers stop after the last event."""
        self._history.close()

    def _missed(self, count: int, following: int) -> Event:
        return EventsMissed(
            seq=following - 1,
            time=time.time(),
            run_id=self._run_id,
            node=self._node,
            count=count,
        )
