"""One stop plan on every path, bounded even for a worker that cannot be killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    Event,
    JobFailed,
    JobStopped,
    LaunchSpec,
    Restarting,
    RestartPolicy,
    StopEscalated,
    StopPlan,
    StopRequested,
    WorkerAbandoned,
    WorkerExited,
    launch,
)
from elastic_aio.agent.agent import driver_of, make_agent
from elastic_aio.process import children, proc
from elastic_aio.process.children import Child, ChildExit, ChildSpec, Spawner, command_spawner
from elastic_aio.process.guardian import Guardian
from elastic_aio.spec.job import StartMethod
from tests.support import functions
from tests.support.children import (
    SIGNAL_LOGGER,
    ignoring_signals,
    noted,
    noting,
    shell,
    trapping,
    until,
)
from tests.support.denied import AS_OTHER, needs_root, without_permission
from tests.support.leaks import alive

GRACE_S = 0.3


def ignoring_spec(directory: Path, script: str = "exec sleep 99", nproc: int = 1) -> LaunchSpec:
    """Return a job of workers that ignore SIGTERM with a short grace."""
    return LaunchSpec(
        ignoring_signals(script),
        nproc_per_node=nproc,
        env={"NOTES": str(directory)},
        stop=StopPlan.within(GRACE_S),
    )


def check_plan_was_kept(events: list[Event], rank: int = 0) -> None:
    """Assert that a worker that ignores SIGTERM got its grace, and then SIGKILL, in the open."""
    asked = next(event for event in events if isinstance(event, StopRequested))
    (escalated,) = (event for event in events if isinstance(event, StopEscalated))
    ended = next(e for e in events if isinstance(e, WorkerExited) and e.rank == rank)
    assert escalated.signal == signal.SIGKILL
    assert ended.pid in escalated.pids
    assert ended.status.signal == signal.SIGKILL
    assert ended.is_victim
    assert GRACE_S - 0.02 <= escalated.time - asked.time < GRACE_S + 5
    assert asked.plan == "SIGTERM 0.3 s, SIGKILL"


async def test_after_a_failure(tmp_path: Path) -> None:
    """A peer that ignores SIGTERM gets the grace and no more."""
    events: list[Event] = []
    script = '[ $RANK = 0 ] && exec sleep 99; until [ -e "$NOTES/0" ]; do :; done; exit 3'
    with pytest.raises(JobFailed) as caught:
        await launch(ignoring_spec(tmp_path, script, 2), listeners=[events.append])
    check_plan_was_kept(events)
    assert caught.value.result.exit_code == 3


async def test_before_a_restart(tmp_path: Path) -> None:
    """The plan holds for a restart too."""
    events: list[Event] = []
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 0 ] && exec sleep 99;"
    script += 'until [ -e "$NOTES/0" ]; do :; done; exit 3'
    spec = ignoring_spec(tmp_path, script, 2).replace(max_restarts=1)
    result = await launch(spec, listeners=[events.append])
    check_plan_was_kept(events)
    assert result.restarts == 1


@pytest.mark.slow
@pytest.mark.both_loops
async def test_where_signals_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter refuses pidfd_send_signal: kill(2) ends children, and the guardian all others."""

    def refuse(*_: object) -> None:
        raise PermissionError

    spec = LaunchSpec(
        noting("wait", first='sleep 99 & echo $! >"$NOTES/child"'),
        env={"NOTES": str(tmp_path)},
        stop=StopPlan([("SIGTERM", 0.1)], reap_timeout=0.1),
    )
    events: list[Event] = []
    async with Agent(spec, listeners=[events.append]) as agent:
        (worker,) = await until(noted(tmp_path, 1))
        for module in (children, proc):
            monkeypatch.setattr(f"{module.__name__}.signal.pidfd_send_signal", refuse)
        await agent.stop()
    assert not alive(worker)
    assert not alive(int((tmp_path / "child").read_text()))
    assert not [event for event in events if isinstance(event, WorkerAbandoned)]


async def test_on_request(tmp_path: Path) -> None:
    """The plan holds for `stop`."""
    async with Agent(ignoring_spec(tmp_path)) as agent:
        await until(noted(tmp_path, 1))
        await agent.stop()
        check_plan_was_kept([event async for event in agent.events()])


async def test_on_a_signal(tmp_path: Path) -> None:
    """The plan holds for a signal, which takes the place of its first step."""
    events: list[Event] = []
    spec = ignoring_spec(tmp_path)
    task = asyncio.ensure_future(launch(spec, signals=True, listeners=[events.append]))
    await until(noted(tmp_path, 1))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(JobStopped):
        await task
    check_plan_was_kept(events)


