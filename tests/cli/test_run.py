"""`aio-elastic run`: its output, exit codes and event files."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import re
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    AttemptResult,
    EndCause,
    Event,
    ExitStatus,
    Failure,
    JobFailed,
    JobFinished,
    JobStarted,
    JobState,
    LaunchResult,
    RendezvousFailed,
    RendezvousStoreAwaited,
    RoundForming,
    WorkerError,
    __version__,
    event_from_json,
)
from elastic_aio.cli import main
from elastic_aio.cli import run as cli_run
from elastic_aio.event_json import SCHEMA
from tests.support.children import noting, until_sync
from tests.support.cli import (
    CLI,
    REPOSITORY,
    Ended,
    run_cli,
    run_in_shell,
    run_program,
    running_cli,
)

BASH = ["--no-python", "bash", "-c"]
RunHere = Callable[..., Ended]


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunHere:
    """Return a function that runs `aio-elastic run` in this process, which saves its start."""

    def run(*args: object, env: Mapping[str, str] | None = None) -> Ended:
        with monkeypatch.context() as changes:
            for name, value in (env or {}).items():
                changes.setenv(name, value)
            code = main(["run", *map(str, args)])
        return Ended(code, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("word", "first"),
    [
        *((word, f"aio-elastic {__version__}\n") for word in ("--version", "-V")),
        *((word, "usage: aio-elastic run ") for word in ("--help", "-h")),
    ],
)
def test_information_needs_no_job(word: str, first: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Version and usage go to stdout; the exit code is 0."""
    assert main([word]) == 0
    out, err = capfd.readouterr()
    assert (out.startswith(first), err) == (True, "")


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_lists_every_option(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    """`run --help` lists torchrun's names; the exit code is 0."""
    with pytest.raises(SystemExit) as caught:
        main(["run", word])
    assert caught.value.code == 0
    out, err = capfd.readouterr()
    for name in ("--nnodes", "--nproc-per-node", "--max-restarts", "--signals-to-handle", "-t"):
        assert name in out
    assert err == ""


def test_no_command_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    """The error is one line and the exit code is 2."""
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)


def test_entry_point() -> None:
    """The `aio-elastic` script and `python -m elastic_aio` are the same program."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {
        "aio-elastic": "elastic_aio.cli:entry",
        "aio-torchrun": "elastic_aio.cli:entry_torchrun",
    }


def test_a_line_at_the_start_and_at_the_end(tmp_path: Path, run_here: RunHere) -> None:
    """And one at the end: what runs where, with the log directory; how it has ended."""
    ended = run_here("--nproc-per-node", 2, "--rdzv-id", "mine", "-r3", "--log-dir", tmp_path,
                    "--max-restarts", 1, *BASH, "true", env={"OMP_NUM_THREADS": "1"})  # fmt: skip
    (directory,) = tmp_path.iterdir()
    assert ended.code == 0
    line, last = ended.errors
    assert re.fullmatch(r"aio-elastic: finished: 2 workers, \d[\d.]* s", last)
    assert line.startswith("aio-elastic: run mine: 2 workers of bash on ")
    assert line.endswith(f"1 restart, logs in {directory}")
    assert directory.name.startswith("mine_")


def test_loglevel(run_here: RunHere) -> None:
    """INFO prints every worker, ERROR prints nothing."""
    info = run_here(*BASH, "true", env={"LOGLEVEL": "INFO"})
    assert "rank 0 started (pid " in info.err
    assert "exit code 0" in info.err
    assert "job succeeded" in info.err
    assert run_here(*BASH, "true", env={"LOGLEVEL": "error"}).err == ""
    assert run_here(*BASH, "true", env={"LOGLEVEL": "40"}).err == ""


def test_an_option_without_effect_gives_a_warning(run_here: RunHere) -> None:
    ended = run_here("--monitor-interval", 5, *BASH, "true")
    assert ended.code == 0
    assert "--monitor-interval" in ended.errors[0]
    assert "no effect" in ended.errors[0]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 17", 17),
        ("exit 255", 255),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
        ("kill -ABRT $$", 134),
        ("kill -TERM $$", 143),
        ("[ $RANK = 1 ] && exit 9; exec sleep 99", 9),
    ],
)
def test_exit_code_is_that_of_the_root_cause(script: str, code: int, run_here: RunHere) -> None:
    """Workers that are stopped because of the root cause do not change the exit code."""
    ended = run_here("--nproc-per-node", 2, *BASH, script)
    assert ended.code == code
    assert "Traceback" not in ended.err


def test_an_uncaught_exception(run_here: RunHere) -> None:
    """The exit code is 1, and the worker's stderr precedes the report."""
    script = Path(__file__).parent / "support" / "clock.py"
    ended = run_here("-m", "this_module_is_not_there", script)
    assert ended.code == 1
    position = ended.err.index("No module named this_module_is_not_there")
    assert position < ended.err.index("this_module_is_not_there FAILED")
    assert "Traceback" not in ended.err


