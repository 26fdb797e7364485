"""Failure reports of real workers: recorded errors, signals, stderr, OOM kills."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import JobFailed, LaunchSpec, LogSpec, launch
from tests.support.children import shell, until_sync
from tests.support.cli import run_cli, running_cli

pytestmark = pytest.mark.e2e

BASH = ["--no-python", "bash", "-c"]
RECORDED = """
import os, sys
from elastic_aio.worker import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no data")
    import time
    time.sleep(99)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Write a script whose rank 1 records an exception."""
    script = tmp_path / "train.py"
    script.write_text(RECORDED)
    return script


def test_a_recorded_exception_is_the_report(recorded: Path, tmp_path: Path) -> None:
    """The report has the root cause's traceback and marks the victims; the exit code is 1."""
    ended = run_cli("--nproc-per-node", 3, "--log-dir", tmp_path / "logs", recorded)
    assert ended.code == 1
    report = ended.err[ended.err.index("\n=====") :]
    others, root = report.split("Root Cause (first observed failure):")
    assert f"{recorded} FAILED" in others
    assert others.count("stopped   : by the supervisor, because of the root cause") == 2
    assert others.count("(SIGTERM)") >= 2
    assert "rank      : 1 (local_rank: 1)" in root
    assert "exitcode  : 1 (pid: " in root
    (error_file,) = (tmp_path / "logs").rglob("error.json")
    assert f"error_file: {error_file}" in root
    assert "traceback : Traceback (most recent call last):" in root
    assert "ValueError: no data" in root
    assert "attempt 0 failed: rank 1" in ended.err


def test_the_error_file_is_copied(recorded: Path, tmp_path: Path) -> None:
    """TORCHELASTIC_ERROR_FILE of the launcher gets the root cause and its exit code."""
    target = tmp_path / "outer.json"
    target.write_text("from before")
    run_cli("--nproc-per-node", 2, recorded, env={"TORCHELASTIC_ERROR_FILE": str(target)})
    message = json.loads(target.read_bytes())["message"]
    assert message["message"] == "ValueError: no data"
    assert message["errorCode"] == 1
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


