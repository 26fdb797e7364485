"""Random short jobs, each with one random injury, leave nothing behind and lose no line.

`ELASTIC_AIO_CHAOS` is the number of jobs (then a missing tool is an error and no skip), and
`ELASTIC_AIO_CHAOS_SEED` the seed.  A failure names the seed and the number of its job;
`ELASTIC_AIO_CHAOS_JOB=7` runs that one job of each family.
"""

from __future__ import annotations

import functools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chaos_program import PADDING
from tests.support.cli import CLI, REPOSITORY, environment
from tests.support.injuries import FAMILIES, Injury, surroundings
from tests.support.leaks import marked_processes

pytestmark = pytest.mark.e2e

JOBS = int(os.environ.get("ELASTIC_AIO_CHAOS", "40"))
SEED = os.environ.get("ELASTIC_AIO_CHAOS_SEED", "0")
ONLY = os.environ.get("ELASTIC_AIO_CHAOS_JOB")

# A job takes less than a second; the stop plan is short.
_HANG_S = 45.0
# Processes are gone a second after the launcher; the rest is for a busy host.
_GONE_S = 5.0
_VARIABLE = "ELASTIC_AIO_CHAOS_ID"
_LINE = re.compile(rf"^(?:\[\w+\]:)*line (\d+) (\d+) {PADDING}$")

# Writes numbered lines like `chaos_program.work`, with builtins only: a fork may be impossible.
_SHELL_WORKER = f"""
i=0
while [ $i -lt 30 ]; do
  echo "line $$ $i {PADDING}" || exit 9
  printf . >> "$NOTES/$$"
  i=$((i + 1))
done
read -t 0.1 <> "$NOTES/fifo"
if [ "$RANK$TORCHELASTIC_RESTART_COUNT$FAILS" = 00yes ]; then exit 3; fi
"""
_DAEMON = "(setsid sleep 99 > /dev/null 2>&1 &)\n"
_STUBBORN = "trap '' TERM INT; sleep 99 > /dev/null 2>&1 &\n"


@dataclass(frozen=True)
class Job:
    """A command that starts a job, and which of its workers' lines the console shows."""

    kind: str
    argv: list[str]
    is_shown: bool


def make_job(chance: random.Random, directory: Path, *, may_fork: bool) -> Job:
    """Return a random job, its logs in `directory`."""
    kind = chance.choice(["command", "command", "script", "preload", "run-path", "nested",
                          "spawn", "fork", "forkserver"])  # fmt: skip
    streams = chance.choice([["-r", "3"], ["-t", "3"], ["-t", "1", "-r", "3"], []])
    is_shown = streams != ["-r", "3"]
    run = [*CLI, "run", "--nproc-per-node", str(chance.randint(1, 3)), *streams]
    run += ["--log-dir", str(directory / "logs"), "--shutdown-timeout", "0.5"]
    run += ["--max-restarts", str(chance.randint(0, 1))]
    program = str(REPOSITORY / "tests/support/chaos_program.py")
    daemon = chance.choice(["", "", "program", "fork"]) if may_fork else ""
    work = [program, "30", chance.choice(["fails", ""]), "0.1", daemon]
    first = chance.choice(["", "", "FAILS=yes\n", _DAEMON, _STUBBORN]) if may_fork else ""
    shell = ["--no-python", "bash", "-c", first + _SHELL_WORKER]
    loop = chance.choice(["asyncio", "uvloop"])
    if kind == "command":
        argv = [*run, "--loop", loop, *shell]
    elif kind == "script":
        argv = [*run, *work]
    elif kind == "preload":
        argv = [*run, "--preload", "json", *work]
    elif kind == "run-path":
        argv = [*run, "--run-path", *work]
    elif kind == "nested":
        inner = [*CLI, "run", "--nproc-per-node", "2", "--shutdown-timeout", "0.3"]
        argv = [*run, "--no-python", *inner, *shell]
    else:
        launch = ["-m", "tests.support.chaos_program", "launch", kind, loop]
        # A program that adopts no orphans cannot find a fork of a forked worker.
        daemon = "program" if daemon and kind == "fork" else daemon
        return Job(kind, [sys.executable, *launch, str(directory / "logs"), daemon], is_shown=True)
    return Job(kind, argv, is_shown)


