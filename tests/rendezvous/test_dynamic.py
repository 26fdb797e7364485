"""Members that meet at a real store, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from elastic_aio.backoff import Backoff
from elastic_aio.events import (
    CoordinatorChanged,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeRefused,
    Promoted,
    RendezvousStoreLost,
    RendezvousStoreRegained,
    RoundForming,
    StandingBy,
)
from elastic_aio.outcome import JobState
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED, Ended
from elastic_aio.rendezvous.static import make_static
from elastic_aio.store import StoreServer, connect
from tests.support.chaos import ChaosProxy
from tests.support.members import Pretender, free_endpoint, meeting, present


async def test_a_full_group_forms_at_once() -> None:
    """Ranks, sizes and the meeting point of the workers fit together on all nodes."""
    spec = meeting(free_endpoint(), "3", last_call_timeout=600.0)
    a, b, c = Pretender("a", spec, nproc=1), Pretender("b", spec, nproc=3), Pretender("c", spec)
    async with present(a, b, c) as members:
        places = [await one.formed(3) for one in members]
        spans = sorted((place.span for place in places), key=lambda span: span.group_rank)
        assert [span.group_rank for span in spans] == [0, 1, 2]
        assert {span.world_size for span in spans} == {5}
        assert len({(place.master_addr, place.master_port) for place in places}) == 1
        assert {
            (place.round, place.attempt, place.restarts, place.changes) for place in places
        } == {(0, 0, 0, 0)}
        assert a.place.span.group_rank == 0, "who serves the store comes first"
        assert c.is_reachable
        assert (await b.hears(CoordinatorChanged)).name == "a"
        joined = {one.name for one in a.told_events if isinstance(one, NodeJoined)}
        assert joined == {"a", "b", "c"}


async def test_wishes_and_roles_are_honoured() -> None:
    """A node that wishes for a rank gets it; roles have ranks of their own."""
    endpoint = free_endpoint()
    a = Pretender("a", meeting(endpoint, "3"), nproc=2, role="reader")
    b = Pretender("b", meeting(endpoint, "3", node_rank=0), nproc=1, role="trainer")
    c = Pretender("c", meeting(endpoint, "3", node_rank=1), nproc=2, role="reader")
    async with present(a, b, c):
        spans = [(await one.formed(3)).span for one in (b, c, a)]
        assert [span.group_rank for span in spans] == [0, 1, 2]
        assert [span.first_rank for span in spans] == [0, 1, 3]
        assert [span.first_role_rank for span in spans] == [0, 0, 2]
        assert [span.role_world_size for span in spans] == [1, 4, 4]


async def test_the_last_call_ends() -> None:
    """Enough nodes wait for more, and no longer than that."""
    spec = meeting(free_endpoint(), "1:3", last_call_timeout=0.3)
    async with present(Pretender("a", spec), Pretender("b", spec)) as members:
        assert {(await one.formed(2)).span.group_rank for one in members} == {0, 1}


async def test_too_few_nodes_give_up_and_say_who_was_there() -> None:
    """The end names those who came, and how many were wanted."""
    spec = meeting(free_endpoint(), "3", join_timeout=1.5)
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        forming = await b.hears(RoundForming)
        assert (forming.joined, forming.minimum, forming.maximum) == (2, 3, 3)
        assert set(forming.present) == {"a", "b"}
        assert forming.time_left is not None
        assert 0 < forming.time_left <= 1.5
        for ending in [await a.ended(), await b.ended()]:
            assert ending.state is JobState.FAILED
            assert ending.is_rendezvous
            assert ending.exit_code == RENDEZVOUS_FAILED
            assert re.search(r"only 2 of 3 nodes came together \((a, b|b, a)\)", ending.why)
            assert "1.5 s (join_timeout)" in ending.why


async def test_a_newcomer_is_taken_in_without_a_restart_being_counted() -> None:
    """The round after has all of them; group ranks stay."""
    spec = meeting(free_endpoint(), "1:2", last_call_timeout=0.1)
    a, b = Pretender("a", spec), Pretender("b", spec)
    async with present(a) as members:
        await a.formed(1)
        await b.rendezvous.open()
        members.append(b)
        place = await b.formed(2)
        assert (await a.formed(2)).span.group_rank == 0
        assert (place.span.group_rank, place.attempt, place.restarts, place.changes) == (1, 1, 0, 1)
        assert a.causes[-1].root is None
        assert "b joined" in a.causes[-1].why
        assert place.master_port != a.begun[0].master_port, "a fresh store for the workers"
        assert b.is_reachable


class Unreachable(Pretender):
    """One at whose address nobody can be reached, for the others' probes."""

    def reserve_master(self, address: str) -> int:
        return int(free_endpoint().rpartition(":")[2])


