"""Members at a real store, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import time
from typing import Any

import pytest

from elastic_aio.discovery import choice
from elastic_aio.events import EventsMissed, JobFinished, WorkerStoreRefused
from elastic_aio.node_events import (
    CoordinatorChanged,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    NodeStandby,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundForming,
    StandbyPromoted,
)
from elastic_aio.outcome import EndCause, JobState
from elastic_aio.rendezvous import session
from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED, RoundStopped
from elastic_aio.rendezvous.dynamic import DynamicRendezvous, silence_limits
from elastic_aio.rendezvous.event_stream import follow_job
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import ENGINES, RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartAction, RestartPolicy
from elastic_aio.spec.stop import StopPlan
from elastic_aio.store import KeyspaceLimits, RemoteStore, ServerLimits, StoreServer, connect, wire
from elastic_aio.store.connection import Connection
from elastic_aio.store.wire import OPENING, encode
from tests.support.chaos import ChaosProxy
from tests.support.children import until
from tests.support.fake_agent import FakeAgent, all_formed, free_endpoint, job_spec, present


@pytest.mark.parametrize(
    ("settings", "grace", "limits"),
    [
        ({}, 25.0, (15.0, 29.75)),  # half of the time of the lease
        ({}, 5.0, (24.75, 29.75)),
        ({"heartbeat_timeout": 120.0}, 25.0, (94.75, 119.75)),
        ({"store_grace": 0.0}, 25.0, (0.0, 29.75)),
        ({"store_grace": 600.0}, 25.0, (600.0, 600.0)),
        ({"backend": "etcd"}, 25.0, None),
        ({"backend": "etcd", "store_grace": 20.0}, 25.0, (20.0, 29.75)),
    ],
)
def test_when_a_node_without_a_store_stops(
    settings: dict[str, Any], grace: float, limits: tuple[float, float] | None
) -> None:
    """Its workers have the time of the stop plan before its lease ends."""
    spec = LaunchSpec("x", rendezvous=RendezvousSpec(**settings), stop=StopPlan.within(grace))
    assert silence_limits(spec) == limits


async def test_a_full_group_forms_at_once() -> None:
    """The last call is 600 s long."""
    spec = job_spec(free_endpoint(), "3", last_call_timeout=600.0)
    a, b, c = FakeAgent("a", spec, nproc=1), FakeAgent("b", spec, nproc=3), FakeAgent("c", spec)
    async with present(a, b, c) as members:
        places = [await one.wait_formed(3) for one in members]
        spans = sorted((place.span for place in places), key=lambda span: span.group_rank)
        assert [span.group_rank for span in spans] == [0, 1, 2]
        assert {span.world_size for span in spans} == {5}
        assert len({(place.master_addr, place.master_port) for place in places}) == 1
        assert {
            (place.round, place.attempt, place.restarts, place.changes) for place in places
        } == {(0, 0, 0, 0)}
        assert a.place.span.group_rank == 0, "who serves the store comes first"
        assert c.is_reachable
        assert (await b.wait_event(CoordinatorChanged)).name == "a"
        joined = {one.name for one in a.events if isinstance(one, NodeJoined)}
        assert joined == {"a", "b", "c"}


async def test_preferred_ranks_and_roles() -> None:
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "3"), nproc=2, role="reader")
    b = FakeAgent("b", job_spec(endpoint, "3", node_rank=0), nproc=1, role="trainer")
    c = FakeAgent("c", job_spec(endpoint, "3", node_rank=1), nproc=2, role="reader")
    async with present(a, b, c):
        spans = [(await one.wait_formed(3)).span for one in (b, c, a)]
        assert [span.group_rank for span in spans] == [0, 1, 2]
        assert [span.first_rank for span in spans] == [0, 1, 3]
        assert [span.first_role_rank for span in spans] == [0, 0, 2]
        assert [span.role_world_size for span in spans] == [1, 4, 4]


async def test_the_last_call_ends() -> None:
    spec = job_spec(free_endpoint(), "1:3", last_call_timeout=0.3)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as members:
        assert {(await one.wait_formed(2)).span.group_rank for one in members} == {0, 1}


@pytest.mark.slow
async def test_too_few_nodes_fail_and_name_the_present_ones() -> None:
    spec = job_spec(free_endpoint(), "3", join_timeout=1.5)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        forming = await b.wait_event(RoundForming)
        assert (forming.joined, forming.minimum, forming.maximum) == (2, 3, 3)
        assert set(forming.present) == {"a", "b"}
        assert forming.time_left is not None
        assert 0 < forming.time_left <= 1.5
        for outcome in [await a.wait_ended(), await b.wait_ended()]:
            assert outcome.state is JobState.FAILED
            assert outcome.is_rendezvous
            assert outcome.exit_code == RENDEZVOUS_FAILED
            assert re.search(r"only 2 of 3 nodes came together \((a, b|b, a)\)", outcome.why)
            assert "1.5 s (join_timeout)" in outcome.why


async def test_scaling_up_counts_no_restart() -> None:
    spec = job_spec(free_endpoint(), "1:2", last_call_timeout=0.1)
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    async with present(a) as members:
        await a.wait_formed(1)
        await b.rendezvous.open()
        members.append(b)
        place = await b.wait_formed(2)
        assert (await a.wait_formed(2)).span.group_rank == 0
        assert (place.span.group_rank, place.attempt, place.restarts, place.changes) == (1, 1, 0, 1)
        assert a.causes[-1].root is None
        assert "b joined" in a.causes[-1].why
        assert place.master_port != a.started[0].master_port, "a fresh store for the workers"
        assert b.is_reachable


class Unreachable(FakeAgent):
    """An agent at whose address no probe succeeds."""

    def reserve_master_port(self, address: str) -> int:
        return int(free_endpoint().rpartition(":")[2])


async def test_an_unreachable_joiner_does_not_stop_the_round() -> None:
    """It is refused with the reason."""
    spec = job_spec(free_endpoint(), "1:2", last_call_timeout=0.1)
    a, b = Unreachable("a", spec), FakeAgent("b", spec)
    async with present(a) as members:
        await a.wait_formed(1)
        await b.rendezvous.open()
        members.append(b)
        refused = await a.wait_event(NodeRefused)
        assert refused.name == "b"
        assert "does not reach the others: 127.0.0.1" in refused.why
        assert len(a.started) == 1
        assert not b.started


async def test_a_node_that_leaves_is_replaced() -> None:
    """Nodes of higher ranks move up."""
    spec = job_spec(free_endpoint(), "1:3")
    async with present(*(FakeAgent(name, spec) for name in "abc")) as members:
        a, b, c = members
        for one in (a, b, c):
            await one.wait_formed(3)
        gone = min((b, c), key=lambda one: one.place.span.group_rank)
        stays = b if gone is c else c
        members.remove(gone)
        await gone.rendezvous.leave("enough")
        gone.close()
        assert (await a.wait_formed(2)).span.group_rank == 0
        assert (await stays.wait_formed(2)).span.group_rank == 1
        assert (await a.wait_event(NodeLeft)).name == gone.name
        assert f"{gone.name} has left" in stays.causes[-1].why
        assert stays.place.restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_a_lost_node_is_replaced(fault: str) -> None:
    """At once if its connection ends, else after the heartbeat timeout."""
    endpoint = free_endpoint()
    spec = job_spec(endpoint, "1:2")
    a = FakeAgent("a", spec)
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", job_spec(proxy.endpoint, "1:2", is_host=False, read_timeout=1.0))
        members.append(b)
        await b.rendezvous.open()
        await a.wait_formed(2)
        proxy.is_refusing = True
        if fault == "cut":
            proxy.cut()
        else:
            proxy.is_stalled = True
        await a.wait_formed(1)
        lost = await a.wait_event(NodeLost)
        assert lost.name == "b"
        why = (await b.wait_event(RendezvousStoreLost)).why
        expected = "no answer" if fault == "silent" else "closed|the connection is closing"
        assert re.search(expected, why)
        assert (await b.wait_ended()).cause is EndCause.NO_STORE


@pytest.mark.slow
async def test_failures_after_a_lost_node_cost_no_restart() -> None:
    """The workers of the other nodes fail before the lease of the lost node ends."""
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "1:2", max_restarts=0))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", job_spec(proxy.endpoint, "1:2", is_host=False, read_timeout=1.0))
        members.append(b)
        await b.rendezvous.open()
        await all_formed(a, b)
        proxy.is_refusing = True
        proxy.cut()
        a.fail()
        place = await a.wait_formed(1)
        assert (place.restarts, place.changes) == (0, 1)
        assert "b is lost" in a.causes[-1].why
        await b.wait_ended()


def link_of(agent: FakeAgent) -> object:
    """Return the present connection of an agent's session; None if there is none."""
    assert isinstance(agent.rendezvous, DynamicRendezvous)
    session = agent.rendezvous._session
    store = session._located.store if session else None
    return store._link if isinstance(store, RemoteStore) else None


