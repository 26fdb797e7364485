"""Stores and their load: `python -m benchmarks.workers.store_load ROLE [ROUNDS]`.

`serve-torch`, `serve-uvloop` and `serve-asyncio` serve a store until the end of standard
input, and print their port.  `server`, `client` and `init` measure a row of
`benchmarks/store.py` and print its figures as JSON; they need torch, which they import once
and then fork their load.  With `--old ROOT`, `server` also loads the servers of the package there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.turns import compare

__all__ = ["CONNECTIONS", "LOOPS", "OPERATIONS", "RANKS", "running"]

LOOPS = ("uvloop", "asyncio")
OPERATIONS = ("set", "get", "add", "mix")
CONNECTIONS = 900
RANKS = 8

_ROOT = str(Path(__file__).parents[2])  # of the package to measure, and of this one
_VALUE = b"0123456789abcdef"
_SECONDS = 1.0  # of each measurement of a rate


# Servers, each in a process of its own.


def _serve_torch() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def _serve_ours(loop: str) -> None:
    from elastic_aio.store import StoreServer

    async def serve() -> None:
        async with StoreServer("127.0.0.1") as server:
            print(server.port, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    with asyncio.Runner(loop_factory=_factory(loop)) as runner:
        runner.run(serve())


def _factory(loop: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop == "asyncio":
        return asyncio.SelectorEventLoop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def running(
    role: str, cpu: int | None = None, python: str = "", root: str = _ROOT
) -> Iterator[tuple[int, int]]:
    """Run a server of the package in `root`, on one CPU if asked; give its port and pid."""
    command = [python or sys.executable, "-P", "-m", "benchmarks.workers.store_load", role]
    if cpu is not None:
        # One client and one server are three times as fast or as slow, depending on the
        # CPUs that the scheduler chooses.
        command += ["--cpu", str(cpu)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        process.wait()


def _servers(stack: contextlib.ExitStack, old: str, cpu: int | None = None) -> dict[str, int]:
    """Run all servers, those of the root `old` if there is one; return their ports."""
    names = dict.fromkeys(("torch", *LOOPS), _ROOT)
    if old:
        names |= {f"old-{loop}": old for loop in LOOPS}
    return {
        name: stack.enter_context(running(f"serve-{name.removeprefix('old-')}", cpu, root=root))[0]
        for name, root in names.items()
    }


def _compare_servers(
    ports: dict[str, int], rounds: int, measure: Callable[[int], float]
) -> dict[str, float]:
    """Measure each server in turn; return the median of each."""
    first, *others = ports.values()
    turns = [partial(measure, port) for port in others]
    results = [result for result in compare(rounds, measure, first, None, *turns) if result]
    return dict(zip(ports, map(statistics.median, results), strict=True))


# Load by torch's client: forked, so that torch is imported once.


def _torch_client(port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def _in_processes(count: int, work: Callable[[int, Callable[[], None]], float]) -> list[float]:
    """Fork `count` processes; each calls `ready()` inside `work`, and they continue together.

    A single one has a CPU of its own.
    """
    go_read, go_write = os.pipe()
    pipes = []
    for index in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(go_write)

            def ready(write: int = write) -> None:
                os.write(write, b"r")
                os.read(go_read, 1)

            try:
                if count == 1:
                    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
                os.write(write, json.dumps(work(index, ready)).encode() + b"\n")
            finally:
                os._exit(0)
        os.close(write)
        pipes.append((pid, read))
    for _, read in pipes:
        os.read(read, 1)
    os.close(go_read)
    os.close(go_write)
    results = []
    for pid, read in pipes:
        with os.fdopen(read) as stream:
            results.append(float(json.loads(stream.read())))
        os.waitpid(pid, 0)
    return results


def _rate(operation: str, processes: int, port: int) -> float:
    """Return the calls a second of torch clients."""

    def work(index: int, ready: Callable[[], None]) -> float:
        store = _torch_client(port)
        key = f"bench/{index}"
        store.set(key, _VALUE)
        store.add(key + "n", 1)
        calls: dict[str, Callable[[], object]] = {
            "set": lambda: store.set(key, _VALUE),
            "get": lambda: store.get(key),
            "add": lambda: store.add(key + "n", 1),
        }
        mix = itertools.cycle(calls.values() if operation == "mix" else [calls[operation]])
        ready()
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < _SECONDS:
            for call in itertools.islice(mix, 20):
                call()
            count += 20
        store.num_keys()  # the server has handled every request before
        return count / (max(now, time.perf_counter()) - begin)

    return sum(_in_processes(processes, work))


def _wake_us(port: int, turns: int = 400) -> float:
    """Return the median µs from a `set` to the return of another client's `wait`."""
    name = f"wake/{time.monotonic_ns()}"

    def work(index: int, ready: Callable[[], None]) -> float:
        store = _torch_client(port)
        ready()
        times = []
        for turn in range(turns):
            begin = time.perf_counter()
            if index:
                store.wait([f"{name}/{turn}"])
                store.set(f"{name}/{turn}/back", b"")
            else:
                store.set(f"{name}/{turn}", b"")
                store.wait([f"{name}/{turn}/back"])
                store.delete_key(f"{name}/{turn}")
                store.delete_key(f"{name}/{turn}/back")
            times.append(time.perf_counter() - begin)
        return statistics.median(times) / 2 * 1e6

    return _in_processes(2, work)[0]


