"""The guardian: no worker outlives its supervisor, not even a killed one."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from elastic_aio.errors import HostError, SpawnError
from elastic_aio.process.base import Child, ChildSpec
from elastic_aio.process.command import command_spawner
from elastic_aio.process.guardian import Guardian, open_session_list
from elastic_aio.process.proc_scan import ticks_now

pytestmark = pytest.mark.both_loops

GUARD = 30.0
ROOT = Path(__file__).parent.parent.parent


class Bench:
    """A guardian without workers; `restarted` gets the pids of its replacements."""

    def __init__(self) -> None:
        self.restarted: asyncio.Queue[int] = asyncio.Queue()
        self.sessions = open_session_list()
        self.refusals = 0
        self.guardian = Guardian(
            self.spawn,
            marker="ELASTIC_AIO_JOB_GUARDIAN_TEST",
            since=ticks_now(),
            session_list=self.sessions,
            on_restarted=self.restarted.put_nowait,
        )

    async def spawn(self, plan: ChildSpec) -> Child:
        if self.refusals:
            self.refusals -= 1
            raise SpawnError("no processes left", permanent=False, exit_code=1)
        return await command_spawner(asyncio.get_running_loop())(plan)

    async def aclose(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.guardian.aclose()
        os.close(self.sessions)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench()
    yield bench
    await bench.aclose()


async def test_it_runs_until_it_is_closed(bench: Bench) -> None:
    assert repr(bench.guardian) == "<Guardian None>"
    await bench.guardian.start()
    pid = bench.guardian.pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert repr(bench.guardian) == f"<Guardian <Child {pid}: running>>"
    await bench.guardian.aclose()
    assert not os.path.exists(f"/proc/{pid}")
    assert bench.restarted.empty()


async def test_a_killed_guardian_is_restarted(bench: Bench) -> None:
    await bench.guardian.start()
    for _ in range(2):
        previous = bench.guardian.pid
        assert previous is not None
        os.kill(previous, signal.SIGKILL)
        async with asyncio.timeout(GUARD):
            pid = await bench.restarted.get()
        assert pid == bench.guardian.pid != previous
        os.kill(pid, 0)


async def test_a_guardian_that_cannot_start_is_an_error(bench: Bench) -> None:
    bench.refusals = 1
    with pytest.raises(HostError, match=r"^cannot start the guardian process: no processes"):
        await bench.guardian.start()


async def test_a_restart_is_tried_until_it_succeeds(bench: Bench) -> None:
    """The host is out of processes for a while."""
    await bench.guardian.start()
    bench.refusals = 1
    previous = bench.guardian.pid
    assert previous is not None
    os.kill(previous, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        assert await bench.restarted.get() != previous
    assert bench.refusals == 0


async def test_closing_cancels_a_restart(bench: Bench) -> None:
    await bench.guardian.start()
    bench.refusals = 1_000_000
    previous = bench.guardian.pid
    assert previous is not None
    os.kill(previous, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        while bench.refusals == 1_000_000:  # no event reports it
            await asyncio.sleep(0)
        await bench.guardian.aclose()
    assert bench.restarted.empty()


async def test_common_signals_do_not_end_it(bench: Bench) -> None:
    await bench.guardian.start()
    pid = bench.guardian.pid
    assert pid is not None
    async with asyncio.timeout(GUARD):
        while not (ignored(pid) >> (signal.SIGUSR2 - 1) & 1):  # no event reports it
            await asyncio.sleep(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        os.kill(pid, number)
    assert bench.guardian.pid == pid
    os.kill(pid, 0)
    assert bench.restarted.empty()


def ignored(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigIgn:"):
            return int(line.split()[1], 16)
    raise AssertionError("no SigIgn line")


# A supervisor with a guardian and a worker, which starts another process group and a daemon.
SUPERVISOR = """
import asyncio, os, sys
from elastic_aio.aio import PausableClock
from elastic_aio.process.base import ChildSpec
from elastic_aio.process.command import command_spawner
from elastic_aio.process.guardian import Guardian, open_session_list
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
    sessions = open_session_list()
    tree = ProcessTree(MARKER, PausableClock(), sessions)
    guardian = Guardian(
        spawn, marker=MARKER, since=tree.since, session_list=sessions, on_restarted=print
    )
    await guardian.start()
    print(guardian.pid, flush=True)
    tree.add(await spawn(ChildSpec(
        argv=("bash", "-c", SCRIPT, sys.executable, DAEMON),
        env={**os.environ, MARKER: "1"}, cwd=None, stdin=0, stdout=1, stderr=2,
    )))
    if sys.argv[1] == "forking" and os.fork() == 0:
        os.execvp("sleep", ["sleep", "99"])  # holds every pipe of ours that it inherits
    await asyncio.sleep(99)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["plain", "forking"])
def test_a_killed_supervisor_leaves_no_process(kind: str) -> None:
    """Worker, other process group and daemon are gone within a second or two.

    A program that forks keeps only its own fork alive.
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
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(GUARD * 1000), "it still runs"
            os.close(pidfd)
        assert time.monotonic() - began < 5
        assert bystander.poll() is None
        for fork in forks:
            pidfd = os.pidfd_open(fork)
            os.kill(fork, signal.SIGKILL)
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(GUARD * 1000)
            os.close(pidfd)
    finally:
        bystander.kill()
        bystander.wait()
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


def children_of(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_guardian_is_small() -> None:
    """Its interpreter loads no large module: there is one for every job."""
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
