"""How a job uses the store of an engine: `EngineSpec`, frozen and checked when made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import check_number, checked_text

_RETENTION_MIN: Final = 60.0
"""Seconds; a job must outlive a short failure of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The user and the keys of a job on an engine.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    user: str | None = None
    """User of the engine; None for none."""
    # Not in the repr: a spec may be logged.
    password: str | None = field(default=None, repr=False)
    """The user's password."""
    sentinel: str | None = None
    """Name of the master that the endpoints, Redis Sentinels, know; None: they are servers."""
    key_prefix: str = "/rendezvous"
    """Precedes the keys of all jobs: two clusters that share an engine need different ones."""
    retention: float = 86400.0
    """Seconds after which the keys of a job are removed that has ended, or lost all nodes."""

    def __post_init__(self) -> None:
        for name in ("user", "password", "sentinel"):
            if getattr(self, name) is not None:
                checked_text(f"engine.{name}", getattr(self, name))
        if self.password is not None and not self.user:
            raise SpecError("engine.user", self.user, "is needed with engine.password")
        checked_text("engine.key_prefix", self.key_prefix)
        check_number("engine.retention", self.retention, at_least=_RETENTION_MIN)
