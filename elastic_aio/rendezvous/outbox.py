"""The orders of a coordinator: numbered, resent until they are obeyed, limited in time.

Pure.  Orders are level-triggered: each one states everything the member must do.  Only
the latest order for a member is sent, and an unchanged one is not sent again, unless the
member neither obeys nor acknowledges it in time.

* A member acknowledges by its next status (`acked`), which it writes at once after every
  order but `WaitForNodes`.  Most orders change the status, so their acknowledgement costs
  no message of its own.
* Each order is checked at intervals, and resent if it is not acknowledged.  After
  `CHECKS` checks the member counts as lost.
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
from elastic_aio.rendezvous.base import EndJob, RestartPending, StartRound, StopRound
from elastic_aio.rendezvous.members import (
    NAMES_MAX,
    CoordinatorEffect,
    MemberRecord,
    PublishEvent,
    RequestDecision,
    SendOrder,
)
from elastic_aio.rendezvous.messages import (
    PROBE_TIMEOUT,
    MembersDone,
    MemberStatus,
    Order,
    OrderBody,
    ProbePeers,
)
from elastic_aio.spec.restart import RestartHistory

CHECKS = 2
"""How often an order is resent without an acknowledgement, after longer and longer times."""

MARGIN_S = 30.0
"""Seconds that a member may need beyond its stop plan."""


class Waiting(Struct, frozen=True):
    """What is waited for, since when, and until when; in monotonic seconds."""

    what: str
    since: float
    until: float


class Outbox:
    """Numbers a coordinator's orders, watches them, and collects effects until drained."""

    def __init__(self, term: int, timeout: float) -> None:
        """Begin empty, in `term`; `timeout` is how many seconds all checks take."""
        self.term = term
        self.now = 0.0
        """Monotonic seconds of the last `check`."""
        self.interval = timeout / ((1 << (CHECKS + 1)) - 1)
        """Seconds until an order is sent again for the first time."""
        self._serial = 0
        self._sends: dict[str, tuple[tuple[int, int], OrderBody]] = {}
        self._others: list[CoordinatorEffect] = []
        self._open: dict[str, MemberRecord] = {}
        """Members that have not obeyed their last order, as far as is known."""
        self.next_check = math.inf
        """When `check` must be called at the latest."""
        self.waiting: Waiting | None = None
        """Which order is waited for longest; set by a `check` that found one."""

    # ------------------------------------------------------------------- orders

    def send(self, record: MemberRecord, body: OrderBody) -> None:
        """Send an order unless it equals the member's last one."""
        if record.sent != body:
            self.resend(record, body)

    def resend(self, record: MemberRecord, body: OrderBody) -> None:
        """Send an order even if it equals the member's last one."""
        is_stopping = isinstance(body, StopRound) and isinstance(record.sent, StopRound)
        is_prolonged = is_stopping and record.member in self._open
        record.sent = body
        self._number(record, body)
        if not is_prolonged:  # another reason gives no more time to stop
            record.sent_at, record.checks = self.now, 0
            self._watch(record, self.interval)

    def observe(self, record: MemberRecord) -> None:
        """Take a new status of a member: it may have done what its order wants."""
        if record.member in self._open and is_settled(record):
            del self._open[record.member]
            if not self._open:
                self.next_check = math.inf

    def _number(self, record: MemberRecord, body: OrderBody) -> None:
        self._serial += 1
        record.sent_as = (self.term, self._serial)
        record.first_sent = record.first_sent or record.sent_as
        if isinstance(body, StartRound):
            record.begun = record.sent_as
        # Removed first: the dictionary keeps the order of the last change.
        self._sends.pop(record.member, None)
        self._sends[record.member] = record.sent_as, body

    def dismiss(self, record: MemberRecord, why: str) -> None:
        """Revoke the order of a member that counts as lost to start a round."""
        if isinstance(record.sent, StartRound):
            self._number(record, StopRound(record.sent.placement.round, why))

    def discard(self, member: str) -> None:
        """Drop the order for a member that has gone."""
        self._sends.pop(member, None)
        self._open.pop(member, None)

    # ---------------------------------------------------------------- deadlines

    def check(self, now: float) -> list[tuple[MemberRecord, str]]:
        """Resend orders that are due; return members that count as lost, with the reason."""
        self.now = now
        if now < self.next_check:
            return []
        lost = []
        self.next_check = math.inf
        for record in list(self._open.values()):
            if now < record.check_at:
                self.next_check = min(record.check_at, self.next_check)
            elif record.checks >= self._checks_allowed(record):
                wanted, waited = _wanted(record), now - record.sent_at
                lost.append((record, f"it has not {wanted} within {waited:.0f} s"))
            else:
                record.checks += 1
                if not record.has_acked and record.sent is not None:
                    self._number(record, record.sent)
                # A job that is slow must not be slowed further.
                self._watch(
                    record, self.interval * (1 if record.has_acked else (1 << record.checks))
                )
        self.waiting = self._longest_wait()
        return lost

    def _longest_wait(self) -> Waiting | None:
        late = [one for one in self._open.values() if one.checks]
        if not late:
            return None
        first = min(late, key=lambda one: one.sent_at)
        names = ", ".join([one.name for one in late if one.sent == first.sent][:NAMES_MAX])
        until = first.check_at
        if first.has_acked:
            until += (self._checks_allowed(first) - first.checks) * self.interval
        else:
            until += self.interval * sum(1 << n for n in range(first.checks + 1, CHECKS + 1))
        return Waiting(f"{names}: not {_wanted(first)}", first.sent_at, until)

    def _watch(self, record: MemberRecord, seconds: float) -> None:
        if is_settled(record):
            self._open.pop(record.member, None)
            return
        self._open[record.member] = record
        record.check_at = self.now + seconds
        self.next_check = min(record.check_at, self.next_check)

    def _checks_allowed(self, record: MemberRecord) -> int:
        """Return how often the last order is checked before its member counts as lost."""
        if not record.has_acked:
            return CHECKS
        is_probe = isinstance(record.sent, ProbePeers)
        allowed = PROBE_TIMEOUT if is_probe else record.status.stop_time
        return math.ceil((allowed + MARGIN_S) / self.interval)

    # ------------------------------------------------------------------ effects

    def request_decision(self, attempt: int, failure: Failure) -> None:
        """Call the user's callback."""
        self._others.append(RequestDecision(attempt, failure))

    def publish(self, event: Event) -> None:
        """Publish an event of the job."""
        self._others.append(PublishEvent(event))

    def drain(self, history: RestartHistory | None) -> list[CoordinatorEffect]:
        """Return all effects and remove them; each order gets `history`."""
        sends = [
            SendOrder(member, Order(*sent_as, body, history))
            for member, (sent_as, body) in self._sends.items()
        ]
        effects = [*self._others, *sends]
        self._others, self._sends = [], {}
        return effects


def is_settled(record: MemberRecord) -> bool:
    """Whether nothing more is expected of a member than that it follows its last order."""
    status = record.status
    match record.sent:
        case StopRound(round):
            return record.has_acked and not status.is_busy and status.stopped_round >= round
        case ProbePeers(round):
            return status.probed_round == round
        case StartRound() | RestartPending() | MembersDone() | EndJob() as body:
            return record.has_acked or _is_obeyed(status, body)
    return True


def _is_obeyed(status: MemberStatus, body: OrderBody) -> bool:
    match body:
        case StartRound(placement):
            return status.placement == placement
        case RestartPending(cause):
            return status.pending_restart == cause
        case MembersDone(round, count):
            return status.round != round or status.members_done == count
        case EndJob():
            return status.outcome is not None
    return False


def _wanted(record: MemberRecord) -> str:
    if isinstance(record.sent, ProbePeers):
        return "probed the other nodes"
    if isinstance(record.sent, StopRound) and record.has_acked:
        return "stopped its workers"
    return f"acknowledged {type(record.sent).__name__}"
