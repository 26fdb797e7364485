"""Scans of /proc for the descendants of a job's workers, and signals to exactly those.

The guardian runs this file in a bare interpreter (`python -I -S`), so it imports four
small modules of the standard library and nothing else.  A process is a descendant if

* its **session** is one that a worker leads (workers are started by `setsid`; a
  shell's job control makes new process groups, not new sessions); or
* its **parent** is a descendant (even with another session and an empty environment); or
* its **environment** holds the job's marker, a variable whose *name* is unique to
  the job, so that nested jobs carry both (a daemon leaves the session, but keeps the
  environment), *and* its parent may have adopted it.  The marker alone proves nothing:
  `sbatch --export=ALL` hands it to a job whose parent is a daemon of the scheduler.

A pid is not an identity: pids and session ids are used again.  A process is identified
by its pid *and* its start time, it is signalled through a pidfd that was checked
against both, and a session counts only while its number cannot have been used again
(see `session_list`).
"""

from __future__ import annotations

import errno
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would double the guardian's memory
    import signal
    from collections.abc import Callable, Collection, Generator, Iterator, Mapping

    from elastic_aio.process.descendants import WorkerSession
else:
    import _signal as signal  # without the enumerations: 3 ms of the guardian's start

_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# How often one scan looks again at execs under way, and the pause before, in seconds: an
# exec hides a process for about a millisecond, on a busy host or a slow disk for longer.
_LOOKS = 100
_PAUSE_S = 0.002
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Flags of a task (include/linux/sched.h): it is past the point of no return of its exit; it
# is a thread of the kernel.
_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000


def ticks_now() -> int:
    """Return the time since boot in the unit of process start times, rounded as the kernel does."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // (1_000_000_000 // _TICKS_PER_SECOND)


class ProcEntry:
    """One process as `/proc` shows it; (`pid`, `start`) is its identity.

    `start` is in clock ticks since boot; `flags` are those of its main thread.
    """

    __slots__ = ("flags", "parent", "pid", "session", "start", "state", "threads")

    def __init__(
        self,
        pid: int,
        parent: int,
        session: int,
        start: int,
        state: str = "S",
        flags: int = 0,
        threads: int = 1,
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.start = start
        self.state = state
        self.flags = flags
        self.threads = threads

    def __repr__(self) -> str:
        return f"<ProcEntry {self.pid} of session {self.session}, state {self.state}>"

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time, which no other process of this host has until it reboots."""
        return self.pid, self.start

    @property
    def is_dead(self) -> bool:
        """Whether its last thread has ended.

        A process whose main thread has ended is shown as a zombie while its other threads
        run.
        """
        return self.state in "XZ" and self.threads <= 1


def parse_stat(content: bytes) -> ProcEntry:
    """Read `/proc/<pid>/stat` (proc(5)).

    The name stands in parentheses and may contain anything, so fields are counted from
    the last parenthesis.

    Raises:
        ValueError: the content has another format.
    """
    pid = int(content[: content.index(b" ")])
    fields = content[content.rindex(b")") + 2 :].split()
    if len(fields) < 20:
        raise ValueError("stat is too short")
    return ProcEntry(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        state=fields[0].decode("ascii", "replace"),
        flags=int(fields[6]),
        threads=int(fields[17]),
    )


def read_process(pid: int) -> ProcEntry | None:
    """Read one process; None when it is gone.

    Raises:
        OSError: this process has no descriptor or memory left.
    """
    content = _read(f"/proc/{pid}/stat")
    try:
        return None if content is None else parse_stat(content)
    except ValueError:
        return None


