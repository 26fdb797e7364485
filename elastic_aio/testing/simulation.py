"""A job of many nodes in virtual time: the shipped agents, on simulated hosts.

Only the workers are simulated: `SimRuntime` and `SimGroup` take the places of the directory, the
processes and the logs of a job.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Self

from msgspec.structs import replace

from elastic_aio.agent import machine
from elastic_aio.agent.event_log import EventLog
from elastic_aio.agent.failures import WorkerRecord
from elastic_aio.agent.multi_node_driver import MultiNodeDriver
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_store import MasterPorts, ReservedPort
from elastic_aio.aio import create_task
from elastic_aio.errors import SpecError
from elastic_aio.events import Event
from elastic_aio.node_events import NodeExcluded, NodeStandby, RoundFormed, RoundForming
from elastic_aio.outcome import AttemptResult, ExitStatus, Failure, JobOutcome
from elastic_aio.process.children import Child, ChildSpec
from elastic_aio.process.tree import Survivor
from elastic_aio.rendezvous import base
from elastic_aio.rendezvous.dynamic import DynamicRendezvous
from elastic_aio.spec.checks import checked_part
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.stop import StopPlan
from elastic_aio.status import JobStatus
from elastic_aio.store.server import StoreServer
from elastic_aio.testing.event_loop import SimLoop
from elastic_aio.testing.network import Network, SimProcess
from elastic_aio.testing.node import SimNode, WorkerBehavior, checked_exit_code
from elastic_aio.testing.virtual_time import SimHost, Trace, VirtualTime

RUN_ID = "simulated"

PORT = 29400
"""Of all stores at which nodes meet."""

_CHECK_S = 0.2
"""Seconds that a health check takes."""

_SPAWN_S = 5.0
"""Seconds for which a stop waits for workers that are being spawned."""


Behavior = Callable[[SimNode, base.Placement], WorkerBehavior]
"""What the workers of a node do in a round."""


class SimDriver(MultiNodeDriver):
    """The shipped driver, with simulated workers."""

    def __init__(self, node: SimNode, spec: LaunchSpec, behavior: Behavior) -> None:
        """Start the agent; called in the node's process."""
        self.node = node
        self.behavior = behavior
        event_log = EventLog(
            RUN_ID, node.host.name, keep=spec.event_history, listeners=[self._on_published]
        )
        runtime = SimRuntime(node, spec, event_log.append)
        super().__init__(runtime, event_log, make_rendezvous=self._make_rendezvous)
        node.driver = self
        self._main = create_task(self._live())

    async def _live(self) -> None:
        await self.open()
        await self.done
        if not self.node.is_over:
            assert self.outcome is not None, "the job is done"
            self.finish(self.outcome)

    def finish(self, outcome: JobOutcome) -> None:
        """End the process of the node, at the end of its job."""
        node = self.node
        node.outcome, node.is_over = outcome, True
        node.note(f"ends: {outcome.state}, {outcome.why}")
        node.process.kill()

    def begin_round(self, placement: base.Placement) -> None:
        """Note that the workers of a round start."""
        self.node.running = placement
        self.node.note(f"runs {brief(placement)} as group rank {placement.span.group_rank}")

    def _make_rendezvous(
        self, spec: LaunchSpec, node: base.NodeInfo, run_id: str, agent: base.AgentPort
    ) -> base.Rendezvous:
        node = replace(node, pid=self.node.number)
        return DynamicRendezvous(spec, node, run_id, agent, self.node.process)

    def on_instruction(self, instruction: base.Instruction) -> None:
        node = self.node
        if not node.is_over:
            match instruction:
                case base.StartRound(placement):
                    node.is_standing_by = node.has_succeeded = False
                    node.placement = placement
                case base.StopRound(round) if node.placement is None or (
                    round >= node.placement.round
                ):
                    node.has_succeeded = False
                case base.EndJob():
                    node.is_ending = True
        super().on_instruction(instruction)

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.SendReport(report=base.RoundSucceeded()) if not self.node.is_over:
                self.node.has_succeeded = True
        super()._perform(effect)

    async def _run_check(self, command: str) -> str:
        await asyncio.sleep(_CHECK_S)
        self.node.is_checked = self.node.is_healthy
        return "" if self.node.is_healthy else "its health check has failed"

    def _show_change(self, change: machine.ShowChange) -> None:
        self.node.change = -1 if change.time_left is None else change.number

    def _on_published(self, event: Event) -> None:
        if not self.node.is_over:
            match event:
                case NodeStandby():
                    self.node.is_standing_by = True
                case RoundFormed() | NodeExcluded(is_own=True):
                    self.node.is_standing_by = False
            if not isinstance(event, RoundForming) and (why := getattr(event, "why", "")):
                self.node.note(f"event {type(event).__name__}: {why}")

    def _make_group(self, effect: machine.StartGroup) -> Any:
        assert effect.placement is not None
        group = SimGroup(self, self._runtime, effect.attempt, effect.placement)
        self.node.end = group.end
        return group


