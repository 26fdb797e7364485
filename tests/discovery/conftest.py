"""Locators in this process, and nodes as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.discovery.locator import StoreLocator
from elastic_aio.discovery.network import StoreNetwork
from elastic_aio.spec.rendezvous import RendezvousSpec
from tests.support.children import DEADLINE_S
from tests.support.cli import environment

_NODE = Path(__file__).with_name("node.py")

RUN = "run"


class Node:
    """A node as a process that prints JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def wait_printed(self, *names: str) -> dict[str, Any]:
        """Return the next line that has all these fields."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stdout.readline():
                fields: dict[str, Any] = json.loads(line)
                if all(name in fields for name in names):
                    return fields
        raise AssertionError(f"it exited without printing {names}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        """Stop it, and wait until it has exited."""
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


MakeLocator = Callable[..., StoreLocator]


@pytest.fixture
async def make_locator() -> AsyncIterator[MakeLocator]:
    """Make locators in this process; they are closed after the test."""
    locators: list[StoreLocator] = []

    def make(endpoint: str, *, run_id: str = RUN, **settings: Any) -> StoreLocator:
        settings.setdefault("read_timeout", DEADLINE_S)
        locators.append(StoreLocator(RendezvousSpec(endpoint=endpoint, **settings), run_id))
        return locators[-1]

    yield make
    for locator in locators:
        await locator.aclose()


@pytest.fixture
def only_local(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Patch `is_local` so that only one address belongs to this host."""

    def patch(address: str) -> None:
        monkeypatch.setattr(StoreNetwork, "is_local", lambda _, one: one[1][0] == address)

    return patch
