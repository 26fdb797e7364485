"""A rendezvous that is driven by the test, and an agent that takes part in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from elastic_aio import Event, LaunchSpec, LogSpec, StopPlan
from elastic_aio.agent.agent import make_agent
from elastic_aio.outcome import ExitStatus, Failure, WorkerError
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.rendezvous.base import (
    AgentPort,
    Instruction,
    NodeInfo,
    Placement,
    Rendezvous,
    Report,
    RestartCause,
    StartRound,
)
from elastic_aio.spec.rendezvous import RendezvousSpec
from tests.support.children import DEADLINE_S

R = TypeVar("R")

HERE = "127.0.0.1"


class FakeRendezvous(Rendezvous):
    """Gives the instructions of the test; records reports and the reasons of `leave`."""

    def __init__(self, spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort) -> None:
        self.spec = spec
        self.node = node
        self.run_id = run_id
        self.agent = agent
        self.is_open = False
        self.reports: list[Report] = []
        self.leave_reasons: list[str] = []
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
        self.leave_reasons.append(why)
        self.on_leave()
        self._changed.set()
        await self.may_leave.wait()

    def instruct(self, instruction: Instruction) -> None:
        """Give the agent an instruction."""
        self.agent.on_instruction(instruction)

    def start_round(
        self, number: int, cause: RestartCause | None = None, **where: Any
    ) -> Placement:
        """Start a round; return the node's placement in it."""
        placement = self.make_placement(number, **where)
        self.instruct(StartRound(placement, cause))
        return placement

    def make_placement(
        self, number: int, *, group_rank: int = 0, nodes: int = 2, restarts: int = 0, port: int = 9
    ) -> Placement:
        """Return a placement of this node among others of its size."""
        spans = assign_node_ranks([NodeSize(self.node.role, self.node.nproc)] * nodes)
        return Placement(
            round=number,
            formed_by="1.a",
            attempt=number,
            restarts=restarts,
            changes=4,
            span=spans[group_rank],
            master_addr=HERE,
            master_port=port,
        )

    async def wait_report(self, kind: type[R], count: int = 1) -> R:
        """Wait until the agent has made `count` reports of a kind; return the last of them."""
        return cast("R", (await self._until(lambda: self._of(kind), count))[count - 1])

    async def wait_left(self, times: int = 1) -> None:
        """Wait until the agent leaves, or has asked to leave `times` times."""
        await self._until(lambda: self.leave_reasons, times)

    def _of(self, kind: type[Any]) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    async def _until(self, items: Callable[[], list[Any]], count: int) -> list[Any]:
        async with asyncio.timeout(DEADLINE_S):
            while len(items()) < count:
                self._changed.clear()
                await self._changed.wait()
        return items()


def node_spec(directory: Path, entrypoint: Any, nproc: int = 2, **options: Any) -> LaunchSpec:
    """Return a job of up to four nodes whose workers write notes into `directory`."""
    barrier = options.pop("barrier", 600.0)
    return LaunchSpec(
        entrypoint,
        **{
            "nproc_per_node": nproc,
            "nnodes": "1:4",
            "run_id": "shared",
            "env": {"NOTES": str(directory)},
            "stop": StopPlan.within(5),
            "logs": LogSpec(log_dir=directory / "logs", redirects=3),
            "rendezvous": RendezvousSpec(exit_barrier_timeout=barrier),
            **options,
        },
    )


class Member:
    """An agent, its fake rendezvous, and its events."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.events: list[Event] = []
        self.rendezvous: FakeRendezvous = cast("FakeRendezvous", None)
        self.prepare: Callable[[FakeRendezvous], None] = lambda rendezvous: None
        self.agent = make_agent(spec, listeners=[self.events.append], rendezvous=self._make)

    def _make(self, spec: LaunchSpec, node: NodeInfo, run_id: str, agent: AgentPort) -> Rendezvous:
        self.rendezvous = FakeRendezvous(spec, node, run_id, agent)
        self.prepare(self.rendezvous)
        return self.rendezvous

    def events_of(self, kind: type[R]) -> list[R]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def member(
    spec: LaunchSpec, prepare: Callable[[FakeRendezvous], None] = lambda rendezvous: None
) -> AsyncIterator[Member]:
    """Run a node of a job of many; at the end of the block it is stopped."""
    node = Member(spec)
    node.prepare = prepare
    async with node.agent:
        yield node


def failure_elsewhere(*, code: int = 9, traceback: str = "") -> Failure:
    """Return a failure that another node has reported."""
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