def _accept_ms(port: int) -> float:
    """Return the ms until many connections are open and each has been answered."""
    begin = time.perf_counter()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    for sock in sockets:
        sock.sendall(bytes.fromhex("00cef7853c"))
        sock.sendall(bytes.fromhex("0d95220000"))
    for sock in sockets:
        sock.recv(4)
    spent = time.perf_counter() - begin
    for sock in sockets:
        sock.close()
    return spent * 1e3


def _init_ms(port: int) -> float:
    """Return the ms of `init_process_group` with gloo, of the slowest rank."""
    import torch.distributed as dist

    name = f"init/{time.monotonic_ns()}"

    def work(index: int, ready: Callable[[], None]) -> float:
        prefix = dist.PrefixStore(name, _torch_client(port))
        ready()
        begin = time.perf_counter()
        dist.init_process_group("gloo", store=prefix, rank=index, world_size=RANKS)
        spent = time.perf_counter() - begin
        dist.barrier()
        return spent * 1e3

    return max(_in_processes(RANKS, work))


# Load by our client.


def _our_rate(port: int, loop: str, operation: str, tasks: int) -> float:
    from elastic_aio.store import connect

    async def load() -> float:
        async with connect(f"127.0.0.1:{port}") as store:
            await store.set("bench/ours", _VALUE)
            calls: dict[str, Callable[[], Any]] = {
                "get": lambda: store.get("bench/ours"),
                "add": lambda: store.add("bench/oursn"),
            }
            call = calls[operation]
            begin = time.perf_counter()
            count = 0

            async def call_again() -> None:
                nonlocal count
                while time.perf_counter() - begin < _SECONDS:
                    for _ in range(10):
                        await call()
                    count += 10

            await asyncio.gather(*(call_again() for _ in range(tasks)))
            await store.num_keys()
            return count / (time.perf_counter() - begin)

    def work(_: int, ready: Callable[[], None]) -> float:
        ready()
        with asyncio.Runner(loop_factory=_factory(loop)) as runner:
            return runner.run(load())

    return _in_processes(1, work)[0]


# The measures of each row, in torch's interpreter.


def _measure_server(rounds: int, old: str) -> dict[str, dict[str, float]]:
    figures = {}
    for processes in (1, 16):
        with contextlib.ExitStack() as stack:
            ports = _servers(stack, old, cpu=0 if processes == 1 else None)
            for operation in OPERATIONS:
                measure = partial(_rate, operation, processes)
                figures[f"{operation} {processes}"] = _compare_servers(ports, rounds, measure)
    with contextlib.ExitStack() as stack:
        ports = _servers(stack, old)
        figures["wake"] = _compare_servers(ports, rounds, _wake_us)
        # Once: torch's server looks up the name of each peer, which takes minutes where no
        # name server answers.
        figures["accept"] = {name: _accept_ms(port) for name, port in ports.items()}
    return figures


def _measure_client(rounds: int, old: str) -> dict[str, dict[str, float]]:
    figures = {}
    for server in ("torch", "uvloop"):
        with running(f"serve-{server}", cpu=0) as (port, _):
            for operation in ("get", "add"):
                measures: dict[str, Callable[[], float]] = {
                    f"{loop} {tasks}": partial(_our_rate, port, loop, operation, tasks)
                    for loop in LOOPS
                    for tasks in (1, 64)
                }
                measures["torch"] = partial(_rate, operation, 1, port)
                first, *others = measures.values()
                results = compare(rounds, lambda call: call(), first, None, *others)
                rates = [statistics.median(result) for result in results if result]
                figures[f"{server} {operation}"] = dict(zip(measures, rates, strict=True))
    return figures


def _measure_init(rounds: int, old: str) -> dict[str, dict[str, float]]:
    def measure(name: str) -> float:
        # A fresh server each time: gloo's keys must not collide with those of another round.
        with running(f"serve-{name}") as (port, _):
            return _init_ms(port)

    names = ("uvloop", "torch", "asyncio")
    results = compare(rounds, measure, "uvloop", "torch", lambda: measure("asyncio"))
    return {"init": dict(zip(names, map(statistics.median, results), strict=True))}


def main() -> None:
    """Serve, or measure a row and print its figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.workers.store_load", description=__doc__
    )
    parser.add_argument("role")
    parser.add_argument("rounds", type=int, nargs="?", default=1)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--old", metavar="ROOT", default="")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    if arguments.role == "serve-torch":
        _serve_torch()
    elif arguments.role.startswith("serve-"):
        _serve_ours(arguments.role.removeprefix("serve-"))
    else:
        import torch.distributed  # noqa: F401  # before the forks

        rows = {"server": _measure_server, "client": _measure_client, "init": _measure_init}
        print(json.dumps(rows[arguments.role](arguments.rounds, arguments.old)), flush=True)


if __name__ == "__main__":
    main()
