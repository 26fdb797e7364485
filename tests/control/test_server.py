"""The control socket of a running job: its answers, its limits, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from elastic_aio import (
    Agent,
    ControlUnavailable,
    JobFinished,
    JobStopped,
    LaunchSpec,
    Restarting,
    StacksDumped,
    WorkerExited,
    event_from_json,
    launch,
)
from elastic_aio.control import server as server_module
from elastic_aio.control.client import ControlClient, RunningJob, ask, find_jobs
from elastic_aio.control.protocol import (
    REQUEST_MAX,
    AwaitEnd,
    DoneReply,
    DumpStacks,
    EndReply,
    ErrorReply,
    EventReply,
    GetEvents,
    GetStatus,
    Reply,
    RestartJob,
    SendSignal,
    StatusReply,
    StopJob,
)
from elastic_aio.control.session import refuse
from elastic_aio.control.sockets import CONTROL_DIR
from elastic_aio.outcome import JobState
from tests.support.children import DEADLINE_S, SLEEPER, noting, shell, until
from tests.support.control import own_control_dir, sockets
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.both_loops

T = TypeVar("T")


@pytest.fixture(autouse=True)
def directory() -> Iterator[Path]:
    with own_control_dir() as path:
        yield path


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run the blocking client beside the loop of the agent."""
    return await asyncio.to_thread(function, *args)


@asynccontextmanager
async def controlled(
    argv: list[str] = SLEEPER, **settings: Any
) -> AsyncIterator[tuple[Agent, str]]:
    """Run a job with a control socket; yield its agent and the path, when all workers run."""
    async with Agent(LaunchSpec(argv, **settings), control=True) as agent:
        async for _ in agent.events():
            if agent.status(usage=False).is_ready:
                break
        assert agent._control is not None
        yield agent, agent._control.path


async def test_the_socket_is_private_and_goes_with_the_job(directory: Path) -> None:
    async with controlled() as (_, path):
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert sockets(directory) == []


async def test_a_job_without_control_makes_nothing(directory: Path) -> None:
    await launch(LaunchSpec(["true"]))
    assert sockets(directory) == []


async def test_status() -> None:
    async with controlled(nproc_per_node=2, run_id="r") as (agent, path):
        reply = await in_thread(ask, path, GetStatus(), 30)
        assert isinstance(reply, StatusReply)
        assert reply.status.run_id == "r"
        assert {one.rank: one.pid for one in reply.status.workers} == agent.pids()
        (job,) = await in_thread(find_jobs)
        assert job.pid == os.getpid()
        assert job.is_local


def received(path: str, request: GetEvents) -> list[Reply]:
    with ControlClient(path) as client:
        return list(client.replies(request))


async def test_the_events_so_far() -> None:
    async with controlled(nproc_per_node=2) as (agent, path):
        *replies, last = await in_thread(received, path, GetEvents())
        assert last == DoneReply()
        events = [
            event_from_json(bytes(one.event)) for one in replies if isinstance(one, EventReply)
        ]
        assert [event.seq for event in events] == list(range(agent.status().seq + 1))
        later = await in_thread(received, path, GetEvents(after=events[-2].seq))
        assert len(later) == 2
        assert await in_thread(received, path, GetEvents(after=10**6)) == [DoneReply()]


async def test_events_are_followed_to_the_end() -> None:
    async with controlled() as (agent, path):
        following = asyncio.ensure_future(in_thread(received, path, GetEvents(follow=True)))
        waiting = asyncio.ensure_future(in_thread(ask, path, AwaitEnd(), 30))
        await until(lambda: "2 connections" in repr(agent._control))
        await agent.stop(reason="enough")
    *_, event, last = await following
    assert isinstance(event, EventReply)
    assert isinstance(event_from_json(bytes(event.event)), JobFinished)
    assert last == DoneReply()
    assert await waiting == EndReply(JobState.STOPPED, "enough", 143)


async def test_stop() -> None:
    async with controlled() as (agent, path):
        reply = await in_thread(ask, path, StopJob(reason="enough", signal=2), 30)
        assert isinstance(reply, EndReply)
        assert (reply.state, reply.exit_code) == (JobState.STOPPED, 130)
        with pytest.raises(JobStopped):
            await agent.wait()


