"""The event stream of a job of several nodes: its keys in the store, its writer and its reader.

Under the prefix of the run's generation::

    events#             how many numbers have been allocated
    events/<number>     one event as JSON, its number in 12 digits

A writer allocates numbers first and then sets all their keys at once, so a gap closes within a
round trip, unless its writer is killed in between.  The last `KEPT` events are kept.  A store that
replaces a lost one begins another stream.

All coroutines on a store raise `StoreError` when it is lost, or refuses a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
from msgspec.structs import replace

from elastic_aio.aio import running_loop
from elastic_aio.discovery.runs import RunEnd, RunRecord, read_end, read_run, run_prefix, run_store
from elastic_aio.errors import SpecError, StoreClosed, StoreError, StoreLost
from elastic_aio.event_json import event_from_json, event_to_json
from elastic_aio.events import Event, EventsMissed, JobFinished
from elastic_aio.rendezvous.job_store import check_reader, no_store, open_job_store
from elastic_aio.spec.checks import check_number, checked_integer, checked_text
from elastic_aio.spec.rendezvous import ENGINES, EngineSpec, RendezvousSpec, parse_endpoints
from elastic_aio.spec.restart import Backoff
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import Store, Watch
from elastic_aio.text import truncate

KEPT: Final = 1_000

COUNT: Final = "events#"
EVENTS: Final = "events/"

_SIZE_MAX: Final = 16_384
"""Most bytes of an event; longer texts and lists are truncated."""

_LIMITS: Final = ((4_000, 256), (1_000, 32), (200, 8), (40, 1))
"""Most characters of a text and items of a list in a long event, tried in turn."""

_BATCH: Final = 64
"""Events that are set, or deleted, in one round trip."""

_LOST_EARLY: Final = 1.0
"""Seconds after the beginning in which the loss of a store is a failure of the search."""


class EventStreamWriter:
    """Appends events to the job's stream; any number of nodes may write at once."""

    def __init__(self, store: Store) -> None:
        """Write into `store`, with the prefix of a generation; the caller closes it."""
        self._store = store

    async def write(self, events: Sequence[Event]) -> None:
        """Append events; each gets the stream's next number as its `seq`.

        Cancellation: may leave a gap, as a lost store does; readers get `EventsMissed`.
        """
        for first in range(0, len(events), _BATCH):
            await self._write(events[first : first + _BATCH])

    async def _write(self, events: Sequence[Event]) -> None:
        end = await self._store.add(COUNT, len(events))
        numbers = range(end - len(events), end)
        items = {
            _key(number): _encode(event, number)
            for number, event in zip(numbers, events, strict=True)
        }
        try:
            await self._store.multi_set(items)
        except StoreLost:
            # Setting the same keys to the same values again is idempotent.
            await self._store.multi_set(items)
        with contextlib.suppress(StoreError):  # the new events are written
            old = (number - KEPT for number in numbers if number >= KEPT)
            await asyncio.gather(*(self._store.delete(_key(number)) for number in old))


async def delete_events(store: Store) -> None:
    """Delete the stream of an ended job."""
    count = await count_events(store)
    keys = [COUNT, *map(_key, range(max(0, count - KEPT), count))]
    await asyncio.gather(*map(store.delete, keys))


async def count_events(store: Store) -> int:
    """Return how many numbers of events have been allocated."""
    return max(0, parse_seq((await store.peek(COUNT) or b"").decode("ascii", "replace")))


def _key(number: int) -> str:
    return f"{EVENTS}{number:012d}"


