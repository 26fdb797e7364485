"""Very many members of one rendezvous, without workers: `python -m benchmarks.workers.members WAY`.

`ours COUNT` runs all members but one in this process, the first of which serves the
store, and one in a process of its own, which is killed once the group has formed.
Prints one line of JSON: seconds until all had `formed` the group, seconds until those
left had `reformed` it, and what each connection to the store has carried meanwhile
(messages to the store and from it, bytes to it and from it).

`one ENDPOINT COUNT` is that one member, once a line comes on its standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from contextlib import suppress

from benchmarks.agents import LOOPBACK, free_ports
from benchmarks.sockets import Traffic, traffic_of
from elastic_aio.events import CoordinatorChanged, Event
from elastic_aio.outcome import Failure
from elastic_aio.policy import Action
from elastic_aio.ranks import Span
from elastic_aio.rendezvous.base import (
    Begin,
    Conclude,
    Ended,
    Halt,
    Instruction,
    NodeCard,
    Rendezvous,
    Report,
    Running,
)
from elastic_aio.rendezvous.dynamic import make_dynamic
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.spec import LaunchSpec

_RUN_ID = "members"
_PORT = 29500
_LIMIT_S = 120.0
# So long that nobody beats while others are counted.
_HEARTBEAT_S = 60.0
_QUIET_S = 0.3


def main() -> None:
    """Do what the command line says."""
    match sys.argv[1:]:
        case ["ours", count]:
            _raise_limit()
            asyncio.run(ours(int(count)))
        case ["one", endpoint, count]:
            asyncio.run(one(endpoint, int(count)))
        case other:
            raise SystemExit(f"unknown way: {other}")


async def ours(count: int) -> None:
    """Form a group of `count`, lose one member, and form it again."""
    port = free_ports(1)[0]
    endpoint = f"{LOOPBACK}:{port}"
    crowd = Crowd()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.workers.members", "one", endpoint, str(count)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            await child.stdout.readline()
            began = time.monotonic()
            await crowd.join(0, endpoint, count)
            await crowd.elected.wait()  # the one that is killed shall not coordinate
            child.stdin.write(b"\n")
            for number in range(1, count - 1):
                await crowd.join(number, endpoint, count)
            formed = await crowd.all_begun(count) - began
            await child.stdout.readline()
            forming = await settled_traffic(port)
            began = time.monotonic()
            child.kill()
            reformed = await crowd.all_begun(count - 1) - began
            both = await settled_traffic(port)
    finally:
        with suppress(ProcessLookupError):
            child.kill()
    # The lost member's connection is not counted any more.
    lost = forming.per_connection
    figures = {
        "formed": formed,
        "reformed": reformed,
        "forming": lost,
        "reforming": [
            (after - before) / (count - 1) + mine / (count - 1)
            for after, before, mine in zip(both[1:], forming[1:], lost, strict=True)
        ],
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # a thousand farewells are not measured


async def settled_traffic(port: int) -> Traffic:
    """Count what has been carried once nothing more is."""
    while True:
        before = await asyncio.to_thread(traffic_of, port)
        await asyncio.sleep(_QUIET_S)
        if before == await asyncio.to_thread(traffic_of, port):
            return before


async def one(endpoint: str, count: int) -> None:
    """Be one member, until we are killed."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    crowd = Crowd()
    await crowd.join(count - 1, endpoint, count)
    await crowd.all_begun(count, of=1)
    print("begun", flush=True)
    await asyncio.sleep(_LIMIT_S)


class Crowd:
    """The members of this process."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.elected = asyncio.Event()
        self._changed = asyncio.Event()
        self._last = 0.0

    async def join(self, number: int, endpoint: str, count: int) -> None:
        """Let one more member take part, in a group of `count` or one less."""
        spec = LaunchSpec(
            ["true"],
            nnodes=(max(count - 1, 1), count),
            rendezvous=RendezvousSpec(
                endpoint=endpoint,
                is_host=None if number == 0 else False,
                heartbeat_timeout=_HEARTBEAT_S,
                last_call_timeout=_LIMIT_S,
            ),
        )
        member = Member(self)
        card = NodeCard(name=f"host{number}", pid=number, nproc=1, role="default")
        member.rendezvous = make_dynamic(spec, card, _RUN_ID, member)
        self.members.append(member)
        await member.rendezvous.open()

    def begun(self) -> None:
        """A member has begun a round."""
        self._last = time.monotonic()
        self._changed.set()

    async def all_begun(self, size: int, of: int = 0) -> float:
        """Wait until all members run in a world of `size`; return when the last began.

        Args:
            size: of the world.
            of: how many of its members are here; 0: `size`, or all but one.
        """
        of = of or len(self.members)
        while True:
            spans = [member.span for member in self.members if member.span]
            ranks = {span.group_rank for span in spans if span.world_size == size}
            if len(ranks) >= of:
                return self._last
            self._changed.clear()
            await self._changed.wait()


class Member:
    """An agent whose workers run for ever, and stop at once."""

    rendezvous: Rendezvous

    def __init__(self, crowd: Crowd) -> None:
        self.span: Span | None = None
        self._crowd = crowd

    def instructed(self, instruction: Instruction) -> None:
        """Do as told."""
        match instruction:
            case Begin(placement):
                self.span = placement.span
                self._report(Running(placement.round))
                self._crowd.begun()
            case Halt(number):
                self._report(Ended(number))
            case Conclude(ending):
                print(f"the job has ended: {ending.why}", file=sys.stderr, flush=True)
                os._exit(1)

    def told(self, event: Event) -> None:
        """Note when somebody coordinates."""
        if isinstance(event, CoordinatorChanged):
            self._crowd.elected.set()

    async def decide(self, failure: Failure) -> Action:
        """Nothing fails."""
        return Action.BY_POLICY

    def reserve_master(self, address: str) -> int:
        """No worker will look there."""
        return _PORT

    def _report(self, report: Report) -> None:
        asyncio.get_running_loop().call_soon(self.rendezvous.report, report)


def _raise_limit() -> None:
    """Allow as many open files as the system does: each member needs a few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