async def test_a_newcomer_that_reaches_nobody_hurts_nobody() -> None:
    """It is refused with the reason, and those who run are not even told."""
    spec = meeting(free_endpoint(), "1:2", last_call_timeout=0.1)
    a, b = Unreachable("a", spec), Pretender("b", spec)
    async with present(a) as members:
        await a.formed(1)
        await b.rendezvous.open()
        members.append(b)
        refused = await a.hears(NodeRefused)
        assert refused.name == "b"
        assert "does not reach the others: 127.0.0.1" in refused.why
        assert len(a.begun) == 1
        assert not b.begun


async def test_a_node_that_leaves_is_done_without() -> None:
    """The others form another round at once; those of higher ranks close up."""
    spec = meeting(free_endpoint(), "1:3")
    async with present(*(Pretender(name, spec) for name in "abc")) as members:
        a, b, c = members
        await c.formed(3)
        gone = min((b, c), key=lambda one: one.place.span.group_rank)
        stays = b if gone is c else c
        members.remove(gone)
        await gone.rendezvous.leave("enough")
        gone.close()
        assert (await a.formed(2)).span.group_rank == 0
        assert (await stays.formed(2)).span.group_rank == 1
        assert (await a.hears(NodeLeft)).name == gone.name
        assert f"{gone.name} has left" in stays.causes[-1].why
        assert stays.place.restarts == 0


@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_a_node_that_is_lost_is_done_without(fault: str) -> None:
    """A connection that ends is a death at once, silence is one after a while."""
    endpoint = free_endpoint()
    spec = meeting(endpoint, "1:2")
    a = Pretender("a", spec)
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = Pretender("b", meeting(proxy.endpoint, "1:2", is_host=False, read_timeout=1.0))
        members.append(b)
        await b.rendezvous.open()
        await a.formed(2)
        proxy.refuses = True
        if fault == "cut":
            proxy.cut()
        else:
            proxy.is_stalled = True
        await a.formed(1)
        lost = await a.hears(NodeLost)
        assert lost.name == "b"
        why = (await b.hears(RendezvousStoreLost)).why
        assert ("no answer" if fault == "silent" else "closed") in why
        assert (await b.ended()).is_rendezvous, "it finds no store"


async def test_a_failure_of_a_lost_node_is_not_judged() -> None:
    """The others' workers fail at once when a node dies; no restart is counted for that."""
    endpoint = free_endpoint()
    a = Pretender("a", meeting(endpoint, "1:2", max_restarts=0))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = Pretender("b", meeting(proxy.endpoint, "1:2", is_host=False, read_timeout=1.0))
        members.append(b)
        await b.rendezvous.open()
        await a.formed(2)
        await b.formed(2)
        proxy.refuses = True
        proxy.cut()
        a.fails()
        place = await a.formed(1)
        assert (place.restarts, place.changes) == (0, 1)
        assert "b is lost" in a.causes[-1].why
        await b.ended()


async def test_a_reset_connection_costs_nothing() -> None:
    """Who comes back in time has never been away."""
    endpoint = free_endpoint()
    a = Pretender("a", meeting(endpoint, "1:2"))
    async with present(a) as members, ChaosProxy(int(endpoint.rpartition(":")[2])) as proxy:
        b = Pretender("b", meeting(proxy.endpoint, "1:2", is_host=False))
        members.append(b)
        await b.rendezvous.open()
        await b.formed(2)
        for _ in range(5):
            before = proxy.connections
            proxy.cut()
            while proxy.connections == before:
                await asyncio.sleep(0.01)
        b.fails()  # whoever is still there hears of it
        await a.until(lambda: a.halted)
        assert len(a.begun) == len(b.begun) == 1
        assert not any(isinstance(one, NodeLost) for one in a.told_events)


