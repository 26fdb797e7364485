"""A node that waits names the other runs that wait at the same store."""

from __future__ import annotations

import pytest

from elastic_aio.node_events import RoundForming
from elastic_aio.rendezvous import dynamic
from tests.support.fake_agent import FakeAgent, free_endpoint, job_spec, present


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic, "_AFTER_S", 0.3)


@pytest.mark.slow
async def test_two_ids_of_one_job() -> None:
    """Each waits for the other; a run that has formed its round is not named."""
    endpoint = free_endpoint()
    pair = job_spec(endpoint, "2", join_timeout=60)
    alone = job_spec(endpoint, "1", last_call_timeout=0.0)
    mine, theirs = FakeAgent("a", pair, run_id="mine"), FakeAgent("b", pair, run_id="t/heirs")
    running = FakeAgent("c", alone, run_id="running")
    async with present(theirs, running) as members:
        await running.wait_formed(1)
        await theirs.wait_event(RoundForming)
        await mine.rendezvous.open()
        members.append(mine)
        await mine.wait_until(lambda: any(getattr(one, "others", ()) for one in mine.events))
        event = await mine.wait_event(RoundForming)
        assert event.others == ("t/heirs",)
        assert event.time_left is not None
        assert 0 < event.time_left < 60


@pytest.mark.slow
async def test_without_another_run() -> None:
    """The round is formed later, and no event names a run."""
    spec = job_spec(free_endpoint(), "2", join_timeout=60)
    first, second = FakeAgent("a", spec), FakeAgent("b", spec)
    async with present(first) as members:
        await first.wait_event(RoundForming)
        task = first.rendezvous._other_runs._task  # type: ignore[attr-defined]  # its end is no event
        await task
        await second.rendezvous.open()
        members.append(second)
        await first.wait_formed(2)
        events = [event for event in first.events if isinstance(event, RoundForming)]
        assert not any(event.others for event in events)
