"""The coordinator of a job: decides who takes part in which round, and how the job ends.

Pure.  Statuses of members and the time come in (see `CoordinatorState`), and `decide` returns
effects, mostly orders.  A coordinator can be replaced at any moment, so it keeps nothing that its
successor could not learn from the members, or, if the nodes of the last round are all gone, from
the `RoundRecord` in the store.

Rules
=====

* There is one round at a time; the next has a higher number.  It begins when every member has
  reported that no worker of an earlier round is left, or, with `overlap`, after each member's own
  stop.
* The first round is formed when the maximum of nodes has joined, or when there are enough and the
  last call is over.  Later rounds are formed at once, unless joiners are their only reason.
* When a member of the round leaves or is lost before its workers have succeeded, the remaining
  members and the waiting ones form another round.  If they are too few, they stop their workers and
  wait.
* Joiners below the maximum first probe whether they reach the other nodes, while the round runs on;
  a joiner that fails in this costs nothing.  Joiners that succeed wait for others, `scale_up_delay`
  from the latest of them, and the members of the round learn of it; when all vacant places are
  filled, the wait is over.  Above the maximum, and once a member has succeeded, joiners stand by.
* A failure on any member stops the round everywhere.  When all of its workers are gone, the restart
  policy is consulted once, with the earliest failure.  Changes of the membership cost no restart,
  but rounds that lose a node have a budget of their own.
* A member can request another round of the same members.  It costs no restart.
* If a member of the round was lost, the restart policy is not consulted: the other members'
  failures are a consequence, even though they are reported first.  There are two exceptions: a code
  of `never_on`, and a member that had acknowledged the order to stop, so that it was alive after
  the failure.
* Failures are likewise a consequence of a member that was known to leave before them, or a moment
  later.  The signal that stops a node may reach its workers before the agent, so that a failure of
  workers that a stop signal has ended is none of a member that leaves.  Any other failure counts,
  also of a member that has left since.
* Members whose workers run learn, a second later, that another member has succeeded: their workers
  may wait for one that has exited too early.
* An excluded member takes part in no further round until it has said that it may (see `formation`).
* A joiner whose host has left soon after it joined stands by for a growing time.
* Once a member of the round has notice of a preemption, no other round follows: all members get the
  notice, and again each that has an earlier deadline, joiners stand by, and the job ends as
  preempted when no member has workers, or all workers agree.  Members stop their workers themselves
  at the deadline; they keep the notice in their status.  A member that has lost its place, or is
  excluded, is rejected when it has the first notice, unless it serves the only store: the round
  goes on without it.
* When all members of the round have succeeded, or the policy grants no further attempt, or nodes
  are missing for too long, the job ends with one outcome for all.

Waiting
=======

* No phase waits without an end.  Members obey their orders or count as lost, which is a change of
  the membership (see `state`); all other waits have a time (see the table).
* Each wait is published: for missing nodes as `RoundForming`, for the delay as `Restarting`, any
  other wait, once it takes long, as `RoundWaiting`.

Another coordinator
===================

* It recovers the newest round that a member reports (see `formation`).  Numbers of rounds, attempts
  and restarts continue from the highest that a member has seen.
* A predecessor's `StartRound` order may still be in flight.  A member that acts on it diverges from
  the new coordinator's state; the new coordinator then forms another round.
* A restart that was announced to a member that is still present is not decided again, but its delay
  begins anew.  A failure that no present member has seen or was notified of costs no restart.
* In a network partition each side may have a coordinator and a round.  When they meet again, one
  round is recovered.
* The number of members that have left after their success is sent to those that stay.  A member
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
    RUNNING,
    STOPPING     ... with a notice of a preemption, and no
                 workers                                    ENDING
    FORMING, DECIDING,
    BACKING_OFF  a notice of a preemption                   ENDING
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from elastic_aio.events import AttemptFailed, PreemptionNotice
from elastic_aio.outcome import (
    PREEMPTION_CHANGE,
    PREEMPTION_SLACK,
    Failure,
    JobOutcome,
    JobState,
    preempted,
)
from elastic_aio.rendezvous import formation, messages
from elastic_aio.rendezvous.base import (
    ChangePending,
    RestartCause,
    RestartPending,
    StopRound,
    pending_event,
)
from elastic_aio.rendezvous.state import (
    MARGIN_S,
    NAMES_MAX,
    CoordinatorEffect,
    CoordinatorPhase,
    CoordinatorState,
    MemberRecord,
    RequestDecision,
    clock_offsets,
    leaving,
)
from elastic_aio.spec.restart import DECIDE_TIMEOUT, RestartAction, why_undecided
from elastic_aio.text import counted, format_duration

_BURST_S = 0.2
"""Seconds for which ready joiners wait, at least, for others that arrive with them."""
_DELAYS_MAX = 10
"""For how many times `scale_up_delay` joiners wait that come one after the other, at most."""
_RETRY_S = 5.0
"""Seconds after which a joiner that could not reach the other nodes probes again."""
_FINISHED_S = 1.0
"""Seconds from the first success of a member until the others learn of it: most end together."""
_MORE_FINISHED_S = 50.0
"""Seconds until they learn of further successes: shortly before they report it."""


def supervise(state: CoordinatorState) -> None:
    """Handle the reports of a running round."""
    _restore(state)
    active = state.active()
    for record in active:
        # All nodes stop at once, so that their workers save together.
        if record.status.drain_reason and not state.has_succeeded(record):
            state.add_change_reason(f"{record.name} {leaving(record)}")
            state.round.is_excused |= state.has_left_first(record)
    failed = next(filter(state.has_failed, state.accountable()), None)
    if failed is not None:
        state.round.stop_reason = f"a worker on {failed.name} has failed"
        state.round.failed_at = state.now
        state.phase = CoordinatorPhase.STOPPING
        return
    for record in active:
        if record.status.drain_reason:
            continue
        if record.status.phase is messages.MemberPhase.STOPPED and state.has_placement(record):
            state.add_change_reason(f"the workers of {record.name} were stopped")
        elif state.has_diverged(record):
            state.add_change_reason(f"{record.name} did not take its place")
    current = state.round
    _take_requests(state, active)
    succeeded = list(filter(state.has_succeeded, active))
    done = current.members_done + sum(map(state.has_succeeded, current.gone.values()))
    is_changing = bool(current.change_reasons) or current.cause is not None
    have_succeeded = succeeded == active and not is_changing
    informed, count = list(filter(state.has_placement, active)), done
    if have_succeeded and state.settings.may_move:
        # Nodes on standby go to other stores too.
        informed += [one for one in state.unplaced() if one.status.placement is None]
        count = current.size
    running = [] if is_changing else [one for one in active if not state.has_succeeded(one)]
    finished = _finished(state, running)
    behind = [one for one in informed if _is_behind(state, one, count, finished[0])]
    for record in behind:
        state.outbox.send(record, messages.MembersDone(current.number, count, *finished))
    if is_changing:
        _reform(state, active)
    elif have_succeeded:
        # A member that comes to another store knows of this end, or that there is none yet.
        is_known = not behind and not state.arm(state.unsure_until)
        if is_known or not state.settings.may_move:
            state.end_job(JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0))
    else:
        _scale_up(state, active, is_closing=bool(succeeded or done))


def _finished(state: CoordinatorState, running: list[MemberRecord]) -> tuple[int, float]:
    """Return how many workers have finished elsewhere, and the seconds since the first success.

    The members that run learn it.  From `_MORE_FINISHED_S` on, each order waits for twice as long
    as the one before: they are few, even if many members succeed one after the other.
    """
    current = state.round
    if not running:
        return 0, 0.0
    world_size = current.placements[running[0].member].span.world_size
    workers = world_size - sum(one.status.node.nproc for one in running)
    if workers <= current.finished[0]:
        return current.finished
    if current.succeeded_at is None:
        current.succeeded_at = state.now
    former, ago = current.finished
    after = max(_MORE_FINISHED_S, 2 * ago) if former else _FINISHED_S
    if not state.arm(current.succeeded_at + after):
        current.finished = workers, round(state.now - current.succeeded_at, 3)
    return current.finished


def _is_behind(state: CoordinatorState, record: MemberRecord, count: int, workers: int) -> bool:
    """Whether a member has to learn how many others are done; see `MembersDone`."""
    status = record.status
    is_late = status.peers_finished < workers and not state.has_succeeded(record)
    return is_late or status.members_done != count


def _take_requests(state: CoordinatorState, active: list[MemberRecord]) -> None:
    """Note the restarts that members request; a change of the membership comes first."""
    asking = [one for one in active if one.status.restart_reason and state.has_placement(one)]
    if asking and not state.round.change_reasons:
        why = "; ".join(
            f"{one.status.restart_reason} (on {one.name})" for one in asking[:NAMES_MAX]
        )
        attempt, restarts = state.round.attempt + 1, state.budget.restarts
        state.round.cause = RestartCause(attempt, why, restarts, is_requested=True)


def _restore(state: CoordinatorState) -> None:
    """Give members their placement back that were wrongly counted as done."""
    current = state.round
    for record in state.unplaced():
        placement = record.status.placement
        if current.members_done and placement is not None and state.has_placement(record):
            current.members_done -= 1
            current.placements[record.member] = placement


def _reform(state: CoordinatorState, active: list[MemberRecord]) -> None:
    """Form another round of the remaining nodes, or stop and wait for more nodes."""
    if state.round.has_lost_member and formation.charge_node_loss(state):
        return
    active = [one for one in active if not (one.status.drain_reason or one.is_excluded)]
    waiting = [
        one for one in state.unplaced() if not one.status.is_busy and not one.refused_because
    ]
    if len(active) + len(waiting) >= state.settings.minimum:
        formation.form_round(state, [*active, *waiting])
        return
    state.round.cause = state.next_cause()
    left = f"only {counted(len(active), 'node')} of {state.settings.nnodes} left"
    state.round.stop_reason = f"{state.round.change_text}: {left}"
    formation.stop_active(state)
    state.wait_for_nodes()


# ------------------------------------------------------------------ joiners


def _scale_up(state: CoordinatorState, active: list[MemberRecord], *, is_closing: bool) -> None:
    """Let joiners probe the other nodes, and form a round with those that succeed."""
    staying = [one for one in active if not one.is_excluded]
    # The round goes on with its excluded members while the next one would lack nodes.
    needed = state.settings.minimum - len(staying)
    free = state.settings.maximum - len(state.round.placements)
    if is_closing or min(free, len(state.unplaced())) < needed:
        free = 0
    ready = _probe_joiners(state, active, free)
    ready = ready if len(ready) >= needed else []
    why = f"{', '.join(record.name for record in ready[:NAMES_MAX])} joined"
    until = _ready_until(state, ready)
    limit = state.settings.scale_up_limit
    is_delayed = len(ready) < free and state.arm(until)
    has_agreed = limit == 0 or _have_agreed(state, active)
    if ready and not is_delayed and (has_agreed or not state.arm(until + limit)):
        formation.form_round(state, [*staying, *ready], why)
    elif state.settings.scale_up_delay + limit > _BURST_S:
        _announce_change(state, active, ready, why, until + limit)


def _have_agreed(state: CoordinatorState, active: list[MemberRecord]) -> bool:
    change = state.round.pending
    if change is None or change.time_left is None:
        return False
    return all(one.status.agreed_change == change.number for one in active)


def _ready_until(state: CoordinatorState, ready: list[MemberRecord]) -> float:
    """Return until when ready joiners wait for others: a while after the latest of them."""
    current = state.round
    current.ready = {one.member: current.ready.get(one.member, state.now) for one in ready}
    if not ready:
        current.ready_since = None
        return state.now
    if current.ready_since is None:
        current.ready_since = state.now
    delay = max(state.settings.scale_up_delay, _BURST_S)
    # A host that comes and goes does not postpone the round for ever.
    last = current.ready_since + _DELAYS_MAX * delay
    return min(max(current.ready.values()) + delay, last)


def _announce_change(
    state: CoordinatorState,
    active: list[MemberRecord],
    ready: list[MemberRecord],
    why: str,
    until: float,
) -> None:
    """Announce the round that joiners wait for, or its withdrawal, and each change of either."""
    current = state.round
    former = pending = current.pending
    is_pending = any(one.status.is_change_pending for one in active)
    if former is None:  # maybe another coordinator's
        number = max((one.status.change for one in active), default=-1) + (not is_pending)
    else:
        number = former.number + (bool(ready) and former.time_left is None)
    if ready:
        if former is None or (former.why, current.pending_until) != (why, until):
            pending = ChangePending(current.number, why, round(until - state.now, 1), number)
            current.pending_until = until
    elif former is not None or is_pending:
        pending = ChangePending(current.number, "no node is about to join any more", number=number)
    if pending is None:
        return
    if pending != former:
        current.pending = pending
        state.outbox.publish(pending_event(pending, current.attempt))
    for record in [*filter(state.has_placement, active), *ready]:
        is_concerned = record.status.is_change_pending or isinstance(record.sent, ChangePending)
        # An order that was not seen is not replaced by a different statement.
        is_unseen = isinstance(record.sent, messages.MembersDone) and not record.has_acked
        if (ready or is_concerned) and not is_unseen:
            state.outbox.send(record, pending)


def _probe_joiners(
    state: CoordinatorState, active: list[MemberRecord], free: int
) -> list[MemberRecord]:
    """Return the joiners that reach the other nodes; at most `free` probe at a time."""
    placements = state.round.placements
    lead = next((one for one in active if not placements[one.member].span.group_rank), None)
    number = state.next_round
    address = None if lead is None else (lead.status.address, lead.status.port)
    probe = None if address is None else messages.ProbePeers(number, *address)
    ready: list[MemberRecord] = []
    probing = 0
    for record in state.attending():
        status = record.status
        if record.member in placements:
            continue
        if status.is_in_round:
            # A success in a round that the others have replaced is none: they repeat it.
            why = "the others have formed another round meanwhile"
            state.outbox.send(record, StopRound(status.round, why))
        elif record.is_excluded:
            continue
        elif probe is None or len(ready) + probing >= free or _is_too_early(state, record):
            state.outbox.send(record, messages.StandBy(state.round.number, state.settings.maximum))
        elif status.probed_round != number:
            probing += 1
            state.outbox.send(record, probe)
        elif not status.probe_error:
            record.refused_because = ""
            ready.append(record)
        else:
            _retry_later(state, record, probe)
    return ready


def _is_too_early(state: CoordinatorState, record: MemberRecord) -> bool:
    """Refuse a joiner for a while whose host has left soon after it had joined before."""
    count, when = state.visits.admission(record.status.node.name)
    if not state.arm(when):
        return False
    if not record.refused_because:
        delay = when - state.now
        visits = f"{record.status.node.name} has left {count} times soon after it had joined"
        state.refuse(record, f"{visits}, it is taken in after {delay:.3g} s")
    return True


def _retry_later(state: CoordinatorState, record: MemberRecord, probe: messages.ProbePeers) -> None:
    """Refuse a joiner that does not reach the other nodes, and repeat its probe later."""
    if not record.refused_because:
        state.refuse(record, f"it does not reach the others: {record.status.probe_error}")
    if not state.arm(record.refused_at + _RETRY_S):
        record.refused_at = state.now
        state.arm(record.refused_at + _RETRY_S)
        state.outbox.send(record, probe, again=True)


# --------------------------------------------------------------- preemption


def _note_preemption(state: CoordinatorState) -> None:
    """Take the earliest notice of a member that the round needs; another one ends for itself."""
    if state.round.number < 0:
        return
    for record in state.admitted():
        notice, former = record.status.preemption, state.preemption
        latest = math.inf if former is None else former.until - PREEMPTION_SLACK
        if notice is None or record.preempted_at >= latest:
            continue
        # While the round runs, its workers ran until now as far as was known.
        may_stay = not record.is_excluded or state.phase is CoordinatorPhase.RUNNING
        is_placed = record.member in state.round.placements and may_stay
        # Without its store, the others could not go on.
        is_needed = record.status.is_host and not state.settings.may_move
        if not (is_placed or is_needed or record.status.is_in_round):
            if former is None:
                formation.reject(
                    state, record, "it has notice of a preemption, and no place in the round"
                )
            continue
        until, left = record.preempted_at, round(max(0.0, record.preempted_at - state.now), 3)
        state.preemption = replace(
            notice, why=messages.end_of(notice.why), time_left=left, until=until
        )
        attempt = max(0, state.round.attempt)
        state.outbox.publish(PreemptionNotice(attempt=attempt, why=notice.why, time_left=left))


def _preempt(state: CoordinatorState, notice: ChangePending) -> None:
    """Pass a notice on, and end the job once no member has workers that need more time."""
    placements = state.round.placements
    members = [
        one for one in state.admitted() if one.member in placements or one.status.is_in_round
    ]
    needed = max((one.status.stop_time for one in members), default=0.0) + MARGIN_S
    has_workers = state.phase in (CoordinatorPhase.RUNNING, CoordinatorPhase.STOPPING)
    is_open = has_workers and any(map(_needs_time, members))
    if not (is_open and state.arm(notice.until + needed)):
        state.end_job(preempted(notice.why))
        return
    for record in members:
        sent, given = record.sent, (notice.why, notice.time_left)
        is_sent = isinstance(sent, ChangePending) and (sent.why, sent.time_left) == given
        if record.preempted_at > notice.until + PREEMPTION_SLACK and not is_sent:
            # By the clock of the member: the order may be read late, and again.
            until = notice.until - record.offset_bound(state.now)
            state.outbox.send(record, replace(notice, number=PREEMPTION_CHANGE, until=until))
    for record in state.unplaced():
        if record not in members:
            state.outbox.send(record, messages.StandBy(state.round.number, state.settings.maximum))


def _needs_time(record: MemberRecord) -> bool:
    """Whether a member has workers, as far as is known, and they have not agreed."""
    status = record.status
    is_over = not status.is_busy or status.agreed_change == PREEMPTION_CHANGE
    return not is_over or status.preemption is None


# ----------------------------------------------------------------- failures


def decide_restart(state: CoordinatorState) -> None:
    """Consult the restart policy once all workers of the failed round have stopped."""
    formation.stop_active(state)
    active = state.active()
    if not all(map(state.is_stopped, active)):
        return
    current = state.round
    if current.failed_at is not None:
        current.stop_time = state.now - current.failed_at
    members = state.accountable()
    for record in members:
        if state.has_left_first(record):
            state.add_change_reason(f"{record.name} {leaving(record)}")
            current.is_excused = True
    state.budget.has_progress = state.has_progress
    failures = current.failures = _root_cause_first(state, members)
    if failures:
        event = AttemptFailed(attempt=current.attempt, root=failures[0], failures=failures)
        state.outbox.publish(event)
    permanent = next((one.status for one in members if one.status.is_permanent), None)
    inherited = next(filter(None, map(state.inherited_restart, members)), None)
    forbidden = next(filter(state.budget.forbids, failures), None)
    if permanent is not None:
        state.fail_job(permanent.permanent_reason, permanent.exit_code)
    elif inherited is not None:
        _restart(state, inherited)
    elif forbidden is not None and current.is_excused:
        code = forbidden.status.shell_code
        state.fail_job(f"exit code {code} is in the never-on list", code)
    elif current.is_excused or not failures:
        # The connections of a lost node's workers end before its lease does, so the
        # failures that they cause arrive first.
        if not current.change_reasons:
            state.add_change_reason("a node has failed and is gone")
        if current.has_lost_member and formation.charge_node_loss(state):
            return
        current.cause = state.next_cause()
        state.wait_for_nodes()
    elif state.settings.has_decide and not state.budget.is_exhausted(_runtime(state)):
        current.wait_until = state.now + DECIDE_TIMEOUT
        state.phase = CoordinatorPhase.DECIDING
        state.outbox.publish(RequestDecision(failures[0]))
    else:
        _consult_policy(state, RestartAction.DEFAULT)


def _root_cause_first(state: CoordinatorState, members: list[MemberRecord]) -> tuple[Failure, ...]:
    """Return the failures of a round, the farthest from the root cause last, the others by time.

    The clocks of two hosts may differ by hours, and a status may be long on its way.
    """
    gone = [one for one in state.round.gone.values() if state.has_placement(one)]
    offsets = clock_offsets([*state.members.values(), *gone], state.now)
    found = [
        (offsets[one.member] + failure.time, failure, one)
        for one in members
        for failure in one.status.failures
    ]
    found.sort(key=lambda item: (*item[1].distance, item[0], item[1].order))
    early = [
        (offsets[one.member] + one.status.first_success[1], one)
        for one in (*members, *gone)
        if one.status.first_success is not None
    ]
    failures = [failure for _, failure, _ in found]
    if found and early:
        failures[0] = _with_early_success(*found[0], *min(early, key=lambda item: item[0]))
    return tuple(failures)


def _with_early_success(
    at: float, failure: Failure, own: MemberRecord, early_at: float, early: MemberRecord
) -> Failure:
    """Return a failure, with a note if a worker of another node exited with 0 before it.

    A success on its own node is in a note already.
    """
    if early is own or early_at >= at or early.status.first_success is None:
        return failure
    who = f"rank {early.status.first_success[0]} (on {early.status.node.name})"
    note = f"{who} exited with 0, {format_duration(at - early_at)} before"
    return replace(failure, notes=(note, *failure.notes))


def apply_decision(state: CoordinatorState) -> None:
    """Apply the answer of the user's callback once it is there."""
    match state.round.decision:
        case RestartAction() as action:
            _consult_policy(state, action)
        case str() as error:
            state.fail_job(error)
        case None if not state.arm(state.round.wait_until):
            state.fail_job(why_undecided(DECIDE_TIMEOUT))


