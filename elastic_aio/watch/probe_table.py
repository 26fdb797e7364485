"""When the probes of the workers of an attempt are due, and what their answers mean; pure.

A worker is asked whether it is ready until it is; then whether it is alive, until it ends.  Times
are in seconds of one clock.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from elastic_aio.spec.probe import PolledProbe, Probe

READY_SUCCESSES = 1
"""Successes in a row after which a worker is ready."""
ALIVE_FAILURES = 3
"""Failures in a row after which a worker is not alive."""


class Verdict(Enum):
    """What an answer changes."""

    NOTHING = 0
    READY = 1
    NOT_ALIVE = 2


class _Asked(Struct):
    """A worker that is asked `probe`; `due` is None while a question is on its way."""

    probe: PolledProbe | None
    due: float | None
    is_ready: bool
    since: float = 0.0  # the last success, or when the probe began
    count: int = 0  # answers in a row that count
    is_reported: bool = False  # as not alive, since its last success


class ProbeTable:
    """The probes of one attempt, by local rank."""

    def __init__(self, ready: Probe | None, alive: PolledProbe | None) -> None:
        """Begin without workers; None: they are ready at once, or are not asked further."""
        self._ready = ready
        self._alive = alive
        self._workers: dict[int, _Asked] = {}

    def __repr__(self) -> str:
        return f"<ProbeTable of {len(self._workers)} workers>"

    def add(self, local_rank: int, now: float) -> None:
        """Begin to ask a worker that has been started."""
        if self._ready is None:
            self._workers[local_rank] = self._alive_from(now)
        elif isinstance(self._ready, PolledProbe):
            due = now + self._ready.initial_delay
            self._workers[local_rank] = _Asked(self._ready, due, False, now)
        else:  # something else says when it is ready
            self._workers[local_rank] = _Asked(None, None, False)

    def remove(self, local_rank: int) -> None:
        """Ask a worker no more.  Idempotent."""
        self._workers.pop(local_rank, None)

    def set_ready(self, local_rank: int, now: float) -> None:
        """Note that a worker has become ready by other means.  Idempotent."""
        asked = self._workers.get(local_rank)
        if asked is not None and not asked.is_ready:
            self._workers[local_rank] = self._alive_from(now)

    def _alive_from(self, now: float) -> _Asked:
        due = None if self._alive is None else now + self._alive.initial_delay
        return _Asked(self._alive, due, True, now)

    @property
    def next_due(self) -> float | None:
        """When the next question is due; None for none."""
        times = (asked.due for asked in self._workers.values() if asked.due is not None)
        return min(times, default=None)

    def take_due(self, now: float) -> list[tuple[int, PolledProbe]]:
        """Return the workers that are to be asked now, each with its probe; answers follow."""
        found = []
        for local_rank, asked in self._workers.items():
            if asked.due is not None and asked.due <= now and asked.probe is not None:
                asked.due = None
                found.append((local_rank, asked.probe))
        return found

    def answer(
        self, local_rank: int, began: float, now: float, *, is_success: bool | None
    ) -> Verdict:
        """Take the answer to a question that `began` then; None: it could not be asked."""
        asked = self._workers.get(local_rank)
        if asked is None or asked.probe is None:
            return Verdict.NOTHING
        probe = asked.probe
        asked.due = max(began + probe.period, now)
        if is_success is None:
            return Verdict.NOTHING
        if is_success:
            asked.since = now
        asked.count = asked.count + 1 if is_success is not asked.is_ready else 0
        if asked.is_ready:
            asked.is_reported &= not is_success
            if asked.count < (probe.threshold or ALIVE_FAILURES) or asked.is_reported:
                return Verdict.NOTHING
            asked.is_reported = True
            return Verdict.NOT_ALIVE
        if asked.count < (probe.threshold or READY_SUCCESSES):
            return Verdict.NOTHING
        self.set_ready(local_rank, now)
        return Verdict.READY

    def since_success(self, local_rank: int, now: float) -> float:
        """Return how long ago the last success of a worker was, or the first question due."""
        asked = self._workers.get(local_rank)
        return 0.0 if asked is None else now - asked.since
