"""A rendezvous that the test itself plays, and an agent that takes part in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from elastic_aio import Agent, Event, LaunchSpec, LogSpec, StopPlan
from elastic_aio.outcome import ExitStatus, Failure, WorkerError
from elastic_aio.ranks import NodeSize, assign_spans
from elastic_aio.rendezvous.base import (
    Begin,
    Cause,
    Instruction,
    Listener,
    NodeCard,
    Placement,
    Rendezvous,
    Report,
)
from elastic_aio.rendezvousspec import RendezvousSpec
from tests.support.children import DEADLINE_S

R = TypeVar("R")

HERE = "127.0.0.1"


class Scripted(Rendezvous):
    """Does nothing by itself; keeps what it is told, and who left why."""

    def __init__(self, spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener) -> None:
        self.spec = spec
        self.card = card
        self.run_id = run_id
        self.listener = listener
        self.is_open = False
        self.reports: list[Report] = []
        self.left: list[str] = []
        self.open_error: Exception | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.on_report: Callable[[Report], None] = lambda report: None
        self.on_leave: Callable[[], None] = lambda: None
        self.may_open = asyncio.Event()
        self.may_leave = asyncio.Event()
        self.may_open.set()
        self.may_leave.set()
        self._changed = asyncio.Event()

    async def open(self) -> None:
        await self.may_open.wait()
        if self.open_error is not None:
            raise self.open_error
        self.is_open = True
        self.on_open()

    def report(self, report: Report) -> None:
        self.reports.append(report)
        self.on_report(report)
        self._changed.set()

    async def leave(self, why: str) -> None:
        self.left.append(why)
        self.on_leave()
        self._changed.set()
        await self.may_leave.wait()

    def instruct(self, instruction: Instruction) -> None:
        """Let the agent hear an instruction."""
        self.listener.instructed(instruction)

    def begin(self, number: int, cause: Cause | None = None, **where: Any) -> Placement:
        """Let a round begin; return the node's place in it."""
        placement = self.placed(number, **where)
        self.instruct(Begin(placement, cause))
        return placement

    def placed(
        self, number: int, *, group_rank: int = 0, nodes: int = 2, restarts: int = 0, port: int = 9
    ) -> Placement:
        """Return this node's place among others of its size."""
        spans = assign_spans([NodeSize(self.card.role, self.card.nproc)] * nodes)
        return Placement(
            round=number,
            origin="1.a",
            attempt=number,
            restarts=restarts,
            changes=4,
            span=spans[group_rank],
            master_addr=HERE,
            master_port=port,
        )

    async def reported(self, kind: type[R], count: int = 1) -> R:
        """Wait until the agent has made `count` reports of a kind; return the last of them."""
        return cast("R", (await self._until(lambda: self._of(kind), count))[count - 1])

    async def has_been_left(self, times: int = 1) -> None:
        """Wait until the agent leaves, or has asked so many times to leave."""
        await self._until(lambda: self.left, times)

    def _of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.reports if isinstance(one, kind)]

    async def _until(self, found: Callable[[], list[Any]], count: int) -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            while len(found()) < count:
                self._changed.clear()
                await self._changed.wait()
        return found()


def node_spec(folder: Path, entrypoint: Any, nproc: int = 2, **options: Any) -> LaunchSpec:
    """Return a job of up to four nodes whose workers make their notes in `folder`."""
    barrier = options.pop("barrier", 600.0)
    return LaunchSpec(
        entrypoint,
        **{
            "nproc_per_node": nproc,
            "nnodes": "1:4",
            "run_id": "shared",
            "env": {"NOTES": str(folder)},
            "stop": StopPlan.within(5),
            "logs": LogSpec(log_dir=folder / "logs", redirects=3),
            "rendezvous": RendezvousSpec(exit_barrier_timeout=barrier),
            **options,
        },
    )


class Member:
    """An agent, its scripted rendezvous, and the events that it has told."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.events: list[Event] = []
        self.rendezvous: Scripted = cast("Scripted", None)
        self.prepare: Callable[[Scripted], None] = lambda rendezvous: None
        self.agent = Agent(spec, listeners=[self.events.append], rendezvous=self._make)

    def _make(
        self, spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener
    ) -> Rendezvous:
        self.rendezvous = Scripted(spec, card, run_id, listener)
        self.prepare(self.rendezvous)
        return self.rendezvous

    def told(self, kind: type[R]) -> list[R]:
        """Return the events of a kind."""
        return [one for one in self.events if isinstance(one, kind)]


@asynccontextmanager
async def member(
    spec: LaunchSpec, prepare: Callable[[Scripted], None] = lambda rendezvous: None
) -> AsyncIterator[Member]:
    """Give a node of a job of many; at the end of the block it is stopped."""
    one = Member(spec)
    one.prepare = prepare
    async with one.agent:
        yield one


def failure_elsewhere(*, code: int = 9, traceback: str = "") -> Failure:
    """Return a failure that another node has seen."""
    error = WorkerError("ValueError: there", traceback, 5.0, "/there") if traceback else None
    return Failure(
        rank=3,
        local_rank=1,
        pid=4242,
        host="elsewhere",
        status=ExitStatus(code=code),
        time=5.0,
        order=0,
        error=error,
    )
