"""The state of a coordinator: its members, the current round, and a pending restart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from elastic_aio.events import JobFinished
from elastic_aio.node_events import NodeRefused, RoundForming, RoundWaiting
from elastic_aio.outcome import Failure, JobOutcome, JobState
from elastic_aio.rendezvous.base import EndJob, Placement, RestartCause, StartRound
from elastic_aio.rendezvous.members import NAMES_MAX, MemberRecord, RoundSettings
from elastic_aio.rendezvous.messages import MemberPhase, RoundRecord, truncate_failures
from elastic_aio.rendezvous.outbox import Outbox, Waiting
from elastic_aio.spec.restart import DECIDE_TIMEOUT, RestartAction, RestartBudget

_NOTICE_S = 5.0
"""Seconds of waiting for `restart.decide` before that is published."""
_REPEAT_S = 15.0
"""Seconds between two publications of what is waited for."""

_SETTLED_S = 60.0
"""Seconds after which the stay of a joiner is no short one; the longest delay of the next."""
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


class Deadlines:
    """The time of the last call, and the time at which the next call is due."""

    def __init__(self, now: float) -> None:
        """Begin at `now`, monotonic seconds."""
        self.now = now
        self.earliest: float | None = None

    def arm(self, when: float) -> bool:
        """Request a call at `when` and return True; return False if `when` has passed."""
        if self.now >= when:
            return False
        self.earliest = when if self.earliest is None else min(when, self.earliest)
        return True


class FormationTimer:
    """Since when the coordinator waits for nodes, and what it published last about it."""

    def __init__(self, now: float) -> None:
        """Begin at `now`."""
        self.since = now
        self.enough_since: float | None = None
        self.published: RoundForming | None = None
        self.published_at = now


class RoundState:
    """The last round; number and attempt are -1 before the first one."""

    def __init__(self, placements: Mapping[str, Placement], names: Mapping[str, str]) -> None:
        """Begin a round; without placements, the state before the first one."""
        first = next(iter(placements.values()), None)
        self.number = -1 if first is None else first.round
        self.formed_by = "" if first is None else first.formed_by
        self.attempt = -1 if first is None else first.attempt
        self.changes = 0 if first is None else first.changes
        self.placements = dict(placements)
        self.names = dict(names)
        """Host name of each member, kept after the member has gone."""
        self.succeeded_and_left: set[str] = set()
        self.members_done = 0
        """Members that left after their success before this coordinator was elected."""
        self.has_lost_member = False
        """Whether a member was lost before its workers had succeeded."""
        self.is_excused = False
        """Whether the failures of the round may be a consequence of a member that is gone."""
        self.change_reasons: dict[str, None] = {}
        """Why another round is needed; ordered, without repetition."""
        self.is_restart_requested = False
        """Whether another round is needed only because a member has requested one."""
        self.ready_since: float | None = None
        """Since when a joiner could be taken in; None while none could."""


@dataclass(slots=True)
class RestartState:
    """The end of the last round and what follows it."""

    cause: RestartCause | None = None
    """Why another attempt follows, once that is decided."""
    failures: tuple[Failure, ...] = ()
    """Those of the last round, the root cause first."""
    stop_reason: str = ""
    """Sent to members that must stop."""
    decision: RestartAction | str | None = None
    """The callback's answer; text is the error that it raised."""
    stopped_at: float | None = None
    """When all workers of the failed round had stopped."""
    restart_at: float = 0.0
    """When the delay is over."""
    decide_since: float = 0.0
    """When the callback was called."""


