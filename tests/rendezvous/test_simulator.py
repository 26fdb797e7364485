"""Jobs of many nodes in virtual time: random scenarios and chosen ones.

`ELASTIC_AIO_SIMULATIONS` is the number of random ones, and `ELASTIC_AIO_SIMULATIONS_SEED` the
first seed.  A failure names its seed.
"""

from __future__ import annotations

import gc
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_aio.discovery.choice import FENCE
from elastic_aio.errors import SpecError
from elastic_aio.events import Event
from elastic_aio.node_events import MembershipPending, NodeJoined, NodeLost, RoundWaiting
from elastic_aio.outcome import JobState
from elastic_aio.rendezvous.messages import LEASE_LINGER
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import EngineSpec, RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartAction, RestartPolicy
from elastic_aio.spec.stop import StopPlan
from elastic_aio.testing import InvariantViolated, SimNode, WorkerBehavior
from tests.support.cli import REPOSITORY
from tests.support.simulated_nodes import ended, placed, together
from tests.testing.checked import CheckedSimulation
from tests.testing.scenarios import run_random_scenario

COUNT = int(os.environ.get("ELASTIC_AIO_SIMULATIONS", "40"))
FIRST = int(os.environ.get("ELASTIC_AIO_SIMULATIONS_SEED", "0"))
CHUNKS = max(10, COUNT // 250)


def job(nnodes: Any, **settings: Any) -> LaunchSpec:
    """Return a job; settings are those of a `LaunchSpec`, or of its rendezvous."""
    ours = {name: settings.pop(name) for name in ("max_restarts", "restart") if name in settings}
    short = {"last_call_timeout": 0.5, "scale_up_delay": 0.0, "join_timeout": 20.0}
    rendezvous = {**short, **settings}
    return LaunchSpec("x", nnodes=nnodes, rendezvous=RendezvousSpec(**rendezvous), **ours)


@pytest.fixture(autouse=True, scope="module")
def _few_collections() -> Iterator[None]:
    """The cyclic garbage of a simulation is small, and to look for it takes a tenth of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_scenarios(chunk: int) -> None:
    for seed in range(FIRST + chunk, FIRST + COUNT, CHUNKS):
        run_random_scenario(seed)


def test_a_write_of_a_connection_that_was_given_up_does_not_arrive() -> None:
    """It would bind the status of a node to the lease of its former session, which ends."""
    run_random_scenario(15548)
    run_random_scenario(537, LaunchSpec("x", nnodes="1:3"))


@pytest.mark.parametrize("seed", [9, 33, 42])
def test_a_policy_that_excludes_nodes_for_ever(seed: int) -> None:
    """The others come together without them."""
    policy = RestartPolicy(decide=lambda failure: RestartAction.EXCLUDE)
    run_random_scenario(seed, job("2:4", max_restarts=3, restart=policy))


def test_a_seed_gives_one_trace() -> None:
    assert run_random_scenario(5).trace == run_random_scenario(5).trace
    assert run_random_scenario(5).trace != run_random_scenario(6).trace


@pytest.mark.slow
def test_a_seed_gives_one_trace_in_every_process() -> None:
    code = """
from tests.testing.scenarios import run_random_scenario
print(*(run_random_scenario(seed).trace for seed in (23, 27, 42)))
"""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second


def test_a_step_draws_no_random_number_of_the_caller() -> None:
    """Otherwise the trace would depend on them: a node that cannot connect draws a delay."""
    sim = CheckedSimulation(job(2), endpoints=("store0",))
    sim.suspend("store0", 60)
    a = sim.add_node("a")
    sim.run(0.5)
    former = random.getstate()
    sim.break_connection(a)
    sim.run(0)
    assert random.getstate() == former


# -------------------------------------------------------------- known stories


def three(
    *, seed: int = 0, endpoints: Sequence[str] = (), **settings: Any
) -> tuple[CheckedSimulation, SimNode, SimNode, SimNode]:
    """Return three nodes that run a round together."""
    sim = CheckedSimulation(job("1:3", **settings), seed=seed, endpoints=endpoints)
    nodes = together(sim, "abc")
    return sim, nodes[0], nodes[1], nodes[2]


def finish(sim: CheckedSimulation) -> set[str]:
    """Let all workers succeed; return how the job has ended."""
    sim.finish_workers()
    sim.run_until(lambda: sim.is_over, 60)
    return {outcome.state for outcome in sim.outcomes.values()}


@pytest.mark.slow
def test_a_policy_over_a_hundred_attempts() -> None:
    policy = RestartPolicy(backoff=Backoff(initial=1, cap=60), never_on=[3])
    sim = CheckedSimulation(job(2, restart=policy, max_restarts=100))
    sim.behavior = lambda node, placement: WorkerBehavior(seconds=5, exit_code=1)
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: sim.is_over, 100_000)
    # Each node keeps its own failures with their times; the others' come with the order.
    assert replace(ended(a), failures=()) == replace(ended(b), failures=())
    assert [one.host for one in ended(a).failures] == [one.host for one in ended(b).failures]
    assert ended(a).restarts == 100
    assert "all 100 restarts are used up" in ended(a).why
    assert sim.now > 1000


def test_a_callback_may_give_up() -> None:
    policy = RestartPolicy(decide=lambda failure: RestartAction.GIVE_UP)
    sim = CheckedSimulation(job("1:2", restart=policy, max_restarts=1), decide_duration=2.0)
    sim.behavior = lambda node, placement: WorkerBehavior(seconds=1, exit_code=9)
    node = sim.add_node("a")
    sim.run_until(lambda: sim.is_over, 60)
    assert ended(node).why == "restart.decide returned GIVE_UP"
    assert ended(node).restarts == 0


def raise_key_error(_: object) -> RestartAction:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("decide", "error"),
    [
        (raise_key_error, "KeyError('no such thing')"),
        (
            lambda failure: "retry",
            "TypeError(\"restart.decide must return a RestartAction (got 'retry')\")",
        ),
    ],
)
def test_a_callback_may_fail(decide: Any, error: str) -> None:
    sim = CheckedSimulation(job("1:2", restart=RestartPolicy(decide=decide), max_restarts=1))
    sim.behavior = lambda node, placement: WorkerBehavior(seconds=1, exit_code=9)
    node = sim.add_node("a")
    sim.run_until(lambda: sim.is_over, 60)
    assert ended(node).why == f"restart.decide raised {error}"


def divide(node: SimNode, placement: object) -> WorkerBehavior:
    return WorkerBehavior(seconds=1 / 0)


@pytest.mark.parametrize(
    ("behavior", "error", "text"),
    [
        (divide, ZeroDivisionError, "division by zero"),
        (lambda node: WorkerBehavior(), TypeError, "takes 1 positional argument but 2 were given"),
        (
            lambda node, placement: None,
            SpecError,
            r"^behavior: must return a WorkerBehavior \(got None\)$",
        ),
    ],
)
def test_an_error_of_the_behavior_reaches_the_caller(
    behavior: Any, error: type[Exception], text: str
) -> None:
    with CheckedSimulation(job("1:2")) as sim:
        sim.behavior = behavior
        sim.add_node("a")
        with pytest.raises(error, match=text) as caught:
            sim.run(60)
    if behavior is divide:
        assert caught.traceback[-1].name == "divide"


def test_a_wrong_spec_is_refused() -> None:
    with pytest.raises(SpecError, match=r"spec: must be a LaunchSpec \(got \(2, 2\)\)"):
        CheckedSimulation((2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"seconds": -5}, r"seconds: must be a number of at least 0 \(got -5\)"),
        ({"exit_code": 300}, r"exit_code: must be an exit code from 0 to 255 \(got 300\)"),
        ({"start_duration": None}, "start_duration: must be a number"),
        ({"stop_duration": -0.1}, "stop_duration: must be a number"),
    ],
)
def test_a_wrong_behavior_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        WorkerBehavior(**settings)


def test_a_random_scenario_needs_two_nodes() -> None:
    text = r"nnodes: must be at least 2 in a random scenario \(got 1\)"
    for seed in range(5):
        with pytest.raises(SpecError, match=text):
            run_random_scenario(seed, job(1))


@pytest.mark.parametrize("codes", [(), (0,), (1, 256), 3])
def test_wrong_exit_codes_of_a_random_scenario_are_refused(codes: Any) -> None:
    with pytest.raises(SpecError, match="exit_codes: must"):
        run_random_scenario(0, exit_codes=codes)


def test_workers_of_a_random_scenario_fail_with_the_given_codes() -> None:
    found = set[int]()
    for seed in range(40):
        sim = run_random_scenario(seed, exit_codes=[78, 7])
        found |= set(map(int, re.findall(r"a worker fails with exit code (\d+)", sim.trace)))
    assert found == {7, 78}


@pytest.mark.parametrize(
    "call",
    [
        lambda sim: sim.partition(["a"], ["B"]),
        lambda sim: sim.suspend("B", 1),
        lambda sim: sim.slow_down("B", 1),
        lambda sim: sim.stop_store("B"),
    ],
)
def test_an_unknown_host_is_refused(call: Callable[[CheckedSimulation], None]) -> None:
    with CheckedSimulation(job(2), endpoints=["a"]) as sim:
        sim.add_node("b")
        with pytest.raises(ValueError, match=r"no such host: 'B' \(known: a, b\)"):
            call(sim)
        assert "B" not in sim.trace


def test_a_partition_and_its_end() -> None:
    """The larger side keeps running."""
    sim, a, b, c = three(seed=7)
    sim.partition(["a", "b"], ["c"])
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert c.running is not None
    assert finish(sim) == {JobState.SUCCEEDED}


@pytest.mark.parametrize("seconds", [0.7, 2.0, 3.0, 4.0])
def test_a_member_is_suspended_and_cut_off(seconds: float) -> None:
    """Its silence counts from the last reply, and not from the end of its suspension."""
    sim, a, b, c = three(seed=3)
    sim.run(1.7)
    sim.suspend("c", seconds)
    sim.partition(["a", "b"], ["c"])
    sim.run(seconds + 0.01)
    awake_at = sim.now
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)
    sim.run_until(lambda: c.running is None, max(0.0, awake_at + 0.6 - sim.now))
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)


@pytest.mark.parametrize("seed", range(5))
def test_a_node_without_replies_stops_before_the_others_go_on(seed: int) -> None:
    """Its messages arrive, so the store sees that it gives the connection up."""
    sim = CheckedSimulation(job("1:3", heartbeat_timeout=2.0), seed=seed, endpoints=("a",))
    sim.behavior = lambda node, placement: WorkerBehavior(
        stop_duration=20.0 if node.host.name == "c" else 0.0
    )
    a, b, _c = together(sim, "abc")
    sim.partition(["a", "b"], ["c"], one_way=True)
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)


def test_nodes_go_on_at_once_after_the_death_of_an_agent() -> None:
    """Its kernel has closed the connection; a reset proves nothing."""
    sim, a, b, c = three(endpoints=("a",))
    sim.kill(c)
    sim.run_until(lambda: sim.is_settled(2, [a, b]), LEASE_LINGER + FENCE / 2)


@pytest.mark.parametrize(("host", "seconds"), [("a", 12.0), ("b", 20.0), ("b", 14.9)])
def test_a_pause_of_a_host_restarts_no_worker(host: str, seconds: float) -> None:
    """Of the node that serves the store, for half of the time of a lease; of others, for longer."""
    sim, a, _b, _c = three(endpoints=("a",))
    sim.run(3.1)
    sim.suspend(host, seconds)
    sim.run(seconds + 10)
    assert sim.is_settled(3)
    assert placed(a).round == 0


@pytest.mark.parametrize(("stop_duration", "stopped_after"), [(8.0, 23.0), (60.0, 29.9)])
def test_a_node_that_is_cut_off_stops_by_its_plan(
    stop_duration: float, stopped_after: float
) -> None:
    """Its workers have half of the time of its lease to save; then they are killed."""
    sim = CheckedSimulation(job("1:3"), endpoints=("a",))
    sim.behavior = lambda node, placement: WorkerBehavior(
        stop_duration=stop_duration if node.host.name == "c" else 0.0
    )
    a, b, c = together(sim, "abc")
    sim.partition(["a", "b"], ["c"])
    since = sim.now
    sim.run_until(lambda: c.running is None, 60)
    assert stopped_after - 2.5 < sim.now - since < stopped_after  # counted from the last reply
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)


@pytest.mark.parametrize(
    "seed",
    [2461, 2764, 2895, 4609, 4692, 4734, 6710, 8637, 10504, 12973, 20668, 26879, 301176, 400719],
)
def test_a_scenario_that_has_failed_before(seed: int) -> None:
    run_random_scenario(seed)


def test_both_sides_of_a_partition_run_and_merge() -> None:
    """Two endpoints, a minimum of one."""
    sim, a, b, c = three(endpoints=("a", "b"))
    sim.partition(["a"], ["b", "c"])
    sim.run_until(lambda: sim.is_settled(2, [b, c]) and sim.is_settled(1, [a]), 60)
    assert len(sim.coordinators) == 2
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert len(sim.coordinators) == 1
    assert finish(sim) == {JobState.SUCCEEDED}


def test_a_node_on_standby_does_not_take_its_job_to_another_store() -> None:
    """The job ends without it, while its lease may go on."""
    sim = CheckedSimulation(job(2, heartbeat_timeout=2.0), endpoints=("store0", "store1"))
    a, b, c, d = (sim.add_node(name) for name in "abcd")
    sim.partition(["store0", "a", "b"], ["store1", "c", "d"])
    sim.run_until(lambda: sim.is_settled(2, [a, b]) and sim.is_settled(2, [c, d]), 60)
    sim.heal()
    sim.run_until(lambda: c.running is None and d.running is None, 60)
    sim.run(1.0)
    assert sim.is_settled(2, [a, b])
    sim.finish_workers()
    sim.partition(["store0", "a", "b"], ["store1", "c", "d"])
    sim.break_connection(c)
    sim.break_connection(d)
    sim.run_until(lambda: a.outcome is not None and b.outcome is not None, 60)
    sim.run_until(lambda: c.outcome is not None and d.outcome is not None, 60)
    assert ended(c).state is JobState.FAILED


def test_a_node_on_standby_waits_for_workers_that_go_to_another_store() -> None:
    """Their node has left, and may look for the other store for as long as for a lease."""
    sim = CheckedSimulation(job(1, heartbeat_timeout=2.0), endpoints=("store0", "store1"))
    for name in "abc":
        sim.add_host(name)
    sim.partition(["store0", "a"], ["store1", "b", "c"])
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: a.running is not None and b.running is not None, 60)
    b.behavior = WorkerBehavior(stop_duration=0.5)
    c = sim.add_node("c")
    sim.run_until(lambda: c.is_standing_by, 60)
    sim.heal()
    sim.run_until(lambda: "RendezvousStoreLost: the others meet" in sim.trace, 60)
    sim.partition(["b", "c"], ["store0"])
    sim.run_until(lambda: c.running is not None, 60)
    sim.heal()
    sim.run_until(lambda: sim.is_settled(1, [a]), 60)


def test_a_store_that_ends_after_others_have_left_it() -> None:
    """The node that stayed was another job, and the others cannot know when that has ended."""
    sim, a, b, c = three(seed=4, endpoints=("store0", "a"), heartbeat_timeout=2.0)
    assert sim.coordinators == [b]
    sim.partition(["a", "b"], ["c", "store0"])
    sim.run_until(lambda: c in sim.coordinators, 60)
    sim.run(0.68)  # its recovery of the round is not over yet
    sim.stop_store("store0")
    sim.run_until(lambda: sim.is_settled(2, [a, b]), 60)


def test_a_killed_host_is_replaced_by_another_endpoint() -> None:
    sim, a, b, _c = three(endpoints=("a", "b"))
    sim.kill(a)
    sim.run_until(lambda: sim.is_settled(2), 60)
    assert sim.now < 15
    assert placed(b).round == 1


def test_a_restarted_store_restarts_no_worker() -> None:
    sim, a, _b, _c = three(endpoints=("store0",))
    sim.stop_store("store0")
    sim.run(0.5)
    sim.start_store("store0")
    sim.run(10)
    assert sim.is_settled(3)
    assert placed(a).round == 0


def test_workers_without_a_store_stop() -> None:
    sim, _a, _b, c = three(store_grace=4.0, heartbeat_timeout=2.0, read_timeout=30.0)
    sim.partition(["c"], ["a", "b"])
    sim.run(12)
    assert c.running is None
    sim.run_until(lambda: c.outcome is not None, 60)
    assert ended(c).is_rendezvous


@pytest.mark.parametrize("seconds", [0.1, 1.5, 4.0])
def test_a_suspended_host_comes_back(seconds: float) -> None:
    """It loses its rank if that takes too long."""
    sim, _a, b, _c = three(heartbeat_timeout=2.0)
    sim.suspend("b", seconds)
    sim.run(seconds + 1)
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert (placed(b).round == 0) == (seconds < 2)


@pytest.mark.parametrize("delay", [0.001, 0.05])
def test_the_stop_of_all_nodes_is_no_loss(delay: float) -> None:
    """The last one lets the store know, however slow the network is."""
    with CheckedSimulation(job("1:2"), endpoints=("store0",), delay=(delay, delay)) as sim:
        for _ in range(3):
            nodes = together(sim, "ab")
            for node in nodes:
                sim.leave(node)
            sim.run_until(lambda: sim.is_over, 10)
        (a,) = together(sim, "a")
        assert placed(a).round >= 3
        assert "round 0" in sim.trace
        assert "MembershipChanged" not in sim.trace


def test_a_node_that_has_succeeded_is_there_for_a_late_restart() -> None:
    sim = CheckedSimulation(job(2, max_restarts=1), endpoints=("store0",))
    a, b = together(sim, "ab")
    a.end_workers(0)
    sim.run(5000)
    sim.fail_worker(b)
    sim.run_until(lambda: sim.is_settled(2), 60)
    assert placed(a).restarts == 1


@pytest.mark.parametrize("drained", ["a", "c"])
def test_the_nodes_stop_together_where_one_is_drained(drained: str) -> None:
    """Their workers save at the same time, for 6 s; then the others go on without the node."""
    sim = CheckedSimulation(job("1:3"), endpoints=("store0",))
    sim.behavior = lambda node, placement: WorkerBehavior(stop_duration=6.0)
    nodes = together(sim, "abc")
    since, others = sim.now, [node for node in nodes if node.host.name != drained]
    sim.leave(sim.nodes[drained])
    sim.run_until(lambda: all(node.running is None for node in nodes), 60)
    assert sim.now - since < 6.1
    sim.run_until(lambda: sim.is_settled(2, others), 10)
    assert sim.now - since < 7.0
    assert placed(others[0]).restarts == 0


@pytest.mark.parametrize(("grace", "seconds"), [(25.0, 3.0), (2.0, 10.0)])
def test_the_store_of_the_workers_outlives_them(grace: float, seconds: float) -> None:
    """Worker 0 has ended at once, and others still save; at most for the grace of its own node."""
    spec = job(2)
    sim = CheckedSimulation(spec, endpoints=("store0",))
    sim.behavior = lambda node, placement: WorkerBehavior(
        stop_duration=0.1 if placement.span.group_rank == 0 else seconds
    )
    lead = sim.add_node("a", node_rank=0, spec=spec.replace(stop=StopPlan.within(grace)))
    other = sim.add_node("b", node_rank=1)
    sim.run_until(lambda: sim.is_settled(2), 60)
    since = sim.now
    for node in (lead, other):
        sim.leave(node)
    sim.run_until(lambda: lead.outcome is not None, 60)
    assert sim.now - since == pytest.approx(min(grace, seconds), abs=0.5)
    sim.run_until(lambda: other.running is None, 60)
    assert sim.now - since == pytest.approx(seconds, abs=0.5)


def test_a_loop_of_lost_nodes_ends_where_losses_are_noticed_late() -> None:
    """Each turn takes the time of a lease, which does not let the losses lie further apart."""
    spec = job("1:2", heartbeat_timeout=20.0)
    with CheckedSimulation(spec, endpoints=("store0",)) as sim:
        for turn in range(11):
            node = sim.add_node(f"a{turn}")
            sim.run_until(lambda: sim.is_settled(1), 60)
            sim.switch_off(node)
        last = sim.add_node("last")
        sim.run_until(lambda: sim.is_over, 60)
    assert sim.now > 200
    assert "11 node losses" in ended(last).why


def test_a_node_that_is_stopped_before_its_host_resumes() -> None:
    """It is started and then stopped, once the host runs again."""
    with CheckedSimulation(job(1), endpoints=("store0",)) as sim:
        sim.add_host("a")
        sim.suspend("a", 60)
        a = sim.add_node("a")
        sim.leave(a)
        sim.resume("a")
        sim.run_until(lambda: sim.is_over, 10)
    assert ended(a).state is JobState.STOPPED


def test_a_broken_connection_is_not_a_loss() -> None:
    lost: list[Event] = []
    sim, _a, b, _c = three()
    sim.checker.event_hook = lambda node, event: lost.append(event)
    sim.break_connection(b)
    sim.run(5)
    assert not [event for event in lost if isinstance(event, NodeLost)]
    assert sim.is_settled(3)
    assert placed(b).round == 0


def test_standby_nodes_come_and_go_without_changing_the_round() -> None:
    sim, a, b, c = three(heartbeat_timeout=2.0)
    for number in range(50):
        spare = sim.add_node("spare")
        sim.run(0.1)
        (sim.kill if number % 2 else sim.leave)(spare)
        sim.run(2.5)
    assert sim.is_settled(3)
    assert {one.running.round for one in (a, b, c) if one.running} == {0}
    sim.run_until(sim.checker.is_tidy, 10)


@pytest.mark.parametrize(
    "settings", [{"scale_up_delay": 5.0}, {"scale_up_delay": None, "last_call_timeout": 5.0}]
)
def test_four_joiners_one_after_the_other_restart_the_workers_once(
    settings: dict[str, Any],
) -> None:
    """The events of the steady nodes announce each joiner."""
    sim = CheckedSimulation(job("2:8", **settings), endpoints=("store0",))
    seen: list[tuple[str, str]] = []

    def note(node: SimNode, event: Event) -> None:
        if isinstance(event, MembershipPending):
            seen.append((node.name, event.why))

    sim.checker.event_hook = note
    a, b = together(sim, "ab")
    for name in "defg":
        sim.add_node(name)
        sim.run(3)
        assert sim.is_settled(2, [a, b])
    sim.run_until(lambda: sim.is_settled(6), 60)
    assert {one.running.round for one in sim.nodes.values() if one.running} == {1}
    names = [", ".join("defg"[: count + 1]) for count in range(4)]
    for node in (a, b):
        assert [why for name, why in seen if name == node.name] == [f"{n} joined" for n in names]
    sim.run(60)
    assert sim.is_settled(6)


def test_a_change_is_withdrawn_on_all_nodes_when_the_joiner_is_lost() -> None:
    sim = CheckedSimulation(
        job("1:5", scale_up_delay=60.0, heartbeat_timeout=2.0), endpoints=("store0",)
    )
    left: dict[str, float | None] = {}

    def note(node: SimNode, event: Event) -> None:
        if isinstance(event, MembershipPending):
            left[node.name] = event.time_left

    sim.checker.event_hook = note
    steady = together(sim, "abc")
    joiner = sim.add_node("d")
    sim.run_until(lambda: set(left.values()) == {60.0} and len(left) == 4, 30)
    sim.kill(joiner)
    sim.run_until(lambda: all(left[one.name] is None for one in steady), 30)
    sim.run(70)
    assert sim.is_settled(3, steady)
    assert {one.running.round for one in steady if one.running} == {0}


def test_nodes_learn_how_many_workers_of_others_have_finished() -> None:
    """From one coordinator, which leaves then, and from the next one."""
    sim = CheckedSimulation(job("3"), endpoints=("store0",))
    nodes = together(sim, "abc")
    (first,) = sim.coordinators
    second, last = (one for one in nodes if one is not first)

    def known(node: SimNode) -> int:
        driver: Any = node.driver
        return int(driver._runtime.liveness.peers_finished)

    first.end_workers(0)
    sim.run(0.9)
    assert known(last) == 0
    sim.run(0.5)
    assert (known(second), known(last)) == (1, 1)
    sim.leave(first)
    sim.run_until(lambda: second in sim.coordinators or last in sim.coordinators, 60)
    second.end_workers(0)
    sim.run_until(lambda: known(last) == 2, 5)
    last.end_workers(0)
    sim.run_until(lambda: sim.is_over, 60)
    assert {one.state for one in sim.outcomes.values()} == {JobState.SUCCEEDED}


def test_an_unreachable_joiner_does_not_change_the_round() -> None:
    """It reaches the store, but not group rank 0."""
    sim = CheckedSimulation(job("1:4"), endpoints=("store0",))
    a, b = together(sim, "ab")
    sim.add_host("z")
    sim.partition(["z"], ["a", "b"])
    sim.add_node("z")
    sim.run(20)
    assert sim.is_settled(2, [a, b])
    assert placed(a).round == 0
    assert "it does not reach the others" in sim.trace
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)


def test_a_node_that_was_refused_as_a_joiner_stays_in_later_rounds() -> None:
    """It was taken in because nodes were missing."""
    sim = CheckedSimulation(job("2:4", heartbeat_timeout=2.0), endpoints=("store0",))
    a = sim.add_node("a")
    sim.run_until(lambda: sim.coordinators == [a], 60)
    lead = sim.add_node("b", node_rank=0)
    sim.run_until(lambda: sim.is_settled(2), 60)
    sim.add_host("z")
    sim.partition(["z"], ["b"])
    z = sim.add_node("z")
    sim.run_until(lambda: "it does not reach the others" in sim.trace, 60)
    sim.kill(lead)
    sim.run_until(lambda: sim.is_settled(2, [a, z]), 60)
    y = sim.add_node("y")
    sim.run_until(lambda: sim.is_settled(3, [a, y, z]), 60)
    assert placed(z).round == 2


@pytest.mark.parametrize("moment", range(6))
def test_a_late_result_of_a_probe_does_not_replace_a_newer_one(moment: int) -> None:
    """The first probe is held up by a partition, and refused after the node was lost."""
    sim = CheckedSimulation(job("1:4", heartbeat_timeout=2.0), endpoints=("store0",))
    a = sim.add_node("a")
    sim.run_until(lambda: sim.coordinators == [a], 60)
    c, _ = sim.add_node("c", node_rank=0), sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(3), 60)
    sim.add_host("z")
    sim.partition(["c"], ["z"])
    z = sim.add_node("z")
    sim.run(0.5 + moment / 20)
    sim.kill(c)
    sim.heal()
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert z.running is not None


def test_a_slow_network_keeps_no_node_away() -> None:
    """Its own endpoint comes later, and the earlier one takes 0.8 s to answer."""
    sim = CheckedSimulation(
        job("1:2", heartbeat_timeout=4.0), endpoints=("store0", "b"), delay=(0.095, 0.1)
    )
    sim.add_node("a")
    b = sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(2), 60)
    sim.partition(["b"], ["a", "store0"])
    sim.run_until(lambda: len(sim.coordinators) == 2, 60)
    sim.heal()
    sim.run_until(lambda: sim.is_settled(2), 30)
    assert sim.coordinators != [b]


def test_clocks_may_differ() -> None:
    sim = CheckedSimulation(job(3), delay=(0.001, 0.0011))
    sim.add_node("a", offset=-7200.0, rate=1.003)
    sim.add_node("b", offset=86_400.0)
    sim.add_node("c", rate=0.997)
    sim.run_until(lambda: sim.is_settled(3), 60)
    sim.behavior = lambda node, placement: WorkerBehavior()
    sim.fail_worker(sim.nodes["b"], 3)
    sim.run(0.002)
    sim.fail_worker(sim.nodes["a"], 4)
    sim.run_until(lambda: sim.is_over, 60)
    assert {outcome.exit_code for outcome in sim.outcomes.values()} == {3}, "b's was first"


def test_clocks_may_be_set() -> None:
    sim, a, b, _c = three()
    for seconds in (3600.0, -7200.0):
        sim.step_clock(a, seconds)
        sim.step_clock(b, -seconds)
        sim.run(10)
    assert sim.is_settled(3)
    assert placed(a).round == 0


@pytest.mark.parametrize("seconds", [0.5, 1.5, 6.0])
def test_a_frozen_store_restarts_no_worker(seconds: float) -> None:
    """All nodes lose it together, and return to it."""
    sim, a, _b, _c = three(endpoints=("store0",), heartbeat_timeout=2.0, store_grace=20.0)
    sim.suspend("store0", seconds)
    sim.run(seconds + 8)
    assert sim.is_settled(3)
    assert placed(a).round == 0


def test_a_host_without_power_is_replaced() -> None:
    sim, _a, b, _c = three(heartbeat_timeout=2.0)
    sim.switch_off(b)
    sim.run_until(lambda: sim.is_settled(2), 10)
    sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(3), 10)


def test_static_ranks_stay() -> None:
    """A node that is restarted gets its rank back."""
    sim = CheckedSimulation(job(3, backend="static", node_rank=0, heartbeat_timeout=2.0))
    for rank, name in enumerate("abc"):
        sim.add_node(name, node_rank=rank)
    sim.run_until(lambda: sim.is_settled(3), 60)
    sim.kill(sim.nodes["b"])
    b = sim.add_node("b", node_rank=1)
    sim.run_until(lambda: sim.is_settled(3), 60)
    assert placed(b).span.group_rank == 1
    assert finish(sim) == {JobState.SUCCEEDED}


def test_a_node_has_the_rank_of_the_spec_unless_it_has_its_own() -> None:
    sim = CheckedSimulation(job(2, backend="static", node_rank=0))
    sim.add_node("a")
    b = sim.add_node("b", node_rank=1)
    sim.run_until(lambda: sim.is_settled(2), 60)
    assert placed(b).span.group_rank == 1


def test_a_random_scenario_gives_each_static_node_its_rank() -> None:
    for seed in range(3):
        run_random_scenario(seed, job(2, backend="static", node_rank=0))


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "etcd"},
        {"backend": "etcd-v2"},
        {"backend": "redis", "endpoint": "redis-1:26379", "engine": EngineSpec(sentinel="main")},
        {"backend": "valkey"},
        {"is_host": False},
    ],
)
def test_no_service_of_the_real_job_is_needed(settings: dict[str, Any]) -> None:
    """Nodes that meet on an engine meet at the store of a simulated host."""
    sim, _a, _b, _c = three(**settings)
    assert finish(sim) == {JobState.SUCCEEDED}


def test_a_mismatched_node_is_rejected() -> None:
    sim, _a, _b, _c = three()
    x = sim.add_node("x", spec=job("2:8"))
    sim.run_until(lambda: x.outcome is not None, 10)
    assert "it was started with --nnodes 2:8, the job with 1:3" in ended(x).why
    assert sim.is_settled(3)


def test_a_node_whose_workers_never_start_gives_up() -> None:
    """Its agent has taken the order, so the coordinator waits no longer."""
    waited: list[float] = []
    sim = CheckedSimulation(job("1:2"))
    sim.behavior = lambda node, placement: WorkerBehavior(
        start_duration=1e8 if node.host.name == "b" else 0.0
    )
    sim.checker.event_hook = lambda node, event: waited.extend(
        [event.waited] if isinstance(event, RoundWaiting) and event.phase == "starting" else []
    )
    a, b = sim.add_node("a"), sim.add_node("b")
    sim.run_until(lambda: b.outcome is not None, 700)
    assert ended(b).why == "the workers of this node have not started within 600 s"
    assert waited == [60.0 * count for count in range(1, 10)]
    sim.run_until(lambda: sim.is_settled(1, [a]), 40)


@pytest.mark.slow
def test_two_hundred_nodes() -> None:
    """A worker fails, then the coordinator is lost."""
    spec = job("190:200", last_call_timeout=5.0, max_restarts=3)
    sim = CheckedSimulation(spec, endpoints=("store0",), seed=1)
    for number in range(200):
        sim.add_node(f"n{number}")
    sim.run_until(lambda: sim.is_settled(200), 30)
    sim.fail_worker(sim.nodes["n17"])
    sim.run(1)
    sim.run_until(lambda: sim.is_settled(200), 30)
    sim.kill(sim.coordinators[0])
    sim.run_until(lambda: sim.is_settled(199), 30)
    held = sim.live_nodes[0].running
    assert held is not None
    assert (held.round, held.restarts) == (2, 1)
    assert finish(sim) == {JobState.SUCCEEDED}


# ----------------------------------------------------------------- the observer


def test_a_violation_has_the_trace() -> None:
    sim, a, b, _c = three(seed=77)
    b.placement = placed(a)
    sim.checker.rounds.on_started(b, placed(a))
    with pytest.raises(InvariantViolated, match=r"seed 77: .* have the same rank") as caught:
        sim.run(1)
    assert "is started" in str(caught.value)


def test_a_condition_that_does_not_hold_is_a_violation() -> None:
    sim = CheckedSimulation(job(2))
    sim.add_node("a")
    with pytest.raises(InvariantViolated, match="the condition does not hold within 5 s"):
        sim.run_until(lambda: sim.is_settled(2), 5)


def test_the_event_hook_gets_all_events() -> None:
    seen: list[Event] = []
    sim = CheckedSimulation(job(2))
    sim.checker.event_hook = lambda node, event: seen.append(event)
    sim.add_node("a")
    sim.add_node("b")
    sim.run_until(lambda: sim.is_settled(2), 10)
    assert len([event for event in seen if isinstance(event, NodeJoined)]) == 2


def test_a_node_runs_once() -> None:
    sim, _a, _b, _c = three()
    with pytest.raises(ValueError, match="node 'a' is running already"):
        sim.add_node("a")
