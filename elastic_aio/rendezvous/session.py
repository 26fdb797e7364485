"""One member's time at one store: its lease, its ticket, its orders, and the election.

Keys, under `elastic_aio/<run id>/`:

* `t/<member>`: the member's ticket, under its lease;
* `o/<member>`: the coordinator's order for it, under the coordinator's lease, so that
  the store refuses what a coordinator writes who has lost the office;
* `coordinator`: who holds the office, under the same lease;
* `epochs`: how many have held it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from msgspec.structs import replace

from elastic_aio.aio import end_all, owned_task
from elastic_aio.errors import StoreError, StoreLost
from elastic_aio.rendezvous.incumbent import Incumbent, read_incumbent
from elastic_aio.rendezvous.member import Member, Reaction
from elastic_aio.rendezvous.office import Office
from elastic_aio.rendezvous.points import Found, MeetingPoints
from elastic_aio.rendezvous.tickets import Unreadable, read_order, written
from elastic_aio.store.base import ChangeKind, Lease, Store, Watch

__all__ = ["Session"]

T = TypeVar("T")

_LINGER_S = 0.2
"""How long a lease outlives its connection: a reset is no death."""
_DEFERENCE_S = 0.3
"""How long those who do not serve the store leave the office to the one who does."""


class Session:
    """Takes part at one store until it is lost."""

    def __init__(
        self,
        found: Found,
        points: MeetingPoints,
        office: Office,
        *,
        name: str,
        run_id: str,
        member: Member,
        ttl: float,
        act: Callable[[Iterable[Reaction]], None],
        on_attended: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            found: the store.
            points: knows the others.
            office: coordinates, if this member is elected.
            name: unique name of the member.
            run_id: name of the run.
            member: decides what the member does.
            ttl: seconds of silence after which the member counts as lost.
            act: performs what the member decides.
            on_attended: called when the others know that the member is there.
        """
        self._found = found
        self._points = points
        self._office = office
        self._name = name
        self._store: Store = found.store.prefixed(f"elastic_aio/{run_id}")
        self._member = member
        self._ttl = ttl
        self._act = act
        self._on_attended = on_attended
        self._changed = asyncio.Event()
        self._known = -1  # serial of the last ticket that has been written
        self._is_known = asyncio.Event()
        self._is_over = False
        self._mandates: set[bytes] = set()
        """What this member has written into the key `coordinator` by its present lease."""
        self._is_elected = False
        self._is_seeing_off = False

    def __repr__(self) -> str:
        return f"<Session at {self._found.endpoint}>"

    def ticket_changed(self) -> None:
        """Let the others know the member's present ticket."""
        self._changed.set()

    async def attend(self) -> str:
        """Take part; return in one line why that is over."""
        try:
            return await self._attend()
        finally:
            self._is_over = True
            self._is_known.set()

    async def _attend(self) -> str:
        async with AsyncExitStack() as stack:
            try:
                enter = stack.enter_async_context
                lease = await enter(self._store.lease(self._ttl, linger=_LINGER_S))
                orders = await enter(self._store.watch(f"o/{self._name}"))
                holders = await enter(self._store.watch("coordinator"))
                self._member.again()
                work = [
                    self._keep_writing(lease),
                    self._follow_orders(orders),
                    self._follow_office(holders, lease),
                    self._outlive(lease),
                ]
                if self._found.is_host:
                    work.append(self._yield_to_others())
                return await _first(work)
            except StoreError as error:
                # What else it says matters to whoever asked for something.
                return str(error).partition("; ")[0]

    async def ticket_known(self) -> None:
        """Return when the others can know the member's present ticket, or the store is lost."""
        while self._known < self._member.ticket.serial and not self._is_over:
            self._is_known.clear()
            await self._is_known.wait()

    async def hand_over(self) -> None:
        """Leave the office in such a state that the next holder knows of our success.

        Raises:
            StoreError: the store is gone.
        """
        if self._is_elected:
            self._is_seeing_off = True
            await self._store.delete(f"t/{self._name}")
            await self._office.has_parted.wait()

    async def see_off(self) -> None:
        """Return when nobody needs this member any more: it coordinates, or serves the store.

        Raises:
            StoreError: the store is gone.
        """
        if not (self._is_elected or self._found.is_host):
            return
        self._is_seeing_off = True
        await self._store.delete(f"t/{self._name}")
        async with self._store.watch("t/", is_prefix=True) as tickets:
            theirs = set(tickets.present)  # who comes later is not of this job
            left = set(theirs)
            while left:
                change = await anext(tickets)
                if change.kind is not ChangeKind.SET:
                    left.discard(change.key)
                elif change.key in theirs:
                    left.add(change.key)

    # ------------------------------------------------- what goes on all the time

    async def _keep_writing(self, lease: Lease) -> str:
        while True:
            ticket = replace(self._member.ticket, sent_at=time.time())
            await lease.set(f"t/{self._name}", written(ticket))
            if self._known < 0:
                self._on_attended()
            self._known = ticket.serial
            self._is_known.set()
            while self._member.ticket.serial == ticket.serial or self._is_seeing_off:
                await self._changed.wait()
                self._changed.clear()

    async def _follow_orders(self, orders: Watch) -> str:
        for text in orders.present.values():
            self._obey(text)
        async for change in orders:
            if change.value is not None:
                self._obey(change.value)
        return "the orders have ended"

    def _obey(self, text: bytes) -> None:
        try:
            order = read_order(text)
        except Unreadable:
            return  # of somebody else's making; ours come again
        self._act(self._member.order(order))

    async def _outlive(self, lease: Lease) -> str:
        await lease.wait_ended()
        return "this node was not heard of for too long"

    async def _yield_to_others(self) -> str:
        endpoint = await self._points.superseded(self._found)
        if self._member.has_ended:
            # Some may not have heard of the end yet; `see_off` waits for them.
            await asyncio.get_running_loop().create_future()
        return f"the others meet at {endpoint}"

    async def _lead_others(self) -> bytes | None:
        """Go to where the others meet, away from a store that none of us serves.

        Whoever coordinates next here follows, and so one after the other does.

        Raises:
            StoreLost: it is time to go.
        """
        raise StoreLost(await self._yield_to_others())

    # ----------------------------------------------------------------- the office

    async def _follow_office(self, holders: Watch, lease: Lease) -> str:
        present = holders.present.get("coordinator")
        if present is None and not self._found.is_host:
            present = await self._defer(holders)
        while True:
            incumbent = read_incumbent(present)
            is_ours = incumbent is not None and incumbent.member == self._name
            if incumbent is None or (is_ours and present not in self._mandates):
                # Vacant, or nobody's that can be read, or ours by a lease that has
                # ended or is about to.
                epoch = self._member.ticket.epoch + 1
                present = await self._proclaim(lease, present or b"", epoch)
                incumbent = read_incumbent(present)
            if incumbent is not None:
                self._act(self._member.coordinated(incumbent.name, incumbent.epoch))
            if incumbent is not None and present in self._mandates:
                present = await self._hold_office(incumbent.epoch, holders, lease)
            else:
                present = (await anext(holders)).value

    async def _defer(self, holders: Watch) -> bytes | None:
        """Let the node that serves the store go first; it is here already, or was."""
        try:
            async with asyncio.timeout(_DEFERENCE_S):
                return (await anext(holders)).value
        except TimeoutError:
            return None

    async def _proclaim(self, lease: Lease, present: bytes, epoch: int) -> bytes:
        """Try to take the office from `present`; return who has it then."""
        mine = self._text_of(epoch)
        self._mandates.add(mine)
        return await lease.compare_set("coordinator", present, mine)

    def _text_of(self, epoch: int) -> bytes:
        return Incumbent(epoch, self._name, self._member.ticket.card.name).written()

    async def _hold_office(self, epoch: int, holders: Watch, lease: Lease) -> bytes | None:
        """Coordinate until the office is lost; return who has it then."""
        self._is_elected = True
        try:
            work = [self._coordinate(epoch, lease), self._deposed(holders)]
            if self._found.index and not self._found.is_host:
                work.append(self._lead_others())
            return await _first(work)
        finally:
            self._is_elected = False
            self._mandates.clear()

    async def _coordinate(self, epoch: int, lease: Lease) -> bytes | None:
        held = self._text_of(epoch)

        async def announce(epoch: int) -> None:
            nonlocal held
            text = await self._proclaim(lease, held, epoch)
            if text not in self._mandates:
                raise _DeposedError(text)
            held = text
            self._act(self._member.coordinated(self._member.ticket.card.name, epoch))

        try:
            await self._office.hold(
                self._store,
                lease,
                name=self._name,
                epoch=epoch,
                # The first to coordinate here.
                is_new_store=await self._store.add("epochs", 1) == 1,
                announce=announce,
            )
        except _DeposedError as error:
            return error.present

    async def _deposed(self, holders: Watch) -> bytes | None:
        """Return who coordinates, when that is not this member any more."""
        while True:
            await anext(holders)  # of changes some are older than our election
            present = await self._store.peek("coordinator")
            if present not in self._mandates:
                return present


class _DeposedError(Exception):
    """Somebody else holds the office by now."""

    def __init__(self, present: bytes) -> None:
        super().__init__(present)
        self.present = present


async def _first(work: list[Coroutine[Any, Any, T]]) -> T:
    """Do all of it until one ends; return what that one says, or raise what it raised.

    Of several that end at once one that raises is preferred: it knows more.
    """
    tasks = [owned_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_all(tasks)
    raised = {task: not task.cancelled() and task.exception() is not None for task in tasks}
    return max(done, key=raised.__getitem__).result()
