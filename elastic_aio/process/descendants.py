"""The descendants of a job's workers: the list of the workers' sessions, and scans of /proc.

A process is a descendant if

* its **session** is one that a worker leads (workers are started by `setsid`; a
shell's job control makes new process groups, not new sessions); or
* its **parent** is a descendant (even with another session and an empty environment); or
* its **environment** holds the job's marker, a variable whose *name* is unique to
the job, so that nested jobs carry both (a daemon leaves the session, but keeps the environment),
*and* its parent may have adopted it.  The marker alone proves nothing: `sbatch --export=ALL` hands
it to a job whose parent is a daemon of the scheduler.

A session counts only while its number cannot have been used again (`WorkerSession`).

The list of the sessions is an anonymous file in memory, which the program writes and its guardian
reads.  Writing wakes no process, and the file outlives the program while the guardian holds it
open.  All jobs of the program are in one file, so that one guardian knows them, and a guardian that
takes the place of another one too.

A line is a row.  That of a job (`j`) has the number of its owner, the ticks at which it began, what
its processes get when they are ended (a signal, a grace in seconds, the scope `o` or `a`: in order,
or all at once), and whether they are to be ended now (see `JobRow`).  That of a session (`s`) has
the number of its owner, its own number, the ticks at which its leader started, and the ticks at
which the leader was reaped (`-` until then).  Padding and a checksum follow.

A SIGKILL of the program can cut a write short.  A row of 64 bytes lies within one page of the file,
which the kernel copies at once; if it is torn even so, the checksum tells, and only this entry is
lost: the processes of a session are then found by the marker, as before they were listed.  A row
does not move; the number of a row that is free again is used again.

An open row with the number 0 (`STARTING`) says that children are being started since these ticks. A
child has neither a session nor the marker before its exec, which a file system can delay.

The guardian runs this file in a bare interpreter, as `proc`.
"""

from __future__ import annotations

import binascii
import itertools
import os

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:  # it has none in the guardian
    from elastic_aio.process import proc
else:
    import proc
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

STARTING = 0
"""Number of the row for children that are being started."""
FINAL = -1
"""The `end` of a job that does not go on."""
ROW_SIZE = 64
"""Bytes."""
_BODY = ROW_SIZE - 9
# How often one scan looks again at execs under way, and the pause before, in seconds: an
# exec hides a process for about a millisecond, on a busy host or a slow disk for longer.
_LOOKS = 100
_PAUSE_S = 0.002


def marker_value() -> str:
    """Return the value of the marker of a job whose launcher is this process."""
    return f"{os.getpid()}@{proc.pid_namespace()}"


def launcher_of(value: str) -> int | None:
    """Return the pid of the launcher that the value of a marker names; None if it is unknown."""
    pid, _, namespace = value.partition("@")
    is_pid = pid.isdecimal() and len(pid) < 10  # any process may write a variable
    return int(pid) if is_pid and namespace and namespace == proc.pid_namespace() else None


class WorkerSession:
    """A worker's session: its number is the worker's pid, and `opened` when that has started.

    `closed` is when the leader was reaped, None until then; both times are in ticks.  The kernel
    does not use the number again while the leader is not reaped, nor while any member lives.  So a
    process with this session id that started before `closed` is certainly a member.  A later
    process is a member only if such a process still exists.
    """

    __slots__ = ("closed", "number", "opened")

    def __init__(self, number: int, opened: int, closed: int | None = None) -> None:
        self.number = number
        self.opened = opened
        self.closed = closed

    def is_certain(self, pid: int, start: int) -> bool:
        """Return whether a process with this session id is certainly a member."""
        if pid == self.number and start != self.opened:
            return False
        return self.closed is None or start <= self.closed


