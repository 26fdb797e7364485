"""The policy of a node in a job of many: every row of its table, and every story."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_aio.agent.groupmachine import Phase
from elastic_aio.agent.membermachine import MemberMachine
from elastic_aio.agent.vocabulary import (
    BarrierElapsed,
    Begun,
    DelayElapsed,
    Effect,
    Finish,
    GroupGone,
    GroupStarted,
    Happening,
    Instructed,
    Join,
    JoinFailed,
    Leave,
    Left,
    Publish,
    StartBarrier,
    StartFailed,
    StartGroup,
    StopAsked,
    StopGroup,
    StopWaiting,
    Tell,
    WorkerEnded,
)
from elastic_aio.errors import InternalError, SurroundingsError
from elastic_aio.events import AttemptFailed, MembershipChanged, Restarting, RoundFormed
from elastic_aio.outcome import ExitStatus, Failure, JobState
from elastic_aio.policy import StopPlan, StopStep
from elastic_aio.ranks import Span
from elastic_aio.rendezvous.base import (
    Begin,
    Cause,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Instruction,
    Pause,
    Placement,
    Running,
    Succeeded,
)
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.spec import LaunchSpec

PLAN = StopPlan((StopStep(2, 5.0), StopStep(15, 3.0)))
OK = ExitStatus(code=0)
BAD = ExitStatus(code=7)
SPAN = Span(1, 2, 2, 4, 2, 4)
BARRIER_S = 12.0


def machine(*happenings: Happening, nproc: int = 2) -> MemberMachine:
    """Return a machine to which all this has happened."""
    rendezvous = RendezvousSpec(exit_barrier_timeout=BARRIER_S)
    spec = LaunchSpec(
        ["x"], nproc_per_node=nproc, nnodes="1:2", stop=PLAN, run_id="r", rendezvous=rendezvous
    )
    one = MemberMachine(spec, nproc)
    for happening in happenings:
        one.handle(happening)
    return one


def placement(number: int, restarts: int = 0) -> Placement:
    return Placement(
        round=number,
        origin="1.a",
        attempt=number,
        restarts=restarts,
        changes=3,
        span=SPAN,
        master_addr="10.0.0.1",
        master_port=4000 + number,
    )


def begin(number: int, cause: Cause | None = None, restarts: int = 0) -> Instructed:
    return Instructed(Begin(placement(number, restarts), cause))


def halt(number: int) -> Instructed:
    return Instructed(Halt(number, "a worker on b has failed"))


def failure(rank: int = 0, *, host: str = "h", code: int = 7, tail: str = "") -> Failure:
    return Failure(
        rank=rank,
        local_rank=rank % 2,
        pid=100 + rank,
        host=host,
        status=ExitStatus(code=code),
        time=1.0,
        order=0,
        stderr_tail=(tail,) if tail else (),
    )


def ended(local_rank: int, status: ExitStatus = OK, attempt: int = 7) -> WorkerEnded:
    return WorkerEnded(attempt, local_rank, status, is_victim=False)


def gone(*failures: Failure, attempt: int = 7, survivors: bool = False) -> GroupGone:
    return GroupGone(attempt, 25.0, failures, survivors)


def start_failed(*, permanent: bool = False) -> StartFailed:
    return StartFailed(7, "cannot run x: no", permanent, 127 if permanent else 1, 1)


JOINED: list[Happening] = [Begun()]
STARTING: list[Happening] = [*JOINED, begin(7)]
STARTED = GroupStarted(7, 10.0)
RUNNING: list[Happening] = [*STARTING, STARTED]
FAILING: list[Happening] = [*RUNNING, ended(1, BAD)]
ALL_DONE: list[Happening] = [*RUNNING, ended(1), ended(0)]
BARRIER: list[Happening] = [*ALL_DONE, gone()]
IDLE: list[Happening] = [*FAILING, gone(failure(2))]
STOP = StopAsked("enough")
SIGNAL = StopAsked("SIGQUIT was received", 3)
STOPPED = Finish(JobState.STOPPED, "enough", 143, 0)

CHANGE = Cause(8, "b joined", 0)
FAILED_THERE = Cause(8, "restart 1 of 3 (max_restarts)", 1, 2.5, failure(9, host="b"))
ENDING = Ending(JobState.FAILED, "all 3 restarts are used up", 9, 3, (failure(9, host="b"),))
CONCLUDE = Instructed(Conclude(ENDING))
GOOD_END = Instructed(Conclude(Ending(JobState.SUCCEEDED, "all workers have finished", 0, 1)))
CONCLUDED = Finish(
    ENDING.state, ENDING.why, ENDING.exit_code, ENDING.restarts, failures=ENDING.failures
)
WORKER_FAILED = "local rank 1 failed (exit code 7)"
FINISHED = "all workers have finished"
HALTED = "a worker on b has failed"


def start(number: int, restarts: int = 0) -> StartGroup:
    return StartGroup(number, restarts, placement(number, restarts))


def stop_group(reason: str, signal: int | None = None, *, leftovers: bool = False) -> StopGroup:
    plan = PLAN if signal is None else PLAN.starting_with(signal)
    return StopGroup(7, plan, reason, signal, leftovers)


def formed(number: int) -> Publish:
    return Publish(
        RoundFormed(
            attempt=number,
            round=number,
            group_rank=1,
            group_world_size=2,
            world_size=4,
            master_addr="10.0.0.1",
            master_port=4000 + number,
            changes=3,
        )
    )


def changed(number: int = 8) -> Publish:
    return Publish(MembershipChanged(attempt=number, why="b joined", round=number, nodes=2))


def attempt_failed(attempt: int, *failures: Failure) -> Publish:
    return Publish(AttemptFailed(attempt=attempt, root=failures[0], failures=failures))


def restarting() -> Publish:
    return Publish(Restarting(attempt=8, why=FAILED_THERE.why, delay=2.5, restarts=1))


def told_ended(number: int, *failures: Failure, **more: Any) -> Tell:
    more = {"exit_code": 7 if failures else 1, "ran": 15.0, **more}
    return Tell(Ended(number, failures, **more))


CANNOT_KILL = {"is_final": True, "final_why": "a process could not be killed"}
HOPELESS = {"is_final": True, "final_why": "another attempt could not start it either"}
CUT_SHORT = Finish(JobState.SUCCEEDED, f"{FINISHED}; the others are not waited for: enough", 0, 0)
NOT_AWAITED = Finish(
    JobState.SUCCEEDED,
    f"{FINISHED} on this node; others had not after 12 s (rendezvous.exit_barrier_timeout)",
    0,
    0,
)

Row = tuple[str, list[Happening], Happening, list[Effect], Phase]
ROWS: list[Row] = [
    ("new: begun", [], Begun(), [Join()], Phase.IDLE),
    ("new: stop asked", [], STOP, [STOPPED], Phase.DONE),
    # ------------------------------------------------------------------ idle
    ("idle: begin", JOINED, begin(7), [formed(7), start(7)], Phase.STARTING),
    (
        "idle: begin as a newcomer",
        JOINED,
        begin(8, CHANGE),
        [changed(), formed(8), start(8)],
        Phase.STARTING,
    ),
    ("idle: halt of a round never seen", JOINED, halt(5), [Tell(Ended(5))], Phase.IDLE),
    ("idle: halt that is answered", IDLE, halt(7), [], Phase.IDLE),
    ("idle: halt of a later round", IDLE, halt(8), [Tell(Ended(8))], Phase.IDLE),
    ("idle: begin of a halted round", [*IDLE, halt(8)], begin(8), [], Phase.IDLE),
    (
        "idle: pause",
        IDLE,
        Instructed(Pause(FAILED_THERE)),
        [attempt_failed(7, failure(9, host="b"), failure(2)), restarting()],
        Phase.IDLE,
    ),
    (
        "idle: begin after a failure, without a pause",
        IDLE,
        begin(8, FAILED_THERE, 1),
        [
            attempt_failed(7, failure(9, host="b"), failure(2)),
            restarting(),
            formed(8),
            start(8, 1),
        ],
        Phase.STARTING,
    ),
    (
        "idle: begin after the pause",
        [*IDLE, Instructed(Pause(FAILED_THERE))],
        begin(8, FAILED_THERE, 1),
        [formed(8), start(8, 1)],
        Phase.STARTING,
    ),
    ("idle: conclude", JOINED, CONCLUDE, [Leave(ENDING.why)], Phase.LEAVING),
    ("idle: stop asked", JOINED, STOP, [Leave("enough")], Phase.LEAVING),
    (
        "idle: join failed",
        JOINED,
        JoinFailed(SurroundingsError("no port")),
        [Leave("no port")],
        Phase.LEAVING,
    ),
    ("idle: stop asked between two rounds", IDLE, STOP, [Leave("enough")], Phase.LEAVING),
    # --------------------------------------------------------------- starting
    ("starting: started", STARTING, STARTED, [Tell(Running(7))], Phase.RUNNING),
    (
        "starting: started, all done",
        [*STARTING, ended(0), ended(1)],
        STARTED,
        [Tell(Running(7)), stop_group(FINISHED, leftovers=True)],
        Phase.STOPPING,
    ),
    (
        "starting: start failed",
        STARTING,
        start_failed(),
        [Tell(Failing(7, "cannot run x: no")), stop_group("cannot run x: no")],
        Phase.STOPPING,
    ),
    (
        "starting: a failure",
        STARTING,
        ended(1, BAD),
        [Tell(Failing(7, WORKER_FAILED)), stop_group(WORKER_FAILED)],
        Phase.STOPPING,
    ),
    (
        "starting: begin",
        STARTING,
        begin(8, CHANGE),
        [changed(), formed(8), stop_group("b joined")],
        Phase.STOPPING,
    ),
    ("starting: halt", STARTING, halt(7), [stop_group(HALTED)], Phase.STOPPING),
    (
        "starting: stop asked",
        STARTING,
        STOP,
        [Leave("enough"), stop_group("enough")],
        Phase.STOPPING,
    ),
    # ---------------------------------------------------------------- running
    ("running: a success", RUNNING, ended(1), [], Phase.RUNNING),
    (
        "running: the last success",
        [*RUNNING, ended(1)],
        ended(0),
        [stop_group(FINISHED, leftovers=True)],
        Phase.STOPPING,
    ),
    (
        "running: a failure",
        RUNNING,
        ended(1, BAD),
        [Tell(Failing(7, WORKER_FAILED)), stop_group(WORKER_FAILED)],
        Phase.STOPPING,
    ),
    (
        "running: begin",
        RUNNING,
        begin(8, CHANGE),
        [changed(), formed(8), stop_group("b joined")],
        Phase.STOPPING,
    ),
    (
        "running: begin without a cause",
        RUNNING,
        begin(8),
        [formed(8), stop_group("the nodes form another round")],
        Phase.STOPPING,
    ),
    ("running: the same begin again", RUNNING, begin(7), [], Phase.RUNNING),
    ("running: begin of an older round", RUNNING, begin(6), [], Phase.RUNNING),
    ("running: halt", RUNNING, halt(7), [stop_group(HALTED)], Phase.STOPPING),
    ("running: halt of a later round", RUNNING, halt(9), [stop_group(HALTED)], Phase.STOPPING),
    ("running: halt of an older round", RUNNING, halt(6), [], Phase.RUNNING),
    (
        "running: conclude",
        RUNNING,
        CONCLUDE,
        [Leave(ENDING.why), stop_group(ENDING.why)],
        Phase.STOPPING,
    ),
    (
        "running: stop asked",
        RUNNING,
        STOP,
        [Leave("enough"), stop_group("enough")],
        Phase.STOPPING,
    ),
    (
        "running: a signal",
        RUNNING,
        SIGNAL,
        [Leave("SIGQUIT was received"), stop_group("SIGQUIT was received", 3)],
        Phase.STOPPING,
    ),
    # --------------------------------------------------------------- stopping
    ("stopping: another failure", FAILING, ended(0, BAD), [], Phase.STOPPING),
    ("stopping: started late", [*STARTING, ended(1, BAD)], STARTED, [], Phase.STOPPING),
    ("stopping: halt", FAILING, halt(7), [], Phase.STOPPING),
    (
        "stopping: begin",
        FAILING,
        begin(8, CHANGE),
        [changed(), formed(8)],
        Phase.STOPPING,
    ),
    ("stopping: stop asked", FAILING, STOP, [Leave("enough")], Phase.STOPPING),
    ("stopping: stop asked, all succeeded", ALL_DONE, STOP, [], Phase.STOPPING),
    ("stopping: conclude", FAILING, CONCLUDE, [Leave(ENDING.why)], Phase.STOPPING),
    (
        "stopping: gone, all succeeded",
        ALL_DONE,
        gone(),
        [Tell(Succeeded(7)), StartBarrier(7, BARRIER_S)],
        Phase.BARRIER,
    ),
    (
        "stopping: gone, all succeeded, a begin waits",
        [*ALL_DONE, begin(8)],
        gone(),
        [Tell(Succeeded(7)), start(8)],
        Phase.STARTING,
    ),
    (
        "stopping: gone, all succeeded, but halted",
        [*ALL_DONE, halt(7)],
        gone(),
        [told_ended(7)],
        Phase.IDLE,
    ),
    (
        "stopping: gone, all succeeded, stop asked",
        [*ALL_DONE, STOP],
        gone(),
        [Tell(Succeeded(7)), Leave(FINISHED)],
        Phase.LEAVING,
    ),
    (
        "stopping: gone, a value was lost, stop asked",
        [*ALL_DONE, STOP],
        gone(failure(2)),
        [told_ended(7, failure(2)), Leave("enough")],
        Phase.LEAVING,
    ),
    (
        "stopping: gone, a value was lost",
        ALL_DONE,
        gone(failure(2)),
        [told_ended(7, failure(2))],
        Phase.IDLE,
    ),
    (
        "stopping: gone, failed",
        FAILING,
        gone(failure(2), failure(3)),
        [told_ended(7, failure(2), failure(3))],
        Phase.IDLE,
    ),
    (
        "stopping: gone, failed and halted meanwhile",
        [*FAILING, halt(7)],
        gone(failure(2)),
        [told_ended(7, failure(2))],
        Phase.IDLE,
    ),
    (
        "stopping: gone, halted",
        [*RUNNING, halt(7)],
        gone(),
        [told_ended(7)],
        Phase.IDLE,
    ),
    (
        "stopping: gone, halted right after a failure of its own",
        [*RUNNING, halt(7)],
        gone(failure(2)),
        [told_ended(7, failure(2))],
        Phase.IDLE,
    ),
    (
        "stopping: gone, a later round is halted",
        [*RUNNING, begin(8), halt(8)],
        gone(failure(2)),
        [told_ended(7, failure(2)), Tell(Ended(8))],
        Phase.IDLE,
    ),
    (
        "stopping: gone, a begin waits",
        [*RUNNING, begin(8)],
        gone(),
        [told_ended(7), start(8)],
        Phase.STARTING,
    ),
    (
        "stopping: gone, failed, a begin waits",
        [*FAILING, begin(8)],
        gone(failure(2)),
        [told_ended(7, failure(2)), start(8)],
        Phase.STARTING,
    ),
    (
        "stopping: gone, only the newest begin counts",
        [*RUNNING, begin(8), begin(9)],
        gone(),
        [told_ended(7), start(9)],
        Phase.STARTING,
    ),
    (
        "stopping: gone, a process is left",
        [*RUNNING, halt(7)],
        gone(survivors=True),
        [told_ended(7, **CANNOT_KILL)],
        Phase.IDLE,
    ),
    (
        "stopping: gone, a process is in the way of a begin",
        [*RUNNING, begin(8)],
        gone(failure(2), survivors=True),
        [
            told_ended(7, failure(2), **CANNOT_KILL),
            Tell(Ended(8, is_final=True, final_why="a process could not be killed")),
        ],
        Phase.IDLE,
    ),
    (
        "stopping: gone, start failed for now",
        [*STARTING, start_failed()],
        gone(failure(2)),
        [told_ended(7, failure(2), exit_code=1, ran=0.0)],
        Phase.IDLE,
    ),
    (
        "stopping: gone, start failed for good",
        [*STARTING, start_failed(permanent=True)],
        gone(failure(2)),
        [told_ended(7, failure(2), exit_code=127, ran=0.0, **HOPELESS)],
        Phase.IDLE,
    ),
    (
        "stopping: gone before this node has left",
        [*RUNNING, STOP],
        gone(),
        [],
        Phase.LEAVING,
    ),
    ("stopping: gone, has left", [*RUNNING, STOP, Left()], gone(), [STOPPED], Phase.DONE),
    (
        "stopping: gone, failed and stopped",
        [*FAILING, STOP, Left()],
        gone(failure(2)),
        [attempt_failed(7, failure(2)), STOPPED],
        Phase.DONE,
    ),
    ("stopping: left", [*RUNNING, STOP], Left(), [], Phase.STOPPING),
    # ---------------------------------------------------------------- barrier
    (
        "barrier: begin",
        BARRIER,
        begin(8, CHANGE),
        [changed(), formed(8), StopWaiting(), start(8)],
        Phase.STARTING,
    ),
    ("barrier: halt", BARRIER, halt(7), [StopWaiting(), Tell(Ended(7))], Phase.IDLE),
    ("barrier: elapsed", BARRIER, BarrierElapsed(7), [Leave(NOT_AWAITED.why)], Phase.LEAVING),
    ("barrier: elapsed late", BARRIER, BarrierElapsed(6), [], Phase.BARRIER),
    ("barrier: stop asked", BARRIER, STOP, [StopWaiting(), Leave(CUT_SHORT.why)], Phase.LEAVING),
    (
        "barrier: conclude",
        BARRIER,
        GOOD_END,
        [StopWaiting(), Leave(FINISHED)],
        Phase.LEAVING,
    ),
    # ---------------------------------------------------------------- leaving
    ("leaving: left after a stop", [*JOINED, STOP], Left(), [STOPPED], Phase.DONE),
    (
        "leaving: left after a success that was stopped",
        [*ALL_DONE, STOP, gone()],
        Left(),
        [Finish(JobState.SUCCEEDED, FINISHED, 0, 0)],
        Phase.DONE,
    ),
    ("leaving: left, cut short", [*BARRIER, STOP], Left(), [CUT_SHORT], Phase.DONE),
    (
        "leaving: left, elapsed",
        [*BARRIER, BarrierElapsed(7)],
        Left(),
        [NOT_AWAITED],
        Phase.DONE,
    ),
    (
        "leaving: left after a good end",
        [*BARRIER, GOOD_END],
        Left(),
        [Finish(JobState.SUCCEEDED, FINISHED, 0, 1)],
        Phase.DONE,
    ),
    (
        "leaving: left after a failure elsewhere",
        [*RUNNING, CONCLUDE, gone()],
        Left(),
        [attempt_failed(7, failure(9, host="b")), CONCLUDED],
        Phase.DONE,
    ),
    (
        "leaving: left, without any attempt",
        [*JOINED, CONCLUDE],
        Left(),
        [attempt_failed(0, failure(9, host="b")), CONCLUDED],
        Phase.DONE,
    ),
    ("leaving: begin", [*JOINED, STOP], begin(7), [], Phase.LEAVING),
    ("leaving: conclude", [*JOINED, STOP], CONCLUDE, [], Phase.LEAVING),
    ("leaving: a second stop", [*JOINED, STOP], SIGNAL, [], Phase.LEAVING),
]


@pytest.mark.parametrize(
    ("before", "happening", "effects", "phase"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_each_row_of_the_table(
    before: list[Happening], happening: Happening, effects: list[Effect], phase: Phase
) -> None:
    """Phase and happening give the next phase and the effects, in their order."""
    one = machine(*before)
    assert one.handle(happening) == effects
    assert one.phase is phase


def test_a_join_that_fails_ends_the_job_with_its_error() -> None:
    """The callers get the error itself, so that it stays one clear line."""
    error = SurroundingsError("no port")
    one = machine(Begun(), JoinFailed(error))
    (finish,) = one.handle(Left())
    assert isinstance(finish, Finish)
    assert (finish.state, finish.why, finish.exit_code) == (JobState.FAILED, "no port", 1)
    assert finish.error is error


def test_a_rendezvous_that_failed_is_told_as_such() -> None:
    """What kind of end it was goes to the callers, and no attempt has failed."""
    ending = Ending(JobState.FAILED, "only 1 of 2 nodes", 75, is_rendezvous=True)
    one = machine(Begun(), Instructed(Conclude(ending)))
    assert one.handle(Left()) == [
        Finish(JobState.FAILED, "only 1 of 2 nodes", 75, 0, is_rendezvous=True)
    ]


def test_failures_of_our_own_are_not_cut() -> None:
    """What other nodes were told may be shortened; here the whole of it is shown."""
    ours, theirs = failure(2, tail="all of it"), failure(9, host="b")
    ending = Ending(JobState.FAILED, "no restarts", 7, 0, (failure(2), theirs))
    one = machine(*FAILING, gone(ours, failure(3)), Instructed(Conclude(ending)))
    told, finish = one.handle(Left())
    assert told == attempt_failed(7, ours, theirs, failure(3))
    assert isinstance(finish, Finish)
    assert finish.failures == (ours, theirs, failure(3))


def test_an_attempt_fails_once_for_the_readers() -> None:
    """A pause has told it, so neither the next round nor the end tells it again."""
    one = machine(*IDLE, Instructed(Pause(FAILED_THERE)))
    assert one.handle(Instructed(Pause(FAILED_THERE))) == []
    one.handle(CONCLUDE)
    assert one.handle(Left()) == [
        Finish(ENDING.state, ENDING.why, 9, 3, failures=(*ENDING.failures, failure(2)))
    ]


def test_the_restarts_of_the_last_placement_are_told() -> None:
    """A node that ends by itself knows how often the job was restarted."""
    one = machine(*IDLE, begin(8, FAILED_THERE, 1), STOP, Left())
    (finish,) = one.handle(gone(attempt=8))
    assert isinstance(finish, Finish)
    assert finish.restarts == 1


def test_the_second_round_is_like_the_first() -> None:
    """Successes and failures of a former round do not count for the next one."""
    one = machine(*RUNNING, ended(0), ended(1, BAD), gone(failure(2)), begin(8, FAILED_THERE, 1))
    one.handle(GroupStarted(8, 30.0))
    assert one.handle(ended(1, attempt=8)) == []
    assert one.handle(ended(0, attempt=8)) == [StopGroup(8, PLAN, FINISHED, None, True)]
    assert one.handle(gone(attempt=8)) == [Tell(Succeeded(8)), StartBarrier(8, BARRIER_S)]


LATE: list[Happening] = [
    GroupStarted(6, 50.0),
    StartFailed(6, "no", True, 127, 0),
    ended(0, attempt=6),
    ended(1, BAD, attempt=6),
    gone(failure(), attempt=6),
    BarrierElapsed(6),
    gone(attempt=9),
    DelayElapsed(7),  # not of this policy at all
    BarrierElapsed(7),  # given up
]


@pytest.mark.parametrize("late", LATE, ids=lambda late: f"{type(late).__name__} {late.attempt}")
@pytest.mark.parametrize("before", [STARTING, RUNNING, FAILING], ids=["starting", "running", "end"])
def test_a_late_answer_changes_nothing(late: Happening, before: list[Happening]) -> None:
    """What belongs to another attempt is dropped, in every phase."""
    one = machine(*before)
    shown = repr(one)
    assert one.handle(late) == []
    assert repr(one) == shown


@pytest.mark.parametrize("before", [STARTING, RUNNING, BARRIER], ids=["start", "run", "barrier"])
def test_a_group_does_not_vanish_by_itself(before: list[Happening]) -> None:
    """The end of a group that nobody stopped is our own bug."""
    one = machine(*before)
    with pytest.raises(InternalError, match="the end of a group cannot happen in <MemberMachine"):
        one.handle(gone())


def test_a_job_begins_once() -> None:
    """A second beginning is our own bug, and the message tells the story."""
    with pytest.raises(InternalError, match=r"please report: new: Begun\(\); "):
        machine(Begun(), Begun())


def test_a_machine_tells_where_it_is() -> None:
    """The repr names phase, attempt and round."""
    assert repr(machine(*RUNNING)) == "<MemberMachine running, attempt 7, round 7>"


# -------------------------------------------------------------- any story that can be told


class Members(RuleBasedStateMachine):
    """The shell's and the rendezvous' part, played by chance."""

    @initialize(nproc=st.integers(1, 3))
    def begin(self, nproc: int) -> None:
        self.nproc = nproc
        self.machine = machine(nproc=nproc)
        self.now = 0.0
        self.live: int | None = None  # attempt of the group that exists
        self.live_round = -1
        self.spawning = self.stopping = False
        self.running: set[int] = set()
        self.failures: list[Failure] = []
        self.barrier: int | None = None
        self.joined = self.leaving = self.left = False
        self.newest = -1  # round of the newest instruction
        self.owed: int | None = None  # round of the newest Begin or Halt without an answer
        self.started: list[int] = []
        self.reports: list[Any] = []
        self.finishes: list[Finish] = []
        self.failing_told: set[int] = set()
        self.ending: Ending | None = None
        self.stop_asked = False
        self.perform(self.machine.handle(Begun()))

    def handle(self, happening: Happening) -> None:
        self.perform(self.machine.handle(happening))

    def perform(self, effects: list[Effect]) -> None:
        for position, effect in enumerate(effects):
            assert not self.finishes, "nothing comes after the end"
            match effect:
                case Join():
                    assert not self.joined
                    self.joined = True
                case StartGroup(attempt, restarts, place):
                    assert self.live is None, "never two groups at once"
                    assert self.barrier is None
                    assert not self.leaving, "whoever leaves starts nothing"
                    assert place is not None
                    assert place.round == self.newest, "only the newest round is begun"
                    assert (place.attempt, place.restarts) == (attempt, restarts)
                    assert all(attempt > former for former in self.started)
                    self.started.append(attempt)
                    self.live, self.live_round = attempt, place.round
                    self.spawning, self.stopping = True, False
                    self.running, self.failures = set(), []
                case StopGroup(attempt):
                    assert attempt == self.live
                    assert not self.stopping, "a group is stopped once"
                    self.stopping = True
                case StartBarrier(attempt):
                    assert self.live is None
                    assert self.barrier is None
                    self.barrier = attempt
                case StopWaiting():
                    assert self.barrier is not None
                    self.barrier = None
                case Tell(report):
                    self.check_report(report)
                case Leave():
                    assert self.joined
                    assert not self.leaving, "a node leaves once"
                    self.leaving = True
                case Publish(AttemptFailed() as event):
                    assert event.root == event.failures[0]
                case Finish():
                    assert position == len(effects) - 1
                    assert self.live is None, "the end comes when nothing is left"
                    assert self.barrier is None
                    assert self.left, "the end comes when this node has left"
                    self.finishes.append(effect)

    def check_report(self, report: Any) -> None:
        assert not self.leaving, "whoever has left says nothing"
        assert report.round <= self.newest
        self.reports.append(report)
        match report:
            case Failing():
                assert report.round == self.live_round
                assert report.round not in self.failing_told
                self.failing_told.add(report.round)
            case Running():
                assert report.round == self.live_round
            case Ended() | Succeeded():
                assert self.live is None, "it is told when nothing is left"
                if report.round == self.live_round:
                    expected = tuple(self.failures) if isinstance(report, Ended) else ()
                    assert getattr(report, "failures", ()) == expected, "no failure is lost"
        if report.round == self.owed:
            self.owed = None

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
        self.failures.append(failure(len(self.running), code=1))
        self.handle(StartFailed(self.live, "cannot run x: no", permanent, 1, 0))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from([OK, OK, BAD, ExitStatus(signal=9)]))
    def a_worker_ends(self, data: st.DataObject, status: ExitStatus) -> None:
        assert self.live is not None
        rank = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(rank)
        if not status.is_success and not self.stopping:
            self.failures.append(failure(rank))
        self.handle(WorkerEnded(self.live, rank, status, is_victim=self.stopping))

    @precondition(lambda self: self.stopping and not self.spawning)
    @rule(survivors=st.sampled_from([False, False, False, True]))
    def the_group_is_gone(self, survivors: bool) -> None:
        assert self.live is not None
        attempt, self.live, self.stopping = self.live, None, False
        self.running = set()
        self.now += 1
        self.handle(GroupGone(attempt, self.now, tuple(self.failures), survivors))

    @precondition(lambda self: self.barrier is not None)
    @rule()
    def the_barrier_elapses(self) -> None:
        assert self.barrier is not None
        attempt, self.barrier = self.barrier, None
        self.handle(BarrierElapsed(attempt))

    @precondition(lambda self: self.leaving and not self.left)
    @rule()
    def it_has_left(self) -> None:
        self.left = True
        self.handle(Left())

    @rule(jump=st.integers(-1, 3), kind=st.sampled_from(["none", "change", "failure"]))
    def a_round_begins(self, jump: int, kind: str) -> None:
        number = max(0, self.newest + jump)
        cause = {"none": None, "change": CHANGE, "failure": FAILED_THERE}[kind]
        counts = number > self.newest and not self.stop_asked
        self.instruct(number, counts, Begin(placement(number), cause))

    @rule(jump=st.integers(-1, 2))
    def a_round_is_halted(self, jump: int) -> None:
        number = max(0, self.newest + jump)
        answered = max((one.round for one in self.reports if isinstance(one, Ended)), default=-1)
        counts = number >= self.newest and number > answered
        self.instruct(number, counts, Halt(number, "halt"))

    def instruct(self, number: int, counts: bool, instruction: Instruction) -> None:
        if counts and not self.leaving:
            self.newest = self.owed = number
        self.handle(Instructed(instruction))

    @rule()
    def there_is_a_pause(self) -> None:
        self.handle(Instructed(Pause(FAILED_THERE)))

    @rule()
    def the_job_is_concluded(self) -> None:
        if not self.leaving and self.ending is None:
            self.ending = ENDING
        self.handle(CONCLUDE)

    @rule(signal=st.sampled_from([None, 2, 15]))
    def somebody_asks_to_stop(self, signal: int | None) -> None:
        self.stop_asked = True
        self.handle(StopAsked("enough", signal))

    @rule(
        make=st.sampled_from(
            [
                lambda attempt: GroupStarted(attempt, 99.0),
                lambda attempt: ended(0, BAD, attempt=attempt),
                lambda attempt: ended(0, attempt=attempt),
                lambda attempt: gone(failure(), attempt=attempt),
                lambda attempt: BarrierElapsed(attempt),
            ]
        ),
        age=st.integers(1, 3),
    )
    def a_late_answer_comes(self, make: Callable[[int], Happening], age: int) -> None:
        before = repr(self.machine)
        assert self.machine.handle(make(self.machine.attempt - age)) == []
        assert repr(self.machine) == before

    @invariant()
    def the_end_comes_once(self) -> None:
        assert len(self.finishes) <= 1
        assert bool(self.finishes) == (self.machine.phase is Phase.DONE)

    @invariant()
    def every_instruction_is_answered(self) -> None:
        """Who neither runs nor waits nor leaves owes the rendezvous no answer."""
        if self.live is None and not self.leaving:
            assert self.owed is None

    @invariant()
    def a_failure_is_told_at_once(self) -> None:
        if self.failures and self.live is not None and not self.leaving and not self.stopping:
            raise AssertionError("a failure stops the group")

    @invariant()
    def something_is_always_under_way(self) -> None:
        """A stop or a conclusion ends it: nothing is waited for but what is being done."""
        if self.leaving and not self.finishes:
            assert not self.left or self.stopping
        if self.stop_asked and not self.finishes:
            assert self.leaving or self.stopping

    @invariant()
    def the_result_fits(self) -> None:
        for finish in self.finishes:
            assert (finish.exit_code == 0) == (finish.state is JobState.SUCCEEDED)
            if finish.state is JobState.STOPPED:
                assert self.stop_asked
            if finish.state is JobState.FAILED:
                assert self.ending is not None
                assert finish.exit_code == self.ending.exit_code
                assert finish.failures[: len(self.ending.failures)] == self.ending.failures


Members.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestMembers = Members.TestCase
