"""`ps`, `status`, `stop`, `restart`, `signal`, `wait`, `logs`, `events`, `top` and `why`.

The jobs run in processes of their own; the commands run in this one, unless a test is about
their process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_aio.cli import events, local_jobs, logs, main, top, why
from elastic_aio.cli.local_jobs import JobError, choose_job
from elastic_aio.cli.status_text import JOB_COLUMNS, head_lines, job_row
from elastic_aio.control.client import (
    CommandClient,
    RunningJob,
    find_jobs,
    matches,
    run_blocking,
)
from elastic_aio.control.protocol import AcceptedReply, AwaitEnd, EndReply, ErrorReply
from elastic_aio.control.sockets import CONTROL_DIR
from elastic_aio.events import AttemptFailed
from elastic_aio.outcome import ExitStatus, Failure, JobState
from elastic_aio.process import proc
from elastic_aio.spec.checks import UsageError
from elastic_aio.spec.restart import UNLIMITED
from elastic_aio.status import JobStatus, StatusTracker
from tests.support.children import until_sync
from tests.support.cli import CLI, Running, run_program, running, running_cli
from tests.support.control import open_channel, own_control_dir
from tests.support.leaks import leaked_processes

WORKER = """
import os, signal, sys, time
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGUSR1, lambda *_: print("got USR1", flush=True))
if restarts == "0" and os.environ.get("FAILS") == rank:
    raise ValueError("no such data")