async def test_too_few_are_left() -> None:
    """They stop their workers, wait, and the one that comes takes the vacant rank."""
    spec = meeting(free_endpoint(), "2")
    async with present(Pretender("a", spec), Pretender("b", spec)) as members:
        a, b = members
        rank = (await b.formed(2)).span.group_rank
        members.remove(b)
        await b.rendezvous.leave("enough")
        b.close()
        await a.until(lambda: a.halted)
        assert "b has left: only 1 node of 2 left" in a.halted[0].why
        forming = await a.hears(RoundForming)
        assert forming.missing == ("b",)
        c = Pretender("c", spec)
        members.append(c)
        await c.rendezvous.open()
        assert (await c.formed(2)).span.group_rank == rank
        assert c.place.changes == 1


async def test_a_surplus_node_stands_by_and_takes_a_vacant_rank() -> None:
    """It never disturbs the others, and is there when one is gone."""
    spec = meeting(free_endpoint(), "2")
    async with present(*(Pretender(name, spec) for name in "ab")) as members:
        a, b = members
        await b.formed(2)
        c = Pretender("c", spec)
        members.append(c)
        await c.rendezvous.open()
        assert (await c.hears(StandingBy)).maximum == 2
        members.remove(b)
        rank = b.place.span.group_rank
        await b.rendezvous.leave("enough")
        b.close()
        assert (await c.formed(2)).span.group_rank == rank
        assert (await c.hears(Promoted)).group_rank == rank
        assert [len(a.begun), len(a.halted)] == [2, 0]


async def test_a_failure_restarts_all() -> None:
    """All halt, the budget is the job's, and its end is the same everywhere."""
    spec = meeting(free_endpoint(), "2", max_restarts=2)
    async with present(Pretender("a", spec), Pretender("b", spec)) as members:
        a, b = members
        for restarts, culprit in enumerate((b, a, b)):
            assert (await a.formed(2, after=restarts - 1)).restarts == restarts
            assert (await b.formed(2, after=restarts - 1)).restarts == restarts
            assert a.place.attempt == restarts
            culprit.fails(code=40 + restarts)
        for one in members:
            ending = await one.ended()
            assert ending.state is JobState.FAILED
            assert ending.exit_code == 42
            assert [each.host for each in ending.failures] == ["b"]
            assert ending.restarts == 2
            assert "all 2 restarts are used up" in ending.why
        assert a.halted[0].why == "a worker on b has failed"
        assert a.causes[1].root.status.code == 40


async def test_a_delay_is_waited_once_for_all() -> None:
    """Back-off is the job's, too; the pause is told."""
    policy = RestartPolicy(backoff=Backoff(initial=0.3, jitter=False))
    spec = meeting(free_endpoint(), "2", max_restarts=1, restart=policy)
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        await a.formed(2)
        await b.formed(2)
        b.fails()
        await a.formed(2, after=0)
        assert a.causes[-1].delay == pytest.approx(0.3)


async def test_the_callback_is_asked_where_the_coordinator_is() -> None:
    """Its word counts for all nodes."""

    async def unused(failure: object) -> Action:
        raise AssertionError("the agent's own way to it is used")

    policy = RestartPolicy(decide=unused)
    spec = meeting(free_endpoint(), "2", max_restarts=5, restart=policy)
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        await a.formed(2)
        await b.formed(2)
        a.answer = b.answer = Action.GIVE_UP
        b.fails(code=9)
        assert (await b.ended()).exit_code == 9
        assert "restart.decide said to give up" in (await a.ended()).why
        coordinator = (await a.hears(CoordinatorChanged)).name
        assert {one.name: len(one.asked) for one in (a, b) if one.asked} == {coordinator: 1}


async def test_success_needs_all() -> None:
    """A failure elsewhere brings back one that waits at the end; then all end together."""
    spec = meeting(free_endpoint(), "2", max_restarts=1)
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        await a.formed(2)
        await b.formed(2)
        a.succeeds()
        b.fails()
        assert (await a.formed(2, after=0)).restarts == 1
        await b.formed(2, after=0)
        b.succeeds()
        a.succeeds()
        for one in (a, b):
            ending = await one.ended()
            assert (ending.state, ending.exit_code) == (JobState.SUCCEEDED, 0)


