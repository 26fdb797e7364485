"""Workers that report, and what is done about those that do not: real processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    DeadlineMissed,
    Event,
    JobFailed,
    LaunchSpec,
    LivenessSpec,
    LogSpec,
    SpecError,
    StacksDumped,
    StopEscalated,
    StopPlan,
    StopRequested,
    WorkerReady,
    WorkersIdle,
    WorkerStarted,
    WorkersUnfinished,
    launch,
)
from elastic_aio.agent import runtime
from elastic_aio.agent.liveness import Liveness
from elastic_aio.aio import PausableClock
from elastic_aio.events import AttemptFailed, MessageDropped
from elastic_aio.process.tree import ProcessTree
from elastic_aio.watch.watchdog import Watchdog
from elastic_aio.worker import interpreter
from tests.support.cli import run_cli

SAY = 'say() { printf "$1" >&$ELASTIC_AIO_NOTIFY_FD; }\n'
LONG = 60.0
"""Seconds of a deadline that no test reaches."""


def bash(script: str) -> list[str]:
    return ["bash", "-c", SAY + script]


async def run_job(
    program: Any, liveness: LivenessSpec, **settings: Any
) -> tuple[list[Event], JobFailed | None]:
    events: list[Event] = []
    try:
        await launch(LaunchSpec(program, liveness=liveness, **settings), listeners=[events.append])
    except JobFailed as error:
        return events, error
    return events, None


def missed(events: Sequence[Event]) -> list[tuple[str, int]]:
    return [(item.deadline, item.rank) for item in events if isinstance(item, DeadlineMissed)]


def ready_ranks(events: Sequence[Event]) -> list[int]:
    return sorted(item.rank for item in events if isinstance(item, WorkerReady))


@pytest.mark.slow
@pytest.mark.both_loops
async def test_a_worker_without_heartbeats_fails_the_attempt() -> None:
    """The failure names the deadline, the worker and its last status; the others are victims."""
    script = r"""
    [ $RANK = 0 ] && say STOPPING=1
    say 'READY=1\nSTATUS=all well\n'
    exec sleep 99
    """
    limits = LivenessSpec(heartbeat_timeout=0.3, ready_timeout=LONG)
    events, error = await run_job(bash(script), limits, nproc_per_node=2)
    assert error is not None
    root = error.root_cause
    assert root is not None
    assert (root.rank, root.status.code, root.is_victim) == (1, 1, False)
    assert root.message == "no heartbeat for 0.3 s (heartbeat timeout), last status 'all well'"
    assert root.message in root.summary
    (item,) = [event for event in events if isinstance(event, DeadlineMissed)]
    assert (item.deadline, item.rank, item.limit) == ("heartbeat", 1, 0.3)
    assert item.status == "all well"
    assert item.age >= 0.3 - 1e-6
    assert 1 in ready_ranks(events)
    assert [failure.is_victim for failure in error.result.failures] == [False, True]
    # The stacks are read before anything is stopped.
    names = [type(event).__name__ for event in events]
    assert names.index("DeadlineMissed") < names.index("StacksDumped")
    assert names.index("StacksDumped") < names.index("StopRequested")
    assert root.notes[0].startswith("stacks: ranks 0-1 are in system call ")


async def test_the_restart_policy_applies() -> None:
    script = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && say WATCHDOG=trigger && sleep 99; say READY=1"
    events, error = await run_job(bash(script), LivenessSpec(), max_restarts=1)
    assert error is None
    assert missed(events) == [("watchdog", 0)]
    assert ready_ranks(events) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "limits", "deadline"),
    [
        ("exec sleep 99", {"ready_timeout": 0.3}, "ready"),
        # Alive, but always in the same step.
        ("while say PROGRESS=7; do sleep 0.02; done", {"progress_timeout": 0.3}, "progress"),
        # A phase takes too long, although the worker sends heartbeats.
        (
            r"say 'PHASE=save\nPHASE_TIMEOUT_USEC=300000\n';"
            " while say WATCHDOG=1; do sleep 0.02; done",
            {"heartbeat_timeout": LONG},
            "phase",
        ),
    ],
)
async def test_other_deadlines(script: str, limits: dict[str, Any], deadline: str) -> None:
    events, error = await run_job(bash(script), LivenessSpec(**limits))
    assert error is not None
    assert missed(events) == [(deadline, 0)]


@pytest.mark.slow
async def test_deadlines_that_do_not_count() -> None:
    """During a phase with a limit, in an extension, and after STOPPING=1."""
    script = r"""
    say 'PHASE=save\nPHASE_TIMEOUT_USEC=60000000\n'
    say READY=1; sleep 0.5
    say EXTEND_TIMEOUT_USEC=60000000; say PHASE_END=save; sleep 0.5
    say STOPPING=1; sleep 0.5
    """
    limits = LivenessSpec(heartbeat_timeout=0.3, progress_timeout=0.3, ready_timeout=LONG)
    events, error = await run_job(bash(script), limits)
    assert error is None
    assert missed(events) == []


@pytest.mark.slow
async def test_a_deadline_may_only_be_reported() -> None:
    """The job goes on, and a worker that is silent again is reported again."""
    script = "for i in 1 2; do say READY=1; sleep 0.8; done"
    limits = LivenessSpec(heartbeat_timeout=0.3, ready_timeout=LONG, on_timeout="report")
    events, error = await run_job(bash(script), limits)
    assert error is None
    assert missed(events) == [("heartbeat", 0)] * 2


@pytest.mark.slow
async def test_no_deadline_counts_while_the_workers_are_stopped() -> None:
    """A worker that saves its state after SIGTERM sends no heartbeats."""
    script = "trap 'sleep 2.5; exit 0' TERM; say READY=1; while :; do sleep 0.05; done"
    events: list[Event] = []
    limits = LivenessSpec(heartbeat_timeout=2.0, ready_timeout=LONG)
    async with Agent(LaunchSpec(bash(script), liveness=limits), listeners=[events.append]) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerReady):
                await agent.stop()
    assert missed(events) == []


@pytest.mark.slow
async def test_a_blocked_event_loop_misses_no_heartbeat(tmp_path: Path) -> None:
    """What arrived before the deadline is read first, even if the loop was blocked since."""
    script = f"say READY=1; say EXTEND_TIMEOUT_USEC=60000000; touch {tmp_path}/sent; exec sleep 99"
    events: list[Event] = []
    blocked_until = time.monotonic() + 1.2

    def block(event: Event) -> None:
        events.append(event)
        if isinstance(event, WorkerStarted):
            while not (tmp_path / "sent").exists() or time.monotonic() < blocked_until:
                time.sleep(0.01)

    spec = LaunchSpec(bash(script), liveness=LivenessSpec(heartbeat_timeout=1.0))
    async with Agent(spec, listeners=[block]) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerReady):
                await agent.stop()
    assert missed(events) == []


STEPS = 3


def report_steps() -> int:
    """Report by the functions for workers; return how many messages were sent."""
    from elastic_aio import worker

    sent = [worker.ready("loading")]
    with worker.phase("load", timeout=LONG):
        sent.append(worker.heartbeat())
    sent += [worker.progress(step, total=STEPS) for step in range(STEPS)]
    return sum(sent)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
async def test_every_start_method_inherits_the_socket(method: Any) -> None:
    events: list[Event] = []
    limits = LivenessSpec(ready_timeout=LONG)
    spec = LaunchSpec(report_steps, nproc_per_node=2, start_method=method, liveness=limits)
    result = await launch(spec, listeners=[events.append])
    assert result.return_values == {0: STEPS + 2, 1: STEPS + 2}
    assert ready_ranks(events) == [0, 1]


@pytest.mark.slow
async def test_a_script_of_the_fork_server(tmp_path: Path) -> None:
    """It passes the socket on by its number, as to any program; all may speak for the worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess\n"
        "number = int(os.environ['ELASTIC_AIO_NOTIFY_FD'])\n"
        "echo = f'echo READY=1 >&{number}'\n"
        "subprocess.run(['bash', '-c', echo], pass_fds=[number], check=True)\n"
    )
    limits = LivenessSpec(notify_access="all")
    spec = LaunchSpec(str(script), start_method="forkserver", preload=["json"], liveness=limits)
    events: list[Event] = []
    await launch(spec, listeners=[events.append])
    assert ready_ranks(events) == [0]