class Visits:
    """Short stays of joiners, by the name of their host: how long the next one waits."""

    def __init__(self) -> None:
        """Begin without any."""
        self._short: dict[str, tuple[int, float]] = {}
        """How many short stays there were, and when the last one ended."""

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
    """The state that all phases of a coordinator read and change."""

    def __init__(
        self,
        settings: RoundSettings,
        budget: RestartBudget,
        name: str,
        term: int,
        now: float,
        former: RoundRecord | None,
        former_age: float,
    ) -> None:
        """Begin without members; for the arguments see `Coordinator`."""
        self.phase = CoordinatorPhase.RECOVERING
        self.settings = settings
        self.budget = budget
        self.name = name
        self.created_at = now
        self.deadlines = Deadlines(now)
        self.outbox = Outbox(term, settings.order_timeout)
        self.members: dict[str, MemberRecord] = {}
        """The present members, in the order of their arrival."""
        self.round = RoundState({}, {})
        self.former = former
        """The last round of former coordinators; open until its loss is counted."""
        self.former_age = former_age
        self.restart = RestartState()
        self.timer = FormationTimer(now)
        self.fenced_until = -math.inf
        """Until when workers may live on nodes that are gone."""
        self.outcome: JobOutcome | None = None
        self.differences: set[str] = set()
        """Settings that differ between nodes, as published."""
        self.visits = Visits()
        self._waiting_published_at = -math.inf

    # ------------------------------------------------------------------ members

    def admitted(self) -> list[MemberRecord]:
        """Return the members that may take part, now or later."""
        return [record for record in self.members.values() if not record.is_rejected]

    def eligible(self) -> list[MemberRecord]:
        """Return the members that may take part now."""
        return [record for record in self.admitted() if record.rank_holder is None]

    def active(self) -> list[MemberRecord]:
        """Return the present members of the round."""
        return [self.members[member] for member in self.round.placements if member in self.members]

    def unplaced(self) -> list[MemberRecord]:
        """Return the eligible members without a placement in the round."""
        return [record for record in self.eligible() if record.member not in self.round.placements]

    # --------------------------------------------------------------- one member

    def is_stopped(self, record: MemberRecord) -> bool:
        """Whether no workers of this round or of an earlier one run on a member, nor will.

        A `StartRound` order of a former coordinator, or to a former session of the member,
        may still be on its way.  The member drops it once it has seen an order of this
        coordinator.  Before the first round at a store there is no such order.
        """
        status = record.status
        is_first = self.outbox.term == 1 and self.round.number < 0
        is_placed = record.member in self.round.placements
        is_open = is_placed and status.stopped_round < self.round.number
        return not (status.is_busy or is_open) and (is_first or record.is_synchronized)

    def is_elsewhere(self, placement: Placement) -> bool:
        """Whether a round was formed at another store than that of this coordinator."""
        return placement.store != self.name.rpartition("@")[2]

    def has_placement(self, record: MemberRecord) -> bool:
        """Whether a member has taken its placement in the round."""
        placement = record.status.placement
        return placement is not None and (placement.round, placement.formed_by) == (
            self.round.number,
            self.round.formed_by,
        )

    def has_diverged(self, record: MemberRecord) -> bool:
        """Whether a member will never take its placement in the round.

        It has taken one in a round that is not older, formed by a coordinator in another
        partition; or it has dropped the order, because its reserved port had changed.
        """
        if self.has_placement(record):
            return False
        if record.status.round >= self.round.number:
            return True
        return record.begun is not None and record.status.acked >= record.begun

    def placement_pending(self, record: MemberRecord) -> bool:
        """Whether a member's last order was to start the round, and no reply has come."""
        is_ordered = record.member in self.round.placements and isinstance(record.sent, StartRound)
        return is_ordered and not self.has_placement(record) and not self.has_diverged(record)

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
        if status.phase is MemberPhase.STOPPED:
            return bool(status.failures) or status.is_permanent
        return status.phase is MemberPhase.FAILING

    def has_succeeded(self, record: MemberRecord) -> bool:
        """Whether all workers of the round on a member have succeeded."""
        return record.status.phase is MemberPhase.SUCCEEDED and self.has_placement(record)

    # ------------------------------------------------------------------ waiting

    def publish_waiting(self) -> None:
        """Publish what the coordinator has been waiting for, once that takes long."""
        deadlines, outbox = self.deadlines, self.outbox
        waiting, outbox.waiting = outbox.waiting, None
        due = self._waiting_published_at + _REPEAT_S
        if self.phase is CoordinatorPhase.DECIDING:
            since = self.restart.decide_since
            waiting = Waiting("restart.decide has not returned", since, since + DECIDE_TIMEOUT)
            due = max(since + _NOTICE_S, due)
        if outbox.next_check < math.inf:
            deadlines.arm(outbox.next_check)
        if waiting is None or self.phase is CoordinatorPhase.ENDING or deadlines.arm(due):
            return
        self._waiting_published_at = deadlines.now
        deadlines.arm(deadlines.now + _REPEAT_S)
        waited, left = deadlines.now - waiting.since, waiting.until - deadlines.now
        outbox.publish(
            RoundWaiting(
                phase=self.phase.value,
                what=waiting.what,
                waited=round(waited, 1),
                time_left=round(left, 1),
            )
        )

    # ------------------------------------------------------------------ numbers

    @property
    def next_round(self) -> int:
        """A number above that of every round of this store, or that a member has seen."""
        seen = (max(one.status.round, one.status.stopped_round) for one in self.members.values())
        former = -1 if self.former is None else self.former.round
        return max(self.round.number, former, *seen, -1) + 1

    def catch_up(self) -> None:
        """Raise attempt, changes and restarts to the highest that there were."""
        if self.former is not None:
            self.round.attempt = max(self.former.attempt, self.round.attempt)
            self.round.changes = max(self.former.changes, self.round.changes)
        for record in self.members.values():
            if (placement := record.status.placement) is not None:
                self.round.attempt = max(placement.attempt, self.round.attempt)
                self.round.changes = max(placement.changes, self.round.changes)
                self.resume_restarts(placement.restarts)

    def resume_restarts(self, restarts: int) -> None:
        """Count at least that many restarts."""
        if restarts > self.budget.restarts:
            self.budget.resume(restarts)

    def count_restart(self, number: int) -> None:
        """Count a restart that begins now, the `number`-th of the job, from 1."""
        self.resume_restarts(number - 1)
        if self.budget.restarts < number:
            self.budget.record(self.deadlines.now)

    # ------------------------------------------------------------------ changes

    def fence(self, seconds: float) -> None:
        """Start no round for some seconds, in which nodes that are gone stop their workers."""
        self.fenced_until = max(self.deadlines.now + seconds, self.fenced_until)

    def begin_round(self, placements: Mapping[str, Placement]) -> None:
        """Make `placements` the current round."""
        self.round = RoundState(placements, {one: self.members[one].name for one in placements})
        self.restart.cause = None
        self.restart.failures = ()
        self.restart.stopped_at = None
        self.phase = CoordinatorPhase.RUNNING

    def wait_for_nodes(self) -> None:
        """Form another round as soon as there are enough nodes."""
        self.phase = CoordinatorPhase.FORMING
        self.timer = FormationTimer(self.deadlines.now)

    def refuse(self, record: MemberRecord, why: str) -> None:
        """Refuse a member, temporarily or permanently."""
        record.refused_because, record.refused_at = why, self.deadlines.now
        self.outbox.publish(NodeRefused(name=record.name, member=record.member, why=why))

    def add_change_reason(self, why: str) -> None:
        """Note why another round is needed."""
        self.round.change_reasons[why] = None

    def next_cause(self, why: str = "") -> RestartCause | None:
        """Return why another attempt follows; None before the first one."""
        is_first = self.round.number < 0 and not self.round.change_reasons
        if self.restart.cause is not None or is_first:
            return self.restart.cause
        reasons = [*self.round.change_reasons, *([why] if why else [])]
        text = "; ".join(reasons[:NAMES_MAX]) or "other nodes take part"
        is_requested = self.round.is_restart_requested and not why
        return RestartCause(
            self.round.attempt + 1, text, self.budget.restarts, is_requested=is_requested
        )

    # ------------------------------------------------------------------ the end

    def fail_job(self, why: str, exit_code: int | None = None) -> None:
        """End the job by a failure; by default with the exit code of its root cause."""
        failures = self.restart.failures
        if exit_code is None:
            exit_code = (failures[0].status.shell_code if failures else None) or 1
        self.end_job(JobOutcome(JobState.FAILED, why, exit_code, failures=failures))

    def end_job(self, outcome: JobOutcome) -> None:
        """End the job for all present members."""
        failures = truncate_failures(outcome.failures)
        outcome = replace(outcome, restarts=self.budget.restarts, failures=failures)
        self.phase = CoordinatorPhase.ENDING
        self.outcome = outcome
        for record in self.admitted():
            record.has_end_order = True
            self.outbox.send(record, EndJob(outcome))
        self.outbox.publish(
            JobFinished(
                attempt=max(0, self.round.attempt),
                state=outcome.state,
                why=outcome.why,
                exit_code=outcome.exit_code,
                duration=self.deadlines.now - self.created_at,
                restarts=outcome.restarts,
            )
        )
