"""Find and signal everything that descends from a job's workers, and nothing else.

The guardian runs this file in a bare interpreter (`python -I -S`), so it imports
three small modules and nothing of ours.  Three signs tell a descendant:

* its **session** is one that a worker leads (workers are started by `setsid`; a
  shell's job control makes new process groups, not new sessions);
* its **environment** holds the job's marker, a variable whose *name* is unique to
  the job, so that nested jobs carry both (daemons leave the session, not this);
* its **parent** is a descendant (even with another session and an empty
  environment).

A number is not an identity: pids and session ids are used again.  A process is
known by its pid *and* its start time, it is signalled through a pidfd that was
checked against both, and a session counts only while its number cannot have been
given to somebody else (see `Session`).
"""

from __future__ import annotations

import errno
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would double the guardian's memory
    from collections.abc import Generator, Iterator, Mapping

_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# How many looks an exec may spoil: some 5 ms each, and it takes one or two.
_EXEC_LOOKS = 40
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def ticks_now() -> int:
    """Return the kernel's time since boot in the unit of process start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND)


class Process:
    """One process as `/proc` shows it; (`pid`, `start`) is its identity.

    `start` is in clock ticks since boot.
    """

    __slots__ = ("is_dead", "parent", "pid", "session", "start", "state")

    def __init__(
        self, pid: int, parent: int, session: int, start: int, state: str, is_dead: bool
    ) -> None:
        """Keep what was read."""
        self.pid = pid
        self.parent = parent
        self.session = session
        self.start = start
        self.state = state
        self.is_dead = is_dead

    def __repr__(self) -> str:
        return f"<Process {self.pid} of session {self.session}, state {self.state}>"

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process on this machine ever shares until reboot."""
        return self.pid, self.start


def parse_stat(content: bytes) -> Process:
    """Read `/proc/<pid>/stat` (proc(5)).

    The name stands in parentheses and may hold anything, so fields are counted
    from the last one.  A process whose main thread ended shows as a zombie while
    its other threads live on: it is dead only when no further thread is counted.

    Raises:
        ValueError: the content has another form.
    """
    pid = int(content[: content.index(b" ")])
    fields = content[content.rindex(b")") + 2 :].split()
    if len(fields) < 20:
        raise ValueError("stat is too short")
    state = fields[0].decode("ascii", "replace")
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        state=state,
        is_dead=state in "XZ" and int(fields[17]) <= 1,
    )


def read_process(pid: int) -> Process | None:
    """Read one process; None when it is gone.

    Raises:
        OSError: this process lacks the means to look (descriptors, memory), which
            must not be taken for an absence.
    """
    try:
        return parse_stat(_read(f"/proc/{pid}/stat"))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in _LACK:
            raise
        return None


class Session:
    """A worker's session: its number is the worker's pid.

    The number is pinned while the leader is not reaped, and then while any member
    lives.  A process with this session id is therefore certainly ours when it
    started before the leader was reaped (`closed`, in ticks; None while it is
    not); any other one is ours if such a process still pins the number.
    """

    __slots__ = ("closed", "number", "opened")

    def __init__(self, number: int, opened: int, closed: int | None = None) -> None:
        """Keep the number and the ticks at which the leader started and was reaped."""
        self.number = number
        self.opened = opened
        self.closed = closed

    def is_certain(self, process: Process) -> bool:
        """Whether `process`, which shows this number, is surely a member."""
        if process.pid == self.number and process.start != self.opened:
            return False
        return self.closed is None or process.start <= self.closed


class Elders:
    """What one look tells the next one: above all which processes are older than the job.

    Looks come in close succession, and most processes of a machine are older.  A pid
    may be skipped as long as it cannot have been used again: the kernel hands pids out
    in ascending order (`last pid` of proc_loadavg(5)), so those it has handed out
    since the last look are known, unless it has come round, which takes longer than
    `_MEMORY_S` with the smallest `pid_max` there is.
    """

    _MEMORY_S = 0.01

    def __init__(self) -> None:
        """Remember nobody."""
        self._pids: set[int] = set()
        self._unclear: dict[tuple[int, int], int] = {}
        self._at = 0.0
        self._last_pid = 0

    def still_old(self) -> set[int]:
        """Begin a look: return the pids that it may skip."""
        now, last_pid = time.monotonic(), _last_pid()
        if now - self._at > self._MEMORY_S or last_pid < self._last_pid:
            self._pids = set()
        else:
            self._pids.difference_update(range(self._last_pid + 1, last_pid + 1))
        self._at, self._last_pid = now, last_pid
        return set(self._pids)

    def add(self, pid: int) -> None:
        """Remember a process that is older than the job."""
        self._pids.add(pid)

    def is_patient_with(self, process: Process) -> bool:
        """Tell whether to wait for a process to show its environment; not for ever."""
        looks = self._unclear[process.identity] = self._unclear.get(process.identity, 0) + 1
        return looks <= _EXEC_LOOKS


