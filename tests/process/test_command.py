"""One suite for both ways to spawn, on both loops: they behave alike."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import SpawnError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process.base import Child, ChildPlan, Exit, Spawner, spawn_error
from elastic_aio.process.command import command_spawner, spawn_with_asyncio, spawn_with_popen

GUARD = 30.0
ENV = {"PATH": os.environ["PATH"]}


@pytest.fixture(autouse=True)
def _waiting_threads_end() -> Iterator[None]:
    """On Python 3.11 asyncio has a thread for each child, which ends a little after it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-")):
            thread.join(GUARD)


@pytest.fixture(params=[spawn_with_asyncio, spawn_with_popen], ids=["asyncio-spawn", "popen-spawn"])
def spawn(request: pytest.FixtureRequest) -> Spawner:
    """Each way to spawn."""
    way: Spawner = request.param
    return way


@pytest.fixture(params=["by-loop", "popen-spawn"])
async def fitting_spawn(request: pytest.FixtureRequest) -> Spawner:
    """Each way to spawn, where it is used.

    asyncio's on uvloop is not: it leaks descriptors and runs a shell on files that
    are no programs.
    """
    by_loop = request.param == "by-loop"
    return command_spawner(asyncio.get_running_loop()) if by_loop else spawn_with_popen


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


def plan(*argv: str, to: int, **changes: Any) -> ChildPlan:
    settings: dict[str, Any] = {
        "argv": argv,
        "env": ENV,
        "cwd": None,
        "stdin": to,
        "stdout": to,
        "stderr": to,
        **changes,
    }
    return ChildPlan(**settings)


async def end_of(child: Child) -> Exit:
    async with asyncio.timeout(GUARD):
        return await asyncio.shield(child.exited)


async def line_from(descriptor: int) -> str:
    """Read one line without holding the loop."""

    def read() -> str:
        line = b""
        while not line.endswith(b"\n"):
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            assert waiting.poll(GUARD * 1000), "nothing was printed"
            line += os.read(descriptor, 1)
        return line.decode().rstrip("\n")

    return read()


async def test_children_that_exit_at_once_have_the_right_status(
    spawn: Spawner, nothing: int
) -> None:
    """64 of them, each with a code of its own, all started before any is waited for."""
    children = [await spawn(plan("sh", "-c", f"exit {code}", to=nothing)) for code in range(64)]
    ends = [await end_of(child) for child in children]
    assert [end.status for end in ends] == [ExitStatus(code=code) for code in range(64)]
    assert all(child.has_ended() for child in children)
    assert not any(child.send_signal(signal.SIGTERM) for child in children)
    assert [repr(child) for child in children] == [
        f"<Child {child.pid}: exit code {code}>" for code, child in enumerate(children)
    ]


async def test_a_killed_child_has_its_signal(spawn: Spawner, nothing: int) -> None:
    """Signals reach the child, and its status names the one that ended it."""
    child = await spawn(plan("sleep", "99", to=nothing))
    assert repr(child) == f"<Child {child.pid}: running>"
    assert not child.has_ended()
    assert not child.exited.done()
    assert child.send_signal(signal.SIGTERM)
    assert (await end_of(child)).status == ExitStatus(signal=15)
    other = await spawn(plan("sleep", "99", to=nothing))
    assert other.send_signal(signal.SIGKILL)
    assert (await end_of(other)).status == ExitStatus(signal=9)
    assert child.has_ended()
    assert not child.send_signal(signal.SIGTERM)


