"""A launcher that notes what its thread runs from the exit of a worker to the next attempt.

`exit_path.py DIRECTORY ARGUMENT ...`: the arguments are those of `aio-elastic`.  DIRECTORY gets
the file `idle` when the launcher has prepared for failures, and in the end the file `trace`.  That
says for each of the stages "signal" (to the first signal for a sibling) and "start" (to the first
process of the next attempt) which modules have run since the exit, and how many iterations of the
loop have begun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_aio.agent.driver import Driver
from elastic_aio.agent.later import load_later_modules, missing_modules
from elastic_aio.cli import entry
from elastic_aio.process.children import PidfdWatch

ENDS = {"signal": "pidfd_send_signal", "start": "fork_exec"}


class Trace:
    """What `sys.setprofile` reports."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.notes: dict[str, tuple[list[str], int]] = {}
        self._modules: set[str] = set()
        self._iterations = 0
        self._waits_for = ["exit", *ENDS]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code is PidfdWatch._on_readable.__code__ and self._waits_for[0] == "exit":
                del self._waits_for[0]
            if self._waits_for[0] != "exit":
                self._modules.add(frame.f_globals.get("__name__", ""))
                self._iterations += frame.f_code.co_name == "_run_once"
        elif event == "return" and frame.f_code is load_later_modules.__code__:
            if not any(missing_modules()):
                (self._directory / "idle").touch()
        elif event == "c_call" and ENDS.get(stage := self._waits_for[0]) == argument.__name__:
            self.notes[stage] = sorted(self._modules), self._iterations
            del self._waits_for[0]
            if not self._waits_for:
                sys.setprofile(None)


def main() -> int:
    directory = Path(sys.argv.pop(1))
    trace = Trace(directory)
    Driver.has_looked = True  # for lost jobs, while a sibling takes its time to end
    sys.setprofile(trace)
    try:
        return entry()
    finally:
        sys.setprofile(None)
        (directory / "trace").write_text(json.dumps(trace.notes))


if __name__ == "__main__":
    raise SystemExit(main())
