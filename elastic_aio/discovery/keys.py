"""The keys of a run in the store: its generations, their ends, and whose the store is.

Under `run_prefix`::

    run                   the `RunRecord`: the present generation, and which job it is
    terms                 the last term of a coordinator, for the life of the store
    <generation>/...      the keys of one generation
    <generation>/round    the `RoundRecord` of its last round
    <generation>/end      the `RunEnd`, once the job has ended

A run id names one job for as long as the store lives: a node that comes late is given the
recorded end and runs nothing.  With `reuse` it begins the next generation instead, whose
members, terms and events are its own.

A node whose job has moved here from another store compares the jobs: the recorded end is its
own job's, or that of an earlier job, which it follows as the next generation.

A store that a node serves has the key `OWNER_KEY` from its first moment on.  The backend
"static" gives a store to one run alone, because the workers use it too.

All coroutines here raise `StoreError` when the store is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from elastic_aio.aio import random_bytes, wall_clock
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.store import Store

OWNER_KEY: Final = "elastic_aio/owner"

_T = TypeVar("_T")

_NODE = "node"
_CLAIM = "claim"


def run_prefix(run_id: str) -> str:
    """Return the prefix of a run's keys, without a slash at its end.

    Slashes are escaped, so that no run has keys among those of another one.
    """
    return f"elastic_aio/{run_id.replace('%', '%25').replace('/', '%2F')}"


def run_names(keys: Iterable[str]) -> list[str]:
    """Return the names of the runs that have begun, as `run_prefix` escapes them."""
    begin, end = run_prefix(""), "/run"
    ends = [key[len(begin) :] for key in keys if key.startswith(begin) and key.endswith(end)]
    return [name[: -len(end)] for name in ends if name.count("/") == 1]


def run_id_of(name: str) -> str:
    """Return the run id that `run_prefix` has escaped."""
    return name.replace("%2F", "/").replace("%25", "%")


class RunRecord(Struct, frozen=True, array_like=True):
    """The present generation of a run.

    `job` is random, and the same at every store.  `began_at` is when a node began the
    generation at this store, by that node's clock, in Unix seconds.
    """

    generation: int
    job: str
    began_at: float = 0.0


class RunEnd(Struct, frozen=True):
    """How a generation has ended, and when by the coordinator's clock, in Unix seconds."""

    state: JobState
    why: str
    exit_code: int
    restarts: int
    ended_at: float

    @property
    def outcome(self) -> JobOutcome:
        """The outcome, without failures."""
        return JobOutcome(self.state, self.why, self.exit_code, self.restarts)


_encoder = msgspec.json.Encoder()


def run_store(store: Store, run_id: str, record: RunRecord) -> Store:
    """Return the store with the prefix of a generation."""
    return store.prefixed(f"{run_prefix(run_id)}/{record.generation}")


async def read_run(store: Store, run_id: str) -> RunRecord | None:
    """Return the record of a run; None if it has not begun."""
    return _decode(await store.peek(f"{run_prefix(run_id)}/run"), RunRecord)


async def read_end(store: Store) -> RunEnd | None:
    """Return the end of the generation that `store` has the prefix of; None before it."""
    return _decode(await store.peek("end"), RunEnd)


async def write_end(store: Store, outcome: JobOutcome, ended_at: float) -> None:
    """Record the end of the generation that `store` has the prefix of."""
    end = RunEnd(outcome.state, outcome.why, outcome.exit_code, outcome.restarts, ended_at)
    await store.set("end", _encoder.encode(end))


async def enter_run(
    store: Store, run_id: str, *, job: str, reuse: bool
) -> tuple[RunRecord, RunEnd | None]:
    """Return the generation to take part in, and its end if it is over; begin one if needed.

    `job` is that of a node which has taken part elsewhere; empty for another node, which
    begins a generation after an end only with `reuse`.
    """
    key = f"{run_prefix(run_id)}/run"
    first = run_store(store, run_id, RunRecord(0, ""))
    # Together: most runs are in their first generation.
    value, end = await asyncio.gather(store.peek(key), read_end(first))
    record = _decode(value, RunRecord)
    if record is not None and record.generation:
        end = await read_end(run_store(store, run_id, record))
    while True:
        if record is not None and (end is None or record.job == job or not (job or reuse)):
            return record, end
        generation = 0 if record is None else record.generation + 1
        mine = RunRecord(generation, job or random_bytes(8).hex(), wall_clock())
        wanted = _encoder.encode(mine)
        value = await store.compare_set(key, value or b"", wanted)
        if value == wanted:
            if record is not None:
                await run_store(store, run_id, record).delete("end")
            return mine, None
        record = _decode(value, RunRecord)
        end = None if record is None else await read_end(run_store(store, run_id, record))


def _decode(value: bytes | None, kind: type[_T]) -> _T | None:
    """Return what this package has written; None if it has not."""
    if not value:
        return None
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def owner_value(run_id: str, *, is_node: bool) -> bytes:
    """Return the value of `OWNER_KEY`; with `is_node`, a node of the run serves the store."""
    return f"{_NODE if is_node else _CLAIM}/{run_id}".encode()


async def claim_store(store: Store, run_id: str, *, is_first_node: bool) -> str:
    """Make a store without an owner the run's; return why it must not be used, or nothing.

    The first node may not use one that another node serves.
    """
    claim = owner_value(run_id, is_node=False)
    value = await store.compare_set(OWNER_KEY, b"", claim)
    kind, _, owner = value.decode("utf-8", "replace").partition("/")
    if owner != run_id:
        remedy = "" if kind == _NODE else " until `aio-elastic gc` removes it"
        return f"it belongs to the run {owner!r}{remedy}"
    if is_first_node and kind == _NODE:
        return f"another node of rank 0 serves the run {owner!r} there"
    return ""


async def release_claim(store: Store, run_id: str) -> None:
    """End the claim of a run, if it has one."""
    await store.compare_set(OWNER_KEY, owner_value(run_id, is_node=False), b"")