async def test_on_cancellation(tmp_path: Path) -> None:
    """The plan holds for a cancelled launch."""
    events: list[Event] = []
    task = asyncio.ensure_future(launch(ignoring_spec(tmp_path), listeners=[events.append]))
    await until(noted(tmp_path, 1))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    check_plan_was_kept(events)


async def test_on_leaving_the_block(tmp_path: Path) -> None:
    """The plan holds for an agent whose block is left early."""
    events: list[Event] = []
    async with Agent(ignoring_spec(tmp_path), listeners=[events.append]):
        await until(noted(tmp_path, 1))
    check_plan_was_kept(events)


async def test_for_what_finished_workers_left_behind(tmp_path: Path) -> None:
    """The plan holds for a leftover that ignores SIGTERM, of workers that have succeeded."""
    script = "sleep 99 & echo $! > $NOTES/left; exit 0"
    events: list[Event] = []
    result = await launch(ignoring_spec(tmp_path, script), listeners=[events.append])
    left = int((tmp_path / "left").read_text())
    asked = next(event for event in events if isinstance(event, StopRequested))
    (escalated,) = (event for event in events if isinstance(event, StopEscalated))
    assert escalated.pids == (left,)
    assert escalated.time - asked.time >= GRACE_S - 0.02
    assert result.exit_code == 0
    assert not alive(left)


async def test_several_steps_in_order(tmp_path: Path) -> None:
    """Each step sends its signal to all processes, once, after the grace of the previous step."""
    steps = (("SIGINT", 0.15), ("SIGQUIT", 0.15), ("SIGTERM", 0.15))
    spec = LaunchSpec(SIGNAL_LOGGER, env={"NOTES": str(tmp_path)}, stop=StopPlan(steps))
    async with Agent(spec) as agent:
        await until(noted(tmp_path, 1))
        await agent.stop()
        events = [event async for event in agent.events()]
    assert (tmp_path / "log").read_text().split() == ["SIGINT", "SIGQUIT", "SIGTERM"]
    escalated = [event for event in events if isinstance(event, StopEscalated)]
    assert [event.signal for event in escalated] == [signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL]
    for before, after in itertools.pairwise(escalated):
        assert after.time - before.time >= 0.13


async def test_no_grace_at_all(tmp_path: Path) -> None:
    """A plan without steps is SIGKILL at once."""
    spec = ignoring_spec(tmp_path).replace(stop=StopPlan(steps=()))
    async with Agent(spec) as agent:
        await until(noted(tmp_path, 1))
        await agent.stop()
        events = [event async for event in agent.events()]
    (ended,) = (event for event in events if isinstance(event, WorkerExited))
    assert ended.status.signal == signal.SIGKILL


async def test_a_quick_worker_is_not_made_to_wait(tmp_path: Path) -> None:
    """The grace is an upper bound: the stop is over when the workers are."""
    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)}, stop=StopPlan.within(25))
    async with Agent(spec) as agent:
        await until(noted(tmp_path, 1))
        began = time.monotonic()
        await agent.stop()
        assert time.monotonic() - began < 20


async def test_kill_shortens_a_stop_that_is_under_way(tmp_path: Path) -> None:
    """An immediate stop does not wait for the rest of the grace."""
    spec = ignoring_spec(tmp_path, nproc=2).replace(stop=StopPlan.within(25))
    async with Agent(spec) as agent:
        await until(noted(tmp_path, 2))
        began = time.monotonic()
        agent.stop()
        await asyncio.sleep(0.05)
        agent.kill()
        with pytest.raises(JobStopped):
            await agent.wait()
        assert time.monotonic() - began < 20