async def test_a_run_id_can_be_used_again() -> None:
    """At a store that outlives the job, the next one begins at round 0."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = meeting(f"127.0.0.1:{server.port}", "2")
        for _ in range(3):
            async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
                await a.formed(2)
                await b.formed(2)
                assert (a.place.round, a.place.attempt) == (0, 0)
                a.succeeds()
                b.succeeds()
                await a.ended()
                await b.ended()


async def test_another_coordinator_takes_over() -> None:
    """When the coordinator leaves, the round is mended by its successor."""
    async with StoreServer("127.0.0.1", 0) as server:
        spec = meeting(f"127.0.0.1:{server.port}", "1:3")
        async with present(*(Pretender(name, spec) for name in "abc")) as members:
            for one in members:
                await one.formed(3)
            first = (await members[0].hears(CoordinatorChanged)).name
            leaver = next(one for one in members if one.name == first)
            members.remove(leaver)
            await leaver.rendezvous.leave("enough")
            leaver.close()
            for one in members:
                await one.formed(2)
                changed = await one.hears(CoordinatorChanged)
                assert changed.name != first
                assert one.place.restarts == 0
            assert len({(one.place.round, one.place.origin) for one in members}) == 1


@pytest.mark.parametrize("keeps", [True, False])
async def test_another_store_is_no_reason_to_stop(keeps: bool) -> None:
    """Workers run on when all meet again at an empty store, unless told otherwise."""
    endpoint = free_endpoint()
    port = int(endpoint.rpartition(":")[2])
    server = StoreServer("127.0.0.1", port)
    await server.start()
    spec = meeting(endpoint, "2", is_host=False, keeps_workers=keeps, store_grace=20.0)
    async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
        await a.formed(2)
        await b.formed(2)
        await server.aclose()
        for one in (a, b):
            assert endpoint in (await one.hears(RendezvousStoreLost)).endpoint
        async with StoreServer("127.0.0.1", port):
            for one in (a, b):
                assert not (await one.hears(RendezvousStoreRegained)).is_host
            if not keeps:
                for one in (a, b):
                    assert (await one.formed(2, after=0)).restarts == 0
            b.succeeds()
            a.succeeds()
            assert (await a.ended()).state is JobState.SUCCEEDED
            assert (await b.ended()).state is JobState.SUCCEEDED
            assert {len(a.begun), len(b.begun)} == ({1} if keeps else {2})
            assert not a.halted
            # Before the store is gone, or they could not see each other off.
            await asyncio.gather(*(one.rendezvous.leave("over") for one in (a, b)))


async def test_without_any_store_a_node_gives_up() -> None:
    """It stops its workers after the grace, and ends when nothing has been found."""
    endpoint = free_endpoint()
    server = StoreServer("127.0.0.1", int(endpoint.rpartition(":")[2]))
    await server.start()
    spec = meeting(endpoint, "1", is_host=False, store_grace=0.3, read_timeout=2.0)
    spec = spec.replaced(nnodes="1:2")
    async with present(Pretender("a", spec)) as (a,):
        await a.formed(1)
        await server.aclose()
        await a.until(lambda: a.halted)
        assert "no store could be found for 0.3 s" in a.halted[0].why
        ending = await a.ended()
        assert ending.exit_code == RENDEZVOUS_FAILED
        assert endpoint in ending.why


async def test_garbage_in_the_store_stops_nobody() -> None:
    """Bytes of somebody else's are refused or passed over."""
    endpoint = free_endpoint()
    spec = meeting(endpoint, "2")
    async with present(Pretender("a", spec)) as members:
        (a,) = members
        await a.hears(CoordinatorChanged)
        async with connect(endpoint) as store:
            ours = store.prefixed("elastic_aio/run")
            for text in (b"", b"\x00\xff", b"{}", b"[" * 100_000, b'{"serial":"x"}'):
                await ours.set("t/stranger", text)
                await ours.set(f"o/{a.rendezvous._name}", text)  # type: ignore[attr-defined]
            order = await ours.get("o/stranger", timeout=10)
            assert b"cannot be read by this version" in order
            b = Pretender("b", spec)
            members.append(b)
            await b.rendezvous.open()
            await b.formed(2)
            await a.formed(2)


async def test_a_stranger_does_not_hold_the_office() -> None:
    """Text under the coordinator's key that nobody can read is no coordinator."""
    async with StoreServer("127.0.0.1", 0) as server:
        endpoint = f"127.0.0.1:{server.port}"
        async with connect(endpoint) as store:
            await store.set("elastic_aio/run/coordinator", b"\xff garbage")
        spec = meeting(endpoint, "2")
        async with present(Pretender("a", spec), Pretender("b", spec)) as (a, b):
            await a.formed(2)
            await b.formed(2)
            a.succeeds()
            b.succeeds()
            await a.ended()
            await b.ended()


