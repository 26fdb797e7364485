"""What the ranks of a job write to a console that they share: each line in one piece."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.children import DEADLINE_S
from tests.support.cli import CLI, REPOSITORY, run_cli, run_program, running, running_cli

pytestmark = pytest.mark.e2e

ON_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
# Each rank prints as trainers do, handles SIGTERM, and has a child that prints too.
TRAINER = """
import multiprocessing, os, signal, sys

rank = os.environ["RANK"]

def say(who):
    for step in range(2000):
        print(f"{who} {rank}", "step", step, "loss", "0.25" * 9)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    child = multiprocessing.get_context("fork").Process(target=say, args=("loader",))
    child.start()
    say("rank")
    child.join()
"""
LINE = re.compile(r"(?:rank|loader) [0-3] step \d+ loss (?:0\.25){9}")


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("is_terminal", [False, True])
def test_ranks_that_share_a_console_do_not_tear_lines(is_terminal: bool, trainer: Path) -> None:
    terminal = [sys.executable, "-c", ON_TERMINAL] if is_terminal else []
    ended = run_program([*terminal, *CLI, "run", "--nproc-per-node=4", str(trainer)])
    lines = [line for line in ended.out.splitlines() if "aio-elastic: " not in line]
    assert ended.code == 0
    assert len(lines) == 16000
    assert [line for line in lines if not LINE.fullmatch(line)] == []


@contextmanager
def job_with_writes(
    *args: object, env: dict[str, str | None] | None = None, cwd: Path | None = None
) -> Iterator[Iterator[str]]:
    """Run a job whose output is a socket; yield it, and the writes of its workers one by one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    env = {"PYTHONUNBUFFERED": None, **(env or {})}
    with ours, running_cli(*args, env=env, cwd=cwd, stdout=theirs) as job:
        theirs.close()
        yield iter(lambda: ours.recv(1 << 17).decode(), "")
        assert job.wait() == 0


PRINTS = """
import os, sys
print("rank", os.environ["RANK"], {"loss": 0.5})
print("two\\nlines")
print("x" * 60000)
sys.stdout.buffer.write(b"bytes, ")
os.write(1, b"and more\\n")
print("\\r10%", end="")
print("\\r20%", end="")
print(" epoch 1", end="", flush=True)
print(" ends")
print("an error", file=sys.stderr)
os._exit(0)
"""
WRITES = ["rank 0 {'loss': 0.5}\n", "two\n", "lines\n", "x" * 60000 + "\n", "bytes, ", "and more\n",
          "\r10%", "\r20%", " epoch 1", " ends\n"]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["prints.py"],
        ["-m", "prints"],
        ["--start-method=forkserver", "prints.py"],
        ["--start-method=forkserver", "-m", "prints"],
        ["--run-path", "prints.py"],
        ["--run-path", "--start-method=fork", "prints.py"],
        ["--run-path", "--start-method=forkserver", "prints.py"],
    ],
    ids=" ".join,
)
def test_a_line_is_one_write(words: list[str], tmp_path: Path) -> None:
    """Each is written when it ends, also before an end that writes out nothing."""
    (tmp_path / "prints.py").write_text(PRINTS)
    for value in (None, "", "0", "1"):  # the last one is that of many images
        with job_with_writes(*words, env={"PYTHONUNBUFFERED": value}, cwd=tmp_path) as writes:
            assert [*writes] == WRITES


def test_the_error_of_a_script_is_written_by_lines(tmp_path: Path) -> None:
    """An interpreter that buffers nothing writes a traceback in small pieces."""
    (tmp_path / "fails.py").write_text("def fail():\n    raise ValueError('x')\nfail()\n")
    theirs = ["--log-dir=/dev/null", "--max-restarts=0", "fails.py"]  # inherits standard error
    ours, output = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    with ours, running_cli(*theirs, cwd=tmp_path, stderr=output) as job:
        output.close()
        writes = [*iter(lambda: ours.recv(1 << 17).decode(), "")]
        assert job.wait() == 1
    assert "ValueError: x\n" in writes
    assert [text for text in writes if not text.endswith("\n")] == []


def test_a_user_who_wants_no_buffer_has_none(tmp_path: Path) -> None:
    """By the variable of the job: then text without an end is seen too."""
    program = tmp_path / "prints.py"
    program.write_text("import os, sys\nprint('a')\nsys.stdout.write('b')\nos._exit(0)")
    launcher = tmp_path / "launcher.py"
    launcher.write_text(
        "from elastic_aio import LaunchSpec, run\n"
        f"run(LaunchSpec({str(program)!r}, env={{'PYTHONUNBUFFERED': '1'}}))"
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    with ours, running([sys.executable, str(launcher)], stdout=theirs) as job:
        theirs.close()
        assert [*iter(lambda: ours.recv(1 << 17).decode(), "")] == ["a", "\n", "b"]
        assert job.wait() == 0


def test_what_the_workers_programs_print_is_not_delayed(tmp_path: Path) -> None:
    """A Python that a worker starts writes at once, as by `-u`."""
    child = "import os, sys; sys.stdout.write('child'); os._exit(0)"
    (tmp_path / "starts.py").write_text(
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {child!r}])\nprint(' ends')\n"
    )
    with job_with_writes("starts.py", cwd=tmp_path) as writes:
        assert [*writes] == ["child", " ends\n"]
    ended = run_cli("--no-python", sys.executable, "-c", child, env={"PYTHONUNBUFFERED": None})
    assert ended.out == "child"


def test_a_job_within_a_job_writes_lines_too(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text("print('inner', 1)")
    command = [*CLI, "run", "inner.py"]
    (tmp_path / "outer.py").write_text(f"import subprocess\nsubprocess.run({command!r})")
    with job_with_writes("outer.py", cwd=tmp_path) as writes:
        assert [*writes] == ["inner 1\n"]


def test_a_prompt_is_seen_before_the_answer(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("print('hello', input('name? '))")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(DEADLINE_S)
    with (
        ours,
        running_cli(
            "--stdin=rank0", "asks.py", cwd=tmp_path, stdin_pipe=True, stdout=theirs
        ) as job,
    ):
        theirs.close()
        assert ours.recv(100) == b"name? "
        assert job.process.stdin is not None
        job.process.stdin.write(b"world\n")
        job.process.stdin.flush()
        assert ours.recv(100) == b"hello world\n"
        assert job.wait() == 0


def test_a_program_between_the_launcher_and_the_interpreter(tmp_path: Path) -> None:
    """The script finds its path as the program has made it, and lines are whole."""
    wrapper = tmp_path / "python"
    wrapper.write_text(
        f'#!/bin/sh\nexport PYTHONPATH=/added:$PYTHONPATH\nexec {sys.executable} "$@"\n'
    )
    wrapper.chmod(0o755)
    (tmp_path / "prints.py").write_text("import os\nprint(1, os.environ['PYTHONPATH'])")
    env = {"PYTHONPATH": os.pathsep.join(["/former", str(REPOSITORY)])}
    env["PYTHON_EXEC"] = str(wrapper)
    with job_with_writes("prints.py", env={**env}, cwd=tmp_path) as writes:
        assert [*writes] == [f"1 /added:{env['PYTHONPATH']}\n"]
