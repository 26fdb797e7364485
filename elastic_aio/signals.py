"""ReceivedSignals: signals as an async iterator, which restores the previous handlers.

Signal handlers belong to a process, not to a library, so they are installed only inside this
context manager, which the command line, `launch(signals=...)` and `sync` enter.

* A signal that is ignored on entry stays ignored: `nohup` and a shell's background jobs ignore
  signals on purpose.
* The handler raises nothing, but puts the number into a queue.  It does not use the loop's
  `add_signal_handler`, which would silently discard the embedding program's handlers there.  Like
  the loop, it needs the wake-up descriptor: a signal that arrives right before the loop blocks in
  its poll would otherwise be noticed only at the next event.
* All instances share the handlers of the process (`_Handlers`), so several jobs of one program all
  receive a signal, and may end in any order.  The last instance restores the previous handler.
* A signal that was received and not read is sent again after that, so that it is not lost between
  two owners.
* Stop signals within a second are one.  Service managers, schedulers, shells and wrappers send
  several: SIGTERM and SIGHUP, SIGTERM to the launcher and to its group, SIGTERM twice.
* What has arrived before something else is seen can be handled before it: see `deliver`.
"""

from __future__ import annotations

import asyncio
import collections
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from elastic_aio.aio import set_result_if_pending
from elastic_aio.errors import HostError

# Ignored by commands of the background in a shell without job control.
_OF_BACKGROUND = (signal.SIGINT, signal.SIGQUIT)

# Seconds in which the handlers of two signals are called that have arrived at once.  Their order is
# not that of arrival: the kernel calls the later one first, the interpreter goes by number.
_AT_ONCE_S = 0.0005


MOMENT_S = 1.0
"""Seconds in which stop signals are one."""


def _is_at_terminal() -> bool:
    """Return whether this process is in the foreground of a terminal, which sends it Ctrl-C."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


class StopSignals:
    """Tells what each stop signal to a process means."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.numbers = frozenset(numbers)
        self._count = 0
        self._last_at = -math.inf
        self._interrupted_at: float | None = None

    def meaning(self, number: int) -> int:
        """Return a signal that has arrived, SIGKILL in place of it, or 0 for nothing more.

        A person's second Ctrl-C, and the third signal of any kind, mean SIGKILL.  A program that
        sends a second signal wants no more than with the first: `aio-elastic stop --kill` does.
        """
        if number not in self.numbers:
            return number
        now = time.monotonic()
        last_at, self._last_at = self._last_at, now
        if number == signal.SIGINT and _is_at_terminal():
            if self._interrupted_at is not None:
                return 0 if now - self._interrupted_at < MOMENT_S else signal.SIGKILL
            self._interrupted_at = now
        if now - last_at < MOMENT_S:
            return 0
        self._count += 1
        return signal.SIGKILL if self._count > 2 else number


