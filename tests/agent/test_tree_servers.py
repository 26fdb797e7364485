"""Servers as children: sockets that stay open, readiness, reloads that refuse no connection."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import Agent, GroupSpec, LaunchSpec, LogSpec, RestartPolicy, SpecError, launch
from elastic_aio.child_events import ChildLaunched, ReadinessChanged
from elastic_aio.spec.probe import LogMatch, Tcp
from elastic_aio.spec.sockets import SocketSpec
from tests.agent.test_supervisor_driver import leaf, order, until_all_run
from tests.support.children import python, until
from tests.support.leaks import open_descriptors
from tests.support.sockets import free_port

# Answers each connection with its version and pid; SIGTERM ends it between two of them.
SERVER = """
import os, select, signal, socket, sys
listener = socket.socket(fileno=3)
listener.setblocking(False)
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
codes = []
signal.signal(signal.SIGTERM, lambda *_: codes.append(0))
signal.signal(signal.SIGUSR1, lambda *_: codes.append(3))
print("serving", flush=True)
while True:
    ready, _, _ = select.select([listener, reader], [], [])
    if reader in ready:
        sys.exit(codes[0])
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        continue
    connection.sendall(b"VERSION %d" % os.getpid())
    connection.close()
"""


def servers(port: int, version: str, number: int = 4, **settings: Any) -> LaunchSpec:
    """Return so many workers that serve a version at one port."""
    policy = RestartPolicy(scope="worker", backoff=None)
    return leaf(
        python(SERVER.replace("VERSION", version)),
        nproc_per_node=number,
        sockets=[f"tcp://127.0.0.1:{port}"],
        max_restarts=3,
        restart=policy,
        logs=LogSpec(redirects=3),
        ready=LogMatch("serving"),
        **settings,
    )


@asynccontextmanager
async def clients(port: int, number: int = 8) -> AsyncIterator[list[str]]:
    """Connect again and again; yield the answers, which all come at the end of the block."""
    answers: list[str] = []
    is_over = False

    async def connect() -> None:
        while not is_over:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answers.append((await reader.read()).decode())
            writer.close()
            await writer.wait_closed()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(connect())
        yield answers
        is_over = True


def versions(answers: list[str]) -> set[str]:
    return {answer.partition(" ")[0] for answer in answers}


def new_descriptors(before: Container[int]) -> dict[int, str]:
    """Return what is open and was not; a loop keeps /dev/null open for its own streams."""
    now = open_descriptors().items()
    return {fd: what for fd, what in now if fd not in before and what != "/dev/null"}


@pytest.mark.both_loops
async def test_reloads_refuse_no_connection() -> None:
    """Three versions one after the other, and a broken one, which never serves."""
    port = free_port()
    before = open_descriptors()
    async with Agent(servers(port, "v0")) as agent:
        await until_all_run(agent)
        async with clients(port) as answers:
            for version in ("v1", "v2", "v3"):
                pids = {*agent.pids().values()}
                assert await agent.reload(spec=servers(port, version))
                assert not pids & {*agent.pids().values()}
                answers.clear()
                await until(lambda: len(answers) > 50)
                assert versions(answers) == {version}
            kept = agent.pids()
            broken = servers(port, "v4").replace(entrypoint=python("raise SystemExit(3)"))
            assert not await agent.reload(spec=broken)
            assert agent.pids() == kept
            answers.clear()
            await until(lambda: len(answers) > 50)
        assert "" not in answers
        assert versions(answers) == {"v3"}
    assert new_descriptors(before) == {}


@pytest.mark.parametrize("scope", ["worker", "group"])
@pytest.mark.parametrize("reuse_port", [False, True])
async def test_a_reload_changes_sockets_and_keeps_an_address(
    scope: Any, reuse_port: bool, tmp_path: Path
) -> None:
    """What stays is taken over, what is new is opened, what is gone is closed with its workers."""
    ports, before = [free_port(), free_port()], open_descriptors()
    kept, renamed = (
        SocketSpec(f"tcp://127.0.0.1:{ports[0]}", name=name, reuse_port=reuse_port)
        for name in ("kept", "renamed")
    )
    paths = [tmp_path / name for name in ("gone", "new", "both")]
    gone, new, both = (SocketSpec(f"unix://{path}") for path in paths)
    policy = RestartPolicy(scope=scope, backoff=None)
    old = servers(ports[0], "v0", 2).replace(sockets=[kept, gone, both], restart=policy)
    tcp = f"tcp://127.0.0.1:{ports[1]}"
    changes: dict[str, Any] = {"sockets": [renamed, both, new, tcp]}
    async with Agent(GroupSpec({"web": old, "other": leaf()})) as agent:
        await until_all_run(agent)
        async with clients(ports[0], 2) as answers:
            broken = old.replace(entrypoint=python("raise SystemExit(3)"), **changes)
            if scope == "worker":
                assert not await agent.reload("web", broken)
                assert [path.exists() for path in paths] == [True, False, True]
            made = python(SERVER.replace("VERSION", "v1"))
            assert await agent.reload("web", old.replace(entrypoint=made, **changes))
            await until(lambda: agent.children()["web"].is_ready)
            answers.clear()
            await until(lambda: len(answers) > 20)
        assert versions(answers) == {"v1"}
        await until(lambda: not paths[0].exists())
        assert [path.exists() for path in paths] == [False, True, True]
        socket.create_connection(("127.0.0.1", ports[1]), timeout=5).close()
    assert not [path for path in paths if path.exists()]
    assert new_descriptors(before) == {}


async def test_a_crash_and_a_scale_refuse_no_connection() -> None:
    """The other workers serve on; further ones serve at the same socket."""
    port = free_port()
    async with Agent(servers(port, "v0")) as agent:
        await until_all_run(agent)
        async with clients(port) as answers:
            before = agent.pids()
            os.kill(before[2], signal.SIGUSR1)  # it leaves between two connections
            await until(lambda: agent.pids().get(2, before[2]) != before[2])
            assert {rank for rank in before if agent.pids()[rank] == before[rank]} == {0, 1, 3}
            await agent.scale("", 6)
            await until(lambda: agent.status().is_ready and len(agent.pids()) == 6)
            answers.clear()
            pids = {str(pid) for pid in agent.pids().values()}
            await until(lambda: {answer.partition(" ")[2] for answer in answers} == pids)
            await agent.scale("", 2)
            await until(lambda: len(agent.pids()) == 2)
        assert "" not in answers


async def test_a_gang_keeps_its_sockets_over_starts_by_its_supervisor() -> None:
    """Connections wait for the next start; a child that is stopped refuses them."""
    port = free_port()
    always = servers(port, "v0", 1).replace(restart="always", max_restarts=0)
    async with Agent(GroupSpec({"web": always, "other": leaf()})) as agent:
        await until_all_run(agent)
        async with clients(port, 2) as answers:
            before = agent.pids("web")
            os.kill(before[0], signal.SIGUSR1)
            await until(lambda: agent.pids("web").get(0, before[0]) != before[0])
            answers.clear()
            await until(lambda: len(answers) > 10)
        assert "" not in answers
        await agent.stop(child="web")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert await agent.restart(child="web")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert (await reader.read()).startswith(b"v0")
        writer.close()


async def test_a_group_keeps_its_sockets_over_starts_by_its_parent() -> None:
    """Clients wait for the next one; the end of the group closes them."""
    port, before = free_port(), open_descriptors()
    inner = GroupSpec({"web": servers(port, "v0", 1), "fails": leaf()}, max_restarts=9, window=None)
    spec = GroupSpec({"inner": inner, "other": leaf()}, essential=["other"], window=None)
    async with Agent(spec) as agent:
        await until_all_run(agent)
        async with clients(port) as answers:
            for number in (1, 2):
                os.kill(agent.pids("inner/fails")[0], signal.SIGKILL)
                await until(lambda: agent.children()["inner"].generation == number)  # noqa: B023
                answers.clear()
                await until(lambda: len(answers) > 20)
        await agent.stop(child="inner")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    assert not new_descriptors(before)


async def test_a_child_waits_until_what_it_is_after_is_ready() -> None:
    """By a probe, not by the start of the server."""
    port = free_port()
    script = "import socket, time; time.sleep(0.5);"
    script += f" s = socket.create_server(('127.0.0.1', {port})); time.sleep(99)"
    server = leaf(python(script), ready=Tcp(f"127.0.0.1:{port}", period=0.1))
    spec = GroupSpec({"client": leaf(), "server": server}, after={"client": ["server"]})
    async with Agent(spec) as agent:
        await until_all_run(agent)
        status = agent.children()["server"]
        assert status.ready_since is not None
        await agent.stop()
        history = [event async for event in agent.events()]
    launched = order(history, ChildLaunched)
    assert launched == ["server", "client"]
    of_readiness = [one for one in history if isinstance(one, ReadinessChanged)]
    ready = next(one.seq for one in of_readiness if one.child == "server")
    assert ready < next(one.seq for one in history if one.child == "client")


async def test_a_socket_that_is_taken_is_an_error_of_the_job() -> None:
    """One line, and nothing is left."""
    port = free_port()
    before = open_descriptors()
    with socket.create_server(("127.0.0.1", port)):
        for spec in (servers(port, "v0"), GroupSpec({"web": servers(port, "v0", 1)})):
            with pytest.raises(SpecError, match=r"^(children\.web\.)?sockets: cannot be bound"):
                await launch(spec)
    assert open_descriptors().keys() <= before.keys()
