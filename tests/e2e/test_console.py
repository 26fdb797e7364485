"""The console: pipes, terminals, readers that stop or exit, full disks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_aio import AttemptFailed, WorkerExited, event_from_json
from tests.support.children import python, shell
from tests.support.cli import CLI, run_cli, run_program, running_cli
from tests.support.disk import fill, small_disk

pytestmark = pytest.mark.e2e

BASH = ["--no-python", "bash", "-c"]
ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def in_pipeline(reader: str, *args: object, redirect: str = "") -> list[str]:
    """Return a shell that pipes a job into `reader` and then prints the job's exit code."""
    script = f'"$@" {redirect} | {reader}; echo "code ${{PIPESTATUS[0]}}"'
    return [*shell(script), "bash", *CLI, "run", *map(str, args)]


@pytest.mark.parametrize(("option", "redirect"), [("-t1", ""), ("-t3", ""), ("-t3", "2>&1")])
def test_a_console_that_is_closed_early(option: str, redirect: str, tmp_path: Path) -> None:
    """With `| head -1` the log files are complete and the exit code is the worker's."""
    worker = "for ((i = 0; i < 20000; i++)); do echo $i; done; exit 6"
    job = in_pipeline("head -1", option, "--log-dir", tmp_path, *BASH, worker, redirect=redirect)
    ended = run_program(job)
    assert ended.out.splitlines()[-1] == "code 6"
    (log,) = tmp_path.rglob("stdout.log")
    assert log.read_text().splitlines() == [str(i) for i in range(20000)]
    if redirect:  # the start of the job is the first line
        assert ended.err == ""
    else:
        assert ended.out.startswith("[default0]:0\ncode")
        assert "stdout accepts no more output (broken pipe)" in ended.err
        assert "Traceback" not in ended.err


@contextmanager
def stalled_pipe() -> Iterator[tuple[int, int]]:
    """Give a pipe without a reading process."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def test_a_stalled_console_does_not_block_workers(tmp_path: Path) -> None:
    """A reader that stops neither blocks a tee'd worker nor delays the handling of a failure."""
    worker = python(
        """
import os, sys, time
notes, rank = os.environ["NOTES"], os.environ["RANK"]
if rank == "0":
    os.write(1, b"x" * 99 + b"\\n")
    for _ in range(20):
        os.write(1, (b"x" * 99 + b"\\n") * 1000)
    open(notes + "/written", "w").close()
    time.sleep(99)
while not os.path.exists(notes + "/written"):
    time.sleep(0.005)
sys.exit(4)
"""
    )
    path = tmp_path / "events"
    options = ["--nproc-per-node", 2, "-t1", "--log-dir", tmp_path / "logs", "--events", path]
    with (
        stalled_pipe() as (reading, writing),
        running_cli(*options, "--no-python", *worker, env={"NOTES": str(tmp_path)},
                    stdout=writing) as job,
    ):  # fmt: skip
        job.wait_err("attempt 0 failed: rank 1 .* exit code 4")
        os.dup2(reading, writing)  # only the launcher has the writing end now
        content = bytearray()
        while chunk := os.read(reading, 65536):
            content += chunk
        assert job.wait() == 4
    assert content.count(b"\n") == 20001
    assert set(bytes(content).splitlines()) == {b"[default0]:" + b"x" * 99}
    events = [event_from_json(line) for line in path.read_bytes().splitlines()]
    exited = next(e for e in events if isinstance(e, WorkerExited) and e.rank == 1)
    failed = next(e for e in events if isinstance(e, AttemptFailed))
    assert failed.time - exited.time < 3


def test_a_console_that_is_never_read(tmp_path: Path) -> None:
    """The launcher abandons a console blocked for 5 s, and exits with the job's code."""
    worker = python(
        "import os, sys; os.write(1, (b'x' * 99 + b'\\n') * 5000);"
        " os.write(2, (b'y' * 99 + b'\\n') * 5000); sys.exit(4)"
    )
    with (
        stalled_pipe() as (_, one),
        stalled_pipe() as (_, two),
        running_cli("-t1", "--log-dir", tmp_path / "1", "--no-python", *worker,
                    stdout=one) as only_stdout,
        running_cli("-t3", "--log-dir", tmp_path / "2", "--no-python", *worker,
                    stdout=two, stderr=two) as both,
    ):  # fmt: skip
        assert both.wait(60) == 4
        assert only_stdout.wait(60) == 4
        assert "stdout accepts no more output" in only_stdout.err
        assert "FAILED" in only_stdout.err
    for log in tmp_path.rglob("stdout.log"):
        assert log.stat().st_size == 500_000


