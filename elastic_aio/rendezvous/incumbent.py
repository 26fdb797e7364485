"""Who coordinates, as it stands in the store under the key `coordinator`, as JSON."""

from __future__ import annotations

import msgspec
from msgspec import Struct

__all__ = ["Incumbent", "read_incumbent"]


class Incumbent(Struct, frozen=True):
    """The member that holds the office, `name` being its host's, and its epoch."""

    epoch: int
    member: str
    name: str

    def written(self) -> bytes:
        """Return the JSON that `read_incumbent` reads."""
        return msgspec.json.encode(self)


def read_incumbent(text: bytes | None) -> Incumbent | None:
    """Return who holds the office; None for nobody, or if it cannot be read."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Incumbent)
    # Not all that is no UTF-8 is called a DecodeError, and depth is a RecursionError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