SYSTEMD = """
import os, socket
assert os.environ["WATCHDOG_USEC"] == "60000000"
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    sock.connect("\\0" + os.environ["NOTIFY_SOCKET"][1:])
    sock.send(b"READY=1")
    reader, writer = os.pipe()  # as in sd_notify_barrier(3)
    socket.send_fds(sock, [b"BARRIER=1"], [writer])
    os.close(writer)
    assert os.read(reader, 1) == b""
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "access", "ready"),
    [
        ('exec "$0" -S -c "$1"', "main", [0, 1]),
        ('"$0" -S -c "$1"; exit $?', "main", []),
        ('"$0" -S -c "$1"; exit $?', "all", [0, 1]),
    ],
)
async def test_a_program_that_knows_systemd_only(script: str, access: Any, ready: Any) -> None:
    """It sends to the address in NOTIFY_SOCKET; from a process below the worker if all may."""
    limits = LivenessSpec(heartbeat_timeout=LONG, notify_access=access)
    events: list[Event] = []
    argv = ["bash", "-c", script, sys.executable, SYSTEMD]
    await launch(LaunchSpec(argv, liveness=limits, nproc_per_node=2), listeners=[events.append])
    assert ready_ranks(events) == ready
    dropped = [event for event in events if isinstance(event, MessageDropped)]
    assert len(dropped) == (not ready), "it is reported once"


HELPER = """
import os, sys, time
from elastic_aio.worker import heartbeat, progress, ready
if os.fork():
    progress(3)
    time.sleep(99)
