"""Finding what descends from the workers, and nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_aio.process.sweep import (
    Elders,
    Process,
    Session,
    find_descendants,
    open_pidfd,
    parse_stat,
    read_process,
    send,
    ticks_now,
)

MARKER = f"ELASTIC_AIO_JOB_TEST_{os.getpid()}_{os.urandom(4).hex()}"
GUARD_MS = 20_000
PATH = {"PATH": os.environ["PATH"]}


def stat_line(name: bytes, *, state: bytes = b"S", threads: int = 1) -> bytes:
    fields = [
        state,
        b"7",
        b"42",
        b"40",
        *[b"0"] * 13,
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
def test_a_name_may_hold_anything(name: bytes) -> None:
    """Spaces, parentheses and newlines in a name move no field."""
    process = parse_stat(stat_line(name))
    assert (process.pid, process.parent, process.session, process.start, process.state) == (
        42,
        7,
        40,
        98765,
        "S",
    )
    assert process.identity == (42, 98765)
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
    """A process is dead when its last thread is, not when its first one is."""
    assert parse_stat(stat_line(b"x", state=state, threads=threads)).is_dead is is_dead


@pytest.mark.parametrize("content", [b"", b"42", b"42 (x) S 1 2", b"x (y) " + b"1 " * 40, b"\n"])
def test_another_form_is_a_value_error(content: bytes) -> None:
    """What is no stat line is refused and not guessed at."""
    with pytest.raises(ValueError, match=r"."):
        parse_stat(content)


def test_we_can_be_read() -> None:
    """Our own line agrees with what the system says of us."""
    me = read_process(os.getpid())
    assert me is not None
    assert (me.pid, me.parent, me.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert 0 < me.start <= ticks_now()
    assert repr(me) == f"<Process {os.getpid()} of session {os.getsid(0)}, state R>"


def test_who_is_gone_is_none() -> None:
    """A reaped child cannot be read any more."""
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_process(child.pid) is None


def process(pid: int, *, start: int, session: int = 100) -> Process:
    return Process(pid, 1, session, start, "S", is_dead=False)


@pytest.mark.parametrize(
    ("session", "member", "is_certain"),
    [
        (Session(100, 5), process(100, start=5), True),
        (Session(100, 5), process(101, start=5), True),
        (Session(100, 5), process(101, start=999), True),
        (Session(100, 5), process(100, start=999), False),
        (Session(100, 5, 50), process(101, start=49), True),
        (Session(100, 5, 50), process(101, start=50), True),
        (Session(100, 5, 50), process(101, start=51), False),
        (Session(100, 5, 50), process(100, start=5), True),
        (Session(100, 5, 50), process(100, start=51), False),
    ],
)
def test_a_number_is_ours_only_while_it_is_pinned(
    session: Session, member: Process, is_certain: bool
) -> None:
    """Whoever came after the leader was reaped, or bears its pid, is not surely a member."""
    assert session.is_certain(member) is is_certain


# -------------------------------------------------------------- with real processes


class Family:
    """Processes that a test starts; all of them are gone afterwards."""

    def __init__(self) -> None:
        self.since = ticks_now() - 1
        self.children: list[subprocess.Popen[bytes]] = []
        self.others: list[int] = []

    def start(self, *argv: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            argv,
            env={**PATH, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def pid_from(self, child: subprocess.Popen[bytes]) -> int:
        """Read the pid of a further process from a child's output."""
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        self.others.append(pid)
        return pid

    def session(self, child: subprocess.Popen[bytes]) -> dict[int, Session]:
        leader = read_process(child.pid)
        assert leader is not None
        return {child.pid: Session(child.pid, leader.start)}

    def found(self, sessions: dict[int, Session] | None = None, **options: object) -> set[int]:
        options.setdefault("elders", Elders())
        while True:
            looking = find_descendants(MARKER.encode(), self.since, sessions or {}, **options)  # type: ignore[arg-type]  # passed on
            try:
                while True:
                    next(looking)
            except StopIteration as done:
                processes: list[Process] = done.value
                return {one.pid for one in processes}
            except BlockingIOError:
                os.sched_yield()  # a child of ours is in the middle of its exec

    def end(self) -> None:
        for pid in self.others:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                wait_for_end(descriptor)
                os.close(descriptor)
        for child in self.children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def wait_for_end(pidfd: int) -> None:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    assert waiting.poll(GUARD_MS), "it lives on"


