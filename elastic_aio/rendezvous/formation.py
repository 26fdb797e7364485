"""How a round comes about: recover a running one, or admit nodes, wait, and assign ranks.

Recovery
========

The store can be lost together with the coordinator.  So its successor reads the statuses that the
members write and finds the round again: the newest placement that any member reports.

* Newest means the highest (round, formed_by).  After a partition two rounds may have the same
  number; any fixed order will do, as long as one of them wins.  Members of the other round have
  diverged: they are stopped and taken into the next.
* A placement contains the size of its round, so one status tells how many members there should be.
  If all have returned, plus those that left after their success (`members_done`), the round runs on
  and no worker is stopped.
* Otherwise the coordinator waits `recovery_timeout` (0.7 s: members find another store within one
  search, see `elastic_aio.discovery`).  Members that are still missing count as lost, and the
  others form another round.
* If all that have returned had succeeded, and came from another store, the job may have ended there
  with success.  They wait at their exit barriers, and the other nodes go on without them.  With
  several endpoints the job has not ended if one of them still had its lease there: the end is
  recorded once all members know of the success (`MembersDone`) or have no lease any more.
* If none has returned, the `RoundRecord` in the store tells the numbers to continue from.  Unless
  all workers of the round had been stopped, its end is the loss of a node.
* An outcome in any status wins over everything: a member that has read the end of the job has
  exited or is about to, and the others must end in the same way.
* minimum, maximum, program and user are taken from a member of the round, not from the new
  coordinator's node, which may be a misconfigured joiner.

Nodes that are gone
===================

The workers of a node that is gone may still run when the next round is to begin: the node was lost,
or was missing when a round was recovered.  With L for `heartbeat_timeout`, F for `FENCE`, and G for
`CUT_OFF_GRACE`:

* The node receives its last reply from the store at r.  It stops its workers by their plan from r +
  L / 2 or later, and by the first signal and SIGKILL at r + L - F and G after that.
* The store receives the last message of the node at s, and ends the lease at s + L.  The reply was
  sent after s, or after an earlier message; so r - s is the reply's way at most.
* The round begins at s + L + F at the earliest.  That leaves 2F - G = 0.4 s for the way of the
  reply, for the end of killed processes, and for clocks of different rates.
* A connection that ends without a partition ends the lease LEASE_LINGER later.  If it was closed in
  order (FIN), its agent is dead: the guardian kills the workers, and F is left out.  If it was
  reset, the node may live: it gave up the connection at r + L - F - RECONNECT_FOR or later, and
  kills its workers RECONNECT_FOR later.  That leaves LEASE_LINGER + F - RECONNECT_FOR - G = 0.1 s.
* Members of a round that was formed at another store arrive one by one.  No lease tells when a
  missing member has last received a reply: it was before the last arrival, as all have lost the
  same store, or its host has closed it.  So the next round begins L + F after that arrival, unless
  all have come, or only the node that served the former store is missing: it is dead, or has a
  store of its own.  That node is known for the first move after a placement.
* A member that has left while its workers run has gone to another store (or the rounds may
  overlap).  It has L to get there.

Excluded nodes
==============

A member says in its status why it is excluded, and takes it back when the time is over: so any
coordinator knows.  Its workers run until the round ends for another reason, and it is no candidate
of the next rounds; a member on standby takes its place in the same change.  `restart.decide`
excludes the member of the root cause: `RestartPending` says so, and until its acknowledgement the
coordinator knows by that order.

Fixed ranks
===========

Two members may claim one rank: most often a node and its replacement, which starts before the lease
of its predecessor has ended.  One of them holds the rank: the member that takes part in the round,
else the member of the newest placement, else the first that arrived.  The other stands by: it takes
the rank when the holder is gone, and is rejected once the lease of a dead holder would have ended.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from elastic_aio.node_events import NodeExcluded, NodeJoined, RoundForming
from elastic_aio.outcome import EndCause, JobOutcome
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.rendezvous import base
from elastic_aio.rendezvous.messages import (
    MemberPhase,
    MemberStatus,
    Reject,
    RoundRecord,
    StandBy,
    WaitForNodes,
    version_problem,
)
from elastic_aio.rendezvous.state import (
    NAMES_MAX,
    CoordinatorPhase,
    CoordinatorState,
    MemberRecord,
    RoundState,
)
from elastic_aio.spec.job import NodeRange
from elastic_aio.text import counted

_UPDATE_S = 1.0
"""Least seconds between two `WaitForNodes` orders of different content."""
_UPDATE_PER_NODE_S = 0.005
"""Seconds to add for each node that waits: the orders must not delay nodes that are to join."""
_REPEAT_S = 15.0
"""Seconds between two `WaitForNodes` orders of the same content."""


def recover_round(state: CoordinatorState) -> None:
    """Continue with the newest round that a member reports, if there is a report."""
    reported = {one.member: one.status.placement for one in state.attending()}
    held = {member: one for member, one in reported.items() if one is not None}
    due = state.timer.since + state.settings.recovery_timeout
    former = state.former
    if not held:
        if former is None or not former.is_open:
            state.wait_for_nodes()
        elif not state.arm(due):
            state.wait_for_nodes()
            # The budget continues the former coordinators' budget.
            state.former = replace(former, is_open=False)
            state.fence(state.created_at + state.settings.fence)
            state.add_change_reason(f"all nodes of round {former.round} were lost")
            charge_node_loss(state)
        return
    attempt = max(one.attempt for one in held.values())
    restarts = max(one.restarts for one in held.values())
    while held:
        newest = max(one.round_id for one in held.values())
        mine = {member: one for member, one in held.items() if one.round_id == newest}
        statuses = [state.members[member].status for member in mine]
        outcome = next((one.outcome for one in statuses if one.outcome is not None), None)
        members_done = _members_done(state, newest, statuses)
        size = mine[min(mine)].span.group_world_size
        # No member of a newer round that was recorded here is present.
        is_last = former is None or former.round <= newest[0]
        is_whole = is_last and len(mine) + members_done >= size
        if not is_whole and outcome is None and state.arm(due):
            return
        if is_whole or outcome is not None or not all(map(state.may_have_ended, statuses)):
            state.round = RoundState(mine)
            state.round.members_done = members_done
            state.round.attempt = attempt if former is None else max(attempt, former.attempt)
            state.budget.resume(restarts)
            _continue_round(state, statuses[0], outcome, is_whole=is_whole)
            return
        if len(mine) == len(reported):
            return  # nothing is left to do but to wait at the exit barriers
        state.set_aside.update(mine)
        held = {member: one for member, one in held.items() if member not in mine}
    state.wait_for_nodes()


def _continue_round(
    state: CoordinatorState, first: MemberStatus, outcome: JobOutcome | None, *, is_whole: bool
) -> None:
    """Run a recovered round on, or end it; `first` is the status of one of its members."""
    state.settings = replace(
        state.settings,
        minimum=first.minimum,
        maximum=first.maximum,
        program=first.program,
        uid=first.uid,
    )
    state.phase = CoordinatorPhase.RUNNING
    held = [*state.round.placements.values()]
    if outcome is not None:
        state.end_job(outcome)
    elif not is_whole:
        state.fence(state.created_at + state.settings.fence)
        state.round.has_lost_member = state.round.is_excused = True
        state.add_change_reason(f"{_missing(held, state.round.members_done)} did not come back")
    elif all(map(state.has_succeeded, state.active())):
        return  # nothing is left to run, with other workers either
    elif state.is_elsewhere(held[0]) and not state.settings.keep_workers:
        state.add_change_reason("the nodes meet at another store")


def _members_done(
    state: CoordinatorState, round_id: tuple[int, str], present: Sequence[MemberStatus]
) -> int:
    """Return how many members of a round have succeeded and left, without the `present` members."""
    gone = [record.status for record in state.round.gone.values()]
    since_recovery = sum(
        one.phase is MemberPhase.SUCCEEDED
        and one.placement is not None
        and one.placement.round_id == round_id
        for one in gone
    )
    # The coordinator of another store took members whose lease had ended there for gone.
    moved = [one for one in present if one.moves and not one.was_leased]
    returned = sum(one.phase is MemberPhase.SUCCEEDED for one in moved)
    before = max(one.members_done for one in present) - returned
    return max(since_recovery, before)  # both may contain the same members


def _missing(held: Sequence[base.Placement], members_done: int) -> str:
    """Describe the nodes of a round that have not come; how many of them are done is unknown.

    Only the store's host has a name here.
    """
    host, name = held[0].host_rank, held[0].host_name
    ranks = set(range(held[0].span.group_world_size)) - {one.span.group_rank for one in held}
    count = counted(len(ranks) - members_done, "node")
    if members_done:
        return count
    if name and ranks == {host}:
        return f"node {name}"
    shown = [name if name and rank == host else f"group rank {rank}" for rank in sorted(ranks)]
    return f"{count} ({', '.join(shown[:NAMES_MAX])}{', ...' if shown[NAMES_MAX:] else ''})"


def form_when_possible(state: CoordinatorState) -> None:
    """Form a round once there are enough nodes, and the last call is over or all joined."""
    candidates = _candidates(state)
    settings, timer = state.settings, state.timer
    is_first = state.round.number < 0
    if is_first and any(one.status.placement is not None for one in candidates):
        state.phase = CoordinatorPhase.RECOVERING
        timer.since = state.now
        return
    if len(candidates) < settings.minimum:
        timer.enough_since = None
        until = timer.since + _wait_limit(state)
        if settings.may_move:
            # A member that was lost may go on in another job while it has its lease.
            until = max(until, state.unsure_until)
        if not state.arm(until):
            _give_up(state)
            return
    else:
        if timer.enough_since is None:
            timer.enough_since = state.now
        until = timer.enough_since + settings.last_call_timeout
        if not (is_first and len(candidates) < settings.maximum and state.arm(until)):
            form_round(state, candidates)
            return
    _wait(state, candidates, until)


def _wait_limit(state: CoordinatorState) -> float:
    """Return how many seconds too few nodes wait for others."""
    if state.round.number < 0:
        return state.settings.join_timeout
    # A node that has left after its success does not come back, and nor is it replaced.
    return 0.0 if state.needs_departed else state.settings.replace_timeout


def _candidates(state: CoordinatorState) -> list[MemberRecord]:
    """Return the members that the next round is chosen from.

    For the first round, and if too few reach the other nodes, these are all eligible members; else
    the members that are neither refused nor still probing.
    """
    eligible = state.eligible()
    reachable = [one for one in eligible if not (one.refused_because or one.is_probing)]
    is_first = state.round.number < 0
    return eligible if is_first or len(reachable) < state.settings.minimum else reachable


def form_round(state: CoordinatorState, candidates: list[MemberRecord], why: str = "") -> None:
    """Begin a round with at most `maximum` candidates; members of the last round first.

    All workers of the previous round are stopped first, and this is called again when every member
    has reported that; with `overlap` each node stops its own workers before it starts others.  Does
    nothing while the next port of group rank 0 is unknown: the status with the port is in flight,
    and its arrival calls this again.
    """
    if state.settings.shared_store or not state.settings.overlap:
        running = [
            one for one in state.admitted() if not (state.is_stopped(one) or state.is_aside(one))
        ]
        if running:
            _stop_previous(state, running, why)
        if running or state.arm(max(state.fenced_until, _arrivals_until(state))):
            return
    former = state.round.placements
    candidates.sort(
        key=lambda one: (one.member not in former, not one.status.is_host, one.joined_at)
    )
    order = _by_group_rank(state, candidates[: state.settings.maximum])
    lead = order[0]
    previous = former.get(lead.member)
    is_lead_again = previous is not None and not previous.span.group_rank
    if is_lead_again and isinstance(lead.sent, base.StartRound) and not lead.has_acked:
        return
    state.budget.has_progress = state.has_progress
    state.budget.begin_attempt()
    cause = state.next_cause(why)
    placements = _placements(state, order, cause)
    first = placements[lead.member]
    if cause is not None:
        cause = replace(cause, attempt=first.attempt, restarts=first.restarts)
    for record in order:
        if former and record.member not in former:
            record.admitted_at = state.now
        record.refused_because = ""  # it was refused as a joiner, and nodes are missing now
        state.outbox.send(record, base.StartRound(placements[record.member], cause))
    state.round, state.phase = RoundState(placements), CoordinatorPhase.RUNNING
    if cause is not None:
        state.outbox.publish(base.cause_event(cause, first))
    state.outbox.publish(base.round_formed_event(first, group_rank=-1))


def _arrivals_until(state: CoordinatorState) -> float:
    """Return until when members of rounds of another store may come with their workers."""
    rounds: dict[tuple[int, str], tuple[base.Placement, dict[int, MemberRecord]]] = {}
    for record in state.members.values():
        placement = record.status.placement
        if placement is not None and state.is_elsewhere(placement):
            rounds.setdefault(placement.round_id, (placement, {}))[1][placement.span.group_rank] = (
                record
            )
    until = -math.inf
    newest = {formed_by.rpartition("@")[2]: number for number, formed_by in sorted(rounds)}
    for placement, arrived in rounds.values():
        if placement.round < newest[placement.formed_by.rpartition("@")[2]]:
            continue  # an excluded node was in it; its workers had stopped before the next round
        missing = set(range(placement.span.group_world_size)) - arrived.keys()
        members_done = max(one.status.members_done for one in arrived.values())
        is_first_move = all(one.status.moves <= 1 for one in arrived.values())
        if is_first_move and missing == {placement.host_rank}:
            continue
        if len(missing) > members_done:
            last = max(one.arrived_at for one in arrived.values())
            until = max(last + state.settings.heartbeat_timeout + state.settings.fence, until)
    return until


def charge_node_loss(state: CoordinatorState) -> bool:
    """Charge the loss of a node once; return whether a back-off or the end follows."""
    state.round.has_lost_member = False
    decision = state.budget.lose_node(state.now)
    if not decision.restart:
        state.fail_job(f"{state.round.change_text}: {decision.why} (restart.node_losses)")
        return True
    if decision.why:
        state.add_change_reason(f"{decision.why} (restart.node_losses)")
    if not decision.delay:
        return False
    state.round.cause = state.next_cause()
    state.round.stop_reason = state.round.change_text
    state.round.wait_until = state.now + decision.delay
    stop_active(state)
    state.phase = CoordinatorPhase.BACKING_OFF
    return True


def stop_active(state: CoordinatorState) -> None:
    """Order all active members to stop their workers, of whichever round they are."""
    for record in state.active():
        number = max(state.round.number, record.status.round)
        state.outbox.send(record, base.StopRound(number, state.round.stop_reason))


def _stop_previous(state: CoordinatorState, running: list[MemberRecord], why: str) -> None:
    """Stop the workers that would live beside the workers of the next round."""
    cause = state.round.cause = state.next_cause(why)
    reason = "another round is to begin" if cause is None else cause.why
    for record in running:
        if record.is_probing and not record.status.is_busy:
            continue  # its acknowledgement is on its way, and it must still probe
        number = max(state.round.number, record.status.round)
        state.outbox.send(record, base.StopRound(number, reason))
    if state.phase is not CoordinatorPhase.FORMING:
        state.wait_for_nodes()


# -------------------------------------------------------------------- ranks


def assign_group_ranks(
    ranks: Mapping[str, int], preferred: Mapping[str, int | None]
) -> tuple[str, ...]:
    """Return the members of a round in the order of their group ranks.

    A member of the last round, which has one of `ranks`, keeps it unless there are too few nodes
    for it.  Next come the ranks that joiners prefer, in the order of their arrival.  Members that
    could not keep their rank, then the other joiners, take the lowest free ranks.
    """
    size = len(ranks) + len(preferred)
    by_rank: list[str | None] = [None] * size
    unplaced = []
    staying = sorted(ranks.items(), key=lambda item: item[1])
    for member, rank in [*staying, *preferred.items()]:
        if rank is not None and 0 <= rank < size and by_rank[rank] is None:
            by_rank[rank] = member
        else:
            unplaced.append(member)
    rest = iter(unplaced)
    return tuple(next(rest) if member is None else member for member in by_rank)


def _by_group_rank(state: CoordinatorState, chosen: list[MemberRecord]) -> list[MemberRecord]:
    ranks: dict[str, int] = {}
    preferred: dict[str, int | None] = {}
    for record in chosen:
        member, status = record.member, record.status
        if (current := state.round.placements.get(member)) is not None:
            ranks[member] = current.span.group_rank
        elif status.preferred_rank is None and status.placement is not None:
            preferred[member] = status.placement.span.group_rank  # the rank that it had before
        else:
            preferred[member] = status.preferred_rank
    return [state.members[member] for member in assign_group_ranks(ranks, preferred)]


def _placements(
    state: CoordinatorState, order: list[MemberRecord], cause: base.RestartCause | None
) -> dict[str, base.Placement]:
    lead = order[0].status
    nodes = [record.status.node for record in order]
    spans = assign_node_ranks([NodeSize(node.role, node.nproc) for node in nodes])
    hosts = ((rank, one.name) for rank, one in enumerate(order) if one.status.is_host)
    host_rank, host_name = next(hosts, (-1, ""))
    number = state.next_round
    # Numbers continue from the highest that there were.
    seen = [one.status.placement for one in state.members.values() if one.status.placement]
    former = [] if state.former is None else [state.former]
    rounds: list[RoundState | base.Placement | RoundRecord] = [state.round, *seen, *former]
    attempt = max(one.attempt for one in rounds) + 1
    changes = max(one.changes for one in rounds)
    state.budget.resume(max((one.restarts for one in seen), default=0))
    if cause is not None and cause.root is not None:
        state.budget.resume(cause.restarts - 1)
        if state.budget.restarts < cause.restarts:
            state.budget.record(state.now)
    elif cause is not None and not cause.is_requested:
        changes += 1
    formed_by, restarts = f"{state.outbox.term}.{state.name}", state.budget.restarts
    return {
        record.member: base.Placement(
            round=number,
            formed_by=formed_by,
            attempt=attempt,
            restarts=restarts,
            changes=changes,
            span=span,
            master_addr=lead.address,
            master_port=lead.port,
            host_rank=host_rank,
            host_name=host_name,
        )
        for record, span in zip(order, spans, strict=True)
    }


# ------------------------------------------------------------------ waiting


def _wait(state: CoordinatorState, candidates: list[MemberRecord], until: float) -> None:
    """Stop running workers, and send all waiting members the list of present nodes."""
    for record in (*candidates, *filter(lambda one: one.is_excluded, state.attending())):
        if record.status.is_in_round:
            is_placed = record.member in state.round.placements
            why = state.round.stop_reason if is_placed else "the nodes wait for others"
            state.outbox.send(record, base.StopRound(record.status.round, why))
    if not candidates and any(one.status.drain_reason for one in state.members.values()):
        return  # the whole job is being stopped
    timer = state.timer
    forming = _round_forming(state, candidates)
    pause = min(_REPEAT_S, max(_UPDATE_S, _UPDATE_PER_NODE_S * len(candidates)))
    if forming == timer.published:
        pause = _REPEAT_S
    if state.arm(timer.published_at + pause):
        return
    timer.published, timer.published_at = forming, state.now
    state.arm(state.now + _REPEAT_S)
    event = replace(forming, time_left=round(until - state.now, 1))
    for record in candidates:
        if not record.status.is_in_round:
            state.outbox.send(record, WaitForNodes(event))
    state.outbox.publish(event)


def _round_forming(state: CoordinatorState, candidates: list[MemberRecord]) -> RoundForming:
    settings = state.settings
    missing = [record.name for record in state.round.gone.values()]
    if settings.fixed_ranks:
        taken = {one.status.preferred_rank for one in candidates}
        missing = [f"rank {rank}" for rank in range(settings.maximum) if rank not in taken]
    refused = [
        (one.name, one.refused_because or f"excluded ({one.excluded_because})")
        for one in state.members.values()
        if one.refused_because or one.excluded_because
    ]
    return RoundForming(
        round=state.next_round,
        joined=len(candidates),
        minimum=settings.minimum,
        maximum=settings.maximum,
        present=tuple(one.name for one in candidates[:NAMES_MAX]),
        missing=tuple(missing[:NAMES_MAX]),
        refused=tuple(f"{name}: {why}" for name, why in refused[:NAMES_MAX]),
    )


def _give_up(state: CoordinatorState) -> None:
    forming = _round_forming(state, state.eligible())
    has_run = state.round.number >= 0 or bool(state.round.change_reasons or state.set_aside)
    came = "are left" if has_run else "came together"
    text = f"only {forming.joined} of {state.settings.nnodes} nodes {came}"
    if forming.present:
        text += f" ({', '.join(forming.present)})"
    if forming.missing:
        text += f"; missing: {', '.join(forming.missing)}"
    if forming.refused:
        text += f"; refused: {'; '.join(forming.refused)}"
    if state.needs_departed:
        text += f"; {state.departed()} had succeeded and left (exit_barrier_timeout)"
    else:
        name = "join_timeout" if state.round.number < 0 else "replace_timeout"
        text += f"; waited {_wait_limit(state):g} s ({name})"
    if state.round.failures:
        state.fail_job(text)
    else:
        cause = EndCause.NODES_NOT_REPLACED if has_run else EndCause.TOO_FEW_NODES
        state.end_job(base.rendezvous_failure(text, cause))


# ----------------------------------------------------------------- admission

_LATE_S = 2.0
"""Seconds after which a coordinator knows of the end of a lease."""

_DIFFERENCES_MAX = 100


def admit(state: CoordinatorState) -> None:
    """Publish new members, and reject members that can never take part."""
    joined = [one for one in state.members.values() if not one.is_published]
    if not joined:
        return
    neighbors = Counter(one.status.node.name for one in state.members.values())
    for record in state.members.values():
        record.has_neighbor |= neighbors[record.status.node.name] > 1
    for record in joined:
        record.is_published = True
        node = record.status.node
        state.outbox.publish(
            NodeJoined(
                name=record.name,
                member=record.member,
                address=record.status.address,
                nproc=node.nproc,
                role=node.role,
                differs=_differences(state, record),
            )
        )
        if why := _mismatch(state, record):
            reject(state, record, why)


def _mismatch(state: CoordinatorState, record: MemberRecord) -> str:
    """Return why a member can never take part; empty if it can."""
    status, settings = record.status, state.settings
    if why := version_problem(status.protocol):
        return why
    if (status.minimum, status.maximum) != (settings.minimum, settings.maximum):
        nnodes = NodeRange(status.minimum, status.maximum)
        return f"it was started with --nnodes {nnodes}, the job with {settings.nnodes}"
    ours, its = (settings.program, settings.uid), (status.program, status.uid)
    if ours != its and not settings.any_program:
        runs = f"it runs {its[0]} as user {its[1]}, and the job {ours[0]} as user {ours[1]}"
        return f"{runs}: give each job its own --rdzv-id, or set any_program"
    rank = status.preferred_rank
    if settings.fixed_ranks and rank is not None and not 0 <= rank < settings.maximum:
        return f"node rank {rank} is not below {settings.maximum}"
    return ""


def _differences(state: CoordinatorState, record: MemberRecord) -> tuple[str, ...]:
    """Return the settings of a node that differ from other nodes' settings; each text once."""
    node, policy = record.status.node, state.settings.policy
    texts = []
    for name in sorted(policy.keys() | record.status.policy.keys()):
        value = record.status.policy.get(name, "the default")
        expected = policy.get(name, "the default")
        if value != expected:
            texts.append(f"{name} is {value}, but {expected} on the node of the coordinator")
    first = next(one for one in state.members.values() if one.status.node.role == node.role)
    if first.status.node.nproc != node.nproc:
        expected = f"{first.status.node.nproc} on {first.name}"
        texts.append(f"nproc_per_node is {node.nproc}, but {expected} (role {node.role})")
    new = [text for text in texts if text not in state.differences]
    new = new[: _DIFFERENCES_MAX - len(state.differences)]
    state.differences.update(new)
    return tuple(new)


