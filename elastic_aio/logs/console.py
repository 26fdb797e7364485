"""The console: where the output of workers is shown.

It consists of descriptors, text streams of Python, or a callback.  A text stream in memory, a
notebook's or a test's, is written to as Python code would: its `write` must not block.

A descriptor is written to without blocking the loop.  Standard output may be a pipe whose reader is
suspended, a terminal in scroll lock, or closed.  O_NONBLOCK is a flag of the open file description,
which the shell and the workers share (open(2)); so pipes and terminals are opened anew where that
is possible, and sockets are sent to with MSG_DONTWAIT.  Files never block.
"""

from __future__ import annotations

import asyncio
import codecs
import errno
import io
import os
import select
import socket
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from elastic_aio.aio import create_task, wait_readable
from elastic_aio.logs.lines import LogLine
from elastic_aio.text import error_reason

if TYPE_CHECKING:
    from elastic_aio.logs.reader import LogReader

_ERASE_LINE = b"\r\x1b[K"
_DEFAULT_COLUMNS = 80
# Errors of this process or host, not of the console: the write is repeated after a pause.
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EINTR}
_RETRY_S = 0.05
_LINES_AT_ONCE = 100


STYLES = tuple(b"\x1b[%dm" % code for code in (36, 33, 32, 35, 34, 96, 93, 92, 95, 94))
"""Escape sequences that tell ranks apart on a terminal (ECMA-48, SGR); none is red."""

_PLAIN = b"\x1b[0m"


def styled(text: bytes, style: bytes) -> bytes:
    """Return `text` in a style of the terminal; unchanged without a style."""
    return style + text + _PLAIN if style and text else text


class SinkLost(Exception):
    """The console accepts no more output."""


class Sink:
    """An output stream of this process; written by whole lines, one writer at a time."""

    def __init__(
        self, name: str, descriptor: int, write: Callable[[bytes | memoryview], int] | None
    ) -> None:
        """Own `descriptor`; `write` None: the stream was closed from the start.

        Raises:
            OSError: no descriptor is left; the caller closes `descriptor`.
        """
        self.name = name
        self.lock = asyncio.Lock()
        self.is_terminal = write is not None and os.isatty(descriptor)
        self.written = 0
        self.users = 0
        self.on_closed: Callable[[], object] = bool  # no callback by default
        self.lost: str | None = None if write else "it is closed"
        self._descriptor = descriptor
        # Opened here: no descriptor may be left when the console blocks.
        self._poll = None if write is None else _poll_writable(descriptor)
        self._write = write
        self._shows_frame = False
        self._unwritten = b""

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.written} bytes written"
        return f"<Sink {self.name}, {state}>"

    @property
    def has_descriptor(self) -> bool:
        """Whether it writes to a descriptor, and is open."""
        return self._descriptor >= 0

    @property
    def is_alone(self) -> bool:
        """Whether it has one user, and is not in the middle of a write."""
        return self.users == 1 and not self.lock.locked()

    def reopen(self, descriptor: int) -> None:
        """Write to another regular file from now on, which the caller closes."""
        os.dup2(descriptor, self._descriptor, inheritable=False)

    async def write(self, data: bytes) -> None:
        """Write all of `data`, waiting while the console is blocked; call it with `lock` held.

        Cancellation: the next write begins with the rest of this one, so that no line is cut.

        Raises:
            SinkLost: the console is closed, or a write failed.
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
            except OSError as error:
                is_blocked = isinstance(error, BlockingIOError)
                if not is_blocked and error.errno not in _TRANSIENT:
                    self.lost = error_reason(error)
                    raise SinkLost(self.lost) from error
                try:
                    await (self._writable() if is_blocked else asyncio.sleep(_RETRY_S))
                except asyncio.CancelledError:
                    self._unwritten = bytes(left)
                    raise
                continue
            self.written += count
            left = left[count:]

    async def show_frame(self, text: bytes, prefix: bytes = b"", style: bytes = b"") -> None:
        """Show a prefix in its style and a text, which the next write erases; for terminals only.

        What does not fit into the line is cut.
        """
        try:
            columns = os.get_terminal_size(self._descriptor).columns or _DEFAULT_COLUMNS
        except OSError:
            columns = _DEFAULT_COLUMNS  # the terminal has hung up: the write fails
        # A frame that wraps could not be erased.  Cut characters, not bytes.
        visible = (prefix + text).decode("utf-8", "replace")[: max(columns - 1, 1)].encode()
        begin = visible[: len(prefix)]
        await self.write(_ERASE_LINE + styled(begin, style) + visible[len(begin) :])
        self._shows_frame = True

    def close(self) -> None:
        """End one use; the last one closes the sink's descriptor, not the stream itself."""
        self.users -= 1
        if self.users > 0:
            return
        self.on_closed()
        if self._poll is not None:
            self._poll.close()
            self._poll = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.lost = self.lost or "it is closed"

    async def _writable(self) -> None:
        try:
            await wait_readable([-1 if self._poll is None else self._poll.fileno()])
        except (OSError, ValueError):  # epoll_ctl(2): no memory, or too many watches
            await asyncio.sleep(_RETRY_S)


