"""Reads the event stream of a job of several nodes, in order, from any host."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

import msgspec

from elastic_aio.aio import running_loop
from elastic_aio.discovery.keys import RunEnd, RunRecord, read_end, read_run, run_prefix, run_store
from elastic_aio.errors import SpecError, StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.events import Event, EventsMissed, JobFinished
from elastic_aio.rendezvous.event_stream import (
    COUNT,
    EVENTS,
    IDENTITY,
    KEPT,
    decode_event,
    parse_seq,
)
from elastic_aio.spec.checks import check_number, checked_integer, checked_text
from elastic_aio.spec.engine import EngineSpec
from elastic_aio.spec.rendezvous import (
    DEFAULT_PORT,
    ENGINES,
    RendezvousSpec,
    engine_port,
    parse_endpoints,
)
from elastic_aio.spec.tls import TlsSpec
from elastic_aio.store import RemoteStore, Store, Watch, connect
from elastic_aio.store.handshake import client_context

_GAP_PATIENCE: Final = 2.0
"""Seconds after which the writer of a missing event counts as killed."""

_TURN: Final = 2.0
"""Seconds for which one of several endpoints is tried before the next."""


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
        endpoint: the job's endpoints, as for `RendezvousSpec`.  The first one with a
            store is used, at the start and when the store is lost.
        run_id: name of the run.
        token: the store's token, if it has one.
        tls: certificates, if the store speaks TLS, as for `connect`.
        backend: that of the job, if it is on an engine: "etcd" or "redis".
        engine: user and keys there, as in `RendezvousSpec`.
        after: the `seq` of the last event that has been read already; -1 for none.
        timeout: seconds to search for a store, at the start and when it is lost.

    Raises:
        SpecError: an argument is unusable.
    """
    is_on_engine = backend in ENGINES
    endpoints = parse_endpoints(
        "endpoint", endpoint, engine_port(backend) if is_on_engine else DEFAULT_PORT
    )
    if not checked_text("run_id", run_id):
        raise SpecError("run_id", run_id, "must not be empty")
    checked_integer("after", after, at_least=-1)
    check_number("timeout", timeout, above=0)
    client_context(tls)  # only checked: it is loaded again for each connection
    if is_on_engine:
        spec = RendezvousSpec(
            backend=backend,
            endpoint=endpoint,
            token=token,
            tls=tls,
            engine=engine or EngineSpec(),
        )
        spec.check_with(2)
        from elastic_aio.discovery.engine import open_engine

        @contextlib.asynccontextmanager
        async def open_store(_: str, turn: float) -> AsyncIterator[Store]:
            store = open_engine(spec, run_id, is_reader=True)
            try:
                await store.open(turn)
                yield store
            finally:
                await store.aclose()

        return JobEvents([",".join(endpoints)], run_id, after, timeout, open_store)

    def connect_to(one: str, turn: float) -> RemoteStore:
        # No reconnecting: `JobEvents` connects again, perhaps to another endpoint.
        return connect(one, timeout=turn, reconnect_for=0, token=token, tls=tls)

    return JobEvents(endpoints, run_id, after, timeout, connect_to)


