"""torch.distributed.elastic.timer: deadlines for blocks of a worker's code.

`elastic_aio.worker.expires` needs no client, and the launcher of this library reads the named pipe
of `FileTimerClient` itself (`LaunchSpec.timers`).  What differs on purpose: an expired timer ends
the worker only, as a failure, and not the launcher; the default scope is the caller's line.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal as signals
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty
from typing import Any

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]

logger = logging.getLogger(__name__)

_TRIES = 10
_RETRY_S = 0.1

_PIPE_MAX = 1 << 20
"""The most bytes that a pipe can hold, pipe(7)."""

LogEvent = Callable[[str, "FileTimerRequest | None"], None]


@dataclass
class TimerRequest:
    """Acquires the timer `scope_id` of a worker until `expiration_time`, in Unix seconds.

    A negative time releases it.
    """

    worker_id: Any
    scope_id: str
    expiration_time: float


class TimerClient(ABC):
    """Acquires and releases timers at a server."""

    @abstractmethod
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        """Acquire a timer until a time in Unix seconds."""

    @abstractmethod
    def release(self, scope_id: str) -> None:
        """Release a timer."""


class RequestQueue(ABC):
    """The requests that wait for a server."""

    @abstractmethod
    def size(self) -> int:
        """Return how many requests wait."""

    @abstractmethod
    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return at most `size` requests, after at most `timeout` seconds."""


class TimerServer(ABC):
    """Ends the workers whose timers expire, in a thread of its own."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        """Prepare; the thread looks at the timers every `max_interval` seconds."""
        self._request_queue = request_queue
        self._max_interval = max_interval
        self._daemon = daemon
        self._watchdog_thread: threading.Thread | None = None
        self._stop_signaled = False

    @abstractmethod
    def register_timers(self, timer_requests: Sequence[Any]) -> None:
        """Acquire and release timers."""

    @abstractmethod
    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of workers."""

    @abstractmethod
    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Return the timers that expire until `deadline`, by worker."""

    def _reap_expired(self, worker_id: Any, timers: Sequence[Any]) -> bool:
        """End a worker; return False to try it again."""
        try:
            return self._reap_worker(worker_id)
        except Exception:  # of a subclass: the timers of other workers must still expire
            logger.exception("cannot end worker_id=[%s], whose timers are removed", worker_id)
            return True

    def _reap_worker(self, worker_id: Any) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define _reap_worker()")

    def _watchdog_loop(self) -> None:
        while not self._stop_signaled:
            try:
                self._run_watchdog()
            except Exception:  # of a subclass: the thread goes on, as torch's does
                logger.exception("Error running watchdog")

    def _run_watchdog(self) -> None:
        size = max(1, self._request_queue.size())
        self.register_timers(self._request_queue.get(size, self._max_interval))
        reaped = set()
        for worker, timers in self.get_expired_timers(time.time()).items():
            scopes = [timer.scope_id for timer in timers]
            logger.info("Reaping worker_id=[%s]. Expired timers: %s", worker, scopes)
            if self._reap_expired(worker, timers):
                reaped.add(worker)
            else:
                logger.error("cannot end worker=[%s] yet", worker)
        self.clear_timers(reaped)

    def start(self) -> None:
        """Start the thread."""
        self._watchdog_thread = threading.Thread(
            target=self._watchdog_loop, name="timer server", daemon=self._daemon
        )
        self._watchdog_thread.start()

    def stop(self) -> None:
        """End the thread; it may take `max_interval` seconds."""
        self._stop_signaled = True
        thread, self._watchdog_thread = self._watchdog_thread, None
        if thread is not None:
            thread.join(self._max_interval)


# The client that `expires` uses if it is given none.
_configured: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses."""
    global _configured
    _configured = timer_client


class expires:
    """A context manager for a block that has to end within `after` seconds."""

    def __init__(
        self, after: float, scope: str | None = None, client: TimerClient | None = None
    ) -> None:
        """Prepare; the timer starts with the block.

        Args:
            after: seconds.
            scope: name of the timer; None is the file and the line of the caller.
            client: acquires the timer; None takes the client of `configure`.
        """
        if scope is None:
            caller = sys._getframe(1)
            scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
        self._after = after
        self._scope = scope
        self._client = client

    def __enter__(self) -> None:
        """Start the timer; raise a RuntimeError without a client."""
        client = self._client = self._client or _configured
        if client is None:
            raise RuntimeError("Configure timer client before using countdown timers.")
        client.acquire(self._scope, time.time() + self._after)

    def __exit__(self, *_: object) -> None:
        """Release the timer."""
        assert self._client is not None, "the block was entered"
        self._client.release(self._scope)


# --------------------------------------------------------- queues of multiprocessing


class LocalTimerClient(TimerClient):
    """Acquires timers for this process by a queue of multiprocessing."""

    def __init__(self, mp_queue: Any) -> None:
        """Use the queue of a `LocalTimerServer`."""
        self._mp_queue = mp_queue

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    def __init__(self, mp_queue: Any) -> None:
        self._mp_queue = mp_queue

    def size(self) -> int:
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        end = time.monotonic() + timeout
        requests: list[TimerRequest] = []
        while len(requests) < size:
            left = end - time.monotonic()
            if requests and left <= 0:
                break
            try:
                requests.append(self._mp_queue.get(timeout=max(left, 0)))
            except Empty:
                break
        return requests


class _ProcessTimerServer(TimerServer):
    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        super().__init__(request_queue, max_interval, daemon)
        self._timers: dict[tuple[Any, str], Any] = {}

    def register_timers(self, timer_requests: Sequence[Any]) -> None:
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        expired: dict[Any, list[Any]] = {}
        for (worker, _), request in self._timers.items():
            if request.expiration_time <= deadline:
                expired.setdefault(worker, []).append(request)
        return expired


class LocalTimerServer(_ProcessTimerServer):
    """Kills the processes whose timers expire."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        """Prepare (see `TimerServer`); `mp_queue` is a queue of multiprocessing."""
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        return _send_signal(worker_id, signals.SIGKILL)


def _send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; return False if that is not possible."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.info("Process with pid=%s does not exist. Skipping", pid)
    except Exception:  # a pid of any type and size: logged, and tried again, as torch does
        logger.exception("Error terminating pid=%s", pid)
        return False
    return True


# ------------------------------------------------------------------- a named pipe


@dataclass(init=False)
class FileTimerRequest(TimerRequest):
    """A `TimerRequest` of a process, with the signal that ends it."""

    version: int
    signal: int

    def __init__(
        self, worker_pid: int, scope_id: str, expiration_time: float, signal: int = 0
    ) -> None:
        """Keep which process acquires which timer, until when, and the signal."""
        super().__init__(worker_pid, scope_id, expiration_time)
        self.version, self.signal = 1, signal

    @property
    def worker_pid(self) -> int:
        return int(self.worker_id)

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
        """Use the pipe at `file_path`, which `TORCHELASTIC_TIMER_FILE` names.

        `signal` ends this process; 0 or less leaves it alone.
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
        """Return all requests of `timeout` seconds, which begin with the very first request.

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


class FileTimerServer(_ProcessTimerServer):
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
            file_path: its path, where any file is removed.
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
        """Close everything; return False if that was done before."""
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
        self._request_count += len(timer_requests)
        super().register_timers(timer_requests)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of these processes, and of ended processes."""
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
        return _send_signal(worker_id, signal)