async def test_a_repeated_signal_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cuts the grace period short, which has not expired."""
    monkeypatch.setattr("elastic_aio.signals.MOMENT_S", 0.0)
    events: list[Event] = []
    spec = ignoring_spec(tmp_path).replace(stop=StopPlan.within(25))
    task = asyncio.ensure_future(launch(spec, signals=True, listeners=[events.append]))
    await until(noted(tmp_path, 1))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(os.getpid(), number)
        await until(lambda: any(isinstance(one, StopRequested) for one in events))
    with pytest.raises(JobStopped):
        await task
    (escalated,) = (event for event in events if isinstance(event, StopEscalated))
    assert escalated.reason == "the stop signal was repeated"


async def test_kill_without_a_stop_before(tmp_path: Path) -> None:
    """An immediate stop is SIGKILL for all processes."""
    spec = ignoring_spec(tmp_path, nproc=2).replace(stop=StopPlan.within(25))
    async with Agent(spec) as agent:
        pids = await until(noted(tmp_path, 2))
        agent.kill()
        with pytest.raises(JobStopped):
            await agent.wait()
    assert not any(map(alive, pids))


async def test_a_stopped_worker_wakes_up_to_end(tmp_path: Path) -> None:
    """A worker in state T gets the signal and the chance to act on it."""
    script = noting("sleep 99 & wait", first="trap ': > $NOTES/stopped; exit' TERM")
    spec = LaunchSpec(script, env={"NOTES": str(tmp_path)}, stop=StopPlan.within(20))
    async with Agent(spec) as agent:
        (pid,) = await until(noted(tmp_path, 1))
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        began = time.monotonic()
        await agent.stop()
        assert time.monotonic() - began < 10
    assert (tmp_path / "stopped").exists()


class Unkillable:
    """A child that no signal reaches, as one in an uninterruptible system call."""

    def __init__(self, real: Child) -> None:
        self.real = real
        self.pid = real.pid
        self.exited: asyncio.Future[ChildExit] = real.exited
        self.on_exit: Callable[[ChildExit], object] = bool
        self.exited.add_done_callback(lambda ended: self.on_exit(ended.result()))

    def has_ended(self) -> bool:
        return self.real.has_ended()

    def send_signal(self, number: int) -> bool:
        return True

    def release(self) -> None:
        self.real.release()


@asynccontextmanager
async def unkillable_spawner() -> AsyncIterator[tuple[Spawner, list[Unkillable]]]:
    """Give a spawner whose workers cannot be killed; they are, when the block ends."""
    spawn = command_spawner(asyncio.get_running_loop())
    made: list[Unkillable] = []
    threads = threading.active_count()

    async def spawn_unkillable(plan: ChildSpec) -> Child:
        child = await spawn(plan)
        if plan.env.get("LOCAL_RANK") != "0":
            return child
        made.append(Unkillable(child))
        return made[-1]

    try:
        yield spawn_unkillable, made
    finally:
        for one in made:
            one.real.send_signal(signal.SIGKILL)
        await asyncio.wait([one.exited for one in made])
        # Python 3.11 waits for a child in a thread, which ends right after reporting the exit.
        await until(lambda: threading.active_count() <= threads)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["stop", "failure"])
async def test_a_worker_that_cannot_be_killed_is_reported(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop is bounded; what is left is named with its state, and the job has an end."""

    async def end_nothing(self: Guardian) -> bool:
        return False

    monkeypatch.setattr(Guardian, "end_job", end_nothing)
    plan = StopPlan(StopPlan.within(0.1).steps, reap_timeout=0.2)
    script = noting(f"[ $RANK = 1 ] && [ {path} = failure ] && {{ "
                    'until [ -e "$NOTES/0" ]; do :; done; exit 4; }; exec sleep 99')  # fmt: skip
    spec = LaunchSpec(script, env={"NOTES": str(tmp_path)}, stop=plan, nproc_per_node=2)
    async with unkillable_spawner() as (spawner, made):
        async with make_agent(spec, spawner=spawner) as agent:
            if path == "stop":
                await until(noted(tmp_path, 2))
                agent.stop()
            with pytest.raises(JobStopped if path == "stop" else JobFailed):
                await agent.wait()
            events = [event async for event in agent.events()]
        abandoned = [event for event in events if isinstance(event, WorkerAbandoned)]
        assert [event.pid for event in abandoned] == [made[0].pid]
        assert abandoned[0].state[0] in "SR"
        assert alive(made[0].pid)


@needs_root
@pytest.mark.slow
@pytest.mark.both_loops
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
async def test_what_a_success_leaves_is_reported_once(start_method: StartMethod) -> None:
    """A process of another user delays the end for the grace, and no other stop follows."""
    spec = LaunchSpec(
        functions.leave_running,
        args=[*AS_OTHER.split(), "sleep", "99"],
        start_method=start_method,
        stop=StopPlan.within(GRACE_S),
    )
    events: list[Event] = []
    began = time.monotonic()
    with without_permission():
        result = await launch(spec, listeners=[events.append])
    assert time.monotonic() - began < 8
    assert result.exit_code == 0
    (left,) = (event for event in events if isinstance(event, WorkerAbandoned))
    assert left.program == "sleep 99"
    assert left.state.endswith("no permission to signal it")
    os.kill(left.pid, signal.SIGKILL)
    await until(lambda: not alive(left.pid))


