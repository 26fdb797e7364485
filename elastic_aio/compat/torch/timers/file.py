"""Timers by a named pipe: `FileTimerClient`, and a server for programs without a launcher.

The launcher of this library reads the pipe itself (`LaunchSpec.timers`).
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal as signals
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from elastic_aio.compat.torch.timers.api import (
    ProcessTimerServer,
    RequestQueue,
    TimerClient,
    TimerRequest,
    send_signal,
)

__all__ = ["FileTimerClient", "FileTimerRequest", "FileTimerServer"]

logger = logging.getLogger(__name__)

_TRIES = 10
_RETRY_S = 0.1

_PIPE_MAX = 1 << 20
"""Bytes; what a pipe can hold at most, pipe(7)."""

LogEvent = Callable[[str, "FileTimerRequest | None"], None]


class FileTimerRequest(TimerRequest):
    """A `TimerRequest` of a process, with the signal that ends it."""

    __slots__ = ("signal", "version")

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        """Keep which process acquires which timer, until when, and the signal."""
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version = 1
        self.signal = signal

    @property
    def worker_pid(self) -> int:
        """The process id."""
        return int(self.worker_id)

    def _values(self) -> tuple[Any, ...]:
        return *super()._values(), self.version, self.signal

    def to_json(self) -> str:
        """Return the line that is sent, without its newline."""
        return json.dumps(
            {
                "version": self.version,
                "pid": self.worker_pid,
                "scope_id": self.scope_id,
                "expiration_time": self.expiration_time,
                "signal": int(self.signal),
            }
        )


class FileTimerClient(TimerClient):
    """Acquires timers for this process by a named pipe."""

    def __init__(self, file_path: str, signal: int = signals.SIGKILL) -> None:
        """Use the pipe in `TORCHELASTIC_TIMER_FILE`.

        Args:
            file_path: path of the pipe.
            signal: ends this process; 0 or less leaves it alone.
        """
        self._file_path = file_path
        self.signal = signal

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Acquire a timer until a time in Unix seconds.

        Raises:
            BrokenPipeError: there is no server.
            RuntimeError: the name of the timer is too long.
        """
        self._send_request(FileTimerRequest(os.getpid(), scope_id, expiration_time, self.signal))

    def release(self, scope_id: str) -> None:
        """Release a timer; raises as `acquire` does."""
        self._send_request(FileTimerRequest(os.getpid(), scope_id, -1))

    def _send_request(self, request: FileTimerRequest) -> None:
        text = request.to_json()
        if len(text) > select.PIPE_BUF:
            raise RuntimeError(
                f"FileTimerRequest larger than {select.PIPE_BUF} bytes is not supported: {text}"
            )
        descriptor = self._open()
        try:
            os.set_blocking(descriptor, True)
            os.write(descriptor, f"{text}\n".encode("ascii"))
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        for tries_left in reversed(range(_TRIES)):
            try:
                return os.open(self._file_path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if not tries_left:
                    raise BrokenPipeError(
                        "Could not send the FileTimerRequest because FileTimerServer is not"
                        " available."
                    ) from error
            time.sleep(_RETRY_S)  # the server may be about to start
        raise AssertionError("the last try returns or raises")


class _PipeQueue(RequestQueue):
    """The requests in a named pipe."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._descriptor, select.POLLIN)
        self._is_woken = False
        self._rest = b""
        self.is_used = False
        """Whether there was a request yet."""

    def size(self) -> int:
        return 1

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return all that comes in `timeout` seconds, which begin with the very first request.

        So a timer that is released soon is never acquired, as with torch's server.
        """
        if not self.is_used:
            self._poller.poll()  # for a request, or `wake`
            self.is_used = True
        end = time.monotonic() + timeout
        data = self._rest
        is_over = False
        while not is_over:
            left = max(0.0, end - time.monotonic())
            is_over = self._is_woken or not left or not self._poller.poll(left * 1000)
            with suppress(BlockingIOError):
                data += os.read(self._descriptor, _PIPE_MAX)
        *lines, self._rest = data.split(b"\n")
        requests: list[TimerRequest] = []
        for line in filter(None, lines):
            try:
                content = json.loads(line)
                names = ("pid", "scope_id", "expiration_time", "signal")
                requests.append(FileTimerRequest(*(content[name] for name in names)))
            except (ValueError, TypeError, KeyError):
                logger.warning("no timer request: %r", line[:200])
        return requests

    def wake(self) -> None:
        """Let `get` return at once from now on, with all that was written before."""
        self._is_woken = True
        with suppress(BlockingIOError):  # it is full, and wakes the reader too
            os.write(self._descriptor, b"\n")

    def close(self) -> None:
        os.close(self._descriptor)


class FileTimerServer(ProcessTimerServer):
    """Ends the processes whose timers expire, each by the timer's signal; never itself."""

    def __init__(
        self,
        file_path: str,
        run_id: str,
        max_interval: float = 10,
        daemon: bool = True,
        log_event: LogEvent | None = None,
    ) -> None:
        """Make the pipe.

        Args:
            file_path: its path; what is there is removed.
            run_id: name of the run, for the log.
            max_interval: seconds between two looks at the timers.
            daemon: whether the program may end while the thread runs.
            log_event: called with the name of an event and the request, if it has one.
        """
        if os.path.lexists(file_path):
            os.remove(file_path)
        os.mkfifo(file_path)
        self._file_path = file_path
        self._run_id = run_id
        self._pipe = _PipeQueue(file_path)
        super().__init__(self._pipe, max_interval, daemon)
        self._log_event: LogEvent = log_event or (lambda name, request: None)
        self._request_count = 0
        self._last_progress_time = int(time.time())
        self._is_closed = False

    def start(self) -> None:
        """Start the thread."""
        super().start()
        self._log_event("watchdog started", None)

    def stop(self) -> None:
        """End the thread and remove the pipe.  Idempotent."""
        if self._close():
            self._log_event("watchdog stopped", None)

    def run_once(self) -> None:
        """Handle all requests that wait, then stop.  Idempotent."""
        self._close(handles_rest=True)

    def _close(self, *, handles_rest: bool = False) -> bool:
        """Close everything; return False if that has been done before."""
        if self._is_closed:
            return False
        self._is_closed = True
        self._stop_signaled = True
        self._pipe.wake()
        if self._watchdog_thread is not None:
            self._watchdog_thread.join()
            self._watchdog_thread = None
        if handles_rest:
            self._run_watchdog()  # what came after the thread's last look
        self._pipe.close()
        if os.path.lexists(self._file_path):
            os.remove(self._file_path)
        return True

    def _run_watchdog(self) -> None:
        super()._run_watchdog()
        self._last_progress_time = int(time.time())

    def get_last_progress_time(self) -> int:
        """Return when the timers were looked at last, in Unix seconds; now before any request."""
        return self._last_progress_time if self._pipe.is_used else int(time.time())

    @staticmethod
    def is_process_running(pid: int) -> bool:
        """Return whether there is a process that can be signalled."""
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True

    def register_timers(self, timer_requests: Sequence[Any]) -> None:
        """Acquire and release timers."""
        self._request_count += len(timer_requests)
        super().register_timers(timer_requests)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of processes, and of those that have ended."""
        ended = {pid for pid, _ in self._timers if not self.is_process_running(pid)}
        super().clear_timers(worker_ids | ended)

    def _reap_expired(self, worker_id: Any, timers: Sequence[Any]) -> bool:
        for timer in sorted(timers, key=lambda timer: float(timer.expiration_time)):
            self._log_event("timer expired", timer)
            if timer.signal > 0:
                if not self._reap_worker(worker_id, timer.signal):
                    return False
                self._log_event("kill worker process", timer)
                break
        return True

    def _reap_worker(self, worker_id: int, signal: int = signals.SIGKILL) -> bool:
        return send_signal(worker_id, signal)