async def test_kill() -> None:
    """At once, whatever the stop plan says."""
    async with controlled(shell("trap '' TERM; while :; do sleep 0.1; done")) as (agent, path):
        assert await in_thread(ask, path, StopJob(kill=True, wait=False), 30) == DoneReply()
        with pytest.raises(JobStopped):
            await agent.wait()
        (exited,) = [one async for one in agent.events() if isinstance(one, WorkerExited)]
        assert exited.status.signal == 9


async def test_restart() -> None:
    async with controlled() as (agent, path):
        before = agent.pids()
        assert await in_thread(ask, path, RestartJob(reason="new"), 30) == DoneReply()
        assert agent.pids() != before


async def test_the_events_say_which_process_has_requested_it() -> None:
    """The kernel knows; the reason that the client gives comes first."""
    own = Path("/proc/self/comm").read_text().rstrip()
    client = f"requested by {own} (pid {os.getpid()}, uid {os.geteuid()})"
    async with controlled() as (agent, path):
        await in_thread(ask, path, DumpStacks(), 30)
        await in_thread(ask, path, RestartJob(reason="new data"), 30)
        ended = await in_thread(ask, path, StopJob(reason="enough"), 30)
    kinds = StacksDumped | Restarting
    whys = [one.why async for one in agent.events() if isinstance(one, kinds)]
    assert whys == [client, f"new data, {client}"]
    assert ended == EndReply(JobState.STOPPED, f"enough, {client}", 143)


async def test_signal() -> None:
    async with controlled(nproc_per_node=2) as (agent, path):
        pids = agent.pids()
        reply = await in_thread(ask, path, SendSignal(signal=18), 30)
        assert reply == DoneReply(pids=tuple(pids.values()))
        reply = await in_thread(ask, path, SendSignal(signal=18, rank=1), 30)
        assert reply == DoneReply(pids=(pids[1],))
        refused = await in_thread(ask, path, SendSignal(signal=18, rank=9), 30)
        assert refused == ErrorReply(
            "rank: must be one of this node's running workers: [0, 1] (got 9)"
        )
        assert isinstance(await in_thread(ask, path, SendSignal(signal=99), 30), ErrorReply)


async def test_a_signal_that_some_workers_do_not_handle(tmp_path: Path) -> None:
    """The answer has their ranks."""
    argv = noting("sleep 99 & wait; wait", first="[ $RANK = 1 ] || trap : USR1")
    async with controlled(argv, nproc_per_node=3, env={"NOTES": str(tmp_path)}) as (agent, path):
        await until(lambda: all((tmp_path / f"{rank}").exists() for rank in range(3)))
        pids = tuple(agent.pids().values())
        reply = await in_thread(ask, path, SendSignal(signal=signal.SIGUSR1), 30)
        assert reply == DoneReply(pids=pids, unhandled=(1,))


def exchange(path: str, request: bytes) -> bytes:
    """Send bytes, and return all that comes back."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(path)
        try:
            sock.sendall(request)
            return b"".join(iter(partial(sock.recv, 65536), b""))
        except ConnectionResetError:
            return b""
        except BrokenPipeError:
            return b""


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * (REQUEST_MAX + 100) + b"\n"]
)
async def test_a_bad_request_has_an_answer_and_changes_nothing(request_: bytes) -> None:
    async with controlled() as (agent, path):
        answer = await in_thread(exchange, path, request_)
        # The kernel may drop an answer to a client that has not been read to its end.
        assert answer.startswith(b'{"reply":"error",') or len(request_) > REQUEST_MAX
        assert agent.status().is_ready


async def test_clients_that_break_off_leave_nothing() -> None:
    async with controlled() as (agent, path):
        for request in (b"", b'{"command":', b'{"command":"wait","version":1}\n'):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                sock.sendall(request)
                await until(lambda: "1 connections" in repr(agent._control))
            await until(lambda: "0 connections" in repr(agent._control))
        assert agent.status().is_ready


async def test_too_many_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 2)
    async with controlled() as (agent, path):
        with ControlClient(path) as first, ControlClient(path) as second:
            for client in first, second:
                client.send(AwaitEnd())
            await until(lambda: "2 connections" in repr(agent._control))
            refused = await in_thread(ask, path, GetStatus(), 30)
            assert refused == ErrorReply("2 connections are open already")
        await until(lambda: "0 connections" in repr(agent._control))
        assert isinstance(await in_thread(ask, path, GetStatus(), 30), StatusReply)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_delays_no_end() -> None:
    """The kernel's buffer is full long before all events are in it."""
    with ExitStack() as stack:
        async with asyncio.timeout(DEADLINE_S), controlled(event_history=100_000) as (agent, path):
            client = stack.enter_context(ControlClient(path))
            client.send(GetEvents(follow=True))
            for _ in range(5000):
                agent.forward_signal("SIGCONT")
            await agent.stop()


