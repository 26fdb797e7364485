"""The events of a job of several nodes, followed from anywhere, in their order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from elastic_aio.checks import check_number, checked_integer, checked_text
from elastic_aio.errors import SpecError, StoreClosed, StoreLost, StoreRefused, StoreTimeout
from elastic_aio.events import Event, EventsMissed, JobFinished
from elastic_aio.rendezvous.stream import COUNT, EVENTS, IDENTITY, KEPT, event_in, number_in
from elastic_aio.rendezvousspec import parse_endpoints
from elastic_aio.store import Store, Watch, connect

__all__ = ["JobEvents", "follow_job"]

_GAP_PATIENCE: Final = 2.0
"""Seconds after which the writer that leaves a gap counts as dead."""

_TURN: Final = 2.0
"""Seconds that one of several endpoints is tried before the next one is."""


def follow_job(
    endpoint: str,
    run_id: str,
    *,
    token: str | None = None,
    after: int = -1,
    timeout: float = 30.0,
) -> JobEvents:
    """Follow the events of a running job of several nodes, from anywhere.

    ::

        async with follow_job("node0:29400", "my-run") as events:
            async for event in events:
                print(event.seq, event)

    Args:
        endpoint: where the job's nodes meet, as for `RendezvousSpec`; of several the
            first one is taken at which there is a store, at the start and when the
            store is lost.
        run_id: the job's.
        token: the store's token, if it has one.
        after: the `seq` of the last event that is known already.
        timeout: seconds to look for a store, at the start and when it is lost.

    Raises:
        SpecError: an argument is unusable.
    """
    endpoints = parse_endpoints("endpoint", endpoint)
    if not checked_text("run_id", run_id):
        raise SpecError("run_id", run_id, "must not be empty")
    checked_integer("after", after, at_least=-1)
    check_number("timeout", timeout, above=0)
    return JobEvents(endpoints, run_id, token, after, timeout)


class JobEvents:
    """The events of a job, in the order of the stream; made by `follow_job`.

    An async context manager, and an async iterator that ends after `JobFinished`.
    `seq` is the number in the stream: give it as `after` to go on from there.  What
    was dropped, cannot be read, or was lost with its writer is an `EventsMissed`; one
    with `count` 0 tells that the store was lost, and that another stream begins with
    numbers from 0 (how many events were lost with the store is not known).

    Cancelling a wait for the next event loses none.
    """

    def __init__(
        self, endpoints: Sequence[str], run_id: str, token: str | None, after: int, timeout: float
    ) -> None:
        """See `follow_job`."""
        self._endpoints = endpoints
        self._run_id = run_id
        self._token = token
        self._timeout = timeout
        self._identity: bytes | None = None
        self._order = _Order(run_id, after + 1)
        self._source: _Source | None = None
        self._gap: tuple[int, float] | None = None  # which number is missing, and until when
        self._is_open = False

    def __repr__(self) -> str:
        return f"<events of {self._run_id!r} before {self._order.next}, {self._source}>"

    @property
    def has_begun(self) -> bool:
        """Whether the store knows of events of this run, as far as has been seen."""
        return self._identity is not None

    async def __aenter__(self) -> Self:
        """Connect to the store.

        Raises:
            StoreTimeout: no store answers.
            StoreRefused: a store wants another token, or is not ours.
        """
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
            StoreTimeout: the store was lost, and no other answers.
            StoreRefused: as on entering.
        """
        while (event := self._order.pop()) is None:
            if self._order.is_over:
                raise StopAsyncIteration
            if not self._is_open:
                raise StoreClosed("nothing is followed: use `async with follow_job(...)`")
            if self._source is None:
                await self._begin()
            else:
                await self._read(self._source)
        return event

    async def aclose(self) -> None:
        """Close the connection.  It takes a second at most."""
        self._is_open = False
        source, self._source = self._source, None
        if source is not None:
            await source.aclose()

    async def _begin(self) -> None:
        """Find a store and take what is there."""
        source = await _Source.open(self._endpoints, self._run_id, self._token, self._timeout)
        self._source = source
        count = await self._count(source)
        if count is None:
            return  # lost again; the next turn looks for a store again
        present = source.watch.present
        identity = present.pop(IDENTITY, None)
        is_another = self._identity is not None and identity != self._identity
        if is_another or self._order.next > count:
            self._order.begin_anew()
        self._identity = identity
        self._order.take(present)
        self._order.skip_dropped(count)

    async def _read(self, source: _Source) -> None:
        """Wait for something to happen, and take it."""
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
        if change.value is None:
            return  # an old event was deleted
        if change.key == IDENTITY:
            self._identity = change.value
        else:
            self._order.take({change.key: change.value})

    def _gap_deadline(self) -> float | None:
        """Until when to wait for the event that is missing, if one is."""
        if not self._order.has_gap:
            self._gap = None
        elif self._gap is None or self._gap[0] != self._order.next:
            self._gap = (self._order.next, asyncio.get_running_loop().time() + _GAP_PATIENCE)
        return None if self._gap is None else self._gap[1]

    async def _count(self, source: _Source) -> int | None:
        """Return how many numbers have been given; None if the store has just been lost."""
        try:
            count = await source.store.peek(COUNT)
        except StoreLost:
            await self._drop(source)
            return None
        return 0 if count is None else number_in(count.decode("ascii", "replace"))

    async def _drop(self, source: _Source) -> None:
        self._source = None
        await source.aclose()


