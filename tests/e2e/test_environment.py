"""Unusual environments: a job succeeds or fails with one line, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic_aio.cli import main
from tests.support.children import shell, until_sync
from tests.support.cli import (
    CLI,
    REPOSITORY,
    Ended,
    bare_environment,
    environment,
    run_cli,
    run_in_shell,
    run_program,
)
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.e2e

BASH = ["--no-python", "bash", "-c"]
is_root = os.geteuid() == 0


def check_one_clear_line(ended: Ended, *codes: int) -> None:
    """Assert that a job has one of these exit codes, and printed one line of its own if not 0."""
    assert "Traceback" not in ended.err, ended.err
    assert "Exception" not in ended.err, ended.err
    assert ended.code in codes, ended
    own = [line for line in ended.errors if line.startswith("aio-elastic")]
    if ended.code:
        started = sum(": run " in line for line in own)
        assert len(own) - started == 1, ended.err
    until_sync(lambda: not leaked_processes(), "the end of all processes")


@pytest.mark.parametrize("limit", [6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32])
def test_few_descriptors(limit: int) -> None:
    """With few descriptors a job runs, or the error says that there are too few."""
    ended = run_in_shell(f"ulimit -n {limit}", "--nproc-per-node", 2, "-t3", *BASH, "exit 0")
    check_one_clear_line(ended, 0, 1)
    if ended.code:
        assert re.search("too few descriptors|too many open files", ended.err.lower())
        assert f"the limit is {limit} (raise it with ulimit -n)" in ended.err


@pytest.mark.parametrize("limit", [0, 200])
@pytest.mark.parametrize("options", [[], ["--run-path"], ["--preload", "json"]])
def test_small_files(options: list[str], limit: int, tmp_path: Path) -> None:
    """The list of the workers, a call or a request may be too large for a file in memory."""
    script = tmp_path / "script.py"
    script.write_text("")
    done = subprocess.run(
        [*CLI, "run", *options, str(script)],
        capture_output=True,  # the launcher could not write to a file
        text=True,
        # CPython 3.11 would leave the beginning of a file of bytecode for the next tests.
        env=environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        check=False,
    )
    check_one_clear_line(Ended(done.returncode, done.stdout, done.stderr), 0, 1)
    assert bool(done.returncode) == (limit == 0 or bool(options))
    if done.returncode:
        assert f"the limit is {limit} (raise it with ulimit -f)" in done.stderr


def test_few_descriptors_for_many_workers() -> None:
    """A job that exceeds the descriptor limit runs, or ends with one line."""
    ended = run_in_shell("ulimit -n 40", "--nproc-per-node", 40, "-t3", *BASH, "sleep 0.2")
    check_one_clear_line(ended, 0, 1)


@pytest.mark.skipif(not is_root, reason="needs the right to become another user")
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6])
def test_few_processes(limit: int) -> None:
    """With few processes a job runs, or the error is EAGAIN."""
    user = str(60000 + os.getpid() % 5000)
    # Capabilities to read this interpreter, wherever it is installed.
    capabilities = "-all,+dac_override,+dac_read_search"
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups",
              f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}"]  # fmt: skip
    argv = [*become, *shell(f'ulimit -u {limit}; exec "$@"'), "bash", *CLI]
    probe = run_program([*become, *CLI, "--version"], cwd="/")
    if probe.code:
        pytest.skip("another user may not run this interpreter")
    ended = run_program(
        # The directory of control sockets belongs to this user.
        [*argv, "run", "--no-control", "--nproc-per-node", "3", "--no-python", "true"],
        cwd="/",
        env={"TMPDIR": "/tmp", "OMP_NUM_THREADS": "1"},
    )
    check_one_clear_line(ended, 0, 1)
    if ended.code:
        assert "resource temporarily unavailable" in ended.err.lower()


@pytest.mark.skipif(not is_root, reason="needs the right to mount")
def test_read_only_disks() -> None:
    """Without a writable directory a job without logs runs, and one with logs is an error."""
    before = "mount -o remount,bind,ro /; for d in /tmp /var/tmp /usr/tmp /dev/shm; do"
    before += " mountpoint -q $d && mount -o remount,bind,ro $d; done; touch /tmp/probe && exit 77"
    script = f'{before}; exec "$@"'
    argv = ["unshare", "-m", *shell(script), "bash", *CLI, "run"]
    plain = run_program([*argv, *BASH, "exit 0"], cwd="/", env={"TMPDIR": None})
    if plain.code == 77 or "unshare" in plain.err or "mount:" in plain.err:
        pytest.skip("the disk cannot be made read-only here")
    check_one_clear_line(plain, 0)
    failing = run_program([*argv, *BASH, "exit 5"], cwd="/", env={"TMPDIR": None})
    assert failing.code == 5
    logged = run_program([*argv, "-t3", *BASH, "exit 0"], cwd="/", env={"TMPDIR": None})
    check_one_clear_line(logged, 1)
    assert "temporary directory" in logged.err
    chosen = run_program(
        [*argv, "-t3", "--log-dir", "/tmp/logs here", *BASH, "exit 0"],
        cwd="/",
        env={"TMPDIR": None},
    )
    check_one_clear_line(chosen, 2)
    assert "--log-dir" in chosen.err
    assert "read-only" in chosen.err


def test_no_home_and_no_tmpdir() -> None:
    """A job needs no variable but PATH (and PYTHONPATH for the test)."""
    env = bare_environment(PYTHONPATH=str(REPOSITORY))
    env["TMPDIR"] = None
    ended = run_cli("-t1", "--log-dir", "/dev/null", *BASH, "echo fine", env=env, cwd="/")
    check_one_clear_line(ended, 0)
    assert ended.out == "fine\n"


def test_a_missing_tmpdir() -> None:
    """A job without logs does not need TMPDIR to exist."""
    ended = run_cli(*BASH, "exit 0", env={"TMPDIR": "/nowhere"})
    check_one_clear_line(ended, 0)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("options", [[], ["-t3"], ["--stdin", "rank0"]], ids=["plain", "tee", "in"])
def test_closed_streams(closed: str, options: list[str]) -> None:
    """A launcher with closed streams gives its workers open ones, and exits with their code."""
    script = "for n in 0 1 2; do test -e /proc/$$/fd/$n || exit 9; done; "
    script += "echo out || exit 8; echo err >&2 || exit 7; read -r _ && exit 6; exit 3"
    ended = run_in_shell("", *options, *BASH, script, after=closed)
    assert ended.code == 3
    assert "Traceback" not in ended.err


def test_a_usage_error_without_stderr() -> None:
    """The exit code is 2 although stderr is closed."""
    ended = run_in_shell("", "--nnodes", "0", "x", after="2>&-")
    assert (ended.code, ended.err) == (2, "")


@pytest.mark.parametrize("option", [[], ["-t3"]])
def test_a_full_console(option: list[str]) -> None:
    """A console on a full disk does not change the exit code."""
    ended = run_in_shell("", *option, *BASH, "exit 3", after="> /dev/full 2> /dev/full")
    assert ended.code == 3


def test_a_deleted_working_directory(tmp_path: Path) -> None:
    """The job runs; a relative script is not found."""
    directory = tmp_path / "cwd"
    before = f'mkdir "{directory}" && cd "{directory}" && rmdir "{directory}"'
    check_one_clear_line(run_in_shell(before, "--no-python", "true"), 0)
    check_one_clear_line(run_in_shell(before, "-t3", "--no-python", "true"), 0)
    missing = run_in_shell(before, "train.py")
    check_one_clear_line(missing, 127)
    assert "train.py" in missing.err
    logs = run_in_shell(before, "-t3", "--log-dir", "logs", "--no-python", "true")
    check_one_clear_line(logs, 1, 2)
    assert "--log-dir" in logs.err
    assert "no such file or directory" in logs.err.lower()
    script = tmp_path / "script.py"
    script.write_text("")
    for option in (["--preload", "json"], ["--run-path"]):
        check_one_clear_line(run_in_shell(before, *option, script), 0)
    check_one_clear_line(run_in_shell(before, "--preload", "json", "train.py"), 127)


@pytest.mark.parametrize("code", [0, 7])
def test_a_parent_that_ignores_sigchld(code: int) -> None:
    """Exit codes are right under a parent that ignores SIGCHLD, and workers have the default."""
    script = "bash -c 'exit 5'; test $? = 5 || exit 99; "
    # Signals 17 (SIGCHLD) to 31; 32 belongs to the C library, and a worker of pytest-xdist
    # on Python 3.13 ignores it.
    script += "grep -q '^SigIgn:.*[08]000[0-9a-f]\\{4\\}$' /proc/$$/status || exit 98; "
    ended = run_in_shell("trap '' CHLD", "--nproc-per-node", 2, *BASH, f"{script} exit {code}")
    assert ended.code == code
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("ignored", ["PIPE", "HUP INT QUIT TERM", "USR1 USR2 TSTP CONT"])
def test_a_parent_that_ignores_signals(ignored: str) -> None:
    """A job runs to its end although its parent ignores these signals."""
    ended = run_in_shell(f"trap '' {ignored}", "-t1", *BASH, "echo x; exit 3")
    assert (ended.code, ended.out) == (3, "[default0]:x\n")


@pytest.mark.parametrize("args", [["x" * 300_000], ["x" * 100_000] * 40], ids=["one", "all"])
def test_arguments_that_are_too_long(args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """An argument or a list that execve(2) refuses (E2BIG) is one short line, without a restart."""
    options = ["--nproc-per-node=2", "--max-restarts=3", "--no-python"]
    ended = Ended(main(["run", *options, "echo", *args]), *capfd.readouterr())
    assert (ended.code, ended.out) == (126, "")
    assert "too long" in ended.err
    assert len(ended.err) < 400
    check_one_clear_line(ended, 126)


def test_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    """Arguments, role names and variables reach the worker unchanged."""
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")
    ended = run_cli(
        "-r1", "--log-dir", tmp_path, "--role", odd, *BASH, 'printf %s "$0$1$ODD"', odd, odd,
        env={"ODD": odd},
    )  # fmt: skip
    assert ended.code == 0
    assert "Traceback" not in ended.err
    (log,) = tmp_path.rglob("stdout.log")
    assert log.read_bytes() == b"\xff\xfe" * 3


def test_a_worker_that_closes_and_kills(tmp_path: Path) -> None:
    """A worker that closes its streams and kills its process group is a failed worker."""
    ended = run_cli("-t3", "--log-dir", tmp_path, *BASH, "exec >&- 2>&-; kill -KILL 0")
    assert ended.code == 137
    assert "Traceback" not in ended.err


def test_a_worker_that_removes_the_log_directory(tmp_path: Path) -> None:
    """Log files deleted during the job change neither its output nor its restarts."""
    script = f'echo x; rm -rf "{tmp_path}/logs"; echo y; exit $((1 - TORCHELASTIC_RESTART_COUNT))'
    ended = run_cli("--max-restarts", 1, "-t1", "--log-dir", tmp_path / "logs", *BASH, script)
    assert "Traceback" not in ended.err
    assert ended.code == 0
    assert ended.out == "[default0]:x\n[default0]:y\n" * 2


def test_little_memory() -> None:
    """A launcher with 600 MB of address space runs."""
    ended = run_in_shell("ulimit -v 600000", "--nproc-per-node", 4, "-t1", *BASH, "echo x")
    check_one_clear_line(ended, 0)
    assert len(ended.out.splitlines()) == 4


@pytest.mark.parametrize("options", [[], ["--preload", "json"]])
def test_many_python_workers_at_a_small_limit(options: list[str], tmp_path: Path) -> None:
    """The fork server has as many descriptors as it needs, and workers have the user's limit."""
    script = tmp_path / "script.py"
    # The workers run at the same time: each one costs the server a descriptor.
    script.write_text(
        "import os, resource, time\n"
        "os.write(1, b'%d\\n' % resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        f"open({str(tmp_path / 'all')!r}, 'a').write('.')\n"
        f"while os.path.getsize({str(tmp_path / 'all')!r}) < 80: time.sleep(0.01)\n"
    )
    ended = run_in_shell("ulimit -Sn 64", "--nproc-per-node", 80, *options, script)
    assert (ended.code, ended.out) == (0, "64\n" * 80)


