"""Scans of /proc find the descendants of the workers, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_aio.process import descendants, proc
from elastic_aio.process.descendants import (
    FINAL,
    ROW_SIZE,
    STARTING,
    JobRow,
    ListFile,
    Scanner,
    SessionList,
    Snapshot,
    WorkerSession,
    may_adopt,
    read_jobs,
)
from elastic_aio.process.proc import ProcEntry, open_pidfd, read_process, send, ticks_now
from tests.support.children import until_sync, wait_for_end

MARKER = f"ELASTIC_AIO_JOB_TEST_{os.getpid()}_{os.urandom(4).hex()}"
GUARD_MS = 20_000
PATH = {"PATH": os.environ["PATH"]}


# -------------------------------------------------------------- with real processes


class Family:
    """Processes that a test starts; all are killed afterwards."""

    def __init__(self) -> None:
        self.since = ticks_now() - 1
        self.children: list[subprocess.Popen[bytes]] = []
        self.grandchildren: list[int] = []
        self.scanner = Scanner(MARKER.encode(), self.since, {}, self.adopters)

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
        self,
        sessions: dict[int, WorkerSession] | None = None,
        known: dict[int, int] | None = None,
        adopters: Callable[[], set[int]] | None = None,
    ) -> set[int]:
        self.scanner.since = self.since
        self.scanner.sessions = sessions or {}
        self.scanner.adopters = adopters or self.adopters
        scan = self.scanner.find(known or {})
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
        for child in self.children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


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
        self._read, self._is_hidden = proc.read, descendants._Found.is_hidden
        monkeypatch.setattr(proc, "read", self._fake_read)
        monkeypatch.setattr(descendants._Found, "is_hidden", lambda *args: self._count(*args))

    def hide(self, child: int, looks: int = 1_000_000) -> None:
        """Hide a child from the first look of the next scan and from some later ones."""
        while Path(f"/proc/{child}/comm").read_text() not in ("sleep\n", "bash\n"):
            os.sched_yield()  # its own exec
        self.pid, self.hidden_looks, self.looks = child, looks, 0

    def _fake_read(self, pid: int, name: str) -> bytes | None:
        is_hidden = self.looks <= self.hidden_looks
        if is_hidden and pid == self.pid and name in ("environ", "cmdline"):
            return b""
        return self._read(pid, name)

    def _count(self, found: descendants._Found, former: ProcEntry) -> bool:
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
    read, unreadable = proc.read, (other.pid, "environ")
    monkeypatch.setattr(proc, "read", lambda *file: None if file == unreadable else read(*file))
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
        family.scanner = Scanner(MARKER.encode(), 0, {}, family.adopters)
        family.since = ticks_now() + 1000
        assert family.found() == set()
        assert older.pid in family.scanner.older
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


# ------------------------------------------------------------------ scans of several jobs


def entries_of(scan: Iterator[float]) -> set[int]:
    while True:
        try:
            next(scan)
        except StopIteration as end:
            return {entry.pid for entry in end.value}


def test_scans_of_several_jobs_read_each_process_once(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds its own; another look reads anew."""
    markers = [f"{MARKER}_{number}" for number in range(3)]
    children = [family.start("sleep", "99", env={marker: "1"}) for marker in markers]
    until_sync(lambda: all(b"sleep" in (proc.read(one.pid, "cmdline") or b"") for one in children))
    hidden: set[tuple[int, int]] = set()
    scanners = [
        Scanner(marker.encode(), family.since, {}, family.adopters, hidden) for marker in markers
    ]
    reads: list[tuple[int, str]] = []
    read = proc.read

    def count(pid: int, name: str) -> bytes | None:
        reads.append((pid, name))
        return read(pid, name)

    monkeypatch.setattr(proc, "read", count)
    for looks in (1, 2):
        snapshot = Snapshot(is_shared=True)
        found = [entries_of(scanner.find({}, snapshot)) for scanner in scanners]
        assert found == [{child.pid} for child in children]
        for child in children:
            assert reads.count((child.pid, "stat")) == looks
            assert reads.count((child.pid, "environ")) == looks


