"""Networks of their own for two agents, one of which can be cut off in silence.

Needs root, `ip` and `nft`.  A network that is cut drops what comes and what goes, and
tells nobody, as a switch does that has lost power.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Network", "missing_for_networks", "two_networks"]


@dataclass(frozen=True, slots=True)
class Network:
    """One end of a cable between two network namespaces."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that make it run there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Drop every packet from now on."""
        rules = "; ".join(
            f"add chain inet cut {hook} {{ type filter hook {hook} priority 0; policy drop; }}"
            for hook in ("input", "output")
        )
        _do(*self.prefix, "nft", f"add table inet cut; {rules}")

    def mend(self) -> None:
        """Let packets through again."""
        _do(*self.prefix, "nft", "delete table inet cut")


def missing_for_networks() -> str:
    """Return what is missing to make networks; empty when nothing is."""
    if os.geteuid():
        return "needs root"
    lacking = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}"
    try:
        with two_networks() as (first, _):
            first.cut()
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode(errors='replace').strip()}"
    return ""


@contextmanager
def two_networks() -> Iterator[tuple[Network, Network]]:
    """Make two networks that reach each other and nobody else.

    Raises:
        CalledProcessError: the kernel does not let us.
    """
    token = secrets.token_hex(3)
    ends = tuple(Network(f"aio-{token}-{end}", f"10.213.0.{end}") for end in (1, 2))
    try:
        for end in ends:
            _do("ip", "netns", "add", end.name)
        left, right = (end.name for end in ends)
        _do(
            "ip",
            "link",
            "add",
            "wire",
            "netns",
            left,
            "type",
            "veth",
            "peer",
            "wire",
            "netns",
            right,
        )
        for end in ends:
            inside = ("ip", "-n", end.name)
            _do(*inside, "addr", "add", f"{end.address}/24", "dev", "wire")
            _do(*inside, "link", "set", "wire", "up")
            _do(*inside, "link", "set", "lo", "up")
        yield ends[0], ends[1]
    finally:
        for end in ends:
            subprocess.run(["ip", "netns", "delete", end.name], capture_output=True, check=False)


def _do(*words: str) -> None:
    subprocess.run(words, capture_output=True, check=True)
