"""LogReader: the lines of a job's log files as an async iterator.

A reader reads a file when its consumer wants a line, so that a slow consumer costs no memory and
delays no worker.  Bytes outside the page cache are read off the loop, since a disk may be slow.
Files that are read to their ends are watched by inotify: a reader that waits costs nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count

from elastic_aio.aio import create_task, read_cached, run_in_thread
from elastic_aio.logs.inotify import InotifyWatcher
from elastic_aio.logs.lines import LogLine, RawSplitter
from elastic_aio.logs.log_file import open_log
from elastic_aio.logs.streams import LoggedStream, LoggedStreams

# Bytes of one read.
_CHUNK = 128 * 1024


class LogReader:
    """An async iterator over the lines of some streams; made by `Agent.logs`.

    Ends after the last line, and closes the files.  A reader that is left earlier must be closed:
    use `async with`, or `aclose`.

    Cancellation: loses no line.
    """

    def __init__(
        self,
        streams: LoggedStreams,
        is_chosen: Callable[[LoggedStream], bool],
        *,
        follow: bool,
        since: float = 0.0,
        quiet: float | None = None,
    ) -> None:
        """Read the chosen streams, with `follow` until the job is over.

        Lines that were seen before the Unix time `since` are left out.  An unfinished line that has
        not grown for `quiet` seconds is a line too, and one again when it has grown.
        """
        self._quiet = quiet
        self._streams = streams
        self._is_chosen = is_chosen
        self._follow = follow
        self._since = since
        self._lines: deque[LogLine] = deque()
        self._known: set[LoggedStream] = set()
        self._ready: deque[_OpenLog] = deque()
        self._waiting: set[_OpenLog] = set()  # for more
        self._watched: dict[int, _OpenLog] = {}  # by token
        self._tokens = count()
        self._watcher: InotifyWatcher | None = None
        self._reading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        streams.on_change[self] = self._on_change
        self._look_for_more()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._ready)} files to read"
        return f"<LogReader, {state}, {len(self._waiting)} watched>"

    def __aiter__(self) -> LogReader:
        return self

    async def __anext__(self) -> LogLine:
        if self._lines or await self._wait_lines():
            return self._lines.popleft()
        raise StopAsyncIteration

    async def batch(self) -> list[LogLine]:
        """Return the next lines, as many as were read at once; none at the end.

        A program that takes many lines at a time needs half the time of an iteration.

        Cancellation: loses no line.
        """
        await self._wait_lines()
        lines = [*self._lines]
        self._lines.clear()
        return lines

    async def _wait_lines(self) -> bool:
        while not self._lines:
            if self._is_closed or not await self._fill():
                await self.aclose()
                return False
        return True

    async def __aenter__(self) -> LogReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the files: the next line requested raises `StopAsyncIteration`.  Idempotent."""
        self._is_closed = True
        self._streams.on_change.pop(self, None)
        self._lines.clear()
        self._changed.set()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._reading is not None:
            await asyncio.wait([self._reading])
        logs = [*self._ready, *self._waiting]
        self._ready.clear()
        self._waiting.clear()
        self._watched.clear()
        for log in logs:
            log.close()

    def _on_change(self) -> None:
        self._look_for_more()
        self._changed.set()

    async def _fill(self) -> bool:
        """Read a chunk of the next file, or wait for more; return whether there may be any."""
        self._changed.clear()
        is_over = self._streams.is_closed
        self._look_for_more()
        until = self._keep_quiet()
        if self._lines:
            return True
        if self._ready:
            await self._read_next(self._ready[0])
            return True
        if not self._waiting and (is_over or not self._follow):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        return True

    def _keep_quiet(self) -> float | None:
        """Keep unfinished lines that have been quiet; return when the next one will have been."""
        if (quiet := self._quiet) is None:
            return None
        due = asyncio.get_running_loop().time() - quiet
        self._lines.extend(log.unfinished_line() for log in self._waiting if log.grown_at <= due)
        until = min((log.grown_at + quiet for log in self._waiting), default=math.inf)
        return None if until == math.inf else until

    def _look_for_more(self) -> None:
        """Make new and ended streams ready."""
        for stream in self._streams:
            if stream not in self._known and self._is_chosen(stream):
                self._known.add(stream)
                self._ready.append(_OpenLog(stream))
        for log in [*self._waiting]:
            if log.stream.is_complete:
                self._resume(log)

    async def _read_next(self, log: _OpenLog) -> None:
        if self._reading is None:
            # Before the read: bytes that are written after it are not the last.
            is_last = log.stream.is_complete or not self._follow
            if not is_last and log.is_at_end:
                self._watch(log)
            log.has_grown = False
            if (found := log.read_cached(is_last=is_last)) is not None:
                self._take(log, *found, is_last=is_last)
                await asyncio.sleep(0)  # yield to other tasks
                return
            # In a task of its own: a cancelled call would lose what it has read.
            self._reading = create_task(self._read(log, is_last=is_last), name="read logs")
        await asyncio.wait([self._reading])
        reading, self._reading = self._reading, None
        reading.result()

    async def _read(self, log: _OpenLog, *, is_last: bool) -> None:
        self._take(log, *await log.read(is_last=is_last), is_last=is_last)

    def _take(self, log: _OpenLog, lines: list[LogLine], is_at_end: bool, *, is_last: bool) -> None:
        """Keep lines of the first ready file, and decide when it is read again."""
        if self._is_closed:
            return
        if self._since:
            lines = [line for line in lines if line.time >= self._since]
        self._lines.extend(lines)
        if is_at_end and is_last:
            log.close()
        was_at_end, log.is_at_end = log.is_at_end, is_at_end
        self._ready.popleft()
        # A second read that finds nothing comes after the watch.
        if not is_at_end or (not was_at_end and not is_last):
            self._ready.append(log)
        else:
            self._set_aside(log)

    def _set_aside(self, log: _OpenLog) -> None:
        if log.is_closed:
            self._watched.pop(log.token, None)
            if self._watcher is not None:
                self._watcher.remove(log.token)
        elif log.has_grown:
            self._ready.append(log)
        else:
            self._waiting.add(log)

    def _watch(self, log: _OpenLog) -> None:
        if self._watcher is None:
            self._watcher = InotifyWatcher(self._on_events)
        if log.token < 0:
            log.token = next(self._tokens)
            self._watched[log.token] = log
            self._watcher.add(f"/proc/self/fd/{log.descriptor}", log.token)

    def _on_events(self, events: Mapping[int, int]) -> None:
        for token in events:
            if (log := self._watched.get(token)) is not None:
                log.has_grown = True
                self._resume(log)

    def _resume(self, log: _OpenLog) -> None:
        if log in self._waiting:
            self._waiting.remove(log)
            self._ready.append(log)
            self._changed.set()


