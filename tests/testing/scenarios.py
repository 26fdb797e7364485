"""Random scenarios with many faults, and the rules that hold once the faults are over.

A search goes through many of them, steered towards new decisions.  A coordinator's decision is
abstracted to a few small values, its situation: its knowledge of the members, and its effects.  A
scenario that reaches new situations is kept and varied: its random draws are changed in places, so
that messages cross, other faults happen, or fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from msgspec.structs import replace

from elastic_aio.errors import SpecError
from elastic_aio.events import Event
from elastic_aio.node_events import MembershipPending
from elastic_aio.outcome import PREEMPTED_CODE, JobState
from elastic_aio.rendezvous import coordinator_runner
from elastic_aio.rendezvous.base import Placement
from elastic_aio.rendezvous.messages import OrderBody, WaitForNodes
from elastic_aio.rendezvous.state import CoordinatorEffect, CoordinatorState, SendOrder
from elastic_aio.spec.checks import check_number, checked_items, checked_part
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import Backoff, RestartAction, RestartPolicy
from elastic_aio.testing.node import SimNode, WorkerBehavior, checked_exit_code
from elastic_aio.testing.virtual_time import InvariantViolated
from tests.testing.checked import CheckedSimulation
from tests.testing.invariants import RATE_MIN
from tests.testing.stores import SimStore

_PAUSE_S: Final = 0.4
"""Seconds for which a host pauses: less than a fifth of the time of a lease."""
_CALM_S: Final = 5.0
"""Seconds after a pause in which a node would have been replaced."""
_SAVE_S: Final = 3.5
"""Seconds that the workers of a stopped node need."""
_SETTLE_S: Final = 3.5
"""Seconds after which all nodes have come, and earlier workers fail no more."""
_AT_ONCE_S: Final = 2.0
"""Seconds in which all nodes learn of an event."""


class CalmRules:
    """Lets the nodes of one round do something, and checks the rule about it."""

    def __init__(
        self,
        sim: CheckedSimulation,
        random: Random,
        is_together: Callable[[], bool],
        limit_s: float,
        exit_code: int,
    ) -> None:
        """Prepare; workers fail with `exit_code`.

        `is_together` holds within `limit_s` after each change of the nodes.
        """
        self._sim = sim
        self._random = random
        self._is_together = is_together
        self._limit_s = limit_s
        self._exit_code = exit_code

    def check_one(self) -> None:
        """Check a rule that applies to the present round, if any; raise `InvariantViolated`."""
        self._sim.run(_SETTLE_S)
        self._sim.run_until(self._is_together, self._limit_s)
        if not self._nodes or len(self._nodes) < len(self._sim.live_nodes):
            return  # some have succeeded, wait aside, or are on standby
        if any(one.may_be_excluded for one in self._nodes):
            return  # the next round is another one
        rounds = self._sim.checker.rounds.rounds
        if any(rounds[one.running.round_id].succeeded for one in self._nodes if one.running):
            return  # a node has succeeded, and is gone
        rules = [self._check_drain, self._check_pause]
        settings, nnodes = self._sim.spec.rendezvous, self._sim.spec.nnodes
        if settings.backend != "static" and len(self._nodes) < nnodes.maximum:
            rules += [self._check_joiners] * 3
        if self._has_restart and len(self._nodes) > 1:
            rules += [self._check_early_success] * 3
        policy = self._sim.spec.restart
        if self._has_restart and policy.exclude_for is not None and settings.backend != "static":
            rules += [self._check_exclusion] * 3
        limit = policy.max_attempts_without_progress
        if limit is not None:
            self._random.choice(self._nodes).report_progress()
            self._sim.run(_AT_ONCE_S)
            if self._restarts + limit < self._sim.spec.max_restarts:
                rules += [self._check_no_progress] * 3
        self._random.choice(rules)()

    @property
    def _nodes(self) -> list[SimNode]:
        return [node for node in self._sim.live_nodes if node.running is not None]

    @property
    def _rounds(self) -> int:
        return len(self._sim.checker.rounds.rounds)

    @property
    def _restarts(self) -> int:
        return max((one.running.restarts for one in self._nodes if one.running), default=0)

    @property
    def _ranks(self) -> dict[SimNode, int]:
        return {node: node.running.span.group_rank for node in self._nodes if node.running}

    @property
    def _has_restart(self) -> bool:
        allowed = self._sim.spec.max_restarts
        return allowed is None or self._restarts < allowed

    def _check_joiners(self) -> None:
        """Joiners that come one soon after the other cause one round, which is announced."""
        sim, settings, former = self._sim, self._sim.spec.rendezvous, self._nodes
        rounds, restarts = self._rounds, self._restarts
        announced: list[Event] = []
        former_hook = sim.checker.event_hook
        sim.checker.event_hook = lambda node, event: announced.append(event)
        delay = settings.scale_up_delay
        delay = settings.last_call_timeout if delay is None else delay
        for number in range(self._random.randint(1, 3)):
            if number:
                sim.run((0.2 + 0.3 * self._random.random()) * delay)
            sim.add_node(f"joiner{number}")
        has_limit = settings.scale_up == "checkpoint"
        if has_limit and self._random.random() < 0.5:
            agree_at = sim.now + _AT_ONCE_S / 2
            for node in former:
                sim.time.at(agree_at, node.agree_to_change)
        sim.run_until(self._is_together, self._limit_s)
        sim.checker.event_hook = former_hook
        if self._rounds > rounds + 1 and delay >= _AT_ONCE_S:
            sim.fail(f"joiners have caused {self._rounds - rounds} rounds")
        if self._restarts != restarts:
            sim.fail("a joiner has cost a restart")
        is_announced = any(isinstance(one, MembershipPending) for one in announced)
        if delay >= _AT_ONCE_S and not is_announced and len(self._nodes) < sim.spec.nnodes.maximum:
            sim.fail("the workers have not learned of the joiners before the round")

    def _check_drain(self) -> None:
        """The workers of all nodes are stopped at once where one node is stopped."""
        sim, nodes, restarts = self._sim, self._nodes, self._restarts
        drained = self._random.choice(nodes)
        drained.behavior = replace(drained.behavior, stop_duration=_SAVE_S)
        sim.leave(drained)
        others = [node for node in nodes if node is not drained]
        rounds = {node: node.placement for node in others}
        sim.run(_AT_ONCE_S)
        for node in others:
            if node.placement is not rounds[node]:
                sim.fail(f"{node.name} has begun another round beside the workers of {drained!r}")
            if not node.is_stopping:
                sim.fail(f"{node.name} was not stopped together with {drained!r}")
        if len(others) >= sim.spec.nnodes.minimum:
            sim.run_until(self._is_together, self._limit_s)
            # The only host that may serve a store may have left.
            if self._nodes and self._restarts != restarts:
                sim.fail("a stopped node has cost a restart")
        sim.run_until(lambda: not drained.is_live, self._limit_s)
        if drained.outcome is None or drained.outcome.state is not JobState.STOPPED:
            sim.fail(f"{drained.name} was stopped, and ended as {drained.outcome}")

    def _check_pause(self) -> None:
        """A short pause of a host stops no worker."""
        sim, nodes = self._sim, self._nodes
        places = {node: node.running for node in nodes}
        sim.suspend(
            self._random.choice([*(node.host.name for node in nodes), *sim.endpoints]), _PAUSE_S
        )
        sim.run(_PAUSE_S + _CALM_S)
        for node, place in places.items():
            if node.running is not place or node.is_stopping:
                sim.fail(f"a pause of {_PAUSE_S:g} s has stopped the workers of {node.name}")

    def _check_early_success(self) -> None:
        """A node that has succeeded takes part in a later restart."""
        sim, nodes = self._sim, self._nodes
        attempt = max(node.placement.attempt for node in nodes if node.placement is not None)
        early, failing = self._random.sample(nodes, 2)
        early.end_workers(0)
        # Less than the least limit of the exit barrier.
        sim.run(self._random.choice([0.0, 0.1, 2.0, 20.0]))
        sim.fail_worker(failing, self._exit_code)
        sim.run_until(
            lambda: all(one.running and one.running.attempt > attempt for one in nodes),
            self._limit_s,
        )

    def _check_exclusion(self) -> None:
        """A node on standby takes the rank of an excluded node, by one restart and one round.

        The delay of the restart may be longer than the exclusion.
        """
        sim = self._sim
        for number in range(sim.spec.nnodes.maximum + 1):
            if any(node.is_standing_by for node in sim.live_nodes):
                break
            sim.add_node(f"spare{number}")
            sim.run_until(self._is_together, self._limit_s)
        former = self._ranks
        excluded = self._random.choice([*former])
        rounds, restarts = self._rounds, self._restarts
        excluded.report_progress()
        excluded.exclude()
        sim.run(_AT_ONCE_S)
        if self._rounds != rounds:
            sim.fail("an exclusion alone has caused a round")
        sim.fail_worker(excluded, self._exit_code)
        sim.run_until(lambda: len(self._nodes) == len(former) and self._rounds > rounds, 60.0)
        kept = {node: rank for node, rank in self._ranks.items() if node in former}
        del former[excluded]
        formed_at = max(one.formed_at for one in sim.checker.rounds.rounds.values())
        if formed_at >= excluded.excluded_until:
            kept.pop(excluded, None)
        if kept != former:
            sim.fail(f"{excluded.name} was excluded, and the ranks are {kept} after {former}")
        sim.run_until(self._is_together, self._limit_s)
        if (self._rounds, self._restarts) != (rounds + 1, restarts + 1):
            sim.fail(f"an exclusion: {self._rounds - rounds} rounds, {self._restarts} restarts")

    def _check_no_progress(self) -> None:
        """The job ends after exactly so many failed attempts in a row without progress."""
        sim, limit = self._sim, self._sim.spec.restart.max_attempts_without_progress or 0
        for number in range(limit + 1):
            self._fail_attempt()
            if sim.is_over is not (number == limit):
                sim.fail(f"the job goes on or ends after {number} attempts without progress")

    def _fail_attempt(self) -> None:
        sim, restarts = self._sim, self._restarts
        sim.fail_worker(self._random.choice(self._nodes), self._exit_code)
        sim.run_until(lambda: sim.is_over or self._restarts > restarts, self._limit_s)


def run_random_scenario(
    seed: int, spec: LaunchSpec | None = None, *, exit_codes: Sequence[int] = (1, 3)
) -> CheckedSimulation:
    """Run a random scenario to its end, and return the simulation.

    For some seconds, the network, the hosts, the stores and the workers of a few nodes fail in many
    ways.  Then all faults are over, and the nodes must come together in one round, or the job must
    end; finally all workers succeed, and the job must end with one outcome on all nodes.  In some
    scenarios there are faults at the end too, and the next job of the same run id begins at the
    same endpoints while nodes are still cut off.

    Args:
        seed: of all random numbers.
        spec: the job, on 2 nodes or more; None: a small one with random settings.
        exit_codes: codes from 1 to 255 with which workers fail at random moments; a worker that
            fails shortly after its start exits with the first one.

    Raises:
        SpecError: the job is for one node, or an exit code is not possible.
        InvariantViolated: an invariant does not hold, or the nodes do not come together.
    """
    scenario = Scenario(seed, spec, exit_codes)
    scenario.play()
    return scenario.sim


class Scenario:
    """One random scenario: faults, recovery, and the end."""

    def __init__(
        self,
        seed: int,
        spec: LaunchSpec | None,
        exit_codes: Sequence[int],
        random: Random | None = None,
    ) -> None:
        """Choose the hosts, and a job if there is none; all is drawn from `random`."""
        if spec is not None and checked_part("spec", spec, LaunchSpec).nnodes.maximum < 2:
            problem = "must be at least 2 in a random scenario"
            raise SpecError("nnodes", spec.nnodes.maximum, problem)
        self._exit_codes = checked_items("exit_codes", exit_codes)
        if not self._exit_codes:
            raise SpecError("exit_codes", exit_codes, "must not be empty")
        for code in self._exit_codes:
            checked_exit_code("exit_codes", code, at_least=1)
        self._random = random = random or Random(f"scenario {seed}")
        self._rules_random = Random(f"rules of scenario {seed}")
        count = random.randint(2, 5) if spec is None else spec.nnodes.maximum
        self._names = names = [f"n{number}" for number in range(count)]
        self._is_static = (
            random.random() < 0.15 if spec is None else spec.rendezvous.backend == "static"
        )
        # Rounds with fixed ranks need all nodes, and a user's rounds may need most.
        self._has_replacements = self._is_static or spec is not None
        # The exit barrier, and then the search for a store or the join timeout.
        self._settle_s = 600.0 if spec is None else 3600.0
        self._fitness_random = Random(f"fitness in scenario {seed}")
        self._has_fitness = spec is None and self._fitness_random.random() < 0.4
        self.sim = CheckedSimulation(
            spec or self._spec(count),
            seed=seed,
            endpoints=names[:1] if self._is_static else self._endpoints(),
            decide_duration=random.choice([0.0, 0.5]),
            delay=random.choice([(0.0005, 0.005), (0.001, 0.1)]),
        )
        self._hosts = list(dict.fromkeys([*names, *self.sim.endpoints]))
        for name in names:
            self.sim.add_host(name)
        self._failing = random.choice([0.0, 0.0, 0.1])
        self.sim.behavior = self._behavior
        if random.random() < 0.4:
            self.sim.checker.order_hook = self._inject_on_order
        for name in names:
            self._add(name, random.random() * random.choice([0.0, 0.3, 3.0]))
        self._end_random = Random(f"end of scenario {seed}")
        self._notice_random = Random(f"preemption of scenario {seed}")
        self._is_preempted = self._notice_random.random() < 0.2
        self._is_early = self._is_preempted and self._notice_random.random() < 0.4
        self._has_rule = not self._is_early and spec is None and self._rules_random.random() < 0.7
        self.has_next_job = not self._is_static and self._end_random.random() < 0.4

    def _spec(self, count: int) -> LaunchSpec:
        random = self._random
        minimum = count if self._is_static else random.randint(1, count)
        maximum = random.randint(minimum, count)
        max_restarts = random.choice([0, 1, 3, 3])
        backoff = random.choice([None, None, Backoff(initial=0.5, cap=2.0)])
        has_decide = random.random() < 0.2 and max_restarts > 0
        policy = RestartPolicy(
            backoff=backoff if max_restarts else None,
            decide=(lambda failure: RestartAction.DEFAULT) if has_decide else None,
        )
        rendezvous = RendezvousSpec(
            backend="static" if self._is_static else "c10d",
            node_rank=0 if self._is_static else None,
            join_timeout=12.0,
            last_call_timeout=random.choice([0.0, 0.5, 2.0]),
            keep_workers=random.random() < 0.8,
            heartbeat_timeout=2.0,
            read_timeout=30.0,
            close_timeout=5.0,
            exit_barrier_timeout=self._rules_random.choice([30.0, None]),
            scale_up="checkpoint" if self._rules_random.random() < 0.3 else "delay",
            scale_up_delay=self._rules_random.choice([None, 2.0]),
            scale_up_limit=5.0,
        )
        spec = LaunchSpec(
            "train.py",
            nnodes=(minimum, maximum),
            max_restarts=max_restarts,
            restart=policy,
            rendezvous=rendezvous,
        )
        return self._with_fitness(spec) if self._has_fitness else spec

    def _with_fitness(self, spec: LaunchSpec) -> LaunchSpec:
        """Let the job exclude nodes, check their health, and need progress."""
        random, policy = self._fitness_random, spec.restart
        limits = [one for one in (None, 1, 2) if (one or 0) <= spec.max_restarts]
        policy = policy.replace(
            max_attempts_without_progress=random.choice(limits),
            exclude_for=random.choice([1.0, 4.0]),
        )
        if policy.decide is not None:
            actions = [RestartAction.DEFAULT, RestartAction.EXCLUDE]
            policy = policy.replace(decide=lambda failure: random.choice(actions))
        check = random.choice([None, "check"]) if spec.nnodes.maximum > 1 else None
        return spec.replace(restart=policy, rendezvous=spec.rendezvous.replace(health_check=check))

    def _endpoints(self) -> Sequence[str]:
        names = self._names
        return self._random.choice(
            [
                names[:1],
                names[:2],
                names[:3],
                ["store0"],
                ["store0", "store1"],
                ["store0", names[0]],
            ]
        )

    # ------------------------------------------------------------------- phases

    def play(self, waves: int = 1) -> None:
        """Run to the end, after so many waves of faults."""
        with self.sim:
            if self._is_early:
                self.sim.time.at(4 * self._notice_random.random(), self._preempt_any)
            for _ in range(waves):
                self.inject_faults()
            self.recover()
            if self._has_rule:
                self.check_rule()
            if self._is_preempted:
                self.preempt()
            elif self.has_next_job:
                self.finish_with_faults()
                self.run_next_job()
            else:
                self.finish()

    def inject_faults(self) -> None:
        """Inject random faults, one after the other."""
        random, sim = self._random, self.sim
        if random.random() < 0.7:
            sim.run(random.random() * 4)
        for _ in range(random.randint(1, 12)):
            sim.run(random.choice([0.001, 0.01, 0.1, 1.0, 2.5]) * random.random() * 2)
            self._fault()

    def recover(self) -> None:
        """End all faults, and wait until the remaining nodes are together."""
        sim = self.sim
        self._failing = 0.0
        sim.checker.order_hook = None
        sim.end_faults()
        for node in sim.live_nodes:
            node.is_healthy = True
        self._start_stores()
        if self._has_replacements and sim.live_nodes and not sim.outcomes:
            for name in self._names:
                self._add_or_restart(name)
        sim.run_until(self._is_together, self._settle_s)
        sim.run_until(sim.checker.is_tidy, sim.checker.obey_s)

    def check_rule(self) -> None:
        """Let nodes do something without a fault, and check the rule about it."""
        random, code = self._rules_random, self._exit_codes[0]
        CalmRules(self.sim, random, self._is_together, self._settle_s, code).check_one()

    def finish(self) -> None:
        """Let all workers succeed, and check that the job ends with one outcome.

        A node that was stopped, also after its success, or has found no store, ends by itself; so
        does a node that was given notice of a preemption on standby, or without a store.
        """
        sim = self.sim
        left = [node for node in sim.live_nodes if node.has_place or node.is_standing_by]
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, self._settle_s)
        noticed = [node for node in left if node.has_own_notice]
        alone = [node for node in noticed if node.is_standing_by or not node.is_ending]
        left = [node for node in left if not (node.was_stopped or node in alone)]
        outcomes = [node.outcome for node in left if node.outcome is not None]
        states = {one.state for one in outcomes if not one.is_rendezvous}
        # Two halves that met at different stores until just now may both have ended.
        places = [store for store in sim.checker.stores.values() if store.ends]
        if len(states) > 1 and len(places) == 1:
            sim.fail(f"the job ended in different ways: {sorted(states)}")

    def preempt(self) -> None:
        """Give notice to a node, amid ends of workers and losses; the job must end by it."""
        random, sim = self._notice_random, self.sim
        members = sim.live_nodes
        self._preempt_any()
        for _ in range(random.randint(0, 4)):
            ends = [self._fail_worker, self._fail_worker, self._succeed]
            act = self._of_node(random.choice([sim.kill, *ends, SimNode.agree_to_change]))
            sim.time.at(sim.now + random.random() * random.choice([0.02, 0.2, 4.0]), act)
        if random.random() < 0.3:
            sim.time.at(sim.now + random.random(), self._add_or_restart, random.choice(self._names))
        sim.run(_AT_ONCE_S)
        sim.run_until(
            lambda: not any(one.is_live and one.notice for one in members), self._settle_s
        )
        self.finish()
        for node in members:
            outcome = node.outcome
            if outcome is None or node.notice is None:
                continue  # it was killed, or has ended without notice
            if outcome.state is not JobState.PREEMPTED or outcome.exit_code != PREEMPTED_CODE:
                sim.fail(f"{node.name} was preempted, and ended as {outcome}")

    def _preempt_any(self) -> None:
        """Give notice to a random node, and maybe another notice to that or another node."""
        random, nodes = self._notice_random, self.sim.live_nodes
        at = self.sim.now
        for node in random.choices(nodes, k=random.choice([1, 1, 2, 3])) if nodes else ():
            seconds = random.choice([0.0, 0.5, 3.0, 20.0, 120.0])
            self.sim.time.at(at, self._preempt_one, node, seconds)
            at += random.choice([0.0, 0.02, 0.4]) * random.random()

    def _preempt_one(self, node: SimNode, seconds: float) -> None:
        if node.is_live:
            self.sim.preempt(node, seconds)

    def finish_with_faults(self) -> None:
        """Let all workers succeed, amid faults, until a node knows of an end."""
        random, sim = self._end_random, self.sim
        known = len(sim.outcomes)
        sim.finish_workers()
        # Later rounds take longer than nodes need to find another store.
        sim.behavior = lambda node, placement: WorkerBehavior(seconds=5.0)
        cuts = [self._isolate, self._isolate, sim.break_connection]
        for _ in range(random.randint(1, 3)):
            seconds = random.random() * random.choice([0.02, 0.2, 2.0])
            fault = random.choice([sim.kill, sim.switch_off, self._suspend, *cuts])
            sim.time.at(sim.now + seconds, self._of_node(fault))
        sim.run_until(lambda: len(sim.outcomes) > known or sim.is_over, self._settle_s)

    def run_next_job(self) -> None:
        """Start new nodes at the same endpoints, end the faults, and let all nodes end."""
        random, sim = self._end_random, self.sim
        sim.run(random.choice([0.0, 1.0, 6.0]) * random.random())
        sim.behavior = self._behavior
        spec = sim.spec.replace(entrypoint="next.py") if random.random() < 0.5 else None
        for number, name in enumerate([*self._names, *(f"next{one}" for one in range(2))]):
            if name in self._hosts[:1] or number < 2 or random.random() < 0.5:
                self._add(name, 0.001 + random.random() * random.choice([0.0, 0.3, 3.0]), spec)
        sim.run(random.choice([0.1, 1.0, 10.0]) * random.random())
        sim.end_faults()
        self._start_stores()
        sim.run(random.choice([0.0, 1.0, 10.0]) * random.random())
        sim.finish_workers()
        sim.run_until(lambda: sim.is_over, 2 * self._settle_s)

    def _start_stores(self) -> None:
        serving = [store.host.name for store in self.sim.checker.open_stores]
        for name in self.sim.endpoints:
            if name.startswith("store") and name not in serving:
                self.sim.start_store(name)

    # ------------------------------------------------------------------- faults

    def _fault(self) -> None:
        sim, random = self.sim, self._random
        kill, fail = self._of_node(sim.kill), self._of_node(self._fail_worker)
        faults = [
            kill,
            kill,
            self._of_node(sim.switch_off),
            self._suspend_host,
            self._suspend_host,
            self._suspend_host,
            self._of_node(sim.break_connection),
            self._partition,
            self._partition,
            sim.heal,
            fail,
            fail,
            self._of_node(self._succeed),
            self._stop_store,
            self._of_node(sim.leave),
            lambda: self._add_or_restart(random.choice([*self._names, "extra"])),
            lambda: self._add_or_restart(random.choice([*self._names, "extra"])),
            lambda: sim.slow_down(random.choice(self._hosts), random.choice([0.05, 0.5])),
            self._of_node(lambda node: sim.step_clock(node, random.choice([-3600.0, 0.5, 9.0]))),
        ]
        if self._has_fitness:
            exclude, report = self._of_node(SimNode.exclude), self._of_node(SimNode.report_progress)
            faults += 3 * [exclude, exclude, report, self._of_node(self._change_health)]
        random.choice(faults)()

    def _change_health(self, node: SimNode) -> None:
        node.is_healthy = not node.is_healthy

    def _of_node(self, fault: Callable[[SimNode], None]) -> Callable[[], None]:
        """Return a call that injects a fault into a random node, if there is a node."""

        def inject() -> None:
            if live_nodes := self.sim.live_nodes:
                fault(self._random.choice(live_nodes))

        return inject

    def _suspend_host(self) -> None:
        seconds = self._random.choice([0.1, 1.0, 5.0]) * self._random.random() * 2
        self.sim.suspend(self._random.choice(self._hosts), seconds)

    def _inject_on_order(self, store: SimStore, member: str, body: OrderBody) -> None:
        """Inject a fault into the sender or the receiver of an order, just after it."""
        random, sim = self._random, self.sim
        if isinstance(body, WaitForNodes) or random.random() > 0.05:
            return
        numbers = store.number_of(member), store.leader_number
        victims = [one for one in sim.live_nodes if one.number in numbers]
        if victims:
            victim = random.choice(victims)
            fault = random.choice([sim.kill, self._suspend, self._isolate])
            sim.time.at(sim.now + random.random() * 0.02, self._inject, fault, victim)

    def _inject(self, fault: Callable[[SimNode], None], victim: SimNode) -> None:
        if victim.is_live and self.sim.checker.order_hook is not None:
            fault(victim)

    def _suspend(self, node: SimNode) -> None:
        self.sim.suspend(node.host.name, self._random.random() * self._random.choice([1, 4, 9]))

    def _isolate(self, node: SimNode) -> None:
        others = [one for one in self._hosts if one != node.host.name]
        one_way = self._random.random() < 0.3
        self.sim.partition([node.host.name], others, one_way=one_way)

    def _fail_worker(self, node: SimNode) -> None:
        self.sim.fail_worker(node, self._random.choice(self._exit_codes))

    def _succeed(self, node: SimNode) -> None:
        if self._random.random() < 0.5:
            node.end_workers(0)

    def _partition(self) -> None:
        hosts = list(self._hosts)
        self._random.shuffle(hosts)
        cut = self._random.randint(1, len(hosts) - 1)
        self.sim.partition(hosts[:cut], hosts[cut:], one_way=self._random.random() < 0.3)

    def _stop_store(self) -> None:
        name = self._random.choice(self.sim.endpoints)
        if name.startswith("store"):
            self.sim.stop_store(name)

    def _add_or_restart(self, name: str) -> None:
        if self._is_static and name not in self._names:
            return
        node = self.sim.nodes.get(name)
        if node is None or not node.is_live:
            self._add(name, 0.0)

    def _add(self, name: str, delay: float, spec: LaunchSpec | None = None) -> None:
        random = self._random
        rank = random.choice([None, None, None, 0, 1])
        if self._is_static:
            rank = self._names.index(name)
        rate = random.choice([1.0, RATE_MIN, 2 - RATE_MIN])
        offset = random.choice([0.0, 7200.0, -86400.0])

        def add() -> None:
            if name not in self.sim.nodes or not self.sim.nodes[name].is_live:
                self.sim.add_node(name, node_rank=rank, rate=rate, offset=offset, spec=spec)

        if delay:
            self.sim.time.at(self.sim.now + delay, add)
        else:
            add()

    def _behavior(self, node: SimNode, placement: Placement) -> WorkerBehavior:
        random = self._random
        start, stop = random.choice([0.0, 0.05, 0.5]), random.choice([0.0, 0.05, 0.5])
        if random.random() < self._failing:
            return WorkerBehavior(random.random() * 2, self._exit_codes[0], start, stop)
        return WorkerBehavior(None, 0, start, stop)

    # ----------------------------------------------------------------- progress

    def _is_together(self) -> bool:
        """Return whether all live nodes are in one round, or on standby because it is full."""
        sim = self.sim
        live = sim.live_nodes
        if not live:
            return True
        if any(node.is_ending for node in live):
            return False
        waiting = [node for node in live if self._is_aside(node)]
        live = [node for node in live if node not in waiting]
        placed = [node for node in live if node.has_place]
        if any(not node.is_standing_by for node in live if node not in placed):
            return False
        placements = [node.placement for node in placed if node.placement is not None]
        names = {placement.round_id for placement in placements}
        if len(names) != 1 or not self._is_one_store([*live, *waiting]):
            return False
        size = placements[0].span.group_world_size
        # A node may have succeeded in it and been in another round since, in a partition.
        if succeeded := sim.checker.rounds.rounds[names.pop()].succeeded:
            return len(succeeded | {one.span.group_rank for one in placements}) == size
        nnodes = sim.spec.nnodes
        # A round goes on with a node that is excluded from the next one, which would lack nodes.
        may_be_small = any(node.may_be_excluded for node in placed)
        is_full = may_be_small or size == min(nnodes.maximum, len(live))
        return nnodes.minimum <= len(placed) == size and is_full

    def _is_aside(self, node: SimNode) -> bool:
        """Return whether a node is excluded, or has succeeded in a round that others replaced.

        Others replace a round with a success at another store only.
        """
        if self.sim.now < node.excluded_until:
            return True
        rounds = self.sim.checker.rounds.rounds
        if node.placement is None or not rounds:
            return False
        own = rounds[node.placement.round_id]
        newest = max(rounds.values(), key=lambda one: one.formed_at)
        has_succeeded = node.placement.span.group_rank in own.succeeded
        return has_succeeded and own is not newest and own.store is not newest.store

    def _is_one_store(self, live: list[SimNode]) -> bool:
        """Return whether all live nodes are at one store, and known to one coordinator."""
        homes = [store for store in self.sim.checker.open_stores if store.leader is not None]
        if len(homes) != 1 or not self.sim.coordinators:
            return False
        return all(node.number in homes[0].joined_at for node in live)


# -------------------------------------------------------------------- a search

_RIVALS: Final = 4
"""Situations of which the rarest is returned to."""

_WAVES_MAX: Final = 5
"""Times that faults are injected into one scenario at most."""

_MANY: Final = 3
"""Number of members that stands for any higher number."""


class Tape(Random):
    """Random numbers that repeat former numbers, and go on with new numbers."""

    def __init__(self, seed: int, draws: Sequence[float] = ()) -> None:
        """Repeat `draws` first; `seed` is for all later numbers."""
        super().__init__(seed)
        self.draws, self.used = list(draws), 0

    def random(self) -> float:
        """Return the next number; all other methods of a `Random` are made from it."""
        if self.used == len(self.draws):
            self.draws.append(super().random())
        self.used += 1
        return self.draws[self.used - 1]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What repeats a scenario.

    Attributes:
        seed: of its network.
        draws: the random numbers that it draws first.
        end: seed of all later ones.
        waves: how often faults are injected before they are over.
    """

    seed: int
    draws: tuple[float, ...]
    end: int
    waves: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A situation that was new.

    Attributes:
        recipe: repeats the scenario that has reached it.
        situation: what the coordinator knew and did.
        place: after how many draws that was.
    """

    recipe: Recipe
    situation: Hashable
    place: int


@dataclass(slots=True)
class SearchResult:
    """The result of a search."""

    visits: dict[Hashable, int] = field(default_factory=dict)
    """Scenarios that reached each situation."""
    found: list[Found] = field(default_factory=list)
    """How each situation was reached first, in this order."""


class FoundViolation(InvariantViolated):
    """A scenario of a search violates an invariant."""

    def __init__(self, text: str, recipe: Recipe) -> None:
        super().__init__(text)
        self.recipe = recipe


def search_scenarios(
    count: int,
    *,
    seed: int = 0,
    spec: LaunchSpec | None = None,
    exit_codes: Sequence[int] = (1, 3),
    is_guided: bool = True,
) -> SearchResult:
    """Play `count` random scenarios, each one after what the former ones have reached.

    The same arguments give the same scenarios.  Without `is_guided` none depends on another, to
    compare; `spec` and `exit_codes` are as for `run_random_scenario`.

    Raises:
        SpecError: an argument is not possible.
        FoundViolation: an invariant does not hold; its `recipe` repeats the scenario.
    """
    check_number("count", count, at_least=0)
    random, result = Random(f"search {seed}"), SearchResult()
    # Of each way: how many situations its scenarios have found, and how many they were.
    yields = {way: [0.0, 0.0] for way in _WAYS}
    for number in range(count):
        way = _anew
        if is_guided and result.found:
            weights = [(found + 1) / (played + 1) for found, played in yields.values()]
            (way,) = random.choices(_WAYS, weights)
        recipe = way(random, result)
        try:
            recipe, situations = play_recipe(recipe, spec, exit_codes)
        except InvariantViolated as error:
            where = f"scenario {number} of the search with seed {seed}"
            raise FoundViolation(f"{where}: {error}", recipe) from None
        new = situations.keys() - result.visits.keys()
        for situation, place in situations.items():
            result.visits[situation] = result.visits.get(situation, 0) + 1
            if situation in new:
                result.found.append(Found(recipe, situation, place))
        yields[way] = [yields[way][0] + len(new), yields[way][1] + 1]
    return result


def play_recipe(
    recipe: Recipe, spec: LaunchSpec | None = None, exit_codes: Sequence[int] = (1, 3)
) -> tuple[Recipe, dict[Hashable, int]]:
    """Play one scenario; return it with all its draws, and how many precede each situation."""
    tape = Tape(recipe.end, draws=recipe.draws)
    situations: dict[Hashable, int] = {}
    with _observed(situations, tape):
        Scenario(recipe.seed, spec, exit_codes, tape).play(recipe.waves)
    return dataclasses.replace(recipe, draws=tuple(tape.draws[: tape.used])), situations


# --------------------------------------------------------------- ways of variation


def _anew(random: Random, result: SearchResult) -> Recipe:
    """Vary nothing."""
    return Recipe(random.getrandbits(32), (), random.getrandbits(32))


def _rare(random: Random, result: SearchResult) -> Found:
    """Return how a situation was reached that is rather rare."""
    rivals = [random.choice(result.found) for _ in range(_RIVALS)]
    return min(rivals, key=lambda one: result.visits[one.situation])


def _other_end(random: Random, result: SearchResult) -> Recipe:
    """Return to a situation, and go on otherwise, with more faults."""
    found = _rare(random, result)
    waves = min(found.recipe.waves + 1, _WAVES_MAX)
    draws = found.recipe.draws[: found.place]
    return Recipe(found.recipe.seed, draws, random.getrandbits(32), waves)


def _other_moments(random: Random, result: SearchResult) -> Recipe:
    """Draw a few moments and faults before a situation otherwise, or delay all messages so."""
    found = _rare(random, result)
    draws = list(found.recipe.draws)
    for _ in range(random.randint(1, 4)):
        place, drawn = random.randrange(found.place or 1), random.random()
        near = min(draws[place] * random.uniform(0.8, 1.2), 1 - 2**-53)
        draws[place] = random.choice([drawn, near])
    seed = random.choice([found.recipe.seed, random.getrandbits(32)])
    return dataclasses.replace(found.recipe, seed=seed, draws=tuple(draws))


_WAYS: Final = (_anew, _other_end, _other_moments)


# ------------------------------------------------------------------- situations


@contextmanager
def _observed(situations: dict[Hashable, int], tape: Tape) -> Iterator[None]:
    """Note the situation of each decision, and the number of draws before it."""
    module: Any = coordinator_runner  # whose drivers look the function up at each call
    decide = module.decide

    def observe(state: CoordinatorState, now: float) -> list[CoordinatorEffect]:
        before = _knowledge(state, now)
        effects: list[CoordinatorEffect] = decide(state, now)
        kinds = frozenset(
            type(one.order.body if isinstance(one, SendOrder) else one) for one in effects
        )
        situations.setdefault((before, state.phase, kinds), tape.used)
        return effects

    module.decide = observe
    try:
        yield
    finally:
        module.decide = decide


def _knowledge(state: CoordinatorState, now: float) -> Hashable:
    """Abstract the knowledge of a coordinator before it decides."""
    current, statuses = state.round, [one.status for one in state.members.values()]
    placed = len(state.active())
    return (
        state.phase,
        min(placed, _MANY),
        min(len(current.placements) - placed, _MANY),  # members that are gone
        min(len(statuses) - placed, _MANY),  # joiners, and members of other rounds
        frozenset(one.phase for one in statuses),
        any(one.outcome is not None for one in statuses),
        any(one.pending_restart is not None for one in statuses),
        any(one.placement is not None and state.is_elsewhere(one.placement) for one in statuses),
        min(current.members_done, _MANY),
        current.has_lost_member,
        current.is_excused,
        max(0, current.attempt) % 2,
        min(state.outbox.term, _MANY),
        None if state.former is None else state.former.is_open,
        now < state.fenced_until,
    )
