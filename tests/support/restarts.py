"""Restart policies of tests that are not about delays: every restart is at once."""

from __future__ import annotations

from typing import Any, Final

from elastic_aio.spec.restart import RestartPolicy


def at_once(**policy: Any) -> RestartPolicy:
    """Return a policy without delays, unless it names a back-off."""
    return RestartPolicy(**{"backoff": None, **policy})


AT_ONCE: Final = at_once()
