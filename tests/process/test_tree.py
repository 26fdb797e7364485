"""Stopping everything that a job has started, by one plan, and nothing else."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from elastic_aio.aio import Pausable
from elastic_aio.outcome import ExitStatus
from elastic_aio.policy import StopPlan, StopStep
from elastic_aio.process.base import Child, ChildPlan
from elastic_aio.process.command import command_spawner
from elastic_aio.process.guardian import open_roster
from elastic_aio.process.roster import parse_roster, read_roster
from elastic_aio.process.tree import ProcessTree
from tests.support.traces import alive

GUARD = 30.0
LONG = StopPlan((StopStep(15, 1000.0),))
SHORT = StopPlan((StopStep(15, 0.2),))


@pytest.fixture(autouse=True)
def _waiting_threads_end() -> Iterator[None]:
    """On Python 3.11 asyncio has a thread for each child, which ends a little after it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("waitpid-", "asyncio-waitpid-")):
            thread.join(GUARD)


class Bench:
    """A tree and the workers that a test adds to it."""

    def __init__(self) -> None:
        self.marker = f"ELASTIC_AIO_JOB_TREE_{os.urandom(8).hex()}"
        self.roster = open_roster()
        self.clock = Pausable()
        self.tree = ProcessTree(self.marker, self.clock, self.roster)
        self.nothing = os.open(os.devnull, os.O_RDWR)
        self.reader, self.writer = os.pipe()
        self.escalations: list[tuple[int, tuple[int, ...]]] = []

    async def add(self, *argv: str) -> Child:
        """Start a worker that prints into our pipe and carries the marker."""
        child = await command_spawner(asyncio.get_running_loop())(
            ChildPlan(
                argv=argv,
                env={"PATH": os.environ["PATH"], self.marker: "1"},
                cwd=None,
                stdin=self.nothing,
                stdout=self.writer,
                stderr=self.nothing,
            )
        )
        self.tree.add(child)
        return child

    def line(self) -> str:
        """Read one line that a worker prints."""
        text = b""
        waiting = select.poll()
        waiting.register(self.reader, select.POLLIN)
        while not text.endswith(b"\n"):
            assert waiting.poll(GUARD * 1000), "nothing was printed"
            text += os.read(self.reader, 1)
        return text.decode().strip()

    async def states(self, pids: set[int], wanted: Callable[[set[str]], bool]) -> None:
        """Look until the states of the tree's processes, which are `pids`, are as wanted."""
        async with asyncio.timeout(GUARD):
            while True:
                found = await self.tree.descendants()
                assert {one.pid for one in found} == pids
                if wanted({one.state for one in found}):
                    return

    async def stop(self, plan: StopPlan) -> list[object]:
        async with asyncio.timeout(GUARD):
            return [*await self.tree.stop(plan, lambda *told: self.escalations.append(told))]

    async def aclose(self) -> None:
        await self.stop(StopPlan(()))
        for descriptor in (self.roster, self.nothing, self.reader, self.writer):
            os.close(descriptor)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench that is cleared afterwards."""
    one = Bench()
    yield one
    await one.aclose()


def status(child: Child) -> ExitStatus:
    return child.exited.result().status


# Waits without an end, and without a child that a trap would have to wait for.
FOREVER = "coproc cat; while :; do read -u ${COPROC[0]} -t 99; done"
DEAF = "trap '' TERM; echo $$; exec sleep 99"


async def test_workers_that_listen_end_by_the_first_signal(bench: Bench) -> None:
    """Nothing escalates, and nobody waits for the grace."""
    children = [await bench.add("sleep", "99") for _ in range(3)]
    assert await bench.stop(LONG) == []
    assert [status(child) for child in children] == [ExitStatus(signal=15)] * 3
    assert bench.escalations == []
    assert repr(bench.tree) == "<ProcessTree with 0 of 0 leaders alive>"
    assert read_roster(bench.roster) == b""


async def test_a_deaf_worker_is_killed_after_the_grace(bench: Bench) -> None:
    """The escalation is told with exactly those that are left."""
    listening = await bench.add("sleep", "99")
    deaf = await bench.add("bash", "-c", DEAF)
    bench.line()
    began = bench.clock.now()
    assert await bench.stop(SHORT) == []
    assert bench.clock.now() - began >= 0.2
    assert (status(listening), status(deaf)) == (ExitStatus(signal=15), ExitStatus(signal=9))
    assert bench.escalations == [(9, (deaf.pid,))]


async def test_every_step_of_the_plan_is_taken(bench: Bench) -> None:
    """A worker that heeds only the second signal gets it after the first grace."""
    worker = await bench.add("bash", "-c", f"trap '' TERM; trap 'exit 5' INT; echo; {FOREVER}")
    bench.line()
    plan = StopPlan((StopStep(15, 0.1), StopStep(2, 1000.0)))
    assert await bench.stop(plan) == []
    assert [number for number, _ in bench.escalations] == [2]
    assert worker.pid in bench.escalations[0][1]
    assert status(worker) == ExitStatus(code=5)


async def test_an_empty_plan_kills_at_once(bench: Bench) -> None:
    """SIGKILL is always the end, and as the only step it is no escalation."""
    deaf = await bench.add("bash", "-c", DEAF)
    bench.line()
    assert await bench.stop(StopPlan(())) == []
    assert status(deaf) == ExitStatus(signal=9)
    assert bench.escalations == []


async def test_another_process_group_is_stopped_too(bench: Bench) -> None:
    """`set -m` puts a child into a group of its own, and that helps it nothing."""
    leader = await bench.add("bash", "-c", "set -m; sleep 99 & echo $!; wait")
    child = int(bench.line())
    assert await bench.stop(LONG) == []
    assert not alive(child)
    assert status(leader) == ExitStatus(signal=15)


DAEMON = """
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
"""


async def test_a_daemon_is_stopped_too(bench: Bench) -> None:
    """Twice forked, in its own session, its leader long gone."""
    leader = await bench.add(sys.executable, "-I", "-S", "-c", DAEMON)
    daemon = int(bench.line())
    async with asyncio.timeout(GUARD):
        assert (await asyncio.shield(leader.exited)).status.is_success
    assert not await bench.tree.settle()
    assert alive(daemon)
    assert await bench.stop(LONG) == []
    assert not alive(daemon)
    assert not bench.tree.was_asked(leader.pid)
    assert await bench.tree.settle()


async def test_a_child_that_hides_all_signs_is_stopped_with_its_leader(bench: Bench) -> None:
    """Another session and an empty environment: its parent is known before it dies."""
    await bench.add("bash", "-c", "env -i setsid sh -c 'echo $$; exec sleep 99' & wait")
    child = int(bench.line())
    assert await bench.stop(LONG) == []
    assert not alive(child)


async def test_who_appears_meanwhile_is_signalled_too(bench: Bench) -> None:
    """A worker that answers the signal with a new process is no way out."""
    script = f"trap 'sleep 99 & echo $!; exit 0' TERM; echo ready; {FOREVER}"
    worker = await bench.add("bash", "-c", script)
    assert bench.line() == "ready"
    assert await bench.stop(LONG) == []
    late = int(bench.line())
    assert not alive(late)
    assert status(worker).is_success


async def test_a_stopped_worker_acts_on_the_signal(bench: Bench) -> None:
    """A SIGSTOP from anywhere does not make a worker deaf."""
    code = (
        "import signal, sys\n"
        "signal.signal(15, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    worker = await bench.add(sys.executable, "-I", "-S", "-c", code)
    bench.line()
    worker.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
    assert await bench.stop(LONG) == []
    assert status(worker) == ExitStatus(code=7)


async def test_kill_now_shortens_a_stop(bench: Bench) -> None:
    """A second Ctrl-C during a grace of a quarter of an hour ends it at once."""
    deaf = await bench.add("bash", "-c", DEAF)
    bench.line()
    task = asyncio.create_task(bench.stop(LONG))
    while not bench.tree.was_asked(deaf.pid):  # nothing tells of it
        await asyncio.sleep(0)
    bench.tree.kill_now()
    assert await task == []
    assert status(deaf) == ExitStatus(signal=9)
    assert bench.escalations == [(9, (deaf.pid,))]


async def test_kill_now_shortens_later_stops(bench: Bench) -> None:
    """Asked for before the stop begins, it counts for that stop."""
    deaf = await bench.add("bash", "-c", DEAF)
    bench.line()
    bench.tree.kill_now()
    assert await bench.stop(LONG) == []
    assert status(deaf) == ExitStatus(signal=9)


async def test_nothing_else_is_signalled(bench: Bench) -> None:
    """Neighbours, our other children included, do not notice."""
    neighbours = [
        subprocess.Popen(
            ["sleep", "99"],
            start_new_session=own_session,
            env={"PATH": os.environ["PATH"], f"{bench.marker}_OTHER": "1"},
        )
        for own_session in (True, False)
    ]
    try:
        await bench.add("bash", "-c", DEAF)
        bench.line()
        assert await bench.stop(SHORT) == []
        assert [one.poll() for one in neighbours] == [None, None]
    finally:
        for one in neighbours:
            one.kill()
            one.wait()


async def test_who_ended_by_itself_was_not_asked(bench: Bench) -> None:
    """Culprits and victims are told apart by who was alive when the stop came."""
    own = await bench.add("sh", "-c", "exit 3")
    async with asyncio.timeout(GUARD):
        await asyncio.shield(own.exited)
    victim = await bench.add("bash", "-c", "trap '' TERM; echo; sleep 99 & wait; wait")
    bench.line()
    task = asyncio.create_task(bench.stop(StopPlan((StopStep(15, 1000.0),))))
    while not bench.tree.was_asked(victim.pid):  # nothing tells of it
        await asyncio.sleep(0)
    assert not bench.tree.was_asked(own.pid)
    bench.tree.kill_now()
    assert await task == []


async def test_signals_for_leaders_reach_leaders_only(bench: Bench) -> None:
    """USR1 goes to each live leader once; its children do not get it."""
    child = f"(trap 'echo child' USR1; echo up; {FOREVER})"
    script = f"trap 'echo leader' USR1; {child} & echo up; {FOREVER}"
    leader = await bench.add("bash", "-c", script)
    gone = await bench.add("true")
    assert [bench.line(), bench.line()] == ["up", "up"]
    async with asyncio.timeout(GUARD):
        await asyncio.shield(gone.exited)
    assert bench.tree.signal_leaders(signal.SIGUSR1) == (leader.pid,)
    assert bench.line() == "leader"
    await bench.stop(StopPlan(()))
    waiting = select.poll()
    waiting.register(bench.reader, select.POLLIN)
    assert not waiting.poll(0)


async def test_a_signal_for_all_reaches_all(bench: Bench) -> None:
    """Holding a job stops leaders and their children, and continuing wakes them."""
    leader = await bench.add("bash", "-c", "sleep 99 & echo $!; wait")
    child = int(bench.line())
    await bench.tree.signal_all(signal.SIGSTOP)
    await bench.states({leader.pid, child}, lambda states: states == {"T"})
    await bench.tree.signal_all(signal.SIGCONT)
    await bench.states({leader.pid, child}, lambda states: "T" not in states)


def listed(bench: Bench) -> dict[int, int | None]:
    """Return when the sessions of the roster were closed."""
    return {number: closed for number, _, closed in parse_roster(read_roster(bench.roster))}


async def test_the_roster_follows_the_tree(bench: Bench) -> None:
    """Leaders are listed when they are added, closed when reaped, gone when settled."""
    first = await bench.add("cat")
    second = await bench.add("sleep", "99")
    async with asyncio.timeout(GUARD):
        await asyncio.shield(first.exited)
        # There is one write for all exits of a turn of the loop, a turn or two later.
        while (rows := listed(bench))[first.pid] is None:
            await asyncio.sleep(0)
    assert rows.keys() == {first.pid, second.pid}
    assert rows[second.pid] is None
    assert not await bench.tree.settle()
    await bench.stop(StopPlan(()))
    assert parse_roster(read_roster(bench.roster)) == []


async def test_a_pause_does_not_use_up_the_grace(bench: Bench) -> None:
    """While the job is held no escalation comes; afterwards the rest of the grace counts."""
    deaf = await bench.add("bash", "-c", DEAF)
    bench.line()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(0.1, bench.clock.skip, 0.3)
    assert await bench.stop(SHORT) == []
    assert loop.time() - began >= 0.5 - 0.01
    assert status(deaf) == ExitStatus(signal=9)


async def test_stopping_nobody_is_quick(bench: Bench) -> None:
    """An empty tree has nothing to wait for."""
    assert await bench.stop(LONG) == []
    assert bench.escalations == []
