"""The command line as a process: what it prints, what it returns, what it writes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    AttemptResult,
    ExitStatus,
    Failure,
    JobFailed,
    JobFinished,
    JobStarted,
    JobState,
    LaunchResult,
    LaunchSpec,
    RendezvousFailed,
    RoundForming,
    WorkerError,
    __version__,
    cli,
    event_from_json,
)
from elastic_aio.cli import main
from elastic_aio.events import SCHEMA
from tests.support.children import noting, shell, until_sync
from tests.support.cli import CLI, REPOSITORY, run_cli, run_in_shell, run_program, running_cli

BASH = ["--no-python", "bash", "-c"]


def test_version() -> None:
    """`--version` tells it, by module and in process."""
    ended = run_program([*CLI, "--version"])
    assert (ended.code, ended.out, ended.err) == (0, f"aio-elastic {__version__}\n", "")


@pytest.mark.parametrize("words", [["--version"], ["-V"], ["--help"], ["-h"]])
def test_information_needs_no_job(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Version and usage are printed on stdout with code 0."""
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "aio-elastic" in out


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_lists_every_option(word: str) -> None:
    """`run --help` shows torchrun's names and exits with 0."""
    ended = run_cli(word)
    assert ended.code == 0
    for name in ("--nnodes", "--nproc-per-node", "--max-restarts", "--signals-to-handle", "-t"):
        assert name in ended.out
    assert ended.err == ""


def test_no_command_is_a_usage_error() -> None:
    """Nothing to do is one line and exit code 2."""
    ended = run_program(CLI)
    assert (ended.code, ended.out, len(ended.errors)) == (2, "", 1)


def test_the_entry_point_is_this_program() -> None:
    """The `aio-elastic` script and `python -m elastic_aio` are the same program."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"aio-elastic": "elastic_aio.cli:entry"}


def test_one_line_at_the_start(tmp_path: Path) -> None:
    """A quiet run says what runs where, and where its logs are, in one line."""
    ended = run_cli("--nproc-per-node", 2, "--rdzv-id", "mine", "-r3", "--log-dir", tmp_path,
                    "--max-restarts", 1, *BASH, "true")  # fmt: skip
    (folder,) = tmp_path.iterdir()
    assert ended.code == 0
    (line,) = ended.errors
    assert line.startswith("aio-elastic: run mine: 2 workers of bash on ")
    assert line.endswith(f"1 restart, logs in {folder}")
    assert folder.name.startswith("mine_")


def test_loglevel_tells_more_and_less() -> None:
    """INFO shows every worker, ERROR nothing at all."""
    more = run_cli(*BASH, "true", env={"LOGLEVEL": "INFO"})
    assert "rank 0 started (pid " in more.err
    assert "exit code 0" in more.err
    assert "the job has succeeded" in more.err
    assert run_cli(*BASH, "true", env={"LOGLEVEL": "error"}).err == ""
    assert run_cli(*BASH, "true", env={"LOGLEVEL": "40"}).err == ""


def test_an_unused_option_says_so() -> None:
    """`--monitor-interval` is accepted, and its uselessness told."""
    ended = run_cli("--monitor-interval", 5, *BASH, "true")
    assert ended.code == 0
    assert "--monitor-interval" in ended.errors[0]
    assert "unused" in ended.errors[0]


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
def test_exit_code_is_the_culprits(script: str, code: int) -> None:
    """The launcher exits as its culprit did; victims do not matter."""
    ended = run_cli("--nproc-per-node", 2, *BASH, script)
    assert ended.code == code
    assert "Traceback" not in ended.err


def test_a_script_that_exits_by_an_exception() -> None:
    """An uncaught exception is exit code 1, with the worker's own traceback before the report."""
    script = Path(__file__).parent / "support" / "clock.py"
    ended = run_cli("-m", "this_module_is_not_there", script)
    assert ended.code == 1
    said = ended.err.index("No module named this_module_is_not_there")
    assert said < ended.err.index("this_module_is_not_there FAILED")
    assert "Traceback" not in ended.err


def test_modules_and_scripts(tmp_path: Path) -> None:
    """`-m` runs a module, the default a script, both unbuffered and with their arguments."""
    (tmp_path / "mod.py").write_text("import sys; print(sys.argv[1:]); import os; os._exit(0)")
    module = run_cli("-m", "mod", "--role", "a b", cwd=tmp_path)
    script = run_cli(tmp_path / "mod.py", "-t", "$$")
    assert (module.code, module.out) == (0, "['--role', 'a b']\n")
    assert (script.code, script.out) == (0, "['-t', '$$']\n")


