"""The state of a coordinator: its members, its orders for them, the last round.

Pure.  Only the latest order for a member is sent, and an unchanged one is not sent again, unless
the member neither obeys nor acknowledges it in time.

* A member acknowledges by its next status (`acked`), which it writes at once after every order but
  `WaitForNodes`.  Most orders change the status, so their acknowledgement costs no message of its
  own.
* Each order is checked at intervals, and resent after longer and longer times if it is not
  acknowledged.  At the last check the member counts as lost.
* A member that has acknowledged a stop has the time of its own stop plan and `MARGIN_S`.  Then it
  counts as lost too.  A lost member that reports something later is a newcomer.
* Checks are counted, and not the time: after a suspension of the coordinator or of the store there
  is one check, and the replies arrive before the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.events import Event, JobFinished
from elastic_aio.node_events import NodeLeft, NodeLost, NodeRefused, RoundForming, RoundWaiting
from elastic_aio.outcome import Failure, JobOutcome, JobState
from elastic_aio.rendezvous import messages
from elastic_aio.rendezvous.base import (
    ChangePending,
    EndJob,
    Placement,
    RestartCause,
    RestartPending,
    StartRound,
    StopRound,
)
from elastic_aio.spec.job import NodeRange
from elastic_aio.spec.restart import DECIDE_TIMEOUT, RestartAction, RestartBudget, RestartHistory
from elastic_aio.text import counted

NAMES_MAX = 8
"""Nodes that a message names at most."""

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
        minimum, maximum: fewest and most nodes of a round.
        join_timeout, replace_timeout, last_call_timeout, scale_up_delay, overlap, any_program: as
            in the `RendezvousSpec`; `overlap` not with a shared store.
        scale_up_limit: how long ready joiners wait, after `scale_up_delay`, until all workers
            agree; 0: not at all.
        recovery_timeout: how long a new coordinator waits for the members of the recovered round.
        keep_workers: whether a recovered round runs on when all members have returned.
        fixed_ranks: whether the preferred ranks of members are binding.
        shared_store: whether the workers of all rounds use one store.
        heartbeat_timeout: how long a node without a store keeps its workers, at most.
        fence: how long workers may outlive the lease of a lost node, unless its agent is dead.
        order_timeout: how long a member may leave orders without an acknowledgement.
        policy: the same settings of the coordinator's node as in `MemberStatus.policy`.
        program, uid: what the job runs, and as which user; see `MemberStatus`.
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
    status: messages.MemberStatus
    joined_at: float
    """When its first status arrived, in monotonic seconds."""
    arrived_at: float = -math.inf
    """When its placement last arrived; a suspended coordinator keeps members that come back."""
    has_neighbor: bool = False
    """Whether another member is, or was, on its host."""
    is_published: bool = False
    sent: messages.OrderBody | None = None
    sent_as: tuple[int, int] = (0, 0)
    """Term and serial of that order."""
    first_sent: tuple[int, int] | None = None
    """Term and serial of the first order; None before it."""
    sent_at: float = 0.0
    """When it was first sent, in monotonic seconds."""
    check_at: float = 0.0
    """When the outbox looks at it again."""
    checks: int = 0
    admitted_at: float | None = None
    """When a running job took it in; None for a member of the first round."""
    refused_because: str = ""
    """Why it may not take part now; empty if it may."""
    refused_at: float = 0.0
    rank_holder: MemberRecord | None = None
    """The other member that holds the fixed rank which this member claims."""
    is_rejected: bool = False
    """Whether it can never take part."""
    excluded_because: str = ""
    """Why it is excluded, as was published; empty if it is not."""
    preempted_at: float = math.inf
    """The deadline of its notice of a preemption, in monotonic seconds; infinite without one."""
    offset: float = math.inf
    """Local monotonic time less the member's Unix time, by the status that arrived fastest."""
    offset_at: float = 0.0
    """When that status arrived."""
    left_at: float = math.inf
    """When it was first known to leave, in monotonic seconds."""

    def observe(self, status: messages.MemberStatus, now: float) -> None:
        """Take a status that has arrived at `now`, in monotonic seconds."""
        if abs(status.clock - self.status.clock) > _CLOCK_TOLERANCE_S:
            self.offset = math.inf  # its clock was set
        notice = status.preemption
        is_new = notice != self.status.preemption or math.isinf(self.preempted_at)
        former = self.status.placement, self.status.moves
        if self.arrived_at < self.joined_at or former != (status.placement, status.moves):
            self.arrived_at = now
        self.status = status
        if status.drain_reason:
            self.left_at = min(now, self.left_at)
        # Exact but for the time on the way, which is never negative.
        if now - status.sent_at <= self.offset_bound(now):
            self.offset, self.offset_at = now - status.sent_at, now
        if notice is not None and is_new:
            # At most as long as when the member got it: its clock may have been set.
            left = min(self.offset_bound(now) + notice.until - now, notice.time_left or 0.0)
            self.preempted_at = now + max(0.0, left)

    def offset_bound(self, now: float) -> float:
        """Return the most that `offset` may be, as the clocks may have drifted since."""
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
    def is_excluded(self) -> bool:
        """Whether it may take part in no further round now."""
        order = self.sent
        is_ordered = isinstance(order, RestartPending) and order.cause.excludes == self.member
        return bool(self.status.exclusion) or (is_ordered and not self.has_acked)

    @property
    def is_synchronized(self) -> bool:
        """Whether its status follows an order to this record: earlier ones have no effect now."""
        return self.first_sent is not None and self.status.acked >= self.first_sent

    @property
    def has_obeyed(self) -> bool:
        """Whether nothing more is expected of it than to follow its last order."""
        status = self.status
        match self.sent:
            case StopRound(round):
                return self.has_acked and not status.is_busy and status.stopped_round >= round
            case messages.ProbePeers(round):
                return status.probed_round == round
            case EndJob():
                # Of another coordinator: a member for which the job is over reads no order.
                return self.has_acked or status.outcome is not None
            case StartRound() | RestartPending() | messages.MembersDone() | ChangePending():
                return self.has_acked
        return True

    @property
    def is_probing(self) -> bool:
        """Whether its last order is to probe the other nodes, and no result has come."""
        return (
            isinstance(self.sent, messages.ProbePeers)
            and self.status.probed_round != self.sent.round
        )


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
    order: messages.Order


