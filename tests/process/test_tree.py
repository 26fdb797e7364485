"""ProcessTree stops all processes of a job, and no others."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.aio import PausableClock
from elastic_aio.outcome import ExitStatus
from elastic_aio.process import descendants, proc, tree
from elastic_aio.process.children import Child, ChildSpec, command_spawner
from elastic_aio.process.descendants import STARTING, SessionList
from elastic_aio.process.guardian_process import GuardedJob
from elastic_aio.process.tree import ProcessTree, Survivor
from elastic_aio.spec.stop import StopPlan, StopStep
from tests.support.children import end_of, line_from, listed_sessions, until
from tests.support.denied import AS_OTHER, OTHER_UID, without_permission
from tests.support.holder import holder
from tests.support.leaks import alive

pytestmark = pytest.mark.both_loops

GUARD = 30.0
LONG = StopPlan((StopStep(15, 1000.0),))
SHORT = StopPlan((StopStep(15, 0.2),))


class Bench:
    """A tree and the workers that a test adds to it."""

    def __init__(self) -> None:
        self.marker = f"ELASTIC_AIO_JOB_TREE_{os.urandom(8).hex()}"
        self.job = GuardedJob.create()
        self.clock = PausableClock()
        self.tree = ProcessTree(self.marker, self.clock, self.job.sessions)
        self.devnull = os.open(os.devnull, os.O_RDWR)
        self.reader, self.writer = os.pipe()
        self.escalations: list[tuple[int, tuple[int, ...]]] = []

    async def add(self, *argv: str) -> Child:
        """Start a worker that has the marker and prints into our pipe."""
        child = await command_spawner(asyncio.get_running_loop())(
            ChildSpec(
                argv=argv,
                env={"PATH": os.environ["PATH"], self.marker: "1"},
                cwd=None,
                stdin=self.devnull,
                stdout=self.writer,
                stderr=self.devnull,
            )
        )
        self.tree.add(child)
        return child

    async def add_ignoring(self) -> Child:
        """Start a worker that ignores SIGTERM, and wait until it does."""
        child = await self.add("bash", "-c", IGNORE_TERM)
        self.line()
        return child

    def line(self) -> str:
        """Read one line that a worker prints."""
        return line_from(self.reader)

    async def next_line(self) -> str:
        """Wait, while the loop runs, for a line that a worker prints."""
        await until(lambda: select.select([self.reader], [], [], 0)[0], "a line")
        return self.line()

    def rest(self) -> list[str]:
        """Read the lines that are left when all workers have ended."""
        lines = []
        while select.select([self.reader], [], [], 0)[0]:
            lines.append(self.line())
        return lines

    async def states(self, pids: set[int], wanted: Callable[[set[str]], bool]) -> None:
        """Wait until the states of the tree's processes, which are `pids`, are as wanted."""
        async with asyncio.timeout(GUARD):
            while True:
                entries = await self.tree.descendants()
                assert entries is not None
                assert {entry.pid for entry in entries} == pids
                if wanted({entry.state for entry in entries}):
                    return

    async def stop(self, plan: StopPlan) -> list[object]:
        async with asyncio.timeout(GUARD):
            return [*await self.tree.stop(plan, lambda *call: self.escalations.append(call))]

    async def aclose(self) -> None:
        await self.stop(StopPlan(()))
        await self.tree.aclose()
        self.job.close()
        for descriptor in (self.devnull, self.reader, self.writer):
            os.close(descriptor)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench()
    yield bench
    await bench.aclose()


def status(child: Child) -> ExitStatus:
    return child.exited.result().status


# Waits without an end, and without a child that would delay a trap.
FOREVER = "coproc cat; while :; do read -u ${COPROC[0]} -t 99; done"
IGNORE_TERM = "trap '' TERM; echo $$; exec sleep 99"


async def test_workers_end_by_the_first_signal(bench: Bench) -> None:
    """No escalation, and the grace of 1000 s is not waited for."""
    children = [await bench.add("sleep", "99") for _ in range(3)]
    assert await bench.stop(LONG) == []
    assert [status(child) for child in children] == [ExitStatus(signal=15)] * 3
    assert bench.escalations == []
    assert repr(bench.tree) == "<ProcessTree with 0 of 0 leaders alive>"
    assert listed_sessions(bench.job) == {}


async def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(bench: Bench) -> None:
    """The escalation names only the processes that are left."""
    obeying = await bench.add("sleep", "99")
    ignoring = await bench.add_ignoring()
    began = bench.clock.now()
    assert await bench.stop(SHORT) == []
    assert bench.clock.now() - began >= 0.2
    assert (status(obeying), status(ignoring)) == (ExitStatus(signal=15), ExitStatus(signal=9))
    assert bench.escalations == [(9, (ignoring.pid,))]


async def test_every_step_of_the_plan_is_taken(bench: Bench) -> None:
    """A worker that obeys only the second signal gets it after the first grace."""
    worker = await bench.add("bash", "-c", f"trap '' TERM; trap 'exit 5' INT; echo; {FOREVER}")
    bench.line()
    plan = StopPlan((StopStep(15, 0.1), StopStep(2, 1000.0)))
    assert await bench.stop(plan) == []
    assert [number for number, _ in bench.escalations] == [2]
    assert worker.pid in bench.escalations[0][1]
    assert status(worker) == ExitStatus(code=5)


