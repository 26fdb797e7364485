"""A job of many nodes in virtual time: the shipped agents, on simulated hosts."""

from __future__ import annotations

import asyncio
import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

from elastic_aio.errors import SpecError
from elastic_aio.outcome import Failure, JobOutcome
from elastic_aio.rendezvous.base import Placement
from elastic_aio.spec.checks import checked_part
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.testing.agent import SimDriver
from elastic_aio.testing.event_loop import SimLoop
from elastic_aio.testing.invariants import InvariantChecker
from elastic_aio.testing.network import Network
from elastic_aio.testing.node import SimNode, WorkerBehavior, checked_exit_code
from elastic_aio.testing.process import SimProcess
from elastic_aio.testing.store import PORT, serve_store
from elastic_aio.testing.trace import Trace
from elastic_aio.testing.virtual_time import SimHost, VirtualTime


class Simulation:
    """Simulated nodes, stores and a network; the same seed gives the same steps.

    Every step is checked against the invariants of a job (see
    `elastic_aio.testing.invariants`); the first violation raises `InvariantViolated`
    with the trace.  A context manager that ends all processes; without it, they end when
    the simulation is collected.

    Args:
        spec: the job: its number of nodes, restart policy and rendezvous.  What it runs
            is not started, and its endpoints are those of `endpoints`.  A backend other
            than "static" is replaced by "c10d", and `is_host` and `tls` by None.
        seed: of all random numbers.
        endpoints: hosts of the store, in the order of preference: a node's name, or
            one that begins with "store" for a host without a node.  Empty: the first
            node.
        decide_duration: seconds that `restart.decide` takes.
        delay: least and most seconds that a message takes.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        seed: int = 0,
        endpoints: Sequence[str] = (),
        decide_duration: float = 0.0,
        delay: tuple[float, float] = (0.0005, 0.005),
    ) -> None:
        """Begin at 0 seconds, without nodes."""
        self._processes: list[SimLoop] = []
        checked_part("spec", spec, LaunchSpec)
        self.random = random.Random(seed)
        self.time = VirtualTime()
        self.network = Network(self.time, self.random, delay)
        self._trace = Trace(self.time, seed)
        self.nodes: dict[str, SimNode] = {}
        """The newest process of each node, by host."""
        self.checker = InvariantChecker(self.network, spec, self._trace, self.nodes)
        self.processes: list[SimNode] = []
        """All processes of all nodes."""
        self.behavior: Callable[[SimNode, Placement], WorkerBehavior] = lambda node, placement: (
            WorkerBehavior()
        )
        """What the workers of a node do in a round; by default they do not end."""
        self.endpoints = tuple(endpoints)
        self.spec = spec
        self._decide_duration = decide_duration
        self._random_state = random.Random(seed).getstate()
        self._host_names = dict.fromkeys(endpoints)
        for name in endpoints:
            self.network.host(name)
            if name.startswith("store"):
                self.start_store(name)

    def __repr__(self) -> str:
        return f"<Simulation at {self.now:.3f} s: {list(self.nodes.values())}>"

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End all processes.  Idempotent."""
        for process in self._processes:
            process.kill()
            process.dispose()
        self._processes.clear()

    # -------------------------------------------------------------------- state

    @property
    def now(self) -> float:
        """Seconds of virtual time since the beginning."""
        return self.time.now

    @property
    def trace(self) -> str:
        """What has happened, one line each."""
        return "\n".join(self._trace.lines)

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
        leaders = {store.leader_number for store in self.checker.open_stores}
        return [node for node in self.live_nodes if node.number in leaders]

    def is_settled(self, size: int, nodes: Iterable[SimNode] | None = None) -> bool:
        """Return whether `size` of `nodes` run one round of that size, and no other runs."""
        nodes = self.live_nodes if nodes is None else nodes
        running = [one.running for one in nodes if one.running is not None]
        is_one_round = len({one.round_id for one in running}) == 1
        return is_one_round and len(running) == size == running[0].span.group_world_size

    # -------------------------------------------------------------------- nodes

    def add_node(
        self,
        name: str,
        *,
        nproc: int = 1,
        node_rank: int | None = None,
        rate: float = 1.0,
        offset: float = 0.0,
        spec: LaunchSpec | None = None,
    ) -> SimNode:
        """Start a node on a host of this name.

        Args:
            name: of the host; a killed node may be started again.
            nproc: number of workers.
            node_rank: the group rank that it prefers, or has with the backend "static";
                None: that of the spec.
            rate: speed of its clock.
            offset: seconds by which its wall clock is wrong.
            spec: another job than that of the simulation, to test that the node is refused.

        Raises:
            SpecError: `nproc` or `node_rank` is not possible.
            ValueError: a node runs on this host.
        """
        former = self.nodes.get(name)
        if former is not None and former.is_live:
            raise ValueError(f"node {name!r} is running already")
        self.add_host(name)
        host = self.network.host(name)
        host.is_up, host.rate, host.offset = True, rate, offset
        self.endpoints = self.endpoints or (name,)
        spec = _with_virtual_decide(spec or self.spec, self._decide_duration)
        places = [f"{self.network.host(one).address}:{PORT}" for one in self.endpoints]
        rendezvous = _simulated_rendezvous(spec.rendezvous, places, node_rank)
        spec = spec.replace(rendezvous=rendezvous, nproc_per_node=nproc)
        number = len(self.processes) + 1
        node = SimNode(self._new_process(host), number, self._trace)
        node.add_fault("is started")
        checked = weakref.WeakMethod(self._checked_behavior)

        def behavior(node: SimNode, placement: Placement) -> WorkerBehavior:
            # Without a cycle through its nodes, a simulation that is dropped is closed first.
            method = checked()
            assert method is not None
            return method(node, placement)

        node.process.inject(SimDriver, node, spec, self.checker, behavior)
        self.nodes[name] = node
        self.processes.append(node)
        return node

    def _checked_behavior(self, node: SimNode, placement: Placement) -> WorkerBehavior:
        """Call `behavior`; its caller is a task of a node, so `run` raises what it raises."""
        try:
            behavior: object = self.behavior(node, placement)
            if not isinstance(behavior, WorkerBehavior):
                raise SpecError("behavior", behavior, "must return a WorkerBehavior")
        except BaseException as error:
            self._trace.error = self._trace.error or error
            raise
        return behavior

    def _new_process(self, host: SimHost) -> SimProcess:
        on_error = self._trace.fail
        # It lacks the methods of a loop that no process here calls.
        process = SimProcess(self.network, host, on_error)  # type: ignore[abstract]  # as above
        self._processes = [one for one in self._processes if not one.is_disposed]
        self._processes.append(process)
        return process

    def kill(self, node: SimNode) -> None:
        """Kill a node's process and workers; its host closes the connections."""
        node.add_fault("is killed")
        node.kill()

    def switch_off(self, node: SimNode) -> None:
        """Cut the power of a node's host; the other hosts notice only its silence."""
        node.add_fault("has no power")
        self.network.switch_off(node.host)
        node.kill()

    def add_host(self, name: str) -> None:
        """Make the name of a host known whose node comes later, so that faults may name it."""
        self._host_names[name] = None

    def _host(self, name: str) -> SimHost:
        self._check_host(name)
        return self.network.host(name)

    def _check_host(self, name: str) -> None:
        if name not in self._host_names:
            known = ", ".join(self._host_names) or "none"
            raise ValueError(f"no such host: {name!r} (known: {known})")

    def suspend(self, name: str, seconds: float) -> None:
        """Suspend a host for a while, and with it the store that it serves."""
        host = self._host(name)
        if host.is_up and not host.is_suspended:
            self._trace.add_fault(name, f"is suspended for {seconds:.3f} s")
            host.is_suspended = True
            self.time.at(self.now + seconds, self.resume, name)

    def resume(self, name: str) -> None:
        """Resume a suspended host."""
        host = self._host(name)
        if host.is_suspended:
            self._trace.add_fault(name, "is resumed")
            host.is_suspended, host.disturbed_at = False, self.now
            timers_first = self.random.random() < 0.5
            for process in self._processes:
                if process.host is host:
                    process.catch_up(timers_first=timers_first)

    def end_faults(self) -> None:
        """End all faults of hosts and the network; killed nodes and stores stay away."""
        for host in self.network.hosts.values():
            host.is_up = True
            self.resume(host.name)
            if host.delay:
                host.delay, host.disturbed_at = 0.0, self.now
        self.heal()

    def step_clock(self, node: SimNode, seconds: float) -> None:
        """Set the wall clock of a node's host forward; back if `seconds` are negative."""
        self._trace.add_fault(node.host.name, f"its clock is set by {seconds:+.3f} s")
        node.host.offset += seconds

    def leave(self, node: SimNode) -> None:
        """Stop a node, as a user does."""
        node.add_fault("is stopped")
        node.process.inject(node.request_stop)

    def fail_worker(self, node: SimNode, exit_code: int = 1) -> None:
        """Let one worker of a node fail."""
        node.end_workers(checked_exit_code("exit_code", exit_code, at_least=1))

    def finish_workers(self) -> None:
        """Let all workers succeed, also those of later rounds."""
        self.behavior = lambda node, placement: WorkerBehavior(seconds=0.1)
        for node in self.live_nodes:
            node.end_workers(0)

    # ------------------------------------------------------ network and stores

    def break_connection(self, node: SimNode) -> None:
        """Break all connections of a node's process."""
        node.add_fault("its connections break")
        for connection in [one for one in self.network.connections if one.loop is node.process]:
            self.time.at(self.now, connection.reset)

    def slow_down(self, name: str, seconds: float) -> None:
        """Let each message from and to a host take so much longer; 0: no longer."""
        host = self._host(name)
        self._trace.add_fault(name, f"is slow by {seconds:.3f} s")
        host.delay, host.disturbed_at = seconds, self.now

    def partition(
        self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False
    ) -> None:
        """Block messages from `some` hosts to `others`, and back unless `one_way`."""
        some, others = list(some), list(others)
        for name in [*some, *others]:
            self._check_host(name)
        arrow = "->" if one_way else "<->"
        self._trace.add_fault("network", f"blocked: {some} {arrow} {others}")
        self.checker.rounds.was_partitioned = True
        self.network.block(some, others)
        if not one_way:
            self.network.block(others, some)

    def heal(self) -> None:
        """Unblock all messages."""
        self._trace.add_fault("network", "unblocked")
        self.network.heal()

    def start_store(self, name: str) -> None:
        """Serve a store on a host without a node."""
        self.add_host(name)
        self._trace.add_fault(name, "a store is started")
        process = self._new_process(self.network.host(name))
        process.inject(lambda: process.create_task(serve_store(process)))

    def stop_store(self, name: str) -> None:
        """Stop the store of a host without a node; its content is lost."""
        self._check_host(name)
        self._trace.add_fault(name, "the store is stopped")
        for process in self._processes:
            if process.host.name == name:
                process.kill()

    # --------------------------------------------------------------------- time

    def run(self, seconds: float) -> None:
        """Let virtual time pass.

        Raises:
            InvariantViolated: an invariant does not hold.
            Exception: raised by `behavior`.
        """
        until = self.now + seconds
        with self._own_randomness():
            while self.time.step(until):
                self._check()

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let virtual time pass until a condition holds.

        Raises:
            InvariantViolated: it does not hold within `limit_s` seconds, or an invariant does not.
            Exception: raised by `behavior` or the condition.
        """
        until = self.now + limit_s
        with self._own_randomness():
            while not condition():
                has_run = self.time.step(until)
                self._check()
                if not has_run and not condition():
                    self.fail(f"the condition does not hold within {limit_s:g} s: {self!r}")

    def fail(self, text: str) -> None:
        """Report that something does not hold.

        Raises:
            InvariantViolated: always.
        """
        self._trace.fail(text)
        self._check()

    def _check(self) -> None:
        if self._trace.error is not None:
            raise self._trace.error

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Seed the module `random` meanwhile: shipped code and the user's policies use it."""
        former = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(former)


def _simulated_rendezvous(
    spec: RendezvousSpec, places: Sequence[str], node_rank: int | None
) -> RendezvousSpec:
    """Place a rendezvous at simulated hosts: they have no engine, no plug-in and no TLS."""
    return replace(
        spec,
        backend="static" if spec.backend == "static" else "c10d",
        endpoint=",".join(places),
        is_host=None,
        tls=None,
        node_rank=spec.node_rank if node_rank is None else node_rank,
    )


def _with_virtual_decide(spec: LaunchSpec, seconds: float) -> LaunchSpec:
    """Let `restart.decide` take so many seconds of virtual time, and run on the loop.

    A plain function would run in a thread, of which virtual time knows nothing.
    """
    decide = spec.restart.decide
    if decide is None:
        return spec

    @wraps(decide)
    async def decide_later(failure: Failure) -> Any:
        if seconds:
            await asyncio.sleep(seconds)
        decision: Any = decide(failure)
        return await decision if inspect.isawaitable(decision) else decision

    return spec.replace(restart=replace(spec.restart, decide=decide_later))
