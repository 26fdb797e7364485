"""`start_processes`: functions and programs as one group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from elastic_aio import LaunchSpec, LogSpec, SpawnError, SpecError
from elastic_aio.agent.preflight import worker_cpus
from elastic_aio.agent.worker_group import WorkerGroup
from elastic_aio.multiprocessing import ProcessFailure, RunProcsResult, spawn, start_processes
from tests.support import functions
from tests.support.children import file_console, shell
from tests.support.leaks import alive
from tests.support.start_methods import METHODS

NO_ENVS: dict[int, dict[str, str]] = {0: {}, 1: {}}


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> Any:
    """Each start method."""
    return request.param


async def result_of(*args: Any, **settings: Any) -> RunProcsResult:
    async with start_processes(*args, **settings) as group:
        result = await group.wait()
    assert result is not None
    return result


async def test_functions_with_their_own_arguments(method: Any, tmp_path: Path) -> None:
    """Arguments, variables, values and output of each; torch's variables are not set."""
    args = MappingProxyType({1: ("b", [2]), 0: ("a",)})
    envs = MappingProxyType({0: {"OWN": "0"}, 1: {"OWN": "1"}})
    logs = LogSpec(log_dir=tmp_path, redirects=3)
    result = await result_of("g", functions.report, args, envs, logs, start_method=method)
    assert not result.is_failed()
    assert dict(result.return_values) == {0: (("a",), "0", None), 1: (("b", [2]), "1", None)}
    assert [Path(result.stdouts[rank]).read_text() for rank in (0, 1)] == ["out a\n", "out b [2]\n"]
    assert [Path(result.stderrs[rank]).read_text() for rank in (0, 1)] == ["", ""]


async def test_an_interrupt_is_a_success(method: Any) -> None:
    """As in torch, where the parent of the processes gets the Ctrl-C too."""
    args: dict[int, tuple[Any, ...]] = {0: (), 1: ()}
    result = await result_of("g", functions.interrupt, args, NO_ENVS, start_method=method)
    assert not result.is_failed()
    assert dict(result.return_values) == {0: None, 1: None}


async def test_processes_are_bound_to_cpus(method: Any) -> None:
    bound = worker_cpus(LaunchSpec("x.py", nproc_per_node=2, numa_binding="cpu"), 2)
    rows = {0: (0,), 1: (0,)}
    result = await result_of(
        *("g", os.sched_getaffinity, rows, NO_ENVS), start_method=method, numa_binding="cpu"
    )
    assert dict(result.return_values) == dict(enumerate(bound))


async def test_programs(tmp_path: Path) -> None:
    """Arguments are made text; values are None; there are no paths where nothing is kept."""
    logs = LogSpec(log_dir=tmp_path, redirects=1)
    result = await result_of("g", "echo", {0: (1, [2]), 1: ("x",)}, NO_ENVS, logs)
    assert dict(result.return_values) == {0: None, 1: None}
    assert Path(result.stdouts[0]).read_text() == "1 [2]\n"
    assert dict(result.stderrs) == {0: "", 1: ""}
    many = await result_of("g", ["sh", "-c", "exit 0"], {0: ()}, {0: {}})
    assert dict(many.stdouts) == {0: ""}


async def test_tee(tmp_path: Path) -> None:
    """Output is shown with the group's name."""
    with file_console(tmp_path) as console:
        logs = LogSpec(log_dir=tmp_path / "logs", tee=1)
        await result_of("trainer", "echo", {0: ("hello",)}, {0: {}}, logs, console=console)
    assert (tmp_path / "out").read_text() == "[trainer0]:hello\n"


@pytest.mark.parametrize(
    ("args", "envs", "message"),
    [
        (
            {0: (), 2: ()},
            {0: {}, 1: {}},
            "args: must name the local ranks 0 to 1; missing: [1]; unknown: [2] (got [0, 2])",
        ),
        ({0: (), 1: ()}, {0: {}}, "envs: must name the local ranks 0 to 1; missing: [1] (got [0])"),
        (
            {0: ()},
            {0: {}, "x": {}},
            "envs: must name the local ranks 0 to 0; unknown: ['x'] (got ['x', 0])",
        ),
        ({}, {}, "args: must name the local ranks from 0 (got [])"),
        ({0: ()}, {0: {"A": 1}}, "env['A']: must be text without NUL (got 1)"),
    ],
)
def test_key_sets_are_checked(args: Any, envs: Any, message: str) -> None:
    """The message names what is missing."""
    with pytest.raises(SpecError) as caught:
        start_processes("g", "true", args, envs)
    assert str(caught.value) == message


