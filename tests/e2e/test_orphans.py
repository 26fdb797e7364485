"""No process of a job outlives its supervisor, however the supervisor ends."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import site
import sys
import time
from pathlib import Path

import pytest

from tests.support.children import noted, noting, until_sync
from tests.support.cli import CLI, REPOSITORY, Running, run_program, running, running_cli
from tests.support.leaks import alive, leaked_processes

pytestmark = pytest.mark.e2e

# A second is guaranteed; a busy host may stop for several.
GUARANTEED_S = 10.0

# A child in another process group, one in another session whose parent has exited, and
# one that ignores stop signals.
PROCESS_TREE_WORKER = noting(
    first="""
set -m; sleep 99 & echo $! > "$NOTES/group.$RANK"; set +m
(setsid bash -c 'echo $$ > "$NOTES/daemon.$RANK"; exec sleep 99' > /dev/null 2>&1 &)
(trap '' TERM INT HUP QUIT; sleep 99 & echo $! > "$NOTES/ignoring.$RANK")
until [ -s "$NOTES/daemon.$RANK" ]; do :; done
"""
)


def all_exited() -> bool:
    """Return whether no process of this test session is left."""
    return not leaked_processes()


def tree_pids(directory: Path, count: int) -> list[int]:
    """Wait until the workers and their descendants run; return the pids."""
    pids = list(until_sync(noted(directory, count)))
    for kind in ("group", "daemon", "ignoring"):
        pids += [int((directory / f"{kind}.{rank}").read_text()) for rank in range(count)]
    assert all(map(alive, pids))
    return pids


def guardian_of(launcher: Running) -> int:
    """Return the pid of a launcher's guardian."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (guardian,) = (
        int(pid)
        for pid in children
        if b"guardian_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return guardian


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(mask, 16) & 1 << (number - 1))


def test_launcher_killed(tmp_path: Path) -> None:
    """After SIGKILL of the launcher all its processes end within a second."""
    with running_cli("--nproc-per-node", 3, "--no-python", *PROCESS_TREE_WORKER,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        pids = tree_pids(tmp_path, 3)
        job.send(signal.SIGKILL)
        assert job.wait() == 137
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
    until_sync(all_exited, "the end of the guardian")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_launcher_asked_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    """After a stop signal all processes have ended when the launcher exits."""
    words = ("--nproc-per-node", 2, "--shutdown-timeout", 0.5, "--no-python")
    with running_cli(*words, *PROCESS_TREE_WORKER, env={"NOTES": str(tmp_path)}) as job:
        pids = tree_pids(tmp_path, 2)
        job.send(number)
        assert job.wait() == 128 + number
        assert not any(map(alive, pids))
    assert all_exited()


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGALRM])
def test_launcher_crashed(number: signal.Signals, tmp_path: Path) -> None:
    """The processes of a launcher that crashes end."""
    with running_cli("--nproc-per-node", 2, "--no-python", *PROCESS_TREE_WORKER,
                     env={"NOTES": str(tmp_path)}) as job:  # fmt: skip
        pids = tree_pids(tmp_path, 2)
        job.send(number)
        assert job.wait() == 128 + number
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
    until_sync(all_exited, "the end of the guardian")


EMBEDDING = """
import asyncio, os, sys
from elastic_aio import LaunchSpec, launch
if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = asyncio.SelectorEventLoop
async def main():
    task = asyncio.ensure_future(launch(LaunchSpec(sys.argv[3:], nproc_per_node=int(sys.argv[2]))))
    if os.environ.get("FORK"):
        while not os.path.exists(os.environ["NOTES"] + "/0"):
            await asyncio.sleep(0.01)
        if not os.fork():
            import time
            time.sleep(99)
            os._exit(0)
    await task
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


def embedding(loop: str, nproc: int, *entrypoint: str) -> list[str]:
    """Return a program that runs a job on a loop."""
    return [sys.executable, "-c", EMBEDDING, loop, str(nproc), *entrypoint]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_fork_of_the_embedding_program(loop: str, tmp_path: Path) -> None:
    """A fork that inherits all descriptors neither delays the cleanup nor is killed by it."""
    env = {"NOTES": str(tmp_path), "FORK": "1"}
    with running(embedding(loop, 2, *PROCESS_TREE_WORKER), env=env) as program:
        pids = tree_pids(tmp_path, 2)

        def forks() -> list[int]:
            code = EMBEDDING[:40].strip()
            return [pid for pid, command in leaked_processes().items()
                    if code in command and pid != program.pid]  # fmt: skip

        (fork,) = until_sync(forks)
        try:
            program.send(signal.SIGKILL)
            program.wait()
            until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
            until_sync(lambda: set(leaked_processes()) == {fork}, "the end of the guardian")
            assert alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)
    until_sync(all_exited)


@pytest.mark.parametrize("holds_descriptors", [False, True])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_an_exec_of_the_embedding_program(
    loop: str, holds_descriptors: bool, tmp_path: Path
) -> None:
    """A program that replaces itself, as to resume, leaves no worker to its successor.

    Not even if a fork of it holds every descriptor that the program had open.
    """
    code = EMBEDDING.replace("    await task\n", """
    while not all(os.path.exists(os.environ["NOTES"] + name) for name in ("/0", "/1")):
        await asyncio.sleep(0.01)
    sys.stdin.read()
    os.execvp("sleep", ["sleep", "98"])
