"""The coordinator's asyncio shell: tickets in from the store, orders out to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Never

from msgspec.structs import replace

from elastic_aio.aio import end_all, owned_task
from elastic_aio.errors import StoreError
from elastic_aio.events import Event, NodeJoined, NodeLeft, NodeLost, NodeRefused
from elastic_aio.outcome import Failure
from elastic_aio.policy import Action
from elastic_aio.rendezvous.base import Begin, Listener, NodeCard
from elastic_aio.rendezvous.state import Ask, Command, Coordinator, Publish, Raise, Rules, Send
from elastic_aio.rendezvous.stream import EventStream
from elastic_aio.rendezvous.tickets import (
    PROTOCOL,
    Order,
    Refuse,
    Unreadable,
    in_our_time,
    read_ticket,
    written,
)
from elastic_aio.restarts import RestartBook
from elastic_aio.store.base import Change, ChangeKind, Lease, Store, Watch

__all__ = ["Office"]

_SHOWN_HERE = (NodeJoined, NodeLeft, NodeLost, NodeRefused)
"""What the coordinating node's own readers would not hear of otherwise."""


class Office:
    """Coordinates a job at one store, once this member has been elected."""

    def __init__(
        self,
        rules: Rules,
        book: RestartBook,
        listener: Listener,
        *,
        card: NodeCard,
        run_id: str,
        root: Store | None,
    ) -> None:
        """Prepare.

        Args:
            rules: what the job wants.
            book: judges failures.
            listener: the agent of this node.
            card: who this node is.
            run_id: name of the run.
            root: the whole store, if the workers meet there too; what those of a
                former round left in it is removed before the next.
        """
        self._root = root
        self._rules = rules
        self._book = book
        self._listener = listener
        self._card = card
        self._run_id = run_id
        self._news = asyncio.Event()
        self._changes: list[Change] = []
        self._unwritten: list[Event] = []
        self._has_unwritten = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._own_key = ""
        self._is_parting = False
        self.has_parted = asyncio.Event()
        """Set once the others have been told that this member's ticket is gone."""
        self._cleared: set[tuple[int, str]] = set()

    async def hold(
        self,
        store: Store,
        lease: Lease,
        *,
        name: str,
        epoch: int,
        is_new_store: bool,
        announce: Callable[[int], Awaitable[None]],
    ) -> Never:
        """Coordinate until the store is lost, or the caller cancels; may be done again.

        Args:
            store: where the members meet.
            lease: of this member; its end ends the office.
            name: of this member.
            epoch: of this office.
            is_new_store: whether nobody has coordinated at this store before.
            announce: makes a higher epoch known; what it raises ends the office.

        Raises:
            StoreError: the store is lost, or the lease has ended.
        """
        self._changes.clear()
        coordinator = Coordinator(
            self._rules,
            self._book,
            name=name,
            epoch=epoch,
            now=self._clock(),
            is_new_store=is_new_store,
        )
        self._own_key = f"t/{name}"
        async with store.watch("t/", is_prefix=True) as tickets:
            for key, text in tickets.present.items():
                await self._take(coordinator, lease, key, text, is_fresh=False)
            helpers = [
                owned_task(self._collect(tickets), name="tickets"),
                owned_task(self._write_events(EventStream(store)), name="events of the job"),
            ]
            try:
                while True:
                    await self._perform(coordinator, lease, announce)
                    if self._is_parting:
                        self.has_parted.set()
                    await self._next_news(coordinator.deadline, helpers[0])
                    await self._take_news(coordinator, lease)
            finally:
                if self._asking is not None:
                    helpers.append(self._asking)
                await end_all(helpers)

    # --------------------------------------------------------------- tickets in

    async def _collect(self, tickets: Watch) -> None:
        async for change in tickets:
            self._changes.append(change)
            self._news.set()

    async def _next_news(self, deadline: float | None, collecting: asyncio.Task[None]) -> None:
        """Wait for news, or for the time at which something has to be decided."""
        waiting = owned_task(self._news.wait())
        left = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            await asyncio.wait(
                [waiting, collecting], timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        if collecting.done():
            collecting.result()
        self._news.clear()

    async def _take_news(self, coordinator: Coordinator, lease: Lease) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            if change.value is not None:
                await self._take(coordinator, lease, change.key, change.value, is_fresh=True)
            else:
                # Why a key has gone is not known after a gap; a death is to be expected.
                self._is_parting = self._is_parting or change.key == self._own_key
                is_lost = change.kind is ChangeKind.EXPIRED or change.is_resync
                coordinator.gone(_member_of(change.key), is_lost=is_lost)

    async def _take(
        self, coordinator: Coordinator, lease: Lease, key: str, text: bytes, *, is_fresh: bool
    ) -> None:
        member = _member_of(key)
        try:
            ticket = read_ticket(text)
        except Unreadable as error:
            why = f"its ticket cannot be read by this version ({PROTOCOL}): {error}"
            refusal = Order(coordinator.epoch, 1, Refuse(why))
            await lease.set(f"o/{member}", written(refusal))
            return
        coordinator.ticket(member, in_our_time(ticket, time.time()) if is_fresh else ticket)

    # --------------------------------------------------------------- orders out

    async def _perform(
        self,
        coordinator: Coordinator,
        lease: Lease,
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        orders: dict[str, Order] = {}  # only the last one for each member matters
        for command in coordinator.decide(self._clock()):
            await self._do(command, coordinator, orders, announce)
        begun = {which for one in orders.values() if (which := _round_of(one)) is not None}
        if self._root is not None and not begun <= self._cleared:
            # Only once for each: an order may be given again under a higher epoch.
            await _clear(self._root)
            self._cleared = begun
        if orders:
            await _all(lease.set(f"o/{member}", written(one)) for member, one in orders.items())

    async def _do(
        self,
        command: Command,
        coordinator: Coordinator,
        orders: dict[str, Order],
        announce: Callable[[int], Awaitable[None]],
    ) -> None:
        match command:
            case Send(member, order):
                orders[member] = order
            case Raise(epoch):
                await announce(epoch)
            case Publish(event):
                self._publish(event)
            case Ask(attempt, failure):
                asking = self._ask(coordinator, attempt, failure)
                self._asking = owned_task(asking, name="restart.decide")

    async def _ask(self, coordinator: Coordinator, attempt: int, failure: Failure) -> None:
        try:
            action = await self._listener.decide(failure)
            if not isinstance(action, Action):
                raise TypeError(f"restart.decide must return an Action, not {action!r}")
        except Exception as error:  # noqa: BLE001  # the user's code; the job ends by it
            coordinator.decide_failed(attempt, f"restart.decide raised {error!r}")
        else:
            coordinator.decided(attempt, action)
        self._news.set()

    # ------------------------------------------------------------------- events

    def _publish(self, event: Event) -> None:
        if isinstance(event, _SHOWN_HERE):
            self._listener.told(event)
        stamped = replace(event, time=time.time(), run_id=self._run_id, node=self._card.name)
        self._unwritten.append(stamped)
        self._has_unwritten.set()

    async def _write_events(self, stream: EventStream) -> None:
        """Write what happens into the job's stream, without holding up any order."""
        while True:
            await self._has_unwritten.wait()
            self._has_unwritten.clear()
            events, self._unwritten = self._unwritten, []
            for _ in range(2):  # a connection that breaks may be back already
                with contextlib.suppress(StoreError):  # whoever follows sees a gap
                    await stream.write(events)
                    break

    @staticmethod
    def _clock() -> float:
        return time.monotonic()


async def _all(work: Iterable[Awaitable[object]]) -> None:
    """Do all of it at once: the connection carries the requests one after the other."""
    await asyncio.gather(*work)


def _round_of(order: Order) -> tuple[int, str] | None:
    """Return which round an order lets begin, if it does."""
    if not isinstance(order.body, Begin):
        return None
    return order.body.placement.round, order.body.placement.origin


async def _clear(root: Store) -> None:
    """Remove all keys but those of rendezvous."""
    keys = [key for key in await root.list_keys() if not key.startswith("elastic_aio/")]
    await _all(root.delete(key) for key in keys)


def _member_of(key: str) -> str:
    return key.partition("/")[2]
