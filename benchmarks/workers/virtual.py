"""Jobs of very many nodes in virtual time: `python -m benchmarks.workers.virtual WAY`.

The agents, the store and the coordinator are the shipped ones (see `elastic_aio.testing`); the
hosts, the network and the workers are simulated, and every step is checked.  No other process
takes part, so that the time of one agent is measured without that of all other agents and of the
simulator.  A processor's clock takes too long to read, so that a wall clock is read, and the
share of it in which this process had a processor is taken from the whole phase.

`form COUNT` forms a round of so many nodes, loses one and forms another.  Prints for each of both
rounds the processor's seconds of the agent which serves the store and coordinates, how many of
them the coordinator's decisions took, and the messages and bytes that each node has exchanged
with the store.

`year NODES DAYS` runs a job with two spare nodes through faults, eight a day.  Prints how many
there were of each kind, and the share of the time in which the workers of all nodes ran, less the
time that each start of them takes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from elastic_aio.rendezvous import coordinator, coordinator_runner
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.testing import SimNode
from elastic_aio.testing.network import SimProcess, SimTransport
from elastic_aio.testing.simulation import PORT
from tests.testing.checked import CheckedSimulation
from tests.testing.stores import SimStore

_LIMIT_S = 600.0
_DAY_S = 86_400.0
_FAULTS_PER_DAY = 8.0
_START_S = 60.0
"""Seconds of each start in which workers load their checkpoint and do nothing new."""
_HANG_S = 300.0
"""Seconds until a hang counts as a failure."""
_REPAIR_S = 3600.0
"""Seconds until the host of a lost node is back, as a spare one."""
_BAD_STARTS = 3
"""Starts on a bad host before it is replaced."""
_BAD_S = 30.0
"""Seconds that its workers run."""
_SPARES = 2
_QUIET_HEARTBEAT_S = 120.0
"""So long that a year has few heartbeats; a host that falls silent is noticed as late."""

_FAULTS = {"worker": 70, "hang": 4, "bad node": 6, "killed": 5, "no power": 7, "preempted": 8}
"""Kinds of faults in percent, about those of Llama 3's report, table 5."""


class Meter:
    """Measures what the agent on the first node costs, and the traffic of all with the store."""

    def __init__(self) -> None:
        """Begin with nothing; inside its context every simulation is measured."""
        self.agent = 0.0
        self.decisions = 0.0
        self.decided = 0
        self.messages = 0
        self.bytes = 0
        self._checks = 0.0
        self._began = time.process_time(), time.perf_counter()
        self._patches = contextlib.ExitStack()
        run, send = SimProcess._run, SimTransport._send
        check, decide = SimStore.on_change, coordinator.decide

        def run_measured(process: SimProcess, handle: Any) -> None:
            if process.host.name != name_of(0):
                run(process, handle)
                return
            began, checks = time.perf_counter(), self._checks
            run(process, handle)
            self.agent += time.perf_counter() - began - (self._checks - checks)

        def send_counted(transport: SimTransport, segment: Any) -> None:
            peer = transport.peer
            if isinstance(segment, bytes) and peer and PORT in (transport.name[1], peer.name[1]):
                self.messages += 1
                self.bytes += len(segment)
            send(transport, segment)

        def check_measured(*arguments: Any) -> None:
            began = time.perf_counter()
            check(*arguments)
            self._checks += time.perf_counter() - began

        def decide_measured(*arguments: Any) -> Any:
            began = time.perf_counter()
            effects = decide(*arguments)
            self.decisions += time.perf_counter() - began
            self.decided += 1
            return effects

        self._changes = (
            mock.patch.object(SimProcess, "_run", run_measured),
            mock.patch.object(SimTransport, "_send", send_counted),
            mock.patch.object(SimStore, "on_change", check_measured),
            mock.patch.object(coordinator_runner, "decide", decide_measured),
        )

    def __enter__(self) -> Meter:
        for change in self._changes:
            self._patches.enter_context(change)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def take(self, nodes: int) -> dict[str, float]:
        """Return what was measured since the last call."""
        began, self._began = self._began, (time.process_time(), time.perf_counter())
        share = (self._began[0] - began[0]) / (self._began[1] - began[1])
        figures = {
            "share": share,
            "agent": self.agent * share,
            "decisions": self.decisions * share,
            "decided": self.decided,
            "messages": self.messages / nodes,
            "bytes": self.bytes / nodes,
        }
        self.agent = self.decisions = 0.0
        self.decided = self.messages = self.bytes = 0
        return figures


def name_of(number: int) -> str:
    """Return a name that is as long for each node."""
    return f"host{number:05}"


