"""Programs in a directory of their own, observed, and ended for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.launchers import environment_changes
from tests.support.cli import environment
from tests.support.leaks import marked_processes

__all__ = ["SETTLE_S", "WAIT_S", "Trial", "memory_of", "restore_signals"]

_MARK, _NUMBER = "TRIAL_MARK", "TRIAL_PROGRAM"
WAIT_S = 15.0
"""Seconds in which what is awaited of a program has to happen."""
SETTLE_S = 2.0
"""Seconds after which what has not happened counts as never."""


def restore_signals() -> None:
    """Stop ignoring signals, as `nohup` and a shell's background jobs do: programs inherit it."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Trial:
    """Programs that are started in a temporary directory; a context manager.

    Its processes inherit a variable with a value of their own: so are those found that outlive
    the programs, and none is left at the end.

    Args:
        prefix: of the name of the directory.
    """

    def __init__(self, prefix: str) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        self._value = uuid.uuid4().hex
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for process in self._started.values():
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        self._temporary.cleanup()

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return the variables of a program: no settings of a launcher, and what finds it again."""
        return environment(
            {
                **environment_changes(),
                _MARK: self._value,
                "ELASTIC_AIO_CONTROL_DIR": str(self.directory),
                "XDG_STATE_HOME": str(self.directory / "state"),
                **(changes or {}),
            }
        )

    def start(
        self,
        command: Sequence[str],
        number: int = 0,
        *,
        changes: Mapping[str, str | None] | None = None,
        stdin: Path | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own; its output is in the files out.N and err.N.

        Standard input is a pipe, or a file if one is given.
        """
        out, err = ((self.directory / f"{name}.{number}").open("ab") for name in ("out", "err"))
        given = stdin.open("rb") if stdin else None
        try:
            self._started[number] = process = subprocess.Popen(
                command,
                stdin=given or subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=cwd or self.directory,
                env=self.environment({**(changes or {}), _NUMBER: f"{self._value} {number}"}),
                start_new_session=True,
            )
        finally:
            for file in (out, err, given):
                if file is not None:
                    file.close()
        return process

    @property
    def programs(self) -> list[subprocess.Popen[bytes]]:
        """The programs, by their numbers."""
        return [self._started[number] for number in sorted(self._started)]

    def end(self, number: int = 0, seconds: float = WAIT_S) -> int | None:
        """Wait for the end of a program; return its exit code, None if it runs on."""
        with suppress(subprocess.TimeoutExpired):
            return self._started[number].wait(max(seconds, 0))
        return None

    def processes(self) -> dict[int, str]:
        """Return the commands of all that run, by the pid, the programs themselves left out."""
        programs = {process.pid for process in self._started.values()}
        return marked_processes(_MARK, self._value, since=programs)

    def processes_left(self, seconds: float = SETTLE_S) -> dict[int, str]:
        """Wait until none but the programs runs; return what runs after so many seconds."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return left

    def kill(self, number: int) -> None:
        """Kill a program with all that it has started, as the end of its host does."""
        self._started[number].kill()
        self._started[number].wait(WAIT_S)
        _kill(lambda: marked_processes(_NUMBER, f"{self._value} {number}"))

    def kill_all(self) -> None:
        """Kill all that runs; what they start in between too."""
        for process in self._started.values():
            process.kill()
            process.wait(WAIT_S)
        _kill(self.processes)

    def until(self, condition: Callable[[], bool], seconds: float = WAIT_S) -> bool:
        """Wait until something holds, all programs have ended, or the time is over.

        Returns:
            Whether it holds.
        """
        end = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < end:
            if all(process.poll() is not None for process in self._started.values()):
                return condition()
            time.sleep(0.005)
        return holds

    def text(self, stream: str, number: int | None = None) -> str:
        """Return the output of a program, or of all, so far: "out" or "err"."""
        pattern = f"{stream}.{'[0-9]' if number is None else number}"
        found = [path.read_bytes() for path in sorted(self.directory.glob(pattern))]
        return b"".join(found).decode("utf-8", "backslashreplace")


def _kill(find: Callable[[], Iterable[int]]) -> None:
    """Kill what is found, until nothing is.

    Raises:
        TimeoutError: processes do not end.
    """
    end = time.monotonic() + WAIT_S
    while left := [*find()]:
        if time.monotonic() > end:
            raise TimeoutError(f"killed processes do not end: {left}")
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def memory_of(pids: Iterable[int]) -> int:
    """Return the anonymous memory of processes in kB; pages that they share count once."""
    total = 0
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("Pss_Anon:"))
        total += int(line.split()[1])
    return total
