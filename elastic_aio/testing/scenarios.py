"""Random stories with many faults, and what must be true once the faults are over."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from elastic_aio.backoff import Backoff
from elastic_aio.policy import RestartPolicy
from elastic_aio.rendezvous.commands import Rules
from elastic_aio.rendezvous.tickets import Body, Stay
from elastic_aio.testing.crew import Work
from elastic_aio.testing.nodes import Node
from elastic_aio.testing.simulation import Simulation

__all__ = ["Scenario", "explore"]

_NAMES = "abcdefgh"
_SETTLE_S = 60.0


def explore(seed: int) -> Simulation:
    """Play a random story to its end, and return it.

    A few nodes meet a network and machines that fail in every way for some seconds.
    Then all faults are over, and the nodes have to come together in one round, or the
    job has to end; at last all workers succeed, and the job has to end so for all.

    Raises:
        InvariantBroken: it came otherwise, or what must never happen happened.
    """
    scenario = Scenario(seed)
    scenario.suffer()
    scenario.recover()
    scenario.finish()
    return scenario.sim


class Scenario:
    """One random story, in three acts."""

    def __init__(self, seed: int) -> None:
        """Choose a job and its machines."""
        self._random = random = Random(f"scenario {seed}")
        count = random.randint(2, 5)
        names = _NAMES[:count]
        minimum = random.randint(1, count)
        endpoints = random.choice(
            [names[:1], names[:2], names[:3], ["store0"], ["store0", "store1"], ["store0", "a"]]
        )
        self.sim = Simulation(
            Rules(
                minimum,
                random.randint(minimum, count),
                join_timeout=12.0,
                last_call_timeout=random.choice([0.0, 0.5, 2.0]),
                keeps_workers=random.random() < 0.8,
                asks=random.random() < 0.2,
            ),
            seed=seed,
            endpoints=tuple(endpoints),
            max_restarts=random.choice([0, 1, 3, 3]),
            restart=RestartPolicy(
                backoff=random.choice([None, None, Backoff(initial=0.5, cap=2.0)])
            ),
            deciding=random.choice([0.0, 0.5]),
            heartbeat_timeout=2.0,
            read_timeout=30.0,
            close_timeout=5.0,
            exit_barrier_timeout=30.0,
            delay=random.choice([(0.0005, 0.005), (0.001, 0.1)]),
            noise=random.choice([0.0, 0.2]),
        )
        self._names = names
        self._machines = [*names, *(one for one in endpoints if one.startswith("store"))]
        self._failing = random.choice([0.0, 0.0, 0.1])
        self.sim.work = self._work
        if random.random() < 0.4:
            self.sim.judge.on_order = self._ambush
        for name in names:
            self._add(name, random.random() * random.choice([0.0, 0.3, 3.0]))

    def suffer(self) -> None:
        """Let faults happen."""
        random, sim = self._random, self.sim
        if random.random() < 0.7:
            sim.run(random.random() * 4)
        for _ in range(random.randint(1, 12)):
            sim.run(random.choice([0.001, 0.01, 0.1, 1.0, 2.5]) * random.random() * 2)
            self._fault()

    def recover(self) -> None:
        """Let all faults be over, and wait until those who are left are together."""
        sim = self.sim
        self._failing = 0.0
        sim.judge.on_order = None
        for node in sim.nodes.values():
            if node.machine.is_paused:
                sim.resume(node)
        sim.heal()
        for endpoint in sim.endpoints:
            if endpoint.startswith("store"):
                sim.machine(endpoint)
                if not sim.places[endpoint].is_open:
                    sim.open_place(endpoint)
        sim.run_until(self._is_together, _SETTLE_S)

    def finish(self) -> None:
        """Let all workers succeed, and the job end for all in the same way."""
        sim = self.sim
        left = [node for node in sim.living if _is_seated(node) or node.is_standing_by]
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, _SETTLE_S)
        states = {node.ending.state for node in left if node.ending is not None}
        if len(states) > 1:
            sim.judge.fail(f"the job ended in different ways: {sorted(states)}")

    # ------------------------------------------------------------------- faults

    def _fault(self) -> None:
        faults: list[Callable[[], None]] = [
            self._kill,
            self._kill,
            self._pause,
            self._pause,
            self._break_link,
            self._partition,
            self._partition,
            self.sim.heal,
            self._fail_worker,
            self._fail_worker,
            self._succeed,
            self._stop_store,
            self._leave,
            self._come,
            self._come,
        ]
        self._random.choice(faults)()

    def _ambush(self, node: Node, member: str, body: Body) -> None:
        """Let something happen to those who speak or are spoken to, at that very moment."""
        random = self._random
        if isinstance(body, Stay) or random.random() > 0.05:
            return
        victim = random.choice([node, *(one for one in self.sim.living if one.name == member)])
        strike = random.choice([self.sim.kill, self._stun, self._cut_off])
        self.sim.timeline.at(self.sim.now + random.random() * 0.02, self._strike, strike, victim)

    def _strike(self, strike: Callable[[Node], None], victim: Node) -> None:
        if victim.is_living and self.sim.judge.on_order is not None:
            strike(victim)

    def _stun(self, node: Node) -> None:
        self.sim.pause(node, self._random.random() * 4)

    def _cut_off(self, node: Node) -> None:
        others = [one for one in self._machines if one != node.machine.name]
        self.sim.partition([node.machine.name], others)

    def _kill(self) -> None:
        if node := self._somebody():
            self.sim.kill(node)

    def _pause(self) -> None:
        if node := self._somebody():
            self.sim.pause(node, self._random.choice([0.1, 1.0, 5.0]) * self._random.random() * 2)

    def _break_link(self) -> None:
        if node := self._somebody():
            self.sim.break_link(node)

    def _fail_worker(self) -> None:
        if node := self._somebody():
            self.sim.fail_worker(node, self._random.choice([1, 3]))

    def _succeed(self) -> None:
        node = self._somebody()
        if node is not None and not node.machine.is_paused and self._random.random() < 0.5:
            node.crew.succeed()

    def _stop_store(self) -> None:
        self.sim.stop_store(self._random.choice(self.sim.endpoints))

    def _leave(self) -> None:
        if node := self._somebody():
            self.sim.leave(node)

    def _partition(self) -> None:
        machines = list(self._machines)
        self._random.shuffle(machines)
        cut = self._random.randint(1, len(machines) - 1)
        self.sim.partition(machines[:cut], machines[cut:], one_way=self._random.random() < 0.3)

    def _come(self) -> None:
        name = self._random.choice([*self._names, "z"])
        node = self.sim.nodes.get(name)
        if node is not None and (node.has_left or not node.machine.is_alive):
            self.sim.add_node(name)
        elif node is None:
            self._add(name, 0.0)

    def _add(self, name: str, delay: float) -> None:
        random = self._random
        wish = random.choice([None, None, None, 0, 1])
        rate = random.choice([1.0, 0.97, 1.03])
        offset = random.choice([0.0, 7200.0, -86400.0])

        def add() -> None:
            if name in self.sim.nodes:
                return
            self.sim.add_node(name, wish=wish, rate=rate, offset=offset)

        if delay:
            self.sim.timeline.at(self.sim.now + delay, add)
        else:
            add()

    def _somebody(self) -> Node | None:
        living = self.sim.living
        return self._random.choice(living) if living else None

    def _work(self, node: Node, placement: object) -> Work:
        random = self._random
        starting, stopping = random.choice([0.0, 0.05, 0.5]), random.choice([0.0, 0.05, 0.5])
        if random.random() < self._failing:
            return Work(random.random() * 2, 1, starting, stopping)
        return Work(None, 0, starting, stopping)

    # ----------------------------------------------------------------- progress

    def _is_together(self) -> bool:
        """Whether all that live are in one round, or stand by because it is full."""
        sim = self.sim
        living = sim.living
        if not living:
            return True
        if any(node.ending and not node.has_left for node in sim.nodes.values()):
            return False
        rules = sim.rules
        seated = [node for node in living if _is_seated(node)]
        rounds = {(one.round, one.origin) for node in seated if (one := node.member.held)}
        if len(rounds) != 1:
            return False
        held = seated[0].member.held
        assert held is not None
        size = held.span.group_world_size
        key = held.round, held.origin
        done = [
            node
            for node in sim.incarnations
            if node.crew.is_done and (one := node.member.held) and (one.round, one.origin) == key
        ]
        stores = {node.attendance.place if node.attendance else None for node in living}
        if len(stores) > 1 or not all(one is not None and one.is_open for one in stores):
            return False
        bureaus = [node.attendance.bureau for node in living if node.attendance]
        offices = [one for one in bureaus if one is not None]
        if len(offices) != 1 or not all(offices[0].knows(node.name) for node in living):
            return False
        if any(not node.is_standing_by for node in living if node not in seated):
            return False
        if done:
            return len(seated) <= size <= len(seated) + sum(node not in seated for node in done)
        return rules.minimum <= len(seated) == size == min(rules.maximum, len(living))


def _is_seated(node: Node) -> bool:
    return node.running is not None or node.crew.is_done
