"""Members of a rendezvous without workers: what they are told is kept, their part is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from elastic_aio.events import CoordinatorChanged, Event
from elastic_aio.outcome import ExitStatus, Failure
from elastic_aio.policy import Action
from elastic_aio.rendezvous.base import (
    Begin,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Instruction,
    NodeCard,
    Placement,
    Rendezvous,
    Running,
    Succeeded,
)
from elastic_aio.rendezvous.dynamic import make_dynamic
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.spec import LaunchSpec

E = TypeVar("E")

PATIENCE_S = 30.0
Maker = Callable[[LaunchSpec, NodeCard, str, Any], Rendezvous]


def free_endpoint(host: str = "127.0.0.1") -> str:
    """Return an endpoint at which nobody listens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return f"{shown}:{one.getsockname()[1]}"


def meeting(
    endpoint: str, nnodes: str = "1:4", *, max_restarts: int = 0, **settings: Any
) -> LaunchSpec:
    """Return a job that meets at `endpoint`."""
    settings = {"heartbeat_timeout": 2.0, "last_call_timeout": 0.2, "read_timeout": 5.0, **settings}
    rules = {key: settings.pop(key) for key in ("restart",) if key in settings}
    return LaunchSpec(
        ["true"],
        nnodes=nnodes,
        max_restarts=max_restarts,
        rendezvous=RendezvousSpec(endpoint=endpoint, **settings),
        **rules,
    )


def failure(rank: int = 0, *, code: int = 3, host: str = "here", time: float = 0.0) -> Failure:
    """Return a failure of a worker."""
    return Failure(
        rank=rank,
        local_rank=0,
        pid=1,
        host=host,
        status=ExitStatus(code=code),
        time=time,
        order=0,
    )


class Pretender:
    """An agent without workers: it begins and halts as it is told."""

    def __init__(
        self,
        name: str,
        spec: LaunchSpec,
        *,
        nproc: int = 1,
        role: str = "default",
        make: Maker = make_dynamic,
    ) -> None:
        self.name = name
        self.told_events: list[Event] = []
        self.begun: list[Placement] = []
        self.causes: list[Any] = []
        self.halted: list[Halt] = []
        self.ending: Ending | None = None
        self.obeys_halt = True
        self.asked: list[Failure] = []
        self.answer: Action = Action.BY_POLICY
        self._changed = asyncio.Event()
        self._reserved: socket.socket | None = None
        self._used: list[socket.socket] = []
        self.rendezvous = make(spec, NodeCard(name, 1000, nproc, role), "run", self)

    def __repr__(self) -> str:
        return f"<{self.name}: {self.begun[-1:]}, {self.ending}>"

    # What a rendezvous calls.

    def instructed(self, instruction: Instruction) -> None:
        match instruction:
            case Begin(placement, cause):
                self.begun.append(placement)
                self.causes.append(cause)
                if placement.span.group_rank == 0 and self._reserved is not None:
                    self._used.append(self._reserved)
                    self._reserved = None
                self.rendezvous.report(Running(placement.round))
            case Halt(round):
                self.halted.append(instruction)
                if self.obeys_halt:
                    self.rendezvous.report(Ended(round))
            case Conclude(ending):
                assert self.ending is None, "a job ends once"
                self.ending = ending
        self._changed.set()

    def told(self, event: Event) -> None:
        self.told_events.append(event)
        self._changed.set()

    async def decide(self, failure: Failure) -> Action:
        self.asked.append(failure)
        return self.answer

    def reserve_master(self, address: str) -> int:
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
        return self.begun[-1]

    @property
    def is_reachable(self) -> bool:
        """Whether somebody listens where the workers of the present round meet."""
        at = (self.place.master_addr, self.place.master_port)
        with contextlib.suppress(OSError), socket.create_connection(at, timeout=5):
            return True
        return False

    def fails(self, *, code: int = 3, final: bool = False) -> None:
        """Let a worker of the present round fail, and all of it be gone at once."""
        round = self.place.round
        self.rendezvous.report(Failing(round, "a worker failed"))
        self.rendezvous.report(
            Ended(
                round,
                (failure(self.place.span.first_rank, code=code, host=self.name),),
                is_final=final,
                final_why="it can never work" if final else "",
                exit_code=code,
            )
        )

    def succeeds(self) -> None:
        self.rendezvous.report(Succeeded(self.place.round))

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so; it is looked at whenever this member is told something."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def formed(self, nodes: int, *, after: int = -1) -> Placement:
        """Wait for a place in a round of so many nodes, later than round `after`."""
        await self.until(
            lambda: (
                self.begun
                and self.place.span.group_world_size == nodes
                and self.place.round > after
            )
        )
        return self.place

    async def ended(self) -> Ending:
        await self.until(lambda: self.ending)
        assert self.ending is not None
        return self.ending

    async def hears(self, kind: type[E]) -> E:
        """Wait for an event of a kind; return the last one."""
        await self.until(lambda: any(isinstance(one, kind) for one in self.told_events))
        return [one for one in self.told_events if isinstance(one, kind)][-1]

    def close(self) -> None:
        for sock in [*self._used, *([self._reserved] if self._reserved else [])]:
            sock.close()


@contextlib.asynccontextmanager
async def present(*members: Pretender) -> AsyncIterator[list[Pretender]]:
    """Open members, the one that serves the store first; let all leave in the end."""
    there = list(members)
    try:
        for member in members:
            await member.rendezvous.open()
            if member is members[0] and len(members) > 1:
                # So that it is known who serves the store.
                await member.hears(CoordinatorChanged)
        yield there
    finally:
        await asyncio.gather(*(member.rendezvous.leave("the test is over") for member in there))
        for member in there:
            member.close()
