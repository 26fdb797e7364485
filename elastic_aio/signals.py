"""ReceivedSignals: signals as an async iterator, which restores the previous handlers.

Signal handlers belong to a process, not to a library, so they are installed only inside
this context manager, which the command line and `launch(signals=...)` enter.  Three rules:

* A signal that is ignored on entry stays ignored: `nohup` and a shell's background jobs
  ignore signals on purpose.
* Nothing is raised at an arbitrary bytecode: the handler puts the number into a queue.
  It does not use the loop's `add_signal_handler`, which would silently discard what the
  embedding program has installed there for the same signal.  Like the loop, it needs the
  wake-up descriptor: a signal that arrives right before the loop blocks in its poll would
  otherwise be noticed only at the next event.
* On exit the previous handlers are restored, and a signal that is in the queue is sent
  again, so that it is not lost between two owners.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterable
from typing import Any

from elastic_aio.errors import HostError


class ReceivedSignals:
    """A context manager and an async iterator over the numbers of received signals.

    Raises:
        HostError: on entry: this is not the main thread.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        """Choose the signals; their handlers are installed on entry."""
        self._numbers = sorted(set(numbers))
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._previous: dict[int, Any] = {}
        self._discarded: frozenset[int] = frozenset()

    def __enter__(self) -> ReceivedSignals:
        if threading.current_thread() is not threading.main_thread():
            raise HostError("signals can only be handled on the main thread")
        self._loop = asyncio.get_running_loop()
        self._wakeup_reader, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup_reader, self._wakeup_writer):
            end.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._wakeup_writer.fileno(), warn_on_full_buffer=False
        )
        self._loop.add_reader(self._wakeup_reader.fileno(), self._on_wakeup)
        try:
            for number in self._numbers:
                previous = signal.getsignal(number)
                if previous is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
                    self._previous[number] = previous
        except BaseException:  # KeyboardInterrupt too: all or none is installed
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        while not self._queue.empty():
            if (number := self._queue.get_nowait()) not in self._discarded:
                os.kill(os.getpid(), number)

    def _on_signal(self, number: int, frame: object) -> None:
        # Runs at an arbitrary bytecode of the main thread; the loop does the rest.
        self._loop.call_soon_threadsafe(self._queue.put_nowait, number)

    def _on_wakeup(self) -> None:
        """Pass the numbers of other signals on to the previous wake-up descriptor."""
        try:
            numbers = self._wakeup_reader.recv(4096)
        except BlockingIOError:
            return
        others = bytes(number for number in numbers if number not in self._previous)
        if others and self._previous_wakeup >= 0:
            try:
                os.write(self._previous_wakeup, others)
            except OSError:
                pass  # full: its reader wakes up anyway

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            # None: a handler installed from C, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
        signal.set_wakeup_fd(self._previous_wakeup, warn_on_full_buffer=False)
        self._loop.remove_reader(self._wakeup_reader.fileno())
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    @property
    def handled(self) -> frozenset[int]:
        """The signals that are received now: the chosen ones that are not ignored."""
        return frozenset(self._previous)

    def discard(self, numbers: Iterable[int]) -> None:
        """Choose signals that are not sent again on exit: they were for this block only."""
        self._discarded = frozenset(numbers)

    def __aiter__(self) -> ReceivedSignals:
        return self

    async def __anext__(self) -> int:
        return await self._queue.get()