def program_of(pid: int) -> tuple[int, int, int] | None:
    """Return what identifies a process and its forks; None: gone, or another user's.

    These are device and inode of its program, and where its stack begins (`startstack` of
    proc(5)).  A child has all three until its exec; the kernel places the stack of each
    exec at random.

    Raises:
        OSError: this process has no descriptor or memory left.
    """
    try:
        status = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    fields = (_read(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()
    return (status.st_dev, status.st_ino, int(fields[25])) if len(fields) > 25 else None


def may_be_in_exec(process: ProcEntry, program: tuple[int, int, int] | None) -> bool:
    """Return whether a process, which `program` has started, may not have ended its exec.

    It shows the program of its parent first, and then, in the exec, no arguments.

    Raises:
        OSError: this process has no descriptor or memory left.
    """
    present = read_process(process.pid)
    if present is None or present.start != process.start or present.is_dead:
        return False
    if present.flags & (_PF_KTHREAD | _PF_EXITING):
        return False
    is_before = program is not None and program_of(process.pid) == program
    return is_before or _read(f"/proc/{process.pid}/cmdline") == b""


def list_execs(since: int, program: tuple[int, int, int] | None) -> list[ProcEntry]:
    """Return the processes that started at `since` ticks or later and may be in an exec.

    Returns none if this process has no descriptor or memory left.
    """
    me = os.readlink("/proc/self")
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != me]
        entries = [entry for pid in pids if (entry := read_process(pid)) is not None]
        return [item for item in entries if item.start >= since and may_be_in_exec(item, program)]
    except OSError:
        return []


class ScanCache:
    """Processes that the next scans of a job need not look at, or need not wait for.

    `older` has the processes that are older than the job, most of a host, as pids and the
    numbers of their directories' inodes.  The kernel drops these inodes with the process
    (proc_flush_pid), so that a process with the same pid has a directory with another
    number; readdir(3) gives the number at no cost.

    `hidden` has the identities of the processes that an exec hid to the end of a scan.
    """

    def __init__(self) -> None:
        self.older: dict[int, int] = {}
        self.hidden: set[tuple[int, int]] = set()


def find_descendants(
    marker: bytes,
    since: int,
    sessions: Mapping[int, WorkerSession],
    known: Mapping[int, int],
    cache: ScanCache,
    adopters: Callable[[], Collection[int]],
) -> Generator[float, None, list[ProcEntry]]:
    """Read every process once; return the live descendants of the workers.

    Yields before each process, so that a caller with an event loop can run other tasks.
    The value is 0, or the seconds to pause because an exec hides an environment; a scan
    pauses for 0.2 s at most, and never twice for the same process.

    Args:
        marker: name of the job's environment variable.
        since: ticks at which the job began; no older process can belong to it.
        sessions: the workers' sessions by number.
        known: start times, by pid, of processes that are known as descendants.
        cache: the same for all scans of a job.
        adopters: returns the pids of the processes that adopt orphans of the job; called if
            the environment of a process has the marker and no other sign decides.

    Raises:
        OSError: there is no /proc, or this process has no descriptors or memory left.
    """
    found = _Found(marker, sessions, adopters)
    hidden: list[ProcEntry] = []
    me = os.readlink("/proc/self")
    with os.scandir("/proc") as directory:
        inodes = {int(item.name): item.inode() for item in directory if item.name.isdecimal()}
    inodes.pop(int(me), None)
    for pid, inode in inodes.items():
        if cache.older.get(pid) == inode:
            continue
        yield 0.0
        process = read_process(pid)
        if process is None or process.is_dead:
            continue
        if process.start < since:
            cache.older[pid] = inode
        elif known.get(pid) == process.start:
            found.ours[pid] = process
        elif found.classify(process) is None:
            hidden.append(process)
    yield from found.add_relatives()
    hidden += found.undecided()
    for _ in range(_LOOKS):
        # Session and parent have decided for some, and an earlier scan has waited for others.
        hidden = [
            item for item in hidden if not (item.pid in found.ours or item.identity in cache.hidden)
        ]
        if not hidden:
            break
        yield _PAUSE_S
        hidden = [*filter(found.is_hidden, hidden)]
        yield from found.add_relatives()
        hidden += found.undecided()
    cache.hidden.update(process.identity for process in hidden)
    return list(found.ours.values())


class _Found:
    """What one scan has found: the processes of the job, and those that may belong to it."""

    def __init__(
        self,
        marker: bytes,
        sessions: Mapping[int, WorkerSession],
        adopters: Callable[[], Collection[int]],
    ) -> None:
        self.ours: dict[int, ProcEntry] = {}
        self._unknown: dict[int, ProcEntry] = {}
        self._marked: set[int] = set()
        self._marker = marker
        self._sessions = sessions
        self._adopters = adopters
        self._adopter_pids: Collection[int] | None = None

    def classify(self, process: ProcEntry) -> bool | None:
        """Note a process; return whether it has a sign of the job; None: an exec hides it."""
        session = self._sessions.get(process.session)
        if session and session.is_certain(process.pid, process.start):
            self.ours[process.pid] = process
            return True
        self._unknown[process.pid] = process
        is_marked = _has_marker(process, self._marker)
        if is_marked:
            self._marked.add(process.pid)
        return is_marked

    def is_hidden(self, former: ProcEntry) -> bool:
        """Look again at a process; return whether an exec still hides it."""
        process = read_process(former.pid)
        if process is None or process.is_dead or process.start != former.start:
            return False
        return self.classify(process) is None

    def undecided(self) -> list[ProcEntry]:
        """Return the processes with the marker whose parent is about to leave them to another."""
        parents = (
            (self._unknown[pid], self._unknown.get(self._unknown[pid].parent))
            for pid in self._marked & self._unknown.keys()
        )
        return [process for process, parent in parents if parent and parent.flags & _PF_EXITING]

    def add_relatives(self) -> Iterator[float]:
        """Add members of their sessions, descendants, and orphans that have the marker."""
        pinned = {process.session for process in self.ours.values()} & self._sessions.keys()
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

    def _is_orphan(self, process: ProcEntry) -> bool:
        if process.pid not in self._marked:
            return False
        if self._adopter_pids is None:
            self._adopter_pids = self._adopters()
        return process.parent in self._adopter_pids


def may_adopt(pid: int) -> set[int]:
    """Return the pids that orphans of a process may have as their parent.

    These are its ancestors, since the kernel does not show which of them is a child
    subreaper, and process 1 of this pid namespace (PR_SET_CHILD_SUBREAPER in prctl(2)).

    Raises:
        OSError: this process has no descriptors or memory left.
    """
    found = set() if is_foreign() else {1}
    while process := read_process(pid):
        pid = process.parent
        if pid in found or not pid:
            break
        found.add(pid)
    return found


def _has_marker(process: ProcEntry, marker: bytes) -> bool | None:
    """Return whether the environment holds the marker; None: an exec hides it."""
    if process.flags & _PF_KTHREAD:
        return False
    environment = _environment(process)
    if environment == b"" and not process.flags & _PF_EXITING:
        # For about a millisecond of an exec neither the environment nor the arguments can
        # be read; a process that really has no environment still has arguments.
        may_be_in_exec = _read(f"/proc/{process.pid}/cmdline") == b""
        # Once more: the exec may have ended between the two reads.
        environment = _environment(process)
        if may_be_in_exec and environment == b"":
            return None
    return b"\0" + marker + b"=" in b"\0" + (environment or b"")


def _environment(process: ProcEntry) -> bytes | None:
    """Return the environment; None: gone, or another user's; session and parent decide."""
    if not process.flags & _PF_EXITING:
        return _read(f"/proc/{process.pid}/environ")
    # The main thread has ended, and has no memory any more; others may run.
    try:
        threads = os.listdir(f"/proc/{process.pid}/task") if process.threads > 1 else []
    except OSError as error:
        if error.errno in _LACK:
            raise
        return None
    contents = (_read(f"/proc/{process.pid}/task/{thread}/environ") for thread in threads)
    return next(filter(None, contents), None)


def iter_descendants(pid: int) -> Iterator[ProcEntry]:
    """Yield the descendants of a process, as far as main threads have started them.

    One small read for each, where the kernel lists children; nothing where it does
    not (CONFIG_PROC_CHILDREN).

    Raises:
        OSError: this process has no descriptors or memory left.
    """
    parents = [pid]
    while parents:
        # A full scan still finds those of a kernel that does not list them.
        for child in list_children(parents.pop()):
            if process := read_process(child):
                yield process
                parents.append(child)


def list_children(pid: int) -> list[int]:
    """Return the children that the main thread of a process has started.

    Returns none if the process is gone, or this kernel lists none.

    Raises:
        OSError: this process has no descriptors or memory left.
    """
    return [*map(int, (_read(f"/proc/{pid}/task/{pid}/children") or b"").split())]


def read_status(pid: int, *names: bytes) -> dict[bytes, bytes]:
    """Return the fields of `/proc/<pid>/status` (proc_pid_status(5)); none if it is gone.

    With `names`, which takes a third of the time, only these.

    Raises:
        OSError: this process has no descriptors or memory left.
    """
    content = b"\n" + (_read(f"/proc/{pid}/status") or b"")
    fields = {}
    for name in names or [line.partition(b":")[0] for line in content.splitlines()[1:]]:
        label = b"\n%s:" % name
        if (found := content.find(label)) >= 0:
            begin = found + len(label)
            fields[name] = content[begin : content.find(b"\n", begin)].strip()
    return fields


def name_of(pid: int) -> str:
    """Return program and script of a process, as `python3.11 upload.py`; "?" if it is gone."""
    try:
        words = (_read(f"/proc/{pid}/cmdline") or b"").decode("utf-8", "replace").split("\0")
        # A word with blanks is code, as in `sh -c "sleep 9; upload"`.
        plain = [word for word in words[1:] if word[:1] != "-" and len(word.split()) == 1]
        name = " ".join(word.rpartition("/")[2] for word in [words[0], *plain[:1]]).strip()
        name = name or (_read(f"/proc/{pid}/comm") or b"?").decode("utf-8", "replace").strip()
    except OSError:
        return "?"  # no descriptor is left
    return f"{name[:37]}..." if len(name) > 40 else name


def is_foreign() -> bool:
    """Return whether /proc shows the pids of another namespace, pid_namespaces(7)."""
    try:
        return os.readlink("/proc/self") != str(os.getpid())
    except OSError:
        return False


def shown_pid(child: int) -> int:
    """Return the pid under which /proc shows a child that is not reaped yet.

    Raises:
        OSError: no descriptor is left.
    """
    if not is_foreign():
        return child
    descriptor = os.pidfd_open(child)
    try:
        information = _read(f"/proc/self/fdinfo/{descriptor}") or b""
    finally:
        os.close(descriptor)
    fields = dict(line.split(b":", 1) for line in information.splitlines())
    return int(fields.get(b"Pid", child))


def open_pidfd(process: ProcEntry) -> int | None:
    """Return a descriptor for signals to exactly this process; None when it is gone.

    It is a pidfd, or its directory in a /proc of another pid namespace.

    Raises:
        OSError: no descriptor is left.
    """
    try:
        if is_foreign():
            descriptor = os.open(f"/proc/{process.pid}", os.O_RDONLY | os.O_CLOEXEC)
        else:
            descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, FileNotFoundError):
        return None
    # The pid may have been used again before the descriptor was opened.
    try:
        present = read_process(process.pid)
    except OSError:
        os.close(descriptor)
        raise
    if present is None or present.start != process.start:
        os.close(descriptor)
        return None
    return descriptor


def signal_process(process: ProcEntry, number: int) -> None:
    """Send a signal to exactly this process, unless it is gone or no descriptor is left."""
    try:
        descriptor = open_pidfd(process)
    except OSError:
        return
    if descriptor is not None:
        send(descriptor, number)
        os.close(descriptor)


def needs_continue(process: ProcEntry, number: int) -> bool:
    """Return whether a process is stopped: it acts on a signal only after SIGCONT."""
    return process.state == "T" and number not in (0, signal.SIGKILL, signal.SIGSTOP)


def send(descriptor: int, number: int) -> bool:
    """Send a signal through a pidfd; return whether the process existed and allowed it."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _read(path: str) -> bytes | None:
    """Return the content of a file in /proc; None if it cannot be read.

    Raises:
        OSError: this process has no descriptor or memory left to read it, which must
            not be mistaken for an absence.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, 65536)
            while content and len(content) % 65536 == 0 and (more := os.read(descriptor, 65536)):
                content += more
            return content
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _LACK:
            raise
        return None
