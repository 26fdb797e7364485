"""Signals that would end a process by their default action."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_aio.process.signal_actions import ended_by_default

SAY = "print('ready', flush=True); sys.stdin.read()"


@contextmanager
def child(code: str) -> Iterator[int]:
    """Run Python code in a process; give its pid when the code has run."""
    program = [sys.executable, "-S", "-c", f"import signal, sys; {code}; {SAY}"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid


@pytest.mark.parametrize(
    ("code", "is_ended"),
    [
        ("pass", True),
        ("signal.signal(signal.SIGUSR1, print)", False),
        ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)", False),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", False),
        ("signal.signal(signal.SIGUSR2, print)", True),
    ],
)
def test_what_a_process_does_about_a_signal(code: str, is_ended: bool) -> None:
    with child(code) as pid:
        assert ended_by_default([pid], signal.SIGUSR1) == ((pid,) if is_ended else ())
        assert ended_by_default([pid], signal.SIGWINCH) == ()
        assert ended_by_default([pid], signal.SIGRTMAX) == (pid,)


def test_a_process_that_has_ended() -> None:
    """A zombie, and a pid that is unused."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended_by_default([process.pid, 2**22 + 1], signal.SIGUSR1) == ()


def test_the_number_of_processes_is_bounded() -> None:
    with child("pass") as pid:
        assert len(ended_by_default([pid] * 1000, signal.SIGUSR1)) == 64
