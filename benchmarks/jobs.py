"""Jobs of small workers by any launcher, and what is observed of them.

The workers are `workers/parity.py`: they do what their words say, and leave notes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.trials import Trial
from tests.support.sockets import free_port

__all__ = ["WORKER", "Job", "Start", "Values"]

WORKER = Path(__file__).parent / "workers/parity.py"
_HOST = socket.gethostname().partition(".")[0]
_OWN_FILES = ("node.json", "run.json", "events.jsonl", "report.txt")
"""Files of a run's directory that torchrun does not have."""
_OPTION = re.compile(r"^  (?:-\w(?: [A-Z]+)?, )?(--[a-z-]+)\b", re.MULTILINE)

Values = dict[str, Any]
"""What was observed of one job, by the aspect."""


class Start(NamedTuple):
    """A start of a worker."""

    rank: int
    attempt: int
    pid: int
    at: int  # monotonic nanoseconds


class Job(Trial):
    """The launchers of one job, in a directory of its own."""

    def __init__(self) -> None:
        super().__init__("job-")
        self._notes = self.directory / "notes"
        self.port = str(free_port())
        for name in ("notes", "tmp", "cwd"):
            (self.directory / name).mkdir()

    def launch(
        self,
        command: Sequence[str],
        number: int = 0,
        *,
        changes: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> None:
        """Start the launcher of a node.

        Args:
            command: its words, in which {w} is the worker, {port} a free port, {dir} the
                directory of the job and {py} this interpreter.
            number: of the node.
            changes: further variables, with the same words.
            stdin: content of its standard input.
        """
        path = self.directory / "stdin"
        path.write_bytes(stdin)
        self.start(
            [self._fill(word) for word in command],
            number,
            changes={
                "OMP_NUM_THREADS": None,
                "TMPDIR": str(self.directory / "tmp"),
                "PARITY_NOTES": str(self._notes),
                **{name: self._fill(value) for name, value in (changes or {}).items()},
            },
            stdin=path,
            cwd=self.directory / "cwd",
        )

    def _fill(self, word: str) -> str:
        values = {"w": WORKER, "port": self.port, "dir": self.directory, "py": sys.executable}
        for name, value in values.items():
            word = word.replace("{" + name + "}", str(value))
        return word

    def noted(self, text: str) -> dict[int, int]:
        """Return the ranks that have left a note, with the time in monotonic nanoseconds."""
        found = {}
        for name in os.listdir(self._notes):
            rank, _, what = name.partition(" ")
            if what == text:
                content = (self._notes / name).read_text()
                found[int(rank)] = int(content or 0)
        return found

    def note(self, text: str) -> None:
        """Leave a note that workers wait for."""
        (self._notes / f"- {text}").touch()

    def starts(self) -> list[Start]:
        """Return the starts of workers so far, in their order."""
        found = []
        for name in os.listdir(self._notes):
            if " started " in name and not name.endswith("."):
                rank, _, attempt, pid = name.split()
                at = int((self._notes / name).read_text() or 0)
                found.append(Start(int(rank), int(attempt), int(pid), at))
        return sorted(found, key=lambda start: start.at)

    def signals(self) -> list[str]:
        """Return the signals that workers noted."""
        return sorted(name for name in os.listdir(self._notes) if " got " in name)

    def observe(self) -> Values:
        """Return what the files of a job that has ended say."""
        return {
            "out": sorted(self._output("out").split("\n")),
            "err": sorted(filter(_of_worker, self._output("err").splitlines())),
            "starts": self._starts(),
            "env": self._environments(),
            "logs": self._logs(),
            "report": self._reports(),
            "error": self._error_file(),
            "tmp": self._temporary_files(),
            "help": sorted(set(_OPTION.findall(self._output("out")))),
        }

    def _output(self, stream: str) -> str:
        return self._normal(self.text(stream))

    def _normal(self, text: str) -> str:
        return text.replace(str(self.directory), "DIR").replace(self.port, "PORT")

    def _starts(self) -> list[str]:
        return sorted(f"attempt {each.attempt}: rank {each.rank}" for each in self.starts())

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
            return f"RUN/{_error_path(value)}"
        if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1"):
            return "LOOPBACK"
        return value

    def _logs(self) -> dict[str, str]:
        """Return the content of each file under the log directory; "" for a directory."""
        root = self.directory / "logs"
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
        for path in sorted(self.directory.glob("err.[0-9]")):
            text = self._normal(path.read_text("utf-8", "backslashreplace"))
            reports = re.findall(r"^=+\n([^\n]+) FAILED\n-+\n(.*?)\n=+$", text, re.M | re.S)
            for name, body in reports[-1:]:
                others, _, root = body.partition("Root Cause (first observed failure):")
                report = {"name": name, "root": _failures(root), "others": _failures(others)}
                found.append(report)
        return found

    def _temporary_files(self) -> list[str]:
        """Return their names without random suffixes; torch's compiler is not the launcher's."""
        names = (name for name in os.listdir(self.directory / "tmp") if "inductor" not in name)
        return sorted(re.sub(r"^(torchelastic|elastic_aio)_.*", "LOGS", name) for name in names)

    def _error_file(self) -> Any:
        path = self.directory / "error.json"
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


def _error_path(path: str) -> str:
    """Return an error file below the directory of its run.

    A worker without log files has no directory of its own (docs/guides/logs.md).
    """
    return "/".join(Path(re.sub(r"/error_(\d+)\.json$", r"/\1/error.json", path)).parts[-3:])


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
            "error_file": _error_path(fields["error_file"]),
            "traceback": re.sub(r"PID \d+", "PID", fields["traceback"]),
        }
        found[rank]["exitcode"] = found[rank]["exitcode"].strip()
        if fields["error_file"] == "<N/A>":
            del found[rank]["traceback"]
    return found
