"""The health check of a node, as a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic_aio.agent.health import check_health
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.errors import SpawnError
from elastic_aio.process.children import Child, ChildSpec, command_spawner
from elastic_aio.process.descendants import marker_value
from elastic_aio.spec.job import LaunchSpec
from tests.support.children import listed_sessions, until
from tests.support.leaks import alive

pytestmark = pytest.mark.both_loops

LONG = 30.0


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    made = LocalRuntime(
        LaunchSpec(["true"], env={"OF_JOB": "yes"}),
        run_id="r",
        host="h",
        nproc=1,
        spawner=command_spawner(asyncio.get_running_loop()),
        publish=lambda event: None,
    )
    await made.open()
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("true", ""),
        ("echo all is well; exit 0", ""),
        ("exit 3", "its health check has failed (exit code 3)"),
        ("echo one; echo; echo two >&2; echo; exit 1", "has failed (exit code 1): two"),
        ("printf 'a\\tb\\033[31m \\377'; exit 1", "has failed (exit code 1): a b [31m \ufffd"),
        ("echo $OF_JOB; exit 1", "has failed (exit code 1): yes"),
        ("kill -9 $$", "its health check has failed (killed by SIGKILL)"),
        ("read line || echo no input; exit 1", "no input"),
        ("no-such-command-here", "its health check has failed (exit code 127): "),
        ("yes | head -c 3000000; echo the end; exit 1", "has failed (exit code 1): the end"),
        ("echo $$ | tr -d '\\n'; exit 1", "has failed (exit code 1): "),
    ],
)
async def test_the_reason_is_the_last_line(runtime: LocalRuntime, command: str, why: str) -> None:
    """Of either stream, as one line that a terminal can show."""
    found = await check_health(runtime, command, LONG)
    assert (why in found) if why else not found


async def test_a_check_that_takes_too_long_is_killed(runtime: LocalRuntime, tmp_path: Path) -> None:
    """With all that it has started, also in another session."""
    pids = tmp_path / "pids"
    command = f"echo $$ > {pids}; setsid sh -c 'echo $$ >> {pids}; sleep 99' & echo busy; sleep 99"
    assert await check_health(runtime, command, 0.5) == (
        "its health check has not ended within 0.5 s: busy"
    )
    started = [int(one) for one in pids.read_text().split()]
    assert not any(map(alive, started))


async def test_what_a_check_leaves_behind_is_killed(runtime: LocalRuntime, tmp_path: Path) -> None:
    """It holds the pipe of the output, and its end is not waited for."""
    pid = tmp_path / "pid"
    command = (
        f"(trap '' TERM; sh -c 'echo $$ > {pid}; exec sleep 99') & sleep 0.1; echo bad; exit 1"
    )
    assert (await check_health(runtime, command, LONG)).endswith(": bad")
    assert not alive(int(pid.read_text()))


async def test_a_cancelled_check_is_killed(runtime: LocalRuntime, tmp_path: Path) -> None:
    """Cancelled twice, too."""
    pid = tmp_path / "pid"
    task = asyncio.create_task(check_health(runtime, f"echo $$ > {pid}; sleep 99", LONG))
    await until(lambda: pid.exists() and pid.read_text().strip() != "")
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(int(pid.read_text()))


async def test_a_check_is_guarded(runtime: LocalRuntime, tmp_path: Path) -> None:
    """The guardian ends it when the launcher is killed: it is on the session list."""
    pid = tmp_path / "pid"
    task = asyncio.create_task(check_health(runtime, f"echo $$ > {pid}; sleep 99", LONG))
    await until(lambda: pid.exists() and pid.read_text().strip() != "")
    assert runtime.job is not None
    assert int(pid.read_text()) in listed_sessions(runtime.job)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_check_names_its_launcher(runtime: LocalRuntime) -> None:
    """As a worker does: what is left of it counts as a lost job's."""
    command = "tr '\\0' '\\n' < /proc/$$/environ | grep ^ELASTIC_AIO_JOB_; exit 1"
    found = await check_health(runtime, command, LONG)
    assert found.rpartition("=")[2] == marker_value()


async def test_a_check_that_cannot_be_started_is_no_defect(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(spec: ChildSpec) -> Child:
        raise SpawnError("too many processes", permanent=False, exit_code=1)

    monkeypatch.setattr(runtime.entrypoint, "command_spawner", fail)
    why = await check_health(runtime, "true", LONG)
    assert why == "its health check cannot run: too many processes"

    def no_pipe(flags: int) -> tuple[int, int]:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(os, "pipe2", no_pipe)
    why = await check_health(runtime, "true", LONG)
    assert why.startswith("its health check cannot run: too many open files")
