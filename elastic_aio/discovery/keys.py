"""The keys of a run in the store, and the record of the run that a store belongs to.

All keys of a run are under `run_prefix`.  A store that a node serves has one more key,
`OWNER_KEY`, from its first moment on.  The backend "static" gives a store to one run alone,
because the workers use it too.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

OWNER_KEY: Final = "elastic_aio/owner"

_NODE = "node"
_CLAIM = "claim"


def run_prefix(run_id: str) -> str:
    """Return the prefix of a run's keys, without a slash at its end.

    Slashes are escaped, so that no run has keys among those of another one.
    """
    return f"elastic_aio/{run_id.replace('%', '%25').replace('/', '%2F')}"


class StoreOwner(Struct, frozen=True):
    """The run that a store belongs to; `is_node`: one of its nodes serves the store."""

    run_id: str
    is_node: bool

    def encode(self) -> bytes:
        """Return the value of `OWNER_KEY`."""
        return f"{_NODE if self.is_node else _CLAIM}/{self.run_id}".encode()

    @classmethod
    def decode(cls, value: bytes) -> StoreOwner:
        """Return the owner in a value of `OWNER_KEY`."""
        kind, _, run_id = value.decode("utf-8", "replace").partition("/")
        return cls(run_id, kind == _NODE)
