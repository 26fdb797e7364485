"""The workers of one attempt on this host, as one: all start, and any exit is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from elastic_aio.errors import SpawnError
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner
from elastic_aio.process.tree import ProcessTree

__all__ = ["WorkerGroup"]


class WorkerGroup:
    """The children of one attempt, by local rank."""

    def __init__(
        self,
        spawner: Spawner,
        tree: ProcessTree,
        *,
        on_started: Callable[[int, Child], None],
        on_exited: Callable[[int, Child, Exit], None],
    ) -> None:
        """Prepare an empty group; the callbacks get the local rank first."""
        self._spawner = spawner
        self._tree = tree
        self._on_started = on_started
        self._on_exited = on_exited
        self._children: dict[int, Child] = {}
        self._is_abandoned = False

    def __repr__(self) -> str:
        return f"<WorkerGroup {list(self._children.values())}>"

    async def start(self, plans: Iterable[AbstractContextManager[ChildPlan]]) -> None:
        """Start one child after the other, in order of local rank.

        Each plan is entered right before its child starts and left right after, so
        that the descriptors of one worker are open at a time.  Each child is known
        to the tree before the next one starts: whatever interrupts this leaves
        nothing that a stop would not find.

        Raises:
            SpawnError: one could not be started; it knows the local rank.  Those
                before it run on until the tree is stopped.
        """
        for local_rank, opened in enumerate(plans):
            if self._is_abandoned:
                break
            try:
                with opened as plan:
                    child = await self._spawner(plan)
            except SpawnError as error:
                error.local_rank = local_rank
                raise
            self._take_in(local_rank, child)
            await asyncio.sleep(0)  # others' turn: spawning may not have waited at all

    def abandon(self) -> None:
        """Start no further child; the one that is being started still comes."""
        self._is_abandoned = True

    def _take_in(self, local_rank: int, child: Child) -> None:
        self._tree.add(child)
        self._children[local_rank] = child
        self._on_started(local_rank, child)

        def exited(future: asyncio.Future[Exit]) -> None:
            self._on_exited(local_rank, child, future.result())

        child.exited.add_done_callback(exited)
