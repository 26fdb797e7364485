"""Members that leave a real store."""

from __future__ import annotations

import asyncio
import time

import pytest

from elastic_aio.events import Event
from elastic_aio.node_events import NodeLeft
from elastic_aio.outcome import JobState
from elastic_aio.store import StoreServer
from tests.support.chaos import ChaosProxy
from tests.support.fake_agent import FakeAgent, all_formed, free_endpoint, job_spec, present


async def test_a_success_is_written_before_the_node_leaves() -> None:
    spec = job_spec(free_endpoint(), "1:2")
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    async with present(a, b):
        await all_formed(a, b)
        b.succeed()
        await b.rendezvous.leave("it has succeeded")
        assert (await a.wait_event(NodeLeft)).why == "its workers have finished"
        a.succeed()
        assert (await a.wait_ended()).state is JobState.SUCCEEDED
        assert len(a.started) == 1


async def test_a_second_leave_ends_the_wait_for_other_nodes() -> None:
    spec = job_spec(free_endpoint(), "2", close_timeout=60.0)
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    async with present(a, b):
        await all_formed(a, b)
        a.succeed()
        b.succeed()
        await a.wait_ended()
        await b.wait_ended()  # and stays
        leaving = asyncio.create_task(a.rendezvous.leave("the job is over"))
        await asyncio.wait([leaving], timeout=0.5)
        assert not leaving.done()
        began = time.monotonic()
        await a.rendezvous.leave("at once")
        await leaving
        assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.both_loops
async def test_a_node_leaves_a_store_that_does_not_answer() -> None:
    """Within a second, long before the heartbeat timeout."""
    async with StoreServer("127.0.0.1", 0) as server, ChaosProxy(server.port) as proxy:
        far = job_spec(proxy.endpoint, "1:2", is_host=False, heartbeat_timeout=30.0)
        near = job_spec(f"127.0.0.1:{server.port}", "1:2", is_host=False, heartbeat_timeout=30.0)
        a, b = FakeAgent("a", near), FakeAgent("b", far)
        async with present(a, b) as members:
            await all_formed(a, b)
            proxy.is_stalled = True
            members.remove(b)
            began = time.monotonic()
            await b.rendezvous.leave("SIGTERM")
            assert time.monotonic() - began < 10
            b.close()
            # The store sees the end of the connection, and the lease ends soon after.
            assert (await a.wait_formed(1)).changes == 1


async def test_an_error_of_the_agent_ends_the_job_of_its_node() -> None:

    class Defective(FakeAgent):
        def on_event(self, event: Event) -> None:
            raise ZeroDivisionError("a defect")

    one = Defective("a", job_spec(free_endpoint(), "2"))
    async with present(one):
        outcome = await one.wait_ended()
        assert "a defect" in outcome.why
