"""No worker outlives its supervisor, not even one that is killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from elastic_aio.errors import SpawnError, SurroundingsError
from elastic_aio.process.base import Child, ChildPlan
from elastic_aio.process.command import command_spawner
from elastic_aio.process.guardian import Guardian, open_roster
from elastic_aio.process.sweep import ticks_now

GUARD = 30.0
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _waiting_threads_end() -> Iterator[None]:
    """On Python 3.11 asyncio has a thread for each child, which ends a little after it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-")):
            thread.join(GUARD)


class Bench:
    """A guardian of nobody, and who took whose place."""

    def __init__(self) -> None:
        self.replaced: asyncio.Queue[int] = asyncio.Queue()
        self.roster = open_roster()
        self.refusals = 0
        self.guardian = Guardian(
            self.spawn,
            marker="ELASTIC_AIO_JOB_GUARDIAN_TEST",
            since=ticks_now(),
            roster=self.roster,
            on_replaced=self.replaced.put_nowait,
        )

    async def spawn(self, plan: ChildPlan) -> Child:
        if self.refusals:
            self.refusals -= 1
            raise SpawnError("no processes left", permanent=False, exit_code=1)
        return await command_spawner(asyncio.get_running_loop())(plan)

    async def aclose(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.guardian.aclose()
        os.close(self.roster)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench that is cleared afterwards."""
    one = Bench()
    yield one
    await one.aclose()


async def test_it_is_there_while_the_job_is(bench: Bench) -> None:
    """Started, it leads a session of its own; closed, it is gone."""
    assert repr(bench.guardian) == "<Guardian None>"
    await bench.guardian.start()
    pid = bench.guardian.pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert repr(bench.guardian) == f"<Guardian <Child {pid}: running>>"
    await bench.guardian.aclose()
    assert not os.path.exists(f"/proc/{pid}")
    assert bench.replaced.empty()


async def test_a_dead_guardian_is_replaced(bench: Bench) -> None:
    """Whoever kills it gets another one, and the owner is told its pid."""
    await bench.guardian.start()
    for _ in range(2):
        former = bench.guardian.pid
        assert former is not None
        os.kill(former, signal.SIGKILL)
        async with asyncio.timeout(GUARD):
            pid = await bench.replaced.get()
        assert pid == bench.guardian.pid != former
        os.kill(pid, 0)


async def test_a_guardian_that_cannot_start_is_an_error(bench: Bench) -> None:
    """A job that cannot be guarded does not begin."""
    bench.refusals = 1
    with pytest.raises(
        SurroundingsError, match=r"^cannot start the guardian process: no processes"
    ):
        await bench.guardian.start()


async def test_a_replacement_is_tried_until_it_succeeds(bench: Bench) -> None:
    """A machine that is out of processes for a while gets its guardian later."""
    await bench.guardian.start()
    bench.refusals = 1
    former = bench.guardian.pid
    assert former is not None
    os.kill(former, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        assert await bench.replaced.get() != former
    assert bench.refusals == 0


async def test_closing_ends_a_replacement(bench: Bench) -> None:
    """A job that ends while the machine refuses a guardian does not wait for one."""
    await bench.guardian.start()
    bench.refusals = 1_000_000
    former = bench.guardian.pid
    assert former is not None
    os.kill(former, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        while bench.refusals == 1_000_000:  # nothing tells of it
            await asyncio.sleep(0)
        await bench.guardian.aclose()
    assert bench.replaced.empty()


async def test_common_signals_do_not_end_it(bench: Bench) -> None:
    """A signal for all processes of a user must not leave the workers unguarded."""
    await bench.guardian.start()
    pid = bench.guardian.pid
    assert pid is not None
    async with asyncio.timeout(GUARD):
        while not (ignored(pid) >> (signal.SIGUSR2 - 1) & 1):  # nothing tells of it
            await asyncio.sleep(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        os.kill(pid, number)
    assert bench.guardian.pid == pid
    os.kill(pid, 0)
    assert bench.replaced.empty()


def ignored(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return int(line.split()[1], 16)
    raise AssertionError("no SigIgn line")


# A supervisor with a guardian, a worker, and all kinds of offspring of that.
SUPERVISOR = """
import asyncio, os, sys
from elastic_aio.aio import Pausable
from elastic_aio.process.base import ChildPlan
from elastic_aio.process.command import command_spawner
from elastic_aio.process.guardian import Guardian, open_roster
from elastic_aio.process.tree import ProcessTree

MARKER = "ELASTIC_AIO_JOB_" + os.urandom(8).hex()
DAEMON = '''
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
'''
SCRIPT = 'set -m; sleep 99 & echo $!; "$0" -I -S -c "$1"; trap "" TERM; echo $$; exec sleep 99'

async def main():
    spawn = command_spawner(asyncio.get_running_loop())
    roster = open_roster()
    tree = ProcessTree(MARKER, Pausable(), roster)
    guardian = Guardian(spawn, marker=MARKER, since=tree.since, roster=roster, on_replaced=print)
    await guardian.start()
    print(guardian.pid, flush=True)
    tree.add(await spawn(ChildPlan(
        argv=("bash", "-c", SCRIPT, sys.executable, DAEMON),
        env={**os.environ, MARKER: "1"}, cwd=None, stdin=0, stdout=1, stderr=2,
    )))
    if sys.argv[1] == "forking" and os.fork() == 0:
        os.execvp("sleep", ["sleep", "99"])  # holds every pipe of ours that it inherits
    await asyncio.sleep(99)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["plain", "forking"])
def test_a_killed_supervisor_leaves_nobody(kind: str) -> None:
    """SIGKILL: worker, other process group and daemon are gone within a second or two.

    A program that forks keeps nothing alive but its own fork.
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, kind],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    bystander = subprocess.Popen(["sleep", "99"], start_new_session=True)
    assert supervisor.stdout is not None
    try:
        pids = [int(supervisor.stdout.readline()) for _ in range(4)]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        forks = set(children_of(supervisor.pid)) - set(pids)
        assert len(forks) == (kind == "forking")
        began = time.monotonic()
        supervisor.kill()
        supervisor.wait()
        for pidfd in pidfds:
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            assert waiting.poll(GUARD * 1000), "it lives on"
            os.close(pidfd)
        assert time.monotonic() - began < 5
        assert bystander.poll() is None
        for fork in forks:
            pidfd = os.pidfd_open(fork)
            os.kill(fork, signal.SIGKILL)
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            assert waiting.poll(GUARD * 1000)
            os.close(pidfd)
    finally:
        bystander.kill()
        bystander.wait()
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_guardian_is_small() -> None:
    """Its interpreter loads next to nothing: it waits beside every job."""
    main = ROOT / "elastic_aio" / "process" / "guardian_main.py"
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(main.parent)!r})\n"
        "import guardian_main\n"
        "print(sorted(sys.modules.keys() & {'asyncio', 'typing', 'subprocess', 're', 'json'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[]\n"
