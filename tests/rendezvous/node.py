"""A node that meets others, as a program: it says on stdout where it is, line by line.

It goes on at another endpoint when its store is lost, or is superseded, and ends when
its stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from elastic_aio.rendezvous.points import Found, MeetingPoints, PointsError
from elastic_aio.rendezvousspec import RendezvousSpec


async def meet(points: MeetingPoints, run_id: str, *, coordinates: bool) -> None:
    is_first = True
    while True:
        try:
            found = await points.find(is_first=is_first)
        except PointsError as error:
            say(error=str(error))
            return
        say(
            endpoint=found.endpoint,
            index=found.index,
            is_host=found.is_host,
            local_address=found.local_address,
        )
        why = await stay(points, found, run_id, coordinates=coordinates)
        say(why=why)
        is_first = False


async def stay(points: MeetingPoints, found: Found, run_id: str, *, coordinates: bool) -> str:
    """Stay until the store is of no use; return why."""
    async with contextlib.AsyncExitStack() as stack:
        if coordinates:
            lease = await stack.enter_async_context(found.store.lease(2.0, linger=0.2))
            await lease.set(f"elastic_aio/{run_id}/coordinator", "me")
            say(coordinates=True)
        ends = [asyncio.ensure_future(found.store.wait_lost())]
        if found.is_host:
            ends.append(asyncio.ensure_future(points.superseded(found)))
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.wait(ends)
        return str(done.pop().result())


def say(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


async def main(settings: dict[str, Any]) -> None:
    run_id = settings.pop("run_id", "run")
    coordinates = settings.pop("coordinates", False)
    points = MeetingPoints(RendezvousSpec(**settings), run_id)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    meeting = asyncio.ensure_future(meet(points, run_id, coordinates=coordinates))
    waiting = asyncio.ensure_future(ended.wait())
    await asyncio.wait([meeting, waiting], return_when=asyncio.FIRST_COMPLETED)
    for task in (meeting, waiting):
        task.cancel()
    await asyncio.wait([meeting, waiting])
    await points.abandon()


asyncio.run(main(json.loads(sys.argv[1])))
