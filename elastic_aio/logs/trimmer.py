"""LogTrimmer: keeps log files small by freeing the disk space of their beginnings.

Workers write to their files by descriptors of their own, so a file cannot be renamed away from
them, and a copy of its end would lose what they write during the copy.  fallocate(2) with
FALLOC_FL_PUNCH_HOLE frees the space of a range in place: positions stay, nothing is copied, and a
freed range reads as zero bytes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from msgspec import Struct

from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.text import error_reason

_PUNCH_HOLE_KEEP_SIZE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_BLOCK = 4096
# The tee compares these bytes before its position with what they were (see `log_file`).
_COMPARED = 2 * _BLOCK
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def free_range(descriptor: int, start: int, end: int) -> None:
    """Free the disk space of a range between multiples of 4096, or raise an OSError."""
    if _libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _TrimmedFile(Struct):
    path: str
    needed: Callable[[], int | None]
    on_error: Callable[[str], None]
    freed: int = 0


class LogTrimmer:
    """Watches files, and frees the space of their beginnings; must be closed."""

    def __init__(self, max_bytes: int) -> None:
        """Let each file take about `max_bytes` of disk space."""
        self._max_bytes = max_bytes
        self._watcher = InotifyWatcher(self._on_events)
        self._files: dict[int, _TrimmedFile] = {}

    def __repr__(self) -> str:
        return f"<LogTrimmer of {len(self._files)} files>"

    def add(
        self,
        path: str,
        needed: Callable[[], int | None],
        on_error: Callable[[str], None],
    ) -> None:
        """Watch a file.

        `needed` returns the position from which on the tee has not shown it, None if no tee does;
        `on_error` gets the reason if the file system cannot free a range.
        """
        token = len(self._files)
        self._files[token] = _TrimmedFile(path, needed, on_error)
        self._watcher.add(path, token)

    def close(self) -> None:
        """Free what is due, and stop.  Idempotent."""
        self._watcher.close()
        for file in self._files.values():
            with suppress(OSError):
                self._trim(file)
        self._files.clear()

    def _on_events(self, events: Mapping[int, int]) -> None:
        for token in events:
            if (file := self._files.get(token)) is None:
                continue
            try:
                self._trim(file)
            except OSError as error:
                self._watcher.remove(token)
                file.on_error(error_reason(error))

    def _trim(self, file: _TrimmedFile) -> None:
        size = os.stat(file.path).st_size
        if size < file.freed:  # it was truncated
            file.freed = 0
        if size - file.freed <= self._max_bytes:
            return
        end = size - self._max_bytes // 2
        if (needed := file.needed()) is not None:
            end = min(end, needed - _COMPARED)
        end -= end % _BLOCK
        if end <= file.freed:
            return
        with open(os.open(file.path, os.O_WRONLY | os.O_CLOEXEC), "wb", buffering=0) as opened:
            free_range(opened.fileno(), file.freed, end)
        file.freed = end