def test_a_program_that_may_be_executed_but_not_read(tmp_path: Path) -> None:
    """It runs, also if the workers' limit has to be set before it."""
    program = tmp_path / "program"
    shutil.copy(shutil.which("true") or "true", program)
    program.chmod(0o111)
    command = ["--nproc-per-node", 40, "--max-restarts", 2, "--no-python", program]
    without_capabilities = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    prefix = without_capabilities if is_root else []
    for limit in (64, 1024):
        script = f'ulimit -Sn {limit}; exec "$@"'
        argv = ["bash", "-c", script, "bash", *prefix, *CLI, "run", *map(str, command)]
        check_one_clear_line(run_program(argv), 0)


TWO_JOBS = """
import asyncio, resource, sys
from elastic_aio import LaunchSpec, LogSpec, launch
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
async def main():
    script = "ulimit -Sn; exec sleep 1"
    spec = LaunchSpec(["bash", "-c", script], nproc_per_node=100, logs=LogSpec(tee=3))
    await asyncio.gather(launch(spec), launch(spec))
asyncio.run(main())
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_two_jobs_of_one_program_at_a_small_limit() -> None:
    """They have enough descriptors together; then the limit is the old one."""
    ended = run_program([sys.executable, "-c", TWO_JOBS])
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines.pop() == "256"
    assert sorted(lines) == sorted(f"[default{rank}]:256" for rank in range(100) for _ in range(2))


def test_many_jobs_never_collide(tmp_path: Path) -> None:
    """50 jobs with one run id and one log directory, 12 at a time, are independent."""
    jobs = 50
    command = [*CLI, "run", "--standalone", "--nproc-per-node", "2", "--rdzv-id", "same", "-r1",
               "--log-dir", str(tmp_path), *BASH]  # fmt: skip
    script = "echo {0} $MASTER_PORT; exit $(( {0} % 3 ))"
    with ThreadPoolExecutor(12) as pool:
        commands = [[*command, script.format(job)] for job in range(jobs)]
        ended = list(pool.map(run_program, commands))
    assert [one.code for one in ended] == [job % 3 for job in range(jobs)]
    assert not any("Traceback" in one.err for one in ended)
    directories = list(tmp_path.iterdir())
    assert len(directories) == jobs
    outputs = [
        {path.read_text() for path in directory.rglob("stdout.log") if path.stat().st_size}
        for directory in directories
    ]
    assert all(len(texts) == 1 for texts in outputs)
    assert {int(text.split()[0]) for texts in outputs for text in texts} == set(range(jobs))


def test_python_variables_of_the_user(tmp_path: Path) -> None:
    """Variables and modules that change Python's behaviour break neither launcher nor guardian."""
    (tmp_path / "asyncio.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sweep.py").write_text("raise SystemExit('shadowed')")
    env = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error", "PYTHONASYNCIODEBUG": "1",
           "PYTHONDEVMODE": "1"}  # fmt: skip
    ended = run_program(
        [sys.executable, "-W", "error", "-m", "elastic_aio", "run", "-t3", *BASH, "echo x; exit 3"],
        env=env,
        cwd=tmp_path,
    )
    assert (ended.code, ended.out) == (3, "[default0]:x\n")
    assert "Warning" not in ended.err
    assert "Traceback" not in ended.err


