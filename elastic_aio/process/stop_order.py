"""Which processes a signal of a stop plan reaches first, and which get a forwarded signal.

A data loader, an engine or a wrapped program belongs to its leader: it is needed while the leader
finishes its work, and the leader ends it.  So a process gets the signal of a step when its parents
in the job have ended, as in systemd's `KillMode=mixed` (systemd.kill(5)).  A process that has lost
its parents belongs to the leader of its session, or to the leader below which it was seen; if
neither is known, it waits for all leaders.

The exception is the foreground of a shell.  A shell runs no trap, and passes nothing on, while it
waits for a command: bash(1), Signals.  So that command gets the signal with the shell.  A command
of the background (`&`) does not: its shell handles signals at once, and may pass them on.  POSIX
tells the two apart: without job control, a command of the background ignores SIGINT and SIGQUIT
(Shell Command Language, 2.11).  Programs change the action of SIGINT, and rarely of SIGQUIT, so
SIGQUIT decides.  A shell that is itself below a command of the background ignores SIGINT, and so do
all its children: that says nothing about them.

A process that ignores the signal passes its turn to its children: system(3) ignores SIGINT, which
a terminal sends to its child too.  What counts is what a process ignored before the stop
(`Ignored`): many handlers ignore a signal once they have it, and then wait for a child that saves.

The guardian runs this file in a bare interpreter, as `proc`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:  # it has none in the guardian
    from elastic_aio.process import proc
else:
    import proc
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

_SHELLS = {"ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "ksh93", "mksh", "rbash", "sh"}
_SHELLS |= {"tcsh", "yash", "zsh"}
DRAIN_S = 0.1
"""Seconds for which a process that handles the signal may end before it gets one."""
_LEAVE_S = 5.0
"""Seconds for which another one may, that has seen that what it waits for is closed."""
_SEEN_S = 0.25
"""Seconds in which a process has run that has seen that."""
_SIGINT_BIT, _SIGQUIT_BIT = 1 << 1, 1 << 2


class Ignored:
    """The signals that processes ignored before a signal of a stop has reached their worker."""

    def __init__(self) -> None:
        self._masks: dict[tuple[int, int], int] = {}
        self._reached: set[int | None] = set()

    def note(self, process: proc.ProcEntry, owner: int | None) -> None:
        """Note a process of a leader; None: of any, so that each signal may have reached it."""
        if not (owner in self._reached if owner else self._reached):
            self._masks.setdefault(process.identity, process.ignored)

    def note_signal(self, owner: int | None) -> None:
        """Note that a signal is sent to a process of a leader, which may pass it on."""
        self._reached.add(owner)

    def pids(self, processes: Iterable[proc.ProcEntry], number: int) -> set[int]:
        """Return which processes have ignored a signal; none that was seen later only."""
        found = ((one.pid, self._masks.get(one.identity, 0)) for one in processes)
        return {pid for pid, mask in found if proc.is_in(mask, number)}


def next_due(
    processes: Sequence[proc.ProcEntry],
    leaders: set[int],
    owner_of: Callable[[proc.ProcEntry], int | None],
    ignoring: set[int],
    foreground: Container[tuple[int, int]],
) -> tuple[list[proc.ProcEntry], set[int]]:
    """Return the processes that a signal reaches now, and the pids that the others wait for.

    Args:
        processes: all processes of the job that a scan has found.
        leaders: pids of the leaders that run.
        owner_of: returns the pid of the leader, which may have ended, of a process without
            parents in the job; None: unknown.
        ignoring: pids of the processes that pass their turn to their children.
        foreground: identities of the processes that signalled shells wait for.
    """
    due, holders = due_for_signal(processes, leaders, owner_of, ignoring)
    known = set(due)
    due += (item for item in processes if item.identity in foreground and item not in known)
    first, writers = without_readers(due, ignoring)
    return first, holders | writers


def due_for_signal(
    processes: Iterable[proc.ProcEntry],
    leaders: set[int],
    owner_of: Callable[[proc.ProcEntry], int | None],
    ignoring: set[int],
) -> tuple[list[proc.ProcEntry], set[int]]:
    """Do the same by parents and leaders only; pure."""
    present = {process.pid for process in processes}
    leaders = set(leaders)
    while True:
        due: list[proc.ProcEntry] = []
        holders: set[int] = set()
        for process in processes:
            if process.parent in present and process.pid not in leaders:
                waits_for = {process.parent}
            else:
                owner = process.pid if process.pid in leaders else owner_of(process)
                waits_for = leaders if owner is None else (leaders & {owner}) - {process.pid}
            holders |= waits_for
            if not waits_for:
                due.append(process)
        passing = holders & ignoring
        if not passing:
            return due, holders
        present -= passing
        leaders -= passing


def without_readers(
    due: Sequence[proc.ProcEntry], ignoring: set[int]
) -> tuple[list[proc.ProcEntry], set[int]]:
    """Leave out the readers of pipes into which processes write that the signal reaches.

    `tee` has to outlive the program whose last lines it takes, and ends when that has ended.  A
    circle of pipes waits for nothing, and no reader waits for a writer that does not end.

    `due` have had the signal, or get it now.  Returns the others, and the pids of the writers.
    """
    pipes = {process.pid: pipe for process in due if (pipe := _pipe(process.pid, 0))}
    if not pipes:
        return [*due], set()
    ending = {process.pid for process in due} - ignoring
    writers: dict[str, set[int]] = {pipe: set() for pipe in pipes.values()}
    for pid in ending:
        for pipe in {_pipe(pid, 1), _pipe(pid, 2)} & writers.keys():
            writers[pipe].add(pid)
    waits_for = {pid: writers[pipe] - {pid} for pid, pipe in pipes.items()}
    # Readers at the end of a chain that begins with a process which waits for no pipe.
    moving = ending - waits_for.keys() | {pid for pid, others in waits_for.items() if not others}
    waiting: set[int] = set()
    while more := {pid for pid, others in waits_for.items() if others & moving} - moving:
        moving |= more
        waiting |= more
    first = [process for process in due if process.pid not in waiting]
    return first, set().union(*(waits_for[pid] for pid in waiting))


def may_leave(pid: int) -> bool:
    """Return whether a process may end by itself now, as others have closed what it waits for.

    It reads the rest of a pipe or a connection, into which no process can write any more, and then
    writes a file; or it has served others at a Unix socket, and removes what they have left.  A
    process that can still read from a pipe waits for that.  By two pipes, a process of
    multiprocessing and its parent notice each other's end: an input without an other end says
    nothing if an output has none either.  The clients of a server come and go, which says nothing.
    A process that has not run since does not wait for any of that.
    """
    if proc.idle_for(pid) > _SEEN_S:
        return False
    pipes = proc.list_pipes(pid)
    if any(is_input and not is_closed for _, is_input, is_closed in pipes):
        return False
    inputs = sum(is_input for _, is_input, _ in pipes)
    closed = [number for number, is_input, is_closed in pipes if is_closed and not is_input]
    is_server, left = proc.local_sockets(pid)
    if is_server:
        return 1 in closed  # the process that started it has read there where it serves
    return inputs + left > sum(number > 2 for number in closed)


class Leaving:
    """The processes that are left to themselves, as they may end without a signal."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], float | None] = {}

    def rest(self, process: proc.ProcEntry, number: int, now: float) -> float:
        """Return for how many seconds a process is left to itself; 0: it gets the signal.

        A process that handles the signal knows better what is to be done: it gets the signal soon.
        """
        identity = process.identity
        if identity not in self._since:
            self._since[identity] = now if process.state != "T" and may_leave(process.pid) else None
        since = self._since[identity]
        if since is None:
            return 0.0
        limit = DRAIN_S if proc.is_in(process.caught, number) else _LEAVE_S
        return max(since + limit - now, 0.0)


