"""Node sizes in, ranks out: who is who in a world of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_aio.errors import SpecError

__all__ = ["NodeSize", "Place", "Span", "assign_places", "assign_spans"]


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


@dataclass(frozen=True, slots=True)
class Span:
    """The ranks that one node's workers have: where they begin, and of how many."""

    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def places(self, nproc: int) -> tuple[Place, ...]:
        """Return the places of the node's `nproc` workers, by local rank."""
        return tuple(
            Place(
                rank=self.first_rank + local_rank,
                local_rank=local_rank,
                role_rank=self.first_role_rank + local_rank,
                group_rank=self.group_rank,
                world_size=self.world_size,
                local_world_size=nproc,
                role_world_size=self.role_world_size,
                group_world_size=self.group_world_size,
            )
            for local_rank in range(nproc)
        )


def assign_spans(nodes: Sequence[NodeSize]) -> tuple[Span, ...]:
    """Return the span of every node of a round, in group rank order.

    Global ranks are cumulative in node order, role ranks cumulative among the
    nodes of the same role (torch.distributed.elastic assigns them so).

    Args:
        nodes: every node of the round, in group rank order.

    Raises:
        SpecError: a node is empty.
    """
    role_worlds: dict[str, int] = {}
    for node in nodes:
        if node.nproc < 1:
            raise SpecError("nproc", node.nproc, "must be at least 1")
        role_worlds[node.role] = role_worlds.get(node.role, 0) + node.nproc
    world = sum(role_worlds.values())
    spans = []
    first = 0
    first_of_role = dict.fromkeys(role_worlds, 0)
    for group_rank, node in enumerate(nodes):
        spans.append(
            Span(
                group_rank=group_rank,
                group_world_size=len(nodes),
                first_rank=first,
                world_size=world,
                first_role_rank=first_of_role[node.role],
                role_world_size=role_worlds[node.role],
            )
        )
        first += node.nproc
        first_of_role[node.role] += node.nproc
    return tuple(spans)


def assign_places(nodes: Sequence[NodeSize], group_rank: int) -> tuple[Place, ...]:
    """Return the places of the workers of one node, by local rank (see `assign_spans`).

    Args:
        nodes: every node of the round, in group rank order.
        group_rank: the node whose workers are wanted.

    Raises:
        SpecError: the group rank is not one of the nodes, or a node is empty.
    """
    if not 0 <= group_rank < len(nodes):
        raise SpecError("group_rank", group_rank, f"must be from 0 to {len(nodes) - 1}")
    return assign_spans(nodes)[group_rank].places(nodes[group_rank].nproc)