@functools.cache
def profile(kind: str) -> list[str]:
    """Return the system calls of an uninjured launcher of a kind of job."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        chance = random.Random(kind)
        while (job := make_job(chance, directory, may_fork=False)).kind != kind:
            pass
        (directory / "notes").mkdir()
        trace = ["strace", "-D", "-qq", "-e", "signal=none", "-o", str(directory / "trace")]
        env = job_environment(directory, "profile")
        subprocess.run([*trace, *job.argv], env=env, capture_output=True, check=False,
                       cwd=REPOSITORY)  # fmt: skip
        return re.findall(r"^(\w+)\(", (directory / "trace").read_text(), re.MULTILINE)


def job_environment(directory: Path, mark: str) -> dict[str, str]:
    """Return the environment of a job with its mark."""
    (directory / "disk").mkdir(exist_ok=True)
    changes = {_VARIABLE: mark, "NOTES": str(directory / "notes"), "LOGLEVEL": "INFO",
               "TMPDIR": str(directory / "disk"), "PYTHONFAULTHANDLER": "1"}  # fmt: skip
    return environment(changes)


def processes(mark: str) -> dict[int, str]:
    """Return the processes of a job that run, with their commands."""
    found = marked_processes(_VARIABLE, mark)
    return {pid: command for pid, command in found.items() if not command.startswith("strace ")}


class Run:
    """One injured job, and what is wrong after it."""

    def __init__(self, directory: Path, family: str, number: int) -> None:
        chance = random.Random(f"{SEED}/{family}/{number}")
        self._directory = directory
        self._disk = directory / "disk"
        self._mark = uuid.uuid4().hex
        (directory / "notes").mkdir()
        os.mkfifo(directory / "notes/fifo")
        self._job = make_job(chance, self._disk, may_fork=family != "full process table")
        self._env = job_environment(directory, self._mark)
        self.injury: Injury = FAMILIES[family].make(chance, lambda: profile(self._job.kind))
        self.problems: list[str] = []
        self.code: int | None = None

    def run(self) -> None:
        """Run the job to its end, and look for what is left."""
        with surroundings(self.injury, self._disk) as words:
            with (self._directory / "out").open("wb") as out, \
                 (self._directory / "err").open("wb") as err:  # fmt: skip
                process = subprocess.Popen([*words, *self._job.argv], env=self._env, stdout=out,
                                           stderr=err, stdin=subprocess.DEVNULL,
                                           cwd=REPOSITORY)  # fmt: skip
                self._wait(process)
                self._check_processes()
                process.wait()
            self._check_end()
            self._check_lines()
            self._check_report()
            self._check_files()

    def describe(self) -> str:
        """Return all that is known, for people."""
        out, err = self._text("out"), self._text("err")
        return "\n".join([
            f"{self._job.kind}, {self.injury.text}: exit code {self.code}",
            *(f"  PROBLEM: {problem}" for problem in self.problems),
            f"  command: {shlex.join([*self.injury.argv, *self._job.argv])}",
            f"  stdout: {len(out)} characters, stderr:",
            *(f"    {line}" for line in err.splitlines()[-40:]),
        ])  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _HANG_S
        if self.injury.strike is not None:
            try:
                process.wait(self.injury.delay)
            except subprocess.TimeoutExpired:
                self.injury.strike(processes(self._mark))
        try:
            self.code = process.wait(end - time.monotonic())
        except subprocess.TimeoutExpired:
            self.problems.append(f"the launcher runs after {_HANG_S:g} s: {processes(self._mark)}")
            process.send_signal(signal.SIGABRT)  # prints its stacks
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()

    def _check_processes(self) -> None:
        end = time.monotonic() + (_GONE_S if self.code == -signal.SIGKILL else 1.0)
        while (left := processes(self._mark)) and time.monotonic() < end:
            time.sleep(0.01)
        if left:
            self.problems.append(f"processes are left: {left}")
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _check_end(self) -> None:
        err = self._text("err")
        if self.code == -signal.SIGABRT and "uvloop/__init__.py" in err:
            return  # libuv aborts where it cannot make its pipes
        if self.code is not None and self.code < 0 and not self.injury.kills:
            self.problems.append(f"the launcher was ended by signal {-self.code}")
        # CPython's own, of a loop that could not be made.
        err = err.replace("Exception ignored in: <function BaseEventLoop.__del__", "")
        for text in ("please report", "never retrieved", "Exception ignored"):
            if text in err:
                self.problems.append(f"stderr has {text!r}")

    def _check_lines(self) -> None:
        """Compare the lines in the log files and on the console with the workers' notes."""
        notes = [path for path in (self._directory / "notes").iterdir() if path.name.isdecimal()]
        accepted = {int(path.name): path.stat().st_size for path in notes}
        files = [path.read_text() for path in self._disk.rglob("*.log")]
        logged = _lines("".join(files))
        shown = _lines(self._text("out"))
        for pid, count in accepted.items():
            written = logged.get(pid) or shown.get(pid, [])
            if written not in (list(range(count)), list(range(count + 1))):
                self.problems.append(f"worker {pid} wrote {count} lines, found are {written}")
            is_lost = len(shown.get(pid, [])) < count and self._job.is_shown
            if (
                is_lost
                and self.code != -signal.SIGKILL
                and "no more output" not in self._text("err")
            ):
                self.problems.append(
                    f"worker {pid} wrote {count} lines, shown are {len(shown.get(pid, []))}"
                )
            if shown.get(pid, []) != list(range(len(shown.get(pid, [])))):
                self.problems.append(f"of worker {pid} these lines are shown: {shown[pid]}")
        if self.code == 0 and not any(count >= 30 for count in accepted.values()):
            self.problems.append(f"a success without complete workers: {accepted}")

    def _check_report(self) -> None:
        path = self._directory / "notes/report"
        content = path.read_bytes() if path.exists() else b""
        if not content:
            if self._job.kind in ("spawn", "fork", "forkserver") and self.code == 0:
                self.problems.append("the program ended without a report")
            return
        report = json.loads(content)
        if "Cannot close a running event loop" in report["end"]:
            return  # uvloop's, whose loop has no descriptor left for its pipe
        if report["end"].startswith(("unexpected", "internal", "values")):
            self.problems.append(report["end"])
        if report["descriptors"] or report["threads"]:
            self.problems.append(f"left in the program: {report}")

    def _check_files(self) -> None:
        replaced = {"node.json", "run.json", "events.jsonl", "report.txt"}
        logs = {"stdout.log", "stderr.log", "error.json", *replaced}
        if self.code == -signal.SIGKILL:
            logs |= {f"{name}.new" for name in replaced}
        other = [str(path) for path in self._disk.rglob("*")
                 if path.is_file() and path.name not in logs]  # fmt: skip
        if other:
            self.problems.append(f"files are left: {other}")

    def _text(self, name: str) -> str:
        return (self._directory / name).read_text(errors="replace")


def _lines(text: str) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_injured_jobs(family: str, tmp_path: Path) -> None:
    """No process, descriptor, thread, temporary file or lost line is found."""
    reason = FAMILIES[family].why_impossible()
    if reason and "ELASTIC_AIO_CHAOS" not in os.environ:
        pytest.skip(reason)
    assert not reason
    count = -(-JOBS // len(FAMILIES))
    failed = []
    for number in range(count) if ONLY is None else [int(ONLY)]:
        directory = tmp_path / str(number)
        directory.mkdir()
        run = Run(directory, family, number)
        run.run()
        if run.problems:
            failed.append(f"seed {SEED}, job {number}: {run.describe()}")
        print(f"{family} {number}: {run.injury.text}: {run.code}")
    assert not failed, f"{len(failed)} of {count} jobs\n" + "\n\n".join(failed)
