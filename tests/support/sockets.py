"""TCP ports of this host, and the sockets at them as the kernel lists them."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

LOOPBACK = "127.0.0.1"


def free_port(address: str = "::") -> int:
    """Return a TCP port that is free at a local address, outside the range of ephemeral ports."""
    if address == "::" and not socket.has_dualstack_ipv6():
        address = "0.0.0.0"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        port = random.SystemRandom().randint(10_000, 30_000)
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
                probe.listen()
            except OSError:
                continue
        return port


def listening(ports: Collection[int]) -> set[str]:
    """Return the sockets that listen at any of these ports, as /proc/PID/fd names them.

    Nothing is connected, so that the listener does not notice.
    """
    wanted = {f"{port:04X}" for port in ports}
    listeners = [row for row in _rows() if row[3] == "0A"]
    return {f"socket:[{row[9]}]" for row in listeners if row[1].rpartition(":")[2] in wanted}


def probed(port: int) -> list[bool]:
    """Return, for each established end at a port, whether the kernel sends keepalive probes."""
    established = [row for row in _rows() if row[3] == "01"]
    ends = [row for row in established if any(name.endswith(f":{port:04X}") for name in row[1:3])]
    return [row[5].startswith("02:") for row in ends]


def sockets_of(pid: int) -> set[str]:
    """Return the open sockets of a process; none if it has ended."""
    try:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {link for link in links if link.startswith("socket:")}


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports at which a process listens."""
    own = sockets_of(pid)
    rows = [row for row in _rows() if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {int(row[1].rpartition(":")[2], 16) for row in rows}


def _rows() -> Iterator[list[str]]:
    """Yield the fields of each TCP socket (proc_pid_net(5))."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            yield line.split()


class Traffic(NamedTuple):
    """What a server has received and sent; a small message is one segment."""

    connections: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int

    @property
    def per_connection(self) -> list[float]:
        """Mean of each connection: messages in and out, bytes in and out."""
        return [total / self.connections for total in self[1:]]

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Return what has been added since; connections are the present ones."""
        added = (new - old for new, old in zip(self[1:], earlier[1:], strict=True))
        return Traffic(self.connections, *added)


def can_count_traffic() -> bool:
    """Tell whether `ss` of iproute2 is installed."""
    return shutil.which("ss") is not None


def traffic_of(port: int) -> Traffic:
    """Count what the open connections to a local port have carried."""
    ss = subprocess.run(
        ["ss", "-tinOH", "state", "established", f"sport = :{port}"],
        capture_output=True,
        check=True,
        text=True,
    )
    lines = ss.stdout.splitlines()
    names = ("data_segs_in", "data_segs_out", "bytes_received", "bytes_sent")
    return Traffic(len(lines), *(sum(_field(line, name) for line in lines) for name in names))


def _field(line: str, name: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", line)
    return int(match[1]) if match else 0  # `ss` leaves out what is 0