@pytest.mark.slow
async def test_a_flood_of_requests_does_not_stop_the_job() -> None:
    """The job's own work has its turn between two answers."""
    flood = (
        "import os, sys\n"
        "from elastic_aio.control.client import ask\n"
        "from elastic_aio.control.protocol import GetStatus\n"
        "print(flush=True)\n"
        "while True:\n"
        "    try: ask(sys.argv[1], GetStatus(), 30)\n"
        "    except OSError: break\n"
    )
    async with controlled(nproc_per_node=2) as (agent, path):
        client = subprocess.Popen([sys.executable, "-c", flood, path], stdout=subprocess.PIPE)
        try:
            assert client.stdout is not None
            await in_thread(client.stdout.readline)
            for _ in range(3):
                assert await agent.restart() is True
            await agent.stop()
        finally:
            client.kill()
            client.communicate()


@pytest.mark.slow
async def test_an_idle_job_that_is_watched_does_not_wake_up() -> None:
    """A client follows the events, another one waits for the end."""
    async with controlled() as (agent, path):
        with ControlClient(path) as follower, ControlClient(path) as waiter:
            follower.send(GetEvents(follow=True))
            waiter.send(AwaitEnd())
            await until(lambda: "2 connections" in repr(agent._control))
            await asyncio.sleep(0.05)
            # The loop gives up the processor once for each time it waits.
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            await asyncio.sleep(0.2)
            assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 5


async def test_a_directory_that_cannot_be_made_costs_the_job_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTROL_DIR, str(directory / "missing" / "more"))
    async with Agent(LaunchSpec(["true"]), control=True) as agent:
        events = [event async for event in agent.events()]
        assert (await agent.wait()).exit_code == 0
    (event,) = [one for one in events if isinstance(one, ControlUnavailable)]
    assert "no such file or directory" in event.why


