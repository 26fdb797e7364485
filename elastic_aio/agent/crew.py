"""One attempt of a bare group on this host: started, watched, stopped; nobody decides here.

The ground under `processes`: the agent's host without its machine, events or
restarts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from elastic_aio.agent.evidence import EndedWorker, gather_failures
from elastic_aio.agent.host import Host, HostCallbacks
from elastic_aio.agent.memory import oom_kills
from elastic_aio.agent.surroundings import check_child_signals, check_guarded, node_name
from elastic_aio.agent.work import Crew
from elastic_aio.aio import Pausable, outlast, owned_task, see_through
from elastic_aio.logs.paths import WorkerLogs
from elastic_aio.logs.sink import Console
from elastic_aio.outcome import Failure
from elastic_aio.policy import StopPlan
from elastic_aio.process.base import Child, Exit, Spawner
from elastic_aio.process.command import command_spawner
from elastic_aio.process.results import Told
from elastic_aio.ranks import NodeSize, assign_places
from elastic_aio.spec import LaunchSpec

__all__ = ["CrewRun"]


class _Member(Struct):
    pid: int
    ended: Exit | None = None
    ended_at: float = 0.0  # Unix time
    order: int = 0
    is_victim: bool = False


class CrewRun:
    """The processes of a group; must be closed once it has been started."""

    def __init__(
        self,
        spec: LaunchSpec,
        crew: Crew,
        *,
        console: Console | None = None,
        spawner: Spawner | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            spec: what all members have in common.
            crew: how they differ.
            console: where tee'd output goes; None is this process's own.
            spawner: starts commands; None chooses by the running loop.
        """
        self.name = spec.role
        self.ranks: Sequence[int] = range(len(crew.args))
        self._spec = spec
        self._crew = crew
        self._console = console
        self._spawner = spawner
        self._host: Host | None = None
        self._members: dict[int, _Member] = {}
        self._told: dict[int, Told] | None = None
        self._stopped_at = 0.0
        self._oom_kills: int | None = None
        self._is_asked_to_stop = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<CrewRun {self.name}: {len(self.ended())} of {len(self._members)} have ended>"

    async def start(self) -> None:
        """Start every member, or leave nothing behind.

        Raises:
            SpecError: a setting does not fit, or something cannot be pickled.
            SpawnError: one could not be started.
            SurroundingsError: the machine lacks something.
        """
        check_guarded()
        check_child_signals()
        loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[None] = loop.create_future()
        self._clock = Pausable()
        count = len(self.ranks)
        self._host = host = Host(
            self._spec,
            run_id=self._spec.run_id or os.urandom(8).hex(),
            name=node_name(),
            nproc=count,
            console=self._console,
            spawner=self._spawner or command_spawner(loop),
            clock=self._clock,
            tell=HostCallbacks(
                started=self._on_started,
                exited=self._on_exited,
                guardian_replaced=lambda pid: None,
                console_lost=lambda sink, why: None,
            ),
            crew=self._crew,
        )
        places = assign_places([NodeSize(self.name, count)], group_rank=0)
        try:
            await host.open()
            self._oom_kills = oom_kills()
            starting = owned_task(host.start(0, places, 0), name=f"start {self.name}")
            await outlast(starting)
            starting.result()
        except BaseException:  # a cancellation too: what has been started must not stay
            await see_through(self._give_up)
            raise

    async def _give_up(self) -> None:
        if self._members:
            await self.stop(StopPlan())
        await self.close()

    # --------------------------------------------------------------- questions

    def pids(self) -> dict[int, int]:
        """Return the members' process ids by local rank."""
        return {rank: member.pid for rank, member in self._members.items()}

    def ended(self) -> set[int]:
        """Return the local ranks of those that have ended."""
        return {rank for rank, member in self._members.items() if member.ended}

    def exit_of(self, rank: int) -> Exit:
        """Return how an ended member has ended."""
        ended = self._members[rank].ended
        assert ended is not None, "asked of those that have ended"
        return ended

    def order_of(self, rank: int) -> int:
        """Return the position of a member's end among all ends."""
        return self._members[rank].order

    def logs_of(self, rank: int) -> WorkerLogs:
        """Return where a member's output goes."""
        return self._open_host.logs_of(0, rank)

    # ------------------------------------------------------------------- waits

    async def next_exit(self, known: set[int], timeout: float | None) -> None:
        """Wait until a member has ended that is not `known`, `timeout` seconds at most."""
        await self._until(timeout, lambda: bool(self.ended() - known))

    async def all_ended(self, timeout: float) -> None:
        """Wait until all have ended, `timeout` seconds at most."""
        await self._until(timeout, lambda: len(self.ended()) == len(self._members))

    async def ended_or_failed(self) -> None:
        """Wait until all have ended, one has failed, or somebody wants the end."""

        def is_over() -> bool:
            ends = [member.ended for member in self._members.values()]
            failed = any(end is not None and not end.status.is_success for end in ends)
            return self._is_asked_to_stop or failed or all(ends)

        await self._until(None, is_over)

    async def _until(self, timeout: float | None, is_so: Callable[[], bool]) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not is_so():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                # The loop has exits to tell that have happened by now.
                await asyncio.sleep(0)
                return
            await asyncio.wait([self._changed], timeout=left)

    def ask_to_stop(self) -> None:
        """Let `ended_or_failed` return."""
        self._is_asked_to_stop = True
        self._change()

    # ----------------------------------------------------------------- the end

    async def stop(self, plan: StopPlan) -> None:
        """Stop everything that is left, by `plan`.  May be started over."""
        self._stopped_at = self._stopped_at or time.time()
        host = self._open_host
        if len(self.ended()) < len(self.ranks) or not await host.tree.settle():
            await host.stop(plan, lambda signal, pids: None)
        await host.end_attempt()

    async def told(self) -> dict[int, Told]:
        """Return how the calls of functions have ended, by local rank."""
        if self._told is None:
            self._told = await self._open_host.told()
        return self._told

    async def failures(self, told: Mapping[int, Told]) -> tuple[Failure, ...]:
        """Return why members did not succeed, the root cause first."""
        name = node_name()
        nothing = Told(0)
        return await gather_failures(
            [
                EndedWorker(
                    rank=rank,
                    local_rank=rank,
                    pid=member.pid,
                    host=name,
                    status=member.ended.status,
                    ended_at=member.ended_at,
                    order=member.order,
                    is_victim=member.is_victim,
                    logs=self.logs_of(rank),
                    error=told.get(rank, nothing).error,
                    problem=told.get(rank, nothing).problem,
                )
                for rank, member in self._members.items()
                if member.ended is not None
                and not (member.ended.status.is_success and not told.get(rank, nothing).problem)
            ],
            stopped_at=self._stopped_at,
            oom_kills_before=self._oom_kills,
        )

    async def close(self) -> None:
        """Give everything back; what workers wrote is shown first.  May be repeated."""
        if self._host is not None and not self._is_closed:
            await self._host.close()
            self._is_closed = True

    @property
    def _open_host(self) -> Host:
        assert self._host is not None, "start() comes first"
        return self._host

    def _on_started(self, attempt: int, rank: int, child: Child) -> None:
        self._members[rank] = _Member(child.pid)

    def _on_exited(self, attempt: int, rank: int, child: Child, ended: Exit) -> None:
        member = self._members[rank]
        member.order = len(self.ended())
        member.ended = ended
        member.ended_at = time.time()
        member.is_victim = self._open_host.tree.was_asked(child.pid)
        self._change()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)