def test_a_member_of_another_job_of_the_program_is_read_once(
    family: Family, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own job finds it all the same."""
    marker = f"{MARKER}_2"
    worker = family.start("sh", "-c", "sleep 99 & echo $!; wait", env={marker: "1"})
    family.pid_from(worker)
    until_sync(lambda: len(family.found(family.session(worker))) == 2)
    program = ListFile(descriptor)
    own, other = SessionList(program, 1), SessionList(program, 2)
    for session in family.session(worker).values():
        other.add(session)

    def scanner(listed: SessionList, name: str) -> Scanner:
        sessions, adopters = listed.sessions, family.adopters
        return Scanner(name.encode(), family.since, sessions, adopters, program=program)

    reads: list[int] = []
    read = proc.read

    def count(pid: int, name: str) -> bytes | None:
        reads.append(pid)
        return read(pid, name)

    monkeypatch.setattr(proc, "read", count)
    first = scanner(own, f"{MARKER}_1")
    assert entries_of(first.find({})) == set()
    members = set(program.members)
    assert worker.pid in members
    assert len(members) == 2
    assert len([pid for pid in reads if pid in members]) == 2  # each stat, and no environment
    reads.clear()
    assert entries_of(first.find({})) == set()
    assert not members & {*reads}
    assert entries_of(scanner(other, marker).find({})) == members
    other.remove([worker.pid])
    assert not program.sessions


def test_scans_of_several_jobs_wait_once_for_an_exec(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose environment cannot be read; the second scan finds its own without a pause."""
    child = family.start("sleep", "99", env={f"{MARKER}_2": "1"})
    exec_under_way = family.start("sleep", "99")
    read = proc.read
    until_sync(lambda: bool(read(child.pid, "environ")))

    def hide(pid: int, name: str) -> bytes | None:
        is_hidden = pid == exec_under_way.pid and name in ("environ", "cmdline")
        return b"" if is_hidden else read(pid, name)

    monkeypatch.setattr(proc, "read", hide)
    hidden: set[tuple[int, int]] = set()
    snapshot = Snapshot(is_shared=True)
    pauses = []
    for number in (1, 2):
        marker = f"{MARKER}_{number}".encode()
        scan = Scanner(marker, family.since, {}, family.adopters, hidden).find({}, snapshot)
        pauses.append([*filter(None, scan)])
    assert len(pauses[0]) >= 100
    assert pauses[1] == []
    found = Scanner(f"{MARKER}_2".encode(), family.since, {}, family.adopters, hidden)
    assert entries_of(found.find({}, snapshot)) == {child.pid}


# ------------------------------------------------------------------ the list of sessions

Row = tuple[int, int, int | None]
OWNER = 7


@pytest.fixture
def descriptor() -> Iterator[int]:
    """An empty file in memory."""
    descriptor = os.memfd_create("sessions")
    yield descriptor
    os.close(descriptor)


def listed(descriptor: int) -> tuple[ListFile, SessionList]:
    """Begin a list with one job."""
    os.ftruncate(descriptor, 0)
    file = ListFile(descriptor)
    file.write_job(file.take(), OWNER, JobRow(5, 15, 0.5, True))
    return file, SessionList(file, OWNER)


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def rows_of(descriptor: int, owner: int = OWNER) -> list[Row]:
    jobs = read_jobs(descriptor)
    sessions = jobs[owner].sessions if owner in jobs else {}
    assert list(sessions) == [session.number for session in sessions.values()]
    return [(session.number, session.opened, session.closed) for session in sessions.values()]


ticks = st.integers(0, 2**47)
rows = st.lists(
    st.tuples(st.integers(1, 2**31), ticks, st.none() | ticks),
    max_size=5,
    unique_by=lambda row: row[0],
)


@pytest.mark.parametrize(
    ("session", "pid", "start", "is_certain"),
    [
        (WorkerSession(100, 5), 100, 5, True),
        (WorkerSession(100, 5), 101, 5, True),
        (WorkerSession(100, 5), 101, 999, True),
        (WorkerSession(100, 5), 100, 999, False),
        (WorkerSession(100, 5, 50), 101, 49, True),
        (WorkerSession(100, 5, 50), 101, 50, True),
        (WorkerSession(100, 5, 50), 101, 51, False),
        (WorkerSession(100, 5, 50), 100, 5, True),
        (WorkerSession(100, 5, 50), 100, 51, False),
    ],
)
def test_membership_is_certain_only_before_the_leader_was_reaped(
    session: WorkerSession, pid: int, start: int, is_certain: bool
) -> None:
    """A later process, or one with the leader's pid, may be of another session."""
    assert session.is_certain(pid, start) is is_certain


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows)
def test_sessions_survive_a_round_trip(descriptor: int, rows: list[Row]) -> None:
    file, sessions = listed(descriptor)
    for row in rows:
        sessions.add(WorkerSession(*row))
    assert len(content(descriptor)) == ROW_SIZE * file.rows == ROW_SIZE * (len(rows) + 1)
    assert rows_of(descriptor) == rows


