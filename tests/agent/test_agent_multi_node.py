"""A node of a job of many, with real workers, in a rendezvous that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    JobFailed,
    JobStopped,
    MembershipChanged,
    MembershipPending,
    RendezvousFailed,
    Restarting,
    RoundFormed,
    StandbyPromoted,
    StopPlan,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.errors import HostError, SpecError
from elastic_aio.events import AttemptFailed, JobFinished, StopRequested, WorkersUnfinished
from elastic_aio.outcome import PREEMPTION_CHANGE, ExitStatus, JobOutcome, JobState
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    ChangePending,
    EndJob,
    NodeDraining,
    PeersFinished,
    Report,
    RestartCause,
    RestartPending,
    RoundFailing,
    RoundStarted,
    RoundStopped,
    RoundSucceeded,
    StopRound,
)
from elastic_aio.report import format_failure
from elastic_aio.spec.liveness import LivenessSpec
from elastic_aio.spec.rendezvous import RendezvousSpec
from elastic_aio.spec.restart import RestartAction, RestartPolicy
from tests.support.children import POLITE, ignoring_signals, noted, noting, python, until
from tests.support.fake_rendezvous import FakeRendezvous, failure_elsewhere, member, node_spec
from tests.support.leaks import alive

GOOD_END = EndJob(JobOutcome(JobState.SUCCEEDED, "all workers have finished", 0, 2))
SAY_PLACE = """
import json, os
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"
more = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
shared = "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"
print(json.dumps({name: os.environ[name] for name in names + more + shared}))
"""


def renoted(directory: Path, *ranks: int) -> None:
    """Forget what workers have noted, before the next ones do."""
    for rank in ranks:
        (directory / str(rank)).unlink()


# ---------------------------------------------------------------------- rounds


async def test_a_round_gives_the_workers_their_places(tmp_path: Path) -> None:
    """Ranks, sizes, the meeting point and the counts are those of the placement."""
    async with member(node_spec(tmp_path, python(SAY_PLACE))) as node:
        rendezvous = node.rendezvous
        assert (rendezvous.node.nproc, rendezvous.node.pid) == (2, os.getpid())
        assert rendezvous.run_id == "shared"
        rendezvous.start_round(7, group_rank=2, nodes=3, restarts=5, port=1234)
        succeeded = await rendezvous.wait_report(RoundSucceeded)
        assert succeeded.first_success is not None
        assert succeeded.first_success[0] in (4, 5)
        rendezvous.instruct(GOOD_END)
        result = await node.agent.wait()
    ends = {event.rank: event.time for event in node.events_of(WorkerExited)}
    assert abs(min(ends.values()) - succeeded.first_success[1]) < 1
    assert rendezvous.reports == [RoundStarted(7), succeeded]
    assert (result.state, result.exit_code, result.restarts) == (JobState.SUCCEEDED, 0, 2)
    assert sorted(result.return_values) == [4, 5]
    assert result.log_dir is not None
    said = [
        json.loads(Path(result.log_dir, f"attempt_7/{rank}/stdout.log").read_text())
        for rank in (0, 1)
    ]
    assert said == [
        {
            "RANK": str(4 + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "2",
            "GROUP_WORLD_SIZE": "3",
            "ROLE_RANK": str(4 + local_rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234",
            "TORCHELASTIC_RESTART_COUNT": "5",
            "TORCHELASTIC_RUN_ID": "shared",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for local_rank in (0, 1)
    ]
    (formed,) = node.events_of(RoundFormed)
    assert (formed.attempt, formed.round, formed.group_rank, formed.changes) == (7, 7, 2, 4)
    assert (formed.group_world_size, formed.world_size, formed.master_port) == (3, 6, 1234)
    assert {event.attempt for event in node.events_of(WorkerStarted)} == {7}
    assert [event.rank for event in node.events_of(WorkerStarted)] == [4, 5]
    assert node.events_of(JobFinished)[0].attempt == 7


async def test_the_output_of_ranks_that_are_not_here(tmp_path: Path) -> None:
    """A later round may bring them; when the job is over, none follows."""
    async with member(node_spec(tmp_path, python("print('text')"))) as node:
        reader = node.agent.logs(ranks=[5])
        node.rendezvous.start_round(0, group_rank=0, nodes=2)
        await node.rendezvous.wait_report(RoundSucceeded)
        problem = r"^ranks: must be ranks of workers of this node: 0-1 \(got \[5\]\)$"
        with pytest.raises(SpecError, match=problem):
            node.agent.logs(ranks=[1, 5], follow=False)
        node.rendezvous.start_round(1, group_rank=2, nodes=3)
        await node.rendezvous.wait_report(RoundSucceeded, 2)
        node.rendezvous.instruct(GOOD_END)
        await node.agent.wait()
        assert [line.rank async for line in reader] == [5]


async def test_another_round_takes_the_place_of_the_one_that_runs(tmp_path: Path) -> None:
    """The workers are stopped by the plan, and then started in their new places."""
    async with member(node_spec(tmp_path, POLITE)) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0, group_rank=0, nodes=1)
        await rendezvous.wait_report(RoundStarted)
        first = await until(noted(tmp_path, 2))
        renoted(tmp_path, 0, 1)
        rendezvous.start_round(1, RestartCause(1, "b joined", 0), group_rank=0, nodes=2)
        second = await until(noted(tmp_path, 2))
        assert not any(map(alive, first))
        assert all(map(alive, second))
        await rendezvous.wait_report(RoundStarted, 2)
        by_the_stop = await rendezvous.wait_report(RoundStopped)
        assert by_the_stop.first_success is None
    assert [type(report) for report in rendezvous.reports] == [
        RoundStarted,
        RoundStopped,
        RoundStarted,
        NodeDraining,
        RoundStopped,
    ]
    ended = rendezvous.reports[1]
    assert isinstance(ended, RoundStopped)
    assert (ended.round, ended.failures, ended.is_permanent) == (0, (), False)
    assert ended.runtime > 0
    (changed,) = node.events_of(MembershipChanged)
    assert (changed.attempt, changed.why, changed.round, changed.nodes) == (1, "b joined", 1, 2)
    assert node.events_of(StopRequested)[0].reason == "b joined"
    assert [event.attempt for event in node.events_of(WorkerExited)][:2] == [0, 0]
    assert [event.attempt for event in node.events_of(WorkerStarted)] == [0, 0, 1, 1]
    assert not node.events_of(Restarting)


async def test_workers_see_a_change_until_it_is_withdrawn_or_begins(tmp_path: Path) -> None:
    """The one that was sent last; the workers of the next round see none."""
    polls = """