def _pipe(pid: int, descriptor: int) -> str:
    """Return the pipe behind a descriptor of a process; "" if it is none."""
    link = proc.link_of(pid, f"fd/{descriptor}")
    return link if link.startswith("pipe:") else ""


def foreground_of(pid: int) -> list[proc.ProcEntry]:
    """Return what a shell and the shells in its foreground wait for; none if it is no shell."""
    found: list[proc.ProcEntry] = []
    shells = [pid]
    while shells:
        shell = shells.pop()
        if not _is_shell(shell):
            continue
        entry = proc.read_process(shell)
        tells = entry is not None and not entry.ignored & _SIGINT_BIT
        for child in proc.list_children(shell):
            process = proc.read_process(child)
            # A shell keeps SIGINT as it is; bash ignores SIGQUIT always.
            sign = _SIGINT_BIT if _is_shell(child) else _SIGQUIT_BIT
            if process is not None and not (tells and process.ignored & sign):
                found.append(process)
                shells.append(child)
    return found


def _is_shell(pid: int) -> bool:
    path = proc.link_of(pid, "exe")
    return path.rpartition("/")[2].removesuffix(" (deleted)") in _SHELLS  # after an upgrade


def receivers_of(
    leader: int,
    is_ended: Callable[[int], bool | None],
    foreground: Callable[[int], Iterable[proc.ProcEntry]],
) -> list[proc.ProcEntry] | None:
    """Return which processes get a forwarded signal in place of a shell that leads; pure.

    Returns none for a leader that handles the signal, and None if no process of the worker does.
    `is_ended` returns whether the signal would end a process, None if it has ended; `foreground`
    returns what a process waits for, if it is a shell.
    """
    if not is_ended(leader):
        return []
    return [process for process in foreground(leader) if is_ended(process.pid) is False] or None
