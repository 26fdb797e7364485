"""The story of a job, read by as many as wish, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    Event,
    EventsMissed,
    JobFailed,
    JobFinished,
    JobStarted,
    JobState,
    LaunchSpec,
    LogSpec,
    Restarting,
    StopPlan,
    StopRequested,
    WorkerExited,
    WorkerStarted,
    event_from_json,
    event_to_json,
    launch,
)
from elastic_aio.agent import worker_group
from elastic_aio.agent.agent import driver_of
from elastic_aio.agent.driver import Driver
from elastic_aio.agent.event_log import EventLog
from elastic_aio.agent.failures import WorkerRecord
from tests.support.children import (
    ignoring_signals,
    noted,
    noting,
    restart_count_exits,
    shell,
    until,
)
from tests.support.cli import run_program
from tests.support.restarts import AT_ONCE


async def started(agent: Agent, count: int) -> AsyncIterator[WorkerStarted]:
    """Yield the first events of their kind."""
    async with aclosing(agent.events()) as events:
        async for event in events:
            if isinstance(event, WorkerStarted):
                yield event
                count -= 1
            if not count:
                return


async def story(agent: Agent, after: int = -1) -> list[Event]:
    """Read all events to the end."""
    return [event async for event in agent.events(after)]


async def test_several_readers_see_the_same() -> None:
    """Readers that come early, late and after the end all get the whole story in order."""
    async with Agent(LaunchSpec(["true"], nproc_per_node=4)) as agent:
        early = asyncio.ensure_future(story(agent))
        another = asyncio.ensure_future(story(agent))
        await agent.wait()
        late = await story(agent)
    after = await story(agent)
    assert await early == await another == late == after
    assert [event.seq for event in after] == list(range(len(after)))
    assert isinstance(after[0], JobStarted)
    assert isinstance(after[-1], JobFinished)


async def test_a_job_that_is_not_started_has_no_events() -> None:
    """The iteration would never end."""
    with pytest.raises(RuntimeError, match="the job has not been started: use `async with Agent"):
        Agent(LaunchSpec(["true"])).events()


async def test_a_cursor_continues() -> None:
    """A reader can go on after the number of the last event that it has seen."""
    async with Agent(LaunchSpec(["true"], nproc_per_node=2)) as agent:
        await agent.wait()
        full = await story(agent)
        for event in full:
            assert await story(agent, after=event.seq) == full[event.seq + 1 :]


async def test_events_come_as_things_happen(tmp_path: Path) -> None:
    """WorkerStarted comes while the worker runs, not when the job is over."""
    script = "until [ -e $NOTES/go ]; do sleep 0.01; done"
    async with Agent(LaunchSpec(shell(script), env={"NOTES": str(tmp_path)})) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerStarted):
                assert Path(f"/proc/{event.pid}/stat").exists()
                (tmp_path / "go").touch()
        assert (await agent.wait()).exit_code == 0


async def test_a_slow_reader_sees_how_many_events_it_missed() -> None:
    """Past the kept events a reader gets their number in their place, and always the end."""
    spec = LaunchSpec(["true"], nproc_per_node=10, event_history=4)
    async with Agent(spec) as agent:
        reader = agent.events()
        first = await anext(reader)
        assert isinstance(first, JobStarted)
        await agent.wait()
        rest = [event async for event in reader]
    missed, *kept = rest
    assert isinstance(missed, EventsMissed)
    assert len(kept) == 4
    assert 1 + missed.count + len(kept) == kept[-1].seq + 1
    assert missed.seq == kept[0].seq - 1
    assert isinstance(kept[-1], JobFinished)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1, 2, 3])
async def test_the_end_is_never_missed(kept: int) -> None:
    """However few events are kept, JobFinished is among them."""
    async with Agent(LaunchSpec(["true"], nproc_per_node=5, event_history=kept)) as agent:
        await agent.wait()
        events = await story(agent)
    assert isinstance(events[0], EventsMissed)
    assert len(events) == 1 + kept
    assert isinstance(events[-1], JobFinished)


async def test_a_reader_that_stops_reading_delays_no_other() -> None:
    """A reader that takes one event and no more does not keep a job from its end."""
    async with Agent(LaunchSpec(["true"], nproc_per_node=5, event_history=1)) as agent:
        reader = agent.events()
        await anext(reader)
        assert (await agent.wait()).exit_code == 0


async def test_leaving_the_loop_early_leaves_nothing() -> None:
    """Breaking out of the iteration, or closing it, needs no further care."""
    async with Agent(LaunchSpec(["true"])) as agent:
        async for _ in agent.events():
            break
        reader = agent.events()
        await anext(reader)
        await reader.aclose()
        assert [event async for event in reader] == []
        assert (await agent.wait()).exit_code == 0


async def test_a_cancelled_read_loses_no_event(tmp_path: Path) -> None:
    """A wait for the next event can be given up and taken up again."""
    script = "until [ -e $NOTES/go ]; do sleep 0.01; done"
    async with Agent(LaunchSpec(shell(script), env={"NOTES": str(tmp_path)})) as agent:
        reader = agent.events()
        assert isinstance(await anext(reader), JobStarted)
        assert isinstance(await anext(reader), WorkerStarted)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(reader)
        (tmp_path / "go").touch()
        names = [type(event).__name__ async for event in reader]
    assert names == ["WorkerExited", "JobFinished"]


async def test_events_know_run_attempt_node_and_time() -> None:
    """Every event says when and where it happened and to which attempt it belongs."""
    began = time.time()
    spec = LaunchSpec(restart_count_exits(3, 0), max_restarts=1, run_id="mine")
    async with Agent(spec) as agent:
        await agent.wait()
        events = await story(agent)
    assert {event.run_id for event in events} == {"mine"}
    assert len({event.node for event in events}) == 1
    times = [event.time for event in events]
    assert times == sorted(times)
    assert began <= times[0] <= times[-1] <= time.time()
    kinds = [(type(event), event.attempt) for event in events]
    assert kinds == [
        (JobStarted, 0),
        (WorkerStarted, 0),
        (WorkerExited, 0),
        (StopRequested, 0),
        (AttemptFailed, 0),
        (Restarting, 1),
        (WorkerStarted, 1),
        (WorkerExited, 1),
        (JobFinished, 1),
    ]


async def test_what_takes_time_to_make_keeps_its_place_and_its_time() -> None:
    """It is made in the next iteration of the loop, or before the next event."""
    seen: list[Event] = []
    made_at: list[float] = []
    log = EventLog("r", "h", keep=10, listeners=[seen.append])

    def make(attempt: int, before: Event | None = None) -> Event:
        made_at.append(time.time())
        if before is not None:
            log.append(before)
        return StopRequested(attempt=attempt, reason="", plan="")

    log.append_later(lambda: make(1, StopRequested(attempt=0, reason="", plan="")))
    log.append_later(lambda: make(2))
    assert not seen
    asked_at = time.time()
    await asyncio.sleep(0)
    assert [event.time for event in seen] == sorted(event.time for event in seen)
    assert len(seen) == 3
    assert seen[-1].time <= asked_at <= made_at[0]
    log.append_later(lambda: make(3))
    log.append(StopRequested(attempt=4, reason="", plan=""))
    log.append_later(lambda: make(5))
    log.close()
    assert [event.attempt for event in seen] == [event.seq for event in seen] == [*range(6)]


async def test_siblings_are_signalled_before_exits_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if several workers exit in one iteration of the loop."""
    signals: list[list[set[int]]] = []

    def explain(worker: WorkerRecord) -> str:
        driver = driver_of(agent)
        assert isinstance(driver, Driver)
        assert driver.group is not None
        pids = [record.pid for record in driver.group.records.values()]
        signals.append([{*driver._runtime.tree.stop_signals(pid)} for pid in pids])
        return "why"

    monkeypatch.setattr(worker_group, "reason_now", explain)
    script = "test $RANK -gt 1 && exec sleep 99; until [ -e $NOTES/go ]; do :; done; exit 3"
    spec = LaunchSpec(shell(script), nproc_per_node=4, env={"NOTES": str(tmp_path)})
    agent = Agent(spec)
    async with agent:
        pids = [event.pid async for event in started(agent, 4)]
        (tmp_path / "go").touch()
        for pid in pids[:2]:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the loop stands still
        events = await story(agent)
        with pytest.raises(JobFailed):
            await agent.wait()
    assert signals[:2] == [[set(), set(), {15}, {15}]] * 2
    assert [type(event) for event in events[5:8]] == [WorkerExited, StopRequested, WorkerExited]
    assert [one.reason for one in events if isinstance(one, WorkerExited)] == ["why"] * 4
    assert [event.time for event in events] == sorted(event.time for event in events)


