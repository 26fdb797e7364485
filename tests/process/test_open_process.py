"""`open_process`: one program with pipes, whose whole tree is gone when the block is left."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import Any

import anyio
import anyio.from_thread
import pytest

from elastic_aio import StopPlan, open_process
from elastic_aio.errors import HostError, SpawnError, SpecError
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import guardian_process
from elastic_aio.process.guardian_process import GuardedProgram
from elastic_aio.process.open_process import PipeReceiveStream, Process
from tests.support.children import SLEEPER, none_alive, until_sync
from tests.support.cli import run_program, running
from tests.support.leaks import alive, leaked_processes, open_descriptors

pytestmark = pytest.mark.both_loops

GUARD = 30.0
ROOT = Path(__file__).parents[2]
SHORT = StopPlan.within(0.2)
EOF_FIRST = StopPlan([("EOF", 1), ("SIGTERM", 1)])

# A server on stdin and stdout, as of MCP: it starts a helper and a helper with a session of its
# own, ignores SIGTERM, and floods stderr.  It answers each line with the pids of all three.
SERVER = """
import os, signal, subprocess, sys, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helpers = [subprocess.Popen(["sleep", "99"], start_new_session=own) for own in (False, True)]
def flood():
    while True:
        os.write(2, b"x" * 65536)
threading.Thread(target=flood, daemon=True).start()
for line in sys.stdin:
    print(os.getpid(), *(each.pid for each in helpers), flush=True)
