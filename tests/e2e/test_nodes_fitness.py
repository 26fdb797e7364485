"""Nodes that are excluded, or are not healthy, and jobs of several nodes without progress."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    MembershipChanged,
    NodeExcluded,
    NodeStandby,
    Restarting,
    RoundFormed,
    StandbyPromoted,
)
from tests.support.cli import CLI, run_program
from tests.support.cluster import AgentProcess, Cluster, launcher_with
from tests.support.etcd import ETCD, WHY_NOT, EtcdProcess

pytestmark = pytest.mark.black_box

RESTARTS = {"max_restarts": 5}


@asynccontextmanager
async def job(directory: Path, backend: str = "c10d", **options: Any) -> AsyncIterator[Cluster]:
    """A job of three nodes, which meet at one of them or at etcd."""
    chosen = {**RESTARTS, **options}
    if backend == "c10d":
        async with Cluster(directory / "job", 3, **chosen) as cluster:
            yield cluster
        return
    (directory / "engine").mkdir()
    with EtcdProcess(directory / "engine") as server:
        endpoint = server.endpoint
        async with Cluster(
            directory / "job", 3, endpoint=endpoint, rdzv_backend=backend, **chosen
        ) as cluster:
            yield cluster


async def start_with_spare(cluster: Cluster) -> tuple[list[AgentProcess], AgentProcess]:
    """Start three nodes and a fourth one, which is on standby; the first one has rank 0."""
    nodes = [*await cluster.start_all(3)]
    ranks = {node: (await node.round_formed()).group_rank for node in nodes}
    spare = cluster.start("spare")
    await spare.event(NodeStandby)
    return sorted(nodes, key=lambda node: ranks[node]), spare


async def exclude(node: AgentProcess, reason: str = "ECC error") -> None:
    (worker,) = await node.workers()
    assert await node.ask(worker, f"exclude {reason}") == "True"


BACKENDS = [
    "c10d",
    pytest.param(
        "etcd", marks=[pytest.mark.engine, pytest.mark.skipif(ETCD is None, reason=WHY_NOT)]
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rank", [0, 2])
async def test_a_standby_takes_the_place_of_an_excluded_node(
    rank: int, backend: str, tmp_path: Path
) -> None:
    """One restart; also that of the node which serves the store and coordinates."""
    async with job(tmp_path, backend) as cluster:
        nodes, spare = await start_with_spare(cluster)
        bad = nodes[rank]
        staying = [node for node in nodes if node is not bad]
        await exclude(bad)
        (worker,) = await bad.workers()
        bad.order(worker, "exit 3")
        workers = await cluster.workers(*staying, spare, attempt=1, restart_count=1)
        assert {one.world_size for one in workers} == {3}
        own = await bad.event(NodeExcluded, is_own=True)
        assert (own.why, own.seconds) == (f"rank {rank}: ECC error", None)
        assert (await spare.event(StandbyPromoted)).group_rank == rank
        for node in staying:
            first, second = node.events_of(RoundFormed)
            assert first.group_rank == second.group_rank
            assert (len(node.events_of(Restarting)), node.events_of(MembershipChanged)) == (1, [])
        assert len(bad.events_of(RoundFormed)) == 1
        shown = run_program([*CLI, "status", str(bad.pid)]).out
        assert "excluded" in shown
        assert "ECC error" in shown
        await cluster.succeed(*staying, spare, attempt=1)
        assert (await bad.ended()).code == 0


async def test_an_excluded_node_takes_part_again_after_its_time(tmp_path: Path) -> None:
    """It is on standby then, and takes the place of a node that is lost."""
    async with job(tmp_path, exclude_for=1) as cluster:
        nodes, spare = await start_with_spare(cluster)
        bad, *staying = nodes[::-1]
        await exclude(bad)
        (worker,) = await bad.workers()
        bad.order(worker, "exit 3")
        await cluster.workers(*staying, spare, attempt=1)
        await bad.event(NodeExcluded, is_own=True, seconds=1.0)
        standby = await bad.event(NodeStandby)
        excluded = await bad.event(NodeExcluded)
        assert standby.time - excluded.time >= 0.99
        await spare.kill()
        await cluster.workers(*staying, bad, attempt=2, restart_count=1)
        await cluster.succeed(*staying, bad, attempt=2)


async def test_an_exclusion_survives_the_node_that_serves_the_store(tmp_path: Path) -> None:
    """Another node coordinates, and waits for a node that may take part."""
    async with job(tmp_path) as cluster:
        nodes, spare = await start_with_spare(cluster)
        host = cluster.store_host()
        assert host is not None
        bad, *staying = [node for node in nodes if node is not host]
        await exclude(bad)
        (worker,) = await bad.workers()
        bad.order(worker, "exit 3")
        await cluster.workers(host, *staying, spare, attempt=1)
        await host.kill()
        again = cluster.start("again")
        await cluster.workers(*staying, spare, again, attempt=2)
        assert len(bad.events_of(RoundFormed)) == 1
        await cluster.succeed(*staying, spare, again, attempt=2)
        assert (await bad.ended()).code == 0


async def test_decide_excludes_the_node_of_the_root_cause(tmp_path: Path) -> None:
    policy = "backoff=None, decide=lambda failure: RestartAction.EXCLUDE"
    launcher = launcher_with(policy)
    launcher[-2] = launcher[-2].replace("import Backoff,", "import Backoff, RestartAction,")
    async with job(tmp_path, launcher=launcher) as cluster:
        nodes, spare = await start_with_spare(cluster)
        bad = nodes[1]
        (worker,) = await bad.workers()
        bad.order(worker, "exit 7")
        await cluster.workers(nodes[0], spare, nodes[2], attempt=1, restart_count=1)
        own = await bad.event(NodeExcluded, is_own=True)
        assert own.why.startswith("restart.decide has excluded it: rank 1 (pid ")
        await cluster.succeed(nodes[0], spare, nodes[2], attempt=1)
        assert (await bad.ended()).code == 0


async def test_attempts_without_progress_on_any_node_end_the_job(tmp_path: Path) -> None:
    """The progress of one node counts for all, and all end with the same reason."""
    options: dict[str, Any] = {"max_restarts": "unlimited", "max_attempts_without_progress": 2}
    async with job(tmp_path, **options) as cluster:
        nodes = [*await cluster.start_all(3)]
        steps = [False, True, False, False]
        for attempt, has_step in enumerate(steps):
            failing, other = nodes[attempt % 3], nodes[(attempt + 1) % 3]
            await cluster.workers(*nodes, attempt=attempt)
            (worker,) = await other.workers(attempt=attempt)
            if has_step:
                assert await other.ask(worker, "progress 5") == "True"
            (worker,) = await failing.workers(attempt=attempt)
            failing.order(worker, "exit 9")
        for node in nodes:
            ended = await node.ended()
            assert ended.code == 9
            assert "the last 2 attempts have made no progress" in ended.err
