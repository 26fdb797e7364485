"""The conformance suite of spawners of commands: asyncio and Popen, on both loops."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.launcher import use_pidfd_child_watcher
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.children import (
    Child,
    ChildExit,
    ChildSpec,
    PidfdChild,
    PidfdWatch,
    Spawner,
    command_spawner,
    has_ended,
    open_child_pidfd,
    spawn_error,
    spawn_with_asyncio,
    spawn_with_popen,
)
from tests.support.children import line_from

pytestmark = pytest.mark.both_loops

GUARD = 30.0
ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture(params=[spawn_with_asyncio, spawn_with_popen], ids=["asyncio-spawn", "popen-spawn"])
def spawn(request: pytest.FixtureRequest) -> Spawner:
    """Each spawner."""
    spawner: Spawner = request.param
    return spawner


@contextmanager
def pidfd_watcher() -> Iterator[None]:
    """Let asyncio wait for children by pidfd in the running loop, on Python 3.11 too."""
    with use_pidfd_child_watcher():
        if sys.version_info < (3, 12):
            asyncio.get_child_watcher().attach_loop(asyncio.get_running_loop())
        yield


@pytest.fixture(params=["by-loop", "popen-spawn", "blocked-signals"])
async def fitting_spawn(request: pytest.FixtureRequest) -> AsyncIterator[Spawner]:
    """Each spawner, on the loops for which it is used, and in a thread that blocks a signal.

    asyncio's is not used on uvloop: there it leaks descriptors, and runs a shell on files
    that are no programs.
    """
    by_loop = request.param != "popen-spawn"
    blocked = [signal.SIGUSR2] if request.param == "blocked-signals" else []
    former = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    with pidfd_watcher():
        yield command_spawner(asyncio.get_running_loop()) if by_loop else spawn_with_popen
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


def spec_of(*argv: str, to: int, **changes: Any) -> ChildSpec:
    settings: dict[str, Any] = {
        "argv": argv,
        "env": ENV,
        "cwd": None,
        "stdin": to,
        "stdout": to,
        "stderr": to,
        **changes,
    }
    return ChildSpec(**settings)


async def end_of(child: Child) -> ChildExit:
    async with asyncio.timeout(GUARD):
        await asyncio.shield(child.exited)
        assert isinstance(child, PidfdChild)
        return await asyncio.shield(child.reaped)


async def test_an_exit_is_passed_on_in_its_iteration_of_the_loop(
    fitting_spawn: Spawner, output: tuple[int, int], devnull: int
) -> None:
    """Others wait to be signalled: the callbacks of a future take another iteration."""
    order: list[str] = []
    child = await fitting_spawn(spec_of("cat", to=devnull, stdin=output[0]))
    ended = asyncio.Event()

    def on_exit(end: ChildExit) -> None:
        assert child.exited.result() is end
        asyncio.get_running_loop().call_soon(order.append, "next iteration")
        order.append("exit")

    def on_callback(_: object) -> None:
        order.append("callback")
        ended.set()

    child.exited.add_done_callback(on_callback)
    child.on_exit = on_exit
    os.kill(child.pid, signal.SIGTERM)
    async with asyncio.timeout(GUARD):
        await ended.wait()
    assert order == ["exit", "callback", "next iteration"]
    assert (await end_of(child)).status == ExitStatus(signal=15)


@pytest.mark.slow
async def test_children_that_exit_at_once_have_the_right_status(
    spawn: Spawner, devnull: int
) -> None:
    """64 children with different codes, all started before the first is awaited."""
    children = [await spawn(spec_of("sh", "-c", f"exit {code}", to=devnull)) for code in range(64)]
    ends = [await end_of(child) for child in children]
    assert [end.status for end in ends] == [ExitStatus(code=code) for code in range(64)]
    assert all(child.has_ended() for child in children)
    assert not any(child.send_signal(signal.SIGTERM) for child in children)
    assert [repr(child) for child in children] == [
        f"<Child {child.pid}: exit code {code}>" for code, child in enumerate(children)
    ]


async def test_a_program_may_have_an_equals_sign_in_its_path(
    fitting_spawn: Spawner, devnull: int, tmp_path: Path
) -> None:
    """env(1) takes such a word for a variable."""
    program = tmp_path / "lr=0.1" / "program"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nexit "$1"\n')
    program.chmod(0o755)
    for path in (str(program), "./lr=0.1/program"):
        child = await fitting_spawn(spec_of(path, "7", to=devnull, cwd=str(tmp_path)))
        assert (await end_of(child)).status == ExitStatus(code=7)


async def test_a_killed_child_has_its_signal(spawn: Spawner, devnull: int) -> None:
    child = await spawn(spec_of("sleep", "99", to=devnull))
    assert repr(child) == f"<Child {child.pid}: running>"
    assert not child.has_ended()
    assert not child.exited.done()
    assert child.send_signal(signal.SIGTERM)
    assert (await end_of(child)).status == ExitStatus(signal=15)
    other = await spawn(spec_of("sleep", "99", to=devnull))
    assert other.send_signal(signal.SIGKILL)
    assert (await end_of(other)).status == ExitStatus(signal=9)
    assert child.has_ended()
    assert not child.send_signal(signal.SIGTERM)


async def test_a_child_leads_its_session_and_gets_its_streams(
    fitting_spawn: Spawner, devnull: int, output: tuple[int, int], tmp_path: Path
) -> None:
    """And the environment and directory of its spec, nothing else."""
    reader, writer = output
    code = (
        "import os; print(os.getsid(0) == os.getpid() == os.getpgrp(), sorted(os.environ),"
        " os.getcwd(), os.read(0, 9), sorted(map(int, os.listdir('/proc/self/fd'))), flush=True)"
    )
    child = await fitting_spawn(
        spec_of(
            sys.executable,
            "-I",
            "-S",
            "-c",
            code,
            to=devnull,
            env={"A": "1", "LC_ALL": "C.UTF-8"},
            cwd=str(tmp_path),
            stdout=writer,
        )
    )
    line = line_from(reader)
    # The last descriptor is the one that lists the directory.
    assert line == f"True ['A', 'LC_ALL'] {tmp_path} b'' [0, 1, 2, 3]"
    assert (await end_of(child)).status.is_success


async def test_a_child_inherits_no_blocked_signal(
    fitting_spawn: Spawner,
    devnull: int,
    output: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spawning thread may block signals; nothing else differs in the child.

    That needs no interpreter: a frozen application has none.
    """
    monkeypatch.setattr(sys, "executable", "/bin/false")
    script = "echo $(grep -E 'Sig(Blk|Ign|Cgt)' /proc/$$/status; env)"
    lines = []
    for blocked in ([], [signal.SIGTERM, signal.SIGUSR1]):
        former = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            child = await fitting_spawn(spec_of("sh", "-c", script, to=devnull, stdout=output[1]))
            with pytest.raises(SpawnError, match="command not found"):
                await fitting_spawn(spec_of("no-such-program", to=devnull))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
        assert (await end_of(child)).status.is_success
        line = line_from(output[0])
        # The C library ignores its own signals, 32 and 33, in what it spawns.
        ignored = re.search(r"SigIgn: ([0-9a-f]+)", line)
        assert ignored is not None
        own = int(ignored[1], 16) & 0x7FFFFFFF
        lines.append(line.replace(ignored[0], f"SigIgn: {own:x}"))
    assert lines[0] == lines[1]


