"""Node sizes in, ranks out: who is who in a world of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_aio.errors import SpecError

__all__ = ["NodeSize", "Place", "assign_places"]


@dataclass(frozen=True, slots=True)
class NodeSize:
    """What one node brings to a round: its role and its number of workers."""

    role: str
    nproc: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one worker: its ranks and the sizes they count within."""

    rank: int
    local_rank: int
    role_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    role_world_size: int
    group_world_size: int


def assign_places(nodes: Sequence[NodeSize], group_rank: int) -> tuple[Place, ...]:
    """Return the places of the workers of one node, by local rank.

    Global ranks are cumulative in node order, role ranks cumulative among the
    nodes of the same role (torch.distributed.elastic assigns them so).

    Args:
        nodes: every node of the round, in group rank order.
        group_rank: the node whose workers are wanted.

    Raises:
        SpecError: the group rank is not one of the nodes, or a node is empty.
    """
    if not 0 <= group_rank < len(nodes):
        raise SpecError("group_rank", group_rank, f"must be from 0 to {len(nodes) - 1}")
    for node in nodes:
        if node.nproc < 1:
            raise SpecError("nproc", node.nproc, "must be at least 1")
    here = nodes[group_rank]
    before = nodes[:group_rank]
    base = sum(node.nproc for node in before)
    role_base = sum(node.nproc for node in before if node.role == here.role)
    world = sum(node.nproc for node in nodes)
    role_world = sum(node.nproc for node in nodes if node.role == here.role)
    return tuple(
        Place(
            rank=base + local_rank,
            local_rank=local_rank,
            role_rank=role_base + local_rank,
            group_rank=group_rank,
            world_size=world,
            local_world_size=here.nproc,
            role_world_size=role_world,
            group_world_size=len(nodes),
        )
        for local_rank in range(here.nproc)
    )
