"""The fork server and its preloaded modules: stopped in time, with all that they start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import (
    Agent,
    Event,
    JobFailed,
    JobStopped,
    LaunchSpec,
    Restarting,
    StopEscalated,
    StopPlan,
    WorkerStarted,
    launch,
)
from elastic_aio.agent import worker_group
from elastic_aio.multiprocessing import start_processes
from tests.support import functions
from tests.support.children import DEADLINE_S, noted, until, until_sync
from tests.support.cli import running, running_cli
from tests.support.leaks import alive, leaked_processes
from tests.support.restarts import AT_ONCE

LONG = StopPlan.within(1000)
SHORT = StopPlan.within(0.2)

NOTE = """
import os
def note(name, pid=None):
    with open(f"{NOTES}/.{name}", "w") as file:
        file.write(str(pid or os.getpid()))
    os.rename(f"{NOTES}/.{name}", f"{NOTES}/{name}")
"""
# Each import is noted, and never ends.
ENDLESS = NOTE + "import signal, time\nnote(0)\nwhile True: time.sleep(99)\n"
IGNORING = (
    NOTE + "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nnote(0)\ntime.sleep(99)\n"
)
# In the session of the server, with and without an environment, and in one of its own.
HELPERS = (
    NOTE
    + """
import subprocess
sleep = ["sleep", "99"]
note(0, subprocess.Popen(sleep).pid)
note(1, subprocess.Popen(sleep, env={}).pid)
note(2, subprocess.Popen(sleep, start_new_session=True).pid)
note(3, subprocess.Popen(sleep, env={}, start_new_session=True).pid)
"""
)
# Ends while a fork of it still holds its socket.
ENDING = (
    NOTE
    + """
import time
if os.fork() == 0:
    os.setsid()
    note(0)
    time.sleep(99)
while not os.path.exists(f"{NOTES}/0"):
    time.sleep(0.001)
os._exit(3)
"""
)


@pytest.fixture
def preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the module `preloaded_by_test` with some code; return the spec of a job with it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str, function: Any = functions.sleep, **settings: Any) -> LaunchSpec:
        (tmp_path / "preloaded_by_test.py").write_text(f"NOTES = {str(tmp_path)!r}\n{code}")
        settings = {"start_method": "forkserver", "preload": ["preloaded_by_test"], **settings}
        return LaunchSpec(function, **settings)

    return make


# ------------------------------------------------------------------- what modules start


async def test_modules_change_neither_directory_nor_exits_of_workers(preloaded: Any) -> None:
    """A module that ignores SIGCHLD takes the exit statuses of all workers."""
    code = "import os, signal\nos.chdir('/')\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    result = await launch(preloaded(code, os.getcwd, nproc_per_node=2))
    assert result.return_values == {0: os.getcwd(), 1: os.getcwd()}


@pytest.mark.both_loops
async def test_processes_of_preloaded_modules_end_with_the_job(
    preloaded: Any, tmp_path: Path
) -> None:
    result = await launch(preloaded(HELPERS, functions.give))
    assert result.return_values == {0: ()}
    pids = noted(tmp_path, 4)()
    assert len(pids) == 4
    assert not any(map(alive, pids))


async def test_processes_of_preloaded_modules_survive_a_restart(
    preloaded: Any, tmp_path: Path
) -> None:
    """Those in the session of the server serve all attempts."""
    spec = preloaded(HELPERS, functions.leave_hard, args=[3], max_restarts=1)
    seen = []

    def on_event(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            seen.append([alive(pid) for pid in noted(tmp_path, 2)()])

    async with Agent(spec, listeners=[on_event]) as agent:
        with pytest.raises(JobFailed):
            await agent.wait()
    assert seen == [[True, True]] * 2


LAUNCHER = """
import sys
from elastic_aio import LaunchSpec, run
from tests.support import functions

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    preload = ["preloaded_by_test"]
    run(LaunchSpec(functions.sleep, start_method="forkserver", preload=preload))
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [HELPERS, ENDLESS])
def test_a_killed_launcher_leaves_no_process_of_a_module(
    code: str, preloaded: Any, tmp_path: Path
) -> None:
    """One without an environment is found by the session of the server."""
    preloaded(code)
    count = 3 if code is HELPERS else 1
    with running([sys.executable, "-c", LAUNCHER, str(tmp_path)]) as launcher:
        pids = until_sync(noted(tmp_path, count))
        launcher.send(signal.SIGKILL)
        launcher.wait()
        until_sync(lambda: not any(map(alive, pids)), "the end of the helpers", 10)
        for pid in noted(tmp_path, 4)()[3:]:  # nothing but its parent is known of it
            os.kill(pid, signal.SIGKILL)
        until_sync(lambda: not leaked_processes())


