"""Being told that files grew: inotify through the C library.

Python has no inotify, and its thread-free alternatives poll.  Where the kernel
refuses (too many instances or watches: a limit per user), a timer takes its place.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

__all__ = ["GrowthWatch"]

_IN_MODIFY = 0x2
_EVENT = struct.Struct("iIII")  # inotify(7): wd, mask, cookie, len
_POLL_S = 0.05

# Wake-ups at once that a window allows; past them, reads are gathered: a file that
# grows by single lines would otherwise wake us for each of them.
_WINDOW_S = 0.05
_WAKES_AT_ONCE = 20
_GATHER_S = 0.005


class GrowthWatch:
    """Tells which of the watched files have grown; must be closed."""

    def __init__(self, grown: Callable[[list[int]], None]) -> None:
        """Call `grown` with the tokens of files that grew."""
        self._grown = grown
        self._loop = asyncio.get_running_loop()
        self._tokens: dict[int, int] = {}  # watch descriptor -> token
        self._polled: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._window_end = 0.0
        self._wakes = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._on_readable)

    def __repr__(self) -> str:
        return f"<GrowthWatch of {len(self._tokens)} files, {len(self._polled)} polled>"

    def add(self, path: str, token: int) -> int:
        """Watch a file; return the handle for `remove`, -1 if it has to be polled."""
        handle = -1
        if self._descriptor >= 0:
            handle = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY)
        if handle >= 0:
            self._tokens[handle] = token
        else:
            self._polled.add(token)
            self._poll_later()
        return handle

    def remove(self, handle: int, token: int) -> None:
        """Stop watching."""
        self._polled.discard(token)
        if self._tokens.pop(handle, None) is not None:
            self._libc.inotify_rm_watch(self._descriptor, handle)

    def close(self) -> None:
        """Stop watching everything."""
        if self._timer is not None:
            self._timer.cancel()
        self._polled.clear()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_readable(self) -> None:
        now = self._loop.time()
        if now >= self._window_end:
            self._window_end, self._wakes = now + _WINDOW_S, 0
        self._wakes += 1
        if self._wakes > _WAKES_AT_ONCE:
            self._loop.remove_reader(self._descriptor)
            self._loop.call_later(_GATHER_S, self._gathered)
        self._read()

    def _gathered(self) -> None:
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._on_readable)

    def _read(self) -> None:
        try:
            content = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        tokens: dict[int, None] = {}
        position = 0
        while position < len(content):
            handle, _, _, length = _EVENT.unpack_from(content, position)
            position += _EVENT.size + length
            if handle == -1:  # the queue ran over: anything may have grown
                tokens.update(dict.fromkeys(self._tokens.values()))
            elif (token := self._tokens.get(handle)) is not None:
                tokens[token] = None
        self._grown(list(tokens))

    def _poll_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        if self._polled:
            self._grown(list(self._polled))
            self._poll_later()
