"""The settings of a job's rounds, and the records of its members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from msgspec import Struct

from elastic_aio.rendezvous.base import EndJob, RestartPending, StartRound, StopRound
from elastic_aio.rendezvous.messages import MembersDone, MemberStatus, OrderBody, ProbePeers
from elastic_aio.spec.checks import checked_integer
from elastic_aio.spec.job import NodeRange

NAMES_MAX = 8
"""How many nodes a message names at most."""

_CLOCK_TOLERANCE_S = 0.01
"""Difference of two readings of one host's clocks, at most."""

_DRIFT = 1e-4
"""Difference of the rates of two clocks that no server disciplines."""


class RoundSettings(Struct, frozen=True):
    """How rounds are formed; times in seconds.

    Attributes:
        minimum: fewest nodes of a round.
        maximum: most nodes of a round.
        join_timeout: how long to wait for `minimum` nodes.
        last_call_timeout: how long to wait for more nodes once there are enough.
        recovery_timeout: how long a new coordinator waits for the members of the round
            that it recovers.
        keep_workers: whether a recovered round runs on when all members have returned.
        fixed_ranks: whether the preferred ranks of members are binding.
        shared_store: whether the workers of all rounds use one store.
        overlap: whether a node may start the workers of a round while another node still
            stops those of the round before; not with a shared store.
        heartbeat_timeout: how long a node without a store keeps its workers, at most.
        fence: how long after the end of its lease workers may live on a lost node.
        order_timeout: how long a member may leave orders without an acknowledgement.
        policy: the same settings of the coordinator's node as in `MemberStatus.policy`.
        has_decide: whether the user's callback is asked before each restart.
    """

    minimum: int
    maximum: int
    join_timeout: float = 600.0
    last_call_timeout: float = 30.0
    recovery_timeout: float = 0.7
    keep_workers: bool = True
    fixed_ranks: bool = False
    shared_store: bool = False
    overlap: bool = False
    heartbeat_timeout: float = 0.0
    fence: float = 0.0
    order_timeout: float = 28.0
    policy: dict[str, str] = {}
    has_decide: bool = False

    def __post_init__(self) -> None:
        checked_integer("minimum", self.minimum, at_least=1)
        checked_integer("maximum", self.maximum, at_least=self.minimum)

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
    begun: tuple[int, int] | None = None
    """Term and serial of the last `StartRound` order."""
    admitted_at: float | None = None
    """When a running job took it in; None for a member of the first round."""
    refused_because: str = ""
    """Why it may not take part now; empty if it may."""
    refused_at: float = 0.0
    rank_holder: MemberRecord | None = None
    """The other member that holds the fixed rank which this one claims."""
    rank_held_since: float = 0.0
    is_rejected: bool = False
    """Whether it can never take part."""
    offset: float = inf
    """Local monotonic time less the member's Unix time, by the status that arrived fastest."""
    offset_at: float = 0.0
    """When that status arrived."""

    def observe(self, status: MemberStatus, now: float) -> None:
        """Take a status that has arrived at `now`, in monotonic seconds."""
        if abs(status.clock - self.status.clock) > _CLOCK_TOLERANCE_S:
            self.offset = inf  # its clock was set
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
            case StartRound() | RestartPending() | MembersDone():
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
