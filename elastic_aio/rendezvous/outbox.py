"""The orders of a coordinator: numbered, resent until they are obeyed, limited in time.

Pure.  Orders are level-triggered: each one states everything the member must do.  Only
the latest order for a member is sent, and an unchanged one is not sent again, unless the
member neither obeys nor acknowledges it in time.

* A member acknowledges by its next status (`acked`), which it writes at once after every
  order but `WaitForNodes`.  Most orders change the status, so their acknowledgement costs
  no message of its own.
* Each order is checked at intervals, and resent after longer and longer times if it is not
  acknowledged.  At the last check the member counts as lost.
* A member that has acknowledged a stop has the time of its own stop plan and `MARGIN_S`.
  Then it counts as lost too.  A lost member that reports something later is a newcomer.
* Checks are counted, and not the time: after a suspension of the coordinator or of the
  store there is one check, and the replies arrive before the next.
"""

from __future__ import annotations

import math

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import Failure
from elastic_aio.rendezvous.base import StartRound, StopRound
from elastic_aio.rendezvous.members import NAMES_MAX, MemberRecord
from elastic_aio.rendezvous.messages import (
    PROBE_TIMEOUT,
    Order,
    OrderBody,
    ProbePeers,
    RoundRecord,
)
from elastic_aio.spec.restart import RestartHistory

_RESENT_AT = (1, 3)
"""Checks at which an order without an acknowledgement is sent again."""
_LOST_AT = 7
"""The check at which its member counts as lost."""

MARGIN_S = 30.0
"""Seconds that a member may need beyond its stop plan."""


class SendOrder(Struct, frozen=True):
    """Write an order for a member."""

    member: str
    order: Order


class RequestDecision(Struct, frozen=True):
    """Call the user's callback with the root cause; reply with `on_decision`."""

    failure: Failure


CoordinatorEffect = SendOrder | RequestDecision | RoundRecord | Event
"""A record is written into the store, and an event appended to the job's event stream."""


class Outbox:
    """Numbers a coordinator's orders, watches them, and collects effects until drained."""

    def __init__(self, term: int, timeout: float) -> None:
        """Begin empty, in `term`; `timeout` is how many seconds all checks take."""
        self.term = term
        self.now = 0.0
        """Monotonic seconds of the last `check`."""
        self.interval = timeout / _LOST_AT
        """Seconds between two checks, and until an order is sent again for the first time."""
        self._serial = 0
        self._sends: dict[str, tuple[tuple[int, int], OrderBody]] = {}
        self._others: list[CoordinatorEffect] = []
        self._open: dict[str, MemberRecord] = {}
        """Members that have not obeyed their last order, as far as is known."""

    # ------------------------------------------------------------------- orders

    def send(self, record: MemberRecord, body: OrderBody, *, again: bool = False) -> None:
        """Send an order unless it equals the member's last one, or even then."""
        if record.sent == body and not again:
            return
        is_stopping = isinstance(body, StopRound) and isinstance(record.sent, StopRound)
        if not (is_stopping and record.member in self._open):
            # Another reason would give no more time to stop.
            record.sent_at, record.checks = self.now, 0
            record.check_at = self.now + self.interval
        record.sent = body
        self._number(record, body)
        self.observe(record)

    def observe(self, record: MemberRecord) -> None:
        """Take a new order or status of a member: whether it has done what is wanted of it."""
        if record.has_obeyed:
            self._open.pop(record.member, None)
        else:
            self._open[record.member] = record

    def dismiss(self, record: MemberRecord, why: str) -> None:
        """Revoke the order of a member that counts as lost to start a round."""
        if isinstance(record.sent, StartRound):
            self._number(record, StopRound(record.sent.placement.round, why))

    def discard(self, member: str) -> None:
        """Watch the order of a member no more that has gone."""
        self._open.pop(member, None)

    def _number(self, record: MemberRecord, body: OrderBody) -> None:
        self._serial += 1
        record.sent_as = (self.term, self._serial)
        record.first_sent = record.first_sent or record.sent_as
        if isinstance(body, StartRound):
            record.begun = record.sent_as
        self._sends[record.member] = record.sent_as, body

    # ---------------------------------------------------------------- deadlines

    @property
    def next_check(self) -> float | None:
        """When `check` must be called at the latest."""
        return min((record.check_at for record in self._open.values()), default=None)

    def check(self, now: float) -> list[tuple[MemberRecord, str]]:
        """Resend orders that are due; return members that count as lost, with the reason."""
        self.now = now
        lost = []
        for record in self._open.values():
            if now < record.check_at:
                continue
            record.checks += 1
            record.check_at = now + self.interval
            if record.checks >= self._checks_allowed(record):
                waited = now - record.sent_at
                lost.append((record, f"it has not {_wanted(record)} within {waited:.0f} s"))
            elif record.checks in _RESENT_AT and not record.has_acked and record.sent is not None:
                self._number(record, record.sent)
        return lost

    def longest_wait(self) -> tuple[str, float, float] | None:
        """Return what is waited for longest, since when, and until when; None if not long."""
        late = [one for one in self._open.values() if one.checks]
        if not late:
            return None
        first = min(late, key=lambda one: one.sent_at)
        names = ", ".join([one.name for one in late if one.sent == first.sent][:NAMES_MAX])
        left = self._checks_allowed(first) - first.checks - 1
        until = first.check_at + left * self.interval
        return f"{names}: not {_wanted(first)}", first.sent_at, until

    def _checks_allowed(self, record: MemberRecord) -> int:
        """Return the number of the check at which a member counts as lost."""
        if not record.has_acked:
            return _LOST_AT
        is_probe = isinstance(record.sent, ProbePeers)
        allowed = PROBE_TIMEOUT if is_probe else record.status.stop_time
        return math.ceil((allowed + MARGIN_S) / self.interval) + 1

    # ------------------------------------------------------------------ effects

    def publish(self, effect: Event | RoundRecord | RequestDecision) -> None:
        """Publish an event of the job, record its round, or request a decision."""
        self._others.append(effect)

    def drain(self, history: RestartHistory | None) -> list[CoordinatorEffect]:
        """Return all effects and remove them; each order gets `history`."""
        sends = [
            SendOrder(member, Order(*sent_as, body, history))
            for member, (sent_as, body) in self._sends.items()
        ]
        effects = [*self._others, *sends]
        self._others, self._sends = [], {}
        return effects


def _wanted(record: MemberRecord) -> str:
    if isinstance(record.sent, ProbePeers):
        return "probed the other nodes"
    if isinstance(record.sent, StopRound) and record.has_acked:
        return "stopped its workers"
    return f"acknowledged {type(record.sent).__name__}"