import os, sys, time
from elastic_aio.worker import pending_change
seen = "?"
while True:
    change = pending_change()
    if change is not None:
        assert 0 < change.deadline - time.time() < 31, change
    if seen != (seen := None if change is None else change.reason):
        with open(os.environ["NOTES"] + "/seen", "a") as file:
            print(os.environ["ELASTIC_AIO_ROUND"], seen, file=file)
    time.sleep(0.01)
"""
    noted_file = tmp_path / "seen"

    def seen(count: int) -> list[str]:
        lines = noted_file.read_text().splitlines() if noted_file.exists() else []
        return lines if len(lines) >= count else []

    async with member(node_spec(tmp_path, python(polls), 1)) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0)
        await until(lambda: seen(1))
        rendezvous.instruct(ChangePending(0, "c joined", 30.0))
        await until(lambda: seen(2))
        rendezvous.instruct(ChangePending(0, "c, d joined", 30.0))
        await until(lambda: seen(3))
        rendezvous.instruct(ChangePending(0, "gone"))
        await until(lambda: seen(4))
        rendezvous.instruct(ChangePending(0, "e joined", 30.0))
        await until(lambda: seen(5))
        rendezvous.start_round(1, RestartCause(1, "e joined", 0))
        await rendezvous.wait_report(RoundStopped)
        # The workers of the former round may have seen that the change has begun.
        first = [line for line in seen(1) if line[0] == "0"][:5]
        assert first == ["0 None", "0 c joined", "0 c, d joined", "0 None", "0 e joined"]
        await until(lambda: "1 None" in seen(1))
        rendezvous.instruct(ChangePending(1, "f joined", 30.0))
        await until(lambda: "1 f joined" in seen(1))
    changes = [(one.attempt, one.why, one.time_left) for one in node.events_of(MembershipPending)]
    assert changes == [
        (0, "c joined", 30.0),
        (0, "c, d joined", 30.0),
        (0, "gone", None),
        (0, "e joined", 30.0),
        (1, "f joined", 30.0),
    ]
    assert not list(tmp_path.glob("logs/*/pending_change*"))


async def test_a_notice_after_a_change_is_shown_until_the_workers_have_ended(
    tmp_path: Path,
) -> None:
    """The stop that ends the notice does not withdraw it; the stop for a change does."""
    saves = """