async def test_a_reset_connection_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back while the lease lingers: longer here, since a busy host takes its time."""
    monkeypatch.setattr(session, "LEASE_LINGER", 2.0)
    monkeypatch.setattr(choice, "RECONNECT_FOR", 2.0)
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "1:2", heartbeat_timeout=10.0))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", job_spec(proxy.endpoint, "1:2", is_host=False, heartbeat_timeout=10.0))
        members.append(b)
        await b.rendezvous.open()
        await b.wait_formed(2)
        for _ in range(5):
            former = link_of(b)
            proxy.cut()
            # A connection that is cut in its handshake would prolong the same outage.
            await until(lambda: link_of(b) not in (None, former))  # noqa: B023
        proxy.is_dropping_replies = True
        b.fail()  # the remaining nodes read the outcome
        await a.wait_until(lambda: a.stopped)
        former = link_of(b)
        proxy.cut()  # with the reply to the status
        proxy.is_dropping_replies = False
        await until(lambda: link_of(b) not in (None, former))
        await b.wait_ended()
        assert len(a.started) == len(b.started) == 1
        lost = (NodeLost, RendezvousStoreLost)
        assert not any(isinstance(one, lost) for one in a.events + b.events)


async def test_the_root_cause_is_that_of_the_earlier_failure() -> None:
    """On another node, whose status takes longer to arrive."""
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "2"))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", job_spec(proxy.endpoint, "2", is_host=False))
        members.append(b)
        await b.rendezvous.open()
        await all_formed(a, b)
        proxy.delay = 0.3
        now = time.time()
        b.fail(code=42, time=now)
        a.fail(code=1, time=now + 0.02)
        outcome = await a.wait_ended()
        assert [one.host for one in outcome.failures] == ["b", "a"]
        assert outcome.exit_code == 42


async def test_too_few_remaining_nodes_wait_for_another() -> None:
    spec = job_spec(free_endpoint(), "2")
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as members:
        a, b = members
        rank = (await b.wait_formed(2)).span.group_rank
        members.remove(b)
        await b.rendezvous.leave("enough")
        b.close()
        await a.wait_until(lambda: a.stopped)
        reasons = {"b has left: only 1 node of 2 left"}
        if spec.rendezvous.backend in ENGINES:
            # Another coordinator may find the round without b, and does not say how many are left.
            reasons.add("b has left")
        assert a.stopped[0].why in reasons
        forming = await a.wait_event(RoundForming)
        assert (forming.joined, forming.minimum, forming.missing) == (1, 2, ("b",))
        c = FakeAgent("c", spec)
        members.append(c)
        await c.rendezvous.open()
        assert (await c.wait_formed(2)).span.group_rank == rank
        assert c.place.changes == 1


async def test_a_surplus_node_stands_by_and_takes_a_free_rank() -> None:
    spec = job_spec(free_endpoint(), "2")
    async with present(*(FakeAgent(name, spec) for name in "ab")) as members:
        a, b = members
        await b.wait_formed(2)
        c = FakeAgent("c", spec)
        members.append(c)
        await c.rendezvous.open()
        assert (await c.wait_event(NodeStandby)).maximum == 2
        members.remove(b)
        rank = b.place.span.group_rank
        await b.rendezvous.leave("enough")
        b.close()
        assert (await c.wait_formed(2)).span.group_rank == rank
        assert (await c.wait_event(StandbyPromoted)).group_rank == rank
        await a.wait_formed(2, after=0)
        assert [len(a.started), len(a.stopped)] == [2, 1]


async def test_a_failure_restarts_all_nodes() -> None:
    """All nodes share the budget and the outcome."""
    spec = job_spec(free_endpoint(), "2", max_restarts=2)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as members:
        a, b = members
        for restarts, culprit in enumerate((b, a, b)):
            assert (await a.wait_formed(2, after=restarts - 1)).restarts == restarts
            assert (await b.wait_formed(2, after=restarts - 1)).restarts == restarts
            assert a.place.attempt == restarts
            culprit.fail(code=40 + restarts)
        for one in members:
            outcome = await one.wait_ended()
            assert outcome.state is JobState.FAILED
            assert outcome.exit_code == 42
            assert [each.host for each in outcome.failures] == ["b"]
            assert outcome.restarts == 2
            assert "all 2 restarts are used up" in outcome.why
        assert a.stopped[0].why == "a worker on b has failed"
        assert a.causes[1].root.status.code == 40


async def test_the_delay_is_waited_once_for_all_nodes() -> None:
    policy = RestartPolicy(backoff=Backoff(initial=0.3, jitter=False))
    spec = job_spec(free_endpoint(), "2", max_restarts=1, restart=policy)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        b.fail()
        await a.wait_formed(2, after=0)
        assert a.causes[-1].delay == pytest.approx(0.3)


async def test_the_callback_is_called_on_the_coordinators_node() -> None:

    async def unused(failure: object) -> RestartAction:
        raise AssertionError("the agent's own way to it is used")

    policy = RestartPolicy(decide=unused)
    spec = job_spec(free_endpoint(), "2", max_restarts=5, restart=policy)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        a.answer = b.answer = RestartAction.GIVE_UP
        b.fail(code=9)
        assert (await b.wait_ended()).exit_code == 9
        assert "restart.decide returned GIVE_UP" in (await a.wait_ended()).why
        coordinator = (await a.wait_event(CoordinatorChanged)).name
        assert {
            one.name: len(one.decision_requests) for one in (a, b) if one.decision_requests
        } == {coordinator: 1}


async def test_a_failure_restarts_nodes_that_have_succeeded() -> None:
    spec = job_spec(free_endpoint(), "2", max_restarts=1)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        a.succeed()
        b.fail()
        assert (await a.wait_formed(2, after=0)).restarts == 1
        await b.wait_formed(2, after=0)
        b.succeed()
        a.succeed()
        for one in (a, b):
            outcome = await one.wait_ended()
            assert (outcome.state, outcome.exit_code) == (JobState.SUCCEEDED, 0)


async def test_a_late_node_is_given_the_recorded_end() -> None:
    """It runs nothing; of the ended job no other key is left."""
    async with StoreServer("127.0.0.1", 0) as server, connect(server.endpoint) as store:
        spec = job_spec(server.endpoint, "2", is_host=False)
        async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
            await all_formed(a, b)
            a.fail(code=7)
            await b.wait_ended()
            await a.wait_ended()
            await asyncio.gather(*(one.rendezvous.leave("over") for one in (a, b)))
        left = ["elastic_aio/run/0/end", "elastic_aio/run/run", "elastic_aio/run/terms"]
        assert sorted(await store.list_keys()) == left
        async with present(FakeAgent("late", spec)) as (late,):
            outcome = await late.wait_ended()
            assert (outcome.state, outcome.exit_code) == (JobState.FAILED, 7)
            assert outcome.why.startswith("the run has ended: ")
            assert outcome.cause is EndCause.RUN_HAD_ENDED
            assert not late.started
        async with follow_job(server.endpoint, "run") as events:
            (missed, finished) = [event async for event in events]
        assert isinstance(missed, EventsMissed)
        assert isinstance(finished, JobFinished)
        assert finished.exit_code == 7


async def test_events_of_a_run_id_that_is_used_again() -> None:
    """A reader that begins during the second job sees that job, and not the first one's end."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(server.endpoint, "1", is_host=False, reuse=True)
        for turn in range(2):
            async with present(FakeAgent("a", spec)) as (a,):
                await a.wait_formed(1)
                async with follow_job(server.endpoint, "run") as events:
                    seen = [await anext(events)]
                    assert isinstance(seen[0], NodeJoined), turn
                    a.succeed()
                    await a.wait_ended()
                    seen += [event async for event in events]
                assert isinstance(seen[-1], JobFinished)
                assert sum(isinstance(event, JobFinished) for event in seen) == 1
                assert [event.seq for event in seen] == list(range(len(seen)))
                await a.rendezvous.leave("over")


