"""A run in the store: its keys, its generations and their ends, and which job a node joins.

Under `run_prefix`::

    run                   the `RunRecord`: the present generation, and which job it is
    terms                 the last term of a coordinator, for the life of the store
    jobs                  the `FormerJob`s of this run id
    <generation>/...      the keys of one generation
    <generation>/round    the `RoundRecord` of its last round
    <generation>/end      the `RunEnd`, once the job has ended, or a `RunMove`

A run id names one job for as long as the store lives: a node that comes late is given the recorded
end and runs nothing.  With `reuse` it begins the next generation instead, whose members, terms and
events are its own.

How a job ends
==============

The end of a job is one compare-and-set of the key `end`, in two steps.  The coordinator first
writes the end under its lease, marked as not final, so the store refuses it once the coordinator is
deposed.  The coordinator then replaces exactly this value by the final end, which outlives the
lease.  Members act on a final end alone.  No order to end is written before.

Which job a node takes part in
==============================

One job never becomes another.  A node that has had a place in a round, or is on standby, is
committed to its job.  It enters another job in one case: both are halves of one, because the nodes
first met at two stores.  The user may just as well have started the next job while this node was
cut off.  So the node must know that its job has not ended without it:

* its workers run, or have failed and may be restarted, and its lease at the former store cannot
  have ended; a coordinator ends no job while such a member has its lease; or
* the former store has a final `RunMove` in place of the end of its job.  It leads to another job
  only if the job began at that store, so that none of its nodes can have ended it elsewhere.

And the workers of both must run the same program.

The first such node records in `jobs` that its job goes on in the present one.  Other nodes of its
job then follow it, also if their workers have all succeeded.  A node that finds the end of its job
in `jobs` takes that.  Any other node waits for such a record, and then ends.

Whose the store is
==================

A store that a node serves has the key `OWNER_KEY` from its first moment on.  The backend "static"
gives a store to one run alone, because the workers use it too.

All coroutines here raise `StoreError` when the store is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.aio import random_bytes, wall_clock
from elastic_aio.errors import StoreLost
from elastic_aio.outcome import EndCause, Failure, JobOutcome, JobState
from elastic_aio.store import Lease, Store
from elastic_aio.text import os_bytes, os_text
from elastic_aio.value import from_json, to_json

OWNER_KEY: Final = "elastic_aio/owner"

_T = TypeVar("_T")

_NODE = "node"
_CLAIM = "claim"


def run_prefix(run_id: str) -> str:
    """Return the prefix of a run's keys; slashes are escaped, so that runs share no keys."""
    return f"elastic_aio/{run_id.replace('%', '%25').replace('/', '%2F')}"


