"""Stores under test: in memory, `StoreServer` over TCP, and torch's own servers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from elastic_aio.discovery.engine import load_engine
from elastic_aio.store import Dropped, MemoryStore, RemoteStore, Store, StoreServer, connect, wire
from tests.support.leaks import SESSION_VARIABLE

HAS_TORCH = importlib.util.find_spec("torch") is not None

_TORCH_SERVERS = """
import sys
import torch.distributed as dist
stores = []
print("ready", flush=True)
for line in sys.stdin:
    stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                use_libuv=line.strip() == "libuv"))
    print(stores[-1].port, flush=True)
"""


@pytest.fixture(scope="session")
def torch_server() -> Iterator[Callable[[str], int]]:
    """Return a function that starts a torch server, `libuv` or `legacy`, and returns its port."""
    pytest.importorskip("torch", reason="needs torch's server")
    # Without the mark of this session: it outlives the test that begins with it.
    env = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, "-c", _TORCH_SERVERS],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def start(kind: str) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(kind + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield start
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="session", autouse=True)
def _torch_server_first(request: pytest.FixtureRequest) -> None:
    """Start its process before the first test, whose leak check it would fail otherwise."""
    if HAS_TORCH:
        request.getfixturevalue("torch_server")


@dataclass(frozen=True)
class Pair:
    """Two clients of one store, and the capabilities of that store."""

    one: Store
    two: Store
    has_extensions: bool
    has_queues: bool
    reports_refusals: bool


_KINDS = [
    "memory",
    "ours",
    "plain",
    "tls",
    "plain over tls",
    pytest.param("libuv", marks=pytest.mark.torch),
    pytest.param("legacy", marks=pytest.mark.torch),
    pytest.param("etcd", marks=pytest.mark.engine),
    pytest.param("redis", marks=pytest.mark.engine),
]


def hide_extensions(server: StoreServer) -> None:
    """Make a server of this package look like torch's: without the reserved key."""
    server.service.handlers[wire.CHECK] = server.keyspace.check


@pytest.fixture(params=_KINDS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two clients of a fresh store, for each kind of store."""
    kind = request.param
    async with contextlib.AsyncExitStack() as stack:
        if kind == "memory":
            memory = await stack.enter_async_context(MemoryStore())
            other = await stack.enter_async_context(memory.another())
            yield Pair(memory, other, True, True, True)
            return
        if kind in ("etcd", "redis"):
            make = load_engine(kind)
            endpoint, prefix = request.getfixturevalue(f"{kind}_endpoint"), f"/{uuid.uuid4().hex}"
            engines = [make(endpoint, key_prefix=prefix, wait_timeout=20) for _ in range(2)]
            opened = [await stack.enter_async_context(store) for store in engines]
            yield Pair(opened[0], opened[1], True, True, True)
            return
        tls = request.getfixturevalue("authority").issue() if kind.endswith("tls") else None
        if kind in ("ours", "plain", "tls", "plain over tls"):
            server = await stack.enter_async_context(StoreServer("127.0.0.1", tls=tls))
            if kind.startswith("plain"):
                hide_extensions(server)
            endpoint = server.endpoint
        else:
            start: Any = request.getfixturevalue("torch_server")
            endpoint = f"127.0.0.1:{start(kind)}"
        one = await stack.enter_async_context(connect(endpoint, wait_timeout=20, tls=tls))
        two = await stack.enter_async_context(connect(endpoint, wait_timeout=20, tls=tls))
        is_ours = kind in ("ours", "tls")
        assert one.has_extensions == is_ours
        yield Pair(one, two, is_ours, kind != "legacy", is_ours)


@pytest.fixture
def dropped() -> list[Dropped]:
    """The connections that `server` has dropped."""
    return []


@pytest.fixture
async def server(dropped: list[Dropped]) -> AsyncIterator[StoreServer]:
    """A running server."""
    async with StoreServer("127.0.0.1", on_drop=dropped.append) as running:
        yield running


@pytest.fixture
async def store(server: StoreServer) -> AsyncIterator[RemoteStore]:
    """A client of `server`."""
    async with connect(server.endpoint, wait_timeout=20) as connected:
        yield connected
