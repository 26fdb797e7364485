"""The agent with real processes."""

from __future__ import annotations

import asyncio

import pytest

from elastic_aio import Agent, Event, JobFailed, LaunchSpec, LogSpec, launch
from tests.support.restarts import AT_ONCE


@pytest.mark.slow
async def test_all_workers_exit_zero() -> None:
    """Success is a result with a status for each worker."""
    result = await launch(LaunchSpec(["true"], nproc_per_node=3))
    assert result.state == "succeeded"
    assert [worker.status.code for worker in result.attempts[0].workers] == [0, 0, 0]


async def test_a_failure_restarts_the_group() -> None:
    """The group restarts as a whole and the first failure is the root cause."""
    script = "exit $((RANK == 1 && TORCHELASTIC_RESTART_COUNT == 0 ? 7 : 0))"
    spec = LaunchSpec(["bash", "-c", script], nproc_per_node=3, max_restarts=1)
    result = await launch(spec)
    assert result.restarts == 1
    assert result.attempts[0].failures[0].status.code == 7
    assert len(result.attempts) == 2


async def test_the_last_failure_is_raised() -> None:
    """Used-up restarts raise JobFailed with the culprit first."""
    with pytest.raises(JobFailed, match=r"rank 0.*exit code 3") as caught:
        await launch(LaunchSpec(["bash", "-c", "exit 3"], max_restarts=2, restart=AT_ONCE))
    assert caught.value.result.exit_code == 3
    assert len(caught.value.result.attempts) == 3


async def test_events_tell_the_story() -> None:
    """Two readers see the same events, from the first to JobFinished."""
    async with Agent(LaunchSpec(["true"], logs=LogSpec(redirects=3))) as agent:
        first = [event async for event in agent.events()]
        second = [event async for event in agent.events(after=1)]
    names = [type(event).__name__ for event in first]
    assert names == ["JobStarted", "WorkerStarted", "WorkerExited", "JobFinished"]
    assert second == first[2:]


async def test_a_listener_that_fails_does_not_break_the_job() -> None:
    """What a listener raises goes to the loop's exception handler, and the job goes on."""
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))

    def listener(event: Event) -> None:
        raise ZeroDivisionError(type(event).__name__)

    result = await launch(LaunchSpec(["true"]), listeners=[listener])
    assert result.state == "succeeded"
    assert [str(problem) for problem in problems] == [
        "JobStarted",
        "WorkerStarted",
        "WorkerExited",
        "JobFinished",
    ]
