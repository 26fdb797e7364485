"""The policy of a job: every row of its table, and every story that can be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_aio.agent.machine import Machine, Phase
from elastic_aio.agent.vocabulary import (
    AskDecision,
    Begun,
    Decided,
    DecideRaised,
    DelayElapsed,
    Effect,
    Finish,
    GroupGone,
    GroupStarted,
    Happening,
    Publish,
    StartFailed,
    StartGroup,
    StopAsked,
    StopGroup,
    StopWaiting,
    Wait,
    WorkerEnded,
)
from elastic_aio.backoff import Backoff
from elastic_aio.errors import InternalError
from elastic_aio.events import AttemptFailed, Restarting
from elastic_aio.outcome import ExitStatus, Failure, JobState
from elastic_aio.policy import Action, RestartPolicy, StopPlan, StopStep
from elastic_aio.spec import LaunchSpec

PLAN = StopPlan((StopStep(2, 5.0), StopStep(15, 3.0)))
OK = ExitStatus(code=0)
BAD = ExitStatus(code=7)


def never_called(_: Failure) -> Action:
    raise AssertionError("the machine asks by an effect")


def machine(*happenings: Happening, nproc: int = 2, share: float = 1.0, **options: Any) -> Machine:
    """Return a machine to which all this has happened."""
    one = Machine(
        LaunchSpec(["x"], nproc_per_node=nproc, stop=PLAN, **options), nproc, lambda: share
    )
    for happening in happenings:
        one.handle(happening)
    return one


def failure(code: int = 7, *, signal: int | None = None, local_rank: int = 0) -> Failure:
    status = ExitStatus(signal=signal) if signal else ExitStatus(code=code)
    return Failure(
        rank=local_rank,
        local_rank=local_rank,
        pid=1,
        host="h",
        status=status,
        time=1.0,
        order=0,
    )


def ended(local_rank: int, status: ExitStatus = OK, attempt: int = 0) -> WorkerEnded:
    return WorkerEnded(attempt, local_rank, status, is_victim=False)


def gone(*failures: Failure, attempt: int = 0, at: float = 20.0) -> GroupGone:
    return GroupGone(attempt, at, failures)


def start_failed(*, permanent: bool = False, attempt: int = 0) -> StartFailed:
    return StartFailed(attempt, "cannot run x: no", permanent, 127 if permanent else 1, 1)


STARTED = GroupStarted(0, 10.0)
STOP = StopAsked("enough")
SIGNAL = StopAsked("SIGQUIT was received", 3)
ONE_MORE: dict[str, Any] = {"max_restarts": 1}
LATER: dict[str, Any] = {
    "max_restarts": 3,
    "restart": RestartPolicy(backoff=Backoff(initial=4, factor=2, jitter=False)),
}
ASKING: dict[str, Any] = {"max_restarts": 1, "restart": RestartPolicy(decide=never_called)}


def stop_group(reason: str, signal: int | None = None, *, leftovers: bool = False) -> StopGroup:
    plan = PLAN if signal is None else PLAN.starting_with(signal)
    return StopGroup(0, plan, reason, signal, leftovers)


def published_failure(*failures: Failure) -> Publish:
    return Publish(AttemptFailed(attempt=0, root=failures[0], failures=failures))


def restarting(why: str, delay: float = 0.0) -> Publish:
    return Publish(Restarting(attempt=1, why=why, delay=delay, restarts=1))


FAILED = "local rank 1 failed (exit code 7)"
GRANTED = "restart 1 of 1 (max_restarts)"
NO_MORE = "no restarts allowed (max_restarts is 0)"
FINISHED = "all workers have finished"

ROWS: list[tuple[str, dict[str, Any], list[Happening], Happening, list[Effect], Phase]] = [
    ("new: begun", {}, [], Begun(), [StartGroup(0, 0)], Phase.STARTING),
    (
        "new: stop asked",
        {},
        [],
        STOP,
        [Finish(JobState.STOPPED, "enough", 143, 0)],
        Phase.DONE,
    ),
    ("starting: started", {}, [Begun()], STARTED, [], Phase.RUNNING),
    (
        "starting: start failed",
        {},
        [Begun()],
        start_failed(),
        [stop_group("cannot run x: no")],
        Phase.STOPPING,
    ),
    ("starting: a success", {}, [Begun()], ended(0), [], Phase.STARTING),
    ("starting: a failure", {}, [Begun()], ended(1, BAD), [stop_group(FAILED)], Phase.STOPPING),
    (
        "starting: started, all done",
        {},
        [Begun(), ended(0), ended(1)],
        STARTED,
        [stop_group(FINISHED, leftovers=True)],
        Phase.STOPPING,
    ),
    ("starting: stop asked", {}, [Begun()], STOP, [stop_group("enough")], Phase.STOPPING),
    ("running: a success", {}, [Begun(), STARTED], ended(1), [], Phase.RUNNING),
    (
        "running: the same success again",
        {},
        [Begun(), STARTED, ended(1)],
        ended(1),
        [],
        Phase.RUNNING,
    ),
    (
        "running: the last success",
        {},
        [Begun(), STARTED, ended(1)],
        ended(0),
        [stop_group(FINISHED, leftovers=True)],
        Phase.STOPPING,
    ),
    (
        "running: a failure",
        {},
        [Begun(), STARTED],
        ended(1, BAD),
        [stop_group(FAILED)],
        Phase.STOPPING,
    ),
    (
        "running: a failure by signal",
        {},
        [Begun(), STARTED],
        ended(0, ExitStatus(signal=9)),
        [stop_group("local rank 0 failed (killed by SIGKILL)")],
        Phase.STOPPING,
    ),
    (
        "running: a lost status",
        {},
        [Begun(), STARTED],
        ended(0, ExitStatus()),
        [stop_group("local rank 0 failed (exit status lost)")],
        Phase.STOPPING,
    ),
    ("running: stop asked", {}, [Begun(), STARTED], STOP, [stop_group("enough")], Phase.STOPPING),
    (
        "running: a signal",
        {},
        [Begun(), STARTED],
        SIGNAL,
        [stop_group("SIGQUIT was received", 3)],
        Phase.STOPPING,
    ),
    (
        "stopping: another failure",
        {},
        [Begun(), STARTED, ended(1, BAD)],
        ended(0, BAD),
        [],
        Phase.STOPPING,
    ),
    (
        "stopping: stop asked",
        {},
        [Begun(), STARTED, ended(1, BAD)],
        STOP,
        [],
        Phase.STOPPING,
    ),
    ("stopping: started late", {}, [Begun(), ended(1, BAD)], STARTED, [], Phase.STOPPING),
    (
        "stopping: gone, all succeeded",
        {},
        [Begun(), STARTED, ended(0), ended(1)],
        gone(),
        [Finish(JobState.SUCCEEDED, FINISHED, 0, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, all succeeded although a stop was asked",
        {},
        [Begun(), STARTED, ended(0), ended(1), STOP],
        gone(),
        [Finish(JobState.SUCCEEDED, FINISHED, 0, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, stop asked",
        ONE_MORE,
        [Begun(), STARTED, STOP],
        gone(),
        [Finish(JobState.STOPPED, "enough", 143, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, signal received",
        ONE_MORE,
        [Begun(), STARTED, SIGNAL],
        gone(),
        [Finish(JobState.STOPPED, "SIGQUIT was received", 131, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, failed, no restarts",
        {},
        [Begun(), STARTED, ended(1, BAD)],
        gone(failure(3), failure(5)),
        [published_failure(failure(3), failure(5)), Finish(JobState.FAILED, NO_MORE, 3, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, killed, no restarts",
        {},
        [Begun(), STARTED, ended(1, BAD)],
        gone(failure(signal=9)),
        [published_failure(failure(signal=9)), Finish(JobState.FAILED, NO_MORE, 137, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, failed, restart at once",
        ONE_MORE,
        [Begun(), STARTED, ended(1, BAD)],
        gone(failure()),
        [published_failure(failure()), restarting(GRANTED), StartGroup(1, 1)],
        Phase.STARTING,
    ),
    (
        "stopping: gone, failed, restart later",
        LATER,
        [Begun(), STARTED, ended(1, BAD)],
        gone(failure()),
        [
            published_failure(failure()),
            restarting("restart 1 of 3 (max_restarts)", 4.0),
            Wait(1, 4.0),
        ],
        Phase.WAITING,
    ),
    (
        "stopping: gone, failed, callback",
        ASKING,
        [Begun(), STARTED, ended(1, BAD)],
        gone(failure()),
        [published_failure(failure()), AskDecision(0, failure())],
        Phase.DECIDING,
    ),
    (
        "stopping: gone, failed, a stop takes the place of the restart",
        ONE_MORE,
        [Begun(), STARTED, ended(1, BAD), STOP],
        gone(failure()),
        [published_failure(failure()), Finish(JobState.STOPPED, "enough", 143, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, failed, a stop takes the place of the question",
        ASKING,
        [Begun(), STARTED, ended(1, BAD), STOP],
        gone(failure()),
        [published_failure(failure()), Finish(JobState.STOPPED, "enough", 143, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, failed, no restart that a stop could prevent",
        {},
        [Begun(), STARTED, ended(1, BAD), STOP],
        gone(failure()),
        [published_failure(failure()), Finish(JobState.FAILED, NO_MORE, 7, 0)],
        Phase.DONE,
    ),
    (
        "stopping: gone, start failed for good",
        ONE_MORE,
        [Begun(), start_failed(permanent=True)],
        gone(failure(1)),
        [
            published_failure(failure(1)),
            Finish(JobState.FAILED, "another attempt could not start it either", 127, 0),
        ],
        Phase.DONE,
    ),
    (
        "stopping: gone, start failed for now",
        ONE_MORE,
        [Begun(), start_failed()],
        gone(failure(1)),
        [published_failure(failure(1)), restarting(GRANTED), StartGroup(1, 1)],
        Phase.STARTING,
    ),
    (
        "deciding: restart",
        ASKING,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        Decided(0, Action.RESTART),
        [restarting(f"{GRANTED}, restart.decide said so"), StartGroup(1, 1)],
        Phase.STARTING,
    ),
    (
        "deciding: by policy",
        ASKING,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        Decided(0, Action.BY_POLICY),
        [restarting(GRANTED), StartGroup(1, 1)],
        Phase.STARTING,
    ),
    (
        "deciding: give up",
        ASKING,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        Decided(0, Action.GIVE_UP),
        [Finish(JobState.FAILED, "restart.decide said to give up", 7, 0)],
        Phase.DONE,
    ),
    (
        "deciding: stop asked",
        ASKING,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        SIGNAL,
        [StopWaiting(), Finish(JobState.STOPPED, "SIGQUIT was received", 131, 0)],
        Phase.DONE,
    ),
    (
        "waiting: elapsed",
        LATER,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        DelayElapsed(1),
        [StartGroup(1, 1)],
        Phase.STARTING,
    ),
    (
        "waiting: stop asked",
        LATER,
        [Begun(), STARTED, ended(1, BAD), gone(failure())],
        STOP,
        [StopWaiting(), Finish(JobState.STOPPED, "enough", 143, 1)],
        Phase.DONE,
    ),
]


@pytest.mark.parametrize(
    ("options", "before", "happening", "effects", "phase"),
    [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS],
)
def test_each_row_of_the_table(
    options: dict[str, Any],
    before: list[Happening],
    happening: Happening,
    effects: list[Effect],
    phase: Phase,
) -> None:
    """Phase and happening give the next phase and the effects, in their order."""
    one = machine(*before, **options)
    assert one.handle(happening) == effects
    assert one.phase is phase


def test_a_callback_that_fails_ends_the_job_with_its_error() -> None:
    """The callers get the exception of their own function."""
    error = KeyError("x")
    one = machine(Begun(), STARTED, ended(1, BAD), gone(failure()), **ASKING)
    effects = one.handle(DecideRaised(0, error))
    assert effects == [Finish(JobState.FAILED, "restart.decide raised KeyError", 7, 0, error)]
    assert isinstance(effects[0], Finish)
    assert effects[0].error is error
    assert one.phase is Phase.DONE


def test_a_callback_is_not_asked_without_a_choice() -> None:
    """When the restarts are used up, the job ends without a question."""
    one = machine(
        Begun(), STARTED, ended(1, BAD), gone(failure()), Decided(0, Action.RESTART), **ASKING
    )
    one.handle(GroupStarted(1, 30.0))
    one.handle(ended(0, BAD, attempt=1))
    effects = one.handle(gone(failure(), attempt=1, at=40.0))
    assert [type(effect) for effect in effects] == [Publish, Finish]
    assert one.restarts == 1


def test_the_second_attempt_is_like_the_first() -> None:
    """Successes of a former attempt do not count for the next one."""
    one = machine(Begun(), STARTED, ended(0), ended(1, BAD), gone(failure()), **ONE_MORE)
    assert one.attempt == 1
    one.handle(GroupStarted(1, 30.0))
    assert one.handle(ended(1, attempt=1)) == []
    effects = one.handle(ended(0, attempt=1))
    assert effects == [StopGroup(1, PLAN, FINISHED, None, True)]
    assert one.handle(gone(attempt=1)) == [Finish(JobState.SUCCEEDED, FINISHED, 0, 1)]


LATE: list[Happening] = [
    GroupStarted(0, 50.0),
    start_failed(permanent=True),
    ended(0),
    ended(1, BAD),
    gone(failure()),
    gone(),
    Decided(0, Action.GIVE_UP),
    DecideRaised(0, KeyError()),
    DelayElapsed(0),
    GroupStarted(7, 50.0),
    gone(attempt=7),
]


@pytest.mark.parametrize("late", LATE, ids=lambda late: f"{type(late).__name__} {late.attempt}")
@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.STOPPING])
def test_a_late_answer_changes_nothing(late: Happening, phase: Phase) -> None:
    """What belongs to another attempt is dropped, in every phase."""
    one = machine(Begun(), STARTED, ended(1, BAD), gone(failure()), max_restarts=2)
    if phase is not Phase.STARTING:
        one.handle(GroupStarted(1, 30.0))
    if phase is Phase.STOPPING:
        one.handle(ended(0, BAD, attempt=1))
    assert one.phase is phase
    before = repr(one)
    assert one.handle(late) == []
    assert one.phase is phase
    assert repr(one) == before


@pytest.mark.parametrize("answer", [DelayElapsed(0), Decided(0, Action.RESTART)])
def test_an_answer_that_nobody_waits_for_is_dropped(answer: Happening) -> None:
    """A wait or question that was given up may still answer."""
    one = machine(Begun(), STARTED)
    assert one.handle(answer) == []
    assert one.phase is Phase.RUNNING


@pytest.mark.parametrize(
    "happening",
    [Begun(), STARTED, ended(0, BAD), gone(failure()), STOP, Decided(0, Action.RESTART)],
    ids=lambda one: type(one).__name__,
)
def test_after_the_end_nothing_is_said(happening: Happening) -> None:
    """DONE is for good."""
    one = machine(STOP)
    assert one.handle(happening) == []
    assert one.phase is Phase.DONE


def test_a_second_stop_changes_nothing() -> None:
    """The first reason and signal are kept."""
    one = machine(Begun(), STARTED, SIGNAL)
    assert one.handle(STOP) == []
    assert one.handle(gone()) == [Finish(JobState.STOPPED, "SIGQUIT was received", 131, 0)]


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({}, [Begun()]),
        ({}, [Begun(), STARTED]),
        ({}, [Begun(), STARTED, ended(1, BAD)]),
        (LATER, [Begun(), STARTED, ended(1, BAD), gone(failure())]),
        (ASKING, [Begun(), STARTED, ended(1, BAD), gone(failure())]),
    ],
    ids=["starting", "running", "stopping", "waiting", "deciding"],
)
def test_a_job_begins_once(options: dict[str, Any], before: list[Happening]) -> None:
    """A second beginning is our own bug, and the message tells the story."""
    one = machine(*before, **options)
    with pytest.raises(InternalError, match=r"please report: new: Begun\(\); "):
        one.handle(Begun())


@pytest.mark.parametrize("before", [[Begun()], [Begun(), STARTED]], ids=["starting", "running"])
def test_a_group_does_not_vanish_by_itself(before: list[Happening]) -> None:
    """The end of a group that nobody stopped is our own bug."""
    one = machine(*before)
    with pytest.raises(InternalError, match=r"the end of a group cannot happen in <Machine"):
        one.handle(gone())


def test_a_machine_tells_where_it_is() -> None:
    """The repr names phase, attempt and budget."""
    one = machine(Begun(), STARTED, max_restarts=3)
    assert repr(one) == "<Machine running, attempt 0, <RestartBook: 0 of 3 restarts used>>"


def delay_of(effects: list[Effect]) -> float:
    return next(effect.delay for effect in effects if isinstance(effect, Wait))


def test_attempts_that_never_started_do_not_count_as_healthy() -> None:
    """The delay grows while workers cannot be started, however long the machine is up."""
    policy = RestartPolicy(backoff=Backoff(initial=1, factor=2, jitter=False), healthy_after=10.0)
    one = machine(Begun(), max_restarts=9, restart=policy)
    delays = []
    for attempt in range(4):
        one.handle(start_failed(attempt=attempt))
        delays.append(delay_of(one.handle(gone(failure(1), attempt=attempt, at=1e6 + attempt))))
        one.handle(DelayElapsed(attempt + 1))
    assert delays == [1, 2, 4, 8]


def test_a_healthy_attempt_resets_the_delay() -> None:
    """Healthy is what ran from its start to its end for so long."""
    policy = RestartPolicy(backoff=Backoff(initial=1, factor=2, jitter=False), healthy_after=10.0)
    one = machine(Begun(), max_restarts=9, restart=policy)
    delays, now = [], 100.0
    for attempt, ran in enumerate([1.0, 1.0, 30.0, 1.0]):
        one.handle(GroupStarted(attempt, now))
        one.handle(ended(0, BAD, attempt=attempt))
        now += ran
        delays.append(delay_of(one.handle(gone(failure(), attempt=attempt, at=now))))
        one.handle(DelayElapsed(attempt + 1))
    assert delays == [1, 2, 1, 2]


# -------------------------------------------------------------- any story that can be told


class Jobs(RuleBasedStateMachine):
    """The shell's part, played by chance: whatever can happen happens in any order."""

    @initialize(
        nproc=st.integers(1, 3),
        max_restarts=st.integers(0, 3),
        asks=st.booleans(),
        waits=st.booleans(),
    )
    def begin(self, nproc: int, max_restarts: int, asks: bool, waits: bool) -> None:
        self.nproc, self.max_restarts = nproc, max_restarts
        may_restart = max_restarts > 0
        policy = RestartPolicy(
            decide=never_called if asks and may_restart else None,
            backoff=Backoff(initial=1, jitter=False) if waits and may_restart else None,
        )
        self.machine = machine(nproc=nproc, max_restarts=max_restarts, restart=policy)
        self.now = 0.0
        self.live: int | None = None  # attempt of the group that exists
        self.spawning = self.stopping = False
        self.running: set[int] = set()
        self.failures: list[Failure] = []
        self.asked: int | None = None
        self.waiting: int | None = None
        self.finishes: list[Finish] = []
        self.starts: list[StartGroup] = []
        self.restarts_told = 0
        self.stop_asked = False
        self.perform(self.machine.handle(Begun()))

    def handle(self, happening: Happening) -> None:
        self.perform(self.machine.handle(happening))

    def perform(self, effects: list[Effect]) -> None:
        for position, effect in enumerate(effects):
            assert not self.finishes, "nothing comes after the end"
            match effect:
                case StartGroup(attempt, restarts):
                    assert self.live is None, "never two groups at once"
                    assert attempt == restarts == len(self.starts)
                    assert self.asked is None
                    assert self.waiting is None
                    self.starts.append(effect)
                    self.live, self.spawning, self.stopping = attempt, True, False
                    self.running, self.failures = set(), []
                case StopGroup(attempt):
                    assert attempt == self.live
                    assert not self.stopping, "a group is stopped once"
                    self.stopping = True
                case AskDecision(attempt):
                    assert self.live is None
                    self.asked = attempt
                case Wait(attempt, delay):
                    assert self.live is None
                    assert delay > 0
                    self.waiting = attempt
                case StopWaiting():
                    assert self.asked is not None or self.waiting is not None
                    self.asked = self.waiting = None
                case Publish(event):
                    self.restarts_told += isinstance(event, Restarting)
                case Finish():
                    assert position == len(effects) - 1
                    assert self.live is None, "the end comes when nothing is left"
                    self.finishes.append(effect)

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
        self.failures.append(failure(1, local_rank=len(self.running)))
        self.handle(start_failed(permanent=permanent, attempt=self.live))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from([OK, BAD, ExitStatus(signal=9), ExitStatus()]))
    def a_worker_ends(self, data: st.DataObject, status: ExitStatus) -> None:
        assert self.live is not None
        rank = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(rank)
        if not status.is_success and not self.stopping:
            self.failures.append(failure(local_rank=rank))
        self.handle(WorkerEnded(self.live, rank, status, is_victim=self.stopping))

    @precondition(lambda self: self.stopping and not self.spawning)
    @rule()
    def the_group_is_gone(self) -> None:
        assert self.live is not None
        attempt, self.live, self.stopping = self.live, None, False
        self.running = set()
        self.now += 1
        self.handle(GroupGone(attempt, self.now, tuple(self.failures)))

    @precondition(lambda self: self.asked is not None)
    @rule(action=st.sampled_from(Action))
    def the_callback_answers(self, action: Action) -> None:
        assert self.asked is not None
        attempt, self.asked = self.asked, None
        self.handle(Decided(attempt, action))

    @precondition(lambda self: self.asked is not None)
    @rule()
    def the_callback_fails(self) -> None:
        assert self.asked is not None
        attempt, self.asked = self.asked, None
        self.handle(DecideRaised(attempt, KeyError("x")))

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def the_delay_elapses(self) -> None:
        assert self.waiting is not None
        attempt, self.waiting = self.waiting, None
        self.handle(DelayElapsed(attempt))

    @rule(signal=st.sampled_from([None, 2, 15]))
    def somebody_asks_to_stop(self, signal: int | None) -> None:
        self.stop_asked = True
        self.handle(StopAsked("enough", signal))

    @rule(
        make=st.sampled_from(
            [
                lambda attempt: GroupStarted(attempt, 99.0),
                lambda attempt: start_failed(attempt=attempt),
                lambda attempt: ended(0, BAD, attempt=attempt),
                lambda attempt: ended(0, attempt=attempt),
                lambda attempt: gone(failure(), attempt=attempt),
                lambda attempt: Decided(attempt, Action.RESTART),
                lambda attempt: DelayElapsed(attempt),
            ]
        ),
        age=st.integers(1, 3),
    )
    def a_late_answer_comes(self, make: Callable[[int], Happening], age: int) -> None:
        before = repr(self.machine)
        assert self.machine.handle(make(self.machine.attempt - age)) == []
        assert repr(self.machine) == before

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.machine.restarts <= self.max_restarts
        assert self.restarts_told == self.machine.restarts
        assert len(self.starts) <= self.max_restarts + 1

    @invariant()
    def the_end_comes_once(self) -> None:
        assert len(self.finishes) <= 1
        assert bool(self.finishes) == (self.machine.phase is Phase.DONE)

    @invariant()
    def something_is_always_under_way(self) -> None:
        """Until the end, somebody owes the machine an answer: it never hangs."""
        busy = self.live is not None or self.asked is not None or self.waiting is not None
        assert busy != bool(self.finishes)
        if self.stop_asked and not self.finishes:
            assert self.stopping, "after a stop nothing goes on but the stopping"

    @invariant()
    def the_result_fits(self) -> None:
        for finish in self.finishes:
            assert finish.restarts == self.machine.restarts
            assert (finish.exit_code == 0) == (finish.state is JobState.SUCCEEDED)
            if finish.state is JobState.STOPPED:
                assert self.stop_asked


Jobs.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestJobs = Jobs.TestCase
