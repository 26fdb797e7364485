"""A node of a job of many, with real workers, in a rendezvous that the test plays."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    JobFailed,
    JobStopped,
    MembershipChanged,
    Promoted,
    RendezvousFailed,
    Restarting,
    RoundFormed,
    StopPlan,
    WorkerExited,
    WorkerStarted,
)
from elastic_aio.errors import SpecError, SurroundingsError
from elastic_aio.events import AttemptFailed, JobFinished, StopRequested
from elastic_aio.outcome import ExitStatus, JobState
from elastic_aio.policy import Action, RestartPolicy
from elastic_aio.rendezvous.base import (
    RENDEZVOUS_FAILED,
    Cause,
    Conclude,
    Ended,
    Ending,
    Failing,
    Halt,
    Pause,
    Report,
    Running,
    Succeeded,
)
from elastic_aio.rendezvousspec import RendezvousSpec
from elastic_aio.report import format_failure
from tests.support.children import POLITE, deaf, noted, noting, python, until
from tests.support.scripted import Scripted, failure_elsewhere, member, node_spec
from tests.support.traces import alive

GOOD_END = Conclude(Ending(JobState.SUCCEEDED, "all workers have finished", 0, 2))
SAY_PLACE = """
import json, os
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"
more = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"
shared = "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_WORLD_SIZE"
print(json.dumps({name: os.environ[name] for name in names + more + shared}))
"""


def renoted(folder: Path, *ranks: int) -> None:
    """Forget what workers have noted, before the next ones do."""
    for rank in ranks:
        (folder / str(rank)).unlink()


# ---------------------------------------------------------------------- rounds


async def test_a_round_gives_the_workers_their_places(tmp_path: Path) -> None:
    """Ranks, sizes, the meeting point and the counts are those of the placement."""
    async with member(node_spec(tmp_path, python(SAY_PLACE))) as one:
        rendezvous = one.rendezvous
        assert (rendezvous.card.nproc, rendezvous.card.pid) == (2, os.getpid())
        assert rendezvous.run_id == "shared"
        rendezvous.begin(7, group_rank=2, nodes=3, restarts=5, port=1234)
        assert await rendezvous.reported(Succeeded) == Succeeded(7)
        rendezvous.instruct(GOOD_END)
        result = await one.agent.wait()
    assert rendezvous.reports == [Running(7), Succeeded(7)]
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
    (formed,) = one.told(RoundFormed)
    assert (formed.attempt, formed.round, formed.group_rank, formed.changes) == (7, 7, 2, 4)
    assert (formed.group_world_size, formed.world_size, formed.master_port) == (3, 6, 1234)
    assert {event.attempt for event in one.told(WorkerStarted)} == {7}
    assert [event.rank for event in one.told(WorkerStarted)] == [4, 5]
    assert one.told(JobFinished)[0].attempt == 7


async def test_another_round_takes_the_place_of_the_one_that_runs(tmp_path: Path) -> None:
    """The workers are stopped by the plan, and then started in their new places."""
    async with member(node_spec(tmp_path, POLITE)) as one:
        rendezvous = one.rendezvous
        rendezvous.begin(0, group_rank=0, nodes=1)
        await rendezvous.reported(Running)
        first = await until(noted(tmp_path, 2))
        renoted(tmp_path, 0, 1)
        rendezvous.begin(1, Cause(1, "b joined", 0), group_rank=0, nodes=2)
        second = await until(noted(tmp_path, 2))
        assert not any(map(alive, first))
        assert all(map(alive, second))
        await rendezvous.reported(Running, 2)
    assert [type(report) for report in rendezvous.reports] == [Running, Ended, Running]
    ended = rendezvous.reports[1]
    assert isinstance(ended, Ended)
    assert (ended.round, ended.failures, ended.is_final) == (0, (), False)
    assert ended.ran > 0
    (changed,) = one.told(MembershipChanged)
    assert (changed.attempt, changed.why, changed.round, changed.nodes) == (1, "b joined", 1, 2)
    assert one.told(StopRequested)[0].reason == "b joined"
    assert [event.attempt for event in one.told(WorkerExited)][:2] == [0, 0]
    assert [event.attempt for event in one.told(WorkerStarted)] == [0, 0, 1, 1]
    assert not one.told(Restarting)


async def test_only_the_newest_of_several_rounds_begins(tmp_path: Path) -> None:
    """Rounds that follow each other while workers are being stopped are passed over."""
    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.begin(0)
        await one.rendezvous.reported(Running)
        for number in (1, 2, 3, 2):
            one.rendezvous.begin(number)
        await one.rendezvous.reported(Running, 2)
        assert one.rendezvous.reports[-1] == Running(3)
    assert {event.attempt for event in one.told(WorkerStarted)} == {0, 3}


async def test_a_halt_and_a_restart(tmp_path: Path) -> None:
    """A failure elsewhere stops the workers here; the readers hear of it, and of the restart."""
    cause = Cause(1, "restart 1 of 3 (max_restarts)", 1, 0.5, failure_elsewhere())
    async with member(node_spec(tmp_path, noting())) as one:
        rendezvous = one.rendezvous
        rendezvous.begin(0)
        await rendezvous.reported(Running)
        pids = await until(noted(tmp_path, 2))
        renoted(tmp_path, 0, 1)
        rendezvous.instruct(Halt(0, "a worker on b has failed"))
        assert (await rendezvous.reported(Ended)).failures == ()
        assert not any(map(alive, pids))
        rendezvous.instruct(Halt(0, "a worker on b has failed"))
        rendezvous.instruct(Pause(cause))
        rendezvous.begin(1, cause, restarts=1)
        await until(noted(tmp_path, 2))
        await rendezvous.reported(Running, 2)
    assert [type(report) for report in rendezvous.reports] == [Running, Ended, Running]
    (failed,) = one.told(AttemptFailed)
    assert (failed.attempt, failed.root.host) == (0, "elsewhere")
    (restarting,) = one.told(Restarting)
    assert (restarting.attempt, restarting.delay, restarting.restarts) == (1, 0.5, 1)
    assert one.told(StopRequested)[0].reason == "a worker on b has failed"


# --------------------------------------------------------------------- failures


async def test_a_failure_is_told_at_once(tmp_path: Path) -> None:
    """The others hear of it while the siblings still run; the details come when they do not."""
    fails = 'if [ $LOCAL_RANK = 0 ]; then until [ -e "$NOTES/3" ]; do :; done; exit 5; fi; '
    spec = node_spec(tmp_path, deaf(fails + "exec sleep 99"), stop=StopPlan.within(0.3))
    seen: list[tuple[Report, bool, int]] = []
    async with member(spec) as one:
        rendezvous = one.rendezvous

        def look(report: Report) -> None:
            pid = int((tmp_path / "3").read_text()) if (tmp_path / "3").exists() else 0
            seen.append((report, alive(pid), len(one.told(StopRequested))))

        rendezvous.on_report = look
        rendezvous.begin(4, group_rank=1)
        ended = await rendezvous.reported(Ended)
    failing = next(entry for entry in seen if isinstance(entry[0], Failing))
    assert failing == (Failing(4, "local rank 0 failed (exit code 5)"), True, 0)
    assert [was_alive for report, was_alive, _ in seen if isinstance(report, Ended)] == [False]
    assert [(one.rank, one.local_rank, one.is_victim) for one in ended.failures] == [
        (2, 0, False),
        (3, 1, True),
    ]
    assert (ended.round, ended.exit_code, ended.is_final) == (4, 5, False)


@pytest.mark.parametrize("is_begin", [False, True], ids=["halt", "begin"])
async def test_a_failure_is_not_lost_to_an_instruction(tmp_path: Path, is_begin: bool) -> None:
    """What failed before the instruction came is told, whatever is to follow."""
    fails = 'until [ -e "$NOTES/started" ]; do :; done; exit 5'
    script = f"if [ $RANK = 0 ]; then {fails}; fi; exec sleep 99"
    spec = node_spec(tmp_path, deaf(script), stop=StopPlan.within(0.3))
    async with member(spec) as one:
        rendezvous = one.rendezvous
        rendezvous.begin(0)
        await rendezvous.reported(Running)
        (tmp_path / "started").touch()
        await rendezvous.reported(Failing)
        if is_begin:
            rendezvous.begin(1, group_rank=1)
        else:
            rendezvous.instruct(Halt(0, "a worker here has failed"))
        ended = await rendezvous.reported(Ended)
        assert [failure.status.code for failure in ended.failures][:1] == [5]
        if is_begin:
            await rendezvous.reported(Running, 2)
    assert len([report for report in rendezvous.reports if isinstance(report, Failing)]) == 1


async def test_an_error_that_was_recorded_before_a_halt_is_told(tmp_path: Path) -> None:
    """A worker that has failed by itself is a culprit, even if the stop was faster than its end."""
    text = json.dumps({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}})
    first = f"""echo '{text}' > "$TORCHELASTIC_ERROR_FILE" """
    async with member(node_spec(tmp_path, noting(first=first), 1)) as one:
        one.rendezvous.begin(0)
        await until(noted(tmp_path, 1))
        one.rendezvous.instruct(Halt(0, "a worker on b has failed"))
        ended = await one.rendezvous.reported(Ended)
    assert [failure.summary.rpartition(": ")[2] for failure in ended.failures] == ["x"]
    assert not ended.failures[0].is_victim


async def test_a_program_that_does_not_exist_is_final(tmp_path: Path) -> None:
    """No other attempt could start it: the others are told so, with a shell's exit code."""
    async with member(node_spec(tmp_path, ["./no-such-program"])) as one:
        one.rendezvous.begin(0)
        ended = await one.rendezvous.reported(Ended)
    assert isinstance(one.rendezvous.reports[0], Failing)
    assert (ended.is_final, ended.exit_code) == (True, 127)
    assert ended.final_why == "another attempt could not start it either"
    assert "no-such-program" in ended.failures[0].message