import os, signal, time
from elastic_aio.worker import pending_change

def save(*_):
    with open(os.environ["NOTES"] + "/seen", "w") as file:
        file.write(str(pending_change() and pending_change().reason))
    os._exit(0)

signal.signal(signal.SIGTERM, save)
while pending_change() is None:
    time.sleep(0.01)
open(os.environ["NOTES"] + "/ready", "w").close()
while True:
    time.sleep(1)
"""
    async with member(node_spec(tmp_path, python(saves), 1)) as node:
        node.rendezvous.start_round(0)
        node.rendezvous.instruct(ChangePending(0, "c joined", 30.0))
        await until((tmp_path / "ready").exists)
        until_then = time.time() + 0.1
        node.rendezvous.instruct(ChangePending(0, "USR1", 0.1, PREEMPTION_CHANGE, until_then))
        await node.rendezvous.wait_report(RoundStopped)
        assert (tmp_path / "seen").read_text() == "preemption"


async def test_workers_that_run_long_after_those_of_other_nodes_are_reported(
    tmp_path: Path,
) -> None:
    """And fail the attempt once the limit is over."""
    wait = python("import os, time; time.sleep(99 * (int(os.environ['RANK']) != 2))")
    limits = LivenessSpec(exit_skew_timeout=62)
    async with member(node_spec(tmp_path, wait, liveness=limits)) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0, group_rank=1, nodes=3)
        await until(lambda: node.events_of(WorkerExited))
        rendezvous.instruct(PeersFinished(1, 4, 99.0))
        rendezvous.instruct(PeersFinished(0, 2, 61.0))
        stopped = await rendezvous.wait_report(RoundStopped)
    (late,) = node.events_of(WorkersUnfinished)
    assert (late.finished, late.running, late.world_size) == (3, (3,), 6)
    assert late.seconds >= 61
    (failed,) = stopped.failures
    assert failed.message == "not finished 62 s after the first success (exit skew timeout)"
    assert stopped.first_success is not None
    assert stopped.first_success[0] == 2


async def test_only_the_newest_of_several_rounds_begins(tmp_path: Path) -> None:
    """Rounds that follow each other while workers are being stopped are passed over."""
    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.start_round(0)
        await node.rendezvous.wait_report(RoundStarted)
        for number in (1, 2, 3, 2):
            node.rendezvous.start_round(number)
        await node.rendezvous.wait_report(RoundStarted, 2)
        assert node.rendezvous.reports[-1] == RoundStarted(3)
    assert {event.attempt for event in node.events_of(WorkerStarted)} == {0, 3}


async def test_a_stop_round_and_a_restart(tmp_path: Path) -> None:
    """A failure elsewhere stops the workers here; the events have it, and the restart."""
    cause = RestartCause(1, "restart 1 of 3 (max restarts)", 1, 0.5, failure_elsewhere())
    async with member(node_spec(tmp_path, noting())) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0)
        await rendezvous.wait_report(RoundStarted)
        pids = await until(noted(tmp_path, 2))
        renoted(tmp_path, 0, 1)
        rendezvous.instruct(StopRound(0, "a worker on b has failed"))
        assert (await rendezvous.wait_report(RoundStopped)).failures == ()
        assert not any(map(alive, pids))
        rendezvous.instruct(StopRound(0, "a worker on b has failed"))
        rendezvous.instruct(RestartPending(cause))
        rendezvous.start_round(1, cause, restarts=1)
        await until(noted(tmp_path, 2))
        await rendezvous.wait_report(RoundStarted, 2)
    assert [type(report) for report in rendezvous.reports] == [
        RoundStarted,
        RoundStopped,
        RoundStarted,
        NodeDraining,
        RoundStopped,
    ]
    (failed,) = node.events_of(AttemptFailed)
    assert (failed.attempt, failed.root.host) == (0, "elsewhere")
    (restarting,) = node.events_of(Restarting)
    assert (restarting.attempt, restarting.delay, restarting.restarts) == (1, 0.5, 1)
    assert node.events_of(StopRequested)[0].reason == "a worker on b has failed"


# --------------------------------------------------------------------- failures


async def test_a_failure_is_reported_at_once(tmp_path: Path) -> None:
    """The first report comes while the siblings still run, the details when they have exited."""
    fails = 'if [ $LOCAL_RANK = 0 ]; then until [ -e "$NOTES/3" ]; do :; done; exit 5; fi; '
    spec = node_spec(tmp_path, ignoring_signals(fails + "exec sleep 99"), stop=StopPlan.within(0.3))
    seen: list[tuple[Report, bool, int]] = []
    async with member(spec) as node:
        rendezvous = node.rendezvous

        def look(report: Report) -> None:
            pid = int((tmp_path / "3").read_text()) if (tmp_path / "3").exists() else 0
            seen.append((report, alive(pid), len(node.events_of(StopRequested))))

        rendezvous.on_report = look
        rendezvous.start_round(4, group_rank=1)
        ended = await rendezvous.wait_report(RoundStopped)
    failing = next(entry for entry in seen if isinstance(entry[0], RoundFailing))
    assert failing == (RoundFailing(4, "local rank 0 failed (exit code 5)"), True, 0)
    assert [was_alive for report, was_alive, _ in seen if isinstance(report, RoundStopped)] == [
        False
    ]
    assert [(one.rank, one.local_rank, one.is_victim) for one in ended.failures] == [
        (2, 0, False),
        (3, 1, True),
    ]
    assert (ended.round, ended.exit_code, ended.is_permanent) == (4, 5, False)


@pytest.mark.slow
@pytest.mark.parametrize("is_begin", [False, True], ids=["halt", "begin"])
async def test_a_failure_is_not_lost_to_an_instruction(tmp_path: Path, is_begin: bool) -> None:
    """A failure before the instruction is reported, whatever the instruction is."""
    fails = 'until [ -e "$NOTES/started" ]; do :; done; exit 5'
    script = f"if [ $RANK = 0 ]; then {fails}; fi; exec sleep 99"
    spec = node_spec(tmp_path, ignoring_signals(script), stop=StopPlan.within(0.3))
    async with member(spec) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0)
        await rendezvous.wait_report(RoundStarted)
        (tmp_path / "started").touch()
        await rendezvous.wait_report(RoundFailing)
        if is_begin:
            rendezvous.start_round(1, group_rank=1)
        else:
            rendezvous.instruct(StopRound(0, "a worker here has failed"))
        ended = await rendezvous.wait_report(RoundStopped)
        assert [failure.status.code for failure in ended.failures][:1] == [5]
        if is_begin:
            await rendezvous.wait_report(RoundStarted, 2)
    assert len([report for report in rendezvous.reports if isinstance(report, RoundFailing)]) == 1


async def test_an_error_recorded_before_a_stop_round_is_reported(tmp_path: Path) -> None:
    """A worker that has failed by itself is a culprit, even if the stop was faster than its end."""
    extra = {"timestamp": str(int(time.time()))}
    text = json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}})
    first = f"""echo '{text}' > "$TORCHELASTIC_ERROR_FILE" """
    async with member(node_spec(tmp_path, noting(first=first), 1)) as node:
        node.rendezvous.start_round(0)
        await until(noted(tmp_path, 1))
        node.rendezvous.instruct(StopRound(0, "a worker on b has failed"))
        ended = await node.rendezvous.wait_report(RoundStopped)
    assert [failure.summary.rpartition(": ")[2] for failure in ended.failures] == ["x"]
    assert not ended.failures[0].is_victim


async def test_a_program_that_does_not_exist_is_final(tmp_path: Path) -> None:
    """No other attempt could start it: the report says so, with a shell's exit code."""
    async with member(node_spec(tmp_path, ["./no-such-program"])) as node:
        node.rendezvous.start_round(0)
        ended = await node.rendezvous.wait_report(RoundStopped)
    assert isinstance(node.rendezvous.reports[0], RoundFailing)
    assert (ended.is_permanent, ended.exit_code) == (True, 127)
    assert ended.permanent_reason == "another attempt could not start it either"
    assert "no-such-program" in ended.failures[0].message


