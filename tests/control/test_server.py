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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
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
    launch,
)
from elastic_aio.control import session
from elastic_aio.control.client import RunningJob, find_jobs, run_blocking
from elastic_aio.control.protocol import (
    REQUEST_MAX,
    AcceptedReply,
    AwaitEnd,
    ControlRequest,
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
    encode,
)
from elastic_aio.control.server import ControlServer, refuse
from elastic_aio.control.sockets import CONTROL_DIR
from elastic_aio.event_json import event_from_fields
from elastic_aio.outcome import JobState
from elastic_aio.process import proc
from elastic_aio.sockets import Acceptor
from tests.support.children import DEADLINE_S, SLEEPER, noting, shell, until, until_ready
from tests.support.control import ask, open_channel, own_control_dir, replies, sockets
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
    argv: list[str] = SLEEPER,
    *,
    on_unavailable: Callable[[str], None] = print,
    limits: Mapping[str, Any] = {},
    **settings: Any,
) -> AsyncIterator[tuple[Agent, ControlServer]]:
    """Run a job with a control socket; yield its agent and the server, when all workers run."""
    async with Agent(LaunchSpec(argv, **settings)) as agent:
        await until_ready(agent)
        server = ControlServer(agent, on_unavailable, **limits)
        server.open()
        try:
            yield agent, server
        finally:
            await server.aclose()


async def connections(server: ControlServer, count: int) -> None:
    """Wait until there are so many connections."""
    await until(lambda: f", {count} connections" in repr(server))


async def tell(server: ControlServer, request: ControlRequest) -> Reply:
    """Ask the agent, beside its loop."""
    return await in_thread(ask, server.path, request, 30)


async def test_the_socket_of_an_agent_is_private_and_goes_with_the_job(directory: Path) -> None:
    async with Agent(LaunchSpec(SLEEPER), control=True):
        (name,) = sockets(directory)
        mode = os.stat(directory / name).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
    assert sockets(directory) == []


