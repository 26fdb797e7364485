"""Capture: standard error that would go to a pipe or a file, passed on and kept for a while.

The last lines that a worker has written say why it failed.  A terminal is left alone, since
programs look for one.  Other streams are pipes to this process, which writes what comes to a
file in the run's directory, made by the first byte, and passes it on, unchanged and at once:

* A worker does not wait for the console: what that does not take stays in the file.
* A full disk fails no worker: what the file does not take stays in memory (see `relay`).
* `echo text > /dev/stderr` opens a pipe anew, as before; it would truncate a file.

A worker waits while this process is suspended, if it writes more than the pipe holds, which is
a megabyte where the host allows it.

If standard output and standard error of this process are one file (`2>&1`), both streams of a
worker are one pipe, so that their order stays.  They are then one text for the report too.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from elastic_aio.logs.console import ConsoleStreams, Sink
from elastic_aio.logs.lines import fixed_prefix
from elastic_aio.logs.paths import NOT_CAPTURED, CapturedStreams, StreamPlan
from elastic_aio.logs.relay import Relay
from elastic_aio.logs.streams import LoggedStream
from elastic_aio.logs.tee import Tee
from elastic_aio.spec.logs import Std

# The most that a user may set by default (pipe-max-size in pipe(7)).
_PIPE_SIZE = 1 << 20
_ORDERED = (stat.S_ISFIFO, stat.S_ISREG, stat.S_ISSOCK)


class Capture:
    """The captured streams of a job's workers; must be closed after their tee."""

    def __init__(self) -> None:
        """Begin without captured streams."""
        self.streams: CapturedStreams = NOT_CAPTURED
        self._relays: dict[str, Relay] = {}  # those that are being read, by path
        self._joined: dict[str, Sink] = {}  # where both streams of a worker go, by path
        self._unkept: dict[str, bytes] = {}  # the end of closed streams that no file has
        self._console: ConsoleStreams | None = None
        self._makes_files = False

    def __repr__(self) -> str:
        return f"<Capture of {len(self._relays)} streams>"

    def open(self, inherited: tuple[int, int], shown: ConsoleStreams) -> None:
        """Choose what is captured of the streams that workers would inherit.

        Args:
            inherited: the descriptors of these.
            shown: where tee'd output is shown; text streams get these streams too.
        """
        objects = [None if isinstance(item, int) else item for item in (shown.out, shown.err)]
        self.streams = _choose(inherited, *objects)
        out, err = (
            own if item is None else item for own, item in zip(inherited, objects, strict=True)
        )
        self._console = ConsoleStreams((out, err), inherited)

    def follow(
        self,
        tee: Tee,
        relay: Relay,
        plan: StreamPlan,
        stream: str,
        on_lost: Callable[[str, int | None], None],
        logged: LoggedStream,
    ) -> int:
        """Pass a stream on as it comes; return its token of the tee.

        Raises:
            OSError: no descriptor is left.
        """
        assert plan.path is not None, "a captured stream has a file"
        self._relays[plan.path] = relay
        logged.make = partial(_make_file, relay)
        with suppress(OSError):  # the limit of the user is reached
            fcntl.fcntl(relay.writer, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        if self._makes_files:
            _make_file(relay)
        sink = None if plan.is_muted else self._sink(stream)
        if sink is not None and sink.lost:
            if self.streams.is_joined and sink.has_descriptor:
                relay.finish()  # its reader has gone, see `on_console_lost`
            sink = None  # this process has no such stream
        if sink is not None and self.streams.is_joined:
            self._joined[plan.path] = sink
        report = None if sink is None else on_lost
        relay.on_closed = partial(self._on_closed, relay, plan.path, report)
        return tee.follow_relay(
            relay,
            sink,
            fixed_prefix(""),
            on_lost,
            is_shown=sink is not None,
            is_raw=True,
            times=logged.times,
        )

    def make_files(self) -> None:
        """Make the files of the present streams, and those of later ones when they begin."""
        self._makes_files = True
        for relay in self._relays.values():
            _make_file(relay)

    def read_now(self, path: str | None) -> bytes:
        """Take what a worker has written by now, if this is the file of a captured stream.

        Returns:
            The end of what the file has not taken; b"" if it has all.
        """
        if path is None or (relay := self._relays.get(path)) is None:
            return b""
        relay.read_now()
        return relay.unkept_end

    def pop_unkept(self, path: str | None) -> bytes:
        """Return the end of what the file of a closed stream has not taken, and forget it."""
        return b"" if path is None else self._unkept.pop(path, b"")

    def on_console_lost(self, sink: Sink) -> None:
        """Close the pipes of workers whose standard output went there.

        The reader has gone, as in `2>&1 | head`: they get SIGPIPE, as without capture.
        """
        for path, own in [*self._joined.items()]:
            if own is sink and sink.has_descriptor and path in self._relays:
                self._relays[path].finish()

    def close(self) -> None:
        """Close the streams of this process.  Idempotent."""
        if self._console is not None:
            self._console.close()

    def _on_closed(
        self, relay: Relay, path: str, on_lost: Callable[[str, int | None], None] | None
    ) -> None:
        self._relays.pop(path, None)
        self._joined.pop(path, None)
        if relay.unkept_end:
            self._unkept[path] = relay.unkept_end
        if relay.is_made:
            with suppress(OSError):  # it was removed
                if not os.stat(path).st_size:
                    os.unlink(path)
        if relay.lost and on_lost is not None:
            on_lost("neither its log file nor the console took them", relay.lost)

    def _sink(self, stream: str) -> Sink:
        assert self._console is not None, "open() comes first"
        return self._console.sink(stream)


def _make_file(relay: Relay) -> bool:
    """Make the file for a reader; return whether it can be opened now, if ever."""
    with suppress(OSError):  # the next reader, or the first byte, tries again
        relay.make_file()
    return relay.is_made or relay.error is not None


def _choose(inherited: tuple[int, int], out: object, err: object) -> CapturedStreams:
    """Return what is captured.

    Args:
        inherited: descriptors of the streams that workers would inherit.
        out: text stream in place of standard output; None for none.
        err: the same of standard error.
    """
    if out is not None or err is not None:
        streams = Std.ALL if out is not None else Std.NONE
        if out is not None and err is None:
            streams = Std.OUT if os.isatty(inherited[1]) else Std.ALL
        elif out is None:
            streams = Std.ERR
        return CapturedStreams(streams, is_joined=out is err, has_muted=True)
    if os.isatty(inherited[1]):
        return CapturedStreams(has_muted=True)
    out_file, err_file = map(os.fstat, inherited)
    is_joined = os.path.samestat(out_file, err_file) and any(
        has_kind(err_file.st_mode) for has_kind in _ORDERED
    )
    streams = Std.ALL if is_joined else Std.ERR
    return CapturedStreams(streams, is_joined=is_joined, has_muted=True)
