"""A repeated stop signal ends the command, whatever blocks it.

The first signal stops a job by its plan, and has no effect once the exit code is settled.  A signal
that means SIGKILL (see `StopSignals`) kills the workers, after which the command ends within a
moment, unless a listener, a plug-in's thread or a file system blocks it, or a worker cannot be
killed.  Then the process exits some seconds later, and the guardian ends what is left of the job.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from elastic_aio.outcome import signal_name

if TYPE_CHECKING:  # the guardian starts before asyncio is imported
    from elastic_aio.signals import StopSignals

_WAIT_S = 5.0
"""Seconds from the signal to the exit."""

# Those that a program may send.  They are ignored, not blocked, once the exit code is settled: a
# thread of a plug-in that does not block them would take them.
_LATE = signal.valid_signals() - {signal.SIGABRT, signal.SIGBUS, signal.SIGCHLD, signal.SIGFPE}
_LATE -= {signal.SIGILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGSYS}
_LATE -= {signal.SIGTRAP}


class ForcedExit:
    """Ends this process after a repeated stop signal; `forced_exit` is the only instance."""

    def __init__(self) -> None:
        self._stops: StopSignals | None = None
        self._numbers: set[int] = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
        self._notices: set[int] = set()
        self._last = 0  # stop signal; 0: none
        self._is_exiting = False

    def choose(self, stops: StopSignals, notices: Iterable[int] = ()) -> None:
        """Choose what stop signals mean; the first of `notices` stops nothing yet."""
        self._stops, self._numbers, self._notices = stops, {*stops.numbers}, {*notices}

    def note(self, number: int) -> None:
        """Note a signal, or SIGKILL in place of a repeated one; called by its handler."""
        if number in self._notices:
            self._notices.clear()
        elif number in self._numbers:
            self._last = number
        elif number == signal.SIGKILL and not self._is_exiting:
            self._is_exiting = True
            try:
                # Not `Thread.start`, which waits for locks that the handler may have interrupted.
                _thread.start_new_thread(_exit_later, (self._last or signal.SIGTERM,))
            except RuntimeError:  # can't start new thread
                os._exit(128 + (self._last or signal.SIGTERM))

    def _note_late(self, number: int, frame: object) -> None:
        if self._stops is not None:
            number = self._stops.meaning(number)
        elif self._last:
            number = signal.SIGKILL
        self.note(number)

    def handle_late(self) -> None:
        """Handle signals until `close`: the exit code is settled, a signal does not replace it.

        Other signals are ignored.  Idempotent.
        """
        for number in _LATE:
            is_counted = number in self._numbers and signal.getsignal(number) is not signal.SIG_IGN
            signal.signal(number, self._note_late if is_counted else signal.SIG_IGN)

    def close(self) -> None:
        """Ignore all signals: the interpreter restores the default actions of the others.

        After a stop signal they are right: the next signal ends the process.
        """
        if not self._last:
            for number in _LATE:
                signal.signal(number, signal.SIG_IGN)


def _exit_later(number: int) -> None:
    try:
        time.sleep(_WAIT_S)  # no event tells what blocks the process
        text = (
            f"aio-elastic: {signal_name(number)} again, and no end within {_WAIT_S:g} s: exiting\n"
        )
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):  # it may be what blocks
            os.write(2, text.encode())
    finally:
        os._exit(128 + number)


forced_exit = ForcedExit()
