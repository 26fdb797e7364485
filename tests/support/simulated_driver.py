"""A driver that performs what a state machine wants, for random sequences of inputs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic_aio.agent.machine import (
    AgentMachine,
    AgentPhase,
    Effect,
    Finish,
    GroupStarted,
    GroupStopped,
    Input,
    Start,
    StartFailed,
    StartGroup,
    StopGroup,
    StopReceived,
)
from elastic_aio.outcome import Failure, JobState


class SimulatedDriver(RuleBasedStateMachine):
    """Possible inputs come in random order: those of the group, and a stop."""

    may_survive = False
    """Whether processes may be left that cannot be killed."""

    machine: Any  # of the kind that a subclass tests

    def begin_with(self, machine: AgentMachine, nproc: int) -> None:
        """Start a job; the attributes of subclasses are set."""
        self.machine, self.nproc = machine, nproc
        self.now = 0.0
        self.live: int | None = None  # attempt of the group that exists
        self.spawning = self.stopping = self.stop_asked = False
        self.running: set[int] = set()
        self.failures: list[Failure] = []
        self.finishes: list[Finish] = []
        self.perform(self.machine.handle(Start()))

    def failure_of(self, local_rank: int, code: int = 7) -> Failure:
        raise NotImplementedError

    def handle(self, happening: Input) -> None:
        self.perform(self.machine.handle(happening))

    def perform(self, effects: list[Effect]) -> None:
        for position, effect in enumerate(effects):
            assert not self.finishes, "nothing comes after the end"
            self.perform_one(effect)
            if isinstance(effect, Finish):
                assert position == len(effects) - 1
                assert self.live is None, "the end comes when nothing is left"
                self.finishes.append(effect)

    def perform_one(self, effect: Effect) -> None:
        match effect:
            case StartGroup(attempt):
                assert self.live is None, "never two groups at once"
                self.live, self.spawning, self.stopping = attempt, True, False
                self.running, self.failures = set(), []
            case StopGroup(attempt):
                assert attempt == self.live
                assert not self.stopping, "a group is stopped once"
                self.stopping = True

    def check_late(self, late: Input) -> None:
        """Hand in the result of an effect of a former attempt: it is dropped."""
        before = repr(self.machine)
        assert self.machine.handle(late) == []
        assert repr(self.machine) == before

    @precondition(lambda self: self.spawning and len(self.running) < self.nproc)
    @rule()
    def a_worker_starts(self) -> None:
        if not self.stopping:
            self.running.add(len(self.running))

    @precondition(lambda self: self.spawning)
    @rule()
    def the_group_has_started(self) -> None:
        assert self.live is not None
        self.spawning = False
        if not self.stopping:
            self.running = set(range(self.nproc))
        self.now += 1
        self.handle(GroupStarted(self.live, self.now))

    @precondition(lambda self: self.spawning)
    @rule(permanent=st.booleans())
    def the_start_fails(self, permanent: bool) -> None:
        assert self.live is not None
        self.spawning = False
        self.failures.append(self.failure_of(len(self.running), 1))
        self.handle(StartFailed(self.live, "cannot run x: no", permanent, 1, 0))

    @precondition(lambda self: self.stopping and not self.spawning)
    @rule(chance=st.integers(0, 3))
    def the_group_is_gone(self, chance: int) -> None:
        assert self.live is not None
        attempt, self.live, self.stopping = self.live, None, False
        self.running = set()
        self.now += 1
        survivors = self.may_survive and chance == 3
        self.handle(GroupStopped(attempt, self.now, tuple(self.failures), survivors))

    @rule(signal=st.sampled_from([None, 2, 15]))
    def a_stop_is_requested(self, signal: int | None) -> None:
        self.stop_asked = True
        self.handle(StopReceived("enough", signal))

    @invariant()
    def the_end_comes_once(self) -> None:
        assert len(self.finishes) <= 1
        assert bool(self.finishes) == (self.machine.phase is AgentPhase.DONE)

    @invariant()
    def the_exit_code_fits(self) -> None:
        for finish in (effect.outcome for effect in self.finishes):
            assert (finish.exit_code == 0) == (finish.state is JobState.SUCCEEDED)
            assert self.stop_asked or finish.state is not JobState.STOPPED
