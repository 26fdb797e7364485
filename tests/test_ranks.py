"""Ranks of workers and nodes, from the sizes of the nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.ranks import NodeSize, WorkerRanks, assign_node_ranks, format_ranks


def worker_ranks(nodes: list[NodeSize], group_rank: int) -> tuple[WorkerRanks, ...]:
    return assign_node_ranks(nodes)[group_rank].worker_ranks(nodes[group_rank].nproc)


def test_one_node() -> None:
    """All ranks are the local rank."""
    first, second = worker_ranks([NodeSize("default", 2)], 0)
    assert first == WorkerRanks(0, 0, 0, 0, 2, 2, 2, 1)
    assert second == WorkerRanks(1, 1, 1, 0, 2, 2, 2, 1)


def test_ranks_are_cumulative_and_roles_count_apart() -> None:
    """Three nodes of two roles get the ranks that torch's agent assigns."""
    nodes = [NodeSize("trainer", 2), NodeSize("reader", 3), NodeSize("trainer", 1)]
    ranks = [worker_ranks(nodes, group_rank) for group_rank in range(3)]
    assert [[worker.rank for worker in node] for node in ranks] == [[0, 1], [2, 3, 4], [5]]
    assert [[worker.role_rank for worker in node] for node in ranks] == [[0, 1], [0, 1, 2], [2]]
    assert ranks[2] == (
        WorkerRanks(
            rank=5,
            local_rank=0,
            role_rank=2,
            group_rank=2,
            world_size=6,
            local_world_size=1,
            role_world_size=3,
            group_world_size=3,
        ),
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), min_size=1, max_size=8))
def test_every_rank_is_assigned_exactly_once(sizes: list[tuple[str, int]]) -> None:
    """Global ranks and the role ranks of each role are 0, 1, 2... without gaps."""
    nodes = [NodeSize(role, nproc) for role, nproc in sizes]
    workers = [
        (nodes[group_rank].role, worker)
        for group_rank in range(len(nodes))
        for worker in worker_ranks(nodes, group_rank)
    ]
    assert [worker.rank for _, worker in workers] == list(range(len(workers)))
    for role in "ab":
        peers = [worker for name, worker in workers if name == role]
        assert [worker.role_rank for worker in peers] == list(range(len(peers)))
        assert all(worker.role_world_size == len(peers) for worker in peers)
    assert all(worker.world_size == len(workers) for _, worker in workers)


def test_a_node_without_workers_is_refused() -> None:
    with pytest.raises(SpecError, match=r"nproc: must be at least 1 \(got 0\)"):
        assign_node_ranks([NodeSize("a", 1), NodeSize("a", 0)])


def test_ranks_are_short() -> None:
    assert format_ranks([3, 0, 1, 2, 9]) == "0-3, 9"
