"""Which job a node takes part in: one job never becomes another.

A node that has had a place in a round, or is on standby, is committed to its job.  It enters
another job in one case: both are halves of one, because the nodes first met at two stores.
The user may just as well have started the next job while this node was cut off.  So the node
must know that its job has not ended without it:

* its workers run, or have failed and may be restarted, and its lease at the former store cannot
  have ended; a coordinator ends no job while such a member has its lease; or
* the former store has a final `RunMove` in place of the end of its job.  It leads to another job
  only if the job began at that store, so that none of its nodes can have ended it elsewhere.

And the workers of both must run the same program.

The first such node records in `jobs` that its job goes on in the present one.  Other nodes of
its job then follow it, those too whose workers have all succeeded.  A node that finds the end
of its job in `jobs` takes that.  Any other one waits for such a record, and then ends.

All coroutines here raise `StoreError` when the store is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from elastic_aio.aio import random_bytes, wall_clock
from elastic_aio.discovery.runs import (
    RunEnd,
    RunRecord,
    decode_end,
    decode_move,
    decode_run,
    decode_value,
    read_run,
    run_key,
    run_prefix,
    run_store,
)
from elastic_aio.outcome import JobState
from elastic_aio.store import Store

_KEPT_S: Final = 86_400.0
"""Seconds for which former jobs are known: longer than a node is cut off and lives on."""

_KEPT_MAX: Final = 64
"""Former jobs that are known; a record that grew would slow each node down."""

_encoder = msgspec.json.Encoder()


class FormerJob(Struct, frozen=True, omit_defaults=True):
    """A job that is not the present one: its end, or the job in which it goes on.

    `at` is when that was written, in Unix seconds.
    """

    job: str
    at: float
    end: RunEnd | None = None
    goes_on_in: str = ""


def former_jobs_key(run_id: str) -> str:
    """Return the key of the `FormerJob`s of a run."""
    return f"{run_prefix(run_id)}/jobs"


def decode_former_jobs(value: bytes | None) -> list[FormerJob]:
    """Return the value of the key `jobs`."""
    return decode_value(value, list[FormerJob]) or []


async def enter_run(
    store: Store,
    run_id: str,
    *,
    job: str,
    reuse: bool,
    program: str = "",
    is_committed: bool = False,
    goes_on: Callable[[str], bool] = lambda job: False,
    may_begin: bool = True,
) -> tuple[RunRecord, RunEnd | None] | None:
    """Return the generation to take part in, and its end if it is over; begin one if needed.

    None: another job has begun here, and nothing is known of this node's own; or none has.

    Args:
        store: the whole store.
        run_id: name of the run.
        job: that in which this node took part last; empty for a new one.
        reuse: whether a node that is not committed begins a new job after an end.
        program: a name of what this node's workers run: a job with another one is no half of
            this node's.
        is_committed: whether this node has had a place in `job`, or is on standby for one.
        goes_on: whether that job cannot have ended until now, so that it may go on in the one
            that is given.
        may_begin: whether the job may go on in a store that no node has used, even if it may
            have ended. Otherwise a new job is preferred: it is begun there at the same time.
    """
    while True:
        value, record, end_value = await _read_generation(store, run_id)
        name = job if is_committed else ""
        if record is not None:
            end, move = decode_end(end_value), decode_move(end_value)
            is_own = not is_committed or job == record.job
            if not is_own:
                former = await _find_former(store, run_id, job, record.job)
                if former is None and program == record.program and goes_on(record.job):
                    former = FormerJob(job, wall_clock(), goes_on_in=record.job)
                    if end is None:
                        former = await _add_former(store, run_id, former)
                if former is None or former.end is not None:
                    return None if former is None else (record, former.end)
            is_open = end is None and move is None
            if is_open or (end is not None and is_own and (is_committed or not reuse)):
                return record, end
            # Before it is replaced: a node of that job may come back at any time.
            goes_on_in = "" if move is None else move.goes_on_in or record.job
            await _add_former(store, run_id, FormerJob(record.job, wall_clock(), end, goes_on_in))
            if is_committed and move is not None:
                name = goes_on_in  # which is not there any more
        elif is_committed and not (may_begin or goes_on(job)):
            return None
        mine = await _begin_next(store, run_id, value, name, program)
        if mine is not None:
            return mine, None


async def job_to_join(
    store: Store, run_id: str, job: str, *, with_round: bool = False, any_end: bool = True
) -> str:
    """Return the job at a store that a node of `job` should go to; empty for none.

    That is one which a coordinator leads there, and does not lead elsewhere; or `job` itself if
    its end is known there.

    Args:
        store: the whole store.
        run_id: name of the run.
        job: that of the node; empty for a new one.
        with_round: whether it goes to another job only if that has had a round.
        any_end: whether it goes to any end of its own job, or only to its success.
    """
    record = await read_run(store, run_id)
    if record is None:
        return ""
    generation = run_store(store, run_id, record)
    leader, value, round = await asyncio.gather(
        *(generation.peek(key) for key in ("coordinator", "end", "round"))
    )
    end, is_own = decode_end(value), job == record.job
    if job and not is_own:
        former = await _find_former(store, run_id, job, record.job)
        is_own = former is not None
        end = None if former is None else former.end
    if job and is_own and end is not None:
        return job if any_end or end.state is JobState.SUCCEEDED else ""
    # The claim of a move counts: the node that looks from there may have decided the same.
    is_led = leader is not None and not value
    return record.job if is_led and (is_own or round is not None or not with_round) else ""


async def _read_generation(
    store: Store, run_id: str
) -> tuple[bytes, RunRecord | None, bytes | None]:
    """Return the present `RunRecord`, as it is written too, and the value of its key `end`."""
    first = run_store(store, run_id, RunRecord(0, ""))
    # Together: most runs are in their first generation.
    value, end_value = await asyncio.gather(store.peek(run_key(run_id)), first.peek("end"))
    record = decode_run(value)
    if record is not None and record.generation:
        end_value = await run_store(store, run_id, record).peek("end")
    return value or b"", record, end_value


async def _begin_next(
    store: Store, run_id: str, former: bytes, job: str, program: str
) -> RunRecord | None:
    """Begin the generation after `former`, of this job, or of a new one for an empty name.

    None: another node has begun one.
    """
    record = decode_run(former)
    generation = 0 if record is None else record.generation + 1
    name = job or random_bytes(8).hex()
    mine = RunRecord(generation, name, wall_clock(), bool(job), program)
    wanted = _encoder.encode(mine)
    if await store.compare_set(run_key(run_id), former, wanted) != wanted:
        return None
    if generation > 1:
        # Not that of the last one: a node of it may not have begun its watch of the end.
        await run_store(store, run_id, RunRecord(generation - 2, "")).delete("end")
    return mine


async def _find_former(store: Store, run_id: str, job: str, present: str) -> FormerJob | None:
    """Return what is known of `job`; if it goes on in the `present` one, without an end."""
    listed = decode_former_jobs(await store.peek(former_jobs_key(run_id)))
    known = {one.job: one for one in listed}
    found = known.get(job)
    for _ in range(_KEPT_MAX):  # a loop would be a defect of another program
        if found is None or found.end is not None or found.goes_on_in == present:
            break
        found = known.get(found.goes_on_in)
    return found


async def _add_former(store: Store, run_id: str, former: FormerJob) -> FormerJob:
    """Add to the former jobs; return what stands, which is the first that is written of a job."""
    if former.goes_on_in == former.job:
        return former
    key = former_jobs_key(run_id)
    value = await store.peek(key) or b""
    while True:
        listed = decode_former_jobs(value)
        if standing := [one for one in listed if one.job == former.job]:
            return standing[0]
        kept = [one for one in listed if former.at - _KEPT_S < one.at]
        wanted = _encoder.encode([*kept, former][-_KEPT_MAX:])
        present = await store.compare_set(key, value, wanted)
        if present == wanted:
            return former
        value = present
