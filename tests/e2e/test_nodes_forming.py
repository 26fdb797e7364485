"""How nodes come together: who gets which place, when, and what is said when they do not."""

from __future__ import annotations

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
    RoundFormed,
    RoundForming,
    WorkerStarted,
)
from tests.support.nodes import AT_ONCE_S, Node, Nodes, free_port
from tests.support.worlds import Note

pytestmark = pytest.mark.black_box


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return [line for line in text.splitlines() if line.strip()][-1]


def of_node(workers: list[Note], node: Node) -> list[Note]:
    """Return those of the workers that run on a node."""
    return [one for one in workers if one in node.notes.entries]


@pytest.mark.parametrize("count", [2, 4, 8])
async def test_all_nodes_form_at_once(count: int, tmp_path: Path) -> None:
    """When the last one has come, all start with ranks that fit, and meet at one port."""
    async with Nodes(tmp_path, count) as nodes:
        began = time.monotonic()
        agents = [nodes.start(nproc=2) for _ in range(count)]
        workers = await nodes.up(*agents)
        assert time.monotonic() - began < AT_ONCE_S
        for agent in agents:
            for worker in of_node(workers, agent):
                assert await agent.ask(worker, "connect") == "connected"
            formed = await agent.formed()
            (first, second) = of_node(workers, agent)
            assert (first.group_rank, first.group_world_size) == (formed.group_rank, count)
            assert (first.master_addr, first.master_port) == (
                formed.master_addr,
                formed.master_port,
            )
            assert second.rank == first.rank + 1
        assert {one.world_size for one in workers} == {2 * count}
        assert {one.restart_count for one in workers} == {0}
        assert {one.role_name for one in workers} == {"default"}
        assert {ended.code for ended in await nodes.finish(*agents)} == {0}


async def test_the_node_that_serves_the_others_is_first(tmp_path: Path) -> None:
    """Without wishes the node that serves the store has group rank 0."""
    async with Nodes(tmp_path, 3) as nodes:
        host = nodes.start("host")
        await host.event(RoundForming)
        others = [nodes.start(), nodes.start()]
        await nodes.up(host, *others)
        assert (await host.formed()).group_rank == 0


async def test_uneven_nodes(tmp_path: Path) -> None:
    """Nodes of 1 and 3 workers make a world of 4."""
    async with Nodes(tmp_path, 2) as nodes:
        small, large = nodes.start(nproc=1), nodes.start(nproc=3)
        workers = await nodes.up(small, large)
        assert {one.world_size for one in workers} == {4}
        assert [one.local_world_size for one in of_node(workers, small)] == [1]
        assert [one.local_world_size for one in of_node(workers, large)] == [3, 3, 3]


async def test_two_roles(tmp_path: Path) -> None:
    """Ranks within a role count the workers of that role only."""
    async with Nodes(tmp_path, 3) as nodes:
        readers = [nodes.start(nproc=2, role="reader") for _ in range(2)]
        trainer = nodes.start(nproc=3, role="trainer")
        workers = await nodes.up(*readers, trainer)
        assert {one.world_size for one in workers} == {7}
        assert [one.role_rank for one in workers if one.role_name == "reader"] == [0, 1, 2, 3]
        assert [one.role_rank for one in workers if one.role_name == "trainer"] == [0, 1, 2]


async def test_the_last_call_is_waited_for(tmp_path: Path) -> None:
    """A node that is enough by itself waits for others as long as it was told."""
    async with Nodes(tmp_path, "1:2", conf={"last_call_timeout": 1}) as nodes:
        node = nodes.start()
        (worker,) = await node.up()
        assert worker.world_size == 1
        began = await node.event(JobStarted)
        assert 1.0 <= (await node.formed()).time - began.time < 1 + AT_ONCE_S


async def test_the_last_call_ends_when_all_have_come(tmp_path: Path) -> None:
    """Nobody waits for more than the maximum."""
    async with Nodes(tmp_path, "1:2") as nodes:
        first = nodes.start()
        await first.event(RoundForming, joined=1)
        second = nodes.start()
        assert len(await nodes.up(first, second)) == 2
        assert (await first.formed()).changes == 0