async def test_static_ranks_are_orders() -> None:
    """Everybody is told its rank; the workers meet where the nodes do."""
    endpoint = free_endpoint()
    spec = [meeting(endpoint, "2", backend="static", node_rank=rank) for rank in (0, 1, 1)]
    b = Pretender("b", spec[1], make=make_static)
    twin = Pretender("twin", spec[2], make=make_static)
    a = Pretender("a", spec[0], make=make_static)
    async with present(b) as members:
        await asyncio.sleep(0.2)
        members.append(a)
        await a.rendezvous.open()
        for rank, one in enumerate((a, b)):
            place = await one.formed(2)
            assert place.span.group_rank == rank
            assert f"{place.master_addr}:{place.master_port}" == endpoint
        async with connect(endpoint) as store:
            await store.set("of a worker", "x")
            members.append(twin)
            await twin.rendezvous.open()
            assert "node rank 1 is taken by b" in (await twin.ended()).why
            a.fails()
            assert (await a.ended()).exit_code == 3
            assert await store.check(["of a worker"])


async def test_static_nodes_start_again_with_a_clean_store() -> None:
    """A failure on one node restarts the others, which static rendezvous elsewhere does not."""
    endpoint = free_endpoint()
    members = [
        Pretender(
            name,
            meeting(endpoint, "2", backend="static", node_rank=rank, max_restarts=1),
            make=make_static,
        )
        for rank, name in enumerate("ab")
    ]
    async with present(*members) as (a, b), contextlib.AsyncExitStack() as stack:
        await a.formed(2)
        await b.formed(2)
        store = await stack.enter_async_context(connect(endpoint))
        await store.set("of a worker", "x")
        b.fails()
        for one in (a, b):
            assert (await one.formed(2, after=0)).restarts == 1
        assert not await store.check(["of a worker"])


async def test_a_static_round_is_over_before_the_next_begins() -> None:
    """Workers that take their time to stop would write into the store of the next ones."""
    endpoint = free_endpoint()
    spec = [meeting(endpoint, "3", backend="static", node_rank=rank) for rank in range(3)]
    a, b, c = (Pretender(n, one, make=make_static) for n, one in zip("abc", spec, strict=True))
    async with present(a, b, c) as members, contextlib.AsyncExitStack() as stack:
        for one in members:
            await one.formed(3)
        store = await stack.enter_async_context(connect(endpoint))
        b.obeys_halt = False
        members.remove(c)
        await c.rendezvous.leave("enough")
        c.close()
        again = Pretender("c", spec[2], make=make_static)
        members.append(again)
        await again.rendezvous.open()
        await a.until(lambda: [one for one in a.told_events if isinstance(one, NodeJoined)][3:])
        await b.until(lambda: b.halted)
        await asyncio.sleep(0.2)  # room for a round that is formed too early
        assert not again.begun
        assert len(a.begun) == 1
        await store.set("of a worker", "x")
        b.rendezvous.report(Ended(0))
        for one in (a, b, again):
            assert (await one.formed(3, after=0)).restarts == 0
        assert not await store.check(["of a worker"])


async def test_a_member_may_leave_at_any_time() -> None:
    """Nothing is left behind, whenever it goes; the others go on."""
    spec = meeting(free_endpoint(), "1:2", last_call_timeout=0.05)
    async with present(Pretender("a", spec)) as (a,):
        await a.formed(1)
        for step in range(30):
            b = Pretender("b", spec)
            await b.rendezvous.open()
            for _ in range(step):
                await asyncio.sleep(0)
            if step % 3 == 0:
                await asyncio.sleep(step / 1000)
            await b.rendezvous.leave("changed its mind")
            b.close()
        await a.until(lambda: a.place.span.group_world_size == 1)
        assert a.ending is None


async def test_leaving_may_be_cancelled() -> None:
    """It is carried through all the same."""
    spec = meeting(free_endpoint(), "1:2", last_call_timeout=0.05)
    a = Pretender("a", spec)
    await a.rendezvous.open()
    await a.formed(1)
    leaving = asyncio.ensure_future(a.rendezvous.leave("enough"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    a.close()
