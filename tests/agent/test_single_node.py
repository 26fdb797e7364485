"""The state machine of one node: every row of its table, and random sequences of inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from elastic_aio.agent.machine import AgentPhase as P
from elastic_aio.agent.machine import (
    BackOff,
    BackoffElapsed,
    CallDecide,
    CancelBackOff,
    DecisionFailed,
    DecisionMade,
    Effect,
    ExclusionReceived,
    Finish,
    GroupStarted,
    GroupStopped,
    Input,
    PreemptionReceived,
    ProgressMade,
    Publish,
    RestartReceived,
    ShowChange,
    SingleNodeMachine,
    Start,
    StartFailed,
    StartGroup,
    StopGroup,
    StopReceived,
    WorkerEnded,
    WorkerHung,
    WorkersAgreed,
)
from elastic_aio.errors import InternalError
from elastic_aio.events import AttemptFailed, PreemptionNotice, Restarting
from elastic_aio.outcome import (
    PREEMPTION_CHANGE,
    ExitStatus,
    Failure,
    JobOutcome,
    JobState,
    WorkerError,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.restart import CAUSE_S, Backoff, RestartAction, RestartPolicy
from elastic_aio.spec.stop import PreemptionSpec, StopPlan, StopStep
from tests.support.restarts import at_once
from tests.support.simulated_driver import SimulatedDriver

PLAN = StopPlan((StopStep(2, 5.0), StopStep(15, 3.0)))
OK = ExitStatus(code=0)
BAD = ExitStatus(code=7)
QUITTED = ExitStatus(signal=3)


def never_called(_: Failure) -> RestartAction:
    raise AssertionError("the state machine calls it by an effect")


def machine(
    *happenings: Input, nproc: int = 2, share: float = 1.0, **options: Any
) -> SingleNodeMachine:
    """Return a state machine that has handled these inputs."""
    one = SingleNodeMachine(
        LaunchSpec(["x"], nproc_per_node=nproc, stop=PLAN, **options), nproc, lambda: share
    )
    for happening in happenings:
        one.handle(happening)
    return one


def failure(code: int = 7, *, signal: int | None = None, local_rank: int = 0) -> Failure:
    status = ExitStatus(signal=signal) if signal else ExitStatus(code=code)
    return Failure(
        rank=local_rank, local_rank=local_rank, pid=1, host="h", status=status, time=1.0, order=0
    )


def ended(local_rank: int, status: ExitStatus = OK, attempt: int = 0) -> WorkerEnded:
    return WorkerEnded(attempt, local_rank, status, is_victim=False)


def lost_peer(local_rank: int) -> WorkerEnded:
    return WorkerEnded(0, local_rank, BAD, is_victim=False, is_lost_peer=True)


def group_stopped(*failures: Failure, attempt: int = 0, at: float = 20.0) -> GroupStopped:
    return GroupStopped(attempt, at, failures)


def start_failed(*, permanent: bool = False, attempt: int = 0) -> StartFailed:
    return StartFailed(attempt, "cannot run x: no", permanent, 127 if permanent else 1, 1)


STARTED = GroupStarted(0, 10.0)
STOP = StopReceived("enough")
AGAIN = RestartReceived("new data")
SIGNAL = StopReceived("SIGQUIT was received", 3)
ONE_MORE: dict[str, Any] = {"max_restarts": 1}
LATER: dict[str, Any] = {
    "max_restarts": 3,
    "restart": RestartPolicy(backoff=Backoff(initial=4, factor=2, jitter=False)),
}
USR1: dict[str, Any] = {"preemption": PreemptionSpec(signal=10)}
ASKING: dict[str, Any] = {"max_restarts": 1, "restart": RestartPolicy(decide=never_called)}


def finish_as(*outcome: Any, **more: Any) -> Finish:
    return Finish(JobOutcome(*outcome, **more))


def stop_group(reason: str, signal: int | None = None, *, leftovers: bool = False) -> StopGroup:
    plan = PLAN if signal is None else PLAN.starting_with(signal)
    return StopGroup(0, plan, reason, signal, leftovers)


def published_failure(*failures: Failure) -> Publish:
    return Publish(AttemptFailed(attempt=0, root=failures[0], failures=failures))


def restarting(why: str, delay: float = 0.0) -> Publish:
    return Publish(Restarting(attempt=1, why=why, delay=delay, restarts=1))


FAILED = "local rank 1 failed (exit code 7)"
GRANTED = "restart 1 of 1 (max restarts)"
NO_MORE = "no restarts allowed (max restarts: 0)"
FINISHED = "all workers have finished"

STARTING: list[Input] = [Start()]
RUNNING: list[Input] = [Start(), STARTED]
FAILING: list[Input] = [*RUNNING, ended(1, BAD)]
GONE: list[Input] = [*FAILING, group_stopped(failure())]
SUCCEEDED = finish_as(JobState.SUCCEEDED, FINISHED, 0, 0)
STOPPED = finish_as(JobState.STOPPED, "enough", 143, 0)
QUIT = finish_as(JobState.STOPPED, "SIGQUIT was received", 131, 0)
GIVEN_UP = finish_as(JobState.FAILED, NO_MORE, 7, 0)
NOT_AGAIN = finish_as(JobState.FAILED, "no restart follows: enough", 7, 0)
PUBLISHED = published_failure(failure())
RECORDED = dataclasses.replace(failure(), error=WorkerError("bad batch", None, 1.0, "e"))
LEFTOVERS = stop_group(FINISHED, leftovers=True)
NOTICE = PreemptionReceived("USR1", 99.0, 9.0, 50.0)
SPOT = PreemptionReceived("spot", 95.0, 4.0, 46.0)
SPOTTED = Publish(PreemptionNotice(attempt=0, why="spot", time_left=4.0))
SPOT_SHOWN = ShowChange("spot", 4.0, PREEMPTION_CHANGE, 95.0)
SLOWER = PreemptionReceived("spot", 98.5, 8.5, 49.5)
NOTICED = Publish(PreemptionNotice(attempt=0, why="USR1", time_left=9.0))
SHOWN = ShowChange("USR1", 9.0, PREEMPTION_CHANGE, 99.0)
WARNED: list[Input] = [*RUNNING, NOTICE]
WARNED_LEFTOVERS = stop_group("the job is preempted", leftovers=True)
PREEMPTED = finish_as(JobState.PREEMPTED, "USR1", 85, 0)

Row = tuple[list[Input], Input, list[Effect], P, dict[str, Any]]


def case(
    before: list[Input],
    happening: Input,
    effects: list[Effect],
    phase: P,
    options: dict[str, Any] | None = None,
) -> Row:
    """Return a case: what an input after others has as its effects, and the phase after that."""
    return before, happening, effects, phase, options or {}


ROWS: dict[str, Row] = {
    "new: start": case([], Start(), [StartGroup(0, 0)], P.STARTING),
    "new: a stop is received": case([], STOP, [STOPPED], P.DONE),
    "starting: group started": case(STARTING, STARTED, [], P.RUNNING),
    "starting: start failed": case(
        STARTING, start_failed(), [stop_group("cannot run x: no")], P.STOPPING
    ),
    "starting: a success": case(STARTING, ended(0), [], P.STARTING),
    "starting: a failure": case(STARTING, ended(1, BAD), [stop_group(FAILED)], P.STOPPING),
    "starting: group started, all done": case(
        [Start(), ended(0), ended(1)], STARTED, [LEFTOVERS], P.STOPPING
    ),
    "starting: a stop is received": case(STARTING, STOP, [stop_group("enough")], P.STOPPING),
    "running: a success": case(RUNNING, ended(1), [], P.RUNNING),
    "running: the same success again": case([*RUNNING, ended(1)], ended(1), [], P.RUNNING),
    "running: the last success": case([*RUNNING, ended(1)], ended(0), [LEFTOVERS], P.STOPPING),
    "running: a failure": case(RUNNING, ended(1, BAD), [stop_group(FAILED)], P.STOPPING),
    "running: a lost peer": case(RUNNING, lost_peer(0), [BackOff(0, CAUSE_S)], P.RUNNING),
    "running: a lost peer, and its cause": case(
        [*RUNNING, lost_peer(0)], ended(1, BAD), [CancelBackOff(), stop_group(FAILED)], P.STOPPING
    ),
    "running: a lost peer without a cause": case(
        [*RUNNING, lost_peer(1)], BackoffElapsed(0), [stop_group(FAILED)], P.STOPPING
    ),
    "running: only lost peers": case(
        [*RUNNING, lost_peer(1)], lost_peer(0), [CancelBackOff(), stop_group(FAILED)], P.STOPPING
    ),
    "running: the other worker had succeeded before its peer lost it": case(
        [*RUNNING, ended(0)], lost_peer(1), [stop_group(FAILED)], P.STOPPING
    ),
    "running: the other worker succeeds after its peer has lost it": case(
        [*RUNNING, lost_peer(1)], ended(0), [CancelBackOff(), stop_group(FAILED)], P.STOPPING
    ),
    "running: a worker hangs while the cause of a lost peer is awaited": case(
        [*RUNNING, lost_peer(0)],
        WorkerHung(0, 1, "no heartbeat"),
        [CancelBackOff(), stop_group("local rank 1: no heartbeat")],
        P.STOPPING,
    ),
    "running: a stop is received while the cause of a lost peer is awaited": case(
        [*RUNNING, lost_peer(0)], STOP, [CancelBackOff(), stop_group("enough")], P.STOPPING
    ),
    "starting: a lost peer, and the others start": case(
        [Start(), lost_peer(0)], STARTED, [], P.RUNNING
    ),
    "stopping: stopped, failed by the signal that was received then": case(
        [*RUNNING, ended(1, QUITTED), SIGNAL], group_stopped(failure(131)), [QUIT], P.DONE
    ),
    "stopping: stopped, failed by the signal, and another worker by itself": case(
        [*RUNNING, ended(1, QUITTED), SIGNAL],
        group_stopped(failure(131), failure(local_rank=1)),
        [
            published_failure(failure(131), failure(local_rank=1)),
            finish_as(JobState.FAILED, NO_MORE, 131, 0),
        ],
        P.DONE,
    ),
    "stopping: stopped, failed by another signal than the one received then": case(
        [*RUNNING, ended(1, BAD), SIGNAL],
        group_stopped(failure(signal=9)),
        [published_failure(failure(signal=9)), finish_as(JobState.FAILED, NO_MORE, 137, 0)],
        P.DONE,
    ),
    "stopping: stopped, failed after a stop": case(
        [*RUNNING, STOP, ended(1, BAD)], group_stopped(failure()), [STOPPED], P.DONE
    ),
    "stopping: stopped, an error was recorded before a stop": case(
        [*RUNNING, STOP, ended(1, BAD)],
        group_stopped(RECORDED),
        [published_failure(RECORDED), GIVEN_UP],
        P.DONE,
    ),
    "stopping: stopped, failed by the signal of a notice that followed": case(
        [*RUNNING, ended(1, ExitStatus(signal=10)), NOTICE],
        group_stopped(failure(signal=10)),
        [PREEMPTED],
        P.DONE,
        USR1,
    ),
    "stopping: stopped, failed before a notice by a signal": case(
        [*RUNNING, ended(1, BAD), NOTICE],
        group_stopped(failure()),
        [PUBLISHED, GIVEN_UP],
        P.DONE,
        USR1,
    ),
    "running: a worker hangs": case(
        RUNNING,
        WorkerHung(0, 1, "no heartbeat"),
        [stop_group("local rank 1: no heartbeat")],
        P.STOPPING,
    ),
    "stopping: a worker hangs": case(FAILING, WorkerHung(0, 1, "no heartbeat"), [], P.STOPPING),
    "running: a failure by signal": case(
        RUNNING,
        ended(0, ExitStatus(signal=9)),
        [stop_group("local rank 0 failed (killed by SIGKILL)")],
        P.STOPPING,
    ),
    "running: a lost status": case(
        RUNNING,
        ended(0, ExitStatus()),
        [stop_group("local rank 0 failed (exit status lost)")],
        P.STOPPING,
    ),
    "running: a stop is received": case(RUNNING, STOP, [stop_group("enough")], P.STOPPING),
    "running: a signal": case(RUNNING, SIGNAL, [stop_group("SIGQUIT was received", 3)], P.STOPPING),
    "stopping: another failure": case(FAILING, ended(0, BAD), [], P.STOPPING),
    "stopping: a stop is received": case(FAILING, STOP, [], P.STOPPING),
    "stopping: started late": case([Start(), ended(1, BAD)], STARTED, [], P.STOPPING),
    "stopping: stopped, all succeeded": case(
        [*RUNNING, ended(0), ended(1)], group_stopped(), [SUCCEEDED], P.DONE
    ),
    "stopping: stopped, all succeeded although a stop was received": case(
        [*RUNNING, ended(0), ended(1), STOP], group_stopped(), [SUCCEEDED], P.DONE
    ),
    "stopping: stopped, a stop is received": case(
        [*RUNNING, STOP], group_stopped(), [STOPPED], P.DONE, ONE_MORE
    ),
    "stopping: stopped, signal received": case(
        [*RUNNING, SIGNAL], group_stopped(), [QUIT], P.DONE, ONE_MORE
    ),
    "stopping: stopped, failed, no restarts": case(
        FAILING,
        group_stopped(failure(3), failure(5)),
        [published_failure(failure(3), failure(5)), finish_as(JobState.FAILED, NO_MORE, 3, 0)],
        P.DONE,
    ),
    "stopping: stopped, killed, no restarts": case(
        FAILING,
        group_stopped(failure(signal=9)),
        [published_failure(failure(signal=9)), finish_as(JobState.FAILED, NO_MORE, 137, 0)],
        P.DONE,
    ),
    "stopping: stopped, failed, restart at once": case(
        FAILING,
        group_stopped(failure()),
        [PUBLISHED, restarting(GRANTED), StartGroup(1, 1)],
        P.STARTING,
        ONE_MORE,
    ),
    "stopping: stopped, failed, restart later": case(
        FAILING,
        group_stopped(failure()),
        [PUBLISHED, restarting("restart 1 of 3 (max restarts)", 4.0), BackOff(1, 4.0)],
        P.BACKING_OFF,
        LATER,
    ),
    "stopping: stopped, failed, callback": case(
        FAILING, group_stopped(failure()), [PUBLISHED, CallDecide(0, failure())], P.DECIDING, ASKING
    ),
    "stopping: stopped, failed, no restart after a stop": case(
        [*RUNNING, ended(1, BAD), STOP],
        group_stopped(failure()),
        [PUBLISHED, NOT_AGAIN],
        P.DONE,
        ONE_MORE,
    ),
    "stopping: stopped, failed, the callback is not asked after a stop": case(
        [*RUNNING, ended(1, BAD), STOP],
        group_stopped(failure()),
        [PUBLISHED, NOT_AGAIN],
        P.DONE,
        ASKING,
    ),
    "stopping: stopped, failed, no restart that a stop could prevent": case(
        [*RUNNING, ended(1, BAD), STOP], group_stopped(failure()), [PUBLISHED, GIVEN_UP], P.DONE
    ),
    "stopping: stopped, start failed for good": case(
        [Start(), start_failed(permanent=True)],
        group_stopped(failure(1)),
        [
            published_failure(failure(1)),
            finish_as(JobState.FAILED, "another attempt could not start it either", 127, 0),
        ],
        P.DONE,
        ONE_MORE,
    ),
    "stopping: stopped, start failed for now": case(
        [Start(), start_failed()],
        group_stopped(failure(1)),
        [published_failure(failure(1)), restarting(GRANTED), StartGroup(1, 1)],
        P.STARTING,
        ONE_MORE,
    ),
    "deciding: restart": case(
        GONE,
        DecisionMade(0, RestartAction.RESTART),
        [restarting(f"{GRANTED}, restart.decide returned RESTART"), StartGroup(1, 1)],
        P.STARTING,
        ASKING,
    ),
    "deciding: default": case(
        GONE,
        DecisionMade(0, RestartAction.DEFAULT),
        [restarting(GRANTED), StartGroup(1, 1)],
        P.STARTING,
        ASKING,
    ),
    "deciding: give up": case(
        GONE,
        DecisionMade(0, RestartAction.GIVE_UP),
        [finish_as(JobState.FAILED, "restart.decide returned GIVE_UP", 7, 0)],
        P.DONE,
        ASKING,
    ),
    "deciding: a stop is received": case(GONE, STOP, [CancelBackOff(), NOT_AGAIN], P.DONE, ASKING),
    "backing off: elapsed": case(GONE, BackoffElapsed(1), [StartGroup(1, 1)], P.STARTING, LATER),
    "backing off: a stop is received": case(
        GONE, STOP, [CancelBackOff(), finish_as(JobState.STOPPED, "enough", 143, 1)], P.DONE, LATER
    ),
    "starting: a notice": case(STARTING, NOTICE, [NOTICED, BackOff(0, 9.0)], P.STARTING),
    "starting: a notice, and all have started": case(
        [*STARTING, NOTICE], STARTED, [SHOWN], P.RUNNING
    ),
    "starting: a notice, and the start fails": case(
        [*STARTING, NOTICE],
        start_failed(),
        [CancelBackOff(), stop_group("cannot run x: no")],
        P.STOPPING,
    ),
    "running: a notice": case(RUNNING, NOTICE, [NOTICED, SHOWN, BackOff(0, 9.0)], P.RUNNING),
    "running: a notice while the cause of a lost peer is awaited": case(
        [*RUNNING, lost_peer(0)],
        NOTICE,
        [CancelBackOff(), NOTICED, SHOWN, BackOff(0, 9.0)],
        P.RUNNING,
    ),
    "running after a notice: another one": case(WARNED, NOTICE, [], P.RUNNING),
    "running after a notice: another one, hardly earlier": case(WARNED, SLOWER, [], P.RUNNING),
    "running after a notice: an earlier one": case(
        WARNED, SPOT, [CancelBackOff(), SPOTTED, SPOT_SHOWN, BackOff(0, 4.0)], P.RUNNING
    ),
    "running after an earlier notice: the first one again": case(
        [*WARNED, SPOT], NOTICE, [], P.RUNNING
    ),
    "running after an earlier notice: all have ended": case(
        [*WARNED, SPOT, ended(0), ended(1)],
        group_stopped(),
        [finish_as(JobState.PREEMPTED, "spot", 85, 0)],
        P.DONE,
    ),
    "starting after a notice: an earlier one": case(
        [*STARTING, NOTICE], SPOT, [CancelBackOff(), SPOTTED, BackOff(0, 4.0)], P.STARTING
    ),
    "starting after two notices: all have started": case(
        [*STARTING, NOTICE, SPOT], STARTED, [SPOT_SHOWN], P.RUNNING
    ),
    "stopping after a notice: an earlier one": case(
        [*WARNED, BackoffElapsed(0)], SPOT, [SPOTTED], P.STOPPING
    ),
    "stopping after a notice and a stop: an earlier notice": case(
        [*WARNED, STOP], SPOT, [], P.STOPPING
    ),
    "running after a notice: a restart is requested": case(WARNED, AGAIN, [], P.RUNNING),
    "running after a notice: a failure": case(WARNED, ended(1, BAD), [], P.RUNNING),
    "running after a notice: a worker hangs": case(
        WARNED, WorkerHung(0, 1, "no heartbeat"), [], P.RUNNING
    ),
    "running after a notice: a failure, and the last success": case(
        [*WARNED, ended(1, BAD)], ended(0), [CancelBackOff(), WARNED_LEFTOVERS], P.STOPPING
    ),
    "running after a notice: a success, and the last failure": case(
        [*WARNED, ended(1)], ended(0, BAD), [CancelBackOff(), WARNED_LEFTOVERS], P.STOPPING
    ),
    "running after a lost peer and a notice: the last success": case(
        [*RUNNING, lost_peer(0), NOTICE],
        ended(1),
        [CancelBackOff(), WARNED_LEFTOVERS],
        P.STOPPING,
    ),
    "running after a notice: the deadline": case(
        [*WARNED, ended(1)], BackoffElapsed(0), [stop_group("the job is preempted")], P.STOPPING
    ),
    "running after a notice: all agree": case(
        WARNED,
        WorkersAgreed(0, PREEMPTION_CHANGE),
        [CancelBackOff(), stop_group("all workers agree to the preemption")],
        P.STOPPING,
    ),
    "running after a notice: an agreement to another change": case(
        WARNED, WorkersAgreed(0, 3), [], P.RUNNING
    ),
    "running: an agreement to nothing": case(
        RUNNING, WorkersAgreed(0, PREEMPTION_CHANGE), [], P.RUNNING
    ),
    "running after a notice: a stop is received": case(
        WARNED, SIGNAL, [CancelBackOff(), stop_group("SIGQUIT was received", 3)], P.STOPPING
    ),
    "stopping after a notice: stopped": case(
        [*WARNED, ended(1, BAD), ended(0)], group_stopped(failure()), [PREEMPTED], P.DONE, ONE_MORE
    ),
    "stopping after a notice: stopped, all succeeded": case(
        [*WARNED, ended(1), ended(0)], group_stopped(), [PREEMPTED], P.DONE
    ),
    "stopping after a notice and a stop: stopped": case(
        [*WARNED, STOP], group_stopped(), [PREEMPTED], P.DONE
    ),
    "stopping: a notice": case(FAILING, NOTICE, [NOTICED], P.STOPPING, ONE_MORE),
    "stopping, and then a notice: stopped, a restart was left": case(
        [*FAILING, NOTICE], group_stopped(failure()), [PUBLISHED, PREEMPTED], P.DONE, ONE_MORE
    ),
    "stopping, and then a notice: stopped, the callback is not asked": case(
        [*FAILING, NOTICE], group_stopped(failure()), [PUBLISHED, PREEMPTED], P.DONE, ASKING
    ),
    "stopping, and then a notice: stopped, no restart was left": case(
        [*FAILING, NOTICE], group_stopped(failure()), [PUBLISHED, GIVEN_UP], P.DONE
    ),
    "stopping after success, and then a notice: stopped": case(
        [*RUNNING, ended(0), ended(1), NOTICE], group_stopped(), [SUCCEEDED], P.DONE
    ),
    "stopping for a requested restart, and then a notice: stopped": case(
        [*RUNNING, AGAIN, NOTICE], group_stopped(), [PREEMPTED], P.DONE
    ),
    "stopping after a stop: a notice": case([*RUNNING, STOP], NOTICE, [], P.STOPPING),
    "deciding: a notice": case(GONE, NOTICE, [NOTICED, CancelBackOff(), PREEMPTED], P.DONE, ASKING),
    "backing off: a notice": case(
        GONE,
        NOTICE,
        [
            Publish(PreemptionNotice(attempt=1, why="USR1", time_left=9.0)),
            CancelBackOff(),
            finish_as(JobState.PREEMPTED, "USR1", 85, 1),
        ],
        P.DONE,
        LATER,
    ),
    "starting: a restart is requested": case(STARTING, AGAIN, [stop_group("new data")], P.STOPPING),
    "stopping for a requested restart: group stopped": case(
        [*RUNNING, AGAIN],
        group_stopped(),
        [Publish(Restarting(attempt=1, why="new data", delay=0.0, restarts=0)), StartGroup(1, 0)],
        P.STARTING,
    ),
    "stopping for a requested restart: a worker has failed by itself": case(
        [*RUNNING, AGAIN], group_stopped(failure()), [PUBLISHED, GIVEN_UP], P.DONE
    ),
    "stopping for a requested restart: a process could not be killed": case(
        [*RUNNING, AGAIN],
        GroupStopped(0, 20.0, (), has_survivors=True),
        [finish_as(JobState.FAILED, "a process could not be killed", 1, 0)],
        P.DONE,
    ),
    "stopping for a requested restart, and then a stop: group stopped": case(
        [*RUNNING, AGAIN, STOP], group_stopped(), [STOPPED], P.DONE
    ),
    "stopping: a restart is requested": case(FAILING, AGAIN, [], P.STOPPING, ONE_MORE),
    "stopping after success: a restart is requested": case(
        [*RUNNING, ended(0), ended(1), AGAIN], group_stopped(), [SUCCEEDED], P.DONE
    ),
    "deciding: a restart is requested": case(GONE, AGAIN, [], P.DECIDING, ASKING),
    "backing off: a restart is requested": case(
        GONE, AGAIN, [CancelBackOff(), StartGroup(1, 1)], P.STARTING, LATER
    ),
}


@pytest.mark.parametrize(
    ("before", "happening", "effects", "phase", "options"), ROWS.values(), ids=ROWS
)
def test_each_row_of_the_table(
    before: list[Input], happening: Input, effects: list[Effect], phase: P, options: dict[str, Any]
) -> None:
    """Phase and input give the next phase and the effects, in order."""
    one = machine(*before, **options)
    assert one.handle(happening) == effects
    assert one.phase is phase


def test_a_callback_that_fails_ends_the_job_with_its_error() -> None:
    """The callers get the exception of their callback."""
    error = KeyError("x")
    one = machine(*GONE, **ASKING)
    effects = one.handle(DecisionFailed(0, "restart.decide raised KeyError", error))
    assert effects == [
        Finish(JobOutcome(JobState.FAILED, "restart.decide raised KeyError", 7, 0), error)
    ]
    assert isinstance(effects[0], Finish)
    assert effects[0].error is error
    assert one.phase is P.DONE


def test_a_callback_that_does_not_answer_ends_the_job() -> None:
    one = machine(*GONE, **ASKING)
    why = "restart.decide has not returned within 600 s"
    assert one.handle(DecisionFailed(0, why)) == [finish_as(JobState.FAILED, why, 7, 0)]
    assert one.phase is P.DONE


def test_a_callback_is_not_asked_without_a_choice() -> None:
    """If no restart is left, the job ends without calling it."""
    one = machine(
        Start(),
        STARTED,
        ended(1, BAD),
        group_stopped(failure()),
        DecisionMade(0, RestartAction.RESTART),
        **ASKING,
    )
    one.handle(GroupStarted(1, 30.0))
    one.handle(ended(0, BAD, attempt=1))
    effects = one.handle(group_stopped(failure(), attempt=1, at=40.0))
    assert [type(effect) for effect in effects] == [Publish, Finish]
    assert one.restarts == 1


def test_the_second_attempt_is_like_the_first() -> None:
    """Successes of a former attempt do not count for the next one."""
    one = machine(*RUNNING, ended(0), ended(1, BAD), group_stopped(failure()), **ONE_MORE)
    assert one.attempt == 1
    one.handle(GroupStarted(1, 30.0))
    assert one.handle(ended(1, attempt=1)) == []
    effects = one.handle(ended(0, attempt=1))
    assert effects == [StopGroup(1, PLAN, FINISHED, None, True)]
    assert one.handle(group_stopped(attempt=1)) == [finish_as(JobState.SUCCEEDED, FINISHED, 0, 1)]


LATE: list[Input] = [
    GroupStarted(0, 50.0),
    start_failed(permanent=True),
    ended(0),
    ended(1, BAD),
    group_stopped(failure()),
    group_stopped(),
    DecisionMade(0, RestartAction.GIVE_UP),
    DecisionFailed(0, "it raised", KeyError()),
    BackoffElapsed(0),
    GroupStarted(7, 50.0),
    group_stopped(attempt=7),
]


@pytest.mark.parametrize("late", LATE, ids=lambda late: f"{type(late).__name__} {late.attempt}")
@pytest.mark.parametrize("phase", [P.STARTING, P.RUNNING, P.STOPPING])
def test_a_late_result_changes_nothing(late: Input, phase: P) -> None:
    """A result of another attempt is dropped, in every phase."""
    one = machine(*GONE, max_restarts=2)
    if phase is not P.STARTING:
        one.handle(GroupStarted(1, 30.0))
    if phase is P.STOPPING:
        one.handle(ended(0, BAD, attempt=1))
    assert one.phase is phase
    before = repr(one)
    assert one.handle(late) == []
    assert one.phase is phase
    assert repr(one) == before


@pytest.mark.parametrize("answer", [BackoffElapsed(0), DecisionMade(0, RestartAction.RESTART)])
def test_a_result_that_is_not_awaited_is_dropped(answer: Input) -> None:
    """A delay or callback that was cancelled may still have a result."""
    one = machine(*RUNNING)
    assert one.handle(answer) == []
    assert one.phase is P.RUNNING


@pytest.mark.parametrize(
    "happening",
    [
        Start(),
        STARTED,
        ended(0, BAD),
        group_stopped(failure()),
        STOP,
        DecisionMade(0, RestartAction.RESTART),
    ],
    ids=lambda one: type(one).__name__,
)
def test_after_the_end_there_are_no_effects(happening: Input) -> None:
    """DONE is final."""
    one = machine(STOP)
    assert one.handle(happening) == []
    assert one.phase is P.DONE


def test_a_stop_may_bring_its_own_plan() -> None:
    plan = StopPlan([("SIGINT", 1)])
    (effect,) = machine(*RUNNING).handle(StopReceived("enough", plan=plan))
    assert effect == StopGroup(0, plan, "enough")


def test_a_failure_does_not_end_a_group_that_waits_for_a_stop() -> None:
    """An error of the start does, and so does the last success."""

    def waiting() -> SingleNodeMachine:
        one = SingleNodeMachine(LaunchSpec(["x"], stop=PLAN), 2, float, waits_for_stop=True)
        one.handle(Start())
        return one

    one = waiting()
    assert [one.handle(received) for received in (ended(1, BAD), STARTED, ended(0))] == [[]] * 3
    assert waiting().handle(lost_peer(1)) == []
    assert one.handle(StopReceived("enough")) == [stop_group("enough")]
    assert isinstance(one.handle(group_stopped(failure()))[-1], Finish)
    assert isinstance(waiting().handle(start_failed())[0], StopGroup)
    one = waiting()
    (effect,) = [one.handle(received) for received in (STARTED, ended(1), ended(0))][-1]
    assert effect == stop_group("all workers have finished", leftovers=True)


def test_a_second_stop_changes_nothing() -> None:
    """The first reason and signal are kept."""
    one = machine(*RUNNING, SIGNAL)
    assert one.handle(STOP) == []
    assert one.handle(group_stopped()) == [
        finish_as(JobState.STOPPED, "SIGQUIT was received", 131, 0)
    ]


@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({}, STARTING),
        ({}, RUNNING),
        ({}, FAILING),
        (LATER, GONE),
        (ASKING, GONE),
    ],
    ids=["starting", "running", "stopping", "waiting", "deciding"],
)
def test_a_job_starts_once(options: dict[str, Any], before: list[Input]) -> None:
    """A second start is an internal error, and the message lists the last inputs."""
    one = machine(*before, **options)
    with pytest.raises(InternalError, match=r"please report: new: Start\(\); "):
        one.handle(Start())


@pytest.mark.parametrize("before", [STARTING, RUNNING], ids=["starting", "running"])
def test_a_group_does_not_vanish_by_itself(before: list[Input]) -> None:
    """The end of a group that was not stopped is an internal error."""
    one = machine(*before)
    with pytest.raises(InternalError, match=r"the end of a group cannot happen in <SingleNode"):
        one.handle(group_stopped())


def test_a_repr_shows_phase_and_attempt() -> None:
    """The repr names phase, attempt and budget."""
    one = machine(*RUNNING, max_restarts=3)
    assert (
        repr(one) == "<SingleNodeMachine running, attempt 0, <RestartBudget: 0 of 3 restarts used>>"
    )


EXCLUSION = ExclusionReceived(0, "rank 1: ECC error")
ON_NO_NODE = "the only node of the job is excluded: "


def test_an_excluded_node_runs_no_further_attempt() -> None:
    """There is no other node; the exit code is that of the failure."""
    one = machine(*RUNNING, EXCLUSION, ended(0, BAD), max_restarts=9)
    end = one.handle(group_stopped(failure()))[-1]
    assert end == finish_as(JobState.FAILED, ON_NO_NODE + "rank 1: ECC error", 7)


def test_an_exclusion_alone_ends_nothing() -> None:
    one = machine(*RUNNING, EXCLUSION, ended(0), ended(1), max_restarts=9)
    end = one.handle(group_stopped())[-1]
    assert end == finish_as(JobState.SUCCEEDED, "all workers have finished", 0)


def test_an_exclusion_outlasts_a_requested_restart() -> None:
    """A user may restart the job there, but a failure still ends it."""
    one = machine(*RUNNING, EXCLUSION, AGAIN, group_stopped(), max_restarts=9)
    assert one.attempt == 1
    one.handle(GroupStarted(1, 30.0))
    one.handle(ended(0, BAD, attempt=1))
    end = one.handle(group_stopped(failure(), attempt=1))[-1]
    assert end == finish_as(JobState.FAILED, ON_NO_NODE + "rank 1: ECC error", 7)


def test_decide_excludes_the_only_node() -> None:
    one = machine(*GONE, **ASKING)
    end = one.handle(DecisionMade(0, RestartAction.EXCLUDE))[-1]
    why = ON_NO_NODE + "restart.decide returned EXCLUDE"
    assert end == finish_as(JobState.FAILED, why, 7)


def test_progress_before_a_requested_restart_counts() -> None:
    policy = at_once(max_attempts_without_progress=2)
    one = machine(*RUNNING, ended(0, BAD), group_stopped(failure()), max_restarts=9, restart=policy)
    one.handle(GroupStarted(1, 30.0))
    one.handle(ProgressMade(1))
    one.handle(AGAIN)
    one.handle(group_stopped(attempt=1))
    one.handle(GroupStarted(2, 40.0))
    one.handle(ended(0, BAD, attempt=2))
    one.handle(group_stopped(failure(), attempt=2))
    assert one.attempt == 3


def delay_of(effects: list[Effect]) -> float:
    return next(effect.delay for effect in effects if isinstance(effect, BackOff))


def test_attempts_that_never_started_do_not_count_as_healthy() -> None:
    """The delay grows while workers cannot be started, however long the host is up."""
    policy = RestartPolicy(backoff=Backoff(initial=1, factor=2, jitter=False), healthy_after=10.0)
    one = machine(Start(), max_restarts=9, restart=policy)
    delays = []
    for attempt in range(4):
        one.handle(start_failed(attempt=attempt))
        delays.append(
            delay_of(one.handle(group_stopped(failure(1), attempt=attempt, at=1e6 + attempt)))
        )
        one.handle(BackoffElapsed(attempt + 1))
    assert delays == [1, 2, 4, 8]


def test_a_healthy_attempt_resets_the_delay() -> None:
    """An attempt is healthy if all its workers ran for `healthy_after` seconds."""
    policy = RestartPolicy(backoff=Backoff(initial=1, factor=2, jitter=False), healthy_after=10.0)
    one = machine(Start(), max_restarts=9, restart=policy)
    delays, now = [], 100.0
    for attempt, ran in enumerate([1.0, 1.0, 30.0, 1.0]):
        one.handle(GroupStarted(attempt, now))
        one.handle(ended(0, BAD, attempt=attempt))
        now += ran
        delays.append(delay_of(one.handle(group_stopped(failure(), attempt=attempt, at=now))))
        one.handle(BackoffElapsed(attempt + 1))
    assert delays == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("ran_until", "ready_at", "is_healthy"),
    [(None, None, True), (105.0, None, False), (112.0, None, True), (112.0, 111.0, False)],
)
def test_the_time_of_a_stop_is_no_run_time(
    ran_until: float | None, ready_at: float | None, is_healthy: bool
) -> None:
    """An attempt ran from ready, or its start, to its first failure."""
    policy = RestartPolicy(healthy_after=10.0)
    one = machine(Start(), max_restarts=1, restart=policy)
    for attempt in (0, 1):
        one.handle(GroupStarted(attempt, 100.0))
        one.handle(ended(0, BAD, attempt=attempt))
        gone = GroupStopped(attempt, 150.0, (failure(),), False, None, ran_until, ready_at)
        effects = one.handle(gone)
    assert isinstance(effects[-1], Finish) is not is_healthy


def test_a_window_leaves_the_time_of_stops_out() -> None:
    """Each attempt fails at once, and its stop takes longer than the window."""
    one = machine(Start(), max_restarts=9, restart=RestartPolicy(window=(2, 60), backoff=None))
    for attempt in range(3):
        now = 100.0 * attempt
        one.handle(GroupStarted(attempt, now))
        one.handle(ended(0, BAD, attempt=attempt))
        effects = one.handle(GroupStopped(attempt, now + 99, (failure(),), ran_until=now + 1))
    why = "2 restarts within 60 s (restart window)"
    assert effects[-1] == finish_as(JobState.FAILED, why, 7, 2)


# -------------------------------------------------------------- random sequences of inputs


class Jobs(SimulatedDriver):
    """The policy restarts workers that fail."""

    def failure_of(self, local_rank: int, code: int = 7) -> Failure:
        return failure(code, local_rank=local_rank)

    @initialize(
        nproc=st.integers(1, 3),
        max_restarts=st.integers(0, 3),
        asks=st.booleans(),
        waits=st.booleans(),
    )
    def begin(self, nproc: int, max_restarts: int, asks: bool, waits: bool) -> None:
        self.max_restarts = max_restarts
        may_restart = max_restarts > 0
        policy = RestartPolicy(
            decide=never_called if asks and may_restart else None,
            backoff=Backoff(initial=1, jitter=False) if waits and may_restart else None,
        )
        self.asked: int | None = None
        self.waiting: int | None = None
        self.starts: list[StartGroup] = []
        self.restarts_published = self.requests = 0
        one = machine(nproc=nproc, max_restarts=max_restarts, restart=policy)
        self.begin_with(one, nproc)

    def perform_one(self, effect: Effect) -> None:
        match effect:
            case StartGroup(attempt, restarts):
                assert self.machine.notice is None, "nothing is started after a notice"
                assert attempt == len(self.starts)
                assert restarts == self.machine.restarts
                assert self.asked is None
                assert self.waiting is None
                self.starts.append(effect)
            case CallDecide(attempt):
                assert self.live is None
                self.asked = attempt
            case BackOff(attempt, delay):
                assert self.waiting is None
                assert not self.stopping
                assert delay > 0
                self.waiting = attempt
            case CancelBackOff():
                assert self.asked is not None or self.waiting is not None
                self.asked = self.waiting = None
            case Publish(event):
                if isinstance(event, Restarting):
                    self.restarts_published = event.restarts
        super().perform_one(effect)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        status=st.sampled_from([OK, BAD, ExitStatus(signal=9), ExitStatus()]),
        is_lost_peer=st.booleans(),
    )
    def a_worker_ends(self, data: st.DataObject, status: ExitStatus, is_lost_peer: bool) -> None:
        assert self.live is not None
        rank = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(rank)
        if not status.is_success and not self.stopping:
            self.failures.append(failure(local_rank=rank))
        is_victim = self.stopping
        self.handle(WorkerEnded(self.live, rank, status, is_victim, is_lost_peer and not is_victim))

    @precondition(lambda self: self.asked is not None)
    @rule(action=st.sampled_from(RestartAction))
    def the_callback_answers(self, action: RestartAction) -> None:
        assert self.asked is not None
        attempt, self.asked = self.asked, None
        self.handle(DecisionMade(attempt, action))

    @precondition(lambda self: self.asked is not None)
    @rule()
    def the_callback_fails(self) -> None:
        assert self.asked is not None
        attempt, self.asked = self.asked, None
        self.handle(DecisionFailed(attempt, "it raised", KeyError("x")))

    @precondition(lambda self: self.waiting is not None)
    @rule()
    def the_delay_elapses(self) -> None:
        assert self.waiting is not None
        attempt, self.waiting = self.waiting, None
        self.handle(BackoffElapsed(attempt))

    @rule()
    def a_notice_comes(self) -> None:
        self.handle(NOTICE)

    @precondition(lambda self: self.running)
    @rule(number=st.sampled_from([0, PREEMPTION_CHANGE]))
    def all_workers_agree(self, number: int) -> None:
        assert self.live is not None
        self.handle(WorkersAgreed(self.live, number))

    @rule()
    def a_restart_is_requested(self) -> None:
        self.requests += 1
        self.handle(AGAIN)

    @rule(
        make=st.sampled_from(
            [
                lambda attempt: GroupStarted(attempt, 99.0),
                lambda attempt: start_failed(attempt=attempt),
                lambda attempt: ended(0, BAD, attempt=attempt),
                lambda attempt: ended(0, attempt=attempt),
                lambda attempt: group_stopped(failure(), attempt=attempt),
                lambda attempt: DecisionMade(attempt, RestartAction.RESTART),
                lambda attempt: BackoffElapsed(attempt),
            ]
        ),
        age=st.integers(1, 3),
    )
    def a_late_answer_comes(self, make: Callable[[int], Input], age: int) -> None:
        self.check_late(make(self.machine.attempt - age))

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.machine.restarts <= self.max_restarts
        assert self.restarts_published == self.machine.restarts
        assert len(self.starts) <= self.max_restarts + 1 + self.requests

    @invariant()
    def something_is_always_under_way(self) -> None:
        """Until the end, an effect is in progress: the state machine never hangs."""
        busy = self.live is not None or self.asked is not None or self.waiting is not None
        assert busy != bool(self.finishes)
        if self.live is not None and not self.spawning and not self.running:
            assert self.stopping, "a group without workers is not waited for"
        if self.stop_asked and not self.finishes:
            assert self.stopping, "after a stop nothing goes on but the stopping"

    @invariant()
    def a_notice_leaves_workers_alone(self) -> None:
        """Until all have ended; and it has a deadline."""
        if self.machine.notice is not None and self.live is not None and not self.stopping:
            assert self.waiting == self.live

    @invariant()
    def the_result_fits(self) -> None:
        for finish in self.finishes:
            was_noticed = self.machine.notice is not None
            assert (finish.outcome.state is JobState.PREEMPTED) <= was_noticed
            assert (finish.outcome.state is JobState.STOPPED) <= (not was_noticed)
        assert all(one.outcome.restarts == self.machine.restarts for one in self.finishes)


Jobs.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestJobs = pytest.mark.slow(Jobs.TestCase)