def test_python_exec(tmp_path: Path) -> None:
    """PYTHON_EXEC chooses the workers' interpreter."""
    other = tmp_path / "other python"
    other.write_text('#!/bin/sh\necho "$0 $*"\n')
    other.chmod(0o755)
    ended = run_cli(__file__, "a", env={"PYTHON_EXEC": str(other)})
    assert (ended.code, ended.out) == (0, f"{other} -u {__file__} a\n")


@pytest.mark.parametrize("spelling", ["--nproc-per-node", "--nproc_per_node"])
def test_pet_variables_reach_the_job(spelling: str) -> None:
    """PET variables work on the real thing, and the command line wins."""
    env = {"PET_NPROC_PER_NODE": "3", "PET_NO_PYTHON": "1", "PET_ROLE": "r"}
    script = 'echo "$ROLE_NAME $WORLD_SIZE"'
    assert run_cli("bash", "-c", script, env=env).out == "r 3\n" * 3
    assert run_cli(spelling, 2, "bash", "-c", script, env=env).out == "r 2\n" * 2


def test_nproc_cpu_is_the_affinity_mask() -> None:
    """`cpu` starts one worker for each processor that we may use."""
    first = min(os.sched_getaffinity(0))
    ended = run_program(
        ["taskset", "-c", str(first), *CLI, "run", "--nproc-per-node", "cpu", *BASH, "echo one"]
    )
    assert ended.out == "one\n"


def test_stdin_is_null_for_everybody() -> None:
    """No worker reads what is typed for the launcher."""
    ended = run_cli("--nproc-per-node", 2, *BASH, "cat; echo end", stdin=b"typed\n")
    assert (ended.code, ended.out) == (0, "end\nend\n")


def test_stdin_for_rank_0() -> None:
    """`--stdin rank0` hands it to local rank 0, and to nobody else."""
    ended = run_cli(
        "--nproc-per-node", 2, "--stdin", "rank0", "-r1", "-t1",
        *BASH, "sed s/^/got:/; echo end", stdin=b"typed\n",
    )  # fmt: skip
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [
        "[default0]:end", "[default0]:got:typed", "[default1]:end",
    ]  # fmt: skip


def test_events_file_is_the_whole_story(tmp_path: Path) -> None:
    """`--events` writes every event as a line of JSON, far more than a reader would keep."""
    story = tmp_path / "story.jsonl"
    ended = run_cli(
        "--nproc-per-node", 4, "--max-restarts", 2, "--events", story, *BASH, "exit $((RANK % 2))"
    )
    assert ended.code == 1
    lines = story.read_bytes().splitlines()
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


def test_events_are_added_to_a_file_that_is_there(tmp_path: Path) -> None:
    """A second run into the same file overwrites nothing."""
    story = tmp_path / "story.jsonl"
    for _ in range(2):
        assert run_cli("--events", story, *BASH, "true").code == 0
    runs = {event_from_json(line).run_id for line in story.read_bytes().splitlines()}
    assert len(runs) == 2


def test_events_into_a_full_disk() -> None:
    """A disk that takes no event is told in one line, and the job goes on."""
    ended = run_cli("--events", "/dev/full", *BASH, "true")
    assert ended.code == 0
    assert "--events: not everything could be written (no space left on device)" in ended.err
    assert "Traceback" not in ended.err


def test_events_of_a_slow_reader_are_lossless(tmp_path: Path) -> None:
    """A pipe whose reader waits until the job is over still gets every event."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with running_cli("--nproc-per-node", 8, "--max-restarts", 6, "--events", fifo,
                         "--no-python", "false") as job:  # fmt: skip
            job.wait_err("false FAILED")  # the job is over, and most events are not read
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


def test_a_command_that_cannot_be_found() -> None:
    """A missing program is one line, exit code 127, and no restart."""
    ended = run_cli("--max-restarts", 3, "--no-python", "no_such_program_here")
    assert ended.code == 127
    assert len(ended.errors) == 1
    assert "no_such_program_here" in ended.err
    assert "command not found" in ended.err


def test_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    """A file without the right to execute it is one line and exit code 126."""
    (tmp_path / "data").write_text("no program")
    ended = run_cli("--max-restarts", 3, "--no-python", tmp_path / "data")
    assert ended.code == 126
    assert len(ended.errors) == 1
    assert "permission denied" in ended.err


def test_a_script_that_is_not_there() -> None:
    """A missing script is one line and exit code 127, not a worker's traceback."""
    ended = run_cli("--nproc-per-node", 4, "--max-restarts", 3, "no_such_script.py")
    assert ended.code == 127
    assert len(ended.errors) == 1
    assert "no_such_script.py" in ended.err


