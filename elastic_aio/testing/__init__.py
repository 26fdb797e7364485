"""Simulated jobs of many nodes, to test restart policies and rounds in virtual time.

::

    from elastic_aio import LaunchSpec, RestartPolicy
    from elastic_aio.testing import Simulation, WorkerBehavior

    sim = Simulation(LaunchSpec("train.py", nnodes=2, restart=RestartPolicy(never_on=[3])))
    sim.behavior = lambda node, placement: WorkerBehavior(seconds=5, exit_code=3)
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: sim.is_over, 60)
    assert a.outcome.exit_code == 3

`Simulation` has the steps (kill, suspend, partition, ...), `WorkerBehavior` says what the workers
of a node do, and `SimNode` is one node.  `InvariantViolated` is raised with a trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_aio.lazy import lazy_exports

if TYPE_CHECKING:
    from elastic_aio.testing.node import SimNode as SimNode
    from elastic_aio.testing.node import WorkerBehavior as WorkerBehavior
    from elastic_aio.testing.simulation import Simulation as Simulation
    from elastic_aio.testing.virtual_time import InvariantViolated as InvariantViolated
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "elastic_aio.testing.node": "SimNode WorkerBehavior",
            "elastic_aio.testing.simulation": "Simulation",
            "elastic_aio.testing.virtual_time": "InvariantViolated",
        },
    )
