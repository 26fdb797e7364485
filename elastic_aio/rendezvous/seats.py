"""Who gets which group rank: those who stay keep theirs, newcomers take what is free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

__all__ = ["Newcomer", "assign_seats"]


class Newcomer(Struct, frozen=True):
    """A member without a place, and the group rank it wishes for."""

    member: str
    wish: int | None = None


def assign_seats(incumbents: Mapping[str, int], newcomers: Sequence[Newcomer]) -> tuple[str, ...]:
    """Return the members of a round by group rank.

    An incumbent keeps its rank unless there are too few nodes for it.  Then come
    the wishes of newcomers, then incumbents who could not stay, then the other
    newcomers; they take the lowest free ranks.

    Args:
        incumbents: the group rank that each had in the round before.
        newcomers: the others, those who came first at the front.
    """
    size = len(incumbents) + len(newcomers)
    seats: list[str | None] = [None] * size
    unseated = []
    by_rank = sorted(incumbents.items(), key=lambda item: item[1])
    wanted = [*by_rank, *((one.member, one.wish) for one in newcomers)]
    for member, rank in wanted:
        if rank is not None and 0 <= rank < size and seats[rank] is None:
            seats[rank] = member
        else:
            unseated.append(member)
    left = iter(unseated)
    return tuple(next(left) if member is None else member for member in seats)
