"""Signals that would end a process by their default action."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_aio.process.proc import ProcEntry
from elastic_aio.process.signal_actions import (
    ended_by_default,
    has_missed_sigterm,
    receivers_of,
)

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
        ("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())", True),
    ],
)
def test_what_a_process_does_about_a_signal(code: str, is_ended: bool) -> None:
    with child(code) as pid:
        assert ended_by_default([pid], signal.SIGUSR1) == ((pid,) if is_ended else ())
        assert ended_by_default([pid], signal.SIGWINCH) == ()
        assert ended_by_default([pid], signal.SIGRTMAX) == (pid,)


@pytest.mark.parametrize(
    ("code", "has_missed"),
    [
        ("pass", True),
        ("signal.signal(signal.SIGINT, print)", True),
        ("signal.signal(signal.SIGTERM, print)", False),
        ("signal.signal(signal.SIGINT, signal.SIG_DFL)", False),  # as at the end of Python
        (
            "signal.signal(signal.SIGINT, signal.SIG_DFL);"
            " signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
            True,  # no Python
        ),
    ],
)
def test_a_process_that_sigterm_has_not_reached(code: str, has_missed: bool) -> None:
    with child(code) as pid:
        assert has_missed_sigterm(pid) is has_missed


def test_a_process_that_has_ended() -> None:
    """A zombie, and a pid that is unused."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended_by_default([process.pid, 2**22 + 1], signal.SIGUSR1) == ()
        assert not has_missed_sigterm(process.pid)


@pytest.mark.parametrize(
    ("is_ended", "receivers"),
    [
        ({1: False}, []),  # the leader handles it: only the leader gets it
        ({1: False, 2: False}, []),
        ({1: None}, []),
        ({1: True}, None),
        ({1: True, 2: False}, [2]),  # a shell that runs a program
        ({1: True, 2: True}, None),
        ({1: True, 2: None}, None),  # a program that has ended
        ({1: True, 2: True, 3: False}, [3]),  # a shell in a shell, or both sides of a pipe
    ],
)
def test_which_processes_of_a_worker_get_a_forwarded_signal(
    is_ended: dict[int, bool | None], receivers: list[int] | None
) -> None:
    """1 is the leader, and waits for the others."""
    found = receivers_of(1, is_ended.__getitem__, lambda _: map(entry, list(is_ended)[1:]))
    assert (found if found is None else [one.pid for one in found]) == receivers


def entry(pid: int) -> ProcEntry:
    return ProcEntry(pid, 1, 1, 0, "S")