def run_key(run_id: str) -> str:
    """Return the key of the `RunRecord`."""
    return f"{run_prefix(run_id)}/run"


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

    `job` is random, and the same at every store.  `began_at` is when a node began the generation at
    this store, by that node's clock, in Unix seconds.  `is_continued`: that node was committed to
    the job, which has had rounds at another store.  `program` names what its workers run.
    """

    generation: int
    job: str
    began_at: float = 0.0
    is_continued: bool = False
    program: str = ""


class RunEnd(Struct, frozen=True, omit_defaults=True):
    """How a generation has ended, and when by the coordinator's clock, in Unix seconds.

    As in a `JobOutcome`; `failures` are truncated, the root cause first.  Before `is_final` the end
    is a claim of the coordinator, which may still be deposed.
    """

    state: JobState
    why: str
    exit_code: int
    restarts: int
    ended_at: float
    failures: tuple[Failure, ...] = ()
    is_rendezvous: bool = False
    cause: EndCause | None = None
    is_final: bool = True

    @property
    def outcome(self) -> JobOutcome:
        """The outcome that all nodes report."""
        return JobOutcome(
            self.state,
            self.why,
            self.exit_code,
            self.restarts,
            self.failures,
            is_rendezvous=self.is_rendezvous,
            cause=self.cause,
        )


class RunMove(Struct, frozen=True):
    """In place of an end: the nodes go to another store, where the job goes on in `goes_on_in`.

    Before `is_final` that is a claim of a node that looks there once more.  No end follows a final
    move.
    """

    goes_on_in: str
    is_final: bool = False


def run_store(store: Store, run_id: str, record: RunRecord) -> Store:
    """Return the store with the prefix of a generation."""
    return store.prefixed(f"{run_prefix(run_id)}/{record.generation}")


async def read_run(store: Store, run_id: str) -> RunRecord | None:
    """Return the record of a run; None if it has not begun."""
    return decode_run(await store.peek(run_key(run_id)))


def decode_run(value: bytes | None) -> RunRecord | None:
    """Return the value of the key `run`; None without one."""
    return decode_value(value, RunRecord)


async def read_end(store: Store) -> RunEnd | None:
    """Return the end of the generation that is the prefix of `store`; None before it."""
    return decode_end(await store.peek("end"))


async def read_move(store: Store) -> RunMove | None:
    """Return the final `RunMove` of the generation that is the prefix of `store`, or None."""
    return decode_move(await store.peek("end"))


def decode_end(value: bytes | None) -> RunEnd | None:
    """Return the value of the key `end` if that is a final end."""
    end = decode_value(value, RunEnd)
    return end if end is not None and end.is_final else None


def decode_move(value: bytes | None) -> RunMove | None:
    """Return the value of the key `end` if that is a final `RunMove`."""
    move = decode_value(value, RunMove)
    return move if move is not None and move.is_final else None


async def record_end(store: Store, lease: Lease, end: RunEnd) -> RunEnd | None:
    """Record the end of the generation that is the prefix of `store`, for its coordinator.

    Return the standing end: another coordinator may have been first.  None: the job has moved to
    another store.  Where the lease has ended, no end is recorded.
    """
    claim = to_json(replace(end, is_final=False))
    final = to_json(end)
    former = b""
    while True:
        present = await lease.compare_set("end", former, claim)
        if present == claim:
            # Refused by the store if the lease has ended: the claim has gone with it.
            present = await store.compare_set("end", claim, final)
            if present == claim:
                raise StoreLost("the lease has ended before the end of the job was recorded")
        if decode_move(present) is not None:
            return None
        if (standing := decode_end(present)) is not None:
            return standing
        former = present  # a claim, which may never be made final


async def restore_end(store: Store, outcome: JobOutcome, ended_at: float) -> None:
    """Record, for a member, an ordered end that an engine has lost when it failed over."""
    await store.compare_set("end", b"", to_json(end_of(outcome, ended_at)))


def end_of(outcome: JobOutcome, ended_at: float) -> RunEnd:
    """Return the end of a job at `ended_at`, in Unix seconds."""
    return RunEnd(
        outcome.state,
        outcome.why,
        outcome.exit_code,
        outcome.restarts,
        ended_at,
        outcome.failures,
        outcome.is_rendezvous,
        outcome.cause,
    )


async def claim_move(store: Store, job: str) -> bool:
    """Claim that this job goes on in `job`, elsewhere; return False if it has ended here."""
    claim = to_json(RunMove(job))
    present = await store.compare_set("end", b"", claim)
    return present == claim or decode_move(present) is not None


async def record_move(store: Store, job: str) -> bool:
    """Make the claim of a move final; return False if the job has ended here since."""
    claim, final = (to_json(RunMove(job, is_final)) for is_final in (False, True))
    return decode_move(await store.compare_set("end", claim, final)) is not None


async def undo_move(store: Store, job: str) -> None:
    """Withdraw the claim of a move."""
    await store.compare_set("end", to_json(RunMove(job)), b"")


def decode_value(value: bytes | None, kind: type[_T]) -> _T | None:
    """Return a value that this package has written; None if it has not."""
    try:
        return from_json(value or b"", kind)
    except ValueError:
        return None


def owner_value(run_id: str, *, is_node: bool) -> bytes:
    """Return the value of `OWNER_KEY`; with `is_node`, a node of the run serves the store."""
    return os_bytes(f"{_NODE if is_node else _CLAIM}/{run_id}")


async def claim_store(store: Store, run_id: str, *, is_first_node: bool) -> str:
    """Make a store without an owner the run's; return why it must not be used, or nothing.

    The first node may not use a store that another node serves.
    """
    claim = owner_value(run_id, is_node=False)
    value = await store.compare_set(OWNER_KEY, b"", claim)
    kind, _, owner = os_text(value).partition("/")
    if owner != run_id:
        remedy = "" if kind == _NODE else " until `aio-elastic gc` removes it"
        return f"it belongs to the run {owner!r}{remedy}"
    if is_first_node and kind == _NODE:
        return f"another node of rank 0 serves the run {owner!r} there"
    return ""


async def release_claim(store: Store, run_id: str) -> None:
    """End the claim of a run, if there is a claim."""
    await store.compare_set(OWNER_KEY, owner_value(run_id, is_node=False), b"")


# ----------------------------------------------------------- the job of a node

_KEPT_S: Final = 86_400.0
"""Seconds for which former jobs are known: longer than a node is cut off and lives on."""

_KEPT_MAX: Final = 64
"""Former jobs that are known; a record that grew would slow each node down."""


class FormerJob(Struct, frozen=True, omit_defaults=True):
    """A former job: its end, or the job in which it goes on; written `at`, in Unix seconds."""

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
        job: in which this node took part last; empty for a new node.
        reuse: whether a node that is not committed begins a new job after an end; after that of a
            preempted job it does so in any case.
        program: a name of what this node's workers run: a job with another program is not the other
            half of this node's.
        is_committed: whether this node has had a place in `job`, or is on standby for one.
        goes_on: whether `job` cannot have ended until now, so that it may go on in the given job.
        may_begin: whether the job may go on in a store that no node has used, even if it may have
            ended.  Otherwise a new job is preferred: it is begun there at the same time.
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
            is_final = end is not None and not (reuse or end.state is JobState.PREEMPTED)
            if is_open or (end is not None and is_own and (is_committed or is_final)):
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

    It is a job that a coordinator leads there, and does not lead elsewhere; or `job` itself if its
    end is known there.

    `store` is the whole store, and `job` empty for a new node.  `with_round`: the node goes to
    another job only if that has had a round.  `any_end`: it goes to any end of its own job, and not
    only to its success or preemption.
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
        is_for_all = end.state in (JobState.SUCCEEDED, JobState.PREEMPTED)
        return job if any_end or is_for_all else ""
    # The claim of a move counts: the node that looks from there may have decided the same.
    is_led = leader is not None and not value
    return record.job if is_led and (is_own or round is not None or not with_round) else ""


async def _read_generation(
    store: Store, run_id: str
) -> tuple[bytes, RunRecord | None, bytes | None]:
    """Return the present `RunRecord`, also as bytes, and the value of its key `end`."""
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
    """Begin the generation after `former`, of a new job for an empty name; None if too late."""
    record = decode_run(former)
    generation = 0 if record is None else record.generation + 1
    name = job or random_bytes(8).hex()
    mine = RunRecord(generation, name, wall_clock(), bool(job), program)
    wanted = to_json(mine)
    if await store.compare_set(run_key(run_id), former, wanted) != wanted:
        return None
    if generation > 1:
        # Not the last generation's end: a node of it may not have begun its watch of the end.
        await run_store(store, run_id, RunRecord(generation - 2, "")).delete("end")
    return mine


async def _find_former(store: Store, run_id: str, job: str, present: str) -> FormerJob | None:
    """Return the knowledge of `job`; without an end, if it goes on in the `present` job."""
    listed = decode_former_jobs(await store.peek(former_jobs_key(run_id)))
    known = {one.job: one for one in listed}
    found = known.get(job)
    for _ in range(_KEPT_MAX):  # a loop would be a defect of another program
        if found is None or found.end is not None or found.goes_on_in == present:
            break
        found = known.get(found.goes_on_in)
    return found


async def _add_former(store: Store, run_id: str, former: FormerJob) -> FormerJob:
    """Add to the former jobs; return the standing entry, which is the first of a job."""
    if former.goes_on_in == former.job:
        return former
    key = former_jobs_key(run_id)
    value = await store.peek(key) or b""
    while True:
        listed = decode_former_jobs(value)
        if standing := [one for one in listed if one.job == former.job]:
            return standing[0]
        kept = [one for one in listed if former.at - _KEPT_S < one.at]
        wanted = to_json([*kept, former][-_KEPT_MAX:])
        present = await store.compare_set(key, value, wanted)
        if present == wanted:
            return former
        value = present
