"""Peers of this package: other programs, with what each of them has a setting for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.support.cli import REPOSITORY

__all__ = ["OURS", "Installer", "Lacks", "NotRun", "Peer", "output_of", "refuse"]

OURS = "elastic_aio"
_INSTALL_S = 600


class Lacks(Exception):
    """A peer has no setting, or no command, for what a behaviour needs."""


def refuse(*wanted: object) -> None:
    """Raise `Lacks` if any of what a peer has no setting for is wanted."""
    if any(wanted):
        raise Lacks


@dataclass(frozen=True)
class Peer:
    """A program that runs here.

    Args:
        name: column of the table.
        version: what it says that it is.
        tools: directory of its commands.
    """

    name: str
    version: str
    tools: Path


@dataclass(frozen=True)
class NotRun:
    """A peer that does not run here, and why."""

    name: str
    reason: str


_P = TypeVar("_P", bound=Peer)


def output_of(*command: str, cwd: Path = REPOSITORY, env: dict[str, str] | None = None) -> str:
    """Run a command, which must succeed; return its output."""
    ended = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=True, timeout=_INSTALL_S
    )
    return ended.stdout.strip()


class Installer:
    """Installs peers below a directory.

    Args:
        directory: for what it unpacks.
        venv: a virtual environment whose packages are used, and which gets those that it lacks.
    """

    def __init__(self, directory: Path, venv: Path | None = None) -> None:
        self.directory = directory
        self._venv = venv or directory / "venv"

    def attempt(self, name: str, find: Callable[[Installer], Peer]) -> Peer | NotRun:
        """Return a peer, or why it does not run here."""
        try:
            return find(self)
        except (OSError, subprocess.SubprocessError) as error:
            text = getattr(error, "stderr", "") or str(error)
            return NotRun(name, text.strip().splitlines()[-1])

    def pypi(self, kind: type[_P], name: str, *packages: str) -> _P:
        """Install packages of PyPI; return a peer with the version of the first one."""
        tools = self._venv / "bin"
        if not tools.exists():
            output_of(sys.executable, "-m", "venv", str(self._venv))
        output_of(str(tools / "pip"), "install", "--quiet", *packages)
        shown = output_of(str(tools / "pip"), "show", packages[0].partition("==")[0])
        line = next(line for line in shown.splitlines() if line.startswith("Version: "))
        return kind(name, line.partition(" ")[2], tools)
