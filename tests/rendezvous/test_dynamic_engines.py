"""Members at real engines: the tests of `test_dynamic`, and what only an engine does."""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elastic_aio.node_events import (
    CoordinatorChanged,
    NodeLost,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
)
from elastic_aio.rendezvous import election
from elastic_aio.rendezvous.coordinator_link import CoordinatorLink
from elastic_aio.rendezvous.messages import DetectorPort
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import EngineSpec
from elastic_aio.store import Lease
from tests.rendezvous import test_dynamic
from tests.support.chaos import ChaosProxy
from tests.support.etcd import leases_of
from tests.support.fake_agent import PATIENCE_S, FakeAgent, all_formed, job_spec, present
from tests.support.redis import RedisProcess, ask

pytestmark = pytest.mark.engine

SHARED: list[Callable[[], Awaitable[None]]] = [
    test_dynamic.test_a_full_group_forms_at_once,
    test_dynamic.test_preferred_ranks_and_roles,
    test_dynamic.test_the_last_call_ends,
    test_dynamic.test_too_few_nodes_fail_and_name_the_present_ones,
    test_dynamic.test_scaling_up_counts_no_restart,
    test_dynamic.test_a_node_that_leaves_is_replaced,
    test_dynamic.test_too_few_remaining_nodes_wait_for_another,
    test_dynamic.test_a_surplus_node_stands_by_and_takes_a_free_rank,
    test_dynamic.test_a_failure_restarts_all_nodes,
    test_dynamic.test_the_delay_is_waited_once_for_all_nodes,
    test_dynamic.test_the_callback_is_called_on_the_coordinators_node,
    test_dynamic.test_a_failure_restarts_nodes_that_have_succeeded,
    test_dynamic.test_settings_that_differ_between_nodes_are_published,
    test_dynamic.test_a_member_may_leave_at_any_time,
    test_dynamic.test_a_cancelled_leave_is_completed,
]


Spec = Callable[..., LaunchSpec]


@pytest.fixture(params=["etcd", "redis"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, backend: str) -> str:
    """The endpoint of an engine that the tests share."""
    return str(request.getfixturevalue(f"{backend}_endpoint"))


@pytest.fixture
def spec_of(backend: str) -> Spec:
    """Return `job_spec` for an engine, with keys of its own."""
    engine = EngineSpec(key_prefix=f"/{uuid.uuid4().hex}")
    return functools.partial(job_spec, backend=backend, engine=engine)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.__name__)
async def test_as_at_a_store_of_a_node(
    case: Callable[[], Awaitable[None]],
    endpoint: str,
    spec_of: Spec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_dynamic, "job_spec", spec_of)
    monkeypatch.setattr(test_dynamic, "free_endpoint", lambda: endpoint)
    await case()


async def test_a_stop_of_all_nodes_is_no_loss(endpoint: str, spec_of: Spec) -> None:
    """The last node lets the engine know that no worker is left, and the numbers continue."""
    spec = spec_of(endpoint, "1:2", last_call_timeout=0.0)
    for turn in range(8):
        a = FakeAgent("a", spec)
        async with present(a):
            placement = await a.wait_formed(1)
        assert (placement.round, placement.changes) == (turn, 0)


async def test_a_node_that_cannot_reach_the_engine_is_replaced_and_comes_back(
    endpoint: str, spec_of: Spec
) -> None:
    """Its own workers are left alone until it learns of the round without it."""
    a = FakeAgent("a", spec_of(endpoint, "1:2", last_call_timeout=60.0))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        await a.wait_event(CoordinatorChanged)  # another coordinator would report no loss
        b = FakeAgent("b", spec_of(proxy.endpoint, "1:2", read_timeout=1.0, last_call_timeout=60.0))
        members.append(b)
        await b.rendezvous.open()
        await all_formed(a, b)
        proxy.is_refusing = True
        proxy.cut()
        await a.wait_formed(1)
        assert (await a.wait_event(NodeLost)).name == "b"
        await b.wait_event(RendezvousStoreLost)
        assert not b.stopped
        proxy.is_refusing = False
        await b.wait_event(RendezvousStoreRecovered)
        round = (await a.wait_formed(2, after=1)).round
        assert (await b.wait_formed(2, after=1)).round == round == 2


async def test_workers_stop_after_the_store_grace(endpoint: str, spec_of: Spec) -> None:
    """If one is set: then they never run beside those that replace them."""
    async with ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        a = FakeAgent("a", spec_of(proxy.endpoint, "1", store_grace=1.75))
        async with present(a):
            await a.wait_formed(1)
            proxy.is_refusing = True
            proxy.cut()
            await a.wait_until(lambda: a.stopped)
            assert a.stopped[-1].is_cut_off
            # The connection may not be given up yet.
            assert re.match(
                "(no store could be found|the store has been silent) for 1.8 s", a.stopped[-1].why
            )


