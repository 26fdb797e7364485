"""Relay: a worker's stream that passes through this process on its way to a log file.

A worker that writes to its file by itself gets ENOSPC when the disk is full, and fails.  With
`LogSpec.on_full="console"` it writes to a pipe instead.  This process copies the pipe to the file,
and keeps bytes that the file does not take in memory until the console has shown them.  The cost:
every byte is copied once more, and a worker waits while this process is suspended or its loop is
blocked.

Memory is bounded, and no worker waits for a console that takes nothing.  When `_HELD_MAX` bytes
wait for the console, the pipe is left alone until there is room again.  After `_PATIENCE_S` new
bytes are dropped and counted, until there is room and a line begins.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress

from elastic_aio.logs.log_file import CHUNK, REST_S, LogFile, WakeLimit

_HELD_MAX = 1 << 20
_PATIENCE_S = 5.0
_RETRY_S = 0.05
_TRANSIENT = {errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.EINTR}
# What a pipe holds at most (pipe-max-size in pipe(7)), in reads: a process that could not
# be killed may write on.
_LAST_READS = 16
# What a failure looks for its reason in.
_END_MAX = 64 * 1024


class Relay:
    """Copies a pipe to a file, and holds for a reader what the file does not take.

    Offsets are positions in the stream, and in the file as far as it goes.
    """

    def __init__(self, open_new: Callable[[], int]) -> None:
        """Make the pipe; its first byte makes the file.

        `open_new` makes the file, and returns its descriptor, which this object closes.

        Raises:
            OSError: no descriptor is left.
        """
        self.file = -1
        """The descriptor of the file; -1 while there is none."""
        self.error: OSError | None = None
        """Why the file takes no more output; None while it does."""
        self.is_made = False
        self._open_new = open_new
        self.is_behind = False
        """Whether the read bytes may end within a write, of which more is in the pipe."""
        self.kept = 0
        """Bytes in the file, once it takes no more."""
        self.taken_at = 0.0
        """When the last bytes came, in Unix seconds."""
        self.lost = 0
        """Bytes that are neither in the file nor read."""
        self.unkept = 0
        """Bytes that are not in the file."""
        self.unkept_end = b""
        """The end of the bytes that are not in the file."""
        self.on_data: Callable[[], object] = bool
        self.on_full: Callable[[], object] = bool
        self.has_reader = False
        """Whether bytes that the file does not take are held; they are dropped otherwise."""
        self.on_closed: Callable[[], object] = bool  # called by the owner
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        self._held_from = 0
        self._unwritten = b""
        self._is_dropping = False
        self._is_cut = False
        self._timer: asyncio.TimerHandle | None = None
        self._limit = WakeLimit()
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        """The end of the pipe that is read here, -1 once finished; and the other end."""
        os.set_blocking(self.reader, False)
        try:
            self._loop.add_reader(self.reader, self._on_readable)
        except OSError:
            os.close(self.reader)
            os.close(self.writer)
            raise

    def __repr__(self) -> str:
        state = f"{self.unkept} bytes not kept" if self.error else "to its file"
        return f"<Relay {state}{'' if self.reader >= 0 else ', finished'}>"

    @property
    def why(self) -> str:
        return ((self.error and self.error.strerror) or str(self.error)).lower()

    @property
    def end(self) -> int:
        """Offset of the end of the held bytes."""
        return self._held_from + len(self._held)

    def read_held(self, offset: int, size: int) -> bytes:
        """Return held bytes; b"" if there are none at `offset`."""
        begin = offset - self._held_from
        return bytes(self._held[begin : begin + size]) if begin >= 0 else b""

    def release(self, offset: int) -> None:
        """Forget the bytes before `offset`: they are not read again."""
        if offset > self._held_from:
            del self._held[: offset - self._held_from]
            self._held_from = offset
            if len(self._held) < _HELD_MAX:
                self._is_dropping = False
                self._resume()

    def skip_file(self, offset: int) -> None:
        """Continue at `offset` with the held bytes: another process has truncated the file."""
        self.kept = self._held_from = offset

    def make_file(self) -> None:
        """Make the file, unless that was done or the stream has ended.

        Raises:
            OSError: it cannot be made.  The next byte tries again.
        """
        if self.reader >= 0 and self.error is None and not self.is_made:
            self._make_file()

    def _make_file(self) -> None:
        self.file = self._open_new()
        self.is_made = True

    def read_now(self) -> None:
        if self.reader >= 0 and self._timer is None and self._read_rest(self.reader):
            self.on_data()

    def _read_rest(self, reader: int) -> bool:
        count = 0
        with suppress(OSError):
            while count < _LAST_READS and (data := os.read(reader, CHUNK)):
                self._take(data)
                count += 1
        return count > 0

    def finish(self) -> None:
        """Take the rest of the pipe, and close it: no process writes any more.  Idempotent."""
        if self.reader < 0:
            return
        self._loop.remove_reader(self.reader)
        if self._timer is not None:
            self._timer.cancel()
        reader, self.reader = self.reader, -1  # no pause begins any more
        self._is_dropping = False
        is_new = bool(self._unwritten)
        is_new |= self._read_rest(reader)
        os.close(reader)
        self._write_file()
        if is_new:
            self.on_data()

    def close(self) -> None:
        """Finish, and close the file; the caller has closed `writer`.  Idempotent."""
        self.finish()
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    # ---------------------------------------------------------------- the pipe

    def _on_readable(self) -> None:
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return
        except OSError:  # read(2): no memory
            self._pause(_RETRY_S)
            return
        if not data:  # all writers have ended
            self._loop.remove_reader(self.reader)
            return
        self._take(data)
        self.is_behind = len(data) == CHUNK and _has_more(self.reader)
        self.on_data()
        is_busy = self._limit.is_exceeded(self._loop.time())
        if is_busy and len(data) < CHUNK // 4 and self._timer is None:
            self._pause(REST_S)

    def _pause(self, seconds: float) -> None:
        """Read no more for so many seconds, or until there is room for more bytes."""
        if self.reader >= 0:
            self._loop.remove_reader(self.reader)
            self._timer = self._loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._is_dropping = len(self._held) >= _HELD_MAX
        self._resume()
        if self._unwritten:
            self._write_file()
            self.on_data()

    def _resume(self) -> None:
        if self._timer is not None and self.reader >= 0:
            self._timer.cancel()
            self._timer = None
            self._loop.add_reader(self.reader, self._on_readable)

    # ------------------------------------------------------ the file, or memory

    def _take(self, data: bytes) -> None:
        self.taken_at = time.time()
        if self.error is None:
            self._unwritten += data
            self._write_file()
        else:
            self._hold(data)

    def _write_file(self) -> None:
        left = memoryview(self._unwritten)
        error = None
        try:
            if left and not self.is_made:
                self._make_file()
            while left:
                left = left[os.write(self.file, left) :]
        except OSError as failure:
            error = failure
        self._unwritten = bytes(left)
        if error is None:
            return
        if error.errno in _TRANSIENT and self.reader >= 0:
            self._pause(_RETRY_S)
            return
        self.error = error
        # Not the number of bytes written: another process may have truncated the file.
        self.kept = self._held_from = 0 if self.file < 0 else os.fstat(self.file).st_size
        self.on_full()
        data, self._unwritten = self._unwritten, b""
        self._hold(data)

    def _hold(self, data: bytes) -> None:
        self.unkept += len(data)
        self.unkept_end = (self.unkept_end + data)[-_END_MAX:]
        if not self.has_reader or self._is_dropping:
            self.lost += len(data)
            self._is_cut = True
            return
        if self._is_cut:  # go on at the end of a line
            count = data.find(b"\n") if b"\n" in data else len(data)
            self.lost += count
            data = data[count:]
            self._is_cut = not data
        self._held += data
        if len(self._held) >= _HELD_MAX:
            self._pause(_PATIENCE_S)


def _has_more(pipe: int) -> bool:
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    return any(event & select.POLLIN for _, event in poller.poll(0))


class RelayedFile(LogFile):
    """Reads what a relay has written to its file and what it holds."""

    def __init__(self, relay: Relay, *, keep: int = 0) -> None:
        """Read a relay, which holds from now on what its file does not take.

        Of the bytes that were read the file keeps about `keep`; 0 keeps all.
        """
        super().__init__(relay.file)
        self._keep = keep
        self._freed = 0
        self._relay = relay
        self._read_to = 0
        relay.has_reader = True

    def __repr__(self) -> str:
        return f"<RelayedFile of {self._relay!r}>"

    def read(self, offset: int, now: float) -> bytes | None:
        relay = self._relay
        if relay.error is None:
            data = super().read(offset, now)
        else:
            data = self.read_again(offset, offset + CHUNK)
            if not data and offset < relay.kept:
                relay.skip_file(offset)
                data = relay.read_held(offset, CHUNK)
        self._read_to = offset + len(data or b"")
        self.is_behind = relay.is_behind
        return data

    def read_again(self, start: int, end: int) -> bytes:
        relay = self._relay
        if relay.error is None:
            return super().read_again(start, end)
        data = b""
        end = min(end, start + CHUNK)
        if start < relay.kept:
            data = super().read_again(start, min(end, relay.kept))
        return data + relay.read_held(start + len(data), end - start - len(data))

    def release(self, offset: int) -> None:
        relay = self._relay
        if relay.error is None:
            if self._keep and offset - self._freed > 2 * self._keep:
                self._free(offset - self._keep)
            return
        if self._read_to == relay.end and relay.end - offset >= _HELD_MAX:
            # One line fills the memory, which would not be released before its end.
            relay.lost += relay.end - offset
            offset = relay.end
        relay.release(offset)

    def _free(self, end: int) -> None:
        from elastic_aio.logs.trimmer import free_range  # few streams are that long

        end -= end % 4096
        try:
            free_range(self._relay.file, self._freed, end)
        except OSError:
            self._keep = 0  # the file system cannot do it
        self._freed = end

    def unread(self, offset: int) -> int | None:
        relay = self._relay
        return super().unread(offset) if relay.error is None else max(0, relay.end - offset)

    def close(self) -> None:
        """Stop reading; the relay goes on without a reader."""
        relay = self._relay
        relay.has_reader = False
        if relay.error is not None:
            relay.lost += max(0, relay.end - self._read_to)
            relay.release(relay.end)
