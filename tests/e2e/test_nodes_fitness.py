"""Nodes that are excluded, or are not healthy, and jobs of several nodes without progress."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    MembershipChanged,
    NodeExcluded,
    NodeJoined,
    NodeStandby,
    Restarting,
    RoundFormed,
    RoundForming,
    StandbyPromoted,
)
from tests.support.children import until
from tests.support.cli import CLI, run_program
from tests.support.cluster import AgentProcess, Cluster, launcher_with
from tests.support.etcd import ETCD, WHY_NOT, EtcdProcess
from tests.support.leaks import alive

pytestmark = pytest.mark.black_box

RESTARTS: dict[str, Any] = {"max_restarts": 5}


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
        refused = run_program([*CLI, "restart", str(bad.pid)])
        assert (refused.code, "no workers to restart (excluded)" in refused.err) == (1, True)
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


CHECK = "echo run >> $NODE_DIRECTORY/checks; cat $NODE_DIRECTORY/fault 2>/dev/null && exit 1; true"


def checks(node: AgentProcess) -> int:
    """Return how often the health check of a node has run."""
    file = node.directory / "checks"
    return file.read_text().count("run") if file.exists() else 0


async def start_faulty(cluster: Cluster, name: str, **options: Any) -> AgentProcess:
    """Start a node whose first health check fails."""
    check = f"[ -e $NODE_DIRECTORY/checks ] || echo a fault > $NODE_DIRECTORY/fault; {CHECK}"
    node = cluster.start(name, health_check=check, **options)
    await node.event(NodeExcluded, is_own=True)
    return node


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_node_joins_once_its_health_check_succeeds(backend: str, tmp_path: Path) -> None:
    """The first one serves the store all the same; the others wait for it."""
    async with job(tmp_path, backend, health_check=CHECK) as cluster:
        bad = await start_faulty(cluster, "bad")
        nodes = [cluster.start(), cluster.start()]
        for node in nodes:
            await node.event(RoundForming, joined=2)
        own = await bad.event(NodeExcluded, is_own=True)
        fault = "its health check has failed (exit code 1): a fault"
        assert (own.why, own.seconds) == (fault, 5.0)
        assert not bad.events_of(RoundFormed)
        (bad.directory / "fault").unlink()
        await cluster.workers(bad, *nodes)
        assert [checks(node) for node in (bad, *nodes)] == [2, 1, 1]
        await cluster.succeed(bad, *nodes)


async def test_a_node_that_is_not_healthy_after_a_failure_is_replaced(tmp_path: Path) -> None:
    """In the same restart; the other nodes are not checked."""
    async with job(tmp_path, health_check=CHECK) as cluster:
        nodes, spare = await start_with_spare(cluster)
        bad, *staying = nodes[::-1]
        (worker,) = await bad.workers()
        (bad.directory / "fault").write_text("broken")
        bad.order(worker, "exit 3")
        await cluster.workers(*staying, spare, attempt=1, restart_count=1)
        own = await bad.event(NodeExcluded, is_own=True)
        assert own.why == "its health check has failed (exit code 1): broken"
        assert {checks(node) for node in (*staying, spare)} == {1}
        assert len(staying[0].events_of(RoundFormed)) == 2
        await cluster.succeed(*staying, spare, attempt=1)
        assert (await bad.ended()).code == 0


async def test_a_node_that_is_healthy_after_a_failure_stays(tmp_path: Path) -> None:
    """The next round waits for its check."""
    check = f"{CHECK} && sleep 0.3"
    async with job(tmp_path, health_check=check) as cluster:
        nodes, spare = await start_with_spare(cluster)
        (worker,) = await nodes[1].workers()
        nodes[1].order(worker, "exit 3")
        await cluster.workers(*nodes, attempt=1, restart_count=1)
        assert [checks(node) for node in nodes] == [1, 2, 1]
        assert not spare.events_of(RoundFormed)
        await cluster.succeed(*nodes, attempt=1)


@pytest.mark.parametrize("moment", ["first", "after a failure"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_check_ends_with_its_node(
    number: signal.Signals, moment: str, tmp_path: Path
) -> None:
    """At once, and no process of it is left; the others go on without it."""
    pid_file = tmp_path / "check"
    check = f"[ $NODE_NAME != n.1 ] || [ ! -e {tmp_path}/slow ] || {{ echo $$ > {pid_file};"
    check += " sleep 99; }"
    if moment == "first":
        (tmp_path / "slow").touch()
    async with Cluster(
        tmp_path / "job", "1:2", health_check=check, conf={"last_call_timeout": 0}, **RESTARTS
    ) as cluster:
        host = cluster.start("host")
        await host.workers()
        node = cluster.start("n.1")
        if moment != "first":
            await cluster.workers(host, node, attempt=1)
            (tmp_path / "slow").touch()
            (worker,) = await node.workers()
            node.order(worker, "exit 3")
        await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        pid = int(pid_file.read_text())
        if number == signal.SIGKILL:
            await node.kill()
        elif moment == "first":
            await node.stops(number)
        else:  # it has failed before
            node.send(number)
            assert (await node.ended()).code == 3
        await until(lambda: not alive(pid))
        if moment != "first":
            await cluster.workers(host, attempt=2, world_size=1)
        await cluster.succeed(host, attempt=0 if moment == "first" else 2)


async def test_a_notice_of_a_preemption_ends_a_check_after_a_failure(tmp_path: Path) -> None:
    """The host is about to be taken away, and no round follows."""
    check = f"[ ! -e {tmp_path}/slow ] || {{ echo $$ > {tmp_path}/check; sleep 99; }}"
    options: dict[str, Any] = {**RESTARTS, "health_check": check, "preempt_signal": "USR1"}
    async with Cluster(tmp_path / "job", 2, **options) as cluster:
        nodes = await cluster.start_all(2)
        (tmp_path / "slow").touch()
        (worker,) = await nodes[1].workers()
        nodes[1].order(worker, "exit 3")
        await until(lambda: (tmp_path / "check").exists())
        nodes[0].send(signal.SIGUSR1)
        for node in nodes:
            assert (await node.ended()).code == 85


async def test_a_check_does_not_outlast_the_job(tmp_path: Path) -> None:
    """Of a node that has not been fit from the start."""
    check = "[ $NODE_NAME != bad ] || sleep 99"
    async with Cluster(
        tmp_path, "1:2", health_check=check, conf={"last_call_timeout": 0}
    ) as cluster:
        host = cluster.start("host")
        await host.workers()
        bad = cluster.start("bad")
        await host.event(NodeJoined, name=lambda name: "pid" in name)
        await cluster.succeed(host)
        assert (await bad.ended()).code == 0


async def test_a_check_takes_its_time_at_most(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "health_check": "echo waiting; sleep 99",
        "health_check_timeout": 0.5,
    }
    async with Cluster(tmp_path, 2, **options) as cluster:
        node = cluster.start()
        own = await node.event(NodeExcluded, is_own=True)
        assert own.why == "its health check has not ended within 0.5 s: waiting"
        await node.stops()