# ----------------------------------------------------------------------- the end


async def test_a_failure_elsewhere_ends_the_job_here_too(tmp_path: Path) -> None:
    """The culprit is named with host, rank and traceback, though it never ran here."""
    root = failure_elsewhere(traceback="Traceback...\nValueError: there")
    ending = JobOutcome(JobState.FAILED, "all 3 restarts are used up", 9, 3, (root,))
    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.start_round(6, group_rank=0)
        pids = await until(noted(tmp_path, 2))
        node.rendezvous.instruct(EndJob(ending))
        with pytest.raises(JobFailed) as caught:
            await node.agent.wait()
        assert not any(map(alive, pids))
    error, result = caught.value, caught.value.result
    assert not isinstance(error, RendezvousFailed)
    assert error.failures == (root,)
    assert (result.exit_code, result.restarts, result.reason) == (9, 3, ending.why)
    assert [attempt.number for attempt in result.attempts] == [6]
    assert len(result.attempts[0].workers) == 2
    shown = format_failure(result, "job")
    assert "elsewhere" in shown
    assert "ValueError: there" in shown
    assert node.rendezvous.leave_reasons == [ending.why]
    (failed,) = node.events_of(AttemptFailed)
    assert (failed.attempt, failed.root) == (6, root)
    assert isinstance(node.events[-1], JobFinished)


