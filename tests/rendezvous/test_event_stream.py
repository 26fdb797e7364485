"""The event stream: written by many nodes, read from any host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from elastic_aio import Event, EventsMissed, JobFinished, JobState, WorkerStarted, follow_job
from elastic_aio.discovery.runs import enter_run, restore_end, run_store
from elastic_aio.errors import SpecError, StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.event_json import event_from_json, event_to_json
from elastic_aio.events import AttemptFailed
from elastic_aio.outcome import Failure, JobOutcome, WorkerError
from elastic_aio.rendezvous import event_stream
from elastic_aio.rendezvous.event_stream import KEPT, EventStreamWriter, JobEvents, count_events
from elastic_aio.spec.restart import Backoff
from elastic_aio.store import MemoryStore, Store, StoreServer, connect
from tests.support.chaos import ChaosProxy
from tests.support.coordinator_harness import failure

DONE = JobFinished(state=JobState.SUCCEEDED, why="done", exit_code=0, duration=1.0, restarts=0)


def started(*ranks: int) -> list[Event]:
    """Return events that differ in their ranks."""
    return [WorkerStarted(rank=rank, local_rank=0, pid=1, node="a") for rank in ranks]


def shown(events: Sequence[Event]) -> list[Any]:
    """Return what the tests look at: ranks, and counts of missed events as text."""
    seen: list[Any] = []
    for event in events:
        match event:
            case WorkerStarted(rank=rank):
                seen.append(rank)
            case EventsMissed(count=count):
                seen.append(f"missed {count}")
            case _:
                seen.append(type(event).__name__)
    return seen


async def taken(events: JobEvents, count: int) -> list[Event]:
    """Return the next events."""
    async with asyncio.timeout(20):
        return [await anext(events) for _ in range(count)]


async def all_of(events: JobEvents) -> list[Event]:
    """Return all events until the job's end."""
    async with asyncio.timeout(20):
        return [event async for event in events]


async def generation_of(store: Store) -> Store:
    """Return the view of the run `r`, which begins if it has not."""
    entry = await enter_run(store, "r", job="j", reuse=False, is_committed=True)
    assert entry is not None
    record, _ = entry
    return run_store(store, "r", record)


@contextlib.asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[StoreServer, Store]]:
    """Serve a store, and give the view of the run `r` in it."""
    async with StoreServer("127.0.0.1", port) as server, connect(server.endpoint) as client:
        yield server, await generation_of(client)