@pytest.fixture
def family() -> Iterator[Family]:
    """A family that is ended afterwards."""
    one = Family()
    yield one
    one.end()


DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
"""


def test_a_daemon_is_found_by_its_environment(family: Family) -> None:
    """Forked twice, in a session of its own, its parents gone: the marker still tells."""
    parent = family.start(sys.executable, "-I", "-S", "-c", DAEMON, env={MARKER: "1"})
    daemon = family.pid_from(parent)
    parent.wait()
    assert family.found() == {daemon}


def test_an_exec_hides_nobody(family: Family) -> None:
    """While a process executes another program its environment is away: that is no absence."""
    code = "import os; print(os.getpid(), flush=True); os.execvp('sleep', ['sleep', '99'])"
    for _ in range(60):
        child = family.start(sys.executable, "-I", "-S", "-c", code, env={MARKER: "1"})
        pid = family.pid_from(child)
        assert pid in family.found()
        child.kill()
        child.wait()


def test_a_daemon_of_another_job_is_not_ours(family: Family) -> None:
    """A marker whose name only begins like ours, or stands in a value, is another's."""
    others = {f"{MARKER}X": "1", f"X{MARKER}": "1", "VALUE": f"{MARKER}=1"}
    family.pid_from(family.start(sys.executable, "-I", "-S", "-c", DAEMON, env=others))
    assert family.found() == set()


def test_another_process_group_is_the_same_session(family: Family) -> None:
    """A shell's job control does not hide a job from us."""
    shell = family.start("bash", "-c", "set -m; sleep 99 & echo $!; exec sleep 98")
    sleeper = family.pid_from(shell)
    assert os.getpgid(sleeper) == sleeper
    assert family.found(family.session(shell)) == {shell.pid, sleeper}
    assert family.found() == set()


def test_a_member_outlives_its_leader(family: Family) -> None:
    """After the leader was reaped, whoever started before that is still ours."""
    shell = family.start("bash", "-c", "set -m; sleep 99 & echo $!")
    sleeper = family.pid_from(shell)
    shell.wait()
    session = Session(shell.pid, family.since, ticks_now())
    assert family.found({shell.pid: session}) == {sleeper}
    # Had the leader been reaped before it started, the number might be somebody else's.
    session.closed = family.since
    assert family.found({shell.pid: session}) == set()


def test_a_stranger_to_session_and_environment_is_found_by_its_parent(family: Family) -> None:
    """`env -i setsid` leaves nothing but the parent, and that is enough while it lives."""
    shell = family.start("bash", "-c", "env -i setsid sleep 99 & echo $!; wait")
    sleeper = family.pid_from(shell)
    while True:  # until bash's child has become `sleep` in its own session
        one = read_process(sleeper)
        assert one is not None
        if one.session == sleeper:
            break
    assert family.found(family.session(shell)) == {shell.pid, sleeper}


def test_what_is_older_than_the_job_is_not_ours(family: Family) -> None:
    """Even with the marker, a process that was there before the job began is left alone."""
    parent = family.start("sh", "-c", "echo $$; exec sleep 99", env={MARKER: "1"})
    assert parent.stdout is not None
    parent.stdout.readline()
    assert family.found() == {parent.pid}
    family.since = ticks_now() + 1000
    assert family.found() == set()


def test_zombies_and_we_ourselves_are_not_found(family: Family) -> None:
    """Who has ended is gone, and the one who looks is never among the descendants."""
    child = family.start("true", env={MARKER: "1"})
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    me = read_process(os.getpid())
    assert me is not None
    family.since = 0
    sessions = {os.getsid(0): Session(os.getsid(0), 0)}
    assert child.pid not in family.found({child.pid: Session(child.pid, 0)})
    assert os.getpid() not in family.found(sessions)


def test_a_descriptor_stands_for_one_process(family: Family) -> None:
    """The pid alone is not enough: another start time is another process."""
    child = family.start("sleep", "99")
    found = read_process(child.pid)
    assert found is not None
    descriptor = open_pidfd(found)
    assert descriptor is not None
    found.start += 1
    assert open_pidfd(found) is None
    assert send(descriptor, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not send(descriptor, signal.SIGTERM)
    os.close(descriptor)
    found.start -= 1
    assert open_pidfd(found) is None
