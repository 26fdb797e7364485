"""The end of a job: all nodes learn of it, none runs it again, and none enters another job."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_aio.outcome import EndCause, JobState
from elastic_aio.rendezvous.base import RENDEZVOUS_FAILED, EndJob, RoundSucceeded
from elastic_aio.rendezvous.messages import MembersDone
from elastic_aio.rendezvous.state import CoordinatorPhase, RoundSettings
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.testing import SimNode, WorkerBehavior
from tests.support.coordinator_harness import CoordinatorHarness
from tests.support.simulated_nodes import ended, together
from tests.testing.checked import CheckedSimulation
from tests.testing.stores import SimStore

ALONE = "others had not"
"""In the outcome of a node that knows only of its own success."""

BRIEF: dict[str, Any] = {"heartbeat_timeout": 5.0, "last_call_timeout": 0.5}


# ------------------------------------------------------- what the coordinator does


def announced(harness: CoordinatorHarness) -> set[str]:
    """Return which members know that all have succeeded."""
    return {name for name, body in harness.sent if body == MembersDone(0, len(harness.members))}


def test_a_success_is_announced_to_all_before_the_job_ends() -> None:
    harness = CoordinatorHarness(RoundSettings(3, 3, may_move=True), "a", "b", "c")
    harness.drop_orders("c")
    harness.succeed("a", "b", "c")
    assert announced(harness) == {"a", "b", "c"}
    assert harness.is_in(CoordinatorPhase.RUNNING)
    assert not harness.end_orders()
    harness.restore_orders()
    harness.settle(10)
    assert harness.end_orders().keys() == {"a", "b", "c"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_member_that_knows_it_ends_the_job_at_another_store(size: int) -> None:
    """The first coordinator has recorded the end there, and was killed."""
    names = "abc"[:size]
    harness = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0, may_move=True), *names)
    harness.succeed(*names)
    assert harness.end_orders().keys() == set(names)
    informed = CoordinatorHarness(RoundSettings(1, 3, last_call_timeout=0, may_move=True), *names)
    informed.succeed(*names[:-1])
    member = informed.members[names[-1]]
    member.report(RoundSucceeded(0))
    member.on_order(order(informed, MembersDone(0, size)))
    for name in names[:-1]:
        del informed.members[name]
    informed.elect(names[-1], store=b"another", was_leased=False)
    informed.settle()
    assert informed.end_orders()[names[-1]].outcome.state is JobState.SUCCEEDED


def order(harness: CoordinatorHarness, body: MembersDone) -> Any:
    from elastic_aio.rendezvous.messages import Order

    return Order(harness.coordinator.outbox.term, 10_000, body)


@pytest.mark.parametrize(
    ("may_move", "was_leased", "is_repeated"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_success_that_may_have_ended_the_job_is_not_repeated(
    may_move: bool, was_leased: bool, is_repeated: bool
) -> None:
    """With a lease, the other store cannot have recorded an end: a worker there was killed."""
    settings = RoundSettings(1, 2, last_call_timeout=0, may_move=may_move)
    harness = CoordinatorHarness(settings, "a", "b")
    harness.succeed("b")
    harness.members.pop("a")
    harness.elect("b", store=b"another", was_leased=was_leased)
    for now in range(60):
        harness.settle(now)
    assert (harness.ranks == {"b": 0}) == is_repeated
    assert harness.is_in(CoordinatorPhase.RECOVERING) != is_repeated
    assert not harness.end_orders()


def test_a_member_that_comes_back_after_its_success_stands_for_no_other_one() -> None:
    """The former coordinator had taken it for gone; the node of the store is missing."""
    settings = RoundSettings(1, 4, last_call_timeout=0, may_move=True)
    harness = CoordinatorHarness(settings, "a", "b", "c", "d")
    harness.succeed("c")
    suspended = harness.members["c"]
    harness.lose("c")
    harness.settle()
    assert harness.members["b"].status.members_done == 1
    del harness.members["a"]
    harness.members["c"] = suspended
    harness.elect("b", store=b"another", was_leased=False)
    for now in range(60):
        harness.settle(now)
    assert harness.ranks.keys() == {"b", "c", "d"}
    assert all(one.status.round == 1 for one in harness.members.values())


def test_a_member_that_was_lost_may_still_hold_its_lease() -> None:
    """By its own clock, after its connection was reset; it goes to another store meanwhile."""
    settings = RoundSettings(2, 2, heartbeat_timeout=5.0, may_move=True)
    harness = CoordinatorHarness(settings, "a", "b")
    harness.succeed("b")
    harness.settle(1.0)
    harness.lose("b")
    harness.succeed("a")
    for now in (1.0, 3.0, 5.9):
        harness.settle(now)
        assert not harness.end_orders()
    harness.settle(6.0)
    assert harness.end_orders().keys() == {"a"}


def test_a_success_is_announced_to_a_node_on_standby() -> None:
    """It may go to another store, and go on there if it does not know."""
    harness = CoordinatorHarness(RoundSettings(2, 2, may_move=True), "a", "b", "c")
    harness.drop_orders("c")
    harness.succeed("a", "b")
    harness.settle(1)
    assert not harness.end_orders()
    harness.restore_orders()
    harness.settle(10)
    assert harness.end_orders().keys() == {"a", "b", "c"}


def test_a_lost_node_on_standby_may_still_hold_its_lease() -> None:
    settings = RoundSettings(2, 2, heartbeat_timeout=5.0, may_move=True)
    harness = CoordinatorHarness(settings, "a", "b", "c")
    harness.settle(1.0)
    harness.lose("c")
    harness.succeed("a", "b")
    harness.settle(5.9)
    assert not harness.end_orders()
    harness.settle(6.0)
    assert harness.end_orders().keys() == {"a", "b"}


def test_a_success_is_not_announced_where_there_is_one_store() -> None:
    harness = CoordinatorHarness(RoundSettings(2, 2), "a", "b")
    harness.drop_orders("b")
    harness.succeed("a", "b")
    assert harness.end_orders().keys() == {"a"}


def test_a_member_that_was_lost_that_knew_of_it_is_not_waited_for() -> None:
    harness = CoordinatorHarness(RoundSettings(3, 3, may_move=True), "a", "b", "c")
    harness.drop_orders("c")
    harness.succeed("a", "b", "c")
    harness.lose("b")
    harness.restore_orders()
    harness.settle(8)
    assert harness.end_orders().keys() == {"a", "c"}


# ------------------------------------------------------------ stories of two jobs


def two_jobs(**settings: Any) -> LaunchSpec:
    return LaunchSpec("x", nnodes=2, rendezvous=RendezvousSpec(**settings))


def start_two(sim: CheckedSimulation) -> tuple[SimNode, SimNode]:
    """Return two nodes that run a round; the first one coordinates."""
    a = sim.add_node("a")
    sim.run(0.3)
    b = sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(2), 60)
    assert sim.coordinators == [a]
    return a, b


def start_with_spare(sim: CheckedSimulation) -> tuple[SimNode, SimNode]:
    """Return a node that runs a round alone, and one on standby."""
    (a,) = together(sim, "a")
    spare = sim.add_node("spare")
    sim.run_until(lambda: spare.is_standing_by, 60)
    return a, spare


def ends_by_75(node: SimNode) -> bool:
    """Whether a node has ended because another job runs where it looked for its own."""
    outcome = node.outcome
    assert outcome is not None
    return (outcome.exit_code, outcome.cause) == (RENDEZVOUS_FAILED, EndCause.OTHER_JOB)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("endpoints", "settings"),
    [(["a"], {}), (["store0"], {"reuse": True}), (["a"], {"reuse": True})],
)
def test_a_node_of_a_finished_job_enters_no_next_one(
    endpoints: list[str], settings: dict[str, Any], seed: int
) -> None:
    """It was cut off when its job ended, and returns while the next one has its first round."""
    with CheckedSimulation(two_jobs(**settings), seed=seed, endpoints=endpoints) as sim:
        a, b = start_two(sim)
        b.end_workers(0)
        sim.run(1)
        sim.partition(["b"], {"a", *endpoints})
        sim.finish_workers()
        sim.run_until(lambda: not a.is_live, 120)
        started: list[str] = []

        def behave(node: SimNode, placement: object) -> WorkerBehavior:
            started.append(node.name)
            return WorkerBehavior(seconds=20)

        sim.behavior = behave
        second = [sim.add_node("a")]
        sim.run(1)
        sim.heal()
        sim.run_until(lambda: not b.is_live, 60)
        assert ends_by_75(b) or ended(b).state is JobState.SUCCEEDED
        second.append(sim.add_node("c"))
        sim.run_until(lambda: sim.is_over, 60)
        assert sorted(started) == [one.name for one in second]
        assert {one.outcome.state for one in second if one.outcome} == {JobState.SUCCEEDED}


def test_a_node_reads_the_end_of_its_job_in_the_next_generation() -> None:
    with CheckedSimulation(two_jobs(reuse=True), endpoints=["store0"]) as sim:
        a, b = start_two(sim)
        sim.checker.order_hook = lambda store, member, body: (
            sim.partition(["b"], ["a", "store0"]) if isinstance(body, EndJob) else None
        )
        sim.fail_worker(a, 7)
        sim.run_until(lambda: not a.is_live, 120)
        sim.checker.order_hook = None
        for name in ("a", "c"):
            sim.add_node(name)
        sim.run_until(lambda: sim.is_settled(2, [sim.nodes["a"], sim.nodes["c"]]), 60)
        sim.heal()
        sim.run_until(lambda: not b.is_live, 60)
        assert ended(a).state is ended(b).state
        assert (ended(a).why, ended(a).exit_code) == (ended(b).why, ended(b).exit_code)


def test_a_node_on_standby_enters_no_other_job() -> None:
    with CheckedSimulation(LaunchSpec("x", nnodes=1), endpoints=["a"]) as sim:
        a, spare = start_with_spare(sim)
        sim.partition(["spare"], ["a"])
        sim.finish_workers()
        sim.run_until(lambda: not a.is_live, 60)
        sim.behavior = lambda node, placement: WorkerBehavior()
        next_one = sim.add_node("a")
        sim.run_until(lambda: next_one.running is not None, 60)
        sim.heal()
        sim.run_until(lambda: not spare.is_live, 60)
        assert ends_by_75(spare)


@pytest.mark.parametrize("is_informed", [True, False])
def test_a_node_on_standby_goes_on_alone_unless_it_knows_of_the_success(is_informed: bool) -> None:
    """The only other node is killed; its success may have ended the job."""
    with CheckedSimulation(LaunchSpec("x", nnodes=1), endpoints=["a", "spare"]) as sim:
        a, spare = start_with_spare(sim)
        (store,) = sim.checker.open_stores
        sim.finish_workers()
        if is_informed:  # before the end is recorded
            sim.run_until(
                lambda: any(one.round < 0 < one.members_done for one in store.statuses.values()), 60
            )
        sim.kill(a)
        sim.behavior = lambda node, placement: WorkerBehavior()
        if is_informed:
            sim.run_until(lambda: not spare.is_live, 60)
            assert spare.placement is None
        else:
            sim.run_until(lambda: sim.is_settled(1, [spare]), 60)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_coordinator_has_recorded_the_end_that_it_orders(seed: int) -> None:
    """A node that comes later runs nothing, even if no other one has seen the order."""
    with CheckedSimulation(two_jobs(), seed=seed, endpoints=["store0"]) as sim:
        nodes = together(sim, "ab")
        killed: list[SimNode] = []

        def kill(store: SimStore, member: str, body: object) -> None:
            if isinstance(body, EndJob) and not killed:
                killed.extend(sim.coordinators)
                for node in nodes:
                    sim.time.at(sim.now, sim.kill, node)

        sim.checker.order_hook = kill
        sim.finish_workers()
        sim.run_until(lambda: bool(killed) and sim.is_over, 60)
        late = sim.add_node("late")
        sim.run_until(lambda: sim.is_over, 60)
        assert late.placement is None
        assert ended(late).cause is EndCause.RUN_HAD_ENDED
        assert ended(late).state is JobState.SUCCEEDED


def test_nodes_that_all_fail_with_their_store_go_on_elsewhere() -> None:
    """No node is busy when they meet again, and a spare node comes first."""
    spec = LaunchSpec("x", nnodes="2:3", max_restarts=3)
    with CheckedSimulation(spec, endpoints=["a", "spare"]) as sim:
        a, b, c = together(sim, "abc")
        spare = sim.add_node("spare")
        sim.run_until(lambda: spare.is_standing_by, 60)
        sim.kill(a)
        sim.fail_worker(b)
        sim.fail_worker(c)
        sim.run_until(lambda: sim.is_settled(3, [b, c, spare]), 60)
        assert b.placement is not None
        assert b.placement.attempt > 0


@pytest.mark.parametrize("seed", range(10))
def test_of_two_halves_that_yield_one_goes_on(seed: int) -> None:
    """The node that serves the first endpoint was suspended, and both look at the same time."""
    spec = LaunchSpec("x", nnodes="1:2", rendezvous=RendezvousSpec(**BRIEF))
    with CheckedSimulation(spec, seed=seed, endpoints=["a", "b"]) as sim:
        a, b = start_two(sim)
        sim.suspend("a", 12)
        sim.run_until(lambda: sim.is_settled(1, [b]), 60)
        sim.run_until(lambda: sim.is_settled(2, [a, b]), 90)
        assert len(sim.checker.rounds.rounds) <= 4, "the healthy half restarts once"


def test_a_half_that_may_have_ended_joins_no_other_job() -> None:
    """Its job has failed at the first endpoint, where the next one runs; it runs at the second."""
    spec = LaunchSpec("x", nnodes="1:3", rendezvous=RendezvousSpec(**BRIEF, join_timeout=5))
    with CheckedSimulation(spec, endpoints=["a", "b"]) as sim:
        a, b = start_two(sim)
        c = sim.add_node("c")
        sim.run_until(lambda: sim.is_settled(3), 60)
        sim.partition(["a"], ["b", "c"])
        sim.run_until(lambda: sim.is_settled(2, [b, c]) and a.running is not None, 60)
        sim.fail_worker(a, 3)
        sim.run_until(lambda: not a.is_live, 60)
        next_one = sim.add_node("a")
        sim.run_until(lambda: next_one.running is not None, 60)
        sim.heal()
        sim.run_until(lambda: not (b.is_live or c.is_live), 60)
        assert ends_by_75(b)
        assert ends_by_75(c)
        assert next_one.running is not None


def test_a_success_that_is_cut_off_does_not_hold_the_next_job_up() -> None:
    """Its own store at the second endpoint is not that of the new nodes."""
    spec = LaunchSpec("x", nnodes=2, rendezvous=RendezvousSpec(heartbeat_timeout=5.0))
    with CheckedSimulation(spec, endpoints=["a", "b"]) as sim:
        a, b = start_two(sim)
        b.end_workers(0)
        sim.run(1)
        sim.partition(["b"], ["a"])
        sim.run(30)
        sim.finish_workers()
        sim.run_until(lambda: not a.is_live, 60)
        sim.heal()
        began_at, former = sim.now, set(sim.checker.rounds.rounds)
        second = [sim.add_node("a"), sim.add_node("c")]
        sim.run_until(lambda: all(not one.is_live for one in second), 60)
        assert sim.now - began_at < 20
        assert len(sim.checker.rounds.rounds.keys() - former) == 1
        assert {one.outcome.state for one in second if one.outcome} == {JobState.SUCCEEDED}
        sim.run_until(lambda: sim.is_over, 600)


def test_a_node_whose_status_is_gone_comes_back() -> None:
    """It was taken for gone; it does not wait for orders that are not written any more."""
    with CheckedSimulation(LaunchSpec("x", nnodes="1:2"), endpoints=["store0"]) as sim:
        a, b = start_two(sim)
        (store,) = sim.checker.open_stores
        assert store.leader_number == a.number
        (member,) = [key for key, one in store.statuses.items() if one.node.pid == b.number]
        keys = store.keyspace.list_keys()
        (key,) = [one for one in keys if one.endswith(f"/t/{member}".encode())]
        former = b.placement
        sim.run(5)  # nothing is to be written
        store.keyspace.delete(key)
        sim.run_until(lambda: b.placement is not former and sim.is_settled(2), 60)


def test_an_end_that_the_store_has_lost_is_restored() -> None:
    """By the members that obey it: a fail-over of an engine may lose what it has acknowledged."""
    with CheckedSimulation(two_jobs(), endpoints=["store0"]) as sim:
        start_two(sim)
        (store,) = sim.checker.open_stores

        def lose(_: SimStore, member: str, body: object) -> None:
            for key in store.keyspace.list_keys():
                if key.endswith(b"/end"):
                    store.keyspace.set(key, b"")

        sim.checker.order_hook = lose
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, 60)
        late = sim.add_node("late")
        sim.run_until(lambda: sim.is_over, 60)
        assert (late.placement, ended(late).cause) == (None, EndCause.RUN_HAD_ENDED)


def test_a_host_stays_until_a_lost_member_has_no_lease() -> None:
    """It was reset while its workers ran: it may come back, and finds the end of its job."""
    spec = LaunchSpec("x", nnodes="1:2", rendezvous=RendezvousSpec(**BRIEF))
    with CheckedSimulation(spec, endpoints=["a"]) as sim:
        a, b = start_two(sim)
        sim.partition(["b"], ["a"])
        sim.break_connection(b)
        for connection in [one for one in sim.network.connections if one.loop is a.process]:
            if connection.peer is not None and connection.peer.loop is b.process:
                connection.reset()
        sim.run_until(lambda: sim.is_settled(1, [a]), 60)
        lost_at = sim.now
        sim.finish_workers()
        sim.run_until(lambda: a.is_ending, 60)
        sim.run(3.0)
        assert a.is_live
        sim.heal()
        sim.run_until(lambda: sim.is_over, 60)
        assert sim.now - lost_at < 2 * spec.rendezvous.heartbeat_timeout
        assert ended(b).state is JobState.SUCCEEDED


def test_a_node_without_its_lease_enters_no_next_job() -> None:
    """Its workers were stopped when its lease had ended; its job may have gone on without it."""
    settings = RendezvousSpec(**BRIEF, store_grace=30.0)
    spec = LaunchSpec("x", nnodes="1:2", rendezvous=settings)
    with CheckedSimulation(spec, endpoints=["a"]) as sim:
        a, b = start_two(sim)
        sim.partition(["b"], ["a"])
        sim.run_until(lambda: sim.is_settled(1, [a]), 60)
        assert b.running is not None
        sim.kill(a)
        sim.behavior = lambda node, placement: WorkerBehavior()
        next_one = sim.add_node("a")
        sim.run_until(lambda: next_one.running is not None, 60)
        sim.heal()
        sim.run_until(lambda: not b.is_live, 60)
        assert ends_by_75(b)


def reset_and_cut_off(sim: CheckedSimulation, node: SimNode) -> None:
    """Let host "a" see a reset of the connection of `node`, and nothing more."""
    sim.partition(["a"], [node.host.name], one_way=True)
    sim.run(0.001)
    sim.break_connection(node)
    sim.run(0.01)
    sim.partition(["a"], [node.host.name])


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_host_stays_for_a_lost_node_on_standby(max_restarts: int) -> None:
    """That would go on in the next job, as if its own had lost its store."""
    with CheckedSimulation(
        LaunchSpec("x", nnodes=1, max_restarts=max_restarts), endpoints=["a"]
    ) as sim:
        a, spare = start_with_spare(sim)
        sim.run(3)
        reset_and_cut_off(sim, spare)
        sim.finish_workers()
        sim.run_until(lambda: not a.is_live, 60)
        sim.behavior = lambda node, placement: WorkerBehavior()
        next_one = sim.add_node("a")
        sim.run_until(lambda: next_one.running is not None, 60)
        sim.heal()
        sim.run_until(lambda: not spare.is_live, 60)
        assert ends_by_75(spare)


def test_a_host_that_stays_shortly_is_waited_for_as_shortly() -> None:
    """The lease would last a minute, and the host drains for two seconds."""
    settings = RendezvousSpec(heartbeat_timeout=60.0, close_timeout=2.0, last_call_timeout=0.5)
    spec = LaunchSpec("x", nnodes="1:2", rendezvous=settings)
    with CheckedSimulation(spec, endpoints=["a"]) as sim:
        a, b = start_two(sim)
        sim.run(3)
        reset_and_cut_off(sim, b)
        sim.run_until(lambda: sim.is_settled(1, [a]), 60)
        a.end_workers(0)
        sim.run_until(lambda: not a.is_live, 60)
        sim.behavior = lambda node, placement: WorkerBehavior()
        next_one = sim.add_node("a")
        sim.run_until(lambda: next_one.running is not None, 60)
        sim.heal()
        sim.run_until(lambda: not b.is_live, 120)
        assert ends_by_75(b)


@pytest.mark.parametrize("how", ["leaves", "killed", "killed, and its peer fails"])
def test_the_host_may_be_started_again_without_any_restart_left(how: str) -> None:
    """Within the time of a lease; with one endpoint the others wait for it."""
    with CheckedSimulation(LaunchSpec("x", nnodes=2), endpoints=["a"]) as sim:
        a, b = start_two(sim)
        sim.run(3)
        if how == "leaves":
            sim.leave(a)
            sim.run_until(lambda: not a.is_live, 60)
        else:
            sim.kill(a)
            sim.run(0.3)
        if "fails" in how:
            sim.fail_worker(b)
        sim.run(0.5)
        again = sim.add_node("a")
        sim.run_until(lambda: sim.is_settled(2, [again, b]), 60)


def test_a_failure_that_may_have_ended_the_job_enters_no_next_one() -> None:
    """Its coordinator has read it, and no restart is left."""
    with CheckedSimulation(LaunchSpec("x", nnodes=2), endpoints=["a"]) as sim:
        a, b = start_two(sim)
        (store,) = sim.checker.open_stores
        sim.fail_worker(b)
        sim.run_until(lambda: any(key.endswith(b"/end") for key in store.keyspace.list_keys()), 60)
        sim.partition(["a"], ["b"])
        sim.break_connection(b)
        sim.run_until(lambda: a.is_ending, 60)
        sim.kill(a)
        sim.behavior = lambda node, placement: WorkerBehavior()
        next_one = sim.add_node("a")
        sim.heal()
        sim.run_until(lambda: not b.is_live, 60)
        assert ends_by_75(b)
        assert next_one.is_live


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("train.py", "/work/train.py", True),
        (["sh", "x.sh"], ["sh", "y.sh"], False),
        (["sh", "x.sh"], ["/bin/sh", "x.sh"], True),
    ],
)
def test_a_job_has_one_program(one: Any, other: Any, is_same: bool) -> None:
    """A node whose host comes back goes on with it if both run the same."""
    with CheckedSimulation(LaunchSpec(one, nnodes=2, max_restarts=1), endpoints=["a"]) as sim:
        a, b = start_two(sim)
        sim.kill(a)
        sim.run(0.5)
        sim.spec = LaunchSpec(other, nnodes=2, max_restarts=1)
        again = sim.add_node("a")
        if is_same:
            sim.run_until(lambda: sim.is_settled(2, [again, b]), 60)
        else:
            sim.run_until(lambda: not b.is_live, 60)
            assert ends_by_75(b)


def test_a_node_that_has_succeeded_serves_the_store_for_those_that_compute() -> None:
    """Its own success ends no job whose other nodes still run, and only it can serve."""
    spec = LaunchSpec("x", nnodes="2:3", rendezvous=RendezvousSpec(**BRIEF))
    with CheckedSimulation(spec, endpoints=["a", "b"]) as sim:
        a, b = start_two(sim)
        c = sim.add_node("c")
        sim.run_until(lambda: sim.is_settled(3), 60)
        b.end_workers(0)
        sim.run(3)
        sim.switch_off(a)
        sim.run_until(lambda: sim.is_settled(2, [b, c]), 60)
