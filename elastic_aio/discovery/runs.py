"""The keys of a run in the store: its generations, their ends, and whose the store is.

Under `run_prefix`::

    run                   the `RunRecord`: the present generation, and which job it is
    terms                 the last term of a coordinator, for the life of the store
    jobs                  the former jobs of this run id (see `elastic_aio.discovery.jobs`)
    <generation>/...      the keys of one generation
    <generation>/round    the `RoundRecord` of its last round
    <generation>/end      the `RunEnd`, once the job has ended, or a `RunMove`

A run id names one job for as long as the store lives: a node that comes late is given the
recorded end and runs nothing.  With `reuse` it begins the next generation instead, whose
members, terms and events are its own.

How a job ends
==============

The end of a job is one compare-and-set of the key `end`, in two steps.  The coordinator first
writes the end under its lease, marked as not final, so the store refuses it once the coordinator
is deposed.  The coordinator then replaces exactly this value by the final end, which outlives
the lease.  Members act on a final end alone.  No order to end is written before.

A store that a node serves has the key `OWNER_KEY` from its first moment on.  The backend
"static" gives a store to one run alone, because the workers use it too.

All coroutines here raise `StoreError` when the store is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from elastic_aio.errors import StoreLost
from elastic_aio.outcome import EndCause, Failure, JobOutcome, JobState
from elastic_aio.store import Lease, Store

OWNER_KEY: Final = "elastic_aio/owner"

_T = TypeVar("_T")

_NODE = "node"
_CLAIM = "claim"


def run_prefix(run_id: str) -> str:
    """Return the prefix of a run's keys, without a slash at its end.

    Slashes are escaped, so that no run has keys among those of another one.
    """
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

    `job` is random, and the same at every store.  `began_at` is when a node began the
    generation at this store, by that node's clock, in Unix seconds.  `is_continued`: that node
    was committed to the job, which has had rounds at another store.  `program` names what its
    workers run.
    """

    generation: int
    job: str
    began_at: float = 0.0
    is_continued: bool = False
    program: str = ""


class RunEnd(Struct, frozen=True, omit_defaults=True):
    """How a generation has ended, and when by the coordinator's clock, in Unix seconds.

    As in a `JobOutcome`; `failures` are those that ended it, truncated, the root cause first.
    Before `is_final` the end is a claim of the coordinator, which may still be deposed.
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
    """In place of an end: the nodes go to another store, and the job goes on in that of there.

    Before `is_final` that is a claim of the node that looks there once more.  No end follows
    a final move.
    """

    goes_on_in: str
    is_final: bool = False


_encoder = msgspec.json.Encoder()


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
    """Return the end of the generation that `store` has the prefix of; None before it."""
    return decode_end(await store.peek("end"))


def decode_end(value: bytes | None) -> RunEnd | None:
    """Return the value of the key `end` if that is a final end."""
    end = decode_value(value, RunEnd)
    return end if end is not None and end.is_final else None


def decode_move(value: bytes | None) -> RunMove | None:
    """Return the value of the key `end` if that is a final `RunMove`."""
    move = decode_value(value, RunMove)
    return move if move is not None and move.is_final else None


async def record_end(store: Store, lease: Lease, end: RunEnd) -> RunEnd | None:
    """Record the end of the generation that `store` has the prefix of, for its coordinator.

    Returns the end that stands: another coordinator may have been first.  None: the job
    has moved to another store.

    Raises:
        StoreError: the store is lost, or the lease has ended: no end is recorded.
    """
    claim = _encoder.encode(replace(end, is_final=False))
    final = _encoder.encode(end)
    former = b""
    while True:
        present = await lease.compare_set("end", former, claim)
        if present == claim:
            # Refused by the store if the lease has ended meanwhile: the claim has gone with it.
            present = await store.compare_set("end", claim, final)
            if present == claim:
                raise StoreLost("the lease has ended before the end of the job was recorded")
        if decode_move(present) is not None:
            return None
        if (standing := decode_end(present)) is not None:
            return standing
        former = present  # a claim, which may never be made final


async def restore_end(store: Store, outcome: JobOutcome, ended_at: float) -> None:
    """Record, for a member, an end that it was ordered and that the store no longer has.

    An engine that fails over may lose what it has acknowledged.
    """
    await store.compare_set("end", b"", _encoder.encode(end_of(outcome, ended_at)))


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
    claim = _encoder.encode(RunMove(job))
    present = await store.compare_set("end", b"", claim)
    return present == claim or decode_move(present) is not None


async def record_move(store: Store, job: str) -> bool:
    """Make the claim of a move final; return False if the job has ended here meanwhile."""
    claim, final = (_encoder.encode(RunMove(job, is_final)) for is_final in (False, True))
    return decode_move(await store.compare_set("end", claim, final)) is not None


async def undo_move(store: Store, job: str) -> None:
    """Withdraw the claim of a move."""
    await store.compare_set("end", _encoder.encode(RunMove(job)), b"")


def decode_value(value: bytes | None, kind: type[_T]) -> _T | None:
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
