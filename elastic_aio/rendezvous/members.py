"""The members as their coordinator knows them, and its orders for them.

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
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from elastic_aio.events import Event
from elastic_aio.outcome import Failure
from elastic_aio.rendezvous.base import (
    ChangePending,
    EndJob,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.messages import (
    PROBE_TIMEOUT,
    MembersDone,
    MemberStatus,
    Order,
    OrderBody,
    ProbePeers,
    RoundRecord,
)
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.restart_budget import RestartHistory

NAMES_MAX = 8
"""How many nodes a message names at most."""

_CLOCK_TOLERANCE_S = 0.01
"""Difference of two readings of one host's clocks, at most."""

_DRIFT = 1e-4
"""Difference of the rates of two clocks that no server disciplines."""

_RESENT_AT = (1, 3)
"""Checks at which an order without an acknowledgement is sent again."""
_LOST_AT = 7
"""The check at which its member counts as lost."""

MARGIN_S = 30.0
"""Seconds that a member may need beyond its stop plan."""


class RoundSettings(Struct, frozen=True):
    """How rounds are formed; times in seconds.

    Attributes:
        minimum: fewest nodes of a round.
        maximum: most nodes of a round.
        join_timeout: how long to wait for `minimum` nodes.
        replace_timeout: the same after a round, when nodes are gone.
        last_call_timeout: how long to wait for more nodes once there are enough.
        scale_up_delay: how long ready joiners wait for others, from the latest of them.
        scale_up_limit: how long they wait, after that, until all workers agree; 0: not at all.
        recovery_timeout: how long a new coordinator waits for the members of the round
            that it recovers.
        keep_workers: whether a recovered round runs on when all members have returned.
        fixed_ranks: whether the preferred ranks of members are binding.
        shared_store: whether the workers of all rounds use one store.
        overlap: whether a node may start the workers of a round while another node still
            stops those of the round before; not with a shared store.
        heartbeat_timeout: how long a node without a store keeps its workers, at most.
        fence: how long after the end of its lease workers may live on a lost node, unless its
            agent is dead.
        order_timeout: how long a member may leave orders without an acknowledgement.
        policy: the same settings of the coordinator's node as in `MemberStatus.policy`.
        program, uid: what the job runs, and as which user; see `MemberStatus`.
        any_program: whether nodes may differ in these.
        has_decide: whether the user's callback is asked before each restart.
        may_move: whether nodes that are cut off may meet at another store.
    """

    minimum: int
    maximum: int
    join_timeout: float = 600.0
    replace_timeout: float = 600.0
    last_call_timeout: float = 30.0
    scale_up_delay: float = 0.0
    scale_up_limit: float = 0.0
    recovery_timeout: float = 0.7
    keep_workers: bool = True
    fixed_ranks: bool = False
    shared_store: bool = False
    overlap: bool = False
    heartbeat_timeout: float = 0.0
    fence: float = 0.0
    order_timeout: float = 28.0
    policy: dict[str, str] = {}
    program: str = ""
    uid: int = -1
    any_program: bool = False
    has_decide: bool = False
    may_move: bool = False

    @property
    def notice_time(self) -> float:
        """Seconds from the loss of all nodes until others may form a round, at most."""
        return self.heartbeat_timeout + self.recovery_timeout + self.fence

    @property
    def nnodes(self) -> str:
        """The number of nodes as on the command line."""
        return str(NodeRange(self.minimum, self.maximum))


# ------------------------------------------------------------------ members