class _OpenLog:
    def __init__(self, stream: LoggedStream) -> None:
        self.stream = stream
        self.is_at_end = False
        self.has_grown = False
        self.is_closed = False
        self.token = -1
        self.descriptor = -1
        self._splitter = RawSplitter(stream.begin)
        self._missed: int | None = 0
        self.grown_at = math.inf  # loop time of the end of an unfinished line, until returned
        if not stream.is_complete:
            # Now: it may be removed when the job ends, which is soon maybe.
            stream.make()
            with suppress(OSError):  # no descriptor is left: it is opened when it is read
                self.descriptor = open_log(stream.path)

    def __repr__(self) -> str:
        return f"<_OpenLog {self.stream.path} at {self._splitter.offset}>"

    def read_cached(self, *, is_last: bool) -> tuple[list[LogLine], bool] | None:
        """Do as `read` if the page cache has the next bytes, else return None."""
        if self.descriptor < 0:
            return None
        try:
            size = self._find_data()
            data = read_cached(self.descriptor, self._splitter.offset, size)
            return None if data is None else self._lines_of(data, is_last=is_last)
        except OSError:
            return self._gone(), True

    async def read(self, *, is_last: bool) -> tuple[list[LogLine], bool]:
        """Read a chunk; return its lines, and whether the end of the file is reached.

        With `is_last` an unfinished line at the end is complete.
        """
        try:
            if self.descriptor < 0:
                if not self.stream.is_complete and not self.stream.make():
                    return [], True  # for a full disk, for example; it is tried again
                self.descriptor = await run_in_thread(open_log, self.stream.path, daemon=True)
            size = self._find_data()
            offset = self._splitter.offset
            data = await run_in_thread(os.pread, self.descriptor, size, offset, daemon=True)
            return self._lines_of(data, is_last=is_last)
        except OSError:
            return self._gone(), True

    def _lines_of(self, data: bytes, *, is_last: bool) -> tuple[list[LogLine], bool]:
        start = self._splitter.offset
        if data[:1] == b"\0" and os.lseek(self.descriptor, start, os.SEEK_DATA) > start:
            return [], False  # the first bytes were removed
        status = os.fstat(self.descriptor)
        seen_at = status.st_mtime
        lines = self._split(data, start, seen_at)
        if data:
            self.grown_at = asyncio.get_running_loop().time() if self._splitter.held else math.inf
        is_at_end = not data or self._splitter.offset >= status.st_size
        if is_at_end and is_last and (self._splitter.held or self._missed != 0):
            lines.append(self._line(self._splitter.held, seen_at))
            self._splitter.finish()
        return lines, is_at_end

    def unfinished_line(self) -> LogLine:
        self.grown_at = math.inf
        return self._line(self._splitter.held, os.fstat(self.descriptor).st_mtime)

    def _gone(self) -> list[LogLine]:
        self.stream.is_complete = True
        self._missed = self.stream.times.end or None
        return [self._line(b"", 0.0)] if self.stream.times.end else []

    def _find_data(self) -> int:
        """Skip to data if the next bytes were removed; return how much to read."""
        size = os.fstat(self.descriptor).st_size
        if size < self._splitter.offset:  # it was truncated
            self._missed = None
            self._splitter = RawSplitter()
        if (offset := self._splitter.offset) < size:
            found = os.lseek(self.descriptor, offset, os.SEEK_DATA)
            if found > offset:
                lost = found - self._splitter.needed
                self._missed = None if self._missed is None else self._missed + lost
                self._splitter = RawSplitter(found)
        return min(size - self._splitter.offset, _CHUNK)

    def _split(self, data: bytes, start: int, seen_at: float) -> list[LogLine]:
        """Return the lines of the next bytes; the bytes after the last line are held."""
        lines: list[LogLine] = []
        begin = 0
        splitter = self._splitter
        if self._missed and start and not splitter.held and data:
            # The rest of a line whose beginning is gone.
            begin = data.find(b"\n") + 1
            self._missed += begin
            splitter.offset += begin
        for end, time in self.stream.times.spans(start + begin, start + len(data), seen_at):
            whole = splitter.lines(data[begin : end - start])
            begin = end - start
            if whole and self._missed != 0:
                lines.append(self._line(whole.pop(0), time))
            own = self.stream
            # The fastest way to make some hundred thousand of them in a second.
            make = partial(LogLine, own.rank, own.stream, own.attempt, time)
            if own.child:
                make = partial(make, missed=0, child=own.child)
            lines += map(make, whole)
        return lines

    def _line(self, raw: bytes, time: float) -> LogLine:
        missed, self._missed = self._missed, 0
        own = self.stream
        return LogLine(own.rank, own.stream, own.attempt, time, raw, missed, own.child)

    def close(self) -> None:
        self.is_closed = True
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
