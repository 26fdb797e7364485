"""Ranks of nodes and workers, computed from the sizes of the nodes of a round; their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from elastic_aio.errors import SpecError
from elastic_aio.value import Value


class NodeSize(Struct, frozen=True):
    """The role and the number of workers of one node of a round."""

    role: str
    nproc: int


class WorkerRanks(Value, frozen=True):
    """The ranks of one worker, and the sizes of the worlds they count in, as in torchrun.

    `rank` counts in the job (`world_size`), `local_rank` on the node (`local_world_size`),
    `role_rank` among the workers of the role (`role_world_size`), and `group_rank`, the rank of the
    node, among the nodes (`group_world_size`).
    """

    rank: int
    local_rank: int
    role_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    role_world_size: int
    group_world_size: int


class NodeRanks(Value, frozen=True):
    """The ranks of one node and the first ranks of its workers.

    `group_rank` counts among `group_world_size` nodes.  Of the node's first worker, `first_rank`
    counts among the `world_size` workers of the job, and `first_role_rank` among the
    `role_world_size` workers of its role.
    """

    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    def worker_ranks(self, nproc: int) -> tuple[WorkerRanks, ...]:
        """Return the ranks of the node's `nproc` workers, by local rank."""
        return tuple(
            WorkerRanks(
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


def assign_node_ranks(nodes: Sequence[NodeSize]) -> tuple[NodeRanks, ...]:
    """Return the ranks of every node of a round, in group rank order, or raise SpecError.

    Global ranks are cumulative in node order, role ranks cumulative among the nodes of the same
    role, as in torch.distributed.elastic.  A node without workers is an error.
    """
    role_worlds: dict[str, int] = {}
    for node in nodes:
        if node.nproc < 1:
            raise SpecError("nproc", node.nproc, "must be at least 1")
        role_worlds[node.role] = role_worlds.get(node.role, 0) + node.nproc
    world = sum(role_worlds.values())
    ranks = []
    first = 0
    first_of_role = dict.fromkeys(role_worlds, 0)
    for group_rank, node in enumerate(nodes):
        ranks.append(
            NodeRanks(
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
    return tuple(ranks)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as in `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


def with_local_rank(text: str, local_rank: int) -> str:
    """Return a text with the local rank of a worker in place of `${local_rank}`."""
    # Nothing else is replaced: torchrun also turns `$$` into `$`, which breaks texts with `$$`.
    return text.replace("${local_rank}", str(local_rank))
