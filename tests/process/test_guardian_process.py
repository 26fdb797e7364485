"""One guardian for all jobs of a program: event loops, threads, forks, and the end of all."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import HostError
from elastic_aio.process import guardian_process
from elastic_aio.process.guardian import Guardian
from elastic_aio.process.guardian_process import GuardedJob, GuardedProgram
from elastic_aio.spec.stop import StopPlan
from tests.support.children import none_alive, until, until_sync
from tests.support.cli import Running, running
from tests.support.leaks import alive, leaked_processes, open_descriptors

GUARD = 30.0


class Guarded:
    """A job of this program, and what its guardian has reported."""

    def __init__(self, plan: StopPlan | None = None) -> None:
        self.restarted: asyncio.Queue[int] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.job = GuardedJob.create(plan)
        self.guardian = Guardian(
            self.job,
            plan or StopPlan(),
            on_restarted=self.restarted.put_nowait,
            on_lost=self.lost.put_nowait,
        )

    @property
    def pid(self) -> int:
        assert self.guardian.pid is not None
        return self.guardian.pid


@asynccontextmanager
async def guarded(plan: StopPlan | None = None) -> AsyncIterator[Guarded]:
    """Begin a job, with a guardian that works."""
    one = Guarded(plan)
    try:
        one.guardian.start()
        async with asyncio.timeout(GUARD):
            await one.guardian.wait_ready()
        yield one
    finally:
        async with asyncio.timeout(GUARD):
            await one.guardian.aclose()
        one.job.close()


@contextmanager
def marked(job: GuardedJob) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of a job; kill it in the end."""
    env = {**os.environ, job.marker: "1"}
    with subprocess.Popen(["sleep", "99"], env=env, start_new_session=True) as process:
        yield process
        process.kill()


def guardians() -> list[int]:
    return [pid for pid, command in leaked_processes().items() if "guardian_main.py" in command]


# ------------------------------------------------------------------------ one event loop


@pytest.mark.both_loops
async def test_jobs_share_a_guardian_until_the_last_has_ended() -> None:
    """A further job takes no descriptor, and its names differ."""
    async with guarded() as first:
        descriptors = open_descriptors().keys()
        async with guarded() as second:
            assert second.pid == first.pid
            assert second.job.marker != first.job.marker
            assert len(second.job.marker) == len(first.job.marker)
            assert open_descriptors().keys() == descriptors
            assert guardians() == [first.pid]
        assert alive(first.pid)
        async with guarded() as third:
            assert third.pid == first.pid
            pid = third.pid
    assert not os.path.exists(f"/proc/{pid}")
    async with guarded() as next_program:
        assert next_program.pid != pid


@pytest.mark.slow
@pytest.mark.both_loops
async def test_one_job_is_ended_alone() -> None:
    """The others go on, and so does the guardian; requests may overlap."""
    async with AsyncExitStack() as stack:
        jobs = [await stack.enter_async_context(guarded()) for _ in range(3)]
        processes = [stack.enter_context(marked(one.job)) for one in jobs]
        async with asyncio.timeout(GUARD):
            ended = await asyncio.gather(*(one.guardian.end_job() for one in jobs[1:]))
        assert ended == [True, True]
        assert [one.poll() for one in processes] == [None, -signal.SIGTERM, -signal.SIGTERM]
        with marked(jobs[1].job) as again:
            async with asyncio.timeout(GUARD):
                assert await jobs[1].guardian.end_job()
            assert again.wait() == -signal.SIGTERM
        assert processes[0].poll() is None
        assert [one.restarted.empty() for one in jobs] == [True] * 3


@pytest.mark.slow
async def test_a_job_that_ignores_its_signal_does_not_delay_another_one(tmp_path: Path) -> None:
    """Their ends go on at the same time: the short one is answered first."""
    script = f"trap '' TERM; touch {tmp_path}/up; exec sleep 99"
    plan = StopPlan(((15, 60.0),), guardian_grace=60.0)
    async with guarded(plan) as long, guarded() as short:
        env = {**os.environ, long.job.marker: "1"}
        with (
            subprocess.Popen(["sh", "-c", script], env=env, start_new_session=True) as ignoring,
            marked(short.job) as process,
        ):
            await until((tmp_path / "up").exists)
            ending = asyncio.ensure_future(long.guardian.end_job())
            await asyncio.sleep(0)
            async with asyncio.timeout(GUARD):
                assert await short.guardian.end_job()
            assert process.wait() == -signal.SIGTERM
            assert not ending.done()
            assert ignoring.poll() is None
            ignoring.kill()
            async with asyncio.timeout(GUARD):
                assert await ending


