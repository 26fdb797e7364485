"""The named pipe by which workers acquire timers, as torch's `FileTimerClient` does.

A request is a line of JSON (see `elastic_aio.worker.timers`).  Any process of the user may write
into the pipe: lines that are no requests, or exceed the limits, are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import math
import os
import stat
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator

from elastic_aio.errors import HostError
from elastic_aio.text import error_reason, format_value
from elastic_aio.watch.deadlines import WorkerTimer

_CHUNK = 4096  # bytes of the pipe that are read in one turn of the event loop
_LINE_MAX = 4096  # PIPE_BUF: longer lines are not written whole
_LINE_MIN = 50  # the four keys of a request with their punctuation; shorter lines are not decoded
_SCOPE_MAX = 1000
_HIGHEST_PID = 1 << 22
_HIGHEST_SIGNAL = 64
_LAG_MAX_S = 60.0


class TimerRequests:
    """Reads requests from any parts of the stream of bytes; pure."""

    def __init__(self) -> None:
        self.rejected = ""  # why something was left out, the first time; else empty
        self._rest = b""
        self._is_skipping = False

    def feed(self, data: bytes, now: float, wall: float) -> Iterator[WorkerTimer]:
        """Yield the timers of the requests whose lines end in `data`.

        `now` is the present time by the clock of the timers, `wall` by the clock of requests, Unix
        time.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._is_skipping and (request := self._read(line, now, wall)) is not None:
                yield request
            self._is_skipping = False
        if len(self._rest) > _LINE_MAX:
            self.reject(f"a line of more than {_LINE_MAX} bytes")
            self._rest, self._is_skipping = b"", True

    def reject(self, why: str, line: bytes | None = None) -> None:
        """Note why something was left out; a flood of lines costs one text."""
        if not self.rejected:
            self.rejected = why if line is None else f"{why}: {format_value(line)}"

    def forget(self) -> None:
        self._rest, self._is_skipping = b"", False

    def _read(self, line: bytes, now: float, wall: float) -> WorkerTimer | None:
        try:
            request = json.loads(line) if len(line) >= _LINE_MIN else {}
            pid, scope = request["pid"], request["scope_id"]
            expiration, number = request["expiration_time"], request["signal"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self.reject("no timer request", line)
            return None
        is_valid = (
            type(pid) is int
            and 0 < pid <= _HIGHEST_PID
            and isinstance(scope, str)
            and type(expiration) in (int, float)
            and abs(expiration) < 1e12
            and not math.isnan(expiration)
            and type(number) is int
            and number <= _HIGHEST_SIGNAL
        )
        if not is_valid:
            self.reject("no timer request", line)
            return None
        acquired, age = request.get("acquired"), 0.0
        if type(acquired) is float and wall - _LAG_MAX_S < acquired < wall:
            age = wall - acquired
        until = None if expiration < 0 else now + expiration - wall
        return WorkerTimer(pid, scope[:_SCOPE_MAX], now - age, until, number)


class TimerPipe:
    """The pipe of one job on this host; must be closed."""

    def __init__(self, path: bool | str, on_bytes: Callable[[bytes], None]) -> None:
        """Make the pipe at a path, or (True) in the temporary directory, or raise HostError.

        No other process may read from it there.  `on_bytes` is called with all that comes.
        """
        own = f"{tempfile.gettempdir()}/watchdog_timer_{os.urandom(16).hex()}"
        self.path = path if isinstance(path, str) else own
        self._on_bytes = on_bytes
        self._status: os.stat_result | None = None
        self._descriptor = -1
        # Bytes that were in the pipe when `read_all` was called, and are not read yet.
        self._ahead = 0
        self._then: Callable[[], None] = lambda: None
        try:
            _remove_abandoned(self.path)
            os.mkfifo(self.path, 0o600)
            self._status = os.lstat(self.path)
            # Open for writing too: without a writer, a pipe is always at its end of file.
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            problem = f"cannot make the pipe of the timers at {self.path}: {error_reason(error)}"
            raise HostError(problem) from error
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_readable)

    def __repr__(self) -> str:
        return f"<TimerPipe {self.path}>"

    def read_all(self, then: Callable[[], None]) -> None:
        """Call `then` when all that is in the pipe now has been read."""
        self._ahead, self._then = self._count_unread(), then
        if self._ahead == 0:
            then()

    def forget(self) -> None:
        """Drop the bytes of former workers that are in the pipe."""
        with contextlib.suppress(BlockingIOError):  # a worker may read from the pipe
            os.read(self._descriptor, self._count_unread())
        self._ahead = 0

    def close(self) -> None:
        """Remove the pipe.  Idempotent."""
        if self._status is not None:
            # Another launcher may have replaced the pipe; an inode number is free for another
            # file only after the descriptor is closed.
            with contextlib.suppress(OSError):
                if os.path.samestat(os.lstat(self.path), self._status):
                    os.unlink(self.path)
            self._status = None
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _count_unread(self) -> int:
        count = fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(4))
        return int.from_bytes(count, sys.byteorder)

    def _on_readable(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._descriptor, _CHUNK)
        self._on_bytes(data)
        if self._ahead:
            self._ahead = max(0, self._ahead - len(data)) if data else 0
            if self._ahead == 0:
                self._then()


def _remove_abandoned(path: str) -> None:
    """Remove a pipe that a killed launcher has left, or raise OSError: a process reads from it."""
    if not (os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode)):
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no reader
            raise
        os.unlink(path)
    else:
        raise FileExistsError(errno.EEXIST, "another process reads from it")
