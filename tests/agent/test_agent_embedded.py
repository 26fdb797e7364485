"""An agent inside a program that has a life of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Event,
    HostError,
    JobFailed,
    JobStarted,
    JobStopped,
    LaunchSpec,
    RestartAction,
    RestartPolicy,
    SpecError,
    StopPlan,
    StopRequested,
    WorkerStarted,
    launch,
)
from elastic_aio.agent import driver
from elastic_aio.agent.agent import make_agent
from elastic_aio.agent.driver import Driver
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import lost_jobs
from elastic_aio.process.children import ChildExit, ChildSpec
from tests.support.children import SLEEPER, until
from tests.support.control import own_control_dir
from tests.support.leaks import own_children

GUARD = 30.0
IGNORING_SIGTERM = ["bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"]


@pytest.mark.parametrize("number", [999, 0, "TERMS", True])
async def test_a_signal_that_does_not_exist_is_refused(number: Any) -> None:
    """A wrong signal is the caller's error, and the job goes on."""
    async with Agent(LaunchSpec(["sleep", "99"])) as agent:
        with pytest.raises(SpecError, match="signal: must be a signal number or a name"):
            agent.stop(signal=number)
        with pytest.raises(SpecError, match="signal: must be a signal number or a name"):
            agent.forward_signal(number)
        assert agent.forward_signal("SIGCONT") == agent.forward_signal(18)
        agent.stop(signal="SIGINT")
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert caught.value.result.exit_code == 130


async def test_stopping_with_sigkill_skips_the_plan() -> None:
    """SIGKILL as the first signal leaves nothing to wait for."""
    spec = LaunchSpec(IGNORING_SIGTERM, stop=StopPlan([("SIGTERM", 60), ("SIGINT", 60)]))
    async with asyncio.timeout(GUARD), Agent(spec) as agent:
        agent.stop(signal=signal.SIGKILL)
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert caught.value.result.exit_code == 137


async def test_a_wrong_type_of_spec_is_refused() -> None:
    """A script's name is not a job yet."""
    with pytest.raises(
        SpecError, match=r"^spec: must be a LaunchSpec or a GroupSpec \(got 'train\.py'\)$"
    ):
        await launch("train.py")  # type: ignore[arg-type]  # that is the point


