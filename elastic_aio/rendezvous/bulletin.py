"""Events of a round, made from what the coordinator has decided."""

from __future__ import annotations

from elastic_aio.events import Event, MembershipChanged, Restarting, RoundFormed, RoundForming
from elastic_aio.rendezvous.base import Cause, Placement
from elastic_aio.rendezvous.tickets import Gathering

__all__ = ["follows", "formed", "forming", "restarting"]


def forming(gathering: Gathering) -> RoundForming:
    """Say who waits for a round."""
    return RoundForming(
        round=gathering.round,
        joined=gathering.joined,
        minimum=gathering.minimum,
        maximum=gathering.maximum,
        present=gathering.present,
        missing=gathering.missing,
        refused=gathering.refused,
        time_left=gathering.time_left,
    )


def follows(cause: Cause, placement: Placement) -> Event:
    """Say why an attempt follows another one."""
    if cause.root is not None:
        return restarting(cause)
    return MembershipChanged(
        attempt=placement.attempt,
        why=cause.why,
        round=placement.round,
        nodes=placement.span.group_world_size,
    )


def restarting(cause: Cause) -> Restarting:
    """Say that a restart after a failure has been granted."""
    return Restarting(
        attempt=cause.attempt, why=cause.why, delay=cause.delay, restarts=cause.restarts
    )


def formed(placement: Placement, group_rank: int) -> RoundFormed:
    """Say that a round has been formed; a `group_rank` of -1 stands for all nodes."""
    return RoundFormed(
        attempt=placement.attempt,
        round=placement.round,
        group_rank=group_rank,
        group_world_size=placement.span.group_world_size,
        world_size=placement.span.world_size,
        master_addr=placement.master_addr,
        master_port=placement.master_port,
        changes=placement.changes,
    )
