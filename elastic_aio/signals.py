"""Signals as an async iterator that puts back what it replaced.

Signals belong to a process, not to a library, so handlers are only installed
inside this context manager, which the command line and `launch(signals=...)`
enter.  Three rules:

* A signal that was ignored when we came stays ignored (`nohup`, or a shell's
  background job): whoever ignored it meant it.
* Nothing is raised at an arbitrary bytecode: the handler puts the number into a
  queue.  It is not the loop's `add_signal_handler`, which would silently throw away
  what the embedding program has installed there for the same signal.  Like the loop,
  we need the wake-up descriptor: a signal that arrives right before the loop goes to
  sleep would else be noticed only when something wakes it.
* On leaving, the former handlers return, and a signal that nobody has read by
  then is sent again, so that it is not lost between two owners.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from elastic_aio.errors import SurroundingsError

__all__ = ["ReceivedSignals"]


class ReceivedSignals:
    """Receive `numbers` as items of an async iterator while the block is open."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """Choose the signals; nothing is installed before the block is entered."""
        self._numbers = sorted(set(numbers))
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._former: dict[int, Any] = {}
        self._discarded: frozenset[int] = frozenset()

    def __enter__(self) -> ReceivedSignals:
        if threading.current_thread() is not threading.main_thread():
            raise SurroundingsError("signals can only be handled on the main thread")
        self._loop = asyncio.get_running_loop()
        self._alarm, self._bell = socket.socketpair()
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        self._former_bell = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        self._loop.add_reader(self._alarm.fileno(), self._on_alarm)
        try:
            for number in self._numbers:
                former = signal.getsignal(number)
                if former is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
                    self._former[number] = former
        except BaseException:  # KeyboardInterrupt too: all or none of them is handled
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        while not self._queue.empty():
            if (number := self._queue.get_nowait()) not in self._discarded:
                os.kill(os.getpid(), number)

    def _on_signal(self, number: int, frame: object) -> None:
        # At an arbitrary bytecode of the main thread, so only this: the loop does the
        # rest in its own time.
        self._loop.call_soon_threadsafe(self._queue.put_nowait, number)

    def _on_alarm(self) -> None:
        """The loop was woken for a signal; those that are not ours go where they went before."""
        try:
            numbers = self._alarm.recv(4096)
        except BlockingIOError:
            return
        others = bytes(number for number in numbers if number not in self._former)
        if others and self._former_bell >= 0:
            try:
                os.write(self._former_bell, others)
            except OSError:
                pass  # full: whoever reads it is woken already

    def _restore(self) -> None:
        for number, former in self._former.items():
            # None: a handler installed from C, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()
        signal.set_wakeup_fd(self._former_bell, warn_on_full_buffer=False)
        self._loop.remove_reader(self._alarm.fileno())
        self._alarm.close()
        self._bell.close()

    @property
    def handled(self) -> frozenset[int]:
        """The signals that are received now: those asked for and not ignored."""
        return frozenset(self._former)

    def discard(self, numbers: Iterable[int]) -> None:
        """Choose signals that are not sent again on leaving: nobody else is meant."""
        self._discarded = frozenset(numbers)

    def __aiter__(self) -> ReceivedSignals:
        return self

    async def __anext__(self) -> int:
        return await self._queue.get()