async def test_the_leaders_are_signalled_when_a_stop_begins(bench: Bench) -> None:
    """The stop goes on from there: it signals only those that were added in between."""
    code = (
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [15])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([15])\n"
        "print('got', flush=True)\n"
    )
    workers = [await bench.add(sys.executable, "-I", "-S", "-c", code) for _ in range(2)]
    assert {bench.line() for _ in workers} == {"ready"}
    os.kill(workers[0].pid, signal.SIGSTOP)
    os.waitid(os.P_PID, workers[0].pid, os.WSTOPPED | os.WNOWAIT)
    bench.tree.begin_stop(LONG)
    assert [bench.line() for _ in workers] == ["got", "got"]  # the loop stands still
    late = await bench.add("sleep", "99")
    assert [{*bench.tree.stop_signals(one.pid)} for one in (*workers, late)] == [{15}, {15}, set()]
    assert await bench.stop(LONG) == []
    assert status(late) == ExitStatus(signal=15)
    assert not bench.rest()
    assert not bench.escalations


@pytest.mark.parametrize("plan", [StopPlan(()), LONG], ids=["plan", "request"])
async def test_a_kill_does_not_begin_with_a_signal(bench: Bench, plan: StopPlan) -> None:
    worker = await bench.add("sleep", "99")
    if plan.steps:
        bench.tree.escalate_to_kill("now")
    bench.tree.begin_stop(plan)
    assert not bench.tree.stop_signals(worker.pid)
    assert await bench.stop(plan) == []
    assert status(worker) == ExitStatus(signal=9)


