"""Nodes that meet: in this process, and as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.rendezvous.points import MeetingPoints
from elastic_aio.rendezvousspec import RendezvousSpec
from tests.support.children import DEADLINE_S
from tests.support.cli import environment

_NODE = Path(__file__).with_name("node.py")

RUN = "run"


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at, out of the range that the kernel gives away."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(20_000 + _count() % 10_000, 32_000):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
                sock.listen()
            except OSError:
                continue
            return port
    raise AssertionError("every port is in use")


def _count() -> int:
    global _counted
    _counted += 7
    return _counted


_counted = os.getpid()


class Node:
    """A node as a process; it says where it is in JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def says(self, *names: str) -> dict[str, Any]:
        """Return the next line that has all these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                said: dict[str, Any] = json.loads(line)
                if all(name in said for name in names):
                    return said
        raise AssertionError(f"it ended without a word of {names}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        """Let it leave, and wait until it has."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(DEADLINE_S):
            await self.process.communicate()


StartNode = Callable[..., Any]


@pytest.fixture
async def start_node() -> AsyncIterator[StartNode]:
    """Start nodes with settings of `RendezvousSpec`; they end with the test."""
    nodes: list[Node] = []

    async def start(*, before: Sequence[str] = (), **settings: Any) -> Node:
        process = await asyncio.create_subprocess_exec(
            *before,
            sys.executable,
            str(_NODE),
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
        )
        nodes.append(Node(process))
        return nodes[-1]

    yield start
    for node in nodes:
        await node.end()


MakePoints = Callable[..., MeetingPoints]


@pytest.fixture
async def make_points() -> AsyncIterator[MakePoints]:
    """Make nodes in this process; what they have is abandoned after the test."""
    made: list[MeetingPoints] = []

    def make(endpoint: str, *, run_id: str = RUN, **settings: Any) -> MeetingPoints:
        settings.setdefault("read_timeout", DEADLINE_S)
        made.append(MeetingPoints(RendezvousSpec(endpoint=endpoint, **settings), run_id))
        return made[-1]

    yield make
    for points in made:
        await points.abandon()


@pytest.fixture
def only_local(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let this process believe that of all addresses only one is its machine's."""

    def believe(address: str) -> None:
        monkeypatch.setattr(
            "elastic_aio.rendezvous.scouts.is_local", lambda one: one[1][0] == address
        )

    return believe
