"""torch's `start_processes` and `spawn` over elastic_aio."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio import LaunchSpec
from elastic_aio.agent.preflight import worker_cpus
from elastic_aio.compat.torch.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    MultiprocessContext,
    PContext,
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    RunProcsResult,
    SignalException,
    SpawnContext,
    Std,
    SubprocessContext,
    spawn,
    start_context,
    start_processes,
)
from elastic_aio.hardware.cpus import format_cpus
from tests.support import functions
from tests.support.children import none_alive, noted, until_sync
from tests.support.leaks import alive
from tests.support.start_methods import METHODS

NOTHING = os.devnull


def started(entrypoint: Any, *rows: tuple[Any, ...], **settings: Any) -> PContext:
    """Start one process for each row of arguments."""
    settings.setdefault("logs_specs", DefaultLogsSpecs(NOTHING))
    settings.setdefault("envs", {rank: {} for rank in range(len(rows))})
    return start_processes("trainer", entrypoint, dict(enumerate(rows)), **settings)


def result_of(context: PContext) -> RunProcsResult:
    """Wait for the end."""
    result = context.wait()
    assert result is not None
    return result


@pytest.mark.parametrize("method", METHODS)
def test_functions(method: Any, tmp_path: Path) -> None:
    """The context ends itself after the result; `wait` returns the same one again."""
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT)
    context = started(
        functions.report,
        (1,),
        (2,),
        envs={0: {"OWN": "a"}, 1: {"OWN": "b"}},
        logs_specs=logs,
        start_method=method,
    )
    assert isinstance(context, MultiprocessContext)
    result = result_of(context)
    assert not result.is_failed()
    assert result.return_values == {0: ((1,), "a", None), 1: ((2,), "b", None)}
    assert Path(result.stdouts[1]).read_text() == "out 2\n"
    assert result.stderrs == {0: "", 1: ""}
    assert context.wait(0) is result
    context.close()


def test_a_program(tmp_path: Path) -> None:
    """Its arguments are made text; its values are None; torch's layout of directories."""
    logs = DefaultLogsSpecs(str(tmp_path), redirects={1: Std.ALL})
    envs = {0: {"TORCHELASTIC_RUN_ID": "job"}, 1: {"TORCHELASTIC_RUN_ID": "job"}}
    context = started("echo", (1, [2]), ("x",), envs=envs, logs_specs=logs)
    assert isinstance(context, SubprocessContext)
    result = result_of(context)
    assert result.return_values == {0: None, 1: None}
    assert result.stdouts[0] == ""
    path = Path(result.stdouts[1])
    assert path.read_text() == "x\n"
    assert path.relative_to(tmp_path).parts[0].startswith("job_")
    assert path.relative_to(tmp_path).parts[1:] == ("attempt_0", "1", "stdout.log")
    assert envs[0] == {"TORCHELASTIC_RUN_ID": "job"}, "the caller's dict is not changed"


def test_numa_options_bind_each_process(tmp_path: Path) -> None:
    """Functions and programs, before they run; as torch's object, or by the name of the mode."""
    bound = worker_cpus(LaunchSpec("x.py", nproc_per_node=2, numa_binding="cpu"), 2)
    options = SimpleNamespace(affinity_mode=SimpleNamespace(value="cpu"))
    result = result_of(started(os.sched_getaffinity, (0,), (0,), numa_options=options))
    assert result.return_values == dict(enumerate(bound))
    words = ("Cpus_allowed_list", "/proc/self/status")
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.OUT)
    result = result_of(started("grep", words, words, numa_options="cpu", logs_specs=logs))
    for rank, cpus in enumerate(bound):
        assert Path(result.stdouts[rank]).read_text().split()[1] == format_cpus(cpus)
    with pytest.raises(ValueError, match="numa_binding: must be 'node', "):
        started("true", (), numa_options="pigeons")


def test_prefixes_are_literal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also one with a dollar sign; a rank without one has torch's default."""
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    context = started("echo", ("a",), ("b",), logs_specs=logs, log_line_prefixes={0: "$rank> "})
    assert context.wait() is not None
    assert sorted(capfd.readouterr().out.splitlines()) == ["$rank> a", "[trainer1]:b"]


