"""Many nodes: forming a group, and what follows when one joins, fails, is lost or preempted.

The agents run on this host, as if each had one of its own.  A measure that torchrun never
reaches says so, with the seconds that it was watched.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster import (
    LauncherCluster,
    baseline_failure,
    baseline_start,
    baseline_stop,
    isolated,
)
from benchmarks.launchers import Launcher
from benchmarks.table import Goal, Line
from benchmarks.turns import compare, median_of, median_of_all, medians
from tests.support.netns import Network, why_impossible
from tests.support.sockets import can_count_traffic, free_port, traffic_of

__all__ = ["failure", "form", "host", "idle_group", "loss", "partition", "preempt", "scale"]

_Pair = tuple[float, float]

_CLUSTERS = (2, 4, 8)
_FAILURES = 5
# How long torchrun is watched where it is known never to get there.
_WATCH_S = 20
# It gives up a new node after its read_timeout of 60 s.
_WATCH_SCALE_S = 75
# With no more rounds than these, the measures that take that long are left out.
_QUICK = 3
_UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
_HEARTBEAT_S = 2
_WATCH_PARTITION_S = 30
# torchrun's own settings for how soon a node counts as lost.
_QUICKEST = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
_IDLE_S = 20.0
_SETTLE_S = 3.0


def form(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Start the agents of a full group together, until the last worker runs.

    The same number of jobs of one node is subtracted: the start of as many launchers and
    workers on this host.  Two agents have to be as fast as one, which is measured too.
    """
    lines = []
    for count in _CLUSTERS:

        async def measure(launcher: Launcher, directory: Path, count: int = count) -> _Formed:
            async with LauncherCluster(launcher, directory / "group", f"{count}") as cluster:
                for _ in range(count):
                    cluster.start_agent()
                whole = await _since_start(cluster, count, size=count)
            alone = await _singles(launcher, directory / "singles", count)
            one = await _singles(launcher, directory / "one", 1) if count == 2 else 0.0
            return _Formed(whole, alone, one)

        results = compare(max(rounds // 5, 1), isolated(measure), ours, theirs, old=old)
        alone = statistics.median(one.alone for one in results.ours)
        limit: dict[str, Any] = {"limit_name": f"{count} jobs of one node", "limit": alone}
        if count == 2:
            single = statistics.median(one.single for one in results.ours)
            limit = {"limit_name": "a job of one node", "limit": single, "limit_goal": Goal(1.15)}
        what = f"{count} agents started together → last worker's first instruction"
        less = f"{what}: less that of {count} jobs of one node"
        lines += [
            results.line(less, "ms", _added, goal=Goal(0.1)),
            results.line(f"{what}: all of it", "ms", median_of(lambda one: one.whole), **limit),
        ]
    return lines


class _Formed(NamedTuple):
    whole: float  # milliseconds
    alone: float  # of as many jobs of one node
    single: float  # of one of them


def _added(results: list[_Formed]) -> float:
    whole, alone, _ = medians(results)
    return max(whole - alone, 0)


async def _singles(launcher: Launcher, directory: Path, count: int) -> float:
    async with LauncherCluster(launcher, directory, "1") as cluster:
        for _ in range(count):
            cluster.start_single()
        return await _since_start(cluster, count)


async def _since_start(cluster: LauncherCluster, count: int, size: int = 0) -> float:
    """Return the milliseconds from the first agent's start to the last worker's."""
    notes = await cluster.all_noted("started", count, size=size)
    return (notes[-1].at - min(node.started_ns for node in cluster.nodes)) / 1e6


def loss(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Kill an agent that does not serve the store, until the other's worker runs alone."""

    async def measure(launcher: Launcher, directory: Path) -> float:
        async with LauncherCluster(launcher, directory, "1:2") as cluster:
            await cluster.start_together(2)
            return await cluster.since(cluster.kill(1), 1, _watch_s(launcher))

    results = compare(max(rounds // 3, 1), isolated(measure), ours, None, old=old)
    line = results.line(
        f"kill -9 of an agent → the survivor's worker runs alone (watched {_WATCH_S} s)",
        "ms",
        statistics.median,
        bound=250,
    )
    # torchrun never gets there: once is enough.
    return [dataclasses.replace(line, theirs=isolated(measure)(theirs) if theirs else None)]


def scale(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Start a second agent, until both workers run at a world size of 2.

    torchrun is made to open a new store for the workers of each round; by default it
    does not, and loses both nodes.
    """

    async def scaled(launcher: Launcher, directory: Path, env: dict[str, str]) -> float:
        async with LauncherCluster(
            launcher, directory, "1:2", conf={"last_call_timeout": 1}, max_restarts=3
        ) as cluster:
            cluster.start_agent(env=env)
            await cluster.all_noted("ready", 1, size=1)
            second = cluster.start_agent(env=env)
            return await cluster.since(second.started_ns, 2, _WATCH_SCALE_S)

    async def measure(launcher: Launcher, directory: Path) -> _Pair:
        whole = await scaled(launcher, directory / "group", {} if launcher.is_ours else _UNSHARED)
        return whole, await _singles(launcher, directory / "single", 1)

    us, them, stop = compare(
        max(rounds // 3, 1), isolated(measure), ours, theirs, lambda: (baseline_stop(), 0.0)
    )
    whole, alone = medians(us)
    their_whole, their_alone = medians(them) if them else (None, None)
    what = "a second agent starts → both workers run at a world size of 2"
    lines = [
        Line(
            f"{what}: less the start of a job of one node",
            "ms",
            whole - alone,
            None if their_whole is None or their_alone is None else their_whole - their_alone,
            Goal(0.1),
            bound=round(500 + medians(stop)[0]),
        ),
        Line(f"{what}: all of it", "ms", whole, their_whole, None, "a job of one node", alone),
    ]
    if theirs is not None and rounds > _QUICK:

        async def by_default(launcher: Launcher, directory: Path) -> float:
            return await scaled(launcher, directory, {})

        title = f"{what}: torchrun by default (watched {_WATCH_SCALE_S} s)"
        lines.append(Line(title, "ms", whole, isolated(by_default)(theirs)))
    return lines


def failure(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Kill a worker on one node, until the worker on the other receives SIGTERM."""

    async def measure(launcher: Launcher, directory: Path) -> list[float]:
        async with LauncherCluster(launcher, directory, "2", max_restarts=_FAILURES) as cluster:
            await cluster.start_together(2)
            return [await _fail(cluster) for _ in range(_FAILURES)]

    us, them, limit = compare(
        max(rounds // 5, 1), isolated(measure), ours, theirs, lambda: [baseline_failure()]
    )
    return [
        Line(
            "a worker is killed on one node → SIGTERM of the worker on the other",
            "ms",
            median_of_all(us),
            median_of_all(them) if them else None,
            Goal(0.05),
            "waitpid and kill",
            median_of_all(limit),
            bound=20,
        )
    ]


async def _fail(cluster: LauncherCluster) -> float:
    """Kill the worker of node 0 in the present round, and wait for the next one."""
    victim = [note for note in cluster.notes_of("ready") if note.node == "n0"][-1]
    at = time.monotonic_ns()
    os.kill(victim.pid, signal.SIGKILL)
    (received,) = await cluster.all_noted("receives", 1, since=at)
    await cluster.all_noted("ready", 2, since=received.at, size=2)
    return (received.at - at) / 1e6


def preempt(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Give notice of a preemption to one of three nodes, until the last worker has it.

    Each launcher forwards the notice to its worker as SIGTERM.  torchrun has no notice.
    """

    async def measure(launcher: Launcher, directory: Path) -> float:
        signals: dict[str, Any] = {"preempt_signal": "USR1", "preempt_forward": "TERM"}
        async with LauncherCluster(launcher, directory, "3", **signals) as cluster:
            await cluster.start_together(3)
            at = time.monotonic_ns()
            cluster.nodes[1].send(signal.SIGUSR1)
            received = await cluster.all_noted("receives", 3, since=at)
            return (received[-1].at - at) / 1e6

    us, _, limit = compare(rounds, isolated(measure), ours, None, baseline_failure)
    return [
        Line(
            "notice of a preemption to one node → all workers of three nodes have it",
            "ms",
            statistics.median(us),
            None,
            None,
            "waitpid and kill",
            statistics.median(limit),
            bound=50,
        )
    ]


def host(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Kill the agent that serves the store, until the two others' workers run.

    Ours has two endpoints; torchrun has one.
    """

    async def measure(launcher: Launcher, directory: Path) -> float:
        endpoints = 2 if launcher.is_ours else 1
        async with LauncherCluster(launcher, directory, "2:3", endpoints=endpoints) as cluster:
            await cluster.start_together(3)
            return await cluster.since(cluster.kill(0), 2, _watch_s(launcher))

    us, _ = compare(max(rounds // 3, 1), isolated(measure), ours, None)
    return [
        Line(
            f"kill -9 of the store's host → two survivors re-formed (watched {_WATCH_S} s)",
            "ms",
            statistics.median(us),
            isolated(measure)(theirs) if theirs else None,
            bound=2000,
        )
    ]


def partition(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Drop all packets of a node, without resets, until the other's worker runs alone."""
    if reason := why_impossible():
        print(f"partition is left out: {reason}", file=sys.stderr)
        return []

    async def measure(launcher: Launcher, directory: Path) -> float:
        conf = {"heartbeat_timeout": _HEARTBEAT_S} if launcher.is_ours else _QUICKEST
        with Network(directory / "network", "here", "there") as network:
            names = "".join(f"{host.address} {host.name}\n" for host in network.hosts.values())
            for host in network.hosts.values():
                (host.etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            endpoint = f"{network['here'].address}:{free_port()}"
            async with LauncherCluster(
                launcher, directory / "group", "1:2", endpoint=endpoint, conf={**conf}
            ) as cluster:
                for host in network.hosts.values():
                    cluster.start_agent(
                        host=host,
                        local_addr=host.address,
                        # torchrun cannot tell by an address in a namespace.
                        conf=None if launcher.is_ours else {"is_host": int(host.name == "here")},
                    )
                await cluster.all_noted("ready", 2, size=2)
                at = time.monotonic_ns()
                network.isolate("there")
                return await cluster.since(at, 1, _WATCH_PARTITION_S)

    us, _, limit = compare(max(rounds // 5, 1), isolated(measure), ours, None, baseline_start)
    return [
        Line(
            f"a silent partition → the worker on our side runs alone, at a heartbeat_timeout of"
            f" {_HEARTBEAT_S} s (watched {_WATCH_PARTITION_S} s)",
            "ms",
            statistics.median(us),
            isolated(measure)(theirs) if theirs else None,
            bound=round(1000 * _HEARTBEAT_S + 500 + statistics.median(limit)),
        )
    ]


def idle_group(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Count what two agents of idle workers send to the store and receive from it."""
    if not can_count_traffic():
        print("idle_group is left out: needs `ss`", file=sys.stderr)
        return []

    async def measure(launcher: Launcher, directory: Path) -> tuple[float, float, float]:
        async with LauncherCluster(launcher, directory, "2") as cluster:
            await cluster.start_together(2)
            await asyncio.sleep(_SETTLE_S)
            port = int(cluster.endpoint.rpartition(":")[2])
            before, began = traffic_of(port), time.monotonic()
            await asyncio.sleep(_IDLE_S)
            added = traffic_of(port) - before
            node_seconds = 2 * (time.monotonic() - began)
            both = added.bytes_in + added.bytes_out
            figures = added.messages_in, added.messages_out, both
            return figures[0] / node_seconds, figures[1] / node_seconds, both / node_seconds

    us = isolated(measure)(ours)
    them = isolated(measure)(theirs) if theirs else (None, None, None)
    what = "an idle group, a node"
    return [
        Line(f"{what}: messages to the store", "/s", us[0], them[0], Goal(1), bound=1),
        Line(f"{what}: messages from the store", "/s", us[1], them[1]),
        Line(f"{what}: bytes both ways", "B/s", us[2], them[2]),
    ]


def _watch_s(launcher: Launcher) -> float:
    return 60 if launcher.is_ours else _WATCH_S
