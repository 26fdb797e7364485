"""Members that leave, at every moment, and what the others make of it."""

from __future__ import annotations

import asyncio
import time

from elastic_aio.events import Event, NodeLeft
from elastic_aio.outcome import JobState
from tests.support.members import Pretender, free_endpoint, meeting, present


async def test_a_success_is_known_before_its_node_leaves() -> None:
    """A node that reports its success and leaves in the same moment has succeeded."""
    spec = meeting(free_endpoint(), "1:2")
    a, b = Pretender("a", spec), Pretender("b", spec)
    async with present(a, b):
        await a.formed(2)
        await b.formed(2)
        b.succeeds()
        await b.rendezvous.leave("it has succeeded")
        await a.hears(NodeLeft)
        a.succeeds()
        assert (await a.ended()).state is JobState.SUCCEEDED
        assert len(a.begun) == 1


async def test_told_again_to_leave_a_node_waits_for_nobody() -> None:
    """Whoever serves the others stays until they have heard the end, but not against its will."""
    spec = meeting(free_endpoint(), "2", close_timeout=60.0)
    a, b = Pretender("a", spec), Pretender("b", spec)
    async with present(a, b):
        await a.formed(2)
        await b.formed(2)
        a.succeeds()
        b.succeeds()
        await a.ended()
        await b.ended()  # and stays
        leaving = asyncio.create_task(a.rendezvous.leave("the job is over"))
        await asyncio.wait([leaving], timeout=0.5)
        assert not leaving.done()
        began = time.monotonic()
        await a.rendezvous.leave("at once")
        await leaving
        assert time.monotonic() - began < 10


async def test_a_defect_ends_the_job_of_its_node() -> None:
    """What an agent raises when it is told something ends its part, instead of hanging it."""

    class Defective(Pretender):
        def told(self, event: Event) -> None:
            raise ZeroDivisionError("a defect")

    one = Defective("a", meeting(free_endpoint(), "2"))
    async with present(one):
        ending = await one.ended()
        assert "a defect" in ending.why
