"""The workers of an attempt as one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from elastic_aio.aio import Pausable
from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus
from elastic_aio.policy import StopPlan
from elastic_aio.process.base import Child, ChildPlan, Exit
from elastic_aio.process.command import command_spawner
from elastic_aio.process.group import WorkerGroup
from elastic_aio.process.guardian import open_roster
from elastic_aio.process.roster import parse_roster, read_roster
from elastic_aio.process.tree import ProcessTree

GUARD = 30.0


@pytest.fixture(autouse=True)
def _waiting_threads_end() -> Iterator[None]:
    """On Python 3.11 asyncio has a thread for each child, which ends a little after it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-")):
            thread.join(GUARD)


class Bench:
    """A group, the order in which things happened, and the plans' contexts."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ended: asyncio.Queue[tuple[int, ExitStatus]] = asyncio.Queue()
        self.roster = open_roster()
        self.nothing = os.open(os.devnull, os.O_RDWR)
        self.tree = ProcessTree("ELASTIC_AIO_JOB_GROUP_TEST", Pausable(), self.roster)
        self.group = WorkerGroup(
            command_spawner(asyncio.get_running_loop()),
            self.tree,
            on_started=self._on_started,
            on_exited=self._on_exited,
        )
        self.abandon_at = -1

    def _on_started(self, local_rank: int, child: Child) -> None:
        listed = [number for number, _, _ in parse_roster(read_roster(self.roster))]
        assert child.pid in listed, "a child is guarded before anything else happens"
        self.told.append(f"started {local_rank}")
        if local_rank == self.abandon_at:
            self.group.abandon()

    def _on_exited(self, local_rank: int, child: Child, end: Exit) -> None:
        assert child.exited.done()
        self.told.append(f"exited {local_rank}")
        self.ended.put_nowait((local_rank, end.status))

    @contextmanager
    def plan(self, local_rank: int, *argv: str) -> Iterator[ChildPlan]:
        self.told.append(f"open {local_rank}")
        yield ChildPlan(
            argv=argv,
            env={"PATH": os.environ["PATH"]},
            cwd=None,
            stdin=self.nothing,
            stdout=self.nothing,
            stderr=self.nothing,
        )
        self.told.append(f"close {local_rank}")

    async def ends(self, count: int) -> dict[int, ExitStatus]:
        async with asyncio.timeout(GUARD):
            return dict([await self.ended.get() for _ in range(count)])

    async def aclose(self) -> None:
        await self.tree.stop(StopPlan(()), lambda *_: None)
        os.close(self.roster)
        os.close(self.nothing)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench that is cleared afterwards."""
    one = Bench()
    yield one
    await one.aclose()


async def test_all_start_in_order_and_every_exit_is_told(bench: Bench) -> None:
    """Each plan is open only while its child starts."""
    await bench.group.start(bench.plan(rank, "sh", "-c", f"exit {rank + 3}") for rank in range(3))
    ends = await bench.ends(3)
    assert ends == {rank: ExitStatus(code=rank + 3) for rank in range(3)}
    begins = [what for what in bench.told if not what.startswith("exited")]
    assert begins == [
        f"{what} {rank}" for rank in range(3) for what in ("open", "close", "started")
    ]


async def test_a_worker_that_cannot_start_is_named(bench: Bench) -> None:
    """Those before it run on, those after it are not begun."""
    plans = [bench.plan(0, "sleep", "99"), bench.plan(1, "no-such"), bench.plan(2, "sleep", "99")]
    with pytest.raises(SpawnError, match="command not found") as caught:
        await bench.group.start(plans)
    assert caught.value.local_rank == 1
    assert bench.told == ["open 0", "close 0", "started 0", "open 1"]
    assert repr(bench.tree) == "<ProcessTree with 1 of 1 leaders alive>"
    assert "running" in repr(bench.group)


async def test_an_abandoned_start_begins_no_further_worker(bench: Bench) -> None:
    """The one that is being started still comes, known to the tree."""
    bench.abandon_at = 1
    await bench.group.start(bench.plan(rank, "sleep", "99") for rank in range(4))
    assert bench.told[-1] == "started 1"
    assert repr(bench.tree) == "<ProcessTree with 2 of 2 leaders alive>"
    await bench.tree.stop(StopPlan(()), lambda *_: None)
    assert await bench.ends(2) == {rank: ExitStatus(signal=9) for rank in range(2)}


async def test_a_group_abandoned_before_it_starts_starts_nobody(bench: Bench) -> None:
    """A stop that comes first wins."""
    bench.group.abandon()
    await bench.group.start([bench.plan(0, "sleep", "99")])
    assert bench.told == []
    assert repr(bench.group) == "<WorkerGroup []>"
