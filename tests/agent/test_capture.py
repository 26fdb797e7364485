"""Captured standard error: passed on unchanged, and the reason of each failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from elastic_aio import (
    Agent,
    AttemptFailed,
    Event,
    JobFailed,
    LaunchSpec,
    LogSpec,
    WorkerExited,
    WorkerStarted,
    launch,
)
from elastic_aio.agent import logs as job_output
from tests.support.children import DEADLINE_S, python, shell, until, until_sync
from tests.support.cli import CLI, environment, run_cli
from tests.support.disk import fill, small_disk
from tests.support.restarts import AT_ONCE

FAILING = python("import sys; print('noise', file=sys.stderr); raise ValueError('boom')")
REASON = "ValueError: boom"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make temporary files in a directory of the test's own."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def stderr(tmp_path: Path) -> Iterator[Stderr]:
    """A file that can take the place of this process's standard error."""
    saved = os.dup(2)
    with (tmp_path / "stderr").open("a+b") as file:
        yield Stderr(file)
    os.dup2(saved, 2)
    os.close(saved)


class Stderr:
    """A file in place of standard error, from `take` on: pytest sets that before each test."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def take(self) -> None:
        os.dup2(self._file.fileno(), 2)

    @property
    def content(self) -> bytes:
        """All that was written to it."""
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)


def held(then: str, directory: Path) -> LaunchSpec:
    """Return a job whose worker waits for `go` before it echoes something."""
    os.mkfifo(directory / "held")
    return LaunchSpec(shell(f"read line < held; echo {then}"), cwd=str(directory))


def go(directory: Path) -> None:
    """Let the worker go on."""
    (directory / "held").write_text("\n")


async def stderr_path(agent: Agent) -> Path:
    """Return the path of the captured standard error of the first worker."""
    await until(lambda: agent.status().is_ready)
    path = agent.status().workers[0].stderr_path
    assert path is not None
    return Path(path)


# ------------------------------------------------------------------------ the reason


@pytest.mark.both_loops
async def test_the_reason_is_everywhere(temporary: Path, stderr: Stderr) -> None:
    """In the exception, the result, and the events of the worker and of the attempt."""
    stderr.take()
    seen: list[Event] = []
    with pytest.raises(JobFailed, match=REASON) as caught:
        await launch(LaunchSpec(FAILING), listeners=[seen.append])
    root = caught.value.root_cause
    assert root is not None
    assert root.reason == REASON
    assert root.summary == f"rank 0 (pid {root.pid}): exit code 1: {REASON}"
    assert root.stderr_tail[0] == "noise"
    (worker,) = caught.value.result.attempts[-1].workers
    assert worker.stderr_tail == stderr.content.decode()
    (exited,) = (event for event in seen if isinstance(event, WorkerExited))
    (failed,) = (event for event in seen if isinstance(event, AttemptFailed))
    assert (exited.reason, failed.root.reason) == (REASON, REASON)


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_success_leaves_what_failed_attempts_have_written(
    temporary: Path, stderr: Stderr, failures: int
) -> None:
    """The files of all attempts are there while the job runs."""
    stderr.take()
    paths: list[str | None] = []

    def on_event(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            paths.append(event.stderr_path)
        elif isinstance(event, WorkerExited):
            assert all(path is not None and os.path.exists(path) for path in paths)

    script = (
        f'echo "$TORCHELASTIC_RESTART_COUNT" >&2; exit $(({failures} - TORCHELASTIC_RESTART_COUNT))'
    )
    result = await launch(LaunchSpec(shell(script), max_restarts=1), listeners=[on_event])
    assert stderr.content == b"0\n1\n"[: 2 * failures + 2]
    kept = [worker.stderr_path for attempt in result.attempts for worker in attempt.workers]
    assert kept == [*paths[:failures], None]
    assert [Path(path or "").read_bytes() for path in kept[:-1]] == [b"0\n"] * failures
    assert len([*temporary.rglob("*.log")]) == failures
    assert (result.log_dir is not None) is bool(failures)


@pytest.mark.parametrize("logs", [{}, {"redirects": 3}, {"redirects": 3, "keep_attempts": 1}])
async def test_a_result_names_only_what_exists(
    temporary: Path, stderr: Stderr, tmp_path: Path, logs: dict[str, Any]
) -> None:
    """Nothing was captured, files are empty and removed, and attempts are not kept."""
    stderr.take()
    log_dir = tmp_path / "logs" if "keep_attempts" in logs else None
    spec = LaunchSpec(
        shell("[ $RANK = 1 ] || exec sleep 99; echo output; exit 1"),
        nproc_per_node=2,
        max_restarts=1,
        logs=LogSpec(log_dir=log_dir, **logs),
        restart=AT_ONCE,
    )
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    result = caught.value.result
    assert len(result.attempts) == 2
    named = [result.log_dir]
    for attempt in result.attempts:
        named += [attempt.log_dir, *(one.stderr_path for one in attempt.failures)]
        named += [path for one in attempt.workers for path in (one.stdout_path, one.stderr_path)]
    existing = [path for path in named if path is not None]
    assert all(os.path.exists(path) for path in existing)
    assert bool(existing) == bool(logs)


async def test_paths_stay_if_the_file_system_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(job_output, "_LOOK_UP_S", 0.01)
    monkeypatch.setattr(job_output, "with_paths", lambda *arguments: answers.wait(DEADLINE_S))
    try:
        logs = LogSpec(log_dir=tmp_path, redirects=3)
        result = await launch(LaunchSpec(shell("exit 0"), logs=logs))
    finally:
        answers.set()
    assert result.attempts[0].workers[0].stdout_path is not None


async def test_a_worker_that_writes_nothing_makes_nothing(
    temporary: Path, stderr: Stderr, tmp_path: Path
) -> None:
    """No directory and no file, before its first byte or the first reader."""
    stderr.take()
    async with Agent(held("text >&2; exec sleep 60", tmp_path)) as agent:
        path = await stderr_path(agent)
        names = [found.name for found in temporary.rglob("*")]
        assert sorted(names) == sorted(["attempt_0", path.parents[2].name])
        go(tmp_path)
        await until(lambda: path.exists() and path.read_text() == "text\n")
        await agent.stop()
    assert list(temporary.iterdir()) == []


async def test_a_reader_makes_the_files(temporary: Path, stderr: Stderr) -> None:
    """Of the workers that run, and of those of later attempts."""
    stderr.take()
    spec = LaunchSpec(shell("sleep 60"), nproc_per_node=2, max_restarts=1)
    async with Agent(spec) as agent:
        await until(lambda: agent.status().is_ready)
        agent.make_log_files()
        paths = [worker.stderr_path for worker in agent.status().workers]
        assert all(path is not None and os.path.exists(path) for path in paths)
        await agent.restart()
        await until(lambda: agent.status().is_ready)
        later = [worker.stderr_path for worker in agent.status().workers]
        assert set(later).isdisjoint(paths)
        assert all(path is not None and os.path.exists(path) for path in later)
        await agent.stop()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "has_stranger",
    [False, pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))],
)
async def test_a_directory_that_has_gone_is_not_made_again(
    temporary: Path, stderr: Stderr, tmp_path: Path, *, has_stranger: bool
) -> None:
    """A service that tidies up temporary directories may take one that is empty.

    Another user may then make one of the same name, to read what workers write.
    """
    stderr.take()
    async with Agent(held("text >&2; exit 3", tmp_path)) as agent:
        path = await stderr_path(agent)
        path.parents[1].rmdir()
        path.parents[2].rmdir()
        if has_stranger:
            path.parents[1].mkdir(parents=True)
            os.chown(path.parents[2], 12345, 12345)
        go(tmp_path)
        with pytest.raises(JobFailed, match="text"):
            await agent.wait()
    assert not path.exists()
    assert stderr.content == b"text\n"


def test_what_was_captured_goes_also_if_the_console_is_behind(tmp_path: Path) -> None:
    """The files are still being read when the last worker has ended."""
    text = "head -c 300000 /dev/zero | tr '\\0' x >&2"
    command = [*CLI, "run", "--quiet", "--no-python", "sh", "-c", f"{text}; touch {tmp_path}/done"]
    env = environment() | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as program:
        until_sync((tmp_path / "done").exists)
        time.sleep(0.3)  # no event reports that the launcher waits for its console
        assert program.stderr is not None
        assert len(program.stderr.read()) == 300_000
    assert program.returncode == 0
    assert [found.name for found in tmp_path.iterdir()] == ["done"]


async def test_captured_files_are_removed_off_the_loop(
    temporary: Path, stderr: Stderr, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may have had thousands of attempts."""
    stderr.take()
    removed = []
    unlink = os.unlink

    def note(path: Any, **settings: Any) -> None:
        if str(path).startswith(str(temporary)):
            removed.append((Path(path).name, threading.current_thread()))
        unlink(path, **settings)

    monkeypatch.setattr(os, "unlink", note)
    await launch(LaunchSpec(shell("echo text >&2")))
    assert [name for name, _ in removed] == ["stderr.log"]
    assert removed[0][1] is not threading.main_thread()


