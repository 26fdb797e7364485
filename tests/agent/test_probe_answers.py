"""Whether it is the worker that answers its probe: strangers, shared sockets, shared ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Event,
    ForeignAnswer,
    Http,
    JobFailed,
    LaunchSpec,
    LivenessSpec,
    RestartPolicy,
    SocketSpec,
    StopPlan,
    Tcp,
    WorkerReady,
    launch,
)
from elastic_aio.sockets import accepted_inode, listening_sockets
from tests.agent.test_probes import FAST, answer_of, count, running, seen
from tests.agent.test_supervisor_driver import until_all_run
from tests.support.children import SLEEPER, python, shell, until
from tests.support.sockets import free_port

# Answers each connection at a socket as HTTP, and closes it at once.
SERVE = """
def serve(listener):
    while True:
        connection, _ = listener.accept()
        try:
            head = line = connection.recv(4096)
            while line and b"\\r\\n\\r\\n" not in head:
                head += (line := connection.recv(4096))
            connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
        except OSError:
            pass
        connection.close()
"""
BOUND = """
import os, socket, sys, time
def bound(host, port, *options):
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    for option in (socket.SO_REUSEADDR, *options):
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    listener.bind((host, port))
    listener.listen()
    return listener
"""


@contextmanager
def stranger(host: str, port: int, *options: int) -> Iterator[int]:
    """Run a server that is no process of a job; the value is its pid."""
    words = ", ".join(map(str, options))
    script = f"{BOUND}{SERVE}s = bound({host!r}, {port}, {words}); print(flush=True); serve(s)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def foreign(events: list[Event]) -> list[str]:
    return [event.why for event in events if isinstance(event, ForeignAnswer)]


@pytest.mark.parametrize("kind", ["http", "tcp"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "::"])
async def test_a_stranger_at_the_port_makes_no_worker_ready(kind: str, host: str) -> None:
    """It is named once; the worker is ready when it has the port itself."""
    port = free_port(host)
    asked = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "::1": "[::1]"}.get(host, host)
    ready: Any = Tcp(f"{asked}:{port}", **FAST)
    if kind == "http":
        ready = Http(f"http://{asked}:{port}/", **FAST)
    script = f"""{BOUND}{SERVE}
while True:
    try:
        serve(bound({host!r}, {port}))
    except OSError:
        time.sleep(0.02)
"""
    with stranger(host, port) as pid:
        async with running(*python(script), ready=ready) as (agent, events):
            await seen(events, ForeignAnswer, 1)
            (why,) = foreign(events)
            assert f"(pid {pid}), no process of this child" in why
            assert answer_of(agent) == why
            assert not count(events, WorkerReady)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: agent.status().is_ready)
            assert count(events, ForeignAnswer) == 1


async def test_a_stranger_keeps_no_worker_alive() -> None:
    port = free_port("127.0.0.1")
    probe = Tcp(f"127.0.0.1:{port}", threshold=2, **FAST)
    with stranger("127.0.0.1", port), pytest.raises(JobFailed, match="no process of this child"):
        await launch(LaunchSpec(SLEEPER, alive=probe))


async def test_the_more_exact_address_answers() -> None:
    """A program that listens at all addresses does not answer for one that has one of its own."""
    port = free_port("127.0.0.1")
    script = f"{BOUND}{SERVE}serve(bound('127.0.0.1', {port}, socket.SO_REUSEPORT))"
    with stranger("0.0.0.0", port, socket.SO_REUSEPORT):
        ready = Http(f"http://127.0.0.1:{port}/", **FAST)
        async with running(*python(script), ready=ready) as (agent, _):
            await until(lambda: agent.status().is_ready)


@pytest.mark.parametrize("prefix", ["", "setsid sh -c '", "exec setsid -f sh -c '"])
async def test_a_process_that_the_worker_has_started_answers_for_it(prefix: str) -> None:
    """A child of a child, also in a session of its own, whose parent has ended."""
    port = free_port("127.0.0.1")
    script = f"{BOUND}{SERVE}serve(bound('127.0.0.1', {port}))"
    end = "'" if prefix else ""
    command = shell(f'{prefix.removeprefix("exec ")}$PY -c "$SCRIPT" & :{end}; exec sleep 99')
    env = {"PY": sys.executable, "SCRIPT": script}
    ready = Http(f"http://127.0.0.1:{port}/", **FAST)
    async with running(*command, ready=ready, env=env) as (agent, events):
        await until(lambda: agent.status().is_ready)
        assert not foreign(events)


SERVER = f"""
import os, signal, socket, sys, time
{SERVE}
if sys.argv[1] == "broken" or sys.argv[1] == os.environ["RANK"]:
    time.sleep(99)
