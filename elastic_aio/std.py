"""Which standard streams of which workers: masks, and the grammar of `-r` and `-t`.

The grammar is torchrun's, `0..3` or `rank:mask,rank:mask`, for ranks of any size
and with ranges: `0-3:3,10:1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

from elastic_aio.errors import SpecError

__all__ = ["Std", "StdMap"]


class Std(IntFlag):
    """Standard streams, with torch's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


_ACCEPTED = "must be a mask 0-3 or a list such as '0:3,1:1' or '0-3:3,10:1'"


@dataclass(frozen=True, slots=True)
class StdMap:
    """The streams chosen for each local rank.

    `everyone` is the mask of the ranks that `by_rank` does not name.
    """

    everyone: Std = Std.NONE
    by_rank: tuple[tuple[int, Std], ...] = ()

    @classmethod
    def parse(cls, field: str, value: object) -> StdMap:
        """Read a `StdMap` from a mask, a mapping, or the text of `-r`/`-t`.

        Ranks that a list does not name get no stream, as in torchrun.

        Raises:
            SpecError: naming `field`, when the value follows no such form.
        """
        if isinstance(value, StdMap):
            return value
        if isinstance(value, Mapping):
            return cls(by_rank=_checked(field, value, list(value.items())))
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(everyone=_mask(field, value, value))
        if not isinstance(value, str):
            raise SpecError(field, value, _ACCEPTED)
        if _is_number(value.strip()):
            return cls(everyone=_mask(field, value, int(value)))
        pairs: list[tuple[object, object]] = []
        for part in value.split(","):
            ranks, colon, mask = part.strip().partition(":")
            first, dash, last = ranks.partition("-")
            last = last if dash else first
            if not (colon and _is_number(first) and _is_number(last) and _is_number(mask)):
                raise SpecError(field, value, _ACCEPTED)
            if int(first) > int(last):
                raise SpecError(field, value, f"a range must not run backwards ({ranks})")
            pairs += [(rank, int(mask)) for rank in range(int(first), int(last) + 1)]
        return cls(by_rank=_checked(field, value, pairs))

    def of(self, local_rank: int) -> Std:
        """Return the streams of one worker."""
        return dict(self.by_rank).get(local_rank, self.everyone)

    @property
    def is_empty(self) -> bool:
        """Whether no stream of any worker is chosen."""
        return not self.everyone and not any(mask for _, mask in self.by_rank)

    @property
    def highest_rank(self) -> int:
        """The highest local rank named; -1 when none is."""
        return max((rank for rank, _ in self.by_rank), default=-1)


def _is_number(text: str) -> bool:
    # Up to five digits: no machine runs more workers, and a range is written out.
    return text.isdecimal() and len(text) <= 5


def _mask(field: str, value: object, mask: object) -> Std:
    if isinstance(mask, int) and not isinstance(mask, bool) and 0 <= mask <= Std.ALL:
        return Std(mask)
    raise SpecError(field, value, _ACCEPTED)


def _checked(
    field: str, value: object, pairs: list[tuple[object, object]]
) -> tuple[tuple[int, Std], ...]:
    chosen: dict[int, Std] = {}
    for rank, mask in pairs:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise SpecError(field, value, _ACCEPTED)
        if rank in chosen:
            raise SpecError(field, value, f"must name rank {rank} only once")
        chosen[rank] = _mask(field, value, mask)
    return tuple(sorted(chosen.items()))