# ----------------------------------------------------------------------- the end


async def test_a_failure_elsewhere_ends_the_job_here_too(tmp_path: Path) -> None:
    """The culprit is named with host, rank and traceback, though it never ran here."""
    root = failure_elsewhere(traceback="Traceback...\nValueError: there")
    ending = Ending(JobState.FAILED, "all 3 restarts are used up", 9, 3, (root,))
    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.begin(6, group_rank=0)
        pids = await until(noted(tmp_path, 2))
        one.rendezvous.instruct(Conclude(ending))
        with pytest.raises(JobFailed) as caught:
            await one.agent.wait()
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
    assert one.rendezvous.left == [ending.why]
    (failed,) = one.told(AttemptFailed)
    assert (failed.attempt, failed.root) == (6, root)
    assert isinstance(one.events[-1], JobFinished)


async def test_a_node_that_never_ran_names_the_culprit_too(tmp_path: Path) -> None:
    """One that was standing by has an attempt without workers, which carries the failures."""
    root = failure_elsewhere()
    ending = Ending(JobState.FAILED, "no restarts allowed", 9, 0, (root,))
    async with member(node_spec(tmp_path, ["true"])) as one:
        one.rendezvous.instruct(Conclude(ending))
        with pytest.raises(JobFailed, match=r"rank 3 \(pid 4242\): exit code 9") as caught:
            await one.agent.wait()
    (attempt,) = caught.value.result.attempts
    assert (attempt.workers, attempt.failures) == ((), (root,))