class _Source:
    """A connection to the store, and the watch of the stream there."""

    def __init__(self, stack: contextlib.AsyncExitStack, store: Store, watch: Watch) -> None:
        self.store = store
        self.watch = watch
        self._stack = stack

    @classmethod
    async def open(
        cls, endpoints: Sequence[str], run_id: str, token: str | None, timeout: float
    ) -> _Source:
        """Connect to the first store that can be had.

        Raises:
            StoreTimeout: none answers.
            StoreRefused: none answers that would do it.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while True:
            refusal: StoreRefused | None = None
            for endpoint in endpoints:
                left = max(0.0, end - loop.time())
                turn = left if len(endpoints) == 1 else min(left, _TURN)
                try:
                    return await cls._open(endpoint, run_id, token, turn)
                except StoreRefused as error:
                    refusal = error
                except (StoreTimeout, StoreLost):
                    pass  # it is the next one's turn
            if refusal is not None:
                raise refusal
            if loop.time() >= end:
                raise StoreTimeout(f"no store at {', '.join(endpoints)} within {timeout:g} s")

    @classmethod
    async def _open(cls, endpoint: str, run_id: str, token: str | None, turn: float) -> _Source:
        async with contextlib.AsyncExitStack() as stack:
            # Connecting again is ours to do: perhaps to another endpoint.
            client = connect(endpoint, timeout=turn, reconnect_for=0, token=token)
            store = (await stack.enter_async_context(client)).prefixed(f"elastic_aio/{run_id}")
            watch = await stack.enter_async_context(store.watch(EVENTS, is_prefix=True))
            return cls(stack.pop_all(), store, watch)

    async def aclose(self) -> None:
        await self._stack.aclose()


class _Order:
    """Puts what comes into order: numbers in, events out."""

    def __init__(self, run_id: str, following: int) -> None:
        """Begin with number `following`."""
        self.next = following
        self.is_over = False
        self._run_id = run_id
        self._held: dict[int, bytes] = {}
        self._ready: deque[Event] = deque()

    @property
    def has_gap(self) -> bool:
        """Whether events have come that others should come before."""
        return bool(self._held)

    def pop(self) -> Event | None:
        """Return the next event, if it is there."""
        if not self._ready:
            return None
        event = self._ready.popleft()
        if isinstance(event, JobFinished):
            self.is_over = True
            self._ready.clear()
        return event

    def begin_anew(self) -> None:
        """Another stream begins, at 0."""
        self._held.clear()
        self.next = 0
        self._miss(0)

    def take(self, items: Mapping[str, bytes]) -> None:
        """Take keys of events, in any order."""
        for key, value in items.items():
            number = number_in(key.removeprefix(EVENTS))
            if 0 <= number == self.next - 1 and isinstance(event_in(value), JobFinished):
                self.is_over = True  # its reader has had it, and goes on after it
            if number >= self.next:
                self._held[number] = value
        self._release()

    def skip_dropped(self, count: int) -> None:
        """Go on at the oldest that is kept, when `count` numbers have been given."""
        self._skip_to(min([count - KEPT, *self._held]))

    def skip_gap(self, count: int) -> None:
        """Give up what is missing; what has a number that was never given is no event."""
        self._held = {number: value for number, value in self._held.items() if number < count}
        if self._held:
            self._skip_to(min(self._held))

    def _skip_to(self, number: int) -> None:
        if number > self.next:
            count, self.next = number - self.next, number
            self._miss(count)
        self._release()

    def _release(self) -> None:
        while (value := self._held.pop(self.next, None)) is not None:
            event = event_in(value)
            self.next += 1
            if event is None:
                self._miss(1)
            else:
                self._ready.append(msgspec.structs.replace(event, seq=self.next - 1))

    def _miss(self, count: int) -> None:
        missed = EventsMissed(seq=self.next - 1, time=time.time(), run_id=self._run_id, count=count)
        self._ready.append(missed)