def test_what_a_wrapped_program_has_printed_survives_a_kill() -> None:
    """Python buffers what goes to a pipe or a file; `-u` does not reach it behind a shell."""
    program = "import os, signal; print('last words'); os.kill(os.getpid(), signal.SIGKILL)"
    words = [*BASH, '"$0" -c "$1"; exit 3', sys.executable, program]
    ended = run_cli(*words, env={"PYTHONUNBUFFERED": None})
    assert (ended.code, ended.out) == (3, "last words\n")
    ended = run_cli(*words, env={"PYTHONUNBUFFERED": ""})
    assert (ended.code, ended.out) == (3, "")


def test_a_launch_in_a_worker_is_a_job_of_its_own(tmp_path: Path) -> None:
    """The variables of the outer job would let it wait for a second node, or take a rank."""
    inner = tmp_path / "inner.py"
    inner.write_text("import os; print('inner', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import subprocess, sys\n"
        f"command = {[*CLI, 'run', '--nproc-per-node', '2', str(inner)]!r}\n"
        "sys.exit(subprocess.run(command, stdin=subprocess.DEVNULL).returncode)\n"
    )
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}  # fmt: skip
    pet = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:1"}
    ended = run_cli("--nnodes", 1, outer, env={**step, **pet})
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["inner 0 2", "inner 1 2"]
    said = "inside a worker of slurm-4711.0: PET_*, SLURM_* are not read, options are"
    assert ended.err.count(said) == 1