async def test_nodes_that_do_not_come_together(tmp_path: Path) -> None:
    """It is the rendezvous that failed, and the exception says so."""
    why = "only 1 of 2 nodes came together (a); waited 5 s (join_timeout)"
    ending = Ending(JobState.FAILED, why, RENDEZVOUS_FAILED, is_rendezvous=True)
    async with member(node_spec(tmp_path, ["true"])) as one:
        one.rendezvous.instruct(Conclude(ending))
        with pytest.raises(RendezvousFailed, match="only 1 of 2 nodes came together") as caught:
            await one.agent.wait()
    assert caught.value.result.exit_code == RENDEZVOUS_FAILED
    assert caught.value.result.attempts == ()


async def test_a_rendezvous_that_cannot_be_joined(tmp_path: Path) -> None:
    """The one clear line reaches the caller as it is."""
    error = SurroundingsError("cannot listen on 127.0.0.1:1: permission denied")

    def refuse(rendezvous: Scripted) -> None:
        rendezvous.open_error = error

    async with member(node_spec(tmp_path, ["true"]), refuse) as one:
        with pytest.raises(SurroundingsError) as caught:
            await one.agent.wait()
    assert caught.value is error
    assert one.told(JobFinished)[0].exit_code == 1


async def test_a_success_waits_for_the_others_and_obeys_meanwhile(tmp_path: Path) -> None:
    """A node in the exit barrier takes part in the next round like any other."""
    async with member(node_spec(tmp_path, ["true"])) as one:
        rendezvous = one.rendezvous
        rendezvous.begin(0)
        await rendezvous.reported(Succeeded)
        rendezvous.begin(1, Cause(1, "b is lost", 0))
        await rendezvous.reported(Succeeded, 2)
        rendezvous.instruct(Halt(1, "a worker on c has failed"))
        await rendezvous.reported(Ended)
        rendezvous.begin(2)
        await rendezvous.reported(Succeeded, 3)
        rendezvous.instruct(GOOD_END)
        result = await one.agent.wait()
    assert [attempt.number for attempt in result.attempts] == [0, 1, 2]
    assert rendezvous.left == ["all workers have finished"]