async def test_descendants_that_take_long_to_record(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child with another session and no environment is known before its parent is signalled."""
    monkeypatch.setattr(tree, "_SLICE_S", -1.0)
    leader = await bench.add("bash", "-c", "env -i setsid sh -c 'echo $$; exec sleep 99' & wait")
    child = int(bench.line())
    bench.tree.begin_stop(LONG)
    assert not bench.tree.stop_signals(leader.pid)
    assert await bench.stop(LONG) == []
    assert not alive(child)


async def test_the_first_leader_does_not_wait_for_the_last_to_be_looked_at(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descendants of each are recorded right before its signal."""
    leaders = [await bench.add("sleep", "99") for _ in range(3)]
    done: list[tuple[str, int]] = []
    find = proc.iter_descendants

    def record(pid: int) -> Iterator[proc.ProcEntry]:
        done.append(("recorded", pid))
        return find(pid)

    def note_signals(leader: Any) -> None:
        send = leader.send_signal

        def note(number: int) -> bool:
            done.append(("signalled", leader.pid))
            return bool(send(number))

        leader.send_signal = note

    monkeypatch.setattr(proc, "iter_descendants", record)
    for leader in leaders:
        note_signals(leader)
    bench.tree.begin_stop(LONG)
    pids = [leader.pid for leader in leaders]
    assert done == [(what, pid) for pid in pids for what in ("recorded", "signalled")]
    assert await bench.stop(LONG) == []


async def test_leaders_that_end_at_once_take_two_scans(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan while they end would find nothing that the next ones do not."""
    monkeypatch.setattr(tree, "_END_AT_ONCE_S", GUARD)
    for _ in range(3):
        await bench.add("sleep", "99")
    scans = Scans(monkeypatch)
    bench.tree.begin_stop(LONG)
    assert await bench.stop(LONG) == []
    assert scans.found == [set(), set()]


async def test_a_child_of_this_tick_is_listed_without_a_look_at_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds that back until the exec of the child is over."""
    ticks, reads = proc.ticks_now(), list[int]()

    def read(pid: int) -> None:
        reads.append(pid)

    monkeypatch.setattr(proc, "read_process", read)
    for later, expected in ((0, 0), (1, 1)):
        monkeypatch.setattr(proc, "ticks_now", lambda: ticks)
        with bench.tree.starting():
            pass
        monkeypatch.setattr(proc, "ticks_now", lambda later=later: ticks + later)
        child = await bench.add("sleep", "99")
        assert listed_sessions(bench.job)[child.pid].opened == ticks + later
        assert reads.count(child.pid) == expected
    monkeypatch.undo()
    assert await bench.tree.stop(StopPlan(()), lambda *_: None) == []


async def test_the_listed_start_of_a_child_is_that_of_the_kernel(bench: Bench) -> None:
    for _ in range(20):
        with bench.tree.starting():
            child = await bench.add("sleep", "99")
        process = proc.read_process(child.pid)
        assert process is not None
        assert listed_sessions(bench.job)[child.pid].opened == process.start
    assert await bench.stop(LONG) == []


async def test_a_plan_that_has_one_step_twice_sends_its_signal_twice(bench: Bench) -> None:
    ignoring = await bench.add_ignoring()
    step = StopStep(15, 0.05)
    plan = StopPlan((step, step))
    bench.tree.begin_stop(plan)
    sent: list[int] = []
    leader = next(iter(bench.tree._leaders.values()))
    real = leader.send_signal
    leader.send_signal = lambda number: sent.append(number) or real(number)  # type: ignore[method-assign, func-returns-value]
    assert await bench.stop(plan) == []
    assert sent == [15, 9]
    assert status(ignoring) == ExitStatus(signal=9)


async def test_an_empty_plan_kills_at_once(bench: Bench) -> None:
    """SIGKILL as the only step is no escalation."""
    ignoring = await bench.add_ignoring()
    assert await bench.stop(StopPlan(())) == []
    assert status(ignoring) == ExitStatus(signal=9)
    assert bench.escalations == []


async def test_the_last_step_has_further_means(bench: Bench) -> None:
    """Once the leaders have had their signal, so that they count as stopped."""
    seen: list[frozenset[int]] = []
    await bench.add("sleep", "99")
    bench.tree.on_kill = lambda: seen.append(bench.tree.stop_signals(ignoring.pid))
    await bench.stop(LONG)
    assert seen == []
    ignoring = await bench.add_ignoring()
    await bench.stop(SHORT)
    assert seen == [frozenset({15, 9})]


async def test_another_process_group_is_stopped_too(bench: Bench) -> None:
    """`set -m` puts a child into a process group of its own."""
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
    """Forked twice, in a session of its own, its leader reaped."""
    leader = await bench.add(sys.executable, "-I", "-S", "-c", DAEMON)
    daemon = int(bench.line())
    assert (await end_of(leader)).status.is_success
    assert not await bench.tree.forget_if_empty()
    assert alive(daemon)
    assert await bench.stop(LONG) == []
    assert not alive(daemon)
    assert not bench.tree.stop_signals(leader.pid)
    assert await bench.tree.forget_if_empty()


async def test_a_child_known_by_its_parent_only_is_stopped_with_its_leader(bench: Bench) -> None:
    """Another session and an empty environment: recorded before its parent ends."""
    await bench.add("bash", "-c", "env -i setsid sh -c 'echo $$; exec sleep 99' & wait")
    child = int(bench.line())
    assert await bench.stop(LONG) == []
    assert not alive(child)


async def test_a_process_started_during_the_stop_is_signalled_too(bench: Bench) -> None:
    """The worker's signal handler starts it."""
    script = f"trap 'sleep 99 & echo $!; exit 0' TERM; echo ready; {FOREVER}"
    worker = await bench.add("bash", "-c", script)
    assert bench.line() == "ready"
    assert await bench.stop(LONG) == []
    late = int(bench.line())
    assert not alive(late)
    assert status(worker).is_success


async def test_a_stopped_worker_acts_on_the_signal(bench: Bench) -> None:
    """After a SIGSTOP from elsewhere, the stop sends SIGCONT as well."""
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


async def test_a_stopped_descendant_acts_on_the_signal(bench: Bench) -> None:
    worker = await bench.add("bash", "-c", "sleep 99 & kill -STOP $!; echo $!; wait")
    await bench.states({worker.pid, int(bench.line())}, lambda states: "T" in states)
    assert await bench.stop(LONG) == []
    assert bench.escalations == []


async def test_escalate_to_kill_shortens_a_stop(bench: Bench) -> None:
    """As a second Ctrl-C does, during a grace of 1000 s; no other step comes in between."""
    ignoring = await bench.add_ignoring()
    task = asyncio.create_task(bench.stop(StopPlan((*LONG.steps, StopStep(2, 1000.0)))))
    while not bench.tree.stop_signals(ignoring.pid):  # no event reports it
        await asyncio.sleep(0)
    bench.tree.escalate_to_kill("a reason")
    assert await task == []
    assert status(ignoring) == ExitStatus(signal=9)
    assert bench.escalations == [(9, (ignoring.pid,))]


async def test_escalate_to_kill_between_two_steps(bench: Bench) -> None:
    """The second step has begun by then, and does not last for its 1000 s."""
    ignoring = await bench.add("bash", "-c", "trap '' INT TERM; echo; exec sleep 99")
    bench.line()
    plan = StopPlan((StopStep(15, 0.05), StopStep(2, 1000.0)))
    async with asyncio.timeout(GUARD):
        assert await bench.tree.stop(plan, lambda *_: bench.tree.escalate_to_kill("a reason")) == []
    assert status(ignoring) == ExitStatus(signal=9)


async def test_escalate_to_kill_shortens_later_stops(bench: Bench) -> None:
    ignoring = await bench.add_ignoring()
    bench.tree.escalate_to_kill("a reason")
    assert await bench.stop(LONG) == []
    assert status(ignoring) == ExitStatus(signal=9)


async def test_a_child_that_is_being_started_is_on_the_session_list(bench: Bench) -> None:
    """Behind the workers that run, and as long as it has not executed its program."""
    first = await bench.add("sleep", "99")
    with bench.tree.starting():
        assert list(listed_sessions(bench.job)) == [first.pid, STARTING]
        assert await bench.stop(LONG) == []
        (row,) = listed_sessions(bench.job).values()
        assert (row.number, row.closed) == (STARTING, None)
        assert row.opened <= proc.ticks_now()
    assert listed_sessions(bench.job) == {}
    second = await bench.add("sleep", "99")
    assert list(listed_sessions(bench.job)) == [second.pid]


def replace_scans(monkeypatch: pytest.MonkeyPatch, scan: Callable[..., Any]) -> None:
    """Let a function, which gets the scanner too, take the place of scans."""
    monkeypatch.setattr(descendants.Scanner, "find", lambda *args: scan(*args))


class Missing:
    """Scans that do not see a process until one of them has found nothing else."""

    def __init__(self, pid: int, is_over: Callable[[], bool]) -> None:
        self.is_seen = False
        self._pid = pid
        self._is_over = is_over
        self._scan = descendants.Scanner.find

    def __call__(self, *args: Any) -> Generator[float, None, list[proc.ProcEntry]]:
        entries = yield from self._scan(*args)
        if self.is_seen:
            return entries
        rest = [entry for entry in entries if entry.pid != self._pid]
        self.is_seen = not rest and self._is_over()
        return rest


async def test_a_process_that_one_clean_scan_has_missed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parent with a higher pid exits while /proc is read: its child is there for the next."""
    script = "setsid bash -c 'echo $$; exec sleep 99' & wait"
    leader = await bench.add("bash", "-c", script)
    child = int(bench.line())
    missing = Missing(child, leader.exited.done)
    replace_scans(monkeypatch, missing)
    assert await bench.stop(LONG) == []
    assert missing.is_seen
    assert not alive(child)


async def test_one_clean_scan_does_not_prove_that_nothing_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = await bench.add("bash", "-c", "setsid bash -c 'echo $$; exec sleep 99' & read x <&0")
    child = int(bench.line())
    await end_of(leader)
    replace_scans(monkeypatch, Missing(child, leader.exited.done))
    assert not await bench.tree.forget_if_empty()
    assert await bench.stop(LONG) == []
    assert not alive(child)


async def test_a_scan_has_time_to_wait_for_an_exec(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(*_: object) -> Generator[float, None, list[object]]:
        yield 0.1
        return []

    replace_scans(monkeypatch, scan)
    began = bench.clock.now()
    assert await bench.tree.descendants() == []
    assert bench.clock.now() - began > 0.05


async def test_nothing_else_is_signalled(bench: Bench) -> None:
    """Processes of another marker, in our session and in their own, run on."""
    neighbours = [
        subprocess.Popen(
            ["sleep", "99"],
            start_new_session=own_session,
            env={"PATH": os.environ["PATH"], f"{bench.marker}_OTHER": "1"},
        )
        for own_session in (True, False)
    ]
    try:
        await bench.add_ignoring()
        assert await bench.stop(SHORT) == []
        assert [neighbour.poll() for neighbour in neighbours] == [None, None]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


async def test_a_worker_that_ended_by_itself_was_not_signalled(bench: Bench) -> None:
    """Victims are the workers that ran when the stop began."""
    own = await bench.add("sh", "-c", "exit 3")
    await end_of(own)
    victim = await bench.add("bash", "-c", "trap '' TERM; echo; sleep 99 & wait; wait")
    bench.line()
    task = asyncio.create_task(bench.stop(StopPlan((StopStep(15, 1000.0),))))
    while not bench.tree.stop_signals(victim.pid):  # no event reports it
        await asyncio.sleep(0)
    assert not bench.tree.stop_signals(own.pid)
    bench.tree.escalate_to_kill("a reason")
    assert await task == []


async def test_a_worker_whose_end_is_not_noticed_yet_was_not_signalled(bench: Bench) -> None:
    """Its signals are asked for when the loop has noticed."""
    own = await bench.add("sleep", "99")
    os.kill(own.pid, signal.SIGKILL)
    os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
    signals: list[frozenset[int]] = []  # of the stop
    own.exited.add_done_callback(lambda _: signals.append(bench.tree.stop_signals(own.pid)))
    assert await bench.stop(LONG) == []
    assert (status(own), signals) == (ExitStatus(signal=9), [frozenset()])


async def test_signals_for_leaders_reach_leaders_only(bench: Bench) -> None:
    """SIGUSR1 goes to each live leader once, and to no child."""
    child = f"(trap 'echo child' USR1; echo up; {FOREVER})"
    script = f"trap 'echo leader' USR1; {child} & echo up; {FOREVER}"
    leader = await bench.add("bash", "-c", script)
    gone = await bench.add("true")
    assert [bench.line(), bench.line()] == ["up", "up"]
    await end_of(gone)
    assert bench.tree.signal_leaders(signal.SIGUSR1) == (leader.pid,)
    assert bench.line() == "leader"
    await bench.stop(StopPlan(()))
    poller = select.poll()
    poller.register(bench.reader, select.POLLIN)
    assert not poller.poll(0)


async def test_a_signal_for_all_reaches_all(bench: Bench) -> None:
    """SIGSTOP stops leaders and their children, SIGCONT continues them."""
    leader = await bench.add("bash", "-c", "sleep 99 & echo $!; wait")
    child = int(bench.line())
    await bench.tree.signal_all(signal.SIGSTOP)
    await bench.states({leader.pid, child}, lambda states: states == {"T"})
    await bench.tree.signal_all(signal.SIGCONT)
    await bench.states({leader.pid, child}, lambda states: "T" not in states)


def listed(bench: Bench) -> dict[int, int | None]:
    """Return when the listed sessions were closed, in ticks."""
    sessions = listed_sessions(bench.job)
    return {number: session.closed for number, session in sessions.items()}


async def test_the_session_list_follows_the_tree(bench: Bench) -> None:
    """Leaders are listed when added, closed when reaped, and removed when forgotten."""
    first = await bench.add("cat")
    second = await bench.add("sleep", "99")
    async with asyncio.timeout(GUARD):
        await asyncio.shield(first.exited)
        # The callback that writes it runs one iteration of the loop later.
        while (rows := listed(bench))[first.pid] is None:
            await asyncio.sleep(0)
    assert rows.keys() == {first.pid, second.pid}
    assert rows[second.pid] is None
    assert not await bench.tree.forget_if_empty()
    await bench.stop(StopPlan(()))
    assert listed_sessions(bench.job) == {}


@pytest.mark.slow
async def test_a_suspension_does_not_count_as_grace(bench: Bench) -> None:
    ignoring = await bench.add_ignoring()
    loop = asyncio.get_running_loop()
    began = loop.time()
    loop.call_later(0.1, bench.clock.skip, 0.3)
    assert await bench.stop(SHORT) == []
    assert loop.time() - began >= 0.5 - 0.01
    assert status(ignoring) == ExitStatus(signal=9)


async def test_an_empty_tree_is_stopped_at_once(bench: Bench) -> None:
    assert await bench.stop(LONG) == []
    assert bench.escalations == []


@contextmanager
def no_descriptors(left: int = 0) -> Iterator[Callable[[], None]]:
    """Let this process have few descriptors `left`, as a program can that embeds us.

    Yields a function that takes those that have become free, but for `left`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Above all that is open: a descriptor beyond the limit, once closed, makes no room.
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    held = []

    def take() -> None:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(left):
            os.close(held.pop())

    try:
        take()
        yield take
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1, 2])
async def test_a_stop_without_descriptors_ends_all_processes(bench: Bench, left: int) -> None:
    """Those that the tree keeps suffice to find and to signal a process of another session."""
    script = "for i in 1 2 3; do setsid sh -c 'echo $$; exec sleep 99' & done; wait"
    leader = await bench.add("bash", "-c", script)
    children = {int(bench.line()) for _ in range(3)}
    with no_descriptors(left) as take:
        if left:  # else the tree has freed its own by then
            leader.exited.add_done_callback(lambda _: take())
        assert await bench.stop(LONG) == []
    assert status(leader) == ExitStatus(signal=15)
    assert not any(map(alive, children))