for _ in range(1000):
    ready(), heartbeat(), progress(time.monotonic()), os.write(int(os.environ[
        "ELASTIC_AIO_NOTIFY_FD"]), b"STOPPING=1")
    time.sleep(0.02)
"""


async def test_only_the_worker_speaks_for_the_worker() -> None:
    """A fork that has inherited its socket reports about itself: the worker hangs."""
    limits = LivenessSpec(heartbeat_timeout=0.5)
    events, error = await run_job([sys.executable, "-c", HELPER], limits)
    assert error is not None
    assert missed(events) == [("heartbeat", 0)]
    assert ready_ranks(events) == []
    (dropped,) = [event for event in events if isinstance(event, MessageDropped)]
    (started,) = [event for event in events if isinstance(event, WorkerStarted)]
    assert dropped.pid != started.pid
    assert "is no worker (notify access: main)" in dropped.sentence


@pytest.mark.parametrize("limits", [LivenessSpec(), LivenessSpec(heartbeat_timeout=LONG)])
async def test_a_worker_that_does_not_end_after_stopping(limits: LivenessSpec) -> None:
    """It has the grace of the stop plan for its end; then the attempt fails, and restarts."""
    script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { say STOPPING=1; exec sleep 99; }"
    plan = StopPlan.within(0.4)
    events, error = await run_job(bash(script), limits, stop=plan, max_restarts=1)
    assert error is None
    assert missed(events) == [("stopping", 0)]
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert "not ended 0.4 s after STOPPING=1 (grace period)" in failed.root.summary


async def test_a_process_of_no_worker_is_ignored() -> None:
    """Any process of this user can send to the address."""
    events: list[Event] = []

    def send(event: Event) -> None:
        events.append(event)
        if isinstance(event, WorkerStarted):
            environment = Path(f"/proc/{event.pid}/environ").read_bytes().split(b"\0")
            (address,) = [text[15:] for text in environment if text.startswith(b"NOTIFY_SOCKET=@")]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"READY=1", b"\0" + address)

    limits = LivenessSpec(ready_timeout=0.5)
    with pytest.raises(JobFailed):
        await launch(LaunchSpec(["sleep", "99"], liveness=limits), listeners=[send])
    assert missed(events) == [("ready", 0)]


FLOOD = """
import os
number = int(os.environ["ELASTIC_AIO_NOTIFY_FD"])
messages = [b"STATUS=" + os.urandom(200), os.urandom(60_000), b"", b"=", b"PHASE=x\\n" * 300]
while True:
    for message in messages:
        try:
            os.write(number, message)
        except BlockingIOError:
            pass
