"""Capture: standard error that would go to a pipe or a file, passed on and kept for a while.

The last lines that a worker has written say why it failed.  A terminal is left alone, since
programs look for one.  Other streams are pipes to this process, which writes what comes to a
file in the run's directory and passes it on, unchanged and at once:

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

from elastic_aio.logs.line_times import LineTimes
from elastic_aio.logs.lines import fixed_prefix
from elastic_aio.logs.paths import NOT_CAPTURED, CapturedStreams, StreamPlan
from elastic_aio.logs.relay import Relay
from elastic_aio.logs.sink import Sink, open_sink
from elastic_aio.logs.tee import Tee
from elastic_aio.process.streams import StandardStreams
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
        self._sinks: dict[int, Sink] = {}
        self._standard: StandardStreams | None = None

    def __repr__(self) -> str:
        return f"<Capture of {len(self._relays)} streams>"

    def open(self, streams: StandardStreams) -> None:
        """Choose what is captured of the streams that workers would inherit."""
        self._standard = streams
        self.streams = _choose(streams.inherited(1), streams.inherited(2))

    def follow(
        self,
        tee: Tee,
        relay: Relay,
        plan: StreamPlan,
        stream: str,
        on_lost: Callable[[str, int | None], None],
        times: LineTimes,
    ) -> int:
        """Pass a stream on as it comes; return its token of the tee.

        Raises:
            OSError: no descriptor is left.
        """
        assert plan.path is not None, "a captured stream has a file"
        self._relays[plan.path] = relay
        with suppress(OSError):  # the limit of the user is reached
            fcntl.fcntl(relay.writer, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        sink = None if plan.is_muted else self._sink(1 if stream == "stdout" else 2)
        if sink is not None and sink.lost:
            sink = None  # this process has no such stream
        report = None if sink is None else on_lost
        relay.on_closed = partial(self._on_closed, relay, plan.path, report)
        return tee.follow_relay(
            relay,
            sink,
            fixed_prefix(""),
            on_lost,
            is_shown=sink is not None,
            is_raw=True,
            times=times,
        )

    def read_now(self, path: str | None) -> None:
        """Take what a worker has written by now, if this is the file of a captured stream."""
        if path is not None and (relay := self._relays.get(path)) is not None:
            relay.read_now()

    def close(self) -> None:
        """Close the streams of this process.  Idempotent."""
        while self._sinks:
            self._sinks.popitem()[1].close()

    def _on_closed(
        self, relay: Relay, path: str, on_lost: Callable[[str, int | None], None] | None
    ) -> None:
        self._relays.pop(path, None)
        with suppress(OSError):  # it could not be made
            if not os.stat(path).st_size:
                os.unlink(path)
        if relay.lost and on_lost is not None:
            on_lost("neither its log file nor the console took them", relay.lost)

    def _sink(self, number: int) -> Sink:
        if number not in self._sinks:
            assert self._standard is not None, "open() comes first"
            name = "stdout" if number == 1 else "stderr"
            self._sinks[number] = open_sink(name, self._standard.inherited(number))
        return self._sinks[number]


def _choose(out: int, err: int) -> CapturedStreams:
    """Return what is captured, given the descriptors that workers would inherit."""
    if os.isatty(err):
        return CapturedStreams(has_muted=True)
    out_file, err_file = os.fstat(out), os.fstat(err)
    is_joined = os.path.samestat(out_file, err_file) and any(
        has_kind(err_file.st_mode) for has_kind in _ORDERED
    )
    streams = Std.ALL if is_joined else Std.ERR
    return CapturedStreams(streams, is_joined=is_joined, has_muted=True)