@pytest.mark.parametrize("way", ["removed", "moved"])
async def test_a_socket_that_is_lost_is_made_anew(
    directory: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """With its directory, which goes at the logout of the user; connections go on."""
    monkeypatch.setattr(server_module, "_REMADE_AFTER_S", 0.01)
    monkeypatch.setattr(server_module, "_WATCHED_AFTER_S", 0.0)
    async with controlled(run_id="r") as (agent, path):
        # One that was made anew is watched without the seconds of a short job.
        monkeypatch.setattr(server_module, "_WATCHED_AFTER_S", DEADLINE_S)
        server = agent._control
        assert server is not None
        with ControlClient(path) as waiter:
            waiter.send(AwaitEnd())
            await until(lambda: "1 connections" in repr(server))
            if way == "removed":
                shutil.rmtree(directory)
            else:
                directory.joinpath(os.path.basename(path)).rename(directory / "elsewhere")
            await until(lambda: server.path not in ("", path))
            assert isinstance(await in_thread(ask, server.path, GetStatus(), 30), StatusReply)
            assert f"at {server.path}, " in repr(server)
            second = server.path
            os.unlink(second)
            await until(lambda: server.path not in ("", second))
    directory.mkdir(exist_ok=True)
    assert [name for name in sockets(directory) if name != "elsewhere"] == []


async def test_a_socket_that_is_lost_before_it_is_watched_is_made_anew(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_REMADE_AFTER_S", 0.0)
    monkeypatch.setattr(server_module, "_WATCHED_AFTER_S", 0.1)
    async with controlled() as (agent, path):
        os.unlink(path)
        server = agent._control
        assert server is not None
        await until(lambda: server.path not in ("", path))


async def test_a_short_job_does_not_watch_its_socket(directory: Path) -> None:
    """The end of a process waits until the kernel has freed a watch of inotify."""
    async with controlled():
        opened = Path("/proc/self/fd").iterdir()
        assert not any("inotify" in os.readlink(path) for path in opened if path.is_symlink())


async def test_a_socket_that_cannot_be_made_anew_is_reported_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on without; other changes of the file are none of these."""
    monkeypatch.setattr(server_module, "_REMADE_AFTER_S", 0.0)
    monkeypatch.setattr(server_module, "_WATCHED_AFTER_S", 0.0)
    unavailable: asyncio.Queue[ControlUnavailable] = asyncio.Queue()

    def listen(event: object) -> None:
        if isinstance(event, ControlUnavailable):
            unavailable.put_nowait(event)

    spec = LaunchSpec(SLEEPER)
    async with Agent(spec, control=True, listeners=[listen]) as agent:
        assert agent._control is not None
        os.chmod(agent._control.path, 0o700)
        monkeypatch.setenv(CONTROL_DIR, str(directory / "missing" / "more"))
        os.unlink(agent._control.path)
        async with asyncio.timeout(DEADLINE_S):
            assert "no such file or directory" in (await unavailable.get()).why
        assert agent._control.path == ""
        assert unavailable.empty()


async def test_sockets_of_dead_launchers_are_removed(directory: Path) -> None:
    """No live launcher has their names, so nothing else can be removed by mistake."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "1-00000000.sock"))
    (directory / "unrelated").touch()
    async with controlled() as (_, path):
        (job,) = await in_thread(find_jobs)
        assert job.path == path
        assert sockets(directory) == sorted([os.path.basename(path), "unrelated"])


async def test_a_launcher_that_does_not_answer_is_listed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be suspended; the others answer nevertheless."""
    monkeypatch.setattr("elastic_aio.control.client.ANSWER_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "7-00000000.sock"))
        silent.listen()
        (job,) = await in_thread(find_jobs)
        assert job == RunningJob(str(directory / "7-00000000.sock"), os.getpid(), None)


@pytest.mark.slow
async def test_a_socket_that_only_forks_hold_open_is_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher that listened was killed, and what it had forked lives on."""
    monkeypatch.setattr("elastic_aio.control.client.ANSWER_S", 0.2)
    listen = (
        "import os, socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1])\n"
        "listener.listen()\n"
        "if os.fork():\n"
        "    os._exit(0)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", listen, str(directory / "7-00000000.sock")]
    reader, writer = os.pipe()
    try:
        await in_thread(partial(subprocess.run, argv, stdin=reader, check=True))
        assert await in_thread(find_jobs) == []
        assert sockets(directory) == []
    finally:
        os.close(reader)
        os.close(writer)
    await until(lambda: not leaked_processes())


async def test_the_socket_of_another_user_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side speaks with a process of another user."""
    async with controlled() as (_, path):
        uid = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr("elastic_aio.control.sockets.peer_of", lambda _: (1, uid + 1))
            assert await in_thread(find_jobs) == []
            assert os.path.exists(path)
            assert await in_thread(exchange, path, b'{"command":"status","version":1}\n') == b""


async def test_an_agent_that_is_given_up_keeps_no_socket(directory: Path) -> None:
    """The server does not keep the agent alive."""
    agent = Agent(LaunchSpec(SLEEPER), control=True)
    await agent.__aenter__()
    done = agent._driver.done if agent._driver is not None else None
    assert done is not None
    assert len(sockets(directory)) == 1
    with pytest.warns(ResourceWarning, match="garbage-collected"):
        del agent
    await asyncio.wait([done])
    await until(lambda: sockets(directory) == [])


def test_a_refusal_before_the_request_is_read(directory: Path) -> None:
    """The agent may have closed the connection before the client sends."""
    path = str(directory / "1-00000000.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with ControlClient(path) as client:
            refuse(listener.accept()[0], "too many")
            client.send(GetStatus())
            assert client.receive(30) == ErrorReply("too many")
            assert client.receive(30) is None