async def test_the_wait_for_the_others_has_an_end(tmp_path: Path) -> None:
    """A node that has waited long enough is done, and says why."""
    async with member(node_spec(tmp_path, ["true"], barrier=0.05)) as one:
        one.rendezvous.begin(3, restarts=2)
        result = await one.agent.wait()
    assert (result.exit_code, result.restarts) == (0, 2)
    assert result.reason == (
        "all workers have finished on this node;"
        " others had not after 0.05 s (rendezvous.exit_barrier_timeout)"
    )
    assert one.rendezvous.left == [result.reason]


async def test_the_wait_for_the_others_can_be_cut_short(tmp_path: Path) -> None:
    """Whoever stops a node that has succeeded gets a success."""
    async with member(node_spec(tmp_path, ["true"])) as one:
        one.rendezvous.begin(0)
        await one.rendezvous.reported(Succeeded)
        await one.agent.stop(signal="SIGINT", reason="Ctrl-C")
        result = await one.agent.wait()
    assert result.state is JobState.SUCCEEDED
    assert result.reason.endswith("the others are not waited for: SIGINT was received")


# ---------------------------------------------------------------------- stopping


async def test_a_stop_before_the_first_round(tmp_path: Path) -> None:
    """Whoever waits for peers can be stopped at once."""
    async with member(node_spec(tmp_path, ["true"])) as one:
        await one.agent.stop(signal="SIGTERM")
        with pytest.raises(JobStopped) as caught:
            await one.agent.wait()
    assert caught.value.result.exit_code == 143
    assert one.rendezvous.left == ["SIGTERM was received"]


async def test_a_stop_while_the_rendezvous_is_being_joined(tmp_path: Path) -> None:
    """The joining is given up, and then left."""

    def hold(rendezvous: Scripted) -> None:
        rendezvous.may_open.clear()

    async with member(node_spec(tmp_path, ["true"]), hold) as one:
        await asyncio.sleep(0)
        await one.agent.stop()
        with pytest.raises(JobStopped):
            await one.agent.wait()
    assert not one.rendezvous.is_open
    assert len(one.rendezvous.left) == 1


async def test_a_stop_while_workers_run_leaves_first(tmp_path: Path) -> None:
    """The others can go on while the workers of this node are still being stopped."""
    spec = node_spec(tmp_path, deaf(), stop=StopPlan.within(0.3))
    running: list[bool] = []
    async with member(spec) as one:
        one.rendezvous.begin(0)
        pids = await until(noted(tmp_path, 2))
        one.rendezvous.on_leave = lambda: running.append(all(map(alive, pids)))
        stopped = one.agent.stop(reason="pre-empted")
        one.rendezvous.begin(1)
        await stopped
        with pytest.raises(JobStopped, match="pre-empted") as caught:
            await one.agent.wait()
    assert running == [True]
    assert one.rendezvous.left == ["pre-empted"]
    assert not any(isinstance(report, Ended) for report in one.rendezvous.reports)
    assert caught.value.result.exit_code == 143
    assert {event.attempt for event in one.told(WorkerStarted)} == {0}


async def test_a_stop_between_two_rounds(tmp_path: Path) -> None:
    """A node whose workers were halted can be stopped while it waits."""
    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.begin(0)
        await until(noted(tmp_path, 2))
        one.rendezvous.instruct(Halt(0, "too few nodes are left"))
        await one.rendezvous.reported(Ended)
        await one.agent.stop()
        with pytest.raises(JobStopped):
            await one.agent.wait()


async def test_a_stop_after_a_failure(tmp_path: Path) -> None:
    """The readers hear what had failed; the job was stopped all the same."""
    script = 'if [ $RANK = 0 ]; then until [ -e "$NOTES/1" ]; do :; done; exit 5; fi; '
    spec = node_spec(tmp_path, deaf(script + "exec sleep 99"), stop=StopPlan.within(0.3))
    async with member(spec) as one:
        one.rendezvous.begin(0)
        await one.rendezvous.reported(Failing)
        await one.agent.stop()
        with pytest.raises(JobStopped) as caught:
            await one.agent.wait()
    assert one.told(AttemptFailed)[0].root.status == ExitStatus(code=5)
    assert caught.value.result.failures[0].status == ExitStatus(code=5)


async def test_nothing_is_over_before_this_node_has_left(tmp_path: Path) -> None:
    """The end waits for the rendezvous, which tells the others."""
    async with member(node_spec(tmp_path, ["true"])) as one:
        one.rendezvous.may_leave.clear()
        stopped = asyncio.ensure_future(one.agent.stop())
        await one.rendezvous.has_been_left()
        assert not one.told(JobFinished)
        assert not stopped.done()
        one.rendezvous.may_leave.set()
        await stopped
        assert len(one.told(JobFinished)) == 1


