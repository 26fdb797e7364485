"""Real Redis servers as processes, on free ports of the loopback."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.leaks import SESSION_VARIABLE
from tests.support.sockets import LOOPBACK, free_port

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
WHY_NOT = "needs the redis-server command"

_START_S = 60.0


class RedisProcess:
    """One server; it can be killed and started again with its data."""

    def __init__(self, directory: Path, *options: str, appends: bool = True) -> None:
        """Choose the port; nothing is started yet.  With `appends` data survive a kill."""
        self.port = free_port(LOOPBACK)
        self.endpoint = f"{LOOPBACK}:{self.port}"
        self.directory = directory
        self._options = ["--appendonly", "yes" if appends else "no", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def also(self, *options: str) -> Self:
        """Add options, which may replace those of this class."""
        self._options += options
        return self

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self, *options: str) -> None:
        """Start it, and wait until it listens."""
        assert REDIS is not None
        base = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.directory)]
        base += ["--save", "", "--appendfsync", "always", "--daemonize", "no"]
        # Not marked as a process of the test's jobs, which must leave none.
        env = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [REDIS, *self._command(base), *self._options, *options],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=env,
            )
        end = time.monotonic() + _START_S
        while not self._is_listening():
            assert time.monotonic() < end, f"Redis does not start: see {self.directory}"
            time.sleep(0.02)

    def _command(self, base: list[str]) -> list[str]:
        return base

    def _is_listening(self) -> bool:
        try:
            with socket.create_connection((LOOPBACK, self.port), 1):
                return True
        except OSError:
            return False

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it, and wait until it has gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class SentinelProcess(RedisProcess):
    """A sentinel that knows `master` as "m"."""

    def __init__(self, directory: Path, master: RedisProcess) -> None:
        """Choose the port; nothing is started yet."""
        super().__init__(directory)
        self._options = []
        self._master = master

    def _command(self, base: list[str]) -> list[str]:
        config = self.directory / "sentinel.conf"
        port = self._master.port
        config.write_text(
            f"port {self.port}\nbind {LOOPBACK}\ndir {self.directory}\n"
            f"sentinel monitor m {LOOPBACK} {port} 1\n"
            "sentinel down-after-milliseconds m 500\nsentinel failover-timeout m 3000\n"
        )
        return [str(config), "--sentinel"]


def ask_all(endpoint: str, *command: str) -> str:
    """Return the reply, which is one text of any length."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        parts = [f"${len(part.encode())}\r\n{part}\r\n" for part in command]
        connection.sendall(f"*{len(parts)}\r\n{''.join(parts)}".encode())
        with connection.makefile("rb") as file:
            return file.read(int(file.readline()[1:])).decode()


def ask(endpoint: str, *command: str) -> str:
    """Return the raw reply of a server to a short command."""
    host, _, port = endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        parts = [f"${len(part.encode())}\r\n{part}\r\n" for part in command]
        connection.sendall(f"*{len(parts)}\r\n{''.join(parts)}".encode())
        return connection.recv(65536).decode()
