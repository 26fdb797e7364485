"""Signals sent to the command line: stop, forward, suspend, kill."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio import Event, StopEscalated, StopRequested, event_from_json
from elastic_aio.signals import MOMENT_S
from tests.support.children import (
    POLITE,
    SIGNAL_LOGGER,
    ignoring_signals,
    none_alive,
    noted,
    noting,
    python,
    shell,
    until_sync,
)
from tests.support.cli import CLI, REPOSITORY, noted_job, running
from tests.support.leaks import alive, leaked_processes, state_of

pytestmark = pytest.mark.e2e

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


INFO = {"LOGLEVEL": "INFO"}
AT_ONCE = ("--shutdown-timeout", 0.1)


def in_state(letter: str, *pids: int) -> Callable[[], bool]:
    """Return a condition: all these processes are in a state."""
    return lambda: {state_of(pid) for pid in pids} <= set(letter)


def logged(directory: Path) -> list[str]:
    """Return the signals that the workers have got so far."""
    log = directory / "log"
    return log.read_text().split() if log.exists() else []


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("options", [(), ("--shutdown-timeout", 60)], ids=["default", "plan"])
def test_a_stop_signal(number: signal.Signals, options: tuple[Any, ...], tmp_path: Path) -> None:
    """Workers get it once, or the signal of the plan; the launcher exits with 128 + n."""
    with noted_job(tmp_path, 2, SIGNAL_LOGGER, *options) as (job, pids):
        job.send(number)
        until_sync(lambda: len(logged(tmp_path)) >= 2)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ended = job.ended()
    assert ended.code == 128 + number
    assert logged(tmp_path) == ["SIGTERM" if options else number.name] * 2
    assert f"{number.name} was received" in ended.err
    assert "FAILED" not in ended.err
    assert "Traceback" not in ended.err


def test_nohup(tmp_path: Path) -> None:
    """A SIGHUP that was ignored at the start of the launcher does not stop the job."""
    argv = ["bash", "-c", 'trap "" HUP; exec "$@"', "bash", *CLI, "run"]
    with noted_job(tmp_path, 1, POLITE, argv=argv) as (job, (pid,)):
        job.send(signal.SIGHUP)
        job.send(signal.SIGTERM)
        ended = job.ended()
    assert ended.code == 143
    assert "SIGHUP" not in ended.err
    assert not alive(pid)


def test_user_signals_are_forwarded(tmp_path: Path) -> None:
    """SIGUSR1 and SIGUSR2 reach every worker once, and the workers continue."""
    with noted_job(tmp_path, 3, SIGNAL_LOGGER, *AT_ONCE, env=INFO) as (job, pids):
        names = ("SIGUSR1", "SIGUSR2", "SIGUSR1")
        for count, name in enumerate(names, start=1):
            job.send(signal.Signals[name])
            until_sync(lambda count=count: len(logged(tmp_path)) == 3 * count)  # type: ignore[misc]  # bound now
        assert logged(tmp_path) == [name for name in names for _ in range(3)]
        assert all(map(alive, pids))
        assert job.err.count("SIGUSR1 forwarded to 3 workers") == 2
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_a_worker_without_a_handler_does_not_get_a_forwarded_signal(tmp_path: Path) -> None:
    """Its default action would end the worker; one line names the worker."""
    with noted_job(tmp_path, 2, noting(), *AT_ONCE, env=INFO) as (job, pids):
        job.wait_err("rank 1 started")
        job.send(signal.SIGUSR1)
        job.wait_err("SIGUSR1 forwarded to 0 workers; 2 have no handler for it and did not get it")
        assert all(map(alive, pids))
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_a_forwarded_signal_ends_workers_without_a_handler_on_demand(tmp_path: Path) -> None:
    with noted_job(tmp_path, 2, noting(), "--signal-unhandled=kill", env=INFO) as (job, _):
        job.wait_err("rank 1 started")
        job.send(signal.SIGUSR1)
        assert job.wait() == 128 + signal.SIGUSR1
        assert "SIGUSR1 forwarded to 2 workers; 2 have no handler for it and will be" in job.err


def test_a_forwarded_signal_reaches_the_program_of_a_shell(tmp_path: Path) -> None:
    """The shell has no handler, and goes on when its program has ended."""
    worker = shell(f"{shlex.join(SIGNAL_LOGGER)}; true")
    with noted_job(tmp_path, 1, worker, *AT_ONCE, env=INFO) as (job, _):
        job.send(signal.SIGUSR1)
        until_sync(lambda: logged(tmp_path) == ["SIGUSR1"])
        job.wait_err("SIGUSR1 forwarded to 1 worker\n")
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_the_third_signal_kills(tmp_path: Path) -> None:
    """The second one means no more than the first; none waits for the end of the grace period."""
    with noted_job(tmp_path, 2, ignoring_signals(), "--shutdown-timeout", 60) as (job, pids):
        job.send(signal.SIGINT)
        job.wait_err("SIGINT was received")
        job.repeat(signal.SIGHUP, 1)
        job.repeat(signal.SIGTERM, 1)
        assert job.wait() == 130
        assert "the stop signal was repeated, sending SIGKILL" in job.err
    assert not any(map(alive, pids))


@pytest.mark.parametrize("signals", ["TERM HUP", "HUP HUP", "TERM CONT TERM", "TERM INT TERM HUP"])
def test_stop_signals_within_a_second_are_one(signals: str, tmp_path: Path) -> None:
    """Of systemd, of a terminal that is closed, of Slurm, of a wrapper and its group."""
    save = """
