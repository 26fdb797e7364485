"""The state machine of one node of many: every row of its table, and random inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec.structs import replace

from elastic_aio.agent.machine import AgentPhase as P
from elastic_aio.agent.machine import (
    BackOff,
    BackoffElapsed,
    BarrierTimedOut,
    CancelBackOff,
    Effect,
    ExclusionReceived,
    Finish,
    GroupStarted,
    GroupStopped,
    Input,
    InstructionReceived,
    Join,
    JoinFailed,
    Leave,
    LeftRendezvous,
    NotePeers,
    PreemptionReceived,
    ProgressMade,
    Publish,
    RestartReceived,
    SendReport,
    ShowChange,
    Start,
    StartBarrier,
    StartFailed,
    StartGroup,
    StopGroup,
    StopReceived,
    WorkerEnded,
    WorkerHung,
    WorkersAgreed,
)
from elastic_aio.agent.multi_node import MultiNodeMachine
from elastic_aio.errors import HostError, InternalError
from elastic_aio.events import AttemptFailed, PreemptionNotice, Restarting
from elastic_aio.node_events import MembershipChanged, MembershipPending, RoundFormed
from elastic_aio.outcome import (
    PREEMPTION_CHANGE,
    EndCause,
    ExitStatus,
    Failure,
    JobOutcome,
    JobState,
)
from elastic_aio.ranks import NodeRanks
from elastic_aio.rendezvous.base import (
    CUT_OFF_GRACE,
    ChangeAgreed,
    ChangePending,
    EndJob,
    ExclusionRequested,
    Instruction,
    NodeDraining,
    PeersFinished,
    Placement,
    PreemptionNoticed,
    RestartCause,
    RestartPending,
    RestartRequested,
    RoundFailing,
    RoundProgressed,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StartRound,
    StopRound,
    rendezvous_failure,
)
from elastic_aio.spec.job import LaunchSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import CAUSE_S, RestartPolicy
from elastic_aio.spec.stop import StopPlan, StopStep
from tests.support.simulated_driver import SimulatedDriver

PLAN = StopPlan((StopStep(2, 5.0), StopStep(15, 3.0)))
OK = ExitStatus(code=0)
BAD = ExitStatus(code=7)
SPAN = NodeRanks(1, 2, 2, 4, 2, 4)
BARRIER_S = 12.0


def machine(
    *happenings: Input, nproc: int = 2, overlap: bool = False, **options: Any
) -> MultiNodeMachine:
    """Return a state machine that has handled these inputs."""
    rendezvous = RendezvousSpec(exit_barrier_timeout=BARRIER_S, overlap=overlap)
    spec = LaunchSpec(
        ["x"],
        nproc_per_node=nproc,
        nnodes="1:2",
        stop=PLAN,
        run_id="r",
        rendezvous=rendezvous,
        **options,
    )
    one = MultiNodeMachine(spec, nproc)
    for happening in happenings:
        one.handle(happening)
    return one


def placement(number: int, restarts: int = 0) -> Placement:
    return Placement(
        round=number,
        formed_by="1.a",
        attempt=number,
        restarts=restarts,
        changes=3,
        span=SPAN,
        master_addr="10.0.0.1",
        master_port=4000 + number,
    )


def start_round(
    number: int, cause: RestartCause | None = None, restarts: int = 0
) -> InstructionReceived:
    return InstructionReceived(StartRound(placement(number, restarts), cause))


def stop_round(number: int) -> InstructionReceived:
    return InstructionReceived(StopRound(number, "a worker on b has failed"))


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


def lost_peer(local_rank: int) -> WorkerEnded:
    return WorkerEnded(7, local_rank, BAD, is_victim=False, is_lost_peer=True)


def group_stopped(*failures: Failure, attempt: int = 7, survivors: bool = False) -> GroupStopped:
    return GroupStopped(attempt, 25.0, failures, survivors)


def start_failed(*, permanent: bool = False) -> StartFailed:
    return StartFailed(7, "cannot run x: no", permanent, 127 if permanent else 1, 1)


JOINED: list[Input] = [Start()]
STARTING: list[Input] = [*JOINED, start_round(7)]
STARTED = GroupStarted(7, 10.0)
RUNNING: list[Input] = [*STARTING, STARTED]
FAILING: list[Input] = [*RUNNING, ended(1, BAD)]
ALL_DONE: list[Input] = [*RUNNING, ended(1), ended(0)]
BARRIER: list[Input] = [*ALL_DONE, group_stopped()]
IDLE: list[Input] = [*FAILING, group_stopped(failure(2))]
STOP = StopReceived("enough")
SIGNAL = StopReceived("SIGQUIT was received", 3)
DRAINING = SendReport(NodeDraining("enough"))
CUT_OFF = InstructionReceived(StopRound(7, "no store", is_cut_off=True))


def finish_as(*outcome: Any, **more: Any) -> Finish:
    return Finish(JobOutcome(*outcome, **more))


STOPPED = finish_as(JobState.STOPPED, "enough", 143, 0)

CHANGE = RestartCause(8, "b joined", 0)
FAILED_THERE = RestartCause(8, "restart 1 of 3 (max restarts)", 1, 2.5, failure(9, host="b"))
ENDING = JobOutcome(JobState.FAILED, "all 3 restarts are used up", 9, 3, (failure(9, host="b"),))
COMING = ChangePending(7, "b joined", 30.0)
FINISHED_THERE = PeersFinished(7, 2, 1.0)
CONCLUDE = InstructionReceived(EndJob(ENDING))
GOOD_END = InstructionReceived(
    EndJob(JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0, 1))
)
CONCLUDED = Finish(ENDING)
WORKER_FAILED = "local rank 1 failed (exit code 7)"
FINISHED = "all workers have finished"
FAILED_ELSEWHERE = "a worker on b has failed"
NOTICE = PreemptionReceived("USR1", 99.0, 9.0, 50.0)
SPOT = PreemptionReceived("spot", 95.0, 4.0, 46.0)
SPOTTED: list[Effect] = [
    SendReport(PreemptionNoticed(ChangePending(7, "spot", 4.0, PREEMPTION_CHANGE, 95.0))),
    Publish(PreemptionNotice(attempt=7, why="spot", time_left=4.0)),
]
NOTICED = Publish(PreemptionNotice(attempt=7, why="USR1", time_left=9.0))
SHOWN = ShowChange("USR1", 9.0, PREEMPTION_CHANGE, 99.0)
NOTICE_REPORT = SendReport(
    PreemptionNoticed(ChangePending(7, "USR1", 9.0, PREEMPTION_CHANGE, 99.0))
)
WARNING: list[Effect] = [NOTICED, SHOWN, BackOff(7, 9.0)]
WARNED: list[Input] = [*RUNNING, NOTICE]
LAST: list[Input] = [*WARNED, ended(1, BAD), ended(0), group_stopped(failure(2))]
LAST_BARRIER = StartBarrier(7, 9.0 + PLAN.grace + PLAN.reap_timeout + 30.0)
DRAINING_PREEMPTED = SendReport(NodeDraining("USR1"))
NO_STORE = InstructionReceived(EndJob(rendezvous_failure("no store", EndCause.NO_STORE)))
OTHER_JOB = InstructionReceived(EndJob(rendezvous_failure("other job", EndCause.OTHER_JOB)))
AGREED = WorkersAgreed(7, PREEMPTION_CHANGE)
PREEMPTED_THERE = JobOutcome(JobState.PREEMPTED, "USR1 (on b)", 85)


def start(number: int, restarts: int = 0) -> StartGroup:
    return StartGroup(number, restarts, placement(number, restarts))


def stop_group(
    reason: str, signal: int | None = None, *, leftovers: bool = False, ordered: bool = False
) -> StopGroup:
    plan = PLAN if signal is None else PLAN.starting_with(signal)
    return StopGroup(7, plan, reason, signal, leftovers, ordered)


def cut_short(*, ordered: bool = False) -> StopGroup:
    plan = StopPlan((StopStep(2, CUT_OFF_GRACE),))
    return StopGroup(7, plan, "no store", is_ordered=ordered)


def killed(*, leftovers_only: bool = False) -> StopGroup:
    return StopGroup(7, StopPlan(()), "no store", leftovers_only=leftovers_only)


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


def pending(attempt: int = 7) -> Publish:
    return Publish(MembershipPending(attempt=attempt, round=7, why="b joined", time_left=30.0))


def attempt_failed(attempt: int, *failures: Failure) -> Publish:
    return Publish(AttemptFailed(attempt=attempt, root=failures[0], failures=failures))


def restarting() -> Publish:
    return Publish(Restarting(attempt=8, why=FAILED_THERE.why, delay=2.5, restarts=1))


def report_stopped(number: int, *failures: Failure, **more: Any) -> SendReport:
    more = {"exit_code": 7 if failures else 1, "runtime": 15.0, **more}
    return SendReport(RoundStopped(number, failures, **more))


CANNOT_KILL = {"is_permanent": True, "permanent_reason": "a process could not be killed"}
HOPELESS = {"is_permanent": True, "permanent_reason": "another attempt could not start it either"}
CUT_SHORT = finish_as(
    JobState.SUCCEEDED, f"{FINISHED}; the others are not waited for: enough", 0, 0
)
NOT_AWAITED = finish_as(
    JobState.SUCCEEDED,
    f"{FINISHED} on this node; others had not after 12 s (rendezvous.exit_barrier_timeout)",
    0,
    0,
)

Row = tuple[list[Input], Input, list[Effect], P]


def case(before: list[Input], happening: Input, effects: list[Effect], phase: P) -> Row:
    """Return a case: what an input after others has as its effects, and the phase after that."""
    return before, happening, effects, phase


ROWS: dict[str, Row] = {
    "new: start": case([], Start(), [Join()], P.IDLE),
    "new: a stop is received": case([], STOP, [STOPPED], P.DONE),
    # ------------------------------------------------------------------ idle
    "idle: start round": case(JOINED, start_round(7), [formed(7), start(7)], P.STARTING),
    "idle: start round as a new member": case(
        JOINED, start_round(8, CHANGE), [changed(), formed(8), start(8)], P.STARTING
    ),
    "idle: stop round of a round never seen": case(
        JOINED, stop_round(5), [SendReport(RoundStopped(5))], P.IDLE
    ),
    "idle: stop round that is answered": case(IDLE, stop_round(7), [], P.IDLE),
    "idle: stop round of a later round": case(
        IDLE, stop_round(8), [SendReport(RoundStopped(8))], P.IDLE
    ),
    "idle: start round of a stopped round": case(
        [*IDLE, stop_round(8)], start_round(8), [], P.IDLE
    ),
    "idle: restart pending": case(
        IDLE,
        InstructionReceived(RestartPending(FAILED_THERE)),
        [attempt_failed(7, failure(9, host="b"), failure(2)), restarting()],
        P.IDLE,
    ),
    "idle: start round after a failure, without a restart pending": case(
        IDLE,
        start_round(8, FAILED_THERE, 1),
        [attempt_failed(7, failure(9, host="b"), failure(2)), restarting(), formed(8), start(8, 1)],
        P.STARTING,
    ),
    "idle: start round after the restart pending": case(
        [*IDLE, InstructionReceived(RestartPending(FAILED_THERE))],
        start_round(8, FAILED_THERE, 1),
        [formed(8), start(8, 1)],
        P.STARTING,
    ),
    "starting: change pending": case(
        STARTING,
        InstructionReceived(COMING),
        [pending(), ShowChange(COMING.why, COMING.time_left, COMING.number)],
        P.STARTING,
    ),
    "running: change pending": case(
        RUNNING,
        InstructionReceived(COMING),
        [pending(), ShowChange(COMING.why, COMING.time_left, COMING.number)],
        P.RUNNING,
    ),
    "starting: workers of other nodes have finished": case(
        STARTING, InstructionReceived(FINISHED_THERE), [NotePeers(FINISHED_THERE)], P.STARTING
    ),
    "running: workers of other nodes have finished": case(
        RUNNING, InstructionReceived(FINISHED_THERE), [NotePeers(FINISHED_THERE)], P.RUNNING
    ),
    "running: workers of another round have finished": case(
        RUNNING, InstructionReceived(PeersFinished(6, 2, 1.0)), [], P.RUNNING
    ),
    "stopping: workers of other nodes have finished": case(
        FAILING, InstructionReceived(FINISHED_THERE), [], P.STOPPING
    ),
    "running: all workers have agreed": case(
        RUNNING, WorkersAgreed(7, 3), [SendReport(ChangeAgreed(7, 3))], P.RUNNING
    ),
    "running: a worker has reported a step": case(RUNNING, ProgressMade(7), [], P.RUNNING),
    "running: the node is excluded": case(
        RUNNING,
        ExclusionReceived(7, "bad"),
        [SendReport(ExclusionRequested(7, "bad", None))],
        P.RUNNING,
    ),
    "stopping: the node is excluded for a time": case(
        FAILING,
        ExclusionReceived(7, "bad", 5.0),
        [SendReport(ExclusionRequested(7, "bad", 5.0))],
        P.STOPPING,
    ),
    "running: of another attempt": case(RUNNING, WorkersAgreed(6, 3), [], P.RUNNING),
    "stopping: all workers have agreed": case(
        [*RUNNING, stop_round(7)], WorkersAgreed(7, 3), [], P.STOPPING
    ),
    "running: change pending, of another round": case(
        [*RUNNING, stop_round(7), group_stopped(), start_round(8, CHANGE)],
        InstructionReceived(COMING),
        [pending(8)],
        P.STARTING,
    ),
    "idle: change pending": case(JOINED, InstructionReceived(COMING), [pending(0)], P.IDLE),
    "idle: end job": case(JOINED, CONCLUDE, [Leave(ENDING.why)], P.LEAVING),
    "idle: a stop is received": case(JOINED, STOP, [Leave("enough")], P.LEAVING),
    "idle: a notice to a node without a place": case(JOINED, NOTICE, [Leave("USR1")], P.LEAVING),
    "running: a notice": case(RUNNING, NOTICE, [NOTICE_REPORT, *WARNING], P.RUNNING),
    "starting: a notice": case(
        STARTING, NOTICE, [NOTICE_REPORT, NOTICED, BackOff(7, 9.0)], P.STARTING
    ),
    "starting: a notice, and all have started": case(
        [*STARTING, NOTICE], STARTED, [SendReport(RoundStarted(7)), SHOWN], P.RUNNING
    ),
    "running after a notice: another one": case(WARNED, NOTICE, [], P.RUNNING),
    "running after a notice: an earlier one": case(
        WARNED,
        SPOT,
        [
            SPOTTED[0],
            CancelBackOff(),
            SPOTTED[1],
            ShowChange("spot", 4.0, PREEMPTION_CHANGE, 95.0),
            BackOff(7, 4.0),
        ],
        P.RUNNING,
    ),
    "running after an earlier notice: the first one again": case(
        [*WARNED, SPOT], NOTICE, [], P.RUNNING
    ),
    "barrier after a notice: an earlier one": case(
        LAST,
        SPOT,
        [*SPOTTED, CancelBackOff(), StartBarrier(7, 4.0 + PLAN.grace + PLAN.reap_timeout + 30.0)],
        P.BARRIER,
    ),
    "leaving after a notice: an earlier one": case(
        [*LAST, BarrierTimedOut(7)], SPOT, [], P.LEAVING
    ),
    "running after a notice: start round": case(WARNED, start_round(8, CHANGE), [], P.RUNNING),
    "running after a notice: a change": case(
        WARNED, InstructionReceived(COMING), [pending()], P.RUNNING
    ),
    "running after a notice: a restart is requested": case(
        WARNED, RestartReceived("new data"), [], P.RUNNING
    ),
    "running after a notice: a failure is not reported": case(WARNED, ended(1, BAD), [], P.RUNNING),
    "running after a notice: the last worker ends": case(
        [*WARNED, ended(1, BAD)],
        ended(0),
        [CancelBackOff(), stop_group("the job is preempted", leftovers=True)],
        P.STOPPING,
    ),
    "running after a notice: the deadline": case(
        WARNED, BackoffElapsed(7), [stop_group("the job is preempted")], P.STOPPING
    ),
    "running after a notice: all agree": case(
        WARNED,
        WorkersAgreed(7, PREEMPTION_CHANGE),
        [SendReport(ChangeAgreed(7, PREEMPTION_CHANGE))],
        P.RUNNING,
    ),
    "running after a notice: no store any more": case(WARNED, NO_STORE, [], P.RUNNING),
    "running after a notice: no store any more, and all agree": case(
        [*WARNED, NO_STORE],
        AGREED,
        [CancelBackOff(), stop_group("all workers agree to the preemption")],
        P.STOPPING,
    ),
    "running after a notice: all have agreed, and no store any more": case(
        [*WARNED, AGREED],
        NO_STORE,
        [CancelBackOff(), stop_group("all workers agree to the preemption")],
        P.STOPPING,
    ),
    "running after a notice: no store any more, and the deadline": case(
        [*WARNED, NO_STORE], BackoffElapsed(7), [stop_group("the job is preempted")], P.STOPPING
    ),
    "running after a notice: no store any more, and an earlier one": case(
        [*WARNED, NO_STORE],
        SPOT,
        [
            SPOTTED[0],
            CancelBackOff(),
            SPOTTED[1],
            ShowChange("spot", 4.0, PREEMPTION_CHANGE, 95.0),
            BackOff(7, 4.0),
        ],
        P.RUNNING,
    ),
    "stopping after a notice and no store: stopped": case(
        [*WARNED, NO_STORE, ended(1), ended(0)],
        group_stopped(),
        [SendReport(RoundSucceeded(7)), Leave("USR1")],
        P.LEAVING,
    ),
    "stopping after a notice and no store: stopped, failed": case(
        [*WARNED, NO_STORE, ended(1, BAD), ended(0)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2)), Leave("USR1")],
        P.LEAVING,
    ),
    "running after a notice and no store: a stop is received": case(
        [*WARNED, NO_STORE],
        STOP,
        [CancelBackOff(), stop_group("USR1"), DRAINING_PREEMPTED],
        P.STOPPING,
    ),
    "running after a notice: another job is there": case(
        WARNED, OTHER_JOB, [Leave("USR1"), CancelBackOff(), stop_group("USR1")], P.STOPPING
    ),
    "running after a notice: stop round": case(
        WARNED,
        stop_round(7),
        [CancelBackOff(), stop_group(FAILED_ELSEWHERE, ordered=True)],
        P.STOPPING,
    ),
    "running after a notice: a stop is received": case(
        WARNED, STOP, [CancelBackOff(), stop_group("USR1"), DRAINING_PREEMPTED], P.STOPPING
    ),
    "stopping after a notice: stopped, failed": case(
        [*WARNED, ended(1, BAD), ended(0)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2)), LAST_BARRIER],
        P.BARRIER,
    ),
    "stopping after a notice: stopped, all succeeded": case(
        [*WARNED, ended(1), ended(0)],
        group_stopped(),
        [SendReport(RoundSucceeded(7)), LAST_BARRIER],
        P.BARRIER,
    ),
    "barrier after a notice: timed out": case(LAST, BarrierTimedOut(7), [Leave("USR1")], P.LEAVING),
    "barrier after a notice: start round": case(LAST, start_round(8, CHANGE), [], P.BARRIER),
    "barrier after a notice: end job": case(
        LAST,
        InstructionReceived(EndJob(PREEMPTED_THERE)),
        [CancelBackOff(), Leave(PREEMPTED_THERE.why)],
        P.LEAVING,
    ),
    "barrier after a notice: no store any more": case(
        LAST, NO_STORE, [CancelBackOff(), Leave("USR1")], P.LEAVING
    ),
    "barrier after a notice: a stop is received": case(
        [*WARNED, ended(1), ended(0), group_stopped()],
        STOP,
        [SendReport(NodeDraining("enough")), CancelBackOff(), Leave("USR1", stays=True)],
        P.LEAVING,
    ),
    "leaving after a notice: left": case(
        [*LAST, BarrierTimedOut(7)],
        LeftRendezvous(),
        [finish_as(JobState.PREEMPTED, "USR1", 85, 0)],
        P.DONE,
    ),
    "stopping: a notice": case(FAILING, NOTICE, [NOTICE_REPORT, NOTICED], P.STOPPING),
    "stopping for another round: a notice, and then stopped": case(
        [*RUNNING, start_round(8, CHANGE), NOTICE],
        group_stopped(),
        [report_stopped(7), SendReport(RoundStopped(8)), LAST_BARRIER],
        P.BARRIER,
    ),
    "barrier: a notice": case(
        BARRIER, NOTICE, [NOTICE_REPORT, NOTICED, CancelBackOff(), LAST_BARRIER], P.BARRIER
    ),
    "idle: a notice": case(IDLE, NOTICE, [NOTICE_REPORT, NOTICED, LAST_BARRIER], P.BARRIER),
    "leaving: a notice": case([*RUNNING, STOP], NOTICE, [], P.STOPPING),
    "idle: join failed": case(
        JOINED, JoinFailed(HostError("no port")), [Leave("no port")], P.LEAVING
    ),
    "idle: a stop is received after a failure": case(
        IDLE, STOP, [Leave("no restart follows: enough")], P.LEAVING
    ),
    "idle: a stop is received after a failure by its signal": case(
        [*FAILING, group_stopped(failure(2, code=143))],
        StopReceived("SIGTERM was received", 15),
        [Leave("SIGTERM was received")],
        P.LEAVING,
    ),
    "idle: a stop is received before the restart": case(
        [*IDLE, InstructionReceived(RestartPending(FAILED_THERE))],
        STOP,
        [Leave("enough")],
        P.LEAVING,
    ),
    # --------------------------------------------------------------- starting
    "starting: group started": case(STARTING, STARTED, [SendReport(RoundStarted(7))], P.RUNNING),
    "starting: group started, all done": case(
        [*STARTING, ended(0), ended(1)],
        STARTED,
        [SendReport(RoundStarted(7)), stop_group(FINISHED, leftovers=True)],
        P.STOPPING,
    ),
    "starting: start failed": case(
        STARTING,
        start_failed(),
        [SendReport(RoundFailing(7, "cannot run x: no")), stop_group("cannot run x: no")],
        P.STOPPING,
    ),
    "starting: a failure": case(
        STARTING,
        ended(1, BAD),
        [SendReport(RoundFailing(7, WORKER_FAILED)), stop_group(WORKER_FAILED)],
        P.STOPPING,
    ),
    "running: a lost peer": case(RUNNING, lost_peer(1), [BackOff(7, CAUSE_S)], P.RUNNING),
    "running: only lost peers on this node": case(
        [*RUNNING, lost_peer(1)], lost_peer(0), [], P.RUNNING
    ),
    "running: the cause of a lost peer is on another node": case(
        [*RUNNING, lost_peer(1)],
        stop_round(7),
        [CancelBackOff(), stop_group(FAILED_ELSEWHERE, ordered=True)],
        P.STOPPING,
    ),
    "running: a lost peer without a cause": case(
        [*RUNNING, lost_peer(1)],
        BackoffElapsed(7),
        [SendReport(RoundFailing(7, WORKER_FAILED)), stop_group(WORKER_FAILED)],
        P.STOPPING,
    ),
    "running: a lost peer, and its cause": case(
        [*RUNNING, lost_peer(0)],
        ended(1, BAD),
        [SendReport(RoundFailing(7, WORKER_FAILED)), CancelBackOff(), stop_group(WORKER_FAILED)],
        P.STOPPING,
    ),
    "running: a worker hangs": case(
        RUNNING,
        WorkerHung(7, 1, "no heartbeat"),
        [
            SendReport(RoundFailing(7, "local rank 1: no heartbeat")),
            stop_group("local rank 1: no heartbeat"),
        ],
        P.STOPPING,
    ),
    "starting: start round": case(
        STARTING,
        start_round(8, CHANGE),
        [changed(), formed(8), stop_group("b joined", ordered=True)],
        P.STOPPING,
    ),
    "starting: stop round": case(
        STARTING, stop_round(7), [stop_group(FAILED_ELSEWHERE, ordered=True)], P.STOPPING
    ),
    "starting: a stop is received": case(
        STARTING, STOP, [stop_group("enough"), DRAINING], P.STOPPING
    ),
    # ---------------------------------------------------------------- running
    "running: a success": case(RUNNING, ended(1), [], P.RUNNING),
    "running: the last success": case(
        [*RUNNING, ended(1)], ended(0), [stop_group(FINISHED, leftovers=True)], P.STOPPING
    ),
    "running: a restart is requested": case(
        RUNNING,
        RestartReceived("new data"),
        [SendReport(RestartRequested(7, "new data"))],
        P.RUNNING,
    ),
    "idle: a restart is requested": case(JOINED, RestartReceived("new data"), [], P.IDLE),
    "running: a failure": case(
        RUNNING,
        ended(1, BAD),
        [SendReport(RoundFailing(7, WORKER_FAILED)), stop_group(WORKER_FAILED)],
        P.STOPPING,
    ),
    "running: start round": case(
        RUNNING,
        start_round(8, CHANGE),
        [changed(), formed(8), stop_group("b joined", ordered=True)],
        P.STOPPING,
    ),
    "running: start round without a cause": case(
        RUNNING,
        start_round(8),
        [formed(8), stop_group("the nodes form another round", ordered=True)],
        P.STOPPING,
    ),
    "running: the same start round again": case(RUNNING, start_round(7), [], P.RUNNING),
    "running: start round of an older round": case(RUNNING, start_round(6), [], P.RUNNING),
    "running: stop round": case(
        RUNNING, stop_round(7), [stop_group(FAILED_ELSEWHERE, ordered=True)], P.STOPPING
    ),
    "running: stop round of a later round": case(
        RUNNING, stop_round(9), [stop_group(FAILED_ELSEWHERE, ordered=True)], P.STOPPING
    ),
    "running: stop round of an older round": case(RUNNING, stop_round(6), [], P.RUNNING),
    "running: end job": case(
        RUNNING, CONCLUDE, [Leave(ENDING.why), stop_group(ENDING.why)], P.STOPPING
    ),
    "running: a stop is received": case(
        RUNNING, STOP, [stop_group("enough"), DRAINING], P.STOPPING
    ),
    "running: a signal": case(
        RUNNING,
        SIGNAL,
        [stop_group("SIGQUIT was received", 3), SendReport(NodeDraining("SIGQUIT was received"))],
        P.STOPPING,
    ),
    "running: cut off": case(RUNNING, CUT_OFF, [cut_short(ordered=True)], P.STOPPING),
    # --------------------------------------------------------------- stopping
    "stopping: another failure": case(FAILING, ended(0, BAD), [], P.STOPPING),
    "stopping: started late": case([*STARTING, ended(1, BAD)], STARTED, [], P.STOPPING),
    "stopping: stop round": case(FAILING, stop_round(7), [], P.STOPPING),
    "stopping: start round": case(
        FAILING, start_round(8, CHANGE), [changed(), formed(8)], P.STOPPING
    ),
    "stopping: a stop is received": case(FAILING, STOP, [DRAINING], P.STOPPING),
    "stopping: cut off": case(FAILING, CUT_OFF, [killed()], P.STOPPING),
    "stopping: cut off after a stop": case([*RUNNING, STOP], CUT_OFF, [killed()], P.STOPPING),
    "stopping: cut off, all succeeded": case(
        ALL_DONE, CUT_OFF, [killed(leftovers_only=True)], P.STOPPING
    ),
    "stopping: a stop is received, all succeeded": case(ALL_DONE, STOP, [], P.STOPPING),
    "stopping: end job": case(FAILING, CONCLUDE, [Leave(ENDING.why)], P.STOPPING),
    "stopping: stopped, all succeeded": case(
        ALL_DONE,
        group_stopped(),
        [SendReport(RoundSucceeded(7)), StartBarrier(7, BARRIER_S)],
        P.BARRIER,
    ),
    "stopping: stopped, all succeeded, a start round is pending": case(
        [*ALL_DONE, start_round(8)],
        group_stopped(),
        [SendReport(RoundSucceeded(7)), start(8)],
        P.STARTING,
    ),
    "stopping: stopped, all succeeded, but stop round": case(
        [*ALL_DONE, stop_round(7)], group_stopped(), [report_stopped(7)], P.IDLE
    ),
    "stopping: stopped, all succeeded, a stop is received": case(
        [*ALL_DONE, STOP],
        group_stopped(),
        [
            SendReport(RoundSucceeded(7)),
            SendReport(NodeDraining("enough")),
            Leave(f"{FINISHED}; the others are not waited for: enough", stays=True),
        ],
        P.LEAVING,
    ),
    "stopping: stopped, a value was lost, a stop is received": case(
        [*ALL_DONE, STOP],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2)), Leave("enough")],
        P.LEAVING,
    ),
    "stopping: stopped, a value was lost": case(
        ALL_DONE, group_stopped(failure(2)), [report_stopped(7, failure(2))], P.IDLE
    ),
    "stopping: stopped, failed": case(
        FAILING,
        group_stopped(failure(2), failure(3)),
        [report_stopped(7, failure(2), failure(3))],
        P.IDLE,
    ),
    "stopping: stopped, failed, and then a stop": case(
        [*FAILING, STOP],
        group_stopped(failure(2)),
        [
            SendReport(RoundStopped(7, (failure(2),))),
            Leave("no restart follows: enough", stays=True),
        ],
        P.LEAVING,
    ),
    "leaving: left after a failure and then a stop": case(
        [*FAILING, STOP, group_stopped(failure(2))],
        LeftRendezvous(),
        [
            Publish(AttemptFailed(attempt=7, root=failure(2), failures=(failure(2),))),
            Finish(JobOutcome(JobState.FAILED, "no restart follows: enough", 7, 0)),
        ],
        P.DONE,
    ),
    "stopping: stopped, failed by the signal of a stop that followed": case(
        [*FAILING, StopReceived("SIGTERM was received", 15)],
        group_stopped(failure(2, code=143)),
        [
            SendReport(RoundStopped(7, (failure(2, code=143),))),
            Leave("SIGTERM was received", stays=True),
        ],
        P.LEAVING,
    ),
    "stopping: stopped, failed after a stop": case(
        [*RUNNING, STOP, ended(1, BAD)],
        group_stopped(failure(2)),
        [SendReport(RoundStopped(7)), Leave("enough", stays=True)],
        P.LEAVING,
    ),
    "stopping: stopped, failed and stop round meanwhile": case(
        [*FAILING, stop_round(7)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2))],
        P.IDLE,
    ),
    "stopping: stopped, after a stop round": case(
        [*RUNNING, stop_round(7)], group_stopped(), [report_stopped(7)], P.IDLE
    ),
    "stopping: stopped, stop round right after a failure of its own": case(
        [*RUNNING, stop_round(7)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2))],
        P.IDLE,
    ),
    "stopping: stopped, stop round of a later round": case(
        [*RUNNING, start_round(8), stop_round(8)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2)), SendReport(RoundStopped(8))],
        P.IDLE,
    ),
    "stopping: stopped, a start round is pending": case(
        [*RUNNING, start_round(8)], group_stopped(), [report_stopped(7), start(8)], P.STARTING
    ),
    "stopping: stopped, failed, a start round is pending": case(
        [*FAILING, start_round(8)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2)), start(8)],
        P.STARTING,
    ),
    "stopping: stopped, only the newest start round counts": case(
        [*RUNNING, start_round(8), start_round(9)],
        group_stopped(),
        [report_stopped(7), start(9)],
        P.STARTING,
    ),
    "stopping: stopped, a process is left": case(
        [*RUNNING, stop_round(7)],
        group_stopped(survivors=True),
        [report_stopped(7, **CANNOT_KILL)],
        P.IDLE,
    ),
    "stopping: stopped, a process is left when a start round is pending": case(
        [*RUNNING, start_round(8)],
        group_stopped(failure(2), survivors=True),
        [
            report_stopped(7, failure(2), **CANNOT_KILL),
            SendReport(
                RoundStopped(8, is_permanent=True, permanent_reason="a process could not be killed")
            ),
        ],
        P.IDLE,
    ),
    "stopping: stopped, start failed for now": case(
        [*STARTING, start_failed()],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2), exit_code=1, runtime=0.0)],
        P.IDLE,
    ),
    "stopping: stopped, start failed for good": case(
        [*STARTING, start_failed(permanent=True)],
        group_stopped(failure(2)),
        [report_stopped(7, failure(2), exit_code=127, runtime=0.0, **HOPELESS)],
        P.IDLE,
    ),
    "stopping: stopped before this node leaves": case(
        [*RUNNING, STOP],
        group_stopped(failure(2)),
        [SendReport(RoundStopped(7)), Leave("enough", stays=True)],
        P.LEAVING,
    ),
    "stopping: stopped, has left": case(
        [*RUNNING, STOP, LeftRendezvous()], group_stopped(), [STOPPED], P.DONE
    ),
    "stopping: stopped, failed and stopped": case(
        [*FAILING, STOP, LeftRendezvous()],
        group_stopped(failure(2)),
        [attempt_failed(7, failure(2)), STOPPED],
        P.DONE,
    ),
    "stopping: left": case([*RUNNING, STOP], LeftRendezvous(), [], P.STOPPING),
    # ---------------------------------------------------------------- barrier
    "barrier: start round": case(
        BARRIER,
        start_round(8, CHANGE),
        [changed(), formed(8), CancelBackOff(), start(8)],
        P.STARTING,
    ),
    "barrier: stop round": case(
        BARRIER, stop_round(7), [CancelBackOff(), SendReport(RoundStopped(7))], P.IDLE
    ),
    "barrier: elapsed": case(
        BARRIER, BarrierTimedOut(7), [Leave(NOT_AWAITED.outcome.why)], P.LEAVING
    ),
    "barrier: elapsed late": case(BARRIER, BarrierTimedOut(6), [], P.BARRIER),
    "barrier: a stop is received": case(
        BARRIER,
        STOP,
        [DRAINING, CancelBackOff(), Leave(CUT_SHORT.outcome.why, stays=True)],
        P.LEAVING,
    ),
    "barrier: end job": case(BARRIER, GOOD_END, [CancelBackOff(), Leave(FINISHED)], P.LEAVING),
    # ---------------------------------------------------------------- leaving
    "leaving: left after a stop": case([*JOINED, STOP], LeftRendezvous(), [STOPPED], P.DONE),
    "leaving: left after a success that was stopped": case(
        [*ALL_DONE, STOP, group_stopped()], LeftRendezvous(), [CUT_SHORT], P.DONE
    ),
    "leaving: left, cut short": case([*BARRIER, STOP], LeftRendezvous(), [CUT_SHORT], P.DONE),
    "leaving: left, elapsed": case(
        [*BARRIER, BarrierTimedOut(7)], LeftRendezvous(), [NOT_AWAITED], P.DONE
    ),
    "leaving: left after a good end": case(
        [*BARRIER, GOOD_END],
        LeftRendezvous(),
        [finish_as(JobState.SUCCEEDED, FINISHED, 0, 1)],
        P.DONE,
    ),
    "leaving: left after a failure elsewhere": case(
        [*RUNNING, CONCLUDE, group_stopped()],
        LeftRendezvous(),
        [attempt_failed(7, failure(9, host="b")), CONCLUDED],
        P.DONE,
    ),
    "leaving: left, without any attempt": case(
        [*JOINED, CONCLUDE],
        LeftRendezvous(),
        [attempt_failed(0, failure(9, host="b")), CONCLUDED],
        P.DONE,
    ),
    "leaving: start round": case([*JOINED, STOP], start_round(7), [], P.LEAVING),
    "leaving: end job": case([*JOINED, STOP], CONCLUDE, [], P.LEAVING),
    "leaving: a second stop": case([*JOINED, STOP], SIGNAL, [], P.LEAVING),
}


def test_a_node_leaves_at_once_where_rounds_may_overlap() -> None:
    one = machine(*RUNNING, overlap=True)
    assert one.handle(STOP) == [Leave("enough"), stop_group("enough")]
    assert one.handle(group_stopped()) == []
    assert one.handle(LeftRendezvous()) == [STOPPED]


@pytest.mark.parametrize(("before", "happening", "effects", "phase"), ROWS.values(), ids=ROWS)
def test_each_row_of_the_table(
    before: list[Input], happening: Input, effects: list[Effect], phase: P
) -> None:
    """Phase and input give the next phase and the effects, in order."""
    one = machine(*before)
    assert one.handle(happening) == effects
    assert one.phase is phase


def test_a_join_that_fails_ends_the_job_with_its_error() -> None:
    """The callers get the error itself, so that it stays one clear line."""
    error = HostError("no port")
    one = machine(Start(), JoinFailed(error))
    (finish,) = one.handle(LeftRendezvous())
    assert isinstance(finish, Finish)
    assert (finish.outcome.state, finish.outcome.why, finish.outcome.exit_code) == (
        JobState.FAILED,
        "no port",
        1,
    )
    assert finish.error is error


def test_a_failed_rendezvous_is_marked_in_the_outcome() -> None:
    """The outcome is marked as a failed rendezvous, and no attempt has failed."""
    ending = JobOutcome(JobState.FAILED, "only 1 of 2 nodes", 75, is_rendezvous=True)
    one = machine(Start(), InstructionReceived(EndJob(ending)))
    assert one.handle(LeftRendezvous()) == [
        finish_as(JobState.FAILED, "only 1 of 2 nodes", 75, 0, is_rendezvous=True)
    ]


def test_failures_of_our_own_get_the_notes_of_the_coordinator() -> None:
    """And keep those that are cut in the copies of other nodes."""
    early, long = "rank 0 (on b) exited with 0, 2 s before", "stacks: \udcff" + "x" * 300
    cut = long[-301:]
    own = dataclasses.replace(failure(2), notes=(long, "a note"))
    copy = dataclasses.replace(own, notes=(early, cut))
    ending = JobOutcome(JobState.FAILED, "no restart", 7, failures=(copy,))
    one = machine(*RUNNING, ended(0, BAD), group_stopped(own), InstructionReceived(EndJob(ending)))
    complete = dataclasses.replace(own, notes=(early, long, "a note"))
    assert one.handle(LeftRendezvous())[0] == attempt_failed(7, complete)


def test_failures_of_our_own_are_not_cut() -> None:
    """The copies that other nodes have may be truncated; here they are complete."""
    ours, theirs = failure(2, tail="all of it"), failure(9, host="b")
    ending = JobOutcome(JobState.FAILED, "no restarts", 7, 0, (failure(2), theirs))
    one = machine(*FAILING, group_stopped(ours, failure(3)), InstructionReceived(EndJob(ending)))
    published, finish = one.handle(LeftRendezvous())
    assert published == attempt_failed(7, ours, theirs, failure(3))
    assert isinstance(finish, Finish)
    assert finish.outcome.failures == (ours, theirs, failure(3))


def test_an_attempt_fails_once_for_the_readers() -> None:
    """RestartPending published it, so neither the next round nor the end does so again."""
    one = machine(*IDLE, InstructionReceived(RestartPending(FAILED_THERE)))
    assert one.handle(InstructionReceived(RestartPending(FAILED_THERE))) == []
    one.handle(CONCLUDE)
    assert one.handle(LeftRendezvous()) == [
        finish_as(ENDING.state, ENDING.why, 9, 3, failures=(*ENDING.failures, failure(2)))
    ]


def test_the_outcome_has_the_restarts_of_the_last_placement() -> None:
    """A node that ends by itself knows how often the job was restarted."""
    one = machine(*IDLE, start_round(8, FAILED_THERE, 1), STOP, LeftRendezvous())
    (finish,) = one.handle(group_stopped(attempt=8))
    assert isinstance(finish, Finish)
    assert finish.outcome.restarts == 1


def test_the_second_round_is_like_the_first() -> None:
    """Successes and failures of a former round do not count for the next one."""
    one = machine(
        *RUNNING,
        ended(0),
        ended(1, BAD),
        group_stopped(failure(2)),
        start_round(8, FAILED_THERE, 1),
    )
    one.handle(GroupStarted(8, 30.0))
    assert one.handle(ended(1, attempt=8)) == []
    assert one.handle(ended(0, attempt=8)) == [StopGroup(8, PLAN, FINISHED, None, True)]
    assert one.handle(group_stopped(attempt=8)) == [
        SendReport(RoundSucceeded(8)),
        StartBarrier(8, BARRIER_S),
    ]


LATE: list[Input] = [
    GroupStarted(6, 50.0),
    StartFailed(6, "no", True, 127, 0),
    ended(0, attempt=6),
    ended(1, BAD, attempt=6),
    group_stopped(failure(), attempt=6),
    BarrierTimedOut(6),
    group_stopped(attempt=9),
    BackoffElapsed(7),  # not of this policy at all
    BarrierTimedOut(7),  # given up
]


@pytest.mark.parametrize("late", LATE, ids=lambda late: f"{type(late).__name__} {late.attempt}")
@pytest.mark.parametrize("before", [STARTING, RUNNING, FAILING], ids=["starting", "running", "end"])
def test_a_late_result_changes_nothing(late: Input, before: list[Input]) -> None:
    """A result of another attempt is dropped, in every phase."""
    one = machine(*before)
    shown = repr(one)
    assert one.handle(late) == []
    assert repr(one) == shown


@pytest.mark.parametrize("before", [STARTING, RUNNING, BARRIER], ids=["start", "run", "barrier"])
def test_a_group_does_not_vanish_by_itself(before: list[Input]) -> None:
    """The end of a group that was not stopped is an internal error."""
    one = machine(*before)
    with pytest.raises(
        InternalError, match="the end of a group cannot happen in <MultiNodeMachine"
    ):
        one.handle(group_stopped())


def test_a_job_starts_once() -> None:
    """A second start is an internal error, and the message lists the last inputs."""
    with pytest.raises(InternalError, match=r"please report: new: Start\(\); "):
        machine(Start(), Start())


def test_progress_is_reported_where_it_counts() -> None:
    policy = RestartPolicy(max_attempts_without_progress=2)
    one = machine(*RUNNING, max_restarts=9, restart=policy)
    assert one.handle(ProgressMade(7)) == [SendReport(RoundProgressed(7))]


def test_an_excluded_node_says_for_how_long() -> None:
    report = SendReport(ExclusionRequested(7, "bad", 60.0))
    assert machine(*RUNNING).handle(ExclusionReceived(7, "bad", 60.0)) == [report]


def test_a_repr_shows_phase_and_attempt() -> None:
    """The repr names phase, attempt and round."""
    assert repr(machine(*RUNNING)) == "<MultiNodeMachine running, attempt 7, round 7>"


# -------------------------------------------------------------- random sequences of inputs


class Members(SimulatedDriver):
    """A rendezvous that gives instructions in random order."""

    may_survive = True

    def failure_of(self, local_rank: int, code: int = 7) -> Failure:
        return failure(local_rank, code=code)

    @initialize(nproc=st.integers(1, 3))
    def begin(self, nproc: int) -> None:
        self.live_round = -1
        self.barrier: int | None = None
        self.deadline: int | None = None  # attempt of the BackOff of a notice
        self.joined = self.leaving = self.left = self.is_draining = False
        self.has_failed_first = True  # or it drains not
        self.newest = -1  # round of the newest instruction
        self.owed: int | None = None  # round of the newest StartRound or StopRound without a report
        self.started: list[int] = []
        self.reports: list[Any] = []
        self.failing_reported: set[int] = set()
        self.ending: JobOutcome | None = None
        self.begin_with(machine(nproc=nproc), nproc)

    def perform_one(self, effect: Effect) -> None:
        match effect:
            case Join():
                assert not self.joined
                self.joined = True
            case StartGroup(attempt, restarts, place):
                assert self.machine.notice is None, "nothing is started after a notice"
                assert self.barrier is None
                assert not self.leaving, "a node that leaves starts no group"
                assert place is not None
                assert place.round == self.newest, "only the newest round is begun"
                assert (place.attempt, place.restarts) == (attempt, restarts)
                assert all(attempt > former for former in self.started)
                self.started.append(attempt)
                self.live_round = place.round
            case StartBarrier(attempt):
                assert self.live is None
                assert self.barrier is None
                self.barrier = attempt
            case BackOff(attempt):
                assert self.live == attempt
                assert self.machine.notice is not None
                self.deadline = attempt
            case CancelBackOff():
                assert (self.barrier is None) != (self.deadline is None)
                self.barrier = self.deadline = None
            case SendReport(report):
                self.check_report(report)
            case Leave():
                assert self.joined
                assert not self.leaving, "a node leaves once"
                self.leaving = True
            case Publish(AttemptFailed() as event):
                assert event.root == event.failures[0]
            case Finish():
                assert self.barrier is None
                assert self.left, "the end comes when this node has left"
        super().perform_one(effect)

    def check_report(self, report: Any) -> None:
        assert not self.leaving, "a node that has left sends no report"
        if isinstance(report, NodeDraining):
            self.is_draining, self.has_failed_first = True, bool(self.failures)
            return
        if isinstance(report, PreemptionNoticed):
            return
        assert report.round <= self.newest
        self.reports.append(report)
        match report:
            case RoundFailing():
                assert self.deadline is None, "after a notice no failure stops other nodes"
                assert report.round == self.live_round
                assert report.round not in self.failing_reported
                self.failing_reported.add(report.round)
            case RoundStarted():
                assert report.round == self.live_round
            case RoundStopped() | RoundSucceeded():
                assert self.live is None, "the report comes when no process is left"
                if report.round == self.live_round:
                    counts = isinstance(report, RoundStopped) and self.has_failed_first
                    expected = [tuple(self.failures) if counts else ()]
                    if self.is_draining and self.machine.notice is not None:
                        expected.append(())  # what workers do after a notice is no failure
                    assert getattr(report, "failures", ()) in expected, "no failure is lost"
        if report.round == self.owed:
            self.owed = None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from([OK, OK, BAD, ExitStatus(signal=9)]))
    def a_worker_ends(self, data: st.DataObject, status: ExitStatus) -> None:
        assert self.live is not None
        rank = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(rank)
        if not status.is_success and not self.stopping:
            self.failures.append(failure(rank))
        self.handle(WorkerEnded(self.live, rank, status, is_victim=self.stopping))

    @precondition(lambda self: self.barrier is not None)
    @rule()
    def the_barrier_elapses(self) -> None:
        assert self.barrier is not None
        attempt, self.barrier = self.barrier, None
        self.handle(BarrierTimedOut(attempt))

    @rule(notice=st.sampled_from([NOTICE, SPOT]))
    def a_notice_comes(self, notice: PreemptionReceived) -> None:
        former, is_accepted = self.machine.notice, self.machine.accepts(notice)
        self.handle(notice)
        assert self.machine.notice == (notice if is_accepted else former)
        assert former != SPOT or not is_accepted

    @precondition(lambda self: self.deadline is not None)
    @rule()
    def the_deadline_comes(self) -> None:
        assert self.deadline is not None
        attempt, self.deadline = self.deadline, None
        self.handle(BackoffElapsed(attempt))

    @precondition(lambda self: self.leaving and not self.left)
    @rule()
    def it_has_left(self) -> None:
        self.left = True
        self.handle(LeftRendezvous())

    @rule(jump=st.integers(-1, 3), kind=st.sampled_from(["none", "change", "failure"]))
    def a_round_begins(self, jump: int, kind: str) -> None:
        number = max(0, self.newest + jump)
        cause = {"none": None, "change": CHANGE, "failure": FAILED_THERE}[kind]
        counts = number > self.newest and not (self.stop_asked or self.machine.notice)
        self.instruct(number, counts, StartRound(placement(number), cause))

    @rule(jump=st.integers(-1, 2))
    def a_round_is_halted(self, jump: int) -> None:
        number = max(0, self.newest + jump)
        answered = max(
            (one.round for one in self.reports if isinstance(one, RoundStopped)), default=-1
        )
        counts = number >= self.newest and number > answered
        self.instruct(number, counts, StopRound(number, "stop"))

    def instruct(self, number: int, counts: bool, instruction: Instruction) -> None:
        if counts and not self.leaving:
            self.newest = self.owed = number
        self.handle(InstructionReceived(instruction))

    @rule()
    def there_is_a_pause(self) -> None:
        self.handle(InstructionReceived(RestartPending(FAILED_THERE)))

    @rule()
    def the_job_is_concluded(self) -> None:
        if not self.leaving and self.ending is None:
            self.ending = ENDING
        self.handle(CONCLUDE)

    @rule(
        make=st.sampled_from(
            [
                lambda attempt: GroupStarted(attempt, 99.0),
                lambda attempt: ended(0, BAD, attempt=attempt),
                lambda attempt: ended(0, attempt=attempt),
                lambda attempt: group_stopped(failure(), attempt=attempt),
                lambda attempt: BarrierTimedOut(attempt),
            ]
        ),
        age=st.integers(1, 3),
    )
    def a_late_answer_comes(self, make: Callable[[int], Input], age: int) -> None:
        self.check_late(make(self.machine.attempt - age))

    @invariant()
    def every_instruction_is_answered(self) -> None:
        """A node that is idle owes the rendezvous no report."""
        if self.live is None and not self.leaving:
            assert self.owed is None

    @invariant()
    def a_failure_is_reported_at_once(self) -> None:
        is_open = self.live is not None and not self.leaving and not self.stopping
        if self.failures and is_open and self.deadline is None:
            raise AssertionError("a failure stops the group")

    @invariant()
    def something_is_always_under_way(self) -> None:
        """After a stop, a notice or EndJob the node waits only for effects in progress."""
        if self.machine.notice is not None and not (self.finishes or self.leaving):
            assert self.stopping or self.deadline is not None or self.barrier is not None
        if self.leaving and not self.finishes:
            assert not self.left or self.stopping
        if self.stop_asked and not self.finishes:
            assert self.leaving or self.stopping

    @invariant()
    def the_result_fits(self) -> None:
        for finish in (effect.outcome for effect in self.finishes):
            if finish.state is JobState.FAILED:
                assert self.ending is not None
                assert finish.exit_code == self.ending.exit_code
                assert finish.failures[: len(self.ending.failures)] == self.ending.failures


Members.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestMembers = pytest.mark.slow(Members.TestCase)


def test_a_node_that_is_alone_awaits_no_cause_from_others() -> None:
    alone = replace(placement(7), span=NodeRanks(0, 1, 0, 2, 0, 2))
    one = machine(Start(), InstructionReceived(StartRound(alone)), STARTED, lost_peer(0))
    assert one.handle(lost_peer(1))[-1] == stop_group("local rank 0 failed (exit code 7)")


def test_successes_elsewhere_count_from_the_start_of_the_round() -> None:
    """With `overlap` they may be known while the workers of the former round are being stopped."""
    one = machine(*RUNNING, start_round(8))
    assert one.handle(InstructionReceived(PeersFinished(8, 2, 1.0))) == []
    assert one.handle(group_stopped())[-2:] == [start(8), NotePeers(PeersFinished(8, 2, 1.0))]
