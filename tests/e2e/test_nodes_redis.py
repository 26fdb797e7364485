"""Jobs of several nodes that meet at Redis, and Redis fails."""

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
from tests.support.redis import REDIS, WHY_NOT, RedisProcess

pytestmark = [
    pytest.mark.black_box,
    pytest.mark.engine,
    pytest.mark.skipif(REDIS is None, reason=WHY_NOT),
]

# Short, so that a Redis which is away for some seconds outlasts the leases.
CONF = {"heartbeat_timeout": 4}


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[RedisProcess]:
    """Run a Redis."""
    directory.mkdir()
    with RedisProcess(directory) as server:
        yield server


def job(directory: Path, nnodes: object, endpoint: str, **conf: object) -> Cluster:
    """Return a job whose nodes meet at Redis."""
    settings = {**CONF, **conf}
    return Cluster(directory, nnodes, endpoint=endpoint, rdzv_backend="redis", conf=settings)


def assert_undisturbed(*nodes: AgentProcess) -> None:
    """Check that the workers are those of the first round."""
    for node in nodes:
        assert len(node.events_of(RoundFormed)) == 1
        assert {event.attempt for event in node.events_of(WorkerStarted)} == {0}
        assert not node.events_of(NodeLost)


async def test_a_job_meets_at_redis(tmp_path: Path) -> None:
    """A lost node is replaced, and the keys of the ended job are left to their retention."""
    with redis(tmp_path / "redis") as server:
        async with job(tmp_path / "job", "1:2", server.endpoint, last_call_timeout=60) as cluster:
            nodes = [cluster.start(), cluster.start()]
            await cluster.workers(*nodes, attempt=0)
            await nodes[1].kill()
            await cluster.workers(nodes[0], attempt=1, world_size=1)
            again = cluster.start()
            await cluster.workers(nodes[0], again, attempt=2, world_size=2)
            assert {one.code for one in await cluster.finish(nodes[0], again, attempt=2)} == {0}
            events = cluster.follow_events(rdzv_backend="redis")
            await events.wait_for(lambda event: isinstance(event, JobFinished), "the end")
            assert any(isinstance(event, NodeJoined) for event in events.entries)
        late = run_cli(
            "--nnodes=2", "--rdzv-backend=valkey", "--rdzv-endpoint", server.endpoint,
            "--rdzv-id=job", __file__,
        )  # fmt: skip
        assert late.code == 0, late.err


async def test_redis_is_killed_and_started_again(tmp_path: Path) -> None:
    """The agents notice, wait without a limit, and come back; no worker is restarted."""
    with redis(tmp_path / "redis") as server:
        async with job(tmp_path / "job", 2, server.endpoint, read_timeout=1) as cluster:
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
