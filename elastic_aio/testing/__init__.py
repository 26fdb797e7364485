"""Simulated jobs of many nodes, to test policies and rules in no time.

The names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_aio.rendezvous.commands import Rules as Rules
    from elastic_aio.testing.crew import Work as Work
    from elastic_aio.testing.nodes import Node as Node
    from elastic_aio.testing.scenarios import explore as explore
    from elastic_aio.testing.simulation import Simulation as Simulation
    from elastic_aio.testing.witness import InvariantBroken as InvariantBroken

_HOMES = {
    "InvariantBroken": "elastic_aio.testing.witness",
    "Node": "elastic_aio.testing.nodes",
    "Rules": "elastic_aio.rendezvous.commands",
    "Simulation": "elastic_aio.testing.simulation",
    "Work": "elastic_aio.testing.crew",
    "explore": "elastic_aio.testing.scenarios",
}

__all__ = ["InvariantBroken", "Node", "Rules", "Simulation", "Work", "explore"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
