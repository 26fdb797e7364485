"""Looking at endpoints: who answers there, and if it is no store of ours, what it is."""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
import socket
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.aio import owned_task, see_through
from elastic_aio.backoff import Backoff
from elastic_aio.errors import StoreError
from elastic_aio.rendezvous.addresses import addresses_of, is_local
from elastic_aio.rendezvous.choosing import Sight
from elastic_aio.store import RemoteStore, connect
from elastic_aio.store.listen import Address, parse_endpoint, shown_endpoint

__all__ = ["Absent", "Answer", "Point", "Scout", "Terms", "look"]

_DIAL_TIMEOUT: Final = 2.0
"""Seconds for a connection: long enough for the kernel to send its first packet again."""

_ANSWER_TIMEOUT: Final = 2.0
_RESOLVE_PATIENCE: Final = 1.0
_FRESH: Final = 1.0
"""Seconds for which an address that was looked up is used again."""

_MOST_ADDRESSES: Final = 16
_MOST_WORDS: Final = 200
_RETRY: Final = Backoff(initial=0.05, factor=1.3, cap=1.0)

_WORDS_FOR: Final = {
    errno.ECONNREFUSED: "refused, nobody listens there",
    errno.ENETUNREACH: "no route to it",
    errno.EHOSTUNREACH: "no route to it",
    errno.ENETDOWN: "no route to it",
    errno.EADDRNOTAVAIL: "no route to it",
    errno.ETIMEDOUT: "does not answer",
}


class Point(Struct, frozen=True):
    """One endpoint of the list."""

    index: int
    text: str
    host: str
    port: int

    @classmethod
    def parse(cls, index: int, text: str) -> Point:
        """Read `HOST:PORT` or `[IPV6]:PORT`; port 0 is for who serves it alone.

        Raises:
            SpecError: it is neither.
        """
        return cls(index, text, *parse_endpoint(text, lowest=0))

    def with_port(self, port: int) -> str:
        """Return the endpoint as text, with another port."""
        return f"{self.text.rpartition(':')[0]}:{port}"


class Terms(Struct, frozen=True):
    """How a store is spoken to.

    Attributes:
        token: what it asks for, if anything.
        silence: seconds of silence after which it is lost.
        reconnect_for: seconds to try again when only the connection is lost.
        run_key: the key that is there while this run is under way.
    """

    token: str | None
    silence: float
    reconnect_for: float
    run_key: str

    @property
    def patience(self) -> float:
        """Seconds of silence after which a connection is given up."""
        return self.silence - self.reconnect_for


class Answer(Struct, frozen=True):
    """A store of ours, connected, and what is known of it."""

    store: RemoteStore
    local_address: str
    has_run: bool


class Absent(Exception):
    """There is no store of ours; the message says what there is.

    `is_stranger`: somebody took the connection.
    """

    def __init__(self, why: str, *, is_stranger: bool = False) -> None:
        """Say `why`, of which strangers may have written a part: it is made one line."""
        text = "".join(char if char.isprintable() else " " for char in why)
        super().__init__(text[:_MOST_WORDS])
        self.is_stranger = is_stranger


async def look(addresses: Sequence[Address], terms: Terms) -> Answer:
    """Return the store that answers at one of `addresses`; it takes 4 s at most.

    All are tried at once: one that drops packets holds up no other.  The caller
    closes the store.  Cancelling leaves nothing behind.

    Raises:
        Absent: there is none.
    """
    if not addresses:
        raise Absent("its name has no address")
    tasks = [owned_task(_knock(address, terms)) for address in addresses[:_MOST_ADDRESSES]]
    try:
        best = await _first_answer(tasks)
        await see_through(lambda: _let_go(tasks, best))
    except BaseException:  # a cancellation too: no connection stays open
        await see_through(lambda: _let_go(tasks, None))
        raise
    return best


async def _first_answer(tasks: Sequence[asyncio.Task[Answer]]) -> Answer:
    reasons: list[Absent] = []
    for finished in asyncio.as_completed(tasks):
        try:
            return await finished
        except Absent as error:
            reasons.append(error)
    # Who took the connection tells more than who did not.
    raise max(reasons, key=lambda one: one.is_stranger)


