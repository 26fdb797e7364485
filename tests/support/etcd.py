"""Real etcd servers as processes, on free ports of the loopback."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic_aio import TlsSpec
from tests.support.netns import Host
from tests.support.servers import START_S, ServerProcess
from tests.support.sockets import LOOPBACK, free_port

ETCD = shutil.which("etcd")
WHY_NOT = "needs the etcd command (Debian: etcd-server)"

_PAUSE_IS_SAFE = {(3, 4): 31, (3, 5): 13}
"""Patch releases from which a leader that was paused does not revoke living leases.

Before them it does so as soon as it goes on, before it knows of its successor: etcd's issue
15247, mended in 3.4.31 and 3.5.13 (pull requests 17465 and 17425).
"""


class EtcdProcess(ServerProcess):
    """One member of a cluster; it can be killed and started again with its data."""

    def __init__(
        self,
        directory: Path,
        name: str = "m0",
        *options: str,
        tls: bool = False,
        host: Host | None = None,
    ) -> None:
        """Choose the ports; nothing is started yet.  `host`: the network namespace to run in."""
        super().__init__()
        self.port = free_port(LOOPBACK)
        self.peer_port = free_port(LOOPBACK)
        self.name = name
        self.host = host
        address = LOOPBACK if host is None else host.address
        self.endpoint = f"{address}:{self.port}"
        self.peer = f"{name}=http://{address}:{self.peer_port}"
        self._directory = directory
        self._options = options
        self._scheme = "https" if tls else "http"

    def start(self, peers: Sequence[str] = ()) -> None:
        """Start it as a member of the cluster of `peers`, or as the only one."""
        assert ETCD is not None
        client, peer = f"{self._scheme}://{self.endpoint}", self.peer.partition("=")[2]
        arguments = {
            "name": self.name,
            "data-dir": self._directory / self.name,
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(peers or [self.peer]),
            "unsafe-no-fsync": "",
            "logger": "zap",
        }
        options = [
            f"--{name}={value}" if value else f"--{name}" for name, value in arguments.items()
        ]
        argv = [ETCD, *options, *self._options]
        self.spawn(
            argv if self.host is None else self.host.argv(argv),
            self._directory / f"{self.name}.log",
        )

    def wait_ready(self) -> None:
        """Wait until it answers; a server has no other way to say so."""
        end = time.monotonic() + START_S
        while not self._is_healthy():
            assert time.monotonic() < end, f"etcd {self.name} does not start: see {self._directory}"
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        if self._scheme == "https":  # it asks for a certificate: a connection must do
            import socket

            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), 1):
                return True
            return False
        if self.host is not None:
            return "true" in self._curl("/health")
        try:
            url = f"http://{self.endpoint}/health"
            with urllib.request.urlopen(url, timeout=1) as reply:
                return b'"true"' in reply.read()
        except OSError:
            return False

    def _curl(self, path: str, *options: str) -> str:
        """Return the reply to a request from its own host; empty if there is none."""
        assert self.host is not None
        code = (
            "import sys, urllib.request as r;"
            " print(r.urlopen(sys.argv[1], timeout=5, data=b'{}' if sys.argv[2:] else None)"
            ".read().decode())"
        )
        url = f"http://{self.endpoint}{path}"
        argv = self.host.argv([sys.executable, "-c", code, url, *options])
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    @property
    def is_pause_safe(self) -> bool:
        """Whether a leader of this release can be paused without revoking living leases."""
        major, minor, patch = (int(part) for part in self._status()["version"].split(".")[:3])
        return patch >= _PAUSE_IS_SAFE.get((major, minor), 0)

    @property
    def is_leader(self) -> bool:
        """Whether it is the leader of its cluster; waits while that elects one."""
        end = time.monotonic() + START_S
        while "leader" not in (status := self._status()):
            assert time.monotonic() < end, f"etcd {self.name} has no leader: see {self._directory}"
            time.sleep(0.02)
        return bool(status["header"]["member_id"] == status["leader"])

    def _status(self) -> Any:
        if self.host is None:
            return ask(self.endpoint, "maintenance/status")
        return json.loads(self._curl("/v3/maintenance/status", "POST"))


def ask(endpoint: str, path: str, **body: object) -> Any:
    """Return the reply of the JSON gateway to a request."""
    url = f"http://{endpoint}/v3/{path}"
    with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=30) as reply:
        return json.loads(reply.read())


def text(value: str) -> str:
    """Return a text as the gateway represents it."""
    return base64.b64encode(value.encode()).decode()


def leases_of(endpoint: str, prefix: str) -> dict[str, int]:
    """Return the keys that begin with `prefix`, and their leases; 0 for none."""
    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    reply = ask(endpoint, "kv/range", key=text(prefix), range_end=text(end))
    return {
        base64.b64decode(found["key"]).decode(): int(found.get("lease", 0))
        for found in reply.get("kvs", ())
    }


@contextlib.contextmanager
def etcd_cluster(
    directory: Path, size: int = 3, *, hosts: Sequence[Host] = ()
) -> Iterator[list[EtcdProcess]]:
    """Run a cluster of several members, each on one of `hosts` if these are given."""
    members = [
        EtcdProcess(directory, f"m{number}", host=host)
        for number, host in enumerate(hosts or [None] * size)
    ]
    peers = [member.peer for member in members]
    try:
        for member in members:
            member.start(peers)
        for member in members:
            member.wait_ready()
        yield members
    finally:
        for member in members:
            member.kill()


def tls_options(server: TlsSpec) -> list[str]:
    """Return the options with which a server asks its clients for a certificate."""
    return [
        f"--cert-file={server.cert}",
        f"--key-file={server.key}",
        f"--trusted-ca-file={server.ca}",
        "--client-cert-auth",
    ]


def admit_one_user(endpoint: str, prefix: str) -> None:
    """Ask clients for a user from now on: "job" with "s3cret" may use the keys of `prefix`."""
    for name, password in (("root", "r00t"), ("job", "s3cret")):
        ask(endpoint, "auth/user/add", name=name, password=password)
        ask(endpoint, "auth/role/add", name=name)
        ask(endpoint, "auth/user/grant", user=name, role=name)
    own = {"key": text(prefix), "range_end": text(prefix[:-1] + chr(ord(prefix[-1]) + 1))}
    ask(endpoint, "auth/role/grant", name="job", perm={"permType": "READWRITE", **own})
    ask(endpoint, "auth/enable")
