"""What the nodes of a job without faults do, and the rule that the job keeps about it.

Nodes join one after the other, a node is stopped, a host pauses, or a node succeeds before the
others.  Random scenarios do one of these when their faults are over.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from msgspec.structs import replace

from elastic_aio.events import Event
from elastic_aio.node_events import MembershipPending
from elastic_aio.outcome import JobState
from elastic_aio.testing.node import SimNode
from elastic_aio.testing.simulation import Simulation

_PAUSE_S: Final = 0.4
"""Seconds for which a host pauses: less than a fifth of the time of a lease."""
_CALM_S: Final = 5.0
"""Seconds after it in which a node would have been replaced."""
_SAVE_S: Final = 3.5
"""Seconds that the workers of a stopped node need."""
_SETTLE_S: Final = 3.5
"""Seconds after which all nodes have come, and workers of before fail no more."""
_AT_ONCE_S: Final = 2.0
"""Seconds in which all nodes learn of an event."""


class CalmRules:
    """Lets the nodes of one round do something, and checks the rule about it."""

    def __init__(
        self,
        sim: Simulation,
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
        """Check one rule that applies to the present round, if there is one.

        Raises:
            InvariantViolated: the job does not keep the rule, or an invariant does not hold.
        """
        self._sim.run(_SETTLE_S)
        self._sim.run_until(self._is_together, self._limit_s)
        if not self._nodes or len(self._nodes) < len(self._sim.live_nodes):
            return  # some have succeeded, wait aside, or are on standby
        rounds = self._sim.checker.rounds.rounds
        if any(rounds[one.running.round_id].succeeded for one in self._nodes if one.running):
            return  # a node has succeeded, and is gone
        rules = [self._check_drain, self._check_pause]
        settings, nnodes = self._sim.spec.rendezvous, self._sim.spec.nnodes
        if settings.backend != "static" and len(self._nodes) < nnodes.maximum:
            rules += [self._check_joiners] * 3
        if self._has_restart and len(self._nodes) > 1:
            rules += [self._check_early_success] * 3
        self._random.choice(rules)()

    @property
    def _nodes(self) -> list[SimNode]:
        """The live nodes whose workers run."""
        return [node for node in self._sim.live_nodes if node.running is not None]

    @property
    def _rounds(self) -> int:
        return len(self._sim.checker.rounds.rounds)

    @property
    def _restarts(self) -> int:
        return max(node.running.restarts for node in self._nodes if node.running is not None)

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