async def test_a_run_id_can_be_used_again() -> None:
    """At a store that outlives the job, the next one begins at round 0."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(f"127.0.0.1:{server.port}", "2", reuse=True)
        for _ in range(3):
            async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
                await all_formed(a, b)
                assert (a.place.round, a.place.attempt) == (0, 0)
                a.succeed()
                b.succeed()
                await a.wait_ended()
                await b.wait_ended()


def has_other_coordinator(agent: FakeAgent, former: str) -> bool:
    """Whether a member has seen another coordinator than the former one."""
    changes = [event for event in agent.events if isinstance(event, CoordinatorChanged)]
    return any(event.name != former for event in changes)


async def test_another_coordinator_takes_over() -> None:
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(f"127.0.0.1:{server.port}", "1:3")
        async with present(*(FakeAgent(name, spec) for name in "abc")) as members:
            for one in members:
                await one.wait_formed(3)
            first = (await members[0].wait_event(CoordinatorChanged)).name
            leaver = next(one for one in members if one.name == first)
            members.remove(leaver)
            await leaver.rendezvous.leave("enough")
            leaver.close()
            for one in members:
                await one.wait_formed(2)
                await one.wait_until(functools.partial(has_other_coordinator, one, first))
                assert one.place.restarts == 0
            assert len({(one.place.round, one.place.formed_by) for one in members}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
async def test_workers_run_on_at_another_store(keeps: bool) -> None:
    """Unless `keep_workers` is off."""
    endpoint = free_endpoint()
    port = int(endpoint.rpartition(":")[2])
    server = StoreServer("127.0.0.1", port)
    await server.start()
    # Nodes that have succeeded, and whose leases are over by then, wait for another's run.
    times: dict[str, Any] = {"heartbeat_timeout": 20.0, "store_grace": 20.0}
    spec = job_spec(endpoint, "2", is_host=False, keep_workers=keeps, **times)
    async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
        await all_formed(a, b)
        await server.aclose()
        for one in (a, b):
            assert endpoint in (await one.wait_event(RendezvousStoreLost)).endpoint
        async with StoreServer("127.0.0.1", port):
            for one in (a, b):
                assert not (await one.wait_event(RendezvousStoreRecovered)).is_host
            if not keeps:
                for one in (a, b):
                    assert (await one.wait_formed(2, after=0)).restarts == 0
            b.succeed()
            a.succeed()
            assert (await a.wait_ended()).state is JobState.SUCCEEDED
            assert (await b.wait_ended()).state is JobState.SUCCEEDED
            assert {len(a.started), len(b.started)} == ({1} if keeps else {2})
            assert len(a.stopped) == (0 if keeps else 1)
            # Before the store is gone, or they could not see each other off.
            await asyncio.gather(*(one.rendezvous.leave("over") for one in (a, b)))


@pytest.mark.slow
async def test_a_node_without_a_store_fails() -> None:
    """It stops its workers after the grace period."""
    endpoint = free_endpoint()
    server = StoreServer("127.0.0.1", int(endpoint.rpartition(":")[2]))
    await server.start()
    spec = job_spec(endpoint, "1", is_host=False, store_grace=0.3, read_timeout=2.0)
    spec = spec.replace(nnodes="1:2")
    async with present(FakeAgent("a", spec)) as (a,):
        await a.wait_formed(1)
        await server.aclose()
        await a.wait_until(lambda: a.stopped)
        assert "no store could be found for 0.3 s" in a.stopped[0].why
        outcome = await a.wait_ended()
        assert outcome.exit_code == RENDEZVOUS_FAILED
        assert endpoint in outcome.why


async def test_a_refused_node_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store grants one lease; the second node waits half a second before its third attempt."""
    monkeypatch.setattr("random.random", lambda: 1.0)
    limits = ServerLimits(keyspace=KeyspaceLimits(leases=1))
    async with StoreServer("127.0.0.1", limits=limits) as server:
        spec = job_spec(server.endpoint, "2", is_host=False)
        a, b = FakeAgent("a", spec), FakeAgent("b", spec)
        async with present(a) as members:
            await a.wait_event(CoordinatorChanged)
            begin = time.monotonic()
            await b.rendezvous.open()
            members.append(b)
            await b.wait_until(
                lambda: sum(isinstance(one, RendezvousStoreLost) for one in b.events) == 3
            )
            assert time.monotonic() - begin > 0.5
            assert (await b.wait_event(RendezvousStoreLost)).why == "there are too many leases"