class JobRow:
    """What the list says of one job.

    `end` is 0 for a job that runs, the number of the request if the guardian is asked to end what
    is left of it now, and `FINAL` if its program goes on without it.
    """

    __slots__ = ("end", "grace", "is_ordered", "sessions", "signal", "since")

    def __init__(
        self, since: int, signal: int, grace: float, is_ordered: bool, end: int = 0
    ) -> None:
        self.since = since
        self.signal = signal
        self.grace = grace
        self.is_ordered = is_ordered
        self.end = end
        self.sessions: dict[int, WorkerSession] = {}


class ListFile:
    """The rows of a list, which several threads may write; the caller closes the descriptor."""

    def __init__(self, descriptor: int) -> None:
        """Begin with an empty file."""
        self.descriptor = descriptor
        self.rows = 0
        """How many rows the file has, those that are free included."""
        self.sessions: dict[int, WorkerSession] = {}
        """The sessions of all jobs, by number."""
        self.members: dict[int, tuple[int, int]] = {}
        """Processes that scans have found in them, by pid: the number of the inode of its directory
        in /proc, and that of the session.  It was in no other one before."""
        self._numbers = itertools.count()
        self._free: list[int] = []

    def take(self) -> int:
        """Return a row that is free."""
        try:
            return self._free.pop()
        except IndexError:
            row = next(self._numbers)
            self.rows = max(self.rows, row + 1)
            return row

    def give_back(self, rows: Iterable[int]) -> None:
        """Let rows be taken again, whatever they hold."""
        self._free.extend(rows)

    def write_job(self, row: int, owner: int, job: JobRow) -> None:
        scope = b"o" if job.is_ordered else b"a"
        body = b"%x %x %.6g %s %d" % (job.since, job.signal, job.grace, scope, job.end)
        self._write(row, b"j %x %s" % (owner, body))

    def write_session(self, row: int, owner: int, session: WorkerSession) -> None:
        closed = b"-" if session.closed is None else b"%x" % session.closed
        body = b"%x %x %s" % (session.number, session.opened, closed)
        self._write(row, b"s %x %s" % (owner, body))

    def _write(self, row: int, body: bytes) -> None:
        body = body.ljust(_BODY)
        line = b"%s%08x\n" % (body, binascii.crc32(body))
        os.pwrite(self.descriptor, line, row * ROW_SIZE)

    def clear(self, rows: Iterable[int]) -> None:
        """Empty rows, each within one write; they stay taken."""
        first = last = -1
        for row in sorted(rows):
            if row != last:
                self._fill(first, last)
                first = row
            last = row + 1
        self._fill(first, last)

    def _fill(self, first: int, last: int) -> None:
        if last > first:
            os.pwrite(self.descriptor, bytes((last - first) * ROW_SIZE), first * ROW_SIZE)


class SessionList:
    """The sessions of a job's workers by number, as `sessions`, and their rows in a list."""

    def __init__(self, file: ListFile | None = None, owner: int = 0) -> None:
        """Begin without sessions; without a `file` they are not listed."""
        self.program = file or ListFile(-1)
        self.sessions: dict[int, WorkerSession] = {}
        self._rows: dict[int, int] = {}  # by number
        self._file = file
        self._owner = owner

    def add(self, session: WorkerSession) -> None:
        self.sessions[session.number] = self.program.sessions[session.number] = session
        self._write(session)

    def close(self, session: WorkerSession, ticks: int) -> None:
        session.closed = ticks
        if self.sessions.get(session.number) is session:
            self._write(session)

    def remove(self, numbers: Iterable[int]) -> None:
        rows = []
        for number in numbers:
            self._forget(number)
            if number in self._rows:
                rows.append(self._rows.pop(number))
        if self._file is not None:
            self._file.clear(rows)
            self._file.give_back(rows)

    def set_starting(self, since: int | None) -> None:
        """Note since which ticks children are being started; None: not any more."""
        session = WorkerSession(STARTING, since or 0, 0 if since is None else None)
        self._write(session)

    def detach(self) -> None:
        """Write no more: the job is not listed any more.  Idempotent."""
        file, self._file = self._file, None
        for number in [*self.sessions]:
            self._forget(number)
        if file is not None:
            file.give_back(self._rows.values())
            self._rows.clear()

    def _forget(self, number: int) -> None:
        session = self.sessions.pop(number)
        if self.program.sessions.get(number) is session:
            del self.program.sessions[number]

    def _write(self, session: WorkerSession) -> None:
        if self._file is not None:  # else a process that could not be killed has ended after all
            number = session.number
            if number not in self._rows:
                self._rows[number] = self._file.take()
            self._file.write_session(self._rows[number], self._owner, session)