async def test_too_few_nodes(tmp_path: Path) -> None:
    """After the join timeout the job ends with code 75 and says who was there."""
    async with Nodes(tmp_path, 3, conf={"join_timeout": 2}) as nodes:
        began = time.monotonic()
        agents = [nodes.start() for _ in range(2)]
        ended = [await agent.ended() for agent in agents]
        took = time.monotonic() - began
    assert 2.0 <= took < 2 + AT_ONCE_S
    for agent, one in zip(agents, ended, strict=True):
        assert one.code == 75
        assert "2 of 3" in last_line(one.err)
        assert socket.gethostname() in last_line(one.err)
        assert "2 s" in last_line(one.err)
        assert not agent.told(WorkerStarted)
        finished = await agent.event(JobFinished)
        assert finished.exit_code == 75


async def test_no_worlds_of_one(tmp_path: Path) -> None:
    """Nodes that each wait at a meeting point of their own never start anything."""
    async with Nodes(tmp_path, 2, conf={"join_timeout": 2}) as nodes:
        agents = [nodes.start(rdzv_endpoint=f"127.0.0.1:{free_port()}") for _ in range(3)]
        for agent in agents:
            ended = await agent.ended()
            assert ended.code == 75
            assert "1 of 2" in last_line(ended.err)
            assert not agent.told(WorkerStarted)


@pytest.mark.parametrize("by", ["option", "SLURM_PROCID"])
async def test_wishes_for_a_rank(by: str, tmp_path: Path) -> None:
    """A node gets the group rank that it wishes for, whoever came first."""

    def wish(rank: int) -> dict[str, Any]:
        return {"node_rank": rank} if by == "option" else {"env": {"SLURM_PROCID": str(rank)}}

    async with Nodes(tmp_path, 3) as nodes:
        agents = [nodes.start(**wish(2))]
        await agents[0].event(RoundForming)
        agents += [nodes.start(**wish(rank)) for rank in (1, 0)]
        await nodes.up(*agents)
        assert [(await agent.formed()).group_rank for agent in agents] == [2, 1, 0]


async def test_the_same_wish_twice(tmp_path: Path) -> None:
    """A wish that somebody else has had fulfilled hinders nobody."""
    async with Nodes(tmp_path, 2) as nodes:
        agents = [nodes.start(node_rank=1) for _ in range(2)]
        await nodes.up(*agents)