def form(count: int) -> dict[str, Any]:
    """Form a round of `count` nodes of eight workers, lose one, and form another."""
    rendezvous = RendezvousSpec(endpoint="host00000", last_call_timeout=_LIMIT_S)
    spec = LaunchSpec(["true"], nnodes=(max(count - 1, 1), count), rendezvous=rendezvous)
    figures: dict[str, Any] = {"nodes": count}
    with Meter() as meter, CheckedSimulation(spec) as sim:
        sim.add_node(name_of(0), nproc=8)
        sim.run_until(lambda: bool(sim.coordinators), _LIMIT_S)
        nodes = [sim.add_node(name_of(number), nproc=8) for number in range(1, count)]
        figures["forming"] = _measured(sim, meter, count)
        sim.kill(nodes[-1])
        figures["reforming"] = _measured(sim, meter, count - 1)
    return figures


def _measured(sim: CheckedSimulation, meter: Meter, size: int) -> dict[str, float]:
    """Let a round form; return what that has cost."""
    began, rounds = sim.now, len(sim.checker.rounds.rounds)
    while len(sim.checker.rounds.rounds) == rounds or not sim.is_settled(size):
        sim.run(0.25)
        if sim.now - began > _LIMIT_S:
            sim.fail(f"no round of {size} nodes")
    return meter.take(size)


class Year:
    """A job that runs through faults for very long."""

    def __init__(self, nodes: int, days: float, seed: int) -> None:
        """Begin with all nodes, and the spare ones."""
        rendezvous = RendezvousSpec(
            endpoint="store",
            heartbeat_timeout=_QUIET_HEARTBEAT_S,
            join_timeout=_DAY_S,
            last_call_timeout=0.0,
        )
        spec = LaunchSpec(["true"], nnodes=nodes, max_restarts=1_000_000, rendezvous=rendezvous)
        self.sim = CheckedSimulation(spec, seed=seed, endpoints=["store"])
        self.counts: Counter[str] = Counter()
        self.productive = 0.0
        self._size = nodes
        self._end = days * _DAY_S
        self._random = random.Random(seed)
        for number in range(nodes + _SPARES):
            self.sim.add_node(name_of(number))

    def run(self) -> dict[str, Any]:
        """Run to the end; return the figures."""
        sim = self.sim
        sim.run_until(self._is_settled, _LIMIT_S)
        kinds, weights = list(_FAULTS), list(_FAULTS.values())
        while sim.now < self._end:
            due = sim.now + self._random.expovariate(_FAULTS_PER_DAY / _DAY_S)
            self._work_until(min(due, self._end))
            if due < self._end:
                (kind,) = self._random.choices(kinds, weights)
                self.counts[kind] += 1
                self._inject(kind)
        rounds = len(sim.checker.rounds.rounds)
        return {
            "nodes": self._size,
            "days": self._end / _DAY_S,
            "faults": dict(self.counts),
            "rounds": rounds,
            "goodput": self.productive / self._end,
        }

    def _is_settled(self) -> bool:
        return self.sim.is_settled(self._size)

    def _work_until(self, when: float) -> None:
        """Let the workers run until then, after their start."""
        began = self.sim.now
        self.sim.run(max(0.0, when - self.sim.now))
        self.productive += max(0.0, self.sim.now - began - _START_S)

    def _inject(self, kind: str) -> None:
        sim = self.sim
        node = self._random.choice([one for one in sim.live_nodes if one.running is not None])
        match kind:
            case "worker":
                self._change(lambda: sim.fail_worker(node))
            case "hang":
                sim.run(_HANG_S)
                self._change(lambda: sim.fail_worker(node))
            case "bad node":
                for _ in range(_BAD_STARTS):
                    self._change(lambda: sim.fail_worker(node))
                    sim.run(_START_S + _BAD_S)
                self._change(lambda: sim.kill(node), node)
            case "killed":
                self._change(lambda: sim.kill(node), node)
            case "no power":
                self._change(lambda: sim.switch_off(node), node)
            case "preempted":
                self._change(lambda: sim.leave(node), node)

    def _change(self, fault: Callable[[], None], lost: SimNode | None = None) -> None:
        """Let something happen, until another round runs."""
        rounds = self.sim.checker.rounds.rounds
        before = len(rounds)
        fault()
        if lost is not None:
            self.sim.time.at(self.sim.now + _REPAIR_S, self._repair, lost.host.name)
        # Longer than a repair, if more nodes are lost than there are spare ones.
        self.sim.run_until(lambda: len(rounds) > before and self._is_settled(), 2 * _REPAIR_S)

    def _repair(self, name: str) -> None:
        self.sim.add_node(name)


def main() -> None:
    """Run in the way of the command line."""
    # A collection would visit the objects of all nodes, which have processes of their own.
    gc.disable()
    match sys.argv[1:]:
        case ["form", count]:
            figures = form(int(count))
        case ["year", nodes, days, *seed]:
            gc.enable()
            figures = Year(int(nodes), float(days), int(seed[0]) if seed else 0).run()
        case other:
            raise SystemExit(f"unknown way: {other}")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