import os, signal, sys, time
got = []
for name in "TERM", "HUP", "INT":
    signal.signal(getattr(signal, "SIG" + name), lambda *_: got.append(1))
notes = os.environ["NOTES"]
path = f"{notes}/{os.environ['RANK']}"
with open(path + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".new", path)
while not got:
    time.sleep(0.01)
for _ in range(50):
    time.sleep(0.01)
open(f"{notes}/saved{os.environ['RANK']}", "w").close()
"""
    with noted_job(tmp_path, 2, python(save)) as (job, _):
        for name in signals.split():
            job.send(getattr(signal, f"SIG{name}"))
        assert job.wait() == (143 if "TERM" in signals else 129)
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_the_second_interrupt_of_a_terminal_kills(tmp_path: Path) -> None:
    """A person's Ctrl-C, at least a second after the first one."""
    keyboard, terminal = os.openpty()
    at_terminal = f"""
import fcntl, os, sys, termios
fcntl.ioctl({terminal}, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
    argv = [sys.executable, "-c", at_terminal, *CLI, "run", "--shutdown-timeout", "60"]
    popen: dict[str, Any] = {"start_new_session": True, "pass_fds": [terminal]}
    with noted_job(tmp_path, 1, ignoring_signals(), argv=argv, **popen) as (job, pids):
        for _ in range(2):  # an impatient finger
            os.write(keyboard, b"\x03")
        job.wait_err("SIGINT was received")
        time.sleep(MOMENT_S + 0.05)  # what is tested: time that passes
        assert all(map(alive, pids))
        os.write(keyboard, b"\x03")
        assert job.wait() == 130
    assert not any(map(alive, pids))
    os.close(keyboard)
    os.close(terminal)


def test_many_signals_during_a_stop(tmp_path: Path) -> None:
    """Nine signals during one stop have no further effect."""
    with noted_job(tmp_path, 2, ignoring_signals(), "--shutdown-timeout", 1) as (job, pids):
        for number in [*STOPS, signal.SIGUSR1, *STOPS]:
            job.send(number)
        assert job.wait() in {128 + number for number in STOPS}
        assert "Traceback" not in job.err
    assert not any(map(alive, pids))


def test_suspend_and_continue(tmp_path: Path) -> None:
    """SIGTSTP suspends the workers, then the launcher; SIGCONT continues both."""
    script = noting("until [ -e $NOTES/go ]; do sleep 0.01; done")
    with noted_job(tmp_path, 2, script) as (job, pids):
        for _ in range(2):
            job.send(signal.SIGTSTP)
            until_sync(in_state("T", *pids, job.pid), "all suspended")
            job.send(signal.SIGCONT)
            until_sync(in_state("SRD", *pids, job.pid), "all continued")
        (tmp_path / "go").touch()
        assert job.wait() == 0


def test_a_job_that_is_continued_at_once_goes_on(tmp_path: Path) -> None:
    """SIGCONT may arrive before the launcher has suspended itself."""
    script = noting("until [ -e $NOTES/go ]; do sleep 0.01; done")
    with noted_job(tmp_path, 2, script) as (job, pids):
        for _ in range(20):
            job.send(signal.SIGTSTP)
            job.send(signal.SIGCONT)
            until_sync(in_state("SRD", *pids, job.pid), "all continued")
        (tmp_path / "go").touch()
        assert job.wait() == 0


def test_no_deadline_expires_while_suspended(tmp_path: Path) -> None:
    """The grace period of a stop does not elapse while the job is suspended."""
    path = tmp_path / "events"
    grace, suspended = 0.6, 0.9
    options = ("--shutdown-timeout", grace, "--events", path)
    with noted_job(tmp_path, 1, ignoring_signals(), *options) as (job, (pid,)):
        job.send(signal.SIGTERM)
        job.wait_err("SIGTERM was received")
        job.send(signal.SIGTSTP)
        until_sync(in_state("T", pid, job.pid), "all suspended")
        time.sleep(suspended)  # longer than the grace period, which would expire
        job.send(signal.SIGCONT)
        assert job.wait() == 143
    events: list[Event] = [event_from_json(line) for line in path.read_bytes().splitlines()]
    asked = next(event for event in events if isinstance(event, StopRequested))
    escalated = next(event for event in events if isinstance(event, StopEscalated))
    assert escalated.time - asked.time >= grace + suspended - 0.1


def test_job_control_of_a_shell(tmp_path: Path) -> None:
    """On a terminal Ctrl-Z suspends the job, `fg` continues it, Ctrl-C stops it."""
    terminal = [sys.executable, "-c", "import pty; pty.spawn(['bash', '--norc', '-i'])"]
    env = {"NOTES": str(tmp_path), "PS1": "$ ", "HISTFILE": "/dev/null",
           "PYTHONPATH": str(REPOSITORY)}  # fmt: skip
    with running(terminal, env=env, stdin_pipe=True) as bash:
        typed = bash.process.stdin
        assert typed is not None

        def type_in(text: bytes) -> None:
            typed.write(text)
            typed.flush()

        command = shlex.join([*CLI, "run", "--nproc-per-node", "2", "--no-python", *noting()])
        (tmp_path / "command").write_text(command)
        type_in(b". $NOTES/command\n")
        pids = until_sync(noted(tmp_path, 2))
        type_in(b"\x1a")
        bash.wait_out("Stopped")
        until_sync(in_state("T", *pids), "suspended workers")
        type_in(b"fg\n")
        until_sync(in_state("SRD", *pids), "all continued")
        type_in(b"\x03")
        type_in(b"echo code=$((0 + $?)).\n")
        bash.wait_out(r"code=130\.")
        type_in(b"exit\n")
        bash.wait()
    assert not any(map(alive, pids))


def test_listed_user_signal_is_forwarded(tmp_path: Path) -> None:
    """SIGUSR1 in `--signals-to-handle` is forwarded and does not stop the job; SIGTERM does."""
    options = ("--signals-to-handle", "SIGTERM,SIGUSR1", *AT_ONCE)
    with noted_job(tmp_path, 1, SIGNAL_LOGGER, *options) as (job, (pid,)):
        job.send(signal.SIGUSR1)
        until_sync(lambda: logged(tmp_path) == ["SIGUSR1"])
        assert alive(pid)
        job.send(signal.SIGTERM)
        assert job.wait() == 143


def test_listed_other_signal_stops(tmp_path: Path) -> None:
    """Any other listed signal stops the job by the plan."""
    options = ("--signals-to-handle", "SIGALRM", "--shutdown-timeout", 0.2)
    with noted_job(tmp_path, 1, ignoring_signals(), *options) as (job, (pid,)):
        job.send(signal.SIGALRM)
        assert job.wait() == 128 + signal.SIGALRM
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_unlisted_stop_signal(number: signal.Signals, tmp_path: Path) -> None:
    """A signal that is not handled ends the launcher and its workers."""
    with noted_job(tmp_path, 2, noting(), "--signals-to-handle", "SIGINT") as (job, pids):
        job.send(number)
        assert job.wait() == 128 + number
        until_sync(none_alive(pids), "the end of the workers", 2)
    until_sync(lambda: not leaked_processes())


def block_stops() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_that_the_parent_has_blocked_stops_the_job(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The mask of signals is inherited."""
    job_of_one = noted_job(tmp_path, 1, SIGNAL_LOGGER, *AT_ONCE, preexec_fn=block_stops)
    with job_of_one as (job, _):
        job.send(number)
        assert job.ended().code == 128 + number


