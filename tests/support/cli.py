"""The command line as a real process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import elastic_aio
from elastic_aio.signals import MOMENT_S
from tests.support.children import DEADLINE_S, noted, until_sync
from tests.support.leaks import SESSION_VARIABLE

REPOSITORY = Path(elastic_aio.__file__).parent.parent
CLI = [sys.executable, "-m", "elastic_aio"]


@dataclass(frozen=True)
class Ended:
    """The exit code of a command, as a shell reports it, and its output."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines of stderr."""
        return self.err.splitlines()


def environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Return our environment with changes; None removes a variable."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for name, value in (changes or {}).items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def bare_environment(**changes: str) -> dict[str, str | None]:
    """Return changes that remove all variables but the path and those of the tests."""
    kept = {"PATH", SESSION_VARIABLE}
    removed: dict[str, str | None] = {name: None for name in os.environ if name not in kept}
    return {**removed, **changes}


def run_program(
    argv: Sequence[str],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
    stdin: bytes | None = None,
    seconds: float = DEADLINE_S,
    **popen: Any,
) -> Ended:
    """Run a program to its end, its output in files."""
    with running(argv, env=env, cwd=cwd, stdin=stdin, **popen) as program:
        code = program.wait(seconds)
        return Ended(code, program.out, program.err)


async def run_beside(*words: object) -> Ended:
    """Run `aio-elastic` with some arguments to its end, while the event loop runs."""
    return await asyncio.to_thread(run_program, [*CLI, *map(str, words)])


def run_cli(*args: object, **options: Any) -> Ended:
    """Run `aio-elastic run` with some arguments to its end."""
    return run_program([*CLI, "run", *map(str, args)], **options)


def run_in_shell(before: str, *args: object, after: str = "", **options: Any) -> Ended:
    """Run `aio-elastic run` in place of a shell that has run `before`.

    `after` follows the command: redirections, for example.
    """
    script = f'{before}\nexec "$@" {after}'
    return run_program(["bash", "-c", script, "bash", *CLI, "run", *map(str, args)], **options)


def to_options(settings: Mapping[str, object]) -> list[str]:
    """Return command-line options: `{"max_restarts": 3}` is `--max-restarts=3`.

    True stands for a flag, and None leaves the option out.
    """
    options = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if value is not None:
            options.append(option if value is True else f"{option}={value}")
    return options


class Running:
    """A running program, its output in files."""

    def __init__(self, process: subprocess.Popen[bytes], out: Any, err: Any) -> None:
        self.process = process
        self.pid = process.pid
        self._out = out
        self._err = err

    @property
    def out(self) -> str:
        """The content of stdout by now."""
        return _read(self._out)

    @property
    def err(self) -> str:
        """The content of stderr by now."""
        return _read(self._err)

    def wait_err(self, pattern: str) -> re.Match[str]:
        """Wait until stderr matches."""
        return self._wait(lambda: self.err, pattern)

    def wait_out(self, pattern: str) -> re.Match[str]:
        """Wait until stdout matches."""
        return self._wait(lambda: self.out, pattern)

    def _wait(self, read: Any, pattern: str) -> re.Match[str]:
        def search() -> re.Match[str] | None:
            return re.search(pattern, read(), re.MULTILINE)

        match = until_sync(search, f"{pattern!r} in the output")
        assert match is not None
        return match

    def send(self, number: int) -> None:
        """Send a signal to the process itself."""
        self.process.send_signal(number)

    def repeat(self, number: int, times: int = 2) -> None:
        """Send a stop signal again, so much later that it is not the same one."""
        for _ in range(times):
            time.sleep(MOMENT_S + 0.05)  # what is tested: time that passes
            self.send(number)

    def wait(self, seconds: float = DEADLINE_S) -> int:
        """Wait for the end; return the code that a shell would report."""
        code = self.process.wait(seconds)
        return 128 - code if code < 0 else code

    def ended(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the end; return the exit code and the output."""
        return Ended(self.wait(seconds), self.out, self.err)


@contextmanager
def running(
    argv: Sequence[object],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: str | Path | None = None,
    stdin: bytes | None = None,
    stdin_pipe: bool = False,
    **popen: Any,
) -> Iterator[Running]:
    """Run a program while the block is open; kill it if it outlives the block.

    It has a temporary directory of its own, unless `env` names one.
    """
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryFile() as stdin_file,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
    ):
        stdin_file.write(stdin or b"")
        stdin_file.seek(0)
        if stdin_pipe:
            popen["stdin"] = subprocess.PIPE
        streams: dict[str, Any] = {
            "stdin": stdin_file if stdin is not None else subprocess.DEVNULL,
            "stdout": out,
            "stderr": err,
        }
        process = subprocess.Popen(
            [str(word) for word in argv],
            env=environment({"TMPDIR": temporary, **(env or {})}),
            cwd=cwd,
            **{**streams, **popen},
        )
        try:
            yield Running(process, out, err)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def running_cli(*args: object, **options: Any) -> Any:
    """Run `aio-elastic run` with some arguments while the block is open."""
    return running([*CLI, "run", *map(str, args)], **options)


@contextmanager
def noted_job(
    directory: Path,
    count: int,
    worker: Sequence[str],
    *options: object,
    argv: Sequence[str] = (*CLI, "run"),
    env: Mapping[str, str] | None = None,
    **popen: Any,
) -> Iterator[tuple[Running, list[int]]]:
    """Run a job of workers that note their pids in `directory`, until all have.

    Yield the launcher, and the pids by rank.  `argv` is the command before the options.
    """
    words = [*argv, "--nproc-per-node", count, *options, "--no-python", *worker]
    with running(words, env={"NOTES": str(directory), **(env or {})}, **popen) as job:
        yield job, until_sync(noted(directory, count))


def _read(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")
