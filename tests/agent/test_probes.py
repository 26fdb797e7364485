"""Probes of the workers of a job, at real servers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from elastic_aio import (
    Agent,
    DeadlineMissed,
    Event,
    Exec,
    Http,
    JobFailed,
    LaunchSpec,
    LivenessSpec,
    LogMatch,
    LogSpec,
    Notify,
    SpecError,
    StopRequested,
    Tcp,
    WorkerReady,
    WorkerStarted,
    launch,
)
from elastic_aio.agent import probes
from elastic_aio.agent.runtime import LocalRuntime
from elastic_aio.aio import cancel_and_wait
from elastic_aio.process.children import Child
from elastic_aio.sockets import Address
from tests.support.certificates import Authority
from tests.support.children import SLEEPER, noting, shell, until
from tests.support.leaks import alive
from tests.support.restarts import at_once
from tests.support.sockets import free_port

pytestmark = pytest.mark.both_loops

FAST: dict[str, Any] = {"period": 0.02, "timeout": 5.0}


class Server:
    """An HTTP server of the test: its answers, and the requests that it has had."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        self.is_silent = False
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            if not self.is_silent:
                writer.write(self.answer)
                await writer.drain()
            else:
                await reader.read()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/health"


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    made.port = listening.sockets[0].getsockname()[1]
    async with listening:
        yield made


@asynccontextmanager
async def running(*command: str, **fields: Any) -> AsyncIterator[tuple[Agent, list[Event]]]:
    """Run a job, which is stopped at the end of the block."""
    events: list[Event] = []
    spec = LaunchSpec(command or SLEEPER, **fields)
    async with Agent(spec, listeners=[events.append]) as agent:
        yield agent, events


def count(events: list[Event], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for event in events)


async def seen(events: list[Event], kind: type[Event], number: int) -> None:
    await until(lambda: count(events, kind) == number)


def answer_of(agent: Agent) -> str:
    """Return the last answer of the first worker; empty before it."""
    return "".join(worker.probe for worker in agent.status(usage=False).workers[:1])


async def test_a_job_is_ready_when_all_workers_answer() -> None:
    """`status` says so, with the last answer; a ready worker is asked no more."""
    async with (
        serving() as server,
        running(nproc_per_node=2, ready=Http(server.url, **FAST)) as (agent, events),
    ):
        server.answer = b"HTTP/1.1 503 Busy\r\n\r\n"
        await until(lambda: len(server.requests) > 4)
        assert agent.status().is_running
        assert not agent.status().is_ready
        assert answer_of(agent) == "HTTP status 503"
        server.answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 204 x\r\n\r\n"
        await until(lambda: agent.status().is_ready)
        assert count(events, WorkerReady) == 2
        assert answer_of(agent) == "HTTP status 204"
        assert all(one.ready_since for one in agent.status().workers)
        seen = len(server.requests)
        await asyncio.sleep(0)
        assert len(server.requests) == seen
        assert server.requests[0].split(b"\r\n")[:2] == [
            b"GET /health HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}".encode(),
        ]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 301 Moved\r\nLocation: /x\r\n\r\n", "HTTP status 301"),
        (b"HTTP/1.1 404\r\n\r\n", "HTTP status 404"),
        (b"SSH-2.0-x\r\n", "the answer is no HTTP"),
        (b"HTTP/1.1 2000 x\r\n\r\n", "the answer is no HTTP"),
        (b"", "no answer: connection closed"),
        (b"HTTP/1.1 200 " + b"x" * 20_000, "the head of the answer has more than 16384 bytes"),
        (b"HTTP/1.1 200\r\n" + b"a: b\r\n" * 9_000, "HTTP status 200"),
        (b"HTTP/1.1 200 " + b"x" * 9_000 + b"\n", "HTTP status 200"),
        (b"HTTP/1.0 204 No Content\n\n", "HTTP status 204"),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200\r\n", "HTTP status 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ncut", "HTTP status 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", "HTTP status 200"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
            b"2;a=b\r\nok\r\n0\r\nX: y\r\n\r\n",
            "HTTP status 200",
        ),
    ],
)
async def test_any_answer_is_read(answer: bytes, text: str) -> None:
    """The server may be any program, and send anything."""
    async with serving() as server:
        server.answer = answer
        async with running(ready=Http(server.url, **FAST)) as (agent, _):
            await until(lambda: answer_of(agent))
            assert answer_of(agent).startswith(text)
            assert agent.status().is_ready is text.endswith((" 301", " 200", " 204"))


