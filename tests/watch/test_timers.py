"""Timers of real workers."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import Agent, HostError, JobFailed, LaunchSpec, SpecError, launch
from elastic_aio.events import Event, TimerExpired, TimerRejected
from elastic_aio.process.tree import ProcessTree
from elastic_aio.watch.timer_pipe import TimerRequests
from elastic_aio.worker import expires
from tests.support.cli import run_cli

# Sleeps in the block on the first attempt.
STUCK = """
import os, sys, time
from elastic_aio.watch.timer_pipe import TimerRequests
from elastic_aio.worker import expires
os.environ["TORCHELASTIC_TIMER_FILE"]
with expires(60, "outer"):
    with expires(float(sys.argv[1]), "step"):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(99)
"""


def python(code: str, *args: str) -> list[str]:
    return [sys.executable, "-c", code, *args]


async def run_job(argv: list[str], **settings: Any) -> tuple[list[Event], JobFailed | None]:
    events: list[Event] = []
    try:
        await launch(LaunchSpec(argv, timers=True, **settings), listeners=[events.append])
    except JobFailed as error:
        return events, error
    return events, None


@pytest.mark.slow
@pytest.mark.both_loops
async def test_an_expired_timer_ends_the_worker() -> None:
    """The reason names the timer, and the restart policy applies."""
    events, error = await run_job(python(STUCK, "0.1"), nproc_per_node=2)
    assert error is not None
    root = error.root_cause
    assert root is not None
    assert root.status.signal == signal.SIGKILL
    assert root.message.startswith("timer 'step' expired after ")
    assert root.message.endswith(" s (limit 0.1 s)")
    assert "timer 'step' expired" in root.summary
    expired = [event for event in events if isinstance(event, TimerExpired)]
    assert root.pid in {event.pid for event in expired}
    assert {(event.scope, event.signal) for event in expired} == {("step", 9)}
    events, error = await run_job(python(STUCK, "0.1"), max_restarts=1)
    assert error is None


@pytest.mark.slow
async def test_a_block_that_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe is removed at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import time; from elastic_aio.worker import expires\n"
        "with expires(1.0): pass\ntime.sleep(1.2)"
    )
    events, error = await run_job(python(code))
    assert error is None
    assert not [event for event in events if isinstance(event, TimerExpired)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_a_process_below_the_worker() -> None:
    """It and the worker are ended, although the worker ignores the end of the process."""
    code = (
        "import os, sys, time; from elastic_aio.worker import expires\n"
        "if '--setsid' in sys.argv: os.setsid()\n"
        "with expires(0.05, 'below'): time.sleep(99)"
    )
    for option in ("", "--setsid"):
        script = '"$0" -c "$1" "$2"; sleep 99'
        _, error = await run_job(["bash", "-c", script, sys.executable, code, option])
        assert error is not None
        assert error.root_cause is not None
        assert "timer 'below' expired" in error.root_cause.message


async def test_hostile_bytes() -> None:
    """They are reported once, a process of others is not signalled, and the timers work."""
    victim = await asyncio.create_subprocess_exec("sleep", "99")
    line = (
        f'{{"pid": {victim.pid}, "scope_id": "x", "expiration_time": 1, "signal": 9}}'
        f'\\n{{"pid": {os.getpid()}, "scope_id": "x", "expiration_time": 1, "signal": 9}}'
    )
    code = (
        "import os\n"
        "for text in (b'x' * 100_000, b'\\xff\\n', b'{}\\n', b'''" + line + "\n'''):\n"
        "    with open(os.environ['TORCHELASTIC_TIMER_FILE'], 'wb') as pipe: pipe.write(text)\n"
    )
    events, error = await run_job(python(code + STUCK, "0.1"))
    assert error is not None
    assert error.root_cause is not None
    assert "timer 'step'" in error.root_cause.message
    rejected = [event for event in events if isinstance(event, TimerRejected)]
    assert [event.why for event in rejected] == ["a line of more than 4096 bytes"]
    assert victim.returncode is None
    victim.kill()
    await victim.wait()


async def test_a_signal_of_the_clients_choice() -> None:
    """An error that the worker records keeps the timer as a note."""
    code = (
        "import json, os, signal, sys, time\n"
        "from elastic_aio.worker import record\n"
        "def send(scope, number):\n"
        "    request = {'pid': os.getpid(), 'scope_id': scope, 'expiration_time': time.time(),\n"
        "               'signal': number}\n"
        "    with open(os.environ['TORCHELASTIC_TIMER_FILE'], 'w') as pipe:\n"
        "        pipe.write(json.dumps(request) + '\\n')\n"
        "def stop(number, frame): raise ValueError('stopped')\n"
        "@record\n"
        "def main():\n"
        "    signal.signal(signal.SIGUSR1, stop)\n"
        "    send('loud', signal.SIGUSR1)\n"
        "    time.sleep(99)\n"
        "main()\n"
    )
    events, error = await run_job(python(code))
    assert error is not None
    assert error.root_cause is not None
    assert error.root_cause.error is not None
    assert error.root_cause.error.message == "ValueError: stopped"
    assert error.root_cause.notes[0].startswith("timer 'loud' expired")
    assert [event.signal for event in events if isinstance(event, TimerExpired)] == [10]


async def test_where_the_pipe_is(tmp_path: Path) -> None:
    """A pipe that is left there is replaced, and any other file is an error."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    code = "import os, stat; assert os.environ['TORCHELASTIC_TIMER_FILE'].endswith('/pipe')"
    await launch(LaunchSpec(python(code), timers=str(path)))
    assert not path.exists()
    path.write_text("kept")
    with pytest.raises(HostError, match=r"cannot make the pipe of the timers .*file exists"):
        await launch(LaunchSpec(python(code), timers=str(path)))
    assert path.read_text() == "kept"
    with pytest.raises(SpecError, match="timers: must be a path"):
        LaunchSpec(["true"], timers=3)  # type: ignore[arg-type]  # wrong on purpose