def parse_seq(text: str) -> int:
    """Return the number in a text; -1 if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


def decode_event(value: bytes) -> Event | None:
    """Return the event; None if the bytes cannot be decoded."""
    try:
        return event_from_json(value)
    except ValueError:
        return None


def _encode(event: Event, number: int) -> bytes:
    whole = msgspec.to_builtins(msgspec.structs.replace(event, seq=number))
    body = b""
    # Truncated before it is encoded: the whole event may be far too long for that.
    for characters, items in _LIMITS:
        short = _truncate(whole, characters, items)
        body = event_to_json(msgspec.convert(short, type(event)))
        if len(body) <= _SIZE_MAX:
            break
    return body


def _truncate(value: Any, characters: int, items: int) -> Any:
    match value:
        case str():
            return truncate(value, characters)
        case dict():
            return {key: _truncate(item, characters, items) for key, item in value.items()}
        case list() | tuple():
            return [_truncate(item, characters, items) for item in value[:items]]
    return value


def follow_job(
    endpoint: str,
    run_id: str,
    *,
    token: str | None = None,
    tls: TlsSpec | None = None,
    backend: str = "c10d",
    engine: EngineSpec | None = None,
    after: int = -1,
    timeout: float = 30.0,
) -> JobEvents:
    """Follow the events of a running job of several nodes, from any host.

    ::

        async with follow_job("node0:29400", "my-run") as events:
            async for event in events:
                print(event.seq, event)

    Args:
        endpoint: the job's endpoints, as for `RendezvousSpec`.  The first one with a store is used,
            at the start and when the store is lost.
        run_id: name of the run.
        token: the store's token, if it has one.
        tls: certificates, if the store speaks TLS, as for `connect`.
        backend: "etcd" or "redis" if the job is on such an engine.
        engine: user and keys there, as in `RendezvousSpec`.
        after: the `seq` of the last event that has been read already; -1 for none.
        timeout: seconds to search for a store, at the start and when it is lost.

    Raises:
        SpecError: an argument is unusable.
    """
    parse_endpoints("endpoint", endpoint)  # here its error names the argument
    if not checked_text("run_id", run_id):
        raise SpecError("run_id", run_id, "must not be empty")
    checked_integer("after", after, at_least=-1)
    check_number("timeout", timeout, above=0)
    is_on_engine = backend in ENGINES
    spec = RendezvousSpec(
        backend=backend if is_on_engine else "c10d",
        endpoint=endpoint,
        is_host=None if is_on_engine else False,
        token=token,
        tls=tls,
        engine=engine or EngineSpec(),
    )
    check_reader(spec)
    return JobEvents(spec, run_id, after, timeout)


class JobEvents:
    """The events of a job, in the order of the stream; made by `follow_job`.

    An async context manager, and an async iterator that ends after `JobFinished`.  `seq` is the
    number in the stream: pass it as `after` to continue from there.  Events that were deleted,
    cannot be decoded, or were lost with their writer are replaced by an `EventsMissed`.  Its
    `count` is 0 when the store was lost and another stream begins at 0; how many events were lost
    with it is unknown.

    Cancellation: of a wait for the next event loses no event.
    """

    gap_patience: float = 2.0
    """Seconds after which the writer of a missing event counts as killed."""
    turn: float = 2.0
    """Seconds for which one of several endpoints is tried before the next."""
    retry: Backoff = Backoff(initial=0.05, cap=1.0)
    """Before another attempt of a search."""

    def __init__(self, spec: RendezvousSpec, run_id: str, after: int, timeout: float) -> None:
        self._spec = spec
        self._run_id = run_id
        self._timeout = timeout
        self.has_begun = False
        """Whether the store has had events of this run, or its end."""
        self._record: RunRecord | None = None  # the stream's
        self._order = _ReorderBuffer(run_id, after + 1)
        self._gap: tuple[int, float] | None = None  # the missing number, and its deadline
        self._is_open = False
        self._connection = contextlib.AsyncExitStack()
        self._attempts = 0  # to follow a store, since the last success
        self._search_end = 0.0  # loop time at which the last of these attempts is over
        self._followed_at = 0.0  # loop time
        self._watch: Watch | None = None  # of the events, or of the beginning of the run
        self._store: Store | None = None  # of the events, once the run has begun

    def __repr__(self) -> str:
        return f"<events of {self._run_id!r} before {self._order.next}, {self._watch}>"

    async def __aenter__(self) -> Self:
        """Connect to the store.

        Raises:
            StoreTimeout: no store answers.
            StoreRefused: the store requires another token, or is not one of elastic_aio.
        """
        running_loop()
        try:
            while self._watch is None and not self._order.is_over:
                await self._advance()
        except BaseException:  # a cancellation too: no connection stays open
            await self.aclose()
            raise
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Return the next event.

        Raises:
            StoreTimeout: the store was lost, and no store answers.
            StoreRefused: as on entering.
        """
        while (event := self._order.pop()) is None:
            if self._order.is_over:
                raise StopAsyncIteration
            if not self._is_open:
                raise StoreClosed("the stream is not open: use `async with follow_job(...)`")
            await self._advance()
        return event

    async def aclose(self) -> None:
        """Close the connection, within a second."""
        self._is_open = False
        self._watch = None
        await self._connection.aclose()

    async def _advance(self) -> None:
        watch = self._watch
        try:
            if watch is None:
                await self._search()
            else:
                await self._read(watch)
                self._attempts = 0
        except StoreLost as error:
            self._watch = None  # the next call connects again
            if watch is not None and self._now() >= self._followed_at + _LOST_EARLY:
                self._attempts = 0
            else:
                await self._back_off(error)
        except BaseException:  # a cancellation too: the next call begins a search
            self._attempts = 0
            raise

    async def _search(self) -> None:
        timeout = self._timeout
        if self._attempts:
            timeout = max(0.1, round(self._search_end - self._now(), 1))
        else:
            self._search_end = self._now() + timeout
        await self._begin(timeout)
        self._followed_at = self._now()

    async def _back_off(self, error: StoreLost) -> None:
        """Wait before the next attempt; raise `StoreTimeout` if there is none."""
        left = self._search_end - self._now()
        attempts, self._attempts = self._attempts, 0
        if left <= 0:
            raise no_store(self._spec, self._timeout, str(error)) from None
        await asyncio.sleep(min(left, self.retry.delay(attempts, random.random)))
        self._attempts = attempts + 1

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _begin(self, timeout: float) -> None:
        """Connect to a store and take the events that it has."""
        self._store = self._watch = None
        await self._connection.aclose()
        root = await open_job_store(self._spec, self._run_id, timeout, self.turn)
        self._connection.push_async_callback(root.aclose)
        enter = self._connection.enter_async_context
        beginning = await enter(root.watch(f"{run_prefix(self._run_id)}/run"))
        record = await read_run(root, self._run_id)
        if record is None:
            self._watch = beginning
            return
        store = run_store(root, self._run_id, record)
        # The end first: events that are deleted between the two precede it.
        end = await read_end(store)
        watch = await enter(store.watch(EVENTS, is_prefix=True))
        count = await count_events(store)
        # Nothing is awaited from here on: an attempt that fails must not change the record.
        former, self._record = self._record, record
        if former is not None and former.job != record.job:
            self._order.end()  # another job has followed
            return
        # Each store has a record of its own, and a stream.
        is_other_stream = self.has_begun and former != record
        if is_other_stream or self._order.next > count:
            self._order.restart()
        self.has_begun = bool(count) or end is not None
        self._order.take(watch.present)
        self._order.skip_dropped(count)
        if end is not None and not count:
            self._order.end(end, record.began_at)
        self._watch, self._store = watch, store

    async def _read(self, watch: Watch) -> None:
        try:
            async with asyncio.timeout_at(self._gap_deadline()):
                change = await anext(watch)
        except TimeoutError:
            assert self._store is not None, "an event was read before the missing one"
            self._order.skip_gap(await count_events(self._store))
            return
        if self._store is None:
            self._watch = None  # the run begins: read its generation
        elif change.value is not None:  # otherwise an old event was deleted
            self.has_begun = True
            self._order.take({change.key: change.value})

    def _gap_deadline(self) -> float | None:
        if self._store is None or not self._order.has_gap:
            self._gap = None
        elif self._gap is None or self._gap[0] != self._order.next:
            self._gap = (self._order.next, asyncio.get_running_loop().time() + self.gap_patience)
        return None if self._gap is None else self._gap[1]


