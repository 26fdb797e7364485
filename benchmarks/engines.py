"""Stores on etcd and Redis beside the store that a node serves."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launchers import Job, Launcher
from benchmarks.table import Goal, Line
from tests.support import etcd, redis
from tests.support.sockets import LOOPBACK, can_count_traffic, free_port

__all__ = ["client", "jobs", "leader", "median", "round"]

_MEMBERS = 100
_JOBS = 100
_OPERATIONS = 1_000
_PACKAGE = "benchmarks.workers"


@contextlib.contextmanager
def _served(backend: str, size: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """Yield the endpoints of a fresh store and its servers; none for one that a node serves."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        match backend:
            case "etcd":
                with etcd.etcd_cluster(directory, size) as members:
                    yield ",".join(member.endpoint for member in members), list(members)
            case "redis":
                with redis.RedisProcess(directory, appends=False) as server:
                    yield server.endpoint, [server]
            case _:
                yield f"{LOOPBACK}:{free_port()}", []


def _missing(row: str) -> bool:
    is_missing = etcd.ETCD is None or redis.REDIS is None or not can_count_traffic()
    if is_missing:
        print(f"{row} is left out: needs etcd, redis-server and `ss`", file=sys.stderr)
    return is_missing


def round(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Form a group of many members, lose one, and do nothing, at each store in turn."""
    if _missing("engine-round"):
        return []
    found: dict[str, list[dict[str, Any]]] = {"c10d": [], "etcd": [], "redis": []}
    for _ in range(max(rounds // 5, 1)):
        for backend, results in found.items():
            with _served(backend) as (endpoints, _):
                results.append(_run("round", backend, endpoints, _MEMBERS))
    limits = {key: median(found["c10d"], key) for key in ("formed", "reformed")}
    lines = []
    for backend in ("etcd", "redis"):
        results = found[backend]
        for key, what in (
            ("formed", "first opens → last starts"),
            ("reformed", "one leaves → last starts again"),
        ):
            lines.append(
                Line(
                    f"{_MEMBERS} members at {backend}: {what}",
                    "s",
                    median(results, key),
                    limit_name="served by a node",
                    limit=limits[key],
                    limit_goal=Goal(3),
                )
            )
        for phase in ("forming", "reforming"):
            requests, size = (
                statistics.median(result[phase][at] for result in results) for at in (0, 1)
            )
            lines += [
                Line(f"{backend}, {phase}: requests of each member", "", requests),
                Line(f"{backend}, {phase}: bytes of each member, both ways", "B", size),
            ]
        requests, size = (
            statistics.median(result["idle"][at] for result in results) for at in (0, 1)
        )
        lines += [
            Line(f"{backend}, idle: requests of each member", "/s", requests, bound=1),
            Line(f"{backend}, idle: bytes of each member, both ways", "B/s", size),
        ]
    return lines


def leader(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Kill the leader of three members of etcd while a group forms."""
    if _missing("engine-leader"):
        return []
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(max(rounds // 5, 1)):
        for kills, results in times.items():
            with _served("etcd", 3) as (endpoints, members):
                command = _command("kill", "etcd", endpoints, _MEMBERS)
                with subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                ) as process:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    assert process.stdout.readline() == "half\n"
                    if kills:
                        next(member for member in members if member.is_leader).kill()
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    results.append(json.loads(process.stdout.readline())["formed"])
    whole, killed = (statistics.median(results) for results in times.values())
    return [
        Line(
            f"{_MEMBERS} members at 3 of etcd, its leader is killed half-way: time that it costs",
            "s",
            max(0.0, killed - whole),
            bound=3,
        ),
        Line("... the other half joins → last starts, without a fault", "s", whole),
    ]


def jobs(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Form many jobs of four nodes at once on one etcd, and list them."""
    if _missing("engine-jobs"):
        return []
    lines = []
    for backend in ("etcd", "redis"):
        with _served(backend) as (endpoints, _):
            command = _command("jobs", backend, endpoints, _JOBS)
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                prefix = json.loads(process.stdout.readline())["prefix"]
                began = time.monotonic()
                listed = subprocess.run(
                    [
                        *(sys.executable, "-m", "elastic_aio", "jobs", "--json"),
                        *("--rdzv-backend", backend, "--rdzv-endpoint", endpoints),
                        *("--rdzv-conf", f"key_prefix={prefix}"),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                seconds = time.monotonic() - began
                running = [json.loads(line) for line in listed.stdout.splitlines()]
                process.stdin.write("go\n")
                process.stdin.flush()
                figures = json.loads(process.stdout.readline())
        whole = sum(job["state"] == "running" and len(job["nodes"]) == 4 for job in running)
        what = f"{_JOBS} jobs of 4 nodes at one {backend}"
        lines += [
            Line(f"{what}: first opens → last starts", "s", figures["formed"]),
            Line(f"{what}: nodes that were lost meanwhile", "", figures["lost"], bound=0),
            Line(f"{what}: jobs that `aio-elastic jobs` lists as running", "", whole),
            Line(f"{what}: `aio-elastic jobs`", "s", seconds),
        ]
    return lines


def client(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Compare the CPU time of an operation with that of the package redis, and of gRPC."""
    if _missing("engine-client"):
        return []
    lines = []
    for backend, other, goal in (("redis", "redis-py", 1.5), ("etcd", "grpc", 1.0)):
        with _served(backend) as (endpoints, _):
            results: dict[str, list[dict[str, float]]] = {backend: [], other: []}
            for _ in range(max(rounds // 5, 1)):
                for kind, found in results.items():
                    one = _run(kind, endpoints, _OPERATIONS, module="engine_client")
                    if one:
                        found.append(one)
            for operation in ("set", "peek"):
                limit = median(results[other], operation) if results[other] else None
                lines.append(
                    Line(
                        f"CPU time of a client at {backend}: `{operation}`",
                        "µs",
                        median(results[backend], operation),
                        limit_name=other if limit is not None else "",
                        limit=limit,
                        limit_goal=Goal(goal),
                    )
                )
    return lines


def median(results: list[dict[str, Any]], name: str) -> float:
    """Return the median of a figure of several runs."""
    return statistics.median(float(result[name]) for result in results)


def _command(*arguments: object, module: str = "engine_members") -> list[str]:
    return [sys.executable, "-m", f"{_PACKAGE}.{module}", *map(str, arguments)]


def _run(*arguments: object, module: str = "engine_members") -> Any:
    """Run one of the programs in `workers`; return the JSON that it prints."""
    with Job(_command(*arguments, module=module), out=subprocess.PIPE) as job:
        with open(job.stdout, "rb", closefd=False) as output:
            line = output.readline()
        job.succeed()
    return json.loads(line)
