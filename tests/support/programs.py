"""A process beside an event loop, which waits for its end by a pidfd."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.children import DEADLINE_S
from tests.support.cli import Ended, environment


class Program:
    """A process, its output in the files `out` and `err` of a directory.

    `name` is for error messages; `env` changes our environment (None removes a variable);
    `stdout` is a descriptor in place of the file `out`.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[object],
        directory: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        stdout: int | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.directory = directory
        self.started_ns = time.monotonic_ns()
        with (directory / "out").open("ab") as out, (directory / "err").open("ab") as err:
            self._process = subprocess.Popen(
                [str(word) for word in argv],
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )
        self.pid = self._process.pid
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._sentinel = os.pidfd_open(self.pid)
        self._loop.add_reader(self._sentinel, self._exited)

    @property
    def is_running(self) -> bool:
        """Whether the loop has not seen its end yet."""
        return not self._exit.done()

    @property
    def exit_code(self) -> int | None:
        """As a shell has it; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    @property
    def out(self) -> str:
        """The content of stdout by now."""
        return (self.directory / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """The content of stderr by now."""
        return (self.directory / "err").read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the process itself, unless it has ended."""
        self._process.send_signal(number)

    async def ended(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the end; return the exit code and the output.

        Raises:
            AssertionError: it did not end in time.
        """
        try:
            async with asyncio.timeout(seconds):
                code = await asyncio.shield(self._exit)
        except TimeoutError:
            raise AssertionError(f"{self.name} did not end within {seconds:g} s") from None
        return Ended(code, self.out, self.err)

    async def kill(self) -> None:
        """Kill it, if it still runs, and wait for its end."""
        self.send(signal.SIGKILL)
        await self.ended()

    def _exited(self) -> None:
        self._loop.remove_reader(self._sentinel)
        os.close(self._sentinel)
        code = self._process.wait()
        self._exit.set_result(128 - code if code < 0 else code)
