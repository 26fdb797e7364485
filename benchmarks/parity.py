"""`python -m benchmarks.parity`: run small jobs by torchrun and by `aio-elastic run`, and compare.

Of each case (`benchmarks/parity_cases.py`) it compares the exit codes, the output, the log
files, the variables and starts of the workers, the signals that they received, the failure
report, the copied error file, and the processes and temporary files that are left.  What
differs must be declared with its reason and, mostly, with both values.  It exits with 1 if
a difference is not declared, or a declared one does not exist.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.launchers import environment_changes
from benchmarks.parity_cases import ANY, CASES, REASONS, Case
from tests.support.cli import environment
from tests.support.leaks import marked_processes
from tests.support.sockets import free_port, listening

WORKER = Path(__file__).parent / "workers/parity.py"
_MARK = "PARITY_NOTES"
_HOST = socket.gethostname().partition(".")[0]
_OWN_FILES = ("node.json", "run.json", "events.jsonl", "report.txt")
"""Files of a run's directory that torchrun does not have."""
_LEFT_S = 2.0
"""Seconds that processes may outlive their launcher before they count as left behind."""

_OPTION = re.compile(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)\b", re.MULTILINE)
_STEPS_S = 300.0
_ENDLESS = "does not end"

Values = dict[str, Any]
"""What was observed of one job, by the aspect."""


