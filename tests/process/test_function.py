"""The conformance suite of `test_command` for functions, whichever way they start."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner
from elastic_aio.process.command import command_spawner, spawn_with_popen
from elastic_aio.process.fork import spawn_by_fork
from elastic_aio.process.forkserver import ForkServer
from elastic_aio.process.payload import argv_of, make_payload, memory_file
from elastic_aio.worker import bootstrap
from tests.support import functions
from tests.support.children import until

GUARD = 30.0
ENV = {**os.environ, "OWN": "1"}


@pytest.fixture(autouse=True)
def _waiting_threads_end() -> Iterator[None]:
    """On Python 3.11 asyncio has a thread for each child, which ends a little after it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-")):
            thread.join(GUARD)


@pytest.fixture
def nothing() -> Iterator[int]:
    """A descriptor of /dev/null."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def output() -> Iterator[tuple[int, int]]:
    """A pipe for what children print."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


class Way:
    """One way to start functions; gives plans that fit it."""

    def __init__(self, name: str, spawner: Spawner, nothing: int) -> None:
        self.name = name
        self.spawn = spawner
        self.nothing = nothing
        self.opened = ExitStack()

    def plan(self, function: Callable[..., Any], *args: Any, **changes: Any) -> ChildPlan:
        result = memory_file("result")
        self.opened.callback(os.close, result)
        settings: dict[str, Any] = {
            "env": ENV,
            "cwd": None,
            "stdin": self.nothing,
            "stdout": self.nothing,
            "stderr": self.nothing,
        }
        if self.name == "fork":
            settings["argv"] = (function.__name__,)
            settings["call"] = lambda: bootstrap.perform(lambda: (function, args), result)
        else:
            payload = make_payload(function, args)
            self.opened.callback(payload.close)
            settings["argv"] = argv_of(sys.executable, payload, result, 0)
            settings["pass_fds"] = (payload.descriptor, result)
        return ChildPlan(**{**settings, **changes})

    async def start(self, function: Callable[..., Any], *args: Any, **changes: Any) -> Child:
        return await self.spawn(self.plan(function, *args, **changes))


@pytest.fixture(params=["spawn", "fork", "forkserver"])
async def way(request: pytest.FixtureRequest, nothing: int) -> AsyncIterator[Way]:
    """Each way to start."""
    command = command_spawner(asyncio.get_running_loop())
    if request.param != "forkserver":
        made = Way(request.param, spawn_by_fork if request.param == "fork" else command, nothing)
        with made.opened:
            yield made
        return
    server = server_of(nothing)
    made = Way("forkserver", server, nothing)
    with made.opened:
        yield made
        await server.aclose()


def server_of(nothing: int, preload: tuple[str, ...] = ()) -> ForkServer:
    return ForkServer(
        spawn_with_popen,
        python=sys.executable,
        path=sys.path,
        preload=preload,
        env=ENV,
        cwd=None,
        streams=(nothing, nothing, nothing),
        on_started=lambda pid: None,
    )


async def end_of(child: Child) -> Exit:
    async with asyncio.timeout(GUARD):
        return await asyncio.shield(child.exited)


def line_from(descriptor: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        assert waiting.poll(GUARD * 1000), "nothing was printed"
        line += os.read(descriptor, 1)
    return line.decode().rstrip("\n")


async def test_children_that_exit_at_once_have_the_right_status(way: Way) -> None:
    """16 of them, each with a code of its own, all started before any is waited for."""
    children = [await way.start(functions.leave_hard, code) for code in range(16)]
    ends = [await end_of(child) for child in children]
    assert [end.status for end in ends] == [ExitStatus(code=code) for code in range(16)]
    assert all(child.has_ended() for child in children)
    assert not any(child.send_signal(signal.SIGTERM) for child in children)
    assert repr(children[3]) == f"<Child {children[3].pid}: exit code 3>"


async def test_a_killed_child_has_its_signal(way: Way) -> None:
    """Signals reach the child, and its status names the one that ended it."""
    child = await way.start(functions.sleep)
    assert repr(child) == f"<Child {child.pid}: running>"
    assert not child.has_ended()
    assert not child.exited.done()
    assert child.send_signal(signal.SIGKILL)
    assert (await end_of(child)).status == ExitStatus(signal=9)
    assert child.has_ended()
    assert not child.send_signal(signal.SIGTERM)


async def test_a_child_leads_its_session(way: Way) -> None:
    """Its number is its pid, as the process tree expects."""
    child = await way.start(functions.sleep)

    def leads() -> bool:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[3]) == child.pid

    # A forked child does it itself, right after its start.
    await until(leads)
    child.send_signal(signal.SIGKILL)
    await end_of(child)


