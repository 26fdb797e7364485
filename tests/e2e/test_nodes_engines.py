"""Jobs of several nodes that meet at an engine, which fails and comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio import (
    CoordinatorChanged,
    JobFinished,
    NodeJoined,
    NodeLost,
    RendezvousStoreAwaited,
    RendezvousStoreLost,
    RendezvousStoreRecovered,
    RoundFormed,
    WorkerStarted,
)
from tests.support.cli import run_cli
from tests.support.cluster import AgentProcess, Cluster
from tests.support.etcd import ETCD, EtcdProcess
from tests.support.redis import REDIS, RedisProcess

pytestmark = [pytest.mark.black_box, pytest.mark.engine]

# Short, so that an engine which is away for some seconds outlasts the leases.
CONF = {"heartbeat_timeout": 4}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.skipif(command is None, reason=f"needs {name}"))
        for name, command in (("etcd", ETCD), ("redis", REDIS))
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def serve(backend: str, directory: Path) -> Iterator[EtcdProcess | RedisProcess]:
    """Run an engine of one server."""
    directory.mkdir()
    with (EtcdProcess if backend == "etcd" else RedisProcess)(directory) as server:
        yield server


def job(directory: Path, nnodes: object, backend: str, endpoint: str, **conf: object) -> Cluster:
    """Return a job whose nodes meet at an engine."""
    settings = {**CONF, **conf}
    return Cluster(directory, nnodes, endpoint=endpoint, rdzv_backend=backend, conf=settings)


def assert_undisturbed(*nodes: AgentProcess) -> None:
    """Check that the workers are those of the first round."""
    for node in nodes:
        assert len(node.events_of(RoundFormed)) == 1
        assert {event.attempt for event in node.events_of(WorkerStarted)} == {0}
        assert not node.events_of(NodeLost)


async def test_a_job_meets_at_an_engine(tmp_path: Path, backend: str) -> None:
    """A lost node is replaced, and the keys of the ended job are left to their retention."""
    with serve(backend, tmp_path / "engine") as server:
        async with job(
            tmp_path / "job", "1:2", backend, server.endpoint, last_call_timeout=60
        ) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes, attempt=0)
            await nodes[1].kill()
            await cluster.workers(nodes[0], attempt=1, world_size=1)
            again = cluster.start()
            await cluster.workers(nodes[0], again, attempt=2, world_size=2)
            assert {one.code for one in await cluster.finish(nodes[0], again, attempt=2)} == {0}
            events = cluster.follow_events(rdzv_backend=backend)
            await events.wait_for(lambda event: isinstance(event, JobFinished), "the end")
            assert any(isinstance(event, NodeJoined) for event in events.entries)
        other_name = {"etcd": "etcd-v2", "redis": "valkey"}[backend]
        late = run_cli(
            "--nnodes=2", "--rdzv-backend", other_name, "--rdzv-endpoint", server.endpoint,
            "--rdzv-id=job", __file__,
        )  # fmt: skip
        assert late.code == 0, late.err


async def test_the_engine_is_killed_and_started_again(tmp_path: Path, backend: str) -> None:
    """The agents notice, wait without a limit, and come back; no worker is restarted."""
    with serve(backend, tmp_path / "engine") as server:
        async with job(tmp_path / "job", 2, backend, server.endpoint, read_timeout=1) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes)
            server.kill()
            for node in nodes:
                lost = await node.event(RendezvousStoreLost)
                assert server.endpoint in lost.why
                awaited = await node.event(RendezvousStoreAwaited)
                assert awaited.time_left is None
                assert "connection refused" in awaited.why
            server.start()
            for node in nodes:
                back = await node.event(RendezvousStoreRecovered)
                assert not back.is_host
                await node.event(CoordinatorChanged, term=2)
            assert {one.code for one in await cluster.finish(*nodes)} == {0}
            assert_undisturbed(*nodes)
            for node in nodes:
                assert node.events_of(JobFinished)
