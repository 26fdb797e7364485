"""Jobs of many nodes in virtual time: by chance, and the stories that were found so."""

from __future__ import annotations

import os

import pytest

from elastic_aio.backoff import Backoff
from elastic_aio.events import Event, NodeJoined, NodeLost
from elastic_aio.outcome import JobState
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.testing import InvariantBroken, Node, Rules, Simulation, Work, explore

COUNT = int(os.environ.get("ELASTIC_AIO_SIMULATIONS", "300"))
CHUNKS = 10

QUICK = Rules(1, 3, last_call_timeout=0.5, join_timeout=20)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_stories_end_well(chunk: int) -> None:
    """Whatever fails, no rule is broken, and all come together when the faults are over."""
    for seed in range(chunk, COUNT, CHUNKS):
        explore(seed)


# What was wrong when these were found is told beside each.
FOUND = {
    4563: "a place that was never taken was waited for, though its member had been away",
    5308: "the same, for the only node that was missing",
    965: "the serving node went to an earlier endpoint before all had heard of the end",
    22107: "the office of a node's own earlier session was taken for the present one's",
    3307: "a node served a store that it did not attend itself",
    7720: "two halves of a job restarted each by itself, and met",
    12441: "one half ended while the other came home",
}


@pytest.mark.parametrize("seed", FOUND)
def test_stories_that_once_went_wrong(seed: int) -> None:
    """Each taught something."""
    explore(seed)


def test_a_seed_is_a_story() -> None:
    """The same one tells the same, to the letter."""
    assert explore(5).trace == explore(5).trace
    assert explore(5).trace != explore(6).trace


# -------------------------------------------------------------- known stories


def three(**options: object) -> tuple[Simulation, Node, Node, Node]:
    """Return three nodes that run a round together."""
    sim = Simulation(QUICK, **options)  # type: ignore[arg-type]
    nodes = [sim.add_node(name) for name in "abc"]
    sim.run_until(lambda: sim.is_settled(3), 60)
    return sim, nodes[0], nodes[1], nodes[2]


def finish(sim: Simulation) -> set[str]:
    """Let all workers succeed; return how the job has ended."""
    sim.finish_workers()
    sim.run_until(lambda: sim.is_over, 60)
    return {ending.state for ending in sim.endings.values()}


def test_a_policy_over_a_hundred_attempts() -> None:
    """An hour of back-off takes no time."""
    policy = RestartPolicy(backoff=Backoff(initial=1, cap=60), never_on=[3])
    sim = Simulation(Rules(2, 2), restart=policy, max_restarts=100)
    sim.work = lambda node, placement: Work(seconds=5, exit_code=1)
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: sim.is_over, 100_000)
    assert a.ending is not None
    assert a.ending == b.ending
    assert a.ending.restarts == 100
    assert "all 100 restarts are used up" in a.ending.why
    assert sim.now > 1000


def test_a_callback_may_give_up() -> None:
    """As it would in a real job."""
    sim = Simulation(Rules(1, 1, asks=True), decide=lambda failure: Action.GIVE_UP, deciding=2.0)
    sim.work = lambda node, placement: Work(seconds=1, exit_code=9)
    node = sim.add_node("a")
    sim.run_until(lambda: sim.is_over, 60)
    assert node.ending is not None
    assert node.ending.why == "restart.decide said to give up"


def test_a_callback_may_fail() -> None:
    """The job ends by it, with its words."""

    def decide(_: object) -> Action:
        raise KeyError("no such thing")

    sim = Simulation(Rules(1, 1, asks=True), decide=decide)
    sim.work = lambda node, placement: Work(seconds=1, exit_code=9)
    node = sim.add_node("a")
    sim.run_until(lambda: sim.is_over, 60)
    assert node.ending is not None
    assert node.ending.why == "restart.decide raised KeyError('no such thing')"


def test_a_partition_and_its_end() -> None:
    """The larger part goes on; the other one comes back, and all run one round."""
    sim, a, b, c = three(seed=7)
    sim.partition(["a", "b"], ["c"])
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert c.running is not None
    assert finish(sim) == {JobState.SUCCEEDED}


def test_two_halves_run_each_a_round_and_become_one_again() -> None:
    """With two endpoints and a minimum of one, both go on; the numbers never fall."""
    sim, a, b, c = three(endpoints=("a", "b"))
    sim.partition(["a"], ["b", "c"])
    sim.run_until(lambda: sim.is_settled(2, [b, c]) and sim.is_settled(1, [a]), 60)
    assert len(sim.coordinators) == 2
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert len(sim.coordinators) == 1
    assert finish(sim) == {JobState.SUCCEEDED}


def test_the_host_dies_and_another_endpoint_takes_over() -> None:
    """Nobody has to be restarted but for the place that is vacant."""
    sim, a, b, _c = three(endpoints=("a", "b"))
    sim.kill(a)
    sim.run_until(lambda: sim.is_settled(2), 60)
    assert sim.now < 15
    assert b.running is not None
    assert b.running.round == 1


def test_a_store_that_is_restarted_restarts_nobody() -> None:
    """The members' own tickets are all that it has to know."""
    sim, a, _b, _c = three(endpoints=("store0",))
    sim.stop_store("store0")
    sim.run(0.5)
    sim.open_place("store0")
    sim.run(10)
    assert sim.is_settled(3)
    assert a.running is not None
    assert a.running.round == 0