""")  # fmt: skip
    env = {"NOTES": str(tmp_path), **({"FORK": "1"} if holds_descriptors else {})}
    argv = [sys.executable, "-c", code, loop, "2", *PROCESS_TREE_WORKER]
    with running(argv, env=env, stdin_pipe=True) as program:
        pids = tree_pids(tmp_path, 2)
        assert program.process.stdin is not None
        program.process.stdin.close()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
        assert program.process.poll() is None
        until_sync(lambda: guardians() == [])
        for pid in leaked_processes():
            os.kill(pid, signal.SIGKILL)
    until_sync(all_exited)


def guardians() -> list[int]:
    """Return the pids of all guardians of this test session."""
    return [pid for pid, command in leaked_processes().items() if "guardian_main.py" in command]


def test_an_application_that_is_its_own_interpreter(tmp_path: Path) -> None:
    """It does not run itself as its guardian, which would do so too, endlessly."""
    application = tmp_path / "application"
    application.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        f"open({str(tmp_path / 'starts')!r}, 'a').write('started ')\n"
        "sys.executable = sys.argv[0]\n"
        "from elastic_aio import LaunchSpec, run\n"
        "run(LaunchSpec(['touch', 'worker']))\n"
    )
    application.chmod(0o755)
    ended = run_program([str(application)], cwd=tmp_path)
    assert ended.code == 1
    assert ended.errors[-1].startswith(
        "elastic_aio.errors.HostError: cannot start the guardian process: "
        f"{application} ended at once (exit code 1, elastic_aio.errors.HostError: "
    )
    assert (tmp_path / "starts").read_text() == "started started "
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("count", range(6))
def test_killed_in_the_middle_of_spawning(loop: str, count: int) -> None:
    """SIGKILL while 50 workers are being spawned leaves none of them."""
    spawned = random.Random(time.time_ns()).randint(1, 45)
    with running(embedding(loop, 50, "sleep", "99")) as program:
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        while len(children.read_text().split()) < spawned:
            assert program.process.poll() is None
        program.send(signal.SIGKILL)
        program.wait()
        killed = time.monotonic()
        until_sync(all_exited, f"no process after {spawned} children", 10)
        # The guardian exits shortly after it has found no process any more.
        assert time.monotonic() - killed < GUARANTEED_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_at_a_random_early_moment(number: signal.Signals) -> None:
    """A signal during the start gives its exit code and leaves no process."""
    generator = random.Random(time.time_ns())
    for _ in range(4):
        with running_cli("--nproc-per-node", 8, "--no-python", "sleep", "99") as job:
            end = time.monotonic() + generator.uniform(0, 0.25)
            while time.monotonic() < end:
                pass  # a random moment, so there is no event to wait for
            job.send(number)
            assert job.wait() == 128 + number
            assert "Traceback" not in job.err
        until_sync(all_exited)


def test_the_guardian_is_restarted(tmp_path: Path) -> None:
    """A killed guardian is restarted, and the new one ends the job."""
    env = {"NOTES": str(tmp_path), "LOGLEVEL": "INFO"}
    with running_cli("--nproc-per-node", 2, "--no-python", *PROCESS_TREE_WORKER, env=env) as job:
        pids = tree_pids(tmp_path, 2)
        for _ in range(2):
            former = guardian_of(job)
            os.kill(former, signal.SIGKILL)
            match = job.wait_err(rf"guardian process exited, restarted as pid (?!{former}\b)(\d+)")
            until_sync(lambda former=former: guardian_of(job) != former)  # type: ignore[misc]  # bound now
        assert int(match[1]) > 0
        assert all(map(alive, pids))
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
    until_sync(all_exited)


def test_the_guardian_ignores_signals(tmp_path: Path) -> None:
    """Only SIGKILL ends a guardian, so it survives `pkill` of a whole session."""
    env = {"NOTES": str(tmp_path)}
    with running_cli("--no-python", *PROCESS_TREE_WORKER, env=env) as job:
        pids = tree_pids(tmp_path, 1)
        guardian = guardian_of(job)
        until_sync(lambda: ignores(guardian, signal.SIGTERM), "a guardian that has started")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(guardian, number)
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
    until_sync(all_exited)


def test_nested_jobs(tmp_path: Path) -> None:
    """A job inside a worker of another job ends with the outer job."""
    inner = [sys.executable, "-m", "elastic_aio", "run", "--nproc-per-node", "2", "--no-python"]
    with running_cli(
        "--no-python", *inner, *PROCESS_TREE_WORKER, env={"NOTES": str(tmp_path)}
    ) as job:
        pids = tree_pids(tmp_path, 2)
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the workers", GUARANTEED_S)
    until_sync(all_exited)


def test_an_exception_in_the_embedding_program(tmp_path: Path) -> None:
    """A program that exits by an exception beside its job leaves no process of it."""
    code = EMBEDDING.replace("    await task\n", """
    while not os.path.exists(os.environ["NOTES"] + "/0"):
        await asyncio.sleep(0.01)
    raise SystemExit(5)