signal.pause()
"""
# Becomes a daemon: another session, and process 1 as its parent.  Prints its pid.
DAEMON = """
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
"""


def python(code: str, *words: object) -> list[str]:
    return [sys.executable, "-S", "-c", code, *map(str, words)]


async def line(stream: PipeReceiveStream | None) -> str:
    """Return what a process prints until the end of a line."""
    assert stream is not None
    content = b""
    async with asyncio.timeout(GUARD):
        while not content.endswith(b"\n"):
            content += await stream.receive()
    return content.decode()


async def pids_of(server: Process) -> list[int]:
    """Return the pids of the server and its helpers."""
    assert server.stdin is not None
    await server.stdin.send(b"?\n")
    return [int(word) for word in (await line(server.stdout)).split()]


# ---------------------------------------------------------------------------- streams


async def test_a_process_reads_and_writes() -> None:
    async with open_process(["cat"], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is None
        await process.stdin.send(b"hello ")
        await process.stdin.send(b"world\n")
        assert await line(process.stdout) == "hello world\n"
        assert (process.status, process.returncode) == (None, None)
        await process.stdin.send_eof()
        with pytest.raises(anyio.EndOfStream):
            await process.stdout.receive()
        assert await process.wait() == 0
        assert process.status == ExitStatus(code=0)
        assert repr(process) == f"<Process cat: <Child {process.pid}: exit code 0>>"


async def test_more_bytes_than_a_pipe_holds() -> None:
    """Sender and receiver wait for each other; no byte is lost."""
    sent = os.urandom(3_000_000)
    received = bytearray()
    async with open_process(["cat"], stdin=PIPE, stdout=PIPE) as process, asyncio.timeout(GUARD):

        async def send() -> None:
            assert process.stdin is not None
            await process.stdin.send(sent)
            await process.stdin.aclose()

        async with anyio.create_task_group() as group:
            group.start_soon(send)
            assert process.stdout is not None
            async for chunk in process.stdout:
                received += chunk
    assert received == sent


async def test_a_cancelled_receive_loses_no_byte() -> None:
    async with open_process(["cat"], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with anyio.move_on_after(0):
            await process.stdout.receive()
        with anyio.move_on_after(0.01):
            await process.stdout.receive()
        task = asyncio.ensure_future(process.stdout.receive())
        await asyncio.sleep(0.01)
        task.cancel()
        await process.stdin.send(b"1\n")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await line(process.stdout) == "1\n"


async def test_streams_raise_the_errors_of_anyio() -> None:
    """A closed end, a second task, a process that reads no more, a size of none."""
    async with open_process(["sleep", "99"], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with pytest.raises(ValueError, match=r"^max_bytes: must be at least 1 \(got 0\)$"):
            await process.stdout.receive(0)
        receiving = asyncio.ensure_future(process.stdout.receive())
        await asyncio.sleep(0.01)
        with pytest.raises(anyio.BusyResourceError):
            await process.stdout.receive()
        await process.stdout.aclose()
        await process.stdout.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await receiving
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdout.receive()
        sending = asyncio.ensure_future(process.stdin.send(b"x" * 1_000_000))
        await asyncio.sleep(0.01)
        with pytest.raises(anyio.BusyResourceError):
            await process.stdin.send(b"x")
        assert process.send_signal("SIGKILL")
        with pytest.raises(anyio.BrokenResourceError):
            await sending
        await process.stdin.aclose()
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"x")
        with pytest.raises(anyio.ClosedResourceError):
            await process.stdin.send(b"")
        assert await process.wait() == -signal.SIGKILL
        assert not process.send_signal(signal.SIGTERM)


async def test_where_streams_go(tmp_path: Path) -> None:
    """To a file, a descriptor, nowhere, and where standard output goes."""
    script = "cat; echo out; echo err >&2"
    (tmp_path / "in").write_text("in\n")
    with (tmp_path / "in").open() as source, (tmp_path / "out").open("wb") as target:
        argv = ["sh", "-c", script]
        async with open_process(argv, stdin=source, stdout=target, stderr=STDOUT) as process:
            assert await process.wait() == 0
        async with open_process(
            argv, stdin=DEVNULL, stdout=target.fileno(), stderr=DEVNULL
        ) as process:
            assert await process.wait() == 0
    assert (tmp_path / "out").read_text() == "in\nout\nerr\nout\n"


@pytest.mark.filterwarnings("ignore:unclosed file")
async def test_a_file_that_only_the_call_has(tmp_path: Path) -> None:
    """The process keeps it open: else the next descriptor that is opened has its number."""
    path = tmp_path / "out"
    async with open_process(["echo", "a"], stdout=path.open("wb")) as process:
        assert await process.wait() == 0
    assert path.read_bytes() == b"a\n"


async def test_environment_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this program, or exactly the given ones and the marker."""
    monkeypatch.setenv("INHERITED", "yes")
    show = ["/usr/bin/env", "sh", "-c", "pwd; env"]
    async with open_process(show, stdout=PIPE) as process:
        inherited = await all_of(process)
    assert f"{os.getcwd()}\n" in inherited
    assert "INHERITED=yes\n" in inherited
    path = os.environ["PATH"]
    async with open_process(show, stdout=PIPE, env={"PATH": path}, cwd=tmp_path) as process:
        given = await all_of(process)
    names = {one.partition("=")[0] for one in given.splitlines()[1:]} - {"PWD", "SHLVL", "_"}
    assert given.splitlines()[0] == str(tmp_path)
    assert len(names) == 2
    assert all(name == "PATH" or name.startswith("ELASTIC_AIO_JOB_") for name in names)


async def all_of(process: Process) -> str:
    assert process.stdout is not None
    return b"".join([chunk async for chunk in process.stdout]).decode()


# ---------------------------------------------------------------------------- ways out


async def leave(how: str, process: Process) -> None:
    """Leave the block in one of the ways; the caller expects what is raised."""
    task = asyncio.current_task()
    assert task is not None
    if how == "exception":
        raise ZeroDivisionError
    if how.startswith("cancelled"):
        for number in range(2 if how.endswith("twice") else 1):
            asyncio.get_running_loop().call_later(0.01 + 0.05 * number, task.cancel)
        await process.wait()
    if how == "anyio":
        with anyio.fail_after(0.01):
            await process.wait()
    if how == "stopped":
        await process.stop()
        assert process.returncode == -signal.SIGKILL
    if how == "killed":
        process.send_signal("SIGKILL")
        await process.wait()