class LineWriter:
    """Writes lines to a sink in the background, in order; the caller never waits."""

    def __init__(self, sink: Sink) -> None:
        """Write to `sink`, which the caller closes."""
        self._sink = sink
        self._lines: list[bytes] = []
        self._writing: asyncio.Task[None] | None = None

    @property
    def lost(self) -> str | None:
        """Why the sink accepts no more output; None while it does."""
        return self._sink.lost

    def put(self, line: bytes) -> None:
        """Queue a line, with its newline."""
        self._lines.append(line)
        if self._writing is None or self._writing.done():
            self._writing = create_task(self._write(), name=f"write to {self._sink.name}")

    async def drain(self, timeout: float) -> bool:
        """Wait until all lines are written.

        After `timeout` seconds without progress, drops the rest and returns False.
        """
        while self._writing is not None and not self._writing.done():
            before = self._sink.written
            await asyncio.wait([self._writing], timeout=timeout)
            if not self._writing.done() and self._sink.written == before:
                self._writing.cancel()
                await asyncio.wait([self._writing])
                return False
        return True

    async def _write(self) -> None:
        while self._lines:
            lines, self._lines = self._lines, []
            async with self._sink.lock:
                try:
                    await self._sink.write(b"".join(lines))
                except SinkLost:
                    return


# The sinks in use: two sinks of one file would split each other's lines.  Several
# descriptors have one file with `2>&1`, on a terminal, and in several agents.
_sinks: dict[tuple[int, int, int], Sink] = {}


