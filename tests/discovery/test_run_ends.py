"""Which node is given the end of a run, and which begins another generation."""

from __future__ import annotations

from elastic_aio.discovery.keys import RunRecord, enter_run, run_store, write_end
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.store import MemoryStore

RUN = "run"


async def ended() -> tuple[MemoryStore, RunRecord]:
    """Return a store at which a run has ended, and its record."""
    store = MemoryStore()
    record, end = await enter_run(store, RUN, job="", reuse=False)
    assert end is None
    outcome = JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0)
    await write_end(run_store(store, RUN, record), outcome, 1.0)
    return store, record


async def test_a_late_node_reads_the_end() -> None:
    store, record = await ended()
    found, end = await enter_run(store, RUN, job="", reuse=False)
    assert (found, end is not None) == (record, True)


async def test_a_node_reads_the_end_of_its_own_job() -> None:
    store, record = await ended()
    found, end = await enter_run(store, RUN, job=record.job, reuse=False)
    assert (found, end is not None) == (record, True)


async def test_a_node_of_another_job_is_not_given_the_end_of_a_former_one() -> None:
    """It has taken part elsewhere, and has moved here with its workers."""
    store, record = await ended()
    found, end = await enter_run(store, RUN, job="another", reuse=False)
    assert end is None
    assert (found.generation, found.job) == (record.generation + 1, "another")