async def _let_go(tasks: Sequence[asyncio.Task[Answer]], kept: Answer | None) -> None:
    """End what is under way, and close what was found, `kept` excepted."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if task.cancelled() or task.exception() is not None or task.result() is kept:
            continue
        await task.result().store.aclose()


async def _knock(address: Address, terms: Terms) -> Answer:
    store = connect(
        shown_endpoint(address[1]),
        reply_timeout=terms.patience,
        reconnect_for=terms.reconnect_for,
        silence=terms.silence,
        token=terms.token,
        is_watchful=True,
        outlives_server=False,
    )
    try:
        sock = await _dial(address)
        local_address = str(sock.getsockname()[0])
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            await store.connect_over(sock)
            if not store.has_extensions:
                why = "a plain TCPStore is there, which has no leases"
                raise Absent(why, is_stranger=True)
            has_run = await store.peek(terms.run_key) is not None
    except TimeoutError:
        await store.aclose()
        raise Absent("what listens there does not answer", is_stranger=True) from None
    except StoreError as error:
        await store.aclose()
        raise Absent(str(error), is_stranger=True) from None
    except BaseException:  # a cancellation too: no connection stays open
        await store.aclose()
        raise
    return Answer(store, local_address, has_run)


async def _dial(address: Address) -> socket.socket:
    family, name = address
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Absent(_in_words(error)) from None
    try:
        sock.setblocking(False)
        async with asyncio.timeout(_DIAL_TIMEOUT):
            await asyncio.get_running_loop().sock_connect(sock, name)
        if sock.getsockname() == sock.getpeername():
            # A port that the kernel gives to those who dial: we have reached ourselves.
            raise Absent(_WORDS_FOR[errno.ECONNREFUSED])
    except TimeoutError:  # ours, or the kernel's ETIMEDOUT
        sock.close()
        raise Absent(_WORDS_FOR[errno.ETIMEDOUT]) from None
    except OSError as error:
        sock.close()
        raise Absent(_in_words(error)) from None
    except BaseException:  # a cancellation too: no connection stays open
        sock.close()
        raise
    return sock


def _in_words(error: OSError) -> str:
    return _WORDS_FOR.get(error.errno or 0) or error.strerror or str(error)


class Scout:
    """Looks at one endpoint, again and again, until there is a store of ours.

    Must be closed.
    """

    def __init__(self, point: Point, terms: Terms, on_news: Callable[[], None]) -> None:
        """Begin; `on_news` is called when `sight` has changed."""
        self.point = point
        self.addresses: tuple[Address, ...] = ()
        self.own_addresses: tuple[Address, ...] = ()
        """Those of `addresses` that are this machine's."""
        self.sight = Sight.NOTHING_YET
        self.why = "does not answer"
        """Why there is no store."""
        self.answer: Answer | None = None
        self._terms = terms
        self._on_news = on_news
        self._again = asyncio.Event()
        self._resolved_at = 0.0
        self._task = owned_task(self._run(), f"look at {point.text}")
        self._task.add_done_callback(lambda _: on_news())

    def __repr__(self) -> str:
        return f"<scout of {self.point.text}: {self.sight.name}, {self.why}>"

    def check(self) -> None:
        """Raise what should not have happened."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    def look_again(self) -> None:
        """Do it now, not when it would be time."""
        self._again.set()

    async def give(self) -> Answer:
        """Stop, and hand over the store that has been found."""
        await self._stop()
        answer, self.answer = self.answer, None
        assert answer is not None, self
        return answer

    async def aclose(self) -> None:
        """Stop; a store that was found is closed.  May be started over."""
        await self._stop()
        if self.answer is not None:
            await self.answer.store.aclose()

    async def _stop(self) -> None:
        self._task.cancel()
        if not self._task.done():
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        for attempt in itertools.count():
            self._again.clear()
            await self._resolve()
            if self.point.port == 0:
                self._miss("port 0 is known only to the node that serves it")
                return
            if self.addresses:
                await self._look()
            await self._pause(_RETRY.delay(attempt, random.random))

    async def _look(self) -> None:
        try:
            self.answer = await look(self.addresses, self._terms)
        except Absent as error:
            self._miss(str(error))
            return
        self.sight = Sight.RUN if self.answer.has_run else Sight.STORE
        self._on_news()
        why = await self.answer.store.wait_lost()
        self.answer = None
        self._miss(why)

    def _miss(self, why: str) -> None:
        self.sight, self.why = Sight.ABSENT, why
        self._on_news()

    async def _pause(self, seconds: float) -> None:
        """Wait: nothing tells when somebody begins to listen."""
        try:
            async with asyncio.timeout(seconds):
                await self._again.wait()
        except TimeoutError:
            pass

    async def _resolve(self) -> None:
        """Look the addresses up, unless it was done just now."""
        loop = asyncio.get_running_loop()
        if self.addresses and loop.time() - self._resolved_at < _FRESH:
            return
        late = loop.call_later(_RESOLVE_PATIENCE, self._miss, "its name is still being looked up")
        try:
            self.addresses = await addresses_of(self.point.host, self.point.port)
        except OSError as error:
            # Those of before may still be right.
            self._miss(f"its name is unknown: {error.strerror or error}")
        finally:
            late.cancel()
        self.own_addresses = tuple(filter(is_local, self.addresses))
        self._resolved_at = loop.time()