def back_off(state: CoordinatorState) -> None:
    """Form another round once the delay is over."""
    if not state.arm(state.round.wait_until):
        state.wait_for_nodes()


def _consult_policy(state: CoordinatorState, action: RestartAction) -> None:
    root = state.round.failures[0]
    state.budget.leave_out(state.round.stop_time)
    decision = state.budget.decide(root, action, _runtime(state), state.now)
    if not decision.restart:
        state.fail_job(decision.why)
        return
    attempt, restarts = state.round.attempt + 1, state.budget.restarts + 1
    root, returned = messages.truncate_failure(root), state.budget.returned
    cause = RestartCause(attempt, decision.why, restarts, decision.delay, root, returned=returned)
    if action is RestartAction.EXCLUDE:
        for one in filter(state.has_placement, state.active()):
            if any(failure.rank == root.rank for failure in one.status.failures):
                cause = replace(cause, excludes=one.member)
    _restart(state, cause)


def _runtime(state: CoordinatorState) -> float:
    members = [one.status for one in state.active() if state.has_placement(one)]
    return max((status.runtime for status in members), default=0.0)


def _restart(state: CoordinatorState, cause: RestartCause) -> None:
    """Back off and announce the restart to all members.

    Members keep the announcement in their status for the next coordinator.  The restart is counted
    when the round begins: a restart that no member has seen can be decided again.
    """
    state.round.cause = cause
    state.round.wait_until = state.now + cause.delay
    state.phase = CoordinatorPhase.BACKING_OFF
    for record in state.attending():
        # The order that has excluded a node stands until it is acknowledged.
        if record.member in state.round.placements or not record.is_excluded:
            state.outbox.send(record, RestartPending(cause))


