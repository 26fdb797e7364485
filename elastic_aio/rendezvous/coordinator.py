"""The coordinator of a job: decides who takes part in which round, and how the job ends.

Pure.  Statuses of members and the time come in (see `CoordinatorState`), and `decide`
returns effects, mostly orders.  A coordinator can be replaced at any moment, so it keeps
nothing that its successor could not learn from the members, or, if the nodes of the last
round are all gone, from the `RoundRecord` in the store.

Rules
=====

* A round is a set of members with consecutive group ranks.  There is one round at a
  time; the next one has a higher number.  It begins when every member has reported that
  no worker of an earlier round is left, or, with `overlap`, after each member's own stop.
* The first round is formed when the maximum of nodes has joined, or when there are
  enough and the last call is over.  Later rounds are formed at once, unless joiners are
  their only reason.
* When a member of the round leaves or is lost before its workers have succeeded, the
  remaining members and the waiting ones form another round.  If they are too few, they
  stop their workers and wait.
* Joiners below the maximum first probe whether they reach the other nodes, while the
  round runs on; a joiner that fails in this costs nothing.  Those that succeed wait for
  others, `scale_up_delay` from the latest of them, and the members of the round learn of it;
  when all vacant places are filled, they wait no longer.  Above the maximum, and once a
  member has succeeded, joiners stand by.
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
* Members whose workers run learn, a second later, that another member has succeeded: their
  workers may wait for one that has exited too early.
* A joiner whose host has left soon after it joined stands by for a growing time.
* When all members of the round have succeeded, or the policy grants no further
  attempt, or nodes are missing for too long, the job ends with one outcome for all.

Waiting
=======

* No phase waits without an end.  Members obey their orders or count as lost, which is a
  change of the membership (see `members`); all other waits have a time (see the table).
* What is waited for is published: the nodes that are missing as `RoundForming`, the
  delay as `Restarting`, everything else, once it takes long, as `RoundWaiting`.

Another coordinator
===================

* It recovers the newest round that a member reports (see `formation`).
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
                 or the wait of ready joiners is over       FORMING
    STOPPING     all workers of the round are gone          DECIDING, or at once:
    DECIDING     the user's callback has answered           BACKING_OFF or ENDING
                 it has not returned in time                ENDING
    STOPPING     ... and no member with a failure remains   FORMING
    BACKING_OFF  the delay is over                          FORMING
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_aio.rendezvous.admission import admit, find_rank_holders, wait_for_ranks
from elastic_aio.rendezvous.formation import form_when_possible, recover_round
from elastic_aio.rendezvous.members import CoordinatorEffect
from elastic_aio.rendezvous.state import CoordinatorPhase, CoordinatorState
from elastic_aio.rendezvous.supervision import apply_decision, back_off, decide_restart, supervise

_STEPS: dict[CoordinatorPhase, Callable[[CoordinatorState], None]] = {
    CoordinatorPhase.RECOVERING: recover_round,
    CoordinatorPhase.FORMING: form_when_possible,
    CoordinatorPhase.RUNNING: supervise,
    CoordinatorPhase.STOPPING: decide_restart,
    CoordinatorPhase.DECIDING: apply_decision,
    CoordinatorPhase.BACKING_OFF: back_off,
}


def decide(state: CoordinatorState, now: float) -> list[CoordinatorEffect]:
    """Return the effects to perform: at most one order for each member.

    `now` is in monotonic seconds.
    """
    state.now = now
    for record, why in state.outbox.check(now):
        state.on_gone(record.member, now, is_lost=True, why=why)
    find_rank_holders(state)
    before: tuple[CoordinatorPhase, int] | None = None
    while before != (state.phase, state.round.number):
        before = state.phase, state.round.number
        state.deadline = None
        if state.phase is CoordinatorPhase.ENDING:
            break
        if state.phase is not CoordinatorPhase.RECOVERING:
            admit(state)  # a recovered round brings its own minimum and maximum
        _STEPS[state.phase](state)
    wait_for_ranks(state)
    state.publish_waiting()
    state.record_round()
    return state.outbox.drain(state.budget.history(now))
