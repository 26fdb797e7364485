"""What the nodes of a job write into the store: member statuses, orders, the leader.

A member's status is its whole present state, and an order is everything that the coordinator wants
of one member.  Both are level-triggered: each replaces the one before, so a reader may miss any of
them.  Neither grows with the number of nodes: failures carry texts of any length (tracebacks,
output), which are truncated here.
"""

from __future__ import annotations

from dataclasses import replace as with_fields
from enum import StrEnum
from typing import Self, TypeVar

from msgspec import Struct, field

from elastic_aio.node_events import RoundForming
from elastic_aio.outcome import Failure, JobOutcome
from elastic_aio.rendezvous import base
from elastic_aio.spec.restart import HistoryCount, RestartHistory
from elastic_aio.value import from_json, to_json

PROTOCOL = 2
"""Version of statuses and orders; members of another version are rejected."""

LEASE_LINGER = 0.2
"""Seconds for which a lease outlives its connection: a reset is not a lost node."""

HOST_HEAD_START = 0.3
"""Seconds for which other nodes leave the election to the node that hosts the store."""

PROBE_TIMEOUT = 5.0
"""Seconds for the address of a `ProbePeers` order to accept the connection."""

_T = TypeVar("_T")

_SIZE_MAX = 64 * 1024
_FAILURES_MAX = 8
_ROOT_MAX = 16 * 1024
_OTHER_MAX = 2 * 1024
_TEXTS_MAX = (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32)
_TAIL_MAX = 20
_NAME_MAX = 255
_POLICY_MAX = 32
# Numbers continue from other members' numbers.  Some JSON readers round larger numbers.
_NUMBER_MAX = 1 << 52


class MessageError(ValueError):
    """Bytes from the store that are no valid status or order; the message is one line."""


class MemberPhase(StrEnum):
    """What a member is doing."""

    JOINING = "joining"
    """No placement, and no workers."""
    RUNNING = "running"
    """It runs, or is about to start, the workers of its placement."""
    FAILING = "failing"
    """One of these workers has failed, and the others are being stopped."""
    STOPPED = "stopped"
    """No worker of the round is left, and not all have succeeded."""
    SUCCEEDED = "succeeded"
    """All workers of the round have succeeded."""