"""


@pytest.mark.slow
@pytest.mark.both_loops
async def test_a_flood_stalls_neither_the_agent_nor_the_others() -> None:
    """The event loop goes on, and another worker misses no deadline."""
    quiet = "say READY=1; for i in 1 2 3 4 5 6 7 8 9; do say WATCHDOG=1; sleep 0.1; done; exit 3"
    script = f'{SAY} [ $RANK = 1 ] && exec "$0" -S -c "$1"; {quiet}'
    argv = ["bash", "-c", script, sys.executable, FLOOD]
    limits = LivenessSpec(heartbeat_timeout=20)
    events: list[Event] = []
    turns, before = 0, time.process_time()
    spec = LaunchSpec(argv, nproc_per_node=2, liveness=limits)
    async with Agent(spec, listeners=[events.append]) as agent:
        waiting = asyncio.ensure_future(agent.wait())
        while not waiting.done():
            await asyncio.wait([waiting], timeout=0.01)
            turns += 1
        with pytest.raises(JobFailed, match="exit code 3"):
            await waiting
    assert missed(events) == []
    assert turns > 20
    # The kernel drops most of it.
    assert time.process_time() - before < 10


async def test_a_worker_that_closes_its_socket_is_silent() -> None:
    script = "say READY=1; exec {ELASTIC_AIO_NOTIFY_FD}>&-; exec sleep 99"
    limits = LivenessSpec(heartbeat_timeout=0.3, ready_timeout=LONG)
    events, error = await run_job(bash(script), limits)
    assert error is not None
    assert missed(events) == [("heartbeat", 0)]


async def test_workers_that_end_much_later_than_the_first_fail_the_attempt() -> None:
    script = "[ $RANK = 0 ] || exec sleep 99"
    limits = LivenessSpec(exit_skew_timeout=0.3)
    events, error = await run_job(bash(script), limits, nproc_per_node=3)
    assert error is not None
    assert missed(events) == [("exit skew", 1), ("exit skew", 2)]
    assert sum(isinstance(event, StacksDumped) for event in events) == 1
    root, other = error.result.failures
    assert (root.rank, other.rank) == (1, 2)
    assert root.message == "not finished 0.3 s after the first success (exit skew timeout)"
    assert any(note.startswith("rank 0 exited with 0, 0.3") for note in root.notes)


async def test_workers_that_run_long_after_a_success_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job goes on."""
    monkeypatch.setattr(runtime, "Liveness", partial(Liveness, unfinished_after=0.2))
    spec = LaunchSpec(bash("[ $RANK = 1 ] || exec sleep 99"), nproc_per_node=3)
    events: list[Event] = []
    async with Agent(spec, listeners=[events.append]) as agent:
        async for event in agent.events():
            if isinstance(event, WorkersUnfinished):
                late = event
                break
        assert (late.finished, late.running) == (1, (0, 2))
        assert late.seconds >= 0.2 - 1e-6  # a difference of times since boot
        assert not any(isinstance(event, StopRequested) for event in events)
        await agent.stop()


@pytest.mark.slow
async def test_idle_workers_are_reported(tmp_path: Path) -> None:
    """With what each of them waits for; the job goes on."""
    logs, limits = LogSpec(log_dir=str(tmp_path)), LivenessSpec(idle_report=0.4)
    events: list[Event] = []
    spec = LaunchSpec(["sleep", "99"], nproc_per_node=2, logs=logs, liveness=limits)
    async with Agent(spec, listeners=[events.append]) as agent:
        async for event in agent.events():
            if isinstance(event, WorkersIdle):
                idle = event
                break
        assert not any(isinstance(event, StopRequested) for event in events)
        await agent.stop()
    assert [worker.rank for worker in idle.workers] == [0, 1]
    assert {worker.state for worker in idle.workers} == {"S"}
    assert idle.seconds == 0.4
    dump = next(event for event in events if isinstance(event, StacksDumped))
    assert dump.path is not None
    assert "no worker has been busy for 0.4 s" in Path(dump.path).read_text()


@pytest.mark.slow
async def test_idle_workers_are_reported_once(tmp_path: Path) -> None:
    """Also if they write their stacks for the report."""
    (tmp_path / "script.py").write_text(
        f"import sys, time\nsys.path.insert(0, {str(Path(interpreter.__file__).parent)!r})\n"
        "from interpreter import offer_stacks\noffer_stacks()\ntime.sleep(3)\n"
    )
    events: list[Event] = []
    spec = LaunchSpec(
        str(tmp_path / "script.py"), nproc_per_node=2, liveness=LivenessSpec(idle_report=0.4)
    )
    await launch(spec, listeners=[events.append])
    assert sum(isinstance(event, WorkersIdle) for event in events) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ignores", [True, False])