async def test_the_socket_goes_before_connections_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last clients of a job that ends would take its launcher for killed."""
    left: list[list[str]] = []
    close = Acceptor.close

    def noted(acceptor: Acceptor) -> None:
        left.append(sockets(directory))
        close(acceptor)

    monkeypatch.setattr(Acceptor, "close", noted)
    async with controlled():
        assert len(sockets(directory)) == 1
    assert left
    assert not any(left)


async def test_a_job_without_control_makes_nothing(directory: Path) -> None:
    await launch(LaunchSpec(["true"]))
    assert sockets(directory) == []


async def test_status() -> None:
    async with controlled(nproc_per_node=2, run_id="r") as (agent, server):
        reply = await tell(server, GetStatus())
        assert isinstance(reply, StatusReply)
        assert reply.status.run_id == "r"
        assert {one.rank: one.pid for one in reply.status.workers} == agent.pids()
        (job,) = await in_thread(find_jobs)
        assert job.pid == os.getpid()
        assert job.is_local


async def test_the_events_so_far() -> None:
    async with controlled(nproc_per_node=2) as (agent, server):
        *events_, last = await in_thread(replies, server.path, GetEvents())
        assert last == DoneReply()
        events = [event_from_fields(one.event) for one in events_ if isinstance(one, EventReply)]
        assert [event.seq for event in events] == list(range(agent.status().seq + 1))
        later = await in_thread(replies, server.path, GetEvents(after=events[-2].seq))
        assert len(later) == 2
        assert await in_thread(replies, server.path, GetEvents(after=10**6)) == [DoneReply()]


async def test_events_are_followed_to_the_end() -> None:
    async with controlled() as (agent, server):
        following = asyncio.ensure_future(in_thread(replies, server.path, GetEvents(follow=True)))
        waiting = asyncio.ensure_future(tell(server, AwaitEnd()))
        await connections(server, 2)
        await agent.stop(reason="enough")
    *_, event, last = await following
    assert isinstance(event, EventReply)
    assert isinstance(event_from_fields(event.event), JobFinished)
    assert last == DoneReply()
    assert await waiting == EndReply(JobState.STOPPED, "enough", 143)


async def test_stop() -> None:
    async with controlled() as (agent, server):
        reply = await tell(server, StopJob(reason="enough", signal=2))
        assert isinstance(reply, EndReply)
        assert (reply.state, reply.exit_code) == (JobState.STOPPED, 130)
        with pytest.raises(JobStopped):
            await agent.wait()


async def test_kill() -> None:
    """At once, whatever the stop plan says."""
    async with controlled(shell("trap '' TERM; while :; do sleep 0.1; done")) as (agent, server):
        assert await tell(server, StopJob(kill=True, wait=False)) == DoneReply()
        with pytest.raises(JobStopped):
            await agent.wait()
        (exited,) = [one async for one in agent.events() if isinstance(one, WorkerExited)]
        assert exited.status.signal == 9


async def test_the_events_say_which_process_has_requested_it() -> None:
    """The kernel knows; the reason that the client gives comes first."""
    own = proc.name_of(os.getpid())
    client = f"requested by {own} (pid {os.getpid()}, uid {os.geteuid()})"
    async with controlled() as (agent, server):
        before = agent.pids()
        await tell(server, DumpStacks())
        assert await tell(server, RestartJob(reason="new data")) == DoneReply()
        assert agent.pids() != before
        ended = await tell(server, StopJob(reason="enough"))
    kinds = StacksDumped | Restarting
    whys = [one.why async for one in agent.events() if isinstance(one, kinds)]
    assert whys == [client, f"new data, {client}"]
    assert ended == EndReply(JobState.STOPPED, f"enough, {client}", 143)


async def test_signal() -> None:
    async with controlled(nproc_per_node=2) as (agent, server):
        pids = agent.pids()
        reply = await tell(server, SendSignal(signal=18))
        assert reply == DoneReply(pids=tuple(pids.values()))
        reply = await tell(server, SendSignal(signal=18, rank=1))
        assert reply == DoneReply(pids=(pids[1],))
        refused = await tell(server, SendSignal(signal=18, rank=9))
        assert refused == ErrorReply(
            "rank: must be one of this node's running workers: [0, 1] (got 9)"
        )
        assert isinstance(await tell(server, SendSignal(signal=99)), ErrorReply)


async def test_a_signal_that_some_workers_do_not_handle(tmp_path: Path) -> None:
    """The answer has their ranks."""
    argv = noting("sleep 99 & wait; wait", first="[ $RANK = 1 ] || trap : USR1")
    async with controlled(argv, nproc_per_node=3, env={"NOTES": str(tmp_path)}) as (agent, server):
        await until(lambda: all((tmp_path / f"{rank}").exists() for rank in range(3)))
        pids = tuple(agent.pids().values())
        reply = await tell(server, SendSignal(signal=signal.SIGUSR1))
        assert reply == DoneReply(pids=pids, unhandled=(1,))


def exchange(path: str, request: bytes) -> bytes:
    """Send bytes, and return all that comes back."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(path)
        try:
            sock.sendall(request)
            return b"".join(iter(partial(sock.recv, 65536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_", [b"\n", b"GET / HTTP/1.1\r\n\r\n", b"x" * (REQUEST_MAX + 100) + b"\n"]
)
async def test_a_bad_request_has_an_answer_and_changes_nothing(request_: bytes) -> None:
    async with controlled() as (agent, server):
        answer = await in_thread(exchange, server.path, request_)
        # The kernel may drop an answer to a client that has not been read to its end.
        assert answer.startswith(b'{"reply":"error",') or len(request_) > REQUEST_MAX
        assert agent.status().is_ready


async def test_clients_that_break_off_leave_nothing() -> None:
    async with controlled() as (agent, server):
        for request in (b"", b'{"command":', b'{"command":"wait","version":1}\n'):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(server.path)
                sock.sendall(request)
                await connections(server, 1)
            await connections(server, 0)
        assert agent.status().is_ready


def half_close(path: str, request: bytes) -> socket.socket:
    """Send a request, and say that no other one follows, as `nc -N` does."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(request)
    sock.shutdown(socket.SHUT_WR)
    return sock


async def test_a_client_that_sends_no_more_gets_its_answer() -> None:
    """It waits for the end; the agent notices when it gives up nevertheless."""
    async with controlled() as (agent, server):
        with (
            half_close(server.path, encode(AwaitEnd())) as waiter,
            half_close(server.path, encode(GetEvents(follow=True))) as follower,
        ):
            await connections(server, 2)
            follower.close()
            await connections(server, 1)
            await agent.stop()
            assert b'"reply":"end"' in await in_thread(waiter.recv, 65536)


async def test_a_request_that_was_given_up_is_not_performed() -> None:
    """The agent was suspended, or busy, until the client had closed the connection."""
    async with controlled() as (agent, server):
        before = agent.status().seq
        for request in (StopJob(), RestartJob(), SendSignal(signal=10), DumpStacks()):
            for close in (socket.socket.close, lambda sock: sock.shutdown(socket.SHUT_RDWR)):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(server.path)
                    sock.sendall(encode(request))
                    close(sock)
        assert isinstance(await tell(server, GetStatus()), StatusReply)
        await connections(server, 0)
        assert agent.status().seq == before


async def test_a_request_is_acknowledged_where_that_is_asked_for() -> None:
    """Before its answer, which may take as long as the job."""
    async with controlled() as (agent, server):
        with open_channel(server.path) as client:
            client.send(AwaitEnd(acknowledge=True))
            assert await in_thread(run_blocking, client.receive(30)) == AcceptedReply()
            await agent.stop()
            assert isinstance(await in_thread(run_blocking, client.receive(30)), EndReply)


@pytest.mark.parametrize("error", [ImportError("no module"), OSError(24, "x"), KeyError("k")])
async def test_a_failure_of_a_request_is_its_answer_and_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    async with controlled() as (agent, server):

        async def dump(_: str, child: str) -> None:
            raise error

        monkeypatch.setattr(agent, "dump", dump)
        problem = f"the request failed: {error!r}"
        assert await tell(server, DumpStacks()) == ErrorReply(problem)
        await connections(server, 0)
        assert [context["exception"] for context in logged] == [error]
        assert agent.status().is_ready


async def test_requests_are_answered_although_their_module_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package was removed before the module was loaded."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    async with controlled() as (_, server):
        monkeypatch.setitem(sys.modules, "elastic_aio.control.session", None)
        reply = await tell(server, GetStatus())
        assert isinstance(reply, ErrorReply)
        assert "the request failed: ModuleNotFoundError(" in reply.problem
        assert len(logged) == 1


async def test_too_many_connections_are_refused() -> None:
    async with controlled(limits={"connections_max": 2}) as (_, server):
        with open_channel(server.path) as first, open_channel(server.path) as second:
            for client in first, second:
                client.send(AwaitEnd())
            await connections(server, 2)
            assert await tell(server, GetStatus()) == ErrorReply("2 connections are open already")
        await connections(server, 0)
        assert isinstance(await tell(server, GetStatus()), StatusReply)


async def test_clients_that_wait_leave_places_for_other_requests() -> None:
    """A job can be asked and stopped at any time, whatever many clients follow it."""
    limits = {"connections_max": 3, "waiting_max": 2}
    full = ErrorReply("2 clients follow the job or wait for it already")
    async with controlled(limits=limits) as (agent, server):
        with open_channel(server.path) as first, open_channel(server.path) as second:
            first.send(AwaitEnd(acknowledge=True))
            second.send(GetEvents(follow=True))
            assert await in_thread(run_blocking, first.receive(30)) == AcceptedReply()
            assert isinstance(await in_thread(run_blocking, second.receive(30)), EventReply)
            for request in AwaitEnd(acknowledge=True), GetEvents(follow=True), RestartJob():
                assert await tell(server, request) == full
                await connections(server, 2)
            assert isinstance(await tell(server, GetStatus()), StatusReply)
            assert agent.status().attempt == 0
            await connections(server, 2)
            assert await tell(server, StopJob(wait=False)) == DoneReply()
            assert isinstance(await in_thread(run_blocking, first.receive(30)), EndReply)


async def test_the_place_of_a_client_that_has_waited_is_free_again() -> None:
    async with controlled(limits={"waiting_max": 1}) as (_, server):
        for _each in range(3):
            with open_channel(server.path) as client:
                client.send(AwaitEnd(acknowledge=True))
                assert await in_thread(run_blocking, client.receive(30)) == AcceptedReply()
            await connections(server, 0)


async def test_a_client_that_does_not_read_its_answer_loses_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unlike a client that follows the job: it has a place of its own."""
    monkeypatch.setattr(session, "_READ_S", 0.1)
    async with controlled(event_history=100_000) as (agent, server):
        for _ in range(5000):
            agent.forward_signal("SIGCONT")
        with open_channel(server.path) as silent, open_channel(server.path) as following:
            silent.send(GetEvents())
            following.send(GetEvents(follow=True))
            await connections(server, 2)
            await connections(server, 1)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_delays_no_end() -> None:
    """The kernel's buffer is full long before all events are in it."""
    with ExitStack() as stack:
        async with controlled(event_history=100_000) as (agent, server):
            client = stack.enter_context(open_channel(server.path))
            client.send(GetEvents(follow=True))
            for _ in range(5000):
                agent.forward_signal("SIGCONT")
            async with asyncio.timeout(DEADLINE_S):
                await agent.stop()


@pytest.mark.slow
async def test_a_flood_of_requests_does_not_stop_the_job() -> None:
    """The job's own work has its turn between two answers."""
    flood = (
        "import os, sys\n"
        "from elastic_aio.control.protocol import GetStatus\n"
        "from tests.support.control import ask\n"
        "print(flush=True)\n"
        "while True:\n"
        "    try: ask(sys.argv[1], GetStatus(), 30)\n"
        "    except OSError: break\n"
    )
    async with controlled(nproc_per_node=2) as (agent, server):
        argv = [sys.executable, "-c", flood, server.path]
        client = subprocess.Popen(argv, stdout=subprocess.PIPE)
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
    async with controlled() as (_, server):
        with open_channel(server.path) as follower, open_channel(server.path) as waiter:
            follower.send(GetEvents(follow=True))
            waiter.send(AwaitEnd())
            await connections(server, 2)
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
async def test_a_socket_that_is_lost_is_made_anew(directory: Path, way: str) -> None:
    """With its directory, which goes at the logout of the user; connections go on."""
    async with controlled(limits={"watched_after": 0.0, "remade_after": 0.01}) as (_, server):
        # A socket that was made anew is watched without the seconds of a short job.
        server.watched_after = DEADLINE_S
        first = server.path
        with open_channel(first) as waiter:
            waiter.send(AwaitEnd())
            await connections(server, 1)
            if way == "removed":
                shutil.rmtree(directory)
            else:
                Path(first).rename(directory / "elsewhere")
            await until(lambda: server.path not in ("", first))
            assert isinstance(await tell(server, GetStatus()), StatusReply)
            assert f"at {server.path}, " in repr(server)
            second = server.path
            os.unlink(second)
            await until(lambda: server.path not in ("", second))
    directory.mkdir(exist_ok=True)
    assert [name for name in sockets(directory) if name != "elsewhere"] == []


async def test_a_socket_that_is_lost_before_it_is_watched_is_made_anew() -> None:
    async with controlled(limits={"watched_after": 0.1, "remade_after": 0.0}) as (_, server):
        first = server.path
        os.unlink(first)
        await until(lambda: server.path not in ("", first))


async def test_a_short_job_does_not_watch_its_socket(directory: Path) -> None:
    """The end of a process waits until the kernel has freed a watch of inotify."""
    async with controlled():
        opened = Path("/proc/self/fd").iterdir()
        assert not any("inotify" in os.readlink(path) for path in opened if path.is_symlink())


async def test_a_socket_that_cannot_be_made_anew_is_reported_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes on without; other changes of the file are none of these."""
    problems: list[str] = []
    limits = {"watched_after": 0.0, "remade_after": 0.0}
    job = controlled(on_unavailable=problems.append, limits=limits)
    async with job as (agent, server):
        os.chmod(server.path, 0o700)
        monkeypatch.setenv(CONTROL_DIR, str(directory / "missing" / "more"))
        os.unlink(server.path)
        await until(lambda: problems)
        assert server.path == ""
        assert agent.status().is_ready
    (problem,) = problems
    assert "no such file or directory" in problem


async def test_sockets_of_dead_launchers_are_removed(directory: Path) -> None:
    """No live launcher has their names, so nothing else can be removed by mistake."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "1-00000000.sock"))
    (directory / "unrelated").touch()
    async with controlled() as (_, server):
        (job,) = await in_thread(find_jobs)
        assert job.path == server.path
        assert sockets(directory) == sorted([os.path.basename(server.path), "unrelated"])


async def test_a_launcher_that_does_not_answer_is_listed(directory: Path) -> None:
    """It may be suspended; the others answer nevertheless."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "7-00000000.sock"))
        silent.listen()
        (job,) = await in_thread(find_jobs, 0.2)
        assert job == RunningJob(str(directory / "7-00000000.sock"), os.getpid(), None)


@pytest.mark.slow
async def test_a_socket_that_only_forks_hold_open_is_removed(directory: Path) -> None:
    """The launcher that listened was killed, and what it had forked lives on."""
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
        assert await in_thread(find_jobs, 0.2) == []
        assert sockets(directory) == []
    finally:
        os.close(reader)
        os.close(writer)
    await until(lambda: not leaked_processes())


async def test_the_socket_of_another_user_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither side speaks with a process of another user."""
    async with controlled() as (_, server):
        uid = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr("elastic_aio.control.sockets.peer_of", lambda _: (1, uid + 1))
            assert await in_thread(find_jobs) == []
            assert os.path.exists(server.path)
            assert await in_thread(exchange, server.path, encode(GetStatus())) == b""


async def test_an_agent_that_is_given_up_keeps_no_socket(directory: Path) -> None:
    """The server does not keep the agent alive."""
    agent = Agent(LaunchSpec(SLEEPER), control=True)
    await agent.__aenter__()
    assert len(sockets(directory)) == 1
    with pytest.warns(ResourceWarning, match="garbage-collected"):
        del agent
    await until(lambda: sockets(directory) == [])
    await until(lambda: not leaked_processes())


def test_a_refusal_before_the_request_is_read(directory: Path) -> None:
    """The agent may have closed the connection before the client sends."""
    path = str(directory / "1-00000000.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        with open_channel(path) as client:
            refuse(listener.accept()[0], "too many")
            client.send(GetStatus())
            assert run_blocking(client.receive(30)) == ErrorReply("too many")
            assert run_blocking(client.receive(30)) is None
