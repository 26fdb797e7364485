"""The workers of a job as a group: all or nothing, culprits and victims, leftovers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    Event,
    JobFailed,
    JobFinished,
    JobStarted,
    LaunchSpec,
    LeftoversFound,
    StopPlan,
    StopRequested,
    WorkerExited,
    WorkerStarted,
    launch,
)
from elastic_aio.agent.agent import make_agent
from elastic_aio.errors import SpawnError
from elastic_aio.process.children import Child, ChildSpec, command_spawner
from tests.support.children import ignoring_signals, noted, noting, shell, until
from tests.support.leaks import alive

GUARD = 30.0
Kind = TypeVar("Kind", bound=Event)
# Waits in rank 0 until all others have noted their pids, without starting a process.
WHEN_ALL_RUN = 'for ((r = 1; r < WORLD_SIZE; r++)); do until [ -e "$NOTES/$r" ]; do :; done; done;'


def spec(directory: Path, entrypoint: list[str], nproc: int, restarts: int = 0) -> LaunchSpec:
    """Return a job of workers that leave notes in a directory."""
    return LaunchSpec(
        entrypoint, env={"NOTES": str(directory)}, nproc_per_node=nproc, max_restarts=restarts
    )


@pytest.mark.both_loops
async def test_workers_take_no_threads(tmp_path: Path) -> None:
    """Nor on Python 3.11, whose asyncio starts a thread for each child by default."""
    threads = threading.enumerate()
    async with Agent(spec(tmp_path, noting(), 6)):
        await until(noted(tmp_path, 6))
        assert threading.enumerate() == threads


async def test_one_failure_fails_all(tmp_path: Path) -> None:
    """The first worker that fails is the culprit; the others are stopped because of it."""
    script = noting(f"[ $RANK = 0 ] || exec sleep 99; {WHEN_ALL_RUN} exit 3")
    with pytest.raises(JobFailed) as caught:
        await launch(spec(tmp_path, script, 4))
    result = caught.value.result
    assert next((one.rank, one.is_victim) for one in result.failures) == (0, False)
    assert sorted((one.rank, one.is_victim) for one in result.failures[1:]) == [
        (1, True),
        (2, True),
        (3, True),
    ]
    assert [worker.status.returncode for worker in result.attempts[0].workers] == [3, -15, -15, -15]
    assert result.exit_code == 3


async def test_a_victim_with_an_exit_code_of_its_own_is_a_victim(tmp_path: Path) -> None:
    """A worker that answers the stop with a failure is not blamed for it."""
    script = noting(
        f"[ $RANK = 0 ] && {{ {WHEN_ALL_RUN} exit 3; }}; sleep 99 & wait",
        first="trap 'exit 77' TERM",
    )
    with pytest.raises(JobFailed) as caught:
        await launch(spec(tmp_path, script, 2))
    culprit, victim = caught.value.failures
    assert (culprit.status.code, culprit.is_victim) == (3, False)
    assert (victim.status.code, victim.is_victim) == (77, True)
    assert caught.value.result.exit_code == 3


async def test_a_victim_that_ends_well_is_no_failure(tmp_path: Path) -> None:
    """A worker that was stopped and exits with 0 is not in the list of failures."""
    script = noting(
        f"[ $RANK = 0 ] && {{ {WHEN_ALL_RUN} exit 3; }}; sleep 99 & wait",
        first="trap 'exit 0' TERM",
    )
    with pytest.raises(JobFailed) as caught:
        await launch(spec(tmp_path, script, 2))
    assert [one.rank for one in caught.value.failures] == [0]


async def test_success_waits_for_the_last(tmp_path: Path) -> None:
    """Workers that exit early do not stop the others; success needs all of them."""
    script = noting(f"[ $RANK = 0 ] || exit 0; {WHEN_ALL_RUN} sleep 0.1")
    result = await launch(spec(tmp_path, script, 3))
    assert [worker.status.code for worker in result.attempts[0].workers] == [0, 0, 0]


async def test_a_late_failure_after_early_successes(tmp_path: Path) -> None:
    """One failure fails the attempt, even when all others have already succeeded."""
    script = noting(f"[ $RANK = 0 ] || exit 0; {WHEN_ALL_RUN} sleep 0.1; exit 8")
    with pytest.raises(JobFailed) as caught:
        await launch(spec(tmp_path, script, 3))
    assert [(one.rank, one.is_victim) for one in caught.value.failures] == [(0, False)]


async def test_attempts_are_numbered(tmp_path: Path) -> None:
    """All workers restart together; attempts and restarts count from 0 in every place."""
    script = 'echo "$TORCHELASTIC_RESTART_COUNT/$TORCHELASTIC_MAX_RESTARTS" >> "$NOTES/$RANK";'
    script += "exit $((RANK == 0 && TORCHELASTIC_RESTART_COUNT < 2 ? 6 : 0))"
    events: list[Event] = []
    result = await launch(spec(tmp_path, shell(script), 2, restarts=5), listeners=[events.append])
    assert (tmp_path / "0").read_text().split() == ["0/5", "1/5", "2/5"]
    assert (result.restarts, result.exit_code) == (2, 0)
    assert [attempt.number for attempt in result.attempts] == [0, 1, 2]
    assert [len(attempt.workers) for attempt in result.attempts] == [2, 2, 2]
    assert [bool(attempt.failures) for attempt in result.attempts] == [True, True, False]
    assert result.failures == ()
    started = [(event.attempt, event.rank) for event in events if isinstance(event, WorkerStarted)]
    assert started == [(attempt, rank) for attempt in range(3) for rank in range(2)]
    assert [event.attempt for event in events if isinstance(event, AttemptFailed)] == [0, 1]
    assert sum(isinstance(event, JobStarted) for event in events) == 1


async def test_every_status_of_many_workers_is_right(tmp_path: Path) -> None:
    """64 workers that exit at the same moment, each in its own way, all have the right status."""
    os.mkfifo(tmp_path / "go")
    # Opened for reading and writing: what is written stays there for late readers.
    go = os.open(tmp_path / "go", os.O_RDWR)
    try:
        script = ignoring_signals(
            'read -r _ < "$NOTES/go"; [ $((RANK % 2)) = 0 ] && exit $((RANK + 1)); kill -KILL $$'
        )
        async with Agent(spec(tmp_path, script, 64)) as agent:
            await until(noted(tmp_path, 64))
            os.write(go, b"\n" * 64)
            with pytest.raises(JobFailed) as caught:
                await agent.wait()
            events = [event async for event in agent.events()]
    finally:
        os.close(go)
    expected = [rank + 1 if rank % 2 == 0 else -9 for rank in range(64)]
    workers = caught.value.result.attempts[0].workers
    assert [worker.status.returncode for worker in workers] == expected
    exits = {event.rank: event for event in events if isinstance(event, WorkerExited)}
    assert [exits[rank].status.returncode for rank in range(64)] == expected
    assert len(caught.value.failures) == 64
    assert not caught.value.failures[0].is_victim


async def test_many_workers_that_succeed_at_once() -> None:
    """64 workers that exit at once, before the last has been spawned, are all seen."""
    result = await launch(LaunchSpec(["true"], nproc_per_node=64))
    assert [worker.status.code for worker in result.attempts[0].workers] == [0] * 64


@pytest.mark.parametrize(
    "leave",
    [
        "sleep 99 & echo $! > $NOTES/left",
        "set -m; sleep 99 & echo $! > $NOTES/left",
        "setsid bash -c 'echo $$ > $NOTES/left; exec sleep 99' &"
        " while [ ! -s $NOTES/left ]; do :; done",
        "(trap '' TERM; sleep 99 & echo $! > $NOTES/left)",
        "env -i sleep 99 & echo $! > $NOTES/left",
    ],
    ids=["child", "own-group", "own-session", "ignoring-signals", "no-environment"],
)
async def test_what_workers_leave_behind_is_cleaned(leave: str, tmp_path: Path) -> None:
    """Descendants that outlive their worker are gone before the attempt counts as over."""
    seen: list[bool] = []

    def listen(event: Event) -> None:
        if isinstance(event, JobFinished):
            seen.append(alive(int((tmp_path / "left").read_text())))

    job = spec(tmp_path, shell(f"{leave}; exit 0"), 1).replace(stop=StopPlan.within(0.2))
    result = await launch(job, listeners=[listen])
    assert seen == [False]
    assert result.exit_code == 0


def leaving(directory: Path, command: str, linger: float) -> LaunchSpec:
    """Return a job of a worker that succeeds and leaves a process behind."""
    job = spec(directory, shell(f"{command} & exit 0"), 1)
    return job.replace(stop=StopPlan.within(5, linger=linger))


async def next_of(events: AsyncIterator[Event], kind: type[Kind]) -> Kind:
    async with asyncio.timeout(GUARD):
        return await anext(event async for event in events if isinstance(event, kind))


async def test_a_stop_ends_the_linger_and_says_why(tmp_path: Path) -> None:
    """By its own signal; the workers have succeeded nevertheless.  A restart does not end it."""
    (tmp_path / "upload.sh").write_text("sleep 99\n")
    async with Agent(leaving(tmp_path, f"bash -e {tmp_path}/upload.sh", 600)) as agent:
        events = agent.events()
        found = await next_of(events, LeftoversFound)
        assert set(found.programs) == {"bash upload.sh", "sleep 99"}
        status = agent.status()
        assert (status.phase, status.is_ready) == ("stopping", False)
        assert status.reason == "the workers have left processes behind"
        restart = asyncio.create_task(agent.restart())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        agent.stop(signal="SIGINT", reason="maintenance")
        stop = await next_of(events, StopRequested)
        assert stop.reason == "maintenance; the workers had left processes behind"
        assert (stop.signal, stop.plan) == (2, "SIGINT 5 s, SIGKILL")
        assert (await agent.wait()).exit_code == 0
        assert await restart is False


async def test_a_linger_that_is_over_says_so(tmp_path: Path) -> None:
    async with Agent(leaving(tmp_path, "sleep 99", 0.2)) as agent:
        stop = await next_of(agent.events(), StopRequested)
        assert stop.reason == "processes that the workers left still run after 0.2 s"
        assert stop.signal is None
        assert (await agent.wait()).goodput.productive < 0.2


async def test_a_descendant_without_any_trait_of_the_job_is_stopped(tmp_path: Path) -> None:
    """One with a session of its own and an empty environment is known by its parent."""
    script = "setsid env -i sleep 99 & echo $! > $NOTES/left; wait"
    async with Agent(spec(tmp_path, shell(script), 1)) as agent:
        left = tmp_path / "left"
        pid = int(await until(lambda: left.exists() and left.read_text().strip()))
        await until(lambda: os.getsid(pid) == pid)
        await agent.stop()
        assert not alive(pid)


async def test_leftovers_are_gone_before_the_next_attempt(tmp_path: Path) -> None:
    """What the first attempt left behind does not live beside the second one."""
    script = """
    if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
        setsid bash -c 'echo $$ > $NOTES/left; exec sleep 99' &
        while [ ! -s $NOTES/left ]; do :; done
        exit 1
    fi
    grep -q '^State:.[^ZX]' /proc/$(cat $NOTES/left)/status && exit 9
    exit 0
    """
    result = await launch(spec(tmp_path, shell(script), 1, restarts=1))
    assert result.restarts == 1
    assert not alive(int((tmp_path / "left").read_text()))


async def test_a_daemon_of_a_running_worker_is_left_alone(tmp_path: Path) -> None:
    """Processes of a worker live as long as the group does, whatever their parent does."""
    script = "(sleep 99 & echo $! > $NOTES/child); until [ -e $NOTES/go ]; do sleep 0.01; done"
    async with Agent(spec(tmp_path, shell(script), 1)) as agent:
        child = tmp_path / "child"
        pid = int(await until(lambda: child.exists() and child.read_text().strip()))
        assert alive(pid)
        (tmp_path / "go").touch()
        await agent.wait()
    assert not alive(pid)


async def test_a_worker_that_cannot_be_spawned_takes_the_others_along(tmp_path: Path) -> None:
    """If the third worker cannot be started, the first two are stopped, with events."""
    spawn = command_spawner(asyncio.get_running_loop())

    async def spawn_two(plan: ChildSpec) -> Child:
        if plan.env.get("LOCAL_RANK") == "2":
            raise SpawnError("no more room", permanent=False, exit_code=1)
        return await spawn(plan)

    async with make_agent(spec(tmp_path, noting(), 4), spawner=spawn_two) as agent:
        with pytest.raises(JobFailed, match="no more room") as caught:
            await agent.wait()
        events = [event async for event in agent.events()]
    assert caught.value.result.exit_code == 1
    root = caught.value.failures[0]
    assert (root.rank, root.pid) == (2, None)
    pids = [event.pid for event in events if isinstance(event, WorkerStarted)]
    assert len(pids) == 2
    assert not any(map(alive, pids))
    assert all(event.is_victim for event in events if isinstance(event, WorkerExited))


async def test_a_spawn_that_works_at_the_second_attempt() -> None:
    """A lack of resources is mended by a restart."""
    spawn = command_spawner(asyncio.get_running_loop())
    refused: list[str] = []

    async def refuse_once(plan: ChildSpec) -> Child:
        if plan.env.get("LOCAL_RANK") == "1" and not refused:
            refused.append("once")
            raise SpawnError("no more room", permanent=False, exit_code=1)
        return await spawn(plan)

    job = LaunchSpec(["true"], nproc_per_node=2, max_restarts=1)
    async with make_agent(job, spawner=refuse_once) as agent:
        result = await agent.wait()
    assert result.restarts == 1
    assert result.attempts[0].failures[0].message == "no more room"