async def test_a_node_that_never_ran_names_the_culprit_too(tmp_path: Path) -> None:
    """One that was standing by has an attempt without workers, which carries the failures."""
    root = failure_elsewhere()
    ending = JobOutcome(JobState.FAILED, "no restarts allowed", 9, 0, (root,))
    async with member(node_spec(tmp_path, ["true"])) as node:
        node.rendezvous.instruct(EndJob(ending))
        with pytest.raises(JobFailed, match=r"rank 3 \(pid 4242\): exit code 9") as caught:
            await node.agent.wait()
    (attempt,) = caught.value.result.attempts
    assert (attempt.workers, attempt.failures) == ((), (root,))


async def test_a_rendezvous_that_fails(tmp_path: Path) -> None:
    """It is the rendezvous that failed, and the exception says so."""
    why = "only 1 of 2 nodes came together (a); waited 5 s (join_timeout)"
    ending = JobOutcome(JobState.FAILED, why, RENDEZVOUS_FAILED, is_rendezvous=True)
    async with member(node_spec(tmp_path, ["true"])) as node:
        node.rendezvous.instruct(EndJob(ending))
        with pytest.raises(RendezvousFailed, match="only 1 of 2 nodes came together") as caught:
            await node.agent.wait()
    assert caught.value.result.exit_code == RENDEZVOUS_FAILED
    assert caught.value.result.attempts == ()


