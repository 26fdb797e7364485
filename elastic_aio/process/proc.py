"""`/proc/<pid>`: what the kernel shows of a process, and signals to exactly this process.

All other modules of the package ask this module.  Pids are used again, so a process is identified
by its pid *and* its start time, and signalled through a pidfd that was checked against both.

A process that is gone, or another user's, has no content.  This process may also have no descriptor
or memory left to look.  That must not be mistaken for an absence: it is an OSError, except of
functions that return a text.

The guardian runs this file in a bare interpreter (`python -I -S`), so it imports three small
modules of the standard library and nothing else.
"""

from __future__ import annotations

import errno
import os
import time
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` alone would double the guardian's memory
    import signal
    from collections.abc import Iterable, Iterator
else:
    import _signal as signal  # without the enumerations: 3 ms of the guardian's start

LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that say nothing about a process, only that this process has nothing left to look with."""
PF_EXITING = 0x4
"""Flag of a task (include/linux/sched.h): it is past the point of no return of its exit."""
PF_KTHREAD = 0x200000
"""Flag of a task: it is a thread of the kernel."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Signals whose default action does not end a process (signal(7)).
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN}
_HARMLESS |= {signal.SIGTTOU, signal.SIGURG, signal.SIGWINCH}
# What a process blocks for as long as it starts another one: all but SIGKILL and SIGSTOP.
_ALL_SIGNALS = 0x7FFB_FEFF


def ticks_now() -> int:
    """Return the time since boot in the unit of process start times, rounded as the kernel does."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // (1_000_000_000 // _TICKS_PER_SECOND)


def seconds_since(ticks: int) -> float:
    return (ticks_now() - ticks) / _TICKS_PER_SECOND


def read(pid: int, name: str) -> bytes | None:
    """Return the content of a file of a process; None if it cannot be read."""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(descriptor, 65536)
            while content and len(content) % 65536 == 0 and (more := os.read(descriptor, 65536)):
                content += more
            return content
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in LACK:
            raise
        return None


def link_of(pid: int, name: str) -> str:
    """Return what a link of a process refers to: `exe`, or `fd/1`; "" if it cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""  # closed, gone, or another user's


def list_numbers(pid: int, name: str) -> list[int]:
    """Return the numbers in a directory of a process: threads in `task`, descriptors in `fd`."""
    try:
        return [*map(int, os.listdir(f"/proc/{pid}/{name}"))]
    except OSError as error:
        if error.errno in LACK:
            raise
        return []


def list_pipes(pid: int) -> list[tuple[int, bool, bool]]:
    """Return the pipes of a process: descriptor, whether it reads there, and has no other end."""
    import select  # few processes are looked at

    pipes = []
    for number in list_numbers(pid, "fd"):
        if not link_of(pid, name := f"fd/{number}").startswith("pipe:"):
            continue
        try:
            is_input = bool(os.lstat(f"/proc/{pid}/{name}").st_mode & 0o400)
            mode = os.O_RDONLY if is_input else os.O_WRONLY
            descriptor = os.open(f"/proc/{pid}/{name}", mode | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in LACK:
                raise
            continue  # closed, gone, or another user's
        poller = select.poll()
        poller.register(descriptor, 0)  # POLLHUP and POLLERR only
        pipes.append((number, is_input, bool(poller.poll(0))))
        os.close(descriptor)
    return pipes


def idle_for(pid: int) -> float:
    """Return for how many seconds no thread of a process has run; 0 if the kernel does not say."""
    now, ran = _ran_at("self"), [_ran_at(f"{pid}/task/{one}") for one in list_numbers(pid, "task")]
    return max(0.0, now - max(ran, default=0.0)) / 1000 if now and 0.0 not in ran else 0.0


def _ran_at(task: str) -> float:
    """Return when a thread last began to run, in milliseconds of the scheduler; 0: unknown."""
    try:
        with open(f"/proc/{task}/sched", "rb") as file:
            rows = [row.split(b":") for row in file if row.startswith(b"se.exec_start")]
    except OSError as error:
        if error.errno in LACK:
            raise
        return 0.0
    return float(rows[0][1]) if rows else 0.0


def local_sockets(pid: int) -> tuple[bool, int]:
    """Return whether others may connect to Unix sockets of a process, and how many have left it."""
    links = (link_of(pid, f"fd/{number}") for number in list_numbers(pid, "fd"))
    inodes = {link[8:-1].encode() for link in links if link.startswith("socket:")}
    ours: list[list[bytes]] = []
    if inodes:
        try:
            with open(f"/proc/{pid}/net/unix", "rb") as file:  # each read gives a page of it
                rows = [row.split() for row in file]
        except OSError as error:
            if error.errno in LACK:
                raise
            rows = []  # gone
        ours = [row[1:6] for row in rows if len(row) > 6 and row[6] in inodes]
    # References, protocol, flags (SO_ACCEPTCON), type, state: proc_pid_net(5).  The other end of a
    # connection has a reference to this one, until it is closed.
    left = [b"00000002", b"00000000", b"00000000", b"0001", b"03"]
    return any(row[2] == b"00010000" for row in ours), ours.count(left)


def hides_environment(pid: int) -> bool:
    """Return whether this process may not read the environment of another one."""
    try:
        os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def own_pid() -> int:
    """Return the pid under which /proc shows this process, or raise an OSError without a /proc."""
    return int(os.readlink("/proc/self"))


def is_foreign() -> bool:
    """Return whether /proc shows the pids of another namespace, pid_namespaces(7)."""
    try:
        return own_pid() != os.getpid()
    except OSError:
        return False


def pid_namespace() -> str:
    """Return what identifies the pid namespace of this process; "" if it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def own_descriptors() -> list[int]:
    """Return the open descriptors of this process, including the directory's own."""
    return [*map(int, os.listdir("/proc/self/fd"))]


# ------------------------------------------------------------------------- stat, status


class ProcEntry:
    """A process as `/proc` shows it; not changed after that.

    `start` is in clock ticks since boot; `flags` are its main thread's; `ignored` is the mask of
    the signals that it ignores, and `caught` of those that it handles, without those for real time.
    """

    __slots__ = (
        "caught",
        "flags",
        "ignored",
        "parent",
        "pid",
        "session",
        "start",
        "state",
        "threads",
    )

    def __init__(
        self,
        pid: int,
        parent: int,
        session: int,
        start: int,
        state: str = "S",
        flags: int = 0,
        threads: int = 1,
        ignored: int = 0,
        caught: int = 0,
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.start = start
        self.state = state
        self.flags = flags
        self.threads = threads
        self.ignored = ignored
        self.caught = caught

    def __repr__(self) -> str:
        return f"<ProcEntry {self.pid} of session {self.session}, state {self.state}>"

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time, which no other process of this host has until it reboots."""
        return self.pid, self.start

    @property
    def is_dead(self) -> bool:
        """Whether its last thread has ended.

        A process whose main thread has ended is shown as a zombie while other threads run.
        """
        return self.state in "XZ" and self.threads <= 1


def parse_stat(content: bytes) -> ProcEntry:
    """Read `/proc/<pid>/stat`, or raise a ValueError if it has another format."""
    pid = int(content[: content.index(b" ")])
    fields = _fields(content)
    if len(fields) < 32:
        raise ValueError("stat is too short")
    return ProcEntry(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        state=fields[0].decode("ascii", "replace"),
        flags=int(fields[6]),
        threads=int(fields[17]),
        ignored=int(fields[30]),
        caught=int(fields[31]),
    )


def _fields(content: bytes) -> list[bytes]:
    # proc_pid_stat(5): the name stands in parentheses and may contain anything.
    return content[content.rindex(b")") + 1 :].split()


def read_process(pid: int) -> ProcEntry | None:
    """Read one process; None when it is gone."""
    content = read(pid, "stat")
    try:
        return None if content is None else parse_stat(content)
    except ValueError:
        return None


def read_stat(pid: int) -> list[bytes]:
    """Return the fields of `/proc/<pid>/stat`, from the state on; none if the process is gone.

    The state is the third field of proc_pid_stat(5).
    """
    content = read(pid, "stat")
    return _fields(content) if content else []


def read_status(pid: int, *names: bytes) -> dict[bytes, bytes]:
    """Return the fields of `/proc/<pid>/status` (proc_pid_status(5)); none if it is gone.

    With `names`, only these, in a third of the time.  The pid may be a thread's.
    """
    content = b"\n" + (read(pid, "status") or b"")
    fields = {}
    for name in names or [line.partition(b":")[0] for line in content.splitlines()[1:]]:
        label = b"\n%s:" % name
        if (found := content.find(label)) >= 0:
            begin = found + len(label)
            fields[name] = content[begin : content.find(b"\n", begin)].strip()
    return fields


def list_children(pid: int) -> list[int]:
    """Return the children that the main thread of a process has started.

    Returns none if the process is gone, or this kernel lists none (CONFIG_PROC_CHILDREN).
    """
    return [*map(int, (read(pid, f"task/{pid}/children") or b"").split())]


def iter_descendants(pid: int) -> Iterator[ProcEntry]:
    """Yield the descendants of a process, as far as `list_children` lists them."""
    parents = [pid]
    while parents:
        # If the kernel lists no children, a full scan still finds them.
        for child in list_children(parents.pop()):
            if process := read_process(child):
                yield process
                parents.append(child)


def program_of(pid: int) -> tuple[int, int, int] | None:
    """Return what identifies a process and its forks; None: gone, or another user's.

    These are device and inode of its program, and where its stack begins (`startstack` of
    proc(5)).  A child has all three until its exec; the kernel places the stack of each exec at
    random.
    """
    try:
        status = os.stat(f"/proc/{pid}/exe")
    except OSError:
        return None
    fields = read_stat(pid)
    return (status.st_dev, status.st_ino, int(fields[25])) if len(fields) > 25 else None


def name_of(pid: int) -> str:
    try:
        words = os.fsdecode(read(pid, "cmdline") or b"").split("\0")
        # A word with blanks is code, as in `sh -c "sleep 9; upload"`; another may be a password.
        plain = [
            word
            for option, word in pairwise(words)
            if word[:1] != "-" and option[:2] != "--" and "@" not in word and len(word.split()) == 1
        ]
        name = " ".join(word.rpartition("/")[2] for word in [words[0], *plain[:1]]).strip()
        name = name or os.fsdecode(read(pid, "comm") or b"?").strip()
    except OSError:
        return "?"  # no descriptor is left
    return f"{name[:37]}..." if len(name) > 40 else name


def user_of(pid: int) -> str:
    """Return the user of a process: the name in /etc/passwd, else the number; asks no server."""
    try:
        _, uid, *_ = read_status(pid, b"Uid").get(b"Uid", b"? ?").decode().split()
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            rows = [line.split(":", 3) for line in file]
    except OSError:
        return "unknown"  # no descriptor is left
    return next((f"user {row[0]}" for row in rows if row[2:3] == [uid]), f"uid {uid}")


def wait_channel(pid: int) -> str:
    """Return the function of the kernel in which a process waits; "" if it is unknown."""
    try:
        name = (read(pid, "wchan") or b"").decode("ascii", "replace").strip()
    except OSError:
        return ""  # no descriptor is left
    return "" if name == "0" else name


# ---------------------------------------------------------- what it does about a signal


def is_in(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)


def ended_by_default(pids: Iterable[int], number: int) -> tuple[int, ...]:
    """Return which processes the default action of a signal would end."""
    return tuple(pid for pid in pids if is_ended_by(pid, number))


def is_ended_by(pid: int, number: int) -> bool | None:
    """Return whether the default action of a signal would end a process; None: it has ended.

    It then neither handles nor blocks the signal: a process that blocks it may wait for it
    (sigwait(3)).  Takes some 30 microseconds.
    """
    if number in _HARMLESS:
        return False
    masks = (b"SigCgt", b"SigIgn", b"SigBlk")
    try:
        status = read_status(pid, b"State", *masks)
    except OSError:
        return False  # no descriptor is left to look
    if status.get(b"State", b"Z")[:1] in (b"Z", b"X"):
        return None
    caught, ignored, blocked = (int(status[name], 16) for name in masks)
    if blocked & _ALL_SIGNALS == _ALL_SIGNALS:
        blocked = 0
    return not is_in(caught | ignored | blocked, number)


# ------------------------------------------------------------ signals to exactly one process


def shown_pid(child: int) -> int:
    """Return the pid under which /proc shows a child that is not reaped yet."""
    if not is_foreign():
        return child
    descriptor = os.pidfd_open(child)
    try:
        information = read(own_pid(), f"fdinfo/{descriptor}") or b""
    finally:
        os.close(descriptor)
    fields = dict(line.split(b":", 1) for line in information.splitlines())
    return int(fields.get(b"Pid", child))


def open_pidfd(process: ProcEntry) -> int | None:
    """Return a descriptor for signals to exactly this process; None when it is gone.

    It is a pidfd, or its directory in a /proc of another pid namespace (pidfd_send_signal(2)).
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


def send(descriptor: int, number: int) -> bool:
    """Send a signal through a pidfd; return whether the process existed and allowed it."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except OSError:  # EINVAL: of a pid namespace that is not below this one
        return False
    return True


def is_denied(pid: int) -> bool:
    """Return whether kill(2) refuses too what a pidfd refuses: a filter may refuse pidfds only."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM or is_foreign()
    return is_foreign()


def needs_continue(process: ProcEntry, number: int) -> bool:
    """Return whether a process is stopped: it acts on a signal only after SIGCONT."""
    return process.state == "T" and number not in (0, signal.SIGKILL, signal.SIGSTOP)
