"""A second stop signal ends the command, whatever blocks it.

The first signal stops a job by its plan, and has no effect once the exit code is settled.  The
second signal kills the workers, after which the command ends within a moment, unless a listener, a
plug-in's thread or a file system blocks it, or a worker cannot be killed.  Then the process exits
some seconds later, and the guardian ends what is left of the job.
"""

from __future__ import annotations

import _thread
import os
import select
import signal
import time
from collections.abc import Iterable

from elastic_aio.outcome import signal_name

_WAIT_S = 5.0
"""Seconds from the second signal to the exit."""


class ForcedExit:
    """Counts the stop signals of this process; `forced_exit` is the only instance."""

    def __init__(self) -> None:
        self._count = 0
        self._numbers: set[int] = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
        self._notices: set[int] = set()

    def choose(self, numbers: Iterable[int], notices: Iterable[int] = ()) -> None:
        """Choose the stop signals; the first of `notices` stops nothing yet."""
        self._numbers, self._notices = set(numbers), set(notices)

    def note(self, number: int, frame: object = None) -> None:
        """Count a signal; called by its handler, in the main thread."""
        if number not in self._numbers:
            return
        if number in self._notices and not self._count:
            self._notices.clear()
            return
        self._count += 1
        if self._count == 2:
            try:
                # Not `Thread.start`, which waits for locks that the handler may have interrupted.
                _thread.start_new_thread(_exit_later, (number,))
            except RuntimeError:  # can't start new thread
                os._exit(128 + number)

    def handle_late(self) -> None:
        """Handle signals until `close`: the exit code is settled, a signal does not replace it.

        Other signals are blocked.  Idempotent.
        """
        handled = [one for one in self._numbers if signal.getsignal(one) is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self.note)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - set(handled))

    def close(self) -> None:
        """Handle no signal any more: the interpreter restores the default actions.

        After a stop signal they are right: the next signal ends the process.
        """
        if not self._count:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


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