async def test_a_failure_keeps_the_file(temporary: Path, stderr: Stderr) -> None:
    """The result names the directory; streams without text leave no file."""
    stderr.take()
    with pytest.raises(JobFailed) as caught:
        await launch(
            LaunchSpec(shell('[ "$RANK" = 1 ] && exit; echo text >&2; exit 3'), nproc_per_node=2)
        )
    result = caught.value.result
    assert result.log_dir is not None
    files = [path for path in Path(result.log_dir).rglob("*") if path.is_file()]
    assert [path.read_text() for path in files] == ["text\n"]
    assert result.failures[0].stderr_path == str(files[0])


async def test_a_log_directory_gets_no_captured_file_of_a_success(
    tmp_path: Path, stderr: Stderr
) -> None:
    stderr.take()
    spec = LaunchSpec(shell("echo out; echo err >&2"), logs=LogSpec(log_dir=tmp_path, redirects=1))
    result = await launch(spec)
    files = {path.name for path in Path(result.log_dir or "").rglob("*") if path.is_file()}
    assert files == {"node.json", "stdout.log"}


async def test_without_capture_the_stream_is_inherited(temporary: Path, stderr: Stderr) -> None:
    """And only the status is known."""
    stderr.take()
    spec = LaunchSpec(FAILING, logs=LogSpec(capture=False))
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    assert stderr.content.endswith(b"ValueError: boom\n")
    root = caught.value.failures[0]
    assert (root.stderr_path, root.stderr_tail, root.reason) == (None, (), "")