def test_shutdown_timeout(tmp_path: Path) -> None:
    """`--shutdown-timeout` bounds the wait for a deaf worker after a failure."""
    script = "if [ $RANK = 0 ]; then trap '' TERM; : > $D/0; exec sleep 99; fi; "
    script += "until [ -e $D/0 ]; do :; done; exit 5"
    ended = run_cli(
        "--nproc-per-node", 2, "--shutdown-timeout", 0.3, *BASH, script, env={"D": str(tmp_path)}
    )
    assert ended.code == 5
    assert "1 process did not stop in time, sending SIGKILL" in ended.err


def test_nothing_is_imported_that_a_launcher_does_not_need() -> None:
    """A launcher of commands starts without torch, anyio, uvloop and aiofiles."""
    code = (
        "import sys; from elastic_aio.cli import main;"
        " assert main(['run', '--no-python', 'true']) == 0;"
        " print(sorted({'torch', 'anyio', 'uvloop', 'aiofiles', 'redis'} & set(sys.modules)))"
    )
    assert run_program([sys.executable, "-c", code]).out == "[]\n"


def test_the_launcher_has_one_thread(tmp_path: Path) -> None:
    """No thread is made per worker, not even on Python 3.11."""
    env = {"NOTES": str(tmp_path)}
    with running_cli("--nproc-per-node", 8, "-t3", "--no-python", *noting(), env=env) as job:
        until_sync(lambda: len(list(tmp_path.glob("[0-9]"))) == 8, "eight workers")
        assert len(os.listdir(f"/proc/{job.pid}/task")) <= 2
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_descriptor_limit_too_small_for_the_job() -> None:
    """The limit is raised for the launcher and is the inherited one inside the workers."""
    ended = run_in_shell("ulimit -Sn 256", "--nproc-per-node", 100, "-t3", *BASH, "ulimit -Sn")
    assert ended.code == 0
    assert sorted(line.split(":")[1] for line in ended.out.splitlines()) == ["256"] * 100


def test_descriptor_limit_that_suffices() -> None:
    """A limit that is large enough is left alone."""
    ended = run_in_shell("ulimit -Sn 1000", "--nproc-per-node", 2, *BASH, "ulimit -Sn; ulimit -Hn")
    hard = run_program(shell("ulimit -Hn")).out.strip()
    assert ended.out.split() == ["1000", hard] * 2


FAR = Failure(
    rank=5,
    local_rank=1,
    pid=77,
    host="far",
    status=ExitStatus(code=3),
    time=1.0,
    order=0,
    error=WorkerError("ValueError: x", "Traceback ...", 1.0, "/far/error.json"),
)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let jobs end in some way, after some events."""

    def end(kind: type[JobFailed], why: str, code: int, *failures: Failure) -> None:
        async def launch(spec: LaunchSpec, *, listeners: Any, **_: object) -> LaunchResult:
            for event in (STARTED, FORMING):
                for listen in listeners:
                    listen(event)
            attempts = (AttemptResult(0, 1.0, 1.0, failures=failures),)
            raise kind(why, LaunchResult("r", JobState.FAILED, why, code, 1.0, 0, attempts))

        monkeypatch.setattr(cli, "launch", launch)

    return end


STARTED = JobStarted(
    run_id="r",
    node="near",
    entrypoint="x",
    nproc_per_node=1,
    nnodes="2",
    max_restarts=0,
    agent_pid=1,
)
FORMING = RoundForming(
    node="near", round=0, joined=1, minimum=2, maximum=2, present=("near",), time_left=9
)
COMMAND = ["run", "--nnodes=2", "--master-addr=a", "x"]
STORY = (
    "aio-elastic: run r: 1 worker of x on near, one of 2 nodes, 0 restarts, no log files\n"
    "aio-elastic: waiting for nodes: 1 of 2 here (near), 9 s left\n"
)


@pytest.mark.parametrize("failures", [(), (FAR,)])
def test_nodes_that_do_not_come_together(
    failures: tuple[Failure, ...], ended: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """One line and the exit code of the result; no report of workers that did not fail."""
    ended(RendezvousFailed, "only 1 of 2 nodes came:\n near", 75, *failures)
    assert main(COMMAND) == 75
    out, err = capfd.readouterr()
    assert out == ""
    assert err == STORY + "aio-elastic: only 1 of 2 nodes came: near\n"


def test_a_failure_on_another_host(
    ended: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The report names the host; its error is passed on without the file, which is there."""
    target = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(target))
    ended(JobFailed, "no restarts allowed", 3, FAR)
    assert main(COMMAND) == 3
    err = capfd.readouterr().err
    assert err.startswith(STORY + "aio-elastic: no restarts allowed\n")
    assert "  host      : far\n" in err
    said = json.loads(target.read_text())["message"]
    assert (said["message"], said["errorCode"]) == ("ValueError: x", 3)
    assert said["extraInfo"] == {"py_callstack": "Traceback ...", "timestamp": "1"}
