"""The jobs of a run: which one a node takes part in, and how a job ends once."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator

import msgspec
import pytest

from elastic_aio.discovery import runs
from elastic_aio.discovery.runs import (
    FormerJob,
    RunEnd,
    RunMove,
    RunRecord,
    claim_move,
    decode_former_jobs,
    decode_move,
    end_of,
    enter_run,
    former_jobs_key,
    job_to_join,
    read_end,
    record_end,
    record_move,
    restore_end,
    run_key,
    run_store,
    undo_move,
)
from elastic_aio.errors import StoreError
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.store import Store, StoreServer, connect

RUN = "run"
DONE = JobOutcome(JobState.SUCCEEDED, "done", 0, 2)
FAILED = JobOutcome(JobState.FAILED, "failed", 3, 1)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with StoreServer("127.0.0.1") as server, connect(server.endpoint) as store:
        yield store


async def begin(store: Store, job: str, *, generation: int = 0) -> Store:
    """Begin a generation as a node of another store would, and return its store."""
    record = RunRecord(generation, job)
    await store.set(run_key(RUN), msgspec.json.encode(record))
    return run_store(store, RUN, record)


async def enter(
    store: Store, job: str = "", *, reuse: bool = False, goes_on: bool = False, is_new: bool = False
) -> tuple[str, RunEnd | None] | None:
    """Enter the run as a node that is committed to `job`, or as one that is new."""
    entry = await enter_run(
        store,
        RUN,
        job=job,
        reuse=reuse,
        is_committed=bool(job) and not is_new,
        goes_on=lambda _: goes_on,
    )
    return None if entry is None else (entry[0].job, entry[1])


def end(outcome: JobOutcome = DONE) -> RunEnd:
    return end_of(outcome, 100.0)


# ------------------------------------------------------------ who enters what


async def test_a_new_node_begins_a_job_and_the_next_one_joins_it(store: Store) -> None:
    first = await enter(store)
    assert first is not None
    assert await enter(store) == first


async def test_a_job_goes_on_by_its_name_in_an_empty_store(store: Store) -> None:
    assert await enter(store, "X") == ("X", None)


async def test_a_node_without_a_place_begins_a_new_job_in_an_empty_store(store: Store) -> None:
    """That which it has seen may have ended."""
    entry = await enter(store, "X", is_new=True)
    assert entry is not None
    assert entry[0] != "X"


async def test_a_job_that_may_have_ended_begins_in_no_store_of_others(store: Store) -> None:
    ask = functools.partial(
        enter_run, store, RUN, job="X", reuse=False, is_committed=True, may_begin=False
    )
    assert await ask() is None
    assert await store.peek(run_key(RUN)) is None
    entry = await ask(goes_on=lambda job: job == "X")
    assert entry is not None
    assert entry[0].is_continued


async def test_a_node_of_a_job_enters_no_other_one(store: Store) -> None:
    await begin(store, "Y")
    assert await enter(store, "X") is None
    assert await store.peek(former_jobs_key(RUN)) is None


async def test_a_new_node_may_enter_another_job(store: Store) -> None:
    await begin(store, "Y")
    assert await enter(store, "X", is_new=True) == ("Y", None)


async def test_a_job_that_goes_on_becomes_part_of_another_one(store: Store) -> None:
    """The first node knows that; the others of its job follow it."""
    await begin(store, "Y")
    assert await enter(store, "X", goes_on=True) == ("Y", None)
    assert await enter(store, "X") == ("Y", None)
    assert await enter(store, "Z") is None


async def test_parts_of_parts_are_followed(store: Store) -> None:
    await begin(store, "Y")
    await enter(store, "X", goes_on=True)
    await begin(store, "Z", generation=1)
    assert await enter(store, "X") is None
    assert await enter(store, "Y", goes_on=True) == ("Z", None)
    assert await enter(store, "X") == ("Z", None)


@pytest.mark.parametrize("job", ["", "X"])
async def test_a_job_that_has_ended_has_ended_for_all(store: Store, job: str) -> None:
    generation = await begin(store, "X")
    await restore_end(generation, DONE, 100.0)
    assert await enter(store, job) == ("X", end())


async def test_the_end_of_a_job_outlives_its_generation(store: Store) -> None:
    generation = await begin(store, "X")
    await restore_end(generation, FAILED, 100.0)
    entry = await enter(store, reuse=True)
    assert entry is not None
    assert entry[0] != "X"
    assert entry[1] is None
    assert await enter(store, "X", goes_on=True) == (entry[0], end(FAILED))
    assert await read_end(generation) == end(FAILED), "a node of it may still begin its watch"
    await restore_end(run_store(store, RUN, RunRecord(1, "")), DONE, 100.0)
    await enter(store, reuse=True)
    assert await read_end(generation) is None


async def test_a_node_begins_the_next_job_under_a_new_name(store: Store) -> None:
    """Not under the one that it had seen before its place was given."""
    await restore_end(await begin(store, "X"), DONE, 100.0)
    entry = await enter(store, "X", is_new=True, reuse=True)
    assert entry is not None
    assert entry[0] != "X"


async def test_a_node_with_a_place_begins_no_job_after_its_end(store: Store) -> None:
    await restore_end(await begin(store, "X"), DONE, 100.0)
    assert await enter(store, "X", reuse=True, goes_on=True) == ("X", end())


async def test_another_job_that_has_ended_is_followed_by_one_that_goes_on(store: Store) -> None:
    await restore_end(await begin(store, "Y"), DONE, 100.0)
    assert await enter(store, "X") is None
    assert await enter(store, "X", goes_on=True) == ("X", None)
    assert await enter(store, "Y") == ("X", end())


async def test_few_former_jobs_are_kept_and_none_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(70):
        await restore_end(await begin(store, f"j{number}"), DONE, 100.0)
        await enter(store, reuse=True)
    kept = decode_former_jobs(await store.peek(former_jobs_key(RUN)))
    assert [one.job for one in kept] == [f"j{number}" for number in range(6, 70)]
    monkeypatch.setattr(runs, "wall_clock", lambda: kept[-1].at + 86_400)
    await restore_end(await begin(store, "last"), DONE, 100.0)
    await enter(store, reuse=True)
    kept = decode_former_jobs(await store.peek(former_jobs_key(RUN)))
    assert [one.job for one in kept] == ["last"]


async def test_a_circle_of_former_jobs_ends_a_search(store: Store) -> None:
    circle = [FormerJob("X", 1.0, goes_on_in="Y"), FormerJob("Y", 1.0, goes_on_in="X")]
    await store.set(former_jobs_key(RUN), msgspec.json.encode(circle))
    await begin(store, "Z")
    assert await enter(store, "X") is not None, "what stands counts"


async def test_a_job_that_runs_another_program_is_no_half(store: Store) -> None:
    """The next job may begin within the lease of a node of the former one."""
    for program in ("x.py", "y.py"):
        await store.delete(run_key(RUN))
        await store.set(run_key(RUN), msgspec.json.encode(RunRecord(0, "Y", program=program)))
        entry = await enter_run(
            store,
            RUN,
            job="X",
            reuse=False,
            program="x.py",
            is_committed=True,
            goes_on=lambda _: True,
        )
        assert (entry is not None) == (program == "x.py")
        await store.delete(former_jobs_key(RUN))


# ------------------------------------------------------------------- the end


async def test_an_end_is_recorded_once(store: Store) -> None:
    async with store.lease(5) as lease:
        assert await record_end(store, lease, end()) == end()
        assert await record_end(store, lease, end(FAILED)) == end()
    assert await read_end(store) == end(), "it outlives the lease of the coordinator"


async def test_a_coordinator_without_a_lease_records_no_end(store: Store) -> None:
    async with store.lease(5) as lease:
        pass
    with pytest.raises(StoreError):
        await record_end(store, lease, end())
    assert await read_end(store) is None


async def test_a_claim_is_no_end_and_goes_with_its_coordinator(store: Store) -> None:
    """The coordinator may be deposed between the two steps."""
    async with store.lease(5) as deposed, store.lease(5) as successor:
        claim = msgspec.json.encode(msgspec.structs.replace(end(FAILED), is_final=False))
        await deposed.compare_set("end", b"", claim)
        assert await read_end(store) is None
        assert await record_end(store, successor, end()) == end()
        # What the deposed one would do next.
        final = msgspec.json.encode(end(FAILED))
        assert await store.compare_set("end", claim, final) != final
    assert await read_end(store) == end()


async def test_a_job_ends_or_moves(store: Store) -> None:
    """What is final first; a claim of the other is replaced."""
    ended, moved = store.prefixed("ended"), store.prefixed("moved")
    async with ended.lease(5) as lease:
        assert await claim_move(ended, "Y")
        assert await record_end(ended, lease, end()) == end()
        assert not await record_move(ended, "Y")
        await undo_move(ended, "Y")
        assert not await claim_move(ended, "Y")
    assert await read_end(ended) == end()
    async with moved.lease(5) as lease:
        assert await claim_move(moved, "Y")
        assert await record_move(moved, "Y")
        assert await record_end(moved, lease, end()) is None
        await undo_move(moved, "Y")
        assert await claim_move(moved, "Z")
    assert decode_move(await moved.peek("end")) == RunMove("Y", is_final=True)


async def test_a_move_is_taken_back_until_it_is_final(store: Store) -> None:
    assert await claim_move(store, "Y")
    assert decode_move(await store.peek("end")) is None
    await undo_move(store, "Y")
    async with store.lease(5) as lease:
        assert await record_end(store, lease, end()) == end()


async def test_a_member_restores_an_end_but_replaces_none(store: Store) -> None:
    await restore_end(store, DONE, 100.0)
    await restore_end(store, FAILED, 200.0)
    assert await read_end(store) == end()


async def moved(store: Store, job: str, goes_on_in: str) -> None:
    generation = await begin(store, job)
    await claim_move(generation, goes_on_in)
    await record_move(generation, goes_on_in)


async def test_nodes_go_on_in_the_job_that_theirs_has_moved_to(store: Store) -> None:
    """The other store is lost, and they come back."""
    await moved(store, "X", "Y")
    assert await enter(store, "X") == ("Y", None)
    assert await enter(store, "Y") == ("Y", None)
    assert await enter(store, "X") == ("Y", None)


async def test_a_job_that_was_at_two_stores_is_no_other_one(store: Store) -> None:
    await moved(store, "X", "X")
    assert await enter(store, "X") == ("X", None)
    assert await store.peek(former_jobs_key(RUN)) is None


async def test_a_new_node_begins_a_new_job_where_another_has_moved_away(store: Store) -> None:
    await moved(store, "X", "Y")
    entry = await enter(store)
    assert entry is not None
    assert entry[0] not in ("X", "Y")
    assert await enter(store, "X") is None
    assert await enter(store, "Y") is None


# --------------------------------------------------- what another store offers


async def joinable(store: Store, job: str = "X", *, with_round: bool = False) -> list[str]:
    """Return where a node of `job` goes, for any end of its own job and for a success only."""
    return [
        await job_to_join(store, RUN, job, with_round=with_round, any_end=any_end)
        for any_end in (True, False)
    ]


async def test_a_store_offers_the_job_that_is_led_there(store: Store) -> None:
    assert await joinable(store) == ["", ""]
    generation = await begin(store, "Y")
    assert await joinable(store) == ["", ""]
    await generation.set("coordinator", "x")
    assert await joinable(store) == ["Y", "Y"]
    assert await joinable(store, "") == ["Y", "Y"]
    assert await joinable(store, with_round=True) == ["", ""]
    assert await joinable(store, "Y", with_round=True) == ["Y", "Y"], "its own job"
    await generation.set("round", "x")
    assert await joinable(store, with_round=True) == ["Y", "Y"]
    await claim_move(generation, "Z")
    assert await joinable(store) == ["", ""], "a claim too: the other node may decide the same"


@pytest.mark.parametrize(("outcome", "found"), [(DONE, ["X", "X"]), (FAILED, ["X", ""])])
async def test_a_store_offers_the_end_of_the_own_job(
    store: Store, outcome: JobOutcome, found: list[str]
) -> None:
    generation = await begin(store, "X")
    await restore_end(generation, outcome, 100.0)
    assert await joinable(store) == found
    assert await joinable(store, "Y") == ["", ""]
    assert await joinable(store, "") == ["", ""]
    await enter(store, reuse=True)
    assert await joinable(store) == found, "in the next generation too"
