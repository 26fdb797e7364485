"""Whom a signal of a stop plan reaches first: leaders, then what they have started.

A data loader, an engine or a wrapped program belongs to its leader: it is needed while the
leader finishes its work, and the leader ends it.  So a process gets the signal of a step
when its parents in the job have ended, as in systemd's `KillMode=mixed` (systemd.kill(5)).
A process that has lost its parents belongs to the leader of its session, or to the leader
below which it was seen; if neither is known, it waits for all leaders.

The exception is the foreground of a shell.  A shell runs no trap, and passes nothing on,
while it waits for a command: bash(1), Signals.  So that command gets the signal with the
shell.  A command of the background (`&`) does not: its shell handles signals at once, and may
pass them on.  POSIX tells the two apart: without job control, a command of the background
ignores SIGINT and SIGQUIT (Shell Command Language, 2.11).  Programs change the action of
SIGINT, and rarely that of SIGQUIT, so SIGQUIT decides.  A shell that is itself below a command
of the background ignores SIGINT, and so do all its children: that says nothing about them.

The guardian runs this file in a bare interpreter, as `proc_scan`.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:  # it has none in the guardian
    from elastic_aio.process import proc_scan
else:
    import proc_scan
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_SHELLS = {"ash", "bash", "busybox", "dash", "ksh", "ksh93", "mksh", "rbash", "sh", "yash", "zsh"}
_SIGINT_BIT, _SIGQUIT_BIT = 1 << 1, 1 << 2


def due_for_signal(
    processes: Iterable[proc_scan.ProcEntry],
    leaders: set[int],
    owner_of: Callable[[proc_scan.ProcEntry], int | None],
) -> tuple[list[proc_scan.ProcEntry], set[int]]:
    """Return the processes that a signal reaches now, and the pids that the others wait for.

    Args:
        processes: all processes of the job that a scan has found.
        leaders: pids of the leaders that run.
        owner_of: returns the pid of the leader of a process without parents in the job, which
            may have ended; None: it is not known.
    """
    pids = {process.pid for process in processes}
    due: list[proc_scan.ProcEntry] = []
    holders: set[int] = set()
    for process in processes:
        if process.pid in leaders:
            due.append(process)
        elif process.parent in pids:
            holders.add(process.parent)
        else:
            owner = owner_of(process)
            waits_for = leaders if owner is None else leaders & {owner}
            holders |= waits_for
            if not waits_for:
                due.append(process)
    return due, holders


def foreground_of(pid: int) -> list[proc_scan.ProcEntry]:
    """Return what a shell waits for, with what shells among these wait for.

    Returns none if the process is no shell.

    Raises:
        OSError: this process has no descriptors or memory left.
    """
    found: list[proc_scan.ProcEntry] = []
    shells = [pid]
    while shells:
        shell = shells.pop()
        if not _is_shell(shell):
            continue
        tells = not _ignored(shell) & _SIGINT_BIT
        for child in proc_scan.list_children(shell):
            process = proc_scan.read_process(child)
            # A shell keeps SIGINT as it is; bash ignores SIGQUIT always.
            sign = _SIGINT_BIT if _is_shell(child) else _SIGQUIT_BIT
            if process is not None and not (tells and _ignored(child) & sign):
                found.append(process)
                shells.append(child)
    return found


def _ignored(pid: int) -> int:
    return int(proc_scan.read_status(pid).get(b"SigIgn", b"0"), 16)


def _is_shell(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS
    except OSError:
        return False  # gone, or another user's
