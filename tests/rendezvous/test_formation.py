"""Assignment of group ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.rendezvous.formation import assign_group_ranks

INCUMBENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.integers(0, 8), max_size=8
).filter(lambda ranks: len(set(ranks.values())) == len(ranks))
NEWCOMERS = st.dictionaries(
    st.text("xyz", min_size=1, max_size=3), st.none() | st.integers(-2, 1 << 40), max_size=8
)


@given(INCUMBENTS, NEWCOMERS)
def test_each_member_has_one_rank(
    incumbents: dict[str, int], newcomers: dict[str, int | None]
) -> None:
    placements = assign_group_ranks(incumbents, newcomers)
    assert sorted(placements) == sorted([*incumbents, *newcomers])


@given(INCUMBENTS, NEWCOMERS)
def test_staying_members_keep_their_ranks(
    incumbents: dict[str, int], newcomers: dict[str, int | None]
) -> None:
    """If there are enough nodes."""
    placements = assign_group_ranks(incumbents, newcomers)
    for member, rank in incumbents.items():
        if rank < len(placements):
            assert placements[rank] == member


@given(INCUMBENTS, NEWCOMERS)
def test_preferred_ranks_come_before_the_order_of_arrival(
    incumbents: dict[str, int], newcomers: dict[str, int | None]
) -> None:
    placements = assign_group_ranks(incumbents, newcomers)
    for rank in set(range(len(placements))) - set(incumbents.values()):
        wished = [member for member, preferred in newcomers.items() if preferred == rank]
        if wished:
            assert placements[rank] == wished[0]


@given(NEWCOMERS)
def test_other_joiners_keep_the_order_of_arrival(newcomers: dict[str, int | None]) -> None:
    placements = assign_group_ranks({}, newcomers)
    wishless = [member for member, preferred in newcomers.items() if preferred is None]
    assert [one for one in placements if one in wishless] == wishless


def test_a_joiner_takes_the_free_rank() -> None:
    assert assign_group_ranks({"a": 0, "c": 2}, {"d": None}) == ("a", "d", "c")
    assert assign_group_ranks({"b": 1, "c": 2}, {}) == ("c", "b")