class Job:
    """One case by one launcher, in a directory of its own.

    Args:
        case: the case.
        launcher: its command.
        directory: an empty directory.
    """

    def __init__(self, case: Case, launcher: Sequence[str], directory: Path) -> None:
        self._case = case
        self._launcher = launcher
        self._directory = directory
        self._notes = directory / "notes"
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._port = str(free_port())
        for name in ("notes", "tmp", "cwd"):
            (directory / name).mkdir()

    def run(self) -> Values:
        """Run the case to its end; return what was observed."""
        end = time.monotonic() + _STEPS_S
        codes: list[int | str] = []
        with ExitStack() as stack:
            try:
                for node in range(len(self._case.nodes)):
                    if f"start {node}" not in self._case.steps:
                        self._start(node, stack)
                for step in self._case.steps:
                    self._do(step, end, stack)
                end = time.monotonic() + self._case.limit
                codes += [self._wait(node, end) for node in sorted(self._nodes)]
                left = [] if _ENDLESS in codes else self._wait_left(time.monotonic() + _LEFT_S)
                signals = self._signals()  # before those of a guardian, or none
            finally:
                self._kill_all()
        code = codes[0] if len(codes) == 1 else codes
        return {"code": code, "left": left, "signals": signals, **self._observe()}

    def _start(self, node: int, stack: ExitStack) -> None:
        words = [*shlex.split(self._case.nodes[node]), *shlex.split(self._case.words)]
        command = [*shlex.split(self._case.prefix), *self._launcher, *map(self._fill, words)]
        out, err = (
            stack.enter_context((self._directory / f"{name}.{node}").open("wb"))
            for name in ("out", "err")
        )
        (self._directory / "stdin").write_bytes(self._case.stdin)
        stdin = stack.enter_context((self._directory / "stdin").open("rb"))
        changes: dict[str, str | None] = {
            **environment_changes(),
            "OMP_NUM_THREADS": None,
            "TMPDIR": str(self._directory / "tmp"),
            _MARK: str(self._notes),
            **{name: self._fill(value) for name, value in self._case.env.items()},
        }
        self._nodes[node] = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=self._directory / "cwd",
            env=environment(changes),
            start_new_session=True,
        )

    def _fill(self, word: str) -> str:
        values = {"w": WORKER, "port": self._port, "dir": self._directory, "py": sys.executable}
        for name, value in values.items():
            word = word.replace("{" + name + "}", str(value))
        return word

    def _do(self, step: str, end: float, stack: ExitStack) -> None:
        """Perform a step; see `Case.steps`."""
        verb, _, rest = step.partition(" ")
        if verb == "ready":
            self._until(lambda: len(self._noted("ready")) >= int(rest), step, end)
        elif verb == "note":
            self._until(lambda: bool(self._noted(rest)), step, end)
        elif verb == "listen":
            self._until(lambda: bool(listening([int(self._port)])), step, end)
        elif verb == "start":
            self._start(int(rest), stack)
        else:
            node, name = rest.split()
            self._nodes[int(node)].send_signal(getattr(signal, name))

    def _until(self, condition: Callable[[], bool], what: str, end: float) -> None:
        while not condition() and time.monotonic() < end:
            if all(process.poll() is not None for process in self._nodes.values()):
                return
            time.sleep(0.02)

    def _noted(self, text: str) -> list[str]:
        return [name for name in os.listdir(self._notes) if name.partition(" ")[2] == text]

    def _wait(self, node: int, end: float) -> int | str:
        try:
            code = self._nodes[node].wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return _ENDLESS
        return 128 - code if code < 0 else code

    def _wait_left(self, end: float) -> list[str]:
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return sorted(_kind_of(pid) for pid in left)

    def _processes(self) -> list[int]:
        """Return the processes of this job, its launchers left out."""
        launchers = {process.pid for process in self._nodes.values()}
        return [*marked_processes(_MARK, str(self._notes), since=launchers)]

    def _kill_all(self) -> None:
        for process in self._nodes.values():
            process.kill()
            process.wait()
        while left := self._processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def _observe(self) -> Values:
        return {
            "out": sorted(self._text("out").split("\n")),
            "err": sorted(filter(_of_worker, self._text("err").splitlines())),
            "starts": self._starts(),
            "env": self._environments(),
            "logs": self._logs(),
            "report": self._reports(),
            "error": self._error_file(),
            "tmp": self._temporary_files(),
            "help": sorted(set(_OPTION.findall(self._text("out")))),
        }

    def _path(self, name: str) -> Path:
        return self._directory / name

    def _text(self, stream: str) -> str:
        paths = sorted(self._directory.glob(f"{stream}.[0-9]"))
        text = "".join(path.read_bytes().decode("utf-8", "backslashreplace") for path in paths)
        return self._normal(text)

    def _normal(self, text: str) -> str:
        return text.replace(str(self._directory), "DIR").replace(self._port, "PORT")

    def _signals(self) -> list[str]:
        return sorted(name for name in os.listdir(self._notes) if " got " in name)

    def _starts(self) -> list[str]:
        found = [name.split() for name in os.listdir(self._notes) if " started " in name]
        return sorted(f"attempt {attempt}: rank {rank}" for rank, _, attempt, _ in found)

    def _environments(self) -> dict[str, Any]:
        found = {}
        for path in sorted(self._notes.glob("env.*")):
            variables = json.loads(self._normal(path.read_text()))
            variables.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # a message within torchrun
            for name, value in variables.items():
                variables[name] = self._normal_variable(name, value)
            found[path.name.removeprefix("env.")] = variables
        return found

    def _normal_variable(self, name: str, value: str) -> str:
        if name == "TORCHELASTIC_RUN_ID" and re.fullmatch(r"[0-9a-f-]{16,36}", value):
            return "RANDOM"
        if name == "MASTER_PORT" and value != "PORT":
            return "29500" if value == "29500" else "FREE"
        if name == "TORCHELASTIC_ERROR_FILE" and value:
            # A worker without log files has no directory of its own (docs/guides/logs.md).
            value = re.sub(r"/error_(\d+)\.json$", r"/\1/error.json", value)
            return "/".join(["RUN", *Path(value).parts[-3:]])
        if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1"):
            return "LOOPBACK"
        return value

    def _logs(self) -> dict[str, str]:
        """Return the content of each file under the log directory; "" for a directory."""
        root = self._path("logs")
        found = {}
        for path in sorted(root.rglob("*")) if root.is_dir() else []:
            if path.name in _OWN_FILES:
                continue
            run, *rest = path.relative_to(root).parts
            # A run id that was not given is random, and all are followed by a random suffix,
            # which in elastic_aio the host precedes.
            run = run.replace(f"_{_HOST}_", "_")
            run = re.sub(r"^[0-9a-f-]{16,36}_", "RANDOM_", re.sub(r"_\w{8}$", "_SUFFIX", run))
            content = path.read_text("utf-8", "backslashreplace") if path.is_file() else ""
            if path.name.startswith("filtered_"):  # of several ranks, in any order
                content = "".join(sorted(content.splitlines(keepends=True)))
            found["/".join([run, *rest])] = self._normal(content)
        return found

    def _reports(self) -> list[Any]:
        """Return the last report of each node: its failures by rank, and the root cause."""
        found = []
        for path in sorted(self._directory.glob("err.[0-9]")):
            text = self._normal(path.read_text("utf-8", "backslashreplace"))
            reports = re.findall(r"^=+\n([^\n]+) FAILED\n-+\n(.*?)\n=+$", text, re.M | re.S)
            for name, body in reports[-1:]:
                others, _, root = body.partition("Root Cause (first observed failure):")
                report = {"name": name, "root": _failures(root), "others": _failures(others)}
                found.append(report)
        return found

    def _temporary_files(self) -> list[str]:
        """Return their names without random suffixes; torch's compiler is not the launcher's."""
        names = (name for name in os.listdir(self._path("tmp")) if "inductor" not in name)
        return sorted(re.sub(r"^(torchelastic|elastic_aio)_.*", "LOGS", name) for name in names)

    def _error_file(self) -> Any:
        path = self._path("error.json")
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            return type(error).__name__
        message = content.get("message")
        if isinstance(message, dict):
            message.pop("extraInfo", None)
        return message