def test_final_output_precedes_the_report(tmp_path: Path) -> None:
    """With stdout and stderr on one pipe, the last lines of a crashing worker come first."""
    worker = 'echo "last words" >&2; kill -SEGV $$'
    ended = run_program(in_pipeline("cat", "-t3", *BASH, worker, redirect="2>&1"))
    assert ended.out.index("[default0]:last words") < ended.out.index("bash FAILED")
    assert ended.out.index("bash FAILED") < ended.out.index("(SIGSEGV)")
    assert "    last words" in ended.out
    assert ended.out.splitlines()[-1] == "code 139"


def test_output_arrives_at_once(tmp_path: Path) -> None:
    """A line reaches a pipe while its worker is still running."""
    worker = 'echo first; until [ -e "$NOTES/go" ]; do sleep 0.01; done'
    reading, writing = os.pipe()
    try:
        with running_cli("-t1", *BASH, worker, env={"NOTES": str(tmp_path)},
                         stdout=writing) as job:  # fmt: skip
            os.close(writing)
            writing = -1
            assert os.read(reading, 100) == b"[default0]:first\n"
            (tmp_path / "go").touch()
            assert job.wait() == 0
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def test_progress_bars_into_a_pipe() -> None:
    """A pipe gets a few states of a progress bar as whole lines, including the last."""
    worker = python(
        "import os, time\n"
        "for n in range(200): os.write(1, b'\\r%d/200' % n); time.sleep(0.002)\n"
        "os.write(1, b'\\r200/200\\n')"
    )
    ended = run_program(in_pipeline("cat", "-t1", "--no-python", *worker))
    *lines, code = ended.out.splitlines()
    assert code == "code 0"
    assert lines[-1] == "[default0]:200/200"
    assert len(lines) <= 4
    assert all(re.fullmatch(r"\[default0\]:\d+/200", line) for line in lines)
    assert "\r" not in ended.out


def test_progress_bars_on_a_terminal(tmp_path: Path) -> None:
    """A terminal shows the states in place with the prefix, then the following line."""
    worker = python(
        """
import os, time
for n in range(5):
    os.write(1, b"\\r%d/5" % n)
    time.sleep(0.03)
os.write(1, b"\\r5/5\\nnext\\n")
"""
    )
    ended = run_program([sys.executable, "-c", ON_TERMINAL, *CLI, "run", "-t1",
                         "--color=never", "--no-python", *worker])  # fmt: skip
    assert ended.code == 0
    assert "\r\x1b[K[default0]:0/5" in ended.out
    shown, last = ended.out.split("aio-elastic: finished: ")
    assert shown.endswith("\r\x1b[K[default0]:5/5\r\n[default0]:next\r\n")
    assert (ended.out.count("\n"), last.count("\n")) == (4, 1)


def test_workers_inherit_the_terminal() -> None:
    """Without redirects a worker's streams are the terminal."""
    ended = run_program(
        [sys.executable, "-c", ON_TERMINAL, *CLI, "run", *BASH, "test -t 1 -a -t 2"]
    )
    assert ended.code == 0


def test_log_dir_dev_null_inherits_everything() -> None:
    """`--log-dir /dev/null` overrides --tee and --redirects, with a warning."""
    ended = run_cli("--log-dir", "/dev/null", "-t3", "-r3", *BASH, "echo x; echo y >&2")
    assert (ended.code, ended.out) == (0, "x\n")
    assert "no effect of --redirects and --tee" in ended.errors[0]
    assert "y" in ended.errors
    assert "0 restarts, no logs" in ended.err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    with small_disk(tmp_path / "disk", 128) as disk:
        yield disk


def test_a_full_log_disk(disk: Path) -> None:
    """The worker gets ENOSPC, the report names disk and file, and all written lines are shown."""
    worker = python(
        """
import os, sys
try:
    for n in range(100000):
        os.write(1, b"line %d\\n" % n)
except OSError as error:
    sys.exit(20 + (error.errno == 28))
"""
    )
    ended = run_cli("-t1", "-r2", "--log-dir", disk, "--no-python", *worker)
    assert ended.code == 21
    (log,) = disk.rglob("stdout.log")
    size = log.stat().st_size
    assert f"full: {disk} ({log}); the file ends after {size} bytes" in ended.err
    assert f"(no space left on device), they may be incomplete: {disk}" in ended.err
    kept = log.read_text().splitlines()
    assert len(kept) > 1000
    assert ended.out.splitlines() == [f"[default0]:{line}" for line in kept]
    assert "Traceback" not in ended.err


def test_a_log_disk_that_is_full_from_the_start(disk: Path) -> None:
    """The job succeeds, or ends with one line that names the disk."""
    fill(disk)
    for options in (["-t3"], []):
        ended = run_cli(*options, "--log-dir", disk, *BASH, "echo fine || exit 0")
        assert "Traceback" not in ended.err
        assert ended.code in (0, 1, 2)
        if ended.code:
            assert len(ended.errors) <= 2
            assert "no space left" in ended.errors[-1]
            assert str(disk) in ended.errors[-1]