class SimRuntime(LocalRuntime):
    """A job on a simulated host: no directory, no processes, no logs."""

    def __init__(self, node: SimNode, spec: LaunchSpec, publish: Callable[[Event], None]) -> None:
        nproc = spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else 1
        super().__init__(
            spec,
            run_id=RUN_ID,
            host=node.host.name,
            nproc=nproc,
            spawner=_spawn_nothing,
            publish=publish,
        )
        self.master_ports = SimMasterPorts(spec, node.process)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> bool:
        """Release the ports; there are no logs."""
        await self.master_ports.aclose()
        return False


async def _spawn_nothing(spec: ChildSpec) -> Child:
    raise AssertionError("a simulated node has no processes")


class SimMasterPorts(MasterPorts):
    """The ports of the rounds' stores, on the simulated network."""

    def __init__(self, spec: LaunchSpec, process: SimProcess) -> None:
        super().__init__(spec)
        self._process = process

    def _reserve_new(self, address: str) -> ReservedPort:
        store: Any = self._process.network.listen(self._process, 0)
        return ReservedPort(address, store.port, store)


class SimGroup:
    """The workers of one attempt, which behave as the simulation says (see `WorkerGroup`)."""

    def __init__(
        self, driver: SimDriver, runtime: LocalRuntime, attempt: int, placement: base.Placement
    ) -> None:
        self.attempt = attempt
        self.placement = placement
        self.records: dict[int, WorkerRecord] = {}
        self.first_success: tuple[int, float] | None = None
        self.ran_until: float | None = None
        self.has_failed_to_stop = False
        self.ready_at: float | None = None
        self._driver = driver
        self._node = driver.node
        self._runtime = runtime
        self._starting: asyncio.Task[None] | None = None
        self._is_stopping = self._node.is_stopping = False
        self._began_at = self._node.host.wall_clock
        self._failures: tuple[Failure, ...] = ()

    async def start(self) -> None:
        if self._is_stopping:
            return
        node, placement = self._node, self.placement
        self._driver.begin_round(placement)
        node.behavior = behavior = self._driver.behavior(node, placement)
        if not placement.span.group_rank:
            master = placement.master_addr, placement.master_port
            await self._runtime.master_ports.serve(*master)
        # In a task of its own, as processes that are being spawned.
        self._starting = create_task(asyncio.sleep(behavior.start_duration))
        await asyncio.shield(self._starting)
        if behavior.seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(behavior.seconds, self.end, behavior.exit_code)

    def end(self, exit_code: int) -> None:
        """Let one worker fail with `exit_code`, or all succeed with 0."""
        node, placement = self._node, self.placement
        if node.running is not placement or self._is_stopping:
            return
        status = ExitStatus(code=exit_code)
        if exit_code:
            node.add_fault(f"a worker fails with exit code {exit_code}")
            failure = Failure(
                rank=placement.span.first_rank,
                local_rank=0,
                pid=node.number,
                host=node.host.name,
                status=status,
                time=node.host.wall_clock,
                order=0,
            )
            self._failures = (failure,)
        else:
            node.note(f"the workers of round {placement.round} have succeeded")
        for local_rank in range(1 if exit_code else self._runtime.nproc):
            ended = machine.WorkerEnded(self.attempt, local_rank, status, is_victim=False)
            self._driver.receive(ended)

    def begin_stop(self, plan: StopPlan) -> None:
        pass  # simulated workers notice a stop at once

    def announce_stop(
        self, plan: StopPlan, reason: str, signal: int | None = None, *, is_ordered: bool = False
    ) -> None:
        self._is_stopping = self._node.is_stopping = True

    async def stop(self, plan: StopPlan, *, leftovers_only: bool = False) -> list[Survivor]:
        self._is_stopping = True
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=_SPAWN_S)
        duration = 0.0 if leftovers_only else self._node.behavior.stop_duration
        await asyncio.sleep(min(duration, plan.grace))
        if not self._node.is_over:
            self._node.running = None
        await self.close()
        return []

    async def stop_processes(self, plan: StopPlan) -> list[Survivor]:
        return await self.stop(plan)

    def with_reports(self, status: JobStatus) -> JobStatus:
        return status  # simulated workers report nothing

    def end_linger(self, stop: machine.StopReceived | None = None) -> None:
        pass  # simulated workers leave nothing behind

    async def close(self) -> None:
        await self._runtime.master_ports.end_attempt()

    async def result(self) -> AttemptResult:
        return AttemptResult(self.attempt, self._began_at, 0.0, failures=self._failures)