def _of_worker(line: str) -> bool:
    """Return whether a worker has written a line, and no launcher has repeated it."""
    return "W " in line and not line.startswith((" ", "aio-elastic: "))


def _kind_of(pid: int) -> str:
    """Return what a process is, without what differs from run to run."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return "worker" if os.fsencode(WORKER) in words else Path(os.fsdecode(words[0])).name


def _failures(text: str) -> dict[str, dict[str, str]]:
    """Return the fields of each failure in a part of a report, by rank.

    Without an error file torchrun has a link in place of a traceback, and elastic_aio the
    reason: not compared.
    """
    found = {}
    for block in re.split(r"^\[\d+\]:\n", text, flags=re.M)[1:]:
        fields = dict(re.findall(r"^  (\w+) *: (.*)$", block, re.M))
        rank = fields["rank"].split()[0]
        found[rank] = {
            "exitcode": re.sub(r" +", " ", re.sub(r" *\(pid: \d+\)", "", fields["exitcode"])),
            "error_file": "/".join(Path(fields["error_file"]).parts[-3:]),
            "traceback": re.sub(r"PID \d+", "PID", fields["traceback"]),
        }
        found[rank]["exitcode"] = found[rank]["exitcode"].strip()
        if fields["error_file"] == "<N/A>":
            del found[rank]["traceback"]
    return found


@dataclass(frozen=True)
class Outcome:
    """A case with what was observed of both launchers."""

    case: Case
    theirs: Values
    ours: Values
    leaves_directory: bool
    seconds: float

    @cached_property
    def differing(self) -> list[str]:
        """The aspects that differ."""
        return [
            aspect
            for aspect in self.theirs
            if self.theirs[aspect] != self.ours[aspect] and aspect not in self.case.ignored
        ]

    @cached_property
    def unexplained(self) -> list[str]:
        """A line for each difference that is not declared, and each declaration that is wrong."""
        lines = []
        for aspect in sorted({*self.differing, *self.case.differs}):
            theirs, ours = self.theirs[aspect], self.ours[aspect]
            declared = self.case.differs.get(aspect)
            if declared is None:
                lines.append(f"{aspect}: {_shown(theirs, ours)}")
            elif theirs == ours:
                lines.append(f"{aspect}: declared as different, and is the same: {ours!r}")
            elif declared.theirs not in (ANY, theirs) or declared.ours not in (ANY, ours):
                lines.append(
                    f"{aspect}: differs in another way than declared: {theirs!r}, {ours!r}"
                )
        return lines

    @property
    def verdict(self) -> str:
        """ "same", "differs" or "UNEXPLAINED"."""
        if self.unexplained:
            return "UNEXPLAINED"
        return "differs" if self.differing else "same"

    def rows(self) -> Iterator[str]:
        """Yield the lines of the table."""
        by_reason: dict[str, list[str]] = {}
        for aspect in self.differing:
            if declared := self.case.differs.get(aspect):
                by_reason.setdefault(declared.reason, []).append(aspect)
        reasons = [
            f"{', '.join(aspects)}: {reason}, {REASONS[reason]}"
            for reason, aspects in by_reason.items()
        ]
        first, *rest = [*self.unexplained, *reasons] or [""]
        yield f"{self.case.name:<44} {self.verdict:<12} {first}".rstrip()
        for line in rest:
            yield f"{'':<57} {line}"


def _shown(theirs: Any, ours: Any) -> str:
    """Return two values; of mappings and lists only what differs."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)]
        return "; ".join(f"{key}: {_shown(theirs.get(key), ours.get(key))}" for key in keys)
    return f"torchrun {theirs!r}, elastic_aio {ours!r}"


