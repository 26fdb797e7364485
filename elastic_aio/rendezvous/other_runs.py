"""Names the other runs that wait at the same store, while this one waits for nodes.

Nodes with two run ids wait for each other for ever, and each sees only itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from elastic_aio.aio import create_task
from elastic_aio.errors import SpecError, StoreError
from elastic_aio.node_events import RoundForming
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.text import truncate

_AFTER_S: Final = 5.0
"""Seconds without enough nodes: those of one command start within fewer."""
_TIMEOUT_S: Final = 5.0
_READ_MAX: Final = 64
"""Runs of which the state is read."""
_NAMED_MAX: Final = 8
_NAME_MAX: Final = 64


class OtherRuns:
    """Looks once for other runs; the coordinator's node does it for its run."""

    def __init__(
        self, spec: RendezvousSpec, run_id: str, publish: Callable[[RoundForming], object]
    ) -> None:
        """Prepare; `publish` gets the latest event again when there are other runs."""
        self._spec = spec
        self._run_id = run_id
        self._publish = publish
        self._names: tuple[str, ...] = ()
        self._latest: tuple[RoundForming, float] | None = None
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<OtherRuns: {', '.join(self._names) or 'none'}>"

    def complete(self, event: RoundForming, *, looks: bool) -> RoundForming:
        """Return an event with the other runs that are known; with `looks`, look for some."""
        self._latest = event, asyncio.get_running_loop().time()
        if looks and self._task is None and event.joined < event.minimum:
            self._task = create_task(self._look(), name="look for other runs")
        return replace(event, others=self._names) if self._names else event

    def stop(self) -> asyncio.Task[None] | None:
        """Look no more: the run has formed a round, or this node leaves; return the task."""
        task, self._latest, self._names = self._task, None, ()
        if task is not None:
            task.cancel()
        return task

    async def _look(self) -> None:
        from elastic_aio.rendezvous.job_list import JobList, ListedState  # most runs need none

        # Time is the condition; `stop` ends the wait when the round is formed.
        await asyncio.sleep(_AFTER_S)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with JobList(self._spec, timeout=_TIMEOUT_S) as jobs:
                    listed = await jobs.read(limit=_READ_MAX)
        except (StoreError, SpecError, OSError):  # a TimeoutError too; it is a hint only
            return
        names = [
            job.run_id
            for job in listed
            if job.state is ListedState.WAITING and job.run_id != self._run_id
        ]
        self._names = tuple(truncate(name, _NAME_MAX) for name in names[-_NAMED_MAX:])
        if self._names and self._latest is not None:
            event, since = self._latest
            passed = asyncio.get_running_loop().time() - since
            left = None if event.time_left is None else max(0.0, event.time_left - passed)
            self._publish(replace(event, others=self._names, time_left=left))
