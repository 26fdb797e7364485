"""Network namespaces as hosts on one switch, and cables between them that can be cut.

Each host has its own interfaces, host name, `/etc/hosts` and `/etc/resolv.conf`; the
switch has a namespace too, so that this machine's own network is left alone.  Needs root,
`ip` and `nft`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_PREFIX = "eaio"
_MOUNTED = Path("/run/netns")
# A name server that never answers: whoever asks for a name waits for long.
_SILENT = "10.77.0.250"
_RULES = """
table inet cables {
  set cut { type ipv4_addr; }
  chain input {
    type filter hook input priority 0;
    ip saddr @cut drop
  }
  counter questions { }
  chain output {
    type filter hook output priority 0;
    udp dport 53 counter name questions
    tcp dport 53 counter name questions
  }
}
"""
# In the shell's own mount namespace, which the program keeps.
_ENTER = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts &&
mount --bind "$2/resolv.conf" "$(readlink -f /etc/resolv.conf)" || exit 99
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """A host: its `name`, its IPv4 `address`, and the folder of its `/etc` files."""

    name: str
    address: str
    namespace: str
    folder: Path

    def argv(self, argv: Sequence[object]) -> list[str]:
        """Return what runs a program on this host; its pid is that of what is returned."""
        inside = ["nsenter", f"--net={_MOUNTED / self.namespace}", "unshare", "--uts", "--mount"]
        shell = ["sh", "-c", _ENTER, "sh", self.name, str(self.folder)]
        return [*inside, *shell, *map(str, argv)]


class Network:
    """Hosts `10.77.0.1`, `10.77.0.2`, ... while the block is open.

    Args:
        folder: for the hosts' files.
        names: of the hosts.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        begun = _begun(os.getpid())
        self._stem = f"{_PREFIX}-{os.getpid()}-{begun}"
        self._switch = f"{self._stem}-switch"
        self.hosts = {
            name: Host(name, f"10.77.0.{number}", f"{self._stem}-{name}", folder / f"etc-{name}")
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def cut(self, source: str, *targets: str) -> None:
        """Lose all that `source` sends to `targets`; what they send still arrives."""
        for target in targets:
            _nft(self[target], f"add element inet cables cut {{ {self[source].address} }}")

    def partition(self, one: str, *others: str) -> None:
        """Lose all that passes between a host and others."""
        self.cut(one, *others)
        for other in others:
            self.cut(other, one)

    def isolate(self, name: str) -> None:
        """Lose all that passes between a host and every other."""
        self.partition(name, *(other for other in self.hosts if other != name))

    def heal(self) -> None:
        """Let everything through again."""
        for host in self.hosts.values():
            _nft(host, "flush set inet cables cut")

    def questions(self, name: str) -> int:
        """Return how many packets a host has sent to name servers."""
        told = _nft(self[name], "list counter inet cables questions")
        return int(told.split("packets")[1].split()[0])

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "dev", "bridge", "up")
        for number, host in enumerate(self.hosts.values(), start=1):
            self._add(host, f"port{number}")

    def _add(self, host: Host, port: str) -> None:
        host.folder.mkdir(parents=True, exist_ok=True)
        (host.folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
        (host.folder / "resolv.conf").write_text(f"nameserver {_SILENT}\n")
        _run("ip", "netns", "add", host.namespace)
        cable = ["name", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace]
        _run("ip", "-n", self._switch, "link", "add", *cable)
        _run("ip", "-n", self._switch, "link", "set", "dev", port, "master", "bridge", "up")
        address = f"address add {host.address}/24 dev eth0"
        commands = ["link set dev lo up", address, "link set dev eth0 up"]
        _run("ip", "-n", host.namespace, "-batch", "-", given="\n".join(commands))
        _nft(host, _RULES)

    def _remove(self) -> None:
        for namespace in [*(host.namespace for host in self.hosts.values()), self._switch]:
            _remove_namespace(namespace)


def why_impossible() -> str:
    """Return why there can be no networks here; nothing when there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    for program in ("ip", "nft", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this machine lets nobody make network namespaces"
    return ""


_WHY_IMPOSSIBLE = why_impossible()
needs_network_namespaces = pytest.mark.skipif(
    # Where they are a must, their absence is a failure.
    bool(_WHY_IMPOSSIBLE) and "ELASTIC_AIO_NETNS" not in os.environ,
    reason=_WHY_IMPOSSIBLE or "network namespaces work here",
)


def remove_stale() -> None:
    """Remove what test runs have left behind that are over."""
    for path in _MOUNTED.glob(f"{_PREFIX}-*"):
        match = re.fullmatch(rf"{_PREFIX}-(\d+)-(\d+)-.+", path.name)
        if match and _begun(int(match[1])) != match[2]:
            _remove_namespace(path.name)


def _begun(pid: int) -> str:
    """Return when a process began, in the kernel's own count; nothing when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _remove_namespace(name: str) -> None:
    if not (_MOUNTED / name).exists():
        return
    for pid in _run("ip", "netns", "pids", name).split():
        os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _nft(host: Host, rules: str) -> str:
    return _run("nsenter", f"--net={_MOUNTED / host.namespace}", "nft", "-f", "-", given=rules)


def _run(*argv: str, given: str = "") -> str:
    done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr.strip()}"
    return done.stdout