@pytest.mark.slow
async def test_a_stop_without_scans_ends_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaders are killed; that more may be left is reported."""
    leader = await bench.add_ignoring()

    def fail(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        replace_scans(patch, fail)
        began = bench.clock.now()
        assert await bench.stop(SHORT) == [Survivor(0, "/proc could not be read")]
        assert bench.escalations == [(9, (leader.pid,))]
        assert bench.clock.now() - began < 5  # not the 10 s of the plan's reap_timeout
    assert status(leader) == ExitStatus(signal=9)


@pytest.mark.slow
async def test_a_stop_of_what_cannot_be_watched_ends_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event reports the end of a process that cannot be signalled either."""
    await bench.add("bash", "-c", "setsid sh -c 'echo $$; exec sleep 99' & wait")
    child = int(bench.line())
    plan = StopPlan(SHORT.steps, reap_timeout=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(proc, "open_pidfd", lambda process: None)
        survivors = await bench.stop(plan)
    assert [survivor.pid for survivor in survivors if isinstance(survivor, Survivor)] == [child]
    assert alive(child)


async def test_a_stop_without_watches_takes_the_grace_and_no_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc shows the pids of another namespace, scans find the end of processes."""
    monkeypatch.setattr(proc, "is_foreign", lambda: True)
    await bench.tree.aclose()
    sessions = SessionList(bench.job.program.list, bench.job.owner)
    bench.tree = ProcessTree(bench.marker, bench.clock, sessions)
    ignoring = "setsid sh -c 'trap \"\" TERM; echo $$; exec sleep 99' & wait"
    leader = await bench.add("bash", "-c", ignoring)
    child = int(bench.line())
    assert await bench.stop(SHORT) == []
    assert status(leader) == ExitStatus(signal=15)
    assert not alive(child)
    assert bench.escalations == [(9, (child,))]


# ------------------------------------------------------------ what may not be signalled


def other(seconds: float) -> str:
    """Return the command of a process of another user, which prints its pid."""
    return f"{AS_OTHER} sh -c 'echo $$; exec sleep {seconds}'"


@pytest.fixture
def denied() -> Iterator[None]:
    """Signals to processes of another user are refused in this test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with without_permission():
        yield


async def add_denied(bench: Bench, script: str) -> int:
    """Start a worker that starts a process of another user; return the pid of that."""
    await bench.add("bash", "-c", script)
    return int(bench.line())


async def kill(pid: int) -> None:
    """Kill a process of another user."""
    subprocess.run(["sh", "-c", f"kill -9 {pid}"], check=True)
    await until(lambda: not alive(pid))


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
@pytest.mark.parametrize("leads", [False, True])
async def test_what_may_not_be_signalled_is_named_after_the_grace(
    bench: Bench, *, leads: bool
) -> None:
    """It is not waited for as long as for what has got SIGKILL: the 10 s of `reap_timeout`."""
    script = f"exec {other(99)}" if leads else f"{other(99)} & exec sleep 98"
    pid = await add_denied(bench, script)
    began = bench.clock.now()
    survivors = await bench.stop(SHORT)
    assert 0.2 <= bench.clock.now() - began < 5
    (one,) = survivors
    assert isinstance(one, Survivor)
    assert (one.pid, one.program, one.is_denied) == (pid, "sleep 99", True)
    assert one.state[0] in "SR"
    assert f", of {proc.user_of(pid)}, no permission to signal it" in one.state
    assert bench.escalations == [(9, (pid,))]
    await kill(pid)


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
async def test_a_kill_does_not_wait_for_what_may_not_be_signalled(bench: Bench) -> None:
    pid = await add_denied(bench, f"{other(99)} & exec sleep 98")
    bench.tree.escalate_to_kill("a second signal")
    began = bench.clock.now()
    assert [one.pid for one in await bench.stop(LONG) if isinstance(one, Survivor)] == [pid]
    assert bench.clock.now() - began < 5
    await kill(pid)


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
async def test_what_may_not_be_signalled_may_end_in_the_grace(bench: Bench) -> None:
    """It ends as a program of `sudo` does: its work is done a little later."""
    await add_denied(bench, f"{other(0.3)} & exec sleep 98")
    began = bench.clock.now()
    assert await bench.stop(LONG) == []
    assert bench.clock.now() - began < 5
    assert bench.escalations == []


# A leader that becomes another user and waits for a child that saves, as `su` does.
SU = f"""
import os, subprocess
save = "trap 'echo saved; exit' TERM; echo up; sleep 99 & wait"
child = subprocess.Popen(["bash", "-c", save])
os.setgroups([])
os.setresuid(*[{OTHER_UID}] * 3)
child.wait()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
async def test_what_may_not_be_signalled_passes_its_turn_to_its_children(bench: Bench) -> None:
    """The child saves in the grace: it does not wait for a parent that gets no signal."""
    leader = await bench.add(sys.executable, "-S", "-c", SU)
    assert bench.line() == "up"
    await until(lambda: proc.is_denied(leader.pid), "the leader is another user's")
    assert await bench.stop(LONG) == []
    assert bench.rest() == ["saved"]
    assert bench.escalations == []


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
async def test_what_was_found_below_its_parent_is_named_without_it(bench: Bench) -> None:
    """Its session, its environment and, in the end, its parent do not tell the job."""
    hidden = f"env -i PATH=$PATH setsid {other(99)}"
    leader = await bench.add("bash", "-c", f"({hidden} & exec sleep 98) &")
    pid = int(bench.line())
    await asyncio.wait([leader.exited])
    forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await bench.tree.linger(0.1, forever)
    assert [one.pid for one in await bench.stop(SHORT) if isinstance(one, Survivor)] == [pid]
    await kill(pid)
    assert await bench.stop(LONG) == []


@pytest.mark.slow
@pytest.mark.usefixtures("denied")
async def test_the_sessions_of_what_is_left_stay_listed(bench: Bench) -> None:
    """The guardian, which is asked to end it, would find nothing without them."""
    pid = await add_denied(bench, f"{other(99)} &")
    await bench.stop(SHORT)
    assert listed_sessions(bench.job) != {}
    assert [one.pid for one in await bench.tree.wait_reaped(1.0)] == [pid]
    await kill(pid)
    assert await bench.stop(LONG) == []
    assert listed_sessions(bench.job) == {}


# ------------------------------------------------------------------ the order of a stop


async def add_holder(bench: Bench, *argv: str) -> tuple[Child, int]:
    """Add a leader with a helper; return it and the helper's pid when both are ready."""
    leader = await bench.add(*argv)
    lines = {bench.line(), bench.line()} - {"ready"}
    return leader, int(lines.pop())


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe at which a leader waits."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


class Scans:
    """Notes what the scans of a test find; each takes `extra` seconds longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, extra: float = 0.0) -> None:
        self.count = 0
        self.found: list[set[int]] = []
        self._extra = extra
        self._scan = descendants.Scanner.find
        replace_scans(monkeypatch, self)

    def __call__(self, *args: Any) -> Generator[float, None, list[proc.ProcEntry]]:
        self.count += 1
        yield self._extra
        entries = yield from self._scan(*args)
        self.found.append({entry.pid for entry in entries})
        return entries


async def stop_after_a_scan(bench: Bench, plan: StopPlan, gate: Path, scans: Scans) -> None:
    """Stop the tree; its leader waits at a gate until a scan has found its helper."""
    task = asyncio.create_task(bench.stop(plan))
    assert await bench.next_line() == "leader SIGTERM"
    await until(lambda: scans.found, "a scan")
    with gate.open("w"):
        pass
    assert await task == []


@pytest.mark.parametrize("kind", ["child", "session", "daemon", "once"])
async def test_a_helper_gets_the_signal_after_its_leader(
    bench: Bench, kind: str, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with a session of its own too, and as a daemon, which may belong to any leader.

    A leader that ignores the signal since it has had it keeps its helper too.
    """
    leader, helper = await add_holder(bench, *holder(kind, gate))
    await stop_after_a_scan(bench, LONG, gate, Scans(monkeypatch))
    assert bench.rest() == ["served", "helper SIGTERM after"]
    assert (status(leader), alive(helper)) == (ExitStatus(code=7), False)
    assert bench.escalations == []


@pytest.mark.parametrize(
    "plan",
    [
        StopPlan((StopStep(15, 1000.0),), scope="all"),
        StopPlan((StopStep(15, 1000.0, "all"),)),
    ],
    ids=["scope", "target"],
)
async def test_a_signal_for_all_reaches_helpers_at_once(bench: Bench, plan: StopPlan) -> None:
    leader, helper = await add_holder(bench, *holder("all"))
    assert await bench.stop(plan) == []
    assert sorted(bench.rest()) == ["helper SIGTERM before", "leader SIGTERM"]
    assert (status(leader), alive(helper)) == (ExitStatus(code=7), False)


async def test_a_step_for_leaders_in_a_plan_for_all(
    bench: Bench, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_holder(bench, *holder("child", gate))
    plan = StopPlan((StopStep(15, 1000.0, "leaders"),), scope="all")
    await stop_after_a_scan(bench, plan, gate, Scans(monkeypatch))
    assert bench.rest() == ["served", "helper SIGTERM after"]


@pytest.mark.parametrize("target", ["leaders", "all"])
async def test_each_step_has_its_target(bench: Bench, target: Any) -> None:
    """The leader goes on after the first signal, so its helper does not get that one."""
    kind = "all" if target == "all" else "child"
    leader, helper = await add_holder(bench, *holder(kind))
    plan = StopPlan((StopStep(2, 0.05), StopStep(15, 1000.0, target)))
    assert await bench.stop(plan) == []
    lines = bench.rest()
    assert lines.pop(0) == "leader SIGINT"
    if target == "all":
        assert sorted(lines) == ["helper SIGTERM before", "leader SIGTERM"]
    else:
        assert lines == ["leader SIGTERM", "served", "helper SIGTERM after"]
    assert status(leader) == ExitStatus(code=7)
    (escalation,) = bench.escalations
    assert (escalation[0], {*escalation[1]}) == (15, {leader.pid, helper})


async def test_a_stopped_helper_is_continued_for_its_leader(bench: Bench) -> None:
    leader, helper = await add_holder(bench, *holder("child"))
    os.kill(helper, signal.SIGSTOP)
    await bench.states({leader.pid, helper}, lambda states: "T" in states)
    assert await bench.stop(LONG) == []
    assert bench.rest() == ["leader SIGTERM", "served", "helper SIGTERM after"]


@pytest.mark.parametrize("kind", ["child", "once"])
async def test_a_program_below_a_shell_keeps_its_helpers(
    bench: Bench, kind: str, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell ends at once, and its program, which saves, leads then; it gets one signal."""
    script = '"$@"; true'
    leader = await bench.add("sh", "-c", script, "sh", *holder(kind, gate))
    assert len({bench.line(), bench.line()}) == 2
    scans = Scans(monkeypatch)
    task = asyncio.create_task(bench.stop(LONG))
    async with asyncio.timeout(GUARD):
        assert await bench.next_line() == "leader SIGTERM"
        await asyncio.shield(leader.exited)
        await until(lambda: any(leader.pid not in pids for pids in scans.found), "another scan")
        with gate.open("w"):
            pass
        assert await task == []
    assert bench.rest() == ["served", "helper SIGTERM after"]
    assert status(leader) == ExitStatus(signal=15)
    assert bench.escalations == []


async def test_a_later_step_asks_what_was_ignored_before_the_first(
    bench: Bench, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of the first signal may ignore those that follow, and need a helper."""
    await add_holder(bench, *holder("once", gate))
    step = StopStep(15, 0.05)
    plan = StopPlan((step, StopStep(15, 1000.0)))
    task = asyncio.create_task(bench.stop(plan))
    assert await bench.next_line() == "leader SIGTERM"
    await until(lambda: bench.escalations, "the second step")
    scans = Scans(monkeypatch)
    await until(lambda: scans.found, "a scan")
    with gate.open("w"):
        pass
    assert await task == []
    assert bench.rest() == ["served", "helper SIGTERM after"]


# A leader with a helper that reads until the leader has ended, and then writes at a gate (a named
# pipe).  With "server" it removes what it has served, as torch_shm_manager does; with the kinds of
# `BUSY` it does not end.
HELPING = """
import os, signal, socket, sys, tempfile, time
kind, gate = sys.argv[1:]
def say(word):
    os.write(out, word.encode() + b"\\n")
out = os.dup(1)
inputs, orders = os.pipe()
answers, results = os.pipe()
ours, theirs = socket.socketpair()
server = socket.socket(socket.AF_UNIX)
if os.fork():
    os.close(inputs)
    os.close(results)
    theirs.close()
    if kind in ("descriptor", "watched"):
        ours.close()
    sys.stdin.readline()
    os._exit(0)
ours.close()
if kind != "queue":
    os.close(orders)
os.close(answers)
if kind in ("session", "server"):
    os.setsid()
if kind in ("stdin", "handling", "deaf"):
    os.dup2(inputs, 0)
if kind not in ("descriptor", "session", "watched", "queue"):
    os.close(inputs)
if kind == "server":
    os.dup2(results, 1)
    server.bind("\\0" + os.urandom(8).hex())
    server.listen()
if kind not in ("watched", "queue"):
    os.close(results)
if kind != "connection":
    theirs.close()
def handle(*_):
    say("handled")
    os._exit(0)
if kind == "handling":
    signal.signal(signal.SIGTERM, handle)
say(str(os.getpid()))
if kind in ("watched", "queue", "none", "handling", "deaf"):
    while True:
        signal.pause()
elif kind == "server":
    while os.getppid() == int(os.environ["LEADER"]):
        time.sleep(0.005)
elif kind == "connection":
    theirs.recv(1)
else:
    os.read(0 if kind == "stdin" else inputs, 1)
say("reads no more")
open(gate).close()
say("written")
"""
BUSY = ["watched", "queue", "none", "sleep"]


async def add_helping(bench: Bench, kind: str, gate: Path) -> tuple[Child, int]:
    """Add a leader with a helper, whose pid is returned too."""
    code = ["exec", sys.executable, "-I", "-S", "-c", shlex.quote(HELPING), kind, str(gate)]
    script = "sleep 99 & echo $!" if kind == "sleep" else f"LEADER=$$ {' '.join(code)}"
    leader = await bench.add("sh", "-c", f"set -m; {script}")
    return leader, int(bench.line())


HELPERS = ["descriptor", "session", "stdin", "connection", "server"]


@pytest.mark.parametrize("kind", HELPERS)
async def test_a_helper_that_ends_after_its_leader_gets_no_signal(
    bench: Bench, kind: str, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finishes what it does at the end of the leader, and is waited for as long as it lives."""
    _, helper = await add_helping(bench, kind, gate)
    monkeypatch.setattr("elastic_aio.process.stop_order._LEAVE_S", 1000.0)
    scans = Scans(monkeypatch)
    task = asyncio.create_task(bench.stop(LONG))
    assert await bench.next_line() == "reads no more"
    await until(lambda: any(helper in pids for pids in scans.found), "a scan")
    opened = os.open(gate, os.O_RDWR)  # does not wait for a helper that is gone
    assert await task == []
    os.close(opened)
    assert bench.rest() == ["written"]
    assert bench.escalations == []


@pytest.mark.parametrize("kind", HELPERS)
async def test_a_helper_that_does_not_end_is_killed_after_the_grace(
    bench: Bench, kind: str, gate: Path
) -> None:
    _, helper = await add_helping(bench, kind, gate)
    assert await bench.stop(SHORT) == []
    assert bench.rest() == ["reads no more"]
    assert bench.escalations == [(9, (helper,))]


@pytest.mark.parametrize("kind", [*BUSY, "handling"])
async def test_what_does_not_wait_for_its_leader_gets_the_signal(
    bench: Bench, kind: str, gate: Path
) -> None:
    """Also if it notices its leader's end by a pipe, as all of multiprocessing, or handles it."""
    await add_helping(bench, kind, gate)
    assert await bench.stop(LONG) == []
    assert bench.rest() == (["handled"] if kind == "handling" else [])


async def test_what_does_not_look_at_its_closed_input_gets_the_signal(
    bench: Bench, gate: Path
) -> None:
    """It has not run since its leader has ended, so it waits for something else."""
    _, helper = await add_helping(bench, "deaf", gate)
    await until(lambda: proc.idle_for(helper) > 0.3, "idleness")
    assert await bench.stop(LONG) == []
    assert bench.rest() == []


# A leader that ends and leaves a parent, which ignores SIGTERM from the start or after the first.
LEAVING = """
import os, signal, sys
def ignore(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ignored\\n")
if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "start" else ignore)
if os.fork():
    os.wait()
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"got\\n"), os._exit(0)))
os.write(1, b"up\\n")
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("since", "printed"), [("start", "got"), ("signal", "ignored")])
async def test_what_is_left_passes_its_turn_if_it_ignored_the_signal_before(
    bench: Bench, since: str, printed: str
) -> None:
    """Its leader has ended before the stop, so no signal of the stop has reached it."""
    leader = await bench.add(sys.executable, "-I", "-S", "-c", LEAVING, since)
    assert bench.line() == "up"
    await end_of(leader)
    assert await bench.stop(SHORT) == []
    assert bench.rest() == [printed]


async def test_helpers_do_not_wait_for_the_leaders_of_others(bench: Bench, gate: Path) -> None:
    """They get the signal when their own leader ends, while another one saves."""
    slow, slow_helper = await add_holder(bench, *holder("child", gate))
    quick, quick_helper = await add_holder(bench, *holder("session"))
    task = asyncio.create_task(bench.stop(LONG))
    lines = [await bench.next_line() for _ in range(4)]
    assert sorted(lines) == ["helper SIGTERM after", "leader SIGTERM", "leader SIGTERM", "served"]
    await until(lambda: not alive(quick_helper))
    await end_of(quick)
    assert (slow.exited.done(), alive(slow_helper)) == (False, True)
    with gate.open("w"):
        pass
    assert await task == []
    assert bench.rest() == ["served", "helper SIGTERM after"]


async def test_a_daemon_of_unknown_origin_waits_for_all_leaders(bench: Bench, gate: Path) -> None:
    slow, slow_helper = await add_holder(bench, *holder("child", gate))
    quick, daemon = await add_holder(bench, *holder("daemon"))
    task = asyncio.create_task(bench.stop(LONG))
    lines = [await bench.next_line() for _ in range(3)]
    assert sorted(lines) == ["leader SIGTERM", "leader SIGTERM", "served"]
    await end_of(quick)
    with gate.open("w"):
        pass
    assert await task == []
    lines = bench.rest()
    assert lines[0] == "served"
    assert lines[1:] == ["helper SIGTERM after"] * 2
    assert not any(map(alive, (slow.pid, slow_helper, daemon)))


@pytest.mark.parametrize("kind", ["child", "session", "daemon"])
async def test_the_end_of_the_grace_kills_helpers_that_wait(
    bench: Bench, gate: Path, kind: str
) -> None:
    leader, helper = await add_holder(bench, *holder(kind, gate))
    assert await bench.stop(SHORT) == []
    assert bench.rest() == ["leader SIGTERM"]
    assert (status(leader), alive(helper)) == (ExitStatus(signal=9), False)
    (escalation,) = bench.escalations
    assert (escalation[0], {*escalation[1]}) == (9, {leader.pid, helper})


async def test_escalate_to_kill_reaches_helpers_that_wait(bench: Bench, gate: Path) -> None:
    leader, helper = await add_holder(bench, *holder("session", gate))
    task = asyncio.create_task(bench.stop(LONG))
    assert await bench.next_line() == "leader SIGTERM"
    bench.tree.escalate_to_kill("a reason")
    assert await task == []
    assert (status(leader), alive(helper)) == (ExitStatus(signal=9), False)
    assert bench.rest() == []


async def test_a_leader_that_has_ended_holds_no_helper(bench: Bench) -> None:
    """Before the stop: what it left gets the signal at once, while another leader runs."""
    ended = await bench.add("bash", "-c", "set -m; sleep 99 & echo $!")
    left = int(bench.line())
    await end_of(ended)
    ignoring = await bench.add_ignoring()
    task = asyncio.create_task(bench.stop(LONG))
    await until(lambda: not alive(left))
    assert not ignoring.exited.done()
    bench.tree.escalate_to_kill("a reason")
    assert await task == []


@pytest.mark.slow
async def test_leaders_that_end_one_after_the_other_cost_few_scans(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans take a tenth of the time, however many leaders end in it."""
    script = "sleep 99 & trap '' TERM; echo $!; exec sleep 99"
    leaders = []
    helpers = []
    for _ in range(200):
        leaders.append(await bench.add("sh", "-c", script))
        helpers.append(int(bench.line()))
    scan_s = 0.02
    scans = Scans(monkeypatch, scan_s)
    began = bench.clock.now()
    task = asyncio.create_task(bench.stop(LONG))
    async with asyncio.timeout(GUARD):
        for leader in leaders:
            os.kill(leader.pid, signal.SIGKILL)
            await asyncio.shield(leader.exited)
            await asyncio.sleep(scan_s / 4)  # how fast they end, not a wait
        assert await task == []
    # The last ones belong to no end of a leader: they prove that nothing is left.
    assert scans.count <= (bench.clock.now() - began) / (11 * scan_s) + 6
    assert not any(map(alive, helpers))
