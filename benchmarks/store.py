"""The store beside torch's: both servers, both clients, idle connections, the start of a job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.launchers import Job, Launcher
from benchmarks.table import Goal, Line
from benchmarks.workers.store_load import CONNECTIONS, LOOPS, OPERATIONS, RANKS, running

__all__ = ["store_client", "store_idle", "store_init", "store_server"]

_IDLE = 2_000  # connections
_WAITS = 10_000


def store_server(
    ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> list[Line]:
    """Load our server and torch's with torch's clients."""
    figures = _run("server", ours, theirs, rounds, old=old)
    if figures is None:
        return []
    lines = []
    for processes in (1, 16):
        for operation in OPERATIONS:
            lines += _both_loops(
                f"store server, `{operation}` by {processes} torch clients",
                "/s",
                figures[f"{operation} {processes}"],
                {"uvloop": Goal(1, at_least=True), "asyncio": Goal(0.8, at_least=True)},
            )
    lines += _both_loops(
        "store server, `set` → another client's `wait` returns",
        "µs",
        figures["wake"],
        dict.fromkeys(LOOPS, Goal(1.5)),
    )
    lines += _both_loops(
        f"store server, {CONNECTIONS} connections opened and answered",
        "ms",
        figures["accept"],
        dict.fromkeys(LOOPS, Goal(0.1)),
    )
    return lines


def store_client(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Call torch's server and ours with our client and torch's."""
    figures = _run("client", ours, theirs, rounds)
    if figures is None:
        return []
    lines = []
    for server in ("torch", "uvloop"):
        for operation in ("get", "add"):
            rates = figures[f"{server} {operation}"]
            for tasks, goal in ((1, 0.7), (64, 3)):
                chosen = {loop: rates[f"{loop} {tasks}"] for loop in LOOPS}
                lines += _both_loops(
                    f"store client, `{operation}` by {tasks} tasks on the {server} server",
                    "/s",
                    {**chosen, "torch": rates["torch"]},
                    dict.fromkeys(LOOPS, Goal(goal, at_least=True)),
                )
    return lines


def store_idle(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Hold many idle connections and waits open on our server."""
    lines = []
    for loop in LOOPS:
        with running(f"serve-{loop}", python=sys.executable) as (port, pid):
            added, switches = asyncio.run(_fill(port, pid))
        what = f"store on {loop}, {_IDLE} idle connections with {_WAITS} waits"
        lines += [
            Line(f"{what}: memory added", "MB", added / 1e6, bound=100),
            Line(f"{what}: wake-ups in 3 s", "", switches, bound=0),
        ]
    return lines


def store_init(ours: Launcher, theirs: Launcher | None, rounds: int) -> list[Line]:
    """Initialize a gloo process group over our server and over torch's."""
    figures = _run("init", ours, theirs, rounds)
    if figures is None:
        return []
    what = f"`init_process_group` of {RANKS} gloo ranks over the store"
    return _both_loops(what, "ms", figures["init"], dict.fromkeys(LOOPS, Goal(1.1)))


def _run(
    row: str, ours: Launcher, theirs: Launcher | None, rounds: int, *, old: Launcher | None = None
) -> dict[str, dict[str, float]] | None:
    """Measure a row in torch's interpreter; None without torch."""
    if theirs is None:
        print(f"store-{row} is left out: needs torch", file=sys.stderr)
        return None
    command = [
        theirs.command()[0],
        "-P",
        "-m",
        "benchmarks.workers.store_load",
        row,
        str(max(rounds // 3, 1)),
    ]
    if old is not None:
        command.append(f"--old={old.root}")
    with Job(command, out=subprocess.PIPE, root=ours.root) as job:
        output = job.read()
        job.succeed()
    figures: dict[str, dict[str, float]] = json.loads(output)
    return figures


def _both_loops(
    measure: str, unit: str, figures: dict[str, float], goals: dict[str, Goal]
) -> list[Line]:
    return [
        Line(
            f"{measure} ({loop})",
            unit,
            figures[loop],
            figures["torch"],
            goals[loop],
            old=figures.get(f"old-{loop}"),
        )
        for loop in LOOPS
    ]


async def _fill(port: int, pid: int) -> tuple[float, int]:
    """Open connections with waits; return the bytes added and the wake-ups of 3 s."""
    from elastic_aio.store import connect

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * _IDLE + 500), hard))
    before = _memory(pid)
    async with contextlib.AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(connect(f"127.0.0.1:{port}", wait_timeout=1e6))
            for _ in range(_IDLE)
        ]
        tasks = [
            asyncio.ensure_future(store.wait([f"never/{index}/{turn}"]))
            for index, store in enumerate(stores)
            for turn in range(_WAITS // _IDLE)
        ]
        await stores[-1].num_keys()
        await asyncio.sleep(1.0)
        added, switches = _memory(pid) - before, _wake_ups(pid)
        await asyncio.sleep(3.0)
        switches = _wake_ups(pid) - switches
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return added, switches


def _memory(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _wake_ups(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
