"""A fault at each moment of the end of a job, and the next job of the same id after it.

The simulation checks its invariants: no round after a success, no worker of two jobs in one
round, one end.  `ELASTIC_AIO_END_FAULTS` is the fraction of the moments that are tried, in
percent; which ones depends on `ELASTIC_AIO_SIMULATIONS_SEED`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from random import Random

import pytest

from elastic_aio.outcome import JobState
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.testing import InvariantViolated, SimNode, WorkerBehavior
from tests.testing.checked import CheckedSimulation

PERCENT = float(os.environ.get("ELASTIC_AIO_END_FAULTS", "3"))
SEED = int(os.environ.get("ELASTIC_AIO_SIMULATIONS_SEED", "0"))

Fault = Callable[[CheckedSimulation, SimNode], None]


def others(sim: CheckedSimulation, node: SimNode) -> list[str]:
    names = dict.fromkeys([*sim.nodes, *sim.endpoints, "c", "next"])
    return [name for name in names if name != node.host.name]


def cut_off(sim: CheckedSimulation, node: SimNode) -> None:
    sim.partition([node.host.name], others(sim, node))


def reset_and_cut_off(sim: CheckedSimulation, node: SimNode) -> None:
    sim.break_connection(node)
    cut_off(sim, node)


FAULTS: dict[str, Fault] = {
    "kill": CheckedSimulation.kill,
    "switch off": CheckedSimulation.switch_off,
    "suspend": lambda sim, node: sim.suspend(node.host.name, 5.0),
    "break": CheckedSimulation.break_connection,
    "cut off": cut_off,
    "cut off, reset": reset_and_cut_off,
    "deafen": lambda sim, node: sim.partition(others(sim, node), [node.host.name], one_way=True),
}

JOBS: dict[str, tuple[list[str], str, bool, int]] = {
    "a store": (["store0"], "2", False, 0),
    "a store, reused": (["store0"], "2", True, 0),
    "a node": (["a"], "2", False, 0),
    "two nodes": (["a", "b"], "1:3", False, 0),
    "a store and a node": (["store0", "a"], "1:2", False, 0),
    "a failure": (["a", "b"], "2", False, 3),
}
"""Endpoints, number of nodes, whether nodes begin another job, and the exit code at the end."""


class Moment:
    """A condition that holds at the n-th step; `count` is how many there were."""

    def __init__(self, n: int) -> None:
        self.count = 0
        self._n = n

    def __call__(self) -> bool:
        self.count += 1
        return self.count > self._n


def run_to_end(
    job: tuple[list[str], str, bool, int], seed: int, moment: int, fault: Fault | None, victim: int
) -> int:
    """Run a job to its end, with a fault, and then the next one; return how long the end was."""
    endpoints, nnodes, reuse, code = job
    rendezvous = RendezvousSpec(
        last_call_timeout=0.5,
        join_timeout=20.0,
        heartbeat_timeout=2.0,
        read_timeout=30.0,
        close_timeout=5.0,
        exit_barrier_timeout=30.0,
        reuse=reuse,
    )
    spec = LaunchSpec("x", nnodes=nnodes, rendezvous=rendezvous)
    random = Random(f"{seed} {moment}")
    with CheckedSimulation(spec, seed=seed, endpoints=endpoints) as sim:
        for name in "abc"[: spec.nnodes.maximum]:
            sim.add_host(name)
        for name in ("c", "next"):
            sim.add_host(name)
        nodes = [sim.add_node(name) for name in "abc"[: spec.nnodes.maximum]]
        sim.run_until(lambda: sim.is_settled(len(nodes)), 60)
        sim.behavior = lambda node, placement: WorkerBehavior(seconds=5.0)
        if code:
            sim.fail_worker(nodes[0], code)
        else:
            for number, node in enumerate(nodes):
                sim.time.at(sim.now + 0.01 * number, node.end_workers, 0)
        if fault is None:
            steps = Moment(1_000_000)
            sim.run_until(lambda: steps() or sim.is_over, 60)
            return steps.count
        sim.run_until(Moment(moment), 60)
        leader = next(iter(sim.coordinators), nodes[0])
        live_nodes = sorted(sim.live_nodes, key=lambda one: one is not leader)
        if not live_nodes:
            return 0
        fault(sim, live_nodes[victim % len(live_nodes)])
        limit = sim.now + random.choice([0.0, 1.0, 8.0]) * random.random()
        sim.run_until(lambda: bool(sim.outcomes) and sim.now >= limit, 60)
        for name in dict.fromkeys([*(one for one in endpoints if one in sim.nodes), "next", "b"]):
            if name not in sim.nodes or not sim.nodes[name].is_live:
                sim.add_node(name)
        sim.run(random.choice([0.0, 1.0, 6.0]) * random.random())
        sim.end_faults()
        sim.run_until(lambda: sim.is_over, 300)
        states = {one.state for one in sim.outcomes.values() if not one.is_rendezvous}
        assert states <= {JobState.SUCCEEDED, JobState.FAILED}
        return 0


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("job", JOBS)
def test_a_fault_at_each_moment_of_the_end(job: str, fault: str) -> None:
    random = Random(f"{SEED} {job} {fault}")
    for seed in (SEED, SEED + 1):
        count = run_to_end(JOBS[job], seed, 0, None, 0)
        moments = itertools.product(range(count), range(2))
        chosen = [one for one in moments if random.random() * 100 < PERCENT]
        for moment, victim in chosen:
            try:
                run_to_end(JOBS[job], seed, moment, FAULTS[fault], victim)
            except InvariantViolated as error:
                error.add_note(f"{job}, {fault} of {victim} at step {moment}")
                raise
