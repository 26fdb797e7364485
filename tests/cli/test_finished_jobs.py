"""Runs that have ended: their records, and the commands that read them.

The jobs run in processes of their own, the commands in this one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from elastic_aio.cli import finished_jobs, local_jobs, main
from elastic_aio.cli.finished_jobs import (
    RUN_COLUMNS,
    run_lines,
    run_row,
    silent_launcher,
    with_recorded,
)
from elastic_aio.cli.status_text import job_row
from elastic_aio.control.client import CommandClient, RunningJob
from elastic_aio.events import JobStarted
from elastic_aio.record import (
    EVENTS_FILE,
    RUN_FILE,
    RUNS_KEPT,
    JobRecord,
    RecordFiles,
    recorded_runs,
)
from elastic_aio.status import JobStatus, WorkerStatus
from tests.support.children import until_sync
from tests.support.cli import run_cli, running_cli
from tests.support.control import own_control_dir
from tests.support.disk import small_disk
from tests.support.leaks import leaked_processes
from tests.support.sockets import free_port

FAILS = ["--no-python", "sh", "-c", "echo of $RANK; echo no such data >&2; exit 3"]

Ask = Callable[..., str]


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    """Own sockets and records."""
    with own_control_dir() as path:
        yield path


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command in this process, and returns what it prints.

    With an exit code that is not 0, or with `notes`, that is standard error.
    """

    def ask(*argv: object, code: int = 0, notes: bool = False) -> str:
        capfd.readouterr()
        assert main([str(word) for word in argv]) == code
        printed = capfd.readouterr()
        return printed.err if code or notes else printed.out

    return ask


def only_run() -> JobRecord:
    (run,) = recorded_runs()
    return run


# ------------------------------------------------------------------- as values


def test_running_jobs_and_recorded_ones_are_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a job that runs is the job; an id may be used again."""
    running = RunningJob("/a", 2, JobStatus(run_id="a", agent_pid=2, started_at=5.0))
    silent = RunningJob("/b", 3, None)
    same = JobRecord(run_id="a", agent_pid=2, started_at=5.0)
    other = JobRecord(run_id="a", agent_pid=1, started_at=9.0)
    former = JobRecord(run_id="a", agent_pid=2, started_at=4.0)  # the pid 2 of each container
    monkeypatch.setattr(finished_jobs, "recorded_runs", lambda: [same, other, former])
    found = with_recorded([running, silent])
    assert [job.pid for job in found] == [1, 2, 2, 3]
    assert found[1] is running
    assert len(run_row(silent, 1.0)) == len(RUN_COLUMNS)


@pytest.mark.parametrize(
    ("run", "phase", "code", "time", "why"),
    [
        (JobStatus(phase="running", started_at=1.0), "running", "", "9 s", ""),
        (
            JobRecord(phase="failed", started_at=1.0, ended_at=3.0, exit_code=3, reason="no GPU"),
            "failed",
            "3",
            "2 s",
            "no GPU",
        ),
        (
            JobRecord(phase="running", started_at=1.0, written_at=6.0, is_lost=True),
            "did not end",
            "",
            "over 5 s",
            "its launcher was killed",
        ),
        (JobRecord(phase="running", started_at=1.0, written_at=6.0), "running", "", "5 s", ""),
    ],
)
def test_the_row_of_a_run(run: JobStatus, phase: str, code: str, time: str, why: str) -> None:
    """A launcher that was killed has run on, for an unknown time, after its last event."""
    row = dict(zip(RUN_COLUMNS, run_row(RunningJob("", 7, run), 10.0), strict=True))
    assert (row["PHASE"], row["EXIT"], row["TIME"], row["WHY"]) == (phase, code, time, why)


def test_the_id_in_a_row_names_the_run() -> None:
    """Also the UUID of a run of torchrun, with and without `-a`."""
    run_id = "7a5ebe7e-8064-42c1-af47-304c45d4d3c8"
    run = JobRecord(run_id=run_id, started_at=1.0, ended_at=3.0)
    assert run_row(RunningJob("", 7, run), 10.0)[0] == run_id
    assert job_row(RunningJob("", 7, run), 10.0)[0] == run_id


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (JobRecord(phase="running", since=2.0, written_at=6.0), "running for 4 s"),
        (
            JobRecord(phase="failed", since=3.0, ended_at=3.0, exit_code=3, reason="no GPU"),
            "failed: no GPU",
        ),
        (
            JobRecord(phase="running", since=1.0, written_at=6.0, is_lost=True),
            "did not end: its launcher was killed (phase running)",
        ),
    ],
)
def test_an_end_has_no_duration(run: JobRecord, said: str) -> None:
    assert f"phase     {said}" in run_lines(run)


def test_text_of_a_record_cannot_break_a_line() -> None:
    """It may be another user's."""
    bad = "\x1b[2J\n\x9b2J"
    run = JobRecord(
        run_id=bad, reason=bad, command=(bad,), node=bad, entrypoint=bad, failure=bad, log_dir=bad,
        directory=bad, group_world_size=2, master=bad,
    )  # fmt: skip
    assert all(cell.isprintable() for cell in run_row(RunningJob("", 7, run), 1.0))
    assert all(line.isprintable() for line in run_lines(run))