def test_filters_copy_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Shown lines that contain one of the texts, with their prefixes; nothing without files."""
    settings: dict[str, Any] = {
        "duplicate_stdout_filters": ["oss"],
        "log_line_prefixes": {0: "[rank0]:"},
    }
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    context = started("printf", ("loss 1\\nother\\n",), logs_specs=logs, **settings)
    assert context.wait() is not None
    assert Path(context.filtered_stdout or "").read_text() == "[rank0]:loss 1\n"
    assert context.filtered_stderr is None
    assert capfd.readouterr().out == "[rank0]:loss 1\n[rank0]:other\n"
    context = started("true", (), **settings)
    assert context.wait() is not None
    assert context.filtered_stdout is None


def test_the_first_failure_of_a_program_is_the_root_cause() -> None:
    """Siblings that were stopped follow."""
    context = started("bash", ("-c", "sleep 99"), ("-c", "exit 3"))
    result = result_of(context)
    assert result.return_values == {}
    assert [(rank, item.exitcode) for rank, item in result.failures.items()] == [(1, 3), (0, -15)]
    assert result.failures[0].message.startswith("Signal 15 (SIGTERM) received by PID ")
    assert "errorTraits" in result.failures[1].error_file_data
    assert "errorTraits" not in result.failures[0].error_file_data


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_of_functions_one_failure_is_reported(method: Any, tmp_path: Path) -> None:
    """With its error file."""
    context = started(
        functions.raise_error_or_sleep,
        ("",),
        ("boom",),
        logs_specs=DefaultLogsSpecs(str(tmp_path)),
        start_method=method,
    )
    result = result_of(context)
    (failure,) = result.failures.values()
    assert failure.local_rank == 1
    assert failure.exitcode == 1
    assert failure.pid == context.pids()[1]
    assert failure.error_file.endswith("/attempt_0/1/error.json")
    assert failure.message["message"] == "ValueError: boom"
    assert int(failure.message["extraInfo"]["timestamp"]) == failure.timestamp


def test_an_error_without_a_file_is_known_too() -> None:
    """The result of a function has it."""
    result = result_of(started(functions.raise_error, ("boom",)))
    assert result.failures[0].error_file == "<N/A>"
    assert result.failures[0].message["message"] == "ValueError: boom"


def test_a_broken_error_file_is_no_error_of_ours(tmp_path: Path) -> None:
    """The process has failed, and that is the result."""
    script = 'echo "{broken" > "$TORCHELASTIC_ERROR_FILE"; exit 4'
    result = result_of(started("bash", ("-c", script), logs_specs=DefaultLogsSpecs(str(tmp_path))))
    assert result.failures[0].exitcode == 4
    assert result.failures[0].error_file == "<N/A>"


def test_wait_and_close() -> None:
    """`wait` returns None at the timeout; `close` stops the processes and is idempotent."""
    context = started("sleep", (99,), (99,))
    assert context.wait(0) is None
    assert context.wait(0.05, period=0.01) is None
    pids = context.pids()
    assert sorted(pids) == [0, 1]
    context.close(signal.SIGINT, timeout=30)
    assert not any(map(alive, pids.values()))
    assert context.pids() == pids
    result = result_of(context)
    assert {item.signal_name() for item in result.failures.values()} == {"SIGINT"}
    context.close()


def test_close_kills_after_its_timeout(tmp_path: Path) -> None:
    note = f"echo $$ > {tmp_path}/.0; mv {tmp_path}/.0 {tmp_path}/0"
    context = started("bash", ("-c", f"trap '' TERM; {note}; sleep 99 & wait; wait"))
    until_sync(noted(tmp_path, 1))
    context.close(timeout=0.05)
    assert [process.exitcode for process in context.processes] == [-9]


def test_processes_and_sentinels() -> None:
    """Usable with multiprocessing's own `wait`."""
    context = started("sleep", (99,), (99,))
    first, second = context.processes
    assert first.is_alive()
    assert first.pid == context.pids()[0]
    first.join(0.01)
    with pytest.raises(ValueError, match="still running"):
        first.close()
    sentinels = context.sentinels
    assert sentinels == {first.sentinel: 0, second.sentinel: 1}
    second.kill()
    assert second.sentinel in wait([*sentinels])
    assert second.exitcode == -9
    second.join()
    assert context.wait() is not None
    assert first.exitcode == -15
    assert context.sentinels == {}
    first.terminate()
    first.close()


