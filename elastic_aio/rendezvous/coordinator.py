"""The coordinator of a job: decides who takes part in which round, and how the job ends.

Pure.  Statuses of members and the time (monotonic seconds of the caller) come in;
`decide` returns effects, mostly orders.  A coordinator can be replaced at any moment, so
it keeps nothing that its successor could not learn from the members, or, if the nodes of
the last round are all gone, from the `RoundRecord` in the store.

Rules
=====

* A round is a set of members with consecutive group ranks.  There is one round at a
  time; the next one has a higher number.  It begins when every member has reported that
  no worker of an earlier round is left, or, with `overlap`, after each member's own stop.
* The first round is formed when the maximum of nodes has joined, or when there are
  enough and the last call is over.  Later rounds are formed at once.
* When a member of the round leaves or is lost before its workers have succeeded, the
  remaining members and the waiting ones form another round.  If they are too few, they
  stop their workers and wait.
* Joiners below the maximum first probe whether they reach the other nodes, while the
  round runs on; a joiner that fails in this costs nothing.  Above the maximum, and once
  a member has succeeded, joiners stand by.
* A failure on any member stops the round everywhere.  When all of its workers are gone,
  the restart policy is consulted once, with the earliest failure.  Changes of the
  membership cost no restart, but rounds that lose a node have a budget of their own.
* A member can request another round of the same members.  It costs no restart.
* If a member of the round has left or was lost, the restart policy is not consulted: the
  other members' failures are a consequence, even though they are reported first.  There
  are two exceptions: a code of `never_on`, and a lost member that had acknowledged the
  order to stop, so that it was alive after the failure.
* A worker that was ended by SIGTERM may be the first sign of a node that leaves: the
  signal reaches the worker before the agent.  Its failure is judged `LEAVING_S` later.
* A joiner whose host has left soon after it joined stands by for a growing time.
* When all members of the round have succeeded, or the policy grants no further
  attempt, or nodes are missing for too long, the job ends with one outcome for all.

Waiting
=======

* No phase waits without an end.  Members obey their orders or count as lost, which is a
  change of the membership (see `outbox`).  RECOVERING ends by the recovery timeout,
  FORMING by the join timeout or the last call, and BACKING_OFF by its delay.  A callback
  that does not return within `DECIDE_TIMEOUT` ends the job.
* What is waited for is published: the nodes that are missing as `RoundForming`, the
  delay as `Restarting`, everything else, once it takes long, as `RoundWaiting`.

Another coordinator
===================

* It recovers the newest round that a member reports (see `formation`).  If all members
  of it return, the round runs on; otherwise they form another one after a while.
* A predecessor's `StartRound` order may still be in flight.  A member that acts on it
  diverges from the new coordinator's state; the new coordinator then forms another
  round.
* A restart that was announced to a member that is still present is not decided again,
  but its delay begins anew.  A failure that no present member has seen or was notified
  of costs no restart.
* In a network partition each side may have a coordinator and a round.  When they meet
  again, one round is recovered, and the members of the other are stopped and taken in.
  Numbers of rounds, attempts and restarts continue from the highest that a member has
  seen.
* How many members have left after their success is sent to those that stay.  A member
  that leaves while there is no coordinator counts as lost.

::

    phase        what happens                               next
    -----------  -----------------------------------------  -----------
    RECOVERING   no member reports a placement              FORMING
                 all of the newest round have returned, or
                 the recovery timeout is over               RUNNING
                 a member of it reports the outcome         ENDING
    FORMING      enough nodes, all of them stopped, and
                 full, not the first round, or last call
                 over                                       RUNNING
                 too few for the join timeout               ENDING
                 a placement is reported before the first
                 round                                      RECOVERING
    RUNNING      a member's worker has failed               STOPPING
                 all have succeeded                         ENDING
                 a member is gone or requests a restart,
                 or joiners are ready                       FORMING
    STOPPING     all workers of the round are gone          DECIDING, or at once:
    DECIDING     the user's callback has answered           BACKING_OFF or ENDING
                 it has not returned in time                ENDING
    STOPPING     ... and no member with a failure remains   FORMING
    BACKING_OFF  the delay is over                          FORMING
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from elastic_aio.node_events import NodeLeft, NodeLost
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.admission import admit, find_rank_holders, wait_for_ranks
from elastic_aio.rendezvous.base import StopRound
from elastic_aio.rendezvous.formation import form_when_possible, recover_round
from elastic_aio.rendezvous.members import CoordinatorEffect, MemberRecord, RoundSettings
from elastic_aio.rendezvous.messages import MemberStatus, RoundRecord
from elastic_aio.rendezvous.state import CoordinatorPhase, CoordinatorState
from elastic_aio.rendezvous.supervision import apply_decision, back_off, decide_restart, supervise
from elastic_aio.spec.restart import RestartAction, RestartBudget


class Coordinator:
    """Decides about the rounds of one job; performs nothing.

    Pass all that is known to `on_status` and `on_gone`, then call `decide` and perform
    the effects that it returns; call it again at `deadline` at the latest.
    """

    def __init__(
        self,
        settings: RoundSettings,
        budget: RestartBudget,
        *,
        name: str,
        term: int,
        now: float,
        former: RoundRecord | None = None,
        former_age: float = 0.0,
    ) -> None:
        """Begin without members.

        `name` names the member that coordinates and the store, `term` is higher than that
        of every former coordinator at this store, and `now` is in monotonic seconds.  `former`
        is the last round at this store, as it was recorded `former_age` seconds ago.
        """
        self._state = CoordinatorState(settings, budget, name, term, now, former, former_age)
        self._joined: list[MemberRecord] = []
        self._by_host: dict[str, list[MemberRecord]] = {}
        self._departed: list[tuple[MemberRecord, bool]] = []

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<Coordinator {state.name} of term {self.term}: {state.phase.value},"
            f" round {self.round}, {len(state.members)} members>"
        )

    # --------------------------------------------------------------- properties

    @property
    def phase(self) -> CoordinatorPhase:
        """The present phase."""
        return self._state.phase

    @property
    def term(self) -> int:
        """The term in which it gives orders."""
        return self._state.outbox.term

    @property
    def round(self) -> int:
        """Number of the last round, -1 before the first."""
        return self._state.round.number

    @property
    def is_round_open(self) -> bool:
        """Whether workers of the last round may run."""
        stopped = CoordinatorPhase.FORMING, CoordinatorPhase.BACKING_OFF, CoordinatorPhase.ENDING
        return self.round >= 0 and self.phase not in stopped

    def round_record(self, written_at: float) -> RoundRecord:
        """Return the last round, as of now; `written_at` is in Unix seconds."""
        state = self._state
        return RoundRecord(
            term=self.term,
            round=self.round,
            attempt=self.attempt,
            changes=state.round.changes,
            is_open=self.is_round_open,
            history=state.budget.history(state.deadlines.now),
            written_at=written_at,
        )

    @property
    def attempt(self) -> int:
        """Number of the last attempt, -1 before the first."""
        return self._state.round.attempt

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job has ended, if it has."""
        return self._state.outcome

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and all members with an `EndJob` order have left."""
        state = self._state
        is_ending = state.phase is CoordinatorPhase.ENDING
        return is_ending and not any(record.has_end_order for record in state.members.values())

    @property
    def deadline(self) -> float | None:
        """When `decide` must be called even if nothing happens."""
        return self._state.deadlines.earliest

    # ------------------------------------------------------------------- inputs

    def on_status(self, member: str, status: MemberStatus, now: float) -> None:
        """Take the present status of a member; an older one, or of another node, is dropped.

        `now` is when it arrived, in monotonic seconds.
        """
        state = self._state
        record = state.members.get(member)
        if record is None:
            if status.is_leaving:
                return
            record = MemberRecord(member, status, now, status.node.name)
            state.members[member] = record
            self._joined.append(record)
            neighbors = self._by_host.setdefault(status.node.name, [])
            neighbors.append(record)
            for one in neighbors if len(neighbors) > 1 else ():
                one.name = f"{one.status.node.name} (pid {one.status.node.pid})"
        elif status.serial <= record.status.serial or status.node != record.status.node:
            return
        record.observe(status, now)
        state.outbox.observe(record)
        if status.is_leaving:
            self.on_gone(member, is_lost=False)

    def on_gone(self, member: str, *, is_lost: bool, why: str = "its lease has ended") -> None:
        """Take the end of a member: it has left, or is lost because of `why`."""
        state = self._state
        record = state.members.pop(member, None)
        if record is None:
            return
        state.outbox.discard(member)
        neighbors = self._by_host[record.status.node.name]
        neighbors.remove(record)
        if not neighbors:
            del self._by_host[record.status.node.name]
        self._departed.append((record, is_lost))
        if member in state.round.placements and state.has_succeeded(record):
            state.round.succeeded_and_left.add(member)
        elif member in state.round.placements:
            state.add_change_reason(f"{record.name} {'is lost' if is_lost else 'has left'}")
            state.round.has_lost_member = state.round.has_lost_member or is_lost
            # A member that has seen the order to stop was alive after the failure.
            saw_failure = isinstance(record.sent, StopRound) and record.has_acked
            if not (is_lost and saw_failure):
                state.round.is_excused = True
        if state.phase is CoordinatorPhase.ENDING:
            return  # JobFinished is the last event
        if is_lost:
            state.outbox.publish(NodeLost(name=record.name, member=member, why=why))
        else:
            why = "it has left by itself"
            state.outbox.publish(NodeLeft(name=record.name, member=member, why=why))

    def on_decision(self, attempt: int, decision: RestartAction | str) -> None:
        """Take the answer of the user's callback; text is the error that it raised."""
        if self._state.phase is CoordinatorPhase.DECIDING and attempt == self.attempt:
            self._state.restart.decision = decision

    # ---------------------------------------------------------------- decisions

    def decide(self, now: float) -> list[CoordinatorEffect]:
        """Return the effects to perform: at most one order for each member."""
        state = self._state
        state.deadlines.now = now
        for record, why in state.outbox.check(now):
            self.on_gone(record.member, is_lost=True, why=why)
            if state.phase is not CoordinatorPhase.ENDING:
                state.outbox.dismiss(record, why)
        for record, is_lost in self._departed:
            if not (record.status.is_leaving or state.is_stopped(record)):
                # One that has gone to another store keeps its workers on its way.
                settings = state.settings
                state.fence(settings.fence if is_lost else settings.heartbeat_timeout)
            state.visits.observe_departure(record, now)
        self._departed.clear()
        find_rank_holders(state)
        self._admit_joined()
        while True:
            before = state.phase, self.round
            state.deadlines.earliest = None
            if state.phase is not CoordinatorPhase.ENDING:
                self._STEPS[state.phase](state)
            if before == (state.phase, self.round):
                break
        wait_for_ranks(state)
        state.publish_waiting()
        return state.outbox.drain(state.budget.history(now))

    def _admit_joined(self) -> None:
        state = self._state
        if state.phase is CoordinatorPhase.RECOVERING:
            # First: a recovered round brings its own minimum and maximum.
            recover_round(state)
        if state.phase in (CoordinatorPhase.RECOVERING, CoordinatorPhase.ENDING):
            return
        joined, self._joined = self._joined, []
        admit(state, joined)

    _STEPS: ClassVar[dict[CoordinatorPhase, Callable[[CoordinatorState], None]]] = {
        CoordinatorPhase.RECOVERING: recover_round,
        CoordinatorPhase.FORMING: form_when_possible,
        CoordinatorPhase.RUNNING: supervise,
        CoordinatorPhase.STOPPING: decide_restart,
        CoordinatorPhase.DECIDING: apply_decision,
        CoordinatorPhase.BACKING_OFF: back_off,
    }
