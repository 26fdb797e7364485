"""One search for a store to meet at, over all endpoints at once."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from elastic_aio.aio import off_loop, see_through
from elastic_aio.rendezvous.addresses import every_interface, is_loopback, is_loopback_name
from elastic_aio.rendezvous.choosing import Choice, choose
from elastic_aio.rendezvous.scouts import Point, Scout, Terms
from elastic_aio.store.listen import Address
from elastic_aio.store.portholder import port_holder

__all__ = ["Search"]

_FIRST_GRACE: Final = 1.0
_GRACE: Final = 0.3
"""Seconds for every endpoint to answer, at the start and after a loss.

One that is silent is not waited for longer, since it may be so for ever.
"""

_FIRST_TURN: Final = 3.0
_TURN: Final = 0.3
"""Seconds between the turns of the endpoints, after a loss; at the start the second
endpoint's comes after 4 s, for machines do not come up all at once.
"""

_RETRY_BIND: Final = 0.2


class Search:
    """Scouts at all endpoints, and when this node may serve each of them.

    Must be closed.
    """

    def __init__(
        self,
        points: Sequence[Point],
        terms: Terms,
        *,
        is_host: bool | None,
        is_first: bool,
        timeout: float,
    ) -> None:
        """Begin to look; see `MeetingPoints.find` and `RendezvousSpec` for the arguments."""
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._news = asyncio.Event()
        self._is_host = is_host
        self._grace = min(_FIRST_GRACE if is_first else _GRACE, timeout / 2)
        self._turns = [
            _turn(index, is_first=is_first, timeout=timeout) for index in range(len(points))
        ]
        self._timeout = timeout
        self._refusals: dict[int, str] = {}
        self.scouts = [Scout(point, terms, self._news.set) for point in points]

    @property
    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self._loop.time() - self._began

    @property
    def is_over(self) -> bool:
        """Whether all the time allowed has passed."""
        return self.elapsed >= self._timeout

    def choice(self) -> Choice:
        """Return what to do now."""
        for scout in self.scouts:
            scout.check()
        sights = [scout.sight for scout in self.scouts]
        host_at = [
            turn if self.listening_at(index) else math.inf for index, turn in enumerate(self._turns)
        ]
        return choose(sights, host_at, self.elapsed, self._grace)

    async def wait(self, until: float) -> None:
        """Wait for news of an endpoint, or until the search has lasted so long."""
        left = min(until, self._timeout) - self.elapsed
        try:
            async with asyncio.timeout(max(0.0, left)):
                await self._news.wait()
        except TimeoutError:
            pass
        self._news.clear()

    def listening_at(self, index: int) -> Sequence[Address]:
        """Return where this node would listen to serve an endpoint; empty: nowhere."""
        if self._is_host is False:
            return ()
        scout = self.scouts[index]
        if scout.own_addresses:
            return _wide_enough(scout.point, scout.own_addresses)
        is_hidden = (
            self._is_host and index == 0 and not any(one.own_addresses for one in self.scouts)
        )
        return every_interface(scout.point.port) if is_hidden else ()

    def postpone(self, index: int, why: str) -> None:
        """Let some time pass before this node tries again to serve an endpoint; say `why`."""
        self._refusals[index] = why
        # Nothing tells when somebody ceases to listen.
        self._turns[index] = self.elapsed + _RETRY_BIND * (1 + random.random())
        self.scouts[index].look_again()

    async def story(self) -> str:
        """Say in one line what is the matter with each endpoint."""
        return "; ".join([await self._story_of(scout) for scout in self.scouts])

    async def _story_of(self, scout: Scout) -> str:
        point = scout.point
        parts = [scout.why]
        if point.index in self._refusals:
            parts.append(self._refusals[point.index])
        if scout.own_addresses and point.port:
            # It reads much of /proc.
            holder = await off_loop(partial(port_holder, point.port))
            if holder is not None:
                parts.append(f"port {point.port} is in use by {holder}")
        return f"{point.text}: {', '.join(parts)}"

    async def aclose(self) -> None:
        """End all scouts, and close what they have found and was not taken."""
        await see_through(self._close)

    async def _close(self) -> None:
        for scout in self.scouts:
            await scout.aclose()


def _turn(index: int, *, is_first: bool, timeout: float) -> float:
    if index == 0:
        return 0.0
    if is_first:
        return min(_FIRST_TURN + index, timeout / 2)
    return _TURN * index


def _wide_enough(point: Point, own: Sequence[Address]) -> Sequence[Address]:
    """Return where to listen for others to reach this machine by the endpoint's name.

    Many systems list a machine's own name with a loopback address (127.0.1.1), under
    which it is known to nobody else.
    """
    is_literal = any(address[0] == point.host for _, address in own)
    is_known_elsewhere = any(not is_loopback(str(address[0])) for _, address in own)
    if is_literal or is_known_elsewhere or is_loopback_name(point.host):
        return own
    return every_interface(point.port)