class _ReorderBuffer:
    """Sorts events by number, and replaces missing ones by `EventsMissed`."""

    def __init__(self, run_id: str, following: int) -> None:
        self.next = following
        self.is_over = False
        self._run_id = run_id
        self._pending: dict[int, bytes] = {}
        self._ready: deque[Event] = deque()

    @property
    def has_gap(self) -> bool:
        """Whether later events have arrived than the next."""
        return bool(self._pending)

    def pop(self) -> Event | None:
        """Return the next event, or None."""
        if not self._ready:
            return None
        event = self._ready.popleft()
        if isinstance(event, JobFinished):
            self.is_over = True
            self._ready.clear()
        return event

    def end(self, end: RunEnd | None = None, began_at: float = 0.0) -> None:
        """End the stream: its events have been deleted, and only its end is known."""
        self._pending.clear()
        self._miss(0, "" if end is None else "they were removed at the end of the job")
        if end is None:
            self.is_over = True
            return
        self._ready.append(
            JobFinished(
                seq=self.next - 1,
                time=end.ended_at,
                run_id=self._run_id,
                attempt=0,
                state=end.state,
                why=end.why,
                exit_code=end.exit_code,
                duration=max(0.0, end.ended_at - began_at) if began_at else 0.0,
                restarts=end.restarts,
            )
        )

    def restart(self) -> None:
        """Begin another stream, at 0."""
        self._pending.clear()
        self.next = 0
        self._miss(0)

    def take(self, items: Mapping[str, bytes]) -> None:
        """Take events by their keys, in any order."""
        for key, value in items.items():
            number = parse_seq(key.removeprefix(EVENTS))
            if 0 <= number == self.next - 1 and isinstance(decode_event(value), JobFinished):
                self.is_over = True  # the reader continues after the last event
            if number >= self.next:
                self._pending[number] = value
        self._release()

    def skip_dropped(self, count: int) -> None:
        """Continue at the oldest kept event, when `count` numbers have been allocated."""
        self._skip_to(min([count - KEPT, *self._pending]))

    def skip_gap(self, count: int) -> None:
        """Give up missing events; drop keys whose numbers were never allocated."""
        self._pending = {number: value for number, value in self._pending.items() if number < count}
        if self._pending:
            self._skip_to(min(self._pending))

    def _skip_to(self, number: int) -> None:
        if number > self.next:
            count, self.next = number - self.next, number
            self._miss(count)
        self._release()

    def _release(self) -> None:
        while (value := self._pending.pop(self.next, None)) is not None:
            event = decode_event(value)
            self.next += 1
            if event is None:
                self._miss(1)
            else:
                self._ready.append(replace(event, seq=self.next - 1))

    def _miss(self, count: int, why: str = "") -> None:
        now, seq = time.time(), self.next - 1
        self._ready.append(
            EventsMissed(seq=seq, time=now, run_id=self._run_id, count=count, why=why)
        )