# --------------------------------------------------------------- the simulation


class Simulation:
    """Simulated nodes, stores and a network; the same seed gives the same steps.

    A context manager that ends all processes; without it, they end when the simulation is
    collected.

    Args:
        spec: the job: its number of nodes, restart policy and rendezvous.  Its program is not
            started, and its endpoints are replaced by `endpoints`, a backend other than "static" by
            "c10d", and `is_host` and `tls` by None.
        seed: of all random numbers.
        endpoints: hosts of the store, in the order of preference: a node's name, or one that begins
            with "store" for a host without a node.  Empty: the first node.
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
        self.processes: list[SimNode] = []
        """All processes of all nodes."""
        self.behavior: Behavior = lambda node, placement: WorkerBehavior()
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

    def __enter__(self) -> Self:
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
        """The past events, one line each."""
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
        return {one.name: one.outcome for one in self.processes if one.outcome is not None}

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
            node_rank: the group rank that it prefers, or has with the backend "static"; None: as in
                the spec.
            rate: speed of its clock.
            offset: seconds by which its wall clock is wrong.
            spec: another job than the simulation's, to test that the node is refused.

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

        def behavior(node: SimNode, placement: base.Placement) -> WorkerBehavior:
            # Without a cycle through its nodes, a simulation that is dropped is closed first.
            method = checked()
            assert method is not None
            return method(node, placement)

        self._start_agent(node, spec, behavior)
        self.nodes[name] = node
        self.processes.append(node)
        return node

    def _start_agent(self, node: SimNode, spec: LaunchSpec, behavior: Behavior) -> None:
        """Start the agent of a node, in the process of the node."""
        node.process.inject(SimDriver, node, spec, behavior)

    def _checked_behavior(self, node: SimNode, placement: base.Placement) -> WorkerBehavior:
        """Call `behavior`; its caller is a task of a node, so `run` raises its errors."""
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

    def preempt(self, node: SimNode, seconds: float = 60.0) -> None:
        """Give a node notice that the job is about to be preempted in so many seconds."""
        node.add_fault(f"has notice of a preemption in {seconds:.3f} s")
        node.process.inject(node.request_preemption, seconds)

    def fail_worker(self, node: SimNode, exit_code: int = 1) -> None:
        """Let one worker of a node fail."""
        node.end_workers(checked_exit_code("exit_code", exit_code, at_least=1))

    def finish_workers(self) -> None:
        """Let all workers succeed, also in later rounds."""
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
            InvariantViolated: a process spins, or leaves an error unhandled.
            Exception: raised by `behavior`.
        """
        until = self.now + seconds
        with self._own_randomness():
            while self.time.step(until):
                self._check()

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let virtual time pass until a condition holds.

        Raises:
            InvariantViolated: the condition does not hold within `limit_s` seconds; or as of `run`.
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
        """Seed the module `random` for the block: shipped code and the user's policies use it."""
        former = random.getstate()
        random.setstate(self._random_state)
        try:
            yield
        finally:
            self._random_state = random.getstate()
            random.setstate(former)


async def serve_store(process: SimProcess) -> None:
    """Serve a store on a host without a node."""
    listener: Any = process.network.listen(process, PORT)
    await StoreServer(listening=[listener]).start()


def brief(placement: base.Placement) -> str:
    return (
        f"round {placement.round} of {placement.formed_by} (attempt {placement.attempt},"
        f" restarts {placement.restarts}, {placement.span.group_world_size} nodes)"
    )


def _simulated_rendezvous(
    spec: RendezvousSpec, places: Sequence[str], node_rank: int | None
) -> RendezvousSpec:
    """Place a rendezvous at simulated hosts: they have no engine, no plug-in and no TLS."""
    return spec.replace(
        backend="static" if spec.backend == "static" else "c10d",
        endpoint=",".join(places),
        is_host=None,
        tls=None,
        node_rank=spec.node_rank if node_rank is None else node_rank,
    )


def _with_virtual_decide(spec: LaunchSpec, seconds: float) -> LaunchSpec:
    """Let `restart.decide` take virtual seconds, on the loop: virtual time knows no threads."""
    decide = spec.restart.decide
    if decide is None:
        return spec

    @wraps(decide)
    async def decide_later(failure: Failure) -> Any:
        if seconds:
            await asyncio.sleep(seconds)
        decision: Any = decide(failure)
        return await decision if inspect.isawaitable(decision) else decision

    return spec.replace(restart=spec.restart.replace(decide=decide_later))
