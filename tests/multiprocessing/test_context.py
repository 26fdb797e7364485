"""`spawn` and `ProcessContext`: torch.multiprocessing's behaviour, line by line."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.multiprocessing import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
    start_context,
)
from tests.support import functions
from tests.support.children import DEADLINE_S, until
from tests.support.leaks import alive
from tests.support.start_methods import METHODS


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    """Each start method."""
    return request.param


async def context_of(
    fn: Any, args: tuple[Any, ...], nprocs: int, *, start_method: Any = "spawn"
) -> ProcessContext:
    context = await start_context(fn, args, nprocs, False, start_method=start_method)
    assert context is not None
    return context


async def joined(context: ProcessContext, grace_period: float | None = None) -> None:
    while not await context.join(grace_period=grace_period):
        pass


@pytest.mark.slow
async def test_the_index_comes_first(method: Any, tmp_path: Path) -> None:
    """Each process gets its index and the arguments; nothing is returned."""
    directory = str(tmp_path)
    done = await start_context(functions.indexed, (directory, "x"), 3, start_method=method)
    assert done is None
    assert [(tmp_path / str(i)).read_text() for i in range(3)] == [
        f"({i}, ['x'])" for i in range(3)
    ]


@pytest.mark.slow
async def test_a_coroutine_function_is_run(method: Any, tmp_path: Path) -> None:
    directory = str(tmp_path)
    await start_context(functions.indexed_later, (directory, "x"), 2, start_method=method)
    assert [(tmp_path / str(i)).read_text() for i in range(2)] == ["(0, ['x'])", "(1, ['x'])"]


async def test_zero_processes() -> None:
    """nprocs=0 is done at once, joined or not."""
    assert await spawn(functions.indexed, nprocs=0) is None
    assert await spawn(functions.indexed, nprocs=0, join=False) is None


@pytest.mark.slow
async def test_an_exception_comes_with_its_traceback(
    method: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the message of ProcessRaisedException; nothing is printed."""
    with pytest.raises(ProcessRaisedException) as caught:
        await start_context(functions.indexed_end, ("raise",), 3, start_method=method)
    error = caught.value
    assert str(error).startswith(
        "\n\n-- Process 1 terminated with the following error:\nTraceback "
    )
    assert str(error).endswith("ValueError: boom\n")
    assert error.error_index == 1
    assert error.error_pid == error.pid > 0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message", "code", "name"),
    [
        ("exit", "process 1 terminated with exit code 3", 3, None),
        ("text", "process 1 terminated with exit code 1", 1, None),
        ("base", "process 1 terminated with exit code 1", 1, None),
        ("signal", "process 1 terminated with signal SIGTERM", -15, "SIGTERM"),
        ("unknown", "process 1 terminated with signal <Unknown signal 40>", -40,
         "<Unknown signal 40>"),
    ],
)  # fmt: skip
async def test_exit_codes_and_signals(
    how: str, message: str, code: int, name: str | None, method: Any
) -> None:
    """ProcessExitedException has the code, negative for signals, and the signal's name."""
    with pytest.raises(ProcessExitedException) as caught:
        await start_context(functions.indexed_end, (how,), 2, start_method=method)
    error = caught.value
    assert str(error) == message
    assert (error.error_index, error.exit_code, error.signal_name) == (1, code, name)