async def test_the_end_of_a_long_stream(temporary: Path, stderr: Stderr) -> None:
    """Of each worker that failed 64 KiB are in the result, in whole lines."""
    stderr.take()
    script = "import sys; sys.stderr.write('x' * 99 + '\\n'); sys.stderr.write('line\\n' * 99999)"
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(python(f"{script}; sys.exit(3)")))
    (worker,) = caught.value.result.attempts[0].workers
    assert 60_000 < len(worker.stderr_tail) <= 64 * 1024
    assert set(worker.stderr_tail.splitlines()) == {"line"}
    assert len(caught.value.failures[0].stderr_tail) == 20
    assert len(stderr.content) == 100 + 5 * 99999


@pytest.mark.parametrize(
    ("script", "code", "reason", "cause"),
    [
        ("exec nope_nope_nope", 127, "nope_nope_nope: not found", "a command was not found"),
        ("exec /etc/passwd", 126, "Permission denied", "a command cannot be executed"),
        ("exec python3 -m nope_nope", 1, "No module named nope_nope",
         "module nope_nope is missing"),
        ("ulimit -f 1; exec head -c 9999 /dev/zero > $NOTES/f", 153, "the limit of file size",
         "the limit of file size was exceeded"),
    ],
)  # fmt: skip
async def test_known_causes_of_real_workers(
    script: str, code: int, reason: str, cause: str, tmp_path: Path, stderr: Stderr
) -> None:
    stderr.take()
    spec = LaunchSpec(["sh", "-c", script], env={"NOTES": str(tmp_path)})
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    root = caught.value.failures[0]
    assert root.status.shell_code == code
    assert reason in root.reason
    assert root.cause == cause