async def test_https_needs_no_certificate_of_a_known_authority(
    authority: Authority, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made = authority.issue()
    assert made.cert is not None
    context.load_cert_chain(made.cert, made.key)
    async with serving(context) as server:
        url = f"https://localhost:{server.port}/"
        async with running(ready=Http(url, **FAST)) as (agent, _):
            await until(lambda: agent.status().is_ready)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_server_that_says_nothing_is_not_waited_for(scheme: str) -> None:
    """Also one that does not begin TLS; nothing stays open."""
    async with serving() as server:
        server.is_silent = True
        url = f"{scheme}://127.0.0.1:{server.port}/"
        async with running(ready=Http(url, period=0.02, timeout=0.05)) as (agent, _):
            await until(lambda: answer_of(agent))
            assert answer_of(agent) in ("no answer within 0.05 s", "this process was blocked")


async def test_tcp_and_the_addresses_of_a_name() -> None:
    """The first one that accepts counts."""
    port = free_port("127.0.0.1")
    async with running(ready=Tcp(f"localhost:{port}", **FAST)) as (agent, _):
        await until(lambda: answer_of(agent) == "connection refused")
        with socket.create_server(("127.0.0.1", port)):
            await until(lambda: agent.status().is_ready)
            assert answer_of(agent) == "connected"


async def test_a_command_has_the_ranks_of_its_worker(tmp_path: Path) -> None:
    """In its arguments and its environment, which is that of the worker but for its channels."""
    probe = Exec(
        "test $RANK.$LOCAL_RANK.$WORLD_SIZE.$X.$W = ${local_rank}.${local_rank}.2.y.${local_rank}"
        " && test -n $MASTER_PORT && test -z $ELASTIC_AIO_NOTIFY_FD$TORCHELASTIC_ERROR_FILE"
        f" && test -e {tmp_path}/ready.${{local_rank}} || {{ echo one; echo two; exit 3; }}",
        **FAST,
    )
    env: dict[str, Any] = {"env": {"X": "y"}, "worker_env": [{"W": "0"}, {"W": "1"}]}
    async with running(nproc_per_node=2, ready=probe, **env) as (agent, events):
        await until(lambda: answer_of(agent) == "exit code 3: two")
        (tmp_path / "ready.1").touch()
        await until(lambda: count(events, WorkerReady))
        assert [event.rank for event in events if isinstance(event, WorkerReady)] == [1]
        assert not agent.status().is_ready
        (tmp_path / "ready.0").touch()
        await until(lambda: agent.status().is_ready)


async def test_a_command_that_takes_too_long_is_killed_with_its_group(tmp_path: Path) -> None:
    """And a command that runs when the job is stopped."""
    pids = tmp_path / "pids"
    probe = Exec(f"echo $$ >> {pids}; sleep 98 & echo $! >> {pids}; wait", period=0.02, timeout=0.3)
    async with running(ready=probe) as (agent, _):
        await until(lambda: answer_of(agent).startswith("no answer within"))
        first = [int(line) for line in pids.read_text().split()][:2]
        await until(lambda: not any(map(alive, first)))
        known = len(pids.read_text().split())
        await until(lambda: len(pids.read_text().split()) >= known + 2)
    assert not any(alive(int(line)) for line in pids.read_text().split())


async def test_a_command_that_is_missing_is_a_failure() -> None:
    async with running(ready=Exec(["no-such-command"], **FAST)) as (agent, _):
        await until(lambda: answer_of(agent))
        assert answer_of(agent) == "cannot run no-such-command: command not found"


@pytest.mark.parametrize("logs", [LogSpec(tee=3, log_dir="logs"), LogSpec(redirects=3)])
async def test_a_line_of_each_worker(
    logs: LogSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On either stream; the reader ends with the last one."""
    monkeypatch.chdir(tmp_path)
    command = shell(
        "echo no; [ $RANK = 0 ] && echo is up on $RANK || { sleep 0.1; echo is up >&2; }"
        "; exec sleep 99"
    )
    ready = LogMatch("up( on 0)?$")
    async with running(*command, nproc_per_node=2, ready=ready, logs=logs) as (agent, _):
        await until(lambda: agent.status().is_ready)
        assert answer_of(agent) == "is up on 0"


@pytest.mark.parametrize(
    "text",
    [
        r"Local: \033[36mhttp://localhost:\033[1m5173\033[22m/\033[39m\n",
        r"\033]8;;http://x\033\\Local: http://localhost:5173/\033]8;;\a\n",
        r"Local: http://localhost:5173/\r\n",
        r"boot 9%%\rLocal: http://localhost:5173/\r",
        r"\033[2KLocal: http://localhost:5173/\033(B\033[m\r\033[1A",
        r"$(head -c 9000 /dev/zero | tr \\0 .)\rLocal: http://localhost:5173/\n",
        "Local: http://localhost:5173/",
    ],
)
async def test_a_line_is_matched_as_a_terminal_shows_it(text: str) -> None:
    """Also one that has no end and does not grow, and one of a progress bar."""
    command = shell(f'printf "{text}"; while :; do echo busy >&2; sleep 0.05; done')
    ready = LogMatch("^Local: http://localhost:5173/$")
    async with running(*command, ready=ready, logs=LogSpec(redirects=3)) as (agent, _):
        await until(lambda: agent.status().is_ready)
        assert answer_of(agent) == "Local: http://localhost:5173/"


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker count as started only a while after its process has begun."""
    original = LocalRuntime.spawn

    async def spawn(self: LocalRuntime, *args: Any) -> Child:
        child = await original(self, *args)
        await asyncio.sleep(0.2)
        return child

    monkeypatch.setattr(LocalRuntime, "spawn", spawn)


@pytest.mark.usefixtures("slow_start")
async def test_a_line_that_is_read_before_its_worker_counts_as_started() -> None:
    """The start of a process may take long enough for its output."""
    command, logs = shell("echo up; exec sleep 99"), LogSpec(redirects=3)
    ready, probe = LogMatch("up"), Exec("true", **FAST)
    async with running(*command, nproc_per_node=2, ready=ready, alive=probe, logs=logs) as (
        agent,
        events,
    ):
        await until(lambda: agent.status().is_ready)
        assert count(events, WorkerReady) == 2
        await until(lambda: answer_of(agent) == "exit code 0")


@pytest.mark.usefixtures("slow_start")
async def test_a_message_before_its_worker_counts_as_started() -> None:
    """It is ready once, and asked whether it is alive."""
    say = shell("echo READY=1 >&$ELASTIC_AIO_NOTIFY_FD; exec sleep 99")
    async with running(*say, ready=Notify(), alive=Exec("true", **FAST)) as (agent, events):
        await until(lambda: answer_of(agent) == "exit code 0")
        assert count(events, WorkerReady) == 1


@pytest.mark.parametrize(
    ("stream", "logs", "missing"),
    [
        ("stdout", LogSpec(), "stdout"),
        ("any", LogSpec(), "stdout"),
        ("any", LogSpec(redirects=2), "stdout"),
        ("stderr", LogSpec(capture=False), "stderr"),
    ],
)
async def test_a_stream_that_is_in_no_file_is_refused(
    stream: Any, logs: LogSpec, missing: str
) -> None:
    """Before anything starts."""
    spec = LaunchSpec(SLEEPER, ready=LogMatch("x", stream=stream), logs=logs)
    problem = rf"^ready: is in no file, so that it cannot be read; use .* \(got \['{missing}'\]\)$"
    with pytest.raises(SpecError, match=problem):
        await launch(spec)


async def test_a_message_makes_a_worker_ready_unless_a_probe_does() -> None:
    """It has the address that programs for systemd know."""
    say = shell('echo READY=1 >&$ELASTIC_AIO_NOTIFY_FD; echo "$NOTIFY_SOCKET"; exec sleep 99')
    async with running(*say, ready=Notify(), logs=LogSpec(redirects=1)) as (agent, _):
        await until(lambda: agent.status().is_ready)
        async with agent.logs(streams=["stdout"]) as lines:
            assert (await anext(lines)).text.startswith("@")
    port = free_port("127.0.0.1")
    async with running(*say, ready=Tcp(f"127.0.0.1:{port}", **FAST)) as (agent, events):
        await until(lambda: any(one.heartbeat for one in agent.status().workers))
        assert not count(events, WorkerReady)


async def test_a_worker_that_is_not_ready_in_time_has_hung() -> None:
    """The reason has the last answer; the next attempt begins anew."""
    port = free_port("127.0.0.1")
    limits = LivenessSpec(ready_timeout=0.3)
    spec = LaunchSpec(
        SLEEPER,
        ready=Tcp(f"127.0.0.1:{port}", **FAST),
        liveness=limits,
        max_restarts=1,
        restart=at_once(),
    )
    with pytest.raises(JobFailed) as caught:
        await launch(spec)
    assert len(caught.value.result.attempts) == 2
    assert caught.value.failures[0].message == (
        "not ready 0.3 s after its start (ready timeout), last probe: connection refused"
    )


async def test_a_worker_that_is_not_alive_has_hung() -> None:
    """Asked when it is ready; then the attempt fails, and the next one is asked again."""
    events: list[Event] = []
    async with serving() as server:
        spec = LaunchSpec(
            SLEEPER,
            ready=Tcp(f"127.0.0.1:{server.port}", **FAST),
            alive=Http(server.url, threshold=2, **FAST),
            max_restarts=1,
            restart=at_once(),
        )
        async with Agent(spec, listeners=[events.append]) as agent:
            for attempts in (1, 2):
                server.answer = b"HTTP/1.1 200 OK\r\n\r\n"
                await seen(events, WorkerReady, attempts)
                await until(lambda: answer_of(agent) == "HTTP status 200")
                server.answer = b"HTTP/1.1 500 Broken\r\n\r\n"
                await seen(events, DeadlineMissed, attempts)
            with pytest.raises(JobFailed) as caught:
                await agent.wait()
    why = "not alive: its probe has failed, last answer: HTTP status 500"
    assert caught.value.failures[0].message == why
    missed = next(event for event in events if isinstance(event, DeadlineMissed))
    assert (missed.deadline, missed.why, missed.limit) == ("probe", why, 0.0)
    assert count(events, WorkerStarted) == 2


async def test_a_failed_probe_may_be_reported_only() -> None:
    """Once, until it succeeds."""
    port = free_port("127.0.0.1")
    probe = Tcp(f"127.0.0.1:{port}", threshold=1, **FAST)
    report = LivenessSpec(on_timeout="report")
    async with running(alive=probe, liveness=report) as (agent, events):
        await until(lambda: count(events, DeadlineMissed))
        with socket.create_server(("127.0.0.1", port)):
            await until(lambda: answer_of(agent) == "connected")
            assert count(events, DeadlineMissed) == 1
        await until(lambda: count(events, DeadlineMissed) == 2)
        assert agent.status().is_ready


async def test_a_lack_of_descriptors_is_no_fault_of_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuse(*_: object) -> Any:
        asked.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with serving() as server:
        probe = Tcp(f"127.0.0.1:{server.port}", threshold=1, **FAST)
        async with running(alive=probe) as (agent, events):
            await until(lambda: answer_of(agent) == "connected")
            monkeypatch.setattr("elastic_aio.agent.probes.socket.socket", refuse)
            await until(lambda: len(asked) > 3)
            monkeypatch.undo()
            assert answer_of(agent).startswith("too many open files")
            assert not count(events, DeadlineMissed)


async def test_a_blocked_loop_is_no_fault_of_the_worker() -> None:
    """The server has answered in time, and this process did not look."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        probe = Http(url, period=0.02, timeout=0.1, threshold=1)
        async with running(alive=probe) as (agent, events):
            connection = await accepted(listening)
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK")
                time.sleep(0.5)  # the loop is blocked
                await until(lambda: answer_of(agent))
            assert answer_of(agent) == "this process was blocked"
            assert not count(events, DeadlineMissed)


async def accepted(listening: socket.socket) -> socket.socket:
    """Accept a connection, and read its request."""
    connection, _ = await asyncio.to_thread(listening.accept)
    connection.settimeout(30)
    await asyncio.to_thread(connection.recv, 4096)
    return connection


async def test_probes_end_with_the_worker_that_has_exited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is still asked."""
    monkeypatch.setenv("NOTES", str(tmp_path))
    asked = tmp_path / "asked"
    probe = Exec(f"echo $RANK >> {asked}; test $RANK = 1", period=0.02, timeout=5, threshold=99)
    command = noting(
        f"[ $RANK = 0 ] || exec sleep 99; until [ -e {tmp_path}/go ]; do sleep 0.01; done"
    )
    async with running(*command, nproc_per_node=2, alive=probe) as (agent, _):
        await until(lambda: asked.exists() and {"0", "1"} <= set(asked.read_text().split()))
        (tmp_path / "go").touch()
        await until(lambda: agent.status().workers[0].state == "succeeded")
        before = asked.read_text().split()
        await until(lambda: asked.read_text().split().count("1") > before.count("1") + 3)
        assert asked.read_text().split().count("0") <= before.count("0") + 1


async def test_a_command_ends_with_its_worker(tmp_path: Path) -> None:
    """It is no process that the worker has left behind, for which the job would wait."""
    pid = tmp_path / "pid"
    probe = Exec(f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 97", timeout=99)
    events: list[Event] = []
    command = shell(f"until [ -e {pid} ]; do sleep 0.01; done")
    await launch(LaunchSpec(command, alive=probe), listeners=[events.append])
    assert not alive(int(pid.read_text()))
    assert not count(events, StopRequested)


async def test_a_signal_to_the_workers_does_not_reach_a_command(tmp_path: Path) -> None:
    """Nor is its pid among theirs."""
    trace = tmp_path / "trace"
    probe = Exec(
        f"trap 'echo usr1 >> {trace}' USR1; echo $$ >> {trace}; sleep 98 & wait", timeout=9
    )
    up = tmp_path / "up"
    command = shell(f"trap 'echo worker >> {trace}' USR1; touch {up}; while :; do sleep 0.01; done")
    async with running(*command, ready=probe) as (agent, _):
        await until(lambda: up.exists() and trace.exists() and trace.read_text().strip())
        assert agent.forward_signal("SIGUSR1") == tuple(agent.pids().values())
        await until(lambda: "worker" in trace.read_text())
        assert "usr1" not in trace.read_text()


async def test_a_late_refusal_of_an_address_that_all_workers_share_ends_no_probe() -> None:
    """Connections that wait for a full queue are refused at the same time when it is closed."""

    async def accept_all() -> None:
        while True:
            accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
            accepted.close()

    def answers() -> set[str]:
        return {one.probe for one in agent.status().workers}

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        listening.setblocking(False)
        accepting = asyncio.ensure_future(accept_all())
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        probe = Tcp(address, period=0.05, timeout=30, threshold=1000)
        async with running(nproc_per_node=2, ready=probe) as (agent, _):
            await until(lambda: answers() == {"connected"})  # the address is known
            await cancel_and_wait([accepting])
            for _ in range(10):  # several times in a row: the questions wait
                await until(lambda: task_names().count("Tcp probe") == 2)
                await asyncio.sleep(0.02)
            listening.close()
            await until(lambda: answers() == {"connection refused"})


async def test_a_second_address_that_this_host_lacks_hides_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host without IPv6 may know "localhost" as 127.0.0.1 and ::1."""

    async def look_up(host: str, port: int) -> list[Address]:
        return [
            (socket.AF_INET, ("127.0.0.1", port)),
            (socket.AF_INET6, ("::1", port)),
        ]

    monkeypatch.setattr(probes, "look_up", look_up)
    connect = asyncio.get_running_loop().sock_connect

    async def sock_connect(sock: socket.socket, address: Any) -> None:
        if sock.family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "")
        await connect(sock, address)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(loop), "sock_connect", lambda _, *words: sock_connect(*words))
    probe = Tcp(f"localhost:{free_port()}", threshold=2, **FAST)
    with pytest.raises(JobFailed, match="connection refused"):
        await launch(LaunchSpec(SLEEPER, alive=probe))


async def test_a_name_server_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For all workers and questions; and no look-up is left at the end."""
    asked: list[str] = []

    async def look_up(host: str, port: int) -> list[Address]:
        asked.append(host)
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(probes, "look_up", look_up)
    probe = Tcp("a.test:1", period=0.01, timeout=0.02)
    async with running(nproc_per_node=2, ready=probe) as (agent, _):
        await until(lambda: len([one for one in agent.status().workers if one.probe]) == 2)
        await until(lambda: any("probe of" in name for name in task_names()))  # further ones
        assert asked == ["a.test"]
    assert "look-up" not in task_names()


async def test_a_connection_to_itself_is_none() -> None:
    """A port of the range from which the kernel takes those of clients may be asked by itself."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())  # as the kernel does it, once in many thousands
        answerer = probes.Answerer(probes.Sockets(AsyncMock(return_value=[])))
        with pytest.raises(ConnectionRefusedError):
            await answerer.find(sock.getsockname(), sock.getpeername())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length:  2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
        b"HTTP/1.1 200 OK\r\nSlow: ",
    ],
)
async def test_an_answer_counts_by_its_status(answer: bytes) -> None:
    """A server may leave the connection open, against the request, or answer without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, running(ready=Http(url, period=0.02, timeout=0.5)) as (agent, _):
        await until(lambda: answer_of(agent))
        assert answer_of(agent) == "HTTP status 200"


async def test_output_is_read_until_each_worker_has_its_line(tmp_path: Path) -> None:
    """A worker that prints on costs this process nothing more; each attempt begins anew."""
    first = tmp_path / "first"
    command = shell(
        "[ $LOCAL_RANK = 0 ] || sleep 0.1; echo up"
        f"; while [ -e {first} ]; do sleep 0.02; done"
        "; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 3; exec sleep 99"
    )
    first.touch()
    async with running(
        *command,
        ready=LogMatch("up"),
        nproc_per_node=2,
        max_restarts=1,
        restart=at_once(),
        logs=LogSpec(redirects=3),
    ) as (_, events):
        await seen(events, WorkerReady, 2)
        await until(lambda: "log lines" not in task_names())
        first.unlink()
        await seen(events, WorkerReady, 4)
        await until(lambda: "log lines" not in task_names())


async def test_one_timer_serves_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between questions a job has no task and no thread for them."""
    async with serving() as server:
        probe = Http(server.url, period=30, threshold=2)
        before = threading.active_count()
        async with running(nproc_per_node=8, ready=probe) as (agent, _):
            await until(lambda: len([one for one in agent.status().workers if one.probe]) == 8)
            names = [task.get_name() for task in asyncio.all_tasks()]
            await until(lambda: not [name for name in task_names() if "probe" in name])
            assert threading.active_count() == before
            assert names


def task_names() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks()]


@pytest.mark.parametrize(
    "make", [lambda url: Http(url, **FAST), lambda _: Exec("sleep 97", **FAST)]
)
async def test_a_cancelled_job_leaves_no_question(make: Callable[[str], Any]) -> None:
    """Cancelled at any time, twice."""
    async with serving() as server:
        server.is_silent = True
        for seconds in (0.0, 0.02, 0.05, 0.1):
            job = asyncio.ensure_future(launch(LaunchSpec(SLEEPER, alive=make(server.url))))
            await asyncio.sleep(seconds)
            job.cancel()
            await asyncio.sleep(0)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