print(f"rank {rank} begins", flush=True)
print("to stderr", file=sys.stderr, flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(WORKER)
    return path


Ask = Callable[..., str]
StartJob = Callable[..., AbstractContextManager[Running]]


@pytest.fixture
def ask(capfd: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command in this process, and returns what it prints."""

    def ask(*argv: str, code: int = 0) -> str:
        capfd.readouterr()
        assert main(argv) == code
        printed = capfd.readouterr()
        assert (printed.err == "") == (code == 0)
        return printed.err if code else printed.out

    return ask


def phase(ask: Ask, name: str = "run-1") -> str:
    """Return the phase of a job, empty if there is none."""
    statuses = [json.loads(line)["status"] for line in ask("ps", "--json").splitlines()]
    return next((one["phase"] for one in statuses if one and one["run_id"] == name), "")


@pytest.fixture
def job(script: Path, ask: Ask) -> StartJob:
    """Return what runs a job of two workers of the script; it runs when the block begins."""

    @contextmanager
    def job(
        *options: str, name: str = "run-1", script: Path = script, **env: str
    ) -> Iterator[Running]:
        words = ["--nproc-per-node=2", f"--rdzv-id={name}", "--redirects=3", *options, str(script)]
        with running_cli(f"--log-dir={script.parent}", *words, env=env) as program:
            until_sync(lambda: phase(ask, name) == "running" and _have_begun(script), "the job")
            yield program
            if program.process.poll() is None:
                program.send(signal.SIGTERM)
            program.wait()
            until_sync(lambda: not leaked_processes(), "the end of the guardian")

    return job


def _have_begun(script: Path) -> bool:
    logs = script.parent.rglob("stdout.log")
    return sum("begins" in path.read_text() for path in logs) >= 2


# ------------------------------------------------------------- which job is meant


def running_job(pid: int, run_id: str = "", entrypoint: str = "train.py") -> RunningJob:
    status = JobStatus(run_id=run_id, entrypoint=entrypoint) if run_id else None
    return RunningJob(f"/{pid}", pid, status)


JOBS = [
    running_job(7, "abc1"),
    running_job(8, "abd2", "/data/eval.py"),
    running_job(9, "7"),
    running_job(10),
]
NODES = [running_job(7, "abc1"), running_job(8, "abc1")]


@pytest.mark.parametrize(
    ("name", "pids"),
    [
        (None, [7, 8, 9, 10]),
        ("abc1", [7]),
        ("abc", []),
        ("7", [7, 9]),
        ("8", [8]),
        ("10", [10]),
        ("train.py", [7, 9]),
        ("eval.py", [8]),
        ("/data/eval.py", [8]),
        ("x", []),
        ("", []),
    ],
)
def test_the_names_of_jobs(name: str | None, pids: list[int]) -> None:
    assert [job.pid for job in matches(JOBS, name)] == pids
    assert not pids or matches(JOBS, name, begins=True) == matches(JOBS, name)


@pytest.mark.parametrize(("name", "pids"), [("abc", [7]), ("ab", [7, 8]), ("", []), ("b", [])])
def test_the_beginnings_of_jobs(name: str, pids: list[int]) -> None:
    assert [job.pid for job in matches(JOBS, name, begins=True)] == pids


def test_a_rank_is_no_beginning_of_an_id() -> None:
    jobs = [running_job(7, "0123abcd")]
    assert matches(jobs, "0123", begins=True) == jobs
    assert not matches(jobs, "012", begins=True)
    assert not matches(jobs, "0", begins=True)


@pytest.mark.parametrize(
    ("jobs", "name", "problem"),
    [
        ([], None, "JOB: no job of this user runs on this host"),
        ([], "a", "JOB: no job of this user runs on this host (got 'a')"),
        (JOBS[:2], None, "JOB: must be given, 2 jobs run here: abc1 (pid 7); abd2 (pid 8)"),
        (JOBS[:2], "ab", "JOB: matches several: abc1 (pid 7); abd2 (pid 8) (got 'ab')"),
        (NODES, None, "JOB: 2 launchers match: give the pid of one: abc1 (pid 7); abc1 (pid 8)"),
        (
            [*JOBS[1:], *NODES],
            "abc1",
            "JOB: 2 launchers match: give the pid of one: abc1 (pid 7); abc1 (pid 8)",
        ),
        (NODES[:1] * 2, "abc1", "JOB: matches several: abc1 (pid 7); abc1 (pid 7) (got 'abc1')"),
        (JOBS[3:], "x", "JOB: no such job; running here: pid 10 (does not answer) (got 'x')"),
        (
            [running_job(pid, f"r{pid}") for pid in range(100, 112)],
            "r",
            "JOB: matches several: "
            + "; ".join(f"r{pid} (pid {pid})" for pid in range(102, 112))
            + "; and 2 more (got 'r')",
        ),
    ],
)
def test_a_name_that_is_not_of_one_job(
    jobs: list[RunningJob], name: str | None, problem: str
) -> None:
    with pytest.raises(UsageError) as caught:
        choose_job(name, jobs, begins=True)
    assert str(caught.value) == problem


def test_the_beginning_of_an_id_is_no_name_for_a_request() -> None:
    """Where the job `a` has just ended, `stop a` must not stop `a2`."""
    with pytest.raises(UsageError) as caught:
        choose_job("abc", JOBS[:1])
    whole = "must be a whole id or a pid; running here: abc1 (pid 7)"
    assert str(caught.value) == f"JOB: {whole} (got 'abc')"


@pytest.mark.parametrize(
    ("nodes", "state", "ended"),
    [
        (1, JobState.STOPPED, "job abc1 (pid 7) stopped"),
        (2, JobState.STOPPED, "node near has left job abc1 (pid 7)"),
        (2, JobState.FAILED, "job abc1 (pid 7) failed"),
    ],
)
def test_a_stop_of_one_node_is_no_end_of_the_job(
    nodes: int, state: JobState, ended: str, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    """The other nodes go on."""
    status = JobStatus(run_id="abc1", node="near", group_world_size=nodes)
    monkeypatch.setattr(local_jobs, "find_jobs", lambda: [RunningJob("/7", 7, status)])

    async def stop(*_: object, **__: object) -> EndReply:
        return EndReply(state, "enough", 143)

    monkeypatch.setattr(CommandClient, "stop", stop)
    assert ask("stop", "abc1") == f"{ended}, exit code 143: enough\n"


def test_the_list_tells_the_nodes_of_a_job_apart() -> None:
    rows = [
        job_row(RunningJob("/7", 7, JobStatus(run_id="a", group_rank=rank, round=number)), 0)
        for rank, number in ((0, -1), (0, 0), (1, 0))
    ]
    column = JOB_COLUMNS.index("GROUP RANK")
    assert [row[column] for row in rows] == ["-", "0", "1"]
    assert len(job_row(RunningJob("/7", 7, None), 0)) == len(JOB_COLUMNS)


def test_restarts_that_were_returned_are_not_used() -> None:
    status = JobStatus(restarts=5, returned=4, max_restarts=3)
    assert "attempt   0 (1 of 3 restarts used)" in head_lines(status, 0)
    assert job_row(RunningJob("/7", 7, status), 0)[JOB_COLUMNS.index("RESTARTS LEFT")] == "2"
    endless = JobStatus(restarts=5, max_restarts=UNLIMITED)
    assert "attempt   0 (5 of unlimited restarts used)" in head_lines(endless, 0)
    assert (
        job_row(RunningJob("/7", 7, endless), 0)[JOB_COLUMNS.index("RESTARTS LEFT")] == "unlimited"
    )


def test_a_child_that_waits_for_another_has_a_phase_and_no_times() -> None:
    status = JobStatus(run_id="x", child="web", phase="waiting", reason="held")
    assert head_lines(status, 1e9) == ["run x: web", "phase     waiting: held"]


def test_the_failure_of_a_job_that_has_succeeded_is_the_last() -> None:
    tracker = StatusTracker()
    root = Failure(1, 1, 5, "box", ExitStatus(code=1), 0.0, 0)
    tracker(AttemptFailed(attempt=2, root=root, failures=(root,)))
    status = tracker.status(0)
    assert "failure   rank 1 (pid 5): exit code 1" in head_lines(status, 0)
    ended = replace(status, phase="succeeded", attempt=3)
    line = "failure   the last, of attempt 2: rank 1 (pid 5): exit code 1"
    assert line in head_lines(ended, 0)


@pytest.mark.parametrize("argv", [["stop"], ["restart"], ["signal", "USR1"]])
def test_a_script_names_the_job(argv: list[str], monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    """At a terminal the only job is meant."""
    asked = []

    def client_of(job: RunningJob) -> CommandClient:
        asked.append(job.pid)
        raise JobError("it was asked")

    monkeypatch.setattr(local_jobs, "find_jobs", lambda: JOBS[:1])
    monkeypatch.setattr(local_jobs, "CommandClient", client_of)
    problem = "JOB: must be given where standard input or output is no terminal; abc1 (pid 7)"
    assert problem in ask(*argv, code=2)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert "it was asked" in ask(*argv, code=1)
    assert asked == [7]


OF_RUNS = ["status", "logs", "why", "events"]
COMMANDS = [*OF_RUNS, "top", "dump", "stop", "restart", "wait", "preempt"]


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_job(command: str, ask: Ask) -> None:
    """One line, exit code 2; what can read the record of a run says where to find its name."""
    runs = "; `aio-elastic ps -a` lists the runs that have ended"
    line = f"JOB: no job of this user runs on this host{runs if command in OF_RUNS else ''}"
    assert ask(command, code=2) == f"aio-elastic {command}: {line}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_says_whether_it_takes_a_run(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert ("a run that has ended" in words) == (command in OF_RUNS)


@pytest.mark.parametrize("command", [*COMMANDS, "signal"])
def test_the_help_of_a_command_says_whether_a_script_must_name_the_job(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    changes = command in ("stop", "restart", "preempt", "signal")
    assert ("a script must name the job" in words) == changes


def test_ps_without_a_job(ask: Ask) -> None:
    assert ask("ps") == "no job of this user runs on this host\n"
    assert ask("ps", "--json") == ""


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["signal"], "SIGNAL: must be given, after JOB if that is given too"),
        (
            ["signal", "NOSUCH"],
            "SIGNAL: must be a signal number or a name such as 'SIGTERM' (got 'NOSUCH')",
        ),
        (["signal", "USR1", "--rank", "x"], "--rank: must be a whole number (got 'x')"),
        (["stop", "--signal", "99"], "--signal: must be a signal number or a name"),
        (["wait", "--timeout", "0"], "--timeout: must be a number of seconds above 0 (got '0')"),
        (["top", "--interval", "x"], "--interval: must be a number of seconds above 0 (got 'x')"),
        (["logs", "-n", "x"], "--lines: must be a whole number from 0"),
        (["events", "a", "--rdzv-id", "b"], "JOB: has no effect with --rdzv-endpoint"),
        (["why", "--from", "/nowhere"], "--from: cannot be read: no such file or directory"),
        (["why", "a", "--from", "/nowhere"], "JOB: has no effect with --from"),
        (["stop", "a", ""], "CHILD: must not be empty: leave it out for the whole job (got '')"),
        (["restart", "a", ""], "CHILD: must not be empty"),
        (["reload", "a", ""], "CHILD: must not be empty"),
        (["scale", "a", "", "3"], "CHILD: must not be empty"),
        (["signal", "a", "USR1", "--child", ""], "--child: must not be empty"),
    ],
)
def test_bad_arguments(argv: list[str], problem: str, ask: Ask) -> None:
    printed = ask(*argv, code=2)
    assert printed.startswith(f"aio-elastic {argv[0]}: {problem}")
    assert printed.count("\n") == 1


# --------------------------------------------------------------- a job that runs


@pytest.mark.e2e
def test_a_job_is_seen_and_stopped(job: StartJob, ask: Ask) -> None:
    """From the list to the end, as another terminal would do it."""
    with job() as program:
        header, row = ask("ps").splitlines()
        assert header.split()[:3] == ["RUN", "PID", "NAME"]
        assert row.split()[:2] == ["run-1", str(program.pid)]
        assert row.split()[3:5] == ["running", "2/2"]
        shown = ask("stop", "--no-wait", "--signal", "INT", "run-1")
        assert shown == f"job run-1 (pid {program.pid}): the stop was requested\n"
        assert program.wait() == 130
        assert re.search(r"requested by \S.* \(pid \d+, uid \d+\) \(SIGINT\)", program.err)
        until_sync(lambda: "no job" in ask("ps"), "the end")


@pytest.mark.parametrize("options", [[], ["--kill"], ["--no-wait"]])
def test_a_stop_of_a_job_that_has_just_ended(
    options: list[str], tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over, as was asked."""
    ended = RunningJob(str(tmp_path / "7-a.sock"), 7, None)
    monkeypatch.setattr(local_jobs, "choose_job_to_change", lambda _: ended)
    assert ask("stop", *options, "7") == f"job {ended}: it has just ended\n"


@pytest.mark.e2e
def test_status_and_why(job: StartJob, script: Path, ask: Ask) -> None:
    """After a failure: what the job does, and the decisions that have led there."""
    with job("--max-restarts=3", FAILS="1") as program:
        text = ask("status", "run")
        assert f"run run-1: {script} on " in text
        assert re.search(r"^phase     running for ", text, re.MULTILINE)
        assert "attempt   1 (1 of 3 restarts used)" in text
        assert len(re.findall(r"^[01] +\d+ +running +\S+ s +\d+%", text, re.MULTILINE)) == 2
        status = json.loads(ask("status", "--json", str(program.pid)))
        assert status["attempt"] == 1
        assert all(worker["usage"]["max_rss_bytes"] > 1 << 20 for worker in status["workers"])
        why = ask("why", script.name)
        for line in (
            r"  the workers are stopped \(SIGTERM 25 s, SIGKILL\)\n    rule:     local rank 1 ",
            r"  attempt 0 failed\n    evidence: rank 1 \(pid \d+\): exit code 1",
            r"    evidence: stderr: ValueError: no such data\n|ValueError: no such data \(on",
            r"  attempt 1 follows\n    rule:     restart 1 of 3 \(max restarts\)",
        ):
            assert re.search(line, why), (line, why)
        assert "earlier steps" not in why


@pytest.mark.e2e
def test_control_of_a_job(job: StartJob, ask: Ask) -> None:
    with job("--max-restarts=0") as program:
        name = f"job run-1 (pid {program.pid})"
        sent = f"{name}: SIGUSR1 sent to 1 worker\n"
        assert ask("signal", "run-1", "usr1", "--rank", "1") == sent
        until_sync(lambda: "got USR1" in ask("logs", "run-1", "1"), "the signal")
        assert "got USR1" not in ask("logs", "0")
        assert ask("signal", "run-1", "10") == f"{name}: SIGUSR1 sent to 2 workers\n"
        dump = ask("dump", "--reason", "it is slow")
        assert dump.startswith("it is slow, requested by ")
        assert "rank 0" in dump
        assert "rank 1" in dump
        restarted = ask("restart", "--reason", "new data", "run-1")
        assert restarted == f"{name} restarted: attempt 1 runs\n"
        assert "restarting as attempt 1: new data" in ask("events")
        printed = ask("stop", "--reason", "enough", "run-1")
        client = rf"requested by \S.* \(pid {os.getpid()}, uid {os.geteuid()}\)\n"
        ended = rf"job run-1 \(pid {program.pid}\) stopped, exit code 143: enough, {client}"
        assert re.fullmatch(ended, printed)
        assert program.wait() == 143
        assert re.search(f"restarting as attempt 1: new data, {client}", program.err)


@pytest.mark.e2e
def test_a_signal_that_ends_workers(
    job: StartJob, capfd: pytest.CaptureFixture[str], ask: Ask
) -> None:
    """The command says which; a rank without a worker is a mistake."""
    with job() as program:
        problem = "--rank: must be the rank of a running worker of this node: 0-1 (got '9')\n"
        absent = ask("signal", "run-1", "USR2", "--rank", "9", code=2)
        assert absent == f"aio-elastic signal: {problem}"
        assert main(["signal", "run-1", "USR2", "--rank", "1"]) == 0
        printed = capfd.readouterr()
        assert printed.out == f"job run-1 (pid {program.pid}): SIGUSR2 sent to 1 worker\n"
        warning = "warning: rank 1 has no handler for SIGUSR2 and will be ended by it\n"
        assert printed.err == f"aio-elastic signal: {warning}"
        assert program.wait() == 128 + signal.SIGUSR2


@pytest.mark.e2e
def test_a_wait_ends_with_the_code_of_the_job(job: StartJob) -> None:
    """Its process too, and a follower of the events ends with it."""
    with job() as program:
        assert main(["wait", "--timeout", "0.05"]) == 124
        with (
            running([*CLI, "wait", "run-1"]) as waiter,
            running([*CLI, "events", "--json", "-f"]) as follower,
        ):
            follower.wait_out('"event":"WorkerStarted"')
            program.send(signal.SIGINT)
            assert follower.wait() == 0
            assert waiter.wait() in (130, 2)  # 2 if it began too late
            lines = follower.out.splitlines()
            assert json.loads(lines[-1])["event"] == "JobFinished"
        assert program.wait() == 130


@pytest.mark.e2e
def test_logs(job: StartJob, ask: Ask) -> None:
    """All workers with the rank before each line, or one without; followed through a restart."""
    with job() as program:
        lines = ask("logs").splitlines()
        assert sorted(lines) == [
            "[0]: rank 0 begins",
            "[0]: to stderr",
            "[1]: rank 1 begins",
            "[1]: to stderr",
        ]
        assert ask("logs", "-n", "0", "1") == ""
        assert sorted(ask("logs", "run-1", "1").splitlines()) == ["rank 1 begins", "to stderr"]
        assert "RANK: must be one of this node" in ask("logs", "run-1", "7", code=2)
        with running([*CLI, "logs", "-f", "run-1"]) as follower:
            follower.wait_out("rank 1 begins")
            ask("signal", "run-1", "USR1")
            follower.wait_out(r"\[0\]: got USR1")
            follower.wait_out(r"\[1\]: got USR1")
            ask("restart", "run-1")
            until_sync(lambda: follower.out.count("rank 1 begins") == 2, "the new output")
            ask("stop", "run-1")
            assert follower.wait() == 0
        program.wait()


@pytest.mark.e2e
def test_logs_of_workers_that_have_written_nothing(tmp_path: Path, ask: Ask) -> None:
    """The command follows them from the first byte on, also those of a later attempt."""
    script = tmp_path / "quiet.sh"
    handles = "trap 'echo got USR1: $$ >&2' USR1; touch $0.$$"
    script.write_text(f"{handles}; while :; do sleep 0.05; done")
    with running_cli("--rdzv-id=run-1", "--no-python", "bash", script) as program:
        until_sync(lambda: phase(ask) == "running", "the job")
        with running([*CLI, "logs", "-f", "run-1"]) as follower:

            def shown(workers: int) -> bool:
                """Signal the worker; return whether there are lines of so many by now."""
                until_sync(lambda: len([*tmp_path.glob("quiet.sh.*")]) == workers, "its handler")
                ask("signal", "run-1", "USR1")
                return len(set(re.findall(r"got USR1: (\d+)\n", follower.out))) == workers

            until_sync(lambda: shown(1), "a line of the first worker")
            ask("restart", "run-1")
            until_sync(lambda: shown(2), "a line of the second worker")
            ask("stop", "run-1")
            assert follower.wait() == 0
        program.wait()


@pytest.mark.e2e
def test_logs_into_a_pipe_that_closes(job: StartJob) -> None:
    """Also while nothing but the log files wakes the command up."""
    with job():
        follower = subprocess.Popen(
            [*CLI, "logs", "-f", "run-1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert follower.stdout is not None
        follower.stdout.readline()
        follower.stdout.close()
        words = ["signal", "run-1", "USR1"]
        until_sync(lambda: main(words) == 0 and follower.poll() is not None, "its end")
        assert follower.returncode == 128 + signal.SIGPIPE
        assert follower.stderr is not None
        assert follower.stderr.read() == b""
        follower.stderr.close()


@pytest.mark.e2e
def test_a_job_whose_output_is_in_no_file(script: Path, ask: Ask) -> None:
    """The command says so, and does not wait for the end of the job."""
    with running_cli("--rdzv-id=run-1", "--no-capture", script) as program:
        until_sync(lambda: phase(ask) == "running", "the job")
        for follow in ([], ["-f"]):
            assert "no output of this job is in files" in ask("logs", *follow, code=1)
        program.send(signal.SIGTERM)
        assert program.wait() == 143


@pytest.mark.e2e
def test_top(job: StartJob, ask: Ask) -> None:
    """Once, and until the end of the job."""
    with job() as program:
        text = ask("top", "--once")
        assert re.search(r"^RANK +PID +STATE", text, re.MULTILINE)
        assert len(re.findall(r"^[01] +\d+ +running +\S+ s +\d+%", text, re.MULTILINE)) == 2
        with running([*CLI, "top", "--interval", "0.1"]) as top:
            until_sync(lambda: top.out.count("RANK") >= 3, "three views")
            assert re.search(r"^1 +\d+ +running +\S+ s +\d+%", top.out, re.MULTILINE)
            program.send(signal.SIGTERM)
            assert top.wait() == 0
            assert "phase     stopped" in top.out.split("RANK")[-2] + top.out.split("RANK")[-1]


@pytest.mark.e2e
def test_several_jobs(job: StartJob, tmp_path: Path, ask: Ask) -> None:
    """Each needs its name; all are in the list and in the overview."""
    other = tmp_path / "other" / "eval.py"
    other.parent.mkdir()
    other.write_text(WORKER)
    with job(name="second", script=other), job(name="first"):
        assert "must be given, 2 jobs run here: " in ask("status", code=2)
        assert [line.split()[0] for line in ask("ps").splitlines()] == ["RUN", "second", "first"]
        assert "second" in ask("top", "--once")
        assert ask("stop", "--kill", "eval.py").startswith("job second (pid ")
        assert len(ask("ps").splitlines()) == 2


@pytest.mark.e2e
def test_a_suspended_launcher_does_not_answer(
    job: StartJob, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    monkeypatch.setattr(local_jobs, "find_jobs", partial(find_jobs, 0.3))
    with job() as program:
        program.send(signal.SIGSTOP)
        try:
            assert f"{program.pid}" in ask("ps")
            assert "does not answer" in ask("ps")
            assert "does not answer" in ask("status", "run-1", code=2)
        finally:
            program.send(signal.SIGCONT)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands give up after a moment."""
    for module in (local_jobs, events, logs, top, why):
        if hasattr(module, "CommandClient"):
            monkeypatch.setattr(module, "CommandClient", partial(CommandClient, timeout=0.3))
        if hasattr(module, "find_jobs"):
            monkeypatch.setattr(module, "find_jobs", partial(find_jobs, 0.3))


@pytest.mark.e2e
def test_a_job_that_many_clients_follow_can_be_asked_and_stopped(job: StartJob, ask: Ask) -> None:
    with job() as program, ExitStack() as stack:
        (path,) = Path(os.environ[CONTROL_DIR]).iterdir()
        for _ in range(64):
            client = stack.enter_context(open_channel(str(path)))
            client.send(AwaitEnd(acknowledge=True))
            reply = run_blocking(client.receive(30))
            if not isinstance(reply, AcceptedReply):
                break
        full = "48 clients follow the job or wait for it already"
        assert reply == ErrorReply(full)
        for argv in ["wait"], ["events", "-f"], ["logs", "-f"], ["top"]:
            assert ask(*argv, code=1) == f"aio-elastic {argv[0]}: {full}\n"
        for argv in ["status"], ["why"], ["events"], ["logs"], ["top", "--once"], ["dump"]:
            assert ask(*argv)
        assert ask("signal", "run-1", "USR1").endswith("SIGUSR1 sent to 2 workers\n")
        assert full in ask("restart", "run-1", code=1)
        assert "stopped, exit code 143" in ask("stop", "run-1")
        assert program.wait() == 143


@pytest.mark.e2e
@pytest.mark.usefixtures("impatient")
def test_each_command_gives_up_and_nothing_is_carried_out_later(job: StartJob, ask: Ask) -> None:
    with job() as program:
        pid = str(program.pid)
        program.send(signal.SIGSTOP)
        for argv in (
            ["status"],
            ["why"],
            ["dump"],
            ["logs"],
            ["logs", "-f"],
            ["events"],
            ["events", "-f"],
            ["top"],
            ["wait"],
            ["restart", pid],
            ["signal", pid, "USR1"],
            ["stop", pid],
            ["stop", pid, "--no-wait"],
        ):
            printed = ask(*argv, code=1)
            assert printed == f"aio-elastic {argv[0]}: the agent does not answer: timed out\n"
        assert main(["wait", "--timeout", "0.1"]) == 124
        program.send(signal.SIGCONT)
        until_sync(lambda: phase(ask) == "running", "an answer")
        kinds = {json.loads(line)["event"] for line in ask("events", "--json").splitlines()}
        # Another program of this host may have lost a job.
        assert kinds - {"LostJobFound"} == {"JobStarted", "WorkerStarted"}


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [("/dev/full", 1, "aio-elastic ps: no space left on device\n"), (None, 141, "")],
)
def test_an_output_that_takes_nothing(
    path: str | None, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, which is no silent agent, and a reader that has exited."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer if path is None else path, "wb") as output:
        ended = subprocess.run([*CLI, "ps"], stdout=output, stderr=subprocess.PIPE, check=False)
    if path is not None:
        os.close(writer)
    assert (ended.returncode, ended.stderr.decode()) == (code, said)


def test_a_terminal_may_know_few_characters() -> None:
    ended = run_program([*CLI, "help", "failures"], env={"PYTHONIOENCODING": "ascii"})
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.e2e
@pytest.mark.usefixtures("impatient")
def test_a_launcher_that_does_not_answer_is_killed(job: StartJob, ask: Ask) -> None:
    """Only where --kill asks for it; then the command returns when the workers have ended."""
    with job() as program:
        program.send(signal.SIGSTOP)
        printed = ask("stop", str(program.pid), "--kill", "--reason", "enough")
        assert printed == (
            f"job pid {program.pid} (does not answer) killed: the agent does not answer: timed"
            " out, so its launcher got SIGKILL and its guardian ended it\n"
        )
        assert not [one for one in leaked_processes().values() if "train.py" in one]
        assert program.wait() == 137


SERVICE = """
import asyncio
from elastic_aio import LaunchSpec, JobStopped, launch

async def main():
    try:
        await launch(LaunchSpec(["sleep", "60"], run_id="a"), control=True)
    except JobStopped:
        print("the service goes on")

asyncio.run(main())
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("impatient")
def test_a_program_that_may_have_other_jobs_is_not_killed(tmp_path: Path, ask: Ask) -> None:
    """Its pid is in the line: a person may kill it by hand."""
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    with running([sys.executable, script]) as service:
        until_sync(lambda: phase(ask, "a") == "running", "the job")
        service.send(signal.SIGSTOP)
        printed = ask("stop", "--kill", str(service.pid), code=1)
        assert printed == (
            "aio-elastic stop: the agent does not answer: timed out; its launcher,"
            f" {proc.name_of(service.pid)}, may have other jobs, and is not killed"
            f" (kill -9 {service.pid} does)\n"
        )
        service.send(signal.SIGCONT)
        until_sync(lambda: phase(ask, "a") == "running", "an answer")
        assert ask("stop", "--kill", "a").startswith(f"job a (pid {service.pid}) stopped")
        assert service.wait() == 0
        assert service.out == "the service goes on\n"


@pytest.mark.e2e
def test_an_immediate_stop_has_its_reason(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    argv = ["bash", "-c", f"trap '' TERM; touch {ready}; while :; do sleep 0.1; done"]
    with running_cli("--rdzv-id=run-1", "--no-python", *argv) as program:
        until_sync(ready.exists, "the worker")
        assert run_program([*CLI, "stop", "run-1", "--no-wait"]).code == 0
        ended = run_program([*CLI, "stop", "run-1", "--kill", "--reason", "no time"])
        assert ended.code == 0
        assert program.wait() == 143
        assert re.search(r"no time, requested by .*, sending SIGKILL to ", program.err)


@pytest.mark.e2e
def test_who_follows_a_job_says_that_its_launcher_was_killed(job: StartJob) -> None:
    """A script must not take it for the end of the job."""
    commands = [["wait"], ["events", "-f"], ["logs", "-f"], ["top", "--plain"]]
    with job() as program, ExitStack() as stack:
        followers = [stack.enter_context(running([*CLI, *argv])) for argv in commands]
        for follower, text in zip(followers[1:], ("rank", "begins", "RANK"), strict=True):
            follower.wait_out(text)
        until_sync(lambda: len(_established(program.pid)) >= 4, "the connections")
        program.send(signal.SIGKILL)
        for follower, (name, *_) in zip(followers, commands, strict=True):
            assert follower.wait() == 1
            lost = f"aio-elastic {name}: the connection to the agent is lost\n"
            assert follower.err.endswith(lost)
        program.wait()


def _established(pid: int) -> list[str]:
    """Return the connections of a launcher, by the descriptors that are accepted sockets."""
    directory = Path(f"/proc/{pid}/fd")
    links = [os.readlink(path) for path in directory.iterdir() if path.is_symlink()]
    table = Path("/proc/net/unix").read_text().splitlines()
    connected = {
        f"socket:[{fields[6]}]"
        for fields in map(str.split, table[1:])
        if len(fields) == 8 and fields[5] == "03" and fields[7].endswith(".sock")
    }
    return [link for link in links if link in connected]


@pytest.mark.e2e
def test_a_killed_launcher_leaves_no_job(job: StartJob, ask: Ask) -> None:
    """The next command removes its socket."""
    with job() as program:
        program.send(signal.SIGKILL)
        program.wait()
        until_sync(lambda: "no job" in ask("ps"), "the end of all copies")
        assert os.listdir(os.environ["ELASTIC_AIO_CONTROL_DIR"]) == []


@pytest.mark.e2e
def test_a_job_without_control(script: Path, ask: Ask) -> None:
    with running_cli("--no-control", script) as program:
        program.wait_out("rank 0 begins")
        assert ask("ps") == "no job of this user runs on this host\n"
        program.send(signal.SIGTERM)
        assert program.wait() == 143


@pytest.mark.e2e
def test_why_from_a_file(tmp_path: Path) -> None:
    """The events that `run --events` has written explain a job that is over."""
    path = tmp_path / "events"
    argv = [*CLI, "run", "--events", str(path), "--no-python", "sh", "-c", "exit 7"]
    assert run_program(argv).code == 7
    ended = run_program([*CLI, "why", "--from", str(path)])
    assert ended.code == 0
    assert "phase     failed" in ended.out
    assert "  attempt 0 failed\n    evidence: rank 0 (pid " in ended.out
    assert "  the job ended: failed, exit code 7\n    rule:     no restarts allowed" in ended.out
    path.write_text("nonsense\n")
    ended = run_program([*CLI, "why", "--from", str(path)])
    assert ended.code == 2
    assert ended.errors[0].startswith("aio-elastic why: --from: line 1 is no event")


@pytest.mark.e2e
def test_commands_need_no_variable_of_the_job(script: Path, tmp_path: Path) -> None:
    """As `docker exec` gives none: the runtime directory of the job is looked for."""
    env: dict[str, str | None] = {"ELASTIC_AIO_CONTROL_DIR": None, "XDG_RUNTIME_DIR": None}
    name = f"run-{os.getpid()}-{tmp_path.name}"
    with running_cli(f"--rdzv-id={name}", script, env=env) as program:
        program.wait_out("rank 0 begins")
        ended = run_program(
            [sys.executable, "-m", "elastic_aio", "status", name],
            env={**env, "HOME": None, "USER": None},
        )
        assert ended.code == 0, ended.err
        assert f"run {name}: " in ended.out
        assert run_program([*CLI, "stop", name], env=env).code == 0
        assert program.wait() == 143
