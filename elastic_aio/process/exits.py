"""Waiting for the end of a process by its pidfd: no thread, no signal, no poll."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

__all__ = ["ExitWatch", "has_ended", "is_reaped"]

_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


class ExitWatch:
    """Calls back once when the process behind a pidfd ends; owns the descriptor.

    The process need not be a child.  The callback runs on the loop that was
    running when the watch was made.
    """

    def __init__(self, descriptor: int, ended: Callable[[], None]) -> None:
        """Watch `descriptor`, which this object closes, and call `ended`."""
        self._descriptor = descriptor
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._on_readable)

    def __repr__(self) -> str:
        return f"<ExitWatch {'done' if self._descriptor < 0 else f'on {self._descriptor}'}>"

    @property
    def descriptor(self) -> int:
        """The pidfd; -1 once the watch is over."""
        return self._descriptor

    def close(self) -> None:
        """End the watch; the callback will not run any more."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_readable(self) -> None:
        # Before the close: whoever reaps by pidfd still needs it.
        try:
            self._ended()
        finally:
            self.close()


def is_reaped(descriptor: int) -> bool:
    """Tell whether the process behind a pidfd is no child of ours, or not any more."""
    try:
        os.waitid(os.P_PIDFD, descriptor, _PEEK)
    except ChildProcessError:
        return True
    return False


def has_ended(descriptor: int) -> bool:
    """Tell whether the child behind a pidfd is over, without reaping it."""
    try:
        return os.waitid(os.P_PIDFD, descriptor, _PEEK) is not None
    except ChildProcessError:
        return True  # somebody has reaped it
