"""Group ranks: those who stay keep theirs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.rendezvous.seats import Newcomer, assign_seats

INCUMBENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.integers(0, 8), max_size=8
).filter(lambda ranks: len(set(ranks.values())) == len(ranks))
NEWCOMERS = st.lists(
    st.builds(
        Newcomer, st.text("xyz", min_size=1, max_size=3), st.none() | st.integers(-2, 1 << 40)
    ),
    max_size=8,
    unique_by=lambda one: one.member,
)


@given(INCUMBENTS, NEWCOMERS)
def test_everybody_has_one_rank(incumbents: dict[str, int], newcomers: list[Newcomer]) -> None:
    """All ranks from 0 are given, each once."""
    seats = assign_seats(incumbents, newcomers)
    assert sorted(seats) == sorted([*incumbents, *(one.member for one in newcomers)])


@given(INCUMBENTS, NEWCOMERS)
def test_incumbents_keep_their_ranks(incumbents: dict[str, int], newcomers: list[Newcomer]) -> None:
    """As long as there are so many nodes."""
    seats = assign_seats(incumbents, newcomers)
    for member, rank in incumbents.items():
        if rank < len(seats):
            assert seats[rank] == member


@given(INCUMBENTS, NEWCOMERS)
def test_wishes_come_before_the_order_of_coming(
    incumbents: dict[str, int], newcomers: list[Newcomer]
) -> None:
    """A free rank that somebody wished for has one of those who did."""
    seats = assign_seats(incumbents, newcomers)
    for rank in set(range(len(seats))) - set(incumbents.values()):
        wished = [one.member for one in newcomers if one.wish == rank]
        if wished:
            assert seats[rank] == wished[0]


@given(NEWCOMERS)
def test_the_others_keep_the_order_of_coming(newcomers: list[Newcomer]) -> None:
    """Those who were granted no wish fill the lowest ranks that are left."""
    seats = assign_seats({}, newcomers)
    wishless = [one.member for one in newcomers if one.wish is None]
    assert [one for one in seats if one in wishless] == wishless


def test_a_vacated_rank_is_taken_by_who_comes() -> None:
    """Nobody else moves."""
    assert assign_seats({"a": 0, "c": 2}, [Newcomer("d")]) == ("a", "d", "c")
    assert assign_seats({"b": 1, "c": 2}, []) == ("c", "b")
