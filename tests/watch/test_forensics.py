"""What workers are doing: dumps of real processes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Event,
    JobFailed,
    LaunchSpec,
    LivenessSpec,
    LogSpec,
    StackDump,
    StacksDumped,
    WorkerReady,
    launch,
)
from elastic_aio.watch.forensics import Target, read_stacks
from elastic_aio.worker.interpreter import STACKS_SIGNAL

LONG = 60.0


async def dump_when_ready(spec: LaunchSpec, count: int = 1) -> StackDump:
    """Return a dump of a job whose workers report READY=1; they still run after it."""
    waiting = count
    async with Agent(spec) as agent:
        async for event in agent.events():
            waiting -= isinstance(event, WorkerReady)
            if not waiting:
                break
        dump = await agent.dump("for a test")
        assert len(agent.forward_signal("SIGCONT")) == count
        await agent.stop(signal="SIGKILL")
    return dump


def functions(dump: StackDump, rank: int = 0) -> list[str]:
    thread = dump.workers[rank].main_thread
    return [] if thread is None else [frame.function for frame in thread.frames]


def hang_with_the_gil() -> None:
    """Hang in native code that does not release the GIL, beside another thread."""
    import ctypes
    import threading

    from elastic_aio import worker

    def other() -> None:
        worker.ready()
        ctypes.PyDLL(None).sleep(99)

    threading.Thread(target=other).start()
    threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
async def test_functions_that_hang_with_the_gil(method: Any) -> None:
    """Every thread is seen, although no Python code can run in the process."""
    dump = await dump_when_ready(LaunchSpec(hang_with_the_gil, start_method=method))
    (worker,) = dump.workers
    assert worker.source == "faulthandler"
    assert "hang_with_the_gil" in functions(dump)
    assert any("other" in [frame.function for frame in item.frames] for item in worker.threads[:-1])


SCRIPT = """
import os, sys, time
def report():
    os.write(int(os.environ["ELASTIC_AIO_NOTIFY_FD"]), b"READY=1")
if "library" in sys.argv:
    from elastic_aio.worker import ready as report
def stuck():
    report()
    while True:
        time.sleep(99)
stuck()
"""


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({"start_method": "forkserver"}, "faulthandler"),
        ({"args": ["library"]}, "faulthandler"),
        ({"liveness": LivenessSpec(ready_timeout=LONG)}, "faulthandler"),
        ({}, ""),
    ],
)
async def test_scripts(
    settings: dict[str, Any], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has not offered its stacks has the reason in their place, and lives on."""
    monkeypatch.setenv("PATH", "/nonexistent")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    logs = LogSpec(log_dir=str(tmp_path / "logs"), redirects="3")
    dump = await dump_when_ready(LaunchSpec(str(script), logs=logs, **settings))
    (worker,) = dump.workers
    assert worker.source == source
    if source:
        assert "stuck" in functions(dump)
    else:
        remedy = "py-spy is not installed (see `aio-elastic help hangs`)"
        assert worker.note == f"the worker offers none, and {remedy}"


