"""How a job uses the store of an engine: `EngineSpec`, frozen and checked when made."""

from __future__ import annotations

from typing import ClassVar, Final

from elastic_aio.errors import SpecError
from elastic_aio.spec.checks import check_number, checked_text
from elastic_aio.value import Value

_RETENTION_MIN: Final = 60.0
"""Seconds; a job must outlive a short failure of the engine."""


class EngineSpec(Value, frozen=True, kw_only=True):
    """The user and the keys of a job on an engine.

    Raises:
        SpecError: one line naming the field, the problem and the value.
    """

    user: str | None = None
    """User of the engine; None for none."""
    password: str | None = None
    """The user's password."""
    sentinel: str | None = None
    """Name of the master that the endpoints, Redis Sentinels, know; None: they are servers."""
    key_prefix: str = "/rendezvous"
    """Precedes the keys of all jobs: two clusters that share an engine need different ones."""
    retention: float = 86400.0
    """Seconds after which the keys of a job are removed that has ended, or lost all nodes."""

    # A spec may be logged.
    _hidden: ClassVar[tuple[str, ...]] = ("password",)

    def __post_init__(self) -> None:
        for name in ("user", "password", "sentinel"):
            if getattr(self, name) is not None:
                checked_text(f"engine.{name}", getattr(self, name))
        if self.password is not None and not self.user:
            raise SpecError("engine.user", self.user, "is needed with engine.password")
        checked_text("engine.key_prefix", self.key_prefix)
        check_number("engine.retention", self.retention, at_least=_RETENTION_MIN)
