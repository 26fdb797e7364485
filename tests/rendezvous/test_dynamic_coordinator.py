"""The election at a real store, with broken connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from elastic_aio.errors import StoreLost
from elastic_aio.events import Event
from elastic_aio.node_events import (
    CoordinatorChanged,
    NodeJoined,
    NodeLost,
    RendezvousStoreLost,
    RoundWaiting,
)
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous import state
from elastic_aio.rendezvous.base import RoundStopped
from elastic_aio.rendezvous.event_stream import EVENTS, EventStreamWriter
from elastic_aio.rendezvous.messages import Order, ProbePeers, decode_status, encode
from elastic_aio.spec.restart import RestartPolicy
from elastic_aio.spec.stop import StopPlan
from elastic_aio.store import StoreServer, connect
from tests.support.chaos import ChaosProxy
from tests.support.children import until
from tests.support.fake_agent import FakeAgent, all_formed, free_endpoint, job_spec, present


@pytest.mark.slow
async def test_a_reconnected_leader_stays_the_leader() -> None:
    """Its record does not disappear later, with a write of the broken connection."""
    async with StoreServer("127.0.0.1", 0) as server, ChaosProxy(server.port) as proxy:
        a = FakeAgent("a", job_spec(proxy.endpoint, "1:2", is_host=False))
        b = FakeAgent("b", job_spec(f"127.0.0.1:{server.port}", "1:2", is_host=False))
        async with present(a) as members:
            await a.wait_event(CoordinatorChanged)
            members.append(b)
            await b.rendezvous.open()
            await all_formed(a, b)
            proxy.is_stalled = True
            a.succeed()
            await asyncio.sleep(0)  # its ticket is on its way
            await asyncio.sleep(0)
            before = proxy.connections
            proxy.cut()
            proxy.is_stalled = False
            await until(lambda: proxy.connections > before)
            # Longer than the former lease lingers.
            await asyncio.sleep(1)
            b.succeed()
            assert (await a.wait_ended()).state is JobState.SUCCEEDED
            assert (await b.wait_ended()).state is JobState.SUCCEEDED
            names = [one.name for one in b.events if isinstance(one, CoordinatorChanged)]
            assert set(names) == {"a"}, f"{len(names)} elections"
            lost = (NodeLost, RendezvousStoreLost)
            assert not any(isinstance(one, lost) for one in a.events)
            assert len(a.started) == len(b.started) == 1


@pytest.mark.slow
async def test_a_deposed_leader_stops_coordinating() -> None:
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(f"127.0.0.1:{server.port}", "1:2", is_host=False)
        a, b = FakeAgent("a", spec), FakeAgent("b", spec)
        async with present(a, b), connect(f"127.0.0.1:{server.port}") as store:
            await all_formed(a, b)
            for _ in range(5):
                await store.delete("elastic_aio/run/0/coordinator")
                await store.get("elastic_aio/run/0/coordinator", timeout=10)
                await asyncio.sleep(0.1)  # room for more elections
            a.succeed()
            b.succeed()
            assert (await a.wait_ended()).state is JobState.SUCCEEDED
            assert (await b.wait_ended()).state is JobState.SUCCEEDED
            elections = [one for one in a.events if isinstance(one, CoordinatorChanged)]
            assert len(elections) <= 6
            assert len(a.started) == len(b.started) == 1


@pytest.mark.slow
async def test_a_leader_without_a_past_has_a_new_term() -> None:
    """Terms come from the store, and not from what a member remembers."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(f"127.0.0.1:{server.port}", "2", is_host=False)
        terms = []
        for name in "abc":
            async with present(FakeAgent(name, spec)) as (one,):
                terms.append((await one.wait_event(CoordinatorChanged)).term)
        assert terms == [1, 2, 3]


@pytest.mark.slow
async def test_a_restart_window_survives_its_coordinators() -> None:
    """Each of which leaves after the restart that it has counted."""
    async with StoreServer("127.0.0.1", 0) as server:
        policy = RestartPolicy(window=(2, 3600.0))
        endpoint = f"127.0.0.1:{server.port}"
        spec = job_spec(endpoint, "1:2", is_host=False, max_restarts=9, restart=policy)
        first, second, third = (FakeAgent(name, spec) for name in "abc")
        async with present(first) as members:
            for leaver, joiner in ((first, second), (second, third)):
                await joiner.rendezvous.open()
                members.append(joiner)
                before = await joiner.wait_formed(2)
                joiner.fail()
                restarts = (await joiner.wait_formed(2, after=before.round)).restarts
                assert restarts == before.restarts + 1
                members.remove(leaver)
                await leaver.rendezvous.leave("enough")
                leaver.close()
                await joiner.wait_formed(1)
            third.fail()
            outcome = await third.wait_ended()
            assert outcome.why == "2 restarts within 3600 s (restart window)"


@pytest.mark.slow
async def test_a_node_that_never_stops_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is extended, but its agent does not report the end of the workers."""
    monkeypatch.setattr(state, "MARGIN_S", 1.0)
    spec = job_spec(free_endpoint(), "1:2", max_restarts=3)
    spec = spec.replace(stop=StopPlan((), reap_timeout=1.0))
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        b.stops_on_order = False
        a.fail()
        waiting = await a.wait_event(RoundWaiting)
        assert (waiting.phase, waiting.what) == ("stopping", "b: not stopped its workers")
        assert (await a.wait_formed(1)).round == 1
        assert "has not stopped its workers" in (await a.wait_event(NodeLost)).why
        b.rendezvous.report(RoundStopped(0))
        assert (await b.wait_formed(2, after=0)).round == 2


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_failed_write_does_not_end_the_event_stream(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EventStreamWriter.write
    failures = iter(range(failing))

    async def failing_write(self: EventStreamWriter, events: Sequence[Event]) -> None:
        for _ in failures:
            raise StoreLost("the change may have been made or not")
        await write(self, events)

    monkeypatch.setattr(EventStreamWriter, "write", failing_write)
    spec = job_spec(free_endpoint(), "2")
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        a.succeed()
        b.succeed()
        await a.wait_ended()
        async with connect(spec.rendezvous.endpoint) as store:
            assert await store.get(f"elastic_aio/run/0/{EVENTS}{0:012d}", timeout=10)


async def test_an_invalid_probe_address_is_not_reached() -> None:
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "1:2", last_call_timeout=0.0))
    async with present(a):
        await a.wait_formed(1)
        member = (await a.wait_event(NodeJoined)).member
        async with connect(endpoint) as store:
            ours = store.prefixed("elastic_aio/run/0")
            async with ours.watch(f"t/{member}") as statuses:
                for number, address, port in (
                    (3, "127.0.0.1", 1 << 20),
                    (4, f"{'x' * 100}.test", 1),
                ):
                    order = Order(1, 100 + number, ProbePeers(number, address, port))
                    await ours.set(f"o/{member}", encode(order))
                    status = await anext(
                        one
                        async for change in statuses
                        if (one := decode_status(change.value or b"")).probed_round == number
                    )
                    assert address in status.probe_error
