"""Sockets and limits of the workers of a job, as programs see them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import Agent, Event, HostError, JobFailed, LaunchSpec, LimitSpec, LogSpec, launch
from elastic_aio.agent import worker_setup
from elastic_aio.agent.worker_setup import Account, ExecStarter
from elastic_aio.process.cgroups import Cgroup
from elastic_aio.process.children import Child, ChildSpec, command_spawner
from tests.support.children import end_of, python, shell, until
from tests.support.cli import run_cli
from tests.support.leaks import alive, open_descriptors
from tests.support.restarts import at_once
from tests.support.sockets import free_port

pytestmark = pytest.mark.both_loops

HANGS = "import time; time.sleep(99)"

# As sd_listen_fds(3) reads the variables.  Answers connections with its pid, and exits after 20.
SERVER = python(
    """
import os, socket, sys
assert os.environ["LISTEN_PID"] == str(os.getpid()), "not for this process"
sockets = [socket.socket(fileno=fd) for fd in range(3, 3 + int(os.environ["LISTEN_FDS"]))]
for _ in range(20):
    connection, _ = sockets[0].accept()
    connection.sendall(b"%d" % os.getpid())
    connection.close()
sys.exit(3)
"""
)


async def test_a_restart_refuses_no_connection() -> None:
    """Five restarts under clients that connect all the time: each of them is answered."""
    port = free_port()
    spec = LaunchSpec(
        SERVER, sockets=[f"tcp://127.0.0.1:{port}"], max_restarts=5, restart=at_once()
    )
    answers: list[bytes] = []

    async def client() -> None:
        while len(answers) < 115:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            answers.append(await reader.read())
            writer.close()

    async with Agent(spec) as agent:
        async with asyncio.timeout(60), asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(client())
        assert len(set(answers)) == 6
        assert b"" not in answers
        # The last one is known to run before it ends.
        await until(lambda: set(agent.pids().values()) <= {int(each) for each in answers})
        assert len(agent.pids()) == 1
        await agent.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()


async def test_workers_find_their_sockets_and_no_other_descriptor(tmp_path: Path) -> None:
    """A function of Python too, whose call and result are descriptors."""
    path = tmp_path / "s"
    sockets = [f"web=tcp://127.0.0.1:{free_port()}", f"unix://{path}"]
    before = open_descriptors()
    result = await launch(LaunchSpec(inherited, nproc_per_node=2, sockets=sockets))
    assert [worker.return_value for worker in result.attempts[-1].workers] == [
        (True, "2", "web:unknown", [socket.AF_INET, socket.AF_UNIX])
    ] * 2
    assert not path.exists()
    assert open_descriptors() == before


def inherited() -> tuple[bool, str, str, list[int]]:
    """Return what a worker inherits."""
    env = os.environ
    families = [socket.socket(fileno=os.dup(fd)).family for fd in (3, 4)]
    is_own = env["LISTEN_PID"] == str(os.getpid())
    return is_own, env["LISTEN_FDS"], env["LISTEN_FDNAMES"], [int(one) for one in families]


async def test_limits_are_set_before_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter that sets them leaves no trace: it would set LC_CTYPE (PEP 538)."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    show = (
        f"umask > {tmp_path}/umask; nice > {tmp_path}/nice; echo ${{LC_CTYPE-none}} > {tmp_path}/lc"
    )
    show += "; cat /proc/self/oom_score_adj"
    limits = LimitSpec(nice=os.getpriority(os.PRIO_PROCESS, 0), umask="0027", oom_score_adj=500)
    spec = LaunchSpec(shell(f"{show} > {tmp_path}/oom"), limits=limits)
    await launch(spec)
    read = {path.name: path.read_text().strip() for path in tmp_path.iterdir()}
    assert read == {"umask": "0027", "nice": str(limits.nice), "oom": "500", "lc": "none"}
    assert (tmp_path / "nice").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a worker as another user")
async def test_a_worker_runs_as_another_user(tmp_path: Path) -> None:
    """With its groups and its variables, unless the job has others."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:3]:  # one of them may be that of all programs
        parent.chmod(parent.stat().st_mode | 0o055)
    show = shell(
        f"id -u > {tmp_path}/out; id -G >> {tmp_path}/out; echo $HOME $USER >> {tmp_path}/out"
    )
    spec = LaunchSpec(show, limits=LimitSpec(user="daemon"), env={"HOME": "/own"})
    await launch(spec)
    uid, groups, variables = (tmp_path / "out").read_text().splitlines()
    assert (uid, variables) == ("1", "/own daemon")
    assert "0" not in groups.split()