@contextlib.contextmanager
def dead(port: int = 0) -> Iterator[str]:
    """Reserve an endpoint at which no process listens."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        yield f"127.0.0.1:{sock.getsockname()[1]}"


async def test_events_are_numbered_and_ordered() -> None:
    """Present and later ones; `JobFinished` ends the iteration."""
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        await stream.write(started(0, 1))
        async with follow_job(server.endpoint, "r") as events:
            assert events.has_begun
            before = await taken(events, 2)
            await stream.write([*started(2), DONE])
            after = await all_of(events)
            assert await all_of(events) == [], "an iteration that is over stays so"
    assert shown([*before, *after]) == [0, 1, 2, "JobFinished"]
    assert [event.seq for event in [*before, *after]] == [0, 1, 2, 3]


async def test_a_reader_may_begin_before_the_first_event() -> None:
    async with serving() as (server, store), follow_job(server.endpoint, "r") as events:
        assert not events.has_begun
        reading = asyncio.ensure_future(all_of(events))
        await EventStreamWriter(store).write([*started(7), DONE])
        assert shown(await reading) == [7, "JobFinished"]
        assert events.has_begun


async def test_concurrent_writers() -> None:
    """No event is lost or repeated, and each writer's order is kept."""
    async with serving() as (server, store), follow_job(server.endpoint, "r") as events:

        async def write(writer: int) -> None:
            async with connect(server.endpoint) as own:
                stream = EventStreamWriter(await generation_of(own))
                for turn in range(10):
                    first = 100 * writer + 3 * turn
                    await stream.write(started(first, first + 1, first + 2))

        await asyncio.gather(*map(write, range(5)))
        await EventStreamWriter(store).write([DONE])
        seen = await all_of(events)
    ranks = shown(seen)[:-1]
    assert [event.seq for event in seen] == list(range(151))
    for writer in range(5):
        own = [rank for rank in ranks if rank // 100 == writer]
        assert own == list(range(100 * writer, 100 * writer + 30))


async def test_a_reader_continues_after_its_cursor() -> None:
    """Also after the last event."""
    async with serving() as (server, store):
        await EventStreamWriter(store).write([*started(0, 1, 2), DONE])
        for after, expected in [
            (-1, [0, 1, 2, "JobFinished"]),
            (0, [1, 2, "JobFinished"]),
            (2, ["JobFinished"]),
            (3, []),
        ]:
            async with follow_job(server.endpoint, "r", after=after) as events:
                assert shown(await all_of(events)) == expected


async def test_only_the_last_events_are_kept() -> None:
    """A later reader gets the number of deleted events."""
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        await stream.write(started(*range(KEPT + 30)))
        await stream.write([DONE])
        keys = [key for key in await store.list_keys() if key[:8] == "events/0"]
        assert len(keys) == KEPT
        async with follow_job(server.endpoint, "r") as events:
            seen = await all_of(events)
        assert shown(seen) == ["missed 31", *range(31, KEPT + 30), "JobFinished"]
        assert [event.seq for event in seen] == list(range(30, KEPT + 31))
        async with follow_job(server.endpoint, "r", after=seen[0].seq) as events:
            assert shown(await all_of(events))[0] == 31


async def test_a_gap_is_waited_for() -> None:
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        async with follow_job(server.endpoint, "r") as events:
            late = await store.add("events#", 1) - 1
            await stream.write(started(1, 2))
            first = asyncio.ensure_future(anext(events))
            # A question and its answer: what was written before has been sent by then.
            await store.peek("events#")
            assert not first.done()
            await store.set(f"events/{late:012d}", event_to_json(started(0)[0]))
            assert shown([await first, *await taken(events, 2)]) == [0, 1, 2]


def hasty(events: JobEvents) -> JobEvents:
    events.gap_patience, events.turn = 0.05, 0.2
    events.retry = Backoff(initial=0.1, jitter=False)
    return events


async def test_a_gap_is_given_up() -> None:
    """A later event with a missing number is dropped."""
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        async with hasty(follow_job(server.endpoint, "r")) as events:
            await store.add("events#", 3)
            await stream.write(started(3))
            assert shown(await taken(events, 2)) == ["missed 3", 3]
            await store.set(f"events/{1:012d}", event_to_json(started(1)[0]))
            await stream.write([*started(4), DONE])
            assert shown(await all_of(events)) == [4, "JobFinished"]


@pytest.mark.parametrize("when", ["before", "during"])
async def test_invalid_events_do_not_end_the_iteration(when: str) -> None:
    rubbish = {
        "events/": b"x",
        "events/x": event_to_json(DONE),
        "events/-1": event_to_json(DONE),
        "events/000000000001": b"\xff\x00{",
        "events/000000000002": b"[" * 10_000,
        "events/000000000003": b'{"schema":1,"event":"JobFinished"}',
        "events/999999999999": event_to_json(DONE),
        "events/" + "9" * 30: event_to_json(DONE),
    }
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        await stream.write(started(0))
        await store.add("events#", 3)
        if when == "before":
            await store.multi_set(rubbish)
        async with hasty(follow_job(server.endpoint, "r")) as events:
            await store.multi_set(rubbish)
            assert shown(await taken(events, 4)) == [0, "missed 1", "missed 1", "missed 1"]
            await stream.write(started(4))
            await stream.write([*started(5), DONE])
            assert shown(await all_of(events)) == [4, 5, "JobFinished"]


@pytest.mark.slow
async def test_the_next_endpoint_is_tried() -> None:
    async with serving() as (server, store):
        await EventStreamWriter(store).write([*started(0), DONE])
        with dead() as other:
            async with follow_job(f"{other}, {server.endpoint}", "r", timeout=20) as events:
                assert shown(await all_of(events)) == [0, "JobFinished"]


async def test_a_lost_store_is_followed_by_another_stream() -> None:
    """The reader gets one `EventsMissed`."""
    async with (
        serving() as (first, store),
        serving() as (second, other),
        # It keeps its port: no other program can serve there meanwhile.
        ChaosProxy(first.port) as proxy,
    ):
        await EventStreamWriter(store).write(started(0, 1))
        both = f"{proxy.endpoint},{second.endpoint}"
        async with hasty(follow_job(both, "r", timeout=20)) as events:
            assert shown(await taken(events, 2)) == [0, 1]
            proxy.is_refusing = True
            proxy.cut()
            await EventStreamWriter(other).write([*started(2, 3, 4), DONE])
            seen = await all_of(events)
    assert shown(seen) == ["missed 0", 2, 3, 4, "JobFinished"]
    assert [event.seq for event in seen] == [-1, 0, 1, 2, 3]


async def test_a_recorded_end_is_the_last_event() -> None:
    """The events of an ended run are deleted; a late reader gets its end and duration."""
    async with StoreServer("127.0.0.1") as server, connect(server.endpoint) as client:
        entry = await enter_run(client, "r", job="j", reuse=False)
        assert entry is not None
        record, _ = entry
        outcome = JobOutcome(JobState.FAILED, "rank 1 failed", 3, 1)
        await restore_end(run_store(client, "r", record), outcome, record.began_at + 7.5)
        async with follow_job(server.endpoint, "r") as events:
            assert events.has_begun
            seen = await all_of(events)
    assert shown(seen) == ["missed 0", "JobFinished"]
    assert isinstance(seen[0], EventsMissed)
    assert seen[0].why == "they were removed at the end of the job"
    end = seen[-1]
    assert isinstance(end, JobFinished)
    assert (end.state, end.why, end.exit_code) == (JobState.FAILED, "rank 1 failed", 3)
    assert (end.restarts, end.time) == (1, record.began_at + 7.5)
    assert end.duration == pytest.approx(7.5)


async def test_a_broken_connection_loses_no_event() -> None:
    async with serving() as (server, store), ChaosProxy(server.port) as proxy:
        stream = EventStreamWriter(store)
        await stream.write(started(0))
        async with hasty(follow_job(proxy.endpoint, "r", timeout=20)) as events:
            assert shown(await taken(events, 1)) == [0]
            proxy.cut()
            await stream.write([*started(1), DONE])
            assert shown(await all_of(events)) == [1, "JobFinished"]


async def test_a_cursor_above_the_stream_starts_at_0() -> None:
    async with serving() as (server, store):
        await EventStreamWriter(store).write([*started(0), DONE])
        async with follow_job(server.endpoint, "r", after=500) as events:
            assert shown(await all_of(events)) == ["missed 0", 0, "JobFinished"]


async def test_cancelling_a_wait_loses_no_event() -> None:
    async with serving() as (server, store):
        stream = EventStreamWriter(store)
        async with follow_job(server.endpoint, "r") as events:
            for rank in range(5):
                waiting = asyncio.ensure_future(anext(events))
                await store.peek("events#")
                waiting.cancel()
                await stream.write(started(rank))
                with contextlib.suppress(asyncio.CancelledError):
                    assert shown([await waiting]) == [rank]
                    continue
                assert shown(await taken(events, 1)) == [rank]


async def test_no_store_answers() -> None:
    with (
        dead() as one,
        dead() as two,
        pytest.raises(StoreTimeout, match=r"^no store at 127.*, 127.* within 0\.3 s"),
    ):
        await follow_job(f"{one},{two}", "r", timeout=0.3).__aenter__()


async def test_a_store_that_does_not_return() -> None:
    async with contextlib.AsyncExitStack() as stack:
        server, store = await stack.enter_async_context(serving())
        await EventStreamWriter(store).write(started(0))
        async with hasty(follow_job(server.endpoint, "r", timeout=0.3)) as events:
            assert shown(await taken(events, 1)) == [0]
            await stack.aclose()
            with dead(server.port), pytest.raises(StoreTimeout, match="no store at"):
                await taken(events, 1)


async def test_a_store_that_is_lost_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it can be followed: the search has one timeout, and pauses between attempts."""
    attempts = itertools.count()

    async def lose(store: Store, run_id: str) -> None:
        next(attempts)
        raise StoreLost("the peer closed the connection")

    monkeypatch.setattr(event_stream, "read_run", lose)
    async with StoreServer("127.0.0.1") as server:
        with pytest.raises(
            StoreTimeout, match=rf"^no store at {server.endpoint} within 0.5 s: the peer closed"
        ):
            async with asyncio.timeout(20):
                await hasty(follow_job(server.endpoint, "r", timeout=0.5)).__aenter__()
    assert 2 <= next(attempts) <= 5  # after 0, 0.1, 0.3, 0.5 s


async def test_a_store_that_is_lost_whenever_it_is_followed() -> None:
    """It counts as one that is not found, and there are pauses between the attempts."""
    async with StoreServer("127.0.0.1") as server, ChaosProxy(server.port) as proxy:

        async def cut() -> None:
            while True:
                proxy.cut()
                await asyncio.sleep(0.02)

        async with hasty(follow_job(proxy.endpoint, "r", timeout=0.5)) as events:
            cutting = asyncio.ensure_future(cut())
            with pytest.raises(StoreTimeout, match="no store at"):
                await taken(events, 1)
            cutting.cancel()
            await asyncio.wait([cutting])
        assert proxy.connections <= 40


async def test_an_attempt_that_fails_loses_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is replaced by one with another stream, and is lost once while it is read."""
    async with (
        serving() as (first, store),
        serving() as (second, other),
        ChaosProxy(first.port) as proxy,
    ):
        await EventStreamWriter(store).write(started(0, 1, 2))
        async with follow_job(f"{proxy.endpoint},{second.endpoint}", "r", timeout=20) as events:
            assert shown(await taken(events, 3)) == [0, 1, 2]
            await EventStreamWriter(other).write(started(10, 11, 12, 13))
            losses = [StoreLost("gone")]

            async def lose_once(store: Store) -> int:
                if losses:
                    raise losses.pop()
                return await count_events(store)

            monkeypatch.setattr(event_stream, "count_events", lose_once)
            proxy.is_refusing = True
            proxy.cut()
            assert shown(await taken(events, 5)) == ["missed 0", 10, 11, 12, 13]
        assert not losses


async def test_the_token_is_required() -> None:
    async with StoreServer("127.0.0.1", token="secret-of-this-test") as server:
        for wrong in (None, "guess-of-this-test"):
            with pytest.raises(StoreRefused):
                await follow_job(server.endpoint, "r", token=wrong).__aenter__()
        async with follow_job(server.endpoint, "r", token="secret-of-this-test") as events:
            assert not events.has_begun


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"endpoint": "a:b"}, "endpoint: must have a port"),
        ({"run_id": ""}, "run_id: must not be empty"),
        ({"after": -2}, "after: must be a whole number of at least -1"),
        ({"after": True}, "after: must be a whole number of at least -1"),
        ({"timeout": 0}, "timeout: must be a number above 0"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        follow_job(**{"endpoint": "a:1", "run_id": "r", **arguments})
    assert str(caught.value).startswith(message)


async def test_iteration_outside_of_the_context() -> None:
    """Before it is entered, and after it is left."""
    async with serving() as (server, store):
        await EventStreamWriter(store).write(started(0))
        event_reader = follow_job(server.endpoint, "r")
        with pytest.raises(StoreClosed):
            await anext(event_reader)
        async with event_reader as events:
            assert shown(await taken(events, 1)) == [0]
        with pytest.raises(StoreClosed):
            await anext(event_reader)


def huge_failure(length: int) -> Failure:
    return failure(
        time=1.0,
        error=WorkerError("boom", "line\n" * length, 1.0, "/x"),
        stderr_tail=("\udcff" * length,) * 50,
    )


@pytest.mark.parametrize("length", [1, 1_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_an_event_has_a_bounded_size(length: int) -> None:
    """Its texts and lists are truncated; its type stays."""
    root = huge_failure(length)
    event = AttemptFailed(attempt=3, root=root, failures=(root,) * 500)
    async with MemoryStore() as store:
        await EventStreamWriter(store).write([event])
        value = await store.get(f"events/{0:012d}")
    assert len(value) <= 16_384
    read = event_from_json(value)
    assert isinstance(read, AttemptFailed)
    assert read.root.status == root.status
    assert read.attempt == 3
    assert read.seq == 0


async def test_many_events_are_written_in_batches() -> None:
    async with MemoryStore() as store:
        await EventStreamWriter(store).write(started(*range(200)))
        await EventStreamWriter(store).write([])
        assert await store.get("events#") == b"200"
        assert await store.check([f"events/{number:012d}" for number in range(200)])
