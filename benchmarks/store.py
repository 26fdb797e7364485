"""The store beside torch's: ratios measured in one run, on one machine.

Needs torch 2.13 and uvloop.  Each number is the median of paired rounds, torch's
libuv server and ours taking turns, so that a busy machine disturbs both alike.

    python benchmarks/store.py                 # all
    python benchmarks/store.py --only server   # server, client, idle or init
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SERVERS = ("torch", "uvloop", "asyncio")
VALUE = b"0123456789abcdef"


# Servers, each in a process of its own.


def serve_torch() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def serve_ours(loop_name: str) -> None:
    from elastic_aio.store import ServerLimits, StoreServer

    async def serve() -> None:
        async with StoreServer("127.0.0.1", limits=ServerLimits(opening=1e6)) as server:
            print(server.port, flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    with asyncio.Runner(loop_factory=_factory(loop_name)) as runner:
        runner.run(serve())


def _factory(loop_name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if loop_name == "asyncio":
        return asyncio.SelectorEventLoop
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@contextlib.contextmanager
def running(role: str, cpu: int | None = None) -> Iterator[tuple[int, int]]:
    """Run a server, on one processor if asked; give its port and process id."""
    command = [sys.executable, __file__, "--role", role]
    if cpu is not None:
        # One client and one server are three times as fast or as slow depending on
        # where the scheduler happens to put them.
        command += ["--cpu", str(cpu)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        process.wait()


# Load by torch's client: forked, so that torch is imported once.


def torch_client(port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def in_processes(count: int, work: Callable[[int, Callable[[], None]], float]) -> list[float]:
    """Fork `count` processes; each calls `ready()` inside `work`, and they go on together.

    A single one gets a processor of its own.
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


def rate(port: int, operation: str, processes: int, seconds: float) -> float:
    """Return the calls a second of torch clients."""

    def work(index: int, ready: Callable[[], None]) -> float:
        store = torch_client(port)
        key = f"bench/{index}"
        store.set(key, VALUE)
        store.add(key + "n", 1)
        calls: dict[str, Callable[[], object]] = {
            "set": lambda: store.set(key, VALUE),
            "get": lambda: store.get(key),
            "add": lambda: store.add(key + "n", 1),
        }
        call = calls[operation]
        ready()
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < seconds:
            for _ in range(20):
                call()
            count += 20
        store.num_keys()  # everything that was sent has been served
        return count / (max(now, time.perf_counter()) - begin)

    return sum(in_processes(processes, work))


def wake_latency(port: int, rounds: int = 400) -> float:
    """Return the median seconds from a `set` to the return of another client's `wait`."""

    name = f"wake/{time.monotonic_ns()}"

    def work(index: int, ready: Callable[[], None]) -> float:
        store = torch_client(port)
        ready()
        times = []
        for turn in range(rounds):
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
        return statistics.median(times) / 2

    return in_processes(2, work)[0]


def accept_time(port: int, count: int = 900) -> float:
    """Return the seconds for `count` connections to be opened and each to be answered."""
    begin = time.perf_counter()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for sock in sockets:
        sock.sendall(bytes.fromhex("00cef7853c"))
        sock.sendall(bytes.fromhex("0d95220000"))
    for sock in sockets:
        sock.recv(4)
    spent = time.perf_counter() - begin
    for sock in sockets:
        sock.close()
    return spent


def interleaved(
    ports: dict[str, int], rounds: int, measure: Callable[[int], float]
) -> dict[str, float]:
    """Measure each server in turn; return the median of each."""
    found: dict[str, list[float]] = {name: [] for name in ports}
    for turn in range(rounds):
        names = list(ports)[turn % 2 :: 1] + list(ports)[: turn % 2]
        for name in names:
            found[name].append(measure(ports[name]))
    return {name: statistics.median(values) for name, values in found.items()}


def row(what: str, found: dict[str, float], unit: float, better: str) -> None:
    base = found["torch"]
    ratios = "  ".join(
        f"{name} {value / unit:10.1f} ({value / base:5.2f}x)" for name, value in found.items()
    )
    print(f"{what:34} {ratios}   {better}", flush=True)


def bench_server(seconds: float) -> None:
    import torch.distributed  # noqa: F401  # before the forks

    print("server, torch clients: calls/s; goal uvloop >= 0.8x, asyncio >= 0.35x")
    for processes in (1, 16):
        cpu = 0 if processes == 1 else None
        with contextlib.ExitStack() as stack:
            ports = {
                name: stack.enter_context(running(f"serve-{name}", cpu))[0] for name in SERVERS
            }
            for operation in ("set", "get", "add"):
                found = interleaved(
                    ports,
                    5,
                    lambda port: rate(port, operation, processes, seconds),  # noqa: B023
                )
                row(f"  {processes:2} processes, {operation}", found, 1, "calls/s")
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(running(f"serve-{name}"))[0] for name in SERVERS}
        row("wake-up of a waiter (<= 1.5x)", interleaved(ports, 5, wake_latency), 1e-6, "us")
        # Once only: torch's server looks the name of each peer up, which takes minutes
        # where nobody answers such questions.
        row("900 connections (<= 0.1x)", interleaved(ports, 1, accept_time), 1e-3, "ms")


# Our client beside torch's, on torch's server.


