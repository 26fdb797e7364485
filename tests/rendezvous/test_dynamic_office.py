"""The office of the coordinator: there is one, whatever becomes of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from elastic_aio.errors import StoreLost
from elastic_aio.events import CoordinatorChanged, Event, NodeLost, RendezvousStoreRegained
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.base import NodeCard
from elastic_aio.rendezvous.member import Probe
from elastic_aio.rendezvous.static import make_static
from elastic_aio.rendezvous.stream import EVENTS, EventStream
from elastic_aio.rendezvous.tickets import Ticket, written
from elastic_aio.store import StoreServer, connect
from tests.support.chaos import ChaosProxy
from tests.support.members import Pretender, free_endpoint, meeting, present


async def test_a_coordinator_that_comes_back_holds_its_office_anew() -> None:
    """What it held on a connection that broke with a write under way does not vanish later."""
    async with StoreServer("127.0.0.1", 0) as server, ChaosProxy(server.port) as proxy:
        a = Pretender("a", meeting(proxy.endpoint, "1:2", is_host=False))
        b = Pretender("b", meeting(f"127.0.0.1:{server.port}", "1:2", is_host=False))
        async with present(a) as members:
            await a.hears(CoordinatorChanged)
            members.append(b)
            await b.rendezvous.open()
            await a.formed(2)
            await b.formed(2)
            proxy.is_stalled = True
            a.succeeds()
            await asyncio.sleep(0)  # its ticket is on its way
            await asyncio.sleep(0)
            proxy.cut()
            proxy.is_stalled = False
            await a.hears(RendezvousStoreRegained)
            # Longer than the former lease lingers, if anybody still depends on that.
            await asyncio.sleep(1)
            b.succeeds()
            assert (await a.ended()).state is JobState.SUCCEEDED
            assert (await b.ended()).state is JobState.SUCCEEDED
            names = [one.name for one in b.told_events if isinstance(one, CoordinatorChanged)]
            assert set(names) == {"a"}, f"{len(names)} elections"
            assert not any(isinstance(one, NodeLost) for one in a.told_events)
            assert len(a.begun) == len(b.begun) == 1


async def test_whoever_is_deposed_coordinates_no_more() -> None:
    """The office is where the key says it is; two who both hold it would outbid each other."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = meeting(f"127.0.0.1:{server.port}", "1:2", is_host=False)
        a, b = Pretender("a", spec), Pretender("b", spec)
        async with present(a, b), connect(f"127.0.0.1:{server.port}") as store:
            await a.formed(2)
            await b.formed(2)
            for _ in range(5):
                await store.delete("elastic_aio/run/coordinator")
                await store.get("elastic_aio/run/coordinator", timeout=10)
                await asyncio.sleep(0.1)  # room for outbidding
            a.succeeds()
            b.succeeds()
            assert (await a.ended()).state is JobState.SUCCEEDED
            assert (await b.ended()).state is JobState.SUCCEEDED
            elections = [one for one in a.told_events if isinstance(one, CoordinatorChanged)]
            assert len(elections) <= 6
            assert len(a.begun) == len(b.begun) == 1


async def test_orders_given_again_cost_running_workers_nothing() -> None:
    """Keys of workers in a shared store are removed once for a round, whatever is repeated."""
    endpoint = free_endpoint()
    members = [
        Pretender(name, meeting(endpoint, "2", backend="static", node_rank=rank), make=make_static)
        for rank, name in enumerate("ab")
    ]
    async with present(*members) as (a, b), connect(endpoint) as store:
        await a.formed(2)
        await b.formed(2)
        await store.set("of a worker", "x")
        card = NodeCard("from elsewhere", 1, 1, "default")
        ticket = Ticket(
            serial=1, card=card, address="", port=1, wish=1, minimum=2, maximum=2, epoch=50
        )
        await store.set("elastic_aio/run/t/stranger", written(ticket))
        await b.until(
            lambda: any(
                isinstance(one, CoordinatorChanged) and one.epoch > 50 for one in b.told_events
            )
        )
        await store.delete("elastic_aio/run/t/stranger")  # nobody waits for it in the end
        b.fails()  # and it is known that what came before has been dealt with
        await a.ended()
        assert await store.check(["of a worker"])


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_store_that_fails_once_does_not_silence_the_job(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who follows the job's events hears its end, even if a few of them could not be written."""
    write = EventStream.write
    failures = iter(range(failing))

    async def failing_write(self: EventStream, events: Sequence[Event]) -> None:
        for _ in failures:
            raise StoreLost("the change may have been made or not")
        await write(self, events)

    monkeypatch.setattr(EventStream, "write", failing_write)
    spec = meeting(free_endpoint(), "2")
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        await a.formed(2)
        await b.formed(2)
        a.succeeds()
        b.succeeds()
        await a.ended()
        async with connect(spec.rendezvous.endpoint) as store:
            assert await store.get(f"elastic_aio/run/{EVENTS}{0:012d}", timeout=10)


async def test_an_address_of_nonsense_is_only_not_reached() -> None:
    """A newcomer that is told to try what can be no address says so."""
    a = Pretender("a", meeting(free_endpoint(), "1:2", last_call_timeout=0.0))
    async with present(a):
        await a.formed(1)
        probe = a.rendezvous._probe  # type: ignore[attr-defined]
        for address, port in (("127.0.0.1", 1 << 20), ("x" * 100 + ".example", 1)):
            await probe(Probe(3, address, port))
            assert address in a.rendezvous._member.ticket.trouble  # type: ignore[attr-defined]
