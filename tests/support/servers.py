"""What the servers of all engines share as processes of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.support.leaks import SESSION_VARIABLE

START_S = 60.0
"""Seconds for a server to start."""


class ServerProcess:
    """A server; it can be killed and started again with its data."""

    port: int
    endpoint: str

    def __init__(self) -> None:
        """Begin without a process."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Wait until it answers."""

    def spawn(self, argv: Sequence[str], log: Path) -> None:
        """Start the process; its output goes to `log`."""
        # Not marked as a process of the test's jobs, which must leave none.
        env = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                argv, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=env
            )

    def __enter__(self) -> Self:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def send(self, number: int) -> None:
        """Send it a signal; after SIGSTOP, wait until all its threads have stopped."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """Kill it, and wait until it has gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None