@pytest.mark.parametrize(
    "error",
    [
        ProcessException("m", 1, 2),
        ProcessRaisedException("m", 1, 2),
        ProcessExitedException("m", 1, 2, -9, "SIGKILL"),
        ProcessExitedException("m", 1, 2, 3),
    ],
)
def test_exceptions_can_be_pickled(error: ProcessException) -> None:
    """With all their attributes."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert (str(again), again.pid) == ("m", 2)


@pytest.mark.slow
async def test_an_interrupt_is_a_success(method: Any) -> None:
    """KeyboardInterrupt in a process is no failure; values are dropped, whatever they are."""
    await start_context(functions.indexed_interrupt, (), 2, start_method=method)
    await start_context(functions.indexed_generator, (), 2, start_method=method)


@pytest.mark.slow
async def test_join_returns_whether_all_have_exited(method: Any) -> None:
    """False after each exit but the last; True then, and ever after."""
    context = await context_of(functions.indexed_sleep, (0.3,), 3, start_method=method)
    assert len(context.pids()) == 3
    answers = [await context.join()]
    while not answers[-1]:
        answers.append(await context.join())
    assert answers[-1]
    assert 1 <= len(answers) <= 3
    assert await context.join()


async def test_join_has_a_timeout() -> None:
    """False when it is over; the processes run on, until the block is left."""
    async with await context_of(functions.indexed_end, ("raise",), 1) as context:
        began = time.monotonic()
        assert await context.join(0.2) is False
        assert 0.15 < time.monotonic() - began < DEADLINE_S
        assert alive(context.pids()[0])
    assert not alive(context.pids()[0])


async def test_a_cancelled_join_stops_nothing() -> None:
    """Cancelling the wait leaves the processes; cancelling a joined spawn does not."""
    context = await context_of(functions.indexed_end, ("raise",), 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(context.join(), 0.1)
    assert alive(context.pids()[0])
    await context.aclose()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(spawn(functions.indexed_sleep, (9.0,), 2), 0.5)


@pytest.mark.slow
async def test_the_grace_period(tmp_path: Path) -> None:
    """As long for ends of their own as between SIGTERM and SIGKILL."""
    context = await context_of(functions.indexed_ignoring_sigterm, (str(tmp_path), 99.0), 2)
    await until((tmp_path / "ready").exists)
    began = time.monotonic()
    with pytest.raises(ProcessExitedException, match="exit code 2"):
        await joined(context, 0.4)
    assert 0.75 < time.monotonic() - began < DEADLINE_S
    assert not (tmp_path / "done").exists()


async def test_a_grace_period_lets_others_finish(tmp_path: Path) -> None:
    """Who ends in time is not signalled."""
    context = await context_of(functions.indexed_ignoring_sigterm, (str(tmp_path), 0.3), 2)
    with pytest.raises(ProcessExitedException, match="exit code 2"):
        await joined(context, DEADLINE_S)
    assert (tmp_path / "done").exists()


async def test_only_spawn_spawns(tmp_path: Path) -> None:
    """Another start method is warned of, and spawns all the same."""
    text = "This method only supports start_method=spawn (got: fork).\nTo use a different"
    with pytest.warns(FutureWarning, match=re.escape(text)) as caught:
        await spawn(functions.indexed, (str(tmp_path),), 1, start_method="fork")
    assert caught[0].filename == __file__
    assert (tmp_path / "0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("daemon", [False, True])
async def test_the_daemon_flag(daemon: bool, method: Any, tmp_path: Path) -> None:
    """It is multiprocessing's in the process."""
    directory = (str(tmp_path),)
    await start_context(functions.indexed_daemon, directory, 1, daemon=daemon, start_method=method)
    assert (tmp_path / "0").read_text() == str(daemon)


async def test_no_files_are_left(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracebacks travel without any."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ProcessRaisedException):
        await start_context(functions.indexed_end, ("raise",), 2, start_method=method)
    assert os.listdir(tmp_path) == []


async def test_a_process_that_is_killed(method: Any) -> None:
    """The one that exited is blamed."""
    context = await context_of(functions.indexed_sleep, (99.0,), 3, start_method=method)
    assert not await context.join()  # the first does not sleep
    os.kill(context.pids()[2], signal.SIGKILL)
    with pytest.raises(ProcessExitedException) as caught:
        await context.join()
    assert (caught.value.error_index, caught.value.signal_name) == (2, "SIGKILL")
    assert await context.join()
