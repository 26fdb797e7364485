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
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.jobs import WORKER, Job, Values
from benchmarks.parity_cases import ANY, CASES, REASONS, Case
from tests.support.sockets import listening

_STEPS_S = 300.0
_ENDLESS = "does not end"


def observed(case: Case, launcher: Sequence[str]) -> Values:
    """Run a case to its end; return what was observed."""
    codes: list[int | str] = []
    end = time.monotonic() + _STEPS_S
    with Job() as job:
        for node in range(len(case.nodes)):
            if f"start {node}" not in case.steps:
                _start(job, case, node, launcher)
        for step in case.steps:
            _do(job, case, step, launcher, end - time.monotonic())
        end = time.monotonic() + case.limit
        for node in range(len(case.nodes)):
            code = job.end(node, end - time.monotonic())
            codes.append(_ENDLESS if code is None else 128 - code if code < 0 else code)
        left = [] if _ENDLESS in codes else sorted(map(_kind_of, job.processes_left()))
        signals = job.signals()  # before those of a guardian, or none
        job.kill_all()
        code_seen = codes[0] if len(codes) == 1 else codes
        return {"code": code_seen, "left": left, "signals": signals, **job.observe()}


def _start(job: Job, case: Case, node: int, launcher: Sequence[str]) -> None:
    words = [*shlex.split(case.nodes[node]), *shlex.split(case.words)]
    command = [*shlex.split(case.prefix), *launcher, *words]
    job.launch(command, node, changes=case.env, stdin=case.stdin)


def _do(job: Job, case: Case, step: str, launcher: Sequence[str], seconds: float) -> None:
    """Perform a step; see `Case.steps`."""
    verb, _, rest = step.partition(" ")
    if verb == "ready":
        job.until(lambda: len(job.noted("ready")) >= int(rest), seconds)
    elif verb == "note":
        job.until(lambda: bool(job.noted(rest)), seconds)
    elif verb == "listen":
        job.until(lambda: bool(listening([int(job.port)])), seconds)
    elif verb == "start":
        _start(job, case, int(rest), launcher)
    else:
        node, name = rest.split()
        job.programs[int(node)].send_signal(getattr(signal, name))


def _kind_of(pid: int) -> str:
    """Return what a process is, without what differs from run to run."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return "worker" if os.fsencode(WORKER) in words else Path(os.fsdecode(words[0])).name


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
    theirs_seen, ours_seen = (observed(case, launcher) for launcher in (theirs, ours))
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