@pytest.mark.slow
async def test_an_end_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """The job goes on then, and the guardian leaves it alone."""
    script = f"trap '' TERM; touch {tmp_path}/up; exec sleep 99"
    async with guarded(StopPlan(((15, 60.0),), guardian_grace=60.0)) as one:
        one.guardian._end_s = 0.3  # else a minute
        env = {**os.environ, one.job.marker: "1"}
        with subprocess.Popen(["sh", "-c", script], env=env, start_new_session=True) as ignoring:
            await until((tmp_path / "up").exists)
            assert not await one.guardian.end_job()
            until_sync(lambda: sleeps_in_lock(one.pid), "the guardian waits again")
            assert ignoring.poll() is None
            ignoring.kill()


def sleeps_in_lock(pid: int) -> bool:
    """Return whether a guardian waits for its program (proc_locks(5))."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("->" in words and str(pid) in words for words in locks)


@pytest.mark.both_loops
async def test_every_job_learns_of_a_new_guardian() -> None:
    async with guarded() as first, guarded() as second:
        former = first.pid
        os.kill(former, signal.SIGKILL)
        async with asyncio.timeout(GUARD):
            pids = {await one.restarted.get() for one in (first, second)}
        assert pids == {first.pid} == {second.pid} != {former}
        assert guardians() == [first.pid]


@pytest.mark.slow
async def test_a_new_guardian_knows_all_jobs() -> None:
    """And what was asked of the former one."""
    async with guarded() as first, guarded() as second:
        with marked(first.job) as one, marked(second.job) as other:
            os.kill(first.pid, signal.SIGSTOP)
            first.job.request_end()
            os.kill(first.pid, signal.SIGKILL)
            await until(lambda: one.poll() is not None)
            assert one.returncode == -signal.SIGTERM
            async with asyncio.timeout(GUARD):
                assert await second.guardian.end_job()
            assert other.wait() == -signal.SIGTERM


async def test_a_job_may_begin_while_another_one_cannot_replace_its_guardian(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is replaced for both of them then."""
    refusals = 1

    class Refused(guardian_process.GuardianProcess):
        def __init__(self, *arguments: Any) -> None:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise HostError("no processes left")
            super().__init__(*arguments)

    async with guarded() as first:
        monkeypatch.setattr(guardian_process, "GuardianProcess", Refused)
        os.kill(first.pid, signal.SIGKILL)
        async with asyncio.timeout(GUARD):
            assert await first.lost.get() == "no processes left"
            async with guarded() as second:
                assert await first.restarted.get() == first.pid == second.pid
                assert alive(first.pid)


async def test_a_job_without_a_guardian_leaves_nothing() -> None:
    """It is listed, and the last one that is closed ends the guardian."""
    before = open_descriptors()
    alone = GuardedJob.create()
    async with guarded() as one:
        pid = one.pid
    assert alive(pid)
    alone.close()
    alone.close()
    assert not os.path.exists(f"/proc/{pid}")
    assert open_descriptors() == before
    assert GuardedProgram.present is None


# ------------------------------------------------------------- threads, forks, closed loops