_STEPS: dict[CoordinatorPhase, Callable[[CoordinatorState], None]] = {
    CoordinatorPhase.RECOVERING: formation.recover_round,
    CoordinatorPhase.FORMING: formation.form_when_possible,
    CoordinatorPhase.RUNNING: supervise,
    CoordinatorPhase.STOPPING: decide_restart,
    CoordinatorPhase.DECIDING: apply_decision,
    CoordinatorPhase.BACKING_OFF: back_off,
}


def decide(state: CoordinatorState, now: float) -> list[CoordinatorEffect]:
    """Return the effects at `now` (monotonic seconds): one order for each member at most."""
    state.now = now
    for record, why in state.outbox.check(now):
        state.on_gone(record.member, now, is_lost=True, why=why)
    formation.find_rank_holders(state)
    before: tuple[CoordinatorPhase, int] | None = None
    while before != (state.phase, state.round.number):
        before = state.phase, state.round.number
        state.deadline = None
        if state.phase is CoordinatorPhase.ENDING:
            break
        if state.phase is not CoordinatorPhase.RECOVERING:
            formation.admit(state)  # a recovered round brings its own minimum and maximum
        _note_preemption(state)
        if state.preemption is None or state.phase is CoordinatorPhase.RECOVERING:
            _STEPS[state.phase](state)
        else:
            _preempt(state, state.preemption)
    formation.wait_for_ranks(state)
    if state.phase is not CoordinatorPhase.ENDING:
        formation.note_exclusions(state)
    state.publish_waiting()
    state.record_round()
    return state.outbox.drain(state.budget.history(now))
