"""A job of many nodes in virtual time, with the shipped coordinator and members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from msgspec.structs import replace

from elastic_aio.agent.messages import Start, StopReceived
from elastic_aio.outcome import JobOutcome
from elastic_aio.rendezvous.base import Placement
from elastic_aio.rendezvous.members import RoundSettings
from elastic_aio.spec.checks import checked_part
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartPolicy
from elastic_aio.testing.invariants import InvariantChecker
from elastic_aio.testing.network import Network
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.settings import SimSettings, WorkerBehavior
from elastic_aio.testing.store import Cluster
from elastic_aio.testing.virtual_time import VirtualTime


class Simulation:
    """Simulated nodes, stores and a network; the same seed gives the same steps.

    Every step is checked against the invariants of a job (see
    `elastic_aio.testing.invariants`); the first violation raises `InvariantViolated`
    with the trace.

    Args:
        settings: how many nodes a round has, and how long they are waited for.
        seed: of all random numbers.
        endpoints: hosts of the store, in the order of preference: a node's name, or
            one that begins with "store" for a host without a node.  None: the first
            node.
        max_restarts: most restarts after failures.
        restart: the policy.
        decide_duration: seconds that `restart.decide` takes; it may not be a coroutine function.
        heartbeat_timeout: seconds without a message after which a node is lost.
        store_grace: seconds for which workers run on without a store; None:
            `heartbeat_timeout`.
        read_timeout: seconds to search for a store.
        close_timeout: seconds for which the last node waits for the others.
        exit_barrier_timeout: seconds for which a node that has succeeded waits.
        delay: least and most seconds that a message takes.
        noise: share of the notifications that are repeated late.
    """

    def __init__(
        self,
        settings: RoundSettings,
        *,
        seed: int = 0,
        endpoints: Sequence[str] = (),
        max_restarts: int = 3,
        restart: RestartPolicy | None = None,
        decide_duration: float = 0.0,
        heartbeat_timeout: float = 5.0,
        store_grace: float | None = None,
        read_timeout: float = 60.0,
        close_timeout: float = 30.0,
        exit_barrier_timeout: float = 300.0,
        delay: tuple[float, float] = (0.0005, 0.005),
        noise: float = 0.0,
    ) -> None:
        """Begin at 0 seconds, without nodes."""
        self.random = Random(seed)
        self.time = VirtualTime()
        self.network = Network(self.time, self.random, delay)
        self.cluster = Cluster(self.time, self.network, self.random, noise)
        self.nodes: dict[str, SimNode] = {}
        """The newest process of each node, by host."""
        self.processes: list[SimNode] = []
        """All processes of all nodes."""
        self.behavior: Callable[[SimNode, Placement], WorkerBehavior] = lambda node, placement: (
            WorkerBehavior()
        )
        """What the workers of a node do in a round; by default they do not end."""
        spec = LaunchSpec(
            "simulated",
            max_restarts=max_restarts,
            restart=restart,
            rendezvous=RendezvousSpec(
                heartbeat_timeout=heartbeat_timeout,
                store_grace=store_grace,
                read_timeout=read_timeout,
                close_timeout=close_timeout,
                exit_barrier_timeout=exit_barrier_timeout,
            ),
        )
        checked_part("settings", settings, RoundSettings)
        has_decide = settings.has_decide or spec.restart.decide is not None
        self._settings = SimSettings(
            rounds=replace(settings, has_decide=has_decide),
            endpoints=tuple(endpoints),
            spec=spec,
            decide_duration=decide_duration,
        )
        self.checker = InvariantChecker(self.time, self.cluster, self._settings, seed)

    def __repr__(self) -> str:
        return f"<Simulation at {self.now:.3f} s: {list(self.nodes.values())}>"

    # -------------------------------------------------------------------- state

    @property
    def now(self) -> float:
        """Seconds of virtual time since the beginning."""
        return self.time.now

    @property
    def settings(self) -> RoundSettings:
        """How rounds are formed."""
        return self._settings.rounds

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Hosts of the store."""
        return self._settings.endpoints

    @property
    def trace(self) -> str:
        """What has happened, one line each."""
        return "\n".join(self.checker.trace)

    @property
    def live_nodes(self) -> list[SimNode]:
        """The nodes on which the job has not ended."""
        return [node for node in self.nodes.values() if node.is_live]

    @property
    def is_over(self) -> bool:
        """Whether the job has ended on all nodes."""
        return not self.live_nodes

    @property
    def outcomes(self) -> dict[str, JobOutcome]:
        """How the job has ended, by the name of each node on which it has."""
        return dict(self.checker.outcomes)

    @property
    def coordinators(self) -> list[SimNode]:
        """The nodes that are coordinators now; several in a partition."""
        nodes = self.nodes.values()
        return [node for node in nodes if node.session and node.session.coordinator]

    def is_settled(self, size: int, nodes: Iterable[SimNode] | None = None) -> bool:
        """Return whether `size` of `nodes` run one round of that size, and no other runs."""
        running = [one.running for one in (self.live_nodes if nodes is None else nodes)]
        rounds = {(one.round, one.formed_by, one.span.group_world_size) for one in running if one}
        count = sum(one is not None for one in running)
        return count == size and len(rounds) == 1 and next(iter(rounds))[2] == size

    # -------------------------------------------------------------------- steps

    def add_node(
        self,
        name: str,
        *,
        nproc: int = 1,
        preferred_rank: int | None = None,
        rate: float = 1.0,
        offset: float = 0.0,
        settings: RoundSettings | None = None,
    ) -> SimNode:
        """Start a node on a host of this name.

        Args:
            name: of the host; a killed one may be started again.
            nproc: number of workers.
            preferred_rank: the group rank that it prefers.
            rate: speed of its clock.
            offset: seconds by which its wall clock is wrong.
            settings: other settings than those of the job, to test that the node is refused.
        """
        if not self._settings.endpoints:
            self._settings = replace(self._settings, endpoints=(name,))
        former = self.nodes.get(name)
        if former is not None and former.host.is_alive and not former.has_left:
            raise ValueError(f"node {name!r} is running already")
        has_decide = self._settings.rounds.has_decide
        rounds = replace(settings or self._settings.rounds, has_decide=has_decide)
        node = self.nodes[name] = SimNode(
            f"{name}.{len(self.processes) + 1}",
            self.cluster.boot(name, rate, offset),
            self.cluster,
            replace(self._settings, rounds=rounds),
            self.checker,
            self.random,
            nproc=nproc,
            preferred_rank=preferred_rank,
            behavior=lambda node, placement: self.behavior(node, placement),
        )
        self.processes.append(node)
        node.note("is started")
        node.agent.handle(Start())
        return node

    def kill(self, node: SimNode) -> None:
        """Kill a node's process and workers; its host closes the connections."""
        node.note("is killed")
        node.on_killed()
        node.host.shut_down()

    def suspend(self, node: SimNode, seconds: float) -> None:
        """Suspend the host of a node for a while."""
        if node.host.is_alive and not node.host.is_suspended:
            node.note(f"is suspended for {seconds:.3f} s")
            node.host.suspend()
            self.time.at(self.now + seconds, self.resume, node)

    def resume(self, node: SimNode) -> None:
        """Resume the suspended host of a node."""
        if node.host.is_suspended:
            node.note("is resumed")
            node.host.resume()

    def leave(self, node: SimNode) -> None:
        """Stop a node, as a user does."""
        if not node.host.is_suspended:
            node.agent.handle(StopReceived("it was stopped"))

    def fail_worker(self, node: SimNode, exit_code: int = 1) -> None:
        """Let one worker of a node fail."""
        if node.host.is_alive and not node.host.is_suspended:
            node.agent.end_workers(exit_code)

    def finish_workers(self) -> None:
        """Let all workers succeed, also those of later rounds."""
        self.behavior = lambda node, placement: WorkerBehavior(seconds=0.1)
        for node in self.nodes.values():
            if node.host.is_alive:
                node.host.after(0.1, node.agent.end_workers, 0)

    def break_connection(self, node: SimNode) -> None:
        """Break the connection of a node to its store."""
        if node.session is not None:
            node.note("its connection breaks")
            node.session.reset()

    def partition(
        self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False
    ) -> None:
        """Block messages from `some` hosts to `others`, and back unless `one_way`."""
        some, others = list(some), list(others)
        arrow = "->" if one_way else "<->"
        self.checker.note("network", f"blocked: {some} {arrow} {others}")
        self.network.block(some, others)
        self.checker.was_partitioned = True
        if not one_way:
            self.network.block(others, some)

    def heal(self) -> None:
        """Unblock all messages."""
        self.checker.note("network", "unblocked")
        self.network.heal()

    def stop_store(self, endpoint: str) -> None:
        """Stop a store; its content is lost."""
        store = self.cluster.stores.get(endpoint)
        if store is not None and store.is_open:
            self.checker.note(endpoint, "the store is stopped")
            store.close()

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.now + seconds
        while self.time.step(until):
            pass

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let virtual time pass until a condition holds.

        Raises:
            InvariantViolated: it does not hold within `limit_s` seconds.
        """
        until = self.now + limit_s
        while not condition():
            if not self.time.step(until):
                if condition():
                    return
                self.checker.fail(f"the condition does not hold within {limit_s:g} s: {self!r}")