async def test_a_rendezvous_that_cannot_be_joined(tmp_path: Path) -> None:
    """The one clear line reaches the caller as it is."""
    error = HostError("cannot listen on 127.0.0.1:1: permission denied")

    def refuse(rendezvous: FakeRendezvous) -> None:
        rendezvous.open_error = error

    async with member(node_spec(tmp_path, ["true"]), refuse) as node:
        with pytest.raises(HostError) as caught:
            await node.agent.wait()
    assert caught.value is error
    assert node.events_of(JobFinished)[0].exit_code == 1


async def test_a_success_waits_for_the_others_and_follows_instructions(tmp_path: Path) -> None:
    """A node in the exit barrier takes part in the next round like any other."""
    async with member(node_spec(tmp_path, ["true"])) as node:
        rendezvous = node.rendezvous
        rendezvous.start_round(0)
        await rendezvous.wait_report(RoundSucceeded)
        rendezvous.start_round(1, RestartCause(1, "b is lost", 0))
        await rendezvous.wait_report(RoundSucceeded, 2)
        rendezvous.instruct(StopRound(1, "a worker on c has failed"))
        await rendezvous.wait_report(RoundStopped)
        rendezvous.start_round(2)
        await rendezvous.wait_report(RoundSucceeded, 3)
        rendezvous.instruct(GOOD_END)
        result = await node.agent.wait()
    assert [attempt.number for attempt in result.attempts] == [0, 1, 2]
    assert rendezvous.leave_reasons == ["all workers have finished"]


async def test_the_wait_for_the_others_has_an_end(tmp_path: Path) -> None:
    """A node that has waited long enough is done, and says why."""
    async with member(node_spec(tmp_path, ["true"], barrier=0.05)) as node:
        node.rendezvous.start_round(3, restarts=2)
        result = await node.agent.wait()
    assert (result.exit_code, result.restarts) == (0, 2)
    assert result.reason == (
        "all workers have finished on this node;"
        " others had not after 0.05 s (rendezvous.exit_barrier_timeout)"
    )
    assert node.rendezvous.leave_reasons == [result.reason]


async def test_the_wait_for_the_others_can_be_cut_short(tmp_path: Path) -> None:
    """A node that has succeeded and is stopped ends as a success."""
    async with member(node_spec(tmp_path, ["true"])) as node:
        node.rendezvous.start_round(0)
        await node.rendezvous.wait_report(RoundSucceeded)
        await node.agent.stop(signal="SIGINT", reason="Ctrl-C")
        result = await node.agent.wait()
    assert result.state is JobState.SUCCEEDED
    assert result.reason.endswith("the others are not waited for: Ctrl-C (SIGINT)")


# ---------------------------------------------------------------------- stopping


async def test_a_stop_before_the_first_round(tmp_path: Path) -> None:
    """A node that waits for peers can be stopped at once."""
    async with member(node_spec(tmp_path, ["true"])) as node:
        await node.agent.stop(signal="SIGTERM")
        with pytest.raises(JobStopped) as caught:
            await node.agent.wait()
    assert caught.value.result.exit_code == 143
    assert node.rendezvous.leave_reasons == ["a stop was requested (SIGTERM)"]


async def test_a_stop_while_the_rendezvous_is_being_joined(tmp_path: Path) -> None:
    """The joining is given up, and then left."""

    def hold(rendezvous: FakeRendezvous) -> None:
        rendezvous.may_open.clear()

    async with member(node_spec(tmp_path, ["true"]), hold) as node:
        await asyncio.sleep(0)
        await node.agent.stop()
        with pytest.raises(JobStopped):
            await node.agent.wait()
    assert not node.rendezvous.is_open
    assert len(node.rendezvous.leave_reasons) == 1


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_node_that_is_stopped_leaves_after_its_workers(
    tmp_path: Path, overlap: bool
) -> None:
    """The others do not start beside them, unless rounds may overlap."""
    spec = node_spec(tmp_path, ignoring_signals(), stop=StopPlan.within(0.3))
    spec = spec.replace(rendezvous=replace(spec.rendezvous, overlap=overlap))
    running: list[bool] = []
    async with member(spec) as node:
        node.rendezvous.start_round(0)
        pids = await until(noted(tmp_path, 2))
        node.rendezvous.on_leave = lambda: running.append(all(map(alive, pids)))
        stopped = node.agent.stop(reason="pre-empted")
        node.rendezvous.start_round(1)
        await stopped
        with pytest.raises(JobStopped, match="pre-empted") as caught:
            await node.agent.wait()
    assert running == [overlap]
    assert node.rendezvous.leave_reasons == ["pre-empted"]
    drained = [NodeDraining("pre-empted"), RoundStopped(0)]
    reports = [one for one in node.rendezvous.reports if not isinstance(one, RoundStarted)]
    assert reports == ([] if overlap else drained)
    assert caught.value.result.exit_code == 143
    assert {event.attempt for event in node.events_of(WorkerStarted)} == {0}


