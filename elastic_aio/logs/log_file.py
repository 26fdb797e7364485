"""Reads log files: while a worker writes one (`LogFile`), or the end of one.

`echo text > /dev/stdout` in a worker opens the log file anew with O_TRUNC.  The kernel does not
report the truncation: a file that was truncated and written again can be shorter than before,
longer, or of the same size.  Each read therefore compares the bytes before its offset with the
bytes that were there; if they differ, the file was truncated.

A short file with the same bytes and size counts as opened anew and written again if the time of its
last change differs, and the kernel has reported both.  None of the three suffices: `touch` opens a
file and changes its time, and so does a write that fails; ftruncate(2) and fallocate(2) to the
present size are reported as writes.  All three together by other causes (`truncate -s +0`) show the
file once more, which is better than not at all.

A changed time is judged 50 ms later: write(2) changes the time before the size, and a report may
come after both.  A text that is replaced by the same text sooner is shown once.

`max_bytes` frees the space of the beginning of a file (see `trimmer`), which then reads as zero
bytes; `read_end` returns none of them.
"""

from __future__ import annotations

import os
import stat

# Below malloc's mmap threshold (128 KiB): half the CPU time of chunks of 256 KiB.
CHUNK = 64 * 1024
REST_S = 0.01
"""Seconds for which a file or a pipe that wakes this process too often rests (`WakeLimit`)."""
_COMPARED = 4096
# Longer than a write takes from its change of the time to its change of the size and its report.
_SETTLED_S = 0.05
# Bytes in which the rest of a line is looked for.
_LINE_MAX = 1 << 20
# Bytes at the end of a file in which the last lines are looked for.
_LINES_MAX = 4 << 20

# After so many wake-ups in a window of seconds, what grows rests for a while.
_WINDOW_S = 0.05
WAKES_MAX = 20


class WakeLimit:
    """Counts how often a growing file wakes this process: each line would cost a wake-up."""

    def __init__(self) -> None:
        self._window_end = 0.0
        self._wakes = 0

    def is_exceeded(self, now: float) -> bool:
        """Count a wake-up at a loop time; return whether the file is to rest."""
        if now >= self._window_end:
            self._window_end, self._wakes = now + _WINDOW_S, 0
        self._wakes += 1
        return self._wakes > WAKES_MAX


class LogFile:
    """A log file that grows; must be closed."""

    def __init__(self, descriptor: int) -> None:
        """Read from a descriptor, which this object closes."""
        self._descriptor = descriptor
        self._before = b""  # the last bytes before the offset of the next read
        self._modified_at: int | None = None  # when it had the size that was read last
        self.is_behind = False
        """Whether what was read may end within a write, the rest of which comes at once."""
        self.is_opened = False
        """Whether a process has opened the file since it has grown; set by the owner."""
        self.is_written = False
        """Whether the kernel has reported a write that no read has found yet; set by the owner."""
        self.look_again_at: float | None = None
        """Loop time at which a read may find that the file was written again."""

    def __repr__(self) -> str:
        return f"<LogFile, descriptor {self._descriptor}>"

    def read(self, offset: int, now: float) -> bytes | None:
        """Return bytes from `offset` on, fewer than `CHUNK` at the end of the file.

        None if the file was truncated since the previous read, whose end `offset` is (0 after
        `restart`).  `now` is loop time; infinite if no process writes any more.

        Raises:
            OSError: it cannot be read.
        """
        data = os.pread(self._descriptor, CHUNK, offset)
        # After the data: what follows other bytes than those is no continuation.
        before = self._before
        if before and os.pread(self._descriptor, len(before), offset - len(before)) != before:
            return None
        # The beginning of a longer file is not known any more.
        if offset + len(data) <= _COMPARED and self._is_rewritten(offset, len(data), now):
            return None
        self._before = data[-_COMPARED:] if len(data) >= _COMPARED else (before + data)[-_COMPARED:]
        return data

    def _is_rewritten(self, offset: int, count: int, now: float) -> bool:
        """Whether the same bytes were written again; notes the time of the last change."""
        status = os.fstat(self._descriptor)
        is_read = status.st_size == offset + count
        is_changed = self._modified_at not in (None, status.st_mtime_ns)
        if is_read and is_changed and offset and not count:
            if self.look_again_at is None:
                self.look_again_at = now + _SETTLED_S
            if now < self.look_again_at:
                return False
            if self.is_opened and self.is_written:
                return True
        self.look_again_at = None
        # A process that has opened the file may be about to truncate it.
        self.is_opened = self.is_opened and not count
        self.is_written = False
        self._modified_at = status.st_mtime_ns if is_read else None
        return False

    def restart(self) -> None:
        self._before, self._modified_at, self.look_again_at = b"", None, None

    def read_again(self, start: int, end: int) -> bytes:
        """Return bytes that were read before, a chunk at most; b"" if they are gone.

        Raises:
            OSError: the file cannot be read.
        """
        return os.pread(self._descriptor, min(CHUNK, end - start), start)

    def release(self, offset: int) -> None:
        """Note that nothing before `offset` is read again; memory may be freed."""

    def unread(self, offset: int) -> int | None:
        """Return the number of bytes after `offset`; None if it is unknown."""
        try:
            return max(0, os.fstat(self._descriptor).st_size - offset)
        except OSError:
            return None

    def close(self) -> None:
        os.close(self._descriptor)


def open_log(path: str) -> int:
    """Return the descriptor of a file, or raise an OSError; wait for no writer of a named pipe.

    A link is refused, which a worker of another user may put in the place of its file.
    """
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)


def read_end(path: str, size: int, *, start: int = 0, end: int | None = None) -> bytes:
    """Return at most the last `size` bytes of a file, from the beginning of a line.  Blocks.

    If the last line is longer, they begin within it.  What is before `start` and after `end`, by
    default the end of the file, is left out.

    Raises:
        OSError: it cannot be read.
    """
    return _read_tail(path, size, start, end)[1]


def last_lines(path: str, count: int) -> int:
    """Return the position of the last `count` lines of a file, with an unfinished one.  Blocks.

    Raises:
        OSError: it cannot be read.
    """
    start, tail = _read_tail(path, _LINES_MAX)
    position = len(tail) - tail.endswith(b"\n")
    for _ in range(count):
        position = tail.rfind(b"\n", 0, position)
        if position < 0:
            return start
    return start + (position + 1 if count else len(tail))


def _read_tail(path: str, size: int, start: int = 0, last: int | None = None) -> tuple[int, bytes]:
    """Return the position and the content of the end of a file that `read_end` returns."""
    with open(path, "rb", buffering=0, opener=lambda name, _: open_log(name)) as file:
        descriptor = file.fileno()
        status = os.fstat(descriptor)
        end = status.st_size if last is None else min(last, status.st_size)
        if end <= start and stat.S_ISREG(status.st_mode):
            return end, b""
        start = max(start, end - size)
        begin = _first_line(descriptor, start, end)
        tail = os.pread(descriptor, end - begin, begin)
    cut = tail.find(b"\n") + 1 if begin == start > 0 else 0
    return (begin + cut, tail[cut:]) if cut < len(tail) else (begin, tail)


def _first_line(descriptor: int, start: int, end: int) -> int:
    """Return `start`, or if its bytes were freed, the position of a line after it."""
    try:
        found = os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError:
        return end  # nothing is left
    if found == start:
        return start
    rest = os.pread(descriptor, min(end - found, _LINE_MAX), found)
    return found + rest.find(b"\n") + 1