async def test_a_grandchild_that_holds_everything_delays_nothing(
    way: Way, output: tuple[int, int]
) -> None:
    """The end of the process and the end of its output are two events."""
    reader, writer = output
    child = await way.start(print_grandchild, stdout=writer)
    grandchild = int(line_from(reader))
    pidfd = os.pidfd_open(grandchild)
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    try:
        assert (await end_of(child)).status.is_success
        assert not waiting.poll(0)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert waiting.poll(GUARD * 1000)
        os.close(pidfd)


def print_grandchild() -> None:
    print(functions.leave_grandchild_holding(), flush=True)


async def test_ends_are_measured(way: Way) -> None:
    """By the monotonic clock; what was used is known wherever asyncio does not reap."""
    before = time.monotonic()
    end = await end_of(await way.start(functions.give))
    assert before <= end.at <= time.monotonic()
    reaps = way.name != "spawn" or not isinstance(
        asyncio.get_running_loop(), asyncio.SelectorEventLoop
    )
    assert (end.usage is not None and end.usage.max_rss_bytes > 1 << 20) == reaps


async def test_a_bad_working_directory(way: Way, tmp_path: Path) -> None:
    """It is said before anything starts, or by the spawn itself."""
    missing = str(tmp_path / "missing")
    with pytest.raises(SpawnError, match=r"its working directory .* does not exist"):
        await way.start(functions.give, cwd=missing)


async def test_a_lack_of_descriptors_is_no_permanent_failure(way: Way) -> None:
    """Another attempt may find some; nothing is left behind by this one."""
    await end_of(await way.start(functions.give))  # the server is there
    plan = way.plan(functions.give)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(SpawnError) as caught:
            await way.spawn(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not caught.value.permanent
    assert (await end_of(await way.spawn(plan))).status.is_success


async def test_a_forked_child_that_others_have_reaped(nothing: int) -> None:
    """The status is lost, and the child over."""
    way = Way("fork", spawn_by_fork, nothing)
    with way.opened:
        child = await way.start(functions.leave_hard, 3)
        os.waitpid(child.pid, 0)
        assert (await end_of(child)).status == ExitStatus()


async def test_a_lost_server_is_replaced(nothing: int) -> None:
    """Its children's status is lost; the next start makes another server."""
    started: list[int] = []
    server = ForkServer(
        spawn_with_popen,
        python=sys.executable,
        path=sys.path,
        preload=(),
        env=ENV,
        cwd=None,
        streams=(nothing, nothing, nothing),
        on_started=started.append,
    )
    way = Way("forkserver", server, nothing)
    with way.opened:
        child = await way.start(functions.sleep)
        os.kill(started[0], signal.SIGKILL)
        await until(lambda: "0 workers" in repr(server))
        assert not child.has_ended()
        assert child.send_signal(signal.SIGKILL)
        assert (await end_of(child)).status == ExitStatus()
        other = await way.start(functions.leave_hard, 5)
        assert (await end_of(other)).status == ExitStatus(code=5)
        assert len(started) == 2
        await server.aclose()
        await server.aclose()


async def test_a_server_without_its_modules(nothing: int) -> None:
    """Each start says which one is missing."""
    server = server_of(nothing, ("no_such_module",))
    way = Way("forkserver", server, nothing)
    with way.opened:
        with pytest.raises(SpawnError, match=r"cannot import no_such_module: ModuleNotFound"):
            await way.start(functions.give)
        await server.aclose()


async def test_a_cancelled_start_leaves_no_child(nothing: int) -> None:
    """The server may have forked already; nobody would ever stop that worker."""
    server = server_of(nothing)
    way = Way("forkserver", server, nothing)
    with way.opened:
        await end_of(await way.start(functions.give))
        starting = asyncio.ensure_future(way.start(functions.sleep))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        other = await way.start(functions.leave_hard, 4)
        assert (await end_of(other)).status == ExitStatus(code=4)
        await until(lambda: "0 workers" in repr(server))
        await server.aclose()
