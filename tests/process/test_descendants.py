"""Scans of /proc find the descendants of the workers, and nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_aio.process import proc
from elastic_aio.process.descendants import WorkerSession
from elastic_aio.process.proc import (
    ProcEntry,
    ScanCache,
    find_descendants,
    may_adopt,
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


# -------------------------------------------------------------- with real processes


class Family:
    """Processes that a test starts; all are killed afterwards."""

    def __init__(self) -> None:
        self.since = ticks_now() - 1
        self.children: list[subprocess.Popen[bytes]] = []
        self.grandchildren: list[int] = []
        self.cache = ScanCache()

    def adopters(self) -> set[int]:
        return {os.getpid()} | may_adopt(os.getpid())

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
        """Read the pid of a grandchild from a child's output."""
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        self.grandchildren.append(pid)
        return pid

    def session(self, child: subprocess.Popen[bytes]) -> dict[int, WorkerSession]:
        leader = read_process(child.pid)
        assert leader is not None
        return {child.pid: WorkerSession(child.pid, leader.start)}

    def found(
        self, sessions: dict[int, WorkerSession] | None = None, **options: object
    ) -> set[int]:
        options = {"known": {}, "cache": self.cache, "adopters": self.adopters, **options}
        scan = find_descendants(MARKER.encode(), self.since, sessions or {}, **options)  # type: ignore[arg-type]  # passed on
        while True:
            try:
                time.sleep(next(scan))
            except StopIteration as end:
                entries: list[ProcEntry] = end.value
                return {entry.pid for entry in entries}

    def end(self) -> None:
        for pid in self.grandchildren:
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
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(GUARD_MS), "it still runs"


@pytest.fixture
def family() -> Iterator[Family]:
    """A family that is killed afterwards."""
    family = Family()
    yield family
    family.end()


DAEMON = """
import os, select, sys
if os.fork(): os._exit(0)
os.setsid()
poller = select.poll()
poller.register(os.pidfd_open(os.getpid()), select.POLLIN)
if os.fork(): os._exit(0)
poller.poll()  # until the process between has ended: a scan would still find it
print(os.getpid(), flush=True)
os.execvp("sleep", ["sleep", "99"])
"""


def test_a_daemon_is_found_by_its_environment(family: Family) -> None:
    """Forked twice, in a session of its own, its parents gone."""
    parent = family.start(sys.executable, "-I", "-S", "-c", DAEMON, env={MARKER: "1"})
    daemon = family.pid_from(parent)
    parent.wait()
    assert family.found() == {daemon}


@pytest.mark.slow
def test_a_process_in_an_exec_is_found(family: Family) -> None:
    """Its environment cannot be read for about a millisecond."""
    code = "import os; print(os.getpid(), flush=True); os.execvp('sleep', ['sleep', '99'])"
    for _ in range(60):
        child = family.start(sys.executable, "-I", "-S", "-c", code, env={MARKER: "1"})
        pid = family.pid_from(child)
        assert pid in family.found()
        child.kill()
        child.wait()


class FakeExec:
    """Lets a process look as if an exec hid it; `looks` counts how often it is looked at again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pid = 0
        self.hidden_looks = 0
        self.looks = 0
        self._read, self._is_hidden = proc._read, proc._Found.is_hidden
        monkeypatch.setattr(proc, "_read", self._fake_read)
        monkeypatch.setattr(proc._Found, "is_hidden", lambda *args: self._count(*args))

    def hide(self, child: int, looks: int = 1_000_000) -> None:
        """Hide a child from the first look of the next scan and from some later ones."""
        while Path(f"/proc/{child}/comm").read_text() not in ("sleep\n", "bash\n"):
            os.sched_yield()  # its own exec
        self.pid, self.hidden_looks, self.looks = child, looks, 0

    def _fake_read(self, path: str) -> bytes | None:
        is_hidden = self.looks <= self.hidden_looks
        if is_hidden and path in (f"/proc/{self.pid}/environ", f"/proc/{self.pid}/cmdline"):
            return b""
        return self._read(path)

    def _count(self, found: proc._Found, former: ProcEntry) -> bool:
        self.looks += former.pid == self.pid
        return self._is_hidden(found, former)


@pytest.fixture
def fake_exec(monkeypatch: pytest.MonkeyPatch) -> FakeExec:
    """An exec of any length."""
    return FakeExec(monkeypatch)


def test_a_scan_waits_for_an_exec(family: Family, fake_exec: FakeExec) -> None:
    """It looks again at the hidden process, and not at all others."""
    child = family.start("sleep", "99", env={MARKER: "1"})
    fake_exec.hide(child.pid, looks=5)
    assert family.found() == {child.pid}
    assert fake_exec.looks == 6


def test_an_endless_exec_of_another_process_delays_one_scan(
    family: Family, fake_exec: FakeExec
) -> None:
    """One patience for each scan, and none for a process that has used it up."""
    child = family.start("sleep", "99", env={MARKER: "1"})
    fake_exec.hide(family.start("sleep", "99").pid)
    assert family.found() == {child.pid}
    assert fake_exec.looks == 100
    assert family.found() == {child.pid}
    assert fake_exec.looks == 100


def test_an_exec_of_a_known_process_is_not_waited_for(family: Family, fake_exec: FakeExec) -> None:
    """Its parent decides, which the scan may read after it."""
    shell = family.start("bash", "-c", "env -i setsid sleep 99 & echo $!; wait")
    sleeper = family.pid_from(shell)
    fake_exec.hide(sleeper)
    assert family.found(family.session(shell)) == {shell.pid, sleeper}
    assert fake_exec.looks == 0


def test_an_unreadable_environment_is_not_waited_for(
    family: Family, fake_exec: FakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another user's process."""
    child = family.start("sleep", "99", env={MARKER: "1"})
    other = family.start("sleep", "99")
    fake_exec.hide(other.pid)
    read, unreadable = proc._read, f"/proc/{other.pid}/environ"
    monkeypatch.setattr(proc, "_read", lambda path: None if path == unreadable else read(path))
    assert family.found() == {child.pid}
    assert fake_exec.looks == 0