@given(
    owner=st.integers(1, 2**32 - 1),
    since=ticks,
    number=st.integers(1, 64),
    grace=st.floats(0, 1e9),
    is_ordered=st.booleans(),
    end=st.integers(FINAL, 10**7),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_jobs_survive_a_round_trip(
    descriptor: int, owner: int, since: int, number: int, grace: float, is_ordered: bool, end: int
) -> None:
    """The grace to six digits."""
    file = ListFile(descriptor)
    file.write_job(file.take(), owner, JobRow(since, number, grace, is_ordered, end))
    (job,) = read_jobs(descriptor).values()
    assert [*read_jobs(descriptor)] == [owner]
    assert (job.since, job.signal, job.is_ordered, job.end) == (since, number, is_ordered, end)
    assert job.grace == pytest.approx(grace, rel=1e-5)


def test_the_format(descriptor: int) -> None:
    """A letter, the owner, the fields of a job or of a session; and a checksum."""
    _, sessions = listed(descriptor)
    sessions.add(WorkerSession(18, 255))
    sessions.add(WorkerSession(19, 256, 4096))
    lines = content(descriptor).splitlines(keepends=True)
    assert [line.split()[:-1] for line in lines] == [
        [b"j", b"7", b"5", b"f", b"0.5", b"o", b"0"],
        [b"s", b"7", b"12", b"ff", b"-"],
        [b"s", b"7", b"13", b"100", b"1000"],
    ]
    assert [len(line) for line in lines] == [64, 64, 64]


def test_one_row_is_replaced(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit of one leader writes one line, and so does the removal of neighbours."""
    _, sessions = listed(descriptor)
    added = [WorkerSession(number, 5) for number in (1, 2, 3, 4)]
    for session in added:
        sessions.add(session)
    written: list[tuple[int, int]] = []
    write = os.pwrite

    def count(descriptor: int, line: bytes, offset: int) -> int:
        written.append((len(line), offset))
        return write(descriptor, line, offset)

    monkeypatch.setattr(os, "pwrite", count)
    sessions.close(added[1], 99)
    assert rows_of(descriptor) == [(1, 5, None), (2, 5, 99), (3, 5, None), (4, 5, None)]
    sessions.remove([3, 2])
    assert written == [(64, 128), (128, 128)]
    assert rows_of(descriptor) == [(1, 5, None), (4, 5, None)]
    sessions.add(WorkerSession(6, 6))
    assert len(content(descriptor)) == 5 * 64, "a free row is used again"


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=rows, after=rows, data=st.data())
def test_a_write_cut_at_any_byte_makes_no_session_up(
    descriptor: int, before: list[Row], after: list[Row], data: st.DataObject
) -> None:
    """A program may be killed while it writes: at most the entry that is torn is lost."""
    contents = []
    for rows in (after, before):
        _, sessions = listed(descriptor)
        for row in rows:
            sessions.add(WorkerSession(*row))
        contents.append(content(descriptor))
    new, _ = contents
    cut = data.draw(st.integers(0, len(new)))
    os.pwrite(descriptor, new[:cut], 0)
    read = rows_of(descriptor)
    assert set(read) <= {*before, *after}
    whole = [*after[: max(cut // 64 - 1, 0)], *before[max(-(-cut // 64) - 1, 0) :]]
    assert {number for number, _, _ in read} >= {number for number, _, _ in whole}


@pytest.mark.parametrize("garbage", [b"", b"12 345", b"\n" * 64, b"\0" * 128, b"x" * 200])
def test_other_content_is_left_out(descriptor: int, garbage: bytes) -> None:
    os.write(descriptor, garbage)
    assert read_jobs(descriptor) == {}


def test_sessions_of_a_former_job_are_left_out(descriptor: int) -> None:
    """Its rows stay until others are written there; a job may stand behind its sessions."""
    file, former = listed(descriptor)
    former.add(WorkerSession(1, 5))
    former.add(WorkerSession(2, 5))
    file.clear([0])
    file.give_back([0])
    former.detach()
    former.detach()
    assert read_jobs(descriptor) == {}
    former.add(WorkerSession(3, 5))
    assert read_jobs(descriptor) == {}
    other = SessionList(file, 8)
    other.add(WorkerSession(1, 9))
    file.write_job(file.take(), 8, JobRow(5, 15, 0.5, True))
    assert rows_of(descriptor, 8) == [(1, 9, None)]
    assert len(content(descriptor)) == 3 * 64


@pytest.mark.slow
def test_the_whole_file_is_read(descriptor: int) -> None:
    """Reading does not depend on the descriptor's position."""
    _, sessions = listed(descriptor)
    for number in range(1, 20_000):
        sessions.add(WorkerSession(number, 1))
    os.lseek(descriptor, 100, os.SEEK_SET)
    for _ in range(2):
        assert [number for number, _, _ in rows_of(descriptor)] == list(range(1, 20_000))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "close", "remove", "start", "end"]),
            st.integers(1, 6),
            st.integers(0, 1),
        ),
        max_size=30,
    )
)
def test_the_file_has_the_sessions_and_whether_children_are_started(
    descriptor: int, steps: list[tuple[str, int, int]]
) -> None:
    """After every step of either of two jobs, whatever row a session has."""
    file, first = listed(descriptor)
    file.write_job(file.take(), 8, JobRow(5, 15, 0.5, True))
    lists = [first, SessionList(file, 8)]
    since: list[int | None] = [None, None]
    for tick, (step, number, which) in enumerate(steps):
        sessions = lists[which]
        session = sessions.sessions.get(number)
        if step == "add" and session is None:
            sessions.add(WorkerSession(number, tick))
        elif step == "close" and session is not None:
            sessions.close(session, tick)
        elif step == "remove" and session is not None:
            sessions.remove([number])
        elif step in ("start", "end"):
            since[which] = tick if step == "start" else None
            sessions.set_starting(since[which])
        jobs = read_jobs(descriptor)
        for owner, expected, started in zip((OWNER, 8), lists, since, strict=True):
            read = jobs[owner].sessions
            starting = read.pop(STARTING, None)
            assert (None if starting is None else starting.opened) == started
            assert {one.number: (one.opened, one.closed) for one in read.values()} == {
                one.number: (one.opened, one.closed) for one in expected.sessions.values()
            }
