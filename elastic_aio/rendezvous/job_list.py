"""The jobs at a store: their list, and the removal of those that are over.

A job is over once its end is recorded.  A job without an end whose nodes are all gone may go on:
its nodes come back when they reach the store again, and others may join it.

On an engine a job is removed by one atomic request, on condition that its record is unchanged and
that it has no node.  A TCP store has no such request.  There the next generation is begun before
the end is deleted, as a node does with `reuse`: a node that comes in between takes part in the next
generation, whose keys are not touched.  Its record remains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Final, Self, TypeVar

from msgspec import Struct

from elastic_aio.aio import random_bytes
from elastic_aio.discovery import runs
from elastic_aio.errors import StoreError
from elastic_aio.rendezvous.event_stream import COUNT
from elastic_aio.rendezvous.job_store import check_reader, open_job_store
from elastic_aio.rendezvous.messages import MessageError, decode_status
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import Store
from elastic_aio.store.engine import EngineStore
from elastic_aio.value import to_json

_AT_ONCE: Final = 16
"""Jobs that are read, or keys that are deleted, at once."""

T = TypeVar("T")


class ListedState(StrEnum):
    """What a job at a store is doing."""

    WAITING = "waiting"
    """It has nodes, and none of them runs workers."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    LOST = "lost"
    """It has no node, and no end."""


class ListedJob(Struct, frozen=True, kw_only=True):
    """A job at a store.

    Attributes:
        nodes: names of the nodes that are there; after the end, of the nodes still to leave.
        began_at: by the clock of a node, in Unix seconds; 0 if unknown.
        ended_at: likewise; None before the end.
        why, exit_code: of the end.
    """

    run_id: str
    state: ListedState
    nodes: tuple[str, ...] = ()
    began_at: float = 0.0
    ended_at: float | None = None
    why: str = ""
    exit_code: int | None = None

    @property
    def since(self) -> float:
        """When it ended, or else began, in Unix seconds."""
        return self.began_at if self.ended_at is None else self.ended_at

    def is_over(self, *, also_lost: bool) -> bool:
        """Return whether it has ended and no node is left, or with `also_lost` has no node."""
        is_ended = self.ended_at is not None or (also_lost and self.state is ListedState.LOST)
        return is_ended and not self.nodes


class JobList:
    """The jobs at the first endpoint with a store; use it with `async with`.

    All coroutines raise `StoreError` when the store is lost, or refuses a request.
    """

    def __init__(self, spec: RendezvousSpec, *, timeout: float) -> None:
        """Check the settings, by `SpecError`; entering takes `timeout` seconds at most."""
        check_reader(spec)
        self._spec = spec
        self._timeout = timeout
        self._store: Store | None = None

    async def __aenter__(self) -> Self:
        """Connect; raise `StoreTimeout` if no store answers, `StoreRefused` if a store refuses."""
        self._store = await open_job_store(self._spec, "", self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._store is not None:
            await self._store.aclose()

    async def read(self, limit: int | None = None) -> list[ListedJob]:
        """Return all jobs, or at most `limit`, the latest last."""
        assert self._store is not None
        store = self._store
        if not isinstance(store, EngineStore):
            names = runs.run_names(await store.list_keys())
        else:
            names = await store.list_runs(runs.run_prefix(""))
        is_raw = isinstance(store, EngineStore) and store.is_per_run
        jobs: list[ListedJob] = []
        for part in _parts((names if is_raw else list(map(runs.run_id_of, names)))[:limit]):
            jobs += filter(None, await asyncio.gather(*map(self._read_one, part)))
        return sorted(jobs, key=lambda job: (job.since, job.run_id))

    async def remove(self, job: ListedJob, *, also_lost: bool = False) -> bool:
        """Remove the keys of a job that is over; return whether it still was."""
        async with self._open_run(job.run_id) as store:
            record = await runs.read_run(store, job.run_id)
            present = await _read_job(store, job.run_id, record)
            if record is None or present is None or not present.is_over(also_lost=also_lost):
                return False
            if isinstance(store, EngineStore):
                return await _remove_at_once(store, job.run_id, record)
            return await _remove_slowly(store, job.run_id, record)

    async def _read_one(self, run_id: str) -> ListedJob | None:
        async with self._open_run(run_id) as store:
            return await _read_job(store, run_id, await runs.read_run(store, run_id))

    @contextlib.asynccontextmanager
    async def _open_run(self, run_id: str) -> AsyncIterator[Store]:
        """Yield the store of a run: on some engines each has its own."""
        assert self._store is not None
        if not (isinstance(self._store, EngineStore) and self._store.is_per_run):
            yield self._store
            return
        store = await open_job_store(self._spec, run_id, self._timeout)
        async with contextlib.aclosing(store):
            yield store


async def _read_job(store: Store, run_id: str, record: runs.RunRecord | None) -> ListedJob | None:
    if record is None:
        return None
    generation = runs.run_store(store, run_id, record)
    end = await runs.read_end(generation)
    async with generation.watch("t/", is_prefix=True) as statuses:
        members = [_decode_member(text) for text in statuses.present.values()]
    if end is None and not members and not record.began_at and not await generation.peek(COUNT):
        return None  # left by a removal
    if end is not None:
        state = ListedState(end.state.value)
    elif not members:
        state = ListedState.LOST
    else:
        is_running = any(is_in_round for _, is_in_round in members)
        state = ListedState.RUNNING if is_running else ListedState.WAITING
    return ListedJob(
        run_id=run_id,
        state=state,
        nodes=tuple(sorted(name for name, _ in members)),
        began_at=record.began_at,
        ended_at=None if end is None else end.ended_at,
        why="" if end is None else end.why,
        exit_code=None if end is None else end.exit_code,
    )


def _decode_member(text: bytes) -> tuple[str, bool]:
    """Return the name of a member's node, and whether it takes part in a round."""
    try:
        status = decode_status(text)
    except MessageError:
        return "", True  # of another version: it is there, and may run workers
    return status.node.name, status.is_in_round


async def _remove_at_once(store: EngineStore, run_id: str, record: runs.RunRecord) -> bool:
    prefix = runs.run_prefix(run_id)
    return await store.remove_run(
        f"{prefix}/",
        record_key=f"{prefix}/run",
        record=to_json(record),
        members=f"{prefix}/{record.generation}/t/",
    )


async def _remove_slowly(store: Store, run_id: str, record: runs.RunRecord) -> bool:
    prefix = runs.run_prefix(run_id)
    end = f"{prefix}/{record.generation}/end"
    following = runs.RunRecord(record.generation + 1, random_bytes(8).hex())
    present = await store.compare_set(f"{prefix}/run", to_json(record), to_json(following))
    if present != to_json(following):
        return False
    kept = f"{prefix}/{following.generation}/"
    for part in _parts(
        [
            key
            for key in await store.list_keys()
            if key.startswith(f"{prefix}/")
            and not key.startswith(kept)
            and key not in (f"{prefix}/run", f"{prefix}/terms", end)
        ]
    ):
        await asyncio.gather(*map(store.delete, part))
    await store.delete(end)
    with contextlib.suppress(StoreError):
        await runs.release_claim(store, run_id)
    return True


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE)]
