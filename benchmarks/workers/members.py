"""Many members of one rendezvous, without workers: `python -m benchmarks.workers.members WAY`.

`ours COUNT PROCESSES` spreads the members over processes; this one has the member that serves
the store.  One member has a process of its own, which is killed once the group has formed.
Prints one line of JSON: seconds until all had `formed` the group, seconds until the others had
`reformed` it, and what each connection to the store has carried meanwhile (messages to the
store and from it, bytes to it and from it).

`share ENDPOINT FIRST LAST COUNT` is the members FIRST to LAST, once a line comes on its standard
input.  It prints when the last of them has started, for the first round and for the next.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import sys
import time
from contextlib import suppress
from typing import Self

from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.events import Event
from elastic_aio.node_events import CoordinatorChanged
from elastic_aio.outcome import Failure
from elastic_aio.ranks import NodeRanks
from elastic_aio.rendezvous.base import (
    EndJob,
    Instruction,
    NodeInfo,
    Rendezvous,
    Report,
    RoundStarted,
    RoundStopped,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.dynamic import DynamicRendezvous
from elastic_aio.sockets import Address
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartAction
from tests.support.sockets import LOOPBACK, Traffic, free_port, traffic_of

_RUN_ID = "members"
_PORT = 29500
_LIMIT_S = 120.0
# So long that no heartbeat is due while traffic is counted.
_HEARTBEAT_S = 300.0
_QUIET_S = 0.3


def main() -> None:
    """Run in the way of the command line."""
    match sys.argv[1:]:
        case ["ours", count, processes]:
            raise_limit()
            asyncio.run(ours(int(count), int(processes)))
        case ["share", endpoint, first, last, count]:
            raise_limit()
            asyncio.run(share(endpoint, int(first), int(last), int(count)))
        case other:
            raise SystemExit(f"unknown way: {other}")


async def ours(count: int, processes: int) -> None:
    """Form a group of `count`, lose one member, and form it again."""
    port = free_port()
    endpoint = f"{LOOPBACK}:{port}"
    members = Members()
    bounds = [(count - 1) * part // processes for part in range(processes + 1)]
    ranges = [*itertools.pairwise(bounds[1:]), (count - 1, count)]
    shares = [await Share.start(endpoint, first, last, count) for first, last in ranges]
    lost = shares[-1]
    try:
        async with asyncio.timeout(_LIMIT_S):
            began = time.monotonic()
            await members.join(0, endpoint, count)
            await members.elected.wait()  # the member that is killed must not be the coordinator
            for one in shares:
                one.begin()
            for number in range(1, bounds[1]):
                await members.join(number, endpoint, count)
            begun = [await members.all_running(count), *[await one.begun() for one in shares]]
            formed = max(begun) - began
            forming = await settled_traffic(port)
            began = time.monotonic()
            lost.process.kill()
            begun = [await members.all_running(count - 1)]
            begun += [await one.begun() for one in shares[:-1]]
            reformed = max(begun) - began
            both = await settled_traffic(port)
    finally:
        for one in shares:
            with suppress(ProcessLookupError):
                one.process.kill()
    # The connection of the lost member is not counted any more.
    carried = forming.per_connection
    figures = {
        "formed": formed,
        "reformed": reformed,
        "forming": carried,
        "reforming": [
            (after - before) / (count - 1) + own / (count - 1)
            for after, before, own in zip(both[1:], forming[1:], carried, strict=True)
        ],
    }
    print(json.dumps(figures), flush=True)
    os._exit(0)  # that a thousand members leave is not measured


async def settled_traffic(port: int) -> Traffic:
    """Wait until there is no more traffic; return what has been carried."""
    while True:
        before = await asyncio.to_thread(traffic_of, port)
        await asyncio.sleep(_QUIET_S)
        if before == await asyncio.to_thread(traffic_of, port):
            return before


async def share(endpoint: str, first: int, last: int, count: int) -> None:
    """Run the members from `first` to `last`, until this process is killed."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    members = Members()
    for number in range(first, last):
        await members.join(number, endpoint, count)
    print(await members.all_running(count), flush=True)
    print(await members.all_running(count - 1), flush=True)
    await asyncio.sleep(_LIMIT_S)


class Share:
    """The members of another process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def start(cls, endpoint: str, first: int, last: int, count: int) -> Self:
        """Return the process once it waits for `begin`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.workers.members", "share", endpoint),
            *map(str, (first, last, count)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        one = cls(process)
        await one._stdout.readline()
        return one

    def begin(self) -> None:
        """Let the members join."""
        self._stdin.write(b"\n")

    async def begun(self) -> float:
        """Wait until all run in the next round; return when the last started."""
        return float(await self._stdout.readline())


class Members:
    """The members of this process."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.elected = asyncio.Event()
        self._changed = asyncio.Event()
        self._last = 0.0

    async def join(self, number: int, endpoint: str, count: int) -> None:
        """Add a member to a group of `count` or one less."""
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
        node = NodeInfo(name=f"host{number}", pid=number, nproc=1, role="default")
        network = OtherHost() if number else None
        member.rendezvous = DynamicRendezvous(spec, node, _RUN_ID, member, network)
        self.members.append(member)
        await member.rendezvous.open()

    def on_start(self) -> None:
        """Note that a member has started a round."""
        self._last = time.monotonic()
        self._changed.set()

    async def all_running(self, size: int) -> float:
        """Wait until all members run in a world of `size`; return when the last started."""
        while True:
            spans = [member.span for member in self.members if member.span]
            ranks = {span.group_rank for span in spans if span.world_size == size}
            if len(ranks) == len(self.members):
                return self._last
            self._changed.clear()
            await self._changed.wait()


class OtherHost(StoreNetwork):
    """The network of a host that does not have the store's address."""

    def is_local(self, address: Address) -> bool:
        """Return False."""
        return False


class Member:
    """An agent whose workers never end by themselves and stop at once."""

    rendezvous: Rendezvous

    def __init__(self, members: Members) -> None:
        self.span: NodeRanks | None = None
        self._members = members

    def on_instruction(self, instruction: Instruction) -> None:
        """Report the effect at once."""
        match instruction:
            case StartRound(placement):
                self.span = placement.span
                self._report(RoundStarted(placement.round))
                self._members.on_start()
            case StopRound(number):
                self._report(RoundStopped(number))
            case EndJob(outcome):
                print(f"the job has ended: {outcome.why}", file=sys.stderr, flush=True)
                os._exit(1)

    def on_event(self, event: Event) -> None:
        """Note that a coordinator is elected."""
        if isinstance(event, CoordinatorChanged):
            self._members.elected.set()

    async def decide(self, failure: Failure) -> RestartAction:
        """Return the default: no worker fails."""
        return RestartAction.DEFAULT

    async def check_health(self) -> str:
        """Return that the host is healthy."""
        return ""

    def reserve_master_port(self, address: str) -> int:
        """Return any port: no worker will connect to it."""
        return _PORT

    def _report(self, report: Report) -> None:
        asyncio.get_running_loop().call_soon(self.rendezvous.report, report)


def raise_limit() -> None:
    """Raise the limit of open files: each member needs a few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
