"""Programs that run beside an event loop: nothing is polled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.children import DEADLINE_S
from tests.support.cli import Ended, environment


class Program:
    """A process, its output in the files `out` and `err` of a folder.

    Args:
        name: what to call it in complaints.
        argv: what to run.
        folder: for its output; made if need be.
        env: changes of our environment; None removes a variable.
        stdout: descriptor in place of the file `out`.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[object],
        folder: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        stdout: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.folder = folder
        with (folder / "out").open("ab") as out, (folder / "err").open("ab") as err:
            self._process = subprocess.Popen(
                [str(one) for one in argv],
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
        """Whether it has not ended yet, as far as we have heard."""
        return not self._exit.done()

    @property
    def out(self) -> str:
        """What stands in stdout by now."""
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What stands in stderr by now."""
        return (self.folder / "err").read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the process itself, unless it has ended."""
        self._process.send_signal(number)

    async def ended(self, seconds: float = DEADLINE_S) -> Ended:
        """Wait for the end; return everything.

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
