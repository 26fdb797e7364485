"""Real Redis servers as processes, on free ports of the loopback."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import Self

from elastic_aio import TlsSpec
from tests.support.servers import START_S, ServerProcess
from tests.support.sockets import LOOPBACK, free_port

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
WHY_NOT = "needs the redis-server command"


class RedisProcess(ServerProcess):
    """One server; it can be killed and started again with its data."""

    def __init__(self, directory: Path, *options: str, appends: bool = True) -> None:
        """Choose the port; nothing is started yet.  With `appends` data survive a kill."""
        super().__init__()
        self.port = free_port(LOOPBACK)
        self.endpoint = f"{LOOPBACK}:{self.port}"
        self.directory = directory
        self._options = ["--appendonly", "yes" if appends else "no", *options]

    def also(self, *options: str) -> Self:
        """Add options, which may replace those of this class."""
        self._options += options
        return self

    def start(self, *options: str) -> None:
        """Start it, and wait until it listens."""
        assert REDIS is not None
        base = ["--port", str(self.port), "--bind", LOOPBACK, "--dir", str(self.directory)]
        base += ["--save", "", "--appendfsync", "always", "--daemonize", "no"]
        argv = [REDIS, *self._command(base), *self._options, *options]
        self.spawn(argv, self.directory / "redis.log")
        end = time.monotonic() + START_S
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


def tls_options(server: TlsSpec, port: int) -> list[str]:
    """Return the options with which a server asks its clients for a certificate."""
    files = {"cert": server.cert, "key": server.key, "ca-cert": server.ca}
    options = [f"--tls-{name}-file {path}" for name, path in files.items()]
    return " ".join([*options, f"--port 0 --tls-port {port}"]).split()


def admit_one_user(endpoint: str, prefix: str) -> None:
    """Ask clients for a user from now on: "job" with "s3cret" may use the keys of `prefix`."""
    rights = [f"~{{{prefix}:*", f"&{{{prefix}:*", "+@all", "-@admin", "-@dangerous", "+info"]
    assert ask(endpoint, "ACL", "SETUSER", "job", "on", ">s3cret", *rights) == "+OK\r\n"
    assert ask(endpoint, "ACL", "SETUSER", "default", "off") == "+OK\r\n"