async def test_a_reset_connection_costs_nothing(endpoint: str, spec_of: Spec) -> None:
    a = FakeAgent("a", spec_of(endpoint, "1:2"))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", spec_of(proxy.endpoint, "1:2"))
        members.append(b)
        await b.rendezvous.open()
        await b.wait_formed(2)
        for _ in range(5):
            before = proxy.connections
            proxy.cut()
            while proxy.connections == before:
                await asyncio.sleep(0.01)
        b.fail()  # the remaining nodes read the outcome
        await a.wait_until(lambda: a.stopped)
        assert len(a.started) == len(b.started) == 1
        assert not any(
            isinstance(one, (NodeLost, RendezvousStoreLost)) for one in a.events + b.events
        )


async def test_a_leader_whose_port_does_not_answer_costs_nothing(
    endpoint: str, spec_of: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall between the nodes, for example: they need only the engine."""
    spec = spec_of(endpoint, "2")
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def serve(_: CoordinatorLink, address: str, lease: Lease) -> DetectorPort:
            return DetectorPort(address, silent.getsockname()[1], "0" * 32, lease.lease_id.decode())

        monkeypatch.setattr(CoordinatorLink, "serve", serve)
        async with present(a, b):
            await all_formed(a, b)
            await asyncio.sleep(1.0)
            b.fail()
            for agent in (a, b):
                await agent.wait_ended()
                assert len(agent.started) == 1
                assert not any(
                    isinstance(one, (NodeLost, RendezvousStoreLost)) for one in agent.events
                )


@pytest.mark.parametrize("backend", ["etcd"], indirect=True)
async def test_the_keys_of_a_job_are_under_a_lease(etcd_endpoint: str, spec_of: Spec) -> None:
    """So etcd removes them after the retention, however the job ends."""
    prefix = f"/{uuid.uuid4().hex}"
    spec = spec_of(etcd_endpoint, "1", engine=EngineSpec(key_prefix=prefix, retention=60.0))
    a = FakeAgent("a", spec)
    async with present(a):
        await a.wait_formed(1)
        kept = leases_of(etcd_endpoint, prefix)
        assert {"run", "terms", "instance"} <= {key.rpartition("/")[2] for key in kept}
        assert all(kept.values())


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_the_keys_of_a_job_have_a_time_to_live(redis_endpoint: str, spec_of: Spec) -> None:
    """So Redis removes them after the retention, however the job ends."""
    prefix = f"/{uuid.uuid4().hex}"
    spec = spec_of(redis_endpoint, "1", engine=EngineSpec(key_prefix=prefix, retention=60.0))
    a = FakeAgent("a", spec)
    async with present(a):
        await a.wait_formed(1)
        reply = ask(redis_endpoint, "KEYS", f"*{prefix}*").split("\r\n")
        keys = [line for line in reply if line.startswith("{")]
        assert len(keys) == 7
        assert len({key[: key.index("}")] for key in keys}) == 1
        left = [int(ask(redis_endpoint, "PTTL", key)[1:]) for key in keys]
        assert all(0 < one <= 60_000 for one in left), left


def leaders_of(agent: FakeAgent) -> list[int]:
    return [one.term for one in agent.events if isinstance(one, CoordinatorChanged)]


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_lost_changes_begin_another_incarnation(tmp_path: Path, spec_of: Spec) -> None:
    """A fail-over to a server without the last changes: the round goes on, under a new leader.

    The counter of terms is among what was lost, so a term is given twice.
    """
    with RedisProcess(tmp_path, "--appendonly", "no", appends=False) as server:
        endpoint = server.endpoint
        spec = spec_of(endpoint, "2", read_timeout=1.0)
        a, b = FakeAgent("a", spec), FakeAgent("b", spec)
        ask(endpoint, "SET", "other", "1")
        assert ask(endpoint, "SAVE") == "+OK\r\n"
        async with present(a) as members:
            members.append(b)
            await b.rendezvous.open()
            await all_formed(a, b)
            server.kill()
            for agent in (a, b):
                await agent.wait_event(RendezvousStoreLost)
            server.start()
            for agent in (a, b):
                await agent.wait_event(RendezvousStoreRecovered)
            async with asyncio.timeout(PATIENCE_S):
                while min(len(leaders_of(agent)) for agent in (a, b)) < 2:
                    await asyncio.sleep(0.01)
            assert [leaders_of(agent) for agent in (a, b)] == [[1, 1]] * 2
            assert not a.stopped + b.stopped
            ranks = [one.started[0].span.group_rank for one in (a, b)]
            assert sorted(ranks) == [0, 1]
            a.fail()  # the new leader has both nodes
            for agent in (a, b):
                await agent.wait_ended()
            assert len(a.started) == len(b.started) == 1


async def test_a_member_connects_to_the_leader_once_it_is_in_a_round(
    endpoint: str, spec_of: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a round forms the leader has most to do."""
    spec = spec_of(endpoint, "2", last_call_timeout=60.0)
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    watching = asyncio.get_running_loop().create_future()

    async def watch_leader(*_: object) -> None:
        watching.set_result(bool(a.started or b.started))
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(election, "_PLACED_WITHIN", 60.0)
    monkeypatch.setattr(CoordinatorLink, "watch_leader", watch_leader)
    async with present(a, b):
        assert await asyncio.wait_for(watching, PATIENCE_S)
