"""Many nodes: forming a group, and what follows when one comes, fails or is lost.

The agents run on this machine, as if each had one of its own.  Where torchrun never
gets there, that is said, with the seconds that it was watched.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.agents import (
    Nodes,
    born_by_hand,
    new_nodes,
    node_worker,
    singles,
    start_together,
)
from benchmarks.measure import Contender, compare, spawn_by_hand, wait_until
from benchmarks.table import Goal, Line

__all__ = ["failure", "form", "host", "loss", "scale"]

_FLEETS = (2, 4, 8)
_FAILURES = 5
# How long torchrun is watched where it is known never to get there.
_WATCH_S = 20
# It gives up a new node after its read_timeout of 60 s.
_WATCH_SCALE_S = 75
# With no more rounds than these, what takes that long is left out.
_QUICK = 3
_UNSHARED = ("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")


def form(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Start the agents of a full group together, until the last worker runs.

    What is subtracted is the same for as many jobs of one node: the start of as many
    launchers and workers on this machine.
    """
    lines = []
    for count in _FLEETS:

        def measure(contender: Contender, count: int = count) -> tuple[float, float]:
            return _formed(contender, count), _apart(contender, count)

        us, them = compare(max(rounds // 5, 1), measure, ours, theirs)
        whole, alone = _medians(us)
        their_whole, their_alone = _medians(them) if them else (None, None)
        what = f"{count} agents started together → last worker's first instruction"
        lines += [
            Line(
                f"{what}: less that of {count} jobs of one node",
                "ms",
                max(whole - alone, 0),
                None if their_whole is None or their_alone is None else their_whole - their_alone,
                Goal(0.1),
            ),
            Line(
                f"{what}: all of it",
                "ms",
                whole,
                their_whole,
                limit_name=f"{count} jobs of one node",
                limit=alone,
            ),
        ]
    return lines


def _formed(contender: Contender, count: int) -> float:
    with new_nodes(contender, f"{count}") as nodes:
        for number in range(count):
            nodes.start(f"n{number}")
        return _since_start(nodes, nodes.must_see("born", count, size=count)[-1].at)


def _apart(contender: Contender, count: int) -> float:
    with singles(contender, count) as nodes:
        return _since_start(nodes, nodes.must_see("born", count)[-1].at)


def _since_start(nodes: Nodes, at: int) -> float:
    return (at - min(job.began for job in nodes.agents.values())) / 1e6


def loss(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Kill an agent that does not serve the store, until the other's worker runs alone."""

    def measure(contender: Contender) -> float:
        with new_nodes(contender, "1:2") as nodes:
            start_together(nodes, 2)
            at = nodes.kill("n1")
            return _after(at, nodes, 1, _watch(contender, ours))

    us, _, limit = compare(max(rounds // 3, 1), measure, ours, None, born_by_hand)
    return [
        Line(
            f"kill -9 of an agent → the survivor's worker runs alone (watched {_WATCH_S} s)",
            "ms",
            statistics.median(us),
            measure(theirs) if theirs else None,
            bound=round(500 + statistics.median(limit)),
        )
    ]


def scale(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Start a second agent, until both workers run at a world size of 2.

    torchrun is made to open a new store for the workers of each round; by default it
    does not, and loses both nodes.
    """

    def measure(contender: Contender) -> tuple[float, float]:
        unshared = () if contender is ours else _UNSHARED
        return _scaled(contender, unshared, _WATCH_SCALE_S), _apart(contender, 1)

    us, them, stop = compare(
        max(rounds // 3, 1), measure, ours, theirs, lambda: (_stop_by_hand(), 0.0)
    )
    whole, alone = _medians(us)
    their_whole, their_alone = _medians(them) if them else (None, None)
    what = "a second agent starts → both workers run at a world size of 2"
    lines = [
        Line(
            f"{what}: less the start of a job of one node",
            "ms",
            whole - alone,
            None if their_whole is None or their_alone is None else their_whole - their_alone,
            Goal(0.1),
            bound=round(500 + _medians(stop)[0]),
        ),
        Line(f"{what}: all of it", "ms", whole, their_whole, None, "a job of one node", alone),
    ]
    if theirs is not None and rounds > _QUICK:
        default = _scaled(theirs, (), _WATCH_SCALE_S)
        lines.append(
            Line(f"{what}: torchrun by default (watched {_WATCH_SCALE_S} s)", "ms", whole, default)
        )
    return lines


def _scaled(contender: Contender, prefix: tuple[str, ...], seconds: float) -> float:
    with new_nodes(contender, "1:2", "--max-restarts=3", last_call_timeout=1) as nodes:
        nodes.start("n0", prefix=prefix)
        nodes.must_see("ready", 1, size=1)
        second = nodes.start("n1", prefix=prefix)
        return _after(second.began, nodes, 2, seconds)


def failure(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Kill a worker on one node, until the worker on the other hears SIGTERM."""

    def measure(contender: Contender) -> list[float]:
        with new_nodes(contender, "2", f"--max-restarts={_FAILURES}") as nodes:
            start_together(nodes, 2)
            return [_heard(nodes) for _ in range(_FAILURES)]

    us, them, limit = compare(max(rounds // 5, 1), measure, ours, theirs, lambda: [_hear_by_hand()])
    return [
        Line(
            "a worker is killed on one node → SIGTERM of the worker on the other",
            "ms",
            _median_of_all(us),
            _median_of_all(them) if them else None,
            Goal(0.05),
            "waitpid and kill",
            _median_of_all(limit),
            bound=20,
        )
    ]


def _heard(nodes: Nodes) -> float:
    """Kill the worker of node 0 in the present round, and wait for the next one."""
    victim = next(note for note in reversed(nodes.read("ready")) if note.node == "n0")
    at = time.monotonic_ns()
    os.kill(victim.pid, signal.SIGKILL)
    (heard,) = nodes.must_see("hears", 1, since=at)
    nodes.must_see("ready", 2, since=heard.at, size=2)
    return (heard.at - at) / 1e6


def host(ours: Contender, theirs: Contender | None, rounds: int) -> list[Line]:
    """Kill the agent that serves the store, until the two others' workers run.

    Ours can meet at two endpoints; torchrun has one.
    """

    def measure(contender: Contender) -> float:
        endpoints = 2 if contender is ours else 1
        with new_nodes(contender, "2:3", endpoints=endpoints) as nodes:
            start_together(nodes, 3)
            at = nodes.kill("n0")
            return _after(at, nodes, 2, _watch(contender, ours))

    us, _ = compare(max(rounds // 3, 1), measure, ours, None)
    return [
        Line(
            f"kill -9 of the store's host → two survivors re-formed (watched {_WATCH_S} s)",
            "ms",
            statistics.median(us),
            measure(theirs) if theirs else None,
            bound=2000,
        )
    ]


def _after(at: int, nodes: Nodes, size: int, seconds: float) -> float:
    """Return the milliseconds from `at` until a world of `size` nodes runs, if ever."""
    born = nodes.seen("born", size, since=at, size=size, seconds=seconds)
    return (born[-1].at - at) / 1e6 if born else math.inf


def _watch(contender: Contender, ours: Contender) -> float:
    return 60 if contender is ours else _WATCH_S


def _stop_by_hand() -> float:
    """Return the milliseconds from the SIGTERM of a worker to its end."""
    with _workers_by_hand(1) as (_, (worker,)):
        at = time.monotonic_ns()
        worker.terminate()
        worker.wait()
        return (time.monotonic_ns() - at) / 1e6


def _hear_by_hand() -> float:
    """Return the milliseconds from the kill of a worker to the SIGTERM of another."""
    with _workers_by_hand(2) as (nodes, (victim, other)):
        at = time.monotonic_ns()
        victim.kill()
        victim.wait()
        other.terminate()
        other.wait()
        return (nodes.read("hears")[0].at - at) / 1e6


@contextmanager
def _workers_by_hand(
    count: int,
) -> Iterator[tuple[Nodes, list[subprocess.Popen[bytes]]]]:
    """Start workers without a launcher, until they are ready."""
    with new_nodes(Contender("by hand", list), "") as nodes:
        workers = [
            spawn_by_hand(node_worker(nodes.notes, f"n{number}"), 1)[0] for number in range(count)
        ]
        try:
            wait_until(lambda: len(nodes.read("ready")) == count, "the workers")
            yield nodes, workers
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.median(first), statistics.median(second)


def _median_of_all(results: list[list[float]]) -> float:
    return statistics.median(one for result in results for one in result)
