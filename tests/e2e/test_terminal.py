"""Standard input of local rank 0 is the terminal of a launcher in the foreground."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.e2e.test_signals import in_state
from tests.support.children import DEADLINE_S, until_sync
from tests.support.cli import CLI, environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

AT_TERMINAL = [
    sys.executable,
    "-c",
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execvp(sys.argv[1], sys.argv[1:])",
]
PROMPT = "ready> "
RUN = [*CLI, "run", "--nproc-per-node", "2"]

INPUT = 'print("got", input("choice? "))'
PDB = "import pdb; x = 41\npdb.set_trace()\nprint('after', x)"
GETPASS = 'import getpass; print("key of", len(getpass.getpass("API key: ")))'
RAW = 'import sys, time, tty; tty.setraw(0); print("in raw")'
OTHER = "import os, time\nif os.environ['RANK'] == '1':\n    {}\n"


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, argv: list[str]) -> None:
        self.keyboard, self.descriptor = os.openpty()
        self.before = self.mode
        files: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), self.descriptor)
        argv = [*AT_TERMINAL, *argv]
        self.process = subprocess.Popen(
            argv, **files, env=environment({"PS1": PROMPT}), start_new_session=True
        )
        self.text = ""

    @property
    def mode(self) -> list[Any]:
        return termios.tcgetattr(self.descriptor)

    def wait_text(self, pattern: str) -> re.Match[str]:
        """Wait until the terminal shows a pattern; what was found is forgotten."""
        while (match := re.search(pattern, self.text)) is None:
            ready, _, _ = select([self.keyboard], [], [], DEADLINE_S)
            assert ready, (pattern, self.text)
            self.text += os.read(self.keyboard, 65536).decode(errors="replace")
        self.text = self.text[match.end() :]
        return match

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def wait(self) -> int:
        """Wait for the end, which is shown."""
        self.wait_text("aio-elastic: .*(finished|failed|stopped|FAILED)")
        return self.process.wait(DEADLINE_S)


@contextmanager
def terminal(*argv: object) -> Iterator[Terminal]:
    one = Terminal([*map(str, argv)])
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()
        os.close(one.keyboard)
        os.close(one.descriptor)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "ask.py"


def write(script: Path, rank_0: str, others: str = "pass") -> Path:
    script.write_text(f"{OTHER.format(others)}else:\n    " + rank_0.replace("\n", "\n    "))
    return script


@pytest.mark.parametrize(
    ("program", "dialogue"),
    [
        (INPUT, [(r"choice\? ", "2\n"), ("got 2", "")]),
        (PDB, [(r"\(Pdb\) ", "p x + 1\n"), ("42", "s\n"), ("after 41", "c\n")]),
        (GETPASS, [("API key: ", "secret\n"), ("key of 6", "")]),
    ],
    ids=["input", "pdb", "getpass"],
)
def test_a_worker_asks_at_the_terminal(
    program: str, dialogue: list[tuple[str, str]], script: Path
) -> None:
    """As in a program without launcher, also for a debugger's steps."""
    with terminal(*RUN, write(script, program)) as one:
        for shown, typed in dialogue:
            found = one.wait_text(rf"(?s).*?{shown}")
            assert "--Call--" not in found[0]
            one.type(typed)
        assert one.wait() == 0
        assert one.mode == one.before


@pytest.mark.parametrize("scope", ["group", "worker"])
def test_only_local_rank_0_has_the_terminal(scope: str, script: Path) -> None:
    script.write_text("import os, sys; print('rank', os.environ['RANK'], sys.stdin.isatty())")
    with terminal(*RUN, "--restart-scope", scope, script) as one:
        shown = one.wait_text(r"(?s)rank \d.*?rank \d \w+")[0]
        assert one.wait() == 0
    assert {*re.findall(r"rank \d \w+", shown)} == {"rank 0 True", "rank 1 False"}


@pytest.mark.parametrize("words", [["run", "--stdin", "null"], ["up"]])
def test_programs_without_the_terminal(words: list[str], script: Path) -> None:
    """By choice, and several programs of a group, of which none is asked."""
    script.write_text("import os, time; print(os.path.realpath('/proc/self/fd/0')); time.sleep(99)")
    if words == ["up"]:
        procfile = script.with_name("Procfile")
        procfile.write_text(f"0: {sys.executable} {script}\nb: {sys.executable} {script}\n")
        argv = [*CLI, "up", procfile]
    else:
        argv = [*CLI, *words, script]
    with terminal(*argv) as one:
        for _ in range(2 if words == ["up"] else 1):
            assert "/dev/pts" not in one.wait_text("(?s).*?/dev/null")[0]
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(DEADLINE_S)


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "a failure", "SIGKILL", "a restart"])
def test_the_terminal_has_its_mode_again(end: str, script: Path) -> None:
    """Whatever ends the worker that has changed it."""
    restart = ["--max-restarts", 1, "--restart-delay", 0] if end == "a restart" else []
    note = str(script.with_name("raw"))
    program = f"{RAW}; open({note!r}, 'w').close(); time.sleep(99)"
    fails = f"while not os.path.exists({note!r}): time.sleep(0.01)\n    os.unlink({note!r})\n"
    fails += "    os._exit(3)"
    if end == "SIGKILL":
        program = f"{RAW}; import os; os.kill(os.getpid(), 9)"
    write(script, program, fails if end in ("a failure", "a restart") else "time.sleep(99)")
    with terminal(*RUN, *restart, script) as one:
        for _ in range(2 if restart else 1):
            one.wait_text("in raw")
        if end.startswith("SIG") and end != "SIGKILL":
            assert one.mode != one.before
            one.process.send_signal(getattr(signal, end))
        code = one.wait()
        assert code == {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": 137}.get(end, 3)
        assert one.mode == one.before


def test_job_control_of_a_shell(script: Path) -> None:
    """A job that begins in the background reads nothing; Ctrl-Z and `fg` lose no input."""
    write(script, "print(os.getpid(), 'has', os.path.realpath('/proc/self/fd/0'))\n" + INPUT)
    script.with_name("run").write_text(shlex.join([*map(str, RUN), str(script)]))
    with terminal("bash", "--norc", "-i") as one:
        one.wait_text(PROMPT)
        one.type(f"set -o notify; . {script.with_name('run')} &\n")
        one.wait_text("has /dev/null")
        one.wait_text("EOFError")
        one.wait_text("Exit 1")
        one.type(f". {script.with_name('run')}\n")
        pid = int(one.wait_text(r"(\d+) has /dev/pts")[1])
        one.wait_text(r"choice\? ")
        one.type("\x1a")
        one.wait_text("Stopped")
        until_sync(in_state("T", pid), "a worker that reads no more")
        one.wait_text(PROMPT)
        one.type("fg\n")
        one.wait_text(r"run\n?")
        one.type("7\n")
        one.wait_text("got 7")
        one.wait_text("finished")
        one.wait_text(PROMPT)
        one.type("exit\n")
        assert one.process.wait(DEADLINE_S) == 0