serve(socket.socket(fileno=3))
"""


def servers(port: int, version: str, number: int = 1, **fields: Any) -> LaunchSpec:
    spec = LaunchSpec(
        [*python(SERVER), version],
        nproc_per_node=number,
        sockets=[SocketSpec(f"tcp://127.0.0.1:{port}", reuse_port=fields.pop("reuse_port", False))],
        restart=RestartPolicy(scope="worker", backoff=None),
        ready=Http(f"http://127.0.0.1:{port}/", **FAST),
        stop=StopPlan.within(5),
    )
    return spec.replace(**fields)


@pytest.mark.parametrize("reuse_port", [False, True])
async def test_an_old_worker_does_not_answer_for_a_new_one(reuse_port: bool) -> None:
    """A reload to a server that accepts nothing fails, says why, and keeps the old one."""
    port = free_port("127.0.0.1")
    events: list[Event] = []
    spec = servers(port, "old", reuse_port=reuse_port)
    async with Agent(spec, listeners=[events.append]) as agent:
        await until(lambda: agent.status().is_ready)
        before = agent.pids()
        limits: dict[str, Any] = {"liveness": LivenessSpec(ready_timeout=3)}
        broken = servers(port, "broken", reuse_port=reuse_port, **limits)
        assert not await agent.reload(spec=broken)
        assert agent.pids() == before
        if not reuse_port:
            assert foreign(events) == [
                "HTTP status 200, accepted by another process at the same socket"
            ]
        assert await agent.reload(spec=servers(port, "new", reuse_port=reuse_port))
        assert agent.pids() != before


async def test_a_new_worker_is_ready_when_another_new_one_answers() -> None:
    """It may never win the race for a connection."""
    port = free_port("127.0.0.1")
    events: list[Event] = []
    async with Agent(servers(port, "1", 2), listeners=[events.append]) as agent:
        await until(lambda: agent.status().is_ready)
        assert [event.rank for event in events if isinstance(event, ForeignAnswer)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("reuse_port", [False, True])
async def test_a_hung_worker_of_a_shared_port_harms_no_other_one(reuse_port: bool) -> None:
    """With a socket of its own it is found; else it is said that it cannot be asked."""
    port = free_port("127.0.0.1")
    events: list[Event] = []
    alive = Http(f"http://127.0.0.1:{port}/", period=0.02, timeout=0.3)
    spec = servers(
        port, "v", 2, reuse_port=reuse_port, alive=alive, stop=StopPlan.within(0.5), max_restarts=9
    )
    async with Agent(spec, listeners=[events.append]) as agent:
        await until_all_run(agent)
        before = agent.pids()
        os.kill(before[1], signal.SIGSTOP)
        if reuse_port:
            await until(lambda: agent.pids().get(1, before[1]) != before[1])
        else:
            await until(lambda: any(e.rank == 1 for e in events if isinstance(e, ForeignAnswer)))
            assert agent.pids() == before
        assert agent.pids()[0] == before[0]


@pytest.mark.parametrize("kind", ["http", "tcp"])
async def test_a_socket_from_which_no_process_accepts_is_no_answer(kind: str) -> None:
    """The kernel completes its connections."""
    port = free_port("127.0.0.1")
    ready: Any = Tcp(f"127.0.0.1:{port}", **FAST)
    if kind == "http":
        ready = Http(f"http://127.0.0.1:{port}/", period=0.02, timeout=0.2)
    sockets = [f"tcp://127.0.0.1:{port}"]
    async with running(ready=ready, sockets=sockets) as (agent, _):
        await until(lambda: answer_of(agent))
        assert answer_of(agent) in (
            "connected, accepted by no known process at the same socket",
            "no answer within 0.2 s",
        )
        assert not agent.status().is_ready


async def test_sockets_are_known_by_address_and_connection() -> None:
    """Of either family, and of both."""
    for host in ("127.0.0.1", "::1", "::"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with (
            socket.create_server((host, 0), family=family) as server,
            socket.socket(socket.AF_INET if host == "::" else family) as client,
        ):
            asked = "127.0.0.1" if host == "::" else host
            if host == "::":
                server.close()
                server = socket.create_server(("::", 0), family=family, dualstack_ipv6=True)
            client.connect((asked, server.getsockname()[1]))
            ends = client.getsockname(), client.getpeername()
            assert str(os.fstat(server.fileno()).st_ino) in listening_sockets(ends[1][1])
            assert accepted_inode(*ends) == ""
            accepted, _ = server.accept()
            with accepted:
                assert accepted_inode(*ends) == str(os.fstat(accepted.fileno()).st_ino)
            assert accepted_inode(*ends) == ""
            server.close()