@pytest.mark.parametrize(
    ("args", "envs", "message"),
    [
        ({0: (), 2: ()}, {0: {}, 1: {}}, r"args, .*expected: \{0, 1\}, actual: \{0, 2\}"),
        ({0: ()}, {0: {}, 1: {}}, r"envs, .*expected: \{0\}, actual: \{0, 1\}"),
    ],
)
def test_ranks_are_checked(args: Any, envs: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        start_processes("t", "true", args, envs, DefaultLogsSpecs(NOTHING))


def test_what_cannot_be_started() -> None:
    """The errors are those of subprocess and multiprocessing."""
    with pytest.raises(FileNotFoundError):
        started("does_not_exist.py", ())
    with pytest.raises(PermissionError):
        started(__file__, ())
    with pytest.raises(TypeError, match="str expected, not int"):
        started("true", (), envs={0: {"A": 1}})
    with pytest.raises(pickle.PicklingError):
        started(print, (threading.Lock(),))
    with pytest.raises(ValueError, match="cannot find context for 'thread'"):
        start_context(print, start_method="thread")  # type: ignore[arg-type]  # wrong on purpose


def test_a_context_starts_once() -> None:
    context = started("true", ())
    with pytest.raises(ValueError, match="Most likely the start method got called twice"):
        context.start()
    assert context.wait() is not None


def test_no_process() -> None:
    """An empty group has succeeded; so have no processes of `spawn`."""
    result = result_of(started(print))
    assert result.return_values == {}
    assert spawn(print, nprocs=0) is None
    context = spawn(print, nprocs=0, join=False)
    assert context is not None
    assert context.join()


class FixedLogs(LogsSpecs):
    """Every attempt writes to the same files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        paths = {rank: f"{self.root_log_dir}/{rank}" for rank in envs}
        return LogsDest(paths, dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def test_a_layout_of_the_users(tmp_path: Path) -> None:
    """Its files are overwritten, as torch does."""
    logs = FixedLogs(str(tmp_path))
    for text in ("first", "second"):
        assert started("sh", ("-c", f"echo {text}; echo x >&2"), logs_specs=logs).wait()
    assert (tmp_path / "0").read_text() == "second\n"


SIGNALLED = """
import os, signal, sys
from elastic_aio.compat.torch.multiprocessing import *
before = signal.getsignal(signal.SIGTERM)
logs = DefaultLogsSpecs("/dev/null")
context = start_processes("t", "sleep", {0: (99,), 1: (99,)}, {0: {}, 1: {}}, logs)
try:
    print(*context.pids().values(), flush=True)
    context.wait()
except SignalException as error:
    print(error.sigval.name, str(error).startswith(f"Process {os.getpid()} got signal: "))
    context.close(error.sigval)
print(signal.getsignal(signal.SIGTERM) is before, context.wait().failures[0].signal_name())
"""


def test_a_signal_is_raised_and_handlers_are_restored() -> None:
    """The caller closes the context with the signal, as torch's callers do."""
    program = [sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.send_signal(signal.SIGTERM)
        lines = process.stdout.read().splitlines()
    assert lines == ["SIGTERM True", "True SIGTERM"]
    until_sync(none_alive(pids))


def test_another_thread_gets_no_signals(caplog: pytest.LogCaptureFixture) -> None:
    """A warning says so; everything else works."""
    results: list[Any] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: results.append(started("true", ()).wait()))
    thread.start()
    thread.join()
    assert results[0].return_values == {0: None}
    assert signal.getsignal(signal.SIGTERM) is before
    assert "Failed to register signal handlers" in caplog.text


def test_unknown_signals_are_skipped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1,NOPE,SIGKILL")
    context = started("sleep", (99,))
    with pytest.raises(SignalException, match="got signal"):
        os.kill(os.getpid(), signal.SIGUSR1)
    context.close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "Failed to register signal handler for NOPE",
        "Failed to register signal handler for SIGKILL",
    ]