async def test_stop_during_the_start_of_many_workers(tmp_path: Path) -> None:
    """A stop in the middle of spawning ends those that run and starts no more."""
    spec = LaunchSpec(shell("exec sleep 99"), nproc_per_node=64)
    events: list[Event] = []
    async with Agent(spec, listeners=[events.append]) as agent:
        await until(lambda: len(events) > 10)
        await agent.stop()
    started = [event for event in events if type(event).__name__ == "WorkerStarted"]
    ended = [event for event in events if isinstance(event, WorkerExited)]
    assert len(started) == len(ended) < 64


async def test_a_suspension_that_fails_continues_the_workers(tmp_path: Path) -> None:
    """They are not left in state T."""

    def wait() -> None:
        raise RuntimeError("not suspended")

    spec = LaunchSpec(noting(), nproc_per_node=2, env={"NOTES": str(tmp_path)})
    async with Agent(spec) as agent:
        pids = await until(noted(tmp_path, 2))
        with pytest.raises(RuntimeError, match="not suspended"):
            await driver_of(agent).suspend_while(wait)
        assert all(proc.read_process(pid).state != "T" for pid in pids)  # type: ignore[union-attr]  # they run


@pytest.mark.parametrize("kind", [WorkerExited, StopRequested], ids=lambda kind: kind.__name__)
async def test_a_sigterm_to_all_processes_is_no_failure(tmp_path: Path, kind: type[Event]) -> None:
    """Workers that it ends do so before the launcher acts on it."""
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, kind) and len([one for one in events if isinstance(one, kind)]) == 1:
            agent.stop(signal=signal.SIGTERM, reason="SIGTERM was received")

    spec = LaunchSpec(
        trapping("exit 143"), nproc_per_node=2, env={"NOTES": str(tmp_path)}, max_restarts=2
    )
    async with Agent(spec, listeners=[on_event]) as agent:
        for pid in await until(noted(tmp_path, 2)):
            os.kill(pid, signal.SIGTERM)
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert (caught.value.result.exit_code, caught.value.result.restarts) == (143, 0)
    assert not [one for one in events if isinstance(one, AttemptFailed | Restarting)]


@pytest.mark.both_loops
@pytest.mark.parametrize("never_on", [(), (7,)])
@pytest.mark.parametrize("how", ["stop", "preempt"])
async def test_a_failure_is_not_erased_by_what_comes_later(
    tmp_path: Path, never_on: tuple[int, ...], how: str
) -> None:
    """Rank 1 fails, rank 0 saves, and then the job is stopped, or has notice of a preemption."""
    save = trapping("touch $NOTES/saving; until [ -e $NOTES/go ]; do sleep 0.01; done; exit 143")
    script = "if [ $RANK = 1 ]; then until [ -e $NOTES/0 ]; do sleep 0.01; done; exit 7; fi; "
    spec = LaunchSpec(
        [*save[:-1], script + save[-1]],
        nproc_per_node=2,
        env={"NOTES": str(tmp_path)},
        max_restarts=0 if how == "preempt" else 3,
        restart=RestartPolicy(never_on=never_on),
    )
    events: list[Event] = []
    async with Agent(spec, listeners=[events.append]) as agent:
        await until((tmp_path / "saving").exists)
        if how == "stop":
            stopped = agent.stop()
        else:
            assert agent.preempt()
        (tmp_path / "go").touch()
        with pytest.raises(JobFailed) as caught:
            await agent.wait()
    assert caught.value.result.exit_code == 7
    assert [one.root.rank for one in events if isinstance(one, AttemptFailed)] == [1]
    assert not [one for one in events if isinstance(one, Restarting)]
    if how == "stop":
        await stopped


@pytest.mark.both_loops
async def test_a_restart_does_not_wait_for_a_signal(tmp_path: Path) -> None:
    """A worker that SIGTERM has ended, and one that saves at SIGTERM: the next attempt follows."""
    save = trapping("exit 143")
    script = (
        "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi;"
        " if [ $RANK = 1 ]; then until [ -e $NOTES/0 ]; do sleep 0.01; done; kill $$; fi; "
    )
    spec = LaunchSpec(
        [*save[:-1], script + save[-1]],
        nproc_per_node=2,
        env={"NOTES": str(tmp_path)},
        max_restarts=1,
        restart=RestartPolicy(backoff=None),
    )
    events: list[Event] = []
    await launch(spec, listeners=[events.append])
    failed = next(one for one in events if isinstance(one, AttemptFailed))
    restarting = next(one for one in events if isinstance(one, Restarting))
    assert restarting.seq == failed.seq + 1