class RequestDecision(Struct, frozen=True):
    """Call the user's callback with the root cause; reply with `on_decision`."""

    failure: Failure


CoordinatorEffect = SendOrder | RequestDecision | messages.RoundRecord | Event
"""A record is written into the store, and an event appended to the job's event stream."""


class Outbox:
    """Numbers a coordinator's orders, watches them, and collects effects until drained."""

    def __init__(self, term: int, timeout: float) -> None:
        """Begin empty, in `term`; `timeout`: seconds that all checks take."""
        self.term = term
        self.now = 0.0
        """Monotonic seconds of the last `check`."""
        self.interval = timeout / _LOST_AT
        """Seconds between two checks, and until an order is sent again for the first time."""
        self._serial = 0
        self._sends: dict[str, tuple[tuple[int, int], messages.OrderBody]] = {}
        self._others: list[CoordinatorEffect] = []
        self._open: dict[str, MemberRecord] = {}
        """Members that have not obeyed their last order, as far as is known."""

    # ------------------------------------------------------------------- orders

    def send(self, record: MemberRecord, body: messages.OrderBody, *, again: bool = False) -> None:
        """Send an order, unless it equals the member's last order and must not be sent `again`."""
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
        """Watch a member until it has obeyed; called after each order and status."""
        if record.has_obeyed:
            self._open.pop(record.member, None)
        else:
            self._open[record.member] = record

    def discard(self, member: str) -> None:
        """Watch no order any more for a member that has gone."""
        self._open.pop(member, None)

    def _number(self, record: MemberRecord, body: messages.OrderBody) -> None:
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
        """Return the longest wait: its text, since when, until when; None if no wait is long."""
        late = [one for one in self._open.values() if one.checks]
        if not late:
            return None
        first = min(late, key=lambda one: one.sent_at)
        names = ", ".join([one.name for one in late if one.sent == first.sent][:NAMES_MAX])
        left = self._checks_allowed(first) - first.checks - 1
        until = first.check_at + left * self.interval
        return f"{names}: not {_wanted(first)}", first.sent_at, until

    def _checks_allowed(self, record: MemberRecord) -> int:
        if not record.has_acked:
            return _LOST_AT
        is_probe = isinstance(record.sent, messages.ProbePeers)
        allowed = messages.PROBE_TIMEOUT if is_probe else record.status.stop_time
        return math.ceil((allowed + MARGIN_S) / self.interval) + 1

    # ------------------------------------------------------------------ effects

    def publish(self, effect: Event | messages.RoundRecord | RequestDecision) -> None:
        """Publish an event of the job, record its round, or request a decision."""
        self._others.append(effect)

    def drain(self, history: RestartHistory | None) -> list[CoordinatorEffect]:
        """Return all effects and remove them; each order gets `history`."""
        sends = [
            SendOrder(member, messages.Order(*sent_as, body, history))
            for member, (sent_as, body) in self._sends.items()
        ]
        effects = [*self._others, *sends]
        self._others, self._sends = [], {}
        return effects


