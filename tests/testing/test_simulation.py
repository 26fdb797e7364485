"""A `Simulation` of a user's program, of which no invariant is checked."""

from __future__ import annotations

import pytest

from elastic_aio.outcome import JobState
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.testing import InvariantViolated, Simulation, WorkerBehavior
from tests.testing.checked import CheckedSimulation

SPEC = LaunchSpec(
    "x", nnodes="1:2", max_restarts=2, rendezvous=RendezvousSpec(last_call_timeout=0.5)
)


def play(sim: Simulation) -> Simulation:
    """Let a worker fail, then a node be lost, and the other one succeed."""
    with sim:
        a, b = sim.add_node("a"), sim.add_node("b")
        sim.run_until(lambda: sim.is_settled(2), 60)
        sim.fail_worker(a, 3)
        sim.run_until(lambda: a.placement is not None and a.placement.restarts == 1, 60)
        sim.run_until(lambda: sim.is_settled(2), 60)
        sim.kill(b)
        sim.run_until(lambda: sim.is_settled(1), 60)
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, 60)
    return sim


@pytest.mark.parametrize("seed", range(3))
def test_a_check_changes_no_step(seed: int) -> None:
    sim, checked = play(Simulation(SPEC, seed=seed)), play(CheckedSimulation(SPEC, seed=seed))
    assert sim.outcomes == checked.outcomes
    assert sim.outcomes["a.1"].state is JobState.SUCCEEDED
    assert set(sim.trace.splitlines()) <= set(checked.trace.splitlines())
    assert "a.1: ends: succeeded, all workers have finished" in sim.trace
    assert "runs round" in sim.trace


def test_a_behavior_that_fails_ends_the_simulation() -> None:
    def behavior(node: object, placement: object) -> WorkerBehavior:
        raise KeyError("behavior")

    with Simulation(SPEC) as sim:
        sim.behavior = behavior
        sim.add_node("a")
        with pytest.raises(KeyError, match="behavior"):
            sim.run(60)


def test_a_condition_that_does_not_hold_has_the_trace() -> None:
    with Simulation(SPEC, seed=7) as sim:
        sim.add_node("a")
        with pytest.raises(InvariantViolated, match=r"seed 7: the condition .* 5 s") as error:
            sim.run_until(lambda: sim.is_over, 5)
    assert "a.1: is started" in str(error.value)