async def test_a_node_joins_with_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests are sent together, and nothing is asked that a single endpoint cannot answer."""
    received: dict[Connection, int] = {}
    data_received = Connection.data_received

    def count(self: Connection, data: bytes) -> None:
        received[self] = received.get(self, 0) + 1
        data_received(self, data)

    async with StoreServer("127.0.0.1") as server:
        monkeypatch.setattr(Connection, "data_received", count)
        spec = job_spec(server.endpoint, "2", is_host=False, heartbeat_timeout=60)
        async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
            await all_formed(a, b)
            # The opening, HELLO, the run, its end, the lease, three watches, two statuses.
            assert min(received.values()) <= 9


async def test_garbage_in_the_store_stops_no_worker() -> None:
    endpoint = free_endpoint()
    spec = job_spec(endpoint, "2")
    async with present(FakeAgent("a", spec)) as members:
        (a,) = members
        member = (await a.wait_event(NodeJoined)).member
        async with connect(endpoint) as store:
            ours = store.prefixed("elastic_aio/run/0")
            for text in (b"", b"\x00\xff", b"{}", b"[" * 100_000, b'{"serial":"x"}'):
                await ours.set("t/stranger", text)
                await ours.set(f"o/{member}", text)
            order = await ours.get("o/stranger", timeout=10)
            assert b"cannot be read by this version" in order
            b = FakeAgent("b", spec)
            members.append(b)
            await b.rendezvous.open()
            await all_formed(b, a)


async def test_an_unreadable_leader_record_is_replaced() -> None:
    async with StoreServer("127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.port}"
        async with connect(endpoint) as store:
            await store.set("elastic_aio/run/0/coordinator", b"\xff garbage")
        spec = job_spec(endpoint, "2")
        async with present(FakeAgent("a", spec), FakeAgent("b", spec)) as (a, b):
            await all_formed(a, b)
            a.succeed()
            b.succeed()
            await a.wait_ended()
            await b.wait_ended()


async def test_settings_that_differ_between_nodes_are_published() -> None:
    endpoint = free_endpoint()
    a = FakeAgent("a", job_spec(endpoint, "2", max_restarts=0, heartbeat_timeout=10.0))
    b = FakeAgent("b", job_spec(endpoint, "2", max_restarts=5, heartbeat_timeout=20))
    async with present(a, b):
        await b.wait_formed(2)
        joined = {one.name: one for one in a.events if isinstance(one, NodeJoined)}
        assert joined["a"].differs == ()
        assert joined["b"].differs == (
            "max_restarts is 5, but the default on the node of the coordinator",
            "rendezvous.heartbeat_timeout is 20, but 10 on the node of the coordinator",
        )


async def test_static_ranks_are_binding() -> None:
    """The workers use the nodes' store; a second claimant of a rank waits for it."""
    endpoint = free_endpoint()
    spec = [job_spec(endpoint, "2", backend="static", node_rank=rank) for rank in (0, 1, 1)]
    b = FakeAgent("b", spec[1])
    twin = FakeAgent("twin", spec[2])
    a = FakeAgent("a", spec[0])
    async with present(b) as members:
        await asyncio.sleep(0.2)
        members.append(a)
        await a.rendezvous.open()
        for rank, one in enumerate((a, b)):
            place = await one.wait_formed(2)
            assert place.span.group_rank == rank
            assert f"{place.master_addr}:{place.master_port}" == endpoint
        members.append(twin)
        await twin.rendezvous.open()
        standby = await twin.wait_event(NodeStandby)
        assert standby.why == "node rank 1 is held by b (pid 1000)"
        members.remove(b)
        await b.rendezvous.leave("enough")
        b.close()
        assert (await twin.wait_formed(2)).span.group_rank == 1


