"""Where the nodes of a job meet: a store at one of the endpoints, served by one of them.

Who serves it is found out by trying to listen: it works for names, aliases and
addresses alike, and only one can succeed.  Everybody, the node that serves included,
is a client of it then.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct

from elastic_aio.aio import off_loop, see_through
from elastic_aio.errors import ElasticAioError
from elastic_aio.rendezvous.addresses import (
    addresses_of,
    is_loopback,
    is_loopback_name,
    loopback,
    outward_address,
)
from elastic_aio.rendezvous.choosing import Host, Take, Wait
from elastic_aio.rendezvous.scouts import Absent, Answer, Point, Scout, Terms, look
from elastic_aio.rendezvous.searching import Search
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.store import RemoteStore, StoreServer
from elastic_aio.store.listen import Address, bind_addresses
from elastic_aio.store.portholder import port_holder

__all__ = ["Found", "MeetingPoints", "PointsError"]

_RECONNECT_FOR: Final = 0.25
"""Seconds; little more than leases linger, since later it would be of no use."""

_KERNEL_SILENCE: Final = 60.0
"""Seconds for which a client's kernel may be silent before ours ends the connection."""

_OWN_TIMEOUT: Final = 1.0
"""Seconds for our own server to answer us."""

_ELSEWHERE_TIMEOUT: Final = 5.0
"""Seconds for a look at another endpoint while we serve one."""

_PAUSE_ERROR: Final = 1.0
"""A pause is known to this many seconds."""


class PointsError(ElasticAioError):
    """No endpoint can be used; the message is one line that says why of each."""


class Found(Struct, frozen=True):
    """The store at which the nodes meet.

    Attributes:
        store: connected; lost for good when it has been silent or gone for too long.
        endpoint: where it is, as in the list; for port 0, with the port that was chosen.
        index: its place in the list.
        is_host: whether this process serves it.
        local_address: the address under which this machine is connected to it.
    """

    store: RemoteStore
    endpoint: str
    index: int
    is_host: bool
    local_address: str


