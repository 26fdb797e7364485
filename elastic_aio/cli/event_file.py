"""The file of `--events`: each event is a line of JSON.  Only jobs with that option load this."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from elastic_aio.event_json import event_to_json
from elastic_aio.events import Event
from elastic_aio.logs.console import LineWriter, open_sink
from elastic_aio.spec.checks import invalid_value
from elastic_aio.text import error_reason

# O_NONBLOCK: a named pipe without a reader is an error, not a wait.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o666  # without the bits of the umask
# Not opened anew: a socket, such as that of a service of systemd, cannot be, and in a file the
# workers would overwrite the events, from an offset of their own (open(2)).
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}


class EventFile:
    """Appends events to the file of a name.

    If it was renamed or removed, as by logrotate, the next event makes a new one.
    """

    def __init__(self, path: str) -> None:
        """Open the file, or raise UsageError."""
        self._path = path
        try:
            stream = _STREAMS.get(path)
            opened = os.open(path, _FLAGS, _MODE) if stream is None else os.dup(stream)
            self._descriptor = opened
        except OSError as error:
            problem = f"must be a file that can be written: {error_reason(error)}"
            raise invalid_value("--events", problem, path) from error

    def begin(self) -> None:
        """Write on the running event loop, until `close`; OSError: no descriptor is left."""
        try:
            self._status = os.fstat(self._descriptor)
            self._sink = open_sink("events", self._descriptor)
        finally:
            os.close(self._descriptor)
        self._writer = LineWriter(self._sink)

    def on_event(self, event: Event) -> None:
        """Queue an event; never waits."""
        # Not in the middle of a line, and not if the console is the same file.
        if stat.S_ISREG(self._status.st_mode) and self._sink.is_alone:
            with suppress(OSError):  # else the former file takes events yet
                self._follow_name()
        self._writer.put(event_to_json(event) + b"\n")

    def _follow_name(self) -> None:
        with suppress(FileNotFoundError):  # a stat(2) for each event: they are rare
            if os.path.samestat(os.stat(self._path), self._status):
                return
        # Another user may have made a link or file of this name since, as in /tmp.
        descriptor = os.open(self._path, _FLAGS | os.O_NOFOLLOW, _MODE)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid in (os.geteuid(), 0):
                self._sink.reopen(descriptor)
                self._status = status
        finally:
            os.close(descriptor)

    async def close(self, patience: float) -> str | None:
        """Write the rest, while the file takes some within `patience` seconds, and close it.

        Returns why some events are not written; None if all are.

        Cancellation: the file is closed.
        """
        try:
            is_written = await self._writer.drain(patience)
            return self._writer.lost or (None if is_written else "it takes no more")
        finally:
            self._sink.close()
