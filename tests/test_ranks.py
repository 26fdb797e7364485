"""Who is who: ranks from node sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.errors import SpecError
from elastic_aio.ranks import NodeSize, Place, assign_places


def test_one_node_counts_its_own_workers() -> None:
    """On a single node all ranks are the local rank."""
    first, second = assign_places([NodeSize("default", 2)], 0)
    assert first == Place(0, 0, 0, 0, 2, 2, 2, 1)
    assert second == Place(1, 1, 1, 0, 2, 2, 2, 1)


def test_ranks_are_cumulative_and_roles_count_apart() -> None:
    """Three nodes of two roles give the ranks that torch's agent gives."""
    nodes = [NodeSize("trainer", 2), NodeSize("reader", 3), NodeSize("trainer", 1)]
    places = [assign_places(nodes, rank) for rank in range(3)]
    assert [[place.rank for place in one] for one in places] == [[0, 1], [2, 3, 4], [5]]
    assert [[place.role_rank for place in one] for one in places] == [[0, 1], [0, 1, 2], [2]]
    assert places[2] == (
        Place(
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
def test_every_rank_is_given_exactly_once(sizes: list[tuple[str, int]]) -> None:
    """Global ranks and the role ranks of each role are 0, 1, 2... without gaps."""
    nodes = [NodeSize(role, nproc) for role, nproc in sizes]
    everyone = [
        (nodes[group].role, place)
        for group in range(len(nodes))
        for place in assign_places(nodes, group)
    ]
    assert [place.rank for _, place in everyone] == list(range(len(everyone)))
    for role in "ab":
        mine = [place for name, place in everyone if name == role]
        assert [place.role_rank for place in mine] == list(range(len(mine)))
        assert all(place.role_world_size == len(mine) for place in mine)
    assert all(place.world_size == len(everyone) for _, place in everyone)


@pytest.mark.parametrize(
    ("nodes", "group_rank", "message"),
    [
        ([NodeSize("a", 1)], 1, r"group_rank: must be from 0 to 0, not 1"),
        ([NodeSize("a", 1)], -1, r"group_rank: must be from 0 to 0, not -1"),
        ([NodeSize("a", 1), NodeSize("a", 0)], 0, r"nproc: must be at least 1, not 0"),
    ],
)
def test_impossible_groups_are_refused(
    nodes: list[NodeSize], group_rank: int, message: str
) -> None:
    """A node that is not there and a node without workers are refused."""
    with pytest.raises(SpecError, match=message):
        assign_places(nodes, group_rank)