class MeetingPoints:
    """The endpoints of a job as one of its nodes sees them.

    It has one store at a time, which is its own to close: `abandon` it in the end.
    """

    def __init__(self, spec: RendezvousSpec, run_id: str) -> None:
        """Read the endpoints; nothing is connected yet.

        Raises:
            SpecError: one of them is not HOST:PORT.
        """
        self._spec = spec
        self._points = [Point.parse(index, text) for index, text in enumerate(spec.endpoints)]
        self._terms = Terms(
            token=spec.token,
            silence=spec.heartbeat_timeout,
            reconnect_for=_RECONNECT_FOR,
            run_key=f"elastic_aio/{run_id}/coordinator",
        )
        self._store: RemoteStore | None = None
        self._server: StoreServer | None = None
        self._was_away = asyncio.Event()

    def __repr__(self) -> str:
        state = self._server or self._store or "not connected"
        return f"<meeting points {self._spec.endpoint}: {state}>"

    async def find(self, *, is_first: bool) -> Found:
        """Connect to the store of the job; serve it if nobody does.

        What was found before is abandoned.  Cancelling leaves nothing behind.

        Args:
            is_first: at the start, machines come up one after the other, and the later
                endpoints leave the earlier ones some seconds.  After a loss there is
                no time for that.

        Raises:
            PointsError: no endpoint could be used within the `read_timeout`; or this
                node has to serve the store, and the port is somebody else's.
        """
        await self.abandon()
        search = Search(
            self._points,
            self._terms,
            is_host=self._spec.is_host,
            is_first=is_first,
            timeout=self._spec.read_timeout,
        )
        try:
            try:
                return await self._search(search)
            finally:
                await search.aclose()
        except BaseException:  # a cancellation too: nothing found stays open
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Close the connection, and the server if this process has it; 3 s at most.

        May be repeated, and started over.  A cancellation is raised afterwards.
        """
        await see_through(self._close)

    async def superseded(self, found: Found) -> str:
        """Wait until the run is under way at another endpoint; return which.

        Only for the process that serves `found`, which then abandons it and finds the
        other.  It yields to an earlier endpoint at any time; and to any other, when it
        has been stopped for so long that the other nodes may have gone there.
        """
        while True:
            was_away = await self._next_look(found.index > 0)
            others = [
                point
                for point in self._points
                if point.index < found.index or (was_away and point.index > found.index)
            ]
            async with asyncio.TaskGroup() as group:
                looks = [group.create_task(self._has_run(point)) for point in others]
            for point, one in zip(others, looks, strict=True):
                if one.result():
                    return point.text

    # ------------------------------------------------------------------ finding

    async def _search(self, search: Search) -> Found:
        while True:
            match search.choice():
                case Take(index):
                    answer = await search.scouts[index].give()
                    return self._joined(search.scouts[index], answer)
                case _ if search.is_over:
                    raise PointsError(
                        f"no store to meet at within {self._spec.read_timeout:g} s: "
                        f"{await search.story()}"
                    )
                case Host(index):
                    found = await self._host(search, index)
                    if found is not None:
                        return found
                case Wait(until):
                    await search.wait(until)

    def _joined(self, scout: Scout, answer: Answer) -> Found:
        self._store = answer.store
        point, server = scout.point, self._server
        text = point.text if point.port or server is None else point.with_port(server.port)
        address = _own_address(scout, answer.local_address)
        return Found(answer.store, text, point.index, server is not None, address)

    async def _host(self, search: Search, index: int) -> Found | None:
        """Serve the store; None if it cannot be done now."""
        scout = search.scouts[index]
        listening_at = search.listening_at(index)
        try:
            sockets = bind_addresses(listening_at, _KERNEL_SILENCE, is_listening=True)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self._spec.is_host:
                answer = await self._neighbour(scout)
                if answer is not None:
                    return self._joined(scout, answer)
            search.postpone(index, f"cannot listen there: {error.strerror}")
            return None
        self._was_away.clear()
        self._server = server = StoreServer(
            listening=sockets, token=self._spec.token, on_pause=self._on_pause
        )
        await server.start()
        answer = await self._reach(server, scout, is_wide=listening_at != scout.own_addresses)
        if answer is None:
            # An address that is ours by the kernel's word only, or somebody was faster.
            self._server = None
            await server.aclose()
            search.postpone(index, "listening there, this node does not reach itself")
            return None
        return self._joined(scout, answer)

    async def _reach(self, server: StoreServer, scout: Scout, *, is_wide: bool) -> Answer | None:
        """Connect to our own server as everybody does; None if that leads elsewhere."""
        addresses = [(family, _with_port(name, server.port)) for family, name in scout.addresses]
        answer = await self._look_briefly(addresses, _OWN_TIMEOUT)
        if answer is None and is_wide:
            # Others reach it through a translated address, which may not work from here.
            answer = await self._look_briefly(loopback(server.port), _OWN_TIMEOUT)
        if answer is not None and answer.store.instance != server.instance:
            await answer.store.aclose()
            return None
        return answer

    async def _neighbour(self, scout: Scout) -> Answer | None:
        """Connect to the store of ours that has our port; None if nobody answers at all.

        Raises:
            PointsError: it is no store of ours.
        """
        port = scout.point.port
        try:
            return await look((*scout.addresses, *loopback(port)), self._terms)
        except Absent as error:
            if not error.is_stranger:
                return None
            # It reads much of /proc.
            holder = await off_loop(partial(port_holder, port)) or "another program"
            raise PointsError(
                f"cannot serve the store at {scout.point.text}: port {port} is in use by "
                f"{holder}, which is no store of this job: {error}"
            ) from None

    async def _look_briefly(self, addresses: Sequence[Address], seconds: float) -> Answer | None:
        try:
            async with asyncio.timeout(seconds):
                return await look(addresses, self._terms)
        except (Absent, TimeoutError):
            return None

    # ------------------------------------------ while this process serves the store

    def _on_pause(self, seconds: float) -> None:
        # It is known only roughly; the others give up after a time that is known.
        if seconds + _PAUSE_ERROR >= self._terms.patience:
            self._was_away.set()

    async def _next_look(self, is_later: bool) -> bool:
        """Wait for the time to look elsewhere; tell whether this process was away."""
        try:
            # Nothing tells when somebody begins to listen at an earlier endpoint.
            async with asyncio.timeout(self._terms.silence if is_later else None):
                await self._was_away.wait()
        except TimeoutError:
            return False
        self._was_away.clear()
        return True

    async def _has_run(self, point: Point) -> bool:
        """Tell whether the run is under way at an endpoint, in another store than ours."""
        try:
            async with asyncio.timeout(_ELSEWHERE_TIMEOUT):
                answer = await look(await addresses_of(point.host, point.port), self._terms)
        except (Absent, OSError):  # a TimeoutError is one
            return False
        instance = answer.store.instance
        await answer.store.aclose()
        return answer.has_run and (self._server is None or self._server.instance != instance)

    async def _close(self) -> None:
        if self._store is not None:
            await self._store.aclose()
        if self._server is not None:
            await self._server.aclose()
        self._store = self._server = None


def _own_address(scout: Scout, local_address: str) -> str:
    """Return the address under which others reach this machine.

    It is that of the connection, but for a machine that knows its own name by a
    loopback address, or reaches itself only so.
    """
    host = scout.point.host
    if not is_loopback(local_address) or is_loopback(host) or is_loopback_name(host):
        return local_address
    return outward_address(scout.addresses) or outward_address() or local_address


def _with_port(name: tuple[Any, ...], port: int) -> tuple[Any, ...]:
    return (name[0], port, *name[2:])