async def test_one_failure_stops_the_group(method: Any, tmp_path: Path) -> None:
    """The result has the culprit with its error, and the others with their signal."""
    logs = LogSpec(log_dir=tmp_path)
    args = {0: ("first",), 1: ("",)}
    work = functions.raise_error_or_sleep
    result = await result_of("g", work, args, NO_ENVS, logs, start_method=method)
    assert result.is_failed()
    assert dict(result.return_values) == {}
    failure = next(iter(result.failures.values()))
    assert failure.exitcode == 1
    assert failure.message == "ValueError: first"
    assert Path(failure.error_file).name == "error.json"
    assert failure.signal_name() == "<N/A>"
    assert result.failures[1].exitcode == -signal.SIGTERM
    assert failure.failure.error is not None
    assert "raise_error" in (failure.failure.error.traceback or "")
    assert failure.timestamp_isoformat()[:2] == "20"


async def test_the_others_are_stopped_by_signal() -> None:
    """torch's fields: a negative exit code and the signal's name."""
    script = '[ "$OWN" = 1 ] && exit 3; exec sleep 99'
    result = await result_of("g", shell(script), {0: (), 1: ()}, {0: {}, 1: {"OWN": "1"}})
    found: dict[int, ProcessFailure] = dict(result.failures)
    assert found[1].exitcode == 3
    assert found[0].exitcode == -signal.SIGTERM
    assert found[0].signal_name() == "SIGTERM"
    assert found[0].failure.is_victim
    assert found[0].message == f"Signal 15 (SIGTERM) received by PID {found[0].pid}"
    assert found[0].error_file == "<N/A>"


async def test_waits_may_be_short(method: Any) -> None:
    """None when the time is over; 0 only looks; close ends it, and may be repeated."""
    group = start_processes("g", functions.sleep, {0: (), 1: ()}, NO_ENVS, start_method=method)
    async with group:
        pids = group.pids()
        assert sorted(pids) == [0, 1]
        assert await group.wait(0) is None
        began = time.monotonic()
        assert await group.wait(0.1) is None
        assert time.monotonic() - began >= 0.09
        assert all(map(alive, pids.values()))
        await group.close(signal.SIGKILL)
        assert not any(map(alive, pids.values()))
        result = await group.wait(-1)
        await group.close()
    assert result is not None
    assert {one.exitcode for one in result.failures.values()} == {-9}


async def test_leaving_stops_running_processes() -> None:
    """With or without an error; a group is started once."""
    group = start_processes("g", ["sleep", "99"], {0: ()}, {0: {}})
    with pytest.raises(RuntimeError, match="not started"):
        await group.wait()
    async with group:
        pids = group.pids()
    assert not any(map(alive, pids.values()))
    with pytest.raises(ValueError, match="started once"):
        await group.__aenter__()


async def test_a_failed_start_leaves_no_process() -> None:
    """The first process may run when the second cannot be started."""
    with pytest.raises(SpawnError, match="command not found"):
        await start_processes("g", "/no/such/program", {0: (), 1: ()}, NO_ENVS).__aenter__()


async def test_unpicklable_arguments_are_refused() -> None:
    """Before anything starts."""
    given: Iterator[int] = (one for one in [1])
    with pytest.raises(SpecError, match=r"^args\[0\]: cannot be pickled"):
        await start_processes("g", functions.give, {0: (given,)}, {0: {}}).__aenter__()


async def test_wrong_arguments_are_refused() -> None:
    text: Any = "ab"
    with pytest.raises(SpecError, match=r"^args\[0\]: must be a list \(got 'ab'\)$"):
        start_processes("g", "true", {0: text}, {0: {}})
    with pytest.raises(SpecError, match=r"^args: must be a list \(got 'ab'\)$"):
        await spawn(functions.give, args=text)
    with pytest.raises(SpecError, match=r"^nprocs: must be a whole number of at least 0"):
        await spawn(functions.give, nprocs=-1)


async def test_a_defect_of_ours_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not let the program wait for ever."""

    async def fail(group: WorkerGroup) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(WorkerGroup, "result", fail)
    async with start_processes("g", ["true"], {0: ()}, {0: {}}) as group:
        with pytest.raises(RuntimeError, match="a defect"):
            await group.wait()