# ------------------------------------------------------------------ signals to all processes

# The default actions of these end a process.
SENT = (
    signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM,
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPIPE,
    signal.SIGXCPU, signal.SIGRTMIN, signal.SIGRTMAX,
)  # fmt: skip
# As the libraries of numpy and torch do; and a handler that is for the worker.
THREADED = """
import os, signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.signal(signal.SIGUSR2, lambda *_: os._exit(2))
os.kill(os.getpid(), signal.SIGUSR1)
"""


async def test_a_signal_to_all_processes_does_not_end_the_server(preloaded: Any) -> None:
    """A thread of a module takes the signals that it does not block."""
    spec = preloaded(THREADED, functions.leave_hard, args=[3], max_restarts=1, restart=AT_ONCE)
    servers = []

    def on_event(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            servers.append(int(Path(f"/proc/{event.pid}/stat").read_text().split()[3]))
            for number in SENT:
                os.kill(servers[-1], number)

    async with Agent(spec, listeners=[on_event]) as agent:
        with pytest.raises(JobFailed) as caught:
            await agent.wait()
    assert [str(one.status) for one in caught.value.result.failures] == ["exit code 3"]
    assert len(servers) == 2
    assert len({*servers}) == 1


async def test_a_worker_has_the_signals_of_a_new_process(preloaded: Any) -> None:
    spec = preloaded("", functions.signal_state)
    states = [
        (await launch(one)).return_values[0]
        for one in (spec, spec.replace(start_method="spawn", preload=[]))
    ]
    assert states[0] == states[1]


async def test_a_worker_has_the_handlers_of_a_module(preloaded: Any) -> None:
    """The server never runs them."""
    code = "import os, signal\nfor number in (10, 12, 15):\n"
    code += "    signal.signal(number, lambda number, _: os._exit(number))"
    spec = preloaded(code, functions.sleep)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        async with Agent(spec) as agent:
            async for event in agent.events():
                if isinstance(event, WorkerStarted):
                    os.kill(event.pid, number)
                    break
            with pytest.raises(JobFailed) as caught:
                await agent.wait()
        assert caught.value.result.exit_code == number


# ------------------------------------------------------------------ stops during imports


@pytest.mark.slow
@pytest.mark.both_loops
async def test_a_stop_does_not_wait_for_imports(preloaded: Any, tmp_path: Path) -> None:
    async with Agent(preloaded(ENDLESS, stop=LONG)) as agent:
        (server,) = await until(noted(tmp_path, 1))
        await agent.stop(signal="SIGINT")
        with pytest.raises(JobStopped) as caught:
            await agent.wait()
    assert caught.value.result.exit_code == 128 + signal.SIGINT
    assert not caught.value.result.failures
    assert not alive(server)


async def test_imports_have_the_grace_of_the_plan(preloaded: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    async with Agent(preloaded(IGNORING, stop=SHORT), listeners=[events.append]) as agent:
        (server,) = await until(noted(tmp_path, 1))
        await agent.stop()
    assert not alive(server)
    escalations = [event for event in events if isinstance(event, StopEscalated)]
    assert [(event.signal, event.pids) for event in escalations] == [(9, (server,))]


async def test_a_kill_does_not_wait_for_imports(preloaded: Any, tmp_path: Path) -> None:
    """Also during the grace of a stop."""
    async with Agent(preloaded(IGNORING, stop=LONG)) as agent:
        (server,) = await until(noted(tmp_path, 1))
        agent.stop()
        agent.kill()
    assert not alive(server)


@pytest.mark.slow
@pytest.mark.both_loops
async def test_a_cancelled_launch_does_not_wait_for_imports(preloaded: Any, tmp_path: Path) -> None:
    launching = asyncio.ensure_future(launch(preloaded(ENDLESS, stop=LONG)))
    (server,) = await until(noted(tmp_path, 1))
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert not alive(server)


async def test_a_cancelled_group_does_not_wait_for_imports(preloaded: Any, tmp_path: Path) -> None:
    spec = preloaded(ENDLESS)

    async def enter() -> None:
        arguments = {"start_method": "forkserver", "preload": spec.preload}
        async with start_processes("g", functions.sleep, {0: ()}, {0: {}}, **arguments):
            raise AssertionError("the worker cannot have started")

    entering = asyncio.ensure_future(enter())
    (server,) = await until(noted(tmp_path, 1))
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not alive(server)


@pytest.mark.slow
async def test_a_stop_waits_for_a_suspended_server_for_a_bounded_time(
    preloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has imported everything, and does not answer."""
    monkeypatch.setattr(worker_group, "_SPAWN_S", 0.1)
    servers: list[int] = []

    def on_event(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            servers.append(int(Path(f"/proc/{event.pid}/stat").read_text().split()[3]))
        elif isinstance(event, Restarting):
            os.kill(servers[0], signal.SIGSTOP)

    spec = preloaded("", functions.leave_hard, args=[3], max_restarts=1)
    async with Agent(spec, listeners=[on_event]) as agent:
        async for event in agent.events():
            if isinstance(event, Restarting):
                break
        await agent.stop()
    assert len(servers) == 1
    assert not alive(servers[0])


async def test_a_stop_continues_a_suspended_server(preloaded: Any) -> None:
    """It reports the exits of the workers."""
    async with Agent(preloaded("", functions.sleep, stop=LONG)) as agent:
        async for event in agent.events():
            if isinstance(event, WorkerStarted):
                server = int(Path(f"/proc/{event.pid}/stat").read_text().split()[3])
                os.kill(server, signal.SIGSTOP)
                break
        async with asyncio.timeout(DEADLINE_S):
            await agent.stop()


@pytest.mark.slow
async def test_a_server_that_is_killed_costs_a_restart(preloaded: Any) -> None:
    """As for lack of memory: another one may not be.

    One that is killed before the workers are started is replaced without a restart, so two are.
    """
    code = "import os, signal\nfor kill in 'ab':\n    if not os.path.exists(f'{NOTES}/{kill}'):\n"
    code += "        os.mkdir(f'{NOTES}/{kill}')\n        os.kill(os.getpid(), signal.SIGKILL)"
    result = await launch(preloaded(code, functions.give, max_restarts=2, restart=AT_ONCE))
    assert len(result.attempts) in (2, 3)
    (failure,) = result.attempts[0].failures
    assert failure.message.endswith("the fork server has ended: killed by SIGKILL")


async def test_a_server_that_ends_while_its_fork_lives_is_lost(
    preloaded: Any, tmp_path: Path
) -> None:
    """The socket has no end of file then."""
    with pytest.raises(JobFailed, match="the fork server has ended: exit code 3"):
        await launch(preloaded(ENDING))
    (fork,) = noted(tmp_path, 1)()
    assert not alive(fork)


@pytest.mark.e2e
@pytest.mark.parametrize("signals", [1, 2])
def test_signals_to_the_command_line_during_imports(
    signals: int, preloaded: Any, tmp_path: Path
) -> None:
    """The first begins the plan, a repeated one ends it."""
    preloaded(ENDLESS if signals == 1 else IGNORING)
    script = tmp_path / "script.py"
    script.write_text("print('hi')\n")
    options = ["--preload", "preloaded_by_test", "--shutdown-timeout", 99, script]
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}", "LOGLEVEL": "INFO"}
    with running_cli(*options, env=env) as job:
        until_sync(noted(tmp_path, 1))
        began = time.monotonic()
        job.send(signal.SIGTERM)
        if signals == 2:
            job.repeat(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - began < 20
        assert "Traceback" not in job.err
    until_sync(lambda: not leaked_processes())
