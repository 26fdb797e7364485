"""A job of many nodes in virtual time, driven by the code that decides in real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from msgspec.structs import replace

from elastic_aio.outcome import Failure
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import Ending, Placement
from elastic_aio.rendezvous.commands import Rules
from elastic_aio.rendezvous.state import Coordinator
from elastic_aio.testing.crew import Work
from elastic_aio.testing.network import Network
from elastic_aio.testing.nodes import Node, Settings
from elastic_aio.testing.places import Place
from elastic_aio.testing.timeline import Machine, Timeline
from elastic_aio.testing.witness import Judge

__all__ = ["Simulation"]


class Simulation:
    """Nodes, stores and a network, none of them real; the same seed is the same story.

    What decides is the code that decides in a real job.  At each step it is compared
    with the rules that hold for every job (see `elastic_aio.testing.witness`), and
    the first that is broken raises `InvariantBroken` with the story so far.

    A restart policy over a hundred failing attempts::

        policy = RestartPolicy(backoff=Backoff(initial=1, cap=60), never_on=[3])
        sim = Simulation(Rules(2, 2), restart=policy, max_restarts=100)
        sim.work = lambda node, placement: Work(seconds=5, exit_code=1)
        a, b = sim.add_node("a"), sim.add_node("b")
        sim.run_until(lambda: sim.is_over, 100_000)
        assert a.ending.restarts == 100
        assert "all 100 restarts are used up" in a.ending.why

    A partition::

        sim = Simulation(Rules(1, 3), seed=7)
        a, b, c = (sim.add_node(name) for name in "abc")
        sim.run_until(lambda: sim.is_settled(3), 60)
        sim.partition(["a", "b"], ["c"])
        sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)
        sim.heal()
        sim.run_until(lambda: sim.is_settled(3), 60)
    """

    def __init__(
        self,
        rules: Rules,
        *,
        seed: int = 0,
        endpoints: Sequence[str] = (),
        max_restarts: int = 3,
        restart: RestartPolicy | None = None,
        decide: Callable[[Failure], Action] | None = None,
        deciding: float = 0.0,
        heartbeat_timeout: float = 5.0,
        store_grace: float | None = None,
        read_timeout: float = 60.0,
        close_timeout: float = 30.0,
        exit_barrier_timeout: float = 300.0,
        delay: tuple[float, float] = (0.0005, 0.005),
        noise: float = 0.0,
    ) -> None:
        """Begin at 0 seconds, without nodes.

        Args:
            rules: how many nodes the job wants, and how long they are waited for.
            seed: of everything that is left to chance.
            endpoints: machines at which the nodes meet, in the order of preference: a
                node's name, or any other for a machine that only serves a store.
                None: the first node.
            max_restarts: how many restarts there may be.
            restart: the policy.
            decide: the user's callback about each failure; it takes `deciding` seconds.
            deciding: see `decide`.
            heartbeat_timeout: seconds of silence after which a node is lost.
            store_grace: seconds that workers run on without a store; None is
                `heartbeat_timeout`.
            read_timeout: seconds to look for a store.
            close_timeout: seconds for which the last node waits for the others.
            exit_barrier_timeout: seconds for which one that has succeeded does.
            delay: least and most seconds that a message takes.
            noise: share of notifications that come a second time, late.
        """
        self.random = Random(seed)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.random, delay)
        self.places: dict[str, Place] = {}
        self.nodes: dict[str, Node] = {}
        """The newest incarnation of each node, by its machine's name."""
        self.incarnations: list[Node] = []
        """All nodes there ever were."""
        self.work: Callable[[Node, Placement], Work] = lambda node, placement: Work()
        """What the workers of a node do in a round; they run on for ever at first."""
        self._machines: dict[str, Machine] = {}
        self._noise = noise
        self._settings = Settings(
            rules=rules,
            endpoints=tuple(endpoints),
            max_restarts=max_restarts,
            restart=RestartPolicy() if restart is None else restart,
            decide=(lambda _: Action.BY_POLICY) if decide is None else decide,
            deciding=deciding,
            heartbeat_timeout=heartbeat_timeout,
            store_grace=heartbeat_timeout if store_grace is None else store_grace,
            read_timeout=read_timeout,
            close_timeout=close_timeout,
            exit_barrier_timeout=exit_barrier_timeout,
        )
        self.judge = Judge(self.timeline, self._settings, seed)

    def __repr__(self) -> str:
        return f"<Simulation at {self.now:.3f} s: {list(self.nodes.values())}>"

    # -------------------------------------------------------------- what is seen

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self.timeline.now

    @property
    def rules(self) -> Rules:
        """What the job wants."""
        return self._settings.rules

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where the nodes meet."""
        return self._settings.endpoints

    @property
    def trace(self) -> str:
        """The story so far, a line for each thing that happened."""
        return "\n".join(self.judge.story)

    @property
    def living(self) -> list[Node]:
        """The nodes for which the job goes on."""
        return [node for node in self.nodes.values() if node.is_living]

    @property
    def is_over(self) -> bool:
        """Whether the job goes on for nobody."""
        return not self.living

    @property
    def endings(self) -> dict[str, Ending]:
        """How the job has ended, by the name of each node that was told."""
        return dict(self.judge.endings)

    @property
    def coordinators(self) -> list[Coordinator]:
        """Those who coordinate; more than one if some cannot hear of each other."""
        attending = [node.attendance for node in self.nodes.values() if node.attendance]
        return [one.bureau.coordinator for one in attending if one.bureau is not None]

    def is_settled(self, size: int, nodes: Iterable[Node] | None = None) -> bool:
        """Whether `size` of `nodes` run one round, which is as large, and no other runs."""
        running = [one.running for one in (self.living if nodes is None else nodes)]
        rounds = {(one.round, one.origin, one.span.group_world_size) for one in running if one}
        count = sum(one is not None for one in running)
        return count == size and len(rounds) == 1 and next(iter(rounds))[2] == size

    # ------------------------------------------------------------- what is done

    def add_node(
        self,
        name: str,
        *,
        nproc: int = 1,
        wish: int | None = None,
        rate: float = 1.0,
        offset: float = 0.0,
        rules: Rules | None = None,
    ) -> Node:
        """Start a node on a machine of this name; it begins to look for the others.

        Args:
            name: of the machine; one that was killed may come back.
            nproc: how many workers it has.
            wish: the group rank it would like.
            rate: how fast its clock goes.
            offset: seconds by which its calendar is wrong.
            rules: what it was told of the job, if not what all others were.
        """
        if not self._settings.endpoints:
            self._meet_at((name,))
        machine = self._machines.get(name)
        if machine is None:
            machine = self._machines[name] = Machine(self.timeline, name, rate, offset)
        elif not machine.is_alive or self.nodes[name].has_left:
            machine.revive()
        else:
            raise ValueError(f"node {name!r} is running already")
        settings = self._settings
        if rules is not None:
            settings = _with_rules(settings, rules)
        node = self.nodes[name] = Node(
            f"{name}.{len(self.incarnations) + 1}",
            machine,
            self,
            settings,
            self.judge,
            self.random,
            nproc=nproc,
            wish=wish,
            work=lambda node, placement: self.work(node, placement),
        )
        self.incarnations.append(node)
        node.story("is started")
        node.start()
        return node

    def kill(self, node: Node) -> None:
        """Kill a node's process, its workers too; its machine says so to whoever is reached."""
        node.story("is killed")
        node.died()
        node.machine.die()

    def pause(self, node: Node, seconds: float) -> None:
        """Let a machine stand still for a while."""
        if node.machine.is_alive and not node.machine.is_paused:
            node.story(f"stands still for {seconds:.3f} s")
            node.machine.stand_still()
            self.timeline.at(self.now + seconds, self.resume, node)

    def resume(self, node: Node) -> None:
        """Let a machine that stands still go on."""
        if node.machine.is_paused:
            node.story("goes on")
            node.machine.go_on()

    def leave(self, node: Node) -> None:
        """Let somebody stop a node."""
        if not node.machine.is_paused:
            node.leave("it was stopped")

    def fail_worker(self, node: Node, exit_code: int = 1) -> None:
        """Let one worker of a node fail."""
        if node.machine.is_alive and not node.machine.is_paused:
            node.crew.fail(exit_code)

    def finish_workers(self) -> None:
        """Let all workers succeed, also those of rounds to come."""
        self.work = lambda node, placement: Work(seconds=0.1)
        for node in self.nodes.values():
            if node.machine.is_alive:
                node.machine.after(0.1, node.crew.succeed)

    def break_link(self, node: Node) -> None:
        """Let the connection of a node to its store break."""
        if node.attendance is not None:
            node.story("its connection breaks")
            node.attendance.reset()

    def partition(
        self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False
    ) -> None:
        """Let no message get from `some` machines to `others`, nor back unless `one_way`."""
        some, others = list(some), list(others)
        arrow = "->" if one_way else "<->"
        self.judge.note("network", f"blocked: {some} {arrow} {others}")
        self.network.block(some, others)
        self.judge.has_split = True
        if not one_way:
            self.network.block(others, some)

    def heal(self) -> None:
        """Let all messages through again."""
        self.judge.note("network", "whole again")
        self.network.heal()

    def stop_store(self, endpoint: str) -> None:
        """Let a store go, with all it knew."""
        place = self.places.get(endpoint)
        if place is not None and place.is_open:
            self.judge.note(endpoint, "the store goes")
            place.close()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self.timeline.step(until):
            pass

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let time pass until a condition holds.

        Raises:
            InvariantBroken: it does not within `limit_s` seconds.
        """
        until = self.now + limit_s
        while not condition():
            if not self.timeline.step(until):
                if condition():
                    return
                self.judge.fail(f"nothing came of it within {limit_s:g} s: {self!r}")

    # -------------------------------------------------------------- for the nodes

    def machine(self, name: str) -> Machine:
        """Return a machine by its name."""
        found = self._machines.get(name)
        if found is None:
            found = self._machines[name] = Machine(self.timeline, name, 1.0, 0.0)
            # A machine that nobody has started a node on yet serves nothing itself.
            if name not in self.nodes and name.startswith("store"):
                self.open_place(name)
            else:
                found.is_alive = False
        return found

    def open_place(self, endpoint: str) -> Place:
        """Let a machine serve a store."""
        place = Place(self.machine(endpoint), self.network, self.random, endpoint, self._noise)
        self.places[endpoint] = place
        self.judge.has_split |= len(self.places) > 1
        return place

    def node_at(self, machine: str) -> Node | None:
        """Return the node that lives on a machine."""
        return self.nodes.get(machine)

    def _meet_at(self, endpoints: tuple[str, ...]) -> None:
        self._settings = replace(self._settings, endpoints=endpoints)


def _with_rules(settings: Settings, rules: Rules) -> Settings:
    return replace(settings, rules=rules)