def test_without_a_store_workers_stop_in_time() -> None:
    """The others must be taken to have gone on."""
    sim, _a, _b, c = three(store_grace=4.0, heartbeat_timeout=2.0, read_timeout=30.0)
    sim.partition(["c"], ["a", "b"])
    sim.run(12)
    assert c.running is None
    sim.run_until(lambda: c.ending is not None, 60)
    assert c.ending is not None
    assert c.ending.is_rendezvous


@pytest.mark.parametrize("seconds", [0.1, 1.5, 4.0])
def test_a_machine_that_stands_still_comes_back(seconds: float) -> None:
    """Its connection was kept, but not its place if that took too long."""
    sim, _a, b, _c = three(heartbeat_timeout=2.0)
    sim.pause(b, seconds)
    sim.run(seconds + 1)
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert b.running is not None
    assert (b.running.round == 0) == (seconds < 2)


def test_a_connection_that_breaks_is_no_loss() -> None:
    """The lease outlives it for a moment."""
    lost: list[Event] = []
    sim, _a, b, _c = three()
    sim.judge.on_event = lambda node, event: lost.append(event)
    sim.break_link(b)
    sim.run(5)
    assert not [event for event in lost if isinstance(event, NodeLost)]
    assert sim.is_settled(3)
    assert b.running is not None
    assert b.running.round == 0


def test_spares_come_and_go_without_touching_the_round() -> None:
    """Fifty of them, in every way a node can go."""
    sim, a, b, c = three(heartbeat_timeout=2.0)
    for number in range(50):
        spare = sim.add_node("spare")
        sim.run(0.1)
        (sim.kill if number % 2 else sim.leave)(spare)
        sim.run(2.5)
    assert sim.is_settled(3)
    assert {one.running.round for one in (a, b, c) if one.running} == {0}


def test_a_newcomer_that_cannot_reach_the_others_is_a_line() -> None:
    """It reaches the store, but not the node where the workers would meet."""
    rules = Rules(1, 4, last_call_timeout=0.5)
    sim = Simulation(rules, endpoints=("store0",))
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(2), 60)
    sim.partition(["z"], ["a", "b"])
    sim.add_node("z")
    sim.run(20)
    assert sim.is_settled(2, [a, b])
    assert a.running is not None
    assert a.running.round == 0
    assert "it does not reach the others" in sim.trace
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)


def test_clocks_and_calendars_do_not_matter() -> None:
    """Hours of difference, and one that goes a little too fast."""
    sim = Simulation(Rules(3, 3), max_restarts=0, delay=(0.001, 0.0011))
    sim.add_node("a", offset=-7200.0, rate=1.003)
    sim.add_node("b", offset=86_400.0)
    sim.add_node("c", rate=0.997)
    sim.run_until(lambda: sim.is_settled(3), 60)
    sim.work = lambda node, placement: Work()
    sim.fail_worker(sim.nodes["b"], 3)
    sim.run(0.002)
    sim.fail_worker(sim.nodes["a"], 4)
    sim.run_until(lambda: sim.is_over, 60)
    assert {ending.exit_code for ending in sim.endings.values()} == {3}, "b's was first"


def test_a_misfit_is_refused_and_alone() -> None:
    """The job does not notice."""
    sim, _a, _b, _c = three()
    x = sim.add_node("x", rules=Rules(2, 8))
    sim.run_until(lambda: x.ending is not None, 10)
    assert x.ending is not None
    assert "it was started with --nnodes 2:8, the job with 1:3" in x.ending.why
    assert sim.is_settled(3)


def test_two_hundred_nodes() -> None:
    """They meet, one fails, the coordinator dies, and they end together."""
    rules = Rules(190, 200, last_call_timeout=5)
    sim = Simulation(rules, endpoints=("store0",), seed=1)
    for number in range(200):
        sim.add_node(f"n{number}")
    sim.run_until(lambda: sim.is_settled(200), 30)
    sim.fail_worker(sim.nodes["n17"])
    sim.run(1)
    sim.run_until(lambda: sim.is_settled(200), 30)
    office = next(node for node in sim.living if node.attendance and node.attendance.bureau)
    sim.kill(office)
    sim.run_until(lambda: sim.is_settled(199), 30)
    held = sim.living[0].running
    assert held is not None
    assert (held.round, held.restarts) == (2, 1)
    assert finish(sim) == {JobState.SUCCEEDED}


# ----------------------------------------------------------------- the witness


def test_a_broken_rule_tells_its_story() -> None:
    """The seed and all that happened stand in the message."""
    sim, a, b, _c = three(seed=77)
    assert a.running is not None
    with pytest.raises(InvariantBroken, match=r"seed 77: .* have the same place") as caught:
        sim.judge.started(b, a.running)
    assert "is started" in str(caught.value)


def test_what_does_not_come_is_told() -> None:
    """With the time that was waited."""
    sim = Simulation(Rules(2, 2))
    sim.add_node("a")
    with pytest.raises(InvariantBroken, match="nothing came of it within 5 s"):
        sim.run_until(lambda: sim.is_settled(2), 5)


def test_events_can_be_listened_to() -> None:
    """All nodes' events, as they happen."""
    seen: list[Event] = []
    sim = Simulation(Rules(2, 2))
    sim.judge.on_event = lambda node, event: seen.append(event)
    sim.add_node("a")
    sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(2), 10)
    assert len([event for event in seen if isinstance(event, NodeJoined)]) == 2


def test_a_node_runs_once() -> None:
    """Until it is killed or has left."""
    sim, _a, _b, _c = three()
    with pytest.raises(ValueError, match="node 'a' is running already"):
        sim.add_node("a")