async def test_a_child_leads_its_session_and_gets_its_streams(
    fitting_spawn: Spawner, nothing: int, output: tuple[int, int], tmp_path: Path
) -> None:
    """Session, environment, directory and streams are exactly those of the plan."""
    reader, writer = output
    code = (
        "import os; print(os.getsid(0) == os.getpid() == os.getpgrp(), sorted(os.environ),"
        " os.getcwd(), os.read(0, 9), sorted(map(int, os.listdir('/proc/self/fd'))), flush=True)"
    )
    child = await fitting_spawn(
        plan(
            sys.executable,
            "-I",
            "-S",
            "-c",
            code,
            to=nothing,
            env={"A": "1", "LC_ALL": "C.UTF-8"},
            cwd=str(tmp_path),
            stdout=writer,
        )
    )
    line = await line_from(reader)
    # The last descriptor is the one that lists the folder.
    assert line == f"True ['A', 'LC_ALL'] {tmp_path} b'' [0, 1, 2, 3]"
    assert (await end_of(child)).status.is_success


async def test_named_descriptors_are_inherited_under_their_numbers(
    spawn: Spawner, nothing: int, output: tuple[int, int]
) -> None:
    """`pass_fds` are there, and stay ours too."""
    reader, writer = output
    child = await spawn(plan("bash", "-c", f"echo here >&{writer}", to=nothing, pass_fds=(writer,)))
    assert await line_from(reader) == "here"
    assert (await end_of(child)).status.is_success
    os.fstat(writer)


async def test_a_grandchild_that_holds_stdout_delays_nothing(
    spawn: Spawner, nothing: int, output: tuple[int, int]
) -> None:
    """The end of the process and the end of its output are two events."""
    reader, writer = output
    child = await spawn(plan("sh", "-c", "sleep 99 & echo $!; exit 3", to=nothing, stdout=writer))
    grandchild = int(await line_from(reader))
    pidfd = os.pidfd_open(grandchild)
    try:
        assert (await end_of(child)).status == ExitStatus(code=3)
        assert os.path.exists(f"/proc/{grandchild}")
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        assert not waiting.poll(0)
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert waiting.poll(GUARD * 1000)
        os.close(pidfd)


async def test_the_time_of_the_exit_is_monotonic(spawn: Spawner, nothing: int) -> None:
    """`at` is measured by the clock that durations are measured by."""
    before = time.monotonic()
    child = await spawn(plan("true", to=nothing))
    end = await end_of(child)
    assert before <= end.at <= time.monotonic()


async def test_usage_is_known_where_we_reap(nothing: int) -> None:
    """Popen's children tell what they used."""
    child = await spawn_with_popen(
        plan(sys.executable, "-I", "-S", "-c", "sum(range(10**6))", to=nothing)
    )
    usage = (await end_of(child)).usage
    assert usage is not None
    assert 1 << 20 < usage.max_rss_bytes < 1 << 30
    assert 0 < usage.user_s + usage.system_s < GUARD
    assert usage.minor_faults > 0


async def test_a_child_that_others_have_reaped_is_lost_but_over(nothing: int) -> None:
    """An embedding program that waits for all children takes the status with it."""
    child = await spawn_with_popen(plan("sh", "-c", "exit 3", to=nothing))
    os.waitpid(child.pid, 0)
    assert (await end_of(child)).status == ExitStatus()


@pytest.mark.filterwarnings("ignore:Unknown child process")
async def test_the_way_to_spawn_fits_the_loop() -> None:
    """asyncio's own on a stock loop, Popen elsewhere."""
    loop = asyncio.get_running_loop()
    is_stock = isinstance(loop, asyncio.SelectorEventLoop)
    assert command_spawner(loop) is (spawn_with_asyncio if is_stock else spawn_with_popen)


async def refused(spawn: Spawner, plan: ChildPlan) -> tuple[str, bool, int]:
    with pytest.raises(SpawnError) as caught:
        await spawn(plan)
    assert "\n" not in str(caught.value)
    return str(caught.value), caught.value.permanent, caught.value.exit_code


async def test_a_missing_program(spawn: Spawner, nothing: int) -> None:
    """What is not on the path and not in its folder is not found: 127."""
    for program in ("no-such-program", "/no/such/program"):
        assert await refused(spawn, plan(program, to=nothing)) == (
            f"cannot run {program}: command not found",
            True,
            127,
        )


