"""A repeated stop signal ends the launcher, whatever blocks it, and its workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_aio.cli.forced_exit import ForcedExit
from elastic_aio.signals import StopSignals
from tests.support.children import POLITE, noted, noting, until_sync
from tests.support.cli import REPOSITORY, Running, running_cli
from tests.support.leaks import leaked_processes

pytestmark = pytest.mark.e2e

# Far less than a stall takes, and more than the launcher waits on a busy host.
BOUND_S = 15.0

# Of two signals that are taken at once, the second may count first.
ENDED = {128 + signal.SIGTERM, 128 + signal.SIGINT}

# A handler of events that opens a named pipe without a writer, at once or in a thread.
PLUGIN = """
import logging, os, threading

def stall():
    open(os.environ["NOTES"] + "/stalled", "w").close()
    open(os.environ["NOTES"] + "/pipe")

class Handler(logging.Handler):
    def emit(self, record):
        if os.environ["STALL_AT"] in record.getMessage():
            if os.environ["STALL_IN"] == "thread":
                threading.Thread(target=stall).start()
            else:
                stall()
"""

StartStalling = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> StartStalling:
    """Start a job whose launcher stalls at an event that has a text."""
    directory = tmp_path / "stalling-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: stalling\nVersion: 1.0\n")
    (directory / "entry_points.txt").write_text(
        "[elastic_aio.event_handlers]\nstalling = stalling:Handler\n"
    )
    (tmp_path / "stalling.py").write_text(PLUGIN)
    os.mkfifo(tmp_path / "pipe")

    def start(worker: list[str], at: str, where: str = "loop") -> Any:
        env = {
            "NOTES": str(tmp_path),
            "STALL_AT": at,
            "STALL_IN": where,
            "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        }
        handler = "--event-log-handler=stalling"
        return running_cli(handler, "--verbose", "--no-python", *worker, env=env)

    return start


def wait_ended(job: Running) -> int:
    """Wait until the launcher has ended and nothing of the job is left; return the code."""
    began = time.monotonic()
    code = job.wait()
    assert time.monotonic() - began < BOUND_S
    until_sync(lambda: not leaked_processes(), "the end of the workers")
    return code


def test_a_stop_that_stalls(start: StartStalling, tmp_path: Path) -> None:
    """The first signal has stopped the workers, and the third one ends the launcher."""
    with start(POLITE, '"FAILED"') as job:
        until_sync(noted(tmp_path, 1))
        job.send(signal.SIGTERM)
        until_sync((tmp_path / "stalled").exists)
        job.repeat(signal.SIGTERM)
        assert wait_ended(job) == 128 + signal.SIGTERM
        assert "SIGTERM again, and no end within 5 s" in job.err


@pytest.mark.parametrize("where", ["loop", "thread"])
def test_an_end_that_stalls(start: StartStalling, tmp_path: Path, where: str) -> None:
    """A first signal after the job has no effect; in a thread, the interpreter waits for it."""
    with start(["true"], '"SUCCEEDED"', where) as job:
        until_sync((tmp_path / "stalled").exists)
        if where == "thread":
            job.wait_err("^aio-elastic: finished")
        job.send(signal.SIGTERM)
        until_sync(is_taken(job.pid))
        job.repeat(signal.SIGINT)
        assert wait_ended(job) in ENDED


def test_a_launcher_that_stalls_beside_its_workers(start: StartStalling, tmp_path: Path) -> None:
    """It can neither stop nor kill them; the guardian does."""
    with start(noting(), '"START"') as job:
        until_sync(noted(tmp_path, 1))
        until_sync((tmp_path / "stalled").exists)
        job.send(signal.SIGTERM)
        until_sync(is_taken(job.pid))
        job.repeat(signal.SIGINT)
        assert wait_ended(job) in ENDED


def is_taken(pid: int) -> Callable[[], bool]:
    """Return a condition: the main thread has taken all signals (proc_pid_status(5)).

    Of two that are pending, another thread may take both, and the main thread notices neither.
    """
    status = Path(f"/proc/{pid}/status")
    return lambda: not re.search("^S(ig|hd)Pnd:.*[1-9a-f]", status.read_text(), re.MULTILINE)


def test_only_a_repeated_signal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[object] = []
    monkeypatch.setattr("_thread.start_new_thread", lambda *args: exits.append(args[1]))
    forced = ForcedExit()
    forced.choose(StopSignals([signal.SIGTERM]))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        forced.note(number)
    assert exits == []
    for _ in range(2):
        forced.note(signal.SIGKILL)
    assert exits == [(signal.SIGTERM,)]
