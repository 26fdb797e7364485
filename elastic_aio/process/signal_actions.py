"""Which processes a signal would end because they do nothing else about it, and which get it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Final

from elastic_aio.process.proc import ProcEntry, read_status

_HARMLESS: Final = {
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGSTOP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
}
"""Signals whose default action does not end a process (signal(7))."""
_MASKS: Final = (b"SigCgt", b"SigIgn", b"SigBlk")
_ALL: Final = 0x7FFB_FEFF
"""What a process blocks for as long as it starts another one: all but SIGKILL and SIGSTOP."""


def ended_by_default(pids: Iterable[int], number: int) -> tuple[int, ...]:
    """Return which processes the default action of a signal would end."""
    return tuple(pid for pid in pids if is_ended_by(pid, number))


def is_ended_by(pid: int, number: int) -> bool | None:
    """Return whether the default action of a signal would end a process; None: it has ended.

    It has neither a handler for the signal nor a mask then.  A process that blocks the signal
    may wait for it (sigwait(3)).  Takes some 30 microseconds.
    """
    if number in _HARMLESS:
        return False
    defaults = _defaults(pid)
    return None if defaults is None else _has(defaults, number)


def has_missed_sigterm(pid: int) -> bool:
    """Return whether a process runs that any SIGTERM would have ended.

    An interpreter of Python that exits handles no signal any more, but still ignores SIGPIPE.
    """
    defaults = _defaults(pid) or 0
    is_exiting = _has(defaults, signal.SIGINT) and not _has(defaults, signal.SIGPIPE)
    return not is_exiting and _has(defaults, signal.SIGTERM)


def _has(mask: int, number: int) -> bool:
    return bool(mask >> (number - 1) & 1)


def _defaults(pid: int) -> int | None:
    """Return the mask of signals with their default action; None for a process that has ended."""
    try:
        status = read_status(pid, b"State", *_MASKS)
    except OSError:
        return 0  # no descriptor is left to look
    if status.get(b"State", b"Z")[:1] in (b"Z", b"X"):
        return None
    caught, ignored, blocked = (int(status[name], 16) for name in _MASKS)
    if blocked & _ALL == _ALL:
        blocked = 0
    return ~(caught | ignored | blocked)


def receivers_of(
    leader: int,
    is_ended: Callable[[int], bool | None],
    foreground: Callable[[int], Iterable[ProcEntry]],
) -> list[ProcEntry] | None:
    """Return which processes get a forwarded signal in place of a leader, if it is a shell; pure.

    Returns none for a leader that handles the signal, and None if no process of the worker does.

    Args:
        leader: its pid.
        is_ended: returns whether the signal would end a process; None: it has ended.
        foreground: returns what a process waits for, if it is a shell.
    """
    if not is_ended(leader):
        return []
    return [process for process in foreground(leader) if is_ended(process.pid) is False] or None