# ------------------------------------------------------------------------ spawn


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_processes_that_are_joined(method: Any, tmp_path: Path) -> None:
    start_context(functions.indexed, (str(tmp_path), "x"), 2, start_method=method)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    context = start_context(functions.indexed_sleep, (0.1,), 2, False, start_method=method)
    assert context is not None
    assert [process.pid for process in context.processes] == context.pids()
    assert sorted(context.sentinels.values()) == [0, 1]
    while not context.join():
        pass
    assert context.sentinels == {}
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert context.join()
    del context
    gc.collect()


@pytest.mark.slow
def test_join_times_out_and_raises(tmp_path: Path) -> None:
    """What a function raised has its traceback in the message."""
    context = spawn(functions.indexed_wait, (str(tmp_path),), 2, join=False)
    assert context is not None
    until_sync(noted(tmp_path, 2))
    assert not context.join(timeout=-1)
    context.processes[1].terminate()
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGTERM"):
        context.join()
    assert context.join()
    with pytest.raises(ProcessRaisedException, match=r"(?s)-- Process 1 .*ValueError: boom"):
        spawn(functions.indexed_end, ("raise",), 2)


@pytest.mark.slow
def test_the_processes_that_a_failed_join_ends_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By torch's logger, with its text; not those that have exited."""
    context = spawn(functions.indexed_wait, (str(tmp_path),), 3, join=False)
    assert context is not None
    until_sync(noted(tmp_path, 3))
    context.processes[1].kill()
    with pytest.raises(ProcessExitedException):
        context.join()
    assert caplog.record_tuples == [
        (
            "torch.multiprocessing.spawn",
            logging.WARNING,
            f"Terminating process {context.pids()[index]} via signal SIGTERM",
        )
        for index in (0, 2)
    ]
    caplog.clear()
    with pytest.raises(ProcessRaisedException):
        spawn(functions.indexed_end, ("raise",), 2)
    assert [one.name for one in caplog.records] == ["torch.multiprocessing.spawn"]


@pytest.mark.parametrize("default", ["fork", "forkserver"])
def test_no_start_method_is_that_of_multiprocessing(
    default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that cannot be pickled needs "fork"."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: default)
    lock = threading.Lock()
    with nullcontext() if default == "fork" else pytest.raises(pickle.PicklingError):
        start_context(lambda index: lock.locked(), start_method=None)
    with nullcontext() if default == "fork" else pytest.raises(pickle.PicklingError):
        started(lock.locked, (), start_method=None).wait()


@pytest.mark.slow
def test_old_names_warn(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="SpawnContext is renamed"):
        assert isinstance(SpawnContext(None), ProcessContext)
    with pytest.warns(FutureWarning, match=r"only supports start_method=spawn \(got: fork\)"):
        spawn(functions.indexed, (str(tmp_path),), start_method="fork")


LEFT_ALONE = """
import sys
from elastic_aio.compat.torch.multiprocessing import spawn
from tests.support import functions
def late(index, directory, daemon):
    import time
    time.sleep(99 if daemon else 0.3)
    functions.indexed(index, directory)
if __name__ == "__main__":
    spawn(late, (sys.argv[1], len(sys.argv) > 2), 2, join=False, daemon=len(sys.argv) > 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("daemon", [False, True])
def test_the_program_waits_for_processes_at_its_end(tmp_path: Path, daemon: bool) -> None:
    """Though nothing refers to their context; daemons are ended."""
    script = tmp_path / "script.py"
    script.write_text(LEFT_ALONE)
    notes = tmp_path / "notes"
    notes.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [str(notes), *["daemon"][: int(daemon)]]
    program = [sys.executable, str(script), *arguments]
    subprocess.run(program, check=True, timeout=60, env=env)
    assert sorted(path.name for path in notes.iterdir()) == ([] if daemon else ["0", "1"])
