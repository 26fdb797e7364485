"""How nodes form a group: ranks, timeouts, refusals, and the errors when they cannot."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    JobFinished,
    JobStarted,
    MembershipChanged,
    NodeStandby,
    RoundFormed,
    RoundForming,
    WorkerStarted,
)
from elastic_aio.rendezvous.messages import MemberPhase, decode_status
from elastic_aio.store import connect
from tests.support.chaos import ChaosProxy
from tests.support.children import DEADLINE_S
from tests.support.cluster import AT_ONCE_S, AgentProcess, Cluster, within
from tests.support.sockets import LOOPBACK, free_port
from tests.support.worker_notes import Note

pytestmark = pytest.mark.black_box


def of_node(workers: list[Note], node: AgentProcess) -> list[Note]:
    """Return the workers of a node."""
    return [worker for worker in workers if worker in node.notes.entries]


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_all_nodes_form_at_once(count: int, tmp_path: Path) -> None:
    """When the last node has joined, all start, with matching ranks and one master port."""
    async with Cluster(tmp_path, count) as cluster:
        with within():
            agents = [cluster.start(nproc=2) for _ in range(count)]
            workers = await cluster.workers(*agents)
        for agent in agents:
            for worker in of_node(workers, agent):
                assert await agent.ask(worker, "connect") == "connected"
            formed = await agent.round_formed()
            (first, second) = of_node(workers, agent)
            assert (first.group_rank, first.group_world_size) == (formed.group_rank, count)
            assert (first.master_addr, first.master_port) == (
                formed.master_addr,
                formed.master_port,
            )
            assert second.rank == first.rank + 1
        assert {worker.world_size for worker in workers} == {2 * count}
        assert {worker.restart_count for worker in workers} == {0}
        assert {worker.role_name for worker in workers} == {"default"}
        await cluster.succeed(*agents)


async def test_the_store_host_has_group_rank_0(tmp_path: Path) -> None:
    """Without preferred ranks the node that serves the store has group rank 0."""
    async with Cluster(tmp_path, 3) as cluster:
        host = await cluster.start_first("host")
        others = [cluster.start(), cluster.start()]
        await cluster.workers(host, *others)
        assert (await host.round_formed()).group_rank == 0


async def test_uneven_nodes(tmp_path: Path) -> None:
    """Nodes of 1 and 3 workers make a world of 4."""
    async with Cluster(tmp_path, 2) as cluster:
        small, large = cluster.start(nproc=1), cluster.start(nproc=3)
        workers = await cluster.workers(small, large)
        assert {worker.world_size for worker in workers} == {4}
        assert [one.local_world_size for one in of_node(workers, small)] == [1]
        assert [one.local_world_size for one in of_node(workers, large)] == [3, 3, 3]


async def test_two_roles(tmp_path: Path) -> None:
    """Ranks within a role count the workers of that role only."""
    async with Cluster(tmp_path, 3) as cluster:
        readers = [cluster.start(nproc=2, role="reader") for _ in range(2)]
        trainer = cluster.start(nproc=3, role="trainer")
        workers = await cluster.workers(*readers, trainer)
        assert {worker.world_size for worker in workers} == {7}
        ranks = [(worker.role_name, worker.role_rank) for worker in workers]
        assert [rank for role, rank in ranks if role == "reader"] == [0, 1, 2, 3]
        assert [rank for role, rank in ranks if role == "trainer"] == [0, 1, 2]


async def test_the_last_call_passes(tmp_path: Path) -> None:
    """A node that satisfies the minimum waits for others for `last_call_timeout`."""
    async with Cluster(tmp_path, "1:2", conf={"last_call_timeout": 1}) as cluster:
        node = cluster.start()
        (worker,) = await node.workers()
        assert worker.world_size == 1
        began = await node.event(JobStarted)
        assert 1.0 <= (await node.round_formed()).time - began.time < 1 + AT_ONCE_S


async def test_the_last_call_ends_at_the_maximum(tmp_path: Path) -> None:
    """The round starts as soon as the maximum of nodes has joined."""
    async with Cluster(tmp_path, "1:2") as cluster:
        first = cluster.start()
        await first.event(RoundForming, joined=1)
        second = cluster.start()
        assert len(await cluster.workers(first, second)) == 2
        assert (await first.round_formed()).changes == 0


async def test_too_few_nodes(tmp_path: Path) -> None:
    """After the join timeout the job ends with code 75 and names the nodes that had joined."""
    async with Cluster(tmp_path, 3, conf={"join_timeout": 2}) as cluster:
        began = time.monotonic()
        agents = [cluster.start() for _ in range(2)]
        for agent in agents:
            await agent.fails("2 of 3", socket.gethostname(), "2 s")
        assert 2.0 <= time.monotonic() - began < 2 + AT_ONCE_S
        for agent in agents:
            assert not agent.events_of(WorkerStarted)
            assert (await agent.event(JobFinished)).exit_code == 75


async def test_nodes_with_different_endpoints_start_nothing(tmp_path: Path) -> None:
    """Each waits at an endpoint of its own, and no world of one node is formed."""
    async with Cluster(tmp_path, 2, conf={"join_timeout": 2}) as cluster:
        agents = [cluster.start(rdzv_endpoint=f"127.0.0.1:{free_port()}") for _ in range(3)]
        for agent in agents:
            await agent.fails("1 of 2")
            assert not agent.events_of(WorkerStarted)


@pytest.mark.parametrize("by", ["option", "SLURM_PROCID"])
async def test_preferred_ranks(by: str, tmp_path: Path) -> None:
    """A node gets its preferred group rank, whatever the order of joining."""

    def wish(rank: int) -> dict[str, Any]:
        return {"node_rank": rank} if by == "option" else {"env": {"SLURM_PROCID": str(rank)}}

    async with Cluster(tmp_path, 3) as cluster:
        agents = [cluster.start(**wish(2))]
        await agents[0].event(RoundForming)
        agents += [cluster.start(**wish(rank)) for rank in (1, 0)]
        await cluster.workers(*agents)
        assert [(await agent.round_formed()).group_rank for agent in agents] == [2, 1, 0]


async def test_a_preferred_rank_twice(tmp_path: Path) -> None:
    """The second node with a preferred rank gets another one."""
    async with Cluster(tmp_path, 2) as cluster:
        agents = [cluster.start(node_rank=1) for _ in range(2)]
        await cluster.workers(*agents)


async def test_nodes_with_other_settings_are_refused(tmp_path: Path) -> None:
    """A node with another `--nnodes` is refused with the reason; the others form a round."""
    async with Cluster(tmp_path, 2) as cluster:
        first = await cluster.start_first()
        other = cluster.start("other", nnodes=3)
        await other.fails("--nnodes 3")
        second = cluster.start()
        await cluster.workers(first, second)


async def test_run_ids_separate_jobs(tmp_path: Path) -> None:
    """Two jobs at one store do not see each other."""
    async with Cluster(tmp_path, 2, conf={"is_host": 0}) as cluster:
        await cluster.start_store()
        first = [cluster.start("one", rdzv_id="one") for _ in range(2)]
        other = [cluster.start("other", rdzv_id="other") for _ in range(2)]
        assert {note.run_id for note in await cluster.workers(*first)} == {"one"}
        assert {note.run_id for note in await cluster.workers(*other)} == {"other"}
        await cluster.succeed(*first)
        assert all(agent.is_running for agent in other)
        cluster.can_split = True  # these are the rounds of two jobs


async def test_a_run_id_can_be_reused(tmp_path: Path) -> None:
    """At a store that has the state of an ended job, a job of the same name starts anew."""
    conf = {"is_host": 0, "reuse": True}
    async with Cluster(tmp_path, 2, conf=conf, max_restarts=1) as cluster:
        await cluster.start_store()
        for turn in range(3):
            agents = [cluster.start() for _ in range(2)]
            workers = await cluster.workers(*agents)
            assert {worker.attempt for worker in workers} == {0}
            assert {worker.restart_count for worker in workers} == {0}
            if turn == 1:
                agents[0].order(of_node(workers, agents[0])[0], "exit 7")
                await cluster.workers(*agents, attempt=1)
            await cluster.succeed(*agents, attempt=turn % 2)
        cluster.can_split = True  # every job counts its rounds from 0


@pytest.mark.parametrize("who", ["host", "other"])
async def test_one_leaves_and_rejoins_again_and_again(who: str, tmp_path: Path) -> None:
    """A node that was stopped can be replaced any number of times."""
    async with Cluster(tmp_path, 2) as cluster:
        pair = {"host": cluster.start("host")}
        await pair["host"].event(RoundForming)
        pair["other"] = cluster.start("other")
        await cluster.workers(*pair.values())
        ranks = {name: (await node.round_formed()).group_rank for name, node in pair.items()}
        for _ in range(20):
            since = cluster.note_counts()
            await pair[who].stops()
            pair[who] = cluster.start(who)
            workers = await cluster.workers(*pair.values(), since=since)
            assert {worker.restart_count for worker in workers} == {0}
            for name, node in pair.items():
                assert of_node(workers, node)[0].group_rank == ranks[name]
        await cluster.succeed(*pair.values(), attempt=20)


async def test_the_events_of_a_job_can_be_followed(tmp_path: Path) -> None:
    """`aio-elastic events` prints the events of the whole job."""
    async with Cluster(tmp_path, "1:2", conf={"last_call_timeout": 0}) as cluster:
        first = cluster.start("first")
        await first.workers()
        story = cluster.follow_events()
        second = cluster.start("second")
        (await second.workers())
        await story.wait_for(
            lambda one: isinstance(one, RoundFormed) and one.world_size == 2, "the round of two"
        )
        await story.wait_for(lambda one: isinstance(one, MembershipChanged), "why it came about")
        await cluster.finish(first, second, attempt=1)
        finished = await story.wait_for(lambda one: isinstance(one, JobFinished), "the end")
        assert isinstance(finished, JobFinished)
        assert finished.exit_code == 0


# ------------------------------------------------------------------ the next job of an id


async def succeeded(endpoint: str) -> None:
    """Wait until the store has the success of a node."""
    async with (
        asyncio.timeout(DEADLINE_S),
        connect(endpoint) as store,
        store.watch("elastic_aio/job/0/t/", is_prefix=True) as statuses,
    ):
        texts = [*statuses.present.values()]
        while not any(decode_status(one).phase is MemberPhase.SUCCEEDED for one in texts):
            texts = [text for text in [(await anext(statuses)).value] if text]


@pytest.mark.parametrize("reuse", [False, True])
async def test_a_node_of_a_finished_job_enters_no_next_one(tmp_path: Path, reuse: bool) -> None:
    """Its workers have succeeded; its job ended while it was cut off, and the next one begins."""
    conf = {"heartbeat_timeout": 3, "close_timeout": 10, "reuse": str(reuse).lower()}
    port = free_port(LOOPBACK)
    endpoint = f"{LOOPBACK}:{port}"
    async with (
        Cluster(tmp_path, 2, endpoint=endpoint, conf=conf) as cluster,
        ChaosProxy(port) as proxy,
    ):
        host = await cluster.start_first("host")
        node = cluster.start("node", rdzv_endpoint=proxy.endpoint, conf={"is_host": "false"})
        await cluster.workers(host, node)
        (worker,) = await node.workers()
        node.order(worker, "exit 0")
        await succeeded(endpoint)
        proxy.is_stalled = True
        for worker in await host.workers():
            host.order(worker, "exit 0")
        assert (await host.ended()).code == 0
        next_host = await cluster.start_first("next")
        proxy.is_stalled = False
        proxy.cut()
        assert (await node.ended()).code == 75
        assert "another job with the id 'job' runs there" in node.events_of(JobFinished)[-1].why
        assert len(await node.workers()) == 1, "it runs no worker of the next job"
        assert not next_host.events_of(RoundFormed)
        next_host.send(signal.SIGTERM)
        await next_host.ended()


# ------------------------------------------------------------------ static ranks


def start_static(cluster: Cluster, rank: int, port: int, **options: Any) -> AgentProcess:
    """Start a node with a fixed rank and a fixed master address."""
    return cluster.start(
        rdzv_backend="static",
        rdzv_endpoint=None,
        master_addr="127.0.0.1",
        master_port=port,
        node_rank=rank,
        **options,
    )


async def test_static_ranks(tmp_path: Path) -> None:
    """With `static`, `--node-rank` and `--master-addr` decide, also after a restart."""
    port = free_port()
    async with Cluster(tmp_path, 2, max_restarts=1) as cluster:
        agents = [start_static(cluster, rank, port, nproc=2) for rank in (1, 0)]
        workers = await cluster.workers(*agents)
        assert {one.group_rank for one in of_node(workers, agents[0])} == {1}
        assert {(worker.master_addr, worker.master_port) for worker in workers} == {
            ("127.0.0.1", port)
        }
        assert await agents[0].ask(of_node(workers, agents[0])[0], "connect") == "connected"
        agents[1].order(of_node(workers, agents[1])[0], "exit 3")
        again = await cluster.workers(*agents, attempt=1)
        assert {worker.restart_count for worker in again} == {1}
        assert {one.group_rank for one in of_node(again, agents[0])} == {1}
        assert {(worker.master_addr, worker.master_port) for worker in again} == {
            ("127.0.0.1", port)
        }
        await cluster.succeed(*agents, attempt=1)


async def test_a_missing_static_node_is_named(tmp_path: Path) -> None:
    """The error names the rank that did not join."""
    port = free_port()
    async with Cluster(tmp_path, 3, conf={"join_timeout": 2}) as cluster:
        agents = [start_static(cluster, rank, port) for rank in (0, 2)]
        for agent in agents:
            await agent.fails("rank 1")


async def test_a_static_rank_twice(tmp_path: Path) -> None:
    """The second node with a rank is refused; the first ones keep their workers."""
    port = free_port()
    async with Cluster(tmp_path, 2) as cluster:
        zero = start_static(cluster, 0, port)
        await zero.event(RoundForming)
        twin = start_static(cluster, 0, port)
        await twin.fails("another node of rank 0 serves the run")
        await cluster.workers(zero, start_static(cluster, 1, port))


async def test_another_static_rank_twice(tmp_path: Path) -> None:
    """The second node is refused, also if the job ends before the first one is known to live."""
    port = free_port()
    async with Cluster(tmp_path, 2, conf={"heartbeat_timeout": 2}) as cluster:
        zero, one = (start_static(cluster, rank, port) for rank in (0, 1))
        await cluster.workers(zero, one)
        twin = start_static(cluster, 1, port)
        host = socket.gethostname()
        held = f"node rank 1 is held by {host} (pid {one.pid})"
        await twin.fails(f"the other nodes refused this one: {held}")
        twin = start_static(cluster, 1, port)
        await twin.event(NodeStandby)
        await cluster.succeed(zero, one)
        assert (await twin.ended()).code == 75


async def test_a_static_node_that_comes_back(tmp_path: Path) -> None:
    """It takes its rank when the lease of its predecessor, which was killed, has ended."""
    port = free_port()
    async with Cluster(tmp_path, 2) as cluster:
        zero, one = (start_static(cluster, rank, port) for rank in (0, 1))
        await cluster.workers(zero, one)
        one.send(signal.SIGKILL)
        again = start_static(cluster, 1, port)
        await cluster.workers(zero, again, attempt=1)
        await cluster.succeed(zero, again, attempt=1)