class CallsHere:
    """A value whose pickle calls a function of the process that reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TEST_CALLED"],)


def give(value: str) -> object:
    plain = {"list": [1, 2.5, None, (b"x" * 70_000, {"y"})]}
    return CallsHere() if value == "call" else plain


@pytest.mark.parametrize("value", ["plain", "call"])
async def test_a_value_of_another_user_is_data_only(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading it runs no code of that user in the launcher, which may be root."""
    monkeypatch.setattr(worker_setup, "find_account", lambda _: Account({}))
    called = tmp_path / "called"
    spec = LaunchSpec(
        give, args=[value], limits=LimitSpec(user="daemon"), env={"TEST_CALLED": str(called)}
    )
    if value == "plain":
        assert (await launch(spec)).return_values == {0: give(value)}
        return
    with pytest.raises(JobFailed, match="returns plain values only") as caught:
        await launch(spec)
    assert caught.value.result.exit_code == 1
    assert not called.exists()


@pytest.mark.parametrize(
    ("changes", "message", "code"),
    [
        ({"entrypoint": ["no-such-program"]}, "cannot run no-such-program: command not found", 127),
        ({"entrypoint": ["/etc/passwd"]}, "cannot run /etc/passwd: permission denied", 126),
        ({"cwd": "/no/such"}, "its working directory /no/such does not exist", 126),
        ({"nproc_per_node": 2}, "limits: no such file or directory", 126),
    ],
)
async def test_what_cannot_be_set_is_no_failure_of_a_worker(
    changes: dict[str, Any], message: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job ends at once: another attempt would fail too."""
    if "nproc_per_node" in changes:
        monkeypatch.setattr(worker_setup, "find_account", lambda _: Account({"cgroup": "/no/such"}))
    spec = LaunchSpec(["true"], limits=LimitSpec(umask=0o77), max_restarts=5)
    with pytest.raises(JobFailed) as caught:
        await launch(spec.replace(**changes))
    assert message in str(caught.value)
    assert (caught.value.result.exit_code, caught.value.result.restarts) == (code, 0)


async def test_a_start_that_is_cancelled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its child is known to no other part yet."""
    starter = ExecStarter(None)
    monkeypatch.setattr(starter, "_command", (sys.executable, "-I", "-S", "-c", HANGS))
    spawned: list[Child] = []

    async def spawn(spec: ChildSpec) -> Child:
        spawned.append(await command_spawner(asyncio.get_running_loop())(spec))
        return spawned[0]

    with open(os.devnull, "rb+") as null:
        number = null.fileno()
        spec = ChildSpec(("true",), dict(os.environ), None, number, number, number)
        starting = asyncio.ensure_future(starter.start(spawn, spec, {"umask": "0"}))
        await until(lambda: spawned)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert (await end_of(spawned[0])).status.signal == 9


async def test_a_stop_while_the_interpreter_hangs_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the program is executed; the stop ends the wait for it."""
    monkeypatch.setattr("elastic_aio.agent.worker_group._SPAWN_S", 0.1)
    original = worker_setup.ExecStarter.__init__

    def hang(self: Any, python: str | None) -> None:
        original(self, python)
        self._command = (sys.executable, "-I", "-S", "-c", HANGS)

    monkeypatch.setattr(worker_setup.ExecStarter, "__init__", hang)
    async with Agent(LaunchSpec(["true"], limits=LimitSpec(umask=0))) as agent:
        await until(lambda: children_of(os.getpid(), "time.sleep(99)"))
        await agent.stop()


def children_of(pid: int, text: str) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if text in Path(f"/proc/{one}/cmdline").read_text()]


async def test_a_stop_kills_what_hides_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cgroup of the workers, which is removed at the end."""
    made: list[Cgroup] = []

    def make(files: object) -> Cgroup:
        made.append(original({}))
        return made[0]

    original = Cgroup.make
    try:
        await original({}).aclose()
    except HostError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(Cgroup, "make", make)
    hiding = "(setsid env -i sleep 99 > /dev/null & echo $!); exec sleep 98"
    spec = LaunchSpec(shell(hiding), limits=LimitSpec(pids_max=50), logs=LogSpec(redirects=1))
    async with Agent(spec) as agent:
        async with agent.logs() as lines:
            hidden = int((await anext(lines)).text)
        assert str(hidden) in Path(made[0].path, "cgroup.procs").read_text().split()
        await agent.restart()
        assert not alive(hidden)
        await agent.stop()
    assert not os.path.exists(made[0].path)


async def test_a_cgroup_that_is_not_delegated_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts."""
    monkeypatch.setattr("elastic_aio.process.cgroups._words", lambda *_: set())
    events: list[Event] = []
    with pytest.raises(HostError, match=r"^limits.memory_max: the controller 'memory' is not in "):
        await launch(LaunchSpec(["true"], limits={"memory_max": "1G"}), listeners=[events.append])
    assert events == []


@pytest.mark.e2e
def test_an_address_in_use_ends_the_command_with_two() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        ended = run_cli("--no-python", "--socket", address, "true")
    assert ended.code == 2
    (line,) = ended.errors
    assert line.startswith("aio-elastic run: --socket: cannot be bound: address already in use by ")
    assert line.endswith(f"(got '{address}')")
