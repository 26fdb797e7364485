"""What has gone through a server's connections, by the kernel's own account."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

__all__ = ["Traffic", "is_counting", "traffic_of"]


class Traffic(NamedTuple):
    """What a server has got and sent; small messages are one segment each."""

    connections: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int

    @property
    def per_connection(self) -> list[float]:
        """What each has carried: messages in and out, bytes in and out."""
        return [one / self.connections for one in self[1:]]

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Return what has been added since; connections are those of now."""
        added = (new - old for new, old in zip(self[1:], earlier[1:], strict=True))
        return Traffic(self.connections, *added)


def is_counting() -> bool:
    """Tell whether this machine can count."""
    return shutil.which("ss") is not None


def traffic_of(port: int) -> Traffic:
    """Count what the open connections to a port of this machine have carried."""
    asked = subprocess.run(
        ["ss", "-tinOH", "state", "established", f"sport = :{port}"],
        capture_output=True,
        check=True,
        text=True,
    )
    lines = asked.stdout.splitlines()
    names = ("data_segs_in", "data_segs_out", "bytes_received", "bytes_sent")
    return Traffic(len(lines), *(sum(_field(line, name) for line in lines) for name in names))


def _field(line: str, name: str) -> int:
    found = re.search(rf"\b{name}:(\d+)", line)
    return int(found[1]) if found else 0  # `ss` leaves out what is 0