async def test_a_stop_between_two_rounds(tmp_path: Path) -> None:
    """A node whose workers were halted can be stopped while it waits."""
    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.start_round(0)
        await until(noted(tmp_path, 2))
        node.rendezvous.instruct(StopRound(0, "too few nodes are left"))
        await node.rendezvous.wait_report(RoundStopped)
        await node.agent.stop()
        with pytest.raises(JobStopped):
            await node.agent.wait()


async def test_a_stop_after_a_failure(tmp_path: Path) -> None:
    """The failure is how the job has ended on this node; the stop only ends what is left."""
    script = 'if [ $RANK = 0 ]; then until [ -e "$NOTES/1" ]; do :; done; exit 5; fi; '
    spec = node_spec(
        tmp_path, ignoring_signals(script + "exec sleep 99"), stop=StopPlan.within(0.3)
    )
    async with member(spec) as node:
        node.rendezvous.start_round(0)
        await node.rendezvous.wait_report(RoundFailing)
        await node.agent.stop()
        with pytest.raises(JobFailed, match="no restart follows: a stop was requested") as caught:
            await node.agent.wait()
    assert caught.value.result.exit_code == 5
    assert node.events_of(AttemptFailed)[0].root.status == ExitStatus(code=5)
    assert caught.value.result.failures[0].status == ExitStatus(code=5)


async def test_nothing_is_over_before_this_node_has_left(tmp_path: Path) -> None:
    """The end waits for the rendezvous, which tells the others."""
    async with member(node_spec(tmp_path, ["true"])) as node:
        node.rendezvous.may_leave.clear()
        stopped = asyncio.ensure_future(node.agent.stop())
        await node.rendezvous.wait_left()
        assert not node.events_of(JobFinished)
        assert not stopped.done()
        node.rendezvous.may_leave.set()
        await stopped
        assert len(node.events_of(JobFinished)) == 1


async def test_a_kill_waits_for_no_other_node(tmp_path: Path) -> None:
    """An immediate stop asks the rendezvous a second time, which then lets go."""
    async with member(node_spec(tmp_path, ["true"])) as node:
        node.rendezvous.may_leave.clear()
        node.rendezvous.instruct(GOOD_END)
        await node.rendezvous.wait_left()
        asked = len(node.rendezvous.leave_reasons)
        node.agent.kill()
        await node.rendezvous.wait_left(asked + 1)
        node.rendezvous.may_leave.set()
        assert (await node.agent.wait()).exit_code == 0


async def test_leaving_the_block_stops_and_leaves(tmp_path: Path) -> None:
    """The end of the block is a stop like any other."""
    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.start_round(0)
        pids = await until(noted(tmp_path, 2))
    assert not any(map(alive, pids))
    assert node.rendezvous.leave_reasons == ["the agent's block was left"]


# ----------------------------------------------------------------- what else is said


async def test_events_of_the_rendezvous_are_this_nodes_too(tmp_path: Path) -> None:
    """They get the number of the present attempt, and a place among the others."""
    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.start_round(5)
        await until(noted(tmp_path, 2))
        node.rendezvous.agent.on_event(StandbyPromoted(round=5, group_rank=1))
        node.rendezvous.agent.on_event(StandbyPromoted(attempt=9, round=5, group_rank=1))
    assert [event.attempt for event in node.events_of(StandbyPromoted)] == [5, 9]
    assert [event.seq for event in node.events] == list(range(len(node.events)))
    before = len(node.events)
    node.rendezvous.agent.on_event(StandbyPromoted(round=6, group_rank=1))
    node.rendezvous.instruct(StopRound(9, "no node is left"))
    assert len(node.events) == before, "nothing comes after the last event"