async def test_who_insists_waits_for_no_other_node(tmp_path: Path) -> None:
    """An immediate stop asks the rendezvous a second time, which then lets go."""
    async with member(node_spec(tmp_path, ["true"])) as one:
        one.rendezvous.may_leave.clear()
        one.rendezvous.instruct(GOOD_END)
        await one.rendezvous.has_been_left()
        asked = len(one.rendezvous.left)
        one.agent.kill()
        await one.rendezvous.has_been_left(asked + 1)
        one.rendezvous.may_leave.set()
        assert (await one.agent.wait()).exit_code == 0


async def test_leaving_the_block_stops_and_leaves(tmp_path: Path) -> None:
    """The end of the block is a stop like any other."""
    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.begin(0)
        pids = await until(noted(tmp_path, 2))
    assert not any(map(alive, pids))
    assert one.rendezvous.left == ["the agent's block was left"]


# ----------------------------------------------------------------- what else is said


async def test_events_of_the_rendezvous_are_this_nodes_too(tmp_path: Path) -> None:
    """They get the number of the present attempt, and a place among the others."""
    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.begin(5)
        await until(noted(tmp_path, 2))
        one.rendezvous.listener.told(Promoted(round=5, group_rank=1))
        one.rendezvous.listener.told(Promoted(attempt=9, round=5, group_rank=1))
    assert [event.attempt for event in one.told(Promoted)] == [5, 9]
    assert [event.seq for event in one.events] == list(range(len(one.events)))
    before = len(one.events)
    one.rendezvous.listener.told(Promoted(round=6, group_rank=1))
    one.rendezvous.instruct(Halt(9, "nobody is there any more"))
    assert len(one.events) == before, "nothing comes after the last event"


async def test_the_coordinating_node_asks_the_user(tmp_path: Path) -> None:
    """The callback may answer at once or later; without one the policy decides."""

    async def later(failure: object) -> Action:
        await asyncio.sleep(0)
        return Action.GIVE_UP

    for decide, answer in ((lambda _: Action.RESTART, Action.RESTART), (later, Action.GIVE_UP)):
        restart = RestartPolicy(decide=decide)
        spec = node_spec(tmp_path, ["true"], max_restarts=1, restart=restart)
        async with member(spec) as one:
            assert await one.rendezvous.listener.decide(failure_elsewhere()) is answer
    async with member(node_spec(tmp_path, ["true"])) as one:
        assert await one.rendezvous.listener.decide(failure_elsewhere()) is Action.BY_POLICY


@pytest.mark.parametrize("error", [KeyError("x"), asyncio.CancelledError()], ids=["own", "cancel"])
async def test_a_callback_that_fails_is_told_to_its_node(
    tmp_path: Path, error: BaseException
) -> None:
    """The coordinator ends the job by it, and the callers here get the error itself."""

    def decide(failure: object) -> Action:
        raise error

    restart = RestartPolicy(decide=decide)
    spec = node_spec(tmp_path, ["true"], max_restarts=1, restart=restart)
    async with member(spec) as one:
        with pytest.raises((KeyError, RuntimeError)):
            await one.rendezvous.listener.decide(failure_elsewhere())
        ending = Ending(JobState.FAILED, "restart.decide raised", 9, 0, (failure_elsewhere(),))
        one.rendezvous.instruct(Conclude(ending))
        with pytest.raises(type(error)) as caught:
            await one.agent.wait()
    assert caught.value is error


async def test_a_backend_that_does_not_exist(tmp_path: Path) -> None:
    """Entering refuses what cannot be, and leaves nothing open."""
    rendezvous = RendezvousSpec(backend="carrier-pigeon")
    spec = node_spec(tmp_path, ["true"], rendezvous=rendezvous)
    with pytest.raises(SpecError, match=r"rendezvous\.backend: must be one of .*carrier-pigeon"):
        async with Agent(spec):
            raise AssertionError("never entered")


async def test_a_defect_of_the_rendezvous_leaves_nothing(tmp_path: Path) -> None:
    """Even then all workers are gone, and the others are told."""

    def fail(report: Report) -> None:
        raise ZeroDivisionError

    async with member(node_spec(tmp_path, noting())) as one:
        one.rendezvous.on_report = fail
        one.rendezvous.begin(0)
        with pytest.raises(ZeroDivisionError):
            await one.agent.wait()
    assert len(one.rendezvous.left) == 1
    pids = [event.pid for event in one.told(WorkerStarted)]
    assert not any(map(alive, pids))
