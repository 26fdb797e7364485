"""The end of a log file, without what rotation has freed; all functions block.

`max_bytes` frees the space of the beginning of a file (see `trimmer`), which then reads as zero
bytes.
"""

from __future__ import annotations

import os
from typing import Final

_LINE_MAX: Final = 1 << 20
"""Bytes in which the rest of a line is looked for."""
_LINES_MAX: Final = 4 << 20
"""Bytes at the end of a file in which the last lines are looked for."""


def open_log(path: str) -> int:
    """Open a file for reading; return its descriptor.  A named pipe is not waited for.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def read_end(path: str, size: int) -> bytes:
    """Return at most the last `size` bytes of a file, from the beginning of a line.

    A line that is longer begins anywhere.

    Raises:
        OSError: it cannot be read.
    """
    return _read_tail(path, size)[1]


def last_lines(path: str, count: int) -> int:
    """Return the position at which the last `count` lines of a file begin.

    A last line without an end counts.

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


def _read_tail(path: str, size: int) -> tuple[int, bytes]:
    """Return the position of the end of a file that `read_end` returns, and the end itself."""
    descriptor = open_log(path)
    try:
        end = os.fstat(descriptor).st_size
        start = max(0, end - size)
        begin = _first_line(descriptor, start, end)
        tail = os.pread(descriptor, end - begin, begin)
    finally:
        os.close(descriptor)
    cut = tail.find(b"\n") + 1 if begin == start > 0 else 0
    return (begin + cut, tail[cut:]) if cut < len(tail) else (begin, tail)


def _first_line(descriptor: int, start: int, end: int) -> int:
    """Return `start`, or where a line begins after it if its bytes were freed."""
    try:
        found = os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError:
        return end  # nothing is left
    if found == start:
        return start
    rest = os.pread(descriptor, min(end - found, _LINE_MAX), found)
    return found + rest.find(b"\n") + 1
