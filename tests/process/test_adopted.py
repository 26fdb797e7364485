"""Orphans are found, stopped and reaped; other children of the program are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic_aio import HostError, LaunchSpec, launch
from elastic_aio.process import adopted
from elastic_aio.process.adopted import Orphans, subreaper
from elastic_aio.process.descendants import may_adopt
from elastic_aio.process.proc import ticks_now
from tests.support.children import python, until
from tests.support.cli import CLI, run_program
from tests.support.leaks import alive, own_children

pytestmark = pytest.mark.both_loops

# Starts a daemon in a session of its own, notes its pid, and exits.  `double` makes it no
# leader of its session; `hidden` forbids reading its environment, as ssh-agent does.
DAEMON = """
import ctypes, os, sys, time
def note(pid):
    with open(os.environ["NOTES"] + "/.daemon", "w") as file:
        file.write(str(pid))
    os.rename(os.environ["NOTES"] + "/.daemon", os.environ["NOTES"] + "/daemon")
if (child := os.fork()):
    if "double" in sys.argv:
        os.waitpid(child, 0)
    while not os.path.exists(os.environ["NOTES"] + "/daemon"):
        time.sleep(0.001)
    os._exit(0)
os.setsid()
if "double" in sys.argv and os.fork():
    os._exit(0)
if "hidden" in sys.argv:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
note(os.getpid())
time.sleep(float(sys.argv[1]))
"""


def daemon(seconds: float, *words: str) -> list[str]:
    """Return a command that leaves a daemon, which runs for some seconds."""
    return [*python(DAEMON), str(seconds), *words]


# As an ordinary user, for whom the environment of such a process cannot be read.
UNPRIVILEGED = ["setpriv", "--bounding-set=-sys_ptrace"] if os.geteuid() == 0 else []


@pytest.fixture
async def adopting() -> AsyncIterator[Orphans]:
    """The orphans of a job, adopted."""
    job = Orphans()
    job.adopt()
    yield job
    await job.aclose()
    await job.aclose()
    assert subreaper.jobs == 0
    assert not adopted._is_subreaper()


def noted(directory: Path) -> int:
    """Return the pid that a daemon has noted."""
    return int((directory / "daemon").read_text())


def run_daemon(directory: Path, seconds: float, *words: str) -> int:
    """Start a daemon as an orphan of this process; return its pid."""
    subprocess.run(
        daemon(seconds, *words), env={**os.environ, "NOTES": str(directory)}, check=True, timeout=60
    )
    return noted(directory)


@pytest.mark.slow
async def test_orphans_are_reaped_when_they_exit(adopting: Orphans, tmp_path: Path) -> None:
    pid = run_daemon(tmp_path, 0.1, "double")
    assert pid in own_children()
    await until(lambda: pid not in own_children(), "the orphan is reaped")
    assert repr(adopting) == "<Orphans: 0>"


@pytest.mark.slow
async def test_other_children_are_neither_found_nor_reaped(
    adopting: Orphans, tmp_path: Path
) -> None:
    """Their statuses belong to the program; a leader of a session may be the program's own."""
    since = ticks_now() - 1
    child = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=True)
    sleeper = subprocess.Popen(["sleep", "99"], start_new_session=True)
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 4")
    assert await process.wait() == 4
    pid = run_daemon(tmp_path, 0)
    await until(lambda: not alive(child.pid) and not alive(pid))
    assert adopting.find(since) == {}
    assert child.wait() == 3
    sleeper.kill()
    sleeper.wait()
    os.waitpid(pid, 0)  # a leader, which the library leaves to the program


@pytest.mark.slow
@pytest.mark.usefixtures("adopting")
async def test_no_child_is_regarded_as_adopted_while_one_is_started(tmp_path: Path) -> None:
    """A child that has just been forked is not known as this package's own yet."""
    pid = run_daemon(tmp_path, 99, "double")
    with subreaper.spawning():
        assert list(subreaper.adopted()) == []
    assert pid in [entry.pid for entry in subreaper.adopted()]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in own_children(), "the orphan is reaped")


@pytest.mark.slow
async def test_nothing_is_adopted_without_a_request(tmp_path: Path) -> None:
    job = Orphans()
    assert repr(job) == "<Orphans: not adopted>"
    pid = run_daemon(tmp_path, 0.01, "double")
    assert pid not in own_children()
    assert job.find(0) == {}
    await until(lambda: not alive(pid))
    await job.aclose()


async def test_a_fork_of_the_program_has_no_jobs(adopting: Orphans) -> None:
    """A forked worker can run jobs of its own."""
    assert subreaper.jobs == 1
    pid = os.fork()
    if pid == 0:
        os._exit(subreaper.jobs + adopted._is_subreaper())
    assert os.waitpid(pid, 0) == (pid, 0)  # it exits at once


async def test_a_host_that_forbids_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopted, "_PR_SET_CHILD_SUBREAPER", 9999)
    job = Orphans()
    with pytest.raises(HostError, match=r"cannot adopt orphans .*: \[Errno 22\] Invalid argument"):
        job.adopt()
    await job.aclose()


@pytest.mark.slow
async def test_a_job_that_adopts_leaves_no_zombie(tmp_path: Path) -> None:
    """Daemons that end during the job, and those that it stops."""
    env = {"NOTES": str(tmp_path)}
    before = own_children()
    await launch(LaunchSpec(daemon(99, "double"), env=env), adopt_orphans=True)
    assert not alive(noted(tmp_path))
    assert own_children() == before


async def test_what_may_adopt_the_orphans_of_a_job(adopting: Orphans) -> None:
    """A process that adopts since before the first worker has them all."""
    me = os.getpid()
    other = Orphans()
    try:
        assert adopting.adopters() == {me}
        assert other.adopters() == {me} | may_adopt(me)
    finally:
        await other.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, True])
async def test_orphans_beside_a_stranger(
    is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be those of a child that was there before the first worker."""
    monkeypatch.setattr(subreaper, "owns_process", True)
    monkeypatch.setattr(subreaper, "own", own_children())  # of other tests: they are no strangers
    since = ticks_now() - 1
    stranger = subprocess.Popen(["sleep", "99"]) if is_first else None
    job = Orphans()
    job.adopt()
    pid = run_daemon(tmp_path, 99, "double")
    found = set(job.find(since))
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in own_children(), "the orphan is reaped")
    if stranger is not None:
        assert stranger.poll() is None
        stranger.kill()
        stranger.wait()
    await job.aclose()
    assert found == (set() if is_first else {pid})


LIBRARY = """
import sys
from elastic_aio import LaunchSpec, run
run(LaunchSpec(sys.argv[1:]), adopt_orphans=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [("hidden",), ("hidden", "double")], ids="-".join)
@pytest.mark.parametrize("program", ["command", "library"])
def test_a_daemon_that_hides_its_environment_is_gone(
    program: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """As ssh-agent does, when no user but root may read it."""
    start = (
        [*CLI, "run", "--no-python"] if program == "command" else [sys.executable, "-c", LIBRARY]
    )
    argv = [*UNPRIVILEGED, *start, *daemon(99, *words)]
    ended = run_program(argv, env={"NOTES": str(tmp_path)})
    assert (ended.code, ended.out) == (0, "")
    assert not alive(noted(tmp_path))
