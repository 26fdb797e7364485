"""The guardian: no worker outlives its supervisor, not even a killed one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.errors import HostError
from elastic_aio.process import guardian, guardian_process
from elastic_aio.process.guardian import Guardian
from elastic_aio.process.guardian_process import (
    GuardedJob,
    GuardianProcess,
    KeptPipes,
    spawned_early,
    take_early,
)
from elastic_aio.spec.stop import StopPlan
from tests.support.children import until_sync, wait_for_end
from tests.support.cli import Running, running
from tests.support.holder import holder
from tests.support.leaks import alive, leaked_processes, open_descriptors

pytestmark = pytest.mark.both_loops

GUARD = 30.0
ROOT = Path(__file__).parent.parent.parent


class Bench:
    """A guardian without workers; `restarted` gets the pids of its replacements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, python: str | None = None) -> None:
        self.restarted: asyncio.Queue[int] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.job = GuardedJob.create()
        self.refusals = 0
        monkeypatch.setattr(guardian_process, "GuardianProcess", self.spawn)
        self.guardian = Guardian(
            self.job,
            StopPlan(),
            on_restarted=self.restarted.put_nowait,
            on_lost=self.lost.put_nowait,
            python=python,
        )

    def spawn(self, *arguments: Any) -> GuardianProcess:
        if self.refusals:
            self.refusals -= 1
            raise HostError("no processes left")
        return GuardianProcess(*arguments)

    async def start(self) -> int:
        """Start the guardian and return its pid when it works."""
        async with asyncio.timeout(GUARD):
            self.guardian.start()
            await self.guardian.wait_ready()
        pid = self.guardian.pid
        assert pid is not None
        return pid

    async def aclose(self) -> None:
        async with asyncio.timeout(GUARD):
            await self.guardian.aclose()
        self.job.close()


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A bench that is closed afterwards."""
    bench = Bench(monkeypatch)
    yield bench
    await bench.aclose()


@contextmanager
def marked_process(job: GuardedJob) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of a job, which its supervisor does not stop; kill it in the end."""
    env = {**os.environ, job.marker: "1"}
    with subprocess.Popen(["sleep", "99"], env=env, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.fixture
def marked(bench: Bench) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job."""
    with marked_process(bench.job) as process:
        yield process


@asynccontextmanager
async def guarded_job(plan: StopPlan | None = None) -> AsyncIterator[tuple[GuardedJob, Guardian]]:
    """Begin a job of this program, with a guardian that works."""
    job = GuardedJob.create(plan)
    guardian = Guardian(job, plan or StopPlan(), on_restarted=print, on_lost=print)
    try:
        guardian.start()
        async with asyncio.timeout(GUARD):
            await guardian.wait_ready()
        yield job, guardian
    finally:
        async with asyncio.timeout(GUARD):
            await guardian.aclose()
        job.close()


@pytest.mark.slow
async def test_it_ends_the_job_on_request(bench: Bench) -> None:
    """It goes on: the job may have other processes then, which it ends too."""
    pid = await bench.start()
    for _ in range(2):
        with marked_process(bench.job) as process:
            async with asyncio.timeout(GUARD):
                assert await bench.guardian.end_job()
            assert process.wait() == -signal.SIGTERM
    assert bench.guardian.pid == pid
    assert alive(pid)
    assert bench.restarted.empty()


async def killed(bench: Bench) -> None:
    """Kill the guardian, and wait until another one works."""
    assert bench.guardian.pid is not None
    os.kill(bench.guardian.pid, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        assert await bench.restarted.get() == bench.guardian.pid


@pytest.mark.slow
async def test_another_one_ends_the_job_if_it_is_killed_before(
    bench: Bench, marked: subprocess.Popen[bytes]
) -> None:
    """Once: a request that was answered is not repeated by a third one."""
    pid = await bench.start()
    os.kill(pid, signal.SIGSTOP)
    bench.job.request_end()
    await killed(bench)
    async with asyncio.timeout(GUARD):
        assert await bench.guardian.end_job()
    assert marked.wait() == -signal.SIGTERM
    with marked_process(bench.job) as other:
        await killed(bench)
        async with guarded_job() as (_, another):
            assert await another.end_job(), "it has looked at the list"
        assert other.poll() is None
    assert bench.lost.empty()


async def test_a_stopped_guardian_answers(bench: Bench, marked: subprocess.Popen[bytes]) -> None:
    os.kill(await bench.start(), signal.SIGSTOP)
    async with asyncio.timeout(GUARD):
        assert await bench.guardian.end_job()
    assert marked.wait() == -signal.SIGTERM


async def test_it_continues_stopped_processes(
    bench: Bench, marked: subprocess.Popen[bytes]
) -> None:
    """These would act on no signal before SIGKILL."""
    marked.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, marked.pid, os.WSTOPPED | os.WNOWAIT)
    await bench.start()
    async with asyncio.timeout(GUARD):
        assert await bench.guardian.end_job()
    assert marked.wait() == -signal.SIGTERM


async def test_it_runs_until_it_is_closed(bench: Bench) -> None:
    assert repr(bench.guardian) == "<Guardian None>"
    pid = await bench.start()
    assert os.getsid(pid) == pid
    assert repr(bench.guardian) == f"<Guardian <GuardianProcess {pid}>>"
    await bench.guardian.aclose()
    assert not os.path.exists(f"/proc/{pid}")
    assert bench.restarted.empty()


async def test_a_killed_guardian_is_restarted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once; one that is killed again and again, a few times in a second."""
    delays: list[float] = []
    monkeypatch.setattr(asyncio, "sleep", recording(delays))
    monkeypatch.setattr(guardian, "_RESTARTS_MAX", 3)
    # Longer than the test may take: the fourth restart waits for the whole window.
    monkeypatch.setattr(guardian, "_WINDOW_S", 1e6)
    previous = await bench.start()
    counts = []
    for _ in range(4):
        os.kill(previous, signal.SIGKILL)
        async with asyncio.timeout(GUARD):
            pid = await bench.restarted.get()
        assert pid == bench.guardian.pid != previous
        os.kill(pid, 0)
        previous = pid
        counts.append(len(delays))
    assert counts == [0, 0, 0, 1]
    assert 1e6 - GUARD * 4 < delays[0] <= 1e6
    assert bench.lost.empty()


def recording(delays: list[float]) -> Callable[[float], Awaitable[None]]:
    """Return a `sleep` that records its argument, and is short."""
    sleep = asyncio.sleep

    async def record(delay: float) -> None:
        delays.append(delay)
        await sleep(min(delay, 0.05))

    return record


async def test_a_guardian_that_cannot_be_spawned_is_an_error(bench: Bench) -> None:
    bench.refusals = 1
    with pytest.raises(HostError, match=r"^no processes left$"):
        bench.guardian.start()


@pytest.mark.parametrize(
    ("executable", "problem"),
    [
        ("/bin/false", r"/bin/false ended at once \(exit code 1\)"),
        ("/bin/sh", r"/bin/sh ended at once \(exit code \d+, .*sh: .+\)"),
        ("/no/such/python", r"cannot run /no/such/python: no such file or directory"),
        ("", r"sys.executable is no Python interpreter \(''\); name an interpreter by "),
        (None, r"sys.executable is no Python interpreter \(None\); name an interpreter by "),
    ],
)
async def test_an_executable_that_is_no_interpreter_is_refused(
    executable: Any, problem: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says which executable it is, and what happened."""
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(HostError, match=rf"^cannot start the guardian process: {problem}"):
        await bench.start()


async def test_an_executable_that_does_not_answer_is_refused(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed."""
    deaf = tmp_path / "deaf"
    deaf.write_text("#!/bin/sh\nexec sleep 99\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(guardian, "_START_S", 0.2)
    with pytest.raises(HostError, match=r"/deaf does not report that it works within 0\.2 s$"):
        await bench.start()


async def test_a_frozen_application_needs_another_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would run itself as its guardian, which would run itself, and so on."""
    python = sys.executable
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    bench = Bench(monkeypatch)
    with pytest.raises(HostError, match=r"sys\.executable is a frozen application \('/bin/false'"):
        await bench.start()
    await bench.aclose()
    bench = Bench(monkeypatch, python=python)
    assert alive(await bench.start())
    await bench.aclose()


async def test_a_guardian_that_does_not_start_again_is_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts go on, further and further apart."""
    delays: list[float] = []
    monkeypatch.setattr(guardian, "_DELAY_S", 0.01)
    monkeypatch.setattr(guardian, "_DELAY_MAX_S", 0.05)
    monkeypatch.setattr(asyncio, "sleep", recording(delays))
    previous = await bench.start()
    bench.refusals = 5
    os.kill(previous, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        assert await bench.restarted.get() != previous
    assert bench.refusals == 0
    assert delays == [0.01, 0.02, 0.04, 0.05, 0.05]
    assert bench.lost.get_nowait() == "no processes left"
    assert bench.lost.empty()


async def test_closing_cancels_a_restart(bench: Bench) -> None:
    previous = await bench.start()
    bench.refusals = 1_000_000
    os.kill(previous, signal.SIGKILL)
    async with asyncio.timeout(GUARD):
        await bench.lost.get()
        await bench.guardian.aclose()
    assert bench.restarted.empty()


async def test_closing_before_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is cancelled leaves no process and no descriptor."""
    bench = Bench(monkeypatch)
    bench.guardian.start()
    await bench.aclose()


async def test_a_process_that_was_spawned_early_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; without a job it ends with the block."""
    with spawned_early(StopPlan(), None):
        early = take_early()
        assert early is not None
        assert take_early() is None
        assert early.program.process is not None
        pid = early.program.process.process.pid
        guardian = Guardian(early, StopPlan(), on_restarted=print, on_lost=print)
        guardian.start()
        async with asyncio.timeout(GUARD):
            await guardian.wait_ready()
        assert guardian.pid == pid
    assert alive(pid)
    await guardian.aclose()
    early.close()
    with spawned_early(StopPlan(), None):
        pass
    monkeypatch.setattr(sys, "executable", "")
    with spawned_early(StopPlan(), None):
        assert take_early() is None  # the job will report why


async def test_common_signals_do_not_end_it(bench: Bench) -> None:
    pid = await bench.start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        os.kill(pid, number)
    async with asyncio.timeout(GUARD):
        assert await bench.guardian.end_job(), "a signal has ended it"


# A supervisor with a guardian and a worker, which starts another process group and a daemon,
# and goes on after SIGTERM.  At the end of its stdin it becomes another program.
SUPERVISOR = """
import asyncio, os, sys
from elastic_aio.aio import PausableClock
from elastic_aio.process.children import ChildSpec
from elastic_aio.process.children import command_spawner
from elastic_aio.process.guardian import Guardian
from elastic_aio.process.guardian_process import GuardedJob
from elastic_aio.process.tree import ProcessTree
from elastic_aio.spec.stop import StopPlan

DAEMON = '''
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
'''
SCRIPT = '''
set -m; sleep 99 & echo $!; "$0" -I -S -c "$1"
trap "echo terminated" TERM; echo $$; while :; do sleep 99 & wait; done
'''

def become_another_program():
    os.execvp("sleep", ["sleep", "99"])

async def main():
    spawn = command_spawner(asyncio.get_running_loop())
    plan = eval(sys.argv[1])
    job = GuardedJob.create(plan)
    tree = ProcessTree(job.marker, PausableClock(), job.sessions, since=job.since)
    guardian = Guardian(job, plan, on_restarted=print, on_lost=print)
    guardian.start()
    await guardian.wait_ready()
    print(guardian.pid, flush=True)
    tree.add(await spawn(ChildSpec(
        argv=("bash", "-c", SCRIPT, sys.executable, DAEMON),
        env={**os.environ, job.marker: "1"}, cwd=None, stdin=0, stdout=1, stderr=2,
    )))
    if sys.argv[2] == "forking" and os.fork() == 0:
        os.execvp("sleep", ["sleep", "99"])  # its descriptors are closed on exec
    if sys.argv[2] == "forking" and os.fork() == 0:
        os.kill(os.getpid(), 19)  # it holds every descriptor that it inherits
    asyncio.get_running_loop().add_reader(0, become_another_program)
    await asyncio.sleep(99)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "end"), [("plain", "kill"), ("forking", "exec")])
def test_the_end_of_a_supervisor_leaves_no_process(kind: str, end: str) -> None:
    """After SIGKILL and after an exec, worker, process group and daemon are gone in a second.

    A program that forks keeps only its own forks alive.
    """
    with supervised("StopPlan()", kind) as (supervisor, pids):
        pidfds = [os.pidfd_open(pid) for pid in pids]
        expected = 2 if kind == "forking" else 0
        until_sync(lambda: len(set(children_of(supervisor.pid)) - set(pids)) == expected)
        forks = set(children_of(supervisor.pid)) - set(pids)
        began = time.monotonic()
        assert supervisor.stdin is not None
        supervisor.kill() if end == "kill" else supervisor.stdin.close()
        for pidfd in pidfds:
            wait_for_end(pidfd)
        # One second is guaranteed, then the guardian ends; the host may be busy.
        assert time.monotonic() - began < 10
        assert (supervisor.poll() is None) == (end == "exec")
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == b"terminated\n", "SIGTERM came before SIGKILL"
        for fork in forks:
            pidfd = os.pidfd_open(fork)
            os.kill(fork, signal.SIGKILL)
            wait_for_end(pidfd)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["StopPlan.within(0)", "StopPlan(guardian_grace=0)"])
def test_a_plan_without_a_grace(plan: str) -> None:
    """SIGKILL is the first signal then."""
    with supervised(plan, "plain") as (supervisor, pids):
        pidfds = [os.pidfd_open(pid) for pid in pids]
        supervisor.kill()
        for pidfd in pidfds:
            wait_for_end(pidfd)
        assert supervisor.stdout is not None
        assert supervisor.stdout.read() == b""


@contextmanager
def supervised(plan: str, kind: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Yield a supervisor, and the pids of its guardian and of what its worker consists of."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, plan, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    bystander = subprocess.Popen(["sleep", "99"], start_new_session=True)
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    try:
        yield supervisor, [int(supervisor.stdout.readline()) for _ in range(4)]
        assert bystander.poll() is None
    finally:
        for process in (bystander, supervisor):
            process.kill()
            process.wait()
        supervisor.stdin.close()
        supervisor.stdout.close()


def children_of(pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_guardian_is_small() -> None:
    """Its interpreter loads no large module: there is one for every program."""
    main = ROOT / "elastic_aio" / "process" / "guardian_main.py"
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(main.parent)!r})\n"
        "import guard\n"
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


def test_a_scan_of_the_guardian_has_time_to_wait_for_an_exec() -> None:
    main = ROOT / "elastic_aio" / "process" / "guardian_main.py"
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(main.parent)!r})\n"
        "import descendants, guard\n"
        "def scan(*_):\n"
        "    yield 0.1\n"
        "    return []\n"
        "descendants.Scanner.find = scan\n"
        "began = time.monotonic()\n"
        "found = guard.Job(b'', 0, {}, 1).find_descendants(None)\n"
        "sys.exit(found != [] or time.monotonic() - began < 0.1)\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)


SLOW_SCANS = """
import sys
sys.path.insert(0, sys.argv[1])
import _signal, guard, proc
class Clock:
    now = 0.0
    def monotonic(self):
        self.now += float(sys.argv[2])
        return self.now
    def sleep(self, seconds):
        self.now += seconds
alive, sent = [proc.ProcEntry(7, 1, 7, 0, "T")], []
def scan(self, snapshot):
    guard.time.now += float(sys.argv[3])
    return list(alive)
def send(process, number):
    sent.append(number)
    if number == _signal.SIGCONT:
        process.state = "S"
    if number == _signal.SIGKILL:
        alive.clear()
guard.time, guard.Job.find_descendants = Clock(), scan
proc.signal_process = send
steps = guard.Job(b"", 0, {}, 1).end(_signal.SIGTERM, 0.5, True)
try:
    next(steps)
    while True:
        guard.time.sleep(steps.send(object()))
except StopIteration as end:
    sys.exit(not end.value or sent != [_signal.SIGTERM, _signal.SIGCONT, _signal.SIGKILL])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("reading", "scan"), [(0, 0), (0, 0.3), (0.3, 0), (12, 0), (0, 12)])
def test_a_slow_host_does_not_end_the_guardian_too_early(reading: float, scan: float) -> None:
    """A scan, or the time between two lines, takes longer than what the guardian waits for."""
    main = ROOT / "elastic_aio" / "process"
    command = [sys.executable, "-I", "-S", "-c", SLOW_SCANS, str(main), str(reading), str(scan)]
    subprocess.run(command, check=True, timeout=60)


# A launcher whose worker is a file on which another process has a lease.
LAUNCHER = """
import sys
from elastic_aio import LaunchSpec, LogSpec, run
run(LaunchSpec([sys.argv[1], "99"], logs=LogSpec(log_dir="/dev/null")))
"""


@contextmanager
def slow_to_execute(path: Path) -> Iterator[Callable[[], None]]:
    """Let every exec of a file wait, as on a slow file system; yield what waits for an exec.

    A write lease delays an open until its holder gives it up, which a signal asks for
    (F_SETLEASE of fcntl(2)); the kernel takes it away after 45 s.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
    descriptor = os.open(path, os.O_RDONLY)

    def wait_for_exec() -> None:
        assert signal.sigtimedwait([signal.SIGIO], GUARD) is not None, "it is not executed"

    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield wait_for_exec
    finally:
        os.close(descriptor)
        signal.sigtimedwait([signal.SIGIO], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@pytest.mark.slow
def test_a_worker_whose_exec_takes_long_ends_too(tmp_path: Path) -> None:
    """It has neither a session on the list nor the marker when its launcher is killed."""
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    with running([sys.executable, "-c", LAUNCHER, str(program)]) as launcher:
        with slow_to_execute(program) as wait_for_exec:
            wait_for_exec()
            launcher.send(signal.SIGKILL)
            assert launcher.wait() == 128 + signal.SIGKILL
            time.sleep(1)  # this long the exec takes; the guardian has nothing to report
        until_sync(lambda: not leaked_processes(), "the end of the worker", 10)


@pytest.mark.slow
def test_a_stranger_with_the_launchers_interpreter_holds_no_guardian(tmp_path: Path) -> None:
    """The guardian waits for forks of its launcher only, not for programs of the same file."""
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    with running([sys.executable, "-c", LAUNCHER, str(program)]) as launcher:
        with slow_to_execute(program) as wait_for_exec:
            wait_for_exec()
            stranger = subprocess.Popen(
                [sys.executable, "-c", "print(flush=True); input()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert stranger.stdout is not None
            stranger.stdout.readline()  # it has executed its program
            launcher.send(signal.SIGKILL)
            assert launcher.wait() == 128 + signal.SIGKILL
        until_sync(lambda: set(leaked_processes()) == {stranger.pid}, "the end of the worker", 10)
        stranger.communicate(b"\n")


# ------------------------------------------------------- what workers need to save

# A launcher whose workers have 60 s to save when it is killed.  At the end of its stdin it
# becomes another program.
SAVING = """
import asyncio, os, sys
from elastic_aio import LaunchSpec, StopPlan, launch
async def main():
    become = lambda: os.execv("/bin/sleep", ["sleep", "99"])
    asyncio.get_running_loop().add_reader(0, become)
    plan = StopPlan([("SIGTERM", 60)], guardian_grace=60, scope=os.environ.get("SCOPE", "leaders"))
    await launch(LaunchSpec(sys.argv[1:], stop=plan))
asyncio.run(main())
"""


@contextmanager
def launched(directory: Path, *worker: str, **env: str) -> Iterator[Running]:
    """Run a launcher whose worker notes in files of a directory."""
    argv = [sys.executable, "-c", SAVING, *worker]
    environment = {"NOTES": str(directory), **env}
    with running(argv, env=environment, cwd=directory, stdin_pipe=True) as launcher:
        yield launcher
    until_sync(lambda: not leaked_processes(), "the end of the worker and of the guardian")


def end(launcher: Running, how: str) -> None:
    """Kill a launcher, or let it become another program."""
    if how == "kill":
        launcher.send(signal.SIGKILL)
        launcher.wait()
    else:
        assert launcher.process.stdin is not None
        launcher.process.stdin.close()


def guardian_of(launcher: Running) -> int:
    """Return the pid of the guardian of a launcher, which runs."""
    (pid,) = (pid for pid, line in leaked_processes().items() if "guardian_main.py" in line)
    assert pid in children_of(launcher.pid)
    return pid


def wait_for_scans(guardian: int, count: int = 5) -> None:
    """Wait until a guardian, which sleeps after each scan, has scanned so many times more."""

    def sleeps() -> int:
        lines = Path(f"/proc/{guardian}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("voluntary_ctxt_switches"))
        return int(line.split()[1])

    before = sleeps()
    until_sync(lambda: sleeps() >= before + count, "scans of the guardian")


REDIRECTED = 'exec "$@" > "$NOTES/lines"'


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exec"])
@pytest.mark.parametrize("kind", ["child", "session", "daemon", "once", "below a shell"])
def test_a_helper_gets_the_signal_of_the_guardian_after_its_leader(
    kind: str, how: str, tmp_path: Path
) -> None:
    """Each gets it once; the leader of a shell's session is what the shell leaves."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    is_below = kind == "below a shell"
    script = f"({REDIRECTED}); true" if is_below else REDIRECTED
    worker = holder("child" if is_below else kind, gate)
    lines = tmp_path / "lines"

    def printed() -> list[str]:
        return lines.read_text().splitlines() if lines.exists() else []

    with launched(tmp_path, "sh", "-c", script, "sh", *worker) as launcher:
        until_sync(lambda: len(printed()) == 2, "the start of the worker")
        guardian = guardian_of(launcher)
        end(launcher, how)
        until_sync(lambda: len(printed()) == 3, "a signal")
        wait_for_scans(guardian)
        assert printed()[2:] == ["leader SIGTERM"]
        with gate.open("w"):
            pass
        until_sync(lambda: not alive(guardian), "the end of the guardian")
        assert printed()[3:] == ["served", "helper SIGTERM after"]


@pytest.mark.slow
def test_a_plan_for_all_is_the_guardians_too(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    worker = ["sh", "-c", REDIRECTED, "sh", *holder("all")]
    with launched(tmp_path, *worker, SCOPE="all") as launcher:
        until_sync(lambda: lines.exists() and lines.read_text().count("\n") == 2, "the worker")
        launcher.send(signal.SIGKILL)
        until_sync(lambda: not leaked_processes(), "the end of the worker and of the guardian")
    assert sorted(lines.read_text().splitlines()[2:]) == ["helper SIGTERM before", "leader SIGTERM"]


# Prints 4 MB while it saves.
TALKING = """
import os, signal, sys, time
notes = os.environ["NOTES"]
def save(*_):
    for number in range(400):
        os.write(int(sys.argv[1]), b"x" * 9999 + b"\\n")
    with open(notes + "/saving", "w") as file:
        file.write("whole")
    os.rename(notes + "/saving", notes + "/saved")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
open(notes + "/up", "w").close()
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "exec"])
@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_worker_may_print_while_it_saves_after_its_launcher(
    stream: str, how: str, tmp_path: Path
) -> None:
    """The launcher was the reader of its captured streams: neither SIGPIPE nor a full pipe."""
    with launched(tmp_path, sys.executable, "-S", "-c", TALKING, stream) as launcher:
        until_sync((tmp_path / "up").exists, "the start of the worker")
        end(launcher, how)
        until_sync((tmp_path / "saved").exists, "a checkpoint")
        assert (launcher.process.poll() is None) == (how == "exec")
    assert (tmp_path / "saved").read_text() == "whole"


@pytest.mark.slow
def test_a_guardian_that_was_restarted_keeps_the_pipes(tmp_path: Path) -> None:
    """They are on the way to any guardian, and the first one took none."""
    with launched(tmp_path, sys.executable, "-S", "-c", TALKING, "2") as launcher:
        until_sync((tmp_path / "up").exists, "the start of the worker")
        former = guardian_of(launcher)
        os.kill(former, signal.SIGKILL)

        def others() -> list[int]:
            return [
                pid
                for pid, line in leaked_processes().items()
                if "guardian_main.py" in line and pid != former
            ]

        (successor,) = until_sync(others, "another guardian")
        until_sync(lambda: sleeps_in_lock(successor), "a guardian that works")
        launcher.send(signal.SIGKILL)
        until_sync((tmp_path / "saved").exists, "a checkpoint")


def sleeps_in_lock(pid: int) -> bool:
    """Return whether a guardian waits for the lock of its session list (proc_locks(5))."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("->" in words and str(pid) in words for words in locks)


# ------------------------------------------------------------------ kept pipes


def is_read(writer: int) -> bool:
    """Return whether a pipe has a reader; it gets a byte then."""
    try:
        os.write(writer, b"x")
    except BrokenPipeError:
        return False
    return True


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the reader, which the test closes, and the writer of a pipe."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)


def test_kept_pipes_have_a_reader(pipe: tuple[int, int]) -> None:
    """Until they are replaced by others, or by none; no descriptor is left."""
    reader, writer = pipe
    before = open_descriptors()
    kept = KeptPipes()
    own = open_descriptors()
    kept.replace(1, [])
    kept.replace(1, [reader])
    assert open_descriptors() == own, "they are on the way"
    kept.replace(1, [reader, reader])
    os.close(reader)
    assert is_read(writer)
    other_reader, other_writer = os.pipe()
    kept.replace(1, [other_reader])
    os.close(other_reader)
    assert not is_read(writer)
    assert is_read(other_writer)
    kept.replace(1, [])
    assert not is_read(other_writer)
    os.close(other_writer)
    kept.close()
    kept.close()
    assert open_descriptors().keys() == before.keys() - {reader}


def test_each_owner_has_pipes_of_its_own() -> None:
    """Those of others stay, also when this process has closed them or used the number again."""
    kept = KeptPipes()
    pipes = {owner: os.pipe() for owner in range(1, 6)}
    own = open_descriptors()
    for owner, (reader, _) in pipes.items():
        kept.replace(owner, [reader])
        os.close(reader)
    for owner in (3, 1, 5):
        for _ in range(2):
            kept.replace(owner, ())
        _, writer = pipes.pop(owner)
        assert not is_read(writer)
        os.close(writer)
        assert all(is_read(writer) for _, writer in pipes.values())
    assert len(open_descriptors()) == len(own) - 5 - 3
    kept.close()
    for _, writer in pipes.values():
        assert not is_read(writer)
        os.close(writer)


def test_closing_releases_kept_pipes(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    kept = KeptPipes()
    kept.replace(1, [reader])
    os.close(reader)
    assert is_read(writer)
    kept.close()
    assert not is_read(writer)


MANY = 600


def test_more_pipes_than_a_message_takes(pipe: tuple[int, int]) -> None:
    """All of them are kept, and released."""
    reader, writer = pipe
    own = open_descriptors()
    kept = KeptPipes()
    pipes = [os.pipe() for _ in range(3)]
    last_reader, last_writer = pipes[-1]
    kept.replace(1, [*[reader] * (MANY - 3), *(item for item, _ in pipes)])
    for item in (reader, *(item for item, _ in pipes)):
        os.close(item)
    assert is_read(writer)
    assert is_read(last_writer)
    kept.replace(2, [])
    assert is_read(writer)
    assert is_read(last_writer)
    kept.replace(1, [])
    assert not any(is_read(item) for item in (writer, *(item for _, item in pipes)))
    kept.close()
    for _, item in pipes:
        os.close(item)
    assert open_descriptors().keys() == own.keys() - {reader}
    assert last_reader not in open_descriptors()


def test_more_owners_than_a_socket_takes_messages() -> None:
    """The pipes of all are kept, also of those that come after many have ended."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 4 * MANY), limit[1]))
    own = open_descriptors()
    kept = KeptPipes()
    writers: dict[int, int] = {}

    def add(owner: int) -> None:
        reader, writers[owner] = os.pipe()
        kept.replace(owner, [reader])
        os.close(reader)

    for owner in range(MANY):
        add(owner)
    for owner in range(0, MANY, 2):
        kept.replace(owner, [])
    assert [owner for owner, writer in writers.items() if is_read(writer)] == [*range(1, MANY, 2)]
    for owner in range(0, MANY, 2):
        os.close(writers[owner])
        add(owner)
    assert all(map(is_read, writers.values()))
    kept.close()
    for writer in writers.values():
        assert not is_read(writer)
        os.close(writer)
    assert open_descriptors() == own
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_further_owner_takes_no_descriptors() -> None:
    """A program that has few left would lose the pipes of the others."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = KeptPipes()
    writers = []
    for owner in range(60):
        reader, writer = os.pipe()
        kept.replace(owner, [reader])
        os.close(reader)
        writers.append(writer)
    reader, writer = os.pipe()
    os.close(free := os.dup(writer))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, limit[1]))
    try:
        kept.replace(60, [reader])
        kept.replace(60, [])
        os.close(reader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert all(map(is_read, writers))
    assert not is_read(writer)
    kept.close()
    for each in (*writers, writer):
        os.close(each)


RECEIVING = """
import os, sys
sys.path.insert(0, sys.argv[1])
import guard
pipes = guard._receive_pipes(int(sys.argv[2]))
for pipe in pipes:
    guard._drain(pipe)
print(len(set(pipes)), sum(map(os.get_inheritable, pipes)))
"""


def test_a_guardian_receives_all_pipes(pipe: tuple[int, int]) -> None:
    """It reads what is in them, and waits for nothing."""
    reader, writer = pipe
    os.set_blocking(reader, False)  # as those of a relay are
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    kept = KeptPipes()
    kept.replace(1, [reader] * 100)
    kept.replace(2, [reader] * (MANY - 100))
    os.close(reader)
    main = ROOT / "elastic_aio" / "process"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", RECEIVING, str(main), str(kept.descriptor)],
        pass_fds=[kept.descriptor],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{MANY} 0\n"
    assert not is_read(writer), "the guardian had all of them, and has ended"
    kept.close()