@dataclass(slots=True, eq=False)
class MemberRecord:
    """What the coordinator knows about one member."""

    member: str
    status: MemberStatus
    joined_at: float
    """When its first status arrived, in monotonic seconds."""
    arrived_at: float = -math.inf
    """When its placement arrived, maybe from another store: a suspended coordinator keeps
    members that go there and come back."""
    has_neighbor: bool = False
    """Whether another member is, or was, on its host."""
    is_published: bool = False
    """Whether its arrival was published."""
    sent: OrderBody | None = None
    """The last order; an equal one is not sent again."""
    sent_as: tuple[int, int] = (0, 0)
    """Term and serial of that order."""
    first_sent: tuple[int, int] | None = None
    """Term and serial of the first order; None before it."""
    sent_at: float = 0.0
    """When it was first sent, in monotonic seconds."""
    check_at: float = 0.0
    """When the outbox looks at it again."""
    checks: int = 0
    """How often the outbox has looked at it."""
    admitted_at: float | None = None
    """When a running job took it in; None for a member of the first round."""
    refused_because: str = ""
    """Why it may not take part now; empty if it may."""
    refused_at: float = 0.0
    rank_holder: MemberRecord | None = None
    """The other member that holds the fixed rank which this one claims."""
    is_rejected: bool = False
    """Whether it can never take part."""
    offset: float = math.inf
    """Local monotonic time less the member's Unix time, by the status that arrived fastest."""
    offset_at: float = 0.0
    """When that status arrived."""

    def observe(self, status: MemberStatus, now: float) -> None:
        """Take a status that has arrived at `now`, in monotonic seconds."""
        if abs(status.clock - self.status.clock) > _CLOCK_TOLERANCE_S:
            self.offset = math.inf  # its clock was set
        former = self.status.placement, self.status.moves
        if self.arrived_at < self.joined_at or former != (status.placement, status.moves):
            self.arrived_at = now
        self.status = status
        # Exact but for the time on the way, which is never negative.
        if now - status.sent_at <= self.offset_bound(now):
            self.offset, self.offset_at = now - status.sent_at, now

    def offset_bound(self, now: float) -> float:
        """Return what `offset` is at most, as the clocks may have drifted since."""
        return self.offset + _DRIFT * (now - self.offset_at)

    @property
    def name(self) -> str:
        """How messages name it: by its host, with its pid if another member is there too."""
        node = self.status.node
        return f"{node.name} (pid {node.pid})" if self.has_neighbor else node.name

    @property
    def has_acked(self) -> bool:
        """Whether it has seen the last order."""
        return self.status.acked >= self.sent_as

    @property
    def is_synchronized(self) -> bool:
        """Whether its status follows an order to this record: earlier ones have no effect now."""
        return self.first_sent is not None and self.status.acked >= self.first_sent

    @property
    def has_obeyed(self) -> bool:
        """Whether nothing more is expected of it than that it follows its last order."""
        status = self.status
        match self.sent:
            case StopRound(round):
                return self.has_acked and not status.is_busy and status.stopped_round >= round
            case ProbePeers(round):
                return status.probed_round == round
            case EndJob():
                # Of another coordinator: a member for which the job is over reads no order.
                return self.has_acked or status.outcome is not None
            case StartRound() | RestartPending() | MembersDone() | ChangePending():
                return self.has_acked
        return True

    @property
    def is_probing(self) -> bool:
        """Whether its last order is to probe the other nodes, and no result has come."""
        return isinstance(self.sent, ProbePeers) and self.status.probed_round != self.sent.round


def clock_offsets(records: Iterable[MemberRecord], now: float) -> dict[str, float]:
    """Return the least offset of the members of one host, by member."""
    hosts: list[list[MemberRecord]] = []
    for record in sorted(records, key=lambda one: one.status.clock):
        if not hosts or record.status.clock - hosts[-1][-1].status.clock > _CLOCK_TOLERANCE_S:
            hosts.append([])
        hosts[-1].append(record)
    found: dict[str, float] = {}
    for host in hosts:
        least = min(one.offset_bound(now) for one in host)
        found.update((one.member, least) for one in host)
    return found


# ------------------------------------------------------------------- orders


class SendOrder(Struct, frozen=True, gc=False):
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

    def discard(self, member: str) -> None:
        """Watch no order any more for a member that has gone."""
        self._open.pop(member, None)

    def _number(self, record: MemberRecord, body: OrderBody) -> None:
        self._serial += 1
        record.sent_as = (self.term, self._serial)
        record.first_sent = record.first_sent or record.sent_as
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
                why = f"it has not {_wanted(record)} within {now - record.sent_at:.0f} s"
                lost.append((record, why))
                if isinstance(record.sent, StartRound):  # it must not follow the order later
                    self._number(record, StopRound(record.sent.placement.round, why))
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