async def test_what_the_shared_store_refuses_is_reported() -> None:
    """Once, by the node that serves it; workers use the nodes' own store with "static"."""
    endpoint = free_endpoint()
    specs = [job_spec(endpoint, "2", backend="static", node_rank=rank) for rank in (0, 1)]
    a, b = (FakeAgent(f"{i}", one) for i, one in enumerate(specs))
    host, _, port = endpoint.rpartition(":")
    async with present(a, b):
        await a.wait_formed(2)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(OPENING + encode(wire.SET, b"/n", b"no number"))
            writer.write(encode(wire.ADD, b"/n", 1))
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.close()
        await a.wait_event(WorkerStoreRefused)
        refused = [event for event in a.events if isinstance(event, WorkerStoreRefused)]
        assert [event.why for event in refused] == [
            "sent a request that is refused: the value is not a 64-bit number"
        ]
        assert not any(isinstance(event, WorkerStoreRefused) for event in b.events)


async def test_two_static_jobs_never_share_a_port() -> None:
    """Rank 0 of the second job names the port, its holder and its run; no key is touched."""
    endpoint = free_endpoint()
    specs = [job_spec(endpoint, "2", backend="static", node_rank=rank) for rank in (0, 1)]
    x = [FakeAgent(f"x{i}", one, run_id="x") for i, one in enumerate(specs)]
    y = [FakeAgent(f"y{i}", one, run_id="y") for i, one in enumerate(specs)]
    async with present(*x) as members, connect(endpoint) as store:
        for one in x:
            await one.wait_formed(2)
        await store.set("of a worker of x", "1")
        for one in y:
            members.append(one)
            await one.rendezvous.open()
        why = (await y[0].wait_ended()).why
        assert f"port {endpoint.rpartition(':')[2]} is in use by" in why
        assert why.endswith(
            f"(pid {os.getpid()}), which this job cannot use: it belongs to the run 'x'"
        )
        assert await store.check(["of a worker of x"])
        for one in x:
            one.succeed()
        for one in x:
            assert (await one.wait_ended()).state is JobState.SUCCEEDED
        # The second node of y waits for its own first node.
        assert not y[1].started
        assert y[1].outcome is None


