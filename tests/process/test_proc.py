"""What /proc shows of a process, and which signals would end it by their default action."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_aio.process import proc
from elastic_aio.process.proc import (
    ended_by_default,
    parse_stat,
    read_process,
    ticks_now,
)
from tests.support.denied import needs_root


def stat_line(name: bytes, *, state: bytes = b"S", threads: int = 1) -> bytes:
    fields = [
        state,
        b"7",
        b"42",
        b"40",
        b"0",
        b"-1",
        b"4194304",
        *[b"0"] * 10,
        b"%d" % threads,
        b"0",
        b"98765",
        *[b"1"] * 30,
    ]
    return b"42 (" + name + b") " + b" ".join(fields) + b"\n"


@pytest.mark.parametrize(
    "name",
    [
        b"python",
        b"",
        b"a b c",
        b"(x)",
        b") S 1 2 3 4",
        b"))) ",
        b"two\nlines",
        b"42 (python) R 1",
        b"\xff\xfe",
        b"\0",
    ],
)
def test_a_name_may_contain_anything(name: bytes) -> None:
    process = parse_stat(stat_line(name))
    assert (process.pid, process.parent, process.session, process.start, process.state) == (
        42,
        7,
        40,
        98765,
        "S",
    )
    assert process.identity == (42, 98765)
    assert (process.flags, process.threads) == (4194304, 1)
    assert not process.is_dead


@pytest.mark.parametrize(
    ("state", "threads", "is_dead"),
    [
        (b"R", 1, False),
        (b"S", 5, False),
        (b"D", 1, False),
        (b"T", 1, False),
        (b"t", 1, False),
        (b"I", 1, False),
        (b"Z", 1, True),
        (b"Z", 0, True),
        (b"Z", 3, False),
        (b"X", 0, True),
    ],
)
def test_a_zombie_with_threads_lives(state: bytes, threads: int, is_dead: bool) -> None:
    """A process is dead when its last thread has ended, not its main thread."""
    assert parse_stat(stat_line(b"x", state=state, threads=threads)).is_dead is is_dead


@pytest.mark.parametrize("content", [b"", b"42", b"42 (x) S 1 2", b"x (y) " + b"1 " * 40, b"\n"])
def test_another_format_is_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_stat(content)


def test_this_process_can_be_read() -> None:
    me = read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.parent, me.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert 0 < me.start <= ticks_now()
    assert repr(me) == f"<ProcEntry {os.getpid()} of session {os.getsid(0)}, state R>"


def test_some_fields_of_a_status_are_read_alone() -> None:
    """The first one, and others in any order; those that are not there are left out."""
    names = (b"SigIgn", b"Name", b"Uid", b"Sig")
    every = proc.read_status(os.getpid())
    assert {name: every[name] for name in names[:3]} == proc.read_status(os.getpid(), *names)


def test_a_reaped_process_is_none() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_process(child.pid) is None


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


def test_a_process_that_has_ended() -> None:
    """A zombie, and a pid that is unused."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ended_by_default([process.pid, 2**22 + 1], signal.SIGUSR1) == ()


# From a pid namespace below, with the /proc of this one.
FROM_BELOW = """
import sys
from elastic_aio.process import proc
descriptor = proc.open_pidfd(proc.read_process(int(sys.argv[1])))
print(proc.send(descriptor, 0), proc.is_denied(int(sys.argv[1])))
"""


@needs_root
def test_a_process_of_a_namespace_above_refuses_signals() -> None:
    """The kernel says EINVAL, and not EPERM."""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", FROM_BELOW, str(os.getpid())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in ended.stderr:
        pytest.skip("needs the right to make a pid namespace")
    assert ended.stdout == "False True\n", ended.stderr


def test_the_user_of_a_process() -> None:
    name = pwd.getpwuid(os.geteuid()).pw_name
    assert proc.user_of(os.getpid()) == f"user {name}"


@needs_root
def test_a_user_without_a_name() -> None:
    command = ["setpriv", "--reuid=54321", "--clear-groups", "sh", "-c", "echo; exec sleep 99"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert proc.user_of(process.pid) == "uid 54321"
        process.kill()