def test_no_error_file_means_no_copy(tmp_path: Path) -> None:
    """Without a recorded error the launcher's file is not written; workers do not inherit it."""
    target = tmp_path / "outer.json"
    script = 'test "$TORCHELASTIC_ERROR_FILE" != "$OUTER" || exit 9; exit 5'
    env = {"TORCHELASTIC_ERROR_FILE": str(target), "OUTER": str(target)}
    assert run_cli(*BASH, script, env=env).code == 5
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--log-dir", "/dev/null/x", "--no-python", "true"], "SpecError: logs.log_dir: "),
        (["--no-python", "sh", "-c", "kill -TERM $PPID; sleep 99"], "JobStopped: sh was stopped"),
    ],
)
def test_a_launcher_records_its_own_error(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    """Of which no worker is the cause."""
    target = tmp_path / "error.json"
    run_cli(*arguments, env={"TORCHELASTIC_ERROR_FILE": str(target)})
    written = json.loads(target.read_text())["message"]
    assert written["message"].startswith(message)
    assert "py_callstack" in written["extraInfo"]


def test_nested_launchers_pass_the_root_cause_on(recorded: Path, tmp_path: Path) -> None:
    """From the innermost worker to the outermost launcher; overwriting a file warns."""
    target = tmp_path / "error.json"
    target.write_text("older")
    inner = [sys.executable, "-m", "elastic_aio", "run", "--nproc-per-node", 2, recorded]
    ended = run_cli("--no-python", *inner, env={"TORCHELASTIC_ERROR_FILE": str(target)})
    message = json.loads(target.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: no data", 1)
    assert f"TORCHELASTIC_ERROR_FILE: {target} exists already and is overwritten" in ended.err


def test_an_error_file_that_cannot_be_copied(recorded: Path) -> None:
    """A target that cannot be written is one more line."""
    env = {"TORCHELASTIC_ERROR_FILE": "/nowhere/error.json"}
    ended = run_cli("--nproc-per-node", 2, recorded, env=env)
    assert ended.code == 1
    expected = "TORCHELASTIC_ERROR_FILE: cannot be written: no such file or directory (got"
    assert f"aio-elastic run: {expected} '/nowhere/error.json')" in ended.errors


def test_stderr_is_shown_without_a_record() -> None:
    """If stderr is captured, the report has its last lines."""
    script = (
        "for i in {1..100}; do echo line $i >&2; done; printf '  10%%\\r 100%%\\nend' >&2; exit 3"
    )
    ended = run_cli("-r2", *BASH, script)
    assert ended.code == 3
    tail = ended.err[ended.err.index("stderr    : last lines of ") :].splitlines()
    assert tail[-4:-2] == ["     100%", "    end"] or "    end" in tail
    assert "    line 100" in tail
    assert "    line 1" not in tail
    assert re.search(r"traceback : .*\S", ended.err)
    assert "\nHelp: aio-elastic help failures\n" in ended.err


def test_signals_are_named() -> None:
    """The report has the number and the name of the signal that killed a worker."""
    ended = run_cli(*BASH, "kill -11 $$")
    assert ended.code == 139
    assert "exitcode  : -11 (pid: " in ended.err
    assert "Signal 11 (SIGSEGV) received by PID " in ended.err


async def failed(script: str, directory: Path, **settings: Any) -> JobFailed:
    """Run a job of shell scripts, with logs, to its failure."""
    logs = LogSpec(log_dir=str(directory / "logs"))
    spec = LaunchSpec(shell(script), env={"NOTES": str(directory)}, logs=logs, **settings)
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    return caught.value


@pytest.mark.parametrize(
    "make",
    ['cp "$NOTES/cut"', 'cp "$NOTES/huge"', "mkdir", "mkfifo", "ln -s /nowhere", "ln -s /dev/zero"],
)
async def test_a_broken_error_file_breaks_nothing(make: str, tmp_path: Path) -> None:
    """It is ignored if it is invalid or no regular file: the worker has failed, and restarts."""
    (tmp_path / "cut").write_text('{"message": {"message": "ValueEr')
    (tmp_path / "huge").write_text('{"message": "' + "x" * 9_000_000 + '"}')
    end = await failed(f'{make} "$TORCHELASTIC_ERROR_FILE"; exit 7', tmp_path, max_restarts=1)
    assert (end.result.exit_code, end.result.restarts) == (7, 1)
    error = end.failures[0].error
    if "huge" in make:  # an error that the worker has recorded, but that cannot be shown
        assert error is not None
        assert error.message.startswith("its error file is too large (9000015 bytes)")
    else:
        assert error is None


async def test_the_first_recorded_error_is_the_root(tmp_path: Path) -> None:
    """The worker that recorded an error first is the root cause, even if another exited first."""
    script = """
    if [ $RANK = 1 ]; then
        echo '{"message": {"message": "boom", "extraInfo": {}}}' > $TORCHELASTIC_ERROR_FILE
        : > $NOTES/recorded; exec sleep 99
    fi
    until [ -e $NOTES/recorded ]; do :; done; sleep 0.02; exit 3
    """
    root, other = (await failed(script, tmp_path, nproc_per_node=2)).failures
    assert (root.rank, root.is_victim) == (1, False)
    assert root.error is not None
    assert root.error.message == "boom"
    assert (other.rank, other.is_victim) == (0, False)


HELPED = """
import json, os, subprocess, sys, time
from pathlib import Path

way, then = sys.argv[1:]
notes, path = Path(os.environ["NOTES"]), os.environ["TORCHELASTIC_ERROR_FILE"]
if os.environ["RANK"] == "0":
    if way == "torch":  # long ago, since the file does not say who wrote it
        past = time.time() - 10
        extra = {"py_callstack": "Traceback ...", "timestamp": str(int(past))}
        message = {"message": "ValueError: no cache yet", "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}))
    else:
        helper = [sys.executable, str(notes / "helper.py")]
        assert subprocess.run(helper, stderr=subprocess.DEVNULL).returncode == 1
        if then == "exit":
            document = json.loads(Path(path).read_text())
            document["writer_time"] -= 10
            Path(path).write_text(json.dumps(document))
    if then == "exit":
        sys.exit(3)
    (notes / "ready").touch()
    time.sleep(99)
elif then == "crash":
    while not (notes / "ready").exists():
        pass
    os._exit(5)
time.sleep(99)
"""
HELPER = """
from elastic_aio.worker import record

@record
def main():
    raise ValueError("no cache yet")

main()
"""


@pytest.fixture(params=["record", "torch"])
def helped(request: pytest.FixtureRequest, tmp_path: Path) -> list[object]:
    """Write a script whose rank 0 handles an error that a helper of it has recorded."""
    (tmp_path / "train.py").write_text(HELPED)
    (tmp_path / "helper.py").write_text(HELPER)
    return ["--nproc-per-node", 2, tmp_path / "train.py", request.param]


NO_REASON = "note      : an error was recorded "


def test_a_handled_error_of_a_helper_is_no_cause(helped: list[object], tmp_path: Path) -> None:
    """The other rank crashes later: its rank and its exit code are the job's."""
    ended = run_cli(*helped, "crash", env={"NOTES": str(tmp_path)})
    assert ended.code == 5
    others, root = ended.err.split("Root Cause (first observed failure):")
    assert "rank      : 1 (local_rank: 1)" in root
    assert "exitcode  : 5 (pid: " in root
    assert NO_REASON in others
    assert NO_REASON not in root


def test_a_handled_error_of_a_helper_is_no_failure(helped: list[object], tmp_path: Path) -> None:
    """A stop by SIGTERM stays one."""
    with running_cli(*helped, "wait", env={"NOTES": str(tmp_path)}) as job:
        until_sync((tmp_path / "ready").exists)
        job.send(signal.SIGTERM)
        ended = job.ended()
    assert ended.code == 143
    assert "was stopped: SIGTERM was received" in ended.err
    assert "no cache yet" not in ended.err


def test_an_old_error_of_a_helper_is_no_reason(helped: list[object], tmp_path: Path) -> None:
    """The worker's own exit code stays, and nothing else is said about it."""
    ended = run_cli(*helped, "exit", env={"NOTES": str(tmp_path)})
    assert ended.code == 3
    first, report = ended.err.split("=====", 1)
    assert re.search(r"attempt 0 failed: rank 0 \(pid [0-9]+\): exit code 3$", first, re.MULTILINE)
    assert re.search(rf"{NO_REASON}1[0-9.]* s before the end.*: ValueError: no cache yet", report)


@pytest.mark.parametrize("wrapper", ["timeout 99 {}", "{}; exit $?"])
def test_the_program_of_a_wrapper_says_why(wrapper: str, recorded: Path) -> None:
    """Its process is not the worker's, but it has failed just before."""
    script = wrapper.format(f"{sys.executable} {recorded}")
    ended = run_cli("--nproc-per-node", 2, *BASH, script)
    assert ended.code == 1
    assert re.search(r"rank 1 \(pid [0-9]+\): exit code 1: ValueError: no data$", ended.err, re.M)
    assert "error_file: /" in ended.err.split("Root Cause")[1]


JUST_HELPED = """
import os, subprocess, sys
helper = [sys.executable, os.path.join(os.environ["NOTES"], "helper.py")]
{}
"""
HANDLED = "subprocess.run(helper); "


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (HANDLED + "raise RuntimeError('the cause')", "exit code 1: RuntimeError: the cause"),
        (
            HANDLED + "os.kill(os.getpid(), 11)",
            "killed by SIGSEGV: Fatal Python error: Segmentation fault",
        ),
        (HANDLED + "os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        (HANDLED + "print('bad lr', file=sys.stderr); sys.exit(3)", "exit code 3: bad lr"),
        ("sys.exit(subprocess.run(helper).returncode)", "exit code 1: ValueError: no cache yet"),
        ("subprocess.run(helper, check=True)", "exit code 1: ValueError: no cache yet"),
    ],
)
def test_the_own_end_of_a_worker_says_why(then: str, reason: str, tmp_path: Path) -> None:
    """Not the helper whose failure it has just handled, unless that is the end."""
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "train.py").write_text(JUST_HELPED.format(then))
    ended = run_cli(tmp_path / "train.py", env={"NOTES": str(tmp_path)})
    first, report = ended.err.split("=====", 1)
    assert re.search(rf"attempt 0 failed: rank 0 \(pid [0-9]+\): {reason}$", first, re.M)
    is_handled = then.startswith(HANDLED)
    assert ("error_file: <N/A>" in report) is is_handled
    assert (NO_REASON in report) is is_handled


