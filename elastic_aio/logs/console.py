"""Where the output of workers is shown: descriptors, text streams of Python, or a callback.

A descriptor is written to without blocking (see `sink`).  A text stream in memory, a
notebook's or a test's, is written to as Python code would: its `write` must not block.
"""

from __future__ import annotations

import asyncio
import codecs
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from elastic_aio.aio import create_task
from elastic_aio.logs.lines import LogLine
from elastic_aio.logs.sink import Sink, SinkLost, open_sink

if TYPE_CHECKING:
    from elastic_aio.logs.reader import LogReader

_LINES_AT_ONCE = 100


class TextOutput(Protocol):
    """What a console needs of a text stream."""

    def write(self, text: str, /) -> object:
        """Take a text."""

    def flush(self) -> object:
        """Show it."""


ConsoleTarget = tuple[int | TextOutput, int | TextOutput] | TextOutput | Callable[[LogLine], object]
"""The shown stdout and stderr, each a descriptor or a text stream; one stream for both; or a
function that gets every line.  Streams and functions are called on the event loop."""


class TextSink(Sink):
    """A text stream as a sink."""

    def __init__(self, name: str, stream: TextOutput) -> None:
        """Write to `stream`, which stays open."""
        super().__init__(name, -1, None)
        self.lost = None
        self.users = 1
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def write(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            SinkLost: the stream raised an exception.
        """
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
    """Drops what is written."""

    def write(self, text: str, /) -> None:
        pass

    def flush(self) -> None:
        pass


class ConsoleStreams:
    """The shown stdout and stderr of a job.

    Attributes:
        out: descriptor or text stream.
        err: likewise.
        callback: gets every line that is shown; None for none.
    """

    def __init__(self, target: ConsoleTarget | None, inherited: tuple[int, int]) -> None:
        """Find what a target means.

        None stands for this process's own streams: the `inherited` descriptors, unless
        `sys.stdout` or `sys.stderr` has been replaced by another stream.
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
        """Return the sink of `stdout` or `stderr`.

        Raises:
            OSError: no descriptor is left.
        """
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
        """Begin; `on_error` gets what the function raised, after which it is not called."""
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