async def test_a_second_rank_0_of_one_run_is_refused() -> None:
    """Both jobs have the default run id of the command line."""
    endpoint = free_endpoint()
    spec = job_spec(endpoint, "2", backend="static", node_rank=0)
    a, twin = (FakeAgent(name, spec) for name in ("a", "twin"))
    async with present(a) as members:
        await a.wait_event(RoundForming)
        members.append(twin)
        await twin.rendezvous.open()
        assert "another node of rank 0 serves the run 'run' there" in (await twin.wait_ended()).why


async def test_a_static_job_claims_a_store_that_no_node_serves() -> None:
    endpoint = free_endpoint()
    specs = [job_spec(endpoint, "1", backend="static", node_rank=0)] * 2
    x, y = (FakeAgent(name, one, run_id=name) for name, one in zip("xy", specs, strict=True))
    server = StoreServer("127.0.0.1", int(endpoint.rpartition(":")[2]))
    async with server, present(x) as members:
        await x.wait_formed(1)
        members.append(y)
        await y.rendezvous.open()
        why = (await y.wait_ended()).why
        assert "it belongs to the run 'x' until `aio-elastic gc` removes it" in why


@pytest.mark.slow
async def test_a_run_never_sees_the_keys_of_another_one() -> None:
    """Although the id of one begins with that of the other and a slash."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = job_spec(server.endpoint, "2", is_host=False)
        a, b = (FakeAgent(f"n{n}", spec, run_id=id) for n, id in enumerate(("exp", "exp/t")))
        async with present(a, b):
            for one in (a, b):
                assert (await one.wait_event(RoundForming)).joined == 1
            # A node that joins now makes a round of two, and its own run only.
            c = FakeAgent("c", spec, run_id="exp")
            async with present(c):
                assert (await c.wait_formed(2)).round == 0
                await a.wait_formed(2)
                assert not b.started


async def test_static_nodes_restart_with_a_clean_store() -> None:
    endpoint = free_endpoint()
    members = [
        FakeAgent(
            name,
            job_spec(endpoint, "2", backend="static", node_rank=rank, max_restarts=1),
        )
        for rank, name in enumerate("ab")
    ]
    async with present(*members) as (a, b), contextlib.AsyncExitStack() as stack:
        await all_formed(a, b)
        store = await stack.enter_async_context(connect(endpoint))
        await store.set("of a worker", "x")
        b.fail()
        for one in (a, b):
            assert (await one.wait_formed(2, after=0)).restarts == 1
        assert not await store.check(["of a worker"])


async def test_a_static_round_is_over_before_the_next_begins() -> None:
    """Slow workers would write into the store of the next round."""
    endpoint = free_endpoint()
    spec = [job_spec(endpoint, "3", backend="static", node_rank=rank) for rank in range(3)]
    a, b, c = (FakeAgent(n, one) for n, one in zip("abc", spec, strict=True))
    async with present(a, b, c) as members, contextlib.AsyncExitStack() as stack:
        for one in members:
            await one.wait_formed(3)
        store = await stack.enter_async_context(connect(endpoint))
        b.stops_on_order = False
        members.remove(c)
        await c.rendezvous.leave("enough")
        c.close()
        again = FakeAgent("c", spec[2])
        members.append(again)
        await again.rendezvous.open()
        await a.wait_until(lambda: [one for one in a.events if isinstance(one, NodeJoined)][3:])
        await b.wait_until(lambda: b.stopped)
        await asyncio.sleep(0.2)  # room for a round that is formed too early
        assert not again.started
        assert len(a.started) == 1
        await store.set("of a worker", "x")
        b.rendezvous.report(RoundStopped(0))
        for one in (a, b, again):
            assert (await one.wait_formed(3, after=0)).restarts == 0
        assert not await store.check(["of a worker"])


async def test_a_member_may_leave_at_any_time() -> None:
    spec = job_spec(free_endpoint(), "1:2", last_call_timeout=0.05)
    async with present(FakeAgent("a", spec)) as (a,):
        await a.wait_formed(1)
        for step in range(30):
            b = FakeAgent("b", spec)
            await b.rendezvous.open()
            for _ in range(step):
                await asyncio.sleep(0)
            if step % 3 == 0:
                await asyncio.sleep(step / 1000)
            await b.rendezvous.leave("changed its mind")
            b.close()
        await a.wait_until(lambda: a.place.span.group_world_size == 1)
        assert a.outcome is None


async def test_a_cancelled_leave_is_completed() -> None:
    spec = job_spec(free_endpoint(), "1:2", last_call_timeout=0.05)
    a = FakeAgent("a", spec)
    await a.rendezvous.open()
    await a.wait_formed(1)
    leaving = asyncio.ensure_future(a.rendezvous.leave("enough"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    a.close()