class MemberStatus(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The whole state of a member.

    A flat record on the wire, hence its many fields: each changes on its own, and readers need
    all of them together.  A field that has its default is not written.

    Attributes:
        protocol: always written: the default of another version is another one.
        serial: grows with each status of the member.
        address, port: where other nodes reach it; reserved for the workers of the next round.
        is_host: whether it hosts the store.
        minimum, maximum: nodes of the job, by its own command line.
        program, uid: what its workers run, and as which user; empty and -1 if not known.
        moves: how often it has changed the store since it took its placement.
        stopped_round: no worker of this round or of an earlier one runs there.
        probed_round, probe_error: round of its last `ProbePeers` order, and why the probe failed.
        failures, is_permanent, permanent_reason, exit_code, runtime, first_success: as in the last
            `RoundStopped` of the round.
        has_progress: whether a worker of the round has reported a step there.
        acked: term and serial of the last order of this store that it had seen.
        members_done: members of the round that have left after their success; all of them once the
            job is about to end.
        peers_finished: workers of other nodes of the round that it knows to have finished.
        was_leased: whether its lease at the former store still stood when it came to this one.
        pending_restart: a restart that was announced after the round's failure.
        is_change_pending: whether it has seen that joiners are to replace the round.
        change: number of the last such change that it has seen; -1 for none.
        preemption: the notice of a preemption that it has, by its own clock.
        agreed_change: number of the last change to which all of its workers have agreed.
        restart_reason: why it wants another attempt in place of the round; empty if it does not.
        exclusion: why it takes part in no round for a time; empty if it does.
        outcome: how the job has ended, if it has seen that.
        drain_reason: why it stops its workers, and leaves then; empty if it does not.
        is_leaving: it takes part no more, and none of its workers is left.
        policy: its settings that all nodes should have alike and are not the defaults, by name.
        stop_time: seconds that a stop of its workers takes at most.
        sent_at: Unix seconds by its own clock.
        clock: Unix time at which the monotonic clock of its host was 0: the same for all nodes of a
            host, and another after its clock was set.
    """

    protocol: int = field(default_factory=lambda: PROTOCOL)
    serial: int
    node: base.NodeInfo
    address: str
    port: int
    preferred_rank: int | None = None
    is_host: bool = False
    minimum: int = 1
    maximum: int = 1
    program: str = ""
    uid: int = -1
    phase: MemberPhase = MemberPhase.JOINING
    placement: base.Placement | None = None
    moves: int = 0
    stopped_round: int = -1
    probed_round: int = -1
    probe_error: str = ""
    failures: tuple[Failure, ...] = ()
    is_permanent: bool = False
    permanent_reason: str = ""
    exit_code: int = 1
    runtime: float = 0.0
    first_success: tuple[int, float] | None = None
    has_progress: bool = False
    acked: tuple[int, int] = (0, 0)
    members_done: int = 0
    peers_finished: int = 0
    was_leased: bool = False
    pending_restart: base.RestartCause | None = None
    is_change_pending: bool = False
    change: int = -1
    agreed_change: int = -1
    preemption: base.ChangePending | None = None
    restart_reason: str = ""
    exclusion: str = ""
    outcome: JobOutcome | None = None
    drain_reason: str = ""
    is_leaving: bool = False
    policy: dict[str, str] = {}
    stop_time: float = 0.0
    sent_at: float = 0.0
    clock: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether workers run there, or are about to start."""
        return self.phase in (MemberPhase.RUNNING, MemberPhase.FAILING)

    @property
    def is_in_round(self) -> bool:
        """Whether its agent follows a round: its workers run, or all of them have succeeded."""
        return self.is_busy or self.phase is MemberPhase.SUCCEEDED

    @property
    def round(self) -> int:
        """The round of the last placement; -1 for none."""
        return -1 if self.placement is None else self.placement.round


# ------------------------------------------------------------------- orders


class WaitForNodes(Struct, frozen=True, tag=True, gc=False):
    """Wait: there are not enough nodes yet."""

    forming: RoundForming


class StandBy(Struct, frozen=True, tag=True, gc=False):
    """Wait: the round has its maximum of nodes, or another member holds the rank (`why`)."""

    round: int
    maximum: int
    why: str = ""


class ProbePeers(Struct, frozen=True, tag=True, gc=False):
    """Probe whether this address is reachable, before joining `round`."""

    round: int
    address: str
    port: int


class Reject(Struct, frozen=True, tag=True, gc=False):
    """Leave: this member can never take part."""

    why: str


class MembersDone(Struct, frozen=True, tag=True, gc=False):
    """Remember how many members of `round` have left after their success.

    They write no status any more, so another coordinator could not learn it from them.  When all
    members of the round have succeeded and may meet at another store, `count` is their number,
    before the end of the job is recorded: another coordinator then ends the job too.

    A member whose workers run also learns how many `workers` of the others have finished, and how
    many seconds `ago` the first member has succeeded, even if it is gone.
    """

    round: int
    count: int
    workers: int = 0
    ago: float = 0.0


OrderBody = (
    base.StartRound
    | base.StopRound
    | base.RestartPending
    | base.ChangePending
    | base.EndJob
    | WaitForNodes
    | StandBy
    | ProbePeers
    | Reject
    | MembersDone
)


class Order(Struct, frozen=True, omit_defaults=True, gc=False):
    """What the coordinator of `term` wants of one member; `serial` grows with each.

    `history` is the count of its restart budget: this node may be the next to coordinate.
    """

    term: int
    serial: int
    body: OrderBody
    history: RestartHistory | None = None


class DetectorPort(Struct, frozen=True):
    """Where a leader's members connect to it at an engine, and the id of its lease there."""

    address: str
    port: int
    token: str
    lease_id: str


class _Record(Struct, frozen=True, omit_defaults=True):
    @classmethod
    def decode(cls, text: bytes | None) -> Self | None:
        """Return the record; None if there is none or it cannot be read."""
        try:
            return _decode(text or b"", cls)
        except MessageError:
            return None


class LeaderRecord(_Record, frozen=True):
    """The value of the key `coordinator`: the elected member, its host's name, its term.

    The term is 0 until the member has taken its own; `detector` comes with the term.
    """

    term: int
    member: str
    name: str
    detector: DetectorPort | None = None


class RoundRecord(_Record, frozen=True):
    """The value of the key `round`: the last round, for a coordinator that meets no member of it.

    `is_open`: workers of the round may run.  `history`: the count of the restart budget.
    `written_at`: by the clock of the coordinator's host, in Unix seconds.  `preemption`: the notice
    that its nodes have, after which no round follows; its `until` means nothing to other hosts.
    """

    term: HistoryCount
    round: HistoryCount
    attempt: HistoryCount
    changes: HistoryCount
    is_open: bool
    history: RestartHistory | None
    written_at: float = 0.0
    formed_by: str = ""
    preemption: base.ChangePending | None = None


class _Version(Struct):
    protocol: int = PROTOCOL


def encode(value: MemberStatus | Order | _Record) -> bytes:
    """Return the JSON of a value that is written into the store."""
    return to_json(value)


def decode_status(text: bytes) -> MemberStatus:
    """Read a status; raise `MessageError` if it is none, too large, or impossible."""
    try:
        status = _decode(text, MemberStatus)
    except MessageError:
        if problem := version_problem(_decode(text, _Version).protocol):
            raise MessageError(problem) from None
        raise
    if problem := _problem(status):
        raise MessageError(problem)
    return status


def decode_order(text: bytes) -> Order:
    """Read an order; raise `MessageError` if it is none, or too large."""
    return _decode(text, Order)


def _decode(text: bytes, kind: type[_T]) -> _T:
    if len(text) > _SIZE_MAX:
        raise MessageError(f"{len(text)} bytes are more than {_SIZE_MAX}")
    try:
        return from_json(text, kind)
    except ValueError as error:
        raise MessageError(str(error)) from None


def version_problem(protocol: int) -> str:
    """Return that a member speaks another version of the protocol; empty if it does not."""
    return (
        ""
        if protocol == PROTOCOL
        else f"it speaks version {protocol} of the protocol, not {PROTOCOL}"
    )


def _problem(status: MemberStatus) -> str:
    """Return a value that no member would write; empty if there is none."""
    node, placement, pending = status.node, status.placement, status.pending_restart
    if node.nproc < 1:
        return f"nproc is {node.nproc}"
    if not 1 <= status.minimum <= status.maximum:
        return f"nnodes is {status.minimum}:{status.maximum}"
    if max(map(len, (node.name, node.role, status.address))) > _NAME_MAX:
        return f"a name has more than {_NAME_MAX} characters"
    if len(status.policy) > _POLICY_MAX:
        return f"it has {len(status.policy)} settings"
    numbers = [node.nproc, status.serial, *status.acked]
    numbers += [status.stopped_round, status.probed_round, status.members_done]
    numbers += [status.change, status.agreed_change, status.peers_finished]
    if status.preemption is not None and not abs(status.preemption.until) <= _NUMBER_MAX:
        return f"its preemption is at {status.preemption.until}"
    if placement is not None:
        numbers += [placement.round, placement.attempt, placement.restarts, placement.changes]
        span = placement.span
        if not 0 <= span.group_rank < span.group_world_size:
            return f"group rank {span.group_rank} of {span.group_world_size}"
    if pending is not None:
        numbers += [pending.attempt, pending.restarts]
    if max(map(abs, numbers)) > _NUMBER_MAX:
        return "a number is too large"
    return ""


# --------------------------------------------------------------- truncation


def truncate_failures(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Return the first failures, truncated to fit: the first, the root cause, keeps most text."""
    return tuple(
        truncate_failure(failure, _OTHER_MAX if index else _ROOT_MAX)
        for index, failure in enumerate(failures[:_FAILURES_MAX])
    )


def truncate_failure(failure: Failure, room: int = _OTHER_MAX) -> Failure:
    """Return a failure truncated to `room` bytes of JSON, by default for an order to all nodes."""
    short = failure
    for limit in _TEXTS_MAX:
        short = _truncate(failure, limit)
        if len(to_json(short)) <= room:
            break
    return short


def end_of(text: str, limit: int = 1024) -> str:
    """Return the end of a text."""
    return text[-limit:]


def _truncate(failure: Failure, limit: int) -> Failure:
    error = failure.error
    if error is not None:
        trace = error.traceback
        # The end of a traceback has the exception.
        error = with_fields(
            error,
            message=end_of(error.message, limit),
            traceback=None if trace is None else end_of(trace, limit),
            path=end_of(error.path, limit),
        )
    path = failure.stderr_path
    lines = min(_TAIL_MAX, limit // 64)
    tail = failure.stderr_tail[max(0, len(failure.stderr_tail) - lines) :]
    return with_fields(
        failure,
        host=end_of(failure.host, min(limit, _NAME_MAX)),
        error=error,
        message=end_of(failure.message, limit),
        stderr_tail=tuple(end_of(line, limit) for line in tail),
        stderr_path=None if path is None else end_of(path, limit),
        notes=tuple(end_of(note, limit) for note in failure.notes[: min(lines, _FAILURES_MAX)]),
        reason=failure.reason[:limit],
        cause=failure.cause[:limit],
    )
