"""The store that the agent gives to the workers of each attempt."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path

import pytest

from elastic_aio import (
    Event,
    JobFailed,
    LaunchSpec,
    LogSpec,
    WorkerStoreRefused,
    format_failure,
    launch,
)
from elastic_aio.agent.worker_store import MASTER_ADDR, MasterPorts, WorkerStore
from elastic_aio.errors import HostError, StoreLost
from elastic_aio.store import KeyspaceLimits, ServerLimits, connect, server
from tests.support.restarts import AT_ONCE

GUARD = 30.0
# Speaks the protocol without torch: VALIDATE, then ADD 1 to a key, and tells the sum.
COUNT = """
import os, socket, struct
peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
peer.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
peer.sendall(struct.pack("<BQ", 4, 6) + b"/count" + struct.pack("<q", 1))
answer = b""
while len(answer) < 8:
    answer += peer.recv(8)
total = struct.unpack("<q", answer)[0]
print(os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["MASTER_PORT"], total, flush=True)
raise SystemExit(total == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2")
"""


@pytest.mark.slow
async def test_every_attempt_has_a_fresh_store(tmp_path: Path) -> None:
    """What an attempt left in its store is not there in the next one, nor is its port."""
    spec = LaunchSpec(
        [sys.executable, "-S", "-c", COUNT],
        nproc_per_node=2,
        max_restarts=2,
        restart=AT_ONCE,
        logs=LogSpec(log_dir=tmp_path, redirects=1),
    )
    result = await launch(spec)
    assert result.restarts == 2
    said = [path.read_text().split() for path in tmp_path.rglob("attempt_2/*/stdout.log")]
    assert sorted(total for _, _, total in said) == ["1", "2"]
    assert {shared for shared, _, _ in said} == {"True"}
    assert len({port for _, port, _ in said}) == 1


async def test_no_connection() -> None:
    """A store that is never used is a bound port, which is free again afterwards."""
    store = WorkerStore(0)
    assert repr(store) == f"<WorkerStore on port {store.port}: no connection yet>"
    await store.aclose()
    again = WorkerStore(store.port)
    await again.aclose()


async def test_the_first_connection_makes_it_a_store() -> None:
    """A client that connects finds a store; when it closes, the connection is closed."""
    store = WorkerStore(0)
    async with asyncio.timeout(GUARD):
        async with connect(f"{MASTER_ADDR}:{store.port}", reconnect_for=0) as client:
            await client.set("key", b"value")
            assert await client.get("key") == b"value"
            await store.aclose()
            with pytest.raises(StoreLost):
                await client.get("key")


async def test_a_port_that_is_taken() -> None:
    """One line says which port cannot be had."""
    with socket.create_server((MASTER_ADDR, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .+"):
            WorkerStore(port)
        with pytest.raises(JobFailed, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            await launch(LaunchSpec(["true"], master_port=port))
    assert caught.value.result.exit_code == 1


async def test_workers_may_host_it_themselves(tmp_path: Path) -> None:
    """Without a store of the agent no process listens at the port, and the environment says so."""
    script = """
    echo $TORCHELASTIC_USE_AGENT_STORE
    if (: < /dev/tcp/127.0.0.1/$MASTER_PORT) 2>/dev/null; then exit 1; fi
    """
    spec = LaunchSpec(
        ["bash", "-c", script], host_store=False, logs=LogSpec(log_dir=tmp_path, redirects=1)
    )
    assert (await launch(spec)).state == "succeeded"
    (said,) = tmp_path.rglob("stdout.log")
    assert said.read_text() == "False\n"


# Speaks the protocol without torch: sets a key to 3000 bytes, and waits for its peer.
FILL = """
import os, socket, struct
peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
peer.sendall(struct.pack("<BI", 0, 0x3C85F7CE))
peer.sendall(struct.pack("<BQ", 1, 4) + b"/key" + struct.pack("<Q", 3000) + bytes(3000))
raise SystemExit(f"the store has answered {peer.recv(8)}")
"""


async def test_a_full_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an event of the attempt, once, and in the failure of the worker that it has closed."""
    limits = ServerLimits(keyspace=KeyspaceLimits(stored=1000))
    monkeypatch.setattr(server, "ServerLimits", lambda: limits)
    spec = LaunchSpec([sys.executable, "-S", "-c", FILL], nproc_per_node=2, max_restarts=1)
    events: list[Event] = []
    with pytest.raises(JobFailed) as raised:
        await launch(spec, listeners=[events.append])
    refused = [event for event in events if isinstance(event, WorkerStoreRefused)]
    why = "sent a request that is refused: the store is full: its limit is 1000 bytes"
    assert [(event.attempt, event.why) for event in refused] == [(0, why), (1, why)]
    (note,) = raised.value.failures[0].notes
    assert note == f"the store of the workers dropped a client: it {why}"
    assert note in format_failure(raised.value.result, "job")


async def test_strangers_at_the_store_are_not_reported() -> None:
    """They are closed, and nothing of the job is concerned."""
    refused: list[tuple[str, str]] = []
    ports = MasterPorts(LaunchSpec("x.py"), lambda *refusal: refused.append(refusal))
    address, port = await ports.open_local()
    reader, writer = await asyncio.open_connection(address, port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(GUARD):
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        async with connect(f"{address}:{port}") as store:
            await store.num_keys()
    assert refused == []
    await ports.aclose()