class _Handlers:
    """The signal handlers and the wake-up descriptor of this process, while they are used."""

    def __init__(self) -> None:
        self._receivers: list[ReceivedSignals] = []
        self._previous: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._previous_wakeup = -1
        self.suspended_at, self.continued_at = 0.0, float("-inf")  # SIGTSTP and SIGCONT, the last

    def add(self, receiver: ReceivedSignals, numbers: Iterable[int]) -> None:
        """Pass these signals to a receiver, except those that are ignored."""
        self._receivers.append(receiver)
        if self._wakeup is None:
            self._open_wakeup()
        chosen = {*numbers}
        if signal.SIGTSTP in chosen:
            chosen.add(signal.SIGCONT)  # which cancels it
        for number in chosen:
            if number not in self._previous:
                previous = signal.getsignal(number)
                if previous is signal.SIG_IGN:
                    continue
                signal.signal(number, self._on_signal)
                self._previous[number] = previous
            receiver.handled.add(number)

    def remove(self, receiver: ReceivedSignals) -> None:
        """Restore the handlers that no other receiver needs.  Idempotent."""
        if receiver not in self._receivers:
            return
        self._receivers.remove(receiver)
        unused = [number for number in self._previous if not self.receivers_of(number)]
        # Blocked: a signal that arrives between the two handlers would be dropped.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, unused)
        try:
            self._restore(unused)
            if not self._receivers:
                self._close_wakeup()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def receivers_of(self, number: int) -> list[ReceivedSignals]:
        return [receiver for receiver in self._receivers if number in receiver.handled]

    def forget(self) -> None:
        """Restore everything in a process that was just forked: it has no receivers."""
        self._receivers.clear()
        self._previous_wakeup = -1  # the parent's
        self._restore(list(self._previous))
        self._close_wakeup()

    def _restore(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            previous = self._previous.pop(number)
            if signal.getsignal(number) == self._on_signal:
                # None: a handler installed from C, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)

    def _on_signal(self, number: int, frame: object) -> None:
        # Runs at an arbitrary bytecode of the main thread; an event loop does the rest.
        if number == signal.SIGTSTP:
            self.suspended_at = time.monotonic()
        over = [receiver for receiver in self._receivers if receiver.is_over]
        for receiver in over:
            receiver.__exit__()
        if not over:  # else it was sent by `leave`
            for receiver in self.receivers_of(number):
                if number in receiver.numbers:
                    receiver.put(number)
        if number == signal.SIGCONT:
            if callable(previous := self._previous.get(number)):
                previous(number, frame)  # the program has more to do then
            self.continued_at = time.monotonic()

    def _open_wakeup(self) -> None:
        reader, writer = self._wakeup = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def _close_wakeup(self) -> None:
        if self._wakeup is None:
            return
        reader, writer = self._wakeup
        self._wakeup = None
        try:
            present = signal.set_wakeup_fd(self._previous_wakeup, warn_on_full_buffer=False)
        except (OSError, ValueError):
            present = signal.set_wakeup_fd(-1)  # its owner, an event loop, is closed
        if present not in (-1, writer.fileno()):
            signal.set_wakeup_fd(present, warn_on_full_buffer=False)  # set in the meantime
        reader.close()
        writer.close()

    def wakeup_descriptor(self) -> int:
        """Return a new descriptor that becomes readable when a signal arrives."""
        assert self._wakeup is not None, "it is open while there are receivers"
        return os.dup(self._wakeup[0].fileno())

    def on_wakeup(self) -> None:
        """Pass the numbers of other signals on to the previous wake-up descriptor."""
        try:
            numbers = b"" if self._wakeup is None else self._wakeup[0].recv(4096)
        except BlockingIOError:
            return  # another event loop was faster
        others = bytes(number for number in numbers if number not in self._previous)
        if others and self._previous_wakeup >= 0:
            try:
                os.write(self._previous_wakeup, others)
            except OSError:
                pass  # full: its reader wakes up anyway


_handlers = _Handlers()
os.register_at_fork(after_in_child=_handlers.forget)


unread: set[ReceivedSignals] = set()
"""The receivers of signals that `deliver` handles."""


def deliver() -> None:
    """Handle the `unread` signals, of this loop, before what has been seen after them.

    A signal to all processes of a job ends workers too.  A launcher that has waited for a processor
    sees their exits and the signal in one turn.
    """
    for receiver in [*unread]:
        receiver.deliver()


@contextmanager
def default_interrupts() -> Iterator[None]:
    """Let children that are started in this block have the default actions of SIGINT and SIGQUIT.

    Only for the main thread.
    """
    # A shell's command of the background ignores both, and tells its own commands of the background
    # by that.  A handler is not inherited, as SIG_IGN is.
    ignored = [one for one in _OF_BACKGROUND if signal.getsignal(one) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


class ReceivedSignals:
    """A context manager and an async iterator over the numbers of received signals.

    It may be entered before the event loop runs that iterates over it.  Off the main thread, this
    raises HostError.
    """

    def __init__(self, numbers: Iterable[int], stops: Iterable[int] = ()) -> None:
        """Choose the signals, and which of them stop; their handlers are installed on entry."""
        self.handled: set[int] = set()  # the chosen signals that are not ignored
        self.is_over = False  # the main thread is to leave the block at the next signal
        self.numbers = sorted(set(numbers))  # the chosen signals
        self.on_signal: Callable[[int], object] = bool  # no callback by default
        """Called with each signal by its handler, also while the event loop is blocked."""
        self.handle: Callable[[int], object] | None = None
        """Handles a signal at once, in `deliver`; without it, and SIGTSTP, signals are iterated."""
        self.stops = StopSignals(stops)
        self._unread: collections.deque[int] = collections.deque()
        self._due: set[int] = set()
        self._discarded: frozenset[int] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._descriptor = -1

    def __enter__(self) -> ReceivedSignals:
        if threading.current_thread() is not threading.main_thread():
            raise HostError("signals can only be handled on the main thread")
        try:
            _handlers.add(self, self.numbers)
            try:
                self._attach()
            except RuntimeError:
                pass  # no event loop is running yet
        except BaseException:  # KeyboardInterrupt too: all or none is installed
            self._detach()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()
        left = sorted({*self._unread, *self._due} - self._discarded)
        self._unread.clear()
        unread.discard(self)
        self._due.clear()
        for number in left:
            if others := _handlers.receivers_of(number):
                others[-1]._due.add(number)  # they have received it too
            else:
                signal.raise_signal(number)

    def _attach(self) -> None:
        """Let the running loop wake up when a signal arrives."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._descriptor = _handlers.wakeup_descriptor()
            loop.add_reader(self._descriptor, _handlers.on_wakeup)

    def _detach(self) -> None:
        if self._descriptor >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        _handlers.remove(self)
        self.handled.clear()

    def put(self, number: int) -> None:
        """Add a signal that has arrived; called by the handler."""
        meaning = self.stops.meaning(number)
        if not meaning:
            if number == signal.SIGTERM and self._unread and self._unread[-1] in self.stops.numbers:
                # Programs save at it, whichever handler was called first.
                self._unread[-1] = number
            return
        self.on_signal(meaning)
        self._unread.append(meaning)
        if self.handle is not None:
            unread.add(self)
        if self._waiter is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(set_result_if_pending, self._waiter, None)

    def deliver(self) -> None:
        """Handle what has arrived, if this is the loop that does."""
        if self.handle is None or self._loop is not asyncio.get_running_loop():
            return  # of another thread
        unread.discard(self)
        while self._unread and self._unread[0] != signal.SIGTSTP:
            self.handle(self._unread.popleft())

    def suspend_process(self, since: float) -> None:
        """Suspend this process as SIGTSTP does, until SIGCONT, unless that has arrived since.

        The first of several receivers of one SIGTSTP does it for all: `since` is when the signal
        was read, in seconds of `time.monotonic`.
        """
        # A SIGCONT in the microseconds between the look and SIGSTOP has no effect.
        if min(since, _handlers.suspended_at) > _handlers.continued_at + _AT_ONCE_S:
            # SIGSTOP, since SIGTSTP has a handler here; a shell sees the same state.
            os.kill(os.getpid(), signal.SIGSTOP)
            _handlers.continued_at = time.monotonic()

    def discard(self, numbers: Iterable[int]) -> None:
        """Choose signals that are not sent again on exit: they were for this block only."""
        self._discarded = frozenset(numbers)

    def resend(self, number: int) -> None:
        """Choose a signal that was read to be sent again on exit."""
        self._due.add(number)

    def leave(self, number: int) -> None:
        """Leave the block on the main thread, wherever that is, and send a signal again there."""
        # Called on another thread.
        self._due.add(number)
        self.is_over = True
        if number in self.handled:  # else the block has been left
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def __aiter__(self) -> ReceivedSignals:
        return self

    async def __anext__(self) -> int:
        self._attach()
        while True:
            # Set first: the handler may run between any two bytecodes.
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            if self._unread:
                return self._unread.popleft()
            await waiter