def open_sink(name: str, descriptor: int) -> Sink:
    """Return the sink of the file of `descriptor`.

    A file has one sink per event loop; each call must be followed by a `close`.  That does not
    close the descriptor.  A closed descriptor gives a sink that is lost.

    Raises:
        OSError: no descriptor is left.
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
    own = -1
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with suppress(OSError):  # another user's: below, PIPE_BUF at a time
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
    is_own = own >= 0
    file = own if is_own else os.dup(descriptor)

    def write(data: bytes | memoryview) -> int:
        if is_own or stat.S_ISREG(mode):
            return os.write(file, data)
        return (_send if stat.S_ISSOCK(mode) else _write_pipe_buf)(file, data)

    try:
        return Sink(name, file, write)
    except OSError:
        os.close(file)
        raise


def _poll_writable(descriptor: int) -> select.epoll | None:
    """Return an epoll instance that is readable when `descriptor` is writable; None for a file.

    The loop watches it in place of the descriptor: libuv sets O_NONBLOCK on each descriptor that it
    polls, and a socket's open file description is shared with the parent and the workers.
    """
    poll = select.epoll(1)
    try:
        poll.register(descriptor, select.EPOLLOUT)
    except OSError as error:
        poll.close()
        if error.errno == errno.EPERM:  # epoll_ctl(2): a regular file
            return None
        raise
    return poll


def _send(descriptor: int, data: bytes | memoryview) -> int:
    connection = socket.socket(fileno=descriptor)
    try:
        return connection.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    finally:
        connection.detach()


def _write_pipe_buf(descriptor: int, data: bytes | memoryview) -> int:
    """Write what a ready pipe accepts without blocking: PIPE_BUF bytes (pipe(7))."""
    poller = select.poll()
    poller.register(descriptor, select.POLLOUT)
    if not poller.poll(0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])


# ------------------------------------------------------------------------ streams of Python


class TextOutput(Protocol):
    """The part of a text stream that a console needs."""

    def write(self, text: str, /) -> object:
        """Take a text."""

    def flush(self) -> object:
        """Show it."""


ConsoleTarget = tuple[int | TextOutput, int | TextOutput] | TextOutput | Callable[[LogLine], object]
"""The shown stdout and stderr, each a descriptor or a text stream; one stream for both; or a
function that gets every line.  Streams and functions are called on the event loop."""


class TextSink(Sink):
    def __init__(self, name: str, stream: TextOutput) -> None:
        """Write to `stream`, which stays open."""
        super().__init__(name, -1, None)
        self.lost = None
        self.users = 1
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def write(self, data: bytes) -> None:
        """Write all of `data`; raise `SinkLost` if the stream raised an exception."""
        if self.lost:
            raise SinkLost(self.lost)
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except Exception as error:
            self.lost = f"{type(error).__name__}: {error}"
            raise SinkLost(self.lost) from error
        self.written += len(data)


class _Silent:
    def write(self, text: str, /) -> None:
        pass

    def flush(self) -> None:
        pass


class ConsoleStreams:
    """The shown stdout and stderr of a job: `out` and `err`, each a descriptor or a text stream.

    `callback` gets every line that is shown; None for none.
    """

    def __init__(self, target: ConsoleTarget | None, inherited: tuple[int, int]) -> None:
        """Resolve a target.

        None stands for this process's own streams: the `inherited` descriptors, unless `sys.stdout`
        or `sys.stderr` has been replaced by another stream.
        """
        value: Any = target
        self.callback: Callable[[LogLine], object] | None = None
        if value is None:
            self.out = _replaced("stdout", inherited[0])
            self.err = _replaced("stderr", inherited[1])
        elif isinstance(value, tuple):
            self.out, self.err = map(_resolve, value)
        elif hasattr(value, "write"):
            self.out = self.err = _resolve(value)
        else:
            self.callback = value
            self.out, self.err = _Silent(), _Silent()
        self._sinks: dict[object, Sink] = {}

    def __repr__(self) -> str:
        return f"<ConsoleStreams {self.out!r}, {self.err!r}>"

    def sink(self, name: str) -> Sink:
        """Return the sink of `stdout` or `stderr`, or raise an OSError without descriptors."""
        target = self.out if name == "stdout" else self.err
        key = target if isinstance(target, int) else id(target)
        if key not in self._sinks:
            is_number = isinstance(target, int)
            self._sinks[key] = open_sink(name, target) if is_number else TextSink(name, target)
        return self._sinks[key]

    def close(self) -> None:
        """Close the sinks; the streams themselves stay open.  Idempotent."""
        while self._sinks:
            self._sinks.popitem()[1].close()


def _resolve(value: Any) -> Any:
    """Return the descriptor of a text file, which can be written to without blocking."""
    if not isinstance(value, io.TextIOWrapper):
        return value
    try:
        value.flush()
        return value.fileno()
    except (OSError, ValueError):
        return value


def _replaced(name: str, descriptor: int) -> Any:
    """Return `sys.stdout` or `sys.stderr` if it is another stream than a descriptor."""
    stream = getattr(sys, name)
    if stream is None or stream is getattr(sys, f"__{name}__"):
        return descriptor
    try:
        if os.path.samestat(os.fstat(stream.fileno()), os.fstat(descriptor)):
            return descriptor
    except (OSError, ValueError, AttributeError):
        pass  # a stream in memory
    return _resolve(stream) if hasattr(stream, "write") else descriptor


class LineFeeder:
    """Calls a function with the lines of a reader; must be closed."""

    def __init__(
        self,
        reader: LogReader,
        callback: Callable[[LogLine], object],
        on_error: Callable[[str], None],
    ) -> None:
        """Begin; `on_error` gets what the function raised, and the function no more lines."""
        self._reader = reader
        self._callback = callback
        self._on_error = on_error
        self._task = create_task(self._run(), name="call back with log lines")

    def __repr__(self) -> str:
        return f"<LineFeeder of {self._reader!r}>"

    async def aclose(self) -> None:
        """Call the function with the rest.  Idempotent; the streams are complete."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        count = 0
        async with self._reader as lines:
            async for line in lines:
                try:
                    self._callback(line)
                except Exception as error:  # noqa: BLE001  # the user's code
                    with suppress(Exception):
                        self._on_error(f"its function raised {type(error).__name__}: {error}")
                    return
                count += 1
                if count % _LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)  # yield to other tasks
