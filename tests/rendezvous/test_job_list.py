"""The jobs at a store: their list, and the removal of those that are over."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from elastic_aio.discovery.runs import enter_run, read_run, restore_end, run_prefix, run_store
from elastic_aio.events import WorkerStarted
from elastic_aio.outcome import JobOutcome, JobState
from elastic_aio.rendezvous.event_stream import EventStreamWriter
from elastic_aio.rendezvous.job_list import JobList, ListedJob, ListedState
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec
from elastic_aio.store import Store, StoreServer, connect
from elastic_aio.store.engine import EngineStore
from tests.support.fake_agent import FakeAgent, all_formed, job_spec, present

EVENT = WorkerStarted(rank=1, local_rank=1, pid=7, node="box")
DONE = JobOutcome(JobState.SUCCEEDED, "done", 0, 0)
RUN_IDS = ("one", "a/b %{x}", "elastic_aio/run", "a")
MakeSpec = Callable[..., Any]


@pytest.fixture(
    params=[
        "tcp",
        pytest.param("etcd", marks=pytest.mark.engine),
        pytest.param("redis", marks=pytest.mark.engine),
    ]
)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[dict[str, Any]]:
    """Where a store is, as fields of `RendezvousSpec`; engines have keys of their own."""
    if request.param == "tcp":
        async with StoreServer("127.0.0.1") as server:
            yield {"endpoint": server.endpoint, "is_host": False}
        return
    yield {
        "endpoint": request.getfixturevalue(f"{request.param}_endpoint"),
        "backend": request.param,
        "engine": EngineSpec(key_prefix=f"/{uuid.uuid4().hex}[*]"),
    }


@contextlib.asynccontextmanager
async def opened(place: dict[str, Any], run_id: str) -> AsyncIterator[Store]:
    """Open the store of a run, as a node does."""
    if "backend" not in place:
        async with connect(place["endpoint"]) as store:
            yield store
        return
    from elastic_aio.discovery.engine import open_engine

    async with open_engine(RendezvousSpec(**place), run_id) as engine:
        yield engine


async def begin(place: dict[str, Any], run_id: str, *, ends: bool) -> None:
    """Write what a job of this run leaves: its record, events, and its end."""
    async with opened(place, run_id) as store:
        entry = await enter_run(store, run_id, job="", reuse=True)
        assert entry is not None
        record, _ = entry
        generation = run_store(store, run_id, record)
        await EventStreamWriter(generation).write([EVENT] * 70)
        await store.prefixed(run_prefix(run_id)).add("terms")
        if ends:
            await restore_end(generation, DONE, 1e9)


def listed(place: dict[str, Any]) -> JobList:
    return JobList(RendezvousSpec(**place), timeout=10)


def test_each_end_of_a_job_is_a_state() -> None:
    assert {state.value for state in JobState} <= {state.value for state in ListedState}


async def states(place: dict[str, Any]) -> dict[str, ListedState]:
    async with listed(place) as jobs:
        return {job.run_id: job.state for job in await jobs.read()}


async def test_jobs_are_listed_by_their_run_ids(place: dict[str, Any]) -> None:
    """Whatever their names; keys of other programs are no jobs."""
    async with opened(place, "other") as store:
        await store.set("elastic_aio/other/x", "1")
        await store.set("elastic_aiox/run", "1")
    for run_id in RUN_IDS:
        await begin(place, run_id, ends=run_id == "one")
    expected = dict.fromkeys(RUN_IDS, ListedState.LOST) | {"one": ListedState.SUCCEEDED}
    assert await states(place) == expected
    async with listed(place) as jobs:
        [ended] = [job for job in await jobs.read() if job.run_id == "one"]
    assert (ended.ended_at, ended.since, ended.why, ended.exit_code) == (1e9, 1e9, "done", 0)
    assert ended.began_at > 1e9


async def test_a_live_job_has_its_nodes(place: dict[str, Any]) -> None:
    """It waits, then runs; it is not removed, even as a lost one."""
    spec = job_spec(place["endpoint"], "2", **{k: v for k, v in place.items() if k != "endpoint"})
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    async with present() as members:
        members.append(a)
        await a.rendezvous.open()
        while (await states(place)) != {"run": ListedState.WAITING}:
            pass  # its status is about to be written
        members.append(b)
        await b.rendezvous.open()
        await all_formed(a, b)
        while (await states(place)) != {"run": ListedState.RUNNING}:
            pass
        async with listed(place) as jobs:
            [job] = await jobs.read()
            assert job.nodes == ("a", "b")
            assert not job.is_over(also_lost=True)
            # Read before they came: what is there now decides.
            former = ListedJob(run_id="run", state=ListedState.LOST)
            assert not await jobs.remove(former, also_lost=True)
        a.succeed()
        b.succeed()
        await a.wait_ended()
        await b.wait_ended()
    if "backend" in place:
        assert await states(place) == {"run": ListedState.SUCCEEDED}


async def test_only_a_job_that_is_over_is_removed(place: dict[str, Any]) -> None:
    """With all its keys; a lost one on demand."""
    for run_id in RUN_IDS:
        await begin(place, run_id, ends=run_id == "one")
    async with listed(place) as jobs:
        found = {job.run_id: job for job in await jobs.read()}
        assert not await jobs.remove(found["a"])
        assert await jobs.remove(found["one"])
        assert not await jobs.remove(found["one"])
        assert await jobs.remove(found["a"], also_lost=True)
    assert await states(place) == dict.fromkeys(RUN_IDS[1:3], ListedState.LOST)
    async with opened(place, "one") as store:
        left = [key for key in await store.list_keys() if key.startswith("elastic_aio/one/")]
        kept = [] if "backend" in place else ["elastic_aio/one/run", "elastic_aio/one/terms"]
        assert sorted(left) == kept


async def test_a_removed_run_id_begins_again(place: dict[str, Any]) -> None:
    """Without the end of the former job, and listed as any other."""
    await begin(place, "one", ends=True)
    async with listed(place) as jobs:
        [job] = await jobs.read()
        assert await jobs.remove(job)
        assert await jobs.read() == []
    async with opened(place, "one") as store:
        entry = await enter_run(store, "one", job="", reuse=False)
        assert entry is not None
        record, end = entry
        assert end is None
        generation = run_store(store, "one", record)
        await EventStreamWriter(generation).write([EVENT])
    assert await states(place) == {"one": ListedState.LOST}


async def test_a_job_that_begins_again_meanwhile_is_kept(place: dict[str, Any]) -> None:
    """The condition of the removal is the record that was read."""
    await begin(place, "one", ends=True)
    async with listed(place) as jobs:
        [job] = await jobs.read()
        await begin(place, "one", ends=False)  # the next generation
        assert not await jobs.remove(job)
    async with opened(place, "one") as store:
        record = await read_run(store, "one")
        assert record is not None
        assert record.generation == 1
    assert await states(place) == {"one": ListedState.LOST}


@pytest.mark.parametrize("place", ["etcd", "redis"], indirect=True)
@pytest.mark.engine
async def test_an_engine_compares_when_it_removes(place: dict[str, Any]) -> None:
    """A node that has come since the job was read prevents it, and so does another record."""
    async with opened(place, "one") as store:
        assert isinstance(store, EngineStore)
        remove_run = store.remove_run
        await store.set("r/run", "record")
        await store.set("r/1/t/a", "status")

        async def remove(record: bytes, members: str) -> bool:
            return await remove_run("r/", record_key="r/run", record=record, members=members)

        assert not await remove(b"record", "r/1/t/")
        assert not await remove(b"other", "r/2/t/")
        assert sorted(await store.list_keys()) == ["r/1/t/a", "r/run"]
        assert await remove(b"record", "r/2/t/")
    async with opened(place, "one") as store:
        assert await store.list_keys() == []
