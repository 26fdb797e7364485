"""`python -m tests.soak`: inject faults into a job of many nodes at random, for minutes.

Agents run on this host as processes, with real workers, and have two endpoints.  After each
fault the group must form again: all nodes that can run, one set of workers, no other process.
The first violation ends the soak test with code 1; the files of the agents are kept then.

Where `unshare` and `nft` work, it runs in a network namespace of its own, in which packets
can be dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.soak.faults import Engine, FaultyCluster, Round, Violation, open_engine
from tests.support.cluster import AgentProcess
from tests.support.leaks import begin_session
from tests.support.netns import why_impossible

# Much shorter than the heartbeat_timeout of 2 s.
_SHORT_SUSPENSION_S = 0.4
_PAUSE_S = 1.0
# Some are longer than the heartbeat_timeout.
_FREEZES_S = (0.5, 1.2, 3.0)
# Between the faults of one burst.
_BURST_S = 0.5
_OWN_NETWORK = "ELASTIC_AIO_SOAK_NETWORK"


class Soak:
    """Injects faults at random, and measures how long the group takes to form again.

    It must have formed within `bound` seconds.
    """

    def __init__(
        self, cluster: FaultyCluster, nodes: int, seed: int, bound: float, engine: Engine
    ) -> None:
        self._cluster = cluster
        self._engine = engine
        self._nodes = nodes
        self._random = random.Random(seed)
        self._bound = bound
        self.faults: dict[str, int] = defaultdict(int)
        self.times: dict[str, list[float]] = defaultdict(list)
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[bool]]]] = {
            "kill an agent": (3, lambda: self._remove_one(self._cluster.kill)),
            "kill the store's host": (2, self._kill_store_host),
            "stop an agent": (2, lambda: self._remove_one(self._cluster.stop_one)),
            "start an agent": (8, self._start),
            "kill a worker": (3, self._kill_worker),
            "suspend an agent briefly": (2, self._suspend_briefly),
            "suspend an agent until the others re-form": (1, self._suspend_for_long),
            "replace an agent": (2, self._replace),
            "freeze the store again and again": (1, self._freeze_store),
        }
        if engine.servers:
            for name in ("kill the store's host", "freeze the store again and again"):
                del self._kinds[name]
            self._kinds["kill a server"] = 3, lambda: self._fail_server(engine.restart)
            self._kinds["pause a server"] = 3, lambda: self._fail_server(engine.pause)
        elif _OWN_NETWORK in os.environ:
            self._kinds["drop packets of the store"] = 2, self._drop_packets

    async def run(self, minutes: float) -> None:
        """Inject faults for so long, or until an invariant does not hold (`Violation`)."""
        end = time.monotonic() + 60 * minutes
        started_at = time.monotonic()
        for _ in range(self._nodes):
            self._cluster.start_one()
        await self._settle("start all", started_at)
        reported_at = time.monotonic()
        while time.monotonic() < end:
            await self._inject_burst()
            if time.monotonic() > reported_at + 60:
                reported_at = time.monotonic()
                print(f"{sum(self.faults.values())} faults", file=sys.stderr, flush=True)

    async def _inject_burst(self) -> None:
        """Inject one to three faults, and wait until the group has formed again."""
        injected_at, names = 0.0, []
        weights = [weight for weight, _ in self._kinds.values()]
        for number in range(self._random.choice([1, 1, 1, 2, 3])):
            if number:
                await asyncio.sleep(self._random.uniform(0, _BURST_S))
            name = self._random.choices([*self._kinds], weights)[0]
            at = time.monotonic()
            _, inject = self._kinds[name]
            if await inject():
                self.faults[name] += 1
                injected_at = at
                names.append(name)
        if names:
            await self._settle(names[0] if len(names) == 1 else "several at once", injected_at)
        await asyncio.sleep(self._random.uniform(0, _PAUSE_S))

    async def _settle(self, fault: str, injected_at: float) -> Round:
        try:
            formed = await self._cluster.settle(self._bound)
        except Violation as error:
            raise Violation(f"after `{fault}`: {error}") from None
        if formed.formed_at > injected_at:
            self.times[fault].append(formed.formed_at - injected_at)
        return formed

    # Each fault returns whether it was possible.

    async def _remove_one(self, remove: Callable[[AgentProcess], Awaitable[None]]) -> bool:
        if len(self._cluster.active) < 2:
            return False
        await remove(self._random.choice(self._cluster.active))
        return True

    async def _kill_store_host(self) -> bool:
        host = self._cluster.store_host()
        if host not in self._cluster.active or len(self._cluster.active) < 2:
            return False
        await self._cluster.kill(host)
        return True

    async def _start(self) -> bool:
        if len(self._cluster.members) >= self._nodes:
            return False
        self._cluster.start_one()
        return True

    async def _kill_worker(self) -> bool:
        await self._cluster.kill_worker(self._random.choice)
        return True

    async def _suspend_briefly(self) -> bool:
        node = self._random.choice(self._cluster.active)
        self._cluster.suspend(node)
        await asyncio.sleep(_SHORT_SUSPENSION_S)
        self._cluster.resume(node)
        return True

    async def _replace(self) -> bool:
        """Kill an agent and start another at once, as a supervisor of the agent does."""
        await self._cluster.kill(self._random.choice(self._cluster.active))
        self._cluster.start_one()
        return True

    async def _freeze_store(self) -> bool:
        for _ in range(3):
            host = self._cluster.store_host()
            if host not in self._cluster.active:
                return False
            self._cluster.suspend(host)
            await asyncio.sleep(self._random.choice(_FREEZES_S))
            self._cluster.resume(host)
            await asyncio.sleep(self._random.uniform(0, _PAUSE_S))
        return True

    async def _fail_server(self, fail: Callable[[Any, float], Awaitable[None]]) -> bool:
        server = self._random.choice(self._engine.servers)
        await fail(server, self._random.choice(_FREEZES_S))
        return True

    async def _drop_packets(self) -> bool:
        async with self._cluster.dropping_packets(percent=self._random.choice([5, 30, 90])):
            await asyncio.sleep(self._random.choice(_FREEZES_S))
        return True

    async def _suspend_for_long(self) -> bool:
        if len(self._cluster.active) < 2:
            return False
        node = self._random.choice(self._cluster.active)
        at = time.monotonic()
        self._cluster.suspend(node)
        await self._settle("an agent is suspended", at)
        self._cluster.resume(node)
        return True


async def soak(arguments: argparse.Namespace, directory: Path) -> bool:
    """Run the soak test and print its figures; return whether all invariants hold."""
    violation = ""
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(open_engine(arguments.backend, directory / "engine"))
        cluster = await stack.enter_async_context(
            FaultyCluster(directory, arguments.nodes, arguments.nproc, engine)
        )
        run = Soak(cluster, arguments.nodes, arguments.seed, arguments.bound, engine)
        try:
            await run.run(arguments.minutes)
        except Violation as error:
            violation = str(error)
        finally:
            hung, orphans = await cluster.shut_down()
    print(
        f"rounds formed: {len(cluster.rounds)}; nodes that left for another job:"
        f" {cluster.cut_off}; hung agents: {hung}; orphans: {orphans}"
    )
    _print_figures(run)
    if violation:
        print(violation, file=sys.stderr)
    return not (violation or hung or orphans)


def _print_figures(run: Soak) -> None:
    for name, count in sorted(run.faults.items()):
        print(f"  {name}: {count}")
    print("seconds until the group has formed again:   times    p50    p99    max")
    every = [seconds for times in run.times.values() for seconds in times]
    for name, times in [*sorted(run.times.items()), ("all", every)]:
        if times:
            p99 = sorted(times)[min(int(len(times) * 0.99), len(times) - 1)]
            middle = statistics.median(times)
            print(f"  {name:41} {len(times):5} {middle:6.2f} {p99:6.2f} {max(times):6.2f}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, metavar="M")
    parser.add_argument("--nodes", type=int, default=4, metavar="N")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="workers of each node")
    parser.add_argument(
        "--backend",
        choices=["c10d", "etcd", "redis"],
        default="c10d",
        help="where the nodes meet; the servers of an engine fail too",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--bound", type=float, default=20, metavar="S", help="seconds to form again at most"
    )
    return parser


def main() -> int:
    """Run the soak test; return 1 if an invariant does not hold."""
    arguments = _parser().parse_args()
    if _OWN_NETWORK not in os.environ:
        if why := why_impossible():
            print(f"no packets are dropped: {why}", file=sys.stderr)
        else:
            os.environ[_OWN_NETWORK] = "1"
            command = 'ip link set lo up && exec "$0" -m tests.soak "$@"'
            argv = ["unshare", "--net", "sh", "-c", command, sys.executable, *sys.argv[1:]]
            os.execvp(argv[0], argv)
    begin_session()
    directory = Path(tempfile.mkdtemp(prefix="elastic_aio-soak-"))
    holds = False
    try:
        holds = asyncio.run(soak(arguments, directory))
    finally:
        if holds:
            shutil.rmtree(directory)
        else:
            print(f"the files of the agents are in {directory}", file=sys.stderr)
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