@pytest.mark.parametrize("command", ["status", "why", "logs", "events"])
def test_a_record_of_another_user_cannot_control_the_terminal(
    command: str, ask: Ask, tmp_path: Path
) -> None:
    bad = "\x1b[2J\n\x9b2J"
    run = JobRecord(run_id=bad, node=bad, log_dir=bad, workers=(WorkerStatus(0, 0, 1, "failed"),))
    started = JobStarted(
        seq=0, time=1.0, run_id=bad, node=bad, entrypoint=bad, nproc_per_node=1, nnodes="1",
        max_restarts=0, agent_pid=1,
    )  # fmt: skip
    files = RecordFiles(str(tmp_path))
    files.write(run, [started], report=bad)
    files.close()
    printed = ask(command, tmp_path, code=command == "logs")
    assert printed
    assert all(line.isprintable() for line in printed.splitlines())


# ------------------------------------------------------------------- a job that failed


@pytest.mark.e2e
def test_a_job_that_failed_on_friday(ask: Ask, tmp_path: Path) -> None:
    """All commands answer as at its end, by its id."""
    events = tmp_path / "events"
    options = ["--nproc-per-node=2", "--max-restarts=1", "--restart-delay=0", "--rdzv-id=friday"]
    where = {"TMPDIR": str(tmp_path)}
    ended = run_cli(*options, f"--events={events}", *FAILS, "--api-key", "abc", env=where)
    assert ended.code == 3

    (line,) = ask("ps", "-a").splitlines()[1:]
    assert {"friday", "failed", "sh"} <= {*line.split()}
    why = ask("why", "friday", "--all")
    report = ended.err[ended.err.index("\n=====") :].strip("\n")
    assert why.strip("\n").endswith(report)
    steps = ask("why", "--from", events, "--all").split("\n\n", 1)[1].strip("\n")
    assert steps in why
    assert "exit code 3" in ask("status", "friday")
    assert ask("events", "friday", "--json") == events.read_text()
    last = ask("events", "friday", "--json", "--after", only_run().seq - 1)
    assert last == events.read_text().splitlines(keepends=True)[-1]
    run = only_run()
    # The other worker may have been stopped before it wrote anything.
    assert "no such data" in ask("logs", "friday")
    root = re.findall(r"rank (\d)", run.failures[-1])
    assert "no such data" in ask("logs", "friday", *root)
    assert (run.phase, run.exit_code, run.attempt, run.restarts) == ("failed", 3, 1, 1)
    assert len(run.failures) == 2
    assert run.command[-2:] == ("--api-key", "***")
    assert json.loads(ask("status", "friday", "--json"))["exit_code"] == 3
    assert json.loads(ask("ps", "-a", "--json"))["status"]["run_id"] == "friday"
    assert ask("ps") == "no job of this user runs on this host\n"


@pytest.mark.e2e
def test_a_log_directory_has_the_record(ask: Ask, tmp_path: Path) -> None:
    """It can be read there, also after a move and without the state directory."""
    logs = tmp_path / "logs"
    run_cli(f"--log-dir={logs}", "--redirects=3", "--rdzv-id=a", *FAILS)
    run = only_run()
    (own,) = logs.iterdir()
    assert run.log_dir == str(own)
    assert {RUN_FILE, EVENTS_FILE, "report.txt"} < {*os.listdir(own)}
    assert EVENTS_FILE not in os.listdir(run.directory)
    by_id = ask("why", "a").replace(run.directory, str(own))
    assert by_id == ask("why", own) == ask("why", logs)
    assert ask("logs", own) == "of 0\nno such data\n"

    shutil.rmtree(run.directory)
    moved = own.rename(tmp_path / "moved")
    assert "no such data" in ask("why", moved)
    assert f"logs      {moved}" in ask("status", moved)
    assert ask("logs", moved) == "of 0\nno such data\n"
    shutil.copytree(moved, own)
    (moved / "attempt_0/0/stdout.log").write_text("of the copy\n")
    assert ask("logs", moved, 0) == "of the copy\nno such data\n"
    assert ask("logs", own) == "of 0\nno such data\n"
    shutil.rmtree(moved / "attempt_0")  # what only the original has is read there
    assert ask("logs", moved) == "of 0\nno such data\n"
    shutil.rmtree(own)
    gone = f"no log file of this job is left in {moved}/attempt_0/0"
    assert ask("logs", moved, code=1).startswith(f"aio-elastic logs: {gone}")


