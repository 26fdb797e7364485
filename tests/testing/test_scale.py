"""Jobs of more nodes than a host has processes for, in virtual time: counts, and no times."""

from __future__ import annotations

import pytest

from benchmarks.workers.virtual import Year, form


def test_the_traffic_of_a_node_does_not_grow_with_their_number() -> None:
    """Nor do the coordinator's decisions, each of which reads the statuses of all nodes."""
    few, many = form(20), form(120)
    for phase, messages in (("forming", 20), ("reforming", 12)):
        assert many[phase]["messages"] <= messages
        assert many[phase]["bytes"] <= 1.1 * few[phase]["bytes"]
        assert many[phase]["decided"] <= 100


@pytest.mark.slow
def test_days_of_faults() -> None:
    """Failures, hangs, lost hosts and preemptions, eight a day, cost a hundredth of the time."""
    figures = Year(4, 4, seed=1).run()
    assert sum(figures["faults"].values()) >= 20
    assert len(figures["faults"]) >= 4
    assert figures["goodput"] >= 0.985
