"""`Agent.logs`: the output of a running job in a program."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from elastic_aio import Agent, JobFailed, LaunchSpec, LogLine, LogSpec, SpecError
from tests.support.children import DEADLINE_S, SLEEPER, file_console, python, shell

BOTH = 'echo "out $RANK"; echo "err $RANK" >&2'


async def lines_of(agent: Agent, **chosen: object) -> list[LogLine]:
    async with asyncio.timeout(DEADLINE_S):
        return [line async for line in agent.logs(**chosen)]  # type: ignore[arg-type]  # a table


@pytest.mark.both_loops
@pytest.mark.parametrize("logs", [{"redirects": 3}, {"tee": 3}, {"tee": 3, "on_full": "console"}])
async def test_a_running_job_and_after_the_fact(tmp_path: Path, logs: dict[str, object]) -> None:
    """All lines of all attempts; the same ones when the job is over."""
    script = f"{BOTH}; [ $TORCHELASTIC_RESTART_COUNT = 1 ]"
    spec = LaunchSpec(
        shell(script), nproc_per_node=2, max_restarts=1,
        logs=LogSpec(log_dir=tmp_path / "logs", **logs),  # type: ignore[arg-type]  # a table
    )  # fmt: skip
    expected = {
        (attempt, rank, stream, f"{stream[3:]} {rank}")
        for attempt in (0, 1) for rank in (0, 1) for stream in ("stdout", "stderr")
    }  # fmt: skip
    with file_console(tmp_path) as console:
        async with Agent(spec, console=console) as agent:
            live = await lines_of(agent)
            result = await agent.wait()
        late = await lines_of(agent)
    for lines in (live, late):
        found = {(line.attempt, line.rank, line.stream, line.text) for line in lines}
        # A worker that was stopped may have written less.
        assert found <= expected
        assert found >= {item for item in expected if item[0] == 1}
        began, ended = result.attempts[0].started_at, result.attempts[-1]
        for line in lines:
            assert began - 1 <= line.time <= ended.started_at + ended.duration + 1


async def test_ranks_streams_and_captured_text(tmp_path: Path) -> None:
    """What is captured can be read while the job runs."""
    spec = LaunchSpec(shell(BOTH), nproc_per_node=3, logs=LogSpec(log_dir=tmp_path, redirects=1))
    async with Agent(spec) as agent:
        out, err, one = await asyncio.gather(
            lines_of(agent, streams=["stdout"]),
            lines_of(agent, streams=["stderr"]),
            lines_of(agent, ranks=[1]),
        )
    assert sorted(line.text for line in out) == ["out 0", "out 1", "out 2"]
    assert sorted(line.text for line in err) == ["err 0", "err 1", "err 2"]
    assert sorted(line.text for line in one) == ["err 1", "out 1"]


async def test_a_program_reads_while_the_job_goes_on(tmp_path: Path) -> None:
    """A line comes when it was written; a reader that is left delays nothing."""
    script = "print('ready'); import time; time.sleep(99)"
    async with Agent(LaunchSpec(python(script), logs=LogSpec(redirects=1))) as agent:
        async with agent.logs() as lines, asyncio.timeout(DEADLINE_S):
            assert (await anext(lines)).text == "ready"
        assert [line.text for line in await lines_of(agent, follow=False)] == ["ready"]


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"streams": ["stdin"]}, "must be 'stdout', 'stderr' or both"),
        ({"streams": "stdout"}, "must be a list"),
        ({"ranks": [-1]}, "at least 0"),
        ({"ranks": 1}, "must be a list"),
        ({"ranks": [0, 5]}, r"^ranks: must be ranks of workers of this node: 0 \(got \[5\]\)$"),
        ({"streams": ["stdout"]}, r"is in no file, .* \(got \['stdout'\]\)$"),
    ],
)
async def test_mistakes(chosen: dict[str, object], problem: str) -> None:
    """One of them: no stream that was chosen is in a file."""
    spec = LaunchSpec(SLEEPER, logs=LogSpec(capture=False))
    async with Agent(spec) as agent:
        with pytest.raises(SpecError, match=problem):
            agent.logs(**chosen)  # type: ignore[arg-type]  # a mistake
    with pytest.raises(RuntimeError, match="has not been started"):
        Agent(spec).logs()


async def test_the_lines_of_a_failed_job_can_be_read_later() -> None:
    async with Agent(LaunchSpec(shell("echo text >&2; exit 3"))) as agent:
        with pytest.raises(JobFailed):
            await agent.wait()
    assert [line.text for line in await lines_of(agent)] == ["text"]