async def test_events_are_frozen() -> None:
    """Events cannot be changed."""
    async with Agent(LaunchSpec(["true"])) as agent:
        await agent.wait()
        for event in await story(agent):
            with pytest.raises(AttributeError):
                event.attempt = 7  # type: ignore[misc]  # that is the point


async def test_culprit_and_victims_in_events(tmp_path: Path) -> None:
    """The attempt's failure names the culprit first and marks the others as victims."""
    script = 'if [ $RANK = 2 ]; then until [ -e "$NOTES/0" -a -e "$NOTES/1" ]; do :; done; '
    script += 'exit 5; fi; : > "$NOTES/$RANK"; exec sleep 99'
    spec = LaunchSpec(shell(script), nproc_per_node=3, env={"NOTES": str(tmp_path)})
    events: list[Event] = []
    with pytest.raises(JobFailed) as caught:
        await launch(spec, listeners=[events.append])
    (failed,) = (event for event in events if isinstance(event, AttemptFailed))
    assert failed.root == failed.failures[0]
    assert (failed.root.rank, failed.root.status.code, failed.root.is_victim) == (2, 5, False)
    assert {(one.rank, one.status.signal, one.is_victim) for one in failed.failures[1:]} == {
        (0, 15, True),
        (1, 15, True),
    }
    assert failed.failures == caught.value.failures
    exits = {event.rank: event.is_victim for event in events if isinstance(event, WorkerExited)}
    assert exits == {0: True, 1: True, 2: False}