async def test_a_port_in_use_and_a_full_disk_are_named(tmp_path: Path, stderr: Stderr) -> None:
    stderr.take()
    bind = "import socket as s; a = s.create_server(('', 0)); s.create_server(a.getsockname())"
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(python(bind)))
    assert caught.value.failures[0].cause == "a port is in use"
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec(python("open('/dev/full', 'w', 1).write('x\\n')")))
    assert caught.value.failures[0].cause == "a disk is full"


# ---------------------------------------------------------------------- passed on


@pytest.mark.e2e
def test_a_pipe_gets_the_same_bytes_in_the_same_order() -> None:
    """Also of both streams of a worker, if both are this pipe."""
    code = """
import os
for number in range(2000):
    os.write(1 + number % 2, b"%d\\r%d\\0\\xff" % (number, number) + b"\\n" * (number % 3))
os.write(2, b"no newline")
"""
    texts = [b"%d\r%d\0\xff" % (number, number) + b"\n" * (number % 3) for number in range(2000)]
    for redirection in (subprocess.STDOUT, subprocess.PIPE):
        ended = subprocess.run(
            [*CLI, "run", "--no-python", sys.executable, "-c", code],
            env=environment({"LOGLEVEL": "ERROR"}),
            stdout=subprocess.PIPE,
            stderr=redirection,
            check=True,
            timeout=DEADLINE_S,
        )
        if redirection == subprocess.STDOUT:
            assert ended.stdout == b"".join(texts) + b"no newline"
        else:
            assert ended.stdout == b"".join(texts[::2])
            assert ended.stderr == b"".join(texts[1::2]) + b"no newline"


@pytest.mark.e2e
def test_a_worker_opens_its_stderr_anew() -> None:
    """As in a shell: each line of `echo text > /dev/stderr` arrives."""
    script = "for n in 1 2 3 4 5; do echo $n > /dev/stderr; done"
    ended = run_cli("--no-python", "bash", "-c", script, env={"LOGLEVEL": "ERROR"})
    assert ended.err.split() == ["1", "2", "3", "4", "5"]


