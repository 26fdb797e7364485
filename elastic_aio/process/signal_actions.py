"""Which processes a signal would end because they do nothing else about it."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from itertools import islice
from typing import Final

from elastic_aio.process.proc_scan import read_status

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

_LOOKED_AT: Final = 64
"""Processes whose masks are read: each takes some 30 microseconds, and workers are alike."""


def ended_by_default(pids: Iterable[int], number: int) -> tuple[int, ...]:
    """Return which of the first processes have neither a handler for a signal nor a mask.

    The default action of the signal ends them.  A process that blocks it may wait for it
    (sigwait(3)).
    """
    if number in _HARMLESS:
        return ()
    return tuple(pid for pid in islice(pids, _LOOKED_AT) if _is_default(pid, number))


def _is_default(pid: int, number: int) -> bool:
    try:
        status = read_status(pid)
    except OSError:
        return False  # no descriptor is left to look
    if status.get(b"State", b"Z")[:1] in (b"Z", b"X"):
        return False  # it has ended
    masks = (int(status[name], 16) for name in (b"SigCgt", b"SigIgn", b"SigBlk"))
    return not any(mask >> (number - 1) & 1 for mask in masks)
