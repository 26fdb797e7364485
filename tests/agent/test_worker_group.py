"""The workers of one attempt: order of starting, a failed start, an abandoned start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.errors import SpawnError
from elastic_aio.events import Event, WorkerExited, WorkerStarted
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.children import Child, ChildExit, ChildSpec, command_spawner
from elastic_aio.ranks import NodeSize, assign_node_ranks
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.logs import LogSpec
from elastic_aio.spec.stop import StopPlan
from tests.support.children import listed_sessions

pytestmark = pytest.mark.both_loops

GUARD = 30.0
KILL = StopPlan(())


class Bench:
    """A group of four workers, and the order in which things happened to it."""

    def __init__(self, *script: str) -> None:
        self.history: list[str] = []
        self.exits: asyncio.Queue[tuple[int, ExitStatus]] = asyncio.Queue()
        self.abandon_at = -1
        self.fail_at = -1
        self._spawn = command_spawner(asyncio.get_running_loop())
        self.runtime = LocalRuntime(
            LaunchSpec(["sh", "-c", *script], nproc_per_node=4, logs=LogSpec(redirects="3")),
            run_id="r",
            host="h",
            nproc=4,
            spawner=self.spawn,
            publish=self._on_event,
        )
        self.tasks: list[asyncio.Task[object]] = []

    async def open(self) -> None:
        await self.runtime.open()
        self.history.clear()  # of the guardian's start
        ranks = assign_node_ranks([NodeSize("default", 4)])[0].worker_ranks(4)
        self.group = WorkerGroup(self.runtime, ranks, on_exit=self._on_exit)

    async def spawn(self, plan: ChildSpec) -> Child:
        local_rank = plan.env.get("LOCAL_RANK", "guardian")
        os.fstat(plan.stdout)
        self.history.append(f"spawn {local_rank}")
        if local_rank == str(self.fail_at):
            raise SpawnError("command not found", permanent=True, exit_code=127)
        return await self._spawn(plan)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            assert self.runtime.job is not None
            listed = listed_sessions(self.runtime.job)
            assert event.pid in listed, "a child is guarded before anything else happens"
            self.history.append(f"started {event.local_rank}")
            if event.local_rank == self.abandon_at:
                self.tasks.append(asyncio.create_task(self.group.stop_processes(KILL)))
        elif isinstance(event, WorkerExited):
            self.history.append(f"exited {event.local_rank}")

    def _on_exit(self, local_rank: int, ended: ChildExit) -> None:
        assert self.history[-1] == f"exited {local_rank}", "the event comes first"
        assert self.group.records[local_rank].exit == ended
        self.exits.put_nowait((local_rank, ended.status))

    async def collect_exits(self, count: int) -> dict[int, ExitStatus]:
        async with asyncio.timeout(GUARD):
            return dict([await self.exits.get() for _ in range(count)])

    async def aclose(self) -> None:
        await self.group.stop(KILL)
        await self.runtime.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Workers that sleep."""
    bench = Bench("sleep 99")
    await bench.open()
    yield bench
    await bench.aclose()


async def test_all_start_in_order_and_every_exit_is_reported() -> None:
    """A worker's log files are open only while it is spawned."""
    bench = Bench("exit $((LOCAL_RANK + 3))")
    await bench.open()
    descriptors = len(os.listdir("/proc/self/fd"))
    await bench.group.start()
    exits = await bench.collect_exits(4)
    assert exits == {rank: ExitStatus(code=rank + 3) for rank in range(4)}
    starts = [line for line in bench.history if not line.startswith("exited")]
    assert starts == [f"{what} {rank}" for rank in range(4) for what in ("spawn", "started")]
    # The store of the workers is all that stays open.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
    assert sorted(record.order for record in bench.group.records.values()) == [0, 1, 2, 3]
    await bench.aclose()


async def test_a_worker_that_cannot_start_is_named(bench: Bench) -> None:
    """Those before it run on, those after it are not started."""
    bench.fail_at = 1
    with pytest.raises(SpawnError, match="command not found") as caught:
        await bench.group.start()
    assert caught.value.local_rank == 1
    assert bench.history == ["spawn 0", "started 0", "spawn 1"]
    assert repr(bench.runtime.tree) == "<ProcessTree with 1 of 1 leaders alive>"
    assert repr(bench.group) == "<WorkerGroup, attempt 0: 1 of 4 running>"


async def test_an_abandoned_start_starts_no_further_worker(bench: Bench) -> None:
    """The stop waits for the worker that is being started, and finds it in the tree."""
    bench.abandon_at = 1
    await bench.group.start()
    (stop,) = bench.tasks
    assert await stop == []
    assert [line for line in bench.history if line.startswith("started")] == [
        "started 0",
        "started 1",
    ]
    assert await bench.collect_exits(2) == {rank: ExitStatus(signal=9) for rank in range(2)}
    assert all(record.is_victim for record in bench.group.records.values())


async def test_a_group_stopped_before_it_starts_starts_no_worker(bench: Bench) -> None:
    """A stop that comes first wins."""
    await bench.group.stop(KILL)
    await bench.group.start()
    assert bench.history == []
    assert repr(bench.group) == "<WorkerGroup, attempt 0: 0 of 4 running>"
