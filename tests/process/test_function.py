"""The conformance suite of spawners of functions: spawn, fork, forkserver."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.calls import call_argv, make_payload, memory_file
from elastic_aio.process.children import (
    Child,
    ChildSpec,
    Spawner,
    command_spawner,
    spawn_with_popen,
)
from elastic_aio.process.fork import spawn_by_fork
from elastic_aio.process.forkserver import ForkServer
from elastic_aio.worker import bootstrap
from tests.support import functions
from tests.support.children import end_of, line_from, until
from tests.support.leaks import leaked_processes
from tests.support.start_methods import METHODS

pytestmark = pytest.mark.both_loops

GUARD = 30.0
ENV = {**os.environ, "OWN": "1"}


class StartMethod:
    """A start method: its spawner, and child specs for it."""

    def __init__(self, name: str, spawner: Spawner, devnull: int) -> None:
        self.name = name
        self.spawn = spawner
        self.devnull = devnull
        self.opened = ExitStack()

    def spec(self, function: Callable[..., Any], *args: Any, **changes: Any) -> ChildSpec:
        result = memory_file("result")
        self.opened.callback(os.close, result)
        settings: dict[str, Any] = {
            "env": ENV,
            "cwd": None,
            "stdin": self.devnull,
            "stdout": self.devnull,
            "stderr": self.devnull,
        }
        if self.name == "fork":
            settings["argv"] = (function.__name__,)
            settings["call"] = lambda: bootstrap.perform(lambda: (function, args), result)
        else:
            payload = make_payload(function, args)
            self.opened.callback(payload.close)
            settings["argv"] = call_argv(sys.executable, payload, result, 0)
            settings["pass_fds"] = (payload.descriptor, result)
        return ChildSpec(**{**settings, **changes})

    async def start(self, function: Callable[..., Any], *args: Any, **changes: Any) -> Child:
        child = await self.spawn(self.spec(function, *args, **changes))
        child.release()
        return child


@pytest.fixture(params=METHODS)
async def method(request: pytest.FixtureRequest, devnull: int) -> AsyncIterator[StartMethod]:
    """Each start method."""
    if request.param == "forkserver":
        spawner: Spawner = server_of(devnull)
    elif request.param == "fork":
        spawner = spawn_by_fork
    else:
        spawner = command_spawner(asyncio.get_running_loop())
    method = StartMethod(request.param, spawner, devnull)
    with method.opened:
        yield method
        if isinstance(spawner, ForkServer):
            await spawner.aclose()


def server_of(
    devnull: int,
    preload: tuple[str, ...] = (),
    started: Callable[[Child], None] = lambda server: None,
) -> ForkServer:
    return ForkServer(
        spawn_with_popen,
        python=sys.executable,
        program=(),
        preload=preload,
        env=ENV,
        cwd=None,
        streams=(devnull, devnull, devnull),
        on_started=started,
    )


@asynccontextmanager
async def serving(
    devnull: int,
    preload: tuple[str, ...] = (),
    started: Callable[[Child], None] = lambda server: None,
) -> AsyncIterator[StartMethod]:
    """Yield the start method "forkserver", whose server is closed afterwards, within a time."""
    server = server_of(devnull, preload, started)
    method = StartMethod("forkserver", server, devnull)
    with method.opened:
        async with asyncio.timeout(GUARD):
            yield method
            await server.aclose()


@pytest.mark.slow
async def test_children_that_exit_at_once_have_the_right_status(method: StartMethod) -> None:
    """16 children with different codes, all started before the first is awaited."""
    children = [await method.start(functions.leave_hard, code) for code in range(16)]
    ends = [await end_of(child) for child in children]
    assert [end.status for end in ends] == [ExitStatus(code=code) for code in range(16)]
    assert all(child.has_ended() for child in children)
    assert not any(child.send_signal(signal.SIGTERM) for child in children)
    assert repr(children[3]) == f"<Child {children[3].pid}: exit code 3>"


async def test_a_killed_child_has_its_signal(method: StartMethod) -> None:
    child = await method.start(functions.sleep)
    assert repr(child) == f"<Child {child.pid}: running>"
    assert not child.has_ended()
    assert not child.exited.done()
    assert child.send_signal(signal.SIGKILL)
    assert (await end_of(child)).status == ExitStatus(signal=9)
    assert child.has_ended()
    assert not child.send_signal(signal.SIGTERM)


_hooks: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=lambda: [hook() for hook in _hooks])


async def test_a_signal_ends_a_child_that_has_just_been_started(
    method: StartMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has a handler for it, its thread blocks it, and the start takes a while."""
    former_handler = signal.signal(signal.SIGTERM, lambda *_: None)
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    monkeypatch.setattr(f"{__name__}._hooks", [lambda: time.sleep(0.1)])
    try:
        child = await method.start(functions.sleep)
        child.send_signal(signal.SIGTERM)
        assert (await end_of(child)).status == ExitStatus(signal=15)
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_SETMASK, former)
        child = await method.start(functions.sleep)
        child.send_signal(signal.SIGTERM)
        assert (await end_of(child)).status == ExitStatus(signal=15)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        signal.signal(signal.SIGTERM, former_handler)