def read_jobs(descriptor: int) -> dict[int, JobRow]:
    """Return the listed jobs by owner, without torn rows.

    A job has its sessions by number, `STARTING` among them while children are started.
    """
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    jobs: dict[int, JobRow] = {}
    sessions: list[tuple[int, WorkerSession]] = []
    for start in range(0, len(content), ROW_SIZE):
        body, checksum = content[start : start + _BODY], content[start + _BODY : start + ROW_SIZE]
        if checksum != b"%08x\n" % binascii.crc32(body):
            continue
        kind, owner, *fields = body.split()
        if kind == b"j":
            since, signal, grace, scope, end = fields
            job = JobRow(int(since, 16), int(signal, 16), float(grace), scope == b"o", int(end))
            jobs[int(owner, 16)] = job
        else:
            number, opened, closed = fields
            if number != b"0" or closed == b"-":
                ended = None if closed == b"-" else int(closed, 16)
                session = WorkerSession(int(number, 16), int(opened, 16), ended)
                sessions.append((int(owner, 16), session))
    for owner_number, session in sessions:
        if owner_number in jobs:  # else the row is one of a former job
            jobs[owner_number].sessions[session.number] = session
    return jobs


# ------------------------------------------------------------------------------ scans


def may_be_in_exec(process: proc.ProcEntry, program: tuple[int, int, int] | None) -> bool:
    """Return whether a process, which `program` has started, may not have ended its exec.

    It shows its parent's program first, and then, in the exec, no arguments.
    """
    present = proc.read_process(process.pid)
    if present is None or present.start != process.start or present.is_dead:
        return False
    if present.flags & (proc.PF_KTHREAD | proc.PF_EXITING):
        return False
    is_before = program is not None and proc.program_of(process.pid) == program
    return is_before or proc.read(process.pid, "cmdline") == b""


def list_execs(since: int, program: tuple[int, int, int] | None) -> list[proc.ProcEntry]:
    """Return the processes that started at `since` ticks or later and may be in an exec.

    Returns none if this process has no descriptor or memory left.
    """
    me = proc.own_pid()
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        entries = [entry for pid in pids if pid != me and (entry := proc.read_process(pid))]
        return [item for item in entries if item.start >= since and may_be_in_exec(item, program)]
    except OSError:
        return []


