"""Random scenarios with many faults, and what must hold once the faults are over."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from elastic_aio.rendezvous.members import RoundSettings
from elastic_aio.rendezvous.messages import OrderBody, WaitForNodes
from elastic_aio.spec.restart import Backoff, RestartPolicy
from elastic_aio.testing.invariants import NodePort
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.settings import WorkerBehavior
from elastic_aio.testing.simulation import Simulation

_NAMES = "abcdefgh"
_SETTLE_S = 60.0


def run_random_scenario(seed: int) -> Simulation:
    """Run a random scenario to its end, and return the simulation.

    For some seconds, the network and the hosts of a few nodes fail in many ways.  Then
    all faults are over, and the nodes must come together in one round, or the job must
    end; finally all workers succeed, and the job must end with one outcome on all nodes.

    Raises:
        InvariantViolated: an invariant does not hold, or the nodes do not come together.
    """
    scenario = Scenario(seed)
    scenario.inject_faults()
    scenario.recover()
    scenario.finish()
    return scenario.sim


class Scenario:
    """One random scenario: faults, recovery, and the end."""

    def __init__(self, seed: int) -> None:
        """Choose a job and its hosts."""
        self._random = random = Random(f"scenario {seed}")
        count = random.randint(2, 5)
        names = _NAMES[:count]
        minimum = random.randint(1, count)
        endpoints = random.choice(
            [names[:1], names[:2], names[:3], ["store0"], ["store0", "store1"], ["store0", "a"]]
        )
        max_restarts = random.choice([0, 1, 3, 3])
        backoff = random.choice([None, None, Backoff(initial=0.5, cap=2.0)])
        self.sim = Simulation(
            RoundSettings(
                minimum,
                random.randint(minimum, count),
                join_timeout=12.0,
                last_call_timeout=random.choice([0.0, 0.5, 2.0]),
                keep_workers=random.random() < 0.8,
                has_decide=random.random() < 0.2,
            ),
            seed=seed,
            endpoints=tuple(endpoints),
            max_restarts=max_restarts,
            restart=RestartPolicy(backoff=backoff if max_restarts else None),
            decide_duration=random.choice([0.0, 0.5]),
            heartbeat_timeout=2.0,
            read_timeout=30.0,
            close_timeout=5.0,
            exit_barrier_timeout=30.0,
            delay=random.choice([(0.0005, 0.005), (0.001, 0.1)]),
            noise=random.choice([0.0, 0.2]),
        )
        self._names = names
        self._hosts = [*names, *(one for one in endpoints if one.startswith("store"))]
        self._failing = random.choice([0.0, 0.0, 0.1])
        self.sim.behavior = self._behavior
        if random.random() < 0.4:
            self.sim.checker.order_hook = self._inject_on_send
        for name in names:
            self._add(name, random.random() * random.choice([0.0, 0.3, 3.0]))

    def inject_faults(self) -> None:
        """Inject random faults, one after the other."""
        random, sim = self._random, self.sim
        if random.random() < 0.7:
            sim.run(random.random() * 4)
        for _ in range(random.randint(1, 12)):
            sim.run(random.choice([0.001, 0.01, 0.1, 1.0, 2.5]) * random.random() * 2)
            self._fault()

    def recover(self) -> None:
        """End all faults, and wait until the remaining nodes are together."""
        sim = self.sim
        self._failing = 0.0
        sim.checker.order_hook = None
        for node in sim.nodes.values():
            if node.host.is_suspended:
                sim.resume(node)
        sim.heal()
        for endpoint in sim.endpoints:
            if endpoint.startswith("store"):
                sim.cluster.host(endpoint)
                if not sim.cluster.stores[endpoint].is_open:
                    sim.cluster.open_store(endpoint)
        sim.run_until(self._is_together, _SETTLE_S)

    def finish(self) -> None:
        """Let all workers succeed, and check that the job ends with one outcome."""
        sim = self.sim
        left = [node for node in sim.live_nodes if _has_place(node) or node.is_standing_by]
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, _SETTLE_S)
        states = {node.outcome.state for node in left if node.outcome is not None}
        if len(states) > 1:
            sim.checker.fail(f"the job ended in different ways: {sorted(states)}")

    # ------------------------------------------------------------------- faults

    def _fault(self) -> None:
        sim, random = self.sim, self._random
        kill, fail = self._of_node(sim.kill), self._of_node(self._fail_worker)
        suspend = self._of_node(
            lambda node: sim.suspend(node, random.choice([0.1, 1.0, 5.0]) * random.random() * 2)
        )
        faults = [
            kill,
            kill,
            suspend,
            suspend,
            self._of_node(sim.break_connection),
            self._partition,
            self._partition,
            sim.heal,
            fail,
            fail,
            self._of_node(self._succeed),
            lambda: sim.stop_store(random.choice(sim.endpoints)),
            self._of_node(sim.leave),
            self._add_or_restart,
            self._add_or_restart,
        ]
        random.choice(faults)()

    def _of_node(self, fault: Callable[[SimNode], None]) -> Callable[[], None]:
        """Return a call that injects a fault into a random node, if there is one."""

        def inject() -> None:
            if live_nodes := self.sim.live_nodes:
                fault(self._random.choice(live_nodes))

        return inject

    def _inject_on_send(self, node: NodePort, member: str, body: OrderBody) -> None:
        """Inject a fault into the sender or the receiver of an order, just after it."""
        random, sim = self._random, self.sim
        if isinstance(body, WaitForNodes) or random.random() > 0.05:
            return
        sender = sim.nodes[node.host.name]
        victim = random.choice([sender, *(one for one in sim.live_nodes if one.name == member)])
        fault = random.choice([sim.kill, self._suspend, self._isolate])
        sim.time.at(sim.now + random.random() * 0.02, self._inject, fault, victim)

    def _inject(self, fault: Callable[[SimNode], None], victim: SimNode) -> None:
        if victim.is_live and self.sim.checker.order_hook is not None:
            fault(victim)

    def _suspend(self, node: SimNode) -> None:
        self.sim.suspend(node, self._random.random() * 4)

    def _isolate(self, node: SimNode) -> None:
        others = [one for one in self._hosts if one != node.host.name]
        self.sim.partition([node.host.name], others)

    def _fail_worker(self, node: SimNode) -> None:
        self.sim.fail_worker(node, self._random.choice([1, 3]))

    def _succeed(self, node: SimNode) -> None:
        if not node.host.is_suspended and self._random.random() < 0.5:
            node.agent.end_workers(0)

    def _partition(self) -> None:
        hosts = list(self._hosts)
        self._random.shuffle(hosts)
        cut = self._random.randint(1, len(hosts) - 1)
        self.sim.partition(hosts[:cut], hosts[cut:], one_way=self._random.random() < 0.3)

    def _add_or_restart(self) -> None:
        name = self._random.choice([*self._names, "z"])
        node = self.sim.nodes.get(name)
        if node is not None and (node.has_left or not node.host.is_alive):
            self.sim.add_node(name)
        elif node is None:
            self._add(name, 0.0)

    def _add(self, name: str, delay: float) -> None:
        random = self._random
        rank = random.choice([None, None, None, 0, 1])
        rate = random.choice([1.0, 0.97, 1.03])
        offset = random.choice([0.0, 7200.0, -86400.0])

        def add() -> None:
            if name in self.sim.nodes:
                return
            self.sim.add_node(name, preferred_rank=rank, rate=rate, offset=offset)

        if delay:
            self.sim.time.at(self.sim.now + delay, add)
        else:
            add()

    def _behavior(self, node: SimNode, placement: object) -> WorkerBehavior:
        random = self._random
        start, stop = random.choice([0.0, 0.05, 0.5]), random.choice([0.0, 0.05, 0.5])
        if random.random() < self._failing:
            return WorkerBehavior(random.random() * 2, 1, start, stop)
        return WorkerBehavior(None, 0, start, stop)

    # ----------------------------------------------------------------- progress

    def _is_together(self) -> bool:
        """Return whether all live nodes are in one round, or on standby because it is full."""
        sim = self.sim
        live = sim.live_nodes
        if not live:
            return True
        if any(node.outcome and not node.has_left for node in sim.nodes.values()):
            return False
        if not self._is_one_store(live):
            return False
        placed = [node for node in live if _has_place(node)]
        rounds = {_round_of(node): node.member.status.placement for node in placed}
        if len(rounds) != 1:
            return False
        key, placement = next(iter(rounds.items()))
        assert placement is not None
        size = placement.span.group_world_size
        if any(not node.is_standing_by for node in live if node not in placed):
            return False
        done = [one for one in sim.processes if one.member.has_succeeded and _round_of(one) == key]
        if done:
            return len(placed) <= size <= len(placed) + sum(one not in placed for one in done)
        settings = sim.settings
        return settings.minimum <= len(placed) == size == min(settings.maximum, len(live))

    def _is_one_store(self, live: list[SimNode]) -> bool:
        """Return whether all live nodes are at one store, and known to one coordinator."""
        sessions = [node.session for node in live if node.session is not None]
        stores = {session.store for session in sessions}
        if len(sessions) != len(live) or len(stores) != 1 or not stores.pop().is_open:
            return False
        leaders = [one.coordinator for one in sessions if one.coordinator is not None]
        return len(leaders) == 1 and all(leaders[0].knows(node.name) for node in live)


def _has_place(node: SimNode) -> bool:
    return node.running is not None or node.member.has_succeeded


def _round_of(node: SimNode) -> tuple[int, str] | None:
    placement = node.member.status.placement
    return None if placement is None else (placement.round, placement.formed_by)