def test_modules_and_scripts(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-m` runs a module, the default a script, both unbuffered and with their arguments."""
    (tmp_path / "mod.py").write_text("import sys; print(sys.argv[1:]); import os; os._exit(0)")
    monkeypatch.chdir(tmp_path)
    module = run_here("-m", "mod", "--role", "a b")
    script = run_here(tmp_path / "mod.py", "-t", "$$")
    assert (module.code, module.out) == (0, "['--role', 'a b']\n")
    assert (script.code, script.out) == (0, "['-t', '$$']\n")


def test_python_exec(tmp_path: Path, run_here: RunHere) -> None:
    """PYTHON_EXEC chooses the workers' interpreter."""
    other = tmp_path / "other python"
    other.write_text('#!/bin/sh\necho "$0 $*"\n')
    other.chmod(0o755)
    ended = run_here(__file__, "a", env={"PYTHON_EXEC": str(other)})
    assert (ended.code, ended.out) == (0, f"{other} -u {__file__} a\n")


def test_pet_variables(run_here: RunHere) -> None:
    """They reach the job, and the command line overrides them."""
    env = {"PET_NPROC_PER_NODE": "3", "PET_NO_PYTHON": "1", "PET_ROLE": "r"}
    script = 'echo "$ROLE_NAME $WORLD_SIZE"'
    assert run_here("bash", "-c", script, env=env).out == "r 3\n" * 3
    assert run_here("--nproc_per_node", 2, "bash", "-c", script, env=env).out == "r 2\n" * 2


@pytest.mark.e2e
def test_nproc_cpu_is_the_affinity_mask() -> None:
    """`cpu` starts one worker per usable CPU."""
    first = min(os.sched_getaffinity(0))
    ended = run_program(
        ["taskset", "-c", str(first), *CLI, "run", "--nproc-per-node", "cpu", *BASH, "echo one"]
    )
    assert ended.out == "one\n"


@pytest.mark.e2e
def test_stdin_is_null() -> None:
    """No worker inherits the launcher's stdin."""
    ended = run_cli("--nproc-per-node", 2, *BASH, "cat; echo end", stdin=b"typed\n")
    assert (ended.code, ended.out) == (0, "end\nend\n")


@pytest.mark.e2e
def test_stdin_for_rank_0() -> None:
    """With `--stdin rank0` only local rank 0 inherits it."""
    ended = run_cli(
        "--nproc-per-node", 2, "--stdin", "rank0", "-r1", "-t1",
        *BASH, "sed s/^/got:/; echo end", stdin=b"typed\n",
    )  # fmt: skip
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [
        "[default0]:end", "[default0]:got:typed", "[default1]:end",
    ]  # fmt: skip


def test_events_file(tmp_path: Path, run_here: RunHere) -> None:
    """`--events` writes every event as a line of JSON."""
    path = tmp_path / "events.jsonl"
    ended = run_here(
        "--nproc-per-node", 4, "--max-restarts", 2, "--events", path, *BASH, "exit $((RANK % 2))"
    )
    assert ended.code == 1
    lines = path.read_bytes().splitlines()
    events = [event_from_json(line) for line in lines]
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[0], JobStarted)
    assert isinstance(events[-1], JobFinished)
    for line in lines:
        document = json.loads(line)
        assert document["schema"] == SCHEMA
        assert {"event", "seq", "time", "run_id", "attempt", "node"} <= document.keys()
    names = [json.loads(line)["event"] for line in lines]
    # A worker that fails at once ends its attempt before the last ones are started.
    assert 6 <= names.count("WorkerStarted") == names.count("WorkerExited") <= 12
    assert names.count("AttemptFailed") == 3
    assert names.count("Restarting") == 2


def test_events_are_appended(tmp_path: Path, run_here: RunHere) -> None:
    """A second run into the same file overwrites nothing."""
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        assert run_here("--events", path, *BASH, "true").code == 0
    runs = {event_from_json(line).run_id for line in path.read_bytes().splitlines()}
    assert len(runs) == 2


def test_events_follow_the_name_of_their_file(tmp_path: Path, run_here: RunHere) -> None:
    """What logrotate does by `create` and by `nocreate`: each event is in one of the files."""
    path = tmp_path / "events.jsonl"
    script = (
        f"cd {tmp_path}"
        + """
        case $TORCHELASTIC_RESTART_COUNT in
        0) mv events.jsonl first ;;
        1) mv events.jsonl second; : >> events.jsonl ;;
        2) mv events.jsonl third; mkdir events.jsonl ;;
        3) rmdir events.jsonl ;;
        esac
        exit 1
    """
    )
    ended = run_here("--max-restarts", 4, "--restart-delay", 0, "--events", path, *BASH, script)
    assert (ended.code, "--events" in ended.err) == (1, False)
    names = ("first", "second", "third", path.name)
    parts = [(tmp_path / name).read_bytes().splitlines() for name in names]
    assert all(parts)
    numbers = [event_from_json(line).seq for part in parts for line in part]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("other", ["ln -s {}/precious events.jsonl", "mkfifo events.jsonl"])
def test_events_go_into_no_file_of_others(tmp_path: Path, run_here: RunHere, other: str) -> None:
    """As in /tmp, where another user may take a name that has become free."""
    (tmp_path / "precious").write_text("mine")
    path = tmp_path / "events.jsonl"
    # In one step: the launcher must not make the file in between.
    script = (
        f"cd {tmp_path} && mkdir new && cd new && {other.format(tmp_path)} && cd .. &&"
        " ln events.jsonl moved && mv new/events.jsonl ."
    )
    assert run_here("--events", path, *BASH, script).code == 0
    assert (tmp_path / "precious").read_text() == "mine"
    events = [event_from_json(line) for line in (tmp_path / "moved").read_bytes().splitlines()]
    assert isinstance(events[-1], JobFinished)


def test_events_stay_in_a_file_that_standard_error_has_too(tmp_path: Path) -> None:
    """It is not taken away from the console."""
    path, moved = tmp_path / "both", tmp_path / "moved"
    script = f"mv {path} {moved}; exit 0"
    with path.open("a") as both, running_cli("--events", path, *BASH, script, stderr=both) as job:
        assert job.wait() == 0
    assert not path.exists()
    assert b"JobFinished" in moved.read_bytes()
    assert b"aio-elastic: " in moved.read_bytes()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_events_into_the_file_of_a_stream(tmp_path: Path, stream: str) -> None:
    """As after `> FILE` in a shell: workers and events share its offset."""
    path = tmp_path / "both"
    script = f"for i in 1 2 3; do echo worker$i >&{1 if stream == 'stdout' else 2}; done"
    options = ["--events", f"/dev/{stream}", "--nproc-per-node", 3]
    with (
        path.open("wb") as both,
        running_cli(*options, *BASH, script, **{stream: both}) as job,
    ):
        assert job.wait() == 0
    lines = [line for line in path.read_text().splitlines() if "aio-elastic: " not in line]
    assert sorted(line for line in lines if "worker" in line[:6]) == sorted(
        [f"worker{number}" for number in (1, 2, 3)] * 3
    )
    events = [event_from_json(line.encode()) for line in lines if "worker" not in line[:6]]
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[-1], JobFinished)


def test_events_into_the_socket_of_a_service() -> None:
    """What /dev/stdout is in a service of systemd cannot be opened anew."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, running_cli("--events", "/dev/stdout", *BASH, "true", stdout=theirs) as job:
            assert job.wait() == 0
        with ours.makefile("rb") as reader:
            events = [event_from_json(line) for line in reader]
    assert isinstance(events[-1], JobFinished)


def test_events_into_a_full_disk(run_here: RunHere) -> None:
    """A full disk is one line, and the job goes on."""
    ended = run_here("--events", "/dev/full", *BASH, "true")
    assert ended.code == 0
    assert "--events: some events are not written (no space left on device)" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.e2e
def test_events_into_a_slow_pipe(tmp_path: Path) -> None:
    """A pipe whose reader starts after the end of the job gets every event."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with running_cli("--nproc-per-node", 8, "--max-restarts", 6, "--restart-delay", 0,
                         "--events", fifo, "--no-python", "false") as job:  # fmt: skip
            job.wait_err("false FAILED")  # the job has ended, and most events are unread
            os.set_blocking(reader, True)
            content = bytearray()
            while chunk := os.read(reader, 65536):
                content += chunk
            assert job.wait() == 1
    finally:
        os.close(reader)
    events = [event_from_json(line) for line in bytes(content).splitlines()]
    assert len(content) > 3 * 4096
    assert [event.seq for event in events] == list(range(len(events)))
    assert isinstance(events[-1], JobFinished)


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--no-python", "no_such_program_here"], 127, "command not found"),
        (["--no-python", REPOSITORY / "pyproject.toml"], 126, "permission denied"),
        (["no_such_script.py"], 127, "no_such_script.py"),
    ],
)
def test_what_cannot_be_run(
    words: list[object], code: int, problem: str, run_here: RunHere
) -> None:
    """It is one line that names it, and no restart; of a script no worker's traceback."""
    ended = run_here("--nproc-per-node", 4, "--max-restarts", 3, *words)
    assert (ended.code, len(ended.errors)) == (code, 1)
    assert str(words[-1]) in ended.err
    assert problem in ended.err


def test_shutdown_timeout_after_a_failure(tmp_path: Path, run_here: RunHere) -> None:
    """A worker that ignores SIGTERM is killed after `--shutdown-timeout`."""
    script = "if [ $RANK = 0 ]; then trap '' TERM; : > $D/0; exec sleep 99; fi; "
    script += "until [ -e $D/0 ]; do :; done; exit 5"
    ended = run_here(
        "--nproc-per-node", 2, "--shutdown-timeout", 0.3, *BASH, script, env={"D": str(tmp_path)}
    )
    assert ended.code == 5
    assert "1 process did not stop in time, sending SIGKILL" in ended.err


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ([], "asyncio.unix_events"),
        (["--loop=auto"], "asyncio.unix_events"),
        (["--loop=asyncio"], "asyncio.unix_events"),
        (["--loop=uvloop"], "uvloop"),
    ],
)
def test_loop_of_a_run(options: list[str], loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto`, the default, is asyncio's loop."""
    loops = []

    async def supervise(*_: object, **__: object) -> LaunchResult:
        loops.append(type(asyncio.get_running_loop()).__module__)
        return LaunchResult("r", JobState.SUCCEEDED, "", 0, 1.0)

    monkeypatch.setattr(cli_run, "supervise", supervise)
    assert main(["run", *options, "train.py"]) == 0
    assert loops == [loop]


def test_an_unknown_loop(run_here: RunHere) -> None:
    """It is one line and exit code 2."""
    problem = "--loop: must be 'auto', 'asyncio' or 'uvloop' (got 'foo')"
    assert run_here("--loop", "foo", "x") == Ended(2, "", f"aio-elastic run: {problem}\n")


def test_uvloop_is_not_installed(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--loop uvloop` is one line and exit code 2; other loops do not need it."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    ended = run_here("--loop", "uvloop", "x")
    assert (ended.code, len(ended.errors)) == (2, 1)
    assert ended.err.startswith("aio-elastic run: --loop: cannot be imported: ")
    assert ended.err.endswith("(got 'uvloop')\n")
    assert run_here("--loop", "auto", "--no-python", "true").code == 0


@pytest.mark.e2e
def test_uvloop_with_few_descriptors() -> None:
    """libuv would abort the process; it is one line and exit code 2."""
    ended = run_in_shell("ulimit -n 8", "--loop", "uvloop", "--no-python", "true")
    problem = "needs a limit of at least 32 descriptors, not 8 (got 'uvloop')"
    assert (ended.code, ended.err) == (2, f"aio-elastic run: --loop: {problem}\n")


def test_a_job_on_uvloop(tmp_path: Path, run_here: RunHere) -> None:
    """A whole run works on uvloop: output, restarts, and the exit code."""
    ended = run_here("--loop", "uvloop", "--max-restarts", 1, "-t1", "--log-dir", tmp_path,
                    *BASH, "echo $TORCHELASTIC_RESTART_COUNT; exit 7")  # fmt: skip
    assert ended.code == 7
    assert ended.out == "[default0]:0\n[default0]:1\n"
    assert "restarting as attempt 1" in ended.err


def test_nothing_is_imported_that_a_launcher_does_not_need() -> None:
    """A launcher of commands starts without torch, anyio, uvloop and aiofiles."""
    code = (
        "import sys; from elastic_aio.cli import main;"
        " assert main(['run', '--no-python', 'true']) == 0;"
        " print(sorted({'torch', 'anyio', 'uvloop', 'aiofiles', 'redis'} & set(sys.modules)))"
    )
    assert run_program([sys.executable, "-c", code]).out == "[]\n"


def test_ctrl_c_while_the_launcher_is_being_imported() -> None:
    """It ends as by any other signal: no traceback, 128 + SIGINT."""
    code = (
        "import os, sys; from elastic_aio.cli import entry;"
        " sys.addaudithook(lambda name, args: name == 'import'"
        " and args[0] == 'elastic_aio.launcher' and os.kill(os.getpid(), 2));"
        " sys.argv[1:] = ['run', '--no-python', 'echo', 'started']; sys.exit(entry())"
    )
    ended = run_program([sys.executable, "-c", code])
    assert (ended.code, ended.out, ended.err) == (130, "", "")


@pytest.mark.e2e
def test_the_launcher_has_one_thread(tmp_path: Path) -> None:
    """There is no thread per worker, not even on Python 3.11."""
    env = {"NOTES": str(tmp_path)}
    with running_cli("--nproc-per-node", 8, "-t3", "--no-python", *noting(), env=env) as job:
        until_sync(lambda: len(list(tmp_path.glob("[0-9]"))) == 8, "eight workers")
        assert len(os.listdir(f"/proc/{job.pid}/task")) <= 2
        job.send(signal.SIGTERM)
        assert job.wait() == 143


FAR = Failure(
    rank=5, local_rank=1, pid=77, host="far", status=ExitStatus(code=3), time=1.0, order=0,
    error=WorkerError("ValueError: x", "Traceback ...", 1.0, "/far/error.json"),
)  # fmt: skip
STARTED = JobStarted(
    run_id="r", node="near", entrypoint="x", nproc_per_node=1, nnodes="2", max_restarts=0,
    agent_pid=1,
)  # fmt: skip
FORMING = RoundForming(
    node="near", round=0, joined=1, minimum=2, maximum=2, present=("near",), time_left=9
)
COMMAND = ["--nnodes=2", "--master-addr=a", "x"]
PROGRESS = (
    "aio-elastic: run r: 1 worker of x on near, one of 2 nodes, 0 restarts,"
    " logs kept only if it fails\n",
    "aio-elastic: waiting for nodes: 1 node present (near), minimum 2, maximum 2, fails in 9 s\n",
)

Supervise = Callable[..., None]


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Return a function that makes every job end in a way, after some events."""

    def end_with(end: LaunchResult | JobFailed, *events: Event) -> None:
        async def supervise(*_: object, listeners: Any, **__: object) -> LaunchResult:
            for event in events:
                for listen in listeners:
                    listen(event)
            if isinstance(end, JobFailed):
                raise end
            return end

        monkeypatch.setattr(cli_run, "supervise", supervise)

    return end_with


def failed(kind: type[JobFailed], why: str, code: int, *failures: Failure) -> JobFailed:
    attempts = (AttemptResult(0, 1.0, 1.0, failures=failures),)
    return kind(why, LaunchResult("r", JobState.FAILED, why, code, 1.0, 0, attempts))


def test_a_node_that_comes_after_a_success(supervise: Supervise, run_here: RunHere) -> None:
    """One line says so."""
    why = "the run has ended: all workers have finished"
    end = LaunchResult("r", JobState.SUCCEEDED, why, 0, 1.0)
    supervise(dataclasses.replace(end, cause=EndCause.RUN_HAD_ENDED), STARTED)
    ended = run_here(*COMMAND)
    assert (ended.code, ended.out, len(ended.errors)) == (0, "", 1)
    assert ended.err.startswith(f"aio-elastic: {why}; no worker was started here (a new job needs ")
    assert "another --rdzv-id than 'r', or --rdzv-conf reuse=true" in ended.err


def test_the_start_is_the_first_line(supervise: Supervise, run_here: RunHere) -> None:
    """Whichever event follows it."""
    awaited = RendezvousStoreAwaited(why="a:1: connection refused", time_left=55.0)
    supervise(LaunchResult("r", JobState.SUCCEEDED, "", 0, 1.0), STARTED, awaited, FORMING)
    waiting = "aio-elastic: waiting for the rendezvous store, 55 s left: a:1: connection refused\n"
    last = "aio-elastic: finished: 1 worker, 1 s\n"
    assert run_here(*COMMAND) == Ended(0, "", PROGRESS[0] + waiting + PROGRESS[1] + last)


@pytest.mark.parametrize("failures", [(), (FAR,)])
def test_a_failed_rendezvous(
    failures: tuple[Failure, ...], supervise: Supervise, run_here: RunHere
) -> None:
    """One line and the exit code of the result; no report of workers."""
    end = failed(RendezvousFailed, "only 1 of 2 nodes came:\n near", 75, *failures)
    supervise(end, STARTED, FORMING)
    line = "aio-elastic: only 1 of 2 nodes came: near\n"
    assert run_here(*COMMAND) == Ended(75, "", "".join(PROGRESS) + line)


def test_a_failure_on_another_host(supervise: Supervise, tmp_path: Path, run_here: RunHere) -> None:
    """The report names the host; the error file is made from the result, not copied."""
    target = tmp_path / "error.json"
    supervise(failed(JobFailed, "no restarts allowed", 3, FAR), STARTED, FORMING)
    ended = run_here(*COMMAND, env={"TORCHELASTIC_ERROR_FILE": str(target)})
    assert ended.code == 3
    assert ended.err.startswith("".join(PROGRESS) + "aio-elastic: no restarts allowed\n")
    assert "  host      : far\n" in ended.err
    message = json.loads(target.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: x", 3)
    assert message["extraInfo"] == {"py_callstack": "Traceback ...", "timestamp": "1"}