WAYS: dict[str, type[BaseException] | None] = {
    "return": None,
    "stopped": None,
    "killed": None,
    "exception": ZeroDivisionError,
    "cancelled": asyncio.CancelledError,
    "cancelled twice": asyncio.CancelledError,
    "anyio": TimeoutError,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
async def test_the_whole_tree_of_a_server_is_gone(how: str) -> None:
    """It forks, ignores SIGTERM and floods a stderr that is not read."""
    pids: list[int] = []

    async def use() -> None:
        argv = python(SERVER)
        async with open_process(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, stop=SHORT) as server:
            pids.extend(await pids_of(server))
            assert pids[0] == server.pid
            await leave(how, server)

    task = asyncio.ensure_future(use())
    await asyncio.wait([task], timeout=GUARD)
    assert len(pids) == 3
    assert not any(map(alive, pids))
    error = None if task.cancelled() else task.exception()
    raised = asyncio.CancelledError if task.cancelled() else error and type(error)
    assert raised == WAYS[how]


@pytest.mark.slow
async def test_a_cancelled_scope_stops_by_the_plan(tmp_path: Path) -> None:
    """It has its grace, whatever scopes are cancelled around it."""
    script = f"trap 'sleep 0.3; echo saved > {tmp_path}/saved; exit 3' TERM; echo; sleep 99 & wait"
    with anyio.CancelScope() as outer:
        async with anyio.create_task_group() as group:

            async def use() -> None:
                async with open_process(["bash", "-c", script], stdout=PIPE) as process:
                    await line(process.stdout)
                    group.cancel_scope.cancel()
                    outer.cancel()
                    try:
                        await process.wait()
                    finally:
                        processes.append(process)

            processes: list[Process] = []
            group.start_soon(use)
    (process,) = processes
    assert process.returncode == 3
    assert (tmp_path / "saved").exists()


# A server that saves at the end of its input, and notes what it gets after that.
SAVES = """
import os, signal, sys
def note(text):
    with open(sys.argv[1], "a") as file: print(text, file=file)
if "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: note("SIGTERM"))
print("up", flush=True)
for line in sys.stdin: pass
note("EOF")
while "stays" in sys.argv: signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["return", "exception", "cancelled", "cancelled twice", "anyio"])
@pytest.mark.parametrize("kind", ["", "ignores"])
async def test_the_end_of_its_input_comes_first(how: str, kind: str, tmp_path: Path) -> None:
    """A server that needs no signal gets none, however the block is left."""

    async def use() -> None:
        argv = python(SAVES, tmp_path / "notes", kind)
        async with open_process(argv, stdin=PIPE, stdout=PIPE, stop=StopPlan.within(9)) as server:
            servers.append(server)
            await line(server.stdout)
            await leave(how, server)

    servers: list[Process] = []
    await asyncio.gather(asyncio.ensure_future(use()), return_exceptions=True)
    assert servers[0].returncode == 0
    assert (tmp_path / "notes").read_text() == "EOF\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "notes", "seconds"),
    [
        (StopPlan.within(0.4), ["EOF", "SIGTERM"], 0.8),
        (StopPlan([("EOF", 0.5), ("SIGTERM", 0.4)]), ["EOF", "SIGTERM"], 0.9),
        (StopPlan([("EOF", 0.2)]), ["EOF"], 0.2),
        (StopPlan(()), [], 0),
    ],
    ids=str,
)
async def test_signals_follow_the_end_of_the_input(
    plan: StopPlan, notes: list[str], seconds: float, tmp_path: Path
) -> None:
    """As the plan says; one without a step kills at once."""
    path = tmp_path / "notes"
    path.touch()
    argv = python(SAVES, path, "ignores", "stays")
    async with open_process(argv, stdin=PIPE, stdout=PIPE, stop=plan) as server:
        assert await line(server.stdout) == "up\n"
        begun = time.monotonic()
    assert server.returncode == -signal.SIGKILL
    assert path.read_text().splitlines() == notes
    assert seconds <= time.monotonic() - begun < seconds + 2


async def test_what_a_process_leaves_at_the_end_of_its_input_is_stopped() -> None:
    """At once, and not after the time that the process itself has."""
    argv, plan = ["sh", "-c", "sleep 99 & echo $!; cat"], StopPlan([("EOF", 99), ("SIGTERM", 9)])
    async with open_process(argv, stdin=PIPE, stdout=PIPE, stop=plan) as process:
        helper = int(await line(process.stdout))
        begun = time.monotonic()
    assert process.returncode == 0
    assert not alive(helper)
    assert time.monotonic() - begun < GUARD


async def test_another_plan_closes_the_input_too() -> None:
    """Inside the block; only where there is a pipe."""
    async with open_process(["cat"], stdin=PIPE) as process:
        await process.stop(StopPlan([("EOF", GUARD)]))
        assert process.returncode == 0
    async with open_process(SLEEPER, stop=SHORT) as process:
        with pytest.raises(SpecError, match=r"^stop\.steps: must not begin with EOF"):
            await process.stop(EOF_FIRST)


async def test_a_process_inherits_descriptors() -> None:
    """Under their numbers; those of its streams stay its streams."""
    reader, writer = os.pipe()
    with open(reader, "rb") as source, open(writer, "wb") as target:
        argv = python("import os, sys; print('out'); os.write(int(sys.argv[1]), b'in')", writer)
        async with open_process(argv, stdout=PIPE, pass_fds=[writer, 1]) as process:
            target.close()
            assert await line(process.stdout) == "out\n"
        assert source.read() == b"in"


async def test_a_daemon_is_gone() -> None:
    """It has left the session and its parents; the block is left when its parent has ended."""
    async with open_process(python(DAEMON), stdout=PIPE, stop=SHORT) as process:
        daemon = int(await line(process.stdout))
        assert await process.wait() == 0
        assert alive(daemon)
    assert not alive(daemon)


async def test_the_end_of_a_process_does_not_wait_for_what_holds_its_pipe() -> None:
    async with open_process(["sh", "-c", "sleep 99 & echo $!"], stdout=PIPE) as process:
        child = int(await line(process.stdout))
        async with asyncio.timeout(GUARD):
            assert await process.wait() == 0
        assert alive(child)
    assert not alive(child)


async def test_a_process_may_print_while_it_stops(tmp_path: Path) -> None:
    """More than the pipes hold, and no task reads: neither SIGPIPE nor a wait."""
    code = """
import os, signal, sys
def save(*_):
    for stream in (1, 2):
        for _ in range(30): os.write(stream, b"x" * 65536)
    open(sys.argv[1], "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
signal.pause()
"""
    plan = StopPlan.within(GUARD)
    argv = python(code, tmp_path / "saved")
    async with open_process(argv, stdout=PIPE, stderr=PIPE, stop=plan) as process:
        assert await line(process.stdout) == "up\n"
    assert process.returncode == 0
    assert (tmp_path / "saved").exists()


async def test_another_plan_may_stop_it() -> None:
    """The plan of the block follows, and finds nothing."""
    async with open_process(SLEEPER, stop=StopPlan([("SIGINT", GUARD)])) as process:
        await process.stop(StopPlan([("SIGUSR1", GUARD)]))
        await process.stop()
        assert process.returncode == -signal.SIGUSR1


@pytest.mark.slow
async def test_two_hundred_cancellations_leave_nothing() -> None:
    """At random moments, once or twice, with and without another process beside it."""
    generator = random.Random(seed := time.time_ns())
    print("seed", seed)

    async def use() -> None:
        argv = ["bash", "-c", "sleep 99 & setsid sleep 99 & sleep 99"]
        async with open_process(argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, stop=SHORT) as process:
            await process.wait()

    async def cancel_once() -> None:
        task = asyncio.ensure_future(use())
        await asyncio.sleep(generator.uniform(0, 0.08))
        for _ in range(generator.randint(1, 2)):
            task.cancel()
            await asyncio.sleep(generator.uniform(0, 0.02))
        with suppress(asyncio.CancelledError):
            await task

    for number in range(100):
        await cancel_once()
        if number == 50:
            async with open_process(SLEEPER, stop=SHORT):
                await asyncio.gather(*(cancel_once() for _ in range(100)))
    assert GuardedProgram.present is None
    assert not leaked_processes()


# ------------------------------------------------------------------- the end of the host

HOST = """
import asyncio, os, sys
from subprocess import PIPE
from elastic_aio import StopPlan, open_process
async def main():
    argv = [sys.executable, "-S", "-c", sys.argv[2]]
    options = dict(stdin=PIPE, stdout=PIPE, stderr=PIPE, stop=StopPlan.within(60))
    async with open_process(argv, **options) as server, open_process(["sleep", "99"]) as other:
        await server.stdin.send(b"?\\n")
        answer = b""
        while not answer.endswith(b"\\n"):
            answer += await server.stdout.receive()
        print(answer.decode().strip(), other.pid, flush=True)
        if sys.argv[1] == "exec":
            os.execvp("sleep", ["sleep", "99"])
        if sys.argv[1] == "exit":
            os._exit(3)
        await asyncio.sleep(99)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exec", "exit"])
def test_nothing_outlives_the_host_program(how: str) -> None:
    """Its guardian ends all trees, whatever has ended the program."""
    with running([sys.executable, "-c", HOST, how, SERVER]) as host:
        until_sync(lambda: host.out.endswith("\n"), "the pids")
        pids = [int(word) for word in host.out.split()]
        assert len(pids) == 4
        if how == "kill":
            host.send(signal.SIGKILL)
        until_sync(none_alive(pids), "the end of the trees")
        assert (host.process.poll() is None) == (how == "exec")
        host.process.kill()
    until_sync(lambda: not leaked_processes(), "the end of the guardian")


# ------------------------------------------------------------------------------- the rest


async def test_processes_share_a_guardian() -> None:
    """A further one takes its pipes, a pidfd and the reserve of its tree."""
    async with open_process(SLEEPER):
        before = open_descriptors()
        async with open_process(SLEEPER, stdin=PIPE, stdout=PIPE, stderr=PIPE, stop=SHORT):
            guardians = [one for one in leaked_processes().values() if "guardian_main.py" in one]
            assert len(guardians) == 1
            assert len(open_descriptors()) - len(before) <= 8


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"argv": ["sleep", 1]}, r"argv: must be text without NUL \(got 1\)"),
        ({"argv": "true"}, r"argv: must be a list \(got 'true'\)"),
        ({"argv": []}, r"argv: must begin with a program \(got \[\]\)"),
        ({"argv": ["a\0"]}, r"argv: must be text without NUL \(got .*\)"),
        ({"argv": ["a", 1]}, r"argv: must be text without NUL \(got 1\)"),
        ({"stdin": io.StringIO()}, r"stdin: must be a descriptor, .* \(got .*StringIO.*\)"),
        ({"stdin": 1 << 31}, r"stdin: must be a descriptor, .* \(got 2147483648\)"),
        ({"stdin": STDOUT}, r"stdin: must be a descriptor, a file, PIPE, DEVNULL or None \(.*\)"),
        ({"stdout": "log"}, r"stdout: must be a descriptor, .* \(got 'log'\)"),
        ({"stderr": -9}, r"stderr: must be .*, PIPE, DEVNULL, STDOUT or None \(got -9\)"),
        ({"stop": EOF_FIRST}, r"stop.steps: must not begin with EOF: stdin is no pipe \(.*\)"),
        ({"stop": EOF_FIRST, "stdin": DEVNULL}, r"stop.steps: must not begin with EOF: .* pipe .*"),
        ({"pass_fds": 3}, r"pass_fds: must be a list \(got 3\)"),
        ({"pass_fds": ["3"]}, r"pass_fds: must be a whole number of at least 0 \(got '3'\)"),
        ({"pass_fds": [-1]}, r"pass_fds: must be a whole number of at least 0 \(got -1\)"),
        ({"pass_fds": [999_999]}, r"pass_fds: must be open descriptors \(got 999999\)"),
        ({"stop": 5}, r"stop: must be a StopPlan \(got 5\)"),
        ({"env": {"A": 1}}, r"env\['A'\]: must be text without NUL \(got 1\)"),
        ({"cwd": ""}, r"cwd: must be a path \(got ''\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], problem: str) -> None:
    """One line, before anything starts."""
    with pytest.raises(SpecError, match=rf"^{problem}$"):
        open_process(**{"argv": ["true"], **arguments})


async def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    for argv, cwd, problem in (
        (["no-such-program"], None, "cannot run no-such-program: command not found"),
        (["true"], tmp_path / "none", "does not exist"),
    ):
        with pytest.raises(SpawnError, match=problem):
            async with open_process(argv, cwd=cwd, stdin=PIPE, stdout=PIPE):
                pytest.fail("it runs")


async def test_without_a_guardian_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HostError, match="cannot start the guardian process"):
        async with open_process(["true"]):
            pytest.fail("it runs")
    assert guardian_process.GuardedProgram.present is None