async def test_a_listener_may_stop_the_job_at_its_first_event() -> None:
    """A listener can stop the job at JobStarted."""
    agents: list[Agent] = []

    def listen(event: Event) -> None:
        if isinstance(event, JobStarted):
            agents[0].stop()

    agents.append(Agent(LaunchSpec(["sleep", "99"]), listeners=[listen]))
    async with asyncio.timeout(GUARD), agents[0] as agent:
        with pytest.raises(JobStopped):
            await agent.wait()
        names = [type(event).__name__ async for event in agent.events()]
    assert names == ["JobStarted", "JobFinished"]


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false", ""])
async def test_a_job_without_a_guardian_does_not_start(
    executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entering the block fails before any worker starts; the events end."""
    monkeypatch.setattr(sys, "executable", executable)
    agent = Agent(LaunchSpec(["touch", str(tmp_path / "started")], max_restarts=3))
    reading = asyncio.create_task(collect(agent))
    with pytest.raises(HostError, match="cannot start the guardian process: .*" + executable):
        await agent.__aenter__()
    async with asyncio.timeout(GUARD):
        assert await reading == []
    assert not (tmp_path / "started").exists()


async def collect(agent: Agent) -> list[Event]:
    return [event async for event in agent.events()]


async def test_a_callback_that_raises_a_cancellation_fails_the_job() -> None:
    """What the callback raises reaches the caller, even if it looks like a cancellation."""

    async def decide(failure: object) -> RestartAction:
        raise asyncio.CancelledError("by the callback")

    spec = LaunchSpec(["false"], max_restarts=1, restart=RestartPolicy(decide=decide))
    async with Agent(spec) as agent:
        with pytest.raises(asyncio.CancelledError, match="by the callback"):
            await agent.wait()


async def test_handlers_on_the_loop_stay_where_they_are() -> None:
    """What the program has installed with add_signal_handler works again afterwards."""
    loop = asyncio.get_running_loop()
    heard: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGWINCH):
        loop.add_signal_handler(number, heard.put_nowait, number)
    try:
        started = asyncio.Event()

        def listen(event: Event) -> None:
            if isinstance(event, WorkerStarted):
                started.set()

        spec = LaunchSpec(["sleep", "99"])
        task = asyncio.create_task(launch(spec, signals=True, listeners=[listen]))
        async with asyncio.timeout(GUARD):
            await started.wait()
            os.kill(os.getpid(), signal.SIGWINCH)  # not ours: it goes where it went before
            assert await heard.get() == signal.SIGWINCH
            os.kill(os.getpid(), signal.SIGTERM)  # ours while the launch lasts
            with pytest.raises(JobStopped):
                await task
            assert heard.empty()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await heard.get() == signal.SIGTERM
    finally:
        for number in (signal.SIGTERM, signal.SIGWINCH):
            loop.remove_signal_handler(number)


class _Stuck:
    """A child that no signal ends, until it is let go."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exited: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()

    def has_ended(self) -> bool:
        return self.exited.done()

    def send_signal(self, number: int) -> bool:
        return True

    def release(self) -> None:
        pass


@pytest.mark.slow
async def test_no_restart_beside_a_process_that_cannot_be_killed() -> None:
    """What holds memory and ports from the last attempt leaves no room for another one."""
    from elastic_aio.process.children import command_spawner

    real = command_spawner(asyncio.get_running_loop())
    stuck: list[_Stuck] = []

    async def spawn(plan: ChildSpec) -> Any:
        if plan.env.get("RANK") != "1":
            return await real(plan)
        stuck.append(_Stuck(2**22 + 7))  # above every pid that there is
        return stuck[-1]

    spec = LaunchSpec(
        ["bash", "-c", "sleep 0.2; exit 1"],
        nproc_per_node=2,
        max_restarts=3,
        stop=StopPlan([], reap_timeout=0.2),
    )
    async with make_agent(spec, spawner=spawn) as agent:
        with pytest.raises(JobFailed, match="a process could not be killed") as caught:
            await agent.wait()
    assert len(caught.value.result.attempts) == 1
    stuck[0].exited.set_result(ChildExit(ExitStatus(signal=9), 0.0))


@pytest.mark.slow
async def test_many_descendants_do_not_hold_the_loop() -> None:
    """Others have their turns while hundreds of processes are being stopped."""
    script = "for i in $(seq 300); do sleep 99 & done; wait"
    turns, before = 0, own_children()
    async with Agent(LaunchSpec(["bash", "-c", script])) as agent:
        (worker,) = [event.pid async for event in workers(agent)]
        children = Path(f"/proc/{worker}/task/{worker}/children")
        async with asyncio.timeout(GUARD):
            while len(children.read_text().split()) < 300:  # nothing tells
                await asyncio.sleep(0)
        agent.stop()
        async for event in agent.events():
            if isinstance(event, StopRequested):
                break
        done = asyncio.ensure_future(agent.wait())
        while not done.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(JobStopped):
            await done
    assert turns > 20
    assert own_children() <= before


async def workers(agent: Agent) -> Any:
    async for event in agent.events():
        if isinstance(event, WorkerStarted):
            yield event
            return


async def test_a_program_of_many_jobs_looks_for_lost_ones_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look reads all processes of the host."""
    looks: list[None] = []

    async def find() -> list[lost_jobs.LostJob]:
        looks.append(None)
        return []

    monkeypatch.setattr(Driver, "has_looked", False)
    monkeypatch.setattr(driver, "_QUIET_S", 0.0)
    monkeypatch.setattr(lost_jobs, "find_lost_jobs", find)
    with own_control_dir():
        for _ in range(2):
            async with Agent(LaunchSpec(SLEEPER), control=True) as agent:
                async for event in agent.events():
                    if isinstance(event, WorkerStarted):
                        break
                await until(lambda: agent.status().phase == "running")
                finding = [one for one in asyncio.all_tasks() if one.get_name() == "find lost jobs"]
                await asyncio.gather(*finding)
    assert len(looks) == 1
