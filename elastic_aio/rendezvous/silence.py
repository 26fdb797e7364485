"""When a node that hears nothing from the store stops its workers, and when it kills them.

The reasons for the times are in `elastic_aio.rendezvous.formation`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from elastic_aio.discovery.choice import FENCE
from elastic_aio.rendezvous.member import Member, MemberEffect
from elastic_aio.rendezvous.session import StoreSession
from elastic_aio.spec.job import LaunchSpec

SILENT = "the store has been silent"
"""How the reason begins for which a node stops its workers that has lost no connection."""

_LATE_S = 0.1
"""A timer this late, in seconds, shows that this process was suspended."""
_ANSWER_S = 0.25
"""Seconds that the store then has for its answer to the next ping."""


def silence_limits(spec: LaunchSpec) -> tuple[float, float] | None:
    """Return after how many seconds without a reply of the store this node stops its workers.

    And after how many it kills them: then its lease is about to end.  The stop plan has the time
    between, if half of the time of the lease remains for the store to come back.  None: the
    workers run on.
    """
    settings = spec.rendezvous
    limit, grace = settings.heartbeat_timeout - FENCE, settings.store_grace
    if grace is None:
        if settings.is_on_engine:
            return None
        grace = max(settings.heartbeat_timeout / 2, limit - spec.stop.grace)
    return grace, max(grace, limit)


class SilenceWatch:
    """Isolates a member whose workers run, before the other nodes replace it."""

    def __init__(
        self,
        spec: LaunchSpec,
        member: Member,
        session: Callable[[], StoreSession | None],
        perform: Callable[[Iterable[MemberEffect]], None],
    ) -> None:
        """Prepare; `session` returns the present one."""
        self._limits = silence_limits(spec)
        self._connected_min = spec.rendezvous.heartbeat_timeout / 2  # above the ping interval
        self._member, self._session, self._perform = member, session, perform
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = 0.0
        """When the last store that was joined has sent its last reply, in loop seconds."""
        self._lost_because = ""
        self._cut_off_round = -1
        """The last round whose workers were killed."""

    def on_lost(self, heard_at: float, why: str) -> None:
        """Take the loss of a store that was joined, whose last reply came at `heard_at`."""
        self._heard_at, self._lost_because = heard_at, why
        self.check()

    def check(self, due: float = math.inf) -> None:
        """Isolate the member if it is time, and check again later, as long as its workers run.

        `due` is when this was to be called, in loop seconds.
        """
        self.cancel()
        status = self._member.status
        if self._limits is None or not status.is_busy or status.round == self._cut_off_round:
            return
        loop, session = asyncio.get_running_loop(), self._session()
        stop_after, kill_after = self._limits
        now, why = loop.time(), f"no store could be found for {{:g}} s ({self._lost_because})"
        if session is not None and session.has_joined:
            self._heard_at, why = session.last_received_at, f"{SILENT} for {{:g}} s"
            stop_after = max(stop_after, self._connected_min)
        silent = now - self._heard_at
        if now - due > _LATE_S and silent < kill_after:
            # This process was suspended: the store is asked again before it counts as silent.
            when = now + _ANSWER_S
        elif silent < stop_after:
            when = self._heard_at + stop_after
        else:
            is_over = silent >= kill_after
            if is_over:
                self._cut_off_round = status.round
            self._perform(self._member.isolate(why.format(round(silent, 1)), is_cut_off=is_over))
            if is_over:
                return
            when = self._heard_at + kill_after
        self._timer = loop.call_at(when, self.check, when)

    def cancel(self) -> None:
        """Check no more.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
