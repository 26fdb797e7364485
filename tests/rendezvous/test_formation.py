"""Assignment of group ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.rendezvous.formation import Joiner, assign_group_ranks

INCUMBENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.integers(0, 8), max_size=8
).filter(lambda ranks: len(set(ranks.values())) == len(ranks))
NEWCOMERS = st.lists(
    st.builds(Joiner, st.text("xyz", min_size=1, max_size=3), st.none() | st.integers(-2, 1 << 40)),
    max_size=8,
    unique_by=lambda one: one.member,
)


@given(INCUMBENTS, NEWCOMERS)
def test_each_member_has_one_rank(incumbents: dict[str, int], newcomers: list[Joiner]) -> None:
    placements = assign_group_ranks(incumbents, newcomers)
    assert sorted(placements) == sorted([*incumbents, *(one.member for one in newcomers)])


@given(INCUMBENTS, NEWCOMERS)
def test_staying_members_keep_their_ranks(
    incumbents: dict[str, int], newcomers: list[Joiner]
) -> None:
    """If there are enough nodes."""
    placements = assign_group_ranks(incumbents, newcomers)
    for member, rank in incumbents.items():
        if rank < len(placements):
            assert placements[rank] == member


@given(INCUMBENTS, NEWCOMERS)
def test_preferred_ranks_come_before_the_order_of_arrival(
    incumbents: dict[str, int], newcomers: list[Joiner]
) -> None:
    placements = assign_group_ranks(incumbents, newcomers)
    for rank in set(range(len(placements))) - set(incumbents.values()):
        wished = [one.member for one in newcomers if one.preferred_rank == rank]
        if wished:
            assert placements[rank] == wished[0]


@given(NEWCOMERS)
def test_other_joiners_keep_the_order_of_arrival(newcomers: list[Joiner]) -> None:
    placements = assign_group_ranks({}, newcomers)
    wishless = [one.member for one in newcomers if one.preferred_rank is None]
    assert [one for one in placements if one in wishless] == wishless


def test_a_joiner_takes_the_free_rank() -> None:
    assert assign_group_ranks({"a": 0, "c": 2}, [Joiner("d")]) == ("a", "d", "c")
    assert assign_group_ranks({"b": 1, "c": 2}, []) == ("c", "b")