class Snapshot:
    """The processes of this host at one moment, each read when a scan asks for it.

    Scans of several jobs share one: each process is read once for all of them.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        """List the processes, or raise an OSError; a shared one keeps what it reads."""
        with os.scandir("/proc") as directory:
            self.inodes = {
                int(item.name): item.inode() for item in directory if item.name.isdecimal()
            }
        self.inodes.pop(proc.own_pid(), None)
        self._processes: dict[int, proc.ProcEntry | None] = {}
        self._environments: dict[tuple[int, int], bytes] = {}
        self._is_shared = is_shared

    def read(self, pid: int) -> proc.ProcEntry | None:
        if not self._is_shared:
            return proc.read_process(pid)
        if pid not in self._processes:
            self._processes[pid] = proc.read_process(pid)
        return self._processes[pid]

    def environment_of(self, process: proc.ProcEntry) -> bytes | None:
        """Do the same as the function; an empty one, which an exec may hide, is read again."""
        environment = self._environments.get(process.identity) or environment_of(process)
        if environment and self._is_shared:
            self._environments[process.identity] = environment
        return environment


class Scanner:
    """Finds the descendants of a job's workers; remembers what later scans need not look at."""

    def __init__(
        self,
        marker: bytes,
        since: int,
        sessions: Mapping[int, WorkerSession],
        adopters: Callable[[], Collection[int]],
        hidden: set[tuple[int, int]] | None = None,
        program: ListFile | None = None,
    ) -> None:
        """Scan for one job.

        Args:
            marker: name of the job's environment variable.
            since: ticks at which the job began; no older process can belong to it.
            sessions: the workers' sessions by number, which may change between scans.
            adopters: returns the pids of the processes that adopt orphans of the job; called if
                only the marker says that a process is of the job.
            hidden: identities of the processes that an exec hid to the end of a scan; scanners
                that share them do not wait for the same exec.
            program: what is known of the other jobs of this program, whose workers are not read
                again and again.
        """
        self.marker = marker
        self.since = since
        self.sessions = sessions
        self.adopters = adopters
        # The processes that are older than the job, most of a host, as pids and the numbers of
        # their directories' inodes.  The kernel drops these inodes with the process
        # (proc_flush_pid), so that a process with the same pid has a directory with another
        # number; readdir(3) gives the number at no cost.
        self.older: dict[int, int] = {}
        self._hidden: set[tuple[int, int]] = set() if hidden is None else hidden
        self._program = program or ListFile(-1)

    def find(
        self, known: Mapping[int, int], snapshot: Snapshot | None = None
    ) -> Generator[float, None, list[proc.ProcEntry]]:
        """Read every process once; return the live descendants of the workers.

        Yields before each process, so that a caller with an event loop can run other tasks: 0, or
        the seconds to pause because an exec hides an environment.  A scan pauses for 0.2 s at most,
        and never twice for the same process.  `known` are the start times, by pid, of known
        descendants.

        Raises:
            OSError: there is no /proc, or this process has no descriptors or memory left.
        """
        snapshot = snapshot or Snapshot()
        found = _Found(self, snapshot)
        hidden: list[proc.ProcEntry] = []
        for pid, inode in snapshot.inodes.items():
            if self.older.get(pid) == inode or self._is_elsewhere(pid, inode):
                continue
            yield 0.0
            process = snapshot.read(pid)
            if process is None or process.is_dead:
                continue
            if process.start < self.since:
                self.older[pid] = inode
            elif known.get(pid) == process.start:
                found.ours[pid] = process
            elif self._note_elsewhere(process, inode):
                continue
            elif found.classify(process) is None:
                hidden.append(process)
        yield from found.add_relatives()
        hidden += found.undecided()
        for _ in range(_LOOKS):
            # Session and parent have decided for some, and an earlier scan has waited for others.
            hidden = [
                item
                for item in hidden
                if not (item.pid in found.ours or item.identity in self._hidden)
            ]
            if not hidden:
                break
            yield _PAUSE_S
            hidden = [*filter(found.is_hidden, hidden)]
            yield from found.add_relatives()
            hidden += found.undecided()
        self._hidden.update(process.identity for process in hidden)
        self._forget_members(snapshot)
        return list(found.ours.values())

    def _is_elsewhere(self, pid: int, inode: int) -> bool:
        """Return whether a process is known as a member of a session of another job."""
        member, number = self._program.members.get(pid, (0, 0))
        return member == inode and number not in self.sessions

    def _note_elsewhere(self, process: proc.ProcEntry, inode: int) -> bool:
        """Note a member of a session of another job: it is none of this one, now and later."""
        number = process.session
        session = self._program.sessions.get(number)
        if session is None or number in self.sessions:
            return False
        if not session.is_certain(process.pid, process.start):
            return False
        self._program.members[process.pid] = inode, number
        return True

    def _forget_members(self, snapshot: Snapshot) -> None:
        """Forget the members that have ended, once they are as many as the processes."""
        members = self._program.members
        if len(members) > 2 * len(snapshot.inodes):
            for pid in [*members]:  # other threads scan too
                if pid not in snapshot.inodes:
                    members.pop(pid, None)