@pytest.mark.parametrize("flag", [0x4, 0x200000])
def test_exits_and_threads_of_the_kernel_are_not_waited_for(
    flag: int, family: Family, fake_exec: FakeExec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither has an environment; the exit of a large process takes seconds."""
    child = family.start("sleep", "99", env={MARKER: "1"})
    other = family.start("sleep", "99")
    fake_exec.hide(other.pid)

    def read_with_flag(pid: int) -> ProcEntry | None:
        entry = read_process(pid)
        if entry is not None and pid == other.pid:
            entry.flags |= flag
        return entry

    monkeypatch.setattr(proc, "read_process", read_with_flag)
    assert family.found() == {child.pid}
    assert fake_exec.looks == 0


# Ends its main thread; another one prints the pid when that has happened.
HEADLESS = """
import ctypes, os, threading, time
def run():
    while open(f"/proc/{os.getpid()}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(99)
if os.fork(): os._exit(0)
os.setsid()
threading.Thread(target=run).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_process_without_its_main_thread_is_decided_by_another(
    is_ours: bool, family: Family, fake_exec: FakeExec
) -> None:
    """Its environment is empty in /proc, and that of its threads is not."""
    env = {MARKER if is_ours else "ANOTHER": "1"}
    parent = family.start(sys.executable, "-I", "-S", "-c", HEADLESS, env=env)
    daemon = fake_exec.pid = family.pid_from(parent)
    fake_exec.hidden_looks = -1  # only counts
    assert family.found() == ({daemon} if is_ours else set())
    assert fake_exec.looks == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to choose a pid")
def test_a_pid_that_is_used_again_is_looked_at_again(family: Family) -> None:
    """Scans skip the processes that are older than the job, by pid and inode."""
    for _ in range(100):
        older = subprocess.Popen(["sleep", "99"], env=PATH)
        family.cache = ScanCache()
        family.since = ticks_now() + 1000
        assert family.found() == set()
        assert older.pid in family.cache.older
        older.kill()
        older.wait()
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(older.pid - 1))
        child = family.start("sleep", "99", env={MARKER: "1"})
        if child.pid == older.pid:  # no other process of the host has come first
            family.since = 0
            assert child.pid in family.found()
            return
    pytest.skip("the pid was always another one")


def test_a_daemon_of_another_job_is_not_ours(family: Family) -> None:
    """Markers with a longer name, and a value that looks like the marker."""
    markers = {f"{MARKER}X": "1", f"X{MARKER}": "1", "VALUE": f"{MARKER}=1"}
    family.pid_from(family.start(sys.executable, "-I", "-S", "-c", DAEMON, env=markers))
    assert family.found() == set()


def test_another_process_group_is_the_same_session(family: Family) -> None:
    """A shell's job control makes process groups."""
    shell = family.start("bash", "-c", "set -m; sleep 99 & echo $!; exec sleep 98")
    sleeper = family.pid_from(shell)
    assert os.getpgid(sleeper) == sleeper
    assert family.found(family.session(shell)) == {shell.pid, sleeper}
    assert family.found() == set()


def test_a_member_outlives_its_leader(family: Family) -> None:
    """A member that started before the leader was reaped."""
    shell = family.start("bash", "-c", "set -m; sleep 99 & echo $!")
    sleeper = family.pid_from(shell)
    shell.wait()
    session = WorkerSession(shell.pid, family.since, ticks_now())
    assert family.found({shell.pid: session}) == {sleeper}
    # Had the leader been reaped before it started, the number might be another session's.
    session.closed = family.since
    assert family.found({shell.pid: session}) == set()


def test_a_leader_with_another_start_time_is_a_new_process(family: Family) -> None:
    """Its number is that of a worker that has ended."""
    shell = family.start("bash", "-c", "sleep 99 & echo $!; wait")
    sleeper = family.pid_from(shell)
    assert family.found({shell.pid: WorkerSession(shell.pid, family.since - 1)}) == {sleeper}


def test_a_process_is_found_by_its_parent_only(family: Family) -> None:
    """`env -i setsid`: another session and no environment."""
    shell = family.start("bash", "-c", "env -i setsid sleep 99 & echo $!; wait")
    sleeper = family.pid_from(shell)
    while True:  # until bash's child has become `sleep` in its own session
        entry = read_process(sleeper)
        assert entry is not None
        if entry.session == sleeper:
            break
    assert family.found(family.session(shell)) == {shell.pid, sleeper}


def test_a_process_older_than_the_job_is_not_found(family: Family) -> None:
    """Even if it has the marker."""
    parent = family.start("sh", "-c", "echo $$; exec sleep 99", env={MARKER: "1"})
    assert parent.stdout is not None
    parent.stdout.readline()
    assert family.found() == {parent.pid}
    family.since = ticks_now() + 1000
    assert family.found() == set()


def test_zombies_and_the_scanning_process_are_not_found(family: Family) -> None:
    child = family.start("true", env={MARKER: "1"})
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    family.since = 0
    sessions = {os.getsid(0): WorkerSession(os.getsid(0), 0)}
    assert child.pid not in family.found({child.pid: WorkerSession(child.pid, 0)})
    assert os.getpid() not in family.found(sessions)


def test_a_pidfd_is_opened_for_one_process_only(family: Family) -> None:
    """The same pid with another start time is another process."""
    child = family.start("sleep", "99")
    entry = read_process(child.pid)
    assert entry is not None
    descriptor = open_pidfd(entry)
    assert descriptor is not None
    entry.start += 1
    assert open_pidfd(entry) is None
    assert send(descriptor, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not send(descriptor, signal.SIGTERM)
    os.close(descriptor)
    entry.start -= 1
    assert open_pidfd(entry) is None


# ----------------------------------------------------------- the marker, and who adopts

# A program outside of the job that starts a process with the environment of the job.
HANDING_ON = f"{MARKER}=1 setsid sh -c 'echo $$; exec sleep 99' & wait"


def test_the_marker_proves_nothing_below_another_program(family: Family) -> None:
    """A scheduler hands the environment of its caller to the next job."""
    next_job = family.pid_from(family.start("bash", "-c", HANDING_ON))
    assert family.found() == set()
    # Known by other signs it is found.
    entry = read_process(next_job)
    assert entry is not None
    assert family.found(known={next_job: entry.start}) == {next_job}


def test_the_orphan_of_a_program_that_ended_during_the_scan(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent was read before; the next scan shows what has adopted it."""
    shell = family.start("bash", "-c", HANDING_ON)
    orphan = family.pid_from(shell)

    def read_and_kill(pid: int) -> ProcEntry | None:
        entry = read_process(pid)
        if pid == orphan and shell.poll() is None:
            shell.kill()
            shell.wait()
        return entry

    monkeypatch.setattr(proc, "read_process", read_and_kill)
    assert family.found() == set()
    assert family.found() == {orphan}


def test_what_an_orphan_has_started_is_found(family: Family) -> None:
    """Without the marker too."""
    code = DAEMON.replace(
        'os.execvp("sleep", ["sleep", "99"])',
        "if (child := os.fork()) == 0:\n"
        "    os.execve('/bin/sleep', ['sleep', '99'], {})\n"
        "print(child, flush=True)\n"
        "os.wait()",
    )
    parent = family.start(sys.executable, "-I", "-S", "-c", code, env={MARKER: "1"})
    daemon, child = family.pid_from(parent), family.pid_from(parent)
    parent.wait()
    assert family.found() == {daemon, child}


def test_adopters_are_asked_for_only_if_the_marker_has_to_decide(family: Family) -> None:
    calls: list[None] = []

    def adopters() -> set[int]:
        calls.append(None)
        return {os.getpid()}

    shell = family.start("bash", "-c", HANDING_ON, env={MARKER: "1"})
    child = family.pid_from(shell)
    session = family.session(shell)
    assert family.found(session, adopters=adopters) == {shell.pid, child}
    assert calls == []
    family.start("sleep", "99", env={MARKER: "1"})
    assert len(family.found(session, adopters=adopters)) == 3
    assert len(calls) == 1


def test_no_other_program_adopts(family: Family) -> None:
    """With a child subreaper, which has the orphans, not even process 1 and other ancestors."""
    parent = family.start(sys.executable, "-I", "-S", "-c", DAEMON, env={MARKER: "1"})
    daemon = family.pid_from(parent)
    parent.wait()
    entry = read_process(daemon)
    assert entry is not None
    assert entry.parent in may_adopt(os.getpid())
    assert family.found(adopters=lambda: {os.getpid()}) == set()
    assert family.found(adopters=lambda: {entry.parent}) == {daemon}


def test_ancestors_may_adopt() -> None:
    grandparent = read_process(os.getppid())
    assert grandparent is not None
    assert {os.getppid(), grandparent.parent or 1, 1} <= may_adopt(os.getpid())
    assert os.getpid() not in may_adopt(os.getpid())


def test_nothing_adopts_for_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert may_adopt(child.pid) == {1}