class LoopThread:
    """An event loop in a thread of its own, which has a job."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.job: Guarded | None = None
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self.loop.run_forever, name="run_in_thread")
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GUARD)

    def begin(self) -> Guarded:
        async def enter() -> Guarded:
            return await self._stack.enter_async_context(guarded())

        job: Guarded = self.run(enter())
        return job

    def end(self) -> None:
        self.run(self._stack.aclose())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GUARD)
        self.loop.close()


@pytest.mark.slow
def test_event_loops_of_several_threads_share_a_guardian() -> None:
    """Whichever notices its end starts another one, and any of them may end first."""
    threads = [LoopThread() for _ in range(4)]
    jobs = [thread.begin() for thread in threads]
    assert len({job.pid for job in jobs}) == 1
    while threads:
        former = jobs[0].pid
        os.kill(former, signal.SIGKILL)
        pids = {thread.run(job.restarted.get()) for thread, job in zip(threads, jobs, strict=True)}
        assert len(pids) == 1
        assert pids != {former}
        assert guardians() == [*pids]
        threads.pop(0).end()
        jobs.pop(0)
    assert guardians() == []


@pytest.mark.slow
def test_a_job_may_begin_while_the_last_one_of_its_loop_ends() -> None:
    """The guardian goes on for another loop, which is blocked; its reports reach the new job."""
    other = LoopThread()
    other.begin()
    blocked = threading.Event()

    async def swap() -> bool:
        async with AsyncExitStack() as stack:
            former = await stack.enter_async_context(guarded())
            closing = asyncio.ensure_future(former.guardian.aclose())
            await asyncio.sleep(0)
            async with guarded() as next_one, asyncio.timeout(GUARD):
                await closing
                other.loop.call_soon_threadsafe(blocked.wait)
                return await next_one.guardian.end_job()

    try:
        assert asyncio.run(swap())
    finally:
        blocked.set()
        other.end()


@pytest.mark.slow
def test_jobs_begin_and_end_in_several_threads_at_once() -> None:
    """Each is guarded; nothing is left of any."""
    failures: list[object] = []

    async def work() -> None:
        for _ in range(8):
            async with guarded() as one:
                await asyncio.sleep(0)
                if not alive(one.pid):
                    failures.append(one.pid)
                if not one.lost.empty() or not one.restarted.empty():
                    failures.append("restarted")

    threads = [
        threading.Thread(target=lambda: asyncio.run(work()), name="run_in_thread") for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * GUARD)
    assert not failures
    assert guardians() == []
    assert GuardedProgram.present is None


# Prints the pid of the worker and of the guardian of each job; a line of stdin says what follows.
PROGRAM = """
import asyncio, os, sys, threading
from elastic_aio import Agent, LaunchSpec, LogSpec, StopPlan
from elastic_aio.events import WorkerStarted
from elastic_aio.process.guardian_process import GuardedProgram
spec = LaunchSpec(["sleep", "99"], logs=LogSpec(log_dir="/dev/null"))
async def begin(spec=spec):
    agent = await Agent(spec).__aenter__()
    async for event in agent.events():
        if isinstance(event, WorkerStarted):
            print(event.pid, GuardedProgram.present.process.process.pid, flush=True)
            agents.append(agent)  # else it is stopped when it is collected
            return agent
agents = []
def wait():
    sys.stdin.readline()
"""


@contextmanager
def program(code: str, **env: str) -> Iterator[tuple[Running, Callable[[], list[int]]]]:
    """Run a program; yield it, and what returns the next numbers that it prints."""
    with running([sys.executable, "-c", PROGRAM + code], env=env, stdin_pipe=True) as one:
        count = 0

        def numbers() -> list[int]:
            nonlocal count
            count += 1
            until_sync(lambda: one.out.count("\n") >= count, f"line {count}")
            return [int(word) for word in one.out.splitlines()[count - 1].split()]

        yield one, numbers
    until_sync(lambda: not leaked_processes(), "the end of all")


def go_on(one: Running) -> None:
    assert one.process.stdin is not None
    one.process.stdin.write(b"\n")
    one.process.stdin.flush()


@pytest.mark.slow
def test_a_closed_loop_ends_its_jobs_only() -> None:
    """The guardian ends them, and goes on for the job of another loop."""
    code = """
kept = []
def first():
    loop = asyncio.new_event_loop()
    kept.append(loop.run_until_complete(begin()))
    closing.wait()
    loop.close()
closing = threading.Event()
thread = threading.Thread(target=first)
thread.start()
async def main():
    while not kept:
        await asyncio.sleep(0.01)
    kept.append(await begin())
    await asyncio.to_thread(wait)
    closing.set()
    await asyncio.to_thread(thread.join)
    await asyncio.to_thread(wait)
    await kept[1].stop()
    await kept[1].__aexit__(None, None, None)
asyncio.run(main())
"""
    with program(code) as (one, numbers):
        first, guardian = numbers()
        second, same = numbers()
        assert same == guardian
        go_on(one)
        until_sync(lambda: not alive(first), "the end of the job of the closed loop")
        assert alive(second)
        assert alive(guardian)
        go_on(one)
        assert one.wait() == 0, one.err
        assert not alive(second)


@pytest.mark.slow
def test_a_guardian_without_jobs_ends_and_the_next_job_has_another_one() -> None:
    """All jobs of a closed loop have ended, and the program runs on."""
    code = """
kept = []
def run():
    loop = asyncio.new_event_loop()
    kept.append(loop.run_until_complete(begin()))
    loop.close()
