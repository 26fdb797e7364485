"""A program that locates the store of a job and prints JSON lines about it.

It locates another store when its own is lost or superseded, and exits at the end of its
stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from elastic_aio.discovery.locator import DiscoveryError, LocatedStore, OtherEndpoints, StoreLocator
from elastic_aio.discovery.runs import RunRecord, enter_run
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.store import RemoteStore


async def locate_stores(locator: StoreLocator, run_id: str, *, coordinates: bool) -> None:
    is_first = True
    while True:
        try:
            located = await locator.locate(is_first=is_first)
        except DiscoveryError as error:
            emit(error=str(error))
            return
        emit(
            endpoint=located.endpoint,
            index=located.index,
            is_host=located.is_host,
            local_address=located.local_address,
        )
        why = await stay(locator, located, run_id, coordinates=coordinates)
        emit(why=why)
        is_first = False


async def stay(
    locator: StoreLocator, located: LocatedStore, run_id: str, *, coordinates: bool
) -> str:
    """Stay until the store is lost or superseded; return the reason."""
    async with contextlib.AsyncExitStack() as stack:
        if coordinates:
            lease = await stack.enter_async_context(located.store.lease(2.0, linger=0.2))
            await enter_run(located.store, run_id, job="", reuse=False)
            await lease.set(f"elastic_aio/{run_id}/0/coordinator", "me")
            emit(coordinates=True)
        assert isinstance(located.store, RemoteStore)
        ends = [asyncio.ensure_future(located.store.wait_lost())]
        if located.is_host and located.others is not None:
            ends.append(asyncio.ensure_future(wait_superseded(located.others)))
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.wait(ends)
        return str(done.pop().result())


async def wait_superseded(others: OtherEndpoints) -> str:
    return (await others.wait_superseded(RunRecord(0, ""), bool, at_once=True)).endpoint.text


def emit(**what: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


async def main(settings: dict[str, Any]) -> None:
    run_id = settings.pop("run_id", "run")
    coordinates = settings.pop("coordinates", False)
    locator = StoreLocator(RendezvousSpec(**settings), run_id)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    job_spec = asyncio.ensure_future(locate_stores(locator, run_id, coordinates=coordinates))
    waiting = asyncio.ensure_future(ended.wait())
    await asyncio.wait([job_spec, waiting], return_when=asyncio.FIRST_COMPLETED)
    for task in (job_spec, waiting):
        task.cancel()
    await asyncio.wait([job_spec, waiting])
    await locator.aclose()


asyncio.run(main(json.loads(sys.argv[1])))