async def test_nodes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A node of another size of job is refused with the reason; the others go on."""
    async with Nodes(tmp_path, 2) as nodes:
        first = nodes.start()
        await first.event(RoundForming)
        other = nodes.start("other", nnodes=3)
        ended = await other.ended()
        assert ended.code == 75
        assert "--nnodes 3" in last_line(ended.err)
        second = nodes.start()
        await nodes.up(first, second)


async def test_other_run_ids_do_not_meet(tmp_path: Path) -> None:
    """Two jobs at one store know nothing of each other."""
    async with Nodes(tmp_path, 2, conf={"is_host": 0}) as nodes:
        await nodes.serve(int(nodes.endpoint.rpartition(":")[2]))
        one = [nodes.start("one", rdzv_id="one") for _ in range(2)]
        other = [nodes.start("other", rdzv_id="other") for _ in range(2)]
        assert {note.run_id for note in await nodes.up(*one)} == {"one"}
        assert {note.run_id for note in await nodes.up(*other)} == {"other"}
        assert {ended.code for ended in await nodes.finish(*one)} == {0}
        assert all(agent.is_running for agent in other)
        nodes.can_split = True  # these are the rounds of two jobs


async def test_a_run_id_is_used_again(tmp_path: Path) -> None:
    """At a store that remembers a job, one of the same name starts anew."""
    async with Nodes(tmp_path, 2, conf={"is_host": 0}, max_restarts=1) as nodes:
        await nodes.serve(int(nodes.endpoint.rpartition(":")[2]))
        for turn in range(3):
            agents = [nodes.start() for _ in range(2)]
            workers = await nodes.up(*agents)
            assert {one.attempt for one in workers} == {0}
            assert {one.restart_count for one in workers} == {0}
            if turn == 1:
                agents[0].tell(of_node(workers, agents[0])[0], "exit 7")
                await nodes.up(*agents, attempt=1)
            codes = {ended.code for ended in await nodes.finish(*agents, attempt=turn % 2)}
            assert codes == {0}
        nodes.can_split = True  # every job counts its rounds from the start


@pytest.mark.parametrize("who", ["host", "other"])
async def test_one_leaves_and_rejoins_again_and_again(who: str, tmp_path: Path) -> None:
    """Leaving closes nothing: a node that was stopped is replaced any number of times."""
    async with Nodes(tmp_path, 2) as nodes:
        pair = {"host": nodes.start("host")}
        await pair["host"].event(RoundForming)
        pair["other"] = nodes.start("other")
        await nodes.up(*pair.values())
        ranks = {name: (await node.formed()).group_rank for name, node in pair.items()}
        for _ in range(20):
            since = nodes.marks()
            pair[who].send(signal.SIGTERM)
            assert (await pair[who].ended()).code == 143
            pair[who] = nodes.start(who)
            workers = await nodes.up(*pair.values(), since=since)
            assert {one.restart_count for one in workers} == {0}
            for name, node in pair.items():
                assert of_node(workers, node)[0].group_rank == ranks[name]
        assert {ended.code for ended in await nodes.finish(*pair.values(), attempt=20)} == {0}


async def test_the_story_of_a_job_can_be_followed(tmp_path: Path) -> None:
    """`aio-elastic events` tells from anywhere what becomes of the whole job."""
    async with Nodes(tmp_path, "1:2", conf={"last_call_timeout": 0}) as nodes:
        first = nodes.start("first")
        await first.up()
        story = nodes.follow()
        second = nodes.start("second")
        (await second.up())
        await story.wait_for(
            lambda one: isinstance(one, RoundFormed) and one.world_size == 2, "the round of two"
        )
        await story.wait_for(lambda one: isinstance(one, MembershipChanged), "why it came about")
        await nodes.finish(first, second, attempt=1)
        finished = await story.wait_for(lambda one: isinstance(one, JobFinished), "the end")
        assert isinstance(finished, JobFinished)
        assert finished.exit_code == 0


# --------------------------------------------------------------- told who is who


def ranked(nodes: Nodes, rank: int, port: int, **options: Any) -> Node:
    """Start a node that is told its rank, and where all meet."""
    return nodes.start(
        rdzv_backend="static",
        rdzv_endpoint=None,
        master_addr="127.0.0.1",
        master_port=port,
        node_rank=rank,
        **options,
    )


async def test_static_ranks(tmp_path: Path) -> None:
    """With `static` the ranks are those that were told, and so is where workers meet."""
    port = free_port()
    async with Nodes(tmp_path, 2, max_restarts=1) as nodes:
        agents = [ranked(nodes, rank, port, nproc=2) for rank in (1, 0)]
        workers = await nodes.up(*agents)
        assert {one.group_rank for one in of_node(workers, agents[0])} == {1}
        assert {(one.master_addr, one.master_port) for one in workers} == {("127.0.0.1", port)}
        assert await agents[0].ask(of_node(workers, agents[0])[0], "connect") == "connected"
        agents[1].tell(of_node(workers, agents[1])[0], "exit 3")
        again = await nodes.up(*agents, attempt=1)
        assert {one.restart_count for one in again} == {1}
        assert {one.group_rank for one in of_node(again, agents[0])} == {1}
        assert {(one.master_addr, one.master_port) for one in again} == {("127.0.0.1", port)}
        assert {ended.code for ended in await nodes.finish(*agents, attempt=1)} == {0}


async def test_a_missing_static_node_is_named(tmp_path: Path) -> None:
    """Whoever waits in vain says which rank did not come."""
    port = free_port()
    async with Nodes(tmp_path, 3, conf={"join_timeout": 2}) as nodes:
        agents = [ranked(nodes, rank, port) for rank in (0, 2)]
        for agent in agents:
            ended = await agent.ended()
            assert ended.code == 75
            assert "rank 1" in last_line(ended.err)


async def test_a_static_rank_twice(tmp_path: Path) -> None:
    """The second node with a rank is refused; the first ones are not disturbed."""
    port = free_port()
    async with Nodes(tmp_path, 2) as nodes:
        zero = ranked(nodes, 0, port)
        await zero.event(RoundForming)
        twin = ranked(nodes, 0, port)
        ended = await twin.ended()
        assert ended.code == 75
        assert "rank 0" in last_line(ended.err)
        await nodes.up(zero, ranked(nodes, 1, port))
