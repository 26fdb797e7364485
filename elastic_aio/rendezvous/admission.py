"""Admission of nodes: what a new member must fulfil, and who holds a fixed rank.

With fixed ranks, two members may claim one rank: most often a node and its replacement,
which starts before the lease of its predecessor has ended.  One of them holds the rank,
and the other stands by: it takes the rank when the holder is gone, and is rejected once the
lease of a dead holder would have ended.  The holder is the member that takes part in the
round, else the one of the newest placement, else the one that arrived first.
"""

from __future__ import annotations

from collections import Counter

from elastic_aio.node_events import NodeJoined
from elastic_aio.rendezvous.base import StopRound
from elastic_aio.rendezvous.members import MemberRecord
from elastic_aio.rendezvous.messages import Reject, StandBy, version_problem
from elastic_aio.rendezvous.state import CoordinatorPhase, CoordinatorState
from elastic_aio.spec.job import NodeRange

_LATE_S = 2.0
"""Seconds after which a coordinator knows of the end of a lease."""

_DIFFERENCES_MAX = 100
"""Different settings that are published at most."""


def admit(state: CoordinatorState) -> None:
    """Publish new members, and reject those that can never take part."""
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
            _reject(state, record, why)


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
    """Return the settings of a node that other nodes have otherwise; each text once."""
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


def _reject(state: CoordinatorState, record: MemberRecord, why: str) -> None:
    record.is_rejected = True
    state.refuse(record, why)
    state.outbox.send(record, Reject(why))


# -------------------------------------------------------------- fixed ranks


def find_rank_holders(state: CoordinatorState) -> None:
    """Note for each claimant of a rank which other member holds it."""
    if not state.settings.fixed_ranks:
        return
    placements = state.round.placements
    holders: dict[int | None, MemberRecord] = {}
    for record in sorted(
        state.admitted(),
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
            _reject(state, record, why)
        elif status.is_in_round:
            state.outbox.send(record, StopRound(status.round, why))
        else:
            state.outbox.send(record, StandBy(state.round.number, state.settings.maximum, why))
