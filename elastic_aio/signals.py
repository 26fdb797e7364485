"""Signals as an async iterator that puts back what it replaced.

Signals belong to a process, not to a library, so handlers are only installed
inside this context manager, which the command line and `launch(signals=...)`
enter.  Three rules:

* A signal that was ignored when we came stays ignored (`nohup`, or a shell's
  background job): whoever ignored it meant it.
* Nothing is raised at an arbitrary bytecode: the loop's own handler puts the
  number into a queue.
* On leaving, the former handlers return, and a signal that nobody has read by
  then is sent again, so that it is not lost between two owners.
"""

from __future__ import annotations

import asyncio
import os
import signal
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
        try:
            for number in self._numbers:
                former = signal.getsignal(number)
                if former is signal.SIG_IGN:
                    continue
                self._loop.add_signal_handler(number, self._queue.put_nowait, number)
                self._former[number] = former
        except BaseException:
            self._restore()  # a signal that cannot be handled leaves all as it was
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

    def _restore(self) -> None:
        # Held back meanwhile: the loop puts the default action in place of its
        # handler, and a signal between that and the former handler would kill us.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, self._former)
        try:
            for number, former in self._former.items():
                self._loop.remove_signal_handler(number)
                # None: a handler installed from C, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if former is None else former)
            self._former.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

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