class _Found:
    """The processes of the job that a scan has found, and those that may belong to it."""

    def __init__(self, scanner: Scanner, snapshot: Snapshot) -> None:
        self.ours: dict[int, proc.ProcEntry] = {}
        self._unknown: dict[int, proc.ProcEntry] = {}
        self._marked: set[int] = set()
        self._scanner = scanner
        self._snapshot = snapshot
        self._adopter_pids: Collection[int] | None = None

    def classify(self, process: proc.ProcEntry) -> bool | None:
        """Note a process; return whether it has a sign of the job; None: an exec hides it."""
        session = self._scanner.sessions.get(process.session)
        if session and session.is_certain(process.pid, process.start):
            self.ours[process.pid] = process
            return True
        self._unknown[process.pid] = process
        is_marked = self._has_marker(process)
        if is_marked:
            self._marked.add(process.pid)
        return is_marked

    def _has_marker(self, process: proc.ProcEntry) -> bool | None:
        """Return whether the environment holds the marker; None: an exec hides it."""
        if process.flags & proc.PF_KTHREAD:
            return False
        environment = self._snapshot.environment_of(process)
        if environment == b"" and not process.flags & proc.PF_EXITING:
            # For about a millisecond of an exec neither the environment nor the arguments can
            # be read; a process that really has no environment still has arguments.
            may_be_in_exec = proc.read(process.pid, "cmdline") == b""
            # Once more: the exec may have ended between the two reads.
            environment = self._snapshot.environment_of(process)
            if may_be_in_exec and environment == b"":
                return None
        return b"\0" + self._scanner.marker + b"=" in b"\0" + (environment or b"")

    def is_hidden(self, former: proc.ProcEntry) -> bool:
        """Look again at a process; return whether an exec still hides it."""
        process = proc.read_process(former.pid)
        if process is None or process.is_dead or process.start != former.start:
            return False
        return self.classify(process) is None

    def undecided(self) -> list[proc.ProcEntry]:
        """Return the processes with the marker whose parent is about to leave them."""
        parents = (
            (self._unknown[pid], self._unknown.get(self._unknown[pid].parent))
            for pid in self._marked & self._unknown.keys()
        )
        return [process for process, parent in parents if parent and parent.flags & proc.PF_EXITING]

    def add_relatives(self) -> Iterator[float]:
        """Add members of their sessions, descendants, and orphans that have the marker."""
        pinned = {process.session for process in self.ours.values()} & self._scanner.sessions.keys()
        has_grown = True
        while has_grown:
            has_grown = False
            for process in list(self._unknown.values()):
                # A leader whose start time is another one than the worker's is a new process.
                by_session = process.session in pinned and process.pid != process.session
                if by_session or process.parent in self.ours or self._is_orphan(process):
                    self.ours[process.pid] = self._unknown.pop(process.pid)
                    has_grown = True
            yield 0.0

    def _is_orphan(self, process: proc.ProcEntry) -> bool:
        if process.pid not in self._marked:
            return False
        if self._adopter_pids is None:
            self._adopter_pids = self._scanner.adopters()
        return process.parent in self._adopter_pids


def may_adopt(pid: int) -> set[int]:
    """Return the pids that orphans of a process may have as their parent.

    These are its ancestors, since the kernel does not show which of them is a child subreaper, and
    process 1 of this pid namespace (PR_SET_CHILD_SUBREAPER in prctl(2)).
    """
    found = set() if proc.is_foreign() else {1}
    while process := proc.read_process(pid):
        pid = process.parent
        if pid in found or not pid:
            break
        found.add(pid)
    return found


def environment_of(process: proc.ProcEntry) -> bytes | None:
    """Return an environment; None: gone, or another user's; session and parent decide."""
    if not process.flags & proc.PF_EXITING:
        return proc.read(process.pid, "environ")
    # The main thread has ended, and has no memory any more; others may run.
    threads = proc.list_numbers(process.pid, "task") if process.threads > 1 else []
    contents = (proc.read(process.pid, f"task/{thread}/environ") for thread in threads)
    return next(filter(None, contents), None)