# A signal arrives after the job, while a thread of a plug-in runs.
ENDING = """
import atexit, ctypes, os, sys, threading
from elastic_aio import cli
main = cli.main
threading.Thread(target=threading.Event().wait, daemon=True).start()
def send():
    os.kill(os.getpid(), int(os.environ["NUMBER"]))
def main_and_signal():
    code = main()
    if os.environ["WHEN"] == "main":
        send()
    elif os.environ["WHEN"] == "exit hook":
        atexit.register(send)
    else:
        # A library ends slowly, after the interpreter: it waits for the end of stdin.
        libc = ctypes.CDLL(None)
        libc.strdup.restype = ctypes.c_void_p
        libc.__cxa_atexit(libc.getchar, None, None)
        libc.__cxa_atexit(libc.perror, ctypes.c_void_p(libc.strdup(b"library")), None)
    return code
cli.main = main_and_signal
sys.exit(cli.entry())
"""


@pytest.mark.parametrize("when", ["main", "exit hook", "library"])
@pytest.mark.parametrize("number", [*STOPS, signal.SIGUSR1, signal.SIGALRM, signal.SIGRTMIN])
def test_a_signal_after_the_end_changes_no_exit_code(number: int, when: str) -> None:
    """The handlers have been restored, and a thread does not block it."""
    argv = [sys.executable, "-c", ENDING, "run", "--no-python", "true"]
    env = {"NUMBER": str(int(number)), "WHEN": when}
    with running(argv, env=env, stdin_pipe=True) as command:
        if when == "library":
            command.wait_err("^library")
            command.send(number)
        assert command.process.stdin is not None
        command.process.stdin.close()
        assert command.wait() == 0
        assert "Traceback" not in command.err