""")  # fmt: skip
    for loop in ("asyncio", "uvloop"):
        directory = tmp_path / loop
        directory.mkdir()
        with running([sys.executable, "-c", code, loop, "1", *noting()],
                     env={"NOTES": str(directory)}) as program:  # fmt: skip
            assert program.wait() == 5
        assert all_exited()


# Leaves twenty orphans, and succeeds when all of them have been reaped.
ORPHANS = """
for i in $(seq 10); do (setsid sleep 0.1 &); (sleep 0.1 &); done
until [ $(cat /proc/[0-9]*/stat 2> /dev/null | grep -c "(sleep) [^Z]") = 0 ]; do sleep 0.01; done
until ! cat /proc/[0-9]*/stat 2> /dev/null | grep -q ") Z $LAUNCHER "; do sleep 0.01; done
exit 0
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_orphans_of_a_container(loop: str) -> None:
    """As process 1 the launcher reaps all orphans, and no worker's status gets lost."""
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if run_program([*container, "true"]).code != 0:
        pytest.skip("needs the right to make a pid namespace")
    words = ["--loop", loop, "--nproc-per-node", "8", "--no-python", "bash", "-c", ORPHANS]
    ended = run_program([*container, *CLI, "run", *words], env={"LAUNCHER": "1"})
    assert ended.code == 0, ended.err


def test_an_agent_of_an_ordinary_user() -> None:
    """An `ssh-agent` that a worker starts hides its environment; it ends with the job."""
    if os.geteuid() != 0 or shutil.which("ssh-agent") is None:
        pytest.skip("needs root, to become another user, and ssh-agent")
    as_another = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    path = os.pathsep.join([str(REPOSITORY), *site.getsitepackages()])
    env = {"PYTHONPATH": path, "TMPDIR": "/tmp"}
    for python in (sys.executable, "/usr/bin/python3"):
        command = [*as_another, python, "-m", "elastic_aio", "run", "--no-python"]
        if run_program([*command, "true"], env=env, cwd="/").code == 0:
            break
    else:
        pytest.skip("another user cannot run this interpreter")
    script = 'eval "$(ssh-agent -s)" > /dev/null; echo $SSH_AGENT_PID; ps -o uid= $SSH_AGENT_PID'
    ended = run_program([*command, "bash", "-c", script], env=env, cwd="/")
    pid, user = ended.out.split()
    assert (ended.code, user) == (0, "65534")
    assert not alive(int(pid))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a pid namespace")
def test_a_pid_namespace_without_its_own_proc() -> None:
    """/proc shows other pids than the system calls take; what a worker leaves is stopped."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    script = "trap '' TERM; setsid sleep 99 & exit 0"
    job = [*CLI, "run", "--shutdown-timeout", "1", "--no-python", "bash", "-c", script]
    ended = run_program([*unshare, *job], env={"LOGLEVEL": "INFO"})
    assert ended.code == 0
    assert "1 process did not stop in time, sending SIGKILL" in ended.err
    assert "left behind" not in ended.err.replace("have left processes behind", "")
    assert all_exited()
