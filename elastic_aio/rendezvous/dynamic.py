"""A rendezvous at a store that one of the nodes serves: the member's asyncio shell.

One task finds a store, attends there until it is lost, and finds another.  Attending
is a `Session`; what is decided is decided by the pure `Member`, and by the pure
`Coordinator` on the node whose session holds that office.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterable

from elastic_aio.aio import owned_task, see_through
from elastic_aio.errors import StoreError, SurroundingsError
from elastic_aio.events import Event, RendezvousStoreLost, RendezvousStoreRegained
from elastic_aio.rendezvous.base import (
    Begin,
    Conclude,
    Halt,
    Listener,
    NodeCard,
    Pause,
    Rendezvous,
    Report,
)
from elastic_aio.rendezvous.member import Member, Probe, Reaction
from elastic_aio.rendezvous.office import Office
from elastic_aio.rendezvous.points import Found, MeetingPoints, PointsError
from elastic_aio.rendezvous.session import Session
from elastic_aio.rendezvous.state import Rules
from elastic_aio.rendezvous.tickets import Ticket
from elastic_aio.restarts import RestartBook
from elastic_aio.spec import LaunchSpec
from elastic_aio.store.listen import parse_endpoint

__all__ = ["Dynamic", "make_dynamic"]

_PROBE_TIMEOUT_S = 5.0
_LAST_WORD_S = 0.5
"""How long a node that leaves waits until the store has its last ticket."""


def make_dynamic(spec: LaunchSpec, card: NodeCard, run_id: str, listener: Listener) -> Rendezvous:
    """Return the rendezvous of backend "c10d": ranks are given in the order of coming."""
    return Dynamic(spec, card, run_id, listener)


class Dynamic(Rendezvous):
    """One node's part in a rendezvous at a store."""

    def __init__(
        self,
        spec: LaunchSpec,
        card: NodeCard,
        run_id: str,
        listener: Listener,
        *,
        is_ranked: bool = False,
    ) -> None:
        """Prepare; nothing is looked for before `open`.

        Args:
            spec: the job.
            card: who this node is.
            run_id: name of the run, the same on all nodes.
            listener: the agent.
            is_ranked: whether `node_rank` is an order and not a wish, and the workers
                meet at the nodes' own store.
        """
        meeting = spec.rendezvous
        self._meeting = meeting
        self._card = card
        self._listener = listener
        self._points = MeetingPoints(meeting, run_id)
        self._member = Member(_first_ticket(spec, card))
        # Torch's own clients know no token, and worker 0 may want to serve itself.
        self._shares_store = is_ranked and meeting.token is None and spec.hosts_store
        self._rules = _rules_of(spec, is_ranked=is_ranked, is_shared=self._shares_store)
        self._spec = spec
        self._book = RestartBook(spec.max_restarts, spec.restart, random.random)
        self._run_id = run_id
        # Unique among all members of all times; the host's name is for people.
        self._name = f"{card.name}.{card.pid}.{os.urandom(4).hex()}"
        self._session: Session | None = None
        self._attending: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._grace: asyncio.TimerHandle | None = None
        self._is_leaving = False
        self._is_hurried = False
        self._stay: asyncio.Timeout | None = None

    def __repr__(self) -> str:
        return f"<Dynamic {self._name}: {self._member!r}, {self._session or 'no store'}>"

    # ------------------------------------------------------ what the agent calls

    async def open(self) -> None:
        self._attending = owned_task(self._attend(), name=f"rendezvous {self._run_id}")

    def report(self, report: Report) -> None:
        self._member.report(report)
        self._ticket_changed()

    async def leave(self, why: str) -> None:
        if self._is_leaving:
            self._is_hurried = True
            if self._stay is not None:
                self._stay.reschedule(0.0)
        self._is_leaving = True
        await see_through(self._leave)

    # ---------------------------------------------------------------- attending

    async def _attend(self) -> None:
        """Meet the others, and let no defect of ours make this node wait for ever."""
        try:
            await self._meet_wherever()
        except Exception as error:  # noqa: BLE001  # a defect of ours: told, and the job ends here
            said = "a rendezvous has a defect"
            asyncio.get_running_loop().call_exception_handler(
                {"message": said, "exception": error, "task": asyncio.current_task()}
            )
            self._act(self._member.give_up(f"internal error: {error!r}"))

    async def _meet_wherever(self) -> None:
        """Meet the others wherever they are, for as long as the job lasts."""
        is_first = True
        while True:
            try:
                found = await self._points.find(is_first=is_first)
            except PointsError as error:
                self._act(self._member.give_up(str(error)))
                return
            if not is_first:
                regained = RendezvousStoreRegained(endpoint=found.endpoint, is_host=found.is_host)
                self._listener.told(regained)
            is_first = False
            try:
                why = await self._meet(found)
            finally:
                self._session = None
                await see_through(self._points.abandon)
            if self._member.has_ended:
                return
            self._listener.told(RendezvousStoreLost(endpoint=found.endpoint, why=why))
            self._start_grace(why, found.store.heard_at)

    async def _meet(self, found: Found) -> str:
        """Take part at one store; return why that is over."""
        host, port = parse_endpoint(found.endpoint)
        address = self._meeting.local_addr or found.local_address
        self._member.found(host if self._shares_store else address, is_host=found.is_host)
        if self._shares_store:
            self._member.reserved(port)
        elif not self._renew_port():
            return "no port for the workers"
        office = Office(
            self._rules,
            self._book,
            self._listener,
            card=self._card,
            run_id=self._run_id,
            root=found.store if self._shares_store else None,
        )
        self._session = Session(
            found,
            self._points,
            office,
            name=self._name,
            run_id=self._run_id,
            member=self._member,
            ttl=self._meeting.heartbeat_timeout,
            act=self._act,
            on_attended=self._stop_grace,
        )
        return await self._session.attend()

    def _act(self, actions: Iterable[Reaction]) -> None:
        for action in actions:
            match action:
                case Begin():
                    self._listener.instructed(action)
                    if not self._shares_store:
                        self._renew_port()
                case Halt() | Pause() | Conclude():
                    self._listener.instructed(action)
                case Event():
                    self._listener.told(action)
                case Probe():
                    task = owned_task(self._probe(action), name=f"probe {action.address}")
                    self._probes.add(task)
                    task.add_done_callback(self._probes.discard)
        self._ticket_changed()

    def _renew_port(self) -> bool:
        try:
            self._member.reserved(self._listener.reserve_master(self._member.ticket.address))
        except SurroundingsError as error:
            self._act(self._member.give_up(str(error)))
            return False
        return True

    def _ticket_changed(self) -> None:
        if self._session is not None:
            self._session.ticket_changed()

    async def _probe(self, probe: Probe) -> None:
        """Find out whether the place where the workers would meet can be reached."""
        trouble = ""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(probe.address, probe.port)
            writer.close()
        except TimeoutError:
            trouble = f"no answer from {probe.address} within {_PROBE_TIMEOUT_S:g} s"
        except OSError as error:
            # Where worker 0 itself will listen, a refusal proves that the host is reached.
            is_reached = isinstance(error, ConnectionRefusedError) and not self._spec.hosts_store
            trouble = "" if is_reached else f"{probe.address}: {error.strerror or error}"
        except (ValueError, OverflowError) as error:  # no name, or no port, of this world
            trouble = f"{probe.address}: {error}"
        self._member.probed(probe.round, trouble)
        self._ticket_changed()

    # ---------------------------------------------------------- without a store

    def _start_grace(self, why: str, heard_at: float) -> None:
        """Let the workers run on for as long as the others cannot have replaced them."""
        if self._grace is None:
            meeting = self._meeting
            grace = meeting.store_grace
            seconds = meeting.heartbeat_timeout if grace is None else grace
            said = f"no store could be found for {seconds:g} s ({why})"
            loop = asyncio.get_running_loop()
            # The others count from the last that they have heard of this node.
            self._grace = loop.call_at(heard_at + seconds, self._cut_off, said)

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _cut_off(self, why: str) -> None:
        self._grace = None
        self._act(self._member.cut_off(why))

    # ------------------------------------------------------------------ leaving

    async def _leave(self) -> None:
        self._stop_grace()
        if self._session is not None and not self._is_hurried:
            await self._part_from(self._session)
        tasks = {*self._probes, *([self._attending] if self._attending else [])}
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._attending = None

    async def _part_from(self, session: Session) -> None:
        """Let the others know how it ended here; stay while somebody needs this node."""
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(_LAST_WORD_S):
                await session.ticket_known()
                if self._member.has_succeeded and not self._member.has_ended:
                    await session.hand_over()
        if not self._member.has_ended:
            return
        # Who is still there when the time is over hears it from the connection that ends.
        with contextlib.suppress(TimeoutError, StoreError):
            async with asyncio.timeout(self._meeting.close_timeout) as self._stay:
                try:
                    await session.see_off()
                finally:
                    self._stay = None


def _first_ticket(spec: LaunchSpec, card: NodeCard) -> Ticket:
    return Ticket(
        serial=0,
        card=card,
        address="",
        port=0,
        wish=spec.rendezvous.node_rank,
        minimum=spec.nnodes.minimum,
        maximum=spec.nnodes.maximum,
    )


def _rules_of(spec: LaunchSpec, *, is_ranked: bool, is_shared: bool) -> Rules:
    meeting = spec.rendezvous
    return Rules(
        minimum=spec.nnodes.minimum,
        maximum=spec.nnodes.maximum,
        join_timeout=meeting.join_timeout,
        last_call_timeout=meeting.last_call_timeout,
        keeps_workers=meeting.keeps_workers,
        is_ranked=is_ranked,
        is_shared=is_shared,
        asks=spec.restart.decide is not None,
    )