@pytest.mark.slow
async def test_py_spy_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in prints what the real one prints; one that fails is quoted."""
    spy = tmp_path / "py-spy"
    frames = '[{"name": "stuck", "filename": "script.py", "line": 7}]'
    text = f'[{{"thread_id": 1, "thread_name": "MainThread", "frames": {frames}}}]'
    spy.write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "dump --json --pid" ] || exit 9\n'
        f"""[ $4 = "$(cat pid)" ] || exit 9\necho '{text}'\n"""
    )
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    ready = 'import os; os.write(int(os.environ["ELASTIC_AIO_NOTIFY_FD"]), b"READY=1")'
    code = f'import os, time; open("pid", "w").write(str(os.getpid())); {ready}; time.sleep(99)'
    dump = await dump_when_ready(LaunchSpec([sys.executable, "-S", "-c", code]))
    assert (dump.workers[0].source, functions(dump)) == ("py-spy", ["stuck"])
    spy.write_text("#!/bin/sh\necho 'Permission denied' >&2\n")
    dump = await dump_when_ready(LaunchSpec([sys.executable, "-S", "-c", code]))
    assert dump.workers[0].note == "py-spy: Permission denied"
    spy.write_text("#!/bin/sh\nexec sleep 99\n")
    dump = await dump_when_ready(LaunchSpec([sys.executable, "-S", "-c", code]))
    assert dump.workers[0].note == "py-spy takes too long"


@pytest.mark.slow
async def test_py_spy_itself() -> None:
    """Where it is installed, and may look into the process."""
    if shutil.which("py-spy") is None:
        pytest.skip("py-spy is not installed")
    ready = 'import os; os.write(int(os.environ["ELASTIC_AIO_NOTIFY_FD"]), b"READY=1")'
    code = f"import time\ndef stuck():\n    {ready}\n    time.sleep(99)\nstuck()"
    dump = await dump_when_ready(LaunchSpec([sys.executable, "-S", "-c", code]))
    (worker,) = dump.workers
    if "ermission" in worker.note:
        pytest.skip(worker.note)
    assert (worker.source, functions(dump)[-2:]) == ("py-spy", ["stuck", "<module>"])


async def test_other_programs_are_never_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that would die of the signal, nor those that use it themselves."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without py-spy
    code = (
        "import os, signal, time\n"
        f"signal.signal({STACKS_SIGNAL}, lambda *_: os._exit(1))\n"
        'os.write(int(os.environ["ELASTIC_AIO_NOTIFY_FD"]), b"READY=1")\n'
        "time.sleep(99)\n"
    )
    script = "echo READY=1 >&$ELASTIC_AIO_NOTIFY_FD; exec sleep 99"
    argv = ["bash", "-c", f'[ $RANK = 1 ] && exec "$0" -S -c "$1"; {script}']
    spec = LaunchSpec([*argv, sys.executable, code], nproc_per_node=2)
    dump = await dump_when_ready(spec, 2)
    assert [worker.source for worker in dump.workers] == ["", ""]


@pytest.mark.slow
async def test_a_suspended_worker_does_not_delay_the_dump() -> None:
    """It answers when it goes on; the kernel's view remains."""
    spec = LaunchSpec(hang_with_the_gil, nproc_per_node=2)
    waiting = 2
    async with Agent(spec) as agent:
        async for event in agent.events():
            waiting -= isinstance(event, WorkerReady)
            if not waiting:
                break
        (pid, _) = agent.forward_signal("SIGCONT")
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        dump = await agent.dump()
        await agent.stop(signal="SIGKILL")
    first = next(worker for worker in dump.workers if worker.pid == pid)
    (other,) = [worker for worker in dump.workers if worker.pid != pid]
    assert (first.state, first.source, other.source) == ("T", "", "faulthandler")
    assert "is suspended" in dump.summary


def wait_or_load() -> None:
    from elastic_aio.worker import WorkerContext

    if WorkerContext.from_env().rank == 3:
        load_batch()
    else:
        all_reduce()


def all_reduce() -> None:
    from elastic_aio.worker import ready

    ready("up")
    time.sleep(99)


def load_batch() -> None:
    from elastic_aio.worker import ready

    ready("up")
    time.sleep(99)


@pytest.mark.slow
async def test_the_dump_of_several_workers(tmp_path: Path) -> None:
    """In the order of ranks, in a file of the attempt, and in an event."""
    events: list[Event] = []
    logs = LogSpec(log_dir=str(tmp_path))
    spec = LaunchSpec(wait_or_load, nproc_per_node=4, logs=logs)
    waiting = 4
    async with Agent(spec, listeners=[events.append]) as agent:
        async for event in agent.events():
            waiting -= isinstance(event, WorkerReady)
            if not waiting:
                break
        dump = await agent.dump("for a test")
        for _ in range(50):
            again = await agent.dump("once more")
            if again.summary.startswith("ranks 0-2 are in all_reduce (test_forensics.py:"):
                break  # all of them sleep
        await agent.stop(signal="SIGKILL")
    assert [worker.rank for worker in dump.workers] == [0, 1, 2, 3]
    assert all("all_reduce" in functions(dump, rank) for rank in range(3))
    assert "load_batch" in functions(dump, 3)
    assert {worker.status for worker in dump.workers} == {"up"}
    assert again.summary.startswith("ranks 0-2 are in all_reduce (test_forensics.py:")
    assert ", rank 3 is in load_batch (test_forensics.py:" in again.summary
    assert dump.path == again.path
    assert dump.path is not None
    assert stat.S_ISREG(os.stat(dump.path).st_mode)
    text = Path(dump.path).read_text()
    assert again.summary in text
    assert text.index("rank 0 (local rank 0") < text.index("rank 3 (local rank 3")
    found = [event for event in events if isinstance(event, StacksDumped)]
    assert [event.why for event in found[:2]] == ["for a test", "once more"]
    assert found[-1].summary == again.summary


@pytest.mark.slow
async def test_an_expired_timer_shows_what_the_worker_did() -> None:
    """Its stacks are read before it is killed."""
    code = (
        "import time; from elastic_aio.worker import expires\n"
        "def slow(): time.sleep(99)\n"
        "with expires(0.2, 'step'): slow()"
    )
    with pytest.raises(JobFailed) as caught:
        await launch(LaunchSpec([sys.executable, "-c", code], timers=True))
    root = caught.value.root_cause
    assert root is not None
    assert root.message.startswith("timer 'step' expired after ")
    assert root.notes[0].startswith("stacks: rank 0 is in ")


def test_a_process_that_has_ended() -> None:
    (worker,) = read_stacks([Target(0, 0, 1 << 22)])
    assert (worker.state, worker.source, worker.threads) == ("", "", ())
    assert read_stacks([]) == ()
