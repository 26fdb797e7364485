"""Many members of jobs at one store: `python -m benchmarks.workers.engine_members WAY ...`.

`round BACKEND ENDPOINTS COUNT`: one job of COUNT members forms, and again after one has left.
With the backend c10d the first member serves the store.  Prints a line of JSON: seconds until
all had `formed` and `reformed`, then for each of these what the servers have carried for each
member (`requests`, and `bytes` both ways), and at the end the same for each member and second
while the job is `idle`.

`kill BACKEND ENDPOINTS COUNT`: the line `half` is printed when half of the members are there;
then a line on standard input lets the others come.  Prints seconds since that line (`formed`).

`jobs BACKEND ENDPOINTS COUNT`: COUNT jobs of four members form at once.  Prints seconds until all
run (`formed`), and how many members have been `lost` until then.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time

from benchmarks.workers.members import Member, Members, raise_limit
from elastic_aio.events import Event
from elastic_aio.node_events import NodeLost
from elastic_aio.rendezvous.base import NodeInfo
from elastic_aio.rendezvous.dynamic import DynamicRendezvous
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import ENGINES, EngineSpec, RendezvousSpec
from tests.support.engine_load import Load, load_of

_LIMIT_S = 120.0
_HEARTBEAT_S = 60.0
_IDLE_HEARTBEAT_S = 5.0
_IDLE_S = 15.0
_NODES = 4

# Each node imports them in a process of its own; here one would do so for all.
_MODULES = {
    "c10d": ("server", "client"),
    "etcd": ("etcd", "server", "client"),
    "redis": ("redis", "server", "client"),
}


def main() -> None:
    """Run in the way of the command line."""
    raise_limit()
    way, backend, endpoints, count = sys.argv[1:]
    run = {"round": one_round, "kill": kill, "jobs": jobs}[way]
    figures = asyncio.run(run(backend, endpoints, int(count)))
    print(json.dumps(figures), flush=True)
    os._exit(0)  # that so many members leave is not measured


class EngineMembers(Members):
    """The members of one job at a store."""

    def __init__(
        self,
        backend: str,
        endpoints: str,
        count: int,
        run_id: str = "members",
        heartbeat: float = _IDLE_HEARTBEAT_S,
    ) -> None:
        super().__init__()
        for name in _MODULES[backend]:
            importlib.import_module(f"elastic_aio.store.{name}")
        self.lost = 0
        self._spec = LaunchSpec(
            ["true"],
            nnodes=(max(count - 1, 1), count),
            rendezvous=RendezvousSpec(
                backend=backend,
                endpoint=endpoints,
                heartbeat_timeout=heartbeat if backend in ENGINES else _HEARTBEAT_S,
                last_call_timeout=_LIMIT_S,
                engine=EngineSpec(key_prefix=f"/{os.getpid()}"),
            ),
        )
        self._run_id = run_id

    async def add(self, number: int) -> None:
        """Let one more member join."""
        member = CountingMember(self)
        node = NodeInfo(name=f"host{number}", pid=number, nproc=1, role="default")
        member.rendezvous = DynamicRendezvous(self._spec, node, self._run_id, member)
        self.members.append(member)
        await member.rendezvous.open()


class CountingMember(Member):
    """A member that notes the loss of another."""

    def on_event(self, event: Event) -> None:
        """Count the loss of a member, once for each that sees it."""
        super().on_event(event)
        if isinstance(event, NodeLost):
            self._members.lost += 1  # type: ignore[attr-defined]


async def one_round(backend: str, endpoints: str, count: int) -> dict[str, object]:
    """Form one job, let a member leave, and then do nothing."""
    members = EngineMembers(backend, endpoints, count)
    async with asyncio.timeout(_LIMIT_S):
        before = await asyncio.to_thread(load_of, backend, endpoints)
        began = time.monotonic()
        await members.add(0)
        if backend not in ENGINES:
            await members.elected.wait()
            before = await asyncio.to_thread(load_of, backend, endpoints)
        for number in range(1, count):
            await members.add(number)
        formed = await members.all_running(count) - began
        forming = await asyncio.to_thread(load_of, backend, endpoints)
        leaving = members.members.pop()
        began = time.monotonic()
        leave = asyncio.ensure_future(leaving.rendezvous.leave("it is measured"))
        reformed = await members.all_running(count - 1) - began
        await leave
        after = await asyncio.to_thread(load_of, backend, endpoints)
        await asyncio.sleep(2.0)
        quiet = await asyncio.to_thread(load_of, backend, endpoints)
        await asyncio.sleep(_IDLE_S)
        idle = await asyncio.to_thread(load_of, backend, endpoints)
    return {
        "formed": formed,
        "reformed": reformed,
        "forming": _each(forming, before, count),
        "reforming": _each(after, forming, count),
        "idle": _each(idle, quiet, (count - 1) * _IDLE_S),
    }


def _each(after: Load, before: Load, divisor: float) -> Load:
    return Load(*((new - old) / divisor for new, old in zip(after, before, strict=True)))


async def kill(backend: str, endpoints: str, count: int) -> dict[str, object]:
    """Form a job while its store fails."""
    members = EngineMembers(backend, endpoints, count)
    async with asyncio.timeout(_LIMIT_S):
        for number in range(count // 2):
            await members.add(number)
        await members.elected.wait()
        print("half", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.monotonic()
        for number in range(count // 2, count):
            await members.add(number)
        return {"formed": await members.all_running(count) - began}


async def jobs(backend: str, endpoints: str, count: int) -> dict[str, object]:
    """Form many jobs at once."""
    # All are in one process, whose loop is late when it is busy.
    groups = [
        EngineMembers(backend, endpoints, _NODES, f"job{number}", _HEARTBEAT_S)
        for number in range(count)
    ]
    began = time.monotonic()
    async with asyncio.timeout(_LIMIT_S):
        for number in range(_NODES):
            for group in groups:
                await group.add(number)
        ends = [await group.all_running(_NODES) for group in groups]
        print(json.dumps({"prefix": f"/{os.getpid()}"}), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    return {"formed": max(ends) - began, "lost": sum(group.lost for group in groups)}


if __name__ == "__main__":
    main()