run()
wait()
run()
wait()
"""
    with program(code) as (one, numbers):
        for _ in range(2):
            worker, guardian = numbers()
            until_sync(none_alive([worker, guardian]), "the end of both")
            assert one.process.poll() is None
            go_on(one)
        assert one.wait() == 0, one.err


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["fork", "program"])
def test_the_jobs_of_a_fork_are_its_own(killed: str) -> None:
    """Each of the two has a guardian, which ends the jobs of that process only."""
    code = """
async def main(fork=True):
    agent = await begin()
    if fork and not os.fork():
        os.set_blocking(0, True)
        thread = threading.Thread(target=lambda: asyncio.run(main(False)))
        thread.start()
        thread.join()
        os._exit(1)
    if fork:
        await asyncio.sleep(99)
    print(os.getpid(), flush=True)
    await asyncio.sleep(99)
asyncio.run(main())
"""
    with program(code) as (one, numbers):
        ours, guardian = numbers()
        theirs, other = numbers()
        (fork,) = numbers()
        assert guardian != other
        if killed == "fork":
            os.kill(fork, signal.SIGKILL)
            until_sync(lambda: not alive(theirs) and not alive(other), "the end of the fork's job")
            assert alive(ours)
            assert alive(guardian)
            one.send(signal.SIGKILL)
        else:
            one.send(signal.SIGKILL)
            until_sync(lambda: not alive(ours) and not alive(guardian), "the end of the job")
            assert alive(theirs)
            assert alive(other)
            os.kill(fork, signal.SIGKILL)
        one.wait()


# ------------------------------------------------------------------------- the end of all

NOTING = """
for name in INT TERM USR1; do trap "echo $name > $NOTES/$RANK_OF_JOB.signal" $name; done
echo $$ > $NOTES/$RANK_OF_JOB.up; while :; do sleep 0.05; done
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exec"])
def test_each_job_is_ended_by_its_own_plan(how: str, tmp_path: Path) -> None:
    """Its first signal and its grace; the job without a grace is killed at once."""
    code = f"""
async def main():
    plans = [StopPlan([(name, 0.3)]) for name in ("SIGINT", "SIGTERM", "SIGUSR1")]
    for number, plan in enumerate([*plans, StopPlan.within(0)]):
        env = {{"RANK_OF_JOB": str(number)}}
        spec = LaunchSpec(["bash", "-c", {NOTING!r}], env=env, stop=plan,
            logs=LogSpec(log_dir="/dev/null"))
        await begin(spec)
    await asyncio.to_thread(wait)
    os.execvp("sleep", ["sleep", "99"])
asyncio.run(main())
"""
    with program(code, NOTES=str(tmp_path)) as (one, numbers):
        workers, pids = zip(*(numbers() for _ in range(4)), strict=True)
        assert len(set(pids)) == 1
        until_sync(lambda: len([*tmp_path.glob("*.up")]) == 4, "the handlers of the workers")
        one.send(signal.SIGKILL) if how == "kill" else go_on(one)
        until_sync(lambda: not any(map(alive, (*workers, *pids))), "the end of all")
        assert (one.process.poll() is None) == (how == "exec")
        one.process.kill()
    notes = {path.stem: path.read_text().strip() for path in tmp_path.glob("*.signal")}
    assert notes == {"0": "INT", "1": "TERM", "2": "USR1"}


MANY = 50


@pytest.mark.slow
def test_many_jobs_take_little_of_the_program_and_end_with_it() -> None:
    """One guardian; 1.5 MB of memory and 8 descriptors for each further job."""
    code = f"""
from pathlib import Path
def used():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Private_Dirty:"))
    return int(line.split()[1]), len(os.listdir("/proc/self/fd"))
async def main():
    await begin()
    await asyncio.sleep(1)  # until it has loaded what it may need later
    memory, descriptors = used()
    for _ in range({MANY}):
        await begin()
    more, others = used()
    print((more - memory) // {MANY}, -((descriptors - others) // {MANY}), flush=True)
    await asyncio.sleep(99)
asyncio.run(main())
"""
    with program(code) as (one, numbers):
        rows = [numbers() for _ in range(MANY + 1)]
        assert len({guardian for _, guardian in rows}) == 1
        kilobytes, descriptors = numbers()
        assert kilobytes <= 1536
        assert descriptors <= 8
        one.send(signal.SIGKILL)
        one.wait()
        until_sync(lambda: not leaked_processes(), "the end of all jobs")
