"""No process of a job outlives its supervisor, however the supervisor ends."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import site
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import none_alive, noting, until_sync
from tests.support.cli import CLI, REPOSITORY, Running, noted_job, run_program, running, running_cli
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


@contextmanager
def tree(
    directory: Path, count: int, *options: object, **settings: Any
) -> Iterator[tuple[Running, list[int]]]:
    """Run a job of `count` workers with descendants (see `noted_job`).

    Nothing is left of it, and of its guardian, soon after the block.
    """
    with noted_job(directory, count, PROCESS_TREE_WORKER, *options, **settings) as (job, pids):
        for kind in ("group", "daemon", "ignoring"):
            pids += [int((directory / f"{kind}.{rank}").read_text()) for rank in range(count)]
        assert all(map(alive, pids))
        yield job, pids
    until_sync(all_exited)


def wait_gone(pids: Sequence[int]) -> None:
    """Wait until processes have ended, without their launcher."""
    until_sync(none_alive(pids), "the end of the workers", GUARANTEED_S)


def kill(job: Running, pids: Sequence[int]) -> None:
    """Kill a launcher, and wait until its workers have ended."""
    job.send(signal.SIGKILL)
    assert job.wait() == 137
    wait_gone(pids)


def guardian_of(launcher: Running) -> int:
    """Return the pid of a launcher's guardian."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    (guardian,) = (
        int(pid)
        for pid in children
        if b"guardian_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return guardian


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGALRM])
def test_launcher_killed(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGKILL or a crash of the launcher all its processes end within a second."""
    with tree(tmp_path, 3) as (job, pids):
        job.send(number)
        assert job.wait() == 128 + number
        wait_gone(pids)


def test_launcher_killed_with_more_pipes_than_descriptors() -> None:
    """The guardian was started before the launcher raised its limit: it raises its own."""
    workers = [*CLI, "run", "--nproc-per-node", "45", "--no-python", "sleep", "99"]
    with running(["bash", "-c", 'ulimit -S -n 40; exec "$@"', "bash", *workers]) as job:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        until_sync(lambda: len(children.read_text().split()) == 46, "the workers and the guardian")
        guardian = guardian_of(job)
        job.send(signal.SIGKILL)
        job.wait()
        until_sync(lambda: not alive(guardian), "the end of the guardian")
    assert all_exited()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_launcher_asked_to_stop(number: signal.Signals, tmp_path: Path) -> None:
    """After a stop signal all processes have ended when the launcher exits."""
    with tree(tmp_path, 2, "--shutdown-timeout=0.5") as (job, pids):
        job.send(number)
        assert job.wait() == 128 + number
        assert not any(map(alive, pids))
        assert all_exited()


EMBEDDING = """
import asyncio, os, sys
from elastic_aio import LaunchSpec, launch
if sys.argv[1] == "uvloop":
    import uvloop
    factory = uvloop.new_event_loop
else:
    factory = asyncio.SelectorEventLoop
async def main():
    count, entrypoint = int(sys.argv[3]), sys.argv[5:]  # --nproc-per-node COUNT --no-python ...
    task = asyncio.ensure_future(launch(LaunchSpec(entrypoint, nproc_per_node=count)))
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


def embedding(loop: str, code: str = EMBEDDING) -> list[str]:
    """Return a program that runs a job on a loop; words of `aio-elastic run` follow."""
    return [sys.executable, "-c", code, loop]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_fork_of_the_embedding_program(loop: str, tmp_path: Path) -> None:
    """A fork that inherits all descriptors neither delays the cleanup nor is killed by it."""
    with tree(tmp_path, 2, argv=embedding(loop), env={"FORK": "1"}) as (program, pids):

        def forks() -> list[int]:
            code = EMBEDDING[:40].strip()
            return [pid for pid, command in leaked_processes().items()
                    if code in command and pid != program.pid]  # fmt: skip

        (fork,) = until_sync(forks)
        try:
            kill(program, pids)
            until_sync(lambda: set(leaked_processes()) == {fork}, "the end of the guardian")
            assert alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


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
    env = {"FORK": "1"} if holds_descriptors else {}
    argv = embedding(loop, code)
    with tree(tmp_path, 2, argv=argv, env=env, stdin_pipe=True) as (program, pids):
        assert program.process.stdin is not None
        program.process.stdin.close()
        wait_gone(pids)
        assert program.process.poll() is None
        until_sync(lambda: guardians() == [])
        for pid in leaked_processes():
            os.kill(pid, signal.SIGKILL)


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
    words = ["--nproc-per-node", "50", "--no-python", "sleep", "99"]
    with running([*embedding(loop), *words]) as program:
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
    with tree(tmp_path, 2, env={"LOGLEVEL": "INFO"}) as (job, pids):
        for _ in range(2):
            former = guardian_of(job)
            os.kill(former, signal.SIGKILL)
            match = job.wait_err(rf"guardian process exited, restarted as pid (?!{former}\b)(\d+)")
            until_sync(lambda former=former: guardian_of(job) != former)  # type: ignore[misc]  # bound now
        assert int(match[1]) > 0
        assert all(map(alive, pids))
        kill(job, pids)


def test_nested_jobs(tmp_path: Path) -> None:
    """A job inside a worker of another job ends with the outer job."""
    outer = [*CLI, "run", "--no-python", *CLI, "run"]
    with tree(tmp_path, 2, argv=outer) as (job, pids):
        kill(job, pids)


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
        with noted_job(directory, 1, noting(), argv=embedding(loop, code)) as (program, _):
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


# ------------------------------------------------------------- strangers and their orphans

# A service beside the job: at its request a daemon, which says when it runs.
SERVICE = """
import os, time
notes = os.environ["NOTES"]
while not os.path.exists(notes + "/0"):
    time.sleep(0.01)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(notes + "/.stranger", "w") as file:
            file.write(str(os.getpid()))
        os.rename(notes + "/.stranger", notes + "/stranger")
        os.execvp("sleep", ["sleep", "99"])
    os._exit(0)
os.wait()
open(notes + "/orphaned", "w").close()
time.sleep(99)
"""
START_SERVICE = '"$PYTHON" -S -c "$SERVICE" & echo $! > "$NOTES/service"'
# Ends when the daemon of the service has lost its parent, or is stopped.
AFTER_SERVICE = noting(
    'until [ -e "$NOTES/stranger" ] && [ -e "$NOTES/orphaned" ]; do sleep 0.01; done'
)


def kill_strangers(*pids: int) -> None:
    """Check that processes run, and kill them."""
    pidfds = []
    try:
        assert all(map(alive, pids)), "a stranger was stopped"
    finally:
        for pid in filter(alive, pids):
            pidfds.append(os.pidfd_open(pid))
            os.kill(pid, signal.SIGKILL)
        for pidfd in pidfds:
            select.select([pidfd], [], [], 30)
            os.close(pidfd)


def read_pid(path: Path) -> int:
    """Return the pid that a file has; 0 if there is none yet."""
    return int(path.read_text() or 0) if path.exists() else 0


@pytest.mark.parametrize("how", ["exec", "last command"])
@pytest.mark.parametrize("end", ["success", "SIGTERM"])
def test_the_service_of_a_shell_that_became_the_launcher(
    how: str, end: str, tmp_path: Path
) -> None:
    """The service is a child of the launcher then, and the launcher adopts its daemon."""
    job = [*CLI, "run", "--no-python"]
    worker = AFTER_SERVICE if end == "success" else noting()
    become = '"$@"' if how == "last command" else 'exec "$@"'
    argv = ["bash", "-c", f"{START_SERVICE}; {become}", "bash", *job, *worker]
    env = {"NOTES": str(tmp_path), "PYTHON": sys.executable, "SERVICE": SERVICE}
    with running(argv, env=env) as shell:
        stranger = until_sync(lambda: read_pid(tmp_path / "stranger"), "the daemon")
        until_sync((tmp_path / "orphaned").exists)
        if end == "SIGTERM":
            shell.send(signal.SIGTERM)
        code = shell.wait()
        kill_strangers(stranger, read_pid(tmp_path / "service"))
    assert code == (0 if end == "success" else 143), shell.err
    until_sync(all_exited)


# Starts what a job asks for, with the environment of the asking program, as `sbatch` does by
# default; so the job that it starts is no child of the asking one, and has its marker.
SCHEDULER = """
import json, os, subprocess
notes = os.environ["NOTES"]
with open(notes + "/queue") as queue:
    environment = json.load(queue)
job = subprocess.Popen(["sleep", "99"], env=environment, start_new_session=True)
with open(notes + "/.next", "w") as file:
    file.write(str(job.pid))
os.rename(notes + "/.next", notes + "/next")
job.wait()
"""
ASKING = """
import json, os, time
notes = os.environ["NOTES"]
with open(notes + "/queue", "w") as queue:
    json.dump(dict(os.environ), queue)
while not os.path.exists(notes + "/next"):
    time.sleep(0.01)
open(notes + "/asked", "w").close()
while "STAYS" in os.environ:
    time.sleep(0.05)
"""
LIBRARY_JOB = """
import sys
from elastic_aio import LaunchSpec, run
run(LaunchSpec(sys.argv[2:]), adopt_orphans=sys.argv[1] == "adopting")
"""


@pytest.mark.parametrize("program", ["command", "library", "adopting"])
@pytest.mark.parametrize("end", ["success", "SIGTERM", "SIGKILL"])
def test_the_next_job_of_a_scheduler_is_another_job(program: str, end: str, tmp_path: Path) -> None:
    """Whether the launcher or the guardian ends the first one."""
    os.mkfifo(tmp_path / "queue")
    start = [*CLI, "run", "--no-python"]
    if program != "command":
        start = [sys.executable, "-c", LIBRARY_JOB, program]
    env = {"NOTES": str(tmp_path), **({} if end == "success" else {"STAYS": "1"})}
    with running([sys.executable, "-S", "-c", SCHEDULER], env=env) as scheduler:
        with running([*start, sys.executable, "-S", "-c", ASKING], env=env) as job:
            following = until_sync(lambda: read_pid(tmp_path / "next"), "the next job")
            until_sync((tmp_path / "asked").exists)
            if end != "success":
                job.send(getattr(signal, end))
            job.wait()

            def of_first_job() -> set[int]:
                return set(leaked_processes()) - {scheduler.pid, following}

            until_sync(lambda: not of_first_job(), "the end of the first job")
        kill_strangers(following)
        scheduler.wait()
    until_sync(all_exited)


FORGETFUL = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(os.environ["NOTES"] + "/.forgetful", "w") as file:
            file.write(str(os.getpid()))
        os.rename(os.environ["NOTES"] + "/.forgetful", os.environ["NOTES"] + "/forgetful")
        os.execve("/bin/sleep", ["sleep", "99"], {})
    os._exit(0)
os.wait()
while not os.path.exists(os.environ["NOTES"] + "/forgetful"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("stays", [False, True], ids=["success", "SIGTERM"])
def test_a_daemon_without_its_environment_ends_with_the_job(stays: bool, tmp_path: Path) -> None:
    """The command line has no other children, so whatever it adopts is the job's."""
    code = FORGETFUL + ("time.sleep(99)\n" if stays else "")
    with running_cli(
        "--no-python", sys.executable, "-S", "-c", code, env={"NOTES": str(tmp_path)}
    ) as job:
        pid = until_sync(lambda: read_pid(tmp_path / "forgetful"), "the daemon")
        pidfd = os.pidfd_open(pid)
        if stays:
            job.send(signal.SIGTERM)
        assert job.wait() == (143 if stays else 0), job.err
        assert select.select([pidfd], [], [], 0)[0], "the daemon runs"
        os.close(pidfd)
    until_sync(all_exited)


def test_the_command_of_a_probe(tmp_path: Path) -> None:
    """It ends with the workers, which inherit sockets; the path of a socket is replaced then."""
    path, note = tmp_path / "s", tmp_path / "probe"
    command = f"exec:echo $$ > {note}.new; mv {note}.new {note}; sleep 97 & wait"
    options = "--socket", f"unix://{path}", "--ready", command
    for _ in range(2):
        with tree(tmp_path, 2, *options) as (job, pids):
            pids.append(int(until_sync(lambda: note.exists() and note.read_text())))
            assert path.is_socket()
            kill(job, pids)
        assert path.is_socket()
        for file in tmp_path.iterdir():
            if file.name != "s":
                file.unlink()