async def test_stacks_of_a_worker_that_has_to_be_killed(ignores: bool, tmp_path: Path) -> None:
    """They are read before SIGKILL, which they do not delay; others need none."""
    trap = "trap '' TERM; " if ignores else ""
    events: list[Event] = []
    spec = LaunchSpec(
        ["bash", "-c", f"{trap}echo; while :; do sleep 0.1; done"],
        stop=StopPlan([("SIGTERM", 1.0)]),
        logs=LogSpec(log_dir=str(tmp_path), redirects=1),
    )
    async with Agent(spec, listeners=[events.append]) as agent:
        async with agent.logs() as lines:
            await anext(lines)  # it has set the trap
        await agent.stop()
    kinds = [type(event) for event in events if isinstance(event, StacksDumped | StopEscalated)]
    assert kinds == ([StacksDumped, StopEscalated] if ignores else [])
    assert len(list(tmp_path.rglob("stacks.txt"))) == ignores


class SlowWatchdog(Watchdog):
    """Its dumps take until two deadlines are missed."""

    def __init__(self, limits: LivenessSpec) -> None:
        self.reasons: list[str] = []
        self.missed: asyncio.Queue[Event] = asyncio.Queue()
        super().__init__(
            limits,
            PausableClock(),
            self.missed.put_nowait,
            no_tree,
            directory=lambda attempt: None,
            read_messages=lambda: None,
            on_agreed=lambda attempt, change: None,
            on_progress=lambda attempt: None,
            on_excluded=lambda attempt, why: None,
            on_hung=lambda local_rank, why: self.hung.set_result(local_rank),
            on_stuck=lambda local_rank: None,
            unfinished_after=LONG,
        )
        self.hung: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def dump(self, reason: str) -> Any:
        self.reasons.append(reason)
        assert [await self.missed.get(), await self.missed.get()]


async def test_deadlines_that_end_during_a_dump_need_no_other() -> None:
    """It has the stacks of all workers."""
    watchdog = SlowWatchdog(LivenessSpec(ready_timeout=0.05))
    watchdog.add(0)
    await asyncio.sleep(0.02)
    watchdog.add(1)
    assert await watchdog.hung == 0
    await watchdog.aclose()
    assert watchdog.reasons == ["local rank 0: not ready 0.05 s after its start (ready timeout)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "busy",
    ["while :; do :; done", "while :; do echo x; sleep 0.05; done", "while sleep 0.05; do :; done"],
)
async def test_one_busy_worker_is_enough(busy: str) -> None:
    """It uses CPU time, writes, or starts processes."""
    script = f'[ $RANK = 1 ] && exec sleep 99; timeout 2 bash -c "{busy}"; exit 3'
    limits = LivenessSpec(idle_report=1.0)
    logs = LogSpec(redirects="3")
    events, error = await run_job(bash(script), limits, nproc_per_node=2, logs=logs)
    assert error is not None
    assert not [event for event in events if isinstance(event, WorkersIdle)]


def no_tree() -> ProcessTree:
    raise AssertionError("no process was started")


def liveness_of(limits: LivenessSpec, publish: Any) -> Liveness:
    spec = LaunchSpec(["true"], liveness=limits)
    liveness = Liveness(spec, PausableClock(), publish, no_tree, lambda attempt: None)
    liveness.open()
    return liveness


async def test_a_message_that_is_not_read_yet_moves_the_deadline() -> None:
    """The socket of a busy worker is read once in a period; the deadline may end before."""
    events: list[Event] = []
    liveness = liveness_of(LivenessSpec(heartbeat_timeout=0.2), events.append)
    with liveness.open_worker(0) as descriptor:
        os.write(descriptor, b"READY=1")
        await asyncio.sleep(0.01)
        os.write(descriptor, b"EXTEND_TIMEOUT_USEC=60000000")
        time.sleep(0.25)
        await asyncio.sleep(0.01)
    assert events == []
    await liveness.aclose()