OUT_OF_DESCRIPTORS = """
import asyncio, os, resource
from subprocess import PIPE
from elastic_aio import StopPlan, open_process
async def main():
    async with open_process(["sh", "-c", "sleep 99 & sleep 99"], stop=StopPlan.within(9)) as one:
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        try:
            async with open_process(["true"], stdin=PIPE):
                pass
        except Exception as error:
            print(type(error).__name__, one.returncode)
    print(one.returncode)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_program_without_descriptors_stops_its_trees() -> None:
    """And starts no further process; no module is imported by then."""
    with running([sys.executable, "-c", OUT_OF_DESCRIPTORS]) as program:
        assert program.wait() == 0, program.err
        assert program.out.splitlines() == ["HostError None", "-15"]
    assert not leaked_processes()


async def test_an_ignored_sigchld_is_refused() -> None:
    """The kernel would reap the process, and its status be lost."""
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(HostError, match=r"^SIGCHLD is ignored in this process"):
            async with open_process(["true"]):
                pytest.fail("it runs")
    finally:
        signal.signal(signal.SIGCHLD, former)


async def test_misuse() -> None:
    """Before the block, and after it."""
    process = open_process(["true"])
    assert repr(process) == "<Process true: not started>"
    for use in (lambda: process.pid, lambda: process.status, lambda: process.send_signal(15)):
        with pytest.raises(RuntimeError, match="use `async with open_process"):
            use()
    async with process:
        await process.wait()
    with pytest.raises(RuntimeError, match="started once"):
        async with process:
            pytest.fail("it runs")


def test_another_event_loop_is_refused() -> None:
    """As trio's: at once, with a clear error."""
    entering = open_process(["true"]).__aenter__()
    with pytest.raises(
        RuntimeError, match=r"^elastic_aio runs on asyncio only; a portal .* runs it beside trio$"
    ):
        entering.send(None)
    assert GuardedProgram.present is None