def _wanted(record: MemberRecord) -> str:
    if isinstance(record.sent, messages.ProbePeers):
        return "probed the other nodes"
    if isinstance(record.sent, StopRound) and record.has_acked:
        return "stopped its workers"
    return f"acknowledged {type(record.sent).__name__}"


# --------------------------------------------------------------------- state

_NOTICE_S = 5.0
"""Seconds of waiting for `restart.decide` before that is published."""
_REPEAT_S = 15.0
"""Seconds between two publications of one wait."""

_HELD_BACK_S = 0.5
"""Seconds by which a status is late that a suspended store or a partition has held back."""

_TOGETHER_S = 0.2
"""Seconds from a failure to the news that another node leaves whose workers have ended before."""

_STOP_CODES = {129, 130, 131, 143}
"""The shell's exit codes of what SIGHUP, SIGINT, SIGQUIT and SIGTERM have ended."""

_SETTLED_S = 60.0
"""Seconds of the longest short stay of a joiner, and of the longest delay of the next."""
_VISITORS_MAX = 256
"""Hosts of which short stays are remembered."""


class CoordinatorPhase(Enum):
    """What a coordinator is doing; see the table in `elastic_aio.rendezvous.coordinator`."""

    RECOVERING = "recovering"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    DECIDING = "deciding"
    BACKING_OFF = "backing off"
    ENDING = "ending"


def leaving(record: MemberRecord) -> str:
    """Return what a message says of a member that leaves, or has left."""
    why = record.status.drain_reason
    return f"is leaving ({why})" if why else "has left"


class FormationTimer:
    """Since when the coordinator waits for nodes, and its last publication about it."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.enough_since: float | None = None
        self.published: RoundForming | None = None
        self.published_at = now


class RoundState:
    """The last round and its end; number and attempt are -1 before the first one."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        first = next(iter(placements.values()), None)
        self.id = (-1, "") if first is None else first.round_id
        self.number = self.id[0]
        self.attempt = -1 if first is None else first.attempt
        self.changes = 0 if first is None else first.changes
        self.placements = dict(placements)
        self.gone: dict[str, MemberRecord] = {}
        self.members_done = 0
        """Members that left after their success before this coordinator was elected."""
        self.succeeded_at: float | None = None
        """When this coordinator saw the first success of a member; None before."""
        self.finished = (0, 0.0)
        """The values `workers` and `ago` of the present `MembersDone` orders."""
        self.has_lost_member = False
        """Whether a member was lost before its workers had succeeded."""
        self.is_excused = False
        """Whether the failures of the round may be a consequence of a member that is gone."""
        self.change_reasons: dict[str, None] = {}
        """Why another round is needed; ordered, without repetition."""
        self.ready_since: float | None = None
        """Since when a joiner could be taken in; None while none could."""
        self.ready: dict[str, float] = {}
        """Since when each of the present joiners can be taken in, by member."""
        self.pending: ChangePending | None = None
        """The last order about joiners to the members of the round."""
        self.pending_until = -math.inf
        self.cause: RestartCause | None = None
        self.stop_reason = ""
        self.failed_at: float | None = None
        """When this coordinator saw the failure of the round."""
        self.stop_time = 0.0
        """Seconds from then until all workers had stopped."""
        self.failures: tuple[Failure, ...] = ()
        """The root cause first."""
        self.decision: RestartAction | str | None = None
        """The callback's answer; text is the error that it raised."""
        self.wait_until = 0.0
        """When the callback is given up, or the delay is over."""

    @property
    def size(self) -> int:
        """How many members the round was formed of; 0 before it is formed."""
        first = next(iter(self.placements.values()), None)
        return 0 if first is None else first.span.group_world_size

    @property
    def change_text(self) -> str:
        """Why another round is needed, for a message."""
        return "; ".join(list(self.change_reasons)[:NAMES_MAX])


