"""Simulated nodes: where they meet, what they run, and how they have ended."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import Placement
from elastic_aio.testing import SimNode
from tests.testing.checked import CheckedSimulation


def together(sim: CheckedSimulation, names: Iterable[str]) -> list[SimNode]:
    """Add nodes to a simulation without others; return them once they run a round."""
    nodes = [sim.add_node(name) for name in names]
    sim.run_until(lambda: sim.is_settled(len(nodes)), 60)
    return nodes


def placed(node: SimNode) -> Placement:
    """Return the placement whose workers run on a node."""
    assert node.running is not None, node
    return node.running


def ended(node: SimNode) -> JobOutcome:
    """Return how the job has ended on a node."""
    assert node.outcome is not None, node
    return node.outcome
