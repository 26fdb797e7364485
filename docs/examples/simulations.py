"""A simulated job: one node of a simulation."""

# %%
from elastic_aio import LaunchSpec
from elastic_aio.testing import SimNode, Simulation

with Simulation(LaunchSpec("train.py", nnodes="1:2", max_restarts=1), seed=3) as sim:
    nodes: list[SimNode] = [sim.add_node("a"), sim.add_node("b")]
    sim.run_until(lambda: sim.is_settled(2), 60)
    nodes[1].kill()
    sim.run_until(lambda: sim.is_settled(1, nodes[:1]), 120)
    print(nodes[1].is_live, nodes[0].has_place)  # False True