async def test_a_child_leads_its_session(method: StartMethod) -> None:
    child = await method.start(functions.sleep)

    def leads() -> bool:
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        return int(stat[3]) == child.pid

    # A forked child calls setsid itself, right after its start.
    await until(leads)
    child.send_signal(signal.SIGKILL)
    await end_of(child)


@pytest.mark.slow
async def test_a_grandchild_that_holds_all_descriptors_delays_nothing(
    method: StartMethod, output: tuple[int, int]
) -> None:
    """Exit and end of file are two events."""
    reader, writer = output
    child = await method.start(print_grandchild, stdout=writer)
    grandchild = int(line_from(reader))
    pidfd = os.pidfd_open(grandchild)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    try:
        assert (await end_of(child)).status.is_success
        assert not poller.poll(0)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert poller.poll(GUARD * 1000)
        os.close(pidfd)


def print_grandchild() -> None:
    print(functions.leave_grandchild_holding(), flush=True)


async def test_exits_have_a_time_and_a_resource_usage(method: StartMethod) -> None:
    before = time.monotonic()
    end = await end_of(await method.start(functions.give))
    assert before <= end.at <= time.monotonic()
    assert end.usage is not None
    assert end.usage.max_rss_bytes > 1 << 20


async def test_a_bad_working_directory(method: StartMethod, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(SpawnError, match=r"its working directory .* does not exist"):
        await method.start(functions.give, cwd=missing)


async def test_a_lack_of_descriptors_is_no_permanent_failure(method: StartMethod) -> None:
    """And the failed spawn leaks nothing."""
    await end_of(await method.start(functions.give))  # the server has started
    spec = method.spec(functions.give)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(SpawnError) as caught:
            await method.spawn(spec)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not caught.value.permanent
    child = await method.spawn(spec)
    child.release()
    assert (await end_of(child)).status.is_success


async def test_a_forked_child_reaped_by_other_code_has_an_unknown_status(devnull: int) -> None:
    method = StartMethod("fork", spawn_by_fork, devnull)
    with method.opened:
        child = await method.start(functions.leave_hard, 3)
        os.waitpid(child.pid, 0)
        assert (await end_of(child)).status == ExitStatus()


async def test_a_lost_server_is_replaced(devnull: int) -> None:
    """Its children's exit status is unknown; the next spawn starts another server."""
    started: list[Child] = []
    server = server_of(devnull, started=started.append)
    method = StartMethod("forkserver", server, devnull)
    with method.opened:
        child = await method.start(functions.sleep)
        started[0].send_signal(signal.SIGKILL)
        await until(lambda: "0 workers" in repr(server))
        assert not child.has_ended()
        assert child.send_signal(signal.SIGKILL)
        assert (await end_of(child)).status == ExitStatus()
        other = await method.start(functions.leave_hard, 5)
        assert (await end_of(other)).status == ExitStatus(code=5)
        assert len(started) == 2
        await server.aclose()
        await server.aclose()


async def test_a_server_without_its_modules(devnull: int) -> None:
    """Each spawn raises an error that names the module."""
    async with serving(devnull, ("no_such_module",)) as method:
        with pytest.raises(SpawnError, match=r"^cannot preload 'no_such_module': ModuleNotFound"):
            await method.start(functions.give)


# Leaves the server two descriptors: fewer than a request has, and more than none.
GREEDY = """
import os, resource
free = os.dup(0)
os.close(free)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, hard))
"""


async def test_a_server_without_descriptors(
    devnull: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses a request of which it gets a part only, and serves the next one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "greedy.py").write_text(GREEDY)
    started: list[Child] = []
    async with serving(devnull, ("greedy",), started.append) as method:
        with pytest.raises(SpawnError, match="too many open files") as caught:
            await method.start(functions.leave_hard, 5)
        assert not caught.value.permanent
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(started[0].pid, resource.RLIMIT_NOFILE, limits)
        other = await method.start(functions.leave_hard, 5)
        assert (await end_of(other)).status == ExitStatus(code=5)
        assert len(started) == 1


MUTE = """
import errno, os, pickle, socket

send = socket.send_fds

def send_others(channel, contents, descriptors):
    if pickle.loads(contents[0])[0] == {kind!r}:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
    return send(channel, contents, descriptors)

socket.send_fds = send_others
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ready", "started", "exited"])
async def test_a_server_that_cannot_answer(
    kind: str, devnull: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is one of the start, or its end that of the status, at once."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mute.py").write_text(MUTE.format(kind=kind))
    async with serving(devnull, ("mute",)) as method:
        if kind == "exited":
            child = await method.start(functions.leave_hard, 5)
            assert (await end_of(child)).status == ExitStatus()
        else:
            with pytest.raises(SpawnError) as caught:
                await method.start(functions.sleep)
            problem = "the fork server has ended: exit code 1"
            if kind == "started":
                problem = "cannot run .*: too many references: cannot splice"
            assert re.fullmatch(problem, str(caught.value))


async def test_a_module_that_fails_without_a_text(
    devnull: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "odd.py").write_text("from tests.support import functions\nfunctions.raise_odd()")
    async with serving(devnull, ("odd",)) as method:
        with pytest.raises(SpawnError, match=r"cannot preload 'odd': OddError: <str\(\) failed>$"):
            await method.start(functions.give)


@pytest.mark.parametrize("size", [100_000, 1_000_000])
async def test_a_module_that_fails_with_a_long_text(
    size: int, devnull: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of the server is at most as long as the client reads."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verbose.py").write_text(f"raise ValueError('x' * {size})")
    async with serving(devnull, ("verbose",)) as method:
        with pytest.raises(SpawnError, match=r"^cannot preload 'verbose': ValueError"):
            await method.start(functions.give)


async def test_a_worker_whose_pidfd_does_not_arrive(
    devnull: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops a descriptor for which the client has no room."""
    server = server_of(devnull)
    method = StartMethod("forkserver", server, devnull)
    receive = socket.recv_fds

    def receive_none(*args: Any) -> Any:
        content, descriptors, *rest = receive(*args)
        for descriptor in descriptors:
            os.close(descriptor)
        return content, [], *rest

    with method.opened:
        await end_of(await method.start(functions.give))
        with monkeypatch.context() as patch:
            patch.setattr(socket, "recv_fds", receive_none)
            async with asyncio.timeout(GUARD):
                with pytest.raises(SpawnError, match="too many open files"):
                    await method.start(functions.leave_hard, 3)
        other = await method.start(functions.leave_hard, 4)
        assert (await end_of(other)).status == ExitStatus(code=4)
        await server.aclose()
    # The refused worker ends when it notices that its server has gone.
    await until(lambda: not leaked_processes(), "the end of the refused worker")


@pytest.mark.slow
async def test_a_cancelled_start_leaves_no_child(devnull: int) -> None:
    """The server may have forked already, but the child is in no process tree."""
    server = server_of(devnull)
    method = StartMethod("forkserver", server, devnull)
    with method.opened:
        await end_of(await method.start(functions.give))
        starting = asyncio.ensure_future(method.start(functions.sleep))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        other = await method.start(functions.leave_hard, 4)
        assert (await end_of(other)).status == ExitStatus(code=4)
        await until(lambda: "0 workers" in repr(server))
        await server.aclose()
