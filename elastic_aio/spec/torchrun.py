"""torchrun's values of the settings whose default here is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TORCHRUN_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "restart": {
        "backoff": None,
    },
    "rendezvous": {
        "exit_barrier_timeout": 300.0,
    },
}
"""By the part of a `LaunchSpec`: settings that a program made for torchrun may depend on.  Each has
a row in `docs/reference/torchrun-parity.md`."""
