"""Network namespaces as hosts on one switch, with links between them that can be cut.

Each host has its own interfaces, host name, `/etc/hosts` and `/etc/resolv.conf`.  The switch
has a namespace too, so that the network of the real host is not touched.  Needs root, `ip`
and `nft`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PREFIX = "eaio"
_MOUNTED = Path("/run/netns")
# A name server that never answers, so that every name query blocks for long.
_DEAD_NAME_SERVER = "10.77.0.250"
_RULES = """
table inet links {
  set cut { type ipv4_addr; }
  chain input {
    type filter hook input priority 0;
    ip saddr @cut drop
  }
  counter queries { }
  chain output {
    type filter hook output priority 0;
    udp dport 53 counter name queries
    tcp dport 53 counter name queries
  }
}
"""
# Runs in a mount namespace of its own, which the program then inherits.
_ENTER = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/resolv.conf" "$(readlink -f /etc/resolv.conf)" || exit 99
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """A host: its `name`, its IPv4 `address`, and the directory of its `/etc` files."""

    name: str
    address: str
    namespace: str
    etc: Path

    def argv(self, argv: Sequence[object]) -> list[str]:
        """Return the command that runs a program on this host, under the same pid."""
        inside = ["nsenter", f"--net={_MOUNTED / self.namespace}", "unshare", "--uts", "--mount"]
        shell = ["sh", "-c", _ENTER, "sh", self.name, str(self.etc)]
        return [*inside, *shell, *map(str, argv)]

    def run(self, *argv: str) -> str:
        """Run a program on this host; return its stdout."""
        return subprocess.run(
            self.argv(argv), capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()


class Network:
    """Hosts `10.77.0.1`, `10.77.0.2`, ... while the block is open; their files in a directory."""

    def __init__(self, directory: Path, *names: str) -> None:
        started = _start_time(os.getpid())
        self._stem = f"{_PREFIX}-{os.getpid()}-{started}"
        self._switch = f"{self._stem}-switch"
        self.hosts = {
            name: Host(name, f"10.77.0.{number}", f"{self._stem}-{name}", directory / f"etc-{name}")
            for number, name in enumerate(names, start=1)
        }

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def cut(self, source: str, *targets: str) -> None:
        """Drop all packets from `source` to `targets`; the other direction still works."""
        for target in targets:
            _nft(self[target], f"add element inet links cut {{ {self[source].address} }}")

    def partition(self, name: str, *others: str) -> None:
        """Drop all packets between a host and others."""
        self.cut(name, *others)
        for other in others:
            self.cut(other, name)

    def isolate(self, name: str) -> None:
        """Drop all packets between a host and every other."""
        self.partition(name, *(other for other in self.hosts if other != name))

    def heal(self) -> None:
        """Drop no packets any more."""
        for host in self.hosts.values():
            _nft(host, "flush set inet links cut")

    def name_queries(self, name: str) -> int:
        """Return how many packets a host has sent to name servers."""
        counter = _nft(self[name], "list counter inet links queries")
        return int(counter.split("packets")[1].split()[0])

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "dev", "bridge", "up")
        for number, host in enumerate(self.hosts.values(), start=1):
            self._add(host, f"port{number}")

    def _add(self, host: Host, port: str) -> None:
        host.etc.mkdir(parents=True, exist_ok=True)
        (host.etc / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        (host.etc / "resolv.conf").write_text(f"nameserver {_DEAD_NAME_SERVER}\n")
        _run("ip", "netns", "add", host.namespace)
        link = ["name", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace]
        _run("ip", "-n", self._switch, "link", "add", *link)
        _run("ip", "-n", self._switch, "link", "set", "dev", port, "master", "bridge", "up")
        address = f"address add {host.address}/24 dev eth0"
        commands = ["link set dev lo up", address, "link set dev eth0 up"]
        _run("ip", "-n", host.namespace, "-batch", "-", stdin="\n".join(commands))
        _nft(host, _RULES)

    def _remove(self) -> None:
        for namespace in [*(host.namespace for host in self.hosts.values()), self._switch]:
            _remove_namespace(namespace)


@functools.cache
def why_impossible() -> str:
    """Return why network namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for program in ("ip", "nft", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "the kernel refuses to create network namespaces"
    return ""


def remove_stale() -> None:
    """Remove the namespaces of test runs that have ended."""
    for path in _MOUNTED.glob(f"{_PREFIX}-*"):
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-.+", path.name)
        if match and _start_time(int(match[1])) != match[2]:
            _remove_namespace(path.name)


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _remove_namespace(name: str) -> None:
    if not (_MOUNTED / name).exists():
        return
    for pid in _run("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _nft(host: Host, rules: str) -> str:
    return _run("nsenter", f"--net={_MOUNTED / host.namespace}", "nft", "-f", "-", stdin=rules)


def _run(*argv: str, stdin: str = "") -> str:
    process = subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{' '.join(argv)}: {process.stderr.strip()}"
    return process.stdout
