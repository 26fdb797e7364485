"""Random members at real stores: the scenarios of the simulator in real time.

Agents come, leave, fail and lose their connections.  What must hold for every round is
checked at each instruction, and in the end the job succeeds on all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable
from random import Random

import pytest

from elastic_aio.events import Event
from elastic_aio.node_events import CoordinatorChanged
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import EndJob, Instruction, StartRound, StopRound
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import EngineSpec
from elastic_aio.store import StoreServer
from tests.support.chaos import ChaosProxy
from tests.support.fake_agent import PATIENCE_S, FakeAgent, job_spec

SEEDS = int(os.environ.get("ELASTIC_AIO_REAL_SCENARIOS", "3"))

_STEPS = 12
_AGENTS_MAX = 5


class Rounds:
    """The instructions of all agents together, and the invariants of their rounds."""

    def __init__(self) -> None:
        self.running: dict[CheckedAgent, int] = {}
        # A round is known by the leader that formed it too: when all have left, they begin anew.
        self.ranks: dict[tuple[str, int], dict[int, str]] = {}
        self.sizes: dict[tuple[str, int], tuple[int, str, int]] = {}
        self.leaders: dict[int, str] = {}
        self.violations: list[str] = []

    def on_start(self, agent: CheckedAgent, order: StartRound) -> None:
        place, number = order.placement, order.placement.round
        for other, older in self.running.items():
            if older < number:
                self.violations.append(f"{agent.name} starts {number} while {other.name}: {older}")
        self.running[agent] = number
        rank, size = place.span.group_rank, place.span.group_world_size
        key = place.formed_by, number
        if self.ranks.setdefault(key, {}).setdefault(rank, agent.name) != agent.name:
            self.violations.append(f"rank {rank} of round {number} is given twice")
        shared = (size, place.master_addr, place.master_port)
        if self.sizes.setdefault(key, shared) != shared or not 0 <= rank < size:
            self.violations.append(f"round {number} differs at {agent.name}: {place}")

    def on_leader(self, event: CoordinatorChanged) -> None:
        if self.leaders.setdefault(event.term, event.name) != event.name:
            self.violations.append(f"term {event.term} is given twice")


class CheckedAgent(FakeAgent):
    """An agent whose instructions and events are checked."""

    def __init__(self, name: str, spec: LaunchSpec, rounds: Rounds) -> None:
        self._rounds = rounds
        self.is_leaving = False
        super().__init__(name, spec)

    @property
    def is_running(self) -> bool:
        """Whether its workers run."""
        return self in self._rounds.running

    def on_instruction(self, instruction: Instruction) -> None:
        match instruction:
            case StartRound() if not self.is_leaving:
                self._rounds.on_start(self, instruction)
            case StopRound() | EndJob():
                self.end_workers()
        super().on_instruction(instruction)

    def on_event(self, event: Event) -> None:
        if isinstance(event, CoordinatorChanged):
            self._rounds.on_leader(event)
        super().on_event(event)

    def end_workers(self) -> None:
        """Take that its workers have ended."""
        self._rounds.running.pop(self, None)


class Scenario:
    """One random scenario at a store."""

    def __init__(self, seed: int, proxy: ChaosProxy, spec_of: Callable[..., LaunchSpec]) -> None:
        self.rounds = Rounds()
        self.agents: list[CheckedAgent] = []
        self._random = Random(f"members {seed}")
        self._proxy = proxy
        self._names = (f"n{number}" for number in range(1_000))
        restarts = {"max_restarts": 1_000, "heartbeat_timeout": 10.0}
        self._spec = spec_of(proxy.endpoint, f"1:{_AGENTS_MAX}", is_host=False, **restarts)

    async def run(self) -> None:
        """Inject faults, then let the job succeed."""
        for _ in range(_STEPS):
            await asyncio.sleep(self._random.choice([0.0, 0.02, 0.3, 1.0]))
            await self._fault()
            assert not self.rounds.violations
        if not self.agents:
            await self._add()
        await self._until(self._is_together)
        for agent in self.agents:
            agent.succeed()
        outcomes = [await agent.wait_ended() for agent in self.agents]
        assert {outcome.state for outcome in outcomes} == {JobState.SUCCEEDED}
        assert not self.rounds.violations

    async def aclose(self) -> None:
        """Let all agents leave."""
        await asyncio.gather(*(self._leave(agent) for agent in list(self.agents)))

    async def _fault(self) -> None:
        running = [agent for agent in self.agents if agent.is_running]
        match self._random.randrange(5):
            case 0 | 1 if len(self.agents) < _AGENTS_MAX:
                await self._add()
            case 2 if self.agents:
                await self._leave(self._random.choice(self.agents))
            case 3 if running:
                agent = self._random.choice(running)
                agent.end_workers()
                agent.fail()
            case _:
                self._proxy.reset()

    async def _add(self) -> None:
        agent = CheckedAgent(next(self._names), self._spec, self.rounds)
        self.agents.append(agent)
        await agent.rendezvous.open()

    async def _leave(self, agent: CheckedAgent) -> None:
        self.agents.remove(agent)
        agent.is_leaving = True  # it starts no workers any more
        agent.end_workers()
        await agent.rendezvous.leave("the scenario ends it")
        agent.close()

    def _is_together(self) -> bool:
        rounds = {self.rounds.running.get(agent, -1) for agent in self.agents}
        sizes = {agent.place.span.group_world_size for agent in self.agents if agent.started}
        return len(rounds) == 1 and -1 not in rounds and sizes == {len(self.agents)}

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def store_endpoint(request: pytest.FixtureRequest, backend: str) -> AsyncIterator[str]:
    """Serve a store, or return the endpoint of an engine that the tests share."""
    if backend != "c10d":
        yield str(request.getfixturevalue(f"{backend}_endpoint"))
        return
    async with StoreServer("127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "c10d",
        pytest.param("etcd", marks=pytest.mark.engine),
        pytest.param("redis", marks=pytest.mark.engine),
    ],
)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_random_members(request: pytest.FixtureRequest, seed: int, backend: str) -> None:
    def spec_of(endpoint: str, nnodes: str, *, is_host: bool, **settings: object) -> LaunchSpec:
        if backend == "c10d":
            return job_spec(endpoint, nnodes, is_host=is_host, **settings)  # type: ignore[arg-type]
        engine = EngineSpec(key_prefix=f"/{uuid.uuid4().hex}")
        return job_spec(endpoint, nnodes, backend=backend, engine=engine, **settings)  # type: ignore[arg-type]

    async with store_endpoint(request, backend) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        async with ChaosProxy(port) as proxy:
            scenario = Scenario(seed, proxy, spec_of)
            try:
                await scenario.run()
            finally:
                await scenario.aclose()