class JobEvents:
    """The events of a job, in the order of the stream; made by `follow_job`.

    An async context manager, and an async iterator that ends after `JobFinished`.
    `seq` is the number in the stream: pass it as `after` to continue from there.
    Events that were deleted, cannot be decoded, or were lost with their writer are
    replaced by an `EventsMissed`.  One with `count` 0 means that the store was lost and
    another stream begins at 0; how many events were lost with it is unknown.

    Cancellation: of a wait for the next event loses no event.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        run_id: str,
        after: int,
        timeout: float,
        open_store: Callable[[str, float], AbstractAsyncContextManager[Store]],
    ) -> None:
        """See `follow_job`."""
        self._endpoints = endpoints
        self._run_id = run_id
        self._open_store = open_store  # at an endpoint, within a time in seconds
        self._timeout = timeout
        self._identity: bytes | None = None
        self._job = ""
        self._has_end = False
        self._order = _ReorderBuffer(run_id, after + 1)
        self._source: _Subscription | None = None
        self._gap: tuple[int, float] | None = None  # the missing number, and its deadline
        self._is_open = False

    def __repr__(self) -> str:
        return f"<events of {self._run_id!r} before {self._order.next}, {self._source}>"

    @property
    def has_begun(self) -> bool:
        """Whether the store had events of this run, or its end, when it was last read."""
        return self._identity is not None or self._has_end

    async def __aenter__(self) -> Self:
        """Connect to the store.

        Raises:
            StoreTimeout: no store answers.
            StoreRefused: the store requires another token, or is not one of elastic_aio.
        """
        running_loop()
        try:
            await self._begin()
        except BaseException:  # a cancellation too: no connection stays open
            await self.aclose()
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            if self._source is None:
                await self._begin()
            else:
                await self._read(self._source)
        return event

    async def aclose(self) -> None:
        """Close the connection, within a second."""
        self._is_open = False
        source, self._source = self._source, None
        if source is not None:
            await source.stack.aclose()

    async def _begin(self) -> None:
        """Connect to a store and take the events that it has."""
        source = await _Subscription.open(
            self._endpoints, self._run_id, self._timeout, self._open_store
        )
        self._source = source
        if source.record is None:
            return  # the run has not begun
        if self._job not in ("", source.record.job):
            self._order.end()  # another job has followed the one that was read
            return
        self._job = source.record.job
        count = await self._count(source)
        if count is None:
            return  # lost again: the next call connects again
        present = source.watch.present
        identity = present.pop(IDENTITY, None)
        is_other_stream = self._identity is not None and identity != self._identity
        if is_other_stream or self._order.next > count:
            self._order.restart()
        self._identity = identity
        self._order.take(present)
        self._order.skip_dropped(count)
        self._has_end = source.end is not None
        if source.end is not None and not count:
            self._order.end(source.end, source.record.began_at)

    async def _read(self, source: _Subscription) -> None:
        """Wait for a change of the stream, and take it."""
        try:
            async with asyncio.timeout_at(self._gap_deadline()):
                change = await anext(source.watch)
        except TimeoutError:
            if (count := await self._count(source)) is not None:
                self._order.skip_gap(count)
            return
        except StoreLost:
            await self._drop(source)
            return
        if source.record is None:
            await self._drop(source)  # the run begins: read its generation
            return
        if change.value is None:
            return  # an old event was deleted
        if change.key == IDENTITY:
            self._identity = change.value
        else:
            self._order.take({change.key: change.value})

    def _gap_deadline(self) -> float | None:
        """Return until when to wait for a missing event; None if none is missing."""
        if not self._order.has_gap:
            self._gap = None
        elif self._gap is None or self._gap[0] != self._order.next:
            self._gap = (self._order.next, asyncio.get_running_loop().time() + _GAP_PATIENCE)
        return None if self._gap is None else self._gap[1]

    async def _count(self, source: _Subscription) -> int | None:
        """Return how many numbers have been allocated; None if the store is lost."""
        try:
            count = await source.store.peek(COUNT)
        except StoreLost:
            await self._drop(source)
            return None
        return 0 if count is None else parse_seq(count.decode("ascii", "replace"))

    async def _drop(self, source: _Subscription) -> None:
        self._source = None
        await source.stack.aclose()


class _Subscription(msgspec.Struct):
    """A connection to the store, and a watch of the stream there."""

    store: Store
    record: RunRecord | None
    end: RunEnd | None
    watch: Watch
    stack: contextlib.AsyncExitStack

    @classmethod
    async def open(
        cls,
        endpoints: Sequence[str],
        run_id: str,
        timeout: float,
        open_store: Callable[[str, float], AbstractAsyncContextManager[Store]],
    ) -> _Subscription:
        """Connect to the first store that accepts the connection.

        Raises:
            StoreTimeout: no store answers.
            StoreRefused: every store that answers refuses the connection.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        reasons: dict[str, str] = {}
        while True:
            refusal: StoreRefused | None = None
            for endpoint in endpoints:
                left = max(0.0, end - loop.time())
                turn = left if len(endpoints) == 1 else min(left, _TURN)
                try:
                    return await cls._open(open_store(endpoint, turn), run_id)
                except StoreRefused as error:
                    refusal = error
                except (StoreTimeout, StoreLost) as error:
                    # Try the next.  The last turn is short and may only add "no answer".
                    reason = str(error).rpartition(": ")[2]
                    if reason != "no answer" or endpoint not in reasons:
                        reasons[endpoint] = f"{endpoint}: {reason}"
            if refusal is not None:
                raise refusal
            if loop.time() >= end:
                text = f"no store at {', '.join(endpoints)} within {timeout:g} s"
                raise StoreTimeout(f"{text}: {'; '.join(reasons.values())}")

    @classmethod
    async def _open(cls, opening: AbstractAsyncContextManager[Store], run_id: str) -> _Subscription:
        async with contextlib.AsyncExitStack() as stack:
            root = await stack.enter_async_context(opening)
            beginning = await stack.enter_async_context(root.watch(f"{run_prefix(run_id)}/run"))
            record = await read_run(root, run_id)
            if record is None:
                return cls(root, None, None, beginning, stack.pop_all())
            store = run_store(root, run_id, record)
            # The end first: events that are deleted between the two are those before it.
            end = await read_end(store)
            watch = await stack.enter_async_context(store.watch(EVENTS, is_prefix=True))
            return cls(store, record, end, watch, stack.pop_all())


class _ReorderBuffer:
    """Sorts events by number, and replaces missing ones by `EventsMissed`."""

    def __init__(self, run_id: str, following: int) -> None:
        """Begin with number `following`."""
        self.next = following
        self.is_over = False
        self._run_id = run_id
        self._pending: dict[int, bytes] = {}
        self._ready: deque[Event] = deque()

    @property
    def has_gap(self) -> bool:
        """Whether later events have arrived than the next one."""
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
        self._miss(0)
        if end is None:
            self.is_over = True
            return
        finished = JobFinished(
            attempt=0,
            state=end.state,
            why=end.why,
            exit_code=end.exit_code,
            duration=max(0.0, end.ended_at - began_at) if began_at else 0.0,
            restarts=end.restarts,
        )
        self._ready.append(
            msgspec.structs.replace(
                finished, seq=self.next - 1, time=end.ended_at, run_id=self._run_id
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
                self._ready.append(msgspec.structs.replace(event, seq=self.next - 1))

    def _miss(self, count: int) -> None:
        missed = EventsMissed(seq=self.next - 1, time=time.time(), run_id=self._run_id, count=count)
        self._ready.append(missed)
