"""Members at a real etcd: the tests of `test_dynamic`, and what only an engine does."""

from __future__ import annotations

import asyncio
import functools
import socket
import uuid
from collections.abc import Awaitable, Callable

import pytest

from elastic_aio.node_events import NodeLost, RendezvousStoreLost, RendezvousStoreRecovered
from elastic_aio.rendezvous.failure_detector import FailureDetector
from elastic_aio.rendezvous.messages import DetectorPort
from elastic_aio.spec.engine import EngineSpec
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.store import Lease
from tests.rendezvous import test_dynamic
from tests.support.chaos import ChaosProxy
from tests.support.etcd import leases_of
from tests.support.fake_agent import FakeAgent, job_spec, present

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


@pytest.fixture
def spec_of() -> Callable[..., LaunchSpec]:
    """Return `job_spec` for etcd, with keys of its own."""
    return functools.partial(
        job_spec, backend="etcd", engine=EngineSpec(key_prefix=f"/{uuid.uuid4().hex}")
    )


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.__name__)
async def test_as_at_a_store_of_a_node(
    case: Callable[[], Awaitable[None]],
    etcd_endpoint: str,
    spec_of: Callable[..., LaunchSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(test_dynamic, "job_spec", spec_of)
    monkeypatch.setattr(test_dynamic, "free_endpoint", lambda: etcd_endpoint)
    await case()


async def test_a_node_that_cannot_reach_etcd_is_replaced_and_comes_back(
    etcd_endpoint: str, spec_of: Callable[..., LaunchSpec]
) -> None:
    """Its own workers are left alone until it learns of the round without it."""
    a = FakeAgent("a", spec_of(etcd_endpoint, "1:2"))
    async with present(a) as members, ChaosProxy(int(etcd_endpoint.rpartition(":")[2])) as proxy:
        b = FakeAgent("b", spec_of(proxy.endpoint, "1:2", read_timeout=1.0))
        members.append(b)
        await b.rendezvous.open()
        await a.wait_formed(2)
        await b.wait_formed(2)
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


async def test_workers_stop_after_the_store_grace(
    etcd_endpoint: str, spec_of: Callable[..., LaunchSpec]
) -> None:
    """If one is set: then they never run beside those that replace them."""
    async with ChaosProxy(int(etcd_endpoint.rpartition(":")[2])) as proxy:
        a = FakeAgent("a", spec_of(proxy.endpoint, "1", store_grace=1.75))
        async with present(a):
            await a.wait_formed(1)
            proxy.is_refusing = True
            proxy.cut()
            await a.wait_until(lambda: a.stopped)
            assert a.stopped[-1].is_cut_off
            assert "no store could be found for 1.75 s" in a.stopped[-1].why


async def test_a_reset_connection_costs_nothing(
    etcd_endpoint: str, spec_of: Callable[..., LaunchSpec]
) -> None:
    a = FakeAgent("a", spec_of(etcd_endpoint, "1:2"))
    async with present(a) as members, ChaosProxy(int(etcd_endpoint.rpartition(":")[2])) as proxy:
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


async def test_the_keys_of_a_job_are_under_a_lease(
    etcd_endpoint: str, spec_of: Callable[..., LaunchSpec]
) -> None:
    """So etcd removes them after the retention, however the job ends."""
    prefix = f"/{uuid.uuid4().hex}"
    spec = spec_of(etcd_endpoint, "1", engine=EngineSpec(key_prefix=prefix, retention=60.0))
    a = FakeAgent("a", spec)
    async with present(a):
        await a.wait_formed(1)
        kept = leases_of(etcd_endpoint, prefix)
        assert {"run", "terms", "instance"} <= {key.rpartition("/")[2] for key in kept}
        assert all(kept.values())


async def test_a_leader_whose_port_does_not_answer_costs_nothing(
    etcd_endpoint: str, spec_of: Callable[..., LaunchSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall between the nodes, for example: they need only etcd."""
    spec = spec_of(etcd_endpoint, "2")
    a, b = FakeAgent("a", spec), FakeAgent("b", spec)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def serve(_: FailureDetector, address: str, lease: Lease) -> DetectorPort:
            return DetectorPort(address, silent.getsockname()[1], "0" * 32, lease.lease_id.decode())

        monkeypatch.setattr(FailureDetector, "serve", serve)
        async with present(a, b):
            await a.wait_formed(2)
            await b.wait_formed(2)
            await asyncio.sleep(1.0)
            b.fail()
            for agent in (a, b):
                await agent.wait_ended()
                assert len(agent.started) == 1
                assert not any(
                    isinstance(one, (NodeLost, RendezvousStoreLost)) for one in agent.events
                )