def test_a_fork_leaves_the_process_alone() -> None:
    """Its copy of the block stops nothing."""
    code = """
import asyncio, os, sys
from elastic_aio import open_process
async def main():
    async with open_process(["sleep", "99"]) as process:
        fork = os.fork()
        if not fork:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
        assert process.returncode is None
        process.send_signal(9)
        print(await process.wait())
asyncio.run(main())
"""
    with running([sys.executable, "-c", code]) as program:
        assert program.wait() == 0, program.err
        assert program.out.strip() == "-9"


def test_a_page_reads_both_streams() -> None:
    """The program of the guide ends, although its server writes more errors than a pipe holds."""
    page = (ROOT / "docs" / "guides" / "processes.md").read_text()
    (code,) = (part for part in page.split("```") if "create_task_group" in part)
    ended = run_program([sys.executable, "-c", code.removeprefix("python\n")])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == ["b'ready\\n'", "200000 bytes of errors"]


@pytest.mark.slow
def test_the_example() -> None:
    ended = run_program([sys.executable, str(ROOT / "examples" / "tool_server.py")])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "[1, 2, 3] make 6",
        "[40, 2] make 42",
        "the time is over",
        "0 of 2 processes are left",
    ]


def test_a_portal_of_anyio_runs_it_for_programs_on_trio() -> None:
    """As the guide shows it: in a thread with an event loop of asyncio."""
    with (
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(
            open_process(["cat"], stdin=PIPE, stdout=PIPE)
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        portal.call(process.stdin.send, b"ping\n")
        assert portal.call(process.stdout.receive) == b"ping\n"