def reject(state: CoordinatorState, record: MemberRecord, why: str) -> None:
    """Let a member leave, which can never take part because of `why`."""
    record.is_rejected = True
    state.refuse(record, why)
    state.outbox.send(record, Reject(why))


def note_exclusions(state: CoordinatorState) -> None:
    """Publish which members are excluded from now on."""
    for record in state.admitted():
        why = "" if record.status.is_busy else record.status.exclusion
        if why not in ("", base.UNCHECKED, record.excluded_because):
            state.outbox.publish(NodeExcluded(name=record.name, member=record.member, why=why))
        record.excluded_because = why


# -------------------------------------------------------------- fixed ranks


def find_rank_holders(state: CoordinatorState) -> None:
    """Note for each claimant of a rank which other member holds it."""
    if not state.settings.fixed_ranks:
        return
    placements = state.round.placements
    holders: dict[int | None, MemberRecord] = {}
    for record in sorted(
        (one for one in state.admitted() if not one.is_excluded),
        key=lambda one: (one.member not in placements, -one.status.round, one.joined_at),
    ):
        holder = holders.setdefault(record.status.preferred_rank, record)
        if holder is not record:
            record.rank_holder = holder
        elif record.rank_holder is not None:
            record.rank_holder, record.refused_because = None, ""


def wait_for_ranks(state: CoordinatorState) -> None:
    """Let claimants of a rank that another member holds stand by, or reject them."""
    if not state.settings.fixed_ranks or state.phase is CoordinatorPhase.ENDING:
        return
    for record in state.admitted():
        holder, status = record.rank_holder, record.status
        if holder is None:
            continue
        node = holder.status.node
        why = f"node rank {status.preferred_rank} is held by {node.name} (pid {node.pid})"
        if record.refused_because != why:
            state.refuse(record, why)
        if not state.arm(record.refused_at + state.settings.heartbeat_timeout + _LATE_S):
            reject(state, record, why)
        elif status.is_in_round:
            state.outbox.send(record, base.StopRound(status.round, why))
        else:
            state.outbox.send(record, StandBy(state.round.number, state.settings.maximum, why))