class Visits:
    """Short stays of joiners, by the name of their host: they delay the next stay."""

    def __init__(self) -> None:
        self._short: dict[str, tuple[int, float]] = {}
        """Number of short stays, and the end of the last."""

    def observe_departure(self, record: MemberRecord, now: float) -> None:
        """Take the end of a member that had joined a running job."""
        name = record.status.node.name
        if record.admitted_at is None:
            return
        count, _ = self._short.pop(name, (0, now))
        if now - record.admitted_at < _SETTLED_S:
            self._short[name] = (count + 1, now)
        while len(self._short) > _VISITORS_MAX:
            del self._short[next(iter(self._short))]

    def admission(self, name: str) -> tuple[int, float]:
        """Return the number of short stays of a host, and when it may take part again."""
        count, ended_at = self._short.get(name, (0, -math.inf))
        return count, ended_at + min(_SETTLED_S, 2.0 ** (count - 1) if count > 1 else 0.0)


class CoordinatorState:
    """The state that all phases of a coordinator read and change.

    Pass all that is known to `on_status` and `on_gone`, then call `decide` of
    `elastic_aio.rendezvous.coordinator`, again at `deadline` at the latest.
    """

    def __init__(
        self,
        settings: RoundSettings,
        budget: RestartBudget,
        *,
        name: str,
        term: int,
        now: float,
        former: messages.RoundRecord | None = None,
    ) -> None:
        """Begin without members.

        `name` names the member that coordinates and the store, `term` is higher than the term of
        every former coordinator at this store, and `now` is in monotonic seconds.  `former` is the
        recorded last round at this store; the budget has followed it.
        """
        self.phase = CoordinatorPhase.RECOVERING
        self.settings = settings
        self.budget = budget
        self.name = name
        self.created_at = self.now = now
        self.deadline: float | None = None
        """When the next decision is due even if nothing happens."""
        self.outbox = Outbox(term, settings.order_timeout)
        self.members: dict[str, MemberRecord] = {}
        """The present members, in the order of their arrival."""
        self.round = RoundState({})
        self.former = former
        """The last round of former coordinators; open until its loss is counted."""
        self.timer = FormationTimer(now)
        self.fenced_until = -math.inf
        """Until when workers may live on nodes that are gone."""
        self.outcome: JobOutcome | None = None
        self.set_aside: set[str] = set()
        """Members of rounds that were not recovered, because the job may have ended by them."""
        self.differences: set[str] = set()
        self.unsure_until = -math.inf
        """Until when members that were lost may have their leases, by their own clocks."""
        self.visits = Visits()
        self.preemption = None if former is None else former.preemption
        """The earliest notice of a preemption, with `until` in monotonic seconds."""
        if self.preemption is not None:  # members that come have the deadline
            self.preemption = replace(
                self.preemption, until=now + (self.preemption.time_left or 0.0)
            )
        self._recorded = (-1, False, self.preemption)
        """In the last record: number of the round, whether it was open, and the notice."""
        self._waiting_published_at = -math.inf

    def __repr__(self) -> str:
        return (
            f"<Coordinator {self.name} of term {self.outbox.term}: {self.phase.value},"
            f" round {self.round.number}, {len(self.members)} members>"
        )

    # ------------------------------------------------------------------- inputs

    def on_status(self, member: str, status: messages.MemberStatus, now: float) -> None:
        """Take a status at `now` (monotonic); an older status, or of another node, is dropped."""
        record = self.members.get(member)
        if record is None:
            if status.is_leaving:
                return
            record = self.members[member] = MemberRecord(member, status, now)
            self.round.gone.pop(member, None)
        elif status.serial <= record.status.serial or status.node != record.status.node:
            return
        if now - status.sent_at - record.offset_bound(now) > _HELD_BACK_S:
            # The member may have left since: the store is about to see the end of its connection.
            self.fence(now + 2 * messages.LEASE_LINGER)
        record.observe(status, now)
        self.outbox.observe(record)
        if status.is_leaving:
            self.on_gone(member, now, is_lost=False)

    def on_gone(
        self,
        member: str,
        now: float,
        *,
        is_lost: bool,
        is_dead: bool = False,
        why: str = "its lease has ended",
    ) -> None:
        """Take the end of a member at `now`: it has left, or is lost because of `why`.

        The guardian of a member that `is_dead` stops its workers.
        """
        record = self.members.pop(member, None)
        if record is None:
            return
        self.now = now
        self.outbox.discard(member)
        self.set_aside.discard(member)
        if not (is_dead or record.status.is_leaving or self.is_stopped(record)):
            # One that has gone to another store keeps its workers on its way.
            settings = self.settings
            self.fence(now + (settings.fence if is_lost else settings.heartbeat_timeout))
        self.visits.observe_departure(record, now)
        if is_lost and record.status.members_done < self.round.size:
            self.unsure_until = now + self.settings.heartbeat_timeout
        if not is_lost:
            record.left_at = min(now, record.left_at)
        if member in self.round.placements:
            self.round.gone[member] = record
            if not self.has_succeeded(record):
                self.add_change_reason(f"{record.name} {'is lost' if is_lost else leaving(record)}")
                self.round.has_lost_member = self.round.has_lost_member or is_lost
                # A member that has seen the order to stop was alive after the failure.
                saw_failure = isinstance(record.sent, StopRound) and record.has_acked
                is_excused = not saw_failure if is_lost else self.has_left_first(record)
                self.round.is_excused |= is_excused
        elif self.phase is CoordinatorPhase.RECOVERING and not is_lost:
            self.round.gone[member] = record  # it may be done: the round is not known yet
        if self.phase is CoordinatorPhase.ENDING:
            return  # JobFinished is the last event
        if is_lost:
            self.outbox.publish(NodeLost(name=record.name, member=member, why=why))
        else:
            is_done = self.has_succeeded(record)
            why = "its workers have finished" if is_done else "it ended its lease, as when stopped"
            self.outbox.publish(NodeLeft(name=record.name, member=member, why=why))

    def on_decision(self, decision: RestartAction | str) -> None:
        """Take the answer of the user's callback; text is the error that it raised."""
        self.round.decision = decision

    # ------------------------------------------------------------------ members

    def admitted(self) -> list[MemberRecord]:
        """Return the members that may take part, now or later."""
        return [record for record in self.members.values() if not record.is_rejected]

    def eligible(self) -> list[MemberRecord]:
        """Return the members that may take part in a further round now."""
        return [one for one in self.attending() if not one.is_excluded]

    def attending(self) -> list[MemberRecord]:
        """Return the members that may take part in the present round."""
        return [
            one
            for one in self.admitted()
            if one.rank_holder is None and not (one.status.drain_reason or self.is_aside(one))
        ]

    def active(self) -> list[MemberRecord]:
        """Return the present members of the round."""
        return [self.members[member] for member in self.round.placements if member in self.members]

    def accountable(self) -> list[MemberRecord]:
        """Return the members whose failures of the round count: present ones, and those that have
        failed and left since; a failure of a lost one may be a consequence of its loss."""
        gone = [one for one in self.round.gone.values() if one.left_at < math.inf]
        left = [one for one in gone if self.has_failed(one) and not self.has_left_first(one)]
        return [*filter(self.has_placement, self.active()), *left]

    def unplaced(self) -> list[MemberRecord]:
        """Return the eligible members without a placement in the round."""
        return [record for record in self.eligible() if record.member not in self.round.placements]

    @property
    def needs_departed(self) -> bool:
        """Whether another round needs nodes of the last round that left after their success."""
        left = self.round.members_done + sum(map(self.has_succeeded, self.round.gone.values()))
        return left > 0 and self.round.size - left < self.settings.minimum

    def departed(self) -> str:
        """Return which nodes of the round have left after their success; empty for none."""
        names = [one.name for one in self.round.gone.values() if self.has_succeeded(one)]
        if self.round.members_done:
            names.append(counted(self.round.members_done, "other node"))
        return ", ".join(names[:NAMES_MAX])

    # --------------------------------------------------------------- one member

    def is_stopped(self, record: MemberRecord) -> bool:
        """Whether no workers of this round or of an earlier one run on a member, nor will.

        A `StartRound` order of a former coordinator, or to a former session of the member, may
        still be on its way.  The member drops it once it has seen an order of this coordinator.
        Before the first round at a store there is no such order.
        """
        status = record.status
        is_first = self.outbox.term == 1 and self.round.number < 0
        is_placed = record.member in self.round.placements
        is_open = is_placed and status.stopped_round < self.round.number
        return not (status.is_busy or is_open) and (is_first or record.is_synchronized)

    def is_elsewhere(self, placement: Placement) -> bool:
        """Whether a round was formed at another store than this coordinator's."""
        return placement.formed_by.rpartition("@")[2] != self.name.rpartition("@")[2]

    def has_placement(self, record: MemberRecord) -> bool:
        """Whether a member has taken its placement in the round."""
        placement = record.status.placement
        return placement is not None and placement.round_id == self.round.id

    def has_diverged(self, record: MemberRecord) -> bool:
        """Whether a member will never take its placement in the round.

        It has taken another in a round that is not older, formed by a coordinator in another
        partition; or it has dropped the order, because its reserved port had changed.
        """
        if self.has_placement(record):
            return False
        if record.status.round >= self.round.number:
            return True
        return isinstance(record.sent, StartRound) and record.has_acked

    def is_aside(self, record: MemberRecord) -> bool:
        """Whether a member has succeeded in a round of another store that was not recovered."""
        if self.round.number < 0:
            return record.member in self.set_aside
        return record.member not in self.round.placements and self.may_have_ended(record.status)

    def may_have_ended(self, status: messages.MemberStatus) -> bool:
        """Whether the job may have ended with success at another store, as far as is known."""
        placement = status.placement
        if placement is None or status.phase is not messages.MemberPhase.SUCCEEDED:
            return False
        # After a second move, the lease says nothing of the store before the last one.
        is_open = self.settings.may_move and status.was_leased and status.moves <= 1
        return self.is_elsewhere(placement) and not is_open

    def inherited_restart(self, record: MemberRecord) -> RestartCause | None:
        """Return the restart after this round that a former coordinator has granted."""
        pending = record.status.pending_restart
        is_next = pending is not None and pending.attempt == self.round.attempt + 1
        return pending if is_next and self.has_placement(record) else None

    def has_failed(self, record: MemberRecord) -> bool:
        """Whether a member reports a failure of the round, its own or another node's."""
        status = record.status
        if not self.has_placement(record):
            return False
        if self.inherited_restart(record) is not None:
            return True
        if status.phase is messages.MemberPhase.STOPPED:
            return bool(status.failures) or status.is_permanent
        return status.phase is messages.MemberPhase.FAILING

    @property
    def has_progress(self) -> bool:
        """Whether a worker of the round has reported a step, on a node that is here or was."""
        there = [*self.active(), *self.round.gone.values()]
        return any(one.status.has_progress and self.has_placement(one) for one in there)

    def has_left_first(self, record: MemberRecord) -> bool:
        """Whether a failure of the round may be a consequence of a member that leaves.

        It was known to leave before the failure, or so soon after that its workers may have ended
        first.  Its own failure is no consequence, unless the signal to leave has ended its workers.
        """
        if self.has_failed(record):
            failures = record.status.failures
            codes = {one.status.shell_code for one in failures if not one.is_victim}
            return bool(codes) and codes <= _STOP_CODES and record.left_at < math.inf
        failed_at = self.now if self.round.failed_at is None else self.round.failed_at
        return record.left_at <= failed_at + _TOGETHER_S

    def has_succeeded(self, record: MemberRecord) -> bool:
        """Whether all workers of the round on a member have succeeded."""
        return record.status.phase is messages.MemberPhase.SUCCEEDED and self.has_placement(record)

    # ------------------------------------------------------------------ waiting

    def arm(self, when: float) -> bool:
        """Request a decision at `when` and return True; return False if `when` has passed."""
        if self.now >= when:
            return False
        self.deadline = when if self.deadline is None else min(when, self.deadline)
        return True

    def publish_waiting(self) -> None:
        """Publish the longest wait of the coordinator, once it takes long."""
        if (check_at := self.outbox.next_check) is not None:
            self.arm(check_at)
        waiting = self.outbox.longest_wait()
        due = self._waiting_published_at + _REPEAT_S
        if self.phase is CoordinatorPhase.DECIDING:
            since = self.round.wait_until - DECIDE_TIMEOUT
            waiting = ("restart.decide has not returned", since, self.round.wait_until)
            due = max(since + _NOTICE_S, due)
        if waiting is None or self.phase is CoordinatorPhase.ENDING or self.arm(due):
            return
        self._waiting_published_at = self.now
        self.arm(self.now + _REPEAT_S)
        what, since, until = waiting
        waited, left = round(self.now - since, 1), round(until - self.now, 1)
        phase = self.phase.value
        self.outbox.publish(RoundWaiting(phase=phase, what=what, waited=waited, time_left=left))

    # ------------------------------------------------------------------ changes

    @property
    def next_round(self) -> int:
        """A number above every round of this store, or that a member has seen."""
        seen = [max(one.status.round, one.status.stopped_round) for one in self.members.values()]
        former = -1 if self.former is None else self.former.round
        return max(self.round.number, former, *seen) + 1

    def record_round(self) -> None:
        """Record the last round when it has begun, has notice, or its workers have stopped."""
        stopped = CoordinatorPhase.FORMING, CoordinatorPhase.BACKING_OFF, CoordinatorPhase.ENDING
        is_open = self.round.number >= 0 and self.phase not in stopped
        cause = self.round.cause
        granted = 0 if cause is None or cause.root is None else cause.restarts
        # A round that was recovered may be older than the last one, of which no member came.
        number = max(self.round.number, -1 if self.former is None else self.former.round)
        if self._recorded != (self.round.number, is_open, self.preemption):
            self._recorded = self.round.number, is_open, self.preemption
            self.outbox.publish(
                messages.RoundRecord(
                    term=self.outbox.term,
                    round=number,
                    formed_by=self.round.id[1],
                    attempt=self.round.attempt,
                    changes=self.round.changes,
                    is_open=is_open,
                    history=self.budget.history(self.now, granted),
                    preemption=self.preemption,
                )
            )

    def fence(self, until: float) -> None:
        """Start no round for a while, in which nodes that are gone stop their workers."""
        self.fenced_until = max(until, self.fenced_until)

    def wait_for_nodes(self) -> None:
        """Form another round as soon as there are enough nodes."""
        self.phase = CoordinatorPhase.FORMING
        self.timer = FormationTimer(self.now)

    def refuse(self, record: MemberRecord, why: str) -> None:
        """Refuse a member, temporarily or permanently."""
        record.refused_because, record.refused_at = why, self.now
        self.outbox.publish(NodeRefused(name=record.name, member=record.member, why=why))

    def add_change_reason(self, why: str) -> None:
        self.round.change_reasons[why] = None

    def next_cause(self, why: str = "") -> RestartCause | None:
        """Return why another attempt follows; None before the first one."""
        is_first = self.round.number < 0 and not self.round.change_reasons
        if self.round.cause is not None or is_first:
            return self.round.cause
        text = why or self.round.change_text
        return RestartCause(self.round.attempt + 1, text, self.budget.restarts)

    def fail_job(self, why: str, exit_code: int | None = None) -> None:
        """End the job by a failure; by default with the exit code of its root cause."""
        failures = self.round.failures
        if exit_code is None:
            exit_code = (failures[0].status.shell_code if failures else None) or 1
        self.end_job(JobOutcome(JobState.FAILED, why, exit_code, failures=failures))

    def end_job(self, outcome: JobOutcome) -> None:
        failures = messages.truncate_failures(outcome.failures)
        self.outcome = replace(outcome, restarts=self.budget.restarts, failures=failures)
        self.phase = CoordinatorPhase.ENDING
        for record in self.admitted():
            self.outbox.send(record, EndJob(self.outcome))
        self.outbox.publish(
            JobFinished(
                attempt=max(0, self.round.attempt),
                state=outcome.state,
                why=outcome.why,
                exit_code=outcome.exit_code,
                duration=self.now - self.created_at,
                restarts=self.budget.restarts,
            )
        )