LINES = 'for ((i = 0; i < 30000; i++)); do echo "$RANK $i"; done; echo "done $RANK" >&2'


def test_a_full_log_disk_and_the_console(disk: Path) -> None:
    """With `--on-full console` the job succeeds, and the console has all lines."""
    ended = run_cli(
        "--nproc-per-node", 2, "-t1", "-r2", "--on-full", "console", "--log-dir", disk, *BASH, LINES
    )  # fmt: skip
    assert ended.code == 0
    lines = ended.out.splitlines()
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[default{rank}]:")]
        assert own == [f"[default{rank}]:{rank} {i}" for i in range(30000)]
    full = f"(no space left on device), the console shows the rest: {disk}"
    assert ended.err.count(full) == 1
    written = len("".join(f"0 {i}\n" for i in range(30000)))
    for rank in range(2):
        (log,) = disk.rglob(f"{rank}/stdout.log")
        lost = written - log.stat().st_size
        assert (
            f"{lost} bytes of stdout of rank {rank} lost: its log file does not take them"
            in ended.err
        )
        # A redirected stream is shown from the moment when its file takes no more.
        assert f"[default{rank}]:done {rank}" in ended.err


def test_a_log_file_of_the_largest_size(tmp_path: Path) -> None:
    """Another error of a write is reported as what it is."""
    # Of the launcher only: the output of this program is a file too.
    shell = ["bash", "-c", '(ulimit -f 4; exec "$@") | cat; exit ${PIPESTATUS[0]}', "bash"]
    options = ["-t1", "--on-full=console", "--log-dir", str(tmp_path), *BASH]
    script = "for ((i = 0; i < 2000; i++)); do echo $i; done"
    ended = run_program([*shell, *CLI, "run", *options, script])
    assert ended.code == 0, ended.err
    assert ended.out == "".join(f"[default0]:{i}\n" for i in range(2000))
    assert "writes to the log files fail (file too large), the console shows" in ended.err
    assert "lost: its log file does not take them (file too large)" in ended.err


def test_a_log_disk_that_is_full_at_a_restart(disk: Path) -> None:
    """The second attempt has no log file; its output is on the console."""
    script = (
        'test $TORCHELASTIC_RESTART_COUNT = 1 && echo fine && exit 0; yes "$(printf %01000d)" |'
    )
    ended = run_cli("--max-restarts", 1, "-t3", "--on-full", "console", "--log-dir", disk, *BASH,
                    f"{script} head -n 500; exit 1")  # fmt: skip
    assert ended.code == 0, ended.err
    assert len(ended.out.splitlines()) == 501
    assert ended.out.splitlines()[-1] == "[default0]:fine"


def test_the_layout_of_logs(tmp_path: Path) -> None:
    """Directories and names are torchrun's, one directory per attempt and worker, and our files."""
    ended = run_cli("--nproc-per-node", 2, "--max-restarts", 1, "-r3", "--log-dir", tmp_path,
                    "--rdzv-id", "run/7", *BASH,
                    "test $RANK = 0 && exec sleep 99; echo $TORCHELASTIC_RESTART_COUNT; exit 1",
                    )  # fmt: skip
    assert ended.code == 1
    (directory,) = tmp_path.iterdir()
    assert re.fullmatch(r"run_7_[\w.-]+_\w{8}", directory.name)
    assert sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()) == [
        f"attempt_{attempt}/{rank}/{name}.log"
        for attempt in range(2)
        for rank in range(2)
        for name in ("stderr", "stdout")
    ] + ["events.jsonl", "node.json", "report.txt", "run.json"]
    assert (directory / "attempt_1/1/stdout.log").read_text() == "1\n"
    assert f"Logs: {directory}" in ended.err


def test_a_busy_console_is_shared_fairly(tmp_path: Path) -> None:
    """A worker that writes all the time does not delay the lines of another worker."""
    worker = """
    if [ $RANK = 0 ]; then
        trap 'exit 0' TERM
        while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done
    fi
    sleep 0.2; echo here; until [ -e $NOTES/go ]; do sleep 0.01; done; exit 3
    """
    with running_cli("--nproc-per-node", 2, "-t1", *BASH, worker,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        job.wait_out(r"^\[default1\]:here$")
        (tmp_path / "go").touch()
        assert job.wait() == 3


def test_many_workers_that_exit_at_once_are_drained(tmp_path: Path) -> None:
    """All lines of 48 workers are shown."""
    ended = run_cli("--nproc-per-node", 48, "-t3", *BASH, "echo $RANK; echo $RANK >&2")
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == sorted(f"[default{n}]:{n}" for n in range(48))
    assert sum(line.startswith("[default") for line in ended.errors) == 48