@pytest.mark.e2e
def test_a_stalled_reader_delays_no_worker(tmp_path: Path) -> None:
    """What it does not take stays in the file; what it takes later is complete."""
    script = (
        f"import sys; sys.stderr.write('line\\n' * 400000); open({str(tmp_path / 'done')!r}, 'w')"
    )
    process = subprocess.Popen(
        [*CLI, "run", "--no-python", *python(script)],
        env=environment({"LOGLEVEL": "ERROR"}),
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    until_sync((tmp_path / "done").exists, "the end of the worker")
    assert process.stderr.read() == b"line\n" * 400000
    assert process.wait(DEADLINE_S) == 0
    process.stderr.close()


@pytest.mark.e2e
def test_a_reader_that_has_gone_ends_the_workers(tmp_path: Path) -> None:
    """With `2>&1 | head` they get SIGPIPE, as without capture."""
    command = [*CLI, "run", "--no-python", "yes"]
    ended = subprocess.run(
        ["bash", "-c", '"$@" 2>&1 | tail -c +1 | head -n 20', "bash", *command],
        env=environment({"LOGLEVEL": "ERROR", "TMPDIR": str(tmp_path)}),
        stdout=subprocess.PIPE,
        check=False,
        timeout=DEADLINE_S,
    )
    assert ended.stdout == b"y\n" * 20


@pytest.mark.e2e
def test_a_full_disk_fails_no_worker(tmp_path: Path) -> None:
    """Its stderr is passed on all the same."""
    with small_disk(tmp_path / "disk", 64) as disk:
        script = f"{FAILING[-1].partition(';')[0]}, os; os.write(2, b'y' * 99999 + b'\\n')"
        fill(disk)
        ended = run_cli(
            "--no-python", *python(script), env={"TMPDIR": str(disk), "LOGLEVEL": "ERROR"}
        )
        assert ended.code == 0
        assert ended.err == "y" * 99999 + "\n"
        (disk / "filler").unlink()
        ended = run_cli(
            "--no-python", *python(script), env={"TMPDIR": str(disk), "LOGLEVEL": "ERROR"}
        )
        assert (ended.code, ended.err) == (0, "y" * 99999 + "\n")
        assert os.listdir(disk) == []


@pytest.mark.e2e
def test_the_reason_is_what_a_full_disk_did_not_take(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        script = "import sys; sys.stderr.write('early\\n' * 20000); raise ValueError('boom')"
        ended = run_cli("--no-python", *python(script), env={"TMPDIR": str(disk)})
        assert "early\n" * 20000 in ended.err
        assert re.search(rf"attempt 0 failed: .*: exit code 1: {REASON}\n", ended.err)
        assert f"\n  traceback : {REASON}\n" in ended.err


@pytest.mark.e2e
def test_muted_workers_have_a_reason_too() -> None:
    script = "import os, sys; sys.exit('no data') if os.environ['RANK'] == '1' else input()"
    ended = run_cli(
        "--nproc-per-node", 2, "--local-ranks-filter", "0", "--no-python", *python(script)
    )
    assert re.search(r"attempt 0 failed: rank . \(pid \d+\): exit code 1: ", ended.err)


# --------------------------------------------------------------------- a terminal

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def run_on_terminal(*args: object, cwd: Path) -> str:
    """Run a job whose streams are a terminal; return what it shows."""
    command = [sys.executable, "-c", TERMINAL, *CLI, "run", *map(str, args)]
    ended = subprocess.run(
        command,
        env=environment({"TMPDIR": str(cwd)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=cwd,
        check=False,
        timeout=DEADLINE_S,
    )
    return ended.stdout.decode()


@pytest.mark.e2e
@pytest.mark.parametrize("options", [[], ["-m"], ["--preload=json"]])
def test_on_a_terminal_a_script_records_its_exception(options: list[str], tmp_path: Path) -> None:
    """Without `record`; the worker sees the terminal itself."""
    (tmp_path / "script.py").write_text(
        "import sys\nassert sys.stderr.isatty()\nraise ValueError('on\\nterminal')\n"
    )
    shown = run_on_terminal(*options, "script" if "-m" in options else "script.py", cwd=tmp_path)
    assert re.search(
        r"attempt 0 failed: rank 0 \(pid \d+\): exit code 1: ValueError: on\r\n", shown
    )
    assert "in <module>" in shown[shown.index("Root Cause") :]


@pytest.mark.e2e
def test_on_a_terminal_an_exception_that_was_caught_is_not_recorded(tmp_path: Path) -> None:
    """pytest and `code` store those where the interpreter stores the one that ends it."""
    (tmp_path / "script.py").write_text(
        "import code, sys\n"
        "interpreter = code.InteractiveInterpreter()\n"
        "interpreter.runcode(compile('1/0', 'x', 'exec'))\n"
        "assert isinstance(sys.last_value, ZeroDivisionError)\n"
        "sys.exit(3)\n"
    )
    shown = run_on_terminal("script.py", cwd=tmp_path)
    assert re.search(r"attempt 0 failed: rank 0 \(pid \d+\): exit code 3[;\r]", shown)
    assert "error_file: <N/A>" in shown


@pytest.mark.e2e
def test_on_a_terminal_no_capture_means_no_hook(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nos.environ['PYTHONPATH']\nraise ValueError\n")
    code = (
        "import sys; from elastic_aio import LaunchSpec, LogSpec, run\n"
        f"run(LaunchSpec({str(tmp_path / 'script.py')!r}, logs=LogSpec(capture=False)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", TERMINAL, sys.executable, "-c", code],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    assert b"JobFailed" in ended.stdout
    assert re.search(rb"exit code 1; no restarts", ended.stdout)