def compare(case: Case, theirs: Sequence[str], ours: Sequence[str]) -> Outcome:
    """Run a case by both launchers, one after the other."""
    began = time.monotonic()
    values = []
    for launcher in (theirs, ours):
        directory = Path(tempfile.mkdtemp(prefix="parity-"))
        try:
            values.append(Job(case, launcher, directory).run())
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    theirs_seen, ours_seen = values
    # Ours has more options; that is no difference to a user of torchrun's.
    ours_seen["help"] = [name for name in ours_seen["help"] if name in theirs_seen["help"]]
    leaves_directory = {*theirs_seen["tmp"]} == {"LOGS"} and not ours_seen["tmp"]
    if leaves_directory:  # as it nearly always does, so it is counted instead
        theirs_seen["tmp"] = []
    seconds = time.monotonic() - began
    return Outcome(case, theirs_seen, ours_seen, leaves_directory, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the cases that the command line chooses; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parity", description=__doc__)
    parser.add_argument(
        "--torch-python", metavar="PATH", default=sys.executable, help="interpreter that has torch"
    )
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="a case, or a pattern such as 'logs*'"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default 2)")
    parser.add_argument("--json", metavar="FILE", help="write what was observed to FILE too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args(argv)
    patterns = arguments.only or ["*"]
    cases = [case for case in CASES if any(fnmatch(case.name, name) for name in patterns)]
    if arguments.list or not cases:
        print("\n".join(case.name for case in cases) or "no case has such a name")
        return 0 if cases else 2
    theirs = [arguments.torch_python, "-m", "torch.distributed.run"]
    ours = [sys.executable, "-m", "elastic_aio", "run"]
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda case: compare(case, theirs, ours), cases):
            print("\n".join(outcome.rows()), flush=True)
            outcomes.append(outcome)
    verdicts = [outcome.verdict for outcome in outcomes]
    left = sum(outcome.leaves_directory for outcome in outcomes)
    counts = {verdict: verdicts.count(verdict) for verdict in ("same", "differs", "UNEXPLAINED")}
    print(f"\n{len(cases)} cases: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    print(f"torchrun left an empty temporary directory in {left} of them (D26)")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(_as_json(outcomes), indent=2) + "\n")
    return 1 if counts["UNEXPLAINED"] else 0


def _as_json(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    return [
        {
            "case": outcome.case.name,
            "verdict": outcome.verdict,
            "reasons": {
                aspect: outcome.case.differs[aspect].reason
                for aspect in outcome.differing
                if aspect in outcome.case.differs
            },
            "unexplained": outcome.unexplained,
            "seconds": round(outcome.seconds, 1),
            "torchrun": {aspect: outcome.theirs[aspect] for aspect in outcome.differing},
            "elastic_aio": {aspect: outcome.ours[aspect] for aspect in outcome.differing},
        }
        for outcome in outcomes
    ]


if __name__ == "__main__":
    raise SystemExit(main())
