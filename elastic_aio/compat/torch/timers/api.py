"""torch.distributed.elastic.timer: `expires`, what clients and servers are made of, and queues.

`LocalTimerClient` and `LocalTimerServer` use a queue of multiprocessing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import Empty
from typing import Any

__all__ = [
    "LocalTimerClient",
    "LocalTimerServer",
    "MultiprocessingRequestQueue",
    "ProcessTimerServer",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
    "send_signal",
]

logger = logging.getLogger(__name__)


class TimerRequest:
    """Acquires the timer `scope_id` of a worker; a negative `expiration_time` releases it."""

    __slots__ = ("expiration_time", "scope_id", "worker_id")

    def __init__(self, worker_id: Any, scope_id: str, expiration_time: float) -> None:
        """Keep who acquires which timer, and until when (Unix seconds)."""
        self.worker_id = worker_id
        self.scope_id = scope_id
        self.expiration_time = expiration_time

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._values()}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TimerRequest) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # the fields can be changed

    def _values(self) -> tuple[Any, ...]:
        return self.worker_id, self.scope_id, self.expiration_time


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
        """End a worker; return False if that is to be tried again."""
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


class _Client:
    """The client that `expires` uses if it is given none."""

    configured: TimerClient | None = None


def configure(timer_client: TimerClient | None) -> None:
    """Set the client that `expires` uses."""
    _Client.configured = timer_client


class expires:
    """A context manager for a block that has to end within `after` seconds."""

    def __init__(
        self, after: float, scope: str | None = None, client: TimerClient | None = None
    ) -> None:
        """Prepare; the timer starts with the block.

        Args:
            after: seconds.
            scope: name of the timer; None is the file and the line of the caller.
            client: acquires the timer; None is that of `configure`.
        """
        if scope is None:
            caller = sys._getframe(1)
            scope = f"{caller.f_code.co_filename}#{caller.f_lineno}"
        self._after = after
        self._scope = scope
        self._client = client

    def __enter__(self) -> None:
        """Start the timer.

        Raises:
            RuntimeError: there is no client.
        """
        client = self._client = self._client or _Client.configured
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
        """Acquire a timer until a time in Unix seconds."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        """Release a timer."""
        self._mp_queue.put(TimerRequest(os.getpid(), scope_id, -1))


class MultiprocessingRequestQueue(RequestQueue):
    """The requests in a queue of multiprocessing."""

    def __init__(self, mp_queue: Any) -> None:
        """Use the queue."""
        self._mp_queue = mp_queue

    def size(self) -> int:
        """Return how many requests wait."""
        return int(self._mp_queue.qsize())

    def get(self, size: int, timeout: float) -> list[TimerRequest]:
        """Return at most `size` requests, after at most `timeout` seconds."""
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


class ProcessTimerServer(TimerServer):
    """The timers of processes, by process id and scope."""

    def __init__(
        self, request_queue: RequestQueue, max_interval: float, daemon: bool = True
    ) -> None:
        """Begin without timers."""
        super().__init__(request_queue, max_interval, daemon)
        self._timers: dict[tuple[Any, str], Any] = {}

    def register_timers(self, timer_requests: Sequence[Any]) -> None:
        """Acquire and release timers."""
        for request in timer_requests:
            key = request.worker_id, request.scope_id
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear_timers(self, worker_ids: set[Any]) -> None:
        """Remove the timers of processes."""
        for key in [key for key in self._timers if key[0] in worker_ids]:
            del self._timers[key]

    def get_expired_timers(self, deadline: float) -> dict[Any, list[Any]]:
        """Return the timers that expire until `deadline`, by process."""
        expired: dict[Any, list[Any]] = {}
        for (worker, _), request in self._timers.items():
            if request.expiration_time <= deadline:
                expired.setdefault(worker, []).append(request)
        return expired


class LocalTimerServer(ProcessTimerServer):
    """Kills the processes whose timers expire."""

    def __init__(self, mp_queue: Any, max_interval: float = 60, daemon: bool = True) -> None:
        """Prepare (see `TimerServer`); `mp_queue` is a queue of multiprocessing."""
        super().__init__(MultiprocessingRequestQueue(mp_queue), max_interval, daemon)

    def _reap_worker(self, worker_id: int) -> bool:
        return send_signal(worker_id, signal.SIGKILL)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a process; return False if that is not possible."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        logger.info("Process with pid=%s does not exist. Skipping", pid)
    except Exception:  # a pid of any type and size: logged, and tried again, as torch does
        logger.exception("Error terminating pid=%s", pid)
        return False
    return True
