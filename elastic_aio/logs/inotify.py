"""InotifyWatcher: notification of files that change, by inotify(7) through the C library.

Python has no inotify, and alternatives without a thread poll.  Where the kernel refuses (instances
and watches are limited per user), a timer takes its place.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Mapping

from elastic_aio.logs.log_file import REST_S, WakeLimit

IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_OPEN = 0x20
IN_MOVE_SELF = 0x800
_EVENTS = IN_MODIFY | IN_OPEN
_POLL_S = 0.05

# The watch of a file that wakes this process too often is removed for a while, since each line
# costs its writer an event too.  To leave the events in the queue for that while is simpler, and
# took 1.7 times the CPU time at 0.7 of the rate (four workers that write single lines).


class InotifyWatcher:
    """Calls back with the watched files that may have changed; must be closed."""

    def __init__(
        self,
        on_events: Callable[[Mapping[int, int]], None],
        events: int | None = None,
        *,
        polls: bool = True,
    ) -> None:
        """Call `on_events` with the events of files, by token.

        Events are `IN_MODIFY` and `IN_OPEN`, or `events`; 0 if the kernel reports none for a file,
        which a timer replaces if the watcher `polls`.
        """
        self._on_events = on_events
        self._events = _EVENTS if events is None else events
        self._polls = polls
        self._loop = asyncio.get_running_loop()
        self._paths: dict[int, str] = {}  # token -> file
        self._tokens: dict[int, int] = {}  # watch descriptor -> token
        self._handles: dict[int, int] = {}  # token -> watch descriptor
        self._resting: set[int] = set()  # tokens whose watch is added again later
        self._polled: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._limit = WakeLimit()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._on_readable)

    def __repr__(self) -> str:
        watched = len(self._paths) - len(self._polled)
        return f"<InotifyWatcher of {watched} files, {len(self._polled)} polled>"

    def add(self, path: str, token: int) -> None:
        """Watch a file; the caller chooses its token."""
        self._paths[token] = path
        self._subscribe(token)

    def remove(self, token: int) -> None:
        if self._paths.pop(token, None) is not None:
            self._polled.discard(token)
            self._resting.discard(token)
            self._unsubscribe(token)

    def read_events(self) -> None:
        """Call back with what the kernel has reported by now."""
        if self._descriptor >= 0:
            events = self._read() | dict.fromkeys(self._resting, self._events)
            if events:
                self._on_events(events)

    def close(self) -> None:
        """Stop watching all files.  Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._polled.clear()
        self._resting.clear()
        if self._descriptor >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _subscribe(self, token: int) -> None:
        handle = -1
        if self._descriptor >= 0:
            path = os.fsencode(self._paths[token])
            handle = self._libc.inotify_add_watch(self._descriptor, path, self._events)
        if handle >= 0:
            self._tokens[handle] = token
            self._handles[token] = handle
        elif self._polls:
            self._polled.add(token)
            self._poll_later()

    def _unsubscribe(self, token: int) -> None:
        handle = self._handles.pop(token, -1)
        if self._tokens.pop(handle, None) is not None:
            self._libc.inotify_rm_watch(self._descriptor, handle)

    def _on_readable(self) -> None:
        is_busy = self._limit.is_exceeded(self._loop.time())
        events = self._read()
        if is_busy and events:
            if not self._resting:
                self._loop.call_later(REST_S, self._end_rest)
            self._resting.update(events)
            for token in events:
                self._unsubscribe(token)
        if events:
            self._on_events(events)

    def _end_rest(self) -> None:
        # Subscribe before the callback: a write in between is reported twice, and
        # not lost.  Any event may have happened in a rest.
        resting, self._resting = self._resting, set()
        for token in resting:
            self._subscribe(token)
        if resting:
            self._on_events(dict.fromkeys(resting, self._events))

    def _read(self) -> dict[int, int]:
        try:
            content = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return {}
        except OSError:  # no memory: the events are lost, and any file may have grown
            return dict.fromkeys(self._handles, self._events)
        # inotify(7): an event has four integers, of which the first is the watch and the
        # second is the event; a name follows only for watched directories.
        integers = memoryview(content).cast("i").tolist()
        events: dict[int, int] = {}
        for handle, event in zip(integers[::4], integers[1::4], strict=True):
            if handle < 0:  # IN_Q_OVERFLOW: any file may have grown
                return dict.fromkeys(self._handles, self._events)
            # Events of a watch that was just removed have no token.
            if (token := self._tokens.get(handle)) is not None:
                events[token] = events.get(token, 0) | event
        return events

    def _poll_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        if self._polled:
            self._on_events(dict.fromkeys(self._polled, 0))
            self._poll_later()
