"""Fake agents: members of a rendezvous without workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from elastic_aio.events import Event
from elastic_aio.node_events import CoordinatorChanged
from elastic_aio.outcome import Failure, JobOutcome
from elastic_aio.rendezvous.base import (
    EndJob,
    Instruction,
    NodeInfo,
    Placement,
    Rendezvous,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
)
from elastic_aio.rendezvous.dynamic import DynamicRendezvous
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartAction
from tests.support.coordinator_harness import failure
from tests.support.restarts import AT_ONCE

E = TypeVar("E")

PATIENCE_S = 30.0
Maker = Callable[[LaunchSpec, NodeInfo, str, Any], Rendezvous]


def free_endpoint(host: str = "127.0.0.1") -> str:
    """Return an endpoint at which no process listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{one.getsockname()[1]}"


def job_spec(
    endpoint: str, nnodes: str = "1:4", *, max_restarts: int = 0, **settings: Any
) -> LaunchSpec:
    """Return a job that meets at `endpoint`."""
    settings = {
        "heartbeat_timeout": 2.0,
        "last_call_timeout": 0.2,
        "scale_up_delay": 0.0,
        "read_timeout": 5.0,
        **settings,
    }
    return LaunchSpec(
        ["true"],
        nnodes=nnodes,
        max_restarts=max_restarts,
        restart=settings.pop("restart", AT_ONCE),
        rendezvous=RendezvousSpec(endpoint=endpoint, **settings),
    )


class FakeAgent:
    """An agent without workers: records instructions, and reports at once."""

    def __init__(
        self,
        name: str,
        spec: LaunchSpec,
        *,
        nproc: int = 1,
        role: str = "default",
        make: Maker = DynamicRendezvous,
        run_id: str = "run",
    ) -> None:
        self.name = name
        self.events: list[Event] = []
        self.started: list[Placement] = []
        self.causes: list[Any] = []
        self.stopped: list[StopRound] = []
        self.outcome: JobOutcome | None = None
        self.stops_on_order = True
        self.decision_requests: list[Failure] = []
        self.answer: RestartAction = RestartAction.DEFAULT
        self._changed = asyncio.Event()
        self._reserved: socket.socket | None = None
        self._used: list[socket.socket] = []
        self.rendezvous = make(spec, NodeInfo(name, 1000, nproc, role), run_id, self)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.started[-1:]}, {self.outcome}>"

    # What a rendezvous calls.

    def on_instruction(self, instruction: Instruction) -> None:
        match instruction:
            case StartRound(placement, cause):
                self.started.append(placement)
                self.causes.append(cause)
                if placement.span.group_rank == 0 and self._reserved is not None:
                    self._used.append(self._reserved)
                    self._reserved = None
                self.rendezvous.report(RoundStarted(placement.round))
            case StopRound(round):
                self.stopped.append(instruction)
                if self.stops_on_order:
                    self.rendezvous.report(RoundStopped(round))
            case EndJob(outcome):
                assert self.outcome is None, "a job ends once"
                self.outcome = outcome
        self._changed.set()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def decide(self, failure: Failure) -> RestartAction:
        self.decision_requests.append(failure)
        return self.answer

    async def check_health(self) -> str:
        return ""

    def reserve_master_port(self, address: str) -> int:
        if self._reserved is None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._reserved = socket.socket(family)
            self._reserved.bind((address, 0))
            self._reserved.listen()
        port: int = self._reserved.getsockname()[1]
        return port

    # What a test asks for.

    @property
    def place(self) -> Placement:
        return self.started[-1]

    @property
    def is_reachable(self) -> bool:
        """Whether a process listens at the master port of the present round."""
        at = (self.place.master_addr, self.place.master_port)
        with contextlib.suppress(OSError), socket.create_connection(at, timeout=5):
            return True
        return False

    def fail(self, *, code: int = 3, final: bool = False, time: float = 0.0) -> None:
        """Let a worker of the present round fail at `time`, and all others stop at once."""
        round = self.place.round
        self.rendezvous.report(RoundFailing(round, "a worker failed"))
        self.rendezvous.report(
            RoundStopped(
                round,
                (failure(code, time, rank=self.place.span.first_rank, host=self.name),),
                is_permanent=final,
                permanent_reason="it can never work" if final else "",
                exit_code=code,
            )
        )

    def succeed(self) -> None:
        self.rendezvous.report(RoundSucceeded(self.place.round))

    async def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; it is checked after every instruction and event."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_formed(self, nodes: int, *, after: int = -1) -> Placement:
        """Wait for a placement in a round of so many nodes, later than round `after`."""
        await self.wait_until(
            lambda: (
                self.started
                and self.place.span.group_world_size == nodes
                and self.place.round > after
            )
        )
        return self.place

    async def wait_ended(self) -> JobOutcome:
        await self.wait_until(lambda: self.outcome)
        assert self.outcome is not None
        return self.outcome

    async def wait_event(self, kind: type[E]) -> E:
        """Wait for an event of a kind; return the last one."""
        await self.wait_until(lambda: any(isinstance(one, kind) for one in self.events))
        return [one for one in self.events if isinstance(one, kind)][-1]

    def close(self) -> None:
        for sock in [*self._used, *([self._reserved] if self._reserved else [])]:
            sock.close()


@contextlib.asynccontextmanager
async def present(*members: FakeAgent) -> AsyncIterator[list[FakeAgent]]:
    """Open members, the host of the store first; all leave at the end."""
    there = list(members)
    try:
        for member in members:
            await member.rendezvous.open()
            if member is members[0] and len(members) > 1:
                # So that it is known who serves the store.
                await member.wait_event(CoordinatorChanged)
        yield there
    finally:
        await asyncio.gather(*(member.rendezvous.leave("the test is over") for member in there))
        for member in there:
            member.close()


async def all_formed(*members: FakeAgent) -> None:
    """Wait until members have places in a round of as many."""
    for member in members:
        await member.wait_formed(len(members))