LEAVING = """
import atexit, os, time
from pathlib import Path
from elastic_aio.worker import record

recorded = Path(os.environ["NOTES"], "recorded")

def leave():
    past = time.time() - 60
    os.utime(os.environ["TORCHELASTIC_ERROR_FILE"], (past, past))
    recorded.touch()
    time.sleep(99)

@record
def main():
    raise ValueError("own")

if os.environ["RANK"] == "0":
    atexit.register(leave)
    main()
while not recorded.exists():
    pass
os._exit(5)
"""


def test_a_stop_meets_a_worker_on_its_way_out(tmp_path: Path) -> None:
    """Its own error is still the cause, however long it takes to leave."""
    script = tmp_path / "train.py"
    script.write_text(LEAVING)
    ended = run_cli("--nproc-per-node", 2, script, env={"NOTES": str(tmp_path)})
    assert ended.code == 1
    root = ended.err.split("Root Cause (first observed failure):")[1]
    assert "rank      : 0 (local_rank: 0)" in root
    assert "ValueError: own" in root


async def test_an_error_recorded_because_of_the_stop_is_no_root(tmp_path: Path) -> None:
    """A worker that records an exception while it is being stopped is a victim."""
    (tmp_path / "content").write_text('{"message": "interrupted"}')
    script = """
    if [ $RANK = 1 ]; then
        trap 'sleep 0.05; cp $NOTES/content $TORCHELASTIC_ERROR_FILE; exit 1' TERM
        : > $NOTES/ready; sleep 99 & wait
    fi
    until [ -e $NOTES/ready ]; do :; done; exit 3
    """
    end = await failed(script, tmp_path, nproc_per_node=2)
    root, other = end.failures
    assert (root.rank, root.is_victim) == (0, False)
    assert (other.rank, other.is_victim) == (1, True)
    assert end.result.exit_code == 3


def test_failures_before_a_restart() -> None:
    """Each failed attempt is one line with the restart rule; the report comes once, at the end."""
    ended = run_cli("--max-restarts", 2, *BASH, "exit 4")
    assert ended.code == 4
    assert [line for line in ended.errors if "attempt" in line and "FAILED" not in line] == [
        line for number in range(3) for line in ended.errors
        if f"attempt {number} failed: rank 0" in line or f"restarting as attempt {number}" in line
    ]  # fmt: skip
    assert "restarting as attempt 1: restart 1 of 2 (max restarts)" in ended.err
    assert "restarting as attempt 2 in 1 s: restart 2 of 2 (max restarts)" in ended.err
    assert ended.err.count("bash FAILED") == 1
    assert "all 2 restarts are used up (max restarts)" in ended.err
