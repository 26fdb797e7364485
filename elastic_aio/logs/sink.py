"""The console, written to without ever waiting inside a system call.

Our standard output may be a pipe whose reader is stopped, a terminal in scroll
lock, or closed.  Setting O_NONBLOCK on it would set it for everybody who shares
the open file (the shell, the workers), so it is opened anew where that is possible
(pipes, terminals) and sockets are sent to with MSG_DONTWAIT.  Files never block.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import stat
from collections.abc import Callable

from msgspec import Struct

__all__ = ["Console", "Sink", "SinkLost", "open_console", "open_sink"]

_ERASE_LINE = b"\r\x1b[K"
_USUAL_COLUMNS = 80


class SinkLost(Exception):  # named after what happened
    """The console takes no more output."""


class Sink:
    """One output stream of this process; written by whole lines, one writer at a time."""

    def __init__(
        self, name: str, descriptor: int, write: Callable[[bytes | memoryview], int] | None
    ) -> None:
        """Take over `descriptor`; without `write` the stream is closed from the start."""
        self.name = name
        self.lock = asyncio.Lock()
        self.is_terminal = write is not None and os.isatty(descriptor)
        self.written = 0
        self.users = 0
        self.on_closed: Callable[[], object] = bool  # nobody to tell, as yet
        self.lost: str | None = None if write else "it is closed"
        self._descriptor = descriptor
        self._write = write
        self._shows_frame = False
        self._unwritten = b""

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.written} bytes written"
        return f"<Sink {self.name}, {state}>"

    async def write(self, data: bytes) -> None:
        """Write all of `data`, waiting while the console is blocked.

        Call it with `lock` held.  When it is cancelled, the next write begins with
        what is left of this one: a line is never cut.

        Raises:
            SinkLost: the console is closed, or takes no more.
        """
        if self.lost or self._write is None:
            raise SinkLost(self.lost)
        if self._shows_frame:
            data = _ERASE_LINE + data
            self._shows_frame = False
        left = memoryview(self._unwritten + data if self._unwritten else data)
        self._unwritten = b""
        while left:
            try:
                count = self._write(left)
            except BlockingIOError:
                try:
                    await self._writable()
                except asyncio.CancelledError:
                    self._unwritten = bytes(left)
                    raise
                continue
            except OSError as error:
                self.lost = (error.strerror or str(error)).lower()
                raise SinkLost(self.lost) from error
            self.written += count
            left = left[count:]

    async def show_frame(self, text: bytes) -> None:
        """Show text that the next write erases; for terminals only."""
        try:
            columns = os.get_terminal_size(self._descriptor).columns or _USUAL_COLUMNS
        except OSError:
            columns = _USUAL_COLUMNS  # it has hung up; the write will tell
        # A frame that wraps could not be erased.  Cut characters, not bytes.
        fitting = text.decode("utf-8", "replace")[: max(columns - 1, 1)].encode()
        await self.write(_ERASE_LINE + fitting)
        self._shows_frame = True

    def close(self) -> None:
        """Close our copy of the stream with its last user; the stream itself stays open."""
        self.users -= 1
        if self.users > 0:
            return
        self.on_closed()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.lost = self.lost or "it is closed"

    async def _writable(self) -> None:
        # Through an epoll of its own: libuv sets O_NONBLOCK on whatever it polls, and
        # a socket's open file is shared with our parent and the workers.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with select.epoll(1) as writable:
            writable.register(self._descriptor, select.EPOLLOUT)
            loop.add_reader(writable.fileno(), _set, future)
            try:
                await future
            finally:
                loop.remove_reader(writable.fileno())


class Console(Struct, frozen=True):
    """Standard output and standard error of this process."""

    out: Sink
    err: Sink

    def close(self) -> None:
        """Close our copies of both."""
        self.out.close()
        self.err.close()


def open_console() -> Console:
    """Return sinks for descriptors 1 and 2."""
    return Console(open_sink("stdout", 1), open_sink("stderr", 2))


# The sinks in use: two writers to one file would split each other's lines.  Files are
# one for several descriptors with `2>&1` or on a terminal, and for several agents.
_sinks: dict[tuple[int, int, int], Sink] = {}


def open_sink(name: str, descriptor: int) -> Sink:
    """Return a sink that writes where `descriptor` does; never fails.

    One file has one sink per event loop: each call must be followed by a `close`.
    """
    try:
        file = os.fstat(descriptor)
    except OSError:
        return Sink(name, -1, None)
    key = id(asyncio.get_running_loop()), file.st_dev, file.st_ino
    sink = _sinks.get(key)
    if sink is None:
        sink = _sinks[key] = _make_sink(name, descriptor, file.st_mode)
        sink.on_closed = lambda: _sinks.pop(key, None)
    sink.users += 1
    return sink


def _make_sink(name: str, descriptor: int, mode: int) -> Sink:
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            pass  # another user's pipe or terminal: below, in small portions
        else:
            return Sink(name, own, lambda data: os.write(own, data))
    try:
        copy = os.dup(descriptor)
    except OSError:
        return Sink(name, -1, None)
    if stat.S_ISSOCK(mode):
        connection = socket.socket(fileno=copy)
        connection.detach()
        return Sink(name, copy, lambda data: _send(copy, data))
    if stat.S_ISREG(mode):
        return Sink(name, copy, lambda data: os.write(copy, data))
    return Sink(name, copy, lambda data: _write_a_little(copy, data))


def _send(descriptor: int, data: bytes | memoryview) -> int:
    connection = socket.socket(fileno=descriptor)
    try:
        return connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        connection.detach()


def _write_a_little(descriptor: int, data: bytes | memoryview) -> int:
    """Write what a ready descriptor takes without blocking: PIPE_BUF bytes (pipe(7))."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