async def test_a_program_that_may_not_be_executed(
    spawn: Spawner, nothing: int, tmp_path: Path
) -> None:
    """A file without the right to execute, and a folder: 126."""
    (tmp_path / "file").write_text("#!/bin/sh\n")
    for program in (tmp_path / "file", tmp_path):
        assert await refused(spawn, plan(str(program), to=nothing)) == (
            f"cannot run {program}: permission denied",
            True,
            126,
        )


async def test_a_file_that_is_no_program(
    fitting_spawn: Spawner, nothing: int, tmp_path: Path
) -> None:
    """Executable, but in no form that the kernel knows: 126."""
    program = tmp_path / "file"
    program.write_bytes(b"\x01\x02\x03")
    program.chmod(0o755)
    assert await refused(fitting_spawn, plan(str(program), to=nothing)) == (
        f"cannot run {program}: exec format error",
        True,
        126,
    )


@pytest.mark.parametrize("relative", [False, True])
async def test_a_script_whose_interpreter_is_missing(
    spawn: Spawner, nothing: int, tmp_path: Path, relative: bool
) -> None:
    """The script is there; what its first line names is not.  Relative paths mean the cwd."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    program = "./script" if relative else str(script)
    assert await refused(spawn, plan(program, to=nothing, cwd=str(tmp_path))) == (
        f"cannot run {program}: its interpreter (the first line, after #!) does not exist",
        True,
        126,
    )


async def test_a_bad_working_directory(spawn: Spawner, nothing: int, tmp_path: Path) -> None:
    """A missing one and one that is a file are told apart: 126."""
    (tmp_path / "file").write_text("")
    for place, reason in [("missing", "does not exist"), ("file", "is not a folder")]:
        cwd = str(tmp_path / place)
        assert await refused(spawn, plan("true", to=nothing, cwd=cwd)) == (
            f"cannot run true: its working directory {cwd} {reason}",
            True,
            126,
        )


async def test_too_long_arguments(spawn: Spawner, nothing: int) -> None:
    """The kernel's limit is told with the size that was asked for: 126."""
    argument = "x" * 200_000
    size = len("true") + 1 + len(argument) + 1 + len(ENV["PATH"]) + len("PATH") + 2
    assert await refused(spawn, plan("true", argument, to=nothing)) == (
        f"cannot run true: its arguments and environment ({size} bytes) are too long",
        True,
        126,
    )


async def test_a_lack_of_descriptors_is_no_permanent_failure(spawn: Spawner, nothing: int) -> None:
    """Another attempt may find some; nothing is left behind by this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    duplicate = fcntl.fcntl(nothing, fcntl.F_DUPFD_CLOEXEC, 0)
    os.close(duplicate)  # the lowest free number: from here on there is no other
    resource.setrlimit(resource.RLIMIT_NOFILE, (duplicate, hard))
    try:
        message, permanent, exit_code = await refused(spawn, plan("true", to=nothing))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert message == "cannot run true: too many open files"
    assert (permanent, exit_code) == (False, 1)


@pytest.mark.parametrize(
    ("code", "permanent", "exit_code", "said"),
    [
        (errno.EAGAIN, False, 1, "resource temporarily unavailable"),
        (errno.ENOMEM, False, 1, "cannot allocate memory"),
        (errno.EMFILE, False, 1, "too many open files"),
        (errno.ENOENT, True, 127, "command not found"),
        (errno.ENOTDIR, True, 127, "not a directory"),
        (errno.EPERM, True, 126, "operation not permitted"),
        (errno.ETXTBSY, True, 126, "text file busy"),
        (errno.ELOOP, True, 126, "too many levels of symbolic links"),
    ],
)
def test_what_another_attempt_can_mend(
    code: int, permanent: bool, exit_code: int, said: str
) -> None:
    """A lack of resources may pass; what is wrong with the command stays."""
    error = spawn_error(OSError(code, "x"), plan("prog", to=0))
    assert str(error) == f"cannot run prog: {said}"
    assert (error.permanent, error.exit_code, error.local_rank) == (permanent, exit_code, 0)