# A trainer that has saved when the signal comes, and exits with $CODE.
SAVED = python(
    """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ["CODE"])))
path = os.environ["NOTES"] + "/" + os.environ["RANK"]
with open(path + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".new", path)
while True:
    time.sleep(0.1)
"""
)


@pytest.mark.parametrize("code", [0, 1, 143])
@pytest.mark.parametrize(
    ("options", "ends_with"),
    [
        ((), 143),
        (("--max-restarts", 3), 143),
        (("--restart-scope", "worker"), 143),
        (("--preempt-signal", "TERM"), 85),
    ],
    ids=["plain", "restarts", "independent", "preemption"],
)
def test_an_interrupted_job_is_no_success(
    options: tuple[object, ...], ends_with: int, code: int, tmp_path: Path
) -> None:
    """SIGTERM to all processes; the launcher gets a processor when all workers have ended."""
    env = {"CODE": str(code)}
    with noted_job(tmp_path, 2, SAVED, *options, env=env) as (job, pids):
        job.send(signal.SIGSTOP)
        for pid in (*pids, job.pid):
            os.kill(pid, signal.SIGTERM)
        until_sync(in_state("Z", *pids), "the ends of the workers")
        job.send(signal.SIGCONT)
        assert job.wait() == ends_with
        assert "attempt 0 failed" not in job.err


def test_a_job_that_has_ended_before_the_signal_has_succeeded(tmp_path: Path) -> None:
    """Its worker has left a process that takes a while to end."""
    script = "(trap 'sleep 1; exit' TERM; while :; do sleep 0.05; done) & exit 0"
    with noted_job(tmp_path, 1, noting(script)) as (job, _):
        job.wait_err("have succeeded")
        job.send(signal.SIGTERM)
        assert job.wait() == 0