def _last_pid() -> int:
    try:
        return int(_read("/proc/loadavg").split()[-1])
    except (OSError, ValueError, IndexError):
        return -1  # then nothing is ever skipped: it counts as having come round


def find_descendants(
    marker: bytes,
    since: int,
    sessions: Mapping[int, Session],
    known: Mapping[int, int] | None = None,
    elders: Elders | None = None,
) -> Generator[None, None, list[Process]]:
    """Look at every process once; return those that descend from the workers.

    A generator that yields before each process, so that an event loop can breathe
    on a machine with thousands of them; the list is its return value.

    Args:
        marker: name of the job's environment variable.
        since: ticks at which the job began; nothing older can belong to it.
        sessions: the workers' sessions by number.
        known: start times, by pid, of processes that are already known as ours.
        elders: remembers older processes from one look to the next.

    Raises:
        BlockingIOError: a process is in the middle of an exec and may be ours: look again
            in some milliseconds, with the same `elders`.
        OSError: this process lacks descriptors or memory.
    """
    known = {} if known is None else known
    elders = Elders() if elders is None else elders
    skipped = elders.still_old()
    ours: dict[int, Process] = {}
    maybe: list[Process] = []
    me = os.getpid()
    sign = b"\0" + marker + b"="
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) in skipped:
            continue
        yield
        process = read_process(int(name))
        if process is None or process.is_dead or process.pid == me:
            continue
        if process.start < since:
            elders.add(process.pid)
            continue
        session = sessions.get(process.session)
        if known.get(process.pid) == process.start or (session and session.is_certain(process)):
            ours[process.pid] = process
            continue
        environment = _environment(process.pid)
        if not environment and _may_be_in_exec(process) and elders.is_patient_with(process):
            raise BlockingIOError(errno.EAGAIN, "a process is in the middle of an exec")
        # Once more if it was empty: an exec may have ended between the two reads.
        if sign in b"\0" + (environment or _environment(process.pid)):
            ours[process.pid] = process
        else:
            maybe.append(process)
    pinned = {process.session for process in ours.values()} & sessions.keys()
    grew = True
    while grew:
        rest = []
        for process in maybe:
            # The leader of a session that we only know by number is somebody new.
            by_session = process.session in pinned and process.pid != process.session
            if by_session or process.parent in ours:
                ours[process.pid] = process
            else:
                rest.append(process)
        grew = len(rest) < len(maybe)
        maybe = rest
        yield
    return list(ours.values())


def offspring(pid: int) -> Iterator[Process]:
    """Give the descendants of a process, as far as main threads have started them.

    One small read for each, where the kernel lists children; nothing where it does
    not (CONFIG_PROC_CHILDREN).
    """
    parents = [pid]
    while parents:
        parent = parents.pop()
        try:
            children = _read(f"/proc/{parent}/task/{parent}/children").split()
        except OSError:
            continue  # gone, or a kernel that does not tell: /proc as a whole still does
        for child in map(int, children):
            if process := read_process(child):
                yield process
                parents.append(child)


def _may_be_in_exec(process: Process) -> bool:
    """Tell whether a process without an environment may be in the middle of an exec.

    For about a millisecond neither that nor the arguments can be read; a process that
    really has no environment still has arguments.  (Kernel threads have neither, and
    kthreadd, number 2, as their parent.)
    """
    if process.parent in (0, 2):
        return False
    try:
        return not _read(f"/proc/{process.pid}/cmdline")
    except OSError as error:
        if error.errno in _LACK:
            raise
        return False


def open_pidfd(process: Process) -> int | None:
    """Return a descriptor that stands for exactly this process; None when it is gone.

    Raises:
        OSError: no descriptor can be had.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pid may have been used again before the descriptor was opened: look now.
    try:
        found = read_process(process.pid)
    except OSError:
        os.close(descriptor)
        raise
    if found is None or found.start != process.start:
        os.close(descriptor)
        return None
    return descriptor


def send(descriptor: int, number: int) -> bool:
    """Send a signal through a pidfd; tell whether the process was there to get it."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _environment(pid: int) -> bytes:
    try:
        return _read(f"/proc/{pid}/environ")
    except OSError as error:
        if error.errno in _LACK:
            raise
        return b""  # gone, or not ours to read: session and parent still tell


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(descriptor, 65536)
        while len(content) % 65536 == 0 and (more := os.read(descriptor, 65536)):
            content += more
        return content
    finally:
        os.close(descriptor)