async def test_the_coordinating_node_asks_the_user(tmp_path: Path) -> None:
    """The callback may answer at once or later; without one the policy decides."""

    async def later(failure: object) -> RestartAction:
        await asyncio.sleep(0)
        return RestartAction.GIVE_UP

    for decide, answer in (
        (lambda _: RestartAction.RESTART, RestartAction.RESTART),
        (later, RestartAction.GIVE_UP),
    ):
        restart = RestartPolicy(decide=decide)
        spec = node_spec(tmp_path, ["true"], max_restarts=1, restart=restart)
        async with member(spec) as node:
            assert await node.rendezvous.agent.decide(failure_elsewhere()) is answer
    async with member(node_spec(tmp_path, ["true"])) as node:
        assert await node.rendezvous.agent.decide(failure_elsewhere()) is RestartAction.DEFAULT


@pytest.mark.both_loops
async def test_a_callback_that_blocks_does_not_block_the_node(tmp_path: Path) -> None:
    asked, answer, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def decide(failure: object) -> RestartAction:
        loop.call_soon_threadsafe(asked.set)
        assert answer.wait(30.0), "the loop did not run meanwhile"
        return RestartAction.GIVE_UP

    restart = RestartPolicy(decide=decide)
    spec = node_spec(tmp_path, ["true"], max_restarts=1, restart=restart)
    async with member(spec) as node:
        deciding = asyncio.ensure_future(node.rendezvous.agent.decide(failure_elsewhere()))
        await asked.wait()
        answer.set()
        assert await deciding is RestartAction.GIVE_UP


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), asyncio.CancelledError(), BaseException("x"), GeneratorExit("x")],
    ids=["own", "cancel", "base", "exit"],
)
async def test_a_callback_that_fails_is_raised_on_its_node(
    tmp_path: Path, error: BaseException
) -> None:
    """The coordinator ends the job by it, and the callers here get the error itself."""

    def decide(failure: object) -> RestartAction:
        raise error

    restart = RestartPolicy(decide=decide)
    spec = node_spec(tmp_path, ["true"], max_restarts=1, restart=restart)
    async with member(spec) as node:
        with pytest.raises((KeyError, RuntimeError)):
            await node.rendezvous.agent.decide(failure_elsewhere())
        ending = JobOutcome(JobState.FAILED, "restart.decide raised", 9, 0, (failure_elsewhere(),))
        node.rendezvous.instruct(EndJob(ending))
        with pytest.raises(type(error)) as caught:
            await node.agent.wait()
    assert caught.value is error


async def test_a_backend_that_does_not_exist(tmp_path: Path) -> None:
    """Entering refuses what cannot be, and leaves nothing open."""
    rendezvous = RendezvousSpec(backend="carrier-pigeon")
    spec = node_spec(tmp_path, ["true"], rendezvous=rendezvous)
    with pytest.raises(SpecError, match=r"rendezvous\.backend: must be one of .*carrier-pigeon"):
        async with Agent(spec):
            raise AssertionError("never entered")


async def test_a_defect_of_the_rendezvous_leaves_nothing(tmp_path: Path) -> None:
    """Even then no worker is left, and the node has left the rendezvous."""

    def fail(report: Report) -> None:
        raise ZeroDivisionError

    async with member(node_spec(tmp_path, noting())) as node:
        node.rendezvous.on_report = fail
        node.rendezvous.start_round(0)
        with pytest.raises(ZeroDivisionError):
            await node.agent.wait()
    assert len(node.rendezvous.leave_reasons) == 1
    pids = [event.pid for event in node.events_of(WorkerStarted)]
    assert not any(map(alive, pids))