async def test_job_finished_is_the_last_event_and_true(tmp_path: Path) -> None:
    """At JobFinished, no process of the job is left."""
    states: list[tuple[JobState, bool]] = []

    def listen(event: Event) -> None:
        if isinstance(event, JobFinished):
            states.append((event.state, Path(f"/proc/{pids[0]}").exists()))

    spec = LaunchSpec(noting(), env={"NOTES": str(tmp_path)})
    async with Agent(spec, listeners=[listen]) as agent:
        pids = await until(noted(tmp_path, 1))
        agent.stop()
    assert states == [(JobState.STOPPED, False)]


async def test_json_keeps_every_event_of_a_real_job(tmp_path: Path) -> None:
    """Every event of an eventful job reads back from its JSON form as it was."""
    spec = LaunchSpec(
        ignoring_signals("[ $RANK = 1 ] && exit 3; exec sleep 99"),
        nproc_per_node=2,
        max_restarts=1,
        env={"NOTES": str(tmp_path)},
        stop=StopPlan.within(0.05),
        logs=LogSpec(log_dir=str(tmp_path / "logs"), redirects=3),
    )
    events: list[Event] = []
    with pytest.raises(JobFailed):
        await launch(spec, listeners=[events.append])
    assert "StopEscalated" in {type(event).__name__ for event in events}
    for event in events:
        line = event_to_json(event)
        assert b"\n" not in line
        assert line.startswith(b'{"schema":1,"event":"%s",' % type(event).__name__.encode())
        assert event_from_json(line) == event


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
async def test_the_logger_says_what_the_console_of_the_command_shows(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each event of at least the level of the logger."""
    seen: list[Event] = []
    spec = LaunchSpec(
        shell("exit $((1 - TORCHELASTIC_RESTART_COUNT))"), max_restarts=1, restart=AT_ONCE
    )
    with caplog.at_level(level, logger="elastic_aio"):
        await launch(spec, listeners=[seen.append])
    records = [one for one in caplog.records if one.name == "elastic_aio"]
    logged = [(one.levelno, one.getMessage()) for one in records]
    assert logged == [(one.level, one.sentence) for one in seen if one.level >= level]
    assert bool(logged) == (level < logging.ERROR)
    assert {(one.run_id, one.node) for one in records} <= {(seen[0].run_id, seen[0].node)}  # type: ignore[attr-defined]


LIBRARY = """
import logging, sys
from elastic_aio import LaunchSpec, launch, run
{setting}
run(LaunchSpec(["true"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "lines"),
    [
        ("", 0),
        ("logging.basicConfig()", 1),
        ("logging.basicConfig(level=20)", 4),
        ("logging.basicConfig(); logging.getLogger('elastic_aio').setLevel('ERROR')", 0),
    ],
)
def test_a_program_without_a_handler_sees_nothing(setting: str, lines: int) -> None:
    ended = run_program([sys.executable, "-c", LIBRARY.format(setting=setting)])
    shown = [line for line in ended.errors if ":elastic_aio:" in line]
    assert (ended.code, len(shown), len(ended.errors)) == (0, lines, lines), ended.err