def our_rates(port: int, loop_name: str, operation: str, tasks: int, seconds: float) -> float:
    from elastic_aio.store import connect

    async def load() -> float:
        async with connect(f"127.0.0.1:{port}") as store:
            await store.set("bench/ours", VALUE)
            calls: dict[str, Callable[[], Any]] = {
                "set": lambda: store.set("bench/ours", VALUE),
                "get": lambda: store.get("bench/ours"),
                "add": lambda: store.add("bench/oursn"),
            }
            call = calls[operation]
            begin = time.perf_counter()
            count = 0

            async def one() -> None:
                nonlocal count
                while time.perf_counter() - begin < seconds:
                    for _ in range(10):
                        await call()
                    count += 10

            await asyncio.gather(*(one() for _ in range(tasks)))
            await store.num_keys()
            return count / (time.perf_counter() - begin)

    def work(_: int, ready: Callable[[], None]) -> float:
        ready()
        with asyncio.Runner(loop_factory=_factory(loop_name)) as runner:
            return runner.run(load())

    return in_processes(1, work)[0]


def bench_client(seconds: float) -> None:
    import torch.distributed  # noqa: F401  # before the forks

    for server in ("torch", "uvloop"):
        with running(f"serve-{server}", cpu=0) as (port, _):
            print(f"client, on the {server} server: calls/s; goal 64 tasks >= 3x, 1 task >= 0.7x")
            for operation in ("get", "add"):
                found: dict[str, list[float]] = {}
                for _ in range(5):
                    measured = {"torch": rate(port, operation, 1, seconds)}
                    for loop_name in ("uvloop", "asyncio"):
                        for tasks in (1, 64):
                            name = f"{loop_name} x{tasks}"
                            measured[name] = our_rates(port, loop_name, operation, tasks, seconds)
                    for name, value in measured.items():
                        found.setdefault(name, []).append(value)
                row(
                    f"  {operation}",
                    {name: statistics.median(values) for name, values in found.items()},
                    1,
                    "calls/s",
                )


# Idle connections.


def bench_idle(connections: int = 2_000, waits: int = 10_000) -> None:
    from elastic_aio.store import connect

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * connections + 500), hard))
    for name in ("uvloop", "asyncio"):
        with running(f"serve-{name}") as (port, pid):
            before = memory(pid)

            async def fill(
                name: str = name, port: int = port, pid: int = pid, before: int = before
            ) -> None:
                async with contextlib.AsyncExitStack() as stack:
                    stores = []
                    for _ in range(connections):
                        store = connect(f"127.0.0.1:{port}", wait_timeout=1e6)
                        stores.append(await stack.enter_async_context(store))
                    each = waits // connections
                    tasks = [
                        asyncio.ensure_future(store.wait([f"never/{index}/{turn}"]))
                        for index, store in enumerate(stores)
                        for turn in range(each)
                    ]
                    await stores[-1].num_keys()
                    await asyncio.sleep(1.0)
                    filled, switches = memory(pid), wake_ups(pid)
                    await asyncio.sleep(3.0)
                    print(
                        f"idle, {name}: {connections} connections and {len(tasks)} waits add "
                        f"{(filled - before) / 1e6:.1f} MB to {before / 1e6:.1f} MB "
                        f"(<= 100), {wake_ups(pid) - switches} wake-ups in 3 s (0)",
                        flush=True,
                    )
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks)

            with asyncio.Runner(loop_factory=_factory("uvloop")) as runner:
                runner.run(fill())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def wake_ups(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


# The start of a job.


def init_time(port: int, ranks: int = 8) -> float:
    """Return the seconds of `init_process_group` with gloo, the slowest rank's."""
    import torch.distributed as dist

    name = f"init/{time.monotonic_ns()}"

    def work(index: int, ready: Callable[[], None]) -> float:
        store = torch_client(port)
        prefix = dist.PrefixStore(name, store)
        ready()
        begin = time.perf_counter()
        dist.init_process_group("gloo", store=prefix, rank=index, world_size=ranks)
        spent = time.perf_counter() - begin
        dist.barrier()
        return spent

    return max(in_processes(ranks, work))


def bench_init() -> None:
    import torch.distributed  # noqa: F401  # before the forks

    found: dict[str, list[float]] = {name: [] for name in SERVERS}
    for _ in range(5):
        for name in SERVERS:
            # A fresh server each time: gloo's keys must not meet those of the last round.
            with running(f"serve-{name}") as (port, _):
                found[name].append(init_time(port))
    medians = {name: statistics.median(values) for name, values in found.items()}
    row("init_process_group, 8 gloo (<= 1.1x)", medians, 1e-3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the store with torch's.")
    parser.add_argument("--only", choices=["server", "client", "idle", "init"])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    if arguments.role == "serve-torch":
        serve_torch()
    elif arguments.role:
        serve_ours(arguments.role.removeprefix("serve-"))
    else:
        benches: dict[str, Callable[[], None]] = {
            "server": lambda: bench_server(arguments.seconds),
            "client": lambda: bench_client(arguments.seconds),
            "idle": bench_idle,
            "init": bench_init,
        }
        for name, bench in benches.items():
            if arguments.only in (None, name):
                bench()


if __name__ == "__main__":
    main()