async def test_pass_fds_are_inherited_under_their_numbers(
    spawn: Spawner, devnull: int, output: tuple[int, int]
) -> None:
    """`pass_fds` stay open in the parent too."""
    reader, writer = output
    child = await spawn(
        spec_of("bash", "-c", f"echo here >&{writer}", to=devnull, pass_fds=(writer,))
    )
    assert line_from(reader) == "here"
    assert (await end_of(child)).status.is_success
    os.fstat(writer)


async def test_no_descriptor_above_the_limit_is_inherited(
    fitting_spawn: Spawner, devnull: int, output: tuple[int, int]
) -> None:
    """It was opened before the limit was lowered, and stays as it is in the parent."""
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = 200
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(high)
    os.dup2(devnull, high)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (high, former[1]))
        child = await fitting_spawn(
            spec_of("sh", "-c", "echo /proc/$$/fd/*", to=devnull, stdout=output[1])
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
        assert os.get_inheritable(high)
        os.close(high)
    assert (await end_of(child)).status.is_success
    numbers = {path.rpartition("/")[2] for path in line_from(output[0]).split()}
    assert {"0", "1", "2"} <= numbers
    assert str(high) not in numbers


async def test_a_grandchild_that_holds_stdout_delays_nothing(
    spawn: Spawner, devnull: int, output: tuple[int, int]
) -> None:
    """Exit and end of file are two events."""
    reader, writer = output
    child = await spawn(
        spec_of("sh", "-c", "sleep 99 & echo $!; exit 3", to=devnull, stdout=writer)
    )
    grandchild = int(line_from(reader))
    pidfd = os.pidfd_open(grandchild)
    try:
        assert (await end_of(child)).status == ExitStatus(code=3)
        assert os.path.exists(f"/proc/{grandchild}")
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert not poller.poll(0)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert poller.poll(GUARD * 1000)
        os.close(pidfd)


async def test_the_time_of_the_exit_is_monotonic(spawn: Spawner, devnull: int) -> None:
    before = time.monotonic()
    child = await spawn(spec_of("true", to=devnull))
    end = await end_of(child)
    assert before <= end.at <= time.monotonic()


def test_a_usage_is_unknown_while_no_descriptor_is_left() -> None:
    """The first look loads a module; the exit of the worker must be known all the same."""
    code = """if True:
        import os, resource, sys
        from elastic_aio.process.rusage import peek_usage

        child = os.posix_spawn("/bin/true", ["true"], {})
        descriptor = os.pidfd_open(child)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert "ctypes" not in sys.modules
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.dup(descriptor))
        except OSError:
            print(peek_usage(descriptor))
        for each in taken:
            os.close(each)
        print(peek_usage(descriptor).minor_faults > 0)
    """
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("None\nTrue\n", "")


async def test_children_have_a_resource_usage(fitting_spawn: Spawner, devnull: int) -> None:
    child = await fitting_spawn(
        spec_of(sys.executable, "-I", "-S", "-c", "sum(range(10**6))", to=devnull)
    )
    usage = (await end_of(child)).usage
    assert usage is not None
    # getrusage(2): the peak includes the memory before exec, which was that of this process.
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert 1 << 20 < usage.max_rss_bytes < max(1 << 30, own_peak + 1)
    assert 0 < usage.user_s + usage.system_s < GUARD
    assert usage.minor_faults > 0
    assert usage.voluntary_switches + usage.involuntary_switches > 0


@pytest.mark.parametrize("code", [0, 3, 255])
async def test_a_child_reaped_by_other_code_has_an_unknown_status(
    fitting_spawn: Spawner, devnull: int, code: int
) -> None:
    """The embedding program may wait for all children: asyncio calls that code 255."""
    reader, writer = os.pipe()
    child = await fitting_spawn(
        spec_of("sh", "-c", f"read x; exit {code}", to=devnull, stdin=reader)
    )
    os.close(reader)
    os.close(writer)
    os.waitpid(child.pid, 0)
    assert (await end_of(child)).status == ExitStatus()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_child_reaped_before_it_is_watched_is_lost(
    devnull: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the embedding program, before asyncio or this package has opened a pidfd."""
    real, reaped = os.pidfd_open, []

    def reap_first(pid: int, flags: int = 0) -> int:
        if pid not in reaped:
            os.waitpid(pid, 0)
            reaped.append(pid)
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", reap_first)
    if isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop):
        problem = "another part of this program has reaped it"
        with pidfd_watcher(), pytest.raises(SpawnError, match=problem):
            await spawn_with_asyncio(spec_of("true", to=devnull))
        for _ in range(5):
            await asyncio.sleep(0)  # asyncio connects its transport
        gc.collect()  # which is left open, and warns
    child = await spawn_with_popen(spec_of("true", to=devnull))
    assert child.pid == reaped[-1]
    assert child.has_ended()
    assert not child.send_signal(signal.SIGTERM)
    assert (await end_of(child)).status == ExitStatus()


async def test_a_child_that_exits_at_once_with_the_highest_code(
    fitting_spawn: Spawner, devnull: int
) -> None:
    """asyncio may reap it before it is watched."""
    for _ in range(20):
        child = await fitting_spawn(spec_of("sh", "-c", "exit 255", to=devnull))
        assert (await end_of(child)).status == ExitStatus(code=255)


@pytest.mark.parametrize("code", [254, 255])
async def test_the_highest_exit_codes_are_known(
    fitting_spawn: Spawner, devnull: int, code: int
) -> None:
    """255 is what asyncio reports where it knows nothing."""
    reader, writer = os.pipe()
    child = await fitting_spawn(
        spec_of("sh", "-c", f"read x; exit {code}", to=devnull, stdin=reader)
    )
    os.close(reader)
    os.close(writer)
    assert (await end_of(child)).status == ExitStatus(code=code)


async def test_the_spawner_depends_on_the_loop() -> None:
    """On Python 3.11 also on the child watcher: asyncio's default has a thread per child."""
    loop = asyncio.get_running_loop()
    is_stock = isinstance(loop, asyncio.SelectorEventLoop)
    with pidfd_watcher():
        assert command_spawner(loop) is (spawn_with_asyncio if is_stock else spawn_with_popen)
    is_default_fit = is_stock and sys.version_info >= (3, 12)
    assert command_spawner(loop) is (spawn_with_asyncio if is_default_fit else spawn_with_popen)


async def test_no_child_has_a_thread(devnull: int) -> None:
    spawn = command_spawner(asyncio.get_running_loop())
    children = [await spawn(spec_of("sleep", "99", to=devnull)) for _ in range(3)]
    assert threading.enumerate() == [threading.main_thread()]
    for child in children:
        child.send_signal(signal.SIGKILL)
        assert (await end_of(child)).status == ExitStatus(signal=9)


async def refused(spawn: Spawner, spec: ChildSpec) -> tuple[str, bool, int]:
    with pytest.raises(SpawnError) as caught:
        await spawn(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.permanent, caught.value.exit_code


async def test_a_missing_program(spawn: Spawner, devnull: int) -> None:
    """Neither in a directory of PATH nor at its own path: 127."""
    for program in ("no-such-program", "/no/such/program"):
        assert await refused(spawn, spec_of(program, to=devnull)) == (
            f"cannot run {program}: command not found",
            True,
            127,
        )


async def test_a_program_without_permission(spawn: Spawner, devnull: int, tmp_path: Path) -> None:
    """A file that is not executable, and a directory: 126."""
    (tmp_path / "file").write_text("#!/bin/sh\n")
    for program in (tmp_path / "file", tmp_path):
        assert await refused(spawn, spec_of(str(program), to=devnull)) == (
            f"cannot run {program}: permission denied",
            True,
            126,
        )


async def test_a_file_that_is_no_program(
    fitting_spawn: Spawner, devnull: int, tmp_path: Path
) -> None:
    """Executable, but in no format that the kernel knows: 126."""
    program = tmp_path / "file"
    program.write_bytes(b"\x01\x02\x03")
    program.chmod(0o755)
    assert await refused(fitting_spawn, spec_of(str(program), to=devnull)) == (
        f"cannot run {program}: exec format error",
        True,
        126,
    )


@pytest.mark.parametrize("relative", [False, True])
async def test_a_script_whose_interpreter_is_missing(
    spawn: Spawner, devnull: int, tmp_path: Path, relative: bool
) -> None:
    """A relative path is relative to the working directory."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    program = "./script" if relative else str(script)
    assert await refused(spawn, spec_of(program, to=devnull, cwd=str(tmp_path))) == (
        f"cannot run {program}: its interpreter (the first line, after #!) does not exist",
        True,
        126,
    )


async def test_a_bad_working_directory(spawn: Spawner, devnull: int, tmp_path: Path) -> None:
    """Missing, or a file: 126."""
    (tmp_path / "file").write_text("")
    for name, reason in [("missing", "does not exist"), ("file", "is not a directory")]:
        cwd = str(tmp_path / name)
        assert await refused(spawn, spec_of("true", to=devnull, cwd=cwd)) == (
            f"cannot run true: its working directory {cwd} {reason}",
            True,
            126,
        )


async def test_too_long_arguments(spawn: Spawner, devnull: int) -> None:
    """The error has the total size: 126."""
    argument = "x" * 200_000
    size = len("true") + 1 + len(argument) + 1 + len(ENV["PATH"]) + len("PATH") + 2
    assert await refused(spawn, spec_of("true", argument, to=devnull)) == (
        f"cannot run true: its arguments and environment ({size} bytes) are too long",
        True,
        126,
    )


async def test_a_lack_of_descriptors_is_no_permanent_failure(spawn: Spawner, devnull: int) -> None:
    """And the failed spawn leaks nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    duplicate = fcntl.fcntl(devnull, fcntl.F_DUPFD_CLOEXEC, 0)
    os.close(duplicate)  # the lowest free number: from here on there is no other
    resource.setrlimit(resource.RLIMIT_NOFILE, (duplicate, hard))
    try:
        message, permanent, exit_code = await refused(spawn, spec_of("true", to=devnull))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    problem = f"too many open files; the limit is {duplicate} (raise it with ulimit -n)"
    assert message == f"cannot run true: {problem}"
    assert (permanent, exit_code) == (False, 1)


@pytest.mark.parametrize(
    ("code", "permanent", "exit_code", "reason"),
    [
        (errno.EAGAIN, False, 1, "resource temporarily unavailable"),
        (errno.ENOMEM, False, 1, "cannot allocate memory"),
        (errno.ENOENT, True, 127, "command not found"),
        (errno.ENOTDIR, True, 127, "not a directory"),
        (errno.EPERM, True, 126, "operation not permitted"),
        (errno.ETXTBSY, True, 126, "text file busy"),
        (errno.ELOOP, True, 126, "too many levels of symbolic links"),
    ],
)
def test_only_a_lack_of_resources_is_temporary(
    code: int, permanent: bool, exit_code: int, reason: str
) -> None:
    error = spawn_error(OSError(code, os.strerror(code)), spec_of("prog", to=0))
    assert str(error) == f"cannot run prog: {reason}"
    assert (error.permanent, error.exit_code, error.local_rank) == (permanent, exit_code, 0)


# ------------------------------------------------------------------------ exits by pidfd


def waiting_child() -> subprocess.Popen[bytes]:
    """Start a child that ends when its stdin is closed."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def release(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()


async def test_the_callback_runs_once() -> None:
    """The descriptor is still open meanwhile."""
    child = waiting_child()
    ends: asyncio.Queue[int] = asyncio.Queue()
    descriptor = os.pidfd_open(child.pid)
    watch = PidfdWatch(descriptor, lambda: ends.put_nowait(watch.descriptor))
    assert repr(watch) == f"<PidfdWatch on {descriptor}>"
    assert ends.empty()
    release(child)
    async with asyncio.timeout(GUARD):
        assert await ends.get() == descriptor
    for _ in range(5):
        await asyncio.sleep(0)
    assert ends.empty()
    assert watch.descriptor == -1
    assert repr(watch) == "<PidfdWatch done>"
    assert child.wait() == 0
    watch.close()


async def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = asyncio.Event()
    PidfdWatch(os.pidfd_open(child.pid), ended.set)
    async with asyncio.timeout(GUARD):
        await ended.wait()
    assert child.wait() == 0


async def test_a_closed_watch_does_not_call_back() -> None:
    child = waiting_child()
    ended = asyncio.Event()
    watch = PidfdWatch(os.pidfd_open(child.pid), ended.set)
    watch.close()
    watch.close()
    release(child)
    child.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not ended.is_set()


async def test_a_process_that_is_no_child_can_be_watched() -> None:
    shell = subprocess.Popen(
        ["sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!; exec 3<&-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    ended = asyncio.Event()
    PidfdWatch(os.pidfd_open(grandchild), ended.set)
    assert not ended.is_set()
    release(shell)
    async with asyncio.timeout(GUARD):
        await ended.wait()
    shell.stdout.close()
    assert shell.wait() == 0


def test_only_a_child_of_this_process_has_a_pidfd() -> None:
    """The child may have been reaped, and another process may have its pid by now."""
    child = waiting_child()
    descriptor = open_child_pidfd(child.pid)
    assert not has_ended(descriptor)
    os.close(descriptor)
    release(child)
    assert child.wait() == 0
    assert open_child_pidfd(child.pid) == -1
    assert open_child_pidfd(os.getppid()) == -1


def test_has_ended_does_not_reap() -> None:
    child = waiting_child()
    descriptor = os.pidfd_open(child.pid)
    assert not has_ended(descriptor)
    release(child)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(descriptor)
    assert has_ended(descriptor)
    assert child.wait() == 0
    assert has_ended(descriptor)
    os.close(descriptor)