@pytest.mark.e2e
def test_the_last_of_several_runs_with_one_id(ask: Ask) -> None:
    run_cli("--rdzv-id=a", *FAILS)
    run_cli("--rdzv-id=a", "--no-python", "true")
    assert "succeeded" in ask("status", "a")
    note = ask("status", "a", notes=True)
    assert note.startswith("aio-elastic: 2 recorded runs match 'a': the last, of ")
    failed = recorded_runs()[1]
    assert "no such data" in ask("why", failed.agent_pid)


@pytest.mark.e2e
def test_why_no_worker_was_started(ask: Ask) -> None:
    """There is no report; the page about the exit code is named."""
    assert run_cli("--rdzv-id", "unstarted", "nope.py").code == 127
    assert ask("why", "unstarted").splitlines()[-1] == "Help: aio-elastic help runbook an-exit-code"


@pytest.mark.e2e
def test_logs_of_a_job_that_failed_without_a_word(ask: Ask) -> None:
    run_cli("--rdzv-id=a", "--no-python", "false")
    problem = (
        r"no log file of this job is left in .* \(.* only if a job fails, and if there is some"
    )
    assert re.search(problem, ask("logs", "a", code=1))


@pytest.mark.e2e
def test_a_run_with_the_name_of_a_directory(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of that name may have other things in it."""
    run_cli("--rdzv-id=train", *FAILS)
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "exit code 3" in ask("why", "train")
    (tmp_path / "train" / RUN_FILE).write_text("{}x")
    assert "exit code 3" in ask("why", "train")


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["status", "why", "logs", "events"])
def test_a_name_of_no_run(command: str, ask: Ask, tmp_path: Path) -> None:
    """One line, exit code 2; a directory is named with what it lacks."""
    run_cli("--rdzv-id=a", "--no-python", "true")
    problem = "no job of this user runs on this host, and no recorded run has this name (got 'b')"
    assert problem in ask(command, "b", code=2)
    assert "has no record of a run: no such file or directory" in ask(command, tmp_path, code=2)
    for content in (b"\xff", b"[" * 100_000, b'{"run_id": 1}', b'{"schema": 99}'):
        (tmp_path / RUN_FILE).write_bytes(content)
        printed = ask(command, tmp_path, code=2)
        assert printed.startswith(f"aio-elastic {command}: JOB: run.json is ")
        assert printed.count("\n") == 1


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["stop", "wait", "restart", "preempt", "dump", "top"])
def test_a_command_for_running_jobs_names_the_end_of_a_run(command: str, ask: Ask) -> None:
    """Exit code 2: `wait` must not take the last run of a name for the next one."""
    run_cli("--rdzv-id=a", *FAILS)
    said = ask(command, "a", code=2)
    assert said.startswith(f"aio-elastic {command}: JOB: this run has ended (failed, exit code 3,")
    assert said.endswith("; `aio-elastic why a` explains it (got 'a')\n")
    assert "no job of this user runs on this host (got '/')" in ask(command, "/", code=2)
    with running_cli("--rdzv-id=ab", "--no-python", "sleep", "60") as job:
        until_sync(lambda: len(recorded_runs()) == 2, "the record of the second run")
        assert "this run has ended" in ask(command, recorded_runs()[1].agent_pid, code=2)
        assert "no such job; running here: ab" in ask(command, "b", code=2)
        # `ab` begins so, but is another job; it is not meant without a record of `a` either.
        assert "this run has ended" in ask(command, "a", code=2)
        shutil.rmtree(recorded_runs()[1].directory)
        assert "must be a whole id or a pid; running here: ab (" in ask(command, "a", code=2)
        job.send(signal.SIGTERM)
        assert job.wait() == 143


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["status", "why", "events"])
def test_a_run_that_has_ended_comes_before_the_beginning_of_another_id(
    command: str, ask: Ask
) -> None:
    run_cli("--rdzv-id=ab", *FAILS)
    run_cli("--rdzv-id=a", *FAILS)
    with running_cli("--rdzv-id=abc", "--no-python", "sleep", "60") as job:
        until_sync(lambda: len(recorded_runs()) == 3, "the record of the third run")
        for name in "ab", "a":
            assert "exit code 3" in ask(command, name)
        (ended,) = (run for run in recorded_runs() if run.run_id == "a")
        shutil.rmtree(ended.directory)
        assert "exit code 3" not in ask(command, "a")  # a running job comes first among these
        job.send(signal.SIGTERM)
        assert job.wait() == 143


@pytest.mark.e2e
def test_events_that_are_gone_or_damaged(ask: Ask) -> None:
    run_cli("--rdzv-id=a", *FAILS)
    events = Path(only_run().directory) / EVENTS_FILE
    events.write_bytes(b"\xff\n")
    assert "cannot be read: line 1 is no event" in ask("events", "a", code=1)
    assert "cannot be read: line 1 is no event" in ask("why", "a", notes=True)
    events.unlink()
    why = ask("why", "a")  # what the record says yet
    assert re.search(r"^failed +attempt 0 failed: rank .*: exit code 3", why, re.MULTILINE)
    assert "Root Cause" in why
    assert "the events of run 'a' are gone" in ask("events", "a", code=1)
    assert "exit code 3" in ask("status", "a")


# ------------------------------------------------------------------- ends of all kinds


@pytest.mark.e2e
def test_a_killed_launcher_leaves_a_run_that_did_not_end(ask: Ask, tmp_path: Path) -> None:
    with running_cli(f"--log-dir={tmp_path}", "--rdzv-id=a", "--no-python", "sleep", "99") as job:
        until_sync(lambda: bool(recorded_runs()), "the first version")
        assert not only_run().is_lost
        job.send(signal.SIGKILL)
        job.wait()
    until_sync(lambda: not leaked_processes(), "the end of the guardian")
    assert only_run().is_lost
    assert "did not end" in ask("ps", "-a")
    for name in ("a", tmp_path):
        assert "did not end: its launcher was killed" in ask("why", name)


@pytest.mark.e2e
def test_a_suspended_launcher_is_found_by_its_record(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its job has no other name than its pid."""
    with running_cli("--rdzv-id=a", "--no-python", "sleep", "99") as job:
        until_sync(lambda: bool(recorded_runs()), "the first version")
        job.send(signal.SIGSTOP)
        try:
            assert not only_run().is_lost
            note = f"aio-elastic: pid {job.pid} (does not answer): this is its record of "
            assert ask("why", "a", notes=True).startswith(note)
            for command in ("why", "status"):
                assert ask(command, "a").startswith(f"run a: sleep on {socket.gethostname()} ")
            client = partial(CommandClient, timeout=0.3)
            monkeypatch.setattr(local_jobs, "CommandClient", client)
            assert "does not answer: timed out" in ask("preempt", "a", code=1)
            assert f"pid {job.pid} (does not answer) killed" in ask("stop", "a", "--kill")
        finally:
            job.send(signal.SIGCONT)
        assert job.wait() == 137
    assert only_run().is_lost


def test_a_pid_of_another_host_is_no_launcher_here() -> None:
    """Containers that share a home have the same pids."""
    silent = RunningJob("/7", 7, None)
    here, there = socket.gethostname(), "another"
    for node, found in ((here, silent), (there, None)):
        assert silent_launcher([JobRecord(agent_pid=7, node=node)], [silent]) is found
    over = JobRecord(agent_pid=7, node=here, ended_at=1.0)
    assert silent_launcher([over], [silent]) is None


@pytest.mark.e2e
def test_a_job_with_no_record(ask: Ask, tmp_path: Path) -> None:
    run_cli("--no-record", f"--log-dir={tmp_path}", *FAILS)
    assert recorded_runs() == []
    assert [*tmp_path.rglob(RUN_FILE)] == []


@pytest.mark.e2e
def test_a_job_without_a_home() -> None:
    """It writes nothing, and says nothing."""
    without = {"HOME": None, "XDG_STATE_HOME": None}
    ended = run_cli("--quiet", "--no-python", "true", env=without)
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.e2e
def test_a_job_that_removes_its_directory(ask: Ask, tmp_path: Path) -> None:
    """Its end stays; the logs are gone, and `logs` says so."""
    worker = 'echo a; rm -rf "${TORCHELASTIC_ERROR_FILE%/attempt_*}"; exit 3'
    options = [f"--log-dir={tmp_path}", "--redirects=3", "--rdzv-id=a"]
    ended = run_cli(*options, "--no-python", "sh", "-c", worker)
    assert ended.code == 3
    assert ended.err.count("the record of this run is not complete: no such file") == 1
    assert (only_run().phase, only_run().exit_code) == ("failed", 3)
    assert "no log file of this job is left in" in ask("logs", "a", code=1)
    assert "are gone" in ask("why", "a", notes=True)
    assert "exit code 3" in ask("why", "a")


@pytest.mark.e2e
def test_logs_of_a_job_that_runs_and_whose_directory_was_removed(ask: Ask, tmp_path: Path) -> None:
    worker = 'rm -rf "${TORCHELASTIC_ERROR_FILE%/attempt_*}"; touch $NOTES/done; exec sleep 99'
    options = [f"--log-dir={tmp_path / 'logs'}", "--redirects=3", "--rdzv-id=a", "--no-python"]
    with running_cli(*options, "sh", "-c", worker, env={"NOTES": str(tmp_path)}) as job:
        until_sync((tmp_path / "done").exists, "the removal")
        assert "no log file of this job is left in" in ask("logs", "a", code=1)
        job.send(signal.SIGTERM)
        assert job.wait() == 143


@pytest.mark.e2e
def test_logs_of_a_job_that_has_failed_without_a_word(ask: Ask) -> None:
    """The line does not blame a removal, nor a success."""
    run_cli("--rdzv-id=a", "--no-python", "false")
    assert "(captured output is kept only if a job fails, and if there is some" in ask(
        "logs", "a", code=1
    )


@pytest.mark.e2e
def test_a_job_that_fills_the_disk(tmp_path: Path) -> None:
    """Its own exit code stays; where nothing else fits, the end takes the place of the start."""
    with small_disk(tmp_path / "disk", 256) as disk:
        worker = f"until ls {disk}/*/{RUN_FILE}; do sleep 0.05; done; cat /dev/zero > {disk}/filler"
        options = [f"--log-dir={disk}", "--rdzv-id=a", "--no-python", "sh", "-c"]
        ended = run_cli(*options, f"{worker}; exit 3", env={"XDG_STATE_HOME": str(disk)})
        assert ended.code == 3
        assert ended.err.count("the record of this run is not complete: no space left") == 1
        (own,) = disk.glob(f"a_*/{RUN_FILE}")
        assert JobRecord.decode(own.read_bytes()).exit_code == 3


@pytest.mark.e2e
def test_a_file_system_that_blocks(tmp_path: Path) -> None:
    """A named pipe without a reader stands for it: the job ends, and says what is missing."""
    worker = 'mkfifo "${TORCHELASTIC_ERROR_FILE%/attempt_*}/run.json.new"; exit 3'
    ended = run_cli(f"--log-dir={tmp_path}", "--rdzv-id=a", "--no-python", "sh", "-c", worker)
    assert ended.code == 3
    assert ended.err.count("the record of this run is not complete: it takes more than 2 s") == 1


# ------------------------------------------------------------------- several


@pytest.mark.e2e
def test_launchers_that_end_at_once_leave_fifty_runs() -> None:
    for number in range(RUNS_KEPT):
        files = RecordFiles(None)
        files.write(JobRecord(run_id=f"old{number}", started_at=1.0, ended_at=2.0), [])
        files.close()
    with ExitStack() as stack:
        jobs = [stack.enter_context(running_cli("--no-python", "true")) for _ in range(4)]
        assert [job.wait() for job in jobs] == [0] * 4
    # A launcher leaves alone what another has locked: the next removes it.
    assert RUNS_KEPT <= len(recorded_runs()) <= RUNS_KEPT + len(jobs)
    run_cli("--rdzv-id=last", "--no-python", "true")
    runs = recorded_runs()
    assert len(runs) == RUNS_KEPT
    assert runs[0].run_id == "last"
    assert sum(not run.run_id.startswith("old") for run in runs) == 5


@pytest.mark.e2e
def test_nodes_with_a_common_log_directory_have_their_own_records(ask: Ask, tmp_path: Path) -> None:
    at = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--rdzv-backend=c10d", at, "--rdzv-id=a"]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(running_cli(*options, f"--log-dir={tmp_path}", *FAILS))
            for _ in range(2)
        ]
        assert [node.wait() for node in nodes] == [3, 3]
    runs = recorded_runs()
    assert sorted(run.group_rank for run in runs) == [0, 1]
    assert {run.group_world_size for run in runs} == {2}
    for run in runs:
        assert run.log_dir is not None
        own = JobRecord.decode(Path(run.log_dir, RUN_FILE).read_bytes())
        assert (own.agent_pid, own.group_rank) == (run.agent_pid, run.group_rank)
        assert "no such data" in ask("why", run.log_dir)
    assert "2 recorded runs match 'a'" in ask("why", "a", notes=True)