async def test_the_pipe_of_another_launcher(tmp_path: Path) -> None:
    """It is neither replaced while it is read from, nor removed at the end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        problem = f"cannot make the pipe of the timers at {path}: another process reads from it"
        with pytest.raises(HostError, match=f"^{problem}$"):
            await launch(LaunchSpec(["true"], timers=str(path)))
        assert os.path.samestat(path.stat(), os.fstat(reader))
    finally:
        os.close(reader)
    path.unlink()
    code = (
        "import os; path = os.environ['TORCHELASTIC_TIMER_FILE']; os.unlink(path); open(path, 'w')"
    )
    await launch(LaunchSpec(python(code), timers=str(path)))
    assert path.is_file()


async def test_many_timers_that_expire_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scan is for all of an alarm; the timer of the worker works."""
    scans = 0
    descendants = ProcessTree.descendants

    async def count(tree: ProcessTree, *args: Any) -> Any:
        nonlocal scans
        scans += 1
        return await descendants(tree, *args)

    monkeypatch.setattr(ProcessTree, "descendants", count)
    code = (
        "import json, os, time\n"
        "lines = [json.dumps({'pid': pid, 'scope_id': 's', 'expiration_time': 1, 'signal': 9})\n"
        "         for pid in [*range(4_000_000, 4_000_300), os.getpid()]]\n"
        "with open(os.environ['TORCHELASTIC_TIMER_FILE'], 'w') as pipe:\n"
        "    print(*lines, sep='\\n', end='\\n', file=pipe)\n"
        "time.sleep(99)\n"
    )
    _, error = await run_job(python(code))
    assert error is not None
    assert error.root_cause is not None
    assert "timer 's' expired" in error.root_cause.message
    assert scans < 50


@pytest.mark.both_loops
async def test_a_release_behind_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of the loop reads 4096 bytes, and a deadline waits for all that came before it."""
    sizes = []
    feed = TimerRequests.feed

    def feed_and_measure(requests: TimerRequests, data: bytes, *times: float) -> Any:
        sizes.append(len(data))
        return feed(requests, data, *times)

    monkeypatch.setattr(TimerRequests, "feed", feed_and_measure)
    code = (
        "import fcntl, json, os, termios, time\n"
        "def line(expiration): return json.dumps({'pid': os.getpid(), 'scope_id': 's',\n"
        "    'expiration_time': expiration, 'signal': 9}).encode() + b'\\n'\n"
        "pipe = os.open(os.environ['TORCHELASTIC_TIMER_FILE'], os.O_WRONLY)\n"
        "os.write(pipe, line(time.time() - 1) + b'\\n' * 60_000 + line(-1))\n"
        "while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))): time.sleep(0.01)\n"
    )
    events, error = await run_job(python(code))
    assert error is None
    assert not [event for event in events if isinstance(event, TimerExpired)]
    assert sum(sizes) > 60_000
    assert max(sizes) <= 4096


async def test_an_idle_pipe_wakes_no_one() -> None:
    """Without writers it is not at its end of file."""
    async with Agent(LaunchSpec(["sleep", "99"], timers=True)) as agent:
        async for event in agent.events():
            if type(event).__name__ == "WorkerStarted":
                break
        await asyncio.sleep(0.05)
        # The loop gives up the processor once for each time it waits.
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        await asyncio.sleep(0.2)
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
    assert waits < 20


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_TIMER_FILE", raising=False)
    with pytest.raises(HostError, match="the launcher keeps no timers"):
        expires(1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(path))
    timer = expires(1)
    assert timer.scope.endswith(f"test_timers.py#{sys._getframe().f_lineno - 1}")
    with pytest.raises(HostError, match="the launcher does not listen"), timer:
        pass


@pytest.mark.e2e
def test_the_command_line(tmp_path: Path) -> None:
    """torch's variable switches the timers on; the report names the timer."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    ended = run_cli(script, "0.1", env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert ended.code == 137
    assert "traceback : timer 'step' expired after " in ended.err
    assert "timer 'step' of rank 0" in ended.err


@pytest.mark.e2e
def test_a_launcher_inside_a_worker(tmp_path: Path) -> None:
    """It makes its own pipe, and the timers of the outer job work after its end."""
    inner = tmp_path / "inner.py"
    inner.write_text("from elastic_aio.worker import expires\nwith expires(60): pass\n")
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import os, subprocess, sys; from elastic_aio.worker import expires\n"
        "path = os.environ['TORCHELASTIC_TIMER_FILE']; before = os.stat(path).st_ino\n"
        "command = [sys.executable, '-m', 'elastic_aio', 'run', sys.argv[1]]\n"
        "with expires(600): subprocess.run(command, check=True)\n"
        "assert os.stat(path).st_ino == before\n"
        "with expires(600): print('released')\n"
    )
    ended = run_cli(outer, inner, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert ended.code == 0, ended.err
    assert "released" in ended.out