async def test_a_message_that_comes_before_the_start_is_known() -> None:
    """A worker may report while its start is still being awaited."""
    events: list[Event] = []
    liveness = liveness_of(LivenessSpec(), events.append)
    records: dict[int, Any] = {}
    liveness.begin_attempt(0, records)
    excluded: list[str] = []
    liveness.on_excluded = lambda attempt, why: excluded.append(why)
    with liveness.open_worker(0) as descriptor:
        os.write(descriptor, b"READY=1\nEXCLUDE=bad GPU")
    await asyncio.sleep(0.01)
    ranks = SimpleNamespace(rank=5, local_rank=0)
    records[0] = SimpleNamespace(ranks=ranks, pid=7, started_at=0.0, is_running=True, report=None)
    assert events == []
    liveness.on_started(records[0])
    assert ready_ranks(events) == [5]
    assert excluded == ["rank 5: bad GPU"]
    await liveness.aclose()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heartbeat_timeout": 0}, "liveness.heartbeat_timeout: must be a number above 0 (got 0)"),
        ({"exit_skew_timeout": 0}, "liveness.exit_skew_timeout: must be a number above 0 (got 0)"),
        ({"idle_report": float("nan")}, "liveness.idle_report: must be a number above 0 (got nan)"),
        ({"on_timeout": "kill"}, "liveness.on_timeout: must be 'fail' or 'report' (got 'kill')"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        LivenessSpec(**settings)
    assert str(caught.value) == message


@pytest.mark.e2e
def test_the_command_line(tmp_path: Path) -> None:
    """The report names the deadline, and the directory of the logs has the stacks."""
    script = tmp_path / "script.sh"
    script.write_text("echo PROGRESS=3 >&$ELASTIC_AIO_NOTIFY_FD; exec sleep 99\n")
    logs = tmp_path / "logs"
    options = ["--no-python", "--heartbeat-timeout=60", "--progress-timeout=1"]
    ended = run_cli(*options, f"--log-dir={logs}", "bash", script)
    assert ended.code == 1
    assert "no progress for 1 s (progress timeout), at step 3" in ended.err
    assert "stacks: rank 0 is in system call" in ended.err
    assert list(logs.rglob("stacks.txt"))
    ended = run_cli("--no-python", "--ready-timeout=0.2", "--on-timeout=report", "sleep", "0.5")
    assert ended.code == 0
    assert "not ready 0.2 s after its start (ready timeout)" in ended.err
    wrong = run_cli("--idle-report=x", "true")
    assert wrong.code == 2
    assert "--idle-report: must be a number of seconds above 0 (got 'x')\n" in wrong.err
    wrong = run_cli("--on-timeout=kill", "true")
    assert wrong.code == 2
    assert "--on-timeout: must be 'fail' or 'report' (got 'kill')\n" in wrong.err


@pytest.mark.slow
async def test_many_workers_report_at_once() -> None:
    """No message of a worker that ends right after it is lost."""
    script = "import os; os.write(int(os.environ['ELASTIC_AIO_NOTIFY_FD']), b'READY=1')"
    events: list[Event] = []
    spec = LaunchSpec([sys.executable, "-S", "-c", script], nproc_per_node=32)
    await launch(spec, listeners=[events.append])
    assert ready_ranks(events) == list(range(32))


def test_a_late_report_needs_no_free_descriptor(tmp_path: Path) -> None:
    """The watchdog is made by the first message; the program may have used them up by then."""
    code = """if True:
        import asyncio, os, resource, sys
        from contextlib import suppress
        from elastic_aio import Agent, LaunchSpec, WorkerReady, WorkerStarted
        from elastic_aio.agent.later import missing_modules

        async def take_all():
            while any(missing_modules()):  # the job is not idle yet
                await asyncio.sleep(0.01)
            while True:
                with suppress(OSError):
                    while True:
                        taken.append(os.open("/dev/null", os.O_RDONLY))
                is_full.set()
                await asyncio.sleep(0)

        async def main():
            fifo = sys.argv[1]
            os.mkfifo(fifo)
            gate = os.open(fifo, os.O_RDWR)
            report = "for i in 1 2 3; do printf READY=1 >&$ELASTIC_AIO_NOTIFY_FD; done"
            spec = LaunchSpec(["bash", "-c", f"read < {fifo}; {report}; read < {fifo}"])
            async with Agent(spec, listeners=[events.append]) as agent:
                async for event in agent.events():
                    if isinstance(event, WorkerStarted):
                        taking = asyncio.create_task(take_all())
                        await is_full.wait()
                        os.write(gate, b"\\n")
                    if isinstance(event, WorkerReady):
                        break
                taking.cancel()
                for descriptor in taken:  # the end of the job looks through /proc
                    os.close(descriptor)
                os.write(gate, b"\\n")
                await agent.wait()

        events, taken, is_full = [], [], asyncio.Event()
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        asyncio.run(main())
        print(*(type(event).__name__ for event in events))
    """
    argv = [sys.executable, "-c", code, str(tmp_path / "fifo")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    names = "JobStarted WorkerStarted WorkerReady WorkerExited JobFinished"
    assert done.stdout.split() == names.split()
